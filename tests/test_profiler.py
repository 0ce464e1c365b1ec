"""--profile, the trace of one step: what it holds, who writes it, and that it changes no run."""

import gzip
import json
import os
import re
import shutil
import subprocess
from unittest import mock

import jax
import pytest
from conftest import IMPATIENT, ROOT, arguments, made_once, read_jsonl, run_train, same_run

from infra.run.profiler import Profiler

# The entropy bonus moves the weights in every step.
FLAGS = (
    "--steps 3 --sft_steps 0 --batch 2 --npq 4 --minibatches 1 --max_answer 16 --eval_data none "
    "--entropy_bonus 0.1"
)
TRACED_STEP = 2


@pytest.fixture
def traced(tmp_path_factory):
    """The directory of a run with one traced step. Tests share it and must not change it."""

    def make(directory):
        text = run_train(FLAGS, f"--profile {TRACED_STEP} --out", directory / "run")
        (directory / "log").write_text(text)

    return made_once(tmp_path_factory, "traced", make) / "run"


def traces(out):
    """The traces in a run's directory. Each is a directory named after its time."""
    return sorted((out / "profile/plugins/profile").iterdir())


def events_of(trace):
    """Names of the events in a trace that have a duration, with repetitions."""
    (path,) = trace.glob("*.trace.json.gz")
    with gzip.open(path) as f:
        events = json.load(f)["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X"]


def functions_of(trace):
    """Names of train.py's functions in a trace, one for each call."""
    names = [name for name in events_of(trace) if name.startswith("$train.py")]
    return [name.rpartition(" ")[2] for name in names]


def test_a_trace_holds_the_work_of_its_step_alone(traced):
    said = (traced.parent / "log").read_text()
    assert re.findall(r"^step (\d) is traced: .*/run/profile$", said, re.M) == ["2"], said
    (trace,) = traces(traced)
    # xprof reads this file.
    (path,) = trace.glob("*.xplane.pb")
    assert path.stat().st_size > 1e5
    # Jitted programs, from the rollout to the update.
    names = events_of(trace)
    for program in ("prefill", "decode", "gradients", "optimizer_step"):
        assert f"PjitFunction({program})" in names, sorted(set(names))
    # The first step has compiled everything, and the traced step calls each function once.
    assert not [name for name in names if "compile_or_get_cached" in name]
    functions = functions_of(trace)
    for function in ("sample_answers", "group_advantages", "make_batches", "update"):
        assert functions.count(function) == 1, functions


def test_a_trace_changes_no_number(traced, tmp_path):
    out = tmp_path / "run"
    run_train(FLAGS, "--out", out)
    assert not (out / "profile").exists()
    same_run(traced, out)
    row = read_jsonl(out / "metrics.jsonl")[TRACED_STEP - 1]
    assert row["step"] == TRACED_STEP and row["grad_norm"] > 1e-3, row


def test_a_step_that_was_done_before_is_named(traced, tmp_path):
    """With another step to trace, it is still the same run."""
    out = tmp_path / "run"
    shutil.copytree(traced, out)
    text = run_train(FLAGS, "--profile 1 --out", out)
    assert "step 1 is not traced: the run resumes after step 3\n" in text, text
    assert f"{out} is finished" in text and len(traces(out)) == 1, text


@pytest.mark.slow
def test_a_run_that_resumes_may_trace_another_step_or_none(traced, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(traced, out)
    # A different number of steps makes it another run.
    text = run_train(FLAGS, "--steps 4 --resume force --profile 4 --out", out)
    assert f"resuming {out} after step 3" in text, text
    assert f"step 4 is traced: {out}/profile\n" in text and "not traced" not in text, text
    old, new = traces(out)
    assert old.name == traces(traced)[0].name
    assert functions_of(new).count("sample_answers") == 1
    # Without the flag, it is still the same run.
    assert f"{out} is finished" in run_train(FLAGS, "--steps 4 --out", out)


def test_a_failing_trace_is_reported_and_the_run_goes_on(tmp_path, capsys):
    blocked = tmp_path / "profile"
    blocked.write_text("a file, where a directory should be")
    profiler = Profiler(str(blocked), 3)
    for step in range(1, 5):
        profiler.begin_step(step)
        jax.numpy.ones(9).sum().block_until_ready()
        profiler.end_step()
    printed = capsys.readouterr()
    assert printed.err.startswith("train.py: step 3 has no trace, but the run goes on: "), printed
    assert printed.err.count("\n") == 1 and "is traced" not in printed.out, printed
    # The profiler may not even start, for example because another one is running.
    with mock.patch.object(jax.profiler, "start_trace", side_effect=RuntimeError("busy")):
        profiler.begin_step(3)
    profiler.end_step()
    assert capsys.readouterr().err.count("RuntimeError: busy\n") == 1


def test_no_other_process_traces(tmp_path):
    with mock.patch.object(jax, "process_index", return_value=1):
        profiler = Profiler(str(tmp_path / "profile"), 1)
    with mock.patch.object(jax.profiler, "start_trace") as start:
        profiler.begin_step(1)
        profiler.end_step()
    assert not start.called and not (tmp_path / "profile").exists()


@pytest.mark.slow
def test_only_one_process_writes_a_trace(tmp_path):
    """Each process has its own disk, as on a pod."""
    flags = arguments([FLAGS, "--profile 2 --out run --processes 2"])
    runs = []
    for i in range(2):
        home = tmp_path / f"home{i}"
        home.mkdir()
        command = [*IMPATIENT, ROOT / "train.py", *flags, f"--process_id={i}"]
        command.append("--coordinator=127.0.0.1:29517")
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
        with open(home / "log", "w") as log:
            runs.append(subprocess.Popen(command, cwd=home, env=env, stdout=log, stderr=log))
    try:
        codes = [process.wait(600) for process in runs]
    finally:
        for process in runs:
            process.kill()
    logs = [(tmp_path / f"home{i}/log").read_text() for i in range(2)]
    assert codes == [0, 0], logs
    assert len(traces(tmp_path / "home0/run")) == 1
    assert "step 2 is traced: run/profile\n" in logs[0] and "is traced" not in logs[1], logs
    assert not (tmp_path / "home1/run/profile").exists()
