"""Every router that is tried on training features."""

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.routing import Reads, RouterConfig, fit_statistics, joined, make_router
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import intermediate_features
from cheem_jax.run.method import base_network

SPLITS = ("train", "val", "test")
Seen = Mapping[str, Sequence[Float[np.ndarray, "N D"]]]
"""By split: mean patch tokens at each quarter of the depth, and behind them the last CLS token."""


def kept(file: Path, compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays of an npz file, computed where there is none, so that a study that was stopped
    resumes."""
    if not file.exists():
        stream = io.BytesIO()
        np.savez(stream, **compute())  # pyright: ignore[reportArgumentType]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, stream.getvalue())
    with np.load(file, allow_pickle=False) as held:
        return dict(held)


def seen_of(
    task: Task, executor: Executor, file: Path, batch_size: int, tell: Callable[[str], object]
) -> Seen:
    """What the backbone says of a task's images; kept in `file`."""

    def compute() -> dict[str, np.ndarray]:
        tell(f"{task.name}: what the backbone says of its images")
        depth = executor.num_blocks
        base = base_network(executor)
        found = {}
        blocks = RouterConfig(features="levels").blocks(depth)
        for split in SPLITS:
            images = task.splits[split].images
            parts = intermediate_features(
                executor,
                base,
                HostImages(executor, images),
                num=len(images),
                blocks=blocks,
                until=depth,
                batch_size=batch_size,
            )
            found |= {f"{split}-{index}": part for index, part in enumerate(parts)}
        return found

    held = kept(file, compute)
    return {
        split: [held[name] for name in sorted(held) if name.startswith(split)] for split in SPLITS
    }


def features_of(seen: Seen, split: str, config: RouterConfig) -> Float[np.ndarray, "N E"]:
    """What a router reads of a split."""
    *patches, last = seen[split]
    parts = {"last": [last], "early": patches[:-1], "levels": [*patches, last]}[config.features]
    return joined(parts)


PAPER = RouterConfig()


class Tried(NamedTuple):
    """One router over all tasks of a stream."""

    named: dict[str, list[Int[np.ndarray, "_"]]]
    """By split and true task: the task that is inferred for each image."""
    bytes_per_task: float
    """Kept of a task, mean over tasks."""
    seconds_per_task: float
    """To make the statistics of a task from its features, and the router again with it, mean over
    tasks."""
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


def attempt(
    config: RouterConfig, tasks: Sequence[Seen], labels: Sequence[np.ndarray], keys: Keys
) -> Tried:
    """Make the router task by task, as a stream does, and ask it at the end."""
    places = []
    router = make_router(config)
    start = time.perf_counter()
    for index, (seen, own) in enumerate(zip(tasks, labels, strict=True)):
        seed = keys.seed_at(index, Phase.CENTROIDS)
        places.append(fit_statistics(features_of(seen, "train", config), own, config, seed=seed))
        router.follow(places)
    fitted = time.perf_counter()
    named = {
        split: [router.route(features_of(seen, split, config)) for seen in tasks]
        for split in ("val", "test")
    }
    asked = time.perf_counter() - fitted
    kept = [
        sum(array.nbytes for array in (place.centroids, *place.moments.values()))
        for place in places
    ]
    num_images = sum(len(one) for split in named.values() for one in split)
    return Tried(
        named, float(np.mean(kept)), (fitted - start) / len(tasks), 1e6 * asked / num_images
    )
