"""The upper bound: the whole backbone fine-tuned for each task separately, task ID given.

Tasks share nothing, so this is no continual learner. Adam, no weight decay; the backbone's learning rate is swept on
the validation split (1e-3 with Adam destroys a pretrained ViT), the head has a separate rate.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.baseline import TrainedBaseline, params_report, plain_flops
from cheem_jax.baselines.fitting import FitBatch, Fitter, Inputs, numbered, unnumbered
from cheem_jax.baselines.settings import at_least_one
from cheem_jax.cheem.heads import FAR, cut, head_logits, local_cross_entropy, padded
from cheem_jax.cheem.supernet import init_head_learner
from cheem_jax.cheem.training import FitConfig, images_left
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase, next_power_of_two
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import Advance
from cheem_jax.run.method import Answers, Clock, Networks, Running, check_given
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
        at_least_one(self, "batch_size", "epochs")


class UpperBound(NamedTuple):
    """Accuracies in [0, 1] at the selected learning rate."""

    test_accuracy: float
    val_accuracy: float
    learning_rate: float


class FullFinetune(TrainedBaseline):
    """See the module; every task starts from the pretrained weights."""

    name = "full_finetune"
    needs_task_id = True
    config: FullFinetuneConfig

    def __init__(self, networks: Networks, config: FullFinetuneConfig, keys: Keys, num_tasks: int):
        super().__init__(networks, config, keys, num_tasks)
        executor = self.executor
        self.tasks: list[tuple[tuple[jax.Array, ...], Head]] = []
        """Each task's network: all leaves of the backbone, and the padded head."""

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

        self.fitter, self._answer = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=rows), answer

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Fine-tune the next task and keep its network."""
        clock, vit = Clock.of(running), self.executor.config
        with clock("train"):
            bound, params = self._sweep(len(self.tasks), task, running, clock)
        self.tasks.append(params)
        self.classes.add(task.name, task.classes)
        backbone, num = backbone_params(vit), len(task.classes)
        learned = backbone + (vit.width + 1) * num
        return {
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
        """The bound of a task, without test accuracy, and the parameters at the selected rate."""
        config, keys, num, labels = self.config, self.keys, len(task.classes), task.train.labels
        rates, settings, saved = config.learning_rates, to_json(dataclasses.asdict(config)), running.saved
        if saved is not None and saved.meta["config"] != settings:
            saved = None
        begin = self.start(task, index)
        fitting, first, best, best_params = self.fitter.begun(begin, saved), 0, UpperBound(0.0, 0.0, 0.0), None
        if saved is not None:
            first, best = saved.meta["rate"], UpperBound(*saved.meta["best"])
            if "best" in saved.arrays:
                best_params = unnumbered(fitting.learned, saved.arrays["best"])
        number = first

        def state() -> Saved:
            arrays = {} if best_params is None else {"best": numbered(best_params)}
            more = {"seconds": clock.so_far(), "rate": number, "best": list(best), "config": settings}
            return Saved({**fitting.arrays(), **arrays}, {**fitting.meta(), **more})

        left = images_left(fitting.state, FitConfig(config.epochs), len(labels), config.batch_size)
        left += (len(rates) - first - 1) * config.epochs * len(labels)
        with running.phase("upper bound", left, state) as advance:
            for number in range(first, len(rates)):
                rate = rates[number]
                try:
                    self.fitter.run(
                        fitting, np.int32(num), labels, Inputs(task.train.images), FitConfig(config.epochs, rate),
                        batch_size=config.batch_size, order_key=keys.at(index, Phase.UPPER_BOUND_ORDER),
                        noise_key=keys.at(index, Phase.METHOD_NOISE), advance=_noted(advance, f"rate {rate:g}, "),
                        scale=(1.0, config.head_learning_rate / rate),
                    )  # fmt: skip
                    accuracy = self._accuracy(fitting.learned, task.val, num)
                except FloatingPointError:
                    accuracy = 0.0  # too large a rate, which is what the sweep is to find out
                if accuracy > best.val_accuracy:
                    best, best_params = UpperBound(0.0, accuracy, rate), fitting.learned
                fitting = self.fitter.begun(begin)
        if best_params is None:
            raise FloatingPointError(
                f"full fine-tuning of task {task.name!r} predicts no validation image right at any of the learning "
                f"rates {rates}; set smaller ones"
            )
        return best, best_params

    def start(self, task: Task, index: int | None = None) -> tuple[tuple[jax.Array, ...], Head]:
        """The pretrained backbone, and a head."""
        key = self.keys.at(len(self.tasks) if index is None else index, Phase.UPPER_BOUND_INIT)
        head = init_head_learner(key, self.executor.config.width, next_power_of_two(len(task.classes))).params
        return tuple(self.executor.leaves), head

    def bytes_beside(self, task: Task) -> int:
        """See `TrainedBaseline.bytes_beside`: the best parameters so far, in two rolling checkpoints."""
        return 4 * 2 * sum(leaf.size for leaf in jax.tree.leaves(self.start(task)))

    def _answers(self, params: Any, images: Images, num_classes: int) -> Int[np.ndarray, "N"]:
        num = np.int32(num_classes)
        return self.over(lambda read: self._answer(params, read["images"], num), Inputs(images)).astype(np.int32)

    def _accuracy(self, params: Any, split: Split, num_classes: int) -> float:
        return float((self._answers(params, split.images, num_classes) == split.labels).mean())

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`; the task IDs must be given."""
        check_given(self.name, len(self.tasks), tasks, needs_task_id=True)
        assert tasks is not None
        classes = np.zeros(len(images), np.int32)
        for index in np.unique(tasks):
            rows = np.flatnonzero(tasks == index)
            classes[rows] = self._answers(self.tasks[index], images[rows], len(self.classes.classes[index]))
        return Inferred(np.asarray(tasks, np.int32), classes)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        found = self._answers(self.tasks[index], task.test.images, len(self.classes.classes[index]))
        return Answers(found, np.full(len(found), index, np.int32), found)

    def arrays(self) -> dict[str, Any]:
        """The last task's network."""
        leaves, head = self.tasks[-1]
        return {"backbone": numbered(leaves), "head": cut(head, len(self.classes.classes[-1]))._asdict()}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """See `Baseline.restore`."""
        leaves = unnumbered(tuple(self.executor.leaves), arrays["backbone"])
        self.tasks[index:] = [(leaves, padded(Head(**arrays["head"])))]


def _noted(advance: Advance, before: str) -> Advance:
    return lambda num_images, note="", /: advance(num_images, before + note)
