"""Which router loses least: every kind on what finished runs have learned, chosen on validation, reported on test.

    python experiments/router_study.py --runs runs/compare --out runs/routers
    python experiments/router_study.py --runs runs/compare --collected docs/results/runs \\
        --earlier docs/results/routers.json --out runs/routers

Routers infer tasks from what the frozen backbone says, so no run is made again: an image is answered rightly where a
router infers its task and the run's answer with the task ID given is right. Of a collected run those answers are all
there is, which is enough for accuracy on test images. A run of CHEEM with its networks is needed for the choice on
validation images, unless an earlier study is given: what it found counts too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mtil
import numpy as np
from charts import check_folder
from collect import right_of
from studies.paper.collected import Cell, Collected, check_right
from studies.paper.collected import load as load_collected
from studies.paper.paired import Estimate, accuracy_difference
from studies.routers.page import NAMES as METHODS
from studies.routers.page import page_of
from studies.routers.trying import PAPER, Tried, attempt, candidates, kept, seen_of, title_of

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import executed_flops, executed_pass_flops, pass_flops
from cheem_jax.backbone.params import build
from cheem_jax.cli.main import parse, run_command
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys
from cheem_jax.core.ops import Placement
from cheem_jax.core.routing import RouterConfig
from cheem_jax.engine.choice import make_executor
from cheem_jax.engine.executor import Executor
from cheem_jax.memory.making import open_memory
from cheem_jax.report.finished import RunRecord, check_comparable, order_names, read, variant_of
from cheem_jax.run import record
from cheem_jax.run.differences import without_removed_options
from cheem_jax.run.progress import Progress

NEAR_BEST = 0.005
"""Accuracy on validation that may be given up for fewer bytes."""
Right = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class RouterStudy:
    """Routers side by side on finished runs."""

    runs: tuple[Path, ...]
    """Folders with finished runs of one stream, at any depth."""
    collected: Path | None = None
    """A folder that `collect.py` has filled: runs whose networks are gone, for accuracy on test."""
    earlier: Path | None = None
    """`routers.json` of an earlier study of collected runs: what it found on validation images."""
    weights: Path | None = None
    """The backbone's weights file; default: where the runs had it."""
    stream: str | None = None
    """Where the runs' images are; default: where the runs had them."""
    out: Path = Path("runs/routers")
    """Where numbers, page and what was computed are kept."""


def main(settings: RouterStudy) -> None:
    """Try every router, choose one, write page and numbers."""
    progress, out = Progress(), settings.out
    check_folder("--out", out)
    runs = runs_of(settings.runs, is_chosen=settings.earlier is not None)
    others = collected_of(settings.collected, runs)
    earlier = None if settings.earlier is None else earlier_of(settings.earlier, runs, others)
    source, loaded = load(runs[0], settings, progress)
    tasks = loaded.stream.tasks
    config = mtil.config_of(source)
    size, vit = config.method.batch_size, build(loaded.pretrained.config, loaded.pretrained.params)
    executor = make_executor(vit, "mlp_down", config.engine, batch_size=size)
    place = out / "seen" / short(loaded.pretrained.sha256, loaded.size, runs[0].config["data_sha256"])
    seen = [seen_of(task, executor, place / f"{task.name}.npz", size, progress.say) for task in tasks]
    labels = {task.name: task.test.labels for task in tasks}
    given = {}
    for run in runs:
        right, right_given = right_of(run, labels)
        check_right(run, right, right_given)
        given[run.directory] = list(right_given)
    opened = [run for run in runs if run.results["method"] == "cheem"]
    told = {run.directory: told_of(run, settings, tasks, out) for run in opened}
    given |= {own.run.directory: list(own.right_given) for own in others}
    runs += [own.run for own in others]
    owners = [run for run in runs if run.results["method"] == "cheem"]

    rows, tried = [], dict[RouterConfig, dict[int, Tried]]()
    for config in candidates():
        own = {
            seed: attempt(config, seen, [task.train.labels for task in tasks], Keys(seed))
            for seed in sorted({run.results["seed"] for run in runs})
        }
        tried[config] = own
        rows.append(row_of(config, own, tried[PAPER], runs, given, told))
        rows[-1]["flops"] = {name: float(np.mean(one)) for name, one in flops_of(owners, config, executor).items()}
        progress.say(
            f"{config.features}, {title_of(config)}: task ID right on test {100 * rows[-1]['found']['test']:.1f} %"
        )
    validated = [run.results["seed"] for run in opened]
    if earlier is not None:
        num, before = len(validated), len(earlier["validated"])
        for row, known in zip(rows, earlier["rows"], strict=True):
            ours = num * row["validation"] if num else 0.0
            row["validation"] = (ours + before * known["validation"]) / (num + before)
        validated += earlier["validated"]
    best = chosen(rows)
    same = [agreement(run, tried[PAPER][run.results["seed"]]) for run in opened]
    again = {
        own.run.results["seed"]: same_answers(own, tried[PAPER][own.run.results["seed"]])
        for own in others if own.run.results["method"] == "cheem"
    }  # fmt: skip
    if earlier is not None:
        same += earlier["same_as_run"]
    found = {
        "stream": loaded.stream.name, "backbone": loaded.pretrained.config.name, "image_size": loaded.size,
        "tasks": [task.name for task in tasks], "rows": rows, "chosen": best, "near_best": NEAR_BEST,
        "runs": [{"method": run.results["method"], "seed": run.results["seed"]} for run in runs],
        "validated": sorted(validated),
        "same_as_run": same, "same_answers": [share for _, share in sorted(again.items())],
        "by_task": by_task(runs, given, tried, best),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "routers.json", json.dumps(found, indent=1) + "\n")
    write_atomically(out / "routers.md", page_of(found))
    progress.say(f"{len(rows)} routers on {len(runs)} runs: {out / 'routers.md'}")


def runs_of(folders: Sequence[Path], *, is_chosen: bool) -> list[RunRecord]:
    """The runs that a router serves; ValueError without any, or without one of CHEEM where no choice `is_chosen`."""
    runs = [run for run in read(folders)[0] if run.results["method"] in METHODS and not variant_of(run)]
    check_comparable(runs)
    orders = order_names(runs)
    runs = [run for run in runs if orders[run.place[0], run.order] == "default"]
    wanted = METHODS if is_chosen else ("cheem",)
    if not any(run.results["method"] in wanted for run in runs):
        told = f"--runs {', '.join(map(str, folders))} hold no finished run of {' or '.join(wanted)}"
        raise ValueError(f"{told} with its usual settings")
    return runs


def collected_of(folder: Path | None, runs: Sequence[RunRecord]) -> list[Collected]:
    """Collected runs that are not among those with networks; ValueError where they are of something else."""
    if folder is None:
        return []
    there = {(run.results["method"], run.results["seed"]) for run in runs}
    cells = load_collected(folder)
    usual = [own for method in METHODS for own in cells.get(Cell(method), {}).values()]
    found = [own for own in usual if (own.run.results["method"], own.run.results["seed"]) not in there]
    places = {run.place for run in runs} | {own.run.place for own in found}
    if len(places) > 1 or len({run.order for run in (*runs, *(own.run for own in found))}) > 1:
        raise ValueError(f"--collected {folder} contains runs of another stream, backbone or order than --runs")
    check_comparable([*runs, *(own.run for own in found)])
    return found


def earlier_of(file: Path, runs: Sequence[RunRecord], others: Sequence[Collected]) -> dict[str, Any]:
    """An earlier study of runs of CHEEM that are now collected ones; ValueError where it is of something else."""
    try:
        found = json.loads(file.read_text())
        seeds, own = list(found["validated"]), (found["stream"], found["backbone"], tuple(found["tasks"]))
        ours = [(row["config"], row["validation"]) for row in found["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--earlier {file} cannot be used ({error!r:.100}); expected a routers.json") from error
    there = {one.run.results["seed"] for one in others if one.run.results["method"] == "cheem"}
    if own != (*runs[0].place, runs[0].order) or not set(seeds) <= there:
        raise ValueError(
            f"--earlier {file} is of CHEEM with seeds {seeds} on {own[0]}; expected seeds of --collected that --runs "
            f"lack, {sorted(there)}, on {runs[0].place[0]} and the same tasks"
        )
    known = [dataclasses.asdict(config) for config in candidates()]
    if [config for config, _ in ours] != known:
        raise ValueError(f"--earlier {file} has tried other routers than this study does; leave it out")
    return found


def load(run: RunRecord, settings: RouterStudy, progress: Progress) -> tuple[mtil.Mtil, mtil.Loaded]:
    """Weights and images as the run had them."""
    begun = next(entry for entry in record.read(run.directory) if entry["event"] == "run")
    source = mtil.read_arguments(without_removed_options(begun["command"])[1:])
    changes = {name: value for name in ("weights", "stream") if (value := getattr(settings, name)) is not None}
    source = dataclasses.replace(source, base_data=None, router=None, router_weights=None, **changes)
    return source, mtil.load(source, progress)


def short(*told: Any) -> str:
    """A name for what depends on all this."""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


def told_of(run: RunRecord, settings: RouterStudy, tasks: Sequence[Any], out: Path) -> Right:
    """Which validation images a run answers rightly with the task ID given."""

    def compute() -> dict[str, np.ndarray]:
        memory, found = open_memory(run.directory, weights=settings.weights), {}
        for index, task in enumerate(tasks):
            logits = memory.predictor(task=task.name).answer(task.val.images[:]).logits
            found[f"{index:03d}"] = np.array([own.argmax() for own in logits]) == task.val.labels
        return found

    file = out / "given" / f"{run.results['method']}-{run.results['seed']}-{short(run.config, run.results)}.npz"
    return [own for _, own in sorted(kept(file, compute).items())]


def routed(given: Right, named: Sequence[np.ndarray]) -> Right:
    """Images whose task is named and whose class is then right."""
    return [right & (own == index) for index, (right, own) in enumerate(zip(given, named, strict=True))]


def mean_over_tasks(right: Right) -> float:
    """Average accuracy."""
    return float(np.mean([own.mean() for own in right]))


def row_of(
    config: RouterConfig, own: Mapping[int, Tried], paper: Mapping[int, Tried], runs: Sequence[RunRecord],
    given: Mapping[Path, Right], told: Mapping[Path, Right],
) -> dict[str, Any]:  # fmt: skip
    """One router's numbers: means over runs, and the paired difference from the paper's router."""
    seeds, row = list(own.values()), {}
    for method in METHODS:
        rights = [
            (routed(given[run.directory], own[run.results["seed"]].named["test"]),
             routed(given[run.directory], paper[run.results["seed"]].named["test"]))
            for run in runs if run.results["method"] == method
        ]  # fmt: skip
        if rights:
            better = accuracy_difference([ours for ours, _ in rights], [theirs for _, theirs in rights])
            accuracy = float(np.mean([mean_over_tasks(ours) for ours, _ in rights]))
            row[method] = {"accuracy": accuracy, "gain": told_estimate(better), "runs": len(rights)}
    validation = [
        mean_over_tasks(routed(told[run.directory], own[run.results["seed"]].named["val"]))
        for run in runs if run.directory in told
    ]  # fmt: skip
    return {
        "features": config.features, "title": title_of(config), "config": dataclasses.asdict(config), **row,
        "validation": float(np.mean(validation)) if validation else None,
        "found": {
            split: float(np.mean([[np.mean(named == i) for i, named in enumerate(one.named[split])] for one in seeds]))
            for split in ("val", "test")
        },
        "bytes_per_task": seeds[0].bytes_per_task,
        "seconds_per_task": float(np.mean([one.seconds_per_task for one in seeds])),
        "microseconds_per_image": float(np.mean([one.microseconds_per_image for one in seeds])),
    }  # fmt: skip


def flops_of(runs: Sequence[RunRecord], config: RouterConfig, executor: Executor) -> dict[str, list[int]]:
    """Per image by the paper's convention, and as it runs, of every task of CHEEM's runs behind such a router."""
    vit, found = executor.config, {"paper": [], "executed": []}
    until = config.until(vit.depth)
    for run in runs:
        placement = run.results["placement"]
        for task in run.results["tasks"]:
            found["paper"].append(pass_flops(vit, placement, until) + task["flops"])
            found["executed"].append(behind_pass(vit, placement, task, until))
    return found


def behind_pass(vit: ViTConfig, placement: Placement, task: Mapping[str, Any], until: int) -> int:
    """The router's pass up to a block, and a task's network from where it leaves what that pass has computed."""
    begin = next((index for index, expert in enumerate(task["experts"][:until]) if expert != 0), until)
    own = executed_flops(vit, placement, from_strings(task["architecture"]), len(task["classes"]), begin=begin)
    return executed_pass_flops(vit, placement, until) + own


def told_estimate(estimate: Estimate) -> dict[str, Any]:
    """As JSON values."""
    return {name: value for name, value in estimate._asdict().items() if name != "per_seed"}


def chosen(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the routers within `NEAR_BEST` of the best on validation the one that keeps the fewest bytes."""
    best = max(row["validation"] for row in rows)
    near = [row for row in rows if row["validation"] >= best - NEAR_BEST]
    return dict(min(near, key=lambda row: (row["bytes_per_task"], -row["validation"])))


def agreement(run: RunRecord, tried: Tried) -> float:
    """Share of test images for which the paper's router, made again, infers the same task as the run's own."""
    with np.load(run.directory / "answers.npz", allow_pickle=False) as held:
        return float(np.mean(np.concatenate([
            held[f"chosen_task_{index}"] == named for index, named in enumerate(tried.named["test"])
        ])))  # fmt: skip


def same_answers(own: Collected, tried: Tried) -> float:
    """Share of test images that the paper's router, made again, lets a collected run answer as before."""
    again = np.concatenate(routed(list(own.right_given), tried.named["test"]))
    return float(np.mean(again == np.concatenate(own.right)))


def by_task(
    runs: Sequence[RunRecord], given: Mapping[Path, Right], tried: Mapping[RouterConfig, Mapping[int, Tried]],
    best: Mapping[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    """Accuracy of CHEEM by task with the paper's router, with the chosen one, and with the task ID given."""
    owners, config = [run for run in runs if run.results["method"] == "cheem"], RouterConfig(**best["config"])
    found = []
    for index, name in enumerate(owners[0].order):
        row: dict[str, Any] = {"task": name}
        for key, used in (("paper", PAPER), ("chosen", config)):
            pairs = [(given[r.directory][index], tried[used][r.results["seed"]].named["test"][index]) for r in owners]
            row[key] = float(np.mean([np.mean(right & (named == index)) for right, named in pairs]))
            row[f"{key}_found"] = float(np.mean([np.mean(named == index) for _, named in pairs]))
        row["given"] = float(np.mean([given[run.directory][index].mean() for run in owners]))
        found.append(row)
    return found


if __name__ == "__main__":
    run_command(main, parse(RouterStudy, description=__doc__))
