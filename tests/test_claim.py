"""Only one run at a time uses a directory: on one machine, on a shared disk, or in a bucket."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, lives, read_jsonl, running, until

from infra.run import bucket as buckets
from infra.run import claim
from infra.run.bucket import BucketError

HOLD = """
import sys, time
from infra.run.claim import claimed
with claimed(sys.argv[1]):
    print("claimed", flush=True)
    time.sleep(999)
"""


@pytest.fixture
def quick(monkeypatch):
    """Shorten the pauses between signs of life, and the time spent looking for them."""
    monkeypatch.setattr(claim, "SECONDS_BETWEEN_SIGNS", 0.05)
    monkeypatch.setattr(claim, "SECONDS_TO_LOOK", 0.5)
    monkeypatch.setattr(claim, "SECONDS_TO_ARBITRATE", 0.01)


@pytest.fixture
def said():
    return []


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Returns the name of a bucket on the stand-in for gcloud."""
    stub = tmp_path / "stub"
    (stub / "gs/bucket").mkdir(parents=True)
    monkeypatch.setenv("GCLOUD_STUB", str(stub))
    monkeypatch.setenv("PATH", f"{ROOT / '.ci'}:{os.environ['PATH']}")
    return "gs://bucket/run"


def directory(tmp_path, name="out"):
    (tmp_path / name).mkdir()
    return str(tmp_path / name)


@pytest.fixture
def no_locks(monkeypatch):
    """Make locking fail, as it does on some shared disks."""

    def refuse(*_):
        raise OSError(38, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def on_host(monkeypatch, name):
    monkeypatch.setattr(claim.socket, "gethostname", lambda: name)


def leave_claim(out, host):
    """Write the claim that a killed process leaves behind."""
    Path(out, "claim.json").write_text(
        json.dumps({"host": host, "pid": 7, "since": "noon", "signs": 3})
    )


def test_a_second_process_is_refused_until_the_first_ends(tmp_path, said):
    out = directory(tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, out], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "claimed\n"
        with pytest.raises(claim.InUse, match=f"process {first.pid} on .*choose another --out"):
            claim.claimed(out, say=said.append).__enter__()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stdout.close()
    # A killed process leaves its claim, but not its lock.
    assert os.listdir(out) == ["claim.json"]
    with claim.claimed(out, say=said.append):
        holder = json.loads(Path(out, "claim.json").read_text())
        assert holder["pid"] == os.getpid()
    assert os.listdir(out) == [] and said == []


def test_the_claim_of_another_machine_counts_while_it_changes(tmp_path, monkeypatch, quick, said):
    out = directory(tmp_path)
    leave_claim(out, "elsewhere")
    holder = json.loads(Path(out, "claim.json").read_text())
    is_over = threading.Event()

    # The other machine's clock does not matter: its claim counts because it changes.
    def live_elsewhere():
        while not is_over.wait(0.05):
            holder["signs"] += 1
            claim.write_claim(f"{out}/claim.json", "", holder)

    thread = threading.Thread(target=live_elsewhere)
    thread.start()
    try:
        with pytest.raises(claim.InUse, match="process 7 on elsewhere, running since noon"):
            claim.claimed(out, say=said.append).__enter__()
    finally:
        is_over.set()
        thread.join()
    assert len(said) == 1 and "process 7 on elsewhere" in said[0], said
    # The other process has ended, so the claim is free.
    with claim.claimed(out, say=said.append):
        assert json.loads(Path(out, "claim.json").read_text())["pid"] == os.getpid()


def test_a_run_that_ends_while_its_claim_is_looked_at_is_no_obstacle(tmp_path, quick):
    out = directory(tmp_path)
    leave_claim(out, "elsewhere")

    def end_elsewhere(_):
        Path(out, "claim.json").unlink()

    # The message comes before the wait: the other run ends in between.
    with claim.claimed(out, say=end_elsewhere):
        assert json.loads(Path(out, "claim.json").read_text())["pid"] == os.getpid()


def test_signs_of_life_are_given_while_a_claim_is_held(tmp_path, quick):
    out = directory(tmp_path)

    def signs():
        return claim.read_claim(f"{out}/claim.json", "").get("signs", 0)

    with claim.claimed(out):
        until(lambda: signs() >= 3, seconds=60)
    assert signs() == 0


def test_without_locks_the_claim_of_this_machine_is_looked_at_too(tmp_path, no_locks, quick, said):
    out = directory(tmp_path)
    with (
        claim.claimed(out, say=said.append),
        pytest.raises(claim.InUse, match=f"process {os.getpid()} on"),
    ):
        claim.claimed(out, say=said.append).__enter__()


def test_one_of_two_runs_that_start_at_once_is_refused(tmp_path, monkeypatch, no_locks, quick):
    out = directory(tmp_path)
    write = claim.write_claim

    def write_and_be_overtaken(path, bucket, mine):
        write(path, bucket, mine)
        write(path, bucket, mine | {"host": "elsewhere", "pid": 7})

    monkeypatch.setattr(claim, "write_claim", write_and_be_overtaken)
    with pytest.raises(claim.InUse, match="process 7 on elsewhere"):
        claim.claimed(out).__enter__()
    # The claim stays with the other process.
    assert claim.read_claim(f"{out}/claim.json", "")["pid"] == 7


def test_a_full_disk_does_not_refuse_a_run(tmp_path, monkeypatch, no_locks, quick):
    """If the claim cannot be written, the run goes on: a later sign of life may write it."""
    out = directory(tmp_path)
    leave_claim(out, "elsewhere")
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "no space left")))
    with claim.claimed(out):
        assert claim.read_claim(f"{out}/claim.json", "")["pid"] == 7
        assert os.replace.called


def test_an_ending_run_may_remove_the_next_claim(tmp_path, monkeypatch, no_locks, quick):
    out = directory(tmp_path)
    leave_claim(out, "elsewhere")
    write = claim.write_claim

    def write_and_be_removed(path, bucket, mine):
        write(path, bucket, mine)
        os.unlink(path)

    monkeypatch.setattr(claim, "write_claim", write_and_be_removed)
    with claim.claimed(out):
        assert claim.read_claim(f"{out}/claim.json", "") == {}


def test_a_lock_whose_claim_is_not_written_yet_counts(tmp_path):
    out = directory(tmp_path)
    with claim.locked(out, {}), pytest.raises(claim.InUse, match="that has just begun; let it end"):
        claim.claimed(out).__enter__()


FORK = """
import os, sys, time
from infra.run.claim import claimed
with claimed(sys.argv[1]):
    # Printed by the child, where the lock is already closed.
    if not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(999)
"""


def test_a_child_that_outlives_its_process_holds_no_lock(tmp_path, said):
    """A child that outlives its trainer, such as a worker of a reward function, does not keep the
    directory locked."""
    out = directory(tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-c", FORK, out], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    child = int(first.stdout.readline())
    try:
        first.kill()
        first.wait()
        with claim.claimed(out, say=said.append):
            assert said == []
    finally:
        os.kill(child, signal.SIGKILL)
        first.stdout.close()


@pytest.mark.parametrize("text", ["", "{", "[1]", "7"])
def test_a_claim_that_cannot_be_read_is_none(tmp_path, text):
    out = directory(tmp_path)
    Path(out, "claim.json").write_text(text)
    with claim.claimed(out):
        assert claim.read_claim(f"{out}/claim.json", "")["pid"] == os.getpid()


@pytest.mark.parametrize("host", ["there", "here"])
def test_directories_that_share_a_bucket_see_each_other(host, tmp_path, monkeypatch, bucket, said):
    """The other directory may be on another machine, or on this one."""
    monkeypatch.setattr(claim, "SECONDS_BETWEEN_SIGNS", 0.2)
    monkeypatch.setattr(claim, "SECONDS_TO_LOOK", 3)
    monkeypatch.setattr(claim, "SECONDS_TO_ARBITRATE", 0)
    here, there = directory(tmp_path, "here"), directory(tmp_path, "there")
    on_host(monkeypatch, "here")
    with claim.claimed(here, bucket):
        on_host(monkeypatch, host)
        with pytest.raises(claim.InUse, match="on here, running since"):
            claim.claimed(there, bucket, said.append).__enter__()
    # The first run has ended and removed its claim from the bucket, so the next one need not wait.
    said.clear()
    with claim.claimed(there, bucket, said.append):
        assert said == []


def test_a_claim_is_read_with_patience_and_its_signs_do_not_wait(
    tmp_path, monkeypatch, bucket, quick
):
    out = directory(tmp_path)
    other = {"host": "elsewhere", "pid": 7, "since": "noon", "signs": 3}
    claim.write_claim(f"{out}/claim.json", bucket, other)
    waited = []
    monkeypatch.setattr(buckets, "time", mock.Mock(sleep=waited.append))

    def fail(times):
        rule = {"match": "storage (cp|rm)", "stderr": "ERROR: HTTPError 503", "times": times}
        (tmp_path / "stub/fail").write_text(json.dumps(rule))

    fail(3)
    assert claim.read_claim(f"{out}/claim.json", bucket) == other
    assert waited == [2, 5, 10]
    # If the bucket cannot be reached, it is unknown whether there is a claim.
    fail(99)
    with pytest.raises(BucketError, match="503"):
        claim.claimed(out, bucket).__enter__()
    waited.clear()
    claim.write_claim(f"{out}/claim.json", bucket, other)
    with claim.signs_of_life(f"{out}/claim.json", bucket, other):
        pass
    assert waited == []


def test_a_sign_that_hangs_is_given_up(tmp_path, monkeypatch):
    """The next sign must come before another launch stops looking."""
    gcloud = tmp_path / "gcloud"
    gcloud.write_text("#!/bin/sh\nsleep 600\n")
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lost = claim.SECONDS_BETWEEN_SIGNS + claim.SECONDS_OF_A_SIGN
    assert lost + claim.SECONDS_BETWEEN_SIGNS < claim.SECONDS_TO_LOOK
    monkeypatch.setattr(claim, "SECONDS_OF_A_SIGN", 0.5)
    claim.write_claim(f"{tmp_path}/claim.json", "gs://bucket/run", {"signs": 3})


# ---------------------------------------------------------------- complete runs
@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_second_run_is_refused_and_the_first_goes_on(processes, tmp_path, tmp_path_factory):
    """While a run is paused with SIGSTOP, a second run in its directory is refused and changes
    nothing. The first run then continues to its end."""
    out = tmp_path / "run"
    flags = lives(tmp_path_factory, 2, "--eval_data none")

    def steps():
        return read_jsonl(out / "metrics.jsonl") if (out / "metrics.jsonl").exists() else []

    with running(out, flags, processes) as runs:
        assert until(lambda: len(steps()) >= 2, runs), Path(f"{out}.log").read_text()
        for process in runs:
            process.send_signal(signal.SIGSTOP)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        text = run_second(out, flags, processes, tmp_path / "second.log")
        assert f"{out} is in use by process {runs[0].pid} on" in text, text
        assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for process in runs:
            process.send_signal(signal.SIGCONT)
        assert [process.wait(300) for process in runs] == [0] * processes
    assert [row["step"] for row in steps()] == [1, 2, 3, 4, 5]
    assert not (out / "claim.json").exists()


def run_second(out, flags, processes, log):
    # The first run uses the default port.
    port = ["--coordinator=127.0.0.1:31999"] if processes > 1 else []
    with running(out, flags, processes, log=log, more=port) as runs:
        codes = [process.wait(300) for process in runs]
    text = log.read_text(errors="replace")
    assert codes[0] == 2 and all(codes), (codes, text)
    return text
