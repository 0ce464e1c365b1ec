"""A checkpoint is complete or absent: its files, and how they are written beside training."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import zlib
from functools import partial

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

import model
from infra import bucket, cluster, files, hf
from infra.cluster import all_gather_hosts
from infra.files import CheckpointError
from infra.log import first_line, warn


class IncompleteCheckpoint(CheckpointError):
    """One that lacks files, as a process was killed while it was written; those it has are not damaged."""

# A checkpoint: `step_NNNNNN`, in which each process writes one file, of all that it holds, for its disk may
# be its own. The files of one run, as many as each says there are, are a whole; a rename brings each.
SHARDS = "shards-{:05}-of-{:05}.safetensors"

KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}  # as safetensors calls them

def shards_of(tree):
    """{'name|start,start': this process's shard, each once} of a tree of arrays."""
    return {f"{name}|{','.join(str(s.start or 0) for s in shard.index)}": shard.data
              for name, array in model.flatten(tree).items() for shard in array.addressable_shards}

def save_shards(shards, directory, about):
    """Write shards as this process's file, one after the other; about: strings, kept in its header beside
    a checksum of all else that is in the file."""
    header, end = {"__metadata__": {"crc32": "0" * 8} | about}, 0
    for key, a in shards.items():
        place = [end, end := end + a.nbytes]
        header[key] = {"dtype": KINDS[a.dtype.name], "shape": a.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(directory, exist_ok=True)
    with files.complete_file(os.path.join(directory, SHARDS.format(jax.process_index(), jax.process_count()))) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        crc = zlib.crc32(text)
        for a in shards.values():
            data = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
            f.write(data)
            crc = zlib.crc32(data, crc)
        f.seek(8)
        f.write(text.replace(b"0" * 8, b"%08x" % crc, 1))

def read_about(path):
    """What save_shards kept in a file's header, whose sizes must be those of the file."""
    try:
        with safe_open(path, "np") as f:
            about = f.metadata()
        return about | {"run": int(about["run"]), "crc32": about["crc32"]}  # KeyError where it is damaged
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as e:
        raise CheckpointError(f"{path} is damaged: {type(e).__name__} {e}")

def verify(path):
    """Raise CheckpointError unless the file is what save_shards wrote."""
    wanted = read_about(path)["crc32"].encode()
    with open(path, "rb") as f:
        text = f.read(int.from_bytes(f.read(8), "little"))
        crc = zlib.crc32(text.replace(wanted, b"0" * 8, 1))
        while data := f.read(1 << 24):
            crc = zlib.crc32(data, crc)
    if wanted != b"%08x" % crc:
        raise CheckpointError(f"{path} is damaged: its checksum is {crc:08x}, {wanted.decode()} was written")

def saved_steps(out):
    """Steps of the directories `out`/step_NNNNNN, oldest first."""
    return sorted(int(name[5:]) for name in os.listdir(out)
                  if re.fullmatch(r"step_\d{6}", name) and os.path.isdir(f"{out}/{name}"))

def shard_files(directory):
    """{(part, of how many): path} of a checkpoint's paths; of what else lies there, a killed process may have
    left it."""
    found = {}
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        if match := re.fullmatch(SHARDS.replace("{:05}", r"(\d{5})"), name):
            found[int(match[1]), int(match[2])] = os.path.join(directory, name)
    return found

def complete_checkpoint(directory):
    """-> (files of a checkpoint, what their headers keep): this process's own, all that it needs on a disk of
    its own, or as many as other processes wrote. It verifies its share of them. Raises IncompleteCheckpoint
    where files lack, and CheckpointError where one is damaged."""
    sets, faults, (me, n) = {}, [], (jax.process_index(), jax.process_count())
    for (part, of), path in sorted(shard_files(directory).items()):
        try:
            about = read_about(path)
            sets.setdefault((about["run"], of), ({}, about))[0][part] = path
        except CheckpointError as e:
            faults.append(str(e))
    for (_, of), (paths, about) in sorted(sets.items(), key=lambda item: item[0], reverse=True):
        if len(paths) == of or of == n and me in paths:
            for part in range(me, of, n):
                verify(paths[part])
            return list(paths.values()), about
    if faults:
        raise CheckpointError("; ".join(faults))
    raise IncompleteCheckpoint("; ".join(
        f"{directory} has {len(paths)} of the files of {of} processes" for (_, of), (paths, _) in sets.items())
        or f"{directory} has no complete file")

def load_shards(paths, tree):
    """The arrays saved in files, on whatever mesh, in the places of those of `tree` (shapes, types,
    shardings)."""
    pieces = {}  # array name -> {its key: (where the piece starts, its file, its key)}
    for file in paths:
        f = safe_open(file, "np")
        for key in f.keys():  # several processes may hold the same
            name, _, starts = key.partition("|")
            pieces.setdefault(name, {})[key] = [int(n) for n in starts.split(",") if n], f, key
    def read(name, dtype, index):
        out, filled = np.empty([s.stop - s.start for s in index], dtype), 0
        for starts, f, key in pieces.get(name, {}).values():
            held = f.get_slice(key)
            laps = [(max(s.start, a), min(s.stop, a + n)) for s, a, n in zip(index, starts, held.get_shape())]
            if all(low < high for low, high in laps):
                part = tuple(slice(low - a, high - a) for (low, high), a in zip(laps, starts))
                here = tuple(slice(low - s.start, high - s.start) for (low, high), s in zip(laps, index))
                out[here] = held[part] if part else f.get_tensor(key)
                filled += out[here].size
        if filled != out.size:
            raise CheckpointError(f"{paths[0]} and others have {filled} of the {out.size} numbers wanted of "
                                  f"{name}; on another mesh --out must be one that all processes share")
        return out
    return jax.tree.unflatten(jax.tree.structure(tree), [
        hf.place(a.shape, a.sharding, partial(read, name, a.dtype)) for name, a in model.flatten(tree).items()])

def about_checkpoint(step, cfg, run, owed=None):
    """What it keeps beside the state; all else follows from flags and step. owed: metrics of a step that lack
    its evaluation; skipped: updates in a row; unwritten: lines that wait for room on the disk."""
    kept = {"config": dataclasses.asdict(cfg), "owed": owed, "skipped": run.skipped,
            "unwritten": run.unwritten}
    return {"run": str(run.id), "step": str(step), "commit": cluster.commit()} | {
        k: json.dumps(v) for k, v in kept.items()}

def write_checkpoint(step, shards, about, cfg):
    """-> whether it was written."""
    try:
        save_shards(shards, f"{cfg.out}/step_{step:06}", about)
        if bucket.bucket_of(cfg.out):
            bucket.send_checkpoint(cfg.out, f"step_{step:06}", jax.process_index(), jax.process_count())
        return send_rest(cfg)
    except OSError as e:  # a BucketError is one
        warn(f"step {step} cannot be saved: {first_line(e)}; the run goes on, older checkpoints stay")
        return False

def send_rest(cfg):
    """The small files to the bucket, if the run has one -> whether that worked."""
    try:
        if bucket.bucket_of(cfg.out) and jax.process_index() == 0:
            bucket.send_rest(cfg.out)
    except bucket.BucketError as e:
        warn(str(e))
        return False
    return True

def save(step, state, cfg, run):
    """Begin a checkpoint, written beside training if the memory of all hosts has room for a copy."""
    finish_save(cfg, run)
    shards, room = shards_of(state), 0
    with contextlib.suppress(OSError), open("/proc/meminfo") as f:
        room = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", f.read())[1])
    beside = all_gather_hosts(room > 2 * sum(a.nbytes for a in shards.values())).all()
    if beside:  # the next update takes those on the devices
        shards = {key: np.array(a, order="C") for key, a in shards.items()}
    about = about_checkpoint(step, cfg, run)
    run.saving = step, run.writer.submit(write_checkpoint, step, shards, about, cfg)
    if not beside:
        finish_save(cfg, run)

def finish_save(cfg, run):
    """Wait for the checkpoint that is being written; once it is whole for all, older ones may go. What is in a
    bucket need not stay here."""
    if not run.saving:
        return
    (step, future), run.saving = run.saving, None
    if not all_gather_hosts(future.result()).all():
        return
    run.done = step
    in_bucket = bool(bucket.bucket_of(cfg.out))
    kept_here = 0 if in_bucket else cfg.keep
    for old in too_old(saved_steps(cfg.out), step, kept_here):
        shutil.rmtree(f"{cfg.out}/step_{old:06}", ignore_errors=True)
    if in_bucket and jax.process_index() == 0:
        run.writer.submit(thin_bucket, step, cfg)  # beside training, and before the next is sent

def too_old(steps, newest, kept):
    """Of these steps all up to `newest`, but for the last so many."""
    steps = [step for step in steps if step <= newest]
    return steps[:max(0, len(steps) - kept)]

def thin_bucket(newest, cfg):
    try:
        bucket.remove_checkpoints(cfg.out, too_old(bucket.saved_steps(cfg.out), newest, cfg.keep))
    except bucket.BucketError as e:
        warn(f"old checkpoints stay in {bucket.bucket_of(cfg.out)}: {e}")

def rescue(cfg, run):
    """Save what the last whole step left, unless an update has taken it -> what to tell. Each process for
    itself: others may be gone."""
    if run.saving and run.saving[1].result():
        run.done = run.saving[0]
    step, state, owed = run.latest
    taken = any(a.is_deleted() for a in jax.tree.leaves(state))
    if step > run.done and not taken and write_checkpoint(
            step, shards_of(state), about_checkpoint(step, cfg, run, owed), cfg):
        run.done = step
    return f"step {run.done} is saved; start again, and it resumes" if run.done else "nothing is saved yet"
