"""A memory directory while a process works with it: answer, measure, learn one more task, forget
one."""

import contextlib
import dataclasses
import functools
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cheem_jax.backbone.vit import ViT
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.cheem.config import auto
from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.cheem.learner import expected_seconds
from cheem_jax.cheem.saved_memory import open_memory as open_saved
from cheem_jax.cheem.saved_memory import open_usable
from cheem_jax.continual import evaluate, learn_task
from cheem_jax.core.architecture import Choice, to_strings
from cheem_jax.core.interruption import stop_requests
from cheem_jax.core.keys import Keys
from cheem_jax.core.metrics import calibration_error
from cheem_jax.core.paths import absolute
from cheem_jax.core.pool import DenseExperts, Head, InternalMemory, TaskMemory
from cheem_jax.data.task import (
    SPLITS,
    Purpose,
    Task,
    check_names,
    composed,
    copies_of,
    repeats,
    spelled_as,
)
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.compilation import Mark
from cheem_jax.engine.feed import memory_budget
from cheem_jax.export import Exported, Format, Subject, export, kind_of
from cheem_jax.memory.contents import (
    BASE,
    MemoryConfig,
    checkpoints_of,
    config_of,
    info_of,
    interrupted_of,
    read_config,
)
from cheem_jax.memory.data import Data, Picture, tasks_of
from cheem_jax.memory.directory import remove_old_generations, write_config, write_generation
from cheem_jax.memory.extending import (
    Extension,
    MemoryLearner,
    absent_classes,
    extension_of,
    outnumbers,
)
from cheem_jax.memory.forgetting import Forgotten, forget, without_numbers, without_task
from cheem_jax.memory.predictor import (
    BATCH_SIZES,
    Prediction,
    Predictor,
    is_best,
    predict_files,
    probabilities_of,
)
from cheem_jax.report.memories import EVALUATED, Evaluated, keep_evaluated
from cheem_jax.run import fingerprint
from cheem_jax.run.checkpoint import load_task
from cheem_jax.run.directory import hold
from cheem_jax.run.progress import Progress, Status, duration
from cheem_jax.run.record import Record, read
from cheem_jax.run.results import write_results
from cheem_jax.run.rolling import Rolling
from cheem_jax.run.session import Session
from cheem_jax.run_config import find_base_means, make_networks

DERIVED = (
    ".status.json",
    EVALUATED,
    "answers.npz",
    "report.html",
    "figures",
    "tensorboard",
)
"""What commands write into a memory's folder from its record, and can write again; names and
classes are in it."""


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
    """Right task and right class (task-agnostic)."""
    accuracy_given: float
    """Right class, the task ID given."""
    found: float
    """Right task."""
    calibration_error: float
    """Expected calibration error (15 bins) of the probabilities of the classes, the task ID
    given."""
    images: str = ""
    """Which images were measured, in words."""


class OpenMemory:
    """A memory directory, or a finished run of CHEEM to answer with.

    Nothing is read again until `refresh`, `learn` or `forget`; one process writes at a time, any
    number may predict.
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
        """Why tasks cannot answer, by folder; None where a corrupted memory is not opened at
        all."""
        self.directory = directory
        self.config = config
        self.pretrained = pretrained
        self.engine = engine
        self.is_run = is_run
        self.root = (
            directory / "checkpoints" if is_run else checkpoints_of(directory, config.generation)
        ) / "cheem"
        """Where the tasks lie, one directory each."""
        method = config.method
        networks = make_networks(pretrained, None, config.method, engine)
        self.executor = networks.executor
        base = find_base_means(
            pretrained, method, engine.precision, images=None, progress=Progress()
        )
        keys = Keys(config.seed, config.seeds)
        self._learner = MemoryLearner(
            self.executor, method, keys, base.values, networks.router_features
        )
        self._predictors: dict[Any, Predictor] = {}
        self.refresh()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.directory)!r},"
            f" tasks={[task.name for task in self.tasks]})"
        )

    def refresh(self) -> None:
        """Read again what another process may have learned or forgotten.

        Raises ValueError that names every corrupted task.
        """
        if self.lost is not None:
            self._learner.memory, self.lost = open_usable(self.root, self.executor.base_pool)
        elif self.is_run:
            self._learner.memory = open_saved(self.root, self.executor.base_pool)
        else:
            self._read()
        self._predictors.clear()

    def _read(self) -> None:
        config = config_of(read_config(self.directory), self.directory)
        root = checkpoints_of(self.directory, config.generation) / "cheem"
        try:
            memory = open_saved(root, self.executor.base_pool)
        except (ValueError, OSError):
            if read_config(self.directory)["generation"] == config.generation:
                raise
            memory = None
        if memory is None or read_config(self.directory)["generation"] != config.generation:
            return self._read()  # another process has forgotten a task meanwhile
        missing = sorted(config.data_sha256.keys() - {task.name for task in memory.tasks})
        if missing or memory.next_number < config.num_learned:
            raise ValueError(
                f"{root} lacks tasks that were learned"
                f" ({', '.join(missing) or 'forgotten ones, which keep places'}); restore it from a"
                " copy"
            )
        self.config, self.root, self._learner.memory = config, root, memory

    # ---- what it knows

    @functools.cached_property
    def vit(self) -> ViT:
        """The frozen backbone."""
        return self.executor.vit_of(self.executor.leaves)

    @property
    def pools(self) -> InternalMemory:
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
        return (*self.pools.tasks, *self._base)

    @functools.cached_property
    def _base(self) -> tuple[TaskMemory, ...]:
        if not self.config.keeps_base:
            return ()
        arrays, meta = load_task(self.directory / BASE)
        assert self.vit.head is not None and self.vit.head.bias is not None
        head = Head(self.vit.head.kernel[...], self.vit.head.bias[...])
        depth = self.vit.config.depth
        means = np.zeros((depth, self.vit.config.width), np.float32)
        base = TaskMemory(
            BASE,
            tuple(meta["classes"]),
            (Choice("reuse", 0),) * depth,
            (0,) * depth,
            head,
            means,
            arrays["centroids"],
            arrays["distances"],
            arrays.get("moments", {}),
        )
        return (base,)

    def info(self) -> dict[str, Any]:
        """What `cheem info` tells, as JSON values; bytes on the disk per task."""
        tasks = [
            {
                **self._learner.costs(index),
                **task._asdict(),
                "calibrated": kept.distances is not None,
            }
            for index, (task, kept) in enumerate(zip(self.tasks, self.pools.tasks, strict=True))
        ]
        return info_of(
            self.directory,
            self.config,
            self.root,
            tasks,
            self.pools.history(),
            self.pools.forgotten,
            is_run=self.is_run,
            lost=self.lost,
        )

    @property
    def interrupted(self) -> dict[str, Any] | None:
        """The task that was begun and is not saved yet, whatever is kept of it: name, number and
        data."""
        return interrupted_of(self.config, self.pools.next_number)

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

        `task` tells the true task of all of them, whose network alone then answers. A network is
        put together when an image first needs it, and of what was merged for that, `memory_gb`
        (2^30 bytes) stay for the next; default: what the engine may keep. Answers do not depend on
        it.
        """
        place = (tuple(batch_sizes), top, open_set, task, memory_gb)
        if place not in self._predictors:
            targets = self.targets
            experts = self._learner.dense
            if memory_gb is not None:
                experts = DenseExperts(self.pools.pool, memory_budget(memory_gb))
            if task is not None:
                (task,) = check_names(
                    [task], [target.name for target in targets], f"memory {str(self.directory)!r}"
                )
                targets = tuple(target for target in targets if target.name == task)
            self._predictors[place] = Predictor(
                self.executor,
                targets,
                TaskNetworks(experts, targets),
                self.config.method.router,
                batch_sizes=batch_sizes,
                top=top,
                open_set=open_set,
                upright=self.config.upright,
            )
        return self._predictors[place]

    def predict(
        self,
        images: Picture | Sequence[Picture],
        *,
        top: int = 5,
        open_set: float | None = None,
        task: str | None = None,
    ) -> list[Prediction]:
        """The answer to each image: a file, its bytes, a PIL image, or an array uint8 `[H, W, 3]`
        or `[N, H, W, 3]`.

        `task` tells the true task of all of them. As for `cheem predict`, an image that cannot be
        read gets a prediction with `error` alone, and the others are answered. Raises ValueError
        for an array of another form.
        """
        if isinstance(images, str | bytes | Path | Image.Image):
            images = [images]
        given = [images] if isinstance(images, np.ndarray) and images.ndim == 3 else list(images)
        names = [
            str(one) if isinstance(one, str | Path) else f"image {i}" for i, one in enumerate(given)
        ]
        found = predict_files(self.predictor(top=top, open_set=open_set, task=task), given)
        return [
            Prediction(error=f"{name}: {answer.error}") if answer.error else answer
            for name, (_, answer) in zip(names, found, strict=True)
        ]

    def evaluate(
        self,
        data: Data,
        *,
        split: str = "test",
        task: str | None = None,
        open_set: float | None = None,
    ) -> list[Score]:
        """How labelled images of learned tasks are answered; classes are matched by name.

        Of data without a test split all images are measured; of those that the task was learned
        from, the images that were held out as test images. Tasks of the data go by their names;
        `task` says which one a single one is. Raises ValueError for tasks or classes that were not
        learned.
        """
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
        size, upright = self.config.image_size, self.config.upright
        found = tasks_of(data, size, upright=upright, purpose="measure", only=split)
        if task is not None and len(found) != 1:
            raise ValueError(
                f"{task!r} is one task, and the data hold {len(found)}: {[t.name for t in found]}"
            )
        wanted = [task] if task is not None else [one.name for one in found]
        wanted = check_names(wanted, self._names, f"memory {str(self.directory)!r}")
        pairs = zip(found, map(self._names.index, wanted), strict=True)
        return [self._score(one, index, split, open_set) for one, index in pairs]

    def keep_scores(self, scores: Sequence[Score]) -> None:
        """Keep what was measured on test images for `cheem report`, until a task is learned or
        forgotten."""
        date = time.strftime("%Y-%m-%d %H:%M")
        measured = dict[str, Evaluated]()
        for score in scores:
            measured[score.task] = Evaluated(
                score.num_images, score.accuracy, score.accuracy_given, score.found, date
            )
        keep_evaluated(self.directory, dataclasses.asdict(self.config), measured)

    def _score(self, task: Task, index: int, split: str, open_set: float | None) -> Score:
        learned = self.pools.tasks[index]
        parts = [task.splits[split]]
        told = f"the {{}} {split} images"
        if split == "test" and "test" in task.cut:
            if data_hash(dataclasses.replace(task, name=learned.name)) in self._learned_from(
                learned.name
            ):
                told = "the {} images of it that were held out as test images when it was learned"
            else:
                parts = list(task.splits.values())
                told = "all {} images"
        labels = np.concatenate([part.labels for part in parts])
        if not len(labels):
            raise ValueError(
                f"task {task.name!r} has no {split} image to measure on; name another split"
            )
        names = spelled_as(task.classes, learned.classes)
        if unknown := sorted(
            {names[label] for label in set(labels.tolist())} - set(learned.classes)
        ):
            raise ValueError(
                f"task {learned.name!r} has not learned the classes {unknown[:8]}; it knows"
                f" {list(learned.classes)[:8]}"
            )
        wanted = [learned.classes.index(names[label]) for label in labels.tolist()]
        targets = list[int]()
        answers = list[np.ndarray]()
        own_answers = list[np.ndarray]()
        for part in (part for part in parts if len(part.labels)):
            answered = self.predictor(open_set=open_set).answer(part.images)
            targets += answered.targets.tolist()
            answers += answered.logits
            own_answers += self.predictor(task=learned.name).answer(part.images).logits
        # `argmax` of a class needs the target's own logits, so only answers of the right task are
        # looked at
        own = [target == index for target in targets]
        right = [
            o and is_best(logits, w) for o, logits, w in zip(own, answers, wanted, strict=True)
        ]
        given = [is_best(logits, w) for logits, w in zip(own_answers, wanted, strict=True)]
        # what is non-finite answers nothing, at no confidence
        sure = np.nan_to_num([probabilities_of(logits, learned).max() for logits in own_answers])
        accuracy, accuracy_given, found = (float(np.mean(of)) for of in (right, given, own))
        error = calibration_error(sure, np.array(given))
        told = told.format(f"{len(labels):,}")
        return Score(learned.name, len(labels), accuracy, accuracy_given, found, error, told)

    def export(
        self,
        file: str | Path,
        kind: Format | None = None,
        *,
        task: str | None = None,
        open_set: float | None = None,
        overwrite: bool = False,
    ) -> Exported:
        """Write one task's network, or without `task` the whole memory behind its router, for use
        elsewhere.

        Without `kind` the file's ending decides: .onnx, .stablehlo or .safetensors (`timm`).
        """
        if task is not None and open_set is not None:
            raise ValueError(
                "one task's network has no router, so open_set means nothing there; leave out one"
                " of the two"
            )
        kind = kind or kind_of(Path(file))
        thresholds = self.predictor(open_set=open_set).thresholds
        subject = Subject(
            self.vit,
            self.config.method.placement,
            self.pools.pool,
            self.targets,
            self.config.method.router,
            None if thresholds is None else tuple(map(float, thresholds)),
        )
        return export(subject, absolute(file), kind, task=task, overwrite=overwrite)

    # ---- changing it

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
        """Learn one task or several, each from its own images alone; what is learned already from
        equal data stays.

        `extend` names a learned task of which the data are more images: of classes that it has, of
        new ones, or both. Killed at any moment and called again with the same data it resumes;
        Ctrl-C raises Stopped after the running step. Raises ValueError for a task whose name is
        taken, where another one is unfinished (unless `discard_unfinished`), and for a run of an
        experiment, whose tasks are fixed.
        """
        self.check_writable()
        progress = progress or Progress()
        purpose: Purpose = "learn" if extend is None else "extend"
        tasks = tasks_of(
            data, self.config.image_size, progress, upright=self.config.upright, purpose=purpose
        )
        if extend is not None and (name is not None or len(tasks) != 1):
            given = f"the name {name!r}" if name is not None else f"{len(tasks)} tasks"
            raise ValueError(
                f"one task, {extend!r}, is extended by the images of one, but {given} came with it"
            )
        if name is not None and len(tasks) != 1:
            raise ValueError(
                f"one name, {name!r}, for {len(tasks)} tasks: {[task.name for task in tasks]}"
            )
        if (own := name if extend is None else extend) is not None:
            tasks = (dataclasses.replace(tasks[0], name=own),)
        names = self._spelled([task.name for task in tasks])
        tasks = tuple(
            task if task.name == name else dataclasses.replace(task, name=name)
            for task, name in zip(tasks, names, strict=True)
        )
        if repeated := repeats(task.name.casefold() for task in tasks):
            raise ValueError(
                f"task names differ in upper and lower case alone, or not at all: {repeated}"
            )
        size = self.config.image_size
        for task in tasks:
            if (shape := task.train.images.shape[1:]) != (size, size, 3):
                raise ValueError(
                    f"task {task.name!r} contains images of shape {shape}, expected"
                    f" {(size, size, 3)}"
                )
        for note in self._learner.check(tasks):
            progress.say(note)
        with self._writing() as record, stop_requests() as stop, Status(self.directory) as status:
            hashes = {task.name: data_hash(task) for task in tasks}
            if extend is None:
                self._check_names(hashes)
            else:
                (extend,) = check_names([extend], self._names, f"memory {str(self.directory)!r}")
                tasks = (
                    extension_of(tasks[0], self.pools.tasks[self._names.index(extend)].classes),
                )
            if discard_unfinished and self.interrupted is None:
                progress.say("no task is interrupted, so there is nothing to discard")
            self._check_unfinished(hashes, discard_unfinished)
            for task in tasks:
                for name in copies_of(task, self.config.data_sha256):
                    progress.say(
                        f"warning: {task.name} has the same images as {name}; the router cannot"
                        " tell them apart, so accuracy will be low without the task ID"
                    )
            session = Session(
                record,
                progress,
                stop=stop,
                status=status,
                checkpoints=self.root.parent,
                save_every=save_every,
            )
            for task in tasks:
                if hashes[task.name] in self._learned_from(task.name):
                    progress.say(f"{task.name}: learned already")
                elif isinstance(task, Extension):
                    self._extend(task, hashes[task.name], session)
                    session.checkpoints = self.root.parent
                else:
                    self._learn(task, hashes[task.name], session)
                self._measure(tasks, session)
            self._learner.features.clear()
        names = [task.name for task in tasks]
        return tuple(task for task in self.tasks if task.name in names)

    def _begin(self, task: Task, data_sha256: str, session: Session) -> int:
        """Say in `config.json` which task is learned, with the settings for its images; returns its
        number."""
        number = self.pools.next_number
        num = len(self.pools.tasks)
        if self.config.preset == "auto":
            self._learner.config = auto(self.config.method, len(task.train.labels))
        self._write(
            learning={"name": task.name, "number": number, "data_sha256": data_sha256},
            tasks=tuple(dict.fromkeys((*self._names, task.name))),
            method=self._learner.config,
        )
        session.record.keep(
            lambda entry: entry["event"] != "learned" or entry["report"]["index"] < num
        )
        return number

    def _learn(self, task: Task, data_sha256: str, session: Session) -> None:
        index, num = len(self.pools.tasks), len(task.train.labels)
        number = self._begin(task, data_sha256, session)
        method = self.config.method
        saved = Rolling(session.root(self._learner.name)).open(number, session.say)
        seconds = expected_seconds(self.executor, self._learner.config, task, saved)
        session.expect(seconds)
        # in tens of seconds, which claim no more than such an estimate can
        takes = duration(10 * max(math.ceil(seconds / 10), 1))
        session.say(
            f"task {index + 1}: {task.name}, {len(task.classes)} classes, {num:,} training images; "
            + (f"takes about {takes}" if saved is None else f"about {takes} left")
        )
        if self.config.preset == "auto":
            session.say(
                f"{task.name}: auto chose {method.supernet.epochs} epochs for the supernet and"
                f" {method.finetune.epochs} for fine-tuning, at the learning rate"
                f" {method.finetune.learning_rate:g}"
            )
        learn_task(task, number, self._learner, session, index=index)
        session.expect(None)
        self._finish_learning()
        self._predictors.clear()

    def _extend(self, task: Extension, data_sha256: str, session: Session) -> None:
        before = self.pools
        index = self._names.index(task.name)
        num = len(before.tasks)
        classes = before.tasks[index].classes
        absent = absent_classes(task, before.tasks[index])
        learned = {
            e["report"]["index"]: e["report"]
            for e in read(self.directory)
            if e["event"] == "learned"
        }
        old = learned[index]
        number = self._begin(task, data_sha256, session)
        method = self.config.method
        more = len(task.classes) - len(classes)
        session.say(
            f"{task.name}: {len(task.train.labels):,} more images to learn from"
            f" ({old['num_train']:,} before), {len(task.val.labels):,} to decide on, {more} more"
            f" class{'' if more == 1 else 'es'} ({len(classes)} before)"
        )
        session.say(
            f"{task.name}: no new image of"
            f" {', '.join(absent[:8])}{', ...' if len(absent) > 8 else ''}; the network stays as it"
            " is, and the head is computed from means and covariance that are kept of these"
            " classes"
            if absent
            else (
                f"{task.name}: every learned class has new images, as many as before or more, so"
                " fine-tuning is tried"
                if outnumbers(task, before.tasks[index], old["num_train"])
                else (
                    f"{task.name}: fewer new images than before, so the network stays as it is, and"
                    " a head computed from means and covariance of all images is tried"
                )
            )
        )
        start = Mark.now()
        session.check_room(self._learner.bytes_needed(task), f"task {task.name!r}")
        try:
            # a supernet of one network, whose weights fine-tuning inherits
            self._learner.config = dataclasses.replace(method, weights="inherited")
            session.begin(self._learner.name, task.name, number)
            found = self._learner.extend(task, session, index, old["num_train"])
            grown = self.pools
        finally:
            self._learner.config, self._learner.memory = method, before
        sizes = {
            f"num_{name}": old[f"num_{name}"] + len(split.labels)
            for name, split in task.splits.items()
        }
        then = {
            "num_train": [old["num_train"], sizes["num_train"]],
            "num_classes": [len(classes), len(task.classes)],
        }
        tested = "test" if len(task.splits["test"].labels) else "validation"
        report = {
            **old,
            **found,
            **sizes,
            "index": num,
            "extended": [*old.get("extended", []), then],
        }
        report["tested_on"] = tested
        if left_out := [*old.get("skipped_images", []), *task.skipped]:
            report["skipped_images"] = left_out
        report["seconds"] = dict(Counter(old["seconds"]) + Counter(found["seconds"]))
        session.say(f"{task.name}: {_effect(found['extension'])}")
        # how similar tasks are that were learned in between is unknown
        report["similarity"] = [*old["similarity"], *[[None] * len(before.pool)] * (num - index)]
        session.record.write("learned", method=self._learner.name, report=report, **start.since())
        done = without_numbers(grown, (before.numbers[index],))
        more = [*self.config.extended.get(task.name, []), {**then, "data_sha256": data_sha256}]
        self._replace(
            grown,
            done.memory,
            forgetting=({"index": index, "name": task.name, "extended": True},),
            replaced=(*self.config.replaced, before.numbers[index]),
            extended={**self.config.extended, task.name: more},
        )

    def _replace(self, before: InternalMemory, after: InternalMemory, **changes: Any) -> None:
        """Write the next generation, say in `config.json` that it counts, and take away what is
        left of the old one."""
        write_generation(self.directory, self.config, before, after)
        self._write(
            generation=self.config.generation + 1,
            tasks=tuple(task.name for task in after.tasks),
            num_learned=after.next_number,
            learning=None,
            **changes,
        )
        self.tidy()

    def _measure(self, tasks: Sequence[Task], session: Session) -> None:
        """Fill the record up: one measurement after each task, of those whose images are at
        hand."""
        measured = {
            entry["index"] for entry in read(self.directory) if entry["event"] == "evaluated"
        }
        # an extension may come without test images
        at_hand = {
            t.name: t if len(t.test.labels) else dataclasses.replace(t, test=t.val) for t in tasks
        }
        for index in sorted(set(range(len(self.pools.tasks))) - measured):
            learned = self.pools.tasks[: index + 1]
            # after a later task was learned, what an earlier moment would have given can no longer
            # be measured
            is_now = index == len(self.pools.tasks) - 1
            evaluate(
                [at_hand.get(task.name) if is_now else None for task in learned],
                (self._learner,),
                session,
                0.0,
            )
        write_results(self.directory)

    def forget(self, *names: str, erase: bool = False) -> Forgotten:
        """Drop tasks and what only they use, all or none; every other task answers as before.

        See `forgetting`. Raises ValueError for an unknown name, and while another task is
        interrupted.
        """
        self.check_writable()
        with self._writing():
            read(self.directory)  # a corrupted record is reported before anything changes
            before = self.pools
            learning = self.interrupted
            wanted = self._spelled(names)
            if learning is not None and learning["name"] not in wanted:
                raise ValueError(
                    f"task {learning['name']!r} is interrupted; finish it, or forget it too, before"
                    " another one is forgotten"
                )
            saved = [
                name
                for name in wanted
                if learning is None or name != learning["name"] or name in self._names
            ]
            done = forget(before, *saved, erase=erase) if saved or not names else Forgotten(before)
            if learning is not None:
                self._end_learning()
            if done.numbers:
                indices = sorted((self._names.index(name) for name in saved), reverse=True)
                config = self.config
                self._replace(
                    before,
                    done.memory,
                    forgetting=tuple(
                        {"index": index, "name": before.tasks[index].name} for index in indices
                    ),
                    data_sha256={
                        task: sha for task, sha in config.data_sha256.items() if task not in saved
                    },
                    extended={
                        task: told for task, told in config.extended.items() if task not in saved
                    },
                )
        return done

    # ---- keeping it whole

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Record]:
        """The directory for this process alone, read anew, and with what a killed process left
        taken away."""
        with hold(self.directory):
            self.tidy()
            told = ("backbone", "image_size", "seed", "weights_sha256", "data_sha256")
            identity = {name: getattr(self.config, name) for name in told}
            identity |= {
                "cheem": dataclasses.asdict(self.config.method),
                "engine": dataclasses.asdict(self.engine),
            }
            yield Record(self.directory, fingerprint.digest(fingerprint.take(identity)))

    def tidy(self) -> None:
        """Read the directory again, and finish what a killed process began."""
        self.refresh()
        remove_old_generations(self.directory, self.config.generation)
        if (left := self.config.forgetting) is not None:
            for torn in self.directory.glob(".*.tmp"):
                if re.fullmatch(
                    r"\..+\.\d+\.tmp", torn.name
                ):  # of `write_atomically`, and no program's else
                    torn.unlink(missing_ok=True)
            kept = read(self.directory)
            names = {
                (e["report"]["index"], e["report"]["name"]) for e in kept if e["event"] == "learned"
            }
            for one in left:
                # an extended task has a line of the same name, which may be at the same place
                # already
                is_told = not one.get("extended") or len(names) > len(self.pools.tasks)
                if is_told and (one["index"], one["name"]) in names:
                    kept = without_task(kept, one["index"], one["name"])
            if told := [entry["report"] for entry in kept if entry["event"] == "learned"]:
                max(told, key=lambda report: report["index"])["pool"] = self.pools.history()
            Record(self.directory).replace(kept)
            for place in (self.directory / name for name in DERIVED):
                shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
            write_results(self.directory)
            self._write(forgetting=None)
        self._finish_learning()

    def _finish_learning(self) -> None:
        """Say in `config.json` that the task is learned, once it is saved."""
        begun = self.config.learning
        if begun is not None and self.interrupted is None:
            known = {**self.config.data_sha256, begun["name"]: begun["data_sha256"]}
            self._end_learning(data_sha256=known, num_learned=self.pools.next_number)

    def _end_learning(self, **changes: Any) -> None:
        """Drop what there is of an interrupted task, or the rolling checkpoint of one that is
        saved."""
        Rolling(self.root).clear()
        self._write(learning=None, tasks=self._names, **changes)

    def check_writable(self) -> None:
        """Raises ValueError for a run of an experiment, and where a corrupted memory was opened for
        answering alone."""
        if self.lost is not None:
            raise ValueError(
                f"{str(self.directory)!r} was opened for answering alone (usable); open it without"
                " that"
            )
        if self.is_run:
            raise ValueError(
                f"{str(self.directory)!r} is a run of an experiment, whose tasks are fixed;"
                " continue with what it learned in a separate memory: cheem learn NEW_FOLDER DATA"
                f" --begin-with {self.directory}"
            )

    def _check_names(self, hashes: Mapping[str, str]) -> None:
        for name, sha in hashes.items():
            if self.config.keeps_base and name.casefold() == BASE:
                raise ValueError(
                    f"{name!r} is the pretraining data in this memory; give this one another name"
                    " (--name)"
                )
            for known in self._names:
                is_same = (known, self.config.data_sha256.get(known)) == (name, sha)
                if composed(known).casefold() == composed(name).casefold() and not is_same:
                    raise ValueError(
                        f"a task {known!r} was learned from other images already, and what is"
                        " learned never changes; give this one another name (--name), or drop the"
                        f" old one first: cheem forget {self.directory} {known}"
                    )

    def _check_unfinished(self, hashes: Mapping[str, str], discard: bool) -> None:
        left = self.interrupted
        new = [one for one in hashes.items() if one[1] not in self._learned_from(one[0])]
        if left is None or not (new or discard) or new[:1] == [(left["name"], left["data_sha256"])]:
            return
        if not discard:
            raise ValueError(
                f"task {left['name']!r} is interrupted; give its command again to finish it first,"
                " or give it up with --discard-unfinished"
            )
        self._end_learning()

    def _learned_from(self, name: str) -> list[str]:
        """What a task was learned from and extended by."""
        more = [one["data_sha256"] for one in self.config.extended.get(name, [])]
        return [self.config.data_sha256[name], *more] if name in self.config.data_sha256 else []

    def _write(self, **changes: Any) -> None:
        self.config = dataclasses.replace(self.config, **changes)
        write_config(self.directory, self.config)

    def _spelled(self, names: Sequence[str]) -> list[str]:
        """Task names as the memory spells them."""
        learning = self.interrupted
        return spelled_as(
            names, self._names if learning is None else (*self._names, learning["name"])
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(task.name for task in self.pools.tasks)


KEPT = {
    "unchanged": (
        "no change was better on the new validation images without a loss on the old classes, so"
        " network and head stay as they are"
    ),
    "head": "the network stays as it is and has a new head",
    "network": "the fine-tuned network is used",
}
"""What became of an extended task, by the kind of the candidate that was kept."""


def _effect(extension: Mapping[str, Any]) -> str:
    """What an extension did to old and new classes."""
    found, num = extension["candidates"], extension["validation_images"]
    before = found.get("unchanged")
    after = found[extension["kept"]]

    def told(key: str) -> str:
        values = [one[key] for one in (before, after) if one is not None]
        return " before, ".join(f"{100 * value:.1f} %" for value in values) + (
            " now" if before else ""
        )

    text = (
        f"{KEPT[extension['kept']]}; {told('new')} on {num:,} new validation"
        f" image{'' if num == 1 else 's'}"
    )
    if after["old"] is not None:
        text += f", {told('old')} on samples from the kept means and covariance of the old classes"
    return text
