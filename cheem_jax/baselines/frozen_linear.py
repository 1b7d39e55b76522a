"""The lower reference: a linear head per task on frozen features, with CHEEM's router.

Ridge regression on one-hot labels (scikit-learn's RidgeClassifier), its penalty selected per task on the validation
split. Learning in the backbone is worth its cost only if it is more accurate than this.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import RidgeClassifier
from sklearn.preprocessing import StandardScaler

from cheem_jax.baselines.saving import restore_all, save_and_restore
from cheem_jax.cheem.heads import classes_by_task
from cheem_jax.cheem.training import check_batch_size
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.pool import Head
from cheem_jax.core.routing.config import RouterConfig, TaskStatistics
from cheem_jax.core.routing.routers import Router, make_router
from cheem_jax.core.routing.statistics import fit_statistics, num_kept
from cheem_jax.data.task import Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.method import Answers, Clock, FrozenFeatures, Running, check_given, check_router

PENALTIES = (1.0, 10.0, 50.0, 200.0, 1000.0)
"""Ridge penalties to select from."""


@dataclasses.dataclass(frozen=True)
class FrozenLinearConfig:
    """Settings of the frozen-feature reference."""

    name: ClassVar[str] = "frozen_linear"
    router: RouterConfig = RouterConfig()
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)


class LinearTask(NamedTuple):
    """A task's head on raw features, and the router's statistics."""

    name: str
    classes: tuple[str, ...]
    weight: Float[np.ndarray, "D C"]
    bias: Float[np.ndarray, "C"]
    statistics: TaskStatistics


class FrozenLinear:
    """Ridge heads on frozen features; the task ID is inferred as in CHEEM."""

    name = "frozen_linear"

    def __init__(self, keys: Keys, features: FrozenFeatures, router_features: FrozenFeatures, router: RouterConfig):
        self.keys, self.features, self.router_features, self.router = keys, features, router_features, router
        self.tasks: list[LinearTask] = []
        self._index = make_router(router)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        check_router(tasks, self.router)
        return []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Fit the task's head, then the router's statistics."""
        clock = Clock()
        with clock("head"):
            weight, bias, penalty = fit_head(
                self.features(task, "train"), task.train.labels, self.features(task, "val"), task.val.labels
            )
        with clock("router"):
            seed = self.keys.seed_at(len(self.tasks), Phase.CENTROIDS)
            features = self.router_features(task, "train")
            statistics = fit_statistics(features, task.train.labels, self.router, seed=seed)
        self.tasks.append(LinearTask(task.name, task.classes, weight, bias, statistics))
        shared = self.features is self.router_features
        encoders = [self.features.encoder] if shared else [self.features.encoder, self.router_features.encoder]
        head = weight.size + bias.size
        return {
            "name": task.name,
            "penalty": penalty,
            "flops_method": sum(encoder.flops() for encoder in encoders),
            "flops_explicit": sum(encoder.flops(count_attention=True) for encoder in encoders),
            "flops_executed": sum(encoder.executed_flops() for encoder in encoders) + 2 * weight.size,
            "params_added_percent": 0.0,
            "params_learned": head,
            "params_stored": head + statistics.centroids.size + sum(part.size for part in statistics.moments.values()),
            "seconds": clock.seconds,
        }

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: the head and the router's statistics."""
        head = (self.features.encoder.width + 1) * len(task.classes)
        return 4 * (head + num_kept(self.router, self.router_features.encoder.width, len(task.classes)))

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        learned = self.tasks[index]
        local = (self.features(task, "test") @ learned.weight + learned.bias).argmax(axis=1).astype(np.int32)
        return Answers(local, self.index.route(self.router_features(task, "test")), local)

    @property
    def index(self) -> Router:
        """The router of all tasks."""
        return self._index.follow([task.statistics for task in self.tasks])

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.tasks), tasks)
        features = self.features.compute(images)
        if tasks is None:
            same = self.features is self.router_features
            tasks = self.index.route(features if same else self.router_features.compute(images))
        heads = [Head(t.weight, t.bias) for t in self.tasks]  # pyright: ignore[reportArgumentType]
        return Inferred(np.asarray(tasks, np.int32), classes_by_task(features, heads, tasks))

    def save(self, root: Path) -> None:
        """See `Method.save`."""
        index, task = len(self.tasks) - 1, self.tasks[-1]
        arrays: dict[str, Any] = {"weight": task.weight, "bias": task.bias, "centroids": task.statistics.centroids}
        if task.statistics.moments:
            arrays["moments"] = dict(task.statistics.moments)
        self.tasks[-1] = save_and_restore(root, (index, task.name, task.classes), arrays, _restored)

    def open(self, root: Path) -> None:
        """See `Method.open`."""
        self.tasks = restore_all(root, _restored)


def _restored(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> LinearTask:
    statistics = TaskStatistics(arrays["centroids"], arrays.get("moments", {}))
    return LinearTask(meta["name"], tuple(meta["classes"]), arrays["weight"], arrays["bias"], statistics)


def fit_head(
    train: Float[np.ndarray, "N D"], labels: np.ndarray, val: Float[np.ndarray, "M D"], val_labels: np.ndarray
) -> tuple[Float[np.ndarray, "D C"], Float[np.ndarray, "C"], float]:
    """Weight and bias of the ridge head that is the most accurate on the validation split, and its penalty.

    Ties go to the largest penalty. The head takes raw features: their standardisation is folded into it.
    """
    scaler = StandardScaler().fit(train)

    def accuracy(penalty: float) -> float:
        return float(RidgeClassifier(alpha=penalty).fit(scaler.transform(train), labels)
                     .score(scaler.transform(val), val_labels))  # fmt: skip

    penalty = max(PENALTIES, key=lambda p: (accuracy(p), p))
    ridge = RidgeClassifier(alpha=penalty).fit(scaler.transform(train), labels)
    coefficients, intercept = np.atleast_2d(ridge.coef_), np.atleast_1d(ridge.intercept_)
    if len(coefficients) == 1:  # scikit-learn keeps one row for two classes
        coefficients = np.concatenate([-coefficients, coefficients])
        intercept = np.concatenate([-intercept, intercept])
    # w.(x - m) / s + b = (w / s).x + (b - (w / s).m)
    weight = (coefficients / scaler.scale_).T
    bias = intercept - np.asarray(scaler.mean_) @ weight
    return weight.astype(np.float32), bias.astype(np.float32), penalty
