"""Compile the update for absent devices, and print facts about the compiled programs as JSON:

    python -m tests.aot_update 0.5B h100-8 cudnn 8,16,32

The size is one of tools/sizes.py. Rows have 2,560 tokens, which no matrix of these models has as a
side, so that an array [2560, 2560] is a mask. Tests run this in a process of its own.
"""

import json
import re
import sys
from collections import Counter

import train
from infra.update import fit, packing
from tools import absent_devices
from tools.hlo import array_sizes
from tools.sizes import model_of_size

COLLECTIVE = (
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def facts(text: str, vocab: int, width: int) -> dict:
    """Returns facts about a compiled program: the bytes of the largest collective of each kind, the
    calls of cuDNN with their masks, the tokens of the largest array of logits, and the number of
    float32 masks. width: tokens of a row."""
    largest = Counter()
    for result, op in re.findall(COLLECTIVE, text):
        size = max(size for size, _ in array_sizes(result))
        largest[op] = max(largest[op], size)
    # The most tokens of any array [tokens, vocabulary], where a device may have a share of either.
    beside_vocab = 0
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)}
    for shape in shapes:
        shares = [n for n in shape if n > 4096 and vocab % n == 0]
        if shares:
            others = [n for n in shape if n not in shares]
            beside_vocab = max([beside_vocab, *others])
    return {
        "largest": largest,
        "masks": Counter(re.findall(r'"mask_type": ?"(\w+)"', text)),
        "cudnn": Counter(re.findall(r'custom_call_target="(__cudnn\$\w+)"', text)),
        "beside_vocab": beside_vocab,
        "float32_masks": len(re.findall(rf"f32\[(?:\d+,)*{width},{width}\]", text)),
    }


def main(size: str, device_type: str, attention: str, micro_batches: str) -> None:
    flags = ["--model", size, "--max_prompt", "1024", "--max_answer", "1536"]
    cfg = train.parse([*flags, "--attention", attention])
    mesh = train.make_mesh(cfg.mesh, absent_devices.of_kind(device_type))
    cfg = train.resolve(cfg, mesh)
    model_cfg = model_of_size(size)
    shape = packing.row_shape(cfg.max_prompt + cfg.max_answer, cfg, model_cfg, mesh)
    texts = []

    def compile(lowered, mesh):
        gib, program = fit.compiled_gib(lowered, mesh)
        texts.append(program.as_text() if program else "")
        return gib, program

    gib = {}
    for n in map(int, micro_batches.split(",")):
        update = n, shape, cfg, model_cfg, mesh, train.UPDATE
        gib[n], _ = fit.update_gib(*update, compile=compile)
    # The last two programs are the gradients and the optimizer step of the last micro-batch.
    print(json.dumps({"gib": gib, **facts(texts[-2], model_cfg.V, shape.width)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
