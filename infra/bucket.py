"""A run's bucket, gs://bucket/run, in step with its directory here, by this machine's gcloud.

A checkpoint goes there as soon as a process has written its part, and the small files with it. What
is in the bucket need not stay here: the disk of a TPU VM has 100 GB. On resume the small files come
back, and of the checkpoints only the one that is used. Nothing of the user's is deleted there.
"""

import os
import re
import subprocess

# Not for the bucket: half-written files, what a run makes anew, what is of this machine only.
STAYS_HERE = (r".*\.tmp", ".*tiny-seed", r"claim\.json", "old-")
CHECKPOINTS = r"step_\d{6}/"


class BucketError(OSError):
    """gcloud could not do what it was asked to; the message ends with its last words."""


def gcloud(*words):
    """What `gcloud storage ...` prints. Raises BucketError."""
    try:
        run = subprocess.run(
            ["gcloud", "storage", *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BucketError("gcloud is not installed here") from None
    if run.returncode:
        raise BucketError((run.stderr.strip() or "gcloud failed").splitlines()[-1])
    return run.stdout


def bucket_of(out):
    """gs://bucket/run of a directory out/gs/bucket/run, "" for any other."""
    if not out.startswith("out/gs/"):
        return ""
    return out.replace("out/gs/", "gs://", 1)


def rsync(source, target, excluded, *flags):
    """Copy what differs. Raises BucketError that names both ends."""
    patterns = "|".join(excluded)
    try:
        gcloud("rsync", "--recursive", "--exclude", patterns, *flags, source, target)
    except BucketError as e:
        # gcloud's words for a run that has not begun yet
        if "Did not find existing container" not in str(e):
            raise BucketError(f"{source} cannot be copied to {target}: {e}") from None


def others_parts(process, processes):
    """A pattern for the files of other processes in a checkpoint of so many."""
    return rf".*shards-(?!{process:05})\d+-of-{processes:05}"


def send_checkpoint(out, name, process, processes):
    """This process's part of the checkpoint out/NAME."""
    excluded = (*STAYS_HERE, others_parts(process, processes))
    rsync(f"{out}/{name}", f"{bucket_of(out)}/{name}", excluded)


def fetch_checkpoint(out, name, process, processes):
    """This process's part of a checkpoint, or all parts where so many others wrote them. What was
    written here later stays."""
    os.makedirs(f"{out}/{name}", exist_ok=True)
    excluded = (*STAYS_HERE, others_parts(process, processes))
    flag = "--skip-if-dest-has-newer-mtime"
    rsync(f"{bucket_of(out)}/{name}", f"{out}/{name}", excluded, flag)


def send_rest(out):
    """All but checkpoints."""
    rsync(out, bucket_of(out), (*STAYS_HERE, CHECKPOINTS))


def fetch_rest(out, final):
    """All but checkpoints, and final/ only where it is asked for. What was written here later
    stays."""
    excluded = [*STAYS_HERE, CHECKPOINTS]
    if not final:
        excluded.append("final/")
    rsync(bucket_of(out), out, excluded, "--skip-if-dest-has-newer-mtime")


def names(out):
    """Of the files and folders at the top of the bucket; [] where there are none."""
    try:
        listed = gcloud("ls", f"{bucket_of(out)}/")
    except BucketError as e:
        if "matched no objects" in str(e):
            return []
        raise
    return [line.rstrip("/").rpartition("/")[2] for line in listed.splitlines()]


def saved_steps(out):
    """Steps of the checkpoints there, complete or not, oldest first."""
    found = [re.fullmatch(r"step_(\d{6})", name) for name in names(out)]
    return sorted(int(match[1]) for match in found if match)


def remove_checkpoints(out, steps):
    for step in steps:
        gcloud("rm", "--recursive", f"{bucket_of(out)}/step_{step:06}")


def put_aside(out, old, pattern):
    """Move what has such a name into the folder `old`."""
    for name in names(out):
        if re.fullmatch(pattern, name):
            gcloud("mv", f"{bucket_of(out)}/{name}", f"{bucket_of(out)}/{old}/{name}")
