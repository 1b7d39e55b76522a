"""The figures of a run as PNG files, from `results.json`, without a display."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.metrics import matrix_from_json
from cheem_jax.core.ops import COLOURS
from cheem_jax.report.memories import MARK, after_learning, origin_name
from cheem_jax.report.table import spread

INK, FAINT, ABSENT = "#262626", "#757575", "#c4c4c4"
DPI = 150
MEANING = {
    "reuse": "reuse an expert as it is",
    "adapt": "adapt one by a low-rank Δ",
    "new": "learn a new one",
    "skip": "skip the branch",
}
MOST_ROWS, MOST_CELLS, MOST_PANELS = 60, 30, 24
"""Tasks in a grid of architectures, along a side of a heat map, and with a heat map of their own."""
LONGEST_NAME = 28
Results = Mapping[str, Any]


def architecture_grid(results: Results, file: Path, title: str | None = None) -> None:
    """Tasks in rows under the base, blocks in columns; colour is the op, text the source of its expert."""
    pool, shown = results["pool"], spread(len(results["tasks"]), MOST_ROWS)
    tasks, names = [results["tasks"][index] for index in shown], _labels(results)
    num_blocks, num_rows = len(pool), len(tasks) + 1
    labels = ["base", *(names[index] for index in shown)]
    left, right = 0.095 * max(map(len, labels)) + 0.3, 0.95
    width, height = 0.74, 0.46
    figure = Figure(figsize=(left + num_blocks * width + right, num_rows * height + 1.35), dpi=DPI)
    axes = _panel(figure, left, 0.6, num_blocks * width, num_rows * height)
    axes.set(xlim=(0, num_blocks), ylim=(num_rows, 0), xticks=[], yticks=[])
    axes.axis("off")
    for block in range(num_blocks):
        axes.text(block + 0.5, -0.15, f"B{block + 1}", ha="center", va="bottom", color=INK, fontsize=10)
        _cell(axes, block, 0, colour="#e8e8e8", text="base", ink=FAINT)
    axes.text(num_blocks + 0.2, -0.15, "params\nadded", ha="left", va="bottom", color=FAINT, fontsize=8)
    for row, label in enumerate(labels):
        axes.text(-0.15, row + 0.5, label, ha="right", va="center", color=INK, fontsize=10)
    has_mark = False
    for row, task in enumerate(tasks, start=1):
        for block, choice in enumerate(from_strings(task["architecture"])):
            source = "" if choice.expert is None else origin_name(pool[block][choice.expert]["origin"])
            text = {"reuse": source, "adapt": f"{source}+Δ"}.get(choice.kind, choice.kind)
            has_mark |= MARK in text
            ink = "#6b4a58" if choice.kind == "skip" else INK
            _cell(axes, block, row, colour=COLOURS[choice.kind], text=text, ink=ink)
        added = f"{task['params_added_percent']:.1f} %"
        axes.text(num_blocks + 0.2, row + 0.5, added, ha="left", va="center", color=FAINT, fontsize=9)
    figure.text(
        (left + num_blocks * width / 2) / figure.get_figwidth(), 1 - 0.12 / figure.get_figheight(),
        (title or f"The target network of each task: {results['stream']}, {results['backbone']}")
        + _of(shown, names)
        + (f" ({MARK}: from a forgotten task)" if has_mark else ""),
        ha="center", va="top", fontsize=12, color=INK,
    )  # fmt: skip
    handles = [FancyBboxPatch((0, 0), 1, 1, facecolor=colour, edgecolor="none") for colour in COLOURS.values()]
    columns = 4 if figure.get_figwidth() > 8 else 2
    figure.legend(
        handles, [MEANING[kind] for kind in COLOURS], loc="lower center", ncols=columns, frameon=False,
        fontsize=9, labelcolor=INK, handlelength=1.4, handleheight=1.0,
    )  # fmt: skip
    save(figure, file)


def accuracy_heatmap(results: Results, file: Path) -> None:
    """Accuracy after learning each task (row) on each task (column), task-agnostic and with the task ID given."""
    names = _labels(results)
    shown = spread(len(names), MOST_CELLS)
    labels, num_tasks = [names[index] for index in shown], len(shown)
    cell, gap = 0.56, 0.5
    side = max(num_tasks * cell, 2.9)  # room for the titles
    below = left = 0.072 * max(map(len, labels)) + 0.5
    figure = Figure(figsize=(left + 2 * side + gap + 1.0, below + side + 0.65), dpi=DPI)
    colours = colormaps["YlGnBu"].with_extremes(bad="#f4f4f4")
    panels = (("accuracy", "task ID inferred", ""), ("local_accuracy", "task ID given", "local_"))
    for index, (key, title, prefix) in enumerate(panels):
        axes = _panel(figure, left + index * (side + gap), below, side, side)
        percent = 100 * matrix_from_json(results[key])[np.ix_(shown, shown)]
        axes.imshow(np.ma.masked_invalid(percent), cmap=colours, vmin=0, vmax=100, aspect="auto")
        for (row, column), value in np.ndenumerate(percent):
            if not np.isnan(value):
                ink = "white" if value > 55 else INK
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9)
        axes.set_xticks(range(num_tasks), labels, rotation=90, fontsize=9)
        axes.set_yticks(range(num_tasks), labels if index == 0 else [""] * num_tasks, fontsize=9)
        if index == 0:
            axes.set_ylabel("after learning", color=FAINT)
        axes.set_xlabel("tested on", color=FAINT)
        average, forgetting = results[f"{prefix}average_accuracy"], results[f"{prefix}average_forgetting"]
        text = f"{title}{_of(shown, names)}\n{_average(results, average, key)}"
        if forgetting is not None:
            text += f", forgetting {100 * forgetting:.1f} points"
        axes.set_title(text, fontsize=10, color=INK)
        _bare(axes)
    scale = figure.add_axes(_fractions(figure, left + 2 * side + gap + 0.2, below, 0.15, side))
    _colour_bar(figure, scale, colours, Normalize(0, 100), "accuracy, %")
    save(figure, file)


def _average(results: Results, average: float | None, key: str) -> str:
    if average is not None:
        return f"average {100 * average:.1f} %"
    mean, _ = after_learning(results, key)
    return "not measured" if mean is None else f"right after learning {100 * mean:.1f} %"


def similarity_heatmap(results: Results, file: Path) -> None:
    """Per task S of every earlier network at every block, in [-1, 1]; grey where it skips the block."""
    names, num_blocks = _labels(results), len(results["pool"])
    similarity = [
        np.array([[np.nan if s is None else s for s in row] for row in task]) for task in results["similarity"]
    ]
    shown = spread(len(names), MOST_PANELS)
    num_columns = min(3 if len(shown) > 6 else 2, len(shown))
    cell_width, cell_height, left, top, gap = 0.27, 0.24, 0.62, 0.36, 0.3
    rows = [shown[start : start + num_columns] for start in range(0, len(shown), num_columns)]
    heights = [max(min(len(similarity[task]), MOST_CELLS) for task in row) * cell_height for row in rows]
    panel_width = num_blocks * cell_width
    panels_width = num_columns * (left + panel_width)
    width = max(panels_width + 0.25, 5.6)
    height = sum(heights) + len(rows) * (top + gap) + 0.95
    figure = Figure(figsize=(width, height), dpi=DPI)
    colours = colormaps["RdBu_r"].with_extremes(bad=ABSENT)
    y = height - 0.4
    for row, row_height in zip(rows, heights, strict=True):
        for column, task in enumerate(row):
            earlier = spread(len(similarity[task]), MOST_CELLS)
            values = similarity[task][earlier]
            x = (width - panels_width - 0.15) / 2 + column * (left + panel_width) + left
            tall = len(values) * cell_height
            axes = _panel(figure, x, y - top - tall, panel_width, tall)
            axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=-1, vmax=1, aspect="auto")
            axes.set_title(names[task], fontsize=10, color=INK, loc="left", pad=4)
            axes.set_yticks(range(len(values)), ["base" if i == 0 else origin_name(i - 1) for i in earlier], fontsize=8)
            axes.set_xticks(range(num_blocks), [str(block + 1) for block in range(num_blocks)], fontsize=7)
            _bare(axes)
        y -= top + row_height + gap
    figure.text(
        0.5, 1 - 0.1 / height,
        f"Similarity S of a new task to the earlier networks, block by block{_of(shown, names)}",
        ha="center", va="top", fontsize=12, color=INK,
    )  # fmt: skip
    bar = figure.add_axes(_fractions(figure, width / 2 - 1.2, 0.42, 2.4, 0.12))
    _colour_bar(figure, bar, colours, Normalize(-1, 1), "S by block; grey: that network skips it", "horizontal")
    save(figure, file)


def save(figure: Figure, file: Path) -> None:
    """Write a PNG whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    write_atomically(file, content.getvalue())


def _labels(results: Results) -> list[str]:
    """`T3 food10`: tasks are numbered from 0, as everywhere in the results."""
    names = [task["name"] for task in results["tasks"]]
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    names = [name.replace("$", r"\$") for name in names]  # a pair would start a formula
    return [f"{origin_name(index)} {name}" for index, name in enumerate(names)]


def _of(shown: list[int], names: list[str]) -> str:
    return "" if len(shown) == len(names) else f" ({len(shown)} of {len(names)} tasks)"


def _fractions(figure: Figure, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    """A rectangle in inches from the lower left, as fractions of the figure."""
    return (
        x / figure.get_figwidth(),
        y / figure.get_figheight(),
        width / figure.get_figwidth(),
        height / figure.get_figheight(),
    )


def _panel(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    return figure.add_axes(_fractions(figure, x, y, width, height))


def _cell(axes: Axes, column: int, row: int, *, colour: str, text: str, ink: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (column + 0.1, row + 0.14),
            0.8,
            0.72,
            boxstyle="round,pad=0.03,rounding_size=0.1",
            facecolor=colour,
            edgecolor="none",
        )
    )
    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=9)


def _bare(axes: Axes) -> None:
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for edge in np.arange(0.5, axes.get_xlim()[1] - 0.5):
        axes.axvline(edge, color="white", linewidth=1)
    for edge in np.arange(0.5, axes.get_ylim()[0] - 0.5):
        axes.axhline(edge, color="white", linewidth=1)


def _colour_bar(
    figure: Figure,
    axes: Axes,
    colours: Colormap,
    norm: Normalize,
    label: str,
    orientation: Literal["vertical", "horizontal"] = "vertical",
) -> None:
    bar = figure.colorbar(ScalarMappable(norm, colours), cax=axes, orientation=orientation)
    bar.set_label(label, color=FAINT, fontsize=9)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    axes.tick_params(length=0, labelsize=8, colors=INK)
