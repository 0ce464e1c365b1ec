"""The KV cache of a rollout: writing to it, and attention to it.

Keys and values are [L, B, K, S, H], where B is rows, or prompts: a prompt's are there once for all
of its answers. They are read and written where they lie, as a layer taken out of them would be a
copy. Letters as in model.py; M is the queries that attend to the same keys: G for each answer.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import model

# Of what a kernel holds in a TPU's VMEM: bytes of a block of keys, and of its scores.
BLOCK_BYTES = 2**20
SCORE_BYTES = 2**21
# Slots of a block that is read, and of the smallest that is written: a tile of bfloat16.
BLOCK_SLOTS = 512
TILE_SLOTS = 16


class Cache(NamedTuple):
    keys: jax.Array  # [L, B, K, S, H]
    values: jax.Array


# ---------------------------------------------------------------- what the layers call
def prefill_attention(q_BNTH, k_BKTH, v_BKTH, layer, cache: Cache, *, first, layout) -> tuple:
    """Attention of prompts to themselves, whose keys and values go to the rows first.. of the cache
    of each device -> ([B, N, T, H] float32, cache). All prompts begin in slot 0."""

    def on_device(q, k, v, layer, cache, first):
        T = q.shape[2]
        cache = write_plain(cache, k, v, layer, first)
        # What comes after a prompt is attended to by nothing that matters.
        causal = jnp.tri(T, dtype=bool)[None]
        return model.attention(q, k, v, causal), cache

    return over_devices(on_device, layout, q_BNTH, k_BKTH, v_BKTH, layer, cache, first)


def decode_attention(q_BNTH, k_BKTH, v_BKTH, layer, cache, *, slot, length_B, layout) -> tuple:
    """Attention of one token of each answer to its prompt, to the tokens since, and to itself.

    cache: (of prompts, of answers), in which its keys and values go to this slot. length_B: tokens
    of each row's prompt; rows with the same prompt stand together, as many of each. -> ([B, N, 1,
    H] float32, cache)
    """
    is_tpu = layout.mesh.devices.flat[0].platform == "tpu"

    def on_device(q, k, v, layer, cache, slot, length_B):
        prompts, answers = cache
        write = write_token if is_tpu else write_plain
        attend = attend_pallas if is_tpu else attend_plain
        answers = write(answers, k, v, layer, slot=slot)

        # The answers of a prompt attend to it together, so that it is read once.
        B, N, _, H = q.shape
        q_BKGH = q.reshape(B, k.shape[1], -1, H)
        n = prompts.keys.shape[1]
        q_joined = join_group(q_BKGH, n)
        joined = attend(q_joined, prompts, layer, length_B[:: B // n], nothing(q_joined))
        of_prompts = tuple(split_group(a, B) for a in joined)

        filled_B = jnp.full(B, slot + 1, jnp.int32)
        out, _ = attend(q_BKGH, answers, layer, filled_B, of_prompts)
        return out.reshape(B, N, 1, H), (prompts, answers)

    return over_devices(on_device, layout, q_BNTH, k_BKTH, v_BKTH, layer, cache, slot, length_B)


def over_devices(run, layout, q, k, v, layer, cache, *others):
    """`run` in a shard_map: of each device its rows and heads. Outside of one jax 0.10 all-gathers
    an array whose layout is constrained, and kernels are not partitioned."""
    of_heads = P(layout.rows, "tp")
    of_cache = jax.tree.map(lambda _: layout.cache_spec, cache)
    of_others = [P(layout.rows) if jnp.ndim(a) else P() for a in others]
    run = jax.shard_map(
        run,
        mesh=layout.mesh,
        in_specs=(of_heads, of_heads, of_heads, P(), of_cache, *of_others),
        out_specs=(of_heads, of_cache),
        check_vma=False,
    )
    return run(q, k, v, layer, cache, *others)


def join_group(q_BKGH, n):
    """Queries of B rows -> of their n prompts, [n, K, M, H]."""
    B, K, G, H = q_BKGH.shape
    return q_BKGH.reshape(n, B // n, K, G, H).swapaxes(1, 2).reshape(n, K, -1, H)


def split_group(a_nKMH, B):
    """What `join_group` has joined -> [B, K, G, H]"""
    n, K, M, H = a_nKMH.shape
    return a_nKMH.reshape(n, K, B // n, -1, H).swapaxes(1, 2).reshape(B, K, -1, H)


# ---------------------------------------------------------------- in plain JAX
def write_plain(cache: Cache, k_BKTH, v_BKTH, layer, first=0, slot=0) -> Cache:
    """Keys and values of T tokens go to slots slot.. of rows first.. of a layer, in place."""
    # For many rows XLA would change the order of dimensions in memory, and copy the cache.
    in_order = DeviceLayout(tuple(range(5)))
    at = (layer, first, 0, slot, 0)
    keys = jax.lax.dynamic_update_slice(cache.keys, k_BKTH[None], at)
    values = jax.lax.dynamic_update_slice(cache.values, v_BKTH[None], at)
    return with_layout_constraint(Cache(keys, values), Cache(in_order, in_order))


def nothing(q_BKMH) -> tuple:
    """What `attend_plain` gives for no slot at all."""
    out = jnp.zeros(q_BKMH.shape, jnp.float32)
    return out, jnp.full((*q_BKMH.shape[:3], 1), -1e30)


def attend_plain(q_BKMH, cache: Cache, layer, length_B, others) -> tuple:
    """Attention to the first `length` slots of a layer of the cache, and to others.

    Queries come scaled by H ** -0.5. -> ([B, K, M, H], the log-sum-exp of the scores [B, K, M, 1]),
    float32. others: what this gave for other slots, or `nothing`.
    """
    k_BKSH = jax.lax.dynamic_index_in_dim(cache.keys, layer, keepdims=False)
    v_BKSH = jax.lax.dynamic_index_in_dim(cache.values, layer, keepdims=False)
    scores = model.matmul("BKMH,BKSH->BKMS", q_BKMH, k_BKSH)
    is_filled = jnp.arange(k_BKSH.shape[2]) < length_B[:, None]
    scores = jnp.where(is_filled[:, None, None], scores, -1e30)
    others_out, others_lse = others
    lse = jnp.logaddexp(others_lse, jax.nn.logsumexp(scores, -1, keepdims=True))
    probs = jnp.exp(scores - lse).astype(v_BKSH.dtype)
    out = model.matmul("BKMS,BKSH->BKMH", probs, v_BKSH)
    return out + jnp.exp(others_lse - lse) * others_out, lse


# ---------------------------------------------------------------- Pallas kernels for TPUs
def rows_of_block(B: int, row_bytes: int, most_bytes: int) -> int:
    """The most rows, of B in equal blocks, that take no more than so many bytes; at least 1."""
    most = max(1, most_bytes // row_bytes)
    return max(n for n in range(1, most + 1) if B % n == 0)


def in_hbm(a):
    # A small cache XLA would copy to VMEM and back, for each layer.
    return pltpu.with_memory_space_constraint(a, pltpu.HBM)


def write_token(cache: Cache, k_BKTH, v_BKTH, layer, slot, interpret=False) -> Cache:
    """`write_plain` of a token of all rows: the tile of its slot is read, changed, and written. The
    cache is of complete tiles."""
    _, B, K, _, H = cache.keys.shape
    slots = TILE_SLOTS
    row_bytes = K * slots * H * cache.keys.dtype.itemsize
    rows = rows_of_block(B, row_bytes, BLOCK_BYTES)
    tile = pl.BlockSpec((None, rows, K, slots, H), lambda b, at: (at[0], b, 0, at[1], 0))
    new = pl.BlockSpec((rows, K, 1, H), lambda b, at: (b, 0, 0, 0))
    write = pl.pallas_call(
        write_tiles,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B // rows,),
            in_specs=[new, new, tile, tile],
            out_specs=[tile, tile],
        ),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in cache],
        # In place: the arguments are `at`, two of tokens, two of the cache.
        input_output_aliases={3: 0, 4: 1},
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=4 * B * row_bytes, transcendentals=0),
        name="write_token",
        interpret=interpret,
    )
    at = jnp.stack([layer, jax.lax.div(slot, slots), jax.lax.rem(slot, slots)])
    return Cache(*write(at, k_BKTH, v_BKTH, *map(in_hbm, cache)))


def write_tiles(at, k, v, old_keys, old_values, keys, values):
    slot = jax.lax.broadcasted_iota(jnp.int32, old_keys.shape, 2)
    is_written = slot == at[2]
    keys[...] = jnp.where(is_written, k[...], old_keys[...])
    values[...] = jnp.where(is_written, v[...], old_values[...])


def attend_pallas(q_BKMH, cache: Cache, layer, length_B, others, interpret=False) -> tuple:
    """`attend_plain` in blocks of rows and slots. Slots beyond the longest row of a block are not
    read. The softmax is that of flash attention (arXiv 2205.14135)."""
    _, B, K, S, H = cache.keys.shape
    M = q_BKMH.shape[2]
    itemsize = cache.keys.dtype.itemsize
    slots = min(S, BLOCK_SLOTS)
    rows = min(
        rows_of_block(B, slots * H * itemsize, BLOCK_BYTES),
        rows_of_block(B, slots * M * 4, SCORE_BYTES),
    )
    longest_B = length_B.reshape(-1, rows).max(1)
    # The last block of slots that is needed, of each block of rows.
    last_B = jax.lax.div(longest_B - 1, slots)

    def cache_block(b, k, s, layer, last_B):
        # A block that is there already is not read again.
        return layer[0], b, k, jnp.minimum(s, last_B[b]), 0

    def block_of_rows(b, k, s, *_):
        return b, k, 0, 0

    def block_of_lengths(b, k, s, *_):
        return b, 0, 0

    lengths = pl.BlockSpec((rows, 1, 1), block_of_lengths)
    queries = pl.BlockSpec((rows, None, M, H), block_of_rows)
    sums = pl.BlockSpec((rows, None, M, 1), block_of_rows)
    keys_or_values = pl.BlockSpec((None, rows, None, slots, H), cache_block)
    attend = pl.pallas_call(
        partial(attend_to_block, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B // rows, K, pl.cdiv(S, slots)),
            in_specs=[lengths, queries, queries, sums, keys_or_values, keys_or_values],
            out_specs=[queries, sums],
            scratch_shapes=[pltpu.VMEM((rows, M, 1), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, K, M, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, M, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        # Of a cache that is full.
        cost_estimate=pl.CostEstimate(
            flops=4 * B * K * M * S * H,
            bytes_accessed=2 * B * K * S * H * itemsize,
            transcendentals=B * K * M * S,
        ),
        name="decode_attention",
        interpret=interpret,
    )
    keys, values = cache
    layer = jnp.reshape(layer, 1)
    length_B11 = length_B[:, None, None]
    return tuple(attend(layer, last_B, length_B11, q_BKMH, *others, keys, values))


def attend_to_block(
    layer, last_B, length, q, others_out, others_lse, k, v, out, total, largest, *, slots
):
    """One block of `attend_pallas`. out, total: sums over the slots so far, with the weights
    exp(score - largest); at the end, what `attend_plain` gives."""
    s = pl.program_id(2)
    batched_dot = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    @pl.when(s == 0)
    def begin():
        out[...] = others_out[...]
        total[...] = jnp.ones_like(total)
        largest[...] = others_lse[...]

    @pl.when(s <= last_B[pl.program_id(0)])
    def add_block():
        scores = batched_dot(q[...], k[...], (((2,), (2,)), ((0,), (0,))))
        slot = s * slots + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        scores = jnp.where(slot < length[...], scores, -1e30)
        new_largest = jnp.maximum(largest[...], scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_largest)
        shrink = jnp.exp(largest[...] - new_largest)

        # A slot that was not written may hold anything, and 0 times NaN is NaN.
        slot = s * slots + jax.lax.broadcasted_iota(jnp.int32, v.shape, 1)
        values = jnp.where(slot < length[...], v[...], 0).astype(v.dtype)
        new = batched_dot(weights.astype(v.dtype), values, (((2,), (1,)), ((0,), (0,))))
        out[...] = shrink * out[...] + new
        total[...] = shrink * total[...] + weights.sum(-1, keepdims=True)
        largest[...] = new_largest

    @pl.when(s == pl.num_programs(2) - 1)
    def end():
        out[...] = out[...] / total[...]
        total[...] = largest[...] + jnp.log(total[...])
