"""How long a compiled TPU program takes by the compiler's own estimate. Nothing is measured."""

import math
import re
from collections import Counter
from typing import NamedTuple

from infra.chips import HOP_SECONDS, Chip
from tools.hlo import Instruction, Program, array_sizes, is_collective, stated_costs

# Parts of an operation's name that tell how the program is built, and not what it does.
STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|shard_map|checkpoint|rematted_computation"
    r"|dot_general|pallas_call|"
)


class Clock(NamedTuple):
    """The compiler's estimate of a time: a sum over operations."""

    ms: float
    operations: list[tuple[str, float]]  # (name, ms), the dearest first

    def __str__(self) -> str:
        dearest = "; ".join(f"{name} {ms:.2f}" for name, ms in self.operations[:5])
        return f"{self.ms:.2f} ms (of that {dearest})"


def step_clock(hlo: str, layers: int, chip: Chip) -> Clock:
    """A step of the decode loop in a compiled program's text."""
    program = Program(hlo, layers)
    return as_clock(seconds_by_name(program, program.main_loop(), chip))


def program_clock(hlo: str, trips: int, chip: Chip) -> Clock:
    """All of a program; `trips` is how often a loop runs of which its text does not say it."""
    program = Program(hlo, trips)
    return as_clock(seconds_by_name(program, program.entry, chip))


def as_clock(seconds: Counter) -> Clock:
    operations = [(name, 1e3 * s) for name, s in seconds.most_common()]
    return Clock(sum(ms for _, ms in operations), operations)


def seconds_by_name(program: Program, computation: str, chip: Chip) -> Counter:
    """{name of an operation: seconds} in a computation that runs once."""
    total = Counter()
    for name, instruction in program.computations[computation].items():
        if instruction.op == "while":
            inside = seconds_by_name(program, instruction.calls, chip)
            trips = program.trips(instruction)
            total.update({key: trips * seconds for key, seconds in inside.items()})
        elif instruction.op in ("conditional", "call"):
            # Of a conditional JAX puts the branch where the condition holds last. To leave a layer
            # out where no row has tokens can seem dearer than to run it, for the zeros written.
            total.update(seconds_by_name(program, called(instruction)[-1], chip))
        else:
            total[readable(name, instruction)] += seconds_of(program, computation, name, chip)
    # What takes no time is no operation.
    return +total


def called(instruction: Instruction) -> list[str]:
    """The computation of a call, or those of a conditional's branches."""
    names = r"(?:to_apply|branch_computations|true_computation)=(\{.*?\}|\S+)"
    return re.findall(r"%([\w.-]+)", re.search(names, instruction.attributes)[1])


def seconds_of(program: Program, computation: str, name: str, chip: Chip) -> float:
    """An instruction's seconds: the larger of the compiler's cycles and the bytes it touches."""
    instruction = program.computations[computation][name]
    if is_collective(instruction.op):
        return collective_seconds(program, computation, instruction, chip)
    # Of a Pallas kernel the compiler says nothing, but its author may.
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    cycle_seconds = int(cycles[1]) / chip.clock if cycles else 0.0
    cycle_seconds += stated_costs(instruction).get("flops", 0) / chip.flops
    return max(cycle_seconds, program.bytes_touched(computation, name) / chip.bandwidth)


def collective_seconds(program, computation: str, instruction: Instruction, chip: Chip) -> float:
    """Around a ring both ways: each device sends all but its own part, to the farthest device."""
    types = [program.computations[computation][o].type for o in instruction.operands]
    largest = max(sum(size for size, _ in array_sizes(text)) for text in (instruction.type, *types))
    devices = group_size(instruction.attributes)
    # A sum is formed, and then sent around.
    rounds = 2 if instruction.op.startswith("all-reduce") else 1
    sent = largest * (devices - 1) / devices
    return rounds * (sent / chip.link + devices // 2 * HOP_SECONDS)


def group_size(attributes: str) -> int:
    """Devices that take part in a collective; of a permutation 2, as each sends to one."""
    # {{0,1},{2,3}}, or [2,4]<=[8], or mesh['a'=2,'b'=4] {'b'}
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
    """What a reader of the model recognises: the einsum, or the last words of its path."""
    path = re.search(r'op_name="([^"]*)"', instruction.attributes)
    # Without a path, an instruction's name without its number.
    words = [re.sub(r"(\.(\d+|clone|remat))+$", "", name)]
    if path:
        parts = [unwrapped(part) for part in path[1].split("/")]
        # The first one is the program.
        told = [part for part in parts[1:] if not STRUCTURE.fullmatch(part)]
        einsums = [part for part in told if "->" in part]
        words = einsums[-1:] or told[-2:] or words
    text = "/".join(words)
    if path and "transpose(" in path[1]:
        recomputed = "rematted_computation" in path[1]
        text += " recomputed" if recomputed else " backward"
    if is_collective(instruction.op) and not text.startswith(instruction.op):
        text = f"{instruction.op} of {text}"
    return text


def unwrapped(part: str) -> str:
    """jit(f) -> f, transpose(jvp(f)) -> f"""
    return re.sub(r"^(?:\w+\()+(.*?)\)+$", r"\1", part)
