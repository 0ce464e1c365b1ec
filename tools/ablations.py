"""Ablations: run the GRPO steps of the embedded default, each time with one choice changed.

    python train.py --steps 0 --sft_steps 80 --out out/cold
    python tools/ablations.py --model out/cold/final --out out/ablations

Writes OUT/rows/VARIANT-seedN.jsonl, with one row per step and one per evaluation, and prints each
variant's final accuracy.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infra.host.console import check, say
from tools import runs

# The flags that each variant changes. The default has advantage grpo, loss_agg token and
# clip_high 0.28.
VARIANTS = {
    "default": {},
    # advantage: r - mean, not divided by the standard deviation | r - mean of the other answers
    "drgrpo": {"advantage": "drgrpo"},
    "rloo": {"advantage": "rloo"},
    # loss: the mean over each answer's tokens, then over answers | sum / max_answer
    "sequence": {"loss_agg": "sequence"},
    "constant": {"loss_agg": "constant"},
    # symmetric clipping: the upper bound equals the lower one
    "clip_high_0.2": {"clip_high": 0.2},
    # int8 rollouts, with the importance weights that correct for them | without these weights
    "int8": {"rollout_dtype": "int8"},
    "int8_is_cap_0": {"rollout_dtype": "int8", "is_cap": 0},
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. A mistake prints one line and exits with code 2."""
    parser = runs.flags_parser(__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="a list: a,b,c; default all")
    args = parser.parse_args(argv)
    args.variants = args.variants.split(",")
    unknown = set(args.variants) - VARIANTS.keys()
    check(not unknown, f"unknown variants {sorted(unknown)}; there are {', '.join(VARIANTS)}")
    runs.check_flags(args)
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    solved = {variant: [] for variant in args.variants}
    for seed in args.seeds:
        for variant in args.variants:
            name = f"{variant}-seed{seed}"
            out = f"{args.out}/{name}"
            flags = runs.tiny_flags(args.model) | VARIANTS[variant]
            runs.run_train(flags | {"seed": seed, "out": out})
            # Ablations do not compare times.
            timed = {"time/step_s", "seconds"}
            rows = [
                {key: value for key, value in row.items() if key not in timed}
                for row in runs.read_rows(out)
            ]
            runs.write_rows(f"{args.out}/rows/{name}.jsonl", rows)
            solved[variant].append(runs.final_solved(rows))
    for variant, fractions in solved.items():
        shown = ", ".join(f"{fraction:.1%}" for fraction in fractions)
        say(f"{variant:14} held-out questions solved, by seed: {shown}")


if __name__ == "__main__":
    main(sys.argv[1:])
