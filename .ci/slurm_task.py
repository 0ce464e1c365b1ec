"""In place of train.py under .ci/slurm_job: prints what a task of launch.sh's finds, and ends."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

from infra.host.processes import find_processes


# launch.sh looks up its flags in train.py's Config.
class Config:
    fail: str


if "--fail=yes" in sys.argv:
    # Task 1 fails, and task 0 is ended with it.
    if os.environ["SLURM_PROCID"] == "0":
        time.sleep(60)
    sys.exit(5)
found = find_processes(SimpleNamespace(coordinator=""))
step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
# Slurm sets SLURM_CPUS_PER_TASK even if srun ignores it, so ask for the step's CPUs.
text = subprocess.check_output(["scontrol", "show", "step", step], text=True)
cpus = re.search(r" CPUs=(\d+)", text)[1]
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
# One write, so that the lines of two tasks do not mix.
print(
    f"task {found.index} of {len(found.hosts)}: GPUs {gpus}, takes {found.local_gpu}, "
    f"CPUs of all {cpus}\n",
    end="",
    flush=True,
)
