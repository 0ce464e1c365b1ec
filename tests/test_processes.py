"""A run has the same numbers on any number of processes and any mesh, and ends if a host falls
silent."""

import itertools
import math
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    TINY_FLAGS,
    arguments,
    check_errors,
    lives,
    read_jsonl,
    relative,
    run_to_end,
    running,
    taught,
    until,
)
from jax.experimental import multihost_utils
from safetensors.numpy import load_file

from infra.host.processes import Processes, all_gather_processes, roll_call

# (processes, devices of all processes, mesh)
# fmt: off
OTHER_MESHES = [
    (1, 4, "auto"),
    (1, 1, "auto"),
    (1, 8, "2,2,2"),
    (2, 8, "auto"),
]
# fmt: on

METRICS = "loss reward/mean reward/std solved grad_norm len/answer truncated entropy"


def test_processes_gather_64_bit_numbers_exactly(monkeypatch):
    def gather(value):
        # JAX makes an array of 32-bit numbers.
        return np.stack([np.asarray(jnp.asarray(value))] * 2)

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    for value in (1.1, 2**40 + 1, [[0.1, math.pi]], True, np.float32(0.1), [1, 2**31]):
        found = all_gather_processes(value)
        assert found.shape == (2, *np.shape(value)) and (found == np.asarray(value)).all(), value


def test_a_clock_that_is_set_does_not_end_the_roll_call(monkeypatch):
    """A machine that has just started may correct its clock by hours."""
    days = itertools.count()
    monkeypatch.setattr(time, "time", lambda: next(days) * 86400.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    found = [Processes(address, ["", ""], i) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        faults = list(threads.map(lambda process: roll_call(process, {"flag": 1}, 60), found))
    assert faults == ["", ""]


def losses(out):
    return [row["loss"] for row in read_jsonl(out / "metrics.jsonl")]


@pytest.mark.slow
def test_a_checkpoint_resumes_on_other_meshes(tmp_path, record_property):
    """A checkpoint of one process with 8 devices resumes on other meshes and processes. The losses
    of the next two steps are the same; the second one depends on the loaded optimizer state."""
    # The first step is supervised, so that the checkpoint has a reference.
    others = "--beta 0.1 --entropy_bonus 0.1 --save_every 1 --keep 9 --eval_data none"
    flags = arguments([TINY_FLAGS, others])
    out = tmp_path / "run"
    run_to_end(out, flags, devices=8)
    wanted = losses(out)
    assert min(map(abs, wanted)) > 0.1, wanted
    for name in ("final", "step_000002", "step_000003"):
        shutil.rmtree(out / name)
    errors = {}
    for processes, devices, on in OTHER_MESHES:
        copy = tmp_path / f"{processes}-{devices}-{on}"
        shutil.copytree(out, copy)
        text = run_to_end(copy, [*flags, "--mesh", on], processes, devices=devices)
        assert f"resuming {copy} after step 1" in text, text
        again = losses(copy)
        errors[processes, devices, on] = np.abs(np.subtract(again, wanted))
    text = run_to_end(out, flags, 2, devices=8, batch=8, code=2)
    assert "batch * processes was 4, is now 8" in text, text
    check_errors(errors, 1e-5, record_property, "losses within")


@pytest.mark.slow
def test_a_run_is_the_same_on_1_2_and_4_processes(tmp_path, tmp_path_factory, record_property):
    """With eight devices in all, 1, 2 and 4 processes have the same questions and keys, and so make
    the same steps."""
    flags = "--npq 4 --steps 2 --max_prompt 32 --max_answer 16 --lr 1e-4 --entropy_bonus 0.01"
    flags = [*taught(tmp_path_factory), *arguments([flags, "--save_every 0 --eval_data none"])]
    names = METRICS.split()

    def metrics_and_weights(processes, on):
        out = tmp_path / f"{processes}-{on}"
        run_to_end(out, [*flags, "--system=", "--mesh", on], processes, devices=8, batch=8)
        metrics = [[row[name] for name in names] for row in read_jsonl(out / "metrics.jsonl")]
        return np.array(metrics), load_file(out / "final/model.safetensors")

    # With one process, host_local equals auto.
    wanted, wanted_weights = metrics_and_weights(1, "auto")
    learning = dict(zip(names, wanted.T, strict=True))
    assert max(learning["reward/std"]) > 0.05, "no answers differ in reward"
    assert min(learning["grad_norm"]) > 1e-3, learning["grad_norm"]
    errors = {}
    for processes, on in ((4, "auto"), (2, "host_local")):
        metrics, weights = metrics_and_weights(processes, on)
        apart = [relative(weights[name], wanted_weights[name]) for name in wanted_weights]
        errors[processes, on] = [np.abs(metrics - wanted).max(), max(apart)]
    check_errors(errors, 1e-5, record_property, "metrics and weights within")


@pytest.mark.slow
def test_a_run_ends_when_a_host_falls_silent(tmp_path, tmp_path_factory, record_property):
    """If process 0 stops but its connections stay open, as when a host loses its power, the other
    process ends."""
    log = tmp_path / "log"
    # Train only supervised steps, which have one program to compile.
    flags = lives(tmp_path_factory, 0, "--sft_steps 999 --eval_data none")

    def trains():
        return "| gnorm" in log.read_text(errors="replace")

    with running(tmp_path / "run", flags, processes=2, log=log) as runs:
        assert until(trains, runs), log.read_text()
        runs[0].send_signal(signal.SIGSTOP)
        began = time.time()
        code = runs[1].wait(60)
        assert code
        took = time.time() - began
    record_property("the other ended", f"with {code} after {took:.0f} s")
