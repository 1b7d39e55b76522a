"""`cheem evaluate`: labelled pictures of learned tasks against what a memory answers."""

import dataclasses
import json
import sys
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cheem_jax.cli.shared import Answering, OfData
from cheem_jax.memory import Score
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Evaluate(OfData, Answering):
    """Measure a memory on labelled pictures of tasks that it has learned."""

    task: str | None = None
    """Which task the data are, where their name differs."""
    split: Literal["test", "val", "train"] = "test"
    """Which pictures; a split that the data lack is cut as it was for learning."""
    open_set: float | None = None
    """As for `cheem predict`; a picture that is refused counts as wrong."""
    json: bool = False
    """Print JSON instead of a table."""


def evaluate_memory(settings: Evaluate) -> None:
    """One line per task, and the average."""
    progress = Progress(Console(stderr=True))
    memory = settings.open()
    tasks = settings.load(settings.plans(), memory.config.image_size, progress)
    scores = memory.evaluate(tasks, split=settings.split, task=settings.task, open_set=settings.open_set)
    if settings.json:
        print(json.dumps({"split": settings.split, "tasks": [score._asdict() for score in scores]}, indent=1))
        return
    Console(width=None if sys.stdout.isatty() else 100).print(_table(scores))


def _table(scores: list[Score]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    for name in ("pictures", "right %", "task given %", "task found %"):
        table.add_column(name, justify="right")
    for score in scores:
        shares = (score.accuracy, score.accuracy_given, score.found)
        table.add_row(Text(score.task), f"{score.num_images:,}", *(f"{100 * share:.1f}" for share in shares))
    if len(scores) > 1:
        means = np.mean([(score.accuracy, score.accuracy_given, score.found) for score in scores], axis=0)
        table.add_row("average", "", *(f"{100 * mean:.1f}" for mean in means), style="bold")
    return table
