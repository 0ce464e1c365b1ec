"""The advice to a run that learns nothing (infra/run/advice.py), and undefined numbers in the
line of a step."""

import math

import pytest
from conftest import run_train

from infra.run import advice, log

# The metrics of a step in which every answer is wrong and no group has a variance.
STEP = {
    "group/zero_variance": 1.0,
    "truncated": 0.0,
    "solved": 0.0,
    "no_number": 0.0,
    "len/answer_max": 96.0,
    "reward/mean": 0.1,
    "reward/std": 0.0,
    "reward/faults": 0,
    "reward/correct": 0.0,
    "reward/brief": 0.0,
}


@pytest.mark.parametrize(
    "metrics, wanted",
    [
        # Truncation comes first, because it also explains why answers have no number.
        ({"truncated": 0.9, "no_number": 0.9}, "90% of the answers are truncated at 96 tokens"),
        ({"no_number": 0.8}, "80% of the answers do not end with a number"),
        ({"solved": 1.0}, "100% of the answers are already right"),
        ({"solved": 0.02, "no_number": 0.1}, "98% of the answers are wrong: begin with --sft"),
        ({"solved": 0.5}, "reward/correct is 0.00 on average"),
    ],
)
def test_the_likeliest_cause_is_reported_with_its_number(metrics, wanted):
    steps = [STEP | metrics] * advice.STEPS
    assert wanted in advice.why_nothing_is_learned(steps)
    # There is no advice while groups have a variance.
    learning = STEP | metrics | {"group/zero_variance": 0.5}
    assert advice.why_nothing_is_learned([learning] * advice.STEPS) == ""


def test_a_constant_reward_that_does_not_use_correct_is_named():
    metrics = {"no_number": 0.9, "reward/judge": 0.5}
    step = {name: value for name, value in STEP.items() if name != "reward/correct"} | metrics
    said = advice.why_nothing_is_learned([step | {"reward/brief": i} for i in range(advice.STEPS)])
    assert "reward/judge is 0.50 on average" in said, said


def test_a_constant_reward_that_is_solved_is_no_cause():
    others = ("reward/correct", "reward/brief")
    step = {name: value for name, value in STEP.items() if name not in others}
    said = advice.why_nothing_is_learned([step | {"reward/mine": 0.0}] * advice.STEPS)
    assert "100% of the answers are wrong" in said, said


def test_a_reward_is_called_constant_after_three_steps():
    """A reward whose mean was the same in two steps may have been so by chance."""
    two, three = (
        advice.why_nothing_is_learned([STEP | {"solved": 0.5}] * steps) for steps in (2, 3)
    )
    assert "in each of the last" not in two, two
    assert "reward/correct is 0.00 on average in each of the last 3 steps" in three, three


def test_equal_groups_are_reported_where_no_cause_is_found():
    steps = [STEP | {"solved": 0.5, "reward/correct": i, "reward/brief": i} for i in range(5)]
    assert "are alike: raise --temperature or --npq" in advice.why_nothing_is_learned(steps)


def test_advice_is_given_again_after_fifty_steps(capsys):
    show = log.Terminal(0, 120, 0)
    for step in range(1, 121):
        show.advise(STEP | {"step": step})
        said = capsys.readouterr().out
        assert ("nothing is learned" in said) == (step in (5, 55, 105)), (step, said)


def test_a_short_run_gets_advice_at_its_end(capsys):
    show = log.Terminal(4, 7, 0)
    for step in (5, 6, 7):
        show.advise(STEP | {"step": step})
        is_said = "in 100% of the groups of the last 3 steps" in capsys.readouterr().out
        assert is_said == (step == 7), step


def test_a_number_that_is_not_defined_is_a_dash():
    metrics = STEP | {"step": 1, "clip_fraction": math.nan, "kl": 0.0, "grad_norm": math.nan}
    metrics |= {"len/answer": 9.0, "time/rollout_s": 1.0}
    metrics |= {"time/reward_s": 1.0, "time/update_s": 1.0}
    line = log.step_line(metrics, 5)
    assert "| clip - | kl 0.000 | gnorm - |" in line
    assert "nan" not in line


def test_a_run_without_supervised_steps_begins_with_steps(capsys, monkeypatch):
    monkeypatch.setattr(log, "show_status", print)
    log.Terminal(0, 24, 0).begin("evaluating", 0, 0, 9)
    assert "step 0/24" in capsys.readouterr().out


def test_a_run_whose_answers_are_truncated_says_so(tmp_path):
    text = run_train(
        "--steps 6 --sft_steps 0 --batch 2 --npq 2 --max_answer 4 --eval_data none",
        *["--out", tmp_path / "run"],
    )
    (line,) = [line for line in text.splitlines() if "nothing is learned" in line]
    assert "of the answers are truncated at 4 tokens" in line, line
    assert "| clip - |" in text and "nan" not in text, text
    assert "sft 0/" not in text
