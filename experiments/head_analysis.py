"""Designs of the head: accuracy over all classes and within the task, next to the paper's theory.

    python experiments/head_analysis.py --runs runs/compare --out runs/heads
    python experiments/head_analysis.py --runs runs/mtil --data-dir DATA

For methods with one head over all classes, the logits of all test images are computed again, from
the checkpoints and images of the run. Without runs the tables contain only the paper's numbers and
the theory.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from charts import check_folder, filled, mean_std, spread, write_page
from studies.heads.margins import GLOBAL_HEADS, Margins, Measured, by_task, measure, summary
from studies.heads.theory import match_probability
from studies.paper.collected import read_tested
from studies.paper.printed import Cell, printed

from cheem_jax.cheem.config import PRESETS
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.report.finished import (
    RunRecord,
    check_comparable,
    describe_variant,
    measurements,
    order_names,
)
from cheem_jax.report.table import METHODS, UPPER_BOUNDS, Grid
from cheem_jax.run.progress import Progress

GAPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
"""Differences between the means, in standard deviations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAnalysis:
    """Make the paper's table of head designs, and measure how often the argmax within a task is the
    argmax over all tasks."""

    stream: str | None = None
    """Stream of the run's images, as for `experiments/mtil.py`; default: the name of the run's
    stream."""
    data_dir: Path | None = None
    """Folder of prepared data sets; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    split_seed: int = 0
    """Seed with which the run made the splits that a data set lacks."""
    weights: Path | None = None
    """Weights file of the run; default: the bundled file, or else download it from the hub."""
    runs: tuple[Path, ...] = ()
    """Folders that contain finished runs, at any depth."""
    out: Path = Path("runs/heads")
    """Folder of the tables."""

    def settings(self, config: Mapping[str, Any]) -> cheem_run.RunSettings:
        """Return settings that load the images and weights of a run, given the content of its
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
    """Measure the runs, then write the tables."""
    progress = Progress()
    out = settings.out
    check_folder("--out", out)
    runs, left_out = shown(settings.runs)
    if settings.runs and not runs:
        folders = ", ".join(map(str, settings.runs))
        raise ValueError(f"--runs is {folders}, which has no finished run that can be shown")
    check_comparable(runs)
    measured = measure_all(runs, settings, progress)
    write(out, measured, left_out)
    for directory, why in left_out:
        progress.say(f"left out {directory}: {why}")
    progress.say(f"{len(measured)} runs: {out / 'heads.md'}")


def write(out: Path, measured: Sequence[Measured], left_out: Sequence[tuple[Path, str]]) -> None:
    """Write the tables and all numbers."""
    out.mkdir(parents=True, exist_ok=True)
    rows = rows_of(measured)
    tasks = [task for one in measured for task in by_task(one)]
    page = tables_of(rows, tasks)
    if left_out:
        page.append("## Left out")
        page.append("\n".join(f"- {directory}: {why}" for directory, why in left_out))
    numbers = {"methods": rows, "tasks": tasks}
    write_page(out / "heads", "\n\n".join(page) + "\n", numbers)


def shown(folders: Sequence[Path]) -> tuple[list[RunRecord], list[tuple[Path, str]]]:
    """Return the runs of the table, and the excluded runs with the reason."""
    runs, left_out = read_tested(folders)
    orders = order_names(runs)
    usual = []
    for run in runs:
        order = orders[run.results["stream"], run.order]
        variant = describe_variant(run)
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
    """Measure the margins of the runs with one head over all classes. Runs with the same images and
    weights share one copy of them.

    Raises ValueError if images or weights differ from those of the run.
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


def theory_grid() -> Grid:
    """Make the table of the match probability for each gap and number of other classes M, with
    identical deviations."""
    numbers = (1, 10, 100, 1_000, 10_000)
    rows = tuple(
        (f"{gap:g}", *(f"{match_probability(gap, 1.0, 1.0, num):.3f}" for num in numbers))
        for gap in GAPS
    )
    return Grid("theory", ("gap", *(f"M = {num:,}" for num in numbers)), rows, 1)


def rows_of(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Make a row per stream, backbone and method: mean and standard deviation over runs (n - 1) in
    %, and the paper's numbers."""
    theirs = printed()["heads"]
    methods = list(dict.fromkeys([cell.method for cell in theirs] + [*METHODS]))
    present = sorted((methods.index(one.method), *one.run.place) for one in measured)
    ours = [(stream, backbone, methods[index]) for index, stream, backbone in present]
    rows = []
    for place in dict.fromkeys([*(cell[:3] for cell in theirs), *ours]):
        group = [one for one in measured if (*one.run.place, one.method) == place]
        numbers = [measurements(one.run.results) for one in group]
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


def tables_of(rows: Sequence[Row], tasks: Sequence[Row]) -> list[str]:
    """Make the tables of the theory and of each stream and backbone; docs/experiments.md explains
    them."""
    page = ["# Designs of the head", "## Theory", theory_grid().to_markdown()]
    for place in dict.fromkeys((row["stream"], row["backbone"]) for row in rows):
        methods = [row for row in rows if (row["stream"], row["backbone"]) == place]
        page += [f"## {' on '.join(place)}", accuracy_grid(methods).to_markdown()]
        tasks_of_place = [task for task in tasks if (task["stream"], task["backbone"]) == place]
        if tasks_of_place:
            page += [
                error_grid(tasks_of_place).to_markdown(),
                task_grid(tasks_of_place).to_markdown(),
            ]
    return page


def error_grid(tasks: Sequence[Row]) -> Grid:
    """Make the table of the errors of predicted match probabilities over tasks in points: measured
    minus predicted."""
    rows = []
    for name in ("predicted", "predicted_by_class"):
        errors = 100 * np.array([task["match"] - task[name] for task in tasks])
        numbers = (errors.mean(), errors.min(), errors.max(), np.sqrt((errors**2).mean()))
        rows.append((MATCHES[name], *(f"{number:+.1f}" for number in numbers)))
    return Grid("", ("measured minus", "mean", "lowest", "highest", "rms"), tuple(rows), 1)


def accuracy_grid(rows: Sequence[Row]) -> Grid:
    """Make the paper's table, extended by match probabilities."""
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
    """Make the table of means over runs for each method and task."""
    columns = ("method", "task", "others", "gap", *MATCHES.values(), "Acc_Global", "Acc_Local")
    rows = []
    for method, name in dict.fromkeys((task["method"], task["task"]) for task in tasks):
        group = [task for task in tasks if (task["method"], task["task"]) == (method, name)]

        def mean(key: str, group=group) -> float:
            return float(np.mean([task[key] for task in group]))

        percents = (f"{100 * mean(key):.1f}" for key in (*MATCHES, "accuracy", "local_accuracy"))
        rows.append(
            (METHODS[method], name, f"{mean('others'):.0f}", f"{mean('scaled_gap'):.2f}", *percents)
        )
    return Grid("tasks", columns, tuple(rows), 2)


if __name__ == "__main__":
    run_command(main, parse(HeadAnalysis, description=__doc__))
