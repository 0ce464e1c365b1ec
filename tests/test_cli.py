"""The command line of train.py: its flags, what it refuses, and what a run says about itself."""

import ast
import dataclasses
import os
import signal
import subprocess
import sys
import time
import urllib.request
from unittest import mock

import numpy as np
import pytest
from conftest import IMPATIENT, ROOT, arguments, refused, run, run_to_end, run_train

import kernel
import train
from infra.host import processes
from infra.host.processes import bypass_proxies
from infra.run import log, run_dir
from infra.run.flags import range_of
from infra.run.run import Run
from model import ModelConfig

# The shortest run that trains.
SHORT_FLAGS = (
    "--steps 0 --sft_steps 1 --batch 1 --npq 2 --minibatches 1 --max_answer 48 --eval_data none"
)

# ---------------------------------------------------------------- flags that are refused
# fmt: off
MISTAKES = {  # {flags: what the message must say}
    # no such flag, no such value
    "word": "arguments: word",
    "outt": "arguments: outt; see --help",
    "--bacth 4": "unrecognized arguments: --bacth 4; did you mean --batch? see --help",
    "--batch four": "invalid int value: 'four'",
    "--seed 1.5": "invalid int value",
    "--lr fast": "invalid float value",
    "--advantage best": "invalid choice: 'best'",
    "--rollout_dtype fp8": "invalid choice: 'fp8'",
    "--data": "expected one",
    # out of range
    "--batch -4": "batch = -4",
    "--batch 9999999999": "batch = 9",
    "--keep 0": "keep = 0",
    # not of the form question=...,answer=...
    "--columns ask": "columns = 'ask' is not of the form question=...,answer=...",
    "--columns query=ask": "columns = 'query=ask'",
    "--columns question=": "columns = 'question='",
    "--columns question=,answer=x": "columns = 'question=,answer=x'",
    "--profile -1": "profile = -1",
    "--profile 161":
        "profile = 161 is not a step of this run: the last is sft_steps + steps = 80 + 80 = 160",
    "--npq 1": "npq = 1",
    "--steps -1": "steps = -1",
    "--steps 1000000": "steps = 1000000",
    "--steps 999999 --sft_steps 1": "999999 = 1000000 must be below 1000000",
    "--seed 100000000000000000000": "seed = 100000000000000000000",
    "--lr nan": "lr = nan",
    "--lr inf": "lr = inf",
    "--lr 1e38": "lr = 1e+38",
    "--b2 1": "b2 = 1",
    "--clip_low 1.5": "clip_low = 1.5",
    "--temperature 0": "temperature = 0",
    "--temperature 1e-300": "temperature = 1e-300",
    "--eval_temperature 1e-300": "eval_temperature = 1e-300",
    "--top_k 20": "top_k = 20",
    "--top_p 0.9": "top_p = 0.9",
    "--top_p 1.5 --eval_temperature 1": "1.5",
    "--steps 0 --sft_steps 0 --eval_data none": "nothing to do",
    # devices and processes
    "--out s3://bucket/run": "out = s3://bucket/run is neither a directory nor gs://bucket/run",
    "--out gs:/bucket/run": "out = gs:/bucket/run is neither",
    "--out gs://": "is neither",
    "--out gs://bucket": "is neither a directory nor gs://bucket/run",
    "--mesh fast": "mesh fast",
    "--mesh 1,-1": "mesh 1,-1",
    "--mesh -1,8,1": "argument --mesh: expected one argument",
    "--mesh=-1,-1,1": "mesh -1,-1,1",
    "--mesh 0,8,1": "mesh 0,8,1",
    "--mesh 3,-1,1": "a multiple of 3 devices; there are 8",
    "--mesh 1,4,1": "needs 4 devices; there are 8",
    "--mesh 1,2,4": "key/value heads = 2 do not divide over tp = 4",
    "--require_processes 4": "expected 4 with",
    "--require_devices 1": "with 8 devices, expected",
    "--processes 2": "processes = 2 and",
    "--process_id 1": "process_id = 1",
    "--coordinator nonsense": "is not host:port",
    "--coordinator localhost:99999": "a port from 1 to 65535",
    "--coordinator :80 --processes 2": "coordinator = ':80'",
    "--coordinator a:80 --processes 99999": "processes = 99999",
    "--coordinator a:80 --processes 2 --process_id 2":
        "process_id = 2 is out of range; it must be a number >= 0 and < 2",
    # sizes that do not fit together
    "--batch 1 --npq 6": "batch*npq = 1*6 = 6 sequences per host do not divide over 8",
    "--batch 3 --npq 8 --minibatches 2": "do not divide into minibatches = 2",
    "--batch 8 --npq 8 --minibatches 1 --micro_batch 9": "micro_batch = 9 is more",
    "--max_prompt 20": "the shortest has 26; raise --max_prompt",
    "--max_prompt 9": "the chat template alone take 13 tokens of max_prompt = 9; raise",
    "--batch 1000000": "asks 1000000 questions a step; arith has 99; try --batch 99",
    "--batch 96 --npq 9999999": "sequences of up to",
    "--max_answer 1 --eval_data none": "max_answer = 1",
    "--max_answer 1000": "exceed the model's 1024 positions",
    # what this machine does not have
    "--loss_impl pallas": "v6 lite, not float32 on cpu; try --loss_impl jax",
    "--attention cudnn": "try --attention auto",
}
# (flags, what the message must say), where a shell would split a word or cannot pass it.
ODD_WORDS = [
    (["--out", "a\0b"], "holds a line break"),
    (["--out", "a\nb"], "holds a line break"),
    (["--data", ""], "--data"),
    (["--data", "\udce9.jsonl"], "half a character"),
    (["--system", "\udce9"], "holds half a character (a surrogate)"),
    (["--system", "Be<|im_end|>"], "holds '<|im_end|>', a special token"),
    (["--model", " "], "--model is empty"),
    (["--mesh", "1\n2\n3"], "mesh = "),
    (["--batch", "4\n5\n6\n7"], "invalid int"),
    (["--a\nb\nc", "1"], "--a b c"),
]
CLUSTERS = [  # (environment variables, what the message must say)
    (dict(SLURM_STEP_NUM_TASKS="two"), "'two'"),
    (dict(SLURM_STEP_NUM_TASKS="2"), "set --coordinator"),
    (dict(SLURM_STEP_NUM_TASKS="2", PATH=""), "SLURM_*"),
    (dict(GCE_METADATA_HOST="a b\n"), "GCE_METADATA_HOST"),
]
# fmt: on


def test_mistakes_in_flags_are_refused_with_what_to_try(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, words in [*MISTAKES.items(), *ODD_WORDS]:
        message = refused("--out run", flags)
        assert words in message, f"{flags}: {message!r} does not say {words!r}"
    # No mistake leaves files that would stop the next run.
    assert os.listdir() == ["run"]
    assert os.listdir("run") == ["tiny-seed1.0"]


def test_mistakes_in_the_variables_of_a_cluster_are_refused(tmp_path):
    for variables, words in CLUSTERS:
        with mock.patch.dict(os.environ, variables):
            message = refused("--out", tmp_path / "run")
        assert words in message, f"{variables}: {message!r} does not say {words!r}"


def test_a_slash_at_the_end_of_out_changes_nothing():
    for flag, out in (("gs://bucket/run/", "out/gs/bucket/run"), ("here/run/", "here/run")):
        assert train.parse(["--out", flag]).out == train.parse(["--out", flag[:-1]]).out == out


@pytest.mark.parametrize("kind, mib", [("TPU v5 lite", 120), ("TPU v5", 60), ("TPU v6 lite", 120)])
def test_the_losss_kernels_use_the_memory_of_their_chip(kind, mib):
    assert kernel.block_sizes(kind, 896).vmem_bytes == mib * 2**20


def test_a_chip_that_the_losss_kernels_do_not_know_gets_plain_jax(capsys):
    unknown = mock.Mock(platform="tpu", device_kind="TPU v99")
    mesh = mock.Mock(devices=np.array([unknown], dtype=object))
    cfg = train.resolve(train.Config(), mesh)
    assert (cfg.dtype, cfg.attention, cfg.loss_impl) == ("bfloat16", "splash", "jax")
    with pytest.raises(SystemExit) as refusal:
        train.resolve(train.Config(loss_impl="pallas"), mesh)
    assert refusal.value.code == 2
    assert "not bfloat16 on TPU v99; try --loss_impl jax" in capsys.readouterr().err


@pytest.mark.parametrize(
    "platform, kind, dtype, chosen",
    [
        ("cpu", "cpu", "auto", ("float32", "blockwise", "jax")),
        ("gpu", "NVIDIA H100", "auto", ("bfloat16", "cudnn", "jax")),
        ("gpu", "NVIDIA H100", "float32", ("float32", "blockwise", "jax")),
        ("tpu", "TPU v6 lite", "auto", ("bfloat16", "splash", "pallas")),
        ("tpu", "TPU v6 lite", "float32", ("float32", "blockwise", "jax")),
    ],
)
def test_auto_is_the_fastest_that_the_devices_have(platform, kind, dtype, chosen):
    device = mock.Mock(platform=platform, device_kind=kind)
    mesh = mock.Mock(devices=np.array([device], dtype=object))
    cfg = train.resolve(train.Config(dtype=dtype), mesh)
    assert (cfg.dtype, cfg.attention, cfg.loss_impl) == chosen
    assert cfg.rollout_dtype == cfg.dtype


def test_a_model_too_wide_for_the_losss_kernels_is_refused(capsys):
    """The kernels' tiles for the hidden size of Qwen2.5-72B do not fit into v4's VMEM."""
    v4 = mock.Mock(platform="tpu", device_kind="TPU v4")
    mesh = mock.Mock(devices=np.array([v4], dtype=object))
    cfg = train.resolve(train.Config(), mesh)
    assert cfg.loss_impl == "pallas"
    train.check_loss_impl(cfg, mock.Mock(D=5120), mesh)
    with pytest.raises(SystemExit) as refusal:
        train.check_loss_impl(cfg, mock.Mock(D=8192), mesh)
    assert refusal.value.code == 2
    text = capsys.readouterr().err
    assert "try --loss_impl jax" in text and "this is TPU v4 with hidden size 8192" in text


@pytest.fixture
def one_question(tmp_path):
    """Returns flags for the smallest data set: one question."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "What is \u00fc?", "answer": 5}', encoding="utf-8")
    return ["--data", str(path), "--eval_data", str(path)]


def test_a_mistake_ends_with_exit_code_2_and_is_not_in_the_way(tmp_path, one_question):
    out = tmp_path / "run"
    text = run_train("--batch 1 --npq 6 --out", out, devices=4, code=2)
    assert text == (
        "train.py: batch*npq = 1*6 = 6 sequences per host do not divide over 4 local devices; "
        "try --npq 4 or --npq 8\n"
    )
    assert "--step=20; did you mean --steps? see --help" in refused("--step=20")
    assert "unrecognized arguments: 17; see --help" in refused("17")
    flags = ["--steps 0 --sft_steps 0 --out", out, *one_question]
    run_train(*flags)
    assert "seed was 1, is now 2" in refused(*flags, "--seed 2")
    words = "rollout_dtype was 'float32', is now 'int8'"
    assert words in refused(*flags, "--rollout_dtype int8")


# ---------------------------------------------------------------- the environment
def test_missing_devices_are_refused(tmp_path):
    """If JAX cannot find the devices, the run is refused without a traceback. Each case runs in a
    process of its own, because JAX looks for devices only once."""
    for platform, words in (
        ("nonsense", "JAX_PLATFORMS = 'nonsense'"),
        ("cuda", "try JAX_PLATFORMS=cpu"),
    ):
        text = run_train("--out", tmp_path / "run", code=2, JAX_PLATFORMS=platform)
        assert words in text, text
        assert "Traceback" not in text, text


def test_a_run_needs_no_home_and_no_utf8(tmp_path, one_question):
    flags = "--steps 0 --sft_steps 0", one_question
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for name, env in {"bare": {"HOME": "/nowhere"} | ascii_only, "empty": {"HOME": ""}}.items():
        text = run_train(*flags, "--out", tmp_path / name, **env)
        assert "held-out questions solved" in text, text
        assert "What is" in text, text


# ---------------------------------------------------------------- what the flags are
FLAGS = {field.name: field.type for field in dataclasses.fields(train.Config)}


def is_read_of_cfg(node):
    """Returns whether a node of the syntax tree reads `cfg.name`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "cfg"


def read_of_cfg(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.attr for node in ast.walk(tree) if is_read_of_cfg(node)}


def test_every_flag_is_read_and_only_flags_are(record_property):
    """train.py and infra/ read every flag from `cfg`, and nothing that is not a flag or a property.
    Files in which `cfg` is a ModelConfig do not count."""
    properties = {name for name, value in vars(train.Config).items() if isinstance(value, property)}
    of_models = {field.name for field in dataclasses.fields(ModelConfig)} | set(dir(ModelConfig))
    read = set()
    for path in [ROOT / "train.py", *ROOT.glob("infra/*/*.py")]:
        read_here = read_of_cfg(path) - properties
        if not read_here <= of_models:
            assert read_here <= FLAGS.keys(), f"{path} reads no flag: {read_here - FLAGS.keys()}"
            read |= read_here
    assert FLAGS.keys() <= read, f"read nowhere: {FLAGS.keys() - read}"
    assert FLAGS.keys() >= set(train.TINY) | run_dir.FREE_ON_RESUME
    assert len(FLAGS) <= 63
    record_property("flags", len(FLAGS))


def test_a_run_from_before_some_flags_resumes():
    new = dict(dtype="bfloat16", rollout_dtype="bfloat16", batch=8)
    new |= dict(eval_samples=1, truncated="zero")
    old = dict(dtype="bfloat16", batch=8)
    assert run_dir.comparable(old) == run_dir.comparable(new)
    assert run_dir.comparable(old) != run_dir.comparable(new | {"rollout_dtype": "int8"})


def test_every_number_has_a_range():
    """The range is part of the flag's type; a default lies in it and has the type of a number."""
    for field in dataclasses.fields(train.Config):
        if isinstance(field.default, str):
            assert range_of(field) is None, field.name
        else:
            kind, least, below = range_of(field)
            assert type(field.default) is kind and least <= field.default < below, field.name


# ---------------------------------------------------------------- standard streams
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-", "| head -n 1", "1>/dev/full"])
def test_a_run_goes_on_where_nobody_reads_what_it_says(closed, tmp_path):
    """A run continues when its terminal is gone, when `| head` closes the pipe, and when the disk
    of its log is full."""
    out = tmp_path / "run"
    flags = f"{SHORT_FLAGS} --out {out}"
    program = f"{' '.join(map(str, IMPATIENT))} {ROOT / 'train.py'}"
    command = f"set -o pipefail; {program} {flags} {closed}"
    text = run("bash", "-c", command, JAX_NUM_CPU_DEVICES="1")
    assert "Traceback" not in text and "Exception ignored" not in text, text
    assert (out / "final/model.safetensors").exists()
    assert '"step"' not in text, "what is for a file went to a stream"


# ---------------------------------------------------------------- wandb
def test_a_wandb_login_that_fails_is_refused(tmp_path, monkeypatch, one_question):
    flags = "--wandb project --batch 1 --minibatches 1 --out", tmp_path / "run", one_question
    # With None in sys.modules, wandb cannot be imported.
    monkeypatch.setitem(sys.modules, "wandb", None)
    # The run ends before it compiles.
    monkeypatch.setattr(train, "fit", mock.Mock(side_effect=AssertionError))
    assert "--wandb project" in refused(*flags)
    wandb = mock.Mock()
    wandb.init.side_effect = ValueError("api_key not configured (no-tty)\nmore about it")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert "api_key not configured" in refused(*flags)
    # Nothing in the directory is in the way of the next run.
    assert os.listdir(tmp_path / "run") == ["tiny-seed1.0"]


def test_wandb_gets_the_metrics_of_every_step(tmp_path, monkeypatch, one_question, train_here):
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    # The smallest run with a supervised step and a GRPO step, of one update each.
    flags = "--sft_steps 1 --steps 1 --batch 1 --npq 8 --minibatches 1 --max_answer 8"
    flags = [flags, "--optimizer sgd --wandb project --out", tmp_path / "run", *one_question]
    # Do not evaluate, which would compile another rollout.
    train_here(*flags, "--eval_data none")
    calls = wandb.init.return_value.log.call_args_list
    logged = {call.args[0]["step"]: call.args[0] for call in calls}
    assert list(logged) == [1, 2]
    assert "nll" in logged[1]
    assert "reward/mean" in logged[2]

    # A chart that fails does not end the run.
    broken = mock.Mock(wandb=mock.Mock(log=mock.Mock(side_effect=BrokenPipeError)))
    Run.write(broken, {"step": 1})
    assert broken.wandb is None and broken.metrics.append.call_count == 1

    def next_id(resumes):
        log.start_wandb("project", str(tmp_path / "run"), {}, resumes)
        return wandb.init.call_args.kwargs["id"]

    first = wandb.init.call_args.kwargs["id"]
    assert next_id(resumes=True) == first
    # A run that starts over is another run.
    monkeypatch.setattr(time, "time", lambda: 5e9)
    assert next_id(resumes=False) == next_id(resumes=True) != first


# ---------------------------------------------------------------- several processes
def process_flags(i, processes, job):
    """Returns the flags of one of several processes on this machine. Each job has its own port."""
    port = 20000 + os.getpid() * 8 % 9000 + job
    return f"--coordinator=127.0.0.1:{port} --processes={processes} --process_id={i}"


def test_a_shell_of_srun_and_unequal_devices_are_explained(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    assert "unset SLURM_STEP_NUM_TASKS" in processes.how_to_start_all()
    devices = [mock.Mock(process_index=index) for index in (0, 1, 1, 1)]
    monkeypatch.setattr(processes.jax, "devices", lambda: devices)
    monkeypatch.setattr(processes.nvidia, "find_devices", lambda: None)
    with pytest.raises(SystemExit):
        processes.check_devices(0, 0)
    assert "unequal numbers of devices: [1, 3]" in capsys.readouterr().err


def test_processes_that_are_not_all_there_are_refused(tmp_path):
    """A run is refused if only process 0 or only another process starts, if the coordinator's name
    does not resolve, or if there are fewer processes or devices than required."""
    flags = "--start_timeout 1 --out", tmp_path / "run"
    text = refused(process_flags(0, 4, job=0), *flags)
    wanted = (
        "4 processes are expected, 1 started within 1 s; absent: process 1, process 2, process 3"
    )
    assert wanted in text and "was only worker 0 started?" in text
    text = refused(process_flags(1, 4, job=1), *flags)
    assert "process 1 of 4 heard nothing from process 0" in text
    nowhere = "--coordinator nowhere.invalid:8476 --processes 4 --process_id 1"
    assert "the name nowhere.invalid does not resolve here" in refused(nowhere, *flags)
    text = refused(process_flags(0, 1, job=2), "--require_processes=4 --require_devices=16", *flags)
    assert "expected 4 with 16" in text


@pytest.mark.parametrize(
    "job, lr, commit, wanted",
    [
        (3, 1, "c0", "process 1 has lr = 1.0, process 0 has 0.0"),
        (4, 0, "c1", "process 1 has commit = 'c1', process 0 has 'c0'"),
    ],
    ids=["flags", "commits"],
)
def test_processes_with_other_flags_or_commits_are_refused(
    job, lr, commit, wanted, tmp_path, monkeypatch
):
    """If the flags or commits of two processes differ, both say so and end with exit code 2. This
    process is process 1, and process 0 runs beside it."""
    flags = ["--start_timeout 300 --out", tmp_path / "run"]
    process_0 = subprocess.Popen(
        [
            sys.executable,
            ROOT / "train.py",
            *arguments([process_flags(0, 2, job), "--lr=0", *flags]),
        ],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PODGRPO_COMMIT": "c0"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        monkeypatch.setenv("PODGRPO_COMMIT", commit)
        # Use the uncached function: its cache would outlive the test.
        monkeypatch.setattr(processes, "commit", processes.commit.__wrapped__)
        assert wanted in refused(process_flags(1, 2, job), f"--lr={lr}", *flags)
        text, _ = process_0.communicate(timeout=300)
    finally:
        process_0.kill()
    assert process_0.returncode == 2, text
    assert wanted in text
    assert "Traceback" not in text, text


@pytest.mark.parametrize("endpoints", ["10.0.0.7,10.0.0.8", "a:1:10.0.0.7,b:2:10.0.0.8"])
def test_workers_of_a_slice_are_found_from_its_metadata(endpoints, monkeypatch):
    values = {"worker-network-endpoints": endpoints, "agent-worker-number": "1"}
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    monkeypatch.setattr(processes, "on_tpu_vm", lambda: True)
    monkeypatch.setattr(
        processes, "metadata", lambda key, _: values[key.removeprefix("attributes/")]
    )
    found = processes.find_processes(train.Config())
    assert found == processes.Processes("10.0.0.7:8476", ["10.0.0.7", "10.0.0.8"], 1)


def test_processes_do_not_talk_through_a_proxy(tmp_path, monkeypatch):
    """Processes connect directly, although all variables name a proxy that does not answer, and
    NO_PROXY lists only another host."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.com")
    # The wrong number of devices is found only after all processes have connected.
    flags = arguments(["--require_devices 16 --npq 4"])
    text = run_to_end(tmp_path / "run", flags, 2, code=2)
    assert text.count("2 with 4 devices, expected 2 with 16") == 2, text
    assert "proxy" not in text, text


def test_hosts_are_added_to_those_that_no_proxy_serves(monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "a,b")
    for _ in range(2):
        bypass_proxies({"c", "b"})
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            assert os.environ[name] == "a,b,c"
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "*")
    grpc = "no_grpc_proxy"
    for _ in range(2):
        bypass_proxies({"b"})
        assert urllib.request.proxy_bypass_environment("huggingface.co")
        assert os.environ[grpc] == "*,b"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_while_programs_compile_ends_the_run_at_once(number, code, tmp_path):
    command = [IMPATIENT[0], "-u", IMPATIENT[1], ROOT / "train.py", "--out", tmp_path / "run"]
    # Without a cache, compiling takes seconds, so the signal comes while programs compile.
    env = os.environ | {"HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=env, **pipe) as process:
        for line in process.stdout:
            if line.startswith("tracing gradients"):
                break
        time.sleep(0.5)
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == code
    assert rest == "train.py: interrupted before a new step: nothing new is saved\n"
