"""What the frozen backbone's one pass says of every image: read once, for all routers."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.routing.config import RouterConfig
from cheem_jax.core.routing.statistics import joined
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import features_on_the_way
from cheem_jax.run.method import base_network

SPLITS = ("train", "val", "test")
Seen = Mapping[str, Sequence[Float[np.ndarray, "N D"]]]
"""By split: mean patch tokens at each quarter of the depth, and behind them the last CLS token."""


def seen_of(task: Task, executor: Executor, file: Path, batch_size: int, tell: Callable[[str], object]) -> Seen:
    """What is kept in `file`, or computed and kept there, so that a study which was stopped goes on."""
    if file.exists():
        with np.load(file, allow_pickle=False) as held:
            return {split: [held[name] for name in sorted(held) if name.startswith(split)] for split in SPLITS}
    tell(f"{task.name}: what the backbone says of its images")
    depth, base = executor.num_blocks, base_network(executor)
    blocks = RouterConfig(features="levels").blocks(depth)
    found = {}
    for split in SPLITS:
        images = task.splits[split].images
        found[split] = features_on_the_way(
            executor, base, HostImages(executor, images), num=len(images), blocks=blocks, until=depth,
            batch_size=batch_size,
        )  # fmt: skip
    stream = io.BytesIO()
    arrays = {f"{split}-{index}": part for split, parts in found.items() for index, part in enumerate(parts)}
    np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, stream.getvalue())
    return found


def features_of(seen: Seen, split: str, config: RouterConfig) -> Float[np.ndarray, "N E"]:
    """What a router reads of a split."""
    *patches, last = seen[split]
    parts = {"last": [last], "early": patches[:-1], "levels": [*patches, last]}[config.features]
    return joined(parts)
