"""A memory that can change: learn one more task, forget one, all or nothing."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.continual import RunContext, evaluate, learn_task
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.interruption import Stop, stop_requests
from cheem_jax.data.task import Task, repeats
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.memory.answering import Answering, TaskInfo
from cheem_jax.memory.data import Data, tasks_of
from cheem_jax.memory.directory import BASE, remove_old_generations, write_config, write_generation
from cheem_jax.memory.forgetting import Forgotten, forget
from cheem_jax.memory.record import without_task
from cheem_jax.report.status import Status
from cheem_jax.run import fingerprint
from cheem_jax.run.directory import hold
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import NAME as RECORD
from cheem_jax.run.record import Record, read, to_json
from cheem_jax.run.results import results_of
from cheem_jax.run.rolling import Rolling


class OpenMemory(Answering):
    """A memory directory, or a finished run of CHEEM to answer with.

    Nothing is read again until `refresh`, `learn` or `forget`; one process writes at a time, any number may predict.
    """

    def learn(
        self,
        data: Data,
        *,
        name: str | None = None,
        progress: Progress | None = None,
        save_every: float | None = None,
        discard_unfinished: bool = False,
    ) -> tuple[TaskInfo, ...]:
        """Learn one task or several, each from its own images alone; what is learned already from equal data stays.

        Killed at any moment and called again with the same data it goes on; Ctrl-C raises Stopped after the running
        step. Raises ValueError for a task whose name is taken, where another one is unfinished (unless
        `discard_unfinished`), and for a run of an experiment, whose tasks are fixed.
        """
        self.check_writable()
        progress = progress or Progress()
        tasks = tasks_of(data, self.config.image_size, progress)
        if name is not None:
            if len(tasks) != 1:
                raise ValueError(f"one name, {name!r}, for {len(tasks)} tasks: {[task.name for task in tasks]}")
            tasks = (dataclasses.replace(tasks[0], name=name),)
        if repeated := repeats(task.name.casefold() for task in tasks):
            raise ValueError(f"task names differ in upper and lower case alone, or not at all: {repeated}")
        size = self.config.image_size
        for task in tasks:
            if (shape := task.train.images.shape[1:]) != (size, size, 3):
                raise ValueError(f"task {task.name!r} contains images of shape {shape}, expected {(size, size, 3)}")
        self._learner.check(tasks)
        with self._writing() as record, stop_requests() as stop, Status(self.directory) as status:
            hashes = {task.name: data_hash(task) for task in tasks}
            self._check_names(hashes)
            self._check_unfinished(hashes, discard_unfinished)
            run = RunContext(self.directory, record, progress, stop, save_every, status, self._root.parent)
            for task in tasks:
                if task.name in self.config.data_sha256:
                    progress.say(f"{task.name}: learned already")
                else:
                    self._learn(task, hashes[task.name], run)
                self._measure(tasks, run)
            self._learner.features.clear()
        names = [task.name for task in tasks]
        return tuple(task for task in self.tasks if task.name in names)

    def _learn(self, task: Task, data_sha256: str, run: RunContext) -> None:
        number, index = self.pools.next_number, len(self.pools.tasks)
        begun = {"name": task.name, "number": number, "data_sha256": data_sha256}
        self._write(learning=begun, tasks=(*self._names, task.name))
        run.record.keep(lambda entry: entry["event"] != "learned" or entry["report"]["index"] < index)
        run.progress.say(
            f"task {index + 1}: {task.name}, {len(task.classes)} classes, {len(task.train.labels):,} training images"
        )
        learn_task(task, number, self._learner, run, index=index)
        known = {**self.config.data_sha256, task.name: data_sha256}
        self._write(learning=None, data_sha256=known, tasks=self._names, num_learned=self.pools.next_number)
        self._drop_predictors()

    def _measure(self, tasks: Sequence[Task], run: RunContext) -> None:
        """Fill the record up: one measurement after each task, of those whose images are at hand."""
        measured = {entry["index"] for entry in read(self.directory) if entry["event"] == "evaluated"}
        at_hand = {task.name: task for task in tasks}
        for index in sorted(set(range(len(self.pools.tasks))) - measured):
            learned = self.pools.tasks[: index + 1]
            # after a later task was learned, what an earlier moment would have given can no longer be measured
            is_now = index == len(self.pools.tasks) - 1
            evaluate([at_hand.get(task.name) if is_now else None for task in learned], (self._learner,), run, 0.0)
        self._write_results()

    def forget(self, name: str, *, erase: bool = False) -> Forgotten:
        """Drop a task and what only it uses; every other task answers as before.

        See `forgetting`. Raises ValueError for an unknown name, and while a task is half learned.
        """
        self.check_writable()
        with self._writing():
            read(self.directory)  # a damaged record is told before anything changes
            learning = self.config.learning
            if learning is not None and learning["name"] == name and name not in self._names:
                self._give_up()
                return Forgotten(self.pools, learning["number"], (), (), (), ())
            if learning is not None and self._unfinished():
                raise ValueError(
                    f"task {learning['name']!r} is interrupted; finish it, or forget it too, before another one is "
                    "forgotten"
                )
            before = self.pools
            done = forget(before, name, erase=erase)
            index = [task.name for task in before.tasks].index(name)
            write_generation(self.directory, self.config, before, done.memory, self.config.method.ops.rank)
            self._write(
                generation=self.config.generation + 1,
                tasks=tuple(task.name for task in done.memory.tasks),
                data_sha256={task: sha for task, sha in self.config.data_sha256.items() if task != name},
                learning=None,
                forgetting={"index": index, "name": name},
            )
            self.refresh()
            self._tidy()
        return done

    # ---- keeping it whole

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Record]:
        """The directory for this process alone, read anew, and with what a killed process left taken away."""
        with hold(self.directory):
            self.refresh()
            if self._tidy():
                self.refresh()
            yield Record.open(self.directory, fingerprint.digest(self._conditions()))

    def _tidy(self) -> bool:
        """Finish what a killed process began; returns whether there was anything."""
        before = self.config
        remove_old_generations(self.directory, self.config.generation)
        if (left := self.config.forgetting) is not None:
            for torn in self.directory.glob(".*.tmp"):
                torn.unlink(missing_ok=True)
            entries = read(self.directory)
            names = {(e["report"]["index"], e["report"]["name"]) for e in entries if e["event"] == "learned"}
            if (left["index"], left["name"]) in names:
                kept = without_task(entries, left["index"], left["name"])
                if told := [entry["report"] for entry in kept if entry["event"] == "learned"]:
                    max(told, key=lambda report: report["index"])["pool"] = self.pools.history()
                Record(self.directory / RECORD).replace(kept)
            for derived in DERIVED:
                _discard(self.directory / derived)
            self._write_results()
            self._write(forgetting=None)
        begun = self.config.learning
        if begun is not None and begun["number"] < self.pools.next_number:  # saved, but not yet told
            known = {**self.config.data_sha256, begun["name"]: begun["data_sha256"]}
            self._rolling().clear()
            self._write(learning=None, data_sha256=known, tasks=self._names, num_learned=self.pools.next_number)
        return self.config != before

    def check_writable(self) -> None:
        """Raises ValueError for a run of an experiment, and where a damaged memory was opened as far as it is whole."""
        if self.lost is not None:
            raise ValueError(f"{str(self.directory)!r} was opened for answering alone (usable); open it without that")
        if self.is_run:
            raise ValueError(
                f"{str(self.directory)!r} is a run of an experiment, whose tasks are fixed; continue with what it "
                f"learned in a separate memory: cheem learn NEW_FOLDER DATA --begin-with {self.directory}"
            )

    def _check_names(self, hashes: Mapping[str, str]) -> None:
        taken = {task.name.casefold(): task.name for task in self.pools.tasks}
        if self.config.keeps_base:
            taken[BASE] = BASE
        for name, sha in hashes.items():
            known = taken.get(name.casefold())
            if known is None or (known == name and self.config.data_sha256.get(name) == sha):
                continue
            if known == BASE and self.config.keeps_base:
                raise ValueError(
                    f"{name!r} is the pretraining data in this memory; give this one another name (--name)"
                )
            raise ValueError(
                f"a task {known!r} was learned from other images already, and what is learned never changes; give this "
                f"one another name (--name), or drop the old one first: cheem forget {self.directory} {known}"
            )

    def _check_unfinished(self, hashes: Mapping[str, str], discard: bool) -> None:
        left = self.config.learning
        first = next((name for name in hashes if name not in self.config.data_sha256), None)
        if left is None or not self._unfinished() or (first is None and not discard):
            return
        if first is not None and (first, hashes[first]) == (left["name"], left["data_sha256"]):
            return
        if not discard:
            raise ValueError(
                f"task {left['name']!r} is interrupted; give its command again to finish it first, or give it up with "
                "--discard-unfinished"
            )
        self._give_up()

    def _give_up(self) -> None:
        """Drop what there is of a half learned task."""
        self._rolling().clear()
        self._write(learning=None, tasks=self._names)

    def _rolling(self) -> Rolling:
        return Rolling(self._root, Stop())

    def _unfinished(self) -> bool:
        return any(self._root.glob("running-*"))

    def _write(self, **changes: Any) -> None:
        self.config = dataclasses.replace(self.config, **changes)
        write_config(self.directory, self.config)

    def _write_results(self) -> None:
        """`results.json`, as far as there is something to tell."""
        entries = read(self.directory)
        if any(entry["event"] == "evaluated" for entry in entries):
            write_atomically(self.directory / "results.json", json.dumps(to_json(results_of(entries)), indent=1) + "\n")
        else:
            (self.directory / "results.json").unlink(missing_ok=True)

    def _conditions(self) -> dict[str, Any]:
        identity = {
            "backbone": self.config.backbone,
            "image_size": self.config.image_size,
            "seed": self.config.seed,
            "cheem": dataclasses.asdict(self.config.method),
            "engine": dataclasses.asdict(self.engine),
            "weights_sha256": self.config.weights_sha256,
            "data_sha256": self.config.data_sha256,
        }
        return fingerprint.take(identity)


def _discard(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


DERIVED = (".status.json", "answers.npz", "report.html", "report.md", "figures", "tensorboard")
"""What commands write into a memory's folder from its record, and can write again; names and classes are in it."""
