"""A memory while a process works with it, as far as it answers: nothing here changes a file."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.cheem.learner import Cheem
from cheem_jax.cheem.saved_memory import open_memory as open_saved
from cheem_jax.cheem.saved_memory import open_usable
from cheem_jax.core.architecture import Choice, to_strings
from cheem_jax.core.keys import Keys
from cheem_jax.core.paths import absolute
from cheem_jax.core.pool import DenseExperts, Head, TaskMemory
from cheem_jax.core.pool import Memory as Pools
from cheem_jax.core.routing.centroids import calibrate, distances
from cheem_jax.data.task import Task, check_names
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import memory_budget
from cheem_jax.memory.data import Data, Picture, pixels_of, tasks_of
from cheem_jax.memory.directory import BASE, MemoryConfig, config_of, load_base, read_config, tasks_root
from cheem_jax.memory.prediction import Prediction
from cheem_jax.memory.predictor import BATCH_SIZES, Predictor, is_best
from cheem_jax.run.checkpoint import saved_tasks
from cheem_jax.run.method import Backbone, FrozenFeatures, Running

if TYPE_CHECKING:
    from cheem_jax.export import Exported, Format


ENGINE = EngineConfig()


class TaskInfo(NamedTuple):
    """A learned task."""

    name: str
    classes: tuple[str, ...]
    architecture: tuple[str, ...]
    """What runs in each block: `reuse:N`, `adapt:N` (of expert N), `new` or `skip`."""
    number: int
    """Its number among all tasks ever learned here, which is never used again."""


class Score(NamedTuple):
    """How a task's labelled images are answered; shares in [0, 1]."""

    task: str
    num_images: int
    accuracy: float
    """Right task and right class, the task being unknown."""
    accuracy_given: float
    """Right class, the true task being told."""
    found: float
    """Right task."""


class Answering:
    """What a memory directory, or a finished run of CHEEM, can be asked; nothing is read again until `refresh`."""

    def __init__(
        self,
        directory: Path,
        config: MemoryConfig,
        pretrained: Pretrained,
        root: Path,
        engine: EngineConfig,
        *,
        usable: bool = False,
    ):
        self.lost: dict[str, str] | None = {} if usable else None
        """Why tasks cannot answer, by folder; None where a damaged memory is not opened at all."""
        self.directory, self.config, self.pretrained, self.engine = directory, config, pretrained, engine
        self._root = root
        self.is_run = root.parent.name == "checkpoints"
        vit_config = dataclasses.replace(pretrained.config, precision=engine.precision)
        method = config.method
        self.vit = build(vit_config, pretrained.params)
        self.executor: Executor = make_executor(
            self.vit, method.placement, engine, token=method.token, batch_size=method.batch_size
        )
        place = f"{pretrained.config.image_size}/{method.placement}/{method.token}"
        means = None if method.base_means == "neutral" else pretrained.base_means.get(place)
        features = FrozenFeatures(Backbone(self.executor, method.router), method.batch_size)
        self._learner = _Calibrated(self.executor, method, Keys(config.seed, config.seeds), means, features)
        self._predictors: dict[Any, Predictor] = {}
        self._networks: dict[float | None, TaskNetworks] = {}
        self.refresh()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory)!r}, tasks={[task.name for task in self.tasks]})"

    def refresh(self) -> None:
        """Read again what another process may have learned or forgotten.

        Raises ValueError that names every corrupted task.
        """
        if self.lost is not None:
            self._learner.memory, self.lost = open_usable(self._root, self.executor.base_pool)
        elif self.is_run:
            self._learner.memory = open_saved(self._root, self.executor.base_pool)
        else:
            while not self._read():  # another process has forgotten a task meanwhile
                pass
        self._drop_predictors()

    def _drop_predictors(self) -> None:
        self._predictors.clear()
        self._networks.clear()

    def _read(self) -> bool:
        """Read it again; False where another generation began to count meanwhile."""
        held = read_config(self.directory)
        config, root = config_of(held, self.directory), tasks_root(self.directory, held)
        try:
            memory = open_saved(root, self.executor.base_pool)
        except (ValueError, OSError):
            if read_config(self.directory)["generation"] == config.generation:
                raise
            return False
        if read_config(self.directory)["generation"] != config.generation:
            return False
        missing = sorted(config.data_sha256.keys() - {task.name for task in memory.tasks})
        if missing or memory.next_number < config.num_learned:
            raise ValueError(
                f"{root} lacks tasks that were learned ({', '.join(missing) or 'forgotten ones, which keep places'}); "
                "restore it from a copy"
            )
        self.config, self._root, self._learner.memory = config, root, memory
        return True

    # ---- what it knows

    @property
    def pools(self) -> Pools:
        """The memory itself: experts per block, and what each task keeps."""
        return self._learner.memory

    @property
    def tasks(self) -> tuple[TaskInfo, ...]:
        """The learned tasks in order."""
        return tuple(
            TaskInfo(task.name, task.classes, tuple(to_strings(task.architecture)), number)
            for task, number in zip(self.pools.tasks, self.pools.numbers, strict=True)
        )

    @property
    def targets(self) -> tuple[TaskMemory, ...]:
        """What may answer: the tasks, and the backbone's own classes where they are kept."""
        base = self._base
        return self.pools.tasks if base is None else (*self.pools.tasks, base)

    @functools.cached_property
    def _base(self) -> TaskMemory | None:
        if not self.config.keeps_base:
            return None
        arrays, classes = load_base(self.directory)
        assert self.vit.head is not None and self.vit.head.bias is not None
        head = Head(self.vit.head.kernel[...], self.vit.head.bias[...])
        depth = self.vit.config.depth
        choices = _BASE_CHOICE * depth
        means = np.zeros((depth, self.vit.config.width), np.float32)
        return TaskMemory(
            BASE, classes, choices, (0,) * depth, head, means, arrays["centroids"], arrays["distances"],
            arrays.get("moments", {}),
        )  # fmt: skip

    def info(self) -> dict[str, Any]:
        """What `cheem info` tells, as JSON values; bytes on the disk per task."""
        sizes = dict(enumerate(map(_bytes_of, saved_tasks(self._root))))
        costs = [self._learner.costs(index) for index in range(len(self.tasks))]
        pool = self.pools.history()
        return {
            "directory": str(self.directory),
            "kind": "run" if self.is_run else "memory",
            "backbone": self.config.backbone,
            "image_size": self.config.image_size,
            "weights_sha256": self.config.weights_sha256,
            "placement": self.config.method.placement,
            "preset": self.config.preset,
            "seed": self.config.seed,
            "keeps_base": self.config.keeps_base,
            "lost": self.lost or {},
            "learning": self.config.learning,
            "bytes": _bytes_of(self.directory),
            "tasks": [
                {
                    **task._asdict(),
                    "experts": cost["experts"],
                    "bytes": sizes.get(task.number, 0),
                    "flops": cost["flops_method"],
                    "flops_executed": cost["flops_executed"],
                    "params_added": cost["params_added"],
                    "params_added_percent": cost["params_added_percent"],
                    "calibrated": kept.distances is not None,
                }
                for task, cost, kept in zip(self.tasks, costs, self.pools.tasks, strict=True)
            ],
            "forgotten": list(self.pools.forgotten),
            "pool": pool,
            "candidates": [list(block) for block in self.pools.candidates()],
        }

    # ---- answering

    def predictor(
        self,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        top: int = 5,
        open_set: float | None = None,
        task: str | None = None,
        memory_gb: float | None = None,
    ) -> Predictor:
        """Answers to decoded images `[N, S, S, 3]`; see `Predictor`. Made once for equal settings.

        `task` tells the true task of all of them, whose network alone then answers. A network is put together when an
        image first needs it, and of what was merged for that, `memory_gb` (2^30 bytes) stay for the next; default: what
        the engine may keep. Answers do not depend on it.
        """
        place = (tuple(batch_sizes), top, open_set, task, memory_gb)
        if place not in self._predictors:
            targets = self.targets
            if memory_gb not in self._networks:  # shared, whatever else is asked of them
                pool = self.pools.pool
                experts = self._learner.dense if memory_gb is None else DenseExperts(pool, memory_budget(memory_gb))
                self._networks[memory_gb] = TaskNetworks(experts, targets)
            networks = self._networks[memory_gb]
            if task is not None:
                check_names([task], [target.name for target in targets], f"memory {str(self.directory)!r}")
                networks = networks.of([task])
                targets = networks.tasks
            self._predictors[place] = Predictor(
                self.executor, targets, networks, self.config.method.router,
                batch_sizes=batch_sizes, top=top, open_set=open_set,
            )  # fmt: skip
        return self._predictors[place]

    def predict(
        self,
        images: Picture | Sequence[Picture],
        *,
        top: int = 5,
        open_set: float | None = None,
        task: str | None = None,
    ) -> list[Prediction]:
        """The answer to each picture: a file, its bytes, a PIL image, or an array uint8 `[H, W, 3]` or `[N, H, W, 3]`.

        `task` tells the true task of all of them. Raises ValueError or OSError naming what is no picture.
        """
        if isinstance(images, str | bytes | Path | Image.Image) or (
            isinstance(images, np.ndarray) and images.ndim == 3
        ):
            images = [images]
        size = self.config.image_size
        decoded = [pixels_of(image, size, f"image {i}") for i, image in enumerate(images)]
        if not decoded:
            return []
        return self.predictor(top=top, open_set=open_set, task=task)(np.stack(decoded))

    def evaluate(
        self, data: Data, *, split: str = "test", task: str | None = None, open_set: float | None = None
    ) -> list[Score]:
        """How labelled images of learned tasks are answered; classes are matched by name.

        Tasks of the data go by their names; `task` says which one a single one is. Raises ValueError for tasks or
        classes that were not learned.
        """
        found = tasks_of(data, self.config.image_size)
        if task is not None and len(found) != 1:
            raise ValueError(f"{task!r} is one task, and the data hold {len(found)}: {[t.name for t in found]}")
        names = [learned.name for learned in self.pools.tasks]
        wanted = [task] if task is not None else [one.name for one in found]
        check_names(wanted, names, f"memory {str(self.directory)!r}")
        return [self._score(one, names.index(name), split, open_set) for one, name in zip(found, wanted, strict=True)]

    def _score(self, task: Task, index: int, split: str, open_set: float | None) -> Score:
        if split not in task.splits:
            raise ValueError(f"split is {split!r}, expected one of {', '.join(task.splits)}")
        images, labels, learned = task.splits[split].images, task.splits[split].labels, self.pools.tasks[index]
        if unknown := sorted(set(task.classes) - set(learned.classes)):
            raise ValueError(
                f"task {learned.name!r} has not learned the classes {unknown[:8]}; it knows {list(learned.classes)[:8]}"
            )
        wanted = np.array([learned.classes.index(name) for name in task.classes])[labels].tolist()
        answered = self.predictor(open_set=open_set).answer(images)
        # `argmax` of a class needs the target's own logits, so only answers of the right task are looked at
        own = (answered.targets == index).tolist()
        right = [o and is_best(logits, w) for o, logits, w in zip(own, answered.logits, wanted, strict=True)]
        told = self.predictor(task=learned.name).answer(images).logits
        given = [is_best(logits, w) for logits, w in zip(told, wanted, strict=True)]
        return Score(learned.name, len(labels), float(np.mean(right)), float(np.mean(given)), float(np.mean(own)))

    def export(
        self,
        file: str | Path,
        kind: "Format",
        *,
        task: str | None = None,
        open_set: float | None = None,
        overwrite: bool = False,
    ) -> "Exported":
        """Write one task's network, or without `task` the whole memory behind its router, for use elsewhere."""
        if task is not None and open_set is not None:
            raise ValueError(
                "one task's network has no router, so open_set means nothing there; leave out one of the two"
            )
        from cheem_jax.export import export
        from cheem_jax.export.subject import Subject

        thresholds = self.predictor(open_set=open_set).thresholds
        subject = Subject(
            self.vit, self.config.method.placement, self.pools.pool, self.targets, self.config.method.router,
            None if thresholds is None else tuple(map(float, thresholds)),
        )  # fmt: skip
        return export(subject, absolute(file), kind, task=task, overwrite=overwrite)

    # ---- changing it

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.pools.tasks)


class _Calibrated(Cheem):
    """CHEEM that also keeps how far a task's validation images are from its centroids, for `none of my tasks`."""

    def learn(self, task: Task, running: Running) -> dict[str, Any]:
        """See `Cheem.learn`."""
        report = super().learn(task, running)
        learned = self.memory.tasks[-1]
        own = distances(self.features(task, "val"), [learned.centroids], self.router)[:, 0]
        tasks = (*self.memory.tasks[:-1], dataclasses.replace(learned, distances=calibrate(own)))
        self.memory = dataclasses.replace(self.memory, tasks=tasks)
        self.features.forget(task)
        return report


def _bytes_of(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process learns here
                total += (Path(place) / name).stat().st_size
    return total


_BASE_CHOICE = (Choice("reuse", 0),)
