"""Full fine-tuning, an upper bound: the whole backbone is fine-tuned for each task, and the task ID
is given.

Each task has a separate copy of the backbone and learns nothing from other tasks, so the method is
not a continual learner. It trains with Adam without weight decay. The head has a separate learning
rate. The learning rate of the backbone is selected on the validation split, and all candidate rates
are below the 1e-3 of the other methods, which destroys a pretrained ViT.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import backbone_params
from cheem_jax.baselines.baseline import OwnHeads, at_least_one, params_report, pass_costs
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs, numbered, unnumbered
from cheem_jax.baselines.heads import classes_by_task, cut, head_logits, local_cross_entropy
from cheem_jax.cheem.supernet import init_head_learner
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, next_power_of_two
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import FitConfig, check_types
from cheem_jax.data.task import Split, Task
from cheem_jax.run.record import to_json
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session
from cheem_jax.run.training import images_left

HEAD_RATE = 1e-3
"""Initial learning rate of the head. It is larger than the learning rate of the backbone, because
the head is initialised randomly."""


@dataclasses.dataclass(frozen=True)
class FullFinetuneConfig:
    """Settings of full fine-tuning."""

    name: ClassVar[str] = "full_finetune"
    epochs: int = 20
    """Number of passes over the training images."""
    learning_rates: tuple[float, ...] = (1e-5, 3e-5, 5e-5, 1e-4)
    """Candidate learning rates of the backbone. Validation accuracy selects one per task."""
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        if not self.learning_rates:
            raise ValueError("learning_rates is empty; the upper bound needs at least one rate")
        if not all(0 < rate < float("inf") for rate in self.learning_rates):
            raise ValueError(f"learning_rates are {self.learning_rates}; expected positive numbers")
        at_least_one(self, "batch_size", "epochs")


class UpperBound(NamedTuple):
    """Accuracies in [0, 1] with the selected learning rate of the backbone, and this learning
    rate."""

    test_accuracy: float
    val_accuracy: float
    learning_rate: float


class FinetunedTask(NamedTuple):
    """A task's network: all arrays of the backbone, and the head."""

    backbone: list[Any]
    head: Head


class FullFinetune(OwnHeads):
    """Full fine-tuning; the network of each task starts from the pretrained weights."""

    Learned = FinetunedTask
    needs_task_id = True
    config: FullFinetuneConfig

    def build(self) -> None:
        executor = self.executor

        def features(leaves, inputs):
            return executor.merge_vit(leaves)(inputs["images"])

        def loss(learned, num, batch: FitBatch):
            leaves, head = learned
            logits = head_logits(head, features(leaves, batch.inputs))
            return local_cross_entropy(logits, batch.labels, batch.weights, 0, num)

        def rows(batch_size: int, working_set: int) -> int:
            # Split the batch into fewer and larger parts, because each part computes a gradient of
            # all weights.
            return executor.rows(batch_size, 6 * working_set)

        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=rows)
        self._features = executor.jit(features)

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """Fine-tune the next task and store its network."""
        vit = self.vit
        with session.phase("train"):
            bound, (leaves, head) = self._sweep(len(self.tasks), task, session)
        backbone = backbone_params(vit)
        num = len(task.classes)
        self.tasks.append(FinetunedTask(leaves, cut(head, num)))
        self.classes.add(task.name, task.classes)
        params = backbone + (vit.width + 1) * num
        return {
            "learning_rate": bound.learning_rate,
            "validation_accuracy": bound.val_accuracy,
            **self.costs(),
            **params_report(vit, added=backbone, learned=params, stored=params),
            "seconds": session.seconds,
        }

    def bound(self, index: int, task: Task, session: Session) -> UpperBound:
        """Measure the upper bound of a task without storing its network.

        Only the network of the selected learning rate is evaluated on the test split.
        """
        bound, learned = self._sweep(index, task, session)
        classes = self._predict(learned, len(task.classes), task.test)
        return bound._replace(test_accuracy=float((classes == task.test.labels).mean()))

    def _sweep(self, index: int, task: Task, session: Session) -> tuple[UpperBound, Any]:
        """Train with every learning rate. Return the result of the selected learning rate, with
        `test_accuracy` 0, and the trained parameters."""
        config = self.config
        keys = self.keys
        num = len(task.classes)
        labels = task.train.labels
        rates = config.learning_rates
        settings = to_json(dataclasses.asdict(config))
        saved = session.saved
        if saved is not None and saved.meta["config"] != settings:
            saved = None
        begin = self.start(task, index)
        fitting = self.fitter.begin(begin, saved)
        first = 0
        best = UpperBound(0.0, -1.0, 0.0)  # an accuracy of 0 is a result, too
        best_learned = None
        if saved is not None:
            first = saved.meta["rate"]
            best = UpperBound(*saved.meta["best"])
            if "best" in fitting.more:
                best_learned = unnumbered(fitting.learned, fitting.more["best"])
            session.saved = saved = None  # otherwise, the saved arrays stay in memory
        number = first

        def state() -> Saved:
            arrays, meta = fitting.saved()
            return Saved(arrays, {**meta, "rate": number, "best": list(best), "config": settings})

        def keep(stepped: Fitting) -> None:
            nonlocal fitting
            fitting = stepped

        num_images = images_left(
            fitting.progress, FitConfig(config.epochs), len(labels), config.batch_size
        )
        num_images += (len(rates) - first - 1) * config.epochs * len(labels)
        with session.phase("upper bound", num_images, state) as advance:
            for number in range(first, len(rates)):
                rate = rates[number]
                try:
                    fitting = self.fitter.run(
                        fitting,
                        np.int32(num),
                        labels,
                        Inputs(task.train.images),
                        FitConfig(config.epochs, rate),
                        batch_size=config.batch_size,
                        order_key=keys.at(index, Phase.UPPER_BOUND_ORDER),
                        noise_key=keys.at(index, Phase.METHOD_NOISE),
                        advance=lambda num, note="", /, rate=rate: advance(
                            num, f"rate {rate:g}, {note}"
                        ),
                        scale=(1.0, HEAD_RATE / rate),
                        on_step=keep,
                    )
                    classes = self._predict(fitting.learned, num, task.val)
                    accuracy = float((classes == task.val.labels).mean())
                    if classes.max() < 0:  # no logit is finite
                        accuracy = -1.0
                except FloatingPointError:
                    accuracy = -1.0  # training diverged: the learning rate is too large
                if accuracy > best.val_accuracy:
                    best = UpperBound(0.0, accuracy, rate)
                    best_learned = fitting.learned
                more = {"best": numbered(best_learned)} if best_learned else {}
                fitting = self.fitter.begin(begin)._replace(more=more)
        if best_learned is None:
            raise FloatingPointError(
                f"full fine-tuning of task {task.name!r} has non-finite losses with each of the"
                f" learning rates {rates}; set smaller ones"
            )
        return best, best_learned

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image of one plain pass."""
        return pass_costs(self.vit, len(self.classes.classes[-1]))

    def start(self, task: Task, index: int | None = None) -> tuple[list[jax.Array], Head]:
        """Return the pretrained weights and an initial head."""
        key = self.keys.at(len(self.tasks) if index is None else index, Phase.UPPER_BOUND_INIT)
        head = init_head_learner(key, self.vit.width, next_power_of_two(len(task.classes))).params
        return list(self.executor.leaves), head

    def bytes_needed(self, task: Task) -> int:
        """Estimate the bytes on disk for the next task: its checkpoint, and two rolling checkpoints
        with Adam's moments and the best parameters."""
        return 4 * (2 * 4 + 1) * sum(leaf.size for leaf in jax.tree.leaves(self.start(task)))

    def run(
        self, images: Images, task_ids: Int[np.ndarray, "N"] | None
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        assert task_ids is not None, "`predict` refuses images without a task ID"
        features = np.zeros((len(images), self.vit.width), np.float32)
        for index in np.unique(task_ids):
            rows = np.flatnonzero(task_ids == index)
            # If all images belong to one task, they are not indexed: indexing would load streamed
            # images at once, instead of batch by batch.
            selected = images if len(rows) == len(images) else images[rows]
            features[rows] = self.over(self._features, Inputs(selected), self.tasks[index].backbone)
        return task_ids, features

    def _predict(
        self, learned: tuple[list[jax.Array], Head], num_classes: int, split: Split
    ) -> Int[np.ndarray, "N"]:
        leaves, head = learned
        features = self.over(self._features, Inputs(split.images), leaves)
        return classes_by_task(
            features, [cut(head, num_classes)], np.zeros(len(features), np.int32)
        )
