"""The paper's tables from finished runs, our numbers beside the paper's.

    python experiments/tables.py --runs runs/compare --out runs/tables
    python experiments/tables.py --only fom,heads
    python experiments/tables.py --results docs/results/runs --page docs/results.md

Every folder below `--runs` that holds a finished run is read. Cells are means over seeds with the
standard deviation (n - 1) and the number of runs; what was not run stays empty. Without runs the
tables hold the paper's numbers alone. With `--results`, a folder that `experiments/collect.py`
filled, a page of results is written instead, with paired tests of the paper's claims.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from charts import check_folder, filled, names_in
from studies.paper.printed import NOTES, TOLD_METHOD, Cell, Printed, printed, recomputed_fom
from studies.paper.results_page import write_page

from cheem_jax.cli.main import parse, run_command
from cheem_jax.core import metrics
from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.finished import (
    RunRecord,
    check_comparable,
    numbers_of,
    order_names,
    read,
    variant_of,
)
from cheem_jax.report.table import METHODS, UPPER_BOUNDS, Grid
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Tables:
    """The paper's tables from finished runs."""

    runs: tuple[Path, ...] = ()
    """Folders with runs, at any depth."""
    out: Path = Path("runs/tables")
    """Where the tables are written, as Markdown, CSV and LaTeX."""
    only: str | None = None
    """Names of tables, separated by commas; default: all."""
    results: Path | None = None
    """Folder with collected runs: the page of results is written, and no table. Next to it may be
    `notes.md`, the `chosen.json` of `compare.py --choose` and the `routers.json` of
    `router_study.py`."""
    page: Path = Path("docs/results.md")
    """Where that page is written; its figure lies in the folder of the same name."""


class Layout(NamedTuple):
    """One table of the paper: its title, what is measured, and which runs it is of (None: any)."""

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
    "frozen_linear",
)
SUMMARY = ("average_accuracy", "average_forgetting", "flops")
LAYOUTS = {
    "fom": Layout("Figure of merit of CHEEM", ("fom",), BASELINES, ("",)),
    "upper_bounds": Layout("CHEEM and the upper bounds", SUMMARY, (*UPPER_BOUNDS, "cheem"), ("",)),
    "breakdown": Layout("Accuracy, forgetting and FLOPs", SUMMARY, (*BASELINES, "cheem"), ("",)),
    "taskwise_flops": Layout(
        "FLOPs of CHEEM by task", ("flops",), ("cheem",), ("",), per_task=True
    ),
    "training_time": Layout("Hours of training per task", ("hours",), (*BASELINES, "cheem"), ("",)),
    "placement": Layout(
        "Where the memory is placed",
        ("average_accuracy", "flops", "params_added_percent"),
        ("cheem",),
        ("mlp_down", "attn_proj"),
    ),
    "sampling": Layout(
        "HEE against uniform sampling",
        ("average_accuracy", "flops", "params_added_percent"),
        ("cheem",),
        ("hee", "uniform"),
    ),
    "full": Layout(
        "Accuracy by task", ("accuracy", "average_accuracy", "average_forgetting"), per_task=True
    ),
    "clip": Layout("Backbones pretrained by CLIP", SUMMARY, variants=("",)),
    "lite": Layout(
        "A lighter network names the task", SUMMARY, ("moe_adapters", "cheem", "cheem_lite")
    ),
    "heads": Layout(
        "Designs of the head",
        ("average_accuracy", "local_average_accuracy", "just_trained"),
        variants=("",),
    ),
    "task_orders": Layout(
        "Orders of the tasks",
        ("accuracy", "average_accuracy", "average_forgetting"),
        ("cheem",),
        per_task=True,
    ),
    "ablations": Layout(
        "Ablations of CHEEM",
        ("average_accuracy", "local_average_accuracy", "flops", "params_added_percent"),
        ("cheem",),
    ),
    "components": Layout(
        "Components of a block, fine-tuned", ("average_accuracy", "average_forgetting"), ()
    ),
}
TITLES = {
    "average_accuracy": "accuracy %",
    "average_forgetting": "forgetting",
    "local_average_accuracy": "task given %",
    "just_trained": "just trained %",
    "params_added_percent": "params added %",
    "flops": "GFLOPs",
    "hours": "hours",
    "fom": "FoM",
}
Found = Mapping[str, Mapping[Cell, Sequence[float]]]


def main(settings: Tables) -> None:
    """Write every table and one page with all, or the page of results."""
    progress = Progress()
    if settings.results is not None:
        if settings.runs or settings.only:
            raise ValueError(
                "--results writes the page of results and no table; leave out --runs and --only"
            )
        progress.say(f"{write_page(settings.results, settings.page)} runs: {settings.page}")
        return
    asked = LAYOUTS if settings.only is None else names_in("--only", settings.only, LAYOUTS)
    names = [name for name in LAYOUTS if name in asked]
    check_folder("--out", settings.out)
    runs, left_out = read(settings.runs)
    if settings.runs and not runs:
        why = "".join(f"; left out {directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no finished run below {', '.join(map(str, settings.runs))}{why}; expected finished"
            " run directories of experiments/mtil.py or experiments/compare.py, or no --runs for"
            " the paper's numbers alone"
        )
    ours, unused = measured(runs)
    left_out += unused
    settings.out.mkdir(parents=True, exist_ok=True)
    pages = []
    for name in names:
        grids = grids_of(name, ours.get(name, {}))
        page = [f"## {LAYOUTS[name].title}"]
        for index, grid in enumerate(grids):
            stem = name if len(grids) == 1 else f"{name}-{index + 1}"
            write_atomically(settings.out / f"{stem}.csv", grid.to_csv())
            write_atomically(settings.out / f"{stem}.tex", latex_of(grid))
            page.append(f"{grid.title}\n\n{grid.to_markdown()}")
        page += [NOTES[name]] if name in NOTES else []
        pages.append("\n\n".join(page))
    if left_out:
        pages.append(
            "## Left out\n\n" + "\n".join(f"- {directory}: {why}" for directory, why in left_out)
        )
    write_atomically(settings.out / "tables.md", HEAD + "\n\n".join(pages) + "\n")
    for directory, why in left_out:
        progress.say(f"left out {directory}: {why}")
    progress.say(f"{len(names)} tables from {len(runs)} runs: {settings.out / 'tables.md'}")


HEAD = """# The paper's tables

`ours` is the mean over runs with its standard deviation and, behind it, the number of runs; `paper` is what the paper
prints. An empty cell was not run, or is not in the paper.

"""  # noqa: E501


def measured(runs: Sequence[RunRecord]) -> tuple[Found, list[tuple[Path, str]]]:
    """Our numbers by table and cell, one per run, and the runs that no table shows."""
    check_comparable(runs)
    orders = order_names(runs)
    found: dict[str, dict[Cell, list[float]]] = {name: {} for name in LAYOUTS}
    unused = []
    for run in runs:
        order = orders[run.results["stream"], run.order]
        variant = variant_of(run)
        method = run.results["method"]
        values = {key: value for key, value in numbers_of(run.results).items() if value is not None}
        shown = False
        for name, layout in LAYOUTS.items():
            own = {
                "task_orders": None if variant else order,
                "placement": variant or "mlp_down",
                "sampling": variant or "hee",
                "lite": run.results["router"] if variant in ("", run.results["router"]) else None,
            }.get(name, variant)
            if (
                own is None
                or (layout.methods is not None and method not in layout.methods)
                or (layout.variants is not None and own not in layout.variants)
                or (order != "default" and name != "task_orders")
                or not belongs(name, run.results)
            ):
                continue
            shown = True
            for (measure, task), value in values.items():
                if measure in layout.measures and (
                    layout.per_task or not task or name == "training_time"
                ):
                    found[name].setdefault(Cell(*run.place, method, measure, own, task), []).append(
                        value
                    )
        if not shown:
            unused.append(
                (
                    run.directory,
                    f"no table shows {method}{variant and f' ({variant})'} in the order {order}",
                )
            )
    found["fom"] = figures_of_merit(found)
    return found, unused


def belongs(table: str, results: Mapping[str, Any]) -> bool:
    """Whether a table is about such a run: of the paper's summaries CLIP's backbones have one of
    their own."""
    anywhere = ("full", "heads", "lite", "task_orders", "ablations")
    return results["backbone"].startswith("clip") == (table == "clip") or table in anywhere


def figures_of_merit(found: Found) -> dict[Cell, list[float]]:
    """One value from the means over runs, where the method, CHEEM and the bound were all run."""

    def mean(cell: Cell) -> float | None:
        values = found["breakdown"].get(cell) or found["upper_bounds"].get(cell)
        return float(np.mean(values)) if values else None

    figures = {}
    for cell in found["breakdown"]:
        if cell.measure != "average_accuracy" or cell.method == "cheem":
            continue
        given = (
            mean(cell._replace(method=TOLD_METHOD)),
            mean(cell._replace(method="cheem")),
            mean(cell._replace(method="cheem", measure="flops")),
            mean(cell),
            mean(cell._replace(measure="flops")),
        )
        value = None if None in given else metrics.figure_of_merit(*given)  # pyright: ignore[reportArgumentType]
        if value is not None:
            figures[cell._replace(measure="fom")] = [value]
    return figures


def grids_of(name: str, ours: Mapping[Cell, Sequence[float]]) -> list[Grid]:
    """A table once per stream and backbone, ours and the paper's."""
    theirs = printed().get(name, {})
    places = list(dict.fromkeys((cell.stream, cell.backbone) for cell in (*theirs, *ours)))
    return [_grid(name, place, theirs, ours) for place in places]


def _grid(
    name: str,
    place: tuple[str, str],
    theirs: Mapping[Cell, Printed],
    ours: Mapping[Cell, Sequence[float]],
) -> Grid:
    layout = LAYOUTS[name]
    own = sorted(ours, key=lambda cell: list(METHODS).index(cell.method))
    cells = [cell for cell in (*theirs, *own) if (cell.stream, cell.backbone) == place]
    if name == "training_time":  # the phases are rows, like methods
        cells = [cell._replace(variant=cell.task, task="") for cell in cells]
        theirs = {
            cell._replace(variant=cell.task, task=""): value for cell, value in theirs.items()
        }
        ours = {cell._replace(variant=cell.task, task=""): value for cell, value in ours.items()}
    rows = list(dict.fromkeys((cell.method, cell.variant) for cell in cells))
    tasks = list(dict.fromkeys(cell.task for cell in cells if cell.task))
    heads = [
        (measure, task)
        for measure in layout.measures
        for task in (tasks if measure == "accuracy" else [""])
    ]
    if name == "taskwise_flops":
        heads = [("flops", task) for task in [*tasks, ""]]
    columns = {
        "method": [
            METHODS.get(method, method) + (f", {variant}" if variant else "")
            for method, variant in rows
        ]
    }
    for measure, task in heads:
        column = [Cell(*place, method, measure, variant, task) for method, variant in rows]
        title = task or TITLES[measure]
        columns[f"{title}, ours"] = [our_text(ours.get(cell)) for cell in column]
        columns[f"{title}, paper"] = [
            theirs[cell].text if cell in theirs else "" for cell in column
        ]
        if name == "fom":
            again = [recomputed_fom(cell.stream, cell.backbone, cell.method) for cell in column]
            columns[f"{title}, recomputed"] = [_number(value) for value in again]
    return filled(f"{layout.title}: {place[0]}, {place[1]}", columns)


def our_text(values: Sequence[float] | None) -> str:
    """Mean, standard deviation of several, and the number of runs."""
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{_number(float(np.mean(values)))}{spread} ({len(values)})"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def latex_of(grid: Grid) -> str:
    """A booktabs table."""
    lines = [" & ".join(map(_escaped, line)) + r" \\" for line in (grid.columns, *grid.rows)]
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    form = "l" * grid.num_left + "r" * (len(grid.columns) - grid.num_left)
    return (
        f"\\begin{{table}}\n\\centering\n\\caption{{{_escaped(grid.title)}}}\n\\begin{{tabular}}{{{form}}}\n\\toprule\n"
        f"{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def _escaped(text: str) -> str:
    for character in "\\&%#_{}$":
        text = text.replace(character, {"\\": r"\textbackslash "}.get(character, f"\\{character}"))
    return text.replace("±", r"$\pm$").replace("–", "--")


if __name__ == "__main__":
    run_command(main, parse(Tables, description=__doc__))
