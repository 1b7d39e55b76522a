"""The eleven components of a ViT block that the paper fine-tunes (appendix, table
'acc_vs_forgetting'), and their training.

A component is extracted from all blocks as a tuple of arrays, trained, and inserted again: no other
parameter has a gradient.

A unit is one task with one component: from the pretrained backbone (`transfer`), or from the
backbone of the previous task of the stream (`sequential`), with new moments of Adam and a new head.
A finished unit is recorded. Test accuracy is recorded at every rate of the sweep; only validation
accuracy chooses the rate.

Finished units are not repeated. The current one resumes from its rolling checkpoint, which for a
sequence also contains the heads of its earlier tasks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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
from cheem_jax.core.interruption import Stop
from cheem_jax.core.keys import Keys, Phase, next_power_of_two, order_at, task_number
from cheem_jax.core.pool import Head
from cheem_jax.core.settings import Advance, FitConfig
from cheem_jax.data.task import Split, Stream
from cheem_jax.engine.executor import Executor
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run.rolling import Rolling, Saved
from cheem_jax.run.session import Session


class Component(NamedTuple):
    """Layers of a block; of the fused `qkv` only the thirds in the range `thirds`."""

    index: int
    """The index in the paper's table."""
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
    """The components with these names or indices, in the paper's order."""
    if text == "all":
        return list(COMPONENTS)
    names = {
        word: component
        for component in COMPONENTS
        for word in (component.name, str(component.index))
    }
    asked = {names[word] for word in names_in("--components", text, names)}
    return [component for component in COMPONENTS if component in asked]


def pieces_of(executor: Executor, component: Component) -> tuple[Piece, ...]:
    """The places of a component in the executor's leaves."""
    _, state = nnx.split(executor.vit_of(executor.leaves))
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
    """Number of parameters of every component in all blocks, by name."""
    return {
        component.name: sum(
            part.size for part in extract(executor.leaves, pieces_of(executor, component))
        )
        for component in COMPONENTS
    }


def extract(leaves: Sequence[Any], pieces: Sequence[Piece]) -> tuple[np.ndarray, ...]:
    """The component's arrays, on the host."""
    return tuple(np.asarray(leaves[piece.leaf])[..., piece.begin : piece.end] for piece in pieces)


def insert(leaves: Sequence[Any], pieces: Sequence[Piece], parts: Sequence[Any]) -> list[Any]:
    """The leaves with the component's arrays inserted."""
    found = list(leaves)
    for piece, part in zip(pieces, parts, strict=True):
        leaf = leaves[piece.leaf]
        if part.shape != leaf.shape:
            part = jnp.concatenate(
                [leaf[..., : piece.begin], part, leaf[..., piece.end :]], axis=-1
            )
        found[piece.leaf] = part
    return found


@dataclasses.dataclass(frozen=True)
class Training:
    """Training of every component: Adam, no weight decay, cosine to 0 over each task."""

    epochs: int
    rates: tuple[float, ...]
    """Learning rates of the sweep, largest last."""
    batch_size: int = 64
    head_rate: float = 1e-3
    """Learning rate of a task's head; not swept."""
    max_train: int | None = None
    """Number of training images per task, sampled by the seed; None: all."""


class Learned(NamedTuple):
    """A component's arrays and a task's padded head."""

    parts: tuple[jax.Array, ...]
    head: Head


class Network:
    """A backbone whose leaves are an argument: one compiled function for all components."""

    def __init__(self, executor: Executor, batch_size: int):
        self.executor, self.batch_size = executor, batch_size

        @executor.jit
        def answer(leaves, head, images, num):
            logits = head_logits(head, executor.vit_of(leaves)(images))
            logits = jnp.where(jnp.arange(logits.shape[-1]) < num, logits, -1e30)
            # a network with NaN must not count as one that predicts class 0
            return jnp.where(jnp.isfinite(logits).all(axis=-1), logits.argmax(axis=-1), -1)

        self._answer = answer

    def accuracy(self, leaves: list[Any], head: Head, split: Split, num_classes: int) -> float:
        """Accuracy in [0, 1] with the task ID given."""
        num = np.int32(num_classes)
        found = over_batches(
            lambda read: self._answer(leaves, head, read["images"], num),
            Inputs(split.images),
            batch_size=self.batch_size,
        )
        return float((found == split.labels).mean())


class Learner:
    """The compiled step of one component, for all tasks and rates."""

    def __init__(self, network: Network, component: Component):
        self.network, self.component = network, component
        self.executor = executor = network.executor
        self.pieces = pieces = pieces_of(executor, component)
        self.pretrained = extract(executor.leaves, pieces)

        def loss(learned, fixed, batch: FitBatch):
            leaves, num = fixed
            features = executor.vit_of(insert(leaves, pieces, learned.parts))(
                batch.inputs["images"]
            )
            logits = head_logits(learned.head, features)
            return local_cross_entropy(logits, batch.labels, batch.weights, 0, num)

        def rows(batch_size: int, working_set: int) -> int:
            return executor.rows(batch_size, 6 * working_set)  # as for full fine-tuning

        self._fitter = Fitter(loss, jit=executor.jit, rows=rows)

    def begun(
        self, keys: Keys, index: int, num_classes: int, parts: Any, saved: Saved | None = None
    ) -> Fitting:
        """The initial state of a task with these parts and a new head, or its saved state."""
        key = keys.at(index, Phase.UPPER_BOUND_INIT)
        head = init_head_learner(
            key, self.executor.config.width, next_power_of_two(num_classes)
        ).params
        return self._fitter.begin(Learned(parts, head), saved)

    def fit(
        self,
        fitting: Fitting,
        keys: Keys,
        index: int,
        num_classes: int,
        split: Split,
        training: Training,
        rate: float,
        advance: Advance,
        on_step: Callable[[Fitting], object] = lambda fitting: None,
    ) -> Fitting:
        """Train to the last epoch."""
        images, labels = images_of(keys, index, split, training.max_train)
        head_scale = Head(*[training.head_rate / rate] * 2)  # pyright: ignore[reportArgumentType]
        return self._fitter.run(
            fitting,
            (self.executor.leaves, np.int32(num_classes)),
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
        """The backbone with these parts."""
        return insert(self.executor.leaves, self.pieces, parts)


def images_of(keys: Keys, index: int, split: Split, most: int | None) -> tuple[Images, np.ndarray]:
    """A task's training images and labels, or a sample of `most` of them."""
    if most is None or len(split.labels) <= most:
        return split.images, split.labels
    rows = np.sort(order_at(keys.at(index, Phase.METHOD_TUNING), len(split.labels))[:most])
    return split.images[rows], split.labels[rows]


Entry = dict[str, Any]


class Place(NamedTuple):
    """A component trained with one seed at one rate."""

    component: str
    seed: int
    rate: float

    def __str__(self) -> str:
        return f"{self.component}, seed {self.seed}, rate {self.rate:g}"


def units_at(entries: Sequence[Entry], event: str, place: Place) -> dict[int, Entry]:
    """The finished units of a place by task."""
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
    """Mean validation accuracy of transfer over tasks and seeds; None if a unit is missing."""
    found = [units_at(entries, "transfer", Place(component.name, seed, rate)) for seed in seeds]
    if any(len(units) < num_tasks for units in found):
        return None
    return float(np.mean([unit["val_accuracy"] for units in found for unit in units.values()]))


def chosen_rate(
    entries: Sequence[Entry],
    component: Component,
    rates: Sequence[float],
    seeds: Sequence[int],
    num_tasks: int,
) -> float | None:
    """The rate with the best mean validation accuracy (the first of equal ones); None before the
    sweep is finished."""
    means = [mean_validation(entries, component, rate, seeds, num_tasks) for rate in rates]
    if any(mean is None for mean in means):
        return None
    return rates[int(np.argmax(np.asarray(means, float)))]


class Units:
    """The units of one run directory."""

    def __init__(
        self,
        directory: Path,
        network: Network,
        stream: Stream,
        training: Training,
        record: Record,
        stop: Stop,
        save_every: float | None,
        progress: Progress,
    ):
        self.directory = directory
        self.network = network
        self.stream = stream
        self.training = training
        self.record = record
        self.progress = progress
        self.stop = stop
        self.save_every = save_every

    def images(self, index: int) -> int:
        """Training images of a unit of this task in all epochs."""
        num = len(self.stream.tasks[index].train.labels)
        most = self.training.max_train
        return self.training.epochs * (num if most is None else min(num, most))

    def images_left(self, components: Sequence[Component], seeds: Sequence[int]) -> int:
        """Training images of all unfinished units."""
        entries = read(self.directory)
        tasks = range(len(self.stream.tasks))
        total = 0
        for component in components:
            rate = chosen_rate(entries, component, self.training.rates, seeds, len(tasks))
            for seed in seeds:
                done = [
                    units_at(entries, "transfer", Place(component.name, seed, r))
                    for r in self.training.rates
                ]
                done.append(
                    {}
                    if rate is None
                    else units_at(entries, "sequential", Place(component.name, seed, rate))
                )
                total += sum(
                    self.images(index) for units in done for index in tasks if index not in units
                )
        return total

    def run(self, component: Component, seeds: Sequence[int], shown: Advance) -> None:
        """Run the sweep of one component, then its sequences at the chosen rate."""
        num = len(self.stream.tasks)
        rates = self.training.rates
        places = [Place(component.name, seed, rate) for seed in seeds for rate in rates]
        learner = Learner(self.network, component)
        for place in places:
            done = units_at(read(self.directory), "transfer", place)
            for index in range(num):
                if index not in done:
                    self._transfer(learner, place, index, shown)
        rate = chosen_rate(read(self.directory), component, rates, seeds, num)
        assert rate is not None  # the sweep is finished
        for seed in seeds:
            place = Place(component.name, seed, rate)
            if units_at(read(self.directory), "diverged", place):
                continue
            try:
                self._sequence(learner, place, shown)
            except FloatingPointError as error:
                # a rate that suits single tasks can be too large for a sequence
                self.record.write("diverged", **place._asdict(), index=0, reason=str(error))
                Rolling(self.directory / "running").clear()
                self.progress.say(
                    f"{place}: the sequence diverged, so this component has no forgetting"
                )

    def _transfer(self, learner: Learner, place: Place, index: int, shown: Advance) -> None:
        task = self.stream.tasks[index]
        keys = Keys(place.seed)
        num = len(task.classes)
        session = self._session(f"transfer {place} {task.name}", f"{place}, {task.name}", shown)
        fitting = learner.begun(keys, index, num, learner.pretrained, session.saved)
        found = {"val_accuracy": 0.0, "test_accuracy": 0.0, "diverged": True}

        def keep(current: Fitting) -> None:
            nonlocal fitting
            fitting = current

        with session.phase("transfer", self.images(index), lambda: fitting.saved()) as advance:
            try:
                fitting = learner.fit(
                    fitting, keys, index, num, task.train, self.training, place.rate, advance, keep
                )
                leaves = learner.leaves(fitting.learned.parts)
                head = fitting.learned.head
                val, test = (
                    self.network.accuracy(leaves, head, split, num)
                    for split in (task.val, task.test)
                )
                found = {"val_accuracy": val, "test_accuracy": test, "diverged": False}
            except FloatingPointError:
                pass  # the rate is too large
        self.record.write("transfer", **place._asdict(), index=index, task=task.name, **found)
        session.finish()

    def _sequence(self, learner: Learner, place: Place, shown: Advance) -> None:
        tasks = self.stream.tasks
        keys = Keys(place.seed)
        if len(units_at(read(self.directory), "sequential", place)) == len(tasks):
            return
        session = self._session(f"sequential {place}", f"{place}, sequential", shown)
        begin = 0
        heads = list[Head]()
        if session.saved is not None:
            begin = session.saved.meta["index"]
            known = [session.saved.arrays["heads"][f"{index:04d}"] for index in range(begin)]
            heads = [
                Head(*(jnp.asarray(leaf) for _, leaf in sorted(arrays.items()))) for arrays in known
            ]
        # tasks after the checkpoint are learned again
        self.record.keep(
            lambda entry: not (_is_at(entry, "sequential", place) and entry["index"] >= begin)
        )
        fitting = learner.begun(
            keys, begin, len(tasks[begin].classes), learner.pretrained, session.saved
        )

        def keep(current: Fitting) -> None:
            nonlocal fitting
            fitting = current

        def state() -> Saved:
            return _sequence_state(index, fitting, heads)

        index = begin
        for index in range(begin, len(tasks)):
            task = tasks[index]
            num = len(tasks[index].classes)
            row = list[float]()

            with session.phase("sequential", self.images(index), state) as advance:
                fitting = learner.fit(
                    fitting, keys, index, num, task.train, self.training, place.rate, advance, keep
                )
                leaves = learner.leaves(fitting.learned.parts)
                # each learned task with its own head
                for known, head in zip(tasks, [*heads, fitting.learned.head], strict=False):
                    row.append(self.network.accuracy(leaves, head, known.test, len(known.classes)))
                    advance(0)
            self.record.write(
                "sequential", **place._asdict(), index=index, task=task.name, accuracy=row
            )
            if index + 1 < len(tasks):
                learned: Learned = fitting.learned
                heads.append(learned.head)
                fitting = learner.begun(
                    keys, index + 1, len(tasks[index + 1].classes), learned.parts
                )
                # else a new process would learn this task again
                saved = _sequence_state(index + 1, fitting, heads)
                session.save(lambda saved=saved: saved)
        session.finish()

    def _session(self, name: str, note: str, shown: Advance) -> Session:
        session = UnitSession(self, note, shown)
        session.begin("running", name, task_number(name))
        return session


class UnitSession(Session):
    """The session of one unit, whose images count in the display of the whole study."""

    def __init__(self, units: Units, note: str, shown: Advance):
        super().__init__(
            units.record,
            units.progress,
            stop=units.stop,
            checkpoints=units.directory,
            save_every=units.save_every,
        )
        self.note = note
        self.shown = shown

    def display(self, name: str, total: int, title: str) -> AbstractContextManager[Advance]:
        """See `Session.display`."""

        def noted(num_images: int, epoch: str = "", /) -> None:
            self.shown(num_images, f"{self.note}, {epoch}" if epoch else self.note)

        return nullcontext(noted)


def _sequence_state(index: int, fitting: Fitting, heads: Sequence[Head]) -> Saved:
    arrays, meta = fitting.saved()
    if heads:
        arrays["heads"] = {f"{number:04d}": numbered(head) for number, head in enumerate(heads)}
    return Saved(arrays, {**meta, "index": index})
