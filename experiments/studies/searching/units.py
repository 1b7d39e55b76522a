"""What the study of one task computes, unit by unit, each written to the record at once.

A unit is the supernet, the scores of the sampled architectures, one search, or one fine-tuned architecture. Finished
units are not computed again; a supernet goes on from its rolling checkpoint, which stays as what all else is read from.
"""

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from cheem_jax.backbone.flops import executed_flops
from cheem_jax.cheem.hee import sample
from cheem_jax.cheem.learner import Cheem, Learning, Tables
from cheem_jax.cheem.training import SupernetFit, architecture_flops, dense_network, supernet_score
from cheem_jax.cheem.underway import Underway
from cheem_jax.core.architecture import decode, to_strings
from cheem_jax.core.interruption import Stop
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.data.task import Split, Task
from cheem_jax.engine.feed import Feed, HostImages
from cheem_jax.engine.passes import Advance, answers
from cheem_jax.run.method import Clock
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run.rolling import Rolling, RunningTask, Saved

Entry = dict[str, Any]
PAPER = "paper"
"""What records call the paper's search, beside which they once had others."""
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
    """All units of one task; `make` gives a learner of the run's memory before this task, by the seed of its search."""

    def __init__(
        self, directory: Path, make: Callable[[int | None], Cheem], task: Task, record: Record,
        stop: Stop, save_every: float | None, progress: Progress,
    ):  # fmt: skip
        self.make, self.task, self.record, self.stop, self.progress = make, task, record, stop, progress
        self.directory, self.cheem = directory, make(None)
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
                self.cheem.executor, self.supernet.supernet, self.supernet.state, self.learning.val,
                self.task.val.labels,
                batch_size=self.cheem.batch_size, advance=advance,
            )  # fmt: skip
            correct = score(genomes)
        self.record.write("drawn", task=self.task.name, genomes=genomes, supernet_accuracy=self._share(correct))
        return self._again("drawn")

    def search(self, seed: int) -> Entry:
        """One search over this supernet."""
        if (known := self.found("searched", variant=PAPER, seed=seed)) is not None:
            return known
        counted = Counted(self.stop, self.progress, f"{self.task.name}, search, seed {seed}")
        cheem, learning, start = self.make(seed), self._apart(counted), time.perf_counter()
        codes = cheem.search(learning, self.tables, self.supernet)
        searched = learning.underway.searched
        assert searched is not None, "the search is over"
        right = searched.scored.correct[(searched.scored.genomes == codes).all(axis=1)]
        self.record.write(
            "searched", task=self.task.name, variant=PAPER, seed=seed, genome=codes,
            supernet_accuracy=self._share(right)[0], candidate_images=counted.num_images,
            scored=len(searched.scored.genomes), seconds=time.perf_counter() - start,
        )  # fmt: skip
        return self._again("searched", variant=PAPER, seed=seed)

    def finetune(self, genome: list[int]) -> Entry:
        """An architecture trained from scratch as the run's own would be, with the task ID given."""
        if (known := self.found("finetuned", genome=genome)) is not None:
            return known
        codes, start = np.array(genome, np.int32), time.perf_counter()
        architecture = to_strings(decode(codes, self.learning.candidates.sizes))
        learning = self._apart(
            Counted(self.stop, self.progress, f"{self.task.name} {''.join(a[0] for a in architecture)}")
        )
        reached: Entry = {"val_accuracy": None, "test_accuracy": None}
        try:
            network = self.cheem.finetune(learning, self.supernet, codes)
            test = HostImages(self.cheem.executor, self.task.test.images)
            val_right = self._right(network, codes, self.learning.val, self.task.val)
            test_right = self._right(network, codes, test, self.task.test)
            reached = {"val_accuracy": float(val_right.mean()), "test_accuracy": float(test_right.mean())}
        except FloatingPointError as error:
            self.progress.say(f"{self.task.name}: {' '.join(architecture)} has no accuracy, {error}")
        self.record.write(
            "finetuned", task=self.task.name, genome=genome, architecture=architecture, **reached,
            flops=int(architecture_flops(self.cheem.executor, self.supernet.supernet)(codes[None])[0]),
            flops_resumed=self._behind_pass(codes), losses=learning.underway.finetune.losses,
            seconds=time.perf_counter() - start,
        )  # fmt: skip
        return self._again("finetuned", genome=genome)

    def _supernet(self) -> SupernetFit:
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

    def _behind_pass(self, codes: Int[np.ndarray, "L"]) -> int:
        """FLOPs that run of a network behind the router's pass, which it shares while it reuses the base's experts."""
        executor, until = self.cheem.executor, self.cheem.router.until(self.cheem.executor.num_blocks)
        begin = int(np.append(np.flatnonzero(codes), until).min())
        architecture = decode(codes, self.learning.candidates.sizes)
        return executed_flops(executor.config, executor.placement, architecture, begin=begin)

    def _right(
        self, trained: SupernetFit, codes: Int[np.ndarray, "L"], images: Feed, split: Split
    ) -> Bool[np.ndarray, "N"]:
        network, state = trained.supernet, trained.state
        found = answers(
            self.cheem.executor, dense_network(network, state, codes, {}), state.head.params, images,
            num=len(split.labels), num_classes=network.num_classes, batch_size=self.cheem.batch_size,
        )  # fmt: skip
        return found == split.labels

    def _share(self, correct: np.ndarray) -> list[float]:
        return (np.asarray(correct, np.float64) / len(self.task.val.labels)).tolist()

    def _again(self, event: str, **place: Any) -> Entry:
        entry = self.found(event, **place)
        assert entry is not None, "it was just written"
        return entry


def drawn(keys: Keys, index: int, tables: Tables, num: int) -> Int[np.ndarray, "P L"]:
    """Half of `num` architectures by HEE and half uniformly, all different; fewer where the space is small."""
    genomes: dict[tuple[int, ...], None] = {}
    for place, (table, wanted) in enumerate(zip(tables, (num // 2, num), strict=True)):
        key = keys.at(index, Phase.METHOD_TUNING, place)
        for genome in np.asarray(sample(key, table.astype(np.float32), num=TRIES * num)).tolist():
            if len(genomes) < wanted:
                genomes[tuple(genome)] = None
    return np.array(list(genomes), np.int32)
