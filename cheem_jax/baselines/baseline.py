"""What the baselines do alike: checkpoints, the training of a task, and the predictions of one head for all classes.

A checkpoint is one directory per task. What is saved is read back at once, so that a run that never stopped continues
from the same bytes as a resumed one.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import backbone_flops, backbone_params, executed_backbone_flops
from cheem_jax.baselines.fitting import Fitter, Fitting, Inputs, over_batches
from cheem_jax.cheem.heads import Classes, classes_by_task, saved_classes
from cheem_jax.cheem.training import images_left
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.data.task import Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import Advance, unwatched
from cheem_jax.run.checkpoint import each_task, load_task, named, save_task, saved_tasks, task_directory
from cheem_jax.run.method import Answers, Clock, Networks, Running, check_given


class Baseline(abc.ABC):
    """A continual learner with a checkpoint per task."""

    name: str
    is_whole = False
    """Whether a checkpoint contains all that is known, so that opening reads the last one alone."""

    def __init__(self) -> None:
        self.classes = Classes()

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    @abc.abstractmethod
    def arrays(self) -> dict[str, Any]:
        """What the last task added or changed, for its checkpoint."""

    def meta(self) -> dict[str, Any]:
        """JSON values of that checkpoint besides the task's name and classes."""
        return {}

    @abc.abstractmethod
    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Take over the checkpoint of task `index`: one more than known, or the last one in place of itself."""

    def save(self, root: Path) -> None:
        """See `Method.save`."""
        index, name, classes = self.classes.last
        directory = task_directory(root, index, name)
        save_task(directory, self.arrays(), {"name": name, "classes": list(classes), **self.meta()})
        with named(directory):
            self.restore(index, *load_task(directory))

    def open(self, root: Path) -> None:
        """See `Method.open`."""
        directories = saved_tasks(root)
        first = max(len(directories) - 1, 0) if self.is_whole else 0
        for index, loaded in enumerate(each_task(directories[first:]), first):
            with named(directories[index]):
                self.restore(index, *loaded)
        self.classes = saved_classes(root)


class TrainedBaseline(Baseline):
    """A baseline that trains by gradients on a backbone, with the `fitter` of its own loss."""

    fitter: Fitter
    config: Any

    def __init__(self, networks: Networks, config: Any, keys: Keys, num_tasks: int):
        super().__init__()
        self.executor, self.features, self.router_features = networks
        self.config, self.keys, self.num_tasks = config, keys, num_tasks

    @abc.abstractmethod
    def start(self, task: Task) -> Any:
        """What the next task trains, before its first step."""

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: two rolling checkpoints with Adam's moments, and the task's own."""
        trained = sum(leaf.size for leaf in jax.tree.leaves(self.start(task)))
        return 4 * (2 * 3 + 1) * trained + self.bytes_beside(task)

    def bytes_beside(self, task: Task) -> int:
        """Bytes of a task's checkpoint, or of its rolling ones, besides what is trained and its moments."""
        return 0

    def begun(self, learned: Any, running: Running) -> Fitting:
        """A task's training at its start, or where an earlier process left it."""
        fitting = self.fitter.begun(learned, running.saved)
        fitting.running, fitting.clock = running, Clock.of(running)
        return fitting

    def left(self, fitting: Fitting, labels: Int[np.ndarray, "N"]) -> int:
        """Images that a fit still has to train on, counted once per epoch."""
        return images_left(fitting.state, self.config.fit, len(labels), self.config.batch_size)

    def train(
        self, fitting: Fitting, fixed: Any, labels: Int[np.ndarray, "N"], inputs: Inputs, *,
        number: int | None = None, after_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Train in place to the last epoch, as the phase `train`. Raises as `Fitter.run`.

        `number` is the task's among the keys (default: its position); `after_step` runs before a step is reported.
        """
        number = len(self.classes) if number is None else number
        with fitting.phase("train", self.left(fitting, labels)) as advance:

            def advanced(num_images: int, note: str = "", /) -> None:
                after_step()
                advance(num_images, note)

            self.fitter.run(
                fitting, fixed, labels, inputs, self.config.fit, batch_size=self.config.batch_size,
                order_key=self.keys.at(number, Phase.METHOD_ORDER), noise_key=self.keys.at(number, Phase.METHOD_NOISE),
                advance=advanced,
            )  # fmt: skip

    def over(self, function: Callable[[dict[str, Any]], Any], inputs: Inputs, advance: Advance = unwatched) -> Any:
        """See `over_batches`."""
        return over_batches(
            function, inputs, batch_size=self.config.batch_size, advance=advance, layout=self.executor.layout
        )


class OwnHeads(TrainedBaseline):
    """A baseline with a head per task, and a router that infers the task ID from frozen features."""

    tasks: list[Any]
    """What each task learned, with its `head`."""

    @abc.abstractmethod
    def run(
        self, images: Images, given: Int[np.ndarray, "N"] | None, query: Callable[[], np.ndarray] | None
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        """The inferred task ID of each image, and its features by the network of the given, or else the inferred task.

        `query` gives the router's features; without it task IDs are given, and the inferred ones count for nothing.
        """

    def classes_for(self, features: Float[np.ndarray, "N D"], tasks: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """The class that the head of each image's task gives it."""
        return classes_by_task(features, [task.head for task in self.tasks], tasks)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.classes), tasks)
        given = None if tasks is None else np.asarray(tasks, np.int32)
        query = (lambda: self.router_features.compute(images)) if tasks is None else None
        chosen, features = self.run(images, given, query)
        used = chosen if given is None else given
        return Inferred(used, self.classes_for(features, used))

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        given = np.full(len(task.test.labels), index, np.int32)
        chosen, features = self.run(task.test.images, given, lambda: self.router_features(task, "test"))
        local = self.classes_for(features, given)
        return Answers(local, chosen, local)


class OneHead(TrainedBaseline):
    """A baseline with one head for all classes: the largest logit decides task and class together."""

    @abc.abstractmethod
    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        """Logits of all classes so far for each image, padding behind them."""

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.classes), tasks)
        return self.classes.inferred(self.logits(images), tasks)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        return self.classes.answers(self.logits(task.test.images), index)


def params_report(config: ViTConfig, *, added: int, learned: int, stored: int) -> dict[str, float]:
    """A task's numbers of parameters: those it trains, those it stores, and the added ones in percent of the backbone.

    The paper's %Param counts what a task adds to the backbone; heads and router are not among it.
    """
    return {
        "params_added_percent": 100 * added / backbone_params(config),
        "params_learned": learned,
        "params_stored": stored,
    }


def plain_flops(config: ViTConfig, num_classes: int) -> dict[str, int]:
    """FLOPs per image of one plain pass: by the paper's counter, with attention products, and as executed with a head.

    The paper's counter does not see fused attention: ViT-B costs 33.7 GFLOPs by it, 35.1 with attention products.
    """
    return {
        "flops_method": backbone_flops(config),
        "flops_explicit": backbone_flops(config, count_attention=True),
        "flops_executed": executed_backbone_flops(config) + 2 * config.width * num_classes,
    }
