"""Base classes of the baselines: checkpoints, training of a task, predictions, costs, and checks of
settings.

Each task has one checkpoint, which is a directory. A checkpoint is read back immediately after it
is saved, so an uninterrupted run continues from the same bytes as a resumed run.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import backbone_flops, backbone_params, executed_backbone_flops
from cheem_jax.baselines.fitting import Fitter, Fitting, Inputs, numbered, over_batches
from cheem_jax.baselines.heads import Classes, classes_by_task, saved_classes
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance, no_progress
from cheem_jax.data.task import Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.run.checkpoint import (
    each_task,
    load_task,
    named,
    save_task,
    saved_tasks,
    task_directory,
)
from cheem_jax.run.method import Encoder, FrozenNetworks, check_task_ids
from cheem_jax.run.session import Session
from cheem_jax.run.training import images_left

MUCH_MEMORY = 4 * 2**30
"""Number of bytes of host memory above which `check` warns."""


class Baseline(abc.ABC):
    """A continual learner with a checkpoint per task.

    `tasks` contains a `Learned` per task, which later tasks do not change. `state` is a `State`,
    which each task replaces. The checkpoint of a task contains the task's `Learned` and the new
    `State`, keyed by field name.
    """

    Learned: ClassVar[type | None] = None
    """NamedTuple class of the arrays that belong to one task. If it is None, the last checkpoint
    alone restores the method."""
    State: ClassVar[type | None] = None
    """NamedTuple class of the arrays that each task replaces, or None if there are no such
    arrays."""
    needs_task_id = False

    def __init__(self, networks: FrozenNetworks, config: Any, keys: Keys, num_tasks: int):
        self.executor, self.features, self.router_features = networks
        self.vit = self.executor.config
        """Config of the backbone."""
        self.config = config
        self.keys = keys
        self.num_tasks = num_tasks
        self.name = config.name
        self.classes = Classes()
        self.tasks: list[Any] = []
        self.state: Any = None
        self.build()

    @abc.abstractmethod
    def build(self) -> None:
        """Define the compiled functions.

        Raises ValueError if the settings do not fit the backbone.
        """

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def meta(self) -> dict[str, Any]:
        """Return the JSON values that a checkpoint stores in addition to the task's name and
        classes."""
        return {}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Restore the checkpoint of task `index`: append the task's arrays to `tasks`, or replace
        them if `tasks` already contains them. Also replace `state`."""
        if self.Learned:
            self.tasks[index:] = [rebuilt(self.Learned, arrays)]
        if self.State:
            self.state = rebuilt(self.State, arrays)

    def save(self, root: Path) -> None:
        """See `Method.save`."""
        index, name, classes = self.classes.last
        directory = task_directory(root, index, name)
        arrays = (as_dict(self.state) or {}) | (as_dict(self.tasks[-1]) if self.tasks else {})
        save_task(directory, arrays, {"name": name, "classes": list(classes), **self.meta()})
        with named(directory):
            self.restore(index, *load_task(directory))

    def open(self, root: Path) -> None:
        """See `Method.open`."""
        directories = saved_tasks(root)
        first = 0 if self.Learned else max(len(directories) - 1, 0)
        for index, loaded in enumerate(each_task(directories[first:]), first):
            with named(directories[index]):
                self.restore(index, *loaded)
        self.classes = saved_classes(root)

    def over(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        *fixed: Any,
        advance: Advance = no_progress,
    ) -> Any:
        """Apply `function(*fixed, batch)` to all inputs in batches; see `over_batches`."""
        placed = self.placed(fixed)
        config = self.config
        layout = self.executor.layout
        return over_batches(
            lambda batch: function(*placed, batch),
            inputs,
            batch_size=config.batch_size,
            advance=advance,
            layout=layout,
        )

    def placed(self, tree: Any) -> Any:
        """Move all arrays of a pytree from the host to the devices."""
        layout = self.executor.layout
        return jax.tree.map(
            lambda leaf: (
                leaf if isinstance(leaf, jax.Array) else layout.replicate(jnp.asarray(leaf))
            ),
            tree,
        )


def as_dict(tree: Any) -> Any:
    """Convert a NamedTuple to a dict keyed by field name. Fields that are NamedTuples are converted
    recursively, and lists are converted to dicts keyed by the position in the list.

    Fields whose dict is empty are removed, because Orbax does not store empty dicts.
    """
    if not hasattr(tree, "_asdict"):
        return numbered(tree) if isinstance(tree, list) else tree
    parts = {name: as_dict(part) for name, part in tree._asdict().items()}
    return {name: part for name, part in parts.items() if not isinstance(part, dict) or part}


def rebuilt(kind: Any, arrays: Mapping[str, Any]) -> Any:
    """Convert `arrays`, a result of `as_dict`, back to a NamedTuple of class `kind`. Entries of
    `arrays` that are not fields of `kind` are ignored."""
    fields = {}
    for name, annotation in kind.__annotations__.items():
        if name not in arrays and name in kind._field_defaults:
            continue
        part = arrays[name]
        if hasattr(annotation, "_fields"):
            part = rebuilt(annotation, part)
        elif get_origin(annotation) is list:
            part = [leaf for _, leaf in sorted(part.items())]
        fields[name] = part
    return kind(**fields)


class TrainedBaseline(Baseline):
    """A baseline that trains by gradient descent; `fitter` contains its compiled training step."""

    fitter: Fitter

    @abc.abstractmethod
    def start(self, task: Task) -> Any:
        """Return the initial values of the arrays that the next task trains."""

    def fixed(self, task: Task) -> Any:
        """Return the fixed arrays of the loss, which the training of the next task does not change.

        By default, the fixed arrays are the backbone and the number of classes of the task.
        """
        return self.executor.leaves, np.int32(len(task.classes))

    def inputs(self, task: Task, session: Session) -> Inputs:
        """Return the inputs of a training epoch; by default, the images."""
        return Inputs(task.train.images)

    def after_epoch(self, fitting: Fitting) -> Fitting:
        """Return the training state after an epoch; by default, it is unchanged."""
        return fitting

    @abc.abstractmethod
    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the learned arrays of a task after its training. Return the entries of the report
        that are specific to the method."""

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """See `Method.learn`."""
        fitting = self.fitter.begin(self.start(task), session.saved)
        session.saved = None  # otherwise, the saved arrays stay in memory during training
        fitting = self.train(task, fitting, session)
        report = self.finish(task, fitting, session)
        self.classes.add(task.name, task.classes)
        return {
            **self.costs(),
            **report,
            "losses": fitting.progress.losses,
            "skipped_steps": fitting.progress.skipped,
            "seconds": session.seconds,
        }

    @abc.abstractmethod
    def costs(self) -> dict[str, int]:
        """Return the FLOPs of predicting one image, in the format of `pass_costs`."""

    def number(self, task: Task) -> int:
        """Return the number from which the PRNG keys of the next task are derived; by default, the
        index of the task."""
        return len(self.classes)

    def key(self, task: Task, phase: Phase, *position: int) -> jax.Array:
        """Return a PRNG key for `phase` of the next task. Each position within the phase, such as
        an epoch, has a different key."""
        return self.keys.at(self.number(task), phase, *position)

    def bytes_needed(self, task: Task) -> int:
        """Estimate the bytes on disk for the next task: its checkpoint, and two rolling checkpoints
        with Adam's moments."""
        trained = sum(leaf.size for leaf in jax.tree.leaves(self.start(task)))
        return 4 * (2 * 3 + 1) * trained + self.bytes_beside(task)

    def bytes_beside(self, task: Task) -> int:
        """Return the bytes that a task's checkpoints contain in addition to the trained arrays and
        Adam's moments."""
        return 0

    def train(self, task: Task, fitting: Fitting, session: Session) -> Fitting:
        """Train to the last epoch, starting from the state `fitting`. The session can interrupt and
        resume the training."""
        config = self.config
        labels = task.train.labels
        inputs = self.inputs(task, session)
        num_images = images_left(fitting.progress, config.fit, len(labels), config.batch_size)
        current = fitting

        def keep(stepped: Fitting) -> None:
            nonlocal current
            current = stepped

        with session.phase("train", num_images, lambda: current.saved()) as advance:
            return self.fitter.run(
                fitting,
                self.placed(self.fixed(task)),
                labels,
                inputs,
                config.fit,
                batch_size=config.batch_size,
                order_key=self.key(task, Phase.METHOD_ORDER),
                noise_key=self.key(task, Phase.METHOD_NOISE),
                advance=advance,
                on_step=keep,
                on_epoch=self.after_epoch,
            )


class OwnHeads(Baseline):
    """A baseline with a separate network and head for each task; each element of `tasks` has a
    `head`."""

    @abc.abstractmethod
    def run(
        self, images: Images, task_ids: Int[np.ndarray, "N"] | None
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        """Infer the task ID of each image, and compute its features.

        The features are computed with the network of the task in `task_ids`, or of the inferred
        task if `task_ids` is None. A method that needs the task ID returns `task_ids` instead of
        inferred task IDs.
        """

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        if task_ids is None and self.needs_task_id:
            raise ValueError(f"{self.name} is an upper bound; give the true task ID of each image")
        if task_ids is not None:
            task_ids = check_task_ids(task_ids, len(self.tasks), len(images))
        tasks, features = self.run(images, task_ids)
        heads = [task.head for task in self.tasks]
        selected = tasks if task_ids is None else task_ids
        return Inferred(tasks, classes_by_task(features, heads, selected))


class OneHead(Baseline):
    """A baseline with one head for all classes. The largest logit of the head predicts both task
    and class."""

    @abc.abstractmethod
    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        """Compute the logits of all learned classes for each image; the remaining columns are
        padding."""

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        if task_ids is not None:
            task_ids = check_task_ids(task_ids, len(self.classes), len(images))
        return self.classes.inferred(self.logits(images), task_ids)


def no_classes(width: int) -> Head:
    """Return a head without classes, on the host."""
    return Head(np.zeros((width, 0), np.float32), np.zeros(0, np.float32))  # pyright: ignore[reportArgumentType]


def params_report(config: ViTConfig, *, added: int, learned: int, stored: int) -> dict[str, float]:
    """Report the parameters of a task: `learned` is the number of parameters that training
    determined, where a truncated pair counts with its stored rank, and `stored` also contains the
    router's statistics.

    `added` is the number of parameters that the task adds to the backbone, without the head and the
    router. It is reported in percent of the backbone's parameters (the paper's %Param).
    """
    return {
        "params_added_percent": 100 * added / backbone_params(config),
        "params_learned": learned,
        "params_stored": stored,
    }


def pass_costs(
    config: ViTConfig,
    num_classes: int,
    *,
    encoder: Encoder | None = None,
    linear: int = 0,
    attention: int = 0,
    executed: int = 0,
) -> dict[str, int]:
    """Report the FLOPs per image, counted in three ways.

    `flops_method` follows the paper's counter, which omits fused attention. `flops_explicit` also
    includes attention products. `flops_executed` includes all executed matrix products, and a
    linear head for `num_classes` classes. For a plain ViT-B, `flops_method` is 33.7 GFLOPs, and
    `flops_explicit` is 35.1 GFLOPs.

    Each count is the sum of a plain pass, a pass of `encoder`, and the method's additional FLOPs.
    The additional FLOPs are `linear` in `flops_method`, `linear + attention` in `flops_explicit`,
    and `executed` in `flops_executed`.
    """
    flops = {
        "flops_method": backbone_flops(config) + linear,
        "flops_explicit": backbone_flops(config, count_attention=True) + linear + attention,
        "flops_executed": (
            executed_backbone_flops(config) + 2 * config.width * num_classes + executed
        ),
    }
    if encoder:
        flops["flops_method"] += encoder.flops()
        flops["flops_explicit"] += encoder.flops(count_attention=True)
        flops["flops_executed"] += encoder.executed_flops()
    return flops


def expect(settings: Any, name: str, holds: bool, expected: str) -> None:
    """Raise ValueError with the value of the setting `name`, unless `holds` is true."""
    if not holds:
        raise ValueError(f"{name} is {getattr(settings, name)}; expected {expected}")


def at_least_one(settings: Any, *names: str) -> None:
    """Raise ValueError unless each of the settings `names` is at least 1."""
    for name in names:
        expect(settings, name, getattr(settings, name) >= 1, "at least 1")


def halved(settings: Any, *names: str) -> None:
    """Raise ValueError unless each of the settings `names` is an even number of at least 2. These
    settings are lengths of prompts: half of a prompt's rows are keys, the others are values."""
    for name in names:
        length = getattr(settings, name)
        expect(
            settings,
            name,
            length >= 2 and length % 2 == 0,
            "an even number, half keys and half values",
        )
