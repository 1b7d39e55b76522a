"""Assemble the HTML page from the headline and the sections of each run, using the template."""

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cheem_jax import __version__
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.paths import printable
from cheem_jax.core.settings import COLOURS
from cheem_jax.data.task import Split
from cheem_jax.report import memories, table
from cheem_jax.report.comparison import comparison_grid
from cheem_jax.report.finished import (
    LeftOut,
    Recorded,
    RunRecord,
    check_comparable,
    describe_variant,
    read,
    read_record,
)
from cheem_jax.report.memories import Evaluated
from cheem_jax.report.page import charts
from cheem_jax.report.page.charts import EmptySection
from cheem_jax.report.page.examples import examples
from cheem_jax.report.status import read_owner
from cheem_jax.report.table import METHODS, NONE, UPPER_BOUNDS, Grid, number, percent
from cheem_jax.run.differences import NAMED, find_differences, summary
from cheem_jax.run.directory import NAME, hold
from cheem_jax.run.record import to_json
from cheem_jax.run.results import Results

PAGE = "report.html"
HERE = Path(__file__).parent
ROWS, MOST_ARCHITECTURES = 1000, 400
"""Maximum number of table rows (ROWS), and maximum number of tasks whose architectures are shown
(MOST_ARCHITECTURES)."""
CORRUPTED = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError)
"""Errors that reading corrupted results can raise."""


class Architectures(NamedTuple):
    """The op at each block of each task. A row consists of a label, the cells, and the share of
    added parameters.

    A cell consists of an op kind, a text, and the pool index of its expert (None for Skip). For
    tooltips, `pool` contains the origin (-1: base, -2: forgotten) and the parent (-1: none) of each
    expert of each block.
    """

    rows: list[tuple[str, list[tuple[str, str, int | None]], str]]
    pool: list[list[tuple[int, int]]]
    caption: str


class Section(NamedTuple):
    """A section of a run's page."""

    key: str
    title: str
    lead: str
    parts: dict[str, Any]
    """Each part is a Chart, Grid, Architectures or Examples, keyed by the name of its macro in the
    template."""
    missing: str = ""
    """The reason why there are no parts."""


def write_page(
    folders: Sequence[Path], file: Path, *, images: bool = True
) -> tuple[list[RunRecord], LeftOut]:
    """Write the page of all runs in `folders` and their subfolders. Return the runs on the page,
    and the excluded folders with reasons.

    Raises ValueError if there is no run to display, or if the finished runs cannot be compared.

    Args:
        images: whether to display test images with predictions.
    """
    text, runs, left_out = page(folders, images=images)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)
    return runs, left_out


def refresh_page(directory: Path, tests: Mapping[str, Split] | None = None) -> None:
    """Write `report.html` of one run or memory into its directory. If that fails, print a note
    instead of raising an error, because the run itself is complete.

    `tests` contains the test images of each task, keyed by task name. If it is None, the data set
    is read again.
    """
    try:
        text, _, _ = page([directory], images=True, tests=tests, below=False)
        write_atomically(directory / PAGE, text)
    except (ValueError, OSError) as error:
        print(printable(f"note: {PAGE} is not written ({error})"), file=sys.stderr)


def refresh_memory_page(directory: Path) -> None:
    """Write `report.html` of a memory with `refresh_page`, unless another process works on the
    memory.

    Without the lock, a page with a task could replace the page of a process that has forgotten this
    task meanwhile.
    """
    with contextlib.suppress(ValueError, OSError):
        if (directory / NAME).exists():  # `hold` would create a removed folder again
            with hold(directory):
                refresh_page(directory)


def page(
    folders: Sequence[Path],
    *,
    images: bool,
    tests: Mapping[str, Split] | None = None,
    below: bool = True,
) -> tuple[str, list[RunRecord], LeftOut]:
    """Return the page of all runs in `folders` (with `below`, also in subfolders) as text, the runs
    on it, and the excluded folders with reasons."""
    runs, left_out = read(folders, others=True, below=below)
    _check_alike([run for run in runs if run.is_finished])
    views: dict[Path, dict[str, Any]] = {}
    for run in runs:
        try:
            views[run.directory] = _view(run, f"run-{len(views) + 1}", images, tests)
        except CORRUPTED as error:
            left_out.append((run.directory, f"corrupted ({error!r:.200})"))
    if not views:
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in left_out)
        raise ValueError(
            f"no run to display in {', '.join(map(str, folders))}"
            f"{f' ({reasons})' if reasons else ''}; give the directory of a run with an evaluated"
            " task (such as runs/demo after `cheem demo`), of a memory with a learned task, or a"
            " folder that contains runs"
        )
    displayed = [run for run in runs if run.directory in views]
    finished = [run for run in displayed if run.is_finished]
    first = next(iter(views.values()))
    comparison, links = None, {}
    if len(finished) > 1:
        finished.sort(
            key=lambda run: ([*METHODS].index(run.results["method"]), describe_variant(run))
        )
        methods = dict[str, list[Results]]()
        for run in finished:
            title = METHODS[run.results["method"]] + _suffix(run)
            methods.setdefault(title, []).append(run.results)
            links.setdefault(title, views[run.directory]["key"])  # link to the method's first run
        titles = {title: title for title in methods}
        comparison = _section(
            "comparison",
            first["title"],
            f"{first['lead']} Means over seeds, ± standard deviation if there is more than one.",
            grid_table=lambda: comparison_grid(methods, titles),
            chart=lambda: charts.accuracy_against_flops(methods, titles),
            curves=lambda: charts.accuracy_curves(methods),
        )
    from plotly.offline import get_plotlyjs  # a slow import that only the page needs

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("template.html").render(
        views=list(views.values()),
        left_out=left_out,
        title=first["title"],
        version=__version__,
        colours=COLOURS,
        meaning=table.MEANING,
        comparison=comparison,
        num_compared=len(finished),
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        js=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs()),
        to_script=to_script,
        most_rows=ROWS,
        links=links,
    )
    return text.lstrip(), displayed, left_out


def _check_alike(finished: Sequence[RunRecord]) -> None:
    """Raise ValueError if finished runs differ in stream, backbone or order of tasks, or if
    `check_comparable` raises ValueError."""

    def identity(run: RunRecord) -> dict[str, Any]:
        stream, backbone = run.place
        return {"stream": stream, "backbone": backbone, "order of tasks": run.order}

    for run in finished[1:]:
        if differing := find_differences(identity(finished[0]), identity(run)):
            raise ValueError(
                f"{finished[0].directory} and {run.directory} differ:"
                f" {summary(differing, 'values', NAMED)}; write a separate report for each"
            )
    check_comparable(finished)


def to_script(value: Any) -> Markup:
    """Format a value as JSON for a script element. The text contains no character that could end
    the element."""
    text = json.dumps(to_json(value), separators=(",", ":"), allow_nan=False)
    return Markup(re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text))


def _view(
    run: RunRecord, key: str, images: bool, tests: Mapping[str, Split] | None
) -> dict[str, Any]:
    """Return the values that the template needs for a run, keyed by their names in the template."""
    recorded = read_record(run)
    scores = memories.read_evaluated(run.directory, run.config)
    measured = {name: scores[name] for name in run.order if name in scores}
    name, title, lead, warnings = _heading(run)
    if recorded.trouble:
        warnings.append(
            f"The record cannot be read, so its contents are missing: {recorded.trouble}."
        )
    return {
        "key": key,
        "name": name,
        "title": title,
        "lead": lead,
        "warnings": warnings,
        "tiles": _tiles(run, measured),
        "methods": table.method_grid(run.results),
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
    # the location of a memory's images is not recorded
    has_examples = images and not run.is_memory
    sections: tuple[tuple[bool, str, str, str, str, Callable[[], Any]], ...] = (
        (
            bool(measured),
            "evaluated",
            "Measured by cheem evaluate",
            "Accuracy on the test images given to the command, with the tasks that the memory"
            " contains now.",
            "grid_table",
            lambda: _evaluated_grid(measured),
        ),
        (
            "pool" in results,
            "architectures",
            "Architectures",
            "The op at each block of each target network, and the task that added its expert.",
            "architectures",
            lambda: architectures(results),
        ),
        (
            "pool" in results,
            "pool",
            "How the pool grew",
            "Learning only adds experts; the experts of earlier tasks never change.",
            "chart",
            lambda: charts.pool_growth(results),
        ),
        (True, "tasks", "Tasks", "", "grid_table", lambda: table.task_grid(results)),
        (
            True,
            "accuracy",
            "Accuracy after every task",
            "Each row is measured after one more task; columns are tasks.",
            "chart",
            lambda: charts.accuracy_matrix(results),
        ),
        (
            num > 1,
            "curve",
            "Accuracy over all classes so far",
            "",
            "chart",
            lambda: charts.accuracy_curves(_curves(results)),
        ),
        (
            num > 1,
            "forgetting",
            "Forgetting",
            "Accuracy that earlier tasks lose as later ones are learned.",
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
            "open_set" in results,
            "open-set",
            "Unknown tasks",
            "How well the distance to the learned tasks separates images of later tasks.",
            "chart",
            lambda: charts.open_set(results),
        ),
        (
            "similarity" in results,
            "similarity",
            "Similarity of tasks",
            "The similarity determines which experts HEE prefers.",
            "chart",
            lambda: charts.similarity(results),
        ),
        (
            "search" in phases,
            "search",
            "The search",
            "The search trades accuracy against compute.",
            "chart",
            lambda: charts.search_chart(recorded, tolerance),
        ),
        (
            True,
            "time",
            "Time",
            "Seconds per phase of learning.",
            "chart",
            lambda: charts.time(results),
        ),
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


def _curves(results: Results) -> dict[str, list[Results]]:
    """Return the results of the run and of its references, keyed by the displayed name of the
    method. Each value is a list with one item."""
    references = results.get("references") or {}
    return {
        METHODS[run["method"]]: [run]
        for run in (
            results,
            *({**results, **run, "method": method} for method, run in references.items()),
        )
    }


def _section(key: str, title: str, lead: str, **make: Callable[[], Any]) -> Section:
    """Make a section from the functions that return its parts. If a function raises an error, the
    section displays the error."""
    try:
        return Section(key, title, lead, {name: function() for name, function in make.items()})
    except EmptySection as error:
        return Section(key, title, lead, {}, str(error))
    except CORRUPTED as error:
        return Section(
            key, title, lead, {}, f"Corrupted: a value of this section is invalid ({error!r:.200})."
        )


def architectures(results: Results) -> Architectures:
    """Return the ops of the base and of each task. Raises ValueError if the architecture of a task
    does not fit the pool."""
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
    caption = "Point at or tap a cell to see its expert's history and the tasks that share it."
    if len(tasks) > MOST_ARCHITECTURES:
        caption += f" The first {MOST_ARCHITECTURES} of {len(tasks):,} tasks are shown."
    if any(memories.MARK in text for _, cells, _ in rows for _, text, _ in cells):
        caption += f" {memories.MARK}: expert of a forgotten task that other tasks still need."

    def number(place: int | str | None) -> int:
        return place if isinstance(place, int) else -2 if place == memories.FORGOTTEN else -1

    histories = [
        [(number(expert["origin"]), number(expert["parent"])) for expert in block] for block in pool
    ]
    return Architectures(rows, histories, caption)


def _setting(run: RunRecord, recorded: Recorded) -> list[tuple[str, str]]:
    results = run.results
    conditions = recorded.begin.get("conditions") or {}
    versions = (conditions.get("versions") or {}).items()
    more = {
        **{key: value for key, value in results["engine"].items() if isinstance(value, str)},
        **{f"cheem_jax {key}": value for key, value in (conditions.get("code") or {}).items()},
        "versions": ", ".join(f"{package} {version}" for package, version in versions),
        "processor": (conditions.get("device") or {}).get("processor"),
        "fingerprint": ", ".join(results["fingerprint"]),
        "command": shlex.join(map(str, recorded.begin.get("command") or ())),
        "directory": run.directory,
    }
    return table.setting_rows(results) + [(key, str(value)) for key, value in more.items() if value]


def _heading(run: RunRecord) -> tuple[str, str, str, list[str]]:
    """Return the name, title, lead and warnings of a run's page."""
    results = run.results
    num = len(run.order)
    pixels = f"{results['image_size']} × {results['image_size']} pixels"
    tasks = f"{num:,} task{'s' if num > 1 else ''}"
    if run.is_memory:
        name = run.directory.resolve().name
        lead = (
            f"{tasks} so far, images of {pixels}, each task learned only from its own images;"
            f" preset {results['preset']}, seed {results['seed']}."
        )
        title = f"Memory {name} on {results['backbone']}"
        return f"memory {name}{_suffix(run)}, {tasks} so far", title, lead, _memory_warnings(run)
    name = f"{METHODS[results['method']]}{_suffix(run)}, seed {results['seed']}"
    warnings = []
    if not run.is_finished:
        learned = f"{num} of {len(run.config['tasks'])} tasks"
        name += f", unfinished: {learned}"
        warnings.append(f"Unfinished: {learned} so far; all numbers refer to these tasks.")
    if run.measured_on == "validation":
        warnings.append("Measured on validation images, to choose settings, not on test images.")
    lead = f"{tasks}, images of {pixels}, learned one after the other; preset {results['preset']}."
    return name, f"{results['stream']} on {results['backbone']}", lead, warnings


def _suffix(run: RunRecord) -> str:
    """Return the settings of a run that differ from its method's defaults, in parentheses. Callers
    append this text to the name of the method."""
    variant = describe_variant(run)
    return f" ({variant})" if variant else ""


def _memory_warnings(run: RunRecord) -> list[str]:
    """Return sentences about unmeasured, interrupted and forgotten tasks."""
    config = run.config
    warnings = []
    later = [name for name in config["tasks"] if name not in run.order]
    if (owner := read_owner(run.directory)) is not None and not owner.is_self:
        activity = owner.activity(config)
        warnings.append(
            f"{activity[0].upper()}{activity[1:]}; all numbers refer to the earlier tasks."
        )
    elif rest := memories.interrupted_work(config, run.directory):
        warnings.append(f"{rest[0].upper()}{rest[1:]}.")
    elif later:
        warnings.append(
            f"Learned but not measured yet: {', '.join(later)}; the next `cheem learn` measures it."
        )
    if missing := memories.unmeasured(run.results):
        names = ", ".join(f"T{index + 1} {run.order[index]}" for index in missing[:5])
        names += f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        warnings.append(
            f"Not measured after the last task, and displayed as {NONE}: {names};"
            f" {memories.UNAVAILABLE}."
        )
    if num := memories.num_forgotten(config):
        were, them = ("was", "it") if num == 1 else ("s were", "them")
        warnings.append(
            f"{num:,} task{' ' if num == 1 else ''}{were} forgotten: only the experts that other"
            " tasks need remain, and the remaining tasks are renumbered. Accuracies measured"
            f" before that are unchanged; they count images routed to {them} as wrong."
        )
    if config.get("keeps_base"):
        warnings.append(
            "Predictions can be pretraining classes; these accuracies were measured without them."
        )
    return warnings


def _evaluated_grid(measured: Mapping[str, Evaluated]) -> Grid:
    rows = tuple(
        (
            name,
            f"{one.num_images:,}",
            percent(one.accuracy),
            percent(one.accuracy_given),
            percent(one.task_accuracy),
            one.date,
        )
        for name, one in measured.items()
    )
    heads = ("task", "images", "accuracy %", "task ID given %", "task ID right %", "measured")
    return Grid("", heads, rows, 1)


def _tiles(run: RunRecord, measured: Mapping[str, Evaluated]) -> list[tuple[str, str, str, str]]:
    """Return the headline numbers, each with title, value, unit and note."""
    results = run.results
    is_bound = results["method"] in UPPER_BOUNDS
    num = len(results["tasks"])
    notes = "task-agnostic: task ID inferred per image", "class predicted among those of the task"
    if len(measured) == num:
        images = sum(score.num_images for score in measured.values())
        date = max(score.date for score in measured.values()).split()[0]
        on = f"cheem evaluate on {images:,} test images, {date}"
        notes = f"task-agnostic; {on}", f"{notes[1]}, same images"
    average = percent(results["average_accuracy"])
    tiles = [] if is_bound else [("Average accuracy", average, "%", notes[0])]
    if results["local_average_accuracy"] is not None:
        given = percent(results["local_average_accuracy"])
        tiles.append(("Task ID given", given, "%", notes[1]))
    else:
        command = f"`cheem evaluate {run.directory.resolve().name} DATA`"
        missing = (
            f"not measured: {command} fills this in, with test images of all {num:,} tasks"
            f" ({len(measured):,} measured so far)"
        )
        mean, count = memories.after_learning(results)
        tiles = [
            ("Average accuracy", NONE, "", missing),
            ("Right after learning", percent(mean), "%", f"mean over {count} of {num} tasks"),
        ]
    if not is_bound and results["average_forgetting"] is not None:
        drop = percent(results["average_forgetting"])
        note = "drop from the best earlier accuracy to the last one, mean over tasks"
        tiles.append(("Forgetting", drop, "points", note))
    flops, plain = results["flops"]["paper"], table.plain_flops(results)
    value, unit = table.format_flops(flops).split()
    times = f"{flops / plain:.2f} × the plain backbone" if plain else "by the paper's convention"
    tiles.append(("FLOPs per image", value, unit, times))
    added = number(results["params_added_percent"], 2)
    learned = f"{results['params_learned'] / 1e3:,.1f} k learned"
    tiles.append(("Parameters added", added, "%", f"per task, of the backbone; {learned}"))
    seconds = results["seconds_total"]
    compiling = 100 * results["compile"]["seconds"] / max(seconds, 1e-9)
    activity = "learning and measuring" if results["stream"] == "memory" else "the whole run"
    unit, length = next(
        (unit, length)
        for unit, length in (("h", 3600), ("min", 60), ("s", 1))
        if seconds >= 2 * length or length == 1
    )
    note = f"{activity}; {compiling:.0f} % compiling"
    return [*tiles, ("Time", number(seconds / length, 1), unit, note)]
