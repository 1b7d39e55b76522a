"""Designs of the head: accuracy over all classes and within the task, next to the paper's theory.

    python experiments/head_analysis.py --runs runs/compare --out runs/heads
    python experiments/head_analysis.py --runs runs/mtil --data-dir DATA

For methods with one head over all classes the logits of all test images are computed again, from
the run's checkpoints and images. Without runs the tables have the paper's numbers and the theory
alone.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from charts import check_folder, filled, frame, legend_below, mean_std, spread, write_page
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from studies.heads.margins import GLOBAL_HEADS, Margins, Measured, by_task, measure, summary
from studies.heads.theory import match_probability, match_with_one_rival
from studies.paper.printed import Cell, printed

from cheem_jax.cheem.config import PRESETS
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.report.figures import DPI, FAINT, INK, save
from cheem_jax.report.finished import (
    RunRecord,
    check_comparable,
    numbers_of,
    order_names,
    read,
    variant_of,
)
from cheem_jax.report.table import METHODS, UPPER_BOUNDS, Grid
from cheem_jax.run.progress import Progress

GAPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
"""Differences between the means, in standard deviations, which are equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAnalysis:
    """The paper's table of head designs, and how often the argmax within a task is that over all
    tasks."""

    stream: str | None = None
    """The run's images, as for mtil.py; default: the name of the run's stream."""
    data_dir: Path | None = None
    """Folder of prepared data sets; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    split_seed: int = 0
    """The run's seed of the splits that a data set lacks."""
    weights: Path | None = None
    """The run's weights file; default: bundled, else from the hub."""
    runs: tuple[Path, ...] = ()
    """Folders with finished runs, at any depth."""
    out: Path = Path("runs/heads")
    """Folder of tables and figures."""

    def settings(self, config: Mapping[str, Any]) -> cheem_run.RunSettings:
        """Settings that load the images and weights of a run, from its
        `config.json`."""
        return cheem_run.RunSettings(
            cheem=PRESETS["quick"],
            stream=self.stream or config["stream"],
            tasks=",".join(config["tasks"]),
            data_dir=self.data_dir,
            split_seed=self.split_seed,
            backbone=config["backbone"],
            weights=self.weights,
            image_size=config["image_size"],
            pixel_norm=pixel_norm(config),
        )


def pixel_norm(config: Mapping[str, Any]) -> Literal["checkpoint", "unit"]:
    """Return the pixel scaling of a run, given the content of its `config.json`."""
    mean, std = config.get("pixels", (None, None))
    return "unit" if (mean, std) == ([0, 0, 0], [1, 1, 1]) else "checkpoint"


def main(settings: HeadAnalysis) -> None:
    """Measure, then write tables and figures."""
    progress = Progress()
    out = settings.out
    check_folder("--out", out)
    runs, left_out = shown(settings.runs)
    check_comparable(runs)
    measured = measure_all(runs, settings, progress)
    write(out, measured, left_out)
    for directory, why in left_out:
        progress.say(f"left out {directory}: {why}")
    progress.say(f"{len(measured)} runs: {out / 'heads.md'}")


def write(out: Path, measured: Sequence[Measured], left_out: Sequence[tuple[Path, str]]) -> None:
    """Write tables, figures and all numbers."""
    out.mkdir(parents=True, exist_ok=True)
    rows = rows_of(measured)
    tasks = [task for one in measured for task in by_task(one)]
    curves = theory()
    page = pages(rows, tasks, curves, out)
    if left_out:
        page.append("## Left out")
        page.append("\n".join(f"- {directory}: {why}" for directory, why in left_out))
    numbers = {"methods": rows, "tasks": tasks, "theory": curves}
    write_page(out / "heads", "\n\n".join(page) + "\n", numbers)


def shown(folders: Sequence[Path]) -> tuple[list[RunRecord], list[tuple[Path, str]]]:
    """The runs of the table, and the runs that are left out."""
    runs, left_out = read(folders)
    orders = order_names(runs)
    usual = []
    for run in runs:
        order = orders[run.results["stream"], run.order]
        variant = variant_of(run)
        if run.results["method"] in UPPER_BOUNDS:
            left_out.append((run.directory, "an upper bound is given the task ID"))
        elif order != "default" or variant:
            left_out.append((run.directory, f"its settings or order differ ({variant or order})"))
        else:
            usual.append(run)
    return usual, left_out


def measure_all(
    runs: Sequence[RunRecord], settings: HeadAnalysis, progress: Progress
) -> list[Measured]:
    """Margins of the runs with one head over all classes; shared images and weights are read once.

    Raises ValueError for other images or weights than the run's.
    """
    sources: dict[tuple[object, ...], tuple[cheem_run.Loaded, dict[Any, Any]]] = {}
    measured = []
    for run in runs:
        margins: list[Margins] = []
        if run.results["method"] in GLOBAL_HEADS:
            place = (*run.place, run.order, run.config["image_size"], pixel_norm(run.config))
            if place not in sources:
                sources[place] = cheem_run.load(settings.settings(run.config), progress), {}
            loaded, workshop = sources[place]
            progress.say(f"logits of {run.directory}")
            margins = measure(run, loaded.stream, loaded.pretrained, workshop)
        measured.append(Measured(run, margins))
    return measured


def theory() -> list[dict[str, Any]]:
    """Match probability over the number of rivals for each gap, by quadrature, and in closed form
    for one rival."""
    rivals = np.unique(np.geomspace(1, 10_000, 60).round().astype(int)).tolist()
    return [
        {
            "gap": gap,
            "one_rival": match_with_one_rival(gap, 1.0, 1.0),
            "rivals": rivals,
            "quadrature": [match_probability(gap, 1.0, 1.0, num) for num in rivals],
        }
        for gap in GAPS
    ]


def rows_of(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row per stream, backbone and method: mean and deviation over runs (n - 1), in %, and the
    paper's numbers."""
    theirs = printed()["heads"]
    methods = list(dict.fromkeys([cell.method for cell in theirs] + [*METHODS]))
    present = sorted((methods.index(one.method), *one.run.place) for one in measured)
    ours = [(stream, backbone, methods[index]) for index, stream, backbone in present]
    rows = []
    for place in dict.fromkeys([*(cell[:3] for cell in theirs), *ours]):
        group = [one for one in measured if (*one.run.place, one.method) == place]
        numbers = [numbers_of(one.run.results) for one in group]
        pooled = [summary(one.margins) for one in group if one.margins]
        printed_cells = {name: theirs.get(Cell(*place, name)) for name in ACCURACIES}
        rows.append(
            {
                **dict(zip(("stream", "backbone", "method"), place, strict=True)),
                "runs": len(group),
                **{name: mean_std([number[name, ""] for number in numbers]) for name in ACCURACIES},
                **{name: mean_std([100 * run[name] for run in pooled]) for name in MATCHES},
                "paper": {name: cell.text for name, cell in printed_cells.items() if cell},
            }
        )
    return rows


ACCURACIES = {
    "average_accuracy": "Acc_Global",
    "local_average_accuracy": "Acc_Local",
    "just_trained": "Acc_Train",
}
MATCHES = {"match": "match", "predicted": "predicted", "predicted_by_class": "predicted by class"}
Row = Mapping[str, Any]


def pages(rows: Sequence[Row], tasks: Sequence[Row], curves: Sequence[Row], out: Path) -> list[str]:
    """Tables and figures by stream and backbone; docs/experiments.md explains them."""
    page = ["# Designs of the head"]
    for place in dict.fromkeys((row["stream"], row["backbone"]) for row in rows):
        methods = [row for row in rows if (row["stream"], row["backbone"]) == place]
        page += [f"## {' on '.join(place)}", accuracy_grid(methods).to_markdown()]
        here = [task for task in tasks if (task["stream"], task["backbone"]) == place]
        if here:
            name = "match-" + re.sub(r"[^\w.-]+", "-", "-".join(place)) + ".png"
            match_figure(curves, here, out / name)
            page += [error_grid(here).to_markdown(), f"![Match probability]({name})"]
            page.append(task_grid(here).to_markdown())
    if not tasks:
        match_figure(curves, [], out / "match.png")
        page.append("![Match probability](match.png)")
    return page


def error_grid(tasks: Sequence[Row]) -> Grid:
    """Errors of the predicted match probabilities over tasks, in points: measured minus
    predicted."""
    rows = []
    for name in ("predicted", "predicted_by_class"):
        errors = 100 * np.array([task["match"] - task[name] for task in tasks])
        numbers = (errors.mean(), errors.min(), errors.max(), np.sqrt((errors**2).mean()))
        rows.append((MATCHES[name], *(f"{number:+.1f}" for number in numbers)))
    return Grid("", ("measured minus", "mean", "lowest", "highest", "rms"), tuple(rows), 1)


def accuracy_grid(rows: Sequence[Row]) -> Grid:
    """The paper's table, extended by match probabilities."""
    columns = {
        "method": [METHODS[row["method"]] for row in rows],
        "runs": [str(row["runs"] or "") for row in rows],
    }
    for name, title in {**ACCURACIES, **MATCHES}.items():
        columns[title] = [spread(row[name], 2) if row[name] else "" for row in rows]
        if name in ACCURACIES:
            columns[f"{title}, paper"] = [row["paper"].get(name, "") for row in rows]
    return filled("heads", columns)


def task_grid(tasks: Sequence[Row]) -> Grid:
    """Means over runs, for each method and task."""
    columns = ("method", "task", "rivals", "gap", *MATCHES.values(), "Acc_Global", "Acc_Local")
    rows = []
    for method, name in dict.fromkeys((task["method"], task["task"]) for task in tasks):
        group = [task for task in tasks if (task["method"], task["task"]) == (method, name)]

        def mean(key: str, group=group) -> float:
            return float(np.mean([task[key] for task in group]))

        percents = (f"{100 * mean(key):.1f}" for key in (*MATCHES, "accuracy", "local_accuracy"))
        rows.append(
            (METHODS[method], name, f"{mean('rivals'):.0f}", f"{mean('scaled_gap'):.2f}", *percents)
        )
    return Grid("tasks", columns, tuple(rows), 2)


MARKERS = {"ewc": "^", "moal": "v", "coda_prompt": "D", "dualprompt": "s", "l2p": "o"}
SHADES = Normalize(0, 5)
COLOURS = colormaps["viridis_r"]


def match_figure(curves: Sequence[Row], measured: Sequence[Row], file: Path) -> None:
    """Left, the theory for several gaps and measured tasks; right, measured against predicted.

    The theory's curves have equal deviations. A task is at its number of rivals, coloured by its
    gap in standard deviations.
    """
    figure = Figure(figsize=(10.5 if measured else 6.4, 4.8), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]
    axes = panels[0]
    for curve in curves:
        colour = COLOURS(SHADES(curve["gap"]))
        axes.plot(curve["rivals"], curve["quadrature"], color=colour, linewidth=1.8)
        axes.plot(
            1, curve["one_rival"], "D", markersize=8, markerfacecolor="none", markeredgecolor=colour
        )
    for task in measured:
        _point(axes, task, task["rivals"])
    axes.set(xscale="log", ylim=(-0.03, 1.03))
    frame(
        axes,
        x="classes of other tasks, M",
        y="P(argmax within the task = argmax of all)",
        grid=True,
    )
    bar = figure.colorbar(ScalarMappable(SHADES, COLOURS), ax=axes, pad=0.01, fraction=0.045)
    bar.set_label("gap of the means, in standard deviations", color=FAINT, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    if measured:
        panels[1].plot([0, 1], [0, 1], color=FAINT, linewidth=1)
        for task in measured:
            marker = MARKERS[task["method"]]
            x = task["predicted_by_class"]
            y = task["match"]
            panels[1].plot(
                x, y, marker, markersize=5, markerfacecolor="none", markeredgecolor=FAINT
            )
            _point(panels[1], task, task["predicted"])
        panels[1].set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
        x = "predicted for rivals that are alike (hollow: class by class)"
        frame(panels[1], x=x, y="measured", grid=True)
    handles = [
        Line2D([], [], color=FAINT, linewidth=1.8, label="quadrature"),
        Line2D(
            [],
            [],
            color=FAINT,
            marker="D",
            markerfacecolor="none",
            linestyle="none",
            label="closed form, M = 1",
        ),
    ]
    for method in dict.fromkeys(task["method"] for task in measured):
        handles.append(
            Line2D(
                [],
                [],
                color=FAINT,
                marker=MARKERS[method],
                linestyle="none",
                label=f"{METHODS[method]}, a task",
            )
        )
    legend_below(figure, handles)
    figure.suptitle(
        "How often the argmax within a task is the argmax of all", fontsize=12, color=INK
    )
    save(figure, file)


def _point(axes: Axes, task: Row, x: float) -> None:
    colour = COLOURS(SHADES(task["scaled_gap"]))
    axes.plot(
        x,
        task["match"],
        MARKERS[task["method"]],
        color=colour,
        markersize=7,
        markeredgecolor=INK,
        markeredgewidth=0.6,
    )


if __name__ == "__main__":
    run_command(main, parse(HeadAnalysis, description=__doc__))
