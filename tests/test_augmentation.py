"""Augmentation: the result for an image depends on its position alone, and only training is
augmented."""

import numpy as np
import pytest
import small
from PIL import Image

from cheem_jax.cheem.learner import Cheem
from cheem_jax.core.keys import Keys
from cheem_jax.data.augmentation import CHANGES, AugmentedImages, augment, augmented
from cheem_jax.engine.stages import Stages
from cheem_jax.run.method import FrozenFeatures
from cheem_jax.run.session import Session

TASK = small.task("task0", 0)
IMAGES = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), np.uint8)


def test_an_image_becomes_the_same_in_any_company_and_another_in_each_place():
    rows = np.array([4, 1, 5])
    together = augmented(IMAGES[rows], rows, 3, 0)
    assert together.shape == (3, 16, 16, 3) and together.dtype == np.uint8
    alone = [augmented(IMAGES[[row]], np.array([row]), 3, 0) for row in rows]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    same = np.repeat(IMAGES[:1], 6, axis=0)
    places = [augmented(same, np.arange(6), *place) for place in ((3, 0), (3, 1), (4, 0))]
    assert len({image.tobytes() for image in np.concatenate(places)}) == 18


def images_of(feed, order) -> np.ndarray:
    """The pixels that a feed hands to the device, in order."""
    return np.concatenate(list(feed.follow(order)))


def test_augmented_images_depend_on_epoch_and_row_and_not_on_the_batches():
    executor = Stages(small.backbone(), "mlp_down")
    executor.begin = np.asarray  # the pixels themselves
    feed = AugmentedImages(executor, TASK.train.images, seed=3)
    rows = np.random.default_rng(0).permutation(40)
    epochs = {}
    for epoch in (0, 1):
        parts = [np.array_split(rows, num) for num in (1, 5, 40)]
        results = [images_of(feed.at(epoch), order) for order in parts]
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])
        expected = augmented(TASK.train.images[rows], rows, 3, epoch)
        np.testing.assert_array_equal(results[0], expected)
        # a run that resumes in the middle of the epoch makes a new feed
        resumed = AugmentedImages(executor, TASK.train.images, seed=3).at(1).at(epoch)
        np.testing.assert_array_equal(images_of(resumed, [rows[16:]]), expected[16:])
        epochs[epoch] = results[0]
    assert (epochs[0] != epochs[1]).any(axis=(1, 2, 3)).all()


def test_images_are_cropped_at_random_and_never_mirrored(monkeypatch):
    monkeypatch.setattr(
        "cheem_jax.data.augmentation.CHANGES", {"identity": lambda image, strength: image}
    )
    image = np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)

    def count(seeds):
        results = [augment(image, np.random.default_rng(seed)) for seed in range(seeds)]
        same = sum(np.array_equal(result, image) for result in results)
        return same, sum(np.array_equal(result, image[:, ::-1]) for result in results)

    assert count(20) == (0, 0)  # every image is cropped
    monkeypatch.setattr("cheem_jax.data.augmentation.SMALLEST_AREA", 1)
    assert count(20) == (20, 0)


def test_a_crop_shows_a_square_of_the_image(monkeypatch):
    """Each pixel's colour is its position, so a crop can be read from the pixels."""
    monkeypatch.setattr(
        "cheem_jax.data.augmentation.CHANGES", {"identity": lambda image, strength: image}
    )
    rows, columns = np.mgrid[0:64, 0:64] * 4
    image = np.stack([rows, columns, np.zeros_like(rows)], axis=-1).astype(np.uint8)
    areas = []
    for seed in range(30):
        result = augment(image, np.random.default_rng(seed)).astype(float)
        height, width = (
            abs(np.diff(result.mean(axis=1 - axis)[:, axis])[8:-8].mean()) / 4 for axis in (0, 1)
        )
        assert height == pytest.approx(width, abs=0.02)
        areas.append(height * width)
    assert 0.49 < min(areas) < 0.6 and 0.85 < max(areas) <= 1.01


def test_crops_reach_every_edge(monkeypatch):
    monkeypatch.setattr(
        "cheem_jax.data.augmentation.CHANGES", {"identity": lambda image, strength: image}
    )
    column = np.arange(0, 256, 4, dtype=np.uint8)
    image = np.stack([np.tile(column, (64, 1))] * 3, axis=-1)
    # the grey values of the outer columns
    ends = np.array(
        [
            augment(image, np.random.default_rng(seed))[32, [0, -1], 0].astype(int)
            for seed in range(300)
        ]
    )
    assert ends[:, 0].min() <= 1 and ends[:, 1].max() >= 251


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_keeps_the_form_and_only_the_identity_keeps_the_image(monkeypatch, name):
    monkeypatch.setattr("cheem_jax.data.augmentation.SMALLEST_AREA", 1)
    monkeypatch.setattr("cheem_jax.data.augmentation.CHANGES", {name: CHANGES[name]})
    image = np.random.default_rng(2).integers(32, 256, (32, 32, 3), np.uint8)
    result = augment(image, np.random.default_rng(1))
    assert result.shape == image.shape and result.dtype == np.uint8
    assert (name == "identity") == np.array_equal(result, image)


def test_changes_have_strengths_of_both_signs_and_all_sizes(monkeypatch):
    strengths = []

    def record(image, strength):
        strengths.append(strength)
        return image

    monkeypatch.setattr("cheem_jax.data.augmentation.CHANGES", {"record": record})
    for seed in range(100):
        augment(IMAGES[0], np.random.default_rng(seed))
    assert len(strengths) == 200 and -1 <= min(strengths) < -0.9 and 0.9 < max(strengths) <= 1
    assert abs(np.mean(strengths)) < 0.15


def changed(name: str, pixels: np.ndarray, strength: float) -> np.ndarray:
    return np.asarray(CHANGES[name](Image.fromarray(pixels), strength)).astype(float)


def test_changes_of_colour_have_the_stated_ranges():
    grey = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    values = grey.astype(float)
    for name in ("solarize", "posterize", "color", "contrast", "brightness", "sharpness"):
        np.testing.assert_array_equal(changed(name, grey, 0.0), values)
    for sign in (-1, 1):
        expected = np.where(values < 128, values, 255 - values)
        np.testing.assert_array_equal(changed("solarize", grey, sign), expected)
        np.testing.assert_array_equal(changed("posterize", grey, sign), values // 16 * 16)
    for strength, factor in ((1.0, 1.6), (-0.5, 0.7)):
        bright = np.minimum(values * factor, 255)
        np.testing.assert_allclose(changed("brightness", grey, strength), bright, atol=1)
        contrast = np.clip(128 + factor * (values - 128), 0, 255)  # 128 is the mean, rounded
        np.testing.assert_allclose(changed("contrast", grey, strength), contrast, atol=1)
    two = np.zeros((8, 8, 3), np.uint8) + np.array([200, 100, 100], np.uint8)
    luma = 0.299 * 200 + 0.701 * 100
    for strength, factor in ((0.25, 1.15), (-1.0, 0.4)):
        expected = luma + factor * (np.array([200, 100, 100]) - luma)
        np.testing.assert_allclose(changed("color", two, strength)[4, 4], expected, atol=1.5)
    edge = np.repeat(np.repeat([[100], [140]], 8, axis=0)[:, :, None], 3, axis=2)
    edge = np.repeat(edge, 16, axis=1).astype(np.uint8)
    # the smoothed rows next to the edge are 100 + 40 * 3 / 13 and 140 - 40 * 3 / 13
    rows = changed("sharpness", edge, 1.0)[7:9, 8, 0]
    np.testing.assert_allclose(rows, [100 - 0.6 * 120 / 13, 140 + 0.6 * 120 / 13], atol=1)


def test_changes_of_the_form_turn_by_20_degrees_and_shear_by_a_fifth_about_the_centre():
    """Each pixel's colour is its position, so the inner part of an image shows the map."""
    rows, columns = np.mgrid[0:64, 0:64] * 4
    image = np.stack([rows, columns, np.zeros_like(rows)], axis=-1).astype(np.uint8)
    inner = np.s_[20:44]
    y, x = np.mgrid[inner, inner] - 31.5
    for strength in (1.0, -0.5):
        angle = np.radians(20 * strength)
        turned = (x * np.sin(angle) + y * np.cos(angle), x * np.cos(angle) - y * np.sin(angle))
        maps = {
            "rotate": turned,
            "shear_x": (y, x + 0.2 * strength * y),
            "shear_y": (y + 0.2 * strength * x, x),
        }
        for name, expected in maps.items():
            place = changed(name, image, strength)[inner, inner] / 4 - 31.5
            # grey values are rounded, so each pixel is less exact than the map fitted to them all
            places = np.stack([y.ravel(), x.ravel()], axis=1)
            for axis in range(2):
                np.testing.assert_allclose(place[..., axis], expected[axis], atol=0.6)
                of_pixels, of_map = (
                    np.linalg.lstsq(places, values.ravel(), rcond=None)[0]
                    for values in (place[..., axis], expected[axis])
                )
                np.testing.assert_allclose(of_pixels, of_map, atol=0.006)


@pytest.mark.full
def test_only_training_sees_augmented_images():
    learned = {}
    for config in (small.QUICK, small.AUGMENTED):
        stages = Stages(small.backbone(), config.placement, token=config.token)
        cheem = Cheem(
            stages, config, Keys(0), np.ones((4, 16), np.float32), FrozenFeatures(stages, 16)
        )
        learned[config.augment] = cheem.learn(TASK, Session()), cheem.memory.tasks[0]
        assert bool(cheem.check([TASK])) == config.augment
    (plain, task), (varied, other) = learned[False], learned[True]
    assert plain["similarity"] == varied["similarity"]
    np.testing.assert_array_equal(task.centroids, other.centroids)
    assert plain["supernet_losses"] != varied["supernet_losses"] != []
    assert plain["finetune_losses"] != varied["finetune_losses"] != []
