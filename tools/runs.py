"""Run `train.py` as a user does, and keep the metrics that plots need."""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import train
from infra.host.console import check
from infra.run.log import read_jsonl
from tools import plot
from tools.arguments import parser_of

# ---------------------------------------------------------------- runs
TRAIN = Path(train.__file__)
# The metrics to keep of each row, whether it belongs to a step or to an evaluation.
KEPT = "step reward/mean solved eval/solved eval/stderr len/answer entropy time/step_s".split()


def words(flags: dict) -> list[str]:
    """Format flags as words of a command line, with `=`: a value may be empty or begin with -."""
    return [f"--{name}={value}" for name, value in flags.items()]


def tiny_flags(model: str) -> dict:
    """Returns the flags that `--model tiny` sets, for GRPO from a checkpoint: no supervised steps,
    and no checkpoint before the end."""
    return train.TINY | {"model": model, "sft_steps": 0, "save_every": 0}


def run_train(flags: dict) -> None:
    """Run `train.py` and print its output. If the run fails, exit with its exit code."""
    command = [sys.executable, str(TRAIN), *words(flags)]
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


def read_rows(out: str) -> list[dict]:
    """Read a run's metrics. Returns rows with the metrics in KEPT and with `seconds`, the time of
    all steps so far."""
    rows = []
    seconds = 0.0
    for row in read_jsonl(f"{out}/metrics.jsonl"):
        # An evaluation is a row of its own, without a time.
        seconds += row.get("time/step_s") or 0.0
        kept = {name: row[name] for name in KEPT if name in row}
        rows.append(kept | {"seconds": seconds})
    return rows


def write_rows(path: str, rows: list[dict]) -> None:
    """Write rows to a .jsonl file, with numbers as short as `tools/plot.py --copy` writes them."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(plot.short_line(row) for row in rows))


def final_solved(rows: list[dict]) -> float:
    """Returns the fraction of held-out questions solved in a run's last evaluation."""
    return [row["eval/solved"] for row in rows if "eval/solved" in row][-1]


def median_seconds(rows: list[dict]) -> float:
    """Returns the median seconds of a run's steps. The first step, which compiles, has little
    effect on a median."""
    return statistics.median(row["time/step_s"] for row in rows if "time/step_s" in row)


# ---------------------------------------------------------------- the command line
def flags_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags of a tool that trains from a checkpoint, seed by seed."""
    parser = parser_of(description)
    parser.add_argument("--model", required=True, help="the checkpoint: a Hugging Face directory")
    parser.add_argument("--out", required=True, help="the directory for the runs and their rows")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of questions and sampling")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Parse the seeds, and check the directories. Exits with code 2 on a mistake."""
    seeds = args.seeds.split(",")
    is_list = all(seed.isdecimal() for seed in seeds)
    check(is_list, f"seeds {args.seeds} must be numbers, as in 1,2,3")
    args.seeds = [int(seed) for seed in seeds]
    check(os.path.isdir(args.model), f"model {args.model} is not a directory")
    # An existing directory may hold runs of other weights, or of code that has changed since.
    check(not os.path.exists(args.out), f"out = {args.out} exists; choose another, or remove it")
