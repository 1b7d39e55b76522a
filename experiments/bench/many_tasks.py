"""Costs after T = 1 to 1,000 tasks: opening, task-ID inference, predictions and learning.

    python -m experiments.bench.many_tasks

The memory has sampled, untrained architectures and is saved like learned tasks. For each T a new
process opens the first T tasks. The centroids of a task are features of five generated images, so
the images of a task are routed to it. Then one further task is learned, with the similarity pass on
32 images, and supernet steps over all experts take turns with steps over the backbone's experts.

Costs that can grow with T are measured in CPU seconds of all threads, which hardly depend on other
load. Wall-clock seconds are recorded, too.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.spatial.distance import cdist

from cheem_jax.backbone.weights import Pretrained
from cheem_jax.cheem.config import PRESETS, CheemConfig
from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.cheem.learner import Cheem
from cheem_jax.cheem.saved_memory import save_memory_task
from cheem_jax.cheem.training import prepare, step_of
from cheem_jax.cli.arguments import parse
from cheem_jax.core.keys import Keys
from cheem_jax.core.pool import DenseExperts, InternalMemory
from cheem_jax.core.routing import PAPER, Router, RouterConfig, TaskStatistics, normalise
from cheem_jax.core.settings import Advance, no_progress
from cheem_jax.data.demo import demo_stream
from cheem_jax.engine.batches import batches
from cheem_jax.engine.compilation import compilations
from cheem_jax.engine.stages import Stages
from cheem_jax.memory.predictor import Predictor
from cheem_jax.run.checkpoint import saved_tasks
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.record import to_json
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session
from experiments.bench import measure
from experiments.bench.measure import Bench, Row
from experiments.bench.memories import NUM_CLASSES, RANK, sampled_kinds, sampled_memory

TASKS = (1, 10, 100, 300, 1000)
NUM_ROUTED = 1000
NUM_ASKED = 64
NUM_CENTROIDS = 5
BATCH, NUM_KINDS = 32, 12
LIMIT = 8 * 2**20
"""Limit in bytes of the merged experts."""
GOAL_LINEAR = 1.25
"""Limit of the cost per task at the largest T, divided by that at T = 100; 1 means linear
growth."""
GOAL_SAME = 1.5
"""Limit of the growth of costs that must not depend on T; it allows for the noise of a few short
steps."""
GOAL_STEP = 1.1
"""Limit of the growth of a step, which runs one network, independent of the pool."""
GOAL_BYTES = 1.25
"""Limit of the bytes on disk per byte of the arrays that tasks added."""
PANELS = {
    "learning a task (CPU s)": {
        "all": "learn_cpu_seconds",
        "similarity pass": "similarity_cpu_seconds",
    },
    "bytes of a task (kB)": {
        "on disk": "disk_kilobytes",
        "its line in the record": "record_kilobytes",
    },
    "opening (CPU s)": {"": "open_cpu_seconds"},
    "task-ID inference on 1,000 images (CPU s)": {"": "route_l1_cpu_seconds"},
    "64 images of 64 tasks, one where T = 1 (CPU s)": {
        "all kept": "ask_free_cpu_seconds",
        "8 MB kept": "ask_limited_cpu_seconds",
    },
    "resident memory (MB)": {
        "opened": "opened_megabytes",
        "all asked, 8 MB kept": "limited_megabytes",
        "all asked, all kept": "free_megabytes",
        "one more learned": "learned_megabytes",
    },
}


class Seconds(dict[str, float]):
    """Wall-clock and CPU seconds, keyed by name."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        cpu = time.process_time()
        yield
        self[f"{name}_seconds"] = time.perf_counter() - start
        self[f"{name}_cpu_seconds"] = time.process_time() - cpu

    def median(self, name: str, work: Callable[[], object], repeats: int = 5) -> None:
        """Measure the median seconds of `repeats` calls after one call to warm up."""
        work()
        calls = [Seconds() for _ in range(repeats)]
        for call in calls:
            with call(name):
                work()
        self.update({key: statistics.median(call[key] for call in calls) for key in calls[0]})


class Watched(Session):
    """A session that measures the seconds of its phases."""

    def __init__(self, measured: Seconds):
        super().__init__()
        self.measured = measured

    @contextlib.contextmanager
    def phase(
        self,
        name: str,
        total: int = 0,
        state: Callable[[], Saved] | None = None,
        *,
        title: str | None = None,
    ) -> Iterator[Advance]:
        """See `Session.phase`."""
        with self.measured(name):
            yield no_progress


def patches(task: int, num: int, size: int) -> np.ndarray:
    """Make images of random coloured patches with the task's number as seed: uint8 `[num, S, S,
    3]`."""
    coarse = np.random.default_rng(task).integers(0, 256, (num, 4, 4, 3))
    return np.repeat(np.repeat(coarse, -(-size // 4), axis=1), -(-size // 4), axis=2)[
        :, :size, :size
    ].astype(np.uint8)


def fill(root: Path, vit: Pretrained, num_tasks: int) -> list[int]:
    """Write a memory of sampled tasks; return the bytes of the arrays that each task adds."""
    executor = measure.stages(vit)
    memory = sampled_memory(executor, num_tasks)
    features = FrozenFeatures(executor, 64)
    size = vit.config.image_size
    images = np.concatenate([patches(task, NUM_CENTROIDS, size) for task in range(num_tasks)])
    centroids = np.split(normalise(features(images)), num_tasks)
    pairs = zip(memory.tasks, centroids, strict=True)
    memory = InternalMemory(
        memory.pool, tuple(dataclasses.replace(task, centroids=rows) for task, rows in pairs)
    )
    for index in range(num_tasks):
        save_memory_task(root, memory, index, RANK)
    return [added_bytes(memory, index) for index in range(num_tasks)]


def added_bytes(memory: InternalMemory, index: int) -> int:
    """Return the bytes of the arrays that a task adds: its experts, head, means and centroids."""
    task = memory.tasks[index]
    learned = [stored.params for stored in memory.added(index).values()]
    return sum(
        leaf.nbytes for leaf in jax.tree.leaves((learned, task.head, task.means, task.centroids))
    )


def small() -> CheemConfig:
    """Return the demo's settings with minimal epochs and numbers of candidates."""
    preset = PRESETS["demo"]
    return dataclasses.replace(
        preset,
        supernet=dataclasses.replace(preset.supernet, epochs=1),
        search=dataclasses.replace(preset.search, population=6, generations=2, num_parents=2),
        finetune=dataclasses.replace(preset.finetune, epochs=1),
    )


def measure_tasks(folder: str, num_tasks: int, quick: bool) -> dict[str, Any]:
    """Measure a saved memory with `num_tasks` tasks; runs in a separate process."""
    root = Path(folder)
    # processes reuse compiled functions of earlier ones; compilations are counted
    measure.keep_compiled(root.parent / "programs")
    vit = measure.backbone("vit_nano" if quick else "vit_micro")
    executor = measure.stages(vit)
    config = small()
    cheem = Cheem(executor, config, Keys(0), None, FrozenFeatures(executor, config.batch_size))
    FrozenFeatures(executor, config.batch_size)(patches(0, 1, vit.config.image_size))
    before = compilations()
    seconds = Seconds()
    with seconds("open"):
        cheem.open(root)
    opened = {**seconds, "opened_megabytes": measure.process_memory("VmRSS") / 1e6}
    memory = cheem.memory
    assert len(memory.tasks) == num_tasks
    numbers = {
        "tasks": num_tasks,
        "experts_of_largest_block": max(map(len, memory.pool)),
        **opened,
        **routing(memory, vit.config.width),
        **answering(executor, memory, vit.config.image_size),
        **learning(cheem),
        **stepping(executor, memory),
    }
    since = compilations().since(before)
    return {**numbers, "programs": since.programs + since.cached}


def routing(memory: InternalMemory, width: int) -> dict[str, float]:
    """Measure the seconds to infer the tasks of 1,000 images by the index; check the result against
    the distances to all centroids."""
    features = np.random.default_rng(1).normal(size=(NUM_ROUTED, width)).astype(np.float32)
    centroids = [task.centroids for task in memory.tasks]
    points = normalise(features)
    seconds = Seconds()
    router = Router(PAPER, tuple(map(TaskStatistics, centroids)))
    by_task = np.stack([cdist(points, rows, "cityblock").min(axis=1) for rows in centroids], axis=1)
    assert np.array_equal(router.route(features), by_task.argmin(axis=1)), (
        "the router infers different tasks"
    )
    seconds.median("route_l1", functools.partial(router.route, features))
    return {"index_megabytes": router.rows.nbytes / 1e6, **seconds}


def answering(executor: Stages, memory: InternalMemory, size: int) -> dict[str, Any]:
    """Measure seconds and memory of predictions with and without a limit on merged experts; check
    that images are routed to their tasks."""
    num = len(memory.tasks)
    tasks = np.linspace(0, num - 1, NUM_ASKED).astype(int)
    images_of_tasks = np.concatenate([patches(task, 1, size) for task in tasks.tolist()])
    each = np.concatenate([patches(task, 1, size) for task in range(num)])
    numbers = {}
    answers = {}
    seconds = Seconds()
    for name, limit in (("limited", LIMIT), ("free", 2**40)):
        predictor = Predictor(
            executor,
            memory.tasks,
            TaskNetworks(DenseExperts(memory.pool, limit), memory.tasks),
            RouterConfig(),
        )
        predictor.prepare()
        before = compilations()
        answers[name] = predictor.predict_arrays(each)
        assert np.array_equal(answers[name].targets, np.arange(num)), (
            "images are routed to other tasks"
        )
        seconds.median(f"ask_{name}", functools.partial(predictor.predict_arrays, images_of_tasks))
        numbers |= {
            f"{name}_megabytes": measure.process_memory("VmRSS") / 1e6,
            f"{name}_counters": predictor.counters(),
            f"{name}_programs": compilations().since(before).programs,
        }
    equal = all(map(np.array_equal, answers["limited"].logits, answers["free"].logits))
    return {**numbers, **seconds, "same_bits": equal}


def learning(cheem: Cheem) -> dict[str, Any]:
    """Measure the seconds of each phase of learning one further task with all functions compiled,
    and its bytes in the record."""
    task = demo_stream(num_train=64, num_val=32, num_test=32).tasks[0]
    memory = cheem.memory
    cheem.learn(task, Session())  # compiles all functions
    cheem.features.clear()
    cheem.memory = memory
    seconds = Seconds()
    with seconds("learn"):
        report = cheem.learn(task, Watched(seconds))
    return {
        **seconds,
        "record_kilobytes": sum(len(json.dumps(to_json(value))) for value in report.values()) / 1e3,
        "learned_megabytes": measure.process_memory("VmRSS") / 1e6,
    }


def stepping(executor: Stages, memory: InternalMemory) -> dict[str, Any]:
    """Measure the seconds per step, in turns, of a supernet over the memory's experts and of one
    over the backbone's experts."""
    images = measure.random_images(BATCH, executor.config)
    labels = np.arange(BATCH, dtype=np.int32) % NUM_CLASSES
    (batch,) = batches(np.arange(BATCH), BATCH)
    feed = measure.cached_tokens(executor, images, batch_size=BATCH)
    data = step_of(executor, feed, labels, batch)
    sides: dict[str, Callable[[], object]] = {}
    for name, pool in (("base", executor.base_pool), ("memory", memory.pool)):
        training = measure.new_task(executor, NUM_CLASSES, RANK, pool)
        architectures = sampled_kinds(training.supernet.sizes, NUM_KINDS)
        prepare(executor, training.supernet, BATCH)
        for architecture in architectures:  # learners are made when they are first sampled
            training.step(architecture, data)
        following = itertools.cycle(architectures)
        sides[name] = lambda training=training, following=following: training.step(
            next(following), data
        )
    before = compilations()
    seconds = measure.medians(measure.alternate(sides, 4 * NUM_KINDS))
    compiled = compilations().since(before).programs
    return {
        "step_seconds": seconds["memory"],
        "base_step_seconds": seconds["base"],
        "step_programs": compiled,
    }


def main(settings: Bench) -> None:
    """Write the memory once, and measure every T in a separate process; write `many_tasks.json` and
    a figure."""
    numbers = (1, 10) if settings.quick else TASKS
    entries = []
    with tempfile.TemporaryDirectory(prefix="cheem-bench-") as folder:
        whole = Path(folder) / "memory"
        start = time.perf_counter()
        added = fill(
            whole, measure.backbone("vit_nano" if settings.quick else "vit_micro"), numbers[-1]
        )
        written = [
            sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
            for place in saved_tasks(whole)
        ]
        measure.say(f"many_tasks: {numbers[-1]} tasks saved in {time.perf_counter() - start:.0f} s")
        for num in numbers:
            first = Path(folder) / f"first-{num}"
            for place in saved_tasks(whole)[:num]:
                shutil.copytree(place, first / place.name, copy_function=os.link)
            entry = measure.in_child(measure_tasks, str(first), num, settings.quick)
            measure.say(f"many_tasks: T = {num}: learned in {entry['learn_seconds']:.3g} s")
            entry["disk_kilobytes"] = float(np.mean(written[max(0, num - 10) : num])) / 1e3
            entries.append(entry)
    measure.draw_over_tasks(entries, PANELS, settings.out.parent / "many_tasks.png")
    rows = rows_of(entries, sum(written), sum(added))
    measure.save(settings.out, "many_tasks", rows, quick=settings.quick, tasks=entries)


def rows_of(entries: Sequence[dict[str, Any]], written: int, added: int) -> list[Row]:
    """Make the rows: costs at the largest T, divided by those at T = 100 if they can grow, or else
    by those at the smallest T."""
    first, last = entries[0], entries[-1]
    middle = next((entry for entry in entries if entry["tasks"] == 100), first)
    few = first["tasks"]
    some = middle["tasks"]
    many = last["tasks"]

    def linear(what: str, name: str, note: str) -> Row:
        key = f"{name}_cpu_seconds"
        growth = (last[key] / (many + 1)) / (middle[key] / (some + 1))
        seconds = {f"T = {some}": middle[key], f"T = {many}": last[key]}
        title = f"{what}, T = {some} to {many}"
        return Row(title, seconds, growth, GOAL_LINEAR, "at most", note=note)

    def other(entry: dict[str, Any]) -> float:
        return entry["learn_cpu_seconds"] - entry["similarity_cpu_seconds"]

    return [
        linear("opening, per task", "open", "every file and the content are hashed"),
        linear(
            "similarity pass on 32 images, per network",
            "similarity",
            "linear in the number of networks, less if they share prefixes",
        ),
        Row(
            f"learning without that pass, T = {few} to {many}",
            {f"T = {few}": other(first), f"T = {many}": other(last)},
            other(last) / other(first),
            GOAL_SAME,
            "at most",
            note="all other phases at minimal size; merging all experts",
        ),
        Row(
            f"a supernet step, T = {many} over the backbone's experts alone",
            {"backbone": last["base_step_seconds"], f"T = {many}": last["step_seconds"]},
            last["step_seconds"] / last["base_step_seconds"],
            GOAL_STEP,
            "at most",
            note="wall-clock seconds, in turns; one network runs, independent of the pool",
        ),
        linear(
            "task-ID inference on 1,000 images",
            "route_l1",
            f"exact; {last['index_megabytes']:.3g} MB of centroids",
        ),
        Row(
            f"64 images of 64 tasks, T = {many}",
            {
                "all kept": last["ask_free_cpu_seconds"],
                "8 MB kept": last["ask_limited_cpu_seconds"],
            },
            last["ask_limited_cpu_seconds"] / last["ask_free_cpu_seconds"],
            note="experts that are evicted are merged again; "
            + ("equal bits" if all(entry["same_bits"] for entry in entries) else "**other bits**"),
        ),
        Row(
            f"merged experts after an image of each task, at most 8 MB, T = {many}",
            {},
            last["limited_counters"]["bytes"] / 1e6,
            LIMIT / 1e6,
            "at most",
            "MB",
            note=f"without a limit {last['free_counters']['bytes'] / 1e6:.0f} MB",
        ),
        Row(
            f"compiled functions, T = {few} to {many}",
            {},
            float(last["programs"]),
            float(first["programs"] + math.ceil(math.log2(many / few))),
            "at most",
            "programs",
            note=f"{first['programs']} at T = {few}, and one for every doubling",
        ),
        Row(
            "functions compiled during predictions and steps",
            {},
            float(
                max(
                    entry[f"{name}_programs"]
                    for entry in entries
                    for name in ("limited", "free", "step")
                )
            ),
            0.0,
            "at most",
            "programs",
            note="evicted networks included",
        ),
        Row(
            f"bytes on disk per byte that tasks added, {many} tasks",
            {},
            written / added,
            GOAL_BYTES,
            "at most",
        ),
    ]


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
