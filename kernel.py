"""The GRPO loss, computed from hidden states without ever holding [tokens, vocabulary] logits.

For token i with hidden state h, target y, LM head W [V, D] and temperature T:

    z = h W' / T      logp = z[y] - logsumexp(z)      H = -sum_v p_v log p_v,  p = softmax(z)
    ratio  = exp(logp - old)                     old: the trainer's logprob of y at sampling time
    policy = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
                                                 PPO (arXiv 1707.06347, eq. 7); DAPO (2503.14476)
    kl     = exp(ref - logp) - (ref - logp) - 1  KL to a frozen reference (GRPO, 2402.03300, eq. 4)
    cap    = min(exp(old - sampler), is_cap)     truncated importance weight, without gradient
    loss   = sum_i weight_i (beta kl - cap policy - entropy_bonus H)
    dz     = (g (onehot(y) - p) - e p (log p + H)) / T,  where g = dloss/dlogp, e = dloss/dH
    dh, dW = dz W, dz' h
"""

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

# Array names end in their shapes: N tokens on all devices, n tokens on one; C tokens of a chunk, c
# of these on one device; D model width, d columns of D on one device or in one tile; V vocabulary,
# or the part of it in one shard or tile.
HEAD = ("fsdp", "tp")  # mesh axes that shard the LM head; devices along them share each chunk
TOKENS = ("dp", *HEAD)  # mesh axes that shard tokens; a chunk is gathered over HEAD
GRID = ("parallel", "arbitrary")  # chips with two cores split a grid's first dimension
VMEM = {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128}  # MiB, by device_kind
LOG2E = 1.4426950408889634  # log2(e)
NO_LOGIT = -1e30  # logit of a row beyond the vocabulary
FAR = 60.0  # upper bound on differences of logprobs, so that exp does not overflow
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

    vectors: `weight` (aggregation and normalisation; 0 masks a token, whatever the other vectors
    hold there), `advantage`, and optionally `old_logprobs` (without it the ratio is 1),
    `sampler_logprobs` (without it the cap is 1) and `ref_logprobs` (without it there is no KL).
    """
    # Mask before any algebra: 0 times infinity or NaN is NaN, in the gradient too.
    mask = vectors["weight"] > 0
    vectors = {name: jnp.where(mask, a, 0.0) for name, a in vectors.items()}
    logp = jnp.where(mask, logp_N, 0.0)
    old = vectors.get("old_logprobs", lax.stop_gradient(logp))
    advantage = vectors["advantage"]
    ratio = jnp.exp(jnp.minimum(logp - old, FAR))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    outside = clipped * advantage < ratio * advantage
    # This is min(), but jnp.minimum would halve the gradient at a tie.
    policy = jnp.where(outside, clipped, ratio) * advantage
    stats = {"clip_fraction": 1.0 * (mask & outside), "ratio": mask * ratio}
    if "sampler_logprobs" in vectors:
        gap = jnp.minimum(old - vectors["sampler_logprobs"], FAR)
        stats["logprob_gap"] = jnp.abs(gap)
        if is_cap:
            policy *= lax.stop_gradient(jnp.minimum(jnp.exp(gap), is_cap))
    loss = -policy
    if "ref_logprobs" in vectors:
        log_ref = jnp.minimum(vectors["ref_logprobs"] - logp, FAR)
        stats["kl"] = jnp.exp(log_ref) - log_ref - 1
        loss += beta * stats["kl"]
    if entropy_bonus:
        loss -= entropy_bonus * jnp.where(mask, entropy_N, 0.0)
    return vectors["weight"] * loss, lax.stop_gradient(stats)


# ---------------------------------------------------------------- a chunk in plain JAX
# A chunk's gradients are computed while its logits are in memory: this takes three GEMMs (z, dh,
# dW) instead of four. Only the first `rows` of the head's V rows are in the vocabulary.
def dot(a, b, a_axis, b_axis):
    # Products of float32 inputs must not be rounded.
    precision = "highest" if a.dtype == f32 else "default"
    axes = (([a_axis], [b_axis]), ([], []))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=f32)


def jax_forward(head_VD, rows, temperature, h_CD):
    """Returns z [C, V] and its reductions over V, [C], all in float32.

    These are the maximum m of z, the sum of exp(z - m), and the sum of (z - m) exp(z - m).
    """
    z_CV = dot(h_CD, head_VD, 1, 1) / temperature
    z_CV = jnp.where(jnp.arange(len(head_VD)) < rows, z_CV, NO_LOGIT)
    top_C = z_CV.max(-1, initial=NO_LOGIT)
    off_CV = z_CV - top_C[:, None]
    p_CV = jnp.exp(off_CV)
    return z_CV, top_C, p_CV.sum(-1), (off_CV * p_CV).sum(-1)


def jax_backward(head_VD, z_CV, h_CD, y_C, vectors, dW_VD, is_first):
    """Returns dh [C, D] and the new dW [V, D], in float32.

    A chunk adds its gradient to dW_VD, except for the first chunk, which replaces dW_VD.
    """
    g, e, lse, entropy = (a[:, None] for a in vectors)
    log_p = z_CV - lse
    hit = y_C[:, None] == jnp.arange(len(head_VD))
    dz = jnp.where(hit, g, 0.0) - jnp.exp(log_p) * (g + e * (log_p + entropy))
    dz_CV = dz.astype(h_CD.dtype)
    return dot(dz_CV, head_VD, 1, 0), jnp.where(is_first, 0.0, dW_VD) + dot(dz_CV, h_CD, 0, 0)


def combine(top, total, product):
    """Combine the maximum and sums of each part of V, [parts, C], into those of all of V, [C]."""
    top_C = top.max(0)
    scale = jnp.exp(top - top_C)
    product_C = (scale * (product + (top - top_C) * total)).sum(0)
    return top_C, (scale * total).sum(0), product_C


# ---------------------------------------------------------------- a chunk in Pallas
# The two kernels work on tiles of z' [vocabulary, tokens]: sums over the vocabulary run along
# sublanes, and per-token values lie along lanes. The forward saves z - m, where m is the maximum of
# `step` rows: bfloat16 is most exact near the maximum, where precision matters. The backward
# computes dz in VMEM and uses it for both GEMMs. Exponentials have base 2, as in hardware.
@dataclass(frozen=True)
class Blocks:
    tokens: int  # tokens of a chunk, on all devices along HEAD; plain JAX uses only this field
    rows: int = 0  # tokens of a tile in the forward
    vocab: int = 0  # rows of the head in a tile
    hidden: int = 0  # columns of D in a tile of the backward
    vmem: int = 0  # bytes of VMEM that a kernel may use
    interpret: object = False  # True or pltpu.InterpretParams: interpret the kernels
    step: int = 256  # rows of z that share a maximum


def block_sizes(device_kind: str, D: int, impl: str = "pallas", tokens: int = 0) -> Blocks:
    """Choose the Blocks for a chip and a bfloat16 model.

    A tile has all of D if that fits 7/8 of VMEM, because the backward reads z once for each tile of
    D. It then has as much of V as fits. tokens: tokens of a chunk, or 0 to choose this, too. Raises
    ValueError if pallas does not support the chip or D.
    """
    if impl != "pallas":
        return Blocks(tokens or 1024)
    vmem = next((mib << 20 for kind, mib in VMEM.items() if device_kind.startswith(kind)), 0)
    rows = 2048 if vmem > 16 << 20 else 256
    C = tokens or max(rows, 1024)
    for halvings in range(5):
        hidden = cdiv(D, 128 << halvings) * 128
        for vocab in (1024, 512, 256):
            # VMEM holds h and dh, in two buffers each if D has several tiles, and the float32 sum
            # of dh; two buffers each of W, dW in, dW out and z; dz; and a step's temporaries.
            need = C * hidden * (10 if hidden >= D else 16)
            need += vocab * (20 * hidden + 6 * C) + 256 * C * 8
            if need < vmem * 7 // 8:
                return Blocks(C, rows, vocab, hidden, vmem * 15 // 16)
    chips = ", ".join(VMEM)
    raise ValueError(f"pallas is for {chips} and D up to 8192, not for {device_kind} and D = {D}")


def forward_kernel(scale, step, h_CD, w_VD, *outputs):
    """Write [z - m,] m, sum of p and sum of p log2 p of a tile, where p = 2 ** (z - m)."""
    *z_out, top_out, total_out, product_out = outputs
    size = w_VD.shape[0]
    z = dot(w_VD[:step], h_CD[...], 1, 1)
    for i in range(size // step):
        end = (i + 1) * step
        # Issue the next step's GEMM before this step's exp, so that the compiler can run the matrix
        # unit and the vector unit at the same time.
        next_z = dot(w_VD[end : end + step], h_CD[...], 1, 1) if end < size else None
        z *= scale * LOG2E
        top = z.max(0, keepdims=True)
        off = z - top
        p = jnp.exp2(off)
        total = p.sum(0, keepdims=True)
        top_out[0, i] = top
        total_out[0, i] = total
        product_out[0, i] = (off * p).sum(0, keepdims=True)
        for ref in z_out:
            ref[i * step : end] = off.astype(ref.dtype)
        z = next_z


def pallas_forward(blocks, tiles, save, head_VD, rows, temperature, h_CD):
    """As `jax_forward`, but returns (z - m if save, m, z of the rest) in place of z.

    The kernel computes `tiles` tiles of the head's rows, and `jax_forward` computes the rest.
    """
    (C, D), V = h_CD.shape, blocks.vocab
    tokens, steps, done = min(blocks.rows, C), V // blocks.step, tiles * V
    vector = ShapeDtypeStruct((tiles, steps, 1, C), f32)
    vector_spec = BlockSpec((1, steps, 1, tokens), lambda i, j: (j, 0, 0, i))
    z_spec = BlockSpec((V, tokens), lambda i, j: (j, i))
    params = pltpu.CompilerParams(dimension_semantics=GRID, vmem_limit_bytes=blocks.vmem)
    *z_VC, top, total, product = pallas_call(
        partial(forward_kernel, 1 / temperature, blocks.step),
        name="grpo_forward",
        interpret=blocks.interpret,
        grid=(cdiv(C, tokens), tiles),
        in_specs=[
            BlockSpec((tokens, D), lambda i, j: (i, 0)),
            BlockSpec((V, D), lambda i, j: (j, 0)),
        ],
        out_specs=[z_spec] * save + [vector_spec] * 3,
        out_shape=[ShapeDtypeStruct((done, C), h_CD.dtype)] * save + [vector] * 3,
        compiler_params=params,
    )(h_CD, head_VD)
    z_rest, *rest = jax_forward(head_VD[done:], rows - done, temperature, h_CD)
    sums = [top / LOG2E, total, product / LOG2E]
    sums = jax.tree.map(lambda a, b: jnp.concatenate([a.reshape(-1, C), b[None]]), sums, rest)
    return (*z_VC, top, z_rest), *combine(*sums)


def backward_kernel(
    step, entropic, is_first, y_1C, vectors, h_CD, w_VD, z_VC, top, dW_in, dh, dW, dz_VC, dh_CD
):
    """For a tile: dz = g onehot(y) - p (k + e log2 p), k = g + e H; dW += dz h; dh += dz' w."""
    tile, size = program_id(1), w_VD.shape[0]

    @when(tile == 0)
    def _():
        dh_CD[...] = jnp.zeros_like(dh_CD)

    g, e, k, lse = (vectors[i : i + 1] for i in range(4))
    wide = 1 if size // step % 2 else 2  # steps per GEMM: with more rows, h is read less often

    def gradient(first):
        parts = []
        for i in range(first, first + wide):
            log2_p = z_VC[i * step : (i + 1) * step].astype(f32) + (top[0, i] - lse)
            row = lax.broadcasted_iota(jnp.int32, log2_p.shape, 0)
            hit = row == y_1C[...] - (tile * size + i * step)
            factor = k + e * log2_p if entropic else k
            dz = jnp.where(hit, g, 0.0) - jnp.exp2(log2_p) * factor
            parts.append(dz.astype(dz_VC.dtype))
        return jnp.concatenate(parts)

    dz = gradient(0)
    for i in range(0, size // step, wide):
        rows = slice(i * step, (i + wide) * step)
        # As in the forward, the next dz comes before the GEMM of this one.
        next_dz = gradient(i + wide) if rows.stop < size else None
        dz_VC[rows] = dz
        dW[rows] = jnp.where(is_first[0] == 1, 0.0, dW_in[rows]) + dot(dz, h_CD[...], 1, 0)
        dz = next_dz
    dh_CD[...] += dot(dz_VC[...], w_VD[...], 0, 0)

    @when(tile == num_programs(1) - 1)
    def _():
        dh[...] = dh_CD[...].astype(dh.dtype)


def pallas_backward(blocks, entropic, dtype, head_VD, saved, h_CD, y_C, vectors, dW_VD, is_first):
    """As `jax_backward`, but returns dh in `dtype` and updates dW_VD in place."""
    (C, D), V, d = h_CD.shape, blocks.vocab, blocks.hidden
    (z_VC, top, z_rest), (g, e, lse, entropy) = saved, vectors
    done = len(z_VC)
    rest = z_rest, h_CD, y_C - done, vectors, dW_VD[done:], is_first
    dh_rest, dW_rest = jax_backward(head_VD[done:], *rest)
    # Write dW's other rows before the kernel runs: after it, XLA would copy dW to do so.
    dW_VD = lax.dynamic_update_slice(dW_VD, dW_rest, (done, 0))
    # log p = z - lse, and -p (g + e (log p + H)) = -p (k + e log p) with k = g + e H, in base 2.
    vectors_4C = jnp.stack([g, e / LOG2E, g + e * entropy, lse * LOG2E])
    column = BlockSpec((C, d), lambda i, j, _: (0, i))
    tile = BlockSpec((V, d), lambda i, j, _: (j, i))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(cdiv(D, d), len(top)),
        in_specs=[
            *(BlockSpec((k, C), lambda i, j, _: (0, 0)) for k in (1, 4)),
            column,
            tile,
            BlockSpec((V, C), lambda i, j, _: (j, 0)),
            BlockSpec((1, *top.shape[1:]), lambda i, j, _: (j, 0, 0, 0)),
            # In the first chunk, dW is not written yet and not added to: only fetch its tile 0.
            BlockSpec((V, d), lambda i, j, is_first: (j * (1 - is_first[0]), i)),
        ],
        out_specs=[column, tile],
        scratch_shapes=[pltpu.VMEM((V, C), h_CD.dtype), pltpu.VMEM((C, d), f32)],
    )
    params = pltpu.CompilerParams(dimension_semantics=GRID, vmem_limit_bytes=blocks.vmem)
    dh_CD, dW_VD = pallas_call(
        partial(backward_kernel, blocks.step, entropic),
        name="grpo_backward",
        interpret=blocks.interpret,
        grid_spec=grid_spec,
        out_shape=[ShapeDtypeStruct((C, D), dtype), ShapeDtypeStruct(dW_VD.shape, f32)],
        input_output_aliases={} if blocks.interpret else {7: 1},  # the interpreter would pad dW
        compiler_params=params,
    )(is_first[None], y_C[None], vectors_4C, h_CD, head_VD, z_VC, top, dW_VD)
    if blocks.interpret:  # the kernel did not update dW in place
        dW_VD = lax.dynamic_update_slice(dW_VD, dW_rest, (done, 0))
    return (dh_CD + dh_rest).astype(dtype), dW_VD


# ---------------------------------------------------------------- over a mesh
# The head is stored sharded over D, because V may not be divisible. For the loss, an all-to-all
# turns each device's d columns of the head into V / shards rows, where shards = fsdp * tp. These
# devices then work on all of their tokens together: for each chunk they all-gather hidden states,
# combine the sums of the softmax, and reduce-scatter dh. dW stays where it is until the end, when
# an all-to-all turns its rows into columns.
@dataclass(frozen=True)
class Settings:
    mesh: Mesh
    terms: Callable | None  # (logp, entropy, vectors) -> (loss, stats); None: no gradients
    entropic: bool  # whether terms uses the entropy; if not, Pallas leaves out its gradient
    temperature: float = 1.0
    impl: str = "jax"  # or pallas, or full
    blocks: Blocks | None = None  # None: chosen by block_sizes


def rows_to_columns(dW_VD, shards):
    """Exchange this device's rows of dW for its columns, and sum these over dp."""
    if shards == 1:
        return lax.psum(dW_VD, "dp")
    V, D = dW_VD.shape
    piece = min(2048, V)

    # Move one piece at a time, because XLA copies what it sends. Without the layout constraint, XLA
    # would also copy all of the columns.
    def move(i, columns):
        start = jnp.minimum(i * piece, V - piece)
        rows = lax.dynamic_slice_in_dim(dW_VD, start, piece).reshape(piece, shards, D // shards)
        rows = with_layout_constraint(rows.transpose(1, 0, 2), Layout((0, 1, 2)))
        rows = lax.all_to_all(rows, HEAD, split_axis=0, concat_axis=0)
        return lax.dynamic_update_slice(columns, lax.psum(rows, "dp"), (0, start, 0))

    columns = lax.empty((shards, V, D // shards), f32)
    columns = lax.fori_loop(0, cdiv(V, piece), move, columns)
    return columns.reshape(shards * V, D // shards)


def chunk_logp(forward, head_VD, temperature, h_CD, y_C):
    """Returns (saved, logp, logsumexp, entropy): what the backward needs, and [C] over all shards.

    y_C: targets, counted from the first row of this device's shard of the head.
    """
    saved, *sums = forward(h_CD)
    # Only one device has the target's row of the head; the others get zeros.
    w_CD = head_VD.at[y_C].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    target = lax.psum(jnp.sum(h_CD.astype(f32) * w_CD, -1) / temperature, HEAD)
    top, total, product = combine(*lax.all_gather(sums, HEAD))
    log_total = jnp.log(total)
    # One Newton step, because a TPU's log is only good to 1e-4.
    log_total += total * jnp.exp(-log_total) - 1
    return saved, target - top - log_total, top + log_total, log_total - product / total


def chunk_loss(settings, forward, backward, head_VD, dW_VD, is_first, h_cD, y_c, vectors_c):
    """Compute a chunk. Returns (dW_VD plus the chunk's dW, results of this device's c tokens).

    The results are (logp, entropy), and with terms (logp, entropy, loss, dh).
    """
    rank, c = lax.axis_index(HEAD), len(h_cD)
    gather = partial(lax.all_gather, axis_name=HEAD, tiled=True)
    # A NaN of a masked token must not reach dW.
    h_cD = jnp.where(vectors_c["weight"][:, None] > 0, h_cD, 0)
    h_CD = gather(h_cD)
    y_C = gather(y_c) - rank * len(head_VD)
    saved, logp_C, lse_C, entropy_C = chunk_logp(forward, head_VD, settings.temperature, h_CD, y_C)
    logp_c = lax.dynamic_slice_in_dim(logp_C, rank * c, c)
    entropy_c = lax.dynamic_slice_in_dim(entropy_C, rank * c, c)
    if not settings.terms:
        return dW_VD, (logp_c, entropy_c)
    # The loss is algebra on vectors of c tokens, so JAX can derive g and e.
    loss_c, vjp = jax.vjp(lambda *a: settings.terms(*a, vectors_c)[0], logp_c, entropy_c)
    g_C, e_C = (gather(a) / settings.temperature for a in vjp(jnp.ones_like(loss_c)))
    dh_CD, dW_VD = backward(saved, h_CD, y_C, (g_C, e_C, lse_C, entropy_C), dW_VD, is_first)
    dh_cD = lax.psum_scatter(dh_CD, HEAD, tiled=True)
    return dW_VD, (logp_c, entropy_c, loss_c, dh_cD.astype(h_cD.dtype))


def one_device(settings, h_nD, head_Vd, targets_n, vectors):
    """`loss_and_gradients` for this device's tokens and columns of the head, chunk by chunk."""
    (n, D), (V, d) = h_nD.shape, head_Vd.shape
    terms, temperature, blocks = settings.terms, settings.temperature, settings.blocks
    # Exchange the head's columns for rows, equally many on each device; rows past V are zeros.
    shards = D // d
    share = cdiv(V, shards)
    head_Vd = jnp.pad(head_Vd.astype(h_nD.dtype), ((0, share * shards - V), (0, 0)))
    head_VD = lax.all_to_all(head_Vd, HEAD, split_axis=0, concat_axis=1, tiled=True)
    rows = V - lax.axis_index(HEAD) * share
    forward = partial(jax_forward, head_VD, rows, temperature)
    backward = partial(jax_backward, head_VD)
    # Pallas computes as many tiles as every device has; the last device has the fewest rows.
    tiles = max(0, V - (shards - 1) * share) // blocks.vocab if settings.impl == "pallas" else 0
    if tiles:
        forward = partial(pallas_forward, blocks, tiles, bool(terms), head_VD, rows, temperature)
        # If dh is summed over shards, the parts stay in float32.
        dtype = h_nD.dtype if shards == 1 else f32
        backward = partial(pallas_backward, blocks, settings.entropic, dtype, head_VD)
    # All chunks have equally many tokens; for compiled kernels, a multiple of the 128 lanes.
    c = cdiv(n, cdiv(n * shards, blocks.tokens))
    while tiles and not blocks.interpret and c * shards % 128:
        c += 1
    # Tokens with a weight come first, so that chunks without any can be skipped. Indices from n on
    # fill up the last chunk: they read zeros, and their writes are dropped.
    has_weight = vectors["weight"] > 0
    order = jnp.concatenate([jnp.argsort(~has_weight, stable=True), jnp.arange(n, n + -n % c)])
    # Always compute the first chunk, because it initialises dW.
    chunks = jnp.maximum(1, cdiv(lax.pmax(has_weight.sum(), HEAD), c))

    def body(i, carry):
        dW_VD, outputs = carry
        index = lax.dynamic_slice_in_dim(order, i * c, c)
        inputs = h_nD, targets_n, vectors
        inputs = jax.tree.map(lambda a: a.at[index].get(mode="fill", fill_value=0), inputs)
        is_first = (i == 0).astype(jnp.int32)
        dW_VD, new = chunk_loss(settings, forward, backward, head_VD, dW_VD, is_first, *inputs)
        pairs = zip(outputs, new, strict=True)
        return dW_VD, [a.at[index].set(b, mode="drop", unique_indices=True) for a, b in pairs]

    start = None, [jnp.zeros(n)] * 2
    if terms:
        start = lax.empty(head_VD.shape, f32), [jnp.zeros(n)] * 3 + [jnp.zeros_like(h_nD)]
    dW_VD, outputs = lax.fori_loop(0, chunks, body, start)
    if not terms:
        return tuple(outputs)
    return *outputs, rows_to_columns(dW_VD, shards)[:V]


def with_all_logits(settings, targets_N, vectors, h_ND, head_VD):
    """Compute from full logits, for JAX to differentiate. Returns (loss [N], (logp, entropy)).

    Without terms, the loss is None.
    """
    h_ND = jnp.where(vectors["weight"][:, None] > 0, h_ND, 0)
    shardings = [NamedSharding(settings.mesh, spec) for spec in (P(TOKENS), P())]
    inputs = lax.with_sharding_constraint([h_ND, head_VD.astype(h_ND.dtype)], shardings)
    log_p = jax.nn.log_softmax(dot(*inputs, 1, 1) / settings.temperature)
    logp_N = jnp.take_along_axis(log_p, targets_N[:, None], 1)[:, 0]
    entropy_N = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    loss_N = settings.terms(logp_N, entropy_N, vectors)[0] if settings.terms else None
    return loss_N, (logp_N, entropy_N)


def loss_and_gradients(
    settings: Settings, h_ND: Array, head_VD: Array, targets_N: Array, vectors: dict
) -> tuple:
    """Returns logp [N] and entropy [N]; with terms also loss [N], dh [N, D] and dW [V, D].

    dh has h's dtype, everything else is float32.
    """
    mesh, terms, impl = settings.mesh, settings.terms, settings.impl
    if impl == "full":
        run = partial(with_all_logits, settings, targets_N, vectors)
        if not terms:
            return run(h_ND, head_VD)[1]
        loss_N, vjp, outputs = jax.vjp(run, h_ND, head_VD, has_aux=True)
        return *outputs, loss_N, *vjp(jnp.ones_like(loss_N))
    blocks = settings.blocks or block_sizes(mesh.devices.flat[0].device_kind, h_ND.shape[1], impl)
    run = partial(one_device, replace(settings, blocks=blocks))
    tokens, columns = P(TOKENS), P(None, HEAD)
    in_specs = tokens, columns, tokens, tokens
    out_specs = (tokens,) * 4 + (columns,) if terms else (tokens, tokens)
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return run(h_ND, head_VD, targets_N, vectors)


# ---------------------------------------------------------------- a differentiable loss
# The forward pass computes both gradients of the loss, and the backward pass only scales them.
# Chunks are recomputed only if the caller builds terms of its own from logp or entropy, which then
# have cotangents.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_loss(settings, *inputs):
    logp_N, entropy_N = loss_and_gradients(replace(settings, terms=None), *inputs)
    return settings.terms(logp_N, entropy_N, inputs[-1])[0].sum(), logp_N, entropy_N


def fused_loss_forward(settings, *primals):
    inputs = jax.tree.map(lambda primal: primal.value, primals)
    logp_N, entropy_N, loss_N, *gradients = loss_and_gradients(settings, *inputs)
    return (loss_N.sum(), logp_N, entropy_N), (inputs, gradients)


def fused_loss_backward(settings, saved, cotangents):
    (h_ND, head_VD, targets_N, vectors), gradients = saved
    d_loss, *outer = cotangents
    dh_ND, dW_VD = (0.0 if isinstance(d_loss, SymbolicZero) else a * d_loss for a in gradients)
    outer = {k: a for k, a in zip("ge", outer, strict=True) if not isinstance(a, SymbolicZero)}
    if outer:
        # Add the gradients of a loss whose derivatives g and e are these cotangents.
        settings = replace(
            settings,
            terms=lambda logp, entropy, v: (v.get("g", 0) * logp + v.get("e", 0) * entropy, {}),
            entropic="e" in outer,
        )
        more = loss_and_gradients(settings, h_ND, head_VD, targets_N, vectors | outer)
        dh_ND, dW_VD = dh_ND + more[3], dW_VD + more[4]
    return dh_ND.astype(h_ND.dtype), dW_VD.astype(head_VD.dtype), None, None


fused_loss.defvjp(fused_loss_forward, fused_loss_backward, symbolic_zeros=True)


def grpo_loss(
    hidden_ND: Array,  # in the compute dtype
    head_VD: Array,
    targets_N: Array,  # int32, in [0, V)
    vectors: dict,  # see `grpo_terms`
    mesh: Mesh,  # its size must divide N, and fsdp * tp must divide D
    *,
    temperature: float = 1.0,
    impl: str = "jax",  # or pallas (only TPUs, else ValueError), or full (all logits, to compare)
    blocks: Blocks | None = None,  # None: chosen by block_sizes
    **options,  # see `grpo_terms`
) -> tuple[Array, dict]:
    """Returns (loss, tokens), differentiable in hidden_ND and head_VD.

    loss: float32 scalar. tokens: {name: float32 [N]}, 0 where masked: logp and entropy, which have
    gradients, so that a caller can build other terms from them; and, without gradients,
    clip_fraction, ratio and, where defined, logprob_gap and kl.
    """
    with jax.named_scope("grpo_loss"):
        terms = partial(grpo_terms, **options)
        entropic = bool(options.get("entropy_bonus"))
        settings = Settings(mesh, terms, entropic, temperature, impl, blocks)
        loss, logp_N, entropy_N = fused_loss(settings, hidden_ND, head_VD, targets_N, vectors)
        _, stats = terms(logp_N, entropy_N, vectors)
        tokens = stats | {"logp": logp_N, "entropy": entropy_N}
        return loss, {k: jnp.where(vectors["weight"] > 0, a, 0.0) for k, a in tokens.items()}


def score(
    hidden_ND: Array, head_VD: Array, targets_N: Array, weight_N: Array, mesh: Mesh, **how
) -> tuple[Array, Array]:
    """Returns (logp [N], entropy [N]) of the targets that have a weight, by one GEMM.

    how: temperature, impl and blocks, as for `grpo_loss`.
    """
    settings = Settings(mesh, None, False, **how)
    hidden_ND, head_VD = lax.stop_gradient((hidden_ND, head_VD))
    return loss_and_gradients(settings, hidden_ND, head_VD, targets_N, {"weight": weight_N})
