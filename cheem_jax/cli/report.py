"""`cheem report` and `cheem tensorboard`: runs and memories as one page to look at, or as event files."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.paths import shown
from cheem_jax.report.page.assemble import page
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.run.directory import NAME
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read

PAGE = b"<!doctype html"
"""How a page begins, in lower case: what begins otherwise is not overwritten."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Draw one or several runs or memories as a single HTML page that needs no network."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directories of runs or memories, or folders that hold some at any depth."""
    out: Path | None = None
    """The file to write; default: report.html in the first folder named."""
    images: bool = True
    """Show test images of runs with right and wrong answers, where they can be found."""


def write_report_page(settings: Report) -> None:
    """Write the page and say where it is."""
    if not settings.runs:
        raise ValueError("no run was named; give a run directory, such as runs/demo after `cheem demo`")
    progress = Progress()
    file = settings.out or settings.runs[0] / "report.html"
    if file.is_dir():
        raise ValueError(f"--out {str(file)!r} is a folder; expected the name of a file to write")
    if file.exists() and not _is_page(file):
        raise ValueError(f"--out {str(file)!r} is there and is no HTML page; name another file")
    text, left_out = page(settings.runs, images=settings.images)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except OSError as error:
        raise ValueError(f"{file} cannot be written ({error.strerror}); name another file with --out") from error
    for directory, reason in left_out:
        progress.say(f"left out {shown(directory)}: {reason}")
    progress.say(f"wrote {shown(file)} ({len(text.encode()) / 1e6:.1f} MB): open it in a browser")


def _is_page(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(100).lstrip().lower().startswith(PAGE)


@dataclasses.dataclass(frozen=True)
class Tensorboard:
    """Write TensorBoard event files of runs or memories, finished or not; written again, they continue."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Directories of runs or memories."""


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
