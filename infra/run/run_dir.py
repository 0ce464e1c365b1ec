"""The directory of a run: which run owns it, where that run resumes, and whether the disk has room.

config.json      the run's flags, with commit, versions, and checksums of code and data
metrics.jsonl    one row for each step, and one for each evaluation
samples.jsonl    two answers of each GRPO step, with their question and rewards
evals.jsonl      all answers of evaluations
rewards.log      the output of reward functions
step_NNNNNN/     a checkpoint
compiled/        programs that JAX has compiled, so that a resumed run need not compile again
profile/         the trace of the step that --profile names
final/           the trained model, as a Hugging Face directory
"""

import contextlib
import glob
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator

import jax
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache

from infra.host import files
from infra.host.chips import GIB
from infra.host.console import check, exit_on, say, warn
from infra.host.files import CheckpointError
from infra.host.processes import FREE_PER_PROCESS, all_gather_processes, code_hash, commit
from infra.run import bucket, checkpoint, log
from infra.run.claim import InUse, claimed
from infra.update.state import without_base

# Flags that may change when a run resumes, since they are not meant to change what is trained.
FREE_ON_RESUME = FREE_PER_PROCESS | {
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
    "reward_workers",
    "reward_timeout",
    "require_processes",
    "profile",
}
# This matches the names that `put_aside` moves. config.json and compiled/ stay: the new run
# overwrites config.json and can use compiled/.
WRITTEN = r"step_\d{6}|final|profile|(metrics|samples|evals)\.jsonl|report\.html|rewards\.log"


def comparable(flags: dict) -> dict:
    """The flags of a run that must not change when it resumes.

    In place of `batch`, this has the questions per step, batch * processes: a run may resume on a
    different number of processes. train.py sets `require_processes` to the number of processes.
    """
    # An old run's config.json lacks the flags that were added later. Fill in the values that
    # describe what the old run did: for example, it sampled in `dtype`.
    older = {"rollout_dtype": flags.get("dtype"), "eval_samples": 1, "truncated": "zero"}
    older |= {"lora": 0, "lora_alpha": 32, "adapter": ""}
    flags = older | flags
    kept = {name: v for name, v in flags.items() if name not in FREE_ON_RESUME | {"batch"}}
    questions = flags.get("batch", 0) * flags.get("require_processes", 0)
    return kept | {"batch * processes": questions}


def write_config(out: str, flags: dict, data: dict) -> None:
    """Write config.json on every process, since each may have its own disk, and send it to the
    run's bucket. If the bucket cannot be used, exits as `exit_without_bucket` does."""
    versions = {module.__name__: module.__version__ for module in (jax, optax, np)}
    content = {"config": flags, "commit": commit(), "code": code_hash()}
    content |= {"versions": versions, "data": data}
    files.write_json(f"{out}/config.json", content)
    if bucket.bucket_of(out) and jax.process_index() == 0:
        with exit_without_bucket():
            bucket.send_all_but_checkpoints(out)


@contextlib.contextmanager
def exit_without_bucket():
    """In the context, exit with code 2 if the bucket can never be used, or with code 1 if it cannot
    be reached now."""
    try:
        with exit_on(bucket.RefusedError, "--out cannot be used"):
            yield
    except bucket.BucketError as e:
        warn(f"{e}; --out cannot be reached now: give the same command again later")
        raise SystemExit(1) from None


@contextlib.contextmanager
def claimed_out(out: str) -> Iterator[None]:
    """In the context, no other run uses the directory `out`. Every process makes the directory, and
    process 0 claims it. Exits with code 2 if another run uses it."""
    fault = ""
    with contextlib.ExitStack() as claims:
        with exit_on(OSError, f"the directory {out} cannot be made; choose another --out"):
            os.makedirs(out, exist_ok=True)
            if jax.process_index() == 0:
                try:
                    with exit_without_bucket():
                        claims.enter_context(claimed(out, bucket.bucket_of(out), say))
                except InUse as e:
                    fault = str(e)
        is_in_use = all_gather_processes(bool(fault)).any()
        check(not is_in_use, fault or f"{out} is in use: see the message of process 0")
        yield


def keep_compiled(out: str) -> None:
    """Let JAX keep compiled programs in `out`/compiled, unless the user has chosen a directory, for
    example with JAX_COMPILATION_CACHE_DIR. All processes read there; JAX lets only process 0 write.
    On GPUs, does nothing unless all processes see the same `out`. Every process must call this.
    """
    # Several processes compile for GPUs together: each autotunes some kernels, and waits up to
    # 24 hours for the others' results. If only process 0 found a program in its cache, the others
    # would wait for process 0.
    is_shared = all_gather_processes(os.path.exists(f"{out}/claim.json")).all()
    if jax.default_backend() == "gpu" and not is_shared:
        return
    # The environment variable also sets this field.
    if jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", f"{out}/compiled")
    # JAX already compiled a program when the processes connected. It found no cache at that time,
    # and would not look again.
    compilation_cache.reset_cache()


# ---------------------------------------------------------------- where a run resumes
def open_run(out: str, total_steps: int, flags: dict, resume: str) -> tuple[int, list, int]:
    """Find where a run resumes in `out`, which is already claimed. Returns (step, files,
    consecutive skipped updates) of the newest complete checkpoint, or (0, [], 0).

    flags: this run's flags. Exits with code 2 if the directory holds anything but this run, and
    with code 0 if the run has finished.
    """
    if bucket.bucket_of(out):
        with exit_without_bucket():
            bucket.fetch_all_but_checkpoints(out, final=jax.process_index() == 0)
    refuse_other_run(out, flags, resume)
    done, paths, about = newest_checkpoint(out, resume)
    if done:
        refuse_other_state(out, flags)
    # The step that --profile names may be before the checkpoint.
    if 0 < flags["profile"] <= done:
        say(f"step {flags['profile']} is not traced: the run resumes after step {done}")
    # Ask process 0, which writes final/: other processes may have their own disks.
    has_final, final_step = all_gather_processes(
        [os.path.isdir(f"{out}/final"), step_of_final(out)]
    )[0]
    if done and min(done, final_step) >= total_steps:
        send_what_is_here(out, done)
        say(f"{out} is finished: {done} steps; see {out}/final and {out}/metrics.jsonl")
        raise SystemExit(0)
    check(
        done <= total_steps,
        f"{out} has done {done} steps, and sft_steps + steps = {total_steps}; give more --steps, "
        "or choose another --out",
    )
    if has_final and not done:
        check(
            resume == "force",
            f"{out} has a final model, and no checkpoint to go on from; choose another --out, or "
            "--resume force, which moves the old files aside and starts over",
        )
        put_aside(out)
    return done, paths, int(about.get("skipped", 0))


def send_what_is_here(out: str, done: int) -> None:
    """Send the results and the last checkpoint of a finished run to its bucket, in case the run
    could not. Exits with code 1 if the results still cannot be sent."""
    if not bucket.bucket_of(out):
        return
    send_results(out)
    try:
        index, count = jax.process_index(), jax.process_count()
        bucket.send_checkpoint(out, f"step_{done:06}", index, count)
    except bucket.BucketError as e:
        warn(f"the model is in the bucket, but its last checkpoint is only here: {e}")


def step_of_final(out: str) -> int:
    """The step of the final model, or 0 if there is none. A run that was given more steps has a
    final model of an earlier step."""
    with contextlib.suppress(CheckpointError):
        return int(files.read_json(f"{out}/final/podgrpo.json")["step"])
    return 0


def refuse_other_run(out, flags, resume):
    """Exit with code 2 if `out` holds anything but this run."""
    # A run that was killed before it wrote config.json, or in its first evaluation, may have left
    # these files.
    harmless = r"tiny-seed|claim\.json$|compiled$|rewards\.log$|wandb_id$|.*\.tmp$"
    found = {name for name in os.listdir(out) if not re.match(harmless, name)}
    if not found:
        return
    # By mistake, the user may have named a directory that is not a run.
    with exit_on(Exception, f"{out} exists and is not a run of podgrpo; choose another --out"):
        flags_there = comparable(files.read_json(f"{out}/config.json")["config"])
    changed = [
        f"{name} was {flags_there.get(name)!r}, is now {value!r}"
        for name, value in comparable(flags).items()
        if flags_there.get(name) != value
    ]
    # A run that ended before its first step may have left only its config.json.
    has_begun = found != {"config.json"}
    check(
        not changed or resume == "force" or not has_begun,
        f"{out} is another run: {'; '.join(changed[:3])}; choose another --out, or --resume force "
        "to continue it",
    )


def refuse_other_state(out: str, flags: dict) -> None:
    """Exit with code 2 if the checkpoint lacks arrays that these flags need: not even `--resume
    force` could continue from it."""
    there = comparable(files.read_json(f"{out}/config.json")["config"])
    new = comparable(flags)
    # adamw keeps two moments of the gradient, lion keeps one of these, and sgd keeps none.
    moments = {"sgd": 0, "lion": 1, "adamw": 2}
    lacks = {
        "optimizer": moments.get(new.get("optimizer"), 0) > moments.get(there.get("optimizer"), 2),
        "lora": new.get("lora") != there.get("lora"),
        # The KL's reference is in checkpoints only if there is a KL.
        "beta": bool(new.get("beta")) and not there.get("beta"),
    }
    found = [f"{n} was {there.get(n)!r}, is now {new[n]!r}" for n, lack in lacks.items() if lack]
    check(
        not found,
        f"{out} cannot be continued: {'; '.join(found)}, and its checkpoints have no arrays for "
        "that; give the old values again, or choose another --out",
    )


def newest_checkpoint(out: str, resume: str):
    """Returns (step, files, header) of the newest checkpoint that is complete for all processes.

    Returns (0, [], {}) if no checkpoint was ever complete: each launch may have been killed in its
    first save. If there was one, but none can be used, exits with code 2, or puts everything aside
    with `--resume force`.
    """
    own_steps = []
    launches = set()
    had_one = False
    fault = ""
    # All processes look at the same steps, since they have to agree on one of them.
    for step in steps_of_all_hosts(out):
        directory = f"{out}/step_{step:06}"
        paths, about = [], {}
        try:
            paths, about = find_checkpoint(out, step)
            own_steps.append(step)
            # Files of older commits do not say which checkpoint was complete. A launch of an older
            # commit that has two checkpoints had completed the first one.
            is_second = "complete" not in about and about["run"] in launches
            launches.add(about["run"])
            had_one = had_one or is_second or int(about.get("complete", 0)) > 0
        except (CheckpointError, OSError) as e:
            warn(f"step {step} cannot be used: {e}")
            fault = fault or fault_of(e, directory)
        # All processes must have files of the same launch, so that no two launches are mixed.
        runs = all_gather_processes(about.get("run", 0))
        if runs.min() > 0 and runs.min() == runs.max():
            return step, paths, about
    if had_one and not fault:
        index = jax.process_index()
        fault = f"process {index} has its part of steps {own_steps}, and others have lost theirs"
    if all_gather_processes(bool(fault)).any():
        check(
            resume == "force",
            f"{out} has checkpoints, and none can be used: {fault or 'another process says why'}; "
            "restore a good copy, or choose another --out, or --resume force, which moves "
            "the old files aside and starts over",
        )
        put_aside(out)
    return 0, [], {}


def steps_of_all_hosts(out):
    """Steps of the checkpoints that any process finds, complete or not, newest first."""
    steps = set(checkpoint.saved_steps(out))
    if bucket.bucket_of(out):
        with exit_without_bucket():
            steps.update(bucket.saved_steps(out))
    # Each process must pass the same number of values. Pad with 0, which is never a step.
    padded = np.array([0] * 99 + sorted(steps))[-99:]
    found = set(all_gather_processes(padded).ravel().tolist())
    return sorted(found - {0}, reverse=True)


def find_checkpoint(out, step):
    """Returns checkpoint.complete_checkpoint of a step; with a bucket, fetches the files first."""
    name = f"step_{step:06}"
    if bucket.bucket_of(out):
        with exit_without_bucket():
            bucket.fetch_checkpoint(out, name, jax.process_index(), jax.process_count())
    return checkpoint.complete_checkpoint(f"{out}/{name}")


def fault_of(error, directory):
    """The fault of a checkpoint, as text; "" if the only fault is a killed process."""
    if not isinstance(error, checkpoint.IncompleteCheckpoint):
        return str(error)
    count = jax.process_count()
    if any(of != count for _, of in checkpoint.shard_files(directory)):
        return (
            f"{directory} was not saved by {count} processes, and not all its files are here; "
            "--out must be a directory that all processes share, or gs://"
        )
    return ""


def put_aside(out: str) -> None:
    """Move the files of a run in `out` to a directory old-DATE-TIME. Each process moves the files
    on its disk."""
    now = int(all_gather_processes(int(time.time()))[0])
    old = time.strftime("old-%Y%m%d-%H%M%S", time.gmtime(now))
    os.makedirs(f"{out}/{old}", exist_ok=True)
    if bucket.bucket_of(out) and jax.process_index() == 0:
        with exit_without_bucket():
            bucket.put_aside(out, old, WRITTEN)
    for name in os.listdir(out):
        if re.fullmatch(WRITTEN, name):
            # If several processes share a disk, another one may have moved this already.
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{out}/{name}", f"{out}/{old}/{name}")
    # Wait until all processes have moved their files, before any process writes new ones.
    all_gather_processes(0)
    say(f"{out} starts over; its earlier files are in {old}")


def truncate_to(out: str, done: int) -> None:
    """Remove rows after step `done` from the .jsonl files, as the run will repeat these steps. Also
    remove the answers of an evaluation that has no row in metrics.jsonl: it will be repeated, too.
    """
    # Only process 0 has these files.
    if jax.process_index() != 0:
        return
    metrics = log.read_jsonl(f"{out}/metrics.jsonl")
    samples = log.read_jsonl(f"{out}/samples.jsonl")
    evals = log.read_jsonl(f"{out}/evals.jsonl")
    evaluated = {row["step"] for row in metrics if log.is_evaluation(row)}
    evals = [row for row in evals if row["step"] in evaluated]
    for name, rows in (("metrics", metrics), ("samples", samples), ("evals", evals)):
        if not os.path.exists(f"{out}/{name}.jsonl"):
            continue
        # Without a checkpoint, the run starts over.
        kept = [row for row in rows if row["step"] <= done] if done else []
        with files.atomic_file(f"{out}/{name}.jsonl") as f:
            f.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in kept)


def has_evaluation(out: str, step: int) -> bool:
    """Whether metrics.jsonl, on process 0's disk, has an evaluation of this step."""
    rows = log.read_jsonl(f"{out}/metrics.jsonl")
    has_row = any(row["step"] == step and log.is_evaluation(row) for row in rows)
    return bool(all_gather_processes(has_row)[0])


# ---------------------------------------------------------------- room for checkpoints
def check_disk(out: str, state, done: int, total_steps: int, save_every: int, keep: int) -> None:
    """Exit with code 2 unless the disk of `out` has room for what the run will write. state: a tree
    of shapes."""
    steps_left = total_steps - done
    if not steps_left:
        return
    # With --lora, checkpoints do not have the frozen weights, and final has all weights.
    size = checkpoint_bytes(without_base(state))
    final_weights = jax.tree.leaves(state.get("base", state["params"]))
    # Process 0 also writes the final model, in float32 at most.
    final = 0
    if jax.process_index() == 0:
        final = 4 * sum(array.size for array in final_weights)
    # The last step is saved in any case. The others are multiples of `save_every`.
    saves = 1
    if save_every:
        saves += (total_steps - 1) // save_every - done // save_every
    present = glob.glob(f"{glob.escape(out)}/step_*")
    # Before the first save, all but the newest `keep` of the usable ones are deleted.
    usable = [path for path in present if path <= f"{out}/step_{done:06}"]
    stay = min(len(usable), keep)
    # While a checkpoint is written, the older ones are still there. A damaged one of a step after
    # `done` stays until a later step is saved.
    damaged = len(present) - len(usable)
    at_once = damaged + max(stay + 1, min(stay + saves, keep + 1))
    if bucket.bucket_of(out):
        # The only older checkpoint on the disk is the one that the run resumed from.
        at_once = 2 if done else 1
    # Count the space of the present checkpoints as free: `at_once` includes the ones that stay.
    old = sum(files.directory_bytes(path) for path in present)
    free = shutil.disk_usage(out).free + old
    need_gib, free_gib = worst_disk(out, (at_once * size + final) / GIB, free / GIB)
    what = f"{at_once} checkpoints at once, of {size / GIB:.2f} GiB a process, and final"
    check(
        need_gib <= free_gib,
        f"{what} need {need_gib:.2f} GiB on the disk of {out}, where {free_gib:.2f} are free; try "
        "--keep 1, --save_every 0, --out gs://bucket/run, or a larger disk",
    )
    files_of_run = f"{at_once} checkpoints at once and final/"
    say(f"disk: {free_gib:.2f} GiB are free; {files_of_run} take {need_gib:.2f}")


def worst_disk(out, need_gib, free_gib):
    """Returns (needed, free) GiB of the disk with the least room, among all processes' disks."""
    has_claim = os.path.exists(f"{out}/claim.json")
    own = np.array([need_gib, free_gib, has_claim], np.float32)
    need_P, free_P, has_claim_P = all_gather_processes(own).T
    # Process 0 has written the claim. If all processes see it, they all share one disk.
    if has_claim_P.all():
        need_P = need_P.sum(keepdims=True)
        free_P = free_P[:1]
    worst = int(np.argmin(free_P - need_P))
    return need_P[worst], free_P[worst]


def checkpoint_bytes(state) -> int:
    """Bytes of this process's part of a checkpoint: its shards of the state, each counted once."""
    total = 0
    for array in jax.tree.leaves(state):
        # This covers only the devices of this process.
        indices = array.sharding.addressable_devices_indices_map(array.shape).values()
        # Replicas of a shard have the same index, so they count once.
        shards = len({str(index) for index in indices})
        shard_size = math.prod(array.sharding.shard_shape(array.shape))
        total += shards * shard_size * array.dtype.itemsize
    return total


# ---------------------------------------------------------------- the copy in a bucket
def send_results(out: str) -> None:
    """Send final/ and the small files to the bucket, if the run has one. If that fails, exits with
    code 1 in all processes: a caller that sees code 0 may delete this disk."""
    target = bucket.bucket_of(out)
    if not target:
        return
    fault = ""
    if jax.process_index() == 0:
        try:
            bucket.send_results(out)
        except bucket.BucketError as e:
            fault = str(e)
            warn(
                f"{fault}\nthe results are NOT in {target}, but in {os.path.abspath(out)} on "
                f"{socket.gethostname()}; give the same command again there to send them"
            )
    if all_gather_processes(bool(fault)).any():
        raise SystemExit(1)
