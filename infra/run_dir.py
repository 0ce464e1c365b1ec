"""The directory of a run: whose it is, where it resumes, what has room there."""

import contextlib
import dataclasses
import glob
import json
import math
import os
import re
import shutil
import time

import jax
import numpy as np

from infra import bucket, checkpoint, cluster, files, log
from infra.claim import InUse, claimed
from infra.cluster import all_gather_hosts
from infra.files import CheckpointError
from infra.log import check, exit_on, say, warn

FLAGS_FREE_ON_RESUME = cluster.FLAGS_OF_A_PROCESS | {  # on resume
    *"out rollout_sharding micro_batch loss_impl attention remat offload mesh eval_every save_every".split(),
    *"keep resume wandb require_processes".split()}

def flags_that_must_match(flags):
    """Of a run's flags (a dict) those that may not change on resume; questions a step, not a process."""
    per_step = {"batch * processes": flags.get("batch", 0) * flags.get("require_processes", 0)}
    return {k: v for k, v in flags.items() if k not in FLAGS_FREE_ON_RESUME and k != "batch"} | per_step

def claim_out(cfg, claims):
    """Make `out`, and let no other run use it until the ExitStack `claims` is left: process 0 sees to that."""
    fault = ""
    with exit_on(OSError, f"{cfg.out} cannot be made a directory; choose another --out"):
        os.makedirs(cfg.out, exist_ok=True)
        if jax.process_index() == 0:
            try:
                claims.enter_context(claimed(cfg.out, bucket.bucket_of(cfg.out), say))
            except InUse as e:
                fault = str(e)
    check(not all_gather_hosts(bool(fault)).any(), fault or f"{cfg.out} is in use, as process 0 tells")

def open_run(cfg):
    """`out`, once claimed -> its newest complete checkpoint (step or 0, files, what these keep beside). Refuses a
    directory that holds anything else."""
    if bucket.bucket_of(cfg.out):
        with exit_on(bucket.BucketError, "--out cannot be used"):
            bucket.fetch_rest(cfg.out, final=jax.process_index() == 0)
    found = {name for name in os.listdir(cfg.out) if not re.match(r"tiny-seed|claim\.json$", name)}
    if found:
        with exit_on(Exception, f"{cfg.out} exists and is not a run of podgrpo; choose another --out"):
            before = files.read_json(f"{cfg.out}/config.json")["config"]
            before, now = map(flags_that_must_match, (before, dataclasses.asdict(cfg)))
            changed = [f"{k} was {before.get(k)!r}, is {v!r}" for k, v in now.items() if before.get(k) != v]
        check(not changed or cfg.resume == "force" or found == {"config.json"}, f"{cfg.out} is another run: "
              f"{'; '.join(changed[:3])}; choose another --out, or --resume force to go on with it")
    done, paths, about = newest_checkpoint(cfg)
    written = all_gather_hosts(os.path.isdir(f"{cfg.out}/final"))[0]  # by process 0; another's disk may be its own
    if written and done >= cfg.sft_steps + cfg.steps:
        say(f"{cfg.out} is finished: {done} steps; see {cfg.out}/final and {cfg.out}/metrics.jsonl")
        raise SystemExit(0)
    return done, paths, about

def newest_checkpoint(cfg):
    """-> (step, files, what they keep beside) of the newest that is whole for all, or (0, [], {}) where none
    ever was: a process may have been killed in its first save. Where one was, and none can be used, this is
    for the user to decide."""
    steps, in_bucket = checkpoint.saved_steps(cfg.out), bucket.bucket_of(cfg.out)
    if in_bucket:
        with exit_on(bucket.BucketError, "--out cannot be used"):
            steps = sorted({*steps, *bucket.saved_steps(cfg.out)})
    steps = all_gather_hosts(np.array([0] * 99 + steps)[-99:])
    (me, n), mine, fault = (jax.process_index(), jax.process_count()), [], ""
    for step in sorted({*steps.ravel().tolist()} - {0}, reverse=True):
        paths, about, directory = [], {}, f"{cfg.out}/step_{step:06}"
        if in_bucket:
            with exit_on(bucket.BucketError, "--out cannot be used"):
                bucket.fetch_checkpoint(cfg.out, f"step_{step:06}", me, n)
        try:
            paths, about = checkpoint.complete_checkpoint(directory)
            mine.append(step)
        except (CheckpointError, OSError) as e:
            warn(f"step {step} is passed over: {e}")
            if not isinstance(e, checkpoint.IncompleteCheckpoint):
                fault = fault or str(e)
            elif any(of != n for _, of in checkpoint.shard_files(directory)):
                fault = (f"{directory} is of another number of processes than {n}, and not all its files are "
                         "here; --out must be a directory that all processes share, or gs://")
        runs = all_gather_hosts(about.get("run", 0))
        if 0 < runs.min() == runs.max():
            return step, paths, about
    if len(mine) > 1:  # a second is begun when all have the first
        fault = fault or f"process {me} has its part of steps {mine}, and others lack theirs"
    if all_gather_hosts(bool(fault)).any():
        check(cfg.resume == "force", f"{cfg.out} has checkpoints, and none can be used: "
              f"{fault or 'another process tells why'}; bring a good copy back, or choose another --out, or "
              "--resume force, which renames what is there and starts over")
        put_aside(cfg)
    return 0, [], {}

def put_aside(cfg):
    """Rename what a run left in `out`, each process what is on its disk."""
    old = time.strftime("old-%Y%m%d-%H%M%S", time.gmtime(all_gather_hosts(int(time.time()))[0]))
    os.makedirs(f"{cfg.out}/{old}", exist_ok=True)
    left = r"step_\d{6}|final|(metrics|samples)\.jsonl"
    if bucket.bucket_of(cfg.out) and jax.process_index() == 0:
        with exit_on(bucket.BucketError, "--out cannot be used"):
            bucket.put_aside(cfg.out, old, left)
    for name in os.listdir(cfg.out):
        if re.fullmatch(left, name):
            with contextlib.suppress(FileNotFoundError):  # on a disk of several processes, one is the first
                os.rename(f"{cfg.out}/{name}", f"{cfg.out}/{old}/{name}")
    all_gather_hosts(0)  # none writes before all have looked
    say(f"{cfg.out} starts over; what was there is in {old}")

def cut_back(cfg, run):
    """Let metrics and samples end at the checkpoint: what came after it will come again."""
    for name in "metrics.jsonl", "samples.jsonl":
        last = lambda row: run.done - bool(run.owed and ("eval" in row or name == "metrics.jsonl"))
        written = [row for row in log.read_jsonl(cfg, name) if run.done and row["step"] <= last(row)]
        waited = [row for row in map(json.loads, run.unwritten.pop(name, [])) if row["step"] <= last(row)]
        place = lambda row: (row["step"], "eval" in row)
        if waited:  # some may have found room after the checkpoint
            written = [row for row in written if place(row) < place(waited[0])]
        with files.complete_file(f"{cfg.out}/{name}") as f:
            f.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in written + waited)

def check_disk(cfg, wanted, done):
    """That what the run writes has room on the disk of `out`, before anything is computed. wanted: the state."""
    left = cfg.sft_steps + cfg.steps - done
    if not left:
        return
    # Each process writes its shards of the state, and process 0 the model, in float32 at most.
    checkpoint = checkpoint_bytes(wanted)
    final = 4 * sum(a.size for a in jax.tree.leaves(wanted["params"])) if jax.process_index() == 0 else 0
    # While one is written the older ones are still there; with a bucket that is the one of the start, at most.
    saves = 1 + (left - 1) // cfg.save_every if cfg.save_every else 1
    at_once = min(saves, 1) + bool(done) if bucket.bucket_of(cfg.out) else min(saves + bool(done), cfg.keep + 1)
    taken = sum(os.path.getsize(path) for path in glob.glob(f"{glob.escape(cfg.out)}/step_*/*"))
    free, gib = shutil.disk_usage(cfg.out).free + taken, 2 ** 30
    has_claim = os.path.exists(f"{cfg.out}/claim.json")
    need_P, free_P, has_claim_P = all_gather_hosts(np.array(
        [(at_once * checkpoint + final) / gib, free / gib, has_claim], np.float32)).T
    if has_claim_P.all():  # one disk for all
        need_P, free_P = need_P.sum(keepdims=True), free_P[:1]
    worst = int(np.argmin(free_P - need_P))
    what = f"{at_once} checkpoints at once, of {checkpoint / gib:.2f} GiB a process, and final"
    need, free = need_P[worst], free_P[worst]
    check(need <= free, f"{what} need {need:.2f} GiB of the disk of {cfg.out}, which has {free:.2f}; try --keep 1, "
          "--save_every 0, --out gs://bucket/run, or a larger disk (of a TPU VM: --create \"--data-disk source=..\")")
    say(f"{what} need {need:.2f} GiB of a disk that has {free:.2f}")

def checkpoint_bytes(wanted):
    """Of this process's part of a checkpoint: its shards of the state, each once."""
    total = 0
    for a in jax.tree.leaves(wanted):
        indices = a.sharding.addressable_devices_indices_map(a.shape).values()
        total += len(set(map(str, indices))) * math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
    return total
