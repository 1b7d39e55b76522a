"""Answering, cost and storage of methods that grow a pool of experts: CHEEM, and LoRA-CL as its simplest case."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from cheem_jax.architecture import to_strings
from cheem_jax.centroids import RouterConfig, route
from cheem_jax.data.task import Task
from cheem_jax.execution.executor import Dense, Executor
from cheem_jax.execution.feed import HostImages
from cheem_jax.execution.inference import Inference, Inferred, TaskNetwork
from cheem_jax.execution.passes import answers, answers_and_features
from cheem_jax.flops import backbone_flops, backbone_params, branch_flops, executed_flops, network_flops
from cheem_jax.methods.heads import padded
from cheem_jax.methods.method import Answers, FrozenFeatures, base_network, check_given
from cheem_jax.ops import Expert
from cheem_jax.pool import Memory, Pool, TaskMemory, dense_expert
from cheem_jax.saved_memory import open_memory, save_memory_task, with_task


class ExpertMemory:
    """A memory of experts behind a router by task centroids, or, `told` the true task, without one."""

    name = "expert_memory"
    told = False

    def __init__(
        self, executor: Executor, features: FrozenFeatures, router: RouterConfig, *, rank: int, batch_size: int
    ):
        self.executor, self.features, self.router = executor, features, router
        self.rank, self.batch_size = rank, batch_size
        self.memory = self._before = Memory(executor.base_pool)

    def check(self, tasks: Sequence[Task]) -> list[str]:
        """See `Method.check`."""
        return []

    def remember(self, pool: Pool, task: TaskMemory) -> None:
        """Go on with a pool that has grown, and one task more."""
        before = self.memory
        self._before, self.memory = before, dataclasses.replace(before, pool=pool, tasks=(*before.tasks, task))

    def costs(self, index: int) -> dict[str, Any]:
        """What a learned task costs: FLOPs by both conventions and parameters."""
        task, vit, placement = self.memory.tasks[index], self.executor.config, self.executor.placement
        own = [
            stored.params
            for block in self.memory.pool
            for stored in block
            if stored.origin == self.memory.numbers[index]
        ]
        added = sum(leaf.size for leaf in jax.tree.leaves(own))
        head = sum(leaf.size for leaf in task.head)
        flops = network_flops(vit, placement, task.architecture, self.rank)
        # what its attention products cost, and a skipped attention branch saves
        skipped = [choice.kind for choice in task.architecture].count("skip")
        saved = [branch_flops(vit, placement, count_attention=count) for count in (True, False)]
        attention = backbone_flops(vit, count_attention=True) - backbone_flops(vit) - skipped * (saved[0] - saved[1])
        router = [0 if self.told else self.features.encoder.flops(count_attention=count) for count in (False, True)]
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
            "centroid_params": task.centroids.size,
        }

    def kept_beside(self, task: TaskMemory) -> list[np.ndarray]:
        """What a task keeps beside experts and head, and needs."""
        return [task.centroids, task.means]

    def _executed(self, index: int) -> int:
        """Task identification and the task's network: resumed where it leaves the backbone, if that names the task."""
        task, vit, begin = self.memory.tasks[index], self.executor.config, 0
        identify = 0 if self.told else self.features.encoder.executed_flops()
        if not self.told and self.features.of(self.executor):
            begin = next((i for i, expert in enumerate(task.experts) if expert != 0), vit.depth)
        own = executed_flops(vit, self.executor.placement, task.architecture, len(task.classes), begin=begin)
        return identify + own

    def inference(self) -> Inference:
        """All learned tasks behind the router, sharing what they share with the backbone."""
        networks = task_networks(self.memory.pool, self.memory.tasks)
        return Inference(self.executor, base_network(self.executor), networks, batch_size=self.batch_size)

    def predict(self, images: np.ndarray, tasks: Int[np.ndarray, "N"] | None = None) -> Inferred:
        """Task and class of each image uint8 `[N, S, S, 3]`, decided per image.

        With a lighter router its own features name the task and nothing is shared.
        """
        check_given(self.name, len(self.memory.tasks), tasks, told=self.told)
        centroids, config = [task.centroids for task in self.memory.tasks], self.router
        if tasks is None and self.features.of(self.executor):
            feed = HostImages(self.executor, images)
            return self.inference()(feed, len(images), lambda features: route(features, centroids, config))
        if tasks is None:
            tasks = route(self.features.compute(images), centroids, config)
        classes = np.zeros(len(images), np.int32)
        for index in np.unique(tasks):
            rows, task = np.flatnonzero(tasks == index), self.memory.tasks[index]
            classes[rows] = answers(
                self.executor, task_network(self.memory.pool, task.experts), padded(task.head), len(task.classes),
                HostImages(self.executor, images[rows]), len(rows), batch_size=self.batch_size,
            )  # fmt: skip
        return Inferred(np.asarray(tasks, np.int32), classes)

    def answers(self, index: int, task: Task) -> Answers:
        """Answers to a learned task's test images."""
        local = self.predict_given(index, task)
        if self.told:
            return Answers(local, np.full(len(local), index, np.int32), local)
        chosen = route(self.features(task, "test"), [t.centroids for t in self.memory.tasks], self.router)
        return Answers(local, chosen, local)

    def predict_given(self, index: int, task: Task) -> np.ndarray:
        """Classes that task `index`'s network gives the test images, the task being told."""
        learned, images, batch_size = self.memory.tasks[index], task.test.images, self.batch_size
        network, head = task_network(self.memory.pool, learned.experts), padded(learned.head)
        feed, num_classes = HostImages(self.executor, images), len(learned.classes)
        if self.told or self.features.known(task, "test") or not self.features.of(self.executor):
            return answers(self.executor, network, head, num_classes, feed, len(images), batch_size=batch_size)
        base = base_network(self.executor)
        found, features = answers_and_features(
            self.executor, base, network, head, num_classes, feed, len(images), batch_size=batch_size
        )
        self.features.remember(task, "test", features)
        return found

    def save(self, root: Path) -> None:
        """Save what the last task added, and go on with what is read back."""
        directory = save_memory_task(root, self.memory, len(self.memory.tasks) - 1, self.rank)
        self.memory = with_task(self._before, directory)

    def open(self, root: Path) -> None:
        """Replace the memory by the saved one."""
        self.memory = open_memory(root, self.executor.base_pool)


def task_networks(pool: Pool, tasks: Sequence[TaskMemory]) -> list[TaskNetwork]:
    """The finished networks of several tasks."""
    return [TaskNetwork(task_network(pool, task.experts), padded(task.head), len(task.classes)) for task in tasks]


def dense_task_network(experts: Sequence[Sequence[Expert]], used: Sequence[int | None]) -> list[Dense]:
    """A finished network over dense experts; its codes are pool indices, so networks that share experts share work."""
    return [
        Dense(-1, None) if expert is None else Dense(expert, experts[block][expert])
        for block, expert in enumerate(used)
    ]


def task_network(pool: Pool, used: Sequence[int | None]) -> list[Dense]:
    """The same straight from the pool, merging what this network needs."""
    return [
        Dense(-1, None) if expert is None else Dense(expert, dense_expert(pool[block], expert))
        for block, expert in enumerate(used)
    ]
