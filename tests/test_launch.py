"""launch.sh on a stand-in for gcloud: what it prints, refuses and costs, and VMs that are
preempted."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pods
import pytest
from conftest import ROOT, arguments, run, until
from pods import ENDS, OFFLINE, POD_FLAGS, SLEEP, UNAVAILABLE, until_it_works, write

# pytest finds the fixture under this name.
cloud = pods.cloud


# ---------------------------------------------------------------- dry runs, and mistakes
def test_launcher_is_bash_3_2():
    """The launcher uses nothing newer than bash 3.2, the bash of macOS."""
    scripts = [ROOT / "launch.sh", ROOT / "infra/cloud/gcloud.sh", ROOT / "infra/cloud/cuda.sh"]
    source = "".join(script.read_text() for script in scripts)
    newer = ["mapfile", "readarray", "declare -A", ",,}", "^^}", "wait -n", "&>>", "|&", "coproc"]
    newer += ["local -n", "declare -n", "[[ -v", "@Q}", "[-1]", "printf '%(", "${EPOCH"]
    found = [word for word in newer if word in source]
    assert not found, f"bash 3.2 has no {found}"


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=Path(sys.executable).parent)
    if not shellcheck:
        pytest.skip("shellcheck is not installed")
    scripts = (
        "launch.sh infra/cloud/worker.sh .ci/run .ci/slurm .ci/slurm_job tests/worker_python.sh"
    )
    run(shellcheck, "-x", *scripts.split(), cwd=ROOT)


@contextlib.contextmanager
def stubborn_run(tmp_path):
    """In the context, a run counts its SIGTERMs in the file `terms`, and does not end. Yields (its
    process, a function that calls worker.sh with these words; there, sleep takes no time)."""
    scripts = tmp_path / "infra/cloud"
    shutil.copytree(ROOT / "infra/cloud", scripts)
    commands = tmp_path / "bin"
    # When SIGKILL has been sent, give the processes some time to end.
    sleep = "echo >>slept; case $(wc -l <slept) in 3[1-9] | 60[1-9]) /bin/sleep 0.2 ;; esac"
    for name, line in ("curl", "echo 0"), ("sleep", sleep):
        write(commands / name, f"#!/bin/sh\n{line}\n", 0o755)
    write(tmp_path / "run.id", "7.7\n")
    (tmp_path / "ready").unlink(missing_ok=True)

    def is_ready():
        assert (tmp_path / "ready").exists()

    def call(words):
        path = f"{commands}:{os.environ['PATH']}"
        words = words.split() if isinstance(words, str) else words
        return run("bash", scripts / "worker.sh", *words, PATH=path)

    busy = "trap 'echo >>terms' TERM; exec 9>run.lock; flock 9; echo >ready"
    busy += "; while :; do /bin/sleep 1; done"
    with subprocess.Popen(["bash", "-c", busy], cwd=tmp_path, start_new_session=True) as process:
        try:
            write(tmp_path / "run.pid", str(process.pid))
            until_it_works(is_ready)
            yield process, call
        finally:
            process.kill()


@pytest.mark.parametrize("words, seconds", [("stop", 600), ("stop 7.7 1", 30), ("stop 8.8 1", 0)])
def test_stop_leaves_time_to_save(tmp_path, words, seconds):
    """A user's stop kills a run after ten minutes, so that it can save. The launcher's stop names
    the run, which waits for a worker that has ended, and kills it after 30 seconds."""
    with stubborn_run(tmp_path) as (process, call):
        text = call(words)
        assert seconds or process.poll() is None
    slept = tmp_path / "slept"
    # After SIGKILL, the lock may be held for a moment.
    assert seconds <= (len(slept.read_text()) if slept.exists() else 0) <= seconds + 5
    assert text.count("another stop ends it at once") == (seconds == 600)


def test_a_stop_that_gcloud_repeats_sends_one_sigterm(tmp_path):
    """A second SIGTERM would cut a save short."""
    terms, known = tmp_path / "terms", tmp_path / "run.stop"
    with stubborn_run(tmp_path) as (_, call):
        call(["stop", "", "1"])
        assert terms.read_text() == "\n" and known.read_text() == "1\n"
    shutil.rmtree(tmp_path / "infra")
    with stubborn_run(tmp_path) as (_, call):
        call(["stop", "", "1"])
        assert terms.read_text() == "\n"
    # Both calls have waited for ten minutes.
    assert len((tmp_path / "slept").read_text()) >= 1200


def test_dry_run_knows_hosts_and_devices_of_every_type(cloud):
    # fmt: off
    types = {
        "v4-8": (1, 4), "v4-16": (2, 8), "v4-64": (8, 32),
        "v5p-8": (1, 4), "v5p-16": (2, 8),
        "v6e-1": (1, 1), "v6e-8": (1, 8), "v6e-16": (4, 16), "v6e-256": (64, 256),
        "v5litepod-8": (1, 8), "v5litepod-16": (4, 16), "v5e-16": (4, 16), "v4-384": (48, 192),
    }
    # fmt: on
    for name, (hosts, devices) in types.items():
        text = cloud.launch("--dry-run", name, "--batch 1").replace("\\ ", " ")
        flags = f"--require_processes {hosts} --require_devices {devices} --start_timeout 900"
        assert f"{flags} --model Qwen/" in text, text
        assert f" --accelerator-type={name.replace('v5e-', 'v5litepod-')} " in text, text
        # The user's flags come after the launcher's flags, so that they win.
        assert text.rindex("--batch 1") > text.rindex("--max_answer 1024"), text
        words = ("create", "ssh", "scp")
        order = [text.index(f"gcloud compute tpus tpu-vm {word}") for word in words]
        assert order == sorted(order), text
    assert not cloud.calls(), "gcloud was called"


def test_dry_run_speaks_to_all_workers(cloud):
    # (calls to all workers, calls to worker 0 alone) of each action. setup: is a run going on, scp,
    # install. run: start, follow; then, on worker 0, list the results and fetch them. logs first
    # asks worker 0 which run there is.
    calls_of = {"": (5, 2), "setup": (3, 0), "run": (2, 2), "logs": (1, 3), "fetch": (0, 2)}
    calls_of |= {"status": (1, 0), "stop": (1, 0)}
    for action, (to_all, to_one) in calls_of.items():
        text = cloud.launch("--dry-run v6e-16", action)
        calls = re.findall("^gcloud compute tpus tpu-vm (?:ssh|scp) .*", text, re.M)
        assert sum(" --worker=all " in call for call in calls) == to_all, (action, text)
        assert sum(" --worker=0 " in call for call in calls) == to_one, (action, text)
    # Worker 0 of several tests its own devices alone.
    for name, alone in (("v6e-16", 1), ("v6e-8", 0)):
        text = cloud.launch("--dry-run", name, "test")
        assert " --worker=0 " in text and text.count("TPU_PROCESS_BOUNDS") == alone, text


def test_flags_reach_a_worker_as_they_were_given(cloud):
    """Flags survive two shells: the one that reads the line of the dry run, and the worker's."""
    odd = "it's $HOME `d` \\"
    text = cloud.launch("--dry-run v6e-16", ["--system", odd])
    (line,) = [line for line in text.splitlines() if "worker.sh start" in line.replace("\\ ", " ")]
    (command,) = [word for word in shlex.split(line) if word.startswith("--command=")]
    assert shlex.split(command)[-2:] == ["--system", odd]


def test_dry_run_prints_commands_of_this_machine_and_slurm(cloud):
    plan = cloud.launch("--dry-run plan v6e-8 --lr 1 --sweep micro_batch=8")
    assert "tools/plan.py v6e-8 --model Qwen/" in plan, plan
    assert "JAX_PLATFORMS=cpu" in plan and "--lr 1 --sweep micro_batch=8" in plan, plan
    assert "tools/plan.py --lr 1" in cloud.launch("--dry-run plan --lr 1")
    slurm = cloud.launch("--dry-run slurm --ntasks-per-node 2 --lr 1")
    assert "--ntasks-per-node=2" in slurm
    # sbatch --wait asks Slurm at growing intervals whether the job has ended.
    assert "sbatch --wait --parsable" in slurm
    tests = cloud.launch("--dry-run test -k draws")
    assert "-r " + str(cloud.clone / "tests/requirements.txt") in tests, tests
    assert "-m pytest -n 2 --dist worksteal --durations 15 -rs -k draws" in tests, tests
    report = cloud.launch("--dry-run report out/a out/b --to c.html")
    assert "tools/report.py out/a out/b --to c.html" in report, report
    assert report.index("install -q --disable-pip-version-check matplotlib") > 0, report
    # A shell reads the printed words back unchanged, odd characters included.
    odd = ["--system", "it's $HOME"]
    printed = cloud.launch("--dry-run cpu", odd).splitlines()[-1]
    python = f"{cloud.clone}/.venv/bin/python"
    assert shlex.split(printed)[-5:] == [python, "-u", f"{cloud.clone}/train.py", *odd]
    assert not (cloud.clone / ".venv").exists(), "something ran"


# A Python as on Ubuntu without python3-venv: without ensurepip, and maybe with pip.
WITHOUT_VENV = """#!/bin/sh
case "$*" in *"import sys, ensurepip"*) exit 1 ;; *"-m pip --version") exit {pip_code} ;; esac
"""


def test_two_launches_at_once_install_once(cloud):
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(cloud.launch, ["setup", "setup"]))
    assert len((cloud.home / "pip.log").read_text().splitlines()) == 1


def test_help_is_the_comment_of_the_launcher_for_any_sed(cloud):
    text = cloud.launch("help")
    assert "bash launch.sh cpu" in text and "v6e-16" in text and "set -" not in text, text
    posix = 'sed() { command sed --posix "$@"; }; export -f sed; exec bash "$1" help'
    assert run("bash", "-c", posix, "-", cloud.clone / "launch.sh") == text


def test_setup_brings_a_python_where_none_is_fit(cloud, tmp_path):
    """If no Python here is suitable, setup gets one with uv. A missing uv comes from the package
    index, or from its makers."""
    bare = tmp_path / "bare"

    def setup(pip_code):
        for name in ("python3", "python3.11", "python3.12"):
            write(bare / name, WITHOUT_VENV.format(pip_code=pip_code), 0o755)
        return cloud.launch("--dry-run setup", PYTHON="", PATH=f"{bare}:/usr/bin:/bin")

    text = setup(pip_code=0)
    assert "python3 -m pip install -q --target" in text and "python3 -m uv venv" in text, text
    text = setup(pip_code=1)
    assert "curl -LsSf https://astral.sh/uv/install.sh" in text and "/uv venv" in text, text
    write(bare / "uv", "#!/bin/sh\n", 0o755)
    text = setup(pip_code=1)
    assert "\nuv venv -q --clear --seed -p \\>=3.11\\,\\<3.14" in f"\n{text}", text
    text = cloud.launch("setup", code=2, PYTHON=str(bare / "python3"), PATH=f"{bare}:/usr/bin:/bin")
    assert "is not Python 3.11 or newer with ensurepip" in text, text


def test_wandb_is_installed_where_it_is_asked_for(cloud):
    """wandb is installed only if --wandb is given, on this machine and on workers."""
    assert " wandb \n" in cloud.launch("--dry-run cpu --wandb project")
    assert " wandb \n" not in cloud.launch("--dry-run cpu")
    cloud.launch("v6e-1 setup --name plain")
    home = cloud.stub / "plain/w0"
    write(home / "broken", "")
    cloud.launch("v6e-1 run --name plain --lr 1", code=7)
    assert " wandb\n" not in (home / "pip.log").read_text()
    cloud.launch("v6e-1 run --name plain --wandb project", code=7)
    assert " wandb\n" in (home / "pip.log").read_text()


def test_what_a_site_needs_is_passed_on(cloud):
    """The site's flags for create and sbatch are passed on, and appear in the commands that the
    launcher suggests."""
    create = ["--create", "--reserved --network=net"]
    one_by_one = ["--create", "--reserved", "--create=", "--create=--network=net"]
    for queued, flags in ("", create), ("--queued", create), ("", one_by_one):
        text = cloud.launch("--dry-run v6e-8 up", queued, flags)
        (line,) = [line for line in text.splitlines() if " create " in line]
        assert " --reserved --network=net " in line, line
    text = cloud.launch("--dry-run v6e-8 up", ["--create", "--labels=a=b --description='my run'"])
    assert " --labels=a=b --description=my\\ run " in text, text
    text = cloud.launch("v6e-8 status", create, code=2)
    assert "make it: bash launch.sh v6e-8 up --create=--reserved\\ --network=net" in text, text
    sbatch = ["--sbatch", "--mem=64G --constraint=h100"]
    text = cloud.launch("--dry-run slurm --cpus-per-task 8", sbatch)
    (line,) = [line for line in text.splitlines() if line.startswith("sbatch")]
    assert " --cpus-per-task=8 --mem=64G --constraint=h100 " in line, line


def test_a_dry_run_can_be_pasted(cloud, tmp_path):
    """A dry run prints commands in the order in which they would run, and gcloud accepts them."""
    words = arguments(["v6e-8 --name pasted", POD_FLAGS])
    places = {"front": ["--dry-run", *words], "middle": [words[0], "--dry-run", *words[1:]]}
    places["end"] = [*words, "--dry-run"]
    texts = {place: cloud.launch(where, TMPDIR=str(tmp_path)) for place, where in places.items()}
    # A run's ID has the process and the time.
    one_run = {re.sub(r"\d+\.1\d{9}", "ID", text) for text in texts.values()}
    assert len(one_run) == 1, texts
    lines = texts["end"].splitlines()
    text = "\n".join(line for line in lines if not line.startswith("launch.sh: "))
    order = [text.index(word) for word in (" describe ", " create ", "git ", "tar ", " scp ")]
    assert order == sorted(order), text
    assert "--zone= " not in text and "''" not in text, text
    # Stop before the start of train.py, because the commands after it wait for its end.
    pasted = text[: text.index("worker.sh\\ start")].rpartition("\n")[0]
    path = f"{cloud.stub}/bin:{ROOT}/.ci:{os.environ['PATH']}"
    run("bash", "-c", pasted, cwd=tmp_path, PATH=path, GCLOUD_STUB=str(cloud.stub))
    home = cloud.stub / "pasted/w0/podgrpo"
    assert (home / "train.py").read_bytes() == (ROOT / "train.py").read_bytes()
    assert (home / ".venv/installed").exists()


def test_mistakes_in_the_call_get_one_line(cloud):
    assert "launch.sh cpu" in cloud.launch(code=2)
    mistakes = {
        "v9-8": "unknown TPU v9-8",
        "v6e-12": "there is no v6e-12; the number after v6e- must be one of 1 4 8",
        "v6e-16x": "there is no v6e-16x",
        "v6e-": "there is no v6e-",
        "v4-7": "there is no v4-7; the number after v4- must be one of 8 16",
        "v4-192": "or a multiple of 128",
        "v6e-384": "there is no v6e-384; the number after v6e- must be one of 1 4 8",
        "plan v5e-2": "there is no v5e-2",
        "plan h100-12": "there is no h100-12; the number after h100- must be 1, 2, 4, 8 or a",
        "plan a100-": "there is no a100-",
        "plan h200-016": "there is no h200-016",
        "plan b200-8": "plan does not know b200-8; it knows a100-N, h100-N, h200-N and TPU types",
        "h100-8 --lr 1": "h100-8 is only for plan: plan h100-8; to train on GPUs: gpu or slurm",
        "tpu": "unknown command tpu",
        "v6e-8 --zone": "needs a value",
        "v6e-8 --spot down": "down is not a flag",
        "v6e-8 --steps 5 --lr=1 --name x stop": "stop is not a flag; an action such as up",
        "v6e-8 run all --steps 5": "all is not a flag",
        "v6e-8 --learning_rate 1e-5": "--learning_rate is not a flag",
        "v6e-8 --dryrun --batch=1": "--dryrun is not a flag",
        "v6e-8 --model_dir x": "--model_dir is not a flag",
        "v6e-8 --steps": "--steps needs a value",
        "v6e-8 yes": "yes is not a flag",
        "v6e-8 --data out/mine.jsonl": "--data out/mine.jsonl is not sent to the workers",
        "v6e-8 --data out/a=b.jsonl": "--data out/a=b.jsonl is not sent to the workers",
        "v6e-8 --eval_data=gsm8k,mine=out/mine.jsonl": "--eval_data out/mine.jsonl is not sent",
        "slurm --nodes 2 --mem 64G": "--mem is not a flag; see bash launch.sh cpu --help, or",
        "v6e-8 up --create --labels='a=b": "a quote is not closed in --labels='a=b",
        "v6e-8 up --name my_run": "--name my_run cannot name a VM; use small letters, digits and -",
        "v6e-8 --name Run": "--name Run cannot name a VM",
        "v6e-8 stop --name run-": "--name run- cannot name a VM",
        "v6e-8 up --zone ,": "--zone , names no zone; give one, such as --zone us-east5-b",
        "setup v6e-8": "setup does not take v6e-8",
        "v6e-8 fetch all": "fetch does not take all",
        "v6e-8 down now": "down does not take now",
        "cpu --processes 0": "not a number of 1 or more",
        "cpu --batch 1 --npq 1": "npq = 1",
    }
    # On a cluster, this call would submit a job.
    if not shutil.which("sbatch"):
        mistakes["slurm --nodes 2"] = "no sbatch here; log in to a cluster"
    installing = "launch.sh: installing into .venv, once: a minute or two\n"
    # Git ignores these files.
    write(cloud.clone / "out/mine.jsonl", "")
    write(cloud.clone / "out/a=b.jsonl", "")
    for call, wanted in mistakes.items():
        # A mistake that train.py finds comes after the installation.
        text = cloud.launch(call, code=2).removeprefix(installing)
        assert text.count("\n") == 1 and wanted in text, text


def test_a_message_that_cannot_be_written_changes_nothing(cloud):
    command = f"bash {cloud.clone}/launch.sh v9-8 2>/dev/full"
    run("bash", "-c", command, code=2)


def test_the_launcher_finds_itself_whatever_cd_prints(cloud):
    text = run("bash", "clone/launch.sh", "help", cwd=cloud.clone.parent, CDPATH=".")
    assert "bash launch.sh cpu" in text, text


def test_files_outside_the_tree_are_named(cloud, tmp_path):
    write(tmp_path / "mine.jsonl", "")
    inside = cloud.clone / "README.md"
    for path in (tmp_path / "mine.jsonl", inside):
        text = cloud.launch("--dry-run v6e-8 --data", [path])
        assert f"--data {path} must exist on the workers" in text, text
    for name in ("gsm8k", "/nowhere", "README.md"):
        assert "must exist" not in cloud.launch("--dry-run v6e-8 --data", name)


# ---------------------------------------------------------------- what gcloud refuses
# {what gcloud 528 and the services behind it print when asked to create a VM: what the launcher
# advises}. Like gcloud, the stand-in adds the name of the account to each 403 and 404.
# fmt: off
REFUSALS = {
    "PERMISSION_DENIED: Cloud TPU API has not been used in project 7 before or it is disabled.":
        "gcloud services enable tpu.googleapis.com compute.googleapis.com",
    "PERMISSION_DENIED: This API method requires billing to be enabled. Please enable billing on "
    "project #7": "gcloud billing projects link PROJECT --billing-account=ACCOUNT",
    "PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on 'projects/p/locations/a/nodes/x'":
        "the role TPU Admin, or try another --zone",
    "PERMISSION_DENIED: Permission denied on 'locations/a' (or it may not exist)":
        "the role TPU Admin, or try another --zone",
    "UNAUTHENTICATED: Request had invalid credentials. Please run: gcloud auth login":
        "log in: gcloud auth login",
    "RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProject' has been exceeded": "or try --spot",
    "{ code: 9, Insufficient reserved capacity. [EID: 0x1]": "a has no v6e-8 left",
    "{ code: 8, There is no more capacity in the zone a": "a has no v6e-8 left",
    "INVALID_ARGUMENT: the accelerator v6e-8 was not found in zone a": "a offers no v6e-8",
    "SSH Key is not present in the SSH agent.": "ssh-add",
    # gcloud 528 printed these when its library was given the answers of the services.
    "UNAUTHENTICATED: Request had invalid authentication credentials. Expected OAuth 2 token":
        "log in: gcloud auth login",
    "PERMISSION_DENIED: Permission denied on resource project nosuch": "gcloud config set project",
    "[a@example.com] does not have permission to access projects instance [p] (or it may not "
    "exist): Required 'compute.projects.get' permission for 'projects/p'": "the role TPU Admin",
    "RESOURCE_EXHAUSTED: Quota exceeded for 'Read requests per minute' - reason: "
    "RATE_LIMIT_EXCEEDED": "see its state",
    OFFLINE.removeprefix("ERROR: (gcloud.x) "): "is this machine online?",
}
# fmt: on
BROKEN = "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) [/usr/bin/ssh] exited with return code [255]."


def test_refusals_to_create_come_with_advice(cloud):
    """If a VM cannot be created in a zone, the launcher shows gcloud's own words with advice, and
    tries the next zone."""
    for number, (said, wanted) in enumerate(REFUSALS.items()):
        cloud.fail("create", f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {said}")
        text = cloud.launch(f"v6e-8 up --zone a,us-east5-b --name vm{number}")
        assert said in text and wanted in text, text
        assert text.count("-> ") == 1, text


def test_a_zone_that_cannot_be_asked_is_left_out(cloud):
    denied = "ERROR: (gcloud.x) PERMISSION_DENIED: Permission denied on 'locations/a'"
    cloud.fail("describe.*zone=a ", denied)
    cloud.fail("create.*zone=a ", denied)
    text = cloud.launch("v6e-8 up --name vm --zone a,us-east5-b")
    assert "skipping a, where" in text and "vm in us-east5-b is READY" in text, text
    # A fault of the project affects all zones, so no other zone is tried.
    cloud.fail(
        "describe",
        "ERROR: (gcloud.x) PERMISSION_DENIED: Cloud TPU API has not been used in project 7",
    )
    text = cloud.launch("v6e-8 up --name other --zone a,us-east5-b", code=1)
    assert "gcloud services enable" in text and "skipping" not in text, text
    # A zone that is unavailable for a moment is asked again, because the VM may be there.
    cloud.fail("describe.*zone=us-east5-b", UNAVAILABLE)
    text = cloud.launch("v6e-8 up --name vm --zone a,us-east5-b")
    assert "vm in us-east5-b is READY" in text and "skipping" not in text, text


def test_patience_has_an_end_which_is_reported(cloud):
    write(cloud.stub / "bin/sleep", "#!/bin/sh\n", 0o755)
    cloud.fail("describe", UNAVAILABLE, times=99)
    text = cloud.launch("v6e-8 up --name vm --zone us-east5-b", code=1)
    assert text.count("UNAVAILABLE: The service is currently unavailable.; trying again in") == 12
    assert "UNAVAILABLE: The service is currently unavailable. -> see its state" in text, text
    assert "gcloud cannot tell whether vm is in us-east5-b" in text, text
    assert not cloud.count(" create "), "a VM may be there already"


def test_the_page_on_pods_prepares_a_project_as_the_launcher_advises():
    """assets/pods.md enables both APIs, and gives the workers' account access to the bucket."""
    page = (ROOT / "assets/pods.md").read_text()
    launcher = (ROOT / "infra/cloud/gcloud.sh").read_text()
    enable = "gcloud services enable tpu.googleapis.com compute.googleapis.com"
    assert enable in page and enable in launcher
    (binding,) = re.findall("gcloud storage buckets add-iam-policy-binding (.*?)#", page, re.S)
    assert "--role=roles/storage.objectAdmin" in binding
    assert "serviceAccount:$number-compute@developer.gserviceaccount.com" in binding


# ---------------------------------------------------------------- what costs money
def test_what_gcloud_no_longer_waits_for_is_found(cloud):
    """gcloud gives up on a VM after half an hour. If the VM is created nevertheless, the launcher
    finds it and asks for no other."""
    gave_up = (
        "ERROR: (gcloud.compute.tpus.tpu-vm.create) Operation operation-1 has not finished in 1800 "
        "seconds. The operations may still be underway remotely and may still succeed"
    )
    cloud.fail("create", gave_up, does=True)
    text = cloud.launch("v6e-8 up --name late --zone us-east5-b,us-east1-d")
    assert "gcloud gave up, but late may exist; its state: READY" in text, text
    assert cloud.count(" create ") == 1, "another was asked for"
    assert "delete it: bash launch.sh v6e-8 down --name=late" in text, text


def test_an_end_while_a_vm_is_waited_for_tells_what_may_be_there(cloud):
    """If Ctrl-C or a failure of gcloud ends the wait for a VM, the launcher says what may still
    exist and cost money."""
    (cloud.stub / "queue").write_text("WAITING_FOR_RESOURCES")
    # `sleep` sends Ctrl-C to its process group. A session of its own keeps that from pytest.
    write(cloud.stub / "bin/sleep", "#!/bin/sh\nkill -INT 0\n", 0o755)
    alone = "import os, signal, sys; os.setsid(); signal.signal(signal.SIGINT, signal.SIG_DFL); "
    alone += "os.execvp('bash', ['bash', *sys.argv[1:]])"
    words = ["v6e-8", "up", "--queued", "--name", "qr"]
    text = cloud.launch(*words, code=130, shell=[sys.executable, "-c", alone])
    write(cloud.stub / "bin/sleep", SLEEP, 0o755)
    assert "qr in us-east5-b is WAITING_FOR_RESOURCES" in text, text
    told = "qr in us-east5-b may still exist and cost money; delete it: bash launch.sh v6e-8 down"
    assert told in text, text
    cloud.fail(
        "describe.*format=value.state.state", "ERROR: (gcloud.x) PERMISSION_DENIED: no", times=9
    )
    text = cloud.launch("v6e-8 status --queued --name qr", code=1)
    assert (
        "qr may be in us-east5-b us-east5-a us-east1-d us-central1-b europe-west4-a, where" in text
    ), text


def make_in_two_zones(cloud):
    """Make a VM in us-east5-b, and a queued request of the same name in us-east1-d."""
    (cloud.stub / "queue").write_text("WAITING_FOR_RESOURCES")
    cloud.launch("v6e-8 up --name both")
    cloud.gcloud(
        *"compute tpus queued-resources create both --zone=us-east1-d --node-id=both".split(),
        *["--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"],
    )


def test_down_deletes_in_all_zones_however_it_was_made(cloud):
    make_in_two_zones(cloud)
    cloud.fail(" delete ", UNAVAILABLE)
    text = cloud.launch("v6e-8 down --name both --yes")
    assert "trying again in 5 seconds" in text, text
    assert "both in us-east5-b is READY" in text, text
    assert "both in us-east1-d is WAITING_FOR_RESOURCES" in text, text
    assert not list((cloud.stub / "queued").iterdir()) and not (cloud.stub / "both").exists()
    text = cloud.launch("v6e-8 down --name both --yes", code=2)
    assert "there is no both in us-east5-b,us-east5-a" in text, text
    # Without the right to delete queued requests, the VM is deleted nevertheless.
    cloud.launch("v6e-8 up --name both")
    cloud.fail("queued-resources delete", "ERROR: (gcloud.x) PERMISSION_DENIED: no")
    text = cloud.launch("v6e-8 down --name both --yes", code=1)
    assert "may still exist" in text and not (cloud.stub / "both").exists(), text


def test_down_deletes_first_where_gcloud_answers(cloud):
    """A zone where gcloud fails is asked again once the slices of other zones are deleted."""
    make_in_two_zones(cloud)
    cloud.fail("tpu-vm describe both.*us-east5-b", UNAVAILABLE)
    text = cloud.launch("v6e-8 down --name both --yes")
    assert text.index("deleting both in us-east1-d") < text.index("deleting both in us-east5-b")
    assert not list((cloud.stub / "queued").iterdir()) and not (cloud.stub / "both").exists()
    assert "may be in" not in text, text


def test_a_queued_request_that_failed_says_why(cloud):
    """If a queued request fails, the launcher shows the cause. It gives up if quota is lacking. For
    other causes it makes new requests, with growing pauses and up to a limit."""
    write(cloud.stub / "bin/sleep", "#!/bin/sh\n", 0o755)
    (cloud.stub / "queue").write_text("ACCEPTED FAILED")
    up = "v6e-8 up --queued --name qr --zone us-east5-b"
    (cloud.stub / "queue_error").write_text("{'code': 8, 'message': 'Quota limit was exceeded'}")
    text = cloud.launch(up, code=1)
    assert "Quota limit was exceeded" in text, text
    assert "ask for more (console: IAM, Quotas)" in text, text
    assert cloud.count("queued-resources create") == 1, text
    assert "may still exist" not in text, text
    (cloud.stub / "queue_error").write_text("{'code': 13, 'message': 'an internal error'}")
    text = cloud.launch(up, code=1)
    assert text.count("an internal error") == 10, text
    pauses = [int(seconds) for seconds in re.findall(r"trying again in (\d+) seconds", text)]
    assert pauses == [120, 240, 480] + [600] * 6, pauses
    assert "10 requests for qr failed" in text, text
    assert not list((cloud.stub / "queued").iterdir()), "a request is left"


def test_a_request_that_somebody_deletes_is_not_made_again(cloud):
    (cloud.stub / "queue").write_text("WAITING_FOR_RESOURCES")
    cloud.fail("describe.*state.state", "ERROR: (gcloud.x) NOT_FOUND: no", after=5, times=99)
    text = cloud.launch("v6e-8 up --queued --name qr --zone us-east5-b", code=1)
    assert "qr was deleted while this command waited" in text, text
    assert cloud.count("queued-resources create") == 1, text


def test_an_internal_error_is_tried_again_a_few_times(cloud):
    write(cloud.stub / "bin/sleep", "#!/bin/sh\n", 0o755)
    said = "ERROR: (gcloud.x) { code: 13, message: an internal error has occurred }"
    cloud.fail(" create ", said, times=2)
    text = cloud.launch("v6e-8 up --name vm --zone us-east5-b")
    assert "vm in us-east5-b is READY" in text and cloud.count(" create ") == 3, text
    cloud.fail(" create ", said, times=99)
    text = cloud.launch("v6e-8 up --name other --zone us-east5-b", code=1)
    assert "10 requests for other failed" in text and cloud.count(" create ") == 13, text


def test_an_answer_that_looks_like_the_end_of_a_run_is_not_the_end(tmp_path):
    script = f". {ROOT}/infra/cloud/gcloud.sh; run_id=7.7; watch_ends ended seen"
    lines = "[w0] exit 1 of the maze\n[w0] exit 0 1.5 7.7\n"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, input=lines, text=True, check=True)
    assert (tmp_path / "ended").read_text() == "[w0] exit 0 1.5 7.7\n"
    assert (tmp_path / "seen").read_text() == "1\n"


def test_a_worker_that_cannot_be_reached_is_not_waited_for_for_ever(tmp_path):
    """Once the run has ended on some workers, the launcher ends, too, and names the costs."""
    script = f"""
    . {ROOT}/infra/cloud/gcloud.sh
    run_id=7.7 hosts=2 scratch=. name=pod type=v4-16 options=() dry_run= delete_when_done=
    say() {{ echo "$1"; }}
    die() {{ echo "$1"; exit "$2"; }}
    sleep() {{ :; }}
    patiently() {{ echo READY; }}
    workers() {{ echo '[w0] exit 1 1.5 7.7'; return 255; }}
    follow 1
    """
    text = run("bash", "-c", script, cwd=tmp_path, code=1)
    assert text.count("following again") == 9, text
    assert "others cannot be reached: bash launch.sh v4-16 status" in text, text


def test_a_run_that_exits_with_75_has_failed(tmp_path):
    """In the launcher, 75 means that the slice is not READY. A run may exit with 75, too."""
    script = f"""
    . {ROOT}/infra/cloud/gcloud.sh
    run_id=7.7 hosts=1 scratch=. name=pod type=v4-8 options=() dry_run= spot= delete_when_done=
    say() {{ echo "$1"; }}
    sleep() {{ :; }}
    workers() {{ echo '[w0] exit 75 1.5 7.7'; }}
    follow 1
    """
    text = run("bash", "-c", script, cwd=tmp_path, code=1)
    assert "failed first, with exit code 1;" in text, text


@pytest.mark.parametrize(
    "ready, works, pauses, code",
    [(5, "false", 5, 75), (99, "true", 1, 143), (99, "false", 20, 143)],
)
def test_a_spot_run_that_got_sigterm_waits_for_news_of_its_vm(tmp_path, ready, works, pauses, code):
    """SIGTERM comes from a preemption, which the API may report late, or from a user's stop. After
    a stop, the VM still runs commands, and the launcher ends after one pause."""
    script = f"""
    . {ROOT}/infra/cloud/gcloud.sh
    run_id=7.7 hosts=1 scratch=. name=pod type=v4-8 options=() dry_run= spot=1 delete_when_done=
    say() {{ echo "$1"; }}
    sleep() {{ echo >>slept; }}
    patiently() {{ if [ $(wc -l <slept) -lt {ready} ]; then echo READY; else echo PREEMPTED; fi; }}
    workers() {{ if [ "$2" = true ]; then {works}; else echo '[w0] exit 143 1.5 7.7'; fi; }}
    follow 1
    """
    text = run("bash", "-c", script, cwd=tmp_path, code=code)
    assert len((tmp_path / "slept").read_text()) == pauses, text
    assert ("failed first, with exit code 143" in text) == (code == 143), text


def test_reserved_capacity_that_nobody_asked_for_is_a_lack_of_capacity(cloud):
    """Without --reserved, "insufficient reserved capacity" means that a zone is full, and the zones
    are tried again. With --reserved, the user has to name another zone."""
    write(cloud.stub / "bin/sleep", "#!/bin/sh\n", 0o755)
    said = "ERROR: (gcloud.x) { code: 9, Insufficient reserved capacity. [EID: 0x1]"
    cloud.fail("create", said, times=2)
    text = cloud.launch("v6e-8 up --zone a,us-east5-b --name vm")
    assert "has no v6e-8 left" in text and "trying again in 60 seconds" in text, text
    assert cloud.count(" create ") == 3, text
    cloud.fail("create", said, times=2)
    text = cloud.launch("v6e-8 up --zone a,us-east5-b --name other --create --reserved", code=1)
    assert "the reservation is elsewhere, or full" in text, text


def test_a_wrong_flag_of_gcloud_is_reported_at_once(cloud):
    said = "ERROR: (gcloud.x) INVALID_ARGUMENT: Cloud TPU received an invalid argument."
    cloud.fail("describe", said)
    text = cloud.launch("v6e-1 status --name vm --zone us-east5-b", code=1)
    assert "look at --name, --zone and the flags" in text and "trying again" not in text, text
    text = cloud.launch("v6e-1 setup --name vm", ["--ssh", "--internal_ip"], code=1)
    assert "unrecognized arguments: --internal_ip" in text, text
    assert "look at the flags in --ssh" in text and "trying again" not in text, text
    text = cloud.launch("v6e-1 up --name other", ["--create", "--networks=x"], code=1)
    assert text.count("look at the flags in --ssh and --create") == 1, text
    assert "may still exist" not in text, text


def test_workers_whose_command_fails_are_named(cloud):
    said = "##### Command execution on worker 1 failed with exit status 2. Continuing."
    cloud.fail("worker.sh unpack", said, code=2)
    text = cloud.launch("v4-16 setup --name vm", code=1)
    assert "launch.sh: w1: the command failed; its output is above -> see its state" in text, text


def test_a_git_repository_in_the_tree_is_sent_like_any_directory(cloud):
    run("git", "init", "-q", cloud.clone / "inner")
    for text in ("old", "new"):
        write(cloud.clone / "inner/words.txt", text)
        cloud.launch("v6e-1 setup --name vm")
        assert (cloud.stub / "vm/w0/podgrpo/inner/words.txt").read_text() == text
    cloud.launch("--dry-run v6e-1 --data inner/words.txt")


def test_keys_of_a_fresh_vm_are_waited_for(cloud):
    """While a fresh VM refuses ssh, the launcher shows ssh's own words and the workers that failed,
    and tries again a limited number of times."""
    write(cloud.stub / "bin/sleep", "#!/bin/sh\n", 0o755)
    ssh_failed = "ERROR: (gcloud.x) [/usr/bin/ssh] exited with return code [255]."
    refused = (
        "me@10.0.0.2: Permission denied (publickey).\n"
        "##### Command execution on worker 1 failed with exit status 255. Continuing.\n"
    )
    cloud.fail("tpu-vm ssh", refused + ssh_failed, code=255)
    text = cloud.launch("v4-16 setup --name vm")
    shown = "the connection fails: w1 me@10.0.0.2: Permission denied (publickey): ERROR"
    assert shown in text and "trying again in 5 seconds" in text, text
    cloud.fail("tpu-vm ssh", refused + ssh_failed, code=255, times=99)
    text = cloud.launch("v4-16 setup --name vm", code=1)
    assert text.count("trying again in") == 6 and "ssh-add" in text, text


def test_a_changed_host_key_is_reported_at_once(cloud):
    text = "Host key verification failed.\n"
    text += "ERROR: (gcloud.x) [/usr/bin/ssh] exited with return code [255]."
    cloud.launch("v6e-1 up --name vm")
    cloud.fail("tpu-vm ssh", text, code=255)
    text = cloud.launch("v6e-1 setup --name vm", code=1)
    assert "Host key verification failed" in text and "google_compute_known_hosts" in text, text
    assert "trying again" not in text, text


def test_a_tree_that_cannot_be_packed_is_not_sent(cloud):
    """If tar fails, nothing is sent, not even the part that tar had written."""
    write(
        cloud.stub / "bin/tar",
        f"""#!/bin/sh
case "$*" in *-czf*) for last; do :; done; echo half >"$last"; exit 2 ;; esac
exec {shutil.which("tar")} "$@"
""",
        0o755,
    )
    text = cloud.launch("v6e-1 setup --name vm", code=1)
    assert "could not be packed, and nothing was sent" in text, text
    assert cloud.count("tpu-vm scp") == 0, "a part of the tree was sent"
    assert "vm in us-east5-b may still exist and cost money" in text, text


def test_a_tree_that_git_cannot_list_costs_nothing(cloud):
    """A download without .git, or a repository without a commit, is refused before a VM exists."""
    shutil.rmtree(cloud.clone / ".git")
    for words in "not a git repository", "ambiguous argument 'HEAD'":
        for action in ("--data README.md", "setup", "run --spot"):
            text = cloud.launch("v6e-1", action, code=2)
            assert f"git cannot list the files to send (fatal: {words}" in text, text
            assert text.count("\n") == 1 and "git init && git add -A && git commit" in text, text
        run("git", "-C", cloud.clone, "init", "-q")
    assert not cloud.calls()


BAD_LINES = ["WANDB_API_KEY = s3cret", "HF_TOKEN=a$s3cret", "HF_TOKEN=a$1"]


@pytest.mark.parametrize("line", BAD_LINES)
def test_an_env_file_that_bash_cannot_read_costs_nothing(cloud, line):
    """Such a file is refused before a VM exists and before anything is installed, and its content
    is never printed."""
    write(cloud.clone / ".env", f"{line}\nGOOD=1\n")
    for call in "v6e-1", "v6e-1 setup", "v6e-1 logs --spot", "cpu --lr 1", "report out/a":
        text = cloud.launch(call, code=2)
        assert text.startswith("launch.sh: .env must have lines NAME=value"), text
        assert text.count("\n") == 1 and "s3cret" not in text, text
    assert not cloud.calls() and not (cloud.clone / ".venv").exists()
    assert "there is no podgrpo-v6e-1" in cloud.launch("v6e-1 stop", code=2)


def test_a_large_tree_is_reported_before_it_is_sent(cloud):
    (cloud.clone / "weights.bin").write_bytes(os.urandom(110_000_000))
    (cloud.clone / "infra/small.txt").write_text("small")
    text = cloud.launch("v6e-1 setup --name vm")
    assert re.search(r"this tree has 1[01]\d MB, packed", text), text
    assert "add unneeded files to .gitignore; the largest:" in text, text
    assert "weights.bin" in text and "small.txt" not in text, text


def test_nothing_from_a_vm_is_evaluated(cloud):
    """The flags, the number of lines and the name of the results come from a VM. The launcher
    treats them as data, and never as code."""
    cloud.launch("v6e-1 --name vm", POD_FLAGS, ENDS, code=2)
    pod = cloud.stub / "vm/w0/podgrpo"
    trap = cloud.clone / "evaluated"
    (pod / "run.flags").write_bytes(f"$(touch {trap})\0--lr\0none\0".encode())
    cloud.launch("v6e-1 logs --name vm", code=2)
    assert not trap.exists()
    (pod / "run.id").write_text(f"a[$(touch {trap})]\n")
    text = cloud.launch("v6e-1 logs --name vm", code=1)
    assert "cannot be read" in text and not trap.exists(), text
    (pod / "run.flags").write_bytes(f"--steps\0x\0$(touch {trap})\0".encode())
    cloud.launch("v6e-1 fetch --name vm", code=1)
    assert not trap.exists()


def test_every_call_of_gcloud_is_in_one_log(cloud):
    """The log has every call of gcloud, with exit code and complete output. A failure names it."""
    cloud.fail("create", "Waiting...\nERROR: (gcloud.x) PERMISSION_DENIED: no such luck")
    text = cloud.launch("v6e-1 up --name vm --zone us-east5-b", code=1)
    (path,) = re.findall("all calls of gcloud: (.*)", text)
    log = Path(path).read_text()
    assert "Waiting...\nERROR: (gcloud.x) PERMISSION_DENIED: no such luck" in log, log
    assert re.search(r"gcloud compute tpus tpu-vm create vm .*\nexit code 1\n", log), log
    assert log.count("exit code ") == len(cloud.calls()), log
    assert "all calls of gcloud" not in cloud.launch("v6e-1 up --name vm --zone us-east5-b")
    shutil.rmtree(cloud.clone / "out/launch")
    write(cloud.clone / "out/launch", "")
    text = cloud.launch("v6e-1 up --name vm --zone us-east5-b", code=2)
    assert text.startswith("launch.sh: cannot write to ") and text.count("\n") == 1, text


def test_workers_are_reached_as_the_site_wants(cloud):
    """Every ssh and scp gets the flags in --ssh. The Identity-Aware Proxy needs gcloud alpha."""
    cloud.launch("v6e-1 setup --name vm", ["--ssh", "--internal-ip"])
    calls = cloud.worker_calls()
    assert calls and all("--internal-ip" in argv for argv in calls), calls
    # Neither ssh nor scp may wait for a dead worker for ever.
    for argv in calls:
        for option in "ConnectTimeout=30", "ServerAliveInterval=30":
            assert f"--{argv[3]}-flag=-o{option}" in argv, argv
    before = len(cloud.calls())
    tunnel = ["--ssh", "--tunnel-through-iap"]
    text = cloud.launch("v6e-1 ssh --name vm", tunnel, "0 pwd")
    assert "podgrpo" in text, text
    (call,) = [argv for argv in cloud.calls()[before:] if "ssh" in argv]
    assert call[0] == "alpha" and "--tunnel-through-iap" in call, call
    shown = cloud.launch("v6e-1 ssh --name vm --dry-run", tunnel)
    assert "gcloud alpha compute tpus tpu-vm ssh vm" in shown, shown


def test_a_command_runs_on_one_worker_or_on_all(cloud):
    cloud.launch("v4-16 up --name vm")
    assert cloud.launch("v4-16 ssh --name vm all echo it runs").count("it runs") == 2
    assert cloud.launch("v4-16 ssh --name vm 1 echo it runs").count("it runs") == 1
    # A command that fails is not repeated. Its output and its exit code are the launcher's.
    before = len(cloud.worker_calls())
    text = cloud.launch("v4-16 ssh --name vm 0", ["echo ERROR: no such file >&2; exit 3"], code=3)
    assert "ERROR: no such file" in text and len(cloud.worker_calls()) == before + 1, text
    # All words after the command's first one are the command's.
    assert cloud.launch("v4-16 ssh --name vm all echo -h --yes").count("-h --yes") == 2
    assert "needs a terminal" in cloud.launch("v4-16 ssh --name vm", code=2)
    # Without ~/podgrpo, a command must not run elsewhere.
    (cloud.stub / "vm/w1/podgrpo").rmdir()
    write(cloud.stub / "vm/w1/podgrpo", "")
    text = cloud.launch("v4-16 ssh --name vm 1 echo it runs", code=1)
    assert "mkdir" in text and "it runs" not in text, text


@pytest.mark.slow
def test_a_vm_that_is_repaired_is_not_waited_for_for_ever(cloud):
    cloud.launch("v6e-8 up --name vm")
    write(cloud.stub / "vm/state", "REPAIRING")
    write(cloud.stub / "bin/sleep", "#!/bin/sh\n", 0o755)
    text = cloud.launch("v6e-8 up --name vm", code=1)
    assert "vm in us-east5-b is REPAIRING" in text, text
    assert "REPAIRING for half an hour" in text and "delete it: bash launch.sh" in text, text
    assert cloud.count(" create ") == 1
    write(cloud.stub / "vm/state", "READY")


# ---------------------------------------------------------------- spot VMs that are preempted
# ENDS has a mistake in the flags, so the training ends at once.


@pytest.mark.parametrize("moment", ["create", "scp", "unpack", "worker.sh start"])
def test_a_vm_that_goes_before_its_run_is_made_again(cloud, moment):
    """A spot VM is created again if it is preempted while it is created, receives files, installs
    packages or starts the run, even if deleting the old VM fails at first."""
    if moment == "create":
        cloud.fail("create", BROKEN, does=True)
        write(cloud.stub / "next_state", "PREEMPTED")
    else:
        cloud.fail(moment, BROKEN, code=255, preempt="spot")
    cloud.fail(" delete ", UNAVAILABLE)
    text = cloud.launch("v6e-1 --spot --name spot", POD_FLAGS, ENDS, code=2)
    assert "spot in us-east5-b is PREEMPTED" in text, text
    assert "trying again in 5 seconds" in text and "deleting spot in us-east5-b" in text, text
    assert cloud.count("tpu-vm create") == 2, text
    assert "[w0] train.py: argument --lr: invalid float value" in text, text


@pytest.mark.parametrize(
    "spot, out, code",
    [
        ("1", "gs://b/run", 0),
        ("", "gs://b/run", 2),
        ("1", "run", 2),
        # The last --out counts.
        ("1", "gs://b/run --out run", 2),
        ("1", "run --out=gs://b/run", 0),
        ("1", "run --system '--out gs://b/run'", 2),
    ],
)
@pytest.mark.parametrize("state", ["STOPPED", "REPAIRING"])
def test_a_spot_vm_that_does_not_come_back_is_made_again(tmp_path, state, spot, out, code):
    """If a run has lost its spot VM, a VM that is stopped, or is not READY for half an hour, is
    deleted and made again. Without a bucket, its disks have the only checkpoints."""
    script = f"""
    . {ROOT}/infra/cloud/gcloud.sh
    zones=a name=pod type=v4-8 options=() dry_run= spot={spot} queued= maybe_paid= scratch=.
    say() {{ echo "$1"; }}
    die() {{ echo "$1"; exit 2; }}
    sleep() {{ :; }}
    patiently() {{ cat state; }}
    find_slice() {{ zone=a; }}
    refuse_other_type() {{ :; }}
    delete() {{ echo deleting; }}
    create_or_find() {{ echo READY >state; }}
    print_busy() {{ :; }}
    send() {{ echo sending; exit 0; }}
    follow() {{ return 75; }}
    echo {state} >state
    live_and_finish follow 1 --lr 1 --out {out}
    """
    text = run("bash", "-c", script, cwd=tmp_path, code=code)
    assert ("deleting\npod in a is READY\nsending\n" in text) == (code == 0), text


def test_a_vm_that_was_deleted_is_not_made_again(cloud):
    """`down` ends the costs, even while another launcher follows the run."""
    cloud.fail("follow", "", code=255, remove="spot")
    text = cloud.launch("v6e-1 --spot --name spot", POD_FLAGS, ENDS, code=1)
    assert "spot was deleted, and its run ended with it" in text, text
    assert cloud.count("tpu-vm create") == 1, text


def test_a_preempted_vm_is_made_again_without_rights_on_queued_requests(cloud):
    cloud.launch("v6e-1 up --spot --name vm")
    cloud.gcloud("preempt", "vm")
    # Without --spot, the new VM would cost more.
    text = cloud.launch("v6e-1 up --name vm", code=2)
    assert "vm was a spot VM and is preempted; to create another, add --spot" in text, text
    cloud.fail("queued-resources", "ERROR: (gcloud.x) PERMISSION_DENIED: no", times=99)
    text = cloud.launch("v6e-1 up --spot --name vm")
    assert "vm in us-east5-b is READY" in text and cloud.count("tpu-vm create") == 2, text


def test_a_vm_that_is_stopped_can_be_started(cloud):
    cloud.launch("v6e-1 up --name vm")
    write(cloud.stub / "vm/state", "STOPPED")
    text = cloud.launch("v6e-1 up --name vm", code=2)
    wanted = "start it: gcloud compute tpus tpu-vm start vm --zone=us-east5-b; or delete"
    assert wanted in text, text


def test_a_vm_of_another_type_is_refused(cloud):
    """The VM may have too few workers: the launcher would wait for workers that do not exist."""
    cloud.launch("v6e-1 up --name pod")
    for action in ("", "run", "logs"):
        text = cloud.launch(f"v6e-8 {action} --name pod", code=2)
        assert "pod is a v6e-1, not a v6e-8; give --name a name that no other VM has" in text, text


def test_a_worker_asks_for_its_number_without_a_proxy(tmp_path):
    shutil.copytree(ROOT / "infra/cloud", tmp_path / "infra/cloud")
    attribute = tmp_path / "computeMetadata/v1/instance/attributes/agent-worker-number"
    write(attribute, "3")
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)
    )
    env = {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
    env |= {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    with server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever)
        try:
            status = "bash", tmp_path / "infra/cloud/worker.sh", "status"
            assert run(*status, **env).startswith("[w3] no run")
            attribute.unlink()
            text = run(*status, code=1, **env)
        finally:
            server.shutdown()
    assert text.startswith("launch.sh: this worker cannot learn its number: curl http://127"), text


def test_a_worker_does_not_fall_back_to_the_cpu(tmp_path):
    shutil.copytree(ROOT / "infra/cloud", tmp_path / "infra/cloud")
    write(tmp_path / "bin/curl", "#!/bin/sh\necho 0\n", 0o755)
    write(tmp_path / "launch.sh", 'echo "platforms $JAX_PLATFORMS"')
    write(tmp_path / "run.commit", "")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    for given, wanted in (("", "tpu,cpu"), ("cpu", "cpu")):
        command = "bash", "infra/cloud/worker.sh", "train"
        run(*command, cwd=tmp_path, PATH=path, JAX_PLATFORMS=given)
        assert (tmp_path / "run.log").read_text() == f"platforms {wanted}\n"


def test_a_run_whose_exit_code_is_lost_has_failed(tmp_path):
    """On a full disk, the exit code cannot be written, and its file may be empty."""
    shutil.copytree(ROOT / "infra/cloud", tmp_path / "infra/cloud")
    write(tmp_path / "bin/curl", "#!/bin/sh\necho 0\n", 0o755)
    write(tmp_path / "launch.sh", "")
    for name in "run.commit", "run.log", "run.exit":
        write(tmp_path / name, "")

    def worker(words, code=0):
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        worker_sh = "infra/cloud/worker.sh"
        return run("bash", worker_sh, *words.split(), cwd=tmp_path, code=code, PATH=path)

    lost = "[w0] exit 137 9999999999 7.7\n"
    assert worker("follow +1 20 7.7") == lost
    worker("train")
    assert worker("follow +1 20 7.7").startswith("[w0] exit 0 1")
    (tmp_path / "run.exit").unlink()
    (tmp_path / "run.exit.new").symlink_to("/dev/full")
    worker("train", code=1)
    assert worker("follow +1 20 7.7") == lost


def test_a_killed_run_does_not_end_with_the_code_of_the_one_before(tmp_path):
    shutil.copytree(ROOT / "infra/cloud", tmp_path / "infra/cloud")
    write(tmp_path / "bin/curl", "#!/bin/sh\necho 0\n", 0o755)
    # The run ends together with the shell that would write its exit code.
    write(tmp_path / "launch.sh", 'if [ "$1" = task ]; then kill -KILL $PPID; fi')
    write(tmp_path / "run.commit", "")
    write(tmp_path / "run.exit", "0 1.5\n")

    def worker(*words):
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        return run("bash", "infra/cloud/worker.sh", *words, cwd=tmp_path, PATH=path)

    worker("start", "7.7", "--lr", "1")
    assert until(lambda: "no run" in worker("status"), seconds=60)
    assert "no run; the last one was killed, or the disk is full\n" in worker("status")
    write(tmp_path / "run.exit", "1 1764594123.25\n")
    assert "the last one ended with code 1 at 2025-12-01 13:02:03 UTC\n" in worker("status")
    (tmp_path / "run.exit").unlink()
    assert worker("follow", "+1", "20", "7.7") == "[w0] exit 137 9999999999 7.7\n"


def test_status_and_fetch_say_that_no_run_was_started(cloud):
    cloud.launch("v6e-1 setup --name vm")
    assert "[w0] no run was started here\n" in cloud.launch("v6e-1 status --name vm")
    text = cloud.launch("v6e-1 fetch --name vm", code=1)
    assert "results.py: no run was started on this machine" in text, text
    assert "FileNotFoundError" not in text, text


def test_logs_of_a_spot_run_resume_it(cloud):
    """`logs --spot` creates a preempted VM again and resumes its run with the flags that it had."""
    cloud.launch("v6e-1 --spot --name spot", POD_FLAGS, ENDS, "--system", ["it's $HOME"], code=2)
    cloud.fail("follow", "", code=255, preempt="spot")
    text = cloud.launch("v6e-1 logs --spot --name spot", code=2)
    assert "recreating spot" in text and cloud.count("tpu-vm create") == 2, text
    (cloud.stub / "ssh-key").unlink()  # as on another machine
    cloud.launch("v6e-1 logs --name spot", code=2)
    flags = (cloud.stub / "spot/w0/podgrpo/run.flags").read_text().split("\0")
    assert flags[-5:] == ["--lr", "none", "--system", "it's $HOME", ""], flags
    cloud.fail("follow", "", code=255, preempt="spot")
    text = cloud.launch("v6e-1 logs --name spot", code=1)
    assert "spot is PREEMPTED; it is recreated only with --spot" in text, text
    text = cloud.launch("v6e-1 logs --name spot", code=1)
    assert "the run may have ended with it" in text and "no run was started" not in text, text


@pytest.mark.parametrize("cut", ["-0", "-3"])
def test_flags_are_read_once_although_a_connection_breaks(tmp_path, cut):
    """gcloud repeats a command whose connection broke, and what it printed before stays."""
    for name, text in {"run.log": "waits\n", "run.id": "7.7\n", "run.flags": "--lr\0a b\0"}.items():
        write(tmp_path / name, text)
    script = f"""
    . {ROOT}/infra/cloud/gcloud.sh
    scratch=. dry_run=
    need_slice() {{ :; }}
    refuse_other_type() {{ :; }}
    persistently() {{
      echo keygen
      bash -c "$3" >once
      head -c {cut} once
      cat once
    }}
    live_and_finish() {{ printf '%s|' "$run_id" "$@"; }}
    cmd_tpu_logs
    """
    assert run("bash", "-c", script, cwd=tmp_path) == "7.7|follow|1|--lr|a b|"


def test_logs_without_a_run_and_logs_that_cannot_be_read_differ(cloud):
    cloud.launch("v6e-1 up --name fresh")
    # This is the first ssh from this machine, so ssh-keygen prints lines, too.
    text = cloud.launch("v6e-1 logs --name fresh", code=1)
    assert "no run was started there: bash launch.sh v6e-1 run --name=fresh" in text, text
    denied = "ERROR: (gcloud.compute.tpus.tpu-vm.ssh) PERMISSION_DENIED: no"
    cloud.fail("wc -l", denied, code=1)
    text = cloud.launch("v6e-1 logs --name fresh", code=1)
    assert "the role TPU Admin" in text and "no run was started" not in text, text


def test_a_broken_connection_of_test_is_shown(cloud):
    cloud.fail("worker.sh test", f"ssh: connection reset\n{BROKEN}", code=255)
    text = cloud.launch("v6e-1 test --name vm", code=255)
    assert "ssh: connection reset" in text, text
    assert "vm in us-east5-b may still exist and cost money" in text, text


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


def test_a_request_that_waits_is_found_without_queued(cloud):
    """A second VM beside it would cost money, too."""
    (cloud.stub / "queue").write_text("ACCEPTED " * 3 + "WAITING_FOR_RESOURCES ACTIVE")
    cloud.gcloud(
        *"compute tpus queued-resources create qr --zone=us-east5-b --node-id=qr".split(),
        *["--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"],
    )
    text = cloud.launch("v6e-8 status --name qr", code=0)
    assert "qr in us-east5-b is ACCEPTED" in text, text
    text = cloud.launch("v6e-8 up --name qr")
    assert "is WAITING_FOR_RESOURCES" in text and "is READY" in text, text
    assert cloud.count("tpu-vm create") == 0, text
    # A user who may not see queued requests can have VMs.
    cloud.fail("queued-resources describe", "ERROR: (gcloud.x) PERMISSION_DENIED: no", times=99)
    text = cloud.launch("v6e-8 up --name vm --zone us-east5-b")
    assert "vm in us-east5-b is READY" in text and cloud.count("tpu-vm create") == 1, text


def test_a_queued_resource_is_made_and_deleted_with_its_vm(cloud):
    cloud.launch("v6e-8 up --queued --name qr")
    assert (cloud.stub / "qr/w0").exists()
    cloud.launch("v6e-8 down --name qr --yes")
    assert not (cloud.stub / "queued/qr.json").exists()
    assert not (cloud.stub / "qr").exists()


@pytest.mark.parametrize(
    "codes, stops", [([0, 0], 0), ([143, 130, 0], 0), ([143, 1, 130], 1), ([1, 7, 2], 1)]
)
def test_a_failure_on_one_worker_stops_the_others_once(codes, stops, tmp_path):
    """After SIGINT or SIGTERM, each worker saves and ends by itself."""
    script = f". {ROOT}/infra/cloud/gcloud.sh; run_id=7.7; stop_rest() {{ echo >>stops; }}; "
    script += ": >stops; watch_ends ended seen; wait"
    lines = "".join(f"[w{i}] exit {code} 1.5 7.7\n" for i, code in enumerate(codes))
    subprocess.run(["bash", "-c", script], cwd=tmp_path, input=lines, text=True, check=True)
    assert len((tmp_path / "stops").read_text()) == stops


def test_a_vm_that_cannot_be_deleted_is_still_paid_for(cloud):
    cloud.launch("v6e-8 up --name vm")
    cloud.fail("tpu-vm delete", "ERROR: (gcloud.x) PERMISSION_DENIED: no")
    text = cloud.launch("v6e-8 down --name vm --yes", code=1)
    assert "vm in us-east5-b may still exist and cost money" in text, text
    assert (cloud.stub / "vm").exists()
    cloud.launch("v6e-8 down --name vm --yes")
