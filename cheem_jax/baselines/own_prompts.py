"""What S-Prompts and DIKI share: prompts and a head per task, and a router that infers the task ID of an image.

Tasks are independent: each learns the same in any order. One batch holds images of several tasks, each with the prompts
of its task, gathered from a stack whose length is a power of two.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.vit import ViT
from cheem_jax.baselines.costs import params_report
from cheem_jax.baselines.fitting import FitBatch, FitSettings, Fitter, Init, Inputs, left, train_task
from cheem_jax.baselines.saving import restore_all, save_and_restore
from cheem_jax.cheem.heads import classes_by_task, cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase, next_power_of_two, task_number
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.method import Answers, Clock, FrozenFeatures, Running, check_given


class PromptedTask(NamedTuple):
    """A learned task; all arrays are on the host."""

    name: str
    classes: tuple[str, ...]
    prompts: dict[str, np.ndarray]
    head: Head
    router: dict[str, np.ndarray]


class OwnPrompts(abc.ABC):
    """A frozen backbone behind a router, with prompts and a head per task."""

    name = "own_prompts"

    def __init__(self, executor: Executor, features: FrozenFeatures, config: FitSettings, keys: Keys):
        self.executor, self.features, self.keys = executor, features, keys
        self.config = config
        self.tasks: list[PromptedTask] = []

        def found(vit: ViT, inputs, prompts, weight):
            tokens = inputs["tokens"] if "tokens" in inputs else self.enter(vit, inputs["images"])
            return self.prompted(vit, tokens, prompts, weight)

        def loss(learned, fixed, batch: FitBatch):
            (prompts, head), (leaves, num), size = learned, fixed, len(batch.labels)
            everywhere = {name: jnp.broadcast_to(values, (size, *values.shape)) for name, values in prompts.items()}
            features = found(executor.vit_of(leaves), batch.inputs, everywhere, jnp.ones(size))
            return local_cross_entropy(head_logits(head, features), batch.labels, batch.weights, 0, num)

        @executor.jit
        def answer(leaves, stack, inputs):
            own = {name: values[inputs["task"]] for name, values in stack.items()}
            return found(executor.vit_of(leaves), inputs, own, inputs["weight"])

        self._fitter, self._answer = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=executor.rows), answer

    @abc.abstractmethod
    def begin_prompts(self, key: jax.Array) -> dict[str, Array]:
        """The initial prompts of any task."""

    @abc.abstractmethod
    def enter(self, vit: ViT, images: Array) -> Float[Array, "B N D"]:
        """Tokens that do not depend on any prompt."""

    @abc.abstractmethod
    def prompted(
        self, vit: ViT, tokens: Float[Array, "B N D"], prompts: Mapping[str, Float[Array, "B ..."]], weight: Array
    ) -> Float[Array, "B D"]:
        """Features of each image with its own prompts, which act with the weight `[B]`."""

    @abc.abstractmethod
    def fit_router(self, features: Float[np.ndarray, "N E"], number: int) -> dict[str, np.ndarray]:
        """The router's statistics of a task, from the frozen features of its training images."""

    @abc.abstractmethod
    def run(
        self, images: Images, given: Int[np.ndarray, "N"] | None, query: Callable[[], np.ndarray], *, infer: bool
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        """The inferred task ID of each image, and its features with the prompts of the given or else the inferred task.

        `query` gives the frozen features if they are needed. Unless `infer`, task IDs are given and none is inferred.
        """

    @abc.abstractmethod
    def flops(self, num_classes: int) -> dict[str, int]:
        """Per image, by each convention."""

    @abc.abstractmethod
    def router_numbers(self, num_images: int) -> int:
        """Numbers that the router stores per task."""

    def inputs(self, task: Task, running: Running) -> Inputs:
        """The training inputs, which every epoch reads."""
        return Inputs(task.train.images)

    def more_report(self, features: Float[np.ndarray, "N E"], task: PromptedTask) -> dict[str, Any]:
        """More entries of a task's report."""
        return {}

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the task's prompts and head, then fit the router's statistics; earlier tasks play no part."""
        keys, number, num = self.keys, task_number(task.name), len(task.classes)
        clock, vit = Clock.of(running), self.executor.config
        prompts = self.begin_prompts(keys.at(number, Phase.METHOD_INIT, Init.LEARNED))
        head = grow_head(keys.at(number, Phase.METHOD_INIT, Init.HEAD), None, vit.width, 0, num)
        fitting = self._fitter.begun((prompts, head), running.saved)
        # a finished fit needs no inputs, which may take a pass over all images
        if left(fitting, self.config.fit, len(task.train.labels), self.config.batch_size):
            with clock("keep"):
                inputs = self.inputs(task, running)
            train_task(
                self._fitter, fitting, (self.executor.leaves, np.int32(num)), task.train.labels, inputs,
                config=self.config, keys=keys, number=number, running=running, clock=clock,
            )  # fmt: skip
        prompts, head = fitting.learned
        prompts = {name: np.asarray(values) for name, values in prompts.items()}
        with clock("features"):
            features = self.features(task, "train")
        with clock("router"):
            router = self.fit_router(features, number)
        self.tasks.append(PromptedTask(task.name, task.classes, prompts, cut(head, num), router))
        added, kept = (sum(values.size for values in arrays.values()) for arrays in (prompts, router))
        learned = added + (vit.width + 1) * num
        return {
            "name": task.name,
            **self.flops(num),
            **params_report(vit, added=added, learned=learned, stored=learned + kept),
            **fitting.report(clock),
            **self.more_report(features, self.tasks[-1]),
        }

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: the router; prompts and head in two rolling checkpoints with Adam's moments."""
        shapes = jax.eval_shape(lambda: self.begin_prompts(jax.random.key(0)))
        prompts = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        head = (self.executor.config.width + 1) * next_power_of_two(len(task.classes))
        return 4 * 2 * 3 * (prompts + head) + 8 * self.router_numbers(len(task.train.labels))

    def stack(self) -> dict[str, np.ndarray]:
        """The prompts of all tasks, padded to a power of two with those of the first."""
        tasks = [*self.tasks, *[self.tasks[0]] * (next_power_of_two(len(self.tasks)) - len(self.tasks))]
        return {name: np.stack([task.prompts[name] for task in tasks]) for name in tasks[0].prompts}

    def classes_of(self, features: Float[np.ndarray, "N D"], tasks: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """The class that the head of each image's task gives it."""
        return classes_by_task(features, [task.head for task in self.tasks], tasks)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.tasks), tasks)
        given = None if tasks is None else np.asarray(tasks, np.int32)
        chosen, features = self.run(images, given, lambda: self.features.compute(images), infer=given is None)
        used = chosen if given is None else given
        return Inferred(used, self.classes_of(features, used))

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        given = np.full(len(task.test.labels), index, np.int32)
        chosen, features = self.run(task.test.images, given, lambda: self.features(task, "test"), infer=True)
        local = self.classes_of(features, given)
        return Answers(local, chosen, local)

    def save(self, root: Path) -> None:
        """See `Method.save`."""
        index, task = len(self.tasks) - 1, self.tasks[-1]
        arrays = {"prompts": task.prompts, "head": task.head._asdict(), "router": task.router}
        self.tasks[-1] = save_and_restore(root, (index, task.name, task.classes), arrays, _restored)

    def open(self, root: Path) -> None:
        """See `Method.open`."""
        self.tasks = restore_all(root, _restored)


def _restored(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> PromptedTask:
    head = Head(**arrays["head"])
    return PromptedTask(meta["name"], tuple(meta["classes"]), arrays["prompts"], head, arrays["router"])
