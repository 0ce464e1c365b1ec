"""What fits in memory: the rollout, and the largest micro-batch of the update."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

import model
from infra.host import chips, files
from infra.host.chips import GIB
from infra.host.console import check, say
from infra.host.files import CheckpointError
from infra.host.memory import total_memory
from infra.host.processes import all_gather_processes, code_hash, processes_of_this_machine
from infra.rollout import layouts
from infra.rollout.engine import make_engine
from infra.update.packing import RowShape, row_shape
from infra.update.state import (
    abstract_gradients,
    abstract_rows,
    abstract_state,
    is_stepped_by_layer,
    weights_of,
)

# Bytes of host memory per token of a step: 4-byte numbers in NumPy, Python integers, and text.
HOST_BYTES_OF_A_TOKEN = 100
# The search for the largest micro-batch ends at this many rows.
MAX_ROWS = 2**20
# What to try last if there is too little memory.
LAST_RESORTS = "a smaller --max_prompt or --max_answer, or more devices"


def fit(cfg, model_cfg, mesh, tokenizer, longest_prompt: int, programs) -> tuple:
    """Returns (tokens per packed row, micro-batch in rows per device, engine of the rollout).

    The micro-batch is `--micro_batch`, or the largest that fits in memory. The engine decodes as
    many answers at once as fit. Exits with code 2 if --micro_batch, a single row of an update or
    the weights of the rollout do not fit.

    longest_prompt: in tokens. programs: the trainer's UpdatePrograms.
    """
    shape = row_shape(longest_prompt + cfg.max_answer, cfg, model_cfg, mesh)
    # Parameters and optimizer state stay on the devices during the rollout.
    state_bytes = device_bytes(abstract_state(cfg, model_cfg, mesh, programs.optimizer))
    engine = make_engine(
        cfg, model_cfg, mesh, tokenizer, longest_prompt, state_bytes, cfg.lora_scale
    )
    check_rollout_memory(engine.layout, state_bytes, cfg, model_cfg)
    micro_batch = choose_micro_batch(cfg, model_cfg, mesh, shape, programs)
    return shape.width, micro_batch, engine


def check_host_memory(cfg, longest: int) -> None:
    """Exit with code 2 if the rows of a step would take more than a quarter of this process's share
    of the host's memory. Every process must call this."""
    sequences = cfg.batch * cfg.npq
    gib = sequences * longest * HOST_BYTES_OF_A_TOKEN / GIB
    most = total_memory() / GIB / 4 / processes_of_this_machine()
    batch = int(cfg.batch * most / gib)
    fix = f"--batch {batch}" if batch else "a smaller --npq or --max_answer"
    check(
        gib <= most,
        f"batch*npq = {cfg.batch}*{cfg.npq} = {sequences} sequences of up to {longest} tokens "
        f"take {gib:.1f} GiB of this host's memory; a process may take a quarter of its share, "
        f"{most:.1f} GiB; try {fix}",
    )


def check_rollout_memory(layout, state_bytes: int, cfg, model_cfg) -> None:
    """Exit with code 2 if the rollout's weights do not fit on a device together with the training
    state, which takes `state_bytes`. Every process must call this."""
    weights_gib = layouts.weights_gib(model_cfg, layout, cfg.dtype)
    limit = chips.least_memory(layout.mesh)
    ways = [] if cfg.rollout_sharding == "auto" else ["--rollout_sharding auto"]
    check(
        weights_gib + state_bytes / GIB < limit,
        f"the rollout does not fit: on a device, its weights in {cfg.dtype} take {weights_gib:.2f} "
        f"GiB, and the training state {state_bytes / GIB:.2f}, of {limit:.2f}; try "
        f"{', '.join([*ways, rollout_advice(cfg)])}",
    )


def device_bytes(tree) -> int:
    """Bytes that a tree of shapes takes on one device; offloaded arrays take none."""
    total = 0
    for array in jax.tree.leaves(tree):
        # Offloaded arrays are in the host's pinned memory.
        if array.sharding.memory_kind != "pinned_host":
            total += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return total


# ---------------------------------------------------------------- memory of a program
def compiled_gib(lowered, mesh) -> tuple[float, jax.stages.Compiled | None]:
    """Returns (GiB that a program takes on a device, the compiled program). Nothing is run.

    The compiler gives up on a program that is too large for a TPU. Then the GiB are its estimate,
    and the program is None.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        # The message has `Used 20.1G of 15.7G` or `(20.1G) exceeds`, for example.
        total = re.search(r"(?:\(|Used )([\d.]+)([MGT])(?=\) exceeds| of )", str(e))
        if not total:
            raise
        gib_of_unit = {"M": 2**-10, "G": 1, "T": 2**10}
        return float(total[1]) * gib_of_unit[total[2]], None
    memory = compiled.memory_analysis()
    arguments_and_results = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    most = arguments_and_results + memory.temp_size_in_bytes
    if mesh.devices.flat[0].platform == "tpu":
        # The peak may be smaller, because not all of these arrays are live at once. With --offload,
        # it may be larger, because it counts arrays in the host's memory, too.
        most = min(most, memory.peak_memory_in_bytes)
    return most / GIB, compiled


@dataclass(frozen=True)
class UpdatePrograms:
    """The trainer's functions for an update. fit.py compiles the first two, but runs neither."""

    gradients: Callable  # (weights, rows): gradients of a micro-batch
    # (param, its optimizer state, grad, factor, lr): the updated parameter and state
    optimizer_step: Callable
    optimizer: Callable  # (cfg, name) -> optax transformation
    token_fields: Callable  # (cfg, supervised) -> {name: dtype} of a micro-batch


def largest_at_once(sizes: dict, cfg, model_cfg) -> str:
    """The parameter whose optimizer step takes the most memory: parameters are updated one by one,
    and this one has the most values on the device at once. sizes: {name: number of values}."""

    def size_at_once(name):
        return sizes[name] // (model_cfg.L if is_stepped_by_layer(name, cfg.offload) else 1)

    return max(sizes, key=size_at_once)


@functools.cache
def update_gib(
    micro_batch,
    shape: RowShape,
    cfg,
    model_cfg,
    mesh,
    programs,
    compile: Callable | None = None,
    limit: float | None = None,
) -> tuple[float, bool]:
    """Returns (GiB that an update takes on a device, whether it fits). The GiB include the state.

    micro_batch: rows per device. compile: replaces `compiled_gib`; called for the gradients, then
    for an optimizer step; returns (GiB, whether the program compiles). limit: GiB of the smallest
    device of all processes, so that all try the same micro-batches; None = of this process's
    devices. Results are cached in the process.
    """
    compile = compile or compiled_gib
    state = abstract_state(cfg, model_cfg, mesh, programs.optimizer)
    grads = abstract_gradients(cfg, model_cfg, mesh, programs.optimizer)
    held_gib = device_bytes((state, grads)) / GIB
    if limit is None:
        limit = chips.local_memory(mesh)
    if held_gib > limit:
        # The state and gradients alone are too large, so there is no need to compile.
        return held_gib, False
    # GRPO's rows have more fields than supervised ones, and so take more memory.
    fields = programs.token_fields(cfg, supervised=cfg.steps == 0)
    rows = abstract_rows(fields, micro_batch, shape.width, mesh)
    gradient = programs.gradients.lower(
        weights_of(state), rows, cfg=cfg, model_cfg=model_cfg, mesh=mesh
    )
    others = {name: part for name, part in state.items() if name not in ("params", "base")}
    params = model.flatten(state["params"])
    name = largest_at_once({name: array.size for name, array in params.items()}, cfg, model_cfg)
    largest = params[name], state["opt"][name], model.flatten(grads)[name]
    factor = jax.ShapeDtypeStruct((), jnp.float32)
    step = programs.optimizer_step.lower(*largest, factor, 0.0, name=name, cfg=cfg)

    # The compiler counts a program's arguments, results and temporary arrays. Add the other arrays
    # that are on the device at the same time.
    gradient_gib, gradient_program = compile(gradient, mesh)
    gradient_gib += device_bytes(others) / GIB
    if micro_batch < shape.most:
        # With several micro-batches, the sum of their gradients is on the device as well.
        gradient_gib += device_bytes(grads) / GIB
    step_gib, step_program = compile(step, mesh)
    step_gib += held_gib - device_bytes(largest) / GIB
    gib = max(gradient_gib, step_gib)
    return gib, bool(gradient_program and step_program) and gib <= limit


class MemoryEstimate(NamedTuple):
    """The memory that an update takes on a device, estimated from sizes without compiling."""

    rows: int  # about the number of rows that fit
    rest_gib: float  # GiB without any rows
    row_gib: float  # lower bound of the GiB that each row adds


def estimate_by_sizes(
    cfg, model_cfg, mesh, shape: RowShape, programs, limit: float
) -> MemoryEstimate:
    """Estimate the memory of an update. limit: GiB of a device."""
    state = abstract_state(cfg, model_cfg, mesh, programs.optimizer)
    grads = abstract_gradients(cfg, model_cfg, mesh, programs.optimizer)
    bytes_of_a_value = jnp.dtype(cfg.dtype).itemsize
    # The loss gathers the LM head, which is as large as the embedding. Count all of it in the
    # compute dtype, and all of its gradient in float32. This overestimates: both are sharded,
    # except with --loss_impl full. With --lora, the head has no gradient.
    bytes_of_a_gradient = 0 if cfg.lora else 4
    embedding = model_cfg.V * model_cfg.D * (bytes_of_a_value + bytes_of_a_gradient)
    rest_gib = (device_bytes((state, grads)) + embedding) / GIB
    # Each row adds the inputs of all layers, the last hidden states, and two gradients of the size
    # of the last hidden states.
    row_gib = (model_cfg.L + 3) * shape.width * model_cfg.D * bytes_of_a_value / GIB
    if (limit - rest_gib) / row_gib < shape.most:
        # With several micro-batches, the sum of their gradients is on the device as well.
        rest_gib += device_bytes(grads) / GIB
    # The limit may be infinite.
    rows = int(min((limit - rest_gib) / row_gib, MAX_ROWS))
    return MemoryEstimate(max(1, rows), rest_gib, row_gib)


def largest_that_fits(
    need: Callable, limit: float, most: int, estimate: MemoryEstimate
) -> tuple[int, dict]:
    """Returns (the largest micro-batch n <= most that fits, 0 if none; {each tried n: need(n)}).

    need(n) -> (GiB, whether n rows fit). The first try is the estimate. The second try assumes that
    each row adds `estimate.row_gib`. Each further try is where the line through two earlier tries
    meets the limit. The search ends early if neither that line nor `estimate.row_gib` leaves room
    for another row.
    """
    tried = {}
    # The largest that fits is at least `fits`, and below `too_many`.
    fits = 0
    too_many = most + 1
    n = min(estimate.rows, most)
    while fits + 1 < too_many:
        tried[n] = need(n)
        gib, does_fit = tried[n]
        if does_fit:
            fits = n
        else:
            too_many = n
        if len(tried) == 1:
            n = where_line_meets(limit, n, gib, n + 1, gib + estimate.row_gib)
        else:
            # The line goes through the nearest try on either side of the limit. If all tries are
            # on one side, it goes through the smallest two.
            n0, n1 = (fits, too_many) if fits and too_many in tried else sorted(tried)[:2]
            n = where_line_meets(limit, n0, tried[n0][0], n1, tried[n1][0])
        if fits and n <= fits:
            # The compiler may overestimate a try that does not fit: extrapolate from the largest
            # try that fits.
            gib, _ = tried[fits]
            n = where_line_meets(limit, fits, gib, fits + 1, gib + estimate.row_gib)
            if n <= fits:
                break
        n = min(max(n, fits + 1), too_many - 1)
    return fits, tried


def where_line_meets(limit, n0, gib0, n1, gib1):
    """The number of rows at which a line through two points reaches the limit."""
    rise = max(gib1 - gib0, 1e-9)
    # The limit may be infinite.
    return math.floor(min(n0 + (limit - gib0) * (n1 - n0) / rise, MAX_ROWS))


def choose_micro_batch(cfg, model_cfg, mesh, shape: RowShape, programs: UpdatePrograms) -> int:
    """Returns the rows per device of one forward and backward: `--micro_batch` if it is given, else
    the largest number that fits, up to the rows of a minibatch. Exits with code 2 if --micro_batch,
    or a single row, does not fit.

    The result of a search is cached on disk.
    """
    # A run without steps has no update.
    if cfg.steps + cfg.sft_steps == 0:
        return 0
    limit = chips.least_memory(mesh)
    fixed = dict(cfg=cfg, model_cfg=model_cfg, mesh=mesh, programs=programs, limit=limit)
    need = partial(update_gib, shape=shape, **fixed)
    asked = cfg.micro_batch
    # A minibatch has no more rows than this, so a larger micro-batch would only add padding.
    most = asked or shape.most
    estimate = estimate_by_sizes(cfg, model_cfg, mesh, shape, programs, limit)
    search = partial(largest_that_fits, need, limit, most, estimate)
    # The programs do not depend on the run's directory or seed.
    program = (dataclasses.replace(cfg, out="", seed=0), model_cfg, mesh, shape)
    chosen, gib, refused, too_much = search_or_remember(search, limit, most, program)
    over = f"{too_much:.2f} GiB of a device's {limit:.2f}, {too_much - limit:.2f} too much"
    # An estimate may end the search before any number is refused.
    why = f": {refused:.0f} rows take {over}" if refused else ""
    check(
        chosen,
        f"not one row of {shape.width} tokens per device fits: an update with one row takes "
        f"{over}; try {advice(cfg)}",
    )
    check(
        chosen == most or not asked,
        f"micro_batch = {most} does not fit{why}; the largest that fits is --micro_batch "
        f"{chosen:.0f}: {gib:.2f} GiB of {limit:.2f}",
    )
    say(
        f"micro_batch {chosen:.0f} of at most {shape.most} rows per device: {gib:.2f} GiB of "
        f"{limit:.2f}"
    )
    return int(chosen)


def rollout_advice(cfg) -> str:
    """What to try if there is too little memory for a rollout, before or during a run: remedies
    that the flags do not use yet."""
    ways = []
    if not cfg.lora and cfg.offload != "params":
        ways.append(
            "--offload " + ("params" if cfg.offload == "optimizer" else "optimizer or params")
        )
    return ", ".join([*ways, LAST_RESORTS])


def update_advice(cfg) -> str:
    """Like `rollout_advice`, for an update of a run that has begun."""
    ways = [] if cfg.remat == "full" else ["--remat full"]
    return ", ".join([*ways, rollout_advice(cfg)])


def advice(cfg) -> str:
    """What to try if not one row of an update fits: remedies that the flags do not use yet."""
    # A minibatch that is a single micro-batch holds one copy of the gradients instead of two.
    ways = ["more --minibatches"]
    if cfg.remat != "full":
        ways.append("--remat full")
    if not cfg.lora and cfg.offload != "params":
        ways.append("--offload params")
    if not cfg.lora:
        ways.append("--lora 16")
    return ", ".join([*ways, LAST_RESORTS])


def search_or_remember(search, limit, most, program):
    """Returns (largest micro-batch that fits, its GiB, one that does not fit, its GiB) from the
    process on which the fewest rows fit. The last two are 0 if every micro-batch tried fits. Every
    process must call this.

    search() -> (largest that fits, {n: (GiB, whether n rows fit)}). program: everything else that
    the result depends on.
    """
    program = (*program, limit, most, jax.__version__, code_hash())
    key = hashlib.sha256(repr(program).encode()).hexdigest()
    path = os.path.expanduser("~/.cache/podgrpo/micro_batch.json")
    # If the user's cache cannot be read, search again.
    cache = {}
    with contextlib.suppress(CheckpointError):
        cache = files.read_json(path)
    # All processes search if one has to: a process that compiles alone for GPUs would wait for the
    # others, because XLA divides the autotuning of kernels among all processes.
    if all_gather_processes(key not in cache).any():
        chosen, tried = search()
        # If nothing fits, `chosen` is 0, which the search has not tried.
        gib, _ = tried.get(chosen, (0, False))
        # Report the smallest number that was tried and does not fit. It need not be `most`.
        refused = min((n for n, (_, fits) in tried.items() if not fits), default=0)
        too_much, _ = tried.get(refused, (0, False))
        cache[key] = [chosen, gib, refused, too_much]
        # If `most` fits, it usually fits at the first try, and there is no search to cache.
        if chosen < most:
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                files.write_json(path, cache)
    found = all_gather_processes(cache[key])
    return found[found[:, 0].argmin()].tolist()
