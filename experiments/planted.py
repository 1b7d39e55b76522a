"""Planted synergy: how often CHEEM recovers a known structure, with HEE and with uniform sampling.

    python experiments/planted.py --run-dir runs/planted
    python experiments/planted.py --preset paper --run-dir runs/planted-paper

There are six generated tasks: shapes, unrelated letters, easy colours, shapes in other colours
(`kin`), noise (`alien`), and shapes again (`twin`). Every run has a separate directory,
`RUN_DIR/<sampling>/seed-<seed>`. Finished runs are not repeated, and interrupted runs resume.
`planted.md` contains the tables, `planted.json` the numbers.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

from charts import architecture_sheet
from pages import write_tables
from studies.planting import pages
from studies.planting.structure import costs_of, planted_stream
from study import seeds_of

from cheem_jax.backbone.weights import Pretrained, load_pretrained
from cheem_jax.baselines.catalogue import FrozenNetworks
from cheem_jax.cheem.config import PRESETS, CheemConfig, Preset
from cheem_jax.cli.arguments import arguments_of, parse
from cheem_jax.cli.running import run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.core.atomic import write_atomically
from cheem_jax.data.task import Stream
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.run.progress import Progress

Sampling = Literal["hee", "uniform"]
SAMPLINGS: tuple[Sampling, ...] = ("hee", "uniform")


class Size(NamedTuple):
    """The sizes of a preset of this experiment."""

    cheem: Preset
    seeds: str
    num_train: int
    num_val: int
    num_test: int


SIZES = {
    "quick": Size("demo", "0,1,2", 400, 150, 200),
    "paper": Size("paper", "0,1,2,3,4", 2000, 500, 500),
}


@dataclasses.dataclass(frozen=True)
class Planted:
    """Run CHEEM on a stream with a known structure."""

    preset: Literal["quick", "paper"] = "quick"
    """quick: a few hundred images per task, for a laptop; paper: the paper's epochs and search, and
    more images."""
    sampling: Literal["both", "hee", "uniform"] = "both"
    """Sampling of architectures."""
    seeds: str | None = None
    """Seeds, separated by commas; default: 0,1,2 for quick, 0,1,2,3,4 for paper."""
    engine: EngineConfig = EngineConfig()
    """Execution of networks."""
    run_dir: Path = Path("runs/planted")
    """Folder of runs and tables; unfinished runs in it resume."""
    save_every: float | None = None
    """Seconds between two rolling checkpoints."""


def main(settings: Planted) -> None:
    """Run the missing runs, then evaluate the claims for all runs."""
    progress = Progress()
    size = SIZES[settings.preset]
    seeds = seeds_of(size.seeds if settings.seeds is None else settings.seeds)
    samplings: tuple[Sampling, ...] = (
        SAMPLINGS if settings.sampling == "both" else (settings.sampling,)
    )
    pretrained = load_pretrained("vit_micro")
    runs: dict[str, list[dict[str, Any]]] = {sampling: [] for sampling in samplings}
    workshop = dict[Any, FrozenNetworks]()
    for seed in seeds:
        stream = stream_of(settings, seed)
        for sampling in samplings:
            progress.say(f"{sampling} sampling, seed {seed}")
            directory = settings.run_dir / sampling / f"seed-{seed}"
            runs[sampling].append(
                run(settings, sampling, seed, stream, directory, pretrained, progress, workshop)
            )
    write(settings, runs, pretrained, progress)


def run(
    settings: Planted,
    sampling: Sampling,
    seed: int,
    stream: Stream,
    directory: Path,
    pretrained: Pretrained,
    progress: Progress,
    workshop: dict[Any, FrozenNetworks] | None = None,
) -> dict[str, Any]:
    """Learn the stream, resume an interrupted run, or read a finished run; return its results."""
    alone = dataclasses.replace(settings, sampling=sampling, seeds=str(seed), run_dir=directory)
    config = RunConfig(
        method_of(settings, sampling), SIZES[settings.preset].cheem, seed, engine=settings.engine
    )
    return run_stream(
        stream,
        pretrained,
        config,
        directory,
        progress,
        save_every=settings.save_every,
        command=["experiments/planted.py", *arguments_of(alone)],
        workshop=workshop,
    )


def run_alone(settings: Planted) -> None:
    """Repeat one recorded run in the run directory itself, without the study's tables."""
    progress, (seed,) = Progress(), seeds_of(settings.seeds or "")
    assert settings.sampling != "both"
    stream = stream_of(settings, seed)
    run(
        settings,
        settings.sampling,
        seed,
        stream,
        settings.run_dir,
        load_pretrained("vit_micro"),
        progress,
    )


def method_of(settings: Planted, sampling: Sampling) -> CheemConfig:
    """Return the settings of the preset with one way of sampling."""
    return dataclasses.replace(PRESETS[SIZES[settings.preset].cheem], sampling=sampling)


def stream_of(settings: Planted, seed: int) -> Stream:
    """Generate the images of a run with its seed, so that the images of runs differ, too."""
    size = SIZES[settings.preset]
    return planted_stream(
        seed=seed,
        num_train=size.num_train,
        num_val=size.num_val,
        num_test=size.num_test,
    )


def write(settings: Planted, runs: pages.Runs, pretrained: Pretrained, progress: Progress) -> None:
    """Write tables, numbers and the figure of all target networks."""
    costs = costs_of(pretrained.config, PRESETS[SIZES[settings.preset].cheem])
    verdicts = pages.judge_all(runs, costs)
    claims = pages.claims_grid(verdicts)
    page = settings.run_dir / "planted.md"
    tables = {"claims": claims, "tasks": pages.tasks_grid(runs, costs)}
    write_tables(
        page, {name: grid.to_markdown() for name, grid in tables.items()}, "Planted synergy"
    )
    numbers = json.dumps(pages.numbers(runs, verdicts), indent=1) + "\n"
    write_atomically(page.with_suffix(".json"), numbers)
    columns = [
        {f"{name} sampling, seed {run['seed']}": run for run in group}
        for name, group in runs.items()
    ]
    architecture_sheet(settings.run_dir / "architectures.png", columns)
    progress.console.print(claims.to_rich())
    progress.say(f"tables: {page}   numbers: {page.with_suffix('.json')}")


if __name__ == "__main__":
    parsed = parse(Planted, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
