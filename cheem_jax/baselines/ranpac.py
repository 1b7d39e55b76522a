"""RanPAC: adapters of the first task, and a ridge head on random features of all tasks.

Adapters parallel to every FFN are trained on the first task and then stay frozen. Every image is
mapped to random features: the ReLU of a random projection of the image's features with adapters.
The head is ridge regression on the random features. The second moments of the random features are
sums over images, so learning tasks one by one yields the same head as a regression with the same
penalty on the images of all tasks. McDonnell et al., "RanPAC: Random Projections and Pre-trained
Models for Continual Learning", NeurIPS 2023.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
import scipy.linalg
from jaxtyping import Float

from cheem_jax.baselines.adapters import (
    SGD,
    AdapterBaseline,
    AdapterConfig,
    Bottleneck,
    adapter_params,
)
from cheem_jax.baselines.baseline import MUCH_MEMORY, at_least_one, params_report
from cheem_jax.baselines.fitting import Fitting, Init
from cheem_jax.baselines.ridge import moments_and_penalty, ridge_factor, ridge_logits
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, order_at
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session


@dataclasses.dataclass(frozen=True)
class RanPacConfig(AdapterConfig):
    """Settings of RanPAC; its optimizer is SGD (momentum 0.9, weight decay 5e-4)."""

    name: ClassVar[str] = "ranpac"
    fit: FitConfig = FitConfig(epochs=20, learning_rate=0.01)
    """Settings for training the adapters on the first task."""
    hidden: int = 10_000
    """Number of random features (RanPAC paper: 10,000); memory and checkpoints are proportional to
    the square of this number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "hidden")


class RanPacState(NamedTuple):
    """Arrays that each task replaces; `moments`, `products` and `weight` are float64 on the
    host."""

    adapters: Bottleneck
    projection: Float[np.ndarray, "H D"]
    moments: Float[np.ndarray, "M"]
    """Upper triangle of the random features' second moments, summed over all images; see `pack`."""
    products: Float[np.ndarray, "H C"]
    """Sum of the random features of each class."""
    weight: Float[np.ndarray, "H C"]


class RanPac(AdapterBaseline):
    """The RanPAC learner."""

    State = RanPacState
    config: RanPacConfig

    def build(self) -> None:
        super().build()
        self.fitter = self.cosine_fitter(SGD)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        hidden = self.config.hidden
        num_classes = sum(len(task.classes) for task in tasks)
        # three arrays of second moments (of the fitted images, of the held-out images, and of a
        # step), and two packed arrays of half the size
        needed = 8 * hidden * (4 * hidden + 3 * num_classes)
        if needed <= MUCH_MEMORY:
            return []
        return [
            f"{hidden} random features take up to {needed / 2**30:.1f} GiB of memory on the host"
        ]

    def start(self, task: Task) -> Any:
        """Return new adapters, a cosine head and its scale for the first task; for later tasks,
        return only the frozen adapters."""
        return self.state.adapters if self.state else self.new_classifier(task)

    def fixed(self, task: Task) -> Any:
        """Return the backbone, 0 as the number of earlier classes, and the number of the task's
        classes; only the first task is trained."""
        return self.executor.leaves, np.int32(0), np.int32(len(task.classes))

    def train(self, task: Task, fitting: Fitting, session: Session) -> Fitting:
        """Train the adapters on the first task; for later tasks, return `fitting` unchanged."""
        return fitting if self.state else super().train(task, fitting, session)

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Add the task's images to the second moments of the random features, and solve the
        regression on the images of all tasks."""
        state = self.state
        num = len(task.classes)
        width = self.vit.width
        hidden = self.config.hidden
        labels = task.train.labels
        adapters = state.adapters if state else fitting.learned[0]
        projection = state.projection if state else self._projection(task)
        with session.phase("features", len(labels), fitting.saved) as advance:
            features = self.features_with(adapters, task.train.images, advance)
        with session.phase("head", len(labels), fitting.saved) as advance:
            moments, products, penalty = moments_and_penalty(
                features,
                labels,
                num,
                projection,
                order_at(self.key(task, Phase.ALIGNMENT_ORDER), len(labels)),
                advance,
            )
            packed = pack(moments)
            if state:
                packed += state.moments
                products = np.concatenate([state.products, products], axis=1)
                moments = unpack(packed, hidden)
            factor, penalty = ridge_factor(moments, penalty)
            weight = scipy.linalg.cho_solve(factor, products)
        self.state = RanPacState(adapters, projection, packed, products, weight)
        added = 0 if state else adapter_params(self.vit, self.config.bottleneck)
        trained = 0 if state else added + 1 + width * num
        fixed = 0 if state else added + hidden * width + packed.size
        report = params_report(
            self.vit,
            added=added,
            learned=trained + weight.size,
            stored=fixed + 2 * hidden * num,
        )
        return {**report, "ridge": penalty}

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image of one pass with adapters, of the random features, and of the
        head."""
        hidden = self.config.hidden
        return self.adapted_costs(0, head=2 * hidden * (self.vit.width + self.classes.num))

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes of the projection and of the regression's arrays."""
        hidden = self.config.hidden
        num = self.classes.num + len(task.classes)
        return 4 * hidden * self.vit.width + 8 * (hidden * (hidden + 1) // 2 + 2 * hidden * num)

    def logits(self, images: Images) -> Float[np.ndarray, "N C"]:
        """Compute the logits of the regression."""
        features = self.features_with(self.state.adapters, images)
        return ridge_logits(features, self.state.projection, self.state.weight)

    def _projection(self, task: Task) -> Float[np.ndarray, "H D"]:
        """Sample the random projection from a standard normal distribution."""
        key = self.key(task, Phase.METHOD_INIT, Init.EXTRA)
        return np.asarray(jax.random.normal(key, (self.config.hidden, self.vit.width)))


def pack(moments: Float[np.ndarray, "H H"]) -> Float[np.ndarray, "M"]:
    """Concatenate the rows of a symmetric array, each starting at its diagonal element."""
    return np.concatenate([row[number:] for number, row in enumerate(moments)])


def unpack(packed: Float[np.ndarray, "M"], hidden: int) -> Float[np.ndarray, "H H"]:
    """Return the symmetric array that `pack` converts to `packed`."""
    moments = np.empty((hidden, hidden))
    begin = 0
    for number in range(hidden):
        row = packed[begin : begin + hidden - number]
        moments[number, number:] = row
        moments[number:, number] = row
        begin += len(row)
    return moments
