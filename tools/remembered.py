"""A cache of the memory and time that compiled programs take, keyed by the programs' text.

The cache is in the user's cache directory. A plan that is repeated, or made after an edit that
changes no program, compiles nothing.

JAX's own cache cannot do this: it writes programs for absent devices, but cannot read them back.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.host import chips, files
from infra.host.console import say
from infra.host.files import CheckpointError
from infra.rollout import engine
from infra.update import fit
from tools import clock, hlo
from tools.clock import Clock

# The packages that compile, and the environment variables that hold flags for them.
PACKAGES = "jax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"
VARIABLES = "XLA_FLAGS", "LIBTPU_INIT_ARGS"


@dataclass(frozen=True)
class Compiled:
    """What is known about a program that was compiled but not run."""

    gib: float  # per device
    fits: bool
    clock: Clock | None  # None if the program does not fit, or its compiler estimates no time


def versions() -> dict:
    """Returns {package: version} of the installed packages that compile."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def compile_or_recall(lowered, mesh, clock_of: Callable, trips: int) -> Compiled:
    """Compile a program for the devices of a mesh, or read the result from the cache.

    clock_of(text of the compiled program) -> Clock or None. trips: the trip count that the clock
    assumes for loops that do not state one.
    """
    path = path_of(lowered, mesh, trips)
    # A missing or damaged file in the cache does no harm: the program is compiled again.
    with contextlib.suppress(CheckpointError, LookupError, TypeError):
        kept = files.read_json(path)
        time = Clock(*kept["clock"]) if kept["clock"] else None
        found = Compiled(kept["gib"], kept["fits"], time)
        say(f"  remembered: {path}")
        return found
    gib, program = fit.compiled_gib(lowered, mesh)
    fits = program is not None
    found = Compiled(gib, fits, clock_of(program.as_text()) if fits else None)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.write_json(path, {"gib": gib, "fits": fits, "clock": found.clock})
    return found


def path_of(lowered, mesh, trips: int) -> str:
    """Returns the path of a program's file in the cache, named by a hash of all that the compiled
    program and its clock depend on."""
    # For other devices, or with another compiler or other flags, the same text may become a
    # different program.
    flags = [os.environ.get(name, "") for name in VARIABLES]
    devices = [(str(device), device.device_kind) for device in mesh.devices.flat]
    digest = hashlib.sha256(lowered.as_text().encode())
    options = engine.TPU_OPTIONS
    digest.update(repr((devices, versions(), flags, options, trips)).encode())
    # The remembered memory depends on the code that sums it; the time depends on the code of the
    # clock and on the figures of the chips.
    for module in (fit, clock, hlo, chips):
        digest.update(Path(module.__file__).read_bytes())
    return os.path.expanduser(f"~/.cache/podgrpo/compiled/{digest.hexdigest()[:16]}.json")
