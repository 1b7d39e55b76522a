"""The search for a task's network: how well the supernet ranks, and what the search finds beside sampled networks.

    python experiments/mtil.py --stream demo --preset demo --run-dir runs/demo
    python experiments/search_study.py --run runs/demo --study textures
    python experiments/search_study.py --run runs/real --stream DATA --study dtd10,flowers12 --search-seeds 0,1,2

Of a finished run of CHEEM some tasks are studied, each behind the memory that the run had before it: the supernet is
trained again with the run's keys, architectures sampled from it are retrained from scratch, and searches with several
seeds look for a network in it. What is finished is not computed again, and what was stopped is resumed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mtil
import numpy as np
from studies.searching.report import write
from studies.searching.units import PAPER, Entry, TaskUnits
from study import Source, check_same, rebuilt, recorded, seeds_of

from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.baselines.catalogue import Networks
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.cheem.learner import Cheem
from cheem_jax.cheem.saved_memory import with_task
from cheem_jax.cli.arguments import arguments_of
from cheem_jax.cli.main import parse, run_command
from cheem_jax.core.keys import Keys, SeedsConfig
from cheem_jax.core.pool import InternalMemory as Memory
from cheem_jax.data.load import ImagesConfig
from cheem_jax.data.task import hash_of
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.run.checkpoint import load_meta, saved_tasks
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from cheem_jax.run.removed import without_removed
from cheem_jax.run_config import networks_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchStudy(Source):
    """Searches over the supernets of a finished run; backbone, image size and settings are the run's own."""

    run: Path
    """Directory of a finished run of CHEEM."""
    study: str
    """Names of the run's tasks to be studied, separated by commas; more can be added later."""
    images: ImagesConfig = ImagesConfig()
    """Where decoded images are kept."""
    base_data: str | None = None
    """The run's images of the pretraining data, where the weights do not carry its mean CLS tokens."""
    num: int = 20
    """Architectures per task that are sampled and retrained, half by HEE and half uniformly."""
    search_seeds: str = "0,1,2"
    """Seeds of the searches, separated by commas; more can be added later."""
    run_dir: Path = Path("runs/search_study")
    """Where record and tables are kept; what is unfinished is continued."""
    save_every: float | None = None
    """Seconds between rolling checkpoints of a supernet."""

    def __post_init__(self) -> None:
        if self.num < 4:
            raise ValueError(f"--num is {self.num}; a rank correlation needs at least 4 architectures")


def main(settings: SearchStudy) -> None:
    """Compute what is missing, then print and save the tables."""
    progress = Progress()
    try:
        seeds = seeds_of(settings.search_seeds)
    except ValueError as error:
        raise ValueError(str(error).replace("--seeds", "--search-seeds")) from error
    held = config_of(settings.run)
    tasks = tasks_of(held, settings.study)
    source = settings.settings(held, tasks, images=settings.images, base_data=settings.base_data)
    loaded = mtil.load(source, progress)
    study(
        settings.run_dir, settings.run, loaded, tasks, settings.num, seeds, progress, save_every=settings.save_every,
        command=["experiments/search_study.py", *arguments_of(settings)],
    )  # fmt: skip


def config_of(run: Path) -> dict[str, Any]:
    """The run's `config.json`; ValueError where it is none of CHEEM with one backbone."""
    file = run / "config.json"
    if not file.is_file():
        raise ValueError(f"--run names {run}, which holds no config.json; expected the directory of a finished run")
    held = json.loads(file.read_text())
    if "cheem" not in held:
        raise ValueError(f"--run names {run}, which is no run of cheem; expected one, such as `mtil.py` makes")
    if held.get("router_weights_sha256"):
        raise ValueError(f"--run names {run}, whose tasks another network names; expected a run without --router")
    return held


def tasks_of(held: Mapping[str, Any], text: str) -> list[str]:
    """The tasks that are asked for, in the run's order."""
    asked = [name.strip() for name in text.split(",")]
    if unknown := [name for name in asked if name not in held["tasks"]]:
        raise ValueError(f"--study names {', '.join(unknown)}; the run's tasks are {', '.join(held['tasks'])}")
    return [name for name in held["tasks"] if name in asked]


def study(
    directory: Path,
    run: Path,
    loaded: mtil.Loaded,
    tasks: Sequence[str],
    num: int,
    seeds: Sequence[int],
    progress: Progress,
    *,
    save_every: float | None = None,
    command: list[str] | None = None,
    workshop: dict[Any, Networks] | None = None,
) -> None:
    """Compute in `directory` what is missing there of these tasks of the run, whose images are `loaded`.

    `workshop` keeps compiled networks, as for `run_stream`.
    """
    held = without_removed(config_of(run), run / "config.json")
    check_same(run, held, tasks, loaded.stream, loaded.pretrained)
    engine = rebuilt(EngineConfig(), held["engine"])
    config: CheemConfig = rebuilt(PRESETS["paper"], held["cheem"])
    means = means_of(run, held, loaded, config, engine, progress)
    networks = networks_of(loaded.pretrained, None, config, engine, workshop=workshop)
    identity = {**held, "format": "cheem_jax-search/1", "num": num}
    with recorded(directory, identity, command) as (record, stop):
        setting = {
            "stream": held["stream"], "backbone": held["backbone"], "seed": held["seed"], "tasks": list(tasks),
            "order": held["tasks"], "num": num, "search_seeds": list(seeds), "losses": losses_of(run),
            "epochs": {"supernet": config.supernet.epochs, "finetune": config.finetune.epochs},
        }  # fmt: skip
        grids = []
        for task in (task for task in loaded.stream.tasks if task.name in tasks):
            if not is_finished(read(directory), task.name, seeds):
                make = learners(run, held, task.name, networks, config, means)
                units = TaskUnits(directory, make, task, record, stop, save_every, progress)
                genomes = [*units.draw(num)["genomes"]]
                genomes += [units.search(seed)["genome"] for seed in seeds]
                for genome in genomes:
                    units.finetune(genome)
            grids = write(directory, read(directory), setting)  # a study that is stopped has tables of what it has
    for grid in grids:
        progress.console.print(grid.to_rich())
    progress.say(f"tables: {directory / 'search_study.md'}   numbers: {directory / 'search_study.json'}")


def is_finished(entries: Sequence[Entry], task: str, seeds: Sequence[int]) -> bool:
    """Whether all that was drawn and all that was found has been retrained."""
    own = [entry for entry in entries if entry.get("task") == task]
    genomes = [genome for entry in own if entry["event"] == "drawn" for genome in entry["genomes"]]
    found = {
        entry["seed"]: entry["genome"] for entry in own
        if entry["event"] == "searched" and entry["variant"] == PAPER
    }  # fmt: skip
    wanted = [found.get(seed) for seed in seeds]
    retrained = [entry["genome"] for entry in own if entry["event"] == "finetuned"]
    return bool(genomes) and all(genome in retrained for genome in (*genomes, *wanted))


def learners(
    run: Path,
    held: Mapping[str, Any],
    task: str,
    networks: Networks,
    config: CheemConfig,
    means: np.ndarray | None,
) -> Callable[[int | None], Cheem]:
    """Gives learners of the memory that the run had before a task, by the seed of the search (None: the run's)."""
    directories = saved_tasks(run / "checkpoints" / "cheem")
    names = [load_meta(directory)["name"] for directory in directories]
    index = held["tasks"].index(task)
    if names[:index] != held["tasks"][:index]:
        raise ValueError(
            f"{run} holds checkpoints of {', '.join(names) or 'no task'}; all before {task!r} are needed: "
            f"{', '.join(held['tasks'][:index])}"
        )
    memory = Memory(networks.executor.base_pool)
    for directory in directories[:index]:
        memory = with_task(memory, directory)

    def make(seed: int | None) -> Cheem:
        seeds = SeedsConfig(**held["seeds"])
        keys = Keys(held["seed"], seeds if seed is None else dataclasses.replace(seeds, search=seed))
        cheem = Cheem(networks.executor, config, keys, means, networks.router_features)
        cheem.memory = memory
        return cheem

    return make


def means_of(
    run: Path,
    held: Mapping[str, Any],
    loaded: mtil.Loaded,
    config: CheemConfig,
    engine: EngineConfig,
    progress: Progress,
) -> np.ndarray | None:
    """The mean CLS tokens of the pretraining data, where the run knew them; ValueError where they are missing."""
    pretrained, wanted, data = loaded.pretrained, held["base_means_sha256"], held.get("base_data_sha256")
    if wanted is None and data is None:
        return None
    place = f"{held['image_size']}/{config.placement}/{config.token}"
    found = pretrained.base_means.get(place)
    if found is None:
        if loaded.base_images is None:
            raise ValueError(f"{run} knew mean class tokens of the backbone's own task; give its --base-data")
        vit = build(dataclasses.replace(pretrained.config, precision=engine.precision), pretrained.params)
        found = base_means(vit, loaded.base_images, batch_size=config.batch_size)[place]
        if data is not None and hash_of(loaded.base_images) != data:
            raise ValueError(f"{run} saw other pictures of the backbone's own task; give its --base-data")
    if data is None and hashlib.sha256(found.tobytes()).hexdigest() != wanted:
        progress.say("the mean class tokens of the backbone's own task are not bit for bit the run's")
    return found


def losses_of(run: Path) -> dict[str, Any]:
    """Losses of the run's supernets by task."""
    learned = [entry["report"] for entry in read(run) if entry["event"] == "learned" and entry["method"] == "cheem"]
    return {report["name"]: report["supernet_losses"] for report in learned}


if __name__ == "__main__":
    parsed = parse(SearchStudy, description=__doc__)
    run_command(main, parsed, parsed.run_dir)
