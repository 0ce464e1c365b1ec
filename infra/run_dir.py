"""The directory of a run: whose it is, where it resumes, and whether what is written has room.

config.json      the run's flags, with commit and versions
metrics.jsonl    one row a step, and one for each evaluation
samples.jsonl    some prompts with answers and rewards
step_NNNNNN/     a checkpoint
compiled/        what JAX has compiled, so that a run which resumes need not compile again
profile/         the trace of the step that --profile names
final/           the trained model, as a Hugging Face directory
"""

import contextlib
import dataclasses
import glob
import json
import math
import os
import re
import shutil
import time
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache

from infra import bucket, checkpoint, cluster, files, log
from infra.chips import GIB
from infra.claim import InUse, claimed
from infra.cluster import all_gather_hosts
from infra.files import CheckpointError
from infra.log import check, exit_on, say, warn
from infra.profiler import Profiler

# Flags that may change when a run resumes: none of them changes what is computed.
FREE_ON_RESUME = cluster.FREE_PER_PROCESS | {
    "out",
    "rollout_sharding",
    "micro_batch",
    "loss_impl",
    "attention",
    "remat",
    "offload",
    "mesh",
    "eval_every",
    "save_every",
    "keep",
    "resume",
    "wandb",
    "require_processes",
    "profile",
}
# What a run writes that another run in its place would write too.
WRITTEN = r"step_\d{6}|final|profile|(metrics|samples)\.jsonl"


def comparable(flags: dict) -> dict:
    """Of a run's flags those that may not differ when it resumes. Questions count per step, so that
    it may resume on another number of processes."""
    # Runs from before this flag sampled in `dtype`.
    flags = {"rollout_dtype": flags.get("dtype")} | flags
    kept = {name: v for name, v in flags.items() if name not in FREE_ON_RESUME | {"batch"}}
    questions = flags.get("batch", 0) * flags.get("require_processes", 0)
    return kept | {"batch * processes": questions}


def write_config(out: str, flags: dict) -> None:
    """Write config.json, by every process, since its disk may be its own; exit 2 where the run's
    bucket does not take it."""
    versions = {module.__name__: module.__version__ for module in (jax, optax, np)}
    content = {"config": flags, "commit": cluster.commit(), "versions": versions}
    files.write_json(f"{out}/config.json", content)
    if bucket.bucket_of(out) and jax.process_index() == 0:
        with exit_without_bucket():
            bucket.send_rest(out)


@contextlib.contextmanager
def exit_without_bucket():
    """Inside, exit 2 where the bucket can never be used, and 1 where it cannot be reached now."""
    try:
        with exit_on(bucket.RefusedError, "--out cannot be used"):
            yield
    except bucket.BucketError as e:
        warn(f"{e}; --out cannot be reached now: give the same command again later")
        raise SystemExit(1) from None


def claim_out(out: str, claims: contextlib.ExitStack) -> None:
    """Make `out`, and let no other run use it until `claims` is closed. Process 0 does that."""
    fault = ""
    with exit_on(OSError, f"{out} cannot be made a directory; choose another --out"):
        os.makedirs(out, exist_ok=True)
        if jax.process_index() == 0:
            try:
                with exit_without_bucket():
                    claims.enter_context(claimed(out, bucket.bucket_of(out), say))
            except InUse as e:
                fault = str(e)
    is_in_use = all_gather_hosts(bool(fault)).any()
    check(not is_in_use, fault or f"{out} is in use, as process 0 tells")


def keep_compiled(out: str) -> None:
    """Let JAX keep compiled programs in `out`/compiled, unless the user has chosen a place, as with
    JAX_COMPILATION_CACHE_DIR. All processes read there; JAX lets only process 0 write."""
    # The environment variable sets this field too.
    if jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", f"{out}/compiled")
    # JAX compiled a program when the processes met, and remembers that it found no cache then.
    compilation_cache.reset_cache()


# ---------------------------------------------------------------- where a run resumes
def open_run(out: str, total_steps: int, flags: dict, resume: str) -> tuple[int, list, int]:
    """`out`, once claimed -> (step, files, skipped updates in a row) of its newest complete
    checkpoint, or (0, [], 0).

    flags: of this run. Exits 2 for a directory that holds anything else than this run, and 0 where
    the run has finished.
    """
    if bucket.bucket_of(out):
        with exit_without_bucket():
            bucket.fetch_rest(out, final=jax.process_index() == 0)
    refuse_other_run(out, flags, resume)
    done, paths, about = newest_checkpoint(out, resume)
    # The step that --profile names may lie before the checkpoint.
    if 0 < flags["profile"] <= done:
        say(f"step {flags['profile']} is not traced now, as {done} steps were done before")
    # Process 0 writes final/; the disk of another process may be its own.
    has_final, final_step = all_gather_hosts([os.path.isdir(f"{out}/final"), step_of_final(out)])[0]
    if done and min(done, final_step) >= total_steps:
        send_what_is_here(out, done)
        say(f"{out} is finished: {done} steps; see {out}/final and {out}/metrics.jsonl")
        raise SystemExit(0)
    if has_final and not done:
        check(
            resume == "force",
            f"{out} has a final model, and no checkpoint to go on from; choose another --out, or "
            "--resume force, which renames what is there and starts over",
        )
        put_aside(out)
    return done, paths, int(about.get("skipped", 0))


def send_what_is_here(out: str, done: int) -> None:
    """Send what a run that has finished could not send; exit 1 where its results cannot be."""
    if not bucket.bucket_of(out):
        return
    checkpoint.send_results(out)
    try:
        index, count = jax.process_index(), jax.process_count()
        bucket.send_checkpoint(out, f"step_{done:06}", index, count)
    except bucket.BucketError as e:
        warn(f"the model is in the bucket, its last checkpoint only here: {e}")


def step_of_final(out: str) -> int:
    """The step of the final model, 0 where there is none; a run that was given more steps has an
    older one."""
    with contextlib.suppress(CheckpointError):
        return int(files.read_json(f"{out}/final/podgrpo.json")["step"])
    return 0


def refuse_other_run(out, flags, resume):
    """Exit 2 where `out` holds something else than this run."""
    # A killed process may have left half of the first file.
    harmless = r"tiny-seed|claim\.json$|compiled$|.*\.tmp$"
    found = {name for name in os.listdir(out) if not re.match(harmless, name)}
    if not found:
        return
    # Any directory may be named by mistake.
    with exit_on(Exception, f"{out} exists and is not a run of podgrpo; choose another --out"):
        flags_there = comparable(files.read_json(f"{out}/config.json")["config"])
    changed = [
        f"{name} was {flags_there.get(name)!r}, is {value!r}"
        for name, value in comparable(flags).items()
        if flags_there.get(name) != value
    ]
    # A run that was refused may have left no more than its config.json.
    has_begun = found != {"config.json"}
    check(
        not changed or resume == "force" or not has_begun,
        f"{out} is another run: {'; '.join(changed[:3])}; choose another --out, or --resume force "
        "to go on with it",
    )


def newest_checkpoint(out: str, resume: str):
    """-> (step, files, headers) of the newest checkpoint that is complete for all processes, or
    (0, [], {}) where none ever was, since a process may have been killed in its first save.

    Where one was, and none can be used, the user decides: exit 2, or `--resume force`.
    """
    own_steps = []
    fault = ""
    # All processes look at the same steps, since they have to agree on one.
    for step in steps_of_all_hosts(out):
        directory = f"{out}/step_{step:06}"
        paths, about = [], {}
        try:
            paths, about = complete_checkpoint(out, step)
            own_steps.append(step)
        except (CheckpointError, OSError) as e:
            warn(f"step {step} cannot be used: {e}")
            fault = fault or fault_of(e, directory)
        # All must have the same run's checkpoint, so that no two runs are mixed.
        runs = all_gather_hosts(about.get("run", 0))
        if 0 < runs.min() == runs.max():
            return step, paths, about
    # A second checkpoint is begun when all processes have the first.
    if len(own_steps) > 1 and not fault:
        index = jax.process_index()
        fault = f"process {index} has its part of steps {own_steps}, and others lack theirs"
    if all_gather_hosts(bool(fault)).any():
        check(
            resume == "force",
            f"{out} has checkpoints, and none can be used: {fault or 'another process tells why'}; "
            "bring a good copy back, or choose another --out, or --resume force, which renames "
            "what is there and starts over",
        )
        put_aside(out)
    return 0, [], {}


def steps_of_all_hosts(out):
    """Steps of the checkpoints, complete or not, that any process finds, newest first."""
    steps = set(checkpoint.saved_steps(out))
    if bucket.bucket_of(out):
        with exit_without_bucket():
            steps.update(bucket.saved_steps(out))
    # As many numbers from each process; no step is 0.
    padded = np.array([0] * 99 + sorted(steps))[-99:]
    found = set(all_gather_hosts(padded).ravel().tolist())
    return sorted(found - {0}, reverse=True)


def complete_checkpoint(out, step):
    """This process's files of a checkpoint, fetched from the bucket if the run has one."""
    name = f"step_{step:06}"
    if bucket.bucket_of(out):
        with exit_without_bucket():
            bucket.fetch_checkpoint(out, name, jax.process_index(), jax.process_count())
    return checkpoint.complete_checkpoint(f"{out}/{name}")


def fault_of(error, directory):
    """Why a checkpoint is more than one whose writing was cut short, "" if it is not."""
    if not isinstance(error, checkpoint.IncompleteCheckpoint):
        return str(error)
    count = jax.process_count()
    if any(of != count for _, of in checkpoint.shard_files(directory)):
        return (
            f"{directory} is of another number of processes than {count}, and not all its files "
            "are here; --out must be a directory that all processes share, or gs://"
        )
    return ""


def put_aside(out: str) -> None:
    """Rename what a run left in `out`, each process what is on its disk."""
    now = int(all_gather_hosts(int(time.time()))[0])
    old = time.strftime("old-%Y%m%d-%H%M%S", time.gmtime(now))
    os.makedirs(f"{out}/{old}", exist_ok=True)
    if bucket.bucket_of(out) and jax.process_index() == 0:
        with exit_without_bucket():
            bucket.put_aside(out, old, WRITTEN)
    for name in os.listdir(out):
        if re.fullmatch(WRITTEN, name):
            # On a disk that several processes share, one of them is the first.
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{out}/{name}", f"{out}/{old}/{name}")
    # No process writes before all have looked.
    all_gather_hosts(0)
    say(f"{out} starts over; what was there is in {old}")


def truncate_to(out: str, done: int) -> None:
    """Let metrics and samples end at the step of the checkpoint: what came after will come again.
    The samples of an evaluation whose row of metrics is missing come again too."""
    # Process 0 writes them.
    if jax.process_index() != 0:
        return
    metrics = log.read_jsonl(f"{out}/metrics.jsonl")
    samples = log.read_jsonl(f"{out}/samples.jsonl")
    evaluated = {row["step"] for row in metrics if "eval/solved" in row}
    metrics = [row for row in metrics if row["step"] <= done]
    samples = [
        row
        for row in samples
        if row["step"] <= done and ("eval" not in row or row["step"] in evaluated)
    ]
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        # Without a checkpoint the run begins anew.
        kept = rows if done else []
        with files.complete_file(f"{out}/{name}") as f:
            f.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in kept)


def has_evaluation(out: str, step: int) -> bool:
    """Does metrics.jsonl hold an evaluation of this step? On process 0's disk, which counts."""
    rows = log.read_jsonl(f"{out}/metrics.jsonl")
    has_row = any(row["step"] == step and "eval/solved" in row for row in rows)
    return bool(all_gather_hosts(has_row)[0])


# ---------------------------------------------------------------- room for checkpoints
def check_disk(out: str, state, done: int, total_steps: int, save_every: int, keep: int) -> None:
    """Exit 2 unless what the run writes has room on the disk of `out`. state: a tree of shapes."""
    steps_left = total_steps - done
    if not steps_left:
        return
    size = checkpoint_bytes(state)
    # Process 0 writes the model too, in float32 at most.
    final = 0
    if jax.process_index() == 0:
        final = 4 * sum(array.size for array in jax.tree.leaves(state["params"]))
    saves = 1 + (steps_left - 1) // save_every if save_every else 1
    # While one is written the older ones are still there. With a bucket that is the one from which
    # the run resumed, at most.
    resumed = 1 if done else 0
    at_once = min(saves + resumed, keep + 1)
    if bucket.bucket_of(out):
        at_once = min(saves, 1) + resumed
    # The checkpoints that are there will have gone by then.
    old = sum(files.directory_bytes(path) for path in glob.glob(f"{glob.escape(out)}/step_*"))
    free = shutil.disk_usage(out).free + old
    need_gib, free_gib = worst_disk(out, (at_once * size + final) / GIB, free / GIB)
    what = f"{at_once} checkpoints at once, of {size / GIB:.2f} GiB a process, and final"
    check(
        need_gib <= free_gib,
        f"{what} need {need_gib:.2f} GiB of the disk of {out}, which has {free_gib:.2f}; try "
        "--keep 1, --save_every 0, --out gs://bucket/run, or a larger disk (of a TPU VM: --create "
        '"--data-disk source=..")',
    )
    files_of_run = f"{at_once} checkpoints at once and final/"
    say(f"disk: {free_gib:.2f} GiB are free; {files_of_run} take {need_gib:.2f}")


def worst_disk(out, need_gib, free_gib):
    """-> (needed, free) GiB of the disk that has the least room, of all processes."""
    has_claim = os.path.exists(f"{out}/claim.json")
    of_this_host = np.array([need_gib, free_gib, has_claim], np.float32)
    need_P, free_P, has_claim_P = all_gather_hosts(of_this_host).T
    # Process 0 has written the claim: all who find it share its disk.
    if has_claim_P.all():
        need_P = need_P.sum(keepdims=True)
        free_P = free_P[:1]
    worst = int(np.argmin(free_P - need_P))
    return need_P[worst], free_P[worst]


def checkpoint_bytes(state) -> int:
    """Bytes of this process's part of a checkpoint: its shards of the state, each once."""
    total = 0
    for array in jax.tree.leaves(state):
        # Of the devices of this process.
        indices = array.sharding.addressable_devices_indices_map(array.shape).values()
        # Replicas of a shard have the same index.
        shards = len({str(index) for index in indices})
        shard_size = math.prod(array.sharding.shard_shape(array.shape))
        total += shards * shard_size * array.dtype.itemsize
    return total


# ---------------------------------------------------------------- what a run leaves behind
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where a run leaves what it finds, what shows how far it is, and what may end it early."""

    saver: checkpoint.Saver
    metrics: log.JsonLines
    samples: log.JsonLines
    wandb: Any  # a run of wandb, or None
    terminal: log.Terminal
    profiler: Profiler
    stop_signal: cluster.StopSignal

    def write(self, row: dict) -> None:
        """Append to metrics.jsonl, and send to wandb."""
        self.metrics.append(row)
        if self.wandb:
            self.wandb.log(row, step=row["step"])


def open_outputs(cfg, done: int, wandb) -> Outputs:
    """Those of a run with these flags, after `done` steps. From here on signals are watched."""
    saver = checkpoint.Saver(cfg.out, cfg.keep, done)
    metrics = log.JsonLines(f"{cfg.out}/metrics.jsonl")
    samples = log.JsonLines(f"{cfg.out}/samples.jsonl")
    terminal = log.Terminal(cfg.sft_steps, cfg.sft_steps + cfg.steps, done)
    profiler = Profiler(f"{cfg.out}/profile", cfg.profile)
    return Outputs(saver, metrics, samples, wandb, terminal, profiler, cluster.watch_signals())
