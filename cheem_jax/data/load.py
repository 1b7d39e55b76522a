"""Plans to tasks: images decoded into memory, into files that are mapped into it, or when they are needed."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cheem_jax.core.paths import absolute
from cheem_jax.data.cache import Phase, bytes_needed, cached, default_directory
from cheem_jax.data.decode import DECODER_VERSION, Progress, decode_image, decode_in_order, decode_many
from cheem_jax.data.files import Encoded
from cheem_jax.data.folder import plan_stream, plan_task
from cheem_jax.data.task import Part, Plan, Split, Stream, Task, hash_of

Keep = Literal["auto", "memory", "cache", "stream"]

IN_MEMORY = 2**30
"""Bytes of a whole stream up to which `auto` keeps images in memory."""
CACHED = 64 * 2**30
"""Bytes of one task up to which `auto` keeps images on the disk."""


@dataclasses.dataclass(frozen=True)
class ImagesConfig:
    """Where decoded images are kept."""

    keep: Keep = "auto"
    """`memory`, `cache` (files mapped into memory, made once), `stream` (decoded again in every epoch by Grain, nothing
    stored), or `auto`: memory for a stream below 1 GiB, cache for a task below 64 GiB, else stream."""
    cache_dir: Path | None = None
    """Folder of the cached images; default: below the user's cache folder, or below --data-dir."""
    workers: int = 0
    """Processes that decode for `stream`; 0: threads of this one. Processes start again, in seconds, for every pass."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; expected 0 (threads) or more")


def load_tasks(
    plans: Sequence[Plan], image_size: int, config: ImagesConfig = ImagesConfig(), phase: Phase | None = None
) -> tuple[Task, ...]:
    """Tasks with their images; raises ValueError naming every file that is not an image."""
    total = sum(bytes_needed(plan.num_images, image_size) for plan in plans)
    names = ("train", "val", "test")
    return tuple(
        Task(
            plan.name,
            plan.classes,
            **_load(plan, names, image_size, config, total, phase or _silent),
            split_sha256=plan.split_sha256,
        )
        for plan in plans
    )


def load_task(path: str | Path, *, image_size: int, seed: int = 0) -> Task:
    """A folder or zip as one task in memory; see `plan_task`."""
    (task,) = load_tasks([plan_task(absolute(path), seed=seed)], image_size, ImagesConfig("memory"))
    return task


def load_stream(path: str | Path, tasks: Sequence[str] | None = None, *, image_size: int, seed: int = 0) -> Stream:
    """A folder of tasks as a stream in memory; see `plan_stream`."""
    path = absolute(path)
    plans = plan_stream(path, tasks, seed=seed)
    return Stream(path.resolve().stem, load_tasks(plans, image_size, ImagesConfig("memory")))


def load_train(plan: Plan, image_size: int, config: ImagesConfig = ImagesConfig(), phase: Phase | None = None) -> Split:
    """The training split alone."""
    total = bytes_needed(len(plan.train.labels), image_size)
    return _load(plan, ("train",), image_size, config, total, phase or _silent)["train"]


def _load(
    plan: Plan, names: Sequence[str], image_size: int, config: ImagesConfig, total_bytes: int, phase: Phase
) -> dict[str, Split]:
    """Some splits; `total_bytes` is the size of everything that is loaded together."""
    parts = {name: plan.splits[name] for name in names}
    num = sum(len(part.labels) for part in parts.values())
    keep = config.keep
    if keep == "auto":
        too_large = bytes_needed(num, image_size) > CACHED
        keep = "memory" if total_bytes <= IN_MEMORY else "stream" if too_large else "cache"
    if keep == "cache":
        return cached(plan, image_size, config.cache_dir or default_directory(), phase, names)
    if keep == "stream":
        # the pixels follow from this, and none has been decoded yet
        known = f"{plan.split_sha256} {plan.stamp} {image_size} {DECODER_VERSION}"
        return {
            name: Split(
                StreamedImages(part.files, image_size, workers=config.workers),
                part.labels,
                hashlib.sha256(f"{known} {name}".encode()).hexdigest(),
            )
            for name, part in parts.items()
        }
    with phase(plan.name, num) as on_progress:
        return {name: _in_memory(part, image_size, on_progress) for name, part in parts.items()}


def _in_memory(part: Part, image_size: int, on_progress: Progress) -> Split:
    images = decode_many(part.files, image_size, on_progress=on_progress)
    return Split(images, part.labels, hash_of([images], part.labels))


@contextlib.contextmanager
def _silent(task: str, num_images: int) -> Iterator[Progress]:
    yield lambda num_images: None


class StreamedImages:
    """Files that behave like uint8 images `[N, S, S, 3]`, decoded when they are needed and never stored.

    Grain decodes ahead with `workers` processes, or with 0 with threads of this one, which is faster up to a handful of
    cores; processes take seconds to start, for every pass. The caller decides which images a step sees, so a stream
    gives what the same images in memory would give, and a pass that resumes at a later step what would have come then.
    """

    def __init__(self, files: Encoded, image_size: int, *, workers: int = 0):
        _grain()  # fails now if it is not installed, not in the middle of a run
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
        """The images of each of these rows in turn, all of one length, as Grain's iterator.

        Its `get_state()` says how far it has come; `set_state` of an equal one resumes there.
        """
        grain = _grain()
        batch_size, num_threads = len(order[0]), max(2, min(16, os.cpu_count() or 1))
        images = grain.MapDataset.source(_ImageSource(self.files, self.image_size, np.concatenate(order)))
        if self.workers:  # whole batches, since each process takes every so many-th element
            reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
            options = grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=2)
            return iter(images.batch(batch_size).to_iter_dataset(reading).mp_prefetch(options))
        # single images, put together afterwards, so that the threads share the work on the first batch too
        reading = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=3 * batch_size)
        return iter(images.to_iter_dataset(reading).batch(batch_size))


class _ImageSource:
    """A data source of Grain's: decoded images in the order in which they are wanted."""

    def __init__(self, files: Encoded, image_size: int, rows: np.ndarray):
        self.files, self.image_size, self.rows = files, image_size, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        row = int(self.rows[index])
        return decode_image(self.files.read(row), self.image_size, name=self.files.where(row))


def _grain() -> Any:
    try:
        import grain
        from absl import flags
    except ImportError as error:
        raise ValueError(
            "streaming images needs Grain: `pip install 'cheem_jax[datasets]'`, or --images.keep cache"
        ) from error
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # starting workers, Grain asks for absl's flags, which nobody parses here
    return grain
