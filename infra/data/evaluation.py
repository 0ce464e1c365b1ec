"""Evaluation: which sets of held-out questions there are, and the metrics of their answers."""

import math
import re

import numpy as np

from infra.data.questions import set_name
from infra.host.console import check


def named_sets(eval_data: str) -> dict[str, str]:
    """The sets of --eval_data, as {name in metrics: data}. A set without a name is named after its
    data: `math` for `math.jsonl`. Exits with code 2 if two sets have the same name."""
    sets = {}
    for entry in eval_data.split(","):
        # A path may hold `=` too, but not before its first slash or dot.
        found = re.fullmatch(r"([\w-]+)=(.+)", entry)
        name, data = found.groups() if found else (set_name(entry), entry)
        check(data.strip(), f"eval_data = {eval_data} has an empty set; drop a comma")
        check(
            name not in sets,
            f"eval_data = {eval_data} has two sets named {name}; name them: a={sets.get(name)},"
            f"b={data}",
        )
        sets[name] = data
    return sets


def questions_at_once(sequences: int, samples: int, devices: int) -> int:
    """Number of questions that a host answers together, `samples` times each: about as many answers
    as a rollout's `sequences`, and a multiple of the host's `devices`."""
    unit = devices // math.gcd(samples, devices)
    return max(1, sequences // (samples * unit)) * unit


def pass_at_k(right: int, n: int, k: int) -> float:
    """The probability that k answers, drawn from n without replacement, hold a right one, if
    `right` of the n are right. This is the unbiased estimator of arXiv 2107.03374."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def eval_metrics(solved_QK) -> dict[str, float]:
    """The metrics of a set, from the score of each of its Q questions' K answers.

    solved: the mean score. stderr: its standard error over questions, NaN for a single question.
    With K > 1 also pass@k for k = 1, 2, 4, ... and K; an answer passes if its score is at least 1.
    """
    solved_QK = np.asarray(solved_QK, np.float64)
    Q, K = solved_QK.shape
    # The answers to a question are alike, so the questions are the independent draws.
    mean_Q = solved_QK.mean(1)
    stderr = float(mean_Q.std(ddof=1)) / math.sqrt(Q) if Q > 1 else math.nan
    metrics = {"solved": float(mean_Q.mean()), "stderr": stderr}
    if K > 1:
        right_Q = (solved_QK >= 1).sum(1).tolist()
        powers = [2**i for i in range(K.bit_length()) if 2**i < K]
        for k in [*powers, K]:
            metrics[f"pass@{k}"] = sum(pass_at_k(right, K, k) for right in right_Q) / Q
    return metrics
