"""Evaluation: the sets of questions, the metrics of their answers, and the rows of evals.jsonl."""

import itertools
import json
import math
import os
import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import IMPATIENT, ROOT, arguments, read_jsonl, refused, run_train, taught

import train
from infra.data import evaluation
from infra.data.evaluation import eval_metrics, named_sets, pass_at_k, questions_at_once
from infra.data.questions import load_rows


def test_when_a_run_evaluates():
    for wanted, flags in (
        ([2, 4, 6, 7], dict(sft_steps=2, steps=5, eval_every=2)),
        ([2, 7], dict(sft_steps=2, steps=5, eval_every=0)),
        ([3], dict(sft_steps=3, steps=0)),
        ([0, 5], dict(steps=5)),
    ):
        cfg = train.Config(**flags)
        last = cfg.sft_steps + cfg.steps
        setup = SimpleNamespace(held_out={"gsm8k": [1]})
        found = [step for step in range(last + 1) if train.is_evaluated_after(step, cfg, setup)]
        assert found == wanted, flags


SAMPLED = "--steps 0 --eval_temperature 1 --eval_samples 3 --batch 2 --npq 8 --max_answer 24"


# ---------------------------------------------------------------- metrics
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 8):
        for right, k in itertools.product(range(n + 1), range(1, n + 1)):
            answers = [True] * right + [False] * (n - right)
            subsets = list(itertools.combinations(answers, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(right, n, k) == pytest.approx(share, abs=1e-12)


def test_metrics_are_those_computed_by_hand():
    # Three questions with 4, 1 and 0 right answers of 4.
    found = eval_metrics([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert found["solved"] == pytest.approx(5 / 12)
    # Means 1, 1/4, 0: squared deviations (7/12)^2 + (2/12)^2 + (5/12)^2 = 78/144, over 2, over 3.
    assert found["stderr"] == pytest.approx(math.sqrt(78 / 144 / 2 / 3))
    # With two of four answers, the second question passes in 3 of 6 cases.
    assert found["pass@1"] == pytest.approx(5 / 12)
    assert found["pass@2"] == pytest.approx((1 + 1 / 2) / 3)
    assert found["pass@4"] == pytest.approx(2 / 3)
    assert list(eval_metrics([[1, 0, 1, 1, 0, 0]])) == (
        ["solved", "stderr", "pass@1", "pass@2", "pass@4", "pass@6"]
    )
    assert eval_metrics([[1], [0]]) == {"solved": 0.5, "stderr": pytest.approx(0.5)}
    assert math.isnan(eval_metrics([[1, 0]])["stderr"])
    # A partly solved answer counts in the mean, but does not pass.
    assert eval_metrics([[0.5, 0.5]])["pass@2"] == 0


def test_a_host_answers_as_many_questions_as_its_devices_need():
    assert questions_at_once(64, 1, 8, 99) == 64
    assert questions_at_once(64, 4, 8, 99) == 16
    # Three answers each: eight questions make 24 answers, three for each device.
    assert questions_at_once(64, 3, 8, 99) == 16
    assert questions_at_once(16, 64, 8, 99) == 1
    # A set of 30 questions, as AIME's, needs no more rows than this, however large a rollout is.
    assert questions_at_once(1024, 1, 8, 30) == 32
    # Each device answers four questions, not parts of more.
    assert questions_at_once(1024, 32, 8, 30) == 32
    for sequences, samples, devices in itertools.product((8, 16, 40), range(1, 20), (1, 2, 4, 8)):
        for most in (1, 7, 99):
            n = questions_at_once(sequences, samples, devices, most)
            assert n * samples % devices == 0
            # Beyond the least number, a round has no more questions than its devices need, nor more
            # answers than a rollout.
            least = devices // math.gcd(samples, devices)
            assert n == least or (n - devices < most and n * samples <= sequences)


# ---------------------------------------------------------------- sets
def test_sets_are_named_after_their_data_or_as_the_user_says():
    assert named_sets("gsm8k") == {"gsm8k": "gsm8k"}
    assert named_sets("a/math.jsonl, org/AIME_2024@train,easy=b/test.csv") == {
        "math": "a/math.jsonl",
        "AIME_2024-train": "org/AIME_2024@train",
        "easy": "b/test.csv",
    }
    assert train.eval_sets(train.Config(data="x.jsonl")) == {}
    # Otherwise, the training questions would be evaluated as if they were held out.
    assert train.eval_sets(train.Config(data="org/AIME_2024@train")) == {}
    assert train.eval_sets(train.Config(data="arith")) == {"arith": "arith"}


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--eval_data a/test.jsonl,b/test.jsonl", "two sets named test"),
        ("--eval_data a=x.jsonl,a=y.jsonl", "two sets named a"),
        ("--eval_data x.jsonl,", "empty set"),
        ("--eval_samples 4", "add --eval_temperature 1"),
        ("--eval_samples 0", "out of range"),
    ],
)
def test_a_mistake_gets_one_line(flags, words):
    assert words in refused(flags)


def test_a_set_names_its_split(tmp_path):
    for split in ("train", "test"):
        row = {"question": f"Which split? {split}", "answer": "1"}
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")

    def questions_of(name, held_out):
        return [row["question"] for row in load_rows(str(tmp_path) + name, held_out)]

    assert questions_of("", held_out=True) == ["Which split? test"]
    assert questions_of("", held_out=False) == ["Which split? train"]
    assert questions_of("@train", held_out=True) == ["Which split? train"]
    assert questions_of("@test", held_out=False) == ["Which split? test"]


# ---------------------------------------------------------------- runs
def two_sets(tmp_path):
    """Write two sets of questions. Returns flags that evaluate both. The references are 1 and 11,
    which a model that has hardly learned says most often."""
    for name, n, m in (("small", 5, 7), ("large", 9, 10)):
        rows = [
            {"question": f"What is {a} + {b}?", "answer": str(a % 2 * 10 + 1)}
            for a, b in itertools.product(range(n), range(m))
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return ["--eval_data", f"{tmp_path}/small.jsonl,big={tmp_path}/large.jsonl"]


def test_two_sets_are_evaluated_and_can_be_scored_again(
    tmp_path, tmp_path_factory, record_property
):
    """The metrics follow from evals.jsonl, and two devices give the same answers as one, except for
    rounding, though they answer four questions at once instead of five."""
    flags = [*taught(tmp_path_factory), *two_sets(tmp_path), *arguments([SAMPLED])]
    text = run_train(*flags, "--out", tmp_path / "one", devices=1)
    (row,) = read_jsonl(tmp_path / "one/metrics.jsonl")
    answers = read_jsonl(tmp_path / "one/evals.jsonl")
    right = 0
    for name, n in (("small", 35), ("big", 90)):
        of_set = [answer for answer in answers if answer["set"] == name]
        assert len(of_set) == 3 * n
        again = [train.correct({"answer": a["reference"]}, a["answer"]) for a in of_set]
        again = [a * (not b["truncated"]) for a, b in zip(again, of_set, strict=True)]
        assert again == [answer["solved"] for answer in of_set]
        right += sum(again)
        wanted = eval_metrics(np.reshape(again, (n, 3)))
        assert {key: row[f"eval/{name}/{key}"] for key in wanted} == wanted
        line = f"held-out questions of {name} solved: {wanted['solved']:.1%} +- "
        assert f"{line}{1.96 * wanted['stderr']:.1%} at step 0" in text
        # The three answers to a question stand together, in the order of the data.
        questions = [answer["question"] for answer in of_set]
        assert questions[::3] == questions[1::3] == questions[2::3]
        assert len(set(questions)) == n
    assert 0 < right < len(answers), "the comparison needs right and wrong answers"
    for answer in answers:
        weights = [weight for _, weight in train.REWARDS]
        assert 0 <= answer["reward"] <= sum(weights) and 0 < answer["tokens"] <= 24
        assert answer["truncated"] or answer["reward"] >= answer["solved"]
    run_train(*flags, "--out", tmp_path / "two", devices=2)
    others = read_jsonl(tmp_path / "two/evals.jsonl")
    for answer, other in zip(answers, others, strict=True):
        for name in ("step", "set", "question", "reference"):
            assert other[name] == answer[name]
    # Rounding moves a draw to the neighbouring token now and then: with six seeds, in one answer or
    # none. A fault in a question would change all three answers to it.
    parted = sum(a != b for a, b in zip(answers, others, strict=True))
    assert parted <= 2
    record_property("answers that part", f"{parted} of {len(answers)}")


@pytest.mark.slow
def test_a_run_killed_in_an_evaluation_of_two_sets_resumes_bit_for_bit(tmp_path, tmp_path_factory):
    flags = [*taught(tmp_path_factory), *two_sets(tmp_path)]
    more = (
        "--steps 2 --sft_steps 0 --eval_every 1 --eval_temperature 1 --eval_samples 4 --batch 2 "
        "--npq 8 --max_answer 16 --minibatches 1 --save_every 1"
    )
    flags += arguments([more])
    run_train(*flags, "--out", tmp_path / "calm")
    out = tmp_path / "killed"
    command = [*IMPATIENT, ROOT / "train.py", *flags, "--out", out]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    for step in (1, 2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        # Kill the run after a step's line: its evaluation comes next, and then its checkpoint.
        for line in process.stdout:
            if line.startswith(f"step {step}/"):
                break
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert f"resuming {out} after step 1" in run_train(*flags, "--out", out)
    calm, resumed = (read_jsonl(path / "evals.jsonl") for path in (tmp_path / "calm", out))
    assert resumed == calm and len(calm) == 3 * 125 * 4


def test_the_standard_error_is_the_spread_over_sets_of_questions():
    """The standard deviation of the results of 30 evaluations, each with questions of its own that
    are answered four times, is the standard error that each evaluation reports."""
    rng = np.random.default_rng(0)
    results, told = [], []
    for _ in range(30):
        # Questions are of different difficulty, from nearly always to nearly never right.
        chance_Q = rng.beta(0.7, 1.1, size=100)
        found = eval_metrics(rng.random((100, 4)) < chance_Q[:, None])
        results.append(found["solved"])
        told.append(found["stderr"])
    assert 0.8 < np.mean(told) / np.std(results, ddof=1) < 1.25


def test_answers_of_two_hosts_are_in_the_order_of_the_questions(monkeypatch):
    """Here the other host's numbers are this host's plus 1, or the opposite."""

    def gather(own):
        own = np.asarray(own)
        return np.stack([own, ~own if own.dtype == bool else own + 1])

    monkeypatch.setattr(evaluation, "all_gather_processes", gather)
    asked = [("set", {"question": f"{i}?", "answer": str(i)}) for i in range(3)]
    out = {"tokens_BT": np.array([[10, 0, 0], [20, 21, 0]]), "lengths_B": np.array([1, 2])}
    out["truncated_B"] = np.zeros(2)

    def decode(out):
        return [
            str(t[:n].tolist()) for t, n in zip(out["tokens_BT"], out["lengths_B"], strict=True)
        ]

    found = evaluation.answers_of_all_hosts(asked, 1, out, [0.0, 1.0], [5.0, 6.0], decode)
    # The second host repeats a question in the last round: its second answer does not count.
    got = [(a["question"], a["answer"], a["solved"], a["reward"], a["tokens"]) for a in found]
    assert got == [
        ("0?", "[10]", 0.0, 5.0, 1),
        ("1?", "[20, 21]", 1.0, 6.0, 2),
        ("2?", "[11, 1]", 1.0, 6.0, 2),
    ]
    assert [a["truncated"] for a in found] == [False, False, True]
