"""int8 weights for the rollout: which parameters are quantised, and how.

Quantisation is symmetric. Each output channel has one scale, which multiplies the output of the
matmul. The matrices of the layers, the LM head and the embedding are quantised. A tied head and
embedding share one int8 table: the head's matmul sums over D, so each token has one scale, which
also suits the look-up of its row.
"""

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import model
from model import Quantised

# {dimensions of a matrix: the dimensions that its matmul sums over}
CONTRACTED = {
    "LDNH": "D",  # queries
    "LDKH": "D",  # keys, values
    "LNHD": "NH",  # the output of attention
    "LDF": "D",  # gate, up
    "LFD": "F",  # down
    "VD": "D",  # the LM head, the embedding
}


def dtypes(cfg) -> tuple[str, bool]:
    """Returns (dtype of a rollout, whether its matrices are quantised).

    cfg: a Config or an Engine; both have dtype and rollout_dtype. Activations, the KV cache
    and weights that are not quantised have the returned dtype.
    """
    quantised = cfg.rollout_dtype == "int8"
    dtype = cfg.dtype if quantised else cfg.rollout_dtype
    return dtype, quantised


def contracted_axes(name: str) -> tuple:
    """Axes that a parameter's matmul sums over, as negative numbers; () if none."""
    dims = model.letters(name)
    contracted = CONTRACTED.get(dims, "")
    # Negative axes are the same for a stack of layers and for a single layer.
    return tuple(dims.index(letter) - len(dims) for letter in contracted)


def cast(name: str, a, dtype, quantised: bool):
    """Convert a parameter, of all layers or of one, for a rollout: to dtype, or to Quantised."""
    axes = contracted_axes(name)
    if not quantised or not axes:
        return a.astype(dtype)
    a = a.astype(jnp.float32)
    # The maximum is global: if these dimensions are sharded, XLA takes it over all devices.
    largest = jnp.max(jnp.abs(a), axes, keepdims=True)
    # A channel of zeros gets scale 1. A channel with a NaN gets scale NaN, since int8 has no NaN.
    scale = jnp.where(largest == 0, 1, largest / 127)
    return Quantised(jnp.round(a / scale).astype(jnp.int8), scale)


def cast_spec(name: str, spec: P, quantised: bool):
    """PartitionSpec of the result of `cast`. spec: PartitionSpec of the parameter."""
    axes = contracted_axes(name)
    if not quantised or not axes:
        return spec
    scale_spec = list(spec)
    for axis in axes:
        # Scales have size 1 along this axis.
        scale_spec[axis] = None
    return Quantised(spec, P(*scale_spec))
