"""launch.sh: what it prints and refuses, and pods on .ci/gcloud, which plays Google Cloud with
folders for workers' homes and processes for what runs there."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, arguments, read_jsonl, run, without_times
from safetensors.numpy import load_file

import train

# The entropy bonus moves the weights in every step, also where all answers score the same.
POD_FLAGS = (
    "--model tiny --data arith --eval_data none --max_prompt 80 --max_answer 8 --batch 1 --npq 4 "
    "--minibatches 1 --sft_steps 0 --save_every 1 --entropy_bonus 0.1"
)
# Workers take these from the tests, so that they find what other processes compiled.
COMPILATION = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "XLA_FLAGS",
)
# The launcher and its workers wait a fifth of what they say.
SLEEP = '#!/bin/sh\nexec /bin/sleep "$(awk "BEGIN { print $1 / 5 }")"\n'


# ---------------------------------------------------------------- the stand-in for Google Cloud
def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@dataclasses.dataclass
class Cloud:
    clone: Path  # a fresh clone of this tree, with a .env in it
    stub: Path  # the folder of .ci/gcloud: a folder NAME for each VM, with homes w0, w1, ...
    home: Path  # of who launches

    def launch(self, *flags, code=0, clone=None, **env):
        """The output of `bash launch.sh FLAGS` in the clone, which must end with this exit code."""
        clone = clone or self.clone
        env = {
            "PATH": f"{self.stub}/bin:{ROOT}/.ci:{os.environ['PATH']}",
            "PYTHON": f"{self.stub}/bin/python3.12",
            "REAL_PYTHON": sys.executable,
            "GCLOUD_STUB": str(self.stub),
            "HOME": str(self.home),
        } | env
        return run("bash", clone / "launch.sh", *arguments(flags), code=code, cwd=clone, **env)

    def gcloud(self, *words):
        run(ROOT / ".ci/gcloud", *words, GCLOUD_STUB=str(self.stub))

    def calls(self):
        """The argv of every call of gcloud."""
        log = self.stub / "calls.log"
        return read_jsonl(log) if log.exists() else []

    def worker_calls(self):
        return [argv for argv in self.calls() if argv[3] in ("ssh", "scp")]

    def fail(self, pattern, text, times=1):
        """Let so many calls of gcloud, those that match, fail with a text on stderr."""
        rule = {"match": pattern, "stderr": text, "times": times}
        write(self.stub / "fail", json.dumps(rule) + "\n")

    def keeps_secrets(self, text):
        """Is no value of .env in the text, in a file of workers, or in an argv of calls.log?"""
        secrets = re.findall("[0-9a-f]{16}", (self.clone / ".env").read_text())
        assert len(secrets) == 2
        for path in self.stub.rglob("*"):
            if path.is_file() and path.name != ".env":
                text += path.read_text(errors="replace")
        return not any(secret in text for secret in secrets)


def clone_of_this_tree(clone):
    """A commit of the tree as git sees it, and a .env with random secrets beside it."""
    try:
        files = run("git", "ls-files", "-coz", "--exclude-standard").split("\0")
    except (OSError, AssertionError):
        pytest.skip("needs git, and a checkout")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b.c commit -qm all"):
        run("git", "-C", clone, *command.split())
    key = os.urandom(8).hex()
    token = os.urandom(8).hex()
    write(clone / ".env", f'WANDB_API_KEY="key {key}"\nHF_TOKEN=tok${token}\n')


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path / "clone", tmp_path / "stub", tmp_path / "home")
    clone_of_this_tree(cloud.clone)
    cloud.home.mkdir()
    worker_python = (ROOT / "tests/worker_python.sh").read_text()
    write(cloud.stub / "bin/python3.12", worker_python, 0o755)
    write(cloud.stub / "bin/sleep", SLEEP, 0o755)
    environment = {name: os.environ[name] for name in COMPILATION if name in os.environ}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "REAL_PYTHON": sys.executable,
    }
    lines = [f"{name}={value}\n" for name, value in environment.items()]
    write(cloud.stub / "worker.env", "".join(lines))
    yield cloud
    # Nothing that a failed test has left may go on: neither runs, nor the metadata servers.
    for vm in cloud.stub.glob("*/vm.json"):
        cloud.gcloud("preempt", vm.parent.name)
    shutil.rmtree(cloud.stub)


def says(path, text):
    return path.exists() and text in path.read_text(errors="replace")


def when(condition, act):
    """The Future of what act() returns, which a thread calls once the condition holds."""
    future = Future()

    def wait():
        try:
            while not condition():
                time.sleep(0.1)
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return future


# ---------------------------------------------------------------- dry runs, and mistakes
def test_launcher_is_bash_3_2():
    """macOS has no newer bash."""
    source = (ROOT / "launch.sh").read_text()
    newer = ["mapfile", "readarray", "declare -A", ",,}", "^^}", "wait -n", "&>>", "|&", "coproc"]
    found = [word for word in newer if word in source]
    assert not found, f"bash 3.2 has no {found}"


def test_shellcheck_finds_nothing():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    scripts = "launch.sh .ci/run .ci/slurm .ci/slurm_job tests/worker_python.sh"
    run("shellcheck", *scripts.split())


def test_dry_run_knows_hosts_and_devices_of_every_type(cloud):
    # fmt: off
    types = {
        "v4-8": (1, 4), "v4-16": (2, 8), "v4-64": (8, 32),
        "v5p-8": (1, 4), "v5p-16": (2, 8),
        "v6e-1": (1, 1), "v6e-8": (1, 8), "v6e-16": (4, 16), "v6e-256": (64, 256),
        "v5litepod-8": (1, 8), "v5litepod-16": (4, 16),
    }
    # fmt: on
    for name, (hosts, devices) in types.items():
        text = cloud.launch("--dry-run", name, "--batch 1").replace("\\ ", " ")
        flags = f"--require_processes {hosts} --require_devices {devices} --start_timeout 900"
        assert f"{flags} --model Qwen/" in text, text
        # What the user says comes after what the launcher says, and so it counts.
        assert text.rindex("--batch 1") > text.rindex("--max_answer 1024"), text
        words = ("create", "ssh", "scp")
        order = [text.index(f"gcloud compute tpus tpu-vm {word}") for word in words]
        assert order == sorted(order), text
    assert not cloud.calls(), "gcloud was called"


def test_dry_run_speaks_to_all_workers(cloud):
    # setup: is a run going on, scp, install; run: start, follow; logs: was a run started, follow
    calls_of = {"": 5, "setup": 3, "run": 2, "logs": 2, "status": 1, "stop": 1}
    for action, count in calls_of.items():
        text = cloud.launch("--dry-run v6e-16", action)
        calls = re.findall("^gcloud compute tpus tpu-vm (?:ssh|scp) .*", text, re.M)
        assert len(calls) == count, (action, text)
        assert all(" --worker=all " in call for call in calls), (action, text)
    assert " --worker=0 " in cloud.launch("--dry-run v6e-16 test")


def test_flags_reach_a_worker_as_they_were_given(cloud):
    """Through two shells: the one that reads the dry run's line, and the worker's."""
    odd = "it's $HOME `d` \\"
    text = cloud.launch("--dry-run v6e-16", ["--system", odd])
    (line,) = [line for line in text.splitlines() if "worker start" in line.replace("\\ ", " ")]
    (command,) = [word for word in shlex.split(line) if word.startswith("--command=")]
    assert shlex.split(command)[-2:] == ["--system", odd]


def test_dry_run_prints_commands_of_this_machine_and_slurm(cloud):
    assert "train.py --plan v6e-8 --model Qwen/" in cloud.launch("--dry-run plan v6e-8 --lr 1")
    assert "train.py --plan here --lr 1" in cloud.launch("--dry-run plan --lr 1")
    slurm = cloud.launch("--dry-run slurm --ntasks-per-node 2 --lr 1")
    assert "--ntasks-per-node=2" in slurm
    tests = cloud.launch("--dry-run test -k draws")
    assert "-r " + str(cloud.clone / "tests/requirements.txt") in tests, tests
    assert "-m pytest -n 2 --dist worksteal --durations 15 -k draws" in tests, tests
    # A shell reads back what is printed, with what is odd in it.
    odd = ["--system", "it's $HOME"]
    printed = cloud.launch("--dry-run cpu", odd).splitlines()[-1]
    python = f"{cloud.clone}/.venv/bin/python"
    assert shlex.split(printed)[-5:] == [python, "-u", f"{cloud.clone}/train.py", *odd]
    assert not (cloud.clone / ".venv").exists(), "something ran"


def test_setup_brings_a_python_where_all_are_old(cloud, tmp_path):
    old = tmp_path / "old"
    for name in ("python3", "python3.11", "python3.12"):
        write(old / name, "#!/bin/sh\nexit 1\n", 0o755)
    text = cloud.launch("--dry-run setup", PYTHON="", PATH=f"{old}:{os.environ['PATH']}")
    assert "pip install -q --user uv" in text and "uv venv" in text, text


def test_mistakes_in_the_call_are_told_in_one_line(cloud):
    assert "launch.sh cpu" in cloud.launch(code=2)
    mistakes = {
        "v9-8": "unknown command v9-8",
        "v6e-8 --zone": "needs a value",
        "v6e-8 --dry-run": "goes first",
        "v6e-8 --spot down": "down is no flag",
        "v6e-8 down now": "down does not take now",
        "cpu --processes 0": "not a number of 1 or more",
        "cpu --batch 1 --npq 1": "npq = 1",
    }
    for call, wanted in mistakes.items():
        text = cloud.launch(call, code=2)
        assert text.count("\n") == 1 and wanted in text, text


# ---------------------------------------------------------------- what gcloud refuses
# What gcloud prints when asked to create a VM -> what the launcher says to do.
# fmt: off
REFUSALS = {
    "PERMISSION_DENIED: Cloud TPU API has not been used in project p": "gcloud services enable tpu",
    "PERMISSION_DENIED: Permission denied on 'locations/a'":
        "the role TPU Admin, or try another --zone",
    "RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProject' has been exceeded": "or try --spot",
    "{ code: 9, Insufficient reserved capacity. [EID: 0x1]":
        "the reservation is elsewhere, or full",
    "{ code: 8, There is no more capacity in the zone a": "a has no v6e-8 left",
    "INVALID_ARGUMENT: the accelerator v6e-8 was not found in zone a": "a offers no v6e-8",
    "SSH Key is not present in the SSH agent.": "ssh-add",
}
# fmt: on


def test_refusals_to_create_come_with_advice(cloud):
    """Each is shown in gcloud's own words, and the next zone is tried."""
    for number, (said, wanted) in enumerate(REFUSALS.items()):
        refusal = f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {said}"
        cloud.fail("create", refusal)
        text = cloud.launch(f"v6e-8 up --zone a,us-east5-b --name vm{number}")
        assert said in text and wanted in text, text
    cloud.fail("create", refusal, times=9)
    text = cloud.launch("v6e-8 up --name none --zone a,b", code=1)
    assert text.count("ssh-add") == 2, text


def test_login_and_project_are_asked_for(cloud):
    wanted = {"account": "log in: gcloud auth login", "project": "gcloud config set project"}
    for setting, advice in wanted.items():
        write(cloud.stub / setting, "")
        assert advice in cloud.launch("v6e-8 up --name none", code=1)
        (cloud.stub / setting).unlink()


def test_gcloud_that_is_not_installed_is_named(cloud, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in ("bash", "dirname", "mktemp", "rm", "cat", "sed", "tr", "cut", "grep"):
        (bare / tool).symlink_to(shutil.which(tool))
    assert "cloud.google.com/sdk/docs" in cloud.launch("v6e-8 status", code=2, PATH=str(bare))


def test_a_vm_that_is_not_there_is_looked_for_in_all_zones(cloud):
    text = cloud.launch("v6e-8 stop --name none", code=2)
    assert "there is no none in us-east5-b" in text


def test_a_queued_resource_is_made_and_deleted_with_its_vm(cloud):
    cloud.launch("v6e-8 up --queued --name qr")
    assert (cloud.stub / "qr/w0").exists()
    cloud.launch("v6e-8 down --queued --name qr --yes")
    assert not (cloud.stub / "queued/qr.json").exists()
    assert not (cloud.stub / "qr").exists()


# ---------------------------------------------------------------- a pod whose training only waits
def test_setup_start_refusals_and_stop_reach_every_worker(cloud):
    """Of a pod of four from nothing, whose training only waits until it is stopped."""
    homes = [cloud.stub / f"podgrpo-v6e-16/w{i}" for i in range(4)]
    write(cloud.stub / "idle", "")

    def all_train():
        return all((home / "token").exists() for home in homes)

    def refused_then_stopped():
        try:
            text = cloud.launch("v6e-16 run", POD_FLAGS, code=1)
            text += cloud.launch("v6e-16 setup", code=2)
            return text + cloud.launch("v6e-16 status")
        finally:
            cloud.launch("v6e-16 stop")

    meanwhile = when(all_train, refused_then_stopped)
    text = cloud.launch("v6e-16", POD_FLAGS, code=143)
    said = meanwhile.result()
    assert said.count("a run is going on here") == 4, said
    assert said.count("a run is going on there") == 1, said
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
    # Only the last lines of the one that failed first are asked of one worker.
    calls = cloud.worker_calls()
    (of_one,) = (argv for argv in calls if "--worker=all" not in argv)
    assert any("tail -n 20 run.log" in word for word in of_one), calls
    assert "nothing is deleted" in cloud.launch("v6e-16 down", code=2)
    cloud.launch("v6e-16 down --yes")
    assert not homes[0].exists()


def test_setup_goes_without_a_env_file(cloud):
    (cloud.clone / ".env").unlink()
    assert "no .env is here" in cloud.launch("v6e-1 setup --name plain")
    assert not (cloud.stub / "plain/w0/podgrpo/.env").exists()
    assert "no run" in cloud.launch("v6e-1 status --name plain")


# ---------------------------------------------------------------- pods that train
@pytest.mark.slow
def test_a_pod_goes_from_nothing_to_a_checkpoint(cloud):
    """Four workers in homes of their own, sixteen devices; started again, the run is finished."""
    homes = [cloud.stub / f"podgrpo-v6e-16/w{i}" for i in range(4)]
    odd = """a "b" 'c' $HOME `d` \\e"""
    steps = 3
    start = ("v6e-16", POD_FLAGS, f"--steps {steps} --system", [odd])
    text = cloud.launch(*start)
    assert "4 processes x 4 cpu devices, mesh {'dp': 1, 'fsdp': 16" in text, text
    assert "spans 4 hosts" in text, text
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
        assert shards == [f"shards-0000{i}-of-00004.safetensors"]
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
    """The others wait for it."""
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


@pytest.mark.slow
def test_a_preempted_run_resumes_on_a_new_vm(cloud, tmp_path):
    """From the bucket: metrics and weights of the undisturbed run, of two processes here."""
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
    assert "spot is PREEMPTED" in text, text
    assert "resuming out/gs/bucket/run after step" in text, text
    wanted_metrics = without_times(read_jsonl(calm / "metrics.jsonl"))
    wanted = load_file(calm / "final/model.safetensors")
    for place in (cloud.stub / "spot/w0/podgrpo/out/gs/bucket/run", bucket / "run"):
        assert without_times(read_jsonl(place / "metrics.jsonl")) == wanted_metrics
        found = load_file(place / "final/model.safetensors")
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    both = {f"shards-0000{i}-of-00002.safetensors" for i in range(2)}
    for step in ("step_000007", "step_000008"):
        assert {path.name for path in (bucket / "run" / step).iterdir()} == both, step


@pytest.mark.slow
def test_a_bucket_loses_nothing(cloud, tmp_path, monkeypatch):
    """An evaluation alone is sent too; what is newer here, as nothing could be sent, stays."""
    (cloud.stub / "gs/other").mkdir(parents=True)
    ours = tmp_path / "out/gs/other/run"
    sent = cloud.stub / "gs/other/run"
    monkeypatch.setenv("PATH", f"{ROOT}/.ci:{os.environ['PATH']}")
    monkeypatch.setenv("GCLOUD_STUB", str(cloud.stub))
    flags = arguments(["--steps 0 --sft_steps 0 --eval_n 8 --max_answer 8 --out gs://other/run"])
    run(sys.executable, ROOT / "train.py", *flags, cwd=tmp_path)
    assert "eval/solved" in read_jsonl(sent / "metrics.jsonl")[0]
    (ours / "metrics.jsonl").write_text("newer")
    (ours / "samples.jsonl").unlink()
    with contextlib.chdir(tmp_path):
        assert train.mirror(train.Config(out="out/gs/other/run"), back=True)
    assert (ours / "metrics.jsonl").read_text() == "newer"
    samples = (ours / "samples.jsonl").read_bytes()
    assert samples == (sent / "samples.jsonl").read_bytes() != b""


@pytest.mark.slow
def test_a_start_clears_only_a_stale_lock(cloud):
    """The lock of libtpu, which a killed process leaves, and a living one holds."""
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


def test_a_run_that_takes_its_time_to_start_is_followed(cloud):
    """Its log is not that of the run before, nor is it taken for dead before it has begun."""
    cloud.launch("v6e-1 setup --name late")
    write(cloud.stub / "late/w0/broken", "")
    cloud.launch("v6e-1 run --name late", POD_FLAGS, code=7)
    # From here a worker's run begins some seconds after the call that starts it.
    slow = f'#!/bin/sh\n/bin/sleep 3\nexec {shutil.which("setsid")} "$@"\n'
    write(cloud.stub / "bin/setsid", slow, 0o755)
    try:
        text = cloud.launch("v6e-1 run --name late", POD_FLAGS, code=7)
    finally:
        (cloud.stub / "bin/setsid").unlink()
    assert text.count("[w0] no such luck") == 1, text
