"""Checkpoints: their files, how to read them, and how to write them during training.

A checkpoint is a directory `step_NNNNNN`. Each process writes one file with all of its shards,
since each may have its own disk. A checkpoint is complete if it has a file from each process, all
written by the same launch of the run. A resumed run is a new launch. `run` in a file's header is
the time of the launch, and `complete` is the step of the newest checkpoint that was complete when
the file was written, or 0. The file's name has the number of processes. A file gets its name by a
rename, so that a process that is killed during a write leaves only a file that nobody reads.
"""

import json
import operator
import os
import re
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

import model
from infra.data import hf
from infra.host import files
from infra.host.console import first_line, show_status, warn
from infra.host.files import CheckpointError
from infra.host.memory import available_memory
from infra.host.processes import all_gather_processes, commit, processes_of_this_machine
from infra.run import bucket

SHARDS = "shards-{:05}-of-{:05}.safetensors"
# {name of a dtype in NumPy: its name in safetensors}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}
# Placeholder in a file's header until the checksum is known.
NO_CHECKSUM = b"0" * 8


class IncompleteCheckpoint(CheckpointError):
    """Files are missing, for example after a process was killed during a write; none is damaged."""


# ---------------------------------------------------------------- the file of a process
def shards_of(tree) -> dict:
    """Returns {"name|start,start": shard} of this process's shards of a tree, each shard once."""
    shards = {}
    for name, array in model.flatten(tree).items():
        # Replicas of a shard start at the same indices, so they become a single entry.
        for shard in array.addressable_shards:
            starts = ",".join(str(part.start or 0) for part in shard.index)
            shards[f"{name}|{starts}"] = shard.data
    return shards


def save_shards(shards: dict, directory: str, about: dict) -> None:
    """Write shards to this process's file, in the safetensors format.

    about: strings to keep in the file's header, next to a checksum of the rest of the file. Shards
    are written one by one, since the host may not have enough memory for a copy of all of them.
    """
    # The checksum covers the header, too, with zeros in place of the checksum's own digits.
    header = {"__metadata__": {"crc32": NO_CHECKSUM.decode()} | about}
    # The data of each shard starts where the previous shard ends.
    end = 0
    for key, array in shards.items():
        start = end
        end += array.nbytes
        header[key] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    # safetensors aligns the data to 8 bytes.
    text += b" " * (-len(text) % 8)
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, SHARDS.format(jax.process_index(), jax.process_count()))
    # The name of a new directory must be on the disk before older checkpoints are deleted.
    files.flush_to_disk(os.path.dirname(directory))
    with files.atomic_file(path) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        crc = zlib.crc32(text)
        for array in shards.values():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            f.write(data)
            crc = zlib.crc32(data, crc)
        # The checksum is known only now. Write it over the zeros in the header.
        f.seek(8)
        f.write(text.replace(NO_CHECKSUM, b"%08x" % crc, 1))


def read_about(path: str) -> dict:
    """Read `about` and `crc32` from a header. Raises CheckpointError if the file is damaged."""
    try:
        # safe_open raises an error if the sizes in the header do not add up to the file's size.
        with safe_open(path, "np") as f:
            about = f.metadata()
        # A header without `run` or `crc32` raises KeyError.
        return about | {"run": int(about["run"]), "crc32": about["crc32"]}
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as e:
        raise CheckpointError(f"{path} is damaged: {type(e).__name__} {e}") from None


def verify(path: str) -> None:
    """Raise CheckpointError unless the file is as save_shards wrote it."""
    wanted = read_about(path)["crc32"].encode()
    # Read piece by piece: a shard may be larger than the free memory of the host.
    with open(path, "rb") as f:
        text = f.read(int.from_bytes(f.read(8), "little"))
        crc = zlib.crc32(text.replace(wanted, NO_CHECKSUM, 1))
        while data := f.read(1 << 24):
            crc = zlib.crc32(data, crc)
    if wanted != b"%08x" % crc:
        raise CheckpointError(
            f"{path} is damaged: its checksum is {crc:08x}, but {wanted.decode()} was written"
        )


# ---------------------------------------------------------------- the files of a checkpoint
def saved_steps(out: str) -> list[int]:
    """Steps that have a directory `out`/step_NNNNNN, oldest first."""
    return sorted(
        int(name.removeprefix("step_"))
        for name in os.listdir(out)
        if re.fullmatch(r"step_\d{6}", name) and os.path.isdir(f"{out}/{name}")
    )


def shard_files(directory: str) -> dict:
    """Returns {(part, number of parts): path} for a checkpoint's files. Ignores other files, which
    a killed process may have left."""
    found = {}
    # The directory may be gone, since other processes delete old checkpoints.
    names = os.listdir(directory) if os.path.isdir(directory) else []
    for name in names:
        if match := re.fullmatch(SHARDS.replace("{:05}", r"(\d{5})"), name):
            found[int(match[1]), int(match[2])] = os.path.join(directory, name)
    return found


def complete_checkpoint(directory: str) -> tuple[list, dict]:
    """Returns (paths of a checkpoint's files, `read_about` of one of them), and verifies this
    process's share of the files.

    If the checkpoint has as many parts as there are processes, this process's own part is enough:
    each process may have its own disk. Otherwise, all parts must be here. Raises
    IncompleteCheckpoint if files are missing, and CheckpointError if a file is damaged.
    """
    index, count = jax.process_index(), jax.process_count()
    # The directory may also have files of another launch, or of a different number of processes.
    # {(time of the launch, number of parts of its checkpoint): ({part: path}, one header)}
    runs = {}
    faults = []
    for (part, of), path in sorted(shard_files(directory).items()):
        try:
            about = read_about(path)
        except CheckpointError as e:
            faults.append(str(e))
            continue
        paths, _ = runs.setdefault((about["run"], of), ({}, about))
        paths[part] = path
    # `run` is the time of the launch, so the newest launch has the largest.
    newest_first = sorted(runs.items(), key=lambda item: item[0], reverse=True)
    for (_, of), (paths, about) in newest_first:
        has_own = of == count and index in paths
        if len(paths) == of or has_own:
            # Each process verifies every count-th part, beginning with its own.
            for part in range(index, of, count):
                verify(paths[part])
            return list(paths.values()), about
    if faults:
        raise CheckpointError("; ".join(faults))
    lacking = [
        f"{directory} has {len(paths)} of the files of {of} processes"
        for (_, of), (paths, _) in runs.items()
    ]
    raise IncompleteCheckpoint("; ".join(lacking) or f"{directory} has no complete file")


# ---------------------------------------------------------------- read
class ShardFiles:
    """The arrays in the files of a checkpoint, each cut into pieces: the shards of the run that
    saved them."""

    def __init__(self, paths: list):
        self.paths = paths
        # {array name: {key: (indices where the piece starts, file)}}
        self.pieces = {}
        for path in paths:
            f = safe_open(path, "np")
            # Several files may have the same piece; one of them is enough.
            for key in f.keys():  # noqa: SIM118, f is not a dict
                name, _, starts = key.partition("|")
                start = [int(number) for number in starts.split(",") if number]
                self.pieces.setdefault(name, {})[key] = (start, f)

    def read(self, name: str, shape: tuple, dtype, index: tuple) -> np.ndarray:
        """Read the array `name` at `index`, a slice per dimension, from all pieces that overlap it.

        Raises CheckpointError if the pieces do not cover `index`, or reach beyond `shape`, the
        shape of the array.
        """
        # Count the values that are filled in, to notice if some are missing.
        out = np.empty([part.stop - part.start for part in index], dtype)
        filled = 0
        for key, (start, f) in self.pieces.get(name, {}).items():
            held = f.get_slice(key)
            end = tuple(map(operator.add, start, held.get_shape()))
            if len(end) != len(shape) or any(map(operator.gt, end, shape)):
                raise CheckpointError(
                    f"{self.paths[0]}: {name} does not have the shape {shape}, because a piece of "
                    f"it ends at {end}; --lora or the model has changed"
                )
            overlap = overlap_of(index, start, held.get_shape())
            if overlap is None:
                continue
            in_piece = tuple(
                slice(low - first, high - first)
                for (low, high), first in zip(overlap, start, strict=True)
            )
            in_out = tuple(
                slice(low - part.start, high - part.start)
                for (low, high), part in zip(overlap, index, strict=True)
            )
            # safetensors cannot slice a scalar.
            out[in_out] = held[in_piece] if in_piece else f.get_tensor(key)
            filled += out[in_out].size
        if filled != out.size:
            raise CheckpointError(
                f"{self.paths[0]} and any files beside it have only {filled} of the {out.size} "
                f"numbers of {name} that this process needs; a flag such as --lora has changed, or "
                "the mesh has changed and the processes do not share --out"
            )
        return out


def overlap_of(index, start, shape):
    """The overlap of `index` with a piece that starts at `start` and has this shape, as [(from, to)
    per dimension]; None if there is none."""
    overlap = [
        (max(part.start, first), min(part.stop, first + size))
        for part, first, size in zip(index, start, shape, strict=True)
    ]
    return overlap if all(low < high for low, high in overlap) else None


def load_shards(paths: list, tree):
    """Load the arrays of `tree` (shapes, dtypes, shardings) from a checkpoint's files. A run on
    another mesh may have saved them. Raises CheckpointError if numbers are missing."""
    saved = ShardFiles(paths)
    arrays = [
        hf.place(array.shape, array.sharding, partial(saved.read, name, array.shape, array.dtype))
        for name, array in model.flatten(tree).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)


# ---------------------------------------------------------------- write during training
class Saver:
    """Writes the checkpoints of a run: during training, if the hosts have memory for a copy.

    out: the run's directory. keep: number of newest checkpoints to keep. newest: step of the newest
    complete checkpoint, or 0 if there is none. about: strings for the header of each file.
    """

    def __init__(self, out: str, keep: int, newest: int, about: dict | None = None):
        self.out = out
        self.keep = keep
        # All processes use the same number, to tell this launch's files from another launch's.
        run = int(all_gather_processes(int(time.time()))[0])
        self.about = {"run": str(run), "commit": commit()} | (about or {})
        self.processes_here = processes_of_this_machine()
        self.complete = newest  # the newest step that all processes have written
        self.newest = newest  # the same, but at an exit the newest step of this process's part
        self.pending = None  # (step, future) of the checkpoint that is being written
        self.remembered = None  # (step, state, skipped) to save if the run ends now
        self.thread = ThreadPoolExecutor(1)

    def remember(self, step: int, state, skipped: int) -> None:
        """Note the state after the last complete step. skipped: consecutive skipped updates."""
        self.remembered = (step, state, skipped)

    def begin(self) -> None:
        """Start to save the state that `remember` noted last."""
        self.make_room()
        step, state, skipped = self.remembered
        shards = shards_of(state)
        size = sum(array.nbytes for array in shards.values())
        # Other processes on this machine copy their shards, too.
        needed = 2 * size * self.processes_here
        has_room = all_gather_processes(available_memory() > needed).all()
        if has_room:
            # Copy the shards to the host, since the next update donates the arrays on the devices.
            shards = {key: np.array(array, order="C") for key, array in shards.items()}
        self.pending = (step, self.thread.submit(self.write, step, shards, skipped))
        if not has_room:
            self.finish()

    def write(self, step: int, shards: dict, skipped: int) -> bool:
        """Write this process's part. Returns whether that succeeded."""
        name = f"step_{step:06}"
        about = self.about | {"step": str(step), "skipped": str(skipped)}
        # A later launch reads here that there was a complete checkpoint, even if it finds none.
        about["complete"] = str(self.complete)
        try:
            save_shards(shards, f"{self.out}/{name}", about)
            if bucket.bucket_of(self.out):
                self.send(name)
            return True
        except OSError as e:  # a BucketError is an OSError
            warn(
                f"step {step} cannot be saved: {first_line(e)}; the run goes on, and "
                "older checkpoints stay"
            )
            return False

    def send(self, name: str) -> None:
        """Send this process's part of a checkpoint to the bucket. Process 0 also sends the rest of
        the directory. Raises BucketError."""
        is_first = jax.process_index() == 0
        # Send metrics first. If the VM is lost before the checkpoint arrives, the resumed run drops
        # the rows after the older checkpoint's step. It could not restore missing rows.
        if is_first:
            bucket.send_all_but_checkpoints(self.out, compiled=False)
        bucket.send_checkpoint(self.out, name, jax.process_index(), jax.process_count())
        if is_first:
            bucket.send_all_but_checkpoints(self.out)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written. Then delete the incomplete ones before
        it and, if all processes have written their parts, complete ones that are too old."""
        if not self.pending:
            return
        step, future = self.pending
        self.pending = None
        show_status(f"saving step {step}")
        is_saved = all_gather_processes(future.result()).all()
        in_bucket = bool(bucket.bucket_of(self.out))
        here = saved_steps(self.out)
        # Checkpoints that are in a bucket need not stay on this disk.
        kept = 0 if in_bucket else self.keep
        self.delete(too_old(here, self.newest, step, kept if is_saved else len(here)))
        if is_saved and in_bucket and jax.process_index() == 0:
            # The thread removes old checkpoints from the bucket before it sends the next one. At a
            # stop, it does so while the last one is sent.
            self.thread.submit(self.thin_bucket, self.newest, step)
        if is_saved:
            self.newest = self.complete = step

    def make_room(self) -> None:
        """`finish`, and delete all but the newest `keep` checkpoints: each launch that a signal has
        stopped has left one more."""
        self.finish()
        self.delete(too_old(saved_steps(self.out), self.newest, self.newest, self.keep))

    def delete(self, steps: list) -> None:
        """Delete the checkpoints of these steps from this disk."""
        for step in steps:
            shutil.rmtree(f"{self.out}/step_{step:06}", ignore_errors=True)

    def thin_bucket(self, newest: int, step: int) -> None:
        """Remove old checkpoints from the bucket. See `too_old`."""
        try:
            old = too_old(bucket.saved_steps(self.out), newest, step, self.keep)
            bucket.remove_checkpoints(self.out, old)
        except bucket.BucketError as e:
            warn(f"old checkpoints stay in {bucket.bucket_of(self.out)}: {e}")

    def save_together(self) -> str:
        """`save_before_exit` in all processes at once. Returns when the last one has saved: once a
        process is gone, JAX aborts the others."""
        self.make_room()
        self.save_before_exit()
        self.newest = self.complete = int(all_gather_processes(self.newest).min())
        return self.last_saved()

    def save_before_exit(self) -> str:
        """Save the state that `remember` noted last, unless an update has donated its arrays.
        Returns a message that names the last saved step.

        Each process does this on its own, since others may be gone. See also `save_together`.
        """
        # If a checkpoint is being written, it may still complete.
        if self.pending:
            step, future = self.pending
            if future.result():
                self.newest = step
        # An update donates the arrays of its state, so they may be deleted.
        if self.remembered:
            step, state, skipped = self.remembered
            is_lost = any(array.is_deleted() for array in jax.tree.leaves(state))
            if step > self.newest and not is_lost and self.write(step, shards_of(state), skipped):
                self.newest = step
        return self.last_saved()

    def last_saved(self) -> str:
        """A message that names the newest complete checkpoint. If this process has saved its part
        of a newer checkpoint, the message names that step, too."""
        # A process that is alone has written the whole checkpoint.
        complete = self.newest if jax.process_count() == 1 else self.complete
        text = "nothing is saved yet"
        if complete:
            text = f"step {complete} is saved; give the same command again to resume"
        if self.newest > complete:
            text += f"; of step {self.newest}, only this process's part is known to be saved"
        return text


def too_old(steps: list, newest: int, step: int, kept: int) -> list:
    """Returns the checkpoints to delete after `step` was saved, among those of `steps`.

    newest: the newest complete checkpoint before `step`. kept: number of complete ones to keep.
    """
    # Checkpoints between `newest` and `step` are incomplete, and would only fill the disk.
    failed = [old for old in steps if newest < old < step]
    # Processes may still be writing checkpoints after `step`.
    complete = [old for old in steps if old <= step and old not in failed]
    return failed + complete[: max(0, len(complete) - kept)]
