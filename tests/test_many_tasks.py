"""Costs of many tasks, counted: directories read, experts merged, bytes stored; bounds change no
prediction."""

import dataclasses
import os

import chex
import jax.numpy as jnp
import numpy as np
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import distance
from scipy.spatial.distance import cdist

from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.cheem.learner import Cheem, together
from cheem_jax.core import pool, routing
from cheem_jax.core.keys import Keys
from cheem_jax.core.ops import LowRank
from cheem_jax.core.pool import DenseExperts, Head, InternalMemory, dense_expert
from cheem_jax.core.routing import PAPER, Router, RouterConfig, TaskStatistics
from cheem_jax.engine.stages import Stages
from cheem_jax.memory.predictor import Predictor
from cheem_jax.run.checkpoint import saved_tasks
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.session import Session
from experiments.bench.memories import sampled_memory

NUM_TASKS = 30
NUM_SAVED = 8
RANK = 2


@pytest.fixture(scope="module")
def executor():
    return Stages(small.backbone(), "mlp_down")


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(5).integers(0, 256, (NUM_TASKS, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def memory(executor, images):
    """Thirty sampled tasks, as if they had been learned; task t is that of image t."""
    memory = sampled_memory(executor, NUM_TASKS, rank=RANK)
    features = routing.normalise(FrozenFeatures(executor, 8)(images))
    rng = np.random.default_rng(0)
    tasks = [
        dataclasses.replace(
            task,
            centroids=features[i : i + 1],
            head=Head(
                jnp.asarray(rng.normal(size=task.head.weight.shape), jnp.float32), task.head.bias
            ),
        )
        for i, task in enumerate(memory.tasks)
    ]
    return InternalMemory(memory.pool, tuple(tasks))


@pytest.fixture
def merges(monkeypatch):
    """List with one entry per merge of two weights."""
    calls = []
    merge = pool.merge_dense
    monkeypatch.setattr(pool, "merge_dense", lambda *given: calls.append(1) or merge(*given))
    return calls


def adapted(memory) -> list[tuple[int, int]]:
    return [
        (b, e)
        for b, block in enumerate(memory.pool)
        for e, stored in enumerate(block)
        if stored.parent is not None
    ]


# ---- inferring the task


def distances_by_task(points, tasks) -> np.ndarray:
    """Return the L1 distance to the nearest centroid, computed task by task."""
    rows = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    return np.stack([cdist(rows, task, "cityblock").min(axis=1) for task in tasks], axis=1)


def router_for(tasks) -> Router:
    return Router(PAPER, tuple(map(TaskStatistics, tasks)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.booleans())
def test_a_router_infers_the_task_that_comparing_task_by_task_does(seed, num_tasks, has_ties):
    rng = np.random.default_rng(seed)
    tasks = [rng.normal(size=(rng.integers(1, 4), 12)).astype(np.float32) for _ in range(num_tasks)]
    if has_ties:  # equal centroids, and some that differ in a last digit, which float32 cannot tell
        tasks += [np.nextafter(task, np.float32(rng.choice([-9, 9]))) for task in tasks]
        tasks += tasks[::-1]
    points = rng.normal(size=(9, 12)).astype(np.float32)
    points[0] = tasks[-1][0]
    expected = distances_by_task(points, tasks)
    router = router_for(tasks)
    np.testing.assert_array_equal(router.distances(points), expected)
    np.testing.assert_array_equal(router.route(points), expected.argmin(axis=1))


def test_blocks_change_no_distance_and_bound_the_centroids_that_are_compared_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    router = router_for([rng.normal(size=(5, 8)).astype(np.float32) for _ in range(60)])
    points = rng.normal(size=(50, 8)).astype(np.float32)
    expected = router.distances(points)
    sizes = []

    def counted(a, b, name):
        sizes.append(len(a) * len(b))
        return cdist(a, b, name)

    monkeypatch.setattr(routing, "BLOCK_BYTES", 8 * 7 * 300)  # 7 points with 300 centroids
    monkeypatch.setattr(distance, "cdist", counted)
    np.testing.assert_array_equal(router.distances(points), expected)
    assert max(sizes) <= 7 * 300


def test_non_finite_features_are_routed_as_task_by_task():
    tasks = [np.eye(3, dtype=np.float32)[:2], np.zeros((1, 3), np.float32)]
    points = np.array([[np.nan, 0, 0], [0, 0, 0], [0, 1, 0]], np.float32)
    expected = distances_by_task(points, tasks).argmin(axis=1)
    np.testing.assert_array_equal(router_for(tasks).route(points), expected)


# ---- opening


def test_tasks_are_found_by_one_look_into_the_folder_also_beyond_a_thousand(tmp_path, monkeypatch):
    for number in range(1002):
        (tmp_path / f"{number:03d}-task").mkdir()
    (tmp_path / "1003-behind-a-gap").mkdir()
    (tmp_path / ".1002-half.partial").mkdir()
    (tmp_path / "007-another").mkdir()
    looks = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda place: looks.append(place) or listdir(place))
    result = saved_tasks(tmp_path)
    assert looks == [tmp_path]
    assert len(result) == 1002
    assert result[1001].name == "1001-task"
    assert result[7].name == "007-another"
    assert saved_tasks(tmp_path / "nothing") == []


# ---- dense experts


def test_every_chain_is_merged_once_in_any_order_of_requests(memory, merges):
    everything = adapted(memory)
    assert any(
        memory.pool[b][memory.pool[b][e].parent].parent is not None for b, e in everything
    )  # there are chains
    for order in (everything, everything[::-1]):
        merges.clear()
        experts = DenseExperts(memory.pool, 2**30)
        result = {place: experts(*place) for place in order}
        assert len(merges) == experts.merged == len(everything)
    for (block, index), expert in list(result.items())[::7]:
        chex.assert_trees_all_equal(expert, dense_expert(memory.pool[block], index))


def test_a_full_expert_is_shared_with_the_pool_and_uses_no_room(memory):
    experts = DenseExperts(memory.pool, 2**30)
    for b, block in enumerate(memory.pool):
        for e, stored in enumerate(block):
            if not isinstance(stored.params, LowRank):
                assert experts(b, e) is stored.params
    assert experts.bytes == experts.merged == 0


def test_the_least_recently_used_expert_is_evicted_first_and_merged_again_to_the_same_bits(memory):
    size = sum(leaf.nbytes for leaf in memory.pool[0][0].params)
    alone = [
        (b, e)
        for b, e in adapted(memory)
        if memory.pool[b][memory.pool[b][e].parent].parent is None
    ][:3]
    first, second, third = alone
    experts = DenseExperts(memory.pool, 2 * size)
    before = experts(*first)
    experts(*second)
    experts(*first)
    experts(*third)  # the second one is evicted
    assert (experts.merged, experts.evicted, experts.bytes) == (3, 1, 2 * size)
    assert experts(*first) is before and experts.merged == 3
    assert experts(*second) is not None and experts.merged == 4
    experts(*third), experts(*second), experts(*third)
    assert experts(*first) is not before
    chex.assert_trees_all_equal(experts(*first), before)
    assert experts.bytes <= 2 * size


def test_a_pool_that_grew_keeps_its_merged_experts(memory, merges):
    shorter = tuple(block[: len(block) // 2] for block in memory.pool)
    young = DenseExperts(shorter, 2**30)
    unchanged = [(b, e) for b, e in adapted(memory) if e < len(shorter[b])]
    for place in unchanged:
        young(*place)
    grown = DenseExperts(memory.pool, 2**30, young)
    num = len(merges)
    assert grown.bytes == young.bytes > 0
    for place in unchanged:
        assert grown(*place) is young(*place)
    assert len(merges) == num


# ---- learning


def test_the_similarity_of_many_networks_is_the_same_in_parts_of_a_bounded_size(memory, executor):
    task = small.task("new", 1)
    result = []
    for limit in (2**30, 0):
        cheem = Cheem(executor, small.QUICK, Keys(0), None, FrozenFeatures(executor, 16))
        cheem.memory = memory
        cheem._dense = DenseExperts(memory.pool, limit)
        learning = cheem.begin(task, Session())
        earlier, experts = learning.candidates.earlier, learning.candidates.experts
        result.append(cheem.similarity(learning))
        size = sum(leaf.nbytes for leaf in memory.pool[0][0].params)
        parts = list(together(earlier, experts, limit))
        assert sorted(sum(parts, [])) == list(range(NUM_TASKS + 1)) and parts[0][0] == 0
        assert (len(parts) == 1) == bool(limit)
        for part in parts:
            held = {(block, e) for i in part for block, e in enumerate(earlier[i]) if e is not None}
            assert len(held) * size <= max(limit, 4 * executor.num_blocks * size)
    np.testing.assert_array_equal(*result)


def test_the_additions_of_a_task_are_listed_without_a_search_through_the_pool(memory):
    for index in range(NUM_TASKS):
        added = memory.added(index)
        looked = [
            (b, one) for b, block in enumerate(memory.pool) for one in block if one.origin == index
        ]
        assert [(b, id(one)) for b, one in added.items()] == [(b, id(one)) for b, one in looked]


# ---- answering


def predictor_of(executor, memory, limit) -> Predictor:
    networks = TaskNetworks(DenseExperts(memory.pool, limit), memory.tasks)
    return Predictor(executor, memory.tasks, networks, RouterConfig(), batch_sizes=(1, 8))


def test_answers_are_the_same_bits_within_any_limit_and_nothing_is_merged_before_it_is_needed(
    memory, executor, images, merges
):
    free = predictor_of(executor, memory, 2**30)
    size = sum(leaf.nbytes for leaf in memory.pool[0][0].params)
    assert not merges
    wanted = free.predict_arrays(images)
    np.testing.assert_array_equal(wanted.targets, np.arange(NUM_TASKS))
    needed = {
        (b, e)
        for t in set(wanted.targets.tolist())
        for b, e in enumerate(memory.tasks[t].experts)
        if e
    }
    assert 0 < len(merges) <= sum(len(chain_of(memory, *place)) for place in needed)
    assert free.counters()["evictions"] == 0
    for limit in (3 * size, 0):
        bounded = predictor_of(executor, memory, limit)
        for _ in range(2):
            result = bounded.predict_arrays(images)
            np.testing.assert_array_equal(result.targets, wanted.targets)
            assert all(map(np.array_equal, result.logits, wanted.logits))
            np.testing.assert_array_equal(result.distances, wanted.distances)
            assert bounded.counters()["bytes"] <= limit
        assert bounded.counters()["evictions"] > 0
        assert bounded.counters()["misses"] > free.counters()["misses"]


def chain_of(memory, block, index) -> list[int]:
    result = []
    while index is not None:
        result.append(index)
        index = memory.pool[block][index].parent
    return result


def test_networks_that_were_there_are_hits_and_no_network_that_is_restored_compiles(
    memory, executor, images, compilations
):
    predictor = predictor_of(executor, memory, 0)
    predictor.prepare()
    with compilations() as programs:
        predictor.predict_arrays(images)
        predictor.predict_arrays(images)
    assert programs.count == 0
    free = predictor_of(executor, memory, 2**30)
    free.predict_arrays(images)
    first = free.counters()
    free.predict_arrays(images)
    second = free.counters()
    assert second["misses"] == first["misses"] and second["hits"] > first["hits"]
    assert second["merged"] == first["merged"] and second["bytes"] == first["bytes"] > 0


def test_preparing_asks_for_few_networks_however_many_there_are(memory, executor):
    predictor = predictor_of(executor, memory, 2**30)
    inference = predictor._inference[8]
    few = list(inference._examples())
    # each start and each kind at each block: not every task
    assert len(few) <= 3 * executor.num_blocks + 2 < NUM_TASKS
    signatures = {
        (i, code == -1) for t in few for i, code in enumerate(inference.networks.codes[t])
    }
    assert {inference.differences[t] for t in few} == set(inference.differences)
    assert len(signatures) >= executor.num_blocks
