"""Effects of a step, and fitting."""

import dataclasses
import os
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from cheem_jax.cheem import training
from cheem_jax.cheem.config import ExplorationConfig, OpSettings
from cheem_jax.cheem.supernet import Supernet, SupernetState
from cheem_jax.cheem.training import (
    SupernetFit,
    constant_draws,
    fit,
    frozen_prefix,
    head_losses,
    make_step,
    steps_of,
    supernet_draws,
    supernet_score,
    train_step,
)
from cheem_jax.core import machine
from cheem_jax.core.architecture import Choice, from_strings
from cheem_jax.core.device import CPU, Device
from cheem_jax.core.pool import dense_experts, merge_dense
from cheem_jax.core.settings import FitConfig
from cheem_jax.engine.batches import batches
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.feed import (
    Budget,
    Cached,
    HostImages,
    cache_tokens,
    feed_images,
    memory_budget,
    prefetch,
)
from cheem_jax.engine.layout import ONE
from cheem_jax.engine.stages import Stages
from cheem_jax.run.training import learning_rate_at, restored

STAGES = Stages(small.backbone(), "mlp_down")
TASK = small.task("colours", 0)
STEP = make_step(STAGES, TASK.train.images[:16], TASK.train.labels[:16])
FEED = HostImages(STAGES, TASK.train.images)


NET = Supernet(jax.random.key(1), dense_experts(STAGES.base_pool), 3, OpSettings(rank=2))
ADAPT, NEW = Choice("adapt", 0), Choice("new")


def stepped(state: SupernetState, choices: list[str], rate: float = 1e-2) -> SupernetState:
    return train_step(STAGES, NET, state, from_strings(choices), STEP, rate=rate)[0]


def fitted(
    draws,
    config,
    fitting=None,
    *,
    order_seed=0,
    feed=FEED,
    advance=lambda num, note="": None,
    one=STAGES,
    **more,
) -> SupernetFit:
    return fit(
        one,
        fitting or SupernetFit(NET, NET.init()),
        feed,
        TASK.train.labels,
        draws=draws,
        config=config,
        batch_size=16,
        order_key=jax.random.key(order_seed),
        advance=advance,
        **more,
    )


def snapshot(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def test_an_op_that_is_not_sampled_keeps_parameters_moments_and_step_count():
    first = stepped(NET.init(), ["adapt:0", "new", "skip", "adapt:0"])
    second = stepped(first, ["new", "new", "skip", "reuse:0"])
    for place in ((0, ADAPT), (3, ADAPT)):
        chex.assert_trees_all_equal(second.learners[place], first.learners[place])
    assert int(second.learners[3, ADAPT].adam.count) == 1
    assert int(second.learners[1, NEW].adam.count) == 2
    assert not np.array_equal(
        second.learners[1, NEW].params.weight, first.learners[1, NEW].params.weight
    )
    assert int(second.head.adam.count) == 2


def test_a_step_leaves_the_state_before_it_as_it_was():
    before = stepped(NET.init(), ["adapt:0", "new", "skip", "adapt:0"])
    snapshots = snapshot(before)
    places = set(before.learners)
    stepped(before, ["new", "new", "skip", "reuse:0"])
    assert set(before.learners) == places
    for one, other in zip(snapshots, snapshot(before), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_candidate_starts_the_same_whenever_it_is_first_sampled():
    early = NET.init()
    late = stepped(NET.init(), ["new"] * 4)
    place = (2, ADAPT)
    np.testing.assert_array_equal(
        NET.learner(early, place).params.down, NET.learner(late, place).params.down
    )
    NET.ops(early, from_strings(["adapt:0"] * 4))
    assert not early.learners  # looking at a state creates nothing
    both = NET.with_learners(
        early, [from_strings(["new"] * 4), from_strings(["adapt:0", "new", "skip", "reuse:0"])]
    )
    assert set(both.learners) == {*((block, NEW) for block in range(4)), (0, ADAPT)}
    assert NET.with_learners(both, [from_strings(["new"] * 4)]) is both


def test_the_first_adam_step_moves_every_entry_by_the_rate():
    before = NET.init()
    after = stepped(before, ["reuse:0"] * 4)
    moved = np.abs(np.array(after.head.params.weight) - np.array(before.head.params.weight))[:, :3]
    np.testing.assert_allclose(moved, 1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    "executor",
    ["stages", *(pytest.param(name, marks=pytest.mark.full) for name in ("whole", "scan"))],
)
def test_new_can_move_by_a_multiple_of_the_rate(executor):
    settings = OpSettings(rank=2, new_init="copy", new_rate=0.1)
    choices = ["adapt:0", "new", "reuse:0", "skip"]
    net = dataclasses.replace(NET, settings=settings)
    plain = make_executor(
        small.backbone(), "mlp_down", EngineConfig(executor=executor), batch_size=16
    )
    before = net.with_learners(net.init(), [from_strings(choices)])
    after, _ = train_step(plain, net, before, from_strings(choices), STEP, rate=1e-2)

    for place, leaf, rate in (((0, ADAPT), "up", 1e-2), ((1, NEW), "weight", 1e-3)):
        old, new = (
            np.array(getattr(state.learners[place].params, leaf)) for state in (before, after)
        )
        assert np.abs(new - old).max() == pytest.approx(rate, rel=2e-2)


def test_frozen_experts_are_never_updated():
    before = snapshot(NET.experts)
    state = NET.init()
    for _ in range(3):
        state = stepped(state, ["adapt:0", "reuse:0", "new", "skip"], 1e-1)
    for a, b in zip(before, snapshot(NET.experts), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_inherited_state_has_the_parameters_of_one_architecture_and_fresh_moments():
    trained = stepped(NET.init(), ["adapt:0", "new", "skip", "adapt:0"])
    result = NET.inherit(trained, from_strings(["adapt:0", "reuse:0", "new", "skip"]))
    assert set(result.learners) == {(0, ADAPT), (2, NEW)}
    chex.assert_trees_all_equal(result.learners[0, ADAPT].params, trained.learners[0, ADAPT].params)
    chex.assert_trees_all_equal(result.head.params, trained.head.params)
    assert int(result.head.adam.count) == int(result.learners[0, ADAPT].adam.count) == 0


def test_fitting_learns_an_easy_task_and_reports_every_image():
    rates = []
    result = fitted(
        constant_draws(np.array([0, 1, 0, 0])),
        FitConfig(epochs=6, learning_rate=1e-2),
        advance=lambda num, note="": rates.append(num),
    ).progress
    assert sum(rates) == 6 * 40 and len(result.losses) == 6 and result.skipped == 0
    assert result.losses[-1] < 0.5 * result.losses[0]


class Recorded(HostImages):
    """Images that record the epochs and rows that training reads."""

    def __init__(self, executor, images, epochs=None, rows=None):
        super().__init__(executor, images)
        self.epochs = [] if epochs is None else epochs
        self.rows = [] if rows is None else rows

    def at(self, epoch):
        self.epochs.append(epoch)
        return Recorded(self.executor, self.images, self.epochs, self.rows)

    def follow(self, order):
        self.rows.append(np.concatenate([*order]))
        return super().follow(order)


def test_each_epoch_reads_its_own_data_in_another_order():
    feed = Recorded(STAGES, TASK.train.images)
    fitted(constant_draws(np.array([0, 1, 0, 0])), FitConfig(epochs=3), feed=feed)
    assert feed.epochs == [0, 1, 2]
    first, second, third = feed.rows
    for rows in (first, second, third):  # 40 images in batches of 16, the last one padded
        assert len(rows) == 48 and set(rows.tolist()) == set(range(40))
    assert (first != second).any() and (second != third).any() and (first != third).any()


def test_the_weights_of_a_padded_batch_are_those_of_a_mean_over_its_images():
    order = list(batches(np.arange(5), 4))
    full, padded = (
        np.asarray(step[0].weights) for step in steps_of(STAGES, FEED, TASK.train.labels, order, 4)
    )
    np.testing.assert_allclose(full, [0.25] * 4)
    np.testing.assert_allclose(padded, [1, 0, 0, 0])
    # so one step on padded images equals a step on the images alone
    state = NET.init()
    batch = from_strings(["adapt:0", "reuse:0", "reuse:0", "reuse:0"])
    (alone,) = steps_of(STAGES, FEED, TASK.train.labels, list(batches(np.arange(3), 3)), 3)
    (more,) = steps_of(STAGES, FEED, TASK.train.labels, list(batches(np.arange(3), 8)), 8)
    results = [train_step(STAGES, NET, state, batch, step, rate=1e-2) for step in (alone, more)]
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5)


def test_fitting_is_a_function_of_its_keys():
    def losses(order_seed):
        draws = constant_draws(np.array([0, 2, 0, 0]))
        return fitted(draws, FitConfig(epochs=2), order_seed=order_seed).progress.losses

    assert losses(0) == losses(0) != losses(1)


def test_a_loss_that_explodes_stops_with_its_place_and_reaches_no_parameter():
    fitting = SupernetFit(NET, NET.init())
    with pytest.raises(
        FloatingPointError,
        match=r"at step \d of 3 in epoch \d, .* with the architecture adapt:0 new",
    ):
        fitted(
            constant_draws(np.array([1, 2, 0, 0])), FitConfig(epochs=4, learning_rate=1e38), fitting
        )
    assert all(np.isfinite(leaf).all() for leaf in snapshot(fitting.state))


def test_steps_whose_gradient_is_non_finite_can_be_left_out_and_are_counted():
    state = NET.with_learners(NET.init(), [from_strings(["reuse:0", "new", "reuse:0", "reuse:0"])])
    learner = state.learners[1, NEW]
    broken = learner._replace(
        params=learner.params._replace(weight=learner.params.weight.at[0, 0].set(jnp.nan))
    )

    def draws(epoch, steps):
        return np.array([[1, 2 if step == 1 else 0, 0, 0] for step in range(steps)])

    fitting = SupernetFit(NET, state._replace(learners={(1, NEW): broken}))
    result = fitted(draws, FitConfig(epochs=2, non_finite="skip"), fitting)
    progress, state = result.progress, result.state
    assert progress.skipped == 2 and progress.step == 6 and np.isfinite(progress.losses).all()
    # Adam's own counts of steps
    assert jax.tree.leaves(state.head.adam)[0] == 4
    assert jax.tree.leaves(state.learners[1, NEW].adam)[0] == 0
    assert np.isfinite(snapshot(state.head)[0]).all()


def test_a_phase_in_which_no_step_counts_stops_even_if_such_steps_can_be_left_out():
    state = NET.init()
    bias = state.head.params.bias.at[0].set(jnp.inf)
    state = state._replace(head=state.head._replace(params=state.head.params._replace(bias=bias)))
    with pytest.raises(FloatingPointError, match="at step 1 of 3 in epoch 1"):
        config = FitConfig(epochs=2, non_finite="skip")
        fitted(constant_draws(np.array([1, 2, 0, 0])), config, SupernetFit(NET, state))


@pytest.mark.parametrize("stop_at", [1, 3, 4, 6])
def test_a_fit_that_resumes_ends_as_one_that_was_not_stopped(stop_at):
    def draws(epoch, steps):
        return np.random.default_rng(epoch).integers(0, 4, (steps, 4))

    expected = fitted(draws, FitConfig(epochs=2))

    class Enough(Exception):
        pass

    saved = []

    def stop(fitting):
        if fitting.progress.step == stop_at:
            saved.append(jax.tree.map(np.array, NET.arrays(fitting.state)))
            saved.append(fitting.progress._replace(running=fitting.progress.running_losses()))
            raise Enough

    with pytest.raises(Enough):
        fitted(draws, FitConfig(epochs=2), on_step=stop)
    arrays, progress = saved
    resumed = SupernetFit(NET, NET.from_arrays(arrays), restored(progress.meta(), progress.running))
    result = fitted(draws, FitConfig(epochs=2), resumed)
    assert result.progress.losses == expected.progress.losses
    assert result.progress.step == expected.progress.step == 6
    chex.assert_trees_all_equal(result.state, expected.state)


def test_the_rate_follows_a_cosine_of_all_steps():
    config = FitConfig(epochs=2)
    assert learning_rate_at(config, 0, 10) == 1e-3
    assert learning_rate_at(config, 5, 10) == pytest.approx(5e-4)
    assert learning_rate_at(config, 10, 10) == pytest.approx(0)
    assert learning_rate_at(FitConfig(epochs=2, schedule="constant"), 9, 10) == 1e-3


def test_a_warm_start_raises_the_learning_rate_in_a_tenth_of_the_steps():
    config = FitConfig(epochs=2, schedule="warm_cosine")
    rates = [learning_rate_at(config, step, 40) for step in range(41)]
    np.testing.assert_allclose(rates[:5], [2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[22] == pytest.approx(5e-4) and rates[40] == pytest.approx(0)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    plain = [learning_rate_at(FitConfig(epochs=2), step, 9) for step in range(9)]
    # phases of less than ten steps have no step to spare
    assert [learning_rate_at(config, step, 9) for step in range(9)] == plain


def test_an_epoch_explores_or_exploits_as_a_whole():
    exploit = np.array([[1.0, 0, 0, 0]] * 4)
    uniform = np.full((4, 4), 0.25)
    keys = jax.random.key(0), jax.random.key(1)
    draws = supernet_draws(*keys, exploit=exploit, uniform=uniform, epsilon=0.3)
    explored = [bool(draws(epoch, 20).any()) for epoch in range(200)]
    uniform_epochs = np.flatnonzero(explored)
    assert len({draws(int(epoch), 20).tobytes() for epoch in uniform_epochs}) == sum(explored)
    assert 0.2 < np.mean(explored) < 0.4
    np.testing.assert_array_equal(draws(3, 20), draws(3, 20))
    never = supernet_draws(*keys, exploit=exploit, uniform=uniform, epsilon=0.0)
    assert not any(never(epoch, 20).any() for epoch in range(50))


@pytest.mark.parametrize(
    "make",
    [
        lambda: FitConfig(epochs=0),
        lambda: FitConfig(1, learning_rate=0),
        lambda: ExplorationConfig(epsilon=2),
        lambda: OpSettings(new_rate=0),
    ],
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"is (0|2)"):
        make()


def test_features_below_the_first_trained_block_are_cached_and_change_nothing():
    outcome = {}
    for budget in (0, 2**20):
        room = Budget(budget)
        codes = np.array([0, 3, 1, 0])  # reuse, skip, adapt, reuse
        prefix = frozen_prefix(NET, from_strings(["reuse:0", "skip", "adapt:0", "reuse:0"]))
        assert [step.expert is None for step in prefix] == [False, True]
        sizes = []
        feed = cache_tokens(
            "tokens",
            STAGES,
            FEED,
            40,
            prefix,
            batch_size=16,
            budget=room,
            advance=lambda num_images, note="", /, sizes=sizes: sizes.append(num_images),
        )
        assert sizes == ([16, 16, 8] if budget else [])  # a stop is possible after each batch
        assert (feed is FEED) == (budget == 0) and len(room.refused) == (budget == 0)
        result = fitted(constant_draws(codes), FitConfig(epochs=2), feed=feed)
        outcome[budget] = result.progress.losses, result.state
    chex.assert_trees_all_equal(outcome[0], outcome[2**20])


def test_if_nothing_else_learns_the_head_alone_is_trained_on_cached_features():
    prefix = frozen_prefix(NET, from_strings(["reuse:0", "skip", "reuse:0", "reuse:0"]))
    feed = cache_tokens("tokens", STAGES, FEED, 40, prefix, batch_size=16, budget=Budget(2**20))
    (tokens,) = feed.follow([np.arange(40)])
    assert tokens.block == 4 and tokens.values.shape == (40, 1, 16)  # the class token alone
    result = fitted(
        constant_draws(np.array([0, 3, 0, 0])), FitConfig(epochs=8, learning_rate=1e-2), feed=feed
    )
    losses = result.progress.losses
    assert losses[-1] < 0.6 * losses[0] and not result.state.learners


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("", "memory.max"),  # a container sees its own group at the mount point
        ("", "memory/memory.limit_in_bytes"),
        ("0::/jobs/7/step", "jobs/7/step/memory.max"),
        ("0::/jobs/7/step", "jobs/7/memory.max"),  # a limit of the group above
        ("3:cpu:/other\n2:hugetlb,memory:/jobs/7", "memory/jobs/7/memory.limit_in_bytes"),
    ],
)
def test_memory_is_at_most_a_quarter_of_the_containers_or_jobs(
    tmp_path, monkeypatch, membership, file
):
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership)
    limit, other = tmp_path / "cgroup" / file, tmp_path / "cgroup/other/memory.max"
    for place in (limit, other):
        place.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("1\n")  # of a group without this process
    limit.write_text("max\n")
    whole = machine.host_memory()
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit.write_text(f"{2**28}\n")
    assert machine.host_memory() == 2**28 and memory_budget(None) == 2**26
    limit.write_text(f"{2**63}\n")  # as cgroups 1 write no limit
    assert machine.host_memory() == whole


def test_memory_is_a_quarter_of_the_devices_unless_set():
    assert memory_budget(0.5) == 2**29 and memory_budget(0) == 0
    assert 2**28 < memory_budget(None) < 2**45
    for wrong in (-1, float("inf"), float("nan"), 1e300):
        with pytest.raises(ValueError, match=f"memory_gb is {re.escape(str(wrong))}; expected 0"):
            memory_budget(wrong)


def test_prefetched_batches_arrive_in_order_and_their_errors_reach_the_reader():
    assert list(prefetch(ONE, iter(range(7)))) == list(range(7))

    def failing():
        yield 1
        raise OSError("the disk is gone")

    result = prefetch(ONE, failing())
    assert next(result) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(result)


def test_losses_and_correct_predictions_are_those_of_the_given_head():
    state = fitted(constant_draws(np.array([0, 2, 1, 0])), FitConfig(epochs=2)).state
    genomes = np.array([[0, 3, 1, 0], [2, 0, 1, 3], [1, 1, 1, 1]])
    data = (FEED, TASK.train.labels)
    head = NET.trained_head(state)
    scored = head_losses(STAGES, NET, state, head, *data, batch_size=16)(genomes)
    right = supernet_score(STAGES, NET, state, *data, batch_size=16)(genomes)
    np.testing.assert_array_equal(scored.correct.sum(axis=1), right)
    assert len(np.unique(right)) > 1
    # of three classes, the predicted one has at least a third of the probability, and no other one
    # has more than half
    assert (scored.values[scored.correct] <= np.log(3)).all() and (scored.values > 0).all()
    assert (scored.values[~scored.correct] >= np.log(2)).all()


def test_a_search_keeps_dense_weights_of_the_latest_genomes_only(monkeypatch):
    merged = []

    def counted(expert, pair):
        merged.append(pair)
        return merge_dense(expert, pair)

    monkeypatch.setattr(training, "merge_dense", counted)
    score = supernet_score(STAGES, NET, NET.init(), FEED, TASK.train.labels, batch_size=16)
    numbers = []
    for codes in ([1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]):
        score(np.array([codes]))
        numbers.append(len(merged))
    # candidates of the previous call are merged already, earlier ones are merged again
    assert numbers == [2, 3, 3, 4]


def test_an_accelerator_computes_the_same_in_larger_calls_with_tokens_stored_on_the_device():
    """Runs the accelerator's code on a CPU: tokens are written on the device, in separate sizes,
    and gathered there."""
    result = {}
    for device in (CPU, Device(is_host=False, forward_sizes=(24, 32))):
        one = Stages(small.backbone(), "mlp_down", device=device)
        budget = Budget(2**20)
        feed = cache_tokens(
            "tokens",
            one,
            feed_images(one, TASK.train.images, budget),
            40,
            (),
            batch_size=16,
            budget=budget,
        )
        state = fitted(
            constant_draws(np.array([1, 2, 1, 2])), FitConfig(epochs=2), feed=feed, one=one
        )
        genomes = np.array([[1, 2, 1, 2], [1, 0, 1, 3], [0, 2, 0, 0]])
        right = supernet_score(one, NET, state.state, feed, TASK.train.labels, batch_size=16)(
            genomes
        )
        learners = [state.state.learners[place].params for place in sorted(state.state.learners)]
        result[device.is_host] = state.progress.losses, right, learners
        assert isinstance(feed, Cached)
        assert budget.used == (
            40 * 5 * 16 * 4 + (0 if device.is_host else TASK.train.images.nbytes)
        )
        assert one.forward_rows(16, 40) == (16 if device.is_host else 24)
    np.testing.assert_allclose(result[True][0], result[False][0], rtol=1e-5)
    np.testing.assert_array_equal(result[True][1], result[False][1])
    assert len(result[True][2]) == 4
    chex.assert_trees_all_close(result[True][2], result[False][2], rtol=1e-4, atol=1e-6)


def test_a_full_device_caches_nothing_more():
    def fail(text):
        raise jax.errors.JaxRuntimeError(text)

    budget = Budget(2**30)
    assert budget.make("first", 2**28, lambda: 1) == 1
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
    assert budget.make("second", 2**28, lambda: fail(full)) is None
    assert budget.refused == ["second, 0.25 GB next to 0.25 GB cached"]
    assert budget.make("third", 1, lambda: 1) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        budget.make("fourth", 0, lambda: fail("INTERNAL: another error"))
