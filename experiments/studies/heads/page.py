"""The page of `head_analysis.py`: tables, figures, and what they say."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import spread

from cheem_jax.report.table import METHODS, Grid
from studies.heads.margins import Measured, by_task, farthest_from_record
from studies.heads.pictures import margin_figure, match_figure

ACCURACIES = {"average_accuracy": "Acc_Global", "local_average_accuracy": "Acc_Local", "just_trained": "Acc_Train"}
MATCHES = {"match": "match", "predicted": "predicted", "predicted_by_class": "predicted by class"}
Row = Mapping[str, Any]

HEAD = """# Designs of the head

Acc_Global: average accuracy after the last task where nothing is told; with one head, by the largest logit of all
classes. Acc_Local: with the task given, by the largest logit within it. Acc_Train: that right after each task was
learned. In %, means over runs with the standard deviation; `paper` is what the paper prints.

Match: how often the argmax within the task is that over all classes, after the last task and over all test images.
Only one head over all classes has it. Predicted: by the paper's theory, for normal and independent logits, from the
mean and deviation of the best logit within the task, those of all other classes' logits, and their number. Predicted by
class: the same with a mean and a deviation for each other class and each true class."""


def pages(rows: Sequence[Row], measured: Sequence[Measured], curves: Sequence[Row], out: Path) -> list[str]:
    """Tables, figures and sentences for each stream and backbone; draws the figures into `out`."""
    tasks, page = [task for one in measured for task in by_task(one)], [HEAD]
    if not tasks:
        match_figure(curves, [], out / "match.png")
        page.append("![Match probability by the number of rivals](match.png)")
    for place in dict.fromkeys((row["stream"], row["backbone"]) for row in rows):
        own = [row for row in rows if (row["stream"], row["backbone"]) == place]
        page += [f"## {' on '.join(place)}", accuracy_grid(own).to_markdown()]
        here = [task for task in tasks if (task["stream"], task["backbone"]) == place]
        if not here:
            continue
        stem = re.sub(r"[^\w.-]+", "-", "-".join(place))
        found: dict[str, list[Measured]] = {}
        for one in measured:
            if one.margins and one.run.place == place:
                found.setdefault(one.method, []).append(one)
        match_figure(curves, here, out / f"match-{stem}.png")
        margin_figure(
            {name: [one.margins for one in runs] for name, runs in found.items()}, out / f"margins-{stem}.png"
        )
        page += [
            verdict(here),
            agreement([one for runs in found.values() for one in runs]),
            f"![Match probability by the number of rivals, and measured against predicted](match-{stem}.png)",
            f"![Margins of every method and task](margins-{stem}.png)",
            "Task by task, means over runs; the gap is that of the means in standard deviations, probabilities in %.",
            task_grid(here).to_markdown(),
        ]
    return page


def accuracy_grid(rows: Sequence[Row]) -> Grid:
    """The paper's table, with match probabilities behind it; a column that has nothing is left out."""
    columns, cells = ["method"], [[METHODS[row["method"]]] for row in rows]

    def add(title: str, texts: Sequence[str]) -> None:
        if any(texts):
            columns.append(title)
            for line, text in zip(cells, texts, strict=True):
                line.append(text)

    add("runs", [str(row["runs"] or "") for row in rows])
    for name, title in ACCURACIES.items():
        add(title, [spread(row[name], 2) if row[name] else "" for row in rows])
        add(f"{title}, paper", [row["paper"].get(name, "") for row in rows])
    for name, title in MATCHES.items():
        add(title, [spread(row[name], 2) if row[name] else "" for row in rows])
    return Grid("heads", tuple(columns), tuple(map(tuple, cells)), 1)


def task_grid(tasks: Sequence[Row]) -> Grid:
    """Means over runs, for each method and task."""
    columns = ("method", "task", "rivals", "gap", *MATCHES.values(), "Acc_Global", "Acc_Local")
    rows = []
    for method, name in dict.fromkeys((task["method"], task["task"]) for task in tasks):
        own = [task for task in tasks if (task["method"], task["task"]) == (method, name)]

        def mean(key: str, own=own) -> float:
            return float(np.mean([task[key] for task in own]))

        percents = (f"{100 * mean(key):.1f}" for key in (*MATCHES, "accuracy", "local_accuracy"))
        rows.append((METHODS[method], name, f"{mean('rivals'):.0f}", f"{mean('scaled_gap'):.2f}", *percents))
    return Grid("tasks", columns, tuple(rows), 2)


def verdict(tasks: Sequence[Row]) -> str:
    """Where the theory fails: measured minus predicted."""
    off, off_by_class = (
        100 * np.array([task["match"] - task[name] for task in tasks]) for name in ("predicted", "predicted_by_class")
    )
    far = tasks[int(np.abs(off).argmax())]
    rms, rms_by_class = (float(np.sqrt((errors**2).mean())) for errors in (off, off_by_class))
    fails = "the rivals are not alike" if rms_by_class < rms / 2 else "logits are not normal, or not independent"
    return (
        f"Measured minus predicted match probability, over {len(off)} tasks: {off.mean():+.1f} points on average, from "
        f"{off.min():+.1f} to {off.max():+.1f}, root mean square {rms:.1f}; predicted is too high for "
        f"{int((off < 0).sum())} of them. Farthest off is {METHODS[far['method']]} on {far['task']}: measured "
        f"{100 * far['match']:.1f} %, predicted {100 * far['predicted']:.1f} %. Predicted by class it is "
        f"{off_by_class.mean():+.1f} points on average, root mean square {rms_by_class:.1f}: the approximation fails "
        f"mainly because {fails}."
    )


def agreement(measured: Sequence[Measured]) -> str:
    """Whether the logits give the accuracies that the runs had recorded."""
    farthest = max(map(farthest_from_record, measured))
    if farthest == 0:
        return "The logits give the very accuracies that the runs had recorded."
    return f"Accuracies by these logits are up to {100 * farthest:.2f} points from those that the runs had recorded."
