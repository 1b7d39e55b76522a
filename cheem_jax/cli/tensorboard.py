"""`cheem tensorboard`: event files for TensorBoard, from the records of runs."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.core.paths import shown
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.run.directory import NAME
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read


@dataclasses.dataclass(frozen=True)
class Tensorboard:
    """Write TensorBoard event files of runs or memories, finished or not; written again, they continue."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Their directories."""


def write_tensorboard(settings: Tensorboard) -> None:
    """Event files into `tensorboard` in every run's directory."""
    check_installed()
    if not settings.runs:
        raise ValueError("no run is named; e.g. `cheem tensorboard runs/demo`")
    for directory in settings.runs:
        if not (directory / NAME).is_file():
            raise ValueError(f"{str(directory)!r} is not a run directory (it has no {NAME}); give what --run-dir said")
    progress = Progress()
    for directory in settings.runs:
        folder = write_events(directory)
        is_empty = not any(entry["event"] == "learned" for entry in read(directory))
        progress.say(f"wrote {shown(folder)}" + (": settings only, since no task is learned yet" if is_empty else ""))
    above = os.path.commonpath(settings.runs)
    progress.say(f"look at them with: tensorboard --logdir {shown(Path(above))}")
