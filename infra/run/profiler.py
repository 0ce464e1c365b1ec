"""Trace one step with JAX's profiler: function calls on the host, operations on the devices."""

import jax

from infra.host.console import first_line, say, warn


class Profiler:
    """Traces one step of a run on process 0, into a directory that xprof can open.

    If the profiler or the disk fails, the error is printed and the run goes on without a trace.
    """

    def __init__(self, directory: str, step: int):
        self.directory = directory
        # Only process 0 traces, so no call here may be a collective: the other processes would not
        # take part. Steps start at 1, so 0 means no step.
        self.step = step if jax.process_index() == 0 else 0
        self.is_tracing = False

    def begin_step(self, step: int) -> None:
        """Begin the trace if this is the step to trace. Call this before the step's work."""
        if step != self.step:
            return
        try:
            jax.profiler.start_trace(self.directory)
            self.is_tracing = True
        except Exception as e:
            self.warn(e)

    def end_step(self) -> None:
        """Write the trace, if any. Call this once the devices have done the step's work."""
        if not self.is_tracing:
            return
        self.is_tracing = False
        try:
            jax.profiler.stop_trace()
            say(f"step {self.step} is traced: {self.directory}")
        # The profiler's errors, for example on a full disk, have no common class.
        except Exception as e:
            self.warn(e)

    def warn(self, error: Exception) -> None:
        warn(f"step {self.step} has no trace, but the run goes on: {first_line(error)}")
