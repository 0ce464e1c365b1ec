"""Layouts of a rollout: how its weights, rows and KV cache are split over devices.

This module also moves the weights to a layout, and makes and resizes the state of decoding.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as ArrayLayout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra.host import chips, processes
from infra.host.console import check, say
from infra.rollout import quantise
from infra.rollout.kv_cache import Cache
from model import ModelConfig

# replicated: every device has all weights.
# tp: n devices of a host split the weights by heads, F and V. The mesh's tp axis has size gcd(n, K)
# and splits the key/value heads. The fsdp axis has size n / gcd(n, K): devices along it have the
# same key/value heads. They split F, V and the rows of the KV cache, and the query heads, too, if n
# divides N.
# fsdp: matrices are split along D over the training mesh's fsdp and tp axes together, and each
# decode step all-gathers them layer by layer.
# maxtext, as in the trainer MaxText: weights are split as in fsdp, but rows over dp only. XLA then
# sums partial products over the devices, instead of all-gathering weights.
LAYOUTS = "replicated", "tp", "fsdp", "maxtext"
# Estimated seconds of a layer's elementwise operations for one row, and of rearranging rows when
# devices exchange queries or results of attention. Both were fitted to the times that
# tools/clock.py estimates for 0.5B to 14B on v6e. ROW_SECONDS would be too long for GPUs, so only
# TPUs use it. GPUs do use EXCHANGE_SECONDS, for lack of a better estimate.
ROW_SECONDS = 0.08e-6
EXCHANGE_SECONDS = 3e-6
# Mesh axes that split the weights in the layout tp. The first one splits the key/value heads.
WEIGHT_AXES = "tp", "fsdp"


@dataclass(frozen=True)
class Layout:
    """Where the rows, weights and KV cache of a rollout are."""

    kind: str  # one of LAYOUTS
    mesh: Mesh  # the training mesh's devices, regrouped
    rows: tuple  # the mesh axes that shard the rows, except in attention
    cache_rows: tuple  # the mesh axes that shard the rows in attention and the KV cache
    heads: tuple = ("tp",)  # the mesh axes that split query heads
    # Whether each layer has its own arrays of weights and KV cache. Otherwise all layers are in one
    # stack. On GPUs, each layer has its own: XLA would copy a slice of a stack before a matmul.
    by_layer: bool = False

    def stack_sizes(self, L: int) -> list[int]:
        """Number of layers in each stack, for L layers in all."""
        return [1] * L if self.by_layer else [L]

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def is_on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def sharing(self) -> int:
        """The number of devices with the same key/value heads in the layout tp; 1 in other layouts.
        These devices have the same rows outside of attention, and split the rows in attention."""
        return self.mesh.shape["fsdp"] if self.kind == "tp" else 1

    @property
    def shards_D(self) -> bool:
        """Whether matrices are sharded along D, over training's fsdp and tp axes together."""
        return self.kind in ("fsdp", "maxtext")

    @property
    def joins_adapters(self) -> bool:
        """Whether matrices are joined with their adapters (see model.joined_matrices). Joining
        extends D to D + R, which may not be divisible by the number of devices that shard D."""
        return not self.shards_D

    @property
    def split(self) -> tuple:
        """The mesh axes that split F and V."""
        return WEIGHT_AXES if self.kind == "tp" else ("tp",)

    @property
    def cache_spec(self) -> P:
        """PartitionSpec of keys or values [L, B, K, S, H]."""
        return P(None, self.cache_rows, "tp", None, None)


@dataclass(frozen=True)
class RolloutSize:
    """How many answers a rollout decodes, and the lengths of prompts and answers."""

    answers: int  # answers of all processes
    group: int  # answers per prompt
    prompt_slots: int  # KV cache slots per prompt: the padded length of the longest prompt
    answer_slots: int  # KV cache slots per answer: the maximum length of an answer
    quantised: bool = False  # whether the weight matrices are int8
    dtype: str | None = None  # dtype of weights if not int8; None for the dtype of evaluations

    def of_device(self, layout: "Layout") -> tuple[int, int]:
        """Returns (answers of a part of the rows, how many of these share a prompt)."""
        answers = self.answers // row_shards(layout)
        # A part may begin inside a group. Cut groups into equal pieces of the largest size that
        # also divides a part, so that each piece is within one part.
        return answers, math.gcd(self.group, answers)


# ---------------------------------------------------------------- the choice
def tp_sizes(cfg: ModelConfig, mesh: Mesh) -> list[int]:
    """Numbers of devices that can split the weights: they divide a host's devices, F and V."""
    host_devices = mesh.size // processes.host_count(mesh)
    must_divide = host_devices, cfg.F, cfg.V
    sizes = range(2, host_devices + 1)
    return [n for n in sizes if all(total % n == 0 for total in must_divide)]


def layout_of(kind: str, tp: int, cfg: ModelConfig, mesh: Mesh) -> Layout:
    """The layout of this kind. tp: number of devices that split the weights, if kind is tp."""
    training_dp, training_fsdp, training_tp = mesh.devices.shape
    heads = ("tp",)
    if kind in ("replicated", "tp"):
        # A key/value head is not split, so the tp axis must divide K.
        kv_parts = math.gcd(tp, cfg.K)
        dims = mesh.size // tp, tp // kv_parts, kv_parts
        if kind == "tp" and cfg.N % tp == 0:
            heads = WEIGHT_AXES
    else:
        dims = training_dp, training_fsdp * training_tp, 1
    # Keep the devices of the training mesh in the same order.
    rollout_mesh = Mesh(mesh.devices.reshape(dims), mesh.axis_names)
    by_layer = mesh.devices.flat[0].platform == "gpu"
    all_rows = ("dp",) if kind == "maxtext" else model.ROWS
    rows = ("dp",) if kind == "tp" else all_rows
    return Layout(kind, rollout_mesh, rows, all_rows, heads, by_layer)


def seconds_halfway(cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize) -> float:
    """Estimate the seconds of a decode step halfway through a rollout, for replicated weights or
    tp. Halfway, half of the answers to each prompt have ended and half of the slots are filled.

    The estimate is the time to read the weights and the KV cache at full memory bandwidth, plus the
    time of the collectives and of elementwise operations.
    """
    chip = chips.chip(layout.mesh.devices.flat[0])
    weights, slot_bytes = bytes_read(cfg, layout, dtype, size.quantised)
    answers, group = size.of_device(layout)
    slots = answers / group * size.prompt_slots + answers / 2 * size.answer_slots / 2
    cache = slot_bytes * slots
    dp, _, kv_parts = layout.mesh.devices.shape
    sharing = layout.sharing
    rows = size.answers / dp / 2
    row_bytes = rows * jnp.dtype(dtype).itemsize
    # Each layer has two all-reduces of hidden states. If the query heads are not split over fsdp,
    # the one after attention spans fewer devices.
    head_parts = num_shards(P(layout.heads), layout.mesh)
    layer_seconds = sum(
        chips.ring_seconds(row_bytes * cfg.D, parts, chip, rounds=2)
        for parts in (head_parts, sharing * kv_parts)
    )
    if chip.clock:
        layer_seconds += rows * ROW_SECONDS
    # Devices that share a key/value head also exchange the results of attention. If they split the
    # query heads, they exchange the queries, too, and each sends only its own heads.
    if sharing > 1:
        nbytes = row_bytes * cfg.N * cfg.H / kv_parts
        exchanges = 1
        if "fsdp" in layout.heads:
            nbytes /= sharing
            exchanges = 2
        layer_seconds += exchanges * (EXCHANGE_SECONDS + chips.ring_seconds(nbytes, sharing, chip))
    return (weights + cache) / chip.bandwidth + cfg.L * layer_seconds


def fits(cfg: ModelConfig, layout: Layout, dtype, device_gib: float) -> bool:
    """Whether the weights leave room for a KV cache.

    Replicated weights may take a quarter of the memory, and weights split by tp half of it.
    """
    most = device_gib / 4 if layout.kind == "replicated" else device_gib / 2
    return weights_gib(cfg, layout, dtype) <= most


def fastest_layout(cfg: ModelConfig, mesh: Mesh, dtype, size: RolloutSize) -> tuple[Layout, str]:
    """Returns (the layout for "auto", the reason as text).

    On known devices, this is the layout with the shortest estimated step halfway through the
    rollout; among those that take at most 3% longer, the one that splits the weights least. On
    other devices, where the time of a collective is unknown, it is the one that splits the weights
    least. If neither replicated weights nor tp fit, the layout is fsdp.
    """
    device_gib = chips.least_memory(mesh)
    candidates = [layout_of("replicated", 1, cfg, mesh)]
    candidates += [layout_of("tp", tp, cfg, mesh) for tp in tp_sizes(cfg, mesh)]
    fitting = [layout for layout in candidates if fits(cfg, layout, dtype, device_gib)]
    if not fitting:
        why = f"other layouts leave too little of {device_gib:.0f} GiB free"
        return layout_of("fsdp", 1, cfg, mesh), why
    device = mesh.devices.flat[0]
    if not chips.chip(device).link:
        kind = device.device_kind
        return fitting[0], f"splits the weights least, as the speed of {kind} links is unknown"
    ms = {}
    for layout in fitting:
        ms[layout] = 1e3 * seconds_halfway(cfg, layout, size.dtype or dtype, size)
    estimates = [f"{name_of(layout)} {ms[layout]:.2f} ms" for layout in fitting]
    # The candidates split weights over more and more devices. Take the first that is about as fast
    # as the fastest: the estimate leaves out the activations, and each of the devices that split
    # the weights reads and writes the activations of all their rows.
    longest = 1.03 * min(ms.values())
    chosen = next(layout for layout in fitting if ms[layout] <= longest)
    rule = "the least split within 3% of the fastest, by a decode step halfway through the rollout"
    return chosen, f"{rule}: {', '.join(estimates)}"


def name_of(layout: Layout) -> str:
    dp, fsdp, tp = layout.mesh.devices.shape
    return f"{layout.kind} {dp} x {fsdp * tp}"


def rollout_layout(
    kind: str, cfg: ModelConfig, mesh: Mesh, dtype, size: RolloutSize
) -> tuple[Layout, str]:
    """Returns (the Layout, a line of text that describes it and gives the reason).

    kind: one of LAYOUTS, or "auto" for the fastest that fits. dtype: dtype of the weights in
    evaluations. The weights must fit in this dtype even if rollouts are quantised.
    """
    if kind == "auto":
        layout, why = fastest_layout(cfg, mesh, dtype, size)
    else:
        tp = max(tp_sizes(cfg, mesh), default=1) if kind == "tp" else 1
        layout, why = layout_of(kind, tp, cfg, mesh), "as asked"
    weights_dtype = jnp.dtype("int8" if size.quantised else size.dtype or dtype)
    all_gib = cfg.n_params * weights_dtype.itemsize / 2**30
    text = (
        f"{name_of(layout)} devices, each with {weights_gib(cfg, layout, weights_dtype):.2g} of "
        f"{all_gib:.2g} GiB of {weights_dtype} weights; {why}"
    )
    return layout, text


def choose_layout(kind: str, cfg: ModelConfig, mesh: Mesh, dtype, size: RolloutSize) -> Layout:
    """Choose the layout and print it with the reason. Exits with code 2 if tp is not possible."""
    layout, text = rollout_layout(kind, cfg, mesh, dtype, size)
    check(
        kind != "tp" or math.prod(layout.mesh.devices.shape[1:]) > 1,
        f"rollout_sharding = tp needs a number of devices above 1 that divides "
        f"a host's {mesh.size // processes.host_count(mesh)} devices, feed-forward size {cfg.F} "
        f"and vocabulary {cfg.V}; try --rollout_sharding auto",
    )
    say(f"rollout: {text}")
    return layout


def rollout_spec(name: str, layout: Layout, quantised: bool = False):
    """PartitionSpec of a parameter in a rollout; if it is quantised, a Quantised of two specs."""
    if layout.shards_D:
        spec = model.spec(name)
    else:
        axes = {"N": layout.heads, "K": "tp", "F": layout.split, "V": layout.split}
        spec = P(*(axes.get(letter) for letter in model.letters(name)))
    return quantise.cast_spec(name, spec, quantised)


def rollout_format(name: str, spec: P, layout: Layout) -> Format:
    """Where the devices hold a parameter in a rollout, and the order of its dimensions in memory.

    By default, a TPU holds a matrix in the order that pads it least, but decoding reads matrices
    with a dimension F in row-major order. If the orders differed, each call of `decode` would begin
    with a copy of these matrices of all layers. The default remains in the layout fsdp, where each
    step gathers the matrices: row-major order would raise the peak memory of decoding 7B on v6e-8
    from 3.53 to 4.07 GB.
    """
    order = None
    if "F" in model.letters(name) and layout.kind != "fsdp":
        order = ArrayLayout(tuple(range(len(spec))))
    return Format(order, NamedSharding(layout.mesh, spec))


def rollout_formats(specs: dict, layout: Layout) -> dict:
    """{flat name: `rollout_format` of the parameter}. specs: {flat name: its `rollout_spec`}."""
    formats = {}
    for name, spec in specs.items():
        formats[name] = jax.tree.map(partial(rollout_format, name, layout=layout), spec)
    return formats


# ---------------------------------------------------------------- moving the weights
def to_rollout(
    params: dict, layout: Layout, dtype, quantised: bool = False, lora_scale: float = 0.0
) -> dict:
    """Cast or quantise the parameters on the training mesh, then move them to a rollout's layout.

    lora_scale: scale of adapters, if there are any. As in the update, adapters are not merged into
    their matrices (see model.join). In bfloat16, the sum W + scale A B would lose most of a small
    A B to rounding, and rollouts would not sample from the policy that is trained. For int8,
    adapters are merged into W before it is quantised, because int8 rounds more coarsely anyway.

    Returns the weights of the rollout, in which `layers` is a tuple of stacks of layers.
    """
    names = model.flatten(params)
    names = tuple(name for name in names if not (quantised and model.is_adapter(name)))
    training_mesh = params["norm_D"].sharding.mesh
    move_top, move_stack = compiled_moves(
        names, training_mesh, layout, dtype, quantised, lora_scale
    )
    layers = params["layers"]
    weights = move_top({name: a for name, a in params.items() if name != "layers"})
    stacks = []
    first = 0
    for size in layout.stack_sizes(len(layers["attn_norm_LD"])):
        stacks.append(move_stack(layers, first, size=size))
        first += size
    return weights | {"layers": tuple(stacks)}


@cache
def compiled_moves(
    names: tuple, training_mesh: Mesh, layout: Layout, dtype, quantised: bool, lora_scale: float
):
    """Returns (move_top, move_stack): jitted functions for parameters with these names.

    move_top(params) moves the parameters outside the layers. move_stack(layers, first, size) moves
    the stack of `size` layers that begins with layer `first`.
    """
    is_joined = layout.joins_adapters
    # specs are for the rollout. cast_specs are for the training mesh, after the cast.
    specs = {}
    cast_specs = {}
    for name in names:
        specs[name] = rollout_spec(name, layout, quantised)
        cast_specs[name] = quantise.cast_spec(name, model.spec(name), quantised)

    def move_array(a, from_spec, to_spec):
        # Without this constraint, XLA would move the array in float32, and cast it afterwards.
        a = model.constrain(a, training_mesh, *from_spec)
        if layout.kind == "tp":
            # Replicate the array first: XLA would do so anyway, with a warning.
            a = model.constrain(a, layout.mesh)
        return model.constrain(a, layout.mesh, *to_spec)

    def move(name, a):
        # With --offload params, parameters come from host memory.
        a = jax.device_put(a, model.DEVICE)
        a = quantise.cast(name, a, dtype, quantised)
        from_and_to = cast_specs[name], specs[name]
        if name.startswith("layers/"):
            # The weights of a single layer have no dimension L.
            from_and_to = jax.tree.map(lambda spec: P(*spec[1:]), from_and_to)
        return jax.tree.map(move_array, a, *from_and_to)

    def move_layer(layer):
        if quantised:
            layer = {name: model.merge(w) for name, w in model.adapted(layer, lora_scale).items()}
        moved = {name: move(f"layers/{name}", w) for name, w in layer.items()}
        if is_joined:
            moved |= model.joined_matrices(moved, lora_scale)
        return model.adapted(moved, lora_scale, is_joined)

    def move_top(params):
        return {name: move(name, params[name]) for name in sorted(params)}

    def move_stack(layers, first, size):
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size)
        # Move one layer at a time: moving all of them at once would take twice their memory.
        return jax.lax.map(move_layer, jax.tree.map(take, layers))

    # XLA may drop sharding constraints, but not the shardings of a program's outputs. Here, an
    # Adapted holds the formats of its arrays.
    formats = model.nest(rollout_formats(specs, layout))
    layer_formats = model.adapted(formats.pop("layers"), lora_scale, is_joined)
    return (
        jax.jit(move_top, out_shardings=formats),
        jax.jit(move_stack, static_argnames="size", out_shardings=layer_formats),
    )


# ---------------------------------------------------------------- rows and bytes
def bytes_read(cfg: ModelConfig, layout: Layout, dtype, quantised: bool = False) -> tuple[int, int]:
    """Bytes that a device must read in a decode step: (weights, KV cache per row and slot)."""
    itemsize = jnp.dtype(dtype).itemsize
    sizes = {name: math.prod(shape) for name, shape in model.shapes(cfg).items()}
    # fsdp gathers all weights; in the other layouts, a device reads its own.
    if layout.kind != "fsdp":
        sizes = sizes_on_device(cfg, layout)
    # A step reads only its tokens' rows of an untied embedding.
    values = sum(size for name, size in sizes.items() if name != "embed_VD" or cfg.tied)
    # int8 is one byte per value. The float32 scales and the norms and biases are too few to matter.
    weight_bytes = values if quantised else values * itemsize
    slot_bytes = 2 * cfg.L * cfg.K // layout.mesh.shape["tp"] * cfg.H * itemsize
    return weight_bytes, slot_bytes


def row_seconds_as_bytes(cfg: ModelConfig, layout: Layout, weight_bytes: int) -> int:
    """The time that each row of the cache adds to a decode step, apart from reading the cache, as
    the bytes that a device could read in this time. 0 on GPUs, where the time is not known.

    weight_bytes: see `bytes_read`.
    """
    if layout.is_on_cpu:
        # The matmuls of a row take about as long as reading a tenth of the weights.
        return weight_bytes // 10
    chip = chips.chip(layout.mesh.devices.flat[0])
    # Outside of attention, a device has the rows of all devices with the same key/value heads.
    seconds = cfg.L * ROW_SECONDS * layout.sharing if chip.clock else 0
    return int(seconds * chip.bandwidth)


def sizes_on_device(cfg: ModelConfig, layout: Layout) -> dict:
    """{flat name: number of a weight's values that a device holds}."""
    return {
        name: math.prod(shape) // num_shards(rollout_spec(name, layout), layout.mesh)
        for name, shape in model.shapes(cfg).items()
    }


def weights_gib(cfg: ModelConfig, layout: Layout, dtype) -> float:
    """GiB of weights that a device holds."""
    return sum(sizes_on_device(cfg, layout).values()) * jnp.dtype(dtype).itemsize / 2**30


def num_shards(spec: P, mesh: Mesh) -> int:
    """Number of parts that an array with this PartitionSpec is split into."""
    axes = jax.tree.leaves(tuple(spec))
    return math.prod(mesh.shape[axis] for axis in axes)


def bytes_of_step(cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize) -> tuple[int, int]:
    """Bytes that a device must read in a decode step with full caches: (weights, KV cache)."""
    weight_bytes, slot_bytes = bytes_read(cfg, layout, dtype, size.quantised)
    answers, group = size.of_device(layout)
    slots = answers // group * size.prompt_slots + answers * size.answer_slots
    return weight_bytes, slot_bytes * slots


def row_shards(layout: Layout) -> int:
    """Number of parts that the rows of the KV cache are split into. A part is on one device, or on
    the devices that split its key/value heads."""
    return num_shards(P(layout.cache_rows), layout.mesh)


def rows_that_fit(
    cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize, state_bytes: int, group: int
) -> int:
    """Number of rows that fit on a device at once, beside the weights and `state_bytes` bytes.

    state_bytes: see `make_engine`. group: rows that share a prompt. The KV cache of these rows,
    and of their prompts, may take half of the free memory. The other half is for the prefill, the
    logits, and the smaller cache from which a growing cache is copied.
    """
    # Compute this from sizes, not from the memory in use, so that a resumed run decodes the same
    # rows together.
    gib = chips.least_memory(layout.mesh) - weights_gib(cfg, layout, dtype)
    free_bytes = gib * 2**30 - state_bytes
    answers, _ = size.of_device(layout)
    # If a group does not fit, it is split evenly over waves, and each wave caches the prompt again.
    for piece in [n for n in range(group, 0, -1) if group % n == 0]:
        _, cache_bytes = bytes_of_step(cfg, layout, dtype, replace(size, group=piece))
        bytes_per_row = cache_bytes / answers
        rows = 0.5 * free_bytes / bytes_per_row
        if rows >= piece:
            break
    # If the memory of a device is unknown, it counts as infinite.
    return max(1, int(min(2**30, rows)))


# ---------------------------------------------------------------- the state of decoding
class DecodeState(NamedTuple):
    """What decode carries from token to token, on all devices."""

    # One cache per stack of layers. Prompts are in the order of their answers.
    prompt_caches: tuple[Cache, ...]
    answer_caches: tuple[Cache, ...]
    hidden_BD: jax.Array  # hidden state of each answer's last token, after the final norm


def shard_rows(a: np.ndarray, layout: Layout) -> jax.Array:
    """Split an array by rows over the devices. Every process has the complete array."""
    sharding = NamedSharding(layout.mesh, P(layout.rows))
    return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])


def spec_in_state(a, layout: Layout) -> P:
    """PartitionSpec of one array of a DecodeState: keys, values or the hidden states."""
    return layout.cache_spec if a.ndim > 2 else P(layout.rows)


@partial(jax.jit, static_argnames=("B", "n_prompts", "width", "cfg", "layout", "slots", "dtype"))
def empty_state(
    *, B: int, n_prompts: int, width: int, slots: int, cfg: ModelConfig, layout: Layout, dtype
) -> DecodeState:
    """The DecodeState of B answers to n_prompts prompts of `width` tokens, with empty caches."""

    def empty_cache(rows, slots):
        shapes = [(L, rows, cfg.K, slots, cfg.H) for L in layout.stack_sizes(cfg.L)]
        return tuple(Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)

    hidden_BD = jnp.zeros((B, cfg.D), dtype)
    state = DecodeState(empty_cache(n_prompts, width), empty_cache(B, slots), hidden_BD)

    def place(a):
        return model.constrain(a, layout.mesh, *spec_in_state(a, layout))

    return jax.tree.map(place, state)


@partial(jax.jit, static_argnames=("layout", "slots"))
def resize_array(a, index_B, *, layout: Layout, slots: int) -> jax.Array:
    """Take some rows of one array of a DecodeState; if it is a cache, also give it `slots` slots.

    index_B: the rows to take, counted within each part of the rows of the KV cache.
    """
    is_cache = a.ndim > 2

    def resize(a, index_B):
        if not is_cache:
            return jnp.take(a, index_B, 0)
        L, _, K, _, H = a.shape
        shape = L, len(index_B), K, slots, H
        new = jnp.zeros(shape, a.dtype)

        # Copy one layer at a time. Otherwise XLA would make a temporary copy of the complete cache.
        def copy_layer(i, new):
            layer = jax.lax.dynamic_slice_in_dim(a, i, 1)
            # All indices are in range, so clip: the default mode would test each, to fill with NaN.
            layer = jnp.take(layer, index_B, 1, mode="clip")
            return jax.lax.dynamic_update_slice(new, layer, [i, 0, 0, 0, 0])

        return jax.lax.fori_loop(0, L, copy_layer, new)

    # Use a shard_map: rows move only within a device.
    by_row = P(layout.cache_rows)
    array_spec = layout.cache_spec if is_cache else by_row
    resize_shards = jax.shard_map(
        resize,
        mesh=layout.mesh,
        in_specs=(array_spec, by_row),
        out_specs=array_spec,
        check_vma=False,
    )
    new = resize_shards(a, index_B)
    return model.constrain(new, layout.mesh, *spec_in_state(a, layout))
