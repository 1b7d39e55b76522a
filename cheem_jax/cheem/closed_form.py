"""Accuracy of a linear head on fixed features: ridge regression with exact leave-one-out
predictions in closed form.

The supernet has one head for all sampled architectures, and the accuracy of this head ranks
architectures poorly. `closed_form_score` instead scores each architecture by the best ridge head on
the features of this architecture, without gradient steps.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cheem_jax.cheem.evolution import Score
from cheem_jax.cheem.supernet import Supernet, SupernetState
from cheem_jax.cheem.training import dense_network
from cheem_jax.core.keys import next_power_of_two
from cheem_jax.core.metrics import fit_temperature, fitted
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import Head, compute_logits
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.executor import Executor, Place
from cheem_jax.engine.feed import Feed
from cheem_jax.engine.passes import network_features, no_progress
from cheem_jax.engine.spread import features_spread
from cheem_jax.run.method import FrozenFeatures, base_network

PENALTIES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Ridge penalties per image, for standardised features. `fit_head` selects one of them."""

FEATURE_BYTES = 2**28
"""Maximum bytes of features in memory at a time. Candidates are scored in parts whose features do
not exceed this size."""


class HeadFit(NamedTuple):
    """Numbers of correct predictions of a closed-form head, and the penalty of the head."""

    left_out: Int[Array, ""]
    """Number of fitted images with a correct leave-one-out prediction."""
    held_out: Int[Array, ""]
    """Number of correctly predicted images that the head is not fitted to."""
    penalty: Float[Array, ""]


@functools.partial(jax.jit, static_argnames="num_outputs")
def fit_head(
    features: Float[Array, "N D"],
    labels: Int[Array, "N"],
    fitted: Bool[Array, "N"],
    num_classes: int | Int[Array, ""],
    *,
    num_outputs: int,
) -> HeadFit:
    """Fit a ridge regression of one-hot labels on standardised features. The penalty with the best
    leave-one-out accuracy is selected from `PENALTIES`.

    Args:
        features: features of all images.
        labels: labels in [0, num_classes), or -1 for padding, which never counts as correct.
        fitted: mask of the images that the head is fitted to, at least two. The other images
            count in `held_out`.
        num_classes: number of classes.
        num_outputs: `num_classes` padded to a power of two, so that tasks share compiled functions.

    If more than one penalty has the best accuracy, the largest of them is selected. All
    leave-one-out predictions are computed from one fit to all fitted images: the leave-one-out
    residual of an image is its residual in this fit divided by 1 - h, with h the leverage of the
    image. The leave-one-out intercept excludes the image; the mean and scale of the features
    include it.
    """
    with jax.default_matmul_precision("highest"):
        mask = fitted[:, None].astype(jnp.float32)
        num = mask.sum()
        x = features.astype(jnp.float32)
        x = x - (x * mask).sum(0) / num
        deviation = jnp.sqrt((x * x * mask).sum(0) / num)
        # a constant feature is set to 0: division by its deviation would amplify rounding errors
        x = x * jnp.where(deviation > 1e-6, 1 / jnp.maximum(deviation, 1e-6), 0.0)
        y = jax.nn.one_hot(labels, num_outputs)
        share = (y * mask).sum(0) / num
        # in the eigenbasis of the Gram matrix, solving for a penalty is a division
        eigenvalues, vectors = jnp.linalg.eigh((x * mask).T @ x)
        z = x @ vectors
        moments = (z * mask).T @ (y - share)

        def right(penalty):
            shrunk = jnp.maximum(eigenvalues, 0.0) + penalty * num
            answers = z @ (moments / shrunk[:, None]) + share
            leverage = 1 / num + (z * z / shrunk).sum(1)
            # A fitted image is predicted by a fit without this image: y - r / (1 - h), with the
            # residual r and the leverage h. Other images are predicted by the full fit.
            alone = y - (y - answers) / jnp.maximum(1 - leverage, 1e-6)[:, None]
            logits = jnp.where(fitted[:, None], alone, answers)
            logits = jnp.where(jnp.arange(num_outputs) < num_classes, logits, -jnp.inf)
            is_right = (logits.argmax(1) == labels) & jnp.isfinite(features).all()
            return (is_right & fitted).sum(), (is_right & ~fitted).sum()

        # largest first, because `argmax` returns the first maximum
        penalties = jnp.asarray(sorted(PENALTIES, reverse=True), jnp.float32)
        left_out, held_out = jax.lax.map(right, penalties)
        best = left_out.argmax()
        return HeadFit(left_out[best], held_out[best], penalties[best])


HEAD_PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Ridge penalties per image; `ridge_head` selects one of them. They are larger than `PENALTIES`
because `ridge_head` fits heads to few images per class."""


def ridge_head(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num_classes: int
) -> tuple[Head, float]:
    """Fit a ridge head for raw features. The penalty with the smallest leave-one-out squared error
    is selected from `HEAD_PENALTIES`.

    Returns the head and its penalty per image. The head includes the standardisation of the
    features. The logits of the head are scaled to maximise the mean log-probability of the labels
    under the leave-one-out predictions, within the limits of `fit_temperature`.
    """
    from sklearn.linear_model import (
        RidgeCV,
    )  # imported here because the import is slow and prediction does not need it
    from sklearn.preprocessing import StandardScaler

    num = len(labels)
    scaler: Any = StandardScaler().fit(features)
    points = np.asarray(scaler.transform(features.astype(np.float64)))
    targets = np.eye(num_classes)[labels]
    ridge: Any = RidgeCV([penalty * num for penalty in HEAD_PENALTIES]).fit(points, targets)
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
    executor: Executor, frozen: FrozenFeatures, split: Split, feed: Feed, batch_size: int
) -> Float[np.ndarray, "N D"]:
    """Compute the frozen backbone's features of a split. If the router reads the same features, the
    router's cache is used."""
    if frozen.ends(executor):
        return frozen(split.images)
    networks = [base_network(executor)]
    return network_features(executor, networks, feed, len(split.labels), batch_size=batch_size)[0]


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


def closed_form_score(
    executor: Executor,
    supernet: Supernet,
    state: SupernetState,
    *,
    train: Feed,
    train_labels: Int[np.ndarray, "N"],
    val: Feed,
    val_labels: Int[np.ndarray, "M"],
    batch_size: int,
    advance: Advance = no_progress,
) -> Score:
    """Make a score function that fits a closed-form head to each candidate of the search.

    The function maps genomes `[P, L]` to numbers of correct predictions `[P]` on N training and M
    validation images. Each training image is predicted by a head fitted to all other training
    images; validation images are predicted by the head fitted to all training images. Features are
    computed with the supernet's weights; the supernet's head is not used.
    """
    merged: dict[Place, Expert] = {}
    num_train = len(train_labels)
    num_outputs = next_power_of_two(supernet.num_classes)
    labels = np.concatenate([train_labels, val_labels])
    # pad to a power of two so that tasks share compiled functions; a label of -1 is never correct
    padding = next_power_of_two(len(labels)) - len(labels)
    padded = np.pad(labels, (0, padding), constant_values=-1)
    fitted = np.arange(len(padded)) < num_train

    def score(genomes: np.ndarray) -> np.ndarray:
        correct = np.zeros(len(genomes))
        for part in _parts(genomes, 4 * len(labels) * executor.config.width):
            networks = [dense_network(supernet, state, genomes[index], merged) for index in part]
            features = np.concatenate(
                [
                    features_spread(
                        executor, networks, feed, num, batch_size=batch_size, advance=advance
                    )
                    for feed, num in ((train, num_train), (val, len(val_labels)))
                ],
                axis=1,
            )
            for index, rows in zip(part, features, strict=True):
                rows = np.pad(rows, ((0, padding), (0, 0)))
                fit = fit_head(
                    rows, padded, fitted, np.int32(supernet.num_classes), num_outputs=num_outputs
                )
                correct[index] = int(fit.left_out) + int(fit.held_out)
        return correct

    return score


def _parts(genomes: Int[np.ndarray, "P L"], bytes_each: int) -> Iterator[Sequence[int]]:
    """Divide genomes into parts whose features have at most `FEATURE_BYTES`, and yield the indices
    of each part.

    The genomes are sorted first. Genomes with the same first genes therefore tend to be in the same
    part, where their shared blocks run once per batch.
    """
    order = sorted(range(len(genomes)), key=lambda index: genomes[index].tolist())
    size = max(FEATURE_BYTES // bytes_each, 1)
    for start in range(0, len(order), size):
        yield order[start : start + size]
