"""The GRPO loss, from hidden states to a number, without ever holding [tokens, vocabulary] logits.

For token i with hidden state h, target y, LM head W [V, D] and temperature T:

    z = h W' / T        logp = z[y] - logsumexp(z)        H = -sum_v p_v log p_v,  p = softmax(z)

    ratio  = exp(logp - old)                    old: log-prob when the answer was sampled, by the trainer
    policy = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
                                                PPO (arXiv 1707.06347, eq. 7), bounds: DAPO, 2503.14476
    k3     = exp(ref - logp) - (ref - logp) - 1 KL to a frozen reference (GRPO, arXiv 2402.03300, eq. 4)
    cap    = min(exp(old - sampler), is_cap)    truncated importance weight, constant: the sampler's numbers
                                                are not exactly the trainer's
    loss   = sum_i weight_i (beta k3 - cap policy - entropy_bonus H)

`weight` carries mask, aggregation and normalisation, so that any split of the tokens sums to the same.
Given dl/dlogp = g and dl/dH = e, the gradient of the logits is

    dz = (g (onehot(y) - p) - e p (log p + H)) / T

and dh = dz W, dW = dz' h. All but z, dz, dh and dW is algebra on vectors over tokens, so g and e are known as
soon as a chunk's logits are: its gradients are formed while they are at hand. That is three GEMMs (logits,
dh, dW), not four, and only a chunk's logits ever exist. A backward pass that finds dl/dloss alone multiplies
by it; one that finds cotangents of logp or entropy (a term built outside) walks the chunks again for them.

On a mesh each device holds V/n rows of the head for all the tokens of its group of n = fsdp * tp devices:
a chunk's hidden states are gathered, max and sums of the softmax combined, dh summed and scattered; dW stays.
Parameters are sharded over D, so that V may be anything: one all_to_all turns D/n columns into V/n rows.

On a TPU two Pallas kernels do this. Their tiles are [vocabulary, tokens], so that sums over the vocabulary
run down the sublanes. The first keeps z as z - m, m the largest of 256 rows: in bfloat16 what matters, near
the top, is then what is exact. The second builds dz in VMEM, for both GEMMs. Exponents are of 2, as in the
hardware. What lies outside the arrays in the last tile is masked, so that no operand is ever padded.
"""

import argparse
import math
import os
import re
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

TOKENS = ("dp", "fsdp", "tp")  # outside a chunk, tokens are shared out over every device
SHARDS = ("fsdp", "tp")        # and the head over these
LOG2E = math.log2(math.e)
NOTHING = -1e30                # the logit of what is not in the vocabulary

# ---------------------------------------------------------------- GRPO on [tokens] vectors
def grpo_terms(logp_N, entropy_N, vectors, *, clip_low, clip_high, beta, is_cap, entropy_bonus):
    """The algebra of GRPO -> (loss_N, stats): float32 vectors over tokens, all 0 where weight is 0.

    vectors: `weight` (0 = masked; what the others hold there is never used), `advantage`, and what the
    batch has of `old` (absent: ratio 1), `sampler` (absent: weight 1), `ref` (absent: no KL).
    """
    mask = vectors["weight"] > 0

    def difference(a, b):  # masked before exp, and exp must not overflow: even times 0, inf and NaN are NaN
        return jnp.minimum(jnp.where(mask, a, 0.0) - jnp.where(mask, b, 0.0), 60.0)

    old = vectors.get("old", jax.lax.stop_gradient(logp_N))
    advantage = jnp.where(mask, vectors["advantage"], 0.0)
    ratio = jnp.exp(difference(logp_N, old))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    policy = jnp.minimum(ratio * advantage, clipped * advantage)
    stats = {"clip_fraction": 1.0 * (mask & (clipped * advantage < ratio * advantage)), "ratio": mask * ratio}
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

def linear_terms(logp_N, entropy_N, vectors):
    """A loss whose gradient is the given cotangents."""
    return vectors["g"] * logp_N + vectors["e"] * entropy_N, {}

# ---------------------------------------------------------------- a chunk in plain JAX
# C tokens, D model, V rows of the head (this device's), of which the first `rows` are in the vocabulary.
# forward  -> (what backward needs, max, sum of exp(z - max), sum of (z - max) exp(z - max)), float32 [C]
# backward -> (dh [C, D] float32, dW [V, D] float32, added to what was there; not if `first`)
def dot(a, b, contract):
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, ((contract[:1], contract[1:]), ((), ())), precision=exact,
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

# ---------------------------------------------------------------- a chunk in Pallas
class Blocks(NamedTuple):
    """Sizes of tiles. VMEM in bytes; interpret: False, or pltpu.InterpretParams to run on a CPU."""
    tokens: int     # C: tokens of a device group whose logits exist at once; all that plain JAX looks at
    rows: int = 0   # tokens a tile of the forward
    vocab: int = 0
    hidden: int = 0  # columns of D a tile of the backward; the forward takes all
    vmem: int = 0
    interpret: object = False
    step: int = 256  # rows of z with one maximum, and between which exp and GEMM overlap

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
    """Of the head's first n tiles -> ([z - m [V, C] if save,] m, sum of p, sum of p log2 p: float32
    [n, steps, 1, C])."""
    (C, D), steps = h_CD.shape, b.vocab // b.step
    vector = jax.ShapeDtypeStruct((n, steps, 1, C), jnp.float32)
    vectors = [pl.BlockSpec((1, steps, 1, b.rows), lambda i, j: (j, 0, 0, i))] * 3
    z_VC = [jax.ShapeDtypeStruct((n * b.vocab, C), h_CD.dtype)] * save
    return pl.pallas_call(
        partial(forward_kernel, 1 / temperature, b.step), name="grpo_forward", interpret=b.interpret,
        grid=(pl.cdiv(C, b.rows), n), out_shape=z_VC + [vector] * 3,
        in_specs=[pl.BlockSpec((b.rows, D), lambda i, j: (i, 0)),
                  pl.BlockSpec((b.vocab, D), lambda i, j: (j, 0))],
        out_specs=[pl.BlockSpec((b.vocab, b.rows), lambda i, j: (j, i))] * save + vectors,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"),
                                             vmem_limit_bytes=b.vmem))(h_CD, head_VD)

def combine(top, total, product):
    """Sums of exp relative to parts' own maxima, [parts, C] each -> relative to the largest, [C]."""
    top_C = top.max(0)
    scale = jnp.exp(top - top_C)
    return top_C, (scale * total).sum(0), (scale * (product + (top - top_C) * total)).sum(0)

def pallas_forward(blocks, n, save, h_CD, head_VD, rows, temperature):
    """The head's first n tiles, which no device lacks, in Pallas; the rest, little more than a tile, in JAX."""
    *z_VC, top, total, product = forward_tiles(blocks, n, save, h_CD, head_VD, temperature)
    z_rest, *rest = jax_forward(h_CD, head_VD[n * blocks.vocab:], rows - n * blocks.vocab, temperature)
    parts = [jnp.concatenate([a.reshape(-1, len(h_CD)), b[None]])
             for a, b in zip((top / LOG2E, total, product / LOG2E), rest)]
    return (*z_VC, top, z_rest), *combine(*parts)

def backward_kernel(step, entropic, first, y_C, vectors, h_CD, w_VD, z_VC, top, dw_in, dh_out, dw_VD, dz_VC, dh_CD):
    """dz of one tile, `step` rows after another, each one GEMM early as in the forward; then dh."""
    j, size = pl.program_id(1), w_VD.shape[0]

    @pl.when(j == 0)
    def _():
        dh_CD[...] = jnp.zeros_like(dh_CD)

    g, e, k, lse = (vectors[i:i + 1] for i in range(4))
    def gradient(i):
        log2_p = z_VC[i * step:(i + 1) * step].astype(jnp.float32) + (top[0, i] - lse)
        row = jax.lax.broadcasted_iota(jnp.int32, log2_p.shape, 0)
        hit = row == y_C[...] - (j * size + i * step)
        factor = k + e * log2_p if entropic else k
        return (jnp.where(hit, g, 0.0) - jnp.exp2(log2_p) * factor).astype(dz_VC.dtype)

    dz = gradient(0)
    for i in range(size // step):
        r = slice(i * step, (i + 1) * step)
        following = gradient(i + 1) if r.stop < size else None
        dz_VC[r] = dz
        dw_VD[r] = jnp.where(first[0] == 1, 0.0, dw_in[r]) + dot(dz, h_CD[...], (1, 0))
        dz = following
    dh_CD[...] += dot(dz_VC[...], w_VD[...], (0, 0))

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        dh_out[...] = dh_CD[...].astype(dh_out.dtype)

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
            in_specs=[pl.BlockSpec((1, C), lambda d, j, _: (0, 0)), pl.BlockSpec((4, C), lambda d, j, _: (0, 0)),
                      column, tile, pl.BlockSpec((b.vocab, C), lambda d, j, _: (j, 0)),
                      pl.BlockSpec((1, steps, 1, C), lambda d, j, _: (j, 0, 0, 0)), dw_in],
            scratch_shapes=[pltpu.VMEM((b.vocab, C), h_CD.dtype), pltpu.VMEM((C, b.hidden), jnp.float32)]),
        out_shape=[jax.ShapeDtypeStruct((C, D), dtype), jax.ShapeDtypeStruct(dW_VD.shape, jnp.float32)],
        input_output_aliases={} if b.interpret else {7: 1},  # the interpreter would return the padded shape
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"),
                                             vmem_limit_bytes=b.vmem),
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
CHIPS = {  # by how jax's device_kind begins: VMEM MiB a core, peak bf16 TFLOP/s, HBM TB/s, both a chip
    "TPU v4": (16, 275, 1.2), "TPU v5 lite": (128, 197, 0.82), "TPU v5": (64, 459, 2.76),
    "TPU v6 lite": (128, 918, 1.64)}

def chip(device_kind):
    return next((numbers for kind, numbers in CHIPS.items() if device_kind.startswith(kind)), None)

def block_sizes(device_kind, D, impl="pallas", tokens=0):
    """Tiles for a chip and a model, bfloat16: few and large, within 7/8 of VMEM. All of D, so that z is read
    once, before much of V; `tokens` overrides how many have their logits at once."""
    if impl != "pallas":
        return Blocks(tokens or 1024)
    if not chip(device_kind):
        raise ValueError(f"loss_impl pallas is for TPUs ({', '.join(CHIPS)}), not {device_kind}; use jax")
    vmem = chip(device_kind)[0] << 20
    C = tokens or (2048 if vmem > 16 << 20 else 1024)
    rows = next(r for r in (2048, 1024, 512, 256, 128) if 4 * r * D + 4 * 256 * D + 4 * 256 * r * 4 < vmem * 7 // 8)
    for hidden in (-(-D // (128 * k)) * 128 for k in (1, 2, 4, 8, 16)):
        for vocab in (1024, 512, 256):
            need = (2 * C * hidden * 2 + 2 * vocab * hidden * 2     # h, W: two buffers each
                    + 4 * vocab * hidden * 4 + 2 * C * hidden * 4   # dW in and out, dh
                    + 3 * vocab * C * 2 + 2 * 256 * C * 4)          # z, dz, and dz's parts
            if need < vmem * 7 // 8:
                return Blocks(C, min(rows, C), vocab, hidden, vmem - (vmem >> 4))
    raise ValueError(f"no tiles of D = {D} fit into {vmem >> 20} MiB of VMEM")

# ---------------------------------------------------------------- over a mesh
def rows_to_columns(dW_VD, shards, piece=2048):
    """This device's rows of the head's gradient -> its columns of all devices' rows, summed over dp. A piece
    at a time: at once, the copies around the all_to_all would be the most memory that the loss takes."""
    if shards == 1:
        return jax.lax.psum(dW_VD, "dp")
    V, D = dW_VD.shape
    piece = min(piece, V)

    def move(i, out):
        start = jnp.minimum(i * piece, V - piece)
        rows = jax.lax.dynamic_slice_in_dim(dW_VD, start, piece).reshape(piece, shards, D // shards)
        rows = with_layout_constraint(rows.transpose(1, 0, 2), Layout((0, 1, 2)))  # or XLA relays all of out
        rows = jax.lax.all_to_all(rows, SHARDS, split_axis=0, concat_axis=0)
        return jax.lax.dynamic_update_slice(out, jax.lax.psum(rows, "dp"), (0, start, 0))

    out = jax.lax.empty((shards, V, D // shards), jnp.float32)
    return jax.lax.fori_loop(0, -(-V // piece), move, out).reshape(shards * V, D // shards)

class Settings(NamedTuple):
    """What is fixed when the loss is compiled."""
    mesh: Mesh
    terms: object         # (logp, entropy, vectors) -> (loss, stats), float32 [tokens]; None: no gradients
    entropic: bool        # the loss depends on the entropy
    temperature: float
    impl: str
    blocks: Blocks

def one_device(settings, h_nD, head_Vd, y_n, vectors):
    """This device's tokens and columns of the head -> (logp_n, entropy_n) where there are no terms, else
    (logp_n, entropy_n, loss_n, dh_nD, dW_Vd)."""
    _, terms, entropic, temperature, impl, blocks = settings
    gather = partial(jax.lax.all_gather, axis_name=SHARDS, tiled=True)
    n, V, D = len(y_n), len(head_Vd), h_nD.shape[1]
    rank, shards = jax.lax.axis_index(SHARDS), D // head_Vd.shape[1]
    share = -(-V // shards)  # rows of the head a device; the last may have fewer, or none
    rows = jnp.clip(V - rank * share, 0, share)
    n_tiles = impl == "pallas" and max(0, V - (shards - 1) * share) // blocks.vocab
    dtype = h_nD.dtype if shards == 1 else jnp.float32  # of dh, where it is to be summed
    forward, backward = jax_forward, jax_backward
    if n_tiles:
        forward = partial(pallas_forward, blocks, n_tiles, terms is not None)
        backward = partial(pallas_backward, blocks, entropic, dtype)
    head_Vd = jnp.pad(head_Vd.astype(h_nD.dtype), ((0, share * shards - V), (0, 0)))
    head_VD = jax.lax.all_to_all(head_Vd, SHARDS, split_axis=0, concat_axis=1, tiled=True)
    lanes = 128 // math.gcd(128, shards)
    c = max(1, blocks.tokens // (shards * lanes)) * lanes if n * shards > 128 else n
    c = min(c, -(-n // lanes) * lanes)  # a device's part of a chunk
    mine = partial(jax.lax.dynamic_slice_in_dim, start_index=rank * c, slice_size=c)

    def chunk(dW_VD, args):
        i, h_cD, y_c, vectors_c = args
        h_cD = jnp.where(vectors_c["weight"][:, None] > 0, h_cD, 0)  # a masked NaN must not reach dW
        h_CD, y_C = gather(h_cD), gather(y_c) - rank * share
        saved, top, total, product = forward(h_CD, head_VD, rows, temperature)
        here = (y_C >= 0) & (y_C < share)
        target = jnp.sum(h_CD.astype(jnp.float32) * head_VD[jnp.where(here, y_C, 0)], -1) / temperature
        peak = jax.lax.pmax(top, SHARDS)
        scale = jnp.exp(top - peak)
        total, product, target = jax.lax.psum((scale * total, scale * (product + (top - peak) * total),
                                               jnp.where(here, target, 0.0)), SHARDS)
        # One Newton step: a TPU's log alone is good to 1e-4 only.
        log_total = jnp.log(total)
        log_total += total * jnp.exp(-log_total) - 1
        lse, entropy = peak + log_total, log_total - product / total
        logp_c, entropy_c = mine(target - peak - log_total), mine(entropy)
        if terms is None:
            return dW_VD, (logp_c, entropy_c)
        loss_c, gradient = jax.vjp(lambda *a: terms(*a, vectors_c)[0], logp_c, entropy_c)
        g, e = (gather(a) / temperature for a in gradient(jnp.ones_like(loss_c)))
        dh_CD, dW_VD = backward(saved, h_CD, head_VD, y_C, (g, e, lse, entropy), dW_VD, (i == 0).astype(jnp.int32))
        dh_cD = jax.lax.psum_scatter(dh_CD, SHARDS, tiled=True)
        return dW_VD, (logp_c, entropy_c, loss_c, dh_cD.astype(h_cD.dtype))

    chunks = [jnp.pad(a, ((0, -n % c),) + ((0, 0),) * (a.ndim - 1)).reshape(-1, c, *a.shape[1:])
              for a in (h_nD, y_n, *vectors.values())]
    args = (jnp.arange(-(-n // c)), *chunks[:2], dict(zip(vectors, chunks[2:])))
    dW_VD = jax.lax.empty((share, D), jnp.float32) if terms is not None else None
    dW_VD, out = jax.lax.scan(chunk, dW_VD, args)
    out = tuple(a.reshape(-1, *a.shape[2:])[:n] for a in out)
    if terms is None:
        return out
    return *out, rows_to_columns(dW_VD, shards)[:V]

def loss_and_gradients(settings, h_ND, head_VD, targets_N, vectors):
    """`one_device` on every device of the mesh -> (logp [N], entropy [N]), and where there are terms (.., loss
    [N], dh [N, D] in h's dtype, dW [V, D] float32). N is a multiple of their number, D of fsdp * tp."""
    mesh, terms, *_, impl, blocks = settings
    if not blocks:
        blocks = block_sizes(mesh.devices.flat[0].device_kind, h_ND.shape[1], impl)
        settings = settings._replace(blocks=blocks)
    return jax.shard_map(partial(one_device, settings), mesh=mesh, check_vma=False,
                         in_specs=(P(TOKENS), P(None, SHARDS), P(TOKENS), P(TOKENS)),
                         out_specs=(P(TOKENS),) * 4 + (P(None, SHARDS),) if terms else (P(TOKENS),) * 2,
                         )(h_ND, head_VD, targets_N, vectors)

@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(settings, h_ND, head_VD, targets_N, vectors):
    logp_N, entropy_N = loss_and_gradients(settings._replace(terms=None), h_ND, head_VD, targets_N, {
        "weight": vectors["weight"]})
    return settings.terms(logp_N, entropy_N, vectors)[0].sum(), logp_N, entropy_N

def fused_forward(settings, *primals):
    args = jax.tree.map(lambda p: p.value, primals)
    logp_N, entropy_N, loss_N, dh_ND, dW_VD = loss_and_gradients(settings, *args)
    return (loss_N.sum(), logp_N, entropy_N), (args, dh_ND, dW_VD)

def fused_backward(settings, saved, cotangents):
    (h_ND, head_VD, targets_N, vectors), *gradients = saved
    loss, *outer = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)
    gradients = [0.0 if loss is None else a * loss for a in gradients]
    if any(ct is not None for ct in outer):
        g, e = (jnp.zeros_like(vectors["weight"]) if ct is None else ct for ct in outer)
        again = settings._replace(terms=linear_terms, entropic=outer[1] is not None)
        *_, dh_ND, dW_VD = loss_and_gradients(again, h_ND, head_VD, targets_N, {
            "weight": vectors["weight"], "g": g, "e": e})
        gradients = [gradients[0] + dh_ND, gradients[1] + dW_VD]
    return gradients[0].astype(h_ND.dtype), gradients[1].astype(head_VD.dtype), None, None

fused.defvjp(fused_forward, fused_backward, symbolic_zeros=True)

def materialised(h_ND, head_VD, targets_N, mesh, temperature):
    """-> (logp, entropy) by way of the logits of all tokens and what JAX differentiates: for contrast."""
    keep = lambda a, *spec: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*spec)))
    z_NV = dot(keep(h_ND, TOKENS), keep(head_VD.astype(h_ND.dtype)), (1, 1)) / temperature
    log_p = jax.nn.log_softmax(z_NV)
    return (jnp.take_along_axis(log_p, targets_N[:, None], 1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, -1))

def grpo_loss(hidden_ND, head_VD, targets_N, vectors, mesh, *, temperature=1.0, clip_low=0.2, clip_high=0.2,
              beta=0.0, is_cap=0.0, entropy_bonus=0.0, impl="jax", blocks=None):
    """The loss: hidden states, LM head, targets in [0, V) and per-token vectors (see `grpo_terms`) ->
    (loss, tokens), differentiable in hidden_ND and head_VD.

    loss is a float32 scalar, a sum over tokens. tokens: float32 [N], 0 on masked tokens: logp and entropy (their
    cotangents count: build other terms with them), and without gradient clip_fraction, ratio, and logprob_gap,
    kl where they are defined. hidden_ND is in the compute dtype; N must be a multiple of the mesh's devices,
    D of fsdp * tp. impl: jax (chunks), pallas (TPU; ValueError elsewhere) or full (all logits, for contrast).
    """
    with jax.named_scope("grpo_loss"):
        terms = partial(grpo_terms, clip_low=clip_low, clip_high=clip_high, beta=beta, is_cap=is_cap,
                        entropy_bonus=entropy_bonus)
        mask = vectors["weight"] > 0
        if impl == "full":
            hidden_ND = jnp.where(mask[:, None], hidden_ND, 0)
            logp_N, entropy_N = materialised(hidden_ND, head_VD, targets_N, mesh, temperature)
            loss = terms(logp_N, entropy_N, vectors)[0].sum()
        else:
            settings = Settings(mesh, terms, bool(entropy_bonus), temperature, impl, blocks)
            loss, logp_N, entropy_N = fused(settings, hidden_ND, head_VD, targets_N, vectors)
        stats = terms(jax.lax.stop_gradient(logp_N), jax.lax.stop_gradient(entropy_N), vectors)[1]
        return loss, stats | {"logp": jnp.where(mask, logp_N, 0.0), "entropy": jnp.where(mask, entropy_N, 0.0)}

def score(hidden_ND, head_VD, targets_N, mesh, *, temperature=1.0, impl="jax", blocks=None):
    """-> (logp [N], entropy [N]) of the targets: one GEMM, no gradients. Arguments as in `grpo_loss`."""
    with jax.named_scope("score"):
        if impl == "full":
            return materialised(hidden_ND, head_VD, targets_N, mesh, temperature)
        settings = Settings(mesh, None, False, temperature, impl, blocks)
        return loss_and_gradients(settings, hidden_ND, head_VD, targets_N, {"weight": jnp.ones(len(targets_N))})

# ---------------------------------------------------------------- benchmark
def tpu_mesh(slice_type, devices=0):
    """A TPU slice such as v6e-8, of which there need be none here -> Mesh 1, devices, 1 to compile for.
    Needs libtpu, x86-64 Linux, and to run before JAX has made its backends."""
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                      TPU_WORKER_HOSTNAMES="localhost")
    from jax.experimental import topologies
    kind, size = re.fullmatch(r"(v4|v5p|v5litepod|v6e)-(\d+)", slice_type).groups()
    cubes = kind in ("v4", "v5p")  # their sizes count cores, two a chip, and chips come in three dimensions
    chips = int(size) // 2 if cubes else int(size)
    bounds = ({4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"} if cubes else
              {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"})[chips]
    options = ({"chip_config_name": "megacore"} if cubes else
               {"chips_per_host_bounds": {1: [1, 1, 1], 8: [2, 4, 1]}.get(chips, [2, 2, 1])})
    name = f"{kind.replace('litepod', 'e')}:{bounds}"
    found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    return Mesh(np.array(found[:devices or None]).reshape(1, -1, 1), TOKENS)
