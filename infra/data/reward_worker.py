"""The program of a worker process, which calls reward functions (infra/data/rewards.py starts it).

    python reward_worker.py DESCRIPTOR

DESCRIPTOR is a socket to the run. The run sends pickles: one with the functions, then tasks (number
of a function, [(pickled row, answer), ...]). The worker writes lines of JSON: "ready", then for
each call, as soon as it ends, [its place in the task, its score or why it failed]. This program
imports only the standard library, and what the functions' modules import.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import importlib.util
import inspect
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

# Scores must lie between -MOST_REWARD and MOST_REWARD, so that their squares fit in float32.
MOST_REWARD = 1e6
# A worker has this many answers at once in an `async def` function.
AT_ONCE = 64


def main() -> None:
    protect_the_run()
    channel = socket.socket(fileno=int(sys.argv[1]))
    # Programs that a function starts do not inherit the socket.
    channel.set_inheritable(False)
    tasks = channel.makefile("rb")
    sys.path, main_file, seconds, pickled = receive(tasks)
    if main_file:
        import_main(main_file)
    functions = [pickle.loads(function) for function in pickled]
    report = reporter(channel)
    # One event loop for all tasks, so that a function may keep its connections.
    runner = asyncio.Runner()
    channel.sendall(b'"ready"\n')
    while True:
        number, calls = receive(tasks)
        function = functions[number]
        if calls_at_once(function) > 1:
            runner.run(score_together(function, calls, seconds, report))
        else:
            for place, (row, answer) in enumerate(calls):
                report(place, score(function, row, answer))


def protect_the_run() -> None:
    """Let no signal for the run end this process, and let this process neither outlive the run nor
    take the memory that the run needs."""
    # Slurm signals all processes of a task. A handler, unlike SIG_IGN, is not inherited by programs
    # that a function starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    # If a function crashes the interpreter, print where.
    faulthandler.enable()
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: a function that hangs would not notice that the run was killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        # If memory runs out, the kernel kills this process first.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")


def receive(tasks: BinaryIO):
    """The next object from the run. Ends this process if the run has ended."""
    try:
        return pickle.load(tasks)
    except (EOFError, OSError):
        os._exit(0)


def import_main(path: str) -> None:
    """Import the run's program as __main__, without what is under `if __name__ == "__main__"`."""
    # multiprocessing uses the same name.
    spec = importlib.util.spec_from_file_location("__mp_main__", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    spec.loader.exec_module(module)


def reporter(channel: socket.socket) -> Callable[[int, float | str], None]:
    """Returns a function that reports how a call ended: its place in the task, and its outcome."""
    process = os.getpid()
    directory = os.open(".", os.O_RDONLY)

    def report(place, outcome):
        # End a child that the function forked and that returned from the function.
        if os.getpid() != process:
            os._exit(0)
        # If the function closed a standard stream, an error ends this process: otherwise, what
        # other functions print would fail, or go into the next file to be opened.
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (0, 1, 2):
            os.fstat(number)
        os.fchdir(directory)
        channel.sendall(json.dumps([place, outcome]).encode() + b"\n")

    return report


# ---------------------------------------------------------------- calls
def calls_at_once(function: Callable) -> int:
    """How many calls of a function run at the same time in a worker."""
    return AT_ONCE if inspect.iscoroutinefunction(function) else 1


def score(function: Callable, row: bytes, answer: str) -> float | str:
    """The function's score of an answer, or why it failed. row: pickled, so that each call has its
    own copy."""
    try:
        return checked(function(pickle.loads(row), answer))
    # This includes SystemExit and KeyboardInterrupt.
    except BaseException as e:
        return fault(e)


async def score_together(function, calls, seconds, report) -> None:
    """Score many answers at once with an `async def` function."""
    places = asyncio.Semaphore(AT_ONCE)

    async def score_one(place, row, answer):
        async with places:
            report(place, await score_async(function, row, answer, seconds))

    await asyncio.gather(*[score_one(place, *call) for place, call in enumerate(calls)])


async def score_async(function, row, answer, seconds) -> float | str:
    """Like `score`, for an `async def` function. It is cancelled after `seconds`."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return checked(await function(pickle.loads(row), answer))
    except BaseException as e:
        return too_slow(seconds) if limit.expired() else fault(e)


def checked(returned) -> float:
    """A score as a float. Raises ValueError if it is NaN or out of range."""
    number = float(returned)
    # This form also refuses NaN, for which every comparison is false.
    if not -MOST_REWARD <= number <= MOST_REWARD:
        raise ValueError(f"{number} is not from {-MOST_REWARD:.0f} to {MOST_REWARD:.0f}")
    return number


def fault(error: BaseException) -> str:
    """An error's type and the first line of its text, which may be long."""
    try:
        text = str(error)
    # str() of an error class of the user may fail.
    except Exception:
        text = "it does not say why"
    text = text.strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:500]}"


def too_slow(seconds: float) -> str:
    return f"TooSlow: no score within {seconds:g} s"


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        # An orderly exit would wait for threads that a function started.
        os._exit(1)
