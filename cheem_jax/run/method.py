"""The interface of continual learners, and the frozen features that they share."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import executed_pass_flops, pass_flops
from cheem_jax.core.images import Images
from cheem_jax.core.pool import dense_expert
from cheem_jax.core.routing import PAPER, RouterConfig, join_tokens
from cheem_jax.core.settings import Advance, no_progress
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Dense, Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import intermediate_features, network_features
from cheem_jax.run.session import Session


@runtime_checkable
class Method(Protocol):
    """A continual learner, which learns tasks one after another and predicts for all learned
    tasks."""

    name: str

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """Check the settings for the whole stream before learning starts, and return warnings for
        the user.

        Raises ValueError if the settings are invalid for the stream.
        """
        ...

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """Learn the next task. Return a report of JSON values, including the `seconds` of each
        phase and the costs per image."""
        ...

    def bytes_needed(self, task: Task) -> int:
        """Return an upper bound on the disk space in bytes for learning a task, including rolling
        checkpoints."""
        ...

    def save(self, root: Path) -> None:
        """Save the last learned task in `root`, read the checkpoint back, and continue with the
        arrays from disk."""
        ...

    def open(self, root: Path) -> None:
        """Load all checkpoints in `root`. This method is called before the first task is learned.
        Raises ValueError if a checkpoint is corrupted."""
        ...

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """Infer the task ID of each image, and predict its class within the task.

        Args:
            images: uint8 `[N, S, S, 3]`.
            task_ids: true task IDs; None predicts classes within the inferred tasks.

        Predictions are per image. A method that needs the task IDs returns them as the inferred
        IDs, and raises ValueError if `task_ids` is None. Raises ValueError for unknown task IDs.
        """
        ...


def check_task_ids(
    task_ids: Int[np.ndarray, "N"], num_tasks: int, num_images: int
) -> Int[np.ndarray, "N"]:
    """Return task IDs as int32. Raises ValueError unless there is an integer in 0..num_tasks-1 for
    each of `num_images` images."""
    given = np.asarray(task_ids)
    if given.shape != (num_images,) or given.dtype.kind not in "iu":
        raise ValueError(
            f"task IDs have the shape {given.shape} and the type {given.dtype}; expected one"
            f" integer for each of {num_images} images"
        )
    task_ids = given.astype(np.int32)
    if len(wrong := np.unique(task_ids[(task_ids < 0) | (task_ids >= num_tasks)])):
        raise ValueError(
            f"task IDs {wrong[:5].tolist()} are unknown; expected IDs of learned tasks, 0 to"
            f" {num_tasks - 1}"
        )
    return task_ids


@runtime_checkable
class Encoder(Protocol):
    """A frozen network whose features are used to infer the task ID or to query prompts."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    def flops(self, *, count_attention: bool = False) -> int:
        """Return the FLOPs per image by the paper's convention."""
        ...

    def executed_flops(self) -> int:
        """Return the executed FLOPs per image."""
        ...

    def features(
        self, images: Images, *, batch_size: int, advance: Advance = no_progress
    ) -> Float[np.ndarray, "N D"]:
        """Compute the features of uint8 images `[N, S, S, 3]`. `advance` is called after each
        batch."""
        ...


class Backbone:
    """The plain backbone of an executor as an encoder. Its features are the CLS token after the
    last LayerNorm, or the features selected by `reads`.

    Raises ValueError if the backbone has too few blocks for the selected features.
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
        """Return the FLOPs per image, by the paper's convention, of the blocks that the features
        require."""
        executor = self.executor
        return pass_flops(
            executor.config, executor.placement, self.until, count_attention=count_attention
        )

    def executed_flops(self) -> int:
        """Return the executed FLOPs per image of the blocks that the features require."""
        return executed_pass_flops(self.executor.config, self.executor.placement, self.until)

    def features(
        self, images: Images, *, batch_size: int, advance: Advance = no_progress
    ) -> Float[np.ndarray, "N D"]:
        """See `Encoder.features`."""
        feed = HostImages(self.executor, images)
        num = len(images)
        sizes = {"batch_size": batch_size, "advance": advance}
        if self.is_plain:
            return network_features(self.executor, [self.network], feed, num, **sizes)[0]
        parts = intermediate_features(
            self.executor,
            self.network,
            feed,
            num=num,
            blocks=self.blocks,
            until=self.until,
            **sizes,
        )
        return join_tokens(parts)


class FrozenFeatures:
    """Features of a frozen network, computed once per image array and cached until the array is
    garbage-collected."""

    def __init__(self, encoder: Encoder | Executor, batch_size: int):
        self.encoder: Encoder = Backbone(encoder) if isinstance(encoder, Executor) else encoder
        self.batch_size = batch_size
        self._cache: dict[int, tuple[weakref.ref[Images], Float[np.ndarray, "N D"]]] = {}

    def of(self, executor: Executor) -> bool:
        """Return whether the backbone of `executor` computes the features. If so, a task network
        can continue from the same pass."""
        return isinstance(self.encoder, Backbone) and self.encoder.executor is executor

    def ends(self, executor: Executor) -> bool:
        """Return whether the features are the final features of the backbone of `executor`. If so,
        every full pass of the backbone computes them."""
        return isinstance(self.encoder, Backbone) and self.of(executor) and self.encoder.is_plain

    def __call__(self, images: Images, advance: Advance = no_progress) -> Float[np.ndarray, "N D"]:
        """Return the features of uint8 images `[N, S, S, 3]`. If they are not cached, `advance` is
        called after each batch."""
        if not self.has(images):
            features = self.encoder.features(images, batch_size=self.batch_size, advance=advance)
            self.store(images, features)
        return self._cache[id(images)][1]

    def has(self, images: Images) -> bool:
        """Return whether the features of these images are cached."""
        return id(images) in self._cache

    def store(self, images: Images, features: Float[np.ndarray, "N D"]) -> None:
        """Cache `features`, which another pass has computed from `images`."""
        key = id(images)
        self._cache[key] = weakref.ref(images, lambda _: self._cache.pop(key, None)), features

    def clear(self) -> None:
        """Clear the cache."""
        self._cache.clear()

    def forget(self, task: Task) -> None:
        """Remove the features of a task's training and validation images from the cache.
        Exemplar-free learning does not store features of images."""
        for split in (task.train, task.val):
            self._cache.pop(id(split.images), None)


class FrozenNetworks(NamedTuple):
    """The executor of the frozen backbone, the backbone's features, and the features for task-ID
    inference. `features` and `router_features` are the same object if the router reads the
    backbone's own final features."""

    executor: Executor
    features: FrozenFeatures
    router_features: FrozenFeatures

    def forget(self, task: Task) -> None:
        """Remove the training and validation features of a learned task from both caches."""
        self.features.forget(task)
        self.router_features.forget(task)


def base_network(executor: Executor) -> list[Dense]:
    """Return the plain backbone as a forward-only network."""
    return [Dense(0, dense_expert(block, 0)) for block in executor.base_pool]
