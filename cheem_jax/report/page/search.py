"""Every architecture that the search evaluated: FLOPs against its score, one chart per task."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cheem_jax.report.finished import Recorded
from cheem_jax.report.page.specs import Chart, EmptySection, Spec, Variant, axis, plot, rounded
from cheem_jax.report.table import spread

CHARTS = 60
"""Tasks with a chart."""
WHAT = {
    "shared_head": "accuracy on the validation images",
    "closed_form": "accuracy of a ridge head for it alone, on training images (leave-one-out) and validation images",
}
AXES = {"shared_head": "validation accuracy, %", "closed_form": "accuracy of a ridge head, %"}
"""By the score of the search."""


def search_chart(recorded: Recorded, tolerance: float | None) -> Chart:
    """A chart per task with a selector; EmptySection where the record has none. `tolerance` is tau of the search."""
    if recorded.trouble:
        raise EmptySection("Only the record contains it, which cannot be read.")
    reports = recorded.reports
    scored = [index for index, report in enumerate(reports) if set(report["search"]["correct"]) - {None}]
    if not scored:
        raise EmptySection("No architecture of the search has a score.")
    kept = [scored[place] for place in spread(len(scored), CHARTS)]
    variants = tuple(
        Variant(f"T{index} {reports[index]['name']}", _scatter(reports[index], tolerance)) for index in kept
    )
    caption = (
        "Every architecture that the search evaluated: FLOPs of the architecture against "
        f"{WHAT[score_of(reports[0])]}. The colour is the generation; the ring marks the target network"
    )
    if tolerance is not None:
        points = f"{100 * tolerance:g} points"
        caption += f": the cheapest of those whose accuracy is less than {points} below the best (the band)"
    caption += "."
    if len(scored) < len(reports):
        caption += f" Of {len(reports) - len(scored):,} tasks no architecture has a score."
    if len(kept) < len(scored):
        caption += f" Of {len(scored):,} tasks, {len(kept)} have a chart, evenly spread."
    return Chart(caption, variants, 420, choose="task")


def score_of(report: Mapping[str, Any]) -> str:
    """What the search of a learned task ranked by; records of the supernet's own head do not say it."""
    return report["search"].get("score", "shared_head")


def _scatter(report: Mapping[str, Any], tolerance: float | None) -> Spec:
    search = report["search"]
    accuracy = np.array([np.nan if value is None else value for value in search["correct"]], np.float64)
    accuracy *= 100 / search["num_images"]
    flops, chosen = np.asarray(search["flops"], np.float64) / 1e6, search["chosen"]
    generation = np.arange(len(accuracy)) // search["population"] + 1
    scored, best = np.isfinite(accuracy), float(np.nanmax(accuracy))
    # a few candidates far below the others would leave no room to see these
    lowest = min(float(np.nanquantile(accuracy, 0.1)), accuracy[chosen])
    dots = {
        "type": "scatter", "mode": "markers", "x": rounded(flops[scored], 5), "y": rounded(accuracy[scored]),
        "customdata": generation[scored].tolist(), "showlegend": False,
        "marker": {
            "size": 8, "color": generation[scored].tolist(), "colorscale": "@generations", "cmin": 1,
            "cmax": max(2, int(generation.max())), "showscale": bool(generation.max() > 1),
            "line": {"width": 0.5, "color": "@paper"}, "colorbar": {"title": {"text": "generation", "side": "right"}},
        },
        "hovertemplate": "generation %{customdata}<br>%{x:.4~g} MFLOPs<br><b>%{y:.1f} %</b><extra></extra>",
    }  # fmt: skip
    ring = {
        "type": "scatter", "mode": "markers", "x": rounded(flops[[chosen]], 5), "y": rounded(accuracy[[chosen]]),
        "marker": {"size": 17, "symbol": "circle-open", "color": "@winner", "line": {"width": 3}}, "showlegend": False,
        "hovertemplate": "chosen<br>%{x:.4~g} MFLOPs<br><b>%{y:.1f} %</b><extra></extra>",
    }  # fmt: skip
    band = {
        "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": best - 100 * (tolerance or 0), "y1": best,
        "fillcolor": "@band", "line": {"width": 0}, "layer": "below",
    }  # fmt: skip
    note = f"{len(accuracy):,} evaluated, {int((~scored).sum()):,} without a score, "
    note += f"{int((accuracy < lowest).sum()):,} below the axis"
    margin = 0.05 * (best - lowest) + 0.1
    return plot(
        [dots, ring], axis(f"MFLOPs of the architecture<br>{note}"),
        axis(AXES[score_of(report)], range=[lowest - margin, best + margin]), shapes=[band] if tolerance else [],
    )  # fmt: skip
