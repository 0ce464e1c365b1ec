"""What people look at: the terminal, learning curves, and a run's answers side by side."""

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, SMALL, read_jsonl
from numpy.testing import assert_allclose

import train
from infra.host.console import ERASE, say, warn
from infra.host.processes import leave
from infra.run import log
from test_kernel import mesh
from tools import plot, samples

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


# ---------------------------------------------------------------- the start of a run
def test_a_system_prompt_other_than_in_the_training_is_named(tmp_path, capsys):
    (tmp_path / "podgrpo.json").write_text('{"system": "Be brief."}')
    setup = SimpleNamespace(model_cfg=SMALL, mesh=mesh(), row_width=8, held_out={})
    setup.model_dir = str(tmp_path)
    for system in "Be brief.", "":
        log.print_setup(train.Config(model="m", system=system), setup)
    text = capsys.readouterr().out
    assert text.count("m was trained with --system 'Be brief.', not ''") == 1, text
    assert text.count("trained with") == 1, text


def test_the_sequences_of_a_step_are_counted_on_all_hosts(capsys, monkeypatch):
    monkeypatch.setattr(log.jax, "process_count", lambda: 2)
    setup = SimpleNamespace(model_cfg=SMALL, mesh=mesh(), row_width=8, held_out={}, model_dir="")
    log.print_setup(train.Config(batch=4, npq=8, minibatches=2, ppo_epochs=3), setup)
    text = capsys.readouterr().out
    assert "4 questions x 8 answers = 32 sequences per host, 64 in all" in text, text
    assert "6 updates a step" in text and "no held-out questions" in text, text


# ---------------------------------------------------------------- terminals
@contextlib.contextmanager
def terminal(columns):
    """Yields (a file that writes to a new terminal, the bytes written). The bytes are complete
    after the block."""
    ours, theirs = os.openpty()
    size = struct.pack("HHHH", 24, columns, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    written = bytearray()

    def read():
        # On Linux, reading raises OSError once the other end is closed.
        with contextlib.suppress(OSError):
            while data := os.read(ours, 1000):
                written.extend(data)

    # Read in a thread: writing to a terminal that nobody reads would block.
    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w") as file:
            yield file, written
    finally:
        reader.join(60)
        os.close(ours)


def as_seen(written):
    """Returns (the lines that stay on a terminal, the lines that were replaced by others)."""
    stay = []
    replaced = []
    for line in written.decode().replace("\r\n", "\n").split("\n"):
        *before, last = line.split(ERASE)
        replaced += [text.rstrip("\r") for text in before if text]
        stay.append(last)
    return stay, replaced


def metrics_of(rng, step, sft_steps):
    """Returns a row with all metrics that the line of a step needs."""
    line = log.SFT_LINE if step <= sft_steps else log.GRPO_LINE
    names = {*re.findall(r"{([\w/]+)", line)} - {"step", "total", "thousands"}
    row = {"step": step} | {name: rng.uniform(0, 9) for name in names}
    if step > sft_steps:
        row["rollout/tokens_per_s"] = rng.uniform(1e3, 1e5)
        row["group/zero_variance"] = 0.0
        row["truncated"] = 0.0
    return row | {"valid_tokens": int(rng.integers(1000, 9000))}


def play(sft_steps, total_steps, done=0):
    """Show all that a run would show, with steps that take no time."""
    rng = np.random.default_rng(0)
    show = log.Terminal(sft_steps, total_steps, done)
    for step in range(done + 1, total_steps + 1):
        if step > sft_steps:
            show.begin("rollout", step)
            show.decoded(3, 1200)
        show.begin("update", step)
        show.end_step(metrics_of(rng, step, sft_steps))
    show.begin("evaluating", total_steps, 256, 1000)
    say("the end")


def steps_of(lines):
    """Returns the steps of lines, such as ["sft 1", "step 2"]."""
    found = [re.match(r"(sft|step) \d+(?=/)", line) for line in lines]
    return [match[0] for match in found if match]


def test_supervised_steps_print_every_tenth(capsys):
    play(27, 29)
    lines = capsys.readouterr().out.split("\n")
    wanted = ["sft 1", "sft 10", "sft 20", "sft 27", "step 28", "step 29"]
    assert steps_of(lines) == wanted
    # There is one line per shown step, and nothing else.
    assert len(lines) == len(wanted) + 2 and lines[-2] == "the end"
    # A run that resumes prints its first step.
    play(27, 28, done=12)
    lines = capsys.readouterr().out.split("\n")
    assert steps_of(lines) == ["sft 13", "sft 20", "sft 27", "step 28"]


def test_a_status_is_replaced_and_fits_the_terminal(monkeypatch):
    columns = int(np.random.default_rng(0).integers(52, 70))
    monkeypatch.setenv("COLUMNS", str(columns))
    with terminal(columns) as (file, written):
        monkeypatch.setattr(sys, "stdout", file)
        play(12, 15)
        monkeypatch.undo()
    stay, replaced = as_seen(written)
    wanted = ["sft 1", "sft 10", "sft 12", "step 13", "step 14", "step 15"]
    assert steps_of(stay) == wanted
    assert stay[len(wanted) :] == ["the end", ""], "a status stays behind a run"
    assert all(len(line) < columns for line in replaced)
    phases = [line.partition(" |")[0] for line in replaced]
    assert phases.count("update") == 15 and phases.count("rollout") == 6, phases
    # In the last evaluation no step is left, so there is no ETA.
    wanted = "evaluating | step 15/15 | 256/1000 questions"
    assert replaced[-1].startswith(wanted[: columns - 1]), replaced
    decoding = [line for line in replaced if "answers" in line]
    wanted = r"rollout \| step 15/15 \| ETA 0:00:00 \| 3 answers \| \d+"
    assert re.match(wanted, decoding[-1]), decoding


def test_a_run_on_a_terminal(tmp_path, monkeypatch):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "What is 2 + 3?", "answer": 5}\n')
    flags = "--sft_steps 1 --steps 1 --batch 1 --npq 8 --minibatches 1 --max_answer 8 --system="
    command = [sys.executable, ROOT / "train.py", *flags.split(), "--optimizer", "sgd"]
    command += ["--data", data, "--eval_data", data, "--out", tmp_path / "run"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    env.pop("COLUMNS", None)
    with terminal(200) as (file, written):
        done = subprocess.run(command, env=env, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    stay, replaced = as_seen(written)
    assert done.returncode == 0, stay
    assert steps_of(stay) == ["sft 1", "step 2"]
    assert not [line for line in stay if line.startswith(("rollout |", "update |", "evaluating |"))]
    for phase in ("loading weights", "evaluating | sft 1/2", "rollout | step 2/2 | 0 answers"):
        assert any(line.startswith(phase) for line in replaced), (phase, replaced)
    assert {"update | sft 1/2", "update | step 2/2"} <= {
        " | ".join(line.split(" | ")[:2]) for line in replaced
    }
    metrics = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert {row["step"] for row in metrics} == {1, 2}
    # Both truncated answers have as many tokens as an answer may have.
    shown = [row for row in read_jsonl(tmp_path / "run/samples.jsonl") if row["step"] == 2]
    tokens = [row["tokens"] for row in shown if row.get("truncated")]
    assert tokens and {*tokens} == {8}
    assert max(row["len/answer_max"] for row in metrics if "solved" in row) == 8


def test_what_interrupts_a_status_erases_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with terminal(60) as (file, written):
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", file)
        show = log.Terminal(0, 5, 0)
        show.begin("rollout", 1)
        warn("mind this")
        show.begin("update", 1)
        with pytest.raises(SystemExit):
            leave(SystemExit(143))
        monkeypatch.undo()
    stay, replaced = as_seen(written)
    assert stay == ["train.py: mind this", ""]
    assert replaced == ["rollout | step 1/5", "update | step 1/5"]


class Clock:
    """A stand-in for the module time in infra/run/log.py."""

    def __init__(self):
        self.now = 1e9

    def monotonic(self):
        return self.now


def test_time_left_is_by_the_pace_since_the_first_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    rng = np.random.default_rng(0)
    show = log.Terminal(4, 4 + 100, 0)
    for kind, steps, end in (("sft", range(1, 5), 4), ("step", range(5, 30), 104)):
        clock.now += 1000  # the first step compiles
        ends = []
        for step in steps:
            show.end_step(metrics_of(rng, step, 4))
            ends.append(clock.now)
            clock.now += rng.uniform(0.01, 100)
            if len(ends) < 2 or step == 4:
                assert show.time_left() == "", "guessed"
                continue
            left = (ends[-1] - ends[0]) / (len(ends) - 1) * (end - step) - (clock.now - ends[-1])
            text = show.time_left()
            hours, minutes, seconds = re.search(r"ETA (\d+):(\d\d):(\d\d)", text).groups()
            shown = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
            assert abs(shown - max(0, left)) < 0.51, (text, left)
            assert text.endswith(" to GRPO") == (kind == "sft")


def test_a_status_has_the_rate_of_its_own_phase(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    shown = []
    monkeypatch.setattr(log, "show_status", shown.append)
    show = log.Terminal(0, 5, 0)
    show.begin("evaluating", 0, 256, 500)
    clock.now += 2
    # 12 of the 256 rows are beyond the last question. They decode too, but do not count as answers.
    show.decoded(256, 1000)
    show.begin("update", 1)
    show.end_step(
        metrics_of(np.random.default_rng(0), 1, 0) | {"valid_tokens": 60, "time/update_s": 2}
    )
    show.begin("rollout", 2)
    show.begin("update", 2)
    show.begin("evaluating", 2)
    assert [text.split(" | ", 2)[2:] for text in shown] == [
        ["256/500 questions"],
        ["256/500 questions | 244 answers | 500 tok/s"],
        [],
        [],
        ["30 tok/s"],
        ["500 tok/s"],
    ]


def test_elsewhere_a_long_rollout_prints_each_half_minute(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    show = log.Terminal(0, 5, 0)
    show.begin("rollout", 1)
    printed = []
    for second in range(1, 101):
        clock.now += 1
        show.decoded(second, 500 * second)
        if text := capsys.readouterr().out:
            assert text == f"rollout | step 1/5 | {second} answers | 500 tok/s\n"
            printed.append(second)
    assert printed == [31, 62, 93]


# ---------------------------------------------------------------- curves
PANELS = plot.PANELS.split()


def write_run(directory, rng, steps=12, sft_steps=3):
    """Write a run's metrics.jsonl with random numbers, and return its rows."""
    directory.mkdir()
    rows = []
    for step in range(1, steps + 1):
        names = PANELS if step > sft_steps else ["entropy", "kl", "grad_norm", "time/step_s"]
        rows.append({"step": step} | {name: rng.uniform() for name in names} | {"mfu": None})
        if step % 3 == 0:
            rows.append({"step": step, "eval/solved": rng.uniform()})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(text)
    return rows


def column(rows, name):
    """Returns (steps, values) of the rows that have a metric."""
    having = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in having], [row[name] for row in having]


def refusal(capsys, tool, *words):
    """Returns the one line that a tool prints when it refuses its arguments."""
    with pytest.raises(SystemExit) as end:
        tool.main([str(word) for word in words])
    text = capsys.readouterr().err
    assert end.value.code == 2 and text.count("\n") == 1 and text.endswith("\n"), text
    return text


def test_an_evaluation_of_one_run_has_error_bars(tmp_path):
    rows = [
        {"step": 0, "eval/solved": 0.2, "eval/stderr": 0.1},
        {"step": 0, "eval/a/solved": 0.4, "eval/a/stderr": 0.02},
        {"step": 9, "eval/solved": 0.5, "eval/stderr": None},
    ]
    one = plot.Series("one", [rows])
    assert_allclose(plot.error_bars(one, "eval/solved"), [0.196, 0])
    assert_allclose(plot.error_bars(one, "eval/a/solved"), [0.0392])
    assert plot.error_bars(plot.Series("two", [rows, rows]), "eval/solved") is None


def test_a_curve_is_the_mean_and_range_of_the_runs_that_came_so_far(tmp_path):
    rng = np.random.default_rng(0)
    runs = [write_run(tmp_path / f"{n}", rng, steps=n) for n in (12, 9, 10)]
    series = plot.Series("three", runs)
    curve = plot.curve_of(series, "entropy", "step")
    values = np.full((3, 12), np.nan)
    for i, rows in enumerate(runs):
        steps, entropies = column(rows, "entropy")
        values[i, np.array(steps) - 1] = entropies
    assert curve.x == [*range(1, 13)]
    assert_allclose(curve.mean, np.nanmean(values, 0))
    assert_allclose(curve.least, np.nanmin(values, 0))
    assert_allclose(curve.most, np.nanmax(values, 0))
    # Over minutes, an evaluation is drawn at the end of its step.
    minutes = [np.cumsum(column(rows, "time/step_s")[1]) / 60 for rows in runs]
    over_minutes = plot.curve_of(series, "eval/solved", "minutes")
    assert len(over_minutes.x) == 4
    assert_allclose(over_minutes.x[:3], [np.mean([m[s - 1] for m in minutes]) for s in (3, 6, 9)])
    assert_allclose(over_minutes.x[3], minutes[0][11])


def test_what_is_no_finite_number_is_not_drawn():
    rows = [{"step": n, "solved": value} for n, value in enumerate([0.5, "0.5", math.nan, None])]
    rows += [{"step": 4, "kl": "high"}, {"step": 5, "solved": 1}]
    series = plot.Series("one", [rows])
    curve = plot.curve_of(series, "solved", "step")
    assert (curve.x, curve.mean) == ([0, 5], [0.5, 1])
    assert plot.metrics_in([series]) == {"solved"}


def test_arguments_name_runs_and_groups(tmp_path):
    assert plot.split_label("rloo=out/a,out/b.jsonl") == ("rloo", ["out/a", "out/b.jsonl"])
    assert plot.split_label("out/b.jsonl") == ("b", ["out/b.jsonl"])
    assert plot.split_label("out/run/metrics.jsonl") == ("run", ["out/run/metrics.jsonl"])
    for name in ("b2", "b1", "a"):
        (tmp_path / name).mkdir()
    found = [str(tmp_path / name) for name in ("b1", "b2", "a")]
    assert plot.split_label(f"two={tmp_path}/b*,{tmp_path}/a") == ("two", found)
    # A path may have an equals sign.
    odd = tmp_path / "lr=1"
    odd.mkdir()
    assert plot.split_label(f"{odd}") == ("lr=1", [f"{odd}"])


def texts_in(svg):
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)


@needs_matplotlib
def test_a_picture_has_a_panel_of_each_metric_and_a_line_of_each_run(tmp_path):
    from matplotlib.figure import Figure

    rng = np.random.default_rng(0)
    rows = {name: write_run(tmp_path / name, rng) for name in ("first", "second")}
    to = tmp_path / "curves.svg"
    words = [str(tmp_path / name) for name in rows] + ["--to", str(to)]
    plot.main(words)
    svg = to.read_text()
    wanted = [*PANELS, *rows]
    wanted[1] = "solved (dots: eval/solved)"
    assert not {*wanted} - {*texts_in(svg)}, texts_in(svg)
    plot.main(words)
    assert to.read_text() == svg, "a picture drawn again is another file"
    png = tmp_path / "curves.png"
    plot.main([*words, "--panels", "kl,eval/solved", "--over", "minutes", "--to", str(png)])
    assert png.read_bytes().startswith(b"\x89PNG")
    # Check the curves in a panel.
    axes = Figure().add_subplot()
    plot.draw_panel(axes, [plot.Series(name, [rows[name]]) for name in rows], "solved", "step")
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert drawn == [
        column(rows[name], metric) for name in rows for metric in ("solved", "eval/solved")
    ]


@needs_matplotlib
def test_copied_metrics_are_small_and_draw_the_same(tmp_path):
    rows = write_run(tmp_path / "run", np.random.default_rng(0))
    to = tmp_path / "all.svg"
    words = ["--panels", "solved,kl"]
    plot.main([str(tmp_path / "run"), *words, "--to", str(to), "--copy", str(tmp_path / "few")])
    copied = read_jsonl(tmp_path / "few/run.jsonl")
    assert len(copied) == len(rows)
    for row, few in zip(rows, copied, strict=True):
        assert few.keys() == row.keys() - {"mfu"}
        assert_allclose([few[name] for name in few], [row[name] for name in few], rtol=1e-5)
    # Compare texts, not positions, because the copied numbers are rounded.
    again = tmp_path / "again.svg"
    plot.main([str(tmp_path / "few/run.jsonl"), *words, "--to", str(again)])
    assert texts_in(again.read_text()) == texts_in(to.read_text())


def test_copied_metrics_keep_the_error_bars_of_every_set(tmp_path):
    row = {"step": 1, "eval/math/solved": 0.5, "eval/math/stderr": 0.1, "mfu": 0.3}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(row) + "\n")
    plot.copy_small([str(tmp_path / "run")], str(tmp_path / "few"), ["eval/math/solved"])
    (copied,) = read_jsonl(tmp_path / "few/run.jsonl")
    assert copied == {name: row[name] for name in row if name != "mfu"}


def test_plots_refuse_in_one_line(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    write_run(run, np.random.default_rng(0))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "it has no metrics.jsonl" in refusal(capsys, plot, empty)
    assert "or its first step has not ended" in refusal(capsys, plot, empty)
    assert "it has no metrics.jsonl" in refusal(capsys, plot, f"a={run},{tmp_path}/absent")
    (empty / "metrics.jsonl").write_text("")
    assert "has no rows yet" in refusal(capsys, plot, run, empty)
    for tool in plot, samples:
        text = refusal(capsys, tool, "gs://bucket/run")
        assert "gcloud storage cp 'gs://bucket/run/*.json*' run" in text, text
    assert "neither .svg nor .png" in refusal(capsys, plot, run, "--to", "plot.gif")
    text = refusal(capsys, plot, run, "--panels", "kl,reward")
    assert "no run has numbers for the metric reward" in text and "reward/mean" in text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refusal(capsys, plot, run, "--to", tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


@needs_matplotlib
def test_a_picture_that_cannot_be_written_is_refused(tmp_path, capsys):
    write_run(tmp_path / "run", np.random.default_rng(0))
    to = tmp_path / "absent/a.svg"
    assert "cannot be written" in refusal(capsys, plot, tmp_path / "run", "--to", to)


@needs_matplotlib
def test_the_picture_of_readme_comes_from_its_command(tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"python tools/plot.py (.* --to assets/reward.svg)", readme)
    monkeypatch.chdir(ROOT)
    to = tmp_path / "reward.svg"
    plot.main([*shlex.split(command)[:-1], str(to)])
    committed = (ROOT / "assets/reward.svg").read_text()
    assert texts_in(to.read_text()) == texts_in(committed)


# ---------------------------------------------------------------- answers
def write_answers(directory):
    """Write the answers of a run with three evaluations of two questions, and with two answers in
    each of two steps."""
    evals, rows = [], []
    for step in (0, 5, 10):
        for i in range(2):
            row = {"question": f"What is {i} + 1?", "answer": f"e{step}q{i} " + "because " * 9}
            evals.append({"step": step, "set": "s"} | row | {"solved": float(step > 5 * i)})
    for step in (1, 6):
        for i in range(2):
            row = {"question": f"What is {step} + 7?", "answer": f"t{step}a{i}\nthen\x1b[31m"}
            scores = {"reward/long": step / 2, "reward/odd": 0.5} if step == 6 else {}
            rows.append(
                {"step": step} | row | {"reward": step + i / 4, "truncated": i == 1} | scores
            )
    directory.mkdir()
    for name, part in (("evals", evals), ("samples", rows)):
        text = "".join(json.dumps(row | {"reference": "1"}) + "\n" for row in part)
        (directory / f"{name}.jsonl").write_text(text)


def shown(capsys, monkeypatch, columns, *words):
    monkeypatch.setenv("COLUMNS", str(columns))
    samples.main([str(word) for word in words])
    return capsys.readouterr().out


def test_answers_to_a_question_stand_side_by_side(tmp_path, capsys, monkeypatch):
    write_answers(tmp_path / "run")
    text = shown(capsys, monkeypatch, 100, tmp_path / "run")
    heads = [re.split(" {2,}", line) for line in text.split("\n") if line.startswith("step ")]
    assert heads == [
        ["step 0: wrong", "step 5: right", "step 10: right"],
        ["step 0: wrong", "step 5: wrong", "step 10: right"],
        ["step 1: reward 1.00", "step 1: reward 1.25, truncated"],
        ["step 6: reward 6.00: long 3.00, odd 0.50", "step 6: reward 6.25, truncated"],
    ]
    # Each answer begins in the same column as its head.
    lines = text.split("\n")
    head = next(i for i, line in enumerate(lines) if line.startswith("step 0"))
    for step in (0, 5, 10):
        place = lines[head].index(f"step {step}:")
        assert lines[head + 1].index(f"e{step}q0") == place
    assert text.count("because") == 6 * 9, "an answer is not complete"
    # Control sequences are made visible, so that the terminal does not obey them.
    assert "\x1b" not in text and text.count("then\N{REPLACEMENT CHARACTER}[31m") == 4
    assert max(map(len, lines)) <= 100


def test_a_question_of_two_sets_is_shown_for_each(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    answer = {"step": 0, "question": "What is 1 + 1?", "answer": "three", "solved": 0.0}
    rows = [answer | {"set": name, "reference": f"of {name}"} for name in ("a", "b")]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "run/evals.jsonl").write_text(text)
    text = shown(capsys, monkeypatch, 100, tmp_path / "run")
    assert text.count("What is 1 + 1?") == 2
    assert "reference: of a" in text and "reference: of b" in text


def test_a_narrow_terminal_shows_the_first_and_the_last(tmp_path, capsys, monkeypatch):
    write_answers(tmp_path / "run")
    text = shown(capsys, monkeypatch, 60, tmp_path / "run")
    assert "e0q1" in text and "e10q1" in text and "e5" not in text
    assert max(map(len, text.split("\n"))) <= 60
    # All steps that were asked for are shown, below one another if need be.
    text = shown(capsys, monkeypatch, 60, tmp_path / "run", "--steps", "0,5,10,6")
    places = [text.index(f"e{step}q1") for step in (0, 5, 10)]
    assert places == sorted(places) and "t6a0" in text and "t1a0" not in text
    assert text.count("because") == 6 * 9


def test_samples_refuse_in_one_line(tmp_path, capsys):
    write_answers(tmp_path / "run")
    assert "it has no answers in evals.jsonl or samples" in refusal(capsys, samples, tmp_path)
    text = refusal(capsys, samples, tmp_path / "run", "--steps", "3")
    assert "steps = 3" in text and "[0, 5, 10]" in text
    write_run(tmp_path / "other", np.random.default_rng(0))
    assert "it has no answers" in refusal(capsys, samples, tmp_path / "other")
    text = refusal(capsys, samples, tmp_path / "run", "--questions", "-1")
    assert "questions = -1 must be 0 or more" in text


def test_an_answer_that_is_solved_in_part_is_not_called_right(tmp_path, capsys):
    rows = [
        {"set": "a", "step": step, "question": "1 + 1?", "answer": f"it is {step}", "solved": share}
        for step, share in ((0, 0.5), (2, 1.0))
    ]
    assert [samples.verdict(row) for row in rows] == ["wrong", "right"]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log.print_answers(str(tmp_path), [0, 2])
    text = capsys.readouterr().out
    assert "wrong  it is 0" in text and "right  it is 2" in text, text


def test_the_summary_compares_evaluations_of_the_same_sets(tmp_path, capsys):
    """With --resume force, a run may be given other held-out questions."""
    rows = [
        {"step": 0, "eval/old/solved": 0.9, "eval/old/stderr": 0.1},
        {"step": 2, "eval/solved": 0.25, "eval/stderr": 0.05},
        {"step": 4, "eval/solved": 0.5, "eval/stderr": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log.print_summary(str(tmp_path), 0, 4, 60.0)
    line = "solved: 25.0% +- 9.8% at step 2 -> 50.0% +- 19.6% at step 4\n"
    assert line in capsys.readouterr().out


def test_answers_at_the_end_are_shortened_and_obey_no_control_character():
    text = log.shortened("\x1b[2J" + "a" * 1000 + "end")
    assert "\x1b" not in text and len(text) < 700 and text.endswith("end"), text
    assert log.shortened("42") == "42"
