"""The upper bound: the whole backbone fine-tuned for each task separately, task ID given.

Tasks share nothing, so this is no continual learner. Adam, no weight decay; the backbone's learning rate is swept on
the validation split (1e-3 with Adam destroys a pretrained ViT), the head has a separate rate.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.costs import params_report, plain_flops
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs, left, numbered, over_batches, unnumbered
from cheem_jax.baselines.saving import restore_all, save_and_restore
from cheem_jax.cheem.heads import FAR, cut, head_logits, local_cross_entropy, padded
from cheem_jax.cheem.supernet import init_head_learner
from cheem_jax.cheem.training import FitConfig, check_batch_size
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase, next_power_of_two
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import Advance
from cheem_jax.run.method import Answers, Clock, FrozenFeatures, Running, check_given
from cheem_jax.run.record import to_json
from cheem_jax.run.rolling import Saved


@dataclasses.dataclass(frozen=True)
class FullFinetuneConfig:
    """How the upper bound is trained."""

    name: ClassVar[str] = "full_finetune"
    epochs: int = 20
    """Passes over the training images."""
    learning_rates: tuple[float, ...] = (1e-5, 3e-5, 5e-5, 1e-4)
    """Rates of the backbone tried per task; the most accurate on the validation split is kept."""
    batch_size: int = 64
    head_learning_rate: float = 1e-3
    """Rate of the head, which starts at random."""

    def __post_init__(self) -> None:
        if not self.learning_rates:
            raise ValueError("learning_rates is empty; the upper bound needs at least one rate")
        if not all(0 < rate < float("inf") for rate in (*self.learning_rates, self.head_learning_rate)):
            raise ValueError(
                f"learning rates are {self.learning_rates}, {self.head_learning_rate}; expected positive numbers"
            )
        check_batch_size(self.batch_size)
        FitConfig(self.epochs)


class UpperBound(NamedTuple):
    """Accuracies in [0, 1] at the selected learning rate."""

    test_accuracy: float
    val_accuracy: float
    learning_rate: float


class Finetuned(NamedTuple):
    """One task's network: all leaves of the backbone, and the padded head."""

    name: str
    classes: tuple[str, ...]
    leaves: tuple[jax.Array, ...]
    head: Head


class FullFinetune:
    """See the module; every task starts from the pretrained weights."""

    name = "full_finetune"
    told = True

    def __init__(
        self, executor: Executor, features: FrozenFeatures, config: FullFinetuneConfig, keys: Keys, num_tasks: int
    ):
        self.executor, self.config, self.keys, self.vit_config = executor, config, keys, executor.config
        self.tasks: list[Finetuned] = []

        def logits(params, images):
            leaves, head = params
            return head_logits(head, executor.vit_of(leaves)(images))

        def loss(params, num, batch: FitBatch):
            return local_cross_entropy(logits(params, batch.inputs["images"]), batch.labels, batch.weights, 0, num)

        @executor.jit
        def answer(params, images, num):
            found = logits(params, images)
            found = jnp.where(jnp.arange(found.shape[-1]) < num, found, FAR)
            # a rate that ended in NaN must not pass for a network that predicts class 0
            return jnp.where(jnp.isfinite(found).all(axis=-1), found.argmax(axis=-1), -1)

        def rows(batch_size: int, working_set: int) -> int:
            # fewer and larger parts, because each computes a gradient of all weights
            return executor.rows(batch_size, 6 * working_set)

        self._fitter, self._answer = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=rows), answer

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Fine-tune the next task and keep its network."""
        clock, vit = Clock.of(running), self.vit_config
        with clock("train"):
            bound, (leaves, head) = self._sweep(len(self.tasks), task, running, clock)
        self.tasks.append(Finetuned(task.name, task.classes, leaves, head))
        backbone, num = backbone_params(vit), len(task.classes)
        learned = backbone + (vit.width + 1) * num
        return {
            "name": task.name,
            "learning_rate": bound.learning_rate,
            "validation_accuracy": bound.val_accuracy,
            **plain_flops(vit, num),
            **params_report(vit, added=backbone, learned=learned, stored=learned),
            "seconds": clock.seconds,
        }

    def bound(self, index: int, task: Task, running: Running) -> UpperBound:
        """The bound of one task, whose network is dropped; only the selected rate is measured on the test split."""
        found, params = self._sweep(index, task, running, Clock())
        return found._replace(test_accuracy=self._accuracy(params, task.test, len(task.classes)))

    def _sweep(self, index: int, task: Task, running: Running, clock: Clock) -> tuple[UpperBound, Any]:
        config, keys = self.config, self.keys
        sweep = self._begun(index, task, running.saved)
        rates = config.learning_rates
        with running.phase("upper bound", self._images_left(sweep, task), lambda: self._saved(sweep, clock)) as advance:
            while sweep.rate < len(rates):
                rate = rates[sweep.rate]
                try:
                    self._fitter.run(
                        sweep.fitting, np.int32(len(task.classes)), task.train.labels, Inputs(task.train.images),
                        self._fit(rate), batch_size=config.batch_size,
                        order_key=keys.at(index, Phase.UPPER_BOUND_ORDER),
                        noise_key=keys.at(index, Phase.METHOD_NOISE),
                        advance=_noted(advance, f"rate {rate:g}, "), scale=(1.0, config.head_learning_rate / rate),
                    )  # fmt: skip
                    accuracy = self._accuracy(sweep.fitting.learned, task.val, len(task.classes))
                except FloatingPointError:
                    accuracy = 0.0  # too large a rate, which is what the sweep is to find out
                if accuracy > sweep.best.val_accuracy:
                    sweep.best, sweep.best_params = UpperBound(0.0, accuracy, rate), sweep.fitting.learned
                sweep.rate += 1
                sweep.fitting = self._fresh(index, task)
        if sweep.best_params is None:
            raise FloatingPointError(
                f"full fine-tuning of task {task.name!r} predicts no validation image right at any of the learning "
                f"rates {rates}; set smaller ones"
            )
        return sweep.best, sweep.best_params

    def _fit(self, rate: float) -> FitConfig:
        return FitConfig(self.config.epochs, rate)

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: parameters, Adam's moments and the best so far, in two rolling checkpoints."""
        head = (self.vit_config.width + 1) * next_power_of_two(len(task.classes))
        return 4 * 4 * 2 * (sum(leaf.size for leaf in self.executor.leaves) + head)

    def _images_left(self, sweep: "_Sweep", task: Task) -> int:
        config, num = self.config, len(task.train.labels)
        if sweep.rate == len(config.learning_rates):
            return 0
        this = left(sweep.fitting, self._fit(1.0), num, config.batch_size)
        return this + (len(config.learning_rates) - sweep.rate - 1) * config.epochs * num

    def _saved(self, sweep: "_Sweep", clock: Clock) -> Saved:
        best = {} if sweep.best_params is None else {"best": numbered(sweep.best_params)}
        arrays, meta = sweep.fitting.saved(clock, **best)
        meta |= {"rate": sweep.rate, "best": list(sweep.best), "config": to_json(dataclasses.asdict(self.config))}
        return Saved(arrays, meta)

    def _fresh(self, index: int, task: Task, saved: Saved | None = None) -> Fitting:
        key = self.keys.at(index, Phase.UPPER_BOUND_INIT)
        head = init_head_learner(key, self.vit_config.width, next_power_of_two(len(task.classes))).params
        return self._fitter.begun((tuple(self.executor.leaves), head), saved)

    def _begun(self, index: int, task: Task, saved: Saved | None) -> "_Sweep":
        if saved is None or saved.meta["config"] != to_json(dataclasses.asdict(self.config)):
            return _Sweep(self._fresh(index, task))
        sweep = _Sweep(self._fresh(index, task, saved), saved.meta["rate"], UpperBound(*saved.meta["best"]))
        if "best" in saved.arrays:
            sweep.best_params = unnumbered(sweep.fitting.learned, saved.arrays["best"])
        return sweep

    def _answers(self, params: Any, images: Images, num_classes: int) -> Int[np.ndarray, "N"]:
        num = np.int32(num_classes)

        def answer(read: dict[str, Any]) -> jax.Array:
            return self._answer(params, read["images"], num)

        found = over_batches(answer, Inputs(images), batch_size=self.config.batch_size, layout=self.executor.layout)
        return found.astype(np.int32)

    def _accuracy(self, params: Any, split: Split, num_classes: int) -> float:
        return float((self._answers(params, split.images, num_classes) == split.labels).mean())

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`; the task IDs must be given."""
        check_given(self.name, len(self.tasks), tasks, told=True)
        assert tasks is not None
        classes = np.zeros(len(images), np.int32)
        for index in np.unique(tasks):
            rows, task = np.flatnonzero(tasks == index), self.tasks[index]
            classes[rows] = self._answers((task.leaves, task.head), images[rows], len(task.classes))
        return Inferred(np.asarray(tasks, np.int32), classes)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        learned = self.tasks[index]
        found = self._answers((learned.leaves, learned.head), task.test.images, len(learned.classes))
        return Answers(found, np.full(len(found), index, np.int32), found)

    def save(self, root: Path) -> None:
        """See `Method.save`."""
        index, task = len(self.tasks) - 1, self.tasks[-1]
        arrays = {"backbone": numbered(task.leaves), "head": cut(task.head, len(task.classes))._asdict()}
        self.tasks[-1] = save_and_restore(root, (index, task.name, task.classes), arrays, self._restored)

    def open(self, root: Path) -> None:
        """See `Method.open`."""
        self.tasks = restore_all(root, self._restored)

    def _restored(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> Finetuned:
        leaves = unnumbered(tuple(self.executor.leaves), arrays["backbone"])
        return Finetuned(meta["name"], tuple(meta["classes"]), leaves, padded(Head(**arrays["head"])))


@dataclasses.dataclass
class _Sweep:
    """Progress of one task's sweep: the current rate's fit and number, and the best rate so far."""

    fitting: Fitting
    rate: int = 0
    best: UpperBound = UpperBound(0.0, 0.0, 0.0)
    best_params: Any = None


def _noted(advance: Advance, before: str) -> Advance:
    return lambda num_images, note="", /: advance(num_images, before + note)
