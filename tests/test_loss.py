"""More tests of the GRPO loss: it never holds the logits of all tokens, is the same on any mesh,
takes large logits, and allows batches that lack some of the vectors."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import kernel
from test_kernel import (
    EVERYTHING,
    IMPLS,
    KNOBS,
    VECTORS,
    blocks,
    check_loss,
    gradients,
    is_finite,
    loss_inputs,
    mesh,
    numpy_loss,
    relative,
    run_loss,
    run_score,
    without_races,
)


@pytest.mark.parametrize("impl", IMPLS)
def test_logits_never_exist(impl):
    """Except in `full`, logits exist for at most 128 tokens at a time, as asked for. A score takes
    one GEMM, and a gradient three."""
    inputs = loss_inputs(1200, 1003, 1.3, 13)
    settings = {"impl": impl, "T": 1.3, "on": mesh(), "cores": 1}
    ones = np.ones(1200, np.float32)
    score = partial(kernel.score, weight_N=ones, mesh=mesh(), impl=impl, blocks=blocks(impl))
    gradient = partial(gradients, **settings, **KNOBS)
    programs = [
        (1, score, inputs[:3]),
        (3, partial(gradient, of="loss"), inputs),
        # Three GEMMs for the loss, and three for the cotangents of logprobs and entropies.
        (6, partial(gradient, of=EVERYTHING), inputs),
    ]
    for gemms, f, args in programs:
        text = str(jax.make_jaxpr(f)(*args))
        shapes = re.findall(r"\w\[([\d,]+)\]", text)
        largest = max(math.prod(map(int, dims.split(","))) for dims in shapes)
        assert (largest > 128 * 1003) == (impl == "full"), (gemms, largest)
        if impl != "pallas":
            assert text.count("dot_general[") == gemms


# fmt: off
# (impl, vocabulary, mesh, cores per chip). Some devices have little or none of the vocabulary.
MESHES = [
    ("jax", 203, (1, 8, 1), 1),
    ("jax", 203, (2, 4, 1), 1),
    ("jax", 203, (2, 2, 2), 1),
    ("jax", 5, (1, 8, 1), 1),
    ("jax", 5003, (2, 2, 1), 1),
    ("full", 203, (2, 2, 2), 1),
    ("pallas", 203, (2, 2, 2), 1),
    ("pallas", 300, (1, 8, 1), 1),
    ("pallas", 100, (1, 1, 1), 2),  # the interpreter detects races between the two cores
]
# fmt: on


@pytest.mark.parametrize("impl, V, dims, cores", MESHES)
def test_loss_is_the_same_on_any_mesh(impl, V, dims, cores, record_property):
    # More tokens than one chunk of 128. pallas gets few, as interpreting eight devices is slow.
    N = 136 if impl == "pallas" else 296
    inputs = loss_inputs(N, V, 1.3, V)
    of = "loss" if impl == "pallas" else EVERYTHING
    close = partial(assert_allclose, rtol=1e-5, atol=1e-5)
    loss, tokens, dh, dW = run_loss("jax", inputs, 1.3, of)
    many_loss, many_tokens, *many_gradients = run_loss(impl, inputs, 1.3, of, mesh(*dims), cores)
    jax.tree.map(close, (many_loss, many_tokens), (loss, tokens))
    live = inputs[3]["weight"] > 0
    for name, a in zip(("logp", "entropy"), run_score(impl, inputs, 1.3, mesh(*dims)), strict=True):
        close(np.where(live, a, 0), tokens[name])
    # Sums are in a different order, so the last bits differ.
    # Unlike max, np.max returns NaN if there is one.
    worst = np.max([*map(relative, many_gradients, (dh, dW))])
    assert worst < 1e-5
    record_property("largest relative error", f"{worst:.1e}")


@pytest.mark.parametrize(
    "impl, dims",
    [
        ("jax", (1, 1, 1)),
        ("full", (1, 1, 1)),
        ("pallas", (1, 1, 1)),
        ("jax", (2, 2, 2)),
        ("full", (2, 2, 2)),
        pytest.param("pallas", (2, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_a_frozen_head_gets_no_gradient(impl, dims):
    """If only h is differentiated, as with --lora, its gradient is the same, and dW is not
    computed: a chunk takes two GEMMs instead of three."""
    h, W, targets, vectors, cotangents = loss_inputs(136, 107, 1.3, 21)

    def objective(h, W):
        how = {"temperature": 1.3, "impl": impl, "blocks": blocks(impl)}
        loss, tokens = kernel.grpo_loss(h, W, targets, vectors, mesh(*dims), **how, **KNOBS)
        # The cotangents of logprobs and entropies take the GEMMs of all chunks once more.
        return loss + (cotangents * jnp.stack([tokens["logp"], tokens["entropy"]])).sum()

    of_both = jax.jit(jax.grad(objective, (0, 1)))
    of_h = jax.jit(jax.grad(objective))
    wanted, _ = without_races(of_both, h, W)
    assert_array_equal(without_races(of_h, h, W), wanted)
    gemms = [str(jax.make_jaxpr(f)(h, W)).count("dot_general[") for f in (of_both, of_h)]
    if impl == "jax":
        assert gemms == [6, 4]
    if impl == "pallas":
        assert gemms[1] < gemms[0]


def test_loss_without_some_vectors(record_property):
    """The loss is right if any of old_logprobs, sampler_logprobs and ref_logprobs are absent, with
    and without KL and cap.

    Without old_logprobs the ratio is 1. With clip_low = 0 this is a bound of the clip, where the
    gradient must be that of an unclipped token.
    """
    worst = 0.0
    for i, have in enumerate(
        ["old sampler", "old ref", "old", "sampler ref", "sampler", "ref", ""]
    ):
        present = [f"{name}_logprobs" for name in have.split()]
        beta = 0.0 if i == 1 else 0.2
        is_cap = 0.0 if i == 3 else 1.2
        inputs = loss_inputs(45, 37, 1.3, i, ("weight", "advantage", *present))
        knobs = {"clip_low": 0.0, "beta": beta, "is_cap": is_cap, "entropy_bonus": 0.0}
        errors, _ = check_loss("jax", inputs, 1.3, **knobs)
        worst = max(worst, *errors)
    record_property("largest error", f"{worst:.1e}")


@pytest.mark.parametrize("impl", IMPLS)
def test_large_logits_neither_overflow_nor_cancel(impl, record_property):
    worst = 0.0
    for dtype in (np.float32, jnp.bfloat16):
        inputs = loss_inputs(136, 107, 1.3, 11, top=1e4, dtype=dtype)
        out = run_loss(impl, inputs, 1.3, EVERYTHING)
        _, wanted, *_ = numpy_loss(*inputs, 1.3)
        assert is_finite(out)
        for name in ("logp", "entropy"):
            worst = max(worst, abs(out[1][name] - wanted[name]).max() / 1e4)
    assert worst < 2e-6
    record_property("largest error, as a part of the largest logit", f"{worst:.1e}")


def test_a_ratio_that_overflows():
    """A clipped token has no gradient, even if its ratio overflows. An unclipped token whose ratio
    overflows has a finite gradient."""
    hidden, head, targets, v, cotangents = loss_inputs(45, 37, 1.0, 10, VECTORS[:3], masked=0)
    v |= {"advantage": abs(v["advantage"]), "old_logprobs": np.full(45, -300, np.float32)}
    inputs = (hidden, head, targets, v, cotangents)
    loss, _, dh, dW = run_loss("jax", inputs, 1.0, entropy_bonus=0.0)
    assert_allclose(loss, -1.3 * (v["weight"] * v["advantage"]).sum(), rtol=1e-5)
    assert not np.asarray(dh).any() and not np.asarray(dW).any()
    v["advantage"] = -v["advantage"]
    assert is_finite(run_loss("jax", inputs, 1.0, entropy_bonus=0.0))


def test_a_kl_that_overflows():
    """The loss and its gradient are finite for a token that the reference finds far more likely."""
    vectors = {"weight": jnp.ones(1), "advantage": jnp.zeros(1), "ref_logprobs": jnp.zeros(1)}

    def loss(logp):
        loss_N, _ = kernel.grpo_terms(logp, jnp.zeros(1), vectors, beta=0.1)
        return loss_N.sum()

    assert is_finite(jax.value_and_grad(loss)(jnp.full(1, -300.0)))
