"""Experts that are removed with a task, and those that stay, on pools small enough to check by
hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Expert, LowRank
from cheem_jax.core.pool import Head, InternalMemory, StoredExpert, TaskMemory, dense_expert, grow
from cheem_jax.memory.forgetting import PoolPosition, RetainedExpert, changed_tasks, forget


def full(value: float) -> Expert:
    return Expert(jnp.full((4, 2), value), jnp.full(2, value))


def pair(value: float) -> LowRank:
    return LowRank(jnp.full((4, 1), value), jnp.full((1, 2), value))


def memory(*tasks: tuple[str, str]) -> InternalMemory:
    """Tasks as (name, choices of two blocks); the experts of the base are first."""
    result = InternalMemory(tuple((StoredExpert(full(1.0), None, None),) for _ in range(2)))
    for name, choices in tasks:
        architecture = from_strings(choices.split())
        learned = {
            block: (
                full(10.0 + result.next_number)
                if choice.kind == "new"
                else pair(1.0 + result.next_number)
            )
            for block, choice in enumerate(architecture)
            if choice.kind in ("new", "adapt")
        }
        pool, used = grow(result.pool, architecture, learned, result.next_number)
        task = TaskMemory(
            name, ("a", "b"), architecture, used, Head(jnp.zeros((2, 2)), jnp.zeros(2)),
            np.zeros((2, 2), np.float32), np.zeros((1, 2), np.float32),
        )  # fmt: skip
        result = InternalMemory(pool, (*result.tasks, task), result.forgotten)
    return result


def dense(result: InternalMemory, name: str) -> list[Expert | None]:
    task = next(task for task in result.tasks if task.name == name)
    return [
        None if e is None else dense_expert(block, e)
        for block, e in zip(result.pool, task.experts, strict=True)
    ]


def assert_same_networks(before: InternalMemory, after: InternalMemory) -> None:
    for task in after.tasks:
        for old, new in zip(dense(before, task.name), dense(after, task.name), strict=True):
            assert (old is None) == (new is None)
            if old is not None and new is not None:
                np.testing.assert_array_equal(old.weight, new.weight)
                np.testing.assert_array_equal(old.bias, new.bias)


def test_experts_that_only_the_task_used_are_removed_and_their_numbers_stay_reserved():
    before = memory(("cats", "new skip"), ("dogs", "new reuse:0"))
    done = forget(before, "cats")
    assert done.removed == (PoolPosition(0, 1),) and done.numbers == (0,)
    assert done.memory.pool[0][1].is_gone and done.memory.pool[0][1].params[0].size == 0
    assert [task.name for task in done.memory.tasks] == ["dogs"]
    assert done.memory.tasks[0].experts == (2, 0), "experts of other tasks keep their places"
    assert_same_networks(before, done.memory)


def test_numbers_are_never_used_again():
    done = forget(memory(("cats", "new skip"), ("dogs", "new skip")), "cats")
    assert done.memory.numbers == (1,) and done.memory.next_number == 2
    last = forget(done.memory, "dogs").memory
    assert last.tasks == () and last.numbers == () and last.next_number == 2


def test_an_expert_that_another_task_uses_stays_a_candidate():
    before = memory(("cats", "new skip"), ("dogs", "reuse:1 skip"))
    done = forget(before, "cats")
    assert done.in_use == (RetainedExpert(PoolPosition(0, 1), ("dogs",)),)
    assert not done.removed and not done.ancestors
    assert done.memory.candidates() == ((0, 1), (0,))
    assert_same_networks(before, done.memory)


def test_an_ancestor_stays_and_is_no_candidate():
    before = memory(("cats", "new skip"), ("dogs", "adapt:1 skip"), ("owls", "adapt:2 skip"))
    done = forget(before, "cats")
    assert done.ancestors == (RetainedExpert(PoolPosition(0, 1), ("dogs", "owls")),)
    assert not done.removed
    assert done.memory.candidates()[0] == (0, 2, 3)
    assert_same_networks(before, done.memory)


def test_erasing_makes_full_experts_of_descendants_with_the_same_bits():
    before = memory(("cats", "new new"), ("dogs", "adapt:1 skip"), ("owls", "adapt:2 reuse:1"))
    done = forget(before, "cats", erase=True)
    assert done.merged == (PoolPosition(0, 2),) and done.removed == (PoolPosition(0, 1),)
    assert done.in_use == (RetainedExpert(PoolPosition(1, 1), ("owls",)),), (
        "what a task uses as it is stays all the same"
    )
    assert isinstance(done.memory.pool[0][2].params, Expert)
    assert done.memory.pool[0][2].parent is None
    assert isinstance(done.memory.pool[0][3].params, LowRank), (
        "a grandchild still stands on its parent"
    )
    assert changed_tasks(before, done.memory) == [1]
    assert_same_networks(before, done.memory)


def test_an_expert_that_is_erased_is_not_called_a_full_expert():
    before = memory(("cats", "new new"), ("dogs", "adapt:1 skip"), ("owls", "adapt:2 reuse:1"))
    done = forget(before, "cats", "dogs", erase=True)
    assert done.removed == (PoolPosition(0, 1), PoolPosition(0, 2))
    assert done.merged == (PoolPosition(0, 3),)
    assert_same_networks(before, done.memory)


def test_an_ancestor_waits_until_nothing_descends_from_it():
    before = memory(("cats", "new skip"), ("dogs", "adapt:1 skip"), ("owls", "new skip"))
    waiting = forget(before, "cats").memory
    done = forget(waiting, "dogs")
    assert done.removed == (PoolPosition(0, 1), PoolPosition(0, 2))
    assert done.memory.candidates()[0] == (0, 3)
    assert_same_networks(before, done.memory)


def test_the_history_marks_forgotten_experts_and_counts_origins_by_number():
    done = forget(
        memory(("cats", "new skip"), ("dogs", "adapt:1 skip"), ("owls", "new skip")), "cats"
    ).memory
    assert [expert["origin"] for expert in done.history()[0]] == ["base", "forgotten", 0, 1]
    gone = forget(done, "dogs").memory.history()[0]
    assert [expert["kind"] for expert in gone] == ["full", "gone", "gone", "full"]


def test_an_unknown_task_without_a_near_name_is_answered_with_all_names():
    with pytest.raises(ValueError, match="no task 'dogs'; it has hands, cats"):
        forget(memory(("hands", "new skip"), ("cats", "new skip")), "dogs")


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean cats"):
        forget(memory(("cats", "new skip")), "cat")
