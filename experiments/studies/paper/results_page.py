"""The page of results from collected runs: every number is computed, and no sentence presupposes
how it came out."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from charts import frame, legend_below, mean_std, spread
from flax.traverse_util import flatten_dict
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cheem_jax.core.atomic import write_atomically
from cheem_jax.report.comparison import comparison, measure
from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.table import METHODS, NONE, UPPER_BOUNDS, Grid
from studies.paper.claims import (
    FAILS,
    NOT_RUN,
    OPEN,
    Claim,
    Verdict,
    above,
    claims,
    compared,
    in_common,
    in_short,
    searches,
    shown,
    unbeaten,
    verdict_grid,
)
from studies.paper.collected import (
    OF_THEIR_OWN,
    Cell,
    Cells,
    Collected,
    is_compared,
    is_usual,
    load,
    usual_of,
)
from studies.paper.paired import RESAMPLES
from studies.routers.page import compared_grid, told_gain

Results = Mapping[str, Any]


class Row(NamedTuple):
    """A row of the tables: runs of one cell."""

    cell: Cell
    title: str
    runs: Sequence[Results]


class Beside(NamedTuple):
    """What studies and people left next to the folder of the runs."""

    notes: str = ""
    """Written by hand, taken as it is: what was compared, and what that does not show."""
    routers: Mapping[str, Any] | None = None
    """What the study of routers found on the same runs."""
    chosen: Sequence[Mapping[str, Any]] = ()
    """Settings that `compare.py --choose` chose."""


REFERENCES = ("lora_cl", "frozen_linear", "full_finetune")
"""What a reader compares CHEEM with first: no search, no learning, no sharing."""
COSTS = {
    "flops_paper": "MFLOPs per image",
    "params_added_percent": "% of the backbone's parameters added per task",
    "seconds": "minutes",
}
NOTES = "notes.md"
ROUTERS = "routers.json"
CHOSEN = "chosen.json"


def write_page(results: Path, page: Path) -> int:
    """The page, and its figure in the folder of the page's name; returns the number of runs."""
    cells = load(results)
    folder = page.with_suffix("")
    texts = [
        file.read_text() if (file := results.parent / name).is_file() else ""
        for name in (NOTES, ROUTERS, CHOSEN)
    ]
    beside = Beside(texts[0], json.loads(texts[1] or "null"), json.loads(texts[2] or "[]"))
    rows = rows_of(cells)
    folder.mkdir(parents=True, exist_ok=True)
    text = page_of(cells, rows, beside, f"{folder.name}/accuracy.png")
    accuracy_figure(
        {row.title: row.runs for row in rows if is_compared(cells, row.cell)},
        folder / "accuracy.png",
    )
    write_atomically(page, text)
    return sum(map(len, cells.values()))


def page_of(cells: Cells, rows: Sequence[Row], beside: Beside, picture: str) -> str:
    """The whole page as Markdown, with at most five tables."""
    first = rows[0].runs[0]
    ours = headline(cells)
    judged = [(claim, claim.check(cells)) for claim in claims()]
    compared = [row for row in rows if is_compared(cells, row.cell)]
    tabled = [
        (claim, lines) for claim, lines in judged if any(line.word != NOT_RUN for line in lines)
    ]
    others = [
        (row.title, ours, row.cell)
        for row in compared
        if ours in cells and row.cell.method not in (*UPPER_BOUNDS, *REFERENCES, ours.method)
    ]
    parts = [
        (
            f"# Results: {len(first['tasks'])} tasks, {first['backbone']}, {first['image_size']}"
            " pixels"
        ),
        (
            "`experiments/tables.py --results` makes this page from the records of finished runs; a"
            " test compares."
        ),
        "## In short",
        answer(compared, cells)
        + in_short(judged)
        + unbeaten(others, cells, measured_of(compared))
        + beyond(beside.routers, [ours.title, *(METHODS[method] for method in REFERENCES)]),
        WORDS,
        *([beside.notes.strip()] if beside.notes else []),
        "## Methods",
        METHODS_TEXT,
        method_grid(rows, cells).to_markdown(),
        (
            "![Average accuracy of every method and run, with the task ID given and"
            f" inferred]({picture})"
        ),
        "## Accuracy by task",
        TASKS_TEXT,
        task_grid(rows),
        *(claim_parts(tabled) if tabled else []),
        *(router_parts(beside.routers, cells) if beside.routers else []),
        "## Settings, machines, commands",
        *setting_parts(cells, beside.chosen),
    ]
    return "\n\n".join(parts) + "\n"


WORDS = """Tasks are learned one after another, and no image is kept. *Accuracy*: the mean over tasks after the last
one, task-agnostic unless it says otherwise; the *router* of a method with a network per task infers the task ID. *HEE*
samples architectures by task similarity, *uniform* all alike. *Frozen, linear heads*: a ridge regression per task on
frozen features."""  # noqa: E501
METHODS_TEXT = f"""Means over runs, ± standard deviation over seeds (n − 1). *CHEEM … minus*: points of average
accuracy, paired by test image and by the seeds that both have, with the 95 % interval (bootstrap over seeds and,
within tasks, test images; {RESAMPLES:,} resamples). A method marked * is given the task ID, and so is CHEEM in that
row. *Forgetting*: drop from a task's best accuracy, over all tasks but the last. FLOPs are per image, parameters added
per task, in % of the backbone, and those stored of all tasks. Minutes: fastest to slowest run, on shared machines."""  # noqa: E501
TASKS_TEXT = """After the last task, in %, mean ± standard deviation over runs; task-agnostic, of methods marked *
with the task ID given. The first line has the training images and the classes."""  # noqa: E501
CLAIMS = """*Over tasks* also resamples the tasks, for other tasks like these. Images count as independent, which
frames of one traffic sign are not. p: two-sided, of no difference, uncorrected. **One seed** says nothing about other
seeds; with two or three, intervals are rather too narrow. Of each search, a claim is confirmed if all its lines are,
and refuted if one is; an interval on both sides of a limit leaves it undecided. The rules:"""  # noqa: E501


def rows_of(cells: Cells) -> list[Row]:
    """All cells, variants behind."""
    found = [Row(cell, title_of(cell), results_of(cells, cell)) for cell in cells]
    if not any(is_usual(cells, cell) for cell in cells):
        raise ValueError(
            "no collected run is of a method as it is, in the usual order; collect one"
        )
    return sorted(found, key=lambda row: not is_compared(cells, row.cell))


def measured_of(rows: Sequence[Row]) -> dict[Cell, dict[str, Any]]:
    """Means over runs of every measure, by cell."""
    measured = comparison({str(number): row.runs for number, row in enumerate(rows)})
    return {row.cell: found for row, found in zip(rows, measured, strict=True)}


def claim_parts(tabled: Sequence[tuple[Claim, Sequence[Verdict]]]) -> list[str]:
    """The rules and verdicts of the claims that were compared."""
    rules = "\n".join(f"- ({claim.letter}) {claim.rule}." for claim, _ in tabled)
    return [
        "## What the paper claims, checked here",
        CLAIMS,
        rules,
        verdict_grid(tabled).to_markdown(),
    ]


def router_parts(found: Mapping[str, Any], cells: Cells) -> list[str]:
    """The study of routers, and the collected runs that it should have counted and did not."""
    left_out = [
        f"{cell.title} with seed {seed}"
        for cell in cells
        for seed in sorted(set(cells[cell]) - set(found["runs"].get(cell.title, cells[cell])))
    ]
    told = [f"Not counted here yet: {', '.join(left_out)}."] if left_out else []
    return ["## Which router loses least", compared_grid(found), *told]


def title_of(cell: Cell) -> str:
    return cell.title + (" *" if cell.method in UPPER_BOUNDS else "")


def results_of(cells: Cells, cell: Cell) -> list[Results]:
    return [collected.run.results for collected in cells[cell].values()]


def names_of(run: Results) -> list[str]:
    """The tasks in the order in which they were learned."""
    return [task["name"] for task in run["tasks"]]


def headline(cells: Cells) -> Cell:
    """The CHEEM that others are compared with: where the other search was run, that, since a user
    would take it."""
    return searches(cells)[-1]


def answer(rows: Sequence[Row], cells: Cells) -> str:
    """CHEEM's accuracy and cost next to those of the references, as lines; and the paper's search,
    if both ran."""
    ours = headline(cells)
    measured = measured_of(rows)
    if ours not in measured:
        return ""
    shown_cells = [
        row.cell for row in rows if row.cell == ours or row.cell in map(Cell, REFERENCES)
    ]

    def told(cell: Cell, name: str) -> str:
        value = measured[cell][name]
        return NONE if value is None else COLUMNS[name][1](value["mean"])

    def reached(cell: Cell) -> str:
        accuracy, given = (
            told(cell, name) for name in ("average_accuracy", "local_average_accuracy")
        )
        seeds = len(measured[cell]["seeds"])
        return (
            f"**{cell.title}: {accuracy} %**, {given} with the task ID given ({seeds}"
            f" seed{'s' * (seeds > 1)})"
        )

    found = [reached(ours)]
    found += [_apart(cell, cells, ours) for cell in shown_cells if cell != ours]
    found += [f"{METHODS[method]}: not run" for method in REFERENCES if Cell(method) not in cells]
    costs = [
        f"{', '.join(told(cell, name) for cell in shown_cells)} {unit}"
        for name, unit in COSTS.items()
    ]
    names = "; ".join(cell.title for cell in shown_cells)
    lines = [
        f"- {'; '.join(found)}.",
        f"- What they cost, in the order {names}: {'; '.join(costs)}.",
    ]
    for other in [cell for cell in searches(cells) if cell != ours]:
        beside = [_apart(cell, cells, other) for cell in (Cell(REFERENCES[0]),) if cell in cells]
        lines.append(f"- With the paper's search: {'; '.join([reached(other), *beside])}.")
    return "\n".join(lines) + "\n"


def _apart(cell: Cell, cells: Cells, ours: Cell) -> str:
    """How far CHEEM is above or below another method, in words."""
    line = _compared(cell, cells, ours)
    if line.estimate is None:
        return f"not compared with {cell.title} ({line.why})"
    value, interval, *_ = shown(line)
    side = "below" if line.estimate.value < 0 else "above"
    given = " with the task ID given to both" if cell.method in UPPER_BOUNDS else ""
    doubt = ", not significant" if line.word == OPEN else ""
    return (
        f"{value.lstrip('+−')} {side} {cell.title}{given}"
        f" ({interval}{doubt}{_carried(line, cell, cells, ours)})"
    )


def _carried(line: Verdict, cell: Cell, cells: Cells, ours: Cell) -> str:
    """The difference without the one task that decides its sign, if there is such a task."""
    pairs, _ = in_common(cells, ours, cell)
    order = next(iter(pairs.values()))[0].run.order
    is_given = cell.method in UPPER_BOUNDS
    if line.word == OPEN or len(order) == 1:
        return ""
    sign = -1 if line.word == FAILS else 1
    answers = [[side.answers(order, given=is_given) for side in pair] for pair in pairs.values()]
    leads = [sign * sum(a[i].mean() - b[i].mean() for a, b in answers) for i in range(len(order))]
    rest = _compared(cell, cells, ours, name := order[int(np.argmax(leads))])
    assert rest.estimate is not None, "both sides were run"
    if sign * rest.estimate.value >= 0:
        return ""
    value, interval, *_ = shown(rest)
    return f"; without {name} {value.removesuffix(' points')}, {interval}"


def beyond(routers: Mapping[str, Any] | None, titles: Sequence[str]) -> str:
    """What the chosen router gains for the methods of these titles, as one more line."""
    if routers is None:
        return ""
    chosen = routers["chosen"]
    gains = [
        f"{title} {told_gain(own['gain'])} points to {100 * own['accuracy']:.1f} %"
        for title, own in chosen["methods"].items()
        if title in titles
    ]
    return (
        f"\n- Beyond the paper, the router chosen on validation images ({chosen['features']}"
        f" {chosen['title']}), with the same networks: {'; '.join(gains)}."
    )


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


def method_grid(rows: Sequence[Row], cells: Cells) -> Grid:
    """Means over runs of every measure, and CHEEM's lead."""
    lines = []
    by_cell = measured_of(rows)
    for row in rows:
        measured = by_cell[row.cell]
        told = [row.title, ", ".join(str(seed) for seed in measured["seeds"])]
        for name, (_, text) in COLUMNS.items():
            value = measured[name]
            if value is None:
                told.append(NONE)
            elif name == "seconds":
                ends = (text(end(run[name] for run in row.runs)) for end in (min, max))
                told.append(" to ".join(dict.fromkeys(ends)))
            else:
                told.append(
                    text(value["mean"])
                    + ("" if value["std"] is None else f" ± {text(value['std'])}")
                )
        told.insert(4, _lead(row.cell, cells, headline(cells)))
        lines.append(tuple(told))
    columns = [title for title, _ in COLUMNS.values()]
    lead = f"{headline(cells).title} minus"
    return Grid("", ("method", "seeds", *columns[:2], lead, *columns[2:]), tuple(lines), 1)


def _lead(cell: Cell, cells: Cells, ours: Cell) -> str:
    if cell == ours or ours not in cells:
        return NONE
    value, interval, *_ = shown(_compared(cell, cells, ours))
    return value if interval == NONE else f"{value.removesuffix(' points')} ({interval})"


def _compared(cell: Cell, cells: Cells, ours: Cell, without: str = "") -> Verdict:
    """CHEEM minus another method; an upper bound is given the task ID, and then so is CHEEM."""
    is_given = cell.method in UPPER_BOUNDS
    return compared("", cells, ours, cell, above, given=(is_given, is_given), without=without)


def task_grid(rows: Sequence[Row]) -> str:
    """A row per method, a column per task and their mean."""
    first = rows[0].runs[0]
    names = names_of(first)
    tasks = first["tasks"]
    lines: list[tuple[str, ...]] = [
        ("*images, classes*", *(f"{t['num_train']:,}, {len(t['classes'])}" for t in tasks), "")
    ]
    for row in rows:
        key = "local_accuracy" if row.cell.method in UPPER_BOUNDS else "accuracy"
        values = 100 * np.array(
            [[run[key][-1][names_of(run).index(name)] for name in names] for run in row.runs]
        )
        values = np.column_stack([values, values.mean(axis=1)])
        lines.append((row.title, *(spread(column.tolist()) for column in values.T)))
    return Grid("", ("method", *names, "mean"), tuple(lines), 1).to_markdown()


def setting_parts(cells: Cells, chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was run with which settings, on what, and how to run it again."""
    runs = [run for found in cells.values() for run in found.values()]
    results, config = runs[0].run.results, runs[0].run.config
    return [
        f"Runs: {len(runs)}, from the weights {results['source']} (SHA-256"
        f" {config['weights_sha256'][:12]}…). Settings that decide how long a method learns, and of"
        " variants what differs; all are in each run's `config.json`. "
        + (CHOICE if chosen else ""),
        setting_grid(cells, chosen).to_markdown(),
        "All versions are in each run's `record.json`, with its command. Machines:",
        "\n".join(machines(runs)),
        (
            f"DATA and WEIGHTS are the images and the weights{CHOICE_FILE if chosen else ''}."
            f" {again_of(runs)}. Collect it into another folder; `experiments/reproduce.py`"
            " compares them."
        ),
        "```bash\n" + "\n".join(commands(cells, is_chosen=bool(chosen))) + "\n```",
    ]


def again_of(runs: Sequence[Collected]) -> str:
    """Whether a new run has the same numbers."""
    devices = [run.record.get("conditions", {}).get("device", {}) for run in runs]
    if all(device.get("platform", "cpu") == "cpu" for device in devices):
        return "With equal code, versions and machine a new run has the same numbers"
    return (
        "On an accelerator last bits may change from run to run without `--engine.deterministic`,"
        " and the search may then find other networks, so a new run is another sample"
    )


CHOICE = """*Tried*: accuracy in % on validation images, by `compare.py --choose`, the chosen value in bold."""  # noqa: E501
CHOICE_FILE = ", CHOSEN is `chosen.json` next to the runs"
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
    """Epochs, learning rates and batch size of every method, what sets its variants apart, and what
    was tried."""
    rows = []
    tried = dict[str, str]()
    for row in chosen:
        tried[row["title"]] = "; ".join(filter(None, (tried.get(row["title"]), _tried(row))))
    for cell, found in cells.items():
        run = next(iter(found.values()))
        usual = usual_of(cells, cell.method)
        config = settings_of(run)
        is_variant = usual not in (None, cell)
        if usual is None or not is_variant:
            told = [
                f"{name} {value}"
                for name, value in config.items()
                if name.split(".")[-1] in LENGTHS
            ]
        else:
            as_it_is = settings_of(next(iter(cells[usual].values())))
            told = [
                f"{name} {value}" for name, value in config.items() if as_it_is.get(name) != value
            ]
        told += (
            [] if cell.order == "default" else [f"the tasks in the order {' '.join(run.run.order)}"]
        )
        like = f"as {usual.title}, but for " if usual is not None and is_variant else ""
        rows.append(
            (cell.title, like + ", ".join(told), *([tried.pop(cell.title, NONE)] if chosen else []))
        )
    rows += [(title, "its run is not finished", told) for title, told in tried.items()]
    return Grid("", ("method", "settings", *(["tried"] if chosen else [])), tuple(rows), 3)


def _tried(row: Mapping[str, Any]) -> str:
    told = [
        (
            f"**{value}: {100 * reached:.1f}**"
            if value == row["chosen"]
            else f"{value}: {100 * reached:.1f}"
        )
        for value, reached in zip(row["values"], row["accuracies"], strict=True)
        if reached is not None
    ]
    return (
        f"{row['setting']} {', '.join(told)}{' (an end of the grid)' if row['at_the_end'] else ''}"
    )


def settings_of(run: Collected) -> dict[str, Any]:
    """A method's settings by dotted names."""
    return flatten_dict(run.run.config.get(run.run.results["method"], {}), sep=".")


def commit_of(run: Collected) -> str:
    """The commit of the code that a run was begun with."""
    return (run.record.get("conditions", {}).get("code", {}).get("commit") or "?")[:7]


def machines(runs: Sequence[Collected]) -> list[str]:
    """Processor, JAX and code of the runs, those that share all of it together."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        conditions = run.record.get("conditions", {})
        device = conditions.get("device", {})
        accelerator = (
            ""
            if device.get("platform", "cpu") == "cpu"
            else f", {device['count']} × {device['kind']}"
        )
        told = (
            f"{device.get('processor', 'unknown processor')}, threads:"
            f" {device.get('threads', '?')}{accelerator}; jax"
            f" {conditions.get('versions', {}).get('jax', '?')}; commit {commit_of(run)}"
        )
        if continued := run.record.get("continued"):
            told += f"; continued under other conditions ({'; '.join(continued)})"
        groups.setdefault(told, []).append(run.place)
    return [
        f"- {told}: {'all runs' if len(groups) == 1 else ', '.join(names)}."
        for told, names in groups.items()
    ]


SHARED = (
    "--stream",
    "--data-dir",
    "--tasks",
    "--base-data",
    "--backbone",
    "--weights",
    "--image-size",
    "--preset",
    "--router",
    "--router-weights",
)
"""Options of a recorded command that `compare.py` has as well."""


def commands(cells: Cells, *, is_chosen: bool) -> Iterator[str]:
    """Commands that make the runs of all methods, those of the same seeds together."""
    groups: dict[str, list[str]] = {}
    shared: dict[str, str] = {}
    for cell, found in cells.items():
        if is_compared(cells, cell):
            name = OF_THEIR_OWN.get(cell.variant, cell.method)
            groups.setdefault(",".join(map(str, found)), []).append(name)
            for run in found.values():
                shared = options(run.record["command"]) | shared
    told = " ".join(
        f"{name} {shared[name]}" for name in SHARED if shared.get(name, "None") != "None"
    )
    told += " --choose CHOSEN" if is_chosen else ""
    for seeds, methods in groups.items():
        names = ",".join(dict.fromkeys(methods))
        yield (
            f"python experiments/compare.py {told} \\\n    --methods {names} --seeds {seeds}"
            " --run-dir RUNS"
        )


def options(command: Sequence[str]) -> dict[str, str]:
    """Options of a recorded command, each with its values."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in command[1:]:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return {name: " ".join(values) for name, values in found.items()}


FOUND, GIVEN = "#1f77b4", "#c0792b"


def accuracy_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """A line per method: mean with its standard deviation, and a point per run, without and with
    the task ID given."""
    figure = Figure(figsize=(7.2, 1.5 + 0.42 * len(rows)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    lowest = [100.0]
    for place, runs in enumerate(rows.values()):
        for name, colour, shift in (
            ("average_accuracy", FOUND, -0.14),
            ("local_average_accuracy", GIVEN, 0.14),
        ):
            values = [100 * value for run in runs if (value := measure(run, name)) is not None]
            if (found := mean_std(values)) is None:
                continue
            lowest.append(min(values))
            axes.errorbar(
                found["mean"],
                place + shift,
                xerr=found["std"],
                fmt="D",
                color=colour,
                markersize=5,
                capsize=3,
                linewidth=1.5,
            )
            axes.plot(
                values, [place + shift] * len(values), "o", color=INK, markersize=2.5, zorder=3
            )
    titles = [title.replace("$", r"\$").replace(" (", "\n(") for title in rows]
    axes.set_yticks(range(len(rows)), titles, color=INK, fontsize=9)
    # from the ten below the lowest point on: points say where they are, no length has to begin at 0
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(10 * (min(lowest) // 10), 100))
    frame(axes, x="average accuracy after the last task, %", grid=True)
    handles = [
        Line2D(
            [], [], color=FOUND, marker="D", markersize=5, linestyle="none", label="task-agnostic"
        ),
        Line2D(
            [], [], color=GIVEN, marker="D", markersize=5, linestyle="none", label="task ID given"
        ),
        Line2D([], [], color=INK, marker="o", markersize=2.5, linestyle="none", label="one run"),
    ]
    legend_below(figure, handles)
    figure.suptitle("Mean over runs; bars: standard deviation over seeds", fontsize=10, color=FAINT)
    save(figure, file)
