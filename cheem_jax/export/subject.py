"""What is exported: a frozen backbone, the pool on top of it, and the tasks that may answer; and what is made of it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cheem_jax.backbone.vit import ViT
from cheem_jax.core.ops import Placement
from cheem_jax.core.pool import Pool, TaskMemory
from cheem_jax.core.routing.config import RouterConfig

Run = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Uint8 images `[B, S, S, 3]` to the outputs by name, through what is in the file."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A memory that answers; ValueError for one that computes in another precision than float32."""

    vit: ViT
    """In float32, at the size of the images that it will be given."""
    placement: Placement
    pool: Pool
    """Expert 0 of each block is the backbone's own."""
    tasks: tuple[TaskMemory, ...]
    """In the order of the router's centroids; a head has one column per class."""
    router: RouterConfig
    thresholds: tuple[float, ...] | None = None
    """Open set: per task the largest distance to its nearest centroid that is still accepted; None is off."""

    def __post_init__(self) -> None:
        if (precision := self.vit.config.precision) != "float32":
            raise ValueError(f"the backbone computes in {precision}; open the memory with float32 (EngineConfig)")


class Artefact(NamedTuple):
    """The bytes of a file, and a function that runs them."""

    content: bytes
    run: Run
    notes: tuple[str, ...] = ()
