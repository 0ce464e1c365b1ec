"""What a compiled program takes of a device, known chips, the largest micro-batch that fits."""

import contextlib
import hashlib
import math
import os
import re
from collections import namedtuple

import jax
import numpy as np

from infra import cluster, files
from infra.cluster import all_gather_hosts
from infra.files import CheckpointError
from infra.log import check, say

Chip = namedtuple("Chip", "gib bandwidth flops")  # memory, its bytes a second, bfloat16 operations a second

CHIPS = {"TPU v4": Chip(30.75, 1.2e12, 275e12), "TPU v5 lite": Chip(15.7, 8.2e11, 197e12),
         "TPU v5": Chip(95, 2.77e12, 459e12), "TPU v6 lite": Chip(31.24, 1.64e12, 918e12),
         "NVIDIA A100": Chip(math.inf, 2.0e12, 312e12), "NVIDIA H100": Chip(math.inf, 3.35e12, 990e12),
         "NVIDIA H200": Chip(math.inf, 4.8e12, 990e12)}

def chip(device):
    """The Chip of a device, by the start of its device_kind; where that is not known: inf, 0, 0."""
    return next((c for kind, c in CHIPS.items() if device.device_kind.startswith(kind)), Chip(math.inf, 0, 0))

def device_memory(device):
    """GiB; a CPU's is shared out; inf where it is not known."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count() / 2 ** 30
    try:
        return (device.memory_stats() or {})["bytes_limit"] / 2 ** 30
    except (KeyError, jax.errors.JaxRuntimeError):
        return chip(device).gib

def least_memory(mesh):
    """GiB of the device that has least, as far as processes see; all are told the same."""
    mine = [device_memory(d) for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return float(all_gather_hosts(np.float32(min(mine))).min())

def host_memory():
    """GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2 ** 30

def tpu_devices(slice_type):
    """Of a slice such as v6e-8; v4 and v5p count cores, two a chip, and lie in three dimensions."""
    from jax.experimental import topologies
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                   "TPU_WORKER_HOSTNAMES": "localhost"}  # or libtpu looks for a TPU, and waits for it
    known = re.fullmatch(r"(v4|v5p|v5litepod|v6e)-(1|4|8|16|32|64|128|256)", slice_type)
    if not known:
        raise ValueError(f"{slice_type} is not one of v4-, v5p-, v5litepod- or v6e-, and 1, 4, 8, 16, .. 256")
    kind, size = known.groups()
    dims = 3 if kind in ("v4", "v5p") else 2
    n = (int(size) // (dims - 1)).bit_length() - 1
    sides = sorted((1 << (n + i) // dims for i in range(dims)), key=lambda side: (side == 1, side))
    options = ({"chip_config_name": "megacore"} if dims == 3 else
               {"chips_per_host_bounds": {0: [1, 1, 1], 3: [2, 4, 1]}.get(n, [2, 2, 1])})
    name = f"{kind.replace('litepod', 'e')}:{'x'.join(map(str, sides))}"
    return topologies.get_topology_desc(name, "tpu", **options).devices

def compiled_gib(lowered, mesh):
    """-> (GiB that a compiled program takes of a device, does it fit): nothing is run. What is too much for a
    TPU is not compiled to its end; then GiB is the compiler's estimate."""
    try:
        m = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as e:
        total = re.search(r"(?:\(|Used )([\d.]+)([MGT])(?=\) exceeds| of )", str(e))
        if not total:
            raise
        return float(total[1]) * {"M": 2 ** -10, "G": 1, "T": 2 ** 10}[total[2]], False
    total = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    on_tpu = mesh.devices.flat[0].platform == "tpu"  # others tell no peak
    return (m.peak_memory_in_bytes if on_tpu else total) / 2 ** 30, True

def largest(need, limit, most):
    """The largest micro-batch up to `most` that fits by need(n) -> (GiB, fits), 0 if none, and all that was
    asked: `most`, a small one, where the line through the two meets the limit, and that is confirmed."""
    tried, low, high, guess = {}, 0, most + 1, most  # TPU compilers soon tell what is too much
    while low + 1 < high:
        tried[guess] = need(guess)
        low, high = (guess, high) if tried[guess][1] else (low, guess)
        guess = max(1, min(8, guess // 4))
        if len(tried) > 1:
            a, b = (low, high) if low and high in tried else sorted(tried)[:2]
            x, y = tried[a][0], tried[b][0]
            guess = math.floor(a + (limit - x) * (b - a) / max(y - x, 1e-9))
            if low and guess <= low:
                break
        guess = min(max(guess, low + 1), high - 1)
    return low, tried

def choose_micro_batch(asked, filled, width, update_gib, program, device):
    """Rows per device in one forward/backward: the largest that fits, up to `filled`, what a step fills; or
    what is asked for, which must fit. update_gib(rows) -> (GiB, fits); program: all that this depends on."""
    most, limit = asked or filled, device_memory(device)
    program = *program, width, limit, jax.__version__, cluster.code_hash()
    key, found = hashlib.sha256(repr(program).encode()).hexdigest(), {}
    remembered = os.path.expanduser("~/.cache/podgrpo/micro_batch.json")
    with contextlib.suppress(CheckpointError):
        found = files.read_json(remembered)
    if key not in found:
        chosen, tried = largest(update_gib, limit, most)
        found[key] = [chosen, *(tried.get(n, [0])[0] for n in (chosen, most))]
        if chosen < most:  # or there is no search to be spared
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(remembered), exist_ok=True)
                files.write_json(remembered, found)
    chosen, gib, wanted = all_gather_hosts(found[key]).min(0).tolist()
    over = f"{wanted:.2f} GiB of a device's {limit:.2f}, {wanted - limit:.2f} too much"
    check(chosen, f"not one row of {width} tokens per device fits: {most} take {over}; try {ADVICE}")
    check(chosen == most or not asked,
          f"micro_batch = {most} takes {over}; the largest that fits is --micro_batch {chosen:.0f}")
    say(f"micro_batch {chosen:.0f} of at most {filled} rows per device: {gib:.2f} GiB of "
        f"{limit:.2f}")
    return int(chosen)

def on_device(tree):
    """Bytes of a device that a tree of shapes takes."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree)
               if a.sharding.memory_kind != "pinned_host")

ADVICE = "--remat full, --offload optimizer or params, a smaller --max_answer or more devices"
