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
    vocab = tiles * blocks.vocab

    h_CD = array((tokens, HIDDEN), jnp.bfloat16)
    head_VD = array((vocab, HIDDEN), jnp.bfloat16)
    forward = partial(kernel.forward_tiles, blocks, tiles, True, temperature=1.0)
    jax.jit(forward).lower(h_CD, head_VD).compile()

    is_first_chunk = array((1,), jnp.int32)
    targets_1C = array((1, tokens), jnp.int32)
    vectors_4C = array((4, tokens), jnp.float32)
    z_VC = array((vocab, tokens), jnp.bfloat16)
    top = array((tiles, blocks.vocab // blocks.step, 1, tokens), jnp.float32)
    dW_VD = array((vocab, HIDDEN), jnp.float32)
    inputs = (is_first_chunk, targets_1C, vectors_4C, h_CD, head_VD, z_VC, top, dW_VD)
    # dW is added to in place, as in the trainer.
    backward = partial(kernel.backward_tiles, blocks, False, jnp.bfloat16)
    jax.jit(backward, donate_argnums=len(inputs) - 1).lower(*inputs).compile()


if __name__ == "__main__":
    main(int(sys.argv[1]))
