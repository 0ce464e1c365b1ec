"""The losses that assets/loss.md shows as diffs: each is applied, and compared with NumPy."""

import importlib.util
import itertools
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, arguments, read_jsonl, run

CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.3, 1.5


# ---------------------------------------------------------------- from the page to modules
def diffs():
    """The diffs of assets/loss.md, as {the name in bold before the diff: its text}."""
    page = (ROOT / "assets/loss.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\*\*(.+?)\*\*(?:(?!^\*\*).)*?```diff\n(.*?)```", page, re.M | re.S))


DIFFS = diffs()


def patched(name, diff):
    """The text of kernel.py or train.py with the diff applied. Hunks are separated by @@."""
    source = (ROOT / name).read_text(encoding="utf-8")
    parts = re.split(r"^--- (\S+)\n", diff, flags=re.M)
    of_file = dict(zip(parts[1::2], parts[2::2], strict=True))
    for hunk in of_file.get(name, "").split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        assert not old or source.count(old) == 1, f"not once in {name}:\n{old}"
        source = source.replace(old, new) if old else source
    return source


def load(tmp_path, name, diff):
    """The module kernel or train with the diff applied."""
    path = tmp_path / f"patched_{name}"
    path.write_text(patched(name, diff))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


# ---------------------------------------------------------------- inputs, and NumPy
@pytest.fixture
def rows():
    """Random rows [2, 40] with three answers each, as `make_rows` writes them: prompts and padding
    have weight 0. Ratios stay away from the bounds at which they are clipped."""
    rng = np.random.default_rng(5)
    shape = (2, 40)
    rows = {name: np.zeros(shape) for name in ("weight", "advantage")}
    rows["segments"] = np.zeros(shape, int)
    for r, starts in enumerate(((0, 9, 22, 37), (0, 14, 20, 40))):
        for segment, (start, end) in enumerate(itertools.pairwise(starts), 1):
            rows["segments"][r, start:end] = segment
            rows["weight"][r, start + 3 : end - 1] = 1 / (end - start - 4)
            rows["advantage"][r, start + 3 : end - 1] = rng.choice([-1.7, -0.6, 0.8, 1.4])
    rows["logp"] = -rng.exponential(1.5, shape)
    change = rng.choice([-1.4, -0.1, 0.1, 1.4], shape) + rng.uniform(-0.05, 0.05, shape)
    rows["old_logprobs"] = rows["logp"] - change
    rows["sampler_logprobs"] = rows["old_logprobs"] - rng.uniform(-1, 1, shape)
    return rows


def answers_of(rows):
    """The tokens of each answer, as index arrays."""
    for r, segment in itertools.product(range(2), range(1, 4)):
        yield np.nonzero(
            (rows["segments"] == segment) & (rows["weight"] > 0) & (np.arange(2)[:, None] == r)
        )


def over_answers(values, rows, reduce):
    """Each answer's sum or mean, at each of its tokens."""
    result = np.zeros_like(values)
    for tokens in answers_of(rows):
        result[tokens] = reduce(values[tokens])
    return result


def numpy_variant(name, rows):
    """Returns (each token's loss, its derivative by the token's logprob) in float64."""
    logp, A = rows["logp"], rows["advantage"]
    ratio = np.exp(logp - rows["old_logprobs"])
    gap = rows["old_logprobs"] - rows["sampler_logprobs"]
    importance = np.minimum(np.exp(gap), CAP)
    if name == "GSPO":
        ratio = np.exp(over_answers(logp - rows["old_logprobs"], rows, np.mean))
    clipped = np.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    policy = np.minimum(ratio * A, clipped * A)
    # The gradient is that of the ratio where the unclipped term is the smaller one.
    slope = np.where(ratio * A <= clipped * A, ratio * A, 0)
    if name == "CISPO":
        slope = np.minimum(ratio, 1 + CLIP_HIGH) * A
        policy = slope * logp
    elif name == "Dual clip":
        is_bounded = (A < 0) & (policy < 3 * A)
        policy = np.where(is_bounded, 3 * A, policy)
        slope = np.where(is_bounded, 0, slope)
        assert is_bounded[rows["weight"] > 0].any()
    elif name == "IcePop":
        importance = np.exp(gap)
        importance[(importance < 0.5) | (importance > 5)] = 0
    elif name.startswith("A mask"):
        importance = np.exp(over_answers(gap, rows, np.sum))
        importance[importance > CAP] = 0
    if name == "IcePop" or name.startswith("A mask"):
        is_kept = importance[rows["weight"] > 0] > 0
        assert is_kept.any() and not is_kept.all()
    weight = rows["weight"] * importance
    return -weight * policy, -weight * slope


# ---------------------------------------------------------------- tests
def test_the_page_has_five_diffs():
    names = ["CISPO", "Dual clip", "IcePop", "GSPO"]
    assert list(DIFFS)[:4] == names and list(DIFFS)[4].startswith("A mask") and len(DIFFS) == 5


@pytest.mark.parametrize("name", DIFFS)
def test_a_loss_of_the_page_is_what_it_says(name, rows, tmp_path, record_property):
    kernel = load(tmp_path, "kernel.py", DIFFS[name])
    train = load(tmp_path, "train.py", DIFFS[name])
    fields = {field: a.astype(np.float32) for field, a in rows.items() if field != "segments"}
    logp = fields.pop("logp")
    packed = fields | {"segments": rows["segments"]}
    if name == "GSPO":
        change = logp - fields["old_logprobs"]
        length = np.maximum(train.answer_sum(np.ones_like(change), packed), 1)
        fields["answer_log_ratio"] = train.answer_sum(change, packed) / length
    if name.startswith("A mask"):
        gap = fields["old_logprobs"] - fields["sampler_logprobs"]
        fields["answer_gap"] = train.answer_sum(gap, packed)
    knobs = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "is_cap": CAP}

    def loss_of(logp):
        loss, _ = kernel.grpo_terms(logp, np.zeros(logp.shape), fields, **knobs)
        return loss.sum(), loss

    gradient, loss = jax.grad(loss_of, has_aux=True)(logp)
    wanted_loss, wanted_gradient = numpy_variant(name, rows)
    assert np.abs(wanted_gradient).max() > 0.05
    # Unlike max, np.max returns NaN if there is one.
    worst = np.max([abs(loss - wanted_loss), abs(gradient - wanted_gradient)])
    assert worst < 1e-5
    record_property("largest error", f"{worst:.1e}")


@pytest.mark.parametrize("name", list(DIFFS)[:4])
def test_each_loss_differs_from_the_default(name, rows):
    """The inputs tell the losses apart."""
    loss, gradient = numpy_variant("default", rows)
    other_loss, other_gradient = numpy_variant(name, rows)
    assert abs(gradient - other_gradient).max() > 1e-3 or abs(loss - other_loss).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DIFFS)[3:])
def test_a_run_with_a_loss_of_whole_answers(name, tmp_path):
    for source in ("train.py", "kernel.py"):
        (tmp_path / source).write_text(patched(source, DIFFS[name]))
    shutil.copy(ROOT / "model.py", tmp_path)
    shutil.copytree(ROOT / "infra", tmp_path / "infra")
    flags = (
        "--steps 2 --sft_steps 4 --batch 2 --npq 4 --minibatches 2 --max_answer 40 --entropy_bonus "
        "0.01 --eval_data none --out run"
    )
    one = {"JAX_NUM_CPU_DEVICES": "1"}
    text = run(sys.executable, "train.py", *arguments([flags]), cwd=tmp_path, **one)
    field = "answer_log_ratio" if name == "GSPO" else "answer_gap"
    assert re.search(rf"tracing gradients: .*{field}", text), text
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert all(row["skipped"] == 0 and row["grad_norm"] > 0 for row in rows), rows
