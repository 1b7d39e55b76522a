"""Several runs on one page: the table of methods, and accuracy against FLOPs."""

from collections.abc import Mapping, Sequence
from typing import Any

from cheem_jax.report.comparison import comparison
from cheem_jax.report.finished import RunRecord, variant_of
from cheem_jax.report.page.specs import Chart, Spec, axis, plot, rounded, shown, single
from cheem_jax.report.table import METHODS, TOLD


def key_of(run: RunRecord) -> str:
    """The method, with its variant where it is not the usual one."""
    method, variant = run.results["method"], variant_of(run)
    return f"{method} ({variant})" if variant else method


def title_of(run: RunRecord) -> str:
    """The same with the method's name."""
    method = run.results["method"]
    return METHODS[method] + key_of(run).removeprefix(method)


def compare(runs: Sequence[RunRecord]) -> dict[str, list[Mapping[str, Any]]]:
    """Results by key, one per seed, in the order of `METHODS`."""
    order, found = [*METHODS], dict[str, list[Mapping[str, Any]]]()
    for run in sorted(runs, key=lambda run: (order.index(run.results["method"]), key_of(run))):
        found.setdefault(key_of(run), []).append(run.results)
    return found


def accuracy_against_flops(found: Mapping[str, Sequence[Mapping[str, Any]]], titles: Mapping[str, str]) -> Chart:
    """A mark per method: mean accuracy over FLOPs by the paper's convention; bars are standard deviations."""
    rows = [row for row in comparison(found) if row["flops_paper"] and row["flops_paper"]["mean"] > 0]
    methods = {row["method"]: found[row["method"]][0]["method"] for row in rows}
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
            "text": [shown(titles[row["method"]]) for row in marks], "meta": {"labelled": True},
            "error_y": {"array": rounded(spread), "visible": any(spread), "thickness": 1, "width": 3},
            "hovertemplate": f"<b>%{{text}}</b><br>%{{y:.1f}} %<br>%{{x:.4~g}} {name}<extra></extra>",
        }  # fmt: skip
        traces += [trace] if members else []
    caption = "Up and to the left is better. Upper bounds are given the task ID."
    if without := [titles[key] for key in found if key not in methods]:
        caption += f" Not shown, because the FLOPs are unknown: {', '.join(without)}."
    is_wide = bool(flops) and max(flops) > 3 * min(flops)
    x = axis(f"{name} per image, paper's convention", type="log" if is_wide else "linear")
    return single(caption, plot(traces, x, axis("average accuracy, %")), 480, max_width=1080)
