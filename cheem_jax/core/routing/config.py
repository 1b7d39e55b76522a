"""Settings of the router: which statistics infer the task ID of an image, and which frozen features they are of."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

Metric = Literal["l1", "l2", "cosine"]
Kind = Literal["kmeans", "class_means", "lda", "gaussian", "ridge"]
Reads = Literal["last", "early", "levels"]
SMALLEST = 1e-6
"""Smallest regularisation: below it rounding decides whether a matrix is invertible."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How the task ID of an image is inferred: exemplar-free, and from the backbone's own pass."""

    kind: Kind = "kmeans"
    """What a task stores: `kmeans` centroids (S-Prompts, the paper), `class_means`, these with one covariance for all
    tasks (`lda`) or one per task (`gaussian`), or sums for a `ridge` regression of task IDs on random features."""
    features: Reads = "last"
    """Features that the router reads: the `last` CLS token (the paper) or what pools the tokens; `early`: mean patch
    tokens at a quarter and at half of the depth, where the router's pass then ends; `levels`: those at each
    quarter, and the last CLS token."""
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
        if not SMALLEST <= self.shrinkage <= 1:
            raise ValueError(f"shrinkage is {self.shrinkage}; expected a share from {SMALLEST:g} to 1")
        if not self.penalty >= SMALLEST:
            raise ValueError(f"penalty is {self.penalty}; expected at least {SMALLEST:g}")

    def blocks(self, depth: int) -> tuple[int, ...]:
        """The blocks at which the mean patch token is read, for a backbone of `depth` blocks.

        It is the mean of the tokens that every choice at a block shares. The last block has the CLS token alone.
        Raises ValueError if the backbone has too few blocks.
        """
        quarters = {"last": (), "early": (1, 2), "levels": (1, 2, 3)}[self.features]
        if quarters and depth < 3:
            raise ValueError(f"router features {self.features!r} need a backbone of at least 3 blocks, not {depth}")
        return tuple(sorted({min(depth * quarter // 4, depth - 2) for quarter in quarters}))

    def until(self, depth: int) -> int:
        """The block where the router's pass ends: L if the last CLS token is read."""
        return depth if self.features != "early" else self.blocks(depth)[-1]

    def num_parts(self, depth: int) -> int:
        """The number of tokens that are read, each of the backbone's width."""
        return len(self.blocks(depth)) + (self.features != "early")


PAPER = RouterConfig()
"""S-Prompts' router, which the paper adopts."""


class TaskStatistics(NamedTuple):
    """All that the router stores of a task; later tasks do not change it."""

    centroids: Float[np.ndarray, "K E"]
    """The centroids of k-means, or the class means."""
    moments: Mapping[str, np.ndarray] = {}
    """Other arrays of some kinds, by name; symmetric matrices by their upper triangles."""
