"""Run reward functions under a time limit.

A reward function takes (row, answer): the row of the data with all its columns, and the text of
the completion. It returns a float.
"""

import contextlib
import inspect
import itertools
import numbers
import os
import signal
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from infra.host.console import check, first_line, open_streams, streams_are_open, warn

RewardFunction = Callable[[dict, str], float]

# Seconds that a function has for one answer.
REWARD_SECONDS = 5
# An alarm raises an exception in the function when the time is up, and again each second. If a
# function catches this many exceptions, it will never end by itself.
MOST_ALARMS = 10
# A function that is too slow on this many answers in succession is not called again in this step:
# otherwise each remaining answer might take another 5 seconds.
MOST_SLOW = 16
# Scores must lie between -MOST_REWARD and MOST_REWARD, so that their squares fit in float32.
MOST_REWARD = 1e6
# Names of the functions that have returned a score in this process.
HAVE_WORKED = set()
# A function that has never worked, and fails on all answers of a step, counts as broken. With fewer
# answers than this, the failures may be chance.
LEAST_FAILED = 4


def name_of(function: RewardFunction) -> str:
    """A function's name, or its type's name if it has none, as functools.partial(...) has none."""
    return getattr(function, "__name__", type(function).__name__)


def by_name(scores: np.ndarray, weighted: Sequence[tuple[RewardFunction, float]]) -> dict:
    """Returns {name in metrics and samples: a column of scores, or one answer's score}.

    scores: [answers, 1 + functions], or [1 + functions] for one answer. The first is SOLVED's.
    weighted: train.py's REWARDS.
    """
    names = ["solved"] + [f"reward/{name_of(function)}" for function, _ in weighted]
    return dict(zip(names, scores.T, strict=True))


class TooSlow(BaseException):
    """A reward function's time is up. Not an Exception, which the function might catch."""


def check_functions(solved: RewardFunction, weighted: Sequence) -> None:
    """Exit with code 2 unless `weighted` holds (function, weight) pairs, and these functions and
    `solved` can be called as function(row, answer)."""
    functions = [solved]
    for entry in weighted:
        match entry:
            case (function, numbers.Real()) if callable(function):
                functions.append(function)
            case _:
                what = name_of(entry) if callable(entry) else repr(entry)
                check(False, f"REWARDS holds {what}, not (function, weight) such as (correct, 1.0)")
    for function in functions:
        name = name_of(function)
        try:
            signature = inspect.signature(function)
        except ValueError:
            # A function written in C may have no signature.
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
    """Score every answer with every function.

    rows[i] is the row of the data that answers[i] belongs to. Returns (scores, faults): float64
    [answers, functions], and {function name: {i: why it failed on answers[i]}}. A truncated answer
    scores 0 with all functions. An answer on which a function fails scores 0 with that function.

    A function that was too slow MOST_SLOW times in succession is not called again, and counts as
    failed on the remaining answers. The time limit interrupts Python code, `re` and sleep. It
    cannot interrupt other C code, but the score is 0 if that code took too long.
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
            # Catch exit() and KeyboardInterrupt of the function, too: a real Ctrl-C raises neither.
            except BaseException as e:
                fault = first_line(e)
                was_slow = isinstance(e, TooSlow)
            # End a child that the function forked: otherwise the child would go on training.
            if os.getpid() != process:
                os._exit(0)
            # If the function closed stdout or stderr, open them again: the run still has to print.
            if not streams_are_open():
                fault = "it closed stdout or stderr"
                scores[i, j] = 0
                open_streams()
            slow[j] = slow[j] + 1 if was_slow else 0
            if fault is None:
                HAVE_WORKED.add(name)
            else:
                faults.setdefault(name, {})[i] = fault
    signal.signal(signal.SIGALRM, handler_before)
    # A function may have changed the working directory, and `out` may be a relative path.
    os.fchdir(directory)
    os.close(directory)
    return scores, faults


def report(faults: dict[str, dict[int, str]]) -> int:
    """Print which functions failed, with one reason for each. Returns the number of failures.

    Exits with code 2 if a function failed on all answers that it was called with, and has never
    worked: the run would train on nothing.
    """
    for name, messages in faults.items():
        # Lower case sorts last, so `max` prefers "not called, ..." to "TooSlow: ...".
        reason = max(messages.values())
        n = len(messages)
        may_work = name in HAVE_WORKED or n < LEAST_FAILED
        failed = f"reward {name} failed on all {n} answers that were not truncated: {reason}"
        check(may_work, f"{failed}; fix it")
        print(f"reward {name} failed on {n} answers, and counts 0 there: {reason}")
    return sum(len(messages) for messages in faults.values())


def score_answer(function: RewardFunction, row: dict, answer: str) -> float:
    """One function's score of one answer. Raises ValueError if it is NaN or out of range."""
    with time_limit(function, row["question"]):
        score = float(function(row, answer))
    # This form also refuses NaN, for which every comparison is false.
    if not -MOST_REWARD <= score <= MOST_REWARD:
        raise ValueError(f"{score} is not from {-MOST_REWARD:.0f} to {MOST_REWARD:.0f}")
    return score


@contextlib.contextmanager
def time_limit(function: RewardFunction, question: str) -> Iterator[None]:
    """Raise TooSlow in the context after REWARD_SECONDS and then each second, up to MOST_ALARMS
    times. If the function still runs a second later, end the process."""
    alarms = itertools.count(1)

    def on_alarm(*_):
        if next(alarms) > MOST_ALARMS:
            warn(
                f"reward {name_of(function)} does not end, and catches what is raised to end it, "
                f"on an answer to {question[:200]!r}; let it catch Exception, not all. The run "
                "ends; start it again, and it resumes"
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
