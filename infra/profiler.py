"""The trace of one step by JAX's profiler: calls of the host and operations of the devices."""

import jax

from infra.log import first_line, say, warn


class Profiler:
    """Traces one step of a run, on process 0, into a directory that xprof opens.

    A fault of the profiler or of the disk is printed, and the run goes on without a trace.
    """

    def __init__(self, directory: str, step: int):
        self.directory = directory
        # Only process 0 writes. The others neither trace nor wait, so that no call here is a
        # collective. No step is 0.
        self.step = step if jax.process_index() == 0 else 0
        self.is_tracing = False

    def begin_step(self, step: int) -> None:
        """Begin to trace if this is the step to trace. To be called before the step's work."""
        if step != self.step:
            return
        try:
            jax.profiler.start_trace(self.directory)
            self.is_tracing = True
        except Exception as e:
            self.warn(e)

    def end_step(self) -> None:
        """Write the trace, if there is one, once the devices have done the step's work."""
        if not self.is_tracing:
            return
        self.is_tracing = False
        try:
            jax.profiler.stop_trace()
            say(f"step {self.step} is traced: {self.directory}")
        # The profiler's errors, such as that of a full disk, have no common class.
        except Exception as e:
            self.warn(e)

    def warn(self, error: Exception) -> None:
        warn(f"step {self.step} has no trace, the run goes on: {first_line(error)}")
