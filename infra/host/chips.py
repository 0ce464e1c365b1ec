"""Figures of known chips, and devices of absent TPUs and GPUs to compile for."""

import math
import os
import re
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from infra.host.processes import all_gather_processes

GIB = 2**30


# ---------------------------------------------------------------- chips
@dataclass(frozen=True)
class Chip:
    """The figures that a device's maker publishes; if unknown, memory is inf and the others 0."""

    gib: float = math.inf  # memory that programs may use
    bandwidth: float = 0  # bytes per second of that memory
    flops: float = 0  # bfloat16 operations per second
    clock: float = 0  # TPU only: cycles per second
    link: float = 0  # TPU only: bytes per second that it sends along one axis of the torus


# The time for a message to reach a neighbouring TPU chip ("How to Scale Your Model", "Sharded
# Matrices").
HOP_SECONDS = 1e-6

# Keys are prefixes of JAX's device_kind; a longer key comes before its own prefix. Google's
# documentation of Cloud TPUs has the TPU figures. The clock is the chip's peak divided by the
# operations of its matrix units per cycle, a multiply and an add per cell: v4 and v5p have 8 units
# of 128 x 128 cells, v5e has 4, v6e has 16. One axis of the torus has a third (v4, v5p) or half of
# a chip's links, and half of their bandwidth is for sending.
CHIPS = {
    "TPU v4": Chip(30.75, 1.2e12, 275e12, 1.05e9, 1e11),
    "TPU v5 lite": Chip(15.7, 8.2e11, 197e12, 1.5e9, 1e11),
    "TPU v5": Chip(95, 2.77e12, 459e12, 1.75e9, 2e11),
    "TPU v6 lite": Chip(31.24, 1.64e12, 918e12, 1.75e9, 2e11),
    "NVIDIA A100": Chip(79.25, 2.0e12, 312e12),
    "NVIDIA H100": Chip(79.11, 3.35e12, 990e12),
    "NVIDIA H200": Chip(141.0, 4.8e12, 990e12),
}
# JAX takes this share of a GPU's memory at start-up, unless the environment variable says
# otherwise. The rest is left to CUDA and NCCL.
GPU_SHARE = 0.75
GPU_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
# A plan may fill this part of JAX's share: the compiler's figures leave out the workspace of cuDNN
# and cuBLAS, and there are gaps between arrays.
GPU_FILLED = 0.95


def chip(device) -> Chip:
    for kind, found in CHIPS.items():
        if device.device_kind.startswith(kind):
            return found
    return Chip()


def host_memory() -> float:
    """Memory of this host, in GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def device_memory(device) -> float:
    """Memory of a device that a program may take, in GiB; inf if unknown."""
    if device.platform == "cpu":
        # The CPU's devices share the host's memory.
        return host_memory() / jax.local_device_count()
    is_gpu = device.platform == "gpu"
    try:
        gib = (device.memory_stats() or {})["bytes_limit"] / GIB
    except (KeyError, jax.errors.JaxRuntimeError):
        # The device is absent, or its backend does not report its memory.
        gib = chip(device).gib
        if is_gpu:
            gib *= float(os.environ.get(GPU_SHARE_VARIABLE, GPU_SHARE))
    return GPU_FILLED * gib if is_gpu else gib


def least_memory(mesh) -> float:
    """Memory of the smallest device in a mesh, in GiB; the same on all processes."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    least = min(device_memory(device) for device in local)
    return float(all_gather_processes(np.float32(least)).min())


# ---------------------------------------------------------------- absent devices
def absent_devices(kind: str) -> list:
    """Returns the devices of a kind such as v6e-8 or h100-8, to compile for. Raises ValueError for
    an unknown kind, and other errors if the compiler for the kind is not installed."""
    # Otherwise JAX looks for this machine's devices, and registers no CUDA if there is no GPU.
    jax.config.update("jax_platforms", "cpu")
    return tpu_devices(kind) if kind.startswith("v") else gpu_devices(kind)


def tpu_devices(slice_type: str) -> list:
    """Returns the devices of a slice such as v6e-8. Raises ValueError for an unknown type."""
    from jax.experimental import topologies

    # The sizes that Google offers and that we have compiled for.
    sizes = "1|4|8|16|32|64|128|256"
    known = re.fullmatch(rf"(v4|v5p|v5litepod|v6e)-({sizes})", slice_type)
    if not known:
        raise ValueError(
            f"{slice_type} is not one of v4-, v5p-, v5litepod- or v6e-, and 1, 4, 8, 16, .. 256"
        )
    # Otherwise libtpu looks for a TPU, waits for it, and warns that it does not know its type.
    os.environ |= {
        "TPU_ACCELERATOR_TYPE": slice_type,
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    kind, size = known.groups()
    # The sizes of v4 and v5p count cores, two per chip, and their slices have three dimensions.
    dimensions = 3 if kind in ("v4", "v5p") else 2
    chips = int(size) // (dimensions - 1)
    if dimensions == 3:
        options = {"chip_config_name": "megacore"}
    else:
        # A host has one chip in a slice of one, eight in a slice of eight, else four.
        bounds = {1: [1, 1, 1], 8: [2, 4, 1]}.get(chips, [2, 2, 1])
        options = {"chips_per_host_bounds": bounds}
    sides = "x".join(str(side) for side in slice_sides(chips, dimensions))
    name = f"{kind.replace('litepod', 'e')}:{sides}"
    return topologies.get_topology_desc(name, "tpu", **options).devices


def slice_sides(chips, dimensions):
    """The sides of a slice: powers of two, as equal as possible. Sides of 1 come last."""
    exponent = chips.bit_length() - 1
    sides = [2 ** ((exponent + i) // dimensions) for i in range(dimensions)]
    return sorted(sides, key=lambda side: (side == 1, side))


@dataclass(frozen=True)
class Gpu:
    """What XLA needs to know to compile for an absent GPU, from XLA's published specs (openxla/xla,
    xla/backends/gpu/target_config/specs)."""

    name: str  # JAX's device_kind
    capability: str  # CUDA compute capability; the accelerated features are Hopper's alone
    cores: int
    units_of_core: int  # float32 units
    clock_ghz: float
    memory_bytes: int
    bandwidth: int  # bytes per second
    l2_bytes: int
    shared_bytes_of_core: int
    shared_bytes_of_block: int


# fmt: off
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "major: 8", 108, 64, 1.41, 85100068864,
                2039000000000, 41943040, 167936, 166912),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "major: 9 feature_extension: ACCELERATED_FEATURES",
                132, 128, 1.98, 84942979072, 3352320000000, 52428800, 233472, 232448),
    "h200": Gpu("NVIDIA H200", "major: 9 feature_extension: ACCELERATED_FEATURES",
                132, 128, 1.98, 151397597184, 4800000000000, 52428800, 233472, 232448),
}
# fmt: on
# A GpuTargetConfigProto. Values that all these GPUs share are literals; the versions are those that
# programs are compiled for.
TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ {gpu.capability} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.units_of_core}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_bytes}
  shared_memory_per_core: {gpu.shared_bytes_of_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_bytes_of_block}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.name}"
"""


class PinnedHost(NamedSharding):
    """A sharding in the hosts' pinned memory, over absent GPUs. JAX does not know their memory
    kinds, and so drops the memory kind of an ordinary sharding over them."""

    @property
    def memory_kind(self):
        return "pinned_host"

    # JAX's caches must not confuse this sharding with the same one on the devices.
    def __eq__(self, other):
        return isinstance(other, PinnedHost) and super().__eq__(other)

    def __hash__(self):
        return hash((super().__hash__(), self.memory_kind))


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in the hosts' pinned memory. The devices may be absent."""
    on_host = sharding.with_memory_kind("pinned_host")
    return on_host if on_host.memory_kind else PinnedHost(sharding.mesh, sharding.spec)


def gpu_devices(kind: str) -> list:
    """Returns the GPUs of a kind such as h100-16, eight per host. Raises ValueError for an unknown
    kind."""
    from jax.experimental import topologies

    known = re.fullmatch(rf"({'|'.join(GPUS)})-([1-9]\d*)", kind)
    n = int(known[2]) if known else 0
    if not known or not (n in (1, 2, 4) or n % 8 == 0):
        raise ValueError(
            f"{kind} is not one of {'-, '.join(GPUS)}-, and 1, 2, 4, 8 or a multiple of 8"
        )
    # Hide warnings: XLA prints one, and raises no error, if a program takes too much GPU memory.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    per_host = min(n, 8)
    return topologies.get_topology_desc(
        known[1],
        "cuda",
        topology=f"1x{n // per_host}x{per_host}",
        target_config=TARGET.format(gpu=GPUS[known[1]]),
    ).devices
