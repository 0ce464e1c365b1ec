"""The time of a complete rollout by the TPU compiler's clock, for answers of different lengths."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra.host import chips
from infra.rollout import engine, layouts
from infra.rollout.layouts import Layout, RolloutSize
from infra.rollout.waves import bytes_of_stage, fewer_rows, kept_rows
from model import ModelConfig
from tools import abstract_rollout
from tools.clock import Clock, program_clock, step_clock

# The lengths of answers to GSM8K's questions: a log-normal distribution with this median and mean.
MEDIAN = 210
MEAN = 270


class Stage(NamedTuple):
    """Decode steps with the same rows and the same slots."""

    prompts: int  # on each part of the rows
    group: int  # answers per prompt
    slots: int  # of the answers' KV cache
    steps: int


class RolloutTime(NamedTuple):
    """Seconds of a complete rollout."""

    move: float  # of the weights to the rollout's layout
    calls: int  # of prefill
    prefill: Clock  # of one call
    decode: float
    resize: float  # of the KV cache, between stages
    floor: float  # to read the weights and the live cache once a step, split over all devices
    stages: list[tuple[Stage, float]]  # with the milliseconds of a step

    def __str__(self) -> str:
        prefill = self.calls * self.prefill.ms / 1e3
        total = self.move + prefill + self.decode + self.resize
        of_stages = [
            f"{stage.steps} x {ms:.2f} ms with {stage.prompts} x {stage.group} rows"
            for stage, ms in self.stages
        ]
        return (
            f"{total:.2f} s: weights {self.move:.2f}, prefill {prefill:.2f}, decode "
            f"{self.decode:.2f}, cache {self.resize:.2f}; at least {self.floor:.2f} s\n  "
            f"prefill: {self.calls} x {self.prefill}\n  decode: {', '.join(of_stages)}"
        )


def answer_lengths(n: int, most: int) -> np.ndarray:
    """Lengths of n answers: quantiles of the distribution up to `most`, in a random order that is
    always the same. The longest answer has `most` tokens."""
    sigma = math.sqrt(2 * math.log(MEAN / MEDIAN))
    quantiles = (np.arange(n) + 0.5) / n
    normal = np.array([NormalDist().inv_cdf(q) for q in quantiles])
    lengths = np.clip(MEDIAN * np.exp(sigma * normal), 1, most).astype(int)
    lengths[-1] = most
    return np.random.default_rng(0).permutation(lengths)


def plan_stages(
    lengths: np.ndarray, cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize
) -> list[Stage]:
    """The stages in which `Engine.generate` decodes answers of these lengths in one wave."""
    rows, group = size.of_device(layout)
    lengths_RPG = lengths.reshape(-1, rows // group, group)
    stages = []
    for t in range(0, size.answer_slots, engine.STAGE):
        until = min(t + engine.STAGE, size.answer_slots)
        slots = engine.slots_for(until, size.answer_slots)
        if t > 0:
            sizes = size.quantised, size.prompt_slots, slots
            nbytes = bytes_of_stage(cfg, layout, dtype, *sizes)
            is_live_RPG = lengths_RPG > t
            prompts, group = fewer_rows(is_live_RPG, *nbytes)
            # Keep the rows that `resize_wave` keeps.
            kept_RPG = kept_rows(is_live_RPG, prompts, group)
            kept_RB = kept_RPG.reshape(len(kept_RPG), -1)
            lengths_RB = lengths_RPG.reshape(len(lengths_RPG), -1)
            lengths_RB = np.take_along_axis(lengths_RB, kept_RB, 1)
            lengths_RPG = lengths_RB.reshape(kept_RPG.shape)
        # A stage ends early once no answer is live.
        steps = min(until, int(lengths_RPG.max())) - t
        if steps <= 0:
            break
        stages.append(Stage(lengths_RPG.shape[1], group, slots, steps))
    return stages


def floor_seconds(
    lengths: np.ndarray, cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize
) -> float:
    """Seconds to read all weights and the live part of the KV cache once a step, if each device
    reads an equal part."""
    devices = layout.mesh.size
    chip = chips.chip(layout.mesh.devices.flat[0])
    itemsize = jnp.dtype(dtype).itemsize
    weights = cfg.n_multiplied * (1 if size.quantised else itemsize)
    slot_bytes = 2 * cfg.L * cfg.K * cfg.H * itemsize
    lengths_PG = lengths.reshape(-1, size.group)
    total = 0
    for t in range(int(lengths.max())):
        live_PG = lengths_PG > t
        # A prompt is read once for all of its live answers.
        slots = live_PG.any(1).sum() * size.prompt_slots + live_PG.sum() * (t + 1)
        total += weights + slots * slot_bytes
    return total / devices / chip.bandwidth


def clock_of_prefill(
    cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize
) -> tuple[int, Clock]:
    """Returns (calls of `prefill`, the clock of one)."""
    rows, group = size.of_device(layout)
    shards = layouts.row_shards(layout)
    # All calls run the same number of prompts, so that one program serves them all.
    n_prompts = rows // group
    at_once = engine.prompts_at_once(n_prompts, size.prompt_slots, layout)
    n = at_once * shards
    weights = abstract_rollout.abstract_weights(cfg, layout, dtype, size.quantised)
    first_stage = replace(size, answer_slots=min(engine.STAGE, size.answer_slots))
    state = abstract_rollout.abstract_state(cfg, layout, dtype, first_stage)
    by_rows = P(layout.rows)
    prompts = jax.ShapeDtypeStruct((n, size.prompt_slots), jnp.int32)
    lengths = jax.ShapeDtypeStruct((n,), jnp.int32)
    prompts, lengths = (abstract_rollout.abstract(a, by_rows, layout) for a in (prompts, lengths))
    static = dict(group=group, model_cfg=cfg, layout=layout)
    program = engine.prefill.lower(weights, state, prompts, lengths, 0, **static).compile()
    chip = chips.chip(layout.mesh.devices.flat[0])
    calls = -(-n_prompts // at_once)
    return calls, program_clock(program.as_text(), cfg.L, chip)


def seconds_of_move(cfg: ModelConfig, layout: Layout, dtype, quantised: bool) -> float:
    """Seconds to move all weights from the training mesh to the rollout's layout, by the clock."""
    # Training shards the weights over all devices by default.
    mesh = Mesh(layout.mesh.devices.reshape(1, -1, 1), model.AXES)
    params = {}
    for name, shape in model.shapes(cfg).items():
        sharding = NamedSharding(mesh, model.spec(name))
        params[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    move_top, move_stack = layouts.compiled_moves(
        tuple(params), mesh, layout, dtype, quantised, lora_scale=0.0
    )
    params = model.nest(params)
    layers = params.pop("layers")
    chip = chips.chip(layout.mesh.devices.flat[0])
    (stack_size,) = layout.stack_sizes(cfg.L)
    programs = move_top.lower(params), move_stack.lower(layers, 0, size=stack_size)
    texts = [program.compile().as_text() for program in programs]
    return sum(program_clock(text, cfg.L, chip).ms for text in texts) / 1e3


def time_rollout(cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize) -> RolloutTime:
    """Estimate the time of a rollout whose answers have GSM8K's lengths, on absent TPUs.

    size: `answers` answers of at most `answer_slots` tokens, which decode in one wave.
    """
    chip = chips.chip(layout.mesh.devices.flat[0])
    lengths = answer_lengths(size.answers, size.answer_slots)
    shards = layouts.row_shards(layout)
    _, slot_bytes = layouts.bytes_read(cfg, layout, dtype, size.quantised)
    stages = []
    decode = resize = 0.0
    cache_bytes = 0
    # Stages of the same shape run the same program.
    ms_of = {}
    for stage in plan_stages(lengths, cfg, layout, dtype, size):
        shape = stage[:3]
        rows = stage.prompts * stage.group
        if shape not in ms_of:
            wave = replace(size, answers=rows * shards, group=stage.group, answer_slots=stage.slots)
            program = abstract_rollout.lower_decode(cfg, layout, dtype, wave).compile()
            ms_of[shape] = step_clock(program.as_text(), cfg.L, chip).ms
            slots = stage.prompts * size.prompt_slots + rows * stage.slots
            # Resizing the cache reads and writes it once.
            resize += (cache_bytes + slots * slot_bytes) / chip.bandwidth
            cache_bytes = slots * slot_bytes
        decode += stage.steps * ms_of[shape] / 1e3
        stages.append((stage, ms_of[shape]))
    return RolloutTime(
        seconds_of_move(cfg, layout, dtype, size.quantised),
        *clock_of_prefill(cfg, layout, dtype, size),
        decode,
        resize,
        floor_seconds(lengths, cfg, layout, dtype, size),
        stages,
    )
