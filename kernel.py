"""The GRPO loss, from hidden states to a number, without ever holding [tokens, vocabulary] logits.

For token i with hidden state h, target y, LM head W [V, D] and temperature T:

    z = h W' / T        logp = z[y] - logsumexp(z)        H = -sum_v p_v log p_v,  p = softmax(z)
    ratio  = exp(logp - old)                    old: log-prob when the answer was sampled, by the trainer
    policy = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
                                                PPO (arXiv 1707.06347, eq. 7), bounds: DAPO, 2503.14476
    k3     = exp(ref - logp) - (ref - logp) - 1 KL to a frozen reference (GRPO, arXiv 2402.03300, eq. 4)
    cap    = min(exp(old - sampler), is_cap)    truncated importance weight, a constant, for the sampler
    loss   = sum_i weight_i (beta k3 - cap policy - entropy_bonus H)
    dz     = (g (onehot(y) - p) - e p (log p + H)) / T,  where g = dl/dlogp, e = dl/dH
    dh, dW = dz W, dz' h

`weight` carries mask, aggregation and normalisation, so that any split of the tokens sums to the same. g and
e are algebra on [tokens] vectors, known once a chunk's logits are, and its gradients are formed while these
are at hand: three GEMMs (logits, dh, dW), not four. The backward pass scales them by dl/dloss; only for
cotangents of logp or entropy (a term built outside) does it walk the chunks again.

On a mesh a device holds V/n rows of the head for all tokens of its group of n = fsdp * tp devices. A chunk's
hidden states are gathered, the softmax's sums combined, dh summed and scattered; dW stays. Parameters lie
sharded over D, so that V may be anything: an all_to_all turns D/n columns into V/n rows.

On a TPU two Pallas kernels do this, in tiles [vocabulary, tokens]: sums over the vocabulary go down sublanes.
One keeps z - m, m the largest of 256 rows: bfloat16 is exact where it matters, near the top. The other builds
dz in VMEM, for both GEMMs. Exponents are of 2, as in hardware. What is less than a tile is left to plain JAX.
"""

import math
from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

TOKENS = ("dp", "fsdp", "tp")  # outside a chunk, tokens are shared out over every device
SHARDS = ("fsdp", "tp")        # and the head over these
DIM = ("parallel", "arbitrary")  # of a grid: the two cores of a chip, where it has two, share the first
LOG2E = math.log2(math.e)
NOTHING = -1e30                # the logit of what is not in the vocabulary

# ---------------------------------------------------------------- GRPO on [tokens] vectors
def grpo_terms(logp_N, entropy_N, vectors, *, clip_low=.2, clip_high=.2, beta=0, is_cap=0, entropy_bonus=0):
    """The algebra of GRPO -> (loss_N, stats): float32 vectors over tokens, all 0 where weight is 0.
    vectors: `weight` (0 = masked; what the others hold there is never used), `advantage`, and what the
    batch has of `old` (absent: ratio 1), `sampler` (absent: weight 1), `ref` (absent: no KL)."""
    mask = vectors["weight"] > 0
    def difference(a, b):  # masked before exp, and exp must not overflow: even times 0, inf and NaN are NaN
        return jnp.minimum(jnp.where(mask, a, 0.0) - jnp.where(mask, b, 0.0), 60.0)
    old = vectors.get("old", jax.lax.stop_gradient(logp_N))
    advantage = jnp.where(mask, vectors["advantage"], 0.0)
    ratio = jnp.exp(difference(logp_N, old))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    outside = clipped * advantage < ratio * advantage
    policy = jnp.where(outside, clipped, ratio) * advantage  # jnp.minimum halves the gradient of a tie
    stats = {"clip_fraction": 1.0 * (mask & outside), "ratio": mask * ratio}
    if "sampler" in vectors:
        gap = difference(old, vectors["sampler"])
        stats["logprob_gap"] = jnp.abs(gap)
        if is_cap:
            policy *= jax.lax.stop_gradient(jnp.minimum(jnp.exp(gap), is_cap))
    loss = -policy
    if "ref" in vectors:
        log_ref = difference(vectors["ref"], logp_N)
        stats["kl"] = jnp.exp(log_ref) - log_ref - 1
        loss += beta * stats["kl"]
    if entropy_bonus:
        loss -= entropy_bonus * jnp.where(mask, entropy_N, 0.0)
    return vectors["weight"] * loss, jax.lax.stop_gradient(stats)

# ---------------------------------------------------------------- a chunk in plain JAX
# C tokens, D model, V rows of the head: this device's, of which the first `rows` are in the vocabulary.
# forward -> what backward needs, max, sum of exp(z - max), sum of (z - max) exp(z - max), float32 [C]
# backward -> dh [C, D], dW [V, D], float32, the latter added to what was there, but not if `first`
def dot(a, b, contract):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, ((contract[:1], contract[1:]), ((), ())), precision=precision,
                               preferred_element_type=jnp.float32)

def jax_forward(h_CD, head_VD, rows, temperature):
    z_CV = jnp.where(jnp.arange(len(head_VD)) < rows, dot(h_CD, head_VD, (1, 1)) / temperature, NOTHING)
    top_C = z_CV.max(-1, initial=NOTHING)
    off = z_CV - top_C[:, None]
    return z_CV, top_C, jnp.exp(off).sum(-1), (off * jnp.exp(off)).sum(-1)

def jax_backward(z_CV, h_CD, head_VD, y_C, vectors, dW_VD, first):
    g, e, lse, entropy = (a[:, None] for a in vectors)
    log_p = z_CV - lse
    hit = y_C[:, None] == jnp.arange(len(head_VD))
    dz = (jnp.where(hit, g, 0.0) - jnp.exp(log_p) * (g + e * (log_p + entropy))).astype(h_CD.dtype)
    return dot(dz, head_VD, (1, 0)), jnp.where(first, 0.0, dW_VD) + dot(dz, h_CD, (0, 0))

def combine(top, total, product):
    """Sums of exp relative to parts' own maxima, [parts, C] each -> relative to the largest, [C]."""
    top_C = top.max(0)
    scale = jnp.exp(top - top_C)
    return top_C, (scale * total).sum(0), (scale * (product + (top - top_C) * total)).sum(0)

# ---------------------------------------------------------------- a chunk in Pallas
# tokens: of a device group, that have logits at once (plain JAX looks at no more). Of a tile: rows: tokens in
# the forward; vocab; hidden: columns of D in the backward; step: rows of z with one maximum. vmem: bytes.
Blocks = namedtuple("Blocks", "tokens rows vocab hidden vmem interpret step", defaults=[0] * 4 + [False, 256])

def forward_kernel(scale, step, h_CD, w_VD, *out):
    """z = w h' of one tile, `step` rows after another: the next GEMM stands before the exp of the last, which
    the compiler then does meanwhile."""
    *z_out, top_out, sum_out, dot_out = out
    z = dot(w_VD[:step], h_CD[...], (1, 1))
    for i in range(w_VD.shape[0] // step):
        r = slice(i * step, (i + 1) * step)
        following = dot(w_VD[r.stop:r.stop + step], h_CD[...], (1, 1)) if r.stop < w_VD.shape[0] else None
        z *= scale * LOG2E
        top = z.max(0, keepdims=True)
        off = z - top
        p = jnp.exp2(off)
        top_out[0, i], sum_out[0, i] = top, p.sum(0, keepdims=True)
        dot_out[0, i] = (off * p).sum(0, keepdims=True)
        for ref in z_out:
            ref[r] = off.astype(ref.dtype)
        z = following

def forward_tiles(b, n, save, h_CD, head_VD, temperature):
    """n tiles of the head -> ([z - m [V, C] if save,] m, sum p, sum p log2 p: float32 [n, steps, 1, C])."""
    (C, D), steps, rows = h_CD.shape, b.vocab // b.step, min(b.rows, len(h_CD))
    vector = jax.ShapeDtypeStruct((n, steps, 1, C), jnp.float32)
    vectors = [pl.BlockSpec((1, steps, 1, rows), lambda i, j: (j, 0, 0, i))] * 3
    z_VC = [jax.ShapeDtypeStruct((n * b.vocab, C), h_CD.dtype)] * save
    return pl.pallas_call(
        partial(forward_kernel, 1 / temperature, b.step), name="grpo_forward", interpret=b.interpret,
        grid=(pl.cdiv(C, rows), n), out_shape=z_VC + [vector] * 3,
        in_specs=[pl.BlockSpec((rows, D), lambda i, j: (i, 0)),
                  pl.BlockSpec((b.vocab, D), lambda i, j: (j, 0))],
        out_specs=[pl.BlockSpec((b.vocab, rows), lambda i, j: (j, i))] * save + vectors,
        compiler_params=pltpu.CompilerParams(dimension_semantics=DIM, vmem_limit_bytes=b.vmem))(h_CD, head_VD)

def pallas_forward(blocks, n, save, h_CD, head_VD, rows, temperature):
    """The head's first n tiles, which no device lacks, in Pallas; the rest, at most about one, in JAX."""
    *z_VC, top, total, product = forward_tiles(blocks, n, save, h_CD, head_VD, temperature)
    z_rest, *rest = jax_forward(h_CD, head_VD[n * blocks.vocab:], rows - n * blocks.vocab, temperature)
    parts = [jnp.concatenate([a.reshape(-1, len(h_CD)), b[None]])
             for a, b in zip((top / LOG2E, total, product / LOG2E), rest)]
    return (*z_VC, top, z_rest), *combine(*parts)

def backward_kernel(step, entropic, first, y, vectors, h_CD, w_VD, z_VC, top, dw_in, dh, dw, dz_VC, dh_CD):
    """dz of one tile, `step` rows after another, each one GEMM early as in the forward; then dh."""
    j, size = pl.program_id(1), w_VD.shape[0]
    @pl.when(j == 0)
    def _():
        dh_CD[...] = jnp.zeros_like(dh_CD)
    g, e, k, lse = (vectors[i:i + 1] for i in range(4))
    def gradient(i):
        log2_p = z_VC[i * step:(i + 1) * step].astype(jnp.float32) + (top[0, i] - lse)
        row = jax.lax.broadcasted_iota(jnp.int32, log2_p.shape, 0)
        hit = row == y[...] - (j * size + i * step)
        factor = k + e * log2_p if entropic else k
        return (jnp.where(hit, g, 0.0) - jnp.exp2(log2_p) * factor).astype(dz_VC.dtype)
    wide = 2 - size // step % 2  # steps a GEMM: more rows, fewer visits of h
    gradients = lambda i: jnp.concatenate([gradient(k) for k in range(i, i + wide)])
    dz = gradients(0)
    for i in range(0, size // step, wide):
        r = slice(i * step, (i + wide) * step)
        following = gradients(i + wide) if r.stop < size else None
        dz_VC[r] = dz
        dw[r] = jnp.where(first[0] == 1, 0.0, dw_in[r]) + dot(dz, h_CD[...], (1, 0))
        dz = following
    dh_CD[...] += dot(dz_VC[...], w_VD[...], (0, 0))
    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        dh[...] = dh_CD[...].astype(dh.dtype)

def backward_tiles(b, entropic, dtype, first, y_1C, vectors_4C, h_CD, head_VD, z_VC, top, dW_VD):
    """Of the tiles that z has -> dh [C, D] in dtype, dW [V, D] float32, in place of what it was."""
    (C, D), (n, steps, *_) = h_CD.shape, top.shape
    tile = pl.BlockSpec((b.vocab, b.hidden), lambda d, j, _: (j, d))
    column = pl.BlockSpec((C, b.hidden), lambda d, j, _: (0, d))
    # What the first chunk adds to was never written, and but for one tile it is not read either.
    dw_in = pl.BlockSpec((b.vocab, b.hidden), lambda d, j, first: (j * (1 - first[0]), d))
    return pl.pallas_call(
        partial(backward_kernel, b.step, entropic), name="grpo_backward", interpret=b.interpret,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(pl.cdiv(D, b.hidden), n), out_specs=[column, tile],
            in_specs=[*(pl.BlockSpec((k, C), lambda d, j, _: (0, 0)) for k in (1, 4)), column, tile,
                      pl.BlockSpec((b.vocab, C), lambda d, j, _: (j, 0)),
                      pl.BlockSpec((1, steps, 1, C), lambda d, j, _: (j, 0, 0, 0)), dw_in],
            scratch_shapes=[pltpu.VMEM((b.vocab, C), h_CD.dtype), pltpu.VMEM((C, b.hidden), jnp.float32)]),
        out_shape=[jax.ShapeDtypeStruct((C, D), dtype), jax.ShapeDtypeStruct(dW_VD.shape, jnp.float32)],
        input_output_aliases={} if b.interpret else {7: 1},  # the interpreter would return the padded shape
        compiler_params=pltpu.CompilerParams(dimension_semantics=DIM, vmem_limit_bytes=b.vmem),
    )(first, y_1C, vectors_4C, h_CD, head_VD, z_VC, top, dW_VD)

def pallas_backward(blocks, entropic, dtype, saved, h_CD, head_VD, y_C, vectors, dW_VD, first):
    (z_VC, top, z_rest), (g, e, lse, entropy), n = saved, vectors, len(saved[0])
    vectors_4C = jnp.stack([g, e / LOG2E, g + e * entropy, lse * LOG2E])  # as the kernel has it
    rest, dW_rest = jax_backward(z_rest, h_CD, head_VD[n:], y_C - n, vectors, dW_VD[n:], first)
    dW_VD = jax.lax.dynamic_update_slice(dW_VD, dW_rest, (n, 0))
    dh_CD, dW_VD = backward_tiles(blocks, entropic, dtype, first[None], y_C[None], vectors_4C, h_CD, head_VD,
                                  z_VC, top, dW_VD)
    if blocks.interpret:  # not in place there
        dW_VD = jax.lax.dynamic_update_slice(dW_VD, dW_rest, (n, 0))
    return (dh_CD + rest).astype(dtype), dW_VD

# ---------------------------------------------------------------- block sizes
VMEM = {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128}  # MiB a core, by device_kind

def block_sizes(device_kind, D, impl="pallas", tokens=0):
    """Tiles for a chip and a model, bfloat16: all of D if 7/8 of VMEM hold it, as z is read once a tile of D;
    then much of V. `tokens` overrides how many have logits at once. ValueError: not a TPU."""
    vmem = next((mib << 20 for kind, mib in VMEM.items() if device_kind.startswith(kind)), 0)
    if impl != "pallas":
        return Blocks(tokens or 1024)
    C = tokens or (2048 if vmem > 16 << 20 else 1024)
    for hidden in (-(-D // (128 * k)) * 128 for k in (1, 2, 4, 8, 16)):
        for vocab in (1024, 512, 256):
            # h and dh, twice if they change, and dh's sum; two of W, dW in, dW out and z; dz, and its parts
            need = C * hidden * (10 if hidden >= D else 16) + vocab * (20 * hidden + 6 * C) + 256 * C * 8
            if need < vmem * 7 // 8:
                return Blocks(C, 2048 if vmem > 16 << 20 else 256, vocab, hidden, vmem - (vmem >> 4))
    raise ValueError(f"pallas is for {', '.join(VMEM)} and D up to 8192, not for {device_kind} and D = {D}")

# ---------------------------------------------------------------- over a mesh
def rows_to_columns(dW_VD, shards, piece=2048):
    """This device's rows of dW -> its columns of all's, summed over dp; in pieces, as XLA copies them."""
    if shards == 1:
        return jax.lax.psum(dW_VD, "dp")
    (V, D), piece = dW_VD.shape, min(piece, len(dW_VD))
    def move(i, out):
        start = jnp.minimum(i * piece, V - piece)
        rows = jax.lax.dynamic_slice_in_dim(dW_VD, start, piece).reshape(piece, shards, D // shards)
        rows = with_layout_constraint(rows.transpose(1, 0, 2), Layout((0, 1, 2)))  # or XLA relays all of out
        rows = jax.lax.all_to_all(rows, SHARDS, split_axis=0, concat_axis=0)
        return jax.lax.dynamic_update_slice(out, jax.lax.psum(rows, "dp"), (0, start, 0))
    out = jax.lax.empty((shards, V, D // shards), jnp.float32)
    return jax.lax.fori_loop(0, -(-V // piece), move, out).reshape(shards * V, D // shards)

# terms: (logp, entropy, vectors) -> (loss, stats), or None: no gradients. entropic: does it use the entropy?
Settings = namedtuple("Settings", "mesh terms entropic temperature impl blocks")

def one_device(settings, h_nD, head_Vd, y_n, vectors):
    """Of this device's tokens and columns of the head, what `loss_and_gradients` returns."""
    _, terms, entropic, temperature, impl, blocks = settings
    gather = partial(jax.lax.all_gather, axis_name=SHARDS, tiled=True)
    n, V, D = len(y_n), len(head_Vd), h_nD.shape[1]
    rank, shards = jax.lax.axis_index(SHARDS), D // head_Vd.shape[1]
    share = -(-V // shards)  # rows of the head a device; the last may have fewer, or none
    rows = jnp.clip(V - rank * share, 0, share)
    n_tiles = impl == "pallas" and max(0, V - (shards - 1) * share) // blocks.vocab
    dtype = h_nD.dtype if shards == 1 else jnp.float32  # of dh, where it is to be summed
    forward = partial(pallas_forward, blocks, n_tiles, terms is not None) if n_tiles else jax_forward
    backward = partial(pallas_backward, blocks, entropic, dtype) if n_tiles else jax_backward
    head_Vd = jnp.pad(head_Vd.astype(h_nD.dtype), ((0, share * shards - V), (0, 0)))
    head_VD = jax.lax.all_to_all(head_Vd, SHARDS, split_axis=0, concat_axis=1, tiled=True)
    unit = 128 // math.gcd(128, shards) if n_tiles and not blocks.interpret else 1  # whole lanes of tokens
    c = -(-n // -(-n * shards // blocks.tokens) // unit) * unit  # tokens a device and chunk, as many in each
    mine = partial(jax.lax.dynamic_slice_in_dim, start_index=rank * c, slice_size=c)
    def chunk(dW_VD, args):
        first, h_cD, y_c, vectors_c = args
        h_cD = jnp.where(vectors_c["weight"][:, None] > 0, h_cD, 0)  # a masked NaN must not reach dW
        h_CD, y_C = gather(h_cD), gather(y_c) - rank * share
        saved, top, total, product = forward(h_CD, head_VD, rows, temperature)
        w_CD = head_VD.at[y_C].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        target = jax.lax.psum(jnp.sum(h_CD.astype(jnp.float32) * w_CD, -1) / temperature, SHARDS)
        top, total, product = combine(*jax.lax.all_gather((top, total, product), SHARDS))
        log_total = jnp.log(total)
        log_total += total * jnp.exp(-log_total) - 1  # a Newton step: a TPU's log alone is good to 1e-4
        lse, entropy = top + log_total, log_total - product / total
        logp_c, entropy_c = mine(target - top - log_total), mine(entropy)
        if terms is None:
            return dW_VD, (logp_c, entropy_c)
        loss_c, gradient = jax.vjp(lambda *a: terms(*a, vectors_c)[0], logp_c, entropy_c)
        g, e = (gather(a) / temperature for a in gradient(jnp.ones_like(loss_c)))
        dh_CD, dW_VD = backward(saved, h_CD, head_VD, y_C, (g, e, lse, entropy), dW_VD, first)
        dh_cD = jax.lax.psum_scatter(dh_CD, SHARDS, tiled=True)
        return dW_VD, (logp_c, entropy_c, loss_c, dh_cD.astype(h_cD.dtype))
    counted = vectors["weight"] > 0  # tokens with a weight come first; chunks of others are not computed
    order = jnp.concatenate([jnp.argsort(~counted, stable=True), jnp.arange(n, n + -n % c)])
    def body(i, carry):
        at = jax.lax.dynamic_slice_in_dim(order, i * c, c)
        args = jax.tree.map(lambda a: a.at[at].get(mode="fill", fill_value=0), (h_nD, y_n, vectors))
        dW_VD, new = chunk(carry[0], ((i == 0).astype(jnp.int32), *args))
        put = lambda a, b: a.at[at].set(b, mode="drop", unique_indices=True)
        return dW_VD, tuple(map(put, carry[1], new))
    out = [jnp.zeros(n)] * (2 if terms is None else 3) + [jnp.zeros_like(h_nD)] * (terms is not None)
    dW_VD = jax.lax.empty((share, D), jnp.float32) if terms is not None else None
    chunks = jnp.maximum(1, -(-jax.lax.pmax(counted.sum(), SHARDS) // c))  # the first one writes all of dW
    dW_VD, out = jax.lax.fori_loop(0, chunks, body, (dW_VD, tuple(out)))
    return out if terms is None else (*out, rows_to_columns(dW_VD, shards)[:V])

def materialised(settings, h_ND, head_VD, targets_N, vectors):
    """What `loss_and_gradients` does, by way of the logits of all tokens and what JAX makes of them."""
    keep = lambda a, *spec: jax.lax.with_sharding_constraint(a, NamedSharding(settings.mesh, P(*spec)))
    def logp_and_entropy(h_ND, head_VD):
        h_ND = keep(jnp.where(vectors["weight"][:, None] > 0, h_ND, 0), TOKENS)
        log_p = jax.nn.log_softmax(dot(h_ND, keep(head_VD.astype(h_ND.dtype)), (1, 1)) / settings.temperature)
        logp_N = jnp.take_along_axis(log_p, targets_N[:, None], 1)[:, 0]
        return logp_N, -jnp.sum(jnp.exp(log_p) * log_p, -1)
    if not settings.terms:
        return logp_and_entropy(h_ND, head_VD)
    out, to_inputs = jax.vjp(logp_and_entropy, h_ND, head_VD)
    loss_N, to_out = jax.vjp(lambda out: settings.terms(*out, vectors)[0], out)
    return *out, loss_N, *to_inputs(*to_out(jnp.ones_like(loss_N)))

def loss_and_gradients(settings, h_ND, head_VD, targets_N, vectors):
    """-> logp [N], entropy [N] and, given terms, loss [N], dh [N, D] in h's dtype, dW [V, D] float32."""
    mesh, terms, *_, impl, blocks = settings
    if impl == "full":
        return materialised(settings, h_ND, head_VD, targets_N, vectors)
    blocks = blocks or block_sizes(mesh.devices.flat[0].device_kind, h_ND.shape[1], impl)
    tokens, columns = P(TOKENS), P(None, SHARDS)
    run = jax.shard_map(partial(one_device, settings._replace(blocks=blocks)), mesh=mesh, check_vma=False,
                        in_specs=(tokens, columns, tokens, tokens),
                        out_specs=(tokens,) * 4 + (columns,) if terms else (tokens, tokens))
    return run(h_ND, head_VD, targets_N, vectors)

@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(settings, h_ND, head_VD, targets_N, vectors):
    logp_N, entropy_N = loss_and_gradients(settings._replace(terms=None), h_ND, head_VD, targets_N, vectors)
    return settings.terms(logp_N, entropy_N, vectors)[0].sum(), logp_N, entropy_N

def fused_forward(settings, *primals):
    args = jax.tree.map(lambda p: p.value, primals)
    logp_N, entropy_N, loss_N, *gradients = loss_and_gradients(settings, *args)
    return (loss_N.sum(), logp_N, entropy_N), (args, gradients)

def fused_backward(settings, saved, cotangents):
    (h_ND, head_VD, targets_N, vectors), gradients = saved
    gradients = [0.0 if isinstance(cotangents[0], SymbolicZero) else a * cotangents[0] for a in gradients]
    outer = {k: ct for k, ct in zip("ge", cotangents[1:]) if not isinstance(ct, SymbolicZero)}
    if outer:  # once more, of a loss that has these for its gradient
        linear = lambda logp, entropy, v: (v.get("g", 0) * logp + v.get("e", 0) * entropy, {})
        again, vectors = settings._replace(terms=linear, entropic="e" in outer), vectors | outer
        *_, dh_ND, dW_VD = loss_and_gradients(again, h_ND, head_VD, targets_N, vectors)
        gradients = [gradients[0] + dh_ND, gradients[1] + dW_VD]
    return gradients[0].astype(h_ND.dtype), gradients[1].astype(head_VD.dtype), None, None
fused.defvjp(fused_forward, fused_backward, symbolic_zeros=True)

def grpo_loss(hidden_ND, head_VD, targets_N, vectors, mesh, *, temperature=1., impl="jax", blocks=None,
              **terms):
    """Hidden states in the compute dtype, LM head, targets in [0, V), vectors and options of `grpo_terms` ->
    (loss, tokens), differentiable in hidden_ND and head_VD. The mesh's devices divide N, fsdp * tp divides D.
    loss: a float32 scalar, the sum over tokens. tokens: float32 [N], 0 where masked: logp and entropy (build
    other terms with them: their cotangents count), and without gradient clip_fraction, ratio, and where
    defined logprob_gap, kl. impl: jax | pallas (TPUs, else ValueError) | full (all logits, for contrast)."""
    with jax.named_scope("grpo_loss"):
        terms, entropic = partial(grpo_terms, **terms), bool(terms.get("entropy_bonus"))
        settings = Settings(mesh, terms, entropic, temperature, impl, blocks)
        loss, logp_N, entropy_N = fused(settings, hidden_ND, head_VD, targets_N, vectors)
        stats = terms(jax.lax.stop_gradient(logp_N), jax.lax.stop_gradient(entropy_N), vectors)[1]
        tokens = stats | {"logp": logp_N, "entropy": entropy_N}
        return loss, {k: jnp.where(vectors["weight"] > 0, a, 0.0) for k, a in tokens.items()}

def score(hidden_ND, head_VD, targets_N, weight_N, mesh, *, temperature=1., impl="jax", blocks=None):
    """-> (logp [N], entropy [N]) of the targets that have a weight, without meaning of the others: one GEMM,
    no gradients. Arguments as in `grpo_loss`."""
    inputs = *jax.lax.stop_gradient((hidden_ND, head_VD)), targets_N, {"weight": weight_N}
    return loss_and_gradients(Settings(mesh, None, False, temperature, impl, blocks), *inputs)

# ---------------------------------------------------------------- benchmark
