"""What L2P, DualPrompt and CODA-Prompt share: prompts selected by the frozen backbone's feature of an image.

The query is the CLS token of a pass without prompts, cached per image. Prompts act as keys and values in front of a
block's own. One linear head holds the classes of all tasks. Training sees the columns of the current task alone, a
prediction is the largest logit of all classes: the paper's comparison of heads is about this gap.
"""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.flops import executed_backbone_flops
from cheem_jax.backbone.vit import Prefix, ViT
from cheem_jax.baselines.baseline import OneHead, params_report, plain_flops
from cheem_jax.baselines.fitting import FitBatch, Fitter, Init, Inputs
from cheem_jax.cheem.heads import cut, grow_head, head_logits, local_cross_entropy, padded
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Task
from cheem_jax.run.method import Answers, Networks, Running

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


class Prompting(OneHead):
    """A frozen backbone with prompts and one head over all classes."""

    def __init__(self, networks: Networks, config: Any, keys: Keys, num_tasks: int):
        super().__init__(networks, config, keys, num_tasks)
        executor = self.executor
        check_layers(self.layers, executor.config.depth)
        self.prompts: Prompts = {}
        self.head: Head | None = None

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

    def start(self, task: Task) -> tuple[Prompts, Head]:
        """All prompts, and the whole head."""
        keys, index, width = self.keys, len(self.classes), self.executor.config.width
        prompts = self.begin_task(keys.at(index, Phase.METHOD_INIT, Init.LEARNED), self.prompts, index)
        key = keys.at(index, Phase.METHOD_INIT, Init.HEAD)
        return prompts, grow_head(key, self.head, width, self.classes.num, len(task.classes))

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the prompts and the task's columns of the head."""
        index, num, vit = len(self.classes), len(task.classes), self.executor.config
        fitting = self.begun(self.start(task), running)
        with fitting.clock("features"):
            query = self.features(task, "train")
        fixed = (self.executor.leaves, np.int32(index), np.int32(self.classes.num), np.int32(num))
        self.train(fitting, fixed, task.train.labels, Inputs(task.train.images, query=query))
        self.prompts, self.head = fitting.learned
        self.classes.add(task.name, task.classes)
        (learned, added), head_params = self.num_params(index), (vit.width + 1) * num
        return {
            **self.costs(),
            **params_report(vit, added=added, learned=learned + head_params, stored=added + head_params),
            **fitting.report(),
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

    def logits(self, images: Images, query: Float[np.ndarray, "N D"] | None = None) -> Float[np.ndarray, "N P"]:
        """See `OneHead.logits`; `query` are the images' frozen features, if they are known."""
        last, query = np.int32(len(self.classes) - 1), self.features.compute(images) if query is None else query
        return self.over(
            lambda read: self._answer(self.prompts, self.head, self.executor.leaves, read, last),
            Inputs(images, query=query),
        )

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        return self.classes.answers(self.logits(task.test.images, self.features(task, "test")), index)

    def arrays(self) -> dict[str, Any]:
        """The prompts and the whole head, as later tasks may change them."""
        assert self.head is not None
        return {"prompts": self.prompts, "head": cut(self.head, self.classes.num)._asdict()}

    def meta(self) -> dict[str, Any]:
        """The number of tasks, among which the prompts may be divided."""
        return {"num_tasks": self.num_tasks}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """See `Baseline.restore`."""
        self.prompts = jax.tree.map(jnp.asarray, arrays["prompts"])
        self.head = padded(Head(**arrays["head"]))


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


def check_layers(layers: tuple[int, ...], depth: int) -> None:
    """ValueError for blocks that the backbone does not have."""
    wrong = [layer for layer in layers if not 0 <= layer < depth]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise ValueError(f"layers {layers} are invalid for this backbone; expected some of 0..{depth - 1}, each once")
