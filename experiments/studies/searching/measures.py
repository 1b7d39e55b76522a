"""What the record of a study says: how the scores rank networks, what each recipe finds, and what that costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import spearmanr

from studies.searching.units import Entry

RESAMPLES = 2000
SCORES = ("shared_head", "closed_form")


def correlation(*pairs: tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]]) -> dict[str, Any] | None:
    """Spearman's rank correlation, mean over the `pairs`, with the 95 % interval of a bootstrap over the networks of
    each; None where all of a pair are equal."""

    def found(x: np.ndarray, y: np.ndarray) -> float:
        if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
            return float("nan")
        result: Any = spearmanr(x, y)
        return float(result.statistic)

    if not pairs or np.isnan(value := float(np.mean([found(x, y) for x, y in pairs]))):
        return None
    rng = np.random.default_rng(0)
    drawn = [[(x[rows], y[rows]) for rows in rng.integers(0, len(x), (RESAMPLES, len(x)))] for x, y in pairs]
    low, high = np.nanquantile(np.mean([[found(*one) for one in own] for own in drawn], axis=0), (0.025, 0.975))
    return {"value": value, "low": float(low), "high": float(high), "num": sum(len(x) for x, _ in pairs)}


def rankings(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A row per task and position whose sampled networks are all trained, and their mean: how each score correlates
    with accuracy after stand-alone training, over validation and test images."""
    rows, pairs = [], {name: [] for name in SCORES}
    for sampled in entries:
        if sampled["event"] != "sampled":
            continue
        same = {name: sampled[name] for name in ("task", "position", "data_sha256", "settings", "num", "rate")}
        trained = {tuple(e["genome"]): e for e in entries if e["event"] == "trained" and same.items() <= e.items()}
        reached = [accuracy_of(trained.get(tuple(genome))) for genome in sampled["genomes"]]
        if None in reached:
            continue
        own = {name: (np.array(sampled[name]), np.array(reached, np.float64)) for name in SCORES}
        for name, pair in own.items():
            pairs[name].append(pair)
        points = {name: sampled[name] for name in SCORES} | {"reached": reached}
        rows.append({
            "task": sampled["task"], "position": sampled["position"], "rate": sampled["rate"], "points": points,
            **{name: correlation(pair) for name, pair in own.items()},
        })  # fmt: skip
    mean = {"task": "mean", "position": "", **{name: correlation(*pairs[name]) for name in SCORES}}
    return [*rows, mean] if len(rows) > 1 else rows


def accuracy_of(entry: Entry | None) -> float | None:
    """Accuracy over validation and test images together; None where training failed or is not over."""
    if entry is None or entry["test_accuracy"] is None:
        return None
    counts = np.array([entry["num_val"], entry["num_test"]])
    return float(counts @ [entry["val_accuracy"], entry["test_accuracy"]] / counts.sum())


def found_by(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A row per task and position: mean test accuracy over the seeds by recipe and rate, and at the rate that is best
    on validation images; `reuse` is the all-Reuse network at its best rate."""
    rows = []
    for task, position in dict.fromkeys((e["task"], e["position"]) for e in entries if e["event"] == "learned"):
        own = [e for e in entries if (e.get("task"), e.get("position")) == (task, position)]
        recipes = dict.fromkeys(e["recipe"] for e in own if e["event"] == "learned")
        row: dict[str, Any] = {"task": task, "position": position, "recipes": {}}
        for recipe in recipes:
            row["recipes"][recipe] = _by_rate([e for e in own if e.get("recipe") == recipe])
        row["reuse"] = _by_rate([e for e in own if e["event"] == "reuse"])
        rows.append(row)
    return rows


def _by_rate(entries: Sequence[Entry]) -> dict[str, Any]:
    """Test accuracy of each seed by rate, and the rate with the best mean on validation images; a network that could
    not be trained counts as 0."""
    own: dict[str, list[Entry]] = {}
    for entry in entries:
        own.setdefault(f"{entry['rate']:g}", []).append(entry)
    val = {rate: float(np.mean([entry["val_accuracy"] or 0 for entry in found])) for rate, found in own.items()}
    return {
        "best_rate": max(val, key=lambda rate: val[rate], default=None),
        "test": {rate: {str(e["seed"]): e["test_accuracy"] or 0.0 for e in found} for rate, found in own.items()},
    }


def gain(rows: Sequence[Mapping[str, Any]], recipe: str, other: str, rate: str | None) -> dict[str, Any] | None:
    """Points that a recipe is ahead of another at a rate, or each at its best (None): mean over tasks of the means over
    their common seeds, with the 95 % interval of a bootstrap over tasks and seeds."""
    differences = []
    for row in rows:
        if not {recipe, other} <= row["recipes"].keys():
            continue
        sides = [row["recipes"][name] for name in (recipe, other)]
        tests = [side["test"].get(side["best_rate"] if rate is None else rate, {}) for side in sides]
        if seeds := tests[0].keys() & tests[1].keys():
            differences.append(np.array([tests[0][seed] - tests[1][seed] for seed in sorted(seeds)]))
    if not differences:
        return None
    rng = np.random.default_rng(0)
    drawn = [
        np.mean([rng.choice(differences[i], len(differences[i])).mean() for i in tasks])
        for tasks in rng.integers(0, len(differences), (RESAMPLES, len(differences)))
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    value = float(np.mean([own.mean() for own in differences]))
    return {"value": value, "low": float(low), "high": float(high), "num": len(differences)}


def costs(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Means by recipe over what all recipes learned: forward passes, seconds by phase, FLOPs and parameters added."""
    learned = [entry for entry in entries if entry["event"] == "learned" and entry["genome"] is not None]
    recipes = dict.fromkeys(entry["recipe"] for entry in learned)
    by_place: dict[tuple[Any, ...], dict[str, Entry]] = {}
    for entry in learned:
        place = tuple(entry[name] for name in ("task", "position", "rate", "seed"))
        by_place.setdefault(place, {})[entry["recipe"]] = entry
    common = [found for found in by_place.values() if found.keys() == recipes.keys()]
    means = {}
    for recipe in recipes if common else ():
        own = [found[recipe] for found in common]
        means[recipe] = {
            "num": len(own),
            **{name: float(np.mean([entry[name] for entry in own])) for name in ("passes", "flops", "params_added")},
            "seconds": {
                phase: float(np.mean([entry["seconds"].get(phase, 0.0) for entry in own]))
                for phase in dict.fromkeys(phase for entry in own for phase in entry["seconds"])
            },
        }
    return means
