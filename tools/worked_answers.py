"""Copy questions whose answers are worked out as in GSM8K, for a small model to imitate.

    python tools/worked_answers.py gsm8k OUT --most_steps 2

The first argument is a data set with training and held-out questions, as for train.py's `--data`.
Writes OUT/train.jsonl and OUT/test.jsonl with columns `question` and `answer` alone. GSM8K writes
each step of an answer twice, as in `3*4=<<3*4=12>>12`; the part in `<< >>` is removed. Questions
with no step, or with more than `--most_steps`, are left out.
"""

import os
import re
import sys
from pathlib import Path

# Python looks for modules beside this script; ours are in the directory above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.data.questions import has_held_out, load_rows
from infra.host.console import check, exit_on
from tools.arguments import parser_of
from tools.question_files import write_sets

# Each step of an answer has one such part, as in 3*4=<<3*4=12>>12.
STEP = re.compile(r"<<[^<>]*>>")


def plain_rows(rows: list[dict], most_steps: int) -> list[dict]:
    """Returns the questions of at most most_steps steps, without the parts in << >>."""
    return [
        {"question": row["question"], "answer": STEP.sub("", row["answer"])}
        for row in rows
        if 1 <= len(STEP.findall(row["answer"])) <= most_steps
    ]


@exit_on(OSError, "a file cannot be written; fix that, or choose another OUT")
def main(argv: list[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", metavar="DATA", help="gsm8k, a directory or a hub id")
    parser.add_argument("out", metavar="OUT", help="the directory to make")
    parser.add_argument("--most_steps", type=int, default=2, help="of an answer; default 2")
    columns = "names of the columns, if unusual: question=...,answer=..."
    parser.add_argument("--columns", default="", help=columns)
    args = parser.parse_args(argv)
    check(not os.path.exists(args.out), f"{args.out} exists; choose another, or remove it")
    check(args.most_steps > 0, f"most_steps = {args.most_steps} leaves no question; give 1 or more")
    check(
        has_held_out(args.data),
        f"{args.data} has no held-out questions; give gsm8k, or a directory or hub id without @",
    )
    sets = {}
    for name, held_out in (("train", False), ("test", True)):
        rows = load_rows(args.data, held_out, args.columns)
        sets[name] = plain_rows(rows, args.most_steps)
        check(sets[name], f"{args.data} has no answer of 1 to {args.most_steps} steps in << >>")
    write_sets(args.out, **sets)


if __name__ == "__main__":
    main(sys.argv[1:])
