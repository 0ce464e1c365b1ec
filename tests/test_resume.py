"""A run that is cut short and resumed has the same results as an undisturbed run, bit for bit."""

import contextlib
import glob
import http.server
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import (
    ROOT,
    TINY_FLAGS,
    arguments,
    calm_run,
    chatml,
    evaluations,
    generate,
    lives,
    load,
    read_jsonl,
    restored_signals,
    run,
    run_to_end,
    run_train,
    running,
    same_run,
    step_rows,
    until,
    without_times,
)
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file

import train
from infra.data.reward_pool import RewardPool
from infra.data.tiny import arith
from infra.host import processes
from infra.host.processes import Stop, check_for_stop, leave, watch_signals
from infra.rollout import engine
from infra.rollout.sampling import Sampling
from infra.run import checkpoint
from infra.run.run import Run

# ---------------------------------------------------------------- one short run with one resume
# People chart these metrics, so their names stay.
METRICS = """
    step reward/mean reward/std reward/correct reward/formatted solved
    len/prompt len/answer len/answer_max truncated group/zero_variance
    loss kl entropy clip_fraction ratio/max logprob_gap/mean logprob_gap/max grad_norm lr
    valid_tokens trained_tokens padding_fraction micro_batch mfu
    time/rollout_s time/reward_s time/update_s time/step_s time/train/step_avg_last10_s
    throughput/train/valid_tokens_per_s rollout/tokens_per_s eval/solved
    memory/train/bytes_in_use_max_gib memory/train/peak_bytes_in_use_max_gib
"""


def forget(out, kept):
    """Change `out` as if the run had been killed after step `kept` of three: before it wrote the
    evaluation of that step, and in the middle of a line."""
    for name in ["final", *(f"step_{n:06}" for n in range(kept + 1, 4))]:
        shutil.rmtree(out / name)
    rows = read_jsonl(out / "metrics.jsonl")
    rows = [row for row in rows if row not in step_rows(rows) or row["step"] <= kept]
    rows = [row for row in rows if row in step_rows(rows) or row["step"] != kept]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(out / "samples.jsonl", "ab") as f:
        f.write(b'{"step": 1, "answer": "\xe4\xb8')  # the line ends within a character


def test_a_run_from_start_to_end_and_its_resume(tmp_path):
    out = tmp_path / "run"
    # The entropy bonus moves the weights even if all answers score the same.
    flags = [TINY_FLAGS, "--save_every 1 --keep 9 --beta 0.1 --entropy_bonus 1 --temperature 0.7"]
    flags += ["--out", out]
    text = run_train(*flags, "--mesh 2,2,2", devices=8)
    for wanted in (
        "sft 1/3 | nll",
        "step 3/3 | reward",
        "held-out questions solved",
        f"{out}/final",
    ):
        assert wanted in text, text
    # Gradients are traced for demonstrations and for rollouts, and decode is traced for sampling
    # and for greedy answers. Nothing is traced twice.
    programs = "gradients", "target_logprobs", "decode"
    traced = {what: text.count(f"tracing {what}") for what in programs}
    assert traced == {"gradients": 2, "target_logprobs": 1, "decode": 2}, text
    rows = read_jsonl(out / "metrics.jsonl")
    # The row of each step comes before the row of its evaluation.
    assert [row["step"] for row in rows] == [1, 1, 2, 2, 3, 3]
    assert [step for step, _ in evaluations(rows)] == [1, 2, 3]
    last, evaluation = rows[-2:]
    assert not set(METRICS.split()) - last.keys() - evaluation.keys(), last
    assert evaluation.keys() == {"step", "eval/solved", "eval/stderr"}
    assert last["logprob_gap/max"] < 1e-4, "sampler and trainer disagree"
    assert last["logprob_gap/max"] > 0, "the sampler is compared with itself"
    assert last["kl"] > 1e-6, "the second minibatch has no KL"
    assert last["ratio/max"] > 1 + 1e-4, "a step's second update is compared with itself"
    samples = read_jsonl(out / "samples.jsonl")
    assert len(samples) == 4, samples
    for row in samples:
        scores = [row["reward/correct"], row["reward/formatted"]]
        assert row["reward"] == pytest.approx(np.dot(scores, [w for _, w in train.REWARDS]))
        assert row["solved"] == row["reward/correct"]
    final = load_file(out / "final/model.safetensors")
    assert "is finished" in run_train(*flags, devices=8)

    forget(out, kept=1)
    text = run_train(*flags, "--mesh 2,2,2", devices=8)
    assert f"resuming {out} after step 1" in text, text
    assert without_times(read_jsonl(out / "metrics.jsonl")) == without_times(rows)
    assert read_jsonl(out / "samples.jsonl") == samples
    jax.tree.map(assert_array_equal, load_file(out / "final/model.safetensors"), final)


def test_grpo_starts_at_its_reference_and_its_epochs_count_alike(tmp_path, monkeypatch, train_here):
    """GRPO starts at its reference, and all epochs see the same policy: with a learning rate of 0,
    all ratios are 1 and the KL is 0."""
    update = mock.Mock(wraps=train.update)
    monkeypatch.setattr(train, "update", update)
    flags = "--sft_steps 2 --steps 1 --lr 0 --beta 1 --ppo_epochs 2 --minibatches 2"
    flags += " --batch 2 --npq 8 --eval_data none --save_every 0"
    train_here(flags, "--out run")
    assert update.call_count == 12
    *_, grpo = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert abs(grpo["ratio/mean"] - 1) < 1e-5
    assert abs(grpo["kl"]) < 1e-6


@pytest.mark.slow
def test_a_run_without_checkpoints_starts_anew(tmp_path, tmp_path_factory):
    """A run that has lost its checkpoints starts over, and replaces the lines that it wrote
    before."""
    calm = calm_run(tmp_path_factory)
    out = tmp_path / "run"
    shutil.copytree(calm, out)
    for path in [out / "final", *out.glob("step_*")]:
        shutil.rmtree(path)
    with open(out / "samples.jsonl", "ab") as f:
        f.write(b'{"step": 1, "answer": "\xe4\xb8')  # the line ends within a character
    text = run_to_end(out, lives(tmp_path_factory, 9))
    assert "resuming" not in text, text
    same_run(out, calm)


# ---------------------------------------------------------------- kills
def terminate(runs, log):
    """Send SIGTERM to one process, and check that all end as a preempted run does. Returns how many
    seconds that took."""
    began = time.time()
    runs[-1].terminate()
    codes = [process.wait(60) for process in runs]
    took = time.time() - began
    assert codes == [143] * len(runs) and took < 30, (codes, took)  # a spot VM has 30 s
    text = log.read_text(errors="replace")
    assert "ended by SIGTERM: step " in text and "Traceback" not in text, text
    return took


def kill(victim, runs, log):
    """Send SIGKILL to one process, and check that the others end too."""
    victim.kill()
    began = time.time()
    codes = [process.wait(120) for process in runs]
    assert all(codes) and time.time() - began < 60, (codes, log.read_text(errors="replace"))


def saves(out, processes):
    """Returns (names of complete checkpoints, {name of a torn checkpoint: time of its last
    write})."""
    complete = []
    torn = {}
    for directory in map(Path, glob.glob(f"{out}/step_*")):
        with contextlib.suppress(FileNotFoundError):  # the run may delete the directory
            names = os.listdir(directory)
            files = [name for name in names if name.endswith(f"-of-{processes:05}.safetensors")]
            if len(files) == processes:
                complete.append(directory.name)
            if len(files) < processes or len(names) > len(files):
                torn[directory.name] = directory.stat().st_mtime
    return complete, torn


def torn_save(out, processes, since):
    """Returns "first save" or "later save" if one was under way or torn since then, else ""."""
    complete, torn = saves(out, processes)
    if max(torn.values(), default=0) < since:
        return ""
    return "later save" if complete else "first save"


def live(out, flags, processes, rng, aim, ended):
    """Start the run and end it as `aim` says: by SIGTERM after some steps, by SIGKILL at any time,
    or by SIGKILL in a save. Counts in `ended` how it really ended, by the files that are left."""
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
        # Wait a little, to hit any point of a save, which takes some milliseconds, or of a step.
        time.sleep(rng.uniform(0, 0.003 if "save" in aim else 0.3))
        kill(runs[rng.integers(processes)], runs, log)
    end = torn_save(out, processes, began) or "between saves"
    ended[end] += 1
    if aim == "first save" and end != aim:
        # The kill missed the first save, and a run has only one. Start over.
        shutil.rmtree(out)


def check_kills(directory, flags_of_steps, kills, in_saves, processes, record_property):
    """Check that a run that gets one SIGTERM and at least `kills` kills equals the undisturbed run.

    At least `in_saves` kills are in the first save, and as many in later saves. Returns the run's
    directory.
    """
    flags = flags_of_steps(4 * (kills + 4))  # each start of the run may take a few steps
    calm = directory / "calm"
    out = directory / "killed"
    run_to_end(calm, flags, processes)
    rollouts = [row for row in read_jsonl(calm / "metrics.jsonl") if "group/zero_variance" in row]
    learning = [row for row in rollouts if row["group/zero_variance"] < 1]
    assert len(learning) > 2 * kills, "in too few steps, the answers of a group differ in reward"
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
    """Check that transformers loads the directory, and gives the same greedy answers as our
    code."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    params, cfg = load(final)
    ours = generate(params, cfg, ids, 24, sampling=Sampling(temperature=0.0))
    for i, prompt in enumerate(ids):
        answer = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
        length = ours["lengths_B"][i]
        assert answer[len(prompt) :].tolist() == ours["tokens_BT"][i, :length].tolist()


@pytest.mark.slow
def test_a_killed_run_is_the_undisturbed_one(tmp_path, tmp_path_factory, record_property):
    """A killed run ends like the undisturbed run, with a final model that transformers can load."""

    def flags(steps):
        return lives(tmp_path_factory, steps)

    out = check_kills(tmp_path, flags, 3, 1, 1, record_property)
    prompts = [chatml("", row["question"]) for row in arith(True)[:8]]
    check_transformers(out / "final", prompts)


@pytest.mark.slow
def test_a_killed_process_brings_all_down_and_they_resume(
    tmp_path, tmp_path_factory, record_property
):
    def flags(steps):
        return lives(tmp_path_factory, steps, "--sft_steps 0 --minibatches 1 --eval_data none")

    check_kills(tmp_path, flags, 2, 1, 2, record_property)


@pytest.mark.soak
@pytest.mark.parametrize("processes, kills", [(1, 40), (4, 20)])
def test_many_kills(processes, kills, tmp_path, tmp_path_factory, record_property):
    def flags(steps):
        return lives(tmp_path_factory, steps)

    check_kills(tmp_path, flags, kills, 10, processes, record_property)


def main_stopped_in_evaluation(number, flags):
    """Run train.main, and send a signal while it samples in an evaluation: SIGTERM in the first, or
    SIGUSR1, Slurm's warning of the time limit, in the second."""
    real_generate = engine.Engine.generate
    evaluations_begun = 0

    def generate_or_stop(self, prompts, key, sampling, group, *others):
        nonlocal evaluations_begun
        # Only an evaluation samples one answer per question.
        evaluations_begun += group == 1
        if evaluations_begun == number:
            signal.raise_signal([signal.SIGTERM, signal.SIGUSR1][number - 1])
        return real_generate(self, prompts, key, sampling, group, *others)

    patched = mock.patch.object(engine.Engine, "generate", generate_or_stop)
    with patched, pytest.raises(SystemExit) as end:
        train.main(flags)
    assert end.value.code == 143


@pytest.mark.slow
@pytest.mark.usefixtures("train_here")
def test_a_run_stopped_in_its_evaluation_makes_it_on_resume(tmp_path, tmp_path_factory):
    """A run on one device, stopped in an evaluation, makes the evaluation on resume, after the step
    of the checkpoint and only once, with the value of the undisturbed run."""
    # `out` is part of the flags. With the same name, all runs share their compiled programs.
    flags = [*lives(tmp_path_factory, 3), *arguments(["--batch 4 --out run"])]

    def enter(name):
        (tmp_path / name).mkdir()
        return contextlib.chdir(tmp_path / name)

    with enter("calm"):
        train.main(flags)
    evaluated = [step for step, _ in evaluations(read_jsonl(tmp_path / "calm/run/metrics.jsonl"))]
    assert evaluated == [3, 6]
    for number, step in enumerate(evaluated, 1):
        with enter(f"stopped in {step}"):
            main_stopped_in_evaluation(number, flags)
            last = read_jsonl("run/metrics.jsonl")[-1]
            assert last["step"] == step and "eval/solved" not in last
            train.main(flags)
        same_run(tmp_path / f"stopped in {step}" / "run", tmp_path / "calm/run")


def evaluated(monkeypatch, questions, faults):
    """Evaluate with two answers a round, which score 1 with SOLVED and with `correct`, and have
    these faults. Returns the calls of the run's methods."""
    out = {
        "tokens_BT": np.zeros((2, 3), int),
        "lengths_B": np.array([2, 3]),
        "truncated_B": np.array([False, False]),
    }
    monkeypatch.setattr(train, "sample_answers", lambda *_: (out, ["2", "2"]))
    rows = [{"question": "1 + 1?", "answer": "2"}] * questions
    reward_pool = mock.Mock(names=["correct", "formatted"], have_worked={"correct"})
    reward_pool.failed_rows = {"correct": {0}, "formatted": {0}}
    reward_pool.failed_reports = Counter()
    reward_pool.report = partial(RewardPool.report, reward_pool)
    reward_pool.score_answers.return_value = np.array([[1, 1, 0], [1, 1, 0]]), faults
    setup = SimpleNamespace(
        held_out={"sums": rows},
        engine=mock.Mock(texts=lambda out: ["2", "2"]),
        reward_pool=reward_pool,
    )
    run = mock.Mock()
    # One device, whatever the number of this process's devices.
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    train.evaluate(None, 1, train.Config(batch=2, npq=1), setup, run)
    return [call for call in run.method_calls if call[0] != "show"]


def test_an_evaluation_writes_its_row_last(monkeypatch):
    """An evaluation writes its row after its answers, so that a run killed in between makes the
    whole evaluation again. In the last round, only questions that exist count."""
    answers, row = evaluated(monkeypatch, questions=3, faults={})
    answer = {"set": "sums", "question": "1 + 1?", "reference": "2", "answer": "2"}
    answer |= {"reward": 1.0, "solved": 1.0, "truncated": False}
    wanted = [answer | {"tokens": tokens} for tokens in (2, 3, 2)]
    assert answers == mock.call.write_evals(1, wanted)
    assert row == mock.call.write({"step": 1, "eval/solved": 1.0, "eval/stderr": 0.0})


@pytest.mark.parametrize("host, wanted", [(0, [0, 1, 4, 5]), (1, [2, 3, 0, 1])])
def test_hosts_ask_different_questions_in_an_evaluation(host, wanted, monkeypatch):
    """Two hosts ask two of six questions each. In the last round, the second host repeats some, and
    their answers are not scored: a judge may cost money."""
    monkeypatch.setattr(jax, "process_index", lambda: host)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    asked = []

    def sample(rows, *_):
        asked.extend(row["question"] for row in rows)
        return {"truncated_B": np.array([True, False])}, []

    monkeypatch.setattr(train, "sample_answers", sample)
    of_all = [{"set": "sums", "solved": 1.0}]
    monkeypatch.setattr(train, "answers_of_all_hosts", lambda *_: of_all)
    pool = mock.Mock()
    pool.score_answers.return_value = np.zeros((2, 3)), {}
    held_out = {"sums": [{"question": i} for i in range(6)]}
    setup = SimpleNamespace(held_out=held_out, engine=mock.Mock(), reward_pool=pool)
    train.evaluate(None, 1, train.Config(batch=2, npq=1), setup, mock.Mock())
    assert asked == wanted
    left_out = [call.args[2].tolist() for call in pool.score_answers.call_args_list]
    assert left_out == [[True, False], [[True, False], [True, True]][host]]


def test_an_evaluation_says_that_solved_fails(monkeypatch, capsys):
    """The failures of other functions are not reported: functions of REWARDS may need columns that
    only the training data has."""
    missing = {0: "KeyError: 'words'", 1: "KeyError: 'words'"}
    evaluated(monkeypatch, questions=1, faults={"correct": missing, "formatted": missing})
    said = capsys.readouterr().out
    assert "reward correct failed on 2 answers" in said and "formatted" not in said


def test_the_notice_of_a_preemption_ends_the_run(monkeypatch):
    """A run ends when Google's metadata server announces a preemption. Here the server first fails,
    then answers FALSE, then TRUE. The first answer is wanted at once, the next when it changes."""
    asked = []

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(503 if len(asked) == 1 else 200)
            self.end_headers()
            self.wfile.write(b"TRUE" if len(asked) > 2 else b"FALSE")

        def log_message(self, *_):
            pass

    monkeypatch.setattr(processes, "SECONDS_BETWEEN_TRIES", 0.1)
    # A proxy would answer for its own machine. This one does not answer at all.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with restored_signals(), http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        stop_signal = watch_signals()
        until(lambda: stop_signal.number, seconds=60)
        server.shutdown()
        assert stop_signal.number == signal.SIGTERM
        # The VM's shutdown then sends SIGTERM, which must not end the save.
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stop):
            check_for_stop(stop_signal)
    path = "/computeMetadata/v1/instance/preempted"
    asked_for = [path, path, f"{path}?wait_for_change=true&timeout_sec=10"]
    assert asked == [(path, "Google") for path in asked_for]


def test_the_warning_of_a_time_limit_is_a_sigterm():
    """SIGUSR1, Slurm's warning of the time limit, stops a run like SIGTERM. A second SIGUSR1 or the
    SIGTERM that follows must not end the save."""
    with restored_signals():
        stop_signal = watch_signals()
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            signal.raise_signal(number)
            with pytest.raises(Stop) as stop:
                check_for_stop(stop_signal)
            wanted = signal.SIGTERM if number == signal.SIGTERM else signal.SIGUSR1
            assert stop.value.args == (wanted,)


@pytest.mark.parametrize(
    "steps_made, is_written, code", [(1, True, 143), (0, True, 138), (1, False, 138)]
)
def test_a_time_limit_without_a_new_step_has_another_code(
    steps_made, is_written, code, tmp_path, monkeypatch
):
    """If no new step is saved at the time limit, the exit code tells launch.sh that requeueing the
    job would not help."""
    saver = checkpoint.Saver(str(tmp_path), keep=1, newest=7)
    monkeypatch.setattr(saver, "write", lambda *_: is_written)
    saver.remember(7 + steps_made, {}, 0)
    run = SimpleNamespace(saver=saver, step=7 + steps_made, resumed_after=7)
    with pytest.raises(SystemExit) as end, Run.saved_if_cut_short(run, 1):
        raise Stop(signal.SIGUSR1)
    assert end.value.code == code


@pytest.mark.parametrize("error, is_shown", [(SystemExit(1), False), (ValueError("why"), True)])
def test_a_process_shows_the_traceback_of_an_unexpected_error(error, is_shown, monkeypatch, capfd):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    leave(error)
    assert codes == [1]
    assert ("ValueError: why" in capfd.readouterr().err) == is_shown


# ---------------------------------------------------------------- long runs
def watch(process, log):
    """Watch a process until it ends. Returns ({steps done: MiB of memory}, {n: steps done when
    program n was traced})."""
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
    """Check that memory changes by less than `growth` from the second to the last quarter, and that
    nothing is traced after 100 steps."""
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
    """The embedded default, as committed, solves at most 45% after the supervised phase, and at
    least 90% at the end."""
    # Most of this run's time is computation, so compile it with XLA's optimisations. Evaluate twice
    # instead of five times: evaluations change no weights. With one device, two threads are faster
    # than the 32 of other tests.
    flags = "--eval_every 80 --out"
    command = [sys.executable, ROOT / "train.py", *arguments([flags, tmp_path / "run"])]
    text = run(*command, JAX_NUM_CPU_DEVICES="1", XLA_FLAGS="", NPROC="2")
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    scores = [row["eval/solved"] for row in rows if "eval/solved" in row]
    assert scores[0] <= 0.45 and scores[-1] >= 0.90, scores
    record_property("tells", re.search(r"held-out questions solved.*", text)[0])


def test_an_evaluation_samples_and_scores_as_the_flags_say(monkeypatch):
    out = {"tokens_BT": np.zeros((2, 3), int), "lengths_B": np.array([2, 3])}
    out["truncated_B"] = np.zeros(2, bool)
    asked = []

    def sample(rows, group, key, sampling, *_):
        asked.append((group, sampling))
        assert key == jax.random.fold_in(jax.random.key(cfg.seed), 0)
        return out, ["2", "2"]

    monkeypatch.setattr(train, "sample_answers", sample)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    pool = mock.Mock()
    faults = {"formatted": {1: "KeyError: 'words'"}}
    # SOLVED, correct, formatted.
    pool.score_answers.return_value = np.array([[0.5, 1, 1], [0, 1, 0]]), faults
    setup = SimpleNamespace(
        held_out={"sums": [{"question": "1 + 1?", "answer": "2"}] * 2},
        engine=mock.Mock(texts=lambda out: ["2", "2"]),
        reward_pool=pool,
    )
    run = mock.Mock()
    cfg = train.Config(batch=2, npq=1, eval_temperature=0.5, top_k=3, top_p=0.9)
    train.evaluate(None, 1, cfg, setup, run)
    assert asked == [(1, Sampling(0.5, 3, 0.9))]
    (_, answers), _ = run.write_evals.call_args
    assert [answer["solved"] for answer in answers] == [0.5, 0]
    assert answers[0]["reward"] == 1.1 and math.isnan(answers[1]["reward"])
    ((row,), _) = run.write.call_args
    assert row == {"step": 1, "eval/solved": 0.25, "eval/stderr": 0.25}


@pytest.mark.parametrize("has_row, evaluations", [(True, 0), (False, 1)])
def test_a_resumed_run_evaluates_only_if_it_must(has_row, evaluations, monkeypatch):
    for name in "abstract_state", "evaluate":
        monkeypatch.setattr(train, name, mock.create_autospec(getattr(train, name)))
    train.abstract_state.return_value = {}
    run = mock.Mock(step=2)
    run.load.return_value = {"params": 5}
    run.has_evaluation.return_value = has_row
    setup = SimpleNamespace(held_out={"set": [1]}, model_cfg=None, mesh=None)
    cfg = train.Config(steps=4, eval_every=2)
    assert train.first_state(cfg, setup, run) == {"params": 5}
    wanted = [mock.call(5, 2, cfg, setup, run)] * evaluations
    assert train.evaluate.mock_calls == wanted
