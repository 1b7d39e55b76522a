"""What methods share that grow a pool of experts (CHEEM, and LoRA-CL as its simplest case):
progress, answers, cost."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from cheem_jax.backbone.flops import (
    backbone_flops,
    backbone_params,
    branch_flops,
    executed_flops,
    network_flops,
)
from cheem_jax.cheem.evolution import Scored, Searched
from cheem_jax.cheem.saved_memory import open_memory, save_memory_task, with_task
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import SupernetFit
from cheem_jax.core.architecture import Architecture, to_strings
from cheem_jax.core.images import Images
from cheem_jax.core.ops import Expert
from cheem_jax.core.pool import (
    DenseExperts,
    Head,
    InternalMemory,
    Pool,
    StoredExpert,
    TaskMemory,
    padded,
)
from cheem_jax.core.routing import (
    Router,
    RouterConfig,
    TaskStatistics,
    fit_statistics,
    num_stored,
)
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Dense, Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import SKIP, Inferred
from cheem_jax.engine.passes import answers, answers_and_features
from cheem_jax.run.method import (
    FrozenFeatures,
    base_network,
)
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session
from cheem_jax.run.training import FitState, restored


@dataclasses.dataclass
class Underway:
    """How far a method has come with a task: what a rolling checkpoint holds, and what resuming
    begins with.

    Each phase resumes from what it finds here; at the end of one the next has not begun.
    """

    similarity: np.ndarray | None = None
    searched: Searched | None = None
    fits: dict[str, FitState] = dataclasses.field(default_factory=dict)
    """How far each training is: `supernet` and `finetune`."""
    learned: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays of networks that were being trained and have not gone on yet, by the name of the
    training."""
    training: tuple[str, SupernetFit] | None = None
    """Name and current state of the latest training; its arrays are part of a checkpoint."""

    @classmethod
    def begun(cls, saved: Saved | None) -> "Underway":
        """What an earlier process left, or nothing."""
        if saved is None:
            return cls()
        arrays, meta = saved
        searched = None
        if "searched" in arrays:
            searched = Searched(meta["generations"], Scored(**arrays["searched"]))
        fits = {}
        for name, fit in meta["fits"].items():
            fits[name] = restored(fit, arrays.get(f"{name}_running", ()))
        learned = {name: arrays[name] for name in fits if name in arrays}
        return cls(arrays.get("similarity"), searched, fits, learned)

    @property
    def skipped(self) -> int:
        """Steps that reached no parameter because their loss or gradient was non-finite."""
        return sum(fit.skipped for fit in self.fits.values())

    def fitting(self, name: str, supernet: Supernet) -> SupernetFit:
        """The training of this name, from where it was saved or from its start."""
        arrays = self.learned.pop(name, None)
        state = supernet.init() if arrays is None else supernet.from_arrays(arrays)
        fitting = SupernetFit(supernet, state, self.fits.get(name, FitState()))
        self.keep(name, fitting)
        return fitting

    def keep(self, name: str, fitting: SupernetFit) -> None:
        """Replace the state and progress of the training of this name."""
        self.fits[name] = fitting.progress
        self.training = name, fitting

    def saved(self) -> Saved:
        """A rolling checkpoint of the task."""
        arrays: dict[str, Any] = dict(self.learned)
        if self.training is not None:
            name, current = self.training
            arrays[name] = current.supernet.arrays(current.state)
        if self.similarity is not None:
            arrays["similarity"] = self.similarity
        if self.searched is not None:
            arrays["searched"] = self.searched.scored._asdict()
        fits: dict[str, Any] = {}
        for name, fit in self.fits.items():
            fits[name] = fit.meta()
            if fit.running:
                arrays[f"{name}_running"] = fit.running_losses()
        generations = 0 if self.searched is None else self.searched.generations
        meta = {"generations": generations, "fits": fits}
        return Saved(arrays, meta)


class ExpertMemory:
    """A memory of experts behind a router by task centroids; a method that needs the task ID has no
    router."""

    name = "expert_memory"
    needs_task_id = False

    def __init__(
        self,
        executor: Executor,
        features: FrozenFeatures,
        router: RouterConfig,
        *,
        rank: int,
        batch_size: int,
    ):
        self.executor, self.features, self.router = executor, features, router
        self.rank, self.batch_size = rank, batch_size
        self.memory = self._before = InternalMemory(executor.base_pool)
        self._dense = DenseExperts(executor.base_pool, 0)
        self._index = Router(router)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def remember(
        self,
        task: Task,
        *,
        pool: Pool,
        architecture: Architecture,
        experts: tuple[int | None, ...],
        head: Head,
        means: np.ndarray,
        seed: int,
        session: Session,
    ) -> None:
        """Go on with a pool that has grown, and one task more, which the router learns too, where
        there is one."""
        before = self.memory
        place = TaskStatistics(np.zeros((1, 1), np.float32))
        if not self.needs_task_id:
            with session.phase("router"):
                place = fit_statistics(
                    self.features(task.train.images), task.train.labels, self.router, seed=seed
                )
        learned = TaskMemory(
            task.name,
            task.classes,
            architecture,
            experts,
            head,
            means,
            place.centroids,
            moments=place.moments,
        )
        self._before = before
        self.memory = dataclasses.replace(before, pool=pool, tasks=(*before.tasks, learned))

    @property
    def dense(self) -> DenseExperts:
        """The dense experts of the memory as it is now, of which the executor's budget of bytes is
        kept."""
        if self._dense.pool is not self.memory.pool:
            self._dense = DenseExperts(self.memory.pool, self.executor.budget, self._dense)
        return self._dense

    @property
    def index(self) -> Router:
        """What names a task, of all tasks."""
        self._index = self._index.follow([task.router_statistics for task in self.memory.tasks])
        return self._index

    def costs(self, index: int) -> dict[str, Any]:
        """What a learned task costs: FLOPs by both conventions and parameters."""
        task = self.memory.tasks[index]
        vit = self.executor.config
        placement = self.executor.placement
        own = [stored.params for stored in self.memory.added(index).values()]
        added = sum(leaf.size for leaf in jax.tree.leaves(own))
        head = sum(leaf.size for leaf in task.head)
        flops = network_flops(vit, placement, task.architecture, self.rank)
        # what its attention products cost, and a skipped attention branch saves
        skipped = [choice.kind for choice in task.architecture].count("skip")
        saved = [branch_flops(vit, placement, count_attention=count) for count in (True, False)]
        attention = (
            backbone_flops(vit, count_attention=True)
            - backbone_flops(vit)
            - skipped * (saved[0] - saved[1])
        )
        router = (0, 0)
        if not self.needs_task_id:
            router = tuple(
                self.features.encoder.flops(count_attention=count) for count in (False, True)
            )
        return {
            "name": task.name,
            "classes": list(task.classes),
            "architecture": to_strings(task.architecture),
            "experts": list(task.experts),
            "flops": flops,
            "flops_method": flops + router[0],
            "flops_explicit": flops + attention + router[1],
            "flops_executed": self._executed(index),
            "params_added": added,
            "params_added_percent": 100 * added / backbone_params(vit),
            "params_learned": added + head,
            "params_stored": added + head + sum(kept.size for kept in self.kept_beside(task)),
            "head_params": head,
            "centroid_params": sum(values.size for values in kept_by_router(task)),
        }

    def router_numbers(self, task: Task) -> int:
        """Numbers that naming a task keeps of it, at most."""
        return (
            0
            if self.needs_task_id
            else num_stored(self.router, self.features.encoder.width, len(task.classes))
        )

    def kept_beside(self, task: TaskMemory) -> list[np.ndarray]:
        """What a task keeps beside experts and head, and needs."""
        return [*kept_by_router(task), task.means, *task.statistics.values()]

    def _executed(self, index: int) -> int:
        """Task identification and the task's network: resumed where it leaves the backbone, if that
        names the task."""
        task = self.memory.tasks[index]
        vit = self.executor.config
        begin = None
        identify = 0 if self.needs_task_id else self.features.encoder.executed_flops()
        if not self.needs_task_id and self.features.of(self.executor):
            begin = next((i for i, expert in enumerate(task.experts) if expert != 0), vit.depth)
            begin = min(begin, self.router.until(vit.depth))
        own = executed_flops(
            vit, self.executor.placement, task.architecture, len(task.classes), begin=begin
        )
        return identify + own

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """See `Method.predict`."""
        if task_ids is None:
            if self.needs_task_id:
                raise ValueError(
                    f"{self.name} is an upper bound: give the true task ID of each image"
                )
            task_ids = self.index.route(self.features(images))
        classes = np.zeros(len(images), np.int32)
        for index in np.unique(task_ids):
            rows = np.flatnonzero(task_ids == index)
            part = images if len(rows) == len(images) else images[rows]
            classes[rows] = self._classes(self.memory.tasks[index], part)
        tasks = task_ids if self.needs_task_id else self.index.route(self.features(images))
        return Inferred(np.asarray(tasks, np.int32), classes)

    def _classes(self, task: TaskMemory, images: Images) -> Int[np.ndarray, "N"]:
        """Predict classes with a task's network; caches the router's features if they are computed
        in the same pass."""
        network = task_network(self.dense, task.experts)
        head = padded(task.head)
        feed = HostImages(self.executor, images)
        sizes = {
            "num": len(images),
            "num_classes": len(task.classes),
            "batch_size": self.batch_size,
        }
        is_shared = not self.needs_task_id and self.features.ends(self.executor)
        if self.features.has(images) or not is_shared:
            return answers(self.executor, network, head, feed, **sizes)
        base = base_network(self.executor)
        classes, features = answers_and_features(self.executor, base, network, head, feed, **sizes)
        self.features.store(images, features)
        return classes

    def save(self, root: Path) -> None:
        """Save what the last task added, and go on with what is read back."""
        directory = save_memory_task(root, self.memory, len(self.memory.tasks) - 1, self.rank)
        self.memory = self._placed(with_task(self._before, directory))

    def open(self, root: Path) -> None:
        """Replace the memory by the saved one."""
        self.memory = self._placed(open_memory(root, self.executor.base_pool))

    def _placed(self, memory: InternalMemory) -> InternalMemory:
        """The same with its experts on all devices, so that no step has to send them there."""
        layout = self.executor.layout
        if not layout.is_many:
            return memory

        def placed(stored: StoredExpert) -> StoredExpert:
            params = layout.everywhere(stored.params)
            return stored if params[0] is stored.params[0] else stored._replace(params=params)

        return dataclasses.replace(
            memory, pool=tuple(tuple(map(placed, block)) for block in memory.pool)
        )


def kept_by_router(task: TaskMemory) -> list[np.ndarray]:
    """All arrays that name a task."""
    return [task.centroids, *task.moments.values()]


class TaskNetworks:
    """The finished networks of tasks, each put together when it is asked for.

    What is merged for one stays for the others that share it, while the limit of `experts` allows.
    """

    def __init__(self, experts: DenseExperts, tasks: Sequence[TaskMemory]):
        self.experts = experts
        self.tasks = tuple(tasks)
        self.hits = self.misses = 0
        """How often a network was there, and how often something had to be merged for it."""
        self.codes = [
            tuple(SKIP if expert is None else expert for expert in task.experts)
            for task in self.tasks
        ]

    def network(self, index: int) -> list[Dense]:
        """See `Networks`."""
        merged = self.experts.merged
        network = task_network(self.experts, self.tasks[index].experts)
        if self.experts.merged == merged:
            self.hits += 1
        else:
            self.misses += 1
        return network

    def prepare(self) -> None:
        """Compile what putting a network together calls, so that none that comes back compiles."""
        self.experts.prepare()

    def counters(self) -> dict[str, int]:
        """Networks that were there and that were not, experts merged and dropped, and the bytes
        that are kept."""
        return {"hits": self.hits, "misses": self.misses, **self.experts.counters()}


def task_network(
    experts: DenseExperts | Sequence[Sequence[Expert]], used: Sequence[int | None]
) -> list[Dense]:
    """A finished network over dense experts; its codes are pool indices, so networks that share
    experts share work."""
    return [
        Dense(SKIP, None) if expert is None else Dense(expert, experts[block][expert])
        for block, expert in enumerate(used)
    ]
