"""A run whose checkpoints are in a bucket, on the stand-in for gcloud."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, arguments, read_jsonl, run, without_times
from safetensors.numpy import load_file

FLAGS = (
    "--model tiny --data arith --eval_data none --max_prompt 80 --max_answer 8 --batch 1 --npq 4 "
    "--minibatches 1 --sft_steps 0 --steps 4 --save_every 1 --keep 2 --entropy_bonus 0.1"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """-> (the run's directory on this machine, its folder in the bucket, a function that trains)"""
    stub = tmp_path / "stub"
    (stub / "gs/bucket").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{ROOT}/.ci:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("GCLOUD_STUB", str(stub))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    home = tmp_path / "home"
    home.mkdir()

    def train(*more, code=0):
        flags = arguments([FLAGS, "--out gs://bucket/run", *more])
        return run(sys.executable, ROOT / "train.py", *flags, cwd=home, code=code)

    return home / "out/gs/bucket/run", stub / "gs/bucket/run", train


def steps(directory):
    """Of checkpoints; a folder without files is none, in a bucket."""
    return sorted({int(path.parent.name[5:]) for path in directory.glob("step_*/*")})


def calls(bucket):
    return [json.loads(line) for line in open(bucket.parents[2] / "calls.log")]


@pytest.mark.slow
def test_local_copies_go_once_they_are_in_the_bucket(machine):
    """Another machine resumes from there, and fetches no more than it uses."""
    here, bucket, train = machine
    text = train()
    assert "1 checkpoints at once" in text, text
    assert steps(here) == [] and steps(bucket) == [3, 4], (steps(here), steps(bucket))
    metrics = without_times(read_jsonl(bucket / "metrics.jsonl"))
    weights = load_file(bucket / "final/model.safetensors")

    # Another machine, and a bucket as a run leaves it that is killed before its last save is
    # complete; it had another number of processes, of which one wrote half a file.
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
    # What a killed run has left is newer than this run's last: nobody's to delete.
    assert steps(here) == [5] and steps(bucket) == [3, 4, 5], (steps(here), steps(bucket))


@pytest.mark.slow
def test_a_bucket_that_cannot_be_reached_keeps_checkpoints_here(machine):
    """They are sent later, and nothing that is newer here is overwritten."""
    here, bucket, train = machine
    fail = bucket.parents[2] / "fail"
    rule = {"match": "rsync.*step_00000[12]", "stderr": "ERROR: unavailable", "times": 2}
    fail.write_text(json.dumps(rule) + "\n")
    text = train("--steps 2")
    assert "step 1 cannot be saved" in text and "ERROR: unavailable" in text, text
    assert steps(here) == [1, 2] and steps(bucket) == [], (steps(here), steps(bucket))
    # Now the bucket can be reached.
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
    # Every checkpoint is damaged, and only the bucket has them.
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
    # Of what differs, what is newer here goes to the bucket, and what is missing here comes back.
    (here / "metrics.jsonl").write_text('{"step": 0, "newer": 1}\n')
    (here / "samples.jsonl").unlink()
    train("--steps 0 --eval_data arith --eval_n 8", code=0)
    assert (here / "samples.jsonl").read_bytes() == (bucket / "samples.jsonl").read_bytes() != b""
