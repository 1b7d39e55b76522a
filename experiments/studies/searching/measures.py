"""What the record of a study says: how the supernet ranks, and what each search costs and finds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import kendalltau, spearmanr

from studies.searching.units import PAPER, Entry

RESAMPLES = 2000
TRAINED = (1, 2, 3, 5, 10)
"""Networks that are drawn and trained, for comparison with a search."""
MEASURES = ("supernet_accuracy", "candidate_images", "flops", "flops_resumed", "val_accuracy", "test_accuracy")
PLACE = ("task", "variant", "seed")
COMPARED = {"val": ("supernet", "val"), "test": ("supernet", "test"), "retrained": ("val", "test")}
"""What is correlated with what."""
CORRELATIONS: dict[str, Callable[..., Any]] = {"spearman": spearmanr, "kendall": kendalltau}


class Points(NamedTuple):
    """The sampled architectures of a task that were retrained, accuracies in [0, 1]."""

    supernet: Float[np.ndarray, "P"]
    val: Float[np.ndarray, "P"]
    test: Float[np.ndarray, "P"]


def points_of(entries: Sequence[Entry], task: str) -> Points:
    """Supernet accuracy and accuracies after retraining, of those sampled architectures that have all three."""
    retrained = _retrained(entries, task)
    found = []
    for entry in entries:
        if (entry["event"], entry.get("task")) == ("drawn", task):
            for genome, accuracy in zip(entry["genomes"], entry["supernet_accuracy"], strict=True):
                own = retrained.get(tuple(genome), {})
                found.append((accuracy, own.get("val_accuracy"), own.get("test_accuracy")))
    whole = [point for point in found if None not in point]
    return Points(*np.array(whole, np.float64).reshape(-1, 3).T)


def correlation(*pairs: tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]], kind: str) -> dict[str, Any] | None:
    """A rank correlation, mean over the `pairs`, with the 95 % interval of a bootstrap over the architectures of each;
    None where all of a pair are equal."""

    def found(x: np.ndarray, y: np.ndarray) -> float:
        if len(x) < 3 or not np.ptp(x) or not np.ptp(y):
            return float("nan")
        return float(CORRELATIONS[kind](x, y).statistic)

    value = np.mean([found(x, y) for x, y in pairs])
    if np.isnan(value):
        return None
    rng = np.random.default_rng(0)
    drawn = [[(x[rows], y[rows]) for rows in rng.integers(0, len(x), (RESAMPLES, len(x)))] for x, y in pairs]
    low, high = np.nanquantile(np.mean([[found(*one) for one in own] for own in drawn], axis=0), (0.025, 0.975))
    return {"value": float(value), "low": float(low), "high": float(high), "num": sum(len(x) for x, _ in pairs)}


def correlations(*tasks: Points) -> dict[str, Any]:
    """Of the supernet's accuracy with what retraining reaches, on validation and on test images, mean over tasks; and
    of both after retraining, which says how well images that nobody chose by could be foretold at all."""
    return {
        name: {
            kind: correlation(*((getattr(points, x), getattr(points, y)) for points in tasks), kind=kind)
            for kind in CORRELATIONS
        }
        for name, (x, y) in COMPARED.items()
    }


def best_of(points: Points, num: int) -> float:
    """Test accuracy of that of `num` networks which is best on validation images, mean over all ways to take `num`."""
    order, total = np.argsort(-points.val, kind="stable"), len(points.val)
    ways = np.array([math.comb(total - 1 - place, num - 1) for place in range(total)])
    return float(points.test[order] @ ways / math.comb(total, num))


def without_search(points: Mapping[str, Points], num: int) -> list[dict[str, Any]]:
    """What networks reach that are drawn and trained, half by HEE and half uniformly, of tasks whose `num` were all
    retrained; a row per kind and number of networks, `trained`, of which validation images choose one."""
    whole = {task: own for task, own in points.items() if len(own.val) == num}
    halves = {"HEE": slice(0, num // 2), "uniform": slice(num // 2, num)}
    return [
        {
            "drawn": name, "trained": trained,
            "test_accuracy": {task: best_of(Points(*(v[half] for v in own)), trained) for task, own in whole.items()},
        }
        for name, half in halves.items() for trained in TRAINED if whole and trained <= num // 2
    ]  # fmt: skip


def trainings(winner: Entry, own: Mapping[str, int], epochs: Mapping[str, int]) -> float:
    """What a search costs with its supernet and its network's training, in trainings of one network; a training step
    counts three times a forward pass."""
    scoring = winner["candidate_images"] / (3 * epochs["finetune"] * own["num_train"])
    return epochs["supernet"] / epochs["finetune"] + scoring + 1


def winners_of(entries: Sequence[Entry], task: str) -> list[Entry]:
    """Every finished search of a task with what its winner costs and reaches, where that was retrained."""
    retrained = _retrained(entries, task)
    searches = [entry for entry in entries if (entry["event"], entry.get("task")) == ("searched", task)]
    found = [
        {**retrained[tuple(entry["genome"])], **entry} for entry in searches if tuple(entry["genome"]) in retrained
    ]
    return [{key: entry[key] for key in (*PLACE, "architecture", *MEASURES)} for entry in found]


def summary(winners: Sequence[Entry]) -> list[dict[str, Any]]:
    """A row of the paper's search, means over tasks and seeds; none without any."""
    own = [entry for entry in winners if entry["variant"] == PAPER]
    means = {measure: _mean([entry[measure] for entry in own]) for measure in MEASURES}
    return [{"variant": PAPER, "searches": len(own), **means}] if own else []


def _retrained(entries: Sequence[Entry], task: str) -> dict[tuple[int, ...], Entry]:
    return {
        tuple(entry["genome"]): entry for entry in entries if (entry["event"], entry.get("task")) == ("finetuned", task)
    }


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None
