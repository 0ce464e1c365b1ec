"""The GRPO loss, computed from hidden states without ever holding the logits of all tokens.

For token i with hidden state h, target y, LM head W [V, D], temperature T and advantage A:

    z = h W' / T      p = softmax(z)      logp = z[y] - logsumexp(z)      H = -sum_v p_v log p_v

    ratio  = exp(logp - old_logprobs)            probability of y now / before the step's updates
    policy = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
                                                 PPO (arXiv 1707.06347, eq. 7); DAPO (2503.14476)
    kl     = exp(ref_logprobs - logp) - (ref_logprobs - logp) - 1
                                                 KL to a frozen reference (GRPO, 2402.03300, eq. 4)
    importance = min(exp(old_logprobs - sampler_logprobs), is_cap)
                                                 truncated importance weight, without gradient;
                                                 1 if is_cap is 0
    loss   = sum_i weight_i (beta kl - importance policy - entropy_bonus H)

With d_logp = dloss/dlogp and d_entropy = dloss/dH, the gradients are:

    dz     = (d_logp (onehot(y) - p) - d_entropy p (log p + H)) / T
    dh, dW = dz W, dz' h

If the head is frozen, as with --lora, dW is not computed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, NamedSharding, P, ShapeDtypeStruct, lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import BlockSpec, cdiv, num_programs, pallas_call, program_id, when
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

# Start reading at the bottom: `grpo_loss` calls `fused_loss`, which calls `loss_and_gradients`,
# which runs `on_one_device` on every device, which calls `compute_chunk` for each chunk of tokens.
# A chunk takes three matrix products (logits, dh and dW), in plain JAX or in Pallas.
#
# Array names end in their shapes: N tokens on all devices, n tokens on one device; C tokens of a
# chunk, c of these on one device; D model width, d columns of D on one device or in one tile;
# V vocabulary, or the part of it in one shard or tile; P parts of V. In formulas, ' is a transpose.

# Mesh axes that shard the LM head. Devices along these axes work on each chunk together.
HEAD_AXES = ("fsdp", "tp")
# Mesh axes that shard tokens.
TOKEN_AXES = ("dp", *HEAD_AXES)
# MiB of VMEM for each prefix of device_kind. The first match counts, so "TPU v5 lite" precedes
# "TPU v5".
VMEM_MIB = {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128}
LOG2E = 1.4426950408889634  # log2(e)
PADDING_LOGIT = -1e30  # logit of a row that pads the head beyond the vocabulary
MAX_LOG_RATIO = 60.0  # upper bound on differences of logprobs, so that exp does not overflow
f32 = jnp.float32


# ---------------------------------------------------------------- GRPO on [tokens] vectors
def grpo_terms(
    logp_N: Array,
    entropy_N: Array,
    vectors: dict,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    is_cap: float = 0.0,  # 0: no importance weight
    entropy_bonus: float = 0.0,
) -> tuple[Array, dict]:
    """The loss above, token by token. Returns (loss_N, stats), float32 [N], 0 where weight is 0.

    vectors, float32 [N] each:
      weight             weight_i, including normalisation. 0 masks the token, even if other
                         vectors are not finite there.
      advantage          A
      old_logprobs       optional: without it, the ratio is 1
      sampler_logprobs   optional: without it, the importance weight is 1
      ref_logprobs       optional: without it, there is no KL
    """
    # Mask before any algebra: 0 times infinity or NaN is NaN, in the gradient too.
    mask = vectors["weight"] > 0
    vectors = {name: jnp.where(mask, a, 0.0) for name, a in vectors.items()}
    logp = jnp.where(mask, logp_N, 0.0)
    advantage = vectors["advantage"]

    # Without old_logprobs, the ratio is 1, but its gradient is not 0.
    old_logprobs = vectors.get("old_logprobs", lax.stop_gradient(logp))
    log_ratio = jnp.minimum(logp - old_logprobs, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    is_clipped = clipped_ratio * advantage < ratio * advantage
    # This is min(), but jnp.minimum would halve the gradient at a tie.
    policy = jnp.where(is_clipped, clipped_ratio, ratio) * advantage
    stats = {"clip_fraction": is_clipped.astype(f32), "ratio": jnp.where(mask, ratio, 0.0)}
    if "sampler_logprobs" in vectors:
        gap = jnp.minimum(old_logprobs - vectors["sampler_logprobs"], MAX_LOG_RATIO)
        stats["logprob_gap"] = jnp.abs(gap)
        if is_cap:
            importance = jnp.minimum(jnp.exp(gap), is_cap)
            policy *= lax.stop_gradient(importance)
    loss = -policy
    if "ref_logprobs" in vectors:
        ref_log_ratio = jnp.minimum(vectors["ref_logprobs"] - logp, MAX_LOG_RATIO)
        kl = jnp.exp(ref_log_ratio) - ref_log_ratio - 1
        stats["kl"] = kl
        loss += beta * kl
    if entropy_bonus:
        loss -= entropy_bonus * jnp.where(mask, entropy_N, 0.0)
    return vectors["weight"] * loss, lax.stop_gradient(stats)


# ---------------------------------------------------------------- the softmax of a part of V
# Each tile or device has a part of V. It reduces the logits z of each token over its part to
#     max               the maximum of z
#     sum_exp           the sum of exp(z - max)
#     sum_shifted_exp   the sum of (z - max) exp(z - max), which gives the entropy
def combine(max_PC, sum_exp_PC, sum_shifted_exp_PC):
    """Combine the three reductions over P parts of V, [P, C], into the three over all of V, [C]."""
    max_C = max_PC.max(0)
    shift_PC = max_PC - max_C
    scale_PC = jnp.exp(shift_PC)
    sum_exp_C = (scale_PC * sum_exp_PC).sum(0)
    # Each part has subtracted its own maximum from z, not max_C.
    shifted_PC = scale_PC * (sum_shifted_exp_PC + shift_PC * sum_exp_PC)
    return max_C, sum_exp_C, shifted_PC.sum(0)


# ---------------------------------------------------------------- a chunk in plain JAX
# A chunk's gradients are computed while its logits are in memory. This takes three GEMMs (z, dh,
# dW) instead of four (z again for the backward).
def dot(a, b, a_axis, b_axis):
    """The product of two matrices, summed over one axis of each, in float32."""
    # By default, a TPU or GPU would round float32 inputs.
    precision = "highest" if a.dtype == f32 else "default"
    axes = (([a_axis], [b_axis]), ([], []))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=f32)


def jax_forward(head_VD, valid_rows, temperature, h_CD):
    """Returns (logits [C, V], their three reductions over V, [C] each), all in float32.

    Only the first `valid_rows` rows of the head are in the vocabulary.
    """
    z_CV = dot(h_CD, head_VD, 1, 1) / temperature
    is_valid_V = jnp.arange(len(head_VD)) < valid_rows
    z_CV = jnp.where(is_valid_V, z_CV, PADDING_LOGIT)
    # If Pallas computes all rows, the head is empty here, and the maximum is `initial`.
    max_C = z_CV.max(-1, initial=PADDING_LOGIT)
    shifted_CV = z_CV - max_C[:, None]
    exp_CV = jnp.exp(shifted_CV)
    sum_exp_C = exp_CV.sum(-1)
    sum_shifted_exp_C = (shifted_CV * exp_CV).sum(-1)
    return z_CV, (max_C, sum_exp_C, sum_shifted_exp_C)


def jax_backward(head_VD, z_CV, h_CD, row_C, per_token, dW_VD, is_first_chunk):
    """Returns dh [C, D] and the new dW [V, D], in float32.

    row_C: each target's row in this part of the head; outside [0, V) if it is in another part.
    per_token: (d_logp / T, d_entropy / T, logsumexp, entropy), [C] each. A chunk adds its gradient
    to dW_VD, except for the first chunk, which replaces dW_VD. If the head is frozen, both dW are
    None.
    """
    d_logp, d_entropy, logsumexp, entropy = (a_C[:, None] for a_C in per_token)
    log_p = z_CV - logsumexp
    is_target = row_C[:, None] == jnp.arange(len(head_VD))
    from_softmax = jnp.exp(log_p) * (d_logp + d_entropy * (log_p + entropy))
    dz = jnp.where(is_target, d_logp, 0.0) - from_softmax
    dz_CV = dz.astype(h_CD.dtype)
    dh_CD = dot(dz_CV, head_VD, 1, 0)
    if dW_VD is None:
        return dh_CD, None
    dW_so_far = jnp.where(is_first_chunk, 0.0, dW_VD)
    return dh_CD, dW_so_far + dot(dz_CV, h_CD, 0, 0)


# ---------------------------------------------------------------- a chunk in Pallas
# The two kernels work on tiles of z' [vocabulary, tokens]: sums over the vocabulary run along
# sublanes, and per-token values lie along lanes. The forward saves z - max in the dtype of h, where
# max is a token's maximum over `step_rows` rows of W. Rounding errors are smallest for logits near
# the maximum, which matter most. The backward computes dz in VMEM and uses it for both GEMMs.
# Exponentials have base 2, because the hardware computes powers of 2.
@dataclass(frozen=True)
class Blocks:
    """The sizes of a chunk, and of the tiles that the kernels split it into."""

    chunk_tokens: int  # tokens of a chunk, summed over the devices along HEAD_AXES
    # Plain JAX does not use the other fields.
    tile_tokens: int = 0  # tokens of a tile in the forward; the backward takes all of the chunk
    tile_vocab: int = 0  # rows of the head in a tile
    tile_hidden: int = 0  # columns of D in a tile of the backward; the forward takes all of D
    vmem_bytes: int = 0  # VMEM that a kernel may use
    interpret: object = False  # True or pltpu.InterpretParams: interpret the kernels
    step_rows: int = 256  # rows of a tile that a kernel works on at a time


def block_sizes(device_kind: str, D: int, impl: str = "pallas", chunk_tokens: int = 0) -> Blocks:
    """Choose the Blocks for a chip and a bfloat16 model.

    The backward's tile is as wide in D as fits into 7/8 of VMEM, because the backward reads z again
    for each tile of D. At this width, a tile has the most rows of V for which both kernels fit.
    chunk_tokens: 0 = choose it, too. Raises ValueError if pallas does not support the chip or D.
    """
    if impl != "pallas":
        return Blocks(chunk_tokens or 1024)
    matches = [mib for kind, mib in VMEM_MIB.items() if device_kind.startswith(kind)]
    vmem_mib = matches[0] if matches else 0
    vmem_bytes = vmem_mib << 20
    tile_tokens = 2048 if vmem_mib > 16 else 256
    C = chunk_tokens or max(tile_tokens, 1024)
    for halvings in range(5):
        # D / 2 ** halvings, rounded up to a multiple of 128 lanes.
        d = cdiv(D, 128 << halvings) * 128
        for V in (1024, 512, 256):
            # h is bfloat16, dh and the sum of dh are float32. If D has several tiles, h and dh have
            # two buffers each.
            h_and_dh = C * d * (10 if d >= D else 16)
            # Each has two buffers: W in bfloat16, the old dW in float32, and the new dW in float32.
            head_and_dW = V * d * 20
            # z and dz are bfloat16. z has two buffers, and dz has one.
            z_and_dz = V * C * 6
            temporaries_of_a_step = 256 * C * 8
            backward = h_and_dh + head_and_dW + z_and_dz + temporaries_of_a_step
            # In the forward, h, W and z are bfloat16 and have two buffers each. A step copies its
            # rows of W, and has float32 temporaries.
            tokens = min(tile_tokens, C)
            forward = 4 * (tokens * D + V * D + V * tokens) + 256 * (2 * D + 20 * tokens)
            if backward < vmem_bytes * 7 // 8 and forward < vmem_bytes * 15 // 16:
                return Blocks(C, tile_tokens, V, d, vmem_bytes * 15 // 16)
    chips = ", ".join(VMEM_MIB)
    raise ValueError(
        f"pallas is for {chips}, with a hidden size whose tiles fit into VMEM; this is "
        f"{device_kind} with hidden size {D}"
    )


def compiler_params(blocks):
    # Chips with two cores split a grid's first dimension.
    semantics = ("parallel", "arbitrary")
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=blocks.vmem_bytes)


def forward_kernel(scale, step_rows, h_CD, head_VD, *outputs):
    """Compute a tile's logits z, times log2(e), and reduce them in steps of `step_rows` rows.

    With p = 2 ** (z - max), write for each step: z - max (only if there is an output for it), max,
    the sum of p, and the sum of (z - max) p.
    """
    *shifted_out, max_out, sum_exp_out, sum_shifted_exp_out = outputs
    tile_rows = head_VD.shape[0]
    z = dot(head_VD[:step_rows], h_CD[...], 1, 1)
    for i in range(tile_rows // step_rows):
        start = i * step_rows
        end = start + step_rows
        # Issue the next step's GEMM before this step's exp, so that the compiler can run the matrix
        # unit and the vector unit at the same time.
        next_z = None
        if end < tile_rows:
            next_z = dot(head_VD[end : end + step_rows], h_CD[...], 1, 1)
        z *= scale * LOG2E
        max_1C = z.max(0, keepdims=True)
        shifted = z - max_1C
        p = jnp.exp2(shifted)
        max_out[0, i] = max_1C
        sum_exp_out[0, i] = p.sum(0, keepdims=True)
        sum_shifted_exp_out[0, i] = (shifted * p).sum(0, keepdims=True)
        for out in shifted_out:
            out[start:end] = shifted.astype(out.dtype)
        z = next_z


def pallas_forward(blocks, tiles, save, head_VD, valid_rows, temperature, h_CD):
    """Returns (saved, reductions). saved: (z - max, only if `save`; max; logits of the rest).

    The kernel computes the first `tiles` tiles of the head's rows, and `jax_forward` computes the
    rest. The kernel's z and max are in base 2: multiplied by log2(e). The reductions are as in
    `jax_forward`, but over all rows of the head.
    """
    C, D = h_CD.shape
    V = blocks.tile_vocab
    tokens = min(blocks.tile_tokens, C)
    tiled_rows = tiles * V
    # Each step of a tile has its own reductions.
    steps = V // blocks.step_rows
    reduction_shape = ShapeDtypeStruct((tiles, steps, 1, C), f32)
    reduction_spec = BlockSpec((1, steps, 1, tokens), lambda i, j: (j, 0, 0, i))
    out_shape = [reduction_shape] * 3
    out_specs = [reduction_spec] * 3
    if save:
        out_shape = [ShapeDtypeStruct((tiled_rows, C), h_CD.dtype), *out_shape]
        out_specs = [BlockSpec((V, tokens), lambda i, j: (j, i)), *out_specs]
    *shifted_VC, tile_max, tile_sum_exp, tile_sum_shifted_exp = pallas_call(
        partial(forward_kernel, 1 / temperature, blocks.step_rows),
        name="grpo_forward",
        interpret=blocks.interpret,
        grid=(cdiv(C, tokens), tiles),
        in_specs=[
            BlockSpec((tokens, D), lambda i, j: (i, 0)),
            BlockSpec((V, D), lambda i, j: (j, 0)),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=compiler_params(blocks),
    )(h_CD, head_VD)
    valid_rest = valid_rows - tiled_rows
    z_rest, rest = jax_forward(head_VD[tiled_rows:], valid_rest, temperature, h_CD)
    # Convert to base e, which jax_forward uses.
    from_tiles = (tile_max / LOG2E, tile_sum_exp, tile_sum_shifted_exp / LOG2E)
    parts = [
        jnp.concatenate([a_tile.reshape(-1, C), a_rest[None]])
        for a_tile, a_rest in zip(from_tiles, rest, strict=True)
    ]
    return (*shifted_VC, tile_max, z_rest), combine(*parts)


def step_gradient(shifted, max_1C, row_1C, per_token, uses_entropy):
    """Returns dz of one step's rows of the head, float32 [step_rows, C].

    shifted: z - max of these rows, in base 2. row_1C: each target's row, counted from the first of
    these rows. per_token: d_logp, offset, slope and logsumexp, [1, C] each, from
    `pallas_backward`; the logsumexp is in base 2, and the slope multiplies log2(p).
    """
    d_logp, offset, slope, log2_sum_exp = per_token
    log2_p = shifted.astype(f32) + (max_1C - log2_sum_exp)
    is_target = lax.broadcasted_iota(jnp.int32, log2_p.shape, 0) == row_1C
    factor = offset
    if uses_entropy:
        factor = offset + slope * log2_p
    return jnp.where(is_target, d_logp, 0.0) - jnp.exp2(log2_p) * factor


def backward_kernel(step_rows, uses_entropy, is_first_chunk, *refs):
    """Compute dz [V, C] of a tile, then dW += dz h (unless the head is frozen) and dh += dz' W."""
    row_1C, per_token_4C, h_Cd, head_Vd, shifted_VC, tile_max = refs[:6]
    *in_and_out_of_dW, dh_out = refs[6:-2]
    dz_VC, dh_Cd = refs[-2:]  # scratch; dh_Cd is the float32 sum over tiles of V
    tile = program_id(1)
    tile_rows = head_Vd.shape[0]
    per_token = [per_token_4C[k : k + 1] for k in range(4)]

    @when(tile == 0)
    def _():
        dh_Cd[...] = jnp.zeros_like(dh_Cd)

    # If a tile has an even number of steps, a GEMM takes two steps' rows, so that h is read less
    # often.
    has_odd_steps = tile_rows // step_rows % 2
    gemm_rows = step_rows if has_odd_steps else 2 * step_rows

    def gradient(gemm_start):
        parts = []
        for start in range(gemm_start, gemm_start + gemm_rows, step_rows):
            shifted = shifted_VC[start : start + step_rows]
            max_1C = tile_max[0, start // step_rows]
            row_of_step = row_1C[...] - (tile * tile_rows + start)
            dz = step_gradient(shifted, max_1C, row_of_step, per_token, uses_entropy)
            parts.append(dz.astype(dz_VC.dtype))
        return jnp.concatenate(parts)

    dz = gradient(0)
    for start in range(0, tile_rows, gemm_rows):
        end = start + gemm_rows
        # As in the forward, compute the next dz before this dz's GEMM, so that they overlap.
        next_dz = gradient(end) if end < tile_rows else None
        dz_VC[start:end] = dz
        if in_and_out_of_dW:
            dW_in, dW_out = in_and_out_of_dW
            dW_so_far = jnp.where(is_first_chunk[0] == 1, 0.0, dW_in[start:end])
            dW_out[start:end] = dW_so_far + dot(dz, h_Cd[...], 1, 0)
        dz = next_dz
    dh_Cd[...] += dot(dz_VC[...], head_Vd[...], 0, 0)

    @when(tile == num_programs(1) - 1)
    def _():
        dh_out[...] = dh_Cd[...].astype(dh_out.dtype)


def backward_grid(blocks, h_CD, tile_max, is_frozen):
    """Returns the grid of `backward_kernel`, over tiles of D and of V, and its block specs."""
    C, D = h_CD.shape
    V = blocks.tile_vocab
    d = blocks.tile_hidden
    columns_of_h = BlockSpec((C, d), lambda i, j, _: (0, i))
    tile_of_head = BlockSpec((V, d), lambda i, j, _: (j, i))
    # The first chunk ignores the old dW. In this chunk, the index of dW's tile stays 0 along V,
    # so that only tile 0 is fetched.
    old_dW = BlockSpec((V, d), lambda i, j, is_first: (j * (1 - is_first[0]), i))
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(cdiv(D, d), len(tile_max)),
        # In the order of the kernel's refs.
        in_specs=[
            BlockSpec((1, C), lambda i, j, _: (0, 0)),
            BlockSpec((4, C), lambda i, j, _: (0, 0)),
            columns_of_h,
            tile_of_head,
            BlockSpec((V, C), lambda i, j, _: (j, 0)),
            BlockSpec((1, *tile_max.shape[1:]), lambda i, j, _: (j, 0, 0, 0)),
            *([] if is_frozen else [old_dW]),
        ],
        out_specs=[*([] if is_frozen else [tile_of_head]), columns_of_h],
        scratch_shapes=[pltpu.VMEM((V, C), h_CD.dtype), pltpu.VMEM((C, d), f32)],
    )


def pallas_backward(
    blocks, uses_entropy, dh_dtype, head_VD, saved, h_CD, row_C, per_token, dW_VD, is_first_chunk
):
    """Like `jax_backward`, but returns dh in `dh_dtype` and updates dW_VD in place."""
    shifted_VC, tile_max, z_rest = saved
    tiled = len(shifted_VC)
    is_frozen = dW_VD is None
    # Plain JAX computes the rows that do not fill a tile.
    old_dW_rest = None if is_frozen else dW_VD[tiled:]
    dh_rest, dW_rest = jax_backward(
        head_VD[tiled:], z_rest, h_CD, row_C - tiled, per_token, old_dW_rest, is_first_chunk
    )
    # Write these rows of dW before the kernel runs: writing them afterwards would copy all of dW.
    dW = [] if is_frozen else [lax.dynamic_update_slice(dW_VD, dW_rest, (tiled, 0))]
    # dz = d_logp onehot(y) - p (d_logp + d_entropy (log p + H)), with d_logp and d_entropy already
    # divided by T. The bracket is offset + slope log2(p).
    d_logp, d_entropy, logsumexp, entropy = per_token
    offset = d_logp + d_entropy * entropy
    slope = d_entropy / LOG2E
    per_token_4C = jnp.stack([d_logp, offset, slope, logsumexp * LOG2E])
    # Input 7, dW, becomes output 0. Do not alias in the interpreter: it would return dW padded.
    aliases = {} if blocks.interpret or is_frozen else {7: 0}
    out_shape = [ShapeDtypeStruct(a.shape, a.dtype) for a in dW]
    *dW, dh_CD = pallas_call(
        partial(backward_kernel, blocks.step_rows, uses_entropy),
        name="grpo_backward",
        interpret=blocks.interpret,
        grid_spec=backward_grid(blocks, h_CD, tile_max, is_frozen),
        out_shape=[*out_shape, ShapeDtypeStruct(h_CD.shape, dh_dtype)],
        input_output_aliases=aliases,
        compiler_params=compiler_params(blocks),
    )(is_first_chunk[None], row_C[None], per_token_4C, h_CD, head_VD, shifted_VC, tile_max, *dW)
    dh_CD = (dh_CD + dh_rest).astype(dh_dtype)
    if is_frozen:
        return dh_CD, None
    (dW_VD,) = dW
    if blocks.interpret:
        # The kernel did not update dW in place, so the output lacks the rows written above.
        dW_VD = lax.dynamic_update_slice(dW_VD, dW_rest, (tiled, 0))
    return dh_CD, dW_VD


# ---------------------------------------------------------------- over a mesh
# The head is stored sharded over D, because the number of shards, fsdp * tp, may not divide V. For
# the loss, an all-to-all turns each device's d columns of the head into V / shards rows. Devices
# along HEAD_AXES then work on each chunk together: they all-gather its hidden states, combine the
# reductions of their parts of V, and reduce-scatter dh. Each device keeps dW of its rows until all
# chunks are done. Then an all-to-all turns these rows into columns.
@dataclass(frozen=True)
class Settings:
    """What to compute, and how. All fields are static in compiled programs."""

    mesh: Mesh
    terms: Callable | None  # (logp, entropy, vectors) -> (loss, stats); None: no gradients
    uses_entropy: bool  # whether terms uses the entropy; if not, Pallas leaves out its gradient
    temperature: float = 1.0
    impl: str = "jax"  # or pallas, or full
    blocks: Blocks | None = None  # None: chosen by block_sizes
    is_frozen: bool = False  # whether the head is frozen: then dW is None, unless impl is full


def rows_to_columns(dW_VD, shards):
    """Exchange this device's rows of dW for its columns, and sum the columns over dp."""
    if shards == 1:
        return lax.psum(dW_VD, "dp")
    V, D = dW_VD.shape
    d = D // shards
    piece = min(2048, V)

    # Move one piece at a time, because XLA copies each array that it sends. Without the layout
    # constraint, XLA would also copy all of the columns.
    def move(i, columns):
        # If the last piece overlaps the piece before it, some rows are moved twice.
        start = jnp.minimum(i * piece, V - piece)
        rows = lax.dynamic_slice_in_dim(dW_VD, start, piece)
        rows = rows.reshape(piece, shards, d).transpose(1, 0, 2)
        rows = with_layout_constraint(rows, Layout((0, 1, 2)))
        moved = lax.all_to_all(rows, HEAD_AXES, split_axis=0, concat_axis=0)
        moved = lax.psum(moved, "dp")
        return lax.dynamic_update_slice(columns, moved, (0, start, 0))

    columns = lax.empty((shards, V, d), f32)
    columns = lax.fori_loop(0, cdiv(V, piece), move, columns)
    return columns.reshape(shards * V, d)


def chunk_logprobs(head_VD, temperature, h_CD, row_C, reductions):
    """Returns (logp, logsumexp, entropy) over all of V, [C] each.

    row_C: each target's row in this shard of the head. reductions: from this shard's logits.
    """
    # Only one device has the target's row of the head; the others get zeros.
    w_CD = head_VD.at[row_C].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    products_CD = h_CD.astype(f32) * w_CD
    target_logit = lax.psum(jnp.sum(products_CD, -1) / temperature, HEAD_AXES)
    from_shards = lax.all_gather(reductions, HEAD_AXES)
    max_C, sum_exp, sum_shifted_exp = combine(*from_shards)
    log_sum = jnp.log(sum_exp)
    # Add one Newton step, because a TPU's log is accurate only to 1e-4.
    log_sum += sum_exp * jnp.exp(-log_sum) - 1
    logp_C = target_logit - max_C - log_sum
    entropy_C = log_sum - sum_shifted_exp / sum_exp
    return logp_C, max_C + log_sum, entropy_C


def gather(a_c):
    """All-gather a chunk's values over HEAD_AXES: [c, ...] -> [C, ...]."""
    return lax.all_gather(a_c, HEAD_AXES, tiled=True)


def token_gradients(settings, logp_c, entropy_c, vectors_c):
    """Returns (loss_c, d_logp_C / T, d_entropy_C / T)."""

    def loss_of(logp_c, entropy_c):
        loss_c, _ = settings.terms(logp_c, entropy_c, vectors_c)
        return loss_c

    # The loss is algebra on vectors of c tokens, so JAX can differentiate it.
    loss_c, vjp = jax.vjp(loss_of, logp_c, entropy_c)
    d_logp_c, d_entropy_c = vjp(jnp.ones_like(loss_c))
    d_logp_C = gather(d_logp_c) / settings.temperature
    d_entropy_C = gather(d_entropy_c) / settings.temperature
    return loss_c, d_logp_C, d_entropy_C


def compute_chunk(settings, forward, backward, head_VD, valid_rows, order, inputs, i, carry):
    """Compute chunk i: the body of the loop in `on_one_device`.

    forward, backward: functions in plain JAX or in Pallas. order: see `order_in_chunks`. inputs:
    hidden states, targets and vectors of all n tokens. carry: (dW, results), to which the chunk
    adds its dW and the results of its tokens: logp and entropy, and with terms also loss and dh.
    """
    dW_VD, results = carry
    token_c = order[i]
    c = len(token_c)
    rank = lax.axis_index(HEAD_AXES)

    # Take this device's c tokens, and gather all C tokens of the devices along HEAD_AXES.
    take = partial(jnp.take, indices=token_c, axis=0, mode="fill", fill_value=0)
    h_cD, targets_c, vectors_c = jax.tree.map(take, inputs)
    # A NaN in a masked token's hidden state must not reach dW.
    h_cD = jnp.where(vectors_c["weight"][:, None] > 0, h_cD, 0)
    h_CD = gather(h_cD)
    # Count each target's row from the first row of this device's shard of the head.
    row_C = gather(targets_c) - rank * len(head_VD)

    # Compute the logits, and from them the logprobs of the targets.
    temperature = settings.temperature
    saved, reductions = forward(head_VD, valid_rows, temperature, h_CD)
    logp_C, logsumexp_C, entropy_C = chunk_logprobs(head_VD, temperature, h_CD, row_C, reductions)
    logp_c = lax.dynamic_slice_in_dim(logp_C, rank * c, c)
    entropy_c = lax.dynamic_slice_in_dim(entropy_C, rank * c, c)
    new_results = [logp_c, entropy_c]

    if settings.terms:
        # Compute the loss, and with it dh and dW.
        loss_c, d_logp_C, d_entropy_C = token_gradients(settings, logp_c, entropy_c, vectors_c)
        per_token = (d_logp_C, d_entropy_C, logsumexp_C, entropy_C)
        is_first_chunk = (i == 0).astype(jnp.int32)
        dh_CD, dW_VD = backward(head_VD, saved, h_CD, row_C, per_token, dW_VD, is_first_chunk)
        dh_cD = lax.psum_scatter(dh_CD, HEAD_AXES, tiled=True)
        new_results += [loss_c, dh_cD.astype(h_cD.dtype)]

    results = [
        old.at[token_c].set(new, mode="drop", unique_indices=True)
        for old, new in zip(results, new_results, strict=True)
    ]
    return dW_VD, results


def order_in_chunks(has_weight, c):
    """Returns (indices of each chunk's tokens, [chunks, c]; number of chunks to compute)."""
    n = len(has_weight)
    # Tokens with a weight come first, so that the chunks after them can be skipped.
    order = jnp.argsort(~has_weight, stable=True)
    # Indices from n on fill up the last chunk: they read zeros, and their writes are dropped.
    filler = jnp.arange(n, n + -n % c)
    order = jnp.concatenate([order, filler]).reshape(-1, c)
    most_tokens = lax.pmax(has_weight.sum(), HEAD_AXES)
    # Always compute the first chunk, because it initialises dW.
    return order, jnp.maximum(1, cdiv(most_tokens, c))


def on_one_device(settings, h_nD, head_Vd, targets_n, vectors):
    """`loss_and_gradients` for this device's tokens and columns of the head, chunk by chunk."""
    n, D = h_nD.shape
    V, d = head_Vd.shape
    shards = D // d
    blocks = settings.blocks

    # Exchange the head's columns for rows, after padding V with zeros to a multiple of `shards`.
    rows_each = cdiv(V, shards)
    padding = rows_each * shards - V
    head_Vd = jnp.pad(head_Vd.astype(h_nD.dtype), ((0, padding), (0, 0)))
    head_VD = lax.all_to_all(head_Vd, HEAD_AXES, split_axis=0, concat_axis=1, tiled=True)
    valid_rows = V - lax.axis_index(HEAD_AXES) * rows_each

    # Use as few chunks as possible, all with the same number of tokens.
    most_chunks = cdiv(n * shards, blocks.chunk_tokens)
    c = cdiv(n, most_chunks)
    forward = jax_forward
    backward = jax_backward
    # Pallas computes the same number of tiles on each device. The last device has the fewest rows;
    # if they do not fill a tile, plain JAX computes all rows of all devices.
    fewest_rows = max(0, V - (shards - 1) * rows_each)
    if settings.impl == "pallas" and fewest_rows >= blocks.tile_vocab:
        tiles = fewest_rows // blocks.tile_vocab
        forward = partial(pallas_forward, blocks, tiles, settings.terms is not None)
        # Parts of dh that are summed over shards stay in float32.
        dh_dtype = h_nD.dtype if shards == 1 else f32
        backward = partial(pallas_backward, blocks, settings.uses_entropy, dh_dtype)
        # Compiled kernels need a multiple of 128 tokens, the number of lanes. Round up, or down if
        # the chunk would be too large.
        lanes = 1 if blocks.interpret else 128 // math.gcd(128, shards)
        c = cdiv(c, lanes) * lanes
        if c * shards > blocks.chunk_tokens:
            c = max(lanes, c - lanes)

    order, chunks = order_in_chunks(vectors["weight"] > 0, c)
    inputs = (h_nD, targets_n, vectors)
    step = partial(compute_chunk, settings, forward, backward, head_VD, valid_rows, order, inputs)
    if not settings.terms:
        _, results = lax.fori_loop(0, chunks, step, (None, [jnp.zeros(n)] * 2))
        return tuple(results)
    dW_VD = None if settings.is_frozen else lax.empty(head_VD.shape, f32)
    results = [jnp.zeros(n)] * 3 + [jnp.zeros_like(h_nD)]
    dW_VD, results = lax.fori_loop(0, chunks, step, (dW_VD, results))
    if not settings.is_frozen:
        dW_VD = rows_to_columns(dW_VD, shards)[:V]
    return *results, dW_VD


def with_all_logits(settings, h_ND, head_VD, targets_N, vectors):
    """`loss_and_gradients` by JAX's autodiff, from the logits of all tokens at once."""

    def loss_of(h_ND, head_VD):
        h_ND = jnp.where(vectors["weight"][:, None] > 0, h_ND, 0)
        head_VD = head_VD.astype(h_ND.dtype)
        shardings = [NamedSharding(settings.mesh, spec) for spec in (P(TOKEN_AXES), P())]
        h_ND, head_VD = lax.with_sharding_constraint([h_ND, head_VD], shardings)
        log_p = jax.nn.log_softmax(dot(h_ND, head_VD, 1, 1) / settings.temperature)
        logp_N = jnp.take_along_axis(log_p, targets_N[:, None], 1)[:, 0]
        entropy_N = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        loss_N = None
        if settings.terms:
            loss_N, _ = settings.terms(logp_N, entropy_N, vectors)
        return loss_N, (logp_N, entropy_N)

    if not settings.terms:
        _, logprobs = loss_of(h_ND, head_VD)
        return logprobs
    loss_N, vjp, logprobs = jax.vjp(loss_of, h_ND, head_VD, has_aux=True)
    dh_ND, dW_VD = vjp(jnp.ones_like(loss_N))
    return *logprobs, loss_N, dh_ND, dW_VD


def loss_and_gradients(
    settings: Settings, h_ND: Array, head_VD: Array, targets_N: Array, vectors: dict
) -> tuple:
    """Returns logp [N] and entropy [N], and if settings.terms is given, loss [N], dh [N, D] and
    dW [V, D] (None if the head is frozen, unless impl is full).

    dh has the dtype of h. The others are float32, but with impl full, dW has the head's dtype.
    """
    if settings.impl == "full":
        return with_all_logits(settings, h_ND, head_VD, targets_N, vectors)
    if settings.blocks is None:
        kind = settings.mesh.devices.flat[0].device_kind
        D = h_ND.shape[1]
        settings = replace(settings, blocks=block_sizes(kind, D, settings.impl))
    tokens = P(TOKEN_AXES)
    columns = P(None, HEAD_AXES)
    in_specs = (tokens, columns, tokens, tokens)
    out_specs = (tokens, tokens)
    if settings.terms:
        out_specs = (tokens, tokens, tokens, tokens, None if settings.is_frozen else columns)
    run = partial(on_one_device, settings)
    mesh = settings.mesh
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return run(h_ND, head_VD, targets_N, vectors)


# ---------------------------------------------------------------- a differentiable loss
# The forward pass computes both gradients of the loss, so the backward pass only scales them. If
# a caller also builds a loss from logp or entropy, their cotangents reach the backward pass, which
# then computes all chunks again.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_loss(settings, h_ND, head_VD, targets_N, vectors):
    """Returns (loss, logp [N], entropy [N]). This body runs only if JAX needs no gradients."""
    score_only = replace(settings, terms=None)
    logp_N, entropy_N = loss_and_gradients(score_only, h_ND, head_VD, targets_N, vectors)
    loss_N, _ = settings.terms(logp_N, entropy_N, vectors)
    return loss_N.sum(), logp_N, entropy_N


def fused_loss_forward(settings, *primals):
    # With symbolic_zeros, JAX passes each primal with a flag: whether it is differentiated.
    inputs = jax.tree.map(lambda primal: primal.value, primals)
    _, head, *_ = primals
    settings = replace(settings, is_frozen=not head.perturbed)
    logp_N, entropy_N, loss_N, *gradients = loss_and_gradients(settings, *inputs)
    return (loss_N.sum(), logp_N, entropy_N), (inputs, gradients)


def fused_loss_backward(settings, saved, cotangents):
    (h_ND, head_VD, targets_N, vectors), gradients = saved
    is_frozen = gradients[1] is None
    d_loss, d_logp_N, d_entropy_N = cotangents
    if isinstance(d_loss, SymbolicZero):
        gradients = jax.tree.map(jnp.zeros_like, gradients)
    else:
        gradients = jax.tree.map(lambda a: a * d_loss, gradients)
    extra = {"d_logp": d_logp_N, "d_entropy": d_entropy_N}
    extra = {name: d for name, d in extra.items() if not isinstance(d, SymbolicZero)}
    if extra:
        # This loss is linear: the cotangents are its derivatives with respect to logp and entropy.
        def linear_terms(logp, entropy, v):
            loss = v.get("d_logp", 0) * logp + v.get("d_entropy", 0) * entropy
            return loss, {}

        uses_entropy = "d_entropy" in extra
        settings = replace(
            settings, terms=linear_terms, uses_entropy=uses_entropy, is_frozen=is_frozen
        )
        outputs = loss_and_gradients(settings, h_ND, head_VD, targets_N, vectors | extra)
        gradients = jax.tree.map(jnp.add, gradients, list(outputs[3:]))
    dh_ND, dW_VD = gradients
    dW_VD = None if is_frozen else dW_VD.astype(head_VD.dtype)
    return dh_ND.astype(h_ND.dtype), dW_VD, None, None


fused_loss.defvjp(fused_loss_forward, fused_loss_backward, symbolic_zeros=True)


def grpo_loss(
    hidden_ND: Array,  # in the compute dtype
    head_VD: Array,
    targets_N: Array,  # int32, in [0, V)
    vectors: dict,  # see `grpo_terms`
    mesh: Mesh,  # its size must divide N, and fsdp * tp must divide D
    *,
    temperature: float = 1.0,
    impl: str = "jax",  # or pallas (chips in VMEM_MIB), or full (all logits, to compare)
    blocks: Blocks | None = None,  # None: chosen by block_sizes
    **options,  # see `grpo_terms`
) -> tuple[Array, dict]:
    """Returns (loss, stats), differentiable in hidden_ND and head_VD.

    loss: float32 scalar. stats: {name: float32 [N], 0 where masked}. logp and entropy have
    gradients, so that a caller can build other terms from them. The others have no gradients:
    clip_fraction, ratio and, where defined, logprob_gap and kl.
    """
    with jax.named_scope("grpo_loss"):
        terms = partial(grpo_terms, **options)
        uses_entropy = bool(options.get("entropy_bonus"))
        settings = Settings(mesh, terms, uses_entropy, temperature, impl, blocks)
        loss, logp_N, entropy_N = fused_loss(settings, hidden_ND, head_VD, targets_N, vectors)
        _, stats = terms(logp_N, entropy_N, vectors)
        stats |= {"logp": logp_N, "entropy": entropy_N}
        mask = vectors["weight"] > 0
        return loss, {name: jnp.where(mask, a_N, 0.0) for name, a_N in stats.items()}


def score(
    hidden_ND: Array, head_VD: Array, targets_N: Array, weight_N: Array, mesh: Mesh, **how
) -> tuple[Array, Array]:
    """Returns (logp [N], entropy [N]) where the weight is not 0; other entries are undefined.

    how: temperature, impl and blocks, as for `grpo_loss`.
    """
    settings = Settings(mesh, terms=None, uses_entropy=False, **how)
    hidden_ND, head_VD = lax.stop_gradient((hidden_ND, head_VD))
    return loss_and_gradients(settings, hidden_ND, head_VD, targets_N, {"weight": weight_N})
