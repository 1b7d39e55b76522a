"""Learn, extend and forget tasks in a memory directory, and record missing evaluations."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cheem_jax.cheem.config import auto
from cheem_jax.cheem.saved_memory import save_memory_task, with_task
from cheem_jax.continual import evaluate, say_learned
from cheem_jax.data.files import composed
from cheem_jax.data.task import Task, find_copies, repeats
from cheem_jax.data.task import fingerprint as fingerprint_data
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.compilation import Mark, add_costs
from cheem_jax.memory.contents import BASE, MemoryConfig
from cheem_jax.memory.data import Data, read_tasks
from cheem_jax.memory.directory import remove_interrupted
from cheem_jax.memory.extending import absent_classes, label_among
from cheem_jax.memory.forgetting import Forgotten, forget
from cheem_jax.memory.learning import LearnerSetup, extend, learn
from cheem_jax.memory.state import MemoryState
from cheem_jax.run import fingerprint
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record, read
from cheem_jax.run.results import write_results
from cheem_jax.run.session import Session


def read_new_tasks(
    state: MemoryState, data: Data, name: str | None, extend: str | None, progress: Progress
) -> tuple[Task, ...]:
    """Read the tasks to learn. If `name` or `extend` is set, it replaces the name of the only task
    in `data`.

    A name that the memory contains in another Unicode form is replaced by the memory's form. Raises
    ValueError if the tasks do not fit the memory.
    """
    size = state.config.image_size
    purpose = "learn" if extend is None else "extend"
    tasks = read_tasks(data, size, progress, upright=state.config.upright, purpose=purpose)
    if extend is not None and name is not None:
        raise ValueError(
            f"the images extend the task {extend!r}, so they cannot get the name {name!r}; omit"
            " name or extend"
        )
    names = [task.name for task in tasks]
    if (given := name if extend is None else extend) is not None:
        if len(tasks) != 1:
            raise ValueError(
                f"the name {given!r} is for one task, but the data contain {len(tasks)}: {names};"
                " give the data of one task"
            )
        names = [given]
    names = state.spelled(names)
    if repeated := repeats(spelling.casefold() for spelling in names):
        raise ValueError(
            f"task names are repeated, or differ only in upper and lower case: {repeated}; rename"
            " the tasks"
        )
    for task in tasks:
        if (shape := task.train.images.shape[1:]) != (size, size, 3):
            raise ValueError(
                f"task {task.name!r} contains images of shape {shape}, expected {(size, size, 3)}"
            )
    return tuple(
        dataclasses.replace(task, name=spelling)
        for task, spelling in zip(tasks, names, strict=True)
    )


def conditions(config: MemoryConfig, engine: EngineConfig) -> dict[str, Any]:
    """Return the fingerprint of all conditions that determine the learned tasks, such as settings,
    data and device. The record stores the digest of the fingerprint."""
    names = ("backbone", "image_size", "seed", "weights_sha256", "data_sha256")
    return fingerprint.take(
        {
            **{name: getattr(config, name) for name in names},
            "cheem": dataclasses.asdict(config.method),
            "engine": dataclasses.asdict(engine),
        }
    )


def learn_tasks(
    state: MemoryState,
    tasks: Sequence[Task],
    extend: str | None,
    setup: LearnerSetup,
    session: Session,
    *,
    discard: bool,
) -> Iterator[MemoryState]:
    """Learn all tasks that the memory has not learned yet; yield the state after each task.

    `extend` is the name of a learned task, which is extended by the images of the only task in
    `tasks`. If `discard` is set, an interrupted task is removed, unless it is the first new task.
    Raises the errors of `check_new` and `resolve_interrupted`.
    """
    session.checkpoints = state.root.parent
    hashes = {task.name: fingerprint_data(task) for task in tasks}
    if extend is None:
        check_new(state, hashes)
    else:
        index = state.index(extend)
        learned = state.internal.tasks[index]
        tasks = [label_among(learned.classes, tasks[0])]
        absent_classes(tasks[0], learned)  # raises before anything changes
    if discard and state.interrupted is None:
        session.say("no interrupted task to discard")
    state = resolve_interrupted(state, hashes, discard)
    for task in tasks:
        for other in find_copies(task, state.config.data_sha256):
            session.say(
                f"warning: {task.name} has the same images as {other}; the router cannot tell them"
                " apart, so accuracy will be low without the task ID"
            )
    for task in tasks:
        sha256 = hashes[task.name]
        if sha256 in state.learned_from(task.name):
            session.say(f"{task.name}: learned already")
        else:
            state = learn_task(state, task, extend is not None, sha256, setup, session)
        # The task is saved, so the caller gets the state even if the measurement is interrupted.
        yield state
        measure(state, tasks, setup, session)
    setup.features.clear()


def check_new(state: MemoryState, hashes: Mapping[str, str]) -> None:
    """Raise ValueError if the memory already uses the name of a new task for other data; `hashes`
    contains the fingerprint of each new task, keyed by its name."""
    for name, sha256 in hashes.items():
        if state.config.keeps_base and name.casefold() == BASE:
            raise ValueError(
                f"{name!r} is the name of the pretraining data in this memory; choose another name"
                " (--name)"
            )
        for other in state.names:
            is_same = (other, state.config.data_sha256.get(other)) == (name, sha256)
            if composed(other).casefold() == composed(name).casefold() and not is_same:
                raise ValueError(
                    f"task {other!r} was already learned from other images; choose another name"
                    " (--name), add the images to the task (--extend), or forget the task first:"
                    f" cheem forget {state.directory} {other}"
                )


def resolve_interrupted(
    state: MemoryState, hashes: Mapping[str, str], discard: bool
) -> MemoryState:
    """Return a state in which the new tasks can be learned. New tasks are the tasks in `hashes`
    (fingerprints of data, keyed by task name) that the memory has not learned from these data.

    Without an interrupted task, the state does not change. If the interrupted task is the first new
    task, it stays in the state and resumes. Any other interrupted task is removed if `discard` is
    set. Raises ValueError for such an interrupted task if `discard` is not set and there are new
    tasks.
    """
    interrupted = state.interrupted
    new = [
        (name, sha256) for name, sha256 in hashes.items() if sha256 not in state.learned_from(name)
    ]
    if interrupted is None or not (new or discard):
        return state
    if new[:1] == [(interrupted["name"], interrupted["data_sha256"])]:
        return state
    if not discard:
        raise ValueError(
            f"task {interrupted['name']!r} is interrupted; repeat its command to finish it first,"
            " or discard it with --discard-unfinished"
        )
    return state.end_learning()


def learn_task(
    state: MemoryState,
    task: Task,
    is_extension: bool,
    data_sha256: str,
    setup: LearnerSetup,
    session: Session,
) -> MemoryState:
    """Learn a task and save it; return the new state. An extension replaces the learned task of the
    same name."""
    before = state.internal
    index, number = len(before.tasks), before.next_number
    if state.config.preset == "auto":
        # an interrupted task resumes with the settings with which it began
        is_resumed = state.interrupted is not None
        method = state.config.method
        method = method if is_resumed else auto(method, len(task.train.labels))
        setup = setup._replace(config=method)
        if not (is_extension or is_resumed):
            session.say(
                f"{task.name}: auto chose {method.finetune.epochs} epochs at the learning rate"
                f" {method.finetune.learning_rate:g}, with augmented images"
            )
    learned = {
        entry["report"]["index"]: entry
        for entry in read(state.directory)
        if entry["event"] == "learned"
    }
    if is_extension and state.index(task.name) not in learned:
        raise ValueError(
            f"the record of {str(state.directory)!r} has no entry of task {task.name!r}, so it"
            " cannot be extended; restore the record from a copy"
        )
    learner = setup.learner(before)
    # a refusal must not leave an interrupted task behind
    session.check_stop()
    needed = (
        learner.bytes_to_extend(task, state.index(task.name))
        if is_extension
        else learner.bytes_needed(task)
    )
    session.check_room(needed, f"task {task.name!r}")
    state = state.write(
        learning={"name": task.name, "number": number, "data_sha256": data_sha256},
        tasks=tuple(dict.fromkeys((*state.names, task.name))),
        method=setup.config,
    )
    session.record.keep(
        lambda entry: entry["event"] != "learned" or entry["report"]["index"] < index
    )
    start = Mark.now()
    session.begin(learner.name, task.name, number)
    if not is_extension:
        after, report = learn(before, task, setup, session)
        session.record.write("learned", method=learner.name, report=report, **session.since(start))
        saved = save_memory_task(state.root, after, index, learner.rank)
        session.finish()
        say_learned(report, session)
        return dataclasses.replace(state, internal=with_task(before, saved)).tidy()
    old = state.index(task.name)
    after, report = extend(before, old, task, setup, session, learned[old]["report"])
    # this entry replaces the earlier one
    costs = add_costs(learned[old], session.since(start))
    session.record.write("learned", method=learner.name, report=report, **costs)
    history = [
        *state.config.extended.get(task.name, []),
        {**report["extended"][-1], "data_sha256": data_sha256},
    ]
    state = state.replace(
        after,
        [{"index": old, "name": task.name, "extended": True}],
        replaced=(*state.config.replaced, before.numbers[old]),
        extended={**state.config.extended, task.name: history},
    )
    session.checkpoints = state.root.parent
    return state


def measure(
    state: MemoryState, tasks: Sequence[Task], setup: LearnerSetup, session: Session
) -> None:
    """Add missing evaluations to the record. A complete record has one evaluation per learned task.
    `tasks` contain the test images."""
    evaluated = {entry["index"] for entry in read(state.directory) if entry["event"] == "evaluated"}
    # The data of an extension can lack test images; validation images are used instead.
    available = {
        task.name: task if len(task.test.labels) else dataclasses.replace(task, test=task.val)
        for task in tasks
    }
    learner = setup.learner(state.internal)
    last = len(state.names) - 1
    for index in sorted(set(range(last + 1)) - evaluated):
        # The memory already contains all tasks, so accuracies after fewer tasks cannot be measured
        # anymore. None stands for a task without images.
        learned = [
            available.get(name) if index == last else None for name in state.names[: index + 1]
        ]
        evaluate(learned, (learner,), session, 0.0)
    write_results(state.directory)


def forget_tasks(
    state: MemoryState, names: Sequence[str], *, erase: bool
) -> tuple[MemoryState, Forgotten]:
    """Forget all named tasks, or none of them if a name is unknown. `names` can contain the
    interrupted task.

    Raises ValueError for an unknown name, and if an interrupted task is not in `names`.
    """
    read(state.directory)  # raises for a corrupted record before anything changes
    names = state.spelled(names)
    saved = names
    if (interrupted := state.interrupted) is not None:
        if interrupted["name"] not in names:
            raise ValueError(
                f"task {interrupted['name']!r} is interrupted; finish it before you forget another"
                " task, or forget both"
            )
        # a task that is being extended is also a learned task
        saved = [name for name in names if name != interrupted["name"] or name in state.names]
    result = Forgotten(state.internal)
    if saved or not names:
        result = forget(state.internal, *saved, erase=erase)
    if interrupted is not None:  # its line is in the record if saving its checkpoint failed
        num_learned = len(state.names)
        Record(state.directory).keep(
            lambda entry: entry["event"] != "learned" or entry["report"]["index"] < num_learned
        )
    if not saved:
        if interrupted is not None:
            remove_interrupted(state.directory, state.root)
            state = state.end_learning()
        return state, result
    data, extended = (
        {name: value for name, value in values.items() if name not in saved}
        for values in (state.config.data_sha256, state.config.extended)
    )
    indices = sorted(map(state.names.index, saved), reverse=True)
    tasks = [{"index": index, "name": state.names[index]} for index in indices]
    state = state.replace(result.memory, tasks, data_sha256=data, extended=extended)
    return state, result
