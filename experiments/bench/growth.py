"""What a run costs after T = 1, 3, 10, 30 and 100 learned tasks of vit_micro.

    python -m experiments.bench.growth

The memory is filled with sampled architectures instead of learned ones: what a step and the compiler cost depends on
how many experts there are, not on how well they do. Every T has a process of its own, so that programs and resident
memory are counted from nothing. What else grows with the tasks is measured by `many_tasks`.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.cheem.evolution import SearchConfig, prepare_search, search
from cheem_jax.cheem.expert_memory import dense_task_network
from cheem_jax.cheem.hee import exploit_table, uniform_table
from cheem_jax.cheem.supernet import OpSettings, Supernet
from cheem_jax.cheem.training import SupernetFit, prepare, step_of
from cheem_jax.cli.main import parse
from cheem_jax.core.architecture import Architecture, Choice, decode
from cheem_jax.core.keys import key_at
from cheem_jax.core.ops import Expert, LowRank
from cheem_jax.core.pool import (
    Head,
    InternalMemory,
    StoredExpert,
    TaskMemory,
    dense_expert,
    grow,
    merge_dense,
    pool_sizes,
)
from cheem_jax.engine.batches import batches
from cheem_jax.engine.compilation import compilations
from cheem_jax.engine.executor import Dense, Executor
from experiments.bench import measure
from experiments.bench.measure import Bench, Row

TASKS = (1, 3, 10, 30, 100)
NUM_CLASSES, RANK, BATCH, NUM_DRAWS = 10, 16, 32, 12
GOAL_STEP = 1.1
"""A step runs one network, whatever the pool holds."""
GOAL_MEMORY = 2.0
"""Resident bytes per byte of dense experts: each once, and room for the pairs that they were merged from."""
PANELS = {
    "a supernet step (s)": {"": "step_seconds"},
    "programs compiled": {"": "programs"},
    "resident memory (MB)": {"": "resident_megabytes"},
}


class Grown(NamedTuple):
    """A memory as some tasks would have left it, its experts dense, and the experts of base and tasks per block."""

    memory: InternalMemory
    experts: list[list[Expert]]
    earlier: list[tuple[int | None, ...]]

    @property
    def networks(self) -> list[list[Dense]]:
        """The base network and every task's."""
        return [dense_task_network(self.experts, used) for used in self.earlier]


def drawn_memory(executor: Executor, num_tasks: int, *, rank: int = RANK, seed: int = 0) -> Grown:
    """A memory of tasks whose architectures are sampled as the exploiting sampler would, and not trained."""
    rng, key, width = np.random.default_rng(seed), jax.random.key(seed), executor.config.width
    memory = InternalMemory(executor.base_pool)
    experts = [[dense_expert(block, 0)] for block in executor.base_pool]
    earlier: list[tuple[int | None, ...]] = [(0,) * executor.num_blocks]
    for index in range(num_tasks):
        sizes = pool_sizes(memory.pool)
        table = drawn_table(rng, earlier, sizes)
        codes = [rng.choice(len(row), p=row / row.sum()) for row in table]
        architecture = decode(codes, sizes)
        supernet = Supernet(key_at(key, index), experts, NUM_CLASSES, OpSettings(rank=rank))
        begun = supernet.learned(supernet.init(), architecture)
        learned = dict(begun)
        for block, params in begun.items():  # an untrained pair is zero: its expert would equal its parent
            if isinstance(params, LowRank):
                learned[block] = LowRank(params.down, jnp.asarray(0.02 * rng.normal(size=params.up.shape), jnp.float32))
        pool, used = grow(memory.pool, architecture, learned, index)
        for block, own in zip(experts, pool, strict=True):
            for stored in own[len(block) :]:
                block.append(_dense(stored, block))
        head = Head(jnp.zeros((width, NUM_CLASSES)), jnp.zeros(NUM_CLASSES))
        means = rng.normal(size=(executor.num_blocks, width)).astype(np.float32)
        centroids = rng.normal(size=(5, width)).astype(np.float32)
        names = tuple(f"class {i}" for i in range(NUM_CLASSES))
        task = TaskMemory(f"task {index}", names, architecture, used, head, means, centroids)
        memory = InternalMemory(pool, (*memory.tasks, task))
        earlier.append(used)
    return Grown(memory, experts, earlier)


def drawn_table(
    rng: np.random.Generator, earlier: Sequence[tuple[int | None, ...]], sizes: Sequence[int]
) -> np.ndarray:
    """The exploiting table of similarities that are drawn: an earlier network is near or far in all blocks alike."""
    near = rng.uniform(-1, 1, (len(earlier), 1)) + 0.3 * rng.normal(size=(len(earlier), len(sizes)))
    absent = np.array([[expert is None for expert in used] for used in earlier])
    return exploit_table(np.where(absent, np.nan, np.clip(near, -1, 1)), earlier, sizes)


def measure_tasks(num_tasks: int, quick: bool) -> dict[str, Any]:
    """Everything about one number of tasks."""
    vit = measure.backbone("vit_nano" if quick else "vit_micro")
    grown = drawn_memory(measure.stages(vit), num_tasks)
    jax.clear_caches()  # functions compiled so far only served to fill the memory
    executor, rng = measure.stages(vit), np.random.default_rng(1)
    sizes, start = pool_sizes(grown.memory.pool), compilations()
    kept = measure.kept(executor, measure.random_images(BATCH, vit.config), batch_size=BATCH)
    exploit, uniform = drawn_table(rng, grown.earlier, sizes), uniform_table(sizes)
    config, many = SearchConfig(generations=3), new_task(grown)
    prepare(executor, many.supernet, BATCH)
    prepare_search(exploit, config)
    prepared = compilations()
    labels = np.arange(BATCH, dtype=np.int32) % NUM_CLASSES
    (batch,) = batches(np.arange(BATCH), BATCH)
    data = step_of(executor, kept, labels, batch)
    repeats = NUM_DRAWS if quick else 4 * NUM_DRAWS
    following = iter(drawn_kinds(sizes, rng, 1 + repeats))

    def step(of: SupernetFit, architectures: Iterator[Architecture]) -> None:
        measure.step(executor, of, next(architectures), data)

    first = measure.alternate({"first": lambda: step(many, following)}, repeats)
    search(
        jax.random.key(2), lambda genomes: genomes.sum(axis=1) % 7, lambda genomes: genomes.sum(axis=1) % 5,
        exploit=exploit, uniform=uniform, num_images=7, config=config,
    )  # fmt: skip
    programs, after_prepare = (compilations().since(then).programs for then in (start, prepared))
    # beside a memory of one task, in turns: processes one after the other meet different moods of a machine
    one = drawn_memory(executor, 1)
    turns = {
        "one": (new_task(one), itertools.cycle(drawn_kinds(pool_sizes(one.memory.pool), rng, NUM_DRAWS))),
        "many": (many, itertools.cycle(drawn_kinds(sizes, np.random.default_rng(2), NUM_DRAWS))),
    }
    for of, architectures in turns.values():
        for _ in range(NUM_DRAWS):  # what is drawn for the first time is made; here it exists
            step(of, architectures)
    times = measure.alternate({name: functools.partial(step, *turn) for name, turn in turns.items()}, repeats)
    experts = [leaf.nbytes for block in grown.experts for expert in block for leaf in expert]
    resident = measure.process_memory("VmRSS")
    return {
        "tasks": num_tasks,
        "experts_of_largest_block": max(sizes),
        "step_seconds": measure.medians(times)["many"],
        "step_seconds_at_1": measure.medians(times)["one"],
        "first_step_seconds": measure.medians(first)["first"],
        "step_samples": times,
        "programs": programs,
        "programs_after_prepare": after_prepare,
        "resident_megabytes": resident / 1e6,
        "expert_megabytes": sum(experts) / 1e6,
    }


def new_task(grown: Grown) -> SupernetFit:
    """A fresh supernet over a memory's experts."""
    supernet = Supernet(jax.random.key(1), grown.experts, NUM_CLASSES, OpSettings(rank=RANK))
    return SupernetFit(supernet, supernet.init())


def drawn_kinds(sizes: Sequence[int], rng: np.random.Generator, num: int) -> list[Architecture]:
    """The same op kinds whatever the pool holds, of experts drawn from it; they repeat after `NUM_DRAWS`."""
    kinds = np.random.default_rng(0).integers(0, 4, (NUM_DRAWS, len(sizes)))
    found = []
    for i in range(num):
        row = kinds[i % NUM_DRAWS]
        experts = [int(rng.integers(0, n)) for n in sizes]
        options = [(Choice("reuse", e), Choice("adapt", e), Choice("new"), Choice("skip")) for e in experts]
        found.append(tuple(option[kind] for option, kind in zip(options, row, strict=True)))
    return found


def main(settings: Bench) -> None:
    """Measure every number of tasks in a process of its own; write `growth.json` and the figure."""
    found = []
    for num in (1, 10) if settings.quick else TASKS:
        found.append(measure.in_child(measure_tasks, num, settings.quick))
        measure.say(f"growth: T = {num}: {found[-1]['step_seconds']:.4g} s a step, {found[-1]['programs']} programs")
    measure.draw_over_tasks(found, PANELS, settings.out.parent / "growth.png")
    measure.save(settings.out, "growth", rows_of(found), quick=settings.quick, tasks=found)


def rows_of(found: Sequence[dict[str, Any]]) -> list[Row]:
    """The goals, from the fewest tasks to the most."""
    first, last = found[0], found[-1]
    few, many = first["tasks"], last["tasks"]
    span = f"T = {few} to {many}"
    buckets = math.ceil(math.log2(max(many / few, 1)))
    added = last["expert_megabytes"] - first["expert_megabytes"]
    memory = (last["resident_megabytes"] - first["resident_megabytes"]) / added if added > 0 else None
    return [
        Row(
            f"supernet step, {span}", {"T = 1": last["step_seconds_at_1"], f"T = {many}": last["step_seconds"]},
            last["step_seconds"] / last["step_seconds_at_1"], GOAL_STEP, "at most",
            note="in turns in one process; one network runs, whatever the pool holds",
        ),
        Row(
            f"the same where all that a step draws is new to it, T = {many}",
            {"T = 1": last["step_seconds_at_1"], f"T = {many}": last["first_step_seconds"]},
            last["first_step_seconds"] / last["step_seconds_at_1"],
            note="parameters and moments are made when first drawn; once per candidate",
        ),
        Row(
            f"programs compiled, {span}", {}, float(last["programs"]), float(first["programs"] + buckets), "at most",
            "programs", note=f"{first['programs']} at T = {few}, and one for every doubling",
        ),
        Row(
            "programs compiled after the preparation", {}, float(max(t["programs_after_prepare"] for t in found)), 0.0,
            "at most", "programs", note="in supernet steps and the draws of a search",
        ),
        Row(
            f"resident memory per byte of dense experts, {span}", {}, memory, GOAL_MEMORY, "at most",
            note="its growth over that of the experts",
        ),
    ]  # fmt: skip


def _dense(stored: StoredExpert, block: Sequence[Expert]) -> Expert:
    if isinstance(stored.params, Expert):
        return stored.params
    assert stored.parent is not None
    return merge_dense(block[stored.parent], stored.params)


if __name__ == "__main__":
    measure.command(main, parse(Bench, description=__doc__))
