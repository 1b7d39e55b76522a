"""The interface of a continual learner, and what several methods share: frozen features, seconds,
checks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import executed_pass_flops, pass_flops
from cheem_jax.core.images import Images
from cheem_jax.core.pool import dense_expert
from cheem_jax.core.routing import PAPER, RouterConfig, join_tokens
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Dense, Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import intermediate_features, network_features
from cheem_jax.run.session import Session


class Answers(NamedTuple):
    """One method's predictions for the images of one task, made per image.

    `given_task` is the class predicted with the task ID given, `chosen_task` the inferred task ID
    and `chosen_class` the class predicted with it. A method with one network per task fills in
    `chosen_class` only where the inferred task ID is right: for the other images the prediction is
    wrong whatever the class.
    """

    given_task: Int[np.ndarray, "N"]
    chosen_task: Int[np.ndarray, "N"]
    chosen_class: Int[np.ndarray, "N"]


@runtime_checkable
class Method(Protocol):
    """A continual learner: it learns tasks one after another and predicts for all of them."""

    name: str

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """Check the settings against a whole stream before learning starts; returns warnings for
        the user.

        Raises ValueError if the settings cannot work with the stream.
        """
        ...

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """Learn the next task; returns its report: JSON values, with `seconds` by phase and costs
        per image."""
        ...

    def bytes_needed(self, task: Task) -> int:
        """Upper bound of the disk space in bytes that learning this task takes, rolling checkpoints
        included."""
        ...

    def save(self, root: Path) -> None:
        """Save what the last task added below `root`, and continue with what is read back from
        disk."""
        ...

    def open(self, root: Path) -> None:
        """Before the first task: take over the checkpoints below `root`; raises ValueError if one
        is corrupted."""
        ...

    def answers(self, index: int, task: Task) -> Answers:
        """Predictions for the test images of a learned task, whose position in the stream is
        `index`."""
        ...

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """Task ID and class within the task for each image, uint8 `[N, S, S, 3]`; every image is
        predicted alone.

        `tasks` are the true task IDs, which upper bounds need. Raises ValueError as `check_given`.
        """
        ...


@runtime_checkable
class Encoder(Protocol):
    """A frozen network whose features infer the task ID or query prompts."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    def flops(self, *, count_attention: bool = False) -> int:
        """FLOPs per image by the paper's convention."""
        ...

    def executed_flops(self) -> int:
        """FLOPs per image as executed."""
        ...

    def features(self, images: Images, *, batch_size: int) -> Float[np.ndarray, "N D"]:
        """Features of images uint8 `[N, S, S, 3]`."""
        ...


class Backbone:
    """The plain backbone of an executor as an encoder: its CLS token after the last LayerNorm, or
    what `reads` names.

    Raises ValueError if the backbone has too few blocks for that.
    """

    def __init__(self, executor: Executor, reads: RouterConfig = PAPER):
        self.executor = executor
        self.network = base_network(executor)
        depth = executor.num_blocks
        self.blocks = reads.blocks(depth)
        self.until = reads.until(depth)
        self.is_plain = reads.features == "last"
        self.name = executor.config.name
        self.width = reads.num_parts(depth) * executor.config.width

    def flops(self, *, count_attention: bool = False) -> int:
        """See `Encoder.flops`."""
        executor = self.executor
        return pass_flops(
            executor.config, executor.placement, self.until, count_attention=count_attention
        )

    def executed_flops(self) -> int:
        """See `Encoder.executed_flops`."""
        return executed_pass_flops(self.executor.config, self.executor.placement, self.until)

    def features(self, images: Images, *, batch_size: int) -> Float[np.ndarray, "N D"]:
        """See `Encoder.features`."""
        feed = HostImages(self.executor, images)
        num = len(images)
        if self.is_plain:
            return network_features(
                self.executor, [self.network], feed, num, batch_size=batch_size
            )[0]
        parts = intermediate_features(
            self.executor,
            self.network,
            feed,
            num=num,
            blocks=self.blocks,
            until=self.until,
            batch_size=batch_size,
        )
        return join_tokens(parts)


class FrozenFeatures:
    """Features of an initial frozen network, computed once per image and run (deterministic: no
    augmentation)."""

    def __init__(self, encoder: Encoder | Executor, batch_size: int):
        self.encoder: Encoder = Backbone(encoder) if isinstance(encoder, Executor) else encoder
        self.batch_size = batch_size
        # kept with their images: another run in this process may have other images under the same
        # names
        self._known: dict[tuple[str, str], tuple[Images, Float[np.ndarray, "N D"]]] = {}

    def of(self, executor: Executor) -> bool:
        """Whether this executor's backbone computes them, so that networks can resume from the same
        pass."""
        return isinstance(self.encoder, Backbone) and self.encoder.executor is executor

    def ends(self, executor: Executor) -> bool:
        """Whether they are the last features of this executor's backbone, which any full pass
        computes."""
        return isinstance(self.encoder, Backbone) and self.of(executor) and self.encoder.is_plain

    def __call__(self, task: Task, split: str) -> Float[np.ndarray, "N D"]:
        """Features of one split of a task."""
        if not self.known(task, split):
            self.remember(task, split, self.compute(getattr(task, split).images))
        return self._known[task.name, split][1]

    def compute(self, images: Images) -> Float[np.ndarray, "N D"]:
        """Features of any images uint8 `[N, S, S, 3]`; those of a split are not computed again."""
        for images_of_split, features in self._known.values():
            if images_of_split is images:
                return features
        return self.encoder.features(images, batch_size=self.batch_size)

    def known(self, task: Task, split: str) -> bool:
        """Whether the features of a split are computed already."""
        key = (task.name, split)
        return key in self._known and self._known[key][0] is getattr(task, split).images

    def remember(self, task: Task, split: str, features: Float[np.ndarray, "N D"]) -> None:
        """Keep features that another pass computed anyway."""
        self._known[task.name, split] = getattr(task, split).images, features

    def clear(self) -> None:
        """Drop all."""
        self._known.clear()

    def forget(self, task: Task) -> None:
        """Drop the training and validation features of a learned task: exemplar-free learning keeps
        none."""
        for split in ("train", "val"):
            self._known.pop((task.name, split), None)


class FrozenNetworks(NamedTuple):
    """The executor of the frozen backbone, its features, and the features that infer the task ID:
    the same ones without a router network."""

    executor: Executor
    features: FrozenFeatures
    router_features: FrozenFeatures

    def forget(self, task: Task) -> None:
        """Drop the training and validation features of a learned task."""
        self.features.forget(task)
        self.router_features.forget(task)


def check_given(
    method: str, num_tasks: int, tasks: np.ndarray | None, *, needs_task_id: bool = False
) -> None:
    """ValueError if nothing was learned, or if task IDs are out of range or missing where a method
    needs them."""
    if not num_tasks:
        raise ValueError(
            f"nothing has been learned yet, so {method} has no task to infer; learn a task first"
        )
    if needs_task_id and tasks is None:
        raise ValueError(f"{method} is an upper bound: give the true task ID of each image")
    if tasks is not None and len(tasks) and not (0 <= np.min(tasks) and np.max(tasks) < num_tasks):
        given = sorted(set(np.asarray(tasks).tolist()))
        raise ValueError(
            f"task IDs {given} given; expected 0..{num_tasks - 1}, as {num_tasks} tasks were"
            " learned"
        )


def base_network(executor: Executor) -> list[Dense]:
    """The plain backbone as a network for forward passes."""
    return [Dense(0, dense_expert(block, 0)) for block in executor.base_pool]
