"""`cheem demo`: learn the bundled stream of six small tasks."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.baselines.catalogue import DEMO_BOUND, NEED_A_ROUTER, MethodName, make_preset
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.cli.arguments import ADVANCED, arguments_of
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.settings import SeedsConfig
from cheem_jax.data.demo import demo_stream
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.report.table import show
from cheem_jax.run.progress import Progress


@dataclasses.dataclass(frozen=True)
class Demo:
    """Learn six small tasks with the bundled vit_micro, without network or data, in minutes on a
    laptop."""

    run_dir: Path = Path("runs/demo")
    """Run directory; an unfinished run resumes."""
    method: MethodName = "cheem"
    """Method that learns. For `cheem_lite` and `moe_adapters`, the bundled vit_nano infers the task
    ID."""
    seed: int = 0
    """Root of every PRNG key in the run."""
    seeds: Annotated[SeedsConfig, ADVANCED] = SeedsConfig()
    """Separate seeds for parts of the run."""
    upper_bound: bool = False
    """Also fine-tune the whole backbone per task, with the task ID given, as an upper bound."""
    tensorboard: bool = False
    """Also write TensorBoard's event files after each task (extra `tensorboard`)."""
    engine: Annotated[EngineConfig, ADVANCED] = EngineConfig()
    """Execution of networks."""
    save_every: Annotated[float | None, ADVANCED] = None
    """Seconds between rolling checkpoints; default: 30, or more if checkpoints would take over 2 %
    of the time."""


def learn_demo(settings: Demo) -> None:
    """Learn the demo stream, or resume, and print its tables."""
    progress = Progress()
    progress.say("cheem_jax demo: generating six tasks of 32x32 images")
    stream = demo_stream()
    bound = FullFinetuneConfig(**DEMO_BOUND, batch_size=32) if settings.upper_bound else None
    method = make_preset(settings.method, "demo")
    config = RunConfig(method, "demo", settings.seed, bound, settings.engine, settings.seeds)
    router = load_pretrained("vit_nano") if settings.method in NEED_A_ROUTER else None
    results = run_stream(
        stream,
        load_pretrained("vit_micro"),
        config,
        settings.run_dir,
        progress,
        router=router,
        save_every=settings.save_every,
        command=["cheem", "demo", *arguments_of(settings)],
        data={"stream": "demo", "tasks": [task.name for task in stream.tasks]},
        tensorboard=settings.tensorboard,
    )
    show(progress, results, settings.run_dir)
