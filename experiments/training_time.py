"""Seconds of training by method and phase (the paper's table of training times).

    python experiments/training_time.py
    python experiments/training_time.py --stream mtil --preset paper --backbone vit_base --data-dir DATA
    python experiments/training_time.py --run-dir runs/compare

Runs what is missing as `compare.py` does, whose folder may be given: what is finished there is not run again. The first
run of a process compiles what others then share, so compiling is told beside: seconds of the whole run, measuring
included.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare
import numpy as np
from charts import mean_std, spread, write_page
from study import Found, run_all
from tables import Tables
from tables import main as write_tables

from cheem_jax.cli.main import parse, run_command
from cheem_jax.report.table import METHODS, NONE, Grid
from cheem_jax.run.progress import Progress

TIMED = "cheem,lora_cl,s_prompts,l2p,dualprompt,coda_prompt,diki"


@dataclasses.dataclass(frozen=True)
class TrainingTime(compare.Compare):
    """What training costs."""

    methods: str = TIMED
    """Names separated by commas, or all; default: those of the paper's table."""
    run_dir: Path = Path("runs/training_time")
    """Where runs and tables are kept; what is unfinished is continued."""


def main(settings: TrainingTime) -> None:
    """Run what is missing, then write a row per method."""
    progress = Progress()
    variants = compare.variants_of(settings, compare.methods_of(settings.methods))
    found = run_all(settings, variants, progress, lambda found: write(settings.run_dir, found))
    progress.console.print(write(settings.run_dir, found).to_rich())
    write_tables(Tables(runs=(settings.run_dir,), out=settings.run_dir / "tables", only="training_time"))


def phases_of(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Seconds per task of each phase of learning, mean and deviation over runs; evaluation is none of them."""
    names = dict.fromkeys(phase for run in runs for task in run["tasks"] for phase in task["seconds"])
    return {
        name: mean_std([float(np.mean([task["seconds"].get(name, 0.0) for task in run["tasks"]])) for run in runs])
        for name in names if name != "evaluation"
    }  # fmt: skip  # pyright: ignore[reportReturnType]


def write(directory: Path, found: Found) -> Grid:
    """The table as Markdown and CSV, and its numbers."""
    measured = {name: phases_of(runs) for name, runs in found.items()}
    totals = {name: sum(each["mean"] for each in phases.values()) for name, phases in measured.items()}
    rows = []
    for name, phases in measured.items():
        compiling = float(np.mean([run["compile"]["seconds"] for run in found[name]]))
        largest = sorted(phases.items(), key=lambda item: -item[1]["mean"])[:4]
        told = [f"{phase} {spread(each)}" for phase, each in largest if each["mean"] >= 0.005 * totals[name]]
        beside = f"{totals[name] / totals['cheem']:.2f}" if totals.get("cheem") else NONE
        runs = str(len(found[name]))
        rows.append((METHODS[name], runs, f"{totals[name]:,.1f}", beside, f"{compiling:.1f}", ", ".join(told)))
    first = next(iter(found.values()))[0]
    devices = {run["engine"]["device"] for runs in found.values() for run in runs}
    if len(devices) > 1:
        raise ValueError(f"{directory} contains runs of several devices: {', '.join(sorted(devices))}; time them apart")
    columns = ("method", "runs", "seconds\nper task", "of CHEEM's", "compiling,\nwhole run", "longest phases")
    title = f"{first['stream']}, {first['backbone']}, {first['preset']}, {first['engine']['device']}: training per task"
    grid = Grid(title, columns, tuple(rows), 1)
    write_page(directory / "training_time", f"# {title}\n\n{grid.to_markdown()}\n", measured, grid)
    return grid


if __name__ == "__main__":
    parsed = parse(TrainingTime, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
