"""What the loop over a stream asks of a method, and the frozen features that several methods share."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from cheem_jax.data.task import Task
from cheem_jax.execution.executor import Dense, Executor
from cheem_jax.execution.feed import HostImages
from cheem_jax.execution.inference import Inferred
from cheem_jax.execution.passes import Advance, features_on_the_way, network_features
from cheem_jax.flops import executed_pass_flops, pass_flops
from cheem_jax.images import Images
from cheem_jax.pool import dense_expert
from cheem_jax.rolling import Saved
from cheem_jax.routing.config import PAPER, RouterConfig
from cheem_jax.routing.statistics import check_labels, joined


@runtime_checkable
class Running(Protocol):
    """A task while it is learned: what an earlier process left of it, and its phases."""

    @property
    def saved(self) -> Saved | None: ...

    def phase(self, name: str, total: int, state: Callable[[], Saved] | None = None) -> AbstractContextManager[Advance]:
        """Opens a phase by its name and number of images; gives the function that reports work done.

        `state` is asked for what is worth keeping, at any of these reports.
        """
        ...


class Undisturbed:
    """Learning that nobody watches, stops or keeps."""

    saved = None

    def phase(self, name: str, total: int, state: Callable[[], Saved] | None = None) -> AbstractContextManager[Advance]:
        """See `Running.phase`."""
        return nullcontext(lambda num_images, note="", /: None)


class Answers(NamedTuple):
    """One method's answers to images of one task, decided per image.

    `given_task` is the class where the true task is told, `chosen_task` the task the method names by itself and
    `chosen_class` the class it then gives. Where a method runs one network per task, `chosen_class` is only filled in
    for images whose task was found: for the others the answer is wrong whatever the class.
    """

    given_task: Int[np.ndarray, "N"]
    chosen_task: Int[np.ndarray, "N"]
    chosen_class: Int[np.ndarray, "N"]


@runtime_checkable
class Method(Protocol):
    """Learns tasks one after another and answers for all of them."""

    name: str

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """Look at a whole stream before any of it is learned; returns what is worth saying about it.

        Raises ValueError where the settings cannot work with it.
        """
        ...

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """Learn the next task; returns its report: JSON values with `seconds` by phase."""
        ...

    def bytes_needed(self, task: Task) -> int:
        """Disk space that learning this task may take at most, rolling checkpoints included."""
        ...

    def save(self, root: Path) -> None:
        """Save what the last task added, and go on with what is read back."""
        ...

    def open(self, root: Path) -> None:
        """Replace the state by what is saved."""
        ...

    def answers(self, index: int, task: Task) -> Answers:
        """Answers to the test images of a learned task."""
        ...

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """Task and class within it for each image uint8 `[N, S, S, 3]`, decided per image.

        `tasks` gives the true task of each, as upper bounds need it.
        """
        ...


class Clock:
    """Seconds by phase, those of earlier processes included."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = dict(seconds or {})
        self._begun: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str):
        self._begun[phase] = time.perf_counter()
        yield
        self.seconds = self.so_far()
        del self._begun[phase]

    def so_far(self) -> dict[str, float]:
        """The same with the running phases as far as they have come."""
        now, seconds = time.perf_counter(), dict(self.seconds)
        for phase, start in self._begun.items():
            seconds[phase] = seconds.get(phase, 0.0) + now - start
        return seconds


@runtime_checkable
class Encoder(Protocol):
    """A frozen network whose features name tasks or query prompts."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    def flops(self, *, count_attention: bool = False) -> int:
        """Per image by the paper's convention."""
        ...

    def executed_flops(self) -> int:
        """Per image as it runs."""
        ...

    def features(self, images: Images, *, batch_size: int) -> Float[np.ndarray, "N D"]:
        """Features of images uint8 `[N, S, S, 3]`."""
        ...


class Backbone:
    """The plain backbone of an executor as an encoder: its class token after the last LayerNorm, or what `reads` says.

    Raises ValueError where it has too few blocks for that.
    """

    def __init__(self, executor: Executor, reads: RouterConfig = PAPER):
        self.executor, self.network, depth = executor, base_network(executor), executor.num_blocks
        self.blocks, self.until, self.is_plain = reads.blocks(depth), reads.until(depth), reads.features == "last"
        self.name, self.width = executor.config.name, reads.num_parts(depth) * executor.config.width

    def flops(self, *, count_attention: bool = False) -> int:
        """See `Encoder.flops`."""
        executor = self.executor
        return pass_flops(executor.config, executor.placement, self.until, count_attention=count_attention)

    def executed_flops(self) -> int:
        """See `Encoder.executed_flops`."""
        return executed_pass_flops(self.executor.config, self.executor.placement, self.until)

    def features(self, images: Images, *, batch_size: int) -> Float[np.ndarray, "N D"]:
        """See `Encoder.features`."""
        feed, num = HostImages(self.executor, images), len(images)
        if self.is_plain:
            return network_features(self.executor, self.network, feed, num, batch_size=batch_size)
        parts = features_on_the_way(
            self.executor, self.network, feed, num=num, blocks=self.blocks, until=self.until, batch_size=batch_size
        )
        return joined(parts)


class FrozenFeatures:
    """Features of an initial frozen network, computed once per image and run (deterministic: no augmentation)."""

    def __init__(self, encoder: Encoder | Executor, batch_size: int):
        self.encoder: Encoder = Backbone(encoder) if isinstance(encoder, Executor) else encoder
        self.batch_size = batch_size
        # with the images that they are of: another run of this process may have others under the same names
        self._known: dict[tuple[str, str], tuple[Images, Float[np.ndarray, "N D"]]] = {}

    def of(self, executor: Executor) -> bool:
        """Whether this very backbone computes them, so that a pass over it begins every network as well."""
        return isinstance(self.encoder, Backbone) and self.encoder.executor is executor

    def ends(self, executor: Executor) -> bool:
        """Whether they are what this very backbone ends with, so that any pass over it gives them."""
        return isinstance(self.encoder, Backbone) and self.encoder.executor is executor and self.encoder.is_plain

    def __call__(self, task: Task, split: str) -> Float[np.ndarray, "N D"]:
        """Features of one split of a task."""
        if not self.known(task, split):
            self.remember(task, split, self.compute(getattr(task, split).images))
        return self._known[task.name, split][1]

    def compute(self, images: Images) -> Float[np.ndarray, "N D"]:
        """Features of any images uint8 `[N, S, S, 3]`."""
        return self.encoder.features(images, batch_size=self.batch_size)

    def known(self, task: Task, split: str) -> bool:
        """Whether a split's features need no pass any more."""
        place = (task.name, split)
        return place in self._known and self._known[place][0] is getattr(task, split).images

    def remember(self, task: Task, split: str, features: Float[np.ndarray, "N D"]) -> None:
        """Take features that another pass computed anyway."""
        self._known[task.name, split] = getattr(task, split).images, features

    def clear(self) -> None:
        """Drop all."""
        self._known.clear()

    def forget(self, task: Task) -> None:
        """Drop a learned task's training and validation features: no feature of an earlier task may be kept."""
        for split in ("train", "val"):
            self._known.pop((task.name, split), None)


def check_given(method: str, num_tasks: int, tasks: np.ndarray | None, *, told: bool = False) -> None:
    """ValueError where nothing was learned, or the true tasks are missing or unknown."""
    if not num_tasks:
        raise ValueError(f"nothing has been learned yet, so {method} has no task to name")
    if told and tasks is None:
        raise ValueError(f"{method} is an upper bound: it has to be given each image's true task")
    if tasks is not None and len(tasks) and not (0 <= np.min(tasks) and np.max(tasks) < num_tasks):
        raise ValueError(
            f"tasks {sorted(set(np.asarray(tasks).tolist()))} given, but {num_tasks} learned: 0..{num_tasks - 1}"
        )


def check_router(tasks: Sequence[Task], config: RouterConfig) -> None:
    """ValueError naming the task that such a router cannot name."""
    for task in tasks:
        try:
            check_labels(task.train.labels, config)
        except ValueError as error:
            raise ValueError(f"task {task.name!r}: {error}") from error


def base_network(executor: Executor) -> list[Dense]:
    """The plain backbone as a forward-only network."""
    return [Dense(0, dense_expert(block, 0)) for block in executor.base_pool]
