"""Laws of every method: it learns, saves, opens, stops, resumes, and predicts per image."""

import copy
import functools
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
import small
from compiling import count_compilations
from scipy.special import erf, softmax

from cheem_jax.baselines.baseline import TrainedBaseline
from cheem_jax.baselines.heads import Classes
from cheem_jax.core.keys import Keys
from cheem_jax.engine.stages import Stages
from cheem_jax.run.checkpoint import load_task, saved_tasks
from cheem_jax.run.method import FrozenFeatures, FrozenNetworks, Method
from cheem_jax.run.rolling import Saved
from cheem_jax.run.session import Session


class Interrupted(Exception):
    """Raised in place of the end of a process."""


class Watched(Session):
    """A task that stops after `until` reports of progress, and the state of its rolling
    checkpoint."""

    def __init__(self, until: int | None = None, saved: Saved | None = None):
        super().__init__()
        self.until, self.saved, self.checkpoint = until, saved, saved
        self.reports = 0

    @contextmanager
    def phase(
        self,
        name: str,
        total: int = 0,
        state: Callable[[], Saved] | None = None,
        *,
        title: str | None = None,
    ):
        def advance(num_images: int, note: str = "", /) -> None:
            self.reports += 1
            if self.reports == self.until:
                if state is not None:
                    # host arrays that nobody changes, as read from a disk
                    arrays, meta = state()
                    self.checkpoint = Saved(_copied(arrays), dict(meta))
                raise Interrupted

        with super().phase(name, total, state):
            yield advance


def _copied(tree: Any) -> Any:
    return {k: _copied(v) for k, v in tree.items()} if isinstance(tree, dict) else np.array(tree)


def fresh(method: Method) -> Method:
    """Return a method before its first task with the compiled functions of another one."""
    copied = copy.copy(method)
    for name, value in vars(method).items():
        if isinstance(value, list | dict | Classes):
            setattr(copied, name, copy.deepcopy(value))
    return copied


@functools.cache
def stages() -> Stages:
    """The small backbone with its compiled functions; nothing learned is stored there."""
    return Stages(small.backbone(), "mlp_down")


def learner(
    kind: Callable[..., Method],
    config: Any,
    *,
    seed: int = 0,
    num_tasks: int = 3,
    router_features: FrozenFeatures | None = None,
) -> Any:
    """Return a method over the small backbone; `router_features` default to the backbone's."""
    features = FrozenFeatures(stages(), config.batch_size)
    return kind(
        FrozenNetworks(stages(), features, router_features or features),
        config,
        Keys(seed),
        num_tasks,
    )


# ---- parts of a block in NumPy, for one image `[N, D]`


def norm(layer, x):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + layer.epsilon)
    return scaled * np.asarray(layer.scale[...]) + np.asarray(layer.bias[...])


def linear(layer, x):
    return x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...])


def attention(query, key, value):
    """Return the output of one attention head."""
    share = softmax(query @ key.T / np.sqrt(query.shape[-1]), axis=-1)
    return share @ value


def mlp(block, x):
    hidden = linear(block.up, norm(block.norm2, x))
    return linear(block.down, hidden * 0.5 * (1 + erf(hidden / np.sqrt(2))))


def check_method(
    untrained: Method, directory: Path, *, needs_task_id: bool = False, stops: bool = True
) -> Method:
    """Check the laws that hold for every method, starting before its first task.

    `needs_task_id`: the method predicts only with the task ID. `stops`: its training can be
    interrupted.
    """

    def make() -> Method:
        return fresh(untrained)

    method = make()
    tasks = small.stream(3).tasks
    method.check(tasks)
    for index, task in enumerate(tasks):
        needed = method.bytes_needed(task)
        if isinstance(method, TrainedBaseline):  # without the two rolling checkpoints
            needed -= 24 * sum(leaf.size for leaf in jax.tree.leaves(method.start(task)))
        report = method.learn(task, Watched())
        method.save(directory / "one")
        arrays, _ = load_task(saved_tasks(directory / "one")[index])
        assert needed >= sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
        costs = (
            "flops_method",
            "flops_explicit",
            "flops_executed",
            "params_learned",
            "params_stored",
        )
        assert all(report[cost] >= 0 for cost in costs) and sum(report["seconds"].values()) > 0
    images = np.concatenate([task.test.images[:9] for task in tasks])
    true = np.repeat(np.arange(3), 9).astype(np.int32)
    given = true if needs_task_id else None
    result = method.predict(images, given)
    assert result.tasks.max() <= 2 and result.classes.min() >= 0

    # the same image in other company: reversed, and among few
    backwards = method.predict(images[::-1], given[::-1] if needs_task_id else None)
    few = method.predict(images[3:8], given[3:8] if needs_task_id else None)
    for part, rows in ((backwards, slice(None, None, -1)), (few, slice(3, 8))):
        np.testing.assert_array_equal(part.tasks, result.tasks[rows])
        np.testing.assert_array_equal(part.classes, result.classes[rows])

    # given the task ID, the inferred one stays, and the class too if that is right
    test = tasks[1].test.images
    measured = method.predict(test, np.full(20, 1, np.int32))
    if not needs_task_id:
        inferred = method.predict(test)
        np.testing.assert_array_equal(measured.tasks, inferred.tasks)
        right = inferred.tasks == 1
        np.testing.assert_array_equal(measured.classes[right], inferred.classes[right])

    for wrong in (-1, 3):
        with pytest.raises(
            ValueError, match=rf"task IDs \[{wrong}\] are unknown; expected .* 0 to 2"
        ):
            method.predict(test, np.full(20, wrong, np.int32))
    with pytest.raises(ValueError, match="expected one integer for each of 20 images"):
        method.predict(test, np.full(19, 1, np.int32))

    # from the disk alone
    again = make()
    again.open(directory / "one")
    chex.assert_trees_all_equal(again.predict(images, given), result)

    # stop in the middle of the second task, and resume in another process
    if stops:
        halted = make()
        watched = Watched(4)
        halted.learn(tasks[0], Watched())
        halted.save(directory / "two")
        try:
            halted.learn(tasks[1], watched)
        except Interrupted:
            pass
        else:
            raise AssertionError("the task ended before it could be stopped")
        resumed = make()
        resumed.open(directory / "two")
        resumed.learn(tasks[1], Watched(saved=watched.checkpoint))
        resumed.save(directory / "two")
        resumed.learn(tasks[2], Watched())
        chex.assert_trees_all_equal(resumed.predict(images, given), result)

    # a fourth task, whose classes and row fit into the padding to a power of two
    later = fresh(method)
    with count_compilations() as programs:
        later.learn(small.task("task3", 3), Watched())
        later.save(directory / "later")
        later.predict(images, given)
    assert programs.count == 0
    return method
