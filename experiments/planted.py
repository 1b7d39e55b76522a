"""Planted synergy: how often CHEEM finds a structure that is known to be right, with HEE and with
uniform sampling.

    python experiments/planted.py --run-dir runs/planted
    python experiments/planted.py --preset paper --run-dir runs/planted-paper

Six generated tasks: shapes, unrelated letters, easy colours, shapes in other colours (kin), alien
noise, shapes again (twin). Every run has a directory of its own, `RUN_DIR/<sampling>/seed-<seed>`.
What is finished is not run again, and what was stopped resumes. `planted.md` holds findings, tables
and figures, `planted.json` the numbers.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

from charts import architecture_sheet, write_page
from studies.planting import pages
from studies.planting.structure import costs_of, planted_stream
from study import seeds_of

from cheem_jax.backbone.weights import Pretrained, load_pretrained
from cheem_jax.baselines.catalogue import FrozenNetworks
from cheem_jax.cheem.config import PRESETS, CheemConfig, Preset
from cheem_jax.cli.arguments import arguments_of, parse
from cheem_jax.cli.running import run_command
from cheem_jax.continual import RunConfig, run_stream
from cheem_jax.data.task import Stream
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.run.progress import Progress

Sampling = Literal["hee", "uniform"]
SAMPLINGS: tuple[Sampling, ...] = ("hee", "uniform")


class Size(NamedTuple):
    """What a preset of this experiment stands for."""

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
    """CHEEM on a stream whose right structure is known."""

    preset: Literal["quick", "paper"] = "quick"
    """quick: a few hundred images per task, sized for a laptop; paper: epochs and search of the
    paper, more images."""
    sampling: Literal["both", "hee", "uniform"] = "both"
    """How architectures are sampled."""
    seeds: str | None = None
    """Seeds separated by commas; default: 0,1,2 for quick, five for paper."""
    stream_seed: int | None = None
    """Seed of the images; default: the run's own seed, so that runs differ in images too."""
    engine: EngineConfig = EngineConfig()
    """How networks are run."""
    run_dir: Path = Path("runs/planted")
    """Where runs and tables are kept; what is unfinished is continued."""
    save_every: float | None = None
    """Seconds between rolling checkpoints."""


def main(settings: Planted) -> None:
    """Run what is missing, then judge all runs."""
    progress = Progress()
    size = SIZES[settings.preset]
    seeds = seeds_of(size.seeds if settings.seeds is None else settings.seeds)
    if settings.stream_seed is not None and settings.stream_seed < 0:
        raise ValueError(f"--stream-seed is {settings.stream_seed}; expected 0 or more")
    samplings: tuple[Sampling, ...] = (
        SAMPLINGS if settings.sampling == "both" else (settings.sampling,)
    )
    pretrained = load_pretrained("vit_micro")
    found: dict[str, list[dict[str, Any]]] = {sampling: [] for sampling in samplings}
    workshop = dict[Any, FrozenNetworks]()
    for seed in seeds:
        stream = stream_of(settings, seed)
        for sampling in samplings:
            progress.say(f"{sampling} sampling, seed {seed}")
            directory = settings.run_dir / sampling / f"seed-{seed}"
            found[sampling].append(
                run(settings, sampling, seed, stream, directory, pretrained, progress, workshop)
            )
    write(settings, found, pretrained, progress)


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
    """Learn the stream, or go on with it, or read what is finished."""
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
    """One run in the run directory itself, as its record has it; without the study's pages."""
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
    """The preset's settings with one way of sampling."""
    return dataclasses.replace(PRESETS[SIZES[settings.preset].cheem], sampling=sampling)


def stream_of(settings: Planted, seed: int) -> Stream:
    """The images of a run."""
    size = SIZES[settings.preset]
    chosen = settings.stream_seed
    return planted_stream(
        seed=seed if chosen is None else chosen,
        num_train=size.num_train,
        num_val=size.num_val,
        num_test=size.num_test,
    )


def write(settings: Planted, found: pages.Runs, pretrained: Pretrained, progress: Progress) -> None:
    """Page, table, numbers and figures."""
    size = SIZES[settings.preset]
    first = next(iter(found.values()))[0]
    costs = costs_of(pretrained.config, PRESETS[size.cheem])
    judged = pages.judge_all(found, costs)
    setting = (
        f"{first['backbone']}, settings of `{size.cheem}`, {size.num_train} training,"
        f" {size.num_val} validation and {size.num_test} test images per task; mean class tokens of"
        f" the backbone's own task: {first['base_means']}."
    )
    if settings.stream_seed is not None:
        setting += (
            f" All runs on the pictures of seed {settings.stream_seed}: intervals and p are of"
            " these alone."
        )
    text = pages.page(found, judged, costs, setting)
    write_page(settings.run_dir / "planted", text, pages.numbers(found, judged))
    titled = [
        {f"{name} sampling, seed {run['seed']}": run for run in runs}
        for name, runs in found.items()
    ]
    architecture_sheet(settings.run_dir / "architectures.png", titled)
    progress.console.print(pages.claims_grid(judged.summaries).to_rich())
    for sentence in pages.findings(found, judged.summaries):
        progress.say(sentence)
    progress.say(
        f"page: {settings.run_dir / 'planted.md'}   numbers: {settings.run_dir / 'planted.json'}"
    )


if __name__ == "__main__":
    parsed = parse(Planted, sys.argv[1:], description=__doc__)
    run_command(main, parsed, parsed.run_dir)
