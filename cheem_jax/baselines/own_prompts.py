"""What S-Prompts and DIKI share: prompts and a head per task, and a router that infers the task ID of an image.

Tasks are independent: each learns the same in any order. One batch holds images of several tasks, each with the prompts
of its task, gathered from a stack whose length is a power of two.
"""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cheem_jax.backbone.vit import ViT
from cheem_jax.baselines.baseline import OwnHeads, params_report
from cheem_jax.baselines.fitting import FitBatch, Fitter, Init, Inputs
from cheem_jax.cheem.heads import cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.core.keys import Keys, Phase, next_power_of_two, task_number
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Task
from cheem_jax.run.method import Networks, Running


class PromptedTask(NamedTuple):
    """What a task learned; all arrays are on the host."""

    prompts: dict[str, np.ndarray]
    head: Head
    router: dict[str, np.ndarray]


class OwnPrompts(OwnHeads):
    """A frozen backbone behind a router, with prompts and a head per task."""

    def __init__(self, networks: Networks, config: Any, keys: Keys, num_tasks: int):
        super().__init__(networks, config, keys, num_tasks)
        executor = self.executor
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

        self._answer = answer
        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=executor.rows)

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
    def flops(self, num_classes: int) -> dict[str, int]:
        """Per image, by each convention."""

    def inputs(self, task: Task, running: Running) -> Inputs:
        """The training inputs, which every epoch reads."""
        return Inputs(task.train.images)

    def start(self, task: Task) -> tuple[dict[str, Array], Head]:
        """Prompts and a head."""
        keys, number = self.keys, task_number(task.name)
        prompts = self.begin_prompts(keys.at(number, Phase.METHOD_INIT, Init.LEARNED))
        key, width = keys.at(number, Phase.METHOD_INIT, Init.HEAD), self.executor.config.width
        return prompts, grow_head(key, None, width, 0, len(task.classes))

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the task's prompts and head, then fit the router's statistics; earlier tasks play no part."""
        number, num = task_number(task.name), len(task.classes)
        vit, labels = self.executor.config, task.train.labels
        fitting = self.begun(self.start(task), running)
        # a finished fit needs no inputs, which may take a pass over all images
        if self.left(fitting, labels):
            with fitting.clock("keep"):
                inputs = self.inputs(task, running)
            self.train(fitting, (self.executor.leaves, np.int32(num)), labels, inputs, number=number)
        prompts, head = fitting.learned
        with fitting.clock("features"):
            features = self.router_features(task, "train")
        with fitting.clock("router"):
            router = self.fit_router(features, number)
        self.tasks.append(PromptedTask(jax.tree.map(np.asarray, prompts), cut(head, num), router))
        self.classes.add(task.name, task.classes)
        added, kept = (sum(values.size for values in arrays.values()) for arrays in (prompts, router))
        learned = added + (vit.width + 1) * num
        return {
            **self.flops(num),
            **params_report(vit, added=added, learned=learned, stored=learned + kept),
            **fitting.report(),
        }

    def stack(self) -> dict[str, np.ndarray]:
        """The prompts of all tasks, padded to a power of two with those of the first."""
        tasks = [*self.tasks, *[self.tasks[0]] * (next_power_of_two(len(self.tasks)) - len(self.tasks))]
        return {name: np.stack([task.prompts[name] for task in tasks]) for name in tasks[0].prompts}

    def arrays(self) -> dict[str, Any]:
        """The last task."""
        return {**self.tasks[-1]._asdict(), "head": self.tasks[-1].head._asdict()}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """See `Baseline.restore`."""
        self.tasks[index:] = [PromptedTask(arrays["prompts"], Head(**arrays["head"]), arrays["router"])]
