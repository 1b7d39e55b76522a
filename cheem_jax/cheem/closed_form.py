"""The accuracy of a linear head on given features: ridge regression with exact leave-one-out, in
closed form.

The supernet's head is a compromise between all sampled architectures, and its accuracy hardly ranks
them. Here every architecture is scored by the best ridge head on its features, without a gradient
step.
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
from cheem_jax.core.pool import Head, logits_of
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor, Place
from cheem_jax.engine.feed import Feed
from cheem_jax.engine.passes import unwatched
from cheem_jax.engine.spread import features_spread

PENALTIES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Ridge penalties to select from, per image; features are standardised."""

FEATURE_BYTES = 2**28
"""Bytes of features in memory at a time, for any number of candidates."""


class HeadFit(NamedTuple):
    """Correct predictions of a closed-form head, and its penalty."""

    left_out: Int[Array, ""]
    """Fitted images that the head fitted to all others classifies correctly."""
    held_out: Int[Array, ""]
    """Labelled images outside of the fit that are classified correctly."""
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
    """Fit a ridge regression of one-hot labels on standardised features, with the penalty of the
    best leave-one-out accuracy.

    Args:
        fitted: images that the head is fitted to, at least two; the others count in `held_out`
            unless their label is -1.
        labels: in [0, num_classes).
        num_outputs: number of classes with padding, so that few compiled functions serve all tasks.

    Of equally good penalties the larger one is selected. Leave-one-out predictions follow from one
    fit: with the leverage h of an image, its residual without the image is the residual divided by
    1 - h. Mean and scale of the features are those of all fitted images; the intercept is left out
    with its image.
    """
    with jax.default_matmul_precision("highest"):
        mask = fitted[:, None].astype(jnp.float32)
        num = mask.sum()
        x = features.astype(jnp.float32)
        x = x - (x * mask).sum(0) / num
        deviation = jnp.sqrt((x * x * mask).sum(0) / num)
        # a constant feature has no information; divided by its deviation, its rounding errors would
        # be a feature
        x = x * jnp.where(deviation > 1e-6, 1 / jnp.maximum(deviation, 1e-6), 0.0)
        y = jax.nn.one_hot(labels, num_outputs)
        share = (y * mask).sum(0) / num
        # in the eigenvectors of the Gram matrix, every penalty is a division
        eigenvalues, vectors = jnp.linalg.eigh((x * mask).T @ x)
        z = x @ vectors
        moments = (z * mask).T @ (y - share)

        def right(penalty):
            shrunk = jnp.maximum(eigenvalues, 0.0) + penalty * num
            answers = z @ (moments / shrunk[:, None]) + share
            leverage = 1 / num + (z * z / shrunk).sum(1)
            # y - r / (1 - h) without the image; other images are predicted by the whole fit
            alone = y - (y - answers) / jnp.maximum(1 - leverage, 1e-6)[:, None]
            logits = jnp.where(fitted[:, None], alone, answers)
            logits = jnp.where(jnp.arange(num_outputs) < num_classes, logits, -jnp.inf)
            is_right = (logits.argmax(1) == labels) & jnp.isfinite(features).all()
            return (is_right & fitted).sum(), (is_right & ~fitted).sum()

        # largest first: `argmax` returns the first of equal values
        penalties = jnp.asarray(sorted(PENALTIES, reverse=True), jnp.float32)
        left_out, held_out = jax.lax.map(right, penalties)
        best = left_out.argmax()
        return HeadFit(left_out[best], held_out[best], penalties[best])


HEAD_PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Ridge penalties of `ridge_head`, per image; few images per class need larger ones than scores."""


def ridge_head(
    features: Float[np.ndarray, "N D"], labels: Int[np.ndarray, "N"], num_classes: int
) -> tuple[Head, float]:
    """Fit a ridge head for raw features by the least leave-one-out squared error; returns the head
    and its penalty per image.

    The standardisation of the features is part of the head. Logits are scaled so that the softmax
    of the leave-one-out predictions has the best mean log-probability, within the limits of
    `fit_temperature`.
    """
    from sklearn.linear_model import (
        RidgeCV,
    )  # slow to import, and commands that only predict never call this
    from sklearn.preprocessing import StandardScaler

    num = len(labels)
    scaler: Any = StandardScaler().fit(features)
    points = np.asarray(scaler.transform(features.astype(np.float64)))
    targets = np.eye(num_classes)[labels]
    ridge: Any = RidgeCV([penalty * num for penalty in HEAD_PENALTIES]).fit(points, targets)
    gram = points.T @ points + ridge.alpha_ * np.eye(points.shape[1])
    leverage = 1 / num + (points.T * np.linalg.solve(gram, points.T)).sum(axis=0)
    alone = targets - (targets - ridge.predict(points)) / np.maximum(1 - leverage, 1e-6)[:, None]
    # targets are 0 and 1, so the predictions are closer together than logits
    scale = RIDGE_SCALE / fit_temperature(RIDGE_SCALE * alone, labels)
    weight = scale * (ridge.coef_ / scaler.scale_).T
    bias = scale * ridge.intercept_ - scaler.mean_ @ weight
    return Head(jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32)), float(
        ridge.alpha_ / num
    )


RIDGE_SCALE = 20.0
"""Logits per unit of a one-hot target, before their temperature is fitted."""


class HeadComparison(NamedTuple):
    """A learned network next to the frozen backbone with a ridge head; pairs are in this order."""

    head: Head
    """The ridge head."""
    penalty: float
    """Penalty of the ridge head, per training image."""
    num_images: int
    """Validation images."""
    correct: Sequence[float]
    """Correct predictions on them."""
    log_probability: Sequence[float]
    """Mean log-probability of the true class, each with the temperature fitted to the images."""

    @property
    def is_frozen_better(self) -> bool:
        """Compare correct predictions; equal numbers are common with few images, and then the
        log-probability decides."""
        learned, frozen = zip(self.correct, self.log_probability, strict=True)
        return frozen > learned

    def report(self, fallback: bool) -> dict[str, Any]:
        """Return JSON values; accuracies are in [0, 1]."""
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
    """Compare a learned network, by its features of the validation images and its head, with a
    ridge head on the frozen backbone's features."""
    labels = task.val.labels
    frozen, penalty = ridge_head(frozen_train, task.train.labels, len(task.classes))
    correct, log_probability = zip(
        fitted(logits_of(features, head), labels),
        fitted(logits_of(frozen_val, frozen), labels),
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
    advance: Advance = unwatched,
) -> Score:
    """Make the search's fitness with a closed-form head per candidate: it maps genomes `[P, L]` to
    correct predictions `[P]` of N + M.

    Each training image is predicted by the head fitted to all others, validation images by the head
    fitted to the training images. Features are computed with the supernet's weights; its head is
    not used.
    """
    merged: dict[Place, Expert] = {}
    num_train = len(train_labels)
    num_outputs = next_power_of_two(supernet.num_classes)
    labels = np.concatenate([train_labels, val_labels])
    # padded, so that few compiled functions serve all tasks; a label of -1 is never correct
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
    """Divide genomes into parts whose features fit into `FEATURE_BYTES`; those with a common
    beginning are in the same part."""
    order = sorted(range(len(genomes)), key=lambda index: genomes[index].tolist())
    size = max(FEATURE_BYTES // bytes_each, 1)
    for start in range(0, len(order), size):
        yield order[start : start + size]
