"""`cheem learn`: a memory's first tasks, or one more, from folders of pictures."""

import dataclasses
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import tyro

from cheem_jax.cheem.config import Preset
from cheem_jax.core.paths import shown
from cheem_jax.data.load import ImagesConfig, load_tasks
from cheem_jax.data.sources import cache_dir_of, plan_source
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.memory import OpenMemory, begin_with, create, open_memory
from cheem_jax.memory.data import decoding
from cheem_jax.run.directory import NAME
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Learn:
    """Learn tasks into a memory, which is made if there is none; earlier tasks' images are not needed."""

    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """The memory's folder."""
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A folder or zip with <class>/<image> or <split>/<class>/<image>, a folder of such ones, a stream file (TOML), a
    manifest (CSV, Parquet), or a name of `cheem data list`."""
    name: str | None = None
    """The task's name; default: that of its folder."""
    tasks: str | None = None
    """Names of the tasks to learn, in this order, separated by commas; default: all."""
    backbone: str | None = None
    """For a new memory: deit_tiny (the default), vit_base, vit_micro (bundled), another plain timm ViT by name."""
    weights: Path | None = None
    """For a new memory: a safetensors or npz file; default: bundled, else from the hub."""
    image_size: int | None = None
    """For a new memory: pixels of the square images; default: the backbone's own."""
    preset: Preset | None = None
    """For a new memory: quick (the default, sized for a CPU), paper (all settings of the paper), demo (for a few
    hundred small images)."""
    seed: int | None = None
    """For a new memory: root of every PRNG key; default: 0."""
    base_data: str | None = None
    """For a new memory: images of the pretraining data, which anchor the similarity of tasks."""
    keep_base: bool = False
    """For a new memory: keep the backbone's classes as one more target (with --base-data)."""
    base_classes: Path | None = None
    """For a new memory: a text file with the names of the backbone's classes, one a line."""
    begin_with: Path | None = None
    """For a new memory: a run of CHEEM whose tasks it begins with."""
    split_seed: int = 0
    """Seed of the splits that the data lack."""
    data_dir: Path | None = None
    """Where prepared data sets lie; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded images are kept."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    save_every: float | None = None
    """Seconds between rolling checkpoints; default: 30, more where they would take over 2 % of the time."""
    discard_unfinished: bool = False
    """Give up another task whose learning was interrupted."""

    @property
    def run_dir(self) -> Path:
        """Where work can be gone on with after a stop."""
        return self.memory


def learn_tasks(settings: Learn) -> None:
    """Read the data first, so that wrong ones leave no memory behind; then learn what is not learned yet."""
    progress = Progress()
    names = None if settings.tasks is None else [name.strip() for name in settings.tasks.split(",")]
    _, plans = plan_source(settings.data, names, data_dir=settings.data_dir, seed=settings.split_seed)
    if settings.name is not None and len(plans) > 1:
        raise ValueError(f"one name, {settings.name!r}, for {len(plans)} tasks: {[plan.name for plan in plans]}")
    fresh = not (settings.memory / NAME).exists()
    memory = (_new_memory if fresh else _old_memory)(settings, progress)
    progress.say(
        f"{'new memory ' if fresh else ''}{shown(memory.directory)}: {memory.config.backbone} at "
        f"{memory.config.image_size} pixels, {_tasks(len(memory.tasks))} so far"
    )
    cache_dir = settings.images.cache_dir or cache_dir_of(settings.data, settings.data_dir)
    images = dataclasses.replace(settings.images, cache_dir=cache_dir)
    try:
        tasks = load_tasks(plans, memory.config.image_size, images, decoding(progress))
    except BaseException:
        if fresh and not memory.tasks:  # broken pictures leave no empty memory behind
            shutil.rmtree(memory.directory)
        raise
    memory.learn(
        tasks, name=settings.name, progress=progress, save_every=settings.save_every,
        discard_unfinished=settings.discard_unfinished,
    )  # fmt: skip
    place, names = shown(memory.directory), ", ".join(task.name for task in memory.tasks)
    progress.say(
        f"{place} holds {_tasks(len(memory.tasks))}: {names}; cheem predict {place} PICTURES answers for all of them"
    )


def _tasks(num: int) -> str:
    return f"{num} task{'' if num == 1 else 's'}"


FOR_A_NEW_ONE = (
    "weights", "base_data", "base_classes", "begin_with", "backbone", "image_size", "preset", "seed", "keep_base",
)  # fmt: skip


def _new_memory(settings: Learn, progress: Progress) -> OpenMemory:
    if settings.begin_with is not None:
        _refuse(
            settings, set(FOR_A_NEW_ONE) - {"weights", "begin_with"}, "a memory that begins with a run takes the run's"
        )
        progress.say(f"beginning with what {shown(settings.begin_with)} has learned")
        return begin_with(settings.memory, settings.begin_with, weights=settings.weights, engine=settings.engine)
    names = None
    if settings.base_classes is not None:
        names = [line.strip() for line in settings.base_classes.read_text().splitlines() if line.strip()]
    return create(
        settings.memory, backbone=settings.backbone or "deit_tiny", weights=settings.weights,
        image_size=settings.image_size, preset=settings.preset or "quick", seed=settings.seed or 0,
        base_data=settings.base_data, keep_base=settings.keep_base, base_classes=names, engine=settings.engine,
        progress=progress,
    )  # fmt: skip


def _old_memory(settings: Learn, progress: Progress) -> OpenMemory:
    """The memory that is there; ValueError for settings that it does not have."""
    memory = open_memory(settings.memory, engine=settings.engine)
    memory.check_writable()
    _refuse(settings, {"weights", "base_data", "base_classes", "begin_with"}, "a memory that is there has its own")
    config = memory.config
    held = {
        "backbone": config.backbone, "image_size": config.image_size, "preset": config.preset, "seed": config.seed,
    }  # fmt: skip
    wrong = [
        f"{name} is {value} there and {given} here"
        for name, value in held.items()
        if (given := getattr(settings, name)) is not None and given != value
    ]
    if settings.keep_base and not config.keeps_base:
        wrong.append("the backbone's own classes are not kept there")
    if wrong:
        raise ValueError(
            f"memory {str(settings.memory)!r} was made with other settings: {'; '.join(wrong)}; leave them out, or "
            "make another memory"
        )
    return memory


def _refuse(settings: Learn, names: Collection[str], reason: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in FOR_A_NEW_ONE if name in names and getattr(settings, name)]
    if given:
        raise ValueError(f"{', '.join(given)}: {reason}; leave {'it' if len(given) == 1 else 'them'} out")
