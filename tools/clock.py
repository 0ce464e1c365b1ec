"""The time of a compiled TPU program, estimated from its compiler's notes. Nothing is measured."""

import math
import re
from collections import Counter
from typing import NamedTuple

from infra.host.chips import Chip, ring_seconds
from tools.hlo import Instruction, Program, array_sizes, is_collective, stated_costs

# Parts of an operation's name that describe the structure of the program, not its computation.
STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|shard_map|checkpoint|rematted_computation"
    r"|dot_general|pallas_call|"
)


class Clock(NamedTuple):
    """The compiler's estimate of a program's time, as a sum over operations."""

    ms: float
    operations: list[tuple[str, float]]  # (name, ms), the slowest first

    def __str__(self) -> str:
        slowest = "; ".join(f"{name} {ms:.2f}" for name, ms in self.operations[:5])
        return f"{self.ms:.2f} ms (slowest: {slowest})"


def step_clock(hlo: str, layers: int, chip: Chip) -> Clock:
    """Returns the estimated time of one step of the decode loop.

    hlo: the text of the compiled program. layers: trip count of inner loops that do not state one.
    """
    program = Program(hlo, layers)
    return as_clock(seconds_by_name(program, program.main_loop(), chip))


def program_clock(hlo: str, trips: int, chip: Chip) -> Clock:
    """Returns the estimated time of a complete program.

    hlo: the text of the compiled program. trips: trip count of loops that do not state one.
    """
    program = Program(hlo, trips)
    return as_clock(seconds_by_name(program, program.entry, chip))


def as_clock(seconds: Counter) -> Clock:
    operations = [(name, 1e3 * s) for name, s in seconds.most_common()]
    return Clock(sum(ms for _, ms in operations), operations)


def seconds_by_name(program: Program, computation: str, chip: Chip) -> Counter:
    """Returns {name of an operation: seconds} of one execution of a computation."""
    total = Counter()
    for name, instruction in program.computations[computation].items():
        if instruction.op == "while":
            inside = seconds_by_name(program, instruction.calls, chip)
            trips = program.trips(instruction)
            total.update({key: trips * seconds for key, seconds in inside.items()})
        elif instruction.op in ("conditional", "call"):
            # Take the last branch, which JAX runs if the condition is true. Do not take the slowest
            # branch: skipping a layer when no row has tokens can seem slower than running it,
            # because the branch that skips it writes zeros.
            total.update(seconds_by_name(program, called(instruction)[-1], chip))
        else:
            total[readable(name, instruction)] += seconds_of(program, computation, name, chip)
    # The unary + of a Counter drops the operations that take no time.
    return +total


def called(instruction: Instruction) -> list[str]:
    """Returns the computation of a call, or the branches of a conditional."""
    names = r"(?:to_apply|branch_computations|true_computation)=(\{.*?\}|\S+)"
    return re.findall(r"%([\w.-]+)", re.search(names, instruction.attributes)[1])


def seconds_of(program: Program, computation: str, name: str, chip: Chip) -> float:
    """Returns the seconds of an instruction: the larger of its compute time, from the compiler's
    cycles, and its memory time, from the bytes that it touches."""
    instruction = program.computations[computation][name]
    if is_collective(instruction.op):
        return collective_seconds(program, computation, instruction, chip)
    # The compiler estimates no cycles for a Pallas kernel, but its author may state a cost.
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    cycle_seconds = int(cycles[1]) / chip.clock if cycles else 0.0
    cycle_seconds += stated_costs(instruction).get("flops", 0) / chip.flops
    return max(cycle_seconds, program.bytes_touched(computation, name) / chip.bandwidth)


def collective_seconds(program, computation: str, instruction: Instruction, chip: Chip) -> float:
    """Returns the seconds of a collective around a ring."""
    types = [program.computations[computation][o].type for o in instruction.operands]
    types.append(instruction.type)
    # The larger side is the result of an all-gather, but the operands of a reduce-scatter.
    largest = max(sum(size for size, _ in array_sizes(text)) for text in types)
    devices = group_size(instruction.attributes)
    # An all-reduce goes around twice: a reduce-scatter, then an all-gather of the sum.
    rounds = 2 if instruction.op.startswith("all-reduce") else 1
    return ring_seconds(largest, devices, chip, rounds)


def group_size(attributes: str) -> int:
    """Returns the number of devices in a group of a collective. A permutation has 2: each device
    sends to one other."""
    # Groups are written as {{0,1},{2,3}}, as [2,4]<=[8] or as mesh['a'=2,'b'=4] {'b'}.
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return len(listed[1].split(","))
    shaped = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    if shaped:
        return int(shaped[1])
    meshed = re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", attributes)
    if meshed:
        sizes = dict(re.findall(r"('\w+')=(\d+)", meshed[1]))
        return math.prod(int(sizes[axis]) for axis in meshed[2].split(","))
    return 2


def readable(name: str, instruction: Instruction) -> str:
    """Returns a name that a reader of model.py recognises: the einsum, or the last two parts of
    the instruction's path."""
    path = re.search(r'op_name="([^"]*)"', instruction.attributes)
    # An instruction without a path keeps its own name, without the number.
    words = [re.sub(r"(\.(\d+|clone|remat))+$", "", name)]
    if path:
        parts = [unwrapped(part) for part in path[1].split("/")]
        # The first part is the name of the program.
        informative = [part for part in parts[1:] if not STRUCTURE.fullmatch(part)]
        einsums = [part for part in informative if "->" in part]
        words = einsums[-1:] or informative[-2:] or words
    text = "/".join(words)
    if path and "transpose(" in path[1]:
        recomputed = "rematted_computation" in path[1]
        text += " recomputed" if recomputed else " backward"
    if is_collective(instruction.op) and not text.startswith(instruction.op):
        text = f"{instruction.op} of {text}"
    return text


def unwrapped(part: str) -> str:
    """Strip the transformations from a part of a path: jit(f) -> f, transpose(jvp(f)) -> f."""
    return re.sub(r"^(?:\w+\()+(.*?)\)+$", r"\1", part)
