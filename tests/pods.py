"""A stand-in for Google Cloud in tests of launch.sh: .ci/gcloud uses folders as the workers' homes
and local processes as their programs."""

import dataclasses
import json
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from conftest import ROOT, arguments, read_jsonl, run

# The entropy bonus changes the weights in every step, even if all answers score the same.
POD_FLAGS = (
    "--model tiny --data arith --eval_data none --max_prompt 80 --max_answer 8 --batch 1 --npq 4 "
    "--minibatches 1 --sft_steps 0 --save_every 1 --entropy_bonus 0.1"
)
# Workers inherit these variables from the tests, to find programs that other processes compiled.
COMPILATION = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "XLA_FLAGS",
)
# A mistake in the flags, which ends a run quickly.
ENDS = "--lr none"
# Errors of gcloud after which the same command may succeed.
UNAVAILABLE = "ERROR: (gcloud.x) UNAVAILABLE: The service is currently unavailable."
OFFLINE = (
    "ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: "
    "HTTPSConnectionPool(port=443): Max retries exceeded with url: /token Please run: "
    "$ gcloud auth login"
)
# The launcher and its workers sleep for a fifth of the time that they ask for.
SLEEP = '#!/bin/sh\nexec /bin/sleep "$(awk "BEGIN { print $1 / 5 }")"\n'


# ---------------------------------------------------------------- the stand-in for Google Cloud
def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


@dataclasses.dataclass
class Cloud:
    clone: Path  # a fresh clone of this tree, with a .env in it
    stub: Path  # the folder of .ci/gcloud: one folder NAME per VM, with homes w0, w1, ...
    home: Path  # the home of the user who launches

    def launch(self, *flags, code=0, clone=None, shell=("bash",), **env):
        """Returns the output of `bash launch.sh FLAGS` in the clone, which must end with the exit
        code `code`."""
        clone = clone or self.clone
        env = self.environment() | env
        return run(*shell, clone / "launch.sh", *arguments(flags), code=code, cwd=clone, **env)

    def environment(self):
        """The environment in which launch.sh finds the stand-in for gcloud."""
        return {
            "PATH": f"{self.stub}/bin:{ROOT}/.ci:{os.environ['PATH']}",
            "PYTHON": f"{self.stub}/bin/python3.12",
            "REAL_PYTHON": sys.executable,
            "IMPATIENT": f"{ROOT}/tests/impatient.py",
            "GCLOUD_STUB": str(self.stub),
            "HOME": str(self.home),
        }

    def gcloud(self, *words):
        run(ROOT / ".ci/gcloud", *words, GCLOUD_STUB=str(self.stub))

    def calls(self):
        """The argv of every call of gcloud so far."""
        log = self.stub / "calls.log"
        return read_jsonl(log) if log.exists() else []

    def worker_calls(self):
        return [argv for argv in self.calls() if argv[3] in ("ssh", "scp")]

    def fail(self, pattern, text, **more):
        """Make the next call of gcloud that matches fail with this text. more: see .ci/gcloud."""
        rule = {"match": pattern, "stderr": text, **more}
        with open(self.stub / "fail", "a") as f:
            f.write(json.dumps(rule) + "\n")

    def count(self, *words):
        """The number of calls of gcloud that contain all these words."""
        return sum(all(word in " ".join(argv) for word in words) for argv in self.calls())

    def keeps_secrets(self, text):
        """Whether the text, the launcher's logs, calls.log and all files of workers are free of the
        values in .env."""
        secrets = re.findall(b"[0-9a-f]{16}", (self.clone / ".env").read_bytes())
        logs = [*(self.clone / "out/launch").iterdir()]
        assert len(secrets) == 2 and logs
        paths = [path for path in self.stub.rglob("*") if path.is_file() and path.name != ".env"]
        contents = [text.encode(), *(path.read_bytes() for path in logs + paths)]
        return not any(secret in content for secret in secrets for content in contents)


def clone_of_this_tree(clone):
    """Commit a copy of this tree as git sees it, and write a .env with random secrets into it."""
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
    write(clone / ".env", f"WANDB_API_KEY='key {key}'\nHF_TOKEN='tok${token}'\n")


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path / "clone", tmp_path / "stub", tmp_path / "home")
    clone_of_this_tree(cloud.clone)
    cloud.home.mkdir()
    worker_python = (ROOT / "tests/worker_python.sh").read_text()
    write(cloud.stub / "bin/python3.12", worker_python, 0o755)
    write(cloud.stub / "bin/sleep", SLEEP, 0o755)
    # The stand-in runs this Python, and not a version manager's script that looks for one.
    (cloud.stub / "bin/python3").symlink_to(os.path.realpath(sys.executable))
    environment = {name: os.environ[name] for name in COMPILATION if name in os.environ}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "REAL_PYTHON": sys.executable,
        "IMPATIENT": f"{ROOT}/tests/impatient.py",
    }
    lines = [f"{name}={value}\n" for name, value in environment.items()]
    write(cloud.stub / "worker.env", "".join(lines))
    yield cloud
    # Stop everything that a failed test may have left: runs, and the metadata servers.
    for vm in cloud.stub.glob("*/vm.json"):
        cloud.gcloud("preempt", vm.parent.name)
    shutil.rmtree(cloud.stub)


def says(path, text):
    return path.exists() and text in path.read_text(errors="replace")


def when(condition, act):
    """Returns a Future of act()'s result. A thread calls act() once the condition holds."""
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


def until_it_works(act, seconds=60):
    """Call act() until it works, as something may not have begun yet. Returns its result."""
    end = time.time() + seconds
    while True:
        try:
            return act()
        except AssertionError:
            assert time.time() < end
            time.sleep(0.2)
