"""CHEEM, or any other method, on MTIL or on any other stream of image tasks, with a pretrained ViT.

    python experiments/mtil.py --backbone deit_tiny --data-dir DATA python experiments/mtil.py
    --method l2p --options.key-loss batch --data-dir DATA --run-dir runs/l2p python
    experiments/mtil.py --backbone deit_tiny --stream FOLDER --image-size 96 --preset quick
    --run-dir runs/real

DATA is the data folder that `cheem data prepare mtil --data-dir DATA` fills. FOLDER holds one
folder or zip per task with `<split>/<class>/<image>` inside.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from rich.console import Console
from tyro.conf import AvoidSubcommands

from cheem_jax.backbone.alexnet import load_alexnet
from cheem_jax.backbone.weights import Pretrained, load_pretrained
from cheem_jax.baselines.catalogue import NAMES, Baseline, MethodConfig, Name, Networks, preset_of
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.cheem.config import PRESETS, CheemConfig, Preset
from cheem_jax.cli.arguments import arguments_of, located
from cheem_jax.cli.main import parse, run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.images import Images
from cheem_jax.core.settings import SeedsConfig
from cheem_jax.data.benchmarks.table import Order
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.load import ImagesConfig, Phase, load_tasks, load_train
from cheem_jax.data.sources import MissingTasks, cache_dir_of, plan_source
from cheem_jax.data.task import Stream, select
from cheem_jax.engine import hosts
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.hosts import HostsConfig
from cheem_jax.engine.layout import MeshConfig, make_layout
from cheem_jax.report.comparison import comparison_grid, narrow
from cheem_jax.report.table import show
from cheem_jax.run.progress import Progress
from cheem_jax.run_config import RouterWeights

T = TypeVar("T")
DEMO = "demo"
FULL = ("paper", "cheem_plus")
"""Presets that are repeated with three seeds."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Images and weights."""

    backbone: str | None = None
    """deit_tiny (the default), vit_base, vit_base_augreg, clip_vit_base, vit_micro (the demo
    stream's default), vit_nano, or another plain timm ViT by name."""
    weights: Path | None = None
    """A safetensors or npz file under timm's names, or a converted one; default: bundled, else from
    the hub."""
    stream: str = "mtil"
    """mtil or vdd (see `cheem data list`), a stream file (TOML), a folder with one folder or zip
    per task, or demo: the bundled stream of small tasks."""
    data_dir: Path | None = None
    """Where prepared data sets lie; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    tasks: str | None = None
    """Names of the tasks in learning order, separated by commas; default: all, in the stream's."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded images are kept."""
    image_size: int | None = None
    """Pixels of the square images; default: the backbone's own."""


@dataclasses.dataclass(frozen=True)
class Common(Data):
    """What a run has in common with a study of several."""

    order: Order = "default"
    """Order of MTIL's tasks: of the paper's tables, of its table on task orders, or the second one
    of ZSCL."""
    base_data: str | None = None
    """Images of the pretraining data (anything that `--stream` takes for one task), whose mean CLS
    tokens anchor the similarity."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    devices: Literal["all"] | int = 1
    """Devices that share each batch: a number, or all, those of every process together; the same
    results beyond rounding."""
    save_every: float | None = None
    """Seconds between rolling checkpoints; default: 30, more where they would take over 2 % of the
    time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mtil(Common):
    """A method on a stream of tasks, resumable; CHEEM with its reference."""

    cheem: CheemConfig
    """Settings of `cheem` and `cheem_lite`; `--preset` chooses their defaults."""
    preset: Preset = "paper"
    """`paper`: the paper's settings, ours where it states none; `quick`: every part on, sized for a
    CPU; `demo`: for a few hundred images; `cheem_plus` and `quick_plus`: `paper` and `quick` with a
    router that paid on small real sets, `quick_plus` with another search, too."""
    augment: bool = False
    """Short for --cheem.augment: crop, flip and change training images at random, new in every
    epoch."""
    method: Name = "cheem"
    """What learns; full_finetune and lora_finetune are upper bounds, which are given the task
    ID."""
    options: AvoidSubcommands[Baseline | None] = None
    """Settings of every method but `cheem` and `cheem_lite`."""
    split_seed: int = 0
    """Seed of the splits that a data set lacks; not `--seed`, so that runs of several seeds see the
    same splits."""
    pixel_norm: Literal["checkpoint", "unit"] = "checkpoint"
    """How pixels are scaled: as the weights were trained, or to 0..1, as the CODA-Prompt code does
    whatever they were trained with."""
    router: str | None = None
    """A lighter network that infers the task (`cheem_lite`, `moe_adapters`): a backbone, or
    alexnet; default: the backbone itself."""
    router_weights: Path | None = None
    """Weights of the router, as for `--weights`; for alexnet what convert/torchvision_alexnet.py
    writes."""
    hosts: HostsConfig = HostsConfig()
    """Several processes as one job; each is started with the same command, and --devices all."""
    seed: int = 0
    """Root of every PRNG key in the run."""
    num_seeds: int | None = None
    """Runs with this seed and the following ones, each in a separate folder below the run
    directory; default: 3 for the presets `paper` and `cheem_plus`, else 1."""
    seeds: SeedsConfig = SeedsConfig()
    """Separate seeds for parts of the run."""
    measured_on: Literal["test", "validation"] = "test"
    """Images that accuracies are of; `validation`, to choose settings without a look at the test
    images."""
    upper_bound: bool = False
    """Also fine-tune the whole backbone per task, the task ID given; takes its own time."""
    tensorboard: bool = False
    """Also write TensorBoard's event files after each task (extra `tensorboard`)."""
    run_dir: Path = Path("runs/mtil")
    """Where the run is kept; an unfinished one is continued."""


class Loaded(NamedTuple):
    """What a run works on."""

    stream: Stream
    pretrained: Pretrained
    router: RouterWeights | None
    base_images: Images | None

    @property
    def size(self) -> int:
        """Pixels of the square images."""
        return self.pretrained.config.image_size


def main(settings: Mtil) -> None:
    """Load weights and data, run the stream with every seed, print the tables."""
    hosts.connect(settings.hosts)
    progress = Progress(None if hosts.is_first() else Console(quiet=True, force_terminal=False))
    config = config_of(settings)
    if settings.preset.endswith("_plus") and not isinstance(config.method, CheemConfig):
        preset = settings.preset.replace("cheem_plus", "paper").removesuffix("_plus")
        progress.say(
            f"{settings.method}: preset {settings.preset} changes CHEEM alone; the settings are"
            f" those of {preset}"
        )
    make_layout(config.mesh)  # devices that are not there are told before pictures are read
    runs = runs_of(settings)
    loaded = load(settings, progress)
    workshop = dict[Any, Networks]()
    found = []
    for one in runs:
        if len(runs) > 1:
            progress.say(f"seed {one.seed}: run {len(found) + 1} of {len(runs)}")
        found.append(
            run(one, dataclasses.replace(config, seed=one.seed), loaded, progress, workshop)
        )
        if hosts.is_first():
            show(progress, found[-1], one.run_dir)
    if len(runs) > 1:
        progress.console.print(narrow(comparison_grid({settings.method: found})).to_rich())


def runs_of(settings: Mtil) -> list[Mtil]:
    """One run per seed; several have folders of their own."""
    num = (
        (3 if settings.preset in FULL else 1) if settings.num_seeds is None else settings.num_seeds
    )
    if num < 1:
        raise ValueError(f"--num-seeds is {num}; expected at least 1")
    if num > 1 and (settings.run_dir / "config.json").exists():
        raise ValueError(
            f"{str(settings.run_dir)!r} contains a run of one seed; choose another --run-dir for"
            f" {num} seeds, or give --num-seeds 1"
        )
    seeds = range(settings.seed, settings.seed + num)
    folder = (
        (lambda seed: settings.run_dir / f"seed-{seed}")
        if num > 1
        else (lambda seed: settings.run_dir)
    )
    return [
        dataclasses.replace(settings, seed=seed, num_seeds=1, run_dir=folder(seed))
        for seed in seeds
    ]


def config_of(settings: Mtil) -> RunConfig:
    """What the run learns and how; ValueError for settings of another method."""
    bound = None
    if settings.upper_bound:
        bound = preset_of("full_finetune", settings.preset)
        assert isinstance(bound, FullFinetuneConfig)
    method = method_of(settings)
    if settings.base_data is not None and not isinstance(method, CheemConfig):
        raise ValueError(
            f"--base-data anchors CHEEM's similarity, and {method.name} has none; leave it out"
        )
    mesh = MeshConfig(settings.devices)
    return RunConfig(
        method, settings.preset, settings.seed, bound, settings.engine, settings.seeds, mesh
    )


def method_of(settings: Mtil) -> MethodConfig:
    """The settings of the method that was asked for."""
    preset = preset_of(settings.method, settings.preset)
    if isinstance(preset, CheemConfig):
        method = type(preset)(**vars(settings.cheem))
        return dataclasses.replace(method, augment=method.augment or settings.augment)
    if settings.augment:
        raise ValueError(
            f"--augment is a setting of cheem, and {settings.method} has none; leave it out"
        )
    if settings.cheem != PRESETS[settings.preset]:
        raise ValueError(
            f"--cheem.* are settings of cheem; those of {settings.method} are --options.*, see"
            " --help"
        )
    options = preset if settings.options is None else settings.options
    if options.name != settings.method:
        raise ValueError(
            f"--method is {settings.method}, but its options are those of {options.name}; give it"
            " once"
        )
    return options


def load(settings: Mtil, progress: Progress) -> Loaded:
    """Weights and images."""
    names = None if settings.tasks is None else [name.strip() for name in settings.tasks.split(",")]
    planned = None
    if settings.stream != DEMO:
        try:
            planned = plan_source(
                settings.stream,
                names,
                data_dir=settings.data_dir,
                order=settings.order,
                seed=settings.split_seed,
            )
        except MissingTasks as error:
            way_out = (
                "or give images of your own with --stream FOLDER, one folder or zip per task in it,"
                " or --stream demo"
            )
            raise MissingTasks(f"{error}; {way_out}", error.advice) from error
    elif settings.order != "default":
        raise ValueError(
            f"--order {settings.order} belongs to mtil; name the demo stream's tasks in the order"
            " you want"
        )
    backbone = settings.backbone or ("vit_micro" if planned is None else "deit_tiny")
    pretrained = load_pretrained(backbone, weights=settings.weights, image_size=settings.image_size)
    if settings.pixel_norm == "unit":
        scaled = dataclasses.replace(pretrained.config, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        # means of the backbone's own task were measured on pixels scaled as it was trained
        pretrained = dataclasses.replace(pretrained, config=scaled, base_means={})
    size = pretrained.config.image_size
    router = load_router(settings, size)
    progress.say(f"{pretrained.config.name} from {pretrained.source} at {size} pixels")
    cache_dir = settings.images.cache_dir or cache_dir_of(settings.stream, settings.data_dir)
    images = dataclasses.replace(settings.images, cache_dir=cache_dir)
    if planned is None:
        stream = (
            demo_stream(image_size=size)
            if names is None
            else select(demo_stream(image_size=size), names)
        )
    else:
        stream = Stream(planned[0], load_tasks(planned[1], size, images, decoding(progress)))
    base_images = None
    if (
        settings.base_data is not None
    ):  # of the pretraining data the training images; its other splits are left alone
        _, plans = plan_source(
            settings.base_data, data_dir=settings.data_dir, seed=settings.split_seed
        )
        if len(plans) != 1:
            found = [plan.name for plan in plans]
            raise ValueError(
                f"--base-data {settings.base_data!r} contains {len(plans)} tasks, expected one:"
                f" {found}"
            )
        base_images = load_train(plans[0], size, images, decoding(progress)).images
    return Loaded(stream, pretrained, router, base_images)


def load_router(settings: Mtil, size: int) -> RouterWeights | None:
    """The network that infers the task, if it is not the backbone."""
    if settings.router != "alexnet":
        router = settings.router
        return (
            None
            if router is None
            else load_pretrained(router, weights=settings.router_weights, image_size=size)
        )
    feature = "conv5" if settings.method == "moe_adapters" else "pooled_conv"
    return load_alexnet(settings.router_weights, image_size=size, feature=feature)


def run(
    settings: Mtil,
    config: RunConfig,
    loaded: Loaded,
    progress: Progress,
    workshop: dict[Any, Networks] | None = None,
) -> dict[str, Any]:
    """Learn the stream, or go on with it."""
    stream = loaded.stream
    if settings.measured_on == "validation":
        stream = Stream(
            stream.name, tuple(dataclasses.replace(task, test=task.val) for task in stream.tasks)
        )
    return run_stream(
        stream,
        loaded.pretrained,
        config,
        settings.run_dir,
        progress,
        base_images=loaded.base_images,
        router=loaded.router,
        save_every=settings.save_every,
        workshop=workshop,
        data=data_of(settings, loaded.stream),
        tensorboard=settings.tensorboard,
        command=[
            "experiments/mtil.py",
            *arguments_of(dataclasses.replace(anywhere(settings), num_seeds=1)),
        ],
    )


def anywhere(settings: Mtil) -> Mtil:
    """The same settings for another working directory."""
    base_data = None if settings.base_data is None else located(settings.base_data)
    stream = DEMO if settings.stream == DEMO else located(settings.stream)
    return dataclasses.replace(settings, stream=stream, base_data=base_data)


def data_of(settings: Mtil, stream: Stream) -> dict[str, Any]:
    """Where the images come from, for the record."""
    names = [task.name for task in stream.tasks]
    if settings.stream == DEMO:
        return {"stream": DEMO, "tasks": names}
    data_dir = None if settings.data_dir is None else str(settings.data_dir)
    return {
        "stream": anywhere(settings).stream,
        "data_dir": data_dir,
        "order": settings.order,
        "tasks": names,
        "split_seed": settings.split_seed,
    }


def decoding(progress: Progress) -> Phase:
    """Shows images that are decoded."""
    return lambda task, num_images: progress.phase("decode", task=task, total=num_images)


def read_arguments(
    arguments: list[str], description: str | None = __doc__, **defaults: Any
) -> Mtil:
    """The command line; method and preset are looked at first, since they decide the defaults."""
    preset: Preset = peek(arguments, "preset", PRESETS) or "paper"
    method: Name = peek(arguments, "method", NAMES) or "cheem"
    config = preset_of(method, preset)
    options = None if isinstance(config, CheemConfig) else config
    settings = Mtil(
        cheem=PRESETS[preset], preset=preset, method=method, options=options, **defaults
    )
    return parse(settings, arguments, description=description)


def peek(arguments: Sequence[str], option: str, known: Iterable[T]) -> T | None:
    """The value of an option before the command line is parsed; None where it is not among those
    known."""
    found = None
    for word, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_one, value = word.partition("=")
        if name == f"--{option}":
            told = value if is_one else following
            found = next(
                (name for name in known if name == told), None
            )  # the last one counts, as for the parser
    return found


if __name__ == "__main__":
    parsed = read_arguments(sys.argv[1:])
    run_command(main, parsed, parsed.run_dir)
