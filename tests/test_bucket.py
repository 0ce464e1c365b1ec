"""Runs with their checkpoints in a bucket, tested with a stand-in for gcloud."""

import fcntl
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import IMPATIENT, ROOT, arguments, read_jsonl, run, until, without_times
from safetensors.numpy import load_file

from infra.run import bucket as buckets
from infra.run import checkpoint, run_dir

# The names of compiled programs in the cache of JAX.
PROGRAMS = "jit_(gradients|optimizer_step|prefill|decode)-"
FLAGS = (
    "--model tiny --data arith --eval_data none --max_prompt 80 --max_answer 8 --batch 1 --npq 4 "
    "--minibatches 1 --sft_steps 0 --steps 4 --save_every 1 --keep 2 --entropy_bonus 0.1"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns (the run's directory on this machine, its folder in the bucket, a function that
    trains)."""
    stub = tmp_path / "stub"
    (stub / "gs/bucket").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{ROOT}/.ci:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("GCLOUD_STUB", str(stub))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    home = tmp_path / "home"
    home.mkdir()

    def train(*more, code=0):
        flags = arguments([FLAGS, "--out gs://bucket/run", *more])
        program = (*IMPATIENT, ROOT / "train.py")
        return run(*program, *flags, cwd=home, code=code)

    return home / "out/gs/bucket/run", stub / "gs/bucket/run", train


RUN = "out/gs/bucket/run"
UNAVAILABLE = "ERROR: HTTPError 503: Service Unavailable"
FORBIDDEN = (
    "ERROR: (gcloud.storage.rsync) HTTPError 403: a@example.com does not have "
    "storage.objects.list access to the Google Cloud Storage bucket."
)


def fail(bucket, match, stderr=UNAVAILABLE, times=1):
    """Make the next `times` matching calls of gcloud fail."""
    rule = {"match": match, "stderr": stderr, "times": times}
    (bucket.parents[2] / "fail").write_text(json.dumps(rule) + "\n")


def steps(directory):
    """Returns the steps of the checkpoints. Empty folders do not count: a bucket has none."""
    return sorted({int(path.parent.name[5:]) for path in directory.glob("step_*/*")})


def calls(bucket):
    return [json.loads(line) for line in open(bucket.parents[2] / "calls.log")]


@pytest.fixture
def waits(tmp_path, monkeypatch):
    """Returns a list of the seconds for which this process would have waited for a bucket. The
    directory RUN contains a final model."""
    (tmp_path / "gs/bucket/run").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{ROOT}/.ci:/usr/bin:/bin")
    monkeypatch.setenv("GCLOUD_STUB", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    final = tmp_path / "out/gs/bucket/run/final"
    final.mkdir(parents=True)
    (final / "model.safetensors").write_text("weights")
    (final / "podgrpo.json").write_text('{"step": 4}')
    waited = []
    # `subprocess` also sleeps, so replace the sleep of infra/run/bucket.py alone.
    monkeypatch.setattr(buckets, "time", mock.Mock(sleep=waited.append))
    return waited


def test_a_bucket_is_asked_again_with_growing_patience(tmp_path, waits, capfd):
    bucket = tmp_path / "gs/bucket/run"
    fail(bucket, "rsync", times=len(buckets.PATIENCE))
    buckets.send_all_but_checkpoints(RUN)
    assert (bucket / "final/model.safetensors").read_text() == "weights"
    assert waits == sorted(buckets.PATIENCE) and 120 < sum(waits) < 900, waits
    said = capfd.readouterr().err
    assert said.count(UNAVAILABLE) == len(waits) and "again in 160 s" in said, said
    # When patience runs out, the error names both ends and the cause.
    fail(bucket, "rsync", times=99)
    with pytest.raises(buckets.BucketError, match=f"{RUN} cannot be copied to gs://.*503"):
        buckets.send_all_but_checkpoints(RUN)
    assert waits == 2 * list(buckets.PATIENCE)


def test_metrics_are_in_the_bucket_before_their_checkpoint(tmp_path, waits, monkeypatch):
    """A run that resumes from a checkpoint could not replace the rows up to its step."""
    saver = checkpoint.Saver(RUN, keep=2, newest=0)
    sent = mock.Mock()
    for name in ("send_all_but_checkpoints", "send_checkpoint"):
        monkeypatch.setattr(buckets, name, getattr(sent, name))
    saver.send("step_000004")
    rows = mock.call.send_all_but_checkpoints(RUN, compiled=False)
    own = mock.call.send_checkpoint(RUN, "step_000004", 0, 1)
    assert sent.mock_calls == [rows, own, mock.call.send_all_but_checkpoints(RUN)]


def test_each_process_of_a_machine_sends_its_own_part(tmp_path, waits):
    """By default, gcloud keeps its list of a folder's files in one place for all processes."""
    (tmp_path / "list_seconds").write_text("0.5")
    parts = [f"shards-{i:05}-of-00002.safetensors" for i in range(2)]
    for part in parts:
        (tmp_path / RUN / "step_000001").mkdir(exist_ok=True)
        (tmp_path / RUN / "step_000001" / part).write_text(part)
    with ThreadPoolExecutor(2) as threads:
        send = partial(buckets.send_checkpoint, RUN, "step_000001", processes=2)
        assert list(threads.map(send, range(2))) == [None, None]
    there = tmp_path / "gs/bucket/run/step_000001"
    assert sorted(path.name for path in there.iterdir()) == parts


def test_processes_that_share_a_disk_fetch_one_after_another(tmp_path, waits, monkeypatch):
    def rsync(*_):
        with open(f"{RUN}/fetch.tmp") as f, pytest.raises(BlockingIOError):
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(buckets, "rsync", mock.Mock(side_effect=rsync))
    buckets.fetch_all_but_checkpoints(RUN, final=True)
    buckets.fetch_checkpoint(RUN, "step_000001", 0, 2)
    assert buckets.rsync.call_count == 2


@pytest.mark.parametrize(
    "stderr",
    [
        "WARNING: slow\nERROR: (gcloud.storage.rsync) gs://bucket not found: 404.",
        "ERROR: (gcloud.storage.ls) You do not currently have an active account selected.\n"
        "Please run:\n\n  $ gcloud auth login\n\nto obtain new credentials.",
        "ERROR: gcloud crashed (OSError): [Errno 28] No space left on device",
    ],
)
def test_what_can_never_succeed_is_not_tried_again(stderr, tmp_path, waits):
    fail(tmp_path / "gs/bucket/run", "storage", stderr, times=99)
    for ask in (buckets.send_all_but_checkpoints, buckets.saved_steps, buckets.send_results):
        with pytest.raises(buckets.RefusedError):
            ask(RUN)
    assert waits == []


@pytest.mark.parametrize(
    "stderr",
    [
        FORBIDDEN,
        "ERROR: (gcloud.storage.rsync) PERMISSION_DENIED: no",
        "ERROR: (gcloud.storage.rsync) HTTPError 401: Invalid Credentials",
    ],
)
def test_a_permission_that_is_missing_for_a_minute_does_not_end_a_run(stderr, tmp_path, waits):
    """A login may expire during a transfer, and a new permission takes a while to arrive."""
    bucket = tmp_path / "gs/bucket/run"
    fail(bucket, "rsync", stderr, times=5)
    buckets.send_all_but_checkpoints(RUN)
    assert (bucket / "final/model.safetensors").read_text() == "weights"
    assert 60 <= sum(waits) <= 80, waits
    # A permission that does not arrive is refused, and not waited for as long as a broken service.
    waits.clear()
    fail(bucket, "rsync", stderr, times=99)
    with pytest.raises(buckets.RefusedError):
        buckets.send_all_but_checkpoints(RUN)
    assert 60 <= sum(waits) <= 80, waits


def test_a_call_that_hangs_is_ended_with_its_children_and_tried_again(tmp_path, waits, monkeypatch):
    gcloud = tmp_path / "bin/gcloud"
    gcloud.parent.mkdir()
    # The first call waits for a child, as gcloud waits for the processes that copy files.
    hangs = f"sleep 600 & echo $! > {tmp_path}/child; wait"
    gcloud.write_text(f"#!/bin/sh\nif mkdir {tmp_path}/called; then {hangs}; fi; echo listed\n")
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gcloud.parent}:/usr/bin:/bin")
    assert buckets.gcloud_retrying("ls", "gs://bucket/run", seconds=3) == "listed\n"
    assert waits == [2]
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")

    def is_gone():
        # A process that has ended is a zombie, Z, until its parent notices.
        return not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"

    assert until(is_gone, seconds=30)


def test_a_copy_has_time_for_its_size(tmp_path, waits, monkeypatch):
    call = mock.Mock(return_value="")
    monkeypatch.setattr(buckets, "gcloud_once", call)
    with open(f"{RUN}/final/model.safetensors", "w") as f:
        f.truncate(10**10)
    buckets.send_all_but_checkpoints(RUN)
    buckets.fetch_all_but_checkpoints(RUN, final=True)
    sent, fetched = [call.kwargs["seconds"] for call in call.call_args_list]
    assert 1600 <= sent < 1601
    # The size of the files in the bucket is unknown.
    assert fetched > 3600


def test_nothing_there_and_no_gcloud_are_answers_at_once(tmp_path, waits, monkeypatch):
    assert buckets.saved_steps("out/gs/bucket/none") == []
    buckets.fetch_all_but_checkpoints("out/gs/bucket/none", final=True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(buckets.RefusedError, match="gcloud is not installed"):
        buckets.saved_steps(RUN)
    assert waits == []


def test_the_marker_of_a_complete_model_arrives_last(tmp_path, waits):
    bucket = tmp_path / "gs/bucket/run"
    # The bucket has an older, complete model, as if the run had been given more steps since.
    (bucket / "final").mkdir()
    (bucket / "final/podgrpo.json").write_text('{"step": 2}')
    fail(bucket, "rsync", times=99)
    with pytest.raises(buckets.BucketError):
        buckets.send_results(RUN)
    assert not (bucket / "final/podgrpo.json").exists()
    (tmp_path / "fail").unlink()
    buckets.send_results(RUN)
    assert (bucket / "final/podgrpo.json").read_text() == '{"step": 4}'
    words = [argv[1] for argv in calls(bucket)]
    assert words[-3:] == ["cat", "rsync", "cp"], words
    # When the same model is sent again, the marker stays in place all the time.
    before = len(words)
    buckets.send_results(RUN)
    assert [argv[1] for argv in calls(bucket)][before:] == ["cat", "rsync"]


def test_the_model_of_another_run_is_not_taken_for_this_one(tmp_path, waits):
    marker = tmp_path / "gs/bucket/run/final/podgrpo.json"
    marker.parent.mkdir()
    marker.write_text('{"step": 2}')
    with pytest.raises(buckets.BucketError, match="run/final is not the model of this run"):
        buckets.check_results(RUN)
    marker.write_text('{"step": 4}\n')
    buckets.check_results(RUN)


def test_what_was_written_here_while_the_bucket_was_out_of_reach_stays(tmp_path, waits):
    for name in ("metrics.jsonl", "step_000001/shard"):
        there, here = tmp_path / "gs/bucket/run" / name, tmp_path / RUN / name
        for path, text in ((there, "older"), (here, "newer")):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        os.utime(there, (1, 1))
    buckets.fetch_all_but_checkpoints(RUN, final=False)
    buckets.fetch_checkpoint(RUN, "step_000001", 0, 1)
    assert (tmp_path / RUN / "metrics.jsonl").read_text() == "newer"
    assert (tmp_path / RUN / "step_000001/shard").read_text() == "newer"


@pytest.mark.parametrize("process", [0, 1])
def test_all_processes_end_alike_where_process_0_cannot_send(process, tmp_path, waits, monkeypatch):
    fail(tmp_path / "gs/bucket/run", "storage", times=99)
    # This process is one of two, and only process 0 has a fault.
    monkeypatch.setattr(run_dir.jax, "process_index", lambda: process)
    gathered = lambda value: np.array([True if process else value, False])  # noqa: E731
    monkeypatch.setattr(run_dir, "all_gather_processes", gathered)
    with pytest.raises(SystemExit) as end:
        run_dir.send_results(RUN)
    assert end.value.code == 1 and len(waits) == (0 if process else len(buckets.PATIENCE))


def test_what_a_failed_try_has_removed_is_gone(tmp_path, waits):
    bucket = tmp_path / "gs/bucket/run"
    (bucket / "step_000001").mkdir()
    (bucket / "step_000001/shard").write_text("")
    rule = {"match": "storage rm", "stderr": UNAVAILABLE, "does": True}
    (tmp_path / "fail").write_text(json.dumps(rule) + "\n")
    buckets.remove_checkpoints(RUN, [1])
    assert buckets.saved_steps(RUN) == [] and len(waits) == 1


@pytest.mark.slow
def test_a_model_that_is_not_in_the_bucket_ends_the_run_with_1(machine):
    """If the model does not reach the bucket, the run exits with code 1. The same command sends the
    model once the bucket can be reached."""
    here, bucket, train = machine
    fail(bucket, r"rsync .* gs://bucket/run(/step_000002)?$|cp .*final", times=99)
    # The small files can be sent before the first step, but not later.
    rule = {"match": "rsync .*/run gs://bucket/run$", "stderr": "", "code": 0, "times": 1}
    path = bucket.parents[2] / "fail"
    path.write_text(json.dumps(rule) + "\n" + path.read_text())
    for _ in range(2):
        text = train("--steps 2", code=1)
        assert f"NOT in gs://bucket/run, but in {here}" in text, text
        assert "give the same command again there" in text and UNAVAILABLE in text, text
        assert "is finished" not in text, text
        assert not (bucket / "final/podgrpo.json").exists()
        assert (here / "final/podgrpo.json").exists() and steps(bucket) == [], steps(bucket)
    path.unlink()
    text = train("--steps 2")
    assert "is finished" in text, text
    assert (bucket / "final/podgrpo.json").exists() and steps(bucket) == [2], steps(bucket)
    assert (bucket / "metrics.jsonl").read_bytes() == (here / "metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("match", "stderr", "code"),
    [("cp .*claim", UNAVAILABLE, 1), ("storage ls", UNAVAILABLE, 1), ("rsync", FORBIDDEN, 2)],
)
def test_a_bucket_out_of_reach_at_the_start_is_a_fault_of_a_service(match, stderr, code, machine):
    _, bucket, train = machine
    fail(bucket, match, stderr, times=99)
    text = train("--steps 1", code=code)
    assert stderr in text and ("cannot be used" in text) == (code == 2), text


@pytest.mark.slow
def test_local_copies_go_once_they_are_in_the_bucket(machine):
    """Checkpoints in the bucket are deleted from the local disk. Another machine resumes from the
    bucket, and fetches only what it uses."""
    here, bucket, train = machine
    text = train()
    assert "1 checkpoints at once" in text, text
    assert steps(here) == [] and steps(bucket) == [3, 4], (steps(here), steps(bucket))
    metrics = without_times(read_jsonl(bucket / "metrics.jsonl"))
    weights = load_file(bucket / "final/model.safetensors")

    # The run moves to another machine. The bucket is as if the run had been killed before its last
    # save was complete, with a different number of processes, one of which sent a torn file.
    shutil.rmtree(here)
    shutil.rmtree(bucket / "step_000004")
    shutil.rmtree(bucket / "final")
    (bucket / "step_000005").mkdir()
    (bucket / "step_000005/shards-00001-of-00002.safetensors").write_bytes(b"torn")
    before = len(calls(bucket))
    text = train()
    assert "resuming out/gs/bucket/run after step 3" in text, text
    fetched = [argv[-1] for argv in calls(bucket)[before:] if argv[-2].startswith("gs://")]
    assert [target.rpartition("/")[2] for target in fetched if "step" in target] == [
        "step_000005",
        "step_000003",
    ]
    assert without_times(read_jsonl(bucket / "metrics.jsonl")) == metrics
    for name, weight in load_file(bucket / "final/model.safetensors").items():
        np.testing.assert_array_equal(weight, weights[name])
    # The leftovers of the killed run are newer than this run's last checkpoint, so they stay.
    assert steps(here) == [5] and steps(bucket) == [3, 4, 5], (steps(here), steps(bucket))


def test_compiled_programs_are_sent_if_they_are_no_larger_than_a_checkpoint(tmp_path, waits):
    bucket = tmp_path / "gs/bucket/run"
    for name, size in (("compiled/a-cache", 9), ("compiled/b-cache", 9), ("step_000001/x", 17)):
        path = tmp_path / RUN / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#" * size)
    buckets.send_all_but_checkpoints(RUN)
    assert (bucket / "final/model.safetensors").exists()
    assert not (bucket / "compiled").exists() and not steps(bucket)
    (tmp_path / RUN / "step_000001/y").write_text("#")
    buckets.send_all_but_checkpoints(RUN)
    assert len(list((bucket / "compiled").iterdir())) == 2 and not steps(bucket)


def test_a_trace_is_sent_and_does_not_come_back(tmp_path, waits):
    """No run has a use for it, and each process would fetch it."""
    trace = "profile/plugins/profile/now/host.xplane.pb"
    (tmp_path / RUN / trace).parent.mkdir(parents=True)
    (tmp_path / RUN / trace).write_text("trace")
    (tmp_path / RUN / "metrics.jsonl").write_text("metrics")
    buckets.send_all_but_checkpoints(RUN)
    assert (tmp_path / "gs/bucket/run" / trace).read_text() == "trace"
    shutil.rmtree(tmp_path / RUN)
    buckets.fetch_all_but_checkpoints(RUN, final=True)
    there = sorted(path.name for path in (tmp_path / RUN).iterdir())
    assert there == ["fetch.tmp", "final", "metrics.jsonl"]


@pytest.mark.slow
def test_a_run_that_comes_back_on_a_new_machine_compiles_nothing_again(machine, monkeypatch):
    here, bucket, train = machine
    # The tests share a compilation cache, but this run gets its own, which keeps even the programs
    # that compile in less than a second.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

    def compiled(directory):
        names = {path.name for path in (directory / "compiled").iterdir()}
        return {name for name in names if re.match(PROGRAMS, name)}

    train("--steps 2")
    programs = compiled(bucket)
    assert len(programs) >= 4 and programs == compiled(here), programs
    # On a new machine the run takes two more steps.
    shutil.rmtree(here)
    text = train("--steps 4 --resume force")
    assert "resuming out/gs/bucket/run after step 2" in text, text
    assert compiled(here) == programs


@pytest.mark.slow
def test_a_bucket_that_cannot_be_reached_keeps_checkpoints_here(machine):
    """While the bucket cannot be reached, the newest checkpoint stays on the local disk. Later ones
    are sent, and nothing overwrites newer local files."""
    here, bucket, train = machine
    fail(bucket, "rsync.*step_00000[12]", times=6)
    text = train("--steps 2")
    assert "step 1 cannot be saved" in text and UNAVAILABLE in text, text
    assert steps(here) == [2] and steps(bucket) == [], (steps(here), steps(bucket))
    # From here on the bucket can be reached.
    shutil.rmtree(here / "final")
    shutil.rmtree(bucket / "final")
    text = train("--resume force")
    assert "resuming out/gs/bucket/run after step 2" in text, text
    assert steps(here) == [] and steps(bucket) == [3, 4], (steps(here), steps(bucket))
    assert [row["step"] for row in read_jsonl(bucket / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_cannot_be_used_is_put_aside_in_the_bucket_too(machine):
    here, bucket, train = machine
    train("--steps 2")
    # Only the bucket has checkpoints, and all of them are damaged.
    for path in bucket.glob("step_*/*"):
        path.write_bytes(path.read_bytes()[:-9])
    shutil.rmtree(here)
    shutil.rmtree(bucket / "final")
    text = train("--steps 2", code=2)
    assert "none can be used" in text and "--resume force" in text, text
    text = train("--steps 2 --resume force")
    (old,) = bucket.glob("old-*")
    assert sorted(path.name for path in old.iterdir()) == [
        "metrics.jsonl",
        "rewards.log",
        "samples.jsonl",
        "step_000001",
        "step_000002",
    ]
    assert steps(bucket) == [1, 2] and (bucket / "final").exists()
    assert "is finished" in train("--steps 2")


@pytest.mark.slow
def test_an_evaluation_alone_is_sent_too(machine):
    here, bucket, train = machine
    train("--steps 0 --eval_data arith --eval_n 8")
    assert "eval/solved" in read_jsonl(bucket / "metrics.jsonl")[0]
    # A file that is newer here goes to the bucket, and a file that is missing here comes back.
    (here / "metrics.jsonl").write_text('{"step": 0, "newer": 1}\n')
    (here / "evals.jsonl").unlink()
    train("--steps 0 --eval_data arith --eval_n 8", code=0)
    assert (here / "evals.jsonl").read_bytes() == (bucket / "evals.jsonl").read_bytes() != b""
