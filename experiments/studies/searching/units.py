"""The units of a study of the search for one task, each recorded when it is finished.

A unit is a task learned by a recipe, the all-Reuse network, the scores of sampled architectures, or
one of these trained stand-alone. Finished units are not repeated.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from cheem_jax.cheem.closed_form import closed_form_score
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.cheem.evolution import Score
from cheem_jax.cheem.hee import sample
from cheem_jax.cheem.learner import Cheem, Learning, SamplingTables, sampling_tables
from cheem_jax.cheem.training import SupernetFit, architecture_flops, dense_network, supernet_score
from cheem_jax.core.architecture import decode, to_strings
from cheem_jax.core.interruption import Stop
from cheem_jax.core.keys import Keys, Phase
from cheem_jax.core.settings import Advance
from cheem_jax.data.task import Task
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import answers
from cheem_jax.run import fingerprint
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read, to_json
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session

Entry = dict[str, Any]
PLUS = dataclasses.replace(PRESETS["quick_plus"], router=PRESETS["quick"].router)
"""The search of `quick_plus` with the paper's router, since the task ID is given in this study."""
RECIPES: dict[str, CheemConfig] = {
    "quick": PRESETS["quick"],
    "plus": PLUS,
    "uniform": dataclasses.replace(PLUS, sampling="uniform"),
}
"""The compared searches: the paper's on a small budget, the closed-form one, and that without HEE.
"""
RANKED = "plus"
"""The recipe whose supernet ranks sampled architectures, by its own score and by the paper's."""
STEP = 3
"""Forward passes per training step on an image."""
TRIES = 10
"""Samples per wanted architecture, because samples repeat."""


class Counted(Session):
    """Displayed phases that can be stopped at any step; counts the images of each."""

    def __init__(self, stop: Stop, progress: Progress, title: str):
        super().__init__(progress=progress, stop=stop)
        self.title = title
        self.images = dict[str, int]()

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        total: int = 0,
        state: Callable[[], Saved] | None = None,
        *,
        title: str | None = None,
    ) -> Iterator[Advance]:
        """See `Session.phase`."""
        with super().phase(name, total, title=title or self.title) as report:

            def advance(num_images: int, note: str = "", /) -> None:
                self.images[name] = self.images.get(name, 0) + num_images
                report(num_images, note)

            yield advance


class TaskUnits:
    """The units of one task after one memory; `make` returns a learner with that memory."""

    def __init__(
        self,
        make: Callable[[CheemConfig, int], Cheem],
        task: Task,
        position: str,
        record: Record,
        stop: Stop,
        progress: Progress,
    ):
        self.make = make
        self.task = task
        self.position = position
        self.data_sha256 = data_hash(task)
        self.record, self.stop, self.progress = record, stop, progress

    def finished(self, event: str, **place: Any) -> Entry | None:
        """A finished unit, computed from the same images."""
        place = {"event": event, **self._place(), **place}
        return next(
            (entry for entry in read(self.record.file.parent) if place.items() <= entry.items()),
            None,
        )

    def learn(self, recipe: str, rate: float, seed: int) -> None:
        """Learn the task by a recipe at one rate; record target network, accuracy and costs."""
        config = at_rate(RECIPES[recipe], rate)
        place = {"recipe": recipe, "settings": settings_of(config), "rate": rate, "seed": seed}
        if self.finished("learned", **place):
            return
        cheem, learning, counted = self._begin(
            config, seed, f"{recipe}, rate {rate:g}, seed {seed}"
        )
        tables = sampling_tables(cheem.config, learning.candidates, cheem.similarity(learning))
        try:
            trained = cheem.train_supernet(learning, tables)
            codes = cheem.search(learning, tables, trained)
            unit = self._result(cheem, learning, cheem.finetune(learning, trained, codes), codes)
        except FloatingPointError as error:
            self.progress.say(f"{self.task.name}, {recipe}, rate {rate:g}: no network, {error}")
            unit = {"genome": None, "val_accuracy": None, "test_accuracy": None}
        training = counted.images.get("supernet", 0) + counted.images.get("finetune", 0)
        forward = sum(counted.images.values()) - training
        self._write(
            "learned",
            **place,
            **unit,
            images=counted.images,
            passes=STEP * training + forward,
            seconds=learning.session.seconds,
        )

    def reuse(self, rate: float, seed: int) -> None:
        """Train the head of the network that reuses the backbone in every block."""
        if self.finished("reuse", rate=rate, seed=seed):
            return
        config = at_rate(RECIPES["quick"], rate)
        cheem, learning, _ = self._begin(config, seed, f"all Reuse, rate {rate:g}, seed {seed}")
        self._write(
            "reuse",
            rate=rate,
            seed=seed,
            **self._trained(cheem, learning, None, [0] * cheem.executor.num_blocks),
        )

    def rank(self, num: int, rate: float) -> None:
        """Score architectures by one supernet in both ways and train each stand-alone; half are
        sampled by HEE, half uniformly."""
        config = at_rate(RECIPES[RANKED], rate)
        place = {"settings": settings_of(config), "num": num, "rate": rate}
        sampled = self.finished("sampled", **place)
        if sampled and all(
            self.finished("trained", **place, genome=genome) for genome in sampled["genomes"]
        ):
            return
        cheem, learning, _ = self._begin(config, 0, f"{num} sampled, rate {rate:g}")
        tables = sampling_tables(cheem.config, learning.candidates, cheem.similarity(learning))
        trained = cheem.train_supernet(learning, tables)
        genomes = sample_both(cheem.keys, learning.index, tables, num)
        if sampled is None:
            scores = self._scores(cheem, learning, trained)
            shares = {
                name: (score(genomes) / total).tolist() for name, (score, total) in scores.items()
            }
            self._write("sampled", **place, genomes=genomes, **shares)
        for genome in genomes.tolist():
            if self.finished("trained", **place, genome=genome) is None:
                learning = self._begin(config, 0, f"{''.join(map(str, genome))}, rate {rate:g}")[1]
                self._write("trained", **place, **self._trained(cheem, learning, trained, genome))

    def _scores(
        self, cheem: Cheem, learning: Learning, trained: SupernetFit
    ) -> dict[str, tuple[Score, int]]:
        """The paper's score and the one in closed form, each with its number of images."""
        size = cheem.batch_size
        train = self.task.train
        val = self.task.val
        fixed = (cheem.executor, trained.supernet, trained.state)
        shared = supernet_score(*fixed, learning.val, val.labels, batch_size=size)
        closed = closed_form_score(
            *fixed,
            train=learning.train,
            train_labels=train.labels,
            val=learning.val,
            val_labels=val.labels,
            batch_size=size,
        )
        num = len(val.labels)
        return {"shared_head": (shared, num), "closed_form": (closed, num + len(train.labels))}

    def _begin(self, config: CheemConfig, seed: int, title: str) -> tuple[Cheem, Learning, Counted]:
        counted = Counted(self.stop, self.progress, f"{self.task.name}, {self.position}, {title}")
        cheem = self.make(config, seed)
        return cheem, cheem.begin(self.task, counted), counted

    def _trained(
        self, cheem: Cheem, learning: Learning, supernet: SupernetFit | None, genome: list[int]
    ) -> Entry:
        """Train an architecture stand-alone."""
        codes = np.array(genome, np.int32)
        try:
            return self._result(cheem, learning, cheem.finetune(learning, supernet, codes), codes)
        except FloatingPointError as error:
            self.progress.say(f"{self.task.name}: {genome} has no accuracy, {error}")
            return {"genome": genome, "val_accuracy": None, "test_accuracy": None}

    def _result(
        self, cheem: Cheem, learning: Learning, fit: SupernetFit, codes: Int[np.ndarray, "L"]
    ) -> Entry:
        """Architecture, accuracy with the task ID given, and costs of a trained network."""
        network = dense_network(fit.supernet, fit.state, codes, {})
        task = self.task
        feeds = {"val": learning.val, "test": HostImages(cheem.executor, task.test.images)}
        accuracies = {
            f"{name}_accuracy": float(
                np.mean(
                    task.splits[name].labels
                    == answers(
                        cheem.executor,
                        network,
                        fit.state.head.params,
                        feed,
                        num=len(task.splits[name].labels),
                        num_classes=len(task.classes),
                        batch_size=cheem.batch_size,
                    )
                )
            )
            for name, feed in feeds.items()
        }
        architecture = decode(codes, learning.candidates.sizes)
        learned = fit.supernet.learned(fit.state, architecture)
        return {
            "genome": codes.tolist(),
            "architecture": to_strings(architecture),
            **accuracies,
            "num_val": len(task.val.labels),
            "num_test": len(task.test.labels),
            "flops": int(architecture_flops(cheem.executor, fit.supernet)(codes[None])[0]),
            "params_added": sum(leaf.size for params in learned.values() for leaf in params),
        }

    def _write(self, event: str, **values: Any) -> None:
        self.record.write(event, **self._place(), **values)

    def _place(self) -> Entry:
        return {"task": self.task.name, "position": self.position, "data_sha256": self.data_sha256}


def at_rate(config: CheemConfig, rate: float) -> CheemConfig:
    """Settings with one learning rate in both phases."""
    supernet, finetune = (
        dataclasses.replace(phase, learning_rate=rate)
        for phase in (config.supernet, config.finetune)
    )
    return dataclasses.replace(config, supernet=supernet, finetune=finetune)


def settings_of(config: CheemConfig) -> str:
    """Hash of a recipe's settings; units of other settings are not reused."""
    return fingerprint.digest(to_json(dataclasses.asdict(config)))


def sample_both(keys: Keys, index: int, tables: SamplingTables, num: int) -> Int[np.ndarray, "P L"]:
    """Sample half of `num` different architectures by HEE and half uniformly; fewer in a small
    space."""
    genomes: dict[tuple[int, ...], None] = {}
    for place, (table, wanted) in enumerate(zip(tables, (num // 2, num), strict=True)):
        key = keys.at(index, Phase.METHOD_TUNING, place)
        for genome in np.asarray(sample(key, table.astype(np.float32), num=TRIES * num)).tolist():
            if len(genomes) < wanted:
                genomes[tuple(genome)] = None
    return np.array(list(genomes), np.int32)
