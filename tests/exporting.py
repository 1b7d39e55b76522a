"""A small memory whose tasks use every op, and images that lead to each of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import small

from cheem_jax.backbone.vit import ViT
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Expert, LowRank, Op, Reuse, Skip
from cheem_jax.core.pool import Head, StoredExpert, TaskMemory, base_pool
from cheem_jax.core.routing import Reads, RouterConfig, fit_statistics, normalise
from cheem_jax.core.settings import Placement
from cheem_jax.engine.stages import Stages
from cheem_jax.export import Subject
from cheem_jax.run.method import Backbone

VIT = small.backbone()
PICTURES = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8) // np.array(
    [1, 2, 4, 8, 1], np.uint8
).reshape(-1, 1, 1, 1)
"""One image for each task, and one more."""
FEATURES = np.asarray(jax.jit(lambda images: VIT(images))(PICTURES))
NUM_CLASSES = {"plain": 3, "grown": 4, "chained": 2, "early": 5}


@functools.cache
def subject(
    placement: Placement = "mlp_down", thresholds: tuple[float, ...] | None = None
) -> Subject:
    """Four tasks: the plain backbone; a new expert and an adapted one; an adapted adapted one
    and a skipped block; a network that leaves the backbone at once. Image i is at a centroid of
    task i."""
    rng = np.random.default_rng(5)
    pool = [list(block) for block in base_pool(VIT.experts(placement))]

    def normal(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)

    def pair(block):
        rows, width = pool[block][0].params.weight.shape
        return LowRank(normal(rows, 2), normal(2, width))

    pool[1].append(
        StoredExpert(Expert(normal(*pool[1][0].params.weight.shape), normal(16)), None, 1)
    )
    pool[2] += [StoredExpert(pair(2), 0, 1), StoredExpert(pair(2), 1, 2)]
    pool[3].append(StoredExpert(pair(3), 0, 3))
    architectures = [
        (["reuse:0", "reuse:0", "reuse:0", "reuse:0"], (0, 0, 0, 0)),
        (["reuse:0", "new", "adapt:0", "reuse:0"], (0, 1, 1, 0)),
        (["reuse:0", "reuse:0", "adapt:1", "skip"], (0, 0, 2, None)),
        (["skip", "reuse:1", "reuse:0", "adapt:0"], (None, 1, 0, 1)),
    ]
    features = normalise(FEATURES)
    tasks = []
    for index, (name, num) in enumerate(NUM_CLASSES.items()):
        strings, experts = architectures[index]
        head = Head(normal(16, num), normal(num))
        # one to three centroids; the others are far from every feature
        centroids = np.concatenate(
            [features[index : index + 1], np.full((index % 3, 16), 9.0, np.float32)]
        )
        classes = tuple(f"{name} {i}" for i in range(num))
        task = TaskMemory(
            name,
            classes,
            from_strings(strings),
            experts,
            head,
            np.zeros((4, 16), np.float32),
            centroids,
        )
        tasks.append(task)
    return Subject(
        VIT, placement, tuple(map(tuple, pool)), tuple(tasks), RouterConfig(), thresholds
    )


@functools.cache
def encoder(placement: Placement, features: Reads) -> Backbone:
    """The part of the backbone that a router reads."""
    return Backbone(Stages(VIT, placement), RouterConfig(features=features))


def routed(
    placement: Placement, router: RouterConfig, thresholds: tuple[float, ...] | None = None
) -> Subject:
    """Return the same tasks with another router, each fitted to noisy copies of its image."""
    rng = np.random.default_rng(6)
    memory = subject(placement)
    tasks = []
    for picture, task in zip(PICTURES, memory.tasks, strict=False):
        noisy = np.clip(picture + rng.normal(0, 12, (12, 8, 8, 3)), 0, 255).astype(np.uint8)
        features = encoder(placement, router.features).features(noisy, batch_size=12)
        place = fit_statistics(features, np.arange(12, dtype=np.int32) % 2, router, seed=0)
        tasks.append(dataclasses.replace(task, centroids=place.centroids, moments=place.moments))
    return dataclasses.replace(memory, tasks=tuple(tasks), router=router, thresholds=thresholds)


@functools.cache
def logits(placement: Placement, index: int) -> np.ndarray:
    """Return a task's logits of all images, computed by the plain network."""
    return plain_logits(subject(placement), index, PICTURES)


def plain_logits(memory: Subject, index: int, images: np.ndarray) -> np.ndarray:
    """Return the logits of any memory and images, computed by the plain network."""
    task = memory.tasks[index]
    ops = list[Op]()
    for pool, expert in zip(memory.pool, task.experts, strict=True):
        ops.append(Skip() if expert is None else Reuse(_merged(pool, expert)))
    run = _compiled(memory.vit, memory.placement)
    return np.asarray(run(ops, images)) @ np.asarray(task.head.weight) + np.asarray(task.head.bias)


@functools.cache
def _compiled(vit: ViT, placement: Placement):
    return jax.jit(lambda ops, images: vit(images, ops, placement=placement))


def _merged(pool, expert: int) -> Expert:
    """Return the weight of a chain of low-rank pairs, starting at its root."""
    params, parent = pool[expert].params, pool[expert].parent
    if parent is None:
        return params
    below = _merged(pool, parent)
    return Expert(
        jnp.asarray(below.weight + np.asarray(params.down) @ np.asarray(params.up)), below.bias
    )
