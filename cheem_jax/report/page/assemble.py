"""The page from its parts: what each section says of a run, and the template that lays it out."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from cheem_jax import __version__
from cheem_jax.core.ops import COLOURS
from cheem_jax.report.finished import RunRecord
from cheem_jax.report.markdown import BASE_MEANS
from cheem_jax.report.page import charts
from cheem_jax.report.page.architecture import MEANING, Architectures, architectures
from cheem_jax.report.page.comparing import accuracy_against_flops, compare, comparison_table, name_in
from cheem_jax.report.page.examples import Album, Examples
from cheem_jax.report.page.headline import Tile, heading, tiles_of
from cheem_jax.report.page.loading import Loaded, Recorded, is_finished, record_of
from cheem_jax.report.page.search import search_chart
from cheem_jax.report.page.specs import Chart, EmptySection
from cheem_jax.report.table import TOLD, Grid, method_grid, task_grid
from cheem_jax.run.record import to_json

HERE = Path(__file__).parent
ROWS = 1000
"""Rows of a table."""
CORRUPTED = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError)
"""What numbers raise that are not as a run writes them."""


class Section(NamedTuple):
    """A part of a run's page: figures, a table, and what is missing and why."""

    key: str
    title: str
    lead: str
    charts: tuple[Chart, ...] = ()
    grid: Grid | None = None
    architectures: Architectures | None = None
    examples: Examples | None = None
    missing: str = ""


class View(NamedTuple):
    """A run as the template shows it."""

    key: str
    name: str
    title: str
    lead: str
    warnings: tuple[str, ...]
    tiles: tuple[Tile, ...]
    methods: Grid
    sections: tuple[Section, ...]
    setting: tuple[tuple[str, str], ...]
    config: str


class Page(NamedTuple):
    """HTML, and the runs that it only names, each with the reason."""

    text: str
    left_out: tuple[tuple[Path, str], ...]


def page(loaded: Loaded, *, images: bool) -> Page:
    """The whole page. Runs that cannot be drawn are named at its end; ValueError where none can be."""
    album = Album() if images else None
    views, drawn, left_out = [], [], list(loaded.left_out)
    for run in loaded.runs:
        try:
            views.append(view_of(run, f"run-{len(views) + 1}", album))
            drawn.append(run)
        except CORRUPTED as error:
            left_out.append((run.directory, f"corrupted ({error!r:.200})"))
    if not views:
        raise ValueError("; ".join(f"{directory}: {reason}" for directory, reason in left_out))
    names = Counter(view.name for view in views)
    views = [
        view._replace(name=f"{view.name} ({run.directory})") if names[view.name] > 1 else view
        for view, run in zip(views, drawn, strict=True)
    ]
    finished = [(run, view) for run, view in zip(drawn, views, strict=True) if is_finished(run)]
    comparison, links = None, {}
    if len(finished) > 1:
        runs = [run for run, _ in finished]
        compared = compare(runs)
        comparison = _section(
            "comparison", finished[0][1].title,
            f"{finished[0][1].lead} Means over seeds, ± standard deviation where there are several.",
            grid=lambda: comparison_table(compared), charts=lambda: (accuracy_against_flops(compared),),
        )  # fmt: skip
        links = {  # the first run of a method comes last and stays
            compared.titles[name_in(run, runs)]: view.key for run, view in reversed(finished)
        }
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = environment.get_template("template.html").render(
        views=views, left_out=left_out, title=views[0].title, version=__version__, colours=COLOURS, meaning=MEANING,
        comparison=comparison, num_compared=len(finished),
        css=Markup((HERE / "page.css").read_text()), js=Markup((HERE / "page.js").read_text()),
        plotly=Markup(get_plotlyjs()), text_of=text_of, most_rows=ROWS, links=links,
    )  # fmt: skip
    return Page(text.lstrip(), tuple(left_out))


def text_of(value: Any) -> Markup:
    """JSON that can stand in a script element: no character of it can end one."""
    text = json.dumps(to_json(value), separators=(",", ":"), allow_nan=False)
    return Markup(re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text))


def view_of(run: RunRecord, key: str, album: Album | None) -> View:
    """One run's part of the page; without an `album` no images are shown."""
    results, recorded = run.results, record_of(run)
    name, title, lead, warnings = heading(run)
    if recorded.trouble:
        warnings.append(f"What only the record contains is left out, because it cannot be read: {recorded.trouble}.")
    return View(
        key, name, title, lead, tuple(warnings), tiles_of(results), method_grid(results),
        tuple(_sections(run, recorded, album)), _setting(run, recorded),
        json.dumps(run.config, indent=1, ensure_ascii=False),
    )  # fmt: skip


def _sections(run: RunRecord, recorded: Recorded, album: Album | None) -> list[Section]:
    results, num = run.results, len(run.order)
    found = []
    if "pool" in results:
        found.append(_section("architectures", "Architectures", "The op at each block of each target network, and "
            "the task that its expert comes from.", architectures=lambda: architectures(results)))  # fmt: skip
        found.append(_section("pool", "How the pool grew", "Learning only adds experts: what an earlier task needs "
            "cannot change.", charts=lambda: charts.pool_growth(results)))  # fmt: skip
    found.append(_section("tasks", "Tasks", "", grid=lambda: task_grid(results)))
    found.append(_section("accuracy", "Accuracy after every task", "Rows are moments, columns are tasks.",
        charts=lambda: (charts.accuracy_matrix(results),)))  # fmt: skip
    if num > 1:
        found.append(_section("forgetting", "Forgetting", "What later tasks cost the earlier ones.",
            charts=lambda: (charts.forgetting(results),)))  # fmt: skip
        if results["method"] not in TOLD and results.get("routing"):
            found.append(_section("routing", "Routing", "The task ID inferred for each task's images.",
                charts=lambda: (charts.routing(results),)))  # fmt: skip
    if "similarity" in results:
        found.append(_section("similarity", "Similarity of tasks", "It decides how HEE samples from the supernet.",
            charts=lambda: (charts.similarity(results),)))  # fmt: skip
    if "search" in {phase for task in results["tasks"] for phase in task["seconds"]}:
        tolerance = run.config.get(results["method"], {}).get("search", {}).get("tolerance")
        found.append(_section("search", "The search", "Accuracy is weighed against compute.",
            charts=lambda: (search_chart(recorded, tolerance),)))  # fmt: skip
    found.append(_section("time", "Time", "Where the seconds went.", charts=lambda: (charts.time(results, recorded),)))
    if album is not None and not run.is_memory:  # which does not know where its images are
        found.append(_section("examples", "Right and wrong predictions", "Test images of each task.",
            examples=lambda: album.examples(run, recorded)))  # fmt: skip
    return found


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


def _setting(run: RunRecord, recorded: Recorded) -> tuple[tuple[str, str], ...]:
    results, conditions = run.results, recorded.begin.get("conditions") or {}
    keys = ("method", "backbone", "source", "router", "stream", "preset", "placement", "image_size", "seed")
    rows = [(key.replace("_", " "), str(results[key])) for key in keys if results.get(key) is not None]
    if (means := results.get("base_means")) is not None:
        rows.append(("base means", BASE_MEANS.get(means, str(means))))
    rows += [(key, str(value)) for key, value in results["engine"].items() if isinstance(value, str)]
    if peak := results.get("peak_memory_bytes"):
        rows.append(("peak memory", f"{peak / 1e9:.2f} GB"))
    code = conditions.get("code") or {}
    rows += [(f"cheem_jax {key}", str(value)) for key, value in code.items() if value]
    if versions := conditions.get("versions"):
        rows.append(("versions", ", ".join(f"{package} {version}" for package, version in versions.items())))
    if processor := (conditions.get("device") or {}).get("processor"):
        rows.append(("processor", str(processor)))
    rows.append(("fingerprint", ", ".join(results["fingerprint"])))
    if command := recorded.begin.get("command"):
        rows.append(("command", shlex.join(map(str, command))))
    rows.append(("directory", str(run.directory)))
    return tuple(rows)
