import dataclasses

import numpy as np
import pytest

from cheem_jax.data import Split, Stream, Task, fingerprint, select
from cheem_jax.data.task import check_names, cut_for_extension


def make_split(labels, size=4, dtype=np.int32) -> Split:
    labels = np.array(labels, dtype)
    images = np.arange(len(labels) * size * size * 3, dtype=np.uint8).reshape(
        len(labels), size, size, 3
    )
    return Split(images, labels)


def make_task(name="pets", classes=("cat", "dog"), purpose="learn", **splits) -> Task:
    splits = {s: splits.get(s, make_split([0, 1, 1])) for s in ("train", "val", "test")}
    return Task(name, classes, **splits, purpose=purpose)


def test_a_sound_task_keeps_its_arguments():
    task = make_task()
    assert (task.name, task.classes, list(task.splits)) == (
        "pets",
        ("cat", "dog"),
        ["train", "val", "test"],
    )
    assert task.train.labels.tolist() == [0, 1, 1]


def test_a_class_without_image_is_named_with_task_and_split():
    with pytest.raises(
        ValueError, match=r"task 'pets', split 'val'.*no image of 2 of 3.*'cat', 'eel'"
    ):
        make_task(
            classes=("cat", "dog", "eel"), train=make_split([0, 1, 2]), val=make_split([1, 1])
        )


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="split 'test': no image of 2 of 2"):
        make_task(test=make_split([]))


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1, -1]])
def test_labels_out_of_range_are_reported(labels):
    with pytest.raises(ValueError, match=rf"split 'train': labels \[{labels[-1]}\] outside 0..1"):
        make_task(train=make_split(labels))


def test_wrong_dtypes_and_shapes_are_refused():
    good = make_split([0, 1])
    for bad in (
        dataclasses.replace(good, images=good.images.astype(np.float32)),
        dataclasses.replace(good, images=good.images[..., :1]),
        dataclasses.replace(good, images=good.images[0]),
        dataclasses.replace(good, images=good.images[:, :0]),
    ):
        with pytest.raises(ValueError, match=r"images must be uint8 \[N, H, W, 3\], got"):
            make_task(val=bad)
    for labels in (good.labels.astype(np.int64), good.labels[:1]):
        with pytest.raises(ValueError, match=r"labels must be int32 \[2\], got"):
            make_task(val=Split(good.images, labels))
    with pytest.raises(ValueError, match="differ in shape"):
        make_task(val=make_split([0, 1], size=5))


def test_class_names_must_be_two_or_more_and_unique():
    with pytest.raises(ValueError, match="has 1 class"):
        make_task(classes=("cat",))
    # composed, and as a Mac stores it
    with pytest.raises(ValueError, match="unique, repeated: .'mus\u00e9e'"):
        make_task(classes=("mus\u00e9e", "muse\u0301e"))
    with pytest.raises(ValueError, match=r"unique, repeated: \['cat'\]"):
        make_task(classes=("cat", "cat"))
    with pytest.raises(ValueError, match="needs a name"):
        make_task(name="")


def test_a_stream_needs_unique_tasks_of_one_image_size():
    with pytest.raises(ValueError, match=r"must be unique, repeated: \['pets'\]"):
        Stream("s", (make_task(), make_task()))
    with pytest.raises(ValueError, match="has no task"):
        Stream("s", ())
    large = make_split([0, 1], size=8)
    with pytest.raises(ValueError, match="images of one shape"):
        Stream("s", (make_task(), make_task("large", train=large, val=large, test=large)))


def test_select_picks_and_orders_tasks_by_name():
    stream = Stream("s", (make_task("cars"), make_task("flowers"), make_task("digits")))
    assert [task.name for task in select(stream, ["digits", "cars"]).tasks] == ["digits", "cars"]
    assert stream.tasks[0] is select(stream, ["digits", "cars"]).tasks[1]


def test_select_tells_the_nearest_names_for_an_unknown_task():
    stream = Stream("zoo", (make_task("cars"), make_task("flowers")))
    with pytest.raises(ValueError, match="'zoo' has no task 'flower'; did you mean flowers?"):
        select(stream, ["flower"])
    with pytest.raises(ValueError, match="'zoo' has no task 'xyz'; it has cars, flowers"):
        select(stream, ["xyz"])
    with pytest.raises(ValueError, match="has no task 'xyz', because it has no task yet"):
        check_names(["xyz"], [], "memory 'new'")
    with pytest.raises(ValueError, match=r"task names are repeated: \['cars'\]"):
        select(stream, ["cars", "cars"])
    with pytest.raises(ValueError, match="no task name given"):
        select(stream, [])


def test_the_fingerprint_sees_names_pixels_labels_and_shapes():
    task = make_task()
    assert fingerprint(task) == fingerprint(make_task())
    pixel = task.test.images.copy()
    pixel[2, 3, 3, 2] ^= 1
    changed = [
        make_task(name="pet"),
        make_task(classes=("cat", "fox")),
        make_task(test=Split(pixel, task.test.labels)),
        make_task(val=make_split([1, 0, 1])),
        make_task(val=make_split([0, 1])),
    ]
    assert len({fingerprint(task), *map(fingerprint, changed)}) == 6
    turned = Split(np.asfortranarray(task.test.images), task.test.labels)
    assert fingerprint(make_task(test=turned)) == fingerprint(task)


def test_measuring_needs_one_image_and_extending_every_class_and_one_validation_image():
    none, one = make_split([]), make_split([0])
    parts = {"train": none, "val": none, "test": one}
    assert make_task(classes=("cat", "dog"), **parts, purpose="measure").test is one
    with pytest.raises(ValueError, match="expected at least 1"):
        make_task(classes=(), **parts, purpose="measure")
    assert make_task(classes=("cat",), train=one, val=one, test=none, purpose="extend").train is one
    for words, complaint in (
        ({"train": one}, "split 'train': no image of 1 of 2 classes: 'dog'"),
        (
            {"val": none},
            "no image for validation; to extend a task, give at least 2 images of a class",
        ),
        ({"classes": ()}, "expected at least 1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            make_task(**words, purpose="extend")
    with pytest.raises(ValueError, match="no image of 2 of 2"):
        dataclasses.replace(make_task(**parts, purpose="measure"), purpose="learn")


@pytest.mark.parametrize(
    ("sizes", "num"), [([60], 6), ([2, 1], 1), ([9, 9, 2], 3), ([1, 1], 0), ([95, 2], 10)]
)
def test_to_extend_a_tenth_is_cut_for_validation_and_nothing_for_test(sizes, num):
    given = {f"{label}/{row}": label for label, size in enumerate(sizes) for row in range(size)}
    members = {"train": dict(given)}
    cut_for_extension(members, 0)
    assert (len(members["val"]), members["test"]) == (num, {})
    assert members["train"] | members["val"] == given
    assert set(members["train"].values()) == set(range(len(sizes)))
    assert set(members["val"].values()) == {label for label, size in enumerate(sizes) if size > 1}
    groups = {"train": dict(given), "val": {"v": 0}, "test": {"t": 0}}
    cut_for_extension(groups, 0)
    assert groups == {"train": given, "val": {"v": 0}, "test": {"t": 0}}
