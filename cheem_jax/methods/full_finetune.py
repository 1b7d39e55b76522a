"""The upper bound: the whole backbone fine-tuned for each task on its own, the true task given.

Nothing is shared or remembered between tasks, so this is no continual learner. Adam, no weight decay; the learning rate
is swept on validation (1e-3 with Adam destroys a pretrained ViT).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cheem_jax.backbone.vit import ViT
from cheem_jax.data.task import Split, Task
from cheem_jax.execution.batches import batches, num_batches
from cheem_jax.execution.compilation import DETERMINISTIC
from cheem_jax.execution.executor import masked_logits
from cheem_jax.execution.passes import Advance
from cheem_jax.images import in_turn
from cheem_jax.keys import Keys, Phase, next_power_of_two, order_at
from cheem_jax.methods.method import Running
from cheem_jax.report.record import to_json
from cheem_jax.rolling import Saved
from cheem_jax.supernet import init_head_learner
from cheem_jax.training import FitConfig, FitState, images_left, learning_rate_at


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

    name = "full_finetune"

    def __init__(self, vit: ViT, config: FullFinetuneConfig, keys: Keys, *, deterministic: bool = False):
        self.config, self.keys, self.vit_config = config, keys, vit.config
        graphdef, self._start = nnx.split(vit)
        optimizer = optax.scale_by_adam()
        options = DETERMINISTIC if deterministic and jax.default_backend() != "cpu" else None

        def mean_loss(params, images, labels, mask, num_classes):
            state, head = params
            logits = masked_logits(head, nnx.merge(graphdef, state)(images), num_classes)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return (losses * mask).sum() / mask.sum()

        @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=options)
        def step(params, adam, rate, images, labels, mask, num_classes):
            loss, grads = jax.value_and_grad(mean_loss)(params, images, labels, mask, num_classes)
            updates, adam = optimizer.update(grads, adam)
            return jax.tree.map(lambda p, u: p - rate * u, params, updates), adam, loss

        @jax.jit
        def right(params, images, labels, mask, num_classes):
            state, head = params
            logits = masked_logits(head, nnx.merge(graphdef, state)(images), num_classes)
            # a rate that ended in NaN must not pass for a network that answers class 0
            found = jnp.isfinite(logits).all(axis=-1) & (logits.argmax(axis=-1) == labels)
            return (found & (mask > 0)).sum()

        @jax.jit
        def begin(state, head):
            # fresh buffers: the step donates its parameters, and the pretrained ones must survive
            params = jax.tree.map(jnp.copy, (state, head))
            return params, optimizer.init(params)

        self._step, self._right, self._begin = step, right, begin

    def learn(self, index: int, task: Task, running: Running) -> UpperBound:
        """Fine-tune for every rate; the test split is looked at with the chosen one only."""
        begun = self._begun(index, task, running.saved)
        with running.phase("upper bound", self._images_left(begun, task), lambda: self._saved(begun)) as advance:
            while begun.rate < len(self.config.learning_rates):
                rate = self.config.learning_rates[begun.rate]
                self._train(begun, index, task, rate, advance)
                accuracy = self._accuracy(begun.params, task.val, len(task.classes))
                if accuracy > begun.best.val_accuracy:
                    begun.best, begun.best_params = UpperBound(0.0, accuracy, rate), begun.params
                begun.rate, begun.step = begun.rate + 1, 0
                begun.params, begun.adam = self._fresh(index, task)
        if begun.best_params is None:
            raise FloatingPointError(
                f"full fine-tuning of task {task.name!r} got no validation image right at any of the learning rates "
                f"{self.config.learning_rates}; try smaller ones"
            )
        return begun.best._replace(test_accuracy=self._accuracy(begun.best_params, task.test, len(task.classes)))

    def num_images(self, task: Task) -> int:
        """Training images that `learn` works through."""
        return self.config.epochs * len(self.config.learning_rates) * len(task.train.labels)

    def bytes_needed(self) -> int:
        """Parameters, two moments and the best so far, twice."""
        return 4 * 4 * 2 * sum(leaf.size for leaf in jax.tree.leaves(self._start))

    def _images_left(self, sweep: "_Sweep", task: Task) -> int:
        config, num = self.config, len(task.train.labels)
        if sweep.rate == len(config.learning_rates):
            return 0
        this = images_left(FitState(sweep.step), FitConfig(config.epochs), num, config.batch_size)
        return this + (len(config.learning_rates) - sweep.rate - 1) * config.epochs * num

    def _saved(self, sweep: "_Sweep") -> Saved:
        arrays = {"now": _numbered((sweep.params, sweep.adam))}
        if sweep.best_params is not None:
            arrays["best"] = _numbered(sweep.best_params)
        meta = {"rate": sweep.rate, "step": sweep.step, "best": list(sweep.best)}
        return Saved(arrays, {**meta, "config": to_json(dataclasses.asdict(self.config))})

    def _fresh(self, index: int, task: Task) -> tuple[Any, Any]:
        key = self.keys.at(index, Phase.UPPER_BOUND_INIT)
        head = init_head_learner(key, self.vit_config.width, next_power_of_two(len(task.classes))).params
        return self._begin(self._start, head)

    def _begun(self, index: int, task: Task, saved: Saved | None) -> "_Sweep":
        params, adam = self._fresh(index, task)
        sweep = _Sweep(params, adam)
        if saved is not None and saved.meta["config"] == to_json(dataclasses.asdict(self.config)):
            meta, arrays = saved.meta, {name: _leaves_of(found) for name, found in saved.arrays.items()}
            sweep.rate, sweep.step, sweep.best = meta["rate"], meta["step"], UpperBound(*meta["best"])
            sweep.params, sweep.adam = jax.tree.unflatten(jax.tree.structure((params, adam)), arrays["now"])
            if "best" in arrays:
                sweep.best_params = jax.tree.unflatten(jax.tree.structure(params), arrays["best"])
        return sweep

    def _train(self, sweep: "_Sweep", index: int, task: Task, rate: float, advance: Advance) -> None:
        config, num_classes = self.config, len(task.classes)
        fit = FitConfig(config.epochs, rate)
        steps = num_batches(len(task.train.labels), config.batch_size)
        for epoch in range(sweep.step // steps, config.epochs):
            begin = sweep.step % steps
            order = order_at(self.keys.at(index, Phase.UPPER_BOUND_ORDER, epoch), len(task.train.labels))
            pieces = list(batches(order, config.batch_size))[begin:]
            read = in_turn(task.train.images, [batch.rows for batch in pieces])
            for batch, images in zip(pieces, read, strict=True):
                now = learning_rate_at(fit, sweep.step, config.epochs * steps)
                sweep.params, sweep.adam, _ = self._step(
                    sweep.params, sweep.adam, np.float32(now), images, task.train.labels[batch.rows],
                    batch.mask, np.int32(num_classes),
                )  # fmt: skip
                sweep.step += 1
                advance(batch.size, f"rate {rate:g}, epoch {epoch + 1}/{config.epochs}")

    def _accuracy(self, params, split: Split, num_classes: int) -> float:
        pieces = list(batches(np.arange(len(split.labels)), self.config.batch_size))
        read = in_turn(split.images, [b.rows for b in pieces])
        total = sum(
            int(self._right(params, images, split.labels[b.rows], b.mask, np.int32(num_classes)))
            for b, images in zip(pieces, read, strict=True)
        )
        return total / len(split.labels)


@dataclasses.dataclass
class _Sweep:
    """How far the rates of one task have been tried."""

    params: Any
    adam: Any
    rate: int = 0
    step: int = 0
    best: UpperBound = UpperBound(0.0, 0.0, 0.0)
    best_params: Any = None


def _numbered(tree: Any) -> dict[str, Any]:
    return {f"{number:04d}": leaf for number, leaf in enumerate(jax.tree.leaves(tree))}


def _leaves_of(numbered: dict[str, Any]) -> list[jax.Array]:
    return [jnp.asarray(leaf) for _, leaf in sorted(numbered.items())]
