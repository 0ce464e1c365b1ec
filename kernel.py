"""The GRPO loss, from hidden states to a number, without ever holding [tokens, vocabulary] logits.

For token i with hidden state h, target y, LM head W [V, D] and temperature T:

    z = h W' / T        logp = z[y] - logsumexp(z)        H = -sum_v p_v log p_v,  p = softmax(z)

    ratio  = exp(logp - old)                    old: log-prob when the answer was sampled, by the trainer
    policy = min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
                                                PPO (arXiv 1707.06347, eq. 7), bounds: DAPO, 2503.14476
    k3     = exp(ref - logp) - (ref - logp) - 1 KL to a frozen reference (GRPO, arXiv 2402.03300, eq. 4)
    cap    = min(exp(old - sampler), is_cap)    truncated importance weight, constant: the sampler's numbers
                                                are not exactly the trainer's
    loss   = sum_i weight_i (beta k3 - cap policy)

`weight` carries mask, aggregation and normalisation, so that any split of the tokens sums to the same.
Given dl/dlogp = g and dl/dH = e, the gradient of the logits is

    dz = (g (onehot(y) - p) - e p (log p + H)) / T

and dh = dz W, dW = dz' h. Forward and backward walk over chunks of tokens; only a chunk's logits ever exist.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

TOKENS = ("dp", "fsdp", "tp")  # inside the loss, tokens are shared out over every device
CHUNK = 1024  # tokens whose logits exist at once, on one device

# ---------------------------------------------------------------- GRPO on [tokens] vectors
def grpo_terms(logp_N, vectors, *, clip_low, clip_high, beta, is_cap):
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
    stats = {"clip_fraction": mask * (clipped * advantage < ratio * advantage), "ratio": mask * ratio}
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
    return vectors["weight"] * loss, jax.lax.stop_gradient(stats)

# ---------------------------------------------------------------- log-prob and entropy in chunks, plain JAX
def chunked(chunk, *arrays):
    """[N, ...] -> [chunks, chunk, ...], zero-padded at the end."""
    N = arrays[0].shape[0]
    return tuple(jnp.pad(a, ((0, -N % chunk),) + ((0, 0),) * (a.ndim - 1)).reshape(-1, chunk, *a.shape[1:])
                 for a in arrays)

def chunk_logits(h_CD, head_VD, temperature):
    return jnp.einsum("CD,VD->CV", h_CD, head_VD, preferred_element_type=jnp.float32) / temperature

def local_forward(temperature, chunk, h_ND, head_VD, targets_N):
    """-> (logp, entropy, logsumexp), float32 [N], of this device's tokens."""
    def one(args):
        h_CD, y_C = args
        z_CV = chunk_logits(h_CD, head_VD, temperature)
        lse_C = jax.nn.logsumexp(z_CV, -1)
        log_p = z_CV - lse_C[:, None]
        entropy_C = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        return jnp.take_along_axis(log_p, y_C[:, None], 1)[:, 0], entropy_C, lse_C

    out = jax.lax.map(one, chunked(chunk, h_ND, targets_N))
    return tuple(a.reshape(-1)[:h_ND.shape[0]] for a in out)

def local_backward(temperature, chunk, h_ND, head_VD, targets_N, lse_N, entropy_N, g_N, e_N):
    """-> (dh [N, D] in h's dtype, dW [V, D] float32) of this device's tokens, logits formed a second time."""
    def one(dW_VD, args):
        h_CD, y_C, lse_C, entropy_C, g_C, e_C = args
        log_p = chunk_logits(h_CD, head_VD, temperature) - lse_C[:, None]
        hit = y_C[:, None] == jnp.arange(head_VD.shape[0])
        g, e, H = g_C[:, None], e_C[:, None], entropy_C[:, None]
        dz = ((g * hit - jnp.exp(log_p) * (g + e * (log_p + H))) / temperature).astype(h_CD.dtype)
        dW_VD += jnp.einsum("CV,CD->VD", dz, h_CD, preferred_element_type=jnp.float32)
        dh_CD = jnp.einsum("CV,VD->CD", dz, head_VD, preferred_element_type=jnp.float32)
        return dW_VD, dh_CD.astype(h_CD.dtype)

    parts = chunked(chunk, h_ND, targets_N, lse_N, entropy_N, g_N, e_N)
    dW_VD, dh = jax.lax.scan(one, jnp.zeros(head_VD.shape, jnp.float32), parts)
    return dh.reshape(-1, h_ND.shape[1])[:h_ND.shape[0]], dW_VD

# ---------------------------------------------------------------- the same over a mesh
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def logp_entropy(mesh, temperature, chunk, h_ND, head_VD, targets_N):
    """Log-prob of each target and entropy of its distribution, float32 [N]; differentiable in h and head.

    h_ND in the compute dtype, N a multiple of the mesh's device count; head_VD float32, fsdp*tp divides D;
    targets_N int32 in [0, V). A device holds [chunk, V] float32 and the head in h's dtype.
    """
    return _logp_entropy_fwd(mesh, temperature, chunk, h_ND, head_VD, targets_N)[0]

def _logp_entropy_fwd(mesh, temperature, chunk, h_ND, head_VD, targets_N):
    local = partial(local_forward, temperature, min(chunk, h_ND.shape[0] // mesh.size))
    local = jax.shard_map(local, mesh=mesh, in_specs=(P(TOKENS), P(), P(TOKENS)), out_specs=P(TOKENS),
                          check_vma=False)
    logp_N, entropy_N, lse_N = local(h_ND, head_VD.astype(h_ND.dtype), targets_N)  # cast, then gathered
    return (logp_N, entropy_N), (h_ND, head_VD, targets_N, lse_N, entropy_N)

def _logp_entropy_bwd(mesh, temperature, chunk, saved, cotangents):
    h_ND, head_VD, *vectors = saved

    def local(*args):
        dh_ND, dW_VD = local_backward(temperature, min(chunk, args[0].shape[0]), *args)
        dW_VD = jax.lax.psum_scatter(dW_VD, ("fsdp", "tp"), scatter_dimension=1, tiled=True)
        return dh_ND, jax.lax.psum(dW_VD, "dp")

    local = jax.shard_map(local, mesh=mesh, in_specs=(P(TOKENS), P()) + (P(TOKENS),) * 5,
                          out_specs=(P(TOKENS), P(None, ("fsdp", "tp"))), check_vma=False)
    dh_ND, dW_VD = local(h_ND, head_VD.astype(h_ND.dtype), *vectors, *cotangents)
    return dh_ND, dW_VD.astype(head_VD.dtype), None

logp_entropy.defvjp(_logp_entropy_fwd, _logp_entropy_bwd)

def grpo_loss(hidden_ND, head_VD, targets_N, vectors, mesh, *, temperature, clip_low, clip_high, beta, is_cap,
              chunk=CHUNK):
    """The loss: hidden states, LM head, targets and per-token vectors (see `grpo_terms`) -> (loss, stats).

    loss is a float32 scalar, the sum over tokens; stats are float32 [N] without gradient, 0 on masked tokens:
    entropy, nll, clip_fraction, ratio, and logprob_gap, kl where they are defined.
    """
    with jax.named_scope("grpo_loss"):
        logp_N, entropy_N = logp_entropy(mesh, temperature, chunk, hidden_ND, head_VD, targets_N)
        loss_N, stats = grpo_terms(logp_N, vectors, clip_low=clip_low, clip_high=clip_high, beta=beta,
                                   is_cap=is_cap)
        mask = vectors["weight"] > 0
        stats |= {"entropy": jnp.where(mask, entropy_N, 0.0), "nll": jnp.where(mask, -logp_N, 0.0)}
        return jnp.sum(loss_N), jax.lax.stop_gradient(stats)
