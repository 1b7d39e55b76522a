"""Predict the task of an image among all tasks of a memory, and its class within that task."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from scipy.special import softmax

from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.core.architecture import to_strings
from cheem_jax.core.images import Images
from cheem_jax.core.pool import TaskMemory
from cheem_jax.core.routing import PAPER, Router, RouterConfig, rejection_scores, threshold
from cheem_jax.data.decode import decode_pieces
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import Inference
from cheem_jax.memory.data import ImageInput, NamedFiles
from cheem_jax.run.method import base_network
from cheem_jax.run.record import to_json

BATCH_SIZES = (1, 8, 32)
"""Batch sizes for which functions are compiled by default."""


class Guess(NamedTuple):
    """A class of the inferred task and its probability in [0, 1]."""

    label: str
    probability: float


class NearTask(NamedTuple):
    """A task, and the router's distance between the image and this task."""

    task: str
    distance: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for one image, which does not depend on other images."""

    task: str | None = None
    """The inferred task; None if the image belongs to no task (open set)."""
    guesses: tuple[Guess, ...] = ()
    """Classes of the inferred task by descending probability; empty without a task, and if logits
    are non-finite."""
    near: tuple[NearTask, ...] = ()
    """All tasks, sorted by ascending distance from the image."""
    blocks: tuple[str, ...] = ()
    """Op of each block of the task's network, such as `reuse:0`, `adapt:2`, `new`, `skip`."""
    error: str = ""
    """The reason why the image cannot be read; all other fields are empty then. Empty if the image
    can be read."""

    @property
    def label(self) -> str | None:
        """The most probable class; None if `guesses` is empty."""
        return self.guesses[0].label if self.guesses else None

    @property
    def probability(self) -> float | None:
        """Probability of the most probable class within its task; None if `guesses` is empty."""
        return self.guesses[0].probability if self.guesses else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        if self.error:
            return {"error": self.error}
        values = {
            "task": self.task,
            "class": self.label,
            "probability": self.probability,
            "runners_up": [
                {"class": label, "probability": probability}
                for label, probability in self.guesses[1:]
            ],
            "near": [near._asdict() for near in self.near],
            "blocks": list(self.blocks),
        }
        return to_json(values)  # a distance that is not finite becomes null


class ArrayPredictions(NamedTuple):
    """Predictions as arrays, one row per image."""

    targets: Int[np.ndarray, "N"]
    """Index of the inferred target, which is a task or the pretraining data; -1 if the image is
    assigned to no target."""
    logits: list[Float[np.ndarray, "C"]]
    """Logits of the inferred target's classes; empty without a target."""
    distances: Float[np.ndarray, "N T"]
    """The router's distance between each image and each target."""


class Predictor:
    """Predictor for a set of targets: tasks, and possibly the pretraining data.

    One function is compiled per batch size. Raises ValueError without targets, and if
    `open_set` is set and a target is not calibrated.

    Args:
        networks: networks of the targets; their experts are merged on first use.
        batch_sizes: numbers of images per call for which functions are compiled.
        top: number of classes per prediction.
        open_set: expected share of a target's own images that are rejected as foreign. An image
            is rejected if its distance to the nearest target is above the (1 - `open_set`) quantile
            of the distances of that target's validation images. None rejects no image, as in the
            paper.
        upright: whether image files are rotated according to their EXIF orientation.
    """

    def __init__(
        self,
        executor: Executor,
        targets: Sequence[TaskMemory],
        networks: TaskNetworks,
        router: RouterConfig,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        top: int = 5,
        open_set: float | None = None,
        upright: bool = True,
    ):
        if not targets:
            raise ValueError("this memory has no task yet; `cheem learn` adds one")
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(
                f"batch_sizes are {tuple(batch_sizes)}; expected integers of at least 1"
            )
        if top < 1:
            raise ValueError(f"top is {top}; expected at least 1 class")
        self.executor = executor
        self.targets = tuple(targets)
        self.networks = networks
        self.top = top
        self.open_set = open_set
        self.upright = upright
        statistics = tuple(target.router_statistics for target in targets)
        self.router = Router(router, statistics)
        # The `kmeans` router's distances to a task do not depend on other tasks, so the thresholds
        # stay valid when tasks are added.
        self.open_set_router = self.router if router.kind == "kmeans" else Router(PAPER, statistics)
        self.thresholds: Float[np.ndarray, "T"] | None = None
        if open_set is not None:
            self.thresholds = np.array([threshold(one, open_set) for one in self._quantiles])
        base = base_network(executor)
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self._inference = {}
        for size in self.batch_sizes:
            sizes = {min(executor.rows(size), other) for other in self.batch_sizes if other <= size}
            self._inference[size] = Inference(
                executor,
                base,
                networks,
                batch_size=size,
                sizes=sorted(sizes, reverse=True),
                reads=router,
            )

    @property
    def _quantiles(self) -> list[Float[np.ndarray, "Q"]]:
        """Quantiles of the distances between each target and its validation images. Raises
        ValueError if a target has no quantiles."""
        if lacking := [target.name for target in self.targets if target.distances is None]:
            raise ValueError(
                f"{', '.join(lacking)} were learned without a calibrated distance, so open_set and"
                " unknown cannot be used; leave them out, or begin a memory with `cheem learn`,"
                " which calibrates each task"
            )
        return [target.distances for target in self.targets if target.distances is not None]

    @property
    def image_size(self) -> int:
        """Height and width of images in pixels."""
        return self.executor.config.image_size

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Classes of each target, keyed by its name."""
        return {target.name: target.classes for target in self.targets}

    @property
    def architectures(self) -> dict[str, tuple[str, ...]]:
        """Op of each block, keyed by the target's name."""
        return {target.name: tuple(to_strings(target.architecture)) for target in self.targets}

    def counters(self) -> dict[str, int]:
        """Return the counters of the cache of merged experts; see `TaskNetworks.counters`."""
        return self.networks.counters()

    def prepare(self) -> None:
        """Compile all functions, so that no later call compiles."""
        self.networks.prepare()
        for inference in self._inference.values():
            inference.prepare()
        size = self.image_size
        for num in self.batch_sizes:
            self.predict_arrays(np.zeros((num, size, size, 3), np.uint8))

    def __call__(self, images: UInt8[np.ndarray, "N S S 3"]) -> list[Prediction]:
        """Return the prediction for each image."""
        predictions = []
        for target, logits, distances in zip(*self.predict_arrays(images), strict=True):
            order = np.argsort(distances, kind="stable")
            near = tuple(NearTask(self.targets[i].name, float(distances[i])) for i in order)
            if target < 0:
                predictions.append(Prediction(near=near))
                continue
            task = self.targets[target]
            guesses = ()
            if np.isfinite(logits).all():
                probabilities = class_probabilities(logits, task)
                best = np.argsort(-logits, kind="stable")[: self.top]
                guesses = tuple(Guess(task.classes[i], float(probabilities[i])) for i in best)
            blocks = tuple(to_strings(task.architecture))
            predictions.append(Prediction(task.name, guesses, near, blocks))
        return predictions

    def predict_arrays(self, images: Images) -> ArrayPredictions:
        """Predict uint8 images `[N, S, S, 3]`; return arrays.

        Raises ValueError for images of another shape or type.
        """
        size = self.image_size
        num = len(images)
        if images.shape[1:] != (size, size, 3) or images.dtype != np.uint8:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, {size},"
                f" {size}, 3]; use `memory.predict` for files and images of other sizes"
            )
        distances = np.zeros((num, len(self.targets)))
        targets = np.zeros(num, np.int32)
        features = np.zeros((num, self.executor.config.width), np.float32)
        for start in range(0, num, self.batch_sizes[-1]):
            part = images[start : start + self.batch_sizes[-1]]
            rows = slice(start, start + len(part))
            # the smallest batch size into which this part fits
            inference = self._inference[next(n for n in self.batch_sizes if n >= len(part))]

            def route(tokens: np.ndarray, rows: slice = rows) -> np.ndarray:
                by_task, nearest = self._route(tokens)
                targets[rows] = nearest[: rows.stop - rows.start]
                distances[rows] = by_task[: rows.stop - rows.start]
                return nearest

            features[rows] = inference.features(HostImages(self.executor, part), len(part), route)
        no_class = np.zeros((features.shape[1], 0), np.float32), np.zeros(0, np.float32)
        heads = {
            target: tuple(map(np.asarray, self.targets[target].head)) if target >= 0 else no_class
            for target in np.unique(targets).tolist()
        }
        pairs = zip(features, [heads[target] for target in targets.tolist()], strict=True)
        return ArrayPredictions(
            targets, [row @ weight + bias for row, (weight, bias) in pairs], distances
        )

    def _route(
        self, tokens: Float[np.ndarray, "N E"]
    ) -> tuple[Float[np.ndarray, "N T"], Int[np.ndarray, "N"]]:
        distances = self.router.distances(tokens)
        nearest = np.argmin(distances, axis=1).astype(np.int32)
        if self.thresholds is not None:
            open_set = self._open_set_distances(tokens, distances, nearest)
            nearest[~(open_set <= self.thresholds[nearest])] = -1  # also rejects NaN distances
        return distances, nearest

    def _open_set_distances(
        self,
        tokens: Float[np.ndarray, "N E"],
        distances: Float[np.ndarray, "N T"],
        nearest: Int[np.ndarray, "N"],
    ) -> Float[np.ndarray, "N"]:
        """Return the distance between each image and its nearest target, for comparison with the
        quantiles. `distances` are the distances of the router."""
        if self.open_set_router is not self.router:
            distances = self.open_set_router.distances(tokens)
        return distances[np.arange(len(nearest)), nearest]

    def rejection_scores(self, images: Images) -> Float[np.ndarray, "N"]:
        """Compute the open-set score of each image: the share of the nearest target's validation
        images that are nearer to this target than the image.

        `open_set` rejects images with high scores. Raises ValueError if a target was not
        calibrated.
        """
        quantiles = self._quantiles
        if not len(images):
            return np.zeros(0)
        read = list[np.ndarray]()

        def route(tokens: np.ndarray) -> np.ndarray:
            read.append(tokens)
            return np.full(len(tokens), -1)

        inference = self._inference[self.batch_sizes[-1]]
        inference.features(HostImages(self.executor, images), len(images), route)
        tokens = np.concatenate(read)[: len(images)]  # the last batch is padded
        distances = self.router.distances(tokens)
        nearest = np.argmin(distances, axis=1)
        open_set = self._open_set_distances(tokens, distances, nearest)
        scores = np.zeros(len(images))
        for target in np.unique(nearest).tolist():
            rows = nearest == target
            scores[rows] = rejection_scores(open_set[rows], quantiles[target])
        return scores


def class_probabilities(logits: Float[np.ndarray, "C"], task: TaskMemory) -> Float[np.ndarray, "C"]:
    """Return the probabilities of a task's classes at the task's temperature."""
    return softmax(logits.astype(np.float64) / task.temperature)


class FilePrediction(NamedTuple):
    """A file and its prediction."""

    file: str
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"file": self.file, **self.prediction.to_json()}


def predict_files(predictor: Predictor, files: Sequence[ImageInput]) -> Iterator[FilePrediction]:
    """Predict files in order, and decode the next files at the same time. Raises the errors of
    `NamedFiles`."""
    # small pieces, so that the first predictions appear early
    size = 2 * predictor.batch_sizes[-1]
    named = NamedFiles(files, upright=predictor.upright)
    for names, images, errors in decode_pieces(named, predictor.image_size, size):
        predictions = iter(predictor(images))
        for name, error in zip(names, errors, strict=True):
            yield FilePrediction(
                name,
                Prediction(error=error.removeprefix(f"{name}: ")) if error else next(predictions),
            )
