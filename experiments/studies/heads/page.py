"""The page of `head_analysis.py`: tables, figures, and what they say."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import filled, frame, legend_below, spread
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.table import METHODS, Grid
from studies.heads.margins import Measured, by_task

ACCURACIES = {"average_accuracy": "Acc_Global", "local_average_accuracy": "Acc_Local", "just_trained": "Acc_Train"}
MATCHES = {"match": "match", "predicted": "predicted", "predicted_by_class": "predicted by class"}
Row = Mapping[str, Any]

HEAD = """# Designs of the head

Acc_Global: average accuracy after the last task where nothing is told; with one head, by the largest logit of all
classes. Acc_Local: with the task given, by the largest logit within it. Acc_Train: that right after each task was
learned. In %, means over runs with the standard deviation; `paper` is what the paper prints.

Match: how often the argmax within the task is that over all classes, after the last task and over all test images.
Only one head over all classes has it. Predicted: by the paper's theory, for normal and independent logits, from the
mean and deviation of the best logit within the task, those of all other classes' logits, and their number. Predicted by
class: the same with a mean and a deviation for each other class and each true class."""


def pages(rows: Sequence[Row], measured: Sequence[Measured], curves: Sequence[Row], out: Path) -> list[str]:
    """Tables, figures and sentences for each stream and backbone; draws the figures into `out`."""
    tasks, page = [task for one in measured for task in by_task(one)], [HEAD]
    if not tasks:
        match_figure(curves, [], out / "match.png")
        page.append("![Match probability by the number of rivals](match.png)")
    for place in dict.fromkeys((row["stream"], row["backbone"]) for row in rows):
        own = [row for row in rows if (row["stream"], row["backbone"]) == place]
        page += [f"## {' on '.join(place)}", accuracy_grid(own).to_markdown()]
        here = [task for task in tasks if (task["stream"], task["backbone"]) == place]
        if not here:
            continue
        stem = re.sub(r"[^\w.-]+", "-", "-".join(place))
        match_figure(curves, here, out / f"match-{stem}.png")
        page += [
            verdict(here),
            agreement([one for one in measured if one.margins and one.run.place == place]),
            f"![Match probability by the number of rivals, and measured against predicted](match-{stem}.png)",
            "Task by task, means over runs; the gap is that of the means in standard deviations, probabilities in %.",
            task_grid(here).to_markdown(),
        ]
    return page


def accuracy_grid(rows: Sequence[Row]) -> Grid:
    """The paper's table, with match probabilities behind it."""
    columns = {"method": [METHODS[row["method"]] for row in rows], "runs": [str(row["runs"] or "") for row in rows]}
    for name, title in {**ACCURACIES, **MATCHES}.items():
        columns[title] = [spread(row[name], 2) if row[name] else "" for row in rows]
        if name in ACCURACIES:
            columns[f"{title}, paper"] = [row["paper"].get(name, "") for row in rows]
    return filled("heads", columns)


def task_grid(tasks: Sequence[Row]) -> Grid:
    """Means over runs, for each method and task."""
    columns = ("method", "task", "rivals", "gap", *MATCHES.values(), "Acc_Global", "Acc_Local")
    rows = []
    for method, name in dict.fromkeys((task["method"], task["task"]) for task in tasks):
        own = [task for task in tasks if (task["method"], task["task"]) == (method, name)]

        def mean(key: str, own=own) -> float:
            return float(np.mean([task[key] for task in own]))

        percents = (f"{100 * mean(key):.1f}" for key in (*MATCHES, "accuracy", "local_accuracy"))
        rows.append((METHODS[method], name, f"{mean('rivals'):.0f}", f"{mean('scaled_gap'):.2f}", *percents))
    return Grid("tasks", columns, tuple(rows), 2)


def verdict(tasks: Sequence[Row]) -> str:
    """Where the theory fails: measured minus predicted."""
    off, off_by_class = (
        100 * np.array([task["match"] - task[name] for task in tasks]) for name in ("predicted", "predicted_by_class")
    )
    far = tasks[int(np.abs(off).argmax())]
    rms, rms_by_class = (float(np.sqrt((errors**2).mean())) for errors in (off, off_by_class))
    fails = "the rivals are not alike" if rms_by_class < rms / 2 else "logits are not normal, or not independent"
    return (
        f"Measured minus predicted match probability, over {len(off)} tasks: {off.mean():+.1f} points on average, from "
        f"{off.min():+.1f} to {off.max():+.1f}, root mean square {rms:.1f}; predicted is too high for "
        f"{int((off < 0).sum())} of them. Farthest off is {METHODS[far['method']]} on {far['task']}: measured "
        f"{100 * far['match']:.1f} %, predicted {100 * far['predicted']:.1f} %. Predicted by class it is "
        f"{off_by_class.mean():+.1f} points on average, root mean square {rms_by_class:.1f}: the approximation fails "
        f"mainly because {fails}."
    )


def agreement(measured: Sequence[Measured]) -> str:
    """Whether the logits give the accuracies that the runs had recorded."""
    farthest = max(
        abs(getattr(margins, name) - one.run.results[name][-1][index])
        for one in measured
        for index, margins in enumerate(one.margins)
        for name in ("accuracy", "local_accuracy")
    )
    if farthest == 0:
        return "The logits give the very accuracies that the runs had recorded."
    return f"Accuracies by these logits are up to {100 * farthest:.2f} points from those that the runs had recorded."


MARKERS = {"ewc": "^", "moal": "v", "coda_prompt": "D", "dualprompt": "s", "l2p": "o"}
GAPS = Normalize(0, 5)
COLOURS = colormaps["viridis_r"]


def match_figure(curves: Sequence[Row], measured: Sequence[Row], file: Path) -> None:
    """What the theory says for several gaps, with measured tasks laid over it and, beside it, held against it.

    Left, the theory's deviations are equal: a task stands at its number of rivals, coloured by its gap in sigmas.
    """
    figure = Figure(figsize=(10.5 if measured else 6.4, 4.8), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]
    axes = panels[0]
    for curve in curves:
        colour = COLOURS(GAPS(curve["gap"]))
        axes.plot(curve["rivals"], curve["quadrature"], color=colour, linewidth=1.8)
        axes.plot(1, curve["one_rival"], "D", markersize=8, markerfacecolor="none", markeredgecolor=colour)
    for task in measured:
        _point(axes, task, task["rivals"])
    axes.set(xscale="log", ylim=(-0.03, 1.03))
    frame(axes, x="classes of other tasks, M", y="P(argmax within the task = argmax of all)", grid=True)
    bar = figure.colorbar(ScalarMappable(GAPS, COLOURS), ax=axes, pad=0.01, fraction=0.045)
    bar.set_label("gap of the means, in standard deviations", color=FAINT, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    if measured:
        panels[1].plot([0, 1], [0, 1], color=FAINT, linewidth=1)
        for task in measured:
            marker, x, y = MARKERS[task["method"]], task["predicted_by_class"], task["match"]
            panels[1].plot(x, y, marker, markersize=5, markerfacecolor="none", markeredgecolor=FAINT)
            _point(panels[1], task, task["predicted"])
        panels[1].set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        x = "predicted for rivals that are alike (hollow: class by class)"
        frame(panels[1], x=x, y="measured", grid=True)
    handles = [
        Line2D([], [], color=FAINT, linewidth=1.8, label="quadrature"),
        Line2D([], [], color=FAINT, marker="D", markerfacecolor="none", linestyle="none", label="closed form, M = 1"),
    ]
    for method in dict.fromkeys(task["method"] for task in measured):
        handles.append(
            Line2D([], [], color=FAINT, marker=MARKERS[method], linestyle="none", label=f"{METHODS[method]}, a task")
        )
    legend_below(figure, handles)
    figure.suptitle("How often the argmax within a task is the argmax of all", fontsize=12, color=INK)
    save(figure, file)


def _point(axes: Axes, task: Row, x: float) -> None:
    colour = COLOURS(GAPS(task["scaled_gap"]))
    axes.plot(
        x, task["match"], MARKERS[task["method"]], color=colour, markersize=7, markeredgecolor=INK, markeredgewidth=0.6
    )
