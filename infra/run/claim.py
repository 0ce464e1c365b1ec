"""One run at a time in a directory.

Two runs in the same directory would mix their checkpoints and metrics. On one machine a lock
prevents this: the lock ends with the process that holds it, however the process dies. Machines that
share a disk or a bucket may not see each other's locks. So a run rewrites `claim.json` every 20
seconds as a sign of life, and a run that finds another machine's claim waits to see whether the
claim changes.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from infra.run.bucket import AbsentError, BucketError, gcloud_retrying

SECONDS_BETWEEN_SIGNS = 20
# If sending a sign takes longer than this, gcloud is ended, and the sign is lost.
SECONDS_OF_A_SIGN = 20
# Long enough to see the sign that comes after one that did not reach the bucket.
SECONDS_TO_LOOK = 2 * (SECONDS_BETWEEN_SIGNS + SECONDS_OF_A_SIGN)
# A run looks for a claim, and then writes its own. Both together take less time than this, even in
# a bucket.
SECONDS_TO_ARBITRATE = 5

# File descriptors that this process holds open to lock directories.
LOCKED = set()


def forget_locks():
    """In a forked child, close its copies of the locks: otherwise the child would hold the locks
    after its parent has ended."""
    while LOCKED:
        os.close(LOCKED.pop())


os.register_at_fork(after_in_child=forget_locks)


class InUse(Exception):
    """Another run uses the directory; the message names its process, machine and start time."""


def read_claim(path: str, bucket: str) -> dict:
    """Returns the claim, or {} if there is none. With a bucket, the claim in the bucket counts;
    raises BucketError if the bucket cannot be reached."""
    if bucket:
        try:
            gcloud_retrying("cp", f"{bucket}/claim.json", path)
        except AbsentError:
            return {}
    try:
        with open(path, encoding="utf-8") as f:
            holder = json.load(f)
    except (OSError, ValueError):
        return {}
    # JSON that is not an object is not a claim of ours.
    return holder if isinstance(holder, dict) else {}


def write_claim(path: str, bucket: str, claim: dict) -> None:
    """Write the claim here and to the bucket. Errors are ignored, as the next sign may succeed."""
    text = json.dumps(claim)
    with contextlib.suppress(OSError):
        # Write by renaming, so that nobody reads half a claim.
        with open(f"{path}.tmp", "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(f"{path}.tmp", path)
    if bucket:
        # Send the text and not the file, which a full disk would keep from changing. Do not retry:
        # a sign that comes minutes late is of no use.
        with contextlib.suppress(BucketError):
            words = "cp", "-", f"{bucket}/claim.json"
            gcloud_retrying(*words, tries=1, seconds=SECONDS_OF_A_SIGN, text=text)


def in_use(out: str, holder: dict) -> InUse:
    """Returns the error that names the claim's holder."""
    # A process may hold the lock before it has written its claim.
    who = "a process that has just begun"
    if holder:
        who = f"process {holder.get('pid')} on {holder.get('host')}, running since "
        who += f"{holder.get('since')}"
    return InUse(f"{out} is in use by {who}; let it end, stop it, or choose another --out")


@contextlib.contextmanager
def locked(out: str, holder: dict) -> Iterator[bool]:
    """Hold the directory's lock inside the context, unless the file system has no locks.

    Yields whether this process holds the lock. Raises InUse, which names the holder, if another
    process on this machine holds it.
    """
    # Lock the directory itself: a lock file might be deleted.
    directory = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_lock = True
    except BlockingIOError:
        os.close(directory)
        raise in_use(out, holder) from None
    except OSError:
        # Some network disks have no locks.
        has_lock = False
    LOCKED.add(directory)
    try:
        yield has_lock
    finally:
        # Closing releases the lock. A forked child has closed its descriptor already.
        if directory in LOCKED:
            LOCKED.remove(directory)
            os.close(directory)


@contextlib.contextmanager
def claimed(out: str, bucket: str = "", say: Callable[[str], Any] = print) -> Iterator[None]:
    """Keep other runs out of the directory `out` and of `bucket` (gs://..., or "" for none).

    Raises InUse if another run uses them, and BucketError if the bucket cannot be reached.
    """
    path = f"{out}/claim.json"
    holder = read_claim(path, bucket)
    with locked(out, holder) as has_lock:
        # If we hold the lock, a claim of this machine for this directory is left over from a killed
        # process. In all other cases, the claim may belong to a live run: for example, a run that
        # sends another directory of this machine to the same bucket.
        is_for_this_directory = all(holder.get(name) == value for name, value in place(out).items())
        if holder and not (has_lock and is_for_this_directory):
            say(
                f"{out} is claimed by process {holder.get('pid')} on {holder.get('host')}; waiting "
                f"{SECONDS_TO_LOOK} s to see whether it still runs"
            )
            time.sleep(SECONDS_TO_LOOK)
            # A live run changes its claim, and a run that ends removes it.
            if read_claim(path, bucket) not in ({}, holder):
                raise in_use(out, holder)
        claim = new_claim(out)
        write_claim(path, bucket, claim)
        if bucket or not has_lock:
            # If several runs start at the same time, the last one to write its claim wins. If we
            # read {} or `holder`, writing our claim failed; a later sign of life may write it.
            time.sleep(SECONDS_TO_ARBITRATE)
            now = read_claim(path, bucket)
            if now not in ({}, holder, claim):
                raise in_use(out, now)
        with signs_of_life(path, bucket, claim):
            yield


def place(out: str) -> dict:
    """The part of a claim that identifies the directory: its host and its path."""
    return {"host": socket.gethostname(), "directory": os.path.realpath(out)}


def new_claim(out: str) -> dict:
    """Returns a claim of this process. If another run is refused, its message names the host,
    process and time. `signs` counts up, so that other runs see the claim change."""
    return place(out) | {
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "signs": 0,
    }


@contextlib.contextmanager
def signs_of_life(path: str, bucket: str, claim: dict) -> Iterator[None]:
    """Change the claim every SECONDS_BETWEEN_SIGNS inside the context, and remove it at the end."""
    is_over = threading.Event()

    def give_signs():
        while not is_over.wait(SECONDS_BETWEEN_SIGNS):
            claim["signs"] += 1
            write_claim(path, bucket, claim)

    # A daemon thread does not keep the process alive after its training has ended.
    thread = threading.Thread(target=give_signs, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        # A sign still being written would restore the claim. Wait, but not long: gcloud may hang.
        thread.join(SECONDS_BETWEEN_SIGNS)
        with contextlib.suppress(OSError):
            os.unlink(path)
        if bucket:
            with contextlib.suppress(BucketError):
                gcloud_retrying("rm", f"{bucket}/claim.json", tries=1)
