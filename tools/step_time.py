"""Plan how the answers of a step are decoded, and estimate its time, for `tools/plan.py`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import kernel
from infra.host import chips
from infra.rollout import layouts, quantise
from infra.rollout.engine import Engine
from infra.rollout.layouts import RolloutSize
from infra.rollout.waves import plan_waves
from infra.update import fit, lora, packing
from tools import abstract_rollout, remembered
from tools.clock import Clock, program_clock, step_clock

# The assumed MFU of the update. MaxText reaches 0.45 with an 8B model on v6e.
ASSUMED_MFU = 0.4


# ---------------------------------------------------------------- the rollout
@dataclass(frozen=True)
class RolloutPlan:
    """How the answers of a step are decoded, if all have their full length."""

    sequences: int  # answers per step, over all devices
    rows: int  # answers per device
    at_once: int  # rows per device in a wave, which decode together
    waves: int
    gib: float  # per device during decode, including parameters and optimizer state
    state_gib: float  # parameters and optimizer state, per device
    fits: bool
    clock: Clock | None  # of a decode step with a full cache, on TPUs; None if it does not fit


def plan_rollout(
    cfg, model_cfg, engine: Engine, mesh, size: RolloutSize, state_bytes: int
) -> RolloutPlan:
    """Compile the decode loop for prompts and answers of full length.

    state_bytes: bytes per device of parameters and optimizer state.
    """
    layout = engine.layout
    shards = layouts.row_shards(layout)
    most = engine.rows_by_group[size.group]
    waves, group = plan_waves(size.answers, shards, size.group, most)
    at_once = waves[0].shape[1]
    wave = replace(size, answers=at_once * shards, group=group)
    dtype, _ = quantise.dtypes(cfg)
    decode = abstract_rollout.lower_decode(model_cfg, layout, dtype, wave, cfg.lora)
    chip = chips.chip(mesh.devices.flat[0])

    def clock_of(hlo):
        return step_clock(hlo, model_cfg.L, chip) if chip.clock else None

    found = remembered.compile_or_recall(decode, mesh, clock_of, model_cfg.L)
    state_gib = state_bytes / chips.GIB
    # The compiler does not count the parameters and optimizer state that stay on the device.
    gib = found.gib + state_gib
    fits = found.fits and gib <= chips.local_memory(mesh)
    rows = size.answers // shards
    return RolloutPlan(size.answers, rows, at_once, len(waves), gib, state_gib, fits, found.clock)


# ---------------------------------------------------------------- the update, by the compiler
@dataclass(frozen=True)
class UpdateClock:
    """The compiler's time estimates of the programs of an update."""

    micro_batch: int  # rows per device
    gradients: Clock  # of this micro-batch
    apply: Clock  # of an optimizer step on the parameter that `fit.largest_at_once` returns


def chunks_of_loss(micro_batch, shape: packing.RowShape, cfg, model_cfg, mesh) -> int:
    """Chunks of answer tokens in the loss of a micro-batch, if all answers have their full length.
    The loss loops over them, and its program does not state how many there are. Returns 0 for
    devices other than TPUs: only the TPU compiler estimates times."""
    device = mesh.devices.flat[0]
    if not chips.chip(device).clock:
        return 0
    blocks = kernel.block_sizes(device.device_kind, model_cfg.D, cfg.loss_impl)
    # The devices along tp share the same rows.
    answers = micro_batch * mesh.shape["fsdp"] * (shape.width // (cfg.max_prompt + cfg.max_answer))
    return -(-answers * cfg.max_answer // blocks.chunk_tokens)


def clock_of_program(chunks: int, mesh) -> Callable:
    """Returns a function that maps the compiled text of a program of the update to its Clock, or to
    None if `chunks`, from `chunks_of_loss`, is 0."""
    chip = chips.chip(mesh.devices.flat[0])
    return lambda hlo: program_clock(hlo, chunks, chip) if chunks else None


def clock_of_update(clocks: dict, micro_batch: int) -> UpdateClock | None:
    """Returns the estimates of the compiled micro-batch that is closest to `micro_batch`."""
    # A program that did not fit has no clock. A micro-batch whose programs were not compiled has an
    # empty list.
    complete = [n for n, of_programs in clocks.items() if of_programs and all(of_programs)]
    if not complete:
        return None
    closest = min(complete, key=lambda n: abs(n - micro_batch))
    return UpdateClock(closest, *clocks[closest])


# ---------------------------------------------------------------- the time
def passes(cfg) -> float:
    """Returns how many times a step runs forward and backward over its sequences."""
    # A step with several updates first scores the answers, and a step with a KL also scores them
    # with the reference. A forward pass costs a third of a forward and backward pass, or half of it
    # if the weights are frozen.
    scorings = sum([cfg.ppo_epochs * cfg.minibatches > 1, cfg.beta > 0])
    return cfg.ppo_epochs + scorings / (2 if cfg.lora else 3)


def time_of_step(
    cfg,
    model_cfg,
    layout,
    mesh,
    size: RolloutSize,
    planned: RolloutPlan,
    update: UpdateClock | None,
) -> str:
    """Describe how long a step takes if prompts and answers have their full length, and show the
    arithmetic: memory traffic bounds the rollout, and matrix products bound the update."""
    device = mesh.devices.flat[0]
    chip = chips.chip(device)
    if not chip.flops:
        return f"no estimate of the time: the peak of a {device.device_kind} is not known"
    # Each decode step of a wave reads the weights and the cache of its rows once. The cache grows
    # with the answer, so on average half of the answer is in it.
    half = replace(size, answer_slots=cfg.max_answer // 2)
    dtype, _ = quantise.dtypes(cfg)
    weights, cached = layouts.bytes_of_step(model_cfg, layout, dtype, half)
    bytes_per_token = planned.waves * weights + cached
    rollout_s = cfg.max_answer * bytes_per_token / chip.bandwidth
    length = cfg.max_prompt + cfg.max_answer
    flops = packing.flops(cfg, model_cfg, [length])
    flops *= planned.sequences * passes(cfg)
    update_s = flops / (ASSUMED_MFU * chip.flops * mesh.size)
    words = (
        f"estimated step with prompts and answers of full length: {rollout_s + update_s:.1f} s\n"
        f"  rollout {rollout_s:.1f} s = {cfg.max_answer} tokens x ({planned.waves} x "
        f"{weights / 1e9:.2f} GB of weights + {cached / 1e9:.2f} GB of cache of {planned.rows} "
        f"rows) / {chip.bandwidth / 1e12:.2f} TB/s\n"
        f"  update {update_s:.1f} s = {flops / 1e15:.2f} PFLOP of {planned.sequences} x {length} "
        f"tokens / ({ASSUMED_MFU} x {chip.flops / 1e12:.0f} TFLOP/s x {mesh.size} devices)"
    )
    if planned.clock and update:
        words += "\n" + time_by_clock(cfg, model_cfg, mesh, planned, update)
    return words


def time_by_clock(cfg, model_cfg, mesh, planned: RolloutPlan, update: UpdateClock) -> str:
    """Describe the time of a step by the TPU compiler's estimates, and show the arithmetic."""
    rollout_s = cfg.max_answer * planned.waves * planned.clock.ms / 1e3
    shape = packing.row_shape(cfg.max_prompt + cfg.max_answer, cfg, model_cfg, mesh)
    rows = shape.most * cfg.minibatches
    # Parameters are updated one by one. Scale the time of one of them by the number of values.
    shapes = lora.trained_shapes(cfg, model_cfg)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    timed = fit.largest_at_once(sizes, cfg, model_cfg)
    steps = cfg.ppo_epochs * cfg.minibatches
    apply_ms = update.apply.ms * sum(sizes.values()) / sizes[timed]
    micro_batches = rows / update.micro_batch
    update_s = (passes(cfg) * micro_batches * update.gradients.ms + steps * apply_ms) / 1e3
    return (
        f"the same by the TPU compiler's clock, not measured: {rollout_s + update_s:.1f} s\n"
        f"  rollout {rollout_s:.1f} s = {cfg.max_answer} tokens x {planned.waves} x a step of "
        f"{planned.at_once} rows with a full cache, {planned.clock}\n"
        f"  update {update_s:.1f} s = {passes(cfg):.2f} x {rows} rows / {update.micro_batch} x a "
        f"micro-batch, {update.gradients}, and {steps} x an optimizer step, {apply_ms:.2f} ms"
    )
