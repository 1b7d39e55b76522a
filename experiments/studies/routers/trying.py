"""Routers that are fitted to features of the frozen backbone."""

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.routing import Reads, Router, RouterConfig, fit_statistics, join_tokens
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import intermediate_features
from cheem_jax.run.method import base_network

SPLITS = ("train", "val", "test")
Features = Mapping[str, Sequence[Float[np.ndarray, "N D"]]]
"""Mean patch tokens at each quarter of the depth and the last CLS token, keyed by split."""


def features_of_task(
    task: Task, executor: Executor, file: Path, batch_size: int, say: Callable[[str], object]
) -> Features:
    """Read the features of a task's images from `file`, or compute and write them."""
    if not file.exists():
        say(f"features of {task.name}")
        arrays = {}
        for split in SPLITS:
            images = task.splits[split].images
            parts = intermediate_features(
                executor,
                base_network(executor),
                HostImages(executor, images),
                num=len(images),
                blocks=RouterConfig(features="levels").blocks(executor.num_blocks),
                until=executor.num_blocks,
                batch_size=batch_size,
            )
            arrays |= {f"{split}-{index}": part for index, part in enumerate(parts)}
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, stream.getvalue())
    with np.load(file, allow_pickle=False) as arrays:
        return {
            split: [arrays[name] for name in sorted(arrays) if name.startswith(split)]
            for split in SPLITS
        }


def read_features(features: Features, split: str, config: RouterConfig) -> Float[np.ndarray, "N E"]:
    """Return the features of a split that are the router's input."""
    *patches, last = features[split]
    parts = {"last": [last], "early": patches[:-1], "levels": [*patches, last]}[config.features]
    return join_tokens(parts)


class Trial(NamedTuple):
    """One router over all tasks of a stream."""

    inferred: dict[str, list[Int[np.ndarray, "_"]]]
    """The inferred task of each image, keyed by split, with one item per true task."""
    bytes_per_task: float
    """Size of the router in bytes, as a mean over tasks."""
    seconds_per_task: float
    """Time to fit a task's statistics, as a mean over tasks."""
    microseconds_per_image: float
    """Time to infer the task of an image from its features if all images are in one call."""


def candidates() -> Iterator[RouterConfig]:
    """Yield the compared routers; the first is the paper's router."""
    reads: tuple[Reads, ...] = ("last", "early", "levels")
    for features in reads:
        yield RouterConfig(features=features)
        yield RouterConfig(features=features, num_centroids=20)
        for shrinkage in (0.001, 0.01, 0.1):
            yield RouterConfig("lda", features, shrinkage=shrinkage)


def title_of(config: RouterConfig) -> str:
    """Describe the kind and the main setting of a router."""
    if config.kind == "lda":
        return f"LDA, shrinkage {config.shrinkage:g}"
    return f"k-means, {config.num_centroids} centroids, l1"


def attempt(
    config: RouterConfig, tasks: Sequence[Features], labels: Sequence[np.ndarray], keys: Keys
) -> Trial:
    """Fit the statistics of all tasks and infer the tasks of all images."""
    start = time.perf_counter()
    statistics = []
    for index, (features, classes) in enumerate(zip(tasks, labels, strict=True)):
        seed = keys.seed_at(index, Phase.CENTROIDS)
        train = read_features(features, "train", config)
        statistics.append(fit_statistics(train, classes, config, seed=seed))
    fitted = time.perf_counter()
    router = Router(config, tuple(statistics))
    inferred = {
        split: [router.route(read_features(features, split, config)) for features in tasks]
        for split in ("val", "test")
    }
    routing = time.perf_counter() - fitted
    sizes = [
        sum(array.nbytes for array in (one.centroids, *one.moments.values())) for one in statistics
    ]
    num_images = sum(len(images) for split in inferred.values() for images in split)
    return Trial(
        inferred,
        float(np.mean(sizes)),
        (fitted - start) / len(tasks),
        1e6 * routing / num_images,
    )
