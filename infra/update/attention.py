"""Attention for the training forward: causal, and within the segments of packed rows.

Each function takes q_BNTH (already scaled by H ** -0.5), k_BKTH, v_BKTH and segments_BT (int32),
and returns [B, N, T, H]. A token attends to its own segment, up to and including itself.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

import model
from infra.host.console import check

ATTENTION = "splash", "cudnn", "blockwise"


def segment_attention(name: str, platform: str) -> Callable:
    """The attention function of this name.

    splash is for TPUs, and interpreted elsewhere; cudnn is for GPUs; blockwise is for any device.
    """
    if name == "splash":
        return partial(splash, is_interpreted=platform != "tpu")
    return {"cudnn": cudnn, "blockwise": blockwise}[name]


def blockwise(q_BNTH, k_BKTH, v_BKTH, segments_BT):
    """Attention in plain JAX, which holds the scores of 512 queries at a time."""
    T = q_BNTH.shape[2]

    # Scores are recomputed in the backward pass.
    @partial(jax.checkpoint, static_argnums=(0, 1))
    def block(start, end):
        q = q_BNTH[:, :, start:end]
        k = k_BKTH[:, :, :end]
        v = v_BKTH[:, :, :end]
        mask = segment_mask(segments_BT, start, end)
        return model.attention(q, k, v, mask)

    # The last block may be shorter.
    blocks = []
    for start in range(0, T, 512):
        blocks.append(block(start, min(start + 512, T)))
    return jnp.concatenate(blocks, 2)


def cudnn(q_BNTH, k_BKTH, v_BKTH, segments_BT):
    """Attention by cuDNN's kernel, which never holds scores in memory.

    Exits with code 2 if H > 128.
    """
    H = q_BNTH.shape[3]
    check(
        H <= 128,
        f"attention = cudnn supports a head dim of at most 128, but the model's is {H}; try "
        "--attention blockwise",
    )
    # jax.nn.dot_product_attention expects [B, T, N, H].
    q = q_BNTH.transpose(0, 2, 1, 3)
    k = k_BKTH.transpose(0, 2, 1, 3)
    v = v_BKTH.transpose(0, 2, 1, 3)
    # `is_causal` masks later keys. For segments, JAX turns the mask into a bfloat16 bias [T, T] for
    # each row, which the kernel reads.
    in_segment = segments_BT[:, :, None] == segments_BT[:, None]
    attend = partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=True)
    out = attend(q, k, v, mask=in_segment[:, None], scale=1.0)
    return out.transpose(0, 2, 1, 3)


def segment_mask(segments_BT, start, end):
    """The mask of queries start .. end - 1 over keys 0 .. end - 1, bool [B, T, S]."""
    # A segment's tokens are contiguous, so their order in the row is their order in the segment.
    segments_of_queries = segments_BT[:, start:end]
    segments_of_keys = segments_BT[:, :end]
    same_segment = segments_of_queries[:, :, None] == segments_of_keys[:, None]
    # No query attends to a later key.
    queries = jnp.arange(start, end)
    keys = jnp.arange(end)
    causal = queries[:, None] >= keys
    return same_segment & causal


def splash(q_BNTH, k_BKTH, v_BKTH, segments_BT, is_interpreted):
    """Attention by JAX's Pallas kernel for TPUs, which never holds scores in HBM."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, N, T, H = q_BNTH.shape
    # The kernel needs complete blocks of tokens, and a head dim of 64 or a multiple of 128. A block
    # has 512 tokens; a shorter row is one block, padded to a multiple of 128 tokens.
    block = min(512, -(-T // 128) * 128)
    pad_T = -T % block
    pad_H = -H % (64 if H <= 64 else 128)

    def pad(a):
        widths = [(0, 0), (0, 0), (0, pad_T), (0, pad_H)]
        return jnp.pad(a, widths)

    sizes = ["q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute"]
    blocks = {f"block_{name}": block for name in sizes}
    if (T + pad_T) % 1024 == 0:
        # The backward kernel writes one dq per block of keys, and summing them is slow. So give it
        # longer blocks of keys if they divide the row.
        blocks["block_kv_dkv"] = 1024
    # All heads use the same mask.
    causal = masks.CausalMask((T + pad_T, T + pad_T))
    attend = kernel.make_splash_mha(
        masks.MultiHeadMask([causal] * N),
        block_sizes=kernel.BlockSizes(**blocks, use_fused_bwd_kernel=True),
        head_shards=1,
        q_seq_shards=1,
        interpret=is_interpreted,
    )

    def attend_row(q, k, v, segments):
        return attend(q, k, v, kernel.SegmentIds(segments, segments))

    # The padding of a row is a segment of its own.
    widths = [(0, 0), (0, pad_T)]
    segments = jnp.pad(segments_BT, widths, constant_values=-1)
    rows = (pad(q_BNTH), pad(k_BKTH), pad(v_BKTH), segments)
    out = jax.vmap(attend_row)(*rows)
    return out[:, :, :T, :H]
