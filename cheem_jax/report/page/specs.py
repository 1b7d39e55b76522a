"""Parts of plotly's JSON that all charts share.

Colours are names such as `@ink`, which page.js takes from page.css; it also lays out margins, legends and colour bars.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.report.table import spread
from cheem_jax.run.record import to_json

Results = Mapping[str, Any]
Spec = dict[str, Any]
"""`data` and `layout` of plotly.js, or a part of them."""

MANY = 30
"""More tasks than these have no numbers in their cells."""
SHOWN = 120
"""Tasks that one chart shows at most."""


class EmptySection(ValueError):
    """Why a section is empty, as a sentence."""


class Variant(NamedTuple):
    """One of the charts that a figure can show."""

    name: str
    spec: Spec


class Chart(NamedTuple):
    """A figure: one chart, or several that share its place and a selector."""

    caption: str
    variants: tuple[Variant, ...]
    height: int
    min_width: int = 0
    max_width: int = 860
    """Pixels; a narrower page scrolls the figure inside its own box."""
    choose: str = ""
    """What the selector chooses."""
    start: int = 0
    """The variant that is shown first."""


def single(caption: str, spec: Spec, height: int, min_width: int = 0, max_width: int = 860) -> Chart:
    """A figure of one chart."""
    return Chart(caption, (Variant("", spec),), height, min_width, max_width)


def plot(data: list[Spec], x: Spec, y: Spec, **layout: Any) -> Spec:
    """Traces and their axes."""
    return {"data": data, "layout": {"xaxis": x, "yaxis": y, **layout}}


def axis(title: str, **settings: Any) -> Spec:
    """An axis over numbers."""
    return {"title": {"text": title}, **settings}


def category_axis(full: Sequence[str], short: Sequence[str], title: str = "") -> Spec:
    """An axis over names: all in the hover text, of the ticks as many as there is room for."""
    ticks = spread(len(full), MANY if len(full) <= MANY else 12)
    return axis(
        title, type="category", categoryorder="array", categoryarray=list(full), tickmode="array",
        tickvals=[full[i] for i in ticks], ticktext=[short[i] for i in ticks], showgrid=False,
    )  # fmt: skip


def task_axis(results: Results, tasks: Sequence[int], title: str = "", *, named: bool = False) -> Spec:
    """An axis over tasks, -1 being the base; ticks are `T3`, or `T3 food10` where they are `named`."""
    short = [label_of(results, task, 20) if named or task < 0 else f"T{task}" for task in tasks]
    return category_axis([label_of(results, task) for task in tasks], short, title)


def label_of(results: Results, task: int, limit: int = 60) -> str:
    """`T3 food10`: unique, because tasks are numbered; -1 is the base."""
    return "base" if task < 0 else shown(f"T{task} {results['tasks'][task]['name']}", limit)


def shown(text: str, limit: int = 60) -> str:
    """Text as plotly shows it: it reads a little HTML, which a name must not be taken for."""
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return html.escape(text)


def note_of_spread(num: int, limit: int) -> str:
    """A sentence about the tasks that are left out, or nothing."""
    return "" if num <= limit else f" Of {num:,} tasks, {limit} are shown, evenly spread."


def rounded(values: Any, digits: int = 4) -> Any:
    """Nested lists with so many significant digits, to keep the page small; None for what is not finite."""
    if isinstance(values, list | tuple | np.ndarray):
        return [rounded(value, digits) for value in values]
    value = to_json(values)
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def heatmap(
    values: np.ndarray,
    rows: Spec,
    columns: Spec,
    *,
    hover: str,
    limits: tuple[float, float] = (0, 100),
    decimals: int = 0,
    scale: str = "sequential",
) -> Spec:
    """A matrix as colours, the first row on top, with its numbers in the cells where there are few."""
    has_numbers = max(values.shape) <= MANY
    gap = 0 if max(values.shape) > 2 * MANY else 1
    trace = {
        "type": "heatmap", "z": rounded(values), "x": columns["categoryarray"], "y": rows["categoryarray"],
        "zmin": limits[0], "zmax": limits[1], "colorscale": f"@{scale}", "showscale": not has_numbers,
        "xgap": gap, "ygap": gap, "hovertemplate": f"{hover}<extra></extra>", "hoverongaps": False,
    }  # fmt: skip
    if has_numbers:
        trace |= {"texttemplate": f"%{{z:.{decimals}f}}", "textfont": {"size": 11}}
    return plot([trace], {**columns, "side": "bottom"}, {**rows, "autorange": "reversed"})
