"""The GRPO loss, from hidden states to a number, without ever holding [tokens, vocabulary] logits.

For token i with hidden state h, target y, LM head W [V, D] and temperature T:

    z = h W' / T      logp = z[y] - logsumexp(z)      H = -sum_v p_v log p_v,  p = softmax(z)
    ratio  = exp(logp - old)                     old: the trainer's log-prob when it was sampled
    policy = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
                                                 PPO (arXiv 1707.06347, eq. 7); DAPO (2503.14476)
    kl     = exp(ref - logp) - (ref - logp) - 1  to a frozen reference (GRPO, 2402.03300, eq. 4)
    cap    = min(exp(old - sampler), is_cap)     truncated importance weight, a constant
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

# Suffixes of shapes: N tokens of all devices, n of one; C of a chunk, c of a chunk on one device;
# D model, d columns of a device or tile; V vocabulary, or its rows in a shard or tile.
HEAD = ("fsdp", "tp")  # the mesh axes that shard the LM head: their devices share each chunk
TOKENS = ("dp", *HEAD)  # and those that shard tokens, outside a chunk
GRID = ("parallel", "arbitrary")  # chips with two cores share out a grid's first dimension
VMEM = {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128}  # MiB, by device_kind
LOG2E = 1.4426950408889634  # log2(e)
NO_LOGIT = -1e30  # the logit of a row that is not in the vocabulary
FAR = 60.0  # differences of log-probs are at most this, so that exp does not overflow
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
    """The terms of the loss above -> (loss_N, stats), float32 [N], all 0 where weight is 0.
    vectors: `weight` (aggregation and normalisation; 0: masked, whatever the others hold there),
    `advantage`, and if present `old` (else ratio 1), `sampler` (else cap 1), `ref` (else no KL)."""
    # Masked before any algebra: 0 times infinity or NaN is NaN, in the gradient too.
    mask = vectors["weight"] > 0
    vectors = {name: jnp.where(mask, a, 0.0) for name, a in vectors.items()}
    logp = jnp.where(mask, logp_N, 0.0)
    old = vectors.get("old", lax.stop_gradient(logp))
    advantage = vectors["advantage"]
    ratio = jnp.exp(jnp.minimum(logp - old, FAR))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    outside = clipped * advantage < ratio * advantage
    # This is min(), but jnp.minimum would halve the gradient of a tie.
    policy = jnp.where(outside, clipped, ratio) * advantage
    stats = {"clip_fraction": 1.0 * (mask & outside), "ratio": mask * ratio}
    if "sampler" in vectors:
        gap = jnp.minimum(old - vectors["sampler"], FAR)
        stats["logprob_gap"] = jnp.abs(gap)
        if is_cap:
            policy *= lax.stop_gradient(jnp.minimum(jnp.exp(gap), is_cap))
    loss = -policy
    if "ref" in vectors:
        log_ref = jnp.minimum(vectors["ref"] - logp, FAR)
        stats["kl"] = jnp.exp(log_ref) - log_ref - 1
        loss += beta * stats["kl"]
    if entropy_bonus:
        loss -= entropy_bonus * jnp.where(mask, entropy_N, 0.0)
    return vectors["weight"] * loss, lax.stop_gradient(stats)


# ---------------------------------------------------------------- a chunk in plain JAX
# The gradients of a chunk are formed while its logits are at hand: three GEMMs (z, dh, dW), not
# four. Of the head's V rows, only the first `rows` are in the vocabulary.
def dot(a, b, a_axis, b_axis):
    precision = "highest" if a.dtype == f32 else "default"  # float32 products are not rounded
    axes = (([a_axis], [b_axis]), ([], []))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=f32)


def jax_forward(head_VD, rows, temperature, h_CD):
    """-> z [C, V], its maximum m, sum of exp(z - m), sum of (z - m) exp(z - m): float32 [C]."""
    z_CV = dot(h_CD, head_VD, 1, 1) / temperature
    z_CV = jnp.where(jnp.arange(len(head_VD)) < rows, z_CV, NO_LOGIT)
    top_C = z_CV.max(-1, initial=NO_LOGIT)
    off_CV = z_CV - top_C[:, None]
    p_CV = jnp.exp(off_CV)
    return z_CV, top_C, p_CV.sum(-1), (off_CV * p_CV).sum(-1)


def jax_backward(head_VD, z_CV, h_CD, y_C, vectors, dW_VD, is_first):
    """-> dh [C, D], dW [V, D], float32; the first chunk does not add to dW_VD, it replaces it."""
    g, e, lse, entropy = (a[:, None] for a in vectors)
    log_p = z_CV - lse
    hit = y_C[:, None] == jnp.arange(len(head_VD))
    dz = jnp.where(hit, g, 0.0) - jnp.exp(log_p) * (g + e * (log_p + entropy))
    dz_CV = dz.astype(h_CD.dtype)
    return dot(dz_CV, head_VD, 1, 0), jnp.where(is_first, 0.0, dW_VD) + dot(dz_CV, h_CD, 0, 0)


def combine(top, total, product):
    """Sums of exp relative to each part's own maximum, [parts, C] -> to that of all, [C]."""
    top_C = top.max(0)
    scale = jnp.exp(top - top_C)
    product_C = (scale * (product + (top - top_C) * total)).sum(0)
    return top_C, (scale * total).sum(0), product_C


# ---------------------------------------------------------------- a chunk in Pallas
# Two kernels work on tiles of z' [vocabulary, tokens], so that sums over the vocabulary go down
# sublanes, and what belongs to a token lies along lanes. The forward keeps z - m, where m is the
# largest of `step` rows: bfloat16 is exact near the top, where it matters. The backward makes dz
# in VMEM, for both its GEMMs. Exponents are of 2, as in hardware.
@dataclass(frozen=True)
class Blocks:
    tokens: int  # of a chunk, over the devices of a head; plain JAX uses this one only
    rows: int = 0  # tokens of a tile in the forward
    vocab: int = 0  # rows of the head of a tile
    hidden: int = 0  # columns of the model of a tile in the backward
    vmem: int = 0  # bytes that a kernel may take
    interpret: object = False  # True or pltpu.InterpretParams: interpreted, not compiled
    step: int = 256  # rows of z that share a maximum


def block_sizes(device_kind: str, D: int, impl: str = "pallas", tokens: int = 0) -> Blocks:
    """Blocks for a chip and a bfloat16 model: all of D if 7/8 of VMEM hold it, as z is read once
    for each tile of D; then much of V. `tokens`, if given, is a chunk's. ValueError: no TPU."""
    if impl != "pallas":
        return Blocks(tokens or 1024)
    vmem = next((mib << 20 for kind, mib in VMEM.items() if device_kind.startswith(kind)), 0)
    rows = 2048 if vmem > 16 << 20 else 256
    C = tokens or max(rows, 1024)
    for halvings in range(5):
        hidden = cdiv(D, 128 << halvings) * 128
        for vocab in (1024, 512, 256):
            # h and dh, in two buffers where they change, and the float32 sum of dh; two buffers
            # each of W, dW in, dW out and z, and dz; the temporaries of a step.
            need = C * hidden * (10 if hidden >= D else 16)
            need += vocab * (20 * hidden + 6 * C) + 256 * C * 8
            if need < vmem * 7 // 8:
                return Blocks(C, rows, vocab, hidden, vmem * 15 // 16)
    chips = ", ".join(VMEM)
    raise ValueError(f"pallas is for {chips} and D up to 8192, not for {device_kind} and D = {D}")


def forward_kernel(scale, step, h_CD, w_VD, *outputs):
    """Of a tile: [z - m,] m, sum of p, sum of p log2 p, where p = 2 ** (z - m)."""
    *z_out, top_out, total_out, product_out = outputs
    size = w_VD.shape[0]
    z = dot(w_VD[:step], h_CD[...], 1, 1)
    for i in range(size // step):
        end = (i + 1) * step
        # The next step's GEMM stands before this step's exp, so that the compiler can run the
        # matrix unit and the vector unit at the same time.
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
    """-> (z - m if save, m, z of the rest), and the sums of `jax_forward`, which takes the rest."""
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
    """Of a tile: dz = g onehot(y) - p (k + e log2 p), k = g + e H, dW += dz h; dh sums dz' w."""
    tile, size = program_id(1), w_VD.shape[0]

    @when(tile == 0)
    def _():
        dh_CD[...] = jnp.zeros_like(dh_CD)

    g, e, k, lse = (vectors[i : i + 1] for i in range(4))
    wide = 1 if size // step % 2 else 2  # steps a GEMM: with more rows, h is read less often

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
        next_dz = gradient(i + wide) if rows.stop < size else None  # before this dz's GEMM
        dz_VC[rows] = dz
        dW[rows] = jnp.where(is_first[0] == 1, 0.0, dW_in[rows]) + dot(dz, h_CD[...], 1, 0)
        dz = next_dz
    dh_CD[...] += dot(dz_VC[...], w_VD[...], 0, 0)

    @when(tile == num_programs(1) - 1)
    def _():
        dh[...] = dh_CD[...].astype(dh.dtype)


def pallas_backward(blocks, entropic, dtype, head_VD, saved, h_CD, y_C, vectors, dW_VD, is_first):
    """As `jax_backward`, but dh is of dtype, and dW replaces dW_VD in place."""
    (C, D), V, d = h_CD.shape, blocks.vocab, blocks.hidden
    (z_VC, top, z_rest), (g, e, lse, entropy) = saved, vectors
    done = len(z_VC)
    rest = z_rest, h_CD, y_C - done, vectors, dW_VD[done:], is_first
    dh_rest, dW_rest = jax_backward(head_VD[done:], *rest)
    dW_VD = lax.dynamic_update_slice(dW_VD, dW_rest, (done, 0))  # after the kernel, XLA copies dW
    # log p = z - lse, and -p (g + e (log p + H)) = -p (k + e log p) with k = g + e H; base 2.
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
            # The first chunk adds to nothing: of dW in, not written yet, only tile 0 is fetched.
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
        input_output_aliases={} if blocks.interpret else {7: 1},  # interpreted, dW would be padded
        compiler_params=params,
    )(is_first[None], y_C[None], vectors_4C, h_CD, head_VD, z_VC, top, dW_VD)
    if blocks.interpret:  # not in place there
        dW_VD = lax.dynamic_update_slice(dW_VD, dW_rest, (done, 0))
    return (dh_CD + dh_rest).astype(dtype), dW_VD


# ---------------------------------------------------------------- over a mesh
# Parameters are sharded over D, as V may be any number. For the loss, an all-to-all turns a
# device's d columns of the head into V / shards rows, for the tokens of its shards = fsdp * tp
# devices. A chunk's hidden states are gathered, the softmax's sums are combined, and dh is
# reduce-scattered; dW stays where it is, and an all-to-all turns its rows into columns at the end.
@dataclass(frozen=True)
class Settings:
    mesh: Mesh
    terms: Callable | None  # (logp, entropy, vectors) -> (loss, stats); None: no gradients
    entropic: bool  # terms uses the entropy; if False, Pallas leaves its gradient out
    temperature: float = 1.0
    impl: str = "jax"  # or pallas, or full
    blocks: Blocks | None = None  # None: what suits the devices


def rows_to_columns(dW_VD, shards):
    """This device's rows of dW -> its columns, summed over dp."""
    if shards == 1:
        return lax.psum(dW_VD, "dp")
    V, D = dW_VD.shape
    piece = min(2048, V)

    # In pieces, as XLA copies what it sends; without the layout, it would copy all columns too.
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
    """-> what the backward needs; log-probs, log-sum-exp and entropies over all shards, [C]."""
    saved, *sums = forward(h_CD)
    # One device has the target's row of the head; with the others it is 0.
    w_CD = head_VD.at[y_C].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    target = lax.psum(jnp.sum(h_CD.astype(f32) * w_CD, -1) / temperature, HEAD)
    top, total, product = combine(*lax.all_gather(sums, HEAD))
    log_total = jnp.log(total)
    log_total += total * jnp.exp(-log_total) - 1  # a Newton step: a TPU's log is good to 1e-4
    return saved, target - top - log_total, top + log_total, log_total - product / total


def chunk_loss(settings, forward, backward, head_VD, dW_VD, is_first, h_cD, y_c, vectors_c):
    """-> dW_VD with a chunk's; logp, entropy and, given terms, loss and dh of this device's c."""
    rank, c = lax.axis_index(HEAD), len(h_cD)
    gather = partial(lax.all_gather, axis_name=HEAD, tiled=True)
    h_cD = jnp.where(vectors_c["weight"][:, None] > 0, h_cD, 0)  # a masked NaN must not reach dW
    h_CD = gather(h_cD)
    y_C = gather(y_c) - rank * len(head_VD)
    saved, logp_C, lse_C, entropy_C = chunk_logp(forward, head_VD, settings.temperature, h_CD, y_C)
    logp_c = lax.dynamic_slice_in_dim(logp_C, rank * c, c)
    entropy_c = lax.dynamic_slice_in_dim(entropy_C, rank * c, c)
    if not settings.terms:
        return dW_VD, (logp_c, entropy_c)
    # The loss is algebra on vectors of c tokens: JAX makes its derivatives g and e.
    loss_c, vjp = jax.vjp(lambda *a: settings.terms(*a, vectors_c)[0], logp_c, entropy_c)
    g_C, e_C = (gather(a) / settings.temperature for a in vjp(jnp.ones_like(loss_c)))
    dh_CD, dW_VD = backward(saved, h_CD, y_C, (g_C, e_C, lse_C, entropy_C), dW_VD, is_first)
    dh_cD = lax.psum_scatter(dh_CD, HEAD, tiled=True)
    return dW_VD, (logp_c, entropy_c, loss_c, dh_cD.astype(h_cD.dtype))


def one_device(settings, h_nD, head_Vd, targets_n, vectors):
    """`loss_and_gradients` of this device's tokens and columns of the head, chunk by chunk."""
    (n, D), (V, d) = h_nD.shape, head_Vd.shape
    terms, temperature, blocks = settings.terms, settings.temperature, settings.blocks
    # The head's columns become rows, as many on each device; those past V are zeros.
    shards = D // d
    share = cdiv(V, shards)
    head_Vd = jnp.pad(head_Vd.astype(h_nD.dtype), ((0, share * shards - V), (0, 0)))
    head_VD = lax.all_to_all(head_Vd, HEAD, split_axis=0, concat_axis=1, tiled=True)
    rows = V - lax.axis_index(HEAD) * share
    forward = partial(jax_forward, head_VD, rows, temperature)
    backward = partial(jax_backward, head_VD)
    # Pallas takes the tiles that all devices have; the last one has the fewest rows.
    tiles = max(0, V - (shards - 1) * share) // blocks.vocab if settings.impl == "pallas" else 0
    if tiles:
        forward = partial(pallas_forward, blocks, tiles, bool(terms), head_VD, rows, temperature)
        dtype = h_nD.dtype if shards == 1 else f32  # of dh, which is summed over shards
        backward = partial(pallas_backward, blocks, settings.entropic, dtype, head_VD)
    # All chunks have as many tokens. For compiled kernels, these fill lanes of 128.
    c = cdiv(n, cdiv(n * shards, blocks.tokens))
    while tiles and not blocks.interpret and c * shards % 128:
        c += 1
    # Tokens with a weight come first; chunks of others are not computed. Indices from n on fill
    # the last chunk: they read zeros, and what they write is dropped.
    has_weight = vectors["weight"] > 0
    order = jnp.concatenate([jnp.argsort(~has_weight, stable=True), jnp.arange(n, n + -n % c)])
    # The first chunk is always computed, as it writes all of dW.
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
    """-> loss [N], if terms are given, and logp [N], entropy [N], by what JAX differentiates."""
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
    """-> logp, entropy [N]; given terms, loss [N], dh [N, D] in h's dtype, dW [V, D]; float32."""
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
# The forward pass makes both gradients of the loss, the backward pass scales them. Chunks are only
# computed again where a caller's own term in logp or entropy gives these cotangents.
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
        # The gradients of a loss that has these cotangents for its derivatives g and e.
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
    vectors: dict,  # of `grpo_terms`
    mesh: Mesh,  # its devices divide N, and fsdp * tp divides D
    *,
    temperature: float = 1.0,
    impl: str = "jax",  # or pallas (TPUs, else ValueError), or full: all logits, to compare with
    blocks: Blocks | None = None,  # None: what suits the devices
    **options,  # of `grpo_terms`
) -> tuple[Array, dict]:
    """-> (loss, a float32 scalar; tokens), differentiable in hidden_ND and head_VD. tokens:
    float32 [N], 0 where masked: logp and entropy (other terms can be built of them, as their
    cotangents count), and without gradient clip_fraction, ratio, and if defined logprob_gap, kl."""
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
    """-> logp [N], entropy [N] of targets with a weight, by one GEMM; arguments of `grpo_loss`."""
    settings = Settings(mesh, None, False, **how)
    hidden_ND, head_VD = lax.stop_gradient((hidden_ND, head_VD))
    return loss_and_gradients(settings, hidden_ND, head_VD, targets_N, {"weight": weight_N})
