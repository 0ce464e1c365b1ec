"""NVIDIA GPUs: check that JAX uses them if the run is meant for them, and that cuDNN is usable.

If JAX cannot load its CUDA plugin, it prints pages of errors and goes on without GPUs. A cuDNN
older than the one that the plugin was compiled for passes JAX's own check, and fails at the first
call of attention.
"""

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys

import jax

from infra.host.console import check, first_line

# The oldest major version of the driver that each CUDA version of JAX's wheels supports
# (docs.jax.dev/en/latest/installation.html, docs.nvidia.com/deploy/cuda-compatibility).
OLDEST_DRIVER = {"13": 580, "12": 525}


def find_devices() -> None:
    """Make JAX look for devices. Exits with code 2 if it finds none.

    Also exits with code 2 if it finds no GPU where the run should use one: JAX_PLATFORMS names
    GPUs, or it is unset and the machine has GPUs.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    with plugin_faults() as faults:
        try:
            found = jax.default_backend()
        except Exception as e:
            found = "none"
            faults.append(e)
    if found == "gpu":
        check_cudnn()
        return
    # Show the first fault, which causes the others, unless it is a bare assert without a text.
    cause = f" ({first_line(faults[0])})" if faults and str(faults[0]) else ""
    # launch.sh names GPUs in JAX_PLATFORMS whenever a run is meant for them.
    if "cuda" in platforms or "gpu" in platforms:
        advice = how_to_find_gpus(driver_version())
        check(False, f"JAX_PLATFORMS = {platforms!r}, but JAX finds no GPU{cause}; {advice}")
    # A run that a user starts by hand on a machine with GPUs is meant for them, too.
    if found == "cpu" and not platforms and (driver := driver_version()):
        advice = how_to_find_gpus(driver)
        check(False, f"JAX finds none of this machine's GPUs{cause}; {advice}")
    # On a TPU VM, the CPU is no help, and the error names the process that holds the TPU.
    advice = "" if "tpu" in platforms else "; try JAX_PLATFORMS=cpu"
    # Several processes on CPUs find each other with gloo, which looks up this machine's own name.
    if "gloo" in cause:
        advice = f"; does this machine's name, {socket.gethostname()}, resolve? see /etc/hosts"
    check(
        found != "none", f"JAX finds no devices, with JAX_PLATFORMS = {platforms!r}{advice}{cause}"
    )


@contextlib.contextmanager
def plugin_faults():
    """Yields a list that collects the errors of plugins that fail to load in the context, and hides
    the pages that JAX prints about them on stderr."""
    faults = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info:
            faults.append(record.exc_info[1])
        return not record.exc_info

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(keep)
    try:
        yield faults
    finally:
        logger.removeFilter(keep)


def driver_version() -> str:
    """The version of NVIDIA's driver, such as 580.65.06; "" if nvidia-smi finds no GPU."""
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null"
    # nvidia-smi prints one line per GPU, or a message if there is none.
    answer = subprocess.getoutput(query).partition("\n")[0].strip()
    return answer if re.fullmatch(r"\d+[\d.]*", answer) else ""


def plugin_cuda() -> str:
    """The CUDA version of the plugin that JAX tried to load: "13", "12", or "" if there is none."""
    for name in sys.modules:
        if found := re.fullmatch(r"jax_plugins\.xla_cuda(\d+)", name):
            return found[1]
    return ""


def how_to_find_gpus(driver: str) -> str:
    """Advice for when JAX finds no GPU. driver: the version of NVIDIA's driver, or "" for none."""
    cuda = plugin_cuda()
    on_cpu = "or try JAX_PLATFORMS=cpu"
    if not driver:
        return f"nor does nvidia-smi; on Slurm give --gpus-per-node, {on_cpu}"
    if not cuda:
        return f"JAX has no CUDA here: install it with `bash launch.sh gpu`, {on_cpu}"
    oldest = OLDEST_DRIVER[cuda]
    if int(driver.split(".")[0]) >= oldest:
        advice = reinstall(f"jax[cuda{cuda}]")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            advice = (
                f"CUDA_VISIBLE_DEVICES is {visible!r}: name GPUs that `nvidia-smi -L` lists, or "
                f"{advice}"
            )
        return f"the driver, {driver}, is new enough; {advice}, {on_cpu}"
    # On Slurm, CUDA was chosen on the login node, which may not know the other nodes' driver.
    older = ", or choose CUDA 12: CUDA=12 bash launch.sh slurm (or gpu)" if cuda != "12" else ""
    wanted = f"CUDA {cuda} needs driver {oldest} or newer, and this one is {driver}"
    return f"{wanted}: update it{older}, {on_cpu}"


def reinstall(package: str) -> str:
    """Advice for when JAX has found wrong libraries, or none: install the ones that it needs."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    # LD_LIBRARY_PATH may hold the libraries of a cluster's environment module.
    unset = f"unset LD_LIBRARY_PATH, which is {path}, or " if path else ""
    return f"{unset}install again: .venv/bin/python -m pip install -U '{package}'"


def check_cudnn() -> None:
    """Exit with code 2 unless the loaded cuDNN has the same major version as the one that JAX was
    compiled for, and the same minor version or a newer one. XLA has the same rule."""
    cuda = plugin_cuda()
    # JAX's own check reads the versions from this module of its CUDA plugin.
    versions = sys.modules.get(f"jax_cuda{cuda}_plugin._versions")
    # A site's own build of JAX may have CUDA built in.
    if versions is None:
        return
    loaded = versions.cudnn_get_version()
    compiled_for = versions.cudnn_build_version()
    # 91200 is 9.12.0; the last part does not matter.
    same_major = loaded // 10000 == compiled_for // 10000
    advice = reinstall(f"nvidia-cudnn-cu{cuda}")
    check(
        same_major and loaded // 100 >= compiled_for // 100,
        f"cuDNN {dotted(loaded)} is loaded, but jax {jax.__version__} is compiled for "
        f"{dotted(compiled_for)}: it needs that version, or a newer one with the same major "
        f"version; {advice}",
    )


def dotted(version: int) -> str:
    """Returns cuDNN's version as text: 9.12.1 for 91201."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
