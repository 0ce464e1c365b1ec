"""Pallas TPU kernels for decode, which read and write the KV cache in place in HBM.

A kernel runs over a grid of blocks. Index functions choose which block of each array is copied to
VMEM, or back to HBM; `None` in a block's shape is a dimension of size 1 that the kernel does not
see. Letters are as in infra/rollout/kv_cache.py, whose plain JAX functions these kernels replace.
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

# Maximum bytes of VMEM for a block of keys, and for a block of scores.
BLOCK_BYTES = 2**20
SCORE_BYTES = 2**21
# Score of a masked slot. It is finite, so that exp(score - largest score) is never NaN.
MASKED = -1e30
# Maximum rows of a block: the attention kernel reads the lengths of a block's rows one by one.
MAX_ROWS = 16
# A block has at most this many queries per row, unless M has no suitable divisor: see
# `queries_of_block`.
MAX_QUERIES = 1024
# Maximum slots per block of the attention kernel.
BLOCK_SLOTS = 512
# Slots of a bfloat16 tile. To change one slot, `write_token` reads and writes back its whole tile.
TILE_SLOTS = 16
# Largest array of keys or values, in bytes, that XLA may hold in VMEM while all layers run.
SMALL_BYTES = 2**23


def rows_of_block(B: int, row_bytes: int, most_bytes: int) -> int:
    """Rows per block: the largest divisor of B within MAX_ROWS and most_bytes; at least 1."""
    most = max(1, min(MAX_ROWS, most_bytes // row_bytes))
    possible = [n for n in range(1, most + 1) if B % n == 0]
    return max(possible)


def queries_of_block(M: int) -> int:
    """Queries per block: M if it is at most MAX_QUERIES, else a divisor of M.

    The divisor is the largest one up to MAX_QUERIES that is a multiple of 8, the rows of a float32
    tile. If M has no such divisor, one block takes all queries.
    """
    possible = [n for n in range(8, MAX_QUERIES + 1, 8) if M % n == 0]
    return M if M <= MAX_QUERIES else max(possible, default=M)


# ---------------------------------------------------------------- writing a token
def write_token(keys, values, k_BKTH, v_BKTH, layer, slot, interpret=False) -> list:
    """Write one token of every row to a slot of the cache, in place. Returns [keys, values].

    The kernel reads the slot's tile, changes it and writes it back, so the slots of the cache must
    fill complete tiles.
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
        # The inputs are layer, slot, the token's key and value, and the cache's keys and values.
        # The last two become the outputs.
        input_output_aliases={4: 0, 5: 1},
        # Every row reads and writes one tile of keys and one tile of values.
        cost_estimate=CostEstimate(flops=0, bytes_accessed=4 * B * tile_bytes, transcendentals=0),
        name="write_token",
        interpret=interpret,
    )
    cache = in_hbm(keys), in_hbm(values)
    return write(in_array(layer), in_array(slot), k_BKTH, v_BKTH, *cache)


def in_hbm(a):
    """Constrain keys or values to HBM, unless they are small.

    XLA may hold a small array in VMEM while all layers run, which is faster. Without the
    constraint, XLA would copy a larger array, with all its layers, to VMEM once per layer.
    """
    if a.nbytes <= SMALL_BYTES:
        return a
    return pltpu.with_memory_space_constraint(a, pltpu.HBM)


def in_array(number):
    """A number as an array [1], as index functions need it."""
    return jnp.reshape(number, 1)


def change_tiles(layer, slot, k, v, old_keys, old_values, keys, values):
    # The other slots of the tile are written back unchanged.
    slots = lax.broadcasted_iota(jnp.int32, old_keys.shape, 2)
    slot_of_tile = lax.rem(slot[0], TILE_SLOTS)
    is_written = slots == slot_of_tile
    keys[...] = jnp.where(is_written, k[...], old_keys[...])
    values[...] = jnp.where(is_written, v[...], old_values[...])


# ---------------------------------------------------------------- attention
def attend(q_BKMH, keys, values, layer, length_B, others_out, others_lse, interpret=False) -> list:
    """Attention to the first length_B slots of a layer, merged with attention to other slots.

    others_out, others_lse: the results for the other slots. Returns [out, log-sum-exp] for all
    slots. For each block of rows, the kernel reads only the slots up to the block's largest length.
    The softmax is as in flash attention (arXiv 2205.14135): the running sums weight each slot by
    exp(score - largest score so far).
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
        # Past the last block, repeat the last index: a block already in VMEM is not copied again.
        last = last_block(lengths, b, rows, slots)
        return layer[0], b, k, jnp.minimum(s, last), 0

    # All blocks of slots use the same block of queries and the same block of results.
    def query_index(b, k, m, s, layer, lengths):
        return b, k, m, 0

    query_block = BlockSpec((rows, None, queries, H), query_index)
    sum_block = BlockSpec((rows, None, queries, 1), query_index)
    cache_block = BlockSpec((None, rows, None, slots, H), cache_index)
    run = pallas_call(
        partial(attend_to_block, rows=rows, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B // rows, K, M // queries, cdiv(S, slots)),
            in_specs=[query_block, cache_block, cache_block, query_block, sum_block],
            out_specs=[query_block, sum_block],
            scratch_shapes=[pltpu.VMEM((rows, queries, 1), jnp.float32)],
        ),
        out_shape=[jax.typeof(others_out), jax.typeof(others_lse)],
        # Blocks of slots run in order, since each adds to the sums of the one before.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=cost_of_attention(q_BKMH, keys),
        name="decode_attention",
        interpret=interpret,
    )
    # The first two arguments are the prefetched scalars, which index functions receive, too.
    cache = in_hbm(keys), in_hbm(values)
    return run(in_array(layer), length_B, q_BKMH, *cache, others_out, others_lse)


def last_block(lengths, b, rows: int, slots: int):
    """Index of the last block of slots that any row of row block b reaches."""
    longest = 0
    for i in range(rows):
        longest = jnp.maximum(longest, lengths[b * rows + i])
    return lax.div(longest - 1, slots)


def lengths_of_block(lengths, b, rows: int):
    """The lengths of the rows of row block b, as an array [rows, 1, 1]."""
    row = lax.broadcasted_iota(jnp.int32, (rows, 1, 1), 0)
    length = jnp.zeros_like(row)
    for i in range(rows):
        length = jnp.where(row == i, lengths[b * rows + i], length)
    return length


def cost_of_attention(q_BKMH, keys) -> CostEstimate:
    """Cost of attention to a full cache."""
    _, B, K, S, H = keys.shape
    scores = B * K * q_BKMH.shape[2] * S
    key_bytes = B * K * S * H * keys.dtype.itemsize
    return CostEstimate(flops=4 * scores * H, bytes_accessed=2 * key_bytes, transcendentals=scores)


def product(a, b, axis_of_b):
    """Matmul for each row: contracts the last axis of `a` [rows, M, X] with `axis_of_b` of `b`."""
    batch_axes = (0,), (0,)
    contracted_axes = (2,), (axis_of_b,)
    dimensions = contracted_axes, batch_axes
    # As in model.matmul, float32 inputs are not rounded.
    precision = "highest" if a.dtype == jnp.float32 else "default"
    return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


def attend_to_block(
    layer, lengths, q, k, v, others_out, others_lse, out, total, largest, *, rows, slots
):
    """Add one block of slots to the running sums.

    out and total hold sums over the slots so far, with weights exp(score - largest). After the last
    block they hold the results: the output and the log-sum-exp.
    """
    b = program_id(0)
    s = program_id(3)

    def is_filled(shape, axis):
        slot = s * slots + lax.broadcasted_iota(jnp.int32, shape, axis)
        return slot < lengths_of_block(lengths, b, rows)

    # Start as if the other slots were one slot, with score others_lse and value others_out. If
    # there are no other slots, others_lse is MASKED, so the first block scales this start to 0.
    @when(s == 0)
    def begin():
        out[...] = others_out[...]
        total[...] = jnp.ones_like(total)
        largest[...] = others_lse[...]

    @when(s <= last_block(lengths, b, rows, slots))
    def add_block():
        scores = product(q[...], k[...], axis_of_b=2)
        scores = jnp.where(is_filled(scores.shape, 2), scores, MASKED)
        old_largest = largest[...]
        new_largest = jnp.maximum(old_largest, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_largest)
        shrink = jnp.exp(old_largest - new_largest)

        # The last block may reach past the cache, where v may be NaN, and 0 times NaN is NaN.
        values = jnp.where(is_filled(v.shape, 1), v[...], 0)
        values = values.astype(v.dtype)
        new = product(weights.astype(v.dtype), values, axis_of_b=1)
        out[...] = shrink * out[...] + new
        total[...] = shrink * total[...] + weights.sum(-1, keepdims=True)
        largest[...] = new_largest

    @when(s == num_programs(3) - 1)
    def end():
        out[...] = out[...] / total[...]
        total[...] = largest[...] + jnp.log(total[...])
