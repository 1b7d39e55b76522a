"""Find and read the runs in folders, check whether one table can contain them, and describe their
differences."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.data.benchmarks.table import MTIL, VDD
from cheem_jax.report.memories import (
    interrupted_work,
    is_memory,
    like_run,
    read_evaluated,
    with_evaluated,
)
from cheem_jax.report.status import read_owner
from cheem_jax.report.table import METHODS, accuracy_key, last_row
from cheem_jax.run import record
from cheem_jax.run.differences import NAMED, find_differences, summary
from cheem_jax.run.directory import NAME
from cheem_jax.run.record import read_object
from cheem_jax.run.results import read_results

MEMORY = "a memory, not a run of an experiment"
"""The reason why a memory is excluded from tables of runs."""


MOST_RANK = 64
"""Largest rank of LoRA-CL in the presets and in experiments that select the rank by validation
accuracy. Runs with larger ranks are references, so tables display their rank."""
TRUNCATED_RANK = 32
"""Rank to which the preset `quick_plus` truncates pairs. Tables display other ranks."""


class RunRecord(NamedTuple):
    """The directory, results and configuration of a run or a memory."""

    directory: Path
    results: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def place(self) -> tuple[str, str]:
        return self.results["stream"], self.results["backbone"]

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(task["name"] for task in self.results["tasks"])

    @property
    def measured_on(self) -> str:
        return self.config.get("measured_on", "test")

    @property
    def is_memory(self) -> bool:
        return is_memory(self.config)

    @property
    def is_finished(self) -> bool:
        """Whether every task of the stream is learned and evaluated. A memory never counts as
        finished, because it can learn further tasks."""
        return not self.is_memory and len(self.order) == len(self.config["tasks"])


class Recorded(NamedTuple):
    """Information about a run that the record contains, but `results.json` does not."""

    begin: dict[str, Any]
    """The `run` entry of the record, with the data, the command and the conditions (such as
    versions and the device) of the run; empty if the record cannot be read."""
    reports: list[dict[str, Any]]
    """The reports of the run's method, one per task in learning order; empty if the record cannot
    be read."""
    trouble: str = ""
    """The reason why the record cannot be read; empty if the record can be read."""


LeftOut = list[tuple[Path, str]]
"""Excluded folders, each with the reason."""


def read(
    folders: Sequence[Path], *, others: bool = False, below: bool = True
) -> tuple[list[RunRecord], LeftOut]:
    """Read the finished runs in `folders` and, with `below`, in their subfolders. Duplicates are
    excluded. Also return the excluded folders with the reasons.

    With `others`, memories and unfinished runs follow the finished runs. Raises ValueError if an
    item of `folders` is not a folder.
    """
    unreadable: list[OSError] = []
    directories: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is not a folder; give a folder that contains runs")
        for place, subfolders, files in os.walk(folder, onerror=unreadable.append):
            if not below:
                subfolders.clear()
            if NAME in files:
                directories[Path(place).resolve()] = Path(place)
    left_out: LeftOut = [
        (Path(error.filename), f"cannot be read ({error.strerror})") for error in unreadable
    ]
    runs: list[RunRecord] = []
    first: dict[object, Path] = {}
    for directory in sorted(directories.values()):
        try:
            run = _read_one(directory)
            identity = _copy_key(run) if isinstance(run, RunRecord) else None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
            left_out.append((directory, f"corrupted ({error!r:.300})"))
            continue
        if isinstance(run, str):
            left_out.append((directory, run))
        elif run.is_finished and (same := first.setdefault(identity, directory)) != directory:
            left_out.append((directory, f"the same run as {same}"))
        elif run.is_finished or others:
            runs.append(run)
        elif run.is_memory:
            left_out.append((directory, MEMORY))
        else:
            num = len(run.config["tasks"])
            left_out.append(
                (directory, f"unfinished: {num - len(run.order)} of {num} tasks are missing")
            )
    return sorted(runs, key=lambda run: not run.is_finished), left_out


def _read_one(directory: Path) -> RunRecord | str:
    """Read a run or a memory. If it has no results yet, or if the forgetting of a task is not
    complete, return a text that states this reason."""
    config = read_object(directory / NAME)
    has_results = (directory / "results.json").exists()
    if is_memory(config) and (config.get("forgetting") or not has_results):
        if (owner := read_owner(directory)) is not None and not owner.is_self:
            return f"a memory, no task is measured yet; {owner.activity(config)}"
        return f"a memory, {interrupted_work(config, directory) or 'no task is measured yet'}"
    if not has_results:
        return "unfinished: no results yet; the command that started the run resumes it"
    measured = read_evaluated(directory, config) if is_memory(config) else {}
    run = RunRecord(
        directory,
        with_evaluated(read_results(directory), measured),
        like_run(config),
    )
    if run.results["method"] not in METHODS:
        raise ValueError(
            f"its method is {run.results['method']!r:.40}; expected one of {', '.join(METHODS)}"
        )
    if not run.is_memory:
        measurements(run.results)  # raises an error if a task is not measured
        if len(run.order) > len(config["tasks"]):
            raise ValueError("it contains more tasks than its stream")
    return run


def _copy_key(run: RunRecord) -> object:
    """Return a value that is identical for copies of a run. Of the engine's settings, only the
    precision counts, because the other settings do not affect results."""
    seeds = run.results["seed"], run.config.get("seeds")
    return *cell_key(run), json.dumps([seeds, _without_seeds(run.config)], sort_keys=True)


def read_record(run: RunRecord) -> Recorded:
    """Read the record of a run. If it is corrupted, the result contains the reason in `trouble`."""
    try:
        entries = record.read(run.directory)
    except (ValueError, OSError) as error:
        return Recorded({}, [], f"{error}")
    begin = next((entry for entry in entries if entry["event"] == "run"), {})
    reports = [
        e["report"]
        for e in entries
        if e["event"] == "learned" and e["method"] == run.results["method"]
    ]
    return Recorded(begin, sorted(reports, key=lambda report: report["index"])[: len(run.order)])


def check_comparable(runs: Sequence[RunRecord]) -> None:
    """Raise ValueError if runs with the same stream and backbone differ in tasks, data, weights,
    image size or preset, or if runs in the same table cell differ in settings. Seeds, and engine
    settings other than the precision, are ignored."""
    check_inputs(runs)
    settings: dict[tuple[object, ...], RunRecord] = {}
    for run in runs:
        alike = settings.setdefault(cell_key(run), run)
        if differing := find_differences(_without_seeds(alike.config), _without_seeds(run.config)):
            raise ValueError(
                f"{alike.directory} and {run.directory} would share cells, but"
                f" {summary(differing, 'settings', NAMED)}; tabulate them separately"
            )


def check_inputs(runs: Sequence[RunRecord]) -> None:
    """Raise ValueError if runs with the same stream and backbone differ in tasks, data, weights,
    image size, preset or the measured split."""
    first: dict[tuple[str, str], RunRecord] = {}
    for run in runs:
        reference = first.setdefault(run.place, run)
        if apart := sorted(set(run.order) ^ set(reference.order)):
            raise ValueError(
                f"{run.directory} and {reference.directory} are both {' on '.join(run.place)}, but"
                f" only one of them has {', '.join(apart)}; tabulate them separately"
            )
        if differing := find_differences(_identity(reference), _identity(run)):
            raise ValueError(
                f"{reference.directory} and {run.directory} are both {' on '.join(run.place)}, but "
                f"{summary(differing, 'values', NAMED)}; tabulate them separately"
            )


def _identity(run: RunRecord) -> dict[str, Any]:
    keys = ("image_size", "data_sha256", "weights_sha256", "split_sha256")
    # the preset is, for example, "paper, changed" if individual settings differ from preset `paper`
    preset = run.results["preset"].split(",")[0]
    identity = {key: run.config.get(key, run.results.get(key)) for key in keys}
    return {**identity, "preset": preset, "measured_on": run.measured_on}


def cell_key(run: RunRecord) -> tuple[object, ...]:
    """Return the key of a run's cell in a table. Runs in the same cell differ only in their
    seeds."""
    return (*run.place, run.results["method"], describe_variant(run), run.order)


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        key: value for key, value in config.items() if key not in ("seed", "seeds", "engine")
    }
    return {**settings, "precision": config.get("engine", {}).get("precision", "float32")}


def describe_variant(run: RunRecord) -> str:
    """Describe the settings of a run that differ from its method's defaults: the placement, CHEEM's
    settings that an ablation changes, LoRA-CL's settings, and the router. The text is empty if no
    setting differs."""
    results = run.results
    parts = []
    settings = run.config.get(run.results["method"], {})
    if results["method"] in ("cheem", "cheem_lite"):
        parts += [results["placement"]] if results["placement"] != "mlp_down" else []
        parts += _unusual(settings)
    parts += ["from the nearest task"] if settings.get("begin") == "nearest" else []
    parts += ["new in every block"] if settings.get("op") == "new" else []
    schedule = settings.get("fit", {}).get("schedule")
    parts += ["rising rate"] if schedule == "warm_cosine" else []
    rank = settings.get("rank", 0)
    parts += [f"rank {rank}"] if rank > MOST_RANK else []
    truncated = settings.get("ops", settings).get("truncated_rank")
    usual = TRUNCATED_RANK if settings.get("sampling") == "anchored" else None
    if truncated != usual:
        parts.append("not truncated" if truncated is None else f"truncated to rank {truncated}")
    router = settings.get("router", {})
    kind = router.get("kind", "kmeans"), router.get("features", "last")
    parts += [f"router {' '.join(kind)}"] if kind != ("kmeans", "last") else []
    if results["router"] != results["backbone"]:
        parts.append(results["router"])
    return ", ".join(parts)


def _unusual(cheem: Mapping[str, Any]) -> list[str]:
    """List the settings of CHEEM that an ablation changes, if their values differ from the
    paper's."""
    sampling = cheem.get("sampling", "hee")
    sampling = "elimination" if sampling == "anchored" else str(sampling)
    parts = [sampling] if sampling != "hee" else []
    parts += [f"without {kind}" for kind in cheem.get("remove", ())]
    parts += ["inherited weights"] if cheem.get("weights", "initial") != "initial" else []
    parts += ["neutral base means"] if cheem.get("base_means", "known") != "known" else []
    search, exploration = cheem.get("search", {}), cheem.get("exploration", {})
    epsilons = exploration.get("epsilon", 0.3), search.get("epsilon", 0.5)
    if epsilons != (0.3, 0.5):
        parts.append(f"eps1 {epsilons[0]:g}, eps2 {epsilons[1]:g}")
    # runs of a version whose search scored candidates in closed form, usually with tolerance 0
    is_closed_form = cheem.get("score") == "closed_form"
    parts += ["closed-form score"] if is_closed_form else []
    usual = 0.0 if is_closed_form else 0.02
    if (tolerance := search.get("tolerance", usual)) != usual:
        parts.append(f"tau {tolerance:g}")
    return parts


def order_names(runs: Sequence[RunRecord]) -> dict[tuple[str, tuple[str, ...]], str]:
    """Name each order of tasks, keyed by stream and task names.

    `default` is the benchmark's default order, or else the most frequent order of the stream. Each
    other order has the name that the benchmark defines for it, or else `reversed` or a name such as
    `order2`.
    """
    benchmark_names = {("mtil", tuple(tasks.split())): str(name) for name, tasks in MTIL.items()}
    benchmark_names["vdd", tuple(VDD.split())] = "default"
    counts = Counter((run.results["stream"], run.order) for run in runs)
    names: dict[tuple[str, tuple[str, ...]], str] = {}
    for place, _ in sorted(
        counts.most_common(), key=lambda counted: counted[0] not in benchmark_names
    ):
        has_default = "default" in (
            name for (stream, _), name in names.items() if stream == place[0]
        )
        others = sum(stream == place[0] for stream, _ in names)
        is_reversed = names.get((place[0], place[1][::-1])) == "default"
        number = "reversed" if is_reversed else f"order{others + 1}"
        names[place] = benchmark_names.get(place) or (number if has_default else "default")
    return names


IMAGE_MEASURES = (
    "last_accuracy",
    "incremental_accuracy",
    "local_last_accuracy",
    "local_incremental_accuracy",
)
"""Accuracies in which every test image has the same weight."""


def measurements(results: Mapping[str, Any]) -> dict[tuple[str, str], float | None]:
    """Return the measurements of a run, keyed by measure and task. Accuracies and forgetting are in
    percent, FLOPs are in GFLOPs per image, `hours` are per task, and `seconds` are in total.

    The second item of a key is the name of the task. For a mean over tasks, this item is empty; for
    the duration of a phase, it is the name of the phase.
    """
    key = accuracy_key(results["method"])
    is_bound = key == "local_accuracy"
    numbers: dict[tuple[str, str], float | None] = {
        ("average_accuracy", ""): (
            100 * results["local_average_accuracy" if is_bound else "average_accuracy"]
        ),
        ("average_forgetting", ""): (
            None if is_bound else _scaled(results["average_forgetting"], 100)
        ),
        **{
            (name, ""): None if is_bound and not name.startswith("local") else _scaled(value, 100)
            for name in IMAGE_MEASURES
            for value in [results[name]]
        },
        ("local_average_accuracy", ""): 100 * results["local_average_accuracy"],
        ("just_trained", ""): 100 * float(np.mean(results["just_trained"])),
        ("flops", ""): results["flops"]["paper"] / 1e9,
        ("params_added_percent", ""): results["params_added_percent"],
        ("seconds", ""): results["seconds"],
        ("hours", ""): results["seconds"] / 3600 / len(results["tasks"]),
    }
    for task, accuracy in zip(results["tasks"], last_row(results[key]), strict=False):
        numbers["accuracy", task["name"]] = _scaled(accuracy, 100)
        numbers["flops", task["name"]] = _scaled(task.get("flops_method"), 1e-9)
    for phase in ("supernet", "search", "finetune"):
        seconds = [task["seconds"].get(phase) for task in results["tasks"]]
        if None not in seconds:
            numbers["hours", phase] = float(np.mean(seconds)) / 3600
    return numbers


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
