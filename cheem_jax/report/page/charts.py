"""The charts of a run, from its results and its record."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cheem_jax.core.metrics import matrix_from_json
from cheem_jax.report.memories import (
    FORGOTTEN,
    ROUTED_TO_FORGOTTEN,
    UNAVAILABLE,
    arrivals,
    routed_to_forgotten,
    unmeasured,
)
from cheem_jax.report.page.loading import Recorded
from cheem_jax.report.page.specs import (
    MANY,
    SHOWN,
    Chart,
    EmptySection,
    Spec,
    Variant,
    category_axis,
    heatmap,
    labels_of,
    note_of_spread,
    rounded,
    shown,
)
from cheem_jax.report.table import TOLD, spread
from cheem_jax.run.progress import duration

Results = Mapping[str, Any]
CURVES = 40
"""Curves in one chart."""
PANELS = 60
"""Tasks with a similarity map of their own."""


def names_of(results: Results) -> list[str]:
    return [task["name"] for task in results["tasks"]]


def accuracy_matrix(results: Results) -> Chart:
    """Accuracy after learning each task (row) on each task (column), task-agnostic and with the task ID given."""
    panels = [("task ID given", "local_accuracy")]
    if results["method"] not in TOLD:
        panels.insert(0, ("task ID inferred", "accuracy"))
    variants = tuple(
        Variant(name, _task_by_task(
            results, 100 * matrix_from_json(results[key]), "after learning", "tested on",
            "after %{y}<br>tested on %{x}<br><b>%{z:.1f} %</b>",
        ))
        for name, key in panels
    )  # fmt: skip
    num = len(results["tasks"])
    caption = "Accuracy in %. Read a column downwards to follow one task."
    if any(None in row[: index + 1] for index, row in enumerate(results["local_accuracy"])):
        caption += " Empty on or below the diagonal: not measured, since its images were not available then."
    caption += note_of_spread(num, SHOWN)
    return _square(num, caption, variants, "accuracy with the")


def routing(results: Results) -> Chart:
    """The inferred task ID of each task's test images, after the last task."""
    values = 100 * matrix_from_json(results["routing"])
    empty = unmeasured(results)
    if len(empty) == len(values):
        raise EmptySection(f"Not measured: {UNAVAILABLE}.")
    hover = "of %{y}<br>routed to %{x}<br><b>%{z:.1f} %</b>"
    spec = _task_by_task(results, values, "true task", "inferred task", hover)
    right = np.diagonal(values)
    num = len(right)
    caption = f"Share of each task's test images in %. The task ID is right for {np.nanmean(right):.1f} % on average."
    if empty:
        caption += f" Of {len(empty):,} of the {num:,} tasks that is not known: {UNAVAILABLE}."
    if routed_to_forgotten(results):
        caption += f" It was measured before a task was forgotten: {ROUTED_TO_FORGOTTEN}."
    return _square(num, caption + note_of_spread(num, SHOWN), (Variant("", spec),))


def _task_by_task(results: Results, values: np.ndarray, rows: str, columns: str, hover: str) -> Spec:
    kept = spread(len(values), SHOWN)
    names = names_of(results)
    full, short = labels_of(names, kept), labels_of(names, kept, 20)
    y = category_axis(full, short)
    x = category_axis(full, [f"T{index}" for index in kept])
    decimals = 0 if len(kept) <= MANY else None
    return heatmap(
        values[np.ix_(kept, kept)], (y, rows), (x, columns), scale="sequential", limits=(0, 100), hover=hover,
        decimals=decimals,
    )  # fmt: skip


def _square(num: int, caption: str, variants: tuple[Variant, ...], choose: str = "") -> Chart:
    drawn = min(num, SHOWN)
    height = int(np.clip(34 * drawn + 70, 170, 640))
    return Chart(caption, variants, height, min(150 + 26 * drawn, 700), min(300 + 70 * drawn, 860), choose)


def forgetting(results: Results) -> Chart:
    """Accuracy of each task over the tasks learned after it."""
    names, num = names_of(results), len(results["tasks"])
    curves, steps = spread(num, CURVES), spread(num, SHOWN)
    key = "local_accuracy" if results["method"] in TOLD else "accuracy"
    matrix = 100 * matrix_from_json(results[key])
    measured = (~np.isnan(matrix)).sum(axis=0)
    if num > 1 and measured.max() < 2:
        raise EmptySection("Not measured: no task's images were available when a later task was learned.")
    full = labels_of(names, steps)
    traces = []
    for place, (task, label) in enumerate(zip(curves, labels_of(names, curves), strict=True)):
        later = [(step, text) for step, text in zip(steps, full, strict=True) if step >= task]
        colour = f"@c{place}" if len(curves) <= 8 else f"@ramp:{place / (len(curves) - 1):.3f}"
        traces.append({
            "type": "scatter", "mode": "lines+markers" if len(steps) <= MANY else "lines", "name": label,
            "x": [text for _, text in later],
            "y": rounded(matrix[[step for step, _ in later], task]), "line": {"color": colour, "width": 2},
            "marker": {"color": colour, "size": 6}, "showlegend": len(curves) <= 14,
            "hovertemplate": "%{fullData.name}<br>after %{x}<br><b>%{y:.1f} %</b><extra></extra>",
        })  # fmt: skip
    layout = {
        "xaxis": {**category_axis(full, [f"T{step}" for step in steps]), "title": {"text": "after learning"}},
        "yaxis": {"title": {"text": "accuracy, %"}, "rangemode": "normal"},
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top"},
        "margin": {"t": 8, "b": 48, "l": 48, "r": 12}, "hovermode": "closest",
    }  # fmt: skip
    return Chart(
        "Each curve is one task's accuracy, from right after learning."
        + (" Gaps were not measured." if (np.isnan(matrix) & np.tri(num, dtype=bool)).any() else "")
        + note_of_spread(num, CURVES),
        (Variant("", {"data": traces, "layout": layout}),), 400,
    )  # fmt: skip


def pool_growth(results: Results) -> tuple[Chart, ...]:
    """Experts per block after each task, and the parameters that were stored."""
    tasks, pool, names = results["tasks"], results["pool"], names_of(results)
    num = len(tasks)
    kept = spread(num, SHOWN)
    full, short = ["base", *labels_of(names, kept)], ["base", *(f"T{index}" for index in kept)]
    blocks = [f"block {block + 1}" for block in range(len(pool))]
    arrived = arrivals(results)
    counts = np.array([_sizes(block, num)[[0, *(index + 1 for index in kept)]] for block in arrived])
    spec = heatmap(
        counts, (category_axis(blocks, blocks), ""), (category_axis(full, short), "after learning"),
        scale="sequential", limits=(0, max(2, float(counts.max()))), hover="%{y} after %{x}<br><b>%{z} experts</b>",
        decimals=0 if len(kept) <= MANY else None,
    )  # fmt: skip
    caption = (
        f"Experts per block, the backbone's own included: {int(counts[:, -1].sum()):,} in all after the last task."
        + note_of_spread(num, SHOWN)
    )
    stayed = sum(
        expert["origin"] == FORGOTTEN and there is not None
        for block, places in zip(pool, arrived, strict=True)
        for expert, there in zip(block, places, strict=True)
    )
    if stayed:
        caption += f" {stayed:,} of them remain from forgotten tasks, and count from the first task that uses them."
    min_width = min(140 + 26 * len(full), 700)
    charts = [Chart(caption, (Variant("", spec),), max(190, 26 * len(blocks) + 70), min_width)]
    if all("params_stored" in task for task in tasks):
        charts.append(_parameters(results, kept, stayed > 0))
    return tuple(charts)


def _sizes(arrived: Sequence[int | None], num_tasks: int) -> np.ndarray:
    """Experts of one block at the start and after each task."""
    return np.searchsorted(sorted(place for place in arrived if place is not None), range(-1, num_tasks), side="right")


PARAMETERS = (("experts", "params_added", "@new"), ("heads", "head_params", "@adapt"), ("centroids", "centroid_params",
    "@reuse"))  # fmt: skip


def _parameters(results: Results, kept: Sequence[int], has_left: bool) -> Chart:
    """Stored parameters, summed over the tasks so far."""
    tasks = results["tasks"]
    full = labels_of(names_of(results), kept)
    total = np.cumsum([task["params_stored"] for task in tasks])
    rest, traces = total.copy(), []
    for name, key, colour in PARAMETERS:
        stored = np.cumsum([task.get(key, 0) for task in tasks])
        rest -= stored
        traces.append(_bar(name, full, stored[list(kept)], colour, "<b>%{y:,}</b> parameters"))
    if rest[-1] > 0:
        traces.append(_bar("rest", full, rest[list(kept)], "@bar0", "<b>%{y:,}</b> parameters"))
    layout = _bars_layout(full, kept, "parameters stored")
    caption = f"Parameters stored besides the backbone, summed over the tasks so far: {int(total[-1]):,} in all."
    if has_left:
        caption += " What remains from forgotten tasks is not counted."
    return Chart(caption, (Variant("", {"data": traces, "layout": layout}),), 320)


def _bar(name: str, x: Sequence[str], y: Any, colour: str, hover: str) -> Spec:
    return {
        "type": "bar", "name": name, "x": list(x), "y": rounded(y), "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": f"%{{x}}<br>{name}: {hover}<extra></extra>",
    }  # fmt: skip


def _bars_layout(full: Sequence[str], kept: Sequence[int], y_title: str) -> Spec:
    return {
        "barmode": "stack", "bargap": 0.35, "xaxis": category_axis(full, [f"T{index}" for index in kept]),
        "yaxis": {"title": {"text": y_title}, "rangemode": "tozero"}, "margin": {"t": 8, "b": 40, "l": 60, "r": 12},
        "legend": {"orientation": "h", "y": -0.16, "yanchor": "top", "traceorder": "normal"},
    }  # fmt: skip


def similarity(results: Results) -> Chart:
    """Per task S of every earlier network at every block, in [-1, 1]."""
    names, num_blocks = names_of(results), len(results["similarity"][0][0])
    blocks = [f"B{block + 1}" for block in range(num_blocks)]
    columns = (category_axis(blocks, blocks), "block")
    variants = []
    tasks = spread(len(names), PANELS)
    for task in tasks:
        values = results["similarity"][task]
        kept = spread(len(values), PANELS)
        full = ["base" if row == 0 else shown(f"T{row - 1} {names[row - 1]}") for row in kept]
        short = [text if len(text) <= 20 else shown(f"T{row - 1} {names[row - 1]}", 20)
                 for text, row in zip(full, kept, strict=True)]  # fmt: skip
        rows = (category_axis(full, short), "")
        decimals = 2 if len(values) * num_blocks <= 200 else None
        hover = "%{y}<br>at %{x}<br><b>S = %{z:.2f}</b>"
        spec = heatmap(
            [values[row] for row in kept], rows, columns, scale="diverging", limits=(-1, 1), hover=hover,
            decimals=decimals,
        )  # fmt: skip
        spec["layout"]["height"] = int(np.clip(30 * len(kept) + 75, 130, 760))
        variants.append(Variant(f"T{task} {names[task]}", spec))
    height = max(variant.spec["layout"]["height"] for variant in variants)
    caption = (
        "Similarity S of a new task to every earlier network, block by block: 1 is alike, –1 unlike; empty where that "
        "network skips the block." + note_of_spread(len(names), PANELS)
    )
    return Chart(caption, tuple(variants), height, min(160 + 34 * num_blocks, 700), 860, "task", len(variants) - 1)


def time(results: Results, recorded: Recorded) -> Chart:
    """Seconds by phase and task, and how many of them went into compiling."""
    tasks, names = results["tasks"], names_of(results)
    kept = spread(len(tasks), SHOWN)
    full = labels_of(names, kept)
    phases = list(dict.fromkeys(phase for task in tasks for phase in task["seconds"]))
    traces = [
        _bar(shown(phase), full, [tasks[index]["seconds"].get(phase, 0.0) for index in kept], f"@bar{place % 9}",
             "<b>%{y:.3~s} s</b>")
        for place, phase in enumerate(phases)
    ]  # fmt: skip
    compiled = [entry.get("compile", {}).get("seconds") for entry in recorded.learned]
    if compiled and None not in compiled:
        traces.append({
            "type": "scatter", "mode": "markers", "name": "of which compiling", "x": full,
            "y": rounded([compiled[index] for index in kept]), "hovertemplate": "%{x}<br>compiling: <b>%{y:.3~s} s</b>"
            "<extra></extra>",
            "marker": {"symbol": "line-ew", "size": 26, "color": "@ink", "line": {"width": 2.5, "color": "@ink"}},
        })  # fmt: skip
    whole, compiling = results["seconds_total"], results["compile"]["seconds"]
    everything = "Learning and measuring" if results["stream"] == "memory" else "The whole run"
    caption = (
        f"{everything} took {duration(whole)}. Compiling took {compiling:,.1f} s of it "
        f"({100 * compiling / max(whole, 1e-9):.0f} %): {results['compile']['programs']} functions compiled, "
        f"{results['compile'].get('cached', 0)} read from the cache." + note_of_spread(len(tasks), SHOWN)
    )
    layout = _bars_layout(full, kept, "seconds")
    return Chart(caption, (Variant("", {"data": traces, "layout": layout}),), 400)
