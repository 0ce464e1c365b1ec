"""Reward functions: their names, what a run requires of them, and how it reports their failures.

A reward function takes (row, answer): the row of the data with all its columns, and the text of
the completion. It returns a float. infra/data/reward_pool.py calls it.
"""

import inspect
import numbers
from collections.abc import Callable, Sequence

import numpy as np

from infra.host.console import check

RewardFunction = Callable[[dict, str], float]

# Names of the functions that have returned a score in this run.
HAVE_WORKED = set()
# A function that has never worked, and fails on all answers of a step, counts as broken. Fewer
# failures than this may be chance.
LEAST_FAILED = 4


def name_of(function: RewardFunction) -> str:
    """The name of a function, or of its type if it has none (a functools.partial has none)."""
    return getattr(function, "__name__", type(function).__name__)


def by_name(scores: np.ndarray, weighted: Sequence[tuple[RewardFunction, float]]) -> dict:
    """Returns {name in metrics and samples: a column of scores, or one answer's score}.

    scores: [answers, 1 + functions], or [1 + functions] for one answer. Column 0 is SOLVED's score.
    weighted: train.py's REWARDS.
    """
    names = ["solved"] + [f"reward/{name_of(function)}" for function, _ in weighted]
    return dict(zip(names, scores.T, strict=True))


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
    # Metrics and faults of a function are stored under its name.
    names = [name_of(function) for function, _ in weighted]
    twice = sorted({name for name in names if names.count(name) > 1})
    check(
        not twice,
        f"REWARDS holds several functions named {', '.join(twice)}, but a metric has one name; set "
        "their __name__, or define them with def",
    )
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


def report(faults: dict[str, dict[int, str]]) -> int:
    """Print which functions failed, with one reason for each. Returns the number of failures.

    Exits with code 2 if a function failed on LEAST_FAILED answers or more and has never returned a
    score: the run would train on nothing.
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
