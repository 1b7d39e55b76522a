"""Means with standard deviations, checks of options, files and figures that studies share. Figures
need no display."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.comparison import measure
from cheem_jax.report.figures import DPI, FAINT, INK, architecture_grid, save
from cheem_jax.report.table import NONE, Grid

Runs = Sequence[Mapping[str, Any]]
ACCURACY, COST = "#1f77b4", "#c0392b"
COSTS = {
    "params_added_percent": ("parameters added per task, % of the backbone", 1.0),
    "flops_paper": ("FLOPs per image, M", 1e-6),
}


def mean_std(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return the mean and standard deviation (n - 1) of the values that are not None.

    The standard deviation is None for one value; the result is None without values.
    """
    numbers = np.array([value for value in values if value is not None], np.float64)
    if not numbers.size:
        return None
    return {
        "mean": float(numbers.mean()),
        "std": float(numbers.std(ddof=1)) if numbers.size > 1 else None,
    }


def spread(
    values: Mapping[str, Any] | Sequence[float | None] | None,
    decimals: int = 1,
    factor: float = 1.0,
) -> str:
    """Format values, or a result of `mean_std`, as `mean ± std`; a dash without values."""
    mean = values if values is None or isinstance(values, Mapping) else mean_std(values)
    if mean is None:
        return NONE
    deviation = "" if mean["std"] is None else f" ± {factor * mean['std']:,.{decimals}f}"
    return f"{factor * mean['mean']:,.{decimals}f}{deviation}"


def check_folder(option: str, place: Path) -> None:
    """Raise ValueError if the value of an option for a folder exists and is not a folder."""
    if place.exists() and not place.is_dir():
        raise ValueError(
            f"{option} names {place}, which is not a folder; expected one that exists or can be"
            " made"
        )


def names_in(option: str, text: str, expected: Iterable[str]) -> list[str]:
    """Return the distinct names in the value of an option, which are separated by commas. Raises
    ValueError for an unknown name or if there is none."""
    names = list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    expected = list(expected)
    unknown = [name for name in names if name not in expected]
    if unknown or not names:
        wrong = ", ".join(map(repr, unknown)) or "nothing"
        raise ValueError(f"{option} names {wrong}; expected some of: {', '.join(expected)}")
    return names


def read_numbers(file: Path, script: str, fields: Sequence[str]) -> Any:
    """Read a JSON file with an object, or a list of objects, that contain these fields. Raises
    ValueError with the name of the `script` that writes such a file."""
    try:
        content = json.loads(file.read_text())
        rows = content if isinstance(content, list) else [content]
        if missing := [field for field in fields for row in rows if field not in row]:
            raise ValueError(f"it lacks {missing[0]!r}")
        return content
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise ValueError(
            f"{file} cannot be read ({reason}); expected the {file.name} that {script} writes"
        ) from error


TRIED = ("title", "values", "accuracies", "at_the_end")
"""Further fields of a chosen setting, for tables."""


def read_chosen(file: Path, more: Sequence[str] = TRIED) -> list[dict[str, Any]]:
    """Read the settings that `compare.py --choose` chose, with the fields `more`."""
    return read_numbers(file, "compare.py --choose", ("method", "setting", "chosen", *more))


def write_page(place: Path, text: str, numbers: Any, table: Grid | str | None = None) -> None:
    """Write a page as `.md`, its numbers as `.json` and its table as `.csv`; `place` is their path
    without a suffix."""
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(place.with_suffix(".md"), text)
    write_atomically(place.with_suffix(".json"), json.dumps(numbers, indent=1) + "\n")
    if table is not None:
        write_atomically(
            place.with_suffix(".csv"), table.to_csv() if isinstance(table, Grid) else table
        )


def filled(title: str, columns: Mapping[str, Sequence[str]]) -> Grid:
    """Make a table from columns keyed by their heading, without empty columns; the first column is
    aligned left."""
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    return Grid(title, tuple(columns), tuple(zip(*columns.values(), strict=True)), 1)


def frame(axes: Axes, title: str = "", x: str = "", y: str = "", *, grid: bool = False) -> None:
    """Set the title and axis labels in the style of all figures."""
    # a pair of $ would enclose a formula
    axes.set_title(title.replace("$", r"\$"), fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x, color=FAINT)
    axes.set_ylabel(y, color=FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(color="#ececec", linewidth=0.8)


def legend_below(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Draw one legend for all panels below them."""
    columns = min(4, len(handles))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def sweep_picture(
    file: Path,
    label: str,
    points: Sequence[tuple[float, Runs]],
    cost: str,
    levels: Mapping[str, Runs],
) -> None:
    """Draw average accuracy (left) and a cost (right) over the values of one setting, with standard
    deviations over runs. `levels` are other runs, keyed by title, which are horizontal lines."""
    figure = Figure(figsize=(9.6, 4.0), dpi=DPI, layout="constrained")
    values = [value for value, _ in points]
    measures = {
        "average_accuracy": ("average accuracy, %", 100.0, ACCURACY),
        cost: (*COSTS[cost], COST),
    }
    for axes, (name, (title, factor, colour)) in zip(
        figure.subplots(1, 2), measures.items(), strict=True
    ):

        def statistics(runs: Runs, name=name, factor=factor) -> dict[str, Any]:
            numbers = [factor * value for run in runs if (value := measure(run, name)) is not None]
            return mean_std(numbers) or {"mean": float("nan"), "std": None}

        each = [statistics(runs) for _, runs in points]
        means, errors = [one["mean"] for one in each], [one["std"] or 0.0 for one in each]
        axes.errorbar(
            values,
            means,
            yerr=errors,
            fmt="o-",
            color=colour,
            markersize=5,
            capsize=3,
            linewidth=1.5,
        )
        for style, (level, runs) in zip(("--", ":", "-."), levels.items(), strict=False):
            mean = statistics(runs)["mean"]
            axes.axhline(mean, color=colour, linestyle=style, linewidth=1, alpha=0.8)
            axes.annotate(
                level,
                (values[0], mean),
                (0, 2),
                textcoords="offset points",
                color=colour,
                fontsize=8,
            )
        frame(axes, title, label)
        axes.set_xticks(values, [f"{value:g}" for value in values])
    save(figure, file)


def architecture_sheet(file: Path, columns: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Draw the target networks of runs, one grid per run; every column has its runs keyed by
    title."""
    with TemporaryDirectory() as folder:
        part = Path(folder) / "grid.png"
        grids = []
        for column in columns:
            grids.append([])
            for title, results in column.items():
                architecture_grid(results, part, title)
                with Image.open(part) as grid:
                    grids[-1].append(grid.convert("RGB"))
    width, height = (
        max(size) for size in zip(*(grid.size for column in grids for grid in column), strict=True)
    )
    sheet = Image.new("RGB", (width * len(grids), height * max(map(len, grids))), "white")
    for x, column in enumerate(grids):
        for y, grid in enumerate(column):
            sheet.paste(grid, (x * width, y * height))
    picture = io.BytesIO()
    sheet.save(picture, "PNG")
    write_atomically(file, picture.getvalue())
