"""Reward functions, run under a time limit.

A reward function takes (row, answer), the row of the data with all its columns and the text of
the completion, and returns a float.
"""

import contextlib
import inspect
import itertools
import numbers
import os
import signal
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from infra import log
from infra.log import check, first_line, warn

RewardFunction = Callable[[dict, str], float]

# Seconds that a function has for one answer.
REWARD_SECONDS = 5
# An alarm rings when the time is up, and again each second. A function that catches what so many
# of them raise never ends by itself.
MOST_ALARMS = 10
# After so many answers in succession without a score in time, a function is not called any more in
# this step: else all of its answers would take it 5 seconds each.
MOST_SLOW = 16
# Scores lie within -MOST_REWARD and MOST_REWARD: the squares of such are still float32.
MOST_REWARD = 1e6
# Names of the functions that have returned a score in this process.
HAVE_WORKED = set()
# A function that never has is a mistake if it fails on all answers of a step. Fewer than these may
# be chance.
LEAST_FAILED = 4


def name_of(function: RewardFunction) -> str:
    """Also of what has no name of its own, as functools.partial(function, ...)."""
    return getattr(function, "__name__", type(function).__name__)


def by_name(scores: np.ndarray, weighted: Sequence[tuple[RewardFunction, float]]) -> dict:
    """The columns of scores, or the scores of one answer, by their names in metrics and samples.

    scores: [answers, 1 + functions] or [1 + functions], the first of which is of SOLVED. weighted:
    train.py's REWARDS.
    """
    names = ["solved"] + [f"reward/{name_of(function)}" for function, _ in weighted]
    return dict(zip(names, scores.T, strict=True))


class TooSlow(BaseException):
    """The time of a reward function is over. No Exception, which the function may catch."""


def check_functions(solved: RewardFunction, weighted: Sequence) -> None:
    """Stop, with exit code 2, unless weighted is of (function, weight), and each function, and
    solved, can be called as function(row, answer)."""
    functions = [solved]
    for entry in weighted:
        match entry:
            case (function, numbers.Real()) if callable(function):
                functions.append(function)
            case _:
                what = name_of(entry) if callable(entry) else repr(entry)
                check(False, f"REWARDS holds {what}, not (function, weight) as (correct, 1.0)")
    for function in functions:
        name = name_of(function)
        try:
            signature = inspect.signature(function)
        except ValueError:
            # A function written in C may not say what it takes.
            continue
        try:
            signature.bind({}, "")
        except TypeError:
            takes = ", ".join(signature.parameters)
            check(
                False,
                f"reward {name} takes ({takes}); it is now called as {name}(row, answer): "
                "row['question'], row['answer'] and every other column of the data",
            )


def score_answers(
    functions: Sequence[RewardFunction],
    rows: Sequence[dict],
    answers: Sequence[str],
    truncated: Sequence[bool],
) -> tuple[np.ndarray, dict[str, dict[int, str]]]:
    """Score every answer by every function.

    rows[i] is the row of the data that answers[i] belongs to. Returns (scores, faults): float64
    [answers, functions], and {function name: {i: why it failed on answers[i]}}. A truncated answer
    scores 0 by all functions, and an answer on which a function fails scores 0 by that one.

    A function that was too slow MOST_SLOW times in succession is not called any more, and fails on
    the others. The time limit ends Python code, `re` and sleep. Other code in C ends when it ends;
    its score is 0 if that was too late.
    """
    scores = np.zeros((len(answers), len(functions)))
    faults = {}
    slow = [0] * len(functions)
    handler_before = signal.getsignal(signal.SIGALRM)
    process = os.getpid()
    directory = os.open(".", os.O_RDONLY)
    for i, answer in enumerate(answers):
        if truncated[i]:
            continue
        for j, function in enumerate(functions):
            name = name_of(function)
            if slow[j] == MOST_SLOW:
                faults[name][i] = f"not called, as it was too slow {MOST_SLOW} times in succession"
                continue
            fault = None
            was_slow = False
            try:
                scores[i, j] = score_answer(function, rows[i], answer)
            # Also exit() and KeyboardInterrupt of the function: a real Ctrl-C raises neither.
            except BaseException as e:
                fault = first_line(e)
                was_slow = isinstance(e, TooSlow)
            # A child that the function forked would train on.
            if os.getpid() != process:
                os._exit(0)
            # The run still has to print.
            if not log.streams_are_open():
                fault = "it closed stdout or stderr"
                scores[i, j] = 0
                log.open_streams()
            slow[j] = slow[j] + 1 if was_slow else 0
            if fault is None:
                HAVE_WORKED.add(name)
            else:
                faults.setdefault(name, {})[i] = fault
    signal.signal(signal.SIGALRM, handler_before)
    # A function may have gone elsewhere, and `out` may be relative.
    os.fchdir(directory)
    os.close(directory)
    return scores, faults


def report(faults: dict[str, dict[int, str]]) -> int:
    """Print which functions failed, and one reason of each -> on how many answers.

    Exits 2 if one failed on all answers that it was called with, and has never worked: the run
    would train on nothing.
    """
    for name, messages in faults.items():
        one = max(messages.values())
        n = len(messages)
        may_work = name in HAVE_WORKED or n < LEAST_FAILED
        failed = f"reward {name} failed on all {n} answers that were not truncated: {one}"
        check(may_work, f"{failed}; mend it")
        print(f"reward {name} failed on {n} answers, and counts 0 there: {one}")
    return sum(len(messages) for messages in faults.values())


def score_answer(function: RewardFunction, row: dict, answer: str) -> float:
    """One score, of one function. Raises ValueError for NaN and what is out of range."""
    with time_limit(function, row["question"]):
        score = float(function(row, answer))
    # Written so that it refuses NaN, with which all comparisons are false.
    if not -MOST_REWARD <= score <= MOST_REWARD:
        raise ValueError(f"{score} is not from {-MOST_REWARD:.0f} to {MOST_REWARD:.0f}")
    return score


@contextlib.contextmanager
def time_limit(function: RewardFunction, question: str) -> Iterator[None]:
    """Inside, TooSlow is raised after REWARD_SECONDS, then each second; at last the run ends."""
    alarms = itertools.count(1)

    def on_alarm(*_):
        if next(alarms) > MOST_ALARMS:
            warn(
                f"reward {name_of(function)} does not end, and catches what is raised to end it; "
                f"it scored an answer to {question[:200]!r}; let it catch Exception, not all. The "
                "run ends; start it again, and it resumes"
            )
            # sys.exit would raise another exception for the function to catch.
            os._exit(1)
        raise TooSlow(f"no score within {REWARD_SECONDS} s")

    signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, REWARD_SECONDS, 1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
