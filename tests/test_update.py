"""From answers to new weights: advantages, packed rows, the gradient and the optimizer."""

import dataclasses
import itertools
import math
from collections import Counter
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import (
    SMALL,
    check_errors,
    hidden_states,
    load,
    place,
    random_weights,
    textbook_hidden,
)
from numpy.testing import assert_allclose, assert_array_equal
from scipy import special

import model
import train
from infra.data import hf
from infra.data.tiny import TINY_MODEL
from infra.update import packing, state
from test_kernel import mesh, numpy_loss, relative
from tools.sizes import model_of_size

ONE = (1, 1, 1)
# With sgd and no clipping, an update subtracts the gradient times the learning rate.
PLAIN = dict(
    optimizer="sgd",
    grad_clip=0,
    dtype="float32",
    attention="blockwise",
    loss_impl="jax",
    max_answer=12,
    is_cap=1.5,
)


# ---------------------------------------------------------------- one case of an update
@cache
def update_case(model_cfg=SMALL):
    """Returns random weights, and 16 random sequences: their prompts, answers, advantages and
    sampler logprobs."""
    rng = np.random.default_rng(5)

    def sequences(shortest, longest):
        lengths = rng.integers(shortest, longest + 1, 16)
        return [rng.integers(0, model_cfg.V, n).tolist() for n in lengths]

    return SimpleNamespace(
        weights=random_weights(model_cfg),
        prompts=sequences(2, 7),
        answers=sequences(1, 8),
        advantages=rng.standard_normal(16),
        sampler_logprobs=-3 * rng.random((16, 9)),
    )


def setup_of(on, width, micro_batch, model_cfg=SMALL):
    """Returns the part of a run's Setup that train.make_batches reads."""
    return SimpleNamespace(mesh=on, model_cfg=model_cfg, row_width=width, micro_batch=micro_batch)


def packed_batch(cfg, on, micro_batch, width, answers=None):
    """Returns the sequences of the case as one minibatch: a list of micro-batches of packed
    rows."""
    case = update_case()
    setup = setup_of(on, width, micro_batch)
    (batch,), _ = train.make_batches(
        case.prompts, answers or case.answers, case.advantages, cfg, setup, case.sampler_logprobs
    )
    return batch


def unpacked_rows(cfg, model_cfg=SMALL, advantages=None, sampled=True, n=16):
    """Returns the first n sequences of the case, each in its own row of 16 tokens."""
    case = update_case(model_cfg)
    if advantages is None:
        advantages = case.advantages
    sampler_logprobs = case.sampler_logprobs if sampled else None
    alone = {i: [i] for i in range(n)}
    return train.make_rows(
        alone, case.prompts, case.answers, advantages, (n, 16), cfg, sampler_logprobs
    )


def normalised(rows, loss_agg):
    """Normalise the weights of rows with one sequence each, as make_batches does."""
    total = rows["weight"].sum() if loss_agg == "token" else len(rows["weight"])
    return rows | {"weight": rows["weight"] / np.float32(total)}


def with_policies(rows):
    """Add `old_logprobs` and `ref_logprobs` to rows, of the policy before the update and of a
    reference."""
    sampler_logprobs = np.asarray(rows["sampler_logprobs"])
    in_answer = np.asarray(rows["weight"]) > 0
    old_logprobs = sampler_logprobs - np.float32(0.1) * in_answer
    ref_logprobs = sampler_logprobs * np.float32(0.9)
    if isinstance(rows["sampler_logprobs"], jax.Array):
        old_logprobs, ref_logprobs = jax.device_put(
            [old_logprobs, ref_logprobs], rows["sampler_logprobs"].sharding
        )
    return rows | {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}


def state_of(cfg, model_cfg, on):
    """Returns the weights of the case with a new optimizer state, placed as between updates."""
    weights = update_case(model_cfg).weights
    opt = {name: train.optimizer(cfg, name).init(a) for name, a in weights.items()}
    arrays = {"params": place(weights, on), "opt": opt}
    without_ref = dataclasses.replace(cfg, beta=0.0)
    abstract = state.abstract_state(without_ref, model_cfg, on, train.optimizer)
    return jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), arrays, abstract)


def memory_kinds(tree):
    """Returns {(is it a norm or a bias, kind of memory)} of the arrays of a tree."""
    arrays = model.flatten(tree).items()
    return {("norm" in n or "/b" in n, a.sharding.memory_kind) for n, a in arrays if a.ndim}


def update_of(batch, model_cfg=SMALL, on=None, rate=1e4, **flags):
    """Run train.update. Returns (what it subtracts from each parameter, divided by the learning
    rate; the metrics)."""
    cfg = train.Config(**PLAIN | flags)
    on = on or mesh()
    before = state_of(cfg, model_cfg, on)
    kinds = memory_kinds(before["params"]), memory_kinds(before["opt"])
    after, parts, norm = train.update(before, batch, rate, cfg=cfg, model_cfg=model_cfg, mesh=on)
    assert (memory_kinds(after["params"]), memory_kinds(after["opt"])) == kinds
    device = jax.devices()[0].default_memory().kind
    wanted = "pinned_host" if cfg.offload == "params" else device
    assert kinds[0] == {(False, wanted), (True, device)}
    new, parts = jax.device_get((model.flatten(after["params"]), parts))
    weights = update_case(model_cfg).weights
    metrics = {"grad_norm": float(norm)}
    metrics["loss"] = sum(part["loss"] for part in parts)
    for name in parts[0]["sum"]:
        metrics[name] = sum(part["sum"][name] for part in parts)
    for name in parts[0]["max"]:
        metrics[f"{name}/max"] = max(part["max"][name] for part in parts)
    return {name: (weights[name] - a) / rate for name, a in new.items()}, metrics


@cache
def unsplit_batch(loss_agg):
    """Returns a minibatch with one sequence per row, and all rows in one micro-batch."""
    rows = unpacked_rows(train.Config(max_answer=12, loss_agg=loss_agg))
    return [with_policies(normalised(rows, loss_agg))]


@cache
def unsplit_update(loss_agg):
    return update_of(unsplit_batch(loss_agg), loss_agg=loss_agg, beta=0.1)


# ---------------------------------------------------------------- advantages
def test_advantages_of_a_group():
    # With one of four answers right, the mean is 1/4, and the population's standard deviation is
    # sqrt(3)/4.
    a = train.group_advantages([1, 0, 0, 0], 4, "grpo")
    assert_allclose(a, [1.7320508, -0.5773503, -0.5773503, -0.5773503], rtol=1e-7)
    mixed = np.array([1.1, 0.1, 0.1, 0.0])
    off = mixed - mixed.mean()
    others = [np.delete(mixed, i).mean() for i in range(4)]
    wanted = {"drgrpo": off}
    wanted["grpo"] = off / math.sqrt(np.mean(off**2))
    wanted["rloo"] = mixed - others
    # Sums of weighted scores round: 0.1 + 0.2 is not 0.3, and 0.1 + 0.2 - 0.3 is not 0. Squares of
    # the tiniest rewards are 0.
    rewards = [*mixed, *[1.1] * 4]
    rewards += [0.3] * 4
    rewards += [0.1 + 0.2, 0.3, 0.3, 0.3]
    rewards += [0.1 + 0.2 - 0.3, 0, 0, 0]
    rewards += [np.exp(-375), np.exp(-372), 0, 0]
    for kind, first in wanted.items():
        a = train.group_advantages(rewards, 4, kind)
        assert_allclose(a[:4], first, rtol=1e-12)
        assert (a[4:] == 0).all(), "rewards that are equal up to rounding must give advantage 0"


# ---------------------------------------------------------------- rows
ROWS = """
    tokens           5  6  7   8   9   4   3   0
    positions        0  1  2   3   4   0   1   0
    segments         1  1  1   1   1   2   2   0
    targets          0  0  8   9   0   3   0   0
    weight           0  0  0.5 0.5 0   1   0   0
    advantage        0  0  0.5 0.5 0   2   0   0
    sampler_logprobs 0  0 -1  -2   0  -3   0   0
"""


def test_rows_hold_the_fields_of_every_token():
    cfg = train.Config(loss_agg="sequence", max_answer=4)
    prompts = [[4], [5, 6, 7]]
    answers = [[3], [8, 9]]
    sampler_logprobs = [[-3, 99], [-1, -2, 99, 99]]
    packed = {0: [1, 0]}
    rows = train.make_rows(packed, prompts, answers, [2, 0.5], (1, 8), cfg, sampler_logprobs)
    for line in ROWS.strip().splitlines():
        name, *values = line.split()
        row = rows.pop(name)
        assert row.tolist() == [[float(value) for value in values]], name
    assert not rows


# fmt: off
PACKED = [  # (devices, rows per device that the tokens of all sequences fill)
    (1, 8),
    (1, 8.4),
    (1, 8.8),
    (1, 16),
    (4, 8),
    (8, 8),
    (4, 30),
]
# fmt: on


def test_packing_fills_rows_and_shares_them_out(record_property):
    """With lengths like those of GSM8K, each sequence is in one row, the devices' numbers of rows
    differ by at most one, and there is at most one row more than the tokens fill."""
    rng = np.random.default_rng(0)
    cfg = train.Config(dtype="float32", max_answer=1024)
    one_layer = dataclasses.replace(SMALL, L=1)
    width = 2048
    padding = []
    for shards, rows_each in PACKED:
        lengths = rng.lognormal(5.6, 0.4, 2000).astype(int)
        lengths = np.clip(lengths, 60, 1400)
        room = shards * rows_each * width
        lengths = lengths[: np.searchsorted(lengths.cumsum(), room)]
        setup = setup_of(mesh(fsdp=shards), width, 16, one_layer)
        prompts = [[1] * int(n) for n in lengths // 3]
        answers = [[1] * int(n) for n in lengths - lengths // 3]
        sampler_logprobs = [np.zeros(len(a)) for a in answers]
        (batch,), counts = train.make_batches(
            prompts, answers, np.ones(len(lengths)), cfg, setup, sampler_logprobs
        )
        # Count the rows with tokens on each device.
        filled = sum(
            np.asarray(rows["segments"]).any(1).reshape(shards, 16).sum(1) for rows in batch
        )
        assert batch[0]["tokens"].shape == (shards * 16, width)
        packed = packing.pack(lengths.tolist(), width)
        assert sorted(itertools.chain(*packed)) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= width for row in packed)
        assert filled.sum() == len(packed) and np.ptp(filled) <= 1, filled
        weights = [np.asarray(rows["weight"]) for rows in batch]
        assert_allclose(np.sum(weights), 1, rtol=1e-5)
        assert counts["tokens"] == lengths.sum()
        # Rows of this length are computed one by one, so empty rows do not count as slots.
        assert model.rows_at_once(16, width) == 1
        assert counts["slots"] == filled.sum() * width
        fewest = math.ceil(lengths.sum() / width)
        assert counts["slots"] <= (fewest + 1) * width, (filled, fewest)
        padding.append(1 - counts["tokens"] / counts["slots"])
    record_property("padding", ", ".join(f"{part:.1%}" for part in padding))


SMOLLM2 = dataclasses.replace(SMALL, V=49152, D=576, F=1536, N=9, K=3, H=64, L=30, tied=True)
ROW_SHAPES = [  # (model, longest sequence, sequences per device, tokens per row, rows per device)
    (SMOLLM2, 88, 64, 176, 32),  # with three sequences per row, attention would take too much
    (SMOLLM2, 88, 12, 88, 12),  # with two, there would be too few rows
    (SMOLLM2, 83, 64, 168, 32),  # two sequences, rounded up to a multiple of 8
    (SMOLLM2, 300, 64, 304, 64),
    (model_of_size("0.5B"), 88, 64, 440, 13),
    (model_of_size("tiny"), 72, 64, 72, 64),
]


def test_short_sequences_share_rows():
    """A row holds several short sequences, but attention stays cheap, and each device keeps enough
    rows. Sequences of any lengths fit into the number of rows that is promised."""
    rng = np.random.default_rng(0)
    for model_cfg, longest, sequences, *expected in ROW_SHAPES:
        cfg = train.Config(batch=sequences, npq=1)
        shape = packing.row_shape(longest, cfg, model_cfg, mesh())
        assert [*shape] == expected
        # Sequences a little longer than half of the longest fill rows worst.
        for least in 1, longest // 2 + 1, longest:
            lengths = rng.integers(least, longest + 1, sequences)
            assert len(packing.pack(lengths, shape.width)) <= shape.most
    cfg = train.Config(batch=16, npq=8, minibatches=2)
    assert packing.row_shape(83, cfg, SMOLLM2, mesh(fsdp=2, tp=2)) == (176, 16)


def test_flops_are_those_of_matrices_and_of_attention():
    """The tokens of a sequence attend to 1, 2, 3 tokens, and so on. An embedding is only looked up,
    unless it is the head, too."""
    tokens = 3 + 2
    pairs = (1 + 2 + 3) + (1 + 2)
    for tied in True, False:
        cfg = dataclasses.replace(SMALL, tied=tied)
        sizes = model.shapes(cfg)
        if not tied:
            del sizes["embed_VD"]
        matrices = sum(map(math.prod, sizes.values()))
        of_pair = 12 * cfg.L * cfg.N * cfg.H
        wanted = 6 * matrices * tokens
        wanted += of_pair * pairs
        assert packing.flops(train.Config(), cfg, [3, 2]) == wanted


def test_a_minibatch_takes_every_nth_sequence():
    """A minibatch takes every nth sequence, so that the same sequences go together on any number of
    hosts."""
    setup = setup_of(mesh(), 8, 1)
    prompts = [[1]] * 6
    answers = [[1, 1]] * 6
    every = np.ones(6, bool)
    packed = packing.pack_minibatches(
        prompts, answers, every, every, train.Config(minibatches=2), setup
    )
    first, second = packed.micro_batches
    assert first == [{0: [0, 2]}, {0: [4]}]
    assert second == [{0: [1, 3]}, {0: [5]}]


def place_of(sequence, rows):
    """Returns the mask of a sequence in packed rows."""
    found = np.zeros(rows["tokens"].shape, bool)
    for r, segments in enumerate(rows["segments"]):
        for segment in set(segments) - {0}:
            at = segments == segment
            if rows["tokens"][r][at].tolist() == sequence:
                found[r] = at
    return found


def test_packed_answers_do_not_attend_to_each_other(record_property):
    """If an answer in a row is replaced by another of the same length, the logprobs of all other
    answers stay the same, bit for bit."""
    case = update_case()
    cfg = train.Config(dtype="float32", max_answer=12, attention="blockwise")
    params = place(case.weights, mesh())
    logprobs_of = partial(train.target_logprobs, cfg=cfg, model_cfg=SMALL, mesh=mesh())

    def scored(answers):
        """Returns (the logprobs of all rows, the rows in NumPy)."""
        batch = packed_batch(cfg, mesh(), 3, 64, answers)
        logps = [logprobs_of(params, rows) for rows in batch]
        rows = {}
        for name in "tokens", "segments", "weight":
            rows[name] = np.concatenate([part[name] for part in batch])
        return np.concatenate(logps), rows

    before, _ = scored(case.answers)
    changed = 0
    for i in range(0, 16, 3):
        others = list(case.answers)
        others[i] = [(token + 7) % SMALL.V for token in others[i]]
        after, rows = scored(others)
        own = place_of(case.prompts[i] + others[i], rows)
        in_answer = rows["weight"] > 0
        assert own.sum() == len(case.prompts[i] + others[i])
        assert_array_equal(before[in_answer & ~own], after[in_answer & ~own])
        changed += (before[in_answer & own] != after[in_answer & own]).sum()
        segments = rows["segments"][own.any(1)]
        assert segments.max() > 1, "alone in its row"
    assert changed > 8
    record_property("logprobs changed", int(changed))


# ---------------------------------------------------------------- the gradient
def label(value):
    """Returns a parameter as text, for the name of a test."""
    if isinstance(value, dict):
        return ",".join(f"{name}={v}" for name, v in value.items()) or "plain"
    if isinstance(value, tuple):
        return "x".join(str(n) for n in value)
    return str(value)


# fmt: off
SPLITS = [  # (aggregation, mesh, rows per device in a micro-batch, tokens of a row, flags)
    ("token", ONE, 4, 32, {"remat": "dots"}),
    ("sequence", ONE, 3, 24, {}),
    ("constant", ONE, 3, 40, {"offload": "optimizer"}),
    ("token", (1, 8, 1), 2, 16, {"offload": "params"}),
    ("token", (2, 2, 2), 3, 16, {"offload": "params", "remat": "none"}),
]
MORE_SPLITS = [
    ("token", ONE, 1, 16, {}),
    ("token", ONE, 20, 48, {"remat": "none"}),
    ("token", (2, 4, 1), 1, 24, {}),
    ("token", (8, 1, 1), 2, 32, {}),
    ("token", ONE, 1, 208, {"attention": "splash"}),
]
# fmt: on
SLOW_SPLITS = [pytest.param(*split, marks=pytest.mark.slow) for split in MORE_SPLITS]


@pytest.mark.parametrize("loss_agg,dims,micro_batch,width,flags", SPLITS + SLOW_SPLITS, ids=label)
def test_gradient_is_the_same_for_any_split(
    loss_agg, dims, micro_batch, width, flags, record_property
):
    """Gradient and metrics are the same for any split of the sequences into rows and micro-batches,
    on any mesh, and for any --remat and --offload."""
    on = mesh(*dims)
    cfg = train.Config(**PLAIN | {"loss_agg": loss_agg})
    batch = [with_policies(rows) for rows in packed_batch(cfg, on, micro_batch, width)]
    gradient, metrics = update_of(batch, on=on, loss_agg=loss_agg, beta=0.1, **flags)
    wanted, wanted_metrics = unsplit_update(loss_agg)
    for name, value in wanted_metrics.items():
        # The loss is a sum of terms of both signs, in a different order on a mesh.
        atol = 0 if name == "loss" and dims != ONE else 1e-6
        assert_allclose(metrics[name], value, rtol=1e-5, atol=atol, err_msg=name)
    errors = {name: relative(gradient[name], wanted[name]) for name in wanted}
    check_errors(errors, 1e-5, record_property)


def near_policies(rows, weights, model_cfg, rng):
    """Returns (rows with `old_logprobs` and `ref_logprobs` so close to the policy that some ratios
    are within the clip, the hidden states of all tokens)."""
    lists = [rows[name].tolist() for name in ("tokens", "positions", "segments")]
    hidden = hidden_states(place(weights, mesh()), model_cfg, *lists)
    hidden = np.asarray(hidden).reshape(-1, model_cfg.D)
    targets = rows["targets"].reshape(-1)
    z = hidden.astype(np.float64) @ weights["head_VD"].T / 0.7
    logp = special.log_softmax(z, -1)[np.arange(len(targets)), targets]
    scored = dict(rows)
    in_answer = rows["weight"].reshape(-1) > 0
    for name, spread in ("old_logprobs", 0.5), ("ref_logprobs", 1.0):
        noisy = logp + rng.uniform(-spread, spread, len(targets))
        noisy = np.where(in_answer, noisy, 0).astype(np.float32)
        scored[name] = noisy.reshape(rows["tokens"].shape)
    return scored, hidden


# fmt: off
REWARDS = [  # of four groups; in the first group all answers score the same
    [1.1, 1.1, 1.1, 1.1],
    [0.0, 0.1, 1.1, 0.1],
    [1.0, 0.0, 0.0, 0.0],
    [0.1, 0.1, 1.1, 1.1],
]
# fmt: on


def test_update_equals_numpy_for_every_aggregation(record_property):
    """The loss, and the gradient of an untied head, equal those of float64 NumPy, computed from the
    hidden states."""
    untied = dataclasses.replace(SMALL, tied=False)
    case = update_case(untied)
    rng = np.random.default_rng(6)
    advantages = train.group_advantages(REWARDS, 4, "grpo")
    assert (advantages[:4] == 0).all()
    assert (advantages[4:] != 0).all()
    lengths = np.array([[len(a)] for a in case.answers])
    # The weight of a token of each answer.
    token_weights = {"token": 1 / lengths.sum()}
    token_weights["sequence"] = 1 / lengths / 16
    token_weights["constant"] = 1 / 12 / 16
    knobs = dict(clip_low=0.2, clip_high=0.28, beta=0.1, is_cap=1.5, entropy_bonus=0.02)
    errors = {}
    seen = Counter()
    for loss_agg, each in token_weights.items():
        cfg = train.Config(max_answer=12, loss_agg=loss_agg)
        rows = unpacked_rows(cfg, untied, advantages)
        rows, hidden = near_policies(rows, case.weights, untied, rng)
        batch = [normalised(rows, loss_agg)]
        flags = dict(loss_agg=loss_agg, beta=0.1, temperature=0.7, entropy_bonus=0.02)
        got, metrics = update_of(batch, untied, **flags)
        vectors = rows | {"weight": (rows["weight"] > 0) * each}
        vectors = {name: a.reshape(-1) for name, a in vectors.items()}
        targets = vectors["targets"]
        cotangents = np.zeros((2, len(targets)))
        loss_N, _, _, dW, cases = numpy_loss(
            hidden, case.weights["head_VD"], targets, vectors, cotangents, 0.7, **knobs
        )
        # The loss is a sum of terms of both signs.
        assert_allclose(metrics["loss"], loss_N.sum(), rtol=1e-5, atol=1e-6)
        errors[loss_agg] = relative(got["head_VD"], dW)
        seen += cases
    for clipped_or_not in ("above", True), ("below", False), ("within", True):
        assert seen[clipped_or_not] > 3, seen
    check_errors(errors, 1e-5, record_property)


def test_supervised_update_is_maximum_likelihood(record_property):
    """A supervised update equals the textbook's maximum likelihood: full logits, log-softmax, and
    the mean over answer tokens. entropy_bonus and temperature have no effect."""
    case = update_case()
    rows = unpacked_rows(train.Config(), advantages=np.ones(16), sampled=False, n=4)
    got, metrics = update_of([normalised(rows, "token")], entropy_bonus=0.5, temperature=0.7)
    tokens = np.zeros((4, 16), np.int32)
    targets = np.zeros((4, 16), np.int32)
    in_answer = np.zeros((4, 16), bool)
    for i in range(4):
        start = len(case.prompts[i])
        end = start + len(case.answers[i])
        tokens[i, :end] = case.prompts[i] + case.answers[i]
        targets[i, start - 1 : end - 1] = case.answers[i]
        in_answer[i, start - 1 : end - 1] = True
    positions = np.tile(np.arange(16), (4, 1))

    def nll(params):
        hidden = textbook_hidden(params, SMALL, tokens, positions, np.ones_like(tokens))
        logp = jax.nn.log_softmax(hidden @ model.head(params).T)
        taken = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
        return -jnp.where(in_answer, taken, 0).sum() / in_answer.sum()

    value_and_gradient = jax.jit(jax.value_and_grad(nll))
    value, wanted = value_and_gradient(place(case.weights, mesh()))
    assert_allclose(metrics["nll"] / in_answer.sum(), value, rtol=1e-5)
    wanted = model.flatten(wanted)
    errors = {name: relative(got[name], wanted[name]) for name in wanted}
    check_errors(errors, 1e-5, record_property)


# ---------------------------------------------------------------- the optimizer
def is_matrix(name):
    return "norm" not in name and "/b" not in name


ADAMW = dict(optimizer="adamw", b2=0.9, weight_decay=0.1)
LION = dict(optimizer="lion", b2=0.9, offload="optimizer")


@pytest.mark.parametrize("flags", [ADAMW, LION], ids=["adamw", "lion"])
def test_optimizer_equals_optax_on_the_clipped_gradient(flags):
    weights = update_case().weights
    grads, _ = unsplit_update("token")
    squares = [np.sum(g.astype(np.float64) ** 2) for g in grads.values()]
    norm = math.sqrt(sum(squares))
    flags = flags | dict(beta=0.1, grad_clip=1e-3)
    got, metrics = update_of(unsplit_batch("token"), rate=0.01, **flags)
    assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    if flags["optimizer"] == "adamw":
        mask = {name: is_matrix(name) for name in weights}
        theirs = optax.adamw(0.01, b2=0.9, weight_decay=0.1, mask=mask)
    else:
        theirs = optax.lion(0.01, b2=0.9, weight_decay=0.0)

    @jax.jit
    def step(grads, weights):
        return theirs.update(grads, theirs.init(weights), weights)[0]

    clipped = {name: g * 1e-3 / norm for name, g in grads.items()}
    steps = step(clipped, weights)
    for name in weights:
        ours = weights[name] - 0.01 * got[name]
        assert_allclose(ours, weights[name] + steps[name], atol=2e-4, err_msg=name)


def test_sgd_takes_the_clipped_gradient():
    """Test clipping with sgd, too: the first steps of adamw and lion hardly depend on the size of
    the gradient."""
    grads, _ = unsplit_update("token")
    squares = [np.sum(g.astype(np.float64) ** 2) for g in grads.values()]
    largest = 1e-3 * math.sqrt(sum(squares))
    got, _ = update_of(unsplit_batch("token"), beta=0.1, grad_clip=largest)
    for name, g in grads.items():
        wanted = 1e-3 * g
        assert relative(got[name], wanted) < 1e-4, name


@pytest.mark.parametrize("dims", [ONE, (2, 2, 2)], ids=label)
@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_offloaded_steps_equal_those_on_the_device(offload, dims):
    """Three steps of AdamW, the last of which is skipped, are bit for bit the same with offloaded
    arrays as with all arrays on the devices."""
    on = mesh(*dims)
    rng = np.random.default_rng(7)
    factors = np.float32([0.5, 2.0, np.nan])
    weights = update_case().weights
    gradients = {k: rng.standard_normal((3, *w.shape), np.float32) for k, w in weights.items()}

    def last(name, cfg):
        before = state_of(cfg, SMALL, on)
        param = model.flatten(before["params"])[name]
        opt = before["opt"][name]
        sharding = jax.NamedSharding(on, model.spec(name))
        for gradient, factor in zip(gradients[name], factors, strict=True):
            gradient = jax.device_put(gradient, sharding)
            param, opt = train.optimizer_step(
                param, opt, gradient, factor, 0.01, name=name, cfg=cfg
            )
        return jax.device_get((param, opt))

    on_device = train.Config(**PLAIN | ADAMW)
    offloaded = dataclasses.replace(on_device, offload=offload)
    for name in weights:
        found = last(name, offloaded)
        wanted = last(name, on_device)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert abs(found[0] - weights[name]).max() > 0, f"no step changed {name}"


def shape_and_place(a):
    of_device = a.sharding.shard_shape(a.shape)
    return a.shape, a.dtype, of_device, a.sharding.memory_kind


@pytest.mark.parametrize("dims", [(2, 2, 2), (1, 2, 4)], ids=label)
def test_rows_of_a_plan_are_those_of_a_run(dims):
    on = mesh(*dims)
    cfg = train.Config(**PLAIN)
    rows, *_ = packed_batch(cfg, on, micro_batch=2, width=24)
    fields = train.token_fields(cfg, False)
    planned = state.abstract_rows(fields, 2, 24, on)
    assert jax.tree.map(shape_and_place, planned) == jax.tree.map(shape_and_place, rows)


@pytest.mark.parametrize("offload", ["none", "optimizer", "params"])
def test_the_first_state_is_what_was_planned(offload, tmp_path):
    """Its arrays have the dtypes, and are in the memory, that a run has reserved. The reference is
    the policy in the compute dtype, on the devices."""
    small = dict(hidden_size=16, intermediate_size=16, vocab_size=40)
    config = TINY_MODEL | small
    hf.write_random(tmp_path, config, seed=1)
    params, model_cfg = load(tmp_path)
    cfg = train.Config(optimizer="adamw", beta=0.1, dtype="bfloat16", offload=offload)
    wanted = state.abstract_state(cfg, model_cfg, mesh(), train.optimizer)
    files = hf.ModelFiles(tmp_path, model_cfg)
    found = state.initial_state(files, wanted, cfg, mesh(), train.optimizer, adapters=None)

    assert jax.tree.map(shape_and_place, found) == jax.tree.map(shape_and_place, wanted)
    # Gradients are as parameters that stay on the devices.
    on_device = dataclasses.replace(cfg, offload="none")
    grads = state.abstract_gradients(cfg, model_cfg, mesh(), train.optimizer)
    wanted = state.abstract_state(on_device, model_cfg, mesh(), train.optimizer)["params"]
    assert jax.tree.map(shape_and_place, grads) == jax.tree.map(shape_and_place, wanted)
    for name, a in model.flatten(found["params"]).items():
        is_offloaded = offload == "params" and is_matrix(name)
        is_on_host = a.sharding.memory_kind == "pinned_host"
        assert is_on_host == is_offloaded, name
    jax.tree.map(assert_array_equal, found["params"], params)
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    jax.tree.map(assert_array_equal, found["ref"], rounded)
    assert not any(np.any(a) for a in jax.tree.leaves(found["opt"]))


# ---------------------------------------------------------------- updates that are not finite
def test_update_that_is_not_finite_changes_nothing():
    """If one of several micro-batches is not finite, the update changes nothing, bit for bit."""
    cfg = train.Config(**PLAIN | ADAMW | {"beta": 0.1})
    static = dict(cfg=cfg, model_cfg=SMALL, mesh=mesh())
    (good,) = unsplit_batch("token")
    for name, value in ("advantage", np.nan), ("weight", np.inf), ("weight", 0.1):
        old = state_of(cfg, SMALL, mesh())
        before = jax.device_get((model.flatten(old["params"]), old["opt"]))
        spoilt = good[name].copy()
        spoilt[0] = value
        batch = [good | {name: spoilt}, good]
        new, _, norm = train.update(old, batch, 0.1, **static)
        after = jax.device_get((model.flatten(new["params"]), new["opt"]))
        if np.isfinite(value):
            assert np.isfinite(norm)
            assert (after[0]["norm_D"] != before[0]["norm_D"]).any()
        else:
            assert np.isnan(norm), (name, value)
            jax.tree.map(assert_array_equal, before, after)


def test_a_loss_that_is_not_finite_skips_an_update():
    """Gradients may be finite where the loss is not."""
    cfg = train.Config(grad_clip=1.0)
    grads = {"a": jnp.float32([3, 4])}
    assert_allclose(train.norm_and_factor(grads, jnp.float32(-2), cfg), (5, 0.2), rtol=1e-6)
    for loss in np.nan, np.inf:
        assert np.isnan(train.norm_and_factor(grads, jnp.float32(loss), cfg)).all()
