"""Several runs on one page: the table of methods, and accuracy against FLOPs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cheem_jax.report.comparison import comparison, comparison_grid
from cheem_jax.report.finished import RunRecord, variant_of
from cheem_jax.report.page.specs import Chart, Spec, Variant, rounded, shown
from cheem_jax.report.table import METHODS, SHORT, TOLD, Grid


class Compared(NamedTuple):
    """Results by method, each variant as a method of its own, in the order of `METHODS`; and their names."""

    found: dict[str, list[Mapping[str, Any]]]
    titles: dict[str, str]
    short: dict[str, str]


def compare(runs: Sequence[RunRecord]) -> Compared:
    """The runs as comparisons take them, one result per seed."""
    order = [*METHODS]
    compared = Compared({}, {}, {})
    for run in sorted(runs, key=lambda run: (order.index(run.results["method"]), variant_of(run))):
        method, key = run.results["method"], name_in(run, runs)
        variant = key.removeprefix(method)
        compared.found.setdefault(key, []).append(run.results)
        compared.titles[key], compared.short[key] = METHODS[method] + variant, SHORT[method] + variant
    return compared


def name_in(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    """The method, with its variant where there are several of that method."""
    method, variant = run.results["method"], variant_of(run)
    is_only = len({variant_of(other) for other in runs if other.results["method"] == method}) == 1
    return method if is_only or not variant else f"{method} ({variant})"


def comparison_table(compared: Compared) -> Grid:
    """The methods with means and standard deviations over their seeds."""
    return comparison_grid(compared.found, compared.titles)


def accuracy_against_flops(compared: Compared) -> Chart:
    """A mark per method: mean accuracy over FLOPs by the paper's convention; bars are standard deviations."""
    rows = [row for row in comparison(compared.found) if row["flops_paper"] and row["flops_paper"]["mean"] > 0]
    names = {row["method"]: compared.found[row["method"]][0]["method"] for row in rows}
    bounds = [row for row in rows if names[row["method"]] in TOLD]
    own = [row for row in rows if names[row["method"]].startswith("cheem")]
    others = [row for row in rows if row not in bounds and row not in own]
    groups = (
        ("CHEEM", own, "average_accuracy", {"color": "@winner", "symbol": "circle", "size": 12}),
        ("others", others, "average_accuracy", {"color": "@accent", "symbol": "circle", "size": 10}),
        ("upper bounds, task ID given", bounds, "local_average_accuracy",
         {"color": "@faint", "symbol": "diamond-open", "size": 11, "line": {"width": 2}}),
    )  # fmt: skip
    flops = [row["flops_paper"]["mean"] for row in rows]
    unit, name = (1e9, "GFLOPs") if max(flops, default=0) >= 1e9 else (1e6, "MFLOPs")
    traces = [
        _marks(members, key, name=title, marker=marker, titles=compared.short, unit=unit, unit_name=name)
        for title, members, key, marker in groups
        if members
    ]
    is_wide = bool(flops) and max(flops) > 3 * min(flops)
    layout = {
        "xaxis": {
            "title": {"text": f"{name} per image, paper's convention"},
            **(_log_axis(min(flops) / unit, max(flops) / unit) if is_wide else {}),
        },
        "yaxis": {"title": {"text": "average accuracy, %"}},
        "legend": {"orientation": "h", "y": -0.2, "yanchor": "top"},
        "margin": {"t": 12, "b": 48, "l": 52, "r": 24}, "hovermode": "closest",
    }  # fmt: skip
    caption = "Up and to the left is better. Upper bounds are given the task ID."
    if without := [compared.titles[key] for key in compared.found if key not in names]:
        caption += f" Not shown, because the FLOPs are unknown: {', '.join(without)}."
    return Chart(caption, (Variant("", {"data": traces, "layout": layout}),), 480, 0, 1080)


def _marks(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    *,
    name: str,
    marker: Spec,
    titles: Mapping[str, str],
    unit: float,
    unit_name: str,
) -> Spec:
    rows = [row for row in rows if row[key]]
    spread = [100 * (row[key]["std"] or 0.0) for row in rows]
    return {
        "type": "scatter", "mode": "markers", "name": name, "marker": marker,
        "x": rounded([row["flops_paper"]["mean"] / unit for row in rows], 5),
        "y": rounded([100 * row[key]["mean"] for row in rows]),
        "text": [shown(titles[row["method"]]) for row in rows], "meta": {"labelled": True},
        "cliponaxis": False,
        "error_y": {"array": rounded(spread), "visible": any(spread), "thickness": 1, "width": 3},
        "hovertemplate": f"<b>%{{text}}</b><br>%{{y:.1f}} %<br>%{{x:.4~g}} {unit_name}<extra></extra>",
    }  # fmt: skip


def _log_axis(lowest: float, highest: float) -> Spec:
    """plotly's own ticks leave out the zeros."""
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 3, 5)]
    ticks = [tick for tick in ticks if 0.8 * lowest <= tick <= 1.25 * highest]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
