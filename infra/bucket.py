"""A run's bucket, gs://bucket/run, kept in step with its directory here by this machine's gcloud.

A checkpoint is sent as soon as a process has written its part, and the small files with it. What
is in the bucket need not stay here: the disk of a TPU VM has 100 GB. On resume the small files come
back, and of the checkpoints only the one that is used. Nothing of the user's is deleted there.
"""

import os
import re
import subprocess
from collections.abc import Iterable

# Not for the bucket: half-written files, the tiny model, which each process makes anew, the claim,
# which claim.py sends by itself, and what was put aside, which put_aside moves there.
STAYS_HERE = (r".*\.tmp", ".*tiny-seed", r"claim\.json", "old-")
# Checkpoints have functions of their own, as a process sends and fetches only its part of them.
CHECKPOINTS = r"step_\d{6}/"


class BucketError(OSError):
    """gcloud could not do what it was asked to; the message ends with its last words."""


def gcloud(*words: str) -> str:
    """What `gcloud storage ...` prints. Raises BucketError."""
    try:
        run = subprocess.run(
            ["gcloud", "storage", *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BucketError("gcloud is not installed here") from None
    if run.returncode:
        # The last line says what went wrong; progress and warnings may stand before it.
        raise BucketError((run.stderr.strip() or "gcloud failed").splitlines()[-1])
    return run.stdout


def bucket_of(out: str) -> str:
    """gs://bucket/run of a directory out/gs/bucket/run, "" for any other."""
    if not out.startswith("out/gs/"):
        return ""
    return out.replace("out/gs/", "gs://", 1)


def rsync(source: str, target: str, excluded: Iterable[str], *flags: str) -> None:
    """Copy what differs, less what matches a pattern. Raises BucketError that names both ends."""
    patterns = "|".join(excluded)
    try:
        gcloud("rsync", "--recursive", "--exclude", patterns, *flags, source, target)
    except BucketError as e:
        # These are gcloud's words where the source is not there, as for a run that has not begun.
        if "Did not find existing container" not in str(e):
            raise BucketError(f"{source} cannot be copied to {target}: {e}") from None


def others_parts(process: int, processes: int) -> str:
    """A pattern for the files of other processes in a checkpoint of so many."""
    # Of a checkpoint of another number of processes, each file may be needed.
    return rf".*shards-(?!{process:05})\d+-of-{processes:05}"


def send_checkpoint(out: str, name: str, process: int, processes: int) -> None:
    """Send this process's part of the checkpoint out/NAME. Raises BucketError."""
    # Processes may share a disk: the parts of others may be there, and half-written.
    excluded = (*STAYS_HERE, others_parts(process, processes))
    rsync(f"{out}/{name}", f"{bucket_of(out)}/{name}", excluded)


def fetch_checkpoint(out: str, name: str, process: int, processes: int) -> None:
    """Fetch this process's part of a checkpoint, or all parts where another number of processes
    wrote them. Raises BucketError."""
    os.makedirs(f"{out}/{name}", exist_ok=True)
    excluded = (*STAYS_HERE, others_parts(process, processes))
    # What was written here later, while the bucket could not be reached, stays.
    flag = "--skip-if-dest-has-newer-mtime"
    rsync(f"{bucket_of(out)}/{name}", f"{out}/{name}", excluded, flag)


def send_rest(out: str) -> None:
    """Send all but checkpoints. Raises BucketError."""
    rsync(out, bucket_of(out), (*STAYS_HERE, CHECKPOINTS))


def fetch_rest(out: str, final: bool) -> None:
    """Fetch all but checkpoints, and final/ only where it is asked for. Raises BucketError."""
    excluded = [*STAYS_HERE, CHECKPOINTS]
    if not final:
        excluded.append("final/")
    # What was written here later stays, as in fetch_checkpoint.
    rsync(bucket_of(out), out, excluded, "--skip-if-dest-has-newer-mtime")


def names(out: str) -> list[str]:
    """Names of the files and folders of the run in the bucket; [] where there are none."""
    try:
        listed = gcloud("ls", f"{bucket_of(out)}/")
    except BucketError as e:
        # A bucket has no empty folders: a run that has not begun is an error to gcloud.
        if "matched no objects" in str(e):
            return []
        raise
    # Lines are gs://bucket/run/NAME, with a slash at the end if it is a folder.
    return [line.rstrip("/").rpartition("/")[2] for line in listed.splitlines()]


def saved_steps(out: str) -> list[int]:
    """Steps of the checkpoints in the bucket, complete or not, oldest first."""
    found = [re.fullmatch(r"step_(\d{6})", name) for name in names(out)]
    return sorted(int(match[1]) for match in found if match)


def remove_checkpoints(out: str, steps: Iterable[int]) -> None:
    """Remove the checkpoints of these steps from the bucket. Raises BucketError."""
    for step in steps:
        gcloud("rm", "--recursive", f"{bucket_of(out)}/step_{step:06}")


def put_aside(out: str, old: str, pattern: str) -> None:
    """Move what has such a name into the folder `old` in the bucket. Raises BucketError."""
    for name in names(out):
        if re.fullmatch(pattern, name):
            gcloud("mv", f"{bucket_of(out)}/{name}", f"{bucket_of(out)}/{old}/{name}")
