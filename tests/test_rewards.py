"""Reward functions that misbehave, and the arguments that they get (infra/data/rewards.py)."""

import contextlib
import io
import re
import signal
import sys
import textwrap
import time

import numpy as np
import pytest
from conftest import ROOT, arguments, read_jsonl, refused, restored_signals, run
from numpy.testing import assert_array_equal

import train
from infra.data import rewards


# ---------------------------------------------------------------- reward functions that misbehave
def loops(row, answer):
    while answer == "hang":
        pass
    return 1


def loops_and_catches(row, answer):
    while answer == "hang":
        with contextlib.suppress(Exception):
            sum(range(999))
    return 1


def backtracks(row, answer):
    text = "a" * 40
    if answer == "hang":
        text += "b"
    return bool(re.match("(a+)+$", text))


def sleeps_again(row, answer):
    try:
        if answer == "hang":
            time.sleep(99)
    except BaseException:
        time.sleep(99)
    return 1


def test_rewards_that_hang_score_zero(monkeypatch):
    # Half a second is enough for the other functions, even on a busy machine.
    monkeypatch.setattr(rewards, "REWARD_SECONDS", 0.5)
    functions = [loops, loops_and_catches, backtracks, sleeps_again]
    rows = [{"question": "q", "answer": "5"}] * 3
    before = signal.getsignal(signal.SIGALRM)
    scores, faults = rewards.score_answers(functions, rows, ["5", "hang", "6"], [False] * 3)
    # An answer that hangs does not change the scores of the others.
    assert_array_equal(scores, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    timeout = {1: "TooSlow: no score within 0.5 s"}
    assert faults == {function.__name__: timeout for function in functions}
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_reward_that_hangs_on_and_on_is_not_called_any_more(monkeypatch):
    monkeypatch.setattr(rewards, "REWARD_SECONDS", 0.5)
    monkeypatch.setattr(rewards, "MOST_SLOW", 2)
    answers = ["hang", "5", "hang", "hang", "5"]
    rows = [{"question": "q", "answer": "5"}] * len(answers)
    functions = [loops, gives_no_number]
    scores, faults = rewards.score_answers(functions, rows, answers, [False] * len(answers))
    assert_array_equal(scores, [[0, 0.5], [1, 0.5], [0, 0.5], [0, 0.5], [0, 0.5]])
    assert list(faults) == ["loops"] and sorted(faults["loops"]) == [0, 2, 3, 4]
    assert faults["loops"][4] == "not called, as it was too slow 2 times in succession"


def test_a_reward_that_has_never_worked_ends_the_run(monkeypatch, capsys):
    monkeypatch.setattr(rewards, "HAVE_WORKED", set())
    rows = [{"question": "q", "answer": "5"}] * 4
    _, faults = rewards.score_answers([divides], rows[:3], ["bad"] * 3, [False] * 3)
    assert rewards.report(faults) == 3, "so few may be chance"
    _, faults = rewards.score_answers([divides], rows, ["bad"] * 4, [False] * 4)
    with pytest.raises(SystemExit) as end:
        rewards.report(faults)
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "train.py: reward divides failed on all 4 answers that were not truncated: "
        "ZeroDivisionError: division by zero; fix it\n"
    )
    # A function that has worked before may fail for a reason that passes, so the run goes on.
    rewards.score_answers([divides], rows[:1], ["5"], [False])
    assert rewards.report(faults) == 4
    assert "reward divides failed on 4 answers, and counts 0 there" in capsys.readouterr().out


def divides(row, answer):
    return 1 / (answer != "bad")


def gives_no_number(row, answer):
    odd = {"nan": float("nan"), "text": "much"}
    return odd.get(answer, 0.5)


def test_rewards_that_fail_score_zero():
    answers = ["5", "bad", "nan", "text", "5"]
    rows = [{"question": "q", "answer": "5"}] * len(answers)
    truncated = [False, False, False, False, True]
    functions = [divides, divides, gives_no_number]
    scores, faults = rewards.score_answers(functions, rows, answers, truncated)
    assert_array_equal(scores, [[1, 1, 0.5], [0, 0, 0.5], [1, 1, 0], [1, 1, 0], [0, 0, 0]])
    counts = {name: len(failed) for name, failed in faults.items()}
    assert counts == {"divides": 1, "gives_no_number": 2}
    assert "ZeroDivisionError" in faults["divides"][1]


def closes_stdout(row, answer):
    if answer == "bad":
        sys.stdout.close()
    return 1


def interrupts(row, answer):
    if answer == "bad":
        raise KeyboardInterrupt
    return 1


def leaves(row, answer):
    if answer == "bad":
        sys.exit()
    return 1


class MuteError(Exception):
    def __str__(self):
        raise ValueError


def is_mute(row, answer):
    if answer == "bad":
        raise MuteError
    return 1


def overflows(row, answer):
    return {"bad": 1e308, "5": -1e6}[answer]


def test_rewards_that_would_end_the_run_are_faults(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    rows = [{"question": "q", "answer": "5"}] * 3
    functions = [closes_stdout, interrupts, leaves, overflows, is_mute]
    scores, faults = rewards.score_answers(functions, rows, ["5", "bad", "5"], [False] * 3)
    assert_array_equal(scores, [[1, 1, 1, -1e6, 1], [0, 0, 0, 0, 0], [1, 1, 1, -1e6, 1]])
    said = {name: of_answer[1] for name, of_answer in faults.items()}
    assert said == {
        "closes_stdout": "it closed stdout or stderr",
        "interrupts": "KeyboardInterrupt: ",
        "leaves": "SystemExit: ",
        "is_mute": "MuteError: it does not say why",
        "overflows": "ValueError: 1e+308 is not from -1000000 to 1000000",
    }
    print("it is open again")


STREAMS = """
import functools, os, sys
from infra.data import rewards

def closes(row, answer):
    if answer == "1":
        os.close(1)
    if answer == "2":
        sys.stdout = None
    print("said")
    return 1

rows = [{"question": "Why?", "answer": "5"}] * 4
functions = [functools.partial(closes)]
print(rewards.score_answers(functions, rows, ["0", "1", "2", "3"], [False] * 4), file=sys.stderr)
with open(sys.argv[1], "w"):
    print("not for this file", flush=True)
"""


def test_streams_that_a_reward_closes_are_no_other_file(tmp_path):
    """If a reward function closes stdout, no other file takes its place. stdout is opened again,
    even if it was set to None. A function without a name works too."""
    text = run(sys.executable, "-c", STREAMS, tmp_path / "file")
    assert "'partial': {1: 'it closed stdout or stderr', 2: 'it closed stdout" in text, text
    assert "[0.],\n       [0.],\n       [1.]" in text, text
    assert (tmp_path / "file").read_text() == ""


CATCH_ALL = """
import time
from infra.data import rewards

def catches_all(row, answer):
    while True:
        try:
            time.sleep(99)
        except BaseException:
            pass

rewards.REWARD_SECONDS = 0.1
rewards.MOST_ALARMS = 2
rewards.score_answers([catches_all], [{"question": "Why?", "answer": "5"}], ["5"], [False])
"""


def three_arguments(question, reference, answer):
    return 1


def one_argument(answer):
    return 1


def test_a_reward_that_takes_other_arguments_is_refused_before_the_run(monkeypatch, tmp_path):
    refusals = {three_arguments: "(question, reference, answer)", one_argument: "(answer)"}
    for function, takes in refusals.items():
        name = function.__name__
        monkeypatch.setattr(train, "REWARDS", [(train.correct, 1.0), (function, 1.0)])
        assert refused("--out", tmp_path / "run") == (
            f"train.py: reward {name} takes {takes}; it is now called as {name}(row, answer): "
            "row['question'], row['answer'] and every other column of the data"
        )
    assert not (tmp_path / "run").exists()
    # Further arguments may have defaults. A function in C may not state its arguments.
    rewards.check_functions(min, [(lambda row, answer, bonus=1: bonus, np.float32(1)), [min, 0]])
    wrong = {"correct": train.correct, "(5, 1.0)": (5, 1.0), "'correct'": "correct"}
    for shown, entry in wrong.items():
        monkeypatch.setattr(train, "REWARDS", [(train.correct, 1.0), entry])
        text = f"train.py: REWARDS holds {shown}, not (function, weight) such as (correct, 1.0)"
        assert refused("--out", tmp_path / "run") == text


def test_a_reward_that_catches_all_ends_the_run_by_name():
    text = run(sys.executable, "-c", CATCH_ALL, code=1)
    assert "reward catches_all does not end" in text, text
    assert "'Why?'" in text and "Traceback" not in text, text


def test_solved_is_one_named_function(monkeypatch, tmp_path):
    """The metric `solved` and evaluations use SOLVED, whatever REWARDS contains."""
    monkeypatch.setattr(train, "REWARDS", [(closes_stdout, 1.0)])
    monkeypatch.setattr(train, "SOLVED", lambda row, answer: 0.5)
    flags = "--steps 1 --sft_steps 8 --batch 2 --npq 4 --minibatches 1 --eval_n 64"
    # Greedy answers of such a weak model never end, so evaluate with temperature 1.
    flags += " --eval_temperature 1"
    with restored_signals():
        train.main(arguments([flags, "--out", tmp_path / "run"]))
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    solved = [row["eval/solved"] for row in rows if "eval/solved" in row]
    # A truncated answer is not solved. In each evaluation some answers end.
    assert len(solved) == 2 and 0 < max(solved) <= 0.5, rows
    assert sum("solved" in row for row in rows) == 1, rows
    for row in rows:
        if "solved" in row:
            assert row["solved"] == pytest.approx(0.5 * (1 - row["truncated"])), row


# ---------------------------------------------------------------- math-verify
def readme_reward():
    """Returns the reward function with math-verify that README shows."""
    text = (ROOT / "README.md").read_text()
    (lines,) = re.findall(r"((?:^    .*\n)*^    .*math_verify.*\n(?:^    .*\n)*)", text, re.M)
    names = {}
    exec(textwrap.dedent(lines), names)
    return names["same"]


def test_math_verify_compares_formulas_under_our_time_limit(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(rewards, "REWARD_SECONDS", 2)
    same = readme_reward()
    ends = time.time() + 20

    def same_and_slow(row, answer):
        score = same(row, answer)
        while answer == "hang":
            assert time.time() < ends, "the alarm was cancelled"
        return score

    rows = [{"question": "q", "answer": r"10 - 2\sqrt{5}"}] * 4
    texts = [r"so \boxed{-2\sqrt5 + 10}", r"\boxed{3+\sqrt{5}}", "hang", "no"]
    scores, faults = rewards.score_answers([same_and_slow], rows, texts, [False] * 4)
    assert_array_equal(scores, [[1], [0], [0], [0]])
    assert faults == {"same_and_slow": {2: "TooSlow: no score within 2 s"}}
