"""podgrpo: train a Qwen2 model with GRPO on questions whose answers can be checked.

    python train.py                                      the embedded default: a tiny model learns to add
    python train.py --model Qwen/Qwen2.5-0.5B-Instruct   any Qwen2 checkpoint, on GSM8K

One step: sample `npq` answers to each of `batch` questions a host, score them, turn each group's scores into
advantages, update. A process has its own questions, all run every jitted call, process 0 prints and writes.
"""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernel
import model
from infra import (
    checkpoint,
    cluster,
    data,
    files,
    hf,
    layouts,
    log,
    memory,
    rewards,
    rollout,
    run_dir,
)
from infra.cluster import all_gather_hosts
from infra.files import CheckpointError
from infra.layouts import LAYOUTS
from infra.log import check, exit_on, first_line, progress, say, warn
from model import ATTENTION, REMAT


# ---------------------------------------------------------------- Config: every flag of the program
@dataclasses.dataclass(frozen=True)
class Config:
    # what to train, on what
    model: str = "tiny"          # tiny (made in code) | a Hugging Face directory | a hub id, of a Qwen2 model
    data: str = "gsm8k"          # arith | gsm8k | a hub id[:config] | file.jsonl with `question` and `answer`
    eval_data: str = ""          # held-out questions, likewise; "" = the held-out part of data | none
    system: str = "Think step by step, then give the final number as <answer>number</answer>."  # prompt
    out: str = ""                # directory of the run, or gs://bucket/run; "" = out/<data>-<model>
    seed: int = 1                # of the order of questions, of sampling, and of the tiny model's weights
    steps: int = 200             # GRPO steps
    sft_steps: int = 0           # supervised steps on the reference answers, before GRPO
    # the rollout; lengths are in tokens
    batch: int = 8               # questions per host per step
    npq: int = 8                 # answers per question: the group of GRPO
    max_prompt: int = 512        # longer prompts, template included, are skipped
    max_answer: int = 512        # longer answers are cut, and a cut answer scores 0
    temperature: float = 1.0     # of sampling; the loss divides its logits by the same number
    rollout_sharding: Literal["auto", *LAYOUTS] = "auto"  # where the weights lie meanwhile
    # the update
    lr: float = 1e-6             # learning rate of GRPO
    sft_lr: float = 1e-5         # learning rate of the supervised steps
    warmup: int = 5              # steps of linear warm-up, at the start of either phase
    decay: Literal["constant", "linear", "cosine"] = "constant"  # of lr after warm-up, towards 0
    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"  # sgd has no momentum
    b2: float = 0.99             # second-moment decay of adamw, momentum decay of lion
    weight_decay: float = 0.0    # of matrices, per unit of learning rate
    grad_clip: float = 1.0       # largest global norm of the gradient; 0 = any
    clip_low: float = 0.2        # the probability ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28      # see clip_low
    beta: float = 0.0            # weight of the KL to the model as GRPO starts; 0 = none, and none is held
    is_cap: float = 2.0          # cap of the importance weight trainer/sampler; 0 = no such weight
    entropy_bonus: float = 0.0   # weight of the policy's entropy in the loss of GRPO; 0 = none
    advantage: Literal["grpo", "drgrpo", "rloo"] = "grpo"  # (r-mean)/std | r-mean | r-mean of others
    loss_agg: Literal["token", "sequence", "constant"] = "token"  # mean | of answers' means | sum/max_answer
    ppo_epochs: int = 1          # passes over a step's answers
    minibatches: int = 1         # updates per pass
    micro_batch: int = 0         # rows per device in one forward/backward; 0 = the largest that fits
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute; auto = bfloat16, on CPU float32
    loss_impl: Literal["auto", "jax", "pallas", "full"] = "auto"  # auto = pallas on TPUs in bfloat16
    attention: Literal["auto", *ATTENTION] = "auto"  # auto = splash on TPUs, cudnn on GPUs
    remat: Literal[tuple(REMAT)] = "full"  # what is computed again: all | not matrix products | nothing
    offload: Literal["none", "optimizer", "params"] = "none"  # to the host's memory; params: both
    # the devices
    mesh: str = "auto"           # dp,fsdp,tp, one may be -1 | auto: 1,-1,1 | host_local: processes,-1,1
    require_processes: int = 0   # stop unless so many JAX processes run; 0 = any number
    require_devices: int = 0     # stop unless they have so many devices together; 0 = any number
    coordinator: str = ""        # host:port of process 0; "" = as Slurm or the TPU slice have it, else alone
    processes: int = 1           # JAX processes of the run, where there is a coordinator
    process_id: int = 0          # which of them this is: 0, 1, ...
    start_timeout: int = 20      # seconds to wait for the others to start; launch.sh, which starts all: 900
    # evaluation, and what the run leaves behind
    eval_every: int = 50         # GRPO steps between evaluations; 0 = only before and after
    eval_n: int = 0              # held-out questions to evaluate; 0 = all
    eval_temperature: float = 0.0  # 0 = greedy
    top_k: int = 0               # of sampled evaluation only: the loss wants rollouts from the whole softmax
    top_p: float = 1.0           # likewise
    save_every: int = 50         # steps between checkpoints; there is always one at the end; 0 = only that
    keep: int = 2                # newest checkpoints kept
    resume: Literal["auto", "force"] = "auto"  # force = go on even if flags changed the meaning of the run
    wandb: str = ""              # project on wandb.ai; "" = none

# What `--model tiny` starts from instead: the main job, small enough for two CPU cores.
TINY = dict(data="arith", system="", steps=80, sft_steps=80, batch=32, npq=8, max_prompt=32, max_answer=40,
            lr=2e-4, sft_lr=2e-3, decay="linear", b2=0.95, minibatches=4, eval_every=20, eval_n=1000)

def parse(argv):
    """Command line -> Config, whose fields are the flags, with their types, choices and help."""
    def error(message):
        unknown = re.search(r"unrecognized arguments: --([\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], comments, 1) if unknown else []
        check(False, message + (f"; did you mean --{near[0]}?" if near else "; see --help"))
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.M))
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n--model tiny sets first: {TINY}", usage="python train.py [--flag value ...]",
        formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = error
    for f in dataclasses.fields(Config):
        choices = get_args(f.type) or None
        parser.add_argument(f"--{f.name}", type=str if choices else f.type, choices=choices,
                            help=f"{comments[f.name]} (default {f.default!r})")
    argv = list(argv)
    for i in reversed(range(1, len(argv))):
        if re.match(r"-\d", argv[i]):  # argparse would take the value in `--mesh -1,8,1` for a flag
            argv[i - 1:i + 1] = [f"{argv[i - 1]}={argv[i]}"]
    flags = vars(parser.parse_args(argv))
    cfg = Config(**(TINY if flags.get("model", "tiny") == "tiny" else {}) | flags)
    for name in "model", "data":
        check(flags.get(name, "-").strip(), f"--{name} is given nothing; name one, or drop the flag")
    check_flags(cfg)
    names = [os.path.basename(name.rstrip("/")).removesuffix(".jsonl") for name in (cfg.data, cfg.model)]
    out = re.sub("^gs://", "out/gs/", cfg.out.rstrip("/")) or f"out/{'-'.join(names).replace(':', '-')}"
    return dataclasses.replace(cfg, out=out)

def check_flags(cfg):
    """What can be said without devices and files."""
    least = dict.fromkeys("batch npq max_prompt max_answer ppo_epochs minibatches keep processes".split(), 1)
    below = dict(b2=1, clip_low=1, steps=10**6, sft_steps=10**6, processes=10**4, process_id=cfg.processes)
    for f in dataclasses.fields(cfg):
        value, low = getattr(cfg, f.name), least.get(f.name, 0)
        high = below.get(f.name, 2**31 if f.type is int else 1e38)  # int32's; below float32's
        check(f.type not in (int, float) or low <= value < high and not 0 < value < 1e-30,
              f"{f.name} = {value} is out of range; it must be a number >= {low} and < {high}")
        odd = data.MARKS if f.name == "system" else "[\0-\x1f\ud800-\udfff]|.{1000}"
        check(f.type is not str or not re.search(odd, value), f"{f.name} = {str(value)[:50]!r} holds a line "
              "break, a mark of the chat or half a character, which no name or prompt may, or is too long")
        check(value in (get_args(f.type) or [value]), f"{f.name} = {value} is none of {get_args(f.type)}")
    check(cfg.temperature > 0, "temperature = 0 gives npq equal answers; GRPO needs a --temperature above 0")
    check(0 < cfg.top_p <= 1, f"top_p = {cfg.top_p} is not a probability above 0; 1 keeps all tokens")
    check(cfg.npq >= 2 or cfg.steps == 0, f"npq = {cfg.npq} leaves nothing to compare with; try --npq 8")
    check(cfg.steps + cfg.sft_steps or cfg.eval_data != "none", "no steps, no eval_data: nothing to do")
    port = re.fullmatch(r".+:([1-9]\d{0,4})", cfg.coordinator)
    check(port and int(port[1]) < 2**16 if cfg.coordinator else (cfg.processes, cfg.process_id) == (1, 0),
          f"coordinator = {cfg.coordinator!r} is not host:port of process 0, a port from 1 to 65535, which "
          f"processes = {cfg.processes} and process_id = {cfg.process_id} want")
    check(cfg.eval_temperature or (cfg.top_k, cfg.top_p) == (0, 1), f"top_k = {cfg.top_k} and top_p = "
          f"{cfg.top_p} are for sampled evaluation: add --eval_temperature 1, or drop them; rollouts sample "
          "the whole distribution, whose log-probs the loss computes")

def eval_data(cfg):
    return cfg.eval_data or ("none" if cfg.data.endswith(".jsonl") else cfg.data)

# ---------------------------------------------------------------- questions

# ---------------------------------------------------------------- answers and rewards: made to be edited

def correct(row, answer):
    """1 if the final numbers are equal."""
    return float(data.final_number(answer) is not None and data.final_number(answer) == data.final_number(row["answer"]))

def formatted(row, answer):
    """1 if the answer ends with its one <answer>number</answer>."""
    return float(bool(re.fullmatch(r"((?!<answer>).)*<answer>[^<]*\d[^<]*</answer>\s*", answer, re.S)))

# (function of (row of the data, answer) -> float, weight): the reward is the weighted sum
REWARDS = [(correct, 1.0), (formatted, 0.1)]
# What the metric `solved` and evaluation count, whatever is rewarded.
SOLVED = correct

# ---------------------------------------------------------------- the processes of a run

# ---------------------------------------------------------------- model directory, mesh, sizes and checks

def hosts(mesh):
    """JAX processes that its devices belong to."""
    return len({d.process_index for d in mesh.devices.flat})

def resolve(cfg, mesh):
    """What is `auto`, by the kind of device."""
    kind = mesh.devices.flat[0].platform
    dtype = cfg.dtype.replace("auto", "float32" if kind == "cpu" else "bfloat16")
    attention = {("tpu", "bfloat16"): "splash", ("gpu", "bfloat16"): "cudnn"}.get((kind, dtype), "blockwise")
    loss_impl = "pallas" if (kind, dtype) == ("tpu", "bfloat16") else "jax"
    return dataclasses.replace(cfg, dtype=dtype, attention=cfg.attention.replace("auto", attention),
                               loss_impl=cfg.loss_impl.replace("auto", loss_impl))

def row_width(longest, mesh):
    """Of sequences up to `longest` tokens: rounded up, as tp divides the tokens of a row."""
    return -(-longest // (8 * mesh.shape["tp"])) * 8 * mesh.shape["tp"]

def make_mesh(spec, devices):
    """`dp,fsdp,tp` over the devices, each process's together: the rows of a batch lie in process order."""
    n, processes = len(devices), len({d.process_index for d in devices})
    parts = {"auto": "1,-1,1", "host_local": f"{processes},{n // processes},1"}.get(spec, spec).split(",")
    check(len(parts) == 3 and all(re.fullmatch(r"-1|[1-9]\d*", p) for p in parts) and parts.count("-1") <= 1,
          f"mesh {spec} is neither auto nor host_local nor three sizes dp,fsdp,tp, of which one may be -1")
    known = math.prod(int(p) for p in parts if p != "-1")
    check(n % known == 0 and ("-1" in parts or n == known), f"mesh {spec} needs "
          f"{'a multiple of ' * ('-1' in parts)}{known} devices; there are {n}; try --mesh auto")
    devices = np.array(sorted(devices, key=lambda d: (d.process_index, d.id)))
    return Mesh(devices.reshape([n // known if p == "-1" else int(p) for p in parts]), ("dp", "fsdp", "tp"))

def check_sizes(cfg, shape, mesh, tokenizer_size):
    """Every divisibility of the run, in one place, before weights load."""
    processes, sequences = hosts(mesh), cfg.batch * cfg.npq
    local, (dp, fsdp, tp), backend = mesh.size // processes, mesh.devices.shape, mesh.devices.flat[0].platform
    check(cfg.loss_impl != "pallas" or (backend, cfg.dtype) == ("tpu", "bfloat16"),
          f"pallas is for tpu, bfloat16, not {backend}, {cfg.dtype}; try --loss_impl jax")
    check(cfg.attention != "cudnn" or (backend, cfg.dtype) == ("gpu", "bfloat16"),
          f"cudnn is for gpu, bfloat16, not {backend}, {cfg.dtype}; try --attention auto")
    unit = local // math.gcd(cfg.batch, local)  # what npq must be a multiple of
    low = max(1, cfg.npq // unit) * unit
    check(sequences % local == 0, f"batch*npq = {cfg.batch}*{cfg.npq} = {sequences} sequences per host do "
          f"not divide over {local} local devices; try --npq {low} or --npq {low + unit}")
    check(dp * fsdp % processes == 0, f"mesh dp*fsdp = {dp}*{fsdp} does not divide over {processes} "
          f"processes; a tp = {tp} must stay within a host's {local} devices")
    rows, whole = sequences * processes // (dp * fsdp), math.gcd(shape.D, mesh.size)
    check(rows % cfg.minibatches == 0, f"{rows} rows per device do not divide into minibatches = "
          f"{cfg.minibatches}; try --minibatches {math.gcd(rows, cfg.minibatches)}")
    check(cfg.micro_batch * cfg.minibatches <= rows, f"micro_batch = {cfg.micro_batch} is more than a "
          f"minibatch's {rows // cfg.minibatches} rows per device; try --micro_batch 0: the largest")
    check(shape.D % (fsdp * tp) == 0, f"hidden size {shape.D} does not divide over fsdp*tp = {fsdp}*{tp}; "
          f"try --mesh {mesh.size // whole},{whole},1")
    for what, n in ("query heads", shape.N), ("key/value heads", shape.K), ("feed-forward size", shape.F):
        check(n % tp == 0, f"{what} = {n} do not divide over tp = {tp}; try a tp of {math.gcd(n, tp)}")
    check(tokenizer_size <= shape.V, f"the tokenizer has ids below {tokenizer_size}, more than the model's "
          f"vocabulary of {shape.V}; take both from one model")
    check(cfg.max_prompt + cfg.max_answer <= shape.max_positions, f"max_prompt + max_answer = "
          f"{cfg.max_prompt} + {cfg.max_answer} exceed the model's {shape.max_positions} positions")

def check_step(cfg, questions, width):
    """That a step asks each question once, and that its rows have room in the host's memory."""
    asked, sequences = cfg.batch * jax.process_count(), cfg.batch * cfg.npq
    check(asked <= questions or cfg.steps == 0, f"batch = {cfg.batch} on {jax.process_count()} processes asks "
          f"{asked} questions a step; {cfg.data} has {questions}; try --batch {questions // jax.process_count()}")
    gib, most = sequences * width * ROW_BYTES / 2 ** 30, memory.host_memory() / 4
    check(gib <= most, f"batch*npq = {cfg.batch}*{cfg.npq} = {sequences} sequences per host, in rows of {width} "
          f"tokens, take {gib:.1f} GiB of this host's memory, more than a quarter of it, {most:.1f}; try "
          f"--batch {max(1, int(cfg.batch * most / gib))}")

ROW_BYTES = 100  # of a token on the host: eight arrays of 4 bytes, lists of Python's integers, a text

# ---------------------------------------------------------------- rollout, advantages, rows
def sample_answers(weights, rows, group, key, what, cfg, run, temperature, top_k=0, top_p=1.0):
    """Answers to this host's rows, `group` after another alike -> (what `model.generate` returns, texts)."""
    clock = [time.time()] * 2
    def tell(done, tokens):
        cluster.check_for_stop(run)
        line = f"{what}: {done} answers done, {tokens} tokens, {tokens / (time.time() - clock[0]):.0f} tok/s"
        progress(line)
        if not sys.stdout.isatty() and time.time() - clock[1] > 30:
            clock[1] = time.time()
            say(line)
    out = rollout.generate(weights, run.shape, run.layout, [row["prompt"] for row in rows], key, group=group,
                         max_answer=cfg.max_answer, temperature=temperature, top_k=top_k, top_p=top_p,
                         at_once=run.at_once, progress=tell)
    return out, [run.tokenizer.decode(t[:n].tolist()) for t, n in zip(out["tokens_BT"], out["lengths_B"])]

def group_advantages(rewards, npq, kind):
    """[groups * npq] rewards -> advantages in each group, exactly 0 where all are equal; std: population's.
    Sources: grpo arXiv 2402.03300, drgrpo 2503.20783, rloo 2402.14740."""
    r = np.asarray(rewards, np.float64).reshape(-1, npq)
    flat = r.max(1, keepdims=True) == r.min(1, keepdims=True)  # std may round to more than 0
    a = r - r.mean(1, keepdims=True)
    a *= {"grpo": 1 / np.where(flat, 1, r.std(1, keepdims=True)), "drgrpo": 1, "rloo": npq / (npq - 1)}[kind]
    return np.where(flat, 0, a).reshape(-1)

def pack(lengths, width):
    """Sequences into rows of `width` -> [[places in lengths] per row], by best fit, longest first."""
    rows, free = [], np.zeros(0, int)
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        left = np.where(free >= lengths[i], free, width + 1)
        if not rows or left.min() > width:
            rows, free, left = rows + [[]], np.append(free, width), np.append(left, width)
        rows[j := int(left.argmin())].append(i)
        free[j] -= lengths[i]
    return rows

def pack_all(lengths, minibatches, shards, width):
    """-> (the rows of each minibatch, how many a device computes: infinitely, if a sequence is longer)"""
    parts = [[[ids[i] for i in row] for row in pack([lengths[i] for i in ids], width)] for ids in minibatches]
    return parts, sum(-(-len(p) // shards) for p in parts) if max(lengths) <= width else math.inf

def make_rows(packed, prompts, answers, advantages, shape, cfg, sampler=None):
    """Packed sequences -> NumPy arrays of `shape` [rows, width]: what a position sees (tokens, positions,
    segments; 0 is padding) and is to predict (targets; per target weight, 0 = no loss, advantage, sampler's
    log-prob)."""
    rows = {k: np.zeros(shape, np.int32) for k in ("tokens", "positions", "segments", "targets")}
    floats = ["weight", "advantage"] + ["sampler"] * (sampler is not None)
    rows |= {k: np.zeros(shape, np.float32) for k in floats}
    for r, sequences in packed.items():
        start = 0
        for segment, i in enumerate(sequences, 1):
            n, end = len(answers[i]), start + len(prompts[i] + answers[i])
            whole, said = np.s_[r, start:end], np.s_[r, end - n - 1:end - 1]
            rows["tokens"][whole] = prompts[i] + answers[i]
            rows["positions"][whole] = range(end - start)
            rows["segments"][whole] = segment
            rows["targets"][said] = answers[i]
            weights = {"token": 1, "sequence": 1 / n, "constant": 1 / cfg.max_answer}
            rows["weight"][said] = weights[cfg.loss_agg]
            rows["advantage"][said] = advantages[i]
            if sampler is not None:
                rows["sampler"][said] = sampler[i][:n]
            start = end
    return rows

def make_batches(prompts, answers, advantages, cfg, run, sampler=None):
    """This host's sequences -> (`minibatches` lists of passes, counts over all hosts). A pass is a dict of
    global arrays [micro_batch rows of each device, width], of which a device computes the first `filled`. In
    GRPO rows are 1/16 narrower where a step needs no more of them then: else 8 might be a tenth padding. A
    minibatch takes every minibatches-th sequence, so that the same go together on any number of hosts.
    Weights are normalised here, once, over all hosts: the split into rows and passes changes no gradient."""
    shards = run.mesh.shape["dp"] * run.mesh.shape["fsdp"] // jax.process_count()
    lengths, placed = [len(p + a) for p, a in zip(prompts, answers)], NamedSharding(run.mesh, P(model.ROWS))
    minibatches = [range(len(prompts))[m::cfg.minibatches] for m in range(cfg.minibatches)]
    widths = run.row_width, row_width(run.row_width * (16 - (sampler is not None)) // 16, run.mesh)
    parts, rows = zip(*(pack_all(lengths, minibatches, shards, width) for width in widths))
    wide, narrow = all_gather_hosts(np.array(rows, np.float32)).sum(0)
    parts, width = (parts[1], widths[1]) if narrow <= wide else (parts[0], widths[0])
    needs, batches, computed, height = [], [], 0, shards * run.micro_batch
    for ids, packed in zip(minibatches, parts):
        valid = sum(len(answers[i]) for i in ids)
        needs.append([-(-len(packed) // height), valid if cfg.loss_agg == "token" else len(ids), valid])
    needs, at_once = all_gather_hosts(np.array(needs)), model.rows_at_once(run.micro_batch, width)  # of all hosts
    for packed, passes, total in zip(parts, needs.max(0)[:, 0], needs.sum(0)[:, 1]):
        batches.append([])
        for k in range(passes):
            mine = packed[k * height:(k + 1) * height]  # dealt out: each device has as many, but for one
            places = {i % shards * run.micro_batch + i // shards: row for i, row in enumerate(mine)}
            rows = make_rows(places, prompts, answers, advantages, (height, width), cfg, sampler)
            rows["weight"] /= total
            rows["filled"] = ((len(mine) + shards - 1 - np.arange(shards)) // shards).astype(np.int32)
            computed += int((-(-rows["filled"] // at_once) * at_once).sum())
            batches[-1].append(
                {k: jax.make_array_from_process_local_data(placed, a) for k, a in rows.items()})
    counts = all_gather_hosts([computed * width, sum(lengths), model.flops(run.shape, lengths)]).sum(0).tolist()
    return batches, dict(zip(("slots", "tokens", "flops", "valid"), counts + [int(needs[..., 2].sum())]))

# ---------------------------------------------------------------- the update
def optimizer(cfg, name):
    """Gradient of the parameter `name` -> step direction (optax), which is to be times the learning rate."""
    scale = {"adamw": optax.scale_by_adam(b2=cfg.b2), "lion": optax.scale_by_lion(b2=cfg.b2),
             "sgd": optax.identity()}[cfg.optimizer]
    decay = 0.0 if re.search("norm|/b[qkv]_", name) else cfg.weight_decay
    return optax.chain(scale, optax.add_decayed_weights(decay))

def learning_rate(cfg, step):
    """Of step 1, 2, ...: linear warm-up, then decay, within the supervised phase and within GRPO."""
    base, k, n = ((cfg.sft_lr, step, cfg.sft_steps) if step <= cfg.sft_steps
                  else (cfg.lr, step - cfg.sft_steps, cfg.steps))
    done = max(0, k - cfg.warmup) / max(1, n - cfg.warmup + 1)
    return base * min(1, k / max(1, cfg.warmup)) * {
        "constant": 1, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[cfg.decay]

def loss_inputs(params, rows, cfg, shape, mesh):
    """Rows -> (hidden [N, D], LM head, targets [N]): what log-probs are a function of; and the way back."""
    how = model.How(cfg.dtype, cfg.attention, cfg.remat)
    params = {k: a if k == "layers" else jax.device_put(a, model.DEVICE) for k, a in params.items()}
    hidden, back = model.forward(params, shape, mesh, rows, how)
    return (hidden.reshape(-1, shape.D), model.head(params), rows["targets"].reshape(-1)), back

@partial(jax.jit, static_argnames=("cfg", "shape", "mesh"))
def score(params, rows, *, cfg, shape, mesh):
    """Log-probs of the targets of a pass under `params`, [rows, width]."""
    say(f"tracing score: {rows['tokens'].shape}")
    inputs, _ = loss_inputs(params, rows, cfg, shape, mesh)
    logp_N, _ = kernel.score(
        *inputs, rows["weight"].reshape(-1), mesh, temperature=cfg.temperature, impl=cfg.loss_impl)
    return model.constrain(logp_N.reshape(rows["tokens"].shape), mesh, model.ROWS)

def loss_and_metrics(hidden_ND, head_VD, targets_N, rows, cfg, mesh):
    """-> (loss, metrics) of one pass; metrics are sums over its tokens, or maxima (`/max`)."""
    vectors = {k: rows[k].reshape(-1) for k in ("weight", "advantage", "old", "sampler", "ref") if k in rows}
    loss, stats = kernel.grpo_loss(
        hidden_ND, head_VD, targets_N, vectors, mesh, temperature=cfg.temperature,
        clip_low=cfg.clip_low, clip_high=cfg.clip_high, beta=cfg.beta, is_cap=cfg.is_cap,
        entropy_bonus=cfg.entropy_bonus * ("sampler" in rows), impl=cfg.loss_impl)  # none when imitating
    stats["nll"] = -stats.pop("logp")
    maxima = {k + "/max": stats[k].max() for k in ("ratio", "logprob_gap") if k in stats}
    return loss, {"loss": loss} | {k: v.sum() for k, v in stats.items()} | maxima

@partial(jax.jit, static_argnames=("cfg", "shape", "mesh"), donate_argnames="grads", keep_unused=True)
def accumulate(grads, params, rows, others, *, cfg, shape, mesh):
    """Add the gradient of one pass to grads, in place -> (grads, metrics). others: what else lies on the
    devices meanwhile; not read, but for the compiler to count."""
    say(f"tracing accumulate: {rows['tokens'].shape}, {', '.join(sorted(rows))}")
    (*inputs, targets_N), back = loss_inputs(params, rows, cfg, shape, mesh)
    gradient = jax.value_and_grad(loss_and_metrics, argnums=(0, 1), has_aux=True)
    (_, metrics), (d_hidden, d_head) = gradient(*inputs, targets_N, rows, cfg, mesh)
    grads = back(grads, d_hidden.reshape(*rows["tokens"].shape, -1))
    name = "embed_VD" if shape.tied else "head_VD"
    grads |= {name: grads[name] + d_head}
    return jax.lax.with_sharding_constraint(grads, model.shardings(shape, mesh)), metrics

@partial(jax.jit, static_argnames="cfg")
def clip(grads, loss, cfg):
    """-> (norm of all gradients, what they are to be multiplied by); NaN if it or loss is not finite."""
    norm = optax.global_norm(grads)
    norm = jnp.where(jnp.isfinite(norm + loss), norm, jnp.nan)
    return norm, jnp.minimum(1.0, (cfg.grad_clip or jnp.inf) / norm)

@partial(jax.jit, static_argnames=("name", "cfg", "mesh"), donate_argnames=("param", "state"))
def apply(param, state, grad, factor, lr, *, name, cfg, mesh):
    """One optimizer step of one parameter -> (it, its state), as they were if factor is NaN; from where they
    rest and back: as these come and go one by one, little of what rests with the host is here at once."""
    old = param, state = jax.device_put((param, state), model.DEVICE)
    direction, state = optimizer(cfg, name).update(factor * grad, state, param)
    param = jax.lax.with_sharding_constraint(param - lr * direction, NamedSharding(mesh, model.spec(name)))
    param, state = jax.tree.map(partial(jnp.where, jnp.isnan(factor)), old, (param, state))
    back = lambda a: jax.device_put(a, model.HOST) if a.ndim else a
    return (back(param) if cfg.offload == "params" else param,
            jax.tree.map(back, state) if cfg.offload != "none" else state)

def meanwhile(state, cfg):
    """What lies on the devices while gradients are taken."""
    return state["opt"] if cfg.offload == "none" else None, state.get("ref")

def update(state, batch, lr, *, cfg, shape, mesh):
    """One optimizer step on one minibatch -> (state, metrics of each pass, norm of the gradient: NaN if the
    step was skipped, as it or a loss is not finite)."""
    grads, params, opt, metrics, others = zeros(shape, mesh), {}, {}, [], meanwhile(state, cfg)
    for rows in batch:
        grads, one = accumulate(grads, state["params"], rows, others, cfg=cfg, shape=shape, mesh=mesh)
        metrics.append(one)
    (norm, factor), grads = clip(grads, sum(one["loss"] for one in metrics), cfg), model.flatten(grads)
    for name, param in model.flatten(state["params"]).items():
        params[name], opt[name] = apply(
            param, state["opt"][name], grads.pop(name), factor, lr, name=name, cfg=cfg, mesh=mesh)
    return state | {"params": model.nest(params), "opt": opt}, metrics, norm

@partial(jax.jit, static_argnums=(0, 1))
def zeros(shape, mesh):
    """Gradients to add to."""
    make = lambda size, place: jax.lax.with_sharding_constraint(jnp.zeros(size), place)
    return jax.tree.map(make, model.nest(model.shapes(shape)), model.shardings(shape, mesh),
                        is_leaf=lambda a: isinstance(a, tuple))

@partial(jax.jit, static_argnames="dtype")
def reference(params, dtype):
    """A copy on the devices, sharded alike."""
    return jax.tree.map(lambda a: jax.device_put(a, model.DEVICE).astype(dtype), params)

def abstract_state(cfg, shape, mesh):
    """{params, opt by parameter, ref where there is a KL}: shapes, and where they lie, at rest in the host's
    memory if `offload` says so."""
    def place(tree, name, rests=False):
        where = NamedSharding(mesh, model.spec(name))
        where = where.with_memory_kind("pinned_host") if rests else where
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=where if a.ndim else NamedSharding(mesh, P())), tree)
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in model.shapes(shape).items()}
    state = {"params": model.nest({k: place(a, k, cfg.offload == "params") for k, a in params.items()}),
             "opt": {k: place(jax.eval_shape(optimizer(cfg, k).init, a), k, cfg.offload != "none")
                     for k, a in params.items()}}
    copied = {k: jax.ShapeDtypeStruct(a.shape, jnp.dtype(cfg.dtype)) for k, a in params.items()}
    return state | ({"ref": model.nest({k: place(a, k) for k, a in copied.items()})} if cfg.beta else {})

def abstract_grads(cfg, shape, mesh):
    return abstract_state(dataclasses.replace(cfg, offload="none"), shape, mesh)["params"]

# ---------------------------------------------------------------- files and checkpoints

# ---------------------------------------------------------------- what a person sees

# ---------------------------------------------------------------- set up: from flags to arrays

@exit_on(OSError, "a file cannot be read or written; mend it, or choose another --out")
def set_up(cfg, claims):
    """-> (Config, run: what does not change); all mistakes are found here."""
    rewards.check_signatures([SOLVED] + [function for function, _ in REWARDS])
    cluster.connect(cfg)
    run_dir.claim_out(cfg, claims)
    mesh = make_mesh(cfg.mesh, jax.devices())
    cfg = resolve(dataclasses.replace(cfg, require_processes=jax.process_count()), mesh)
    done, paths, about = run_dir.open_run(cfg)
    directory = data.model_directory(cfg, "*.json", "*.txt", "*.jinja")
    shape = hf.read_config(directory)
    tokenizer, end = data.load_tokenizer(directory)
    check_sizes(cfg, shape, mesh, 1 + max(tokenizer.get_vocab().values()))
    layout, why = layouts.rollout_layout(cfg.rollout_sharding, shape, mesh, cfg.dtype)
    check(cfg.rollout_sharding != "tp" or layout.mesh.shape["tp"] > 1, "rollout_sharding = tp finds "
          f"nothing that divides {jax.local_device_count()} local devices, {shape.K} key/value heads, "
          f"feed-forward size {shape.F} and vocabulary {shape.V}; try --rollout_sharding auto")
    say(f"rollout: {why}")
    shape = dataclasses.replace(shape, stop_ids=tuple(sorted({*shape.stop_ids, end})))
    rows = data.load_questions(cfg.data, False, tokenizer, cfg)
    held_out = [] if eval_data(cfg) == "none" else data.load_questions(eval_data(cfg), True, tokenizer, cfg)
    examples = [row for row in rows if len(row["demonstration_ids"]) <= cfg.max_answer]
    check(examples or not cfg.sft_steps, f"all answers of {cfg.data} exceed max_answer = {cfg.max_answer}")
    longest = max(len(row["prompt"]) for row in rows + held_out)
    width = row_width(longest + cfg.max_answer, mesh)
    check_step(cfg, len(rows), width)
    wanted = abstract_state(cfg, shape, mesh)
    run_dir.check_disk(cfg, wanted, done)
    at_once = layouts.rows_that_fit(shape, layout, cfg.dtype, rollout.padded_length(longest) + cfg.max_answer,
                                  memory.on_device(wanted))
    weights, logger = hf.Checkpoint(data.model_directory(cfg, "*.safetensors"), shape), None
    if cfg.wandb and jax.process_index() == 0:
        with exit_on(Exception, f"--wandb {cfg.wandb} wants wandb and WANDB_API_KEY; mend or drop it"):
            import wandb
            logger = wandb.init(project=cfg.wandb, name=cfg.out, id=cfg.out.replace("/", "-"), resume="allow",
                                config=dataclasses.asdict(cfg))
    files.write_json(f"{cfg.out}/config.json", {  # by every process: its disk may be its own
        "config": dataclasses.asdict(cfg), "commit": cluster.commit(),
        "versions": {m.__name__: m.__version__ for m in (jax, optax, np)}})
    check(checkpoint.send_rest(cfg), f"--out {cfg.out} cannot be written to; see above")
    return cfg, SimpleNamespace(
        directory=directory, checkpoint=weights, shape=shape, mesh=mesh, tokenizer=tokenizer,
        rows=rows, held_out=held_out, examples=examples, row_width=width, layout=layout, at_once=at_once,
        wandb=logger,
        micro_batch=choose_micro_batch(cfg, shape, mesh, width) if cfg.steps + cfg.sft_steps else 0,
        # of checkpoints: the newest step, its files; what is to be saved if the run ends, is being saved
        done=done, files=paths, latest=(done, {}, None), saving=None, writer=ThreadPoolExecutor(1),
        id=int(all_gather_hosts(int(time.time()))[0]), signal=0,
        **{k: json.loads(about.get(k, "null")) or empty
           for k, empty in (("owed", {}), ("skipped", 0), ("unwritten", {}))})

def load_state(cfg, run):
    """-> {params, opt, ref where there is a KL}: from the model's files, or the run's newest checkpoint."""
    wanted = abstract_state(cfg, run.shape, run.mesh)
    places = jax.tree.map(lambda a: a.sharding, wanted)
    if run.done:
        state = checkpoint.load_shards(run.files, wanted)
        say(f"resuming {cfg.out} after step {run.done}")
    else:
        params = hf.load(run.checkpoint, run.mesh, partial(progress, "loading weights"))
        make = lambda name, a: jax.jit(optimizer(cfg, name).init, out_shardings=places["opt"][name])(a)
        state = {"params": params, "opt": {name: make(name, a) for name, a in model.flatten(params).items()}}
        if cfg.beta:
            state["ref"] = reference(params, cfg.dtype)
        state["params"] = jax.device_put(params, places["params"])
    if jax.process_index() == 0:
        run_dir.cut_back(cfg, run)
    return state

# ---------------------------------------------------------------- evaluation and metrics
def evaluate(params, step, cfg, run):
    """-> {eval/solved}: the part of the held-out questions solved. Three answers go to samples.jsonl."""
    each, n, solved, began, told = cfg.batch * cfg.npq, len(run.held_out), 0.0, time.time(), []
    stride, weights = each * jax.process_count(), layouts.to_rollout(params, run.layout, cfg.dtype)
    for start in range(0, n, stride):
        first = start + jax.process_index() * each
        rows = [run.held_out[i % n] for i in range(first, first + each)]  # as many on each; not all count
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(cfg.seed), 0), start)
        out, answers = sample_answers(weights, rows, 1, key, f"evaluating {start}/{n}", cfg, run,
                                      cfg.eval_temperature, cfg.top_k, cfg.top_p)
        right = rewards.score_answers([SOLVED], rows, answers, out["cut_B"])[0][:, 0].tolist()
        solved += sum(right[:max(0, n - first)])
        told = told or [
            {"step": step, "eval": True, "question": rows[i]["question"], "reference": rows[i]["answer"],
             "answer": answers[i], "solved": right[i]} for i in range(min(3, n, each))]
        progress("evaluating", min(start + stride, n), n)
    solved = float(all_gather_hosts(solved).sum()) / n
    log.append_jsonl(cfg, run, "samples.jsonl", told)  # at the end, which a signal may prevent
    say(f"eval at step {step} | solved {solved:.4f} of {n} | {time.time() - began:.1f}s")
    return {"eval/solved": solved}

def rollout_metrics(reward_B, prompts, out, scores, faults, cfg):
    """Reward and length metrics over the answers of all hosts; reward functions that failed are named."""
    for name, messages in faults.items():
        print(f"reward {name} failed on {len(messages)} answers, which score 0: {max(messages.values())}")
    names = ["reward/mean", "len/prompt", "len/answer", "truncated", "solved"]
    names += [f"reward/{function.__name__}" for function, _ in REWARDS]
    table = np.column_stack([reward_B, [len(p) for p in prompts], out["lengths_B"], out["cut_B"], scores])
    table = all_gather_hosts(table).reshape(-1, len(names))
    groups = table[:, 0].reshape(-1, cfg.npq)
    return dict(zip(names, table.mean(0).tolist())) | {
        "reward/std": float(groups.std()), "len/answer_max": float(table[:, 2].max()),
        "reward/faults": int(all_gather_hosts(sum(map(len, faults.values()))).sum()),
        "group/zero_variance": float((groups.max(1) == groups.min(1)).mean())}

def update_metrics(parts, norms, counts, seconds, cfg, run):
    """Metrics of a step's passes -> means over tokens (loss, grad_norm: over updates), padding, memory."""
    m = {k: float((max if k.endswith("/max") else sum)(part[k] for part in parts)) for k in parts[0]}
    good = [float(norm) for norm in norms if np.isfinite(norm)]
    m |= {"loss": m["loss"] / len(norms), "grad_norm": sum(good) / len(good) if good else math.nan,
          "skipped": len(norms) - len(good)}
    for k in m.keys() & {"nll", "entropy", "clip_fraction", "kl", "logprob_gap", "ratio"}:
        m[k + "/mean" if k + "/max" in m else k] = m.pop(k) / counts["valid"] / cfg.ppo_epochs
    stats = [d.memory_stats() or {} for d in jax.local_devices()]  # None where a backend does not tell
    gib = [max(d.get(k, 0) for d in stats) / 2 ** 30 for k in ("bytes_in_use", "peak_bytes_in_use")]
    used, peak = all_gather_hosts(gib).max(0).tolist()
    speed = memory.chip(run.mesh.devices.flat[0]).flops * run.mesh.size * seconds
    return {"kl": 0.0} | m | {
        "valid_tokens": counts["valid"], "padding_fraction": 1 - counts["tokens"] / counts["slots"],
        "micro_batch": run.micro_batch,
        "mfu": cfg.ppo_epochs * counts["flops"] / speed if speed else None,  # None: a chip not known
        "memory/train/bytes_in_use_max_gib": used or None,
        "memory/train/peak_bytes_in_use_max_gib": peak or None}

# ---------------------------------------------------------------- what an update takes of a device

def needed_by_apply(cfg, shape, mesh):
    """-> (GiB that the optimizer step of the largest parameter takes of a device, does it fit)."""
    state, grads = abstract_state(cfg, shape, mesh), abstract_grads(cfg, shape, mesh)
    flat = model.flatten(state["params"])
    name = max(flat, key=lambda name: flat[name].size)
    mine = flat[name], state["opt"][name], model.flatten(grads)[name]
    factor = jax.ShapeDtypeStruct((), jnp.float32)
    gib, fits = memory.compiled_gib(apply.lower(*mine, factor, 0.0, name=name, cfg=cfg, mesh=mesh), mesh)
    return gib + (memory.on_device((state, grads)) - memory.on_device(mine)) / 2 ** 30, fits

def choose_micro_batch(cfg, shape, mesh, width):
    program = dataclasses.replace(cfg, out="", seed=0), shape, mesh
    return memory.choose_micro_batch(
        cfg.micro_batch, rows_to_fill(cfg, mesh), width, lambda n: needed(n, width, cfg, shape, mesh), program,
        mesh.devices.flat[0])

@cache
def needed(micro_batch, width, cfg, shape, mesh):
    """-> (GiB that an update takes of a device, does it fit), with all that lies there meanwhile."""
    state, n = abstract_state(cfg, shape, mesh), mesh.shape["dp"] * mesh.shape["fsdp"]
    grpo, on = cfg.steps > 0, NamedSharding(mesh, P(model.ROWS))
    floats = ["weight", "advantage"] + ["sampler"] * grpo + ["ref"] * (grpo and cfg.beta > 0)
    floats += ["old"] * (grpo and cfg.minibatches * cfg.ppo_epochs > 1)
    kinds = dict.fromkeys("tokens positions segments targets".split(), "i4") | dict.fromkeys(floats, "f4")
    rows = {k: jax.ShapeDtypeStruct((n * micro_batch, width), kind, sharding=on) for k, kind in kinds.items()}
    rows["filled"] = jax.ShapeDtypeStruct((n,), "i4", sharding=on)
    lowered = accumulate.lower(abstract_grads(cfg, shape, mesh), state["params"], rows, meanwhile(state, cfg),
                               cfg=cfg, shape=shape, mesh=mesh)
    both = memory.compiled_gib(lowered, mesh), needed_by_apply(cfg, shape, mesh)
    gib = max(gib for gib, _ in both)
    return gib, all(fits for _, fits in both) and gib <= memory.device_memory(mesh.devices.flat[0])

def rows_to_fill(cfg, mesh):
    """Rows per device of a minibatch whose sequences have a row each."""
    return cfg.batch * cfg.npq * hosts(mesh) // (mesh.shape["dp"] * mesh.shape["fsdp"]) // cfg.minibatches

# ---------------------------------------------------------------- main: the loop
@exit_on(CheckpointError, "these files cannot be used")
def main(argv):
    if devices := int(os.environ.get("JAX_NUM_CPU_DEVICES", 0)):  # else XLA has a thread a core, and
        os.environ.setdefault("NPROC", str(4 * devices))  # collectives of more devices than that may deadlock
    cfg = parse(argv)
    with contextlib.ExitStack() as claims:
        cfg, run = set_up(cfg, claims)
        cluster.watch_signals(run)
        train_or_rescue(cfg, run)

def train_or_rescue(cfg, run):
    """Train; what ends that early is told, and saves what there is."""
    try:
        train(cfg, run)
    except cluster.Stop as stop:
        say(f"\nended by {signal.Signals(stop.args[0]).name}: {checkpoint.rescue(cfg, run)}")
        raise SystemExit(128 + stop.args[0])
    except OSError as e:  # of files beside those that wait for room
        warn(f"{first_line(e)}\n{checkpoint.rescue(cfg, run)}, once that is mended")
        raise SystemExit(1)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        warn(f"a device ran out of memory in step {run.latest[0] + 1}: {first_line(e)[:300]}\n"
             f"{checkpoint.rescue(cfg, run)} with --micro_batch {max(1, run.micro_batch // 2)} or {memory.ADVICE}")
        raise SystemExit(1)

def train(cfg, run):
    """The whole run, from the first question to `out`/final."""
    began = time.time()
    n_hosts, host, total = jax.process_count(), jax.process_index(), cfg.sft_steps + cfg.steps
    sequences, updates = cfg.batch * cfg.npq, cfg.minibatches * cfg.ppo_epochs
    static = dict(cfg=cfg, shape=run.shape, mesh=run.mesh)
    say(f"{n_hosts} processes x {jax.local_device_count()} {jax.devices()[0].device_kind} devices, mesh "
        f"{dict(run.mesh.shape)} | {run.shape.n_params / 1e6:.2f}M parameters, compute {cfg.dtype}\n"
        f"{cfg.batch} questions x {cfg.npq} answers = {sequences} sequences per host, {sequences * n_hosts} "
        f"in all, in rows of {run.row_width} tokens | {updates} updates a step"
        + f" | {len(run.examples)} answers of up to {cfg.max_answer} tokens to imitate" * (cfg.sft_steps > 0)
        + " | no --eval_data, no evaluation" * (not run.held_out))
    inner, spans = run.mesh.devices[0].size, len({d.process_index for d in run.mesh.devices[0].flat})
    if spans > 1:
        gib = run.shape.n_params * 2 * (1 - 1 / spans) / 2 ** 30
        say(f"fsdp*tp = {inner} spans {spans} hosts: a pass over the weights brings {gib:.2g} GiB into every "
            f"host; --mesh host_local avoids that, at {spans} times the memory for parameters and optimizer")
    state, key, recent = load_state(cfg, run), jax.random.key(cfg.seed), []
    if run.owed:
        finish(run.done, state, run.owed, cfg, run)
    elif run.done == 0 and is_evaluated(0, cfg, run):
        log.append_jsonl(cfg, run, "metrics.jsonl", [{"step": 0} | evaluate(state["params"], 0, cfg, run)])
    for step in range(run.done + 1, total + 1):
        clock, supervised, metrics = [time.time()], step <= cfg.sft_steps, {"step": step}
        run.latest = step - 1, state, None
        cluster.check_for_stop(run)
        # questions, each host its own
        pool, each, past = ((run.examples, sequences, step - 1) if supervised
                            else (run.rows, cfg.batch, step - 1 - cfg.sft_steps))
        order = data.question_order(cfg.seed, (past * n_hosts + host) * each, each, len(pool))
        asked = [pool[i] for i in order for _ in range(sequences // each)]
        prompts = [row["prompt"] for row in asked]
        if supervised:  # advantage 1 on given answers, ratio 1: the gradient of the log-likelihood
            tokens, advantages, sampler = [row["demonstration_ids"] for row in asked], np.ones(sequences), None
        else:
            # rollout: npq answers to each
            weights = layouts.to_rollout(state["params"], run.layout, cfg.dtype)
            out, answers = sample_answers(weights, asked, cfg.npq, jax.random.fold_in(key, step),
                                          f"step {step}/{total}", cfg, run, cfg.temperature)
            del weights  # before the update, which wants the memory
            tokens = [t[:n].tolist() for t, n in zip(out["tokens_BT"], out["lengths_B"])]
            sampler = out["logp_BT"]
            clock.append(time.time())
            # rewards, and advantages within each group
            scores, faults = rewards.score_answers([SOLVED] + [f for f, _ in REWARDS], asked, answers, out["cut_B"])
            reward_B = scores[:, 1:] @ [weight for _, weight in REWARDS]
            advantages = group_advantages(reward_B, cfg.npq, cfg.advantage)
            metrics |= rollout_metrics(reward_B, prompts, out, scores, faults, cfg)
            log.append_jsonl(cfg, run, "samples.jsonl", [
                {"step": step, "question": asked[i]["question"], "reference": asked[i]["answer"],
                 "answer": answers[i], "reward": reward_B[i], "cut": bool(out["cut_B"][i])} for i in range(2)])
            clock.append(time.time())
        # packed rows; log-probs as they were, where there are several updates, and of the reference
        batches, counts = make_batches(prompts, tokens, advantages, cfg, run, sampler)
        judges = {"old": state["params"]} if updates > 1 and not supervised else {}
        judges |= {"ref": state["ref"]} if cfg.beta and not supervised else {}
        batches = [[rows | {k: score(judge, rows, **static) for k, judge in judges.items()} for rows in batch]
                   for batch in batches]
        # update
        parts, norms, lr = [], [], learning_rate(cfg, step)
        progress(f"step {step}/{total}: {updates} updates")
        for batch in batches * cfg.ppo_epochs:
            state, more, norm = update(state, batch, lr, **static)
            parts, norms = parts + more, norms + [norm]
        parts, norms = jax.device_get((parts, norms))
        metrics |= update_metrics(parts, norms, counts, time.time() - clock[-1], cfg, run) | {"lr": lr}
        if cfg.beta and step == cfg.sft_steps:
            state["ref"] = reference(state["params"], cfg.dtype)
        # metrics, evaluation, checkpoint
        clock.append(time.time())
        seconds = clock[-1] - clock[0]
        recent = (recent + [seconds])[-10:]
        metrics |= {"time/step_s": seconds, "time/update_s": clock[-1] - clock[-2],
                    "time/train/step_avg_last10_s": sum(recent) / len(recent),
                    "throughput/train/valid_tokens_per_s": metrics["valid_tokens"] / seconds}
        if not supervised:
            sampling = clock[1] - clock[0]
            metrics |= {"time/rollout_s": sampling, "time/reward_s": clock[2] - clock[1],
                        "rollout/tokens_per_s": metrics["len/answer"] * sequences * n_hosts / sampling}
        thousands = metrics.get("rollout/tokens_per_s", 0) / 1e3
        say((log.SFT_LINE if supervised else log.GRPO_LINE).format(total=total, thousands=thousands, **metrics))
        note_skipped(step, norms, cfg, run)
        finish(step, state, metrics, cfg, run)
    checkpoint.finish_save(cfg, run)
    for name in run.unwritten:  # there may be room by now
        log.append_jsonl(cfg, run, name, [])
    if total:
        hf.write_final(cfg.out, run.directory, state["params"], run.shape, run.mesh)
    checkpoint.send_rest(cfg)
    if host == 0:
        log.print_report(cfg, time.time() - began)

def is_evaluated(step, cfg, run):
    total = cfg.sft_steps + cfg.steps
    return run.held_out and (step == total or step in range(cfg.sft_steps, total, cfg.eval_every or 10**9))

MAX_SKIPPED = 10  # updates in a row, before the run ends

def note_skipped(step, norms, cfg, run):
    """Tell of updates that were skipped; too many in a row end the run."""
    for norm in norms:
        run.skipped = 0 if np.isfinite(norm) else run.skipped + 1
    if count := int(np.sum(~np.isfinite(norms))):
        say(f"step {step}: {count} of {len(norms)} updates skipped, as a loss or gradient is not finite")
    if run.skipped >= MAX_SKIPPED:
        checkpoint.finish_save(cfg, run)
        last = f"{cfg.out}/step_{run.done:06}" if run.done else "none"
        warn(f"{run.skipped} updates in a row, up to step {step}, were skipped, as a loss or gradient is not "
             f"finite; the last checkpoint: {last}; look at the rewards, try a smaller --lr, --dtype float32")
        raise SystemExit(1)

def finish(step, state, metrics, cfg, run):
    """End a step: evaluate, write down, save. What a signal cuts short here is done first on resume."""
    run.latest = step, state, metrics
    cluster.check_for_stop(run)
    if is_evaluated(step, cfg, run):
        metrics = metrics | evaluate(state["params"], step, cfg, run)
    log.append_jsonl(cfg, run, "metrics.jsonl", [metrics])
    run.latest = step, state, None
    if run.wandb:
        run.wandb.log(metrics, step=step)
    if step == cfg.sft_steps + cfg.steps or cfg.save_every and step % cfg.save_every == 0:
        checkpoint.save(step, state, cfg, run)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    log.open_streams()
    try:
        main(sys.argv[1:])
    except BaseException as e:  # at an orderly exit JAX would wait for the others, which wait for this one
        code = e.code if isinstance(e, SystemExit) else 1
        if not jax.distributed.is_initialized() or cluster.code_hash == 0:
            raise
        if cluster.code_hash == 1:
            traceback.print_exc()
        sys.stdout.flush()
        time.sleep(3 * (jax.process_index() == 0))  # last, since the others abort when it is gone
        os._exit(cluster.code_hash)
