"""The paper's tables from finished runs, with our numbers next to the paper's.

    python experiments/tables.py --runs runs/compare --out runs/tables
    python experiments/tables.py --only fom,heads
    python experiments/tables.py --results docs/results/runs --page docs/results.md

Every folder below `--runs` that contains a finished run is read. A cell is the mean over seeds with
the standard deviation (n - 1) and the number of runs; it is empty without runs. If there are no
runs at all, the tables contain only the paper's numbers. With `--results`, a folder that
`experiments/collect.py` wrote, the tables of a page of results are written instead, with paired
tests of the paper's claims.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from charts import check_folder, filled, names_in
from studies.paper.collected import read_tested
from studies.paper.printed import (
    NOTES,
    Cell,
    Printed,
    figure_of_merit,
    printed,
    recomputed_fom,
)
from studies.paper.results import write_results

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.finished import (
    IMAGE_MEASURES,
    RunRecord,
    check_comparable,
    describe_variant,
    measurements,
    order_names,
)
from cheem_jax.report.table import METHODS, UPPER_BOUNDS, Grid
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Tables:
    """Make the paper's tables from finished runs."""

    runs: tuple[Path, ...] = ()
    """Folders that contain runs, at any depth."""
    out: Path | None = None
    """Folder of the tables in Markdown, CSV and LaTeX; default: runs/tables."""
    only: str | None = None
    """Names of tables, separated by commas; default: all."""
    results: Path | None = None
    """Folder with collected runs; their tables are written into `--page`. The `chosen.json` of
    `compare.py --choose` and the `routers.json` of `router_study.py` can be next to it."""
    page: Path | None = None
    """Page of results; default: docs/results.md. The tables between its markers are replaced, and
    its figure is written into the folder of the same name. A missing page is created with only the
    tables."""


class Layout(NamedTuple):
    """One table of the paper: its title, its measures, and the methods and variants of its runs
    (None: all)."""

    title: str
    measures: tuple[str, ...]
    methods: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None
    per_task: bool = False


BASELINES = (
    "ewc",
    "coda_prompt",
    "dualprompt",
    "l2p",
    "s_prompts",
    "diki",
    "lora_cl",
    "tuna",
    "moal",
    "ranpac",
    "ease",
    "frozen_linear",
)
SUMMARY = ("average_accuracy", "average_forgetting", "flops")
COSTS = ("average_accuracy", "flops", "params_added_percent")
CHEEM = ("cheem",)
USUAL = ("",)
"""The variant of a method with its default settings."""
LAYOUTS = {
    "fom": Layout("Figure of merit of CHEEM", ("fom",), BASELINES, USUAL),
    "upper_bounds": Layout("CHEEM and the upper bounds", SUMMARY, (*UPPER_BOUNDS, "cheem"), USUAL),
    "breakdown": Layout("Accuracy, forgetting and FLOPs", SUMMARY, (*BASELINES, "cheem"), USUAL),
    "taskwise_flops": Layout("FLOPs of CHEEM by task", ("flops",), CHEEM, USUAL, per_task=True),
    "training_time": Layout(
        "Hours of training per task", ("hours",), (*BASELINES, "cheem"), USUAL, per_task=True
    ),
    "placement": Layout("Placement of the memory", COSTS, CHEEM, ("mlp_down", "attn_proj")),
    "sampling": Layout("HEE against uniform sampling", COSTS, CHEEM, ("hee", "uniform")),
    "full": Layout(
        "Accuracy by task", ("accuracy", "average_accuracy", "average_forgetting"), per_task=True
    ),
    "clip": Layout("Backbones pretrained by CLIP", SUMMARY, variants=USUAL),
    "lite": Layout(
        "Task-ID inference by a lighter network", SUMMARY, ("moe_adapters", "cheem", "cheem_lite")
    ),
    "heads": Layout(
        "Designs of the head",
        ("average_accuracy", "local_average_accuracy", "just_trained"),
        variants=USUAL,
    ),
    "class_incremental": Layout(
        "Class-incremental learning",
        (*IMAGE_MEASURES, "params_added_percent", "seconds"),
    ),
    "task_orders": Layout(
        "Orders of the tasks",
        ("accuracy", "average_accuracy", "average_forgetting"),
        CHEEM,
        per_task=True,
    ),
    "ablations": Layout(
        "Ablations of CHEEM",
        ("average_accuracy", "local_average_accuracy", "flops", "params_added_percent"),
        CHEEM,
    ),
    "components": Layout(
        "Components of a block, fine-tuned", ("average_accuracy", "average_forgetting"), ()
    ),
}
TITLES = {
    "average_accuracy": "accuracy %",
    "average_forgetting": "forgetting",
    "last_accuracy": "last accuracy %",
    "incremental_accuracy": "Ā %",
    "local_average_accuracy": "task ID given %",
    "local_last_accuracy": "last accuracy, task ID given %",
    "local_incremental_accuracy": "Ā, task ID given %",
    "just_trained": "right after learning %",
    "params_added_percent": "params added %",
    "flops": "GFLOPs",
    "hours": "hours",
    "seconds": "seconds",
    "fom": "FoM",
}
Ours = Mapping[Cell, Sequence[float]]
"""Our numbers, one per run, keyed by cell."""
HEAD = """# The paper's tables

`ours` is the mean over runs with its standard deviation, followed by the number of runs; `paper` is the printed number.
An empty cell was not run, or is not in the paper.

"""  # noqa: E501


def check_options(settings: Tables) -> None:
    """Raise ValueError for options without effect."""
    ignored = ("page",) if settings.results is None else ("runs", "only", "out")
    if given := [f"--{name}" for name in ignored if getattr(settings, name)]:
        raise ValueError(
            f"no effect {'without' if settings.results is None else 'with'} --results:"
            f" {', '.join(given)}; leave out what has none"
        )
    if settings.page is not None and settings.page.suffix != ".md":
        raise ValueError(f"--page is {settings.page}; expected a file that ends in .md")


def main(settings: Tables) -> None:
    """Write every table and one page with all tables, or the tables of a page of results."""
    check_options(settings)
    progress = Progress()
    if settings.results is not None:
        page = settings.page or Path("docs/results.md")
        progress.say(f"{write_results(settings.results, page)} runs: {page}")
        return
    out = settings.out or Path("runs/tables")
    asked = LAYOUTS if settings.only is None else names_in("--only", settings.only, LAYOUTS)
    names = [name for name in LAYOUTS if name in asked]
    check_folder("--out", out)
    runs, left_out = read_tested(settings.runs)
    if settings.runs and not runs:
        reasons = "".join(f"; left out {directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no finished run below {', '.join(map(str, settings.runs))}{reasons}; expected"
            " finished run directories of experiments/mtil.py or experiments/compare.py, or no"
            " --runs for the paper's numbers alone"
        )
    ours, unused = measure(runs)
    left_out += unused
    out.mkdir(parents=True, exist_ok=True)
    pages = []
    for name in names:
        grids = grids_of(name, ours[name])
        page = [f"## {LAYOUTS[name].title}"]
        for index, grid in enumerate(grids):
            stem = name if len(grids) == 1 else f"{name}-{index + 1}"
            write_atomically(out / f"{stem}.csv", grid.to_csv())
            write_atomically(out / f"{stem}.tex", latex_of(grid))
            page.append(f"{grid.title}\n\n{grid.to_markdown()}")
        page += [NOTES[name]] if name in NOTES else []
        pages.append("\n\n".join(page))
    if left_out:
        lines = [f"- {directory}: {why}" for directory, why in left_out]
        pages.append("\n".join(["## Left out\n", *lines]))
    write_atomically(out / "tables.md", HEAD + "\n\n".join(pages) + "\n")
    for directory, why in left_out:
        progress.say(f"left out {directory}: {why}")
    progress.say(f"{len(names)} tables from {len(runs)} runs: {out / 'tables.md'}")


def measure(
    runs: Sequence[RunRecord],
) -> tuple[dict[str, dict[Cell, list[float]]], list[tuple[Path, str]]]:
    """Return our numbers, keyed by table and cell, and the runs that belong to no table."""
    check_comparable(runs)
    orders = order_names(runs)
    tables: dict[str, dict[Cell, list[float]]] = {name: {} for name in LAYOUTS}
    unused = []
    for run in runs:
        order = orders[run.results["stream"], run.order]
        method = run.results["method"]
        variants = {
            name: variant
            for name in LAYOUTS
            if (variant := variant_in(name, run, order)) is not None
        }
        for name, variant in variants.items():
            layout = LAYOUTS[name]
            for (measure, task), value in measurements(run.results).items():
                if (
                    value is not None
                    and measure in layout.measures
                    and (layout.per_task or not task)
                ):
                    cell = Cell(*run.place, method, measure, variant, task)
                    tables[name].setdefault(cell, []).append(value)
        if not variants:
            variant = describe_variant(run)
            why = f"no table shows {method}{variant and f' ({variant})'} in the order {order}"
            unused.append((run.directory, why))
    tables["fom"] = figures_of_merit(tables)
    return tables, unused


def variant_in(table: str, run: RunRecord, order: str) -> str | None:
    """Return the variant of a run in a table; None if the table does not contain the run."""
    layout = LAYOUTS[table]
    router = run.results["router"]
    variant = describe_variant(run)
    shown = {
        "task_orders": None if variant else order,
        "placement": variant or "mlp_down",
        "sampling": variant or "hee",
        "lite": router if variant in ("", router) else None,
    }.get(table, variant)
    # CLIP's backbones have a separate summary in the paper
    is_clip = run.results["backbone"].startswith("clip")
    mixed = ("full", "heads", "lite", "class_incremental", "task_orders", "ablations")
    if (
        (layout.methods is not None and run.results["method"] not in layout.methods)
        or (layout.variants is not None and shown not in layout.variants)
        or (order != "default" and table != "task_orders")
        or (is_clip != (table == "clip") and table not in mixed)
    ):
        return None
    return shown


def figures_of_merit(tables: Mapping[str, Ours]) -> dict[Cell, list[float]]:
    """Compute figures of merit from means over runs, for methods with runs of the method, of CHEEM
    and of the upper bound."""

    accuracies = {**tables["upper_bounds"], **tables["breakdown"]}
    figures = {}
    for cell in tables["breakdown"]:
        if cell.measure == "average_accuracy" and cell.method != "cheem":

            def number(method: str, measure: str, cell: Cell = cell) -> float | None:
                values = accuracies.get(cell._replace(method=method, measure=measure))
                return float(np.mean(values)) if values else None

            if (figure := figure_of_merit(number, cell.method)) is not None:
                figures[cell._replace(measure="fom")] = [figure]
    return figures


def grids_of(name: str, ours: Ours) -> list[Grid]:
    """Make a table of our numbers and the paper's for each stream and backbone."""
    theirs = printed().get(name, {})
    places = dict.fromkeys((cell.stream, cell.backbone) for cell in (*theirs, *ours))
    return [_grid(name, place, theirs, ours) for place in places]


def _grid(name: str, place: tuple[str, str], theirs: Mapping[Cell, Printed], ours: Ours) -> Grid:
    layout = LAYOUTS[name]
    if name == "training_time":  # phases are rows, as methods are
        theirs = {_phase_as_row(cell): number for cell, number in theirs.items()}
        ours = {_phase_as_row(cell): numbers for cell, numbers in ours.items()}
    methods = list(METHODS)
    by_method = sorted(ours, key=lambda cell: methods.index(cell.method))
    cells = [cell for cell in (*theirs, *by_method) if (cell.stream, cell.backbone) == place]
    rows = dict.fromkeys((cell.method, cell.variant) for cell in cells)
    tasks = list(dict.fromkeys(cell.task for cell in cells if cell.task))
    heads = [
        (measure, task)
        for measure in layout.measures
        for task in {"accuracy": tasks, "flops": [*tasks, ""]}.get(measure, [""])
    ]
    columns = {
        "method": [
            ", ".join(filter(None, (METHODS.get(method, method), variant)))
            for method, variant in rows
        ]
    }
    for measure, task in heads:
        column = [Cell(*place, method, measure, variant, task) for method, variant in rows]
        title = task or TITLES[measure]
        if name == "fom":  # one figure, computed from the means over runs
            texts = [_number(ours[cell][0]) if cell in ours else "" for cell in column]
        else:
            texts = [our_text(ours.get(cell)) for cell in column]
        columns[f"{title}, ours"] = texts
        columns[f"{title}, paper"] = [
            theirs[cell].text if cell in theirs else "" for cell in column
        ]
        if name == "fom":
            recomputed = [
                recomputed_fom(cell.stream, cell.backbone, cell.method) for cell in column
            ]
            columns[f"{title}, recomputed"] = [_number(value) for value in recomputed]
    return filled(f"{layout.title}: {place[0]}, {place[1]}", columns)


def _phase_as_row(cell: Cell) -> Cell:
    return cell._replace(variant=cell.task, task="")


def our_text(values: Sequence[float] | None) -> str:
    """Format the mean, the standard deviation of more than one value, and the number of runs."""
    if not values:
        return ""
    deviation = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{_number(float(np.mean(values)))}{deviation} ({len(values)})"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def latex_of(grid: Grid) -> str:
    """Format a table for LaTeX's booktabs."""
    head, *body = (" & ".join(map(_escape, line)) + r" \\" for line in (grid.columns, *grid.rows))
    form = "l" * grid.num_left + "r" * (len(grid.columns) - grid.num_left)
    lines = (
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escape(grid.title)}}}",
        rf"\begin{{tabular}}{{{form}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    )
    return "\n".join(lines) + "\n"


ESCAPES = {character: f"\\{character}" for character in "&%#_{}$"} | {
    "\\": r"\textbackslash ",
    "±": r"$\pm$",
    "–": "--",
}


def _escape(text: str) -> str:
    return text.translate(str.maketrans(ESCAPES))


if __name__ == "__main__":
    run_command(main, parse(Tables, description=__doc__))
