"""Plans to tasks: pictures decoded into memory, into files that are mapped into it, or when they are asked for."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from cheem_jax.data.cache import Phase, bytes_needed, cached, default_directory
from cheem_jax.data.decode import DECODER_VERSION, Progress, decode_many
from cheem_jax.data.folder import plan_stream, plan_task
from cheem_jax.data.plan import Part, Plan
from cheem_jax.data.streaming import StreamedImages
from cheem_jax.data.task import Split, Stream, Task, hash_of
from cheem_jax.paths import absolute

Keep = Literal["auto", "memory", "cache", "stream"]

IN_MEMORY = 2**30
"""Bytes of a whole stream up to which `auto` keeps pictures in memory."""
CACHED = 64 * 2**30
"""Bytes of one task up to which `auto` keeps pictures on the disk."""


@dataclasses.dataclass(frozen=True)
class ImagesConfig:
    """Where decoded pictures are kept."""

    keep: Keep = "auto"
    """`memory`, `cache` (files mapped into memory, made once), `stream` (decoded anew in every epoch by Grain, nothing
    stored), or `auto`: memory for a stream below 1 GiB, cache for a task below 64 GiB, else stream."""
    cache_dir: Path | None = None
    """Folder of the cached pictures; default: below the user's cache folder, or below --data-dir."""
    workers: int = 0
    """Processes that decode for `stream`; 0: threads of this one. Processes start anew, in seconds, for every pass."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; expected 0 (threads) or more")


def load_tasks(
    plans: Sequence[Plan], image_size: int, config: ImagesConfig = ImagesConfig(), phase: Phase | None = None
) -> tuple[Task, ...]:
    """Tasks whose pictures can be had; raises ValueError naming every file that is no picture."""
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
    """Some splits; `total_bytes` is what all that is loaded together takes."""
    parts = {name: plan.splits[name] for name in names}
    num = sum(len(part.labels) for part in parts.values())
    keep = config.keep
    if keep == "auto":
        too_large = bytes_needed(num, image_size) > CACHED
        keep = "memory" if total_bytes <= IN_MEMORY else "stream" if too_large else "cache"
    if keep == "cache":
        return cached(plan, image_size, config.cache_dir or default_directory(), phase, names)
    if keep == "stream":
        # the pixels follow from this, and nobody has seen them yet
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
