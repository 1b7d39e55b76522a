"""Settings that several commands share: a memory, what it takes to answer with one, and data."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from cheem_jax.cli.data import leave_out_broken
from cheem_jax.cli.help import ADVANCED
from cheem_jax.data.load import ImagesConfig
from cheem_jax.data.sources import cache_dir_of, plan_source
from cheem_jax.data.task import Plan, Task
from cheem_jax.memory import OpenMemory, open_memory
from cheem_jax.memory.data import decoded
from cheem_jax.memory.predictor import Predictor
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMemory:
    """A memory."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering(OfMemory):
    """A memory, or a finished run, that answers."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder, or that of a finished run of CHEEM."""
    weights: Path | None = None
    """For a run, which contains no weights: the backbone's weights file; default: the one that it was learned with."""
    usable: bool = False
    """Where tasks of a memory are corrupted, answer with the others."""

    def open(self) -> OpenMemory:
        """The memory; raises as `open_memory`."""
        return open_memory(self.memory, weights=self.weights, usable=self.usable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicting(Answering):
    """How images without labels are answered."""

    top: int = 5
    """How many classes to list for each image, the most probable first (a table shows two)."""
    open_set: float | None = None
    """Answer `none of my tasks` for images farther from the nearest task than this share of that task's validation
    images, such as 0.05; default: every image gets a task, as in the paper."""
    memory_gb: Annotated[float | None, ADVANCED] = None
    """Gigabytes for the networks of tasks that are ready; default: a quarter of the device's memory. Least recently
    used ones are evicted and made again when needed; answers are the same."""

    def predictor(self, **more: Any) -> Predictor:
        """The memory's predictor, with `more` of its settings."""
        return self.open().predictor(top=self.top, open_set=self.open_set, memory_gb=self.memory_gb, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfData:
    """Tasks with labelled images."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A folder with one folder of images per class, or with train, val and test folders of such ones; a zip of either;
    a folder of several tasks; a list of images (CSV, Parquet) or of tasks (TOML); a name of `cheem data list`; or
    hf:OWNER/NAME[:CONFIG], a data set of the Hugging Face hub (extra `hub`)."""
    tasks: str | None = None
    """Names of the data's tasks to take, in this order, separated by commas; default: all."""
    split_seed: Annotated[int, ADVANCED] = 0
    """Where the data are not split into training, validation and test images: another number splits them otherwise."""
    data_dir: Path | None = None
    """Folder of the data sets of `cheem data prepare`; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    images: Annotated[ImagesConfig, ADVANCED] = ImagesConfig()
    """Where decoded images are kept."""
    skip_broken: bool = False
    """Leave out images that cannot be read, and name them: at most 5 %, rounded up, of a class and of a split. All are
    decoded once more for this."""

    def plans(self) -> tuple[Plan, ...]:
        """The tasks before decoding; raises ValueError or OSError for data that do not fit."""
        names = None if self.tasks is None else [name.strip() for name in self.tasks.split(",")]
        return tuple(plan_source(self.data, names, data_dir=self.data_dir, seed=self.split_seed)[1])

    def load(self, plans: Sequence[Plan], image_size: int, progress: Progress) -> tuple[Task, ...]:
        """The tasks, decoded."""
        if self.skip_broken:
            plans = [leave_out_broken(plan, progress) for plan in plans]
        cache_dir = self.images.cache_dir or cache_dir_of(self.data, self.data_dir)
        return decoded(plans, image_size, dataclasses.replace(self.images, cache_dir=cache_dir), progress)
