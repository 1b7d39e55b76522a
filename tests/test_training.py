"""What a step touches, and what fitting does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from cheem_jax.architecture import from_strings
from cheem_jax.execution.executor import Batch
from cheem_jax.execution.feed import Budget, HostImages, ahead, keep_tokens, memory_budget
from cheem_jax.execution.layout import ONE
from cheem_jax.execution.stages import Stages
from cheem_jax.supernet import OpSettings, Supernet
from cheem_jax.training import (
    ExplorationConfig,
    FitConfig,
    FitState,
    constant_draws,
    fit,
    frozen_prefix,
    learning_rate_at,
    supernet_draws,
)

STAGES = Stages(small.backbone(), "mlp_down")
TASK = small.task("colours", 0)
STEP = [Batch(STAGES.begin(TASK.train.images[:16]), TASK.train.labels[:16], np.full(16, 1 / 16, np.float32))]
FEED = HostImages(STAGES, TASK.train.images)


def supernet(num_classes=3):
    return Supernet(jax.random.key(1), STAGES.base_pool, num_classes, OpSettings(rank=2))


def snapshot(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def test_an_op_that_is_not_drawn_keeps_parameters_moments_and_step_count():
    net = supernet()
    drawn, other = (
        from_strings(["adapt:0", "new", "skip", "adapt:0"]),
        from_strings(["new", "new", "skip", "reuse:0"]),
    )
    STAGES.train(net, [drawn], [STEP], [1e-2])
    kept = snapshot(net.learners[0, 1]) + snapshot(net.learners[3, 1])
    shared = net.learners[1, 2]
    STAGES.train(net, [other], [STEP], [1e-2])
    chex.assert_trees_all_equal(kept, snapshot(net.learners[0, 1]) + snapshot(net.learners[3, 1]))
    assert int(net.learners[3, 1].adam.count) == 1
    assert int(net.learners[1, 2].adam.count) == 2
    assert not np.array_equal(net.learners[1, 2].params.weight, shared.params.weight)
    assert int(net.head.adam.count) == 2


def test_a_candidate_starts_the_same_whenever_it_is_first_drawn():
    early, late = supernet(), supernet()
    STAGES.train(late, [from_strings(["new"] * 4)], [STEP], [1e-2])
    choice = from_strings(["adapt:0"])[0]
    np.testing.assert_array_equal(early.learner(2, choice).params.down, late.learner(2, choice).params.down)
    assert len(early.learners) == 1  # nothing is made before it is drawn


def test_the_first_adam_step_moves_every_entry_by_the_rate():
    net = supernet()
    before = np.array(net.head.params.weight)
    STAGES.train(net, [from_strings(["reuse:0"] * 4)], [STEP], [1e-2])
    moved = np.abs(np.array(net.head.params.weight) - before)[:, :3]
    np.testing.assert_allclose(moved, 1e-2, rtol=1e-2)


def test_frozen_experts_are_never_updated():
    net = supernet()
    before = snapshot(net.experts)
    for _ in range(3):
        STAGES.train(net, [from_strings(["adapt:0", "reuse:0", "new", "skip"])], [STEP], [1e-1])
    chex.assert_trees_all_equal(before, snapshot(net.experts))


def test_fitting_learns_an_easy_task_and_reports_every_image():
    net, seen = supernet(), []
    result = fit(
        jax.random.key(0), STAGES, net, TASK.train.labels, FEED, constant_draws(np.array([0, 1, 0, 0])),
        FitConfig(epochs=6, learning_rate=1e-2), batch_size=16, advance=lambda num, note="": seen.append(num),
    )  # fmt: skip
    assert sum(seen) == 6 * 40 and len(result.losses) == 6 and result.skipped == 0
    assert result.losses[-1] < 0.5 * result.losses[0]


def test_fitting_is_a_function_of_its_keys():
    def losses(order_seed):
        net = supernet()
        return fit(
            jax.random.key(order_seed), STAGES, net, TASK.train.labels, FEED, constant_draws(np.array([0, 2, 0, 0])),
            FitConfig(epochs=2), batch_size=16, advance=lambda num, note="": None,
        ).losses  # fmt: skip

    assert losses(0) == losses(0) != losses(1)


def test_a_loss_that_explodes_stops_with_its_place_and_reaches_no_parameter():
    net = supernet()
    with pytest.raises(FloatingPointError, match=r"at step \d of 3 in epoch \d, .* with the architecture adapt:0 new"):
        fit(
            jax.random.key(0), STAGES, net, TASK.train.labels, FEED, constant_draws(np.array([1, 2, 0, 0])),
            FitConfig(epochs=4, learning_rate=1e38), batch_size=16, advance=lambda num, note="": None,
        )  # fmt: skip
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((snapshot(net.learners), snapshot(net.head))))


def test_steps_whose_gradient_is_no_finite_number_can_be_left_out_and_are_counted():
    net, clean = supernet(), supernet()
    for one in (net, clean):  # New of block 1 exists before it is drawn
        one.learner(1, from_strings(["reuse:0", "new"])[1])
    learner = net.learners[1, 2]
    broken = learner._replace(params=learner.params._replace(weight=learner.params.weight.at[0, 0].set(jnp.nan)))
    net.learners[1, 2] = broken

    def draws(epoch, steps):
        return np.array([[1, 2 if step == 1 else 0, 0, 0] for step in range(steps)])

    config = FitConfig(epochs=2, non_finite="skip")
    state = fit(
        jax.random.key(0), STAGES, net, TASK.train.labels, FEED, draws, config, batch_size=16,
        advance=lambda num, note="": None,
    )  # fmt: skip
    assert state.skipped == 2 and state.step == 6 and np.isfinite(state.losses).all()
    # Adam's own counts of steps
    assert jax.tree.leaves(net.head.adam)[0] == 4 and jax.tree.leaves(net.learners[1, 2].adam)[0] == 0
    assert np.isfinite(snapshot(net.head)[0]).all()


def test_a_phase_in_which_no_step_counts_stops_even_if_such_steps_may_be_left_out():
    net = supernet()
    net.head = net.head._replace(params=net.head.params._replace(bias=net.head.params.bias.at[0].set(jnp.inf)))
    with pytest.raises(FloatingPointError, match="at step 1 of 3 in epoch 1"):
        fit(
            jax.random.key(0), STAGES, net, TASK.train.labels, FEED, constant_draws(np.array([1, 2, 0, 0])),
            FitConfig(epochs=2, non_finite="skip"), batch_size=16, advance=lambda num, note="": None,
        )  # fmt: skip


@pytest.mark.parametrize("stop_at", [1, 3, 4, 6])
def test_a_fit_that_goes_on_ends_as_one_that_was_not_stopped(stop_at):
    def draws(epoch, steps):
        return np.random.default_rng(epoch).integers(0, 4, (steps, 4))

    def go(net, state, advance=lambda num, note="": None):
        return fit(
            jax.random.key(0), STAGES, net, TASK.train.labels, FEED, draws, FitConfig(epochs=2), batch_size=16,
            advance=advance, state=state,
        )  # fmt: skip

    whole, stopped, resumed = supernet(), supernet(), supernet()
    expected = go(whole, FitState())

    class Enough(Exception):
        pass

    kept = {}

    def stop(num, note=""):
        if state.step == stop_at:
            arrays = jax.tree.map(np.array, stopped.arrays())
            kept.update(
                arrays=arrays, step=state.step, losses=list(state.losses), running=list(map(float, state.running))
            )
            raise Enough

    state = FitState()
    with pytest.raises(Enough):
        go(stopped, state, stop)
    resumed.restore(kept.pop("arrays"))
    found = go(resumed, FitState(**kept))
    assert found.losses == expected.losses and found.step == expected.step == 6
    chex.assert_trees_all_equal((resumed.learners, resumed.head), (whole.learners, whole.head))


def test_the_rate_follows_a_cosine_of_all_steps():
    config = FitConfig(epochs=2)
    assert learning_rate_at(config, 0, 10) == 1e-3
    assert learning_rate_at(config, 5, 10) == pytest.approx(5e-4)
    assert learning_rate_at(config, 10, 10) == pytest.approx(0)
    assert learning_rate_at(FitConfig(epochs=2, schedule="constant"), 9, 10) == 1e-3


def test_an_epoch_explores_or_exploits_as_a_whole():
    exploit, uniform = np.array([[1.0, 0, 0, 0]] * 4), np.full((4, 4), 0.25)
    draws = supernet_draws(jax.random.key(0), jax.random.key(1), exploit, uniform, 0.3)
    explored = [bool(draws(epoch, 20).any()) for epoch in range(200)]
    assert 0.2 < np.mean(explored) < 0.4
    np.testing.assert_array_equal(draws(3, 20), draws(3, 20))
    never = supernet_draws(jax.random.key(0), jax.random.key(1), exploit, uniform, 0.0)
    assert not any(never(epoch, 20).any() for epoch in range(50))


@pytest.mark.parametrize(
    "make",
    [lambda: FitConfig(epochs=0), lambda: FitConfig(1, learning_rate=0), lambda: ExplorationConfig(epsilon=2)],
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ValueError, match=r"is (0|2)"):
        make()


def test_what_fine_tuning_leaves_unchanged_is_kept_and_changes_nothing():
    found = {}
    for budget in (0, 2**20):
        net, room = supernet(), Budget(budget)
        codes = np.array([0, 3, 1, 0])  # reuse, skip, adapt, reuse
        prefix = frozen_prefix(net, from_strings(["reuse:0", "skip", "adapt:0", "reuse:0"]))
        assert [step.expert is None for step in prefix] == [False, True]
        feed = keep_tokens("tokens", STAGES, FEED, 40, prefix, batch_size=16, budget=room)
        assert (feed is FEED) == (budget == 0) and room.refused == ([] if budget else ["tokens"])
        state = fit(
            jax.random.key(0), STAGES, net, TASK.train.labels, feed, constant_draws(codes),
            FitConfig(epochs=2), batch_size=16, advance=lambda num, note="": None,
        )  # fmt: skip
        found[budget] = state.losses, snapshot(net.learners), snapshot(net.head)
    chex.assert_trees_all_equal(found[0], found[2**20])


def test_where_nothing_else_learns_the_head_alone_is_trained_on_kept_features():
    net, room = supernet(), Budget(2**20)
    prefix = frozen_prefix(net, from_strings(["reuse:0", "skip", "reuse:0", "reuse:0"]))
    feed = keep_tokens("tokens", STAGES, FEED, 40, prefix, batch_size=16, budget=room)
    tokens = feed(np.arange(40))
    assert tokens.block == 4 and tokens.values.shape == (40, 1, 16)  # the class token alone
    losses = fit(
        jax.random.key(0), STAGES, net, TASK.train.labels, feed, constant_draws(np.array([0, 3, 0, 0])),
        FitConfig(epochs=8, learning_rate=1e-2), batch_size=16, advance=lambda num, note="": None,
    ).losses  # fmt: skip
    assert losses[-1] < 0.6 * losses[0] and not net.learners


def test_memory_is_a_quarter_of_the_devices_unless_set():
    assert memory_budget(0.5) == 2**29 and memory_budget(0) == 0
    assert 2**28 < memory_budget(None) < 2**45
    with pytest.raises(ValueError, match="memory_gb is -1"):
        memory_budget(-1)


def test_work_prepared_ahead_comes_in_order_and_its_errors_reach_the_one_who_waits():
    assert list(ahead(ONE, iter(range(7)))) == list(range(7))

    def failing():
        yield 1
        raise OSError("the disk is gone")

    found = ahead(ONE, failing())
    assert next(found) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
