"""Shared by all tests: the environment, one compilation cache per session, small models with random
weights, and ways to run train.py as a user would."""
# ruff: noqa: E402, the environment is set before JAX is imported

import contextlib
import dataclasses
import fcntl
import glob
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from unittest import mock

# With libtpu installed, JAX would look for a TPU. On TPUs, `launch.sh TYPE test` overrides this.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# All tests share one compilation cache, across pytest processes and with runs of train.py.
# pytest's first process creates the directory, passes it on, and removes it at the end.
MADE_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if MADE_CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="podgrpo-compiled-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Import test_kernel before JAX, as it sets JAX's environment: eight CPU devices, float32 products,
# little optimisation.
from test_kernel import (  # noqa: F401, I001
    mesh,
    pytest_report_header,
    pytest_terminal_summary,
    relative,
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file, save_file

import model
import train
from infra.data import hf, questions
from infra.data.tiny import arith, make_tiny
from infra.host import console
from infra.rollout import engine, layouts
from infra.rollout.sampling import Sampling
from infra.rollout.waves import Rows
from infra.update import attention

ROOT = Path(__file__).resolve().parent.parent
# Messages printed during tests name train.py as their program, as in a run.
console.PROGRAM = "train.py"


# ---------------------------------------------------------------- pytest
LONGEST = {
    "test_the_embedded_default_learns",
    "test_commands_of_this_machine_work_one_after_another",
    "test_a_killed_process_brings_all_down_and_they_resume",
    "test_a_plan_of_gpus_is_what_the_compiler_says",
    "test_update_keeps_the_input_of_each_layer_and_no_logits",
}


def pytest_collection_modifyitems(items):
    # Begin with the longest tests: otherwise one of the two processes may run a long test at the
    # end, while the other has nothing left to do.
    items.sort(key=lambda item: item.originalname not in LONGEST)


TESTS_RUN = itertools.count()


def pytest_runtest_teardown():
    # Linux allows a process 65,530 memory mappings, and the programs of all tests need more. Drop
    # the compiled programs when half of the mappings are in use. The list of mappings is long, so
    # read it only after every tenth test.
    mappings = Path("/proc/self/maps")
    is_due = next(TESTS_RUN) % 10 == 0 and mappings.exists()
    if is_due and mappings.read_text().count("\n") > 65530 // 2:
        jax.clear_caches()


def pytest_unconfigure():
    if MADE_CACHE:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


# ---------------------------------------------------------------- files
def shared(path):
    """A file of real data, which developers have beside the checkout. Skips the test if absent."""
    found = ROOT.parent / "shared" / path
    if not found.exists():
        pytest.skip(f"../shared/{path} is not here")
    return found


def read_jsonl(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def edit(path, change):
    """Change a file: a dict replaces keys or tensors (the value None removes one), bytes replace
    the content, and None removes the file."""
    if change is None:
        path.unlink()
    elif isinstance(change, bytes):
        path.write_bytes(change)
    else:
        is_tensors = path.suffix == ".safetensors"
        content = load_file(path) if is_tensors else json.loads(path.read_text())
        content = {key: value for key, value in (content | change).items() if value is not None}
        if is_tensors:
            save_file(content, path)
        else:
            path.write_text(json.dumps(content))


def spoiled_copy(directory, copy, name, change):
    """Copy a directory, and edit the file `name` in the copy."""
    shutil.copytree(directory, copy, dirs_exist_ok=True)
    edit(copy / name, change)
    return copy


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """The tiny model with its tokenizer, as a Hugging Face directory. Tests must not change it."""
    return Path(make_tiny(tmp_path_factory.mktemp("tiny") / "model", 1))


def chatml(system, question):
    """The prompt of the tiny model; with a system prompt, also of Qwen2.5."""
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    return turns + "<|im_start|>assistant\n"


# ---------------------------------------------------------------- numbers
def check_errors(errors, bound, record_property, what="largest error"):
    """Assert that all errors, {case: error or errors}, are below the bound. Record the largest."""
    worst = np.max([np.max(error) for error in errors.values()])  # NaN if any error is NaN
    assert worst < bound, errors
    record_property(what, f"{worst:.1e}")


# ---------------------------------------------------------------- small models
# Tied and untied embeddings, grouped and ungrouped queries, and sizes that are not powers of two.
TIED = model.ModelConfig(
    V=203,
    D=32,
    F=48,
    N=8,
    K=2,
    H=6,
    L=3,
    rope_theta=1e4,
    rms_eps=1e-6,
    tied=True,
    max_positions=512,
    stop_ids=(3, 50, 77),
)
UNTIED = model.ModelConfig(
    V=331,
    D=48,
    F=32,
    N=4,
    K=4,
    H=8,
    L=2,
    rope_theta=5e3,
    rms_eps=1e-5,
    tied=False,
    max_positions=512,
    stop_ids=(),
)
QWEN3 = dataclasses.replace(TIED, qkv_bias=False, qk_norm=True)
LLAMA = dataclasses.replace(UNTIED, qkv_bias=False)
SMALL = dataclasses.replace(TIED, V=40, D=16, F=16, N=4, H=4, L=2)


def random_weight(rng, name, shape, D):
    """Random values of one parameter. Biases are not 0 and norms are not 1, so that tests notice if
    one is left out. Logits have a standard deviation of about 2."""
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 1 + 0.3 * noise
    if "bias" in name or "/b" in name:
        return 0.5 * noise
    return 2 * D**-0.5 * noise


def random_weights(cfg, seed=0):
    """Returns {flat name: float32 NumPy array} for all parameters."""
    rng = np.random.default_rng(seed)
    return {
        name: random_weight(rng, name, shape, cfg.D) for name, shape in model.shapes(cfg).items()
    }


def place(weights, on):
    """Returns flat NumPy weights as nested parameters, sharded over a mesh."""
    placed = {k: jax.device_put(w, NamedSharding(on, model.spec(k))) for k, w in weights.items()}
    return model.nest(placed)


def random_params(cfg, on):
    return place(random_weights(cfg), on)


def random_prompts(cfg, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, cfg.V, n).tolist() for n in lengths]


def load(directory, on=None):
    """Returns (the parameters of a Hugging Face directory, its ModelConfig)."""
    cfg = hf.read_config(directory)
    return hf.load(hf.ModelFiles(directory, cfg), on or mesh()), cfg


@cache
def compiled_forward(cfg, on, options):
    return jax.jit(lambda params, rows: model.forward(params, cfg, on, rows, options))


def hidden_states(
    params, cfg, rows, positions=None, segments=None, width=None, on=None, dtype="float32"
):
    """model.forward of lists of ids, padded on the right. Without `segments`, each list is one
    sequence."""
    width = width or max(len(row) for row in rows)
    positions = positions or [range(len(row)) for row in rows]
    segments = segments or [[1] * len(row) for row in rows]
    padded = {}
    for name, lists in dict(tokens=rows, positions=positions, segments=segments).items():
        padded[name] = np.zeros((len(rows), width), np.int32)
        for i, values in enumerate(lists):
            padded[name][i, : len(values)] = values
    options = model.ForwardOptions(dtype, attention.blockwise)
    return compiled_forward(cfg, on or mesh(), options)(params, padded)


def logits(params, cfg, tokens, on=None, dtype="float32"):
    """Logits [B, T, V] of the training forward."""
    hidden_BTD = hidden_states(params, cfg, tokens, on=on, dtype=dtype)
    return np.asarray(hidden_BTD @ model.head(params).T)


compiled_run_token = jax.jit(engine.run_token, static_argnames=("model_cfg", "layout"))


def cached_logits(params, cfg, tokens, on, kind, prompt=9):
    """Logits [B, T - prompt + 1, V] of the cached forward: a prefill, then token by token."""
    tokens_BT = np.array(tokens, np.int32)
    B, T = tokens_BT.shape
    size = layouts.RolloutSize(B, 1, prompt, T - prompt)
    layout, _ = layouts.rollout_layout(kind, cfg, on, "float32", size)
    weights = layouts.to_rollout(params, layout, "float32")
    sizes = dict(B=B, n_prompts=B, width=prompt, slots=T - prompt)
    state = layouts.empty_state(**sizes, cfg=cfg, layout=layout, dtype="float32")

    def rows(a):
        return layouts.shard_rows(np.ascontiguousarray(a), layout)

    static = dict(model_cfg=cfg, layout=layout)
    lengths = rows(np.full(B, prompt, np.int32))
    prompts = rows(tokens_BT[:, :prompt])
    state = engine.prefill(weights, state, prompts, lengths, 0, group=1, **static)
    hidden = [np.asarray(state.hidden_BD)]
    of_rows = Rows(lengths, lengths, lengths)
    for t in range(T - prompt):
        new = rows(tokens_BT[:, prompt + t])
        state = compiled_run_token(weights, state, of_rows, new, t, **static)
        hidden.append(np.asarray(state.hidden_BD))
    return np.stack(hidden, 1) @ np.asarray(model.head(params)).T


def textbook_hidden(params, cfg, tokens, positions, segments):
    """model.forward as a plain loop over unsharded layers, which JAX differentiates."""
    x_BTD = params["embed_VD"][tokens]
    rope = model.rope_tables(jnp.asarray(positions), cfg)
    causal = np.tri(tokens.shape[1], dtype=bool)
    mask = (segments[:, :, None] == segments[:, None]) & causal
    for i in range(cfg.L):
        w = {name: a[i] for name, a in params["layers"].items()}
        x_BTD, _ = model.layer(
            cfg, x_BTD, w, rope, lambda q, k, v: (model.attention(q, k, v, mask), None)
        )
    return model.rms_norm(x_BTD, params["norm_D"], cfg.rms_eps)


def generate(
    params,
    cfg,
    prompts,
    max_answer,
    on=None,
    kind="replicated",
    seed=0,
    sampling=None,
    by_layer=False,
    group=1,
    at_once=None,
    stage=128,
    **options,
):
    """Engine.generate in float32, after resharding the weights to the rollout layout `kind`.

    by_layer: each layer has arrays of its own, as on GPUs. at_once: rows that a device decodes
    together, else all. stage: tokens per call of `decode`."""
    size = layouts.RolloutSize(len(prompts), group, 8, max_answer)
    layout, _ = layouts.rollout_layout(kind, cfg, on or mesh(), "float32", size)
    layout = dataclasses.replace(layout, by_layer=by_layer)
    weights = layouts.to_rollout(params, layout, "float32")
    for name, a in model.flatten(weights).items():
        wanted = NamedSharding(layout.mesh, layouts.rollout_spec(name, layout))
        assert a.sharding.is_equivalent_to(wanted, a.ndim), (kind, name, a.sharding)
    at_once = {group: at_once} if at_once else {}
    sampler = engine.Engine(cfg, None, layout, "float32", "float32", max_answer, at_once, weights)
    with mock.patch.object(engine, "STAGE_ON_CPU", stage):
        key = jax.random.key(seed)
        return sampler.generate(prompts, key, sampling or Sampling(), group, **options)


def greedy_answers(theirs, prompts, n, **stop):
    """Returns the greedy answers of transformers, whose prompts are padded on the left."""
    torch = pytest.importorskip("torch")
    width = max(map(len, prompts))
    tokens = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):
        tokens[i, -len(prompt) :] = torch.tensor(prompt)
        mask[i, -len(prompt) :] = 1
    options = dict(do_sample=False, max_new_tokens=n, pad_token_id=0)
    answers = theirs.generate(tokens, attention_mask=mask, **options, **stop)
    return answers[:, width:].tolist()


# ---------------------------------------------------------------- train.py as a process
# A run of the tiny model: one supervised step and two GRPO steps, with an evaluation after each.
TINY_FLAGS = "--batch 4 --npq 4 --steps 2 --sft_steps 1 --minibatches 2 --eval_n 8 --eval_every 1"


def arguments(flags):
    """Returns a list of words: strings are split at blanks, lists and paths are not."""
    words = []
    for flag in flags:
        if isinstance(flag, str):
            words += flag.split()
        elif isinstance(flag, list):
            words += flag
        else:
            words.append(str(flag))
    return words


def run(*command, code=0, cwd=ROOT, **env):
    """Returns the output of a process on the CPU, which must end with the exit code `code`."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | env
    done = subprocess.run(
        [str(word) for word in command],
        env=env,
        cwd=cwd,
        timeout=1200,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    text = done.stdout + done.stderr
    assert done.returncode == code, f"exit code {done.returncode}, wanted {code}:\n{text}"
    return text


# The beginning of a command. The path of train.py and its flags must follow.
IMPATIENT = sys.executable, ROOT / "tests/impatient.py"


def run_train(*flags, devices=1, code=0, **env):
    """Returns the output of `python train.py FLAGS` on `devices` CPU devices. To save time, arith
    has only 1,000 questions to train on (see tests/impatient.py)."""
    command = [*IMPATIENT, ROOT / "train.py", *arguments(flags)]
    return run(*command, code=code, JAX_NUM_CPU_DEVICES=str(devices), **env)


@cache
def few_questions(held_out):
    """Some of arith's questions: encoding 20,000 takes seconds."""
    return arith(held_out)[:99]


def refused(*flags):
    """Run train.py in this process. Returns the message with which it refuses its flags before it
    loads weights."""
    held = len(jax.live_arrays())
    with (
        mock.patch.object(hf, "load", side_effect=AssertionError("weights were loaded")),
        mock.patch.object(questions, "arith", few_questions),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as refusal,
    ):
        train.main(arguments(flags))
    text = err.getvalue().strip()
    assert refusal.value.code == 2, (flags, text)
    assert text and text.count("\n") <= 1 and "Traceback" not in text, (flags, text)
    assert len(jax.live_arrays()) <= held, f"{flags}: device memory was taken"
    return text


@contextlib.contextmanager
def restored_signals():
    """Restore the handlers of these signals, which train.main replaces in this process."""
    taken = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    before = {number: signal.getsignal(number) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def train_here(tmp_path, monkeypatch):
    """Returns train.main, to run in this process and an empty directory. Its signal handlers are
    undone at the end."""
    monkeypatch.chdir(tmp_path)
    # One device and few questions save time.
    monkeypatch.setattr(train, "make_mesh", lambda *_: mesh())
    monkeypatch.setattr(questions, "arith", few_questions)
    with restored_signals():
        yield lambda *flags: train.main(arguments(flags))


def step_rows(rows):
    """The rows of metrics.jsonl that belong to steps, not to evaluations."""
    return [row for row in rows if "eval/solved" not in row]


def evaluations(rows):
    """The evaluations in metrics.jsonl, [(step, fraction solved)]. Asserts at most one per step."""
    found = [(row["step"], row["eval/solved"]) for row in rows if "eval/solved" in row]
    steps = [step for step, _ in found]
    assert steps == sorted(set(steps)), f"evaluations repeated: {steps}"
    return found


def without_times(rows):
    """The metrics of steps, without those that depend on a clock or on the machine's memory."""
    timed = ("time/", "throughput/", "rollout/", "memory/", "mfu")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


# ---------------------------------------------------------------- runs to disturb
# A supervised phase, then GRPO with clipping and a reference; a checkpoint every other step.
LIFE_FLAGS = (
    "--system= --max_prompt 32 --max_answer 16 --lr 1e-4 --sft_lr 1e-3 --npq 4 --sft_steps 3 "
    "--minibatches 2 --eval_n 8 --eval_every 3 --beta 0.1 --entropy_bonus 0.01 --save_every 2"
)


def shared_temp(tmp_path_factory):
    """The temporary directory that all processes of a test run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(tmp_path_factory, name, make):
    """A directory that make(directory) fills once, for the first test that asks in any process."""
    top = shared_temp(tmp_path_factory)
    directory = top / name
    with open(top / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            unfinished = top / f"{name}.unfinished"
            unfinished.mkdir(exist_ok=True)
            make(unfinished)
            unfinished.rename(directory)
    return directory


def teach(directory):
    """Write sums of digits, and train a model that answers in their form and is sometimes right."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [
        {"question": f"What is {a} + {b}?", "answer": f"<answer>{a + b}</answer>"} for a, b in pairs
    ]
    sums = directory / "sums.jsonl"
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--steps 0 --sft_steps 30 --batch 4 --npq 4 --minibatches 1 --warmup 2 --max_answer 16"
    run_train(flags, "--data", sums, "--out", directory / "run")


def taught(tmp_path_factory):
    """Flags for a data set of sums, and for a model whose answers to one sum differ in reward."""
    directory = made_once(tmp_path_factory, "taught", teach)
    sums = directory / "sums.jsonl"
    return arguments(["--model", directory / "run/final", "--data", sums, "--eval_data", sums])


def lives(tmp_path_factory, steps, *others):
    """Flags for a run to disturb, with `steps` GRPO steps after the supervised ones."""
    return [*taught(tmp_path_factory), *arguments([LIFE_FLAGS, "--steps", steps, *others])]


@contextlib.contextmanager
def running(out, flags, processes=1, devices=4, batch=4, log=None, more=()):
    """Yields the processes of a run; `devices`, and `batch` questions per step, are totals over all
    processes. Their output goes to `log`, or to a file beside `out`. more: flags that come last,
    and so override others."""
    port = 20000 + os.getpid() * 8 % 9000
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices // processes),
        "PYTHONUNBUFFERED": "1",
    }
    command = [*IMPATIENT, str(ROOT / "train.py"), *flags]
    command += arguments(["--out", out, "--batch", batch // processes])
    if processes > 1:
        command += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}"]
    runs = []
    try:
        with open(log or f"{out}.log", "w") as f:
            for i in range(processes):
                own = [f"--process_id={i}"] if processes > 1 else []
                runs.append(subprocess.Popen([*command, *own, *more], env=env, stdout=f, stderr=f))
        yield runs
    finally:
        for process in runs:
            process.kill()
            process.wait()


def run_to_end(out, flags, processes=1, code=0, **how):
    """Returns what a run prints. All its processes must end with the exit code `code`."""
    with running(out, flags, processes, **how) as runs:
        codes = [process.wait(1200) for process in runs]
    text = Path(f"{out}.log").read_text(errors="replace")
    assert codes == [code] * processes, (codes, text)
    return text


def until(moment, runs=(), seconds=1200):
    """Wait until moment() is true or a process ends. Returns whether all processes still run."""
    end = time.time() + seconds
    while not moment() and all(process.poll() is None for process in runs):
        assert time.time() < end, f"not within {seconds} s"
        time.sleep(0.002)
    return all(process.poll() is None for process in runs)


def calm_run(tmp_path_factory):
    """`out` of an undisturbed run of 9 GRPO steps. Tests must not change it."""

    def make(directory):
        run_to_end(directory / "run", lives(tmp_path_factory, 9))

    return made_once(tmp_path_factory, "calm", make) / "run"


def same_weights(out, calm):
    """Assert that two runs have the same final weights, bit for bit."""
    weights = load_file(out / "final/model.safetensors")
    jax.tree.map(assert_array_equal, weights, load_file(calm / "final/model.safetensors"))


def same_run(out, calm):
    """Assert that two runs have the same metrics and final weights, bit for bit, and that no step,
    evaluation or sample is lost or repeated."""
    rows = read_jsonl(out / "metrics.jsonl")
    wanted = read_jsonl(calm / "metrics.jsonl")
    steps = [row["step"] for row in step_rows(rows)]
    assert steps == [*range(1, len(step_rows(wanted)) + 1)]
    assert evaluations(rows) == evaluations(wanted)
    assert without_times(rows) == without_times(wanted)
    same_weights(out, calm)
    samples = read_jsonl(out / "samples.jsonl")
    assert len(samples) == len(read_jsonl(calm / "samples.jsonl")), "samples lost or repeated"
    assert (
        (out / "evals.jsonl").exists() == (calm / "evals.jsonl").exists() == bool(evaluations(rows))
    )
    if evaluations(rows):
        assert read_jsonl(out / "evals.jsonl") == read_jsonl(calm / "evals.jsonl")


def saving(out):
    """Files that are being written, or were being written when a process was killed."""
    # Not Path.glob, which fails if the run deletes an old checkpoint meanwhile.
    return glob.glob(f"{out}/step_*/*.tmp")
