"""The structure of the source: which files import which, and sizes that a reader can take in."""

import ast
import graphlib
from functools import cache

import pytest
from conftest import ROOT

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "infra/**/*.py", "tools/*.py", "tests/*.py")
    for path in ROOT.glob(pattern)
)
# The wings (folders) of infra/, in order: a wing imports itself and the wings before it.
WINGS = ["infra.host", "infra.data", "infra.rollout", "infra.update", "infra.run"]
# What each room, a file at the top or a folder, may import of our modules. tools and tests may
# import anything.
MAY_IMPORT = {
    "model": set(),
    "kernel": set(),
    "train": {"model", "kernel", *WINGS},
    # slurm_job.py only starts tasks, so it needs none of our modules.
    "infra.cloud": set(),
}
MAY_IMPORT |= {wing: {"model", *WINGS[: i + 1]} for i, wing in enumerate(WINGS)}
LONGEST_FUNCTION = 60
LONGEST = {"train.py train": 130}  # the loop
WIDEST_LINE = 100


@cache
def text_of(file):
    return (ROOT / file).read_text(encoding="utf-8")


def room_of(module):
    """Returns train for train.py, infra.data for infra/data/hf.py."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "infra" else parts[0]


def module_of(file):
    return file.removesuffix(".py").replace("/", ".")


OURS = {module_of(file) for file in FILES}


@cache
def imports_of(file):
    """Returns the names of our modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Imports use complete names: `from infra.data import hf`.
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & OURS or {node.module}
    return {module for module in found if module in OURS}


def test_rooms_import_what_they_may():
    for file in FILES:
        room = room_of(module_of(file))
        rooms = {room_of(module) for module in imports_of(file)}
        if room not in ("tools", "tests", "test_kernel"):
            assert rooms <= MAY_IMPORT[room], f"{file} imports {rooms - MAY_IMPORT[room]}"
    # Check that every wing has files, and that imports_of finds imports at all.
    assert {room_of(module) for module in OURS} >= {*WINGS, "train", "tools", "tests"}
    assert "infra.host.console" in imports_of("infra/host/processes.py")
    assert {"model", "kernel", "infra.rollout.engine"} <= imports_of("train.py")


def test_infra_has_no_cycle():
    graph = {module_of(file): imports_of(file) for file in FILES if file.startswith("infra/")}
    assert len(graph) > 10
    # prepare raises CycleError, which names the modules.
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("file", FILES)
def test_functions_fit_a_page_and_lines_a_screen(file):
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            most = LONGEST.get(f"{file} {node.name}", LONGEST_FUNCTION)
            assert length <= most, f"{file}: {node.name} has {length} lines"
    for number, line in enumerate(text_of(file).splitlines(), 1):
        assert len(line) <= WIDEST_LINE, f"{file}:{number} has {len(line)} columns"
