"""EASE: adapters and a subspace per task; prototypes of earlier classes are synthesised.

Each task trains new adapters, which then stay frozen. The features with the adapters of one task
are a subspace. The prototype of a class in a subspace is the mean of the class's features in this
subspace. In a new subspace, the features of earlier classes cannot be computed, because images of
earlier tasks are not stored. The prototype of an earlier class in a new subspace is therefore a sum
of the prototypes of the new and all later classes, weighted by the similarity of these classes to
the earlier class in the subspace of the earlier class. A prediction runs the image through the
backbone with the adapters of each task. Zhou et al., "Expandable Subspace Ensemble for Pre-Trained
Model-Based Class-Incremental Learning", CVPR 2024.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import scipy.special
from jaxtyping import Float

from cheem_jax.baselines.adapters import (
    SGD,
    AdapterBaseline,
    AdapterConfig,
    Bottleneck,
    adapted_features,
    adapter_params,
    padded_columns,
    unit,
)
from cheem_jax.baselines.baseline import params_report
from cheem_jax.baselines.fitting import Fitting, Inputs
from cheem_jax.core.images import Images
from cheem_jax.core.routing import normalise
from cheem_jax.core.settings import FitConfig
from cheem_jax.data.task import Task
from cheem_jax.engine import hosts
from cheem_jax.run.session import Session

OTHERS = 0.1
"""Weight, in a class's logit, of the mean cosine over the subspaces of the tasks without this
class. A subspace is the features with one task's adapters. The EASE paper calls the weight alpha;
the official code divides alpha by the number of these subspaces."""


@dataclasses.dataclass(frozen=True)
class EaseConfig(AdapterConfig):
    """Settings of EASE; its optimizer is SGD (momentum 0.9, weight decay 5e-4)."""

    name: ClassVar[str] = "ease"
    fit: FitConfig = FitConfig(epochs=20, learning_rate=0.05)


class EaseTask(NamedTuple):
    """Adapters of a task, and the prototypes of its classes in the subspaces of this task and all
    earlier tasks. A task's subspace is the features with the task's adapters."""

    adapters: Bottleneck
    prototypes: Float[np.ndarray, "S C D"]


class Ease(AdapterBaseline):
    """The EASE learner."""

    Learned = EaseTask
    config: EaseConfig

    def build(self) -> None:
        super().build()
        executor = self.executor

        @executor.jit
        def similarities(adapters, weight, leaves, inputs):
            features = adapted_features(executor.merge_vit(leaves), adapters, inputs["images"])
            return unit(features) @ weight

        self.fitter = self.cosine_fitter(SGD)
        self._similarities = similarities

    def start(self, task: Task) -> Any:
        """Return new adapters, a cosine head and its scale. Predictions do not use this head."""
        return self.new_classifier(task)

    def fixed(self, task: Task) -> Any:
        """Return the backbone, 0 as the number of earlier classes, and the number of the task's
        classes. The training head has no columns for earlier classes."""
        return self.executor.leaves, np.int32(0), np.int32(len(task.classes))

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the adapters, and the prototypes of the task's classes in all subspaces."""
        num = len(task.classes)
        labels = task.train.labels
        adapters = fitting.learned[0]
        bank = [*(earlier.adapters for earlier in self.tasks), adapters]
        with session.phase("prototypes", len(bank) * len(labels), fitting.saved) as advance:
            prototypes = []
            for each in bank:
                features = self.features_with(each, task.train.images, advance)
                means = [features[labels == c].mean(axis=0, dtype=np.float64) for c in range(num)]
                prototypes.append(np.stack(means).astype(np.float32))
        self.tasks.append(EaseTask(adapters, np.stack(prototypes)))
        added = adapter_params(self.vit, self.config.bottleneck)
        return params_report(
            self.vit,
            added=added,
            learned=added + 1 + self.vit.width * num,
            stored=added + self.tasks[-1].prototypes.size,
        )

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image after the whole stream: one pass per task."""
        passes = max(self.num_tasks, len(self.tasks))
        costs = self.adapted_costs(self.classes.num)
        return {count: passes * flops for count, flops in costs.items()}

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes of the prototypes."""
        return 4 * (len(self.tasks) + 1) * len(task.classes) * self.vit.width

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        """Compute the weighted sum, over all subspaces, of the cosines between the image's features
        and the prototypes of the classes."""
        bank = [task.adapters for task in self.tasks]
        weights = [
            padded_columns(weight)
            for weight in classifiers([task.prototypes for task in self.tasks])
        ]

        def run(bank, weights, *rest: Any) -> Float[np.ndarray, "N P"]:
            parts = [self._similarities(*part, *rest) for part in zip(bank, weights, strict=True)]
            return np.sum(hosts.fetch(parts), axis=0)

        return self.over(run, Inputs(images), bank, weights, self.executor.leaves)


def classifiers(
    prototypes: Sequence[Float[np.ndarray, "_ _ D"]],
) -> list[Float[np.ndarray, "D C"]]:
    """Return, for each subspace, the weights of all classes; `prototypes` contains the prototypes
    of each task.

    The weight of a class in a subspace is the scaled prototype of the class in this subspace. Its
    length is 1 in the subspace of the class's own task. In each other subspace, its length is
    `OTHERS` divided by the number of other subspaces.
    """
    share = OTHERS / max(len(prototypes) - 1, 1)
    return [
        np.concatenate(
            [
                (1 if task == subspace else share)
                * normalise(in_subspace(prototypes, task, subspace))
                for task in range(len(prototypes))
            ]
        ).T
        for subspace in range(len(prototypes))
    ]


def in_subspace(
    prototypes: Sequence[Float[np.ndarray, "_ _ D"]], task: int, subspace: int
) -> Float[np.ndarray, "C D"]:
    """Return the prototypes of a task's classes in a subspace. In the subspace of a later task,
    they are synthesised from the prototypes of the classes of that task and of all tasks after it,
    as in the official code with `recalc_sim`."""
    if subspace <= task:
        return prototypes[task][subspace]
    later = prototypes[subspace:]
    return synthesised(
        prototypes[task][task],
        np.concatenate([measured[task] for measured in later]),
        np.concatenate([measured[subspace] for measured in later]),
    )


def synthesised(
    earlier: Float[np.ndarray, "C D"],
    later: Float[np.ndarray, "K D"],
    later_new: Float[np.ndarray, "K D"],
) -> Float[np.ndarray, "C D"]:
    """Synthesise the prototypes of C earlier classes in a new subspace (EASE paper, section 3.3).

    Args:
        earlier: prototypes of the earlier classes in their own subspace.
        later: prototypes of K later classes in the subspace of the earlier classes.
        later_new: prototypes of the later classes in the new subspace.

    Returns:
        Sums of `later_new`, weighted by the softmax of the cosines between `earlier` and `later`.
    """
    cosines = normalise(earlier) @ normalise(later).T
    return scipy.special.softmax(cosines, axis=1) @ later_new
