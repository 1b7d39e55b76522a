"""Base class of the methods with a growing pool of experts: CHEEM, and LoRA-CL as the simplest
case. The class predicts, computes costs, and saves and opens the memory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from cheem_jax.backbone.flops import (
    backbone_flops,
    backbone_params,
    branch_flops,
    executed_flops,
    network_flops,
)
from cheem_jax.cheem.elimination import Eliminated
from cheem_jax.cheem.evolution import Scored, Searched
from cheem_jax.cheem.saved_memory import open_memory, save_memory_task, with_task
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import SupernetFit
from cheem_jax.core.architecture import Architecture, Choice, to_strings
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
    centroid_distances,
    fit_statistics,
    num_stored,
)
from cheem_jax.data.task import Task
from cheem_jax.engine.executor import Dense, Executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import SKIP, Inferred
from cheem_jax.engine.passes import classes_and_features
from cheem_jax.run.method import (
    FrozenFeatures,
    base_network,
    check_task_ids,
)
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session
from cheem_jax.run.training import FitState, restored


@dataclasses.dataclass
class Underway:
    """Progress of learning a task: the content of the task's rolling checkpoint.

    Each phase resumes from the fields that it wrote. A checkpoint at the end of a phase contains
    nothing of the next phase.
    """

    similarity: np.ndarray | None = None
    searched: Searched | None = None
    eliminated: Eliminated | None = None
    fits: dict[str, FitState] = dataclasses.field(default_factory=dict)
    """Progress of each training stage, keyed by `supernet` or `finetune`."""
    learned: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Saved arrays of the training stages that have not resumed yet, keyed by the name of the
    stage."""
    training: tuple[str, SupernetFit] | None = None
    """Name and current fit of the latest training stage; checkpoints include the arrays of the
    fit."""

    @classmethod
    def resume(cls, saved: Saved | None) -> "Underway":
        """Restore the progress that an earlier process saved, or start without progress if `saved`
        is None."""
        if saved is None:
            return cls()
        arrays, meta = saved
        searched = None
        if "searched" in arrays:
            searched = Searched(meta["generations"], Scored(**arrays["searched"]))
        eliminated = Eliminated(**arrays["eliminated"]) if "eliminated" in arrays else None
        fits = {}
        for name, fit in meta["fits"].items():
            fits[name] = restored(fit, arrays.get(f"{name}_running", ()))
        learned = {name: arrays[name] for name in fits if name in arrays}
        return cls(arrays.get("similarity"), searched, eliminated, fits, learned)

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped because their loss or gradient was non-finite."""
        return sum(fit.skipped for fit in self.fits.values())

    def fitting(self, name: str, supernet: Supernet) -> SupernetFit:
        """Return the training stage `name`, which starts from its saved state if there is one, and
        from the supernet's initial state otherwise."""
        arrays = self.learned.pop(name, None)
        state = supernet.init() if arrays is None else supernet.from_arrays(arrays)
        fitting = SupernetFit(supernet, state, self.fits.get(name, FitState()))
        self.keep(name, fitting)
        return fitting

    def keep(self, name: str, fitting: SupernetFit) -> None:
        """Replace the state and progress of the training stage `name` by those of `fitting`."""
        self.fits[name] = fitting.progress
        self.training = name, fitting

    def saved(self) -> Saved:
        """Return the content of a rolling checkpoint of the task."""
        arrays: dict[str, Any] = dict(self.learned)
        if self.training is not None:
            name, current = self.training
            arrays[name] = current.supernet.arrays(current.state)
        if self.similarity is not None:
            arrays["similarity"] = self.similarity
        if self.searched is not None:
            arrays["searched"] = self.searched.scored._asdict()
        if self.eliminated is not None:
            arrays["eliminated"] = self.eliminated._asdict()
        fits: dict[str, Any] = {}
        for name, fit in self.fits.items():
            fits[name] = fit.meta()
            if fit.running:
                arrays[f"{name}_running"] = fit.running_losses()
        generations = 0 if self.searched is None else self.searched.generations
        meta = {"generations": generations, "fits": fits}
        return Saved(arrays, meta)


class ExpertMemory:
    """Base class of the continual learners that store experts and heads in a memory, and infer the
    task ID with a router. Methods that are given the task ID (`needs_task_id`) have no router."""

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
        """Return no warnings: the method works with every stream (see `Method.check`)."""
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
        """Add a task and the grown pool to the memory. If the method has a router, also fit the
        router's statistics to the training images of the task."""
        before = self.memory
        place = TaskStatistics(np.zeros((1, 1), np.float32))
        if not self.needs_task_id:
            with session.phase("router") as advance:
                features = self.features(task.train.images, advance)
                place = fit_statistics(features, task.train.labels, self.router, seed=seed)
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
        """The dense experts of the current memory. At most `executor.budget` bytes of merged
        experts are cached."""
        if self._dense.pool is not self.memory.pool:
            self._dense = DenseExperts(self.memory.pool, self.executor.budget, self._dense)
        return self._dense

    @property
    def index(self) -> Router:
        """The router over all learned tasks."""
        self._index = self._index.follow([task.router_statistics for task in self.memory.tasks])
        return self._index

    def costs(self, index: int) -> dict[str, Any]:
        """Compute the costs of the learned task `index`: FLOPs per image and numbers of parameters.
        `flops_method` follows the paper's convention, `flops_explicit` also counts attention
        products, and `flops_executed` counts all executed matrix products."""
        task = self.memory.tasks[index]
        vit = self.executor.config
        placement = self.executor.placement
        experts = [stored.params for stored in self.memory.added(index).values()]
        added = sum(leaf.size for leaf in jax.tree.leaves(experts))
        head = sum(leaf.size for leaf in task.head)
        flops = network_flops(vit, placement, task.architecture, self.rank)
        # FLOPs of the attention products in the attention branches that the network does not skip
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
            "params_stored": added + head + sum(array.size for array in self.stored_arrays(task)),
            "head_params": head,
            "centroid_params": (
                0 if self.needs_task_id else sum(values.size for values in router_arrays(task))
            ),
        }

    def router_numbers(self, task: Task) -> int:
        """Return the maximum number of values that the router stores for a task."""
        return (
            0
            if self.needs_task_id
            else num_stored(self.router, self.features.encoder.width, len(task.classes))
        )

    def stored_arrays(self, task: TaskMemory) -> list[np.ndarray]:
        """Return the arrays that are stored for a task in addition to experts and head."""
        return [*router_arrays(task), task.means, *task.statistics.values()]

    def _executed(self, index: int) -> int:
        """Compute the executed FLOPs of task-ID inference plus the task's network.

        If the router reads the backbone's features, the router and the task's network share the
        blocks before the first block in which the network does not use the base expert, or fewer
        blocks if the router reads earlier features. Shared blocks count once.
        """
        task = self.memory.tasks[index]
        vit = self.executor.config
        begin = None
        identify = 0 if self.needs_task_id else self.features.encoder.executed_flops()
        if not self.needs_task_id and self.features.of(self.executor):
            begin = next((i for i, expert in enumerate(task.experts) if expert != 0), vit.depth)
            begin = min(begin, self.router.until(vit.depth))
        architecture = task.architecture
        if not self.executor.omits_skipped:
            architecture = (Choice("reuse", 0),) * vit.depth
        network = executed_flops(
            vit, self.executor.placement, architecture, len(task.classes), begin=begin
        )
        return identify + network

    def predict(self, images: Images, task_ids: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """Infer the task ID of each image with the router, and predict the class with the network
        of this task (see `Method.predict`)."""
        inferred = task_ids if self.needs_task_id else None
        if task_ids is None:
            if self.needs_task_id:
                raise ValueError(
                    f"{self.name} is an upper bound: give the true task ID of each image"
                )
            task_ids = inferred = self.index.route(self.features(images))
        task_ids = check_task_ids(task_ids, len(self.memory.tasks), len(images))
        classes = np.zeros(len(images), np.int32)
        for index in np.unique(task_ids):
            rows = np.flatnonzero(task_ids == index)
            is_whole = len(rows) == len(images)
            part = images if is_whole else images[rows]
            classes[rows] = self._classes(self.memory.tasks[index], part, shares=is_whole)
        if inferred is None:
            inferred = self.index.route(self.features(images))
        return Inferred(np.asarray(inferred, np.int32), classes)

    def distances(self, images: Images) -> Float[np.ndarray, "N T"]:
        """Compute the L1 distance from the features of each image to the nearest centroid (or class
        mean) of each task. A memory uses the distance to reject images of unknown tasks. Learning a
        task does not change the distances to earlier tasks."""
        centroids = [task.centroids for task in self.memory.tasks]
        return centroid_distances(self.features(images), centroids)

    def _classes(self, task: TaskMemory, images: Images, *, shares: bool) -> Int[np.ndarray, "N"]:
        """Predict the classes of images with a task's network. If `shares` is true and the router
        reads the backbone's final features, the same pass also computes these features for all
        images, and they are cached."""
        networks = [task_network(self.dense, task.experts)]
        shares = shares and not self.needs_task_id and self.features.ends(self.executor)
        if shares and not self.features.has(images):
            networks.append(base_network(self.executor))
        classes, *features = classes_and_features(
            self.executor,
            networks,
            padded(task.head),
            HostImages(self.executor, images),
            num=len(images),
            num_classes=len(task.classes),
            batch_size=self.batch_size,
        )
        if features:
            self.features.store(images, *features)
        return classes

    def save(self, root: Path) -> None:
        """Save the last task and its experts, and replace both in this memory by the content of the
        saved files."""
        directory = save_memory_task(root, self.memory, len(self.memory.tasks) - 1, self.rank)
        self.memory = self._placed(with_task(self._before, directory))

    def open(self, root: Path) -> None:
        """Load the memory from the checkpoints below `root` (see `Method.open`)."""
        self.memory = self._placed(open_memory(root, self.executor.base_pool))

    def _placed(self, memory: InternalMemory) -> InternalMemory:
        """Copy the experts to all devices, so that steps do not transfer experts."""
        layout = self.executor.layout
        if not layout.is_many:
            return memory

        def placed(stored: StoredExpert) -> StoredExpert:
            params = layout.replicate(stored.params)
            return stored if params[0] is stored.params[0] else stored._replace(params=params)

        return dataclasses.replace(
            memory, pool=tuple(tuple(map(placed, block)) for block in memory.pool)
        )


def router_arrays(task: TaskMemory) -> list[np.ndarray]:
    """Return all arrays that the router stores for a task."""
    return [task.centroids, *task.moments.values()]


class TaskNetworks:
    """Networks of learned tasks, built on request.

    Merged experts are cached in `experts`, up to `experts.limit` bytes. All networks share this
    cache.
    """

    def __init__(self, experts: DenseExperts, tasks: Sequence[TaskMemory]):
        self.experts = experts
        self.tasks = tuple(tasks)
        self.hits = self.misses = 0
        """`hits` counts the networks whose experts were all cached. `misses` counts the other
        networks."""
        self.codes = [
            tuple(SKIP if expert is None else expert for expert in task.experts)
            for task in self.tasks
        ]

    def network(self, index: int) -> list[Dense]:
        """Return the network of the task at `index`; experts that are not cached are merged."""
        merged = self.experts.merged
        network = task_network(self.experts, self.tasks[index].experts)
        if self.experts.merged == merged:
            self.hits += 1
        else:
            self.misses += 1
        return network

    def prepare(self) -> None:
        """Compile the functions that merge experts, so that building a network later does not
        compile."""
        self.experts.prepare()

    def counters(self) -> dict[str, int]:
        """Return statistics of the cache: the numbers of hits and misses of networks, the numbers
        of merged and of evicted experts, and the current size and the limit in bytes."""
        return {"hits": self.hits, "misses": self.misses, **self.experts.counters()}


def task_network(
    experts: DenseExperts | Sequence[Sequence[Expert]], used: Sequence[int | None]
) -> list[Dense]:
    """Make the network of a learned task. `used` contains the pool index of the expert in each
    block, or None for Skip.

    The code of each block in the network is the pool index of its expert, so networks that use the
    same experts share computation.
    """
    return [
        Dense(SKIP, None) if expert is None else Dense(expert, experts[block][expert])
        for block, expert in enumerate(used)
    ]
