"""Getting a benchmark's data sets in place: what can be done here is done, for the rest it is told what is to be done.

Everything lies in one data folder, which is also TFDS's: prepared data sets `<name>[/<config>]/<version>`, and the
archives they were made from in `downloads/manual`.
"""

import contextlib
import hashlib
import importlib.util
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

import filelock

from cheem_jax.data.benchmarks.origins import BY_HAND, OWN, WITHOUT_TENSORFLOW, Archive
from cheem_jax.data.benchmarks.reading import Missing
from cheem_jax.data.benchmarks.table import BY_NAME, BenchmarkTask
from cheem_jax.data.benchmarks.tasks import plan_of
from cheem_jax.data.decode import Progress
from cheem_jax.data.plan import Plan
from cheem_jax.data.records import find_prepared, import_tfds

Work = Callable[[str, str, int], AbstractContextManager[Progress]]
"""Opens a phase of work: its name, the task's, and the amount (bytes of files fetched and checked, else pictures)."""


State = Literal["ready", "archives", "missing"]


class Status(NamedTuple):
    """Where a task stands, in one word, and the way on for people."""

    state: State
    advice: str
    num_bytes: int
    """On the disk."""


def manual_dir(data_dir: Path) -> Path:
    """TFDS's own folder for archives that somebody put there."""
    return data_dir / "downloads" / "manual"


def status_of(task: BenchmarkTask, data_dir: Path) -> Status:
    """What is there of a task, without opening it."""
    with contextlib.suppress(FileNotFoundError):
        directory = find_prepared(task.spec, data_dir)
        size = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
        return Status("ready", "", size)
    archives = OWN.get(task.builder, ())
    present = [archive for archive in archives if (manual_dir(data_dir) / archive.file).exists()]
    size = sum((manual_dir(data_dir) / archive.file).stat().st_size for archive in present)
    command = f"`cheem data prepare {task.name} --data-dir {shlex.quote(str(data_dir))}`"
    if archives and len(present) == len(archives):
        return Status("archives", command, size)
    return Status("missing", f"{_first(task, data_dir)}{command}", size)


def _first(task: BenchmarkTask, data_dir: Path) -> str:
    """What must be done before the command can work, if anything."""
    absent = [
        archive.file
        for archive in OWN.get(task.builder, ())
        if archive.url is None and not (manual_dir(data_dir) / archive.file).exists()
    ]
    reason = f" ({BY_HAND[task.builder]})" if task.builder in BY_HAND else ""
    if absent:
        return f"put {', '.join(absent)} into {manual_dir(data_dir)}{reason}, then "
    if task.builder not in OWN and task.builder not in WITHOUT_TENSORFLOW and not has_tensorflow():
        return f"`pip install 'cheem_jax[prepare]'`{reason}, then "
    return ""


def has_tensorflow() -> bool:
    """Whether TensorFlow could be imported, without importing it."""
    return importlib.util.find_spec("tensorflow") is not None


def prepare(name: str, data_dir: Path, phase: Work, *, seed: int = 0) -> Plan:
    """Prepares one task if it is not, then checks its counts and writes down its splits.

    Raises ValueError or OSError with what is to be done, leaving what was there.
    """
    task = BY_NAME[name]
    with _alone(data_dir, name, phase):
        try:
            find_prepared(task.spec, data_dir)
        except FileNotFoundError:
            import_tfds()
            for leftover in (data_dir / task.builder).glob(f"incomplete.*_{task.version}"):
                shutil.rmtree(leftover)  # of a process that was killed
            if task.builder in OWN:
                _from_archives(task, data_dir, phase)
            else:
                _from_stock_builder(task, data_dir, phase)
        with phase("index", name, sum(task.counts)) as on_progress:
            return plan_of(task, data_dir, seed=seed, on_progress=on_progress)


@contextlib.contextmanager
def _alone(data_dir: Path, name: str, phase: Work) -> Iterator[None]:
    """One process at a time prepares in a data folder: several tasks come from the same archives."""
    folder = data_dir / "cheem_jax"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / "prepare.lock")
    try:
        lock.acquire(timeout=1)
    except filelock.Timeout:
        with phase("wait", f"{name}, for another process that prepares here", 0):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _from_archives(task: BenchmarkTask, data_dir: Path, phase: Work) -> None:
    # TFDS comes with the extra `datasets`, and the builders are classes of its
    from cheem_jax.data.benchmarks.builders import prepare_from_folder

    place = manual_dir(data_dir)
    place.mkdir(parents=True, exist_ok=True)
    archives = OWN[task.builder]
    _check_archives(task.name, archives, place, phase)
    try:
        with phase("prepare", task.name, sum(task.counts)) as on_progress:
            prepare_from_folder(task.builder, data_dir, place, on_progress)
    except Missing as error:
        if any(archive.url is None for archive in archives):
            raise FileNotFoundError(f"{error}; {BY_HAND[task.builder]}") from error
        _fetch(task.name, archives, place, phase)
        with phase("prepare", task.name, sum(task.counts)) as on_progress:
            prepare_from_folder(task.builder, data_dir, place, on_progress)


def _fetch(name: str, archives: Sequence[Archive], place: Path, phase: Work) -> None:
    """Downloads the archives that are absent, resuming where an earlier attempt stopped."""
    # made with libraries that come with the extra `datasets`
    from cheem_jax.data.benchmarks.download import download

    for archive in archives:
        if (place / archive.file).is_file():
            continue
        assert archive.url is not None
        with phase("download", f"{name} {archive.file}", archive.num_bytes or 0) as on_progress:
            download(
                archive.url,
                place / archive.file,
                known_hash=archive.hash,
                size=archive.num_bytes,
                on_progress=on_progress,
            )


def _check_archives(name: str, archives: Sequence[Archive], place: Path, phase: Work) -> None:
    """ValueError for an archive, brought by hand or downloaded earlier, that is not the published one."""
    for archive in archives:
        file = place / archive.file
        if not file.is_file() or archive.hash is None:
            continue
        kind, _, wanted = archive.hash.rpartition(":")
        size, digest = file.stat().st_size, hashlib.new(kind or "sha256")
        with file.open("rb") as stream, phase("check", f"{name} {archive.file}", size) as on_progress:
            while piece := stream.read(2**24):
                digest.update(piece)
                on_progress(len(piece))
        if digest.hexdigest() != wanted:
            raise ValueError(
                f"{file} ({size:,} bytes) has the {digest.name} {digest.hexdigest()}, the published archive {wanted}: "
                "cut off or another version; move it away and download it again"
            )


def _from_stock_builder(task: BenchmarkTask, data_dir: Path, phase: Work) -> None:
    if task.builder not in WITHOUT_TENSORFLOW and not has_tensorflow():
        raise ValueError(
            f"preparing {task.builder!r} needs TensorFlow once (reading it does not): "
            f"`pip install 'cheem_jax[prepare]'`, then give the command again"
        )
    place = manual_dir(data_dir)
    place.mkdir(parents=True, exist_ok=True)
    archives = registered(task, data_dir)
    _check_archives(task.name, archives, place, phase)
    _fetch(task.name, archives, place, phase)
    with phase("prepare", task.name, sum(task.counts)):
        prepare_stock(task.spec, data_dir)


def registered(task: BenchmarkTask, data_dir: Path) -> list[Archive]:
    """The files that TFDS's own builder of a task downloads, with their registered hashes."""
    infos = import_tfds().builder(task.spec, data_dir=data_dir).url_infos
    found = [Archive(info.filename, int(info.size), url, info.checksum) for url, info in infos.items()]
    # the decathlon's one list of files serves all its configurations, and ImageNet's 6.5 GB only one of them
    return [a for a in found if "imagenet" not in a.file or task.builder.endswith("imagenet12")]


def prepare_stock(spec: str, data_dir: Path) -> Path:
    """Prepares a data set with TFDS's own builder, in a format that is read without TensorFlow.

    Raw files are taken from `downloads/manual` of the data folder where they are there under their registered names.
    Raises ValueError with TFDS's reason.
    """
    tfds = import_tfds()
    try:
        builder = tfds.builder(spec, data_dir=data_dir, file_format="array_record")
        config = tfds.download.DownloadConfig(manual_dir=manual_dir(data_dir), try_download_gcs=False)
        builder.download_and_prepare(download_config=config)
        return Path(builder.data_dir)
    except Exception as error:  # TFDS, requests and TensorFlow raise whatever they raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"TFDS could not prepare {spec!r}: {reason}; raw files under their registered names are taken from "
            f"{manual_dir(data_dir)}"
        ) from error
