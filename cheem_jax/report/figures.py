"""Figures of a run and example images of a stream, as PNG files."""

import functools
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.patches import FancyBboxPatch
from PIL import Image, ImageDraw, ImageFont

from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.metrics import matrix_from_json
from cheem_jax.core.settings import COLOURS
from cheem_jax.report import memories
from cheem_jax.report.table import (
    MEANING,
    UPPER_BOUNDS,
    method_grid,
    percent,
    spread,
    task_grid,
)
from cheem_jax.run.results import Results, curve_of

INK, FAINT = "#262626", "#757575"
DPI = 150
MOST_ROWS, MOST_CELLS = 60, 30
"""Maximum number of tasks in a grid of architectures (MOST_ROWS), and on an axis of a heat map or
curve (MOST_CELLS)."""
LONGEST_NAME = 28
EMPTY, FRAME = "#f4f4f4", "#dcdcdc"
COLUMNS, ROWS = 10, 8
"""Maximum number of images per row, and maximum number of rows, in a contact sheet."""
MOST_OF_CLASS, MOST_OF_TASK = 8, 5
"""Maximum number of images per class in a contact sheet, and per task in the figure of a stream."""
SIDE = 112
"""Approximate height and width of a displayed image in pixels."""
MARGIN = 28
GAP = 12
TITLE = 50
CAPTION = 24
"""Outer margin, gap between images, and heights of the title and of a caption in contact sheets, in
pixels."""

ExampleImages = UInt8[np.ndarray, "_ _ _ 3"]
"""Images `[K, S, S, 3]`; K differs between classes and tasks."""


def write_figures(directory: Path, results: Results) -> Path:
    """Write the figures (PNG) and tables (CSV) of a run into the folder `figures` of its directory.
    Return this folder."""
    folder = directory / "figures"
    accuracy_heatmap(results, folder / "accuracy.png")
    if len(results["tasks"]) > 1:
        accuracy_curve(results, folder / "curve.png")
    if "pool" in results:
        architecture_grid(results, folder / "architectures.png")
    write_atomically(folder / "methods.csv", method_grid(results).to_csv())
    write_atomically(folder / "tasks.csv", task_grid(results).to_csv())
    return folder


def architecture_grid(results: Results, file: Path, title: str | None = None) -> None:
    """Write a figure of the target networks. The first row is the base, each other row is a task,
    and each column is a block.

    The colour of a cell shows the op of the block, and the text in the cell is the task that added
    the expert.
    """
    pool = results["pool"]
    shown = spread(len(results["tasks"]), MOST_ROWS)
    names = _labels(results)
    num_blocks = len(pool)
    num_rows = len(shown) + 1
    # The cells fill the figure; saving with `bbox_inches="tight"` adds room for the text around
    # them.
    figure = Figure(figsize=(num_blocks * 0.74, num_rows * 0.46), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, num_blocks), ylim=(num_rows, 0))
    axes.axis("off")
    for block in range(num_blocks):
        axes.text(
            block + 0.5, -0.15, f"B{block + 1}", ha="center", va="bottom", color=INK, fontsize=10
        )
        _cell(axes, block, 0, colour="#e8e8e8", text="base", ink=FAINT)
    axes.text(
        num_blocks + 0.2, -0.15, "params\nadded", ha="left", va="bottom", color=FAINT, fontsize=8
    )
    has_mark = False
    for row, label in enumerate(["base", *(names[index] for index in shown)]):
        axes.text(-0.15, row + 0.5, label, ha="right", va="center", color=INK, fontsize=10)
    for row, task in enumerate([results["tasks"][index] for index in shown], start=1):
        for block, choice in enumerate(from_strings(task["architecture"])):
            text = memories.cell_text(choice, pool[block])
            has_mark |= memories.MARK in text
            ink = "#6b4a58" if choice.kind == "skip" else INK
            _cell(axes, block, row, colour=COLOURS[choice.kind], text=text, ink=ink)
        added = f"{task['params_added_percent']:.1f} %"
        axes.text(
            num_blocks + 0.2, row + 0.5, added, ha="left", va="center", color=FAINT, fontsize=9
        )
    title = title or f"The target network of each task: {results['stream']}, {results['backbone']}"
    title += _selection(shown, names) + (
        f" ({memories.MARK}: from a forgotten task)" if has_mark else ""
    )
    axes.text(num_blocks / 2, -1.1, title, ha="center", va="bottom", fontsize=12, color=INK)
    axes.legend(
        [
            FancyBboxPatch((0, 0), 1, 1, facecolor=colour, edgecolor="none")
            for colour in COLOURS.values()
        ],
        [f"{kind}: {MEANING[kind]}" for kind in COLOURS],
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        frameon=False,
        ncols=4 if num_blocks > 8 else 2,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.4,
        handleheight=1.0,
    )
    save(figure, file, bbox_inches="tight")


def accuracy_heatmap(results: Results, file: Path) -> None:
    """Write two heat maps of the accuracy on each task (column) after learning each task (row): one
    with the task ID inferred, one with the task ID given. Upper bounds have only the latter."""
    names = _labels(results)
    shown = spread(len(names), MOST_CELLS)
    # the titles need at least 2.9 inches
    labels = [names[index] for index in shown]
    side = max(0.56 * len(shown), 2.9)
    panels = _panels(results)
    figure = Figure(figsize=(len(panels) * side + 3.5, side + 3), dpi=DPI, layout="constrained")
    images = []
    (both,) = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    colours = colormaps["YlGnBu"].with_extremes(bad="#f4f4f4")
    for axes, (prefix, title, _) in zip(both, panels, strict=True):
        key = f"{prefix}accuracy"
        values = 100 * matrix_from_json(results[key])[np.ix_(shown, shown)]
        images.append(
            axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=100, aspect="auto")
        )
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = "white" if value > 55 else INK
                axes.text(
                    column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=9
                )
        axes.set_xticks(range(len(shown)), labels, rotation=90, fontsize=9)
        axes.set_yticks(range(len(shown)), labels, fontsize=9)
        axes.tick_params(length=0, colors=INK)
        axes.spines[:].set_visible(False)
        for edge in np.arange(0.5, len(shown) - 1):
            axes.axvline(edge, color="white", linewidth=1)
            axes.axhline(edge, color="white", linewidth=1)
        axes.set_xlabel("tested on", color=FAINT)
        average, forgetting = (
            results[f"{prefix}average_accuracy"],
            results[f"{prefix}average_forgetting"],
        )
        text = (
            f"{title}{_selection(shown, names)}\naverage {percent(average)} %, forgetting"
            f" {percent(forgetting)} points"
        )
        axes.set_title(text, fontsize=10, color=INK)
    both[0].set_ylabel("after learning", color=FAINT)
    bar = figure.colorbar(images[0], ax=[*both], aspect=25)
    bar.set_label("accuracy, %", color=FAINT, fontsize=9)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    save(figure, file)


def accuracy_curve(results: Results, file: Path) -> None:
    """Write a figure of the accuracy over the test images of all tasks so far, after each task. One
    curve is with the task ID inferred, the other with the task ID given. Upper bounds have only the
    latter."""
    names = _labels(results)
    figure = Figure(figsize=(max(0.5 * min(len(names), MOST_CELLS), 4) + 2, 4), dpi=DPI)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    shown = spread(len(names), MOST_CELLS)
    for prefix, title, colour in reversed(_panels(results)):
        curve = 100 * curve_of(results[f"{prefix}accuracy"], results["tasks"])
        label = f"{title}: Ā {percent(results[f'{prefix}incremental_accuracy'])} %"
        axes.plot(range(len(curve)), curve, "o-", color=colour, markersize=4, label=label)
    axes.set_xticks(shown, [names[index] for index in shown], rotation=90, fontsize=9)
    axes.set_xlabel("after learning", color=FAINT)
    axes.set_ylabel("accuracy over all\nclasses so far, %", color=FAINT)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    save(figure, file)


def _panels(results: Results) -> list[tuple[str, str, str]]:
    """Return the prefix of the results' keys, the title and the colour of each kind of accuracy."""
    inferred = ("", "task ID inferred", "#1f77b4")
    given = ("local_", "task ID given", FAINT)
    return [given] if results["method"] in UPPER_BOUNDS else [inferred, given]


def save(figure: Figure, file: Path, *, bbox_inches: Literal["tight"] | None = None) -> None:
    """Write a figure as a PNG file atomically. `tight` crops or extends the image so that it fits
    the contents."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(
        content,
        format="png",
        facecolor="white",
        metadata={"Software": None},
        bbox_inches=bbox_inches,
    )
    write_atomically(file, content.getvalue())


def _labels(results: Results) -> list[str]:
    """Return the label of each task, such as `T1 food10`."""
    names = [task["name"] for task in results["tasks"]]
    names = [
        name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names
    ]
    # matplotlib would read a pair of $ as a formula
    names = [name.replace("$", r"\$") for name in names]
    return [f"{memories.origin_name(index)} {name}" for index, name in enumerate(names)]


def _selection(shown: list[int], names: list[str]) -> str:
    return "" if len(shown) == len(names) else f" ({len(shown)} of {len(names)} tasks)"


def _cell(axes: Axes, column: int, row: int, *, colour: str, text: str, ink: str) -> None:
    corner = (column + 0.1, row + 0.14)
    shape = "round,pad=0.03,rounding_size=0.1"
    axes.add_patch(
        FancyBboxPatch(corner, 0.8, 0.72, boxstyle=shape, facecolor=colour, edgecolor="none")
    )
    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=9)


class StreamRow(NamedTuple):
    """A row in the figure of a stream: one task."""

    name: str
    classes: int
    num_train: int
    num_val: int
    num_test: int
    examples: ExampleImages
    """Example images `[K, S, S, 3]`; at most MOST_OF_TASK are displayed."""


def contact_sheet(
    images: ExampleImages,
    labels: Integer[np.ndarray, "_"],
    classes: Sequence[str],
    file: Path,
    *,
    title: str,
) -> None:
    """Write example images of each class, with the name of the class below its images.

    If there are more than COLUMNS * ROWS classes, evenly spaced classes are selected.
    """
    chosen = spread(len(classes), COLUMNS * ROWS)
    groups = [(classes[label], images[labels == label]) for label in chosen]
    _draw(groups, min(MOST_OF_CLASS, COLUMNS * ROWS // len(chosen)), file, title)


def stream_figure(rows: Sequence[StreamRow], file: Path, *, title: str) -> None:
    """Write example images of each task, in learning order. The text below the images of a task is
    the name of the task and its numbers of classes and images."""
    groups = [
        (
            (
                f"T{number} {row.name}: {row.classes:,} classes, {row.num_train:,} training,"
                f" {row.num_val:,} validation and {row.num_test:,} test images"
            ),
            row.examples,
        )
        for number, row in enumerate(rows, 1)
    ]
    _draw(groups, MOST_OF_TASK, file, title)


def _draw(groups: Sequence[tuple[str, ExampleImages]], each: int, file: Path, title: str) -> None:
    """Write a PNG file with at most `each` images of every group, and the caption of the group
    below these images. A group without images is displayed as an empty box."""
    num_columns = min(COLUMNS // each, len(groups)) * each
    num_rows = math.ceil(len(groups) * each / num_columns)
    # Small images are enlarged by an integer factor, so that every pixel stays a square.
    side = groups[0][1].shape[1]
    side = SIDE if side > 1.5 * SIDE else side * max(1, round(SIDE / side))
    wide, tall = side + GAP, side + CAPTION
    title = _shortened(title, 10 * DPI, 12)
    width = max(num_columns * wide - GAP, math.ceil(_font(12).getlength(title))) + 2 * MARGIN
    indent = (width - num_columns * wide + GAP) // 2
    figure = Image.new("RGB", (width, TITLE + num_rows * tall + MARGIN // 2), "white")
    drawing = ImageDraw.Draw(figure)
    drawing.text((width / 2, TITLE / 2), title, font=_font(12), fill=INK, anchor="mm")
    for number, (caption, images) in enumerate(groups):
        row, column = divmod(number * each, num_columns)
        x, y = indent + column * wide, TITLE + row * tall
        num = min(each, len(images))
        for position in range(num):
            image = images[position * len(images) // num]
            at = x + position * wide
            # Draw a thin frame, because many images are white at the edge.
            drawing.rectangle((at - 1, y - 1, at + side, y + side), fill=FRAME)
            method = Image.Resampling.NEAREST if len(image) <= side else Image.Resampling.LANCZOS
            figure.paste(Image.fromarray(image).resize((side, side), method), (at, y))
        if not num:
            drawing.rectangle((x, y, x + side - 1, y + side - 1), fill=EMPTY)
        caption = _shortened(caption, each * wide - GAP, 7)
        drawing.text((x, y + side + 13), caption, font=_font(7), fill=INK, anchor="lm")
    file.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.save(content, "PNG")
    write_atomically(file, content.getvalue())


def _shortened(text: str, room: float, size: float) -> str:
    """Return the text on one line, shortened to at most `room` pixels."""
    text = " ".join(text.encode(errors="replace").decode().split())
    line = text[: int(room) + 1]  # no letter is narrower than a pixel
    while len(line) > 1 and _font(size).getlength(line) > room:
        line = f"{line[:-2].rstrip()}…"
    return line


@functools.cache
def _font(size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont("DejaVu Sans"), round(size * DPI / 72))
