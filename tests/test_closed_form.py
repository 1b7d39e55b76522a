"""The closed-form score against brute force: a head fitted again without each image."""

import dataclasses

import jax
import numpy as np
import pytest
import small
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.linear_model import Ridge

from cheem_jax.backbone.params import build
from cheem_jax.cheem import closed_form
from cheem_jax.cheem.closed_form import (
    HEAD_PENALTIES,
    PENALTIES,
    closed_form_score,
    fit_head,
    ridge_head,
)
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.learner import Cheem
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import dense_network
from cheem_jax.core.keys import Keys
from cheem_jax.core.pool import compute_logits, dense_experts
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import network_features
from cheem_jax.report.finished import Recorded
from cheem_jax.report.page.charts import search_chart
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.session import Session


def images(num: int, width: int, labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return features that depend on the labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(labels.max() + 1, width))
    scale = np.exp(rng.normal(size=width))
    return ((rng.normal(size=(num, width)) + 0.7 * centres[labels]) * scale + 3).astype(np.float32)


def brute_force(features: np.ndarray, labels: np.ndarray, num_classes: int) -> tuple[int, float]:
    """Return the largest number of right answers over the penalties: scikit-learn's ridge answers
    each image without it."""
    x = (features - features.mean(0)) / np.where(features.std(0) > 1e-6, features.std(0), np.inf)
    y = np.eye(num_classes)[labels]
    num = len(labels)
    right = {}
    for penalty in sorted(PENALTIES, reverse=True):
        right[penalty] = 0
        for out in range(num):
            rest = np.arange(num) != out
            head = Ridge(alpha=penalty * num).fit(x[rest], y[rest])
            right[penalty] += int(head.predict(x[[out]]).argmax() == labels[out])
    best = max(right, key=lambda penalty: right[penalty])
    return right[best], best


SETS = {
    "even classes": np.arange(40) % 4,
    "uneven classes": np.repeat([0, 1, 2], [30, 6, 4]),
    "a class of one image": np.repeat([0, 1, 2], [20, 19, 1]),
    "two classes": np.arange(30) % 2,
    "fewer images than features": np.arange(9) % 3,
}


@pytest.mark.parametrize("labels", SETS.values(), ids=SETS.keys())
def test_the_ridge_head_is_that_of_the_least_squared_error_without_each_image(labels):
    features = images(len(labels), 12, labels)
    num_classes = int(labels.max()) + 1
    num = len(labels)
    x = (features - features.mean(0)) / features.std(0)
    y = np.eye(num_classes)[labels]
    alone = {}
    for penalty in HEAD_PENALTIES:
        rests = [np.arange(num) != out for out in range(num)]
        alone[penalty] = np.array(
            [
                Ridge(alpha=penalty * num).fit(x[rest], y[rest]).predict(x[~rest])[0]
                for rest in rests
            ]
        )
    errors = {penalty: np.square(answers - y).sum() for penalty, answers in alone.items()}
    head, penalty = ridge_head(features, labels, num_classes)
    assert penalty == pytest.approx(min(errors, key=errors.__getitem__))
    logits = compute_logits(features, head)
    wanted = Ridge(alpha=penalty * num).fit(x, y).predict(x)
    scale = np.std(logits) / np.std(wanted)
    np.testing.assert_allclose(logits, scale * wanted, rtol=1e-3, atol=1e-3 * scale)
    # the scale maximises the log-probability of the labels, each predicted without its image
    answers = alone[min(errors, key=errors.__getitem__)]
    best = minimize_scalar(
        lambda scale: -log_softmax(scale * answers, axis=1)[np.arange(num), labels].mean(),
        bounds=(4, 100),
        method="bounded",
    ).x
    assert scale == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("labels", SETS.values(), ids=SETS.keys())
def test_leave_one_out_is_that_of_heads_fitted_without_each_image(labels):
    features = images(len(labels), 12, labels)
    num_classes = int(labels.max()) + 1
    fit = fit_head(
        features, labels, np.ones(len(labels), bool), num_classes, num_outputs=num_classes
    )
    expected, penalty = brute_force(features, labels, num_classes)
    assert int(fit.left_out) == expected and int(fit.held_out) == 0
    np.testing.assert_allclose(fit.penalty, penalty, rtol=1e-6)


def test_images_that_are_not_fitted_are_answered_by_the_head_of_the_others():
    labels = np.arange(60) % 3
    features = images(60, 8, labels)
    fitted = np.arange(60) < 40
    fit = fit_head(features, labels, fitted, 3, num_outputs=3)
    mean = features[:40].mean(0)
    deviation = features[:40].std(0)
    head = Ridge(alpha=40 * float(fit.penalty)).fit(
        (features[:40] - mean) / deviation, np.eye(3)[labels[:40]]
    )
    answers = head.predict((features[40:] - mean) / deviation).argmax(1)
    assert int(fit.held_out) == (answers == labels[40:]).sum() > 10


def test_padding_of_images_and_classes_changes_nothing():
    labels = np.arange(50) % 5
    features = images(50, 8, labels)
    fitted = np.arange(50) < 40
    fit = fit_head(features, labels, fitted, 5, num_outputs=5)
    padded = fit_head(
        np.pad(features, ((0, 14), (0, 0))),
        np.pad(labels, (0, 14), constant_values=-1),
        np.pad(fitted, (0, 14)),
        5,
        num_outputs=8,
    )
    assert [int(n) for n in padded[:2]] == [int(n) for n in fit[:2]]


def test_constant_or_non_finite_features_score_nothing():
    labels = np.arange(30) % 3
    features = images(30, 6, labels)
    alone = fit_head(features, labels, np.ones(30, bool), 3, num_outputs=4)
    with_constant = np.concatenate([features, np.full((30, 2), 7.3, np.float32)], axis=1)
    beside = fit_head(with_constant, labels, np.ones(30, bool), 3, num_outputs=4)
    assert int(beside.left_out) == int(alone.left_out)
    features[4, 2] = np.nan
    assert int(fit_head(features, labels, np.ones(30, bool), 3, num_outputs=4).left_out) == 0


GENOMES = np.array(
    [[0, 0, 0, 0], [2, 0, 3, 0], [1, 2, 3, 0], [2, 2, 2, 2], [0, 0, 3, 3], [3, 3, 3, 3]]
)
EASY = small.task("colours", 0, num=40)
# many labels are wrong, so that no head answers all images
WRONG = np.where(np.arange(40) % 5 < 2, 1, EASY.train.labels).astype(np.int32)
TASK = dataclasses.replace(EASY, train=dataclasses.replace(EASY.train, labels=WRONG))


def scored(executor, genomes=GENOMES):
    supernet = Supernet(
        jax.random.key(1), dense_experts(executor.base_pool), len(TASK.classes), OpSettings(rank=2)
    )
    score = closed_form_score(
        executor,
        supernet,
        supernet.init(),
        train=HostImages(executor, TASK.train.images),
        train_labels=TASK.train.labels,
        val=HostImages(executor, TASK.val.images),
        val_labels=TASK.val.labels,
        batch_size=16,
    )
    return supernet, score(genomes)


def executor_of(name, precision="float32"):
    vit = build(dataclasses.replace(small.CONFIG, precision=precision), small.pretrained().params)
    return make_executor(
        vit, "mlp_down", EngineConfig(executor=name, precision=precision), batch_size=16
    )


def test_each_candidate_is_scored_on_the_features_of_its_network():
    executor = executor_of("stages")
    supernet, right = scored(executor)
    labels = np.concatenate([TASK.train.labels, TASK.val.labels])
    for codes, result in zip(GENOMES, right, strict=True):
        network = dense_network(supernet, supernet.init(), codes, {})
        features = [
            network_features(
                executor,
                [network],
                HostImages(executor, split.images),
                len(split.labels),
                batch_size=16,
            )
            for split in (TASK.train, TASK.val)
        ]
        alone = np.concatenate(features, axis=1)[0]
        fit = fit_head(alone, labels, np.arange(len(labels)) < 40, 3, num_outputs=4)
        assert result == int(fit.left_out) + int(fit.held_out)
    assert len(set(right)) > 1


def test_candidates_in_parts_score_as_all_at_once(monkeypatch):
    executor = executor_of("stages")
    _, right = scored(executor)
    monkeypatch.setattr(closed_form, "FEATURE_BYTES", 2 * 4 * 60 * 16)  # two candidates
    _, in_parts = scored(executor)
    np.testing.assert_array_equal(in_parts, right)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, precision, apart",
    [("whole", "float32", 1), ("scan", "float32", 1), ("stages", "bfloat16", 3)],
)
def test_every_executor_and_precision_computes_the_same_scores_up_to_rounding(
    name, precision, apart
):
    result = scored(executor_of(name, precision))[1]
    expected = scored(executor_of("stages"))[1]
    np.testing.assert_allclose(result, expected, atol=apart)


def test_more_candidates_compile_nothing(compilations):
    executor = executor_of("stages")
    scored(executor)
    with compilations() as programs:
        scored(executor, np.array([[3, 2, 1, 0], [1, 1, 1, 1], [2, 3, 0, 2]]))
    assert programs.count == 0


@pytest.mark.full
def test_the_report_names_the_score_that_ranked_the_search():
    config = dataclasses.replace(small.QUICK, score="closed_form", score_images=24)
    stages = executor_of("stages")
    report = Cheem(stages, config, Keys(0), None, FrozenFeatures(stages, 16)).learn(TASK, Session())
    search = report["search"]
    assert search["score"] == "closed_form" and search["num_images"] == 24 + len(TASK.val.labels)
    assert (
        report["score"]
        == search["correct"][search["chosen"]] / search["num_images"]
        <= report["best_score"]
    )
    assert "validation_accuracy" not in report
    (chart,) = search_chart(Recorded({}, [{"index": 0, **report}]), 0.02).variants.values()
    assert "ridge head" in str(chart)
