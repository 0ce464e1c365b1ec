"""Runs from start to end, cut short and resumed: what comes out is the calm run, bit for bit.

Other files take from here how to start runs, disturb and compare them.
"""

import contextlib
import fcntl
import glob
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import (
    ROOT,
    TINY_FLAGS,
    arguments,
    generate,
    load,
    read_jsonl,
    restored_signals,
    run_train,
    without_times,
)
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file

from infra import cluster, data

# A supervised phase, then advantages, clipping, a reference; a checkpoint every other step.
LIFE_FLAGS = (
    "--system= --max_prompt 32 --max_answer 16 --lr 1e-4 --sft_lr 1e-3 --npq 4 --sft_steps 3 "
    "--minibatches 2 --eval_n 8 --eval_every 3 --beta 0.1 --entropy_bonus 0.01 --save_every 2"
)


# ---------------------------------------------------------------- runs, also for other files
def made_once(tmp_path_factory, name, make):
    """A directory that make(directory) fills for the first test that asks, in any process."""
    top = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        top = top.parent  # which the processes share
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
    """Sums of digits, and a model that answers in their form and sometimes right."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [
        {"question": f"What is {a} + {b}?", "answer": f"<answer>{a + b}</answer>"} for a, b in pairs
    ]
    sums = directory / "sums.jsonl"
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--steps 0 --sft_steps 30 --batch 4 --npq 4 --minibatches 1 --warmup 2 --max_answer 16"
    run_train(flags, "--data", sums, "--out", directory / "run")


def taught(tmp_path_factory):
    """The flags of sums, and of a model whose answers to one of them differ in reward."""
    directory = made_once(tmp_path_factory, "taught", teach)
    sums = directory / "sums.jsonl"
    return arguments(["--model", directory / "run/final", "--data", sums, "--eval_data", sums])


def lives(tmp_path_factory, steps, *others):
    """The flags of a run to disturb: so many steps after the supervised ones."""
    return [*taught(tmp_path_factory), *arguments([LIFE_FLAGS, "--steps", steps, *others])]


@contextlib.contextmanager
def running(out, flags, processes=1, devices=4, batch=4, log=None, more=()):
    """The processes of a run, with so many devices and questions a step in all; what they print is
    in `log`, or in a file beside `out`. more: flags that come last, and so count."""
    port = 20000 + os.getpid() * 8 % 9000
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices // processes),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, str(ROOT / "train.py"), *flags]
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
    """-> what a run prints whose processes must all end with this exit code"""
    with running(out, flags, processes, **how) as runs:
        codes = [process.wait(1200) for process in runs]
    text = Path(f"{out}.log").read_text(errors="replace")
    assert codes == [code] * processes, (codes, text)
    return text


def until(moment, runs=(), seconds=1200):
    """Wait until moment() or the end of a process -> are they still there?"""
    end = time.time() + seconds
    while not moment() and all(process.poll() is None for process in runs):
        assert time.time() < end, f"not within {seconds} s"
        time.sleep(0.002)
    return all(process.poll() is None for process in runs)


def calm_run(tmp_path_factory):
    """`out` of an undisturbed run of 9 steps. Not to be changed."""

    def make(directory):
        run_to_end(directory / "run", lives(tmp_path_factory, 9))

    return made_once(tmp_path_factory, "calm", make) / "run"


def same_run(out, calm):
    """Metrics and final weights, bit for bit; metrics and samples of every step, once."""
    rows = read_jsonl(out / "metrics.jsonl")
    wanted = read_jsonl(calm / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, len(wanted) + 1)]
    assert without_times(rows) == without_times(wanted)
    weights = load_file(out / "final/model.safetensors")
    jax.tree.map(assert_array_equal, weights, load_file(calm / "final/model.safetensors"))
    samples = read_jsonl(out / "samples.jsonl")
    assert len(samples) == len(read_jsonl(calm / "samples.jsonl")), "samples lost or repeated"


# ---------------------------------------------------------------- one short run with one resume
# People chart them.
METRICS = """
    step reward/mean reward/std reward/correct reward/formatted solved
    len/prompt len/answer len/answer_max truncated group/zero_variance
    loss kl entropy clip_fraction ratio/max logprob_gap/mean logprob_gap/max grad_norm lr
    valid_tokens padding_fraction micro_batch mfu
    time/rollout_s time/reward_s time/update_s time/step_s time/train/step_avg_last10_s
    throughput/train/valid_tokens_per_s rollout/tokens_per_s eval/solved
    memory/train/bytes_in_use_max_gib memory/train/peak_bytes_in_use_max_gib
"""


def forget(out, kept):
    """Leave `out` as if its three steps had been killed after `kept`, as it wrote a line."""
    for name in ["final", *(f"step_{n:06}" for n in range(kept + 1, 4))]:
        shutil.rmtree(out / name)
    with open(out / "samples.jsonl", "ab") as f:
        f.write(b'{"step": 1, "answer": "\xe4\xb8')  # half a character, too


def test_a_run_from_start_to_end_and_its_resume(tmp_path):
    out = tmp_path / "run"
    # The bonus moves the weights also where all answers score the same.
    flags = [TINY_FLAGS, "--save_every 1 --keep 9 --beta 0.1 --entropy_bonus 1 --out", out]
    text = run_train(*flags, "--mesh 2,2,2", devices=8)
    for wanted in (
        "sft 1/3 | nll",
        "step 3/3 | reward",
        "held-out questions solved",
        f"{out}/final",
    ):
        assert wanted in text, text
    # An update of demonstrations and of rollouts; sampled and greedy decoding; none of them twice.
    traced = {what: text.count(f"tracing {what}") for what in ("accumulate", "score", "decode")}
    assert traced == {"accumulate": 2, "score": 1, "decode": 2}, text
    whole = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert all("eval/solved" in row for row in whole)
    assert not set(METRICS.split()) - whole[-1].keys(), whole[-1]
    assert whole[-1]["logprob_gap/max"] < 1e-4, "sampler and trainer disagree"
    assert whole[-1]["ratio/max"] > 1 + 1e-4, "a step's second update is compared with itself"
    final = load_file(out / "final/model.safetensors")
    assert "is finished" in run_train(*flags, devices=8)

    forget(out, kept=1)
    text = run_train(*flags, "--mesh 2,2,2", devices=8)
    assert f"resuming {out} after step 1" in text, text
    assert without_times(read_jsonl(out / "metrics.jsonl")) == without_times(whole)
    jax.tree.map(assert_array_equal, load_file(out / "final/model.safetensors"), final)


@pytest.mark.slow
def test_a_run_without_checkpoints_starts_anew(tmp_path, tmp_path_factory):
    """What it wrote before comes again, once."""
    calm = calm_run(tmp_path_factory)
    out = tmp_path / "run"
    shutil.copytree(calm, out)
    for path in [out / "final", *out.glob("step_*")]:
        shutil.rmtree(path)
    with open(out / "samples.jsonl", "ab") as f:
        f.write(b'{"step": 1, "answer": "\xe4\xb8')  # half a line, half a character
    text = run_to_end(out, lives(tmp_path_factory, 9))
    assert "resuming" not in text, text
    same_run(out, calm)


# ---------------------------------------------------------------- kills
def terminate(runs, log):
    """SIGTERM to all -> the seconds until all have ended, as a preempted run does."""
    began = time.time()
    for process in runs:
        process.terminate()
    codes = [process.wait(60) for process in runs]
    took = time.time() - began
    assert codes == [143] * len(runs) and took < 30, (codes, took)  # as long as a spot VM has
    text = log.read_text(errors="replace")
    assert "ended by SIGTERM: step " in text and "Traceback" not in text, text
    return took


def kill(victim, runs, log):
    """SIGKILL to one, which must bring down the others."""
    victim.kill()
    began = time.time()
    codes = [process.wait(120) for process in runs]
    assert all(codes) and time.time() - began < 60, (codes, log.read_text(errors="replace"))


def saving(out):
    """Files that are being written, or were when a process was killed."""
    # glob.glob: Path.glob fails where the run deletes an old checkpoint meanwhile.
    return glob.glob(f"{out}/step_*/*.tmp")


def saves(out, processes):
    """-> (names of complete checkpoints, {name: when it was written to} of those that are torn)"""
    complete = []
    torn = {}
    for directory in map(Path, glob.glob(f"{out}/step_*")):
        with contextlib.suppress(FileNotFoundError):  # the run deletes it
            names = os.listdir(directory)
            whole = [name for name in names if name.endswith(f"-of-{processes:05}.safetensors")]
            if len(whole) == processes:
                complete.append(directory.name)
            if len(whole) < processes or len(names) > len(whole):
                torn[directory.name] = directory.stat().st_mtime
    return complete, torn


def torn_save(out, processes, since):
    """ "first save" or "later save" if one is under way, or was torn, since that time; else ""."""
    complete, torn = saves(out, processes)
    if max(torn.values(), default=0) < since:
        return ""
    return "later save" if complete else "first save"


def live(out, flags, processes, rng, aim, ended):
    """One life, which ends by SIGTERM after some steps, by SIGKILL between them, or by SIGKILL in a
    save, which `aim` says. Counts in `ended` what it came to be, by the files that are left."""
    log = Path(f"{out}.log")
    began = time.time()
    steps = rng.integers(1, 4)

    def has_done_them():
        return len(re.findall(r"\| gnorm", log.read_text(errors="replace"))) >= steps

    def is_in_that_save():
        missed = aim == "first save" and saves(out, processes)[0]
        return missed or torn_save(out, processes, began) == aim

    with running(out, flags, processes) as runs:
        moment = is_in_that_save if "save" in aim else has_done_them
        assert until(moment, runs), f"it ended after {ended}: {log.read_text()}"
        if aim == "SIGTERM":
            ended[f"SIGTERM ({terminate(runs, log):.1f} s)"] += 1
            return
        # Some way into what it does: a save takes some milliseconds.
        time.sleep(rng.uniform(0, 0.003 if "save" in aim else 0.3))
        kill(runs[rng.integers(processes)], runs, log)
    end = torn_save(out, processes, began) or "between saves"
    ended[end] += 1
    if aim == "first save" and end != aim:
        # It was complete already, and a run has only one first save.
        shutil.rmtree(out)


def check_kills(directory, flags_of_steps, kills, in_saves, processes, record_property):
    """A run that is ended by SIGTERM, and killed so often, is the undisturbed one. At least
    `in_saves` kills are in the first save, and as many in later ones. -> its `out`"""
    flags = flags_of_steps(6 * (kills + 4))  # enough for as many lives
    calm = directory / "calm"
    out = directory / "killed"
    run_to_end(calm, flags, processes)
    rollouts = [row for row in read_jsonl(calm / "metrics.jsonl") if "group/zero_variance" in row]
    learning = [row for row in rollouts if row["group/zero_variance"] < 1]
    assert len(learning) > 2 * kills, "no group's answers differ in reward: advantages are 0"
    rng = np.random.default_rng(0)
    ended = Counter()

    def aim():
        for save in ("first save", "later save"):
            if ended[save] < in_saves:
                return save
        has_had_one = any("SIGTERM" in end for end in ended)
        return "any time" if has_had_one else "SIGTERM"

    while ended.total() <= kills or "save" in aim():
        live(out, flags, processes, rng, aim(), ended)
    run_to_end(out, flags, processes)
    same_run(out, calm)
    ends = ", ".join(f"{n} {kind}" for kind, n in ended.items())
    record_property(f"{processes} processes, ended", ends)
    return out


def check_transformers(final, prompts):
    """transformers loads the directory, and its greedy answers are ours."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    params, cfg = load(final)
    ours = generate(params, cfg, ids, 24, temperature=0)
    for i, prompt in enumerate(ids):
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
        length = ours["lengths_B"][i]
        assert answer[len(prompt) :].tolist() == ours["tokens_BT"][i, :length].tolist()


@pytest.mark.slow
def test_a_killed_run_is_the_undisturbed_one(tmp_path, tmp_path_factory, record_property):
    """And its final model is one that transformers loads."""

    def flags(steps):
        return lives(tmp_path_factory, steps)

    out = check_kills(tmp_path, flags, 3, 1, 1, record_property)
    prompts = [data.chat("", row["question"]) for row in data.arith(True)[:8]]
    check_transformers(out / "final", prompts)


@pytest.mark.slow
def test_a_killed_process_brings_all_down_and_they_resume(
    tmp_path, tmp_path_factory, record_property
):
    def flags(steps):
        # All but process 0 compile in each life anew, so as little as may be.
        return lives(tmp_path_factory, steps, "--sft_steps 0 --minibatches 1 --eval_data none")

    check_kills(tmp_path, flags, 2, 1, 2, record_property)


@pytest.mark.soak
@pytest.mark.parametrize("processes, kills", [(1, 40), (4, 20)])
def test_many_kills(processes, kills, tmp_path, tmp_path_factory, record_property):
    def flags(steps):
        return lives(tmp_path_factory, steps)

    check_kills(tmp_path, flags, kills, 10, processes, record_property)


def test_the_notice_of_a_preemption_ends_the_run(monkeypatch):
    """As Google's metadata server gives it: at first no answer, then FALSE, then TRUE."""
    asked = []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(503 if len(asked) == 1 else 200)
            self.end_headers()
            self.wfile.write(b"TRUE" if len(asked) > 2 else b"FALSE")

        def log_message(self, *_):
            pass

    run = SimpleNamespace(signal=0)
    monkeypatch.setattr(cluster, "PATIENCE", 0.1)
    with restored_signals(), http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        cluster.watch_signals(run)
        until(lambda: run.signal, seconds=60)
        server.shutdown()
        assert run.signal == signal.SIGTERM
        with pytest.raises(cluster.Stop):
            cluster.check_for_stop(run)
    assert set(asked) == {("/computeMetadata/v1/instance/preempted?wait_for_change=true", "Google")}


# ---------------------------------------------------------------- long runs
def watch(process, log):
    """Until it ends -> {step: MiB of memory}, {n: the step in which the nth program was traced}"""
    used = {}
    traced = {}
    while process.poll() is None:
        text = log.read_text()
        step = text.count(" | reward ")
        for n in range(len(traced), text.count("tracing")):
            traced[n] = step
        with contextlib.suppress(OSError, IndexError):
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            used[step] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        time.sleep(0.05)
    return used, traced


def check_soak(out, steps, growth, record_property):
    """From the second quarter to the last, memory stays; nothing is traced after 100 steps."""
    flags = "--sft_steps 0 --minibatches 1 --npq 4 --eval_data none --save_every 50"
    log = Path(f"{out}.log")
    with running(out, arguments([flags, "--max_answer 16 --steps", steps])) as (process,):
        used, traced = watch(process, log)
    assert process.returncode == 0, log.read_text()
    if not used:
        pytest.skip("needs /proc")

    def mean_of_quarter(n):
        first = n * steps / 4
        return np.mean([mib for step, mib in used.items() if first <= step < first + steps / 4])

    second = mean_of_quarter(1)
    last = mean_of_quarter(3)
    assert abs(last / second - 1) < growth, (second, last)
    assert max(traced.values()) < 100, traced
    record_property("MiB in the second and the last quarter", f"{second:.0f} {last:.0f}")
    record_property("traces", f"{len(traced)}, the last in step {max(traced.values()) + 1}")


@pytest.mark.slow
def test_memory_stays_flat_over_200_steps(tmp_path, record_property):
    check_soak(tmp_path / "run", 200, 0.05, record_property)  # malloc still warms up


@pytest.mark.soak
def test_memory_stays_flat_over_2000_steps(tmp_path, record_property):
    check_soak(tmp_path / "run", 2000, 0.02, record_property)


@pytest.mark.slow
def test_the_embedded_default_learns(tmp_path, record_property):
    """As committed: at most 45% after the supervised phase, at least 90% at the end."""
    # It computes much, so that here XLA's optimisation is worth its time.
    text = run_train("--out", tmp_path / "run", XLA_FLAGS="")
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    scores = [row["eval/solved"] for row in rows if "eval/solved" in row]
    assert scores[0] <= 0.45 and scores[-1] >= 0.90, scores
    record_property("tells", re.search(r"held-out questions solved.*", text)[0])
