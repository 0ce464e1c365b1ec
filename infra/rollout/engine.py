"""Rollouts: sample answers to prompts. Prefill the prompts, then decode in stages.

Prompts have a KV cache of their own, which holds each prompt once for a group of its answers. The
answers have a second KV cache, in which all rows write the same slot in each step. The answers'
cache grows from stage to stage. Rows that have ended leave the batch between stages if that saves
enough time. If a device cannot hold all of its rows at once, the rows are decoded in waves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import model
from infra.data import columns, hf
from infra.data.chat import Tokenizer, load_tokenizer
from infra.host.console import say
from infra.host.processes import all_gather_processes, host_count
from infra.rollout import decode_kernel, kv_cache, layouts, quantise
from infra.rollout.layouts import DecodeState, Layout, RolloutSize
from infra.rollout.sampling import Sampling, sample_token
from infra.rollout.waves import Rows, Wave, plan_waves, resize_wave, rows_of
from model import ModelConfig

# Maximum prompt tokens that a device computes in one call of `prefill`, unless a single prompt is
# longer.
PREFILL_TOKENS = 4096
# Maximum tokens per answer in one call of `decode`. Between calls, rows that have ended may leave
# the batch (see `resize_wave`). On CPUs, each row that leaves saves time, so calls are shorter.
STAGE = 128
STAGE_ON_CPU = 64
# For TPUs, decode is compiled with this option. XLA may place an array that stacks all layers in
# VMEM, and copy it from or to HBM in every layer. At the default of 0.5, a decode step of some
# models and lengths takes almost twice as long. At 1, XLA keeps an array in HBM if placing it in
# VMEM would copy more bytes than are used there.
TPU_OPTIONS = {"xla_tpu_msa_inefficient_use_to_copy_ratio": 1.0}


# ---------------------------------------------------------------- the engine
@dataclass
class Engine:
    """Samples answers with a model. `load` moves the trained parameters to the rollout's layout,
    `generate` decodes with them, and `unload` frees their memory."""

    model_cfg: ModelConfig
    tokenizer: Tokenizer
    layout: Layout
    dtype: str  # compute dtype of training; evaluations use it, too
    rollout_dtype: str  # dtype of rollouts in training, or int8
    max_answer: int  # maximum tokens of an answer
    # {answers per prompt: answers that a device decodes at once}. If a key is missing, a device
    # decodes all of its answers at once.
    rows_by_group: dict[int, int] = field(default_factory=dict)
    # The result of `layouts.to_rollout`; None before `load` and after `unload`.
    weights: dict | None = None
    lora_scale: float = 0.0  # scale of adapters, if the parameters have any
    system: str = ""  # system prompt used in training, for `answer`

    @classmethod
    def from_directory(cls, directory: str, max_answer: int = 512) -> "Engine":
        """The engine of a Hugging Face directory, with its weights, on the largest number of
        this process's devices that divides the model's D.

        Raises CheckpointError if the model cannot be used, and exits with code 2 if its tokenizer
        cannot be used.
        """
        model_cfg = hf.read_config(directory)
        tokenizer = load_tokenizer(directory)
        # The tokenizer's end-of-turn token and its eos end an answer, even if the model's config
        # does not name them.
        model_cfg = with_stop_ids(model_cfg, tokenizer.stop_ids)
        # The mesh shards the weights over D, as in training by default.
        devices = np.array(jax.local_devices())
        most = max(n for n in range(1, devices.size + 1) if model_cfg.D % n == 0)
        devices = devices[:most]
        mesh = Mesh(devices.reshape(1, -1, 1), model.AXES)
        dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
        # The prompts are not known yet: choose the layout for one answer per device, and for
        # prompts as long as the answers.
        size = RolloutSize(mesh.size, group=1, prompt_slots=max_answer, answer_slots=max_answer)
        layout = layouts.choose_layout("auto", model_cfg, mesh, dtype, size)
        system = hf.trained_system(directory) or ""
        engine = cls(model_cfg, tokenizer, layout, dtype, dtype, max_answer, system=system)
        engine.load(hf.load(hf.ModelFiles(directory, model_cfg), mesh, dtype=dtype))
        return engine

    def load(self, params: dict, exact: bool = False) -> None:
        """Cast or quantise parameters for the rollout, and move them to its layout.

        exact: use the compute dtype of training, so that an evaluation measures the policy itself.
        """
        dtype, quantised = (self.dtype, False) if exact else quantise.dtypes(self)
        self.weights = layouts.to_rollout(
            params, self.layout, dtype, quantised, lora_scale=self.lora_scale
        )

    def unload(self) -> None:
        """Free the memory of the weights for the update."""
        self.weights = None

    def generate(
        self,
        prompts: list,
        key: jax.Array,
        sampling: Sampling,
        group: int = 1,
        progress: Callable = lambda done, tokens: None,
        first_id: int = 0,
    ) -> dict:
        """Sample an answer to each prompt, until a stop token or for max_answer tokens.

        prompts: lists of token ids, the same number in every process. Every `group` consecutive
        prompts are equal. Raises ValueError if the prompts do not divide into the layout's parts.
        key: a row's tokens depend on the key and on the row's index among the rows of all
        processes. The first index is `first_id`. The layout affects the tokens only through
        rounding. progress(rows that have ended, tokens) is called after each prefill and stage.

        Returns NumPy arrays, with a row for each prompt: tokens_BT int32 [B, max_answer], 0 after
        the stop token; lengths_B, stop token included; truncated_B, true if no stop token came;
        logprobs_BT float32, under the distribution that tokens were drawn from, after temperature,
        top_k and top_p.
        """
        prompts_BT, prompt_length_B = pad_prompts(prompts)
        B = len(prompts_BT)  # rows of all processes
        answers = empty_answers(B, self.max_answer)
        stage = STAGE_ON_CPU if self.layout.is_on_cpu else STAGE
        steps = min(stage, self.max_answer)
        shared = dict(model_cfg=self.model_cfg, layout=self.layout)
        run = partial(jitted_decode(self.layout.platform), steps=steps, sampling=sampling, **shared)
        at_once = self.rows_by_group.get(group, B)
        waves, piece = plan_waves(B, layouts.row_shards(self.layout), group, at_once)
        # Dropping rows pays off sooner if the weights, which every step reads, are quantised.
        quantised = isinstance(model.head(self.weights), model.Quantised)
        for row_ids in waves:
            # Free the cache of the previous wave before the cache of this one is made.
            wave = state = None
            slots = slots_for(steps, self.max_answer)
            wave = prefill_wave(
                self.weights, prompts_BT, prompt_length_B, row_ids, piece, slots, **shared
            )
            progress(*totals(answers))

            for t in range(0, self.max_answer, stage):
                until = min(t + stage, self.max_answer)
                if t > 0:
                    # Grow the cache, and drop rows that have ended.
                    slots = slots_for(until, self.max_answer)
                    wave = resize_wave(wave, slots, self.model_cfg, self.layout, quantised)
                rows = rows_of(wave, prompt_length_B, first_id, self.layout)
                state, new = run(self.weights, wave.state, rows, key, t, until)
                new = jax.device_get(new)
                record(answers, new, wave.row_ids.ravel(), t, until)
                is_live = new["live_B"].reshape(wave.row_ids.shape)
                wave = replace(wave, state=state, is_live=is_live)
                progress(*totals(answers))
                if not is_live.any():
                    break
        # Every process has the answers of all processes. Return only this process's own.
        first = jax.process_index() * len(prompts)
        return {name: a[first : first + len(prompts)] for name, a in answers.items()}

    def texts(self, out: dict) -> list[str]:
        """The answers of `generate` as texts."""
        return [self.tokenizer.decode(tokens) for tokens in answer_tokens(out)]

    def answer(
        self, questions: list[str], system: str | None = None, temperature: float = 0
    ) -> list[str]:
        """Answers to questions as texts: greedy, or sampled at a temperature.

        system: the system prompt; "" = no system message, None = as in training. Raises TypeError
        for a single text.
        """
        if isinstance(questions, str):
            raise TypeError("questions must be a list of texts, not a single text")
        if not questions:
            return []
        system = self.system if system is None else system
        asked = [columns.messages_of({"question": question}, system) for question in questions]
        prompts = self.tokenizer.encode([self.tokenizer.render(messages) for messages in asked])
        # Repeat the last prompt until the rows divide over the devices.
        missing = -len(prompts) % layouts.row_shards(self.layout)
        prompts += prompts[-1:] * missing
        longest = padded_length(max(map(len, prompts)))
        size = RolloutSize(len(prompts), 1, longest, self.max_answer)
        which = self.model_cfg, self.layout, self.dtype
        self.rows_by_group[1] = layouts.rows_that_fit(*which, size, state_bytes=0, group=1)
        out = self.generate(prompts, jax.random.key(0), Sampling(temperature))
        return self.texts(out)[: len(questions)]


def make_engine(
    cfg,
    model_cfg: ModelConfig,
    mesh: Mesh,
    tokenizer: Tokenizer,
    longest_prompt: int,
    state_bytes: int,
    lora_scale: float = 0.0,
) -> Engine:
    """The engine of a run, without weights.

    cfg: the trainer's Config. state_bytes: bytes per device of the training state, which stays
    there during a rollout. lora_scale: see `Engine`. Exits with code 2 if --rollout_sharding tp is
    impossible.
    """
    # Choose the layout for answers of full length, which take the most memory.
    size = size_of_step(cfg, host_count(mesh), longest_prompt)
    layout = layouts.choose_layout(cfg.rollout_sharding, model_cfg, mesh, cfg.dtype, size)
    rows_that_fit = partial(layouts.rows_that_fit, model_cfg, layout, cfg.dtype, size, state_bytes)
    # A prompt has eval_samples answers in evaluations, and npq answers in training.
    rows_by_group = {group: rows_that_fit(group) for group in (cfg.eval_samples, size.group)}
    dtypes = cfg.dtype, cfg.rollout_dtype
    return Engine(
        model_cfg, tokenizer, layout, *dtypes, cfg.max_answer, rows_by_group, lora_scale=lora_scale
    )


def with_stop_ids(model_cfg: ModelConfig, stop_ids: set[int]) -> ModelConfig:
    """Returns the config with these ids added to its stop ids."""
    # The config is a static argument of jitted functions. Sort the ids, so that equal sets give
    # equal configs.
    return replace(model_cfg, stop_ids=tuple(sorted({*model_cfg.stop_ids, *stop_ids})))


def answer_tokens(out: dict) -> list[list[int]]:
    """The token ids of each answer that `generate` returns, its stop token included."""
    rows = zip(out["tokens_BT"], out["lengths_B"], strict=True)
    return [tokens[:length].tolist() for tokens, length in rows]


# ---------------------------------------------------------------- prompts and answers
def pad_prompts(prompts: list) -> tuple:
    """Returns (prompts of all processes, padded on the right, int32 [B, T]; their lengths [B])."""
    longest = max(len(prompt) for prompt in prompts)
    width = padded_length(int(all_gather_processes(longest).max()))
    # Pad with token 0. Any token would do, since only padding attends to padding.
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens_BT = all_gather_processes(tokens).reshape(-1, width)
    return tokens_BT, all_gather_processes(lengths).ravel()


def size_of_step(cfg, hosts: int, longest_prompt: int) -> RolloutSize:
    """The RolloutSize of a step's rollout, if all answers have their full length."""
    sequences = cfg.batch * cfg.npq * hosts
    prompt_slots = padded_length(longest_prompt)
    dtype, quantised = quantise.dtypes(cfg)
    return RolloutSize(sequences, cfg.npq, prompt_slots, cfg.max_answer, quantised, dtype)


def padded_length(n: int) -> int:
    """Round n up to 2^k or 3 * 2^k.

    XLA compiles a program for each length, so keep the number of lengths small.
    """
    power = 1 << (n - 1).bit_length()
    three_quarters = power * 3 // 4
    return three_quarters if n * 4 <= power * 3 else power


def slots_for(until: int, max_answer: int) -> int:
    """Number of KV cache slots for the first `until` tokens of answers."""
    # XLA compiles a program for each number of slots, so use few of them. An answer fills at most
    # max_answer slots.
    slots = min(padded_length(until), max_answer)
    # Round up to complete tiles, since the decode kernel writes tiles.
    return -(-slots // decode_kernel.TILE_SLOTS) * decode_kernel.TILE_SLOTS


def empty_answers(B: int, max_answer: int) -> dict:
    return {
        "tokens_BT": np.zeros((B, max_answer), np.int32),
        "logprobs_BT": np.zeros((B, max_answer), np.float32),
        "lengths_B": np.zeros(B, np.int32),
        "truncated_B": np.ones(B, bool),
    }


def record(answers: dict, new: dict, ids_B, t: int, until: int) -> None:
    """Write tokens t .. until - 1, as returned by `decode`, into the answers of rows ids_B."""
    # The last wave may have padding rows; their id is -1.
    is_row = ids_B >= 0
    ids = ids_B[is_row]
    for name in ("tokens_BT", "logprobs_BT"):
        answers[name][ids, t:until] = new[name][is_row, : until - t]
    answers["lengths_B"][ids] += new["lengths_B"][is_row]
    answers["truncated_B"][ids] = new["live_B"][is_row]


def totals(answers: dict) -> tuple[int, int]:
    """Returns (number of rows that have ended, by a stop token or by their length, number of tokens
    of all rows)."""
    is_full = answers["lengths_B"] == answers["tokens_BT"].shape[1]
    ended = ~answers["truncated_B"] | is_full
    tokens = answers["lengths_B"].sum()
    return int(ended.sum()), int(tokens)


# ---------------------------------------------------------------- prefill
def prompts_at_once(n_prompts: int, width: int, layout: Layout) -> int:
    """How many prompts one call of `prefill` runs for each part of the rows. n_prompts: all prompts
    of a part. width: tokens of a padded prompt."""
    # All calls run the same number of prompts, so that one compiled program serves them all.
    # Devices with the same key/value heads compute each other's prompts, too.
    most = max(1, PREFILL_TOKENS // (width * layout.sharing))
    calls = -(-n_prompts // most)
    return -(-n_prompts // calls)


def prefill_wave(
    weights,
    prompts_BT,
    prompt_length_B,
    row_ids,
    group: int,
    slots: int,
    *,
    model_cfg: ModelConfig,
    layout: Layout,
) -> Wave:
    """Make the wave of these rows and prefill its prompts. Every `group` rows share a prompt."""
    # Take the prompt of the first row of each group.
    first_row_ids = row_ids[:, ::group]
    n_prompts = first_row_ids.shape[1]
    width = prompts_BT.shape[1]
    sizes = dict(B=row_ids.size, n_prompts=first_row_ids.size, width=width, slots=slots)
    dtype = weights["norm_D"].dtype
    state = layouts.empty_state(**sizes, dtype=dtype, cfg=model_cfg, layout=layout)
    at_once = prompts_at_once(n_prompts, width, layout)
    for first in range(0, n_prompts, at_once):
        # The last call may compute some prompts again.
        first = min(first, n_prompts - at_once)
        ids_B = first_row_ids[:, first : first + at_once].ravel()
        prompts = layouts.shard_rows(prompts_BT[ids_B], layout)
        lengths = layouts.shard_rows(prompt_length_B[ids_B], layout)
        state = prefill(
            weights, state, prompts, lengths, first, group=group, model_cfg=model_cfg, layout=layout
        )
    # Wait, so that the caller reports progress only after the prompts have run.
    jax.block_until_ready(state)
    return Wave(row_ids, is_live=row_ids >= 0, group=group, slots=slots, state=state)


@partial(jax.jit, static_argnames=("model_cfg", "layout", "group"), donate_argnames="state")
def prefill(
    weights,
    state: DecodeState,
    prompts_PT,
    length_P,
    first,
    *,
    model_cfg: ModelConfig,
    layout: Layout,
    group: int,
) -> DecodeState:
    """Run prompts, and write their keys, values and hidden states into the state.

    On each device, keys and values go to the prompts' cache from row `first` on. The hidden state
    after each prompt goes to the prompt's `group` rows.
    """
    # JAX traces once per shape, so an unexpected "tracing" line in the output reveals a shape that
    # was not intended.
    n, width = prompts_PT.shape
    say(f"tracing prefill: {n} prompts of {width} tokens")
    # Padding comes last, so all prompts begin at position 0.
    positions = jnp.broadcast_to(jnp.arange(width), prompts_PT.shape)
    attend = partial(kv_cache.prefill_attention, first=first, layout=layout)
    attends = [attend] * len(state.prompt_caches)
    hidden_PD, prompt_caches = model.cached_forward(
        weights,
        model_cfg,
        layout,
        prompts_PT,
        positions,
        length_P - 1,
        attends,
        state.prompt_caches,
    )

    # This needs a shard_map, because `first` counts prompts within each device.
    def put_on_device(hidden_BD, new, first):
        copies = jnp.repeat(new, group, 0)
        return jax.lax.dynamic_update_slice(hidden_BD, copies, (first * group, 0))

    rows = P(layout.cache_rows)
    specs = dict(in_specs=(rows, rows, P()), out_specs=rows)
    put = jax.shard_map(put_on_device, mesh=layout.mesh, **specs)
    hidden_BD = put(state.hidden_BD, hidden_PD, first)
    hidden_BD = model.constrain(hidden_BD, layout.mesh, layout.rows)
    return DecodeState(prompt_caches, state.answer_caches, hidden_BD)


# ---------------------------------------------------------------- decode
@cache
def jitted_decode(platform: str):
    """Returns `decode`, jitted with the compiler options of a platform."""
    return jax.jit(
        decode,
        donate_argnames="state",
        static_argnames=("model_cfg", "layout", "steps", "sampling"),
        compiler_options=TPU_OPTIONS if platform == "tpu" else None,
    )


def decode(
    weights,
    state: DecodeState,
    rows: Rows,
    key: jax.Array,
    t,
    until,
    *,
    model_cfg: ModelConfig,
    layout: Layout,
    steps: int,
    sampling: Sampling,
) -> tuple[DecodeState, dict]:
    """Decode answer tokens t .. until - 1. Stops early once no row is live.

    steps: columns of the results, at least `until - t`. It is static, while t and until are traced:
    one program serves all stages, and a shorter last one.

    Returns (state, {tokens_BT int32 [B, steps], logprobs_BT float32 [B, steps], lengths_B: number
    of tokens decoded, live_B: as in `Rows`, after these tokens}).
    """
    B = len(rows.id_B)
    slots = state.answer_caches[0].keys.shape[3]
    stop_ids = jnp.array(model_cfg.stop_ids, jnp.int32)
    say(f"tracing decode: {B} rows, {slots} slots, temperature {sampling.temperature}")

    # Decode token t + i. Rows that have ended produce no token.
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
        state = run_token(weights, state, rows, token_B, t + i, model_cfg, layout)
        return i + 1, state, out

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
    # Give every process all answers, so that all processes end the wave after the same stage.
    return state, {name: model.constrain(a, layout.mesh) for name, a in out.items()}


def uniform(key, t, row_id) -> jax.Array:
    """Returns a uniform number in (0, 1) for token t of a row. The number depends only on the key,
    t and the row, not on layout, wave or stage."""
    key_of_row = jax.random.fold_in(jax.random.fold_in(key, t), row_id)
    # One number in 2**23 is 0, which would choose the first token, however unlikely.
    return jnp.maximum(jax.random.uniform(key_of_row), 2.0**-24)


def sample_next(weights, state: DecodeState, rows: Rows, key, t, layout, sampling) -> tuple:
    """Sample token t of each row from its hidden state. Returns (token_B, logprob_B)."""
    # Logits are float32. In the layout tp, the vocabulary is split over devices.
    z_BV = model.matmul("BD,VD->BV", state.hidden_BD, model.head(weights))
    z_BV = model.constrain(z_BV, layout.mesh, layout.rows, layout.split)

    sample = jax.shard_map(
        partial(sample_token, sampling=sampling, axes=layout.split),
        mesh=layout.mesh,
        check_vma=False,
        in_specs=(P(layout.rows, layout.split), P(layout.rows)),
        out_specs=P(layout.rows),
    )
    return sample(z_BV, jax.vmap(partial(uniform, key, t))(rows.id_B))


def run_token(weights, state: DecodeState, rows, token_B, t, model_cfg, layout) -> DecodeState:
    """Run token t of each answer, and write its keys and values to slot t of the answers' cache."""
    lengths = dict(
        prompt_length_B=rows.prompt_length_B, answer_length_B=jnp.full_like(token_B, t + 1)
    )
    # Split the lengths like the cache now, and keep XLA from doing it once in each layer.
    lengths = {name: kv_cache.split_like_cache(a, layout) for name, a in lengths.items()}
    lengths = jax.lax.optimization_barrier(lengths)
    # The prompts' caches are only read, so bind them to attention: layers need not return them.
    attends = [
        partial(kv_cache.decode_attention, prompts=prompts, slot=t, layout=layout, **lengths)
        for prompts in state.prompt_caches
    ]
    # The prompt comes before the answer.
    position_B = rows.prompt_length_B + t
    # Each row has one new token, so the index of its last token is 0.
    last_B = jnp.zeros_like(token_B)
    new_tokens = token_B[:, None], position_B[:, None], last_B
    hidden_BD, answer_caches = model.cached_forward(
        weights, model_cfg, layout, *new_tokens, attends, state.answer_caches
    )
    return DecodeState(state.prompt_caches, answer_caches, hidden_BD)
