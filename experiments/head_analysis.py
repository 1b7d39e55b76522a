"""Designs of the head: accuracy with one head over all tasks and within the task, beside what theory says of the two.

    python experiments/head_analysis.py --runs runs/compare --out runs/heads
    python experiments/head_analysis.py --runs runs/mtil --data-dir DATA

Of methods with one head over all classes the logits of all test images are computed again, from the run's checkpoints
and the images that it saw. Without runs: the paper's numbers and the theory alone.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mtil
import numpy as np
from charts import check_folder, mean_std, write_page
from studies.heads.margins import GLOBAL_HEADS, Margins, Measured, by_task, measure, summary
from studies.heads.page import ACCURACIES, MATCHES, pages
from studies.heads.theory import match_probability, match_with_one_rival
from studies.paper.printed import Cell, printed
from study import Source

from cheem_jax.cli.main import parse, run_command
from cheem_jax.report.finished import RunRecord, check_comparable, numbers_of, order_names, read, variant_of
from cheem_jax.report.table import METHODS, UPPER_BOUNDS
from cheem_jax.run.progress import Progress

GAPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
"""Of the means, in standard deviations, which are equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAnalysis(Source):
    """The paper's table of head designs, and when the argmax within a task is that over all tasks."""

    runs: tuple[Path, ...] = ()
    """Folders with finished runs, at any depth."""
    out: Path = Path("runs/heads")
    """Where tables and figures are written."""


def main(settings: HeadAnalysis) -> None:
    """Measure, write tables and figures."""
    progress, out = Progress(), settings.out
    check_folder("--out", out)
    runs, left_out = shown(settings.runs)
    check_comparable(runs)
    measured = measure_all(runs, settings, progress)
    write(out, measured, left_out)
    for directory, why in left_out:
        progress.say(f"left out {directory}: {why}")
    progress.say(f"{len(measured)} runs: {out / 'heads.md'}")


def write(out: Path, measured: Sequence[Measured], left_out: Sequence[tuple[Path, str]]) -> None:
    """The page with its figures, and all numbers."""
    out.mkdir(parents=True, exist_ok=True)
    rows, curves = rows_of(measured), theory()
    page = pages(rows, measured, curves, out)
    if left_out:
        page.append("## Left out\n\n" + "\n".join(f"- {directory}: {why}" for directory, why in left_out))
    numbers = {"methods": rows, "tasks": [task for one in measured for task in by_task(one)], "theory": curves}
    write_page(out / "heads", "\n\n".join(page) + "\n", numbers)


def shown(folders: Sequence[Path]) -> tuple[list[RunRecord], list[tuple[Path, str]]]:
    """The runs that the table is about, and what is left out."""
    runs, left_out = read(folders)
    orders, kept = order_names(runs), []
    for run in runs:
        order, variant = orders[run.results["stream"], run.order], variant_of(run)
        if run.results["method"] in UPPER_BOUNDS:
            left_out.append((run.directory, "an upper bound is given the task"))
        elif order != "default" or variant:
            left_out.append((run.directory, f"a run of its own kind ({variant or order})"))
        else:
            kept.append(run)
    return kept, left_out


def measure_all(runs: Sequence[RunRecord], settings: HeadAnalysis, progress: Progress) -> list[Measured]:
    """Margins of the runs with one head over all classes; images and weights are read once for all that share them.

    Raises ValueError where images or weights are not those that a run saw.
    """
    sources: dict[tuple[object, ...], tuple[mtil.Loaded, dict[Any, Any]]] = {}
    found = []
    for run in runs:
        margins: list[Margins] = []
        if run.results["method"] in GLOBAL_HEADS:
            place = (*run.place, run.order, run.config["image_size"], "pixels" in run.config)
            if place not in sources:
                sources[place] = mtil.load(settings.settings(run.config, run.config["tasks"]), progress), {}
            loaded, workshop = sources[place]
            progress.say(f"logits of {run.directory}")
            margins = measure(run, loaded.stream, loaded.pretrained, workshop)
        found.append(Measured(run, margins))
    return found


def theory() -> list[dict[str, Any]]:
    """Match probability over the number of rivals for each gap, by quadrature, and in closed form for one rival."""
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
    """A row per stream, backbone and method: mean and deviation over runs (n - 1), in %, and the paper's.

    Raises ValueError for runs that may not stand in one table.
    """
    check_comparable([one.run for one in measured])
    theirs = printed()["heads"]
    methods = list(dict.fromkeys([cell.method for cell in theirs] + [*METHODS]))
    found = sorted((methods.index(one.method), *one.run.place) for one in measured)
    ours = [(stream, backbone, methods[index]) for index, stream, backbone in found]
    rows = []
    for place in dict.fromkeys([*(cell[:3] for cell in theirs), *ours]):
        own = [one for one in measured if (*one.run.place, one.method) == place]
        numbers = [numbers_of(one.run.results) for one in own]
        pooled = [summary(one.margins) for one in own if one.margins]
        printed_cells = {name: theirs.get(Cell(*place, name)) for name in ACCURACIES}
        rows.append({
            **dict(zip(("stream", "backbone", "method"), place, strict=True)),
            "runs": len(own),
            **{name: mean_std([number[name, ""] for number in numbers]) for name in ACCURACIES},
            **{name: mean_std([100 * run[name] for run in pooled]) for name in MATCHES},
            "paper": {name: cell.text for name, cell in printed_cells.items() if cell},
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    run_command(main, parse(HeadAnalysis, description=__doc__))
