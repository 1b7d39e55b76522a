import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier

from cheem_jax.data import ImagesConfig, Split, Task, demo, demo_stream, fingerprint
from cheem_jax.data.streams import StreamConfig, find_stream


@pytest.fixture(scope="module")
def stream():
    return demo_stream()


def test_the_demo_stream_has_six_tasks_of_32_pixels(stream):
    assert [task.name for task in stream.tasks] == [
        *("shapes", "letters", "colours", "textures", "shapes_recoloured", "digits")
    ]
    for task in stream.tasks:
        assert [split.images.shape for split in task.splits.values()] == [
            (n, 32, 32, 3) for n in (600, 150, 250)
        ]
        counts = np.bincount(task.train.labels)
        assert counts.max() - counts.min() <= (5 if task.name == "digits" else 1)


def test_the_demo_stream_is_the_same_for_a_seed_and_another_for_another():
    small = dict(num_train=32, num_val=16, num_test=16, image_size=16)
    one, again, other = demo_stream(**small), demo_stream(**small), demo_stream(**small, seed=1)
    assert [*map(fingerprint, one.tasks)] == [*map(fingerprint, again.tasks)]
    for a, b in zip(one.tasks, other.tasks, strict=True):
        assert fingerprint(a) != fingerprint(b)


def test_test_images_do_not_depend_on_the_number_of_training_images():
    small = demo_stream(num_train=16, num_val=16, num_test=20, image_size=16)
    large = demo_stream(num_train=50, num_val=16, num_test=20, image_size=16)
    for a, b in zip(small.tasks, large.tasks, strict=True):
        np.testing.assert_array_equal(a.test.images, b.test.images)
        np.testing.assert_array_equal(a.test.labels, b.test.labels)


def test_no_image_occurs_twice(stream):
    for task in stream.tasks:
        pictures = [image.tobytes() for split in task.splits.values() for image in split.images]
        # scikit-learn's digits are real and small; two of them can look alike, copies of one can
        # not
        assert len(set(pictures)) == len(pictures)


def pixel_accuracy(train: Split, test: Split) -> float:
    """Return the accuracy of a linear classifier on the pixels."""
    flat = [split.images.reshape(len(split.images), -1) / 255 - 0.5 for split in (train, test)]
    model = RidgeClassifier(alpha=1000.0).fit(flat[0], train.labels)
    return float(np.mean(model.predict(flat[1]) == test.labels))


@pytest.mark.full
def test_difficulties_differ_clearly_for_a_linear_classifier_on_pixels(stream):
    accuracy = {task.name: pixel_accuracy(task.train, task.test) for task in stream.tasks}
    assert accuracy["colours"] > 0.95
    assert accuracy["digits"] > 0.85
    for hard in ("shapes", "letters", "shapes_recoloured"):
        assert accuracy[hard] < 0.65, accuracy
    assert accuracy["textures"] < 0.3


def test_the_planted_variant_shares_the_shapes_and_not_the_colours(stream):
    original, kin = stream.tasks[0], stream.tasks[4]
    assert original.classes == kin.classes
    means = [task.train.images.mean(axis=(0, 1, 2)) for task in (original, kin)]
    assert means[0].argmax() == 2 and means[1].argmax() == 0  # blue against red grounds
    # One generator state makes the same figures in both colourings: bright in the same places.
    labels = np.arange(8, dtype=np.int32)
    plain = demo.draw_shapes(np.random.default_rng(3), labels, 32).astype(float)
    other = demo.draw_recoloured_shapes(np.random.default_rng(3), labels, 32).astype(float)
    for a, b in zip(plain.max(axis=-1), other.max(axis=-1), strict=True):
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.8


def test_other_sizes_show_the_same_kind_of_image():
    large = demo_stream(image_size=64, num_train=16, num_val=16, num_test=16)
    assert all(task.train.images.shape == (16, 64, 64, 3) for task in large.tasks)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_val": 11}, "every split needs at least 12 images"),
        ({"num_train": 1500}, "there are 1797 digits in all"),
        ({"image_size": 4}, "image_size must be at least 8"),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        demo_stream(**settings)


def test_hues_turn_into_the_colours_one_expects():
    hue = np.array([0.0, 1 / 6, 1 / 3, 2 / 3])
    want = [[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]]
    np.testing.assert_allclose(demo.hsv(hue, np.ones(4), np.ones(4)), want, atol=1e-12)
    np.testing.assert_allclose(
        demo.hsv(hue[:1], np.array([0.5]), np.array([0.8])), [[0.8, 0.4, 0.4]]
    )


def test_letters_fit_into_their_images(stream):
    letters: Task = stream.tasks[1]
    dark = letters.train.images.max(axis=-1) < 128
    assert (dark.sum(axis=(1, 2)) > 8).mean() > 0.98
    border = np.ones((32, 32), bool)
    border[1:-1, 1:-1] = False
    assert dark[:, border].mean() < 0.01


@pytest.mark.parametrize("option", [{"split_seed": 4}, {"images": ImagesConfig("stream")}])
def test_options_of_data_on_the_disk_are_refused(option):
    with pytest.raises(ValueError, match="--split-seed and --images.keep are for data on the disk"):
        find_stream(StreamConfig(stream="demo", **option))
