"""Make the two-digit sums that SmolLM2 learns in assets/learning.md.

    python tools/sums.py OUT [--example]

Writes OUT/train.jsonl with 3,995 questions and OUT/test.jsonl with 100 others. With --example, each
question follows a worked example, as earlier turns of the chat.
"""

import itertools
import os
import random
import sys
from pathlib import Path

# Python looks for modules beside this script; ours are in the directory above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.host.console import check, exit_on
from tools.arguments import parser_of
from tools.question_files import write_sets

HELD_OUT = 100
SEED = 1


def sums() -> list[dict]:
    """All pairs of two-digit numbers, in a random order. a + b and b + a are one question."""
    rng = random.Random(SEED)
    pairs = [*itertools.combinations_with_replacement(range(10, 100), 2)]
    rng.shuffle(pairs)
    # Either number may come first.
    pairs = [rng.sample(pair, 2) for pair in pairs]
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def after_example(row: dict) -> dict:
    """Put a worked example before a question, as a user's and an assistant's message."""
    example = {"user": "What is 23 + 45?", "assistant": "23 + 45 = 68"}
    messages = [{"role": role, "content": text} for role, text in example.items()]
    messages.append({"role": "user", "content": row["question"]})
    return {"messages": messages, "answer": row["answer"]}


@exit_on(OSError, "a file cannot be written; fix that, or choose another OUT")
def main(argv: list[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("out", metavar="OUT", help="the directory to make")
    parser.add_argument("--example", action="store_true", help="put an example before each sum")
    args = parser.parse_args(argv)
    check(not os.path.exists(args.out), f"{args.out} exists; choose another, or remove it")
    rows = sums()
    if args.example:
        rows = [after_example(row) for row in rows]
    write_sets(args.out, train=rows[HELD_OUT:], test=rows[:HELD_OUT])


if __name__ == "__main__":
    main(sys.argv[1:])
