"""The figures of a run as PNG files, from `results.json`, without a display."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.metrics import matrix_from_json
from cheem_jax.core.ops import COLOURS
from cheem_jax.report.memories import MARK, cell_text, origin_name
from cheem_jax.report.table import MEANING, percent, spread

INK, FAINT = "#262626", "#757575"
DPI = 150
MOST_ROWS, MOST_CELLS = 60, 30
"""Tasks in a grid of architectures, and along a side of a heat map."""
LONGEST_NAME = 28
Results = Mapping[str, Any]


def architecture_grid(results: Results, file: Path, title: str | None = None) -> None:
    """Tasks in rows under the base, blocks in columns; colour is the op, text the source of its expert."""
    pool, shown, names = results["pool"], spread(len(results["tasks"]), MOST_ROWS), _labels(results)
    num_blocks, num_rows = len(pool), len(shown) + 1
    # the cells fill the figure, and saving adds room for what is around them
    figure = Figure(figsize=(num_blocks * 0.74, num_rows * 0.46), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, num_blocks), ylim=(num_rows, 0))
    axes.axis("off")
    for block in range(num_blocks):
        axes.text(block + 0.5, -0.15, f"B{block + 1}", ha="center", va="bottom", color=INK, fontsize=10)
        _cell(axes, block, 0, colour="#e8e8e8", text="base", ink=FAINT)
    axes.text(num_blocks + 0.2, -0.15, "params\nadded", ha="left", va="bottom", color=FAINT, fontsize=8)
    has_mark = False
    for row, label in enumerate(["base", *(names[index] for index in shown)]):
        axes.text(-0.15, row + 0.5, label, ha="right", va="center", color=INK, fontsize=10)
    for row, task in enumerate([results["tasks"][index] for index in shown], start=1):
        for block, choice in enumerate(from_strings(task["architecture"])):
            text = cell_text(choice, pool[block])
            has_mark |= MARK in text
            ink = "#6b4a58" if choice.kind == "skip" else INK
            _cell(axes, block, row, colour=COLOURS[choice.kind], text=text, ink=ink)
        added = f"{task['params_added_percent']:.1f} %"
        axes.text(num_blocks + 0.2, row + 0.5, added, ha="left", va="center", color=FAINT, fontsize=9)
    title = title or f"The target network of each task: {results['stream']}, {results['backbone']}"
    title += _of(shown, names) + (f" ({MARK}: from a forgotten task)" if has_mark else "")
    axes.text(num_blocks / 2, -1.1, title, ha="center", va="bottom", fontsize=12, color=INK)
    axes.legend(
        [FancyBboxPatch((0, 0), 1, 1, facecolor=colour, edgecolor="none") for colour in COLOURS.values()],
        [f"{kind}: {MEANING[kind]}" for kind in COLOURS], loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False,
        ncols=4 if num_blocks > 8 else 2, fontsize=9, labelcolor=INK, handlelength=1.4, handleheight=1.0,
    )  # fmt: skip
    save(figure, file, bbox_inches="tight")


def accuracy_heatmap(results: Results, file: Path) -> None:
    """Accuracy after learning each task (row) on each task (column), task-agnostic and with the task ID given."""
    names = _labels(results)
    shown = spread(len(names), MOST_CELLS)
    labels, side = [names[index] for index in shown], max(0.56 * len(shown), 2.9)  # room for the titles
    figure = Figure(figsize=(2 * side + 3.5, side + 3), dpi=DPI, layout="constrained")
    images, both = [], figure.subplots(1, 2, sharey=True)
    colours = colormaps["YlGnBu"].with_extremes(bad="#f4f4f4")
    panels = (("accuracy", "task ID inferred", ""), ("local_accuracy", "task ID given", "local_"))
    for axes, (key, title, prefix) in zip(both, panels, strict=True):
        values = 100 * matrix_from_json(results[key])[np.ix_(shown, shown)]
        images.append(axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=100, aspect="auto"))
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = "white" if value > 55 else INK
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9)
        axes.set_xticks(range(len(shown)), labels, rotation=90, fontsize=9)
        axes.set_yticks(range(len(shown)), labels, fontsize=9)
        axes.tick_params(length=0, colors=INK)
        axes.spines[:].set_visible(False)
        for edge in np.arange(0.5, len(shown) - 1):
            axes.axvline(edge, color="white", linewidth=1)
            axes.axhline(edge, color="white", linewidth=1)
        axes.set_xlabel("tested on", color=FAINT)
        average, forgetting = results[f"{prefix}average_accuracy"], results[f"{prefix}average_forgetting"]
        text = f"{title}{_of(shown, names)}\naverage {percent(average)} %, forgetting {percent(forgetting)} points"
        axes.set_title(text, fontsize=10, color=INK)
    both[0].set_ylabel("after learning", color=FAINT)
    bar = figure.colorbar(images[0], ax=both, aspect=25)
    bar.set_label("accuracy, %", color=FAINT, fontsize=9)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    save(figure, file)


def save(figure: Figure, file: Path, *, bbox_inches: Literal["tight"] | None = None) -> None:
    """Write a PNG whole or not at all; `tight` fits it to all that is drawn."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None}, bbox_inches=bbox_inches)
    write_atomically(file, content.getvalue())


def _labels(results: Results) -> list[str]:
    """`T3 food10`: tasks are numbered from 0, as everywhere in the results."""
    names = [task["name"] for task in results["tasks"]]
    names = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    names = [name.replace("$", r"\$") for name in names]  # a pair would start a formula
    return [f"{origin_name(index)} {name}" for index, name in enumerate(names)]


def _of(shown: list[int], names: list[str]) -> str:
    return "" if len(shown) == len(names) else f" ({len(shown)} of {len(names)} tasks)"


def _cell(axes: Axes, column: int, row: int, *, colour: str, text: str, ink: str) -> None:
    corner, shape = (column + 0.1, row + 0.14), "round,pad=0.03,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch(corner, 0.8, 0.72, boxstyle=shape, facecolor=colour, edgecolor="none"))
    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=9)
