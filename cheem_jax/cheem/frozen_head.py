"""Linear heads by ridge regression. With one, backward elimination scores networks before training
(`--cheem.sampling anchored`), and the frozen backbone is compared with the learned network
(`--cheem.fallback`)."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from cheem_jax.core.metrics import fit_temperature
from cheem_jax.core.pool import Head, compute_logits
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import Feed
from cheem_jax.engine.passes import network_features
from cheem_jax.run.method import FrozenFeatures, base_network

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Ridge penalties per image; `ridge_head` selects one of them."""


def ridge_head(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num_classes: int
) -> tuple[Head, float]:
    """Fit a ridge head for raw features. The penalty with the smallest leave-one-out squared error
    is selected from `PENALTIES`.

    Returns the head and its penalty per image. The head includes the standardisation of the
    features. The logits of the head are scaled to maximise the mean log-probability of the labels
    under the leave-one-out predictions, within the limits of `fit_temperature`.
    """
    # imported here because the import is slow and prediction does not need it
    from sklearn.linear_model import RidgeCV
    from sklearn.preprocessing import StandardScaler

    num = len(labels)
    scaler: Any = StandardScaler().fit(features)
    points = np.asarray(scaler.transform(features.astype(np.float64)))
    targets = np.eye(num_classes)[labels]
    ridge: Any = RidgeCV([penalty * num for penalty in PENALTIES]).fit(points, targets)
    gram = points.T @ points + ridge.alpha_ * np.eye(points.shape[1])
    leverage = 1 / num + (points.T * np.linalg.solve(gram, points.T)).sum(axis=0)
    alone = targets - (targets - ridge.predict(points)) / np.maximum(1 - leverage, 1e-6)[:, None]
    # ridge predictions are close to the one-hot targets 0 and 1, so they are scaled to the range of
    # logits
    scale = RIDGE_SCALE / fit_temperature(RIDGE_SCALE * alone, labels)
    weight = scale * (ridge.coef_ / scaler.scale_).T
    bias = scale * ridge.intercept_ - scaler.mean_ @ weight
    return Head(jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32)), float(
        ridge.alpha_ / num
    )


def frozen_features(
    executor: Executor,
    frozen: FrozenFeatures,
    split: Split,
    feed: Feed,
    batch_size: int,
    advance: Advance,
) -> Float[np.ndarray, "N D"]:
    """Compute the frozen backbone's features of a split. If the router reads the same features, the
    router's cache is used."""
    if frozen.ends(executor):
        return frozen(split.images, advance)
    networks = [base_network(executor)]
    num = len(split.labels)
    (features,) = network_features(
        executor, networks, feed, num, batch_size=batch_size, advance=advance
    )
    return features


RIDGE_SCALE = 20.0
"""Factor from ridge predictions to logits, before the temperature is fitted."""


class HeadComparison(NamedTuple):
    """Predictions of a learned network and of the frozen backbone with a ridge head, for the
    validation images."""

    head: Head
    """The ridge head."""
    penalty: float
    """Penalty of the ridge head per training image."""
    network: Bool[np.ndarray, "M"] | None
    """Whether the network classifies each image correctly; None if one of its logits is
    non-finite."""
    frozen: Bool[np.ndarray, "M"]
    """Whether the frozen backbone classifies each image correctly."""

    @property
    def is_frozen_better(self) -> bool:
        """Whether the frozen backbone has more correct predictions than the network, by more than
        one standard error. Without this margin, a few validation images often select the backbone
        where the network is more accurate on test images."""
        if self.network is None:
            return True
        gained = int(np.sum(self.frozen & ~self.network))
        lost = int(np.sum(self.network & ~self.frozen))
        # If both were equally accurate, each image in which they differ would add 1 or -1 with
        # equal probability, so the variance of the difference is the number of these images.
        return gained - lost > math.sqrt(gained + lost)

    def report(self, fallback: bool) -> dict[str, Any]:
        """Return the comparison as JSON values; accuracies are in [0, 1].

        The value of `kept` is "frozen" if `fallback` is true and the frozen backbone is better, and
        "network" otherwise.
        """
        network = 0.0 if self.network is None else float(self.network.mean())
        return {
            "validation_images": len(self.frozen),
            "network": network,
            "frozen": float(self.frozen.mean()),
            "penalty": self.penalty,
            "kept": "frozen" if fallback and self.is_frozen_better else "network",
        }


def compare_heads(
    features: Float[np.ndarray, "M D"],
    head: Head,
    task: Task,
    frozen_train: Float[np.ndarray, "N D"],
    frozen_val: Float[np.ndarray, "M D"],
) -> HeadComparison:
    """Compare two predictors on the validation images of `task`: a learned network, and the frozen
    backbone with a ridge head.

    Args:
        features: features of the learned network for the validation images.
        head: head of the learned network.
        task: the task, with labels of both splits.
        frozen_train: features of the frozen backbone for the training images.
        frozen_val: features of the frozen backbone for the validation images.
    """
    labels = task.val.labels
    ridge, penalty = ridge_head(frozen_train, task.train.labels, len(task.classes))
    logits = np.asarray(compute_logits(features, head))
    network = logits.argmax(axis=1) == labels if np.isfinite(logits).all() else None
    frozen = np.asarray(compute_logits(frozen_val, ridge)).argmax(axis=1) == labels
    return HeadComparison(ridge, penalty, network, frozen)
