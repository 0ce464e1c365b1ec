"""Specifications of known chips, and the memory of devices and hosts."""

import math
import os
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from infra.host.memory import total_memory
from infra.host.processes import all_gather_processes

GIB = 2**30


# ---------------------------------------------------------------- chips
@dataclass(frozen=True)
class Chip:
    """Published specifications of a device. For an unknown device, gib is inf and the rest is 0."""

    gib: float = math.inf  # a TPU's memory for programs; all memory of a GPU, see GPU_SHARE
    bandwidth: float = 0  # bytes per second of that memory
    flops: float = 0  # bfloat16 operations per second
    clock: float = 0  # TPU only: cycles per second
    # Bytes per second that a device sends around a ring: to both neighbours on an axis of a TPU's
    # torus, or over a GPU's NVLink.
    link: float = 0


# Seconds for a message to reach a neighbouring TPU chip, from the chapter "Sharded Matrices" of the
# book "How to Scale Your Model".
HOP_SECONDS = 1e-6
# Seconds to start a collective on GPUs, and for a message to reach the next GPU over NVLink, from
# NCCL's own estimates for its ring algorithm and its protocol for small messages, LL (baseLat and
# hwLat in src/graph/tuning.cc of NCCL).
NCCL_SECONDS = 6.6e-6
NVLINK_SECONDS = 0.6e-6

# Keys are prefixes of JAX's device_kind. The first match counts, so longer keys come first. Memory
# is from XLA's specifications of the chips. The other figures for TPUs are from Google's
# documentation of Cloud TPUs. The clocks of TPUs and all links are derived:
# - The clock is the chip's peak divided by the operations that its matrix units do in a cycle, a
#   multiply and an add per cell. v4 and v5p have 8 units of 128 x 128 cells, v5e has 4, and v6e has
#   as many cells as 16 such units.
# - One axis of the torus has a third (v4, v5p) or half (v5e, v6e) of a chip's links. Google's
#   figures count both directions of a link, so half of each figure is for sending.
# - Half of a GPU's NVLink bandwidth is for sending. NCCL's LL uses a quarter of that half.
CHIPS = {
    "TPU v4": Chip(30.75, 1.2e12, 275e12, 1.05e9, 1e11),
    "TPU v5 lite": Chip(15.7, 8.2e11, 197e12, 1.5e9, 1e11),
    "TPU v5": Chip(95, 2.77e12, 459e12, 1.75e9, 2e11),
    "TPU v6 lite": Chip(31.24, 1.64e12, 918e12, 1.75e9, 2e11),
    "NVIDIA A100": Chip(79.25, 2.0e12, 312e12, link=7.5e10),
    "NVIDIA H100": Chip(79.11, 3.35e12, 990e12, link=1.125e11),
    "NVIDIA H200": Chip(141.0, 4.8e12, 990e12, link=1.125e11),
}
# JAX takes this share of a GPU's memory at start-up, unless this environment variable says
# otherwise. The rest is left to CUDA and NCCL.
GPU_SHARE = 0.75
GPU_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# A program may use this fraction of JAX's share. The rest is for memory that the compiler does not
# count: the workspaces of cuDNN and cuBLAS, and gaps between arrays.
GPU_FILLED = 0.95


def chip(device) -> Chip:
    for prefix, known in CHIPS.items():
        if device.device_kind.startswith(prefix):
            return known
    return Chip()


def ring_seconds(nbytes: int, devices: int, chip: Chip, rounds: int = 1) -> float:
    """Seconds of a collective over a ring of devices, from `link` and the latencies above.

    In a round, each device gets the other devices' parts of an array of `nbytes` bytes. rounds: 1
    for an all-gather or a reduce-scatter, 2 for an all-reduce, which is one of each.
    """
    if devices == 1:
        return 0.0
    sent = nbytes * (devices - 1) / devices
    # Only TPUs have a `clock` here. They use the ring in both directions, so the latency is the
    # time of the hops to the farthest device, half of the ring away.
    if chip.clock:
        return rounds * (sent / chip.link + devices // 2 * HOP_SECONDS)
    return NCCL_SECONDS + rounds * (sent / chip.link + (devices - 1) * NVLINK_SECONDS)


def device_memory(device) -> float:
    """The memory of a device that programs may use, in GiB; inf if unknown."""
    if device.platform == "cpu":
        # The CPU's devices share the host's memory.
        return total_memory() / GIB / jax.local_device_count()
    is_gpu = device.platform == "gpu"
    try:
        gib = (device.memory_stats() or {})["bytes_limit"] / GIB
    except (KeyError, jax.errors.JaxRuntimeError):
        # The device is absent, or its backend does not report its memory.
        gib = chip(device).gib
        if is_gpu:
            gib *= float(os.environ.get(GPU_SHARE_VARIABLE, GPU_SHARE))
    return GPU_FILLED * gib if is_gpu else gib


def local_memory(mesh) -> float:
    """The least device_memory of this process's devices in a mesh, in GiB."""
    # A process cannot ask another process's device.
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return min(device_memory(device) for device in local)


def least_memory(mesh) -> float:
    """The least device_memory in a mesh, in GiB. Every process must call this."""
    return float(all_gather_processes(np.float32(local_memory(mesh))).min())


# ---------------------------------------------------------------- host memory
class PinnedHost(NamedSharding):
    """A sharding in the hosts' pinned memory, over absent GPUs: a plan compiles for them, but this
    machine does not have them. JAX does not know the memory kinds of absent GPUs, so an ordinary
    NamedSharding over them loses its memory kind."""

    @property
    def memory_kind(self):
        return "pinned_host"

    # JAX's caches must not confuse this sharding with the same sharding in device memory.
    def __eq__(self, other):
        return isinstance(other, PinnedHost) and super().__eq__(other)

    def __hash__(self):
        return hash((super().__hash__(), self.memory_kind))


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in the hosts' pinned memory. This machine need not have the
    devices."""
    on_host = sharding.with_memory_kind("pinned_host")
    return on_host if on_host.memory_kind else PinnedHost(sharding.mesh, sharding.spec)
