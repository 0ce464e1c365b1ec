"""Reward functions: their names, and what a run requires of them.

A reward function takes (row, answer): the row of the data with all its columns, and the text of
the completion. It returns a float. infra/data/reward_pool.py calls it.
"""

import inspect
import numbers
from collections.abc import Callable, Sequence

from infra.host.console import check

RewardFunction = Callable[[dict, str], float]

# The metrics reward/mean, reward/std and reward/faults cover all functions together.
RESERVED = {"mean", "std", "faults"}


def name_of(function: RewardFunction) -> str:
    """The name of a function, or of its type if it has none (a functools.partial has none)."""
    return getattr(function, "__name__", type(function).__name__)


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
        f"REWARDS holds several functions named {', '.join(twice)}, but each metric needs its own "
        "name; set their __name__, or define them with def",
    )
    # RewardPool notes by name which functions have worked: if another function had SOLVED's name,
    # one of the two could always fail unnoticed.
    same = [f for f, _ in weighted if f is not solved and name_of(f) == name_of(solved)]
    check(
        not same,
        f"SOLVED and another function, in REWARDS, are both named {name_of(solved)}, but faults "
        "are counted by name; set the __name__ of one",
    )
    taken = sorted(RESERVED.intersection(names))
    check(
        not taken,
        f"REWARDS holds a function named {', '.join(taken)}, but reward/{', reward/'.join(taken)} "
        "is a metric of all functions; rename the function",
    )
    # Find out before the run: a call with wrong arguments would fail on every answer.
    for function in functions:
        name = name_of(function)
        try:
            signature = inspect.signature(function)
        except ValueError:
            # A function written in C may have no signature.
            continue
        # Further arguments are allowed if they have defaults.
        try:
            signature.bind({}, "")
        except TypeError:
            takes = ", ".join(signature.parameters)
            check(
                False,
                f"reward {name} takes ({takes}), but must take (row, answer); row has every column "
                "of the data, such as row['question'] and row['answer']",
            )
