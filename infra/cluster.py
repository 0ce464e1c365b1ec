"""The processes of a run: find them, call the roll, gather values, stop together, leave.

A run is one JAX process a host (a TPU worker, a node of Slurm), or a task. All run the same program
on the same flags, and every one runs every jitted call.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from infra import nvidia
from infra.log import check, erase_status, exit_on, first_line, warn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Flags that may differ between the processes of a run.
FREE_PER_PROCESS = {"coordinator", "processes", "process_id", "start_timeout", "require_devices"}
START_ALL = "`bash launch.sh TYPE` starts all"


# ---------------------------------------------------------------- values of all processes
def all_gather_hosts(value) -> np.ndarray:
    """What each process has, stacked: [processes, ...]. Every process must call."""
    gathered = multihost_utils.process_allgather(np.asarray(value))
    return np.asarray(gathered).reshape(-1, *np.shape(value))


@contextlib.contextmanager
def together(what: str):
    """A block that gets `what` and that all processes leave at the same time. Every process must
    enter.

    Some of them may wait in it for minutes. If any stops in it, all stop, with exit code 2: else
    the others would wait for it, or abort when process 0 is gone.
    """
    stopped = None
    try:
        yield
    except SystemExit as e:
        stopped = e
    absent = []
    if jax.process_count() > 1:
        absent = np.flatnonzero(all_gather_hosts(int(stopped is not None))).tolist()
    if stopped:
        raise stopped
    check(not absent, f"{what} is not had by all: process {min(absent, default=0)} says why")


def host_count(mesh) -> int:
    """JAX processes that a mesh's devices belong to. The devices need not be here."""
    return len({device.process_index for device in mesh.devices.flat})


def give_cpu_devices_threads() -> None:
    """To be called before JAX looks for devices, for runs with several virtual CPU devices."""
    devices = int(os.environ.get("JAX_NUM_CPU_DEVICES", 0))
    if devices:
        # Else XLA has a thread per core, and collectives of more devices than that may deadlock.
        os.environ.setdefault("NPROC", str(4 * devices))


# ---------------------------------------------------------------- find the processes
@dataclass(frozen=True)
class Processes:
    """The processes of a run, as this one finds them."""

    address: str  # host:port of process 0
    hosts: list  # the host of each process, "" where it is not known
    index: int  # which of them this is
    local_gpu: int | None = None  # the one GPU of this process, None for all that it finds


def on_tpu_vm() -> bool:
    has_device = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    return bool(has_device) or "GCE_METADATA_HOST" in os.environ


def metadata(key: str, timeout: float | None) -> str:
    """What Google's metadata server says of this VM. Raises OSError."""
    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # A proxy would answer for itself, or not at all.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout).read().decode()


def find_processes(cfg) -> Processes:
    """From the flags, else from Slurm, else from the TPU slice; else this one alone."""
    if cfg.coordinator:
        return Processes(cfg.coordinator, [""] * cfg.processes, cfg.process_id)
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return slurm_processes()
    hosts = [""]
    index = 0
    if on_tpu_vm():
        try:
            endpoints = metadata("attributes/worker-network-endpoints", 9)
            index = int(metadata("attributes/agent-worker-number", 9))
            hosts = [endpoint.split(":")[-1] for endpoint in endpoints.split(",")]
        except (OSError, ValueError) as e:
            warn(f"not a slice of Cloud TPUs, so one process ({first_line(e)})")
    # JAX's own choice of a port, 8482, is closed in Google's firewall.
    return Processes(f"{hosts[0]}:8476", hosts, index)


def slurm_processes() -> Processes:
    """The tasks of this job step, a node's together."""
    env = os.environ
    list_nodes = 'scontrol show hostnames "$SLURM_STEP_NODELIST" 2> /dev/null'
    nodes = subprocess.check_output(list_nodes, shell=True, text=True).split()
    tasks = int(env["SLURM_STEP_NUM_TASKS"])
    # As in 2(x3),1: three nodes with two tasks, and one with one.
    check(
        "," not in env.get("SLURM_STEP_TASKS_PER_NODE", ""),
        f"{tasks} tasks do not divide over {len(nodes)} nodes, which got "
        f"{env.get('SLURM_STEP_TASKS_PER_NODE')}; give --ntasks-per-node, as many to each node",
    )
    tasks_per_node = tasks // len(nodes)
    # Two jobs on one node must not choose the same port.
    port = 12000 + int(env["SLURM_JOB_ID"]) % 20000
    # Where all tasks of a node find all its GPUs, each takes one.
    gpus = env.get("CUDA_VISIBLE_DEVICES", ",").split(",")
    gpus_are_shared = tasks_per_node > 1 and len(gpus) > 1
    # Else a task would have none, or a GPU nobody. Without the variable they cannot be counted.
    check(
        not gpus_are_shared or len(gpus) == tasks_per_node or not any(gpus),
        f"{tasks_per_node} tasks share the {len(gpus)} GPUs of a node; "
        f"give --ntasks-per-node {len(gpus)}, one a GPU, or 1, which takes all",
    )
    return Processes(
        address=f"{nodes[0]}:{port}",
        hosts=[node for node in nodes for _ in range(tasks_per_node)],
        index=int(env["SLURM_PROCID"]),
        local_gpu=int(env["SLURM_LOCALID"]) if gpus_are_shared else None,
    )


# ---------------------------------------------------------------- the roll call
def roll_call(processes: Processes, facts: dict, seconds: float) -> str:
    """All report to process 0 what they run -> what is wrong, or "".

    JAX's own wait aborts after a while and names nobody.
    """
    names = [
        f"process {i} ({host})" if host else f"process {i}"
        for i, host in enumerate(processes.hosts)
    ]
    if processes.index == 0:
        return call_the_roll(processes, names, facts, seconds)
    return answer_the_roll(processes, names, facts, seconds)


def answer_the_roll(processes, names, facts, seconds):
    """Report to process 0, which may not be there yet -> its verdict on all."""
    server, port = processes.address.rsplit(":", 1)
    deadline = time.time() + seconds
    cause = ""
    while time.time() < deadline:
        try:
            with (
                socket.create_connection((server, port), 5) as connection,
                connection.makefile("rw") as f,
            ):
                # The verdict comes when the last process is there.
                connection.settimeout(seconds + 5)
                print(json.dumps([processes.index, facts]), file=f, flush=True)
                return json.loads(f.readline())
        except socket.gaierror as e:
            cause = f": the name {server} does not resolve here ({e.strerror})"
        # Process 0 may not listen yet.
        except (OSError, ValueError):
            cause = ""
        time.sleep(0.5)
    return (
        f"{names[processes.index]} of {len(names)} heard nothing from process 0 at "
        f"{processes.address} for {seconds} s{cause}"
    )


def call_the_roll(processes, names, facts, seconds):
    """Wait for the others, compare what they run, and send all the same verdict."""
    port = int(processes.address.rsplit(":", 1)[1])
    deadline = time.time() + seconds
    facts_of = {0: facts}
    # The connections stay open for the verdict.
    files = []
    with socket.create_server(("", port), backlog=len(names)) as server:
        while (absent := [i for i in range(len(names)) if i not in facts_of]) and (
            time.time() < deadline
        ):
            server.settimeout(max(0.1, min(10, deadline - time.time())))
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                files.append(connection.makefile("rw"))
                index, its_facts = json.loads(files[-1].readline())
                facts_of[index] = its_facts
            except (OSError, ValueError, TypeError):
                # Nobody came for a while, or somebody who is no process of this run.
                print(f"waiting for {', '.join(names[i] for i in absent)}", flush=True)
    fault = first_difference(names, facts_of)
    if absent:
        fault = (
            f"{len(names)} processes are expected, {len(facts_of)} started within {seconds} s; "
            f"absent: {', '.join(names[i] for i in absent)}. Was only worker 0 started? {START_ALL}"
        )
    for f in files:
        # A caller may have given up.
        with contextlib.suppress(OSError):
            print(json.dumps(fault), file=f, flush=True)
    return fault


def first_difference(names, facts_of):
    """The first fact in which a process differs from process 0, as a message, or ""."""
    for i in sorted(facts_of):
        for key, value in facts_of[0].items():
            found = facts_of[i].get(key)
            if found != value:
                return (
                    f"{names[i]} has {key} = {found!r}, process 0 has {value!r}; "
                    "give all the same command and files"
                )
    return ""


def bypass_proxies(hosts: set[str]) -> None:
    """To be called before JAX connects: processes of one run never talk through a proxy.

    gRPC reads no_grpc_proxy, or else no_proxy; Python reads no_proxy, or else NO_PROXY.
    """
    env = os.environ
    for name in ("NO_PROXY", "no_proxy", "no_grpc_proxy"):
        # A variable that is set here hides the one that was read in its place.
        listed = env.get(name) or env.get("no_proxy") or env.get("NO_PROXY") or ""
        names = [host for host in listed.split(",") if host]
        env[name] = ",".join(names + sorted(hosts - set(names)))
    # JAX would warn of these variables, and advise to unset them.
    jax.config.update("jax_check_proxy_envs", False)


def connect(cfg) -> None:
    """Join the run's other processes, if it has any, once all are there and have the same flags and
    code. Exits 2 where they do not belong together."""
    with exit_on(
        Exception,
        "the run's processes cannot be found from SLURM_* or GCE_METADATA_HOST; mend them, "
        "unset SLURM_STEP_NUM_TASKS, or set --coordinator",
    ):
        found = find_processes(cfg)
        count = len(found.hosts)
        check(
            0 <= found.index < count,
            f"this is process {found.index}, but there are {count}: 0, 1, ...",
        )
    if count > 1:
        bypass_proxies({found.address.rsplit(":", 1)[0], *found.hosts} - {""})
        flags = dataclasses.asdict(cfg)
        facts = {name: flags[name] for name in flags if name not in FREE_PER_PROCESS}
        facts |= {"commit": commit(), "code": code_hash(), "jax": jax.__version__}
        with exit_on(OSError, f"{found.address} cannot be listened on: does another run use it?"):
            fault = roll_call(found, facts, cfg.start_timeout)
        check(not fault, fault)
        # JAX's service would swallow SIGTERM.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            found.address,
            count,
            found.index,
            found.local_gpu,
            "deactivate",
            heartbeat_timeout_seconds=30,
        )
    check_devices(cfg.require_processes, cfg.require_devices)


def check_devices(require_processes: int, require_devices: int) -> None:
    nvidia.find_devices()
    processes = jax.process_count()
    devices = jax.device_count()
    # 0 requires nothing.
    wanted_processes = require_processes or processes
    wanted_devices = require_devices or devices
    check(
        processes == wanted_processes and devices == wanted_devices,
        f"jax.process_count() = {processes} with {devices} devices, expected {wanted_processes} "
        f"with {wanted_devices}: was only worker 0 started? {START_ALL}",
    )


# ---------------------------------------------------------------- which code this is
@functools.cache
def code_hash() -> str:
    """What tells these files from others."""
    paths = sorted(glob.glob(f"{ROOT}/*.py") + glob.glob(f"{ROOT}/infra/*.py"))
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()[:12]


@functools.cache
def commit() -> str:
    """The commit of this checkout, with "-dirty" where files differ from it.

    launch.sh names it in the environment where it sends files without their git directory.
    """
    # The shell hides that git is missing.
    git = f"cd {shlex.quote(ROOT)} && git describe --always --dirty --abbrev=40"
    described = os.environ.get("PODGRPO_COMMIT") or subprocess.getoutput(f"({git}) 2> /dev/null")
    return described or "unknown"


# ---------------------------------------------------------------- stop together
class Stop(Exception):
    """A signal, whose number this holds, asks the run to end."""


class StopSignal:
    """Holds the number of the signal that asks this process to end, 0 while none does."""

    def __init__(self):
        self.number = 0

    def note(self, number, _frame=None):
        self.number = number
        # The same signal once more ends the process at once.
        signal.signal(number, signal.SIG_DFL)

    def warned(self, number, _frame=None):
        """Note a warning that SIGTERM will come. That is then the first, and ends no save."""
        self.number = number


SECONDS_BETWEEN_TRIES = 10  # to ask a metadata server that gives no answer


def end_at_once(number, _frame=None) -> None:
    """What SIGINT and SIGUSR1 do before a run watches its signals: there is nothing to save."""
    erase_status()
    warn("interrupted before the first step: nothing is saved")
    # An orderly end would crash where JAX compiles in a thread of its own.
    os._exit(128 + number)


def watch_signals() -> StopSignal:
    """From now on SIGTERM, SIGINT, SIGUSR1 (Slurm's warning of the time limit) and Google's notice
    that this VM will be preempted end the run at its next `check_for_stop`."""
    stop_signal = StopSignal()
    # A handler may only note the signal: processes stop together, between two device calls.
    signal.signal(signal.SIGTERM, stop_signal.note)
    signal.signal(signal.SIGINT, stop_signal.note)
    signal.signal(signal.SIGUSR1, stop_signal.warned)
    if on_tpu_vm():
        threading.Thread(target=wait_for_preemption, args=[stop_signal], daemon=True).start()
    return stop_signal


def wait_for_preemption(stop_signal: StopSignal) -> None:
    """Ask this process to end once Google's metadata server announces the preemption."""
    while True:
        try:
            # The server answers when the value changes.
            if metadata("preempted?wait_for_change=true", None) == "TRUE":
                stop_signal.warned(signal.SIGTERM)
                return
        except (OSError, ValueError):
            time.sleep(SECONDS_BETWEEN_TRIES)


def check_for_stop(stop_signal: StopSignal) -> None:
    """A place where all processes can stop together. Raises Stop in all if one was asked to."""
    # The largest number, so that all raise the same.
    number = int(all_gather_hosts(stop_signal.number).max())
    if number:
        raise Stop(number)


def leave(error: BaseException) -> None:
    """End this process with the error's exit code, or raise it again where it is the only one.

    At an orderly exit JAX would wait for the other processes, which wait for this one.
    """
    # A status line would show through what is printed next, a traceback or the shell's prompt.
    erase_status()
    code = error.code if isinstance(error, SystemExit) else 1
    if not jax.distributed.is_initialized() or code == 0:
        raise error
    if code == 1:
        traceback.print_exception(error)
    sys.stdout.flush()
    try:
        index = jax.process_index()
    # JAX, which found no devices, does not say: this may be process 0.
    except Exception:
        index = 0
    # Process 0 goes last, since the others abort when it is gone.
    if index == 0:
        time.sleep(3)
    os._exit(code)
