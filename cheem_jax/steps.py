"""What a run does with one task: learn and save it, and measure all so far from what was saved."""

import functools
import io
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax import hosts, metrics
from cheem_jax.atomic import write_atomically
from cheem_jax.checkpoint import load_manifest, saved_tasks
from cheem_jax.data.task import Task
from cheem_jax.execution.compilation import Compilations, compilations
from cheem_jax.interruption import Stop
from cheem_jax.methods.method import Answers, Method
from cheem_jax.report.progress import Progress
from cheem_jax.report.record import Record
from cheem_jax.report.status import Status
from cheem_jax.report.table import TOLD
from cheem_jax.rolling import Rolling, RunningTask
from cheem_jax.run_directory import check_space


class Mark(NamedTuple):
    """A moment, to count seconds and compilations from."""

    seconds: float
    compiled: Compilations

    @classmethod
    def now(cls) -> "Mark":
        return cls(time.perf_counter(), compilations())

    def since(self) -> dict[str, Any]:
        """What the record keeps of the time since then."""
        compiled = compilations().since(self.compiled)
        return {"seconds": time.perf_counter() - self.seconds, "compile": compiled._asdict()}


class Run(NamedTuple):
    """What the steps of one run share."""

    directory: Path
    record: Record
    progress: Progress
    stop: Stop
    save_every: float | None
    status: Status
    checkpoints: Path | None = None
    """The folder of all methods' checkpoints; default: the run's own."""

    def root(self, method: str) -> Path:
        """Where a method's checkpoints lie."""
        return (self.checkpoints or self.directory / "checkpoints") / method

    def learning(self, method: str, task: Task, index: int) -> RunningTask:
        """One task while a method learns it."""
        rolling = Rolling(self.root(method), self.stop, every=self.save_every)
        phase = functools.partial(_phase, self.progress, self.status, task.name)
        running = RunningTask(index, rolling, phase, self.progress.say)
        if running.saved is not None:
            self.progress.say(f"{task.name}: going on in the middle")
        return running


def _phase(progress: Progress, status: Status, task: str, phase: str, total: int):
    return status.phase(phase, task, total, progress.phase(phase, task=task, total=total))


def learn_task(task: Task, number: int, method: Method, run: Run, *, index: int | None = None) -> float:
    """Learn and save one task; from then on everything comes from disk, as after a restart.

    `index` is its place among the tasks that are there, its number unless some were forgotten. Returns the seconds that
    checkpoints took.
    """
    root, start = run.root(method.name), Mark.now()
    if hosts.agree_to_stop(run.stop):
        raise run.stop.stopped("everything learned is kept")
    if len(saved_tasks(root)) > number:
        Rolling(root, run.stop).clear()
        return 0.0  # learned and saved before the run stopped
    needed = method.bytes_needed(task) + SPARE_BYTES
    hosts.first_does(lambda: check_space(run.directory, needed, f"task {task.name!r}"))
    running = run.learning(method.name, task, number)
    report = method.learn(task, running)
    known = {"index": number if index is None else index, "name": task.name, "classes": list(task.classes)}
    known |= {f"num_{name}": len(split.labels) for name, split in task.splits.items()}
    run.record.write("learned", method=method.name, report={**known, **report}, **start.since())
    saving = time.perf_counter()
    method.save(root)
    running.rolling.clear()
    for name in report.get("not_kept", ()):
        run.progress.say(f"{name}: no room for keeping them (--engine.memory-gb), so they are computed in every epoch")
    if num_skipped := report.get("skipped_steps"):
        run.progress.say(f"{task.name}: {num_skipped} steps left out, whose loss or gradient was not finite")
    if "architecture" in report:
        run.progress.architecture(task.name, report["architecture"])
    return running.rolling.seconds + time.perf_counter() - saving


SPARE_BYTES = 16 * 2**20
"""Room for what a task leaves beside its arrays: record, results, figures."""


def evaluate(learned: Sequence[Task | None], methods: tuple[Method, ...], run: Run, saving: float) -> None:
    """Measure every task so far with every method; `saving` are the seconds that the last one's checkpoints took.

    None stands for a task whose images are not at hand: what is measured of it is null in the record.
    """
    measured, answered, start, num = {}, {}, Mark.now(), len(learned)
    present = [(index, task) for index, task in enumerate(learned) if task is not None]
    for method in methods:
        rows: dict[int, dict[str, Any]] = {}
        none = np.zeros(0, np.int64)
        total = sum(len(task.test.labels) for _, task in present)
        with _phase(
            run.progress, run.status, f"{num} task{'s' if num > 1 else ''}, {method.name}", "evaluate", total
        ) as advance:
            for index, task in present:
                answers = method.answers(index, task)
                rows[index] = _measure(answers, index, task)
                if method is methods[0]:
                    answered |= {f"{name}_{index}": found for name, found in answers._asdict().items()}
                advance(len(task.test.labels), "")
                if hosts.agree_to_stop(run.stop):
                    raise run.stop.stopped("everything learned is kept, and measured again")
        measured[method.name] = {
            "accuracy": [rows[index]["accuracy"] if index in rows else None for index in range(num)],
            "local_accuracy": [rows[index]["local_accuracy"] if index in rows else None for index in range(num)],
            "routing": metrics.routing_confusion(
                np.concatenate([none, *(np.full(len(task.test.labels), index) for index, task in present)]),
                np.concatenate([none, *(rows[index]["chosen"] for index, _ in present)]),
                num,
            ),
        }
    hosts.first_does(lambda: _write_answers(run.directory, answered))
    saved = {method.name: saved_tasks(run.root(method.name)) for method in methods}
    contents = {name: [load_manifest(place)["content_sha256"] for place in places] for name, places in saved.items()}
    run.record.write(
        "evaluated", index=num - 1, methods=measured, checkpoints=contents, checkpoint_seconds=saving,
        peak_memory_bytes=peak_memory_bytes(), **start.since(),
    )  # fmt: skip
    if not present:
        return
    last = measured[methods[0].name]
    index, task = present[-1]
    given = "true task given"
    if methods[0].name not in TOLD:
        given = f"{100 * last['local_accuracy'][index]:.1f} % with the task given"
    average = float(np.mean([last["accuracy"][index] for index, _ in present]))
    told = f"; average over {len(present)} tasks {100 * average:.1f} %" if len(present) > 1 else ""
    run.progress.say(f"{task.name}: {100 * last['accuracy'][index]:.1f} % ({given}){told}")


def _measure(answers: Answers, index: int, task: Task) -> dict[str, Any]:
    labels = task.test.labels
    right = (answers.chosen_task == index) & (answers.chosen_class == labels)
    return {
        "accuracy": float(right.mean()),
        "local_accuracy": float((answers.given_task == labels).mean()),
        "chosen": answers.chosen_task,
    }


def _write_answers(directory: Path, answered: Mapping[str, np.ndarray]) -> None:
    """`answers.npz`: what the run's own method answers to every test image of every task so far, by task index."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: found.astype(np.int32) for name, found in answered.items()})  # pyright: ignore[reportArgumentType]
    write_atomically(directory / "answers.npz", buffer.getvalue())


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
