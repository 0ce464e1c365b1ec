"""launch.sh slurm and its jobs, on stand-ins for Slurm's commands; .ci/slurm_job has a real one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run, until
from pods import write

from infra.cloud import slurm_job

BANNER = "Welcome to site 7\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory with a copy of launch.sh, and with stand-ins for Slurm's commands in bin/."""
    for name in ("launch.sh", "requirements.txt", "train.py"):
        write(tmp_path / name, (ROOT / name).read_text())
    for path in ROOT.glob("infra/cloud/*.sh"):
        write(tmp_path / "infra/cloud" / path.name, path.read_text())
    # Make launch.sh believe that everything is installed in .venv.
    write(tmp_path / ".venv/bin/python", "#!/bin/sh\nexit 0\n", 0o755)
    run("bash", "-c", 'echo "$(cksum <requirements.txt) " >.venv/installed', cwd=tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def stand_in(site, name, program):
    write(site / "bin" / name, f"#!/bin/bash\n{program}\n", 0o755)


def start(site, *command):
    """Start a command in its own session. The stand-in that it calls writes `up` once it runs."""
    with open(site / "out.log", "w") as log:
        return subprocess.Popen(command, cwd=site, stdout=log, stderr=log, start_new_session=True)


def launch(site, *words):
    return start(site, "bash", "launch.sh", *words)


def start_job(site):
    return start(site, sys.executable, ROOT / "infra/cloud/slurm_job.py", "train", "--lr", "1")


def end(site, process, number=None, to_all=False):
    """Once the command runs, send a signal to it, or to its whole session. Returns (exit code,
    output)."""
    if number:
        assert until((site / "up").exists, [process], seconds=60)
        (os.killpg if to_all else os.kill)(process.pid, number)
    code = process.wait(60)
    return code, Path(site / "out.log").read_text()


# ---------------------------------------------------------------- the job, from outside
# A job that writes its log, wherever the site's --output puts it, only at the end.
SBATCH = """
printf "{banner}%s\\n" "{printed}"
sleep 3
echo "step 1/1" >>"{log}"
sleep 1
exit {code}
"""
# The job is still waiting the first two times that squeue is asked.
SQUEUE = """
echo >>asked
case "$(wc -l <asked)" in 1 | 2) echo "PENDING (Priority)" ;; *) echo "RUNNING (None)" ;; esac
"""


@pytest.mark.parametrize(
    "banner, printed, log", [("", "7", "slurm-%j.log"), (BANNER, "7;east", "%j/x.log")]
)
def test_a_job_is_followed_wherever_its_log_is(site, banner, printed, log):
    """Sites may print a banner before the job's number, and only Slurm knows where the log is."""
    path = site / log.replace("%j", "7")
    path.parent.mkdir(exist_ok=True)
    program = SBATCH.format(banner=banner, printed=printed, log=path, code=3)
    stand_in(site, "sbatch", program)
    stand_in(site, "scontrol", f'[ "$*" = "show job 7" ] && echo "   StdOut={site}/{log}"')
    stand_in(site, "squeue", SQUEUE)
    stand_in(site, "sleep", '[ "$1" -gt 3 ] || exec /bin/sleep "$1"; exec /bin/sleep 0.5')
    code, text = end(site, launch(site, "slurm", "--lr", "1"))
    assert code == 3
    assert f"launch.sh: job 7; its log: {path}; end it: scancel 7\n" in text, text
    assert "\nstep 1/1\n" in text, text
    assert text.count("launch.sh: job 7 is PENDING (Priority)\n") == 1, text
    assert "gcloud" not in text, text
    ended = f"job 7 ended with exit code 3; to see why: sacct -j 7, and {path}"
    assert f"launch.sh: {ended}\n" in text, text


def test_a_job_is_followed_if_scontrol_fails(site):
    """The log is then the one that launch.sh asks for."""
    stand_in(
        site, "sbatch", SBATCH.format(banner="", printed="7", log=site / "slurm-7.log", code=0)
    )
    stand_in(site, "scontrol", "exit 1")
    stand_in(site, "squeue", "exit 1")
    code, text = end(site, launch(site, "slurm"))
    assert code == 0 and "\nstep 1/1\n" in text, text
    assert "launch.sh: job 7; its log: slurm-7.log; end it: scancel 7\n" in text, text


def test_a_job_that_is_not_taken_ends_the_launcher(site):
    stand_in(site, "sbatch", 'echo "no such partition" >&2; exit 1')
    said = "launch.sh: the job will have JAX_PLATFORMS=cpu, as here\n"
    assert end(site, launch(site, "slurm")) == (1, said + "no such partition\n")
    stand_in(site, "sbatch", "echo maintenance")
    lines = "maintenance\nlaunch.sh: sbatch printed no job number\n"
    assert end(site, launch(site, "slurm")) == (1, said + lines)


# ---------------------------------------------------------------- the job, from inside
# A stand-in for srun that runs until SIGUSR1 or SIGTERM, and prints how its tasks ended on stderr.
SRUN = """
trap 'echo "{said}" >&2; exit {code}' USR1 TERM
touch up
while :; do /bin/sleep 0.1; done
"""
FIRST_IS_2 = (
    "srun: error: node1: task 1: Exited with exit code 2\n"
    "srun: Terminating StepId=7.0\n"
    "srun: error: node0: task 0: Exited with exit code 143"
)


def test_sh_runs_a_job_with_every_character_of_its_flags(site, monkeypatch):
    odd = 'Line one.\n\u00e9 "q" it\'s $HOME'
    write(site / ".venv/bin/python", "#!/bin/sh\nprintf '<%s>' \"$@\"\n", 0o755)
    stand_in(site, "sbatch", 'while [ "$1" != --wrap ]; do shift; done\nsh -c "$2" >job; exit 9')
    monkeypatch.setenv("LC_ALL", "C")
    code, text = end(site, launch(site, "slurm", "--system", odd))
    assert code == 9, text
    assert f"<--system><{odd}>" in (site / "job").read_text()


def test_a_job_is_requeued_when_its_time_limit_ends_training(site):
    """The job is requeued once, by its number. It is not requeued if training finished, failed or
    was cancelled, nor if it has made no step, as no later job would get further."""
    stand_in(site, "scontrol", 'echo "$*" >>requeued')
    cases = [
        ("saved", 143, signal.SIGUSR1, 143, True),
        ("finished", 0, signal.SIGUSR1, 0, False),
        ("failed", 1, signal.SIGUSR1, 1, False),
        ("nothing is saved", 138, signal.SIGUSR1, 138, False),
        ("saved", 143, signal.SIGTERM, 143, False),
        (FIRST_IS_2, 143, signal.SIGUSR1, 2, False),
    ]
    for said, code, number, wanted, requeued in cases:
        for name in ("up", "requeued"):
            (site / name).unlink(missing_ok=True)
        stand_in(site, "srun", SRUN.format(said=said, code=code))
        # Slurm sends SIGTERM to all processes, but the warning only to slurm_job.py.
        to_all = number == signal.SIGTERM
        found, text = end(site, start_job(site), number, to_all)
        assert (found, said in text) == (wanted, True), text
        assert (site / "requeued").exists() == requeued, text
        if requeued:
            assert (site / "requeued").read_text() == "requeue 7\n"
            assert "launch.sh: the time limit is near: requeueing job 7, which will resume" in text
            assert "could not be requeued" not in text
        assert ("raise --time" in text) == (wanted == 138), text


def test_a_requeue_that_fails_is_tried_again(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(slurm_job, "PAUSES", (0.1, 0.1))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    for failures in (1, 3):
        stand_in(tmp_path, "scontrol", f'echo >>tries; [ "$(wc -l <tries)" -gt {failures} ]')
        slurm_job.requeue("7")
        assert len((tmp_path / "tries").read_text()) == min(failures + 1, 3)
        said = capfd.readouterr().err
        assert said.count("trying again in 0.1 seconds") == min(failures, 2), said
        assert ("give the same command again" in said) == (failures == 3)
        (tmp_path / "tries").unlink()


def test_a_warning_while_the_tasks_start_reaches_them(site, monkeypatch):
    class Warned(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            assert until((site / "up").exists, [self], seconds=60)
            os.kill(os.getpid(), signal.SIGUSR1)

    # Without a signal, the tasks end by themselves.
    srun = SRUN.replace("while :", "for _ in {{1..100}}").format(said="saved", code=143)
    stand_in(site, "srun", srun)
    monkeypatch.chdir(site)
    monkeypatch.setenv("PATH", f"{site}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_job.subprocess, "Popen", Warned)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        assert slurm_job.run_tasks(["train"]) == (143, True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_job_tells_its_tasks_how_many_cpus_are_theirs(site, monkeypatch):
    """Since Slurm 22.05, srun takes that number from its own variable."""
    stand_in(site, "srun", 'echo "cpus ${SRUN_CPUS_PER_TASK-none}: $*"')
    tail = ": --export=ALL --kill-on-bad-exit=1 train --lr 1\n"
    assert end(site, start_job(site)) == (0, f"cpus none{tail}")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
    assert end(site, start_job(site)) == (0, f"cpus 7{tail}")


def test_a_job_ends_with_the_code_of_the_first_task_that_failed(site):
    """srun exits with the highest code: the code of a task that was ended when the first failed."""
    stand_in(site, "srun", f'echo "{FIRST_IS_2}" >&2; exit 143')
    code, text = end(site, start_job(site))
    assert code == 2 and FIRST_IS_2 in text, text
    stand_in(site, "srun", "exit 5")
    assert end(site, start_job(site))[0] == 5
    # As in a shell, the code of a signal is 128 plus its number.
    stand_in(site, "srun", "kill -KILL $$")
    assert end(site, start_job(site))[0] == 137


# ---------------------------------------------------------------- a task
# A stand-in for train.py that takes a while to save when it is asked to end.
SAVES = """#!/bin/bash
trap 'touch saving; /bin/sleep 2; touch saved; exit 143' TERM
touch up
while :; do /bin/sleep 0.1; done
"""


def test_a_task_ends_as_train_py_does_once_that_has_saved(site, monkeypatch):
    """Slurm signals a task and also the shell that started it. Here it is one of two tasks."""
    write(site / ".venv/bin/python", SAVES, 0o755)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    code, text = end(site, launch(site, "task", "--lr", "1"), signal.SIGTERM, to_all=True)
    assert code == 143 and (site / "saved").exists(), text


def test_a_signal_to_the_launcher_reaches_train_py(site):
    """A user's own job script may run `bash launch.sh cpu` as a task, and signal only launch.sh."""
    write(site / ".venv/bin/python", SAVES, 0o755)
    code, text = end(site, launch(site, "cpu", "--lr", "1"), signal.SIGTERM)
    assert code == 143 and (site / "saved").exists(), text
