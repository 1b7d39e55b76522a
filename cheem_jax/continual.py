"""The loop over a stream: learn a task, save it, measure every task so far from what was saved."""

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.flops import backbone_flops, executed_backbone_flops
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.core.images import Images
from cheem_jax.core.paths import absolute, shown
from cheem_jax.data.task import Stream, Task
from cheem_jax.engine import hosts
from cheem_jax.engine.compilation import Mark
from cheem_jax.report.page.assemble import PAGE, write_page
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.run import fingerprint
from cheem_jax.run.checkpoint import load_manifest, load_meta, saved_tasks
from cheem_jax.run.method import Answers, Method, Networks
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run.results import accuracies, results_of, write_answers, write_results
from cheem_jax.run.rolling import Rolling
from cheem_jax.run.session import Session, open_session
from cheem_jax.run_config import (
    FullFinetune,
    RouterWeights,
    RunConfig,
    base_means_of,
    check_fits,
    check_hosts,
    defaults_of,
    identity_of,
    learners_of,
    networks_of,
    remarks,
    setting_of,
)

ROUTING_COST = 10
"""Percentage points of accuracy that the router loses, from which on the reader is told where its
images went."""


def run_stream(
    stream: Stream,
    pretrained: Pretrained,
    config: RunConfig,
    directory: str | Path,
    progress: Progress,
    *,
    base_images: Images | None = None,
    router: RouterWeights | None = None,
    save_every: float | None = None,
    command: Sequence[str] | None = None,
    workshop: dict[Any, Networks] | None = None,
    data: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Learn the stream in `directory`, or resume where it stopped; returns the content of
    `results.json`.

    Killed at any moment and called again, a run ends as one that was not. Ctrl-C and SIGTERM raise
    Stopped after the running step. Raises ValueError where the directory contains another run, or
    what it needs is corrupted.

    Args:
        base_images: images of the pretraining data, uint8 `[N, S, S, 3]`, for CHEEM's similarity.
        router: a lighter network that infers the task ID instead of the backbone (CHEEM-lite).
        save_every: seconds between rolling checkpoints; default: 30, more where they would take
            over 2 % of the time.
        command: the command line that makes this run again, for the record.
        workshop: keeps compiled networks for other runs of this process.
        data: where the images come from, for the record, so that a report can show some.
        tensorboard: write event files after each task.
    """
    start = Mark.now()
    directory = absolute(directory)
    check_fits(stream, pretrained, router, config)
    if tensorboard:
        check_installed()
    networks = networks_of(
        pretrained, router, config.method, config.engine, workshop=workshop, mesh=config.mesh
    )
    base = base_means_of(
        pretrained, config.method, config.engine.precision, images=base_images, progress=progress
    )
    identity = identity_of(stream, pretrained, config, base=base, router=router)
    conditions = fingerprint.take(identity)
    check_hosts(config, identity, conditions)
    num_tasks = len(stream.tasks)
    methods, bound = learners_of(config, networks, num_tasks, base)
    notes = methods[0].check(stream.tasks)

    fingerprint_id = fingerprint.digest(conditions)
    with open_session(
        directory,
        identity,
        defaults_of(config.method),
        progress,
        fingerprint=fingerprint_id,
        save_every=save_every,
    ) as session:
        record = session.record
        num_finished = (
            hosts.in_order(lambda: restore(directory, stream, methods, record))
            if session.is_resumed
            else 0
        )

        begin = next((entry for entry in read(directory) if entry["event"] == "run"), None)
        shared = {
            "command": command,
            "conditions": conditions,
            "upper_bound": bound is not None,
            "devices": networks.executor.layout.num,
            "processes": hosts.count(),
        }
        if begin is None:
            setting = setting_of(stream, pretrained, config, base=base, router=router)
            record.write(
                "run",
                **setting,
                executor=networks.executor.name,
                data=data,
                **shared,
                **start.since(),
            )
        elif num_finished < num_tasks or (
            bound is not None and _missing_bounds(directory, num_tasks)
        ):
            record.write("continued", **shared, **start.since())
            if changed := fingerprint.apart(begin["conditions"], conditions):
                progress.say(f"begun under other conditions, so numbers may differ: {changed}")

        for remark in remarks(config, networks.executor, notes, base):
            progress.say(remark)
        if num_finished == num_tasks:
            progress.say(
                f"{shown(directory)} contains all {num_tasks} tasks already; nothing to learn"
            )
        elif session.is_resumed:
            progress.say(f"resuming {shown(directory)} with task {num_finished + 1} of {num_tasks}")

        for index, task in enumerate(stream.tasks[num_finished:], start=num_finished):
            saving = sum(learn_task(task, index, method, session) for method in methods)
            evaluate(stream.tasks[: index + 1], methods, session, saving)
            networks.features.forget(task)
            networks.router_features.forget(task)
            _write_results(directory, tensorboard)
        if bound is not None:
            _write_results(directory, tensorboard, stream)
            _measure_bounds(stream, bound, session)
        return _write_results(directory, tensorboard, stream)


def learn_task(
    task: Task, number: int, method: Method, session: Session, *, index: int | None = None
) -> float:
    """Learn and save one task; from then on everything comes from disk, as after a restart.

    `index` is its position among the tasks in memory; default: its number, from which it differs
    once a task was forgotten. Returns the seconds that checkpoints took.
    """
    root = session.root(method.name)
    start = Mark.now()
    session.check_stop()
    if len(saved_tasks(root)) > number:
        Rolling(root).clear()
        return 0.0  # learned and saved before the run stopped
    session.check_room(method.bytes_needed(task), f"task {task.name!r}")
    session.begin(method.name, task.name, number)
    report = method.learn(task, session)
    known = {
        "index": number if index is None else index,
        "name": task.name,
        "classes": list(task.classes),
    }
    known |= {f"num_{name}": len(split.labels) for name, split in task.splits.items()}
    known |= {"skipped_images": list(task.skipped)} if task.skipped else {}
    session.record.write("learned", method=method.name, report={**known, **report}, **start.since())
    saving = time.perf_counter()
    method.save(root)
    session.finish()
    for name in report.get("not_kept", ()):
        session.say(
            f"{name}: no room to keep them (--engine.memory-gb), so every epoch computes them again"
        )
    if num_skipped := report.get("skipped_steps"):
        session.say(
            f"{task.name}: {num_skipped} steps left out because of a non-finite loss or gradient"
        )
    if compared := report.get("frozen_head"):
        learned, frozen = (f"{100 * compared[key]:.1f} %" for key in ("network", "frozen"))
        session.say(
            f"{task.name}: {learned} on {compared['validation_images']:,} validation images; the"
            f" frozen backbone with a ridge head: {frozen}"
        )
        if compared["kept"] == "frozen":
            session.say(
                f"{task.name}: the learned network is not better, so the task uses the frozen"
                " backbone"
            )
    if "architecture" in report and session.progress is not None:
        session.progress.architecture(task.name, report["architecture"])
    return session.saving_seconds + time.perf_counter() - saving


def evaluate(
    learned: Sequence[Task | None], methods: tuple[Method, ...], session: Session, saving: float
) -> None:
    """Measure every task so far with every method; `saving` are the seconds that the last one's
    checkpoints took.

    None means a task without images: what would be measured on it is null in the record.
    """
    num = len(learned)
    start = Mark.now()
    present = [(index, task) for index, task in enumerate(learned) if task is not None]
    total = sum(len(task.test.labels) for _, task in present)
    measured, answered = {}, {}
    for method in methods:
        answers: dict[int, Answers] = {}
        title = f"{num} task{'s' if num > 1 else ''}, {method.name}"
        with session.phase("evaluate", total, title=title) as advance:
            for index, task in present:
                answers[index] = method.answers(index, task)
                advance(len(task.test.labels))
        measured[method.name] = accuracies(answers, dict(present), num)
        if method is methods[0]:
            answered = {
                f"{name}_{i}": array
                for i, found in answers.items()
                for name, array in found._asdict().items()
            }
    hosts.first_does(lambda: write_answers(session.directory, answered))
    saved = {method.name: saved_tasks(session.root(method.name)) for method in methods}
    contents = {
        name: [load_manifest(place)["content_sha256"] for place in places]
        for name, places in saved.items()
    }
    session.record.write(
        "evaluated",
        index=num - 1,
        methods=measured,
        checkpoints=contents,
        checkpoint_seconds=saving,
        peak_memory_bytes=peak_memory_bytes(),
        **start.since(),
    )
    if present:
        _say_accuracy(present, measured[methods[0].name], session)


def _say_accuracy(
    present: Sequence[tuple[int, Task]], measured: Mapping[str, Any], session: Session
) -> None:
    index, task = present[-1]
    accuracy = measured["accuracy"]
    given = 100 * measured["local_accuracy"][index]
    average = 100 * float(np.mean([accuracy[index] for index, _ in present]))
    over = f"; average over {len(present)} tasks {average:.1f} %" if len(present) > 1 else ""
    num = len(task.test.labels)
    # the validation images stand for test images that were not given
    on = (
        f"on {num:,} {'validation' if task.test is task.val else 'test'}"
        f" image{'' if num == 1 else 's'}"
    )
    session.say(
        f"{task.name}: {100 * accuracy[index]:.1f} % {on} ({given:.1f} % with the task ID"
        f" given){over}"
    )
    if given - 100 * accuracy[index] >= ROUTING_COST:
        shares = np.array(measured["routing"][index])
        num = len(task.test.labels)
        shares[index] = 0
        names = {
            e["report"]["index"]: e["report"]["name"]
            for e in read(session.directory)
            if e["event"] == "learned"
        }
        session.say(
            f"{round(num * shares.max())} of {num} test images of {task.name} were taken for "
            f"{names[int(shares.argmax())]}; are these the same kind of images?"
        )


def _measure_bounds(stream: Stream, bound: FullFinetune, session: Session) -> None:
    """Fine-tune the whole backbone for each task whose upper bound is not known yet."""
    for index in _missing_bounds(session.directory, len(stream.tasks)):
        start = Mark.now()
        task = stream.tasks[index]
        session.check_room(bound.bytes_needed(task), f"the upper bound of task {task.name!r}")
        session.begin(bound.name, task.name, index)
        found = bound.bound(index, task, session)
        vit = bound.executor.config
        flops = {"flops_paper": backbone_flops(vit), "flops_executed": executed_backbone_flops(vit)}
        session.record.write(
            "upper_bound", index=index, name=task.name, **found._asdict(), **flops, **start.since()
        )
        session.finish()
        session.say(
            f"{task.name}: full fine-tuning {100 * found.test_accuracy:.1f} % (task ID given)"
        )
    Rolling(session.root(bound.name)).clear()


def _missing_bounds(directory: Path, num_tasks: int) -> list[int]:
    done = {entry["index"] for entry in read(directory) if entry["event"] == "upper_bound"}
    return [index for index in range(num_tasks) if index not in done]


def _write_results(
    directory: Path, tensorboard: bool, stream: Stream | None = None
) -> dict[str, Any]:
    """Write what the record implies, and `report.html` once the whole stream is learned."""
    if tensorboard:
        hosts.first_does(lambda: write_events(directory))
    hosts.first_does(lambda: write_results(directory))
    results = results_of(read(directory))
    if stream is not None:
        tests = {task.name: task.test for task in stream.tasks}
        hosts.first_does(lambda: write_page([directory], directory / PAGE, tests=tests))
    return results


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def restore(directory: Path, stream: Stream, methods: tuple[Method, ...], record: Record) -> int:
    """Open what is saved and drop an unfinished task from the record; returns the number of
    finished tasks.

    Raises ValueError where checkpoints are corrupted, or differ from the record.
    """
    saved = {
        method.name: saved_tasks(directory / "checkpoints" / method.name) for method in methods
    }
    corrupted = []
    for method in methods:
        try:
            method.open(directory / "checkpoints" / method.name)
        except ValueError as error:
            corrupted.append(str(error))
    if corrupted:
        raise ValueError(" / ".join(corrupted))
    recorded: set[tuple[str, int]] = set()

    def belongs(entry: dict[str, Any]) -> bool:
        if entry["event"] != "learned":
            return True
        method = entry["method"]
        index = entry["report"]["index"]
        if index >= len(saved[method]) or (method, index) in recorded:
            return False
        recorded.add((method, index))
        return True

    record.keep(belongs)
    evaluated = [entry for entry in read(directory) if entry["event"] == "evaluated"]
    num_finished = len(evaluated)
    if (measured := [entry["index"] for entry in evaluated]) != list(range(num_finished)):
        raise ValueError(
            f"{record.file} has lost a line: it contains measurements after the tasks {measured},"
            " but expected are all from 0 on in order; restore it from a copy, or choose another"
            " --run-dir"
        )
    for method, contents in evaluated[-1]["checkpoints"].items() if evaluated else ():
        for place, content in zip(saved[method], contents, strict=False):
            if load_manifest(place)["content_sha256"] != content:
                raise ValueError(
                    f"checkpoint {place} is whole, but not the one that this run saved; restore"
                    " that one"
                )
    names = {
        name: [load_meta(d)["name"] for d in directories] for name, directories in saved.items()
    }
    expected = [task.name for task in stream.tasks]
    is_whole = {
        (name, index) for name, found in names.items() for index in range(len(found))
    } == recorded
    if not is_whole or any(
        found != expected[: len(found)] or not num_finished <= len(found) <= num_finished + 1
        for found in names.values()
    ):
        raise ValueError(
            f"record and checkpoints of {str(directory)!r} differ: the record has {num_finished}"
            f" finished tasks and the learned tasks {sorted(recorded)}, the checkpoints contain"
            f" {names}; restore what is missing, or choose another --run-dir"
        )
    return num_finished
