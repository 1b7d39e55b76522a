"""Where the memory could be placed: eleven components of a ViT block, each fine-tuned by itself (paper's appendix).

    python experiments/component_study.py --preset quick
    python experiments/component_study.py --stream vdd --backbone vit_base --data-dir DATA --run-dir runs/components-vdd

Every component is learned task to task, from the pretrained backbone each time (average accuracy: how well it
transfers), and sequentially, one backbone through the stream (average forgetting). Every task has a head of its own,
kept as it was when the task was learned, and the true task is given. Per component one rate is chosen: the best on the
validation splits, task to task. What is finished is not trained again, and what was stopped goes on.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import mtil
from studies.components.learning import Network, Training
from studies.components.parts import COMPONENTS, Component, components_of, num_params
from studies.components.report import rows_of, setting_of, table, write
from studies.components.units import Units
from study import seeds_of

from cheem_jax import fingerprint
from cheem_jax.arguments import arguments_of
from cheem_jax.cli import parse, run_command
from cheem_jax.continual import networks_of
from cheem_jax.data.load import ImagesConfig
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.execution.choice import EngineConfig
from cheem_jax.interruption import stop_requests
from cheem_jax.methods.cheem_config import PRESETS as CHEEM_PRESETS
from cheem_jax.methods.full_finetune import FullFinetuneConfig
from cheem_jax.report.progress import Progress
from cheem_jax.report.record import Record, read
from cheem_jax.run_directory import check_space, claim, hold

PRESETS = {
    "paper": Training(20, (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)),
    "quick": Training(6, (1e-3, 3e-3), batch_size=32, head_rate=1e-2, max_train=240),
}


@dataclasses.dataclass(frozen=True)
class ComponentStudy:
    """Transfer and forgetting of eleven components of a ViT block."""

    stream: str = "demo"
    """demo, or whatever `experiments/mtil.py --stream` takes; the paper's is vdd."""
    backbone: str | None = None
    """As for mtil.py: deit_tiny, for the demo stream vit_micro; the paper's is vit_base."""
    weights: Path | None = None
    """A safetensors or npz file; default: bundled, else from the hub."""
    data_dir: Path | None = None
    """Where prepared data sets lie."""
    tasks: str | None = None
    """Names of the tasks in learning order, separated by commas; default: all."""
    image_size: int | None = None
    """Pixels of the square images; default: the backbone's own."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded pictures are kept."""
    components: str = "all"
    """Names or indices of the paper's table, separated by commas, or all; more can be added to a finished run."""
    preset: Literal["paper", "quick"] = "quick"
    """`paper`: 20 epochs, batches of 64, five rates from 1e-5 to 1e-3; `quick`: 6 epochs of at most 240 images per
    task, batches of 32, rates 1e-3 and 3e-3."""
    seeds: str = "0"
    """Seeds separated by commas; cells are then means with the standard deviation. More can be added later."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    run_dir: Path = Path("runs/component_study")
    """Where record and tables are kept; what is unfinished is continued."""
    save_every: float | None = None
    """Seconds between rolling checkpoints."""


def main(settings: ComponentStudy) -> None:
    """Train what is missing, then print and save the table."""
    progress = Progress()
    components, seeds = components_of(settings.components), seeds_of(settings.seeds)
    loaded, training = load(settings, progress), PRESETS[settings.preset]
    learn(
        settings.run_dir, loaded, training, components, seeds, progress, settings.engine, settings.save_every,
        command=["experiments/component_study.py", *arguments_of(settings)],
    )  # fmt: skip


def load(settings: ComponentStudy, progress: Progress) -> mtil.Loaded:
    """Weights and pictures."""
    sources = mtil.Mtil(
        cheem=CHEEM_PRESETS["quick"], backbone=settings.backbone, weights=settings.weights, stream=settings.stream,
        data_dir=settings.data_dir, tasks=settings.tasks, images=settings.images, image_size=settings.image_size,
    )  # fmt: skip
    return mtil.load(sources, progress)


def learn(
    directory: Path,
    loaded: mtil.Loaded,
    training: Training,
    components: list[Component],
    seeds: list[int],
    progress: Progress,
    engine: EngineConfig,
    save_every: float | None = None,
    command: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Train in `directory` what is missing there; returns the rows of the table, as `component_study.json` has them."""
    stream, pretrained = loaded.stream, loaded.pretrained
    config = FullFinetuneConfig(batch_size=training.batch_size)
    executor = networks_of(pretrained, None, config, engine).executor
    identity = {
        "format": "cheem_jax-components/1",
        "stream": stream.name,
        "tasks": [task.name for task in stream.tasks],
        "backbone": pretrained.config.name,
        "image_size": pretrained.config.image_size,
        "training": dataclasses.asdict(training),
        "engine": dataclasses.asdict(engine),
        "weights_sha256": pretrained.sha256,
        "data_sha256": {task.name: data_hash(task) for task in stream.tasks},
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
    }
    conditions = fingerprint.take(identity)
    with hold(directory), stop_requests() as stop:
        resumed = claim(directory, identity)
        # parameters and two moments of whatever a component may hold, and the checkpoint before
        check_space(directory, 2 * 3 * 4 * sum(leaf.size for leaf in executor.leaves), "a rolling checkpoint")
        record = Record.open(directory, fingerprint.digest(conditions))
        record.write("continued" if resumed else "run", command=command, conditions=conditions)
        network = Network(executor, training.batch_size)
        units = Units(directory, network, stream, training, record, stop, save_every, progress.say)
        setting, sizes = setting_of(stream, pretrained, training, seeds), num_params(executor)

        def rows() -> list[dict[str, Any]]:
            # those of earlier calls too
            return rows_of(read(directory), COMPONENTS, sizes, setting)

        total = units.images_left(components, seeds)
        with progress.phase("components", task=stream.name, total=total) as shown:
            for number, component in enumerate(components, 1):
                progress.say(f"{component.title}: component {number} of {len(components)}")
                units.run(component, seeds, shown)
                write(directory, rows(), setting)  # a study that is stopped has a table of what it has
        found = rows()
    progress.console.print(table(found, setting).to_rich())
    progress.say(f"table: {directory / 'component_study.md'}   picture: {directory / 'component_study.png'}")
    return found


if __name__ == "__main__":
    parsed = parse(ComponentStudy, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
