"""Several runs on one page: the table of methods, and accuracy against FLOPs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cheem_jax.report.comparison import comparison
from cheem_jax.report.finished import RunRecord, variant_of
from cheem_jax.report.page.specs import Chart, Spec, axis, plot, rounded, shown, single
from cheem_jax.report.table import METHODS, TOLD


class Compared(NamedTuple):
    """Results by method, each variant as a method of its own, in the order of `METHODS`; and the names of these."""

    found: dict[str, list[Mapping[str, Any]]]
    titles: dict[str, str]


def compare(runs: Sequence[RunRecord]) -> Compared:
    """The runs as comparisons take them, one result per seed."""
    order, compared = [*METHODS], Compared({}, {})
    for run in sorted(runs, key=lambda run: (order.index(run.results["method"]), variant_of(run))):
        method, key = run.results["method"], name_in(run, runs)
        compared.found.setdefault(key, []).append(run.results)
        compared.titles[key] = METHODS[method] + key.removeprefix(method)
    return compared


def name_in(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    """The method, with its variant where there are several of that method."""
    method, variant = run.results["method"], variant_of(run)
    is_only = len({variant_of(other) for other in runs if other.results["method"] == method}) == 1
    return method if is_only or not variant else f"{method} ({variant})"


def accuracy_against_flops(compared: Compared) -> Chart:
    """A mark per method: mean accuracy over FLOPs by the paper's convention; bars are standard deviations."""
    rows = [row for row in comparison(compared.found) if row["flops_paper"] and row["flops_paper"]["mean"] > 0]
    methods = {row["method"]: compared.found[row["method"]][0]["method"] for row in rows}
    bounds = [row for row in rows if methods[row["method"]] in TOLD]
    own = [row for row in rows if methods[row["method"]].startswith("cheem")]
    others = [row for row in rows if row not in bounds and row not in own]
    groups = (
        ("CHEEM", own, "average_accuracy", {"color": "@winner", "symbol": "circle", "size": 12}),
        ("others", others, "average_accuracy", {"color": "@accent", "symbol": "circle", "size": 10}),
        ("upper bounds, task ID given", bounds, "local_average_accuracy",
         {"color": "@faint", "symbol": "diamond-open", "size": 11, "line": {"width": 2}}),
    )  # fmt: skip
    flops = [row["flops_paper"]["mean"] for row in rows]
    unit, name = (1e9, "GFLOPs") if max(flops, default=0) >= 1e9 else (1e6, "MFLOPs")
    traces = []
    for title, members, key, marker in groups:
        marks = [row for row in members if row[key]]
        spread = [100 * (row[key]["std"] or 0.0) for row in marks]
        trace: Spec = {
            "type": "scatter", "mode": "markers", "name": title, "marker": marker, "cliponaxis": False,
            "x": rounded([row["flops_paper"]["mean"] / unit for row in marks], 5),
            "y": rounded([100 * row[key]["mean"] for row in marks]),
            "text": [shown(compared.titles[row["method"]]) for row in marks], "meta": {"labelled": True},
            "error_y": {"array": rounded(spread), "visible": any(spread), "thickness": 1, "width": 3},
            "hovertemplate": f"<b>%{{text}}</b><br>%{{y:.1f}} %<br>%{{x:.4~g}} {name}<extra></extra>",
        }  # fmt: skip
        traces += [trace] if members else []
    caption = "Up and to the left is better. Upper bounds are given the task ID."
    if without := [compared.titles[key] for key in compared.found if key not in methods]:
        caption += f" Not shown, because the FLOPs are unknown: {', '.join(without)}."
    is_wide = bool(flops) and max(flops) > 3 * min(flops)
    x = axis(f"{name} per image, paper's convention", type="log" if is_wide else "linear")
    return single(caption, plot(traces, x, axis("average accuracy, %")), 480, max_width=1080)
