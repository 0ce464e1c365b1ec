"""Sampling: draw a token from logits, with its logprob under the distribution it was drawn from.

All functions run inside a shard_map, where the vocabulary may be split over some of the mesh's
axes. The split does not affect which tokens are drawn, except through rounding.

Array names end in their shapes: B rows, V this device's part of the vocabulary, X columns of Y
logits each, Z devices along the vocabulary's axes, K the k most likely tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

# A device's logits are arranged in this many columns, for a fast cumsum; see `draw`.
COLUMNS = 128


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # draw only from the k most likely tokens; 0 = all
    top_p: float = 1.0  # draw only from the most likely tokens with this total probability


def keep_most_likely(z_BV, sampling: Sampling, axes: tuple) -> jax.Array:
    """Set the logits of tokens outside the top k, and then outside the top p, to -inf.

    Tokens that are as likely as the last kept token are kept, too.
    """
    if sampling.top_k == 0 and sampling.top_p >= 1:
        return z_BV
    # Sort all logits of these rows, from all shards, in descending order.
    all_BV = jax.lax.all_gather(z_BV, axes, axis=1, tiled=True)
    sorted_BV = jnp.sort(all_BV, descending=True)
    if sampling.top_k:
        most_likely_BK = sorted_BV[:, : sampling.top_k]
        threshold_B1 = most_likely_BK[:, -1:]
        is_kept_BV = sorted_BV >= threshold_B1
        sorted_BV = jnp.where(is_kept_BV, sorted_BV, -jnp.inf)
    if sampling.top_p < 1:
        probs_BV = jax.nn.softmax(sorted_BV)
        mass_BV = jnp.cumsum(probs_BV, -1)
        wanted_B1 = sampling.top_p * mass_BV[:, -1:]
        is_enough_BV = mass_BV >= wanted_B1
        last_B1 = jnp.argmax(is_enough_BV, -1, keepdims=True)
        threshold_B1 = jnp.take_along_axis(sorted_BV, last_B1, 1)
    return jnp.where(z_BV >= threshold_B1, z_BV, -jnp.inf)


def pick(a_BX, index_B):
    """a_BX[i, index_B[i]] for each row i."""
    picked_B1 = jnp.take_along_axis(a_BX, index_B[:, None], 1)
    return picked_B1[:, 0]


def invert_cdf(mass_BX, target_B) -> tuple:
    """Returns (first index where the CDF exceeds the target, target minus the CDF before it)."""
    # Rounding can make a parallel cumsum non-monotone. Give entries without mass a CDF of -inf, so
    # that they are never chosen.
    sums_BX = jnp.cumsum(mass_BX, -1)
    cdf_BX = jnp.where(mass_BX > 0, sums_BX, -jnp.inf)
    # Keep the target below the largest CDF, so that an entry with mass always exceeds it.
    largest_B = jnp.nextafter(cdf_BX.max(-1), 0.0)
    target_B = jnp.minimum(target_B, largest_B)
    index_B = jnp.argmax(cdf_BX > target_B[:, None], -1)
    before_B = pick(cdf_BX - mass_BX, index_B)
    return index_B, target_B - before_B


def in_columns(z_BV, axes: tuple) -> tuple:
    """Arrange this device's logits in 128 columns: token v of the vocabulary in column v % 128.

    Returns (logits [B, Y, 128], number of places left empty before the first logit).
    """
    B, V = z_BV.shape
    if V % COLUMNS == 0:
        return z_BV.reshape(B, -1, COLUMNS), 0
    shard = jax.lax.axis_index(axes)
    empty = shard * V % COLUMNS
    # The size must be the same on all devices, so make it large enough for any `empty`.
    size = (V + 2 * (COLUMNS - 1)) // COLUMNS * COLUMNS
    padded = jnp.full((B, size), -jnp.inf)
    padded = jax.lax.dynamic_update_slice(padded, z_BV, (0, empty))
    return padded.reshape(B, -1, COLUMNS), empty


def sample_token(z_BV, u_B, sampling: Sampling, axes: tuple) -> tuple:
    """Draw a token per row. Returns (token_B int32, logprob_B float32).

    z_BV: float32 logits. u_B: uniform numbers in (0, 1), at which the CDF is inverted. The logprob
    is under the distribution that the token was drawn from. For greedy tokens, it is under the
    distribution of temperature 1. axes: the mesh axes that split the vocabulary.
    """
    # The temperature divides the logits, as it does in training.
    temperature = sampling.temperature or 1
    z_BV = keep_most_likely(z_BV / temperature, sampling, axes)
    top_B = jax.lax.pmax(z_BV.max(-1), axes)
    # A token's mass is exp(logit - largest logit). Sum it over each column on each of the Z shards,
    # and then over the whole vocabulary.
    z_BYX, empty = in_columns(z_BV, axes)
    below_top_BYX = z_BYX - top_B[:, None, None]
    mass_BYX = jnp.exp(below_top_BYX)
    mass_BX = mass_BYX.sum(1)
    mass_ZBX = jax.lax.all_gather(mass_BX, axes)
    total_B = mass_ZBX.sum(0).sum(-1)
    if sampling.temperature == 0:
        token_B = most_likely(z_BV, top_B, axes)
    else:
        target_B = u_B * total_B
        token_B = draw(z_BYX, empty, top_B, mass_ZBX, target_B, z_BV.shape[1], axes)
    # Subtract the largest logit, since total_B sums exp(logit - largest logit).
    z_B = logit_of(token_B, z_BV, axes)
    logprob_B = z_B - top_B - jnp.log(total_B)
    return token_B.astype(jnp.int32), logprob_B


def most_likely(z_BV, top_B, axes):
    """For each row, the first token whose logit is the largest, top_B."""
    V = z_BV.shape[1]
    shard = jax.lax.axis_index(axes)
    shards = jax.lax.axis_size(axes)
    last = V * shards - 1
    has_top_B = z_BV.max(-1) == top_B
    own_B = shard * V + jnp.argmax(z_BV, -1)
    # If several shards have such a token, pmin takes the first one.
    candidate_B = jnp.where(has_top_B, own_B, last)
    return jax.lax.pmin(candidate_B, axes)


def draw(z_BYX, empty, top_B, mass_ZBX, target_B, V, axes):
    """The first token at which the CDF exceeds the target. V: size of a shard's vocabulary.

    The CDF runs column by column. Three short cumsums, over the 128 columns, over the shards and
    down a column, cost less than one over the whole vocabulary, and have less rounding error.
    """
    shard = jax.lax.axis_index(axes)
    mass_BX = mass_ZBX.sum(0)
    column_B, rest_B = invert_cdf(mass_BX, target_B)
    rows = jnp.arange(len(target_B))
    mass_BZ = mass_ZBX[:, rows, column_B].T
    shard_B, rest_B = invert_cdf(mass_BZ, rest_B)
    # Search down the column, on each shard.
    z_BY1 = jnp.take_along_axis(z_BYX, column_B[:, None, None], 2)
    z_BY = z_BY1[:, :, 0]
    mass_BY = jnp.exp(z_BY - top_B[:, None])
    y_B, _ = invert_cdf(mass_BY, rest_B)
    token_B = shard * V + y_B * COLUMNS + column_B - empty
    # Only the shard that has the token knows its id.
    own_B = jnp.where(shard_B == shard, token_B, 0)
    return jax.lax.psum(own_B, axes)


def logit_of(token_B, z_BV, axes):
    """The logit of each row's token, from the shard that has it."""
    V = z_BV.shape[1]
    first = jax.lax.axis_index(axes) * V
    local_B = token_B - first
    is_here_B = (local_B >= 0) & (local_B < V)
    z_B = pick(z_BV, jnp.clip(local_B, 0, V - 1))
    own_B = jnp.where(is_here_B, z_B, 0.0)
    return jax.lax.psum(own_B, axes)
