"""Learning curves of runs, of their metrics.jsonl, as SVG or PNG.

python tools/plot.py out/arith-tiny                           # plot.svg
python tools/plot.py out/seed1 out/seed2 --to curves.png
python tools/plot.py "grpo=out/grpo-*" rloo=out/r1,out/r2,out/r3 --over minutes

A run is a directory, or a file as its metrics.jsonl; `*` stands for many. Runs behind one label are
drawn as their mean, in the band from the least to the most of them.
"""

import argparse
import glob
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.log import check, exit_on, json_line, read_jsonl

# An evaluation is drawn with dots, in the panel of the answers that were sampled in training.
PANELS = "reward/mean solved len/answer entropy kl grad_norm time/step_s"
BESIDE = {"solved": "eval/solved"}
COLUMNS = 4
INCHES = 3.2, 2.6  # of a panel


def read_rows(out: str, name: str) -> list[dict]:
    """The rows of OUT/name, or of OUT itself where that is a file. Exits 2 where there are none."""
    path = out if os.path.isfile(out) else f"{out}/{name}"
    check(os.path.isfile(path), f"{out} is no directory of a run: it has no {name}")
    with exit_on(OSError, f"{path} cannot be read"):
        rows = read_jsonl(path)
    check(rows, f"{path} has no rows yet")
    return rows


# ---------------------------------------------------------------- from runs to curves
@dataclass(frozen=True)
class Series:
    """Runs that are drawn as one curve."""

    label: str
    runs: list[list[dict]]  # rows of metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """A metric of a series, point by point, where at least one run has it."""

    x: list[float]
    mean: list[float]
    least: list[float]
    most: list[float]


def split_label(argument: str) -> tuple[str, list[str]]:
    """label=OUT1,OUT* -> (label, [OUT1, OUT2, OUT3]); OUT -> (its name, [OUT])"""
    label, equals, patterns = argument.partition("=")
    # A path may have = in it, too.
    if equals and not os.path.exists(argument):
        outs = []
        for pattern in patterns.split(","):
            # One that matches nothing is named where it is read.
            outs += sorted(glob.glob(pattern)) or [pattern]
        return label, outs
    path = Path(argument)
    if path.name == "metrics.jsonl":
        path = path.parent
    return path.resolve().name.removesuffix(".jsonl"), [argument]


def minutes_by_step(rows: list[dict]) -> dict[int, float]:
    """The minutes that the steps up to each have taken, evaluations and checkpoints not counted."""
    total = 0.0
    minutes = {0: 0.0}
    for row in rows:
        total += row.get("time/step_s") or 0.0
        minutes[row["step"]] = total / 60
    return minutes


def values_by_step(rows: list[dict], metric: str) -> dict[int, float]:
    """The numbers of a metric; null stands for what is no number."""
    return {row["step"]: row[metric] for row in rows if row.get(metric) is not None}


def curve_of(series: Series, metric: str, over: str) -> Curve:
    """A metric over steps or over minutes: the mean of both over the runs that have the step."""
    values = [values_by_step(rows, metric) for rows in series.runs]
    minutes = [minutes_by_step(rows) for rows in series.runs]
    curve = Curve([], [], [], [])
    # A run that has not come so far is left out of the mean.
    for step in sorted(set().union(*values)):
        having = [i for i, of_run in enumerate(values) if step in of_run]
        numbers = [values[i][step] for i in having]
        x = step
        if over == "minutes":
            x = sum(minutes[i][step] for i in having) / len(having)
        curve.x.append(x)
        curve.mean.append(sum(numbers) / len(numbers))
        curve.least.append(min(numbers))
        curve.most.append(max(numbers))
    return curve


def metrics_in(all_series: list[Series]) -> set[str]:
    """The names that have a number in some row, as floats or ints."""
    rows = [row for series in all_series for run in series.runs for row in run]
    numbers = [name for row in rows for name in row if isinstance(row[name], float | int)]
    return {*numbers} - {"step"}


def choose_panels(asked: str, all_series: list[Series]) -> list[str]:
    """The panels that were asked for, or those of PANELS that have something to show."""
    known = metrics_in(all_series)
    # A run without evaluations has no eval/solved, one that only imitates no reward.
    if not asked:
        return [name for name in PANELS.split() if name in known]
    panels = asked.split(",")
    having = ", ".join(sorted(known))
    for name in panels:
        check(name in known, f"no run has the metric {name}; they have {having}")
    return panels


# ---------------------------------------------------------------- files
def copy_small(arguments: list[str], directory: str, panels: list[str]) -> None:
    """Write of each run what is drawn here or by default as DIRECTORY/<its name>.jsonl."""
    kept = {"step", *panels, *PANELS.split(), *BESIDE.values()}
    outs = [out for argument in arguments for out in split_label(argument)[1]]
    texts = {}
    for out in outs:
        name = split_label(out)[0]
        once = f"two runs are named {name}, and would be one file in {directory}; rename one"
        check(name not in texts, once)
        rows = read_rows(out, "metrics.jsonl")
        drawn = [{key: row[key] for key in row if key in kept} for row in rows]
        texts[name] = "".join(short_line(row) for row in drawn)
    os.makedirs(directory, exist_ok=True)
    for name, text in texts.items():
        Path(f"{directory}/{name}.jsonl").write_text(text, encoding="utf-8")


def short_line(row: dict) -> str:
    """A row as a line of a .jsonl file, numbers in 6 digits: no eye tells them from all."""
    short = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
    }
    return json_line(short)


def draw(all_series: list[Series], panels: list[str], over: str, to: str) -> None:
    """Draw the panels into a file. Exits 2 where matplotlib is missing or the file is refused."""
    try:
        # Optional, and slow to import.
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        check(False, f"no matplotlib here: {sys.executable} -m pip install matplotlib")
    # Text stays text, and a picture drawn again is the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "podgrpo"}
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = INCHES
    figure = Figure((width * columns, height * rows + 0.4), layout="constrained")
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        draw_panel(axes, all_series, panel, over)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    has_band = any(len(series.runs) > 1 for series in all_series)
    if len(all_series) > 1 or has_band:
        figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False)
    metadata = {"Date": None} if to.endswith(".svg") else {}
    with exit_on(OSError, f"{to} cannot be written"):
        figure.savefig(to, metadata=metadata, dpi=150)


def draw_panel(axes, all_series: list[Series], panel: str, over: str) -> None:
    """A metric of all series, and the evaluation that belongs beside it."""
    title = panel
    for number, series in enumerate(all_series):
        color = f"C{number}"
        label = series.label
        if len(series.runs) > 1:
            label += f" (mean and range of {len(series.runs)})"
        curve = curve_of(series, panel, over)
        # Evaluations are few: a dot shows where one was.
        marker = "o" if panel.startswith("eval/") else ""
        axes.plot(curve.x, curve.mean, color=color, label=label, marker=marker, lw=1.4, ms=4)
        axes.fill_between(curve.x, curve.least, curve.most, color=color, alpha=0.2, lw=0)
        beside = BESIDE.get(panel)
        evaluated = curve_of(series, beside, over) if beside else None
        if evaluated and evaluated.x:
            title = f"{panel} (dots: {beside})"
            axes.plot(evaluated.x, evaluated.mean, "o", color=color, ms=5, mec="white")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(over)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="OUT", help="OUT, or label=OUT1,OUT2,...")
    parser.add_argument("--to", default="plot.svg", help="the picture, .svg or .png")
    parser.add_argument("--panels", default="", help="metrics, as reward/mean,eval/solved")
    parser.add_argument("--over", default="step", choices=["step", "minutes"])
    parser.add_argument("--copy", default="", help="a directory for what is drawn, a .jsonl a run")
    args = parser.parse_args(argv)
    check(args.to.endswith((".svg", ".png")), f"to = {args.to} is neither .svg nor .png")
    all_series = []
    for argument in args.runs:
        label, outs = split_label(argument)
        all_series.append(Series(label, [read_rows(out, "metrics.jsonl") for out in outs]))
    panels = choose_panels(args.panels, all_series)
    draw(all_series, panels, args.over, args.to)
    if args.copy:
        copy_small(args.runs, args.copy, panels)
    print(args.to)


if __name__ == "__main__":
    main(sys.argv[1:])
