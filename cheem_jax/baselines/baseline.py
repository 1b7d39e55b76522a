"""What the baselines do alike: checkpoints, the training of a task, predictions, costs, and checks
of settings.

A checkpoint is one directory per task. What is saved is read back at once, so that a run that never
stopped continues from the same bytes as a resumed one.
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
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Task
from cheem_jax.engine.inference import Inferred
from cheem_jax.engine.passes import unwatched
from cheem_jax.run.checkpoint import (
    each_task,
    load_task,
    named,
    save_task,
    saved_tasks,
    task_directory,
)
from cheem_jax.run.method import Encoder, FrozenNetworks
from cheem_jax.run.session import Session
from cheem_jax.run.training import images_left

MUCH_MEMORY = 4 * 2**30
"""Bytes on the host above which `check` warns."""


class Baseline(abc.ABC):
    """A continual learner with a checkpoint per task.

    What it knows is a list of `Learned`, one per task, which later tasks do not change, and one
    `State`, which they replace. A checkpoint contains the last task's `Learned` and all of the
    `State`, by the names of their fields.
    """

    Learned: ClassVar[type | None] = None
    """A NamedTuple; None for a method whose checkpoint contains all that is known, so that the last
    one is enough."""
    State: ClassVar[type | None] = None
    """A NamedTuple, or None."""
    needs_task_id = False

    def __init__(self, networks: FrozenNetworks, config: Any, keys: Keys, num_tasks: int):
        self.executor, self.features, self.router_features = networks
        self.config = config
        self.keys = keys
        self.num_tasks = num_tasks
        self.name = config.name
        self.classes = Classes()
        self.tasks: list[Any] = []
        self.known: Any = None
        self.build()

    @abc.abstractmethod
    def build(self) -> None:
        """Define the compiled functions; ValueError if the backbone cannot hold what the settings
        ask for."""

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def meta(self) -> dict[str, Any]:
        """JSON values of a checkpoint besides the task's name and classes."""
        return {}

    def restore(self, index: int, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Take over the checkpoint of task `index`: one more than known, or the last one in place
        of itself."""
        if self.Learned:
            self.tasks[index:] = [rebuilt(self.Learned, arrays)]
        if self.State:
            self.known = rebuilt(self.State, arrays)

    def save(self, root: Path) -> None:
        """See `Method.save`."""
        index, name, classes = self.classes.last
        directory = task_directory(root, index, name)
        arrays = (as_dict(self.known) or {}) | (as_dict(self.tasks[-1]) if self.tasks else {})
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


def as_dict(tree: Any) -> Any:
    """A NamedTuple by its fields, and those within it; lists of leaves by number. Orbax keeps no
    empty tree."""
    if not hasattr(tree, "_asdict"):
        return numbered(tree) if isinstance(tree, list) else tree
    parts = {name: as_dict(part) for name, part in tree._asdict().items()}
    return {name: part for name, part in parts.items() if not isinstance(part, dict) or part}


def rebuilt(kind: Any, arrays: Mapping[str, Any]) -> Any:
    """The NamedTuple `kind` from what `as_dict` gave for it, and possibly for others."""
    found = {}
    for name, own in kind.__annotations__.items():
        if name not in arrays and name in kind._field_defaults:
            continue
        part = arrays[name]
        if hasattr(own, "_fields"):
            part = rebuilt(own, part)
        elif get_origin(own) is list:
            part = [leaf for _, leaf in sorted(part.items())]
        found[name] = part
    return kind(**found)


class TrainedBaseline(Baseline):
    """A baseline that trains by gradients on a backbone; `fitter` has the step of its loss."""

    fitter: Fitter

    @abc.abstractmethod
    def start(self, task: Task) -> Any:
        """The initial arrays that the next task trains."""

    def fixed(self, task: Task) -> Any:
        """The fixed arrays that the loss of the next task reads."""
        raise NotImplementedError

    def inputs(self, task: Task, session: Session) -> Inputs:
        """The training inputs, which every epoch reads; by default the images."""
        return Inputs(task.train.images)

    def after_epoch(self, fitting: Fitting) -> Fitting:
        """Change the state after an epoch; by default not at all."""
        return fitting

    def finish(self, task: Task, fitting: Fitting, session: Session) -> dict[str, Any]:
        """Store the learned arrays of a trained task; returns the method's own part of the
        report."""
        raise NotImplementedError

    def learn(self, task: Task, session: Session) -> dict[str, Any]:
        """See `Method.learn`."""
        fitting = self.fitter.begin(self.start(task), session.saved)
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
        """FLOPs per image by each convention after the last task; see `pass_costs`."""

    def number(self, task: Task) -> int:
        """The number of the next task in the keys."""
        return len(self.classes)

    def key(self, task: Task, phase: Phase, *position: int) -> jax.Array:
        """The key of a position in a phase of the next task."""
        return self.keys.at(self.number(task), phase, *position)

    def bytes_needed(self, task: Task) -> int:
        """See `Method.bytes_needed`: two rolling checkpoints with Adam's moments, and the task's
        checkpoint."""
        trained = sum(leaf.size for leaf in jax.tree.leaves(self.start(task)))
        return 4 * (2 * 3 + 1) * trained + self.bytes_beside(task)

    def bytes_beside(self, task: Task) -> int:
        """Bytes of a task's checkpoints besides the trained arrays and their moments."""
        return 0

    def train(self, task: Task, fitting: Fitting, session: Session) -> Fitting:
        """Train to the last epoch."""
        config = self.config
        labels = task.train.labels
        inputs = self.inputs(task, session)
        left = images_left(fitting.progress, config.fit, len(labels), config.batch_size)
        current = fitting

        def keep(stepped: Fitting) -> None:
            nonlocal current
            current = stepped

        with session.phase("train", left, lambda: current.saved()) as advance:
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

    def over(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        *fixed: Any,
        advance: Advance = unwatched,
    ) -> Any:
        """`function(*fixed, batch)` for all inputs; see `over_batches`."""
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
        """The same on the devices, where it is still on the host."""
        layout = self.executor.layout
        return jax.tree.map(
            lambda leaf: (
                leaf if isinstance(leaf, jax.Array) else layout.everywhere(jnp.asarray(leaf))
            ),
            tree,
        )


class OwnHeads(TrainedBaseline):
    """A baseline with a network and a head per task; a task in `tasks` has its `head`.

    It defines `route` and `features_by`, or `run` where one pass serves both.
    """

    def route(self, features: Float[np.ndarray, "N E"]) -> Int[np.ndarray, "N"]:
        """The inferred task ID of each image, by the router's features."""
        raise NotImplementedError

    def features_by(self, images: Images, tasks: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N D"]:
        """Features of each image by its task's network."""
        raise NotImplementedError

    def run(
        self,
        images: Images,
        given: Int[np.ndarray, "N"] | None,
        query: Callable[[], np.ndarray] | None,
    ) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N D"]]:
        """The inferred task ID of each image, and its features by the network of the given, or else
        the inferred task.

        `query` gives the router's features; without it task IDs are given, and the inferred ones
        count for nothing.
        """
        chosen: Any = self.route(query()) if query else given
        return chosen, self.features_by(images, chosen if given is None else given)

    def classes_for(
        self, features: Float[np.ndarray, "N D"], tasks: Int[np.ndarray, "N"]
    ) -> Int[np.ndarray, "N"]:
        """The class that the head of each image's task gives it."""
        return classes_by_task(features, [task.head for task in self.tasks], tasks)

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        if task_ids is None and self.needs_task_id:
            raise ValueError(f"{self.name} is an upper bound: give the true task ID of each image")
        given = None if task_ids is None else np.asarray(task_ids, np.int32)
        query = None if self.needs_task_id else lambda: self.router_features(images)
        tasks, features = self.run(images, given, query)
        return Inferred(tasks, self.classes_for(features, tasks if given is None else given))


class OneHead(TrainedBaseline):
    """A baseline with one head for all classes: the largest logit decides task and class
    together."""

    @abc.abstractmethod
    def logits(self, images: Images) -> Float[np.ndarray, "N P"]:
        """Logits of all classes so far for each image, padding behind them."""

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        return self.classes.inferred(self.logits(images), task_ids)


def no_classes(width: int) -> Head:
    """The head before the first class, on the host."""
    return Head(np.zeros((width, 0), np.float32), np.zeros(0, np.float32))  # pyright: ignore[reportArgumentType]


def params_report(config: ViTConfig, *, added: int, learned: int, stored: int) -> dict[str, float]:
    """A task's numbers of parameters: those it trains, those it stores, and the added ones in
    percent of the backbone.

    The paper's %Param counts what a task adds to the backbone; heads and router are not among it.
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
    """FLOPs per image: by the paper's counter, with attention products, and as executed with a
    head.

    They are those of one plain pass, of an `encoder` besides, and what a method adds: `linear`
    layers and `attention` products as counted, and all of it as `executed`. The paper's counter
    does not see fused attention: ViT-B costs 33.7 GFLOPs by it, 35.1 with attention products.
    """
    found = {
        "flops_method": backbone_flops(config) + linear,
        "flops_explicit": backbone_flops(config, count_attention=True) + linear + attention,
        "flops_executed": (
            executed_backbone_flops(config) + 2 * config.width * num_classes + executed
        ),
    }
    if encoder:
        found["flops_method"] += encoder.flops()
        found["flops_explicit"] += encoder.flops(count_attention=True)
        found["flops_executed"] += encoder.executed_flops()
    return found


def expect(settings: Any, name: str, holds: bool, expected: str) -> None:
    """The setting `name` has to hold."""
    if not holds:
        raise ValueError(f"{name} is {getattr(settings, name)}; expected {expected}")


def at_least_one(settings: Any, *names: str) -> None:
    """Each of these settings has to be 1 or more."""
    for name in names:
        expect(settings, name, getattr(settings, name) >= 1, "at least 1")


def halved(settings: Any, *names: str) -> None:
    """Each of these lengths has to have one half for keys and one for values."""
    for name in names:
        length = getattr(settings, name)
        expect(
            settings,
            name,
            length >= 2 and length % 2 == 0,
            "an even number, half keys and half values",
        )
