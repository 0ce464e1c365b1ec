"""NVIDIA's GPUs: that JAX uses them where a run is meant for them, with a cuDNN that fits.

Where JAX cannot load its CUDA plugin it prints pages and goes on without GPUs. A cuDNN that is
older than the plugin was compiled for passes JAX's own check, and fails at the first attention.
"""

import contextlib
import logging
import os
import re
import subprocess
import sys

import jax

from infra.log import check, first_line

# The oldest major version of the driver for each CUDA of JAX's wheels
# (docs.jax.dev/en/latest/installation.html, docs.nvidia.com/deploy/cuda-compatibility).
OLDEST_DRIVER = {"13": 580, "12": 525}


def find_devices() -> None:
    """Let JAX look for devices, as it does when first asked. Exits 2 where it finds none, or no GPU
    though JAX_PLATFORMS names them, or names nothing and the machine has some."""
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
    # What came first is the cause of the others; a bare assert of JAX's says nothing.
    cause = f" ({first_line(faults[0])})" if faults and str(faults[0]) else ""
    # launch.sh names them wherever a run is meant for them.
    if "cuda" in platforms or "gpu" in platforms:
        advice = how_to_find_gpus(driver_version())
        check(False, f"JAX_PLATFORMS = {platforms!r}, but JAX finds no GPU{cause}; {advice}")
    # Whoever starts train.py by hand on a machine with GPUs means them, too.
    if found == "cpu" and not platforms and (driver := driver_version()):
        advice = how_to_find_gpus(driver)
        check(False, f"JAX finds none of this machine's GPUs{cause}; {advice}")
    hint = f"with JAX_PLATFORMS = {platforms!r}; try JAX_PLATFORMS=cpu"
    check(found != "none", f"JAX finds no devices, {hint}{cause}")


@contextlib.contextmanager
def plugin_faults():
    """Yields a list, which will hold why JAX did not load plugins, in place of pages on stderr."""
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
    """The version of NVIDIA's driver, such as 580.65.06; "" where nvidia-smi finds no GPU."""
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null"
    # A line for each GPU, or words where there is none.
    answer = subprocess.getoutput(query).partition("\n")[0].strip()
    return answer if re.fullmatch(r"\d+[\d.]*", answer) else ""


def plugin_cuda() -> str:
    """The CUDA of the plugin that JAX has tried to load: "13", "12", or "" where there is none."""
    for name in sys.modules:
        if found := re.fullmatch(r"jax_plugins\.xla_cuda(\d+)", name):
            return found[1]
    return ""


def how_to_find_gpus(driver: str) -> str:
    """What to do where JAX finds no GPU on a machine with this driver, "" for none."""
    cuda = plugin_cuda()
    on_cpu = "or try JAX_PLATFORMS=cpu"
    if not driver:
        return f"nor does nvidia-smi; on Slurm give --gpus-per-node, {on_cpu}"
    if not cuda:
        return f"JAX has no CUDA here, `bash launch.sh gpu` installs it, {on_cpu}"
    oldest = OLDEST_DRIVER[cuda]
    if int(driver.split(".")[0]) >= oldest:
        return f"the driver, {driver}, is new enough; {reinstall(f'jax[cuda{cuda}]')}, {on_cpu}"
    # On Slurm the login node, where CUDA was chosen, may not know the driver of the others.
    older = ", or choose CUDA 12: CUDA=12 bash launch.sh slurm (or gpu)" if cuda != "12" else ""
    wanted = f"CUDA {cuda} takes driver {oldest} or newer, here is {driver}"
    return f"{wanted}: update it{older}, {on_cpu}"


def reinstall(package: str) -> str:
    """How to get the libraries that JAX wants where it has found others, or none."""
    path = os.environ.get("LD_LIBRARY_PATH", "")
    # A module of a cluster may have put its own libraries there.
    unset = f"unset LD_LIBRARY_PATH, which is {path}, or " if path else ""
    return f"{unset}install again: .venv/bin/python -m pip install -U '{package}'"


def check_cudnn() -> None:
    """Exits 2 where the cuDNN that is loaded is not of the same major version as the one that JAX
    was compiled for, or has a smaller minor one, by the rule that XLA has for it."""
    cuda = plugin_cuda()
    # The module through which JAX asks, of the plugin that it has loaded.
    versions = sys.modules.get(f"jax_cuda{cuda}_plugin._versions")
    # JAX of a site's own may have CUDA built in.
    if versions is None:
        return
    loaded = versions.cudnn_get_version()
    compiled_for = versions.cudnn_build_version()
    # 91200 is 9.12.0, whose last part does not matter.
    same_major = loaded // 10000 == compiled_for // 10000
    advice = reinstall(f"nvidia-cudnn-cu{cuda}")
    check(
        same_major and loaded // 100 >= compiled_for // 100,
        f"cuDNN {dotted(loaded)} is loaded, but jax {jax.__version__} is compiled for "
        f"{dotted(compiled_for)} and takes no older one; {advice}",
    )


def dotted(version: int) -> str:
    """91201 -> 9.12.1"""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
