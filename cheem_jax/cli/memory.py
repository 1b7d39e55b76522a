"""Commands that create, change or transfer a memory: `learn`, `forget`, `export`, `push`, `pull`.

The commands `predict`, `evaluate` and `serve` also use `Answering`, `Predicting` and `OfData`.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from cheem_jax.backbone.weights import named_config
from cheem_jax.cheem.config import LearnPreset
from cheem_jax.cli.arguments import ADVANCED
from cheem_jax.cli.data import DataFolder, exclude_broken
from cheem_jax.cli.info import OfMemory, OfMemoryOrRun
from cheem_jax.core.paths import shown
from cheem_jax.data.load import ImagesConfig
from cheem_jax.data.sources import cache_dir_of, plan_source
from cheem_jax.data.task import Plan, Purpose, Task, fingerprint
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.export import Format, kind_of
from cheem_jax.memory import OpenMemory, begin_with, create, open_memory
from cheem_jax.memory.contents import read_config
from cheem_jax.memory.data import decode
from cheem_jax.memory.directory import missing_folders, remove_empty, remove_empty_folders
from cheem_jax.memory.forgetting import PoolPosition, RetainedExpert
from cheem_jax.memory.hub import pull, push
from cheem_jax.memory.making import read_base_task
from cheem_jax.memory.predictor import Predictor
from cheem_jax.report.page.assemble import refresh_memory_page
from cheem_jax.run.differences import Leaf, find_differences
from cheem_jax.run.directory import NAME
from cheem_jax.run.fingerprint import digest
from cheem_jax.run.progress import Progress

Repository = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPO")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answering(OfMemoryOrRun):
    """Options of commands that predict with a memory or a finished run."""

    def open(self) -> OpenMemory:
        """Open the memory. Raises the errors of `open_memory`."""
        return open_memory(self.memory, weights=self.weights, usable=self.usable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicting(Answering):
    """Options of commands that predict images without labels."""

    top: int = 5
    """Number of predicted classes per image; a table shows at most two."""
    memory_gb: Annotated[float | None, ADVANCED] = None
    """Size of the cache of task networks in GB; default: a quarter of the device's memory. The
    least recently used networks are evicted and made again on demand. Predictions do not depend on
    the size."""

    def predictor(self, **more: Any) -> Predictor:
        """Return a predictor of the memory; `more` is passed to `OpenMemory.predictor`."""
        return self.open().predictor(top=self.top, memory_gb=self.memory_gb, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfData(DataFolder):
    """Options of commands that read tasks with labelled images."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A folder with one folder of images per class, or with train, val and test folders of this
    kind; a zip of such a folder; a folder of more than one task; a list of images (CSV, Parquet) or
    of tasks (TOML); a name of `cheem data list`; or hf:OWNER/NAME[:CONFIG], a data set of the
    Hugging Face hub (extra `hub`)."""
    tasks: str | None = None
    """Names of the tasks to use, in this order, separated by commas; default: all tasks of the
    data."""
    images: Annotated[ImagesConfig, ADVANCED] = ImagesConfig()
    """Storage of decoded images."""
    skip_broken: bool = False
    """Exclude unreadable images and print their names. At most 5 % (rounded up) of the images of
    each class and of each split can be excluded. All images are decoded one more time."""

    def plans(self, purpose: Purpose) -> tuple[Plan, ...]:
        """Return the plans of the tasks; no image is decoded yet. Raises ValueError or OSError for
        unsuitable data."""
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
        """Decode the tasks at the image size of the memory; `only` restricts decoding to one
        split."""
        if self.skip_broken:
            plans = [exclude_broken(plan, progress) for plan in plans]
        cache_dir = self.images.cache_dir or cache_dir_of(self.data, self.data_dir)
        images = dataclasses.replace(self.images, cache_dir=cache_dir)
        size, upright = memory.config.image_size, memory.config.upright
        return decode(plans, size, images, progress, upright=upright, only=only)


@dataclasses.dataclass(frozen=True)
class Learn(OfData, OfMemory):
    """Learn tasks into a memory, which is created if it does not exist. Images of earlier tasks are
    not needed."""

    name: Annotated[str | None, tyro.conf.DisallowNone] = None
    """Name of the task; default: the name of its folder."""
    extend: Annotated[str | None, tyro.conf.DisallowNone] = None
    """Name of a learned task. The data are further images of its classes, of new classes, or of
    both."""
    backbone: str | None = None
    """For a new memory: deit_tiny (the default), dinov2_small, vit_micro (bundled), or another
    plain timm ViT by name."""
    weights: Path | None = None
    """For a new memory: a safetensors or npz file; default: bundled weights, else from the hub."""
    image_size: int | None = None
    """For a new memory: height and width of images in pixels; default: the backbone's image
    size."""
    preset: LearnPreset | None = None
    """For a new memory: `auto` is the default and uses `quick_plus` with augmented images, up to
    128 epochs for tasks with fewer than 1,000 images, and a router that suits the width of the
    backbone; `quick` is sized for a CPU; `paper` uses the paper's settings, and ours if the paper
    states none; `demo` is for a few hundred small images; `quick_plus` and `cheem_plus` are `quick`
    and `paper` with another search and another router."""
    augment: bool = False
    """For a new memory: crop and change training images randomly in every epoch; `auto` always
    does."""
    seed: int | None = None
    """For a new memory: root of every PRNG key; default: 0."""
    base_data: str | None = None
    """For a new memory: a folder or zip with images of the pretraining data, for --keep-base. The
    paper's search also compares new tasks with these images."""
    keep_base: bool = False
    """For a new memory: also predict the classes of the pretraining data (with --base-data)."""
    base_classes: Path | None = None
    """For a new memory: a text file with the class names of the pretraining data, one per line."""
    begin_with: Path | None = None
    """For a new memory: a CHEEM run whose tasks the memory starts with. New tasks are learned with
    the preset `auto`, and with the router of the run."""
    engine: Annotated[EngineConfig, ADVANCED] = EngineConfig()
    """Execution of networks."""
    save_every: Annotated[float | None, ADVANCED] = None
    """Seconds between rolling checkpoints; default: 30, or more if checkpoints would take over 2 %
    of the time."""
    discard_unfinished: bool = False
    """Discard the progress of an interrupted task. No other task can be learned until that task is
    finished, discarded or forgotten."""

    @property
    def run_dir(self) -> Path:
        """Folder in which a stopped command resumes."""
        return self.memory


def learn_tasks(settings: Learn) -> None:
    """Read the data, create the memory if it does not exist, and learn the new tasks. An error
    before the first task begins leaves no memory without tasks behind."""
    progress = Progress()
    plans = settings.plans("learn" if settings.extend is None else "extend")
    if settings.name is not None and len(plans) > 1:
        raise ValueError(
            f"the name {settings.name!r} is for one task, but the data contain {len(plans)}:"
            f" {[plan.name for plan in plans]}; give the data of one task, or omit --name"
        )
    fresh = not (settings.memory / NAME).exists()
    if fresh and settings.extend is not None:
        raise ValueError(
            f"memory {str(settings.memory)!r} does not exist, so task {settings.extend!r} cannot be"
            " extended; omit --extend"
        )
    above = missing_folders(settings.memory)
    memory = (_new_memory if fresh else _old_memory)(settings, progress)
    progress.say(
        f"{'new memory ' if fresh else ''}{shown(memory.directory)}: {memory.config.backbone} at "
        f"{memory.config.image_size} pixels, {_tasks(len(memory.tasks))} so far"
    )
    try:
        memory.learn(
            settings.load(plans, memory, progress),
            name=settings.name,
            extend=settings.extend,
            progress=progress,
            save_every=settings.save_every,
            discard_unfinished=settings.discard_unfinished,
        )
    except BaseException:
        if fresh:
            remove_empty(memory.directory)
            remove_empty_folders(above)
        raise
    refresh_memory_page(memory.directory)
    place = shown(memory.directory)
    names = ", ".join(task.name for task in memory.tasks)
    progress.say(
        f"{place} contains {_tasks(len(memory.tasks))}: {names}; predict with `cheem predict"
        f" {place} IMAGES`"
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
        values = {name: getattr(settings, name) for name in names}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if options := [f"--{name.replace('_', '-')}" for name in given]:
            raise ValueError(
                "with --begin-with, a memory has the settings of the run, and learns new tasks with"
                f" the preset auto; omit {', '.join(options)}"
            )
        progress.say(f"starting with the tasks of {shown(settings.begin_with)}")
        return begin_with(
            settings.memory, settings.begin_with, weights=settings.weights, engine=settings.engine
        )
    names = None if settings.base_classes is None else _read_names(settings.base_classes)
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
    """Open an existing memory. Raises ValueError if an option differs from the setting with which
    the memory was created."""
    memory = open_memory(settings.memory, weights=settings.weights, engine=settings.engine)
    memory.check_writable()
    if differences := list(_differences(settings, memory, progress)):
        raise ValueError(
            f"memory {str(settings.memory)!r} was created with other settings:"
            f" {'; '.join(map(str, differences))}; omit these options, or create another memory"
        )
    return memory


def _differences(settings: Learn, memory: OpenMemory, progress: Progress) -> Iterator[Leaf]:
    """Yield the differences between the options and the settings with which the memory was created.
    Files are compared by their hashes."""
    config = memory.config
    # each pair is the setting of the memory and the option, which is None if it was omitted
    pairs: dict[str, tuple[Any, Any]] = {
        "image_size": (config.image_size, settings.image_size),
        "preset": (config.preset, settings.preset),
        "seed": (config.seed, settings.seed),
        "augment": (config.method.augment or config.preset == "auto", settings.augment or None),
        "keep_base": (config.keeps_base, settings.keep_base or None),
    }
    if settings.backbone is not None:
        name = settings.backbone.removeprefix("timm/")
        backbone = named_config(name)
        pairs["backbone"] = config.backbone, name if backbone is None else backbone.name
    if settings.base_classes is not None:
        classes = memory.targets[-1].classes if config.keeps_base else None
        pairs["base_classes"] = classes, _read_names(settings.base_classes)
    if settings.base_data is not None:
        base_task = read_base_task(
            settings.base_data, config.image_size, progress, upright=config.upright
        )
        pairs["base_data"] = config.base_data_sha256, fingerprint(base_task)
    if settings.begin_with is not None:
        pairs["begin_with"] = config.begun_with_sha256, digest(read_config(settings.begin_with))
    for name, (recorded, value) in pairs.items():
        if value is not None:
            yield from find_differences(recorded, value, (name,))[:1]


def _read_names(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}); save it as UTF-8") from None
    return tuple(line.strip() for line in lines if line.strip())


@dataclasses.dataclass(frozen=True)
class Forget(OfMemory):
    """Delete tasks and the experts that only they use. Predictions for other tasks do not change.
    Deleting cannot be undone."""

    tasks: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TASK [TASK ...]")
    ]
    """Names of the tasks. If one name is unknown, no task is forgotten."""
    erase: bool = False
    """Also remove experts that later tasks have adapted; the adapted experts are then stored in
    full."""
    json: bool = False
    """Print JSON instead of text."""


def forget_tasks(settings: Forget) -> None:
    """Forget the tasks. Print the retained experts and the reasons."""
    memory = open_memory(settings.memory)
    forgotten = memory.forget(*settings.tasks, erase=settings.erase)
    if memory.tasks:
        refresh_memory_page(memory.directory)
    if settings.json:
        report = {
            "tasks": settings.tasks,
            "numbers": forgotten.numbers,
            "removed": forgotten.removed,
            "in_use": forgotten.in_use,
            "ancestors": forgotten.ancestors,
            "made_full": forgotten.merged,
        }
        print(json.dumps({name: [*map(_json_value, items)] for name, items in report.items()}))
        return
    say = Progress().say
    remaining = ", ".join(task.name for task in memory.tasks) or "no task"
    num = len(forgotten.removed)
    names = ", ".join(map(repr, settings.tasks))
    who = "it" if len(settings.tasks) == 1 else "they"
    say(
        f"{shown(settings.memory)} has forgotten {names} and {num} expert{'' if num == 1 else 's'}"
        f" that only {who} used; remaining: {remaining}"
    )
    for where, tasks in grouped((one.place, one.tasks) for one in forgotten.in_use):
        say(f"{where} stays: used by {', '.join(tasks)}")
    for where, tasks in grouped((one.place, one.tasks) for one in forgotten.ancestors):
        say(
            f"{where} stays, but not as a candidate for new tasks: experts of {', '.join(tasks)}"
            " were adapted from it (--erase stores them in full)"
        )
    for where, _ in grouped((place, ()) for place in forgotten.merged):
        say(f"{where} is a full expert now")


def grouped(
    experts: Iterable[tuple[PoolPosition, Sequence[str]]],
) -> Iterator[tuple[str, Sequence[str]]]:
    """Group experts of equal index and tasks, and describe the position of each group."""
    groups: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for place, tasks in experts:
        groups.setdefault((place.expert, tuple(tasks)), []).append(str(place.block + 1))
    for (expert, tasks), blocks in groups.items():
        yield f"block{'s' * (len(blocks) > 1)} {', '.join(blocks)}: expert {expert}", tasks


def _json_value(item: str | int | PoolPosition | RetainedExpert) -> Any:
    """Convert an item of the report on forgetting to a JSON value."""
    match item:
        case RetainedExpert(place, tasks):
            return {**place._asdict(), "tasks": tasks}
        case PoolPosition():
            return item._asdict()
        case _:
            return item


@dataclasses.dataclass(frozen=True)
class Export(Answering):
    """Export the network of one task, or the whole memory with its router, for use without this
    library."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """File to write: .onnx, .stablehlo (JAX's format), or .safetensors (a timm state dict of one
    task)."""
    format: Format | None = None
    """`onnx`, `stablehlo` or `timm`; default: chosen by the suffix of the file."""
    task: Annotated[str | None, tyro.conf.DisallowNone] = None
    """Name of the task to export. Without it, the whole memory is exported; `timm` needs a task."""
    open_set: float | None = None
    """Share of a task's images that the exported memory rejects with -1 (`none of my tasks`), as
    for `cheem predict`."""
    overwrite: bool = False
    """Replace an existing file."""
    json: bool = False
    """Print JSON instead of text."""


def export_memory(settings: Export) -> None:
    """Export the memory, compare the outputs of the file and of this library, and print the size of
    the file and the prediction time per image."""
    # errors about the format are raised before the slow opening of the memory
    kind = settings.format or kind_of(settings.file)
    exported = settings.open().export(
        settings.file,
        kind,
        task=settings.task,
        open_set=settings.open_set,
        overwrite=settings.overwrite,
    )
    if settings.json:
        print(json.dumps({**exported._asdict(), "file": str(exported.file)}))
        return
    say = Progress().say
    speed = (
        ""
        if exported.seconds_per_image is None
        else f", {1000 * exported.seconds_per_image:.1f} ms for one image on this machine"
    )
    say(
        f"wrote {shown(exported.file)}: {exported.num_bytes / 2**20:.1f} MB{speed}; differs from"
        f" this library by at most {exported.largest_difference:.1e}"
    )
    for note in exported.notes:
        say(note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push(OfMemory):
    """Upload a memory to the Hugging Face hub, with a model card. Images are not uploaded."""

    repository: Repository
    """OWNER/NAME on the hub, created if it does not exist; `hf auth login` logs in."""
    license: str | None = None
    """Licence for the model card, such as apache-2.0; default: none."""
    public: bool = False
    """Make a new repository public; default: private."""


def push_memory(settings: Push) -> None:
    """Upload the memory and print the number of files."""
    names = push(
        settings.memory, settings.repository, license=settings.license, public=settings.public
    )
    Progress().say(
        f"uploaded {shown(settings.memory)} to {settings.repository}: {len(names)} files, no images"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pull:
    """Download a memory from the Hugging Face hub, completely or not at all."""

    repository: Repository
    """Repository on the hub, OWNER/NAME."""
    memory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MEMORY")]
    """Folder of the memory, new or empty."""


def pull_memory(settings: Pull) -> None:
    """Download the memory and print the names of its tasks."""
    memory = pull(settings.repository, settings.memory)
    place = shown(settings.memory)
    names = ", ".join(task.name for task in memory.tasks) or "no task"
    Progress().say(f"{place} contains {names}; predict with `cheem predict {place} IMAGES`")
