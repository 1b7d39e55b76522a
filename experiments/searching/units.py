"""What the study of one task computes, unit by unit, each written to the record at once.

A unit is the supernet, the scores of the drawn architectures, one search, or one fine-tuned architecture. Finished
units are not computed again; a supernet goes on from its rolling checkpoint, which stays as what all else is read from.
"""

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from cheem_jax.architecture import decode, to_strings
from cheem_jax.data.task import Split, Task
from cheem_jax.evolution import Score
from cheem_jax.execution.feed import Feed, HostImages
from cheem_jax.execution.passes import Advance, answers
from cheem_jax.hee import sample
from cheem_jax.interruption import Stop
from cheem_jax.keys import Keys, Phase
from cheem_jax.methods.cheem import Cheem
from cheem_jax.methods.learning import Learning, Tables
from cheem_jax.methods.method import Clock
from cheem_jax.methods.underway import Underway
from cheem_jax.report.progress import Progress
from cheem_jax.report.record import Record, read
from cheem_jax.rolling import Rolling, RunningTask, Saved
from cheem_jax.supernet import Supernet
from cheem_jax.training import architecture_flops, dense_network, resumed_flops, supernet_score

Entry = dict[str, Any]
PAPER = {"cost": "network", "rungs": 1, "warm_start": False}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "paper": PAPER,
    "resumed cost": {**PAPER, "cost": "resumed"},
    "halving, 2 rungs": {**PAPER, "rungs": 2},
    "halving, 3 rungs": {**PAPER, "rungs": 3},
    "warm start": {**PAPER, "warm_start": True},
    "all": {"cost": "resumed", "rungs": 3, "warm_start": True},
}
"""What each search changes in the run's own settings."""
TRIES = 10
"""Architectures drawn per wanted one."""


class Counted:
    """Phases on the screen that may be stopped at any step; counts the images that a phase worked through."""

    saved = None

    def __init__(self, stop: Stop, progress: Progress, title: str):
        self.stop, self.progress, self.title, self.num_images = stop, progress, title, 0

    @contextlib.contextmanager
    def phase(self, name: str, total: int, state: Callable[[], Saved] | None = None) -> Iterator[Advance]:
        """See `Running.phase`."""
        with self.progress.phase(name, task=self.title, total=total) as shown:

            def advance(num_images: int, note: str = "", /) -> None:
                self.num_images += num_images
                if self.stop:
                    raise self.stop.stopped("everything that the record tells is kept")
                shown(num_images, note)

            yield advance


class TaskUnits:
    """All units of one task; `make` gives a learner of the run's memory before this task with settings of its own."""

    def __init__(
        self, directory: Path, make: Callable[[Mapping[str, Any], int | None], Cheem], task: Task, record: Record,
        stop: Stop, save_every: float | None, progress: Progress,
    ):  # fmt: skip
        self.make, self.task, self.record, self.stop, self.progress = make, task, record, stop, progress
        self.directory, self.cheem = directory, make({}, None)
        number = self.cheem.memory.next_number
        self.rolling = Rolling(directory / "supernets" / task.name, stop, every=save_every)

        def phase(name: str, total: int):
            return progress.phase(name, task=task.name, total=total)

        self.learning = self.cheem.begin(task, RunningTask(number, self.rolling, phase, progress.say))
        self.tables: Tables = self.cheem.tables(self.learning, self.cheem.similarity(self.learning))
        self.supernet = self._supernet()

    def found(self, event: str, **place: Any) -> Entry | None:
        """A finished unit of this task."""
        place = {"event": event, "task": self.task.name, **place}
        entries = (entry for entry in read(self.directory) if place.items() <= entry.items())
        return next(entries, None)

    def draw(self, num: int) -> Entry:
        """Half of `num` architectures by HEE and half uniformly, all different, with the supernet's answers."""
        if (known := self.found("drawn")) is not None:
            return known
        genomes = drawn(self.cheem.keys, self.learning.index, self.tables, num)
        title = f"{self.task.name}, {len(genomes)} drawn"
        with Counted(self.stop, self.progress, title).phase(
            "score", len(genomes) * len(self.task.val.labels)
        ) as advance:
            score = supernet_score(
                self.cheem.executor, self.supernet, self.task.val.labels, self.learning.val,
                batch_size=self.cheem.batch_size, advance=advance,
            )  # fmt: skip
            correct = score(genomes)
        self.record.write("drawn", task=self.task.name, genomes=genomes, supernet_accuracy=self._share(correct))
        return self._again("drawn")

    def search(self, variant: str, seed: int) -> Entry:
        """One search over this supernet."""
        if (known := self.found("searched", variant=variant, seed=seed)) is not None:
            return known
        counted = Counted(self.stop, self.progress, f"{self.task.name}, {variant}, seed {seed}")
        cheem, learning, start = self.make(VARIANTS[variant], seed), self._apart(counted), time.perf_counter()
        codes = cheem.search(learning, self.tables, self.supernet)
        searched = learning.underway.searched
        assert searched is not None, "the search is over"
        right = searched.scored.correct[(searched.scored.genomes == codes).all(axis=1)]
        self.record.write(
            "searched", task=self.task.name, variant=variant, seed=seed, genome=codes,
            supernet_accuracy=self._share(right)[0], candidate_images=counted.num_images,
            scored=len(searched.scored.genomes), dropped=len(searched.dropped), seconds=time.perf_counter() - start,
        )  # fmt: skip
        return self._again("searched", variant=variant, seed=seed)

    def finetune(self, genome: list[int]) -> Entry:
        """An architecture trained from scratch as the run's own would be, with the true task given."""
        if (known := self.found("finetuned", genome=genome)) is not None:
            return known
        codes, start = np.array(genome, np.int32), time.perf_counter()
        architecture = to_strings(decode(codes, self.learning.candidates.sizes))
        learning = self._apart(
            Counted(self.stop, self.progress, f"{self.task.name} {''.join(a[0] for a in architecture)}")
        )
        reached: Entry = {"val_accuracy": None, "test_accuracy": None, "right": None}
        try:
            network = self.cheem.finetune(learning, self.supernet, codes)
            test = HostImages(self.cheem.executor, self.task.test.images)
            val = self._right(network, codes, self.learning.val, self.task.val)
            right = self._right(network, codes, test, self.task.test)
            accuracies = {"val_accuracy": float(val.mean()), "test_accuracy": float(right.mean())}
            reached = {**accuracies, "right": to_hex(right)}
        except FloatingPointError as error:
            self.progress.say(f"{self.task.name}: {' '.join(architecture)} has no accuracy, {error}")
        own = codes[None]
        self.record.write(
            "finetuned", task=self.task.name, genome=genome, architecture=architecture, **reached,
            flops=self._flops(architecture_flops, own), flops_resumed=self._flops(self._resumed, own),
            losses=learning.underway.finetune.losses, seconds=time.perf_counter() - start,
        )  # fmt: skip
        return self._again("finetuned", genome=genome)

    def _supernet(self) -> Supernet:
        learning = self.learning
        supernet = self.cheem.train_supernet(learning, self.tables)
        if self.found("supernet") is None:
            self.rolling.save(learning.index, functools.partial(learning.underway.saved, "supernet", supernet))
            self.record.write(
                "supernet", task=self.task.name, losses=learning.underway.supernet.losses,
                num_train=len(self.task.train.labels), num_val=len(self.task.val.labels),
                num_test=len(self.task.test.labels), seconds=learning.underway.clock.seconds,
            )  # fmt: skip
        return supernet

    def _apart(self, counted: Counted) -> Learning:
        """The task as it stands behind the supernet, with a search and a fine-tuning of its own."""
        similarity, budget = self.learning.underway.similarity, copy.copy(self.learning.budget)
        underway = Underway(Clock(), similarity)
        return dataclasses.replace(self.learning, underway=underway, running=counted, budget=budget)

    def _resumed(self, executor: Any, supernet: Supernet) -> Score:
        return resumed_flops(executor, supernet, self.cheem.router.until(executor.num_blocks))

    def _flops(self, kind: Callable[[Any, Supernet], Score], genomes: Int[np.ndarray, "P L"]) -> int:
        return int(kind(self.cheem.executor, self.supernet)(genomes)[0])

    def _right(
        self, network: Supernet, codes: Int[np.ndarray, "L"], images: Feed, split: Split
    ) -> Bool[np.ndarray, "N"]:
        found = answers(
            self.cheem.executor, dense_network(network, codes, {}), network.head.params, network.num_classes, images,
            len(split.labels), batch_size=self.cheem.batch_size,
        )  # fmt: skip
        return found == split.labels

    def _share(self, correct: np.ndarray) -> list[float]:
        return (np.asarray(correct, np.float64) / len(self.task.val.labels)).tolist()

    def _again(self, event: str, **place: Any) -> Entry:
        entry = self.found(event, **place)
        assert entry is not None, "it was just written"
        return entry


def to_hex(right: Bool[np.ndarray, "N"]) -> str:
    """A bit per image, from the first on."""
    return np.packbits(right).tobytes().hex()


def from_hex(text: str, num: int) -> Bool[np.ndarray, "N"]:
    """The inverse of `to_hex`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=num).astype(bool)


def drawn(keys: Keys, index: int, tables: Tables, num: int) -> Int[np.ndarray, "P L"]:
    """Half of `num` architectures by HEE and half uniformly, all different; fewer where the space is small."""
    genomes: dict[tuple[int, ...], None] = {}
    for place, (table, wanted) in enumerate(zip(tables, (num // 2, num), strict=True)):
        key = keys.at(index, Phase.METHOD_TUNING, place)
        for genome in np.asarray(sample(key, table.astype(np.float32), num=TRIES * num)).tolist():
            if len(genomes) < wanted:
                genomes[tuple(genome)] = None
    return np.array(list(genomes), np.int32)
