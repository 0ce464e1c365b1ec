"""Waves: which rows of a rollout decode together, and how a wave shrinks as rows end."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from infra.rollout import layouts
from infra.rollout.layouts import DecodeState, Layout
from model import ModelConfig


class Rows(NamedTuple):
    """What decode needs to know about each row."""

    prompt_length_B: jax.Array  # tokens of the row's prompt
    id_B: jax.Array  # index among the rows of all waves and processes, counted from `first_id`
    live_B: jax.Array  # whether the row is not padding, and has no stop token yet


@dataclass(frozen=True)
class Wave:
    """Rows that decode together. The NumPy arrays are the same on every process."""

    row_ids: np.ndarray  # [parts, rows of a part]: index among all rows; -1 for padding rows
    is_live: np.ndarray  # same shape: whether the row is not padding, and has no stop token yet
    group: int  # number of consecutive rows that share a prompt
    slots: int  # slots of the answers' KV cache
    state: DecodeState


def rows_of(wave: Wave, prompt_length_B: np.ndarray, first_id: int, layout: Layout) -> Rows:
    """The Rows of a wave. prompt_length_B: tokens of the prompt of each row of the rollout.
    first_id: the id of row 0 of the rollout, see `Engine.generate`."""
    # The last wave may have padding rows. Their id is -1, which picks the length of the last row;
    # their results are not used.
    id_B = wave.row_ids.ravel()
    live_B = wave.is_live.ravel()
    # Split these arrays like the rows: each device has the entries of its own rows.
    return Rows(
        layouts.shard_rows(prompt_length_B[id_B], layout),
        layouts.shard_rows(first_id + id_B, layout),
        layouts.shard_rows(live_B, layout),
    )


def plan_waves(B: int, shards: int, group: int, at_once: int) -> tuple[list, int]:
    """Returns (row_ids of each wave, number of rows in a wave that share a prompt).

    B: total number of rows. shards: number of parts that the rows are split into; devices may share
    a part. group: consecutive rows that share a prompt. at_once: maximum rows per part in a wave.
    Raises ValueError if the rows do not divide evenly into the parts.
    """
    if B % shards:
        raise ValueError(f"{B} prompts do not divide into {shards} parts: repeat some prompts")
    rows = B // shards
    at_once = min(at_once, rows)
    # A part may begin inside a group. Cut each group into equal pieces whose size also divides a
    # part, so that no piece is in two parts. Take the largest such size that fits in a wave.
    group = math.gcd(group, rows)
    group = max(n for n in range(1, at_once + 1) if group % n == 0)
    # Waves have equal sizes, so that one compiled program serves them all; the last one may end
    # in padding rows.
    most_rows = at_once // group * group
    n_waves = math.ceil(rows / most_rows)
    wave_rows = math.ceil(rows / n_waves / group) * group
    row_ids = np.arange(B).reshape(shards, rows)
    missing = n_waves * wave_rows - rows
    row_ids = np.pad(row_ids, ((0, 0), (0, missing)), constant_values=-1)
    return np.split(row_ids, n_waves, axis=1), group


def smaller_groups(count: int) -> list[int]:
    """Divisors of the count, each the largest proper divisor of the one before: 12, 6, 3, 1."""
    # XLA compiles a program for each size, so keep the number of sizes small.
    found = [count]
    while found[-1] > 1:
        last = found[-1]
        found.append(max(n for n in range(1, last) if last % n == 0))
    return found


def halved(count: int, needed: int) -> int:
    """The smallest number that is at least `needed`, among the count and its halves, rounded up:
    25, 13, 7, 4, 2, 1."""
    while count > 1 and -(-count // 2) >= needed:
        count = -(-count // 2)
    return count


def fewer_rows(
    is_live_RPG, prompt_bytes: int, answer_bytes: int, row_bytes: int, weight_bytes: int
) -> tuple:
    """Returns (prompts of a part of the rows, answers per prompt) that the next stage decodes.

    Among the sizes that have room for every part's live answers, and whose cache is no larger than
    now, chooses the one whose decode step reads the fewest bytes. Keeps the current size unless the
    new one saves a tenth of the bytes. A prompt with more live answers than the new group size is
    kept and counted several times.

    is_live_RPG: P prompts of G answers in each of R parts of the rows. prompt_bytes, answer_bytes:
    KV cache of one prompt, and of one answer. row_bytes: see `layouts.row_seconds_as_bytes`.
    """
    _, prompts, group = is_live_RPG.shape
    live_RP = is_live_RPG.sum(2)

    def cache_bytes(size):
        prompts, group = size
        return prompts * (prompt_bytes + group * answer_bytes)

    def step_bytes(size):
        return weight_bytes + cache_bytes(size) + math.prod(size) * row_bytes

    now = prompts, group
    sizes = []
    for block in smaller_groups(group):
        # Split the live answers of each prompt into blocks of this size.
        blocks_RP = -(-live_RP // block)
        needed = blocks_RP.sum(1).max()
        blocks = halved(prompts * group // block, needed)
        sizes.append((blocks, block))
    sizes = [size for size in sizes if cache_bytes(size) <= cache_bytes(now)]
    best = min(sizes, key=step_bytes)
    is_worth_it = step_bytes(best) <= 0.9 * step_bytes(now)
    return best if is_worth_it else now


def bytes_of_stage(
    cfg: ModelConfig, layout: Layout, dtype, quantised: bool, width: int, slots: int
) -> tuple:
    """Returns (prompt_bytes, answer_bytes, row_bytes, weight_bytes) for `fewer_rows`. width, slots:
    slots of a prompt and of an answer."""
    weight_bytes, slot_bytes = layouts.bytes_read(cfg, layout, dtype, quantised)
    row_bytes = layouts.row_seconds_as_bytes(cfg, layout, weight_bytes)
    return width * slot_bytes, slots * slot_bytes, row_bytes, weight_bytes


def kept_rows(is_live_RPG, prompts: int, group: int) -> np.ndarray:
    """Indices of the rows that the next stage decodes, within each part: [R, prompts, group].

    The answers of each prompt, live ones first, are split into blocks of `group`. Blocks with live
    answers stay, and as many others as fit.
    """
    R, P, G = is_live_RPG.shape
    order_RPG = np.argsort(~is_live_RPG, axis=2, kind="stable")
    is_live_RPG = np.take_along_axis(is_live_RPG, order_RPG, 2)
    # Turn indices within a prompt into indices within a part.
    first_P1 = G * np.arange(P)[:, None]
    rows = order_RPG + first_P1
    blocks = rows.reshape(R, -1, group)
    has_live = is_live_RPG.reshape(blocks.shape).any(2)
    kept = np.argsort(~has_live, axis=1, kind="stable")
    # Restore the order of the prompts.
    kept = np.sort(kept[:, :prompts])
    return np.take_along_axis(blocks, kept[:, :, None], 1)


def resize_wave(wave: Wave, slots: int, cfg: ModelConfig, layout: Layout, quantised: bool) -> Wave:
    """Give the answers' cache `slots` slots, and drop rows that have ended if that pays off.

    Arrays of the old state that are not in the new one are deleted.
    """
    prompts, answers, hidden_BD = wave.state
    width = prompts[0].keys.shape[3]
    is_live_RPG = wave.is_live.reshape(len(wave.row_ids), -1, wave.group)
    _, n_prompts, _ = is_live_RPG.shape
    nbytes = bytes_of_stage(cfg, layout, hidden_BD.dtype, quantised, width, slots)
    prompts_kept, group = fewer_rows(is_live_RPG, *nbytes)
    if (prompts_kept, group, slots) == (n_prompts, wave.group, wave.slots):
        return wave
    kept_RPG = kept_rows(is_live_RPG, prompts_kept, group)
    # Rows are numbered prompt by prompt, so the first row of a block gives its prompt.
    kept_RP = kept_RPG[:, :, 0] // wave.group
    kept_RB = kept_RPG.reshape(len(kept_RPG), -1)

    def resize(a, kept, slots):
        index_B = layouts.shard_rows(kept.ravel(), layout)
        new = layouts.resize_array(a, index_B, layout=layout, slots=slots)
        # Delete the old array now, so that only one array at a time is in memory twice.
        a.delete()
        return new

    # If every prompt is kept exactly once, the prompts' cache does not change.
    all_RP = np.tile(np.arange(n_prompts), (len(kept_RP), 1))
    if not np.array_equal(kept_RP, all_RP):
        prompts = jax.tree.map(lambda a: resize(a, kept_RP, width), prompts)
    answers = jax.tree.map(lambda a: resize(a, kept_RB, slots), answers)
    state = DecodeState(prompts, answers, resize(hidden_BD, kept_RB, slots))
    row_ids = np.take_along_axis(wave.row_ids, kept_RB, 1)
    is_live = np.take_along_axis(wave.is_live, kept_RB, 1)
    return Wave(row_ids, is_live, group, slots, state)
