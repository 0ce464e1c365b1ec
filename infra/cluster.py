"""The processes of a run: find them, call the roll, gather values, stop together."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from functools import cache

import jax
import numpy as np
from jax.experimental import multihost_utils

from infra.log import check, exit_on, first_line

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

def all_gather_hosts(value):
    """What each process has, stacked: [processes, ...]; every process must call."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(value))).reshape(-1, *np.shape(value))

FLAGS_OF_A_PROCESS = {"coordinator", "processes", "process_id", "start_timeout", "require_devices"}  # may differ by process

def on_tpu_vm():
    return glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") or "GCE_METADATA_HOST" in os.environ

def metadata(key, timeout):
    """What Google's metadata server says of this VM."""
    where = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    return urllib.request.urlopen(urllib.request.Request(
        f"http://{where}/computeMetadata/v1/instance/{key}", None, {"Metadata-Flavor": "Google"}),
        timeout=timeout).read().decode()

def find_processes(cfg):
    """-> (host:port of process 0, the host of each process, this one's number, the GPUs that are its own)"""
    env, hosts, me = os.environ, [""], 0
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if cfg.coordinator:
        return cfg.coordinator, hosts * cfg.processes, cfg.process_id, None
    if tasks > 1:
        list_nodes = 'scontrol show hostnames "$SLURM_STEP_NODELIST" 2> /dev/null'
        nodes = subprocess.check_output(list_nodes, shell=True, text=True).split()
        each, address = tasks // len(nodes), f"{nodes[0]}:{12000 + int(env['SLURM_JOB_ID']) % 20000}"
        shared = each > 1 and "," in env.get("CUDA_VISIBLE_DEVICES", ",")  # the node's GPUs, by all its tasks
        return (address, [node for node in nodes for _ in range(each)], int(env["SLURM_PROCID"]),
                int(env["SLURM_LOCALID"]) if shared else None)
    if on_tpu_vm():
        try:
            ends = metadata("attributes/worker-network-endpoints", 9)
            hosts, me = [end.split(":")[-1] for end in ends.split(",")], int(
                metadata("attributes/agent-worker-number", 9))
        except (OSError, ValueError) as e:
            print(f"train.py: not a slice of Cloud TPUs, so one process ({first_line(e)})", flush=True)
    return f"{hosts[0]}:8476", hosts, me, None  # JAX's own choice, 8482, is closed in Google's firewall

def roll_call(address, hosts, me, mine, seconds):
    """All tell process 0 what they run -> what is wrong, or "". (JAX's own wait aborts and names nobody.)"""
    (server, port), end = address.rsplit(":", 1), time.time() + seconds
    names = [f"process {i}" + f" ({host})" * bool(host) for i, host in enumerate(hosts)]
    while me and time.time() < end:
        try:
            with socket.create_connection((server, port), 5) as s, s.makefile("rw") as f:
                s.settimeout(seconds + 5)
                print(json.dumps([me, mine]), file=f, flush=True)
                return json.loads(f.readline())
        except (OSError, ValueError):  # process 0 is not there yet
            time.sleep(0.5)
    if me:
        return f"{names[me]} of {len(hosts)} heard nothing from process 0 at {address} for {seconds} s"
    told, files = {0: mine}, []
    with socket.create_server(("", int(port)), backlog=len(hosts)) as s:
        while (absent := [n for i, n in enumerate(names) if i not in told]) and time.time() < end:
            s.settimeout(max(0.1, min(10, end - time.time())))
            try:
                connection, _ = s.accept()
                connection.settimeout(5)
                files.append(connection.makefile("rw"))
                told.update([json.loads(files[-1].readline())])
            except (OSError, ValueError, TypeError):  # nobody came for a while, or one who is none of us
                print(f"waiting for {', '.join(absent)}", flush=True)
    fault = next((f"{names[i]} has {k} = {told[i].get(k)!r}, process 0 has {v!r}; give all the same command "
                  "and files" for i in sorted(told) for k, v in mine.items() if told[i].get(k) != v), "")
    if absent:
        fault = (f"{len(hosts)} processes are expected, {len(told)} started within {seconds} s; absent: "
                 f"{', '.join(absent)}. Was only worker 0 started? `bash launch.sh TYPE` starts all")
    for f in files:
        with contextlib.suppress(OSError):  # a caller that gave up
            print(json.dumps(fault), file=f, flush=True)
    return fault

def connect(cfg):
    """Join the run's other processes, if it has any, once all are there and run the same."""
    with exit_on(Exception, "the run's processes cannot be found from SLURM_* or GCE_METADATA_HOST; mend "
                 "them, unset SLURM_STEP_NUM_TASKS, or set --coordinator"):
        address, hosts, me, gpus = find_processes(cfg)
        check(0 <= me < len(hosts), f"this is process {me}, but there are {len(hosts)}: 0, 1, ...")
    if len(hosts) > 1:
        mine = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in FLAGS_OF_A_PROCESS} | {
            "commit": commit(), "code": code_hash(), "jax": jax.__version__}
        with exit_on(OSError, f"{address} cannot be listened on: does another run use it?"):
            fault = roll_call(address, hosts, me, mine, cfg.start_timeout)
        check(not fault, fault)
        jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
        jax.distributed.initialize(address, len(hosts), me, gpus, "deactivate", heartbeat_timeout_seconds=30)
    with exit_on(Exception, f"JAX finds no devices, with JAX_PLATFORMS = "
                 f"{os.environ.get('JAX_PLATFORMS', '')!r}; try JAX_PLATFORMS=cpu"):
        found = jax.process_count(), jax.device_count()
    want = cfg.require_processes or found[0], cfg.require_devices or found[1]
    check(found == want, "jax.process_count() = {} with {} devices, expected {} with {}: was only worker 0 "
          "started? `bash launch.sh TYPE` starts all".format(*found, *want))

def code_hash():
    """What tells these files from others."""
    files = (open(path, "rb").read() for path in sorted(glob.glob(f"{ROOT}/*.py") + glob.glob(f"{ROOT}/infra/*.py")))
    return hashlib.sha256(b"".join(files)).hexdigest()[:12]

@cache
def commit():
    """The commit this is, and whether files differ from it; launch.sh tells it where it sent the files."""
    git = f"cd {shlex.quote(ROOT)} && git describe --always --dirty --abbrev=40"
    return os.environ.get("PODGRPO_COMMIT") or subprocess.getoutput(f"({git}) 2> /dev/null") or "unknown"

class Stop(Exception):
    """A signal, its number, asks to end."""

PATIENCE = 10  # seconds between questions to a metadata server that gives no answer

def watch_signals(run):
    """SIGTERM and SIGINT, or Google's notice that the VM will be preempted, end the run at the next `pause`;
    the same signal once more ends it at once."""
    def note(number, _):
        run.signal = number
        signal.signal(number, signal.SIG_DFL)
    def listen():
        while True:
            try:
                if metadata("preempted?wait_for_change=true", None) == "TRUE":
                    return os.kill(os.getpid(), signal.SIGTERM)
            except (OSError, ValueError):
                time.sleep(PATIENCE)
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    if on_tpu_vm():
        threading.Thread(target=listen, daemon=True).start()

def check_for_stop(run):
    """Where all processes can stop: they do if one was told to."""
    if number := int(all_gather_hosts(run.signal).max()):
        raise Stop(number)
