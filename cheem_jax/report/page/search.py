"""Every architecture that the search evaluated: FLOPs against validation accuracy, one chart per task."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cheem_jax.report.page.loading import Recorded
from cheem_jax.report.page.specs import Chart, EmptySection, Spec, Variant, rounded
from cheem_jax.report.table import spread

CHARTS = 60
"""Tasks with a chart."""


def search_chart(recorded: Recorded, tolerance: float | None) -> Chart:
    """A chart per task with a selector; EmptySection where the record has none. `tolerance` is tau of the search."""
    if recorded.trouble:
        raise EmptySection("Only the record contains it, which cannot be read.")
    found = [entry["report"] for entry in recorded.learned]
    scored = [index for index, report in enumerate(found) if set(report["search"]["correct"]) - {None}]
    if not scored:
        raise EmptySection("No architecture of the search has a score.")
    kept = [scored[place] for place in spread(len(scored), CHARTS)]
    variants = tuple(
        Variant(f"T{index} {found[index]['name']}", _scatter(found[index]["search"], tolerance)) for index in kept
    )
    caption = (
        "Every architecture that the search evaluated: FLOPs of the architecture against accuracy on the validation "
        "images. "
    )
    searches = [found[index]["search"] for index in scored]
    is_in_one = all(len(search["correct"]) <= search["population"] for search in searches)
    caption += f"The {'' if is_in_one else 'colour: the generation; the '}ring marks the target network"
    if tolerance is not None:
        points = f"{100 * tolerance:g} points"
        caption += f": the cheapest of those whose accuracy is less than {points} below the best (the band)"
    caption += "."
    if len(scored) < len(found):
        caption += f" Of {len(found) - len(scored):,} tasks no architecture has a score."
    if len(kept) < len(scored):
        caption += f" Of {len(scored):,} tasks, {len(kept)} have a chart, evenly spread."
    return Chart(caption, variants, 420, 0, 860, "task")


def _scatter(search: Mapping[str, Any], tolerance: float | None) -> Spec:
    correct = np.array([np.nan if value is None else value for value in search["correct"]], np.float64)
    accuracy = 100 * correct / search["num_images"]
    flops = np.asarray(search["flops"], np.float64) / 1e6
    generation = np.arange(len(correct)) // search["population"] + 1
    scored, chosen = np.isfinite(accuracy), search["chosen"]
    best, lowest = float(np.nanmax(accuracy)), _lower_end(accuracy[scored], accuracy[chosen])
    is_below = accuracy[scored] < lowest
    dots = {
        "type": "scatter", "mode": "markers", "x": rounded(flops[scored], 5),
        "y": rounded(np.maximum(accuracy[scored], lowest)),
        "customdata": rounded(np.stack([generation[scored], accuracy[scored]], axis=1)), "showlegend": False,
        "cliponaxis": False,
        "marker": {
            "size": 8, "color": generation[scored].tolist(), "colorscale": "@generations",
            "cmin": int(generation.max() > 1), "cmax": max(2, int(generation.max())),
            "showscale": bool(generation.max() > 1), "line": {"width": 0.5, "color": "@paper"},
            "symbol": np.where(is_below, "triangle-down", "circle").tolist() if is_below.any() else "circle",
            "colorbar": {
                "title": {"text": "generation", "side": "right", "font": {"size": 12}}, "thickness": 8,
                "outlinewidth": 0, "x": 1.01, "ticklen": 0, "nticks": 6,
            },
        },
        "hovertemplate": "generation %{customdata[0]}<br>%{x:.4~g} MFLOPs<br><b>%{customdata[1]:.1f} %</b>"
        "<extra></extra>",
    }  # fmt: skip
    ring = {
        "type": "scatter", "mode": "markers", "x": rounded(flops[[chosen]], 5), "y": rounded(accuracy[[chosen]]),
        "marker": {"size": 17, "symbol": "circle-open", "color": "@winner", "line": {"width": 3}}, "showlegend": False,
        "hovertemplate": "chosen<br>%{x:.4~g} MFLOPs<br><b>%{y:.1f} %</b><extra></extra>",
    }  # fmt: skip
    shapes = []
    if tolerance:
        shapes.append({
            "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": best - 100 * tolerance, "y1": best,
            "fillcolor": "@band", "line": {"width": 0}, "layer": "below",
        })  # fmt: skip
    failed = int((~scored).sum())
    note = f"{len(correct):,} evaluated" + (f", {failed:,} of them without a score" if failed else "")
    if is_below.any():
        note += f", ▾ {int(is_below.sum()):,} below the axis"
    layout = {
        "xaxis": {"title": {"text": f"MFLOPs of the architecture<br>{note}"}},
        "yaxis": {
            "title": {"text": "validation accuracy, %"},
            "range": [lowest - 0.03 * (best - lowest) - 0.1, best + 0.06 * (best - lowest) + 0.1],
        },
        "shapes": shapes, "margin": {"t": 8, "b": 60, "l": 52, "r": 8}, "hovermode": "closest",
    }  # fmt: skip
    return {"data": [dots, ring], "layout": layout}


def _lower_end(accuracy: np.ndarray, chosen: float) -> float:
    """Where the axis begins: a few candidates far below the others would leave no room to see these."""
    lowest, best = float(accuracy.min()), float(accuracy.max())
    bulk = min(float(np.quantile(accuracy, 0.1)), chosen)
    end = bulk - 0.5 * (best - bulk)
    return end if lowest < end and best > bulk else lowest
