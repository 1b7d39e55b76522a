"""A second network for close calls: router and heads decide together between the two nearest tasks."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import log_softmax

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.routing.config import RouterConfig
from cheem_jax.core.routing.routers import make_router
from cheem_jax.core.routing.statistics import fit_statistics
from cheem_jax.data.task import Task
from cheem_jax.memory import OpenMemory
from studies.routers.seen import Seen, features_of

SHARES = (0.05, 0.1, 0.2, 0.4)
"""Of images that get a second network: those whose two nearest tasks are closest to each other."""
WEIGHTS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Of the router's lead, in medians of it, against the heads' log-confidence."""


class Looked(NamedTuple):
    """The two nearest tasks of each image of a split, and what their networks say."""

    truth: Int[np.ndarray, "N"]
    labels: Int[np.ndarray, "N"]
    tasks: Int[np.ndarray, "N 2"]
    lead: Float[np.ndarray, "N"]
    """How much nearer the first is."""
    confidence: Float[np.ndarray, "N 2"]
    """Logarithm of the largest probability."""
    classes: Int[np.ndarray, "N 2"]


def look(
    memory: OpenMemory,
    tasks: Sequence[Task],
    seen: Sequence[Seen],
    config: RouterConfig,
    keys: Keys,
    file: Path,
    tell: Callable[[str], object],
) -> dict[str, Looked]:
    """Both networks of every validation and test image; kept in `file`."""
    if file.exists():
        with np.load(file, allow_pickle=False) as held:
            return {
                split: Looked(**{name: held[f"{split}-{name}"] for name in Looked._fields}) for split in ("val", "test")
            }
    places = [
        fit_statistics(
            features_of(own, "train", config), task.train.labels, config, seed=keys.seed_at(i, Phase.CENTROIDS)
        )
        for i, (own, task) in enumerate(zip(seen, tasks, strict=True))
    ]
    router, found = make_router(config).follow(places), {}
    for split in ("val", "test"):
        away = np.concatenate([router.distances(features_of(own, split, config)) for own in seen])
        nearest = np.argsort(away, axis=1, kind="stable")[:, :2].astype(np.int32)
        ordered = np.take_along_axis(away, nearest, axis=1)
        splits = [task.splits[split] for task in tasks]
        truth = np.repeat(np.arange(len(tasks)), [len(one.labels) for one in splits])
        images = np.concatenate([one.images[:] for one in splits])
        confidence, classes = np.zeros(nearest.shape), np.zeros(nearest.shape, np.int32)
        for index, task in enumerate(tasks):
            tell(f"{task.name}: its network on the {split} images that are near it")
            rows, places_of = np.nonzero(nearest == index)
            logits = memory.predictor(task=task.name).answer(images[rows]).logits
            confidence[rows, places_of] = [log_softmax(own.astype(np.float64)).max() for own in logits]
            classes[rows, places_of] = [own.argmax() for own in logits]
        labels = np.concatenate([one.labels for one in splits])
        found[split] = Looked(truth, labels, nearest, ordered[:, 1] - ordered[:, 0], confidence, classes)
    stream = io.BytesIO()
    arrays = {f"{split}-{name}": values for split, own in found.items() for name, values in own._asdict().items()}
    np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]
    write_atomically(file, stream.getvalue())
    return found


def decide(looked: Looked, closest: float, scale: float, weight: float) -> tuple[Bool[np.ndarray, "N"], float]:
    """Which images are answered rightly, and the share that got a second network."""
    close = looked.lead < closest
    lead = looked.confidence[:, 1] - looked.confidence[:, 0]
    chosen = (close & (lead > weight * looked.lead / scale)).astype(int)[:, None]
    task, label = (np.take_along_axis(values, chosen, axis=1)[:, 0] for values in (looked.tasks, looked.classes))
    return (task == looked.truth) & (label == looked.labels), float(close.mean())


def by_task(looked: Looked, right: Bool[np.ndarray, "N"]) -> list[Bool[np.ndarray, "_"]]:
    """Apart by true task."""
    return [right[looked.truth == task] for task in range(int(looked.truth.max()) + 1)]


def tuned(looked: dict[str, Looked]) -> dict[str, Any]:
    """For each share of second networks the weight that is best on validation, and what it gives on test."""
    val, test = looked["val"], looked["test"]
    scale, rows = float(np.median(val.lead)), []
    for share in SHARES:
        closest = float(np.quantile(val.lead, share))

        def mean(weight: float, closest: float = closest) -> float:
            right, _ = decide(val, closest, scale, weight)
            return float(np.mean([own.mean() for own in by_task(val, right)]))

        weight = max(WEIGHTS, key=lambda w: (mean(w), w))
        right, second = decide(test, closest, scale, weight)
        rows.append({
            "share": share, "weight": weight, "validation": mean(weight), "second": second,
            "right": by_task(test, right),
        })  # fmt: skip
    return {"rows": rows, "alone": by_task(test, decide(test, 0.0, scale, 1.0)[0])}
