"""The eleven components of a ViT block that the paper fine-tunes (appendix, table
'acc_vs_forgetting'), and their training.

The arrays of a component are extracted from all blocks, trained, and inserted again; no other
parameter has a gradient.

A unit is one task with one component. It starts from the pretrained backbone (`transfer`), or from
the backbone of the previous task of the stream (`sequential`), with new moments of Adam and a new
head. A finished unit is recorded. Test accuracy is recorded at every rate of the sweep; only
validation accuracy chooses the rate.

Finished units are not repeated. An interrupted unit resumes from its rolling checkpoint, which for
a sequence also contains the heads of its earlier tasks.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from charts import names_in
from flax import nnx

from cheem_jax.baselines.fitting import FitBatch, Fitter, Fitting, Inputs, numbered, over_batches
from cheem_jax.baselines.heads import head_logits, local_cross_entropy
from cheem_jax.cheem.supernet import init_head_learner
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys, Phase, next_power_of_two, order_at, task_number
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance, FitConfig
from cheem_jax.data.task import Split, Stream, Task
from cheem_jax.engine.executor import Executor
from cheem_jax.run.record import read
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session


class Component(NamedTuple):
    """Layers of a block; of the fused layer `qkv`, only the thirds in the range `thirds`."""

    index: int
    """Index in the paper's table."""
    name: str
    title: str
    layers: tuple[str, ...]
    thirds: tuple[int, int] = (0, 3)


COMPONENTS = (
    Component(1, "ln1_ln2", "LN1 + LN2", ("norm1", "norm2")),
    Component(2, "ffn", "FFN", ("up", "down")),
    Component(3, "mlp_down", "MLP-down", ("down",)),
    Component(4, "ln2", "LN2", ("norm2",)),
    Component(5, "mhsa_ln1", "MHSA + LN1", ("qkv", "proj", "norm1")),
    Component(6, "ln1", "LN1", ("norm1",)),
    Component(7, "query", "Query", ("qkv",), (0, 1)),
    Component(8, "key", "Key", ("qkv",), (1, 2)),
    Component(9, "query_key", "Query + Key", ("qkv",), (0, 2)),
    Component(10, "value", "Value", ("qkv",), (2, 3)),
    Component(11, "projection", "Projection", ("proj",)),
)


class Piece(NamedTuple):
    """Columns `begin` to `end` of the last axis of a leaf of the backbone."""

    leaf: int
    begin: int
    end: int


def components_of(text: str) -> list[Component]:
    """Return the components with these names or indices, in the paper's order."""
    if text == "all":
        return list(COMPONENTS)
    names = {
        word: component
        for component in COMPONENTS
        for word in (component.name, str(component.index))
    }
    selected = {names[word] for word in names_in("--components", text, names)}
    return [component for component in COMPONENTS if component in selected]


def pieces_of(executor: Executor, component: Component) -> tuple[Piece, ...]:
    """Return the positions of a component in the executor's leaves."""
    _, state = nnx.split(executor.merge_vit(executor.leaves))
    pieces = []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        layer = names[2] if names[0] == "blocks" else None
        if layer in component.layers:
            size = leaf.shape[-1]
            first, last = component.thirds if layer == "qkv" else (0, 3)
            pieces.append(Piece(number, first * size // 3, last * size // 3))
    return tuple(pieces)


def num_params(executor: Executor) -> dict[str, int]:
    """Return the number of parameters of every component in all blocks, keyed by name."""
    return {
        component.name: sum(
            part.size for part in extract(executor.leaves, pieces_of(executor, component))
        )
        for component in COMPONENTS
    }


def extract(leaves: Sequence[Any], pieces: Sequence[Piece]) -> tuple[np.ndarray, ...]:
    """Return the component's arrays on the host."""
    return tuple(np.asarray(leaves[piece.leaf])[..., piece.begin : piece.end] for piece in pieces)


def insert(leaves: Sequence[Any], pieces: Sequence[Piece], parts: Sequence[Any]) -> list[Any]:
    """Return the leaves with the component's arrays inserted."""
    result = list(leaves)
    for piece, part in zip(pieces, parts, strict=True):
        leaf = leaves[piece.leaf]
        if part.shape != leaf.shape:
            part = jnp.concatenate(
                [leaf[..., : piece.begin], part, leaf[..., piece.end :]], axis=-1
            )
        result[piece.leaf] = part
    return result


@dataclasses.dataclass(frozen=True)
class Training:
    """Training settings of every component: Adam without weight decay, and a cosine schedule that
    decays to 0 in each task."""

    epochs: int
    rates: tuple[float, ...]
    """Learning rates of the sweep, the largest last."""
    batch_size: int = 64
    head_rate: float = 1e-3
    """Learning rate of a task's head; it is not swept."""
    max_train: int | None = None
    """Number of training images per task, sampled with the seed; None: all images."""


class Learned(NamedTuple):
    """The arrays of a component and the padded head of a task."""

    parts: tuple[jax.Array, ...]
    head: Head


class Network:
    """A backbone whose leaves are an argument of the compiled function, so that all components
    share this function."""

    def __init__(self, executor: Executor, batch_size: int):
        self.executor, self.batch_size = executor, batch_size

        @executor.jit
        def answer(leaves, head, images, num):
            logits = head_logits(head, executor.merge_vit(leaves)(images))
            logits = jnp.where(jnp.arange(logits.shape[-1]) < num, logits, -1e30)
            # a network with NaN must not count as a prediction of class 0
            return jnp.where(jnp.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1)

        self._answer = answer

    def accuracy(self, leaves: list[Any], head: Head, split: Split, num_classes: int) -> float:
        """Return the accuracy in [0, 1] with the task ID given."""
        num = np.int32(num_classes)
        predictions = over_batches(
            lambda read: self._answer(leaves, head, read["images"], num),
            Inputs(split.images),
            batch_size=self.batch_size,
        )
        return float((predictions == split.labels).mean())


class Learner:
    """The compiled training step of one component, for all tasks and rates."""

    def __init__(self, network: Network, component: Component):
        self.network, self.component = network, component
        self.executor = executor = network.executor
        self.pieces = pieces = pieces_of(executor, component)
        self.pretrained = extract(executor.leaves, pieces)

        def loss(learned, fixed, batch: FitBatch):
            leaves, num = fixed
            features = executor.merge_vit(insert(leaves, pieces, learned.parts))(
                batch.inputs["images"]
            )
            logits = head_logits(learned.head, features)
            return local_cross_entropy(logits, batch.labels, batch.weights, 0, num)

        def rows(batch_size: int, working_set: int) -> int:
            return executor.rows(batch_size, 6 * working_set)  # as for full fine-tuning

        self._fitter = Fitter(loss, jit=executor.jit, rows=rows)

    def begin(
        self, keys: Keys, index: int, task: Task, parts: Any, saved: Saved | None = None
    ) -> Fitting:
        """Return the state before training on a task, with a component's arrays and a new head, or
        the saved state."""
        key = keys.at(index, Phase.UPPER_BOUND_INIT)
        num_outputs = next_power_of_two(len(task.classes))
        head = init_head_learner(key, self.executor.config.width, num_outputs).params
        return self._fitter.begin(Learned(parts, head), saved)

    def fit(
        self,
        fitting: Fitting,
        keys: Keys,
        index: int,
        task: Task,
        training: Training,
        rate: float,
        advance: Advance,
        on_step: Callable[[Fitting], object] = lambda fitting: None,
    ) -> Fitting:
        """Train on a task to the last epoch."""
        images, labels = images_of(keys, index, task.train, training.max_train)
        head_scale = Head(*[training.head_rate / rate] * 2)  # pyright: ignore[reportArgumentType]
        return self._fitter.run(
            fitting,
            (self.executor.leaves, np.int32(len(task.classes))),
            labels,
            Inputs(images),
            FitConfig(training.epochs, rate),
            batch_size=training.batch_size,
            order_key=keys.at(index, Phase.UPPER_BOUND_ORDER),
            noise_key=keys.at(index, Phase.METHOD_NOISE),
            advance=advance,
            on_step=on_step,
            scale=Learned((1.0,) * len(self.pieces), head_scale),  # pyright: ignore[reportArgumentType]
        )

    def leaves(self, parts: Any) -> list[Any]:
        """Return the backbone's leaves with a component's arrays."""
        return insert(self.executor.leaves, self.pieces, parts)


def images_of(keys: Keys, index: int, split: Split, most: int | None) -> tuple[Images, np.ndarray]:
    """Return a task's training images and labels, or a sample of `most` of them."""
    if most is None or len(split.labels) <= most:
        return split.images, split.labels
    rows = np.sort(order_at(keys.at(index, Phase.METHOD_TUNING), len(split.labels))[:most])
    return split.images[rows], split.labels[rows]


Entry = dict[str, Any]


class Place(NamedTuple):
    """A component that is trained with one seed at one rate."""

    component: str
    seed: int
    rate: float

    def __str__(self) -> str:
        return f"{self.component}, seed {self.seed}, rate {self.rate:g}"


def units_at(entries: Sequence[Entry], event: str, place: Place) -> dict[int, Entry]:
    """Return the finished units of a place, keyed by the index of the task."""
    return {entry["index"]: entry for entry in entries if _is_at(entry, event, place)}


def _is_at(entry: Entry, event: str, place: Place) -> bool:
    return entry["event"] == event and place == (entry["component"], entry["seed"], entry["rate"])


def mean_validation(
    entries: Sequence[Entry],
    component: Component,
    rate: float,
    seeds: Sequence[int],
    num_tasks: int,
) -> float | None:
    """Return the mean validation accuracy of transfer over tasks and seeds; None if a unit is
    missing."""
    units_by_seed = [
        units_at(entries, "transfer", Place(component.name, seed, rate)) for seed in seeds
    ]
    if any(len(units) < num_tasks for units in units_by_seed):
        return None
    return float(
        np.mean([unit["val_accuracy"] for units in units_by_seed for unit in units.values()])
    )


def chosen_rate(
    entries: Sequence[Entry],
    component: Component,
    rates: Sequence[float],
    seeds: Sequence[int],
    num_tasks: int,
) -> float | None:
    """Return the rate with the best mean validation accuracy, or the first of equally good rates;
    None before the sweep is finished."""
    means = [mean_validation(entries, component, rate, seeds, num_tasks) for rate in rates]
    if any(mean is None for mean in means):
        return None
    return rates[int(np.argmax(np.asarray(means, float)))]


class Units:
    """The units of one study, which share a session."""

    def __init__(self, session: Session, network: Network, stream: Stream, training: Training):
        self.session = session
        self.network = network
        self.stream = stream
        self.training = training

    def finished(self, event: str, place: Place) -> dict[int, Entry]:
        """Return the finished units of a place, keyed by the index of the task."""
        return units_at(read(self.session.directory), event, place)

    def run(self, component: Component, seeds: Sequence[int]) -> None:
        """Run the sweep of one component, then its sequences at the chosen rate."""
        num = len(self.stream.tasks)
        rates = self.training.rates
        learner = Learner(self.network, component)
        for seed, rate in itertools.product(seeds, rates):
            place = Place(component.name, seed, rate)
            for index in sorted(set(range(num)) - self.finished("transfer", place).keys()):
                self._transfer(learner, place, index)
        entries = read(self.session.directory)
        rate = chosen_rate(entries, component, rates, seeds, num)
        assert rate is not None  # the sweep is finished
        for seed in seeds:
            place = Place(component.name, seed, rate)
            is_finished = len(self.finished("sequential", place)) == num
            if is_finished or self.finished("diverged", place):
                continue
            try:
                self._sequence(learner, place)
            except FloatingPointError as error:
                # a rate that suits individual tasks can be too large for a sequence
                self.session.record.write("diverged", **place._asdict(), index=0, reason=str(error))
                self.session.say(
                    f"{place}: the sequence diverged, so this component has no forgetting"
                )
            self.session.finish()

    def _begin(self, name: str) -> Saved | None:
        """Begin a unit; return the state that an earlier process saved."""
        self.session.begin("components", name, task_number(name))
        return self.session.saved

    def _transfer(self, learner: Learner, place: Place, index: int) -> None:
        task = self.stream.tasks[index]
        saved = self._begin(f"transfer {place} {task.name}")
        fitting = learner.begin(Keys(place.seed), index, task, learner.pretrained, saved)
        val = test = 0.0
        diverged = True
        with contextlib.suppress(FloatingPointError):  # the rate is too large
            splits = [(task, task.val), (task, task.test)]
            _, (val, test) = self._train(learner, place, index, fitting, "transfer", splits)
            diverged = False
        result = {"val_accuracy": val, "test_accuracy": test, "diverged": diverged}
        self.session.record.write(
            "transfer", **place._asdict(), index=index, task=task.name, **result
        )
        self.session.finish()

    def _sequence(self, learner: Learner, place: Place) -> None:
        tasks = self.stream.tasks
        keys = Keys(place.seed)
        saved = self._begin(f"sequential {place}")
        first = 0
        heads = list[Head]()
        if saved is not None:
            first = saved.meta["index"]
            for index in range(first):
                arrays = saved.arrays["heads"][f"{index:04d}"]
                heads.append(Head(*(jnp.asarray(leaf) for _, leaf in sorted(arrays.items()))))
        # tasks after the checkpoint are learned again
        self.session.record.keep(
            lambda entry: not (_is_at(entry, "sequential", place) and entry["index"] >= first)
        )
        fitting = learner.begin(keys, first, tasks[first], learner.pretrained, saved)
        for index, task in enumerate(tasks[first:], first):
            splits = [(earlier, earlier.test) for earlier in tasks[: index + 1]]
            fitting, accuracy = self._train(
                learner, place, index, fitting, "sequential", splits, heads
            )
            self.session.record.write(
                "sequential", **place._asdict(), index=index, task=task.name, accuracy=accuracy
            )
            if index + 1 < len(tasks):
                learned: Learned = fitting.learned
                heads.append(learned.head)
                fitting = learner.begin(keys, index + 1, tasks[index + 1], learned.parts)
                # otherwise a new process would learn this task again
                state = _saved_sequence(index + 1, fitting, heads)
                self.session.save(lambda state=state: state)

    def _train(
        self,
        learner: Learner,
        place: Place,
        index: int,
        fitting: Fitting,
        phase: str,
        splits: Sequence[tuple[Task, Split]],
        heads: Sequence[Head] = (),
    ) -> tuple[Fitting, list[float]]:
        """Train on one task; return the trained state and its accuracy on each split. The first
        splits have the heads of earlier tasks, the others that of this task."""
        task = self.stream.tasks[index]

        def keep(current: Fitting) -> None:
            nonlocal fitting
            fitting = current

        def state() -> Saved:
            return _saved_sequence(index, fitting, heads)

        num_images = len(task.train.labels)
        if self.training.max_train is not None:
            num_images = min(num_images, self.training.max_train)
        accuracy = list[float]()
        with self.session.phase(phase, self.training.epochs * num_images, state) as advance:
            keys = Keys(place.seed)
            fitting = learner.fit(
                fitting, keys, index, task, self.training, place.rate, advance, keep
            )
            leaves = learner.leaves(fitting.learned.parts)
            every_head = itertools.chain(heads, itertools.repeat(fitting.learned.head))
            for (owner, split), head in zip(splits, every_head, strict=False):
                accuracy.append(self.network.accuracy(leaves, head, split, len(owner.classes)))
                advance(0)
        return fitting, accuracy


def _saved_sequence(index: int, fitting: Fitting, heads: Sequence[Head]) -> Saved:
    """Return a state to save, with the heads of earlier tasks."""
    arrays, meta = fitting.saved()
    if heads:
        arrays["heads"] = {f"{number:04d}": numbered(head) for number, head in enumerate(heads)}
    return Saved(arrays, {**meta, "index": index})
