"""JAX devices of absent TPUs and GPUs, to compile programs for."""

import os
import re
from dataclasses import dataclass

import jax
from jax.experimental import topologies


def of_kind(kind: str) -> list:
    """Returns the devices of a kind such as v6e-8 or h100-8, to compile for.

    Raises ValueError for an unknown kind, and other errors if the kind's compiler is not installed.
    """
    # Keep JAX from looking for this machine's devices: without a GPU, it would not register CUDA.
    jax.config.update("jax_platforms", "cpu")
    return tpu_devices(kind) if kind.startswith("v") else gpu_devices(kind)


def tpu_devices(slice_type: str) -> list:
    """Returns the devices of a slice such as v6e-8. Raises ValueError for an unknown type."""
    # The sizes that Google offers and that we have compiled for.
    sizes = "1|4|8|16|32|64|128|256"
    known = re.fullmatch(rf"(v4|v5p|v5litepod|v6e)-({sizes})", slice_type)
    if not known:
        raise ValueError(
            f"{slice_type} is not one of v4-, v5p-, v5litepod- or v6e-, "
            "followed by 1, 4, 8, 16, .. 256"
        )
    # Without these variables, libtpu would wait for a TPU, and warn that its type is unknown.
    os.environ |= {
        "TPU_ACCELERATOR_TYPE": slice_type,
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    kind, size = known.groups()
    if kind in ("v4", "v5p"):
        # The sizes of v4 and v5p count cores, two per chip, which work as one device (megacore).
        chips = int(size) // 2
        dimensions = 3
        options = {"chip_config_name": "megacore"}
    else:
        chips = int(size)
        dimensions = 2
        # A host has one chip in a slice of one, eight in a slice of eight, else four.
        bounds = {1: [1, 1, 1], 8: [2, 4, 1]}.get(chips, [2, 2, 1])
        options = {"chips_per_host_bounds": bounds}
    sides = "x".join(str(side) for side in slice_sides(chips, dimensions))
    # The compiler's name for v5litepod is v5e.
    name = f"{kind.replace('litepod', 'e')}:{sides}"
    return topologies.get_topology_desc(name, "tpu", **options).devices


def slice_sides(chips, dimensions):
    """Returns the sides of a slice: powers of two, as equal as possible. They are in ascending
    order, but sides of 1 come last."""
    exponent = chips.bit_length() - 1
    sides = [2 ** ((exponent + i) // dimensions) for i in range(dimensions)]
    return sorted(sides, key=lambda side: (side == 1, side))


@dataclass(frozen=True)
class Gpu:
    """What XLA must know about an absent GPU to compile for it, from XLA's own specs (openxla/xla,
    xla/backends/gpu/target_config/specs)."""

    name: str  # JAX's device_kind
    capability: str  # CUDA compute capability; for Hopper, with its accelerated features (sm_90a)
    cores: int  # streaming multiprocessors
    units_of_core: int  # float32 units per core
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
# A GpuTargetConfigProto as text, with literals for the values that all these GPUs share. The last
# lines name the versions of cuDNN and of the CUDA runtime that programs are compiled for.
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


def gpu_devices(kind: str) -> list:
    """Returns the GPUs of a kind such as h100-16, eight per host. Raises ValueError for an unknown
    kind."""
    known = re.fullmatch(rf"({'|'.join(GPUS)})-([1-9]\d*)", kind)
    n = int(known[2]) if known else 0
    if not known or not (n in (1, 2, 4) or n % 8 == 0):
        raise ValueError(
            f"{kind} is not one of {'-, '.join(GPUS)}-, followed by 1, 2, 4, 8 or a multiple of 8"
        )
    # Hide XLA's warnings. One of them says that a program takes too much GPU memory: XLA raises no
    # error then, and callers compare the memory with the limit themselves.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    per_host = min(n, 8)
    return topologies.get_topology_desc(
        known[1],
        "cuda",
        topology=f"1x{n // per_host}x{per_host}",
        target_config=TARGET.format(gpu=GPUS[known[1]]),
    ).devices
