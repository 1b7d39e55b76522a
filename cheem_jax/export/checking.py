"""A file's answers against the plain network's on random images, and how long it takes for one."""

import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int, UInt8

from cheem_jax.cheem.heads import FAR
from cheem_jax.core.ops import Ops, Reuse
from cheem_jax.core.routing.centroids import distances
from cheem_jax.core.routing.routers import make_router
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.export.artefact import Run
from cheem_jax.export.programs import dense_ops, stored_ops
from cheem_jax.export.subject import Subject
from cheem_jax.run.method import Backbone

TOLERANCE = 1e-4
"""Largest difference that a file may show, where logits are larger than 1 relative to the largest."""
NUM_IMAGES = 6
"""Compared at a time, so that few programs are compiled."""
NUM_CANDIDATES = 4 * NUM_IMAGES
NUM_TIMED = 5


class Checked(NamedTuple):
    """What a file's answers were found to be worth."""

    largest_difference: float
    """Over logits and distances."""
    tasks: tuple[int, ...]
    """The tasks whose networks answered."""


def check(subject: Subject, index: int | None, run: Run) -> Checked:
    """The file's answers to random images, together and one alone; RuntimeError where they are not ours."""
    wanted = _Wanted(subject, index)
    found = [wanted.difference(run(images)) for images in (wanted.images, wanted.images[:1])]
    largest = max(found)
    if not largest <= TOLERANCE * max(1.0, wanted.scale):
        raise RuntimeError(
            f"the exported function differs from the network by {largest:.3g} (logits up to {wanted.scale:.3g}); "
            "nothing was written"
        )
    return Checked(largest, tuple(sorted(wanted.logits)))


def seconds_per_image(run: Run, image_size: int) -> float:
    """The median of a few calls with one image, after one that is not counted."""
    image, times = random_pictures(image_size, 1), []
    run(image)
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        run(image)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def random_pictures(image_size: int, num: int) -> UInt8[np.ndarray, "N S S 3"]:
    """Coloured squares, from one over the whole picture to one per pixel: features differ more than those of noise."""
    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(num):
        squares = 2 ** rng.integers(0, image_size.bit_length())
        place = np.arange(image_size) * squares // image_size
        pictures.append(rng.integers(0, 256, (squares, squares, 3), dtype=np.uint8)[place][:, place])
    return np.stack(pictures)


class _Wanted:
    """What the plain network with ops and the router with SciPy say, nothing of what the programs are made of.

    A task's file holds merged experts, so low-rank pairs run here, and the other way round for the memory's.
    """

    def __init__(self, subject: Subject, index: int | None):
        self.subject, self.index = subject, index
        graphdef, self.state = nnx.split(subject.vit)

        def features(state, ops, images):
            return nnx.merge(graphdef, state)(images, ops, placement=subject.placement)

        self._features = jax.jit(features)
        self.logits = dict[int, np.ndarray]()
        """Of the tasks that answered."""
        size = subject.vit.config.image_size
        if index is not None:
            self.images = random_pictures(size, NUM_IMAGES)
            return
        pictures, places = random_pictures(size, NUM_CANDIDATES), [task.place for task in subject.tasks]
        seen = self._seen(pictures)
        self.distance = make_router(subject.router).follow(places).distances(seen)
        self.own = distances(seen, [place.centroids for place in places], subject.router)
        # a Mahalanobis distance may be thousands: errors are relative to a task's largest, and excuse no logit
        self.far = np.maximum(np.abs(self.distance).max(axis=0), 1)
        # one for each task that they lead to, then whichever
        _, first = np.unique(self._tasks(), return_index=True)
        rows = [*first, *(i for i in range(len(pictures)) if i not in first)][:NUM_IMAGES]
        self.images, self.distance, self.own = pictures[rows], self.distance[rows], self.own[rows]

    @property
    def scale(self) -> float:
        """The largest logit."""
        return max([0.0, *map(_largest, self.logits.values())])

    def difference(self, found: dict[str, np.ndarray]) -> float:
        """The largest one between these answers to the first images and what is wanted."""
        logits = found["logits"]
        if self.index is not None:
            return _largest(logits - self._logits(self.index)[: len(logits)])
        tasks = found["task"]
        apart = (found["distance"] - self.distance[: len(logits)]) / self.far
        differences = [_largest(apart), self._regret(tasks)]
        for task in np.unique(tasks):
            rows = np.flatnonzero(tasks == task)
            num = 0 if task < 0 else len(self.subject.tasks[task].classes)
            differences.append(_largest(logits[rows, num:] / FAR - 1))
            if task >= 0:
                differences.append(_largest(logits[rows, :num] - self._logits(int(task))[rows]))
        return max(differences)

    def _of(self, ops: Ops, images: np.ndarray) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            return np.asarray(self._features(self.state, ops, images))

    def _seen(self, images: np.ndarray) -> Float[np.ndarray, "B E"]:
        """What the router reads of the backbone."""
        subject = self.subject
        if subject.router.features == "last":
            base = [Reuse(block.expert(subject.placement)) for block in subject.vit.blocks]
            return np.concatenate([self._of(base, some) for some in np.split(images, len(images) // NUM_IMAGES)])
        executor = make_executor(
            subject.vit, subject.placement, EngineConfig(executor="stages"), batch_size=NUM_IMAGES
        )  # fmt: skip
        return Backbone(executor, subject.router).features(images, batch_size=NUM_IMAGES)

    def _logits(self, task: int) -> np.ndarray:
        if task not in self.logits:
            head = self.subject.tasks[task].head
            ops = dense_ops(self.subject, task) if self.index is None else stored_ops(self.subject)[task]
            self.logits[task] = self._of(ops, self.images) @ np.asarray(head.weight) + np.asarray(head.bias)
        return self.logits[task]

    def _thresholds(self) -> np.ndarray:
        return np.asarray(self.subject.thresholds or [np.inf] * len(self.subject.tasks))

    def _tasks(self) -> Int[np.ndarray, "B"]:
        nearest = self.distance.argmin(axis=1)
        own = self.own[np.arange(len(nearest)), nearest]
        return np.where(own <= self._thresholds()[nearest], nearest, -1)

    def _regret(self, tasks: Int[np.ndarray, "B"]) -> float:
        """How much too far the named tasks are; a tie or a threshold that rounding decides costs next to nothing."""
        distance, images = self.distance[: len(tasks)], np.arange(len(tasks))
        nearest, least = distance.argmin(axis=1), distance.min(axis=1)
        farther = np.where(tasks < 0, 0.0, (distance[images, tasks] - least) / self.far[tasks])
        beyond = self.own[images, nearest] - self._thresholds()[nearest]
        crossed = np.where(tasks < 0, np.maximum(-beyond, 0.0), np.maximum(beyond, 0.0))
        return float((farther + crossed).max())


def _largest(values: np.ndarray) -> float:
    """The largest absolute value; inf where one is no number."""
    if not values.size:
        return 0.0
    return float(np.abs(values).max()) if np.isfinite(values).all() else float("inf")
