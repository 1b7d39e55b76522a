"""The function in an exported file, written in JAX: the network of one task, or a memory with its
router."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from cheem_jax.backbone.vit import ViT, mean_patch
from cheem_jax.core.ops import Adapt, LowRank, Ops, Reuse, Skip
from cheem_jax.core.pool import FAR, Head, Pool, TaskMemory, dense_expert
from cheem_jax.core.routing import Router, RouterConfig
from cheem_jax.core.settings import Placement

ImageFunction = Callable[[UInt8[Array, "B S S 3"]], dict[str, Array]]
"""Function from uint8 images `[B, S, S, 3]` to output arrays, keyed by output name."""
Distances = Callable[[Float[Array, "B E"]], Float[Array, "B T"]]
FileFunction = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Function that runs an exported file; it maps uint8 images `[B, S, S, 3]` to output arrays, keyed
by output name."""
PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms on which a StableHLO file can run."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """The memory to export. Raises ValueError if the backbone's precision is not float32."""

    vit: ViT
    """Backbone in float32, with the image size of the exported file."""
    placement: Placement
    pool: Pool
    """Experts of each block; expert 0 is the pretrained expert."""
    tasks: tuple[TaskMemory, ...]
    """Tasks in the router's order; a head has one column per class."""
    router: RouterConfig
    thresholds: tuple[float, ...] | None = None
    """Thresholds for open-set rejection: for each task, the maximum L1 distance to the nearest
    centroid of the task. With None, no image is rejected."""

    def __post_init__(self) -> None:
        if (precision := self.vit.config.precision) != "float32":
            raise ValueError(
                f"the backbone computes in {precision}; open the memory with float32 (EngineConfig)"
            )


class Artefact(NamedTuple):
    """The content of a file, the function that runs it, and notes for the user."""

    content: bytes
    run: FileFunction
    notes: tuple[str, ...] = ()


def dense_ops(subject: Subject, index: int) -> Ops:
    """Return the ops of a task with all low-rank pairs merged into dense experts. With these ops,
    the network needs no more FLOPs than the backbone."""
    blocks = zip(subject.pool, subject.tasks[index].experts, strict=True)
    return [
        Skip() if expert is None else Reuse(dense_expert(block, expert)) for block, expert in blocks
    ]


def stored_ops(subject: Subject) -> list[Ops]:
    """Return the ops of all tasks. Low-rank pairs are not merged into experts, and tasks that use
    the same expert share its arrays.

    An adapted expert is stored as a full expert and one low-rank pair, so a file is not larger than
    the memory.
    """

    @functools.cache
    def stored(block: int, index: int) -> Reuse | Adapt:
        """Return the op of an expert. If parents of the expert are low-rank pairs as well, all
        pairs are concatenated into one pair. The rank of this pair is the sum of the ranks of all
        pairs."""
        pool = subject.pool[block]
        pairs = []
        root = index
        while (parent := pool[root].parent) is not None:
            pairs.append(pool[root].params)
            root = parent
        if root == index:
            return Reuse(
                dense_expert(pool, root)
                if root
                else subject.vit.blocks[block].expert(subject.placement)
            )
        down = np.concatenate([np.asarray(pair.down) for pair in pairs], axis=1)
        up = np.concatenate([np.asarray(pair.up) for pair in pairs], axis=0)
        return Adapt(stored(block, root).expert, LowRank(jnp.asarray(down), jnp.asarray(up)))

    return [
        [
            Skip() if expert is None else stored(block, expert)
            for block, expert in enumerate(task.experts)
        ]
        for task in subject.tasks
    ]


def task_function(subject: Subject, index: int) -> ImageFunction:
    """Return the function from images to the logits of one task's network."""
    ops = dense_ops(subject, index)
    head = subject.tasks[index].head
    return lambda images: {
        "logits": subject.vit(images, ops, placement=subject.placement) @ head.weight + head.bias
    }


def memory_function(subject: Subject) -> ImageFunction:
    """Return the function from images to the inferred task, its logits, and the distances to all
    tasks.

    Each task network shares the router's pass through the backbone up to the first block that
    differs from the backbone. The remaining blocks run per image and only for the inferred task, so
    the FLOPs per image depend neither on the batch size nor on the number of tasks.
    """
    vit = subject.vit
    placement = subject.placement
    depth = subject.vit.config.depth
    networks = stored_ops(subject)
    heads = [_widened(subject, task.head) for task in subject.tasks]
    until = subject.router.until(depth)
    begins = [
        next((i for i, e in enumerate(task.experts[:until]) if e != 0), until)
        for task in subject.tasks
    ]
    distances = distances_of(subject)
    to_own = to_centroids(subject)
    thresholds = None if subject.thresholds is None else np.asarray(subject.thresholds, np.float32)
    num_classes = max(len(task.classes) for task in subject.tasks)

    def rest(index, x):
        """Compute the logits of a task's network from the tokens of its first block that differs
        from the backbone."""
        for i in range(begins[index], depth):
            x, _ = vit.blocks[i].run(
                networks[index][i], x, placement=placement, outputs=vit.outputs(i)
            )
        return (vit.features(x) @ heads[index].weight + heads[index].bias)[0]

    def program(images):
        features, reached = router_pass(subject, images)
        distance = distances(features)
        task = jnp.argmin(distance, axis=1).astype(jnp.int32)
        if thresholds is not None:
            is_nearest = task[:, None] == jnp.arange(len(thresholds))
            task = jnp.where(((to_own(features) <= thresholds) & is_nearest).any(axis=1), task, -1)

        def answer(one):
            named, tokens = one
            logits = jnp.full((num_classes,), FAR)
            for index, begin in enumerate(begins):
                logits = jax.lax.cond(
                    named == index,
                    lambda logits, x, index=index: rest(index, x[None]),
                    lambda logits, x: logits,
                    logits,
                    tokens[begin],
                )
            return logits

        # The loop copies all its inputs, so it gets only the tokens at which a network starts.
        logits = jax.lax.map(answer, (task, {begin: reached[begin] for begin in set(begins)}))
        return {"task": task, "logits": logits, "distance": distance}

    return program


def router_pass(
    subject: Subject, images: UInt8[Array, "B S S 3"] | Float[Array, "B S S 3"]
) -> tuple[Float[Array, "B E"], dict[int, Float[Array, "B N D"]]]:
    """Run the router's pass through the backbone. Return the router's features and the tokens
    before each block.

    uint8 images are normalised; float images must already be normalised.
    """
    vit = subject.vit
    placement = subject.placement
    depth = subject.vit.config.depth
    blocks = subject.router.blocks(depth)
    until = subject.router.until(depth)
    x = vit.embed(images)
    reached = {}
    parts = []
    for i, block in enumerate(vit.blocks[: until + 1]):
        reached[i] = x
        if i in blocks:
            parts.append(mean_patch(block.enter(x, placement=placement), vit.config))
        x, _ = block.run(
            Reuse(block.expert(placement)), x, placement=placement, outputs=vit.outputs(i)
        )
    reached[depth] = x
    parts += [vit.features(x)] if until == depth else []
    # This must be consistent with `routing.join_tokens`: if there is more than one part, each part
    # is scaled to unit length before the concatenation.
    return (
        parts[0] if len(parts) == 1 else jnp.concatenate([_unit(part) for part in parts], axis=1)
    ), reached


def _widened(subject: Subject, head: Head) -> Head:
    """Pad a head to the number of classes of the largest head; the logits of the padding are
    `FAR`."""
    extra = max(len(task.classes) for task in subject.tasks) - head.bias.shape[0]
    weight = np.pad(np.asarray(head.weight), ((0, 0), (0, extra)))
    bias = np.pad(np.asarray(head.bias), (0, extra), constant_values=FAR)
    return Head(jnp.asarray(weight), jnp.asarray(bias))


def num_bytes(subject: Subject, index: int | None) -> int:
    """Return the total number of bytes of the arrays that a file contains: the distinct arrays of
    the backbone and the ops, the heads, and those of a memory's router."""
    networks = stored_ops(subject) if index is None else [dense_ops(subject, index)]
    leaves = jax.tree.leaves((nnx.state(subject.vit), networks))
    shared = sum({id(leaf): leaf.nbytes for leaf in leaves}.values())
    tasks = subject.tasks if index is None else (subject.tasks[index],)
    numbers = len(tasks) * (subject.vit.config.width + 1) * max(len(task.classes) for task in tasks)
    if index is None:
        most, width = max(len(task.centroids) for task in tasks), tasks[0].centroids.shape[1]
        is_whitened = subject.router.kind == "lda"
        if is_whitened:
            numbers += (width + sum(len(task.centroids) for task in tasks)) * width
        if subject.thresholds is not None or not is_whitened:
            numbers += len(tasks) * most * width  # equal arrays are written once
    return shared + 4 * numbers


def distances_of(subject: Subject) -> Distances:
    """Return the function from the router's features to the distances to each task, in float32."""
    router = Router(subject.router, tuple(task.router_statistics for task in subject.tasks))
    if router.whitening is None:
        return to_centroids(subject)
    whitening = router.whitening.astype(np.float32)
    means = np.split(router.rows.astype(np.float32), router.first[1:])

    def distances(features):
        points = _unit(features) @ whitening
        return jnp.sqrt(jnp.stack([_nearest(points, rows) for rows in means], axis=1))

    return distances


def to_centroids(subject: Subject) -> Distances:
    """Return the function from the router's features to the L1 distance to the nearest centroid of
    each task.

    Open-set thresholds apply to these distances for every kind of router.
    """
    most = max(len(task.centroids) for task in subject.tasks)
    # Tasks with fewer centroids repeat their first centroid, which does not change the minimum.
    padded = [
        np.concatenate([task.centroids, np.repeat(task.centroids[:1], most, axis=0)])[:most]
        for task in subject.tasks
    ]
    rows = np.concatenate(padded)

    def distances(features):
        distances = jnp.abs(_unit(features)[:, None] - rows).sum(axis=-1)
        return distances.reshape(-1, len(padded), most).min(axis=2)

    return distances


def _nearest(points: Float[Array, "B E"], rows: Float[np.ndarray, "C E"]) -> Float[Array, "B"]:
    # Squared differences are summed directly, because the expanded form |a|^2 - 2 a b + |b|^2 loses
    # precision by cancellation in float32.
    return ((points[:, None] - rows) ** 2).sum(axis=-1).min(axis=1)


def _unit(features: Float[Array, "B E"]) -> Float[Array, "B E"]:
    norm = jnp.sqrt((features * features).sum(axis=1, keepdims=True))
    return features / jnp.maximum(norm, 1e-12)


def stablehlo(program: ImageFunction, image_size: int) -> Artefact:
    """Make a StableHLO file that contains the weights and accepts any batch size.

    JAX, including later versions, runs the file on CPU, CUDA and TPU:

      content = bytearray(Path("memory.stablehlo").read_bytes())
      outputs = jax.export.deserialize(content).call(images)
    """
    from jax import export  # writing a file requires flatbuffers, an optional package

    (batch,) = export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.uint8)
    # JAX creates the attributes of its settings at run time, so type checkers do not know them
    before = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue]
    # With this setting, the file contains no source paths of this machine.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        # With the default precision, an accelerator would round the operands of products, and its
        # results would differ from those of a CPU.
        with jax.default_matmul_precision("highest"):
            # This is a new function object, because JAX's cache can contain traces of `program`
            # with another precision.
            exported = export.export(jax.jit(lambda images: program(images)), platforms=PLATFORMS)(
                images
            )
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
    content = bytes(exported.serialize())
    call = jax.jit(export.deserialize(bytearray(content)).call)

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in call(images).items()}

    return Artefact(content, run, notes=(f"runs on {', '.join(PLATFORMS)}",))
