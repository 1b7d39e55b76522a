"""A file's answers against the plain network's on random images, and how long it takes for one."""

import statistics
import time

import jax
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from cheem_jax.cheem.heads import FAR
from cheem_jax.core.routing import distances, make_router
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.export.programs import Run, Subject, dense_ops, stored_ops
from cheem_jax.run.method import Backbone

TOLERANCE = 1e-4
"""Largest difference that a file may show, where logits are larger than 1 relative to the largest."""
NUM_IMAGES = 6
"""Compared at a time, so that few functions are compiled."""
NUM_CANDIDATES = 4 * NUM_IMAGES
NUM_TIMED = 5


def check(subject: Subject, index: int | None, run: Run) -> tuple[float, set[int]]:
    """The largest difference between a file's answers to random images and ours, and the tasks that were compared.

    Images are given together and one alone; RuntimeError where the difference is too large. Our answers are those of
    the plain network with ops and of the router with SciPy, which no file is made of. A task's file has merged experts,
    so low-rank pairs run here, and the other way round for the memory's.
    """
    graphdef, state = nnx.split(subject.vit)
    features = jax.jit(lambda state, ops, images: nnx.merge(graphdef, state)(images, ops, placement=subject.placement))
    routing = None if index is not None else _Routing(subject)
    images = random_images(subject.vit.config.image_size, NUM_IMAGES) if routing is None else routing.images
    logits, differences = {-1: np.zeros((len(images), 0))}, list[float]()
    for part in (images, images[:1]):
        found = run(part)
        tasks = np.full(len(part), index) if routing is None else found["task"]
        differences += [] if routing is None else [routing.difference(tasks, found["distance"])]
        for row, task in enumerate(tasks.tolist()):
            if task not in logits:
                head = subject.tasks[task].head
                ops = stored_ops(subject)[task] if routing is None else dense_ops(subject, task)
                with jax.default_matmul_precision("highest"):
                    seen = np.asarray(features(state, ops, images))
                logits[task] = seen @ np.asarray(head.weight) + np.asarray(head.bias)
            wanted, own = logits[task][row], found["logits"][row]
            differences += [_largest(own[: len(wanted)] - wanted), _largest(own[len(wanted) :] / FAR - 1)]
    largest, scale = max(differences), max(map(_largest, logits.values()))
    if not largest <= TOLERANCE * max(1.0, scale):
        raise RuntimeError(
            f"the exported file differs from the network by {largest:.3g} (logits up to {scale:.3g}); nothing was "
            "written"
        )
    return largest, set(logits) - {-1}


def seconds_per_image(run: Run, image_size: int) -> float:
    """The median of a few calls with one image, after one that is not counted."""
    image, times = random_images(image_size, 1), []
    run(image)
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        run(image)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def random_images(image_size: int, num: int) -> UInt8[np.ndarray, "N S S 3"]:
    """Coloured squares, from one over the whole image to one per pixel: features differ more than those of noise."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(num):
        squares = 2 ** rng.integers(0, image_size.bit_length())
        place = np.arange(image_size) * squares // image_size
        images.append(rng.integers(0, 256, (squares, squares, 3), dtype=np.uint8)[place][:, place])
    return np.stack(images)


class _Routing:
    """Random images for as many tasks as possible, and how far the router itself finds each task from them."""

    def __init__(self, subject: Subject):
        candidates = random_images(subject.vit.config.image_size, NUM_CANDIDATES)
        engine, places = EngineConfig(executor="stages"), [task.place for task in subject.tasks]
        executor = make_executor(subject.vit, subject.placement, engine, batch_size=NUM_IMAGES)
        with jax.default_matmul_precision("highest"):
            seen = Backbone(executor, subject.router).features(candidates, batch_size=NUM_IMAGES)
        distance = make_router(subject.router).follow(places).distances(seen)
        nearest = distance.argmin(axis=1)
        own = distances(seen, [place.centroids for place in places], subject.router)[np.arange(len(seen)), nearest]
        beyond = own - np.asarray(subject.thresholds or [np.inf] * len(places))[nearest]
        # one for each task that they lead to, then any others
        _, first = np.unique(np.where(beyond <= 0, nearest, -1), return_index=True)
        rows = [*first, *(row for row in range(len(candidates)) if row not in first)][:NUM_IMAGES]
        self.images, self.distance, self.nearest = candidates[rows], distance[rows], nearest[rows]
        self.beyond = beyond[rows]
        """How much farther the nearest task is than its threshold."""
        # a Mahalanobis distance may be thousands: errors are relative to a task's largest
        self.far = np.maximum(np.abs(distance).max(axis=0), 1)

    def difference(self, tasks: np.ndarray, found: np.ndarray) -> float:
        """The largest one in the distances to the first images, and how much too far the chosen tasks are.

        A tie or a threshold that rounding decides costs next to nothing.
        """
        images = np.arange(len(tasks))
        distance, nearest, beyond = self.distance[images], self.nearest[images], self.beyond[images]
        farther = (distance[images, tasks] - distance[images, nearest]) / self.far[tasks]
        regret = np.where(tasks < 0, np.maximum(-beyond, 0), farther + np.maximum(beyond, 0))
        return max(_largest((found - distance) / self.far), _largest(regret))


def _largest(values: np.ndarray) -> float:
    """The largest absolute value; inf where one is NaN or infinite."""
    if not values.size:
        return 0.0
    return float(np.abs(values).max()) if np.isfinite(values).all() else float("inf")
