"""Where weights and rows lie during a rollout."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra import memory

LAYOUTS = "replicated", "tp", "fsdp", "maxtext"

def rollout_layout(kind, cfg, mesh, dtype):
    """-> (Layout, why). replicated: whole weights on each device; tp: split by key/value heads within a host;
    fsdp: as in training, gathered layer by layer in each step; maxtext: likewise, rows over dp only; auto:
    replicated where that takes a quarter of the memory, else tp where that takes half, else fsdp."""
    device, (dp, fsdp, tp), n = mesh.devices.flat[0], mesh.devices.shape, mesh.size
    host = sum(d.process_index == device.process_index for d in mesh.devices.flat)
    t = max(t for t in range(1, host + 1) if not (host % t or cfg.K % t or cfg.F % t or cfg.V % t))
    gib, why = cfg.n_params * jnp.dtype(dtype).itemsize / 2 ** 30, "as asked"
    free = memory.least_memory(mesh)
    if kind == "auto":
        kind = "replicated" if gib <= free / 4 else "tp" if t > 1 and gib / t <= free / 2 else "fsdp"
        why = f"a device has {free:.0f} GiB" if math.isfinite(free) else "memory is not known"
    dims = {"replicated": (n, 1, 1), "tp": (n // t, 1, t)}.get(kind, (dp, fsdp * tp, 1))
    each = gib / math.prod(dims[1:])
    rows, order = ("dp",) if kind == "maxtext" else model.ROWS, "LSKBH" if device.platform == "tpu" else "LBKSH"
    return (model.Layout(kind, Mesh(mesh.devices.reshape(dims), mesh.axis_names), rows, order),
            f"{kind}, {dims[0]} x {n // dims[0]} devices, {each:.2g} of {gib:.2g} GiB of weights each; {why}")

def rollout_spec(name, layout):
    """PartitionSpec of a parameter in a rollout."""
    if layout.kind in ("fsdp", "maxtext"):
        return model.spec(name)
    return P(*("tp" if c in "NKFV" else None for c in model.letters(name)))

@cache
def compiled_move(names, layout, dtype):
    """The compiled `to_rollout`, of parameters with these names."""
    def move(tree, cut):
        tree = {name: jax.device_put(a, model.DEVICE).astype(dtype) for name, a in tree.items()}
        if layout.kind == "tp":  # by way of the whole, as XLA knows no shorter one, and warns
            tree = {name: model.constrain(a, layout.mesh) for name, a in tree.items()}
        return {k: model.constrain(a, layout.mesh, *rollout_spec(k, layout)[cut:]) for k, a in tree.items()}
    def move_all(params):  # a layer at a time: all at once would take their memory twice
        top = {name: a for name, a in params.items() if name != "layers"}
        return move(top, 0) | {"layers": jax.lax.map(partial(move, cut=1), params["layers"])}
    places = {name: NamedSharding(layout.mesh, rollout_spec(name, layout)) for name in names}
    return jax.jit(move_all, out_shardings=model.nest(places))  # constraints alone may be dropped

def to_rollout(params, layout, dtype):
    """The weights of a rollout: cast where they lie, then moved to its layout."""
    return compiled_move(tuple(model.flatten(params)), layout, dtype)(params)

def bytes_read(cfg, layout, dtype):
    """Bytes that a device cannot but read in a decode step -> (of weights, of the cache a row and slot)."""
    tp, each = layout.mesh.shape["tp"], jnp.dtype(dtype).itemsize
    return cfg.n_multiplied // tp * each, 2 * cfg.L * cfg.K // tp * cfg.H * each

def row_shards(layout):
    return math.prod(layout.mesh.shape[axis] for axis in layout.rows)

def rows_that_fit(cfg, layout, dtype, slots, resting):
    """Rows that a device decodes at once beside the weights and `resting` bytes: their cache takes half of
    what is free; the rest is for prompts, logits, and the one from which the last cache grew, of up to 3/4
    its size. Of sizes alone, so that a run that resumes decodes the same rows together."""
    weights = cfg.n_params * jnp.dtype(dtype).itemsize / (layout.mesh.shape["fsdp"] * layout.mesh.shape["tp"])
    free = memory.least_memory(layout.mesh) * 2 ** 30 - resting - weights
    return max(1, int(min(2 ** 30, 0.5 * free / (bytes_read(cfg, layout, dtype)[1] * slots))))
