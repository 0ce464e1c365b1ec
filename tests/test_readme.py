"""README.md and assets/*.md: all that they name exists, and their commands size."""

import contextlib
import importlib.util
import itertools
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, TINY_FLAGS, calm_run, chatml, read_jsonl, run, run_train
from pods import clone_of_this_tree, write

import train
from tools import absent_devices, bench_loss, bench_rollout, plan, plot

FLAGS = train.Config.__annotations__
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
README = ROOT / "README.md"
DOCS = [README, *sorted(ROOT.glob("assets/*.md"))]


@cache
def text_of(path):
    return path.read_text(encoding="utf-8")


def all_docs():
    return "\n".join(map(text_of, DOCS))


# ---------------------------------------------------------------- commands
COMMAND = r"(?:[A-Z_]+=\S+ )?(?:bash|python|gcloud|\.venv/bin/\w+) \S|number="


def commands_of(path):
    """Returns the commands of a page in order, each once: from lines of code and from code in
    text."""
    text = re.sub(r"^```.*?^```", "", text_of(path), flags=re.M | re.S)
    text = re.sub(r" *\\\n +", " ", text)
    found = ["".join(pair) for pair in re.findall(r"^    (\S.*)|`([^`]+)`", text, re.M)]
    found = [re.sub(r" +#.*", "", " ".join(words.splitlines())) for words in found]
    return list(dict.fromkeys(line for line in found if re.match(COMMAND, line)))


def all_commands():
    return list(dict.fromkeys(command for path in DOCS for command in commands_of(path)))


# {pattern of commands: how they are tested}. The first pattern that matches a command counts.
KINDS = {
    # tests/test_learning_tools.py tests the flags of these tools, which run for hours.
    r"python tools/(compare_trl|ablations|word_problems)\.py": "hours",
    r"python train\.py --model out/(words|smollm2)": "hours",
    r"bash launch\.sh test": "tests",
    r"(JAX_NUM_CPU_DEVICES=8 )?bash launch\.sh (cpu|report|help)": "run",
    r"bash launch\.sh (gpu|slurm|plan|v6e-16)": "dry run",
    r"python (train|test_kernel|tools/plot|tools/samples|tools/sums)\.py": "run",
    r".*python tools/bench_\w+\.py .*--aot ": "flags",  # tests/test_aot*.py compile them
    r".*python tools/bench_\w+\.py ": "run",
    r"python tools/plan\.py --table": "flags",  # tests/test_aot_gpu.py compiles a part of the table
    r"gcloud|number=": "cloud",  # tests/test_launch.py checks those that prepare a project
    r"\.venv/bin/python -m pip install": "package index",
    r"python tools/smollm2\.py": "package index",  # tests/test_smollm2.py runs it
    r"python tools/worked_answers\.py": "hub",  # tests/test_learning_tools.py runs it on files
    r"\.venv/bin/xprof --logdir ": "viewer",  # not installed; its files are looked for
}


def kind_of(command):
    return next((kind for pattern, kind in KINDS.items() if re.match(pattern, command)), None)


def of_kind(kind, commands):
    found = [command for command in commands if kind_of(command) == kind]
    assert found, f"no command is tried as {kind}"
    return found


def test_every_command_is_tried():
    unknown = [command for command in all_commands() if kind_of(command) is None]
    assert not unknown, f"no test tries {unknown}"


def own_flags(command):
    """Returns [(flag, value)] of a command's flags that belong to train.py."""
    pairs = itertools.pairwise(shlex.split(command))
    return [pair for pair in pairs if pair[0].startswith("--") and pair[0][2:] in FLAGS]


def test_commands_of_other_machines_are_understood(tmp_path):
    """The launcher and train.py understand the commands for other machines. The launcher prints
    what it would run."""
    for command in of_kind("dry run", all_commands()):
        words = shlex.split(command.replace("launch.sh", str(ROOT / "launch.sh")))
        printed = run(*words, "--dry-run", cwd=tmp_path)
        for flag, value in own_flags(command):
            assert flag in printed and value.replace(",", "\\,") in printed.replace(",", "\\,")
        train.parse(["--model", "M", *itertools.chain(*own_flags(command))])


def test_flags_of_commands_that_take_hours_are_understood():
    for command in of_kind("hours", all_commands()):
        train.parse(["--model", "M", *itertools.chain(*own_flags(command))])


class Parsed(BaseException):
    """The flags were understood, and compiling would come next."""


def test_flags_of_what_is_compiled_elsewhere(monkeypatch):
    monkeypatch.setattr(absent_devices, "of_kind", mock.Mock(side_effect=Parsed))
    mains = dict(bench_loss=bench_loss.main, bench_rollout=bench_rollout.main, plan=plan.main)
    for command in of_kind("flags", all_commands()):
        _, path, *flags = shlex.split(command)
        with pytest.raises(Parsed):
            mains[Path(path).stem](flags)


def test_the_model_of_final_is_asked_as_in_training(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    flags = "--steps 0 --sft_steps 1 --batch 1 --npq 2 --minibatches 1 --eval_data none"
    run_train(f"{flags} --out {tmp_path}/out/arith-tiny")
    page = text_of(ROOT / "assets/resume.md")
    with_transformers, with_engine = re.findall("^```python$(.*?)^```$", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(with_transformers, names)
    prompt = names["tokenizer"].decode(names["prompt"]["input_ids"][0])
    assert prompt == chatml("", "What is 159 + 855?")
    answer = capsys.readouterr().out.strip().removesuffix("<|im_end|>")
    assert answer
    exec(with_engine, names)
    assert capsys.readouterr().out.splitlines()[-1] == answer.splitlines()[-1]


# ---------------------------------------------------------------- commands that are run
# {program: flags that make its commands short}. They come last on the command line, so they win.
SHORT = {
    "train": f"{TINY_FLAGS} --steps 0 --eval_n 4",
    "launch": f"{TINY_FLAGS} --steps 1 --batch 2 --minibatches 1 --eval_n 4 "
    "--max_prompt 96 --max_answer 40",
    "bench_rollout": "--model tiny --batch 8 --prompt 8 --answer 4",
    "bench_loss": "--time 64 --vocab 512 --iters 1",
    "test_kernel": "-k 'masked and not pallas'",
}


# The user's Python runs train.py by tests/impatient.py, which has fewer sums to encode.
PYTHON = f"""#!/bin/sh
[ "$1" != -u ] || shift
case "$1" in
  train.py | */train.py) exec {sys.executable} -u {ROOT}/tests/impatient.py "$@" ;;
  *) exec {sys.executable} -u "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, tiny_directory):
    """Returns an installed copy of this tree, with a model and the questions of a user."""
    tree = tmp_path_factory.mktemp("user") / "podgrpo"
    clone_of_this_tree(tree)
    write(tree / ".venv/bin/python", PYTHON, 0o755)
    # Write the notes that launch.sh leaves after an installation.
    marks = 'echo "$(cksum <requirements.txt) " >.venv/installed; '
    marks += "cksum <tests/requirements.txt >.venv/installed-tests"
    run("bash", "-c", marks, cwd=tree)
    # A directory of this name comes before the model on the hub.
    (tree / "HuggingFaceTB").mkdir()
    (tree / SMOLLM2).symlink_to(tiny_directory)
    # The questions have the columns of the row that README shows.
    (shown,) = re.findall(r'`(\{"question".*?\})`', text_of(README))
    row = json.loads(shown)
    rows = [row | {"question": f"What is {i} + 3?", "answer": str(i + 3)} for i in range(16)]
    for name in ("train.jsonl", "test.jsonl"):
        write(tree / name, "".join(json.dumps(row) + "\n" for row in rows))
    # `OUT` on a page stands for the run of an earlier command.
    (tree / "OUT").symlink_to("out/seed2")
    return tree


def type_in(tree, command, *more):
    """Run a command in a shell in the tree, and return its output. It must exit with code 0."""
    path = f"{tree}/.venv/bin:/usr/bin:/bin"
    words = " ".join([command, *more])
    return run("bash", "-c", words, cwd=tree, PATH=path, JAX_NUM_CPU_DEVICES="1")


def short(command):
    """Returns the flags that make a command short."""
    program = Path(re.search(r"(\S+)\.(?:py|sh)", command)[1]).name
    if re.search(r" --help|launch\.sh (report|help)", command):
        return ""
    flags = SHORT.get(program, "")
    # Leave out the steps that the command leaves out.
    if program == "launch" and " --steps 0 " in command:
        flags += " --steps 0 --sft_steps 0"
    if "--sft_steps 0" in command:
        flags += " --sft_steps 0 --steps 2"
    # Each process compiles for itself, so start few: the last --processes counts.
    if "--processes" in command:
        flags += " --processes 2 --sft_steps 0 --eval_data none"
    return flags


@pytest.mark.slow
def test_commands_of_this_machine_work_one_after_another(checkout):
    """The commands for this machine work in order, from the top of README to the last page, as a
    new user would type them."""
    wants = {"plot.py": "matplotlib", "launch.sh report": "matplotlib"}
    wants |= {"--transformers 1": "transformers"}
    # Of commands that differ only in numbers, such as seeds, try only the first.
    commands = {}
    for command in of_kind("run", all_commands()):
        commands.setdefault(re.sub(r"\d+", "N", command), command)
    plots = [command for command in commands.values() if " tools/plot.py " in command]
    for command in commands.values():
        needed = [package for words, package in wants.items() if words in command]
        if not all(importlib.util.find_spec(package) for package in needed):
            continue
        if command in plots[1:]:
            # A new Python would take longer to start than to draw.
            with contextlib.chdir(checkout):
                plot.main(shlex.split(command)[2:])
            for picture in re.findall(r" --to (\S+)", command):
                assert (checkout / picture).exists(), command
        else:
            type_in(checkout, command, short(command))
    outs = {path.parent.name for path in checkout.glob("out/*/final")}
    assert {"arith-tiny", "seed2", "mesh", "four", "train-SmolLM2-135M-Instruct"} <= outs
    for command in of_kind("viewer", all_commands()):
        directory = checkout / shlex.split(command)[-1]
        assert list(directory.rglob("*.xplane.pb")), command
    # Type the same command again.
    again = "bash launch.sh cpu --seed 2 --out out/seed2"
    assert "out/seed2 is finished: 2 steps" in type_in(checkout, again, short(again))


@pytest.mark.slow
def test_the_reward_of_readme_trains(checkout):
    """The reward function that README shows takes a few changed lines. It trains, and its metric
    appears without further edits."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text_of(README), re.M | re.S)
    lines = diff.splitlines()
    assert len(lines) < 8 and all(line[0] in "+-" for line in lines), diff
    (removed,) = [line[1:] for line in lines if line[0] == "-"]
    added = "\n".join(line[1:] for line in lines if line[0] == "+")
    program = text_of(ROOT / "train.py")
    assert program.count(f"\n{removed}\n") == 1, removed
    write(checkout / "train.py", program.replace(f"\n{removed}\n", f"\n{added}\n"))
    command = f"bash launch.sh cpu --model {SMOLLM2} --data train.jsonl --eval_data test.jsonl"
    # Truncated answers score 0 without being seen, so give answers of random weights room to end.
    type_in(checkout, command, short(command), "--sft_steps 0 --max_answer 256 --out out/brief")
    rows = [row for row in read_jsonl(checkout / "out/brief/metrics.jsonl") if "solved" in row]
    assert rows and all("reward/brief" in row and row["reward/faults"] == 0 for row in rows)
    assert rows[0]["truncated"] < 1 and "reward/formatted" not in rows[0]


@pytest.mark.slow
def test_commands_of_the_tests_find_tests(checkout):
    # Other commands select no tests by name, and `test_files_exist` finds their files.
    by_name = [command for command in of_kind("tests", commands_of(README)) if " -k " in command]
    assert by_name
    for command in by_name:
        printed = type_in(checkout, command, "--collect-only -q -n 0")
        assert re.search(r"^(tests/)?test_\w+\.py(::|: \d)", printed, re.M), printed


# ---------------------------------------------------------------- what the pages name
def flags_in(text):
    return set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text))


# The command that runs the tests, without its arguments: here, or on the first worker of a TYPE.
TEST_COMMAND = r"launch\.sh (?:\S+ )?test\b"


def test_flags_exist():
    # The rest of a command that runs the tests is for pytest: leave it out.
    text = re.sub(rf"({TEST_COMMAND})[^`\n#]*", r"\1", all_docs())
    ours = {*FLAGS, *bench_loss.FLAGS, *bench_rollout.FLAGS, "help"}
    for tool in ROOT.glob("tools/*.py"):
        ours |= set(re.findall(r'add_argument\("--(\w+)"', text_of(tool)))
    launchers = flags_in(text_of(ROOT / "launch.sh"))
    # These flags belong to gcloud, Slurm and xprof.
    others = "location recursive role member reserved network mem constraint format logdir"
    assert len(flags_in(text)) > 50
    unknown = flags_in(text) - ours - launchers - {*others.split()}
    assert not unknown, f"no such flags: {unknown}"


def test_files_exist():
    """Every file that a page names exists in this tree or beside the page, except for files that a
    command would write."""
    name = r"(?:[\w.-]+/)*[\w.]+\.(?:py|sh|md|txt|svg|png|toml)"
    for page in DOCS:
        files = set(re.findall(rf"(?<![\w/.-])({name})\b", text_of(page))) - {"plot.svg"}
        missing = [f for f in files if not (ROOT / f).exists() and not (page.parent / f).exists()]
        assert not missing, f"{page.name}: no such files: {missing}"


def anchors_of(path):
    """Returns the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)", text_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}


def test_links_lead_somewhere():
    for page in DOCS:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text_of(page)):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"


def test_tests_exist():
    markers = re.findall(r'^    "(\w+):', text_of(ROOT / "pyproject.toml"), re.M)
    # -k matches a part of a test's name, or of its file's name.
    names = []
    for path in [ROOT / "test_kernel.py", *ROOT.glob("tests/test_*.py")]:
        names += [path.stem, *re.findall(r"^def (test_\w+)", text_of(path), re.M)]
    for command in filter(re.compile(TEST_COMMAND).search, all_commands()):
        for marker in re.findall(r" -m (\w+)", command):
            assert marker in markers, command
        for part in re.findall(r" -k (\w+)", command):
            assert any(part in name for name in names), command


@pytest.mark.slow
def test_metrics_exist(tmp_path_factory):
    """A run with a KL and several updates per step has exactly the metrics of assets/metrics.md,
    plus reward/formatted."""
    rows = read_jsonl(calm_run(tmp_path_factory) / "metrics.jsonl")
    there = set().union(*rows) - {"step"}
    table = re.findall(r"^\| (`.*?) \|", text_of(ROOT / "assets/metrics.md"), re.M)
    named = {name for cell in table for name in re.findall(r"`([^`]+)`", cell)}
    assert named ^ there == {"reward/formatted"}, named ^ there


def test_places_to_edit_exist():
    """Every name in README's table of edits is defined in train.py, kernel.py or the file that the
    row names."""
    (section,) = re.findall(r"^## How to fork it\n(.*?)^## ", text_of(README), re.M | re.S)
    rows = re.findall(r"^\|.*`.*\|$", section, re.M)
    (walk,) = re.findall(r"^\*\*The loss\*\*.*?\n\n", section, re.M | re.S)
    assert len(rows) > 5
    for text in [*rows, walk]:
        files = ["train.py", "kernel.py", *re.findall(r"`([\w/]+\.py)`", text)]
        sources = "".join(text_of(ROOT / file) for file in files)
        for name in re.findall(r"`(\w+)`", re.sub(r"^\|[^|]*\|", "", text)):
            defined = rf"^(def|class) {name}\b|^ *{name}(:| =)"
            assert re.search(defined, sources, re.M), (name, text)


def test_line_counts():
    for name in ("train.py", "model.py", "kernel.py", "launch.sh"):
        lines = text_of(ROOT / name).count("\n")
        (said,) = re.findall(rf"`{re.escape(name)}`\s+(\d+) lines", text_of(README))
        assert int(said) == lines, f"README says {said}, {name} has {lines} lines"
    assert text_of(README).count("\n") < 200


# ---------------------------------------------------------------- troubleshooting
def test_messages_are_those_of_the_code():
    """The fixed words of each message under Troubleshooting occur in order in one string of the
    source."""
    paths = [ROOT / "train.py", ROOT / "launch.sh", *ROOT.glob("infra/*/*.*")]
    # Join strings that continue on the next line of the source.
    source = re.sub(r'"\n +f?"', "", "\n".join(map(text_of, paths)))
    (section,) = re.findall(r"^## Troubleshooting\n(.*?)^## ", text_of(README), re.M | re.S)
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    assert len(messages) >= 10
    for message in messages:
        pattern = ".+".join(re.escape(words) for words in message.split("..."))
        assert re.search(pattern, source), message
