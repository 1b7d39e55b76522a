"""The whole method on tasks that take seconds: nothing an earlier task needs ever changes."""

import dataclasses
import itertools
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
import small

from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.baselines.frozen_linear import fit_head
from cheem_jax.cheem import hee
from cheem_jax.cheem import learner as learner_module
from cheem_jax.cheem.config import PAPER, PRESETS, QUICK
from cheem_jax.cheem.elimination import Eliminated
from cheem_jax.cheem.evolution import Scored, Searched
from cheem_jax.cheem.expert_memory import Underway, task_network
from cheem_jax.cheem.learner import Cheem, expected_seconds
from cheem_jax.core.device import ACCELERATOR
from cheem_jax.core.keys import Keys
from cheem_jax.core.pool import dense_expert
from cheem_jax.data.demo import demo_stream
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import token_means
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import Backbone, FrozenFeatures
from cheem_jax.run.session import Session
from cheem_jax.run.training import FitState


def learner(config=small.QUICK, stages=None, key=0, base_means=None):
    stages = stages or Stages(small.backbone(), config.placement, token=config.token)
    return Cheem(stages, config, Keys(key), base_means, FrozenFeatures(stages, config.batch_size))


def predicted(cheem, index, task):
    """Return the predicted classes of the test images, given the task ID."""
    return cheem.predict(task.test.images, np.full(len(task.test.labels), index)).classes


def leaves_of(memory, index):
    """Return every array that task `index` needs."""
    task = memory.tasks[index]
    experts = [
        dense_expert(memory.pool[block], e) for block, e in enumerate(task.experts) if e is not None
    ]
    return [
        np.array(leaf) for leaf in jax.tree.leaves((experts, task.head, task.means, task.centroids))
    ]


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_the_router_is_fitted_to_features_of_images_and_not_of_rounded_tokens(precision):
    device = dataclasses.replace(ACCELERATOR, attention="xla")
    vit = small.backbone(precision=precision)
    cheem = learner(stages=Stages(vit, "mlp_down", device=device))
    images = (task := small.task("a", 0)).train.images
    cheem.similarity(cheem.begin(task, Session()))  # a pass over cached tokens
    exact = Backbone(cheem.executor).features(images, batch_size=16)
    np.testing.assert_array_equal(cheem.features(images), exact)


@pytest.mark.parametrize(
    "placement", ["mlp_down", pytest.param("attn_proj", marks=pytest.mark.full)]
)
def test_learning_a_task_changes_no_byte_that_earlier_tasks_need(placement, tmp_path):
    config = dataclasses.replace(small.QUICK, placement=placement)
    cheem = learner(config)
    tasks = small.stream(3).tasks
    snapshots, answers = [], []
    for index, task in enumerate(tasks):
        report = cheem.learn(task, Session())
        cheem.save(tmp_path)
        assert set(report["seconds"]) == {
            "similarity",
            "prepare",
            "supernet",
            "search",
            "finetune",
            "router",
            "keep",
        }
        assert report["searched"] == 12
        for earlier in range(index):
            chex.assert_trees_all_equal(snapshots[earlier], leaves_of(cheem.memory, earlier))
            np.testing.assert_array_equal(
                answers[earlier], predicted(cheem, earlier, tasks[earlier])
            )
        snapshots.append(leaves_of(cheem.memory, index))
        answers.append(predicted(cheem, index, task))

    # the same answers from the checkpoints alone
    opened = learner(config, cheem.executor)
    opened.open(tmp_path)
    for index, task in enumerate(tasks):
        np.testing.assert_array_equal(predicted(opened, index, task), answers[index])


def test_the_expected_time_counts_three_passes_per_training_step_and_one_per_scored_image(
    monkeypatch,
):
    """The clock advances one second per reading, so that eight images need one second."""
    clock = itertools.count().__next__
    monkeypatch.setattr(learner_module, "time", SimpleNamespace(perf_counter=clock))
    config = dataclasses.replace(small.QUICK, batch_size=8)
    task = small.task("colours", 0)
    executor = learner(config).executor
    trained = 3 * len(task.train.labels) * (config.supernet.epochs + config.finetune.epochs)
    searched = len(task.val.labels) * config.search.population * config.search.generations
    assert expected_seconds(executor, config, task) == (trained + searched) / 8

    # after two epochs of the supernet, and after a generation of the search
    steps = -(-len(task.train.labels) // 8)
    underway = Underway(fits={"supernet": FitState(2 * steps)})
    done = 3 * 2 * len(task.train.labels)
    assert (
        expected_seconds(executor, config, task, underway.saved())
        == (trained + searched - done) / 8
    )
    underway.fits = {"supernet": FitState(config.supernet.epochs * steps)}
    underway.searched = Searched(1, Scored(*[np.zeros(1)] * len(Scored._fields)))
    remaining = 3 * len(task.train.labels) * config.finetune.epochs
    remaining += searched - searched // config.search.generations
    assert expected_seconds(executor, config, task, underway.saved()) == remaining / 8

    # changing eight images takes a second as well
    augmented = trained // 3
    assert (
        expected_seconds(executor, dataclasses.replace(config, augment=True), task)
        == (trained + searched + augmented) / 8
    )

    # one of the last two blocks is skipped, so the anchor and two more networks are scored
    anchored = dataclasses.replace(config, sampling="anchored")
    finetuned = 3 * len(task.train.labels) * config.finetune.epochs
    searched_backward = 3 * len(task.val.labels)
    assert expected_seconds(executor, anchored, task) == (finetuned + searched_backward) / 8
    underway = Underway(eliminated=Eliminated(*[np.zeros((1, 4))] * len(Eliminated._fields)))
    searched_backward -= len(task.val.labels)
    assert (
        expected_seconds(executor, anchored, task, underway.saved())
        == (finetuned + searched_backward) / 8
    )


@pytest.mark.full
def test_the_same_seed_learns_the_same_and_another_seed_does_not(tmp_path):
    def memory_of(key):
        cheem = learner(key=key)
        cheem.learn(small.task("colours", 0), Session())
        return cheem.memory

    first, again, other = memory_of(0), memory_of(0), memory_of(1)
    assert first.tasks[0].architecture == again.tasks[0].architecture
    chex.assert_trees_all_equal(leaves_of(first, 0), leaves_of(again, 0))
    assert not np.array_equal(first.tasks[0].head.weight, other.tasks[0].head.weight)


@pytest.mark.full
def test_a_new_task_sees_the_base_neutral_without_means_and_measured_with_them():
    stages = Stages(small.backbone(), "mlp_down")
    neutral = learner(stages=stages)
    first = neutral.learn(small.task("colours", 0), Session())
    assert first["similarity"] == [[0.0] * 4]
    second = neutral.learn(small.task("more", 1), Session())
    assert second["similarity"][0] == [0.0] * 4
    numbers = [s for s in second["similarity"][1] if s is not None]
    assert numbers and max(numbers) <= 1 and min(numbers) >= -1

    means = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    report = learner(stages=stages, base_means=means).learn(small.task("colours", 0), Session())
    assert max(report["similarity"][0]) == 1 and min(report["similarity"][0]) == -1


@pytest.mark.parametrize(
    "removed",
    [
        pytest.param(("skip",), marks=pytest.mark.full),
        ("new", "adapt"),
        pytest.param(("reuse", "adapt", "new"), marks=pytest.mark.full),
    ],
)
def test_no_task_chooses_an_op_that_was_removed(removed):
    cheem = learner(dataclasses.replace(small.QUICK, remove=removed))
    for task in small.stream(2).tasks:
        report = cheem.learn(task, Session())
        assert not {choice.split(":")[0] for choice in report["architecture"]} & set(removed)
        chosen = report["search"]["chosen"]
        assert (
            report["search"]["correct"][chosen]
            == report["validation_accuracy"] * report["search"]["num_images"]
        )


@pytest.mark.parametrize("removed", [("reuse", "adapt", "new", "skip"), ("new", "new")])
def test_removing_every_op_or_one_twice_is_refused(removed):
    with pytest.raises(ValueError, match="remove names"):
        dataclasses.replace(small.QUICK, remove=removed)


@pytest.mark.full
def test_inherited_weights_begin_fine_tuning_where_the_supernet_ended():
    """At a rate of almost nothing, fine-tuning that starts from the supernet's weights ends at the
    supernet's loss; new weights do not."""
    still = dataclasses.replace(small.QUICK.finetune, learning_rate=1e-9)
    last = {}
    for weights in ("initial", "inherited"):
        cheem = learner(dataclasses.replace(small.QUICK, weights=weights, finetune=still))
        report = cheem.learn(small.stream(1).tasks[0], Session())
        last[weights] = report["finetune_losses"][-1]
        trained = report["supernet_losses"]
    assert last["inherited"] < trained[0] < last["initial"] + 0.5
    assert last["inherited"] < last["initial"] - 0.05


@pytest.mark.full
def test_uniform_sampling_never_asks_the_similarity():
    config = dataclasses.replace(small.QUICK, sampling="uniform")
    means = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    stages = Stages(small.backbone(), "mlp_down")
    one, other = (learner(config, stages, base_means=m) for m in (means, -means))
    task = small.task("colours", 0)
    assert (
        one.learn(task, Session())["architecture"] == other.learn(task, Session())["architecture"]
    )


@pytest.mark.full
def test_a_recoloured_task_is_more_similar_to_its_original_than_an_unrelated_one():
    """Planted variant in the demo stream, encoded by the bundled backbone: raw cosine of mean CLS
    tokens, all blocks."""
    stream = demo_stream(num_train=64, num_val=16, num_test=16)
    loaded = load_pretrained("vit_micro")
    stages = Stages(build(loaded.config, loaded.params), "mlp_down")
    network = task_network([[block[0].params] for block in stages.base_pool], (0,) * 8)
    means = {
        task.name: (
            token_means(
                stages,
                [network],
                HostImages(stages, task.train.images),
                64,
                batch_size=64,
                advance=lambda num, note="": None,
            ).means
        )
        for task in stream.tasks
    }
    present = np.ones((1, 8), bool)
    similarity = {
        name: hee.cosines(means["shapes"], mean, present).mean()
        for name, mean in means.items()
        if name != "shapes"
    }
    assert max(similarity, key=similarity.get) == "shapes_recoloured"


@pytest.mark.full
def test_a_lighter_router_stores_centroids_of_the_lighter_features():
    stages, lighter = Stages(small.backbone(), "mlp_down"), Stages(small.backbone(5), "mlp_down")
    cheem = Cheem(stages, small.QUICK, Keys(0), None, FrozenFeatures(lighter, 16))
    method = learner(stages=stages)
    task = small.task("colours", 0)
    cheem.learn(task, Session())
    method.learn(task, Session())
    assert not np.allclose(cheem.memory.tasks[0].centroids, method.memory.tasks[0].centroids)
    np.testing.assert_array_equal(
        cheem.memory.tasks[0].head.weight, method.memory.tasks[0].head.weight
    )


def test_a_ridge_head_of_two_classes_answers_like_scikit_learn():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    labels = (x[:, 0] + 0.3 * rng.normal(size=60) > 0).astype(np.int32)
    (weight, bias), _ = fit_head(x[:40], labels[:40], x[40:], labels[40:])
    assert weight.shape == (5, 2)
    assert ((x @ weight + bias).argmax(axis=1) == labels).mean() > 0.8


def test_no_feature_of_an_earlier_task_is_kept():
    stages = Stages(small.backbone(), "mlp_down")
    features = FrozenFeatures(stages, 16)
    task = small.task("colours", 0)
    images = [split.images for split in task.splits.values()]
    for each in images:
        features(each)
    features.forget(task)
    assert [features.has(each) for each in images] == [False, False, True]


def test_features_are_cached_per_images_while_these_exist():
    features = FrozenFeatures(Stages(small.backbone(), "mlp_down"), 16)
    first, other = small.task("colours", 0), small.task("colours", 1)
    cached = features(first.test.images)
    assert features(first.test.images) is cached
    assert np.abs(features(other.test.images) - cached).max() > 1e-3
    copied = first.test.images.copy()
    np.testing.assert_array_equal(features(copied), cached)
    num = len(features._cache)
    del copied
    assert len(features._cache) == num - 1


def test_presets_switch_every_part_on():
    assert (PAPER.supernet.epochs, PAPER.finetune.epochs, PAPER.ops.rank, PAPER.batch_size) == (
        50,
        20,
        40,
        64,
    )
    assert PAPER.search.population * PAPER.search.generations == 1000
    assert (PAPER.exploration.epsilon, PAPER.search.epsilon, PAPER.search.tolerance) == (
        0.3,
        0.5,
        0.02,
    )
    assert QUICK.supernet.epochs >= 8 and QUICK.finetune.epochs >= 8
    assert QUICK.search.population * QUICK.search.generations >= 160
    assert set(PRESETS) == {"paper", "quick", "demo", "cheem_plus", "quick_plus"}
    for name, plain, epochs in (("cheem_plus", PAPER, 70), ("quick_plus", QUICK, 16)):
        plus = PRESETS[name]
        changed = {key for key in vars(plain) if getattr(plus, key) != getattr(plain, key)}
        assert changed == {"ops", "sampling", "finetune", "fallback", "router"}
        assert plus.router.kind == "lda" and plus.finetune.epochs == epochs
