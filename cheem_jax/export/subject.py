"""What is exported: a frozen backbone, the pool on top of it, and the tasks that may answer."""

import dataclasses
import difflib

from cheem_jax.backbone.vit import ViT
from cheem_jax.core.ops import Placement
from cheem_jax.core.pool import Pool, TaskMemory
from cheem_jax.core.routing.config import RouterConfig


@dataclasses.dataclass(frozen=True)
class Subject:
    """A memory whose router compares the backbone's own features; ValueError for one that cannot answer."""

    vit: ViT
    """In float32, at the size of the images that it will be given."""
    placement: Placement
    pool: Pool
    """Expert 0 of each block is the backbone's own."""
    tasks: tuple[TaskMemory, ...]
    """In the order of the router's centroids; a head has one column per class."""
    router: RouterConfig
    thresholds: tuple[float, ...] | None = None
    """Open set: per task the largest distance to its nearest centroid that is still accepted; None is off."""

    def __post_init__(self) -> None:
        faults, names = [], [task.name for task in self.tasks]
        if not names:
            faults.append("nothing has been learned, so there is no task to export")
        if len(set(names)) < len(names):
            faults.append(f"task names {names} are not distinct")
        if self.vit.config.precision != "float32":
            faults.append(f"the backbone computes in {self.vit.config.precision}; build it with precision='float32'")
        if self.thresholds is not None and len(self.thresholds) != len(names):
            faults.append(f"{len(self.thresholds)} thresholds for {len(names)} tasks; expected one per task")
        faults += [
            f"task {task.name!r} has {len(task.classes)} classes and a head of {task.head.bias.shape[0]} columns; "
            "cut off the head's padding"
            for task in self.tasks
            if task.head.bias.shape[0] != len(task.classes)
        ]
        if faults:
            raise ValueError("; ".join(faults))

    def index(self, task: str) -> int:
        """Position of a task by its name; ValueError with the nearest names for an unknown one."""
        names = [known.name for known in self.tasks]
        if task not in names:
            near = difflib.get_close_matches(task, names, n=3, cutoff=0.4) or names
            raise ValueError(f"unknown task {task!r}; nearest: {', '.join(near)}")
        return names.index(task)
