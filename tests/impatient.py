"""Run train.py unchanged, except that it hardly waits for a bucket, has fewer sums to encode, and
writes what it compiles to the cache in every process: `impatient.py TRAIN FLAGS`."""

import runpy
import sys
from unittest import mock

del sys.argv[0]
# As in a run, look for modules in the directory of train.py first.
sys.path[0] = sys.argv[0].rpartition("/")[0] or "."

from jax._src import compiler, distributed  # noqa: E402

from infra.data import tiny  # noqa: E402
from infra.run import bucket, claim  # noqa: E402

bucket.PATIENCE = (0.1, 0.2)
claim.SECONDS_TO_ARBITRATE = 0.1
# 2,000 sums are held out, so 1,000 are left for training.
pairs = tiny.pairs_to_add()[:3000]
tiny.pairs_to_add = lambda: pairs
# In JAX, only process 0 writes to the cache. On CPUs, other processes' programs have other keys.
real_write = getattr(compiler, "_cache_write", None)


def write_in_any_process(*args):
    with mock.patch.object(distributed.global_state, "process_id", 0):
        real_write(*args)


if real_write:
    compiler._cache_write = write_in_any_process
runpy.run_path(sys.argv[0], run_name="__main__")
