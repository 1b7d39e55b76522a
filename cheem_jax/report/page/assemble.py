"""The page from its parts: what each section says of a run, and the template that lays it out."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from cheem_jax import __version__
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import COLOURS
from cheem_jax.report.comparison import comparison_grid
from cheem_jax.report.finished import LeftOut, Recorded, RunRecord, check_comparable, read, record_of
from cheem_jax.report.memories import FORGOTTEN, MARK, Evaluated, cell_text, evaluated
from cheem_jax.report.page import charts
from cheem_jax.report.page.examples import Examples, examples
from cheem_jax.report.page.headline import evaluated_grid, heading, suffix_of, tiles_of
from cheem_jax.report.page.specs import Chart, EmptySection, Results
from cheem_jax.report.table import MEANING, METHODS, UPPER_BOUNDS, Grid, method_grid, setting_rows, task_grid
from cheem_jax.run.differences import leaves, summary
from cheem_jax.run.record import to_json

HERE = Path(__file__).parent
ROWS, MOST_ARCHITECTURES = 1000, 400
"""Rows of a table, and tasks whose architectures are shown."""
CORRUPTED = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError)
"""What numbers raise that are not as a run writes them."""


class Architectures(NamedTuple):
    """The op at each block of each task as rows of a label, cells and the parameters added.

    A cell is a kind, a text, and the pool index of what runs there (None: skipped). For tooltips `pool` has per block
    and expert its origin (-1: base, -2: forgotten) and parent (-1: none).
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


def page(folders: Sequence[Path], *, images: bool) -> tuple[str, LeftOut]:
    """The page about all runs below the folders, and the runs that it only names, each with the reason.

    Raises ValueError where none can be drawn, or where finished ones cannot be compared.
    """
    (runs, left_out), drawn, views = read(folders, others=True), list[RunRecord](), list[dict[str, Any]]()
    _check_alike([run for run in runs if run.is_finished])
    for run in runs:
        try:
            views.append(_view_of(run, f"run-{len(views) + 1}", images=images))
            drawn.append(run)
        except CORRUPTED as error:
            left_out.append((run.directory, f"corrupted ({error!r:.200})"))
    if not views:
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no run to show in {', '.join(map(str, folders))}{f' ({reasons})' if reasons else ''}; name a run "
            "directory with an evaluated task, such as runs/demo after `cheem demo`, a memory with a learned one, or a "
            "folder that contains some"
        )
    keys = {run.directory: view["key"] for run, view in zip(drawn, views, strict=True) if run.is_finished}
    comparison, links = None, {}
    if len(keys) > 1:
        order, found, titles = [*METHODS], dict[str, list[Results]](), {}
        finished = [run for run in drawn if run.is_finished]
        for run in sorted(finished, key=lambda run: (order.index(run.results["method"]), suffix_of(run))):
            method, suffix = run.results["method"], suffix_of(run)
            found.setdefault(method + suffix, []).append(run.results)
            titles[method + suffix] = METHODS[method] + suffix
            links.setdefault(METHODS[method] + suffix, keys[run.directory])  # to the first run of a method
        comparison = _section(
            "comparison", views[0]["title"],
            f"{views[0]['lead']} Means over seeds, ± standard deviation where there are several.",
            grid=lambda: comparison_grid(found, titles),
            chart=lambda: charts.accuracy_against_flops(found, titles),
        )  # fmt: skip
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("template.html").render(
        views=views, left_out=left_out, title=views[0]["title"], version=__version__, colours=COLOURS,
        meaning=MEANING, comparison=comparison, num_compared=len(keys),
        css=Markup((HERE / "page.css").read_text()), js=Markup((HERE / "page.js").read_text()),
        plotly=Markup(get_plotlyjs()), text_of=text_of, most_rows=ROWS, links=links,
    )  # fmt: skip
    return text.lstrip(), left_out


def _check_alike(finished: Sequence[RunRecord]) -> None:
    """Raises ValueError where runs differ in stream, order of tasks, data, weights or pixels."""
    for run in finished[1:]:
        one, other = (
            {"stream": r.results["stream"], "backbone": r.results["backbone"], "order of tasks": r.order}
            for r in (finished[0], run)
        )
        if found := list(leaves(one, other)):
            raise ValueError(
                f"{finished[0].directory} and {run.directory} differ: {summary(found, 'values')}; give each a separate "
                "report"
            )
    check_comparable(finished)


def text_of(value: Any) -> Markup:
    """JSON that can stand in a script element: no character of it can end one."""
    text = json.dumps(to_json(value), separators=(",", ":"), allow_nan=False)
    return Markup(re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text))


def _view_of(run: RunRecord, key: str, *, images: bool) -> dict[str, Any]:
    """One run's part of the page, by the names in the template."""
    results, recorded, found = run.results, record_of(run), evaluated(run.directory, run.config)
    measured = {name: found[name] for name in run.order if name in found}
    name, title, lead, warnings = heading(run)
    if recorded.trouble:
        warnings.append(f"What only the record contains is left out, because it cannot be read: {recorded.trouble}.")
    return {
        "key": key, "name": name, "title": title, "lead": lead, "warnings": warnings, "tiles": tiles_of(run, measured),
        "methods": method_grid(results), "sections": _sections(run, recorded, measured, images=images),
        "setting": _setting(run, recorded), "config": json.dumps(run.config, indent=1, ensure_ascii=False),
    }  # fmt: skip


def _sections(run: RunRecord, recorded: Recorded, measured: Mapping[str, Evaluated], *, images: bool) -> list[Section]:
    results, method, num = run.results, run.results["method"], len(run.order)
    phases = {phase for task in results["tasks"] for phase in task["seconds"]}
    tolerance = run.config.get(method, {}).get("search", {}).get("tolerance")
    has_routing = num > 1 and method not in UPPER_BOUNDS and bool(results.get("routing"))
    # a memory does not know where its images are
    has_examples = images and not run.is_memory
    sections: tuple[tuple[bool, str, str, str, str, Callable[[], Any]], ...] = (
        (bool(measured), "evaluated", "Measured by cheem evaluate", "Test images that were given to the command, with "
         "the tasks that the memory has now.", "grid", lambda: evaluated_grid(measured)),
        ("pool" in results, "architectures", "Architectures", "The op at each block of each target network, and the "
         "task that its expert comes from.", "architectures", lambda: architectures(results)),
        ("pool" in results, "pool", "How the pool grew", "Learning only adds experts: what an earlier task needs "
         "cannot change.", "chart", lambda: charts.pool_growth(results)),
        (True, "tasks", "Tasks", "", "grid", lambda: task_grid(results)),
        (True, "accuracy", "Accuracy after every task", "Rows are moments, columns are tasks.",
         "chart", lambda: charts.accuracy_matrix(results)),
        (num > 1, "forgetting", "Forgetting", "What later tasks cost the earlier ones.",
         "chart", lambda: charts.forgetting(results)),
        (has_routing, "routing", "Routing", "The task ID inferred for each task's images.",
         "chart", lambda: charts.routing(results)),
        ("similarity" in results, "similarity", "Similarity of tasks", "It decides how HEE samples from the supernet.",
         "chart", lambda: charts.similarity(results)),
        ("search" in phases, "search", "The search", "Accuracy is weighed against compute.",
         "chart", lambda: charts.search_chart(recorded, tolerance)),
        (True, "time", "Time", "Where the seconds went.", "chart", lambda: charts.time(results)),
        (has_examples, "examples", "Right and wrong predictions", "Test images of each task.",
         "examples", lambda: examples(run, recorded)),
    )  # fmt: skip
    return [_section(*words, **{kind: make}) for is_shown, *words, kind, make in sections if is_shown]


def _section(key: str, title: str, lead: str, **parts: Callable[[], Any]) -> Section:
    """A section from the functions that make its parts; one that fails costs no other section."""
    try:
        return Section(key, title, lead, **{name: make() for name, make in parts.items()})
    except EmptySection as error:
        return Section(key, title, lead, missing=str(error))
    except CORRUPTED as error:
        return Section(
            key, title, lead, missing=f"Corrupted: what this needs is not as a run writes it ({error!r:.200})."
        )


def architectures(results: Results) -> Architectures:
    """Tasks in rows under the base, blocks in columns. Raises ValueError where the results contradict themselves."""
    pool, tasks = results["pool"], results["tasks"]
    rows: list[tuple[str, list[tuple[str, str, int | None]], str]] = [("base", [("base", "base", 0)] * len(pool), "")]
    for index, task in enumerate(tasks[:MOST_ARCHITECTURES]):
        cells = []
        for block, choice, expert in zip(pool, from_strings(task["architecture"]), task["experts"], strict=True):
            if expert is not None and not 0 <= expert < len(block):
                raise ValueError(f"task {task['name']!r} uses expert {expert} of a block with {len(block)}")
            cells.append((choice.kind, cell_text(choice, block), expert))
        rows.append((f"T{index} {task['name']}", cells, f"{task['params_added_percent']:.1f} %"))
    caption = "Point at or tap a cell to see its expert's history and who shares it."
    if len(tasks) > MOST_ARCHITECTURES:
        caption += f" The first {MOST_ARCHITECTURES} of {len(tasks):,} tasks are shown."
    if any(MARK in text for _, cells, _ in rows for _, text, _ in cells):
        caption += f" {MARK}: from a forgotten task, whose expert stays because it is needed."

    def number(place: int | str | None) -> int:
        return place if isinstance(place, int) else -2 if place == FORGOTTEN else -1

    histories = [[(number(expert["origin"]), number(expert["parent"])) for expert in block] for block in pool]
    return Architectures(rows, histories, caption)


def _setting(run: RunRecord, recorded: Recorded) -> list[tuple[str, str]]:
    results, conditions = run.results, recorded.begin.get("conditions") or {}
    rows = setting_rows(results)
    rows += [(key, str(value)) for key, value in results["engine"].items() if isinstance(value, str)]
    rows += [(f"cheem_jax {key}", str(value)) for key, value in (conditions.get("code") or {}).items() if value]
    if versions := conditions.get("versions"):
        rows.append(("versions", ", ".join(f"{package} {version}" for package, version in versions.items())))
    if processor := (conditions.get("device") or {}).get("processor"):
        rows.append(("processor", str(processor)))
    rows.append(("fingerprint", ", ".join(results["fingerprint"])))
    if command := recorded.begin.get("command"):
        rows.append(("command", shlex.join(map(str, command))))
    return [*rows, ("directory", str(run.directory))]
