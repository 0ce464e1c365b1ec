"""Reward functions that misbehave on the answer "bad", and score 1 on others."""

import asyncio
import ctypes
import functools
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path


def on_bad(function):
    """Returns a reward function that calls a misbehaving one, but only on the answer "bad"."""

    @functools.wraps(function)
    def reward(row, answer):
        return function(row) if answer == "bad" else 1

    return reward


def fine(row, answer):
    return 1


# ---------------------------------------------------------------- never ending
@on_bad
def loops(row):
    while True:
        pass


@on_bad
def loops_in_c(row):
    return sum(range(10**12))


@on_bad
def backtracks(row):
    return bool(re.match("(a+)+$", "a" * 40 + "b"))


@on_bad
def catches_all(row):
    while True:
        try:
            time.sleep(99)
        except BaseException:
            continue


@on_bad
def ignores_signals(row):
    for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(99)


@on_bad
def stops_itself(row):
    os.kill(os.getpid(), signal.SIGSTOP)


# ---------------------------------------------------------------- ending the process
@on_bad
def crashes(row):
    return ctypes.string_at(0)


@on_bad
def aborts(row):
    os.abort()


@on_bad
def exits_at_once(row):
    os._exit(3)


@on_bad
def kills_itself(row):
    os.kill(os.getpid(), signal.SIGKILL)


@on_bad
def kills_its_group(row):
    os.kill(0, signal.SIGKILL)


@on_bad
def exits(row):
    sys.exit(0)


@on_bad
def interrupts(row):
    raise KeyboardInterrupt


# ---------------------------------------------------------------- changing the process
@on_bad
def closes_streams(row):
    for number in (0, 1, 2):
        os.close(number)
    return 1


@on_bad
def closes_stdout(row):
    sys.stdout.close()
    return 1


@on_bad
def closes_all(row):
    os.closerange(0, 256)
    return 1


@on_bad
def makes_a_session(row):
    os.setsid()


@on_bad
def forks_and_returns(row):
    os.fork()
    return 1


@on_bad
def leaves_a_thread(row):
    threading.Thread(target=time.sleep, args=[999]).start()
    return 1


@on_bad
def ends_what_it_forked(row):
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[999])
    process.start()
    process.terminate()
    process.join()
    return 1


def changes_directory(row, answer):
    is_elsewhere = os.getcwd() == "/"
    os.chdir("/")
    return not is_elsewhere


def empties_the_row(row, answer):
    is_complete = row["question"] == "Why?" and row["answer"] == "5"
    row.clear()
    return is_complete


@on_bad
def prints_much(row):
    print("much" * 2_500_000)
    return 1


# ---------------------------------------------------------------- returning no score
@on_bad
def recurses(row):
    return recurses(row, "bad")


@on_bad
def takes_all_memory(row):
    return len(bytearray(2**60))


@on_bad
def gives_nan(row):
    return float("nan")


@on_bad
def gives_infinity(row):
    return float("inf")


@on_bad
def overflows(row):
    return 1e308


@on_bad
def gives_text(row):
    return "much"


@on_bad
def gives_nothing(row):
    return None


@on_bad
def gives_a_function(row):
    return lambda: 1


class MuteError(Exception):
    def __str__(self):
        raise ValueError


@on_bad
def is_mute(row):
    raise MuteError


@on_bad
def raises_what_cannot_be_pickled(row):
    class LocalError(Exception):
        pass

    raise LocalError(lambda: 1)


@on_bad
def divides(row):
    return 1 / 0


# ---------------------------------------------------------------- async
everyone = asyncio.Barrier(8)


async def waits_for_eight(row, answer):
    """Ends only if eight answers are scored at once."""
    await everyone.wait()
    return 1


async def awaits_too_long(row, answer):
    await asyncio.sleep(99 if answer == "bad" else 0)
    return 1


async def takes_most_of_its_time(row, answer):
    await asyncio.sleep(0.8)
    return 1


async def blocks(row, answer):
    await asyncio.sleep(0)
    if answer == "bad":
        time.sleep(99)
    return 1


# ---------------------------------------------------------------- for single tests
def forks_and_stays(row, answer):
    child = os.fork()
    if child == 0:
        time.sleep(999)
    Path(row["file"]).write_text(f"{os.getpid()} {child}")
    while answer == "bad":
        pass
    return 1


def waits_for_another(row, answer):
    """Ends only if two answers are scored side by side."""
    directory = Path(row["directory"])
    (directory / answer).touch()
    while len(list(directory.iterdir())) < 2:
        time.sleep(0.01)
    return 1


def columns(row, answer):
    return sorted(row) == ["answer", "prompt", "question", "words"]


def process(row, answer):
    # Scores have an upper limit, which process numbers may exceed.
    return os.getpid() / 2**10


def half(row, answer):
    return 0.5


def as_written(row, answer):
    return float(answer)


def with_bonus(row, answer, bonus=1):
    return bonus


def speaks(row, answer):
    print("said on stdout")
    print("said on stderr \ud800", file=sys.stderr)
    return 1


def three_arguments(question, reference, answer):
    return 1


def one_argument(answer):
    return 1
