"""Find the likeliest reason why a run learns nothing, from the metrics of its last GRPO steps."""

from collections.abc import Sequence

import numpy as np

from infra.data.rewards import RESERVED

# The advice looks at the last STEPS steps, since a single step may be bad luck. A shorter run gets
# advice at its end.
STEPS = 5
# After one piece of advice, the next one waits this many steps.
STEPS_BETWEEN = 50
# A fraction below this counts as hardly any.
FEW = 0.05
# Metrics that point to a cause. `no_number` is missing unless SOLVED is `correct`.
CAUSES = ("group/zero_variance", "truncated", "solved", "no_number")


def why_nothing_is_learned(steps: Sequence[dict]) -> str:
    """Returns one line of advice, or "" if rewards vary within groups.

    steps: the metrics of the last GRPO steps, the newest last. A group whose rewards are all equal
    has no advantage, and so no gradient.
    """
    known = [name for name in CAUSES if name in steps[-1]]
    mean = {name: np.mean([step[name] for step in steps]) for name in known}
    equal = mean["group/zero_variance"]
    if equal <= 1 - FEW:
        return ""
    last = f"{len(steps)} steps" if len(steps) > 1 else "step"
    fact = f"in {equal:.0%} of the groups of the last {last}, all rewards are equal"
    return f"nothing is learned: {fact}; {likeliest_cause(steps, mean)}"


def likeliest_cause(steps: Sequence[dict], mean: dict) -> str:
    """Returns a cause, with the metric that shows it, and what to do. Causes that bring about
    others are checked first: truncated answers, for example, are also wrong."""
    if mean["truncated"] > 0.5:
        longest = steps[-1]["len/answer_max"]
        return (
            f"{mean['truncated']:.0%} of the answers are truncated at {longest:.0f} tokens and "
            "score 0: raise --max_answer, or ask for short answers with --system"
        )
    constant = constant_function(steps)
    # A reward that does not use SOLVED may be constant however many answers are solved.
    names = [name for name in steps[-1] if is_function(name)]
    uses_solved = any(all(step.get(name) == step["solved"] for step in steps) for name in names)
    if constant and not uses_solved and "reward/correct" not in steps[-1]:
        return constant
    if mean["solved"] > 1 - FEW:
        return f"{mean['solved']:.0%} of the answers are already right: use harder questions"
    if mean.get("no_number", 0) > 0.5:
        return (
            f"{mean['no_number']:.0%} of the answers do not end with a number: ask for <answer>"
            "number</answer> with --system, or begin with --sft_steps; compare formulas with "
            "math-verify (README); look at samples.jsonl"
        )
    if mean["solved"] < FEW:
        return (
            f"{1 - mean['solved']:.0%} of the answers are wrong: begin with --sft_steps on worked "
            "answers (column `demonstration`), or use easier questions; look at samples.jsonl"
        )
    if constant:
        return constant
    return "the answers of a group are alike: raise --temperature or --npq; look at samples.jsonl"


def is_function(name: str) -> bool:
    """Whether a metric is the mean score of a reward function."""
    return name.startswith("reward/") and name.removeprefix("reward/") not in RESERVED


def constant_function(steps: Sequence[dict]) -> str:
    """Names a reward function whose mean is the same in all steps, or returns "". The metrics have
    no scores of individual answers, but a mean that stays constant suggests a constant score."""
    if len(steps) < 3:
        return ""
    for name in steps[-1]:
        values = [step.get(name) for step in steps]
        if is_function(name) and min(values) == max(values):
            what = f"{name} is {values[0]:.2f} on average in each of the last {len(steps)} steps"
            return f"{what}: look at that reward function"
    return ""
