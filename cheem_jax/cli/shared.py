"""Settings that several commands share: a memory, what it takes to answer with one, and data."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.data.load import ImagesConfig, load_tasks
from cheem_jax.data.sources import cache_dir_of, plan_source
from cheem_jax.data.task import Plan, Task
from cheem_jax.memory import OpenMemory, open_memory
from cheem_jax.memory.data import decoding
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMemory:
    """A memory."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder; what changes nothing also takes a finished run of CHEEM."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering(OfMemory):
    """A memory, or a finished run, that answers."""

    weights: Path | None = None
    """Weights of a run, which contains none; default: as the run had them."""
    usable: bool = False
    """Where tasks of a memory are corrupted, answer with the others."""

    def open(self) -> OpenMemory:
        """The memory; raises as `open_memory`."""
        return open_memory(self.memory, weights=self.weights, usable=self.usable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfData:
    """Tasks with labelled images."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A folder or zip with <class>/<image> or <split>/<class>/<image>, a folder of such ones, a stream file (TOML), a
    manifest (CSV, Parquet), or a name of `cheem data list`."""
    tasks: str | None = None
    """Names of the data's tasks to take, in this order, separated by commas; default: all."""
    split_seed: int = 0
    """Seed of the splits that the data lack."""
    data_dir: Path | None = None
    """Where prepared data sets are; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded images are kept."""

    def plans(self) -> tuple[Plan, ...]:
        """The tasks before decoding; raises ValueError or OSError for data that do not fit."""
        names = None if self.tasks is None else [name.strip() for name in self.tasks.split(",")]
        return tuple(plan_source(self.data, names, data_dir=self.data_dir, seed=self.split_seed)[1])

    def load(self, plans: Sequence[Plan], image_size: int, progress: Progress) -> tuple[Task, ...]:
        """The tasks, decoded."""
        cache_dir = self.images.cache_dir or cache_dir_of(self.data, self.data_dir)
        images = dataclasses.replace(self.images, cache_dir=cache_dir)
        return load_tasks(plans, image_size, images, decoding(progress))
