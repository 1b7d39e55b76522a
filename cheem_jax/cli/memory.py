"""Commands that make, change and send a memory: learn, forget, export, push, pull.

The settings at the top are shared with commands that answer: a memory, what it takes to answer with
one, and data.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from cheem_jax.backbone.weights import named_config
from cheem_jax.cheem.config import LearnPreset
from cheem_jax.cli.arguments import ADVANCED
from cheem_jax.cli.data import leave_out_broken
from cheem_jax.cli.info import OfMemory, OfMemoryOrRun
from cheem_jax.cli.report import refresh_page
from cheem_jax.core.paths import shown
from cheem_jax.data.load import ImagesConfig
from cheem_jax.data.sources import cache_dir_of, plan_source
from cheem_jax.data.task import Plan, Purpose, Task, fingerprint
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.export import Format, kind_of
from cheem_jax.memory import OpenMemory, begin_with, create, open_memory
from cheem_jax.memory.contents import read_config
from cheem_jax.memory.data import decode
from cheem_jax.memory.directory import remove_memory
from cheem_jax.memory.hub import pull, push
from cheem_jax.memory.making import read_base_task
from cheem_jax.memory.predictor import Predictor
from cheem_jax.run.differences import Leaf, find_differences
from cheem_jax.run.directory import NAME
from cheem_jax.run.fingerprint import digest
from cheem_jax.run.progress import Progress

Repository = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPO")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering(OfMemoryOrRun):
    """A memory, or a finished run, that answers."""

    def open(self) -> OpenMemory:
        """The memory; raises as `open_memory`."""
        return open_memory(self.memory, weights=self.weights, usable=self.usable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicting(Answering):
    """How images without labels are answered."""

    top: int = 5
    """How many classes to list for each image, the most probable first (a table shows two)."""
    memory_gb: Annotated[float | None, ADVANCED] = None
    """Gigabytes for the networks of tasks that are ready; default: a quarter of the device's
    memory. Least recently used ones are evicted and made again when needed; answers are the
    same."""

    def predictor(self, **more: Any) -> Predictor:
        """The memory's predictor, with `more` of its settings."""
        return self.open().predictor(top=self.top, memory_gb=self.memory_gb, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfData:
    """Tasks with labelled images."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A folder with one folder of images per class, or with train, val and test folders of such
    ones; a zip of either; a folder of several tasks; a list of images (CSV, Parquet) or of tasks
    (TOML); a name of `cheem data list`; or hf:OWNER/NAME[:CONFIG], a data set of the Hugging Face
    hub (extra `hub`)."""
    tasks: str | None = None
    """Names of the data's tasks to take, in this order, separated by commas; default: all."""
    split_seed: Annotated[int, ADVANCED] = 0
    """Where the data are not split into training, validation and test images: another number splits
    them otherwise."""
    data_dir: Path | None = None
    """Folder of the data sets of `cheem data prepare`; default: $TFDS_DATA_DIR, else
    ~/tensorflow_datasets."""
    images: Annotated[ImagesConfig, ADVANCED] = ImagesConfig()
    """Where decoded images are kept."""
    skip_broken: bool = False
    """Leave out images that cannot be read, and name them: at most 5 %, rounded up, of a class and
    of a split. All are decoded once more for this."""

    def plans(self, purpose: Purpose) -> tuple[Plan, ...]:
        """The tasks before decoding; raises ValueError or OSError for data that do not fit."""
        names = None if self.tasks is None else [name.strip() for name in self.tasks.split(",")]
        return tuple(
            plan_source(
                self.data, names, data_dir=self.data_dir, seed=self.split_seed, purpose=purpose
            )[1]
        )

    def load(
        self,
        plans: Sequence[Plan],
        memory: OpenMemory,
        progress: Progress,
        *,
        only: str | None = None,
    ) -> tuple[Task, ...]:
        """The tasks, decoded for a memory; `only` as for `load_tasks`."""
        if self.skip_broken:
            plans = [leave_out_broken(plan, progress) for plan in plans]
        cache_dir = self.images.cache_dir or cache_dir_of(self.data, self.data_dir)
        images = dataclasses.replace(self.images, cache_dir=cache_dir)
        known = memory.config
        return decode(plans, known.image_size, images, progress, upright=known.upright, only=only)


@dataclasses.dataclass(frozen=True)
class Learn(OfData, OfMemory):
    """Learn tasks into a memory, which is made if there is none; images of earlier tasks are not
    needed."""

    name: str | None = None
    """The task's name; default: that of its folder."""
    extend: str | None = None
    """A learned task of which the data are more images: of classes that it has, of new ones, or
    both."""
    backbone: str | None = None
    """For a new memory: deit_tiny (the default), dinov2_small, vit_micro (bundled), another plain
    timm ViT by name."""
    weights: Path | None = None
    """For a new memory: a safetensors or npz file; default: bundled, else from the hub."""
    image_size: int | None = None
    """For a new memory: pixels of the square images; default: the backbone's own."""
    preset: LearnPreset | None = None
    """For a new memory: auto (the default: quick, with up to 64 epochs for a task of fewer than
    1,000 images), quick (sized for a CPU), paper (the paper's settings, ours where it states none),
    demo (for a few hundred small images); quick_plus and cheem_plus are quick and paper with
    another router, quick_plus with another search too."""
    augment: bool = False
    """For a new memory: crop, flip and change training images at random, new in every epoch. For
    images whose mirror image means the same; not for text or digits."""
    seed: int | None = None
    """For a new memory: where random choices start; the same number gives the same memory; default:
    0."""
    base_data: str | None = None
    """For a new memory: a folder or zip with images of the pretraining data, with which new tasks
    are compared."""
    keep_base: bool = False
    """For a new memory: also predict the classes of the pretraining data (with --base-data)."""
    base_classes: Path | None = None
    """For a new memory: a text file with the names of those classes, one a line."""
    begin_with: Path | None = None
    """For a new memory: a run of CHEEM whose tasks it begins with."""
    engine: Annotated[EngineConfig, ADVANCED] = EngineConfig()
    """How networks are run."""
    save_every: Annotated[float | None, ADVANCED] = None
    """Seconds between saves of unfinished work; default: 30, more where saving would take over 2 %
    of the time."""
    discard_unfinished: bool = False
    """Give up a task that was interrupted; until it is finished, given up or forgotten, no other
    task is learned."""

    @property
    def run_dir(self) -> Path:
        """Where work resumes after a stop."""
        return self.memory


def learn_tasks(settings: Learn) -> None:
    """Read the data first, so that wrong ones leave no memory behind; then learn what is not
    learned yet."""
    progress = Progress()
    plans = settings.plans("learn" if settings.extend is None else "extend")
    if settings.name is not None and len(plans) > 1:
        raise ValueError(
            f"one name, {settings.name!r}, for {len(plans)} tasks: {[plan.name for plan in plans]}"
        )
    fresh = not (settings.memory / NAME).exists()
    if fresh and settings.extend is not None:
        raise ValueError(
            f"no memory {str(settings.memory)!r}, so no task {settings.extend!r} to extend; leave"
            " out --extend"
        )
    memory = (_new_memory if fresh else _old_memory)(settings, progress)
    progress.say(
        f"{'new memory ' if fresh else ''}{shown(memory.directory)}: {memory.config.backbone} at "
        f"{memory.config.image_size} pixels, {_tasks(len(memory.tasks))} so far"
    )
    try:
        tasks = settings.load(plans, memory, progress)
    except BaseException:
        if fresh and not memory.tasks:  # broken images leave no empty memory behind
            remove_memory(memory.directory)
        raise
    memory.learn(
        tasks,
        name=settings.name,
        extend=settings.extend,
        progress=progress,
        save_every=settings.save_every,
        discard_unfinished=settings.discard_unfinished,
    )
    refresh_page(memory.directory)
    place = shown(memory.directory)
    names = ", ".join(task.name for task in memory.tasks)
    progress.say(
        f"{place} contains {_tasks(len(memory.tasks))}: {names}; cheem predict {place} IMAGES"
        " answers for all of them"
    )


def _tasks(num: int) -> str:
    return f"{num} task{'' if num == 1 else 's'}"


def _new_memory(settings: Learn, progress: Progress) -> OpenMemory:
    if settings.begin_with is not None:
        names = (
            "base_data",
            "base_classes",
            "backbone",
            "image_size",
            "preset",
            "augment",
            "seed",
            "keep_base",
        )
        _refuse(settings, names, "a memory that begins with a run takes the run's")
        progress.say(f"beginning with what {shown(settings.begin_with)} has learned")
        return begin_with(
            settings.memory, settings.begin_with, weights=settings.weights, engine=settings.engine
        )
    names = None if settings.base_classes is None else _names_in(settings.base_classes)
    return create(
        settings.memory,
        backbone=settings.backbone or "deit_tiny",
        weights=settings.weights,
        image_size=settings.image_size,
        preset=settings.preset or "auto",
        augment=settings.augment,
        seed=settings.seed or 0,
        base_data=settings.base_data,
        keep_base=settings.keep_base,
        base_classes=names,
        engine=settings.engine,
        progress=progress,
    )


def _old_memory(settings: Learn, progress: Progress) -> OpenMemory:
    """The memory that is there. The settings that it was made with are accepted; raises ValueError
    for others."""
    memory = open_memory(settings.memory, weights=settings.weights, engine=settings.engine)
    memory.check_writable()
    if apart := list(_differences(settings, memory, progress)):
        raise ValueError(
            f"memory {str(settings.memory)!r} was made with other settings:"
            f" {'; '.join(map(str, apart))}; leave them out, or make another memory"
        )
    return memory


def _differences(settings: Learn, memory: OpenMemory, progress: Progress) -> Iterator[Leaf]:
    """The settings that a memory is made with and that are given with other values; hashes stand
    for files."""
    config = memory.config
    there = dict[str, Any]()
    here = dict[str, Any]()
    for name in ("image_size", "preset", "seed"):
        there[name], here[name] = getattr(config, name), getattr(settings, name)
    if settings.backbone is not None:
        known = named_config(name := settings.backbone.removeprefix("timm/"))
        there["backbone"], here["backbone"] = config.backbone, name if known is None else known.name
    for name, value in (("augment", config.method.augment), ("keep_base", config.keeps_base)):
        there[name], here[name] = (
            value,
            getattr(settings, name) or None,
        )  # a flag that is left out says nothing
    if settings.base_classes is not None:
        there["base_classes"] = memory.targets[-1].classes if config.keeps_base else None
        here["base_classes"] = _names_in(settings.base_classes)
    if settings.base_data is not None:
        there["base_data"] = config.base_data_sha256
        own = read_base_task(
            settings.base_data, config.image_size, progress, upright=config.upright
        )
        here["base_data"] = fingerprint(own)
    if settings.begin_with is not None:
        there["begin_with"] = config.begun_with_sha256
        here["begin_with"] = digest(read_config(settings.begin_with))
    for name, given in here.items():
        if given is not None:
            yield from find_differences(there[name], given, (name,))[:1]


def _names_in(file: Path) -> tuple[str, ...]:
    return tuple(line.strip() for line in file.read_text().splitlines() if line.strip())


def _refuse(settings: Learn, names: Sequence[str], reason: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: {reason}; leave {'it' if len(given) == 1 else 'them'} out"
        )


@dataclasses.dataclass(frozen=True)
class Forget(OfMemory):
    """Drop tasks and what only they use; every other task answers as before, and this cannot be
    undone."""

    tasks: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TASK [TASK ...]")
    ]
    """Names of tasks: all of them are forgotten, or none."""
    erase: bool = False
    """Also remove experts of the task that later tasks have adapted; what those tasks use is then
    stored in full."""
    json: bool = False
    """Print JSON instead."""


def forget_tasks(settings: Forget) -> None:
    """Forget them, and say what had to stay and why."""
    memory = open_memory(settings.memory)
    done = memory.forget(*settings.tasks, erase=settings.erase)
    if memory.tasks:
        refresh_page(memory.directory)
    if settings.json:
        removed, made_full = (
            [place._asdict() for place in places] for places in (done.removed, done.baked)
        )
        in_use, ancestors = (
            [{**kept.place._asdict(), "tasks": list(kept.tasks)} for kept in group]
            for group in (done.in_use, done.ancestors)
        )
        found = {
            "tasks": settings.tasks,
            "numbers": done.numbers,
            "removed": removed,
            "in_use": in_use,
        }
        print(json.dumps({**found, "ancestors": ancestors, "made_full": made_full}))
        return
    say = Progress().say
    left = ", ".join(task.name for task in memory.tasks) or "no task"
    num = len(done.removed)
    names = ", ".join(map(repr, settings.tasks))
    who = "it" if len(settings.tasks) == 1 else "they"
    say(
        f"{shown(settings.memory)} has forgotten {names} and {num} expert{'' if num == 1 else 's'}"
        f" that only {who} used; {left} left"
    )
    for kept in done.in_use:
        say(
            f"block {kept.place.block + 1}, expert {kept.place.expert} stays: used by"
            f" {', '.join(kept.tasks)}"
        )
    for kept in done.ancestors:
        say(
            f"block {kept.place.block + 1}, expert {kept.place.expert} stays, no candidate for new"
            f" tasks any more: what {', '.join(kept.tasks)} uses was adapted from it (--erase makes"
            " that a full expert)"
        )
    for place in done.baked:
        say(f"block {place.block + 1}, expert {place.expert} is a full expert now")


@dataclasses.dataclass(frozen=True)
class Export(Answering):
    """Write one task's network, or the whole memory behind its router, for use without this
    library."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file to write: .onnx, .stablehlo (JAX's own), or .safetensors (a timm state dict of one
    task)."""
    format: Format | None = None
    """onnx, stablehlo or timm; default: by the file's ending."""
    task: str | None = None
    """The task whose network is written; default: the whole memory (not for timm)."""
    open_set: float | None = None
    """As for `cheem predict`: the whole memory then answers -1 for `none of my tasks`."""
    overwrite: bool = False
    """Replace a file that exists."""
    json: bool = False
    """Print JSON instead."""


def export_memory(settings: Export) -> None:
    """Write it, check it against this library, and say its size and speed."""
    kind = settings.format or kind_of(
        settings.file
    )  # before the memory is opened, which takes seconds
    done = settings.open().export(
        settings.file,
        kind,
        task=settings.task,
        open_set=settings.open_set,
        overwrite=settings.overwrite,
    )
    if settings.json:
        print(json.dumps({**done._asdict(), "file": str(done.file)}))
        return
    say = Progress().say
    took = (
        ""
        if done.seconds_per_image is None
        else f", {1000 * done.seconds_per_image:.1f} ms for one image here"
    )
    say(
        f"wrote {shown(done.file)}: {done.num_bytes / 2**20:.1f} MB{took}; differs from this"
        f" library by at most {done.largest_difference:.1e}"
    )
    for note in done.notes:
        say(note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push(OfMemory):
    """Put a memory on the Hugging Face hub, with a model card; no image is sent."""

    repository: Repository
    """OWNER/NAME on the hub, made if it is not there; `hf auth login` logs in."""
    license: str | None = None
    """The licence that the model card names, such as apache-2.0; default: none."""
    public: bool = False
    """A repository that is made is for everybody; default: for its owner alone."""


def push_memory(settings: Push) -> None:
    """Push it, and say what was sent."""
    names = push(
        settings.memory, settings.repository, license=settings.license, public=settings.public
    )
    Progress().say(
        f"{settings.repository} contains {shown(settings.memory)}: {len(names)} files, and no image"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull:
    """Get a memory from the Hugging Face hub, whole or not at all."""

    repository: Repository
    """OWNER/NAME on the hub."""
    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """A new or empty folder."""


def pull_memory(settings: Pull) -> None:
    """Pull it, and say what it knows."""
    memory = pull(settings.repository, settings.memory)
    place = shown(settings.memory)
    names = ", ".join(task.name for task in memory.tasks) or "no task"
    Progress().say(f"{place} contains {names}; cheem predict {place} IMAGES answers")
