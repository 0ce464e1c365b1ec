"""podgrpo: train a Qwen2 model with GRPO on questions whose answers can be checked.

    python train.py                                      the embedded default: a tiny model learns to add
    python train.py --model Qwen/Qwen2.5-0.5B-Instruct   any Qwen2 checkpoint, on GSM8K

One step: sample `npq` answers to each of `batch` questions a host, score them, turn each group's scores into
advantages, update. A process has its own questions, all run every jitted call, process 0 prints and writes.
"""

import argparse, contextlib, dataclasses, difflib, fractions, glob, hashlib, inspect, io, itertools, json, math
import logging, os, random, re, shlex, shutil, signal, socket, subprocess, sys, tempfile, threading, time
import traceback, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import kernel, model
from infra import bucket
from infra.claim import InUse, claimed
from model import ATTENTION, DEVICE, HOST, LAYOUTS, REMAT, everywhere

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
    plan: str = ""               # v6e-8 or such, or here: tell what fits, how long a step takes, and stop
    sweep: str = ""              # with plan: a flag's values, as in micro_batch=8,16
    resume: Literal["auto", "force"] = "auto"  # force = go on even if flags changed the meaning of the run
    wandb: str = ""              # project on wandb.ai; "" = none

# What `--model tiny` starts from instead: the main job, small enough for two CPU cores.
TINY = dict(data="arith", system="", steps=80, sft_steps=80, batch=32, npq=8, max_prompt=32, max_answer=40,
            lr=2e-4, sft_lr=2e-3, decay="linear", b2=0.95, minibatches=4, eval_every=20, eval_n=1000)
TINY_MODEL = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=320, hidden_size=128, eos_token_id=2,
    intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4,
    max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05, torch_dtype="float32")
OWN = {"coordinator", "processes", "process_id", "start_timeout", "require_devices"}  # may differ by process
FREE = OWN | {  # on resume
    *"out rollout_sharding micro_batch loss_impl attention remat offload mesh eval_every save_every".split(),
    *"keep resume plan sweep wandb require_processes".split()}

def check(condition, message):
    """Stop with one line and exit code 2 unless the condition holds: for what the user can mend."""
    if not condition:
        warn(message.replace("\n", " "))
        raise SystemExit(2)

@contextlib.contextmanager
def stop_on(errors, message):
    """Stop likewise on such errors inside, with the message and the error's first line."""
    try:
        yield
    except BaseException as e:  # a panic of the tokenizers, which are in Rust, is no Exception
        if not isinstance(e, errors) and type(e).__name__ != "PanicException":
            raise
        check(False, f"{message}: {first_line(e)}")

def first_line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

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
                            **dict(nargs="?", const="here") if f.name == "plan" else {},
                            help=f"{comments[f.name]} (default {f.default!r})")
    argv = list(argv)
    for i in reversed(range(1, len(argv))):
        if re.match(r"-\d", argv[i]):  # argparse would take the value in `--mesh -1,8,1` for a flag
            argv[i - 1:i + 1] = [f"{argv[i - 1]}={argv[i]}"]
    flags = vars(parser.parse_args(argv))
    cfg = Config(**(TINY if flags.get("model", "tiny") == "tiny" else {}) | flags)
    for name in "model", "data", "plan":
        check(flags.get(name, "-").strip(), f"--{name} is given nothing; name one, or drop the flag")
    check_flags(cfg)
    tell_unread(cfg, {} if cfg.plan else flags)
    names = [os.path.basename(name.rstrip("/")).removesuffix(".jsonl") for name in (cfg.data, cfg.model)]
    out = re.sub("^gs://", "out/gs/", cfg.out.rstrip("/")) or f"out/{'-'.join(names).replace(':', '-')}"
    return dataclasses.replace(cfg, out=out)

MARKS = r"<\|(?:im_start|im_end|endoftext)\|>|[\ud800-\udfff]"  # no text may hold them

def check_flags(cfg):
    """What can be said without devices and files."""
    least = dict.fromkeys("batch npq max_prompt max_answer ppo_epochs minibatches keep processes".split(), 1)
    below = dict(b2=1, clip_low=1, steps=10**6, sft_steps=10**6, processes=10**4, process_id=cfg.processes)
    for f in dataclasses.fields(cfg):
        value, low = getattr(cfg, f.name), least.get(f.name, 0)
        high = below.get(f.name, 2**31 if f.type is int else 1e38)  # int32's; below float32's
        check(f.type not in (int, float) or low <= value < high and not 0 < value < 1e-30,
              f"{f.name} = {value} is out of range; it must be a number >= {low} and < {high}")
        odd = MARKS if f.name == "system" else "[\0-\x1f\ud800-\udfff]|.{1000}"
        check(f.type is not str or not re.search(odd, value), f"{f.name} = {str(value)[:50]!r} holds a line "
              "break, a mark of the chat or half a character, which no name or prompt may, or is too long")
        check(value in (get_args(f.type) or [value]), f"{f.name} = {value} is none of {get_args(f.type)}")
    check(cfg.temperature > 0, "temperature = 0 gives npq equal answers; GRPO needs a --temperature above 0")
    check(0 < cfg.top_p <= 1, f"top_p = {cfg.top_p} is not a probability above 0; 1 keeps all tokens")
    check(cfg.npq >= 2 or cfg.steps == 0, f"npq = {cfg.npq} leaves nothing to compare with; try --npq 8")
    check(cfg.steps + cfg.sft_steps or cfg.eval_data != "none", "no steps, no eval_data: nothing to do")
    check(cfg.plan or not cfg.sweep, f"sweep = {cfg.sweep} is of a plan; add --plan or drop it")
    port = re.fullmatch(r".+:([1-9]\d{0,4})", cfg.coordinator)
    check(port and int(port[1]) < 2**16 if cfg.coordinator else (cfg.processes, cfg.process_id) == (1, 0),
          f"coordinator = {cfg.coordinator!r} is not host:port of process 0, a port from 1 to 65535, which "
          f"processes = {cfg.processes} and process_id = {cfg.process_id} want")
    check(cfg.eval_temperature or (cfg.top_k, cfg.top_p) == (0, 1), f"top_k = {cfg.top_k} and top_p = "
          f"{cfg.top_p} are for sampled evaluation: add --eval_temperature 1, or drop them; rollouts sample "
          "the whole distribution, whose log-probs the loss computes")

def tell_unread(cfg, given):
    """Name those flags of the given ones that nothing reads while others are as they are."""
    for holds, why, names in (
            (cfg.steps == 0, "steps = 0", "lr is_cap entropy_bonus advantage eval_every"),
            (cfg.sft_steps == 0, "sft_steps = 0", "sft_lr"),
            (cfg.steps + cfg.sft_steps == 0, "there are no steps",
             "temperature warmup decay b2 weight_decay grad_clip loss_agg ppo_epochs remat save_every keep"),
            (cfg.optimizer == "sgd", "optimizer = sgd", "b2"),
            (eval_data(cfg) == "none", "there is no --eval_data", "eval_every eval_n eval_temperature")):
        unread = [f"--{name}" for name in names.split() if holds and name in given]
        if unread:
            warn(f"{why}, so nothing reads {', '.join(unread)}")

def eval_data(cfg):
    return cfg.eval_data or ("none" if cfg.data.endswith(".jsonl") else cfg.data)

# ---------------------------------------------------------------- questions
def worked_sum(a, b, carry=True):
    """a + b by columns, units first: '9+5+0=14 5+5+1=11 1+8+1=10 <answer>1014</answer>' for 159 + 855."""
    steps, digits, c = [], "", 0
    for x, y in zip(reversed(str(a)), reversed(str(b))):
        total = int(x) + int(y) + c
        steps.append(f"{x}+{y}+{c}={total}")
        digits, c = str(total % 10) + digits, total // 10 if carry else 0
    return " ".join(steps) + f" <answer>{str(c) * bool(c) + digits}</answer>"

def arith(held_out):
    """Three-digit sums, 20,000 to train on and 2,000 held out. Three quarters of the demonstrations, which
    only supervised steps see, drop every carry: they teach the form and a mostly wrong procedure."""
    rng = random.Random(0)
    pairs = sorted({tuple(sorted((rng.randint(100, 999), rng.randint(100, 999)))) for _ in range(25000)})
    rng.shuffle(pairs)
    pairs = [rng.sample(pair, 2) for pair in pairs]
    return [{"question": f"What is {a} + {b}?", "answer": worked_sum(a, b),
             "demonstration": worked_sum(a, b, carry=i % 4 == 0)}
            for i, (a, b) in enumerate(pairs[:2000] if held_out else pairs[2000:22000])]

def hub_or_cache():
    """-> "", or why the hub gives no answer. Then its libraries take what they keep: they would ask for half
    a minute. To be called before they are imported."""
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=10).close()
    except urllib.error.HTTPError:
        pass  # an answer
    except OSError as e:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return f"; the hub gives no answer ({e}), and there is no copy here"
    return ""

def load_rows(name, held_out):
    """Rows with `question`, `answer` and maybe `demonstration`, which supervised steps imitate instead."""
    if name == "arith":
        return arith(held_out)
    rows, offline = [], "" if name.endswith(".jsonl") or os.path.exists(name) else hub_or_cache()
    with stop_on(Exception, f"{name} cannot be loaded{offline}"):
        if name.endswith(".jsonl"):
            check(os.path.isfile(name), f"{name} does not exist, or is no file")
            with open(name, encoding="utf-8-sig", errors="surrogateescape") as f:
                table = list(f)
        else:
            import datasets  # slow to import, and not needed for the others
            datasets.disable_progress_bars()
            logging.getLogger("huggingface_hub").setLevel("ERROR")  # it asks again, and warns each time
            path, _, part = ("openai/gsm8k:main" if name == "gsm8k" else name).partition(":")
            table = datasets.load_dataset(path, part or None, split="test" if held_out else "train")
    for number, row in enumerate(table, 1):
        if not isinstance(row, str) or row.strip():
            with stop_on(Exception, f"{name} line {number}: no JSON object with texts `question` and "
                         f"`answer` (which may be a number): {str(row)[:50]!r}"):
                if isinstance(row, str):
                    row = model.parse_json(row.encode().decode())  # encode raises for what was no UTF-8
                rows.append(read_row(row))
    check(rows, f"{name} is empty")
    return rows

def read_row(row):
    """A row of data, as text. Raises for what is none, or has marks of the chat, which would end a prompt."""
    row = {k: v for k, v in row.items() if v is not None}
    if type(row["answer"]) in (int, float) and math.isfinite(row["answer"]):  # 1e999 is none
        row["answer"] = str(row["answer"])
    row = {k: row[k] for k in ("question", "answer", "demonstration") if k in row}
    for k, value in row.items():
        if not isinstance(value, str) or not value.strip() or re.search(MARKS, value):
            raise ValueError(f"{k} = {value!a:.50} is no text, or holds a mark of the chat")
    return row

def chat(system, question):
    """Qwen's template, ChatML: system, user, and the opening of the answer."""
    return (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n")

def question_order(seed, start, count, n):
    """Places start .. start + count of an endless walk over n questions, a fresh permutation each epoch."""
    wanted = np.arange(start, start + count)
    epochs = {e: np.random.default_rng((seed, int(e))).permutation(n) for e in np.unique(wanted // n)}
    return [int(epochs[i // n][i % n]) for i in wanted]

# ---------------------------------------------------------------- answers and rewards: made to be edited
# minus (not of a subtraction), currency, digits with or without thousands separators, decimals, a denominator
D = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"((?<![\w)\]}}%])-)?(?:[$€£]\s?(-)?)?(?<![\^\d])({D})(?:\s?/\s?({D}))?")
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)")

def last_number(text):
    """The last number in a text as a Fraction, or None: '$1,450.' 1450, '-5' -5, '1/2' 1/2, '50%' 50."""
    try:
        minus, inner_minus, digits, below = NUMBER.findall(text)[-1]
        value = fractions.Fraction(digits.replace(",", "")) / fractions.Fraction(below.replace(",", "") or 1)
        return -value if minus or inner_minus else value
    except (IndexError, ZeroDivisionError, ValueError):  # none; x/0; more digits than Python converts
        return None

def final_number(text):
    """The final answer in a text as a Fraction, or None: the last number of the last <answer> that holds one,
    nested, unclosed or not; without such tags of the last \\boxed{}; else after ####; else of the text."""
    text = re.sub(r"\\([!,]|(?=[$%]))", "", text).replace("{,}", ",").replace("\u2212", "-")
    text = re.sub(r"\\[dt]?frac\{([\d.,]+)\}\{([\d.,]+)\}", r"\1/\2", text)
    marked = (re.findall(r"<answer>(.*?)(?=<answer>|</answer>|\Z)", text, re.S) or BOXED.findall(text)
              or re.findall(r"####(.*)", text) or [text])
    return next((number for number in map(last_number, reversed(marked)) if number is not None), None)

def correct(question, reference, answer):
    """1 if the final numbers are equal."""
    return float(final_number(answer) is not None and final_number(answer) == final_number(reference))

def formatted(question, reference, answer):
    """1 if the answer ends with its one <answer>number</answer>."""
    return float(bool(re.fullmatch(r"((?!<answer>).)*<answer>[^<]*\d[^<]*</answer>\s*", answer, re.S)))

# (function of (question, reference, answer) -> float, weight): the reward is the weighted sum
REWARDS = [(correct, 1.0), (formatted, 0.1)]
# What the metric `solved` and evaluation count, whatever is rewarded.
SOLVED = correct

class TooSlow(BaseException):
    """No Exception, which a reward function may catch."""

REWARD_SECONDS = 5  # that a function has for an answer
MOST_RINGS = 10  # the time is up, and a second later again; a function that catches so many never ends
MOST_REWARD = 1e6  # or less than -1e6: squares of such are still float32

def score_answers(functions, rows, answers, cut):
    """-> [answers, functions] scores, 0 of a cut answer; {function name: {answer: its fault}}, also 0. A
    function's time is limited in Python, `re` and sleep; other code in C ends first, and scores 0 then."""
    scores, faults, before = np.zeros((len(answers), len(functions))), {}, signal.getsignal(signal.SIGALRM)
    for i, (j, function) in itertools.product(np.flatnonzero(~np.asarray(cut)), enumerate(functions)):
        try:
            with time_limit(function, rows[i]["question"]):
                value = float(function(rows[i]["question"], rows[i]["answer"], answers[i]))
            if not -MOST_REWARD <= value <= MOST_REWARD:  # nor NaN
                raise ValueError(f"{value} is not from {-MOST_REWARD:.0f} to {MOST_REWARD:.0f}")
            scores[i, j] = value
        except BaseException as e:  # also exit() and KeyboardInterrupt: a real Ctrl-C raises neither
            faults.setdefault(function.__name__, {})[i] = first_line(e)
        if sys.stdout.closed or sys.stderr.closed:
            faults.setdefault(function.__name__, {})[i] = "it closed stdout or stderr"
            scores[i, j] = 0
            open_streams()
    signal.signal(signal.SIGALRM, before)
    return scores, faults

@contextlib.contextmanager
def time_limit(function, question):
    """Inside, TooSlow is raised after REWARD_SECONDS, then each second; at last the run ends."""
    rings = itertools.count(1)
    def ring(*_):
        if next(rings) > MOST_RINGS:
            warn(f"reward {function.__name__} does not end, and catches what is raised to end it; it scored an "
                 f"answer to {question[:200]!r}; let it catch Exception, not all. The run ends; start it again, "
                 "and it resumes")
            os._exit(1)
        raise TooSlow(f"no score within {REWARD_SECONDS} s")
    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, REWARD_SECONDS, 1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

# ---------------------------------------------------------------- the processes of a run
def on_tpu_vm():
    return glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") or "GCE_METADATA_HOST" in os.environ

def metadata(key, timeout):
    """What Google's metadata server says of this VM."""
    where = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    return urllib.request.urlopen(urllib.request.Request(
        f"http://{where}/computeMetadata/v1/instance/{key}", None, {"Metadata-Flavor": "Google"}),
        timeout=timeout).read().decode()

def find_processes(cfg):
    """-> (host:port of process 0, the host of each process, this one's number, the GPUs that are its own)"""
    env, hosts, me = os.environ, [""], 0
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if cfg.coordinator:
        return cfg.coordinator, hosts * cfg.processes, cfg.process_id, None
    if tasks > 1:
        list_nodes = 'scontrol show hostnames "$SLURM_STEP_NODELIST" 2> /dev/null'
        nodes = subprocess.check_output(list_nodes, shell=True, text=True).split()
        each, address = tasks // len(nodes), f"{nodes[0]}:{12000 + int(env['SLURM_JOB_ID']) % 20000}"
        shared = each > 1 and "," in env.get("CUDA_VISIBLE_DEVICES", ",")  # the node's GPUs, by all its tasks
        return (address, [node for node in nodes for _ in range(each)], int(env["SLURM_PROCID"]),
                int(env["SLURM_LOCALID"]) if shared else None)
    if on_tpu_vm():
        try:
            ends = metadata("attributes/worker-network-endpoints", 9)
            hosts, me = [end.split(":")[-1] for end in ends.split(",")], int(
                metadata("attributes/agent-worker-number", 9))
        except (OSError, ValueError) as e:
            print(f"train.py: not a slice of Cloud TPUs, so one process ({first_line(e)})", flush=True)
    return f"{hosts[0]}:8476", hosts, me, None  # JAX's own choice, 8482, is closed in Google's firewall

def roll_call(address, hosts, me, mine, seconds):
    """All tell process 0 what they run -> what is wrong, or "". (JAX's own wait aborts and names nobody.)"""
    (server, port), end = address.rsplit(":", 1), time.time() + seconds
    names = [f"process {i}" + f" ({host})" * bool(host) for i, host in enumerate(hosts)]
    while me and time.time() < end:
        try:
            with socket.create_connection((server, port), 5) as s, s.makefile("rw") as f:
                s.settimeout(seconds + 5)
                print(json.dumps([me, mine]), file=f, flush=True)
                return json.loads(f.readline())
        except (OSError, ValueError):  # process 0 is not there yet
            time.sleep(0.5)
    if me:
        return f"{names[me]} of {len(hosts)} heard nothing from process 0 at {address} for {seconds} s"
    told, files = {0: mine}, []
    with socket.create_server(("", int(port)), backlog=len(hosts)) as s:
        while (absent := [n for i, n in enumerate(names) if i not in told]) and time.time() < end:
            s.settimeout(max(0.1, min(10, end - time.time())))
            try:
                connection, _ = s.accept()
                connection.settimeout(5)
                files.append(connection.makefile("rw"))
                told.update([json.loads(files[-1].readline())])
            except (OSError, ValueError, TypeError):  # nobody came for a while, or one who is none of us
                print(f"waiting for {', '.join(absent)}", flush=True)
    fault = next((f"{names[i]} has {k} = {told[i].get(k)!r}, process 0 has {v!r}; give all the same command "
                  "and files" for i in sorted(told) for k, v in mine.items() if told[i].get(k) != v), "")
    if absent:
        fault = (f"{len(hosts)} processes are expected, {len(told)} started within {seconds} s; absent: "
                 f"{', '.join(absent)}. Was only worker 0 started? `bash launch.sh TYPE` starts all")
    for f in files:
        with contextlib.suppress(OSError):  # a caller that gave up
            print(json.dumps(fault), file=f, flush=True)
    return fault

def connect(cfg):
    """Join the run's other processes, if it has any, once all are there and run the same."""
    with stop_on(Exception, "the run's processes cannot be found from SLURM_* or GCE_METADATA_HOST; mend "
                 "them, unset SLURM_STEP_NUM_TASKS, or set --coordinator"):
        address, hosts, me, gpus = find_processes(cfg)
        check(0 <= me < len(hosts), f"this is process {me}, but there are {len(hosts)}: 0, 1, ...")
    if len(hosts) > 1:
        mine = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in OWN} | {
            "commit": commit(), "code": code(), "jax": jax.__version__}
        with stop_on(OSError, f"{address} cannot be listened on: does another run use it?"):
            fault = roll_call(address, hosts, me, mine, cfg.start_timeout)
        check(not fault, fault)
        jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
        jax.distributed.initialize(address, len(hosts), me, gpus, "deactivate", heartbeat_timeout_seconds=30)
    with stop_on(Exception, f"JAX finds no devices, with JAX_PLATFORMS = "
                 f"{os.environ.get('JAX_PLATFORMS', '')!r}; try JAX_PLATFORMS=cpu"):
        found = jax.process_count(), jax.device_count()
    want = cfg.require_processes or found[0], cfg.require_devices or found[1]
    check(found == want, "jax.process_count() = {} with {} devices, expected {} with {}: was only worker 0 "
          "started? `bash launch.sh TYPE` starts all".format(*found, *want))

def code():
    """What tells these files from others."""
    files = (open(path, "rb").read() for path in (__file__, model.__file__, kernel.__file__))
    return hashlib.sha256(b"".join(files)).hexdigest()[:12]

@cache
def commit():
    """The commit this is, and whether files differ from it; launch.sh tells it where it sent the files."""
    git = f"cd {shlex.quote(os.path.dirname(__file__) or '.')} && git describe --always --dirty --abbrev=40"
    return os.environ.get("PODGRPO_COMMIT") or subprocess.getoutput(f"({git}) 2> /dev/null") or "unknown"

# ---------------------------------------------------------------- model directory, mesh, sizes and checks
def model_directory(cfg, *patterns):
    """Where the model's files are: a directory, a hub id's copy of the patterns, or the tiny one, made."""
    if cfg.model == "tiny":
        tiny = f"{cfg.out}/tiny-seed{cfg.seed}.{jax.process_index()}"
        return tiny if os.path.isdir(tiny) else make_tiny(tiny, cfg.seed)
    if os.path.isdir(cfg.model):
        for path in glob.glob(f"{glob.escape(cfg.model)}/*.*"):  # nobody may ever write to a pipe
            check(os.path.isfile(path) or not path.endswith((".json", ".safetensors")), f"{path} is no file")
        return cfg.model
    from huggingface_hub import errors, snapshot_download  # comes with tokenizers
    for wait in 1, 4, 0:
        with stop_on(Exception, f"model {cfg.model} is not a directory here, nor had from the hub"):
            try:
                return snapshot_download(cfg.model, allow_patterns=patterns)
            except errors.LocalEntryNotFoundError:  # no answer; "there is no such model" is another
                if not wait:
                    raise
        time.sleep(wait)

def make_tiny(directory, seed):
    """Write the tiny Qwen2 like any other: config, byte-level BPE with digits apart, random weights."""
    tokenizer, split = tokenizers.ByteLevelBPETokenizer(), tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence([
        split.Split(tokenizers.Regex(r"\p{N}| ?\p{L}+|\s| ?[^\s\p{L}\p{N}]"), "isolated"),
        split.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.train_from_iterator(
        [chat("", row["question"]) + row["answer"] for row in arith(False)[:99]], TINY_MODEL["vocab_size"],
        min_frequency=0, show_progress=False, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    os.makedirs(aside := f"{directory}.tmp", exist_ok=True)
    tokenizer.save(f"{aside}/tokenizer.json")
    model.write_json(f"{aside}/tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>", pad_token="<|endoftext|>"))
    model.write_random(aside, TINY_MODEL, seed)
    os.rename(aside, directory)
    return directory

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
    gib, most = sequences * width * ROW_BYTES / 2 ** 30, host_memory() / 4
    check(gib <= most, f"batch*npq = {cfg.batch}*{cfg.npq} = {sequences} sequences per host, in rows of {width} "
          f"tokens, take {gib:.1f} GiB of this host's memory, more than a quarter of it, {most:.1f}; try "
          f"--batch {max(1, int(cfg.batch * most / gib))}")

def check_disk(cfg, wanted, done):
    """That what the run writes has room on the disk of `out`, before anything is computed. wanted: the state."""
    left = cfg.sft_steps + cfg.steps - done
    if not left:
        return
    # Each process writes its shards of the state, and process 0 the model, in float32 at most.
    checkpoint = checkpoint_bytes(wanted)
    final = 4 * sum(a.size for a in jax.tree.leaves(wanted["params"])) if jax.process_index() == 0 else 0
    # While one is written the older ones are still there; with a bucket that is the one of the start, at most.
    saves = 1 + (left - 1) // cfg.save_every if cfg.save_every else 1
    at_once = min(saves, 1) + bool(done) if bucket.bucket_of(cfg.out) else min(saves + bool(done), cfg.keep + 1)
    taken = sum(os.path.getsize(path) for path in glob.glob(f"{glob.escape(cfg.out)}/step_*/*"))
    free, gib = shutil.disk_usage(cfg.out).free + taken, 2 ** 30
    has_claim = os.path.exists(f"{cfg.out}/claim.json")
    need_P, free_P, has_claim_P = everywhere(np.array(
        [(at_once * checkpoint + final) / gib, free / gib, has_claim], np.float32)).T
    if has_claim_P.all():  # one disk for all
        need_P, free_P = need_P.sum(keepdims=True), free_P[:1]
    worst = int(np.argmin(free_P - need_P))
    what = f"{at_once} checkpoints at once, of {checkpoint / gib:.2f} GiB a process, and final"
    need, free = need_P[worst], free_P[worst]
    check(need <= free, f"{what} need {need:.2f} GiB of the disk of {cfg.out}, which has {free:.2f}; try --keep 1, "
          "--save_every 0, --out gs://bucket/run, or a larger disk (of a TPU VM: --create \"--data-disk source=..\")")
    say(f"{what} need {need:.2f} GiB of a disk that has {free:.2f}")

def checkpoint_bytes(wanted):
    """Of this process's part of a checkpoint: its shards of the state, each once."""
    total = 0
    for a in jax.tree.leaves(wanted):
        indices = a.sharding.addressable_devices_indices_map(a.shape).values()
        total += len(set(map(str, indices))) * math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    return total

ROW_BYTES = 100  # of a token on the host: eight arrays of 4 bytes, lists of Python's integers, a text

def host_memory():
    """GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2 ** 30

# ---------------------------------------------------------------- rollout, advantages, rows
def sample_answers(weights, rows, group, key, what, cfg, run, temperature, top_k=0, top_p=1.0):
    """Answers to this host's rows, `group` after another alike -> (what `model.generate` returns, texts)."""
    clock = [time.time()] * 2
    def tell(done, tokens):
        pause(run)
        line = f"{what}: {done} answers done, {tokens} tokens, {tokens / (time.time() - clock[0]):.0f} tok/s"
        progress(line)
        if not sys.stdout.isatty() and time.time() - clock[1] > 30:
            clock[1] = time.time()
            say(line)
    out = model.generate(weights, run.shape, run.layout, [row["prompt"] for row in rows], key, group=group,
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
    wide, narrow = everywhere(np.array(rows, np.float32)).sum(0)
    parts, width = (parts[1], widths[1]) if narrow <= wide else (parts[0], widths[0])
    needs, batches, computed, height = [], [], 0, shards * run.micro_batch
    for ids, packed in zip(minibatches, parts):
        valid = sum(len(answers[i]) for i in ids)
        needs.append([-(-len(packed) // height), valid if cfg.loss_agg == "token" else len(ids), valid])
    needs, at_once = everywhere(np.array(needs)), model.rows_at_once(run.micro_batch, width)  # of all hosts
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
    counts = everywhere([computed * width, sum(lengths), model.flops(run.shape, lengths)]).sum(0).tolist()
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
    params = {k: a if k == "layers" else jax.device_put(a, DEVICE) for k, a in params.items()}
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
    old = param, state = jax.device_put((param, state), DEVICE)
    direction, state = optimizer(cfg, name).update(factor * grad, state, param)
    param = jax.lax.with_sharding_constraint(param - lr * direction, NamedSharding(mesh, model.spec(name)))
    param, state = jax.tree.map(partial(jnp.where, jnp.isnan(factor)), old, (param, state))
    back = lambda a: jax.device_put(a, HOST) if a.ndim else a
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
    return jax.tree.map(lambda a: jax.device_put(a, DEVICE).astype(dtype), params)

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

def on_device(tree):
    """Bytes of a device that a tree of shapes takes."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree)
               if a.sharding.memory_kind != "pinned_host")

# ---------------------------------------------------------------- files and checkpoints
def write_jsonl(cfg, run, name, rows):
    """Append; what a full disk does not take waits for the next time."""
    if jax.process_index() == 0:
        plain = lambda v: None if isinstance(v, float) and not math.isfinite(v) else v  # JSON has no NaN
        waiting = run.unwritten.setdefault(name, [])
        waiting += [json.dumps({k: plain(v) for k, v in row.items()}, ensure_ascii=False) for row in rows]
        text = "".join(line + "\n" for line in waiting).encode(errors="replace")
        try:
            with open(f"{cfg.out}/{name}", "ab", buffering=0) as f:
                end = f.tell()
                try:
                    if f.write(text) < len(text):
                        raise OSError("no room")
                    os.fsync(f.fileno())
                except OSError:
                    f.truncate(end)
                    raise
            waiting.clear()
        except OSError as e:
            warn(f"{cfg.out}/{name} cannot be written: {first_line(e)}; {len(waiting)} lines wait")

def read_jsonl(cfg, name):
    """The rows of a file of this run, which is made if need be. What is no row of a step is told, and left
    out; so is half a line at the end, which a killed run may leave."""
    rows = []
    with open(f"{cfg.out}/{name}", "a+", encoding="utf-8", errors="replace") as f:
        f.seek(0)
        lines = [line for line in f if line.endswith("\n")]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise ValueError("its step is no number")
            rows.append(row)
        except (ValueError, TypeError, LookupError, RecursionError) as e:
            warn(f"{cfg.out}/{name} line {number} is no row of a step, and is left out: {first_line(e)}")
    return rows

def meaning(flags):
    """Of a run's flags (a dict) those that may not change on resume; questions a step, not a process."""
    per_step = {"batch * processes": flags.get("batch", 0) * flags.get("require_processes", 0)}
    return {k: v for k, v in flags.items() if k not in FREE and k != "batch"} | per_step

def claim_out(cfg, claims):
    """Make `out`, and let no other run use it until the ExitStack `claims` is left: process 0 sees to that."""
    fault = ""
    with stop_on(OSError, f"{cfg.out} cannot be made a directory; choose another --out"):
        os.makedirs(cfg.out, exist_ok=True)
        if jax.process_index() == 0:
            try:
                claims.enter_context(claimed(cfg.out, bucket.bucket_of(cfg.out), say))
            except InUse as e:
                fault = str(e)
    check(not everywhere(bool(fault)).any(), fault or f"{cfg.out} is in use, as process 0 tells")

def open_run(cfg):
    """`out`, once claimed -> its newest whole checkpoint (step or 0, files, what these keep beside). Refuses a
    directory that holds anything else."""
    if bucket.bucket_of(cfg.out):
        with stop_on(bucket.BucketError, "--out cannot be used"):
            bucket.fetch_rest(cfg.out, final=jax.process_index() == 0)
    found = {name for name in os.listdir(cfg.out) if not re.match(r"tiny-seed|claim\.json$", name)}
    if found:
        with stop_on(Exception, f"{cfg.out} exists and is not a run of podgrpo; choose another --out"):
            before = model.read_json(f"{cfg.out}/config.json")["config"]
            before, now = map(meaning, (before, dataclasses.asdict(cfg)))
            changed = [f"{k} was {before.get(k)!r}, is {v!r}" for k, v in now.items() if before.get(k) != v]
        check(not changed or cfg.resume == "force" or found == {"config.json"}, f"{cfg.out} is another run: "
              f"{'; '.join(changed[:3])}; choose another --out, or --resume force to go on with it")
    done, files, about = newest_checkpoint(cfg)
    written = everywhere(os.path.isdir(f"{cfg.out}/final"))[0]  # by process 0; another's disk may be its own
    if written and done >= cfg.sft_steps + cfg.steps:
        say(f"{cfg.out} is finished: {done} steps; see {cfg.out}/final and {cfg.out}/metrics.jsonl")
        raise SystemExit(0)
    return done, files, about

def newest_checkpoint(cfg):
    """-> (step, files, what they keep beside) of the newest that is whole for all, or (0, [], {}) where none
    ever was: a process may have been killed in its first save. Where one was, and none can be used, this is
    for the user to decide."""
    steps, in_bucket = model.saved_steps(cfg.out), bucket.bucket_of(cfg.out)
    if in_bucket:
        with stop_on(bucket.BucketError, "--out cannot be used"):
            steps = sorted({*steps, *bucket.saved_steps(cfg.out)})
    steps = everywhere(np.array([0] * 99 + steps)[-99:])
    (me, n), mine, fault = (jax.process_index(), jax.process_count()), [], ""
    for step in sorted({*steps.ravel().tolist()} - {0}, reverse=True):
        files, about, directory = [], {}, f"{cfg.out}/step_{step:06}"
        if in_bucket:
            with stop_on(bucket.BucketError, "--out cannot be used"):
                bucket.fetch_checkpoint(cfg.out, f"step_{step:06}", me, n)
        try:
            files, about = model.whole_checkpoint(directory)
            mine.append(step)
        except (model.CheckpointError, OSError) as e:
            warn(f"step {step} is passed over: {e}")
            if not isinstance(e, model.IncompleteCheckpoint):
                fault = fault or str(e)
            elif any(of != n for _, of in model.shard_files(directory)):
                fault = (f"{directory} is of another number of processes than {n}, and not all its files are "
                         "here; --out must be a directory that all processes share, or gs://")
        runs = everywhere(about.get("run", 0))
        if 0 < runs.min() == runs.max():
            return step, files, about
    if len(mine) > 1:  # a second is begun when all have the first
        fault = fault or f"process {me} has its part of steps {mine}, and others lack theirs"
    if everywhere(bool(fault)).any():
        check(cfg.resume == "force", f"{cfg.out} has checkpoints, and none can be used: "
              f"{fault or 'another process tells why'}; bring a good copy back, or choose another --out, or "
              "--resume force, which renames what is there and starts over")
        put_aside(cfg)
    return 0, [], {}

def put_aside(cfg):
    """Rename what a run left in `out`, each process what is on its disk."""
    old = time.strftime("old-%Y%m%d-%H%M%S", time.gmtime(everywhere(int(time.time()))[0]))
    os.makedirs(f"{cfg.out}/{old}", exist_ok=True)
    left = r"step_\d{6}|final|(metrics|samples)\.jsonl"
    if bucket.bucket_of(cfg.out) and jax.process_index() == 0:
        with stop_on(bucket.BucketError, "--out cannot be used"):
            bucket.put_aside(cfg.out, old, left)
    for name in os.listdir(cfg.out):
        if re.fullmatch(left, name):
            with contextlib.suppress(FileNotFoundError):  # on a disk of several processes, one is the first
                os.rename(f"{cfg.out}/{name}", f"{cfg.out}/{old}/{name}")
    everywhere(0)  # none writes before all have looked
    say(f"{cfg.out} starts over; what was there is in {old}")

def about_checkpoint(step, cfg, run, owed=None):
    """What it keeps beside the state; all else follows from flags and step. owed: metrics of a step that lack
    its evaluation; skipped: updates in a row; unwritten: lines that wait for room on the disk."""
    kept = {"config": dataclasses.asdict(cfg), "owed": owed, "skipped": run.skipped,
            "unwritten": run.unwritten}
    return {"run": str(run.id), "step": str(step), "commit": commit()} | {
        k: json.dumps(v) for k, v in kept.items()}

def write_checkpoint(step, shards, about, cfg):
    """-> whether it was written."""
    try:
        model.save_shards(shards, f"{cfg.out}/step_{step:06}", about)
        if bucket.bucket_of(cfg.out):
            bucket.send_checkpoint(cfg.out, f"step_{step:06}", jax.process_index(), jax.process_count())
        return send_rest(cfg)
    except OSError as e:  # a BucketError is one
        warn(f"step {step} cannot be saved: {first_line(e)}; the run goes on, older checkpoints stay")
        return False

def send_rest(cfg):
    """The small files to the bucket, if the run has one -> whether that worked."""
    try:
        if bucket.bucket_of(cfg.out) and jax.process_index() == 0:
            bucket.send_rest(cfg.out)
    except bucket.BucketError as e:
        warn(str(e))
        return False
    return True

def save(step, state, cfg, run):
    """Begin a checkpoint, written beside training if the memory of all hosts has room for a copy."""
    settle(cfg, run)
    shards, room = model.shards_of(state), 0
    with contextlib.suppress(OSError), open("/proc/meminfo") as f:
        room = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", f.read())[1])
    beside = everywhere(room > 2 * sum(a.nbytes for a in shards.values())).all()
    if beside:  # the next update takes those on the devices
        shards = {key: np.array(a, order="C") for key, a in shards.items()}
    about = about_checkpoint(step, cfg, run)
    run.saving = step, run.writer.submit(write_checkpoint, step, shards, about, cfg)
    if not beside:
        settle(cfg, run)

def settle(cfg, run):
    """Wait for the checkpoint that is being written; once it is whole for all, older ones may go. What is in a
    bucket need not stay here."""
    if not run.saving:
        return
    (step, future), run.saving = run.saving, None
    if not everywhere(future.result()).all():
        return
    run.done = step
    in_bucket = bool(bucket.bucket_of(cfg.out))
    kept_here = 0 if in_bucket else cfg.keep
    for old in too_old(model.saved_steps(cfg.out), step, kept_here):
        shutil.rmtree(f"{cfg.out}/step_{old:06}", ignore_errors=True)
    if in_bucket and jax.process_index() == 0:
        run.writer.submit(thin_bucket, step, cfg)  # beside training, and before the next is sent

def too_old(steps, newest, kept):
    """Of these steps all up to `newest`, but for the last so many."""
    steps = [step for step in steps if step <= newest]
    return steps[:max(0, len(steps) - kept)]

def thin_bucket(newest, cfg):
    try:
        bucket.remove_checkpoints(cfg.out, too_old(bucket.saved_steps(cfg.out), newest, cfg.keep))
    except bucket.BucketError as e:
        warn(f"old checkpoints stay in {bucket.bucket_of(cfg.out)}: {e}")

class Stop(Exception):
    """A signal, its number, asks to end."""

PATIENCE = 10  # seconds between questions to a metadata server that gives no answer

def watch_signals(run):
    """SIGTERM and SIGINT, or Google's notice that the VM will be preempted, end the run at the next `pause`;
    the same signal once more ends it at once."""
    def note(number, _):
        run.signal = number
        signal.signal(number, signal.SIG_DFL)
    def listen():
        while True:
            try:
                if metadata("preempted?wait_for_change=true", None) == "TRUE":
                    return os.kill(os.getpid(), signal.SIGTERM)
            except (OSError, ValueError):
                time.sleep(PATIENCE)
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    if on_tpu_vm():
        threading.Thread(target=listen, daemon=True).start()

def pause(run):
    """Where all processes can stop: they do if one was told to."""
    if number := int(everywhere(run.signal).max()):
        raise Stop(number)

def rescue(cfg, run):
    """Save what the last whole step left, unless an update has taken it -> what to tell. Each process for
    itself: others may be gone."""
    if run.saving and run.saving[1].result():
        run.done = run.saving[0]
    step, state, owed = run.latest
    taken = any(a.is_deleted() for a in jax.tree.leaves(state))
    if step > run.done and not taken and write_checkpoint(
            step, model.shards_of(state), about_checkpoint(step, cfg, run, owed), cfg):
        run.done = step
    return f"step {run.done} is saved; start again, and it resumes" if run.done else "nothing is saved yet"

def write_final(cfg, run, params):
    """`out`/final: the weights in the type they came in, with the other files of the model they came from."""
    config, final = model.read_json(f"{run.directory}/config.json"), f"{cfg.out}/final"
    kind = config.get("torch_dtype") or config.get("dtype")
    kind = kind if kind in ("bfloat16", "float16") else "float32"
    if jax.process_index() == 0:
        shutil.rmtree(final + ".tmp", ignore_errors=True)
        os.makedirs(final + ".tmp")
    model.save(final + ".tmp", params, run.shape, run.mesh, kind)
    if jax.process_index() == 0:
        for name in os.listdir(run.directory):
            if name.endswith((".json", ".txt", ".jinja")) and not name.endswith(".index.json"):
                shutil.copy(f"{run.directory}/{name}", final + ".tmp")
        for name in os.listdir(final + ".tmp"):
            model.sync(f"{final}.tmp/{name}")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(final + ".tmp", final)

# ---------------------------------------------------------------- what a person sees
# the line of a step, of its metrics: fixed order, greppable
SFT = "sft {step}/{total} | nll {nll:.3f} | gnorm {grad_norm:.2f} | lr {lr:.1e} | upd {time/update_s:.1f}s"
GRPO = ("step {step}/{total} | reward {reward/mean:.2f} | solved {solved:.2f} | len {len/answer:.0f} | "
        "clip {clip_fraction:.3f} | kl {kl:.3f} | gnorm {grad_norm:.2f} | roll {time/rollout_s:.1f}s "
        "upd {time/update_s:.1f}s | {thousands:.1f}k tok/s")

class Stream(io.FileIO):
    """A standard stream that bears that nobody reads it any more, or that its disk is full."""
    def write(self, data):
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)

def open_streams():
    """sys.stdout and sys.stderr, once more where they are closed. What is closed outside goes nowhere."""
    for name, number in ("stdout", 1), ("stderr", 2):
        try:
            raw = Stream(number, "w", closefd=False)
        except OSError:
            raw = open(os.devnull, "wb", buffering=0)
        buffered = io.BufferedWriter(raw)
        # a terminal may not have all letters of an answer
        stream = io.TextIOWrapper(buffered, errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)

def warn(text):
    print(f"train.py: {text}", file=sys.stderr, flush=True)

def say(text, end="\n"):
    if jax.process_index() == 0:
        print("\r\033[K" * sys.stdout.isatty() + text, end=end, flush=True)

def progress(what, done=0, total=0):
    """What is being done, how far: on a terminal, a line that the next replaces; else one at each quarter."""
    what += f" {done}/{total}" * (total > 0)
    if sys.stdout.isatty():
        say(what, end="\r")
    elif total > 1 and done * 4 // total > (done - 1) * 4 // total:
        say(what)

def report(cfg, seconds):
    """Before and after, from what the run wrote down, so that it is the same after a resume."""
    scores = {m["step"]: m["eval/solved"] for m in read_jsonl(cfg, "metrics.jsonl") if "eval/solved" in m}
    say(f"\ndone: {cfg.sft_steps} supervised and {cfg.steps} GRPO steps, {seconds / 60:.1f} minutes")
    if scores:
        a, b = min(scores), max(scores)
        told = [s for s in read_jsonl(cfg, "samples.jsonl") if s.get("eval") and s["step"] in (a, b)]
        for s in sorted(told, key=lambda s: s["question"]):
            say(f"\n  {s['question']}\n" * (s["step"] == a)
                + f"    step {s['step']:4} {'right' if s['solved'] else 'wrong'}  {s['answer']}")
        say(f"\nheld-out questions solved: {scores[a]:.1%} at step {a} -> {scores[b]:.1%} at step {b}")
    say(f"checkpoint: {cfg.out}/final (Hugging Face format); " * (cfg.steps + cfg.sft_steps > 0)
        + f"metrics: {cfg.out}/metrics.jsonl")

# ---------------------------------------------------------------- set up: from flags to arrays
def with_prompts(name, held_out, tokenizer, cfg):
    """Rows with the ids of `prompt` and of `told`, the text to imitate; too long prompts are left out."""
    what = f"held out ({name})" if held_out else name
    rows = load_rows(name, held_out)[:(cfg.eval_n if held_out else 0) or None]
    encode = partial(tokenizer.encode_batch, add_special_tokens=False)
    with stop_on(Exception, f"the tokenizer of {cfg.model} cannot encode {what}"):
        prompts = encode([chat(cfg.system, row["question"]) for row in rows])
        told = encode([row.get("demonstration", row["answer"]) + "<|im_end|>" for row in rows])
    kept = [row | {"prompt": p.ids, "told": t.ids} for row, p, t in zip(rows, prompts, told)
            if len(p.ids) <= cfg.max_prompt]
    shortest, fixed = min(len(p.ids) for p in prompts), len(encode([chat(cfg.system, "")])[0].ids)
    check(fixed < cfg.max_prompt, f"--system and the chat template alone take {fixed} tokens of max_prompt = "
          f"{cfg.max_prompt}; raise --max_prompt to {shortest} or more, or give a shorter --system")
    check(kept, f"all {len(rows)} prompts of {what} are longer than max_prompt = {cfg.max_prompt} tokens; "
          f"the shortest has {shortest}; raise --max_prompt")
    skipped, unmarked = len(rows) - len(kept), sum(final_number(row["answer"]) is None for row in kept)
    say(f"{what}: {len(kept)} questions" + f"; {skipped} skipped, longer than max_prompt = {cfg.max_prompt}"
        * (skipped > 0) + f"; {unmarked} have no number in their answer" * (unmarked > 0))
    return kept

def load_tokenizer(directory):
    """-> (tokenizer, the id of <|im_end|>)"""
    with stop_on(Exception, f"{directory}/tokenizer.json is not a readable tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_file(f"{directory}/tokenizer.json")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        start, end = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>"))
        ids = tokenizer.encode(text := "<|im_start|>What is 2 + 3?<|im_end|>", add_special_tokens=False).ids
        again = tokenizer.decode(ids, skip_special_tokens=False)
    check((ids[:1], ids[-1:], again) == ([start], [end], text), f"{directory}/tokenizer.json makes {again!r} "
          f"of {text!r}, or has no <|im_start|> and <|im_end|>: not the tokenizer of a Qwen2")
    return tokenizer, end

@stop_on(OSError, "a file cannot be read or written; mend it, or choose another --out")
def set_up(cfg, claims):
    """-> (Config, run: what does not change); all mistakes are found here."""
    connect(cfg)
    claim_out(cfg, claims)
    mesh = make_mesh(cfg.mesh, jax.devices())
    cfg = resolve(dataclasses.replace(cfg, require_processes=jax.process_count()), mesh)
    done, files, about = open_run(cfg)
    directory = model_directory(cfg, "*.json", "*.txt", "*.jinja")
    shape = model.read_config(directory)
    tokenizer, end = load_tokenizer(directory)
    check_sizes(cfg, shape, mesh, 1 + max(tokenizer.get_vocab().values()))
    layout, why = model.rollout_layout(cfg.rollout_sharding, shape, mesh, cfg.dtype)
    check(cfg.rollout_sharding != "tp" or layout.mesh.shape["tp"] > 1, "rollout_sharding = tp finds "
          f"nothing that divides {jax.local_device_count()} local devices, {shape.K} key/value heads, "
          f"feed-forward size {shape.F} and vocabulary {shape.V}; try --rollout_sharding auto")
    say(f"rollout: {why}")
    shape = dataclasses.replace(shape, stop_ids=tuple(sorted({*shape.stop_ids, end})))
    rows = with_prompts(cfg.data, False, tokenizer, cfg)
    held_out = [] if eval_data(cfg) == "none" else with_prompts(eval_data(cfg), True, tokenizer, cfg)
    examples = [row for row in rows if len(row["told"]) <= cfg.max_answer]
    check(examples or not cfg.sft_steps, f"all answers of {cfg.data} exceed max_answer = {cfg.max_answer}")
    longest = max(len(row["prompt"]) for row in rows + held_out)
    width = row_width(longest + cfg.max_answer, mesh)
    check_step(cfg, len(rows), width)
    wanted = abstract_state(cfg, shape, mesh)
    check_disk(cfg, wanted, done)
    at_once = model.rows_that_fit(shape, layout, cfg.dtype, model.bucket(longest) + cfg.max_answer,
                                  on_device(wanted))
    checkpoint, logger = model.Checkpoint(model_directory(cfg, "*.safetensors"), shape), None
    if cfg.wandb and jax.process_index() == 0:
        with stop_on(Exception, f"--wandb {cfg.wandb} wants wandb and WANDB_API_KEY; mend or drop it"):
            import wandb
            logger = wandb.init(project=cfg.wandb, name=cfg.out, id=cfg.out.replace("/", "-"), resume="allow",
                                config=dataclasses.asdict(cfg))
    model.write_json(f"{cfg.out}/config.json", {  # by every process: its disk may be its own
        "config": dataclasses.asdict(cfg), "commit": commit(),
        "versions": {m.__name__: m.__version__ for m in (jax, optax, np)}})
    check(send_rest(cfg), f"--out {cfg.out} cannot be written to; see above")
    return cfg, SimpleNamespace(
        directory=directory, checkpoint=checkpoint, shape=shape, mesh=mesh, tokenizer=tokenizer,
        rows=rows, held_out=held_out, examples=examples, row_width=width, layout=layout, at_once=at_once,
        wandb=logger,
        micro_batch=choose_micro_batch(cfg, shape, mesh, width) if cfg.steps + cfg.sft_steps else 0,
        # of checkpoints: the newest step, its files; what is to be saved if the run ends, is being saved
        done=done, files=files, latest=(done, {}, None), saving=None, writer=ThreadPoolExecutor(1),
        id=int(everywhere(int(time.time()))[0]), signal=0,
        **{k: json.loads(about.get(k, "null")) or empty
           for k, empty in (("owed", {}), ("skipped", 0), ("unwritten", {}))})

def load_state(cfg, run):
    """-> {params, opt, ref where there is a KL}: from the model's files, or the run's newest checkpoint."""
    wanted = abstract_state(cfg, run.shape, run.mesh)
    places = jax.tree.map(lambda a: a.sharding, wanted)
    if run.done:
        state = model.load_shards(run.files, wanted)
        say(f"resuming {cfg.out} after step {run.done}")
    else:
        params = model.load(run.checkpoint, run.mesh, partial(progress, "loading weights"))
        make = lambda name, a: jax.jit(optimizer(cfg, name).init, out_shardings=places["opt"][name])(a)
        state = {"params": params, "opt": {name: make(name, a) for name, a in model.flatten(params).items()}}
        if cfg.beta:
            state["ref"] = reference(params, cfg.dtype)
        state["params"] = jax.device_put(params, places["params"])
    if jax.process_index() == 0:
        cut_back(cfg, run)
    return state

def cut_back(cfg, run):
    """Let metrics and samples end at the checkpoint: what came after it will come again."""
    for name in "metrics.jsonl", "samples.jsonl":
        last = lambda row: run.done - bool(run.owed and ("eval" in row or name == "metrics.jsonl"))
        written = [row for row in read_jsonl(cfg, name) if run.done and row["step"] <= last(row)]
        waited = [row for row in map(json.loads, run.unwritten.pop(name, [])) if row["step"] <= last(row)]
        place = lambda row: (row["step"], "eval" in row)
        if waited:  # some may have found room after the checkpoint
            written = [row for row in written if place(row) < place(waited[0])]
        with model.written(f"{cfg.out}/{name}") as f:
            f.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in written + waited)

# ---------------------------------------------------------------- evaluation and metrics
def evaluate(params, step, cfg, run):
    """-> {eval/solved}: the part of the held-out questions solved. Three answers go to samples.jsonl."""
    each, n, solved, began, told = cfg.batch * cfg.npq, len(run.held_out), 0.0, time.time(), []
    stride, weights = each * jax.process_count(), model.to_rollout(params, run.layout, cfg.dtype)
    for start in range(0, n, stride):
        first = start + jax.process_index() * each
        rows = [run.held_out[i % n] for i in range(first, first + each)]  # as many on each; not all count
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(cfg.seed), 0), start)
        out, answers = sample_answers(weights, rows, 1, key, f"evaluating {start}/{n}", cfg, run,
                                      cfg.eval_temperature, cfg.top_k, cfg.top_p)
        right = score_answers([SOLVED], rows, answers, out["cut_B"])[0][:, 0].tolist()
        solved += sum(right[:max(0, n - first)])
        told = told or [
            {"step": step, "eval": True, "question": rows[i]["question"], "reference": rows[i]["answer"],
             "answer": answers[i], "solved": right[i]} for i in range(min(3, n, each))]
        progress("evaluating", min(start + stride, n), n)
    solved = float(everywhere(solved).sum()) / n
    write_jsonl(cfg, run, "samples.jsonl", told)  # at the end, which a signal may prevent
    say(f"eval at step {step} | solved {solved:.4f} of {n} | {time.time() - began:.1f}s")
    return {"eval/solved": solved}

def rollout_metrics(rewards, prompts, out, scores, faults, cfg):
    """Reward and length metrics over the answers of all hosts; reward functions that failed are named."""
    for name, messages in faults.items():
        print(f"reward {name} failed on {len(messages)} answers, which score 0: {max(messages.values())}")
    names = ["reward/mean", "len/prompt", "len/answer", "truncated", "solved"]
    names += [f"reward/{function.__name__}" for function, _ in REWARDS]
    table = np.column_stack([rewards, [len(p) for p in prompts], out["lengths_B"], out["cut_B"], scores])
    table = everywhere(table).reshape(-1, len(names))
    groups = table[:, 0].reshape(-1, cfg.npq)
    return dict(zip(names, table.mean(0).tolist())) | {
        "reward/std": float(groups.std()), "len/answer_max": float(table[:, 2].max()),
        "reward/faults": int(everywhere(sum(map(len, faults.values()))).sum()),
        "group/zero_variance": float((groups.max(1) == groups.min(1)).mean())}

def update_metrics(parts, norms, counts, seconds, cfg, run):
    """Metrics of a step's passes -> means over tokens (loss, grad_norm: over updates), padding, memory."""
    m = {k: float((max if k.endswith("/max") else sum)(part[k] for part in parts)) for k in parts[0]}
    good = [float(norm) for norm in norms if np.isfinite(norm)]
    m |= {"loss": m["loss"] / len(norms), "grad_norm": sum(good) / len(good) if good else math.nan,
          "skipped": len(norms) - len(good)}
    for k in m.keys() & {"nll", "entropy", "clip_fraction", "kl", "logprob_gap", "ratio"}:
        m[k + "/mean" if k + "/max" in m else k] = m.pop(k) / counts["valid"] / cfg.ppo_epochs
    memory = [d.memory_stats() or {} for d in jax.local_devices()]  # None where a backend does not tell
    gib = [max(d.get(k, 0) for d in memory) / 2 ** 30 for k in ("bytes_in_use", "peak_bytes_in_use")]
    used, peak = everywhere(gib).max(0).tolist()
    speed = model.chip(run.mesh.devices.flat[0]).flops * run.mesh.size * seconds
    return {"kl": 0.0} | m | {
        "valid_tokens": counts["valid"], "padding_fraction": 1 - counts["tokens"] / counts["slots"],
        "micro_batch": run.micro_batch,
        "mfu": cfg.ppo_epochs * counts["flops"] / speed if speed else None,  # None: a chip not known
        "memory/train/bytes_in_use_max_gib": used or None,
        "memory/train/peak_bytes_in_use_max_gib": peak or None}

# ---------------------------------------------------------------- the plan: memory and time, before a run
ADVICE = "--remat full, --offload optimizer or params, a smaller --max_answer or more devices"
ASSUMED_MFU = 0.4  # of the update; MaxText reaches 0.45 with an 8B on v6e
SWEPT = "micro_batch", "max_prompt", "max_answer", "loss_impl", "remat", "offload"

def compiled_gib(lowered, mesh):
    """-> (GiB that a compiled program takes of a device, does it fit): nothing is run. What is too much for a
    TPU is not compiled to its end; then GiB is the compiler's estimate."""
    try:
        m = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as e:
        total = re.search(r"(?:\(|Used )([\d.]+)([MGT])(?=\) exceeds| of )", str(e))
        if not total:
            raise
        return float(total[1]) * {"M": 2 ** -10, "G": 1, "T": 2 ** 10}[total[2]], False
    total = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    on_tpu = mesh.devices.flat[0].platform == "tpu"  # others tell no peak
    return (m.peak_memory_in_bytes if on_tpu else total) / 2 ** 30, True

def needed_by_apply(cfg, shape, mesh):
    """-> (GiB that the optimizer step of the largest parameter takes of a device, does it fit)."""
    state, grads = abstract_state(cfg, shape, mesh), abstract_grads(cfg, shape, mesh)
    flat = model.flatten(state["params"])
    name = max(flat, key=lambda name: flat[name].size)
    mine = flat[name], state["opt"][name], model.flatten(grads)[name]
    factor = jax.ShapeDtypeStruct((), jnp.float32)
    gib, fits = compiled_gib(apply.lower(*mine, factor, 0.0, name=name, cfg=cfg, mesh=mesh), mesh)
    return gib + (on_device((state, grads)) - on_device(mine)) / 2 ** 30, fits

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
    both = compiled_gib(lowered, mesh), needed_by_apply(cfg, shape, mesh)
    gib = max(gib for gib, _ in both)
    return gib, all(fits for _, fits in both) and gib <= model.device_memory(mesh.devices.flat[0])

def largest(need, limit, most):
    """The largest micro-batch up to `most` that fits by need(n) -> (GiB, fits), 0 if none, and all that was
    asked: `most`, a small one, where the line through the two meets the limit, and that is confirmed."""
    tried, low, high, guess = {}, 0, most + 1, most  # TPU compilers soon tell what is too much
    while low + 1 < high:
        tried[guess] = need(guess)
        low, high = (guess, high) if tried[guess][1] else (low, guess)
        guess = max(1, min(8, guess // 4))
        if len(tried) > 1:
            a, b = (low, high) if low and high in tried else sorted(tried)[:2]
            x, y = tried[a][0], tried[b][0]
            guess = math.floor(a + (limit - x) * (b - a) / max(y - x, 1e-9))
            if low and guess <= low:
                break
        guess = min(max(guess, low + 1), high - 1)
    return low, tried

def rows_to_fill(cfg, mesh):
    """Rows per device of a minibatch whose sequences have a row each."""
    return cfg.batch * cfg.npq * hosts(mesh) // (mesh.shape["dp"] * mesh.shape["fsdp"]) // cfg.minibatches

def choose_micro_batch(cfg, shape, mesh, width):
    """The largest that fits, up to what a step fills; or what the flag says, which must fit."""
    most, limit = cfg.micro_batch or rows_to_fill(cfg, mesh), model.device_memory(mesh.devices.flat[0])
    program = dataclasses.replace(cfg, out="", seed=0), shape, mesh, width, limit, jax.__version__, code()
    key, found = hashlib.sha256(repr(program).encode()).hexdigest(), {}
    remembered = os.path.expanduser("~/.cache/podgrpo/micro_batch.json")
    with contextlib.suppress(model.CheckpointError):
        found = model.read_json(remembered)
    if key not in found:
        chosen, tried = largest(lambda n: needed(n, width, cfg, shape, mesh), limit, most)
        found[key] = [chosen, *(tried.get(n, [0])[0] for n in (chosen, most))]
        if chosen < most:  # or there is no search to be spared
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(remembered), exist_ok=True)
                model.write_json(remembered, found)
    chosen, gib, wanted = everywhere(found[key]).min(0).tolist()
    over = f"{wanted:.2f} GiB of a device's {limit:.2f}, {wanted - limit:.2f} too much"
    check(chosen, f"not one row of {width} tokens per device fits: {most} take {over}; try {ADVICE}")
    check(chosen == most or not cfg.micro_batch,
          f"micro_batch = {most} takes {over}; the largest that fits is --micro_batch {chosen:.0f}")
    say(f"micro_batch {chosen:.0f} of at most {rows_to_fill(cfg, mesh)} rows per device: {gib:.2f} GiB of "
        f"{limit:.2f}")
    return int(chosen)

def plan_memory(cfg, shape, mesh, width):
    """Print what micro-batches take of a device -> of the largest that fits, or of the one that cfg says."""
    limit, tried = model.device_memory(mesh.devices.flat[0]), {}
    say(f"rows of {width} tokens, {limit:.2f} GiB a device; {cfg.optimizer}, remat {cfg.remat}, offload "
        f"{cfg.offload}, attention {cfg.attention}, loss {cfg.loss_impl}")
    def need(n):
        say(f"compiling the update with micro_batch {n} ...")
        return needed(n, width, cfg, shape, mesh)
    if cfg.micro_batch:
        tried[cfg.micro_batch] = need(cfg.micro_batch)
        low = cfg.micro_batch * tried[cfg.micro_batch][1]
    else:
        kept = shape.L * width * shape.D * jnp.dtype(cfg.dtype).itemsize / 2 ** 30  # at least, of a row
        low, tried = largest(need, limit, int(min(1024, 1 + limit // kept)))
    a, b = sorted(tried)[0], sorted(tried)[min(1, len(tried) - 1)]
    slope = (tried[b][0] - tried[a][0]) / max(1, b - a)
    say(f"{'micro_batch':>12} {'peak GiB':>10}")
    for n in sorted({2 ** i for i in range(11) if len(tried) > 1 and 2 ** i <= 2 * low} | set(tried)):
        gib = tried[n][0] if n in tried else tried[a][0] + (n - a) * slope
        fits = tried[n][1] if n in tried else gib <= limit
        say(f"{'' if n in tried else '~':>5}{n:7} {gib:10.2f}  "
            + ("fits" if fits else f"{max(0, gib - limit):.2f} GiB too much"))
    return {"micro_batch": low, "gib": tried[low or a][0], "limit_gib": limit}

def plan_time(cfg, shape, layout, mesh):
    """Print what a step takes where all prompts and answers have their full length, with the arithmetic."""
    length, sequences, n = cfg.max_prompt + cfg.max_answer, cfg.batch * cfg.npq * hosts(mesh), mesh.size
    (weights, slot), device = model.bytes_read(shape, layout, cfg.dtype), mesh.devices.flat[0]
    resident, shards = on_device(abstract_state(cfg, shape, mesh)), model.row_shards(layout)
    most, chip = model.rows_that_fit(shape, layout, cfg.dtype, length, resident), model.chip(device)
    waves, _ = model.plan_waves(sequences, shards, cfg.npq, most)
    rows, at_once, held = sequences // shards, waves[0].shape[1], resident / 2 ** 30
    decode = model.lower_decode(shape, layout, jnp.dtype(cfg.dtype), at_once * shards, length)
    gib, fits = compiled_gib(decode, mesh)
    fits &= gib + held <= model.device_memory(device)
    say(f"rollout, {layout.kind}: {rows} rows per device, {at_once} at once: {gib + held:.2f} GiB, "
        f"{held:.2f} of it parameters and optimizer" + "; too much" * (not fits))
    if not chip.flops:
        return say(f"no estimate of the time: the peak of a {device.device_kind} is not known")
    cached = slot * (cfg.max_prompt + cfg.max_answer / 2)
    rollout = cfg.max_answer * (len(waves) * weights + rows * cached) / chip.bandwidth
    passes = cfg.ppo_epochs + (cfg.ppo_epochs * cfg.minibatches > 1) / 3  # a third: the forward that scores
    flops = model.flops(shape, [length]) * sequences * passes
    took = flops / (ASSUMED_MFU * chip.flops * n)
    say(f"a step, estimated, of prompts and answers of full length: {rollout + took:.1f} s\n"
        f"  rollout {rollout:.1f} s = {cfg.max_answer} tokens x ({len(waves)} x {weights / 1e9:.2f} GB of "
        f"weights + {rows} rows x {cached / 1e9:.3f} GB of cache) / {chip.bandwidth / 1e12:.2f} TB/s\n"
        f"  update {took:.1f} s = {flops / 1e15:.2f} PFLOP of {sequences} x {length} tokens / "
        f"({ASSUMED_MFU} x {chip.flops / 1e12:.0f} TFLOP/s x {n} devices)")

def plan(cfg):
    """What fits devices that need not be here, and how long a step takes: compiled, not run."""
    with stop_on(Exception, f"--plan {cfg.plan} cannot be compiled for here: that takes a type such as v6e-8 "
                 "and libtpu, which is for x86-64 Linux"):
        devices = jax.devices() if cfg.plan == "here" else kernel.tpu_devices(cfg.plan)
    name, _, values = cfg.sweep.partition("=")
    check(not cfg.sweep or values and name in SWEPT, f"sweep = {cfg.sweep} is not a list such as "
          f"micro_batch=8,16, of {', '.join(SWEPT)}")
    with tempfile.TemporaryDirectory() as directory:  # of the tiny model, which is nowhere yet
        model.write_json(f"{directory}/config.json", TINY_MODEL)
        shape = model.read_config(directory if cfg.model == "tiny" else model_directory(cfg, "*.json"))
    mesh, table = make_mesh(cfg.mesh, devices), []
    say(f"{cfg.plan}: {hosts(mesh)} x {mesh.size // hosts(mesh)} {devices[0].device_kind}, mesh "
        f"{dict(mesh.shape)}; {shape.n_params / 1e6:.2f}M parameters\n{cfg.batch} questions x {cfg.npq} "
        f"answers = {cfg.batch * cfg.npq} sequences per host, in {cfg.minibatches} minibatches of at most "
        f"{rows_to_fill(cfg, mesh)} rows per device")
    with stop_on(ValueError, f"sweep = {cfg.sweep}"):
        swept = [{name: type(getattr(cfg, name))(v)} for v in values.split(",")] if values else [{}]
    for one in swept:  # all, before the first is compiled
        check_flags(dataclasses.replace(cfg, **one))
    for values in swept:
        one = resolve(dataclasses.replace(cfg, **values), mesh)
        check_sizes(dataclasses.replace(one, micro_batch=0), shape, mesh, 0)  # any may be asked about
        table.append(values | plan_memory(one, shape, mesh, row_width(one.max_prompt + one.max_answer, mesh)))
    plan_time(one, shape, model.rollout_layout(one.rollout_sharding, shape, mesh, one.dtype)[0], mesh)
    if values:
        columns = dict.fromkeys((name, "micro_batch", "gib"))
        for row in [dict(zip(columns, columns)), *table]:
            say("".join(f"{row[k]!s:>14.14}" for k in columns))
        with open(f"plan-{cfg.plan}.jsonl", "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in table)
    say(f"largest that fits: micro_batch {max(row['micro_batch'] for row in table)}")

# ---------------------------------------------------------------- main: the loop
@stop_on(model.CheckpointError, "these files cannot be used")
def main(argv):
    if devices := int(os.environ.get("JAX_NUM_CPU_DEVICES", 0)):  # else XLA has a thread a core, and
        os.environ.setdefault("NPROC", str(4 * devices))  # collectives of more devices than that may deadlock
    cfg = parse(argv)
    if cfg.plan:
        return plan(cfg)
    with contextlib.ExitStack() as claims:
        cfg, run = set_up(cfg, claims)
        watch_signals(run)
        train_or_rescue(cfg, run)

def train_or_rescue(cfg, run):
    """Train; what ends that early is told, and saves what there is."""
    try:
        train(cfg, run)
    except Stop as stop:
        say(f"\nended by {signal.Signals(stop.args[0]).name}: {rescue(cfg, run)}")
        raise SystemExit(128 + stop.args[0])
    except OSError as e:  # of files beside those that wait for room
        warn(f"{first_line(e)}\n{rescue(cfg, run)}, once that is mended")
        raise SystemExit(1)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        warn(f"a device ran out of memory in step {run.latest[0] + 1}: {first_line(e)[:300]}\n"
             f"{rescue(cfg, run)} with --micro_batch {max(1, run.micro_batch // 2)} or {ADVICE}")
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
        write_jsonl(cfg, run, "metrics.jsonl", [{"step": 0} | evaluate(state["params"], 0, cfg, run)])
    for step in range(run.done + 1, total + 1):
        clock, supervised, metrics = [time.time()], step <= cfg.sft_steps, {"step": step}
        run.latest = step - 1, state, None
        pause(run)
        # questions, each host its own
        pool, each, past = ((run.examples, sequences, step - 1) if supervised
                            else (run.rows, cfg.batch, step - 1 - cfg.sft_steps))
        order = question_order(cfg.seed, (past * n_hosts + host) * each, each, len(pool))
        asked = [pool[i] for i in order for _ in range(sequences // each)]
        prompts = [row["prompt"] for row in asked]
        if supervised:  # advantage 1 on given answers, ratio 1: the gradient of the log-likelihood
            tokens, advantages, sampler = [row["told"] for row in asked], np.ones(sequences), None
        else:
            # rollout: npq answers to each
            weights = model.to_rollout(state["params"], run.layout, cfg.dtype)
            out, answers = sample_answers(weights, asked, cfg.npq, jax.random.fold_in(key, step),
                                          f"step {step}/{total}", cfg, run, cfg.temperature)
            del weights  # before the update, which wants the memory
            tokens = [t[:n].tolist() for t, n in zip(out["tokens_BT"], out["lengths_B"])]
            sampler = out["logp_BT"]
            clock.append(time.time())
            # rewards, and advantages within each group
            scores, faults = score_answers([SOLVED] + [f for f, _ in REWARDS], asked, answers, out["cut_B"])
            rewards = scores[:, 1:] @ [weight for _, weight in REWARDS]
            advantages = group_advantages(rewards, cfg.npq, cfg.advantage)
            metrics |= rollout_metrics(rewards, prompts, out, scores, faults, cfg)
            write_jsonl(cfg, run, "samples.jsonl", [
                {"step": step, "question": asked[i]["question"], "reference": asked[i]["answer"],
                 "answer": answers[i], "reward": rewards[i], "cut": bool(out["cut_B"][i])} for i in range(2)])
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
        say((SFT if supervised else GRPO).format(total=total, thousands=thousands, **metrics))
        note_skipped(step, norms, cfg, run)
        finish(step, state, metrics, cfg, run)
    settle(cfg, run)
    for name in run.unwritten:  # there may be room by now
        write_jsonl(cfg, run, name, [])
    if total:
        write_final(cfg, run, state["params"])
    send_rest(cfg)
    if host == 0:
        report(cfg, time.time() - began)

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
        settle(cfg, run)
        last = f"{cfg.out}/step_{run.done:06}" if run.done else "none"
        warn(f"{run.skipped} updates in a row, up to step {step}, were skipped, as a loss or gradient is not "
             f"finite; the last checkpoint: {last}; look at the rewards, try a smaller --lr, --dtype float32")
        raise SystemExit(1)

def finish(step, state, metrics, cfg, run):
    """End a step: evaluate, write down, save. What a signal cuts short here is done first on resume."""
    run.latest = step, state, metrics
    pause(run)
    if is_evaluated(step, cfg, run):
        metrics = metrics | evaluate(state["params"], step, cfg, run)
    write_jsonl(cfg, run, "metrics.jsonl", [metrics])
    run.latest = step, state, None
    if run.wandb:
        run.wandb.log(metrics, step=step)
    if step == cfg.sft_steps + cfg.steps or cfg.save_every and step % cfg.save_every == 0:
        save(step, state, cfg, run)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    open_streams()
    try:
        main(sys.argv[1:])
    except BaseException as e:  # at an orderly exit JAX would wait for the others, which wait for this one
        code = e.code if isinstance(e, SystemExit) else 1
        if not jax.distributed.is_initialized() or code == 0:
            raise
        if code == 1:
            traceback.print_exc()
        sys.stdout.flush()
        time.sleep(3 * (jax.process_index() == 0))  # last, since the others abort when it is gone
        os._exit(code)
