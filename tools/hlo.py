"""What a compiled decode loop reads, writes and moves."""

import math
import re

import numpy as np


def computations(hlo):
    """A compiled program's text -> {computation: {instruction: (type, op, operands, what it calls, a
    parameter's number)}}, the entry and each root last."""
    comps = {}
    for name, body in re.findall(r"^(?:ENTRY )?%(\S+) \(.*\{$\n((?:  .*\n)+)", hlo, re.M):
        lines = re.findall(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$", body, re.M)
        comps[name] = {name: (kind, op, re.findall(r"%([\w.-]+)", rest.split("), ")[0]),
                              (re.findall(r"(?:calls|body)=%([\w.-]+)", rest) or [0])[0], rest.split(")")[0])
                       for name, kind, op, rest in lines}
    return comps

def loop_traffic(hlo, layers):
    """Of the decode loop in a compiled program's text -> bytes a step: [what instructions read and write in
    device memory, what collectives move, the largest copy or relayout]. Counted are operands and results of
    each top-level instruction of the loop's body, the inner loop's `layers` times; what is sliced or updated
    in place, as the slice; what lies in a TPU's VMEM, S(1), not at all, but for collectives."""
    comps = computations(hlo)
    def arrays(kind):
        """[(bytes, in device memory?)] of a type."""
        found = re.findall(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]((?:\{[^}]*\})?)", kind)
        return [(math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) // 8, "S(" not in layout)
                for bits, dims, layout in found]
    def size(comp, name):
        return arrays(comps[comp][name][0])[0][0]
    def read(comp, user, value):
        """Bytes that an instruction reads of one of its operands."""
        _, op, operands, calls, _ = comps[comp][user]
        if op == "fusion":
            return sum(used(calls, name) for name, (_, inner, *_, number) in comps[calls].items()
                       if inner == "parameter" and operands[int(number)] == value)
        if op == "bitcast":
            return used(comp, user)
        if op in ("dynamic-slice", "slice", "gather") and value == operands[0]:
            return size(comp, user)
        return 0 if op == "dynamic-update-slice" and value == operands[0] else size(comp, value)
    def used(comp, value):
        """Bytes of a value inside a fusion that are read: all if it is the result."""
        reads = [read(comp, user, value) for user, i in comps[comp].items() if value in i[2]]
        return min(sum(reads), size(comp, value)) if reads else size(comp, value)
    def written(comp, name):
        """Bytes of each result that are written."""
        kind, op, operands, calls, _ = comps[comp][name]
        if op == "tuple":
            return [n for operand in operands for n in written(comp, operand)]
        if op == "fusion":
            return written(calls, list(comps[calls])[-1])
        if op == "bitcast":
            return written(comp, operands[0])
        return [size(comp, operands[1])] if op == "dynamic-update-slice" else [arrays(kind)[0][0]]
    def walk(comp):
        total = np.zeros(3)
        moves = {"copy", "copy-start", "transpose", "reshape", "slice", "dynamic-slice", "convert"}
        free = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
        for name, (kind, op, operands, calls, _) in comps[comp].items():
            types = [arrays(comps[comp][o][0]) for o in operands]
            inside = {inner[1] for inner in comps[calls].values()} if op == "fusion" else {op}
            if op == "while":
                more = walk(calls)
                total = np.append(total[:2] + layers * more[:2], max(total[2], more[2]))
            elif op.startswith(("all-", "reduce-scatter", "collective-")) and not op.endswith("-done"):
                total[:2] += sum(n for array in (arrays(kind), *types) for n, _ in array)
            elif op.endswith("-start"):
                total[0] += sum(n * here for n, here in arrays(kind))
            elif op not in free and not op.endswith("-done"):
                total[0] += sum(read(comp, name, o) for o, array in zip(operands, types) if array[0][1])
                total[0] += sum(n * here for n, (_, here) in zip(written(comp, name), arrays(kind)))
            if inside & moves and inside <= moves | free:
                total[2] = max(total[2], max(n * here for n, here in arrays(kind)))
        return total
    loops = [calls for _, op, _, calls, _ in comps[list(comps)[-1]].values() if op == "while"]
    return max(map(walk, loops), key=lambda total: total[0])
