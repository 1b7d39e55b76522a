"""The upper bound: the whole backbone fine-tuned for each task on its own, the true task given.

Nothing is shared or remembered between tasks, so this is no continual learner. Adam, no weight decay; the learning rate
is swept on validation (1e-3 with Adam destroys a pretrained ViT).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cheem_jax.backbone.vit import ViT
from cheem_jax.data.task import Split, Task
from cheem_jax.execution.batches import batches, num_batches
from cheem_jax.execution.executor import masked_logits
from cheem_jax.execution.passes import Advance
from cheem_jax.images import in_turn
from cheem_jax.keys import Phase, key_at, next_power_of_two, order_at
from cheem_jax.supernet import init_head_learner
from cheem_jax.training import FitConfig, learning_rate_at


@dataclasses.dataclass(frozen=True)
class FullFinetuneConfig:
    """How the upper bound is trained."""

    epochs: int = 20
    """Passes over the training images."""
    learning_rates: tuple[float, ...] = (1e-5, 3e-5, 5e-5, 1e-4)
    """Rates tried per task; the best on the validation split is kept."""
    batch_size: int = 64

    def __post_init__(self) -> None:
        if not self.learning_rates:
            raise ValueError("learning_rates is empty; the upper bound needs at least one rate")


class UpperBound(NamedTuple):
    """Accuracies in [0, 1] at the chosen rate."""

    test_accuracy: float
    val_accuracy: float
    learning_rate: float


class FullFinetune:
    """Compiled steps of one backbone; every task starts again from the pretrained weights."""

    def __init__(self, vit: ViT, config: FullFinetuneConfig, key: jax.Array):
        self.config, self.key, self.vit_config = config, key, vit.config
        graphdef, self._start = nnx.split(vit)
        optimizer = optax.scale_by_adam()

        def mean_loss(params, images, labels, mask, num_classes):
            state, head = params
            logits = masked_logits(head, nnx.merge(graphdef, state)(images), num_classes)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return (losses * mask).sum() / mask.sum()

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, adam, rate, images, labels, mask, num_classes):
            loss, grads = jax.value_and_grad(mean_loss)(params, images, labels, mask, num_classes)
            updates, adam = optimizer.update(grads, adam)
            return jax.tree.map(lambda p, u: p - rate * u, params, updates), adam, loss

        @jax.jit
        def right(params, images, labels, mask, num_classes):
            state, head = params
            logits = masked_logits(head, nnx.merge(graphdef, state)(images), num_classes)
            return ((logits.argmax(axis=-1) == labels) & (mask > 0)).sum()

        @jax.jit
        def begin(state, head):
            # fresh buffers: the step donates its parameters, and the pretrained ones must survive
            params = jax.tree.map(jnp.copy, (state, head))
            return params, optimizer.init(params)

        self._step, self._right, self._begin = step, right, begin

    def learn(self, index: int, task: Task, advance: Advance) -> UpperBound:
        """Fine-tune for every rate; the test split is looked at with the chosen one only."""
        best, best_params = UpperBound(0.0, -1.0, 0.0), None
        for rate in self.config.learning_rates:
            params = self._train(index, task, rate, advance)
            accuracy = self._accuracy(params, task.val, len(task.classes))
            if accuracy > best.val_accuracy:
                best, best_params = UpperBound(0.0, accuracy, rate), params
        return best._replace(test_accuracy=self._accuracy(best_params, task.test, len(task.classes)))

    def num_images(self, task: Task) -> int:
        """Training images that `learn` works through."""
        return self.config.epochs * len(self.config.learning_rates) * len(task.train.labels)

    def _train(self, index: int, task: Task, rate: float, advance: Advance):
        config, num_classes = self.config, len(task.classes)
        fit = FitConfig(config.epochs, rate)
        key = key_at(self.key, index)
        head = init_head_learner(
            key_at(key, Phase.UPPER_BOUND_INIT), self.vit_config.width, next_power_of_two(num_classes)
        ).params
        params, adam = self._begin(self._start, head)
        steps = num_batches(len(task.train.labels), config.batch_size)
        for epoch in range(config.epochs):
            order = order_at(key_at(key, Phase.UPPER_BOUND_ORDER, epoch), len(task.train.labels))
            pieces = list(batches(order, config.batch_size))
            read = in_turn(task.train.images, [batch.rows for batch in pieces])
            for step, (batch, images) in enumerate(zip(pieces, read, strict=True)):
                now = learning_rate_at(fit, epoch * steps + step, config.epochs * steps)
                params, adam, _ = self._step(
                    params, adam, np.float32(now), images, task.train.labels[batch.rows],
                    batch.mask, np.int32(num_classes),
                )  # fmt: skip
                advance(batch.size, f"rate {rate:g}, epoch {epoch + 1}/{config.epochs}")
        return params

    def _accuracy(self, params, split: Split, num_classes: int) -> float:
        pieces = list(batches(np.arange(len(split.labels)), self.config.batch_size))
        read = in_turn(split.images, [b.rows for b in pieces])
        total = sum(
            int(self._right(params, images, split.labels[b.rows], b.mask, np.int32(num_classes)))
            for b, images in zip(pieces, read, strict=True)
        )
        return total / len(split.labels)
