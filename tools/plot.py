"""Plot the learning curves of runs, from their metrics.jsonl, as SVG or PNG.

python tools/plot.py out/arith-tiny                           # plot.svg
python tools/plot.py out/seed1 out/seed2 --to curves.png
python tools/plot.py "grpo=out/grpo-*" rloo=out/r1,out/r2,out/r3 --over minutes

Give the directory of a run, or a file like its metrics.jsonl. After a label and =, `*` matches
several runs. Runs under one label are drawn as one curve: their mean, in a band from their minimum
to their maximum.
"""

import glob
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infra.host.console import check, exit_on
from infra.run.log import json_line, read_jsonl
from tools.arguments import check_is_here, parser_of

# The default panels.
PANELS = "reward/mean solved len/answer entropy kl grad_norm time/step_s"
# {metric of training: the evaluations that its panel also shows}
BESIDE = {"solved": "eval/solved"}
# If there are several sets of held-out questions, each set has a panel of its own.
EVAL_OF_SET = r"eval/(.+)/solved"
COLUMNS = 4
INCHES = 3.2, 2.6  # width and height of a panel


def read_rows(out: str, name: str) -> list[dict]:
    """Read the rows of OUT/name, or of OUT if it is a file. Exits with code 2 if there are none."""
    path = out if os.path.isfile(out) else f"{out}/{name}"
    check_is_here(out)
    check(
        os.path.isfile(path),
        f"{out} is not the directory of a run, or its first step has not ended: it has no {name}",
    )
    with exit_on(OSError, f"{path} cannot be read"):
        rows = read_jsonl(path)
    check(rows, f"{path} has no rows yet")
    return rows


# ---------------------------------------------------------------- from runs to curves
@dataclass(frozen=True)
class Series:
    """The runs that are drawn as one curve."""

    label: str
    runs: list[list[dict]]  # the rows of each run's metrics.jsonl


@dataclass(frozen=True)
class Curve:
    """A metric of a series, with a point at each step for which at least one run has the metric."""

    x: list[float]
    mean: list[float]
    least: list[float]
    most: list[float]


def split_label(argument: str) -> tuple[str, list[str]]:
    """Parse label=OUT1,OUT* to (label, [OUT1, OUT2, OUT3]), and OUT to (its name, [OUT])."""
    label, equals, patterns = argument.partition("=")
    # A path may contain = as well.
    if equals and not os.path.exists(argument):
        outs = []
        for pattern in patterns.split(","):
            # Keep a pattern that matches nothing, so that the error of read_rows names it.
            outs += sorted(glob.glob(pattern)) or [pattern]
        return label, outs
    path = Path(argument)
    if path.name == "metrics.jsonl":
        path = path.parent
    return path.resolve().name.removesuffix(".jsonl"), [argument]


def minutes_by_step(rows: list[dict]) -> dict[int, float]:
    """Returns {step: minutes of all steps up to this one}, without evaluations and checkpoints."""
    total = 0.0
    minutes = {0: 0.0}
    for row in rows:
        total += row.get("time/step_s") or 0.0
        minutes[row["step"]] = total / 60
    return minutes


def values_by_step(rows: list[dict], metric: str) -> dict[int, float]:
    """Returns {step: value} of a metric, without the steps where it is not a finite number."""
    return {row["step"]: row[metric] for row in rows if is_number(row.get(metric))}


def is_number(value) -> bool:
    """Whether a value is a finite number, or a bool."""
    return isinstance(value, float | int) and math.isfinite(value)


def curve_of(series: Series, metric: str, over: str) -> Curve:
    """Returns a metric over steps or over minutes. A point averages the metric, and the minutes,
    over the runs that have the metric at this step."""
    values = [values_by_step(rows, metric) for rows in series.runs]
    minutes = [minutes_by_step(rows) for rows in series.runs]
    curve = Curve([], [], [], [])
    # Runs that have not reached the step do not count in the mean.
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


def error_bars(series: Series, metric: str) -> list[float] | None:
    """Returns half the width of the 95% interval of each point of an evaluation, from its standard
    error over questions. Returns None for several runs, whose range is drawn instead."""
    if len(series.runs) > 1:
        return None
    (rows,) = series.runs
    stderr = values_by_step(rows, metric.removesuffix("solved") + "stderr")
    return [1.96 * stderr.get(step, 0.0) for step in sorted(values_by_step(rows, metric))]


def metrics_in(all_series: list[Series]) -> set[str]:
    """Returns the names of the metrics that are a finite number in at least one row."""
    rows = [row for series in all_series for run in series.runs for row in run]
    numbers = [name for row in rows for name in row if is_number(row[name])]
    return {*numbers} - {"step"}


def choose_panels(asked: str, all_series: list[Series]) -> list[str]:
    """Returns the panels that were asked for. By default, returns the names in PANELS that the runs
    have data for, and the evaluations of several sets."""
    known = metrics_in(all_series)
    if not asked:
        # A run of supervised steps only, for example, has no reward. An evaluation gets a panel of
        # its own if there is no curve to draw it beside.
        default = [name for name in PANELS.split() if name in known]
        default += [BESIDE[name] for name in BESIDE if name not in known and BESIDE[name] in known]
        return default + sorted(name for name in known if re.fullmatch(EVAL_OF_SET, name))
    panels = asked.split(",")
    having = ", ".join(sorted(known))
    for name in panels:
        check(
            name in known,
            f"no run has numbers for the metric {name}; the metrics with numbers are {having}",
        )
    return panels


# ---------------------------------------------------------------- files
def copy_small(arguments: list[str], directory: str, panels: list[str]) -> None:
    """Write the metrics of these panels and of the default panels to DIRECTORY/<run>.jsonl."""
    kept = {"step", *panels, *PANELS.split(), *BESIDE.values()}
    outs = [out for argument in arguments for out in split_label(argument)[1]]
    texts = {}
    for out in outs:
        name = split_label(out)[0]
        clash = f"two runs are named {name}, and would be one file in {directory}; rename one"
        check(name not in texts, clash)
        rows = read_rows(out, "metrics.jsonl")
        drawn = [{key: row[key] for key in row if key in kept or is_stderr(key)} for row in rows]
        texts[name] = "".join(short_line(row) for row in drawn)
    with exit_on(OSError, f"{directory} cannot be written"):
        os.makedirs(directory, exist_ok=True)
        for name, text in texts.items():
            Path(f"{directory}/{name}.jsonl").write_text(text, encoding="utf-8")


def is_stderr(metric: str) -> bool:
    """Whether a metric is the standard error of an evaluation set, which error bars show."""
    return metric.startswith("eval/") and metric.endswith("/stderr")


def short_line(row: dict) -> str:
    """Format a row as a line of a .jsonl file, with 6 digits per number, which is enough for a
    plot."""
    short = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
    }
    return json_line(short)


def draw(all_series: list[Series], panels: list[str], over: str, to: str) -> None:
    """Draw the panels to a file. Exits with code 2 if matplotlib is missing, or writing fails."""
    try:
        # matplotlib is optional, and slow to import.
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        check(False, f"no matplotlib here: {sys.executable} -m pip install matplotlib")
    # Write text as text, not as paths. With a fixed salt, equal plots are equal files.
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
    """Draw a metric of all series, with its evaluations, if any, as dots."""
    title = panel
    for number, series in enumerate(all_series):
        color = f"C{number}"
        # matplotlib reads text between dollar signs as a formula, and leaves out labels that begin
        # with an underscore.
        label = series.label.replace("$", r"\$")
        if label.startswith("_"):
            label = f" {label}"
        if len(series.runs) > 1:
            label += f" (mean and range of {len(series.runs)})"
        curve = curve_of(series, panel, over)
        # Evaluations are few, so mark each with a dot.
        marker = "o" if panel.startswith("eval/") else ""
        axes.plot(curve.x, curve.mean, color=color, label=label, marker=marker, lw=1.4, ms=4)
        axes.fill_between(curve.x, curve.least, curve.most, color=color, alpha=0.2, lw=0)
        evaluation = panel if marker else BESIDE.get(panel)
        evaluated = curve_of(series, evaluation, over) if evaluation else None
        if evaluated and evaluated.x:
            bars = error_bars(series, evaluation)
            axes.errorbar(evaluated.x, evaluated.mean, bars, fmt="none", ecolor=color, lw=1)
        if evaluated and evaluated.x and not marker:
            title = f"{panel} (dots: {evaluation})"
            axes.plot(evaluated.x, evaluated.mean, "o", color=color, ms=5, mec="white")
    axes.set_title(title.replace("$", r"\$"), fontsize=10)
    axes.set_xlabel(over)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main(argv: list[str]) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+", metavar="OUT", help="OUT, or label=OUT1,OUT2,...")
    parser.add_argument("--to", default="plot.svg", help="the picture, .svg or .png")
    parser.add_argument("--panels", default="", help="metrics, such as reward/mean,eval/solved")
    parser.add_argument("--over", default="step", choices=["step", "minutes"])
    parser.add_argument("--copy", default="", metavar="DIR", help="write the drawn metrics to DIR")
    args = parser.parse_args(argv)
    check(args.to.endswith((".svg", ".png")), f"to = {args.to} is neither .svg nor .png")
    all_series = []
    for argument in args.runs:
        label, outs = split_label(argument)
        all_series.append(Series(label, [read_rows(out, "metrics.jsonl") for out in outs]))
    panels = choose_panels(args.panels, all_series)
    check(panels, "these runs have no metric that is drawn by default; give --panels")
    check(
        args.over == "step" or "time/step_s" in metrics_in(all_series),
        "these runs have no time/step_s, so draw them --over step",
    )
    draw(all_series, panels, args.over, args.to)
    if args.copy:
        copy_small(args.runs, args.copy, panels)
    print(args.to)


if __name__ == "__main__":
    main(sys.argv[1:])
