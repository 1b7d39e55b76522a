"""Which router loses least: every kind on the tasks of collected runs, chosen on validation,
reported on test images.

    python experiments/router_study.py --results docs/results/runs --stream DATA --weights WEIGHTS
    --out runs/routers

Routers infer tasks from what the frozen backbone says, so no run is made again: an image is
answered rightly where a router infers its task and the run's answer with the task ID given is
right. Runs are those that `collect.py` has collected. The choice needs no network either: it is by
the share of validation images whose task is inferred rightly.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charts import check_folder
from studies.paper.collected import ByTask, Cells, Collected, is_compared, load
from studies.paper.paired import accuracy_difference
from studies.routers.page import page_of
from studies.routers.trying import Tried, attempt, candidates, seen_of, title_of

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import executed_flops, executed_pass_flops, pass_flops
from cheem_jax.backbone.params import build
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.main import parse, run_command
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys
from cheem_jax.core.routing import RouterConfig
from cheem_jax.core.settings import Placement
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.run.progress import Progress

NEAR_BEST = 0.01
"""Share of validation images with the right task that may be given up for fewer bytes."""
METHODS = ("cheem", "lora_cl", "s_prompts", "frozen_linear")
"""Methods with a network or a head per task behind a router."""
BATCH_SIZE = 32
Runs = Mapping[str, Sequence[Collected]]
"""By title of their cell."""


@dataclasses.dataclass(frozen=True)
class RouterStudy:
    """Routers side by side on collected runs."""

    results: Path
    """Folder that `experiments/collect.py` has filled."""
    stream: str = cheem_run.DEMO
    """Where the runs' images are."""
    data_dir: Path | None = None
    """Folder with the prepared data of a benchmark."""
    weights: Path | None = None
    """The backbone's weights file, if it is not the bundled one."""
    out: Path = Path("runs/routers")
    """Where numbers, page and features are kept."""


def main(settings: RouterStudy) -> None:
    """Try every router, choose one, write page and numbers."""
    progress = Progress()
    out = settings.out
    check_folder("--out", out)
    runs = runs_of(load(settings.results), settings.results)
    loaded = images_of(next(iter(runs.values()))[0], settings, progress)
    tasks = loaded.stream.tasks
    vit = build(loaded.pretrained.config, loaded.pretrained.params)
    executor = make_executor(vit, "mlp_down", EngineConfig(), batch_size=BATCH_SIZE)
    place = out / "seen" / loaded.pretrained.sha256[:12]
    files = [place / f"{task.name}-{data_hash(task)[:12]}.npz" for task in tasks]
    seen = [
        seen_of(task, executor, file, BATCH_SIZE, progress.say)
        for task, file in zip(tasks, files, strict=True)
    ]
    seeds = sorted({own.run.results["seed"] for found in runs.values() for own in found})
    rows = []
    paper = dict[int, Tried]()
    for config in candidates():
        tried = {
            seed: attempt(config, seen, [task.train.labels for task in tasks], Keys(seed))
            for seed in seeds
        }
        paper = paper or tried
        rows.append(row_of(config, tried, paper, runs, vit.config))
        share = rows[-1]["found"]["test"]
        progress.say(
            f"{config.features}, {title_of(config)}: task ID right on test images"
            f" {100 * share:.1f} %"
        )
    found = {
        "stream": loaded.stream.name,
        "backbone": vit.config.name,
        "image_size": loaded.size,
        "tasks": [task.name for task in tasks],
        "rows": rows,
        "chosen": chosen(rows),
        "near_best": NEAR_BEST,
        "runs": {
            title: [own.run.results["seed"] for own in found] for title, found in runs.items()
        },
        "same_answers": min(same_answers(own, paper) for found in runs.values() for own in found),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "routers.json", json.dumps(found, indent=1) + "\n")
    write_atomically(out / "routers.md", page_of(found))
    progress.say(
        f"{len(rows)} routers on {sum(map(len, runs.values()))} runs: {out / 'routers.md'}"
    )


def runs_of(cells: Cells, folder: Path) -> Runs:
    """The runs that a router serves; ValueError without any."""
    wanted = [cell for cell in cells if cell.method in METHODS and is_compared(cells, cell)]
    if not wanted:
        raise ValueError(
            f"--results {folder} contains no run of {', '.join(METHODS)} in the usual order;"
            " collect one"
        )
    return {cell.title: list(cells[cell].values()) for cell in wanted}


def images_of(own: Collected, settings: RouterStudy, progress: Progress) -> cheem_run.Loaded:
    """Weights and images of the runs; ValueError where others are given."""
    results = own.run.results
    source = dataclasses.replace(
        cheem_run.read_arguments([]),
        stream=settings.stream,
        data_dir=settings.data_dir,
        weights=settings.weights,
        backbone=results["backbone"],
        image_size=results["image_size"],
        tasks=",".join(own.run.order),
        split_seed=own.record["data"].get("split_seed", 0),
    )
    loaded = cheem_run.load(source, progress)
    if loaded.pretrained.sha256 != own.run.config["weights_sha256"]:
        raise ValueError(
            f"the runs had other weights than {loaded.pretrained.source!r}; give theirs with"
            " --weights"
        )
    known = own.run.config["data_sha256"]
    if others := [task.name for task in loaded.stream.tasks if data_hash(task) != known[task.name]]:
        raise ValueError(
            f"--stream {settings.stream} has other images than the runs have seen:"
            f" {', '.join(others)}"
        )
    return loaded


def routed(given: ByTask, named: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Images whose task is inferred rightly and whose class is then right."""
    return [
        right & (own == index) for index, (right, own) in enumerate(zip(given, named, strict=True))
    ]


def row_of(
    config: RouterConfig,
    tried: Mapping[int, Tried],
    paper: Mapping[int, Tried],
    runs: Runs,
    vit: ViTConfig,
) -> dict[str, Any]:
    """One router's numbers: means over runs, and the paired difference from the paper's router."""
    methods = {}
    seeds = list(tried.values())
    for title, found in runs.items():
        ours, theirs = (
            [routed(own.right_given, one[own.run.results["seed"]].named["test"]) for own in found]
            for one in (tried, paper)
        )
        accuracy = float(np.mean([[task.mean() for task in right] for right in ours]))
        gain = accuracy_difference(ours, theirs)._asdict()
        methods[title] = {
            "accuracy": accuracy,
            "gain": {key: gain[key] for key in ("value", "low", "high", "p")},
        }
    return {
        "features": config.features,
        "title": title_of(config),
        "config": dataclasses.asdict(config),
        "methods": methods,
        "found": {
            split: float(
                np.mean(
                    [
                        [np.mean(named == i) for i, named in enumerate(one.named[split])]
                        for one in seeds
                    ]
                )
            )
            for split in ("val", "test")
        },
        "flops": flops_of(runs, config, vit),
        "bytes_per_task": seeds[0].bytes_per_task,
        "seconds_per_task": float(np.mean([one.seconds_per_task for one in seeds])),
        "microseconds_per_image": float(np.mean([one.microseconds_per_image for one in seeds])),
    }


def flops_of(runs: Runs, config: RouterConfig, vit: ViTConfig) -> dict[str, float] | None:
    """Per image, mean over the tasks of CHEEM behind such a router: by the paper's convention and
    as it runs.

    Of several searches the first counts; None without a run of CHEEM.
    """
    owners = next(
        (found for found in runs.values() if found[0].run.results["method"] == "cheem"), None
    )
    if owners is None:
        return None
    until = config.until(vit.depth)
    tasks = [
        (own.run.results["placement"], task) for own in owners for task in own.run.results["tasks"]
    ]
    paper = [pass_flops(vit, placement, until) + task["flops"] for placement, task in tasks]
    executed = [behind_pass(vit, placement, task, until) for placement, task in tasks]
    return {"paper": float(np.mean(paper)), "executed": float(np.mean(executed))}


def behind_pass(vit: ViTConfig, placement: Placement, task: Mapping[str, Any], until: int) -> int:
    """The router's pass up to a block, and a task's network from where it leaves what that pass has
    computed."""
    begin = next(
        (index for index, expert in enumerate(task["experts"][:until]) if expert != 0), until
    )
    own = executed_flops(
        vit, placement, from_strings(task["architecture"]), len(task["classes"]), begin=begin
    )
    return executed_pass_flops(vit, placement, until) + own


def chosen(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the routers within `NEAR_BEST` of the best on validation images the one that keeps the
    fewest bytes."""
    best = max(row["found"]["val"] for row in rows)
    near = [row for row in rows if row["found"]["val"] >= best - NEAR_BEST]
    return dict(min(near, key=lambda row: (row["bytes_per_task"], -row["found"]["val"])))


def same_answers(own: Collected, paper: Mapping[int, Tried]) -> float:
    """Share of test images that the paper's router, made again, lets a run answer as before."""
    again = np.concatenate(routed(own.right_given, paper[own.run.results["seed"]].named["test"]))
    return float(np.mean(again == np.concatenate(own.right)))


if __name__ == "__main__":
    run_command(main, parse(RouterStudy, description=__doc__))
