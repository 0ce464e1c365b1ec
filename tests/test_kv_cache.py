"""Attention to the KV cache, and writing to it: plain JAX and the TPU kernels, interpreted, against
float64 NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from numpy.testing import assert_allclose, assert_array_equal

from infra import kv_cache
from infra.kv_cache import Cache

# What is not written is NaN, what is outside is an error, and races are looked for.
INTERPRET = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
)
LAYERS = 3


def random_cache(rng, B, K, S, H, dtype="float32"):
    def draw():
        return jnp.array(rng.normal(size=(LAYERS, B, K, S, H)), dtype)

    return Cache(draw(), draw())


def float64_attention(q_BKMH, parts):
    """Softmax over the slots of all parts: [(cache, layer, filled slots of each row)]."""
    B = len(q_BKMH)
    out = np.zeros(q_BKMH.shape)
    lse = np.zeros((*q_BKMH.shape[:3], 1))
    for b in range(B):
        keys = np.concatenate([np.float64(c.keys[i, b, :, : n[b]]) for c, i, n in parts], 1)
        values = np.concatenate([np.float64(c.values[i, b, :, : n[b]]) for c, i, n in parts], 1)
        scores = np.einsum("KMH,KSH->KMS", np.float64(q_BKMH[b]), keys)
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True)
        out[b] = np.einsum("KMS,KSH->KMH", weights / total, values)
        lse[b] = np.log(total)
    return out, lse


ATTEND = {
    "plain": jax.jit(kv_cache.attend_plain),
    "pallas": jax.jit(partial(kv_cache.attend_pallas, interpret=INTERPRET)),
}


# B K M H, slots of two caches; those of a head size of 64 and 128 are Qwen2.5's.
# fmt: off
SIZES = {
    "head size 128":    (4, 2, 8, 128, 40, 24),
    "head size 64":     (6, 1, 7, 64, 33, 5),
    "a prompt's group": (2, 2, 56, 64, 48, 16),
}
# fmt: on


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ATTEND)
def test_attention_goes_on_from_cache_to_cache(how, size, monkeypatch):
    """Over blocks of slots and of rows, some of which no row needs; unwritten slots are NaN."""
    monkeypatch.setattr(kv_cache, "BLOCK_SLOTS", 16)
    monkeypatch.setattr(kv_cache, "BLOCK_BYTES", 2**14)
    B, K, M, H, *slots = SIZES[size]
    rng = np.random.default_rng(0)
    q_BKMH = jnp.array(rng.normal(size=(B, K, M, H)) * H**-0.5, "float32")
    result = kv_cache.nothing(q_BKMH)
    parts = []
    for layer, S in enumerate(slots):
        cache = random_cache(rng, B, K, S, H)
        filled_B = rng.integers(1, S + 1, B)
        # One row has a single slot, and another one all of them.
        filled_B[0] = 1
        filled_B[-1] = S
        is_empty = np.arange(S) >= filled_B[:, None]
        values = jnp.where(is_empty[:, None, :, None], jnp.nan, cache.values)
        parts.append((cache, layer, filled_B))
        # The plain form multiplies such slots by 0, so that they must be numbers.
        given = Cache(cache.keys, values if how == "pallas" else cache.values)
        result = ATTEND[how](q_BKMH, given, layer, jnp.array(filled_B, jnp.int32), result)
    out, lse = float64_attention(q_BKMH, parts)
    assert_allclose(result[0], out, rtol=0, atol=2e-6)
    assert_allclose(result[1], lse, rtol=0, atol=2e-6)


def test_attention_in_bfloat16_is_as_exact_as_its_operands():
    B, K, M, H, S, _ = SIZES["head size 128"]
    rng = np.random.default_rng(1)
    q_BKMH = jnp.array(rng.normal(size=(B, K, M, H)) * H**-0.5, "bfloat16")
    cache = random_cache(rng, B, K, S, H, "bfloat16")
    filled_B = np.array([S, 7, 1, 30])
    out, lse = float64_attention(q_BKMH, [(cache, 1, filled_B)])
    for attend in ATTEND.values():
        result = attend(q_BKMH, cache, 1, jnp.array(filled_B), kv_cache.nothing(q_BKMH))
        # Weights of the softmax are rounded to 8 bits.
        assert_allclose(result[0], out, rtol=0, atol=4 * 2**-8)
        assert_allclose(result[1], lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype, S", [("float32", 48), ("bfloat16", 32)])
def test_a_token_is_written_to_its_slot_and_nowhere_else(dtype, S, monkeypatch):
    monkeypatch.setattr(kv_cache, "BLOCK_BYTES", 2**14)
    B, K, H = 6, 2, 64
    rng = np.random.default_rng(2)
    cache = random_cache(rng, B, K, S, H, dtype)
    k_BKTH, v_BKTH = (jnp.array(rng.normal(size=(B, K, 1, H)), dtype) for _ in range(2))
    write = jax.jit(partial(kv_cache.write_token, interpret=INTERPRET))
    for slot in {0, 4, 17, S - 1} & set(range(S)):
        layer = slot % LAYERS
        expected = [np.array(a) for a in cache]
        expected[0][layer, :, :, slot] = k_BKTH[:, :, 0]
        expected[1][layer, :, :, slot] = v_BKTH[:, :, 0]
        written = write(cache, k_BKTH, v_BKTH, layer, slot)
        plain = kv_cache.write_plain(cache, k_BKTH, v_BKTH, layer, slot=slot)
        for a, b, c in zip(written, plain, expected, strict=True):
            assert_array_equal(a, c)
            assert_array_equal(b, c)


def test_a_block_beyond_the_longest_row_is_not_read(monkeypatch):
    """NaN in its keys would come through, and does where one row is longer."""
    monkeypatch.setattr(kv_cache, "BLOCK_SLOTS", 16)
    rng = np.random.default_rng(3)
    q_BKMH = jnp.array(rng.normal(size=(2, 1, 8, 64)), "float32")
    cache = random_cache(rng, 2, 1, 48, 64)
    spoilt = Cache(cache.keys.at[:, :, :, 32:].set(jnp.nan), cache.values)
    for longest, is_read in ((32, False), (33, True)):
        filled_B = jnp.array([3, longest])
        out, _ = ATTEND["pallas"](q_BKMH, spoilt, 0, filled_B, kv_cache.nothing(q_BKMH))
        assert np.isnan(out[1]).any() == is_read


def test_queries_of_a_group_are_joined_and_split():
    B, n, K, G, H = 12, 3, 2, 5, 4
    q_BKGH = jnp.array(np.random.default_rng(4).normal(size=(B, K, G, H)))
    joined = kv_cache.join_group(q_BKGH, n)
    assert joined.shape == (n, K, B // n * G, H)
    for b in range(B):
        place = b % (B // n) * G
        assert_array_equal(joined[b // (B // n), :, place : place + G], q_BKGH[b])
    assert_array_equal(kv_cache.split_group(joined, B), q_BKGH)
