"""What is trained, unit by unit, and written to the record at once.

A unit is one task with one component: by itself from the pretrained backbone (`transfer`), or as the next one of the
stream on the backbone that goes on (`sequential`), each with fresh moments of Adam and a fresh head. Test accuracy is
recorded at every rate of the sweep, and validation alone chooses.

Finished units are not trained again; the running one goes on from its rolling checkpoint, which for a sequence also
holds the heads of its earlier tasks.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from cheem_jax.baselines.fitting import Fitting, numbered
from cheem_jax.core.interruption import Stop
from cheem_jax.core.keys import Keys, task_number
from cheem_jax.core.pool import Head
from cheem_jax.data.task import Stream
from cheem_jax.engine.passes import Advance
from cheem_jax.run.record import Record, read
from cheem_jax.run.rolling import Rolling, RunningTask, Saved
from studies.components.learning import Component, Learned, Learner, Network, Training

Entry = dict[str, Any]


class Place(NamedTuple):
    """A component trained with one seed at one rate."""

    component: str
    seed: int
    rate: float

    def __str__(self) -> str:
        return f"{self.component}, seed {self.seed}, rate {self.rate:g}"


def found_at(entries: Sequence[Entry], event: str, place: Place) -> dict[int, Entry]:
    """The finished units of a place by their task."""
    return {entry["index"]: entry for entry in entries if _is_at(entry, event, place)}


def _is_at(entry: Entry, event: str, place: Place) -> bool:
    return entry["event"] == event and place == (entry["component"], entry["seed"], entry["rate"])


def mean_validation(
    entries: Sequence[Entry], component: Component, rate: float, seeds: Sequence[int], num_tasks: int
) -> float | None:
    """Mean validation accuracy over tasks and seeds, task to task; None where a unit is missing."""
    found = [found_at(entries, "transfer", Place(component.name, seed, rate)) for seed in seeds]
    if any(len(units) < num_tasks for units in found):
        return None
    return float(np.mean([unit["val_accuracy"] for units in found for unit in units.values()]))


def chosen_rate(
    entries: Sequence[Entry], component: Component, rates: Sequence[float], seeds: Sequence[int], num_tasks: int
) -> float | None:
    """The rate with the best mean validation accuracy (of equal ones the first); None before the sweep is done."""
    means = [mean_validation(entries, component, rate, seeds, num_tasks) for rate in rates]
    if any(mean is None for mean in means):
        return None
    return rates[int(np.argmax(np.asarray(means, float)))]


class Units:
    """The units of one run directory."""

    def __init__(
        self, directory: Path, network: Network, stream: Stream, training: Training, record: Record, stop: Stop,
        save_every: float | None, say: Callable[[str], object],
    ):  # fmt: skip
        self.directory, self.network, self.stream, self.training = directory, network, stream, training
        self.record, self.stop, self.say = record, stop, say
        self.rolling = Rolling(directory / "running", stop, every=save_every)

    def images(self, index: int) -> int:
        """Images that a unit of this task trains on, all epochs together."""
        num, most = len(self.stream.tasks[index].train.labels), self.training.max_train
        return self.training.epochs * (num if most is None else min(num, most))

    def images_left(self, components: Sequence[Component], seeds: Sequence[int]) -> int:
        """Images of all units that are not finished."""
        entries, tasks, total = read(self.directory), range(len(self.stream.tasks)), 0
        for component in components:
            rate = chosen_rate(entries, component, self.training.rates, seeds, len(tasks))
            for seed in seeds:
                done = [found_at(entries, "transfer", Place(component.name, seed, r)) for r in self.training.rates]
                done.append({} if rate is None else found_at(entries, "sequential", Place(component.name, seed, rate)))
                total += sum(self.images(index) for units in done for index in tasks if index not in units)
        return total

    def run(self, component: Component, seeds: Sequence[int], shown: Advance) -> None:
        """The sweep of one component task to task, then its sequences at the chosen rate."""
        num, rates = len(self.stream.tasks), self.training.rates
        places = [Place(component.name, seed, rate) for seed in seeds for rate in rates]
        learner = Learner(self.network, component)
        for place in places:
            done = found_at(read(self.directory), "transfer", place)
            for index in range(num):
                if index not in done:
                    self._transfer(learner, place, index, shown)
        rate = chosen_rate(read(self.directory), component, rates, seeds, num)
        assert rate is not None  # all units of the sweep are there
        for seed in seeds:
            place = Place(component.name, seed, rate)
            if found_at(read(self.directory), "diverged", place):
                continue
            try:
                self._sequence(learner, place, shown)
            except FloatingPointError as error:
                # what a rate does to single tasks does not tell what it does to a long sequence
                self.record.write("diverged", **place._asdict(), index=0, reason=str(error))
                self.rolling.clear()
                self.say(f"{place}: the sequence diverged, so this component has no forgetting")

    def _transfer(self, learner: Learner, place: Place, index: int, shown: Advance) -> None:
        task, keys = self.stream.tasks[index], Keys(place.seed)
        num = len(task.classes)
        running = self._running(f"transfer {place} {task.name}", f"{place}, {task.name}", shown)
        fitting = learner.begun(keys, index, num, learner.pretrained, running.saved)
        found = {"val_accuracy": 0.0, "test_accuracy": 0.0, "diverged": True}
        with running.phase("transfer", self.images(index), fitting.saved) as advance:
            try:
                learner.fit(fitting, keys, index, num, task.train, self.training, place.rate, advance)
                leaves, head = learner.leaves(fitting.learned.parts), fitting.learned.head
                val, test = (self.network.accuracy(leaves, head, split, num) for split in (task.val, task.test))
                found = {"val_accuracy": val, "test_accuracy": test, "diverged": False}
            except FloatingPointError:
                pass  # too large a rate: what the sweep is there to find out
        self.record.write("transfer", **place._asdict(), index=index, task=task.name, **found)
        self.rolling.clear()

    def _sequence(self, learner: Learner, place: Place, shown: Advance) -> None:
        tasks, keys = self.stream.tasks, Keys(place.seed)
        if len(found_at(read(self.directory), "sequential", place)) == len(tasks):
            return
        running = self._running(f"sequential {place}", f"{place}, sequential", shown)
        begin, heads = 0, list[Head]()
        if running.saved is not None:
            begin = running.saved.meta["index"]
            known = [running.saved.arrays["heads"][f"{index:04d}"] for index in range(begin)]
            heads = [Head(*(jnp.asarray(leaf) for _, leaf in sorted(arrays.items()))) for arrays in known]
        # what was learned after the checkpoint is learned again
        self.record.keep(lambda entry: not (_is_at(entry, "sequential", place) and entry["index"] >= begin))
        fitting = learner.begun(keys, begin, len(tasks[begin].classes), learner.pretrained, running.saved)
        for index in range(begin, len(tasks)):
            task, num, row = tasks[index], len(tasks[index].classes), list[float]()
            state = functools.partial(_sequence_state, index, fitting, tuple(heads))
            with running.phase("sequential", self.images(index), state) as advance:
                learner.fit(fitting, keys, index, num, task.train, self.training, place.rate, advance)
                leaves = learner.leaves(fitting.learned.parts)
                # each task so far with the head that it was learned with
                for known, head in zip(tasks, [*heads, fitting.learned.head], strict=False):
                    row.append(self.network.accuracy(leaves, head, known.test, len(known.classes)))
                    advance(0)
            self.record.write("sequential", **place._asdict(), index=index, task=task.name, accuracy=row)
            if index + 1 < len(tasks):
                learned: Learned = fitting.learned
                heads.append(learned.head)
                fitting = learner.begun(keys, index + 1, len(tasks[index + 1].classes), learned.parts)
                # without it the next process would learn this task again
                saved = _sequence_state(index + 1, fitting, heads)
                running.rolling.save(running.task, lambda saved=saved: saved)
        self.rolling.clear()

    def _running(self, name: str, note: str, shown: Advance) -> RunningTask:
        def noted(num_images: int, epoch: str = "", /) -> None:
            shown(num_images, f"{note}, {epoch}" if epoch else note)

        return RunningTask(task_number(name), self.rolling, lambda phase, total: nullcontext(noted), self.say)


def _sequence_state(index: int, fitting: Fitting, heads: Sequence[Head]) -> Saved:
    arrays, meta = fitting.saved()
    if heads:
        arrays["heads"] = {f"{number:04d}": numbered(head) for number, head in enumerate(heads)}
    return Saved(arrays, {**meta, "index": index})
