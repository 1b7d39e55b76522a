"""The units of a study of the search for one task, each recorded when it is finished.

A unit is a task learned by a recipe, or the all-Reuse network. Finished units are not repeated.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from cheem_jax.cheem.config import PRESETS, CheemConfig, OpSettings
from cheem_jax.cheem.learner import Cheem, Learning, sampling_tables
from cheem_jax.cheem.training import SupernetFit, architecture_flops, dense_network
from cheem_jax.core.architecture import decode, to_strings
from cheem_jax.core.interruption import Stop
from cheem_jax.core.settings import Advance, FitConfig
from cheem_jax.data.task import Task
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import classes_and_features
from cheem_jax.run import fingerprint
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read, to_json
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session

Entry = dict[str, Any]


class Recipe(NamedTuple):
    """Settings of CHEEM, and the phases that the recipe uses."""

    config: CheemConfig
    has_supernet: bool = True
    """False: the network that adapts every block is trained alone, as by LoRA-CL."""
    searches: bool = True
    """False: the network that adapts every block is fine-tuned."""


LORA = {f"lora-{rank}": rank for rank in (8, 16, 32, 64, 128)}
"""Ranks of LoRA-CL, keyed by recipe."""
BACKWARD = {"backward-75": (0.75, 0.9), "backward-50": (0.5, 0.85), "backward-25": (0.25, 0.8)}
"""Limits of parameters and FLOPs of backward elimination, keyed by recipe."""


def _recipes() -> dict[str, Recipe]:
    router = PRESETS["quick"].router  # the task ID is given, so the simplest router suffices
    plus = dataclasses.replace(PRESETS["quick_plus"], router=router)
    rate = plus.finetune.learning_rate

    def ranked(
        rank: int, schedule: Literal["warm_cosine", "cosine"] = "warm_cosine"
    ) -> CheemConfig:
        return CheemConfig(
            ops=OpSettings(rank=rank),
            supernet=FitConfig(8, rate, schedule),
            sampling="anchored",
            finetune=FitConfig(8, rate, schedule),
            weights="inherited",
            router=router,
            batch_size=plus.batch_size,
        )

    def backward(parameters: float, flops: float) -> Recipe:
        config = ranked(64)
        search = dataclasses.replace(config.search, max_parameters=parameters, max_flops=flops)
        return Recipe(dataclasses.replace(config, search=search))

    def lora(config: CheemConfig) -> Recipe:
        whole = dataclasses.replace(config.finetune, epochs=16)
        return Recipe(
            dataclasses.replace(config, finetune=whole), has_supernet=False, searches=False
        )

    def warm(phase: FitConfig) -> FitConfig:
        return dataclasses.replace(phase, schedule="warm_cosine")

    return {
        "quick": Recipe(PRESETS["quick"]),
        "plus": Recipe(plus),
        "plus-warm": Recipe(
            dataclasses.replace(plus, supernet=warm(plus.supernet), finetune=warm(plus.finetune))
        ),
        **{name: backward(*limits) for name, limits in BACKWARD.items()},
        "anchor": Recipe(ranked(64), searches=False),
        "lora-64-cold": lora(ranked(64, "cosine")),
        **{name: lora(ranked(rank)) for name, rank in LORA.items()},
    }


RECIPES = _recipes()
"""The compared recipes, each with 16 passes over the training images: the paper's search on a small
budget (quick), the closed-form search (plus), the same with a rising rate at the start of both
phases (plus-warm), backward elimination by the limit of its parameters in percent, its anchor
without elimination, and LoRA-CL by rank, whose rate rises at the start, except in lora-64-cold."""
STEP = 3
"""Forward passes per training step on an image."""


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


class Shared(NamedTuple):
    """A trained supernet and the costs of its training."""

    key: tuple[str, int]
    """Settings of the supernet, and seed."""
    trained: SupernetFit
    seconds: dict[str, float]
    images: dict[str, int]


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
        self.shared: Shared | None = None

    def finished(self, event: str, **place: Any) -> Entry | None:
        """A finished unit, computed from the same images."""
        place = {"event": event, **self._place(), **place}
        return next(
            (entry for entry in read(self.record.file.parent) if place.items() <= entry.items()),
            None,
        )

    def learn(self, recipe: str, rate: float, seed: int) -> None:
        """Learn the task by a recipe at one rate; record target network, accuracy and costs."""
        config = at_rate(RECIPES[recipe].config, rate)
        place = {"recipe": recipe, "settings": settings_of(config), "rate": rate, "seed": seed}
        if self.finished("learned", **place):
            return
        cheem, learning, counted = self._begin(
            config, seed, f"{recipe}, rate {rate:g}, seed {seed}"
        )
        try:
            trained, codes = self._search(cheem, learning, counted, RECIPES[recipe], seed)
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
        config = at_rate(RECIPES["quick"].config, rate)
        cheem, learning, _ = self._begin(config, seed, f"all Reuse, rate {rate:g}, seed {seed}")
        codes = np.zeros(cheem.executor.num_blocks, np.int32)
        fit = cheem.finetune(learning, None, codes)
        self._write("reuse", rate=rate, seed=seed, **self._result(cheem, learning, fit, codes))

    def _search(
        self, cheem: Cheem, learning: Learning, counted: Counted, recipe: Recipe, seed: int
    ) -> tuple[SupernetFit | None, Int[np.ndarray, "L"]]:
        """Train the supernet and search, if the recipe has these phases.

        Consecutive recipes that train the same supernet share it, with its costs.
        """
        config = cheem.config
        tables = sampling_tables(config, learning.candidates, cheem.similarity(learning))
        if not recipe.has_supernet:
            assert tables.anchor is not None, "LoRA-CL adapts every block"
            return None, tables.anchor.genome
        search = PRESETS["quick"].search
        key = settings_of(dataclasses.replace(config, search=search, finetune=config.supernet))
        if self.shared is None or self.shared.key != (key, seed):
            trained = cheem.train_supernet(learning, tables)
            costs = dict(learning.session.seconds), dict(counted.images)
            self.shared = Shared((key, seed), trained, *costs)
        else:
            learning.session.seconds.update(self.shared.seconds)
            counted.images.update(self.shared.images)
        if not recipe.searches:
            assert tables.anchor is not None, "the anchor adapts every block"
            return self.shared.trained, tables.anchor.genome
        return self.shared.trained, cheem.search(learning, tables, self.shared.trained)

    def _begin(self, config: CheemConfig, seed: int, title: str) -> tuple[Cheem, Learning, Counted]:
        counted = Counted(self.stop, self.progress, f"{self.task.name}, {self.position}, {title}")
        cheem = self.make(config, seed)
        return cheem, cheem.begin(self.task, counted), counted

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
                    == classes_and_features(
                        cheem.executor,
                        [network],
                        fit.state.head.params,
                        feed,
                        num=len(task.splits[name].labels),
                        num_classes=len(task.classes),
                        batch_size=cheem.batch_size,
                    )[0]
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
