"""One run at a time in a directory.

Two runs that write the same checkpoints and metrics would mix them. On one machine a lock prevents
that, which ends with the process that holds it, however that dies. Machines that share a disk or a
bucket may not have each other's locks: there a run writes `claim.json` anew every few seconds while
it lives, and one that finds the claim of another machine waits for a while whether it changes.
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

from infra.bucket import AbsentError, BucketError, gcloud

SECONDS_BETWEEN_SIGNS = 20
# Longer than a sign takes that was late, or that a bucket failed to take once.
SECONDS_TO_LOOK = 3 * SECONDS_BETWEEN_SIGNS
# Longer than from reading that there is no claim until one's own is written, with a bucket too.
SECONDS_TO_ARBITRATE = 5

# File descriptors of the directories that this process has locked.
LOCKED = set()


def forget_locks():
    """In a child that was forked: it would hold the locks beyond the end of this process."""
    while LOCKED:
        os.close(LOCKED.pop())


os.register_at_fork(after_in_child=forget_locks)


class InUse(Exception):
    """Another run writes there; the message names its process, its machine and since when."""


def read_claim(path: str, bucket: str) -> dict:
    """What the claim says, {} where there is none. With a bucket, the claim there counts, and
    BucketError is raised where that cannot be reached."""
    if bucket:
        try:
            gcloud("cp", f"{bucket}/claim.json", path)
        except AbsentError:
            return {}
    try:
        with open(path, encoding="utf-8") as f:
            holder = json.load(f)
    except (OSError, ValueError):
        return {}
    # JSON of another kind is no claim of ours.
    return holder if isinstance(holder, dict) else {}


def write_claim(path: str, bucket: str, claim: dict) -> None:
    """Write the claim here and to the bucket; where that fails, the next sign may succeed."""
    # For a full disk, and for gcloud: a BucketError is an OSError.
    with contextlib.suppress(OSError):
        # By a rename, so that nobody reads half a claim.
        with open(f"{path}.tmp", "w", encoding="utf-8") as f:
            json.dump(claim, f)
        os.replace(f"{path}.tmp", path)
        if bucket:
            # A sign that comes minutes late is none.
            gcloud("cp", path, f"{bucket}/claim.json", tries=1)


def in_use(out: str, holder: dict) -> InUse:
    # A process may have the lock and no claim yet.
    who = "a process that has just begun"
    if holder:
        who = f"process {holder.get('pid')} on {holder.get('host')}, which runs since "
        who += f"{holder.get('since')}"
    return InUse(f"{out} is in use by {who}; let it end, stop it, or choose another --out")


@contextlib.contextmanager
def locked(out: str, holder: dict) -> Iterator[bool]:
    """Inside, this process has the lock of the directory, unless the file system has none.

    -> whether it has. Raises InUse, which names the holder, where another process of this machine
    has it.
    """
    # The lock is of the directory itself, so that it needs no file that might be deleted.
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
        # This also gives up the lock. In a forked child it is closed already.
        if directory in LOCKED:
            LOCKED.remove(directory)
            os.close(directory)


@contextlib.contextmanager
def claimed(out: str, bucket: str = "", say: Callable[[str], Any] = print) -> Iterator[None]:
    """Inside, no other run uses the directory `out`, nor `bucket` (gs://..., or "" for none).

    Raises InUse where one does, and BucketError where the bucket cannot be reached.
    """
    path = f"{out}/claim.json"
    holder = read_claim(path, bucket)
    with locked(out, holder) as has_lock:
        # With the lock in hand, a claim of this machine is that of a process which was killed:
        # only that of another machine, or any without locks, may be of one that lives.
        is_of_this_machine = holder.get("host") == socket.gethostname()
        if holder and not (has_lock and is_of_this_machine):
            say(
                f"{out} is claimed by process {holder.get('pid')} on {holder.get('host')}; looking "
                f"for {SECONDS_TO_LOOK} s whether that runs"
            )
            time.sleep(SECONDS_TO_LOOK)
            if read_claim(path, bucket) != holder:
                raise in_use(out, holder)
        claim = new_claim()
        write_claim(path, bucket, claim)
        if bucket or not has_lock:
            # Of several that found no claim at the same time, the last to write has it.
            time.sleep(SECONDS_TO_ARBITRATE)
            now = read_claim(path, bucket)
            if now not in ({}, holder, claim):
                raise in_use(out, now)
        with signs_of_life(path, bucket, claim):
            yield


def new_claim() -> dict:
    """Host, process and time are for the message of the run that is refused; the count of signs is
    what changes."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "signs": 0,
    }


@contextlib.contextmanager
def signs_of_life(path: str, bucket: str, claim: dict) -> Iterator[None]:
    """Inside, the claim is there, and changes every few seconds."""
    is_over = threading.Event()

    def give_signs():
        while not is_over.wait(SECONDS_BETWEEN_SIGNS):
            claim["signs"] += 1
            write_claim(path, bucket, claim)

    # A daemon, which does not keep a process alive whose training has ended otherwise.
    thread = threading.Thread(target=give_signs, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        # A sign under way would bring the claim back; gcloud may hang, and is not waited for long.
        thread.join(SECONDS_BETWEEN_SIGNS)
        with contextlib.suppress(OSError):
            os.unlink(path)
        if bucket:
            with contextlib.suppress(BucketError):
                gcloud("rm", f"{bucket}/claim.json", tries=1)
