"""`docs/results.md` from collected runs: every number is computed, and no sentence presupposes how it came out."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from charts import frame, legend_below, mean_std, spread
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.routing import RouterConfig
from cheem_jax.report.comparison import comparison, measure
from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.table import METHODS, NONE, UPPER_BOUNDS, Grid
from studies.paper import results_setting
from studies.paper.claims import CHEEM, claims, in_short, paired_grid, unbeaten, verdict_grid
from studies.paper.collected import Cell, Cells, is_usual, load, usual_of
from studies.paper.merit import ahead_line, cost_of_router, merit_section, sides_of
from studies.paper.paired import RESAMPLES
from studies.paper.printed import Cell as PrintedCell
from studies.paper.printed import printed
from studies.paper.results_setting import Beside, load_beside, setting_sections
from studies.routers.page import NAMES, sections_of, told_gain

Results = Mapping[str, Any]


class Row(NamedTuple):
    """A row of the tables: runs of one cell, or the reference inside those of CHEEM."""

    title: str
    method: str
    runs: Sequence[Results]


ROUTERS = "routers.json"
"""What the study of routers on the same runs left beside them."""


def write_page(results: Path, page: Path) -> int:
    """The page, and its figures in the folder of the page's name; returns the number of runs."""
    cells, folder, notes = load(results), page.with_suffix(""), results.parent / "notes.md"
    rows = rows_of(cells)
    file = results.parent / ROUTERS
    routers = json.loads(file.read_text()) if file.is_file() else None
    folder.mkdir(parents=True, exist_ok=True)
    by_hand = notes.read_text() if notes.is_file() else ""
    text = page_of(cells, rows, by_hand, f"{folder.name}/accuracy.png", routers, load_beside(results, cells))
    accuracy_figure({row.title: row.runs for row in rows}, folder / "accuracy.png")
    write_atomically(page, text)
    return sum(map(len, cells.values()))


def page_of(
    cells: Cells, rows: Sequence[Row], notes: str, picture: str, routers: Mapping[str, Any] | None, beside: Beside,
) -> str:  # fmt: skip
    """The whole page as Markdown; `notes` was written by hand and is taken as it is."""
    first = rows[0].runs[0]
    judged = [(claim, claim.check(cells)) for claim in claims()]
    changed = results_setting.changed_verdicts(beside.again, cells, judged)
    others = [cell for cell in cells if not is_usual(cells, cell)]
    pairs = [(cell.title, cell, usual_of(cells, cell.method) or Cell(cell.method)) for cell in others]
    variants = [Row(cell.title, cell.method, results_of(cells, cell)) for cell in others]
    baselines = [
        (cell.title, CHEEM, cell) for cell in cells
        if CHEEM in cells and cell.method not in (*UPPER_BOUNDS, CHEEM.method) and is_usual(cells, cell)
    ]  # fmt: skip
    measured, titles = measured_of(rows), {row.method: row.title for row in reversed(rows)}
    searched = [row for row, cell in zip(variants, others, strict=True) if cell == RESUMED]
    sides = sides_of(titles, measured, routers, added_by(routers, first))
    deviation = " ± standard deviation" if any(len(row.runs) > 1 for row in rows) else ""
    parts = [
        f"# Results: {len(first['tasks'])} tasks, {first['backbone']}, {first['image_size']} pixels",
        HEAD,
        "## In short",
        WORDS,
        in_short(judged, changed)
        + unbeaten(baselines, cells, measured)
        + ahead_line(sides)
        + beyond(routers)
        + results_setting.sizes_lines(beside.sizes, measured, routers, first["image_size"]),
        "## What the paper claims, checked here",
        CLAIMS,
        verdict_grid(judged).to_markdown(),
        "The rules; an interval on both sides of a limit leaves a claim undecided:",
        "\n".join(f"- ({claim.letter}) {claim.rule}." for claim, _ in judged),
        "## Methods",
        METHODS_TEXT,
        method_grid(rows).to_markdown(),
        f"![Average accuracy of every method and run, with the task ID given and inferred]({picture})",
        *([BASELINES_TEXT, paired_grid("CHEEM minus", baselines, cells)] if baselines else []),
        *(["### Variants and other orders", method_grid(variants).to_markdown()] if variants else []),
        *([PAIRED_TEXT, paired_grid("variant", pairs, cells)] if others else []),
        *results_setting.again_section(beside.again, cells, [*(cell for _, _, cell in baselines), *others], changed),
        "## Accuracy by task",
        f"After the last task, in %, mean{deviation} over runs.",
        task_grid(
            [*rows, *variants],
            lambda run: last_row(run, "local_accuracy" if run["method"] in UPPER_BOUNDS else "accuracy"),
        ),
        "## What task-ID inference costs",
        "Accuracy with the task ID given minus task-agnostic accuracy, in points: lost by the router, or, with one "
        "head over all tasks, to classes of other tasks.",
        task_grid(
            [row for row in rows if row.method not in UPPER_BOUNDS],
            lambda run: last_row(run, "local_accuracy") - last_row(run, "accuracy"),
        ),
        "## Figure of merit",
        merit_section(sides, {row.title: measured_of([row])[row.method] for row in searched}),
        *(router_parts(routers, cells) if routers else []),
        "## The paper's numbers",
        *beside_the_paper(rows, first["backbone"]),
        *setting_sections(cells, routers is not None),
        *(["## What these runs do not show", notes.strip()] if notes else []),
    ]
    return "\n\n".join(parts) + "\n"


HEAD = "`experiments/tables.py` makes this page from the records of finished runs in `docs/results`; a test compares."
WORDS = """The setting: exemplar-free continual learning of one task after another with a pretrained backbone, the
task ID not given at test time. *Accuracy*, unless it says otherwise, is task-agnostic: the mean over tasks after the
last one, the task ID inferred by the *router* of a method with a network per task. *HEE* samples architectures by task
similarity, *uniform* all candidates alike. *Frozen, linear heads*: ridge regressions on frozen features, one per task.
Two variants are of searches that the library no longer has: *shared-prefix FLOPs* counted what runs after the router's
pass; *trained samples* trained sampled architectures and kept the best. The table of settings names their commits."""
CLAIMS = f"""Differences in points of average accuracy unless a unit is given, paired by seed and test image. Intervals:
bootstrap, {RESAMPLES:,} resamples over seeds and, within each task, test images (over tasks for a correlation and for
parameters); *over tasks* also resamples the tasks, for other tasks like these. Images count as independent, which
frames of one traffic sign are not. p: two-sided, of no difference, also where the rule asks for more; uncorrected, so
one of twenty lines without a difference is expected below 0.05. **One seed**: nothing is said about other seeds; with
two or three, intervals are rather too narrow. A claim holds if all its lines do, and does not if one does not."""
BASELINES_TEXT = """CHEEM with the paper's router minus each method without the task ID, paired as above. This compares
accuracy alone, not cost."""
PAIRED_TEXT = """Each variant minus its method as it is, paired as above."""
METHODS_TEXT = """Means over runs, ± standard deviation over seeds (n − 1). *Right after learning*: each task, among the
tasks so far. *Forgetting*: drop from a task's best accuracy so far, over all tasks but the last. FLOPs are per image,
by the paper's convention and as executed, counted from the recorded networks. Parameters added are per task, in % of
the backbone; stored are those of all tasks together. Hours are from the fastest to the slowest run, on shared machines.
Methods marked * are given the task ID: references, not baselines."""


RESUMED = Cell("cheem", "shared-prefix FLOPs")
"""CHEEM whose search counts what runs behind the router's pass."""


def rows_of(cells: Cells) -> list[Row]:
    """The usual runs of every method; where frozen heads were no run of their own, those beside CHEEM stand in."""
    rows = [Row(title_of(cell), cell.method, results_of(cells, cell)) for cell in cells if is_usual(cells, cell)]
    if Cell("frozen_linear") not in cells and Cell("cheem") in cells:
        kept = ("seed", "router", "backbone", "image_size", "tasks")
        inside = [
            {**run["yardsticks"]["frozen_linear"], **{key: run[key] for key in kept}, "method": "frozen_linear"}
            for run in results_of(cells, Cell("cheem"))
            if "frozen_linear" in run["yardsticks"]
        ]
        if inside:
            rows.append(Row("frozen, linear heads (inside CHEEM's runs)", "frozen_linear", inside))
    if not rows:
        raise ValueError("no collected run is of a method as it is, in the usual order; collect one")
    return rows


def measured_of(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Means over runs by method, of the first row of each."""
    found = comparison({row.method: row.runs for row in reversed(rows)})
    return {row["method"]: row for row in reversed(found)}


def router_parts(found: Mapping[str, Any], cells: Cells) -> list[str]:
    """The study of routers, and the collected runs that it should have counted and did not."""
    known = [(run["method"], run["seed"]) for run in found["runs"]]
    own = [(name, seed) for name in NAMES for seed in cells.get(Cell(name), {})]
    left_out = [f"{METHODS[name]} with seed {seed}" for name, seed in own if (name, seed) not in known]
    shown = [f"Not counted here yet: {', '.join(left_out)}."] if left_out else []
    return ["## Which router loses least", sections_of(found), *shown]


def title_of(cell: Cell) -> str:
    return cell.title + (" *" if cell.method in UPPER_BOUNDS else "")


def results_of(cells: Cells, cell: Cell) -> list[Results]:
    return [collected.run.results for collected in cells[cell].values()]


def names_of(run: Results) -> list[str]:
    """The tasks in the order in which they were learned."""
    return [task["name"] for task in run["tasks"]]


def last_row(run: Results, name: str) -> np.ndarray:
    """Accuracy by task after the last one, in %."""
    return 100 * np.array(run[name][-1], float)


def beyond(routers: Mapping[str, Any] | None) -> str:
    """What the chosen router gains, as one more line."""
    if routers is None:
        return ""
    chosen = routers["chosen"]
    gains = [
        f"{METHODS[method]} {told_gain(chosen[method]['gain'])} points to {100 * chosen[method]['accuracy']:.1f} %"
        for method in METHODS if method in chosen
    ]  # fmt: skip
    return (
        f"\n- Beyond the paper, the router chosen on validation images ({chosen['features']} {chosen['title']}), with "
        f"the same networks: {'; '.join(gains)}."
    )


def added_by(routers: Mapping[str, Any] | None, run: Results) -> dict[str, float]:
    """What the chosen router adds to FLOPs per image; nothing without that study or of unknown backbones."""
    if routers is None or run["backbone"] not in CONFIGS:
        return {}
    return cost_of_router(run, RouterConfig(**routers["chosen"]["config"]))


AT_ONCE = "at_once"
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "average_accuracy": ("average accuracy %", lambda v: f"{100 * v:.1f}"),
    "local_average_accuracy": ("task ID given %", lambda v: f"{100 * v:.1f}"),
    AT_ONCE: ("right after learning %", lambda v: f"{100 * v:.1f}"),
    "average_forgetting": ("forgetting, points", lambda v: f"{100 * v:.1f}"),
    "flops_paper": ("MFLOPs, paper", lambda v: f"{v / 1e6:,.0f}"),
    "flops_executed": ("MFLOPs, executed", lambda v: f"{v / 1e6:,.0f}"),
    "params_added_percent": ("params added %", lambda v: f"{v:.2f}"),
    "params_stored": ("params stored, k", lambda v: f"{v / 1e3:,.0f}"),
    "seconds": ("hours", lambda v: f"{v / 3600:.2f}"),
}


def method_grid(rows: Sequence[Row]) -> Grid:
    """Means over runs of every measure."""
    lines = []
    for row, measured in zip(rows, comparison({str(n): row.runs for n, row in enumerate(rows)}), strict=True):
        cells = [row.title, ", ".join(str(seed) for seed in measured["seeds"])]
        for name, (_, shown) in COLUMNS.items():
            value = at_once(row) if name == AT_ONCE else measured[name]
            if value is None:
                cells.append(NONE)
            elif name == "seconds":
                cells.append(
                    " to ".join(dict.fromkeys(shown(end(run[name] for run in row.runs)) for end in (min, max)))
                )
            else:
                cells.append(shown(value["mean"]) + ("" if value["std"] is None else f" ± {shown(value['std'])}"))
        lines.append(tuple(cells))
    return Grid("", ("method", "seeds", *(title for title, _ in COLUMNS.values())), tuple(lines), 1)


def at_once(row: Row) -> dict[str, Any] | None:
    """Accuracy on each task right after it was learned, among the tasks so far, mean over tasks."""
    if row.method in UPPER_BOUNDS:
        return None
    found = [np.mean([line[index] for index, line in enumerate(run["accuracy"])]) for run in row.runs]
    return mean_std([float(value) for value in found])


def task_grid(rows: Sequence[Row], measure: Callable[[Results], np.ndarray]) -> str:
    """A row per method, a column per task and their mean."""
    names = names_of(rows[0].runs[0])
    lines = []
    for row in rows:
        values = np.array([measure(run)[[names_of(run).index(name) for name in names]] for run in row.runs])
        values = np.column_stack([values, values.mean(axis=1)])
        lines.append((row.title, *(spread(column.tolist()) for column in values.T)))
    return Grid("", ("method", *names, "mean"), tuple(lines), 1).to_markdown()


PAPER = {"average_accuracy": "accuracy %", "average_forgetting": "forgetting", "flops": "GFLOPs"}


def beside_the_paper(rows: Sequence[Row], backbone: str) -> list[str]:
    """Ours and the paper's numbers of the same backbone on its two benchmarks."""
    tables = printed()
    theirs = {**tables["upper_bounds"], **tables["breakdown"]}
    places = [stream for stream in ("mtil", "vdd") if PrintedCell(stream, backbone, "cheem", "flops") in theirs]
    if not places:
        return [f"The paper prints no results of {backbone}."]
    ours = measured_of(rows)
    told = dict.fromkeys(
        [*(row.method for row in rows), *(cell.method for cell in theirs if cell.backbone == backbone)]
    )
    lines = []
    for method in told:
        line = [title_of(Cell(method))]
        for name in PAPER:
            line.append(_ours(ours.get(method), name, is_told=method in UPPER_BOUNDS))
            cells = [PrintedCell(stream, backbone, method, name) for stream in places]
            line += [theirs[cell].text if cell in theirs else NONE for cell in cells]
        lines.append(tuple(line))
    sources = ["here", *(f"paper, {stream.upper()}" for stream in places)]
    columns = ("method", *(f"{title}, {source}" for title in PAPER.values() for source in sources))
    return [
        f"Other data: the paper trains {backbone} on its full benchmarks, at 224 pixels, with its own settings. "
        "Compare rows within a column, never across columns.",
        Grid("", columns, tuple(lines), 1).to_markdown(),
    ]


def _ours(row: Mapping[str, Any] | None, name: str, *, is_told: bool) -> str:
    if row is None:
        return NONE
    key = {"flops": "flops_paper"}.get(name, "local_average_accuracy" if is_told and "accuracy" in name else name)
    value = row[key]
    return NONE if value is None else f"{value['mean'] / 1e9:.2f}" if name == "flops" else f"{100 * value['mean']:.1f}"


FOUND, GIVEN = "#1f77b4", "#c0792b"


def accuracy_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """A line per method: mean with its standard deviation, and a point per run, without and with the task ID given."""
    figure = Figure(figsize=(7.2, 1.5 + 0.42 * len(rows)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for place, runs in enumerate(rows.values()):
        for name, colour, shift in (("average_accuracy", FOUND, -0.14), ("local_average_accuracy", GIVEN, 0.14)):
            values = [100 * value for run in runs if (value := measure(run, name)) is not None]
            if (found := mean_std(values)) is None:
                continue
            axes.errorbar(
                found["mean"], place + shift, xerr=found["std"], fmt="D", color=colour, markersize=5, capsize=3,
                linewidth=1.5,
            )  # fmt: skip
            axes.plot(values, [place + shift] * len(values), "o", color=INK, markersize=2.5, zorder=3)
    titles = [title.replace("$", r"\$").replace(" (", "\n(") for title in rows]
    axes.set_yticks(range(len(rows)), titles, color=INK, fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 100))
    frame(axes, x="average accuracy after the last task, %", grid=True)
    handles = [
        Line2D([], [], color=FOUND, marker="D", markersize=5, linestyle="none", label="task-agnostic"),
        Line2D([], [], color=GIVEN, marker="D", markersize=5, linestyle="none", label="task ID given"),
        Line2D([], [], color=INK, marker="o", markersize=2.5, linestyle="none", label="one run"),
    ]
    legend_below(figure, handles)
    figure.suptitle("Mean over runs; bars: standard deviation over seeds", fontsize=10, color=FAINT)
    save(figure, file)
