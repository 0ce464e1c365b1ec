"""The structure of the source: which files import which, and sizes that a reader can take in."""

import ast
import graphlib
from functools import cache

import pytest
from conftest import ROOT

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "infra", "tools", "tests")
    for path in (ROOT / folder).glob("*.py")
)
# What each room may import of our modules; tools and tests may import anything.
MAY_IMPORT = {
    "model": set(),
    "kernel": set(),
    "infra": {"model", "infra"},
    "train": {"model", "kernel", "infra"},
}
LONGEST_FUNCTION = 60
LONGEST = {"train.py train": 130}  # the loop
WIDEST_LINE = 100


@cache
def text_of(file):
    return (ROOT / file).read_text(encoding="utf-8")


def room_of(module):
    """Returns the first part of a module's name: train for train.py, infra for infra/hf.py."""
    return module.partition(".")[0]


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
            # Imports use complete names: `from infra import hf`, or `from infra.log import say`.
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & OURS or {node.module}
    return {module for module in found if module in OURS}


def test_rooms_import_what_they_may():
    for file in FILES:
        room = room_of(module_of(file))
        rooms = {room_of(module) for module in imports_of(file)}
        allowed = MAY_IMPORT.get(room)
        if allowed is not None:
            assert rooms <= allowed, f"{file} imports {rooms - allowed}"
    # Check that imports_of finds imports at all.
    assert "infra.log" in imports_of("infra/cluster.py")
    assert {"model", "kernel", "infra.rollout"} <= imports_of("train.py")


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
