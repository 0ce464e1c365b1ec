"""Write files so that they appear complete or not at all, and read and write JSON."""

import contextlib
import glob
import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax


class CheckpointError(Exception):
    """A model directory or a checkpoint that cannot be used.

    The message names the file, what the file has and what it should have.
    """


def read_json(path: str) -> dict:
    """Returns the object in a JSON file. Raises CheckpointError if the file has none."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing (a model has config.json, tokenizer.json and *.safetensors)"
        ) from None
    # A file of a hundred thousand brackets exceeds Python's recursion limit.
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not readable JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_optional_json(path: str) -> dict:
    """Returns the object in a JSON file, {} if there is no file. Raises CheckpointError."""
    return read_json(path) if os.path.exists(path) else {}


def write_json(path: str, value: Any) -> None:
    """Write a value as JSON; the file appears complete or not at all."""
    with atomic_file(path) as f:
        # Indent: people read some of these files.
        f.write(json.dumps(value, indent=1).encode())


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[BinaryIO]:
    """Write a file atomically: yields a binary file, which gets its name once it is on the disk.

    If an error interrupts the writing, the unfinished file is removed, and an older file of that
    name stays as it was.
    """
    # Each process uses its own name, as several may write the same file to a shared disk.
    unfinished = f"{path}.{jax.process_index()}.tmp"
    try:
        with open(unfinished, "wb") as f:
            yield f
            # The bytes must be on the disk before the file gets its name.
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, path)
        # The new name is on the disk only once its directory has been flushed.
        flush_to_disk(os.path.dirname(path) or ".")
    # Catch every exception, even one from a signal handler: half a file is of no use.
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def flush_to_disk(path: str) -> None:
    """Flush a file, or the names in a directory, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def directory_bytes(directory: str) -> int:
    """Bytes of the files that are directly in a directory, or 0 if it does not exist."""
    total = 0
    for path in glob.glob(f"{glob.escape(directory)}/*"):
        # Another thread or process may be deleting an old checkpoint.
        with contextlib.suppress(OSError):
            total += os.path.getsize(path)
    return total
