"""Designs of the head: accuracy with one head over all tasks and within the task, beside what theory says of the two.

    python experiments/head_analysis.py --runs runs/compare --out runs/heads
    python experiments/head_analysis.py --train --seeds 0,1,2
    python experiments/head_analysis.py --runs runs/mtil --data-dir DATA

Of methods with one head over all classes the logits of all test images are computed again, from the run's checkpoints
and the images that it saw. Without runs: the paper's numbers and the theory alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import compare
import jax
import mtil
import numpy as np
from charts import check_folder, mean_std, write_page
from studies.heads.margins import GLOBAL_HEADS, Margins, Measured, by_task, measure, summary
from studies.heads.page import ACCURACIES, MATCHES, pages
from studies.heads.theory import match_probability, match_with_one_rival, simulated_match
from studies.paper.printed import Cell, printed
from study import Source

from cheem_jax.cli.main import parse, run_command
from cheem_jax.core.keys import key_at
from cheem_jax.report.finished import RunRecord, check_comparable, numbers_of, order_names, read, variant_of
from cheem_jax.report.table import METHODS, UPPER_BOUNDS, Grid
from cheem_jax.run.progress import Progress

COMPARED = "l2p,dualprompt,coda_prompt,s_prompts,diki,cheem"
"""Methods of the paper's table."""
GAPS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
"""Of the means, in standard deviations, which are equal."""
SIMULATED = (1, 3, 10, 30, 100, 300, 1000)
"""Numbers of rivals at which the theory is held against a simulation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadAnalysis(Source):
    """The paper's table of head designs, and when the argmax within a task is that over all tasks."""

    runs: tuple[Path, ...] = ()
    """Folders with finished runs, at any depth."""
    out: Path = Path("runs/heads")
    """Where tables and figures are written."""
    train: bool = False
    """First make the runs on the demo stream, or continue them; they are read like those of --runs."""
    seeds: str = "0"
    """Seeds of those runs, separated by commas."""
    run_dir: Path = Path("runs/compare")
    """Where those runs are kept."""
    num_draws: int = 10_000
    """Images sampled for each simulated point of the theory."""


def main(settings: HeadAnalysis) -> None:
    """Make what is missing, measure, write tables and figures."""
    progress, out, folders = Progress(), settings.out, settings.runs
    check_folder("--out", out)
    if settings.num_draws < 1:
        raise ValueError(f"--num-draws is {settings.num_draws}; expected 1 or more")
    for folder in settings.runs:
        if not folder.is_dir():
            raise ValueError(f"--runs names {folder}, which is not a folder; expected one that contains finished runs")
    if settings.train:
        if (settings.stream, settings.data_dir, settings.weights) != (None, None, None):
            raise ValueError(
                "--train runs the demo stream with its own weights; leave out --stream, --data-dir, --weights"
            )
        compare.main(compare.Compare(methods=COMPARED, seeds=settings.seeds, run_dir=settings.run_dir))
        folders = (*folders, settings.run_dir)
    runs, left_out = shown(folders)
    check_comparable(runs)
    measured = measure_all(runs, settings, progress)
    write(out, measured, left_out, theory(settings.num_draws))
    for directory, why in left_out:
        progress.say(f"left out {directory}: {why}")
    progress.say(f"{len(measured)} runs: {out / 'heads.md'}")


def write(
    out: Path,
    measured: Sequence[Measured],
    left_out: Sequence[tuple[Path, str]],
    curves: Sequence[Mapping[str, Any]],
) -> None:
    """The page with its figures, the table as CSV, and all numbers."""
    out.mkdir(parents=True, exist_ok=True)
    rows = rows_of(measured)
    page = pages(rows, measured, curves, out)
    if left_out:
        page.append("## Left out\n\n" + "\n".join(f"- {directory}: {why}" for directory, why in left_out))
    numbers = {"methods": rows, "tasks": [task for one in measured for task in by_task(one)], "theory": curves}
    write_page(out / "heads", "\n\n".join(page) + "\n", numbers, csv_of(rows))


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


def theory(num_draws: int) -> list[dict[str, Any]]:
    """Match probability over the number of rivals for each gap, by quadrature and simulation, and in closed form."""
    root, rivals = jax.random.key(0), np.unique(np.geomspace(1, 10_000, 60).round().astype(int)).tolist()
    curves = []
    for index, gap in enumerate(GAPS):
        drawn = [
            simulated_match(key_at(root, index, place), gap, 1.0, 1.0, num, num_draws=num_draws)
            for place, num in enumerate(SIMULATED)
        ]
        curves.append({
            "gap": gap,
            "one_rival": match_with_one_rival(gap, 1.0, 1.0),
            "rivals": rivals,
            "quadrature": [match_probability(gap, 1.0, 1.0, num) for num in rivals],
            "simulated": {
                "rivals": list(SIMULATED),
                "probability": [one.probability for one in drawn],
                "standard_error": [one.standard_error for one in drawn],
            },
        })  # fmt: skip
    return curves


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


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per row of the table, in %; empty where there is nothing."""
    about, measures = ("stream", "backbone", "method", "runs"), (*ACCURACIES, *MATCHES)
    columns = (*about, *(f"{name}{end}" for name in measures for end in ("", "_std")))
    lines = []
    for row in rows:
        numbers = [(row[name] or {}).get(key) for name in measures for key in ("mean", "std")]
        texts = ("" if number is None else repr(number) for number in numbers)
        lines.append(
            (*(str(row[name]) for name in about), *texts, *(row["paper"].get(name, "") for name in ACCURACIES))
        )
    return Grid("heads", (*columns, *(f"{name}_paper" for name in ACCURACIES)), tuple(lines), 4).to_csv()


if __name__ == "__main__":
    run_command(main, parse(HeadAnalysis, description=__doc__))
