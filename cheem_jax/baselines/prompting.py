"""What the methods with prompts share: a frozen backbone, and prompts for all tasks together or for
each alone.

L2P, DualPrompt and CODA-Prompt (`Prompting`) select prompts by the frozen backbone's feature of an
image. This query is the CLS token of a pass without prompts, cached per image. Prompts act as keys
and values in front of a block's own. One linear head holds the classes of all tasks. Training sees
the columns of the current task alone, a prediction is the largest logit of all classes: the paper's
comparison of heads is about this gap.

S-Prompts and DIKI (`OwnPrompts`) learn prompts and a head per task, and a router infers the task ID
of an image. Tasks are independent: each learns the same in any order. One batch holds images of
several tasks, each with the prompts of its task, gathered from a stack whose length is a power of
two.
"""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.vit import Prefix, ViT
from cheem_jax.baselines.baseline import OneHead, OwnHeads, no_classes, params_report, pass_costs
from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Init, Inputs
from cheem_jax.baselines.heads import cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Phase, next_power_of_two, task_number
from cheem_jax.core.pool import Head, padded
from cheem_jax.data.task import Task

Prompts = dict[str, Any]
"""A method's learned arrays by name, on the host or on the devices."""


class Attached(NamedTuple):
    """The prompts of a batch: prefixes by block, or tokens in front of all others, and a loss of
    the keys per image."""

    prefixes: Mapping[int, Prefix]
    key_loss: Float[Array, "B"]
    tokens: Float[Array, "B n D"] | None = None


class PromptingState(NamedTuple):
    """The prompts of all tasks together, and the head over all classes."""

    prompts: Prompts
    head: Head


class Prompting(OneHead):
    """A frozen backbone with prompts and one head over all classes."""

    State = PromptingState

    def build(self) -> None:
        executor = self.executor
        check_layers(self.layers, executor.config.depth)
        self.known = PromptingState({}, no_classes(executor.config.width))

        def logits(prompts, head, leaves, inputs, task, weights):
            vit = executor.vit_of(leaves)
            x = vit.embed(inputs["images"])
            attached = self.attach(prompts, inputs["query"], task, weights)
            if (tokens := attached.tokens) is None:
                features = vit.features(vit.run_blocks(x, prefixes=attached.prefixes))
            else:
                x = vit.run_blocks(jnp.concatenate([tokens, x], axis=1), all_tokens=True)
                features = vit.norm(x[:, : tokens.shape[1]]).mean(axis=1)
            return head_logits(head, features), attached

        def loss(learned, fixed, batch: FitBatch):
            (prompts, head), (leaves, task, first, num) = learned, fixed
            found, attached = logits(prompts, head, leaves, batch.inputs, task, batch.weights)
            local = local_cross_entropy(found, batch.labels, batch.weights, first, num)
            # only the current task's columns compete, so old columns get no gradient; keys are
            # pulled to the query
            return local + (attached.key_loss * batch.weights).sum()

        @executor.jit
        def answer(prompts, head, leaves, task, inputs):
            return logits(prompts, head, leaves, inputs, task, None)[0]

        self._answer = answer
        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=executor.rows)

    @property
    def layers(self) -> tuple[int, ...]:
        """Blocks with prompts."""
        return self.config.layers

    @abc.abstractmethod
    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """The prompts with which task `index` begins; `prompts` is empty for the first."""

    @abc.abstractmethod
    def attach(
        self,
        prompts: Prompts,
        query: Float[Array, "B D"],
        task: Int[Array, ""],
        weights: Float[Array, "B"] | None,
    ) -> Attached:
        """The prompts of each image.

        In training `task` is the current task and `weights` are those of the images, 0 for padding.
        In prediction `task` is the last one learned and `weights` is None.
        """

    @abc.abstractmethod
    def added_flops(self) -> dict[str, int]:
        """FLOPs per image that prompts add to a pass, for `pass_costs`.

        To the `executed` ones belong those of selecting or mixing prompts, which are in no count of
        the paper.
        """

    @abc.abstractmethod
    def num_params(self, index: int) -> tuple[int, int]:
        """The numbers of prompt parameters that task `index` trains and that it adds to those
        stored."""

    def start(self, task: Task) -> tuple[Prompts, Head]:
        """All prompts, and the whole head."""
        prompts = self.begin_task(
            self.key(task, Phase.METHOD_INIT, Init.LEARNED), self.known.prompts, len(self.classes)
        )
        key = self.key(task, Phase.METHOD_INIT, Init.HEAD)
        width = self.executor.config.width
        return prompts, grow_head(key, self.known.head, width, self.classes.num, len(task.classes))

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """Train the prompts and the task's columns of the head."""
        index = len(self.classes)
        seen = self.classes.num
        num = len(task.classes)
        vit = self.executor.config
        with fitting.session.phase("features"):
            query = self.features(task.train.images)
        fixed = (self.executor.leaves, np.int32(index), np.int32(seen), np.int32(num))
        self.train(fitting, task, fixed, Inputs(task.train.images, query=query))
        prompts, head = fitting.learned
        self.known = PromptingState(prompts, cut(head, seen + num))
        (learned, added), head_params = self.num_params(index), (vit.width + 1) * num
        return params_report(
            vit, added=added, learned=learned + head_params, stored=added + head_params
        )

    def costs(self) -> dict[str, int]:
        """FLOPs per image: a pass for the query, and one with prompts and the head."""
        vit = self.executor.config
        encoder = self.features.encoder
        return pass_costs(vit, self.classes.num, encoder=encoder, **self.added_flops())

    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        head = padded(self.known.head)
        last = np.int32(len(self.classes) - 1)
        inputs = Inputs(images, query=self.features(images))
        return self.over(self._answer, inputs, self.known.prompts, head, self.executor.leaves, last)

    def meta(self) -> dict[str, Any]:
        """The number of tasks, among which the prompts may be divided."""
        return {"num_tasks": self.num_tasks}


class PromptedTask(NamedTuple):
    """What a task learned."""

    prompts: dict[str, np.ndarray]
    head: Head
    router: dict[str, np.ndarray]


class OwnPrompts(OwnHeads):
    """A frozen backbone behind a router, with prompts and a head per task."""

    Learned = PromptedTask

    def build(self) -> None:
        executor = self.executor

        def found(vit: ViT, inputs, prompts, weight):
            tokens = inputs["tokens"] if "tokens" in inputs else self.enter(vit, inputs["images"])
            return self.prompted(vit, tokens, prompts, weight)

        def loss(learned, fixed, batch: FitBatch):
            (prompts, head), (leaves, num), size = learned, fixed, len(batch.labels)
            everywhere = {
                name: jnp.broadcast_to(values, (size, *values.shape))
                for name, values in prompts.items()
            }
            features = found(executor.vit_of(leaves), batch.inputs, everywhere, jnp.ones(size))
            return local_cross_entropy(
                head_logits(head, features), batch.labels, batch.weights, 0, num
            )

        @executor.jit
        def answer(leaves, stack, inputs):
            own = {name: values[inputs["task"]] for name, values in stack.items()}
            return found(executor.vit_of(leaves), inputs, own, inputs["weight"])

        self._answer = answer
        self.fitter = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=executor.rows)

    @abc.abstractmethod
    def begin_prompts(self, key: jax.Array) -> Prompts:
        """The initial prompts of any task."""

    @abc.abstractmethod
    def enter(self, vit: ViT, images: Array) -> Float[Array, "B N D"]:
        """Tokens that do not depend on any prompt."""

    @abc.abstractmethod
    def prompted(
        self,
        vit: ViT,
        tokens: Float[Array, "B N D"],
        prompts: Mapping[str, Float[Array, "B ..."]],
        weight: Array,
    ) -> Float[Array, "B D"]:
        """Features of each image with its own prompts, which act with the weight `[B]`."""

    @abc.abstractmethod
    def fit_router(self, features: Float[np.ndarray, "N E"], task: Task) -> dict[str, np.ndarray]:
        """The router's statistics of a task, from the frozen features of its training images."""

    def inputs(self, task: Task, fitting: Fitting) -> Inputs:
        """The training inputs, which every epoch reads."""
        return Inputs(task.train.images)

    def number(self, task: Task) -> int:
        """See `TrainedBaseline.number`: the same wherever the task stands in the stream."""
        return task_number(task.name)

    def start(self, task: Task) -> tuple[Prompts, Head]:
        """Prompts and a head."""
        prompts = self.begin_prompts(self.key(task, Phase.METHOD_INIT, Init.LEARNED))
        key = self.key(task, Phase.METHOD_INIT, Init.HEAD)
        width = self.executor.config.width
        return prompts, grow_head(key, None, width, 0, len(task.classes))

    def learn_task(self, task: Task, fitting: Fitting) -> dict[str, Any]:
        """Train the task's prompts and head, then fit the router's statistics; earlier tasks play
        no part."""
        vit = self.executor.config
        num = len(task.classes)
        with fitting.session.phase("keep"):
            inputs = self.inputs(task, fitting)
        self.train(fitting, task, (self.executor.leaves, np.int32(num)), inputs)
        prompts, head = fitting.learned
        with fitting.session.phase("features"):
            features = self.router_features(task.train.images)
        with fitting.session.phase("router"):
            router = self.fit_router(features, task)
        self.tasks.append(PromptedTask(jax.tree.map(np.asarray, prompts), cut(head, num), router))
        added, kept = (
            sum(values.size for values in arrays.values()) for arrays in (prompts, router)
        )
        learned = added + (vit.width + 1) * num
        return params_report(vit, added=added, learned=learned, stored=learned + kept)

    def stack(self) -> dict[str, np.ndarray]:
        """The prompts of all tasks, padded to a power of two with those of the first."""
        tasks = [
            *self.tasks,
            *[self.tasks[0]] * (next_power_of_two(len(self.tasks)) - len(self.tasks)),
        ]
        return {name: np.stack([task.prompts[name] for task in tasks]) for name in tasks[0].prompts}


def halves(prompts: Float[Array, "B P D"]) -> Prefix:
    """A prompt of 2P rows as P keys and P values."""
    half = prompts.shape[1] // 2
    return Prefix(prompts[:, :half], prompts[:, half:])


def cosine(a: Float[Array, "... D"], b: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Cosine over the last axis; its gradient is finite at zero vectors too."""
    norms = jnp.sqrt((a * a).sum(-1) + 1e-24) * jnp.sqrt((b * b).sum(-1) + 1e-24)
    return (a * b).sum(-1) / norms


def check_layers(layers: tuple[int, ...], depth: int) -> None:
    """ValueError for blocks that the backbone does not have."""
    wrong = [layer for layer in layers if not 0 <= layer < depth]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise ValueError(
            f"layers {layers} are invalid for this backbone; expected some of 0..{depth - 1}, each"
            " once"
        )
