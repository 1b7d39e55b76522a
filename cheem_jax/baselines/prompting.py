"""Base classes of methods that learn prompts for a frozen backbone.

L2P, DualPrompt and CODA-Prompt (`Prompting`) learn prompts that all tasks share. They select
prompts by a query: the CLS token of a pass without prompts, cached per image. Prompts are
additional keys and values of a block's attention. One linear head predicts the classes of all
tasks. Training uses only the head's columns of the current task, but the prediction is the class
with the largest logit of all tasks.

S-Prompts and DIKI (`OwnPrompts`) learn prompts and a head per task, and a router infers the task ID
of an image. The parameters of a task do not depend on the task's position in the stream. A batch
can contain images of different tasks: the prompts of each image are gathered from a stack of the
prompts of all tasks, which is padded to a power of two.
"""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.vit import Prefix, ViT
from cheem_jax.baselines.baseline import (
    OneHead,
    OwnHeads,
    TrainedBaseline,
    no_classes,
    params_report,
    pass_costs,
)
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Init, Inputs
from cheem_jax.baselines.heads import cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, next_power_of_two, task_number
from cheem_jax.core.pool import Head, padded
from cheem_jax.data.task import Task
from cheem_jax.run.session import Session

Prompts = dict[str, Any]
"""A method's learned arrays, keyed by name, on the host or on the devices."""


class Attached(NamedTuple):
    """Prompts of a batch: prefixes keyed by block, and one loss per image, which pulls the keys of
    the image's prompts towards its query."""

    prefixes: Mapping[int, Prefix]
    key_loss: Float[Array, "B"]


class PromptingState(NamedTuple):
    """Prompts of all tasks, and the head of all classes."""

    prompts: Prompts
    head: Head


class Prompting(OneHead, TrainedBaseline):
    """A frozen backbone with prompts, and one head for all classes."""

    State = PromptingState

    def build(self) -> None:
        executor = self.executor
        check_layers(self.layers, executor.config.depth)
        self.state = PromptingState({}, no_classes(executor.config.width))

        def logits(prompts, head, leaves, inputs, task, is_training):
            vit = executor.merge_vit(leaves)
            attached = self.attach(prompts, inputs["query"], task, is_training)
            tokens = vit.run_blocks(vit.embed(inputs["images"]), prefixes=attached.prefixes)
            return head_logits(head, vit.features(tokens)), attached.key_loss

        def loss(learned, fixed, batch: FitBatch):
            (prompts, head), (leaves, task, first, num) = learned, fixed
            values, key_loss = logits(prompts, head, leaves, batch.inputs, task, True)
            # Columns of earlier classes have the gradient 0. The key loss pulls keys towards
            # queries.
            local = local_cross_entropy(values, batch.labels, batch.weights, first, num)
            return local + (key_loss * batch.weights).sum()

        @executor.jit
        def answer(prompts, head, leaves, task, inputs):
            return logits(prompts, head, leaves, inputs, task, False)[0]

        self._answer = answer
        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=executor.rows)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the blocks with prompts."""
        return self.config.layers

    @abc.abstractmethod
    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """Return all prompts at the start of task `index`. `prompts` contains the prompts at the
        end of the previous task; it is empty for the first task."""

    @abc.abstractmethod
    def attach(
        self,
        prompts: Prompts,
        query: Float[Array, "B D"],
        task: Int[Array, ""],
        is_training: bool,
    ) -> Attached:
        """Select the prompts of each image.

        `task` is the current task in training, and the last learned task in prediction.
        """

    @abc.abstractmethod
    def added_flops(self) -> dict[str, int]:
        """Return the additional FLOPs per image of the prompts, as arguments of `pass_costs`.

        Only `executed` includes the selection or mixing of prompts, which the CHEEM paper does not
        count.
        """

    @abc.abstractmethod
    def num_params(self, index: int) -> tuple[int, int]:
        """Return the number of prompt parameters that task `index` trains, and the number of prompt
        parameters that it adds to the stored prompts."""

    def start(self, task: Task) -> tuple[Prompts, Head]:
        """Return all prompts and the whole head, with columns for the task."""
        prompts = self.begin_task(
            self.key(task, Phase.METHOD_INIT, Init.LEARNED), self.state.prompts, len(self.classes)
        )
        key = self.key(task, Phase.METHOD_INIT, Init.HEAD)
        return prompts, grow_head(
            key, self.state.head, self.vit.width, self.classes.num, len(task.classes)
        )

    def fixed(self, task: Task) -> Any:
        """Return the backbone, the index of the task, the first column of the task in the head,
        and the number of the task's classes."""
        position = (len(self.classes), self.classes.num, len(task.classes))
        return (self.executor.leaves, *map(np.int32, position))

    def inputs(self, task: Task, session: Session) -> Inputs:
        """Return the images and their queries, the CLS tokens of a pass without prompts."""
        with session.phase("features") as advance:
            query = self.features(task.train.images, advance)
            return Inputs(task.train.images, query=query)

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the prompts and the head of all classes."""
        num = len(task.classes)
        prompts, head = fitting.learned
        self.state = PromptingState(prompts, cut(head, self.classes.num + num))
        learned, added = self.num_params(len(self.classes))
        head_params = (self.vit.width + 1) * num
        return params_report(
            self.vit, added=added, learned=learned + head_params, stored=added + head_params
        )

    def costs(self) -> dict[str, int]:
        """Report the FLOPs per image of two passes: one for the query, and one with prompts and
        head."""
        encoder = self.features.encoder
        return pass_costs(self.vit, self.classes.num, encoder=encoder, **self.added_flops())

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        head = padded(self.state.head)
        last = np.int32(len(self.classes) - 1)
        inputs = Inputs(images, query=self.features(images))
        return self.over(self._answer, inputs, self.state.prompts, head, self.executor.leaves, last)

    def meta(self) -> dict[str, Any]:
        """Return the number of tasks of the stream. Checkpoints store it, because some methods
        divide their prompts among the tasks and require the same number when they resume."""
        return {"num_tasks": self.num_tasks}


class PromptedTask(NamedTuple):
    """Prompts, head and router statistics of one task."""

    prompts: dict[str, np.ndarray]
    head: Head
    router: dict[str, np.ndarray]


class OwnPrompts(OwnHeads, TrainedBaseline):
    """A frozen backbone with prompts and a head per task, and a router."""

    Learned = PromptedTask

    def build(self) -> None:
        executor = self.executor

        def features(leaves, inputs, prompts):
            vit = executor.merge_vit(leaves)
            tokens = inputs["tokens"] if "tokens" in inputs else self.enter(vit, inputs["images"])
            return self.prompted(vit, tokens, prompts)

        def loss(learned, fixed, batch: FitBatch):
            (prompts, head), (leaves, num) = learned, fixed
            size = len(batch.labels)
            repeated = {
                name: jnp.broadcast_to(values, (size, *values.shape))
                for name, values in prompts.items()
            }
            logits = head_logits(head, features(leaves, batch.inputs, repeated))
            return local_cross_entropy(logits, batch.labels, batch.weights, 0, num)

        @executor.jit
        def answer(leaves, stack, inputs):
            return features(
                leaves, inputs, {name: values[inputs["task"]] for name, values in stack.items()}
            )

        self._answer = answer
        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=executor.rows)

    @abc.abstractmethod
    def begin_prompts(self, key: jax.Array) -> Prompts:
        """Return the initial prompts of a task."""

    @abc.abstractmethod
    def enter(self, vit: ViT, images: Array) -> Float[Array, "B N D"]:
        """Compute the input tokens of `prompted`, which do not depend on prompts."""

    @abc.abstractmethod
    def prompted(
        self,
        vit: ViT,
        tokens: Float[Array, "B N D"],
        prompts: Mapping[str, Float[Array, "B ..."]],
    ) -> Float[Array, "B D"]:
        """Compute the features of each image with the prompts of its task."""

    @abc.abstractmethod
    def fit_router(self, features: Float[np.ndarray, "N E"], task: Task) -> dict[str, np.ndarray]:
        """Fit the router's statistics of a task to the frozen features of its training images."""

    def number(self, task: Task) -> int:
        """Return the number from which the PRNG keys of a task are derived. It depends only on the
        task's name, not on the task's position in the stream."""
        return task_number(task.name)

    def start(self, task: Task) -> tuple[Prompts, Head]:
        """Return the initial prompts and an initial head."""
        prompts = self.begin_prompts(self.key(task, Phase.METHOD_INIT, Init.LEARNED))
        key = self.key(task, Phase.METHOD_INIT, Init.HEAD)
        return prompts, grow_head(key, None, self.vit.width, 0, len(task.classes))

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store prompts and head, and fit the router's statistics of the task."""
        num = len(task.classes)
        prompts, head = fitting.learned
        with session.phase("features", 0, fitting.saved) as advance:
            features = self.router_features(task.train.images, advance)
        with session.phase("router"):
            router = self.fit_router(features, task)
        self.tasks.append(PromptedTask(jax.tree.map(np.asarray, prompts), cut(head, num), router))
        added, statistics = (
            sum(values.size for values in arrays.values()) for arrays in (prompts, router)
        )
        learned = added + (self.vit.width + 1) * num
        return params_report(self.vit, added=added, learned=learned, stored=learned + statistics)

    def stack(self) -> dict[str, np.ndarray]:
        """Stack the prompts of all tasks, padded to a power of two with the prompts of the first
        task."""
        num = len(self.tasks)
        tasks = [*self.tasks, *[self.tasks[0]] * (next_power_of_two(num) - num)]
        return {name: np.stack([task.prompts[name] for task in tasks]) for name in tasks[0].prompts}


def halves(prompts: Float[Array, "B P D"]) -> Prefix:
    """Split the P rows of each prompt: the first half is keys, the second half is values."""
    half = prompts.shape[1] // 2
    return Prefix(prompts[:, :half], prompts[:, half:])


def cosine(a: Float[Array, "... D"], b: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Compute the cosine over the last axis; its gradient is finite at zero vectors."""
    norms = jnp.sqrt((a * a).sum(-1) + 1e-24) * jnp.sqrt((b * b).sum(-1) + 1e-24)
    return (a * b).sum(-1) / norms


def check_layers(layers: tuple[int, ...], depth: int) -> None:
    """Raise ValueError if `layers` is empty, contains an index twice, or contains an index that is
    not the index of a block of the backbone."""
    if not layers or not set(layers) <= set(range(depth)) or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers {layers} are invalid for this backbone; expected different numbers in"
            f" 0..{depth - 1}"
        )
