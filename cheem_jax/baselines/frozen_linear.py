"""The lower reference: a linear head per task on frozen features, with CHEEM's router.

Ridge regression on one-hot labels (scikit-learn's RidgeClassifier), its penalty selected per task on the validation
split. Learning in the backbone is worth its cost only if it is more accurate than this.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import RidgeClassifier
from sklearn.preprocessing import StandardScaler

from cheem_jax.baselines.baseline import Baseline
from cheem_jax.baselines.settings import at_least_one
from cheem_jax.cheem.heads import classes_by_task
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.pool import Head
from cheem_jax.core.routing.config import RouterConfig, TaskStatistics
from cheem_jax.core.routing.routers import Router, make_router
from cheem_jax.core.routing.statistics import fit_statistics, num_kept
from cheem_jax.data.task import Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.method import Answers, Clock, Networks, Running, check_given, check_router

PENALTIES = (1.0, 10.0, 50.0, 200.0, 1000.0)
"""Ridge penalties to select from."""


@dataclasses.dataclass(frozen=True)
class FrozenLinearConfig:
    """Settings of the frozen-feature reference."""

    name: ClassVar[str] = "frozen_linear"
    router: RouterConfig = RouterConfig()
    batch_size: int = 64

    def __post_init__(self) -> None:
        at_least_one(self, "batch_size")


class LinearTask(NamedTuple):
    """A task's head on raw features, and the router's statistics."""

    head: Head
    statistics: TaskStatistics


class FrozenLinear(Baseline):
    """Ridge heads on frozen features; the task ID is inferred as in CHEEM."""

    name = "frozen_linear"

    def __init__(self, networks: Networks, config: FrozenLinearConfig, keys: Keys, num_tasks: int):
        super().__init__()
        _, self.features, self.router_features = networks
        self.keys, self.router = keys, config.router
        self.tasks: list[LinearTask] = []
        self._index = make_router(config.router)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        check_router(tasks, self.router)
        return []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Fit the task's head, then the router's statistics."""
        clock = Clock()
        with clock("head"):
            head, penalty = fit_head(
                self.features(task, "train"), task.train.labels, self.features(task, "val"), task.val.labels
            )
        with clock("router"):
            seed = self.keys.seed_at(len(self.tasks), Phase.CENTROIDS)
            features = self.router_features(task, "train")
            statistics = fit_statistics(features, task.train.labels, self.router, seed=seed)
        self.tasks.append(LinearTask(head, statistics))
        self.classes.add(task.name, task.classes)
        shared = self.features is self.router_features
        encoders = [self.features.encoder] if shared else [self.features.encoder, self.router_features.encoder]
        num_params = head.weight.size + head.bias.size
        return {
            "penalty": penalty,
            "flops_method": sum(encoder.flops() for encoder in encoders),
            "flops_explicit": sum(encoder.flops(count_attention=True) for encoder in encoders),
            "flops_executed": sum(encoder.executed_flops() for encoder in encoders) + 2 * head.weight.size,
            "params_added_percent": 0.0,
            "params_learned": num_params,
            "params_stored": num_params
            + statistics.centroids.size
            + sum(part.size for part in statistics.moments.values()),
            "seconds": clock.seconds,
        }

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: the head and the router's statistics."""
        head = (self.features.encoder.width + 1) * len(task.classes)
        return 4 * (head + num_kept(self.router, self.router_features.encoder.width, len(task.classes)))

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        local = classes_by_task(self.features(task, "test"), self._heads, np.full(len(task.test.labels), index))
        return Answers(local, self.index.route(self.router_features(task, "test")), local)

    @property
    def _heads(self) -> list[Head]:
        return [task.head for task in self.tasks]

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
        return Inferred(np.asarray(tasks, np.int32), classes_by_task(features, self._heads, tasks))

    def arrays(self) -> dict[str, Any]:
        """The last task."""
        head, statistics = self.tasks[-1]
        # Orbax keeps no empty tree
        moments = {"moments": dict(statistics.moments)} if statistics.moments else {}
        return {**head._asdict(), "centroids": statistics.centroids, **moments}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """See `Baseline.restore`."""
        statistics = TaskStatistics(arrays["centroids"], arrays.get("moments", {}))
        self.tasks[index:] = [LinearTask(Head(**{name: arrays[name] for name in Head._fields}), statistics)]


def fit_head(
    train: Float[np.ndarray, "N D"], labels: np.ndarray, val: Float[np.ndarray, "M D"], val_labels: np.ndarray
) -> tuple[Head, float]:
    """The ridge head that is the most accurate on the validation split, and its penalty.

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
    head = Head(weight.astype(np.float32), bias.astype(np.float32))  # pyright: ignore[reportArgumentType]
    return head, penalty
