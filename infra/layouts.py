"""Where the weights, rows and KV cache of a rollout lie, and moving the weights there."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra import memory, quantise
from infra.log import check, say
from model import ModelConfig

# replicated: complete weights on each device. tp: split by key/value heads within a host. fsdp:
# sharded as in training, and all-gathered layer by layer in each step. maxtext: sharded like fsdp,
# with the rows split over dp only.
LAYOUTS = "replicated", "tp", "fsdp", "maxtext"


@dataclass(frozen=True)
class Layout:
    """Where the rows, weights and KV cache of a rollout lie."""

    kind: str  # one of LAYOUTS
    mesh: Mesh  # the training mesh's devices, regrouped
    rows: tuple  # the mesh axes that share out the rows
    order: str  # of a cache's dimensions, by letter: "LBKSH"

    @property
    def cache_spec(self) -> P:
        axes = {"B": self.rows, "K": "tp"}
        return P(*(axes.get(letter) for letter in self.order))


# ---------------------------------------------------------------- the choice
def largest_tp(cfg: ModelConfig, mesh: Mesh) -> int:
    """Devices of a host over which key/value heads, F and V can be split."""
    process = mesh.devices.flat[0].process_index
    host_devices = sum(device.process_index == process for device in mesh.devices.flat)
    must_divide = host_devices, cfg.K, cfg.F, cfg.V
    sizes = range(1, host_devices + 1)
    possible = [n for n in sizes if all(total % n == 0 for total in must_divide)]
    return max(possible)


def smallest_kind_that_fits(weights_gib: float, free_gib: float, tp: int) -> str:
    """The layout with the least communication that leaves room for a KV cache."""
    if weights_gib <= free_gib / 4:
        return "replicated"
    if tp > 1 and weights_gib / tp <= free_gib / 2:
        return "tp"
    return "fsdp"


def rollout_layout(
    kind: str, cfg: ModelConfig, mesh: Mesh, dtype, rollout_dtype=None
) -> tuple[Layout, str]:
    """-> (Layout of a kind, or of the one that suits the memory for "auto"; why, in words).

    dtype: of the weights of an evaluation, which have to fit too. rollout_dtype: of those of a
    rollout, if another.
    """
    n = mesh.size
    tp = largest_tp(cfg, mesh)
    rollout_dtype = jnp.dtype(rollout_dtype or dtype)
    weights_gib = cfg.n_params * jnp.dtype(dtype).itemsize / 2**30
    rollout_gib = cfg.n_params * rollout_dtype.itemsize / 2**30
    why = "as asked"
    free_gib = memory.least_memory(mesh)
    if kind == "auto":
        kind = smallest_kind_that_fits(weights_gib, free_gib, tp)
        is_known = math.isfinite(free_gib)
        why = f"a device has {free_gib:.0f} GiB" if is_known else "memory is not known"

    # The devices of the training mesh, in the same order.
    training_dp, training_fsdp, training_tp = mesh.devices.shape
    if kind == "replicated":
        dims = n, 1, 1
    elif kind == "tp":
        dims = n // tp, 1, tp
    else:
        dims = training_dp, training_fsdp * training_tp, 1
    rollout_mesh = Mesh(mesh.devices.reshape(dims), mesh.axis_names)
    rows = ("dp",) if kind == "maxtext" else model.ROWS
    # On TPUs a step then writes complete tiles: one slot of all rows.
    order = "LSKBH" if mesh.devices.flat[0].platform == "tpu" else "LBKSH"

    shards = math.prod(dims[1:])
    text = (
        f"{kind}, {dims[0]} x {shards} devices, {rollout_gib / shards:.2g} of "
        f"{rollout_gib:.2g} GiB of {rollout_dtype} weights each; {why}"
    )
    return Layout(kind, rollout_mesh, rows, order), text


def choose_layout(kind: str, cfg: ModelConfig, mesh: Mesh, dtype, rollout_dtype) -> Layout:
    """The layout of the rollout, printed with its reason; exit 2 where tp was asked for in vain."""
    layout, why = rollout_layout(kind, cfg, mesh, dtype, rollout_dtype)
    check(
        kind != "tp" or layout.mesh.shape["tp"] > 1,
        f"rollout_sharding = tp finds nothing that divides {jax.local_device_count()} local "
        f"devices, {cfg.K} key/value heads, feed-forward size {cfg.F} and vocabulary {cfg.V}; try "
        "--rollout_sharding auto",
    )
    say(f"rollout: {why}")
    return layout


def rollout_spec(name: str, layout: Layout) -> P:
    """PartitionSpec of a parameter in a rollout."""
    if layout.kind in ("fsdp", "maxtext"):
        return model.spec(name)
    axes = ["tp" if letter in "NKFV" else None for letter in model.letters(name)]
    return P(*axes)


# ---------------------------------------------------------------- moving the weights
def to_rollout(params: dict, layout: Layout, dtype, quantised: bool = False) -> dict:
    """The weights of a rollout: cast or quantised where they lie, then moved to its layout."""
    names = tuple(model.flatten(params))
    training_mesh = params["norm_D"].sharding.mesh
    move = compiled_move(names, training_mesh, layout, dtype, quantised)
    return move(params)


@cache
def compiled_move(names: tuple, training_mesh: Mesh, layout: Layout, dtype, quantised: bool):
    """The compiled `to_rollout`, of parameters with these names."""
    specs = {
        name: quantise.cast_spec(name, rollout_spec(name, layout), quantised) for name in names
    }

    def move_array(a, from_spec, to_spec):
        # Otherwise XLA would move it first, in float32, and cast it there.
        a = model.constrain(a, training_mesh, *from_spec)
        if layout.kind == "tp":
            # By way of complete weights, as XLA knows no shorter way, and warns.
            a = model.constrain(a, layout.mesh)
        return model.constrain(a, layout.mesh, *to_spec)

    def move(name, a):
        # With --offload params they come from the host's memory.
        a = quantise.cast(name, jax.device_put(a, model.DEVICE), dtype, quantised)
        here = quantise.cast_spec(name, model.spec(name), quantised)
        there = specs[name]
        if name.startswith("layers/"):
            # In a layer of the stack, weights have lost their dimension L.
            here, there = jax.tree.map(lambda spec: P(*spec[1:]), (here, there))
        return jax.tree.map(move_array, a, here, there)

    def move_layer(layer):
        return {name: move(f"layers/{name}", a) for name, a in layer.items()}

    def move_all(params):
        top = {name: move(name, a) for name, a in params.items() if name != "layers"}
        # A layer at a time, as all at once would take their memory twice.
        layers = jax.lax.map(move_layer, params["layers"])
        return top | {"layers": layers}

    # XLA may drop constraints, but not the shardings of what a program returns.
    places = jax.tree.map(partial(NamedSharding, layout.mesh), model.nest(specs))
    return jax.jit(move_all, out_shardings=places)


def abstract_weights(cfg: ModelConfig, layout: Layout, dtype, quantised: bool) -> dict:
    """Shapes and shardings of a rollout's weights; the devices need not be here."""

    def abstract(a, spec):
        sharding = NamedSharding(layout.mesh, spec)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    weights = {}
    for name, shape in model.shapes(cfg).items():
        master = jax.ShapeDtypeStruct(shape, jnp.float32)
        a = jax.eval_shape(partial(quantise.cast, name, dtype=dtype, quantised=quantised), master)
        specs = quantise.cast_spec(name, rollout_spec(name, layout), quantised)
        weights[name] = jax.tree.map(abstract, a, specs)
    return model.nest(weights)


# ---------------------------------------------------------------- rows and bytes
def bytes_read(cfg: ModelConfig, layout: Layout, dtype, quantised: bool = False) -> tuple[int, int]:
    """Bytes that a device cannot but read in a decode step -> (of the weights, of the KV cache per
    row and slot)."""
    tp = layout.mesh.shape["tp"]
    itemsize = jnp.dtype(dtype).itemsize
    # Scales, like norms and biases, are few.
    weight_bytes = cfg.n_multiplied // tp
    if not quantised:
        weight_bytes *= itemsize
    slot_bytes = 2 * cfg.L * cfg.K // tp * cfg.H * itemsize
    return weight_bytes, slot_bytes


def row_shards(layout: Layout) -> int:
    """Parts that the rows of a rollout are split into."""
    return math.prod(layout.mesh.shape[axis] for axis in layout.rows)


def rows_that_fit(cfg: ModelConfig, layout: Layout, dtype, slots: int, resting: int) -> int:
    """Rows that a device decodes at once beside the weights, in dtype, and `resting` bytes.

    Their KV cache, of so many slots, takes half of what is free. The rest is for prompts, logits,
    and the cache that it grew from, of up to 3/4 its size.
    """
    # Computed from sizes alone, so that a run that resumes decodes the same rows together.
    shards = layout.mesh.shape["fsdp"] * layout.mesh.shape["tp"]
    weight_bytes = cfg.n_params * jnp.dtype(dtype).itemsize / shards
    device_bytes = memory.least_memory(layout.mesh) * 2**30
    free_bytes = device_bytes - resting - weight_bytes
    _, slot_bytes = bytes_read(cfg, layout, dtype)
    rows = 0.5 * free_bytes / (slot_bytes * slots)
    return max(1, int(min(2**30, rows)))


# ---------------------------------------------------------------- the state of decoding
class State(NamedTuple):
    """What decoding carries from token to token, over all devices."""

    keys: jax.Array  # the KV cache, its dimensions in the layout's order
    values: jax.Array
    hidden_BD: jax.Array  # of the last token, after the last norm


def shard_rows(a: np.ndarray, layout: Layout) -> jax.Array:
    """An array that every process has complete, split over the devices by its rows."""
    sharding = NamedSharding(layout.mesh, P(layout.rows))
    return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])


def state_specs(layout: Layout) -> State:
    """PartitionSpecs of a state's arrays."""
    return State(layout.cache_spec, layout.cache_spec, P(layout.rows))


@partial(jax.jit, static_argnames=("B", "cfg", "layout", "slots", "dtype"))
def empty_state(*, B: int, cfg: ModelConfig, layout: Layout, slots: int, dtype) -> State:
    """The state of B rows with an empty cache."""
    sizes = {"L": cfg.L, "B": B, "K": cfg.K, "S": slots, "H": cfg.H}
    cache = jnp.zeros([sizes[letter] for letter in layout.order], dtype)
    hidden_BD = jnp.zeros((B, cfg.D), dtype)
    state = State(cache, cache, hidden_BD)

    def place(a, spec):
        return model.constrain(a, layout.mesh, *spec)

    return jax.tree.map(place, state, state_specs(layout))


@partial(jax.jit, static_argnames=("layout", "slots"))
def resize_array(a, index_B, *, layout: Layout, slots: int) -> jax.Array:
    """Some rows of one array of a state; of the cache, with so many slots.

    index_B: the rows to take, counted within each device's.
    """
    is_cache = a.ndim > 2
    row_axis = layout.order.index("B")

    def resize(a, index_B):
        if not is_cache:
            return jnp.take(a, index_B, 0)
        sizes = dict(zip(layout.order, a.shape, strict=True))
        sizes |= {"B": len(index_B), "S": slots}
        new = jnp.zeros([sizes[letter] for letter in layout.order], a.dtype)

        # A layer at a time, as otherwise a copy of the complete cache would come between.
        def copy_layer(i, new):
            layer = jax.lax.dynamic_slice_in_dim(a, i, 1)
            layer = jnp.take(layer, index_B, row_axis, mode="clip")
            return jax.lax.dynamic_update_slice(new, layer, [i, 0, 0, 0, 0])

        return jax.lax.fori_loop(0, len(a), copy_layer, new)

    # Rows move within a device only.
    array_spec = layout.cache_spec if is_cache else P(layout.rows)
    resize_shards = jax.shard_map(
        resize,
        mesh=layout.mesh,
        in_specs=(array_spec, P(layout.rows)),
        out_specs=array_spec,
        check_vma=False,
    )
    return resize_shards(a, index_B)
