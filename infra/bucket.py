"""A run's bucket, gs://bucket/run, kept in step with its directory here by this machine's gcloud.

A checkpoint is sent as soon as a process has written its part, and the small files with it. What
is in the bucket need not stay here: the disk of a TPU VM has 100 GB. On resume the small files come
back, and of the checkpoints only the one that is used. Nothing of the user's is deleted there.
"""

import contextlib
import glob
import os
import re
import subprocess
import time
from collections.abc import Iterable

from infra.files import directory_bytes
from infra.log import warn

# Not for the bucket: half-written files, the tiny model, which each process makes anew, the claim,
# which claim.py sends by itself, and what was put aside, which put_aside moves there.
STAYS_HERE = (r".*\.tmp", ".*tiny-seed", r"claim\.json", "old-")
# Checkpoints have functions of their own, as a process sends and fetches only its part of them.
CHECKPOINTS = r"step_\d{6}/"
# The file that says that a model is complete: the last one of final/ to arrive.
MARKER = "final/podgrpo.json"
# Seconds to wait before each further try. Google mends most faults of its own in some minutes.
PATIENCE = (2, 5, 10, 20, 40, 80, 160)
# gcloud's words where the source is not there, as for a run that has not begun.
ABSENT = r"matched no objects|Did not find existing container"
# gcloud's words for what no further try would mend: rights, a login, a bucket that is not there.
REFUSED = (
    r"(Error|code|status|:) ?40[13]\b|PERMISSION_DENIED|does not have|not found: 404|"
    r"do not currently have an active account"
)


class BucketError(OSError):
    """gcloud could not do what it was asked to; the message ends with its last words."""


class AbsentError(BucketError):
    """What was to be read or removed is not in the bucket."""


class RefusedError(BucketError):
    """The bucket cannot be used, however often one tries."""


def gcloud(*words: str, tries: int = 1 + len(PATIENCE)) -> str:
    """What `gcloud storage ...` prints, after at most so many tries. Raises BucketError."""
    for seconds in PATIENCE[: tries - 1]:
        try:
            return gcloud_once(*words)
        except (AbsentError, RefusedError):
            raise
        except BucketError as e:
            warn(f"gcloud storage {words[0]} failed, and is tried again in {seconds} s: {e}")
            time.sleep(seconds)
    return gcloud_once(*words)


def gcloud_once(*words):
    try:
        run = subprocess.run(
            ["gcloud", "storage", *words], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise RefusedError("gcloud is not installed here") from None
    if run.returncode:
        # The last error says what went wrong; progress and warnings may stand before it.
        lines = (run.stderr.strip() or "gcloud failed").splitlines()
        errors = [i for i, line in enumerate(lines) if line.startswith("ERROR")]
        text = " ".join(lines[errors[-1] if errors else -1 :])
        if re.search(ABSENT, text):
            raise AbsentError(text)
        raise (RefusedError if re.search(REFUSED, text) else BucketError)(text)
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
    except AbsentError:
        # There is nothing to copy yet.
        return
    except BucketError as e:
        raise type(e)(f"{source} cannot be copied to {target}: {e}") from None


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
    """Send all but checkpoints and the marker of final/, and compiled programs only if they are no
    larger than a checkpoint. Raises BucketError."""
    excluded = [*STAYS_HERE, CHECKPOINTS, re.escape(MARKER)]
    checkpoints = [directory_bytes(path) for path in glob.glob(f"{glob.escape(out)}/step_*")]
    if directory_bytes(f"{out}/compiled") > max(checkpoints, default=0):
        excluded.append("compiled/")
    rsync(out, bucket_of(out), excluded)


def send_results(out: str) -> None:
    """Send all but checkpoints. In the bucket the marker stands only beside a complete model.
    Raises BucketError."""
    marker = f"{bucket_of(out)}/{MARKER}"
    here = marker_here(out)
    there = ""
    if here:
        with contextlib.suppress(AbsentError):
            there = gcloud("cat", marker)
    # A run that was given more steps has sent an older model.
    if there and there != here:
        remove(marker)
    send_rest(out)
    if here and there != here:
        gcloud("cp", f"{out}/{MARKER}", marker)


def marker_here(out: str) -> str:
    """The marker of the complete model in `out` on this disk, "" if there is none."""
    with contextlib.suppress(FileNotFoundError), open(f"{out}/{MARKER}", encoding="utf-8") as f:
        return f.read()
    return ""


def check_results(out: str) -> None:
    """Raises BucketError unless the bucket has the model of `out`, or, if the run was only an
    evaluation, its metrics."""
    here = marker_here(out)
    if not here:
        gcloud("ls", f"{bucket_of(out)}/metrics.jsonl")
        return
    there = gcloud("cat", f"{bucket_of(out)}/{MARKER}")
    if there.split() != here.split():
        raise BucketError(f"{bucket_of(out)}/final is not the model of this run")


def fetch_rest(out: str, final: bool) -> None:
    """Fetch all but checkpoints and traces, and final/ only where it is asked for. Raises
    BucketError."""
    excluded = [*STAYS_HERE, CHECKPOINTS, "profile/"]
    if not final:
        excluded.append("final/")
    # What was written here later stays, as in fetch_checkpoint.
    rsync(bucket_of(out), out, excluded, "--skip-if-dest-has-newer-mtime")


def names(out: str) -> list[str]:
    """Names of the files and folders of the run in the bucket; [] where there are none."""
    try:
        listed = gcloud("ls", f"{bucket_of(out)}/")
    except AbsentError:
        # A bucket has no empty folders: a run that has not begun is an error to gcloud.
        return []
    # Lines are gs://bucket/run/NAME, with a slash at the end if it is a folder.
    return [line.rstrip("/").rpartition("/")[2] for line in listed.splitlines()]


def saved_steps(out: str) -> list[int]:
    """Steps of the checkpoints in the bucket, complete or not, oldest first."""
    found = [re.fullmatch(r"step_(\d{6})", name) for name in names(out)]
    return sorted(int(match[1]) for match in found if match)


def remove_checkpoints(out: str, steps: Iterable[int]) -> None:
    """Remove the checkpoints of these steps from the bucket. Raises BucketError."""
    for step in steps:
        remove("--recursive", f"{bucket_of(out)}/step_{step:06}")


def remove(*words: str) -> None:
    """gcloud storage rm. Raises BucketError."""
    # A try that was said to fail may have removed it.
    with contextlib.suppress(AbsentError):
        gcloud("rm", *words)


def put_aside(out: str, old: str, pattern: str) -> None:
    """Move what has such a name into the folder `old` in the bucket. Raises BucketError."""
    for name in names(out):
        if re.fullmatch(pattern, name):
            # A try that was said to fail may have moved it.
            with contextlib.suppress(AbsentError):
                gcloud("mv", f"{bucket_of(out)}/{name}", f"{bucket_of(out)}/{old}/{name}")
