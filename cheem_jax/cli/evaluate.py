"""`cheem evaluate`: labelled pictures of learned tasks against what a memory answers."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cheem_jax.data.load import ImagesConfig, load_tasks
from cheem_jax.data.sources import cache_dir_of, plan_source
from cheem_jax.memory import Score, open_memory
from cheem_jax.memory.data import decoding
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure a memory on labelled images of tasks that it has learned."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder, or a finished run of CHEEM."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """As for `cheem learn`; tasks and classes are found by their names."""
    task: str | None = None
    """Which task the data are, where their name differs."""
    tasks: str | None = None
    """Names of the data's tasks to look at, separated by commas; default: all."""
    split: Literal["test", "val", "train"] = "test"
    """Which images; a split that the data lack is cut as it was for learning."""
    split_seed: int = 0
    """As for `cheem learn`."""
    open_set: float | None = None
    """As for `cheem predict`; an image that is refused counts as wrong."""
    json: bool = False
    """Print JSON instead of a table."""
    data_dir: Path | None = None
    """Where prepared data sets lie; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded images are kept."""
    weights: Path | None = None
    """Weights for a run, which contains none; default: as the run had them."""
    usable: bool = False
    """If tasks of a memory are corrupted, answer with the others."""


def evaluate_memory(settings: Evaluate) -> None:
    """One line per task, and the average."""
    progress = Progress(Console(stderr=True))
    names = None if settings.tasks is None else [name.strip() for name in settings.tasks.split(",")]
    memory = open_memory(settings.memory, weights=settings.weights, usable=settings.usable)
    _, plans = plan_source(settings.data, names, data_dir=settings.data_dir, seed=settings.split_seed)
    cache_dir = settings.images.cache_dir or cache_dir_of(settings.data, settings.data_dir)
    images = dataclasses.replace(settings.images, cache_dir=cache_dir)
    tasks = load_tasks(plans, memory.config.image_size, images, decoding(progress))
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
