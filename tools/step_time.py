"""How a step's answers are decoded, and how long a step takes: for `tools/plan.py`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import kernel
import model
import train
from infra import chips, layouts, memory, quantise, rollout
from infra.layouts import Work
from infra.state import abstract_state
from infra.waves import plan_waves
from tools import remembered
from tools.clock import Clock, program_clock, step_clock

# Of the update. MaxText reaches 0.45 with an 8B model on v6e.
ASSUMED_MFU = 0.4


# ---------------------------------------------------------------- the rollout
@dataclass(frozen=True)
class RolloutPlan:
    """How a step's answers are decoded, where all have their full length."""

    sequences: int  # answers of a step
    rows: int  # of a device
    at_once: int  # of these, decoded together: a wave
    waves: int
    gib: float  # of a device while it decodes, parameters and optimizer included
    resting_gib: float  # parameters and optimizer
    fits: bool
    clock: Clock | None  # of a step of decoding, with a full cache; None: it does not fit, no TPU


def plan_rollout(cfg, model_cfg, layout, mesh, work: Work) -> RolloutPlan:
    """Compile the decode loop for prompts and answers of full length."""
    shards = layouts.row_shards(layout)
    resting = memory.device_bytes(abstract_state(cfg, model_cfg, mesh, train.optimizer))
    most = layouts.rows_that_fit(model_cfg, layout, cfg.dtype, work, resting, work.group)
    waves, group = plan_waves(work.answers, shards, work.group, most)
    at_once = waves[0].shape[1]
    wave = replace(work, answers=at_once * shards, group=group)
    dtype, _ = quantise.dtypes(cfg)
    decode = rollout.lower_decode(model_cfg, layout, dtype, wave)
    chip = chips.chip(mesh.devices.flat[0])

    def clock_of(hlo):
        return step_clock(hlo, model_cfg.L, chip) if chip.clock else None

    found = remembered.compile_or_recall(decode, mesh, clock_of)
    resting_gib = resting / chips.GIB
    # The compiler does not know of what rests on the device.
    gib = found.gib + resting_gib
    fits = found.fits and gib <= chips.device_memory(mesh.devices.flat[0])
    rows = work.answers // shards
    return RolloutPlan(work.answers, rows, at_once, len(waves), gib, resting_gib, fits, found.clock)


# ---------------------------------------------------------------- the update, by the compiler
@dataclass(frozen=True)
class UpdateClock:
    """The compiler's estimates of an update's programs."""

    micro_batch: int  # rows of a device
    gradients: Clock  # of such a micro-batch
    apply: Clock  # of an optimizer step of the largest parameter


def clock_of_program(micro_batch, cfg, model_cfg, mesh) -> Callable:
    """-> what gives the clock of one of the update's programs, of its compiled text, or None: only
    TPUs have one."""
    device = mesh.devices.flat[0]
    chip = chips.chip(device)
    # The loss leaves out what is not of an answer, so the program does not say how many chunks of
    # tokens it runs over.
    blocks = kernel.block_sizes(device.device_kind, model_cfg.D, cfg.loss_impl)
    shards = mesh.shape["fsdp"] * mesh.shape["tp"]
    chunks = -(-micro_batch * cfg.max_answer * shards // blocks.tokens)
    return lambda hlo: program_clock(hlo, chunks, chip) if chip.clock else None


def clock_of_update(clocks: dict, micro_batch: int) -> UpdateClock | None:
    """Of the compiled micro-batches, that which is closest to the one that a step takes."""
    # What did not fit has no clock, and what was not compiled none at all.
    complete = [n for n, of_programs in clocks.items() if of_programs and all(of_programs)]
    if not complete:
        return None
    closest = min(complete, key=lambda n: abs(n - micro_batch))
    return UpdateClock(closest, *clocks[closest])


# ---------------------------------------------------------------- the time
def passes(cfg) -> float:
    """How often a step runs forward and backward over its sequences."""
    # Before several updates, a forward scores the answers: a third of a forward and backward.
    scoring = 1 / 3 if cfg.ppo_epochs * cfg.minibatches > 1 else 0
    return cfg.ppo_epochs + scoring


def time_of_step(
    cfg, model_cfg, layout, mesh, work: Work, planned: RolloutPlan, update: UpdateClock | None
) -> str:
    """How long a step takes where prompts and answers have their full length, in words, with the
    arithmetic: memory traffic bounds the rollout, and matrix products the update."""
    device = mesh.devices.flat[0]
    chip = chips.chip(device)
    if not chip.flops:
        return f"no estimate of the time: the peak of a {device.device_kind} is not known"
    # Each token reads the weights once a wave, and of each row the cache, which grows.
    half = replace(work, answer_slots=cfg.max_answer // 2)
    dtype, _ = quantise.dtypes(cfg)
    weights, cached = layouts.bytes_of_step(model_cfg, layout, dtype, half)
    bytes_per_token = planned.waves * weights + cached
    rollout_s = cfg.max_answer * bytes_per_token / chip.bandwidth
    length = cfg.max_prompt + cfg.max_answer
    flops = memory.flops(model_cfg, [length]) * planned.sequences * passes(cfg)
    update_s = flops / (ASSUMED_MFU * chip.flops * mesh.size)
    words = (
        f"a step, estimated, of prompts and answers of full length: {rollout_s + update_s:.1f} s\n"
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
    """The same by the TPU compiler's estimates of what it compiled, with the arithmetic."""
    rollout_s = cfg.max_answer * planned.waves * planned.clock.ms / 1e3
    # Each sequence of full length has a row of its own.
    rows = planned.sequences // (mesh.shape["dp"] * mesh.shape["fsdp"])
    # Parameters are updated one by one.
    sizes = [math.prod(shape) for shape in model.shapes(model_cfg).values()]
    steps = cfg.ppo_epochs * cfg.minibatches
    apply_ms = update.apply.ms * model_cfg.n_params / max(sizes)
    micro_batches = rows / update.micro_batch
    update_s = (passes(cfg) * micro_batches * update.gradients.ms + steps * apply_ms) / 1e3
    return (
        f"the same by the TPU compiler's clock, not measured: {rollout_s + update_s:.1f} s\n"
        f"  rollout {rollout_s:.1f} s = {cfg.max_answer} tokens x {planned.waves} x a step of "
        f"{planned.at_once} rows with a full cache, {planned.clock}\n"
        f"  update {update_s:.1f} s = {passes(cfg):.2f} x {rows} rows / {update.micro_batch} x a "
        f"micro-batch, {update.gradients}, and {steps} x an optimizer step, {apply_ms:.2f} ms"
    )
