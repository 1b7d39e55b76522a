"""Linear heads by ridge regression. With one, backward elimination scores networks before training
(`--cheem.sampling anchored`), and the frozen backbone is compared with the learned network
(`--cheem.fallback`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.core.metrics import fit_temperature, fitted
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
    """Validation results of a learned network and of the frozen backbone with a ridge head. In each
    pair, the first value is that of the network, and the second is that of the backbone."""

    head: Head
    """The ridge head."""
    penalty: float
    """Penalty of the ridge head per training image."""
    num_images: int
    """Number of validation images."""
    correct: Sequence[float]
    """Pair of the numbers of correct predictions on the validation images."""
    log_probability: Sequence[float]
    """Pair of the mean log-probabilities of the true class on the validation images, after the
    temperature of each head was fitted to these images."""

    @property
    def is_frozen_better(self) -> bool:
        """Whether the frozen backbone has more correct predictions than the network, or the same
        number and a higher log-probability. With few validation images, both often have the same
        number."""
        learned, frozen = zip(self.correct, self.log_probability, strict=True)
        return frozen > learned

    def report(self, fallback: bool) -> dict[str, Any]:
        """Return the comparison as JSON values; accuracies are in [0, 1].

        The value of `kept` is "frozen" if `fallback` is true and the frozen backbone is better, and
        "network" otherwise.
        """
        learned, frozen = (correct / self.num_images for correct in self.correct)
        return {
            "validation_images": self.num_images,
            "network": learned,
            "frozen": frozen,
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
    frozen, penalty = ridge_head(frozen_train, task.train.labels, len(task.classes))
    correct, log_probability = zip(
        fitted(compute_logits(features, head), labels),
        fitted(compute_logits(frozen_val, frozen), labels),
        strict=True,
    )
    return HeadComparison(frozen, penalty, len(labels), correct, log_probability)
