"""Data sets as rows of questions, with their prompts as token ids.

A row is a dict of all columns of the data. Its `question`, `answer` and optional `demonstration`
are strings. Reward functions get the other columns as they are in the data. Equal rows are one
object (see `share_repeats`), so functions key their results by id(row), and do the work once.
"""

import decimal
import hashlib
import itertools
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from infra.data import columns, hub
from infra.data.answers import final_number, is_worked_out
from infra.data.chat import HALF_CHARACTER, Tokenizer
from infra.data.tiny import arith
from infra.host.console import check, exit_on, first_line, say
from infra.host.processes import all_gather_processes, together

# ---------------------------------------------------------------- rows of files and of the hub
# {extension of a file of questions: name of its loader in `datasets`}. JSON files are read here
# instead: an error message can then name the line, and no integer is rounded.
FILE_KINDS = {".jsonl": "", ".json": "", ".csv": "csv", ".parquet": "parquet"}


def is_file(name: str) -> bool:
    """Whether --data names a file."""
    return os.path.splitext(name)[1] in FILE_KINDS


def has_held_out(name: str) -> bool:
    """Whether --data names a set with held-out questions: neither a file nor one split of a set."""
    return not is_file(name) and "@" not in name


def set_name(data: str) -> str:
    """A short name for a data set: its last part, without the extension of a file."""
    name = os.path.basename(data.rstrip("/"))
    name = os.path.splitext(name)[0] if is_file(data) else name
    # A config or a split follows a colon or an @. The name goes into paths, which should contain
    # neither.
    return re.sub("[:@]", "-", name)


def load_rows(
    name: str,
    held_out: bool,
    named: str = "",
    refused: str = HALF_CHARACTER,
    is_other_set: bool = False,
) -> list[dict]:
    """The rows of a data set: arith, gsm8k, a file, a directory, or a data set of the hub.

    named: --columns, for data whose columns have unusual names. is_other_set: whether this is not
    --data, so that `named` counts only where it fits. refused: a regular expression that no text
    may match. Exits with code 2 if the data cannot be loaded, or if a row of a file is malformed.
    Malformed rows of a directory or of the hub are skipped.
    """
    if name == "arith":
        return arith(held_out)
    is_there = os.path.isfile(name)
    check(is_there or not is_file(name), f"{name} does not exist, or is not a file")
    if name.endswith(".jsonl"):
        numbered = read_jsonl(name)
    elif name.endswith(".json"):
        numbered = enumerate(share_repeats(read_json(name)), 1)
    else:
        numbered = enumerate(read_with_datasets(name, held_out, named), 1)
    numbered = list(numbered)
    check(numbered, f"{name} is empty")
    # Look at many rows, because the first row may lack a value.
    first = [row for _, row in numbered[:1000]]
    with exit_on(ValueError, f"{name}: --columns cannot be used"):
        chosen = columns.choose_columns(first, named, is_other_set)
    # {id of a row as it was read: the row to return, or None if it is malformed}
    read = {}
    fault = ""
    for number, row in numbered:
        if id(row) in read:
            continue
        read[id(row)] = None
        try:
            read[id(row)] = check_row(columns.rename(row, chosen), refused)
        except Exception as e:
            # Users can fix their own file. In a directory or on the hub, skip such rows.
            check(not is_there, bad_row(name, number, row, e))
            fault = fault or f"row {number}: {first_line(e)}"
    rows = [read[id(row)] for _, row in numbered if read[id(row)]]
    if fault:
        found = ", ".join(map(str, first[0]))
        check(
            rows,
            f"{name} has no question with an answer ({fault}); the columns are {found}; give "
            "--columns question=...,answer=...",
        )
        say(f"{name}: {len(numbered) - len(rows)} rows are skipped, such as {fault}")
    if not columns.is_clear(first, chosen):
        say(f"{name}: " + ", ".join(f"{ours} = {theirs}" for ours, theirs in chosen.items()))
    return rows


def read_jsonl(path: str) -> Iterator[tuple[int, dict]]:
    """Yields (line number, row) of a file with one JSON object per line; skips blank lines."""
    with (
        exit_on(Exception, f"{path} cannot be loaded"),
        # utf-8-sig is UTF-8, with or without a byte order mark.
        open(path, encoding="utf-8-sig", errors="surrogateescape") as f,
    ):
        lines = f.readlines()
    rows = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and text not in rows:
            place = f"{path} line {number}"
            # This raises if the line was not UTF-8, so that the message names the line.
            with exit_on(UnicodeEncodeError, f"{place} is not UTF-8; convert the file"):
                line.encode()
            with exit_on(Exception, f"{place} is not JSON: {line[:50]!r}"):
                rows[text] = json.loads(text)
        if text:
            yield number, rows[text]


def read_json(path: str) -> list:
    """The rows of a file that holds a list of JSON objects, or one object per line."""
    with exit_on(Exception, f"{path} cannot be loaded"):
        with open(path, encoding="utf-8-sig") as f:
            text = f.read()
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            lines = [line for line in text.split("\n") if line.strip()]
            if len(lines) < 2 or not lines[0].rstrip().endswith("}"):
                raise
            content = [json.loads(line) for line in lines]
    kind = type(content).__name__
    check(kind == "list", f"{path} holds a {kind}, not a list of rows")
    return content


def read_with_datasets(name: str, held_out: bool, named: str) -> list[dict]:
    """The rows of a file, or of one split of a directory or of a data set on the hub. A name may
    end with the data set's config and split, as in openai/gsm8k:main@test. The default split is
    test for held-out questions, and train for others. named: --columns."""
    kind = FILE_KINDS.get(os.path.splitext(name)[1])
    endings = ", ".join(FILE_KINDS)
    check(kind or not os.path.isfile(name), f"{name} is not a file of questions; try {endings}")
    whole, _, split = name.partition("@")
    is_gsm8k = whole in ("gsm8k", "openai/gsm8k")
    path, _, config = ("openai/gsm8k:main" if is_gsm8k else whole).partition(":")
    # A directory's name may contain `@` or `:`.
    if os.path.isdir(name):
        path, config, split = name, "", ""
    default = "test" if held_out else "train"
    check(kind or path, f"{name} names no data set; try owner/name:config@split")

    def read():
        # `datasets` is slow to import, and not needed for other data.
        import datasets

        datasets.disable_progress_bars()
        try:
            if kind:
                # A file has one split, which `datasets` calls train.
                options = csv_options(named) if kind == "csv" else {}
                found = datasets.load_dataset(kind, data_files=name, split="train", **options)
                # A spreadsheet may end in rows of empty fields.
                return share_repeats(row for row in found if kind != "csv" or any(row.values()))
            found = datasets.load_dataset(path, config or None, split=split or default)
            return share_repeats(found)
        except (datasets.exceptions.DatasetGenerationError, ValueError) as e:
            # A file without rows, and a .csv file without a header.
            empty = "corresponds to no data", "No columns to parse"
            if kind and any(text in f"{e} {e.__cause__}" for text in empty):
                return []
            # A DatasetGenerationError itself does not say what is wrong with the data.
            cause = e if isinstance(e, ValueError) else e.__cause__ or e
            fix = what_to_give(e, name, held_out)
            if not fix:
                raise cause from None
            why = " ".join(str(cause).split())[:300].rstrip(".")
            raise ValueError(f"{why}; give {fix}") from None

    failure = f"{name} cannot be loaded"
    if kind:
        not_utf8 = exit_on(UnicodeDecodeError, f"{name} is not UTF-8; convert the file")
        with exit_on(Exception, failure), not_utf8:
            rows = read()
        if rows and kind == "csv":
            check_fields(name, rows[0])
        return rows
    # A directory takes precedence over a data set of the same name on the hub, as in `datasets`.
    # The directory may exist on some hosts and not on others.
    with together(name):
        if os.path.exists(path):
            with exit_on(Exception, failure):
                return read()
        return hub.ask(name, read, failure)


def check_fields(name: str, row: dict) -> None:
    """Exit with code 2 if the first row of a .csv file shows that its fields were cut wrongly."""
    header = ", ".join(map(str, row))
    # pandas takes surplus fields at the start of a row as its index.
    check(
        "__index_level_0__" not in row,
        f"{name} row 1 has more fields than the header; quote texts that contain commas",
    )
    check(
        len(row) > 1 or not re.search("[;\t]", header),
        f"{name} has one column, {header!r}; separate fields with commas",
    )


def what_to_give(error: Exception, name: str, held_out: bool) -> str:
    """Returns what to give instead of a data set's name, after an error of `datasets`, or ""."""
    whole, _, split = name.partition("@")
    if "Config name is missing" in str(error):
        return f"one as {whole}:CONFIG"
    if "Unknown split" in str(error) and not split:
        return f"--eval_data none or {name}@SPLIT" if held_out else f"{name}@SPLIT"
    # A ValueError comes from the arguments; any other error, from the files. `datasets` reads all
    # files of a directory, whatever the split, and they must have the same columns.
    if os.path.isdir(name) and not isinstance(error, ValueError):
        files = f"--data {name}/FILE --eval_data {name}/OTHER"
        return f"{files}, each by itself, if the files differ in columns or types"
    return ""


def share_repeats(rows: Iterable[dict]) -> list[dict]:
    """Returns the rows, where equal rows are one object. DAPO-Math-17k, for example, has 1.8
    million rows, but only 17 thousand questions: as separate objects, its rows would take tens of
    GB."""
    kept = {}
    # Keep a digest of each row: its text may be much longer.
    digest = partial(hashlib.blake2b, digest_size=16)
    return [kept.setdefault(digest(repr(row).encode()).digest(), row) for row in rows]


def csv_options(named: str) -> dict:
    """Options for pandas: answers stay as written, and only empty fields count as missing."""
    names = [*columns.NAMES["answer"]]
    for pair in named.split(","):
        ours, _, theirs = pair.partition("=")
        # `one+other` joins the texts of two columns.
        if ours.strip() == "answer" or "+" in theirs:
            names += theirs.split("+")
    # A header may have capital letters.
    spell = str.strip, str.capitalize, str.upper
    as_written = {how(name.strip()): str for name in names for how in spell}
    return dict(converters=as_written, keep_default_na=False, na_values=[""])


def bad_row(name: str, number: int, row: Any, error: Exception) -> str:
    """What to tell the user about a malformed row: where it is, what is wrong, and what to do."""
    place = "line" if name.endswith(".jsonl") else "row"
    if isinstance(row, list) and place == "line":
        return f"{name} {place} {number} is a list; if the file is one list, rename it to .json"
    # Any other ValueError already says what is wrong.
    if isinstance(error, ValueError) and "is empty, or not a string" not in str(error):
        return f"{name} {place} {number}: {error}"
    found = f"; the columns are {', '.join(map(str, row))}" if isinstance(row, dict) else ""
    fix = "; if they have unusual names, give --columns"
    if str(error) == "'answer'":
        fix += "; if there are no answers, as for a judge, answer=... may be any column of strings"
    return (
        f"{name} {place} {number} needs a string as question, and a string or number as answer: "
        f"{str(row)[:50]!r}: {first_line(error)}{found}{fix}"
    )


def check_row(row: dict, refused: str = HALF_CHARACTER) -> dict:
    """Returns a copy of the row in which the answer is a string, even if it was a number. Raises an
    error if the row is malformed, or has a text that matches `refused`."""
    # Copy the row; this raises if it is not a mapping.
    row = {**row}
    answer = row["answer"]
    # This excludes bool, a subclass of int, and also 1e999 and NaN, which JSON may contain.
    if type(answer) in (int, float) and math.isfinite(answer):
        row["answer"] = number_text(answer)
    elif isinstance(answer, decimal.Decimal) and answer.is_finite():
        row["answer"] = f"{answer:f}"
    texts = ["question", "answer"]
    # Supervised steps imitate the answer of a row without a demonstration.
    if row.get("demonstration"):
        texts.append("demonstration")
    contents = [(column, row[column]) for column in texts]
    contents += [("messages", turn["content"]) for turn in row.get("prompt_messages", [])]
    for column, text in contents:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{column} = {text!a:.50} is empty, or not a string")
        if found := re.search(refused, text):
            raise ValueError(f"{column} = {text!a:.50} has a special token: {found[0]!a}")
    return row


def number_text(number: int | float) -> str:
    """Write a number in digits, without an exponent: 0.00001 for 1e-05."""
    if isinstance(number, int):
        return str(number)
    # A column of 32-bit numbers holds 0.1 as 0.10000000149011612. Nobody writes so many digits, so
    # return the 0.1 that was meant.
    with np.errstate(over="ignore"):
        short = np.float32(number)
    digits = repr(number).partition("e")[0].replace(".", "").lstrip("-0")
    is_short = float(short) == number and len(digits) > 15 and not number.is_integer()
    return np.format_float_positional(short if is_short else number, trim="0")


# ---------------------------------------------------------------- questions with their prompts
def load_questions(name: str, held_out: bool, tokenizer: Tokenizer, cfg: Any) -> list[dict]:
    """The rows of a data set whose prompts have at most max_prompt tokens. A new column,
    `prompt_ids`, has the token ids of the prompt: the question in the chat template.

    held_out: leave out repeated questions, and keep the first eval_n. Exits with code 2 if no
    prompt is short enough, or if the system prompt contains a special token.
    """
    what = f"{name} (held out)" if held_out else name
    found = re.search(tokenizer.refused, cfg.system)
    check(
        not found,
        f"system = {cfg.system[:50]!r} holds {found and found[0]!r}, a special token of "
        f"{cfg.model}, which would end the system message; leave it out",
    )
    rows = load_rows(name, held_out, cfg.columns, tokenizer.refused, name != cfg.data)
    different = without_repeats(rows)
    prompts = [tokenizer.render(columns.messages_of(row, cfg.system)) for row in different]
    with exit_on(Exception, f"the tokenizer of {cfg.model} cannot encode {what}"):
        encoded = tokenizer.encode(prompts)
    question_of = {
        id(row): row | {"prompt_ids": prompt}
        for row, prompt in zip(different, encoded, strict=True)
        if len(prompt) <= cfg.max_prompt
    }
    questions = [question_of[id(row)] for row in rows if id(row) in question_of]

    # Check that there are questions left.
    shortest = min(map(len, encoded))
    empty = tokenizer.render(columns.messages_of({"question": ""}, cfg.system))
    fixed = len(tokenizer.encode([empty])[0])
    # Even if --system is too long, questions that have their own system message may be left.
    check(
        questions or fixed < cfg.max_prompt,
        f"--system and the chat template alone take {fixed} tokens of max_prompt = "
        f"{cfg.max_prompt}; raise --max_prompt to {shortest} or more, or give a shorter --system",
    )
    check(
        questions,
        f"all {len(rows)} prompts of {what} are longer than max_prompt = {cfg.max_prompt} tokens; "
        f"the shortest has {shortest}; raise --max_prompt",
    )

    skipped = len(rows) - len(questions)
    repeats = 0
    if held_out:
        # A repeat would count as an independent question in the standard error. AIME-2024, for
        # example, has each question 32 times; --eval_samples asks each question several times.
        once = {}
        for row in questions:
            once.setdefault((*row["prompt_ids"], row["answer"]), row)
        repeats = len(questions) - len(once)
        questions = list(once.values())[: cfg.eval_n or None]
    say(f"{what}: {summary(questions, skipped, repeats, cfg)}")
    return questions


def summary(questions: list[dict], skipped: int, repeats: int, cfg: Any) -> str:
    """The number of questions, and what may be a mistake: questions that are skipped because they
    are too long, that are left out because they repeat others, or whose answers may be misread."""
    different = without_repeats(questions)
    text = f"{len(questions)} questions"
    if len(different) < len(questions):
        text += f", {len(different)} of them different"
    if skipped:
        text += f"; {skipped} skipped, longer than max_prompt = {cfg.max_prompt}"
    if repeats:
        text += f"; {repeats} repeats left out (--eval_samples asks a question several times)"
    kinds = {id(row): kind_of_reference(row["answer"]) for row in different}
    counts = Counter(kinds[id(row)] for row in questions)
    if counts["sentence"]:
        text += (
            f"; the answers of {counts['sentence']} questions are sentences without ####, "
            "\\boxed{} or <answer>: their last number counts"
        )
    if counts["other"]:
        text += (
            f"; the answers of {counts['other']} questions are not numbers, so `correct` scores "
            "0: compare formulas with math-verify, and texts with your own reward (README, How to "
            "fork it)"
        )
    return text


def kind_of_reference(answer: str) -> str:
    """How `correct` reads the answer of a row: as a "number"; as a "sentence", whose last number
    counts; or as something "other", which equals no number."""
    if final_number(answer, is_reference=True) is None:
        return "other"
    return "sentence" if is_worked_out(answer) else "number"


def without_repeats(rows: list[dict]) -> list[dict]:
    """The rows without further occurrences of the same object."""
    return list({id(row): row for row in rows}.values())


def examples_to_imitate(questions: list[dict], tokenizer: Tokenizer, cfg: Any) -> list[dict]:
    """The questions that supervised steps can imitate: those whose demonstration, or else answer,
    has at most max_answer tokens. A new column, `demonstration_ids`, has the token ids of that
    text. Returns [] if there are no supervised steps."""
    if cfg.sft_steps == 0:
        return []
    different = without_repeats(questions)
    # The text to imitate ends with the token that ends an answer.
    texts = [(row.get("demonstration") or row["answer"]) + tokenizer.end for row in different]
    with exit_on(Exception, f"the tokenizer of {cfg.model} cannot encode {cfg.data}"):
        encoded = tokenizer.encode(texts)
    example_of = {
        id(row): row | {"demonstration_ids": demonstration}
        for row, demonstration in zip(different, encoded, strict=True)
        if len(demonstration) <= cfg.max_answer
    }
    return [example_of[id(row)] for row in questions if id(row) in example_of]


def say_shared(questions: list[dict], held_out: dict) -> None:
    """Print how many held-out questions are also training questions. held_out: {name of a set: its
    rows}."""
    for name, rows in held_out.items():
        held = {tuple(row["prompt_ids"]) for row in rows}
        asked = (tuple(row["prompt_ids"]) for row in without_repeats(questions))
        if shared := len({prompt for prompt in asked if prompt in held}):
            say(f"{name} (held out): {shared} of {len(held)} questions are also training questions")


# ---------------------------------------------------------------- the same data everywhere
def checksum(rows: list[dict]) -> int:
    """A checksum of the prompts, answers and demonstrations of rows, in the order of the rows."""
    names = "prompt_ids", "answer", "demonstration_ids"
    # Equal rows are one object, so read each object once.
    crc_of = {
        id(row): zlib.crc32(repr([row.get(name) for name in names]).encode())
        for row in without_repeats(rows)
    }
    return zlib.crc32(np.array([crc_of[id(row)] for row in rows], np.uint32))


def check_same_data(questions: list[dict], examples: list[dict], held_out: dict) -> None:
    """Exit with code 2 in all processes unless all have loaded the same data: each machine may have
    its own copy of a file. held_out: {name of a set: its rows}. Every process must call this."""
    held = list(itertools.chain(*held_out.values()))
    own = [len(questions), len(held), checksum([*questions, *examples, *held])]
    found = all_gather_processes(own).tolist()
    different = [i for i, facts in enumerate(found) if facts != found[0]]
    counts = ["{} questions and {} held out (CRC {:x})".format(*facts) for facts in found]
    other = min(different, default=0)
    check(
        not different,
        f"process {other} has different data from process 0: {counts[other]}, and process 0 has "
        f"{counts[0]}; put the same files on every machine",
    )
