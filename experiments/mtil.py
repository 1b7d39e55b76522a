"""CHEEM on MTIL, or on any other stream of image tasks, with a pretrained ViT.

    python experiments/mtil.py --backbone deit_tiny --data-dir DATA
    python experiments/mtil.py --backbone deit_tiny --stream FOLDER --image-size 96 --preset quick --run-dir runs/real

DATA is the data folder that `cheem data prepare mtil --data-dir DATA` fills. FOLDER holds one folder or zip per task
with `<split>/<class>/<image>` inside.
"""

import dataclasses
import sys
from pathlib import Path

from cheem_jax.arguments import arguments_of, located
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.cli import parse, run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.benchmarks.table import Order
from cheem_jax.data.cache import Phase
from cheem_jax.data.load import ImagesConfig, load_tasks, load_train
from cheem_jax.data.sources import cache_dir_of, plan_source
from cheem_jax.data.task import Stream
from cheem_jax.execution.choice import EngineConfig
from cheem_jax.images import Images
from cheem_jax.keys import SeedsConfig
from cheem_jax.methods.cheem import PRESETS, CheemConfig, Preset
from cheem_jax.methods.full_finetune import FullFinetuneConfig
from cheem_jax.report.progress import Progress
from cheem_jax.report.table import show


@dataclasses.dataclass(frozen=True)
class Mtil:
    """CHEEM and its yardsticks on a stream of tasks, resumable task by task."""

    cheem: CheemConfig
    """Settings of the method; `--preset` chooses their defaults."""
    preset: Preset = "paper"
    """`paper`: all settings of the paper; `quick`: every part on, sized for a CPU; `demo`: for a few hundred images."""
    backbone: str = "deit_tiny"
    """deit_tiny, vit_base, vit_base_augreg, clip_vit_base, vit_micro, vit_nano, or another plain timm ViT by name."""
    weights: Path | None = None
    """A safetensors or npz file under timm's names, or a converted one; default: bundled, else from the hub."""
    stream: str = "mtil"
    """mtil or vdd (see `cheem data list`), a stream file (TOML), or a folder with one folder or zip per task."""
    data_dir: Path | None = None
    """Where prepared data sets lie; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    order: Order = "default"
    """Order of MTIL's tasks: of the paper's tables, of its table on task orders, or the second one of ZSCL."""
    tasks: str | None = None
    """Names of the tasks in learning order, separated by commas; default: all, in the stream's."""
    split_seed: int = 0
    """Draws the splits that a data set lacks; not `--seed`, so that runs of several seeds see the same splits."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded pictures are kept."""
    base_data: str | None = None
    """Pictures of the backbone's own task (anything that `--stream` takes for one task), whose mean class tokens
    anchor the similarity."""
    image_size: int | None = None
    """Pixels of the square images; default: the backbone's own."""
    router: str | None = None
    """A lighter backbone that names the task (CHEEM-lite); default: the backbone itself."""
    router_weights: Path | None = None
    """Weights of the router, as for `--weights`."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    seed: int = 0
    """Root of every PRNG key in the run."""
    seeds: SeedsConfig = SeedsConfig()
    """Seeds of their own for parts of the run."""
    upper_bound: bool = False
    """Also fine-tune the whole backbone per task, the true task given; takes its own time."""
    run_dir: Path = Path("runs/mtil")
    """Where the run is kept; an unfinished one is continued."""
    save_every: float | None = None
    """Seconds between rolling checkpoints; default: 30, more where they would take over 2 % of the time."""


def main(settings: Mtil) -> None:
    """Load weights and data, run the stream, print its tables."""
    progress = Progress()
    names = None if settings.tasks is None else [name.strip() for name in settings.tasks.split(",")]
    stream_name, plans = plan_source(
        settings.stream, names, data_dir=settings.data_dir, order=settings.order, seed=settings.split_seed
    )
    pretrained = load_pretrained(settings.backbone, weights=settings.weights, image_size=settings.image_size)
    size = pretrained.config.image_size
    router = None
    if settings.router is not None:
        router = load_pretrained(settings.router, weights=settings.router_weights, image_size=size)
    progress.say(f"{pretrained.config.name} from {pretrained.source} at {size} pixels")
    cache_dir = settings.images.cache_dir or cache_dir_of(settings.stream, settings.data_dir)
    images = dataclasses.replace(settings.images, cache_dir=cache_dir)
    stream = Stream(stream_name, load_tasks(plans, size, images, decoding(progress)))
    base_images = None
    if settings.base_data is not None:
        base_images = read_base(settings.base_data, settings, size, images, progress)
    bound = None
    if settings.upper_bound:
        bound = FullFinetuneConfig(settings.cheem.finetune.epochs, batch_size=settings.cheem.batch_size)
    config = RunConfig(settings.cheem, settings.preset, settings.seed, bound, settings.engine, settings.seeds)
    results = run_stream(
        stream, pretrained, config, settings.run_dir, progress, base_images=base_images, router=router,
        save_every=settings.save_every, command=["experiments/mtil.py", *arguments_of(anywhere(settings))],
    )  # fmt: skip
    show(progress, results, settings.run_dir)


def anywhere(settings: Mtil) -> Mtil:
    """The same settings for another working directory."""
    base_data = None if settings.base_data is None else located(settings.base_data)
    return dataclasses.replace(settings, stream=located(settings.stream), base_data=base_data)


def decoding(progress: Progress) -> Phase:
    """Shows pictures that are decoded."""
    return lambda task, num_images: progress.phase("decode", task=task, total=num_images)


def read_base(source: str, settings: Mtil, size: int, images: ImagesConfig, progress: Progress) -> Images:
    """Training pictures of the backbone's own task; its other splits are left alone."""
    _, plans = plan_source(source, data_dir=settings.data_dir, seed=settings.split_seed)
    if len(plans) != 1:
        raise ValueError(f"--base-data {source!r} holds {len(plans)} tasks, expected one: {[p.name for p in plans]}")
    return load_train(plans[0], size, images, decoding(progress)).images


def read_arguments(arguments: list[str]) -> Mtil:
    """The command line; the preset is looked at first, since it decides the defaults of the method."""
    given = {*zip(arguments, arguments[1:], strict=False), *(tuple(a.split("=", 1)) for a in arguments)}
    preset: Preset = "paper"
    for name in PRESETS:
        if ("--preset", name) in given:
            preset = name
    return parse(Mtil(PRESETS[preset], preset), arguments, description=__doc__)


if __name__ == "__main__":
    parsed = read_arguments(sys.argv[1:])
    run_command(main, parsed, parsed.run_dir)
