"""Formula images and the pretraining of the bundled backbones."""

import dataclasses

import jax
import numpy as np
import pretrain_micro
import pytest

from cheem_jax.backbone.config import BUNDLED, find_config
from cheem_jax.backbone.means import KEYS
from cheem_jax.backbone.params import get_params
from cheem_jax.backbone.weights import load_pretrained
from studies.pretraining import formula_images


@pytest.fixture(scope="module")
def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    return formula_images.formula_images(0, 2)


@pytest.fixture(scope="module")
def tiny() -> pretrain_micro.Pretrain:
    return pretrain_micro.Pretrain(backbone="vit_nano", steps=16, batch_size=16)


@pytest.fixture(scope="module")
def trainer(tiny) -> pretrain_micro.Trainer:
    return pretrain_micro.make_trainer(tiny, 16)


def test_images_depend_only_on_the_seed(images_and_labels):
    images, labels = images_and_labels
    again, _ = formula_images.formula_images(0, 2)
    other, _ = formula_images.formula_images(1, 2)
    np.testing.assert_array_equal(images, again)
    assert (images != other).mean() > 0.5
    assert images.shape == (2 * formula_images.NUM_CLASSES, 32, 32, 3) and images.dtype == np.uint8
    np.testing.assert_array_equal(np.bincount(labels), np.full(formula_images.NUM_CLASSES, 2))


def test_images_of_a_class_differ_and_none_is_blank(images_and_labels):
    images, labels = images_and_labels
    first, second = (
        images[labels.argsort(kind="stable")].reshape(-1, 2, 32 * 32 * 3).transpose(1, 0, 2)
    )
    assert (first != second).any(axis=1).all()
    assert images.reshape(len(images), -1).std(axis=1).min() > 1.0  # grey levels of 255


def test_mosaic_classes_have_separate_colours():
    images, labels = formula_images.formula_images(0, 8)
    mosaics = labels >= formula_images.NUM_CLASSES - 50
    colours = images[mosaics].mean(axis=(1, 2)).reshape(50, 8, 3)
    within = colours.std(axis=1).mean()
    between = colours.mean(axis=1).std(axis=0).mean()
    assert between > within


@pytest.mark.full
def test_a_few_steps_on_one_batch_lower_its_loss(images_and_labels, trainer):
    images = images_and_labels[0][::61][:16]
    labels = np.arange(16, dtype=np.int32)
    state = (trainer.learned, trainer.moments)
    losses = []
    for step in range(12):
        learned, moments, loss, _ = trainer.step(*state, np.uint32(step), images, labels)
        state = (learned, moments)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.full
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(
    images_and_labels, tiny, trainer, tmp_path
):
    images = images_and_labels[0][:48]
    labels = np.arange(48, dtype=np.int32) % 16
    tiny = dataclasses.replace(tiny, work_dir=tmp_path / "whole")
    whole = get_params(pretrain_micro.train(tiny, trainer, images, labels, until=5))
    tiny = dataclasses.replace(tiny, work_dir=tmp_path / "broken")
    pretrain_micro.train(tiny, trainer, images, labels, until=2)
    resumed = get_params(pretrain_micro.train(tiny, trainer, images, labels, until=5))
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value)


def test_a_state_with_other_settings_is_refused_with_their_names(tiny, tmp_path):
    pretrain_micro.save_state(tmp_path / "state", tiny, {"x": np.ones(3)}, 7)
    state, step = pretrain_micro.load_state(tmp_path / "state", tiny, {"x": np.zeros(3)})
    assert step == 7 and state["x"].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="seed is 0 there and 5 here"):
        pretrain_micro.load_state(
            tmp_path / "state", dataclasses.replace(tiny, seed=5), {"x": np.zeros(3)}
        )


def test_every_epoch_has_each_image_once_in_a_separate_order():
    epochs = [
        np.concatenate(
            [pretrain_micro.batch_at(3 * epoch + i, 48, seed=0, batch_size=16) for i in range(3)]
        )
        for epoch in (0, 1)
    ]
    for order in epochs:
        np.testing.assert_array_equal(np.sort(order), np.arange(48))
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("backbone", BUNDLED)
def test_bundled_weights_are_small_and_finite_and_have_base_means(backbone):
    file = pretrain_micro.BUNDLED / f"{backbone}.safetensors"
    assert file.stat().st_size <= 3_000_000
    pretrained = load_pretrained(backbone)
    config = find_config(backbone)
    assert pretrained.config == config
    assert all(np.isfinite(value).all() for value in pretrained.params.values())
    assert set(pretrained.base_means) == {f"32/{key}" for key in KEYS}
    for mean in pretrained.base_means.values():
        assert mean.shape == (config.depth, config.width) and mean.dtype == np.float32


@pytest.mark.full
@pytest.mark.parametrize("backbone", BUNDLED)
def test_bundled_features_classify_digits_far_better_than_random_ones(backbone):
    random = pretrain_micro.wide_init(find_config(backbone), jax.random.key(1))
    before = pretrain_micro.digits_probe(random, backbone)["features"]
    after = pretrain_micro.digits_probe(load_pretrained(backbone).params, backbone)["features"]
    assert 1 - after < 0.6 * (1 - before)  # share of wrong predictions
