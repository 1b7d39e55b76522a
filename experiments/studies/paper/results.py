"""The tables and the figure of a page of results, made from collected runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from charts import frame, legend_below, mean_std, read_chosen, read_numbers, spread
from flax.traverse_util import flatten_dict
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pages import tables_in, write_tables

from cheem_jax.report.comparison import comparison, measure
from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.table import NONE, UPPER_BOUNDS, Grid
from studies.paper.agreement import agreement_grid
from studies.paper.claims import check_claims, claim_grid, compare, number_cells, searches
from studies.paper.collected import Cell, Cells, is_compared, load, usual_cell
from studies.routers.page import shown_grid

Results = Mapping[str, Any]


class Row(NamedTuple):
    """A row of the tables: the results of the runs of one cell."""

    cell: Cell
    title: str
    runs: Sequence[Results]


def write_results(results: Path, page: Path) -> int:
    """Write the tables into the page and its figure into the folder of the same name; return the
    number of runs."""
    cells = load(results)
    rows = rows_of(cells)
    first = rows[0].runs[0]
    title = (
        f"Results: {len(first['tasks'])} tasks, {first['backbone']}, {first['image_size']} pixels"
    )
    tables = tables_of(results)
    others = tables_in(page.read_text()) - tables.keys() if page.is_file() else set()
    if others:
        raise ValueError(
            f"{page} has tables that {results} does not give: {', '.join(sorted(others))}; add"
            " their runs next to it, or remove the tables from the page"
        )
    write_tables(page, tables, title)
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    compared = {row.title: row.runs for row in rows if is_compared(cells, row.cell)}
    accuracy_figure(compared, folder / "accuracy.png")
    return sum(map(len, cells.values()))


def tables_of(results: Path) -> dict[str, str]:
    """Make the Markdown tables, keyed by name.

    The `routers.json` of `router_study.py` and the `chosen.json` of `compare.py --choose` can be
    next to the folder `results`, and so can runs with smaller images, in folders such as `runs_96`
    and `runs_96_chosen`.
    """
    cells = load(results)
    rows = rows_of(cells)
    smaller = {
        folder.name.removeprefix(f"{results.name}_"): load(folder)
        for folder in sorted(results.parent.glob(f"{results.name}_*"))
    }
    routers = chosen = None
    if (file := results.with_name("routers.json")).is_file():
        routers = read_numbers(file, "router_study.py", ("image_size", "rows", "chosen", "runs"))
        if routers["image_size"] != rows[0].runs[0]["image_size"]:
            routers = None
    if (file := results.with_name("chosen.json")).is_file():
        chosen = read_chosen(file)
    grids = {"methods": method_grid(rows, cells), "tasks": task_grid(rows)}
    checked = check_claims(cells)
    claims = claim_grid(checked)
    if claims.rows:
        grids["claims"] = claims
        streams = {f"{rows[0].runs[0]['image_size']} pixels": (cells, checked)}
        for name, runs in smaller.items():
            size, *settings = name.split("_")
            title = ", ".join([f"{size} pixels", *settings])
            streams[title] = (runs, check_claims(runs))
        grids["agreement"] = agreement_grid(streams)
    for name, runs in smaller.items():
        grids[f"methods_{name}"] = method_grid(rows_of(runs), runs).without(DETAILS)
    if routers:
        grids["routers"] = shown_grid(routers)
    grids["settings"] = setting_grid(cells, chosen or [])
    return {name: grid.to_markdown() for name, grid in grids.items()}


def rows_of(cells: Cells) -> list[Row]:
    """Return the rows of all cells; ablations and other orders are last."""
    if not any(is_compared(cells, cell) for cell in cells):
        raise ValueError(
            "every collected run is an ablation or has another order of tasks; collect a run to"
            " compare"
        )
    rows = [
        Row(
            cell,
            cell.title + (" *" if cell.method in UPPER_BOUNDS else ""),
            [collected.run.results for collected in runs.values()],
        )
        for cell, runs in cells.items()
    ]
    return sorted(rows, key=lambda row: not is_compared(cells, row.cell))


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "average_accuracy": ("average accuracy %", lambda v: f"{100 * v:.1f}"),
    "local_average_accuracy": ("task ID given %", lambda v: f"{100 * v:.1f}"),
    "average_forgetting": ("forgetting, points", lambda v: f"{100 * v:.1f}"),
    "flops_paper": ("MFLOPs, paper", lambda v: f"{v / 1e6:,.0f}"),
    "flops_executed": ("MFLOPs, executed", lambda v: f"{v / 1e6:,.0f}"),
    "params_added_percent": ("params added %", lambda v: f"{v:.2f}"),
    "params_stored": ("params stored, k", lambda v: f"{v / 1e3:,.0f}"),
    "seconds": ("minutes", lambda v: f"{v / 60:.1f}"),
}


DETAILS = ("MFLOPs, executed", "params stored, k", "minutes")
"""Columns that the table of smaller images omits."""


def method_grid(rows: Sequence[Row], cells: Cells) -> Grid:
    """Make the table of means over runs and of the lead of CHEEM, with the latest search that was
    run."""
    ours = searches(cells)[-1]
    lines = []
    for row, means in zip(
        rows, comparison({str(number): row.runs for number, row in enumerate(rows)}), strict=True
    ):
        texts = [_cell(name, means[name], row.runs) for name in COLUMNS]
        seeds = ", ".join(map(str, means["seeds"]))
        lines.append((row.title, seeds, *texts[:2], _lead(row.cell, cells, ours), *texts[2:]))
    titles = [title for title, _ in COLUMNS.values()]
    columns = ("method", "seeds", *titles[:2], f"{ours.title} minus", *titles[2:])
    return Grid("", columns, tuple(lines), 1)


def _cell(name: str, value: Mapping[str, Any] | None, runs: Sequence[Results]) -> str:
    _, text = COLUMNS[name]
    if value is None:
        return NONE
    if name == "seconds":
        ends = (text(end(run[name] for run in runs)) for end in (min, max))
        return " to ".join(dict.fromkeys(ends))
    return text(value["mean"]) + ("" if value["std"] is None else f" ± {text(value['std'])}")


def _lead(cell: Cell, cells: Cells, ours: Cell) -> str:
    """Format CHEEM's accuracy minus that of another method. Compared with an upper bound, CHEEM is
    given the task ID, too."""
    if cell == ours or ours not in cells:
        return NONE
    is_bound = cell.method in UPPER_BOUNDS
    value, interval, *_ = number_cells(
        compare("", cells, ours, cell, with_task_ids=(is_bound, is_bound))
    )
    return value if interval == NONE else f"{value.removesuffix(' points')} ({interval})"


def task_grid(rows: Sequence[Row]) -> Grid:
    """Make a row per method with a column per task and their mean."""
    tasks = rows[0].runs[0]["tasks"]
    names = [task["name"] for task in tasks]
    sizes = [f"{task['num_train']:,}, {len(task['classes'])}" for task in tasks]
    lines: list[tuple[str, ...]] = [("*images, classes*", *sizes, "")]
    for row in rows:
        key = "local_accuracy" if row.cell.method in UPPER_BOUNDS else "accuracy"
        values = []
        for run in row.runs:
            order = [task["name"] for task in run["tasks"]]
            values.append([100 * run[key][-1][order.index(name)] for name in names])
        columns = np.column_stack([values, np.mean(values, axis=1)]).T
        lines.append((row.title, *(spread(column.tolist()) for column in columns)))
    return Grid("", ("method", *names, "mean"), tuple(lines), 1)


LENGTHS = (
    "epochs",
    "learning_rate",
    "learning_rates",
    "schedule",
    "batch_size",
    "rank",
    "population",
    "generations",
)


def setting_grid(cells: Cells, chosen: Sequence[Mapping[str, Any]]) -> Grid:
    """Make the table of the epochs, learning rates and batch size of every method, the settings in
    which a variant differs, and the values that were tried on validation images."""
    tried: dict[str, list[str]] = {}
    for row in chosen:
        tried.setdefault(row["title"], []).append(_tried(row))
    rows = []
    for cell in cells:
        usual = usual_cell(cells, cell.method)
        config = _config(cells, cell)
        if usual in (None, cell):
            names = [name for name in config if name.split(".")[-1] in LENGTHS]
            text = ""
        else:
            base = _config(cells, usual)
            names = [name for name, value in config.items() if base.get(name) != value]
            text = f"as {usual.title}, but for "
        settings = [f"{name} {config[name]}" for name in names]
        if cell.order != "default":
            order = next(iter(cells[cell].values())).run.order
            settings.append(f"the tasks in the order {' '.join(order)}")
        rows.append(
            (cell.title, text + ", ".join(settings), "; ".join(tried.pop(cell.title, [NONE])))
        )
    rows += [(title, "its run is not finished", "; ".join(texts)) for title, texts in tried.items()]
    grid = Grid("", ("method", "settings", "tried"), tuple(rows), 3)
    return grid if chosen else grid.without({"tried"})


def _config(cells: Cells, cell: Cell) -> dict[str, Any]:
    """Return the settings of a cell, keyed by dotted name."""
    run = next(iter(cells[cell].values())).run
    return flatten_dict(run.config.get(cell.method, {}), sep=".")


def _tried(row: Mapping[str, Any]) -> str:
    texts = []
    for value, accuracy in zip(row["values"], row["accuracies"], strict=True):
        if accuracy is not None:
            text = f"{value}: {100 * accuracy:.1f}"
            texts.append(f"**{text}**" if value == row["chosen"] else text)
    end = " (an end of the grid)" if row["at_the_end"] else ""
    return f"{row['setting']} {', '.join(texts)}{end}"


AGNOSTIC, GIVEN = "#1f77b4", "#c0792b"


def accuracy_figure(rows: Mapping[str, Sequence[Results]], file: Path) -> None:
    """Draw a line per method with the mean, the standard deviation and a point per run, with the
    task ID inferred and given."""
    figure = Figure(figsize=(7.2, 1.5 + 0.42 * len(rows)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    lowest = [100.0]
    sides = (("average_accuracy", AGNOSTIC, -0.14), ("local_average_accuracy", GIVEN, 0.14))
    for place, runs in enumerate(rows.values()):
        for name, colour, shift in sides:
            values = [100 * value for run in runs if (value := measure(run, name)) is not None]
            if (mean := mean_std(values)) is None:
                continue
            lowest.append(min(values))
            axes.errorbar(
                mean["mean"],
                place + shift,
                xerr=mean["std"],
                fmt="D",
                color=colour,
                markersize=5,
                capsize=3,
                linewidth=1.5,
            )
            heights = [place + shift] * len(values)
            axes.plot(values, heights, "o", color=INK, markersize=2.5, zorder=3)
    titles = [title.replace("$", r"\$").replace(" (", "\n(") for title in rows]
    axes.set_yticks(range(len(rows)), titles, color=INK, fontsize=9)
    # positions are compared and not lengths, so the axis does not have to start at 0
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(10 * (min(lowest) // 10), 100))
    frame(axes, x="average accuracy after the last task, %", grid=True)
    labels = (
        ("task-agnostic", AGNOSTIC, "D", 5),
        ("task ID given", GIVEN, "D", 5),
        ("one run", INK, "o", 2.5),
    )
    handles = [
        Line2D([], [], color=color, marker=marker, markersize=size, linestyle="none", label=label)
        for label, color, marker, size in labels
    ]
    legend_below(figure, handles)
    figure.suptitle("Mean over runs; bars: standard deviation over seeds", fontsize=10, color=FAINT)
    save(figure, file)
