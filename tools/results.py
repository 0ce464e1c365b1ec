"""What the run on this machine left behind; `launch.sh TYPE fetch` calls it on worker 0.

    python tools/results.py

Reads the run's flags from run.flags, a NUL after each. Links what is worth keeping into
results/NAME, and prints NAME. If the run is in a bucket, prints gs://... once the bucket is seen to
have its results, and else exits with 1.
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from infra import bucket

KEPT = ("final", "profile", "config.json", "*.jsonl")


def link_results(out: Path) -> str:
    """Link what is worth keeping of the directory `out` into results/NAME; returns NAME."""
    shutil.rmtree("results", ignore_errors=True)
    links = Path("results") / out.name
    links.mkdir(parents=True)
    # scp --recurse follows the links.
    for pattern in KEPT:
        for path in out.glob(pattern):
            (links / path.name).symlink_to(path)
    return out.name


def main() -> None:
    with open("run.flags", encoding="utf-8") as f:
        flags = f.read().split("\0")[:-1]
    out = train.parse(flags).out
    if not bucket.bucket_of(out):
        print(link_results(Path(out).resolve()))
        return
    # The worker that sent the results has the rights to look for them.
    try:
        bucket.check_results(out)
    except bucket.BucketError as e:
        sys.exit(f"results.py: {e}; the run's own are on this worker, in {os.path.abspath(out)}")
    print(bucket.bucket_of(out))


if __name__ == "__main__":
    main()
