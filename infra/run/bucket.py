"""Keep a run's bucket, gs://bucket/run, in sync with its local directory, by calling gcloud.

Each process sends its part of a checkpoint once it is written, and process 0 sends the small files.
Checkpoints in the bucket need not stay on this disk: a TPU VM's disk has only 100 GB. A run that
resumes fetches the small files, and then checkpoints, newest first, until one is complete. A user's
own files in the bucket are never deleted.
"""

import contextlib
import fcntl
import glob
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator

from infra.host.console import warn
from infra.host.files import directory_bytes

# This module neither sends nor fetches these files: half-written files; the tiny model (each
# process makes it); the claim (claim.py sends it); runs that were put aside (put_aside moves them).
STAYS_HERE = (r".*\.tmp", ".*tiny-seed", r"claim\.json", "old-")
# Checkpoints have their own functions, because a process sends and fetches only its part.
CHECKPOINTS = r"step_\d{6}/"
# This file says that the final model is complete: it arrives after all other files of final/.
MARKER = "final/podgrpo.json"
# Seconds to wait before each retry. Google fixes most of its own faults within minutes.
PATIENCE = (2, 5, 10, 20, 40, 80, 160)
# A call of gcloud that takes longer is ended and counts as failed. Otherwise, a call that hangs
# would stop the run or its signs of life.
SECONDS_OF_A_CALL = 360
# The same for a copy of files whose size is unknown.
SECONDS_OF_A_COPY = 6 * 3600
# If the size is known, a copy may take 600 seconds, plus the size divided by this speed.
BYTES_PER_SECOND = 10e6
# gcloud prints this if the source does not exist, as for a run that has not begun.
ABSENT = r"matched no objects|Did not find existing container"
# gcloud prints this if no retry would help: no login, no such bucket, a full disk.
REFUSED = r"not found: 404|do not currently have an active account|No space left on device"
# gcloud prints this if there is no permission.
FORBIDDEN = r"(Error|code|status|:) ?40[13]\b|PERMISSION_DENIED|does not have"


class BucketError(OSError):
    """A gcloud command failed; the message ends with the last error that gcloud printed."""

    # Seconds to wait, in all, for the fault to pass.
    patience = sum(PATIENCE)


class AbsentError(BucketError):
    """The object to be read or removed is not in the bucket."""

    patience = 0


class RefusedError(BucketError):
    """The bucket cannot be used, and no retry would help."""

    patience = 0


class ForbiddenError(RefusedError):
    """There is no permission, and waiting has not helped."""

    # A login may expire during a transfer, and a new permission takes a while to arrive.
    patience = 80


def gcloud_retrying(*words: str, tries: int = 1 + len(PATIENCE), **run_options) -> str:
    """Run `gcloud storage ...`, with at most `tries` tries. Returns its output, or raises
    BucketError. run_options: for `gcloud_once`."""
    waited = 0
    for seconds in PATIENCE[: tries - 1]:
        try:
            return gcloud_once(*words, **run_options)
        except BucketError as e:
            waited += seconds
            if waited > e.patience:
                raise
            warn(f"gcloud storage {words[0]} failed; trying again in {seconds} s: {e}")
            time.sleep(seconds)
    return gcloud_once(*words, **run_options)


def gcloud_once(
    *words: str,
    seconds: float = SECONDS_OF_A_CALL,
    text: str | None = None,
    env: dict | None = None,
) -> str:
    """Run `gcloud storage ...`, for at most `seconds`. Returns its output, or raises BucketError.
    text: the standard input of gcloud. env: its environment."""
    command = ["gcloud", "storage", *words]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        run = subprocess.Popen(command, text=True, env=env, **pipes)
    except FileNotFoundError:
        raise RefusedError("gcloud is not installed here") from None
    with run:
        try:
            output, said = run.communicate(text, timeout=seconds)
        except BaseException as e:
            kill_with_children(run.pid)
            if isinstance(e, subprocess.TimeoutExpired):
                raise BucketError(f"gcloud did not end within {seconds:.0f} s") from None
            raise
    if run.returncode:
        # The last error says what went wrong. Progress and warnings may come before it.
        lines = (said.strip() or "gcloud failed").splitlines()
        errors = [i for i, line in enumerate(lines) if line.startswith("ERROR")]
        first = errors[-1] if errors else -1
        error = " ".join(lines[first:])
        if re.search(ABSENT, error):
            raise AbsentError(error)
        if re.search(REFUSED, error):
            raise RefusedError(error)
        if re.search(FORBIDDEN, error):
            raise ForbiddenError(error)
        raise BucketError(error)
    return output


def kill_with_children(pid: int) -> None:
    """Kill a process and those that it started. They stay in the run's process group, so that they
    also end with the run. macOS has no /proc; there, this kills only the process itself."""
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as f:
            for child in f.read().split():
                kill_with_children(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def bucket_of(out: str) -> str:
    """gs://bucket/run for a directory out/gs/bucket/run, or "" for any other directory."""
    if not out.startswith("out/gs/"):
        return ""
    return out.replace("out/gs/", "gs://", 1)


def rsync(source: str, target: str, excluded: Iterable[str], *flags: str) -> None:
    """Copy the files that differ, except those that match an `excluded` pattern. Raises a
    BucketError that names source and target."""
    seconds = SECONDS_OF_A_COPY
    if os.path.isdir(source):
        size = sum(directory_bytes(path) for path, _, _ in os.walk(source))
        seconds = 600 + size / BYTES_PER_SECOND
    words = ["rsync", "--recursive", "--exclude", "|".join(excluded), *flags, source, target]
    try:
        # gcloud writes lists of the files in `source` and `target`, named after the two. By default
        # the lists are in ~/.config, where the processes of a machine would overwrite each other's
        # lists, and each would then send the files of another process.
        with tempfile.TemporaryDirectory() as lists:
            where = {"CLOUDSDK_STORAGE_RSYNC_FILES_DIRECTORY": lists}
            gcloud_retrying(*words, seconds=seconds, env=os.environ | where)
    except AbsentError:
        # The source does not exist yet, so there is nothing to copy.
        return
    except BucketError as e:
        raise type(e)(f"{source} cannot be copied to {target}: {e}") from None
    except OSError as e:  # there is no room for the lists
        raise BucketError(f"{source} cannot be copied to {target}: {e}") from None


def others_parts(process: int, processes: int) -> str:
    """A pattern that matches the files of other processes in a checkpoint of `processes` parts.

    It does not match files that a different number of processes wrote: this process may need them
    all.
    """
    return rf".*shards-(?!{process:05})\d+-of-{processes:05}"


@contextlib.contextmanager
def fetch_lock(out: str) -> Iterator[None]:
    """In the context, no other process fetches to the directory `out`, if its disk has locks.
    Otherwise, a process could remove a file that another has just fetched: gcloud removes a file
    before it downloads the file again."""
    os.makedirs(out, exist_ok=True)
    with open(f"{out}/fetch.tmp", "w", encoding="utf-8") as f:
        with contextlib.suppress(OSError):
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def send_checkpoint(out: str, name: str, process: int, processes: int) -> None:
    """Send this process's part of the checkpoint out/NAME. Raises BucketError."""
    # Exclude other processes' parts: on a shared disk they are also here, and each process sends
    # its own.
    excluded = (*STAYS_HERE, others_parts(process, processes))
    rsync(f"{out}/{name}", f"{bucket_of(out)}/{name}", excluded)


def fetch_checkpoint(out: str, name: str, process: int, processes: int) -> None:
    """Fetch this process's part of a checkpoint, or all parts if a different number of processes
    wrote them. Raises BucketError."""
    os.makedirs(f"{out}/{name}", exist_ok=True)
    excluded = (*STAYS_HERE, others_parts(process, processes))
    # Keep newer local files: they may have been written while the bucket could not be reached.
    flag = "--skip-if-dest-has-newer-mtime"
    with fetch_lock(out):
        rsync(f"{bucket_of(out)}/{name}", f"{out}/{name}", excluded, flag)


def send_all_but_checkpoints(out: str, compiled: bool = True) -> None:
    """Send all files but checkpoints and the marker of final/. Raises BucketError.

    compiled: whether to send compiled programs, too, unless they are larger than a checkpoint.
    """
    excluded = [*STAYS_HERE, CHECKPOINTS, re.escape(MARKER)]
    checkpoints = [directory_bytes(path) for path in glob.glob(f"{glob.escape(out)}/step_*")]
    if not compiled or directory_bytes(f"{out}/compiled") > max(checkpoints, default=0):
        excluded.append("compiled/")
    rsync(out, bucket_of(out), excluded)


def send_results(out: str) -> None:
    """Send all files but checkpoints. The bucket never has the marker of final/ without a complete
    model beside it. Raises BucketError."""
    marker = f"{bucket_of(out)}/{MARKER}"
    here = marker_here(out)
    there = ""
    if here:
        with contextlib.suppress(AbsentError):
            there = gcloud_retrying("cat", marker)
    # If the run was given more steps, the bucket has an older model. Remove its marker first.
    if there and there != here:
        remove(marker)
    send_all_but_checkpoints(out)
    if here and there != here:
        gcloud_retrying("cp", f"{out}/{MARKER}", marker)


def marker_here(out: str) -> str:
    """The content of the marker in `out` on this disk, or "" if there is no complete model."""
    with contextlib.suppress(FileNotFoundError), open(f"{out}/{MARKER}", encoding="utf-8") as f:
        return f.read()
    return ""


def check_results(out: str) -> None:
    """Raise BucketError unless the bucket has the model of `out`, or its metrics if the run was
    only an evaluation."""
    here = marker_here(out)
    if not here:
        gcloud_retrying("ls", f"{bucket_of(out)}/metrics.jsonl")
        return
    there = gcloud_retrying("cat", f"{bucket_of(out)}/{MARKER}")
    if there.split() != here.split():
        raise BucketError(f"{bucket_of(out)}/final is not the model of this run")


def fetch_all_but_checkpoints(out: str, final: bool) -> None:
    """Fetch all files but checkpoints and traces. final: whether to fetch final/, too. Raises
    BucketError."""
    excluded = [*STAYS_HERE, CHECKPOINTS, "profile/"]
    if not final:
        excluded.append("final/")
    # Keep newer local files, as in fetch_checkpoint.
    with fetch_lock(out):
        rsync(bucket_of(out), out, excluded, "--skip-if-dest-has-newer-mtime")


def names(out: str) -> list[str]:
    """Names of the run's files and folders in the bucket, or [] if there are none."""
    try:
        listed = gcloud_retrying("ls", f"{bucket_of(out)}/")
    except AbsentError:
        # Buckets have no empty folders, so gcloud fails for a run that has not begun.
        return []
    # Each line is gs://bucket/run/NAME, with a slash at the end if NAME is a folder.
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
    """Run `gcloud storage rm`. Raises BucketError."""
    # An earlier try that seemed to fail may have removed the object.
    with contextlib.suppress(AbsentError):
        gcloud_retrying("rm", *words)


def put_aside(out: str, old: str, pattern: str) -> None:
    """Move files and folders whose names match `pattern` to the folder `old` in the bucket. Raises
    BucketError."""
    for name in names(out):
        if re.fullmatch(pattern, name):
            # An earlier try that seemed to fail may have moved the object.
            with contextlib.suppress(AbsentError):
                places = f"{bucket_of(out)}/{name}", f"{bucket_of(out)}/{old}/{name}"
                gcloud_retrying("mv", *places, seconds=SECONDS_OF_A_COPY)
