"""Write a page, report.html, with the curves, the flags and the answers of runs.

python tools/report.py out/arith-tiny                         # out/arith-tiny/report.html
python tools/report.py out/seed1 out/seed2 --to seeds.html
python tools/report.py "grpo=out/grpo-*" "rloo=out/rloo-*"    # report.html

The page is one file that needs no network, so it can be sent or kept. Runs are named and grouped as
for tools/plot.py, which draws the curves. Answers come from samples.jsonl and evals.jsonl.
"""

import base64
import hashlib
import html
import json
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.host.console import check, exit_on, open_streams, readable
from infra.host.files import CheckpointError, atomic_file, read_optional_json
from infra.run.log import read_jsonl
from tools import plot
from tools.arguments import check_is_here, parser_of

# The page without its data. Its script fills in the rest.
TEMPLATE = Path(__file__).with_suffix(".html")
# The page may have this many characters of answers. With more, a browser opens it slowly or never.
MAX_CHARACTERS = 200_000_000


# ---------------------------------------------------------------- runs
def runs_of(arguments: list[str]) -> dict[str, str]:
    """Returns {directory of a run: its name on the page}. Exits with code 2 if one is not a run."""
    outs = [out for argument in arguments for out in plot.split_label(argument)[1]]
    # A run may be in several groups.
    outs = [*dict.fromkeys(outs)]
    names = [plot.split_label(out)[0] for out in outs]
    for out in outs:
        check_is_here(out)
        check(os.path.isdir(out), f"{out} is not the directory of a run")
    # Runs with the same name are told apart by their paths.
    return {
        out: out if names.count(name) > 1 else name for out, name in zip(outs, names, strict=True)
    }


def summary_of(out: str, name: str, metrics: list[dict]) -> dict:
    """Returns the facts about a run that the page shows above its answers."""
    config = read_optional_json(f"{out}/config.json")
    return {
        "name": readable(name),
        "steps": max(row["step"] for row in metrics),
        "solved": solved_of(metrics),
        "commit": readable(str(config.get("commit") or "")),
        "versions": as_texts(config.get("versions") or {}),
        "flags": as_texts(config.get("config") or {}),
        "evaluations_are_whole": os.path.exists(f"{out}/evals.jsonl"),
    }


def solved_of(metrics: list[dict]) -> dict[str, list]:
    """Returns {set of held-out questions: [[step, fraction solved]]}."""
    names = {"eval/solved": "held-out questions"}
    for name in sorted({name for row in metrics for name in row}):
        if found := re.fullmatch(plot.EVAL_OF_SET, name):
            names[name] = readable(found[1])
    points = {names[name]: plot.values_by_step(metrics, name) for name in names}
    return {label: [*of_set.items()] for label, of_set in points.items() if of_set}


def as_texts(values: dict) -> dict[str, str]:
    """Format the values of an object in config.json as texts."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return {readable(name): readable(text) for name, text in texts.items()}


def finite(value) -> float | int | None:
    """Returns a number that JSON can hold, 0 or 1 for a bool, or None for anything else."""
    return +value if plot.is_number(value) else None


# ---------------------------------------------------------------- answers
def read_answers(out: str) -> list[dict]:
    """Read the rows of samples.jsonl and evals.jsonl that hold an answer. Each row gets a `set`:
    the name of an evaluation set, `evaluation` if it has no name, or `training`."""
    evaluated = read_jsonl(f"{out}/evals.jsonl")
    sampled = read_jsonl(f"{out}/samples.jsonl")
    if evaluated:
        # evals.jsonl has all answers of evaluations. In an old run, samples.jsonl has some of them,
        # too.
        sampled = [row for row in sampled if not row.get("eval")]
    rows = [{"set": "evaluation" if row.get("eval") else "training"} | row for row in sampled]
    for row in evaluated:
        name = row.get("set", "evaluation")
        # A set of held-out questions may have this name, too.
        rows.append(row | {"set": "evaluation of training" if name == "training" else name})
    return [row for row in rows if "question" in row]


def answer_of(row: dict) -> dict:
    """Returns an answer and its scores as the page's script reads them, without the question."""
    scores = {
        readable(key.removeprefix("reward/")): finite(row[key])
        for key in row
        if key.startswith("reward/")
    }
    return {
        "step": row["step"],
        "set": readable(str(row["set"])),
        "answer": readable(str(row.get("answer", ""))),
        "reward": finite(row.get("reward")),
        "scores": scores,
        "solved": None if row.get("solved") is None else row["solved"] >= 1,
        "truncated": bool(row.get("truncated")),
        "tokens": finite(row.get("tokens")),
    }


def collect(outs: list[str]) -> tuple[list[list[str]], list[dict]]:
    """Returns ([[question, reference]], answers). An answer has the index of its run in `outs`, and
    the index of its question in the first list. Later steps come first."""
    questions = {}
    answers = []
    for run, out in enumerate(outs):
        for row in read_answers(out):
            asked = (readable(str(row["question"])), readable(str(row.get("reference", ""))))
            question = questions.setdefault(asked, len(questions))
            answers.append(answer_of(row) | {"run": run, "question": question})
    # At the same step, evaluations come before the answers of training.
    answers.sort(key=lambda answer: (-answer["step"], answer["set"] == "training"))
    return [[*asked] for asked in questions], answers


def shorten(answers: list[dict]) -> None:
    """Cut the middle out of the longest answers if all answers together have more than
    MAX_CHARACTERS. A note in the answer says how much is left out."""
    lengths = [len(answer["answer"]) for answer in answers]
    limit = max(lengths, default=0)
    while sum(min(length, limit) for length in lengths) > MAX_CHARACTERS:
        limit = limit * 3 // 4
    half = limit // 2
    for answer, length in zip(answers, lengths, strict=True):
        if length > limit:
            text = answer["answer"]
            note = f"[{length - 2 * half:,} characters are left out of this report]"
            answer["answer"] = f"{text[:half]}\n{note}\n{text[length - half :]}"


# ---------------------------------------------------------------- the page
def curves_of(all_series: list[plot.Series]) -> str:
    """Returns the default panels of tools/plot.py as an <svg> element, "" if there are none."""
    panels = plot.choose_panels("", all_series)
    if not panels:
        return ""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/curves.svg"
        plot.draw(all_series, panels, "step", path)
        svg = Path(path).read_text(encoding="utf-8")
    # Inside a page, an <svg> has neither an XML declaration nor metadata.
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)


def as_data(value) -> str:
    """Format a value as JSON without any character that means something in HTML or JavaScript, so
    that no text in it can end its <script> element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # In JSON, these characters occur only inside strings.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def fill(title: str, curves: str, data: dict) -> str:
    """Returns the template with its parts filled in. Its Content-Security-Policy names the hash of
    its one script, so that a browser runs no other."""
    template = TEMPLATE.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", template, re.S)
    digest = hashlib.sha256(script.encode()).digest()
    parts = {
        "title": html.escape(title),
        "script_hash": base64.b64encode(digest).decode(),
        "curves": curves,
        "data": as_data(data),
    }
    # Fill in all parts at once: the text of one part may look like the placeholder of another.
    return re.sub(r"<!-- (\w+) -->", lambda match: parts[match[1]], template)


@exit_on(CheckpointError, "this file cannot be used")
def main(argv: list[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+", metavar="OUT", help="OUT, or label=OUT1,OUT2,...")
    parser.add_argument(
        "--to", default="", help="the page; default: OUT/report.html, or report.html for several"
    )
    args = parser.parse_args(argv)
    names = runs_of(args.runs)
    metrics = {out: plot.read_rows(out, "metrics.jsonl") for out in names}
    groups = [plot.split_label(argument) for argument in args.runs]
    all_series = [plot.Series(label, [metrics[out] for out in outs]) for label, outs in groups]
    questions, answers = collect([*names])
    shorten(answers)
    data = {
        "runs": [summary_of(out, names[out], metrics[out]) for out in names],
        "questions": questions,
        "answers": answers,
    }
    title = readable(", ".join(names.values()))
    page = fill(title, curves_of(all_series), data)
    to = args.to or (f"{[*names][0]}/report.html" if len(names) == 1 else "report.html")
    with exit_on(OSError, f"{to} cannot be written"), atomic_file(to) as f:
        f.write(page.encode(errors="replace"))
    print(to)


if __name__ == "__main__":
    open_streams()
    main(sys.argv[1:])
