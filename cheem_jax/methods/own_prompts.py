"""What S-Prompts and DIKI share: every task has prompts and a head of its own, and a router names an image's task.

Tasks are independent of each other: whatever their order, each learns the same. Images of several tasks are answered in
one batch, each with its own task's prompts, gathered from a stack whose length is a power of two.
"""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cheem_jax.backbone.vit import ViT
from cheem_jax.checkpoint import load_task, load_tasks, named, save_task, saved_tasks, task_directory
from cheem_jax.data.task import Task
from cheem_jax.execution.executor import Executor
from cheem_jax.execution.inference import Inferred
from cheem_jax.flops import backbone_params
from cheem_jax.images import Images
from cheem_jax.keys import Keys, Phase, next_power_of_two, task_number
from cheem_jax.methods.fitting import Batch, Fitter, Inputs, left
from cheem_jax.methods.heads import classes_by_task, cut, grow_head, head_logits, local_cross_entropy
from cheem_jax.methods.method import Answers, Clock, FrozenFeatures, Running, check_given
from cheem_jax.methods.prompting import saved
from cheem_jax.pool import Head
from cheem_jax.training import FitConfig


class PromptedTask(NamedTuple):
    """A learned task; all arrays are the host's."""

    name: str
    classes: tuple[str, ...]
    prompts: dict[str, np.ndarray]
    head: Head
    router: dict[str, np.ndarray]


@runtime_checkable
class OwnPromptsConfig(Protocol):
    """What the settings of both hold."""

    @property
    def fit(self) -> FitConfig: ...
    @property
    def batch_size(self) -> int: ...


class OwnPrompts(abc.ABC):
    """A frozen backbone with prompts and a head per task, behind a router."""

    name = "own_prompts"

    def __init__(self, executor: Executor, features: FrozenFeatures, config: OwnPromptsConfig, keys: Keys):
        self.executor, self.features, self.keys = executor, features, keys
        self.fit, self.batch_size = config.fit, config.batch_size
        self.tasks: list[PromptedTask] = []

        def found(vit: ViT, inputs, prompts, weight):
            tokens = inputs["tokens"] if "tokens" in inputs else self.enter(vit, inputs["images"])
            return self.prompted(vit, tokens, prompts, weight)

        def loss(learned, fixed, batch: Batch):
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
        """The prompts with which any task begins."""

    @abc.abstractmethod
    def enter(self, vit: ViT, images: Array) -> Float[Array, "B N D"]:
        """Tokens that do not depend on any prompt."""

    @abc.abstractmethod
    def prompted(
        self, vit: ViT, tokens: Float[Array, "B N D"], prompts: Mapping[str, Float[Array, "B ..."]], weight: Array
    ) -> Float[Array, "B D"]:
        """Features of each image with its own prompts, which act with a weight `[B]`."""

    @abc.abstractmethod
    def fit_router(self, features: Float[np.ndarray, "N E"], number: int) -> dict[str, np.ndarray]:
        """What names the task, from its training images' frozen features."""

    @abc.abstractmethod
    def run(
        self, images: Images, given: Int[np.ndarray, "N"] | None, query: Callable[[], np.ndarray], *, name_tasks: bool
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        """The task that the router names, and features with the prompts of the given task, or else of that one.

        `query` gives the frozen features if they are needed. Where not `name_tasks`, the choice need not be one.
        """

    @abc.abstractmethod
    def flops(self, num_classes: int) -> dict[str, int]:
        """Per image, by each convention."""

    @abc.abstractmethod
    def router_numbers(self, num_images: int) -> int:
        """Numbers that the router keeps of a task."""

    def inputs(self, task: Task, running: Running) -> Inputs:
        """What training reads, over and over again."""
        return Inputs(task.train.images)

    def more_report(self, features: Float[np.ndarray, "N E"], task: PromptedTask) -> dict[str, Any]:
        """What else is worth telling of a task just learned."""
        return {}

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Train the task's prompts and head, then its part of the router; earlier tasks play no part."""
        keys, number, num = self.keys, task_number(task.name), len(task.classes)
        clock, width = Clock(running.saved.meta["seconds"] if running.saved else None), self.executor.config.width
        prompts = self.begin_prompts(keys.at(number, Phase.METHOD_INIT, 0))
        head = grow_head(keys.at(number, Phase.METHOD_INIT, 1), None, width, 0, num)
        fitting = self._fitter.begun((prompts, head), running.saved)
        total = left(fitting, self.fit, len(task.train.labels), self.batch_size)
        if total:
            with clock("keep"):
                inputs = self.inputs(task, running)
            state = functools.partial(saved, fitting, clock)
            with clock("train"), running.phase("train", total, state) as advance:
                self._fitter.run(
                    fitting, (self.executor.leaves, np.int32(num)), task.train.labels, inputs, self.fit,
                    batch_size=self.batch_size, order_key=keys.at(number, Phase.METHOD_ORDER),
                    noise_key=keys.at(number, Phase.METHOD_NOISE), advance=advance,
                )  # fmt: skip
        prompts, head = fitting.learned
        prompts = {name: np.asarray(values) for name, values in prompts.items()}
        with clock("features"):
            features = self.features(task, "train")
        with clock("router"):
            router = self.fit_router(features, number)
        self.tasks.append(PromptedTask(task.name, task.classes, prompts, cut(head, num), router))
        added, head_params = sum(values.size for values in prompts.values()), (width + 1) * num
        return {
            "name": task.name,
            **self.flops(num),
            "params_added_percent": 100 * added / backbone_params(self.executor.config),
            "params_learned": added + head_params,
            "params_stored": added + head_params + sum(values.size for values in router.values()),
            "losses": fitting.state.losses,
            "skipped_steps": fitting.state.skipped,
            "seconds": clock.seconds,
            **self.more_report(features, self.tasks[-1]),
        }

    def bytes_needed(self, task: Task) -> int:
        """Prompts and head, in a rolling checkpoint and its successor with both moments; the router once."""
        shapes = jax.eval_shape(lambda: self.begin_prompts(jax.random.key(0)))
        prompts = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        head = (self.executor.config.width + 1) * next_power_of_two(len(task.classes))
        return 4 * 2 * 3 * (prompts + head) + 8 * self.router_numbers(len(task.train.labels))

    def stack(self) -> dict[str, np.ndarray]:
        """The prompts of all tasks, padded to a power of two of tasks."""
        tasks = [*self.tasks, *[self.tasks[0]] * (next_power_of_two(len(self.tasks)) - len(self.tasks))]
        return {name: np.stack([task.prompts[name] for task in tasks]) for name in tasks[0].prompts}

    def classes_of(self, features: Float[np.ndarray, "N D"], tasks: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """The class that each image's task's head gives it."""
        return classes_by_task(features, [task.head for task in self.tasks], tasks)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        check_given(self.name, len(self.tasks), tasks)
        given = None if tasks is None else np.asarray(tasks, np.int32)
        chosen, features = self.run(images, given, lambda: self.features.compute(images), name_tasks=given is None)
        used = chosen if given is None else given
        return Inferred(used, self.classes_of(features, used))

    def answers(self, index: int, task: Task) -> Answers:
        """See `Method.answers`."""
        given = np.full(len(task.test.labels), index, np.int32)
        chosen, features = self.run(task.test.images, given, lambda: self.features(task, "test"), name_tasks=True)
        local = self.classes_of(features, given)
        return Answers(local, chosen, local)

    def save(self, root: Path) -> None:
        """Save what the last task added, and go on with what is read back."""
        index, task = len(self.tasks) - 1, self.tasks[-1]
        arrays = {"prompts": task.prompts, "head": task.head._asdict(), "router": task.router}
        directory = task_directory(root, index, task.name)
        save_task(directory, arrays, {"name": task.name, "classes": list(task.classes)})
        self.tasks[-1] = _task_of(directory, *load_task(directory))

    def open(self, root: Path) -> None:
        """Replace the state by what is saved."""
        directories = saved_tasks(root)
        read = zip(directories, load_tasks(directories), strict=True)
        self.tasks = [_task_of(directory, arrays, meta) for directory, (arrays, meta) in read]


def _task_of(directory: Path, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> PromptedTask:
    with named(directory):
        head = Head(**arrays["head"])
        return PromptedTask(meta["name"], tuple(meta["classes"]), arrays["prompts"], head, arrays["router"])
