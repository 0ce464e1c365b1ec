"""Evaluation: the sets of held-out questions, and the metrics of the answers to them."""

import math
import re

import numpy as np

from infra.data.questions import set_name
from infra.host.console import check
from infra.host.processes import all_gather_processes


def named_sets(eval_data: str) -> dict[str, str]:
    """The sets of --eval_data, as {name in metrics: data}. A set without a name is named after its
    data: `math` for `math.jsonl`. Exits with code 2 if two sets have the same name."""
    sets = {}
    for entry in map(str.strip, eval_data.split(",")):
        # An `=` after a slash or a dot belongs to the path: a set's name has neither.
        found = re.fullmatch(r"([\w-]+)=(.+)", entry)
        if found:
            name, data = found.groups()
        else:
            name = set_name(entry)
            data = entry
        check(data.strip(), f"eval_data = {eval_data} has an empty set; drop a comma")
        other = sets.get(name)
        check(
            other is None,
            f"eval_data = {eval_data} has two sets named {name}; name them: a={other},b={data}",
        )
        sets[name] = data
    return sets


def questions_at_once(sequences: int, samples: int, devices: int, most: int) -> int:
    """Number of questions that a host answers in one round, `samples` times each.

    sequences: number of answers of a rollout. most: number of questions that a host has to answer.
    A round has about `sequences` answers, or fewer if the host has fewer questions, but always a
    multiple of `devices`.
    """
    # The least number of questions whose answers divide over the devices.
    unit = devices // math.gcd(samples, devices)
    # If the host has few questions, a device answers complete ones, and so has each prompt once.
    for_complete = math.ceil(most / devices) * devices
    units = min(sequences // (samples * unit), for_complete // unit)
    return max(1, units) * unit


def answers_of_all_hosts(asked, samples: int, out: dict, solved_B, reward_B, decode) -> list[dict]:
    """The answers of one round of an evaluation as rows of evals.jsonl, in the order of `asked`.

    asked: (name of the set, row of the data) of each question of this round.
    samples: answers per question. out, solved_B, reward_B: the answers of this host, from
    Engine.generate, and their scores. decode: Engine.texts.
    """
    columns = np.column_stack([solved_B, reward_B, out["truncated_B"], out["lengths_B"]])
    columns = all_gather_processes(columns).reshape(-1, 4)
    # Processes can gather numbers, but not text: gather the tokens, and decode them again.
    tokens_BT = all_gather_processes(out["tokens_BT"]).reshape(len(columns), -1)
    lengths_B = columns[:, 3].astype(int)
    texts = decode({"tokens_BT": tokens_BT, "lengths_B": lengths_B})
    # The answers to a question are consecutive.
    rows = [pair for pair in asked for _ in range(samples)]
    answers = []
    # In the last round, there may be more answers than `rows`: zip drops the surplus answers.
    for (name, row), text, values in zip(rows, texts, columns.tolist(), strict=False):
        solved, reward, truncated, tokens = values
        answers.append(
            {
                "set": name,
                "question": row["question"],
                "reference": row["answer"],
                "answer": text,
                "reward": reward,
                "solved": solved,
                "truncated": bool(truncated),
                "tokens": int(tokens),
            }
        )
    return answers


def pass_at_k(right: int, n: int, k: int) -> float:
    """The probability that at least one of k answers is right, if they are drawn without
    replacement from n answers, of which `right` are right. This is the unbiased estimator of arXiv
    2107.03374."""
    # The probability that all k answers are drawn from the `n - right` wrong ones.
    all_wrong = math.comb(n - right, k) / math.comb(n, k)
    return 1 - all_wrong


def eval_metrics(solved_QK) -> dict[str, float]:
    """The metrics of a set. solved_QK: the scores of the K answers to each of its Q questions.

    solved: the mean score. stderr: its standard error over questions, NaN for a single question.
    If K > 1, there is also pass@k for k = 1, 2, 4, ... and K. An answer is right if its score is at
    least 1.
    """
    solved_QK = np.asarray(solved_QK, np.float64)
    Q, K = solved_QK.shape
    # Answers to the same question are correlated; questions are independent.
    mean_Q = solved_QK.mean(1)
    stderr = math.nan
    if Q > 1:
        stderr = float(mean_Q.std(ddof=1)) / math.sqrt(Q)
    metrics = {"solved": float(mean_Q.mean()), "stderr": stderr}
    if K == 1:
        return metrics
    right_Q = (solved_QK >= 1).sum(1).tolist()
    powers = [2**i for i in range(K.bit_length()) if 2**i < K]
    for k in [*powers, K]:
        passed_Q = [pass_at_k(right, K, k) for right in right_Q]
        metrics[f"pass@{k}"] = sum(passed_Q) / Q
    return metrics
