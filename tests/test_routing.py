"""Routers: their formulas, the statistics of a task, the features they read, memories that use
them."""

import dataclasses
from pathlib import Path

import chex
import exporting
import jax
import numpy as np
import pytest
import small
from baselines import check_method, learner, stages
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.preprocessing import normalize
from test_memory import begin

import cheem_jax
from cheem_jax.backbone import flops
from cheem_jax.backbone.alexnet import AlexNetConfig, PretrainedAlexNet
from cheem_jax.backbone.config import find_config
from cheem_jax.baselines.frozen_linear import FrozenLinear, FrozenLinearConfig
from cheem_jax.baselines.lora_cl import LoraCl, LoraClConfig
from cheem_jax.baselines.s_prompts import SPromptsConfig
from cheem_jax.cheem.expert_memory import ExpertMemory
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.info import Info, show_info
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Reuse, init_new
from cheem_jax.core.pool import InternalMemory
from cheem_jax.core.routing import (
    PAPER,
    SMALLEST,
    Router,
    RouterConfig,
    TaskStatistics,
    calibrate,
    centroid_distances,
    fit_centroids,
    fit_statistics,
    join_tokens,
    normalise,
    num_stored,
    packed,
    rejection_scores,
    threshold,
    unpacked,
)
from cheem_jax.core.settings import FitConfig
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.executor import Dense
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.inference import Inference
from cheem_jax.engine.passes import network_features
from cheem_jax.engine.scan import Scan
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole
from cheem_jax.run.checkpoint import load_task, saved_tasks
from cheem_jax.run.method import Backbone, FrozenFeatures, base_network
from cheem_jax.run.session import Session
from cheem_jax.run_config import make_networks

KINDS = ("kmeans", "lda")
WIDTH = 6
EARLY = RouterConfig("lda", "early")
IMAGES = (
    np.random.default_rng(0).integers(0, 256, (37, 8, 8, 3), dtype=np.uint8)
    // np.arange(1, 38, dtype=np.uint8)[:, None, None, None]
)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Compiled functions run a few times on a few pixels here: optimising them is the slow part."""
    jax.config.update("jax_disable_most_optimizations", True)
    with small.shared_executors():
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def sampled_task(num_images: int, num_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features around the mean of each class, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(num_images, dtype=np.int32) % num_classes
    means = rng.normal(size=(num_classes, WIDTH))
    features = means[labels] + 0.4 * rng.normal(size=(num_images, WIDTH))
    return features.astype(np.float32), labels


TASKS = (sampled_task(30, 3, 0), sampled_task(50, 2, 1), sampled_task(20, 1, 2))
QUERIES = np.random.default_rng(9).normal(size=(25, WIDTH)).astype(np.float32)


def statistics_of(config: RouterConfig, tasks=TASKS) -> tuple[TaskStatistics, ...]:
    return tuple(fit_statistics(*task, config, seed=index) for index, task in enumerate(tasks))


def arrays_of(task: TaskStatistics) -> list[np.ndarray]:
    return [task.centroids, *(task.moments[name] for name in sorted(task.moments))]


# ---- formulas


def test_lda_compares_mahalanobis_distances_under_the_mean_covariance_of_the_tasks():
    means, scatters = [], []
    for features, labels in TASKS:
        points = features.astype(float)
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        means.append(np.stack([points[labels == c].mean(axis=0) for c in range(labels.max() + 1)]))
        residuals = points - means[-1][labels]
        scatters.append(residuals.T @ residuals / len(points))
    scatter = np.mean(scatters, axis=0)
    shrunk = 0.9 * scatter + 0.1 * np.trace(scatter) / WIDTH * np.eye(WIDTH)
    inverse = np.linalg.inv(shrunk)
    expected = [cdist(normalise(QUERIES), m, "mahalanobis", VI=inverse).min(axis=1) for m in means]
    config = RouterConfig("lda", shrinkage=0.1)
    router = Router(config, statistics_of(config))
    np.testing.assert_allclose(router.distances(QUERIES), np.stack(expected, axis=1), rtol=1e-4)
    np.testing.assert_array_equal(router.route(QUERIES), np.argmin(expected, axis=0))


@pytest.mark.parametrize("shrinkage", [SMALLEST, 1e-4])
def test_a_covariance_that_is_rounded_to_float32_is_invertible_at_every_shrinkage(shrinkage):
    rng = np.random.default_rng(0)
    # fewer points than features, and nearly all of the variance in one direction
    points = 1 + rng.standard_normal((100, 1)) * rng.standard_normal((1, 384))
    points = (points + 0.01 * rng.standard_normal(points.shape)).astype(np.float32)
    config = RouterConfig("lda", shrinkage=shrinkage)
    statistics = fit_statistics(points, np.arange(100, dtype=np.int32) % 2, config, seed=0)
    assert np.isfinite(Router(config, (statistics,)).distances(points)).all()


def test_lda_routes_to_the_task_of_the_class_that_scikit_learn_predicts():
    tasks = [sampled_task(60, 3, seed) for seed in range(3)]  # classes and tasks of equal size
    config = RouterConfig("lda", shrinkage=0.1)
    points = normalize(np.concatenate([features for features, _ in tasks]).astype(float))
    classes = np.concatenate([3 * task + labels for task, (_, labels) in enumerate(tasks)])
    lda = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1, priors=[1 / 9] * 9)
    predictions = lda.fit(points, classes).predict(normalize(QUERIES.astype(float)))
    router = Router(config, statistics_of(config, tasks))
    np.testing.assert_array_equal(router.route(QUERIES), predictions // 3)
    assert len(set(predictions // 3)) == 3


def test_k_means_routes_to_the_nearest_of_the_centroids_of_scikit_learn():
    config = RouterConfig(num_centroids=4)
    centroids = []
    for task, (features, _) in enumerate(TASKS):
        kmeans = KMeans(4, n_init=10, random_state=task).fit(normalize(features))
        centroids.append(kmeans.cluster_centers_)
    points = normalize(QUERIES)
    expected = [
        [min(np.abs(point - row).sum() for row in rows) for rows in centroids] for point in points
    ]
    router = Router(config, statistics_of(config))
    np.testing.assert_allclose(router.distances(QUERIES), expected, rtol=1e-5)
    np.testing.assert_array_equal(router.route(QUERIES), np.argmin(expected, axis=1))


def test_a_threshold_rejects_the_given_share_of_a_tasks_images():
    distances = np.random.default_rng(0).exponential(size=2000).astype(np.float32)
    for rate in (0.05, 0.3):
        assert (distances > threshold(calibrate(distances), rate)).mean() == pytest.approx(
            rate, abs=2e-3
        )
    steps = np.linspace(0, 1, 201, dtype=np.float32)  # the quantile q of these distances is q
    assert threshold(steps, 0.1) == pytest.approx(0.9)


def test_a_rejection_score_is_the_share_of_nearer_images_also_of_equal_distances():
    cases = [np.array([0.5]), np.repeat([0.25, 0.5], 10), np.arange(1, 41) / 40]
    for distances in (case.astype(np.float32) for case in cases):
        quantiles = calibrate(distances)
        scores = rejection_scores(distances, quantiles)
        nearer = (distances[None] < distances[:, None]).mean(axis=1)
        np.testing.assert_allclose(
            scores, nearer, atol=1 / len(distances) if len(distances) > 20 else 0.03
        )
        for rate in (0.05, 0.3):
            rejected = distances > threshold(quantiles, rate)
            np.testing.assert_array_equal(scores > 1 - rate, rejected)


def test_the_papers_router_is_k_means_and_the_nearest_centroid_to_the_bit():
    (config,) = {PAPER, RouterConfig(), RouterConfig("kmeans", "last", 5)}
    statistics = statistics_of(config)
    centroids = [fit_centroids(features, 5, seed=i) for i, (features, _) in enumerate(TASKS)]
    for task, expected in zip(statistics, centroids, strict=True):
        np.testing.assert_array_equal(task.centroids, expected)
        assert not task.moments
    expected = [cdist(normalise(QUERIES), rows, "cityblock").min(axis=1) for rows in centroids]
    router = Router(config, statistics)
    np.testing.assert_array_equal(router.distances(QUERIES), np.stack(expected, axis=1))
    np.testing.assert_array_equal(router.distances(QUERIES), centroid_distances(QUERIES, centroids))


# ---- laws


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_that_grows_task_by_task_is_the_router_of_all_tasks(kind):
    config = RouterConfig(kind)
    statistics = statistics_of(config)
    copies = [[values.copy() for values in arrays_of(task)] for task in statistics]
    router = Router(config)
    for num in (1, 2, 3):
        router = router.follow(statistics[:num])
        router.distances(QUERIES)
    chex.assert_trees_all_equal([arrays_of(task) for task in statistics], copies)
    expected = Router(config, statistics).distances(QUERIES)
    np.testing.assert_array_equal(router.distances(QUERIES), expected)
    # and without one of them, as after forgetting
    rest = (statistics[0], statistics[2])
    result = router.follow(rest).distances(QUERIES)
    np.testing.assert_array_equal(result, Router(config, rest).distances(QUERIES))


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_images_of_a_batch_do_not_change_a_route(kind):
    router = Router(RouterConfig(kind), statistics_of(RouterConfig(kind)))
    one_by_one = [router.route(QUERIES[i : i + 1])[0] for i in range(len(QUERIES))]
    np.testing.assert_array_equal(router.route(QUERIES), one_by_one)
    assert len(set(one_by_one)) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_lowest_task(kind):
    config = RouterConfig(kind)
    # a matrix product rounds its last columns differently, depending on the processor
    for num in (2, 3, 5, 26):
        router = Router(config, statistics_of(config, TASKS[:1]) * num)
        assert not router.route(QUERIES).any()


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_of_equal_images_and_of_one_class_are_routed_to(kind):
    config = RouterConfig(kind)
    same = np.tile(np.eye(1, WIDTH, dtype=np.float32), (10, 1)), np.zeros(10, np.int32)
    other = -same[0], same[1]
    for tasks in ([same, other], [same, TASKS[2]], [TASKS[0], same, TASKS[1]], [same]):
        router = Router(config, statistics_of(config, tasks))
        assert np.isfinite(router.distances(QUERIES)).all()
        index = [task is same for task in tasks].index(True)
        np.testing.assert_array_equal(router.route(same[0][:1]), [index])


def test_a_symmetric_matrix_is_stored_as_its_upper_triangle_in_float32():
    for size in (1, 2, 3, 16, 45):
        matrix = np.random.default_rng(size).normal(size=(size, size))
        matrix = matrix + matrix.T
        triangle = packed(matrix)
        assert triangle.dtype == np.float32 and len(triangle) == size * (size + 1) // 2
        np.testing.assert_array_equal(unpacked(triangle), matrix.astype(np.float32))
        np.testing.assert_array_equal(packed(unpacked(triangle)), triangle)


@pytest.mark.parametrize("kind", KINDS)
def test_the_statistics_of_a_task_do_not_grow_with_its_images(kind):
    config = RouterConfig(kind, num_centroids=3)
    for task in statistics_of(config, [TASKS[0], sampled_task(300, 3, 3)]):
        assert sum(values.size for values in arrays_of(task)) == num_stored(config, WIDTH, 3)
        assert all(values.dtype == np.float32 for values in arrays_of(task))


# ---- centroids


def test_centroids_are_those_of_normalised_features_and_not_renormalised():
    features = np.array([[3.0, 0.0], [0.0, 2.0]], np.float32)
    np.testing.assert_allclose(fit_centroids(features, 1, seed=0), [[0.5, 0.5]], atol=1e-6)


def test_there_are_at_most_as_many_centroids_as_distinct_features():
    features = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert fit_centroids(features, 5, seed=0).shape == (3, 4)
    assert fit_centroids(np.ones((10, 4), np.float32), 5, seed=0).shape == (1, 4)


def test_a_zero_feature_stays_zero():
    assert not normalise(np.zeros((1, 3), np.float32)).any()


# ---- settings


@pytest.mark.parametrize(
    ("depth", "early", "levels"),
    [(12, (3, 6), (3, 6, 9)), (6, (1, 3), (1, 3, 4)), (3, (0, 1), (0, 1))],
)
def test_mean_patch_tokens_are_read_at_quarters_of_the_depth(depth, early, levels):
    last, first, all_of_it = (
        RouterConfig(features=features) for features in ("last", "early", "levels")
    )
    assert [config.blocks(depth) for config in (last, first, all_of_it)] == [(), early, levels]
    assert [config.until(depth) for config in (last, first, all_of_it)] == [depth, early[-1], depth]
    assert [config.num_parts(depth) for config in (last, first, all_of_it)] == [
        1,
        len(early),
        len(levels) + 1,
    ]


def test_a_backbone_of_two_blocks_has_its_last_class_token_only():
    assert RouterConfig().blocks(2) == () and RouterConfig().until(2) == 2
    for features in ("early", "levels"):
        with pytest.raises(
            ValueError, match=f"{features}' need a backbone with at least 3 blocks, but it has 2"
        ):
            RouterConfig(features=features).blocks(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_centroids": 0}, "num_centroids is 0; expected at least 1"),
        ({"shrinkage": 0.0}, "shrinkage is 0.0; expected a share from 1e-06 to 1"),
        ({"shrinkage": 1.5}, "shrinkage is 1.5; expected"),
    ],
)
def test_senseless_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**settings)


def test_s_prompts_has_its_own_router_and_no_other():
    for router in (RouterConfig("lda"), RouterConfig(features="early")):
        with pytest.raises(
            ValueError, match=rf"{router.kind}.*{router.features}.*S-Prompts requires kmeans"
        ):
            SPromptsConfig(router=router)


@pytest.mark.parametrize("features", ["early", "levels"])
def test_alexnet_has_no_blocks_to_read(features):
    alexnet = PretrainedAlexNet(AlexNetConfig(image_size=64), {}, "made up", "0" * 64)
    method = dataclasses.replace(small.QUICK, router=RouterConfig(features=features))
    with pytest.raises(
        ValueError, match=f"'{features}' require the blocks of a ViT; with alexnet, use `last`"
    ):
        make_networks(small.pretrained(), alexnet, method, EngineConfig())


def test_a_router_is_chosen_on_the_command_line():
    command = [
        "--cheem.router.kind",
        "lda",
        "--cheem.router.features",
        "early",
        "--cheem.router.shrinkage",
        "0.1",
    ]
    assert parse(cheem_run.RunSettings, command).cheem.router == RouterConfig(
        "lda", "early", shrinkage=0.1
    )
    assert parse(cheem_run.RunSettings, []).cheem.router == RouterConfig()


# ---- features that a router reads


@pytest.fixture(scope="module")
def by_hand():
    """Mean patch tokens at each block except the last, and the last class token, keyed by
    placement."""
    vit = small.backbone()

    def tokens(images, placement):
        x = vit.embed(images)
        means = []
        for index, block in enumerate(vit.blocks):
            if index < 3:
                means.append(block.enter(x, placement=placement)[:, 1:].mean(axis=1))
            x, _ = block.run(
                Reuse(block.expert(placement)), x, placement=placement, outputs=vit.outputs(index)
            )
        return means, vit.features(x)

    return {
        placement: jax.device_get(jax.jit(tokens, static_argnums=1)(IMAGES[:6], placement))
        for placement in ("mlp_down", "attn_proj")
    }


@pytest.mark.parametrize(
    "placement", ["mlp_down", pytest.param("attn_proj", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("kind", [Stages, Whole, pytest.param(Scan, marks=pytest.mark.full)])
def test_a_router_reads_the_features_that_the_blocks_compute(by_hand, kind, placement):
    executor = kind(small.backbone(), placement)
    means, last = by_hand[placement]
    wanted = {"early": means[1:3], "levels": [*means[1:3], last]}
    for features, parts in wanted.items():
        encoder = Backbone(executor, RouterConfig(features=features))
        result = encoder.features(IMAGES[:6], batch_size=4)
        assert result.shape == (6, encoder.width) and encoder.width == 16 * len(parts)
        np.testing.assert_allclose(
            result, np.concatenate([normalise(part) for part in parts], axis=1), atol=1e-5
        )
    plain = Backbone(executor).features(IMAGES[:6], batch_size=4)
    np.testing.assert_allclose(plain, last, atol=1e-5)
    assert join_tokens([plain]) is plain


def networks(executor) -> small.Given:
    """Return four networks: one never leaves the base network; the others leave it at block 3,
    behind the features of `early`, at block 2 and at block 0."""
    base = base_network(executor)
    keys = iter(jax.random.split(jax.random.key(1), 2))
    new = [Dense(1, init_new(next(keys), executor.base_pool[block][0].params)) for block in (3, 2)]
    result = [base, [*base[:3], new[0]], [*base[:2], new[1], base[3]], [Dense(-1, None), *base[1:]]]
    return small.Given(result)


@pytest.mark.parametrize("kind", [Stages, pytest.param(Whole, marks=pytest.mark.full)])
@pytest.mark.parametrize("features", ["early", "levels"])
def test_a_shared_pass_answers_as_two_passes_do(kind, features):
    config = RouterConfig("lda", features)
    executor = stages() if kind is Stages else kind(small.backbone(), "mlp_down")
    encoded = FrozenFeatures(Backbone(executor, config), 16)(IMAGES)
    rows = np.array_split(np.arange(len(IMAGES)), 4)
    tasks_seen = [
        (encoded[indices], np.arange(len(indices), dtype=np.int32) % 2) for indices in rows
    ]
    router = Router(config, statistics_of(config, tasks_seen))
    tasks = networks(executor)
    inference = Inference(executor, base_network(executor), tasks, batch_size=16, reads=config)
    assert inference.differences == ([2, 2, 2, 0] if features == "early" else [4, 3, 2, 0])
    features = inference.features(HostImages(executor, IMAGES), len(IMAGES), router.route)
    inferred = router.route(encoded)
    assert set(inferred) == {0, 1, 2, 3}
    for index, network in enumerate(tasks.networks):
        indices = np.flatnonzero(inferred == index)
        feed = HostImages(executor, IMAGES[indices])
        (expected,) = network_features(executor, [network], feed, len(indices), batch_size=16)
        np.testing.assert_allclose(features[indices], expected, atol=1e-5)


# ---- costs


@pytest.mark.parametrize("name", ["siglip_base", "deit_tiny"])
@pytest.mark.parametrize("placement", ["mlp_down", "attn_proj"])
def test_a_pass_that_ends_early_and_the_rest_are_the_backbone(name, placement):
    config = find_config(name)
    base = from_strings(["reuse:0"] * 12)
    whole = flops.executed_backbone_flops(config)
    for count in (False, True):
        early = [
            flops.pass_flops(config, placement, until, count_attention=count) for until in range(13)
        ]
        assert early == sorted(set(early))
        assert early[12] == flops.backbone_flops(config, count_attention=count)
    for until in range(13):
        first = flops.executed_pass_flops(config, placement, until)
        assert first + flops.executed_flops(config, placement, base, begin=until) == whole


def test_a_router_that_reads_early_makes_tasks_cheaper():
    subject = exporting.subject()
    executor = stages()

    def costs(config):
        method = ExpertMemory(
            executor, FrozenFeatures(Backbone(executor, config), 16), config, rank=2, batch_size=16
        )
        method.memory = InternalMemory(subject.pool, subject.tasks)
        return [method.costs(index) for index in range(4)]

    pairs = list(zip(costs(EARLY), costs(RouterConfig("lda")), strict=True))
    assert all(early["flops_method"] < last["flops_method"] for early, last in pairs)
    assert all(early["flops_explicit"] < last["flops_explicit"] for early, last in pairs)
    # the first task runs the whole backbone anyway
    saved = [last["flops_executed"] - early["flops_executed"] for early, last in pairs]
    assert saved[0] == 0 and min(saved[1:]) > 0


# ---- methods


def test_the_frozen_reference_saves_and_opens_moments(tmp_path):
    config = RouterConfig("lda", "early")
    tasks = small.stream(2).tasks
    named = FrozenFeatures(Backbone(stages(), config), 16)
    frozen, again = (
        learner(FrozenLinear, FrozenLinearConfig(config), router_features=named) for _ in range(2)
    )
    for task in tasks:
        report = frozen.learn(task, Session())
        frozen.save(tmp_path)
        place = frozen.tasks[-1]
        assert report["params_stored"] - report["params_learned"] == sum(
            values.size for values in arrays_of(place)
        )
    again.open(tmp_path)
    images = np.concatenate([task.test.images for task in tasks])
    result = frozen.predict(images)
    assert np.mean(result.tasks == np.repeat([0, 1], 20)) > 0.8
    chex.assert_trees_all_equal(result, again.predict(images))


@pytest.mark.full
def test_lora_cl_keeps_every_law_with_another_router(tmp_path):
    config = LoraClConfig(
        rank=2, fit=FitConfig(epochs=2, learning_rate=1e-2), batch_size=16, router=EARLY
    )
    features = FrozenFeatures(Backbone(stages(), EARLY), 16)
    method = check_method(learner(LoraCl, config, router_features=features), tmp_path)
    assert all(task.moments["scatter"].shape == (32 * 33 // 2,) for task in method.memory.tasks)


def test_a_rejection_score_is_the_share_of_nearer_validation_images():
    quantiles = calibrate(np.array([1.0, 2, 3, 4, 5]))
    # 2.5 is in the middle between the quantiles 0.25 and 0.5; beyond the ends are 0 and 1
    np.testing.assert_allclose(
        rejection_scores(np.array([0.5, 1, 2, 2.5, 5, 9, np.nan]), quantiles),
        [0, 0, 0.25, 0.375, 1, 1, 1],
        atol=1e-6,
    )


# ---- memories

STREAM = small.stream(2)
METHOD = dataclasses.replace(small.QUICK, router=EARLY)
TESTED = np.concatenate([task.test.images for task in STREAM.tasks])


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A memory of two tasks, and the thresholds of the first one before the second was learned."""
    memory = begin(tmp_path_factory.mktemp("routing") / "pets", method=METHOD, num_classes=3)
    memory.learn(STREAM.tasks[0])
    before = memory.predictor(open_set=0.1).thresholds
    memory.learn(STREAM.tasks[1])
    return memory, before


@pytest.mark.full
def test_a_memory_with_another_router_answers_alike_when_it_is_opened(learned):
    memory, _ = learned
    opened = cheem_jax.open(memory.directory)
    assert opened.config.method.router == EARLY
    assert opened.predict(TESTED) == memory.predict(TESTED)
    for one, other in zip(opened.internal.tasks, memory.internal.tasks, strict=True):
        for a, b in zip(
            arrays_of(one.router_statistics), arrays_of(other.router_statistics), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    features = FrozenFeatures(Backbone(memory.executor, EARLY), 16)
    train_features = [(features(task.train.images), task.train.labels) for task in STREAM.tasks]
    router = Router(EARLY, statistics_of(EARLY, train_features))
    answered = memory.predictor().predict_arrays(TESTED)
    np.testing.assert_allclose(answered.distances, router.distances(features(TESTED)), rtol=1e-4)
    assert np.mean(answered.targets == np.repeat([0, 1], 20)) > 0.8
    assert [score.task_accuracy for score in memory.evaluate(STREAM)] == [
        np.mean(answered.targets[:20] == 0),
        np.mean(answered.targets[20:] == 1),
    ]


@pytest.mark.full
def test_a_threshold_is_of_the_distance_to_a_tasks_own_means_and_outlives_other_tasks(learned):
    memory, before = learned
    predictor = memory.predictor(open_set=0.1)
    features = FrozenFeatures(Backbone(memory.executor, EARLY), 16)
    first, *_ = memory.internal.tasks
    away = centroid_distances(features(STREAM.tasks[0].val.images), [first.centroids])[:, 0]
    assert before[0] == predictor.thresholds[0] == pytest.approx(np.quantile(away, 0.9), rel=1e-5)
    assert first.distances is not None
    assert predictor.thresholds[0] == threshold(first.distances, 0.1)

    noise = np.random.default_rng(0).integers(0, 2, (4, 8, 8, 3), dtype=np.uint8) * 255
    images = np.concatenate([TESTED, noise])
    routed = memory.predictor().predict_arrays(images).targets
    result = predictor.predict_arrays(images).targets
    centroids = [task.centroids for task in memory.internal.tasks]
    distances = centroid_distances(features(images), centroids)
    distances = distances[np.arange(len(images)), routed]
    np.testing.assert_array_equal(
        result, np.where(distances <= predictor.thresholds[routed], routed, -1)
    )
    # the score ranks images as the rule does: at a rate of 0.1, scores above 0.9 are rejected
    scores = predictor.rejection_scores(images)
    clear = np.abs(scores - 0.9) > 1e-6
    np.testing.assert_array_equal((scores > 0.9)[clear], (result == -1)[clear])
    assert (result[-4:] == -1).all() and np.mean(result[:-4] == -1) < 0.4


@pytest.mark.full
def test_the_routers_statistics_are_on_the_disk_and_in_the_report(learned, capsys):
    memory, _ = learned
    (first, second), info = memory.info()["tasks"], memory.info()
    triangle = 32 * 33 // 2
    assert min(first["bytes"], second["bytes"]) > 4 * triangle
    assert info["bytes"] > first["bytes"] + second["bytes"]
    (cost, _) = memory.setup.costs(memory.internal)
    assert cost["centroid_params"] == triangle + 3 * (32 + 1)  # means, and sizes of classes
    show_info(Info(memory=memory.directory))
    printed = capsys.readouterr().out
    assert "task0" in printed and f"{first['bytes'] / 2**10:.0f} kB" in printed


def names_of(directory: Path) -> list[tuple[str, set[str]]]:
    """Return the files on the disk of each task, including a forgotten one."""
    return [
        (place.name, set(load_task(place)[0]))
        for place in saved_tasks(next(directory.glob("*/cheem")))
    ]


@pytest.mark.full
def test_forgetting_leaves_a_router_that_never_knew_the_task(learned, tmp_path):
    first_memory, _ = learned
    memory = begin(tmp_path / "pets", method=METHOD, num_classes=3)
    memory.learn(STREAM)
    assert memory.predict(TESTED) == first_memory.predict(TESTED)
    rest = memory.internal.tasks[1].router_statistics
    file_names = sorted(names_of(tmp_path / "pets"))
    memory.forget("task0")
    wanted = Router(EARLY, (rest,))
    for opened in (memory, cheem_jax.open(tmp_path / "pets")):
        index = opened.predictor().router
        np.testing.assert_array_equal(index.whitening, wanted.whitening)
        np.testing.assert_array_equal(index.rows, wanted.rows)
        assert {answer.task for answer in opened.predict(TESTED)} == {"task1"}
    assert [("moments" in names, "centroids" in names) for _, names in file_names] == [
        (True, True)
    ] * 2
    (_, first), (_, other) = sorted(names_of(tmp_path / "pets"))
    assert not first & {"moments", "centroids", "distances"} and "moments" in other


@pytest.mark.full
def test_the_backbones_own_classes_keep_moments_too(tmp_path):
    base = small.task("photos", 11)
    memory = begin(tmp_path / "pets", method=METHOD, num_classes=3, base_data=base, keep_base=True)
    memory.learn(STREAM.tasks[0])
    opened = cheem_jax.open(tmp_path / "pets")
    assert [target.name for target in opened.targets] == ["task0", "base"]
    features = FrozenFeatures(Backbone(memory.executor, EARLY), 16)
    place = fit_statistics(features(base.train.images), base.train.labels, EARLY, seed=0)
    for a, b in zip(arrays_of(opened.targets[1].router_statistics), arrays_of(place), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    answers = opened.predict(base.test.images)
    assert answers == memory.predict(base.test.images)
    assert sum(answer.task == "base" for answer in answers) > len(answers) / 2
    assert all(
        answer.task is None or answer.blocks
        for answer in opened.predict(base.test.images, open_set=0.1)
    )


def test_nothing_is_left_of_a_memory_whose_backbone_has_too_few_blocks(tmp_path):
    with pytest.raises(ValueError, match="need a backbone with at least 3 blocks, but it has 2"):
        begin(tmp_path / "pets", method=METHOD, depth=2)
    assert not (tmp_path / "pets").exists()
