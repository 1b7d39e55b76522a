"""Augmentation: the result for an image depends on its position alone, and only training is
augmented."""

import numpy as np
import pytest
import small

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


def test_images_are_cropped_at_random_and_mirrored_half_the_time(monkeypatch):
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
    same, mirrored = count(200)
    assert same + mirrored == 200 and 70 < mirrored < 130


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


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_keeps_the_form_and_only_the_identity_keeps_the_image(monkeypatch, name):
    monkeypatch.setattr("cheem_jax.data.augmentation.SMALLEST_AREA", 1)
    monkeypatch.setattr("cheem_jax.data.augmentation.CHANGES", {name: CHANGES[name]})
    image = np.random.default_rng(2).integers(32, 256, (32, 32, 3), np.uint8)
    result = augment(image, np.random.default_rng(1))
    assert result.shape == image.shape and result.dtype == np.uint8
    assert (name == "identity") == any(
        np.array_equal(result, like) for like in (image, image[:, ::-1])
    )


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
