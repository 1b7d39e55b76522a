"""`cheem predict`, `evaluate` and `serve`: what a memory answers, how well, and over HTTP."""

import csv
import dataclasses
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console

from cheem_jax.cli.info import print_grid
from cheem_jax.cli.memory import Answering, OfData, Predicting
from cheem_jax.cli.report import refresh_page
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.paths import shown
from cheem_jax.memory.data import files_in
from cheem_jax.memory.predictor import Asked, Prediction, Predictor, predict_files
from cheem_jax.report.grid import Grid
from cheem_jax.run.progress import Progress, on_screen
from cheem_jax.serve import Limits

COLUMNS: list[str] = [
    "file",
    "task",
    "class",
    "probability",
    "second",
    "second_probability",
    "distance",
    "blocks",
    "error",
]
OPEN_SET = 0.05
"""Default share of a task's own images that a server rejects."""
SHOW_PROGRESS_FROM = 500
"""Images from which on a bar is shown."""
BATCH_SIZES = (1, 8, 16)
"""Sizes that are compiled next to the largest one: of 32 clients about ten meet in a batch."""
SCORES_LEGEND = """\
accuracy: task and class are right; task ID given: the class is right where the task is known
task ID right: the task is right
ECE: how far confidence and accuracy are apart, the task ID given"""


@dataclasses.dataclass(frozen=True)
class Predict(Predicting):
    """Say which task and class images belong to, and which blocks answered."""

    images: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE [IMAGE ...]")
    ]
    """Images, folders of images, or - for standard input: one image, or a list of names, one a
    line."""
    format: Literal["table", "csv", "json"] = "table"
    """A table for people, CSV, or one JSON object per line."""
    json: bool = False
    """Short for --format json."""
    task: str | None = None
    """The task ID of all images, if you know it: only that task's network answers."""
    open_set: float | None = None
    """Answer `none of my tasks` for images farther from the nearest task than this share of that
    task's validation images, such as 0.05; default: every image gets a task, as in the paper."""


def predict_images(settings: Predict) -> int:
    """Answers as they come; 1 where some images could not be answered."""
    if not settings.images:
        raise ValueError(
            "no image given; name images or folders, or - to read an image or a list from standard"
            " input"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be valid text
        sys.stdout.reconfigure(errors="surrogateescape")
    files, errors = _files(settings.images)
    predictor = settings.predictor(task=settings.task, open_set=settings.open_set)
    failed = list[Asked]()

    def answers() -> Iterator[Asked]:
        progress = Progress(Console(stderr=True, quiet=len(files) < SHOW_PROGRESS_FROM))
        with progress.phase("predict", task="images", total=len(errors) + len(files)) as advance:
            for asked in itertools.chain(errors, predict_files(predictor, files)):
                if asked.prediction.error:
                    failed.append(asked)
                yield asked
                advance(1)

    match "json" if settings.json else settings.format:
        case "json":
            for asked in answers():
                print(json.dumps(asked.to_json()))
        case "csv":
            writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for asked in answers():
                writer.writerow(_row(asked))
        case "table":
            _print_table(answers())
            for asked in failed:
                print(f"{asked.file}: {asked.prediction.error}", file=sys.stderr)
    if failed:
        print(
            f"error: {len(failed)} of {len(files) + len(errors)} could not be answered",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _files(given: tuple[str, ...]) -> tuple[list[str | bytes], list[Asked]]:
    """Every image, and what cannot be looked through."""
    files = list[str | bytes]()
    errors = list[Asked]()
    for place in itertools.chain.from_iterable(
        _from_standard_input() if one == "-" else [one] for one in given
    ):
        if isinstance(place, bytes):
            files.append(place)
            continue
        try:
            found, notes = files_in(Path(place))
            files += found
            for note in notes:
                print(note, file=sys.stderr)
        except (ValueError, OSError) as error:
            errors.append(Asked(place, Prediction(error=str(error).removeprefix(f"{place}: "))))
    return files, errors


def _from_standard_input() -> list[str | bytes]:
    data = sys.stdin.buffer.read()
    if b"\0" in data:  # which no name of a file contains, and every image
        return [data]
    return [line.rstrip("\r") for line in os.fsdecode(data).split("\n") if line.strip()]


def _row(asked: Asked) -> dict[str, Any]:
    found = asked.prediction
    if found.error:
        return {"file": asked.file, "error": found.error}
    row = {"file": asked.file, "task": found.task, "distance": f"{found.near[0].distance:.6f}"}
    columns = (("class", "probability"), ("second", "second_probability"))
    for (label, probability), guess in zip(columns, found.guesses, strict=False):
        row |= {label: guess.label, probability: f"{guess.probability:.6f}"}
    return {**row, "blocks": " ".join(found.blocks)}


def _print_table(answered: Iterator[Asked]) -> None:
    rows = []
    for asked in answered:
        found = asked.prediction
        if found.error:
            continue
        best = [f"{label} {100 * probability:.0f} %" for label, probability in found.guesses[:2]]
        letters = "".join(
            block[0].upper() for block in found.blocks
        )  # as in the tables: R, A, N, S
        rows.append((asked.file, found.task or "none of my tasks", *(*best, "", "")[:2], letters))
    if rows:
        grid = Grid("", ("image", "task", "class", "second choice", "blocks"), tuple(rows), 5)
        print_grid(grid, Console(width=None if on_screen() else 160), ())


@dataclasses.dataclass(frozen=True)
class Evaluate(OfData, Answering):
    """Measure a memory on labelled images of tasks that it has learned."""

    task: str | None = None
    """The learned task that the data belong to, where their name differs."""
    split: Literal["test", "val", "train"] = "test"
    """Which images to measure on; of data without a test split `test` means all images, or those
    that were held out if the task was learned from these data."""
    open_set: float | None = None
    """As for `cheem predict`; an image that is rejected counts as wrong."""
    json: bool = False
    """Print JSON instead of a table."""


def evaluate_memory(settings: Evaluate) -> None:
    """One line per task, and the average."""
    progress = Progress(Console(stderr=True))
    memory = settings.open()
    tasks = settings.load(settings.plans("measure"), memory, progress, only=settings.split)
    scores = memory.evaluate(
        tasks, split=settings.split, task=settings.task, open_set=settings.open_set
    )
    if (
        settings.split == "test"
        and settings.open_set is None
        and not memory.is_run
        and not memory.lost
    ):
        try:
            memory.keep_scores(scores)
            refresh_page(memory.directory)
        except OSError as error:
            progress.say(
                "note: these numbers will be missing in `cheem report`, they cannot be saved"
                f" ({error})"
            )
    if settings.json:
        print(
            json.dumps(
                {"split": settings.split, "tasks": [score._asdict() for score in scores]}, indent=1
            )
        )
        return
    rows = []
    shares = np.array(
        [(s.accuracy, s.accuracy_given, s.calibration_error, s.found) for s in scores]
    )
    for score, row in zip(scores, shares, strict=True):
        rows.append((score.task, f"{score.num_images:,}", *(f"{100 * share:.1f}" for share in row)))
    if len(scores) > 1:
        rows.append(("average", "", *(f"{100 * mean:.1f}" for mean in shares.mean(axis=0))))
    columns = ("task", "images", "accuracy %", "task ID given %", "ECE %", "task ID right %")
    said = Progress()
    print_grid(Grid("", columns, tuple(rows), 1), said.console, ("images", "ECE %"))
    for score in scores:
        said.say(f"{score.task}: measured on {score.images}")
    said.say(SCORES_LEGEND)


@dataclasses.dataclass(frozen=True)
class Serve(Limits, Predicting):
    """Answer images over HTTP, with a page in the browser that shows which blocks ran (extra
    `serve`)."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reached from this machine only."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    public_host: str | None = None
    """Names by which a proxy passes requests on, such as pets.example.org, separated by commas;
    others are refused, this machine's excepted."""
    open_set: Annotated[
        float | Literal["auto", "off"], tyro.conf.arg(metavar="NUMBER|auto|off")
    ] = "auto"
    """As for `cheem predict`: the share of a task's own images that may be rejected as `none of my
    tasks`; auto: 0.05 where every task is calibrated; off: every image gets a task."""

    def predictor(self, **more: Any) -> Predictor:
        """The memory's predictor, with `more` of its settings."""
        memory = self.open()
        open_set = None if isinstance(self.open_set, str) else self.open_set
        if self.open_set == "auto" and all(
            target.distances is not None for target in memory.targets
        ):
            open_set = OPEN_SET
        return memory.predictor(top=self.top, memory_gb=self.memory_gb, open_set=open_set, **more)


def serve_memory(settings: Serve) -> None:
    """Answers until Ctrl-C or SIGTERM; running requests are finished."""
    try:
        from cheem_jax.serve.app import address_of, hosts_of, listen, make_app, make_server
    except ImportError as error:
        raise ValueError(
            f"serving needs more packages ({error}); pip install 'cheem_jax[serve]'"
        ) from error
    progress = Progress()
    usual = signal.signal(signal.SIGTERM, _stop)
    try:
        with listen(settings.host, settings.port) as listening:
            public = [
                name for one in (settings.public_host or "").split(",") if (name := one.strip())
            ]
            hosts = hosts_of(listening, settings.host, public)
            sizes = tuple(
                sorted(
                    {min(size, settings.max_batch) for size in (*BATCH_SIZES, settings.max_batch)}
                )
            )
            predictor = settings.predictor(batch_sizes=sizes)
            app = make_app(predictor, settings, hosts, name=settings.memory.resolve().name)
            server = make_server(app, settings)
            service = app.state.service

            def say() -> None:
                if service.failure is not None:
                    server.should_exit = True
                else:
                    progress.say(
                        f"ready on {address_of(listening)} for browsers and POST /predict; Ctrl-C"
                        " stops it"
                    )

            service.on_warm = say
            tasks = f"{len(predictor.classes)} task{'s' if len(predictor.classes) > 1 else ''}"
            progress.say(
                f"{shown(settings.memory)}: {tasks}; compiling for batches of"
                f" {', '.join(map(str, sizes))}"
            )
            if predictor.open_set is not None:
                progress.say(
                    "images far from every task get `none of my tasks`, about"
                    f" {100 * predictor.open_set:g} % of a task's own, too; --open-set off gives"
                    " every image a task"
                )
            elif settings.open_set == "auto":
                progress.say(
                    "every image gets a task, a foreign one, too: not every task here is calibrated"
                )
            server.run(sockets=[listening])
            if service.failure is not None:
                raise service.failure
    finally:
        signal.signal(signal.SIGTERM, usual)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped("", number)
