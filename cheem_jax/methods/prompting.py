"""What L2P, DualPrompt and CODA-Prompt share: prompts chosen by the frozen backbone's own feature of an image.

The query is the class token of a pass without prompts, cached per image. Prompts act as keys and values in front of a
block's own. One linear head holds the classes of all tasks; training sees the columns of the running task alone, an
answer is the largest logit of all: this gap is what the paper's comparison of heads is about.
"""

import abc
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.vit import Prefix, ViT
from cheem_jax.checkpoint import load_task, load_tasks, named, save_task, saved_tasks, task_directory
from cheem_jax.data.task import Task
from cheem_jax.execution.executor import Executor
from cheem_jax.execution.inference import Inferred
from cheem_jax.flops import backbone_flops, backbone_params, executed_backbone_flops
from cheem_jax.keys import Keys, Phase
from cheem_jax.methods.fitting import Batch, Fitter, Fitting, Inputs, left, over_batches, whole
from cheem_jax.methods.heads import Classes, cut, grow_head, head_logits, local_cross_entropy, padded
from cheem_jax.methods.method import Answers, Clock, FrozenFeatures, Running, check_given
from cheem_jax.pool import Head
from cheem_jax.rolling import Saved
from cheem_jax.training import FitConfig

Prompts = dict[str, Array]
"""A method's learned arrays by name, all tasks' together."""


@runtime_checkable
class PromptConfig(Protocol):
    """What every prompting method's settings hold."""

    @property
    def fit(self) -> FitConfig: ...
    @property
    def batch_size(self) -> int: ...


class Attached(NamedTuple):
    """What the prompts of a batch come to: prefixes by block, or tokens in front of all, and a loss per image."""

    prefixes: Mapping[int, Prefix]
    key_loss: Float[Array, "B"]
    tokens: Float[Array, "B n D"] | None = None


class Prompting(abc.ABC):
    """A frozen backbone with prompts and one head over all classes."""

    name = "prompting"
    divided = False
    """Whether the prompts are divided among all tasks beforehand, so that their number says what a row is."""

    def __init__(self, executor: Executor, features: FrozenFeatures, config: PromptConfig, keys: Keys, num_tasks: int):
        self.executor, self.features, self.keys, self.num_tasks = executor, features, keys, num_tasks
        self.fit, self.batch_size = config.fit, config.batch_size
        self.prompts: Prompts = {}
        self.head: Head | None = None
        self.classes = Classes()

        def logits(prompts, head, leaves, inputs, task, weights):
            vit = executor.vit_of(leaves)
            attached = self.attach(prompts, inputs["query"], task, weights)
            return head_logits(head, _features(vit, inputs["images"], attached)), attached

        def loss(learned, fixed, batch: Batch):
            (prompts, head), (leaves, task, first, num) = learned, fixed
            found, attached = logits(prompts, head, leaves, batch.inputs, task, batch.weights)
            local = local_cross_entropy(found, batch.labels, batch.weights, first, num)
            return local + (attached.key_loss * batch.weights).sum()

        @executor.jit
        def answer(prompts, head, leaves, inputs, task):
            return logits(prompts, head, leaves, inputs, task, None)[0]

        rows = executor.rows if self.each_by_itself() else whole
        self.fitter, self._answer = Fitter(loss, jit=executor.jit, layout=executor.layout, rows=rows), answer

    def each_by_itself(self) -> bool:
        """Whether no image's loss depends on the others of its batch."""
        return True

    @abc.abstractmethod
    def begin_task(self, key: jax.Array, prompts: Prompts, index: int) -> Prompts:
        """The prompts with which task `index` begins; `prompts` is empty for the first."""

    @abc.abstractmethod
    def attach(
        self, prompts: Prompts, query: Float[Array, "B D"], task: Int[Array, ""], weights: Float[Array, "B"] | None
    ) -> Attached:
        """What the prompts give each image.

        `task` is the running task in training, which is known there, and else the last one learned. `weights` are
        those of a training batch's images, 0 for padding; None where answers are wanted.
        """

    @abc.abstractmethod
    def prompt_flops(self) -> int:
        """Attention products that the prompts add, per image."""

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the prompts and the task's columns of the head."""
        keys, index, num, seen = self.keys, len(self.classes), len(task.classes), int(self.classes.first[-1])
        clock = Clock(running.saved.meta["seconds"] if running.saved else None)
        with clock("features"):
            query = self.features(task, "train")
        width = self.executor.config.width
        prompts = self.begin_task(keys.at(index, Phase.METHOD_INIT, 0), self.prompts, index)
        head = grow_head(keys.at(index, Phase.METHOD_INIT, 1), self.head, width, seen, num)
        fitting = self.fitter.begun((prompts, head), running.saved)
        fixed = (self.executor.leaves, np.int32(index), np.int32(seen), np.int32(num))
        total = left(fitting, self.fit, len(task.train.labels), self.batch_size)
        state = functools.partial(saved, fitting, clock)
        with clock("train"), running.phase("train", total, state) as advance:
            self.fitter.run(
                fitting, fixed, task.train.labels, Inputs(task.train.images, query=query), self.fit,
                batch_size=self.batch_size, order_key=keys.at(index, Phase.METHOD_ORDER),
                noise_key=keys.at(index, Phase.METHOD_NOISE), advance=advance,
            )  # fmt: skip
        self.prompts, self.head = fitting.learned
        self.classes.add(task.name, task.classes)
        added, head_params = self.num_added(index), (width + 1) * num
        vit, passes = self.executor.config, 2 * backbone_flops(self.executor.config)
        attention = 2 * (backbone_flops(vit, count_attention=True) - backbone_flops(vit))
        return {
            "name": task.name,
            "flops_method": passes + self.linear_flops(),
            "flops_explicit": passes + self.linear_flops() + attention + self.prompt_flops(),
            "flops_executed": 2 * executed_backbone_flops(vit)
            + self.linear_flops()
            + self.prompt_flops()
            + self.choice_flops()
            + 2 * width * (seen + num),
            "params_added_percent": 100 * added / backbone_params(vit),
            "params_learned": self.num_learned(index) + head_params,
            "params_stored": added + head_params,
            "losses": fitting.state.losses,
            "skipped_steps": fitting.state.skipped,
            "seconds": clock.seconds,
            **self.more_report(query, index),
        }

    def num_learned(self, index: int) -> int:
        """Prompt parameters that task `index` trains."""
        return sum(p.size for p in self.prompts.values())

    def num_added(self, index: int) -> int:
        """Prompt parameters kept from task `index` on: the whole pool with the first, unless tasks own their parts."""
        return self.num_learned(index) if index == 0 else 0

    def linear_flops(self) -> int:
        """Prompts through linear layers, per image: none, as keys and values pass none."""
        return 0

    def choice_flops(self) -> int:
        """Products that choose or mix prompts: they run, but no count of the paper's holds them."""
        return 0

    def more_report(self, query: Float[np.ndarray, "N D"], index: int) -> dict[str, Any]:
        """What else is worth telling of a task just learned, from its training images' queries."""
        return {}

    def bytes_needed(self, task: Task) -> int:
        """Prompts and head; in a rolling checkpoint and its successor with both moments."""
        shapes = jax.eval_shape(lambda: self.begin_task(jax.random.key(0), {}, 0))
        prompts = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        head = (self.executor.config.width + 1) * 2 * (int(self.classes.first[-1]) + len(task.classes))
        return 4 * 2 * 3 * (prompts + head)

    def logits(self, inputs: Inputs, num: int) -> Float[np.ndarray, "N P"]:
        """Logits of all classes for `num` images with their queries."""
        last = np.int32(len(self.classes) - 1)

        def answer(read: dict[str, Any]) -> jax.Array:
            return self._answer(self.prompts, self.head, self.executor.leaves, read, last)

        return over_batches(answer, inputs, num, batch_size=self.batch_size, layout=self.executor.layout)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.classes), tasks)
        query = self.features.compute(images)
        return self.classes.inferred(self.logits(Inputs(images, query=query), len(images)), tasks)

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        inputs = Inputs(task.test.images, query=self.features(task, "test"))
        return self.classes.answers(self.logits(inputs, len(task.test.labels)), index)

    def save(self, root: Path) -> None:
        """Save the prompts and the whole head, which later tasks may change, and go on with what is read back."""
        index = len(self.classes) - 1
        assert self.head is not None
        arrays = {"prompts": self.prompts, "head": cut(self.head, int(self.classes.first[-1]))._asdict()}
        name, classes = self.classes.names[-1], list(self.classes.classes[-1])
        meta = {"name": name, "classes": classes, "num_tasks": self.num_tasks}
        directory = task_directory(root, index, self.classes.names[-1])
        save_task(directory, arrays, meta)
        self._restore(directory, load_task(directory)[0])

    def open(self, root: Path) -> None:
        """Replace the state by what is saved."""
        directories, self.classes = saved_tasks(root), Classes()
        self.prompts, self.head = {}, None
        for directory, (arrays, meta) in zip(directories, load_tasks(directories), strict=True):
            with named(directory):
                self.classes.add(meta["name"], meta["classes"])
                if self.divided and meta["num_tasks"] != self.num_tasks:
                    raise ValueError(
                        f"its prompts were divided among {meta['num_tasks']} tasks, not {self.num_tasks}; open it as "
                        "it was learned"
                    )
            self._restore(directory, arrays)

    def _restore(self, directory: Path, arrays: Mapping[str, Any]) -> None:
        with named(directory):
            self.prompts = {name: jnp.asarray(values) for name, values in arrays["prompts"].items()}
            self.head = padded(Head(**arrays["head"]))


def _features(vit: ViT, images: Array, attached: Attached) -> Float[Array, "B D"]:
    x = vit.embed(images)
    if attached.tokens is None:
        return vit.features(vit.run_blocks(x, prefixes=attached.prefixes))
    num = attached.tokens.shape[1]
    x = vit.run_blocks(jnp.concatenate([attached.tokens, x], axis=1), all_tokens=True)
    return vit.norm(x[:, :num]).mean(axis=1)


def saved(fitting: Fitting, clock: Clock) -> Saved:
    """What a rolling checkpoint keeps of a fit."""
    return Saved(fitting.arrays(), {**fitting.meta(), "seconds": clock.so_far()})


def halves(prompts: Float[Array, "B P D"]) -> Prefix:
    """A prompt of 2P rows as P keys and P values."""
    half = prompts.shape[1] // 2
    return Prefix(prompts[:, :half], prompts[:, half:])


def cosine(a: Float[Array, "... D"], b: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Cosine over the last axis, with a gradient at zero vectors too."""
    norms = jnp.sqrt((a * a).sum(-1) + 1e-24) * jnp.sqrt((b * b).sum(-1) + 1e-24)
    return (a * b).sum(-1) / norms
