"""The search for target networks: accuracy and cost of each recipe.

    python experiments/search_study.py --stream DATA --tasks gtsrb,omniglot --image-size 96
    python experiments/search_study.py --stream DATA --tasks gtsrb,omniglot --image-size 96 \\
        --behind caltech101,cifar10,food10

Every task is learned by every recipe, at every rate and with every seed, as the first task and,
with `--behind`, after a memory of these tasks, learned with the preset `quick`. Finished units are
not repeated; tasks, recipes, rates and seeds can be added later.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from charts import names_in
from studies.searching.report import FIRST, write
from studies.searching.units import RECIPES, TaskUnits
from study import load_stream, recorded, seeds_of

from cheem_jax.baselines.catalogue import FrozenNetworks
from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.learner import Cheem
from cheem_jax.cheem.saved_memory import with_task
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import arguments_of, parse
from cheem_jax.cli.running import run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.keys import Keys
from cheem_jax.data.task import select
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.run.checkpoint import saved_tasks
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from cheem_jax.run_config import find_base_means, make_networks


@dataclasses.dataclass(frozen=True)
class SearchStudy(cheem_run.StreamInputs):
    """Searches by several recipes on the same tasks."""

    stream: str = cheem_run.DEMO
    """demo, or any other value of `experiments/mtil.py --stream`."""
    behind: str | None = None
    """Names of the stream's tasks, separated by commas, after which each task is learned, too."""
    base_data: str | None = None
    """Images of the pretraining data (a source of one task, as for `--stream`)."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    recipes: str = ",".join(RECIPES)
    """Names of recipes separated by commas."""
    rates: str = "3e-3"
    """Learning rates of both phases, separated by commas."""
    seeds: str = "0,1,2"
    """Seeds separated by commas."""
    run_dir: Path = Path("runs/search_study")
    """Folder of record and tables; unfinished units resume."""


class Plan(NamedTuple):
    """The units of every task."""

    recipes: list[str]
    rates: list[float]
    seeds: list[int]
    behind: list[str] = []

    def jobs(self, units: list[TaskUnits]) -> Iterator[Callable[[], None]]:
        """The computation of every unit, seed by seed, so that an interrupted study compares all
        recipes."""
        for seed in self.seeds:
            for one in units:
                for rate in self.rates:
                    yield functools.partial(one.reuse, rate, seed)
                    for recipe in self.recipes:
                        # the past of LoRA-CL does not matter
                        if RECIPES[recipe].searches or one.position == FIRST:
                            yield functools.partial(one.learn, recipe, rate, seed)


def main(settings: SearchStudy) -> None:
    """Compute the missing units, then print and save the tables."""
    progress = Progress()
    plan = Plan(
        names_in("--recipes", settings.recipes, RECIPES),
        rates_of(settings.rates),
        seeds_of(settings.seeds),
        [] if settings.behind is None else [name.strip() for name in settings.behind.split(",")],
    )
    tasks = settings.tasks
    if settings.tasks is not None:
        asked = [name.strip() for name in settings.tasks.split(",")]
        tasks = ",".join([*plan.behind, *(name for name in asked if name not in plan.behind)])
    loaded = load_stream(
        settings,
        progress,
        tasks=tasks,
        base_data=settings.base_data,
        engine=settings.engine,
        cheem=RECIPES["quick"].config,
    )
    study(
        settings.run_dir,
        loaded,
        plan,
        progress,
        engine=settings.engine,
        command=["experiments/search_study.py", *arguments_of(settings)],
    )


def rates_of(text: str) -> list[float]:
    """Learning rates; ValueError for anything but positive numbers."""
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(
            f"--rates is {text!r}; expected positive numbers separated by commas, such as 1e-3,3e-3"
        )
    return rates


def study(
    directory: Path,
    loaded: cheem_run.Loaded,
    plan: Plan,
    progress: Progress,
    *,
    engine: EngineConfig | None = None,
    command: list[str] | None = None,
    workshop: dict[Any, FrozenNetworks] | None = None,
) -> None:
    """Compute the missing units of the plan in `directory`.

    `loaded` has the images of all tasks. `workshop` caches compiled networks, as for `run_stream`.
    """
    pretrained = loaded.pretrained
    stream = loaded.stream
    workshop = {} if workshop is None else workshop
    engine = engine or EngineConfig()
    names = [task.name for task in stream.tasks]
    if unknown := [name for name in plan.behind if name not in names]:
        raise ValueError(
            f"--behind names {', '.join(unknown)}; the stream's tasks are {', '.join(names)}"
        )
    quick = RECIPES["quick"].config
    base = find_base_means(
        pretrained, quick, engine.precision, images=loaded.base_images, progress=progress
    )
    identity = {
        "format": "cheem_jax-search_study/1",
        "stream": stream.name,
        "backbone": pretrained.config.name,
        "image_size": pretrained.config.image_size,
        "weights_sha256": pretrained.sha256,
        "base_means_sha256": base.means_sha256,
        "engine": dataclasses.asdict(engine),
        "data_sha256": {"base": base.data_sha256},  # entries have the hashes of their tasks
    }
    memories: dict[str, Path | None] = {FIRST: None}
    if plan.behind:
        memories[f"behind {', '.join(plan.behind)}"] = (
            directory / "memories" / "+".join(plan.behind)
        )

    def learner(place: Path | None, config: CheemConfig, seed: int) -> Cheem:
        networks = make_networks(pretrained, None, config, engine, workshop=workshop)
        cheem = Cheem(networks.executor, config, Keys(seed), base.values, networks.router_features)
        for saved in () if place is None else saved_tasks(place / "checkpoints" / "cheem"):
            cheem.memory = with_task(cheem.memory, saved)
        return cheem

    with recorded(directory, identity, command, progress) as session:
        for place in filter(None, memories.values()):
            run_stream(
                select(stream, plan.behind),
                pretrained,
                RunConfig(quick, "quick", engine=engine),
                place,
                progress,
                base_images=loaded.base_images,
                workshop=workshop,
            )
        units = [
            TaskUnits(
                functools.partial(learner, place),
                task,
                position,
                session.record,
                session.stop,
                progress,
            )
            for position, place in memories.items()
            for task in stream.tasks
            if task.name not in plan.behind
        ]
        for job in plan.jobs(units):
            job()
            write(directory, read(directory), identity)
    for grid in write(directory, read(directory), identity):
        progress.console.print(grid.to_rich())
    progress.say(
        f"tables: {directory / 'search_study.md'}   numbers: {directory / 'search_study.json'}"
    )


if __name__ == "__main__":
    parsed = parse(SearchStudy, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
