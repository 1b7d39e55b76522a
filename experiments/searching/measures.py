"""What the record of a study says: how the supernet ranks, and what each search costs and finds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.stats import kendalltau, spearmanr
from searching.units import VARIANTS, Entry

RESAMPLES = 2000
MEASURES = ("supernet_accuracy", "candidate_images", "flops", "flops_resumed", "val_accuracy", "test_accuracy")
CORRELATIONS: dict[str, Callable[..., Any]] = {"spearman": spearmanr, "kendall": kendalltau}


class Points(NamedTuple):
    """The drawn architectures of a task that were retrained, accuracies in [0, 1]."""

    supernet: Float[np.ndarray, "P"]
    val: Float[np.ndarray, "P"]
    test: Float[np.ndarray, "P"]


def points_of(entries: Sequence[Entry], task: str) -> Points:
    """Supernet accuracy and accuracies after retraining, of those drawn architectures that have all three."""
    retrained = _retrained(entries, task)
    found = []
    for entry in entries:
        if (entry["event"], entry.get("task")) == ("drawn", task):
            for genome, accuracy in zip(entry["genomes"], entry["supernet_accuracy"], strict=True):
                own = retrained.get(tuple(genome), {})
                found.append((accuracy, own.get("val_accuracy"), own.get("test_accuracy")))
    whole = [point for point in found if None not in point]
    return Points(*np.array(whole, np.float64).reshape(-1, 3).T)


def correlation(x: Float[np.ndarray, "P"], y: Float[np.ndarray, "P"], kind: str) -> dict[str, Any] | None:
    """A rank correlation with the 95 % interval of a bootstrap over architectures; None where all are equal."""

    def found(rows: np.ndarray) -> float:
        if len(rows) < 3 or not np.ptp(x[rows]) or not np.ptp(y[rows]):
            return float("nan")
        return float(CORRELATIONS[kind](x[rows], y[rows]).statistic)

    value = found(np.arange(len(x)))
    if np.isnan(value):
        return None
    rng = np.random.default_rng(0)
    resampled = [found(rng.integers(0, len(x), len(x))) for _ in range(RESAMPLES)]
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return {"value": value, "low": float(low), "high": float(high), "num": len(x)}


def correlations(entries: Sequence[Entry], task: str) -> dict[str, Any]:
    """Of the supernet's accuracy with what retraining reaches, on validation and on test images."""
    points = points_of(entries, task)
    return {
        split: {kind: correlation(points.supernet, getattr(points, split), kind) for kind in CORRELATIONS}
        for split in ("val", "test")
    }


def winners_of(entries: Sequence[Entry], task: str) -> list[Entry]:
    """Every finished search of a task with what its winner costs and reaches, where that was retrained."""
    retrained = _retrained(entries, task)
    searches = [entry for entry in entries if (entry["event"], entry.get("task")) == ("searched", task)]
    found = [
        {**retrained[tuple(entry["genome"])], **entry} for entry in searches if tuple(entry["genome"]) in retrained
    ]
    return [{key: entry[key] for key in ("task", "variant", "seed", "architecture", *MEASURES)} for entry in found]


def summary(winners: Sequence[Entry]) -> list[dict[str, Any]]:
    """A row per variant: means over tasks and seeds, and of the difference to the paper's search of the same supernet
    and seed with its standard error."""
    papers = {(entry["task"], entry["seed"]): entry for entry in winners if entry["variant"] == "paper"}
    rows = []
    for variant in VARIANTS:
        own = [entry for entry in winners if entry["variant"] == variant]
        pairs = [
            (entry, papers[entry["task"], entry["seed"]]) for entry in own if (entry["task"], entry["seed"]) in papers
        ]
        if own:
            rows.append({
                "variant": variant,
                "searches": len(own),
                **{measure: _mean([entry[measure] for entry in own]) for measure in MEASURES},
                "against_paper": {
                    measure: _spread([_difference(entry[measure], paper[measure]) for entry, paper in pairs])
                    for measure in MEASURES
                },
            })  # fmt: skip
    return rows


def _retrained(entries: Sequence[Entry], task: str) -> dict[tuple[int, ...], Entry]:
    return {
        tuple(entry["genome"]): entry for entry in entries if (entry["event"], entry.get("task")) == ("finetuned", task)
    }


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    there = np.array([value for value in values if value is not None], np.float64)
    if not there.size:
        return None
    error = float(there.std(ddof=1) / np.sqrt(there.size)) if there.size > 1 else None
    return {"mean": float(there.mean()), "standard_error": error, "num": there.size}
