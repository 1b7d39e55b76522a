"""Comparison of routers on collected runs: the router is chosen on validation images, and results
are those on test images.

    python experiments/router_study.py --results docs/results/runs --stream DATA --weights WEIGHTS

A router infers the task ID from features of the frozen backbone, so no run is repeated. A
prediction is correct if the router infers the task and the run's prediction with the task ID given
is correct. The runs are those that `collect.py` collected. The choice needs no network either: it
maximises the share of validation images with a correctly inferred task ID. Without `--results`, the
study ends there:

    python experiments/router_study.py --stream DATA --tasks food10,mnist --image-size 96
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import check_folder
from pages import write_tables
from studies.heads.margins import check_same
from studies.paper.collected import Cells, Collected, Correct, is_compared, load
from studies.paper.paired import accuracy_difference
from studies.routers.page import grid_of, shown_grid
from studies.routers.trying import Trial, attempt, candidates, features_of_task, title_of
from study import load_stream

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import executed_flops, executed_pass_flops, pass_flops
from cheem_jax.backbone.params import build
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys
from cheem_jax.core.routing import RouterConfig
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.run.progress import Progress

NEAR_BEST = 0.01
"""Accepted loss in the share of validation images with the correct task ID, in exchange for fewer
bytes."""
METHODS = ("cheem", "lora_cl", "s_prompts", "frozen_linear")
"""Methods that have a router and a network or a head per task."""
BATCH_SIZE = 32
Runs = Mapping[str, Sequence[Collected]]
"""Runs, keyed by the title of their cell."""


@dataclasses.dataclass(frozen=True)
class RouterStudy(cheem_run.StreamInputs):
    """Compare routers on collected runs, or on the images of a stream alone."""

    results: Path | None = None
    """Folder that `experiments/collect.py` wrote. Tasks, backbone and image size are those of its
    runs."""
    stream: str = cheem_run.DEMO
    """Stream of the images."""
    out: Path = Path("runs/routers")
    """Folder of numbers, tables and features."""


def main(settings: RouterStudy) -> None:
    """Try every router and choose one; write tables and numbers."""
    progress = Progress()
    check_folder("--out", settings.out)
    if settings.results is None:
        runs = {}
        loaded = load_stream(settings, progress)
    else:
        options = ("tasks", "backbone", "image_size")
        if given := [name for name in options if getattr(settings, name) is not None]:
            raise ValueError(
                f"with --results, the runs determine {', '.join(given)}; omit"
                f" {', '.join('--' + name.replace('_', '-') for name in given)}, or --results"
            )
        runs = select(load(settings.results), settings.results)
        loaded = load_images(next(iter(runs.values()))[0], settings, progress)
    tasks = loaded.stream.tasks
    vit = build(loaded.pretrained.config, loaded.pretrained.params)
    executor = make_executor(vit, "mlp_down", EngineConfig(), batch_size=BATCH_SIZE)
    folder = settings.out / "seen" / loaded.pretrained.sha256[:12]
    features = [
        features_of_task(
            task,
            executor,
            folder / f"{task.name}-{data_hash(task)[:12]}.npz",
            BATCH_SIZE,
            progress.say,
        )
        for task in tasks
    ]
    labels = [task.train.labels for task in tasks]
    seeds = sorted({one.run.results["seed"] for group in runs.values() for one in group}) or [0]
    paper = dict[int, Trial]()
    rows = []
    for config in candidates():
        trials = {seed: attempt(config, features, labels, Keys(seed)) for seed in seeds}
        paper = paper or trials
        rows.append(row_of(config, trials, paper, runs, vit.config))
        share = rows[-1]["found"]["test"]
        progress.say(f"{config.features}, {title_of(config)}: task ID right {100 * share:.1f} %")
    study = {
        "stream": loaded.stream.name,
        "backbone": vit.config.name,
        "image_size": vit.config.image_size,
        "tasks": [task.name for task in tasks],
        "rows": rows,
        "chosen": choose(rows),
        "near_best": NEAR_BEST,
        "runs": {
            title: [one.run.results["seed"] for one in group] for title, group in runs.items()
        },
        "same_answers": min(
            (same_predictions(one, paper) for group in runs.values() for one in group), default=None
        ),
    }
    settings.out.mkdir(parents=True, exist_ok=True)
    write_atomically(settings.out / "routers.json", json.dumps(study, indent=1) + "\n")
    tables = {"shown": shown_grid(study), "all": grid_of(study, rows)}
    page = settings.out / "routers.md"
    write_tables(page, {name: grid.to_markdown() for name, grid in tables.items()}, "Routers")
    what = f"{sum(map(len, runs.values()))} runs" if runs else f"{len(tasks)} tasks"
    progress.say(f"{len(rows)} routers on {what}: {page}")


def select(cells: Cells, folder: Path) -> Runs:
    """Return the runs of methods with a router. Raises ValueError if there are none."""
    selected = [cell for cell in cells if cell.method in METHODS and is_compared(cells, cell)]
    if not selected:
        raise ValueError(
            f"--results {folder} contains no run of {', '.join(METHODS)} in the usual order;"
            " collect one"
        )
    return {cell.title: list(cells[cell].values()) for cell in selected}


def load_images(one: Collected, settings: RouterStudy, progress: Progress) -> cheem_run.Loaded:
    """Load the weights and images of the runs. Raises ValueError if they differ from those of the
    runs."""
    results = one.run.results
    source = dataclasses.replace(
        settings,
        backbone=results["backbone"],
        image_size=results["image_size"],
        tasks=",".join(one.run.order),
        split_seed=one.record["data"].get("split_seed", 0),
    )
    loaded = load_stream(source, progress)
    check_same(one.run, loaded.stream, loaded.pretrained)
    return loaded


def routed(correct_given: Correct, inferred: Sequence[np.ndarray]) -> Correct:
    """Return, for each task, whether the task and class of each image are correct."""
    return tuple(
        correct & (tasks == index)
        for index, (correct, tasks) in enumerate(zip(correct_given, inferred, strict=True))
    )


def row_of(
    config: RouterConfig,
    trials: Mapping[int, Trial],
    paper: Mapping[int, Trial],
    runs: Runs,
    vit: ViTConfig,
) -> dict[str, Any]:
    """Compute the numbers of one router: means over runs, and the paired difference from the
    paper's router."""
    methods = {}
    for title, group in runs.items():
        ours, theirs = (
            [
                routed(one.correct_given, router[one.run.results["seed"]].inferred["test"])
                for one in group
            ]
            for router in (trials, paper)
        )
        gain = accuracy_difference(ours, theirs)._asdict()
        methods[title] = {
            "accuracy": float(np.mean([[task.mean() for task in correct] for correct in ours])),
            "gain": {key: gain[key] for key in ("value", "low", "high", "p")},
        }
    each = list(trials.values())
    shares = {
        split: float(
            np.mean(
                [
                    [np.mean(tasks == index) for index, tasks in enumerate(trial.inferred[split])]
                    for trial in each
                ]
            )
        )
        for split in ("val", "test")
    }
    return {
        "features": config.features,
        "title": title_of(config),
        "config": dataclasses.asdict(config),
        "methods": methods,
        "found": shares,
        "flops": flops_of(runs, config, vit),
        "bytes_per_task": each[0].bytes_per_task,
        "seconds_per_task": float(np.mean([trial.seconds_per_task for trial in each])),
        "microseconds_per_image": float(np.mean([trial.microseconds_per_image for trial in each])),
    }


def flops_of(runs: Runs, config: RouterConfig, vit: ViTConfig) -> dict[str, float] | None:
    """Count the FLOPs per image by the paper's convention and as executed, as means over the tasks
    of CHEEM with this router.

    If CHEEM was run with more than one search, the first one counts. The result is None without a
    run of CHEEM.
    """
    cheem = [group for group in runs.values() if group[0].run.results["method"] == "cheem"]
    if not cheem:
        return None
    until = config.until(vit.depth)
    paper, executed = [], []
    for one in cheem[0]:
        placement = one.run.results["placement"]
        for task in one.run.results["tasks"]:
            paper.append(pass_flops(vit, placement, until) + task["flops"])
            # the task's network continues at the block at which it leaves the router's pass
            shared = task["experts"][:until]
            begin = next((block for block, expert in enumerate(shared) if expert != 0), until)
            network = from_strings(task["architecture"])
            executed.append(
                executed_pass_flops(vit, placement, until)
                + executed_flops(vit, placement, network, len(task["classes"]), begin=begin)
            )
    return {"paper": float(np.mean(paper)), "executed": float(np.mean(executed))}


def choose(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the router with the fewest bytes among those within `NEAR_BEST` of the best one on
    validation images."""
    best = max(row["found"]["val"] for row in rows)
    near = [row for row in rows if row["found"]["val"] >= best - NEAR_BEST]
    return dict(min(near, key=lambda row: (row["bytes_per_task"], -row["found"]["val"])))


def same_predictions(one: Collected, paper: Mapping[int, Trial]) -> float:
    """Return the share of test images whose prediction with the paper's router, fitted again, is
    correct exactly if it is correct in the run."""
    inferred = paper[one.run.results["seed"]].inferred["test"]
    again = np.concatenate(routed(one.correct_given, inferred))
    return float(np.mean(again == np.concatenate(one.correct)))


if __name__ == "__main__":
    run_command(main, parse(RouterStudy, description=__doc__))
