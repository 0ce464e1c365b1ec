"""Compile both Pallas kernels of the loss for a v6e that is not here: `aot_kernels.py TILES`.

The head has so many tiles. libtpu wants a process of its own, and reads in LIBTPU_INIT_ARGS, when
it loads, where to write the cycles that it counts.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import kernel
from infra import memory

HIDDEN = 2048


def main(tiles):
    device = memory.tpu_devices("v6e-1")[0]
    array = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    blocks = kernel.block_sizes(device.device_kind, HIDDEN)
    tokens = blocks.tokens
    # Complete tiles only, so that nothing is left to plain JAX.
    vocab = tiles * blocks.vocab

    h_CD = array((tokens, HIDDEN), jnp.bfloat16)
    head_VD = array((vocab, HIDDEN), jnp.bfloat16)

    def forward(head_VD, h_CD):
        return kernel.pallas_forward(blocks, tiles, True, head_VD, vocab, 1.0, h_CD)

    jax.jit(forward).lower(head_VD, h_CD).compile()

    z_VC = array((vocab, tokens), jnp.bfloat16)
    top = array((tiles, blocks.vocab // blocks.step, 1, tokens), jnp.float32)
    z_rest = array((tokens, 0), jnp.float32)
    targets_C = array((tokens,), jnp.int32)
    vectors = [array((tokens,), jnp.float32)] * 4
    dW_VD = array((vocab, HIDDEN), jnp.float32)
    is_first_chunk = array((), jnp.int32)
    saved = (z_VC, top, z_rest)
    inputs = (head_VD, saved, h_CD, targets_C, vectors, dW_VD, is_first_chunk)
    # dW is added to in place, as in the trainer.
    backward = partial(kernel.pallas_backward, blocks, False, jnp.bfloat16)
    jax.jit(backward, donate_argnums=5).lower(*inputs).compile()


if __name__ == "__main__":
    main(int(sys.argv[1]))
