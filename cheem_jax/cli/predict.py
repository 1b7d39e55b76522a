"""`cheem predict`: which task and class pictures belong to."""

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cheem_jax.memory import open_memory
from cheem_jax.memory.predictor import Asked, Prediction, files_in, predict_files
from cheem_jax.run.progress import Progress

COLUMNS = ("file", "task", "class", "probability", "second", "second_probability", "distance", "blocks", "error")


@dataclasses.dataclass(frozen=True)
class Predict:
    """Say which task and class pictures belong to, and which blocks answered."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder, or a finished run of CHEEM."""
    pictures: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PICTURE")]
    """Pictures, folders of pictures, or - for a list on standard input, one a line."""
    format: Literal["table", "csv", "json"] = "table"
    """A table for people, CSV, or one JSON object per line."""
    json: bool = False
    """Short for --format json."""
    top: int = 5
    """Classes to tell of each picture (in JSON; the table shows two)."""
    open_set: float | None = None
    """Answer `none of my tasks` for pictures farther from the nearest task than this share of its own validation
    pictures, such as 0.05; default: every picture gets a task, as in the paper."""
    task: str | None = None
    """The true task of all pictures, if you know it: its network alone answers."""
    memory_gb: float | None = None
    """Memory for the networks of tasks that are ready; default: a quarter of the device's. What was used longest ago is
    dropped and made again when it is needed; answers are the same."""
    weights: Path | None = None
    """Weights of a run, which holds none; default: as the run had them."""
    usable: bool = False
    """Where tasks of a memory are damaged, answer with the others."""


def predict_images(settings: Predict) -> int:
    """Answers as they come; 1 where some pictures could not be answered."""
    if not settings.pictures:
        raise ValueError("no picture given; name pictures or folders, or - to read a list from standard input")
    for stream in (sys.stdin, sys.stdout):  # names of files need not be valid text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")
    files, errors = _files(settings.pictures)
    predictor = open_memory(settings.memory, weights=settings.weights, usable=settings.usable).predictor(
        top=settings.top, open_set=settings.open_set, task=settings.task, memory_gb=settings.memory_gb
    )
    wanted = "json" if settings.json else settings.format
    answered = _answers(predictor, files, errors)
    num_failed = {"json": _as_json, "csv": _as_csv, "table": _as_table}[wanted](answered)
    if num_failed:
        print(f"error: {num_failed} of {len(files) + len(errors)} could not be answered", file=sys.stderr)
    return 1 if num_failed else 0


def _files(given: tuple[str, ...]) -> tuple[list[str], list[Asked]]:
    """Every picture, and what cannot be looked through."""
    places = [
        line
        for one in given
        for line in ([line.rstrip("\r\n") for line in sys.stdin if line.strip()] if one == "-" else [one])
    ]
    files, errors = list[str](), list[Asked]()
    for place in places:
        try:
            files += files_in(Path(place))
        except (ValueError, OSError) as error:
            errors.append(Asked(place, None, str(error).removeprefix(f"{place}: ")))
    return files, errors


def _answers(predictor, files: list[str], errors: list[Asked]) -> Iterator[Asked]:
    progress = Progress(Console(stderr=True))
    yield from errors
    if len(files) < SHOW_PROGRESS_FROM:
        yield from predict_files(predictor, files)
        return
    with progress.phase("predict", task="pictures", total=len(files)) as advance:
        for asked in predict_files(predictor, files):
            yield asked
            advance(1)


SHOW_PROGRESS_FROM = 500
"""Pictures from which on a bar is shown."""


def _as_json(answered: Iterator[Asked]) -> int:
    num_failed = 0
    for asked in answered:
        print(json.dumps(asked.to_json()))
        num_failed += asked.prediction is None
    return num_failed


def _as_csv(answered: Iterator[Asked]) -> int:
    writer, num_failed = csv.writer(sys.stdout, lineterminator="\n"), 0
    writer.writerow(COLUMNS)
    for asked in answered:
        writer.writerow(_row(asked))
        num_failed += asked.prediction is None
    return num_failed


def _row(asked: Asked) -> list[str]:
    found = asked.prediction
    if found is None:
        return [asked.file, *[""] * 7, asked.error]
    second = found.guesses[1] if len(found.guesses) > 1 else None
    return [
        asked.file,
        found.task or "",
        found.label or "",
        "" if found.probability is None else f"{found.probability:.6f}",
        "" if second is None else second.label,
        "" if second is None else f"{second.probability:.6f}",
        f"{found.near[0].distance:.6f}",
        " ".join(found.blocks),
        "",
    ]


def _as_table(answered: Iterator[Asked]) -> int:
    table, failed = Table(box=None, pad_edge=False), list[Asked]()
    for name in ("picture", "task", "class", "second choice", "blocks"):
        table.add_column(name, overflow="fold")
    for asked in answered:
        found = asked.prediction
        if found is None:
            failed.append(asked)
            continue
        best = [f"{label} {100 * probability:.0f} %" for label, probability in found.guesses[:2]]
        first, second = (*best, "", "")[:2]
        row = (asked.file, found.task or "none of my tasks", first, second, _letters(found))
        table.add_row(*map(Text, row))
    console = Console(width=None if sys.stdout.isatty() else 160)
    if table.row_count:
        console.print(table)
    for asked in failed:
        print(f"{asked.file}: {asked.error}", file=sys.stderr)
    return len(failed)


def _letters(found: Prediction) -> str:
    """One letter per block, as in the tables: R, A, N, S."""
    return "".join(block[0].upper() for block in found.blocks)
