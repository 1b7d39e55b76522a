"""Divide the classes of a data set into tasks: the order, the images of each task, every source."""

import csv
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from commands import cheem
from PIL import Image

from cheem_jax.data import ImagesConfig, load_tasks
from cheem_jax.data.class_split import describe_split, order_classes, split_by_class
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import ClassSplit, Stream

CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu")
MEMORY = ImagesConfig("memory")


def photos(root: Path, classes=CLASSES, num: int = 8) -> Path:
    """`num` images of each class, each of a different colour."""
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(num):
            pixels = rng.integers(0, 256, (6, 6, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def zoo(tmp_path) -> Path:
    return photos(tmp_path / "zoo")


def sizes(source, split: ClassSplit) -> list[int]:
    return [len(plan.classes) for plan in plan_source(str(source), class_split=split)[1]]


def images_by_class(plans) -> dict[tuple[str, str], set[bytes]]:
    """Pixels of the images of each class in each split."""
    images: dict[tuple[str, str], set[bytes]] = {}
    for task in load_tasks(plans, 6, MEMORY):
        for name, split in task.splits.items():
            for image, label in zip(split.images, split.labels, strict=True):
                images.setdefault((name, task.classes[label]), set()).add(image.tobytes())
    return images


def test_seed_1993_leads_to_the_order_of_pilot(tmp_path):
    hundred = photos(tmp_path / "hundred", [f"{label:02d}" for label in range(100)], num=3)
    (plan,) = plan_source(str(hundred))[1]
    # the first classes of CIFAR-100 in the published orders of class-incremental learning
    assert order_classes(plan, 1993)[:5].tolist() == [68, 56, 78, 8, 23]
    for seed in (1993, 0, 2**32 - 1):
        np.random.seed(seed)
        np.testing.assert_array_equal(order_classes(plan, seed), np.random.permutation(100))


def test_classes_are_permuted_by_the_seed_and_keep_their_names(zoo):
    np.random.seed(1993)
    order = [CLASSES[label] for label in np.random.permutation(len(CLASSES))]
    name, plans = plan_source(str(zoo), class_split=ClassSplit(2, class_order=1993))
    assert name == "zoo B0 Inc2"
    assert [plan.name for plan in plans] == ["zoo-01", "zoo-02", "zoo-03"]
    assert [label for plan in plans for label in plan.classes] == order
    _, plans = plan_source(str(zoo), class_split=ClassSplit(3))
    assert [plan.classes for plan in plans] == [CLASSES[:3], CLASSES[3:]]
    chosen = tuple(reversed(CLASSES))
    _, plans = plan_source(str(zoo), class_split=ClassSplit(2, 3, chosen))
    assert [plan.classes for plan in plans] == [chosen[:3], chosen[3:5], chosen[5:]]


def test_a_rest_is_a_task_and_a_single_class_joins_the_task_before(zoo):
    assert sizes(zoo, ClassSplit(2)) == [2, 2, 3]  # 7 = 2 + 2 + 2 + 1
    assert sizes(zoo, ClassSplit(5)) == [5, 2]
    assert sizes(zoo, ClassSplit(2, 5)) == [5, 2]
    assert sizes(zoo, ClassSplit(3, 2)) == [2, 3, 2]
    assert sizes(zoo, ClassSplit(3, 3)) == [3, 4]


@pytest.mark.parametrize("split", [ClassSplit(2), ClassSplit(3, 2, 1993), ClassSplit(5, None, 7)])
def test_every_image_keeps_its_split(zoo, split):
    whole = plan_source(str(zoo), seed=3)[1]
    plans = plan_source(str(zoo), seed=3, class_split=split)[1]
    assert images_by_class(plans) == images_by_class(whole)
    assert sum(plan.num_images for plan in plans) == whole[0].num_images
    keys = {key for plan in plans for part in plan.splits.values() for key in part.files.keys}
    assert keys == {key for part in whole[0].splits.values() for key in part.files.keys}


def zipped(zoo: Path) -> Path:
    with zipfile.ZipFile(zoo.with_suffix(".zip"), "w") as archive:
        for file in sorted(zoo.rglob("*.png")):
            archive.write(file, file.relative_to(zoo))
    return zoo.with_suffix(".zip")


def tabulated(zoo: Path) -> Path:
    with zoo.with_suffix(".csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        rows.writerows([f"zoo/{p.parent.name}/{p.name}", p.parent.name] for p in zoo.rglob("*.png"))
    return zoo.with_suffix(".csv")


def stream_file(zoo: Path) -> Path:
    zoo.with_suffix(".toml").write_text('[[task]]\npath = "zoo"\n')
    return zoo.with_suffix(".toml")


def saved(zoo: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    files = sorted(zoo.rglob("*.png"))
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    columns = {
        "image": [{"bytes": file.read_bytes(), "path": None} for file in files],
        "label": [CLASSES.index(file.parent.name) for file in files],
    }
    folder = zoo.parent / "hub" / "zoo"
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize("make", [zipped, tabulated, stream_file, saved])
def test_zips_tables_stream_files_and_hub_data_sets_are_divided_like_folders(zoo, make):
    source = make(zoo)
    whole = plan_source(str(source))[1]
    name, plans = plan_source(str(source), class_split=ClassSplit(3, class_order=1993))
    assert name == "zoo B0 Inc3" and [plan.name for plan in plans] == ["zoo-01", "zoo-02"]
    assert images_by_class(plans) == images_by_class(whole)


def test_prepared_data_sets_and_benchmark_tasks_are_divided(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    from prepared import prepare_small

    labels = np.repeat(np.arange(10), 4)
    prepare_small(tmp_path, "eurosat/rgb:2.0.0", {"train": labels}, key="filename")
    source = "tfds:eurosat/rgb"
    whole = plan_source(source, data_dir=tmp_path)[1]
    name, plans = plan_source(source, data_dir=tmp_path, class_split=ClassSplit(4, 2))
    assert name == "tfds:eurosat/rgb B2 Inc4"
    assert [plan.name for plan in plans] == ["eurosat-01", "eurosat-02", "eurosat-03"]
    assert images_by_class(plans) == images_by_class(whole)
    assert all(plan.is_benchmark for plan in plans)


def test_images_that_are_decoded_on_access_are_those_in_memory(zoo):
    pytest.importorskip("grain")
    plans = plan_source(str(zipped(zoo)), class_split=ClassSplit(2, class_order=5))[1]
    for task, streamed in zip(
        load_tasks(plans, 6, MEMORY), load_tasks(plans, 6, ImagesConfig("stream")), strict=True
    ):
        rows = np.arange(len(task.train.labels))[::-1]
        np.testing.assert_array_equal(task.train.images[rows], streamed.train.images[rows])
        (batch,) = streamed.train.images.follow([rows])  # pyright: ignore[reportAttributeAccessIssue]
        np.testing.assert_array_equal(task.train.images[rows], batch)


def test_tasks_selects_among_the_parts_and_keeps_their_names(zoo):
    _, plans = plan_source(str(zoo), ["zoo-03", "zoo-01"], class_split=ClassSplit(2))
    assert [plan.classes for plan in plans] == [CLASSES[4:], CLASSES[:2]]
    with pytest.raises(ValueError, match="has no task 'zoo-4'; did you mean zoo-0"):
        plan_source(str(zoo), ["zoo-4"], class_split=ClassSplit(2))


def test_the_description_counts_the_selected_tasks(zoo):
    for split, tasks, expected in (
        (ClassSplit(2), ["zoo-03"], "zoo B0 Inc2: 1 task of 3 classes"),
        (ClassSplit(2), ["zoo-02", "zoo-01"], "zoo B0 Inc2: 2 tasks of 2 classes"),
        (ClassSplit(2, 3), None, "zoo B3 Inc2: 1 task of 3 classes, 2 tasks of 2 classes"),
    ):
        name, plans = plan_source(str(zoo), tasks, class_split=split)
        stream = Stream(name, load_tasks(plans, 6, MEMORY))
        assert (
            describe_split(stream) == f"{expected}; the data set's classes are in their own order"
        )


KEYS = "classes_per_task = 2\nfirst_task = 3\nclass_order = 1993\n"


def test_a_stream_file_has_the_same_settings(zoo):
    file = stream_file(zoo)
    file.write_text(KEYS + file.read_text())
    name, plans = plan_source(str(file), ["zoo-02"])
    assert name == "zoo B3 Inc2" and plans[0].class_split == ClassSplit(2, 3, 1993)
    assert (
        plans[0].classes == plan_source(str(zoo), class_split=ClassSplit(2, 3, 1993))[1][1].classes
    )
    permuted = [label for plan in plan_source(str(file))[1] for label in plan.classes]
    # each given field has priority, and the others are the file's
    for given, expected in (
        (ClassSplit(4), ClassSplit(4, 3, 1993)),
        (ClassSplit(first_task=5), ClassSplit(2, 5, 1993)),
        (ClassSplit(class_order=7), ClassSplit(2, 3, 7)),
        (ClassSplit(3, 2, CLASSES), ClassSplit(3, 2, CLASSES)),
    ):
        name, plans = plan_source(str(file), class_split=given)
        assert name == f"zoo B{expected.first_task} Inc{expected.classes_per_task}"
        assert plans[0].class_split == expected and len(plans[0].classes) == expected.first_task
        if expected.class_order == 1993:
            assert [label for plan in plans for label in plan.classes] == permuted
    names = ", ".join(f'"{name}"' for name in reversed(CLASSES))
    file.write_text(f'name = "mine"\n{KEYS}[[task]]\npath = "zoo"\n'.replace("1993", f"[{names}]"))
    name, plans = plan_source(str(file))
    assert name == "mine B3 Inc2" and plans[0].classes == CLASSES[:3:-1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("classes_per_task = true", "classes_per_task must be a number, got bool"),
        ("classes_per_task = 1", "classes_per_task is 1; expected at least 2"),
        (
            "first_task = 3",
            "first_task and class_order need classes_per_task; give --classes-per-t",
        ),
        ("classes_per_task = 2\nfirst_task = 0", "first_task is 0; expected at least 2"),
        ("classes_per_task = 2\nclass_order = 'a'", "must be a seed or a list of class names, got"),
        ("classes_per_task = 2\nclass_order = [1]", "must be a seed or a list of class names, got"),
        ("classes_per_task = 2\nclass_order = -1", "class_order is -1; expected a seed from 0"),
        ("classes_per_task = 6", "7 classes are too few for a first task of 6 classes"),
        ("classes_per_task = 2\nclass_order = ['ant', 'ant', 'yak']", r"must name each of the 7"),
    ],
)
def test_a_stream_file_with_a_wrong_division_is_refused(zoo, text, complaint):
    file = stream_file(zoo)
    file.write_text(f"{text}\n{file.read_text()}")
    with pytest.raises(ValueError, match=complaint) as error:
        plan_source(str(file))
    assert str(zoo.parent) in str(error.value)


def test_an_order_that_misses_repeats_or_invents_classes_is_refused(zoo):
    (plan,) = plan_source(str(zoo))[1]
    order = ("ant", "ant", "bee", "cat", "yak", "dog")
    with pytest.raises(ValueError) as error:
        split_by_class(plan, ClassSplit(2, class_order=order))
    for part in ("repeated: ['ant']", "unknown: ['yak']", "missing: ['elk', 'fox', 'gnu']"):
        assert part in str(error.value)


def test_several_data_sets_are_not_divided(tmp_path):
    for name, classes in (("one", CLASSES[:3]), ("two", CLASSES[3:])):
        photos(tmp_path / "sets" / name, classes)
    with pytest.raises(ValueError, match="divides one data set, but .* has 2: one, two; give one"):
        plan_source(str(tmp_path / "sets"), class_split=ClassSplit(2))
    # before anything is read or looked for
    file = tmp_path / "stream.toml"
    file.write_text('[[task]]\npath = "absent"\n[[task]]\nbenchmark = "dtd"\n')
    for tasks in (None, ["dtd"]):
        for source, names in (("mtil", "11: aircraft, caltech101"), (str(file), "2: absent, dtd")):
            with pytest.raises(ValueError, match=f"divides one data set, but .* has {names}"):
                plan_source(source, tasks, data_dir=tmp_path, class_split=ClassSplit(2))


def test_a_class_without_test_images_is_refused_like_in_the_whole_data_set(zoo):
    for split in ("train", "test"):
        photos(zoo.parent / "parted" / split, CLASSES if split == "train" else CLASSES[:-1])
    with pytest.raises(ValueError, match="split 'test': no image of 1 of 7 classes: 'gnu'"):
        plan_source(str(zoo.parent / "parted"), class_split=ClassSplit(2))


def run(capsys, zoo: Path, *words):
    return cheem(
        capsys, "run", "--stream", zoo, "--backbone", "vit_micro", "--method", "frozen_linear",
        "--preset", "demo", "--run-dir", zoo.parent / "run", *words,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--classes-per-task", 0], "classes_per_task is 0; expected at least 2"),
        (["--classes-per-task", 6], "7 classes are too few for a first task of 6 classes"),
        (["--classes-per-task", 2, "--class-order", "ant,yak"], "unknown: ['yak']"),
        (["--class-order", 1993], "first_task and class_order need classes_per_task; give --cl"),
        (["--classes-per-task", 2, "--class-order", ""], "--class-order is ''; expected a seed of"),
        (["--classes-per-task", 2, "--class-order", "ant,,bee"], "--class-order is 'ant,,bee'; ex"),
        (["--classes-per-task", 2, "--class-order", "9" * 5000], "expected a seed of at most 10 d"),
        (["--classes-per-task", 2, "--class-order", 2**32], "expected a seed from 0 to 4294967295"),
        (["--first-task", 3], "first_task and class_order need classes_per_task; give --cl"),
        (["--classes-per-task", 2, "--stream", "demo"], "the demo stream has several tasks"),
    ],
)
def test_bad_settings_of_a_run_are_one_line_and_status_2(capsys, zoo, words, complaint):
    status, _, error = run(capsys, zoo, *words)
    assert status == 2 and complaint in error and error.count("\n") == 1
    assert not (zoo.parent / "run").exists()


@pytest.mark.parametrize("given", [1993, ["fox", "bee", "gnu", "ant", "elk", "cat", "dog"]])
def test_a_divided_data_set_is_learned_recorded_and_resumed(capsys, zoo, monkeypatch, given):
    from cheem_jax import continual

    is_seed = isinstance(given, int)
    words = ("--classes-per-task", 2, "--class-order", given if is_seed else ",".join(given))
    evaluate = continual.evaluate

    def killed(tasks, *rest):
        if len(tasks) == 2:
            raise ValueError("killed here")
        return evaluate(tasks, *rest)

    monkeypatch.setattr(continual, "evaluate", killed)
    status, _, error = run(capsys, zoo, *words)
    assert status == 2 and "killed here" in error
    monkeypatch.undo()
    status, printed, error = run(capsys, zoo, *words)
    assert status == 0, error
    what = "permuted with seed 1993" if is_seed else "in the given order"
    sentence = f"2 tasks of 2 classes, 1 task of 3 classes; the data set's classes are {what}"
    assert f"zoo B0 Inc2: {sentence}" in " ".join(printed.split())
    first, *_ = map(json.loads, (zoo.parent / "run" / "metrics.jsonl").read_text().splitlines())
    np.random.seed(1993)
    permuted = [CLASSES[label] for label in np.random.permutation(7)]
    order = permuted if is_seed else given
    assert first["data"]["classes"] == {
        "zoo-01": order[:2],
        "zoo-02": order[2:4],
        "zoo-03": order[4:],
    }
    expected = {"classes_per_task": 2, "first_task": None, "class_order": given}
    assert first["data"]["class_split"] == expected
    # the report finds the images again and shows some
    assert "data:image" in (zoo.parent / "run" / "report.html").read_text()
    status, _, error = run(capsys, zoo, "--classes-per-task", 2)
    assert status == 2 and "data_sha256" in error
