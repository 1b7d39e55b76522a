"""The charts of a run, and that of several, from their results, as plotly's JSON.

Colours are names such as `@ink`, which page.js takes from page.css; it also lays out margins,
legends and colour bars.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.core.metrics import matrix_from_json
from cheem_jax.report.comparison import comparison
from cheem_jax.report.finished import Recorded
from cheem_jax.report.memories import (
    FORGOTTEN,
    ROUTED_TO_FORGOTTEN,
    UNAVAILABLE,
    routed_to_forgotten,
    unmeasured,
)
from cheem_jax.report.table import UPPER_BOUNDS, accuracy_key, spread
from cheem_jax.run.progress import duration
from cheem_jax.run.record import to_json

Results = Mapping[str, Any]
Spec = dict[str, Any]
"""`data` and `layout` of plotly.js, or a part of them."""

MANY = 30
"""More tasks than these have no numbers in their cells."""
SHOWN = 120
"""Tasks that one chart shows at most."""
CURVES = 40
"""Curves in one chart."""
PANELS = 60
"""Tasks with a similarity map or a chart of their search."""
SCORES = {
    "shared_head": ("validation accuracy, %", "accuracy on the validation images"),
    "closed_form": (
        "accuracy of a ridge head, %",
        (
            "accuracy of a ridge head for it alone, on training images (leave-one-out) and"
            " validation images"
        ),
    ),
}
"""The axis and the caption by the score of the search."""


PHASES = {
    "keep": "images through unchanged blocks",
    "prepare": "compiling the supernet",
    "supernet": "supernet training",
    "finetune": "fine-tuning",
    "means": "means of features",
    "train": "training",
    "head": "fitting the head",
    "router": "fitting the router",
    "features": "computing features",
}
"""What a phase is to a reader; others have their own names."""


class EmptySection(ValueError):
    """Why a section is empty, as a sentence."""


class Chart(NamedTuple):
    """A figure: one chart, or several by name that share its place and a selector."""

    caption: str
    variants: Mapping[str, Spec]
    height: int
    min_width: int = 0
    max_width: int = 860
    """Pixels; a narrower page scrolls the figure inside its own box."""
    choose: str = ""
    """What the selector chooses."""
    start: int = 0
    """The variant that is shown first."""


def accuracy_matrix(results: Results) -> Chart:
    """Accuracy after learning each task (row) on each task (column), task-agnostic and with the
    task ID given."""
    panels = {"task ID inferred": "accuracy", "task ID given": "local_accuracy"}
    if results["method"] in UPPER_BOUNDS:
        del panels["task ID inferred"]
    hover = "after %{y}<br>tested on %{x}<br><b>%{z:.1f} %</b>"
    variants = {
        name: _task_by_task(results, results[key], "after learning", "tested on", hover)
        for name, key in panels.items()
    }
    caption = "Accuracy in %. Read a column downwards to follow one task."
    if any(None in row[: index + 1] for index, row in enumerate(results["local_accuracy"])):
        caption += (
            " Empty on or below the diagonal: not measured, since its images were not available"
            " then."
        )
    return _square(results, caption, variants, "accuracy with the")


def routing(results: Results) -> Chart:
    """The inferred task ID of each task's test images, after the last task."""
    right = 100 * np.diagonal(matrix_from_json(results["routing"]))
    empty = unmeasured(results)
    if len(empty) == len(right):
        raise EmptySection(f"Not measured: {UNAVAILABLE}.")
    hover = "of %{y}<br>routed to %{x}<br><b>%{z:.1f} %</b>"
    spec = _task_by_task(results, results["routing"], "true task", "inferred task", hover)
    caption = (
        f"Share of each task's test images in %. The task ID is right for {np.nanmean(right):.1f} %"
        " on average."
    )
    if empty:
        caption += (
            f" Of {len(empty):,} of the {len(right):,} tasks that is not known: {UNAVAILABLE}."
        )
    if any(None in row and set(row) != {None} for row in results["routing"]):
        caption += (
            " Where only the diagonal is filled, cheem evaluate measured it, which does not tell"
            " where the rest went."
        )
    if routed_to_forgotten(results):
        caption += f" It was measured before a task was forgotten: {ROUTED_TO_FORGOTTEN}."
    return _square(results, caption, {"": spec})


def _task_by_task(
    results: Results, rows: list[list[float | None]], first: str, second: str, hover: str
) -> Spec:
    kept = spread(len(rows), SHOWN)
    values = 100 * matrix_from_json(rows)[np.ix_(kept, kept)]
    return heatmap(
        values,
        task_axis(results, kept, first, named=True),
        task_axis(results, kept, second),
        hover=hover,
    )


def _square(
    results: Results, caption: str, variants: Mapping[str, Spec], choose: str = ""
) -> Chart:
    num = len(results["tasks"])
    drawn = min(num, SHOWN)
    caption += note_of_spread(num, SHOWN)
    height = int(np.clip(34 * drawn + 70, 170, 640))
    return Chart(
        caption, variants, height, min(150 + 26 * drawn, 700), min(300 + 70 * drawn, 860), choose
    )


def forgetting(results: Results) -> Chart:
    """Accuracy of each task over the tasks learned after it."""
    num = len(results["tasks"])
    curves, steps = spread(num, CURVES), spread(num, SHOWN)
    matrix = 100 * matrix_from_json(results[accuracy_key(results["method"])])
    if num > 1 and (~np.isnan(matrix)).sum(axis=0).max() < 2:
        raise EmptySection(
            "Not measured: no task's images were available when a later task was learned."
        )
    traces = []
    for place, task in enumerate(curves):
        later = [step for step in steps if step >= task]
        colour = f"@c{place}" if len(curves) <= 8 else f"@ramp:{place / (len(curves) - 1):.3f}"
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(steps) <= MANY else "lines",
                "name": label_of(results, task),
                "x": [label_of(results, step) for step in later],
                "y": rounded(matrix[later, task]),
                "line": {"color": colour, "width": 2},
                "marker": {"color": colour, "size": 6},
                "showlegend": len(curves) <= 14,
                "hovertemplate": (
                    "%{fullData.name}<br>after %{x}<br><b>%{y:.1f} %</b><extra></extra>"
                ),
            }
        )
    caption = "Each curve is one task's accuracy, from right after learning."
    if (np.isnan(matrix) & np.tri(num, dtype=bool)).any():
        caption += " Gaps were not measured."
    spec = plot(traces, task_axis(results, steps, "after learning"), axis("accuracy, %"))
    return Chart(caption + note_of_spread(num, CURVES), {"": spec}, 400)


def pool_growth(results: Results) -> Chart:
    """Experts per block after each task."""
    num, num_blocks = len(results["tasks"]), len(results["pool"])
    kept = spread(num, SHOWN)
    # after which task each expert was there: -1 for the backbone's and those of forgotten tasks
    arrivals = [
        sorted(
            e["origin"] if isinstance(e["origin"], int) else -1
            for e in block
            if e["kind"] != "gone"
        )
        for block in results["pool"]
    ]
    counts = np.array([np.searchsorted(block, [-1, *kept], side="right") for block in arrivals])
    blocks = [f"block {block + 1}" for block in range(num_blocks)]
    spec = heatmap(
        counts,
        category_axis(blocks, blocks),
        task_axis(results, [-1, *kept], "after learning"),
        limits=(0, max(2, int(counts.max()))),
        hover="%{y} after %{x}<br><b>%{z} experts</b>",
    )
    caption = (
        f"Experts per block, the backbone's own included: {counts[:, -1].sum():,} in all after the"
        " last task."
    )
    caption += note_of_spread(num, SHOWN)
    if left := sum(
        e["origin"] == FORGOTTEN and e["kind"] != "gone" for block in results["pool"] for e in block
    ):
        caption += f" {left:,} of them remain from forgotten tasks, and count from the start."
    return Chart(
        caption,
        {"": spec},
        max(190, 26 * num_blocks + 70),
        min_width=min(166 + 26 * len(kept), 700),
    )


def similarity(results: Results) -> Chart:
    """Per task S of every earlier network at every block, in [-1, 1]."""
    num, num_blocks = len(results["tasks"]), len(results["similarity"][0][0])
    blocks = [f"B{block + 1}" for block in range(num_blocks)]
    variants: dict[str, Spec] = {}
    for task in spread(num, PANELS):
        kept = spread(task + 1, PANELS)  # the base comes first
        spec = heatmap(
            matrix_from_json(results["similarity"][task])[kept],
            task_axis(results, [row - 1 for row in kept], named=True),
            category_axis(blocks, blocks, "block"),
            scale="diverging",
            limits=(-1, 1),
            hover="%{y}<br>at %{x}<br><b>S = %{z:.2f}</b>",
            decimals=2,
        )
        spec["layout"]["height"] = int(np.clip(30 * len(kept) + 75, 130, 760))
        variants[f"T{task + 1} {results['tasks'][task]['name']}"] = spec
    height = max(spec["layout"]["height"] for spec in variants.values())
    caption = (
        "Similarity S of a new task to every earlier network, block by block: 1 is alike, –1"
        " unlike; empty where that network skips the block." + note_of_spread(num, PANELS)
    )
    return Chart(
        caption, variants, height, min(160 + 34 * num_blocks, 700), 860, "task", len(variants) - 1
    )


def time(results: Results) -> Chart:
    """Seconds by phase and task; the caption says how many of them went into compiling."""
    tasks = results["tasks"]
    kept = spread(len(tasks), SHOWN)
    x = task_axis(results, kept)
    phases: list[str] = list(dict.fromkeys(phase for task in tasks for phase in task["seconds"]))
    traces: list[Spec] = [
        {
            "type": "bar",
            "name": shown(PHASES.get(phase, phase)),
            "x": x["categoryarray"],
            "y": rounded([tasks[index]["seconds"].get(phase, 0.0) for index in kept]),
            "marker": {"color": f"@bar{place % 9}", "line": {"width": 0}},
            "hovertemplate": (
                f"%{{x}}<br>{shown(PHASES.get(phase, phase))}: <b>%{{y:.3~s}} s</b><extra></extra>"
            ),
        }
        for place, phase in enumerate(phases)
    ]
    whole = results["seconds_total"]
    compiling = results["compile"]["seconds"]
    everything = "Learning and measuring" if results["stream"] == "memory" else "The whole run"
    caption = (
        f"{everything} took {duration(whole)}. Compiling took {compiling:,.1f} s of it"
        f" ({100 * compiling / max(whole, 1e-9):.0f} %): {results['compile']['programs']} functions"
        f" compiled, {results['compile'].get('cached', 0)} read from the cache."
        + note_of_spread(len(tasks), SHOWN)
    )
    spec = plot(traces, x, axis("seconds", rangemode="tozero"), barmode="stack", bargap=0.35)
    return Chart(caption, {"": spec}, 400)


def search_chart(recorded: Recorded, tolerance: float | None) -> Chart:
    """A chart per task with a selector; EmptySection where the record has none. `tolerance` is tau
    of the search."""
    if recorded.trouble:
        raise EmptySection("Only the record contains it, which cannot be read.")
    reports = recorded.reports
    scored = [
        index for index, report in enumerate(reports) if set(report["search"]["correct"]) - {None}
    ]
    if not scored:
        raise EmptySection("No architecture of the search has a score.")
    kept = [scored[place] for place in spread(len(scored), PANELS)]
    variants = {
        f"T{index + 1} {reports[index]['name']}": _scatter(reports[index], tolerance)
        for index in kept
    }
    caption = (
        "Every architecture that the search evaluated: FLOPs of the architecture against"
        f" {SCORES[score_of(reports[0])][1]}. The colour is the generation; the ring marks the"
        " target network"
    )
    if tolerance is not None:
        caption += (
            f": the cheapest of those whose accuracy is less than {100 * tolerance:g} points below"
            " the best"
        )
        caption += " (the band)"
    caption += "."
    if len(scored) < len(reports):
        caption += f" Of {len(reports) - len(scored):,} tasks no architecture has a score."
    if len(kept) < len(scored):
        caption += f" Of {len(scored):,} tasks, {len(kept)} have a chart, evenly spread."
    return Chart(caption, variants, 420, choose="task")


def score_of(report: Mapping[str, Any]) -> str:
    """What the search of a learned task ranked by; records of the supernet's own head do not say
    it."""
    return report["search"].get("score", "shared_head")


def _scatter(report: Mapping[str, Any], tolerance: float | None) -> Spec:
    search = report["search"]
    accuracy = np.array(
        [np.nan if value is None else value for value in search["correct"]], np.float64
    )
    accuracy *= 100 / search["num_images"]
    flops = np.asarray(search["flops"], np.float64) / 1e6
    chosen = search["chosen"]
    generation = np.arange(len(accuracy)) // search["population"] + 1
    scored = np.isfinite(accuracy)
    best = float(np.nanmax(accuracy))
    # a few candidates far below the others would leave no room to see these
    lowest = min(float(np.nanquantile(accuracy, 0.1)), accuracy[chosen])
    dots = {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(flops[scored], 5),
        "y": rounded(accuracy[scored]),
        "customdata": generation[scored].tolist(),
        "showlegend": False,
        "marker": {
            "size": 8,
            "color": generation[scored].tolist(),
            "colorscale": "@generations",
            "cmin": 1,
            "cmax": max(2, int(generation.max())),
            "showscale": bool(generation.max() > 1),
            "line": {"width": 0.5, "color": "@paper"},
            "colorbar": {"title": {"text": "generation", "side": "right"}},
        },
        "hovertemplate": (
            "generation %{customdata}<br>%{x:.4~g} MFLOPs<br><b>%{y:.1f} %</b><extra></extra>"
        ),
    }
    ring = {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(flops[[chosen]], 5),
        "y": rounded(accuracy[[chosen]]),
        "marker": {"size": 17, "symbol": "circle-open", "color": "@winner", "line": {"width": 3}},
        "showlegend": False,
        "hovertemplate": "chosen<br>%{x:.4~g} MFLOPs<br><b>%{y:.1f} %</b><extra></extra>",
    }
    band = {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": best - 100 * (tolerance or 0),
        "y1": best,
        "fillcolor": "@band",
        "line": {"width": 0},
        "layer": "below",
    }
    note = f"{len(accuracy):,} evaluated, {int((~scored).sum()):,} without a score, "
    note += f"{int((accuracy < lowest).sum()):,} below the axis"
    margin = 0.05 * (best - lowest) + 0.1
    return plot(
        [dots, ring],
        axis(f"MFLOPs of the architecture<br>{note}"),
        axis(SCORES[score_of(report)][0], range=[lowest - margin, best + margin]),
        shapes=[band] if tolerance else [],
    )


def accuracy_against_flops(
    found: Mapping[str, Sequence[Results]], titles: Mapping[str, str]
) -> Chart:
    """A mark per method: mean accuracy over FLOPs by the paper's convention; bars are standard
    deviations."""
    rows = [
        row for row in comparison(found) if row["flops_paper"] and row["flops_paper"]["mean"] > 0
    ]
    methods = {row["method"]: found[row["method"]][0]["method"] for row in rows}
    bounds = [row for row in rows if methods[row["method"]] in UPPER_BOUNDS]
    own = [row for row in rows if methods[row["method"]].startswith("cheem")]
    others = [row for row in rows if row not in bounds and row not in own]
    groups = (
        ("CHEEM", own, "average_accuracy", {"color": "@winner", "symbol": "circle", "size": 12}),
        (
            "others",
            others,
            "average_accuracy",
            {"color": "@accent", "symbol": "circle", "size": 10},
        ),
        (
            "upper bounds, task ID given",
            bounds,
            "local_average_accuracy",
            {"color": "@faint", "symbol": "diamond-open", "size": 11, "line": {"width": 2}},
        ),
    )
    flops = [row["flops_paper"]["mean"] for row in rows]
    unit, name = (1e9, "GFLOPs") if max(flops, default=0) >= 1e9 else (1e6, "MFLOPs")
    traces = []
    for title, members, key, marker in groups:
        marks = [row for row in members if row[key]]
        spread = [100 * (row[key]["std"] or 0.0) for row in marks]
        trace: Spec = {
            "type": "scatter",
            "mode": "markers",
            "name": title,
            "marker": marker,
            "cliponaxis": False,
            "x": rounded([row["flops_paper"]["mean"] / unit for row in marks], 5),
            "y": rounded([100 * row[key]["mean"] for row in marks]),
            "text": [shown(titles[row["method"]]) for row in marks],
            "meta": {"labelled": True},
            "error_y": {
                "array": rounded(spread),
                "visible": any(spread),
                "thickness": 1,
                "width": 3,
            },
            "hovertemplate": (
                f"<b>%{{text}}</b><br>%{{y:.1f}} %<br>%{{x:.4~g}} {name}<extra></extra>"
            ),
        }
        traces += [trace] if members else []
    caption = "Up and to the left is better. Upper bounds are given the task ID."
    if without := [titles[key] for key in found if key not in methods]:
        caption += f" Not shown, because the FLOPs are unknown: {', '.join(without)}."
    is_wide = bool(flops) and max(flops) > 3 * min(flops)
    x = axis(f"{name} per image, paper's convention", type="log" if is_wide else "linear")
    return Chart(caption, {"": plot(traces, x, axis("average accuracy, %"))}, 480, max_width=1080)


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
        title,
        type="category",
        categoryorder="array",
        categoryarray=list(full),
        tickmode="array",
        tickvals=[full[i] for i in ticks],
        ticktext=[short[i] for i in ticks],
        showgrid=False,
    )


def task_axis(
    results: Results, tasks: Sequence[int], title: str = "", *, named: bool = False
) -> Spec:
    """An axis over tasks, -1 being the base; ticks are `T1`, or `T1 food10` where they are
    `named`."""
    short = [label_of(results, task, 20) if named or task < 0 else f"T{task + 1}" for task in tasks]
    return category_axis([label_of(results, task) for task in tasks], short, title)


def label_of(results: Results, task: int, limit: int = 60) -> str:
    """`T1 food10` of the first task, unique because of the number; -1 is the base."""
    return "base" if task < 0 else shown(f"T{task + 1} {results['tasks'][task]['name']}", limit)


def shown(text: str, limit: int = 60) -> str:
    """Text as plotly shows it: it reads a little HTML, which a name must not be taken for."""
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return html.escape(text)


def note_of_spread(num: int, limit: int) -> str:
    """A sentence about the tasks that are left out, or nothing."""
    return "" if num <= limit else f" Of {num:,} tasks, {limit} are shown, evenly spread."


def rounded(values: Any, digits: int = 4) -> Any:
    """Nested lists with so many significant digits, to keep the page small; None for what is not
    finite."""
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
    """A matrix as colours, the first row on top, with its numbers in the cells where there are
    few."""
    has_numbers = max(values.shape) <= MANY
    gap = 0 if max(values.shape) > 2 * MANY else 1
    trace = {
        "type": "heatmap",
        "z": rounded(values),
        "x": columns["categoryarray"],
        "y": rows["categoryarray"],
        "zmin": limits[0],
        "zmax": limits[1],
        "colorscale": f"@{scale}",
        "showscale": not has_numbers,
        "xgap": gap,
        "ygap": gap,
        "hovertemplate": f"{hover}<extra></extra>",
        "hoverongaps": False,
    }
    if has_numbers:
        trace |= {"texttemplate": f"%{{z:.{decimals}f}}", "textfont": {"size": 11}}
    return plot([trace], {**columns, "side": "bottom"}, {**rows, "autorange": "reversed"})
