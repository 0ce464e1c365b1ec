"""The memory traffic and collectives of a compiled program, above all of a decode loop, read from
its HLO text."""

import math
import re
from typing import NamedTuple

# Instructions that touch no bytes.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
# Instructions that only move or convert values.
MOVES = {"copy", "copy-start", "transpose", "reshape", "slice", "dynamic-slice", "convert"}


class Instruction(NamedTuple):
    type: str  # of the result: "bf16[36,2,128]{2,1,0:T(8,128)}", or a tuple of types
    op: str
    operands: list  # their names
    calls: str  # the computation that a fusion or a loop runs, or ""
    arguments: str  # the text in parentheses: the number of a parameter, the value of a constant
    attributes: str  # the text after the parentheses, with the op's name and the compiler's notes


class Traffic(NamedTuple):
    """The bytes of one step on one device."""

    device_memory: int  # read and written by instructions
    moved: int  # operands and results of collectives
    copied: int  # written by copies, relayouts and conversions


def loop_traffic(hlo: str, layers: int) -> Traffic:
    """Returns the traffic of one step of the decode loop, from the text of a compiled program.

    Counts the operands and results of each top-level instruction in the body of the loop. The body
    of an inner loop counts once per trip, with `layers` trips if the program states no trip count.
    A slice, or an update in place, counts only the bytes of the slice. Values in a TPU's VMEM count
    only in collectives.
    """
    program = Program(hlo, layers)
    return program.traffic(program.main_loop())


def bytes_without_activations(hlo: str) -> int:
    """Returns the bytes that a step of the decode loop reads from the arrays that the loop carries
    (the weights and the KV cache) and from their copies.

    Leaves out what inner loops read, so the result is complete only for GPUs, where each layer has
    arrays of its own.
    """
    program = Program(hlo, trips=1)
    loop = program.main_loop()
    return sum(program.bytes_carried(loop, name) for name in program.computations[loop])


def parse(hlo: str) -> dict:
    """Returns {computation: {name: Instruction}}. The entry computation comes last, and the root
    comes last in each computation."""
    # An attribute may span lines, for example a Pallas kernel's metadata. Its further lines begin
    # with a quote or a brace. Join them with the instruction's first line.
    hlo = re.sub(r'\n(?=["}]\S)', " ", hlo)
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
    """Returns [(bytes, whether it is in device memory)], one for each array of a type."""
    found = re.findall(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]((?:\{[^}]*\})?)", type_text)
    sizes = []
    for bits, dims, layout in found:
        elements = math.prod(int(n) for n in dims.split(",") if n)
        # A pred states no bits and takes a byte. S(1) in a layout means a TPU's VMEM.
        sizes.append((elements * int(bits or 8) // 8, "S(" not in layout))
    return sizes


class Program:
    """A compiled program, parsed from its HLO text."""

    def __init__(self, hlo: str, trips: int):
        self.computations = parse(hlo)
        self.entry = list(self.computations)[-1]
        self.default_trips = trips  # trip count of loops that do not state one

    def main_loop(self) -> str:
        """Returns the body of the loop with the most traffic. A program has smaller loops too, for
        example in a sort."""
        loops = [i.calls for i in self.computations[self.entry].values() if i.op == "while"]
        return max(loops, key=lambda loop: self.traffic(loop).device_memory)

    def trips(self, loop: Instruction) -> int:
        """Returns a loop's trip count. On GPUs and CPUs XLA notes this count; on TPUs the
        loop's condition compares the counter with a constant."""
        noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if noted:
            return int(noted[1])
        # The root of a computation comes last.
        condition = self.computations[re.search(r"condition=%([\w.-]+)", loop.attributes)[1]]
        root = list(condition.values())[-1]
        if root.op == "compare" and "direction=LT" in root.attributes:
            # JAX's loops count from 0, so the constant is the trip count.
            limit = condition[root.operands[1]]
            if limit.op == "constant":
                return int(limit.arguments)
        return self.default_trips

    def size(self, computation: str, name: str) -> int:
        """Returns the bytes of a value; of a tuple, the bytes of its first element."""
        return array_sizes(self.computations[computation][name].type)[0][0]

    def bytes_read(self, computation: str, name: str, operand: str) -> int:
        """Returns the bytes that an instruction reads from one of its operands."""
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
            # The operand is updated in place.
            return 0
        return self.size(computation, operand)

    def bytes_used(self, computation: str, name: str) -> int:
        """Returns how many bytes of a value the instructions of its computation read. A value that
        none of them reads is the result, and all of its bytes count."""
        instructions = self.computations[computation]
        users = [user for user, i in instructions.items() if name in i.operands]
        size = self.size(computation, name)
        if not users:
            return size
        return min(size, sum(self.bytes_read(computation, user, name) for user in users))

    def bytes_written(self, computation: str, name: str) -> list[int]:
        """Returns the bytes written to each result of an instruction."""
        instruction = self.computations[computation][name]
        operands = instruction.operands
        if instruction.op == "tuple":
            return [n for operand in operands for n in self.bytes_written(computation, operand)]
        if instruction.op == "fusion":
            root = list(self.computations[instruction.calls])[-1]
            return self.bytes_written(instruction.calls, root)
        if instruction.op == "bitcast":
            return self.bytes_written(computation, operands[0])
        # An update in place writes only the new values.
        if instruction.op == "dynamic-update-slice":
            return [self.size(computation, operands[1])]
        return [self.size(computation, name)]

    def traffic(self, computation: str) -> Traffic:
        """Returns the traffic of one execution of a computation."""
        device_memory = moved = copied = 0
        for name, instruction in self.computations[computation].items():
            # A `while` is an inner loop, such as the loop over the layers.
            if instruction.op == "while":
                inside = self.traffic(instruction.calls)
                trips = self.trips(instruction)
                device_memory += trips * inside.device_memory
                moved += trips * inside.moved
                copied += trips * inside.copied
            else:
                if is_collective(instruction.op):
                    moved += self.bytes_moved(computation, name)
                device_memory += self.bytes_touched(computation, name)
            if self.is_copy(instruction):
                written = array_sizes(instruction.type)
                # The first array of a copy-start is the destination; the second is the source.
                if instruction.op.endswith("-start"):
                    written = written[:1]
                copied += sum(size for size, in_memory in written if in_memory)
        return Traffic(device_memory, moved, copied)

    def bytes_carried(self, computation: str, name: str) -> int:
        """Returns the bytes that a top-level instruction reads from arrays the loop carries."""
        instruction = self.computations[computation][name]
        if instruction.op in FREE or instruction.op.endswith("-done"):
            return 0
        operands = [o for o in set(instruction.operands) if self.is_carried(computation, o)]
        return sum(self.bytes_read(computation, name, operand) for operand in operands)

    def is_carried(self, computation: str, name: str) -> bool:
        """Returns whether a value is an array that the loop carries, or a copy or update of one."""
        instruction = self.computations[computation][name]
        if instruction.op == "get-tuple-element":
            (source,) = instruction.operands
            return self.computations[computation][source].op == "parameter"
        source = self.original(computation, name)
        return bool(source) and self.is_carried(computation, source)

    def original(self, computation: str, name: str) -> str:
        """Returns the operand that an instruction copies or updates in place, or "" if it computes
        something new."""
        instruction = self.computations[computation][name]
        operands = instruction.operands
        if instruction.op in ("bitcast", "dynamic-update-slice"):
            return operands[0]
        if self.is_copy(instruction):
            # The other operands are indices.
            return max(operands, key=lambda operand: self.size(computation, operand), default="")
        if instruction.op == "fusion":
            inside = self.computations[instruction.calls]
            # The root of a computation comes last.
            root = list(inside.values())[-1]
            if root.op == "dynamic-update-slice":
                updated = inside[root.operands[0]]
                if updated.op == "parameter":
                    return operands[int(updated.arguments)]
        return ""

    def bytes_moved(self, computation: str, name: str) -> int:
        """Returns the bytes of the operands and results of a collective."""
        instruction = self.computations[computation][name]
        types = [self.computations[computation][o].type for o in instruction.operands]
        return sum(size for t in (instruction.type, *types) for size, _ in array_sizes(t))

    def bytes_touched(self, computation: str, name: str) -> int:
        """Returns the bytes of device memory that a top-level instruction reads and writes."""
        instruction = self.computations[computation][name]
        if is_collective(instruction.op):
            # A collective reads its operands from device memory, and writes its results there.
            return self.bytes_moved(computation, name)
        # An asynchronous instruction counts at its start, not when it is done.
        if instruction.op in FREE or instruction.op.endswith("-done") or self.is_alias(instruction):
            return 0
        costs = stated_costs(instruction)
        if costs:
            return costs["bytes_accessed"]
        if instruction.op.endswith("-start"):
            # The first two arrays are destination and source. If only a slice is copied, the source
            # is larger.
            ends = array_sizes(instruction.type)[:2]
            moved = min(size for size, _ in ends)
            return sum(moved for _, in_memory in ends if in_memory)
        total = 0
        for operand in instruction.operands:
            _, in_memory = array_sizes(self.computations[computation][operand].type)[0]
            if in_memory:
                total += self.bytes_read(computation, name, operand)
        written = self.bytes_written(computation, name)
        for size, (_, in_memory) in zip(written, array_sizes(instruction.type), strict=False):
            if in_memory:
                total += size
        return total

    def is_alias(self, instruction: Instruction) -> bool:
        """Returns whether a copy is in place, because it only retiles the same (int8) bytes."""
        aliased = "output_to_operand_aliasing" in instruction.attributes
        return aliased and instruction.op == "fusion" and self.is_copy(instruction)

    def is_copy(self, instruction: Instruction) -> bool:
        """Returns whether an instruction only moves, relayouts or converts values."""
        ops = {instruction.op}
        if instruction.op == "fusion":
            ops = {inner.op for inner in self.computations[instruction.calls].values()}
        return bool(ops & MOVES) and ops <= MOVES | FREE


def is_collective(op: str) -> bool:
    prefixes = "all-", "reduce-scatter", "collective-"
    return op.startswith(prefixes) and not op.endswith("-done")


def stated_costs(instruction: Instruction) -> dict:
    """Returns {flops, bytes_accessed, ...} of a Pallas kernel, as stated by its author, else {}."""
    stated = re.search(r'"cost_estimate":\{(.*?)\}', instruction.attributes)
    costs = re.findall(r'"(\w+)":"(\d+)"', stated[1]) if stated else []
    return {name: int(number) for name, number in costs}
