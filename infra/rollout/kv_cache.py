"""The KV cache of a rollout: writing to it, and attention to it.

Keys and values are [L, B, K, S, H], where B counts answers or prompts: a prompt is cached once for
all of its answers. In decode on TPUs, kernels read and write the cache in place, because slicing a
layer out of the cache would copy it. Letters are as in model.py. M counts the queries that attend
to the same keys: G for the keys of an answer, and G times the answers per prompt for the keys of a
prompt.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec as P

import model
from infra.rollout import decode_kernel
from infra.rollout.decode_kernel import MASKED

# Maximum number of a prompt's tokens whose attention scores are in memory at once.
QUERIES_AT_ONCE = 1024


class Cache(NamedTuple):
    keys: jax.Array  # [L, B, K, S, H]
    values: jax.Array


# ---------------------------------------------------------------- what a layer calls
def prefill_attention(q_BNTH, k_BKTH, v_BKTH, layer, cache: Cache, first, layout) -> tuple:
    """Causal self-attention of prompts. Also writes their keys and values to the cache.

    On each device, keys and values go to the cache's rows from `first` on. All prompts begin in
    slot 0. Returns ([B, N, T, H], cache).
    """

    def on_device(q, k, v, layer, cache, first):
        return causal_attention(q, k, v), write_plain(cache, k, v, layer, first)

    run = over_devices(on_device, layout, cache, first)
    return run(q_BNTH, k_BKTH, v_BKTH, layer, cache, first)


def causal_attention(q_BNTH, k_BKTH, v_BKTH) -> jax.Array:
    """Attention of each token to itself and the tokens before it. Returns float32 [B, N, T, H].

    Computes at most QUERIES_AT_ONCE queries at a time: all scores would take T * T floats per head.
    """
    B, N, T, H = q_BNTH.shape
    blocks = -(-T // QUERIES_AT_ONCE)
    size = -(-T // blocks)

    def attend(start):
        own_q = lax.dynamic_slice_in_dim(q_BNTH, start, size, 2)
        # Padding needs no mask: it comes after the prompt, so only padding tokens attend to it.
        causal = start + jnp.arange(size)[:, None] >= jnp.arange(T)
        return model.attention(own_q, k_BKTH, v_BKTH, causal[None])

    if blocks == 1:
        return attend(0)
    # Blocks have equal sizes, so the last one may have queries that belong to no token.
    q_BNTH = jnp.pad(q_BNTH, ((0, 0), (0, 0), (0, blocks * size - T), (0, 0)))
    # A loop compiles faster than separate products for the blocks.
    out = lax.map(attend, size * jnp.arange(blocks))
    return jnp.moveaxis(out, 0, 2).reshape(B, N, -1, H)[:, :, :T]


def decode_attention(
    q_BNTH, k_BKTH, v_BKTH, layer, cache, prompts, slot, prompt_length_B, answer_length_B, layout
) -> tuple:
    """Attention of one new token of each answer to its prompt, its earlier tokens and itself.

    cache: keys and values of the answers; the new ones are written to `slot`. prompts: keys and
    values of the prompts. prompt_length_B: tokens of each row's prompt. Rows with the same prompt
    are consecutive, and all prompts have the same number of rows. answer_length_B: tokens of each
    answer, the new one included. Returns ([B, N, 1, H], cache).
    """
    is_tpu = layout.platform == "tpu"
    attend = attend_pallas if is_tpu else attend_plain

    def on_device(q, k, v, layer, answers, prompts, slot, prompt_length_B, answer_length_B):
        if is_tpu:
            answers = Cache(*decode_kernel.write_token(*answers, k, v, layer, slot))
        else:
            answers = write_plain(answers, k, v, layer, slot=slot)

        # Every G consecutive query heads share one of the K key/value heads.
        B, N, _, H = q.shape
        K = k.shape[1]
        q_BKGH = q.reshape(B, K, -1, H)

        # The answers of a prompt attend to it together, so that its keys and values are read once.
        n_prompts = prompts.keys.shape[1]
        group = B // n_prompts
        q_joined = join_group(q_BKGH, group)
        length_of_prompt = prompt_length_B[::group]
        joined = attend(q_joined, prompts, layer, length_of_prompt, no_slots(q_joined))
        of_prompts = split_group(joined, group)

        # Then each answer attends to its own tokens, including the new one.
        out, _ = attend(q_BKGH, answers, layer, answer_length_B, of_prompts)
        return out.reshape(B, N, 1, H), answers

    others = prompts, slot, prompt_length_B, answer_length_B
    run = over_devices(on_device, layout, cache, *others)
    return run(q_BNTH, k_BKTH, v_BKTH, layer, cache, *others)


def over_devices(run, layout, cache, *others):
    """Wrap `run` in a shard_map, where each device has its own rows and heads. cache, others: the
    arguments that follow `layer`; only their dimensions are read here.

    Outside a shard_map, jax 0.10 all-gathers an array whose layout in memory is constrained, as in
    `write_plain`, and cannot partition Pallas kernels.
    """
    if layout.sharing > 1:
        run = with_own_rows(run, splits_queries="fsdp" in layout.heads)
    by_head = P(layout.rows, "tp")
    by_query_head = P(layout.rows, layout.heads)
    # The other arguments are caches, scalars, or arrays with one entry per row (see
    # `split_like_cache`).
    spec_of_ndim = {5: layout.cache_spec, 1: P(layout.cache_rows), 0: P()}

    def spec(a):
        return spec_of_ndim[jnp.ndim(a)]

    cache_specs = jax.tree.map(spec, cache)
    other_specs = jax.tree.map(spec, others)
    return jax.shard_map(
        run,
        mesh=layout.mesh,
        in_specs=(by_query_head, by_head, by_head, P(), cache_specs, *other_specs),
        out_specs=(by_query_head, cache_specs),
        check_vma=False,
    )


def with_own_rows(run, splits_queries):
    """Let each device run `run` on its own rows, in layouts in which devices along the mesh's fsdp
    axis have the same key/value heads.

    Outside of attention, these devices have the same rows. In attention, each has its part of the
    rows, with all queries of its key/value heads. splits_queries: whether the fsdp axis also splits
    the query heads.
    """

    def run_on_own_rows(q_BNTH, k_BKTH, v_BKTH, layer, cache, *others):
        if splits_queries:
            # Exchange parts of the heads for parts of the rows.
            q_BNTH = lax.all_to_all(q_BNTH, "fsdp", split_axis=0, concat_axis=1, tiled=True)
        else:
            q_BNTH = own_rows(q_BNTH)
        k_BKTH = own_rows(k_BKTH)
        v_BKTH = own_rows(v_BKTH)
        out_BNTH, cache = run(q_BNTH, k_BKTH, v_BKTH, layer, cache, *others)
        # The next matmul casts the results to this dtype. Cast them before they are exchanged.
        out_BNTH = out_BNTH.astype(q_BNTH.dtype)
        if splits_queries:
            out_BNTH = lax.all_to_all(out_BNTH, "fsdp", split_axis=1, concat_axis=0, tiled=True)
        else:
            out_BNTH = lax.all_gather(out_BNTH, "fsdp", tiled=True)
        return out_BNTH, cache

    return run_on_own_rows


def own_rows(a):
    """This device's part, in attention, of the rows that all devices along the fsdp axis have."""
    B = a.shape[0] // lax.axis_size("fsdp")
    first = lax.axis_index("fsdp") * B
    return lax.dynamic_slice_in_dim(a, first, B)


def split_like_cache(a_B, layout):
    """Split an array with one entry per row like the rows of the cache. With a sharding constraint
    instead of a shard_map, XLA would propagate this split to the activations of every layer."""
    if layout.sharing == 1:
        return a_B
    split = partial(jax.shard_map, mesh=layout.mesh, check_vma=False)
    return split(own_rows, in_specs=P(layout.rows), out_specs=P(layout.cache_rows))(a_B)


def join_group(q_BKGH, group):
    """Join the queries of each prompt's answers: [B, K, G, H] -> [B / group, K, M, H]."""
    # M runs over the answers of a prompt, and over the G heads of each answer.
    B, K, G, H = q_BKGH.shape
    split = q_BKGH.reshape(-1, group, K, G, H)
    heads_first = split.swapaxes(1, 2)
    return heads_first.reshape(-1, K, group * G, H)


def split_group(arrays, group):
    """Undo `join_group` for each array: [B, K, M, X] of prompts -> [B * group, K, G, X]."""

    def split_one(a):
        B, K, M, X = a.shape
        split = a.reshape(B, K, group, -1, X)
        answers_first = split.swapaxes(1, 2)
        return answers_first.reshape(B * group, K, -1, X)

    return jax.tree.map(split_one, arrays)


# ---------------------------------------------------------------- in plain JAX
def write_plain(cache: Cache, k_BKTH, v_BKTH, layer, first=0, slot=0) -> Cache:
    """Write keys and values of T tokens to a layer in place, from row `first` and `slot` on."""
    start = (layer, first, 0, slot, 0)
    # Fix the order of the dimensions in memory. With many rows, XLA would otherwise choose another
    # order, and copy the cache to change it.
    order = tuple(range(5))
    in_order = DeviceLayout(order)

    def write(cache, new):
        cache = lax.dynamic_update_slice(cache, new[None], start)
        return with_layout_constraint(cache, in_order)

    new = Cache(k_BKTH, v_BKTH)
    return jax.tree.map(write, cache, new)


def no_slots(q_BKMH) -> tuple:
    """The result of attention to no slots at all."""
    out = jnp.zeros(q_BKMH.shape, jnp.float32)
    one_per_query = out[..., :1]
    lse = jnp.full_like(one_per_query, MASKED)
    return out, lse


def attend_plain(q_BKMH, cache: Cache, layer, length_B, others) -> tuple:
    """Attention to the first length_B slots of a layer, merged with attention to other slots.

    Queries are already scaled by H ** -0.5. others: the result of this function for the other
    slots, or `no_slots`. Returns, in float32, ([B, K, M, H], log-sum-exp of the scores of all slots
    [B, K, M, 1]).
    """
    k_BKSH = lax.dynamic_index_in_dim(cache.keys, layer, keepdims=False)
    v_BKSH = lax.dynamic_index_in_dim(cache.values, layer, keepdims=False)
    scores = model.matmul("BKMH,BKSH->BKMS", q_BKMH, k_BKSH)
    # Slots beyond length_B are not written yet, or hold the padding of a prompt.
    slots = jnp.arange(scores.shape[-1])
    is_filled_BS = slots < length_B[:, None]
    is_filled_BKMS = is_filled_BS[:, None, None]
    scores = jnp.where(is_filled_BKMS, scores, MASKED)

    # The softmax covers the other slots, too: they add exp(others_lse) to its sum.
    others_out, others_lse = others
    own_lse = jax.nn.logsumexp(scores, -1, keepdims=True)
    lse = jnp.logaddexp(others_lse, own_lse)
    probs = jnp.exp(scores - lse)
    out = model.matmul("BKMS,BKSH->BKMH", probs.astype(v_BKSH.dtype), v_BKSH)
    others_share = jnp.exp(others_lse - lse)
    return out + others_share * others_out, lse


def attend_pallas(q_BKMH, cache: Cache, layer, length_B, others) -> tuple:
    """`attend_plain`, computed by a Pallas kernel for TPUs."""
    return decode_kernel.attend(q_BKMH, *cache, layer, length_B, *others)
