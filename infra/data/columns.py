"""Find the question and answer columns of a data set, and read prompts given as messages."""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

# The usual names of columns. If a data set has several of these names, the first one counts: a data
# set with both `answer` and `solution` has the derivation in `solution`. `outer.inner` is the key
# `inner` of the dicts in a column `outer`. `body+question` is two columns with a space between
# them: in some sets of word problems, `body` has the story. In Alpaca's form, `input` may be empty.
NAMES = {
    "question": (
        *("body+question", "question", "problem", "prompt", "query"),
        *("instruction+input", "input", "instruction", "messages", "conversations"),
    ),
    "answer": (
        *("answer", "final_answer", "expected_answer", "ground_truth", "target"),
        *("reward_model.ground_truth", "solution", "response", "completion", "output"),
    ),
}


def choose_columns(rows: Sequence, columns: str, is_other_set: bool = False) -> dict[str, str]:
    """Returns {"question": column, "answer": column} for a data set, given its first rows.

    columns: --columns, such as `question=problem,answer=solution`, which overrides the usual names.
    is_other_set: whether --columns was given for another set, and counts only where it fits.
    If no column is found for `question` or `answer`, that name itself is returned. Raises
    ValueError if `columns` names a column that the rows do not have.
    """
    chosen = {}
    pairs = columns.split(",") if columns else []
    for pair in pairs:
        ours, _, theirs = pair.strip().partition("=")
        if has_column(rows, theirs) or has_value(rows, theirs):
            chosen[ours] = theirs
        elif not is_other_set and isinstance(rows[0], dict):
            raise ValueError(f"there is no column {theirs}; the columns are {', '.join(rows[0])}")
    # If --columns does not set the question or the answer, look among the usual names.
    for ours, names in NAMES.items():
        found = (spelled(rows, name) for name in names)
        found = (name for name in found if has_value(rows, name))
        chosen.setdefault(ours, next(found, ours))
    return chosen


def spelled(rows: Sequence, name: str) -> str:
    """A usual name as the columns spell it: in a spreadsheet, it may be `Question` or ` answer`."""
    # A dict keeps the order of the columns.
    there = dict.fromkeys(column for row in rows if isinstance(row, dict) for column in row)
    if "+" in name:
        return "+".join(spelled(rows, part) for part in name.split("+"))
    alike = (column for column in there if str(column).strip().lower() == name)
    return name if name in there else next(alike, name)


def has_column(rows: Sequence, name: str) -> bool:
    """Whether any of the rows has the column `name`, or both columns of `one+other`."""
    columns = [row.keys() for row in rows if isinstance(row, dict)]
    return any(name in there or set(name.split("+")) <= there for there in columns)


def has_value(rows: Sequence, name: str) -> bool:
    """Whether any of the rows has a value in the column `name`; for `one+other`, a text in both."""
    is_column = any(isinstance(row, dict) and name in row for row in rows)
    if is_column or "+" not in name:
        return any(value_of(row, name) not in (None, "") for row in rows)
    parts = name.split("+")

    def has_texts(row):
        values = [value_of(row, part) for part in parts]
        return all(value and isinstance(value, str) for value in values)

    return any(map(has_texts, rows))


def is_clear(rows: Sequence, chosen: dict[str, str]) -> bool:
    """Whether the columns are `question` and `answer`, and no other usual name occurs."""
    usual = [name for names in NAMES.values() for name in names]
    found = [name for name in usual if has_value(rows, name)]
    return sorted(found) == sorted(chosen) == sorted(chosen.values())


def value_of(row: Any, name: str) -> Any:
    """The value of the column `name`, of `outer.inner`, or of `one+other`, joined. If there is no
    value: None, or "" for `one+other`."""
    # A column whose own name contains a dot or a plus takes precedence.
    if isinstance(row, dict) and name in row:
        return row[name]
    if "+" in name:
        texts = []
        for part in name.split("+"):
            value = value_of(row, part)
            # A list of messages is a complete prompt.
            if isinstance(value, list):
                return value
            # In some rows, one of the columns may be empty, or missing.
            if value not in (None, ""):
                texts.append(str(value))
        return " ".join(texts)
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def rename(row: dict, chosen: dict[str, str]) -> dict:
    """Returns a row with `question` and `answer`, and with `prompt_messages` if its prompt is a
    list of messages.

    The question is the user's last message. If an assistant's message follows, it is the answer,
    unless the row already has one. Raises an error for messages of any other form.
    """
    # Copy the row, with its other columns: reward functions may read them.
    original = row
    row = {**row}
    row.pop("prompt_messages", None)
    for ours, theirs in chosen.items():
        value = value_of(original, theirs)
        if theirs != ours:
            # If the chosen column has no value here, do not fall back to the column named `ours`.
            row.pop(ours, None)
            if value is not None:
                row[ours] = value
    if "answer" in row:
        row["answer"] = unwrapped(row["answer"])
    asked = row.get("question")
    # Some tables hold a list of messages as text.
    messages = r"\s*\[\s*\{.*\b(role|from)\b.*\}\s*\]\s*"
    if isinstance(asked, str) and re.fullmatch(messages, asked, re.S):
        raise ValueError("the question is a list of messages in a string; store it as a list")
    if not isinstance(asked, list) or not asked:
        return row
    turns = [turn_of(message) for message in asked]
    if turns[-1]["role"] == "assistant":
        last = turns.pop()
        # A table may have a null where the row has no answer of its own.
        if row.get("answer") is None:
            row["answer"] = last["content"]
    roles = [turn["role"] for turn in turns]
    unknown = [role for role in roles if role not in ("system", "user", "assistant")]
    if unknown:
        raise ValueError(f"a message has the role {unknown[0]!r}, not system, user or assistant")
    if roles[-1:] != ["user"]:
        raise ValueError(f"messages with roles {roles} do not end with a user's message")
    return row | {"question": turns[-1]["content"], "prompt_messages": turns}


def turn_of(message: dict) -> dict:
    """The role and the text of a message in OpenAI's form, or in ShareGPT's, with `from` and
    `value`. Other fields, such as names or tool calls, are not part of the prompt."""
    # OpenAI's newer models call the system message the developer message.
    role_of = {"developer": "system", "human": "user", "gpt": "assistant"}
    is_openai = message.get("role") is not None or message.get("from") is None
    role = message["role" if is_openai else "from"]
    content = message["content" if is_openai else "value"]
    return {"role": role_of.get(role, role), "content": text_of(content)}


def unwrapped(answer: Any) -> Any:
    """If the answer is a list of one text (possibly written as JSON) or of one message, returns the
    text; returns any other answer as it is."""
    found = answer
    if isinstance(answer, str) and re.fullmatch(r'\s*\[\s*".*"\s*\]\s*', answer, re.S):
        with contextlib.suppress(ValueError):
            found = json.loads(answer)
    if not isinstance(found, list) or len(found) != 1:
        return answer
    (found,) = found
    text = text_of(found["content"]) if isinstance(found, dict) and "content" in found else found
    return text if isinstance(text, str) else answer


def text_of(content: Any) -> Any:
    """The text of a message whose content may be a list of parts, as in OpenAI's API. Raises an
    error for a part that is not text, such as an image."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def messages_of(row: dict, system: str) -> Sequence[dict]:
    """The messages of a row's prompt. A row's own system message replaces --system. Without either,
    there is no system message."""
    turns = row.get("prompt_messages") or [{"role": "user", "content": row["question"]}]
    if turns[0]["role"] == "system" or not system:
        return turns
    return [{"role": "system", "content": system}, *turns]
