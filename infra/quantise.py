"""The weights of a rollout in int8: which of them, and how.

Symmetric, with a scale for each output channel, by which a product is multiplied afterwards.
Matrices of the layers, the LM head and the embedding are quantised. Where the last two are one,
it is one table: as the head's product sums over D, a token has one scale, which suits the look-up
of its row too.
"""

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import model
from model import Quantised

# The dimensions of a matrix, and those of them that its product sums over.
CONTRACTED = {
    "LDNH": "D",  # queries
    "LDKH": "D",  # keys, values
    "LNHD": "NH",  # the output of attention
    "LDF": "D",  # gate, up
    "LFD": "F",  # down
    "VD": "D",  # the LM head, the embedding
}


def dtypes(cfg) -> tuple[str, bool]:
    """The flags -> (dtype of a rollout's activations, KV cache and weights that are not quantised,
    whether its matrices are)."""
    quantised = cfg.rollout_dtype == "int8"
    dtype = cfg.dtype if quantised else cfg.rollout_dtype
    return dtype, quantised


def contracted_axes(name: str) -> tuple:
    """The axes of a parameter, from the last, that its product sums over; () for no matrix."""
    dims = model.letters(name)
    contracted = CONTRACTED.get(dims, "")
    # From the last, so that they hold for a stack of layers and for one of them.
    return tuple(dims.index(letter) - len(dims) for letter in contracted)


def cast(name: str, a, dtype, quantised: bool):
    """A parameter, complete or of one layer, as a rollout has it: in dtype, or Quantised."""
    axes = contracted_axes(name)
    if not quantised or not axes:
        return a.astype(dtype)
    a = a.astype(jnp.float32)
    # Where these dimensions are sharded, the maximum is over all devices.
    largest = jnp.max(jnp.abs(a), axes, keepdims=True)
    # A channel of zeros stays one. NaN is in the scale, as int8 has none.
    scale = jnp.where(largest == 0, 1, largest / 127)
    return Quantised(jnp.round(a / scale).astype(jnp.int8), scale)


def cast_spec(name: str, spec: P, quantised: bool):
    """PartitionSpec of a parameter, complete or of one layer -> that of what `cast` makes of it."""
    axes = contracted_axes(name)
    if not quantised or not axes:
        return spec
    of_scale = list(spec)
    for axis in axes:
        # Scales have size 1 here.
        of_scale[axis] = None
    return Quantised(spec, P(*of_scale))
