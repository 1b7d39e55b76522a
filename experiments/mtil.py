"""CHEEM on a stream of image tasks with a pretrained ViT.

    python experiments/mtil.py --backbone deit_tiny --stream FOLDER --image-size 96 --preset quick --run-dir runs/real

FOLDER holds one folder or zip per task with `<split>/<class>/<image>` inside.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path

import numpy as np

from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.cli import parse, run_command, show
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.folder import load_stream, load_task
from cheem_jax.execution.choice import EngineConfig
from cheem_jax.methods.cheem import PRESETS, CheemConfig, Preset
from cheem_jax.methods.full_finetune import FullFinetuneConfig
from cheem_jax.report.progress import Progress


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
    stream: Path | None = None
    """Folder with one folder or zip per task."""
    tasks: str | None = None
    """Names of the tasks in learning order, separated by commas; default: all, sorted by name."""
    base_data: Path | None = None
    """Pictures of the backbone's own task (folder or zip), whose mean class tokens anchor the similarity."""
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
    upper_bound: bool = False
    """Also fine-tune the whole backbone per task, the true task given; takes its own time."""
    run_dir: Path = Path("runs/mtil")
    """Where the run is kept; an unfinished one is continued."""


def main(settings: Mtil) -> None:
    """Load weights and data, run the stream, print its tables."""
    progress = Progress()
    if settings.stream is None:
        raise ValueError("no tasks given; expected --stream FOLDER with one folder or zip per task")
    pretrained = load_pretrained(settings.backbone, weights=settings.weights, image_size=settings.image_size)
    size = pretrained.config.image_size
    router = None
    if settings.router is not None:
        router = load_pretrained(settings.router, weights=settings.router_weights, image_size=size)
    names = None if settings.tasks is None else [name.strip() for name in settings.tasks.split(",")]
    progress.say(f"{pretrained.config.name} from {pretrained.source} at {size} pixels")
    stream = load_stream(settings.stream, names, image_size=size, on_progress=Decoding(progress, settings.stream.name))
    base_images: np.ndarray | None = None
    if settings.base_data is not None:
        base_images = load_task(settings.base_data, image_size=size).train.images
    bound = None
    if settings.upper_bound:
        bound = FullFinetuneConfig(settings.cheem.finetune.epochs, batch_size=settings.cheem.batch_size)
    config = RunConfig(settings.cheem, settings.preset, settings.seed, bound, settings.engine)
    results = run_stream(stream, pretrained, config, settings.run_dir, progress, base_images=base_images, router=router)
    show(progress, results, settings.run_dir)


class Decoding:
    """Shows how many pictures are decoded; the first call tells how many there are."""

    def __init__(self, progress: Progress, name: str):
        self.progress, self.name, self.done = progress, name, 0
        self.stack = contextlib.ExitStack()

    def __call__(self, done: int, total: int) -> None:
        if self.done == 0:
            self.advance = self.stack.enter_context(self.progress.phase("decode", task=self.name, total=total))
        self.advance(done - self.done)
        self.done = done
        if done == total:
            self.stack.close()


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
