"""MoAL: slowly changing adapters, and a closed-form head on random features.

Adapters parallel to every FFN are trained on all tasks in turn with an auxiliary cosine head.
Starting with the second task, predictions use a moving average of the adapters. The predicting head
is ridge regression on random features; recursive least squares adds each task's images without
those of earlier tasks. After each task, the means of earlier classes are corrected for the drift of
the features. "Rumination" shifts new features to the means of earlier classes; the head is then
updated again with the new and shifted features that the head classifies wrongly. Gao et al.,
"Knowledge Memorization and Rumination for Pre-trained Model-based Class-Incremental Learning",
CVPR 2025.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from cheem_jax.baselines.adapters import (
    AdapterBaseline,
    AdapterConfig,
    Bottleneck,
    adapter_params,
    padded_columns,
)
from cheem_jax.baselines.baseline import MUCH_MEMORY, at_least_one, params_report
from cheem_jax.baselines.fitting import Fitting, Init, numbered, unnumbered
from cheem_jax.baselines.ridge import (
    lift,
    moments_and_penalty,
    one_hot,
    ridge_inverse,
    ridge_logits,
    steps,
)
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.routing import normalise
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session

DRIFT_PENALTIES = tuple(10.0**power for power in range(-6, 3))
"""Candidate penalties on the distance between the identity and the drift map, a linear map from the
features before a task to the features after it. A penalty is multiplied by the mean diagonal
element of the features' second moments."""
FIRST_SCALE = 0.9
"""Factor by which the weight of the analytic (closed-form) head is multiplied after the first task,
as in the official code."""
EMA = 0.999
"""Weight of the previous average when adapters are averaged after each epoch, starting with the
second task."""


class MoalOrder(enum.IntEnum):
    """Shuffled orders that are sampled in `Phase.ALIGNMENT_ORDER`. The number of a member is part
    of its PRNG key, so new members are appended."""

    RIDGE = 0
    """Images of the first task; the last fifth is held out to select the penalty."""
    RUMINATION = 1
    DRIFT = 2
    """Images of the new task; the last tenth is held out to select the penalty."""


@dataclasses.dataclass(frozen=True)
class MoalConfig(AdapterConfig):
    """Settings of MoAL; its optimizer is Adam, as in the CHEEM paper's comparison."""

    name: ClassVar[str] = "moal"
    hidden: int = 5000
    """Number of random features of the predicting head (official: 5000 to 20000); the memory of the
    head is proportional to the square of this number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "hidden")


class Analytic(NamedTuple):
    """The predicting head in float64 on the host; its logits are random features times `weight`.

    `inverse` is the inverse of a sum: the second moments of the random features of all images that
    were learned, once more for each repetition in rumination, plus the ridge penalty.
    """

    inverse: Float[np.ndarray, "H H"]
    weight: Float[np.ndarray, "H C"]


class MoalState(NamedTuple):
    """Arrays that each task replaces."""

    adapters: Bottleneck
    auxiliary: Float[np.ndarray, "D C"]
    """Weight of the auxiliary cosine head."""
    sigma: jax.Array
    projection: Float[np.ndarray, "H D"]
    analytic: Analytic
    means: Float[np.ndarray, "C D"]


class Moal(AdapterBaseline):
    """The MoAL learner."""

    State = MoalState
    config: MoalConfig

    def build(self) -> None:
        super().build()
        executor = self.executor

        @executor.jit
        def average(old, new):
            return jax.tree.map(lambda a, b: EMA * a + (1 - EMA) * b, old, new)

        self.fitter = self.cosine_fitter()
        self._average = average

    def check(self, tasks: Sequence[Task]) -> list[str]:
        hidden = self.config.hidden
        num_classes = sum(len(task.classes) for task in tasks)
        # `ridge_inverse` has the most arrays of the shape `[hidden, hidden]`: the moments, their
        # factor, the inverse, and the symmetric inverse.
        needed = 8 * hidden * (4 * hidden + 2 * num_classes)
        if needed <= MUCH_MEMORY:
            return []
        return [
            f"{hidden} random features need up to {needed / 2**30:.1f} GiB of memory on the host"
        ]

    def start(self, task: Task) -> tuple[Bottleneck, jax.Array, jax.Array]:
        """Return the adapters, the auxiliary head with columns for the new classes, and the scale
        of this head."""
        state = self.state
        if not state:
            return self.new_classifier(task)
        columns = np.concatenate([state.auxiliary, self.new_columns(task)], axis=1)
        return state.adapters, padded_columns(columns), jnp.asarray(state.sigma)

    def fixed(self, task: Task) -> Any:
        """Return the backbone, the number of classes of the earlier tasks, and the number of
        classes including the new task."""
        num_old = self.classes.num
        return self.executor.leaves, np.int32(num_old), np.int32(num_old + len(task.classes))

    def after_epoch(self, fitting: Fitting) -> Fitting:
        """Update the averaged adapters, starting with the second task. The average starts with the
        previous task's adapters."""
        if not self.state:
            return fitting
        before = self.state.adapters
        if "averaged" in fitting.more:
            before = unnumbered(before, fitting.more["averaged"])
        averaged = numbered(self._average(before, fitting.learned[0]))
        return fitting._replace(more={"averaged": averaged})

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the averaged adapters and the auxiliary head, and update the analytic head."""
        state = self.state
        num_old = self.classes.num
        num = len(task.classes)
        images = task.train.images
        labels = task.train.labels
        adapters, auxiliary, sigma = fitting.learned
        if state:
            adapters = unnumbered(adapters, fitting.more["averaged"])
        total = len(labels) * (2 if state else 1)
        with session.phase("features", total, fitting.saved) as advance:
            new = self.features_with(adapters, images, advance)
            old = self.features_with(state.adapters, images, advance) if state else new
        with session.phase("head"):
            means = np.stack(
                [new[labels == c].mean(axis=0, dtype=np.float64) for c in range(num)]
            ).astype(np.float32)
            if state:
                order = order_at(
                    self.key(task, Phase.ALIGNMENT_ORDER, MoalOrder.DRIFT), len(labels)
                )
                old_means = (state.means @ drift_map(old[order], new[order])).astype(np.float32)
                means = np.concatenate([old_means, means])
        rumination = shifted_sources(labels + np.int32(num_old), means, num_old)
        total = len(labels) + (len(rumination[0]) if state else 0)
        with session.phase("head", total, fitting.saved) as advance:
            if state:
                projection = state.projection
                analytic, report = self._next_head(task, new, means, rumination, advance)
            else:
                projection = self._projection(task)
                analytic, penalty = self._first_head(projection, new, task, advance)
                report = {"ridge": penalty}
        auxiliary = np.asarray(auxiliary)[:, : num_old + num]
        self.state = MoalState(adapters, auxiliary, sigma, projection, analytic, means)
        width = self.vit.width
        hidden = self.config.hidden
        added = adapter_params(self.vit, self.config.bottleneck)
        stored = (0 if state else added + 1 + hidden * (width + hidden)) + (
            2 * width + hidden
        ) * num
        learned = added + 1 + (width + hidden) * (num_old + num)
        return {
            **report,
            **params_report(
                self.vit,
                added=0 if state else added,
                learned=learned,
                stored=stored,
            ),
        }

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image; the CHEEM paper counts only a plain pass without adapters and
        head."""
        hidden = self.config.hidden
        return self.adapted_costs(0, head=2 * hidden * (self.vit.width + self.classes.num))

    def _projection(self, task: Task) -> Float[np.ndarray, "H D"]:
        """Sample the random projection uniformly in +-1/sqrt(D)."""
        width = self.vit.width
        bound = width**-0.5
        key = self.key(task, Phase.METHOD_INIT, Init.EXTRA)
        shape = (self.config.hidden, width)
        return np.asarray(jax.random.uniform(key, shape, minval=-bound, maxval=bound))

    def _first_head(
        self, projection: np.ndarray, features: np.ndarray, task: Task, advance: Advance
    ) -> tuple[Analytic, float]:
        """Fit the head to the first task. Return the head and the penalty."""
        moments, products, penalty = moments_and_penalty(
            features,
            task.train.labels,
            len(task.classes),
            projection,
            order_at(self.key(task, Phase.ALIGNMENT_ORDER, MoalOrder.RIDGE), len(features)),
            advance,
        )
        inverse, penalty = ridge_inverse(moments, penalty)
        return Analytic(inverse, FIRST_SCALE * (inverse @ products)), penalty

    def _next_head(
        self,
        task: Task,
        features: np.ndarray,
        means: np.ndarray,
        rumination: tuple[np.ndarray, np.ndarray],
        advance: Advance,
    ) -> tuple[Analytic, dict[str, Any]]:
        """Update the head by recursive least squares, first on the features of the new task, then
        on the features for rumination that the head classifies wrongly.

        `rumination` is the result of `shifted_sources`. Returns the head, and a report with two
        numbers: the number of features for rumination, and how many of these features were
        classified wrongly.
        """
        state = self.state
        num_old = self.classes.num
        num = len(means)
        labels = task.train.labels + np.int32(num_old)
        # copies, because the stored head must not change before the task is learned
        columns = np.zeros((self.config.hidden, num - num_old))
        weight = np.concatenate([state.analytic.weight, columns], axis=1)
        analytic = Analytic(state.analytic.inverse.copy(), weight)
        for part in steps(np.arange(len(labels))):
            lifted = lift(features[part], state.projection)
            least_squares(analytic, lifted, one_hot(labels[part], num))
            advance(len(part))
        sources, classes = rumination
        shifts = np.zeros_like(means)
        shifts[:num_old] = means[:num_old] - means[nearest_new(means, num_old)]
        wrong = 0
        order = order_at(self.key(task, Phase.ALIGNMENT_ORDER, MoalOrder.RUMINATION), len(sources))
        for part in steps(order):
            part_classes = classes[part]
            lifted = lift(features[sources[part]] + shifts[part_classes], state.projection)
            is_wrong = (lifted @ analytic.weight).argmax(axis=1) != part_classes
            if is_wrong.any():
                least_squares(analytic, lifted[is_wrong], one_hot(part_classes[is_wrong], num))
            wrong += int(is_wrong.sum())
            advance(len(part))
        inverse = (analytic.inverse + analytic.inverse.T) / 2
        report = {"ruminated": len(sources), "ruminated_wrong": wrong}
        return Analytic(inverse, analytic.weight), report

    def bytes_beside(self, task: Task) -> int:
        """Return the number of bytes of the analytic head with its projection, of the means of all
        classes, and of the averaged adapters."""
        vit = self.vit
        hidden = self.config.hidden
        num = self.classes.num + len(task.classes)
        averaged = 2 * adapter_params(vit, self.config.bottleneck)
        return 8 * hidden * (hidden + num) + 4 * (hidden * vit.width + vit.width * num + averaged)

    def logits(self, images: Images) -> Float[np.ndarray, "N C"]:
        """Compute the logits of the analytic head."""
        state = self.state
        features = self.features_with(state.adapters, images)
        return ridge_logits(features, state.projection, state.analytic.weight)


def least_squares(
    analytic: Analytic, lifted: Float[np.ndarray, "N H"], targets: Float[np.ndarray, "N C"]
) -> None:
    """Update `analytic` in place with additional images, by a step of recursive least squares.

    The result is identical to a regression on all images, up to rounding. With Woodbury's identity,
    the step requires only the Cholesky factor of an N x N matrix.
    """
    inverse, weight = analytic
    gain = lifted @ inverse  # [N, H]
    lower = np.linalg.cholesky(np.eye(len(lifted)) + gain @ lifted.T)
    half = scipy.linalg.solve_triangular(lower, gain, lower=True)
    residual = scipy.linalg.solve_triangular(lower, targets - lifted @ weight, lower=True)
    inverse -= half.T @ half  # the decrement is exactly symmetric and positive semidefinite
    weight += half.T @ residual


def drift_map(
    old: Float[np.ndarray, "N D"], new: Float[np.ndarray, "N D"]
) -> Float[np.ndarray, "D D"]:
    """Fit a linear map from the `old` to the `new` features of the same images.

    The fit is least squares with a penalty on the distance between the map and the identity,
    because features drift little, and a few images do not determine a map in many dimensions. The
    penalty is selected on the last tenth of the rows, which must be in shuffled order.
    """
    old, moved = old.astype(np.float64), new.astype(np.float64) - old
    num, width = old.shape
    cut = num * 9 // 10
    if not 0 < cut < num or not old.any():
        return np.eye(width)

    def fitted(rows: slice, penalty: float) -> np.ndarray:
        squares = old[rows].T @ old[rows]
        strength = penalty * np.trace(squares) / width
        return scipy.linalg.solve(
            squares + strength * np.eye(width), old[rows].T @ moved[rows], assume_a="pos"
        )

    def error(penalty: float) -> float:
        return float(((old[cut:] @ fitted(slice(cut), penalty) - moved[cut:]) ** 2).sum())

    best = min(DRIFT_PENALTIES, key=lambda penalty: (error(penalty), -penalty))
    return np.eye(width) + fitted(slice(None), best)


def nearest_new(means: Float[np.ndarray, "C D"], num_old: int) -> Int[np.ndarray, "S"]:
    """Return the new class with the most similar mean (by cosine) for each old class."""
    points = normalise(means)
    return num_old + (points[:num_old] @ points[num_old:].T).argmax(axis=1)


def shifted_sources(
    labels: Int[np.ndarray, "N"], means: Float[np.ndarray, "C D"], num_old: int
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """Return the row numbers of the images for rumination, and a class for each of these rows.

    Each image occurs once with its true class. It also occurs once with each old class whose
    nearest new class is the true class of the image.
    """
    images = {new: np.flatnonzero(labels == new) for new in range(num_old, len(means))}
    shifted = [images[new] for new in nearest_new(means, num_old)]
    old_classes = np.repeat(np.arange(num_old), [len(rows) for rows in shifted])
    sources = np.concatenate([np.arange(len(labels)), *shifted])
    return sources, np.concatenate([labels, old_classes]).astype(np.int32)
