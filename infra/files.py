"""Files that appear complete or not at all, and JSON."""

import contextlib
import json
import os

import jax


class CheckpointError(Exception):
    """A model directory that cannot be used: the message names the file, what it has and what it should."""

def read_json(path):
    """The object in a JSON file."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.loads(f.read())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a model is config.json, tokenizer.json and *.safetensors")
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not readable JSON: {e}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value

@contextlib.contextmanager
def complete_file(path):
    """A binary file to write: it is there, whole and on the disk, once this is left, or not at all."""
    aside = f"{path}.{jax.process_index()}.tmp"
    try:
        with open(aside, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        flush_to_disk(os.path.dirname(path) or ".")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise

def flush_to_disk(path):
    """Have the disk take a file, or the names in a directory."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)

def write_json(path, value):
    with complete_file(path) as f:
        f.write(json.dumps(value, indent=1).encode())
