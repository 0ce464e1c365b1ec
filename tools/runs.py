"""Runs of `train.py` as a user starts them, and what a picture needs of their metrics."""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import train
from infra.log import check, read_jsonl
from tools import plot

# ---------------------------------------------------------------- runs
TRAIN = Path(train.__file__)
# A row of a step, or of an evaluation, keeps these.
KEPT = ("step", "reward/mean", "solved", "eval/solved", "len/answer", "entropy", "time/step_s")


def words(flags: dict) -> list[str]:
    """Flags as words of a command line. `=` lets a value be empty, or begin with a minus."""
    return [f"--{name}={value}" for name, value in flags.items()]


def tiny_flags(model: str) -> dict:
    """The embedded default's GRPO, from a checkpoint: flags that `--model tiny` would set."""
    return train.TINY | {"model": model, "sft_steps": 0, "save_every": 0}


def run_train(flags: dict) -> None:
    """Run `train.py`, whose lines are printed; one that fails ends this process as it ended."""
    command = [sys.executable, str(TRAIN), *words(flags)]
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


def read_rows(out: str) -> list[dict]:
    """The rows of a run's metrics, of which KEPT stay, and `seconds`: the sum of its steps."""
    rows = []
    seconds = 0.0
    for row in read_jsonl(f"{out}/metrics.jsonl"):
        # Evaluations are rows of their own, whose time does not count.
        seconds += row.get("time/step_s") or 0.0
        kept = {name: row[name] for name in KEPT if name in row}
        rows.append(kept | {"seconds": seconds})
    return rows


def write_rows(path: str, rows: list[dict]) -> None:
    """Rows as a .jsonl file, numbers as short as `tools/plot.py --copy` writes them."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(plot.short_line(row) for row in rows))


def final_solved(rows: list[dict]) -> float:
    """The fraction of held-out questions solved in a run's last evaluation."""
    return [row["eval/solved"] for row in rows if "eval/solved" in row][-1]


def median_seconds(rows: list[dict]) -> float:
    """Of a run's steps; the first, which compiles, does not move it."""
    return statistics.median(row["time/step_s"] for row in rows if "time/step_s" in row)


# ---------------------------------------------------------------- the command line
def flags_parser(description: str) -> argparse.ArgumentParser:
    """The flags of a tool that trains from a checkpoint, seed by seed."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.formatter_class = argparse.RawTextHelpFormatter
    # One line and exit code 2, as for every mistake.
    parser.error = lambda message: check(False, f"{message}; see --help")
    parser.add_argument("--model", required=True, help="the checkpoint: a Hugging Face directory")
    parser.add_argument("--out", required=True, help="where runs and their rows go")
    parser.add_argument("--seeds", default="1,2,3", help="of questions and sampling")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Make a list of the seeds. Exits 2 for a mistake."""
    seeds = args.seeds.split(",")
    is_list = all(seed.isdecimal() for seed in seeds)
    check(is_list, f"seeds {args.seeds} are not numbers, as in 1,2,3")
    args.seeds = [int(seed) for seed in seeds]
    check(os.path.isdir(args.model), f"model {args.model} is not a directory")
