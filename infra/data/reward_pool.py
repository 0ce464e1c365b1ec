"""Score answers in worker processes, side by side.

    run  <-- pipe -->  supervisor  <-- a socket each -->  workers, which call the reward functions
                                   <-- scores in shared memory --

The run forks the supervisor before JAX looks for devices, and the supervisor forks the workers. So
a worker starts within milliseconds with all that train.py has imported, and without JAX threads.
A reward function that hangs or ends its process scores 0 on that answer and costs one worker,
which is replaced. If the function is an `async def`, all its calls that were running in that worker
score 0. A function can damage only its own worker, unless the function signals other processes. A
function that starts a program in a new session must also end that program.
"""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import inspect
import itertools
import json
import math
import mmap
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import jax
import numpy as np

from infra.data.rewards import RewardFunction, name_of
from infra.host.console import check, first_line, open_streams, streams_are_open
from infra.host.processes import all_gather_processes

# A call of a function: (number of the function, number of the answer).
Call = tuple[int, int]

# Scores must lie between -MAX_REWARD and MAX_REWARD, so that their squares fit in float32.
MAX_REWARD = 1e6
# At most this many calls of an `async def` function run at the same time in a worker.
AT_ONCE = 64
# A function that costs this many workers in succession is not called again in this step: otherwise
# each remaining answer might take --reward_timeout, too.
MAX_LOST = 16
# A function that has never worked counts as broken once it fails on all answers of a step, if
# there are at least this many: fewer failures may be chance. The first time, the answers must also
# belong to two questions or more.
MIN_FAILED = 4
# A worker gets a task of at most this many calls at a time: its shared memory has room for that
# many scores.
MAX_CALLS = 4096
# Maximum seconds between the supervisor's checks for scores and for late or ended workers.
SECONDS_BETWEEN_LOOKS = 0.1
# The file that functions print to is emptied when it is larger than this.
LOG_BYTES = 10 * 2**20
# Columns that infra/data/questions.py adds to the rows of the data. Functions do not get them.
TOKEN_COLUMNS = {"prompt_ids", "demonstration_ids"}

# The signals that are for the run, and not for its workers.
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}

FORK = multiprocessing.get_context("fork")


# ---------------------------------------------------------------- the run
class RewardPool:
    """Processes that score answers, to be used in a `with` statement, which ends them.

    Make it before JAX looks for devices: a process that is forked later may hang.
    """

    def __init__(self, functions: Sequence[RewardFunction], workers: int, seconds: float, log: str):
        """functions: train.py's SOLVED, then the functions of its REWARDS. workers: number of
        workers, or 0 for `default_workers`. seconds, log: see Supervisor."""
        self.names = [name_of(function) for function in functions]
        # Names of the functions that have returned a score since this process began.
        self.have_worked = set()
        # {function name: ids of the rows on which the function has failed}
        self.failed_rows = collections.defaultdict(set)
        # {function name: number of reports with failures}
        self.failed_reports = collections.Counter()
        self.channel, theirs = FORK.Pipe()
        # Call a function once for each answer, even if it is SOLVED and also one of REWARDS.
        distinct = {id(function): function for function in functions}
        self.columns = [[*distinct].index(id(function)) for function in functions]
        called = [*distinct.values()]
        supervisor = Supervisor(theirs, called, workers or default_workers(), seconds, log)
        self.process = FORK.Process(target=supervisor.main, args=[self.channel])
        self.process.start()
        theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(None)
        self.channel.close()
        self.process.join(10)
        self.process.kill()

    def score_answers(
        self, rows: Sequence[dict], answers: Sequence[str], truncated: Sequence[bool]
    ) -> tuple[np.ndarray, dict[str, dict[int, str]]]:
        """Score every answer with every function.

        rows[i] is the row of the data that answers[i] belongs to. Returns (scores, faults): float64
        [answers, functions], and {function name: {i: why it failed on answers[i]}}. A truncated
        answer scores 0 with all functions. An answer on which a function fails scores 0 with that
        function. A function that cost MAX_LOST workers in succession, by being too slow or by
        ending its process, is not called again, and counts as failed on the remaining answers.
        Raises OSError if the process that starts workers has ended.
        """
        # All answers to a question share one row object, which is pickled once.
        distinct = {id(row): row for row in rows}
        row_bytes = {key: pickle.dumps(data_columns(row)) for key, row in distinct.items()}
        arguments = [(row_bytes[id(row)], text) for row, text in zip(rows, answers, strict=True)]
        try:
            self.channel.send((arguments, np.asarray(truncated)))
            scores, faults, worked = self.channel.recv()
        except (EOFError, OSError):
            # The kernel may have killed the supervisor because memory ran out.
            raise OSError("the process that starts reward workers has ended") from None
        self.have_worked.update(worked)
        for name, messages in faults.items():
            self.failed_rows[name].update(id(rows[i]) for i in messages)
        return scores[:, self.columns], faults

    def by_name(self, scores: np.ndarray) -> dict:
        """Returns {name in metrics and samples: a column of scores, or one answer's score}.

        scores: [answers, functions], or [functions] for one answer.
        """
        names = ["solved"] + [f"reward/{name}" for name in self.names[1:]]
        return dict(zip(names, scores.T, strict=True))

    def report(self, faults: dict[str, dict[int, str]]) -> int:
        """Print which functions failed, and why. Returns this process's number of failures.

        faults: from `score_answers`. Exits with code 2 in all processes if a function is broken:
        the run would train on nothing. Every process must call this.
        """
        names = list(dict.fromkeys(self.names))
        own = [
            (name in self.have_worked, len(faults.get(name, ())), len(self.failed_rows[name]))
            for name in names
        ]
        totals = all_gather_processes(own).sum(0).tolist()
        for name, (worked, failed, questions) in zip(names, totals, strict=True):
            if not failed:
                continue
            self.failed_reports[name] += 1
            # A function may fail on one question by chance. Do not wait for a second question if it
            # fails again: the data may have only one.
            is_first_question = questions < 2 and self.failed_reports[name] < 2
            is_chance = failed < MIN_FAILED or is_first_question
            reason = reason_of(faults[name]) if name in faults else "another process says why"
            check(
                worked or is_chance,
                f"reward {name} failed on all {failed} answers that were not truncated: {reason}; "
                "fix it",
            )
            if name in faults:
                n = len(faults[name])
                print(f"reward {name} failed on {n} answers, and scores 0 there: {reason}")
        return sum(len(messages) for messages in faults.values())


def reason_of(messages: dict[int, str]) -> str:
    """Why a function failed, in one or two of its messages. messages: {answer: why it failed}."""
    counts = collections.Counter(messages.values())
    # Prefer "not called, ...", in lower case, to "TooSlow: ..."; else the most frequent.
    reason = max(counts, key=lambda text: (text[:1].islower(), counts[text], text))
    others = counts.keys() - {reason}
    if not others:
        return reason
    other = max(others, key=lambda text: (counts[text], text))
    return f"{reason}; for other reasons on {len(messages) - counts[reason]}, such as: {other}"


def default_workers() -> int:
    """Half the cores that this process may use, from 1 to 8."""
    # macOS has no affinity.
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(8, max(1, cores // 2))


def data_columns(row: dict) -> dict:
    """The columns of a row that functions get: all but token ids."""
    return {name: value for name, value in row.items() if name not in TOKEN_COLUMNS}


# ---------------------------------------------------------------- the supervisor
@dataclasses.dataclass
class Scoring:
    """The calls of one `score_answers`, and how they ended."""

    names: list[str]  # of the functions
    queue: list[Call]  # calls that no worker has
    scores: np.ndarray  # [answers, functions]
    # {function name: {i: why it failed on answer i}}
    faults: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    # Names of the functions that have returned a score.
    worked: set[str] = dataclasses.field(default_factory=set)
    # {number of a function: how many workers in succession it has cost}
    lost: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def take(self, share: float) -> list[Call]:
        """Take this share of the queue, but at most MAX_CALLS, and only calls of one function."""
        j, _ = self.queue[0]
        first = self.queue[: min(MAX_CALLS, math.ceil(share * len(self.queue)))]
        calls = list(itertools.takewhile(lambda call: call[0] == j, first))
        del self.queue[: len(calls)]
        return calls

    def note(self, call: Call, outcome: float | str) -> None:
        """Note the score of a call that a worker has reported, or why it failed."""
        j, i = call
        self.lost[j] = 0
        if isinstance(outcome, str):
            self.fail(call, outcome)
        else:
            self.scores[i, j] = outcome
            self.worked.add(self.names[j])

    def fail(self, call: Call, reason: str) -> None:
        j, i = call
        self.faults.setdefault(self.names[j], {})[i] = reason

    def lose(self, calls: list[Call], at_once: int, reason: str) -> None:
        """Note that a worker was lost. calls: the calls of its task that it has not reported. The
        first `at_once` calls may have begun, so they fail. The others return to the queue."""
        for call in calls[:at_once]:
            self.fail(call, reason)
        self.queue[:0] = calls[at_once:]
        j, _ = calls[0]
        self.lost[j] += 1
        if self.lost[j] >= MAX_LOST:
            how = "was too slow" if reason.startswith("TooSlow") else "ended its process"
            for call in self.queue:
                if call[0] == j:
                    self.fail(call, f"not called, as it {how} {MAX_LOST} times in succession")
            self.queue = [call for call in self.queue if call[0] != j]


@dataclasses.dataclass
class Supervisor:
    """The process between the run and its workers: it forks workers, gives them calls, and replaces
    workers that are lost. It runs no user code."""

    run: multiprocessing.connection.Connection
    functions: Sequence[RewardFunction]
    size: int  # number of workers
    seconds: float  # that a function has for one answer
    log: str  # file that functions print to
    workers: list = dataclasses.field(default_factory=list)

    def main(self, end_of_run) -> None:
        """Score answers as the run asks, until the run ends."""
        # Close this process's copy of the run's end of the pipe. Otherwise, `recv` would not raise
        # EOFError when the run dies.
        end_of_run.close()
        # Signals are for the run, which then ends its workers. In a session of its own, this
        # process gets no Ctrl-C from the terminal. Slurm signals all processes of a task, so this
        # process must ignore signals. It uses a handler, and not SIG_IGN, which programs that
        # functions start would inherit.
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        # If a reward function uses JAX, it must not take the run's devices.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        # Exempt all objects from garbage collection, which would write to the memory that workers
        # share.
        gc.freeze()
        try:
            while asked := self.receive():
                # Open the log only when answers come: before that, its directory may not exist.
                if not self.workers:
                    self.open_log()
                    self.workers = [self.new_worker() for _ in range(self.size)]
                self.score(*asked)
        finally:
            for worker in self.workers:
                worker.kill()

    def receive(self):
        """The next (arguments, truncated) from the run, or None if the run ends."""
        try:
            return self.run.recv()
        except (EOFError, OSError):
            return None

    def open_log(self) -> None:
        """Print to the file `log` from now on, in workers too."""
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        open_streams()

    def new_worker(self):
        return Worker(self.functions, self.seconds, self.run)

    def score(self, arguments, truncated) -> None:
        """Score answers, and send the run the scores, the faults and the functions that worked."""
        asked = np.flatnonzero(~truncated).tolist()
        scoring = Scoring(
            names=[name_of(function) for function in self.functions],
            queue=[(j, i) for j in range(len(self.functions)) for i in asked],
            scores=np.zeros((len(arguments), len(self.functions))),
        )
        while scoring.queue or any(worker.calls for worker in self.workers):
            for worker in self.workers:
                if scoring.queue and not worker.calls and worker.process.is_alive():
                    # The first shares are large, to save messages; the last ones are small, so that
                    # all workers finish at the same time. A single worker gets all calls.
                    calls = scoring.take(1 / (2 * self.size - 1))
                    worker.give(calls, [arguments[i] for _, i in calls])
            channels = [worker.channel for worker in self.workers]
            heard = multiprocessing.connection.wait([self.run, *channels], SECONDS_BETWEEN_LOOKS)
            if self.run in heard:
                # The run ends, and wants no scores. `main` calls `receive` next, and gets None.
                return
            for place in range(self.size):
                self.read(place, scoring)
            if os.fstat(1).st_size > LOG_BYTES:
                os.ftruncate(1, 0)
        self.run.send((scoring.scores, scoring.faults, scoring.worked))

    def read(self, place: int, scoring: Scoring) -> None:
        """Note what a worker has reported. If it hangs or has ended, put another in its place."""
        worker = self.workers[place]
        # Check this before `worker.read`, so that the last reports of an ended worker count.
        fault = worker.why_ended()
        for call, outcome in worker.read():
            scoring.note(call, outcome)
        fault = fault or worker.why_late()
        if fault:
            worker.kill()
            self.workers[place] = self.new_worker()
            if worker.calls:
                scoring.lose([*worker.calls.values()], worker.at_once, fault)


class Worker:
    """A worker as the supervisor sees it.

    calls: {place in the task: call}, the calls that the worker has not reported. at_once: how many
    of these run at the same time. limit: seconds within which the worker must report the next call.
    scores: the scores of the task's calls, in shared memory that the worker writes; NaN: no score
    yet.
    """

    def __init__(self, functions, seconds: float, run):
        self.functions = functions
        self.seconds = seconds
        self.is_closed = False
        self.calls = {}
        self.at_once = 1
        self.unread = b""
        self.scores = np.frombuffer(mmap.mmap(-1, 8 * MAX_CALLS))
        self.channel, end_of_worker = socket.socketpair()
        inherited = [run, self.channel]
        task = (end_of_worker, self.scores, functions, seconds, inherited)
        self.process = FORK.Process(target=work, args=task)
        self.process.start()
        end_of_worker.close()

    def give(self, calls: list[Call], arguments: list[tuple[bytes, str]]) -> None:
        """Let the worker make some calls of one function."""
        j, _ = calls[0]
        self.calls = dict(enumerate(calls))
        self.at_once = calls_at_once(self.functions[j])
        # The worker itself cancels an async call when its time is up, and needs a moment for that.
        self.limit = self.seconds + (1 if self.at_once > 1 else 0)
        self.last_heard = time.monotonic()
        self.scores[:] = np.nan
        # If the process has ended or does not read, `why_ended` and `why_late` say so later.
        self.channel.settimeout(self.limit)
        with contextlib.suppress(OSError):
            self.channel.sendall(pickle.dumps((j, arguments)))

    def read(self) -> list[tuple[Call, float | str]]:
        """The calls that the worker has reported since the last `read`, each with its score or why
        it failed."""
        *lines, self.unread = (self.unread + self.receive()).split(b"\n")
        reports = [json.loads(line) for line in lines if line]
        scored = np.flatnonzero(~np.isnan(self.scores)).tolist()
        reports += [(place, float(self.scores[place])) for place in scored if place in self.calls]
        if reports:
            self.last_heard = time.monotonic()
        return [(self.calls.pop(place), outcome) for place, outcome in reports]

    def receive(self) -> bytes:
        """All that the worker has sent."""
        self.channel.settimeout(0)
        data = b""
        try:
            while more := self.channel.recv(2**16):
                data += more
            self.is_closed = True
        except BlockingIOError:
            # There is no more data now; more may come later.
            pass
        except OSError:
            self.is_closed = True
        return data

    def why_ended(self) -> str:
        """Why this worker can score no more answers, or "" if it still can."""
        if self.is_closed:
            # A process that ends closes its socket a moment before its exit code is known.
            self.process.join(1)
        code = self.process.exitcode
        if code is not None:
            ended = f"exited with code {code}"
            if code < 0:
                ended = f"was ended: {signal.strsignal(-code)}"
            return f"its process {ended}"
        return "it closed the descriptors of its process" if self.is_closed else ""

    def why_late(self) -> str:
        """Why the next report of this worker is late, or "" if it is not."""
        is_late = self.calls and time.monotonic() - self.last_heard > self.limit
        return too_slow(self.seconds) if is_late else ""

    def kill(self) -> None:
        """End the process and its process group, with the programs that functions have started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.channel.close()
        self.process.join(1)


# ---------------------------------------------------------------- the worker
def work(channel: socket.socket, scores, functions, seconds: float, inherited) -> None:
    """Make the calls that the supervisor asks for: pickles of (number of the function, [(pickled
    row, answer), ...]).

    Report each call as soon as it ends: write its score to `scores`, at its place in the task, or
    send a line of JSON, [its place, why it failed]. An empty line at the end of a task wakes the
    supervisor, since a write to shared memory does not. inherited: connections of the supervisor.
    """
    try:
        protect_the_run()
        for connection in inherited:
            connection.close()
        report = reporter(channel, scores)
        tasks = channel.makefile("rb")
        # One event loop for all tasks, so that a function may keep its connections.
        runner = asyncio.Runner()
        while True:
            number, calls = pickle.load(tasks)
            function = functions[number]
            if calls_at_once(function) > 1:
                runner.run(score_together(function, calls, seconds, report))
            else:
                for place, call in enumerate(calls):
                    report(place, score(function, *call))
            channel.sendall(b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        # An orderly exit would wait for threads that a function started.
        os._exit(1)


def protect_the_run() -> None:
    """Let this process neither outlive the run nor take the memory that the run needs."""
    # Begin a process group: Worker.kill ends the group, with the programs that functions started.
    os.setsid()
    # Children that a function forks must not ignore signals: multiprocessing ends its processes
    # with SIGTERM.
    # Signals are blocked during a fork, so that none reaches the child before its handlers are set.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
        after_in_child=restore_signals,
    )
    # If a function crashes the interpreter, print where.
    faulthandler.enable()
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: if the supervisor dies, the kernel kills this process, even while a
        # function hangs.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        # If memory runs out, the kernel kills this process first.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")


def restore_signals() -> None:
    """Undo what Supervisor.main does to signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def reporter(channel: socket.socket, scores: np.ndarray) -> Callable[[int, float | str], None]:
    """Returns a function that reports how a call ended: its place in the task, and its outcome."""
    process = os.getpid()
    directory = os.open(".", os.O_RDONLY)

    def report(place, outcome):
        # If the function forked, and this is the child returning from the function, end the child.
        if os.getpid() != process:
            os._exit(0)
        # If the function closed a standard stream, end this process: otherwise, printing
        # in other functions would fail, or write into the next file to be opened.
        sys.stdout.flush()
        sys.stderr.flush()
        if not streams_are_open():
            raise OSError("a function closed a standard stream")
        os.fchdir(directory)
        if isinstance(outcome, str):
            channel.sendall(json.dumps([place, outcome]).encode() + b"\n")
        else:
            scores[place] = outcome

    return report


def calls_at_once(function: Callable) -> int:
    """How many calls of a function run at the same time in a worker."""
    # An object may have an `async def __call__`.
    is_async = map(inspect.iscoroutinefunction, (function, type(function).__call__))
    return AT_ONCE if any(is_async) else 1


def score(function: Callable, row: bytes, answer: str) -> float | str:
    """The function's score of an answer, or why it failed. row: pickled, so that each call has its
    own copy."""
    try:
        return checked(function(pickle.loads(row), answer))
    # BaseException includes SystemExit and KeyboardInterrupt.
    except BaseException as e:
        return fault(e)


async def score_together(function, calls, seconds, report) -> None:
    """Score many answers at once with an `async def` function. A call is cancelled `seconds` after
    it began."""
    free = asyncio.Semaphore(AT_ONCE)

    async def score_one(place, row, answer):
        async with free:
            # Time the call from here, without its wait for `free`.
            limit = asyncio.timeout(seconds)
            try:
                async with limit:
                    outcome = checked(await function(pickle.loads(row), answer))
            except BaseException as e:
                outcome = too_slow(seconds) if limit.expired() else fault(e)
            report(place, outcome)

    await asyncio.gather(*[score_one(place, *call) for place, call in enumerate(calls)])


def checked(returned) -> float:
    """A score as a float. Raises ValueError if it is NaN or out of range."""
    number = float(returned)
    # This form also refuses NaN, for which every comparison is false.
    if not -MAX_REWARD <= number <= MAX_REWARD:
        raise ValueError(f"{number} is not from {-MAX_REWARD:.0f} to {MAX_REWARD:.0f}")
    return number


def fault(error: BaseException) -> str:
    """Why a call failed, and on which line of the function. The error's text may be long."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path != __file__:
            place = f" ({os.path.basename(path)}:{line})"
            break
    return first_line(error)[:500] + place


def too_slow(seconds: float) -> str:
    return f"TooSlow: no score within {seconds:g} s"
