"""Every router that is tried on training features, and a second network for close calls."""

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import log_softmax

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.routing import Reads, RouterConfig, fit_statistics, joined, make_router
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import features_on_the_way
from cheem_jax.memory import OpenMemory
from cheem_jax.run.method import base_network

SPLITS = ("train", "val", "test")
Seen = Mapping[str, Sequence[Float[np.ndarray, "N D"]]]
"""By split: mean patch tokens at each quarter of the depth, and behind them the last CLS token."""


def kept(file: Path, compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays of an npz file, computed where there is none, so that a study that was stopped resumes."""
    if not file.exists():
        stream = io.BytesIO()
        np.savez(stream, **compute())  # pyright: ignore[reportArgumentType]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, stream.getvalue())
    with np.load(file, allow_pickle=False) as held:
        return dict(held)


def seen_of(task: Task, executor: Executor, file: Path, batch_size: int, tell: Callable[[str], object]) -> Seen:
    """What the backbone says of a task's images; kept in `file`."""

    def compute() -> dict[str, np.ndarray]:
        tell(f"{task.name}: what the backbone says of its images")
        depth, base, found = executor.num_blocks, base_network(executor), {}
        blocks = RouterConfig(features="levels").blocks(depth)
        for split in SPLITS:
            images = task.splits[split].images
            parts = features_on_the_way(
                executor, base, HostImages(executor, images), num=len(images), blocks=blocks, until=depth,
                batch_size=batch_size,
            )  # fmt: skip
            found |= {f"{split}-{index}": part for index, part in enumerate(parts)}
        return found

    held = kept(file, compute)
    return {split: [held[name] for name in sorted(held) if name.startswith(split)] for split in SPLITS}


def features_of(seen: Seen, split: str, config: RouterConfig) -> Float[np.ndarray, "N E"]:
    """What a router reads of a split."""
    *patches, last = seen[split]
    parts = {"last": [last], "early": patches[:-1], "levels": [*patches, last]}[config.features]
    return joined(parts)


PAPER = RouterConfig()


class Tried(NamedTuple):
    """One router over all tasks of a stream."""

    named: dict[str, list[Int[np.ndarray, "_"]]]
    """By split and true task: the task that each image is said to be of."""
    bytes_per_task: float
    """Kept of a task, mean over tasks."""
    seconds_per_task: float
    """To make the statistics of a task from its features, and the router again with it, mean over tasks."""
    microseconds_per_image: float
    """To infer the task of an image whose features are there, one core, all together."""


def candidates() -> Iterator[RouterConfig]:
    """What is compared; the paper's first."""
    reads: tuple[Reads, ...] = ("last", "early", "levels")
    for features in reads:
        yield RouterConfig(features=features)
        yield RouterConfig(features=features, num_centroids=20)
        yield RouterConfig("class_means", features, metric="l2")
        for shrinkage in (0.001, 0.01, 0.1):
            yield RouterConfig("lda", features, shrinkage=shrinkage)
        for shrinkage in (0.1, 0.3):
            yield RouterConfig("gaussian", features, shrinkage=shrinkage)
        for projections in (1000, 2000):
            yield RouterConfig("ridge", features, projections=projections)


def title_of(config: RouterConfig) -> str:
    """Kind and what matters to it."""
    told = {
        "kmeans": f"k-means, {config.num_centroids} centroids, {config.metric}",
        "class_means": f"class means, {config.metric}",
        "lda": f"LDA, shrinkage {config.shrinkage:g}",
        "gaussian": f"Gaussian per task, shrinkage {config.shrinkage:g}",
        "ridge": f"ridge, {config.projections:,} random features",
    }
    return told[config.kind]


def attempt(config: RouterConfig, tasks: Sequence[Seen], labels: Sequence[np.ndarray], keys: Keys) -> Tried:
    """Make the router task by task, as a stream does, and ask it at the end."""
    places, router, start = [], make_router(config), time.perf_counter()
    for index, (seen, own) in enumerate(zip(tasks, labels, strict=True)):
        seed = keys.seed_at(index, Phase.CENTROIDS)
        places.append(fit_statistics(features_of(seen, "train", config), own, config, seed=seed))
        router.follow(places)
    fitted = time.perf_counter()
    named = {split: [router.route(features_of(seen, split, config)) for seen in tasks] for split in ("val", "test")}
    asked = time.perf_counter() - fitted
    kept = [sum(array.nbytes for array in (place.centroids, *place.moments.values())) for place in places]
    num_images = sum(len(one) for split in named.values() for one in split)
    return Tried(named, float(np.mean(kept)), (fitted - start) / len(tasks), 1e6 * asked / num_images)


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

    def compute() -> dict[str, np.ndarray]:
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
            looked = Looked(truth, labels, nearest, ordered[:, 1] - ordered[:, 0], confidence, classes)
            found |= {f"{split}-{name}": values for name, values in looked._asdict().items()}
        return found

    held = kept(file, compute)
    return {split: Looked(**{name: held[f"{split}-{name}"] for name in Looked._fields}) for split in ("val", "test")}


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
