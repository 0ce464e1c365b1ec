"""Attention to the KV cache, and writing to it: plain JAX and the interpreted TPU kernels against
float64 NumPy. Also the rows that stay when a wave shrinks."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TIED
from jax.experimental.pallas import tpu as pltpu
from numpy.testing import assert_allclose, assert_array_equal
from test_model import products

from infra.rollout import decode_kernel, kv_cache, layouts, waves
from infra.rollout.kv_cache import Cache
from test_kernel import mesh, without_races

# Unwritten memory is NaN, reads out of bounds raise, and races between two cores are detected.
INTERPRET = pltpu.InterpretParams(
    num_cores_or_threads=2,
    detect_races=True,
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
)
LAYERS = 3


def random_cache(rng, B, K, S, H, dtype="float32"):
    def draw():
        return jnp.array(rng.normal(size=(LAYERS, B, K, S, H)), dtype)

    return Cache(draw(), draw())


def float64_attention(q_BKMH, parts):
    """Returns attention over the slots of all parts, and its log-sum-exp.

    parts: [(cache, layer, filled slots of each row)].
    """
    out = []
    lse = []
    for b, q_KMH in enumerate(np.float64(q_BKMH)):
        keys = []
        values = []
        for cache, layer, filled_B in parts:
            filled = np.s_[layer, b, :, : filled_B[b]]
            keys.append(np.float64(cache.keys[filled]))
            values.append(np.float64(cache.values[filled]))
        k_KSH = np.concatenate(keys, 1)
        v_KSH = np.concatenate(values, 1)
        weights = np.exp(np.einsum("KMH,KSH->KMS", q_KMH, k_KSH))
        total = weights.sum(-1, keepdims=True)
        out.append(np.einsum("KMS,KSH->KMH", weights / total, v_KSH))
        lse.append(np.log(total))
    return np.array(out), np.array(lse)


def random_queries(rng, B, K, M, H, dtype="float32"):
    q_BKMH = rng.normal(size=(B, K, M, H))
    return jnp.array(q_BKMH * H**-0.5, dtype)


def check_close(result, reference, atol, lse_atol):
    out, lse = result
    assert_allclose(out, reference[0], rtol=0, atol=atol)
    assert_allclose(lse, reference[1], rtol=0, atol=lse_atol)


ATTEND = {
    "plain": jax.jit(kv_cache.attend_plain),
    "pallas": partial(without_races, jax.jit(kv_cache.attend_pallas)),
}
write_token = partial(decode_kernel.write_token, interpret=INTERPRET)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    attend = partial(decode_kernel.attend, interpret=INTERPRET)
    monkeypatch.setattr(decode_kernel, "attend", attend)


# (B, K, M, H, slots of the first cache, slots of the second). Qwen2.5 has heads of 64 and 128.
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
    """Attention continues over a second cache with another layer, in blocks of slots and rows, some
    of which no row needs. Unwritten slots are NaN for the kernel."""
    monkeypatch.setattr(decode_kernel, "BLOCK_SLOTS", 16)
    monkeypatch.setattr(decode_kernel, "BLOCK_BYTES", 2**14)
    monkeypatch.setattr(decode_kernel, "MAX_QUERIES", 16)
    B, K, M, H, *slots = SIZES[size]
    rng = np.random.default_rng(0)
    q_BKMH = random_queries(rng, B, K, M, H)
    result = kv_cache.no_slots(q_BKMH)
    parts = []
    for layer, S in enumerate(slots):
        cache = random_cache(rng, B, K, S, H)
        filled_B = rng.integers(1, S + 1, B)
        # The first row has a single filled slot, and the last row has all slots filled.
        filled_B[0] = 1
        filled_B[-1] = S
        parts.append((cache, layer, filled_B))
        if how == "pallas":
            # The kernel must not use the values of empty slots. (Plain JAX multiplies them by 0, so
            # there they must be numbers.)
            is_empty = np.arange(S) >= filled_B[:, None]
            values = jnp.where(is_empty[:, None, :, None], jnp.nan, cache.values)
            cache = Cache(cache.keys, values)
        result = ATTEND[how](q_BKMH, cache, layer, jnp.array(filled_B), result)
    check_close(result, float64_attention(q_BKMH, parts), 2e-6, 2e-6)


@pytest.mark.parametrize("T", [1, 16, 37])
def test_a_prompt_attends_to_itself_in_blocks_of_queries(T, monkeypatch):
    monkeypatch.setattr(kv_cache, "QUERIES_AT_ONCE", 16)
    B, K, G, H = 2, 3, 2, 8
    rng = np.random.default_rng(2)
    q_BNTH = random_queries(rng, B, K * G, T, H)
    # A prompt is a cache that holds this prompt alone: token t sees its first t + 1 slots.
    prompt = random_cache(rng, B, K, T, H)
    out_BNTH = kv_cache.causal_attention(q_BNTH, prompt.keys[0], prompt.values[0])
    for t in range(T):
        q_BKMH = q_BNTH[:, :, t].reshape(B, K, G, H)
        expected, _ = float64_attention(q_BKMH, [(prompt, 0, [t + 1] * B)])
        out_BKMH = out_BNTH[:, :, t].reshape(B, K, G, H)
        assert_allclose(out_BKMH, expected, rtol=0, atol=2e-6)


def test_attention_in_bfloat16_is_as_exact_as_its_operands():
    B, K, M, H, S, _ = SIZES["head size 128"]
    rng = np.random.default_rng(1)
    q_BKMH = random_queries(rng, B, K, M, H, "bfloat16")
    cache = random_cache(rng, B, K, S, H, "bfloat16")
    filled_B = np.array([S, 7, 1, 30])
    reference = float64_attention(q_BKMH, [(cache, 1, filled_B)])
    nothing = kv_cache.no_slots(q_BKMH)
    for attend in ATTEND.values():
        result = attend(q_BKMH, cache, 1, jnp.array(filled_B), nothing)
        # The softmax weights are rounded to 8 bits.
        check_close(result, reference, 4 * 2**-8, 1e-5)


@pytest.mark.parametrize("dtype, S", [("float32", 48), ("bfloat16", 32)])
def test_a_token_is_written_to_its_slot_and_nowhere_else(dtype, S, monkeypatch):
    monkeypatch.setattr(decode_kernel, "BLOCK_BYTES", 2**14)
    B, K, H = 6, 2, 64
    rng = np.random.default_rng(2)
    cache = random_cache(rng, B, K, S, H, dtype)
    k_BKTH = random_queries(rng, B, K, 1, H, dtype)
    v_BKTH = random_queries(rng, B, K, 1, H, dtype)
    write = partial(without_races, jax.jit(write_token))
    for slot in {0, 4, 17, S - 1} & set(range(S)):
        layer = slot % LAYERS
        keys, values = map(np.array, cache)
        keys[layer, :, :, slot] = k_BKTH[:, :, 0]
        values[layer, :, :, slot] = v_BKTH[:, :, 0]
        written = write(*cache, k_BKTH, v_BKTH, layer, slot)
        plain = kv_cache.write_plain(cache, k_BKTH, v_BKTH, layer, slot=slot)
        for result in (written, plain):
            assert_array_equal(result[0], keys)
            assert_array_equal(result[1], values)


def test_keys_beyond_the_last_slot_do_not_matter(monkeypatch):
    """Blocks of keys beyond the last filled slot are not used: NaN in them reaches the output only
    if a row has a filled slot there."""
    monkeypatch.setattr(decode_kernel, "BLOCK_SLOTS", 16)
    rng = np.random.default_rng(3)
    q_BKMH = random_queries(rng, 2, 1, 8, 64)
    cache = random_cache(rng, 2, 1, 48, 64)
    spoilt = Cache(cache.keys.at[:, :, :, 32:].set(jnp.nan), cache.values)
    for longest, has_one in ((32, False), (33, True)):
        filled_B = jnp.array([3, longest])
        nothing = kv_cache.no_slots(q_BKMH)
        out, _ = ATTEND["pallas"](q_BKMH, spoilt, 0, filled_B, nothing)
        assert np.isnan(out[1]).any() == has_one


def test_the_kernel_rounds_no_products_of_float32():
    """By default, a TPU would round float32 inputs."""
    rng = np.random.default_rng(4)
    q_BKMH = random_queries(rng, 2, 1, 8, 64)
    cache = random_cache(rng, 2, 1, 48, 64)
    filled_B = jnp.array([3, 48])
    inputs = q_BKMH, cache, 1, filled_B
    nothing = kv_cache.no_slots(q_BKMH)
    trace = jax.make_jaxpr(kv_cache.attend_pallas)
    # test_kernel.py changes the default.
    with jax.default_matmul_precision("default"):
        program = trace(*inputs, nothing)
    found = [equation.params["precision"] for equation in products(program.jaxpr)]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert found == [highest] * 2


def test_queries_of_a_group_are_joined_and_split():
    B, group, K, G, H = 12, 4, 2, 5, 8
    q_BKGH = random_queries(np.random.default_rng(4), B, K, G, H)
    joined = kv_cache.join_group(q_BKGH, group)
    assert joined.shape == (B // group, K, group * G, H)
    for b, q_KGH in enumerate(q_BKGH):
        first = b % group * G
        own = np.s_[b // group, :, first : first + G]
        assert_array_equal(joined[own], q_KGH)
    assert_array_equal(kv_cache.split_group(joined, group), q_BKGH)


def test_devices_with_the_same_heads_attend_to_their_own_rows():
    """Of eight devices that split two key/value heads, four have the same one, and split the rows.
    They do not split the 6 query heads, so each picks its rows of all queries."""
    B, N, K, H = 16, 6, 2, 8
    group = 2
    prompt_slots = 8
    layer = 1
    slot = 5
    cfg = dataclasses.replace(TIED, N=N, K=K, H=H)
    layout = layouts.layout_of("tp", 8, cfg, mesh(1, 8, 1))
    assert layout.sharing == 4 and "fsdp" not in layout.heads
    rng = np.random.default_rng(5)
    n_prompts = B // group
    prompts = random_cache(rng, n_prompts, K, prompt_slots, H)
    answers = random_cache(rng, B, K, 16, H)

    # The prompts.
    q = random_queries(rng, n_prompts, N, prompt_slots, H)
    k = random_queries(rng, n_prompts, K, prompt_slots, H)
    v = random_queries(rng, n_prompts, K, prompt_slots, H)
    prefill = jax.jit(partial(kv_cache.prefill_attention, layout=layout))
    out, prompts = prefill(q, k, v, layer, prompts, 0)
    expected = kv_cache.causal_attention(q, k, v)
    assert_allclose(out, expected, rtol=0, atol=2e-6)
    assert_array_equal(prompts.keys[layer], k)
    assert_array_equal(prompts.values[layer], v)

    # A token of each answer.
    q = random_queries(rng, B, N, 1, H)
    k = random_queries(rng, B, K, 1, H)
    v = random_queries(rng, B, K, 1, H)
    length_of_prompt = rng.integers(1, prompt_slots + 1, n_prompts)
    prompt_length_B = np.repeat(length_of_prompt, group)
    answer_length_B = np.full(B, slot + 1)
    lengths = prompt_length_B, answer_length_B
    decode = jax.jit(partial(kv_cache.decode_attention, layout=layout))
    out, written = decode(q, k, v, layer, answers, prompts, slot, *lengths)
    assert_array_equal(written.keys[layer, :, :, slot], k[:, :, 0])
    prompts = jax.tree.map(lambda a: np.repeat(a, group, 1), prompts)
    parts = [(prompts, layer, prompt_length_B), (written, layer, answer_length_B)]
    q_BKMH = q.reshape(B, K, -1, H)
    expected, _ = float64_attention(q_BKMH, parts)
    out = out.reshape(expected.shape)
    assert_allclose(out, expected, rtol=0, atol=2e-6)


# ---------------------------------------------------------------- a wave that shrinks
LIVE_RPG = np.array(
    [  # answers that have not ended, of four prompts on each of two devices
        [[0, 0], [0, 1], [0, 0], [1, 1]],
        [[0, 0], [0, 0], [1, 1], [1, 0]],
    ],
    bool,
)


def numbered(a):
    """Returns an array of a DecodeState in which every number of a row is the row's index."""
    # Keys and values are [L, B, K, S, H], and hidden states are [B, D].
    axis = 1 if a.ndim == 5 else 0
    rows = np.arange(a.shape[axis], dtype=np.float32)
    others = [i for i in range(a.ndim) if i != axis]
    rows = np.expand_dims(rows, others)
    numbers = np.broadcast_to(rows, a.shape)
    return jax.device_put(numbers, a.sharding)


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_that_stay_keep_their_cache(devices):
    """If the first prompts of a device have ended, each row that stays keeps its own keys, values
    and hidden state."""
    layout = layouts.layout_of("replicated", 1, TIED, mesh(1, devices, 1))
    is_live = LIVE_RPG[:devices].reshape(devices, -1)
    B = is_live.size
    sizes = dict(B=B, n_prompts=B // 2, width=8, slots=16, dtype="float32")
    state = layouts.empty_state(**sizes, cfg=TIED, layout=layout)
    state = jax.tree.map(numbered, state)

    row_ids = np.arange(B).reshape(devices, -1)
    wave = waves.Wave(row_ids, is_live, 2, 16, state)
    new = waves.resize_wave(wave, 32, TIED, layout, quantised=False)
    # Two of the four prompts of each device stay, with both answers.
    assert new.row_ids.shape == (devices, 4)
    assert set(row_ids[is_live]) == set(new.row_ids[new.is_live])
    kept = new.row_ids.ravel()
    prompts = kept[::2] // 2
    for a in new.state.answer_caches[0]:
        first = a[0, :, 0, 0, 0]
        assert_array_equal(first, kept)
    for a in new.state.prompt_caches[0]:
        first = a[0, :, 0, 0, 0]
        assert_array_equal(first, prompts)
    first = new.state.hidden_BD[:, 0]
    assert_array_equal(first, kept)
