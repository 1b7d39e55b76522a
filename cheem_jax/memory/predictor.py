"""Answering for a whole memory: which task an image belongs to, which class of it, and whether to
any at all."""

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
from cheem_jax.core.routing import PAPER, Router, RouterConfig, threshold
from cheem_jax.data.decode import decode_pieces
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import Inference
from cheem_jax.memory.data import NamedFiles, Picture
from cheem_jax.run.method import base_network

BATCH_SIZES = (1, 8, 32)
"""Images per call that programs are compiled for: a single picture, a few, and many."""


class Guess(NamedTuple):
    """A class of the answering task and its probability in [0, 1]."""

    label: str
    probability: float


class NearTask(NamedTuple):
    """A task and how far the image is from it: as the router compares them, below 0 for some
    kinds."""

    task: str
    distance: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answer to one image, decided from that image alone."""

    task: str | None = None
    """The task whose network answered; None where the image belongs to none of them (open set)."""
    guesses: tuple[Guess, ...] = ()
    """Classes of that task, most probable first; empty without a task, and where a logit is
    non-finite."""
    near: tuple[NearTask, ...] = ()
    """Tasks by distance, the nearest first."""
    blocks: tuple[str, ...] = ()
    """What ran in each block of the answering network, such as `reuse:0`, `adapt:2`, `new`, `skip`;
    () without a task."""
    error: str = ""
    """Why the image could not be read; then there is nothing else. Empty for every image that was
    answered."""

    @property
    def label(self) -> str | None:
        """The most probable class; None without one."""
        return self.guesses[0].label if self.guesses else None

    @property
    def probability(self) -> float | None:
        """The probability of that class within its task; None without one."""
        return self.guesses[0].probability if self.guesses else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.error:
            return {"error": self.error}
        return {
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


class Answered(NamedTuple):
    """Answers as arrays, one row per image."""

    targets: Int[np.ndarray, "N"]
    """Which target answered; -1 for none of them."""
    logits: list[Float[np.ndarray, "C"]]
    """Of the answering target's classes; empty for none."""
    distances: Float[np.ndarray, "N T"]
    """To each target, as the router compares them."""


class Predictor:
    """Some targets (tasks, and perhaps the backbone's own) behind the router, with programs of a
    few batch sizes.

    `networks` are those of the targets; each is put together when the router first names it.
    `open_set` is the share of a target's own images that may be refused as foreign; None refuses
    none, as the paper does. `upright`: rotate files by their EXIF orientation. Raises ValueError if
    there is no target, or one that was not calibrated.
    """

    open_set: float | None = None

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
            raise ValueError("this memory has no task yet; `cheem learn` gives it one")
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(
                f"batch_sizes are {tuple(batch_sizes)}; expected whole numbers of at least 1"
            )
        if top < 1:
            raise ValueError(f"top is {top}; expected at least 1 class")
        self.executor = executor
        self.targets = tuple(targets)
        self.networks = networks
        self.top = top
        self.open_set, self.upright = open_set, upright
        statistics = tuple(target.router_statistics for target in targets)
        self.index = Router(router, statistics)
        # a distance that learning more tasks does not change, so that a threshold keeps its meaning
        self._own = None if router.kind == "kmeans" else Router(PAPER, statistics)
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.thresholds: np.ndarray | None = None
        if open_set is not None:
            if lacking := [target.name for target in targets if target.distances is None]:
                raise ValueError(
                    f"{', '.join(lacking)} were learned without a calibrated distance, so `none of"
                    " my tasks` cannot be said; leave open_set out, or begin a memory with `cheem"
                    " learn`, which calibrates each task"
                )
            calibrated = [
                threshold(target.distances, open_set)
                for target in targets
                if target.distances is not None
            ]
            self.thresholds = np.array(calibrated)
        base = base_network(executor)
        self._inference = {}
        for size in self.batch_sizes:
            rows = executor.rows(size)
            sizes = sorted(
                {min(rows, smaller) for smaller in self.batch_sizes if smaller <= size},
                reverse=True,
            )
            self._inference[size] = Inference(
                executor, base, networks, batch_size=size, sizes=sizes, reads=router
            )

    @property
    def image_size(self) -> int:
        """Pixels of the square images."""
        return self.executor.config.image_size

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The classes of each target."""
        return {target.name: target.classes for target in self.targets}

    @property
    def architectures(self) -> dict[str, tuple[str, ...]]:
        """What runs in each block of each target's network."""
        return {target.name: tuple(to_strings(target.architecture)) for target in self.targets}

    def counters(self) -> dict[str, int]:
        """See `TaskNetworks.counters`."""
        return self.networks.counters()

    def prepare(self) -> None:
        """Compile all that a request may call."""
        self.networks.prepare()
        for inference in self._inference.values():
            inference.prepare()
        size = self.image_size
        for num in self.batch_sizes:
            self.answer(np.zeros((num, size, size, 3), np.uint8))

    def __call__(self, images: UInt8[np.ndarray, "N S S 3"]) -> list[Prediction]:
        """The answer to each image."""
        predictions = []
        for target, logits, distances in zip(*self.answer(images), strict=True):
            order = np.argsort(distances, kind="stable")
            near = tuple(NearTask(self.targets[i].name, float(distances[i])) for i in order)
            if target < 0:
                predictions.append(Prediction(near=near))
                continue
            task = self.targets[target]
            guesses = ()
            if np.isfinite(
                logits
            ).all():  # a network that computes NaN must not pass for one that knows
                probabilities = probabilities_of(logits, task)
                best = np.argsort(-logits, kind="stable")[
                    : self.top
                ]  # which the temperature cannot change
                guesses = tuple(Guess(task.classes[i], float(probabilities[i])) for i in best)
            predictions.append(
                Prediction(task.name, guesses, near, tuple(to_strings(task.architecture)))
            )
        return predictions

    def answer(self, images: Images) -> Answered:
        """Answers to images uint8 `[N, S, S, 3]` as arrays.

        Raises ValueError for images of another shape.
        """
        size = self.image_size
        num = len(images)
        if images.shape[1:] != (size, size, 3) or images.dtype != np.uint8:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, {size},"
                f" {size}, 3]; `memory.predict` takes files and images of any size"
            )
        near = np.zeros((num, len(self.targets)))
        targets = np.zeros(num, np.int32)
        features = np.zeros((num, self.executor.config.width), np.float32)
        largest = self.batch_sizes[-1]
        for start in range(0, num, largest):
            part = images[start : start + largest]
            known = slice(start, start + len(part))
            size = len(part)
            # padded to the smallest size that holds it
            inference = self._inference[next(s for s in self.batch_sizes if s >= size)]

            def route(seen: np.ndarray, known: slice = known, size: int = size) -> np.ndarray:
                found = self.index.distances(seen)
                nearest = np.argmin(found, axis=1).astype(np.int32)
                if self.thresholds is not None:
                    own = found if self._own is None else self._own.distances(seen)
                    # so written, what is no number is foreign too
                    nearest[~(own[np.arange(len(found)), nearest] <= self.thresholds[nearest])] = -1
                near[known], targets[known] = found[:size], nearest[:size]
                return nearest

            features[known] = inference.features(HostImages(self.executor, part), size, route)
        heads = {
            -1: (np.zeros((features.shape[1], 0), np.float32), np.zeros(0, np.float32))
        }  # of no class
        for target in np.unique(targets[targets >= 0]).tolist():
            weight, bias = self.targets[target].head
            heads[target] = np.asarray(weight), np.asarray(bias)
        pairs = zip(features, [heads[target] for target in targets.tolist()], strict=True)
        logits = [row @ weight + bias for row, (weight, bias) in pairs]
        return Answered(targets, logits, near)


def probabilities_of(logits: Float[np.ndarray, "C"], task: TaskMemory) -> Float[np.ndarray, "C"]:
    """Of a task's classes, at the temperature that was fitted on its validation images."""
    return softmax(logits.astype(np.float64) / task.temperature)


def is_best(logits: Float[np.ndarray, "C"], label: int) -> bool:
    """Whether these logits answer with that class; nothing is answered where one is no number."""
    return bool(np.isfinite(logits).all() and logits.argmax() == label)


class Asked(NamedTuple):
    """A file and its answer."""

    file: str
    prediction: Prediction

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"file": self.file, **self.prediction.to_json()}


def predict_files(predictor: Predictor, files: Sequence[Picture]) -> Iterator[Asked]:
    """The answer to each file in turn, decoded while others are answered. Raises as
    `NamedFiles`."""
    # small pieces: the first answer does not wait for hundreds of pictures
    size = 2 * predictor.batch_sizes[-1]
    given = NamedFiles(files, upright=predictor.upright)
    for names, images, errors in decode_pieces(given, predictor.image_size, size):
        answers = iter(predictor(images))
        for name, error in zip(names, errors, strict=True):
            found = Prediction(error=error.removeprefix(f"{name}: ")) if error else next(answers)
            yield Asked(name, found)
