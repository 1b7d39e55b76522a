"""`cheem data`: list, prepare, verify and display the images of tasks."""

import contextlib
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from cheem_jax.cli.arguments import ADVANCED
from cheem_jax.cli.info import print_grid
from cheem_jax.core.paths import absolute, printable, shown
from cheem_jax.data.benchmarks.prepare import manual_dir, prepare, status_of
from cheem_jax.data.benchmarks.table import BY_NAME, Counts, Order, task_names
from cheem_jax.data.decode import OnProgress, decode_in_order
from cheem_jax.data.load import ImagesConfig, default_directory, load_tasks
from cheem_jax.data.records import default_data_dir
from cheem_jax.data.sources import BENCHMARKS, images_dir, plan_source
from cheem_jax.data.task import EncodedSplit, Plan, check_names
from cheem_jax.data.verify import Findings, dim_note, verify, verify_caches, without_broken
from cheem_jax.report.grid import Grid
from cheem_jax.run.progress import Progress, Terminal

IMAGE_SIZE = 96
"""Height and width in pixels of the images in a figure."""
BENCHMARK_TASKS = {name: task_names(name) for name in (*BENCHMARKS, "cil")}
"""Task names, keyed by benchmark; `cil` has the data sets for class-incremental learning."""
MOST_LISTED = 10
"""Maximum number of broken files that are printed individually."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFolder:
    """Options of commands that read data sets from a folder."""

    data_dir: Path | None = None
    """Folder of the prepared data sets; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    split_seed: Annotated[int, ADVANCED] = 0
    """Seed for making the splits that a data set lacks."""


@dataclasses.dataclass(frozen=True)
class List:
    """Options of `cheem data list`."""

    what: Annotated[str, tyro.conf.Positional] = "all"
    """mtil, vdd, cil (data sets of class-incremental learning), all, names of their tasks, or
    several of these separated by commas."""
    data_dir: Path | None = None
    """Folder of the prepared data sets; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclasses.dataclass(frozen=True)
class Prepare(DataFolder):
    """Options of `cheem data prepare`."""

    what: Annotated[str, tyro.conf.Positional]
    """mtil, vdd, cil (data sets of class-incremental learning), all, names of their tasks, or
    several of these separated by commas."""
    image_size: int | None = None
    """Also decode all images now and resize them to this many pixels; by default, the first run
    does this."""
    cache_dir: Path | None = None
    """Folder of the decoded images; default: `cheem_jax/images` in the data folder."""

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ValueError(f"image_size is {self.image_size}; expected pixels, 1 or more")

    @property
    def run_dir(self) -> Path:
        """Folder in which a stopped command resumes."""
        return self.data_dir or default_data_dir()


@dataclasses.dataclass(frozen=True)
class Verify(DataFolder):
    """Options of `cheem data verify`."""

    what: Annotated[str, tyro.conf.Positional]
    """mtil, vdd, one of their tasks, a stream file (TOML), a manifest (CSV, Parquet), tfds:NAME,
    hf:NAME (the Hugging Face hub), a folder or a zip."""
    cache_dir: Path | None = None
    """Folder of decoded images whose hashes are checked, in addition to the default folders."""
    skip_broken: bool = False
    """Exclude broken images as `cheem learn --skip-broken` does, and do not report them as
    errors."""
    json: bool = False
    """Print one JSON object instead of text."""


@dataclasses.dataclass(frozen=True)
class Show(DataFolder):
    """Options of `cheem data show`."""

    what: Annotated[str | None, tyro.conf.Positional] = None
    """Source, as for `cheem data verify`; each task gets a contact sheet."""
    stream: str | None = None
    """mtil, vdd, a stream file or a folder of tasks. Draw one figure with example images of each
    task and its numbers of classes and images."""
    split: Literal["train", "val", "test"] = "train"
    """Split of the contact sheets."""
    output: Path | None = None
    """PNG file to write, or a folder for the contact sheets of more than one task. By default, the
    file or folder is in the working directory and named after the source."""
    order: Order = "default"
    """Order of MTIL's tasks."""
    overwrite: bool = False
    """Replace existing files."""


def list_data(settings: List) -> None:
    """Print the tasks of the benchmarks and the state of each task, such as `ready`, as a table or
    as JSON."""
    data_dir = settings.data_dir or default_data_dir()
    tasks = []
    for task in map(BY_NAME.__getitem__, _task_names(settings.what)):
        status = status_of(task, data_dir)
        tasks.append(
            {
                "task": task.name,
                "benchmarks": [
                    name for name in BENCHMARK_TASKS if task.name in BENCHMARK_TASKS[name]
                ],
                "state": status.state,
                "tfds": task.spec,
                "images": task.counts and task.counts._asdict(),
                "classes": task.num_classes,
                "bytes": status.num_bytes,
                "licence": task.licence,
                "advice": status.advice,
            }
        )
    if settings.json:
        print(json.dumps({"data_dir": str(data_dir), "tasks": tasks}, indent=1))
        return
    unknown = dict.fromkeys(Counts._fields)
    rows = [
        (
            task["task"],
            " ".join(task["benchmarks"]),
            task["state"],
            task["licence"],
            *("–" if num is None else f"{num:,}" for num in (task["images"] or unknown).values()),
            f"{task['classes']:,}",
            _megabytes(task["bytes"]),
        )
        for task in tasks
    ]
    columns = ("task", "in", "state", "licence", "train", "val", "test", "classes", "on disk")
    progress = Progress()
    progress.say(f"tasks in {data_dir}")
    print_grid(Grid("", columns, tuple(rows), 4), progress.console, ("on disk", "classes"))
    for task in tasks:
        if task["advice"]:
            progress.say(f"{task['task']}: {task['advice']}")
    num_ready = sum(task["state"] == "ready" for task in tasks)
    progress.say(
        f"{num_ready} of {len(tasks)} ready; put archives that you downloaded into"
        f" {manual_dir(data_dir)}"
    )


def prepare_data(settings: Prepare) -> None:
    """Prepare the tasks one after another. Raises ValueError at the end if some tasks cannot be
    prepared."""
    data_dir = settings.run_dir
    progress = Progress()
    phase = functools.partial(_phase, progress)
    failures = {}
    for name in _task_names(settings.what):
        try:
            plan = prepare(name, data_dir, phase, seed=settings.split_seed)
            if settings.image_size is not None:
                images = ImagesConfig("cache", settings.cache_dir or images_dir(data_dir))
                load_tasks([plan], settings.image_size, images, functools.partial(phase, "decode"))
        except (ValueError, OSError) as error:
            failures[name] = " ".join(str(error).split())
            progress.say(f"{name}: not ready")
        else:
            counts = _listed(plan.counts)
            progress.say(f"{name}: ready, {counts}; splits sha256 {plan.split_sha256[:16]}")
    for name, reason in failures.items():
        print(printable(f"{name}: {reason}"), file=sys.stderr)
    if failures:
        raise ValueError(
            f"{len(failures)} task(s) could not be prepared: {', '.join(failures)}; follow the"
            " instructions above and repeat the command; prepared tasks are kept"
        )


def verify_data(settings: Verify) -> None:
    """Print the findings for every task. Raises ValueError if a task has errors."""
    name, plans = plan_source(settings.what, data_dir=settings.data_dir, seed=settings.split_seed)
    roots = [] if settings.cache_dir is None else [settings.cache_dir]
    if not all(root.is_dir() for root in roots):
        raise FileNotFoundError(f"--cache-dir {settings.cache_dir}: no such folder")
    for default in (lambda: images_dir(settings.data_dir), default_directory):
        with contextlib.suppress(ValueError):  # without a home folder, this folder does not exist
            roots.append(default())
    progress = Progress(Terminal(quiet=True) if settings.json else None)
    results = {}
    for plan in (plan.turned(True) for plan in plans):
        if settings.skip_broken:
            try:
                plan = exclude_broken(plan, progress)
            except ValueError as error:  # no image is excluded; the findings list the broken ones
                progress.say(f"note: {error}")
        with _phase(progress, "verify", plan.name, plan.num_images) as on_progress:
            findings = verify(plan, on_progress=on_progress)
        caches, corrupted = verify_caches(plan, dict.fromkeys(roots))
        results[plan.name] = {
            "split_sha256": plan.split_sha256,
            **findings.to_json(),
            "ignored": plan.ignored,
            "skipped": plan.skipped,
            "caches": caches,
            "damaged_caches": corrupted,
        }
        _print_findings(progress, plan, findings, caches, corrupted)
    if settings.json:
        print(json.dumps({"stream": name, "tasks": results}, indent=1))
    if unsound := [
        task for task, result in results.items() if result["damaged_caches"] or not result["sound"]
    ]:
        raise ValueError(
            f"{len(unsound)} of {len(plans)} task(s) have errors: {', '.join(unsound)}"
        )


def exclude_broken(plan: Plan, progress: Progress) -> Plan:
    """Remove unreadable images from a plan and print their names. Raises ValueError if there are
    too many."""
    with _phase(progress, "look", plan.name, plan.num_images) as on_progress:
        plan, reasons = without_broken(plan, on_progress=on_progress)
    for reason in reasons[:MOST_LISTED]:
        progress.say(f"excluded: {reason}")
    if reasons:
        progress.say(
            f"{plan.name}: {len(reasons):,} unreadable images excluded, {plan.num_images:,} kept"
        )
    return plan


def show_data(settings: Show) -> None:
    """Write the figures and print their file names."""
    source = settings.what or settings.stream
    if settings.stream is not None and settings.split != "train":
        raise ValueError(
            f"--split {settings.split} is for contact sheets, and the figure of --stream has"
            " training images; leave out one of them"
        )
    if source is None or None not in (settings.what, settings.stream):
        raise ValueError(
            "give either a task or --stream with a benchmark, such as `cheem data show food101`"
        )
    # imports matplotlib, which takes seconds
    from cheem_jax.report.figures import StreamRow, contact_sheet, stream_figure

    name, plans = plan_source(
        source, data_dir=settings.data_dir, order=settings.order, seed=settings.split_seed
    )
    plans = [plan.turned(True) for plan in plans]
    is_folder = settings.stream is None and len(plans) > 1
    output = settings.output or absolute(f"{_slug(name)}{'-sheets' if is_folder else '.png'}")
    if output.is_dir() and not is_folder:
        output /= f"{_slug(name)}.png"
    if (output.suffix.lower() != ".png") != is_folder:
        expected = "a folder for the figures" if is_folder else "a .png file"
        raise ValueError(f"--output is {str(output)!r}; expected {expected}")
    slugs = [_slug(plan.name) for plan in plans]
    numbers = [f"-{i}" if slugs.count(slug) > 1 else "" for i, slug in enumerate(slugs)]
    files = [output]
    if is_folder:
        files = [output / f"{slug}{end}.png" for slug, end in zip(slugs, numbers, strict=True)]
    if not settings.overwrite and (present := next((f for f in files if f.exists()), None)):
        raise ValueError(f"{shown(present)} exists; choose another --output or add --overwrite")
    folder = output if is_folder else output.parent
    if settings.stream is not None:
        rows = []
        for plan in plans:
            counts = plan.counts
            examples = _decode(plan.train, _first_of_each_class(plan.train.labels)[:5])
            rows.append(
                StreamRow(
                    plan.name,
                    len(plan.classes),
                    counts["train"],
                    counts["val"],
                    counts["test"],
                    examples,
                )
            )
        folder.mkdir(parents=True, exist_ok=True)
        stream_figure(rows, output, title=f"{name}: {len(plans)} tasks")
    else:
        sheets = []
        for plan in plans:
            part = plan.splits[settings.split]
            rows = _first_of_each_class(part.labels, max(1, 80 // len(plan.classes)))
            num = f"{len(plan.classes):,} classes · {len(part.labels):,} images"
            title = f"{plan.name} · {settings.split} · {num}"
            sheets.append((_decode(part, rows), part.labels[rows], plan.classes, title))
        # nothing is written before all images are decoded
        folder.mkdir(parents=True, exist_ok=True)
        for (images, labels, classes, title), file in zip(sheets, files, strict=True):
            contact_sheet(images, labels, classes, file, title=title)
    Progress().say(f"wrote {shown(output)}")


def _task_names(what: str) -> list[str]:
    groups = BENCHMARK_TASKS | {"all": tuple(BY_NAME)}
    words = [word.strip() for word in what.split(",")]
    check_names(words, [*BY_NAME, *groups], "the table of benchmarks")
    return list(dict.fromkeys(name for word in words for name in groups.get(word, [word])))


def _phase(
    progress: Progress, phase: str, task: str, total: int
) -> AbstractContextManager[OnProgress]:
    unit = "bytes" if phase in ("download", "check") else "images"
    return progress.phase(phase, task=task, total=total, unit=unit)


def _slug(name: str) -> str:
    return re.sub(r"[^\w-]+", "_", name)[:60]  # file systems limit names to 255 bytes


def _decode(part: EncodedSplit, rows: np.ndarray) -> np.ndarray:
    return np.concatenate(list(decode_in_order(part.files, IMAGE_SIZE, rows)))


def _first_of_each_class(labels: np.ndarray, num: int = 1) -> np.ndarray:
    """Return the rows of up to `num` images per class: the first image of each class, then the
    second image of each class, and so on."""
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(labels.max() + 1))
    ranks = np.arange(len(labels)) - starts[labels[order]]
    rows = order[ranks < num]
    return rows[np.lexsort((labels[rows], ranks[ranks < num]))]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num:,} {name}" for name, num in counts.items())


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes else "–"


def _print_findings(
    progress: Progress,
    plan: Plan,
    findings: Findings,
    caches: Sequence[str],
    corrupted: Sequence[str],
) -> None:
    (smallest, least), (largest, most) = findings.smallest_class, findings.largest_class
    sizes = f"{least:,}" if least == most else f"{least:,} ({smallest}) to {most:,} ({largest})"
    cut = f" ({' and '.join(plan.cut)} split from train)" if plan.cut else ""
    progress.say(
        f"{plan.name}: {_listed(findings.num)}{cut}; {findings.num_classes:,} classes of {sizes}"
        " training images"
    )
    lines = []
    if findings.smallest_image and findings.largest_image:
        small, large = findings.smallest_image, findings.largest_image
        lines.append(
            f"{small[0]}x{small[1]} to {large[0]}x{large[1]} pixels, {_listed(findings.modes)};"
            f" {_megabytes(findings.num_bytes)}; {plan.source}"
        )
    if note := dim_note(findings.brightest):
        lines.append(note)
    lines += [f"splits sha256 {plan.split_sha256}", *plan.ignored]
    lines += [f"decoded images intact: {folder}" for folder in caches]
    from_one = {"train", *plan.cut}
    separated = [pair for pair in findings.across if {image.split for image in pair} <= from_one]
    copies = {
        "copies in two splits (not an error: some public data sets contain them)": [
            pair for pair in findings.across if pair not in separated
        ],
        "copies that were assigned to different splits (a table with a column `split` can keep"
        " them together)": separated,
        "images under two labels": findings.contradictory,
    }
    for kind, pairs in copies.items():
        if pairs:
            one, other = (f"{image.key} ({image.label}, {image.split})" for image in pairs[0])
            lines.append(f"{kind}: {len(pairs):,}, first {one} and {other}")
    errors = [*corrupted, *findings.broken[:MOST_LISTED]]
    if len(findings.broken) > MOST_LISTED:
        num = len(findings.broken) - MOST_LISTED
        errors.append(f"and {num:,} more broken files (--json lists all)")
    for line in (*lines, *(f"ERROR: {error}" for error in errors)):
        progress.say(f"  {line}")
