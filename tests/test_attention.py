"""Attention of the training forward on GPUs. Without a GPU, only its arithmetic can be tested."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import special

from infra.update import attention

T = 96
# The lengths of the sequences of each row: several, one, some with padding (segment 0), none.
LENGTHS = (30, 1, 40, 25), (96,), (50, 20), ()


def segments_of_rows():
    segments = np.zeros((len(LENGTHS), T), np.int32)
    for row, lengths in zip(segments, LENGTHS, strict=True):
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        row[: len(numbers)] = numbers
    return segments


def random_inputs(H):
    """Returns queries with 4 heads, keys and values with 2 heads, and segments."""
    rng = np.random.default_rng(H)
    q, k, v = (rng.standard_normal((len(LENGTHS), n, T, H), np.float32) for n in (4, 2, 2))
    return q * H**-0.5, k, v, segments_of_rows()


def test_cudnn_is_asked_for_what_blockwise_computes(monkeypatch):
    """cuDNN is asked for what blockwise attention computes: JAX's own attention, called with
    cuDNN's arguments, gives the same output and gradients."""
    asked = []

    def stand_in(*arrays, implementation, **options):
        asked.append((implementation, options["is_causal"]))
        return attend(*arrays, implementation="xla", **options)

    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v, segments = random_inputs(64)
    weights = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    # Nothing uses the outputs at padding, so they get no weight.
    weights *= (segments > 0)[:, None, :, None]

    def loss(function, *inputs):
        return (function(*inputs, segments) * weights).sum()

    results = {}
    for name in ("cudnn", "blockwise"):
        function = attention.segment_attention(name, "gpu")
        results[name] = jax.value_and_grad(partial(loss, function), argnums=(0, 1, 2))(q, k, v)
    # cuDNN skips later keys because of is_causal, not because of a mask.
    assert set(asked) == {("cudnn", True)}
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


def test_a_softmax_of_bfloat16_is_not_rounded():
    """Scores are float32, and only the weights are rounded, to 8 bits."""
    # The second row is one sequence.
    q, k, v, segments = (a[1:2] for a in random_inputs(64))
    # With large scores, rounding them to bfloat16 would change a weight by a tenth.
    q = jnp.asarray(8 * q, jnp.bfloat16)
    k = jnp.asarray(k, jnp.bfloat16)
    v = jnp.asarray(v, jnp.bfloat16)
    found = attention.blockwise(q, k, v, segments)
    q = np.float64(q)
    k = np.float64(k)
    v = np.float64(v)
    causal = np.tri(T, dtype=bool)
    for head in range(4):
        # Two query heads share a key/value head.
        shared = head // 2
        scores = q[0, head] @ k[0, shared].T
        scores[~causal] = -np.inf
        weights = special.softmax(scores, -1)
        expected = weights @ v[0, shared]
        assert_allclose(found[0, head], expected, rtol=0, atol=4 * 2**-8)


def test_large_heads_are_refused_for_cudnn(monkeypatch, capsys):
    # Heads of 128, as in most models, are not too large.
    stand_in = mock.Mock(side_effect=lambda q, k, v, **_: q)
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    attention.cudnn(*random_inputs(128))
    assert stand_in.called
    with pytest.raises(SystemExit) as refusal:
        attention.cudnn(*random_inputs(256))
    assert refusal.value.code == 2
    assert "at most 128, but the model's is 256" in capsys.readouterr().err
