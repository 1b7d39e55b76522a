"""Transfer against forgetting, ours and the paper's, and how the components rank in both."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import frame
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox, BboxBase

from cheem_jax.report.figures import DPI, FAINT, INK, save

OTHERS, CHOSEN = "#1b6ca8", "#c8553d"
MEMORY = ("mlp_down", "projection")
"""The components that the paper chooses between."""
TITLES = {"average_accuracy": "average accuracy", "average_forgetting": "average forgetting"}
OFFSETS = ((7, 0), (-7, 0), (0, 8), (0, -8), (6, 9), (6, -9), (-6, 9), (-6, -9), (8, 18), (8, -18), (-8, 18), (-8, -18))
"""Where a label may stand beside its point, in points of type; the first place that is free counts."""
Rows = Sequence[Mapping[str, Any]]


def picture(rows: Rows, setting: Mapping[str, Any], paper: str, file: Path) -> None:
    """Two panels of percentages and two of ranks; every row has forgetting and ranks."""
    figure = Figure(figsize=(11, 10), dpi=DPI, layout="constrained")
    panels = figure.subplots(2, 2)
    ours = [(row["average_forgetting"]["mean"], row["average_accuracy"]["mean"]) for row in rows]
    papers = [(row["paper"]["average_forgetting"], row["paper"]["average_accuracy"]) for row in rows]
    tasks = f"{len(setting['tasks'])} tasks of {setting['stream']}"
    planes = ((f"ours: {setting['backbone']}, {tasks}", ours), (f"paper: {paper}, another scale", papers))
    placed = []
    for axes, (title, points) in zip(panels[0], planes, strict=True):
        axes.margins(0.16, 0.1)
        _dots(axes, rows, points, title, "average forgetting, points", "average accuracy, %")
        placed.append((axes, points))
    for axes, (measure, title) in zip(panels[1], TITLES.items(), strict=True):
        points = [(row["ranks"][measure]["ours"], row["ranks"][measure]["paper"]) for row in rows]
        _dots(axes, rows, points, f"rank of the {title}, 1 is best", "ours", "paper")
        axes.axline((1, 1), slope=1, color=FAINT, linewidth=0.8, linestyle=(0, (1, 1.2)), zorder=0)
        ticks = range(1, len(rows) + 1)
        axes.set(xlim=(0.4, len(rows) + 1.6), ylim=(len(rows) + 0.6, 0.4), xticks=ticks, yticks=ticks)
        placed.append((axes, points))
    figure.suptitle("Components of a ViT block: how well they transfer, how much they forget", fontsize=12, color=INK)
    figure.draw_without_rendering()  # labels are placed by what they measure
    for axes, points in placed:
        _label(axes, rows, points)
    save(figure, file)


def _dots(axes: Axes, rows: Rows, points: Sequence[tuple[float, float]], title: str, along: str, up: str) -> None:
    for row, (x, y) in zip(rows, points, strict=True):
        axes.plot(x, y, "o", markersize=5, color=CHOSEN if row["name"] in MEMORY else OTHERS)
    frame(axes, title, along, up, grid=True)


def _label(axes: Axes, rows: Rows, points: Sequence[tuple[float, float]]) -> None:
    """Every component's name beside its point, where it covers least of the points and of other names."""
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform(points)]
    for row, point in zip(rows, points, strict=True):
        text = axes.annotate(
            f"{row['index']} {row['title']}", point, (0, 0), textcoords="offset points", fontsize=9,
            color=CHOSEN if row["name"] in MEMORY else INK, in_layout=False,
        )  # fmt: skip
        boxes = [_move(text, offset) for offset in OFFSETS]
        covered = [
            box.width * box.height - _common(box, axes.bbox) + sum(_common(box, other) for other in taken)
            for box in boxes
        ]
        taken.append(_move(text, OFFSETS[covered.index(min(covered))]))


def _move(text: Annotation, offset: tuple[int, int]) -> Bbox:
    x, y = offset
    text.set_position(offset)
    text.set(ha="left" if x > 0 else "right" if x < 0 else "center")
    text.set(va="bottom" if y > 0 else "top" if y < 0 else "center")
    return text.get_window_extent()


def _common(a: Bbox, b: BboxBase) -> float:
    shared = Bbox.intersection(a, b)
    return 0.0 if shared is None else shared.width * shared.height
