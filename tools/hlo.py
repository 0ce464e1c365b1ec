"""What a compiled program reads, writes and moves, from its text; above all a decode loop."""

import math
import re
from typing import NamedTuple

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # no bytes are touched
MOVES = {"copy", "copy-start", "transpose", "reshape", "slice", "dynamic-slice", "convert"}


class Instruction(NamedTuple):
    type: str  # of its result: "bf16[36,2,128]{2,1,0:T(8,128)}", or a tuple of such
    op: str
    operands: list  # names
    calls: str  # the computation that a fusion or a loop runs, or ""
    arguments: str  # the text between the parentheses: of a parameter or constant, its number
    attributes: str  # the text from there on, with the name and what the compiler found out


class Traffic(NamedTuple):
    """Bytes of a step on a device."""

    device_memory: int  # that instructions read and write
    moved: int  # operands and results of collectives
    largest_copy: int  # results of the copy or relayout that writes most


def loop_traffic(hlo: str, layers: int) -> Traffic:
    """The traffic of a step of the decode loop in a compiled program's text.

    Counted are the operands and results of each top-level instruction in the loop's body, and
    those of a loop inside as often as it runs, `layers` times where the program does not say. What
    is sliced, or updated in place, counts as the slice. What lies in a TPU's VMEM does not count,
    other than for collectives.
    """
    program = Program(hlo, layers)
    return program.traffic(program.main_loop())


def parse(hlo: str) -> dict:
    """{computation: {name: Instruction}}; the entry comes last, and so does each root."""
    computations = {}
    for computation, body in re.findall(r"^(?:ENTRY )?%(\S+) \(.*\{$\n((?:  .*\n)+)", hlo, re.M):
        instructions = {}
        lines = re.findall(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$", body, re.M)
        for name, result_type, op, rest in lines:
            operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
            calls = re.search(r"(?:calls|body)=%([\w.-]+)", rest)
            called = calls[1] if calls else ""
            arguments, _, attributes = rest.partition(")")
            instructions[name] = Instruction(
                result_type, op, operands, called, arguments, attributes
            )
        computations[computation] = instructions
    return computations


def array_sizes(type_text: str) -> list[tuple[int, bool]]:
    """[(bytes, whether it lies in device memory)] of the arrays of a type."""
    found = re.findall(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]((?:\{[^}]*\})?)", type_text)
    sizes = []
    for bits, dims, layout in found:
        elements = math.prod(int(n) for n in dims.split(",") if n)
        # A pred has no number of bits; S(1) is a TPU's VMEM.
        sizes.append((elements * int(bits or 8) // 8, "S(" not in layout))
    return sizes


class Program:
    """A compiled program."""

    def __init__(self, hlo: str, trips: int):
        self.computations = parse(hlo)
        self.entry = list(self.computations)[-1]
        self.unsaid_trips = trips  # of a loop of which the program does not say how often it runs

    def main_loop(self) -> str:
        """The body of the loop with the most traffic: there are smaller ones, such as a sort's."""
        loops = [i.calls for i in self.computations[self.entry].values() if i.op == "while"]
        return max(loops, key=lambda loop: self.traffic(loop).device_memory)

    def trips(self, loop: Instruction) -> int:
        """How often a loop runs: XLA notes it for GPUs and CPUs; TPUs compare with a constant."""
        noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if noted:
            return int(noted[1])
        # The root of a computation comes last.
        condition = self.computations[re.search(r"condition=%([\w.-]+)", loop.attributes)[1]]
        root = list(condition.values())[-1]
        if root.op == "compare" and "direction=LT" in root.attributes:
            # JAX counts from 0.
            limit = condition[root.operands[1]]
            if limit.op == "constant":
                return int(limit.arguments)
        return self.unsaid_trips

    def size(self, computation: str, name: str) -> int:
        """Bytes of a value, the first one of a tuple."""
        return array_sizes(self.computations[computation][name].type)[0][0]

    def bytes_read(self, computation: str, name: str, operand: str) -> int:
        """Bytes that an instruction reads of one of its operands."""
        instruction = self.computations[computation][name]
        is_first = operand == instruction.operands[0]
        if instruction.op == "bitcast" or self.is_alias(instruction):
            return self.bytes_used(computation, name)
        if instruction.op == "fusion":
            inside = self.computations[instruction.calls]
            parameters = [p for p, i in inside.items() if i.op == "parameter"]
            return sum(
                self.bytes_used(instruction.calls, p)
                for p in parameters
                if instruction.operands[int(inside[p].arguments)] == operand
            )
        if instruction.op in ("dynamic-slice", "slice", "gather") and is_first:
            return self.size(computation, name)
        if instruction.op == "dynamic-update-slice" and is_first:
            # It is updated in place.
            return 0
        return self.size(computation, operand)

    def bytes_used(self, computation: str, name: str) -> int:
        """Bytes of a value inside a fusion that its users read; all, if it is the result."""
        instructions = self.computations[computation]
        users = [user for user, i in instructions.items() if name in i.operands]
        size = self.size(computation, name)
        if not users:
            return size
        return min(size, sum(self.bytes_read(computation, user, name) for user in users))

    def bytes_written(self, computation: str, name: str) -> list[int]:
        """Bytes of each result that an instruction writes."""
        instruction = self.computations[computation][name]
        operands = instruction.operands
        if instruction.op == "tuple":
            return [n for operand in operands for n in self.bytes_written(computation, operand)]
        if instruction.op == "fusion":
            root = list(self.computations[instruction.calls])[-1]
            return self.bytes_written(instruction.calls, root)
        if instruction.op == "bitcast":
            return self.bytes_written(computation, operands[0])
        # Of an update in place, the new values.
        if instruction.op == "dynamic-update-slice":
            return [self.size(computation, operands[1])]
        return [self.size(computation, name)]

    def traffic(self, computation: str) -> Traffic:
        """The traffic of a computation that runs once."""
        device_memory = moved = largest_copy = 0
        for name, instruction in self.computations[computation].items():
            # The loop over the layers, and any other inside.
            if instruction.op == "while":
                inside = self.traffic(instruction.calls)
                trips = self.trips(instruction)
                device_memory += trips * inside.device_memory
                moved += trips * inside.moved
                largest_copy = max(largest_copy, trips * inside.largest_copy)
            else:
                is_moved = is_collective(instruction.op)
                moved += self.bytes_moved(computation, name) if is_moved else 0
                device_memory += self.bytes_touched(computation, name)
            if self.is_copy(instruction):
                sizes = [n for n, in_memory in array_sizes(instruction.type) if in_memory]
                largest_copy = max([largest_copy, *sizes])
        return Traffic(device_memory, moved, largest_copy)

    def bytes_moved(self, computation: str, name: str) -> int:
        """Bytes of the operands and results of a collective."""
        instruction = self.computations[computation][name]
        types = [self.computations[computation][o].type for o in instruction.operands]
        return sum(size for t in (instruction.type, *types) for size, _ in array_sizes(t))

    def bytes_touched(self, computation: str, name: str) -> int:
        """Bytes of device memory that a top-level instruction reads and writes."""
        instruction = self.computations[computation][name]
        if is_collective(instruction.op):
            # These go through device memory on both sides.
            return self.bytes_moved(computation, name)
        # What was started is counted at its start.
        if instruction.op in FREE or instruction.op.endswith("-done") or self.is_alias(instruction):
            return 0
        costs = stated_costs(instruction)
        if costs:
            return costs["bytes_accessed"]
        if instruction.op.endswith("-start"):
            # The first two are where it comes from, of which it may be a slice, and where it goes.
            ends = array_sizes(instruction.type)[:2]
            moved = min(size for size, _ in ends)
            return sum(moved for _, in_memory in ends if in_memory)
        total = 0
        for operand in instruction.operands:
            _, in_memory = array_sizes(self.computations[computation][operand].type)[0]
            total += self.bytes_read(computation, name, operand) if in_memory else 0
        written = self.bytes_written(computation, name)
        for size, (_, in_memory) in zip(written, array_sizes(instruction.type), strict=False):
            total += size if in_memory else 0
        return total

    def is_alias(self, instruction: Instruction) -> bool:
        """Whether a copy stays where it was, for another tiling of the same bytes: of int8."""
        aliased = "output_to_operand_aliasing" in instruction.attributes
        return aliased and instruction.op == "fusion" and self.is_copy(instruction)

    def is_copy(self, instruction: Instruction) -> bool:
        """Whether an instruction changes nothing but where and how values lie."""
        ops = {instruction.op}
        if instruction.op == "fusion":
            ops = {inner.op for inner in self.computations[instruction.calls].values()}
        return bool(ops & MOVES) and ops <= MOVES | FREE


def is_collective(op: str) -> bool:
    prefixes = "all-", "reduce-scatter", "collective-"
    return op.startswith(prefixes) and not op.endswith("-done")


def stated_costs(instruction: Instruction) -> dict:
    """{flops, bytes_accessed, ..} of a Pallas kernel, as its author states them; or {}."""
    stated = re.search(r'"cost_estimate":\{(.*?)\}', instruction.attributes)
    costs = re.findall(r'"(\w+)":"(\d+)"', stated[1]) if stated else []
    return {name: int(number) for name, number in costs}
