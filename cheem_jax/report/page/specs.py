"""Parts of plotly's JSON that all charts share. Colours are names such as `@ink`, which page.js takes from page.css."""

import html
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from cheem_jax.report.table import spread
from cheem_jax.run.record import to_json

Spec = dict[str, Any]
"""`data` and `layout` of plotly.js."""

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


def note_of_spread(num: int, limit: int, what: str = "tasks") -> str:
    """A sentence about what is left out, or nothing."""
    return "" if num <= limit else f" Of {num:,} {what}, {limit} are shown, evenly spread."


def shown(text: str, limit: int = 60) -> str:
    """Text as plotly shows it: it reads a little HTML, which a name must not be taken for."""
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return html.escape(text)


def labels_of(names: Sequence[str], indices: Sequence[int], limit: int = 60) -> list[str]:
    """`T3 food10`: unique, because tasks are numbered."""
    return [shown(f"T{index} {names[index]}", limit) for index in indices]


def rounded(values: Any, digits: int = 4) -> Any:
    """Nested lists with so many significant digits, to keep the page small; None for what is not finite."""
    if isinstance(values, list | tuple | np.ndarray):
        return [rounded(value, digits) for value in values]
    value = to_json(values)
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def category_axis(full: Sequence[str], short: Sequence[str]) -> Spec:
    """An axis over names: all in the hover text, of the ticks as many as there is room for."""
    ticks = spread(len(full), MANY if len(full) <= MANY else 12)
    return {
        "type": "category", "categoryorder": "array", "categoryarray": list(full), "tickmode": "array",
        "tickvals": [full[i] for i in ticks], "ticktext": [short[i] for i in ticks], "showgrid": False,
    }  # fmt: skip


def heatmap(
    values: np.ndarray | Sequence[Sequence[float | None]],
    rows: tuple[Spec, str],
    columns: tuple[Spec, str],
    *,
    scale: Literal["sequential", "diverging"],
    limits: tuple[float, float],
    hover: str,
    decimals: int | None,
) -> Spec:
    """A matrix as colours, the first row on top; `decimals` of the numbers in cells, None for none."""
    (y, y_title), (x, x_title) = rows, columns
    gap = 0 if max(len(values), len(x["categoryarray"])) > 2 * MANY else 1
    trace = {
        "type": "heatmap", "z": rounded(values), "x": x["categoryarray"], "y": y["categoryarray"],
        "zmin": limits[0], "zmax": limits[1], "colorscale": f"@{scale}",
        "xgap": gap, "ygap": gap, "showscale": decimals is None,
        "hovertemplate": f"{hover}<extra></extra>", "hoverongaps": False,
        "colorbar": {"thickness": 8, "outlinewidth": 0, "len": 0.9, "x": 1.01, "xpad": 4, "ticklen": 0},
    }  # fmt: skip
    if decimals is not None:
        trace |= {"texttemplate": f"%{{z:.{decimals}f}}", "textfont": {"size": 11}}
    layout = {
        "xaxis": {**x, "title": {"text": x_title}, "side": "bottom"},
        "yaxis": {**y, "title": {"text": y_title}, "autorange": "reversed"},
        "margin": {"t": 8, "b": 48, "l": 8, "r": 8},
    }
    return {"data": [trace], "layout": layout}
