"""Find the results of the run on this machine. `launch.sh TYPE fetch` calls this on worker 0.

    python tools/results.py

Reads the run's flags from run.flags, where each flag ends in NUL. Links the results that are worth
keeping into .fetch/NAME, and prints that path. If the run has a bucket, checks that the bucket has
the results, and prints gs://..., or exits with code 1.
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from infra.host.console import check
from infra.run import bucket

KEPT = ("final", "profile", "config.json", "*.jsonl")
# Not a name that a user would give to --out.
LINKS = Path(".fetch")


def link_results(out: Path) -> str:
    """Link the files of `out` that match KEPT into LINKS/NAME. Returns that path."""
    shutil.rmtree(LINKS, ignore_errors=True)
    links = LINKS / out.name
    links.mkdir(parents=True)
    # scp --recurse follows links to files, but before OpenSSH 9.5 it refuses links to directories.
    for pattern in KEPT:
        for path in out.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, links / path.name, copy_function=os.symlink)
            else:
                (links / path.name).symlink_to(path)
    return str(links)


def main() -> None:
    check(os.path.exists("run.flags"), "no run was started on this machine, so it has no results")
    with open("run.flags", encoding="utf-8") as f:
        flags = f.read().split("\0")[:-1]
    out = train.parse(flags).out
    if not bucket.bucket_of(out):
        print(link_results(Path(out).resolve()))
        return
    # Worker 0 has access to the bucket, since it has sent the results.
    try:
        bucket.check_results(out)
    except bucket.BucketError as e:
        sys.exit(f"results.py: {e}; this worker's copy is in {os.path.abspath(out)}")
    print(bucket.bucket_of(out))


if __name__ == "__main__":
    main()
