"""The page from its parts: a run's headline and what each section says of it, and the template that
lays it out."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cheem_jax import __version__
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.settings import COLOURS
from cheem_jax.data.task import Split
from cheem_jax.report import memories, table
from cheem_jax.report.comparison import comparison_grid
from cheem_jax.report.finished import (
    LeftOut,
    Recorded,
    RunRecord,
    check_comparable,
    read,
    record_of,
    variant_of,
)
from cheem_jax.report.memories import Evaluated
from cheem_jax.report.page import charts
from cheem_jax.report.page.charts import Chart, EmptySection, Results
from cheem_jax.report.page.examples import Examples, examples
from cheem_jax.report.status import read_owner
from cheem_jax.report.table import METHODS, NONE, UPPER_BOUNDS, Grid, number, percent
from cheem_jax.run.differences import find_differences, summary
from cheem_jax.run.record import to_json

PAGE = "report.html"
HERE = Path(__file__).parent
ROWS, MOST_ARCHITECTURES = 1000, 400
"""Rows of a table, and tasks whose architectures are shown."""
CORRUPTED = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError)
"""What numbers raise that are not as a run writes them."""


class Architectures(NamedTuple):
    """The op at each block of each task as rows of a label, cells and the parameters added.

    A cell is a kind, a text, and the pool index of what runs there (None: skipped). For tooltips
    `pool` has per block and expert its origin (-1: base, -2: forgotten) and parent (-1: none).
    """

    rows: list[tuple[str, list[tuple[str, str, int | None]], str]]
    pool: list[list[tuple[int, int]]]
    caption: str


class Section(NamedTuple):
    """A part of a run's page: a figure, a table, and what is missing and why."""

    key: str
    title: str
    lead: str
    chart: Chart | None = None
    grid: Grid | None = None
    architectures: Architectures | None = None
    examples: Examples | None = None
    missing: str = ""


def write_page(
    folders: Sequence[Path],
    file: Path,
    *,
    images: bool = True,
    tests: Mapping[str, Split] | None = None,
) -> tuple[list[RunRecord], LeftOut]:
    """Write the page of all runs below the folders; returns the runs on it and the others.

    Raises ValueError if there is no run to show, or if finished ones cannot be compared.

    Args:
        images: show test images with predictions.
        tests: the test images of every task by its name; default: read from the data set again.
    """
    text, runs, left_out = page(folders, images=images, tests=tests)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)
    return runs, left_out


def page(
    folders: Sequence[Path], *, images: bool, tests: Mapping[str, Split] | None = None
) -> tuple[str, list[RunRecord], LeftOut]:
    """The page of all runs below the folders as text, the runs on it, and the others with the
    reason."""
    (runs, left_out), drawn, views = (
        read(folders, others=True),
        list[RunRecord](),
        list[dict[str, Any]](),
    )
    _check_alike([run for run in runs if run.is_finished])
    for run in runs:
        try:
            views.append(_view_of(run, f"run-{len(views) + 1}", images, tests))
            drawn.append(run)
        except CORRUPTED as error:
            left_out.append((run.directory, f"corrupted ({error!r:.200})"))
    if not views:
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no run to show in {', '.join(map(str, folders))}{f' ({reasons})' if reasons else ''};"
            " name a run directory with an evaluated task, such as runs/demo after `cheem demo`, a"
            " memory with a learned one, or a folder that contains some"
        )
    keys = {
        run.directory: view["key"]
        for run, view in zip(drawn, views, strict=True)
        if run.is_finished
    }
    comparison = None
    links = {}
    if len(keys) > 1:
        order = [*METHODS]
        found = dict[str, list[Results]]()
        titles = {}
        finished = [run for run in drawn if run.is_finished]
        for run in sorted(
            finished, key=lambda run: (order.index(run.results["method"]), variant_of(run))
        ):
            key, title = (
                name + _suffix(run)
                for name in (run.results["method"], METHODS[run.results["method"]])
            )
            found.setdefault(key, []).append(run.results)
            titles[key] = title
            links.setdefault(title, keys[run.directory])  # to the first run of a method
        comparison = _section(
            "comparison",
            views[0]["title"],
            f"{views[0]['lead']} Means over seeds, ± standard deviation where there are several.",
            grid=lambda: comparison_grid(found, titles),
            chart=lambda: charts.accuracy_against_flops(found, titles),
        )
    from plotly.offline import get_plotlyjs  # commands that draw no page do not wait for it

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("template.html").render(
        views=views,
        left_out=left_out,
        title=views[0]["title"],
        version=__version__,
        colours=COLOURS,
        meaning=table.MEANING,
        comparison=comparison,
        num_compared=len(keys),
        css=Markup((HERE / "page.css").read_text()),
        js=Markup((HERE / "page.js").read_text()),
        plotly=Markup(get_plotlyjs()),
        text_of=text_of,
        most_rows=ROWS,
        links=links,
    )
    return text.lstrip(), drawn, left_out


def _check_alike(finished: Sequence[RunRecord]) -> None:
    """Raises ValueError where runs differ in stream, order of tasks, data, weights or pixels."""
    for run in finished[1:]:
        one, other = (
            {
                "stream": r.results["stream"],
                "backbone": r.results["backbone"],
                "order of tasks": r.order,
            }
            for r in (finished[0], run)
        )
        if found := find_differences(one, other):
            raise ValueError(
                f"{finished[0].directory} and {run.directory} differ: {summary(found, 'values')};"
                " give each a separate report"
            )
    check_comparable(finished)


def text_of(value: Any) -> Markup:
    """JSON that can stand in a script element: no character of it can end one."""
    text = json.dumps(to_json(value), separators=(",", ":"), allow_nan=False)
    return Markup(re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text))


def _view_of(
    run: RunRecord, key: str, images: bool, tests: Mapping[str, Split] | None
) -> dict[str, Any]:
    """One run's part of the page, by the names in the template."""
    results = run.results
    recorded = record_of(run)
    found = memories.evaluated(run.directory, run.config)
    measured = {name: found[name] for name in run.order if name in found}
    name, title, lead, warnings = _heading(run)
    if recorded.trouble:
        warnings.append(
            "What only the record contains is left out, because it cannot be read:"
            f" {recorded.trouble}."
        )
    return {
        "key": key,
        "name": name,
        "title": title,
        "lead": lead,
        "warnings": warnings,
        "tiles": _tiles(run, measured),
        "methods": table.method_grid(results),
        "sections": _sections(run, recorded, measured, images, tests),
        "setting": _setting(run, recorded),
        "config": json.dumps(run.config, indent=1, ensure_ascii=False),
    }


def _sections(
    run: RunRecord,
    recorded: Recorded,
    measured: Mapping[str, Evaluated],
    images: bool,
    tests: Mapping[str, Split] | None,
) -> list[Section]:
    results = run.results
    method = run.results["method"]
    num = len(run.order)
    phases = {phase for task in results["tasks"] for phase in task["seconds"]}
    tolerance = run.config.get(method, {}).get("search", {}).get("tolerance")
    has_routing = num > 1 and method not in UPPER_BOUNDS and bool(results.get("routing"))
    # a memory does not know where its images are
    has_examples = images and not run.is_memory
    sections: tuple[tuple[bool, str, str, str, str, Callable[[], Any]], ...] = (
        (
            bool(measured),
            "evaluated",
            "Measured by cheem evaluate",
            "Test images that were given to the command, with the tasks that the memory has now.",
            "grid",
            lambda: _evaluated_grid(measured),
        ),
        (
            "pool" in results,
            "architectures",
            "Architectures",
            "The op at each block of each target network, and the task that its expert comes from.",
            "architectures",
            lambda: architectures(results),
        ),
        (
            "pool" in results,
            "pool",
            "How the pool grew",
            "Learning only adds experts: what an earlier task needs cannot change.",
            "chart",
            lambda: charts.pool_growth(results),
        ),
        (True, "tasks", "Tasks", "", "grid", lambda: table.task_grid(results)),
        (
            True,
            "accuracy",
            "Accuracy after every task",
            "Rows are moments, columns are tasks.",
            "chart",
            lambda: charts.accuracy_matrix(results),
        ),
        (
            num > 1,
            "forgetting",
            "Forgetting",
            "What later tasks cost the earlier ones.",
            "chart",
            lambda: charts.forgetting(results),
        ),
        (
            has_routing,
            "routing",
            "Routing",
            "The task ID inferred for each task's images.",
            "chart",
            lambda: charts.routing(results),
        ),
        (
            "similarity" in results,
            "similarity",
            "Similarity of tasks",
            "It decides how HEE samples from the supernet.",
            "chart",
            lambda: charts.similarity(results),
        ),
        (
            "search" in phases,
            "search",
            "The search",
            "Accuracy is weighed against compute.",
            "chart",
            lambda: charts.search_chart(recorded, tolerance),
        ),
        (True, "time", "Time", "Where the seconds went.", "chart", lambda: charts.time(results)),
        (
            has_examples,
            "examples",
            "Right and wrong predictions",
            "Test images of each task.",
            "examples",
            lambda: examples(run, recorded, tests),
        ),
    )
    return [
        _section(*words, **{kind: make}) for is_shown, *words, kind, make in sections if is_shown
    ]


def _section(key: str, title: str, lead: str, **parts: Callable[[], Any]) -> Section:
    """A section from the functions that make its parts; one that fails costs no other section."""
    try:
        return Section(key, title, lead, **{name: make() for name, make in parts.items()})
    except EmptySection as error:
        return Section(key, title, lead, missing=str(error))
    except CORRUPTED as error:
        return Section(
            key,
            title,
            lead,
            missing=f"Corrupted: what this needs is not as a run writes it ({error!r:.200}).",
        )


def architectures(results: Results) -> Architectures:
    """Tasks in rows under the base, blocks in columns. Raises ValueError where the results
    contradict themselves."""
    pool, tasks = results["pool"], results["tasks"]
    rows: list[tuple[str, list[tuple[str, str, int | None]], str]] = [
        ("base", [("base", "base", 0)] * len(pool), "")
    ]
    for index, task in enumerate(tasks[:MOST_ARCHITECTURES]):
        cells = []
        for block, choice, expert in zip(
            pool, from_strings(task["architecture"]), task["experts"], strict=True
        ):
            if expert is not None and not 0 <= expert < len(block):
                raise ValueError(
                    f"task {task['name']!r} uses expert {expert} of a block with {len(block)}"
                )
            cells.append((choice.kind, memories.cell_text(choice, block), expert))
        rows.append(
            (f"T{index + 1} {task['name']}", cells, f"{task['params_added_percent']:.1f} %")
        )
    caption = "Point at or tap a cell to see its expert's history and who shares it."
    if len(tasks) > MOST_ARCHITECTURES:
        caption += f" The first {MOST_ARCHITECTURES} of {len(tasks):,} tasks are shown."
    if any(memories.MARK in text for _, cells, _ in rows for _, text, _ in cells):
        caption += (
            f" {memories.MARK}: from a forgotten task, whose expert stays because it is needed."
        )

    def number(place: int | str | None) -> int:
        return place if isinstance(place, int) else -2 if place == memories.FORGOTTEN else -1

    histories = [
        [(number(expert["origin"]), number(expert["parent"])) for expert in block] for block in pool
    ]
    return Architectures(rows, histories, caption)


def _setting(run: RunRecord, recorded: Recorded) -> list[tuple[str, str]]:
    results = run.results
    conditions = recorded.begin.get("conditions") or {}
    rows = table.setting_rows(results)
    rows += [
        (key, str(value)) for key, value in results["engine"].items() if isinstance(value, str)
    ]
    rows += [
        (f"cheem_jax {key}", str(value))
        for key, value in (conditions.get("code") or {}).items()
        if value
    ]
    if versions := conditions.get("versions"):
        rows.append(
            ("versions", ", ".join(f"{package} {version}" for package, version in versions.items()))
        )
    if processor := (conditions.get("device") or {}).get("processor"):
        rows.append(("processor", str(processor)))
    rows.append(("fingerprint", ", ".join(results["fingerprint"])))
    if command := recorded.begin.get("command"):
        rows.append(("command", shlex.join(map(str, command))))
    return [*rows, ("directory", str(run.directory))]


def _heading(run: RunRecord) -> tuple[str, str, str, list[str]]:
    """A run's name among others, its title, a sentence, and what to know before reading a
    number."""
    results = run.results
    num = len(run.order)
    pixels, tasks = (
        f"{results['image_size']} × {results['image_size']} pixels",
        f"{num:,} task{'s' if num > 1 else ''}",
    )
    if run.is_memory:
        name = run.directory.resolve().name
        lead = f"{tasks} so far, of {pixels}, each learned from its own images alone; "
        lead += f"preset {results['preset']}, seed {results['seed']}."
        title = f"Memory {name} on {results['backbone']}"
        return f"memory {name}{_suffix(run)}, {tasks} so far", title, lead, _about_memory(run)
    name = f"{METHODS[results['method']]}{_suffix(run)}, seed {results['seed']}"
    warnings = []
    if not run.is_finished:
        of = f"{num} of {len(run.config['tasks'])} tasks"
        name += f", unfinished: {of}"
        warnings.append(f"Unfinished: {of} so far; every number is about these.")
    lead = f"{tasks} of {pixels}, learned one after the other; preset {results['preset']}."
    return name, f"{results['stream']} on {results['backbone']}", lead, warnings


def _suffix(run: RunRecord) -> str:
    """How the run differs from the usual one of its method, to be put behind the name of that."""
    variant = variant_of(run)
    return f" ({variant})" if variant else ""


def _about_memory(run: RunRecord) -> list[str]:
    """What it has not measured, not finished or forgotten."""
    results = run.results
    config = run.config
    warnings = []
    later = [name for name in config["tasks"] if name not in run.order]
    if (owner := read_owner(run.directory)) is not None:
        said = owner.at_work(config)
        warnings.append(f"{said[0].upper()}{said[1:]}; every number is about the tasks before.")
    elif undone := memories.left_undone(config, run.directory):
        warnings.append(f"{undone[0].upper()}{undone[1:]}.")
    elif later:
        warnings.append(
            f"Learned but not measured yet: {', '.join(later)}; the next `cheem learn` measures it."
        )
    if empty := memories.unmeasured(results):
        named = ", ".join(f"T{index + 1} {run.order[index]}" for index in empty[:5])
        named += f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        warnings.append(
            f"Not measured after the last task, and shown as {NONE}: {named};"
            f" {memories.UNAVAILABLE}."
        )
    if forgotten := memories.num_forgotten(config):
        warnings.append(
            f"{forgotten:,} task{' was' if forgotten == 1 else 's were'} forgotten here: only the"
            " experts that other tasks need remain, and the other tasks are renumbered. Accuracies"
            " measured before are unchanged, with images routed to"
            f" {'it' if forgotten == 1 else 'them'} counted as wrong."
        )
    if config.get("keeps_base"):
        warnings.append(
            "Predictions may include the pretraining classes; accuracies here were measured without"
            " them."
        )
    return warnings


def _evaluated_grid(measured: Mapping[str, Evaluated]) -> Grid:
    rows = tuple(
        (
            name,
            f"{one.num_images:,}",
            percent(one.accuracy),
            percent(one.accuracy_given),
            percent(one.found),
            one.date,
        )
        for name, one in measured.items()
    )
    heads = ("task", "images", "accuracy %", "task ID given %", "task ID right %", "measured")
    return Grid("", heads, rows, 1)


def _tiles(run: RunRecord, measured: Mapping[str, Evaluated]) -> list[tuple[str, str, str, str]]:
    """The headline numbers: each with its title, value, unit, and a note."""
    results = run.results
    is_bound = results["method"] in UPPER_BOUNDS
    flops = results["flops"]
    plain = table.plain_flops(results)
    tiles = []
    num = len(results["tasks"])
    if len(measured) == num:
        values = measured.values()
        images = sum(one.num_images for one in values)
        date = max(one.date for one in values).split()[0]
        mean, given = (
            sum(shares) / num for shares in zip(*(one[1:3] for one in values), strict=True)
        )
        tiles.append(
            (
                "Average accuracy",
                percent(mean),
                "%",
                f"task-agnostic; cheem evaluate on {images:,} test images, {date}",
            )
        )
        tiles.append(
            (
                "Task ID given",
                percent(given),
                "%",
                "class predicted within the given task, same images",
            )
        )
    elif results["local_average_accuracy"] is None:
        mean, count = memories.after_learning(results)
        missing = (
            f"not measured: `cheem evaluate {run.directory.resolve().name} DATA` fills this in,"
            " with test images "
        )
        missing += f"of all {num:,} tasks ({len(measured):,} measured so far)"
        tiles.append(("Average accuracy", NONE, "", missing))
        tiles.append(
            ("Right after learning", percent(mean), "%", f"mean over {count} of {num} tasks")
        )
    else:
        if not is_bound:
            tiles.append(
                (
                    "Average accuracy",
                    percent(results["average_accuracy"]),
                    "%",
                    "task-agnostic: task ID inferred per image",
                )
            )
        tiles.append(
            (
                "Task ID given",
                percent(results["local_average_accuracy"]),
                "%",
                "class predicted within the given task",
            )
        )
    if not is_bound and results["average_forgetting"] is not None:
        tiles.append(
            (
                "Forgetting",
                percent(results["average_forgetting"]),
                "points",
                "from the best so far to the end, mean over tasks",
            )
        )
    value, unit = table.format_flops(flops["paper"]).split()
    times = (
        f"{flops['paper'] / plain:.2f} × the plain backbone"
        if plain
        else "by the paper's convention"
    )
    tiles.append(("FLOPs per image", value, unit, times))
    learned = results.get("params_learned")
    tiles.append(
        (
            "Parameters added",
            number(results["params_added_percent"], 2),
            "%",
            "per task, of the backbone"
            + ("" if learned is None else f"; {learned / 1e3:,.1f} k learned"),
        )
    )
    compiling = 100 * results["compile"]["seconds"] / max(results["seconds_total"], 1e-9)
    seconds = results["seconds_total"]
    everything = "learning and measuring" if results["stream"] == "memory" else "the whole run"
    unit, length = next(
        (u, n) for u, n in (("h", 3600), ("min", 60), ("s", 1)) if seconds >= 2 * n or n == 1
    )
    tiles.append(
        ("Time", number(seconds / length, 1), unit, f"{everything}; {compiling:.0f} % compiling")
    )
    return tiles
