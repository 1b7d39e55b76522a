"""`cheem data`: what is prepared and what is missing, preparing it, verifying it, looking at it."""

import contextlib
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from cheem_jax.cli.arguments import ADVANCED
from cheem_jax.core.paths import absolute, shown
from cheem_jax.data.benchmarks.prepare import manual_dir, prepare, status_of
from cheem_jax.data.benchmarks.table import BY_NAME, Order, members_of
from cheem_jax.data.decode import OnProgress, decode_in_order
from cheem_jax.data.load import ImagesConfig, default_directory, load_tasks
from cheem_jax.data.records import default_data_dir
from cheem_jax.data.sources import BENCHMARKS, images_dir, plan_source
from cheem_jax.data.task import EncodedSplit, Plan, check_names
from cheem_jax.data.verify import Findings, Listed, dim_note, verify, verify_caches, without_broken
from cheem_jax.run.progress import Progress

SHOWN = 96
"""Pixels of the images on a contact sheet."""
SAID = 10
"""Broken files that are listed one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InDataFolder:
    """What is in a data folder."""

    data_dir: Path | None = None
    """Folder of the prepared data sets; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithSplits(InDataFolder):
    """Tasks with their splits."""

    split_seed: Annotated[int, ADVANCED] = 0
    """Where a data set has no validation or test images: another number splits it otherwise."""


@dataclasses.dataclass(frozen=True)
class List(InDataFolder):
    """What of the benchmarks is prepared, what is missing, its licence and where to get it."""

    what: Annotated[str, tyro.conf.Positional] = "all"
    """mtil, vdd, all, names of their tasks, or several of these separated by commas."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclasses.dataclass(frozen=True)
class Prepare(WithSplits):
    """Get data sets in place: download and prepare what can be, and say exactly what must be done
    for the rest."""

    what: Annotated[str, tyro.conf.Positional]
    """mtil, vdd, all, names of their tasks, or several of these separated by commas."""
    image_size: int | None = None
    """Also decode and resize all images to this many pixels now; otherwise the first run does
    it."""
    cache_dir: Path | None = None
    """Where decoded images are kept; default: `cheem_jax/images` in the data folder."""

    kept: ClassVar[str] = " What is ready is kept; the same command resumes."


@dataclasses.dataclass(frozen=True)
class Verify(WithSplits):
    """Decode every image of a stream and count: broken files, exact copies across splits, wrong
    labels."""

    what: Annotated[str, tyro.conf.Positional]
    """mtil, vdd, one of their tasks, a stream file (TOML), a manifest (CSV, Parquet), tfds:NAME,
    hf:NAME (the Hugging Face hub), a folder or a zip."""
    cache_dir: Path | None = None
    """Where decoded images are kept: those of this stream are compared with their hashes."""
    skip_broken: bool = False
    """As for `cheem learn`: images that it would leave out are named and do not count as a
    fault."""
    json: bool = False
    """Print one JSON object instead of a table."""


@dataclasses.dataclass(frozen=True)
class Show(WithSplits):
    """Draw a contact sheet of each task, or with --stream the figure of a whole benchmark or
    stream."""

    what: Annotated[str | None, tyro.conf.Positional] = None
    """As for `verify`: a contact sheet of every task in it."""
    stream: str | None = None
    """mtil, vdd, a stream file or a folder of tasks: one figure of its tasks, images and
    classes."""
    split: Literal["train", "val", "test"] = "train"
    """Whose images the contact sheets show."""
    output: Path | None = None
    """The PNG file to write, for several tasks a folder; default: named after what is shown,
    here."""
    order: Order = "default"
    """The order of MTIL's tasks."""


def list_data(settings: List) -> None:
    """A table of the benchmarks' tasks, or the same as JSON."""
    data_dir = settings.data_dir or default_data_dir()
    rows = []
    for task in map(BY_NAME.__getitem__, _names(settings.what)):
        status = status_of(task, data_dir)
        rows.append(
            {
                "task": task.name,
                "benchmarks": [
                    benchmark for benchmark in BENCHMARKS if task.name in members_of(benchmark)
                ],
                "state": status.state,
                "tfds": task.spec,
                "images": task.counts._asdict(),
                "classes": task.num_classes,
                "bytes": status.num_bytes,
                "licence": task.licence,
                "advice": status.advice,
            }
        )
    if settings.json:
        print(json.dumps({"data_dir": str(data_dir), "tasks": rows}, indent=1))
        return
    table = Table(title=f"Tasks in {data_dir}", title_justify="left")
    for column in ("task", "in", "state", "train", "val", "test", "classes", "on disk", "licence"):
        table.add_column(
            column, justify="left" if column in ("task", "in", "state", "licence") else "right"
        )
    for row in rows:
        table.add_row(
            row["task"],
            " ".join(row["benchmarks"]),
            row["state"],
            *(f"{n:,}" for n in row["images"].values()),
            f"{row['classes']:,}",
            _megabytes(row["bytes"]),
            row["licence"],
        )
    progress = Progress()
    progress.console.print(table)
    for row in rows:
        if row["advice"]:
            progress.say(f"{row['task']}: {row['advice']}")
    ready = sum(row["state"] == "ready" for row in rows)
    progress.say(
        f"{ready} of {len(rows)} ready; archives that you bring yourself go into"
        f" {manual_dir(data_dir)}"
    )


def prepare_data(settings: Prepare) -> None:
    """Prepare task by task; what fails is reported at the end, and the exit status is then 2."""
    data_dir = settings.data_dir or default_data_dir()
    progress = Progress()
    failed = {}
    for name in _names(settings.what):
        try:
            plan = prepare(
                name, data_dir, functools.partial(_phase, progress), seed=settings.split_seed
            )
            if settings.image_size is not None:
                images = ImagesConfig("cache", settings.cache_dir or images_dir(data_dir))
                load_tasks(
                    [plan],
                    settings.image_size,
                    images,
                    functools.partial(_phase, progress, "decode"),
                )
            progress.say(
                f"{name}: ready, {_listed(plan.counts)}; splits sha256 {plan.split_sha256[:16]}"
            )
        except (ValueError, OSError) as error:
            failed[name] = " ".join(str(error).split())
            progress.say(f"{name}: not ready")
    if failed:
        for name, reason in failed.items():
            print(f"{name}: {reason}", file=sys.stderr)
        raise ValueError(
            f"{len(failed)} task(s) could not be prepared: {', '.join(failed)}; do what is said"
            " above and give the command again: what is ready is kept"
        )


def verify_data(settings: Verify) -> None:
    """Findings of every task; ValueError if some task is not sound."""
    name, plans = plan_source(settings.what, data_dir=settings.data_dir, seed=settings.split_seed)
    if settings.cache_dir is not None and not settings.cache_dir.is_dir():
        raise FileNotFoundError(f"--cache-dir {settings.cache_dir}: no such folder")
    roots = [] if settings.cache_dir is None else [settings.cache_dir]
    for usual in (lambda: images_dir(settings.data_dir), default_directory):
        with contextlib.suppress(ValueError):  # without a home folder, nothing is kept there
            roots.append(usual())
    progress = Progress(Console(quiet=True) if settings.json else None)
    unsound = []
    found = {}
    for plan in (plan.turned(True) for plan in plans):
        if settings.skip_broken:
            with contextlib.suppress(ValueError):  # too many: they are found again below
                plan = leave_out_broken(plan, progress)
        with _phase(progress, "verify", plan.name, plan.num_images) as on_progress:
            findings = verify(plan, on_progress=on_progress)
        caches, damaged = verify_caches(plan, dict.fromkeys(roots))
        found[plan.name] = {
            "split_sha256": plan.split_sha256,
            **findings.to_json(),
            "ignored": plan.ignored,
            "skipped": plan.skipped,
            "caches": caches,
            "damaged_caches": damaged,
        }
        if damaged or not findings.sound:
            unsound.append(plan.name)
        _tell(progress, plan, findings, caches, damaged)
    if settings.json:
        print(json.dumps({"stream": name, "tasks": found}, indent=1))
    if unsound:
        raise ValueError(
            f"{len(unsound)} of {len(plans)} task(s) are not sound: {', '.join(unsound)}"
        )


def leave_out_broken(plan: Plan, progress: Progress) -> Plan:
    """The plan without images that cannot be read, which are named; ValueError where they are too
    many."""
    with _phase(progress, "look", plan.name, plan.num_images) as on_progress:
        plan, reasons = without_broken(plan, on_progress=on_progress)
    for reason in reasons[:SAID]:
        progress.say(f"left out: {reason}")
    if reasons:
        progress.say(
            f"{plan.name}: unreadable images left out: {len(reasons):,}; kept: {plan.num_images:,}"
        )
    return plan


def show_data(settings: Show) -> None:
    """Write the figures and say where they are."""
    source = settings.what or settings.stream
    if source is None or None not in (settings.what, settings.stream):
        raise ValueError(
            "give either the task to show or --stream with a benchmark; e.g. `cheem data show"
            " food101`"
        )
    # drawing takes seconds to import, which no other command should wait for
    from cheem_jax.report.figures import StreamRow, contact_sheet, stream_figure

    name, plans = plan_source(
        source, data_dir=settings.data_dir, order=settings.order, seed=settings.split_seed
    )
    plans = [plan.turned(True) for plan in plans]
    say = Progress().say
    if settings.stream is not None:
        rows = []
        for plan in plans:
            images = _images(plan.train, _some_of_each_class(plan.train.labels)[:5])
            counts = plan.counts
            rows.append(
                StreamRow(
                    plan.name,
                    len(plan.classes),
                    counts["train"],
                    counts["val"],
                    counts["test"],
                    images,
                )
            )
        file = settings.output or absolute(f"{_slug(name)}.png")
        stream_figure(rows, file, title=f"{name}: {len(plans)} tasks")
        say(f"wrote {shown(file)}")
        return
    for plan in plans:
        part = plan.splits[settings.split]
        rows = _some_of_each_class(part.labels, max(1, 80 // len(plan.classes)))
        file = settings.output or absolute(f"{_slug(plan.name)}.png")
        if len(plans) > 1:
            file = (
                settings.output or absolute(f"{_slug(name)}-sheets")
            ) / f"{_slug(plan.name)}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        title = (
            f"{plan.name} · {settings.split} · {len(plan.classes):,} classes · {len(part.labels):,}"
            " images"
        )
        contact_sheet(_images(part, rows), part.labels[rows], plan.classes, file, title=title)
        say(f"wrote {shown(file)}")


def _names(what: str) -> list[str]:
    groups = {"all": [*BY_NAME]} | {name: list(members_of(name)) for name in BENCHMARKS}
    words = [word.strip() for word in what.split(",")]
    check_names(words, [*BY_NAME, *groups], "the table of benchmarks")
    return list(dict.fromkeys(name for word in words for name in groups.get(word, [word])))


def _phase(
    progress: Progress, phase: str, task: str, total: int
) -> AbstractContextManager[OnProgress]:
    unit = "bytes" if phase in ("download", "check") else "images"
    return progress.phase(phase, task=task, total=total, unit=unit)


def _slug(name: str) -> str:
    return re.sub(r"[^\w-]+", "_", name)


def _images(part: EncodedSplit, rows: np.ndarray) -> np.ndarray:
    return np.concatenate(list(decode_in_order(part.files, SHOWN, rows)))


def _some_of_each_class(labels: np.ndarray, num: int = 1) -> np.ndarray:
    """Rows of up to `num` images of each class, the first of every class first."""
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(labels.max() + 1))
    place = np.arange(len(labels)) - starts[labels[order]]
    chosen = order[place < num]
    return chosen[np.lexsort((labels[chosen], place[place < num]))]


def _told(image: Listed) -> str:
    return f"{image.key} ({image.label}, {image.split})"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{num:,} {name}" for name, num in counts.items())


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes else "–"


def _tell(
    progress: Progress,
    plan: Plan,
    findings: Findings,
    caches: Sequence[str],
    damaged: Sequence[str],
) -> None:
    """One task's findings for people."""
    (few, least), (many, most) = findings.smallest_class, findings.largest_class
    sizes = f"{least:,}" if least == most else f"{least:,} ({few}) to {most:,} ({many})"
    cut = f" ({' and '.join(plan.cut)} cut from train)" if plan.cut else ""
    progress.say(
        f"{plan.name}: {_listed(findings.num)}{cut}; {findings.num_classes:,} classes of {sizes}"
        " training images"
    )
    if findings.smallest_image and findings.largest_image:
        small, large = (
            "x".join(map(str, size)) for size in (findings.smallest_image, findings.largest_image)
        )
        progress.say(
            f"  {small} to {large} pixels, {_listed(findings.modes)};"
            f" {_megabytes(findings.num_bytes)}; {plan.source}"
        )
    if note := dim_note(findings.brightest):
        progress.say(f"  {note}")
    progress.say(f"  splits sha256 {plan.split_sha256}")
    for note in plan.ignored:
        progress.say(f"  {note}")
    for place in caches:
        progress.say(f"  decoded images intact: {place}")
    of_one = {"train", *plan.cut}
    by_cut = [pair for pair in findings.across if {image.split for image in pair} <= of_one]
    given = [pair for pair in findings.across if not {image.split for image in pair} <= of_one]
    copies = {
        "copies in two splits (counted, not refused: some public sets have them)": given,
        "copies that the cut put into two splits (a table with a column `split` can keep them "
        "together)": (by_cut),
        "images under two labels": findings.contradictory,
    }
    for what, pairs in copies.items():
        if pairs:
            one, other = pairs[0]
            progress.say(f"  {what}: {len(pairs):,}, first {_told(one)} and {_told(other)}")
    for line in [*damaged, *findings.broken[:SAID]]:
        progress.say(f"  NOT SOUND: {line}")
    if len(findings.broken) > SAID:
        progress.say(
            f"  NOT SOUND: and {len(findings.broken) - SAID:,} more broken files (--json lists all)"
        )
