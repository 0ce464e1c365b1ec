"""NVIDIA GPUs, tested without any: which CUDA launch.sh installs to train or to plan. A run that is
meant for GPUs never trains on the CPU, nor with a cuDNN that is too old.

Two stand-ins are used. nvidia-smi is a script that answers with a driver's version. JAX's CUDA
plugin is a module whose `initialize` fails, or that knows only versions.
"""

import os
import random
import shlex
import sys
from types import SimpleNamespace

import jax
import pods
import pytest
from conftest import run_train
from pods import write

from infra.host import nvidia, processes
from infra.host.processes import slurm_processes

# pytest finds the fixture under this name.
cloud = pods.cloud


# ---------------------------------------------------------------- launch.sh
def with_driver(tools, driver, capability="9.0"):
    """Returns PATH with a stand-in for nvidia-smi, as on a machine with two GPUs."""
    # nvidia-smi prints a line per GPU. The second line comes after the first has been read.
    answer = f"case $* in *compute_cap*) echo {capability} ;; *) echo {driver} ;; esac\n"
    write(tools / "nvidia-smi", f"#!/bin/sh\n{answer}/bin/sleep 0.2\n{answer}", 0o755)
    return f"{tools}:{os.environ['PATH']}"


def test_cuda_is_what_the_driver_and_the_gpus_take(cloud, tmp_path):
    """launch.sh installs the CUDA that suits the driver and the GPUs, by the tables of NVIDIA and
    JAX. JAX with CUDA 13 does not support GPUs like the V100."""
    drivers = {"580.65.06": "cuda13", "575.57": "cuda12", "525.60.13": "cuda12"}
    for driver, extra in drivers.items():
        path = with_driver(tmp_path, driver)
        text = cloud.launch("--dry-run gpu", PATH=path)
        assert f"jax\\[{extra}\\]" in text, text
        # If there is no GPU, JAX must fail, not train on the CPU.
        assert "JAX_PLATFORMS=cuda\\,cpu" in text, text
    v100 = with_driver(tmp_path, "580.65.06", capability="7.0")
    assert "jax\\[cuda12\\]" in cloud.launch("--dry-run gpu", PATH=v100)
    # A user's choice counts, whatever the driver.
    older = with_driver(tmp_path, "575.57")
    assert "jax\\[cuda13\\]" in cloud.launch("--dry-run gpu", PATH=older, CUDA="13")
    t4 = with_driver(tmp_path, "580.65.06", capability="7.5")
    assert "jax\\[cuda13\\]" in cloud.launch("--dry-run gpu", PATH=t4)
    anywhere = {"JAX_PLATFORMS": ""}
    assert "jax\\[cuda13\\]" in cloud.launch("--dry-run slurm", **anywhere)
    text = cloud.launch("--dry-run slurm", CUDA="12", **anywhere)
    assert "jax\\[cuda12\\]" in text, text
    # sbatch takes a command of sh, which calls bash with another one.
    *for_sh, job = shlex.split(shlex.split(text.splitlines()[-1])[-1])
    assert for_sh == ["exec", "bash", "-c"]
    python = f"{cloud.clone}/.venv/bin/python"
    assert job.startswith(f"exec env JAX_PLATFORMS=cuda\\,cpu {python} "), job


def test_a_driver_that_is_too_old_is_reported_with_what_is_needed(cloud, tmp_path):
    path = with_driver(tmp_path, "520.61.05")
    for command in "gpu", "slurm", "plan":
        text = cloud.launch(command, code=2, PATH=path, JAX_PLATFORMS="")
        wanted = "NVIDIA driver 520 is too old: CUDA 12 needs 525 or newer, and CUDA 13 needs 580"
        assert wanted in text and text.count("\n") == 1, text
    # nvidia-smi answers this if it finds no GPU.
    path = with_driver(tmp_path, "No devices were found")
    text = cloud.launch("gpu", code=2, PATH=path)
    assert text == "launch.sh: nvidia-smi finds no NVIDIA GPU here; try cpu\n"
    text = cloud.launch("--dry-run gpu", code=2, CUDA="11")
    assert "CUDA=11 is neither 12 nor 13" in text, text


def plugin(clone, cuda):
    """Returns the path where pip installs JAX's plugin for this CUDA."""
    return clone / f".venv/lib/python3.12/site-packages/jax_plugins/xla_cuda{cuda}/__init__.py"


def test_plan_installs_what_compiles_for_absent_gpus(cloud):
    """A plan for absent GPUs installs JAX's CUDA plugin and cuDNN, unless a plugin is already
    there. Stand-ins replace .venv's python and its packages."""
    for name in ("a100-1", "h100-8", "h100-16", "h200-4"):
        text = cloud.launch("--dry-run plan", name, "--lr 1")
        assert "0.7 GB to download, 1.3 GB in .venv" in text, text
        plugin_at = text.index(" jax\\[cuda13-local\\]")
        cudnn_at = text.index(" --no-deps nvidia-cudnn-cu13")
        plan_at = text.index(f"env JAX_PLATFORMS=cpu {cloud.clone}/.venv/bin/python -u ")
        assert plugin_at < cudnn_at < plan_at, text
        assert f"tools/plan.py {name} --model Qwen/" in text and "1024 --lr 1" in text, text
    # A CUDA plugin that was installed to train is good enough to plan, even for CUDA 12.
    write(cloud.clone / ".venv/bin/python", '#!/bin/sh\necho "$*" >> asked\n', 0o755)
    for cuda in "13", "12":
        write(plugin(cloud.clone, cuda), "")
        text = cloud.launch("--dry-run plan h100-8")
        assert "cuda13-local" not in text and "cudnn" not in text, text
        asked = (cloud.clone / "asked").read_text()
        assert f"v('jax') == v('jax-cuda{cuda}-plugin')" in asked.splitlines()[-1], asked


def test_jax_gets_one_cuda_plugin(cloud, tmp_path):
    """launch.sh removes the plugin of another CUDA, for example after a new driver: with two
    plugins, JAX fails with pages of messages."""
    write(cloud.clone / ".venv/bin/python", "#!/bin/sh\n", 0o755)
    write(plugin(cloud.clone, "13"), "")
    text = cloud.launch("--dry-run gpu", PATH=with_driver(tmp_path, "550.54"))
    gone = "-m pip uninstall -q -y jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13"
    assert text.index(gone) < text.index("jax\\[cuda12\\]"), text
    text = cloud.launch("--dry-run gpu", PATH=with_driver(tmp_path, "580.65"))
    assert "uninstall" not in text, text


def test_what_is_installed_for_gpus_serves_a_cpu_too(cloud):
    """Calls for a GPU and for the CPU may alternate: each of them installs once."""
    write(cloud.clone / ".venv/bin/python", '#!/bin/sh\necho "$*" >> asked\n', 0o755)

    def installs(extra):
        write(cloud.clone / "asked", "")
        cloud.launch("setup", extra)
        return (cloud.clone / "asked").read_text().count("-m pip install")

    calls = ["cuda13", "", "cuda13", "cuda12", "", "cuda13"]
    assert [installs(extra) for extra in calls] == [1, 0, 0, 1, 0, 1]


def test_without_gpus_jax_does_not_look_for_them(cloud, tmp_path):
    """Without GPUs, launch.sh restricts JAX to the CPU. If .venv has CUDA, to compile for absent
    GPUs, or libtpu, JAX would print pages of messages otherwise."""
    for call in "plan", "cpu", "test", "plan h100-8", "plan v6e-8":
        text = cloud.launch("--dry-run", call, JAX_PLATFORMS="")
        assert "\nenv JAX_PLATFORMS=cpu " in text, text
    text = cloud.launch("--dry-run plan", PATH=with_driver(tmp_path, "580.65"))
    assert "JAX_PLATFORMS=cuda\\,cpu" in text and "Qwen" in text, text


# ---------------------------------------------------------------- train.py
FAILING_PLUGIN = """
def initialize():
    raise RuntimeError("Unable to load cuDNN. Is it installed?\\n" + "more\\n" * 50)
"""


@pytest.mark.parametrize("platforms", ["cuda,cpu", ""])
def test_a_run_never_goes_on_without_the_gpus_that_are_here(tmp_path, platforms):
    """If the CUDA plugin fails, the run is refused in one line. JAX alone would print a traceback,
    and train on the CPU if JAX_PLATFORMS is not set."""
    write(tmp_path / "jax_plugins/xla_cuda13/__init__.py", FAILING_PLUGIN)
    for driver, advice in {
        "580.65.06": "unset LD_LIBRARY_PATH, which is /site/cudnn",
        "550.54": "CUDA 13 needs driver 580 or newer, and this one is 550.54",
    }.items():
        text = run_train(
            *["--out", tmp_path / "run"],
            code=2,
            JAX_PLATFORMS=platforms,
            PATH=with_driver(tmp_path / "tools", driver),
            PYTHONPATH=tmp_path,
            LD_LIBRARY_PATH="/site/cudnn",
        )
        # If libtpu is installed, it may print lines too.
        (line,) = [line for line in text.splitlines() if line.startswith("train.py: ")]
        assert "(RuntimeError: Unable to load cuDNN. Is it installed?)" in line, text
        assert advice in line and "JAX_PLATFORMS=cpu" in line, text
        assert "Traceback" not in text and "more" not in text, text


def told(capsys, call):
    """Returns the one line that a call prints before it exits with code 2."""
    with pytest.raises(SystemExit) as end:
        call()
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


def test_gpus_that_slurm_did_not_give_are_asked_for(tmp_path, monkeypatch, capsys):
    """If JAX should use GPUs but Slurm gave none, the message says how to ask for them. A stand-in
    answers for JAX, which skips CUDA when there are no device files."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    # Pretend that there is no plugin: one may be installed to compile for absent GPUs.
    monkeypatch.setattr(nvidia, "plugin_cuda", lambda: "")
    monkeypatch.setenv("PATH", with_driver(tmp_path, "No devices were found"))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    text = told(capsys, nvidia.find_devices)
    assert "JAX_PLATFORMS = 'cuda,cpu', but JAX finds no GPU; nor does nvidia-smi" in text, text
    assert "on Slurm give --gpus-per-node" in text, text
    # Without a GPU, or if JAX_PLATFORMS is cpu, the run is meant for the CPU.
    monkeypatch.setenv("JAX_PLATFORMS", "")
    nvidia.find_devices()
    monkeypatch.setenv("PATH", with_driver(tmp_path, "580.65.06"))
    text = told(capsys, nvidia.find_devices)
    assert "JAX has no CUDA here: install it with `bash launch.sh gpu`" in text, text
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    nvidia.find_devices()


def test_a_cudnn_that_jax_was_not_compiled_for_is_refused(monkeypatch, capsys):
    """XLA needs a cuDNN of the same major version, and of the same minor version or a newer one.
    The patch version does not matter."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site/cudnn")
    versions = SimpleNamespace(cudnn_build_version=lambda: 91203)
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda13", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "jax_cuda13_plugin._versions", versions)
    patch = random.randrange(100)
    for fits in (91200 + patch, 91300 + patch, 92801):
        versions.cudnn_get_version = lambda fits=fits: fits
        nvidia.find_devices()
    for minor, shown in {901: "9.1", 911: "9.11", 1000: "10.0", 1013: "10.13"}.items():
        versions.cudnn_get_version = lambda minor=minor: minor * 100 + patch
        text = told(capsys, nvidia.find_devices)
        wanted = (
            f"cuDNN {shown}.{patch} is loaded, but jax {jax.__version__} is compiled for 9.12.3"
        )
        assert wanted in text, text
        assert "unset LD_LIBRARY_PATH, which is /site/cudnn" in text, text
        assert "pip install -U 'nvidia-cudnn-cu13'" in text, text


# ---------------------------------------------------------------- Slurm
def test_tasks_take_all_gpus_of_their_node(monkeypatch, capsys):
    """The tasks of a node take all its GPUs: one task takes all of them, or each task takes one. A
    stand-in for scontrol names the nodes."""
    monkeypatch.setattr(processes.subprocess, "check_output", lambda *_, **__: "n1\nn2\n")
    for tasks, visible, local_gpu in [(1, "0,1,2,3", None), (4, "0,1,2,3", 3), (4, "2", None)]:
        found = of_task(monkeypatch, tasks, visible)
        assert found.local_gpu == local_gpu, (tasks, visible)
        assert found.hosts == ["n1"] * tasks + ["n2"] * tasks
    text = told(capsys, lambda: of_task(monkeypatch, 2, "0,1,2,3"))
    assert (
        "2 tasks share the 4 GPUs of a node; give --ntasks-per-node 4, one task per GPU, or 1"
        in text
    )
    # Slurm does not set CUDA_VISIBLE_DEVICES on every site.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = slurm_processes()
    assert found.local_gpu == 1
    # Two jobs may run on the same node.
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert slurm_processes().address != found.address


def test_an_uneven_number_of_tasks_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(processes.subprocess, "check_output", lambda *_, **__: "n1\nn2\n")
    for tasks, layout in [(1.5, "2,1"), (2, "3,1")]:
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", layout)
        text = told(capsys, lambda tasks=tasks: of_task(monkeypatch, tasks, "0"))
        wanted = f"the 2 nodes got unequal numbers of the {2 * tasks:.0f} tasks, {layout}; give "
        assert wanted + "--ntasks-per-node" in text, text
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    assert of_task(monkeypatch, 2, "0").hosts == ["n1", "n1", "n2", "n2"]


def of_task(monkeypatch, tasks, visible):
    """Returns what the last task on two nodes finds. tasks: number per node. visible: the value of
    CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(int(2 * tasks)))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", str(int(2 * tasks) - 1))
    monkeypatch.setenv("SLURM_LOCALID", str(int(tasks) - 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return slurm_processes()
