"""The processes of a run: find them, compare their flags, gather values, stop together, exit.

A run has one JAX process per machine (a TPU worker or a Slurm node), or one per Slurm task. All
processes run the same program with the same flags, and make the same calls in the same order:
functions without jitted calls may gather values, too.
"""

import collections
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
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from infra.host import nvidia
from infra.host.console import check, erase_status, exit_on, first_line, open_streams, warn

ROOT = os.path.abspath(f"{__file__}/../../..")
# Flags that may differ between the processes of a run. In place of the flag `processes`, `connect`
# compares the number of processes that each process has found.
FREE_PER_PROCESS = {"coordinator", "processes", "process_id", "start_timeout", "require_devices"}


def slurm_tasks() -> int:
    """The number of tasks of this Slurm job step, or 1 outside Slurm."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))


def how_to_start_all() -> str:
    """Advice for when some processes have not started."""
    if slurm_tasks() > 1:
        alone = "in a shell of `srun --pty`, unset SLURM_STEP_NUM_TASKS to run a single process"
        return f"look at their logs, or, {alone}"
    return "was only worker 0 started? on a TPU slice, `bash launch.sh TYPE` starts all workers"


# ---------------------------------------------------------------- values of all processes
def all_gather_processes(value) -> np.ndarray:
    """Stack the values of all processes: [processes, ...]. Every process must call this."""
    value = np.asarray(value)
    # JAX would round 64-bit numbers to 32 bits, so gather their bits.
    is_wide = value.dtype.itemsize == 8
    bits = value.ravel().view(np.int32) if is_wide else value
    gathered = np.ascontiguousarray(multihost_utils.process_allgather(bits))
    return (gathered.view(value.dtype) if is_wide else gathered).reshape(-1, *value.shape)


def processes_of_this_machine() -> int:
    """How many of the run's processes share this machine. Every process must call this."""
    machines = all_gather_processes(zlib.crc32(socket.gethostname().encode()))
    return int((machines == machines[jax.process_index()]).sum())


@contextlib.contextmanager
def together(what: str):
    """A context in which each process loads or downloads something, and which all processes leave
    at the same time. Every process must enter it.

    what: the name of what is loaded, for the message. If one process exits in the context, all
    exit: otherwise the others would wait for it, or abort when process 0 is gone. Contexts may be
    nested: a process that exits in the outer one meets the others at the end of the inner one.
    """
    exited = None
    try:
        yield
    except SystemExit as e:
        exited = e
    # After an inner context, all processes already know that they exit.
    if hasattr(exited, "is_known"):
        raise exited
    failed = []
    if jax.process_count() > 1:
        failed = np.flatnonzero(all_gather_processes(exited is not None)).tolist()
    if failed and not exited:
        warn(f"not all processes have {what}: process {failed[0]} says why")
        exited = SystemExit(2)
    if exited:
        exited.is_known = True
        raise exited


def host_count(mesh) -> int:
    """Number of hosts (JAX processes) of a mesh. This machine need not have the mesh's devices."""
    return len({device.process_index for device in mesh.devices.flat})


def give_cpu_devices_threads() -> None:
    """Give several virtual CPU devices enough threads. Call this before JAX looks for devices."""
    devices = int(os.environ.get("JAX_NUM_CPU_DEVICES", 0))
    if devices:
        # XLA starts one thread per core, unless NPROC says otherwise. If there are more devices
        # than threads, collectives may deadlock.
        os.environ.setdefault("NPROC", str(4 * devices))


# ---------------------------------------------------------------- find the processes
@dataclass(frozen=True)
class Processes:
    """The processes of a run, as this process finds them."""

    address: str  # host:port of process 0
    hosts: list  # the host of each process, or "" if unknown
    index: int  # index of this process
    local_gpu: int | None = None  # index of this process's only GPU; None if it uses all it finds


def on_tpu_vm() -> bool:
    has_device = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    return bool(has_device) or "GCE_METADATA_HOST" in os.environ


def metadata(key: str, timeout: float | None) -> str:
    """Returns the value of `key` for this VM from Google's metadata server. timeout: seconds.
    Raises OSError if the server does not answer."""
    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # Bypass proxies: a proxy would answer for its own machine, or not at all.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout).read().decode()


def find_processes(cfg) -> Processes:
    """Find the processes from the flags, or else from Slurm, or else from the TPU slice. Without
    any of these, this process is alone."""
    if cfg.coordinator:
        return Processes(cfg.coordinator, [""] * cfg.processes, cfg.process_id)
    if slurm_tasks() > 1:
        return slurm_processes()
    hosts = [""]
    index = 0
    if on_tpu_vm():
        try:
            endpoints = metadata("attributes/worker-network-endpoints", 9)
            index = int(metadata("attributes/agent-worker-number", 9))
            # An endpoint is a host's address, or name:id:address.
            hosts = [endpoint.split(":")[-1] for endpoint in endpoints.split(",")]
        except (OSError, ValueError) as e:
            warn(f"this is not a slice of Cloud TPUs, so the run has one process ({first_line(e)})")
    # JAX's default port, 8482, is closed in Google's firewall.
    return Processes(f"{hosts[0]}:8476", hosts, index)


def slurm_processes() -> Processes:
    """The tasks of this Slurm job step, ordered by node."""
    env = os.environ
    list_nodes = 'scontrol show hostnames "$SLURM_STEP_NODELIST" 2> /dev/null'
    nodes = subprocess.check_output(list_nodes, shell=True, text=True).split()
    tasks = slurm_tasks()
    # A comma means unequal nodes: 2(x3),1 is three nodes with two tasks and one node with one.
    check(
        "," not in env.get("SLURM_STEP_TASKS_PER_NODE", ""),
        f"the {len(nodes)} nodes got unequal numbers of the {tasks} tasks, "
        f"{env.get('SLURM_STEP_TASKS_PER_NODE')}; give --ntasks-per-node, the same for each node",
    )
    tasks_per_node = tasks // len(nodes)
    # Two jobs on the same node must not choose the same port.
    port = 12000 + int(env["SLURM_JOB_ID"]) % 20000
    # If several tasks of a node see the same GPUs, each task takes one of them. If a task sees a
    # single GPU, Slurm has given it a GPU of its own. Without CUDA_VISIBLE_DEVICES, every task sees
    # all GPUs, but they cannot be counted here.
    visible = env.get("CUDA_VISIBLE_DEVICES")
    gpus = None if visible is None else len(visible.split(","))
    gpus_are_shared = tasks_per_node > 1 and gpus != 1
    # With a different number of tasks, some task would have no GPU, or some GPU would be unused.
    check(
        not gpus_are_shared or gpus in (tasks_per_node, None),
        f"{tasks_per_node} tasks share the {gpus} GPUs of a node; "
        f"give --ntasks-per-node {gpus}, one task per GPU, or 1, one task with all GPUs",
    )
    return Processes(
        address=f"{nodes[0]}:{port}",
        hosts=[node for node in nodes for _ in range(tasks_per_node)],
        index=int(env["SLURM_PROCID"]),
        local_gpu=int(env["SLURM_LOCALID"]) if gpus_are_shared else None,
    )


# ---------------------------------------------------------------- the roll call
def roll_call(processes: Processes, facts: dict, seconds: float) -> str:
    """Have all processes report their facts to process 0. Returns the fault as a message, or "".

    JAX's own start-up aborts after a while, and does not name the absent processes.
    """
    names = [
        f"process {i} ({host})" if host else f"process {i}"
        for i, host in enumerate(processes.hosts)
    ]
    if processes.index == 0:
        return call_the_roll(processes, names, facts, seconds)
    return answer_the_roll(processes, names, facts, seconds)


def answer_the_roll(processes, names, facts, seconds):
    """Report to process 0, which may not have started yet. Returns its verdict on all processes."""
    server, port = processes.address.rsplit(":", 1)
    deadline = time.monotonic() + seconds
    unreachable = "is it running, and is its port open?"
    cause = unreachable
    while time.monotonic() < deadline:
        try:
            with (
                socket.create_connection((server, port), 5) as connection,
                connection.makefile("rw") as f,
            ):
                # The verdict comes when the last process has reported.
                connection.settimeout(seconds + 5)
                print(json.dumps([processes.index, facts]), file=f, flush=True)
                return json.loads(f.readline())
        except socket.gaierror as e:
            cause = f"the name {server} does not resolve here ({e.strerror})"
        # Process 0 may not be listening yet.
        except (OSError, ValueError):
            cause = unreachable
        time.sleep(0.5)
    return (
        f"{names[processes.index]} of {len(names)} heard nothing from process 0 at "
        f"{processes.address} for {seconds} s: {cause}"
    )


def call_the_roll(processes, names, facts, seconds):
    """Wait for the other processes, compare their facts, and send all of them the same verdict.
    Returns the verdict."""
    port = int(processes.address.rsplit(":", 1)[1])
    deadline = time.monotonic() + seconds
    facts_of = {0: facts}
    # Keep the connections open to send the verdict.
    files = []
    absent = list(range(1, len(names)))
    with socket.create_server(("", port), backlog=len(names)) as server:
        while absent and time.monotonic() < deadline:
            server.settimeout(max(0.1, min(10, deadline - time.monotonic())))
            try:
                connection, _ = server.accept()
                connection.settimeout(5)
                files.append(connection.makefile("rw"))
                index, its_facts = json.loads(files[-1].readline())
                facts_of[index] = its_facts
                absent = [i for i in absent if i not in facts_of]
            except (OSError, ValueError, TypeError):
                # Nothing has connected for a while, or a program that is not part of this run has.
                print(f"waiting for {', '.join(names[i] for i in absent)}", flush=True)
    fault = first_difference(names, facts_of)
    if absent:
        fault = (
            f"{len(names)} processes are expected, {len(facts_of)} started within {seconds} s; "
            f"absent: {', '.join(names[i] for i in absent)}: {how_to_start_all()}; a larger "
            "--start_timeout waits longer"
        )
    for f in files:
        # A process may have given up waiting.
        with contextlib.suppress(OSError):
            print(json.dumps(fault), file=f, flush=True)
    return fault


def first_difference(names, facts_of):
    """A message with the first fact in which a process differs from process 0, or ""."""
    for i in sorted(facts_of):
        for key, value in facts_of[0].items():
            found = facts_of[i].get(key)
            if found != value:
                # A process that expects more processes may have an index beyond the names.
                name = names[i] if i < len(names) else f"process {i}"
                return (
                    f"{name} has {key} = {found!r}, process 0 has {value!r}; "
                    "give all processes the same command and files"
                )
    return ""


def bypass_proxies(hosts: set[str]) -> None:
    """Keep processes of one run from talking through a proxy. Call this before JAX connects.

    gRPC reads no_grpc_proxy, or else no_proxy. Python reads no_proxy, or else NO_PROXY.
    """
    env = os.environ
    for name in ("NO_PROXY", "no_proxy", "no_grpc_proxy"):
        # Once this variable is set, it is read instead of the others, so keep the hosts that the
        # others list.
        listed = env.get(name) or env.get("no_proxy") or env.get("NO_PROXY") or ""
        names = [host for host in listed.split(",") if host]
        env[name] = ",".join(names + sorted(hosts - set(names)))
        # Python takes `*` to mean all hosts only if the list has no other entry.
        if "*" in names and name != "no_grpc_proxy":
            env[name] = "*"
    # Keep JAX from warning about these variables and advising to unset them.
    jax.config.update("jax_check_proxy_envs", False)


def connect(cfg) -> None:
    """Connect to the run's other processes, if it has any, once all have reported the same flags
    and code. Then look for devices. Exits with code 2 if a process is absent or differs, or if
    `check_devices` fails."""
    with exit_on(
        Exception,
        "the run's processes cannot be found from SLURM_* or GCE_METADATA_HOST; fix these "
        "variables, unset SLURM_STEP_NUM_TASKS, or set --coordinator",
    ):
        found = find_processes(cfg)
        count = len(found.hosts)
        check(
            0 <= found.index < count,
            f"process_id = {found.index} is not one of the {count} processes 0 to {count - 1}",
        )
    if count > 1:
        bypass_proxies({found.address.rsplit(":", 1)[0], *found.hosts} - {""})
        flags = dataclasses.asdict(cfg)
        facts = {name: flags[name] for name in flags if name not in FREE_PER_PROCESS}
        facts |= {"processes": count, "jax": jax.__version__}
        facts |= {"commit": commit(), "code": code_hash()}
        with exit_on(OSError, f"cannot listen on {found.address}, which another run may use"):
            fault = roll_call(found, facts, cfg.start_timeout)
        check(not fault, fault)
        # JAX's preemption service would swallow SIGTERM.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            coordinator_address=found.address,
            num_processes=count,
            process_id=found.index,
            local_device_ids=found.local_gpu,
            # Keep JAX from looking for a cluster: the processes have been found.
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=30,
        )
    check_devices(cfg.require_processes, cfg.require_devices)


def check_devices(require_processes: int, require_devices: int) -> None:
    """Exit with code 2 unless JAX finds these numbers of processes and devices in the run."""
    nvidia.find_devices()
    processes = jax.process_count()
    devices = jax.device_count()
    # 0 means no requirement.
    wanted_processes = require_processes or processes
    wanted_devices = require_devices or devices
    check(
        processes == wanted_processes and devices == wanted_devices,
        f"jax.process_count() = {processes} with {devices} devices, expected {wanted_processes} "
        f"with {wanted_devices}: {how_to_start_all()}",
    )
    counts = collections.Counter(device.process_index for device in jax.devices())
    check(
        len({*counts.values()}) == 1,
        f"the processes have unequal numbers of devices: {sorted(counts.values())}; on Slurm, "
        "give --gpus-per-node, not --gpus",
    )


# ---------------------------------------------------------------- which code this is
@functools.cache
def code_hash() -> str:
    """A hash of the Python files that a run executes, to tell whether all processes run the same
    code, and whether the code has changed when a run resumes."""
    modules = [f"{ROOT}/{name}.py" for name in ("train", "model", "kernel")]
    paths = modules + sorted(glob.glob(f"{ROOT}/infra/*/*.py"))
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()[:12]


@functools.cache
def commit() -> str:
    """The commit of this checkout, with "-dirty" if files differ from it, or "unknown".

    TPU workers get the files without the git directory; there, PODGRPO_COMMIT holds the commit.
    """
    # The parentheses also redirect the shell's own error if git is missing.
    git = f"cd {shlex.quote(ROOT)} && git describe --always --dirty --abbrev=40"
    described = os.environ.get("PODGRPO_COMMIT") or subprocess.getoutput(f"({git}) 2> /dev/null")
    return described or "unknown"


# ---------------------------------------------------------------- stop together
class Stop(Exception):
    """Raised when a signal has asked the run to end. The argument is the signal's number."""


class StopSignal:
    """Holds the number of the signal that asks this process to end, or 0."""

    def __init__(self):
        self.number = 0

    def note(self, number, _frame=None):
        """Handle a signal by noting its number."""
        self.number = number
        # The same signal again ends the process at once.
        signal.signal(number, signal.SIG_DFL)

    def warned(self, number, _frame=None):
        """Handle a warning that SIGTERM will come: note the signal, but keep its handler. Otherwise
        a repeated warning, or the SIGTERM after a preemption notice, would cut a save short."""
        self.number = number


SECONDS_BETWEEN_TRIES = 10  # if the metadata server does not answer


def end_at_once(number, _frame=None) -> None:
    """Handle SIGINT and SIGUSR1 before a run watches signals, when there is nothing to save."""
    erase_status()
    warn("interrupted before a new step: nothing new is saved")
    # An orderly exit would crash while JAX compiles in its own thread.
    os._exit(128 + number)


def watch_signals() -> StopSignal:
    """From now on, some signals end the run at its next `check_for_stop`.

    These are SIGTERM, SIGINT, SIGHUP (the terminal has closed), SIGUSR1 (Slurm's warning of the
    time limit) and Google's notice that this VM will be preempted.
    """
    stop_signal = StopSignal()
    # Handlers only note the signal: all processes must stop together, between two device calls.
    signal.signal(signal.SIGTERM, stop_signal.note)
    signal.signal(signal.SIGINT, stop_signal.note)
    # nohup makes a process ignore SIGHUP.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # When a terminal closes, both its shell and the kernel send SIGHUP.
        signal.signal(signal.SIGHUP, stop_signal.warned)
    signal.signal(signal.SIGUSR1, stop_signal.warned)
    if on_tpu_vm():
        threading.Thread(target=wait_for_preemption, args=[stop_signal], daemon=True).start()
    return stop_signal


def wait_for_preemption(stop_signal: StopSignal) -> None:
    """Ask this process to end once Google's metadata server announces the preemption."""
    # The notice may have come before this process began.
    key = "preempted"
    while True:
        try:
            if metadata(key, None) == "TRUE":
                stop_signal.warned(signal.SIGTERM)
                return
            # From now on, the server answers when the value changes, or after ten seconds. Without
            # this time limit, a change between two requests would go unnoticed.
            key = "preempted?wait_for_change=true&timeout_sec=10"
        except (OSError, ValueError):
            time.sleep(SECONDS_BETWEEN_TRIES)


def check_for_stop(stop_signal: StopSignal) -> None:
    """Make all processes stop together: raises Stop in all of them if any was asked to stop."""
    # Take the largest number, so that all processes stop for the same signal.
    number = int(all_gather_processes(stop_signal.number).max())
    if number:
        raise Stop(number)


def run_process(main: Callable) -> None:
    """Run main(arguments of the command line) as one process of a run. Errors end the process."""
    give_cpu_devices_threads()
    signal.signal(signal.SIGINT, end_at_once)
    signal.signal(signal.SIGUSR1, end_at_once)
    open_streams()
    try:
        main(sys.argv[1:])
    except BaseException as e:
        leave(e)
    finally:
        # Nothing is left to save, and SIGUSR1 would kill the interpreter while it exits.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def leave(error: BaseException) -> None:
    """End this process with the error's exit code. A process that is alone, or that ends with code
    0, raises the error again. Others call os._exit: in an orderly exit, JAX would wait for the
    other processes, which wait for this one.
    """
    # Erase the status line, which would stay beside a traceback or the shell's prompt.
    erase_status()
    code = error.code if isinstance(error, SystemExit) else 1
    if not jax.distributed.is_initialized() or code == 0:
        raise error
    # Whoever raised SystemExit has printed why.
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    try:
        index = jax.process_index()
    # If JAX found no devices, the index is unknown: act as process 0, which this may be.
    except Exception:
        index = 0
    # Process 0 exits last, since the others abort when it is gone.
    if index == 0:
        time.sleep(3)
    os._exit(code)
