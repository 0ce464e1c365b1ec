"""launch.sh takes pods from nothing to results, on a stand-in for gcloud whose workers are
processes."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pods
import pytest
from conftest import ROOT, read_jsonl, run, shared_temp, without_times
from pods import ENDS, OFFLINE, POD_FLAGS, UNAVAILABLE, says, until_it_works, when, write
from safetensors.numpy import load_file

# pytest finds the fixture under this name.
cloud = pods.cloud


@pytest.fixture(autouse=True)
def one_at_a_time(tmp_path_factory):
    """Run one test at a time: all workers of all pods share this machine, and runs of several
    processes use the same port."""
    with open(shared_temp(tmp_path_factory) / "pods.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- a pod whose training only waits
PHASES = (
    "creating podgrpo-v6e-16, 4 hosts with 16 devices, in us-east5-b",
    "podgrpo-v6e-16 in us-east5-b is READY",
    "sending this tree to 4 workers",
    "installing there, about 2 minutes the first time",
    "starting train.py on 4 workers",
)


def test_setup_start_refusals_and_stop_reach_every_worker(cloud):
    """On a pod of four workers, which is created here, setup, start and stop reach every worker.
    While a run is going on, another run and another setup are refused."""
    homes = [cloud.stub / f"podgrpo-v6e-16/w{i}" for i in range(4)]
    # If this file exists, train.py only waits until it is stopped.
    write(cloud.stub / "idle", "")

    def all_train():
        return all((home / "token").exists() for home in homes)

    def refused_then_stopped():
        try:
            text = cloud.launch("v6e-16 run", POD_FLAGS, code=1)
            text += cloud.launch("v6e-16 setup", code=2)
            return text + cloud.launch("v6e-16 status")
        finally:
            assert cloud.launch("v6e-16 stop").count("] no run is active") == 4

    meanwhile = when(all_train, refused_then_stopped)
    text = cloud.launch("v6e-16", POD_FLAGS, code=143)
    said = meanwhile.result()
    phases = [text.find(f"launch.sh: {phase}") for phase in PHASES]
    assert phases == sorted(phases) and phases[0] >= 0, text
    assert said.count("a run is going on here") == 4, said
    assert said.count("already has a run") == 1, said
    assert said.count("] running") == 4, said
    for i, home in enumerate(homes):
        pod = home / "podgrpo"
        assert (pod / "train.py").read_bytes() == (ROOT / "train.py").read_bytes()
        assert (pod / ".env").stat().st_mode & 0o777 == 0o600
        assert len((home / "pip.log").read_text().splitlines()) == 1, "installed twice"
        assert (home / "token").read_text().strip() == "20", "the secret did not reach the run"
        assert (pod / "run.exit").read_text().startswith("143 "), "SIGTERM did not reach it"
        assert f"[w{i}] exit 143 " in text, text
    assert cloud.keeps_secrets(text + said), "a secret in a log, an argv or a file"
    # Only one call goes to a single worker: it reads the last lines of the worker that failed
    # first.
    calls = cloud.worker_calls()
    (of_one,) = (argv for argv in calls if "--worker=all" not in argv)
    assert any("tail -n 20 run.log" in word for word in of_one), calls
    assert "nothing is deleted" in cloud.launch("v6e-16 down", code=2)
    cloud.launch("v6e-16 down --yes")
    assert not homes[0].exists()


def test_setup_goes_without_an_env_file(cloud):
    (cloud.clone / ".env").unlink()
    assert "there is no .env to send" in cloud.launch("v6e-1 setup --name plain")
    assert not (cloud.stub / "plain/w0/podgrpo/.env").exists()
    assert "no run" in cloud.launch("v6e-1 status --name plain")


# ---------------------------------------------------------------- pods that train
@pytest.mark.slow
def test_a_pod_goes_from_nothing_to_a_checkpoint(cloud):
    """A pod with two workers and eight devices trains and leaves a checkpoint. Started again, it
    says that the run is finished."""
    homes = [cloud.stub / f"podgrpo-v4-16/w{i}" for i in range(2)]
    odd = """a "b" 'c' $HOME `d` \\e"""
    steps = 2
    start = ("v4-16", POD_FLAGS, f"--steps {steps} --system", [odd])
    text = cloud.launch(*start)
    assert "2 processes x 4 cpu devices, mesh {'dp': 1, 'fsdp': 8" in text, text
    assert "spans 2 hosts" in text, text
    text += cloud.launch(*start)
    assert "is finished" in text, text
    head = run("git", "-C", cloud.clone, "rev-parse", "HEAD").strip()
    for i, home in enumerate(homes):
        out = home / "podgrpo/out/arith-tiny"
        config = json.loads((out / "config.json").read_text())
        assert config["config"]["system"] == odd and config["commit"] == head, config
        assert len((home / "pip.log").read_text().splitlines()) == 1, "installed twice"
        assert (home / "podgrpo/.env").stat().st_mode & 0o777 == 0o600
        assert (home / "token").read_text().strip() == "20", "the secret did not reach the run"
        shards = os.listdir(out / f"step_{steps:06}")
        assert shards == [f"shards-0000{i}-of-00002.safetensors"]
        assert (out / "metrics.jsonl").exists() == (i == 0)
        assert (out / "final/model.safetensors").exists() == (i == 0)
    rows = read_jsonl(homes[0] / "podgrpo/out/arith-tiny/metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert cloud.keeps_secrets(text), "a secret in a log, an argv or a file"


@pytest.mark.slow
def test_the_kernels_are_tested_on_worker_0(cloud):
    text = cloud.launch("v6e-1 test --name plain -q tests/test_sampling.py -k draw_inverts")
    assert re.search("[1-9][0-9]* passed", text), text
    assert "pytest" in (cloud.stub / "plain/w0/pip.log").read_text(), "it was not installed"


@pytest.mark.slow
def test_all_workers_end_when_one_cannot_start(cloud):
    """If one worker cannot start, all workers end, although the others would wait for it."""
    cloud.launch("v4-16 setup --name fails")
    write(cloud.stub / "fails/w1/broken", "")
    text = cloud.launch("v4-16 run --name fails", POD_FLAGS, code=7)
    reason = "[w1] failed first, with exit code 7; its last lines:\nno such luck"
    assert reason in text, text
    assert "running" not in cloud.launch("v4-16 status --name fails")


@pytest.mark.slow
def test_all_workers_end_when_one_is_killed(cloud, record_property):
    log = cloud.stub / "fails/w0/podgrpo/run.log"

    def kill():
        cloud.gcloud("kill", "fails", "1", "train.py")
        return time.time()

    killed = when(lambda: says(log, "step 1/"), kill)
    text = cloud.launch("v4-16 --name fails", POD_FLAGS, "--steps 500", code=137)
    took = time.time() - killed.result()
    assert "[w1] failed first, with exit code 137" in text and took < 60, (took, text)
    assert "running" not in cloud.launch("v4-16 status --name fails")
    record_property("seconds from the kill to the end of all", f"{took:.0f}")


KEPT = ["step_000007", "step_000008"]


@pytest.mark.slow
def test_a_preempted_run_resumes_on_a_new_vm(cloud, tmp_path):
    """A preempted run resumes from the bucket on a new VM. It ends with the metrics and weights of
    an undisturbed run of two processes on this machine."""
    bucket = cloud.stub / "gs/bucket"
    bucket.mkdir(parents=True)
    calm = tmp_path / "calm"
    flags = (POD_FLAGS, "--steps 8 --out")
    cloud.launch("cpu --processes 2", *flags, calm, JAX_NUM_CPU_DEVICES="4")

    def preempt():
        cloud.gcloud("preempt", "spot")

    preempted = when(lambda: says(bucket / "run/metrics.jsonl", '"step": 2'), preempt)
    text = cloud.launch("v4-16 --name=spot --spot", *flags, "gs://bucket/run")
    preempted.result()
    assert "spot in us-central2-b is PREEMPTED" in text, text
    assert "resuming out/gs/bucket/run after step" in text, text
    wanted_metrics = without_times(read_jsonl(calm / "metrics.jsonl"))
    wanted = load_file(calm / "final/model.safetensors")
    for place in (cloud.stub / "spot/w0/podgrpo/out/gs/bucket/run", bucket / "run"):
        assert without_times(read_jsonl(place / "metrics.jsonl")) == wanted_metrics
        found = load_file(place / "final/model.safetensors")
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    both = {f"shards-0000{i}-of-00002.safetensors" for i in range(2)}
    assert sorted({path.parent.name for path in (bucket / "run").glob("step_*/*")}) == KEPT
    for step in KEPT:
        assert {path.name for path in (bucket / "run" / step).iterdir()} == both, step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_processes_of_this_machine_and_the_launcher_waits(cloud, tmp_path, name):
    """After Ctrl-C, or a SIGTERM to the launcher alone, both processes of `cpu --processes 2` save
    and end before the launcher does."""
    number = signal.Signals[name]
    out = tmp_path / "run"
    group = tmp_path / "group"
    # Ctrl-C reaches a process group. The launcher gets its own, so that pytest goes on.
    alone = (
        "import os, signal, sys; os.setsid(); signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "open(sys.argv[1], 'w').write(str(os.getpid())); "
        "os.execvp('bash', ['bash', *sys.argv[2:]])"
    )

    def interrupt():
        send = os.killpg if name == "SIGINT" else os.kill
        send(int(group.read_text()), number)

    interrupted = when(lambda: says(out / "metrics.jsonl", '"step": 2'), interrupt)
    text = cloud.launch(
        "cpu --processes 2",
        *(POD_FLAGS, "--steps 500 --out", out),
        code=128 + number,
        shell=[sys.executable, "-c", alone, group],
        JAX_NUM_CPU_DEVICES="4",
    )
    interrupted.result()
    assert f"[p0] ended by {name}" in text, text
    last = read_jsonl(out / "metrics.jsonl")[-1]["step"]
    # Each process has saved its part.
    assert 2 <= last < 500 and len([*(out / f"step_{last:06d}").iterdir()]) == 2, text


@pytest.mark.slow
def test_a_start_clears_only_a_stale_lock(cloud):
    """A start removes libtpu's lock file if a killed process left it, but not if a live process
    holds it."""
    lock = Path("/tmp/libtpu_lockfile")
    if lock.exists():
        pytest.skip(f"{lock} is in use here")
    cloud.launch("v6e-1 setup --name lock")
    with lock.open("w"):
        cloud.launch("v6e-1 run --name lock --lr none", code=2)
        assert lock.exists(), "it was held"
    text = cloud.launch("v6e-1 run --name lock --lr none", code=2)
    assert "invalid float value" in text, text
    assert not lock.exists()


def test_a_connection_that_breaks_is_made_again(cloud):
    """If the connection breaks, the launcher connects again, even if gcloud fails in between, and
    prints no line twice."""
    write(cloud.stub / "idle", "")
    cloud.launch("v4-16 setup --name pod")
    homes = [cloud.stub / f"pod/w{i}" for i in range(2)]

    def both_have_failed():
        assert (cloud.stub / "fail").read_text().count('"times": 0') == 2

    def breaks():
        cloud.fail("describe", UNAVAILABLE)
        cloud.fail("describe", OFFLINE)
        for worker in "01":
            until_it_works(lambda worker=worker: cloud.gcloud("kill", "pod", worker, "tail -n"))
        until_it_works(both_have_failed)
        cloud.launch("v4-16 stop --name pod")

    broken = when(lambda: all(says(home / "said", "waits") for home in homes), breaks)
    text = cloud.launch("v4-16 run --name pod", POD_FLAGS, code=143)
    broken.result()
    assert "gcloud fails: ERROR: (gcloud.x) UNAVAILABLE" in text, text
    assert "gcloud fails: ERROR: (gcloud.x) There was a problem refreshing" in text, text
    assert "the connection broke; following again" in text, text
    for worker in "w0", "w1":
        assert text.count(f"[{worker}] waits") == 1, text
        assert text.count(f"[{worker}] exit 143") == 1, text
    # `logs` shows only the end of a long log.
    log = homes[0] / "podgrpo/run.log"
    log.write_text("".join(f"line {n}\n" for n in range(200)))
    text = cloud.launch("v4-16 logs --name pod", code=143)
    assert "[w0] line 150\n" in text and "[w0] line 149\n" not in text, text
    assert "pod in us-central2-b may still exist and cost money" in text, text


@pytest.mark.slow
def test_results_come_home_and_the_vm_goes(cloud):
    """With --down, a finished run brings home final/, config.json and *.jsonl, but no checkpoint,
    and its VM is deleted."""
    cloud.fail(
        "worker.sh results", "ERROR: (gcloud.x) [/usr/bin/ssh] exited with return code [255]."
    )
    flags = (POD_FLAGS, "--steps 2 --out", ["out/my run"])
    text = cloud.launch("v4-8 --down --name home", *flags)
    assert "the results of the run are in out/home/my run" in text and "deleting home" in text, text
    assert "may still exist" not in text and not (cloud.stub / "home").exists(), text
    assert sorted(os.listdir(cloud.clone / "out/home")) == ["my run"]
    results = cloud.clone / "out/home/my run"
    names = ["config.json", "final", "metrics.jsonl", "samples.jsonl"]
    assert sorted(os.listdir(results)) == names
    assert [row["step"] for row in read_jsonl(results / "metrics.jsonl")] == [1, 2]
    assert (results / "final/model.safetensors").stat().st_size > 1e5
    # The VM of a run that failed stays.
    text = cloud.launch("v4-8 --down --name home", POD_FLAGS, ENDS, code=2)
    assert (cloud.stub / "home").exists() and "may still exist and cost money" in text, text
    text = cloud.launch("v4-8 fetch --name home", code=1)
    assert "failed" in text or "->" in text, text


def test_fetch_brings_what_there_is_and_a_trace(cloud):
    """While the run goes on, neither its checkpoints nor its compiled programs are copied."""
    cloud.launch("v6e-1 setup --name vm")
    pod = cloud.stub / "vm/w0/podgrpo"
    (pod / "run.flags").write_bytes(b"--out\0out/my run\0")
    trace = "profile/plugins/profile/now/host.xplane.pb"
    for name in ("config.json", "metrics.jsonl", trace, "step_000001/shards", "compiled/program"):
        write(pod / "out/my run" / name, name)
    cloud.launch("v6e-1 fetch --name vm")
    results = cloud.clone / "out/vm/my run"
    assert sorted(os.listdir(results)) == ["config.json", "metrics.jsonl", "profile"]
    assert (results / trace).read_text() == trace


def test_results_of_another_run_are_kept(cloud):
    """A run on a later VM of the same name may have the same --out."""
    cloud.launch("v6e-1 setup --name vm")
    pod = cloud.stub / "vm/w0/podgrpo"
    (pod / "run.flags").write_bytes(b"--out\0out/run\0")
    results = cloud.clone / "out/vm"
    for lr, name in (("1e-6", "metrics.jsonl"), ("1e-6", "final/w"), ("3e-6", "metrics.jsonl")):
        write(pod / "out/run/config.json", lr)
        write(pod / "out/run" / name, lr)
        cloud.launch("v6e-1 fetch --name vm")
        assert (results / "run" / name).read_text() == lr
    old, new = sorted(results.iterdir(), reverse=True)
    assert (old.name[:8], new.name) == ("run.old-", "run")
    assert (old / "final/w").read_text() == (old / "metrics.jsonl").read_text() == "1e-6"


def test_fetch_makes_the_page_of_a_run_where_it_can(cloud):
    pytest.importorskip("matplotlib")
    cloud.launch("v6e-1 setup --name vm")
    pod = cloud.stub / "vm/w0/podgrpo"
    (pod / "run.flags").write_bytes(b"--out\0out/my run\0")
    write(pod / "out/my run/metrics.jsonl", '{"step": 1, "nll": 2.5}\n')
    results = cloud.clone / "out/vm/my run"
    hint = r"to look at them: bash launch.sh report out/vm/my\ run"
    # Without .venv, nothing is installed for the page.
    text = cloud.launch("v6e-1 fetch --name vm")
    assert hint in text and os.listdir(results) == ["metrics.jsonl"], text
    write(cloud.clone / ".venv/installed", "")
    python = cloud.clone / ".venv/bin/python"
    write(python, f'#!/bin/sh\nexec {sys.executable} "$@"\n', 0o755)
    text = cloud.launch("v6e-1 fetch --name vm")
    assert "\nout/vm/my run/report.html\n" in text and hint not in text, text
    assert "</html>" in (results / "report.html").read_text()
    # The results have come home even if their page fails.
    write(python, "#!/bin/sh\nexit 3\n", 0o755)
    text = cloud.launch("v6e-1 fetch --name vm")
    assert hint in text and "the results of the run are in out/vm/my run" in text, text


def test_a_run_that_takes_its_time_to_start_is_followed(cloud):
    """A run that starts slowly is followed: the launcher does not take it for dead, nor show the
    log of the run before."""
    cloud.launch("v6e-1 setup --name late")
    write(cloud.stub / "late/w0/broken", "")
    cloud.launch("v6e-1 run --name late", POD_FLAGS, code=7)
    # From here on, a run begins some seconds after the call that starts it.
    slow = f'#!/bin/sh\n/bin/sleep 3\nexec {shutil.which("setsid")} "$@"\n'
    write(cloud.stub / "bin/setsid", slow, 0o755)
    try:
        text = cloud.launch("v6e-1 run --name late", POD_FLAGS, code=7)
    finally:
        (cloud.stub / "bin/setsid").unlink()
    assert text.count("[w0] no such luck") == 1, text


def test_a_vm_stays_until_its_model_is_in_the_bucket(cloud):
    """With --down, a VM is deleted only once the marker of final/ in the bucket belongs to this
    run, even if train.py exits with code 0."""
    (cloud.stub / "gs/bucket").mkdir(parents=True)
    write(cloud.stub / "finishes", "")
    start = ("v6e-1 --name vm --down", POD_FLAGS, "--out gs://bucket/run")
    text = cloud.launch(*start, code=1)
    assert "the bucket does not have the results" in text and "deleting" not in text, text
    assert "vm in us-east5-b may still exist and cost money" in text, text
    assert (cloud.stub / "vm/w0").exists()
    # The bucket has the model of an earlier run instead.
    marker = cloud.stub / "gs/bucket/run/final/podgrpo.json"
    write(marker, '{"step": 1}')
    text = cloud.launch("v6e-1 fetch --name vm", code=1)
    assert "gs://bucket/run/final is not the model of this run" in text, text
    write(marker, '{"step": 2}\n')
    text = cloud.launch(*start)
    assert "the results of the run are in gs://bucket/run" in text and "deleting vm" in text, text
    assert not (cloud.stub / "vm").exists() and "may still exist" not in text, text


def test_the_same_start_twice_at_once_is_one_run(cloud):
    """If gcloud repeats a call while the first one is still installing, only one run starts. A
    different run is refused."""
    cloud.launch("v6e-1 setup --name vm")
    write(cloud.stub / "idle", "")
    pod = cloud.stub / "vm/w0/podgrpo"
    command = "--command=cd podgrpo; bash infra/cloud/worker.sh start 7.7 --lr 1"
    ssh = ["compute", "tpus", "tpu-vm", "ssh", "vm", "--zone=us-east5-b", command]
    with open(pod / "setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        calls = [when(lambda: True, lambda: cloud.gcloud(*ssh)) for _ in range(2)]
        time.sleep(3)  # until both calls have checked whether this run exists
    for call in calls:
        call.result(60)
    assert when(lambda: says(cloud.stub / "vm/w0/said", "waits"), lambda: True).result(60)
    other = [word.replace("7.7", "8.8") for word in ssh]
    with pytest.raises(AssertionError, match="a run is going on here"):
        cloud.gcloud(*other)
    assert (pod / "run.id").read_text() == "7.7\n"
    cloud.launch("v6e-1 stop --name vm")


def test_a_vm_that_is_repaired_is_waited_for(cloud):
    """A VM under repair is waited for, even without --spot. A run that survived the repair is
    followed, not started again."""
    write(cloud.stub / "idle", "")
    cloud.launch("v6e-1 setup --name pod")
    home = cloud.stub / "pod/w0"

    def repair():
        write(cloud.stub / "pod/state", "REPAIRING")
        # Break the connection, if there is one yet.
        with contextlib.suppress(AssertionError):
            cloud.gcloud("kill", "pod", "0", "tail -n")
        # Let the launcher wait for a while: it must have seen this state before the VM is READY.
        until_it_works(lambda: seen(5))
        write(cloud.stub / "pod/state", "READY")
        assert when(lambda: cloud.count("worker.sh follow") == 2, lambda: True).result(60)
        until_it_works(lambda: cloud.launch("v6e-1 stop --name pod"))

    def seen(times):
        assert cloud.count(" describe ") > looked + times

    looked = cloud.count(" describe ")
    repaired = when(lambda: says(home / "said", "waits"), repair)
    text = cloud.launch("v6e-1 run --name pod", POD_FLAGS, code=143)
    repaired.result()
    assert "pod is REPAIRING; following it again" in text, text
    assert "pod in us-east5-b is READY" in text and "starting train.py" in text, text
    assert text.count("starting train.py") == 1, "the run was started again"
