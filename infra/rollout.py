"""Rollouts: answers to prompts, by a prefill and then decoding in stages.

Prompts are padded on the left to one width, so that in each step all rows write the same slot of
the KV cache. The cache grows from stage to stage, and rows that have ended leave the batch between
stages. Where not all rows fit a device, they are decoded in waves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra import layouts
from infra.cluster import all_gather_hosts
from infra.layouts import Layout, State
from infra.sampling import Sampling, sample_token
from model import ModelConfig

# Tokens of prompts that a device runs at once.
PREFILL_TOKENS = 4096


# ---------------------------------------------------------------- generate
def generate(
    weights: dict,
    cfg: ModelConfig,
    layout: Layout,
    prompts: list,
    key: jax.Array,
    sampling: Sampling,
    *,
    max_answer: int,
    group: int = 1,
    at_once: int = 0,
    stage: int = 128,
    progress: Callable = lambda done, tokens: None,
) -> dict:
    """Sample an answer to each prompt, until one of cfg.stop_ids or for max_answer tokens.

    weights: of `layouts.to_rollout`. prompts: lists of token ids, this process's, as many in each;
    `group` in succession are equal. key: a row's tokens depend on it and on the row's place among
    those of all processes, not on the layout. at_once: rows that a device decodes together, or 0
    for all. stage: tokens of one call of `decode`. progress(rows that have ended, tokens) is called
    after each prefill and stage.

    Returns NumPy arrays, a row for each prompt: tokens_BT int32 [B, max_answer], the stop token
    last, then 0; lengths_B, stop token included; truncated_B, no stop token came; logprobs_BT
    float32, in the distribution that tokens were drawn from, after temperature and truncation.
    """
    prompts_BP, pad_B = pad_prompts(prompts)
    B, width = prompts_BP.shape
    answers = empty_answers(B, max_answer)
    steps = min(stage, max_answer)
    static = dict(cfg=cfg, layout=layout, steps=steps, sampling=sampling)
    waves, group = plan_waves(B, layouts.row_shards(layout), group, at_once or B)
    quantised = isinstance(model.head(weights), model.Quantised)
    for row_ids in waves:
        # The cache of the last wave goes before the next one is made.
        wave = None
        slots = slots_for(width, steps, max_answer)
        wave = prefill_wave(weights, cfg, layout, prompts_BP, pad_B, row_ids, group, slots)
        progress(*totals(answers))

        for t in range(0, max_answer, stage):
            until = min(t + stage, max_answer)
            if t > 0:
                # The cache grows, and rows that have ended leave.
                slots = slots_for(width, until, max_answer)
                wave = resize_wave(wave, slots, cfg, layout, quantised)
            rows = rows_of(wave, pad_B, layout)
            state, new = decode(weights, wave.state, rows, key, width, t, until, **static)
            new = jax.device_get(new)
            record(answers, new, wave.row_ids.ravel(), t, until)
            is_live = new["live_B"].reshape(wave.row_ids.shape)
            wave = replace(wave, state=state, is_live=is_live)
            progress(*totals(answers))
            if not is_live.any():
                break
    # Every process has the answers of all.
    first = jax.process_index() * len(prompts)
    return {name: a[first : first + len(prompts)] for name, a in answers.items()}


def pad_prompts(prompts: list) -> tuple:
    """-> (prompts of all processes, padded on the left, int32 [B, P]; how many slots are pads)."""
    longest = max(len(prompt) for prompt in prompts)
    width = padded_length(int(all_gather_hosts(longest).max()))
    # A pad is token 0. No token attends to it, so that any would do.
    tokens = np.zeros((len(prompts), width), np.int32)
    pads = np.zeros(len(prompts), np.int32)
    for i, prompt in enumerate(prompts):
        pads[i] = width - len(prompt)
        tokens[i, pads[i] :] = prompt
    tokens_BP = all_gather_hosts(tokens).reshape(-1, width)
    return tokens_BP, all_gather_hosts(pads).ravel()


def padded_length(n: int) -> int:
    """The least 2^k or 3 * 2^k that holds n: few enough to compile for each."""
    power = 1 << (n - 1).bit_length()
    three_quarters = power * 3 // 4
    return three_quarters if n * 4 <= power * 3 else power


def slots_for(width: int, until: int, max_answer: int) -> int:
    """Slots of a KV cache for prompts of this width and the first `until` tokens of answers."""
    # Of few sizes, as each is compiled; but none that is larger than is ever used.
    return min(padded_length(width + until), width + max_answer)


def empty_answers(B: int, max_answer: int) -> dict:
    return {
        "tokens_BT": np.zeros((B, max_answer), np.int32),
        "logprobs_BT": np.zeros((B, max_answer), np.float32),
        "lengths_B": np.zeros(B, np.int32),
        "truncated_B": np.ones(B, bool),
    }


def record(answers: dict, new: dict, ids_B, t: int, until: int) -> None:
    """Write tokens t .. until - 1, as `decode` returns them, into the answers of the rows ids_B."""
    # The last wave may have places without a row.
    is_row = ids_B >= 0
    ids = ids_B[is_row]
    for name in ("tokens_BT", "logprobs_BT"):
        answers[name][ids, t:until] = new[name][is_row, : until - t]
    answers["lengths_B"][ids] += new["lengths_B"][is_row]
    answers["truncated_B"][ids] = new["live_B"][is_row]


def totals(answers: dict) -> tuple[int, int]:
    """-> (rows that have ended, tokens of all rows)"""
    ended = ~answers["truncated_B"]
    tokens = answers["lengths_B"].sum()
    return int(ended.sum()), int(tokens)


# ---------------------------------------------------------------- which rows decode together
class Rows(NamedTuple):
    """What decoding has to know of each row."""

    pad_B: jax.Array  # slots before its prompt
    id_B: jax.Array  # its number among the rows of all waves and processes, -1 for no row
    live_B: jax.Array  # whether no stop token has come


@dataclass(frozen=True)
class Wave:
    """Rows that decode together. Every process holds the same of the NumPy arrays."""

    row_ids: np.ndarray  # [shards, rows of a device]: numbers among all rows, -1 for no row
    is_live: np.ndarray  # of each, whether no stop token has come
    slots: int  # of the KV cache
    state: State


def rows_of(wave: Wave, pad_B: np.ndarray, layout: Layout) -> Rows:
    """What decoding has to know of a wave's rows. pad_B: of all rows."""
    id_B = wave.row_ids.ravel()
    live_B = wave.is_live.ravel()
    return Rows(
        layouts.shard_rows(pad_B[id_B], layout),
        layouts.shard_rows(id_B, layout),
        layouts.shard_rows(live_B, layout),
    )


def plan_waves(B: int, shards: int, group: int, at_once: int) -> tuple[list, int]:
    """-> (row_ids of each wave, how many equal prompts stay together on a device and in a wave).

    B: all rows; shards: parts that they are split into; at_once: most rows of a device in a wave.
    """
    # Of a device.
    rows = B // shards
    at_once = min(at_once, rows)
    # A device takes complete groups, or equal parts of one.
    group = math.gcd(group, rows)
    group = max(n for n in range(1, at_once + 1) if group % n == 0)
    # Waves of equal size, so that all run one program, and the last may lack some rows.
    most_rows = at_once // group * group
    n_waves = math.ceil(rows / most_rows)
    wave_rows = math.ceil(rows / n_waves / group) * group
    row_ids = np.arange(B).reshape(shards, rows)
    missing = n_waves * wave_rows - rows
    row_ids = np.pad(row_ids, ((0, 0), (0, missing)), constant_values=-1)
    return np.split(row_ids, n_waves, axis=1), group


def fewer_rows(live: int, rows: int, weight_bytes: int, row_bytes: int) -> int:
    """Rows of a device that the next stage decodes: the least half, quarter, ... that holds the
    live ones, where a step then reads a tenth less; otherwise all."""
    # Of few sizes, as each is compiled.
    fewer = rows
    while fewer % 2 == 0 and fewer // 2 >= live:
        fewer //= 2
    bytes_saved = (rows - fewer) * row_bytes
    step_bytes = weight_bytes + rows * row_bytes
    return fewer if bytes_saved >= 0.1 * step_bytes else rows


def resize_wave(wave: Wave, slots: int, cfg: ModelConfig, layout: Layout, quantised: bool) -> Wave:
    """The wave with so many slots, without rows that have ended where that pays.

    The arrays of the old state are deleted.
    """
    dtype = wave.state.hidden_BD.dtype
    weight_bytes, slot_bytes = layouts.bytes_read(cfg, layout, dtype, quantised)
    most_live = wave.is_live.sum(1).max()
    rows_before = wave.row_ids.shape[1]
    rows = fewer_rows(most_live, rows_before, weight_bytes, slot_bytes * slots)
    if (rows, slots) == (rows_before, wave.slots):
        return wave
    # Each device keeps its live rows, in order. One that has fewer of them than another device
    # keeps some that have ended, too.
    kept = np.argsort(~wave.is_live, axis=1, kind="stable")[:, :rows]
    index_B = layouts.shard_rows(kept.ravel(), layout)
    arrays = []
    for a in wave.state:
        # One after another, so that only one is held twice.
        arrays.append(layouts.resize_array(a, index_B, layout=layout, slots=slots))
        a.delete()
    row_ids = np.take_along_axis(wave.row_ids, kept, 1)
    is_live = np.take_along_axis(wave.is_live, kept, 1)
    return Wave(row_ids, is_live, slots, State(*arrays))


# ---------------------------------------------------------------- prefill
def prefill_wave(
    weights, cfg: ModelConfig, layout: Layout, prompts_BP, pad_B, row_ids, group: int, slots: int
) -> Wave:
    """The wave of these rows, its prompts in the cache; each `group` rows have the same prompt."""
    dtype = weights["norm_D"].dtype
    state = layouts.empty_state(B=row_ids.size, slots=slots, dtype=dtype, cfg=cfg, layout=layout)
    # One prompt for each group of rows.
    prompt_ids = row_ids[:, ::group]
    n_prompts = prompt_ids.shape[1]
    # Some of a device's prompts at a time, in equal parts, so that all run one program. The
    # copies for a group take memory, too.
    prompt_tokens = prompts_BP.shape[1] * max(1, group // 8)
    most = max(1, PREFILL_TOKENS // prompt_tokens)
    parts = [n for n in range(1, n_prompts + 1) if n_prompts % n == 0]
    at_once = max(n for n in parts if n <= most)
    for i in range(0, n_prompts, at_once):
        ids_B = prompt_ids[:, i : i + at_once].ravel()
        prompts = layouts.shard_rows(prompts_BP[ids_B], layout)
        pads = layouts.shard_rows(pad_B[ids_B], layout)
        first = i * group
        state = prefill(weights, state, prompts, pads, first, group=group, cfg=cfg, layout=layout)
    # `progress` is called once the prompts have run, and not before.
    jax.block_until_ready(state)
    return Wave(row_ids, is_live=row_ids >= 0, slots=slots, state=state)


@partial(jax.jit, static_argnames=("cfg", "layout", "group"), donate_argnames="state")
def prefill(
    weights, state: State, prompts_BP, pad_B, first, *, cfg: ModelConfig, layout: Layout, group: int
) -> State:
    """Run prompts, and put the state after each, `group` times, into rows first.. of its device."""
    B, width = prompts_BP.shape
    if jax.process_index() == 0:
        print(f"tracing prefill: {B} prompts of {width} tokens")
    # Run them in a cache of their own width.
    dtype = state.hidden_BD.dtype
    empty = layouts.empty_state(B=B, cfg=cfg, layout=layout, slots=width, dtype=dtype)
    positions = jnp.arange(width) - pad_B[:, None]
    # A token attends to the tokens before it and to itself, and to no pads.
    is_token = (positions >= 0)[:, None]
    mask = is_token & jnp.tri(width, dtype=bool)
    positions = jnp.maximum(positions, 0)
    cache = empty.keys, empty.values
    hidden_BD, cache = model.cached_forward(
        weights, cfg, layout, prompts_BP, positions, mask, cache, 0
    )

    def put(a, new, first):
        row_axis = layout.order.index("B") if a.ndim > 2 else 0
        start = [first * (axis == row_axis) for axis in range(a.ndim)]
        copies = jnp.repeat(new, group, row_axis)
        return jax.lax.dynamic_update_slice(a, copies, start)

    def put_all(state, new, first):
        return jax.tree.map(lambda a, n: put(a, n, first), state, new)

    # In a shard_map, as rows are counted within each device.
    specs = layouts.state_specs(layout)
    put_all = jax.shard_map(
        put_all, mesh=layout.mesh, in_specs=(specs, specs, P()), out_specs=specs
    )
    return put_all(state, State(*cache, hidden_BD), first)


# ---------------------------------------------------------------- decode
@partial(jax.jit, donate_argnames="state", static_argnames=("cfg", "layout", "steps", "sampling"))
def decode(
    weights,
    state: State,
    rows: Rows,
    key: jax.Array,
    width,
    t,
    until,
    *,
    cfg: ModelConfig,
    layout: Layout,
    steps: int,
    sampling: Sampling,
) -> tuple[State, dict]:
    """Decode answer tokens t .. until - 1, at most `steps`, after prompts of this width.

    Stops early once no row is live. -> (state, {tokens_BT int32 [B, steps], logprobs_BT,
    lengths_B: tokens made, live_B})
    """
    B = len(rows.id_B)
    slots = jnp.arange(state.keys.shape[layout.order.index("S")])
    stop_ids = jnp.array(cfg.stop_ids, jnp.int32)
    if jax.process_index() == 0:
        print(f"tracing decode: {B} rows, {len(slots)} slots, temperature {sampling.temperature}")

    def step(carry):
        i, state, out = carry
        token_B, logprob_B = sample_next(weights, state, rows, key, t + i, layout, sampling)
        live_B = out["live_B"]
        token_B = jnp.where(live_B, token_B, 0)
        out = {
            "tokens_BT": out["tokens_BT"].at[:, i].set(token_B),
            "lengths_B": out["lengths_B"] + live_B,
            "logprobs_BT": out["logprobs_BT"].at[:, i].set(jnp.where(live_B, logprob_B, 0.0)),
            "live_B": live_B & ~jnp.isin(token_B, stop_ids),
        }
        # The token attends to its prompt, the tokens since, and itself.
        slot = width + t + i
        mask_BS = (slots >= rows.pad_B[:, None]) & (slots <= slot)
        new = token_B[:, None], (slot - rows.pad_B)[:, None], mask_BS[:, None]
        cache = state.keys, state.values
        hidden_BD, cache = model.cached_forward(weights, cfg, layout, *new, cache, slot)
        return i + 1, State(*cache, hidden_BD), out

    def is_unfinished(carry):
        i, _, out = carry
        return (t + i < until) & out["live_B"].any()

    out = {
        "tokens_BT": jnp.zeros((B, steps), jnp.int32),
        "logprobs_BT": jnp.zeros((B, steps)),
        "lengths_B": jnp.zeros(B, jnp.int32),
        "live_B": rows.live_B,
    }
    out = {name: model.constrain(a, layout.mesh, layout.rows) for name, a in out.items()}
    _, state, out = jax.lax.while_loop(is_unfinished, step, (0, state, out))
    # Every process gets the answers of all, and so ends the wave after the same stage.
    return state, {name: model.constrain(a, layout.mesh) for name, a in out.items()}


def sample_next(weights, state: State, rows: Rows, key, t, layout, sampling: Sampling) -> tuple:
    """Token t of each row, from its hidden state -> (token_B, logprob_B)."""
    # Logits in float32, the vocabulary split over tp.
    z_BV = model.matmul("BD,VD->BV", state.hidden_BD, model.head(weights))
    z_BV = model.constrain(z_BV, layout.mesh, layout.rows, "tp")

    def uniform(row_id):
        # Of the key, t and the row alone: the same in every layout, wave and stage.
        key_of_row = jax.random.fold_in(jax.random.fold_in(key, t), row_id)
        return jax.random.uniform(key_of_row)

    sample = jax.shard_map(
        partial(sample_token, sampling=sampling),
        mesh=layout.mesh,
        check_vma=False,
        in_specs=(P(layout.rows, "tp"), P(layout.rows)),
        out_specs=P(layout.rows),
    )
    return sample(z_BV, jax.vmap(uniform)(rows.id_B))


def lower_decode(cfg: ModelConfig, layout: Layout, dtype, B: int, slots: int, quantised=False):
    """`decode` of B rows with so many slots, to be compiled; the devices need not be here."""

    def abstract(shape, dtype, spec):
        sharding = NamedSharding(layout.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    make_state = partial(layouts.empty_state, B=B, cfg=cfg, layout=layout, slots=slots, dtype=dtype)
    state = jax.tree.map(
        lambda a, spec: abstract(a.shape, a.dtype, spec),
        jax.eval_shape(make_state),
        layouts.state_specs(layout),
    )
    by_rows = P(layout.rows)
    rows = Rows(
        pad_B=abstract((B,), jnp.int32, by_rows),
        id_B=abstract((B,), jnp.int32, by_rows),
        live_B=abstract((B,), bool, by_rows),
    )
    key = jax.eval_shape(jax.random.key, 0)
    # The first token of answers to prompts that leave one slot.
    width, t, until = slots - 1, 0, 1
    return decode.lower(
        layouts.abstract_weights(cfg, layout, dtype, quantised),
        state,
        rows,
        key,
        width,
        t,
        until,
        cfg=cfg,
        layout=layout,
        steps=128,
        sampling=Sampling(),
    )
