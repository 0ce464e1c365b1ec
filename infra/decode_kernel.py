"""Pallas kernels of decoding on TPUs: they read and write the KV cache where it lies in HBM.

A kernel runs over a grid of blocks. Index functions say which block of each array comes to VMEM, or
goes back; `None` in a block's shape is a dimension of which it has one element. Letters as in
infra/kv_cache.py, whose plain functions these stand for.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import (
    BlockSpec,
    CostEstimate,
    cdiv,
    num_programs,
    pallas_call,
    program_id,
    when,
)
from jax.experimental.pallas import tpu as pltpu

# Bytes of VMEM that a block of keys takes, and a block of scores.
BLOCK_BYTES = 2**20
SCORE_BYTES = 2**21
# The score of a slot that is not attended to.
LEAST = -1e30
# A block's rows, of which the length of each is read one by one; and its queries of a row.
MOST_ROWS = 16
MOST_QUERIES = 1024
# Slots of a block that is read, and of one that is written: a tile of bfloat16.
BLOCK_SLOTS = 512
TILE_SLOTS = 16
# Bytes of keys that XLA may hold in VMEM while all layers run.
SMALL_CACHE = 2**24


def rows_of_block(B: int, row_bytes: int, most_bytes: int) -> int:
    """The most rows, of B in equal blocks, that take no more than so many bytes; at least 1."""
    most = max(1, min(MOST_ROWS, most_bytes // row_bytes))
    possible = [n for n in range(1, most + 1) if B % n == 0]
    return max(possible)


def queries_of_block(M: int) -> int:
    """The most queries, of M in equal blocks of complete tiles; all where there are no such."""
    possible = [n for n in range(8, MOST_QUERIES + 1, 8) if M % n == 0]
    return M if M <= MOST_QUERIES else max(possible, default=M)


# ---------------------------------------------------------------- writing a token
def write_token(keys, values, k_BKTH, v_BKTH, layer, slot, interpret=False) -> list:
    """One token of all rows goes to a slot, in place -> [keys, values].

    The tile of its slot is read, changed, and written: a cache has complete tiles.
    """
    _, B, K, _, H = keys.shape
    tile_bytes = K * TILE_SLOTS * H * keys.dtype.itemsize
    rows = rows_of_block(B, tile_bytes, BLOCK_BYTES)

    def tile_index(b, layer, slot):
        tile = lax.div(slot[0], TILE_SLOTS)
        return layer[0], b, 0, tile, 0

    def token_index(b, layer, slot):
        return b, 0, 0, 0

    tile = BlockSpec((None, rows, K, TILE_SLOTS, H), tile_index)
    token = BlockSpec((rows, K, 1, H), token_index)
    write = pallas_call(
        change_tiles,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B // rows,),
            in_specs=[token, token, tile, tile],
            out_specs=[tile, tile],
        ),
        out_shape=[jax.typeof(keys), jax.typeof(values)],
        # Of the layer, the slot, two tokens, keys and values the last two are the results.
        input_output_aliases={4: 0, 5: 1},
        # Tiles of keys and values are read and written.
        cost_estimate=CostEstimate(flops=0, bytes_accessed=4 * B * tile_bytes, transcendentals=0),
        name="write_token",
        interpret=interpret,
    )
    cache = in_hbm(keys), in_hbm(values)
    return write(in_array(layer), in_array(slot), k_BKTH, v_BKTH, *cache)


def in_hbm(a):
    """A cache where it is to lie. A small one XLA may hold in VMEM while all layers run, which is
    faster; a larger one it would copy there, all layers, for each layer."""
    if a.nbytes <= SMALL_CACHE:
        return a
    return pltpu.with_memory_space_constraint(a, pltpu.HBM)


def in_array(number):
    """A number as index functions get it."""
    return jnp.reshape(number, 1)


def change_tiles(layer, slot, k, v, old_keys, old_values, keys, values):
    # Other slots of the tile are written as they were.
    slots = lax.broadcasted_iota(jnp.int32, old_keys.shape, 2)
    slot_of_tile = lax.rem(slot[0], TILE_SLOTS)
    is_written = slots == slot_of_tile
    keys[...] = jnp.where(is_written, k[...], old_keys[...])
    values[...] = jnp.where(is_written, v[...], old_values[...])


# ---------------------------------------------------------------- attention
def attend(q_BKMH, keys, values, layer, length_B, others_out, others_lse, interpret=False) -> list:
    """Attention to the first `length` slots of a layer, and to others -> [out, log-sum-exp].

    Slots beyond the longest row of a block are not read. The softmax is that of flash attention
    (arXiv 2205.14135): sums so far are of weights relative to the largest score so far.
    """
    _, B, K, S, H = keys.shape
    M = q_BKMH.shape[2]
    slots = min(S, BLOCK_SLOTS)
    queries = queries_of_block(M)
    key_bytes = slots * H * keys.dtype.itemsize
    # Scores are float32.
    score_bytes = slots * queries * 4
    rows = min(rows_of_block(B, key_bytes, BLOCK_BYTES), rows_of_block(B, score_bytes, SCORE_BYTES))

    def cache_index(b, k, m, s, layer, lengths):
        # A block that is there already is not read again.
        last = last_block(lengths, b, rows, slots)
        return layer[0], b, k, jnp.minimum(s, last), 0

    # Of queries and of results the same block stays for all blocks of slots.
    def query_index(b, k, m, s, layer, lengths):
        return b, k, m, 0

    of_queries = BlockSpec((rows, None, queries, H), query_index)
    of_sums = BlockSpec((rows, None, queries, 1), query_index)
    of_cache = BlockSpec((None, rows, None, slots, H), cache_index)
    run = pallas_call(
        partial(attend_to_block, rows=rows, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B // rows, K, M // queries, cdiv(S, slots)),
            in_specs=[of_queries, of_cache, of_cache, of_queries, of_sums],
            out_specs=[of_queries, of_sums],
            scratch_shapes=[pltpu.VMEM((rows, queries, 1), jnp.float32)],
        ),
        out_shape=[jax.typeof(others_out), jax.typeof(others_lse)],
        # Blocks of slots come one after another.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=cost_of_attention(q_BKMH, keys),
        name="decode_attention",
        interpret=interpret,
    )
    # Index functions get the first two.
    cache = in_hbm(keys), in_hbm(values)
    return run(in_array(layer), length_B, q_BKMH, *cache, others_out, others_lse)


def last_block(lengths, b, rows: int, slots: int):
    """The last block of slots that a row of block b of the rows has."""
    longest = 0
    for i in range(rows):
        longest = jnp.maximum(longest, lengths[b * rows + i])
    return lax.div(longest - 1, slots)


def lengths_of_block(lengths, b, rows: int):
    """The lengths of the rows of a block, as a vector [rows, 1, 1]."""
    row = lax.broadcasted_iota(jnp.int32, (rows, 1, 1), 0)
    length = jnp.zeros_like(row)
    for i in range(rows):
        length = jnp.where(row == i, lengths[b * rows + i], length)
    return length


def cost_of_attention(q_BKMH, keys) -> CostEstimate:
    """To a cache that is full."""
    _, B, K, S, H = keys.shape
    scores = B * K * q_BKMH.shape[2] * S
    key_bytes = B * K * S * H * keys.dtype.itemsize
    return CostEstimate(flops=4 * scores * H, bytes_accessed=2 * key_bytes, transcendentals=scores)


def product(a, b, axis_of_b):
    """Matrix products of each row: over the last axis of a, [rows, M, ..]."""
    rows = (0,), (0,)
    contracted = (2,), (axis_of_b,)
    numbers = contracted, rows
    return lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


def attend_to_block(
    layer, lengths, q, k, v, others_out, others_lse, out, total, largest, *, rows, slots
):
    """out, total: sums over the slots so far, with the weights exp(score - largest); at the end,
    the results."""
    b = program_id(0)
    s = program_id(3)

    def is_filled(shape, axis):
        slot = s * slots + lax.broadcasted_iota(jnp.int32, shape, axis)
        return slot < lengths_of_block(lengths, b, rows)

    # Where nothing came before, the sums are 0, or vanish with the first weight.
    @when(s == 0)
    def begin():
        out[...] = others_out[...]
        total[...] = jnp.ones_like(total)
        largest[...] = others_lse[...]

    @when(s <= last_block(lengths, b, rows, slots))
    def add_block():
        scores = product(q[...], k[...], axis_of_b=2)
        scores = jnp.where(is_filled(scores.shape, 2), scores, LEAST)
        before = largest[...]
        now = jnp.maximum(before, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - now)
        shrink = jnp.exp(before - now)

        # A slot that was not written may hold anything, and 0 times NaN is NaN.
        values = jnp.where(is_filled(v.shape, 1), v[...], 0)
        values = values.astype(v.dtype)
        new = product(weights.astype(v.dtype), values, axis_of_b=1)
        out[...] = shrink * out[...] + new
        total[...] = shrink * total[...] + weights.sum(-1, keepdims=True)
        largest[...] = now

    @when(s == num_programs(3) - 1)
    def end():
        out[...] = out[...] / total[...]
        total[...] = largest[...] + jnp.log(total[...])
