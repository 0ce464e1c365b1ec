"""The host's memory, and how much of it this process may use. Control groups limit a container or
a job on a cluster: see https://docs.kernel.org/admin-guide/cgroup-v2.html and, for version 1,
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

# Where Linux lists the control groups of this process, and where their files are.
LIST = "/proc/self/cgroup"
MOUNT = "/sys/fs/cgroup"


def total_memory() -> int:
    """Bytes of memory that this process could use if nothing else ran on the host."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([host, *[limit for limit, _ in limits()]])


def available_memory() -> int:
    """Bytes of memory that this process can still take, or 0 if unknown."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
    # macOS has no such file.
    except OSError:
        return 0
    host = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", meminfo)[1])
    return min([host, *[limit - used for limit, used in limits()]])


def limits() -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use) of each control group that limits this process. Cached files do
    not count as in use: the kernel drops them when memory is needed."""
    for group, version in groups():
        names = "memory.max", "memory.current", "inactive_file"
        if version == 1:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        try:
            limit = int((group / names[0]).read_text())
            used = int((group / names[1]).read_text())
            statistics = (group / "memory.stat").read_text()
            cached = int(re.search(rf"^{names[2]} (\d+)", statistics, re.M)[1])
        # Some groups have no such files. A group without a limit has the text `max`, not a number.
        except (OSError, ValueError, TypeError):
            continue
        yield limit, used - cached


def groups() -> Iterator[tuple[Path, int]]:
    """Yields (directory, version) of the control groups of this process. A group's limit also
    applies to the groups below it."""
    try:
        lines = Path(LIST).read_text().splitlines()
    # Only Linux has control groups.
    except OSError:
        return
    for line in lines:
        # 0::/system.slice/job_5 in version 2, 4:memory:/slurm/job_5 in version 1
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, version = Path(MOUNT), 2
        elif "memory" in controllers.split(","):
            root, version = Path(MOUNT, "memory"), 1
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root):
                yield directory, version
