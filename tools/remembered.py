"""What compiled programs take, kept in the user's cache by the programs' text: a plan that is made
again, or after an edit that changes no program, compiles nothing."""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass

from infra import files, memory
from infra.files import CheckpointError
from infra.log import say
from tools.clock import Clock

# Those that compile, and their flags.
PACKAGES = "jax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"
VARIABLES = "XLA_FLAGS", "LIBTPU_INIT_ARGS"


@dataclass(frozen=True)
class Compiled:
    """What is known of a program that was compiled and not run."""

    gib: float  # of a device
    fits: bool
    clock: Clock | None  # None: it does not fit, or its compiler has none


def versions() -> dict:
    """{package: version} of those that compile and are installed."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def compile_or_recall(lowered, mesh, clock_of: Callable) -> Compiled:
    """Compile a program, or recall what it took when it was compiled for such devices.

    clock_of(compiled's text) -> Clock, or None.
    """
    path = path_of(lowered, mesh)
    # Whatever is wrong with the user's cache, the program can be compiled again.
    with contextlib.suppress(CheckpointError, LookupError, TypeError):
        kept = files.read_json(path)
        found = Compiled(kept["gib"], kept["fits"], kept["clock"] and Clock(*kept["clock"]))
        say(f"  remembered: {path}")
        return found
    clocks = []
    gib, fits = memory.compiled_gib(lowered, mesh, lambda c: clocks.append(clock_of(c.as_text())))
    found = Compiled(gib, fits, clocks[0] if clocks else None)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.write_json(path, {"gib": gib, "fits": fits, "clock": found.clock})
    return found


def path_of(lowered, mesh) -> str:
    """The file of what is known of a program, named by all that it depends on."""
    # The same text may become another program on other devices, by another compiler or its flags.
    flags = [os.environ.get(name, "") for name in VARIABLES]
    devices = [(str(device), device.device_kind) for device in mesh.devices.flat]
    digest = hashlib.sha256(lowered.as_text().encode())
    digest.update(repr((devices, versions(), flags)).encode())
    return os.path.expanduser(f"~/.cache/podgrpo/compiled/{digest.hexdigest()[:16]}.json")
