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
from cheem_jax.cheem.training import ADAPT, SupernetFit, architecture_flops, dense_network
from cheem_jax.core.architecture import Choice, decode, encode, to_strings
from cheem_jax.core.interruption import Stop
from cheem_jax.core.settings import Advance
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
    """Settings of CHEEM, and whether it searches."""

    config: CheemConfig
    searches: bool = True
    """False: every block that is not skipped adapts the base expert, as in LoRA-CL."""
    num_skipped: int = 0
    """Number of last blocks that a recipe without a search skips."""
    ranks: tuple[int, ...] = ()
    """Ranks to which copies of the trained network are truncated. Each copy is recorded as a
    separate recipe, such as `lora-64/16`."""


LORA = {f"lora-{rank}": rank for rank in (8, 16, 32, 64, 128)}
"""Ranks of LoRA-CL, keyed by recipe."""
BACKWARD = {"backward-95": 0.95, "backward-90": 0.9}
"""Limits of the FLOPs of backward elimination, keyed by recipe."""
AUGMENTED = "-augmented"
"""Ends the names of recipes that augment the training images."""
RANKS = (32, 16, 8)
"""Ranks to which trained pairs are truncated."""


def _recipes() -> dict[str, Recipe]:
    # the task ID is given, so the simplest router suffices
    plus = dataclasses.replace(
        PRESETS["quick_plus"], router=PRESETS["quick"].router, fallback=False
    )
    usual = plus.ops.rank

    def at_rank(
        rank: int, schedule: Literal["warm_cosine", "cosine"] = "warm_cosine"
    ) -> CheemConfig:
        finetune = dataclasses.replace(plus.finetune, schedule=schedule)
        return dataclasses.replace(plus, ops=OpSettings(rank), finetune=finetune)

    def backward(max_flops: float) -> Recipe:
        config = at_rank(usual)
        search = dataclasses.replace(config.search, max_flops=max_flops)
        return Recipe(dataclasses.replace(config, search=search), ranks=RANKS)

    recipes = {
        "quick": Recipe(PRESETS["quick"]),
        **{name: backward(limit) for name, limit in BACKWARD.items()},
        "last-2": Recipe(at_rank(usual), searches=False, num_skipped=2, ranks=RANKS),
        "lora-64-cold": Recipe(at_rank(usual, "cosine"), searches=False),
        **{
            name: Recipe(at_rank(rank), searches=False, ranks=RANKS if rank == usual else ())
            for name, rank in LORA.items()
        },
    }
    for name in ("backward-90", "lora-64"):
        plain = recipes[name]
        config = dataclasses.replace(plain.config, augment=True)
        recipes[name + AUGMENTED] = plain._replace(config=config)
    return recipes


RECIPES = _recipes()
"""The compared recipes, each with 16 passes over the training images: the paper's search on a small
budget (quick), backward elimination by the limit of its FLOPs in percent, LoRA-CL by rank, and
LoRA-CL without the last two blocks (last-2). The rate of LoRA-CL rises at the start, except in
lora-64-cold. Two recipes also augment the training images."""
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
        config = at_rate(RECIPES[recipe].config, rate)
        place = {"recipe": recipe, "settings": settings_of(config), "rate": rate, "seed": seed}
        if self.finished("learned", **place):
            return
        cheem, learning, counted = self._begin(
            config, seed, f"{recipe}, rate {rate:g}, seed {seed}"
        )
        try:
            trained, codes = _search(cheem, learning, RECIPES[recipe])
            fit = cheem.finetune(learning, trained, codes)
            units = {recipe: self._result(cheem, learning, fit, codes)} | {
                f"{recipe}/{rank}": self._result(cheem, learning, _truncated(fit, rank), codes)
                for rank in RECIPES[recipe].ranks
            }
        except FloatingPointError as error:
            self.progress.say(f"{self.task.name}, {recipe}, rate {rate:g}: no network, {error}")
            units = {recipe: {"genome": None, "val_accuracy": None, "test_accuracy": None}}
        training = counted.images.get("supernet", 0) + counted.images.get("finetune", 0)
        forward = sum(counted.images.values()) - training
        costs = {
            "images": counted.images,
            "passes": STEP * training + forward,
            "seconds": learning.session.seconds,
        }
        # the recipe itself is last: it marks the unit as finished
        for name, unit in reversed(units.items()):
            self._write("learned", **{**place, "recipe": name}, **unit, **costs)

    def reuse(self, rate: float, seed: int) -> None:
        """Train the head of the network that reuses the backbone in every block."""
        if self.finished("reuse", rate=rate, seed=seed):
            return
        config = at_rate(RECIPES["quick"].config, rate)
        cheem, learning, _ = self._begin(config, seed, f"all Reuse, rate {rate:g}, seed {seed}")
        codes = np.zeros(cheem.executor.num_blocks, np.int32)
        fit = cheem.finetune(learning, None, codes)
        self._write("reuse", rate=rate, seed=seed, **self._result(cheem, learning, fit, codes))

    def _begin(self, config: CheemConfig, seed: int, title: str) -> tuple[Cheem, Learning, Counted]:
        counted = Counted(self.stop, self.progress, f"{self.task.name}, {self.position}, {title}")
        cheem = self.make(config, seed)
        return cheem, cheem.begin(self.task, counted), counted

    def _result(
        self, cheem: Cheem, learning: Learning, fit: SupernetFit, codes: Int[np.ndarray, "L"]
    ) -> Entry:
        """Architecture, accuracy with the task ID given, and costs of a trained network."""
        task = self.task
        architecture = decode(codes, learning.candidates.sizes)
        learned = fit.supernet.learned(fit.state, architecture)
        stored = fit.supernet.start_from(
            {(block, architecture[block]): params for block, params in learned.items()},
            fit.state.head.params,
        )
        network = dense_network(fit.supernet, stored, codes, {})
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


def _search(
    cheem: Cheem, learning: Learning, recipe: Recipe
) -> tuple[SupernetFit | None, Int[np.ndarray, "L"]]:
    """Search by the recipe, or adapt the base expert in every block that is not skipped."""
    if not recipe.searches:
        num = len(learning.candidates.sizes)
        architecture = (ADAPT,) * (num - recipe.num_skipped)
        architecture += (Choice("skip"),) * recipe.num_skipped
        return None, encode(architecture, learning.candidates.sizes)
    if cheem.config.sampling == "anchored":
        return None, cheem.eliminate(learning)
    tables = sampling_tables(cheem.config, learning.candidates, cheem.similarity(learning))
    trained = cheem.train_supernet(learning, tables)
    return trained, cheem.search(learning, tables, trained)


def _truncated(fit: SupernetFit, rank: int) -> SupernetFit:
    """Return the fit with a supernet that truncates trained pairs to `rank`."""
    settings = dataclasses.replace(fit.supernet.settings, truncated_rank=rank)
    return fit._replace(supernet=dataclasses.replace(fit.supernet, settings=settings))


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
