"""The weights of a rollout in int8: which of them, and how.

Symmetric, with a scale for each output channel: the least error that costs nothing, as a product is
multiplied by its scales afterwards. Matrices of the layers and the LM head are quantised. An
embedding that is the head too is one table, also looked up in int8: since the head's product sums
over D, a token has one scale in both. An embedding of its own stays, as few of its rows are read.
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
    "VD": "D",  # the LM head
}


def dtypes(cfg) -> tuple[str, bool]:
    """The flags -> (dtype of a rollout's activations, KV cache and weights that are not quantised,
    whether its matrices are)."""
    quantised = cfg.rollout_dtype == "int8"
    dtype = cfg.dtype if quantised else cfg.rollout_dtype
    return dtype, quantised


def contracted_axes(name: str, tied: bool) -> tuple:
    """The axes of a parameter, from the last, that its product sums over; () for no product."""
    # An embedding that is not the LM head is only looked up.
    if name == "embed_VD" and not tied:
        return ()
    dims = model.letters(name)
    contracted = CONTRACTED.get(dims, "")
    # From the last, so that they hold for a stack of layers and for one of them.
    return tuple(dims.index(letter) - len(dims) for letter in contracted)


def cast(name: str, a, dtype, quantised: bool, tied: bool):
    """A parameter, complete or of one layer, as a rollout has it: in dtype, or Quantised."""
    axes = contracted_axes(name, tied)
    if not quantised or not axes:
        return a.astype(dtype)
    a = a.astype(jnp.float32)
    # Where these dimensions are sharded, the maximum is over all devices.
    largest = jnp.max(jnp.abs(a), axes, keepdims=True)
    # A channel of zeros stays one.
    scale = jnp.where(largest > 0, largest / 127, 1)
    return Quantised(jnp.round(a / scale).astype(jnp.int8), scale)


def cast_spec(name: str, spec: P, quantised: bool, tied: bool):
    """PartitionSpec of a parameter, complete or of one layer -> that of what `cast` makes of it."""
    axes = contracted_axes(name, tied)
    if not quantised or not axes:
        return spec
    of_scale = list(spec)
    for axis in axes:
        # Scales have size 1 here.
        of_scale[axis] = None
    return Quantised(spec, P(*of_scale))
