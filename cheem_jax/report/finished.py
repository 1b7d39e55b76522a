"""Finished runs: what they measured, whether they may share a table, and how their settings differ."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.data.benchmarks.table import MTIL, VDD
from cheem_jax.report.memories import is_memory
from cheem_jax.report.table import TOLD
from cheem_jax.run.differences import leaves, settings_apart, summary
from cheem_jax.run.record import read_object

MEMORY = "a memory, not a run of an experiment"
"""Why it is in no table of runs."""


class RunRecord(NamedTuple):
    """A finished run: its folder, results and configuration."""

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
    def is_memory(self) -> bool:
        return is_memory(self.config)


def read(folders: Sequence[Path]) -> tuple[list[RunRecord], list[tuple[Path, str]]]:
    """All finished runs below the folders, each once, and what had to be left out, with the reason."""
    runs: list[RunRecord] = []
    left_out: list[tuple[Path, str]] = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"--runs is {folder}, which is not a folder; expected one that contains finished runs")
    directories: dict[Path, Path] = {}
    for folder in folders:
        for place, _, files in os.walk(folder, onerror=lambda error: left_out.append(_unreadable(error))):
            if "config.json" in files:
                directories[Path(place).resolve()] = Path(place)
    first: dict[object, Path] = {}
    for directory in sorted(directories.values()):
        try:
            config = read_object(directory / "config.json")
            if is_memory(config):
                left_out.append((directory, MEMORY))
                continue
            results = read_object(directory / "results.json")
            run = RunRecord(directory, results, config)
            missing = len(config["tasks"]) - len(run.order)
            numbers_of(results)
            # how networks were run decides no result, but for the precision
            seeds = run.results["seed"], config.get("seeds")
            identity = (*cell_of(run), json.dumps([seeds, _without_seeds(config)], sort_keys=True))
        except FileNotFoundError:
            left_out.append((directory, "unfinished: it has no results yet"))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
            left_out.append((directory, f"corrupted ({error!r:.100})"))
        else:
            same = first.setdefault(identity, directory)
            if missing:
                left_out.append((directory, f"unfinished: {missing} of {len(config['tasks'])} tasks are missing"))
            elif same != directory:
                left_out.append((directory, f"the same run as {same}"))
            else:
                runs.append(run)
    return runs, left_out


def _unreadable(error: OSError) -> tuple[Path, str]:
    return Path(error.filename), f"cannot be read ({error.strerror})"


IDENTITY = ("image_size", "data_sha256", "weights_sha256", "split_sha256", "preset")


def check_comparable(runs: Sequence[RunRecord]) -> None:
    """Raises ValueError where runs of one table differ in data, weights or pixels, or runs of one cell in settings."""
    first: dict[tuple[str, str], RunRecord] = {}
    settings: dict[tuple[object, ...], RunRecord] = {}
    for run in runs:
        reference = first.setdefault(run.place, run)
        if apart := sorted(set(run.order) ^ set(reference.order)):
            raise ValueError(
                f"{run.directory} and {reference.directory} are both {' on '.join(run.place)}, but only one of them "
                f"has {', '.join(apart)}; tabulate them separately"
            )
        for key in IDENTITY:
            theirs, ours = ({key: _identity(other, key)} for other in (reference, run))
            if found := list(leaves(theirs, ours)):
                raise ValueError(
                    f"{reference.directory} and {run.directory} are both {' on '.join(run.place)}, but "
                    f"{summary(found, 'values')}; tabulate them separately"
                )
        alike = settings.setdefault(cell_of(run), run)
        if found := settings_apart(_without_seeds(alike.config), _without_seeds(run.config)):
            raise ValueError(
                f"{alike.directory} and {run.directory} would share cells, but {summary(found, 'settings')}; "
                "tabulate them separately"
            )


def _identity(run: RunRecord, key: str) -> object:
    if key == "preset":  # "paper, changed" where single settings differ
        return run.results["preset"].split(",")[0]
    return run.config.get(key, run.results.get(key))


def cell_of(run: RunRecord) -> tuple[object, ...]:
    """Runs of one cell differ in their seeds alone."""
    return (*run.place, run.results["method"], variant_of(run), run.order)


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in ("seed", "seeds", "engine")}
    return {**kept, "precision": config.get("engine", {}).get("precision", "float32")}


def variant_of(run: RunRecord) -> str:
    """How a run differs from the usual one of its method: placement, sampling and other settings of CHEEM that an
    ablation changes, and the router; empty for the usual one."""
    results, found = run.results, []
    if (method := results["method"]) in ("cheem", "cheem_lite"):
        found += [results["placement"]] if results["placement"] != "mlp_down" else []
        found += _unusual(run.config.get(method, {}))
    router = run.config.get(method, {}).get("router", {})
    kind = router.get("kind", "kmeans"), router.get("features", "last")
    found += [f"router {' '.join(kind)}"] if kind != ("kmeans", "last") else []
    if results["router"] != results["backbone"]:
        found.append(results["router"])
    return ", ".join(found)


def _unusual(cheem: Mapping[str, Any]) -> list[str]:
    """The settings of CHEEM that are not the paper's, as far as a study changes them."""
    found = [cheem["sampling"]] if cheem.get("sampling", "hee") != "hee" else []
    found += [f"without {kind}" for kind in cheem.get("remove", ())]
    found += ["inherited weights"] if cheem.get("weights", "initial") != "initial" else []
    found += ["neutral base means"] if cheem.get("base_means", "known") != "known" else []
    search, exploration = cheem.get("search", {}), cheem.get("exploration", {})
    epsilons = exploration.get("epsilon", 0.3), search.get("epsilon", 0.5)
    if epsilons != (0.3, 0.5):
        found.append(f"eps1 {epsilons[0]:g}, eps2 {epsilons[1]:g}")
    if (tolerance := search.get("tolerance", 0.02)) != 0.02:
        found.append(f"tau {tolerance:g}")
    # two settings that no longer exist, of published runs
    found += ["shared-prefix FLOPs"] if search.get("cost", "network") != "network" else []
    found += [f"best of {draws} trained samples"] if (draws := cheem.get("trained_draws", 0)) else []
    return found


def order_names(runs: Sequence[RunRecord]) -> dict[tuple[str, tuple[str, ...]], str]:
    """What each stream's orders of tasks are called.

    `default` is the benchmark's own, else the one that most runs have; others have the benchmark's names, or `reversed`
    or a number.
    """
    named = {("mtil", tuple(tasks.split())): str(name) for name, tasks in MTIL.items()}
    named["vdd", tuple(VDD.split())] = "default"
    counts = Counter((run.results["stream"], run.order) for run in runs)
    found: dict[tuple[str, tuple[str, ...]], str] = {}
    for place, _ in sorted(counts.most_common(), key=lambda counted: counted[0] not in named):
        has_default = "default" in (name for (stream, _), name in found.items() if stream == place[0])
        others = sum(stream == place[0] for stream, _ in found)
        is_reversed = found.get((place[0], place[1][::-1])) == "default"
        number = "reversed" if is_reversed else f"order{others + 1}"
        found[place] = named.get(place) or (number if has_default else "default")
    return found


def numbers_of(results: Mapping[str, Any]) -> dict[tuple[str, str], float | None]:
    """What one run measured, in the paper's units, by measure and task."""
    is_bound = results["method"] in TOLD
    matrix = results["local_accuracy" if is_bound else "accuracy"]
    names = [task["name"] for task in results["tasks"]]
    found: dict[tuple[str, str], float | None] = {
        ("average_accuracy", ""): 100 * results["local_average_accuracy" if is_bound else "average_accuracy"],
        ("average_forgetting", ""): None if is_bound else _percent(results["average_forgetting"]),
        ("local_average_accuracy", ""): 100 * results["local_average_accuracy"],
        ("just_trained", ""): 100 * float(np.mean(results["just_trained"])),
        ("flops", ""): results["flops"]["paper"] / 1e9,
        ("params_added_percent", ""): results["params_added_percent"],
        ("hours", ""): results["seconds"] / 3600 / len(names),
    }
    last = matrix[-1] if isinstance(matrix[-1], list) else matrix
    for index, name in enumerate(names):
        task = results["tasks"][index]
        found["accuracy", name] = _percent(last[index])
        found["flops", name] = _scaled(task.get("flops_method"), 1e-9)
    for phase in ("supernet", "search", "finetune"):
        seconds = [task["seconds"].get(phase) for task in results["tasks"]]
        if None not in seconds:
            found["hours", phase] = float(np.mean(seconds)) / 3600
    return found


def _percent(value: float | None) -> float | None:
    return _scaled(value, 100)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
