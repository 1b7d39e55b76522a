"""`cheem demo`: the bundled stream, learned where it stands."""

import dataclasses
from pathlib import Path

from cheem_jax.arguments import arguments_of
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.demo import demo_stream
from cheem_jax.execution.choice import EngineConfig
from cheem_jax.keys import SeedsConfig
from cheem_jax.methods.cheem import PRESETS
from cheem_jax.methods.full_finetune import FullFinetuneConfig
from cheem_jax.report.progress import Progress
from cheem_jax.report.table import show


@dataclasses.dataclass(frozen=True)
class Demo:
    """CHEEM learns six small tasks with the bundled vit_micro: no network, no data, minutes on a laptop."""

    run_dir: Path = Path("runs/demo")
    """Where the run is kept; an unfinished one is continued."""
    seed: int = 0
    """Root of every PRNG key in the run."""
    seeds: SeedsConfig = SeedsConfig()
    """Seeds of their own for parts of the run."""
    upper_bound: bool = False
    """Also fine-tune the whole backbone per task."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    save_every: float | None = None
    """Seconds between rolling checkpoints; default: 30, more where they would take over 2 % of the time."""


def learn_demo(settings: Demo) -> None:
    """Learn the demo stream and print its tables."""
    progress = Progress()
    progress.say("cheem_jax demo: making six tasks of 32x32 images")
    stream = demo_stream()
    bound = FullFinetuneConfig(epochs=24, learning_rates=(1e-3,), batch_size=32) if settings.upper_bound else None
    config = RunConfig(PRESETS["demo"], "demo", settings.seed, bound, settings.engine, settings.seeds)
    pretrained = load_pretrained("vit_micro")
    results = run_stream(
        stream, pretrained, config, settings.run_dir, progress, save_every=settings.save_every,
        command=["cheem", "demo", *arguments_of(settings)],
    )  # fmt: skip
    show(progress, results, settings.run_dir)
