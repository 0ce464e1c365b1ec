"""The job that `launch.sh slurm` submits: start the tasks, and requeue the job at its time limit.

    python infra/cloud/slurm_job.py COMMAND ARGUMENTS...

srun starts COMMAND as one task per process. Exits with the code of the first task that failed.
Shortly before the time limit, Slurm sends the job SIGUSR1. Training then saves and exits with 143,
and the job is requeued, so that it resumes.
"""

import os
import re
import signal
import subprocess
import sys
import time

# Exit codes of train.py after SIGUSR1: a new step is saved, or no new step is saved.
SAVED = 128 + signal.SIGTERM
NO_STEP = 128 + signal.SIGUSR1
# Seconds between tries to requeue the job. Slurm ends this script at the time limit.
PAUSES = 1, 2, 5, 10, 20, 30


def say(text: str) -> None:
    print(f"launch.sh: {text}", file=sys.stderr, flush=True)


def run_tasks(command: list[str]) -> tuple[int, bool]:
    """Run the command as tasks. Returns (exit code, whether Slurm has warned of the time limit).
    The exit code is the code of the first task that failed, or 0 if no task failed."""
    env = os.environ.copy()
    # Since Slurm 22.05, srun does not take the number of CPUs per task from sbatch, so pass it on.
    if "SLURM_CPUS_PER_TASK" in env:
        env["SRUN_CPUS_PER_TASK"] = env["SLURM_CPUS_PER_TASK"]
    warnings = []
    tasks = None

    def pass_on(number, _frame):
        warnings.append(number)
        if tasks:
            tasks.send_signal(number)

    signal.signal(signal.SIGUSR1, pass_on)
    # Slurm also sends SIGTERM to the tasks, so ignore it here and wait for the tasks to end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # Without --kill-on-bad-exit, the other tasks would wait for a task that failed.
    srun = ["srun", "--export=ALL", "--kill-on-bad-exit=1", *command]
    tasks = subprocess.Popen(srun, env=env, stderr=subprocess.PIPE, text=True, errors="replace")
    # Pass on a warning that came before `tasks` was set. A second warning changes nothing.
    for number in tuple(warnings):
        tasks.send_signal(number)
    failed = []
    for line in tasks.stderr:
        print(line, end="", file=sys.stderr, flush=True)
        failed += re.findall(r"^srun: error: .*: Exited with exit code (\d+)$", line)
    # srun exits with the highest code of all tasks, often the 143 of tasks that srun ended. Prefer
    # the code of the first failed task, from the messages above.
    code = tasks.wait()
    return int(failed[0]) if failed else code, bool(warnings)


def requeue(job: str) -> None:
    """Requeue the job. If Slurm's controller is busy, try again."""
    requeueing = ["scontrol", "requeue", job]
    for pause in (*PAUSES, None):
        if subprocess.run(requeueing, check=False).returncode == 0:
            return
        if pause:
            say(f"job {job} could not be requeued; trying again in {pause} seconds")
            time.sleep(pause)
    say(f"job {job} could not be requeued; give the same command again to resume")


def main(command: list[str]) -> int:
    job = os.environ["SLURM_JOB_ID"]
    code, is_warned = run_tasks(command)
    if is_warned and code == SAVED:
        say(f"the time limit is near: requeueing job {job}, which will resume")
        requeue(job)
    if is_warned and code == NO_STEP:
        say("no new step was saved before the time limit: raise --time, or see why a save failed")
    # If a signal ended srun, the code is the negative signal number.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
