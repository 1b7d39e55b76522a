"""Load the images of plans. The images are decoded into memory, into memory-mapped files, or on
access.

Each combination of plan, image size and decoder version has a cache: a folder `<task>-<size>-<key>`
with one `.npy` file per split, and `cache.json`. The folder is written under another name and
renamed when it is complete, so a folder called `<task>-<size>-<key>` is always complete. A lock
makes other processes wait while one process writes the folder.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import filelock
import numpy as np

from cheem_jax.core.atomic import to_disk
from cheem_jax.core.paths import absolute, user_cache
from cheem_jax.core.settings import check_types
from cheem_jax.data.decode import (
    DECODER_VERSION,
    BrokenImages,
    OnProgress,
    decode_in_order,
    decode_many,
    decode_row,
)
from cheem_jax.data.files import Encoded, import_extra
from cheem_jax.data.folder import name_of, plan_stream, plan_task
from cheem_jax.data.task import EncodedSplit, Plan, Split, Stream, Task, hash_images

FORMAT = "cheem_jax-images/1"
SPLIT_NAMES = ("train", "val", "test")

OpenPhase = Callable[[str, int], AbstractContextManager[OnProgress]]
"""Function that returns a context manager, given the name of a task and its number of images. The
context manager yields a function that is called with the number of images decoded since the last
call."""
Item = TypeVar("Item")
R = TypeVar("R")
Keep = Literal["auto", "memory", "cache", "stream"]

IN_MEMORY = 2**30
"""Maximum size in bytes of a stream that `auto` loads into memory."""
CACHED = 64 * 2**30
"""Maximum size in bytes of a task that `auto` caches on disk."""


@dataclasses.dataclass(frozen=True)
class ImagesConfig:
    """Storage of decoded images."""

    keep: Keep = "auto"
    """`memory` keeps decoded images in memory; `cache` writes them to files once and maps the files
    into memory; `stream` decodes them again in every epoch with Grain and stores nothing; `auto`
    uses `memory` if all tasks together need up to 1 GiB; otherwise `cache` for a task of up to 64
    GiB, and `stream` for a larger task."""
    cache_dir: Path | None = None
    """Folder of the cached images; default: below --data-dir if it is set or the stream needs it,
    otherwise in the user's cache folder."""
    workers: int = 0
    """Number of processes that decode for `stream`; 0 uses threads of this process. Processes need
    seconds to start in every pass over the images."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; expected 0 (threads) or more")


def load_tasks(
    plans: Sequence[Plan],
    image_size: int,
    config: ImagesConfig = ImagesConfig(),
    phase: OpenPhase | None = None,
    *,
    only: str | None = None,
) -> tuple[Task, ...]:
    """Load the images of tasks. Raises BrokenImages with the name of every file that cannot be
    decoded.

    `only` is the split to load; the other splits are empty. If `only` is `test`, all splits are
    loaded for a task whose data have no test split.
    """

    def names_in(plan: Plan) -> Sequence[str]:
        return SPLIT_NAMES if only is None or (only == "test" and "test" in plan.cut) else [only]

    counts = [sum(plan.counts[name] for name in names_in(plan)) for plan in plans]
    total = sum(bytes_needed(num, image_size) for num in counts)

    def load(plan: Plan) -> Task:
        none = Split(np.empty((0, image_size, image_size, 3), np.uint8), np.empty(0, np.int32))
        splits = dict.fromkeys(SPLIT_NAMES, none)
        splits |= _load(plan, names_in(plan), image_size, config, total, phase or _silent)
        facts: dict[str, Any] = {
            "split_sha256": plan.split_sha256,
            "skipped": plan.skipped,
            "cut": plan.cut,
            "class_split": plan.class_split,
            "upright": plan.upright,
        }
        facts["purpose"] = plan.purpose if only is None else "measure"
        return Task(plan.name, plan.classes, **splits, **facts)

    return tuple(_each(plans, load))


def _each(items: Iterable[Item], load: Callable[[Item], R]) -> list[R]:
    """Load all items. A single exception reports the broken images of all items."""
    loaded = list[Any]()
    broken = list[str]()
    for item in items:
        try:
            loaded.append(load(item))
        except BrokenImages as error:
            broken += error.broken
    if broken:
        raise BrokenImages(broken)
    return loaded


def load_task(path: str | Path, *, image_size: int, seed: int = 0, upright: bool = True) -> Task:
    """Plan a folder or zip with `plan_task`, and load the task into memory. With `upright`, images
    are rotated by their EXIF orientation."""
    plan = plan_task(absolute(path), seed=seed).turned(upright)
    (task,) = load_tasks([plan], image_size, ImagesConfig("memory"))
    return task


def load_stream(
    path: str | Path,
    tasks: Sequence[str] | None = None,
    *,
    image_size: int,
    seed: int = 0,
    upright: bool = True,
) -> Stream:
    """Plan a folder of tasks with `plan_stream`, and load the stream into memory. With `upright`,
    images are rotated by their EXIF orientation."""
    path = absolute(path)
    plans = [plan.turned(upright) for plan in plan_stream(path, tasks, seed=seed)]
    return Stream(name_of(path), load_tasks(plans, image_size, ImagesConfig("memory")))


def load_train(
    plan: Plan,
    image_size: int,
    config: ImagesConfig = ImagesConfig(),
    phase: OpenPhase | None = None,
) -> Split:
    """Load only the training split."""
    total = bytes_needed(len(plan.train.labels), image_size)
    return _load(plan, ("train",), image_size, config, total, phase or _silent)["train"]


def _load(
    plan: Plan,
    names: Sequence[str],
    image_size: int,
    config: ImagesConfig,
    total_bytes: int,
    phase: OpenPhase,
) -> dict[str, Split]:
    """Load the splits `names` of a plan; `total_bytes` is the decoded size of all tasks that are
    loaded together."""
    parts = {name: plan.splits[name] for name in names}
    num = sum(len(part.labels) for part in parts.values())
    keep = config.keep
    if keep == "auto":
        too_large = bytes_needed(num, image_size) > CACHED
        keep = "memory" if total_bytes <= IN_MEMORY else "stream" if too_large else "cache"
    if keep == "cache":
        return cached(
            plan, image_size, absolute(config.cache_dir or default_directory()), phase, names
        )
    splits = {}
    if keep == "stream":
        with phase(plan.name, num) as on_progress:

            def check(part: EncodedSplit) -> None:
                for piece in decode_in_order(part.files, image_size, range(len(part.files))):
                    on_progress(len(piece))

            # a broken image must be known before hours of training and not after them
            _each(parts.values(), check)
        for name, part in parts.items():
            # the hash identifies the pixels without decoding them
            identity = (
                f"{plan.split_sha256} {plan.stamp} {image_size} {DECODER_VERSION}"
                f" {name}{' upright' * plan.upright}"
            )
            images = StreamedImages(part.files, image_size, workers=config.workers)
            splits[name] = Split(images, part.labels, hashlib.sha256(identity.encode()).hexdigest())
        return splits
    with phase(plan.name, num) as on_progress:

        def load(part: EncodedSplit) -> Split:
            images = decode_many(part.files, image_size, on_progress=on_progress)
            return Split(images, part.labels, hash_images(images, part.labels))

        return dict(zip(parts, _each(parts.values(), load), strict=True))


@contextlib.contextmanager
def _silent(task: str, num_images: int) -> Iterator[OnProgress]:
    yield lambda num_images: None


def default_directory() -> Path:
    """Return the default folder of caches, in the user's cache folder. Raises ValueError if the
    home folder is unknown."""
    return user_cache() / "images"


def bytes_needed(num_images: int, image_size: int) -> int:
    """Return the size of decoded images in bytes."""
    return num_images * image_size * image_size * 3


def cache_place(
    plan: Plan, image_size: int, root: Path, names: Sequence[str] = SPLIT_NAMES
) -> Path:
    """Return the cache folder for a plan's decoded images. The folder need not exist.

    The folder's name contains a hash of everything that affects the pixels of the splits `names`:
    the files, their order and their stamp, the image size, the decoder version, and EXIF rotation.
    """
    turned = ["upright"] if plan.upright else []
    decides = [FORMAT, DECODER_VERSION, image_size, plan.source, plan.stamp, *turned]
    digest = hashlib.sha256(json.dumps(decides).encode())
    for split in names:
        part = plan.splits[split]
        digest.update(f"{split} {len(part.files)}\n".encode())
        for row, label in enumerate(part.labels.tolist()):
            digest.update(f"{part.files.key(row)}\t{label}\n".encode())
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", plan.name)[:60]
    return root / f"{name}-{image_size}-{digest.hexdigest()[:16]}"


def cached(
    plan: Plan, image_size: int, root: Path, phase: OpenPhase, names: Sequence[str] = SPLIT_NAMES
) -> dict[str, Split]:
    """Return the splits `names` with memory-mapped images. Missing files are written first.

    If another process is writing the files, wait for it. Raises ValueError for broken images, and
    OSError if the files cannot be written. After an error, no partial cache remains.
    """
    place = cache_place(plan, image_size, root)
    if not place.is_dir():  # without a cache of all splits, cache only `names`
        place = cache_place(plan, image_size, root, names)
    if not place.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{place}.lock"):
                if not place.is_dir():
                    _make(plan, names, image_size, place, phase)
        except OSError as error:
            raise OSError(
                f"the decoded images of {plan.name!r} cannot be stored in {root}:"
                f" {error.strerror or error}; choose another folder for decoded images, with enough"
                " space and write permission"
            ) from error
    return open_cache(place, plan, names)


def open_cache(place: Path, plan: Plan, names: Sequence[str] = SPLIT_NAMES) -> dict[str, Split]:
    """Open the complete cache of a plan. Raises ValueError if the cache is corrupted, and OSError
    if it cannot be read."""
    try:
        meta = json.loads((place / "cache.json").read_text(encoding="utf-8"))
        splits = {}
        for name in names:
            labels = plan.splits[name].labels
            # memory-mapped, so that a wrong header cannot cause a huge allocation
            images = np.lib.format.open_memmap(place / f"{name}.npy", mode="r")
            if (
                images.shape != (len(labels), meta["image_size"], meta["image_size"], 3)
                or images.dtype != np.uint8
            ):
                raise ValueError(f"{name} has the shape {images.shape} of {images.dtype}")
            splits[name] = Split(images, labels, str(meta["splits"][name]["sha256"]))
    except PermissionError as error:
        raise OSError(
            f"the cache {place} cannot be read ({error.strerror}: {error.filename})"
        ) from error
    # NumPy's header parser can raise almost any exception on a corrupted file
    except Exception as error:
        raise ValueError(
            f"the cache {place} is corrupted ({error!r}); remove this folder, and it will be"
            " created again"
        ) from error
    return splits


def _make(plan: Plan, names: Sequence[str], image_size: int, place: Path, phase: OpenPhase) -> None:
    """Decode the splits `names` into a folder next to `place`, then rename this folder to `place`.
    The caller has locked `place`, so only one process at a time does this."""
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # remove the leftovers of a killed process
    num_images = sum(len(plan.splits[name].labels) for name in names)
    needed = bytes_needed(num_images, image_size)
    free = shutil.disk_usage(place.parent).free
    if needed > free:
        raise OSError(f"{needed / 1e9:.1f} GB are needed, but only {free / 1e9:.1f} GB are free")
    partial.mkdir()
    try:
        with phase(plan.name, num_images) as on_progress:

            def write(name: str) -> dict[str, str]:
                return {
                    "sha256": _write(
                        partial / f"{name}.npy", plan.splits[name], image_size, on_progress
                    )
                }

            splits = dict(zip(names, _each(names, write), strict=True))
        meta = {
            "task": plan.name,
            "source": plan.source,
            "image_size": image_size,
            "splits": splits,
        }
        (partial / "cache.json").write_text(json.dumps(meta, indent=1) + "\n")
        for written in (partial / "cache.json", partial):
            to_disk(written)
        os.rename(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(file: Path, part: EncodedSplit, image_size: int, on_progress: OnProgress) -> str:
    """Write the images of a split to a `.npy` file piece by piece, and return the hash of labels
    and pixels. If the disk is full, this raises OSError; writing through a memory map would instead
    end the process with a signal."""
    digest = hashlib.sha256(part.labels.astype("<i4").tobytes())
    header = {
        "descr": "|u1",
        "fortran_order": False,
        "shape": (len(part.labels), image_size, image_size, 3),
    }
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for piece in decode_in_order(part.files, image_size, range(len(part.files))):
            stream.write(piece.data)
            digest.update(piece.data)
            on_progress(len(piece))
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


class StreamedImages:
    """Image files that behave like an array of uint8 images `[N, S, S, 3]`. They are decoded on
    access and not stored.

    Grain decodes images in advance with `workers` processes. If `workers` is 0, Grain uses threads
    of this process. Threads are faster on a machine with few cores, because processes need seconds
    to start in every pass. The caller determines the rows of each step, so the images are the same
    as with an array in memory, and a resumed pass continues with the next step.
    """

    def __init__(self, files: Encoded, image_size: int, *, workers: int = 0):
        _grain()  # if grain is missing, fail now instead of during a run
        self.files, self.image_size, self.workers = files, image_size, workers
        self.shape = (len(files), image_size, image_size, 3)
        self.dtype = np.dtype(np.uint8)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: np.ndarray | slice, /) -> np.ndarray:
        none = np.empty((0, *self.shape[1:]), np.uint8)
        wanted = np.arange(len(self.files))[rows]
        return np.concatenate([none, *decode_in_order(self.files, self.image_size, wanted)])

    def follow(self, order: Sequence[np.ndarray]) -> Any:
        """Return a Grain iterator over batches of images. Each array in `order` contains the rows
        of one batch; all arrays must have the same length.

        `get_state()` of the iterator returns its position; `set_state` of a new iterator resumes at
        that position.
        """
        grain = _grain()
        batch_size = len(order[0])
        num_threads = max(2, min(16, os.cpu_count() or 1))
        images = grain.MapDataset.source(np.concatenate(order).tolist()).map(self._decode)
        # Form batches before the work is distributed, so that each of n workers decodes every n-th
        # batch. Otherwise, each worker would decode every n-th image, and no worker would have a
        # whole batch.
        if self.workers:
            reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
            options = grain.MultiprocessingOptions(
                num_workers=self.workers, per_worker_buffer_size=2
            )
            return iter(images.batch(batch_size).to_iter_dataset(reading).mp_prefetch(options))
        # Threads process individual images, which are batched afterwards, so that all threads work
        # on the first batch.
        reading = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=3 * batch_size)
        return iter(images.to_iter_dataset(reading).batch(batch_size))

    def _decode(self, row: int) -> np.ndarray:
        return decode_row(self.files, row, self.image_size)


def _grain() -> Any:
    grain = import_extra("grain", "datasets", "streaming images", ", or --images.keep cache")
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        # Grain reads absl's flags when it starts workers, but this library does not parse them.
        flags.mark_as_parsed()
    return grain
