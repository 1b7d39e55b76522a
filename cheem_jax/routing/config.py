"""Which statistics name the task of an image, and what of the frozen backbone they are of."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

Metric = Literal["l1", "l2", "cosine"]
Kind = Literal["kmeans", "class_means", "lda", "gaussian", "ridge"]
Reads = Literal["last", "early", "levels"]
SMALLEST = 1e-6
"""Of what keeps a matrix invertible."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How the task of an image is named; without an image kept, and without a pass beside the backbone's."""

    kind: Kind = "kmeans"
    """What a task keeps: `kmeans` centroids (S-Prompts, the paper), `class_means`, these under one covariance for all
    tasks (`lda`) or one for each (`gaussian`), or sums for a `ridge` regression on tasks behind random features."""
    features: Reads = "last"
    """What they are of: the `last` class token (the paper); `early`: mean patch tokens at a quarter and at half of the
    depth, where the backbone's pass then ends; `levels`: those at each quarter, and the last class token."""
    num_centroids: int = 5
    """Centroids per task of `kmeans`, K; clipped to the number of training images."""
    metric: Metric = "l1"
    """Distance between a test image's normalised feature and a centroid or class mean."""
    shrinkage: float = 0.01
    """Share of a multiple of the identity in the covariances of `lda` and `gaussian`."""
    projections: int = 1000
    """Random features of `ridge`."""
    penalty: float = 0.01
    """Penalty of `ridge`, in means of its Gram matrix's diagonal."""

    def __post_init__(self) -> None:
        if self.num_centroids < 1:
            raise ValueError(f"num_centroids is {self.num_centroids}; a task needs at least 1 centroid")
        if self.projections < 1:
            raise ValueError(f"projections is {self.projections}; expected at least 1 random feature")
        # below it rounding decides whether a matrix has an inverse
        if not SMALLEST <= self.shrinkage <= 1:
            raise ValueError(f"shrinkage is {self.shrinkage}; expected a share from {SMALLEST:g} to 1")
        if not self.penalty >= SMALLEST:
            raise ValueError(f"penalty is {self.penalty}; expected at least {SMALLEST:g}")

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks at whose tokens the mean patch token is read, for a backbone of so many blocks.

        These are the tokens that every choice at a block shares; of the last block only the class token is there.
        """
        quarters = {"last": (), "early": (1, 2), "levels": (1, 2, 3)}[self.features]
        if quarters and depth < 3:
            raise ValueError(f"router features {self.features!r} need a backbone of at least 3 blocks, not {depth}")
        return tuple(sorted({min(depth * quarter // 4, depth - 2) for quarter in quarters}))

    def until(self, depth: int) -> int:
        """The block where the backbone's pass ends: L where its last class token is read."""
        return depth if self.features != "early" else self.blocks(depth)[-1]

    def num_parts(self, depth: int) -> int:
        """Tokens that are read."""
        return len(self.blocks(depth)) + (self.features != "early")


PAPER = RouterConfig()
"""S-Prompts' router, which the paper adopts."""


class Place(NamedTuple):
    """Where a task lies among features, and all that is kept for its naming; later tasks change nothing of it."""

    centroids: Float[np.ndarray, "K E"]
    """Of k-means, or the class means."""
    moments: Mapping[str, np.ndarray] = {}
    """What else a kind keeps; symmetric matrices by their upper triangles."""
