"""Charts of one or more runs, as plotly JSON made from their results.

Colours are names such as `@ink`, which page.js replaces by the values in page.css. page.js also
sets margins, legends and colour bars.
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
from cheem_jax.run.results import Results, curve_of

Spec = dict[str, Any]
"""`data` and `layout` of plotly.js, or a part of them."""
MANY = 30
"""Maximum number of rows and columns of a heat map that displays the numbers in its cells."""
SHOWN = 60
"""Maximum number of tasks in a chart, and of variants of a chart."""
SCORES = {
    "shared_head": ("validation accuracy, %", "accuracy on the validation images"),
    "closed_form": (
        "accuracy of a ridge head, %",
        "leave-one-out accuracy of a ridge head on training and validation images",
    ),
    "untrained": (
        "accuracy before training, %",
        "accuracy on the validation images before training, with a ridge head",
    ),
}
"""Axis title and description of each score of the search. Earlier versions could score candidates
in closed form."""
PHASES = {
    "keep": "images through unchanged blocks",
    "prepare": "compiling",
    "supernet": "supernet training",
    "finetune": "fine-tuning",
    "means": "means of features",
    "train": "training",
    "head": "fitting the head",
    "router": "fitting the router",
    "features": "computing features",
}
"""Displayed titles of phases. A phase that is not listed is displayed under its name."""

BOUNDS = "upper bounds, task ID given"
MARKERS = {
    "CHEEM": {"color": "@winner", "symbol": "circle", "size": 12},
    "others": {"color": "@accent", "symbol": "circle", "size": 10},
    BOUNDS: {"color": "@faint", "symbol": "diamond-open", "size": 11, "line": {"width": 2}},
}
"""Marker of each group of methods."""


class EmptySection(ValueError):
    """A section has nothing to display; the message is a sentence with the reason."""


class Chart(NamedTuple):
    """A figure. If there is more than one variant of it, the page displays a selector."""

    caption: str
    variants: Mapping[str, Spec]
    height: int = 400
    min_width: int = 0
    max_width: int = 860
    """Widths are in pixels; on a page narrower than `min_width`, the figure scrolls inside its
    box."""
    choose: str = ""
    """Title of the selector for the variants of the figure."""
    start: int = 0
    """Index of the variant that is displayed first."""


def accuracy_matrix(results: Results) -> Chart:
    """Plot the accuracy in percent on each task (column) after each learned task (row)."""
    panels = {"task ID inferred": "accuracy", "task ID given": "local_accuracy"}
    if results["method"] in UPPER_BOUNDS:
        del panels["task ID inferred"]
    variants = {
        name: _task_matrix(results, results[key], "after learning", "tested on")
        for name, key in panels.items()
    }
    caption = "Accuracy in %. Read a column downwards to follow one task."
    if any(None in row[: index + 1] for index, row in enumerate(results["local_accuracy"])):
        caption += (
            " Cells on or below the diagonal are empty if the images were not available then."
        )
    return _square(results, caption, variants, "accuracy with the")


def routing(results: Results) -> Chart:
    """Plot the percentage of each task's test images (row) for which each task ID is inferred
    (column), after the last task."""
    shares = matrix_from_json(results["routing"])
    missing = unmeasured(results)
    if len(missing) == len(shares):
        raise EmptySection(f"Not measured: {UNAVAILABLE}.")
    caption = (
        "Share of each task's test images in %. The task ID is right for"
        f" {100 * np.nanmean(np.diagonal(shares)):.1f} % on average."
    )
    if missing:
        caption += f" Not measured for {len(missing):,} of {len(shares):,} tasks: {UNAVAILABLE}."
    if any(None in row and set(row) != {None} for row in results["routing"]):
        caption += (
            " If only the diagonal of a row is filled in, the row was measured by cheem evaluate,"
            " which does not report the inferred tasks of the other images."
        )
    if routed_to_forgotten(results):
        caption += f" Measured before a task was forgotten: {ROUTED_TO_FORGOTTEN}."
    spec = _task_matrix(results, results["routing"], "true task", "inferred task")
    return _square(results, caption, {"": spec})


def _task_matrix(results: Results, rows: list[list[float | None]], first: str, second: str) -> Spec:
    """Make a heat map in percent whose axes have the titles `first` (rows) and `second`
    (columns)."""
    tasks = spread(len(rows), SHOWN)
    return heatmap(
        100 * matrix_from_json(rows)[np.ix_(tasks, tasks)],
        task_axis(results, tasks, first, named=True),
        task_axis(results, tasks, second),
        hover=f"{first}: %{{y}}<br>{second}: %{{x}}<br><b>%{{z:.1f}} %</b>",
    )


def _square(
    results: Results, caption: str, variants: Mapping[str, Spec], choose: str = ""
) -> Chart:
    num = min(len(results["tasks"]), SHOWN)
    return Chart(
        caption + selection_note(len(results["tasks"])),
        variants,
        height=int(np.clip(34 * num + 70, 170, 640)),
        min_width=min(150 + 26 * num, 700),
        max_width=min(300 + 70 * num, 860),
        choose=choose,
    )


def forgetting(results: Results) -> Chart:
    """Plot the accuracy of each task in percent, right after learning it and after each later
    task."""
    matrix = 100 * matrix_from_json(results[accuracy_key(results["method"])])
    if np.isfinite(matrix).sum(axis=0).max() < 2:
        raise EmptySection(
            "Not measured: no task's images were available when a later task was learned."
        )
    tasks = spread(len(matrix), SHOWN)
    traces = []
    for place, task in enumerate(tasks):
        later = [step for step in tasks if step >= task]
        colour = f"@c{place}" if len(tasks) <= 8 else f"@ramp:{place / (len(tasks) - 1):.3f}"
        trace = points(
            [task_label(results, step) for step in later],
            matrix[later, task],
            "%{fullData.name}<br>after %{x}<br><b>%{y:.1f} %</b>",
            name=task_label(results, task),
            mode="lines+markers",
            marker={"color": colour, "size": 6},
        )
        traces.append(
            trace | {"line": {"color": colour, "width": 2}, "showlegend": len(tasks) <= 14}
        )
    caption = "Each curve is the accuracy of one task, starting right after learning."
    if (np.isnan(matrix) & np.tri(len(matrix), dtype=bool)).any():
        caption += " Gaps were not measured."
    spec = plot(traces, task_axis(results, tasks, "after learning"), axis("accuracy, %"))
    return Chart(caption + selection_note(len(matrix)), {"": spec})


def accuracy_curves(runs: Mapping[str, Sequence[Results]]) -> Chart:
    """Plot the accuracy in percent over the test images of all tasks so far, after each task.

    `runs` contains the results of runs, keyed by curve title. A curve is the mean over the runs
    under its title. Runs without an accuracy matrix have no curve.

    Raises EmptySection if every curve is absent or NaN.
    """
    first = next(iter(runs.values()))[0]
    tasks = spread(len(first["tasks"]), SHOWN)
    x = task_axis(first, tasks, "after learning")
    panels = {"task ID inferred": "accuracy", "task ID given": "local_accuracy"}
    variants = {}
    for panel, key in panels.items():
        members = {
            title: [curve_of(run[key], run["tasks"]) for run in each]
            for title, each in runs.items()
            if key == accuracy_key(each[0]["method"]) or key == "local_accuracy"
            if isinstance(each[0].get(key, [None])[-1], Sequence)
        }
        traces = []
        for place, (title, curves) in enumerate(members.items()):
            curve = 100 * np.mean(curves, axis=0)
            if np.isnan(curve).all():
                continue
            colour = (
                f"@c{place}" if len(members) <= 8 else f"@ramp:{place / (len(members) - 1):.3f}"
            )
            trace = points(
                x["categoryarray"],
                curve[tasks],
                f"{shown(title)}<br>after %{{x}}<br><b>%{{y:.1f}} %</b>",
                name=shown(title),
                mode="lines+markers",
                marker={"color": colour, "size": 6},
            )
            traces.append(trace | {"line": {"color": colour, "width": 2}, "showlegend": True})
        if traces:
            variants[panel] = plot(traces, x, axis("accuracy, %"))
    if not variants:
        raise EmptySection("Not measured: not all images were available after each task.")
    caption = (
        "Accuracy over the test images of all tasks so far, so over all classes seen so far. The"
        " mean of a curve is the average incremental accuracy Ā."
    )
    caption += selection_note(len(first["tasks"]))
    return Chart(caption, variants, choose="accuracy with the")


def open_set(results: Results) -> Chart:
    """Plot how well images of later tasks are rejected, after each task except the last: AUROC and
    FPR95 in percent."""
    tasks = spread(len(results["open_set"]), SHOWN)
    x = task_axis(results, tasks, "after learning")
    traces = []
    for place, (title, key) in enumerate((("AUROC", "auroc"), ("FPR95", "fpr95"))):
        trace = points(
            x["categoryarray"],
            [100 * results["open_set"][task][key] for task in tasks],
            f"{title} after %{{x}}<br><b>%{{y:.1f}} %</b>",
            name=title,
            mode="lines+markers",
            marker={"color": f"@c{place}", "size": 6},
        )
        traces.append(trace | {"line": {"color": f"@c{place}", "width": 2}})
    caption = (
        "Test images of later tasks are unknown, those of the tasks so far known; the score is the"
        " distance to the nearest learned task, without calibration. FPR95 is the share of unknown"
        " images that are accepted if 95 % of the known ones are."
    )
    spec = plot(traces, x, axis("%", range=[0, 102]))
    return Chart(caption + selection_note(len(results["open_set"])), {"": spec})


def pool_growth(results: Results) -> Chart:
    """Plot the number of experts per block after each task."""
    num = len(results["tasks"])
    tasks = [-1, *spread(num, SHOWN)]  # -1 is the base
    experts = [[e for e in block if e["kind"] != "gone"] for block in results["pool"]]
    # index of the task that added the expert; -1 for the backbone or a forgotten task
    arrivals = [
        [e["origin"] if isinstance(e["origin"], int) else -1 for e in block] for block in experts
    ]
    counts = np.array([[sum(a <= task for a in block) for task in tasks] for block in arrivals])
    blocks = [f"block {block + 1}" for block in range(len(experts))]
    spec = heatmap(
        counts,
        category_axis(blocks, blocks),
        task_axis(results, tasks, "after learning"),
        limits=(0, max(2, int(counts.max()))),
        hover="%{y} after %{x}<br><b>%{z} experts</b>",
    )
    caption = (
        f"Experts per block, including those of the backbone: {counts[:, -1].sum():,} in total"
        f" after the last task.{selection_note(num)}"
    )
    if rest := sum(e["origin"] == FORGOTTEN for block in experts for e in block):
        caption += f" {rest:,} of them remain from forgotten tasks and are counted from the start."
    height = max(190, 26 * len(blocks) + 70)
    return Chart(caption, {"": spec}, height, min_width=min(166 + 26 * len(tasks), 700))


def similarity(results: Results) -> Chart:
    """Plot the similarity S in [-1, 1] of each task to each earlier network at each block."""
    num, num_blocks = len(results["tasks"]), len(results["similarity"][0][0])
    blocks = [f"B{block + 1}" for block in range(num_blocks)]
    variants: dict[str, Spec] = {}
    for task in spread(num, SHOWN):
        earlier = spread(task + 1, SHOWN)  # row 0 is the base network
        spec = heatmap(
            matrix_from_json(results["similarity"][task])[earlier],
            task_axis(results, [row - 1 for row in earlier], named=True),
            category_axis(blocks, blocks, "block"),
            scale="diverging",
            limits=(-1, 1),
            hover="%{y}<br>at %{x}<br><b>S = %{z:.2f}</b>",
            decimals=2,
        )
        spec["layout"]["height"] = int(np.clip(30 * len(earlier) + 75, 130, 760))
        variants[task_label(results, task)] = spec
    caption = (
        "Similarity S of a new task to every earlier network at each block, from –1 (dissimilar)"
        " to 1 (similar); empty if the network skips the block." + selection_note(num)
    )
    height = max(spec["layout"]["height"] for spec in variants.values())
    return Chart(
        caption,
        variants,
        height,
        min_width=min(160 + 34 * num_blocks, 700),
        choose="task",
        start=len(variants) - 1,
    )


def time(results: Results) -> Chart:
    """Plot the seconds per phase and task; the caption contains the time spent on compiling."""
    tasks = spread(len(results["tasks"]), SHOWN)
    seconds = [results["tasks"][index]["seconds"] for index in tasks]
    x = task_axis(results, tasks)
    traces: list[Spec] = []
    for place, phase in enumerate(dict.fromkeys(phase for task in seconds for phase in task)):
        title = shown(PHASES[phase] if phase in PHASES else phase)
        traces.append(
            {
                "type": "bar",
                "name": title,
                "x": x["categoryarray"],
                "y": rounded([task.get(phase, 0.0) for task in seconds]),
                "marker": {"color": f"@bar{place % 9}", "line": {"width": 0}},
                "hovertemplate": f"%{{x}}<br>{title}: <b>%{{y:.3~s}} s</b><extra></extra>",
            }
        )
    total, compiling = results["seconds_total"], results["compile"]
    activity = "Learning and measuring" if results["stream"] == "memory" else "The whole run"
    caption = (
        f"{activity} took {duration(total)}. Compiling took {compiling['seconds']:,.1f} s of it"
        f" ({100 * compiling['seconds'] / max(total, 1e-9):.0f} %): {compiling['programs']}"
        f" functions compiled, {compiling.get('cached', 0)} read from the cache."
        + selection_note(len(results["tasks"]))
    )
    spec = plot(traces, x, axis("seconds", rangemode="tozero"), barmode="stack", bargap=0.35)
    return Chart(caption, {"": spec})


def search_chart(recorded: Recorded, tolerance: float | None) -> Chart:
    """Plot the architectures that the search scored. The chart has one variant per task.

    `tolerance` is the tolerance tau of the search in [0, 1].
    """
    if recorded.trouble:
        raise EmptySection("The search is only in the record, which cannot be read.")
    reports = recorded.reports
    scored = [report for report in reports if set(report["search"]["correct"]) - {None}]
    if not scored:
        raise EmptySection("No architecture of the search has a score.")
    shown = [scored[place] for place in spread(len(scored), SHOWN)]
    variants = {
        f"T{report['index'] + 1} {report['name']}": _scatter(report, tolerance) for report in shown
    }
    searches = [report["search"] for report in shown]
    # the tasks of a memory can have different searches
    scores = dict.fromkeys(SCORES[score_name(report)][1] for report in shown)
    caption = (
        "Every architecture that the search evaluated: FLOPs of the architecture against"
        f" {' or '.join(scores)}. The ring marks the network that the search chose"
    )
    if tolerance and any("losses" not in search for search in searches):
        caption += (
            "; in a chart with a band, it is the cheapest one less than"
            f" {100 * tolerance:g} points below the best accuracy"
        )
    if any(len(search["correct"]) > search["population"] for search in searches):
        caption += "; the colour is the generation"
    caption += f".{selection_note(len(scored))}"
    if without := len(reports) - len(scored):
        caption += f" {without:,} tasks have no architecture with a score."
    return Chart(caption, variants, 420, choose="task")


def score_name(report: Mapping[str, Any]) -> str:
    """Return the name of the score that ranked the architectures of a task; the default is the
    accuracy of the supernet's shared head."""
    return report["search"].get("score", "shared_head")


def _scatter(report: Mapping[str, Any], tolerance: float | None) -> Spec:
    search = report["search"]
    if "losses" in search:
        tolerance = None  # elimination compares losses, not accuracies
    accuracy = 100 * np.array(search["correct"], float) / search["num_images"]  # None becomes NaN
    flops = np.array(search["flops"], float) / 1e6
    generation = np.arange(len(accuracy)) // search["population"] + 1
    scored = np.isfinite(accuracy)
    chosen = [search["chosen"]]
    best = float(np.nanmax(accuracy))
    # if the axis included candidates with very low scores, the other candidates would overlap
    lowest = min(float(np.nanquantile(accuracy, 0.1)), accuracy[search["chosen"]])
    text = "%{x:.4~g} MFLOPs<br><b>%{y:.1f} %</b>"
    marker = {
        "size": 8,
        "color": generation[scored].tolist(),
        "colorscale": "@generations",
        "cmin": 1,
        "cmax": max(2, int(generation.max())),
        "showscale": bool(generation.max() > 1),
        "line": {"width": 0.5, "color": "@paper"},
        "colorbar": {"title": {"text": "generation", "side": "right"}},
    }
    dots = points(
        flops[scored], accuracy[scored], f"generation %{{marker.color}}<br>{text}", marker=marker
    )
    marker = {"size": 17, "symbol": "circle-open", "color": "@winner", "line": {"width": 3}}
    ring = points(flops[chosen], accuracy[chosen], f"chosen network<br>{text}", marker=marker)
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
    note = (
        f"{len(accuracy):,} evaluated, {(~scored).sum():,} without a score,"
        f" {(accuracy < lowest).sum():,} below the axis"
    )
    margin = 0.05 * (best - lowest) + 0.1
    return plot(
        [dots, ring],
        axis(f"MFLOPs of the architecture<br>{note}"),
        axis(SCORES[score_name(report)][0], range=[lowest - margin, best + margin]),
        shapes=[band] if tolerance else [],
        showlegend=False,
    )


def accuracy_against_flops(
    runs: Mapping[str, Sequence[Results]], titles: Mapping[str, str]
) -> Chart:
    """Plot the mean accuracy in percent of each method against its FLOPs; error bars are standard
    deviations."""
    rows = [
        row for row in comparison(runs) if row["flops_paper"] and row["flops_paper"]["mean"] > 0
    ]
    flops = [row["flops_paper"]["mean"] for row in rows]
    unit, name = (1e9, "GFLOPs") if max(flops, default=0) >= 1e9 else (1e6, "MFLOPs")
    groups: dict[str, list[Mapping[str, Any]]] = {"CHEEM": [], "others": [], BOUNDS: []}
    for row in rows:
        method = runs[row["method"]][0]["method"]
        is_cheem = method.startswith("cheem")
        groups[BOUNDS if method in UPPER_BOUNDS else "CHEEM" if is_cheem else "others"].append(row)
    traces = []
    for title, members in groups.items():
        key = "local_average_accuracy" if title == BOUNDS else "average_accuracy"
        measured = [row for row in members if row[key]]
        spreads = [100 * (row[key]["std"] or 0.0) for row in measured]
        trace = points(
            [row["flops_paper"]["mean"] / unit for row in measured],
            [100 * row[key]["mean"] for row in measured],
            f"<b>%{{text}}</b><br>%{{y:.1f}} %<br>%{{x:.4~g}} {name}",
            name=title,
            marker=MARKERS[title],
        )
        trace |= {
            "cliponaxis": False,
            "text": [shown(titles[row["method"]]) for row in measured],
            "meta": {"labelled": True},
            "error_y": {
                "array": rounded(spreads),
                "visible": any(spreads),
                "thickness": 1,
                "width": 3,
            },
        }
        traces += [trace] if members else []
    caption = "Up and to the left is better. Upper bounds are given the task ID."
    if without := [titles[key] for key in runs if key not in {row["method"] for row in rows}]:
        caption += f" Not displayed, because the FLOPs are unknown: {', '.join(without)}."
    is_wide = bool(flops) and max(flops) > 3 * min(flops)
    x = axis(f"{name} per image, paper's convention", type="log" if is_wide else "linear")
    return Chart(caption, {"": plot(traces, x, axis("average accuracy, %"))}, 480, max_width=1080)


def points(
    x: Sequence[Any] | np.ndarray,
    y: Sequence[float] | np.ndarray,
    hover: str,
    *,
    marker: Spec,
    name: str = "",
    mode: str = "markers",
) -> Spec:
    """Make a scatter trace with a hover text."""
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": rounded(x, 5),
        "y": rounded(y),
        "marker": marker,
        "hovertemplate": f"{hover}<extra></extra>",
    }


def plot(data: list[Spec], x: Spec, y: Spec, **layout: Any) -> Spec:
    """Make a figure from traces and axes."""
    return {"data": data, "layout": {"xaxis": x, "yaxis": y, **layout}}


def axis(title: str, **settings: Any) -> Spec:
    """Make an axis over numbers."""
    return {"title": {"text": title}, **settings}


def category_axis(full: Sequence[str], short: Sequence[str], title: str = "") -> Spec:
    """Make an axis over names. The hover text contains the full names. Ticks are labelled with the
    short names; if there are more than MANY names, only 12 of them have a tick."""
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
    """Make an axis over tasks, in which -1 is the base. Ticks are labelled `T1`, or `T1 food10` if
    `named`."""
    short = [
        task_label(results, task, 20) if named or task < 0 else f"T{task + 1}" for task in tasks
    ]
    return category_axis([task_label(results, task) for task in tasks], short, title)


def task_label(results: Results, task: int, limit: int = 60) -> str:
    """Return the label of a task; the label of task 0 is, for example, `T1 food10`. The number
    makes the label unique. Task -1 is the base."""
    return "base" if task < 0 else shown(f"T{task + 1} {results['tasks'][task]['name']}", limit)


def shown(text: str, limit: int = 60) -> str:
    """Shorten the text to at most `limit` characters and escape it, because plotly interprets
    HTML."""
    return html.escape(text if len(text) <= limit else f"{text[: limit - 1]}…")


def selection_note(num: int) -> str:
    """Return a sentence that says how many of `num` tasks a chart displays. The text is empty if
    the chart displays all tasks."""
    return "" if num <= SHOWN else f" {SHOWN} of {num:,} tasks are displayed, evenly spaced."


def rounded(values: Any, digits: int = 4) -> Any:
    """Round nested values to `digits` significant digits to keep the page small; non-finite values
    become None."""
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
    """Make a heat map with the first row on top. If it has at most MANY rows and columns, its cells
    display their numbers."""
    is_small = max(values.shape) <= MANY
    trace = {
        "type": "heatmap",
        "z": rounded(values),
        "x": columns["categoryarray"],
        "y": rows["categoryarray"],
        "zmin": limits[0],
        "zmax": limits[1],
        "colorscale": f"@{scale}",
        "showscale": not is_small,
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": f"{hover}<extra></extra>",
        "hoverongaps": False,
    }
    if is_small:
        trace |= {"texttemplate": f"%{{z:.{decimals}f}}", "textfont": {"size": 11}}
    return plot([trace], {**columns, "side": "bottom"}, {**rows, "autorange": "reversed"})
