"""podgrpo: train a Qwen or Llama model with GRPO on questions whose answers can be checked.

    python train.py                                      the default: a tiny model learns to add
    python train.py --model Qwen/Qwen2.5-0.5B-Instruct   any dense Qwen2, Qwen3 or Llama, on GSM8K

One step: sample `npq` answers to each of `batch` questions per host, score them, turn each group's
scores into advantages, update the policy. A host is a JAX process. Each host has its own questions,
and all hosts make the same calls in the same order. Process 0 prints, and writes the results.
"""

import dataclasses
import itertools
import math
import re
import time
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernel
import model
from infra.data import hf, rewards
from infra.data.answers import final_number, without_thoughts
from infra.data.chat import Tokenizer, load_tokenizer
from infra.data.evaluation import answers_of_all_hosts, eval_metrics, named_sets, questions_at_once
from infra.data.hub import model_directory
from infra.data.questions import (
    check_same_data,
    checksum,
    examples_to_imitate,
    has_held_out,
    load_questions,
    say_shared,
)
from infra.data.reward_pool import RewardPool
from infra.host import files
from infra.host.console import check, exit_on, say, warn
from infra.host.processes import all_gather_processes, connect, host_count, run_process, together
from infra.rollout.engine import Engine, Sampling, answer_tokens, with_stop_ids
from infra.rollout.layouts import LAYOUTS
from infra.run import flags
from infra.run.flags import (
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Probability,
    ProcessCount,
    ProcessIndex,
    Steps,
    Temperature,
)
from infra.run.log import DashForNaN
from infra.run.run import Run
from infra.run.run_dir import claimed_out
from infra.update import lora, packing
from infra.update.attention import ATTENTION, segment_attention
from infra.update.fit import UpdatePrograms, check_host_memory, fit
from infra.update.state import (
    abstract_state,
    initial_state,
    is_vector,
    reference,
    step_in_place,
    trained_part,
    weights_of,
    without_base,
)
from model import DEVICE, REMAT

# Start reading at the bottom: `train` is the algorithm.
# Array names end in their shapes: B answers of a host, T tokens of an answer, G groups of Q
# answers, M minibatches, N tokens of a flattened micro-batch; D and V are as in model.py.
# Before `make_batches`, a row is a dict of the data; after it, `rows` are a micro-batch's arrays.

# ---------------------------------------------------------------- Config: every flag
SYSTEM = "Think step by step, then give the final number as <answer>number</answer>."


@dataclasses.dataclass(frozen=True)
class Config:
    # The comment beside a flag is its help text. The type of a numeric flag gives its range:
    # Fraction is [0, 1), and Probability (0, 1].
    # the model, the data and the run
    model: str = "tiny"  # tiny (built in) | hub id or Hugging Face directory: Qwen2, Qwen3 or Llama
    data: str = "gsm8k"  # arith | gsm8k | hub id[:config][@split] | directory | .jsonl .csv...
    columns: str = ""  # question=...,answer=...; ignored for held-out sets that lack them
    eval_data: str = ""  # held-out sets: [name=]data,... | none; "" = data's held-out set, if any
    system: str = SYSTEM  # system prompt; "" = send no system message
    out: str = ""  # directory of the run, or gs://bucket/run; "" = out/<data>-<model>
    seed: Natural = 1  # for the order of questions, sampling, new adapters and the tiny model
    steps: Steps = 200  # GRPO steps
    sft_steps: Steps = 0  # supervised steps before GRPO, on a row's `demonstration` or `answer`
    # the rollout; lengths are in tokens
    batch: Positive = 8  # questions per host per step
    npq: Positive = 8  # answers per question: the group of GRPO
    max_prompt: Positive = 512  # skip questions whose prompt, with the template, is longer
    max_answer: Positive = 512  # truncate longer answers; a truncated answer scores 0
    truncated: Literal["zero", "mask"] = "zero"  # mask = omit truncated answers from the loss
    temperature: Temperature = 1.0  # divides the logits, in sampling and in the loss
    rollout_sharding: Literal["auto", *LAYOUTS] = "auto"  # layout of the weights in the rollout
    rollout_dtype: Literal["auto", "bfloat16", "int8"] = "auto"  # for GRPO rollouts; auto = dtype
    # the rewards
    reward_workers: Natural = 0  # processes that score answers; 0 = half the cores, at most 8
    reward_timeout: Positive = 5  # seconds that a reward function may take for one answer
    # the update
    lr: NonNegative = 1e-6  # learning rate of GRPO; with --lora, the default is 10 times as high
    sft_lr: NonNegative = 1e-5  # supervised learning rate; default 10x with --lora, except for tiny
    warmup: Natural = 5  # steps of linear warm-up, in GRPO and in the supervised steps
    decay: Literal["constant", "linear", "cosine"] = "constant"  # for lr and sft_lr, after warm-up
    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"  # sgd has no momentum
    b2: Fraction = 0.99  # second-moment decay of adamw, momentum decay of lion
    weight_decay: NonNegative = 0.0  # applied to matrices only; multiplied by the learning rate
    grad_clip: NonNegative = 1.0  # largest global norm of the gradient; 0 = no clipping
    clip_low: Fraction = 0.2  # clip the probability ratio to [1 - clip_low, 1 + clip_high]
    clip_high: NonNegative = 0.28  # see clip_low; the default is larger than clip_low, as in DAPO
    beta: NonNegative = 0.0  # weight of the KL to the policy at the start of GRPO; 0 = no KL
    is_cap: NonNegative = 2.0  # cap of the importance weight p_trainer/p_sampler; 0 = no weight
    entropy_bonus: NonNegative = 0.0  # weight of the policy's entropy in the GRPO loss; 0 = none
    advantage: Literal["grpo", "drgrpo", "rloo"] = "grpo"  # (r-mean)/std | r-mean | r-mean(others)
    loss_agg: Literal["token", "sequence", "constant"] = "token"  # weight 1 | 1/len | 1/max_answer
    ppo_epochs: Positive = 1  # passes over a step's answers
    minibatches: Positive = 1  # updates per pass
    micro_batch: Natural = 0  # rows per device in one forward/backward; 0 = the largest that fits
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # compute dtype; auto = float32 on CPU
    loss_impl: Literal["auto", "jax", "pallas", "full"] = "auto"  # auto = pallas (bf16 on TPU v4-6)
    attention: Literal["auto", *ATTENTION] = "auto"  # auto in bfloat16 = splash (TPU), cudnn (GPU)
    remat: Literal[tuple(REMAT)] = "full"  # backward recomputes all | all but matmuls | very little
    offload: Literal["none", "optimizer", "params"] = "none"  # kept in host memory; params = both
    # adapters
    lora: Natural = 0  # rank of adapters, which are trained instead of the weights; 0 = none
    lora_alpha: Positive = 32  # the adapters' product is multiplied by lora_alpha / lora
    adapter: str = ""  # directory of PEFT adapters; without --lora, also sets lora, lora_alpha
    # the devices
    mesh: str = "auto"  # dp,fsdp,tp, one may be -1 | auto: 1,-1,1 | host_local: processes,-1,1
    require_processes: Natural = 0  # stop unless this many JAX processes run; 0 = any number
    require_devices: Natural = 0  # stop unless the processes have this many devices in all; 0 = any
    coordinator: str = ""  # host:port of process 0; "" = ask Slurm or the TPU slice, or run alone
    processes: ProcessCount = 1  # number of JAX processes; only with a coordinator
    process_id: ProcessIndex = 0  # number of this process, from 0
    start_timeout: Natural = 20  # seconds to wait for other processes; launch.sh may wait longer
    # evaluation, and what the run leaves behind
    eval_every: Natural = 50  # GRPO steps between evaluations; 0 = only before and after GRPO
    eval_n: Natural = 0  # evaluate the first eval_n held-out questions of each set; 0 = all
    eval_samples: Positive = 1  # answers per held-out question; 2 or more need eval_temperature
    eval_temperature: NonNegative = 0.0  # 0 = greedy
    top_k: Natural = 0  # sampled evaluation: only the k most likely tokens; 0 = all
    top_p: Probability = 1.0  # sampled evaluation: only the top tokens with this total probability
    save_every: Natural = 50  # steps between checkpoints; 0 = save only at the end
    keep: Positive = 2  # number of newest checkpoints to keep
    resume: Literal["auto", "force"] = "auto"  # force = allow changed flags; if need be, start over
    wandb: str = ""  # project on wandb.ai; "" = none
    profile: Natural = 0  # step to trace into OUT/profile, counting supervised steps; 0 = none

    @property
    def lora_scale(self) -> float:
        """The scale in W + scale A B; 0 without adapters."""
        return self.lora_alpha / self.lora if self.lora else 0.0


# Defaults for `--model tiny`: a job that is small enough for two CPU cores.
# fmt: off
TINY = dict(
    data="arith", system="", steps=80, sft_steps=80,
    batch=32, npq=8, max_prompt=32, max_answer=40,
    lr=2e-4, sft_lr=2e-3, decay="linear", b2=0.95, minibatches=4,
    eval_every=20, eval_n=1000)
# fmt: on


def parse(argv: list[str]) -> Config:
    """Returns the Config of a command line; its `out` is a directory, out/gs/... for gs://...
    Exits with code 2 on mistakes. Looks at no devices, and at no file but --adapter's config."""
    cfg = flags.parse_flags(argv, Config, TINY, __doc__)
    check(cfg.steps + cfg.sft_steps or eval_sets(cfg), "no steps, no eval_data: nothing to do")
    return cfg


def eval_sets(cfg: Config) -> dict[str, str]:
    """The sets of held-out questions, as {name in metrics: data}; empty if there are none."""
    text = cfg.eval_data or (cfg.data if has_held_out(cfg.data) else "none")
    return {} if text == "none" else named_sets(text)


# ---------------------------------------------------------------- rewards: made to be edited
def correct(row: dict, answer: str) -> float:
    """1 if the answer's final number equals the final number of row["answer"]; otherwise 0."""
    number = final_number(answer)
    wanted = final_number(row["answer"], is_reference=True)
    return float(number is not None and number == wanted)


def formatted(row: dict, answer: str) -> float:
    """1 if the answer has a single <answer>, at its end, with a digit in it; otherwise 0."""
    one_tag = r"((?!<answer>).)*<answer>[^<]*\d[^<]*</answer>\s*"
    return float(bool(re.fullmatch(one_tag, without_thoughts(answer), re.S)))


# A reward function takes a row of the data, with all its columns, and the text of an answer. It may
# be `async def`. Worker processes call it, and each process has its own global variables.
# An answer's reward is the weighted sum of these functions. Truncated answers and failed calls
# score 0, so no function should score below 0: a truncated answer would then beat a wrong one.
REWARDS = [(correct, 1.0), (formatted, 0.1)]
# The metric `solved` and evaluations use this function, whatever the reward is.
SOLVED = correct


# ---------------------------------------------------------------- mesh and checks
def make_mesh(spec: str, devices: list) -> Mesh:
    """The mesh for --mesh. Exits with code 2 if `spec` is malformed or does not fit the devices."""
    # Keep the devices of a process together, so that a batch's rows are in the order of processes.
    devices = np.array(sorted(devices, key=lambda device: (device.process_index, device.id)))
    n = len(devices)
    processes = len({device.process_index for device in devices})
    named = {"auto": "1,-1,1", "host_local": f"{processes},{n // processes},1"}
    sizes = named.get(spec, spec).split(",")
    is_mesh = len(sizes) == 3 and all(re.fullmatch(r"-1|[1-9]\d*", size) for size in sizes)
    check(
        is_mesh and sizes.count("-1") <= 1,
        f"mesh {spec} is neither auto nor host_local nor three sizes dp,fsdp,tp, "
        "of which one may be -1, as in --mesh=-1,8,1",
    )
    # A size of -1 becomes the number of devices divided by the other sizes.
    known = math.prod(int(size) for size in sizes if size != "-1")
    has_free_size = "-1" in sizes
    wanted = f"a multiple of {known}" if has_free_size else str(known)
    check(
        n % known == 0 and (has_free_size or n == known),
        f"mesh {spec} needs {wanted} devices; there are {n}; try --mesh auto",
    )
    dims = [n // known if size == "-1" else int(size) for size in sizes]
    return Mesh(devices.reshape(dims), model.AXES)


def resolve(cfg: Config, mesh: Mesh) -> Config:
    """Resolve `auto` in dtype, rollout_dtype, attention and loss_impl to the choice for the mesh's
    devices. Exits with code 2 if a flag names a kernel that these devices cannot run."""
    platform = mesh.devices.flat[0].platform
    chip = mesh.devices.flat[0].device_kind
    dtype = cfg.dtype.replace("auto", "float32" if platform == "cpu" else "bfloat16")
    # The fast kernels need bfloat16, and the loss kernels are tuned for a few chips only.
    can_pallas = dtype == "bfloat16" and chip.startswith(tuple(kernel.VMEM_MIB))
    loss_impl = "pallas" if can_pallas else "jax"
    attention = "blockwise"
    if dtype == "bfloat16" and platform == "tpu":
        attention = "splash"
    elif dtype == "bfloat16" and platform == "gpu":
        attention = "cudnn"
    cfg = dataclasses.replace(
        cfg,
        dtype=dtype,
        rollout_dtype=cfg.rollout_dtype.replace("auto", dtype),
        attention=cfg.attention.replace("auto", attention),
        loss_impl=cfg.loss_impl.replace("auto", loss_impl),
        # A run that only evaluates needs no optimizer state, so use sgd, which has none.
        optimizer=cfg.optimizer if cfg.steps + cfg.sft_steps else "sgd",
    )
    check(
        cfg.loss_impl != "pallas" or can_pallas,
        f"loss_impl = pallas needs bfloat16 on {', '.join(kernel.VMEM_MIB)}, not {dtype} on "
        f"{chip}; try --loss_impl jax",
    )
    check(
        cfg.attention != "cudnn" or (platform == "gpu" and dtype == "bfloat16"),
        f"attention = cudnn needs bfloat16 on a GPU, not {dtype} on {chip}; try --attention auto",
    )
    return cfg


def check_sizes(cfg: Config, model_cfg: model.ModelConfig, mesh: Mesh, tokenizer_size: int) -> None:
    """Exit with code 2 unless all sizes are compatible. Called before weights load."""
    processes = host_count(mesh)
    local_devices = mesh.size // processes
    dp, fsdp, tp = mesh.devices.shape

    # The rollout splits sequences over all devices of a host, so npq must be a multiple of `unit`.
    sequences = cfg.batch * cfg.npq
    unit = local_devices // math.gcd(cfg.batch, local_devices)
    good_npq = max(1, cfg.npq // unit) * unit
    check(
        sequences % local_devices == 0,
        f"batch*npq = {cfg.batch}*{cfg.npq} = {sequences} sequences per host do not divide over "
        f"{local_devices} local devices; try --npq {good_npq} or --npq {good_npq + unit}",
    )

    # The update splits rows over dp and fsdp; tp stays within a host.
    check(
        dp * fsdp % processes == 0,
        f"mesh dp*fsdp = {dp}*{fsdp} does not divide over {processes} processes; tp = {tp} must "
        f"divide a host's {local_devices} devices",
    )
    answers = sequences * processes // (dp * fsdp)
    check(
        answers % cfg.minibatches == 0,
        f"{answers} answers per device do not divide into minibatches = {cfg.minibatches}; try "
        f"--minibatches {math.gcd(answers, cfg.minibatches)}",
    )
    # A row holds at least one answer, so there are at most as many rows as answers.
    check(
        cfg.micro_batch * cfg.minibatches <= answers,
        f"micro_batch = {cfg.micro_batch} is more than a minibatch's {answers // cfg.minibatches} "
        "answers per device; try --micro_batch 0, the largest that fits",
    )

    # The embedding and the head shard D over fsdp and tp. Layers shard D over fsdp only.
    largest_fsdp = math.gcd(model_cfg.D, mesh.size)
    check(
        model_cfg.D % (fsdp * tp) == 0,
        f"hidden size {model_cfg.D} does not divide over fsdp*tp = {fsdp}*{tp}; try --mesh "
        f"{mesh.size // largest_fsdp},{largest_fsdp},1",
    )
    split = {
        "query heads": model_cfg.N,
        "key/value heads": model_cfg.K,
        "feed-forward units": model_cfg.F,
    }
    for what, n in split.items():
        fix = f"try a tp of {math.gcd(n, tp)}"
        check(n % tp == 0, f"{what} = {n} do not divide over tp = {tp}; {fix}")
    check(
        tokenizer_size <= model_cfg.V,
        f"the tokenizer's largest token id is {tokenizer_size - 1}, but the model's vocabulary has "
        f"only {model_cfg.V} tokens; take both from one model",
    )
    check(
        cfg.max_prompt + cfg.max_answer <= model_cfg.max_positions,
        f"max_prompt + max_answer = {cfg.max_prompt} + {cfg.max_answer} exceed the model's "
        f"{model_cfg.max_positions} positions",
    )


def check_loss_impl(cfg: Config, model_cfg: model.ModelConfig, mesh: Mesh) -> None:
    """Exit with code 2 if the loss's kernels do not fit into a chip's VMEM."""
    if cfg.loss_impl == "pallas":
        with exit_on(ValueError, "pallas cannot compute this loss; try --loss_impl jax"):
            kernel.block_sizes(mesh.devices.flat[0].device_kind, model_cfg.D)


def check_data(cfg: Config, questions: list[dict], examples: list[dict]) -> None:
    """Exit with code 2 unless the data has enough questions for a step, and answers that
    supervised steps can imitate."""
    processes = jax.process_count()
    asked = cfg.batch * processes
    most = len(questions) // processes
    fix = f"--batch {most}" if most else "fewer processes"
    check(
        asked <= len(questions) or cfg.steps == 0,
        f"batch = {cfg.batch} on {processes} processes asks {asked} questions a step; {cfg.data} "
        f"has {len(questions)}; try {fix}",
    )
    check(
        examples or cfg.sft_steps == 0,
        f"supervised steps have nothing to imitate: in {cfg.data}, each demonstration (or answer) "
        f"is longer than max_answer = {cfg.max_answer} tokens",
    )


# ---------------------------------------------------------------- what a run is made of
@dataclasses.dataclass(frozen=True)
class Setup:
    """The model, data and devices of a run: what stays the same from its first to its last step."""

    model_dir: str  # Hugging Face directory of the model that the run starts from
    model_cfg: model.ModelConfig
    mesh: Mesh
    model_files: hf.ModelFiles  # the weights' files; a resumed run reads them only with --lora
    adapters: dict | None  # from --adapter; None without the flag, or if the run resumes
    questions: list[dict]  # rows, with `prompt_ids`; none if the run only evaluates
    examples: list[dict]  # questions whose demonstration is short enough for supervised steps
    held_out: dict[str, list[dict]]  # rows of each set of the evaluation data
    row_width: int  # tokens per packed row
    micro_batch: int  # rows per device in one forward and backward
    engine: Engine  # samples answers
    reward_pool: RewardPool  # scores answers


# ---------------------------------------------------------------- rollout and advantages
def question_order(seed: int, start: int, count: int, n_questions: int) -> list[int]:
    """Entries start .. start + count - 1 of an endless sequence of question indices, by epoch.

    Each epoch is a permutation of n_questions that depends only on the seed and the epoch's number.
    So the sequence is the same however steps and hosts split it, and a resumed run continues it.
    """
    places = np.arange(start, start + count)
    permutations = {}
    for epoch in np.unique(places // n_questions):
        rng = np.random.default_rng((seed, int(epoch)))
        permutations[epoch] = rng.permutation(n_questions)
    return [int(permutations[place // n_questions][place % n_questions]) for place in places]


def rows_of_step(rows: list[dict], number: int, per_host: int, cfg: Config) -> list[dict]:
    """Choose `per_host` of `rows` for this host's step, and repeat each to get batch * npq rows.

    number: the step's number in its phase (supervised or GRPO), counted from 0. Repeats of a row
    are consecutive: the answers to one question form its group.
    """
    first = (number * jax.process_count() + jax.process_index()) * per_host
    order = question_order(cfg.seed, first, per_host, len(rows))
    repeats = cfg.batch * cfg.npq // per_host
    return [rows[i] for i in order for _ in range(repeats)]


def sample_answers(rows, group, key, sampling, setup, run, first_id=0):
    """Sample an answer to each of this host's rows; a question has `group` consecutive rows.
    Returns (the output of Engine.generate, the answers' texts).

    first_id: number of earlier rows, over all hosts, that were sampled with the same key.
    """
    # Prompts are token ids: they were encoded when the data was loaded.
    prompts = [row["prompt_ids"] for row in rows]
    out = setup.engine.generate(prompts, key, sampling, group, run.between_stages, first_id)
    return out, setup.engine.texts(out)


def rewards_of(scores) -> np.ndarray:
    """The rewards of answers, from scores [..., 1 + reward functions]; column 0 is SOLVED's."""
    return scores[..., 1:] @ [weight for _, weight in REWARDS]


def rewards_or_nan(scores, faults: dict) -> np.ndarray:
    """`rewards_of`, with NaN for the answers on which a function of REWARDS failed."""
    reward_B = rewards_of(scores)
    for function, _ in REWARDS:
        failed = faults.get(rewards.name_of(function), {})
        reward_B[list(failed)] = math.nan
    return reward_B


def are_equal(reward_GQ) -> np.ndarray:
    """Whether all rewards of a group are equal, up to rounding: bool [G, 1]."""
    # Rewards are rounded sums (0.1 + 0.2 differs from 0.3), so compare them with a tolerance. The
    # tolerance is relative above 1, and absolute below 1, because 0.1 + 0.2 - 0.3 is 6e-17, not 0.
    # Do not test for a standard deviation of 0: rounding may raise it above 0 for equal rewards.
    best_G1 = reward_GQ.max(1, keepdims=True)
    worst_G1 = reward_GQ.min(1, keepdims=True)
    largest_G1 = np.maximum(abs(best_G1), abs(worst_G1))
    return best_G1 - worst_G1 <= 1e-12 * np.maximum(1, largest_G1)


def group_advantages(reward_B, npq: int, kind: str) -> np.ndarray:
    """Advantages of rewards [groups * npq] within each group, float64 [groups * npq].

    They are exactly 0 if a group's rewards are all equal (see `are_equal`). The standard deviation
    is the population's. Sources: grpo arXiv 2402.03300, drgrpo 2503.20783, rloo 2402.14740.
    """
    reward_GQ = np.asarray(reward_B, np.float64).reshape(-1, npq)
    all_equal_G1 = are_equal(reward_GQ)
    advantage_GQ = reward_GQ - reward_GQ.mean(1, keepdims=True)
    if kind == "grpo":
        std_G1 = reward_GQ.std(1, keepdims=True)
        advantage_GQ *= 1 / np.where(all_equal_G1, 1, std_G1)
    elif kind == "rloo":
        # r - mean of the others = (r - mean of all) * npq / (npq - 1)
        advantage_GQ *= npq / (npq - 1)
    return np.where(all_equal_G1, 0, advantage_GQ).reshape(-1)


def has_gradient(advantages, sampler_logprobs, cfg: Config) -> np.ndarray:
    """Whether each answer has a gradient, bool [answers]. All have one if the loss has a KL or an
    entropy bonus, or a logprob is not finite; otherwise, only answers whose advantage is not 0."""
    all_have = bool(cfg.beta or cfg.entropy_bonus or not are_finite(sampler_logprobs))
    has_advantage = np.asarray(advantages) != 0
    return has_advantage | all_have


def are_finite(logprobs: list | None) -> bool:
    """Whether the sampler's logprobs of all answers are finite. If not, the weights are broken.
    Callers then drop no answer: gradients are NaN, the update is skipped, and MAX_SKIPPED such
    updates end the run."""
    return logprobs is None or bool(np.isfinite(np.concatenate(logprobs)).all())


# ---------------------------------------------------------------- packed rows
# The fields of each token in a packed row. A token's target is the next token of its sequence, if
# the next token belongs to an answer; other tokens have no target. All float32 fields reach
# `grpo_terms` as `vectors`. `token_fields` leaves out the ones that a step does not need.
TOKEN_FIELDS = {
    "tokens": np.int32,  # token ids
    "positions": np.int32,  # position in the token's sequence
    "segments": np.int32,  # number of the sequence in its row, from 1; 0 is padding
    "targets": np.int32,  # token id to predict
    "weight": np.float32,  # weight of the target in the loss; 0 if there is no target
    "advantage": np.float32,  # advantage of the target's answer
    "sampler_logprobs": np.float32,  # logprob of the target when it was sampled
    "old_logprobs": np.float32,  # logprob of the target before the first update of the step
    "ref_logprobs": np.float32,  # logprob of the target under the reference
}


def token_fields(cfg: Config, supervised: bool) -> dict:
    """The fields of a step's rows: {name: dtype}."""
    absent = {"sampler_logprobs", "old_logprobs", "ref_logprobs"} if supervised else set()
    # With one update per step, the policy is still the old one: the loss needs no `old_logprobs`.
    if cfg.minibatches * cfg.ppo_epochs == 1:
        absent.add("old_logprobs")
    if cfg.beta == 0:
        absent.add("ref_logprobs")
    return {name: dtype for name, dtype in TOKEN_FIELDS.items() if name not in absent}


def make_rows(packed, prompts, answers, advantages, shape, cfg, sampler_logprobs=None) -> dict:
    """Write sequences into packed rows. Returns {field: NumPy array of `shape`, [rows, width]}.

    packed: {row: [index of each sequence in the row]}. sampler_logprobs: for each sequence, the
    logprobs of its answer's tokens, with or without padding at the end; None in supervised steps.
    The caller normalises `weight`. `update_policy` adds `old_logprobs` and `ref_logprobs`.
    """
    fields = token_fields(cfg, supervised=sampler_logprobs is None)
    added_later = ("old_logprobs", "ref_logprobs")
    rows = {name: np.zeros(shape, fields[name]) for name in fields if name not in added_later}
    for r, sequences in packed.items():
        start = 0
        for segment, i in enumerate(sequences, 1):
            n = len(answers[i])
            end = start + len(prompts[i]) + n
            rows["tokens"][r, start:end] = prompts[i] + answers[i]
            rows["positions"][r, start:end] = np.arange(end - start)
            rows["segments"][r, start:end] = segment
            # Each token of the answer is predicted at the token before it.
            predicting = np.s_[r, end - n - 1 : end - 1]
            weights = {"token": 1, "sequence": 1 / n, "constant": 1 / cfg.max_answer}
            rows["targets"][predicting] = answers[i]
            rows["weight"][predicting] = weights[cfg.loss_agg]
            rows["advantage"][predicting] = advantages[i]
            if sampler_logprobs is not None:
                rows["sampler_logprobs"][predicting] = sampler_logprobs[i][:n]
            start = end
    return rows


def make_batches(
    prompts, answers, advantages, cfg, setup, sampler_logprobs=None, truncated_B=False
):
    """Pack this host's sequences. Returns (batches, the totals of `packing.count_tokens`). batches
    has one list of micro-batches for each minibatch. A micro-batch is {field: global array
    [dp * fsdp * micro_batch, width]}."""
    is_masked = np.broadcast_to(truncated_B, len(answers)) & (cfg.truncated == "mask")
    # With broken weights, answers never end: mask none of them, so that the update finds the NaN.
    is_masked &= are_finite(sampler_logprobs)
    # Answers without a gradient are not packed, so that nothing is computed for them.
    is_packed = has_gradient(advantages, sampler_logprobs, cfg) & ~is_masked
    plan = packing.pack_minibatches(prompts, answers, is_packed, ~is_masked, cfg, setup)
    # Normalise the weights once, here, over the unmasked answers of all hosts, packed or not. Then
    # the gradient depends neither on the split into rows and micro-batches nor on whether answers
    # without a gradient are packed.
    normaliser_M = plan.answer_tokens_M if cfg.loss_agg == "token" else plan.answers_M

    batches = []
    by_rows = NamedSharding(setup.mesh, P(model.ROWS))
    to_global = partial(jax.make_array_from_process_local_data, by_rows)
    for micro_batches, normaliser in zip(plan.micro_batches, normaliser_M, strict=True):
        batch = []
        for packed in micro_batches:
            rows = make_rows(
                packed, prompts, answers, advantages, plan.shape, cfg, sampler_logprobs
            )
            # If all answers of a minibatch are masked, the normaliser is 0: avoid 0 / 0.
            rows["weight"] /= max(1, normaliser)
            # Each host passes its own rows; together they form one global array.
            batch.append({name: to_global(array) for name, array in rows.items()})
        batches.append(batch)
    return batches, plan.counts


def answer_sum(values, rows):
    """Sum `values` over the tokens of each answer. Returns the sum at every token of the answer's
    sequence. Use this in a loss of your own that needs complete answers (see assets/loss.md).
    values, result: [rows, width]."""

    def of_row(values, segments):
        return jax.ops.segment_sum(values, segments, num_segments=len(segments) + 1)[segments]

    return jax.vmap(of_row)(jnp.where(rows["weight"] > 0, values, 0), rows["segments"])


# ---------------------------------------------------------------- the update
def optimizer(cfg: Config, name: str) -> optax.GradientTransformation:
    """The optax transformation for the parameter `name`, without the learning rate."""
    # The learning rate changes from step to step, so `optimizer_step` takes it as an argument.
    scale = {
        "adamw": optax.scale_by_adam(b2=cfg.b2),
        "lion": optax.scale_by_lion(b2=cfg.b2),
        "sgd": optax.identity(),
    }[cfg.optimizer]
    # Norms and biases have no weight decay.
    decay = 0.0 if is_vector(name) else cfg.weight_decay
    return optax.chain(scale, optax.add_decayed_weights(decay))


def learning_rate(cfg: Config, step: int) -> float:
    """Learning rate of a step, counted from 1: linear warm-up, then decay, in each phase."""
    # The step is number k of the n steps in its phase.
    if step <= cfg.sft_steps:
        base = cfg.sft_lr
        k = step
        n = cfg.sft_steps
    else:
        base = cfg.lr
        k = step - cfg.sft_steps
        n = cfg.steps
    # Progress through the steps after warm-up, from 0 to just below 1.
    done = max(0, k - cfg.warmup) / max(1, n - cfg.warmup + 1)
    half_wave = (1 + math.cos(math.pi * done)) / 2
    decayed = {"constant": 1, "linear": 1 - done, "cosine": half_wave}
    warmed_up = min(1, k / max(1, cfg.warmup))
    return base * warmed_up * decayed[cfg.decay]


def loss_inputs(trained, weights, rows, cfg, model_cfg, mesh):
    """Run the model on packed rows. Returns (hidden states [N, D], LM head [V, D], targets [N]).

    trained: the trained parameters on the devices; gradients are with respect to these. weights:
    all weights, in the memory where --offload keeps them. `model.forward` explains why it needs
    both.
    """
    attend = segment_attention(cfg.attention, mesh.devices.flat[0].platform)
    options = model.ForwardOptions(cfg.dtype, attend, cfg.remat, cfg.lora_scale)
    # With --lora, only the adapters are trained, and the frozen weights are in `weights`.
    params = weights | trained
    hidden = model.forward(params, model_cfg, mesh, rows, options, weights["layers"])
    # The loss treats tokens independently, so flatten the rows.
    hidden_ND = hidden.reshape(-1, model_cfg.D)
    targets_N = rows["targets"].reshape(-1)
    return hidden_ND, model.head(params), targets_N


@partial(jax.jit, static_argnames=("cfg", "model_cfg", "mesh"))
def target_logprobs(weights, rows, *, cfg, model_cfg, mesh):
    """Logprobs of a micro-batch's targets under `weights`, [rows, width]."""
    say(f"tracing target_logprobs: {rows['tokens'].shape}")
    on_device = jax.device_put(weights, DEVICE)
    inputs = loss_inputs(on_device, weights, rows, cfg, model_cfg, mesh)
    weight_N = rows["weight"].reshape(-1)
    logprob_N, _ = kernel.score(
        *inputs, weight_N, mesh, temperature=cfg.temperature, impl=cfg.loss_impl
    )
    return model.constrain(logprob_N.reshape(rows["tokens"].shape), mesh, model.ROWS)


def loss_and_metrics(trained, weights, rows, cfg, model_cfg, mesh):
    """Returns (loss, metrics) of one micro-batch. metrics: the loss again; each stat of
    kernel.grpo_loss, summed over tokens; and for some stats also the maximum over tokens.

    `update_metrics` divides the sums by the number of trained tokens of a step.
    """
    inputs = loss_inputs(trained, weights, rows, cfg, model_cfg, mesh)
    vectors = {name: a.reshape(-1) for name, a in rows.items() if a.dtype == jnp.float32}
    # Supervised steps imitate demonstrations, which were not sampled at a temperature. An entropy
    # bonus would work against the imitation.
    is_grpo = "sampler_logprobs" in rows
    loss, stats = kernel.grpo_loss(
        *inputs,
        vectors,
        mesh,
        temperature=cfg.temperature if is_grpo else 1.0,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        beta=cfg.beta,
        is_cap=cfg.is_cap,
        entropy_bonus=cfg.entropy_bonus if is_grpo else 0.0,
        impl=cfg.loss_impl,
    )
    # Report logprobs as the negative log-likelihood.
    stats["nll"] = -stats.pop("logp")
    sums = {name: a.sum() for name, a in stats.items()}
    # Also log the maximum of these stats, because the mean hides a single outlier.
    with_maximum = {"ratio", "logprob_gap"} & stats.keys()
    maxima = {name: stats[name].max() for name in sorted(with_maximum)}
    return loss, {"loss": loss, "sum": sums, "max": maxima}


@partial(jax.jit, static_argnames=("cfg", "model_cfg", "mesh"))
def gradients(weights, rows, *, cfg, model_cfg, mesh):
    """Returns (gradients of one micro-batch, in float32 on the devices; its metrics). weights: all
    weights of the policy; with --lora, the gradients are of the adapters alone."""
    say(f"tracing gradients: {rows['tokens'].shape}, {', '.join(sorted(rows))}")
    # With --offload params, XLA drops this copy of the layers, because nothing reads it: the
    # forward fetches each layer from `weights`.
    on_device = jax.device_put(trained_part(weights, cfg), DEVICE)
    gradient = jax.grad(loss_and_metrics, has_aux=True)
    grads, metrics = gradient(on_device, weights, rows, cfg, model_cfg, mesh)
    shardings = model.shardings(model.flatten(grads), mesh)
    return jax.lax.with_sharding_constraint(grads, shardings), metrics


# Add two trees. The result reuses the memory of the first one.
sum_of_trees = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)


@partial(jax.jit, static_argnames="cfg")
def norm_and_factor(grads, loss, cfg):
    """Returns (global norm of the gradients, factor that clips them), both NaN if the norm or the
    loss is not finite."""
    norm = optax.tree.norm(grads)
    is_finite = jnp.isfinite(norm + loss)
    norm = jnp.where(is_finite, norm, jnp.nan)
    largest = cfg.grad_clip or jnp.inf
    return norm, jnp.minimum(1.0, largest / norm)


@partial(jax.jit, static_argnames=("name", "cfg"), donate_argnames=("param", "state"))
def optimizer_step(param, state, grad, factor, lr, *, name, cfg):
    """Take an optimizer step on one parameter. Returns (parameter, its optimizer state), unchanged
    if factor is NaN.

    Arrays that --offload keeps in host memory are copied to the device and back, layer by layer if
    they stack layers.
    """
    rule = optimizer(cfg, name)
    # An update that is not finite has a factor of NaN: keep the old values.
    old_if_skipped = partial(jnp.where, jnp.isnan(factor))

    def step(param, state, grad):
        direction, new_state = rule.update(factor * grad, state, param)
        new_param = param - lr * direction
        return jax.tree.map(old_if_skipped, (param, state), (new_param, new_state))

    return step_in_place(step, param, state, grad, name, cfg.offload)


def update(state, minibatch, lr, *, cfg, model_cfg, mesh):
    """Take an optimizer step on one minibatch.

    Returns (state, metrics of each micro-batch, gradient norm). If the gradients' norm or a loss is
    not finite, the step is skipped, and the returned norm is NaN.
    """
    total = None
    parts = []
    for rows in minibatch:
        grads, metrics = gradients(weights_of(state), rows, cfg=cfg, model_cfg=model_cfg, mesh=mesh)
        # Start from the first gradients, not from zeros, which would take as much memory again.
        total = grads if total is None else sum_of_trees(total, grads)
        del grads
        parts.append(metrics)
    loss = sum(metrics["loss"] for metrics in parts)
    norm, factor = norm_and_factor(total, loss, cfg)
    # Update one parameter at a time, and drop each gradient once it is used.
    grads = model.flatten(total)
    del total
    params = {}
    opt = {}
    for name, param in model.flatten(state["params"]).items():
        params[name], opt[name] = optimizer_step(
            param, state["opt"][name], grads.pop(name), factor, lr, name=name, cfg=cfg
        )
    return state | {"params": model.nest(params), "opt": opt}, parts, norm


def update_policy(state, batches, step, cfg, setup):
    """Take one optimizer step for each minibatch, `ppo_epochs` times. Before the first, add
    `old_logprobs` and `ref_logprobs` to the rows, if the loss needs them.

    Returns (state, metrics of each micro-batch, gradient norm of each optimizer step).
    """
    static = dict(cfg=cfg, model_cfg=setup.model_cfg, mesh=setup.mesh)
    policies = {"old_logprobs": weights_of(state), "ref_logprobs": weights_of(state, "ref")}
    fields = token_fields(cfg, supervised=step <= cfg.sft_steps)
    needed = sorted(policies.keys() & fields.keys())
    for rows in itertools.chain.from_iterable(batches):
        # Compute both before adding either: a new field in `rows` would cause a recompile.
        rows |= {name: target_logprobs(policies[name], rows, **static) for name in needed}
    parts = []
    norms = []
    lr = learning_rate(cfg, step)
    for minibatch in batches * cfg.ppo_epochs:
        state, parts_of_update, norm = update(state, minibatch, lr, **static)
        parts += parts_of_update
        norms.append(norm)
    parts, norms = jax.device_get((parts, norms))
    # Wait for the last optimizer step, so that the update's time includes it.
    jax.block_until_ready(state)
    return state, parts, norms


# The run ends after this many consecutive updates that are not finite.
MAX_SKIPPED = 10


def count_skipped(step: int, norms: list, skipped: int) -> int:
    """Returns the number of consecutive skipped updates at the end of a step, and prints how many
    updates of this step were skipped. norms: gradient norms of the step's updates, NaN if skipped.
    skipped: the number before the step."""
    # An applied update resets the count.
    for norm in norms:
        skipped = 0 if np.isfinite(norm) else skipped + 1
    count = int(np.sum(~np.isfinite(norms)))
    if count:
        say(
            f"step {step}: {count} of {len(norms)} updates skipped, because a loss or gradient is "
            "not finite"
        )
    return skipped


def end_if_diverged(run: Run) -> None:
    """Exit with code 1 if the run has skipped MAX_SKIPPED consecutive updates."""
    if run.skipped < MAX_SKIPPED:
        return
    warn(
        f"{run.skipped} updates in a row, up to step {run.step}, were skipped, because a loss or "
        f"gradient is not finite; the last checkpoint: {run.last_checkpoint()}; look at the "
        "rewards, or try a smaller --lr or --dtype float32"
    )
    raise SystemExit(1)


# infra/update/fit.py compiles `gradients` and `optimizer_step` before anything runs, to find the
# largest micro-batch that fits in memory.
UPDATE = UpdatePrograms(gradients, optimizer_step, optimizer, token_fields)


# ---------------------------------------------------------------- evaluation
def is_evaluated_after(step: int, cfg: Config, setup: Setup) -> bool:
    """Whether to evaluate when `step` steps are done: at the start of GRPO, after every
    `eval_every` GRPO steps, and at the end."""
    grpo_step = step - cfg.sft_steps
    is_due = cfg.eval_every and grpo_step > 0 and grpo_step % cfg.eval_every == 0
    return bool(setup.held_out and (is_due or grpo_step in (0, cfg.steps)))


def evaluate(params, step, cfg, setup, run) -> None:
    """Answer the held-out questions, `eval_samples` times each. Append the answers to evals.jsonl,
    and the metrics of each set of questions to metrics.jsonl."""
    began = time.monotonic()
    asked = [(name, row) for name, rows in setup.held_out.items() for row in rows]
    samples = cfg.eval_samples
    most = math.ceil(len(asked) / jax.process_count())
    per_host = questions_at_once(cfg.batch * cfg.npq, samples, jax.local_device_count(), most)
    per_round = per_host * jax.process_count()
    sampling = Sampling(cfg.eval_temperature, cfg.top_k, cfg.top_p)
    run.show("evaluating", step, 0, len(asked), samples)
    # All rounds use these weights. They are not quantised, because the saved model is not.
    setup.engine.load(params, exact=True)
    # Rollouts fold their step into the key. Steps count from 1, so 0 is free for evaluations.
    eval_key = jax.random.fold_in(jax.random.key(cfg.seed), 0)
    answered = []
    for start in range(0, len(asked), per_round):
        # Every host needs the same number of rows: rows beyond the last question repeat earlier
        # questions, and do not count.
        first = start + jax.process_index() * per_host
        places = range(first, first + per_host)
        rows = [asked[i % len(asked)][1] for i in places for _ in range(samples)]
        run.show("evaluating", step, start, len(asked), samples)
        out, texts = sample_answers(rows, samples, eval_key, sampling, setup, run, start * samples)
        # Like truncated answers, answers beyond the last question are not scored.
        is_beyond_B = np.repeat(places, samples) >= len(asked)
        is_left_out_B = out["truncated_B"] | is_beyond_B
        scores, faults = setup.reward_pool.score_answers(rows, texts, is_left_out_B)
        # Report only the faults of SOLVED: functions of REWARDS may need columns that only the
        # training data has.
        solved_name = rewards.name_of(SOLVED)
        solved_faults = {name: which for name, which in faults.items() if name == solved_name}
        setup.reward_pool.report(solved_faults)
        scored = scores[:, 0], rewards_or_nan(scores, faults)
        of_round = asked[start : start + per_round]
        answered += answers_of_all_hosts(of_round, samples, out, *scored, setup.engine.texts)
    setup.engine.unload()
    metrics = {"step": step}
    # A single set needs no name.
    is_single = len(setup.held_out) == 1
    took = f"{time.monotonic() - began:.1f}s" + ("" if is_single else " for all sets")
    for name in setup.held_out:
        solved = [answer["solved"] for answer in answered if answer["set"] == name]
        found = eval_metrics(np.reshape(solved, (-1, samples)))
        prefix = "eval/" if is_single else f"eval/{name}/"
        metrics |= {prefix + metric: value for metric, value in found.items()}
        what = "eval" if is_single else f"eval of {name}"
        shown = DashForNaN().format("solved {solved:.4f} (stderr {stderr:.4f})", **found)
        say(f"{what} at step {step} | {shown} of {len(setup.held_out[name])} | {took}")
    # Write only now: if a signal ends the run during an evaluation, the resumed run repeats it.
    run.write_evals(step, answered)
    run.write(metrics)


# ---------------------------------------------------------------- metrics
def rollout_metrics(reward_B, prompts, out, texts, scores, n_faults, cfg, setup) -> dict:
    """Metrics over the answers of all hosts.

    scores: [answers, 1 + reward functions]; column 0 is SOLVED's.
    """
    # One value per answer; the metric is the mean. To add a metric, add a line here.
    per_answer = {
        "reward/mean": reward_B,
        "len/prompt": [len(prompt) for prompt in prompts],
        "len/answer": out["lengths_B"],
        "truncated": out["truncated_B"],
    }
    per_answer |= setup.reward_pool.by_name(scores)
    if SOLVED is correct:
        # `correct` reads the final number, so a solved answer has one: do not parse it again. Nor
        # parse truncated answers, which are the longest.
        is_known = (scores[:, 0] > 0) | out["truncated_B"]
        per_answer["no_number"] = [
            not known and final_number(text) is None
            for known, text in zip(is_known, texts, strict=True)
        ]
    table = np.column_stack(list(per_answer.values()))
    table = all_gather_processes(table).reshape(-1, len(per_answer))
    means = dict(zip(per_answer, table.mean(0).tolist(), strict=True))
    column = dict(zip(per_answer, table.T, strict=True))
    # A group whose rewards are all equal has no advantages; see group/zero_variance below.
    reward_GQ = column["reward/mean"].reshape(-1, cfg.npq)
    return means | {
        "reward/std": float(reward_GQ.std()),
        "len/answer_max": float(column["len/answer"].max()),
        "group/zero_variance": float(are_equal(reward_GQ).mean()),
        "reward/faults": int(all_gather_processes(n_faults).sum()),
    }


def update_metrics(parts, norms, counts, cfg, setup) -> dict:
    """Metrics of a step's updates: means over trained tokens (loss and grad_norm: over updates),
    and padding. parts: metrics of each micro-batch. norms: gradient norm of each update."""
    finite_norms = [float(norm) for norm in norms if np.isfinite(norm)]
    # Answers without a gradient are not packed, so they do not count in the means. If no answer has
    # a gradient, the means are NaN.
    trained = counts["trained"] or math.nan
    metrics = {
        "kl": 0.0,  # replaced below if the loss has a KL
        "loss": float(sum(part["loss"] for part in parts)) / len(norms),
        "grad_norm": sum(finite_norms) / len(finite_norms) if finite_norms else math.nan,
        "skipped": len(norms) - len(finite_norms),
        "valid_tokens": counts["valid"],
        "trained_tokens": counts["trained"],
        "padding_fraction": 1 - counts["tokens"] / (counts["slots"] or math.nan),
        "micro_batch": setup.micro_batch,
    }
    # The updates of one pass over the answers together cover all trained tokens once.
    for name in parts[0]["sum"]:
        total = float(sum(part["sum"][name] for part in parts))
        # A metric that also has a maximum is logged as NAME/mean and NAME/max.
        key = f"{name}/mean" if name in parts[0]["max"] else name
        metrics[key] = total / trained / cfg.ppo_epochs
    for name in parts[0]["max"]:
        largest = float(max(part["max"][name] for part in parts))
        metrics[f"{name}/max"] = largest if counts["trained"] else math.nan
    return metrics


def step_metrics(step, counts, t_start, t_update, t_end, cfg, run) -> dict:
    """The learning rate of a step, its times in seconds, its speed and its memory. t_update: when
    the packing of rows began."""
    seconds = t_end - t_start
    update_seconds = t_end - t_update
    metrics = {
        "lr": learning_rate(cfg, step),
        "time/step_s": seconds,
        "time/update_s": update_seconds,
        "time/train/step_avg_last10_s": run.note_step_seconds(seconds),
        "throughput/train/valid_tokens_per_s": counts["valid"] / seconds,
    }
    return metrics | run.device_metrics(counts["flops"] * cfg.ppo_epochs, update_seconds)


# ---------------------------------------------------------------- set up: from flags to arrays
def reward_pool(cfg: Config) -> RewardPool:
    """Workers that call SOLVED and the functions of REWARDS."""
    functions = [SOLVED] + [function for function, _ in REWARDS]
    log = f"{cfg.out}/rewards.log"
    return RewardPool(functions, cfg.reward_workers, cfg.reward_timeout, log)


def load_data(cfg: Config, tokenizer: Tokenizer, run: Run) -> tuple[list[dict], list[dict], dict]:
    """Load and check the data. Returns `questions`, `examples` and `held_out` of Setup."""
    # If a process lacks a file, all processes exit.
    with together("the data"):
        # Load held-out sets first: one without questions ends the run before the others load.
        held_out = {
            name: load_questions(data, held_out=True, tokenizer=tokenizer, cfg=cfg)
            for name, data in eval_sets(cfg).items()
        }
        questions = []
        if cfg.sft_steps + cfg.steps:  # otherwise, the run only evaluates
            questions = load_questions(cfg.data, held_out=False, tokenizer=tokenizer, cfg=cfg)
        say_shared(questions, held_out)
        examples = examples_to_imitate(questions, tokenizer, cfg)
    check_same_data(questions, examples, held_out)
    check_data(cfg, questions, examples)
    asked = list(itertools.chain(*held_out.values()))
    found = {"questions": len(questions), "crc32": checksum(questions)}
    run.note_data(found | {"held_out": len(asked), "held_out_crc32": checksum(asked)})
    return questions, examples, held_out


@exit_on(OSError, "a file cannot be read or written; fix that, or choose another --out")
def set_up(cfg: Config, pool: RewardPool) -> tuple[Config, Setup, Run]:
    """Prepare the run, and report the user's mistakes before weights load. The caller has claimed
    cfg.out. Returns (Config after `resolve`, Setup, Run)."""
    # The devices, and the checkpoint that the run resumes from.
    mesh = make_mesh(cfg.mesh, jax.devices())
    # Store the number of processes in `require_processes`, and so in config.json: a resume must
    # not change the number of questions per step, batch * require_processes.
    cfg = dataclasses.replace(cfg, require_processes=jax.process_count())
    cfg = resolve(cfg, mesh)
    run = Run(cfg)

    # The model's config and tokenizer, but not its weights yet.
    model_dir = model_directory(cfg, "*.json", "*.txt", "*.jinja")
    model_cfg = hf.read_config(model_dir)
    tokenizer = load_tokenizer(model_dir)
    check_sizes(cfg, model_cfg, mesh, tokenizer.size)
    check_loss_impl(cfg, model_cfg, mesh)
    lora.check_rank(cfg, model_cfg)
    model_cfg = with_stop_ids(model_cfg, tokenizer.stop_ids)

    # The data. Check that the run fits on the disk and in memory, given the longest prompt.
    questions, examples, held_out = load_data(cfg, tokenizer, run)
    asked = itertools.chain(questions, *held_out.values())
    longest_prompt = max(len(row["prompt_ids"]) for row in asked)
    check_host_memory(cfg, longest_prompt + cfg.max_answer)
    model_files = hf.ModelFiles(model_directory(cfg, "*.safetensors"), model_cfg)
    # Check the disk after the download of the weights, which may be on it.
    run.check_disk(abstract_state(cfg, model_cfg, mesh, optimizer))
    # A resumed run takes its adapters from its checkpoint.
    adapters = None if run.step else lora.read(cfg, model_cfg)
    if cfg.lora:
        run.note_base(lora.base_of(cfg, model_files))
        if adapters:
            lora.check_base(cfg, run.base)
    # A failed login ends the run before compiling. A run that does not fit has an empty wandb page.
    run.start_wandb()
    row_width, micro_batch, engine = fit(cfg, model_cfg, mesh, tokenizer, longest_prompt, UPDATE)
    setup = Setup(
        model_dir,
        model_cfg,
        mesh,
        model_files,
        adapters,
        questions,
        examples,
        held_out,
        row_width,
        micro_batch,
        engine,
        pool,
    )
    run.open_outputs(setup)
    return cfg, setup, run


# ---------------------------------------------------------------- main: the loop
def first_state(cfg: Config, setup: Setup, run: Run) -> dict:
    """The training state to start or resume from: the parts that infra/update/state.py lists."""
    wanted = abstract_state(cfg, setup.model_cfg, setup.mesh, optimizer)
    state = run.load(without_base(wanted))
    if state is None:
        state = initial_state(setup.model_files, wanted, cfg, setup.mesh, optimizer, setup.adapters)
    if cfg.lora:
        state["base"] = lora.load_base(setup.model_files, cfg, setup.mesh)
    run.begin(state)
    # Without supervised steps, evaluate before the first step. After a resume, repeat an evaluation
    # that was cut short.
    if is_evaluated_after(run.step, cfg, setup) and not run.has_evaluation():
        evaluate(weights_of(state), run.step, cfg, setup, run)
    return state


def imitate(state: dict, cfg: Config, setup: Setup, run: Run) -> dict:
    """Take the supervised steps before GRPO. Returns the state after them.

    Supervised rows have no `old_logprobs` (see `token_fields`), so the ratio is 1. With advantage
    1, the GRPO loss then has the gradient of the demonstrations' negative log-likelihood.
    """
    sequences = cfg.batch * cfg.npq
    for step in range(run.step + 1, cfg.sft_steps + 1):
        run.begin_step(step)
        t_start = time.monotonic()
        rows = rows_of_step(setup.examples, step - 1, sequences, cfg)
        prompts = [row["prompt_ids"] for row in rows]
        answers = [row["demonstration_ids"] for row in rows]
        batches, counts = make_batches(prompts, answers, np.ones(sequences), cfg, setup)
        run.show("update", step)
        state, parts, norms = update_policy(state, batches, step, cfg, setup)
        if cfg.beta and step == cfg.sft_steps:
            # The reference is the policy at the start of GRPO. Without supervised steps,
            # initial_state has set it.
            state["ref"] = reference(state["params"], cfg.dtype)
        t_end = time.monotonic()
        metrics = {"step": step}
        metrics |= update_metrics(parts, norms, counts, cfg, setup)
        metrics |= step_metrics(step, counts, t_start, t_start, t_end, cfg, run)
        end_step(step, state, norms, metrics, cfg, setup, run)
    return state


def end_step(step, state, norms, metrics, cfg, setup, run) -> None:
    """Write the metrics of a step. Evaluate and save a checkpoint, each if it is due."""
    run.skipped = count_skipped(step, norms, run.skipped)
    run.end_step(step, state, metrics)
    end_if_diverged(run)
    run.stop_point()  # a run that stops here saves this step
    if is_evaluated_after(step, cfg, setup):
        evaluate(weights_of(state), step, cfg, setup, run)
    if step == run.total_steps or (cfg.save_every and step % cfg.save_every == 0):
        run.save()


def train(cfg: Config, setup: Setup, run: Run) -> None:
    """Train, from the first question to `out`/final."""
    state = first_state(cfg, setup, run)
    state = imitate(state, cfg, setup, run)

    for step in range(run.step + 1, run.total_steps + 1):
        run.begin_step(step)
        t_start = time.monotonic()
        # ------------------------------------------------ questions: each host has its own
        grpo_steps_done = step - 1 - cfg.sft_steps
        rows = rows_of_step(setup.questions, grpo_steps_done, cfg.batch, cfg)
        prompts = [row["prompt_ids"] for row in rows]

        # ------------------------------------------------ rollout: npq answers to each question
        run.show("rollout", step)
        setup.engine.load(weights_of(state))
        key = jax.random.fold_in(jax.random.key(cfg.seed), step)
        out, texts = sample_answers(rows, cfg.npq, key, Sampling(cfg.temperature), setup, run)
        setup.engine.unload()  # the update needs the memory
        t_rollout = time.monotonic()

        # ------------------------------------------------ rewards, and advantages in each group
        scores, faults = setup.reward_pool.score_answers(rows, texts, out["truncated_B"])
        n_faults = setup.reward_pool.report(faults)
        reward_B = rewards_of(scores)
        advantages = group_advantages(reward_B, cfg.npq, cfg.advantage)
        t_reward = time.monotonic()

        # ------------------------------------------------ update: ppo_epochs over all minibatches
        answers = answer_tokens(out)
        batches, counts = make_batches(
            prompts, answers, advantages, cfg, setup, out["logprobs_BT"], out["truncated_B"]
        )
        run.show("update", step)
        state, parts, norms = update_policy(state, batches, step, cfg, setup)
        t_end = time.monotonic()

        # ------------------------------------------------ metrics, evaluation, checkpoint
        metrics = {"step": step}
        metrics |= rollout_metrics(reward_B, prompts, out, texts, scores, n_faults, cfg, setup)
        metrics |= update_metrics(parts, norms, counts, cfg, setup)
        metrics |= step_metrics(step, counts, t_start, t_reward, t_end, cfg, run)
        tokens = metrics["len/answer"] * len(rows) * jax.process_count()
        metrics |= {
            "time/rollout_s": t_rollout - t_start,
            "time/reward_s": t_reward - t_rollout,
            "rollout/tokens_per_s": tokens / (t_rollout - t_start),
        }
        shown = [
            {"reward": reward_B[i], "truncated": bool(out["truncated_B"][i])}
            | setup.reward_pool.by_name(scores[i])
            | {"tokens": int(out["lengths_B"][i])}
            for i in range(2)
        ]
        run.write_samples(step, rows[:2], texts[:2], shown)
        end_step(step, state, norms, metrics, cfg, setup, run)

    run.finish(weights_of(state), setup)


@exit_on(files.CheckpointError, "a model or checkpoint cannot be used")
def main(argv: list[str]) -> None:
    cfg = parse(argv)
    rewards.check_functions(SOLVED, REWARDS)
    # Fork the processes that score answers before JAX has threads: a later fork could hang.
    with reward_pool(cfg) as pool:
        connect(cfg)
        # No other run may use `out` until this block ends.
        with claimed_out(cfg.out):
            cfg, setup, run = set_up(cfg, pool)
            with run.saved_if_cut_short(setup.micro_batch):
                train(cfg, setup, run)


if __name__ == "__main__":
    run_process(main)
