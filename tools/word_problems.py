"""Make multi-step word problems in the form of GSM8K, and a Qwen2 with 31M random parameters.

    python tools/word_problems.py --tokenizer path/to/Qwen2.5-0.5B-Instruct --out out/words

Writes OUT/train.jsonl, OUT/test.jsonl and OUT/model, which gets the tokenizer of that directory.
The `answer` of a row is worked out in words, as in GSM8K. Its `demonstration`, for supervised
steps, has only the calculations, and two in three demonstrations are wrong.
"""

import os
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infra.data import hf
from infra.data.chat import load_tokenizer
from infra.data.tiny import TINY_MODEL
from infra.host import files
from infra.host.console import check, exit_on
from infra.host.files import CheckpointError
from tools.arguments import check_at_least, parser_of
from tools.question_files import write_sets

NAMES = ["Mia", "Tom", "Anna", "Ben", "Emma", "Jack", "Lily", "Sam"]
THINGS = [("boxes", "pens"), ("bags", "apples"), ("shelves", "books"), ("packs", "cards")]
# How the number of items changes: the verb in the question, the verb in the answer, and the sign.
CHANGES = [
    ("buys", "buying", "+"),
    ("finds", "finding", "+"),
    ("loses", "losing", "-"),
    ("sells", "selling", "-"),
]
TRAINING = 20000
HELD_OUT = 500
# One in RIGHT_EVERY demonstrations is right.
RIGHT_EVERY = 3

# The tiny model's config.json with other sizes. Most parameters are in the embedding, which has
# Qwen2.5's vocabulary.
MODEL = TINY_MODEL | dict(
    vocab_size=151936,
    hidden_size=192,
    eos_token_id=151645,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=6,
)


# ---------------------------------------------------------------- problems
def demonstration(steps: list[tuple[str, int]], start: int, first_sign: str) -> str:
    """Returns the lines `3*4=12`, `12+5=17`, `#### 17`, with first_sign as the first sign."""
    lines = []
    total = start
    for sign, number in [(first_sign, steps[0][1]), *steps[1:]]:
        result = {"*": total * number, "+": total + number, "-": total - number}[sign]
        lines.append(f"{total}{sign}{number}={result}")
        total = result
    return "\n".join([*lines, f"#### {total}"])


def problem(rng: random.Random, is_right: bool) -> dict:
    """Returns a row. Unless is_right, the first step of its demonstration adds instead of
    multiplying."""
    name = rng.choice(NAMES)
    groups, items = rng.choice(THINGS)
    n_groups = rng.randint(2, 6)
    each = rng.randint(3, 6)
    steps = [("*", each)]
    question = f"{name} has {n_groups} {groups} of {each} {items}."
    total = n_groups * each
    worked = f"{name} has {n_groups}*{each}=<<{n_groups}*{each}={total}>>{total} {items}.\n"
    for verb, doing, sign in rng.sample(CHANGES, rng.randint(1, 2)):
        # Losses are so small that two of them leave a positive number, even in a wrong
        # demonstration, which begins with a smaller total.
        number = rng.randint(1, 9 if sign == "+" else (n_groups + each - 1) // 2)
        steps.append((sign, number))
        question += f" {name} {verb} {number}."
        result = total + number if sign == "+" else total - number
        term = f"{total}{sign}{number}"
        worked += f"After {doing} {number} there are {term}=<<{term}={result}>>{result}.\n"
        total = result
    return {
        "question": f"{question} How many {items} are there?",
        "answer": f"{worked}#### {total}",
        "demonstration": demonstration(steps, n_groups, "*" if is_right else "+"),
    }


def problems(seed: int) -> tuple[list[dict], list[dict]]:
    """Returns (rows to train on, held-out rows). No question occurs twice."""
    rng = random.Random(seed)
    rows = {}
    while len(rows) < TRAINING + HELD_OUT:
        row = problem(rng, is_right=len(rows) % RIGHT_EVERY == 0)
        rows.setdefault(row["question"], row)
    rows = list(rows.values())
    return rows[:TRAINING], rows[TRAINING:]


# ---------------------------------------------------------------- files
def write_model(directory: str, tokenizer: str, seed: int) -> None:
    """Write a model that transformers can load, with random weights and the tokenizer of another
    directory."""
    os.makedirs(directory)
    shutil.copy(f"{tokenizer}/tokenizer.json", directory)
    special_tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer_class = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files.write_json(f"{directory}/tokenizer_config.json", tokenizer_class | special_tokens)
    hf.write_random(directory, MODEL, seed)


@exit_on((OSError, CheckpointError), "a file cannot be used; fix that, or choose another --out")
def main(argv: list[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", required=True, help="a directory with a Qwen2 tokenizer")
    parser.add_argument("--out", required=True, help="the directory to make")
    parser.add_argument("--seed", type=int, default=1, help="seed of problems and weights")
    args = parser.parse_args(argv)
    check_at_least(args, 0, "seed")
    check(not os.path.exists(args.out), f"out = {args.out} exists; choose another, or remove it")
    tokenizer = load_tokenizer(args.tokenizer)
    stop_id = MODEL["eos_token_id"]
    check(
        stop_id in tokenizer.stop_ids,
        f"this tokenizer ends answers with tokens {tokenizer.stop_ids}, not with {stop_id}, as "
        "Qwen2.5's does",
    )

    training, held_out = problems(args.seed)
    write_model(f"{args.out}/model", args.tokenizer, args.seed)
    write_sets(args.out, train=training, test=held_out)


if __name__ == "__main__":
    main(sys.argv[1:])
