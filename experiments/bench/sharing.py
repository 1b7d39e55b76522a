"""Every way of sharing or caching work, compared with the same executor without it.

    python -m experiments.bench.sharing

Both sides must compute identical bits; features of inference must agree up to rounding. The ceiling
of a ratio is the ratio of the FLOPs, counted with attention products and with only the CLS token in
the last block.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cheem_jax.cheem.config import SearchConfig
from cheem_jax.cheem.evolution import search
from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.cheem.hee import uniform_table
from cheem_jax.cheem.supernet import Supernet, SupernetState
from cheem_jax.cheem.training import (
    SupernetFit,
    architecture_flops,
    dense_network,
    fit,
    frozen_prefix,
    prepare,
    step_of,
    supernet_draws,
    supernet_score,
)
from cheem_jax.cli.arguments import parse
from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.pool import DenseExperts, InternalMemory, pool_sizes
from cheem_jax.core.settings import FitConfig, no_progress
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.task import Task
from cheem_jax.engine.batches import batches
from cheem_jax.engine.executor import Executor, Network
from cheem_jax.engine.feed import Feed, HostImages
from cheem_jax.engine.inference import Inference, bucket_sizes, pieces
from cheem_jax.engine.passes import count_correct, token_means
from cheem_jax.run.method import base_network
from experiments.bench import measure
from experiments.bench.measure import (
    Bench,
    Row,
    cached_tokens,
    medians,
    separate_flops,
    step_flops,
    tree_flops,
)
from experiments.bench.memories import networks_of, sampled_memory, sampled_table

RANK, NUM_CLASSES = 16, 20
SHARED, APART = "shared", "apart"
WHOLE_SEARCH = 1.3
SIMILARITY = 1.5
FINETUNE = 1.35
INFERENCE = 1.25
"""Required speeds relative to separate work."""
NUM_SAME = 6
"""Number of blocks that the networks of the constructed cases share with the base network."""


def main(settings: Bench) -> None:
    """Measure every part and write `sharing.json`."""
    quick = settings.quick
    name, small, large = ("vit_nano", 32, 32) if quick else ("deit_tiny", 96, 224)
    repeats = 1 if quick else 3
    search_row, searched = whole_search(name, small, 26, quick)
    similarity_rows = similarities(name, small, repeats)
    step_row, steps = finetuning(name, large, 2 if quick else 8)
    rows = [search_row, *similarity_rows, step_row, *inferences(name, large, repeats)]
    details = {"search": searched, "fine-tuning": steps}
    measure.save(settings.out, "sharing", rows, quick=quick, details=details)


def shared_row(
    what: str,
    seconds: dict[str, float],
    counted: tuple[int, int],
    goal: float | None,
    note: str = "",
) -> Row:
    """Make a row whose ceiling is the ratio of `counted`, the FLOPs of separate and of shared
    work."""
    ceiling = counted[0] / counted[1]
    return Row(what, seconds, seconds[APART] / seconds[SHARED], goal, ceiling=ceiling, note=note)


# ---- search


def whole_search(
    name: str, image_size: int, batch_size: int, quick: bool
) -> tuple[Row, dict[str, Any]]:
    """Run a search, then score its generations again, as prefix trees and with one network per
    call."""
    vit = measure.backbone(name, image_size)
    executor = measure.stages(vit)
    sizes = {"num_train": 64 if quick else 256, "num_val": batch_size, "num_test": 26}
    task = demo_stream(image_size=vit.config.image_size, **sizes).tasks[0]
    config = SearchConfig(population=6, generations=2, num_parents=2) if quick else SearchConfig()
    memory = sampled_memory(executor, 2)
    (supernet, state), generations = real_search(executor, memory, task, batch_size, config)
    merged: dict = {}
    networks = [
        [dense_network(supernet, state, genome, merged) for genome in genomes]
        for genomes in generations
    ]
    feed = cached_tokens(executor, task.val.images, batch_size=batch_size)

    def score(networks: Sequence[Network]) -> np.ndarray:
        return count_correct(
            executor,
            networks,
            state.head.params,
            feed,
            task.val.labels,
            num_classes=supernet.num_classes,
            batch_size=batch_size,
            advance=no_progress,
        )

    def score_separately(networks: Sequence[Network]) -> np.ndarray:
        return np.concatenate([score([network]) for network in networks])

    # each call scores the next generation, so the sum over all calls is a whole search
    turns = [itertools.cycle(networks) for _ in range(2)]
    times = compare(
        lambda: score(next(turns[0])), lambda: score_separately(next(turns[1])), len(networks)
    )
    total = {name: sum(seconds) for name, seconds in times.items()}
    counted = (
        sum(separate_flops(vit.config, generation) for generation in networks),
        sum(tree_flops(vit.config, generation) for generation in networks),
    )
    what = f"whole search, {sum(map(len, networks))} networks, {name}"
    note = f"{len(task.val.labels)} validation images at {vit.config.image_size} pixels"
    return shared_row(what, total, counted, WHOLE_SEARCH, note), {"samples": times}


def real_search(
    executor: Executor, memory: InternalMemory, task: Task, batch_size: int, config: SearchConfig
) -> tuple[tuple[Supernet, SupernetState], list[np.ndarray]]:
    """Train a supernet for two epochs and run a search; return the supernet and the genomes of
    every generation."""
    rng = np.random.default_rng(2)
    num = len(task.train.labels)
    exploit = sampled_table(rng, memory)
    uniform = uniform_table(pool_sizes(memory.pool))
    training = measure.new_task(executor, len(task.classes), RANK, memory.pool)
    supernet = training.supernet
    order, mode, draw, key = jax.random.split(jax.random.key(3), 4)
    state = fit(
        executor,
        SupernetFit(supernet, training.state),
        cached_tokens(executor, task.train.images, batch_size=32),
        task.train.labels,
        draws=supernet_draws(mode, draw, exploit=exploit, uniform=uniform, epsilon=0.3),
        config=FitConfig(epochs=2, learning_rate=2e-3),
        batch_size=min(32, num),
        order_key=order,
        advance=no_progress,
    ).state
    feed = cached_tokens(executor, task.val.images, batch_size=batch_size)
    score = supernet_score(
        executor, supernet, state, feed, task.val.labels, batch_size=batch_size, advance=no_progress
    )
    generations: list[np.ndarray] = []

    def scored(genomes: np.ndarray) -> np.ndarray:
        generations.append(genomes)
        return score(genomes)

    cost = architecture_flops(executor, supernet)
    num_images = len(task.val.labels)
    search(
        key, scored, cost, exploit=exploit, uniform=uniform, num_images=num_images, config=config
    )
    return (supernet, state), generations


# ---- similarity


def similarities(name: str, image_size: int, repeats: int) -> list[Row]:
    """Measure the similarity pass of ten networks over the same images: networks that share blocks
    with the base network, and sampled networks."""
    vit = measure.backbone(name, image_size)
    executor = measure.stages(vit)
    num = 32
    feed = cached_tokens(executor, measure.random_images(num, vit.config), batch_size=num)
    same = min(NUM_SAME, executor.num_blocks - 1)
    planted = leaving_memory(executor, 9, same)
    sampled = sampled_memory(executor, 9)
    rows = []
    for what, memory, goal in (
        (f"all Reuse of the base in blocks 1-{same}", planted, SIMILARITY),
        ("sampled", sampled, None),
    ):
        networks = networks_of(memory)

        def means(networks: Sequence[Network]) -> np.ndarray:
            return token_means(
                executor, networks, feed, num, batch_size=num, advance=no_progress
            ).means

        times = compare(
            lambda networks=networks: means(networks),
            lambda networks=networks: np.concatenate([means([network]) for network in networks]),
            repeats,
        )
        counted = separate_flops(vit.config, networks), tree_flops(vit.config, networks)
        note = f"{num} images at {image_size} pixels"
        rows.append(
            shared_row(
                f"similarity pass, 10 networks, {what}, {name}", medians(times), counted, goal, note
            )
        )
    return rows


def leaving_memory(executor: Executor, num: int, same: int) -> InternalMemory:
    """Make a memory whose tasks reuse the base network in the first `same` blocks and have separate
    experts in the following blocks."""
    architecture = (Choice("reuse", 0),) * same + (Choice("new"),) * (executor.num_blocks - same)
    return sampled_memory(executor, num, architecture=architecture)


# ---- fine-tuning


def finetuning(name: str, image_size: int, repeats: int) -> tuple[Row, dict[str, Any]]:
    """Measure fine-tuning steps with Adapt in block 7 and Reuse in all others, from cached tokens
    and from images."""
    vit = measure.backbone(name, image_size)
    config = vit.config
    num = 16
    executor = measure.stages(vit)
    same = min(NUM_SAME, executor.num_blocks - 2)
    architecture: Architecture = tuple(
        Choice("adapt" if block == same else "reuse", 0) for block in range(executor.num_blocks)
    )
    images = measure.random_images(num, config)
    labels = np.arange(num, dtype=np.int32) % NUM_CLASSES
    training = {side: measure.new_task(executor, NUM_CLASSES, RANK) for side in (SHARED, APART)}
    supernet = training[SHARED].supernet
    prepare(executor, supernet, num)
    prefix = frozen_prefix(supernet, architecture)
    cached_tokens(executor, images, prefix, batch_size=num)
    start = time.perf_counter()
    feeds: dict[str, Feed] = {
        SHARED: cached_tokens(executor, images, prefix, batch_size=num),
        APART: HostImages(executor, images),
    }
    caching = time.perf_counter() - start
    losses: dict[str, list[float]] = {SHARED: [], APART: []}
    (batch,) = batches(np.arange(num), num)

    def step(side: str) -> None:
        data = step_of(executor, feeds[side], labels, batch)
        losses[side].append(training[side].step(architecture, data))

    times = measure.alternate({SHARED: lambda: step(SHARED), APART: lambda: step(APART)}, repeats)
    if losses[SHARED] != losses[APART]:
        raise ValueError(
            f"losses from cached tokens {losses[SHARED]} are not those from images {losses[APART]}"
        )
    counted = (
        step_flops(config, architecture, RANK),
        step_flops(config, architecture, RANK, begin=same),
    )
    note = f"caching the tokens took {caching:.3g} s for {num} images, once"
    what = (
        f"fine-tuning step, {num} images at {image_size} pixels, learning from block {same + 1} on,"
        f" {name}"
    )
    return shared_row(what, medians(times), counted, FINETUNE, note), {
        "keep_seconds": caching,
        "samples": times,
    }


# ---- inference


def inferences(name: str, image_size: int, repeats: int) -> list[Row]:
    """Measure inference on images of more than one task: each network continues the base network's
    pass, or starts from the images."""
    vit = measure.backbone(name, image_size)
    config = vit.config
    executor = measure.stages(vit)
    num = 8 if image_size <= 32 else 64
    images = measure.random_images(num, config)
    same = min(NUM_SAME, executor.num_blocks - 1)
    planted = leaving_memory(executor, 3, same)
    sampled = sampled_memory(executor, 9)
    rows = []
    for what, memory, goal in (
        (f"3 tasks that leave the base network at block {same + 1}", planted, INFERENCE),
        ("9 sampled tasks", sampled, None),
    ):
        rng = np.random.default_rng(6)
        tasks = rng.integers(0, len(memory.tasks), num)
        networks = TaskNetworks(DenseExperts(memory.pool, 2**34), memory.tasks)
        inference = Inference(executor, base_network(executor), networks, batch_size=num)
        inference.prepare()
        times = compare(
            lambda inference=inference, tasks=tasks: resumed(inference, images, tasks),
            lambda inference=inference, tasks=tasks: two_passes(inference, images, tasks),
            repeats,
            1e-3,  # batches and groups have different sizes, so the last bits differ
        )
        routed = [[inference.base, networks.network(task)] for task in tasks]
        counted = (
            sum(separate_flops(config, pair, from_images=True) for pair in routed),
            sum(tree_flops(config, pair, from_images=True) for pair in routed),
        )
        note = (
            f"{num} images at {image_size} pixels, groups padded to {bucket_sizes(inference.rows)}"
        )
        rows.append(
            shared_row(
                f"task-agnostic inference, {what}, {name}",
                medians(times),
                counted,
                goal,
                note,
            )
        )
    return rows


def resumed(inference: Inference, images: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """Compute features with the library and a router that returns `tasks`."""
    feed = HostImages(inference.executor, images)
    return inference.features(feed, len(images), lambda features: tasks[: len(features)])


def two_passes(inference: Inference, images: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """Compute the same features with two full forward passes: the base network's pass, then the
    pass of each task's network."""
    executor = inference.executor
    result = np.zeros((len(images), executor.config.width), np.float32)
    features = []
    for batch in batches(np.arange(len(images)), inference.rows):
        last = executor.advance(
            inference.base, executor.begin(images[batch.rows]), executor.num_blocks
        )
        features.append(executor.features(last.values))
    jax.device_get(features)
    for task in np.unique(tasks):
        network = inference.networks.network(task)
        rows = np.flatnonzero(tasks == task)
        num_computed = 0
        for padded, size in pieces(rows, inference.sizes):
            last = executor.advance(network, executor.begin(images[padded]), executor.num_blocks)
            result[rows[num_computed : num_computed + size]] = np.asarray(
                executor.features(last.values)
            )[:size]
            num_computed += size
    return result


def compare(
    shared: Callable[[], np.ndarray],
    score_separately: Callable[[], np.ndarray],
    repeats: int,
    tolerance: float = 0.0,
) -> dict[str, list[float]]:
    """Time both sides in turns; ValueError if a pair of results differs by more than
    `tolerance`."""
    results: dict[str, list[np.ndarray]] = {SHARED: [], APART: []}
    sides: dict[str, Callable[[], object]] = {
        SHARED: lambda: results[SHARED].append(shared()),
        APART: lambda: results[APART].append(score_separately()),
    }
    times = measure.alternate(sides, repeats)
    for ours, theirs in zip(results[SHARED], results[APART], strict=True):
        if not np.allclose(ours, theirs, rtol=0, atol=tolerance):
            raise ValueError(f"shared and separate work differ: {ours} and {theirs}")
    return times


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
