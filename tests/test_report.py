"""The page of tools/report.py: its data, its filters in Chromium, and hostile answers in both."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from tools import report, samples

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
# Text that would be markup, a terminal's commands, or a change of direction.
SCRIPT = "</script><script>window.stolen = 1; document.title = 'stolen'</script>"
IMAGE = '<img src=x onerror="window.stolen = 1">\' <!-- <b>&amp;&lt;'
ANSI = "\x1b[31mred\x1b[0m \x07\x00\x9b2J"
TURNED = "\u202eabc\u202c \u2066x \N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET} 12 + 3"
PLACES = "<!-- data --> <!-- title --> \u2028 \u2029"
HOSTILE = [SCRIPT, IMAGE, ANSI, TURNED, PLACES]
LOST = "\N{REPLACEMENT CHARACTER}"


# ---------------------------------------------------------------- runs and pages
def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_run(directory, rows=(), evals=None, flags=None, curves=False):
    """Write the files of a run with these rows of samples.jsonl. Without `curves`, none of its
    metrics is drawn, which would take a second."""
    directory.mkdir(parents=True)
    metrics = [{"step": 0, "eval/solved": 0.25}, {"step": 4, "eval/solved": 0.75, "nll": 1.5}]
    if curves:
        metrics += [{"step": step, "reward/mean": step / 7} for step in range(1, 5)]
    write_jsonl(directory / "metrics.jsonl", metrics)
    write_jsonl(directory / "samples.jsonl", rows)
    if evals is not None:
        write_jsonl(directory / "evals.jsonl", evals)
    config = {"config": flags or {"lr": 1e-5, "model": "tiny"}, "commit": "c0ffee", "versions": {}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def trained(step, answer, question="What is 2 + 3?", solved=1.0, **more):
    row = {"step": step, "question": question, "reference": "5", "answer": answer}
    scores = {"reward": solved + 0.1, "truncated": False, "solved": solved}
    return row | scores | {"reward/correct": solved, "reward/formatted": 1.0} | more


def evaluated(step, answer, solved=1.0, **more):
    row = {"step": step, "question": "What is 4 + 5?", "reference": "9", "answer": answer}
    return row | {"eval": True, "solved": solved} | more


def write_page(*words):
    report.main([str(word) for word in words])


def page_of(run):
    """Returns the page of a run, as text."""
    write_page(run)
    return (run / "report.html").read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Parses a page to the list of its elements, and to the texts of its scripts."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.open = None
        self.scripts = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self.open = tag

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, text):
        if self.open == "script":
            self.scripts.append(text)


def data_of(page):
    """Returns the data in a page: the content of its first script, which is JSON."""
    return json.loads(Elements(page).scripts[0])


def refusal(capsys, *words):
    """Returns the one line that the tool prints before it exits with code 2."""
    with pytest.raises(SystemExit) as exit:
        report.main([str(word) for word in words])
    text = capsys.readouterr().err
    assert exit.value.code == 2 and text.count("\n") == 1, text
    return text


# ---------------------------------------------------------------- the data of a page
def test_a_page_has_the_flags_and_all_rows_with_the_last_step_first(tmp_path):
    rows = [
        trained(3, "2+3=5"),
        trained(3, "2+3=", solved=0.0, truncated=True),
        evaluated(3, "eight", solved=0.0),
        trained(4, "five", tokens=7, reward=None, **{"reward/correct": True}),
        {"step": 4, "note": "this row has no answer"},
    ]
    page = page_of(write_run(tmp_path / "run", rows))
    data = data_of(page)
    (run,) = data["runs"]
    assert run["flags"] == {"lr": "1e-05", "model": "tiny"} and run["commit"] == "c0ffee"
    assert run["steps"] == 4 and run["solved"] == {"held-out questions": [[0, 0.25], [4, 0.75]]}
    assert not run["evaluations_are_whole"]
    answers = data["answers"]
    assert [row["answer"] for row in answers] == ["five", "eight", "2+3=5", "2+3="]
    assert [row["set"] for row in answers] == ["training", "evaluation", "training", "training"]
    assert [row["solved"] for row in answers] == [True, False, True, False]
    assert [row["truncated"] for row in answers] == [False, False, False, True]
    assert [row["reward"] for row in answers] == [None, None, 1.1, 0.1]
    assert [row["tokens"] for row in answers] == [7, None, None, None]
    assert answers[2]["scores"] == {"correct": 1.0, "formatted": 1.0} and not answers[1]["scores"]
    # The page's script formats numbers, not bools.
    assert answers[0]["scores"]["correct"] is not True
    asked = [data["questions"][row["question"]] for row in answers]
    assert asked[1] == ["What is 4 + 5?", "9"] and asked[0] == asked[2] == ["What is 2 + 3?", "5"]


def test_curves_are_part_of_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    first = write_run(tmp_path / "<b>first&", curves=True)
    second = write_run(tmp_path / "second", curves=True)
    to = tmp_path / "page.html"
    # Groups are named as for tools/plot.py.
    write_page(f"both={first},{second}", first, "--to", to)
    page = to.read_text(encoding="utf-8")
    assert page.count("<svg") == 1 and "<?xml" not in page and "<metadata" not in page
    drawn = re.findall(r"<text[^>]*>([^<]+)</text>", page)
    wanted = {"reward/mean", "both (mean and range of 2)", "&lt;b&gt;first&amp;"}
    assert wanted <= {*drawn}, drawn
    assert [run["name"] for run in data_of(page)["runs"]] == ["<b>first&", "second"]


def test_evals_take_the_place_of_the_evaluations_among_the_samples(tmp_path):
    rows = [trained(3, "2+3=5"), evaluated(4, "nine")]
    evals = [
        evaluated(4, text, set="sums", reward=0.5, truncated=False, tokens=3) for text in "abc"
    ]
    run = write_run(tmp_path / "run", rows, evals)
    with open(run / "evals.jsonl", "a") as f:
        f.write('{"step": 5, "question": "half a li')
    data = data_of(page_of(run))
    assert [row["answer"] for row in data["answers"]] == ["a", "b", "c", "2+3=5"]
    assert {row["set"] for row in data["answers"][:3]} == {"sums"}
    assert data["runs"][0]["evaluations_are_whole"]


def test_several_sets_of_questions_have_a_panel_and_a_summary_each(tmp_path):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", [], [evaluated(1, "one", set="sums")])
    rows = [{"step": step, "eval/sums/solved": step / 8, "eval/a/b/solved": 0.5} for step in (1, 2)]
    write_jsonl(run / "metrics.jsonl", [*rows, {"step": 3, "eval/sums/solved": None}])
    page = page_of(run)
    solved = {"a/b": [[1, 0.5], [2, 0.5]], "sums": [[1, 0.125], [2, 0.25]]}
    assert data_of(page)["runs"][0]["solved"] == solved
    drawn = re.findall(r"<text[^>]*>(eval[^<]+)</text>", page)
    assert drawn == ["eval/a/b/solved", "eval/sums/solved"]


def test_runs_share_a_page_and_are_told_apart(tmp_path, monkeypatch, capsys):
    first = write_run(tmp_path / "a/run", [trained(1, "one")])
    second = write_run(tmp_path / "b/run", [trained(2, "two")])
    third = write_run(tmp_path / "third", [trained(3, "three")])
    monkeypatch.chdir(tmp_path)
    write_page(first, second, third)
    assert capsys.readouterr().out == "report.html\n"
    data = data_of((tmp_path / "report.html").read_text())
    assert [run["name"] for run in data["runs"]] == [str(first), str(second), "third"]
    assert [(row["answer"], row["run"]) for row in data["answers"]] == [
        ("three", 2), ("two", 1), ("one", 0),
    ]  # fmt: skip


def test_a_run_may_have_metrics_alone(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "samples.jsonl").unlink()
    (run / "config.json").unlink()
    page = page_of(run)
    data = data_of(page)
    assert data["answers"] == data["questions"] == [] and data["runs"][0]["flags"] == {}
    # The only default metric of this run is an evaluation.
    assert "<svg" in page and "eval/solved" in page


def test_longest_answers_are_cut_in_the_middle_to_fit(tmp_path, monkeypatch):
    texts = ["a" * 1000 + "b" * 1000, "c" * 90]
    run = write_run(tmp_path / "run", [trained(1, text) for text in texts])
    answers = data_of(page_of(run))["answers"]
    assert [row["answer"] for row in answers] == texts
    monkeypatch.setattr(report, "MAX_CHARACTERS", 600)
    long, short = (row["answer"] for row in data_of(page_of(run))["answers"])
    assert short == texts[1]
    head, note, tail = long.split("\n")
    assert {*head} == {"a"} and {*tail} == {"b"} and 300 < len(head + tail) <= 510
    left_out = 2000 - len(head + tail)
    assert f"[{left_out:,} characters are left out" in note


def test_refusals_are_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", [trained(1, "one")])
    (tmp_path / "empty").mkdir()
    assert "it has no metrics.jsonl" in refusal(capsys, tmp_path / "empty")
    assert "absent is not the directory of a run" in refusal(capsys, run, tmp_path / "absent")
    assert "is not the directory of a run" in refusal(capsys, run / "metrics.jsonl")
    text = refusal(capsys, "gs://bucket/run")
    assert "gcloud storage cp 'gs://bucket/run/*.json*' run" in text
    assert "OUT" in refusal(capsys)
    (run / "config.json").write_text("{")
    assert "config.json is not readable JSON" in refusal(capsys, run)


def test_a_page_that_cannot_be_written_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", [trained(1, "one")])
    assert "cannot be written" in refusal(capsys, run, "--to", tmp_path / "absent/page.html")


# ---------------------------------------------------------------- text stays text
def test_control_characters_are_visible_and_spaces_stay():
    kept = "tab\tnext\nline \u3000wide \xa0fixed \N{HEBREW LETTER ALEF} \N{GRINNING FACE}"
    kept += "\N{ARABIC LETTER MEEM}\u200c \u200d \u200e \u200f \xad"
    assert samples.readable(kept) == kept.expandtabs(4)
    assert samples.readable("one\r\ntwo") == "one\ntwo"
    for character in "\x00\x07\x1b\r\x85\x9b\u202e\u2066\u2028\ufeff\ud800":
        assert samples.readable(f"a{character}b\nc") == f"a{LOST}b\nc", repr(character)


def hostile_run(directory):
    """Write a run whose texts of all kinds are hostile."""
    rows = [trained(1, text, question=text, reference=text) for text in HOSTILE]
    rows += [trained(2, IMAGE, **{f"reward/{SCRIPT}": 1.0}), trained(2, "\ud800 half a pair")]
    evals = [evaluated(2, SCRIPT, set=SCRIPT)]
    return write_run(directory, rows, evals, flags={SCRIPT: SCRIPT, "lr": float("inf"), "b": None})


def test_nothing_in_the_files_of_a_run_becomes_markup(tmp_path):
    plain = Elements(page_of(write_run(tmp_path / "plain", [trained(1, "one")])))
    page = page_of(hostile_run(tmp_path / "<b>&amp; <!-- data -->"))
    elements = Elements(page)
    # Both pages have the same elements: the template's and those of the curves.
    assert [tag for tag, _ in elements.found] == [tag for tag, _ in plain.found]
    assert not re.search("[<>&\u2028\u2029]", elements.scripts[0])
    data = data_of(page)
    wanted = [samples.readable(text) for text in HOSTILE]
    assert [row["answer"] for row in data["answers"] if row["step"] == 1] == wanted
    assert [asked for asked in data["questions"] if asked[0] in wanted] == [[t, t] for t in wanted]
    assert data["runs"][0]["flags"] == {SCRIPT: SCRIPT, "lr": "Infinity", "b": "null"}
    assert data["runs"][0]["name"] == "<b>&amp; <!-- data -->"
    assert not re.search("[\x00-\x09\x0b-\x1f\x80-\x9f\u202a-\u202e\u2066-\u2069\u2028]", page)


def test_a_page_allows_its_own_script_alone_and_no_network(tmp_path):
    elements = Elements(page_of(write_run(tmp_path / "run", [trained(1, "one")])))
    _, script = elements.scripts
    policies = [a["content"] for tag, a in elements.found if "http-equiv" in a]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policies and "default-src 'none'" in policies[0]
    assert re.findall(r"script-src ([^;]*)", policies[0]) == [f"'sha256-{digest}'"]
    for tag, attributes in elements.found:
        assert "src" not in attributes and tag not in ("link", "img", "iframe", "object")
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)


# ---------------------------------------------------------------- in a browser
# This script stands before the page's policy, so that the policy does not forbid it.
DRIVER = """<script>{ // a block, so that its names are not those of the page
const seen = [];
const wait = () => new Promise((done) => setTimeout(done, 100));
const id = (name) => document.getElementById(name);
const all = (selector) => [...document.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((element) => element.textContent);
const answers = () => texts('#list td[data-column="answer "]');
const press = (label) => all("button").find((button) => button.textContent === label).click();
const set = (name, value, event) => {
  id(name).value = value;
  id(name).dispatchEvent(new Event(event));
};
addEventListener("load", async () => {
  try { ACTS } catch (error) { seen.push(String(error)); }
  document.documentElement.dataset.seen = JSON.stringify(seen);
});
}</script>"""


def look(page, acts, address=""):
    """Open a page in Chromium, run JavaScript there, and return what it pushed on `seen`."""
    driven = page.with_name("driven.html")
    text = page.read_text(encoding="utf-8")
    driver = DRIVER.replace("ACTS", acts)
    driven.write_text(text.replace("<head>", f"<head>{driver}", 1), encoding="utf-8")
    words = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync "
        "--window-size=1200,900 --virtual-time-budget=20000 --dump-dom"
    )
    command = [CHROMIUM, *words.split(), f"--user-data-dir={page.parent}/browser"]
    command.append(driven.as_uri() + address)
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    (found,) = re.findall(r'<html [^>]*data-seen="([^"]*)"', done.stdout) or [done.stderr]
    return json.loads(html.unescape(found))


def some_answers():
    """Returns rows of training whose answers name their step, question and verdict."""
    rng = np.random.default_rng(7)
    rows = []
    for step in (1, 2, 10):
        for i in range(4):
            is_right = bool(rng.random() < 0.5)
            text = f"step {step} question {i} {'yes' if is_right else 'no'}"
            row = trained(step, text, question=f"Question {i}?", solved=float(is_right), tokens=9)
            rows.append(row | {"truncated": not is_right and i < 2})
    return rows


@needs_chromium
def test_an_address_filters_the_answers(tmp_path):
    rows = some_answers()
    page_of(write_run(tmp_path / "run", rows))
    conditions = {
        "": lambda row: True,
        "show=right": lambda row: row["solved"] == 1.0,
        "show=wrong": lambda row: row["solved"] == 0.0,
        "show=truncated": lambda row: row["truncated"],
        "step=10": lambda row: row["step"] == 10,
        "step=1&show=wrong": lambda row: row["step"] == 1 and row["solved"] == 0.0,
        "text=QUESTION+2": lambda row: "question 2" in row["answer"],
        "text=Question+3%3F": lambda row: row["question"] == "Question 3?",
        "text=(nothing": lambda row: False,
        "show=constructor&question=length&page=99": lambda row: True,
    }
    acts = f"""for (const address of {json.dumps([*conditions])}) {{
        location.hash = address; await wait(); seen.push(answers()); }}"""
    seen = look(tmp_path / "run/report.html", acts)
    by_step = sorted(rows, key=lambda row: -row["step"])
    for address, found in zip(conditions, seen, strict=True):
        wanted = [row["answer"] for row in by_step if conditions[address](row)]
        assert found == wanted, address
    # A page can be opened at an address, with its filters set.
    page = tmp_path / "run/report.html"
    seen = look(page, "seen.push(answers(), id('text').value)", "#show=right&text=step+2")
    right = [row["answer"] for row in rows if row["step"] == 2 and row["solved"] == 1.0]
    assert right and seen == [right, "step 2"]


@needs_chromium
def test_controls_filter_turn_pages_and_compare(tmp_path):
    rows = some_answers()
    many = [trained(20, f"many {i}", question="Many?") for i in range(150)]
    page_of(write_run(tmp_path / "run", rows + many, [evaluated(10, "held out", set="sums")]))
    acts = """
        seen.push(id("show-all").textContent, answers().length);
        press("next"); await wait(); seen.push(answers().length);
        id("show-wrong").click(); await wait(); set("step", "2", "change"); await wait();
        seen.push(answers(), id("show-wrong").getAttribute("aria-pressed"));
        press("clear"); await wait(); set("set", "sums", "change"); await wait();
        seen.push(answers());
        set("set", "", "change"); await wait(); set("text", "Question 1?", "input"); await wait();
        seen.push(answers());
        all("a.compare")[0].click(); await wait();
        seen.push(id("question").hidden, texts(".beside .answer"));
        press("close"); press("clear"); await wait(); scrollTo(0, 500); await wait();
        all("a.compare")[0].click(); await wait();
        seen.push(Math.round(id("question").getBoundingClientRect().top));
        history.back(); await wait(); seen.push(id("question").hidden, scrollY);
    """
    seen = look(tmp_path / "run/report.html", acts)
    wrong = [row["answer"] for row in rows if row["step"] == 2 and row["solved"] == 0.0]
    to_1 = [row["answer"] for row in rows if row["question"] == "Question 1?"]
    wanted = ["all 163", 100, 63, wrong, "true", ["held out"], to_1[::-1], False, to_1]
    # A question is scrolled to, and closing it leads back to the place before.
    assert wrong and seen == [*wanted, 0, True, 500]


@needs_chromium
def test_in_a_browser_hostile_texts_stay_text_in_their_cells(tmp_path):
    run = hostile_run(tmp_path / "run")
    line = "x" * 100_000
    with open(run / "samples.jsonl", "a") as f:
        f.write(json.dumps(trained(9, line)) + "\n" + json.dumps(trained(9, "y\n" * 1000)) + "\n")
    write_page(run)
    acts = """
        seen.push(answers(), window.stolen ?? null, document.title, all("img, b").length);
        const bidi = all("#list .text").map((block) => getComputedStyle(block).unicodeBidi);
        seen.push([...new Set(bidi)]);
        // The cells of a row stand from left to right, and none reaches into the next.
        seen.push(all("#list tbody tr").every((row) => {
          const boxes = [...row.cells].map((cell) => cell.getBoundingClientRect());
          const inside = [...row.cells].every((cell) => cell.scrollWidth <= cell.clientWidth + 1);
          return inside && boxes.every((box, i) => !i || box.left >= boxes[i - 1].right - 1);
        }));
        seen.push(document.documentElement.scrollWidth <= innerWidth);
        seen.push(document.body.scrollHeight < 9000);
        const more = all("button.more");
        seen.push(more.map((button) => button.textContent));
        more[0].click();
        seen.push(answers()[0], document.documentElement.scrollWidth <= innerWidth);
    """
    seen = look(run / "report.html", acts)
    answers, stolen, title, elements, bidi, is_ordered, is_narrow, is_low, more, whole, fits = seen
    assert answers[2:] == [samples.readable(SCRIPT), IMAGE, f"{LOST} half a pair"] + [
        samples.readable(text) for text in HOSTILE
    ]
    assert (stolen, title, elements) == (None, "run | podgrpo", 0)
    assert bidi == ["isolate"] and is_ordered and is_narrow and is_low
    # Long answers show their beginning and end.
    assert more == ["show all 100,000 characters", "show all 2,000 characters"]
    assert answers[0].startswith("xxx") and answers[0].endswith("xxx") and len(answers[0]) < 1000
    assert whole == line and fits


@needs_chromium
def test_a_text_that_is_searched_for_is_marked_even_in_the_middle(tmp_path):
    middle = "word " * 800 + "then (Needle) is here " + "word " * 800
    rows = [trained(1, "a needle. A Needle? A needl"), trained(1, middle)]
    page_of(write_run(tmp_path / "run", rows, flags={"lr": 1.0}))
    acts = """seen.push(texts("mark"), answers()[1].length < 1300);
        press("show all 8,022 characters"); seen.push(answers()[1], all("mark").length);
        location.hash = "text=(Nee"; await wait(); seen.push(texts("mark"));
        all("nav a")[1].click(); seen.push(all("dd")[0].offsetHeight > 0);
    """
    seen = look(tmp_path / "run/report.html", acts, "#text=needle")
    marks = ["needle", "Needle", "Needle"]
    assert seen == [marks, True, middle, 3, ["(Nee"], True]


@needs_chromium
def test_fifty_thousand_answers_open_as_a_hundred_rows(tmp_path):
    rows = [evaluated(i // 1000, f"answer {i}", float(i % 2), set="sums") for i in range(50_000)]
    page_of(write_run(tmp_path / "run", [], rows))
    acts = """seen.push(answers().length, id("show-wrong").textContent);
        location.hash = "text=answer+777&show=right"; await wait(); seen.push(answers().length);"""
    seen = look(tmp_path / "run/report.html", acts)
    # answer 777, 7770 to 7779, and 77700 is not there: six of them are odd.
    assert seen == [100, "wrong 25,000", 6]
