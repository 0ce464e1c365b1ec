"""The whole life of a run on a spot VM: created, installed, started, preempted, created again,
resumed, finished, deleted. Whichever calls to Google Cloud fail, no result is lost, the user hears
of every VM that is still paid for, and the exit code is 0 only if the model is in the bucket."""

import os
import shutil
import subprocess

import pods
import pytest
from conftest import arguments, read_jsonl, without_times
from pods import POD_FLAGS, UNAVAILABLE
from safetensors.numpy import load_file

# pytest finds the fixture under this name.
cloud = pods.cloud

STEPS = 3
TOO_MANY = "ERROR: (gcloud.x) HTTPError 429: Too Many Requests, rate limit exceeded."


def live(cloud, *rules):
    """Run launch.sh through one life. Returns (exit code, output, calls of gcloud).

    rules: of .ci/gcloud, for calls that are to fail.
    """
    for name in ("life", "gs", "queued", "calls.log", "fail"):
        path = cloud.stub / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    shutil.rmtree(cloud.clone / "out", ignore_errors=True)
    (cloud.stub / "gs/bucket").mkdir(parents=True)
    # The VM is preempted while it sends the second checkpoint.
    cloud.fail("rsync.*step_000002 gs://", "Killed", preempt="life")
    for rule in rules:
        cloud.fail(**rule)
    flags = ("v4-8 --name life --spot --down", POD_FLAGS, f"--steps {STEPS} --out gs://bucket/run")
    done = subprocess.run(
        ["bash", "launch.sh", *arguments(flags)],
        cwd=cloud.clone,
        env=os.environ | cloud.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    return done.returncode, done.stdout, cloud.calls()


def outcome(cloud, code, text, calm=None):
    """Check the results of a life, and describe them in a line. calm: the weights of an undisturbed
    life."""
    run = cloud.stub / "gs/bucket/run"
    is_there = (cloud.stub / "life").exists()
    is_complete = (run / "final/podgrpo.json").exists()
    if code == 0:
        assert is_complete and not is_there, text
        rows = without_times(read_jsonl(run / "metrics.jsonl"))
        assert [row["step"] for row in rows] == [*range(1, STEPS + 1)], text
        weights = load_file(run / "final/model.safetensors")
        assert calm is None or all((weights[name] == calm[name]).all() for name in calm), text
    if is_there:
        assert code != 0 and "life in us-central2-b may still exist and cost money" in text, text
    # A trained model is in the bucket, or on a VM that was not deleted.
    assert is_complete or is_there or "done: " not in text, text
    model = "in the bucket" if is_complete else "not in the bucket"
    vm = "paid, and said so" if is_there else "gone"
    return f"exit code {code}, model {model}, VM {vm}"


def name_of(argv):
    """Returns a call of gcloud in a few words: its words without flags, and what it runs by ssh."""
    words = [word for word in argv if not word.startswith("-")]
    command = [word.rpartition("; ")[2] for word in argv if word.startswith("--command=")]
    return " ".join(words + command)[:100]


@pytest.mark.slow
def test_a_life_survives_if_a_fifth_of_its_calls_fail(cloud):
    """If a fifth of all calls fail with a 503 or a 429, a run still ends with the same weights."""
    code, text, calls = live(cloud)
    assert "resuming out/gs/bucket/run after step 1" in text, text
    assert outcome(cloud, code, text) == "exit code 0, model in the bucket, VM gone", text
    calm = load_file(cloud.stub / "gs/bucket/run/final/model.safetensors")
    # .ci/gcloud applies the first rule that is due, so about half of the faults are of each kind.
    faults = [{"chance": 0.1, "text": UNAVAILABLE}, {"chance": 0.2, "text": TOO_MANY}]
    code, text, more_calls = live(cloud, *[{"pattern": ".", "times": 999} | f for f in faults])
    assert "UNAVAILABLE" in text and "429" in text, text
    print(f"{len(calls)} calls of gcloud in a life, {len(more_calls)} in one that meets faults")
    assert outcome(cloud, code, text, calm) == "exit code 0, model in the bucket, VM gone", text


@pytest.mark.soak
@pytest.mark.parametrize("text", [UNAVAILABLE, TOO_MANY], ids=["503", "429"])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_a_life_survives_a_fault_at_each_of_its_calls(times, text, cloud):
    code, said, calls = live(cloud)
    outcome(cloud, code, said)
    calm = load_file(cloud.stub / "gs/bucket/run/final/model.safetensors")
    table = []
    while True:
        place = len(table)
        fault = {"pattern": ".", "text": text, "times": times, "after": place}
        code, said, calls = live(cloud, fault)
        line = outcome(cloud, code, said, calm)
        # Lives differ by a call or two. This one ended before the fault was due.
        if place >= len(calls):
            break
        table.append(f"{place:3} {line}: {name_of(calls[place])}")
        print(table[-1], flush=True)
    assert len(table) > 40
    print(f"{len(table)} places")
