"""Resume a run: open its checkpoints, compare them with the record, and remove an unfinished
task."""

from collections.abc import Sequence
from typing import Any

from cheem_jax.run.checkpoint import load_manifest, load_meta, saved_tasks
from cheem_jax.run.method import Method
from cheem_jax.run.record import read
from cheem_jax.run.session import Session


def restore(session: Session, tasks: Sequence[str], methods: Sequence[Method]) -> int:
    """Open the checkpoints of all methods, and remove an unfinished task from the record. Return
    the number of evaluated tasks.

    `tasks` contains the names of all tasks of the stream. Raises ValueError if checkpoints are
    corrupted or differ from the record.
    """
    saved = {method.name: saved_tasks(session.root(method.name)) for method in methods}
    errors = []
    for method in methods:
        try:
            method.open(session.root(method.name))
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError(" / ".join(errors))

    entries = read(session.directory)
    evaluated = [entry for entry in entries if entry["event"] == "evaluated"]
    num = len(evaluated)
    learned = set[tuple[str, int]]()

    def belongs(entry: dict[str, Any]) -> bool:
        if entry["event"] != "learned":
            return True
        method, index = place = entry["method"], entry["report"]["index"]
        # Only the task after the evaluated tasks can have been killed before its checkpoint was
        # complete. The checkpoint of an evaluated task was complete, so it has to exist.
        is_unfinished = index == num and index >= len(saved[method])
        if is_unfinished or place in learned:
            return False
        learned.add(place)
        return True

    entries = [entry for entry in entries if belongs(entry)]
    if (indices := [entry["index"] for entry in evaluated]) != list(range(num)):
        raise ValueError(
            f"{session.record.file} lacks a line: it contains measurements after the tasks"
            f" {indices}, expected 0, 1, 2, ...; restore it from a copy, or choose another"
            " --run-dir"
        )
    for method, contents in evaluated[-1]["checkpoints"].items() if evaluated else ():
        for directory, content in zip(saved[method], contents, strict=False):
            if load_manifest(directory)["content_sha256"] != content:
                raise ValueError(
                    f"checkpoint {directory} is complete, but it is not the checkpoint of this run;"
                    " restore the original from a copy"
                )
    names = {
        method: [load_meta(directory)["name"] for directory in directories]
        for method, directories in saved.items()
    }
    is_whole = learned == {
        (name, i) for name, learned_names in names.items() for i in range(len(learned_names))
    }
    if not is_whole or any(
        learned_names != list(tasks[: len(learned_names)])
        or not num <= len(learned_names) <= num + 1
        for learned_names in names.values()
    ):
        raise ValueError(
            f"record and checkpoints of {str(session.directory)!r} differ: the record has {num}"
            f" finished tasks and the learned tasks {sorted(learned)}, the checkpoints contain"
            f" {names}; restore the missing files, or choose another --run-dir"
        )
    session.record.replace(entries)  # only now, because an error above keeps every line
    return num
