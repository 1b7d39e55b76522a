"""EWC: the whole backbone is trained on every task, with a quadratic penalty on changes of weights
that are important for earlier tasks.

The importance of a weight for a task is the diagonal Fisher information after training. One network
and one head predict all classes, without task-ID inference. Kirkpatrick et al., "Overcoming
catastrophic forgetting in neural networks", PNAS 2017. The Fisher information is a running sum over
tasks, as in online EWC with gamma = 1: Schwarz et al., "Progress & Compress: A scalable framework
for continual learning", ICML 2018.
"""

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.baseline import (
    OneHead,
    TrainedBaseline,
    at_least_one,
    no_classes,
    params_report,
    pass_costs,
)
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs
from cheem_jax.baselines.heads import Classes, cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase
from cheem_jax.core.pool import FAR, Head, padded
from cheem_jax.core.settings import Advance, FitConfig, check_types
from cheem_jax.data.task import Task
from cheem_jax.engine.batches import batches
from cheem_jax.run.session import Session

TUNED_ON = 3
"""Number of tasks that are used to select the strength of the penalty; they are the first tasks of
the stream."""
HEAD_RATE = 1e-3
"""Initial learning rate of the head."""
GRADIENT_BYTES = 2**30
"""Memory limit in bytes for the gradients of a chunk of images. The gradient of each image is
separate and has the size of the backbone."""


class Noise(enum.IntEnum):
    """Random values that are sampled in `Phase.METHOD_NOISE`. The number of a member is part of its
    PRNG key."""

    LABELS = 1
    """Labels for estimating the Fisher information, sampled from the network's softmax."""


@dataclasses.dataclass(frozen=True)
class EwcConfig:
    """Settings of online EWC; the CHEEM paper does not report the strength of the penalty."""

    name: ClassVar[str] = "ewc"
    penalties: tuple[float, ...] = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
    """Candidate strengths of the penalty. The selected penalty has the highest validation accuracy,
    averaged over the first three tasks of the stream; predictions are among the classes of these
    tasks."""
    fit: FitConfig = FitConfig(epochs=20, learning_rate=5e-5)
    """Training settings; `fit.learning_rate` is the learning rate of the backbone."""
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size")
        if not self.penalties or not all(0 <= penalty < float("inf") for penalty in self.penalties):
            raise ValueError(
                f"penalties are {self.penalties}; expected at least one finite number of at least 0"
            )


class EwcState(NamedTuple):
    """Weights of the backbone, their Fisher information (0 before the first task), and the head."""

    backbone: list[Any]
    fisher: list[Any]
    head: Head
    """Columns of all learned classes without padding, on the host."""


class Ewc(OneHead, TrainedBaseline):
    """The online EWC learner."""

    State = EwcState
    config: EwcConfig

    def build(self) -> None:
        executor, config = self.executor, self.config
        self.penalty = config.penalties[0] if len(config.penalties) == 1 else None
        """Strength of the penalty; None before its selection."""
        self._first: list[Task] = []
        num_params = sum(leaf.size for leaf in executor.leaves)
        self.chunk = max(1, min(32, GRADIENT_BYTES // (4 * num_params)))
        """Number of images whose gradients are computed at once."""

        def logits(leaves, head, inputs):
            return head_logits(head, executor.merge_vit(leaves)(inputs["images"]))

        def loss(learned, fixed, batch: FitBatch):
            (leaves, head), (old_leaves, fisher, strength, num) = learned, fixed
            values = logits(leaves, head, batch.inputs)
            local = local_cross_entropy(values, batch.labels, batch.weights, 0, num)
            moved = sum(
                (f * (leaf - old) ** 2).sum()
                for leaf, old, f in zip(leaves, old_leaves, fisher, strict=True)
            )
            # Cross-entropy + lambda / 2 * sum F (theta - theta*)^2 (Kirkpatrick et al., eq. 3). As
            # in online EWC, F is the sum over tasks, and theta* is the weights after the previous
            # task.
            return local + 0.5 * strength * moved

        @functools.partial(executor.jit, donate_argnums=0)
        def add_fisher(sums, leaves, head, inputs, weights, rows, key, num):
            def log_likelihood(leaves, image, row):
                values = logits(leaves, head, {"images": image[None]})
                is_class = jnp.arange(values.shape[-1]) < num
                own_logits = jnp.where(is_class, jax.lax.stop_gradient(values[0]), FAR)
                label = jax.random.categorical(jax.random.fold_in(key, row), own_logits)
                return -local_cross_entropy(values, label[None], jnp.ones(1), 0, num)

            # Gradients are squared per image, because the square of the mean gradient is far
            # smaller than the mean of the squared gradients.
            new = squared_gradients(log_likelihood, leaves, weights, inputs["images"], rows)
            return jax.tree.map(jnp.add, sums, new)

        # The optimizer is Adam with a separate learning rate for the head.
        ratio = HEAD_RATE / config.fit.learning_rate
        adam = optax.chain(optax.scale_by_adam(), optax.masked(optax.scale(ratio), (False, True)))
        self.fitter = Fitter(loss, adam, jit=executor.jit, layout=executor.layout)
        self._add_fisher = add_fisher
        self._copy = executor.jit(lambda leaves: jax.tree.map(jnp.copy, leaves))
        self._answer = executor.jit(logits)
        leaves = list(executor.leaves)
        zeros = executor.jit(lambda leaves: jax.tree.map(jnp.zeros_like, leaves))(leaves)
        self.state = EwcState(leaves, zeros, no_classes(executor.config.width))

    def check(self, tasks: Sequence[Task]) -> list[str]:
        self._first = list(tasks[:TUNED_ON])
        num = len(self.config.penalties)
        if num == 1:
            return []
        if len(tasks) == 1:
            return [f"a single task needs no penalty, so none of the {num} penalties is selected"]
        names = ", ".join(task.name for task in self._first[1:])
        return [
            f"{names} are learned {num} times beforehand, to select one of {num} penalties on the"
            " validation split"
        ]

    def start(self, task: Task) -> tuple[list[Any], Head]:
        """Return the backbone's weights, and initial columns of the head for the task."""
        key = self.key(task, Phase.METHOD_INIT)
        return list(self.state.backbone), grow_head(key, None, self.vit.width, 0, len(task.classes))

    def fixed(self, task: Task) -> Any:
        """Return the backbone's weights after the previous task, their Fisher information, the
        strength of the penalty, and the number of the task's classes.

        Raises ValueError if the penalty cannot be selected.
        """
        if self.penalty is None and [first.name for first in self._first[:1]] != [task.name]:
            raise ValueError(
                f"ewc selects one of {len(self.config.penalties)} penalties on a stream's first"
                f" tasks, but `check` was not called with a stream that starts with {task.name!r};"
                " call check(tasks) first, or give one penalty"
            )
        strength = np.float32(self.penalty if self.classes.num else 0)
        return self.state.backbone, self.state.fisher, strength, np.int32(len(task.classes))

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the weights and the Fisher information; after the first task, select the
        penalty."""
        penalties = self.config.penalties
        before = self.state
        num = len(task.classes)
        report = {}
        with session.phase("fisher", len(task.train.labels), fitting.saved) as advance:
            fisher = self.add_fisher(before.fisher, fitting.learned, task, advance)
        leaves, new_head = fitting.learned
        head = jax.tree.map(
            lambda *parts: np.concatenate(parts, axis=-1), before.head, cut(new_head, num)
        )
        self.state = EwcState(leaves, fisher, head)
        if self.penalty is None and len(self._first) == 1:
            self.penalty = penalties[0]
        elif self.penalty is None:
            accuracies = self._tune(fitting, session)
            self.penalty = penalties[int(accuracies.argmax())]
            report["penalty_accuracies"] = dict(
                zip(map(str, penalties), accuracies.tolist(), strict=True)
            )
        vit = self.vit
        backbone = backbone_params(vit)
        head_params = (vit.width + 1) * num
        # The trained weights are not counted, because they replace the pretrained weights. The
        # Fisher information has the size of the backbone, and only the first task adds it. Later
        # tasks update its values.
        stored = head_params if self.classes.num else backbone + head_params
        return {
            **report,
            "penalty": self.penalty,
            **params_report(vit, added=0, learned=backbone + head_params, stored=stored),
        }

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes of the Fisher information and of the head's earlier columns."""
        earlier = (self.vit.width + 1) * self.classes.num
        return 4 * (backbone_params(self.vit) + earlier)

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image of one plain pass."""
        return pass_costs(self.vit, self.classes.num)

    def add_fisher(
        self, fisher: list[Any], learned: tuple[list[Any], Head], task: Task, advance: Advance
    ) -> list[jax.Array]:
        """Add the Fisher information of a trained task to the running sum."""
        num = len(task.train.labels)
        key = self.key(task, Phase.METHOD_NOISE, Noise.LABELS)
        pieces = list(batches(np.arange(num), self.chunk))
        read = Inputs(task.train.images).follow([piece.rows for piece in pieces])
        sums = self._copy(fisher)
        for piece, inputs in zip(pieces, read, strict=True):
            weights = piece.mask / np.float32(num)
            rows = piece.rows.astype(np.int32)
            sums = self._add_fisher(
                sums, *learned, inputs, weights, rows, key, np.int32(len(task.classes))
            )
            advance(piece.size)
        return jax.block_until_ready(sums)

    def _tune(self, fitting: Fitting, session: Session) -> Float[np.ndarray, "penalties"]:
        """Measure the mean validation accuracy with each penalty; the accuracy is -1 if a loss is
        non-finite.

        The first task has no penalty, so all trials start from the state after the first task. A
        trial uses the same PRNG keys as the later training on these tasks. Rolling checkpoints
        store the accuracies of finished trials.
        """
        first, *others = self._first
        untried = np.full(len(self.config.penalties), np.nan)
        accuracies = np.array(fitting.more.get("tried", untried), np.float64)
        fitting = fitting._replace(more={**fitting.more, "tried": accuracies})
        rest = np.flatnonzero(np.isnan(accuracies))
        total = sum((self.config.fit.epochs + 1) * len(task.train.labels) for task in others)
        with session.phase("penalty", len(rest) * total, fitting.saved) as advance:
            for place in rest:
                trial = copy.copy(self)
                trial.penalty = self.config.penalties[place]
                trial.classes = Classes([first.name], [first.classes])
                try:
                    for task in others:
                        trial.learn(task, Session(advance=advance))
                except FloatingPointError:
                    accuracies[place] = -1.0
                    continue
                accuracies[place] = np.mean(
                    [trial.accuracy(index, task) for index, task in enumerate(self._first)]
                )
        if accuracies.max() < 0:
            raise FloatingPointError(
                f"ewc: non-finite losses on the first {len(self._first)} tasks with each of the"
                f" penalties {self.config.penalties}; set a learning rate below"
                f" {self.config.fit.learning_rate}"
            )
        return accuracies

    def accuracy(self, index: int, task: Task) -> float:
        """Measure the task-agnostic accuracy in [0, 1] on the validation images of task `index`."""
        inferred = self.classes.inferred(self.logits(task.val.images))
        right = (inferred.tasks == index) & (inferred.classes == task.val.labels)
        return float(right.mean())

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        return self.over(self._answer, Inputs(images), self.state.backbone, padded(self.state.head))

    def meta(self) -> dict[str, Any]:
        """Return the strength of the penalty."""
        return {"penalty": self.penalty}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        super().restore(index, arrays, meta)
        self.penalty = meta["penalty"]


def squared_gradients(
    log_likelihood: Callable[..., jax.Array],
    params: Any,
    weights: Float[Array, "B"],
    *examples: Array,
) -> Any:
    """Sum the weighted squared gradients of `log_likelihood(params, *example)` over images.

    With labels sampled from the model and weights of 1/N for N images, the sum estimates the
    diagonal of the Fisher information.
    """
    grads = jax.vmap(jax.grad(log_likelihood), (None, *[0] * len(examples)))(params, *examples)
    return jax.tree.map(
        lambda g: (weights.reshape(-1, *[1] * (g.ndim - 1)) * g * g).sum(axis=0), grads
    )
