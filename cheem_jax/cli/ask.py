"""`cheem predict`, `evaluate` and `serve`: predict with a memory, measure its accuracy, and serve
it over HTTP."""

import contextlib
import csv
import dataclasses
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

from cheem_jax.cli.info import print_grid
from cheem_jax.cli.memory import Answering, OfData, Predicting
from cheem_jax.core.interruption import Stopped
from cheem_jax.core.paths import absolute, printable, shown
from cheem_jax.data.files import HEIF_MAGIC, MAGIC
from cheem_jax.memory.data import list_images
from cheem_jax.memory.predictor import FilePrediction, Prediction, Predictor, predict_files
from cheem_jax.report.grid import Grid
from cheem_jax.report.page.assemble import refresh_memory_page
from cheem_jax.run.progress import Progress, Terminal, on_screen
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
"""Expected share of a task's images that `cheem serve` rejects by default."""
SHOW_PROGRESS_FROM = 500
"""Minimum number of images for a progress bar."""
BATCH_SIZES = (1, 8, 16)
"""Batch sizes for which `cheem serve` compiles functions in addition to `--max-batch`. With 32
clients, a batch contains only about 10 requests, so small sizes avoid padding."""
SCORES_LEGEND = """\
accuracy: share of images with the right task and class (task-agnostic)
task ID given: share with the right class, given the task ID
task ID right: share with the right task
ECE: expected calibration error, with the task ID given"""


@dataclasses.dataclass(frozen=True)
class Predict(Predicting):
    """Options of `cheem predict`."""

    images: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE [IMAGE ...]")
    ]
    """Images, folders of images, or - for standard input: one image, or a list of file names, one
    per line or separated by NUL."""
    format: Literal["table", "csv", "json"] = "table"
    """Format of the output: a table, CSV, or one JSON object per line."""
    json: bool = False
    """Short for --format json."""
    task: Annotated[str | None, tyro.conf.DisallowNone] = None
    """Task ID of all images, if it is known; the router is not used then."""
    open_set: float | None = None
    """Share of a task's images that can be rejected, such as 0.05: predict `none of my tasks` for
    an image if at most this share of the validation images of its nearest task are farther from the
    task. By default, every image is assigned to a task, as in the paper."""


def predict_images(settings: Predict) -> int:
    """Print predictions as they are computed; return 1 if some images cannot be read."""
    if not settings.images:
        raise ValueError(
            "no image given; give images or folders, or - to read an image or a list from standard"
            " input"
        )
    if settings.json and settings.format == "csv":
        raise ValueError("--json and --format csv contradict each other; leave out one of them")
    images = _find_images(settings.images)
    files = [image for image in images if not isinstance(image, FilePrediction)]
    predictor = settings.predictor(task=settings.task, open_set=settings.open_set)
    failures = list[FilePrediction]()

    def predictions() -> Iterator[FilePrediction]:
        progress = Progress(Terminal(stderr=True, quiet=len(files) < SHOW_PROGRESS_FROM))
        answers = predict_files(predictor, files)
        with progress.phase("predict", task="images", total=len(images)) as advance:
            for image in images:
                answer = image if isinstance(image, FilePrediction) else next(answers)
                if answer.prediction.error:
                    failures.append(answer)
                yield answer
                advance(1)

    match "json" if settings.json else settings.format:
        case "json":
            for answer in predictions():
                print(json.dumps(answer.to_json()))
        case "csv":
            writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for answer in predictions():
                row = _csv_row(answer)
                writer.writerow({column: printable(text or "") for column, text in row.items()})
        case "table":
            rows = [_table_row(answer) for answer in predictions() if not answer.prediction.error]
            if rows:
                columns = ("image", "task", "class", "second choice", "blocks")
                console = Terminal(width=None if on_screen() else 160)
                print_grid(Grid("", columns, tuple(rows), 5), console)
            for answer in failures:
                print(printable(f"{answer.file}: {answer.prediction.error}"), file=sys.stderr)
    if failures:
        print(f"error: {len(failures)} of {len(images)} images cannot be read", file=sys.stderr)
    return int(bool(failures))


def _find_images(sources: tuple[str, ...]) -> list[str | bytes | FilePrediction]:
    """Return the file names or contents of all images, and the errors of sources that cannot be
    read, in the order of the sources. Raises ValueError for an empty source, such as an unset
    variable of a shell."""
    images = list[str | bytes | FilePrediction]()
    for source in sources:
        if not source:
            absolute(source)  # raises
        for place in _read_standard_input() if source == "-" else [source]:
            if isinstance(place, bytes):
                images.append(place)
                continue
            try:
                files, notes = list_images(place)
            except (ValueError, OSError) as error:
                reason = str(error).removeprefix(f"{place}: ")
                images.append(FilePrediction(place, Prediction(error=reason)))
            else:
                images += files
                for note in notes:
                    print(printable(note), file=sys.stderr)
    return images


def _read_standard_input() -> list[str | bytes]:
    """Return the image, or the file names, one per line or each followed by a NUL."""
    if sys.stdin is None:
        raise ValueError("standard input is closed; give images or folders instead of -")
    data = sys.stdin.buffer.read()
    if not data.strip():
        raise ValueError("standard input is empty; expected an image, or one file name per line")
    by_nul = data.removesuffix(b"\0").split(b"\0")
    if MAGIC.match(data) or HEIF_MAGIC.match(data) or (b"\0" in data and not all(by_nul)):
        return [data]  # other files than lists contain a NUL at their start, or two next to another
    if b"\0" in data:
        return [os.fsdecode(name) for name in by_nul]
    return [line.rstrip("\r") for line in os.fsdecode(data).split("\n") if line.strip()]


def _csv_row(answer: FilePrediction) -> dict[str, str | None]:
    prediction = answer.prediction
    if prediction.error:
        return {"file": answer.file, "error": prediction.error}
    distance = f"{prediction.near[0].distance:.6f}"
    row: dict[str, str | None] = {
        "file": answer.file,
        "task": prediction.task,  # None for a rejected image
        "distance": distance,
    }
    columns = (("class", "probability"), ("second", "second_probability"))
    for (label, probability), guess in zip(columns, prediction.guesses, strict=False):
        row |= {label: guess.label, probability: f"{guess.probability:.6f}"}
    return {**row, "blocks": " ".join(prediction.blocks)}


def _table_row(answer: FilePrediction) -> tuple[str, ...]:
    prediction = answer.prediction
    best = [f"{label} {100 * probability:.0f} %" for label, probability in prediction.guesses[:2]]
    letters = "".join(block[0].upper() for block in prediction.blocks)  # R, A, N, S
    return answer.file, prediction.task or "none of my tasks", *(*best, "", "")[:2], letters


@dataclasses.dataclass(frozen=True)
class Evaluate(OfData, Answering):
    """Options of `cheem evaluate`."""

    task: Annotated[str | None, tyro.conf.DisallowNone] = None
    """Name of the learned task, if it differs from the name of the data."""
    split: Literal["test", "val", "train"] = "test"
    """Split to measure on. For data without a test split, `test` consists of the images that were
    held out when the task was learned from these data, or of all images if it was learned from
    other data. An extension cuts no test images from its data, so these are measured whole."""
    open_set: float | None = None
    """Share of a task's images that can be rejected, as for `cheem predict`; a rejected image
    counts as wrong."""
    unknown: Path | None = None
    """Folder of images that belong to no task of the memory. Also measure how well --open-set
    separates them from the images of DATA, over all thresholds: AUROC and FPR95."""
    json: bool = False
    """Print JSON instead of a table."""


def evaluate_memory(settings: Evaluate) -> None:
    """Print the scores of each task and their average."""
    progress = Progress(Terminal(stderr=True))
    memory = settings.open()
    tasks = settings.load(settings.plans("measure"), memory, progress, only=settings.split)
    unknown = None
    if settings.unknown is not None:
        unknown = memory.evaluate_open_set(
            tasks, settings.unknown, split=settings.split, task=settings.task
        )
    scores = memory.evaluate(
        tasks, split=settings.split, task=settings.task, open_set=settings.open_set
    )
    is_default = settings.split == "test" and settings.open_set is None
    if is_default and not memory.is_run and not memory.lost:
        try:
            memory.store_scores(scores)
            refresh_memory_page(memory.directory)
        except (OSError, ValueError) as error:
            progress.say(f"note: these scores cannot be saved for `cheem report` ({error})")
    if settings.json:
        entries = [score._asdict() for score in scores]
        report = {"split": settings.split, "tasks": entries}
        if unknown is not None:
            report["open_set"] = unknown._asdict()
        print(json.dumps(report, indent=1))
        return
    shares = np.array(
        [(s.accuracy, s.accuracy_given, s.calibration_error, s.task_accuracy) for s in scores]
    )
    rows = [
        (score.task, f"{score.num_images:,}", *(f"{100 * share:.1f}" for share in row))
        for score, row in zip(scores, shares, strict=True)
    ]
    if len(scores) > 1:
        rows.append(("average", "", *(f"{100 * mean:.1f}" for mean in shares.mean(axis=0))))
    columns = ("task", "images", "accuracy %", "task ID given %", "ECE %", "task ID right %")
    output = Progress()
    print_grid(Grid("", columns, tuple(rows), 1), output.console, ("images", "ECE %"))
    for score in scores:
        output.say(f"{score.task}: measured on {score.images}")
    output.say(SCORES_LEGEND)
    if unknown is not None:
        output.say(
            f"open set, {unknown.num_known:,} known and {unknown.num_unknown:,} unknown images:"
            f" AUROC {100 * unknown.auroc:.1f} %, FPR95 {100 * unknown.fpr95:.1f} % (unknown images"
            " that are accepted if 95 % of the known ones are)"
        )


@dataclasses.dataclass(frozen=True)
class Serve(Limits, Predicting):
    """Options of `cheem serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""
    port: int = 8000
    """Port to listen on; 0 selects a free port."""
    public_host: str | None = None
    """Host names of requests that a proxy forwards, such as pets.example.org, separated by commas.
    Requests for hosts other than these and this machine's names are refused."""
    open_set: Annotated[
        float | Literal["auto", "off"], tyro.conf.arg(metavar="NUMBER|auto|off")
    ] = "auto"
    """Share of a task's images that can be rejected as `none of my tasks`, as for `cheem predict`.
    `auto` is 0.05 if every task is calibrated; with `off`, every image is assigned to a task."""

    def predictor(self, **options: Any) -> Predictor:
        """Return a predictor of the memory; `options` are passed to `OpenMemory.predictor`."""
        memory = self.open()
        open_set = None if isinstance(self.open_set, str) else self.open_set
        is_calibrated = all(target.distances is not None for target in memory.targets)
        if self.open_set == "auto" and is_calibrated:
            open_set = OPEN_SET
        return memory.predictor(
            top=self.top, memory_gb=self.memory_gb, open_set=open_set, **options
        )


def serve_memory(settings: Serve) -> None:
    """Serve until Ctrl-C or SIGTERM, and then finish the running requests."""
    try:
        from cheem_jax.serve.app import host_names, listen, make_app, make_server, server_url
    except ImportError as error:
        raise ValueError(
            f"serving needs more packages ({error}); pip install 'cheem_jax[serve]'"
        ) from error
    progress = Progress()
    handler = signal.signal(signal.SIGTERM, _stop)
    try:
        with listen(settings.host, settings.port) as listening:
            names = [name.strip() for name in (settings.public_host or "").split(",")]
            hosts = host_names(listening, settings.host, [name for name in names if name])
            sizes = {min(size, settings.max_batch) for size in (*BATCH_SIZES, settings.max_batch)}
            predictor = settings.predictor(batch_sizes=tuple(sorted(sizes)))
            app = make_app(predictor, settings, hosts, name=settings.memory.resolve().name)
            server = make_server(app, settings)
            service = app.state.service

            def on_warm() -> None:
                if service.failure is not None:
                    server.should_exit = True
                    return
                with contextlib.suppress(OSError):  # the server runs on if nobody reads its output
                    progress.say(
                        f"ready on {server_url(listening)} for browsers and POST /predict; Ctrl-C"
                        " stops it"
                    )

            service.on_warm = on_warm
            num = len(predictor.classes)
            progress.say(
                f"{shown(settings.memory)}: {num} task{'s' if num > 1 else ''}; compiling for"
                f" batches of {', '.join(map(str, sorted(sizes)))}"
            )
            if predictor.open_set is not None:
                progress.say(
                    "images far from every task are rejected as `none of my tasks`, and so are"
                    f" about {100 * predictor.open_set:g} % of a task's images; with --open-set"
                    " off, every image is assigned to a task"
                )
            elif settings.open_set == "auto":
                progress.say(
                    "every image is assigned to a task, because not all tasks are calibrated"
                )
            server.run(sockets=[listening])
            if service.failure is not None:
                raise service.failure
    finally:
        signal.signal(signal.SIGTERM, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped("", number)
