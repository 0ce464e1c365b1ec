"""Compile both Pallas kernels of the loss for an absent v6e: `aot_kernels.py TILES`.

TILES is the number of tiles of the LM head. libtpu needs a process of its own: LIBTPU_INIT_ARGS
tells it, when it loads, where to write the cycles that it counts.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import kernel
from tools import absent_devices

HIDDEN = 2048


def compile_kernel(name, sharding, function, *inputs, donate=()):
    """Compile the one Pallas kernel that a function calls, without the rest of the function."""
    jaxpr = jax.make_jaxpr(function)(*inputs)
    (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]

    def run_kernel(*kernel_inputs):
        # The compiler names its file of cycles after this scope.
        with jax.named_scope(name):
            return call.primitive.bind(*kernel_inputs, **call.params)

    array = partial(jax.ShapeDtypeStruct, sharding=sharding)
    kernel_inputs = [array(var.aval.shape, var.aval.dtype) for var in call.invars]
    jax.jit(run_kernel, donate_argnums=donate).lower(*kernel_inputs).compile()


def main(tiles):
    device = absent_devices.of_kind("v6e-1")[0]
    array = jax.ShapeDtypeStruct
    blocks = kernel.block_sizes(device.device_kind, HIDDEN)
    tokens = blocks.chunk_tokens
    # Only complete tiles, so that no row is left to plain JAX.
    vocab = tiles * blocks.tile_vocab
    on_device = SingleDeviceSharding(device)

    head_VD = array((vocab, HIDDEN), jnp.bfloat16)
    h_CD = array((tokens, HIDDEN), jnp.bfloat16)

    def forward(head_VD, h_CD):
        return kernel.pallas_forward(blocks, tiles, True, head_VD, vocab, 1.0, h_CD)

    compile_kernel("grpo_forward", on_device, forward, head_VD, h_CD)

    shifted_VC = array((vocab, tokens), jnp.bfloat16)
    steps = blocks.tile_vocab // blocks.step_rows
    tile_max = array((tiles, steps, 1, tokens), jnp.float32)
    z_rest = array((tokens, 0), jnp.float32)
    saved = (shifted_VC, tile_max, z_rest)
    row_C = array((tokens,), jnp.int32)
    per_token = [array((tokens,), jnp.float32)] * 4
    dW_VD = array((vocab, HIDDEN), jnp.float32)
    is_first_chunk = array((), jnp.int32)
    backward = partial(kernel.pallas_backward, blocks, False, jnp.bfloat16)
    inputs = (head_VD, saved, h_CD, row_C, per_token, dW_VD, is_first_chunk)
    # The last input, dW, is donated: as in the trainer, the kernel adds to it in place.
    compile_kernel("grpo_backward", on_device, backward, *inputs, donate=7)


if __name__ == "__main__":
    main(int(sys.argv[1]))
