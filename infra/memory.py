"""What a compiled program takes of a device, known chips, the largest micro-batch that fits."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import model
from infra import cluster, files
from infra.cluster import all_gather_hosts
from infra.files import CheckpointError
from infra.log import check, say
from infra.state import abstract_gradients, abstract_rows, abstract_state

GIB = 2**30
# Eight arrays of 4 bytes, lists of Python's integers, a text.
HOST_BYTES_OF_A_TOKEN = 100
ADVICE = "--remat full, --offload optimizer or params, a smaller --max_answer or more devices"


# ---------------------------------------------------------------- chips
@dataclass(frozen=True)
class Chip:
    """What a device has, as its maker says; 0 where that is not known."""

    gib: float = math.inf  # memory
    bandwidth: float = 0  # bytes a second of that memory
    flops: float = 0  # bfloat16 operations a second
    clock: float = 0  # of a TPU, cycles a second
    link: float = 0  # of a TPU, bytes a second that it sends along one axis of the torus


# For a message to reach a TPU's next chip ("How to Scale Your Model", "Sharded Matrices").
HOP_SECONDS = 1e-6


# By the start of JAX's device_kind; the longer name comes first. Google's documentation of the
# Cloud TPUs has the figures. A clock is what a chip's peak is of its matrix units, which multiply
# and add in each cycle: 8 of 128 x 128 in a v4 and v5p, 4 in a v5e, 16 in a v6e. The links of an
# axis are a third (v4, v5p) or half of a chip's, and half of their bandwidth is for sending.
CHIPS = {
    "TPU v4": Chip(30.75, 1.2e12, 275e12, 1.05e9, 1e11),
    "TPU v5 lite": Chip(15.7, 8.2e11, 197e12, 1.5e9, 1e11),
    "TPU v5": Chip(95, 2.77e12, 459e12, 1.75e9, 2e11),
    "TPU v6 lite": Chip(31.24, 1.64e12, 918e12, 1.75e9, 2e11),
    "NVIDIA A100": Chip(math.inf, 2.0e12, 312e12),
    "NVIDIA H100": Chip(math.inf, 3.35e12, 990e12),
    "NVIDIA H200": Chip(math.inf, 4.8e12, 990e12),
}


def chip(device) -> Chip:
    for kind, found in CHIPS.items():
        if device.device_kind.startswith(kind):
            return found
    return Chip()


def host_memory() -> float:
    """GiB of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def check_host_memory(cfg, width: int) -> None:
    """Exit 2 where a step's rows would take too much of the host's memory."""
    sequences = cfg.batch * cfg.npq
    gib = sequences * width * HOST_BYTES_OF_A_TOKEN / GIB
    most = host_memory() / 4
    check(
        gib <= most,
        f"batch*npq = {cfg.batch}*{cfg.npq} = {sequences} sequences per host, in rows of {width} "
        f"tokens, take {gib:.1f} GiB of this host's memory, more than a quarter, {most:.1f} GiB; "
        f"try --batch {max(1, int(cfg.batch * most / gib))}",
    )


def device_memory(device) -> float:
    """GiB of a device; inf where it is not known."""
    if device.platform == "cpu":
        # The CPU's devices share the host's memory.
        return host_memory() / jax.local_device_count()
    try:
        return (device.memory_stats() or {})["bytes_limit"] / GIB
    except (KeyError, jax.errors.JaxRuntimeError):
        # A device that is not here, or one that does not tell.
        return chip(device).gib


def least_memory(mesh) -> float:
    """GiB of the device of a mesh that has least; all processes get the same answer."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    least = min(device_memory(device) for device in local)
    return float(all_gather_hosts(np.float32(least)).min())


def device_bytes(tree) -> int:
    """Bytes of one device that a tree of shapes takes; what is offloaded takes none."""
    total = 0
    for array in jax.tree.leaves(tree):
        # Offloaded arrays rest in the host's pinned memory.
        if array.sharding.memory_kind != "pinned_host":
            total += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return total


def device_metrics(mesh, flops: float, seconds: float) -> dict:
    """Model FLOP utilisation of an update of so many operations, and memory of the fullest device.
    None where the chip's peak is not known, or a backend does not tell its memory."""
    # The operations that all devices could have done in that time.
    peak = chip(mesh.devices.flat[0]).flops * mesh.size * seconds
    metrics = {"mfu": flops / peak if peak else None}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for key in ("bytes_in_use", "peak_bytes_in_use"):
        gib = max(stat.get(key, 0) for stat in stats) / GIB
        metrics[f"memory/train/{key}_max_gib"] = float(all_gather_hosts(gib).max()) or None
    return metrics


def flops(model_cfg: model.ModelConfig, lengths: Iterable[int]) -> float:
    """Operations of a forward and backward over sequences, recomputation not counted.

    6 a parameter and token, and 12 a layer, head dimension and pair of tokens of which one attends
    to the other (arXiv 2204.02311, appendix B).
    """
    of_parameters = 6 * model_cfg.n_multiplied
    of_attention = 6 * model_cfg.L * model_cfg.N * model_cfg.H
    return float(sum(of_parameters * n + of_attention * n * (n + 1) for n in lengths))


# ---------------------------------------------------------------- TPUs that are not here
def tpu_devices(slice_type: str) -> list:
    """The devices of a slice such as v6e-8, to compile for. Raises ValueError for no such type."""
    from jax.experimental import topologies

    # The sizes that Google has and that were compiled for.
    sizes = "1|4|8|16|32|64|128|256"
    known = re.fullmatch(rf"(v4|v5p|v5litepod|v6e)-({sizes})", slice_type)
    if not known:
        raise ValueError(
            f"{slice_type} is not one of v4-, v5p-, v5litepod- or v6e-, and 1, 4, 8, 16, .. 256"
        )
    # Otherwise libtpu looks for a TPU, and waits for it, and warns that it knows no type.
    os.environ |= {
        "TPU_ACCELERATOR_TYPE": slice_type,
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    kind, size = known.groups()
    # v4 and v5p count cores, two a chip, and their chips lie in three dimensions.
    dimensions = 3 if kind in ("v4", "v5p") else 2
    chips = int(size) // (dimensions - 1)
    if dimensions == 3:
        options = {"chip_config_name": "megacore"}
    else:
        # Chips of a host: one, eight in a slice of eight, else four.
        bounds = {1: [1, 1, 1], 8: [2, 4, 1]}.get(chips, [2, 2, 1])
        options = {"chips_per_host_bounds": bounds}
    sides = "x".join(str(side) for side in slice_sides(chips, dimensions))
    name = f"{kind.replace('litepod', 'e')}:{sides}"
    return topologies.get_topology_desc(name, "tpu", **options).devices


def slice_sides(chips, dimensions):
    """Sides of a slice, powers of two as equal as can be; sides of 1 come last."""
    exponent = chips.bit_length() - 1
    sides = [2 ** ((exponent + i) // dimensions) for i in range(dimensions)]
    return sorted(sides, key=lambda side: (side == 1, side))


# ---------------------------------------------------------------- what a program takes
def ignore(*_) -> None:
    """What is done with a compiled program where only its memory is asked for."""


def compiled_gib(lowered, mesh, use: Callable = ignore) -> tuple[float, bool]:
    """-> (GiB that a compiled program takes of a device, does it fit). Nothing is run.

    use(compiled): called with the program. What is too much for a TPU is not compiled to its end;
    then there is none, and GiB is the compiler's estimate.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        total = re.search(r"(?:\(|Used )([\d.]+)([MGT])(?=\) exceeds| of )", str(e))
        if not total:
            raise
        gib_of_unit = {"M": 2**-10, "G": 1, "T": 2**10}
        return float(total[1]) * gib_of_unit[total[2]], False
    use(compiled)
    memory = compiled.memory_analysis()
    if mesh.devices.flat[0].platform == "tpu":
        return memory.peak_memory_in_bytes / GIB, True
    # Other compilers tell no peak.
    arguments_and_results = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    return (arguments_and_results + memory.temp_size_in_bytes) / GIB, True


@dataclass(frozen=True)
class UpdatePrograms:
    """The trainer's functions of an update, to be compiled and not run."""

    gradients: Callable  # (params, rows): gradients of a micro-batch
    apply: Callable  # (param, its optimizer state, grad, factor, lr): an optimizer step
    optimizer: Callable  # (cfg, name) -> optax transformation
    token_fields: Callable  # (cfg, supervised) -> {name: dtype} of a micro-batch


@functools.cache
def update_gib(
    micro_batch, width, cfg, model_cfg, mesh, programs, use: Callable = ignore
) -> tuple[float, bool]:
    """-> (GiB of a device in an update, does it fit), with all that rests there.

    micro_batch: rows of a device, of `width` tokens. use(name, compiled): called with the programs
    "gradients" and "apply". Compiled once a process for equal arguments.
    """
    state = abstract_state(cfg, model_cfg, mesh, programs.optimizer)
    grads = abstract_gradients(cfg, model_cfg, mesh, programs.optimizer)
    # GRPO steps have more fields than supervised ones, and so take more.
    fields = programs.token_fields(cfg, supervised=cfg.steps == 0)
    rows = abstract_rows(fields, micro_batch, width, mesh)
    static = dict(cfg=cfg, mesh=mesh)
    gradient = programs.gradients.lower(state["params"], rows, model_cfg=model_cfg, **static)
    others = {name: part for name, part in state.items() if name != "params"}
    # Parameters are updated one by one; the largest takes most.
    params = model.flatten(state["params"])
    name = max(params, key=lambda name: params[name].size)
    one = params[name], state["opt"][name], model.flatten(grads)[name]
    factor = jax.ShapeDtypeStruct((), jnp.float32)
    step = programs.apply.lower(*one, factor, 0.0, name=name, **static)

    # The compiler does not know of what else rests on the device.
    gradient_gib, gradient_fits = compiled_gib(gradient, mesh, partial(use, "gradients"))
    gradient_gib += device_bytes(others) / GIB
    if micro_batch < rows_to_fill(cfg, mesh):
        # Of several micro-batches the sum of gradients is there too.
        gradient_gib += device_bytes(grads) / GIB
    step_gib, step_fits = compiled_gib(step, mesh, partial(use, "apply"))
    step_gib += (device_bytes((state, grads)) - device_bytes(one)) / GIB
    gib = max(gradient_gib, step_gib)
    return gib, gradient_fits and step_fits and gib <= device_memory(mesh.devices.flat[0])


def rows_to_fill(cfg, mesh) -> int:
    """Rows of a device in a minibatch whose sequences have a row each."""
    sequences = cfg.batch * cfg.npq * cluster.host_count(mesh)
    return sequences // (mesh.shape["dp"] * mesh.shape["fsdp"]) // cfg.minibatches


def largest_that_fits(need: Callable, limit: float, most: int) -> tuple[int, dict]:
    """-> (the largest micro-batch up to `most` that fits, 0 if none; all that was tried).

    need(n) -> (GiB, does it fit). First `most` is tried, since a TPU's compiler soon tells what is
    too much; then a small one; then where the line through the two meets the limit, until that is
    confirmed.
    """
    tried = {}
    # The answer is at least `fits`, and below `too_many`.
    fits = 0
    too_many = most + 1
    guess = most
    while fits + 1 < too_many:
        tried[guess] = need(guess)
        if tried[guess][1]:
            fits = guess
        else:
            too_many = guess
        if len(tried) == 1:
            guess = max(1, min(8, guess // 4))
        else:
            # Of the smallest two where there is none on either side of the limit.
            n0, n1 = (fits, too_many) if fits and too_many in tried else sorted(tried)[:2]
            guess = where_line_meets(limit, n0, tried[n0][0], n1, tried[n1][0])
            if fits and guess <= fits:
                break
        guess = min(max(guess, fits + 1), too_many - 1)
    return fits, tried


def where_line_meets(limit, n0, gib0, n1, gib1):
    """The number of rows at which a line through two points reaches the limit."""
    rise = max(gib1 - gib0, 1e-9)
    return math.floor(n0 + (limit - gib0) * (n1 - n0) / rise)


def choose_micro_batch(cfg, model_cfg, mesh, width, programs: UpdatePrograms) -> int:
    """Rows of a device in one forward and backward: the largest that fits, up to what a step fills;
    or what `--micro_batch` asks for, which must fit, else exit 2. Found by compiling the update for
    rows of `width` tokens; the answer of a search is remembered."""
    # Without any step there is no update.
    if cfg.steps + cfg.sft_steps == 0:
        return 0
    need = partial(
        update_gib, width=width, cfg=cfg, model_cfg=model_cfg, mesh=mesh, programs=programs
    )
    # More than a step fills would buy no speed.
    asked = cfg.micro_batch
    filled = rows_to_fill(cfg, mesh)
    most = asked or filled
    limit = device_memory(mesh.devices.flat[0])
    # Where the run's files lie, and its seed, change no program.
    program = (dataclasses.replace(cfg, out="", seed=0), model_cfg, mesh, width)
    chosen, gib, gib_of_most = search_or_remember(need, limit, most, program)
    over = f"{gib_of_most:.2f} GiB of a device's {limit:.2f}, {gib_of_most - limit:.2f} too much"
    check(
        chosen, f"not one row of {width} tokens per device fits: {most} take {over}; try {ADVICE}"
    )
    check(
        chosen == most or not asked,
        f"micro_batch = {most} takes {over}; the largest that fits is --micro_batch {chosen:.0f}",
    )
    say(
        f"micro_batch {chosen:.0f} of at most {filled} rows per device: {gib:.2f} GiB of "
        f"{limit:.2f}"
    )
    return int(chosen)


def search_or_remember(need, limit, most, program):
    """-> (largest that fits, its GiB, GiB of `most`), the least of all processes' answers."""
    program = (*program, limit, most, jax.__version__, cluster.code_hash())
    key = hashlib.sha256(repr(program).encode()).hexdigest()
    path = os.path.expanduser("~/.cache/podgrpo/micro_batch.json")
    # Whatever is wrong with the user's cache, the search can be made again.
    found = {}
    with contextlib.suppress(CheckpointError):
        found = files.read_json(path)
    if key not in found:
        chosen, tried = largest_that_fits(need, limit, most)
        found[key] = [chosen, tried.get(chosen, [0])[0], tried.get(most, [0])[0]]
        # Where `most` fits at once there is no search to be spared.
        if chosen < most:
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                files.write_json(path, found)
    return all_gather_hosts(found[key]).min(0).tolist()
