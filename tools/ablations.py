"""What a choice in the loss does: the embedded default's GRPO from one checkpoint, one flag changed.

    python train.py --steps 0 --sft_steps 80 --out out/cold
    python tools/ablations.py --model out/cold/final --out out/ablations

Writes OUT/VARIANT-seedN.jsonl, a row a step and a row an evaluation, and prints what each ends at.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infra.log import check, say
from tools import runs

# What is changed of the default, which has advantage grpo, loss_agg token, clip_high 0.28.
VARIANTS = {
    "default": {},
    "drgrpo": {"advantage": "drgrpo"},
    "rloo": {"advantage": "rloo"},
    "sequence": {"loss_agg": "sequence"},
    "constant": {"loss_agg": "constant"},
    "clip_high_0.2": {"clip_high": 0.2},
    "int8": {"rollout_dtype": "int8"},
    "int8_is_cap_0": {"rollout_dtype": "int8", "is_cap": 0},
}


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits 2, with one line, for a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.error = lambda message: check(False, f"{message}; see --help")
    parser.add_argument("--model", required=True, help="the checkpoint: a Hugging Face directory")
    parser.add_argument("--out", required=True, help="where runs and their rows go")
    parser.add_argument("--seeds", default="1,2,3", help="of questions and sampling")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="some of these")
    args = parser.parse_args(argv)
    args.seeds = runs.seeds_of(args.seeds)
    args.variants = args.variants.split(",")
    unknown = ", ".join(set(args.variants) - VARIANTS.keys())
    check(not unknown, f"no variant {unknown}; there are {', '.join(VARIANTS)}")
    check(os.path.isdir(args.model), f"model {args.model} is not a directory")
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    solved = {variant: [] for variant in args.variants}
    for seed in args.seeds:
        for variant in args.variants:
            name = f"{args.out}/{variant}-seed{seed}"
            flags = runs.tiny_flags(args.model) | VARIANTS[variant]
            runs.run_train(flags | {"seed": seed, "out": name})
            rows = runs.read_rows(name)
            runs.write_rows(f"{name}.jsonl", rows)
            solved[variant].append(runs.final_solved(rows))
    for variant, fractions in solved.items():
        shown = ", ".join(f"{fraction:.1%}" for fraction in fractions)
        say(f"{variant:14} held-out questions solved, by seed: {shown}")


if __name__ == "__main__":
    main(sys.argv[1:])
