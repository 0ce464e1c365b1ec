"""Test the GRPO loss (kernel.py) against float64 NumPy, token by token, and against Liger.

    python test_kernel.py           these tests alone, then the largest error of each comparison
    bash launch.sh test             these and the tests in tests/ (tests/test_loss.py: over meshes)

The Pallas kernels are compiled on a TPU and interpreted elsewhere.
"""

import os
import sys
from importlib.metadata import version

# All tests, including those in tests/, run in this environment. Set it before JAX reads it.
# Split the CPU into eight devices, so that tests run on real meshes.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Give XLA 32 threads: with one per core, the collectives of eight devices may deadlock.
os.environ.setdefault("NPROC", "32")
# Compute float32 products in float32 on GPUs and TPUs, too.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Tests compute little, so compile fast: without LLVM's optimisation and, with jaxlib 0.10, without
# fusion emitters. jaxlib 0.12 refuses the second flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)

import contextlib
import io
from collections import Counter, defaultdict
from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from numpy.testing import assert_allclose, assert_array_equal
from scipy import special

import kernel


# ---------------------------------------------------------------- what all tests use
def pytest_report_header():
    kernels = "compiled" if jax.default_backend() == "tpu" else "interpreted"
    devices = f"{jax.device_count()} {jax.default_backend()} devices"
    return f"jax {jax.__version__} on {devices}, Pallas kernels {kernels}"


def pytest_terminal_summary(terminalreporter):
    """Print the values that tests recorded, mostly the largest error of a comparison."""
    lines = []
    for report in terminalreporter.getreports("passed"):
        for name, value in getattr(report, "user_properties", []):
            test = report.nodeid.rpartition("::")[2]
            lines.append(f"{test}: {name} {value}")
    if lines:
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(sorted(lines)))


def mesh(dp=1, fsdp=1, tp=1):
    """A mesh over the first devices; skips the test if there are too few."""
    n = dp * fsdp * tp
    if len(jax.devices()) < n:
        pytest.skip(f"needs {n} devices, there are {len(jax.devices())}")
    devices = np.array(jax.devices()[:n]).reshape(dp, fsdp, tp)
    return Mesh(devices, ("dp", "fsdp", "tp"))


def relative(a, b):
    """|a - b| / |b|, in float64."""
    a = np.asarray(a, np.float64)
    b = np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


# ---------------------------------------------------------------- inputs and the reference
IMPLS = ("jax", "pallas", "full")
# The vectors that the loss takes, one number per token: see `grpo_terms`.
VECTORS = ("weight", "advantage", "old_logprobs", "sampler_logprobs", "ref_logprobs")
KNOBS = {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.3, "is_cap": 1.5, "entropy_bonus": 0.05}
# All the outputs that have gradients: the loss, and sums of the logprobs and of the entropies,
# weighted by random cotangents.
EVERYTHING = "loss logp entropy"


@cache
def blocks(impl, cores=1):
    """Blocks so small that tests reach every edge; on a TPU, the smallest blocks that compile."""
    if impl != "pallas":
        return kernel.Blocks(128)
    sizes = {"chunk_tokens": 128, "tile_vocab": 32, "vmem_bytes": 8 << 20}
    if jax.default_backend() == "tpu":
        return kernel.Blocks(**sizes, tile_tokens=128, tile_hidden=128, step_rows=16)
    # In the interpreter, unwritten memory reads as NaN. Races need two cores; one core is faster.
    interpret = pltpu.InterpretParams(
        num_cores_or_threads=cores,
        detect_races=cores > 1,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
    return kernel.Blocks(**sizes, tile_tokens=64, tile_hidden=16, step_rows=8, interpret=interpret)


def loss_inputs(N, V, T, seed, have=VECTORS, masked=0.4, top=20.0, dtype=np.float32):
    """Returns random (hidden [N, 24], head [V, 24], targets [N], {vector: [N]}, cotangents [2, N]).

    The largest absolute logit of every third token is `top`. Ratios stay away from the clip bounds,
    so that rounding does not decide what is clipped. Masked tokens hold NaN and infinity in all but
    their targets and weights.
    """
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((N, 24))
    head = 0.3 * rng.standard_normal((V, 24)).astype(np.float32)
    largest = abs(hidden[::3] @ head.T).max(-1, keepdims=True)
    hidden[::3] *= top * T / largest
    # Everything else follows from the rounded values, which are what the loss sees.
    hidden = np.asarray(jnp.asarray(hidden, dtype), np.float64)
    rounded_head = np.asarray(jnp.asarray(head, dtype), np.float64)
    z = hidden @ rounded_head.T / T
    # Some targets are the likeliest token, as most sampled tokens are.
    is_likely = rng.random(N) < 0.3
    targets = np.where(is_likely, z.argmax(-1), rng.integers(0, V, N))
    log_p = special.log_softmax(z, -1)
    logp = log_p[np.arange(N), targets]

    # Logs of 1 - clip_low and 1 + clip_high are -0.22 and 0.26.
    off_policy = rng.choice([-3, -0.5, -0.1, 0.1, 0.5, 3], N)
    off_policy += rng.uniform(-0.05, 0.05, N)
    vectors = {}
    vectors["weight"] = rng.uniform(0.2, 2, N)
    vectors["advantage"] = rng.standard_normal(N)
    vectors["old_logprobs"] = logp + off_policy
    vectors["sampler_logprobs"] = vectors["old_logprobs"] + rng.uniform(-1, 1, N)
    vectors["ref_logprobs"] = logp + rng.uniform(-1, 1, N)

    is_masked = rng.random(N) < masked
    vectors["weight"][is_masked] = 0
    not_finite = [np.nan, np.inf, -np.inf]
    for name, a in {"hidden": hidden, **vectors}.items():
        if name != "weight":
            a[is_masked] = rng.choice(not_finite, a[is_masked].shape)
    vectors = {name: vectors[name].astype(np.float32) for name in VECTORS if name in have}
    cotangents = rng.standard_normal((2, N)).astype(np.float32)
    hidden = jnp.asarray(hidden, dtype)
    targets = targets.astype(np.int32)
    return hidden, head, targets, vectors, cotangents


def numpy_token(logp, entropy, token, knobs):
    """The formulas of kernel.py for one token. token: {vector: number}.

    Returns (loss, dloss/dlogp, dloss/dentropy, {statistic: number}, [clip case, cap case]).
    """
    weight = token["weight"]
    advantage = token["advantage"]
    low = 1 - knobs["clip_low"]
    high = 1 + knobs["clip_high"]
    old = token.get("old_logprobs", logp)
    ratio = np.exp(logp - old)
    side = "above" if ratio > high else "below" if ratio < low else "within"
    bound = None
    if side == "above" and advantage > 0:
        bound = high
    if side == "below" and advantage < 0:
        bound = low
    is_clipped = bound is not None
    policy = advantage * (bound if is_clipped else ratio)
    # A clipped ratio is a constant.
    d_policy = 0 if is_clipped else advantage * ratio
    stats = {"logp": logp, "entropy": entropy, "ratio": ratio, "clip_fraction": is_clipped}

    cap = 1.0
    if "sampler_logprobs" in token:
        gap = old - token["sampler_logprobs"]
        stats["logprob_gap"] = abs(gap)
        if knobs["is_cap"]:
            cap = min(np.exp(gap), knobs["is_cap"])
    kl = 0.0
    d_kl = 0.0
    if "ref_logprobs" in token:
        ref_log_ratio = token["ref_logprobs"] - logp
        kl = np.exp(ref_log_ratio) - ref_log_ratio - 1
        d_kl = 1 - np.exp(ref_log_ratio)
        stats["kl"] = kl
    loss = knobs["beta"] * kl - cap * policy - knobs["entropy_bonus"] * entropy
    d_logp = knobs["beta"] * d_kl - cap * d_policy
    d_entropy = -knobs["entropy_bonus"]
    capped = "capped" if cap == knobs["is_cap"] else "not capped"
    cases = [(side, advantage > 0), capped]
    return weight * loss, weight * d_logp, weight * d_entropy, stats, cases


def numpy_loss(h, W, y, v, cotangents, T, of="loss", **knobs):
    """The loss in float64, and the gradients of the sum of the parts in `of` (see EVERYTHING).

    Returns (loss [N], {statistic: [N]}, dh [N, D], dW [V, D], a Counter of clip and cap cases).
    """
    N = len(y)
    live = v["weight"] > 0
    # The loss rounds the head to the dtype of h.
    W = np.asarray(jnp.asarray(W, h.dtype), np.float64)
    h = np.asarray(jnp.where(live[:, None], h, 0), np.float64)
    log_p = special.log_softmax(h @ W.T / T, -1)
    p = np.exp(log_p)

    loss = np.zeros(N)
    stats = defaultdict(lambda: np.zeros(N))
    cases = Counter()
    # Derivatives of the parts with respect to each token's logprob and entropy.
    d_logp = live * cotangents[0] if "logp" in of else np.zeros(N)
    d_entropy = live * cotangents[1] if "entropy" in of else np.zeros(N)
    for i in np.flatnonzero(live):
        token = {name: float(a[i]) for name, a in v.items()}
        entropy = -p[i] @ log_p[i]
        result = numpy_token(log_p[i, y[i]], entropy, token, KNOBS | knobs)
        loss[i], dloss_dlogp, dloss_dentropy, stats_of_token, cases_of_token = result
        if "loss" in of:
            d_logp[i] += dloss_dlogp
            d_entropy[i] += dloss_dentropy
        for name, value in stats_of_token.items():
            stats[name][i] = value
        cases.update(cases_of_token)

    # d/dz_v of log p_y is 1[v = y] - p_v.
    dlogp_dz = np.eye(len(W))[y] - p
    # d/dz_v of -sum p log p, where dp_u/dz_v = p_u (1[u=v] - p_v)
    dentropy_dz = -p * (log_p + 1) + p * (p * (log_p + 1)).sum(-1, keepdims=True)
    dz = (d_logp[:, None] * dlogp_dz + d_entropy[:, None] * dentropy_dz) / T
    return loss, stats, dz @ W, dz.T @ h, cases


# ---------------------------------------------------------------- running kernel.py
@partial(jax.jit, static_argnames=("impl", "T", "of", "on", "cores", *KNOBS))
def gradients(h, W, y, v, cotangents, impl, T, of, on, cores, **knobs):
    """Returns (loss, {statistic: [N]}, dh, dW) of grpo_loss. `of`: the parts to differentiate."""

    def objective(h, W):
        loss, tokens = kernel.grpo_loss(
            h, W, y, v, on, temperature=T, impl=impl, blocks=blocks(impl, cores), **knobs
        )
        parts = {"loss": loss}
        parts["logp"] = jnp.sum(cotangents[0] * tokens["logp"])
        parts["entropy"] = jnp.sum(cotangents[1] * tokens["entropy"])
        total = sum(parts[name] for name in of.split())
        # Differentiate half the sum, so that the cotangent of the loss is not 1.
        return total / 2, (loss, tokens)

    gradient = jax.grad(objective, argnums=(0, 1), has_aux=True)
    (dh, dW), (loss, tokens) = gradient(h, W)
    return loss, tokens, 2 * dh, 2 * dW


def without_races(f, *args, **settings):
    """Returns f's result. Asserts that no race was found; memory that nobody wrote reads as NaN."""

    def nan_array(shape, dtype):
        return jnp.full(shape, jnp.nan, dtype)

    # kernel.py takes the memory of dW from lax.empty, without writing to it first.
    unwritten_is_nan = mock.patch.object(jax.lax, "empty", nan_array)
    # The interpreter prints the races that it finds.
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, unwritten_is_nan:
            out = jax.block_until_ready(f(*args, **settings))
    finally:
        # After a failure, the interpreter's state would leak into the next call.
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in said.getvalue(), said.getvalue()
    return out


def run_loss(impl, inputs, T, of="loss", on=None, cores=1, **knobs):
    """Returns `gradients` of loss_inputs' inputs, on one device unless `on` is another mesh."""
    on = on or mesh()
    knobs = KNOBS | knobs
    settings = {"impl": impl, "T": T, "of": of, "on": on, "cores": cores}
    return without_races(gradients, *inputs, **settings, **knobs)


compiled_score = jax.jit(kernel.score, static_argnames=("mesh", "temperature", "impl", "blocks"))


def run_score(impl, inputs, T, on=None):
    """Returns (logp [N], entropy [N]) of all tokens, including those masked in the loss."""
    hidden, head, targets, *_ = inputs
    ones = np.ones(len(targets), np.float32)
    inputs = (hidden, head, targets, ones, on or mesh())
    settings = {"temperature": T, "impl": impl, "blocks": blocks(impl)}
    return without_races(compiled_score, *inputs, **settings)


compiled_terms = jax.jit(kernel.grpo_terms, static_argnames=tuple(KNOBS))


def check_loss(impl, inputs, T, of="loss", eps=1e-5, **knobs):
    """Assert that the loss equals NumPy's, and that logprobs and entropies equal `score`'s.

    Returns (errors of logp, loss, dh and dW; a Counter of clip and cap cases).
    """
    hidden, _, _, vectors, _ = inputs
    loss, tokens, dh, dW = run_loss(impl, inputs, T, of, **knobs)
    want_N, want_tokens, want_dh, want_dW, cases = numpy_loss(*inputs, T, of, **knobs)
    assert dh.dtype == hidden.dtype
    assert dW.dtype == np.float32
    assert set(tokens) == set(want_tokens)

    # The loss is a sum over tokens: compare each token's share, too.
    all_knobs = KNOBS | knobs
    loss_N, _ = compiled_terms(tokens["logp"], tokens["entropy"], vectors, **all_knobs)
    assert_allclose(loss_N, want_N, eps, eps, err_msg=f"{impl}, {of}, {knobs}: loss")
    for name, a in tokens.items():
        assert_allclose(a, want_tokens[name], eps, eps, err_msg=f"{impl}, {of}, {knobs}: {name}")

    live = vectors["weight"] > 0
    logp, entropy = run_score(impl, inputs, T)
    assert_allclose(np.where(live, logp, 0), tokens["logp"], 1e-6, 1e-6)
    assert_allclose(np.where(live, entropy, 0), tokens["entropy"], 1e-6, 1e-6)

    errors = [
        abs(tokens["logp"] - want_tokens["logp"]).max(),
        # The terms have both signs and may cancel: divide by the sum of their magnitudes.
        abs(loss - want_N.sum()) / abs(want_N).sum(),
        relative(dh, want_dh),
        relative(dW, want_dW),
    ]
    assert np.max(errors) < eps, (impl, of, knobs, errors)
    return errors, cases


def is_finite(tree):
    leaves = [np.asarray(a, np.float32) for a in jax.tree.leaves(tree)]
    return all(np.isfinite(a).all() for a in leaves)


# ---------------------------------------------------------------- tests
# Chunks and tiles do not divide the numbers of tokens, vocabulary rows and hidden columns.
# fmt: off
CASES = [  # tokens, vocabulary, temperature, dtype, entropy bonus, gradient of
    (296, 107, 0.6, "float32", 0.0, "loss"),
    (296, 107, 1.3, "float32", 0.05, EVERYTHING),
    (1, 107, 1.3, "float32", 0.0, EVERYTHING),
    (77, 37, 0.6, "float32", 0.0, "logp"),
    (296, 107, 1.3, "bfloat16", 0.05, EVERYTHING),
    (77, 65, 0.6, "bfloat16", 0.05, "loss"),
]
# fmt: on


@pytest.mark.parametrize("impl", IMPLS)
def test_loss_equals_numpy(impl, record_property):
    seen = Counter()
    worst = defaultdict(float)
    for seed, (N, V, T, dtype, bonus, of) in enumerate(CASES):
        eps = 1e-5 if dtype == "float32" else 1e-2
        top = 20 if dtype == "float32" else 35
        masked = 0.4 if N > 1 else 0.0
        inputs = loss_inputs(N, V, T, seed, VECTORS, masked, top, jnp.dtype(dtype))
        errors, cases = check_loss(impl, inputs, T, of, eps, entropy_bonus=bonus)
        worst[dtype] = max(worst[dtype], *errors)
        seen += cases
    # Six cases of the clip (below, within, above; either sign of the advantage), two of the cap.
    assert len(seen) == 8, seen
    assert min(seen.values()) > 5, seen
    for dtype, error in worst.items():
        record_property(f"largest error in {dtype}", f"{error:.1e}")


@pytest.mark.parametrize("impl", IMPLS)
def test_masked_tokens_have_no_effect(impl):
    """Masked tokens may contain anything. If all tokens are masked, all results are 0."""
    # loss_inputs puts NaN and infinity into masked tokens. Replace these with zeros.
    dirty_inputs = loss_inputs(136, 107, 1.3, 9)
    hidden, head, targets, vectors, cotangents = dirty_inputs
    live = vectors["weight"] > 0
    clean_hidden = jnp.where(live[:, None], hidden, 0)
    clean_vectors = {name: np.where(live, a, 0) for name, a in vectors.items()}
    clean_inputs = (clean_hidden, head, targets * live, clean_vectors, cotangents)
    dirty = run_loss(impl, dirty_inputs, 1.3, EVERYTHING)
    clean = run_loss(impl, clean_inputs, 1.3, EVERYTHING)
    assert is_finite(dirty)
    jax.tree.map(assert_array_equal, dirty, clean)

    _, tokens, dh, _ = dirty
    for a in (dh, *tokens.values()):
        a = np.asarray(a)
        assert not a[~live].any()
        assert a[live].any()

    all_masked = loss_inputs(136, 107, 1.3, 10, masked=1)
    nothing = run_loss(impl, all_masked, 1.3, EVERYTHING)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(nothing))


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo"])
def test_loss_equals_liger(kind, record_property):
    """Compare with three of Liger's loss types, off-policy, with KL and importance weights."""
    torch = pytest.importorskip("torch")
    liger = pytest.importorskip("liger_kernel.chunked_loss", exc_type=ImportError)
    # Liger takes answers of equal length, each with one advantage, and masks their ends.
    B = 8
    T = 24
    rng = np.random.default_rng(13)
    hidden, head, targets, v, cotangents = loss_inputs(B * T, 107, 0.7, 13, masked=0)
    v["advantage"] = np.repeat(v["advantage"][:B], T)
    lengths = rng.integers(1, T + 1, B)
    mask = np.float32(np.arange(T) < lengths[:, None])
    # A token's weight depends on the length of its answer, or is the same for all tokens.
    weights = {"grpo": 1 / lengths / B, "bnpo": 1 / mask.sum(), "dr_grpo": 1 / (B * T)}
    theirs = liger.LigerFusedLinearGRPOLoss(
        beta=0.3,
        compiled=False,
        epsilon_low=0.2,
        epsilon_high=0.3,
        loss_type=kind,
        max_completion_length=T,
        temperature=0.7,
    )
    h, W = (torch.tensor(np.asarray(a), requires_grad=True) for a in (hidden, head))
    rows = {k: torch.tensor(a.reshape(B, T)) for k, a in v.items()}
    importance = torch.exp(rows["old_logprobs"] - rows["sampler_logprobs"]).clamp(max=1.5)
    want, _ = theirs(
        h.reshape(B, T, -1),
        W,
        torch.tensor(np.int64(targets.reshape(B, T))),
        torch.tensor(mask),
        rows["advantage"][:, 0],
        ref_per_token_logps=rows["ref_logprobs"],
        old_per_token_logps=rows["old_logprobs"],
        vllm_is_ratio=importance,
    )
    want.backward()

    weight = mask * np.reshape(weights[kind], (-1, 1))
    v["weight"] = np.float32(weight.ravel())
    inputs = (hidden, head, targets, v, cotangents)
    *_, cases = numpy_loss(*inputs, 0.7)
    # Six cases of the clip (below, within, above; either sign of the advantage), two of the cap.
    assert len(cases) == 8
    assert min(cases.values()) > 10
    errors = []
    # The loss types differ only in the weights, so one of them is enough for all implementations.
    for impl in IMPLS if kind == "grpo" else ["jax"]:
        loss, _, dh, dW = run_loss(impl, inputs, 0.7, entropy_bonus=0.0)
        errors += [relative(loss, want.detach()), relative(dh, h.grad), relative(dW, W.grad)]
    # Unlike max, np.max returns NaN if there is one.
    worst = np.max(errors)
    assert worst < 1e-4
    record_property("largest relative error", f"{worst:.1e}")


if __name__ == "__main__":
    # This module is also the pytest plugin that prints the recorded values.
    sys.exit(pytest.main([__file__, *sys.argv[1:]], plugins=[sys.modules["__main__"]]))
