"""What L2P, DualPrompt and CODA-Prompt share: prompts selected by the frozen backbone's feature of an image.

The query is the CLS token of a pass without prompts, cached per image. Prompts act as keys and values in front of a
block's own. One linear head holds the classes of all tasks. Training sees the columns of the current task alone, a
prediction is the largest logit of all classes: the paper's comparison of heads is about this gap.
"""

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import executed_backbone_flops
from cheem_jax.backbone.vit import Prefix, ViT
from cheem_jax.baselines.costs import params_report, plain_flops
from cheem_jax.baselines.fitting import FitBatch, FitSettings, Fitter, Init, Inputs, over_batches, train_task, whole
from cheem_jax.baselines.saving import restore_all, save_and_restore
from cheem_jax.cheem.heads import Classes, cut, grow_head, head_logits, local_cross_entropy, padded
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.method import Answers, Clock, FrozenFeatures, Running, check_given

Prompts = dict[str, Array]
"""A method's learned arrays by name, of all tasks together."""


class Attached(NamedTuple):
    """The prompts of a batch: prefixes by block, or tokens in front of all others, and a loss of the keys per image."""

    prefixes: Mapping[int, Prefix]
    key_loss: Float[Array, "B"]
    tokens: Float[Array, "B n D"] | None = None


class PromptFlops(NamedTuple):
    """FLOPs per image that prompts add to a pass."""

    attention: int
    """Attention products with the prompts."""
    selection: int
    """Selecting or mixing prompts, which is executed but in no count of the paper."""
    linear: int = 0
    """Prompts through linear layers: none for keys and values."""


class Prompting(abc.ABC):
    """A frozen backbone with prompts and one head over all classes."""

    name = "prompting"
    divided = False
    """Whether the prompts are divided among all tasks beforehand, so that a row's meaning depends on their number."""

    def __init__(self, executor: Executor, features: FrozenFeatures, config: FitSettings, keys: Keys, num_tasks: int):
        self.executor, self.features, self.keys, self.num_tasks = executor, features, keys, num_tasks
        self.config = config
        self.prompts: Prompts = {}
        self.head: Head | None = None
        self.classes = Classes()

        def logits(prompts, head, leaves, inputs, task, weights):
            vit = executor.vit_of(leaves)
            attached = self.attach(prompts, inputs["query"], task, weights)
            return head_logits(head, _features(vit, inputs["images"], attached)), attached

        def loss(learned, fixed, batch: FitBatch):
            (prompts, head), (leaves, task, first, num) = learned, fixed
            found, attached = logits(prompts, head, leaves, batch.inputs, task, batch.weights)
            local = local_cross_entropy(found, batch.labels, batch.weights, first, num)
            # only the current task's columns compete, so old columns get no gradient; keys are pulled to the query
            return local + (attached.key_loss * batch.weights).sum()

        @executor.jit
        def answer(prompts, head, leaves, inputs, task):
            return logits(prompts, head, leaves, inputs, task, None)[0]

        rows = executor.rows if self.each_by_itself() else whole
        self.fitter, self._answer = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=rows), answer

    def each_by_itself(self) -> bool:
        """Whether no image's loss depends on the other images of its batch."""
        return True

    @abc.abstractmethod
    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """The prompts with which task `index` begins; `prompts` is empty for the first."""

    @abc.abstractmethod
    def attach(
        self, prompts: Prompts, query: Float[Array, "B D"], task: Int[Array, ""], weights: Float[Array, "B"] | None
    ) -> Attached:
        """The prompts of each image.

        In training `task` is the current task and `weights` are those of the images, 0 for padding. In prediction
        `task` is the last one learned and `weights` is None.
        """

    @abc.abstractmethod
    def prompt_flops(self) -> PromptFlops:
        """FLOPs that the prompts add."""

    @abc.abstractmethod
    def num_params(self, index: int) -> tuple[int, int]:
        """The numbers of prompt parameters that task `index` trains and that it adds to those stored."""

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the prompts and the task's columns of the head."""
        keys, index, num, seen = self.keys, len(self.classes), len(task.classes), self.classes.num
        clock, width = Clock.of(running), self.executor.config.width
        with clock("features"):
            query = self.features(task, "train")
        prompts = self.begin_task(keys.at(index, Phase.METHOD_INIT, Init.LEARNED), self.prompts, index)
        head = grow_head(keys.at(index, Phase.METHOD_INIT, Init.HEAD), self.head, width, seen, num)
        fitting = self.fitter.begun((prompts, head), running.saved)
        fixed = (self.executor.leaves, np.int32(index), np.int32(seen), np.int32(num))
        train_task(
            self.fitter, fitting, fixed, task.train.labels, Inputs(task.train.images, query=query),
            config=self.config, keys=keys, number=index, running=running, clock=clock,
        )  # fmt: skip
        self.prompts, self.head = fitting.learned
        self.classes.add(task.name, task.classes)
        (learned, added), head_params = self.num_params(index), (width + 1) * num
        return {
            "name": task.name,
            **self.costs(),
            **params_report(
                self.executor.config, added=added, learned=learned + head_params, stored=added + head_params
            ),
            **fitting.report(clock),
            **self.more_report(query, index),
        }

    def costs(self) -> dict[str, int]:
        """FLOPs per image: a pass for the query, and one with prompts and the head."""
        vit, prompts = self.executor.config, self.prompt_flops()
        plain = plain_flops(vit, self.classes.num)
        return {
            "flops_method": 2 * plain["flops_method"] + prompts.linear,
            "flops_explicit": 2 * plain["flops_explicit"] + prompts.linear + prompts.attention,
            "flops_executed": executed_backbone_flops(vit) + plain["flops_executed"] + sum(prompts),
        }

    def more_report(self, query: Float[np.ndarray, "N D"], index: int) -> dict[str, Any]:
        """More entries of a task's report, from the queries of its training images."""
        return {}

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: prompts and head, in two rolling checkpoints with Adam's moments."""
        shapes = jax.eval_shape(lambda: self.begin_task(jax.random.key(0), {}, 0))
        prompts = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        head = (self.executor.config.width + 1) * 2 * (self.classes.num + len(task.classes))
        return 4 * 2 * 3 * (prompts + head)

    def logits(self, inputs: Inputs) -> Float[np.ndarray, "N P"]:
        """Logits of all classes, padded, for images with their queries."""
        last = np.int32(len(self.classes) - 1)

        def answer(read: dict[str, Any]) -> jax.Array:
            return self._answer(self.prompts, self.head, self.executor.leaves, read, last)

        return over_batches(answer, inputs, batch_size=self.config.batch_size, layout=self.executor.layout)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.classes), tasks)
        return self.classes.inferred(self.logits(Inputs(images, query=self.features.compute(images))), tasks)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        return self.classes.answers(self.logits(Inputs(task.test.images, query=self.features(task, "test"))), index)

    def save(self, root: Path) -> None:
        """See `Method.save`: the prompts and the whole head, as later tasks may change them."""
        assert self.head is not None
        arrays = {"prompts": self.prompts, "head": cut(self.head, self.classes.num)._asdict()}
        self.prompts, self.head = save_and_restore(root, self.classes.last, arrays, _restored, num_tasks=self.num_tasks)

    def open(self, root: Path) -> None:
        """See `Method.open`."""
        self.prompts, self.head, self.classes = {}, None, Classes()
        restore_all(root, self._open_task)

    def _open_task(self, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        if self.divided and meta["num_tasks"] != self.num_tasks:
            raise ValueError(
                f"its prompts are divided among {meta['num_tasks']} tasks, not {self.num_tasks}; open it with the "
                "number of tasks that it was learned with"
            )
        self.classes.add(meta["name"], meta["classes"])
        self.prompts, self.head = _restored(arrays, meta)


def _restored(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[Prompts, Head]:
    prompts = {name: jnp.asarray(values) for name, values in arrays["prompts"].items()}
    return prompts, padded(Head(**arrays["head"]))


def _features(vit: ViT, images: Array, attached: Attached) -> Float[Array, "B D"]:
    x = vit.embed(images)
    if attached.tokens is None:
        return vit.features(vit.run_blocks(x, prefixes=attached.prefixes))
    num = attached.tokens.shape[1]
    x = vit.run_blocks(jnp.concatenate([attached.tokens, x], axis=1), all_tokens=True)
    return vit.norm(x[:, :num]).mean(axis=1)


def halves(prompts: Float[Array, "B P D"]) -> Prefix:
    """A prompt of 2P rows as P keys and P values."""
    half = prompts.shape[1] // 2
    return Prefix(prompts[:, :half], prompts[:, half:])


def cosine(a: Float[Array, "... D"], b: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Cosine over the last axis; its gradient is finite at zero vectors too."""
    norms = jnp.sqrt((a * a).sum(-1) + 1e-24) * jnp.sqrt((b * b).sum(-1) + 1e-24)
    return (a * b).sum(-1) / norms
