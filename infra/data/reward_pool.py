"""Score answers in worker processes, side by side.

A worker runs reward_worker.py. A reward function that hangs, exits or crashes the interpreter
scores 0 on that answer and costs one worker, which is replaced. What a function does to its process
does not reach the run. A function could still end the run by a signal to its parent process.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from infra.data import reward_worker, rewards
from infra.data.rewards import RewardFunction
from infra.host.console import check

# A call of a function: (number of the function, number of the answer).
Call = tuple[int, int]

# A function that costs this many workers in succession is not called again in this step: otherwise
# each remaining answer might take as long.
MOST_LOST = 16
# Seconds that a worker may take to import the modules of the functions.
START_SECONDS = 300
# The run ends if this many workers in succession cannot start.
MOST_FAILED_STARTS = 3
# Seconds between reads of what workers report: fast functions report in quick succession.
SECONDS_BETWEEN_READS = 0.001
# Seconds after which the pool looks for workers that are late or have ended.
SECONDS_BETWEEN_LOOKS = 0.1
# The file for what functions print starts again beyond this size.
LOG_BYTES = 10 * 2**20
# A worker must not take the devices of the run, and answers may have any characters.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8:backslashreplace"}
# Columns that infra/data/questions.py adds to the rows of the data. Functions do not get them.
TOKEN_COLUMNS = {"prompt", "demonstration_ids"}


# ---------------------------------------------------------------- workers
class Worker:
    """A process that runs reward_worker.py.

    is_ready: whether it has imported the functions. calls: {place in its task: call}, the calls of
    its task that it has not reported. at_once: how many of these run at the same time. limit:
    seconds within which it must report the next one.
    """

    def __init__(self, setup: bytes, log: int):
        """Start the process, which then imports the functions. setup: the first message to the
        process. log: descriptor of the file for what the process prints."""
        self.is_ready = False
        self.is_closed = False
        self.calls = {}
        self.at_once = 1
        self.unread = b""
        self.channel, end_of_worker = socket.socketpair()
        number = end_of_worker.fileno()
        with end_of_worker:
            self.process = subprocess.Popen(
                [sys.executable, reward_worker.__file__, str(number)],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # With a session of its own, Ctrl-C in the terminal does not reach the process, and
                # `kill` reaches what functions have forked.
                start_new_session=True,
                env=os.environ | ENVIRONMENT,
            )
        self.send(setup, START_SECONDS)

    def send(self, message: bytes, limit: float) -> None:
        self.limit = limit
        self.last_heard = time.monotonic()
        # If the process has ended or does not read, `fault` says so later.
        self.channel.settimeout(limit)
        with contextlib.suppress(OSError):
            self.channel.sendall(message)

    def read(self) -> list[tuple[Call, float | str]]:
        """The calls that it has reported since the last `read`, with a score or why they failed."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.channel.recv(2**16)
        self.is_closed = not data
        self.last_heard = time.monotonic()
        *lines, self.unread = (self.unread + data).split(b"\n")
        outcomes = []
        for line in lines:
            message = json.loads(line)
            if message == "ready":
                self.is_ready = True
            else:
                place, outcome = message
                outcomes.append((self.calls.pop(place), outcome))
        return outcomes

    def fault(self, seconds: float) -> str:
        """Why this worker has to be replaced, or "". seconds: the time limit of a call."""
        if self.is_closed or self.process.poll() is not None:
            try:
                code = self.process.wait(1)
            except subprocess.TimeoutExpired:
                return "it closed the descriptors of its process"
            if code < 0:
                return f"its process was ended: {signal.strsignal(-code)}"
            return f"its process exited with code {code}"
        is_late = time.monotonic() - self.last_heard > self.limit
        if is_late and not self.is_ready:
            return f"it was not ready within {self.limit} s"
        return reward_worker.too_slow(seconds) if is_late and self.calls else ""

    def kill(self) -> None:
        """End the process, and what functions have forked there."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)


# ---------------------------------------------------------------- scores
@dataclasses.dataclass
class Scoring:
    """The calls that `score_answers` makes, and how they ended."""

    names: list[str]  # of the functions
    queue: list[Call]  # calls that no worker has, those of one function together
    scores: np.ndarray  # [answers, functions]
    faults: dict[str, dict[int, str]]  # {function name: {i: why it failed on answer i}}
    lost: list[int]  # how many workers in succession each function has cost

    def note(self, call: Call, outcome: float | str) -> None:
        """Note the score of a call that a worker has reported, or why it failed."""
        j, i = call
        self.lost[j] = 0
        if isinstance(outcome, str):
            self.fail(call, outcome)
        else:
            self.scores[i, j] = outcome
            rewards.HAVE_WORKED.add(self.names[j])

    def fail(self, call: Call, reason: str) -> None:
        j, i = call
        self.faults.setdefault(self.names[j], {})[i] = reason

    def lose(self, calls: list[Call], at_once: int, reason: str) -> None:
        """Note that a worker was lost. calls: those of its task that it has not reported, in order.
        The first `at_once` of them had begun: they fail, and the others are made later."""
        for call in calls[:at_once]:
            self.fail(call, reason)
        self.queue[:0] = calls[at_once:]
        j, _ = calls[0]
        self.lost[j] += 1
        if self.lost[j] >= MOST_LOST:
            how = "was too slow" if reason.startswith("TooSlow") else "ended its process"
            for call in self.queue:
                if call[0] == j:
                    self.fail(call, f"not called, as it {how} {MOST_LOST} times in succession")
            self.queue = [call for call in self.queue if call[0] != j]


class RewardPool:
    """Worker processes that score answers, to be used in a `with` statement, which ends them.

    JAX never runs in a worker, and no worker is forked from this process.
    """

    def __init__(self, functions: Sequence[RewardFunction], workers: int, seconds: float, log: str):
        """functions: all that will be called. workers: their number, or 0 for half the cores, from
        1 to 8. seconds: that a function has for one answer. log: file for what functions print."""
        self.functions = list(functions)
        self.size = workers or min(8, max(1, core_count() // 2))
        self.seconds = seconds
        self.log_path = log
        named = [rewards.pickled(function) for function in functions]
        # Import the run's program only if a function is defined there.
        main = rewards.main_file() if any(b"__main__" in name for name in named) else ""
        self.setup = pickle.dumps((sys.path, main, seconds, named))
        self.workers = []
        # A worker that has no task; there is one once a worker was lost.
        self.spare = None
        self.failed_starts = 0

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            worker.kill()
        if self.spare:
            self.spare.kill()
        if self.workers:
            os.close(self.log)
        self.workers = []
        self.spare = None

    def start(self) -> None:
        """Start the workers, unless they are there, without waiting until they are ready."""
        if not self.workers:
            self.log = os.open(self.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self.workers = [Worker(self.setup, self.log) for _ in range(self.size)]

    def score_answers(
        self,
        rows: Sequence[dict],
        answers: Sequence[str],
        truncated: Sequence[bool],
        functions: Sequence[RewardFunction] = (),
    ) -> tuple[np.ndarray, dict[str, dict[int, str]]]:
        """Score every answer with every function.

        rows[i] is the row of the data that answers[i] belongs to. functions: some of the pool's, or
        () for all. Returns (scores, faults): float64 [answers, functions], and {function name: {i:
        why it failed on answers[i]}}. A truncated answer scores 0 with all functions. An answer on
        which a function fails scores 0 with that function. A function that was too slow MOST_LOST
        times in succession, or ended its process, is not called again, and counts as failed on the
        remaining answers.
        """
        self.start()
        functions = functions or self.functions
        names = [rewards.name_of(function) for function in functions]
        asked = [i for i in range(len(answers)) if not truncated[i]]
        queue = [(j, i) for j in range(len(functions)) for i in asked]
        scores = np.zeros((len(answers), len(functions)))
        scoring = Scoring(names, queue, scores, {}, [0] * len(functions))
        # The rows of a group are one object, which is pickled once.
        distinct = {id(row): row for row in rows}
        row_bytes = {key: pickle.dumps(documented(row)) for key, row in distinct.items()}
        arguments = [(row_bytes[id(row)], text) for row, text in zip(rows, answers, strict=True)]

        while scoring.queue or any(worker.calls for worker in self.workers):
            for worker in self.workers:
                is_free = worker.is_ready and not worker.calls and worker.process.poll() is None
                if is_free and scoring.queue:
                    self.give(worker, functions, scoring, arguments)
            time.sleep(SECONDS_BETWEEN_READS)
            channels = [worker.channel for worker in self.workers]
            heard = multiprocessing.connection.wait(channels, SECONDS_BETWEEN_LOOKS)
            for worker in self.workers.copy():
                if worker.channel in heard:
                    for call, outcome in worker.read():
                        scoring.note(call, outcome)
                # What a worker has sent is read before the worker is replaced.
                if worker.channel not in heard or worker.is_closed:
                    self.replace_if_lost(worker, scoring)
            if os.fstat(self.log).st_size > LOG_BYTES:
                os.ftruncate(self.log, 0)
        return scores, scoring.faults

    def give(self, worker, functions, scoring, arguments) -> None:
        """Give calls of one function to a worker."""
        # The first shares are large, to save messages; the last ones are small, so that all workers
        # end together. A single worker gets all.
        share = math.ceil(len(scoring.queue) / (2 * len(self.workers) - 1))
        j, _ = scoring.queue[0]
        calls = list(itertools.takewhile(lambda call: call[0] == j, scoring.queue[:share]))
        del scoring.queue[: len(calls)]
        worker.calls = dict(enumerate(calls))
        number = self.functions.index(functions[j])
        task = number, [arguments[i] for _, i in calls]
        worker.at_once = reward_worker.calls_at_once(functions[j])
        # The worker itself cancels an async call when its time is up, and needs a moment for that.
        extra = 1 if worker.at_once > 1 else 0
        worker.send(pickle.dumps(task), self.seconds + extra)

    def replace_if_lost(self, worker: Worker, scoring: Scoring) -> None:
        """If a worker hangs or has ended, put another one in its place."""
        fault = worker.fault(self.seconds)
        if not fault:
            return
        worker.kill()
        self.failed_starts = 0 if worker.is_ready else self.failed_starts + 1
        check(
            self.failed_starts < MOST_FAILED_STARTS,
            f"the processes that score answers cannot start: {fault}: {last_line(self.log_path)}",
        )
        # Start a spare one, too: the next worker that is lost is then replaced at once.
        place = self.workers.index(worker)
        self.workers[place] = self.spare or Worker(self.setup, self.log)
        self.spare = Worker(self.setup, self.log)
        if worker.calls:
            scoring.lose([*worker.calls.values()], worker.at_once, fault)


def core_count() -> int:
    """Number of cores that this process may use."""
    # macOS has no affinity.
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def documented(row: dict) -> dict:
    """The columns of a row that functions get: those of the data."""
    return {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}


def last_line(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = f.read().splitlines()
    return f"{lines[-1]} ({path})" if lines else f"{path} is empty"
