"""`cheem run`: learn a stream of image tasks with CHEEM or another method and a pretrained ViT."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from tyro.conf import AvoidSubcommands

from cheem_jax.backbone.alexnet import load_alexnet
from cheem_jax.backbone.weights import Pretrained, load_pretrained
from cheem_jax.baselines.catalogue import (
    NAMES,
    BaselineConfig,
    FrozenNetworks,
    MethodConfig,
    MethodName,
    make_preset,
)
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.cheem.config import PRESETS, CheemConfig, Preset, computes_similarity
from cheem_jax.cli.arguments import arguments_of, located, parse
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.images import Images
from cheem_jax.core.settings import SeedsConfig
from cheem_jax.data.class_split import describe_split
from cheem_jax.data.decode import OnProgress
from cheem_jax.data.streams import DEMO, StreamConfig, find_stream, load_base_images
from cheem_jax.data.task import Stream
from cheem_jax.engine import hosts
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.hosts import HostsConfig
from cheem_jax.engine.layout import MeshConfig, make_layout
from cheem_jax.report.comparison import comparison_grid, narrow
from cheem_jax.report.table import show
from cheem_jax.run.progress import Progress, Terminal
from cheem_jax.run_config import RouterWeights

T = TypeVar("T")
FULL = ("paper", "cheem_plus")
"""Presets that are run with three seeds by default."""


@dataclasses.dataclass(frozen=True)
class StreamInputs(StreamConfig):
    """Settings of the stream and the backbone."""

    backbone: str | None = None
    """deit_tiny (the default), vit_base, vit_base_augreg, clip_vit_base, vit_micro (the default of
    the demo stream), vit_nano, or another plain timm ViT by name."""
    weights: Path | None = None
    """A safetensors or npz file with timm's names, or a converted file; default: bundled weights,
    else from the hub."""
    image_size: int | None = None
    """Height and width of images in pixels; default: the backbone's image size."""


@dataclasses.dataclass(frozen=True)
class Common(StreamInputs):
    """Settings that `cheem run` and `experiments/study.py` share."""

    base_data: str | None = None
    """Images of the pretraining data (a source of one task, as for `--stream`). The paper's search
    computes the similarity of a task to the pretraining data from the mean CLS tokens of these
    images."""
    engine: EngineConfig = EngineConfig()
    """Execution of networks."""
    devices: Literal["all"] | int = 1
    """Number of devices that share each batch, or `all` for all devices of all processes. Results
    for different numbers of devices differ only by rounding."""
    save_every: float | None = None
    """Seconds between rolling checkpoints; default: 30, or more if checkpoints would take over 2 %
    of the time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Common):
    """Learn a stream of image tasks with CHEEM or another method; a stopped run resumes."""

    cheem: CheemConfig
    """Settings of `cheem` and `cheem_lite`; the defaults depend on `--preset`."""
    preset: Preset = "paper"
    """`paper` uses the paper's settings, and ours if the paper states none; `quick` has every part
    of CHEEM, sized for a CPU; `demo` is for a few hundred images; `cheem_plus` and `quick_plus` are
    `paper` and `quick` with another search and another router."""
    augment: bool = False
    """Short for --cheem.augment: crop and change training images randomly in every epoch."""
    method: MethodName = "cheem"
    """Method that learns. full_finetune and lora_finetune are upper bounds: they are given the task
    ID."""
    options: AvoidSubcommands[BaselineConfig | None] = None
    """Settings of the method, unless it is `cheem` or `cheem_lite`."""
    pixel_norm: Literal["checkpoint", "unit"] = "checkpoint"
    """`checkpoint` normalises pixels as in pretraining; `unit` scales them to 0..1, as in the
    CODA-Prompt code."""
    router: str | None = None
    """A smaller network that infers the task ID: a backbone, or alexnet; default: the backbone
    itself. `cheem_lite` and `moe_adapters` need one."""
    router_weights: Path | None = None
    """Weights of the router, as for `--weights`; for alexnet a file that
    convert/torchvision_alexnet.py writes."""
    hosts: HostsConfig = HostsConfig()
    """Processes of a job, if there is more than one. Start each process with the same command and
    --devices all."""
    seed: int = 0
    """Root of every PRNG key in the run."""
    num_seeds: int | None = None
    """Number of runs, with `seed` and the following seeds. If there is more than one run, each run
    has a separate folder in the run directory. Default: 3 for the presets `paper` and `cheem_plus`,
    else 1."""
    seeds: SeedsConfig = SeedsConfig()
    """Separate seeds for parts of the run."""
    measured_on: Literal["test", "validation"] = "test"
    """Split on which accuracies are measured; `validation` is for choosing settings without the
    test images."""
    upper_bound: bool = False
    """Also fine-tune the whole backbone per task, with the task ID given."""
    tensorboard: bool = False
    """Also write TensorBoard's event files after each task (extra `tensorboard`)."""
    run_dir: Path = Path("runs/mtil")
    """Run directory; an unfinished run resumes."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> "RunSettings":
        """Return the defaults of a command line, which depend on its preset and method."""
        preset: Preset = _last_value(arguments, "preset", PRESETS) or "paper"
        method: MethodName = _last_value(arguments, "method", NAMES) or "cheem"
        config = make_preset(method, preset)
        options = None if isinstance(config, CheemConfig) else config
        return cls(cheem=PRESETS[preset], preset=preset, method=method, options=options)


class Loaded(NamedTuple):
    """Loaded images and weights of a run."""

    stream: Stream
    pretrained: Pretrained
    router: RouterWeights | None
    base_images: Images | None

    @property
    def size(self) -> int:
        """Height and width of images in pixels."""
        return self.pretrained.config.image_size


def run_seeds(settings: RunSettings) -> None:
    """Load weights and data, learn the stream with every seed, and print the tables."""
    hosts.connect(settings.hosts)
    progress = Progress(None if hosts.is_first() else Terminal(quiet=True, force_terminal=False))
    config = make_run_config(settings)
    if settings.preset.endswith("_plus") and not isinstance(config.method, CheemConfig):
        preset = settings.preset.replace("cheem_plus", "paper").removesuffix("_plus")
        progress.say(
            f"preset {settings.preset} only affects CHEEM; {settings.method} uses the settings of"
            f" {preset}"
        )
    make_layout(config.mesh)  # raises errors about missing devices before images are read
    runs = split_seeds(settings)
    loaded = load(settings, progress)
    workshop = dict[Any, FrozenNetworks]()
    results = []
    for number, run in enumerate(runs, 1):
        if len(runs) > 1:
            progress.say(f"seed {run.seed}: run {number} of {len(runs)}")
        config = dataclasses.replace(config, seed=run.seed)
        results.append(run_seed(run, config, loaded, progress, workshop))
        if hosts.is_first():
            show(progress, results[-1], run.run_dir)
    if len(runs) > 1:
        progress.console.print(narrow(comparison_grid({settings.method: results})).to_rich())


def split_seeds(settings: RunSettings) -> list[RunSettings]:
    """Return the settings of one run per seed. If there is more than one seed, every run has a
    separate folder in the run directory."""
    num = settings.num_seeds
    if num is None:
        num = 3 if settings.preset in FULL else 1
    if num < 1:
        raise ValueError(f"--num-seeds is {num}; expected at least 1")
    if num > 1 and (settings.run_dir / "config.json").exists():
        raise ValueError(
            f"{str(settings.run_dir)!r} contains a run of one seed; choose another --run-dir for"
            f" {num} seeds, or set --num-seeds 1"
        )
    return [
        dataclasses.replace(
            settings,
            seed=seed,
            num_seeds=1,
            run_dir=settings.run_dir / f"seed-{seed}" if num > 1 else settings.run_dir,
        )
        for seed in range(settings.seed, settings.seed + num)
    ]


def make_run_config(settings: RunSettings) -> RunConfig:
    """Return the settings that determine the results. Raises ValueError for settings of a method
    other than the chosen one."""
    bound = None
    if settings.upper_bound:
        bound = make_preset("full_finetune", settings.preset)
        assert isinstance(bound, FullFinetuneConfig)
    method = make_method_config(settings)
    if settings.base_data is not None and not computes_similarity(method):
        name = "backward elimination" if isinstance(method, CheemConfig) else method.name
        raise ValueError(
            f"--base-data anchors the similarity of CHEEM, which {name} does not use; omit it"
        )
    if settings.router is None and settings.router_weights is not None:
        raise ValueError("--router-weights are those of the network that --router names; give both")
    return RunConfig(
        method,
        settings.preset,
        settings.seed,
        bound,
        settings.engine,
        settings.seeds,
        MeshConfig(settings.devices),
        settings.measured_on,
    )


def make_method_config(settings: RunSettings) -> MethodConfig:
    """Return the settings of the chosen method. Raises ValueError for settings of a different
    method."""
    preset = make_preset(settings.method, settings.preset)
    if isinstance(preset, CheemConfig):
        method = type(preset)(**vars(settings.cheem))
        return dataclasses.replace(method, augment=method.augment or settings.augment)
    if settings.augment:
        raise ValueError(
            f"--augment is a setting of cheem, which {settings.method} does not have; omit it"
        )
    if settings.cheem != PRESETS[settings.preset]:
        raise ValueError(
            f"--cheem.* are settings of cheem; the settings of {settings.method} are --options.*"
            " (see --help)"
        )
    options = preset if settings.options is None else settings.options
    if options.name != settings.method:
        raise ValueError(
            f"--method is {settings.method}, but --options are those of {options.name}; use the"
            " same method for both"
        )
    return options


def load(settings: RunSettings, progress: Progress) -> Loaded:
    """Load weights and images. Missing images raise an error before weights are read."""

    def decoding(task: str, num_images: int) -> AbstractContextManager[OnProgress]:
        return progress.phase("decode", task=task, total=num_images)

    load_stream = find_stream(settings)
    pretrained = load_weights(settings)
    if settings.pixel_norm == "unit":
        scaled = dataclasses.replace(pretrained.config, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        # the mean CLS tokens were computed with the pixel scale of pretraining, so they are dropped
        pretrained = dataclasses.replace(pretrained, config=scaled, base_means={})
    size = pretrained.config.image_size
    router = load_router(settings, size)
    progress.say(f"{pretrained.config.name} from {pretrained.source} at {size} pixels")
    stream = load_stream(size, decoding)
    if (sentence := describe_split(stream)) is not None:
        progress.say(sentence)
    base_images = None
    if settings.base_data is not None:
        base_images = load_base_images(
            settings.base_data, settings, image_size=size, phase=decoding
        )
    return Loaded(stream, pretrained, router, base_images)


def backbone_of(settings: StreamInputs) -> str:
    """Return the name of the backbone: the chosen one, or the default of the stream."""
    return settings.backbone or ("vit_micro" if settings.stream == DEMO else "deit_tiny")


def load_weights(settings: StreamInputs) -> Pretrained:
    """Load the weights of the backbone."""
    return load_pretrained(
        backbone_of(settings), weights=settings.weights, image_size=settings.image_size
    )


def load_router(settings: RunSettings, image_size: int) -> RouterWeights | None:
    """Load the network that infers the task ID, or return None if the backbone infers it."""
    if settings.router is None:
        return None
    if settings.router != "alexnet":
        return load_pretrained(
            settings.router, weights=settings.router_weights, image_size=image_size
        )
    feature = "conv5" if settings.method == "moe_adapters" else "pooled_conv"
    return load_alexnet(settings.router_weights, image_size=image_size, feature=feature)


def run_seed(
    settings: RunSettings,
    config: RunConfig,
    loaded: Loaded,
    progress: Progress,
    workshop: dict[Any, FrozenNetworks] | None = None,
) -> dict[str, Any]:
    """Learn the stream with one seed, or resume; return the results."""
    portable = dataclasses.replace(make_portable(settings), num_seeds=1)
    return run_stream(
        loaded.stream,
        loaded.pretrained,
        config,
        settings.run_dir,
        progress,
        base_images=loaded.base_images,
        router=loaded.router,
        save_every=settings.save_every,
        workshop=workshop,
        data=describe_data(settings, loaded.stream),
        tensorboard=settings.tensorboard,
        command=["cheem", "run", *arguments_of(portable)],
    )


def make_portable(settings: RunSettings) -> RunSettings:
    """Return a copy of the settings with absolute paths, for use in a different working
    directory."""
    base_data = None if settings.base_data is None else located(settings.base_data)
    stream = DEMO if settings.stream == DEMO else located(settings.stream)
    return dataclasses.replace(settings, stream=stream, base_data=base_data)


def describe_data(settings: RunSettings, stream: Stream) -> dict[str, Any]:
    """Return a description of the data for the run's record: sources, tasks and the seed of the
    splits. If the tasks divide the classes of a data set, also return the division and the classes
    of each task."""
    names = [task.name for task in stream.tasks]
    if settings.stream == DEMO:
        return {"stream": DEMO, "tasks": names}
    data = {
        "stream": located(settings.stream),
        "data_dir": None if settings.data_dir is None else str(settings.data_dir),
        "order": settings.order,
        "tasks": names,
        "split_seed": settings.split_seed,
    }
    if (split := stream.tasks[0].class_split) is not None:
        data["class_split"] = dataclasses.asdict(split)
        data["classes"] = {task.name: task.classes for task in stream.tasks}
    return data


def read_arguments(
    arguments: Sequence[str], description: str | None = None, **defaults: Any
) -> RunSettings:
    """Parse a command line; `defaults` replace the defaults of `RunSettings`."""
    settings = dataclasses.replace(RunSettings.defaults(arguments), **defaults)
    return parse(settings, arguments, description=description)


def _last_value(arguments: Sequence[str], option: str, values: Iterable[T]) -> T | None:
    """Return the last value of an option, or None if that value is not in `values`."""
    last = None
    for word, following in itertools.zip_longest(arguments, arguments[1:]):
        name, has_value, value = word.partition("=")
        if name == f"--{option}":
            last = value if has_value else following
    return next((value for value in values if value == last), None)
