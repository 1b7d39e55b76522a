"""An open memory directory: predict, evaluate, export, learn, extend and forget."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cheem_jax.backbone.vit import ViT
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.core.architecture import to_strings
from cheem_jax.core.interruption import stop_requests
from cheem_jax.core.paths import absolute
from cheem_jax.core.pool import DenseExperts, InternalMemory, TaskMemory
from cheem_jax.data.task import check_names
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.feed import memory_budget
from cheem_jax.export import Exported, Format, Subject, export, kind_of
from cheem_jax.memory.changing import conditions, forget_tasks, learn_tasks, read_new_tasks
from cheem_jax.memory.contents import MemoryConfig, describe
from cheem_jax.memory.data import Data, ImageInput
from cheem_jax.memory.forgetting import Forgotten
from cheem_jax.memory.learning import make_setup
from cheem_jax.memory.predictor import BATCH_SIZES, Prediction, Predictor, predict_files
from cheem_jax.memory.scoring import (
    OpenSetScore,
    TaskScore,
    read_labelled,
    score_open_set,
    score_task,
    to_evaluated,
)
from cheem_jax.memory.state import MemoryState, read_base, read_run, read_state, read_usable
from cheem_jax.report.memories import store_evaluated
from cheem_jax.run.directory import hold
from cheem_jax.run.fingerprint import digest
from cheem_jax.run.progress import Progress, Status
from cheem_jax.run.record import Record
from cheem_jax.run.session import Session


class TaskInfo(NamedTuple):
    """A learned task."""

    name: str
    classes: tuple[str, ...]
    architecture: tuple[str, ...]
    """Op of each block: `reuse:N`, `adapt:N` (of expert N), `new` or `skip`."""
    number: int
    """Number among all tasks that were ever learned in this memory; numbers are not reused."""


def predict_images(
    predictor: Predictor, images: ImageInput | Sequence[ImageInput]
) -> list[Prediction]:
    """Predict one or more images. An error names the file, or the position of an image that is not
    a file."""
    if isinstance(images, str | bytes | Path | Image.Image):
        images = [images]
    files = [images] if isinstance(images, np.ndarray) and images.ndim == 3 else list(images)
    predictions = []
    for i, (file, prediction) in enumerate(predict_files(predictor, files)):
        if prediction.error:
            name = file if isinstance(files[i], str | Path) else f"image {i}"
            prediction = Prediction(error=f"{name}: {prediction.error}")
        predictions.append(prediction)
    return predictions


class OpenMemory:
    """An open memory directory or a finished run of CHEEM; a run can only predict.

    Only `refresh`, `tidy`, `learn` and `forget` read the tasks from disk again. One process at a
    time can write, and any number of processes can predict.
    """

    def __init__(
        self,
        directory: Path,
        config: MemoryConfig,
        pretrained: Pretrained,
        engine: EngineConfig,
        *,
        is_run: bool,
        usable: bool,
    ):
        self.lost: dict[str, str] | None = {} if usable else None
        """Reasons why tasks cannot be used, keyed by the folder of the task. None unless the memory
        was opened with `usable`."""
        self.is_run = is_run
        self.pretrained = pretrained
        self.engine = engine
        self.setup = make_setup(pretrained, config, engine)
        self.executor = self.setup.executor
        self._predictors: dict[Any, Predictor] = {}
        self._experts = DenseExperts(self.executor.base_pool, 0)
        self._set(MemoryState(directory, config, InternalMemory(self.executor.base_pool)))
        self.refresh()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory)!r}, tasks={list(self.state.names)})"

    def refresh(self) -> None:
        """Read the tasks again, because another process can change them.

        Raises ValueError with the name of every corrupted task, and if a task is missing.
        """
        pool = self.executor.base_pool
        if self.lost is not None:
            state, self.lost = read_usable(self.state, pool, self.root if self.is_run else None)
        elif self.is_run:
            state = read_run(self.state, pool, self.root)
        else:
            state = read_state(self.directory, pool)
        self._set(state)

    def _set(self, state: MemoryState) -> None:
        self.state = state
        self._experts = DenseExperts(state.internal.pool, self.executor.budget, self._experts)
        self._predictors.clear()

    @property
    def directory(self) -> Path:
        """The memory's directory."""
        return self.state.directory

    @property
    def config(self) -> MemoryConfig:
        """Settings and state of the memory."""
        return self.state.config

    @property
    def internal(self) -> InternalMemory:
        """The internal memory: experts per block, and the learned tasks."""
        return self.state.internal

    @property
    def root(self) -> Path:
        """Folder of the checkpoints, one directory per task."""
        return self.directory / "checkpoints" / "cheem" if self.is_run else self.state.root

    @functools.cached_property
    def vit(self) -> ViT:
        """The frozen backbone."""
        return self.executor.merge_vit(self.executor.leaves)

    @property
    def tasks(self) -> tuple[TaskInfo, ...]:
        """The learned tasks in learning order."""
        return tuple(
            TaskInfo(task.name, task.classes, tuple(to_strings(task.architecture)), number)
            for task, number in zip(self.internal.tasks, self.internal.numbers, strict=True)
        )

    @property
    def targets(self) -> tuple[TaskMemory, ...]:
        """The tasks, followed by the pretraining data if the memory predicts their classes."""
        return (*self.internal.tasks, *self._base)

    @functools.cached_property
    def _base(self) -> list[TaskMemory]:
        return [read_base(self.directory, self.vit)] if self.config.keeps_base else []

    def info(self) -> dict[str, Any]:
        """Return the values that `cheem info` displays; sizes are in bytes on disk."""
        pairs = zip(self.setup.costs(self.internal), self.tasks, strict=True)
        tasks = [{**cost, **task._asdict()} for cost, task in pairs]
        return describe(
            self.directory,
            self.config,
            self.root,
            tasks,
            self.internal.history(),
            self.internal.forgotten,
            is_run=self.is_run,
            lost=self.lost,
        )

    def predictor(
        self,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        top: int = 5,
        open_set: float | None = None,
        task: str | None = None,
        memory_gb: float | None = None,
    ) -> Predictor:
        """Return a predictor for decoded images `[N, S, S, 3]`. One predictor is cached for each
        combination of arguments; `batch_sizes`, `top` and `open_set` are those of `Predictor`.

        Args:
            task: name of the true task of all images. If it is set, the router is not used.
            memory_gb: size of the cache of merged experts in GiB (2^30 bytes); by default, the
                budget of the engine. Predictions do not depend on this size.
        """
        settings = tuple(batch_sizes), top, open_set, task, memory_gb
        if settings not in self._predictors:
            targets = self.targets
            experts = self._experts
            if memory_gb is not None:
                experts = DenseExperts(self.internal.pool, memory_budget(memory_gb))
            if task is not None:
                names = [target.name for target in targets]
                (task,) = check_names([task], names, f"memory {str(self.directory)!r}")
                targets = tuple(target for target in targets if target.name == task)
            self._predictors[settings] = Predictor(
                self.executor,
                targets,
                TaskNetworks(experts, targets),
                self.config.method.router,
                batch_sizes=batch_sizes,
                top=top,
                open_set=open_set,
                upright=self.config.upright,
            )
        return self._predictors[settings]

    def predict(
        self,
        images: ImageInput | Sequence[ImageInput],
        *,
        top: int = 5,
        open_set: float | None = None,
        task: str | None = None,
    ) -> list[Prediction]:
        """Predict images, which are files, encoded bytes, PIL images, or uint8 arrays `[(N), H, W,
        3]`.

        If `task` is set, it is the true task of all images. For an image that cannot be read, the
        prediction only contains `error`. Raises ValueError for arrays of another shape or type.
        """
        return predict_images(self.predictor(top=top, open_set=open_set, task=task), images)

    def evaluate(
        self,
        data: Data,
        *,
        split: str = "test",
        task: str | None = None,
        open_set: float | None = None,
    ) -> list[TaskScore]:
        """Score predictions on labelled images of learned tasks; tasks are matched by name.

        If the data are one task, `task` can be the name of a learned task, and the name of the data
        is ignored. Raises the errors of `score_task`.
        """
        predictor = self.predictor(open_set=open_set)
        return [
            score_task(one, split, predictor, self.predictor(task=name), is_learned=is_learned)
            for name, one, is_learned in read_labelled(self.state, data, split, task)
        ]

    def evaluate_open_set(
        self,
        data: Data,
        unknown: str | Path | Sequence[ImageInput],
        *,
        split: str = "test",
        task: str | None = None,
    ) -> OpenSetScore:
        """Score the rejection of unknown images at all thresholds; see `score_open_set`."""
        labelled = read_labelled(self.state, data, split, task)
        return score_open_set(labelled, split, unknown, self.predictor())

    def store_scores(self, scores: Sequence[TaskScore]) -> None:
        """Store test scores for `cheem report`; they are ignored after the memory changes. Raises
        ValueError, and stores nothing, if another process changes or has changed the memory."""
        with hold(self.directory):
            self.state.check_unchanged()
            store_evaluated(self.directory, dataclasses.asdict(self.config), to_evaluated(scores))

    def export(
        self,
        file: str | Path,
        kind: Format | None = None,
        *,
        task: str | None = None,
        open_set: float | None = None,
        overwrite: bool = False,
    ) -> Exported:
        """Write the network of one task, or the whole memory with its router, to a file.

        By default, the suffix of the file determines `kind`: .onnx, .stablehlo, or .safetensors
        (`timm`).
        """
        kind = kind or kind_of(Path(file))
        if open_set is not None and (task is not None or kind == "timm"):
            raise ValueError("the network of one task has no router for open_set; omit open_set")
        thresholds = self.predictor(open_set=open_set).thresholds
        subject = Subject(
            self.vit,
            self.config.method.placement,
            self.internal.pool,
            self.targets,
            self.config.method.router,
            None if thresholds is None else tuple(map(float, thresholds)),
        )
        return export(subject, absolute(file), kind, task=task, overwrite=overwrite)

    def learn(
        self,
        data: Data,
        *,
        name: str | None = None,
        extend: str | None = None,
        progress: Progress | None = None,
        save_every: float | None = None,
        discard_unfinished: bool = False,
    ) -> tuple[TaskInfo, ...]:
        """Learn tasks one after another, each from its images alone. Data that were already learned
        are skipped.

        A killed call resumes when it is repeated with the same data. Ctrl-C raises Stopped after
        the current step. Raises ValueError for a run, and the errors of `learn_tasks`.

        Args:
            name: name of the task, if the data are one task.
            extend: name of a learned task that also learns these images. The images can belong to
                classes of this task or to new classes.
            save_every: seconds between rolling checkpoints; see `Session`.
            discard_unfinished: discard an interrupted task that these data do not resume.
        """
        self.check_writable()
        tasks = read_new_tasks(self.state, data, name, extend, progress := progress or Progress())
        for note in self.setup.learner(self.internal).check(tasks):
            progress.say(note)
        with hold(self.directory), stop_requests() as stop, Status(self.directory) as status:
            self.tidy()
            record = Record(self.directory, digest(conditions(self.config, self.engine)))
            session = Session(record, progress, stop=stop, status=status, save_every=save_every)
            for state in learn_tasks(
                self.state, tasks, extend, self.setup, session, discard=discard_unfinished
            ):
                self._set(state)
        names = {task.name for task in tasks}
        return tuple(task for task in self.tasks if task.name in names)

    def forget(self, *names: str, erase: bool = False) -> Forgotten:
        """Forget all named tasks, or none of them if an error is raised. Predictions of all other
        tasks stay the same. Experts that other tasks have adapted are only removed with `erase`.

        Raises the errors of `forget_tasks`.
        """
        self.check_writable()
        with hold(self.directory):
            self.tidy()
            state, forgotten = forget_tasks(self.state, names, erase=erase)
            self._set(state)
        return forgotten

    def tidy(self) -> None:
        """Read the directory again, and finish the changes of a killed process."""
        self.refresh()
        self._set(self.state.tidy())

    def check_writable(self) -> None:
        """Raise ValueError for a run, and for a memory that was opened with `usable`."""
        if self.lost is not None:
            raise ValueError(
                f"{str(self.directory)!r} was opened with usable, so it can only predict; open it"
                " without usable to change it"
            )
        if self.is_run:
            raise ValueError(
                f"{str(self.directory)!r} is a run of an experiment, whose tasks are fixed; create"
                " a memory from its tasks with `cheem learn NEW_FOLDER DATA --begin-with"
                f" {self.directory}`"
            )
