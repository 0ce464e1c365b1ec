"""Print a run's answers over its steps, side by side, from its evals.jsonl and samples.jsonl.

python tools/samples.py out/arith-tiny
python tools/samples.py out/arith-tiny --steps 80,160 --questions 10

The first held-out questions of each set come first, with their answers in several evaluations, each
marked right or wrong. Training questions follow, with their sampled answers and rewards.
"""

import shutil
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.host.console import check, open_streams, readable
from infra.run.log import read_jsonl
from tools.arguments import check_at_least, check_is_here, parser_of

# Minimum characters per column: a terminal of 80 characters has room for two columns.
MIN_WIDTH = 26
GAP = "  "


# ---------------------------------------------------------------- what to show
def spread_out(steps: list[int], n: int) -> list[int]:
    """Choose up to n of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= n:
        return steps
    return [steps[i * (len(steps) - 1) // (n - 1)] for i in range(n)]


def choose_steps(rows: list[dict], asked: str, n: int) -> list[int]:
    """Choose the steps to show: those of `asked` that have rows, or else up to n steps."""
    available = sorted({row["step"] for row in rows})
    if asked:
        wanted = [word.strip() for word in asked.split(",")]
        return [step for step in available if str(step) in wanted]
    return spread_out(available, n)


def first_questions(rows: list[dict], n: int) -> list[dict]:
    """The rows of the first n questions of each set of an evaluation."""
    questions = {}
    for row in rows:
        questions.setdefault(row["set"], {})[row["question"]] = None
    firsts = {name: set(list(of_set)[:n]) for name, of_set in questions.items()}
    return [row for row in rows if row["question"] in firsts[row["set"]]]


def verdict(row: dict) -> str:
    """Returns `right` or `wrong` for an evaluation, else the reward and each function's score."""
    if "set" in row:
        return "right" if row["solved"] >= 1 else "wrong"
    text = f"reward {row['reward']:.2f}"
    if row.get("truncated"):
        return f"{text}, truncated"
    names = [name for name in row if name.startswith("reward/")]
    scores = [f"{name.removeprefix('reward/')} {row[name]:.2f}" for name in names]
    return f"{text}: {', '.join(scores)}" if scores else text


# ---------------------------------------------------------------- as text
def wrapped(text: str, width: int) -> list[str]:
    """Split a text into its lines, and wrap the lines that are too wide."""
    lines = []
    for line in readable(text).split("\n"):
        lines += textwrap.wrap(line, width) or [""]
    return lines


def columns_in(width: int) -> int:
    """Returns the number of answers that fit side by side."""
    return (width + len(GAP)) // (MIN_WIDTH + len(GAP))


def print_question(rows: list[dict], width: int) -> None:
    """Print a question and its reference, and below them the answer of each row in columns."""
    asked = f"{rows[0]['question']}\nreference: {rows[0]['reference']}"
    print("\n".join(wrapped(asked, width)))
    # Answers that do not fit beside the others are printed below them.
    n = min(len(rows), columns_in(width))
    column_width = (width - len(GAP) * (n - 1)) // n
    for first in range(0, len(rows), n):
        columns = []
        for row in rows[first : first + n]:
            head = f"step {row['step']}: {verdict(row)}"
            columns.append(wrapped(f"{head}\n{row['answer']}", column_width))
        for cells in zip_longest(*columns, fillvalue=""):
            print(GAP.join(cell.ljust(column_width) for cell in cells).rstrip())
        print()


def print_rows(title: str, rows: list[dict], steps: list[int], width: int) -> None:
    """Print each question of these steps, with its answers in all of them."""
    if not steps:
        return
    print(f"{title}\n")
    # Two sets may ask the same question.
    by_question = {}
    for row in rows:
        if row["step"] in steps:
            by_question.setdefault((row.get("set"), row["question"]), []).append(row)
    for answers in by_question.values():
        print_question(answers, width)


def main(argv: list[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("out", metavar="OUT", help="a run's directory")
    parser.add_argument(
        "--steps", default="", help="steps, such as 80,160; default: evenly spaced, as many as fit"
    )
    parser.add_argument(
        "--questions", type=int, default=3, help="held-out questions of each set (default 3)"
    )
    args = parser.parse_args(argv)
    check_at_least(args, 0, "questions")
    check_is_here(args.out)
    evaluated = first_questions(read_jsonl(f"{args.out}/evals.jsonl"), args.questions)
    trained = read_jsonl(f"{args.out}/samples.jsonl")
    # Without a terminal, as in a pipe, the width is 80.
    width = max(2 * MIN_WIDTH + len(GAP), shutil.get_terminal_size().columns)
    eval_steps = choose_steps(evaluated, args.steps, columns_in(width))
    train_steps = choose_steps(trained, args.steps, columns_in(width))
    check(
        evaluated or trained,
        f"{args.out} is not the directory of a run, or its first step has not ended: it has no "
        "answers in evals.jsonl or samples.jsonl",
    )
    available = sorted({row["step"] for row in evaluated or trained})
    has_steps = eval_steps or train_steps
    check(has_steps, f"steps = {args.steps}: no answers of these steps; try some of {available}")
    # Every evaluation asks the same questions. In training, a question is asked once per epoch.
    print_rows("held-out questions", evaluated, eval_steps, width)
    print_rows("training questions", trained, train_steps, width)


if __name__ == "__main__":
    # A reader that closes the pipe early, as head does, is not an error.
    open_streams()
    main(sys.argv[1:])
