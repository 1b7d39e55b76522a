"""Pictures over several runs, as PNG files drawn without a display."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image

from cheem_jax.atomic import write_atomically
from cheem_jax.report.comparison import measure
from cheem_jax.report.figures import DPI, FAINT, INK, architecture_grid, save

Runs = Sequence[Mapping[str, Any]]
ACCURACY, COST = "#1f77b4", "#c0392b"
COSTS = {"params_added_percent": "parameters added per task, % of the backbone", "flops_paper": "FLOPs per image"}


def sweep_picture(
    file: Path,
    label: str,
    points: Sequence[tuple[float, Runs]],
    cost: str,
    *,
    marked: tuple[str, Runs] | None = None,
    lines: Mapping[str, Runs] | None = None,
) -> None:
    """Average accuracy (left) and a cost (right) over the values of one setting, with the deviation over runs.

    `marked` is the usual setting, a star on either axis; `lines` are other methods, level lines.
    """
    figure = Figure(figsize=(6.4, 4.0), dpi=DPI, layout="constrained")
    left = figure.add_subplot()
    right = left.twinx()
    title, scale = COSTS[cost], 1.0
    if cost == "flops_paper":
        giga = max(_spread(runs, cost, 1.0)[0] for _, runs in points) >= 1e9
        title, scale = (f"{title}, G", 1e-9) if giga else (f"{title}, M", 1e-6)
    values = [value for value, _ in points]
    for axes, name, factor, colour, shape in (
        (left, "average_accuracy", 100.0, ACCURACY, "o-"),
        (right, cost, scale, COST, "s--"),
    ):
        spread = [_spread(runs, name, factor) for _, runs in points]
        means, errors = zip(*spread, strict=True)
        axes.errorbar(values, means, yerr=errors, fmt=shape, color=colour, markersize=5, capsize=3, linewidth=1.5)
        if marked is not None:
            mean, _ = _spread(marked[1], name, factor)
            axes.plot([float(np.mean(values))], [mean], "*", color=colour, markersize=13, markeredgecolor="white")
        for style, (method, runs) in zip((":", "-."), (lines or {}).items(), strict=False):
            mean, _ = _spread(runs, name, factor)
            axes.axhline(mean, color=colour, linestyle=style, linewidth=1, alpha=0.8)
            at = values[0] if axes is left else values[-1]
            axes.annotate(
                method, (at, mean), xytext=(0, 2), textcoords="offset points", color=colour, fontsize=8,
                ha="left" if axes is left else "right",
            )  # fmt: skip
        axes.tick_params(axis="y", colors=colour, labelsize=9)
        axes.spines[["top"]].set_visible(False)
    left.set_ylabel("average accuracy, %", color=ACCURACY)
    right.set_ylabel(title, color=COST)
    left.set_xlabel(label, color=INK)
    left.set_xticks(values, [f"{value:g}" for value in values])
    if marked is not None:
        left.set_title(f"star: {marked[0]}, drawn in the middle", fontsize=9, color=FAINT)
    save(figure, file)


def architecture_sheet(file: Path, columns: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """The networks found for each task, one grid per run; columns of runs by title."""
    with TemporaryDirectory() as folder:
        part, grids = Path(folder) / "grid.png", []
        for column in columns:
            grids.append([])
            for title, results in column.items():
                architecture_grid(results, part, title)
                with Image.open(part) as grid:
                    grids[-1].append(grid.convert("RGB"))
    width, height = (max(size) for size in zip(*(grid.size for column in grids for grid in column), strict=True))
    sheet = Image.new("RGB", (width * len(grids), height * max(map(len, grids))), "white")
    for x, column in enumerate(grids):
        for y, grid in enumerate(column):
            sheet.paste(grid, (x * width, y * height))
    picture = io.BytesIO()
    sheet.save(picture, "PNG")
    write_atomically(file, picture.getvalue())


def stacked_bars(file: Path, seconds: Mapping[str, Mapping[str, float]], label: str) -> None:
    """A bar per method, made of its phases."""
    figure = Figure(figsize=(7.2, 1.2 + 0.42 * len(seconds)), dpi=DPI, layout="constrained")
    axes, colours = figure.add_subplot(), colormaps["tab20"].colors  # pyright: ignore[reportAttributeAccessIssue]
    phases = list(dict.fromkeys(phase for each in seconds.values() for phase in each))
    names, begins = list(seconds), np.zeros(len(seconds))
    for index, phase in enumerate(phases):
        widths = np.array([seconds[name].get(phase, 0.0) for name in names])
        axes.barh(names, widths, left=begins, color=colours[index % len(colours)], label=phase)
        begins += widths
    axes.invert_yaxis()
    axes.set_xlabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    save(figure, file)


def _spread(runs: Runs, name: str, factor: float) -> tuple[float, float]:
    values = [factor * value for run in runs if (value := measure(run, name)) is not None]
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
