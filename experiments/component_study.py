"""Eleven components of a ViT block as positions of the memory, each fine-tuned alone (paper,
appendix).

    python experiments/component_study.py --preset quick
    python experiments/component_study.py --stream vdd --backbone vit_base --data-dir DATA

Every component is learned from the pretrained backbone for each task (average accuracy: transfer),
and sequentially, with one backbone through the stream (average forgetting). Every task has a
separate head, which is frozen after its task, and the task ID is given. One learning rate per
component is chosen on the validation splits. Finished units are not repeated, and interrupted units
resume.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from charts import mean_std, spread, write_page
from scipy.stats import rankdata
from studies.components import learning
from studies.components.learning import (
    COMPONENTS,
    Component,
    Entry,
    Network,
    Place,
    Training,
    Units,
    units_at,
)
from studies.paper.printed import Cell, printed
from study import load_stream, recorded, seeds_of

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import arguments_of, parse
from cheem_jax.cli.running import run_command
from cheem_jax.core import metrics
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.report.table import NONE, Grid, number
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from cheem_jax.run_config import make_networks

PRESETS = {
    "paper": Training(20, (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)),
    "quick": Training(6, (1e-3, 3e-3), batch_size=32, head_rate=1e-2, max_train=240),
}


@dataclasses.dataclass(frozen=True)
class ComponentStudy(cheem_run.StreamInputs):
    """Measure transfer and forgetting of eleven components of a ViT block."""

    stream: str = cheem_run.DEMO
    """demo, or any other value of `experiments/mtil.py --stream`."""
    components: str = "all"
    """Names or indices of components in the paper's table, separated by commas, or all; a later
    call can add components."""
    preset: Literal["paper", "quick"] = "quick"
    """`paper`: 20 epochs, batches of 64, five rates from 1e-5 to 1e-3; `quick`: 6 epochs of at most
    240 images per task, batches of 32, rates 1e-3 and 3e-3."""
    seeds: str = "0"
    """Seeds, separated by commas; with more than one seed, cells are means with the standard
    deviation. A later call can add seeds."""
    engine: EngineConfig = EngineConfig()
    """Execution of networks."""
    run_dir: Path = Path("runs/component_study")
    """Folder of the record and the tables; unfinished units in it resume."""
    save_every: float | None = None
    """Seconds between two rolling checkpoints."""


def main(settings: ComponentStudy) -> None:
    """Train the missing units, then print and save the table."""
    progress = Progress()
    components = learning.components_of(settings.components)
    seeds = seeds_of(settings.seeds)
    loaded = load_stream(settings, progress)
    training = PRESETS[settings.preset]
    command = ["experiments/component_study.py", *arguments_of(settings)]
    learn(
        settings.run_dir,
        loaded,
        training,
        components,
        seeds,
        progress,
        engine=settings.engine,
        save_every=settings.save_every,
        command=command,
    )


def learn(
    directory: Path,
    loaded: cheem_run.Loaded,
    training: Training,
    components: list[Component],
    seeds: list[int],
    progress: Progress,
    *,
    engine: EngineConfig,
    save_every: float | None = None,
    command: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Train the missing units in `directory`; return the rows of `component_study.json`."""
    stream, pretrained = loaded.stream, loaded.pretrained
    config = FullFinetuneConfig(batch_size=training.batch_size)
    executor = make_networks(pretrained, None, config, engine).executor
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
    with recorded(directory, identity, command, progress, save_every) as session:
        # parameters and two moments of the largest component; during replacement two checkpoints
        # exist
        num_bytes = 2 * 3 * 4 * sum(leaf.size for leaf in executor.leaves)
        session.check_room(num_bytes, "a rolling checkpoint")
        network = Network(executor, training.batch_size)
        units = Units(session, network, stream, training)
        names = ("stream", "tasks", "backbone", "image_size", "training")
        setting = {name: identity[name] for name in names}
        setting |= {"seeds": seeds, "backbone_params": backbone_params(pretrained.config)}
        sizes = learning.num_params(executor)

        def rows() -> list[dict[str, Any]]:
            return rows_of(read(directory), COMPONENTS, sizes, setting)

        for number, component in enumerate(components, 1):
            progress.say(f"{component.title}: component {number} of {len(components)}")
            units.run(component, seeds)
            write(directory, rows(), setting)
        finished = rows()
    progress.console.print(table(finished, setting).to_rich())
    progress.say(
        f"table: {directory / 'component_study.md'}   numbers: {directory / 'component_study.json'}"
    )
    return finished


Numbers = Mapping[str, Any]
Row = dict[str, Any]
PAPER = "ViT-Base on VDD"
MEASURES = {"average_accuracy": -1, "average_forgetting": 1}
"""Measures in %, with the sign for their ranks: rank 1 has the highest accuracy or the lowest
forgetting."""


def rows_of(
    entries: Sequence[Entry],
    components: Sequence[Component],
    num_params: Mapping[str, int],
    setting: Numbers,
) -> list[Row]:
    """Make a row per component whose units are all finished; accuracies and forgetting are in %."""
    rates = setting["training"]["rates"]
    seeds = setting["seeds"]
    num_tasks = len(setting["tasks"])
    rows = []
    papers = printed()["components"]
    for component in components:
        rate = learning.chosen_rate(entries, component, rates, seeds, num_tasks)
        if rate is None:
            continue
        places = [Place(component.name, seed, rate) for seed in seeds]
        sequences = [units_at(entries, "sequential", place) for place in places]
        diverged = any(units_at(entries, "diverged", place) for place in places)
        if not diverged and any(len(sequence) < num_tasks for sequence in sequences):
            continue
        matrices = [] if diverged else [_matrix(sequence) for sequence in sequences]
        transfer = [units_at(entries, "transfer", place) for place in places]
        accuracy = [
            [units[index]["test_accuracy"] for index in range(num_tasks)] for units in transfer
        ]
        forgetting = [metrics.average_forgetting(matrix) for matrix in matrices]
        cell = Cell("vdd", "vit_base", "component", "", str(component.index))
        rows.append(
            {
                "index": component.index,
                "name": component.name,
                "title": component.title,
                "params": num_params[component.name],
                "params_percent": 100 * num_params[component.name] / setting["backbone_params"],
                "rate": rate,
                "validation": {
                    f"{r:g}": learning.mean_validation(entries, component, r, seeds, num_tasks)
                    for r in rates
                },
                "average_accuracy": in_percent([np.mean(row) for row in accuracy]),
                "average_forgetting": (
                    None if diverged or None in forgetting else in_percent(forgetting)
                ),
                "sequential_average_accuracy": (
                    None
                    if diverged
                    else in_percent([metrics.average_accuracy(matrix) for matrix in matrices])
                ),
                "accuracy": accuracy,
                "sequential_accuracy": [metrics.matrix_to_json(matrix) for matrix in matrices],
                "paper": {name: papers[cell._replace(measure=name)].value for name in MEASURES},
            }
        )
    for row in rows:
        row["ranks"] = {}
    for measure, sign in MEASURES.items():
        if all(row[measure] for row in rows):
            # identical numbers of correct predictions can result in accuracies that differ in the
            # last bits
            ours = rankdata(
                np.round([sign * row[measure]["mean"] for row in rows], 6), method="min"
            )
            papers = rankdata([sign * row["paper"][measure] for row in rows], method="min")
            for row, rank, theirs in zip(rows, ours, papers, strict=True):
                row["ranks"][measure] = {"ours": int(rank), "paper": int(theirs)}
    return rows


def _matrix(sequence: Mapping[int, Entry]) -> np.ndarray:
    matrix = np.full((len(sequence), len(sequence)), np.nan)
    for index, entry in sequence.items():
        matrix[index, : index + 1] = entry["accuracy"]
    return matrix


def in_percent(values: Sequence[Any]) -> dict[str, Any]:
    percent = [100 * float(value) for value in values]
    return {**(mean_std(percent) or {}), "runs": percent}


def table(rows: Sequence[Row], setting: Numbers) -> Grid:
    """Make the table of our numbers and the paper's numbers, which have a different backbone and
    stream; docs/experiments.md explains the columns."""
    columns = (
        "",
        "component",
        "params\nper\ntask",
        "% of\nback-\nbone",
        "rate",
        "accu-\nracy\nours",
        "for-\ngetting\nours",
        "accu-\nracy\npaper",
        "for-\ngetting\npaper",
        "rank acc.\nours,\npaper",
        "rank forg.\nours,\npaper",
    )
    rates = setting["training"]["rates"]
    ends = (min(rates), max(rates)) if len(rates) > 2 else ()
    lines = []
    for row in rows:
        ranks = (row["ranks"].get(measure) for measure in MEASURES)
        lines.append(
            (
                str(row["index"]),
                row["title"],
                f"{row['params']:,}",
                number(row["params_percent"], 2),
                f"{row['rate']:g}" + ("*" if row["rate"] in ends else ""),
                *(spread(row[measure], 2) for measure in MEASURES),
                *(number(row["paper"][measure], 2) for measure in MEASURES),
                *("{ours}, {paper}".format(**rank) if rank else NONE for rank in ranks),
            )
        )
    title = f"Components of a block, fine-tuned: {setting['stream']}, {setting['backbone']}"
    return Grid(title, columns, tuple(lines), 2)


def write(directory: Path, rows: Sequence[Row], setting: Numbers) -> None:
    """Write the table and its numbers."""
    if rows:
        grid = table(rows, setting)
        numbers = {"setting": dict(setting), "paper": PAPER, "components": list(rows)}
        text = f"# {grid.title}\n\n{grid.to_markdown()}\n"
        write_page(directory / "component_study", text, numbers, grid)


if __name__ == "__main__":
    parsed = parse(ComponentStudy, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
