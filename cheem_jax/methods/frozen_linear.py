"""The yardstick: a linear head per task on the frozen features, with CHEEM's router.

Ridge regression on one-hot labels (scikit-learn's RidgeClassifier), its penalty chosen per task on the validation
split. Whatever a method learns in the backbone has to beat this.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from sklearn.linear_model import RidgeClassifier
from sklearn.preprocessing import StandardScaler

from cheem_jax.centroids import RouterConfig, fit_centroids, route
from cheem_jax.checkpoint import load_task, load_tasks, named, save_task, saved_tasks, task_directory
from cheem_jax.data.task import Task
from cheem_jax.flops import backbone_flops, executed_backbone_flops
from cheem_jax.keys import Keys, Phase
from cheem_jax.methods.method import Answers, Clock, FrozenFeatures, Running

PENALTIES = (1.0, 10.0, 50.0, 200.0, 1000.0)


class LinearTask(NamedTuple):
    """A task's head on raw features, and its centroids."""

    name: str
    classes: tuple[str, ...]
    weight: Float[np.ndarray, "D C"]
    bias: Float[np.ndarray, "C"]
    centroids: Float[np.ndarray, "K E"]


class FrozenLinear:
    """Ridge heads on frozen features; the task is found by the same centroids as CHEEM's."""

    name = "frozen_linear"

    def __init__(self, keys: Keys, features: FrozenFeatures, router_features: FrozenFeatures, router: RouterConfig):
        self.keys, self.features, self.router_features, self.router = keys, features, router_features, router
        self.tasks: list[LinearTask] = []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Fit the head and the centroids."""
        clock, index = Clock(), len(self.tasks)
        with clock("head"):
            weight, bias, penalty = fit_head(
                self.features(task, "train"), task.train.labels, self.features(task, "val"), task.val.labels
            )
        with clock("router"):
            seed = self.keys.seed_at(index, Phase.CENTROIDS)
            centroids = fit_centroids(self.router_features(task, "train"), seed=seed, config=self.router)
        self.tasks.append(LinearTask(task.name, task.classes, weight, bias, centroids))
        features, router = self.features.executor.config, self.router_features.executor.config
        shared = self.features.executor is self.router_features.executor
        extra = 2 * features.width * len(task.classes)
        return {
            "name": task.name,
            "penalty": penalty,
            "flops_method": backbone_flops(features) + (0 if shared else backbone_flops(router)),
            "flops_executed": executed_backbone_flops(features) + extra
            + (0 if shared else executed_backbone_flops(router)),
            "params_added_percent": 0.0,
            "seconds": clock.seconds,
        }  # fmt: skip

    def bytes_needed(self, task: Task) -> int:
        """Head and centroids."""
        num_centroids, width = self.router.num_centroids, self.router_features.executor.config.width
        return 4 * ((self.features.executor.config.width + 1) * len(task.classes) + num_centroids * width)

    def answers(self, index: int, task: Task) -> Answers:
        """Answers to a learned task's test images."""
        learned = self.tasks[index]
        local = (self.features(task, "test") @ learned.weight + learned.bias).argmax(axis=1).astype(np.int32)
        centroids = [t.centroids for t in self.tasks]
        chosen = route(self.router_features(task, "test"), centroids, self.router)
        return Answers(local, chosen, local)

    def save(self, root: Path) -> None:
        """Save what the last task added, and go on with what is read back."""
        index, task = len(self.tasks) - 1, self.tasks[-1]
        arrays = {"weight": task.weight, "bias": task.bias, "centroids": task.centroids}
        meta = {"name": task.name, "classes": list(task.classes)}
        directory = task_directory(root, index, task.name)
        save_task(directory, arrays, meta)
        self.tasks[-1] = _task_of(directory, *load_task(directory))

    def open(self, root: Path) -> None:
        """Replace the state by what is saved."""
        directories = saved_tasks(root)
        read = zip(directories, load_tasks(directories), strict=True)
        self.tasks = [_task_of(directory, arrays, meta) for directory, (arrays, meta) in read]


def _task_of(directory: Path, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> LinearTask:
    with named(directory):
        return LinearTask(meta["name"], tuple(meta["classes"]), **arrays)


def fit_head(
    train: Float[np.ndarray, "N D"], labels: np.ndarray, val: Float[np.ndarray, "M D"], val_labels: np.ndarray
) -> tuple[Float[np.ndarray, "D C"], Float[np.ndarray, "C"], float]:
    """Weight and bias of the ridge head that is best on the validation split, and its penalty (ties: the largest)."""
    scaler = StandardScaler().fit(train)

    def accuracy(penalty: float) -> float:
        return float(RidgeClassifier(alpha=penalty).fit(scaler.transform(train), labels)
                     .score(scaler.transform(val), val_labels))  # fmt: skip

    penalty = max(PENALTIES, key=lambda p: (accuracy(p), p))
    ridge = RidgeClassifier(alpha=penalty).fit(scaler.transform(train), labels)
    coefficients, intercept = np.atleast_2d(ridge.coef_), np.atleast_1d(ridge.intercept_)
    if len(coefficients) == 1:  # scikit-learn keeps one row for two classes
        coefficients, intercept = (
            np.concatenate([-coefficients, coefficients]),
            np.concatenate([-intercept, intercept]),
        )
    weight = (coefficients / scaler.scale_).T
    bias = intercept - np.asarray(scaler.mean_) @ weight
    return weight.astype(np.float32), bias.astype(np.float32), penalty
