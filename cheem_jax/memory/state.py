"""The state of a memory directory: its settings and tasks, which change together atomically."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.vit import ViT
from cheem_jax.cheem.saved_memory import open_memory, open_usable
from cheem_jax.core.architecture import Choice
from cheem_jax.core.pool import Head, InternalMemory, Pool, TaskMemory
from cheem_jax.data.task import Task, check_names, fingerprint, spelled_as
from cheem_jax.memory.contents import (
    BASE,
    MemoryConfig,
    checkpoint_folder,
    parse_config,
    read_config,
    unfinished,
)
from cheem_jax.memory.directory import (
    remove_forgotten,
    remove_old_generations,
    write_config,
    write_generation,
)
from cheem_jax.run.checkpoint import load_task
from cheem_jax.run.record import read
from cheem_jax.run.rolling import Rolling


@dataclasses.dataclass(frozen=True)
class MemoryState:
    """Settings and tasks of a memory or a run. Methods that write return the new state."""

    directory: Path
    config: MemoryConfig
    internal: InternalMemory
    """Experts per block, and the learned tasks."""

    @property
    def root(self) -> Path:
        """Folder of the checkpoints, one directory per task."""
        return checkpoint_folder(self.directory, self.config.generation)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the learned tasks in learning order."""
        return tuple(task.name for task in self.internal.tasks)

    @property
    def interrupted(self) -> dict[str, Any] | None:
        """Name, number and data fingerprint of the task whose learning was interrupted; None if
        no task was interrupted."""
        return unfinished(self.config, self.internal.next_number)

    def spelled(self, names: Sequence[str]) -> list[str]:
        """Return task names in the Unicode form in which the memory stores them. Names that the
        memory does not contain stay the same."""
        interrupted = () if self.interrupted is None else (self.interrupted["name"],)
        return spelled_as(names, (*self.names, *interrupted))

    def index(self, name: str) -> int:
        """Return the index of a task. Raises ValueError for an unknown name."""
        where = f"memory {str(self.directory)!r}"
        return self.names.index(check_names([name], self.names, where)[0])

    def learned_from(self, name: str) -> list[str]:
        """Return the fingerprints of the data from which a task was learned and extended."""
        if name not in self.config.data_sha256:
            return []
        extensions = self.config.extended.get(name, [])
        return [self.config.data_sha256[name], *(one["data_sha256"] for one in extensions)]

    def check_unchanged(self) -> None:
        """Raise ValueError if another process has changed the tasks since this state was read."""
        config = parse_config(read_config(self.directory), self.directory)
        if (config.generation, config.num_learned) != (
            self.config.generation,
            self.config.num_learned,
        ):
            raise ValueError(
                f"memory {str(self.directory)!r} has changed since it was read; open it again"
            )

    def is_learned(self, name: str, task: Task) -> bool:
        """Return whether the task `name` was learned or extended from the data of `task`, divided
        into the same splits. If so, the test images of `task` were held out from learning.

        Data without splits that extended a task do not count: an extension cuts no test
        images from its data, so `task` has other splits.
        """
        return fingerprint(dataclasses.replace(task, name=name)) in self.learned_from(name)

    def write(self, **changes: Any) -> "MemoryState":
        """Change settings in `config.json`, and return the new state."""
        config = dataclasses.replace(self.config, **changes)
        write_config(self.directory, config)
        return dataclasses.replace(self, config=config)

    def end_learning(self, **changes: Any) -> "MemoryState":
        """Remove the rolling checkpoint of a task that was saved or is discarded; return a state in
        which no task is being learned. `changes` are other settings to change."""
        Rolling(self.root).clear()
        return self.write(learning=None, tasks=self.names, **changes)

    def replace(
        self, after: InternalMemory, forgetting: Sequence[Mapping[str, Any]], **changes: Any
    ) -> "MemoryState":
        """Write `after` as the next generation, make it valid, and remove the old generation.

        `forgetting` contains the tasks to remove from the record, by descending index.
        """
        write_generation(self.directory, self.config, self.internal, after)
        self.write(
            generation=self.config.generation + 1,
            tasks=tuple(task.name for task in after.tasks),
            num_learned=after.next_number,
            learning=None,
            forgetting=tuple(forgetting),
            **changes,
        )
        return read_state(self.directory, tuple(block[:1] for block in after.pool)).tidy()

    def tidy(self) -> "MemoryState":
        """Finish the changes of a killed process."""
        state = self
        remove_old_generations(state.directory, state.config.generation)
        if state.config.forgetting is not None:
            remove_forgotten(state.directory, state.config, state.internal)
            state = state.write(forgetting=None)
        learning = state.config.learning
        if learning is not None and state.interrupted is None:
            data = {**state.config.data_sha256, learning["name"]: learning["data_sha256"]}
            number = state.internal.next_number
            state = state.end_learning(data_sha256=data, num_learned=number)
        return state


def read_state(directory: Path, pool: Pool) -> MemoryState:
    """Read the settings and the tasks of the valid generation; `pool` contains only the backbone's
    experts.

    Raises ValueError with the name of every corrupted or missing task.
    """
    while True:
        config = parse_config(read_config(directory), directory)
        root = checkpoint_folder(directory, config.generation)
        internal = None
        try:
            internal = open_memory(root, pool)
        except (ValueError, OSError):
            if read_config(directory)["generation"] == config.generation:
                raise
        # If the number of the generation differs, another process has replaced the generation in
        # the meantime; read again.
        if internal is not None and read_config(directory)["generation"] == config.generation:
            break
    missing = sorted(config.data_sha256.keys() - {task.name for task in internal.tasks})
    if missing or internal.next_number < config.num_learned:
        raise ValueError(
            f"{root} lacks learned tasks"
            f" ({', '.join(missing) or 'or the placeholders of forgotten tasks'}); restore the"
            " folder from a copy"
        )
    return MemoryState(directory, config, internal)


def read_run(state: MemoryState, pool: Pool, root: Path) -> MemoryState:
    """Read the tasks of a run again; `root` is the folder with their checkpoints, and `pool`
    contains only the backbone's experts.

    Raises ValueError with the name of every corrupted task, and with the name of the first missing
    one.
    """
    num = _num_evaluated(state.directory)
    internal = open_memory(root, pool)
    if missing := state.config.tasks[len(internal.tasks) : num]:
        raise ValueError(
            f"{root} lacks learned tasks, the first is {missing[0]!r}; restore the folder from a"
            " copy, or open it with usable (--usable)"
        )
    return dataclasses.replace(state, internal=internal)


def _num_evaluated(directory: Path) -> int:
    """Return the number of evaluated tasks of a run.

    A run evaluates a task after it has saved the task, so a run in progress has at least this
    number of checkpoints if the number is read before the checkpoints.
    """
    return sum(entry["event"] == "evaluated" for entry in read(directory))


def read_usable(
    state: MemoryState, pool: Pool, run_root: Path | None = None
) -> tuple[MemoryState, dict[str, str]]:
    """Read a corrupted memory again, with its usable tasks only; `pool` contains only the
    backbone's experts.

    `run_root` is the folder with the checkpoints of a run; None stands for a memory. The second
    value contains the reason for each lost task, keyed by the folder of the task; see
    `open_usable`.
    """
    if run_root is not None:
        internal, lost = open_usable(run_root, pool, _num_evaluated(state.directory))
        return dataclasses.replace(state, internal=internal), lost
    while True:
        config = parse_config(read_config(state.directory), state.directory)
        root = checkpoint_folder(state.directory, config.generation)
        internal, lost = open_usable(root, pool, config.num_learned)
        # another process can have replaced the generation in the meantime
        if read_config(state.directory)["generation"] == config.generation:
            return MemoryState(state.directory, config, internal), lost


def read_base(directory: Path, vit: ViT) -> TaskMemory:
    """Read the pretraining data as a target of predictions. The network of this target is the
    frozen backbone `vit`."""
    arrays, meta = load_task(directory / BASE)
    assert vit.head is not None and vit.head.bias is not None
    depth = vit.config.depth
    return TaskMemory(
        BASE,
        tuple(meta["classes"]),
        (Choice("reuse", 0),) * depth,
        (0,) * depth,
        Head(vit.head.kernel[...], vit.head.bias[...]),
        np.zeros((depth, vit.config.width), np.float32),
        arrays["centroids"],
        arrays["distances"],
        arrays.get("moments", {}),
    )
