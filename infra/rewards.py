"""Reward functions, run under a time limit."""

import contextlib
import itertools
import os
import signal
import sys

import numpy as np

from infra import log
from infra.log import first_line, warn


class TooSlow(BaseException):
    """No Exception, which a reward function may catch."""

REWARD_SECONDS = 5  # that a function has for an answer

MOST_RINGS = 10  # the time is up, and a second later again; a function that catches so many never ends

MOST_REWARD = 1e6  # or less than -1e6: squares of such are still float32

def score_answers(functions, rows, answers, cut):
    """-> [answers, functions] scores, 0 of a cut answer; {function name: {answer: its fault}}, also 0. A
    function's time is limited in Python, `re` and sleep; other code in C ends first, and scores 0 then."""
    scores, faults, before = np.zeros((len(answers), len(functions))), {}, signal.getsignal(signal.SIGALRM)
    for i, (j, function) in itertools.product(np.flatnonzero(~np.asarray(cut)), enumerate(functions)):
        try:
            with time_limit(function, rows[i]["question"]):
                value = float(function(rows[i]["question"], rows[i]["answer"], answers[i]))
            if not -MOST_REWARD <= value <= MOST_REWARD:  # nor NaN
                raise ValueError(f"{value} is not from {-MOST_REWARD:.0f} to {MOST_REWARD:.0f}")
            scores[i, j] = value
        except BaseException as e:  # also exit() and KeyboardInterrupt: a real Ctrl-C raises neither
            faults.setdefault(function.__name__, {})[i] = first_line(e)
        if sys.stdout.closed or sys.stderr.closed:
            faults.setdefault(function.__name__, {})[i] = "it closed stdout or stderr"
            scores[i, j] = 0
            log.open_streams()
    signal.signal(signal.SIGALRM, before)
    return scores, faults

@contextlib.contextmanager
def time_limit(function, question):
    """Inside, TooSlow is raised after REWARD_SECONDS, then each second; at last the run ends."""
    rings = itertools.count(1)
    def ring(*_):
        if next(rings) > MOST_RINGS:
            warn(f"reward {function.__name__} does not end, and catches what is raised to end it; it scored an "
                 f"answer to {question[:200]!r}; let it catch Exception, not all. The run ends; start it again, "
                 "and it resumes")
            os._exit(1)
        raise TooSlow(f"no score within {REWARD_SECONDS} s")
    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, REWARD_SECONDS, 1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
