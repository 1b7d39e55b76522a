"""Where the memory could be placed: eleven components of a ViT block, each fine-tuned by itself (paper's appendix).

    python experiments/component_study.py --preset quick
    python experiments/component_study.py --stream vdd --backbone vit_base --data-dir DATA --run-dir runs/components-vdd

Every component is learned task to task, from the pretrained backbone each time (average accuracy: how well it
transfers), and sequentially, one backbone through the stream (average forgetting). Every task has a head of its own,
kept as it was when the task was learned, and the task ID is given. Per component one rate is chosen: the best on the
validation splits, task to task. What is finished is not trained again, and what was stopped resumes.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import mtil
from studies.components.learning import COMPONENTS, Component, Network, Training, components_of, num_params
from studies.components.report import rows_of, table, write
from studies.components.units import Units
from study import recorded, seeds_of

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.cheem.config import PRESETS as CHEEM_PRESETS
from cheem_jax.cli.arguments import arguments_of
from cheem_jax.cli.main import parse, run_command
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.run.directory import check_space
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from cheem_jax.run_config import networks_of

PRESETS = {
    "paper": Training(20, (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)),
    "quick": Training(6, (1e-3, 3e-3), batch_size=32, head_rate=1e-2, max_train=240),
}


@dataclasses.dataclass(frozen=True)
class ComponentStudy(mtil.Data):
    """Transfer and forgetting of eleven components of a ViT block."""

    stream: str = mtil.DEMO
    """demo, or whatever `experiments/mtil.py --stream` takes."""
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
    data = {field.name: getattr(settings, field.name) for field in dataclasses.fields(mtil.Data)}
    loaded, training = mtil.load(mtil.Mtil(cheem=CHEEM_PRESETS["quick"], **data), progress), PRESETS[settings.preset]
    command = ["experiments/component_study.py", *arguments_of(settings)]
    learn(
        settings.run_dir, loaded, training, components, seeds, progress, engine=settings.engine,
        save_every=settings.save_every, command=command,
    )  # fmt: skip


def learn(
    directory: Path, loaded: mtil.Loaded, training: Training, components: list[Component], seeds: list[int],
    progress: Progress, *, engine: EngineConfig, save_every: float | None = None, command: list[str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
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
    with recorded(directory, identity, command) as (record, stop):
        # parameters and two moments of whatever a component may hold, and the checkpoint before
        check_space(directory, 2 * 3 * 4 * sum(leaf.size for leaf in executor.leaves), "a rolling checkpoint")
        network = Network(executor, training.batch_size)
        units = Units(directory, network, stream, training, record, stop, save_every, progress.say)
        about = {name: identity[name] for name in ("stream", "tasks", "backbone", "image_size", "training")}
        setting = {**about, "seeds": seeds, "backbone_params": backbone_params(pretrained.config)}
        sizes = num_params(executor)

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
    progress.say(f"table: {directory / 'component_study.md'}   numbers: {directory / 'component_study.json'}")
    return found


if __name__ == "__main__":
    parsed = parse(ComponentStudy, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
