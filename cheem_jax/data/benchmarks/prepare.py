"""Prepare the data sets of a benchmark, and plan its tasks with the paper's splits.

All files are in one data folder, which TFDS also uses. Prepared data sets are in
`<name>[/<config>]/<version>`, and their archives are in `downloads/manual`.
"""

import contextlib
import hashlib
import importlib.util
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

import filelock

from cheem_jax.core.atomic import write_atomically
from cheem_jax.data.benchmarks.archives import MissingArchive
from cheem_jax.data.benchmarks.builders import prepare_from_folder
from cheem_jax.data.benchmarks.table import BY_NAME, Archive, BenchmarkTask
from cheem_jax.data.decode import OnProgress
from cheem_jax.data.records import Row, find_prepared, import_tfds, open_prepared, plan_rows
from cheem_jax.data.task import Plan

Work = Callable[[str, str, int], AbstractContextManager[OnProgress]]
"""Function that returns a context manager for one phase of the preparation. The context manager
yields a function to report progress. The arguments are the name of the phase, the name of the task,
and the amount of work (number of bytes for archives, number of images for other work)."""


class Preparation(NamedTuple):
    """State of a task's preparation, and advice on the next step."""

    state: Literal["ready", "archives", "missing"]
    advice: str
    num_bytes: int
    """Size in bytes of the prepared data set or, if it is not prepared, of its existing
    archives."""


def manual_dir(data_dir: Path) -> Path:
    """Return TFDS's folder for archives that the user provides."""
    return data_dir / "downloads" / "manual"


def status_of(task: BenchmarkTask, data_dir: Path) -> Preparation:
    """Return the state of a task's preparation. Only the existence of files is checked."""
    with contextlib.suppress(FileNotFoundError):
        directory = find_prepared(task.spec, data_dir)
        return Preparation(
            "ready", "", sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
        )
    place = manual_dir(data_dir)
    existing = {
        archive: [place / name for name in archive.names if (place / name).exists()]
        for archive in task.archives
    }
    absent = [archive for archive, paths in existing.items() if not paths]
    size = sum(
        path.stat().st_size for paths in existing.values() for path in paths[:1] if path.is_file()
    )
    command = f"`cheem data prepare {task.name} --data-dir {shlex.quote(str(data_dir))}`"
    if task.archives and not absent:
        return Preparation("archives", command, size)
    reason = f" ({task.by_hand})" if task.by_hand else ""
    if by_hand := [archive.file for archive in absent if archive.url is None]:
        command = f"put {', '.join(by_hand)} into {place}{reason}, then {command}"
    elif _lacks_tensorflow(task):
        command = f"`pip install 'cheem_jax[prepare]'`{reason}, then {command}"
    return Preparation("missing", command, size)


def _lacks_tensorflow(task: BenchmarkTask) -> bool:
    """Return whether a task needs TensorFlow and TensorFlow is not installed (checked without
    importing it)."""
    return (
        not task.archives
        and task.needs_tensorflow
        and importlib.util.find_spec("tensorflow") is None
    )


def prepare(name: str, data_dir: Path, phase: Work, *, seed: int = 0) -> Plan:
    """Prepare a task if necessary, check its numbers of images, and record its splits.

    Raises ValueError or OSError with a hint for the user. After an error, existing data are
    unchanged.
    """
    task = BY_NAME[name]
    # Only one process at a time prepares data sets in a data folder, because tasks share archives.
    lock = filelock.FileLock(data_dir / "cheem_jax" / "prepare.lock")
    Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as alone:
        try:
            alone.enter_context(lock.acquire(timeout=1))
        except filelock.Timeout:
            with phase("wait", f"{name}, for another process that prepares data sets", 0):
                alone.enter_context(lock.acquire())
        try:
            find_prepared(task.spec, data_dir)
        except FileNotFoundError:
            import_tfds()
            for leftover in (data_dir / task.builder).glob(f"incomplete.*_{task.version}"):
                shutil.rmtree(leftover)  # remove the leftovers of a killed process
            manual_dir(data_dir).mkdir(parents=True, exist_ok=True)
            if task.archives:
                _from_archives(task, data_dir, phase)
            else:
                _from_stock_builder(task, data_dir, phase)
        with phase("index", name, sum(task.counts or ())) as on_progress:
            return plan_of(task, data_dir, seed=seed, on_progress=on_progress)


def _from_archives(task: BenchmarkTask, data_dir: Path, phase: Work) -> None:
    def build() -> None:
        with phase("prepare", task.name, sum(task.counts or ())) as on_progress:
            prepare_from_folder(task.builder, data_dir, place, on_progress)

    place = manual_dir(data_dir)
    present = [archive for archive in task.archives if (place / archive.file).is_file()]
    _get(task.name, present, place, phase)
    try:
        build()
    except MissingArchive as error:
        if task.by_hand:
            raise FileNotFoundError(f"{error}; {task.by_hand}") from error
        _get(
            task.name,
            [archive for archive in task.archives if archive not in present],
            place,
            phase,
        )
        build()


def _get(name: str, archives: Sequence[Archive], place: Path, phase: Work) -> None:
    """Download missing archives, and verify existing ones.

    Raises ValueError for an archive whose hash differs from the published one.
    """
    # imported here, because the module `download` needs libraries of the extra `datasets`
    from cheem_jax.data.benchmarks.download import download

    for archive in archives:
        file = place / archive.file
        if not file.is_file():
            assert archive.url is not None
            with phase("download", f"{name} {archive.file}", archive.num_bytes) as on_progress:
                download(archive.url, file, archive.hash, on_progress=on_progress)
            continue
        if not archive.hash:
            continue
        kind, _, wanted = archive.hash.rpartition(":")
        size = file.stat().st_size
        with (
            file.open("rb") as stream,
            phase("check", f"{name} {archive.file}", size) as on_progress,
        ):
            digest = hashlib.file_digest(stream, kind or "sha256").hexdigest()
            on_progress(size)
        if digest != wanted:
            raise ValueError(
                f"{file} ({size:,} bytes) has the {kind or 'sha256'} {digest}, but the published"
                f" archive has {wanted}; it is truncated or another version: move it away and"
                " download it again"
            )


def _from_stock_builder(task: BenchmarkTask, data_dir: Path, phase: Work) -> None:
    if _lacks_tensorflow(task):
        raise ValueError(
            f"preparing {task.builder!r} needs TensorFlow (reading it does not): `pip install"
            " 'cheem_jax[prepare]'`, then repeat the command"
        )
    _get(task.name, registered(task, data_dir), manual_dir(data_dir), phase)
    with phase("prepare", task.name, sum(task.counts or ())):
        prepare_stock(task.spec, data_dir)


def registered(task: BenchmarkTask, data_dir: Path) -> list[Archive]:
    """Return the files that TFDS's builder downloads for a task, with the hashes that TFDS has
    registered for them."""
    infos = import_tfds().builder(task.spec, data_dir=data_dir).url_infos
    files = [
        Archive(info.filename, info.checksum, int(info.size), url) for url, info in infos.items()
    ]
    # The configurations of TFDS's Visual Domain Decathlon share one list of files, but only one
    # configuration needs ImageNet (6.5 GB).
    return [a for a in files if "imagenet" not in a.file or task.builder.endswith("imagenet12")]


def prepare_stock(spec: str, data_dir: Path) -> Path:
    """Prepare a data set with TFDS's own builder, in a format that can be read without TensorFlow.

    Raw files in `downloads/manual` of the data folder are used if they have the names that TFDS has
    registered. Raises ValueError with TFDS's error message.
    """
    tfds = import_tfds()
    try:
        builder = tfds.builder(spec, data_dir=data_dir, file_format="array_record")
        config = tfds.download.DownloadConfig(
            manual_dir=manual_dir(data_dir), try_download_gcs=False
        )
        builder.download_and_prepare(download_config=config)
        return Path(builder.data_dir)
    except Exception as error:  # TFDS, requests and TensorFlow raise different types of errors
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"TFDS could not prepare {spec!r}: {reason}; raw files with their registered names can"
            f" be put into {manual_dir(data_dir)}"
        ) from error


def plan_of(
    task: BenchmarkTask, data_dir: Path, *, seed: int = 0, on_progress: OnProgress | None = None
) -> Plan:
    """Plan a task with the paper's splits from a prepared data set. `seed` determines which
    training images are moved to missing splits.

    Raises FileNotFoundError if the data set is not prepared. Raises ValueError if the number of
    images or classes is not as expected, or if the splits differ from an earlier record.
    """
    prepared = open_prepared(task.spec, data_dir)
    classes = tuple(name for name in prepared.classes if name not in task.dropped)
    label_of = {prepared.classes.index(name): label for label, name in enumerate(classes)}
    rows: dict[str, list[Row]] = {}
    for split, names in {"train": task.train, "val": task.val, "test": task.test}.items():
        if not names:
            continue  # `plan_rows` cuts this split from train
        present = [name for name in prepared.splits if name in names]
        if not present:
            raise ValueError(
                f"{prepared.directory} has no split {names}, only {sorted(prepared.splits)}"
            )
        rows_of_split = prepared.index(present, task.key, on_progress=on_progress)
        rows[split] = [
            row._replace(label=label_of[row.label])
            for row in rows_of_split
            if row.label in label_of
        ]
    source = f"tfds:{prepared.full_name}"
    floor = task.rule == "decathlon"
    plan = plan_rows(
        task.name,
        classes,
        rows,
        prepared.records,
        source=source,
        stamp=prepared.stamp,
        seed=seed,
        floor=floor,
    )
    counted, expected = (
        f"{'/'.join(f'{num:,}' for num in counts)} train/val/test images of {num_classes:,} classes"
        for counts, num_classes in (
            (plan.counts.values(), len(classes)),
            (task.counts or plan.counts.values(), task.num_classes),
        )
    )
    if counted != expected:
        raise ValueError(
            f"task {task.name!r} has {counted}, expected {expected}; {plan.source} is not the"
            " data set of the benchmark or is incomplete: prepare it again"
        )
    _check_splits(task, plan, data_dir, seed)
    return plan


def splits_file(data_dir: Path, name: str, seed: int) -> Path:
    """Return the file that records a task's splits."""
    return data_dir / "cheem_jax" / "splits" / f"{name}-seed{seed}.json"


def _check_splits(task: BenchmarkTask, plan: Plan, data_dir: Path, seed: int) -> None:
    """Record the hash of the splits, or compare it with an earlier record."""
    file = splits_file(data_dir, task.name, seed)
    if not file.is_file():
        record = {
            "format": "cheem_jax-splits/1",
            "task": task.name,
            "source": plan.source,
            "rule": task.rule,
            "seed": seed,
            "counts": plan.counts,
            "num_classes": task.num_classes,
            "sha256": plan.split_sha256,
        }
        # The record cannot be written to a read-only data folder. The error is ignored, because the
        # record of the run also contains the hash.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(record, indent=1) + "\n")
        return
    try:
        recorded = str(json.loads(file.read_text(encoding="utf-8"))["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file} is corrupted ({error}); remove it, and it will be written again"
        ) from error
    if recorded != plan.split_sha256:
        raise ValueError(
            f"task {task.name!r}: the splits have the sha256 {plan.split_sha256[:12]}..., but"
            f" {file} contains {recorded[:12]}..., so results would not be comparable; the data"
            " set has changed, or the file is from another machine: remove the file to use the new"
            " splits"
        )
