"""Transfer against forgetting, ours and the paper's, and how the components rank in both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import frame
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cheem_jax.report.figures import DPI, FAINT, INK, save

OTHERS, CHOSEN = "#1b6ca8", "#c8553d"
MEMORY = ("mlp_down", "projection")
"""The components that the paper chooses between."""
TITLES = {"average_accuracy": "average accuracy", "average_forgetting": "average forgetting"}
Rows = Sequence[Mapping[str, Any]]


def picture(rows: Rows, setting: Mapping[str, Any], paper: str, file: Path) -> None:
    """Two panels of percentages and two of ranks; every row has forgetting and ranks."""
    figure = Figure(figsize=(11, 10), dpi=DPI, layout="constrained")
    panels = figure.subplots(2, 2)
    ours = [(row["average_forgetting"]["mean"], row["average_accuracy"]["mean"]) for row in rows]
    papers = [(row["paper"]["average_forgetting"], row["paper"]["average_accuracy"]) for row in rows]
    tasks = f"{len(setting['tasks'])} tasks of {setting['stream']}"
    planes = ((f"ours: {setting['backbone']}, {tasks}", ours), (f"paper: {paper}, another scale", papers))
    for axes, (title, points) in zip(panels[0], planes, strict=True):
        axes.margins(0.16, 0.1)
        _dots(axes, rows, points, title, "average forgetting, points", "average accuracy, %")
    for axes, (measure, title) in zip(panels[1], TITLES.items(), strict=True):
        points = [(row["ranks"][measure]["ours"], row["ranks"][measure]["paper"]) for row in rows]
        _dots(axes, rows, points, f"rank of the {title}, 1 is best", "ours", "paper")
        axes.axline((1, 1), slope=1, color=FAINT, linewidth=0.8, linestyle=(0, (1, 1.2)), zorder=0)
        ticks = range(1, len(rows) + 1)
        axes.set(xlim=(0.4, len(rows) + 0.6), ylim=(len(rows) + 0.6, 0.4), xticks=ticks, yticks=ticks)
    names = "   ".join(f"{row['index']} {row['title']}" for row in rows)
    figure.supxlabel(names, fontsize=9, color=INK, wrap=True)
    figure.suptitle("Components of a ViT block: how well they transfer, how much they forget", fontsize=12, color=INK)
    save(figure, file)


def _dots(axes: Axes, rows: Rows, points: Sequence[tuple[float, float]], title: str, along: str, up: str) -> None:
    """A dot per component with its number in the paper's table."""
    for row, (x, y) in zip(rows, points, strict=True):
        colour = CHOSEN if row["name"] in MEMORY else OTHERS
        axes.plot(x, y, "o", markersize=5, color=colour)
        axes.annotate(str(row["index"]), (x, y), (5, 3), textcoords="offset points", fontsize=9, color=colour)
    frame(axes, title, along, up, grid=True)
