"""The loop over a stream: learn a task, save it, and evaluate all tasks learned so far."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.flops import backbone_flops, executed_backbone_flops
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.full_finetune import FullFinetune
from cheem_jax.cheem.expert_memory import ExpertMemory
from cheem_jax.core.images import Images
from cheem_jax.core.metrics import open_set_steps
from cheem_jax.core.paths import absolute, shown
from cheem_jax.data.task import Stream, Task
from cheem_jax.engine import hosts
from cheem_jax.engine.compilation import Mark
from cheem_jax.engine.inference import Inferred
from cheem_jax.report.page.assemble import refresh_page
from cheem_jax.report.table import UPPER_BOUNDS
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.run import fingerprint
from cheem_jax.run.checkpoint import load_manifest, saved_tasks
from cheem_jax.run.differences import find_differences, summary
from cheem_jax.run.method import FrozenNetworks, Method
from cheem_jax.run.peak import Peak
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import read
from cheem_jax.run.restoring import restore
from cheem_jax.run.results import accuracies, results_of, write_answers, write_results
from cheem_jax.run.rolling import Rolling
from cheem_jax.run.session import Session, open_session
from cheem_jax.run_config import (
    PreparedRun,
    RouterWeights,
    RunConfig,
    RunInputs,
    prepare_run,
)

ROUTING_COST = 10
"""If task-ID inference costs a task at least this many percentage points of accuracy, a message
reports the wrong task that the router infers most often for its images."""


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
    workshop: dict[Any, FrozenNetworks] | None = None,
    data: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Learn the stream in `directory`, or resume it. Return the content of `results.json`.

    A run that was killed and resumed has the same results as an uninterrupted one. Ctrl-C and
    SIGTERM raise Stopped after the current step. Raises ValueError if the directory contains
    another run or is corrupted.

    Args:
        base_images: images of the pretraining data, uint8 `[N, S, S, 3]`, for the task
            similarity of CHEEM.
        router: weights of a smaller network that infers the task ID instead of the backbone
            (CHEEM-lite).
        save_every: seconds between rolling checkpoints; default: 30, or more if checkpoints would
            take over 2 % of the time.
        command: the command line of this run, for the record.
        workshop: compiled networks, shared by the runs of this process.
        data: source of the images, for the record; reports use it to display images.
        tensorboard: write event files after each task.
    """
    start = Mark.now()
    peak = Peak.begin()
    directory = absolute(directory)
    if tensorboard:
        check_installed()
    if config.measured_on == "validation":
        tasks = (dataclasses.replace(task, test=task.val) for task in stream.tasks)
        stream = Stream(stream.name, tuple(tasks))
    inputs = RunInputs(stream, pretrained, router, config)
    run = prepare_run(inputs, progress, base_images=base_images, workshop=workshop)
    with open_session(directory, run.identity, run.conditions, progress, save_every) as session:
        session.peak = peak
        num_finished = _restore_run(session, run)
        _check_bound(session, run)
        _record_start(session, run, num_finished, start, command=command, data=data)
        for index, task in enumerate(stream.tasks[num_finished:], start=num_finished):
            saving = sum(learn_task(task, index, method, session) for method in run.methods)
            evaluate(stream.tasks[: index + 1], run.methods, session, saving)
            run.networks.forget(task)
            _write_results(session, tensorboard)
        _measure_open_set(stream, run.methods[0], session)
        results = _write_results(session, tensorboard, stream)
        if run.bound is not None:
            _measure_bounds(stream, run.bound, session)
            results = _write_results(session, tensorboard, stream)
        return results


def _restore_run(session: Session, run: PreparedRun) -> int:
    """Restore the methods of a resumed run. Return the number of finished tasks."""
    names = [task.name for task in run.inputs.stream.tasks]
    if not session.is_resumed:
        return 0
    return hosts.in_order(lambda: restore(session, names, run.methods))


def _check_bound(session: Session, run: PreparedRun) -> None:
    """Raise ValueError if the run has a measured upper bound with other settings. They are not in
    `config.json`, because an upper bound can be added to a finished run."""
    settings = run.inputs.config.bound_settings()
    measured = latest = None
    for entry in read(session.directory) if settings is not None else ():
        # an earlier version recorded only whether there is an upper bound
        if entry["event"] in ("run", "continued") and isinstance(entry.get("upper_bound"), dict):
            latest = entry["upper_bound"]
        if entry["event"] == "upper_bound":
            measured = latest
    if measured is not None and (differences := find_differences(measured, settings)):
        raise ValueError(
            f"run directory {str(session.directory)!r} has an upper bound with other settings:"
            f" {summary(differences, 'settings')}. Choose another --run-dir, or use the settings of"
            " that upper bound"
        )


def _record_start(
    session: Session, run: PreparedRun, num_finished: int, start: Mark, **origin: Any
) -> None:
    """Record and print that the run begins, resumes or is complete; `origin` contains the command
    and the source of the data."""
    num_tasks = len(run.inputs.stream.tasks)
    executor = run.networks.executor
    shared = {
        "command": origin["command"],
        "conditions": run.conditions,
        "upper_bound": run.inputs.config.bound_settings(),
        "devices": executor.layout.num,
        "processes": hosts.count(),
    }
    begin = next((entry for entry in read(session.directory) if entry["event"] == "run"), None)
    if begin is None:
        settings = {**run.inputs.settings(), "executor": executor.name, "data": origin["data"]}
        session.record.write("run", **settings, **shared, **start.since())
    elif (
        num_finished < num_tasks
        or (run.bound and _missing_bounds(session, num_tasks))
        or _misses_open_set(run.inputs.stream, run.methods[0], session)
    ):
        session.record.write("continued", **shared, **start.since())
        if changed := fingerprint.apart(begin["conditions"], run.conditions):
            session.say(
                "the conditions have changed since this run started, so numbers may differ:"
                f" {changed}"
            )
    for remark in run.remarks:
        session.say(remark)
    directory = shown(session.directory)
    if num_finished == num_tasks:
        session.say(f"{directory} already contains all {num_tasks} tasks; nothing to learn")
    elif session.is_resumed:
        session.say(f"resuming {directory} with task {num_finished + 1} of {num_tasks}")


def learn_task(task: Task, number: int, method: Method, session: Session) -> float:
    """Learn a task, save it, and reload it from disk, as a restart would. Return the seconds spent
    on checkpoints."""
    root = session.root(method.name)
    start = Mark.now()
    session.check_stop()
    if len(saved_tasks(root)) > number:
        Rolling(root).clear()
        return 0.0  # learned and saved before the run stopped
    session.check_room(method.bytes_needed(task), f"task {task.name!r}")
    session.begin(method.name, task.name, number)
    report = method.learn(task, session)
    report = {
        "index": number,
        "name": task.name,
        "classes": list(task.classes),
        **{f"num_{name}": len(split.labels) for name, split in task.splits.items()},
        **({"skipped_images": list(task.skipped)} if task.skipped else {}),
        **report,
    }
    session.record.write("learned", method=method.name, report=report, **session.since(start))
    saving = time.perf_counter()
    method.save(root)
    session.finish()
    say_learned(report, session)
    return session.saving_seconds + time.perf_counter() - saving


def say_learned(report: Mapping[str, Any], session: Session) -> None:
    """Print the remarks in the report of a learned task, and its architecture."""
    name = report["name"]
    for what in report.get("not_kept", ()):
        session.say(
            f"{what}: they do not fit into the cache (--engine.memory-gb), so every pass computes"
            " them again"
        )
    if num_skipped := report.get("skipped_steps"):
        session.say(f"{name}: {num_skipped} steps skipped because of a non-finite loss or gradient")
    if compared := report.get("frozen_head"):
        network, frozen = (f"{100 * compared[key]:.1f} %" for key in ("network", "frozen"))
        session.say(
            f"{name}: {network} on {compared['validation_images']:,} validation images; the"
            f" frozen backbone with a ridge head: {frozen}"
        )
        if compared["kept"] == "frozen":
            session.say(
                f"{name}: the frozen backbone is better, by more than one standard error, so the"
                " task uses it"
            )
    if "architecture" in report and session.progress is not None:
        session.progress.architecture(name, report["architecture"])


def evaluate(
    learned: Sequence[Task | None], methods: Sequence[Method], session: Session, saving: float
) -> None:
    """Evaluate all tasks in `learned` with every method; `saving` is the number of seconds spent on
    checkpoints of the last task.

    None in `learned` stands for a task without images, whose measurements are null in the record.
    """
    num = len(learned)
    start = Mark.now()
    present = {index: task for index, task in enumerate(learned) if task is not None}
    total = sum(len(task.test.labels) for task in present.values())
    measured: dict[str, Any] = {}
    for method in methods:
        predictions: dict[int, Inferred] = {}
        title = f"{num} task{'s' if num > 1 else ''}, {method.name}"
        with session.phase("evaluate", total, title=title) as advance:
            for index, task in present.items():
                given = np.full(len(task.test.labels), index, np.int32)
                predictions[index] = method.predict(task.test.images, given)
                advance(len(task.test.labels))
                # Stop requests are checked after every task, because `advance` exchanges them with
                # other processes only in some of its calls.
                session.check_stop()
        if not measured:
            hosts.run_on_first(
                lambda answers=predictions: write_answers(session.directory, answers)
            )
        measured[method.name] = accuracies(predictions, present, num)
    contents = {
        name: [load_manifest(place)["content_sha256"] for place in saved_tasks(session.root(name))]
        for name in measured
    }
    session.record.write(
        "evaluated",
        index=num - 1,
        methods=measured,
        checkpoints=contents,
        checkpoint_seconds=saving,
        peak_memory_bytes=session.peak.measure(),
        **start.since(),
    )
    if present:
        _say_accuracy(present, methods[0].name, measured[methods[0].name], session)


def _say_accuracy(
    present: Mapping[int, Task], method: str, measured: Mapping[str, Any], session: Session
) -> None:
    index, task = list(present.items())[-1]
    accuracy = 100 * measured["accuracy"][index]
    given = 100 * measured["local_accuracy"][index]
    average = 100 * np.mean([measured["accuracy"][i] for i in present])
    over = f"; average over {len(present)} tasks {average:.1f} %" if len(present) > 1 else ""
    num = len(task.test.labels)
    # without test images, the test split contains the validation images
    split = "validation" if task.test is task.val else "test"
    session.say(
        f"{task.name}: {accuracy:.1f} % on {num:,} {split} image{'' if num == 1 else 's'}"
        f" ({'' if method in UPPER_BOUNDS else f'{given:.1f} % '}with the task ID given){over}"
    )
    if given - accuracy >= ROUTING_COST:
        shares = np.array(measured["routing"][index])
        shares[index] = 0
        reports = (e["report"] for e in read(session.directory) if e["event"] == "learned")
        names = {report["index"]: report["name"] for report in reports}
        session.say(
            f"{round(num * shares.max())} of {num} test images of {task.name} were routed to"
            f" {names[int(shares.argmax())]}; the two tasks may contain similar images"
        )


def _measure_open_set(stream: Stream, method: Method, session: Session) -> None:
    """Record the open-set metrics after each task except the last. They measure how well an image's
    distance to the nearest learned task separates images of learned tasks from images of later
    tasks."""
    if not _misses_open_set(stream, method, session):
        return
    assert isinstance(method, ExpertMemory), "other methods compute no distances"
    start = Mark.now()
    tests = [task.test.images for task in stream.tasks]
    distances = np.concatenate([method.distances(images) for images in tests])
    tasks = np.repeat(np.arange(len(tests)), [len(images) for images in tests])
    steps = [step._asdict() for step in open_set_steps(distances, tasks)]
    session.record.write("open_set", steps=steps, **start.since())


def _misses_open_set(stream: Stream, method: Method, session: Session) -> bool:
    """Return whether the open-set metrics still have to be measured. Methods without centroids, and
    streams of one task, have no such metrics."""
    return (
        len(stream.tasks) > 1
        and isinstance(method, ExpertMemory)
        and not method.needs_task_id
        and all(entry["event"] != "open_set" for entry in read(session.directory))
    )


def _measure_bounds(stream: Stream, bound: FullFinetune, session: Session) -> None:
    """Fine-tune the whole backbone for each task whose upper bound is not in the record yet."""
    vit = bound.executor.config
    for index in _missing_bounds(session, len(stream.tasks)):
        start = Mark.now()
        task = stream.tasks[index]
        session.check_room(bound.bytes_needed(task), f"the upper bound of task {task.name!r}")
        session.begin(bound.name, task.name, index)
        measured = bound.bound(index, task, session)
        session.record.write(
            "upper_bound",
            index=index,
            name=task.name,
            **measured._asdict(),
            flops_paper=backbone_flops(vit),
            flops_executed=executed_backbone_flops(vit),
            **session.since(start),
        )
        session.finish()
        session.say(
            f"{task.name}: full fine-tuning {100 * measured.test_accuracy:.1f} % (task ID given)"
        )
    Rolling(session.root(bound.name)).clear()


def _missing_bounds(session: Session, num_tasks: int) -> list[int]:
    entries = read(session.directory)
    measured = {entry["index"] for entry in entries if entry["event"] == "upper_bound"}
    return [index for index in range(num_tasks) if index not in measured]


def _write_results(
    session: Session, tensorboard: bool, stream: Stream | None = None
) -> dict[str, Any]:
    """Write `results.json` and event files. With `stream`, also write the report, with test images
    of the stream as examples."""
    if tensorboard:
        hosts.run_on_first(lambda: write_events(session.directory))
    hosts.run_on_first(lambda: write_results(session.directory))
    if stream is not None:
        tests = {task.name: task.test for task in stream.tasks}
        hosts.run_on_first(lambda: refresh_page(session.directory, tests))
    return results_of(read(session.directory))
