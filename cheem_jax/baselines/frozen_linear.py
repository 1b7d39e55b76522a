"""Frozen linear, the lower reference: a linear head per task on frozen features, with CHEEM's
router.

The head is ridge regression on one-hot labels, which predicts the same classes as scikit-learn's
RidgeClassifier. Its penalty is selected per task on the validation split. Training the backbone is
useful only if the result is more accurate than this reference.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.baselines.baseline import Baseline, at_least_one, params_report, pass_costs
from cheem_jax.baselines.heads import classes_by_task
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase
from cheem_jax.core.pool import Head
from cheem_jax.core.routing import (
    Router,
    RouterConfig,
    TaskStatistics,
    fit_statistics,
    num_stored,
)
from cheem_jax.core.settings import check_types
from cheem_jax.data.task import Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.method import check_task_ids
from cheem_jax.run.session import Session

PENALTIES = (1.0, 10.0, 50.0, 200.0, 1000.0)
"""Candidate ridge penalties."""


@dataclasses.dataclass(frozen=True)
class FrozenLinearConfig:
    """Settings of the frozen-feature reference."""

    name: ClassVar[str] = "frozen_linear"
    router: RouterConfig = RouterConfig()
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size")


class LinearTask(NamedTuple):
    """A task's linear head on frozen features, and the router's statistics."""

    weight: Float[Array, "D C"]
    bias: Float[Array, "C"]
    centroids: Float[np.ndarray, "K E"]
    moments: Mapping[str, np.ndarray] = {}


class FrozenLinear(Baseline):
    """Frozen features with a ridge head per task. CHEEM's router infers the task ID."""

    Learned = LinearTask

    def build(self) -> None:
        self._index = Router(self.config.router)

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """Fit a head for the task, then the router's statistics."""
        num_classes = len(task.classes)
        with session.phase("head") as advance:
            head, penalty = fit_head(
                self.features(task.train.images, advance),
                task.train.labels,
                self.features(task.val.images, advance),
                task.val.labels,
            )
        with session.phase("router") as advance:
            seed = self.keys.seed_at(len(self.tasks), Phase.CENTROIDS)
            features = self.router_features(task.train.images, advance)
            statistics = fit_statistics(features, task.train.labels, self.config.router, seed=seed)
        self.tasks.append(LinearTask(*head, *statistics))
        self.classes.add(task.name, task.classes)
        num_params = head.weight.size + head.bias.size
        num_statistics = statistics.centroids.size + sum(
            part.size for part in statistics.moments.values()
        )
        encoder = None if self.features is self.router_features else self.router_features.encoder
        return {
            "penalty": penalty,
            **pass_costs(self.vit, num_classes, encoder=encoder),
            **params_report(
                self.vit, added=0, learned=num_params, stored=num_params + num_statistics
            ),
            "seconds": session.seconds,
        }

    def bytes_needed(self, task: Task) -> int:
        """Estimate the bytes on disk for the next task: its head and the router's statistics."""
        head = (self.features.encoder.width + 1) * len(task.classes)
        return 4 * (
            head
            + num_stored(self.config.router, self.router_features.encoder.width, len(task.classes))
        )

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        self._index = self._index.follow(
            [TaskStatistics(task.centroids, task.moments) for task in self.tasks]
        )
        tasks = np.asarray(self._index.route(self.router_features(images)), np.int32)
        heads = [Head(task.weight, task.bias) for task in self.tasks]
        selected = tasks
        if task_ids is not None:
            selected = check_task_ids(task_ids, len(self.tasks), len(images))
        return Inferred(tasks, classes_by_task(self.features(images), heads, selected))


def fit_head(
    train: Float[np.ndarray, "N D"],
    labels: np.ndarray,
    val: Float[np.ndarray, "M D"],
    val_labels: np.ndarray,
) -> tuple[Head, float]:
    """Fit one ridge head per penalty. Return the head with the highest validation accuracy, and the
    penalty of this head.

    Ties are resolved in favour of the largest penalty. The inputs of the head are unscaled
    features, because the weight and bias of the head include the standardisation.
    """
    # imported here, because scikit-learn takes a second to import and every command imports this
    # module
    from sklearn.linear_model import RidgeClassifier
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    points, held_out = scaler.transform(train), scaler.transform(val)
    ridges = {penalty: RidgeClassifier(alpha=penalty).fit(points, labels) for penalty in PENALTIES}
    penalty = max(
        PENALTIES, key=lambda penalty: (ridges[penalty].score(held_out, val_labels), penalty)
    )
    ridge = ridges[penalty]
    coefficients = np.atleast_2d(ridge.coef_)
    intercept = np.atleast_1d(ridge.intercept_)
    if len(coefficients) == 1:  # scikit-learn returns one row for two classes
        coefficients = np.concatenate([-coefficients, coefficients])
        intercept = np.concatenate([-intercept, intercept])
    # w.(x - m) / s + b = (w / s).x + (b - (w / s).m)
    weight = (coefficients / scaler.scale_).T
    bias = intercept - np.asarray(scaler.mean_) @ weight
    head = Head(weight.astype(np.float32), bias.astype(np.float32))  # pyright: ignore[reportArgumentType]
    return head, penalty
