"""A benchmark's task as a plan: the prepared data set, the paper's splits, and the counts held against its tables."""

import json
from pathlib import Path

import numpy as np

from cheem_jax.atomic import write_atomically
from cheem_jax.data.benchmarks.table import BY_NAME, BenchmarkTask, Counts, Rule
from cheem_jax.data.decode import Progress
from cheem_jax.data.plan import Plan
from cheem_jax.data.records import Records, cut_parts, default_data_dir, open_prepared, stamp
from cheem_jax.data.splits import TEST_TENTHS, VAL_TENTHS, move, tenths


def plan_benchmark(name: str, data_dir: Path | None, *, seed: int = 0, on_progress: Progress | None = None) -> Plan:
    """A task with the paper's splits, from the data set that TFDS has prepared; `seed` draws what is cut.

    Raises FileNotFoundError where it is not prepared, ValueError where its counts or splits are not the expected ones.
    """
    return plan_of(BY_NAME[name], data_dir or default_data_dir(), seed=seed, on_progress=on_progress)


def plan_of(task: BenchmarkTask, data_dir: Path, *, seed: int = 0, on_progress: Progress | None = None) -> Plan:
    """As `plan_benchmark`, for a task that may stand in no table."""
    prepared = open_prepared(task.spec, data_dir)
    wanted = {"train": task.train, "val": (task.val,) if task.val else (), "test": (task.test,) if task.test else ()}
    known: dict[str, tuple[Records, np.ndarray]] = {}
    kept = [label for label, name in enumerate(prepared.classes) if name not in task.dropped]
    renumbered = np.full(len(prepared.classes), -1)
    renumbered[kept] = np.arange(len(kept))
    for split, sources in wanted.items():
        present = [source for source in sources if source in prepared.splits]
        if sources and not present:
            raise ValueError(f"{prepared.directory} has no split {sources}, only {sorted(prepared.splits)}")
        if not present:
            continue
        records, labels = prepared.index(present, task.key, on_progress=on_progress)
        rows = np.flatnonzero(np.isin(labels, kept))
        known[split] = records.chosen(rows), renumbered[labels[rows]].astype(np.int32)
    parts = cut_parts(known, lambda keys, labels: cut_by_rule(task.rule, keys, labels, seed))
    classes = tuple(prepared.classes[label] for label in kept)
    plan = Plan(task.name, classes, **parts, source=f"tfds:{prepared.full_name}", stamp=stamp(prepared.directory))
    _check_counts(task, plan)
    _check_splits(task, plan, data_dir, seed)
    return plan


def cut_by_rule(rule: Rule, keys: dict[str, list[str]], labels: dict[str, np.ndarray], seed: int) -> None:
    """Cuts what a task lacks from train, in place."""
    if rule == "test and val":
        move(keys, labels, "test", tenths(len(keys["train"]), TEST_TENTHS), keep=2, seed=seed)
    if rule == "decathlon":
        move(keys, labels, "val", len(keys["train"]) // 10, keep=1, seed=seed)
    elif rule != "official":
        move(keys, labels, "val", tenths(len(keys["train"]), VAL_TENTHS), keep=1, seed=seed)


def _check_counts(task: BenchmarkTask, plan: Plan) -> None:
    found = Counts(*(len(part.labels) for part in plan.splits.values()))
    if found != task.counts or len(plan.classes) != task.num_classes:
        raise ValueError(
            f"task {task.name!r} has {_told(found, len(plan.classes))}, expected "
            f"{_told(task.counts, task.num_classes)}: {plan.source} is not the data set of the benchmark, or was "
            "prepared incompletely; prepare it again"
        )


def _told(counts: Counts, num_classes: int) -> str:
    return f"{counts.train:,}/{counts.val:,}/{counts.test:,} train/val/test images of {num_classes:,} classes"


def splits_file(data_dir: Path, name: str, seed: int) -> Path:
    """Where the record of a task's splits lies."""
    return data_dir / "cheem_jax" / "splits" / f"{name}-seed{seed}.json"


def _check_splits(task: BenchmarkTask, plan: Plan, data_dir: Path, seed: int) -> None:
    """Writes down which pictures are in which split, or holds the plan against what is written."""
    file = splits_file(data_dir, task.name, seed)
    told = {
        "format": "cheem_jax-splits/1",
        "task": task.name,
        "source": plan.source,
        "rule": task.rule,
        "seed": seed,
        "counts": task.counts._asdict(),
        "num_classes": task.num_classes,
        "sha256": plan.split_sha256,
    }
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(told, indent=1) + "\n")
        except OSError:
            pass  # a data folder that others look after; the hash is in the run's record all the same
        return
    try:
        known = str(json.loads(file.read_text())["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); remove it and it is written again") from error
    if known != plan.split_sha256:
        raise ValueError(
            f"task {task.name!r}: the splits are not those of {file} (sha256 {plan.split_sha256[:12]}..., there "
            f"{known[:12]}...), so results would not compare; the data set has changed, or the file is "
            "somebody else's: remove it if the new splits are meant"
        )
