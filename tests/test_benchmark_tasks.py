"""Every task of MTIL and VDD through the code that a user's run takes, from small data sets that
TFDS has prepared."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from cheem_jax.data.benchmarks.prepare import plan_of, registered, splits_file
from cheem_jax.data.benchmarks.table import BY_NAME, MTIL, TASKS, Counts, task_names, task_order
from cheem_jax.data.files import Chosen
from cheem_jax.data.load import load_tasks
from cheem_jax.data.records import find_prepared, open_prepared, plan_tfds
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import cut_missing

OFFICIAL_SIZES = {
    "aircraft": {"train": 3334, "val": 3333, "test": 3333},
    "caltech101": {"train": 8677},
    "cifar100": {"train": 50000, "test": 10000},
    "dtd": {"train": 1880, "val": 1880, "test": 1880},
    "eurosat": {"train": 27000},
    "flowers": {"train": 1020, "val": 1020, "test": 6149},
    "food101": {"train": 75750, "test": 25250},
    "mnist": {"train": 60000, "test": 10000},
    "pets": {"train": 3680, "test": 3669},
    "cars": {"train": 8144, "test": 8041},
    "sun397": {"train": 19850, "test": 19850},
    "imagenet12": {"train": 1232167, "test": 49000},
    "svhn": {"train": 73257, "test": 26032},
    "ucf101": {"train": 7585, "test": 1952},
    "omniglot": {"train": 17853, "test": 6492},
    "gtsrb": {"train": 26640, "test": 12630},
    "dped": {"train": 23520, "test": 5880},
    "imagenet_r": {"train": 24000, "test": 6000},
}
"""The part of the data sets that the benchmark uses."""


@pytest.mark.parametrize(
    "task", [task for task in TASKS if task.counts], ids=lambda task: task.name
)
def test_the_papers_counts_follow_from_the_split_rules(task):
    sizes = dict(OFFICIAL_SIZES[task.name])
    if task.name == "imagenet12":  # the same rule on a twentieth part, which is quicker to sort
        sizes["train"] //= 20
    members = {
        split: {f"{split}{row}": row % task.num_classes for row in range(num)}
        for split, num in sizes.items()
    }
    before = {key: label for labels in members.values() for key, label in labels.items()}
    classes = [f"class {label}" for label in range(task.num_classes)]
    cut_missing(task.name, classes, members, 0, floor=task.rule == "decathlon")
    result = Counts(*(len(members[split]) for split in ("train", "val", "test")))
    if task.name == "imagenet12":
        assert result.val == 61608 // 10 and 1232167 // 10 == task.counts.val
        assert 1232167 - task.counts.val == task.counts.train and result.test == task.counts.test
    else:
        assert result == task.counts
    assert {key: label for labels in members.values() for key, label in labels.items()} == before
    assert len(before) == sum(result)


def test_the_streams_are_those_of_the_paper():
    assert len(task_names("mtil")) == 11
    assert len(task_names("vdd")) == 10
    assert "imagenet12" not in task_order("vdd")
    assert {frozenset(order.split()) for order in MTIL.values()} == {frozenset(task_names("mtil"))}
    assert task_order("mtil")[:3] == ("aircraft", "caltech101", "cifar100")
    assert (
        task_order("mtil", "paper_c")[0] == "mnist" and task_order("mtil", "zscl_ii")[0] == "cars"
    )
    members = {name for benchmark in ("mtil", "vdd", "cil") for name in task_names(benchmark)}
    assert members == set(BY_NAME)
    with pytest.raises(ValueError, match="order 'paper_a' belongs to mtil"):
        task_order("vdd", "paper_a")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """All tasks, with four images per class in each of TFDS's splits, and the resulting counts."""
    pytest.importorskip("tensorflow_datasets", reason="the extra `datasets` is not installed")
    from prepared import small_task

    data_dir = tmp_path_factory.mktemp("data")
    tasks = {}
    for task in TASKS:
        splits = [*task.train, *task.val, *task.test]
        small_task(data_dir, task, dict.fromkeys(splits, 4))
        num = task.num_classes
        counts = {
            "official": Counts(4 * num, 4 * num, 4 * num),
            "val": Counts(3 * num, num, 4 * num),  # a tenth would be less than one of each class
            "decathlon": Counts(3 * num, num, 4 * num),
            "test and val": (
                Counts(464, 101, 243) if task.name == "caltech101" else Counts(18, 10, 12)
            ),
        }[task.rule]
        tasks[task.name] = dataclasses.replace(task, counts=counts)
    return data_dir, tasks


@pytest.mark.parametrize("name", [*BY_NAME])
def test_every_task_loads_as_a_users_run_loads_it(prepared, name):
    data_dir, tasks = prepared
    plan = plan_of(tasks[name], data_dir)
    assert plan.name == name and len(plan.classes) == tasks[name].num_classes
    few = dataclasses.replace(
        plan,
        **{
            split: dataclasses.replace(
                part, files=Chosen(part.files, rows.tolist()), labels=part.labels[rows]
            )
            for split, part in plan.splits.items()
            for rows in [np.unique(part.labels, return_index=True)[1]]
        },
    )
    (task,) = load_tasks([few], 8)
    assert task.train.images.shape == (len(plan.classes), 8, 8, 3)
    assert task.train.images.std() > 5  # noise was stored, and the same noise is read
    assert [*np.unique(task.test.labels)] == [*range(len(plan.classes))]


def test_classes_that_a_benchmark_leaves_out_take_their_images_along(prepared):
    data_dir, tasks = prepared
    plan = plan_of(tasks["caltech101"], data_dir)
    assert "background_google" not in plan.classes
    assert plan.classes[:5] == (
        "accordion",
        "airplanes",
        "anchor",
        "ant",
        "barrel",
    )
    keys = [part.files.key(row) for part in plan.splits.values() for row in range(len(part.files))]
    assert len(keys) == 808 and not any("background" in key for key in keys)
    assert all(
        f"/{plan.classes[label]}/" in part.files.key(row)
        for part in plan.splits.values()
        for row, label in enumerate(part.labels.tolist())
    )


def test_splits_depend_on_the_seed_and_are_written_down(prepared):
    data_dir, tasks = prepared
    plans = [plan_of(tasks["pets"], data_dir, seed=seed) for seed in (3, 3, 4)]
    assert plans[0].split_sha256 == plans[1].split_sha256 != plans[2].split_sha256
    record = json.loads(splits_file(data_dir, "pets", 3).read_text())
    assert record["sha256"] == plans[0].split_sha256
    assert record["counts"] == {
        "train": 111,
        "val": 37,
        "test": 148,
    }
    assert len(splits_file(data_dir, "pets", 3).read_text()) < 1000


def test_splits_other_than_those_written_down_are_refused(prepared):
    data_dir, tasks = prepared
    plan_of(tasks["pets"], data_dir, seed=5)
    file = splits_file(data_dir, "pets", 5)
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"sha256": "0" * 64}))
    with pytest.raises(
        ValueError, match="task 'pets': the splits have the sha256 .*pets-seed5.json contains"
    ):
        plan_of(tasks["pets"], data_dir, seed=5)
    file.write_text("{")
    with pytest.raises(ValueError, match="pets-seed5.json is corrupted"):
        plan_of(tasks["pets"], data_dir, seed=5)


def test_wrong_counts_are_refused_with_the_task_and_both_numbers(prepared):
    data_dir, _ = prepared
    with pytest.raises(
        ValueError,
        match=r"task 'mnist' has 30/10/40 train/val/test .* expected 54,000/6,000/10,000",
    ):
        plan_of(BY_NAME["mnist"], data_dir)


def test_an_example_is_the_same_wherever_it_was_prepared(prepared, tmp_path):
    """TFDS shuffles prepared data; another order of the same images leads to the same splits."""
    from prepared import prepare_small

    data_dir, tasks = prepared
    task = tasks["svhn"]
    mnist = plan_of(tasks["mnist"], data_dir)
    assert all(len(key.split("/")[-1].split("#")[0]) == 64 for key in mnist.train.files.keys)
    labels = {"train": np.repeat(np.arange(10), 4), "test": np.repeat(np.arange(10), 4)}
    prepare_small(tmp_path, task.spec, labels)
    assert plan_of(task, tmp_path).split_sha256 == plan_of(task, data_dir).split_sha256


def test_withheld_labels_are_refused(prepared):
    from prepared import prepare_small

    data_dir, _ = prepared
    labels = {"train": np.repeat([0, 1], 6), "test": np.full(4, -1)}
    prepare_small(
        data_dir / "withheld", "visual_domain_decathlon/daimlerpedcls:1.2.0", labels, key="name"
    )
    with pytest.raises(
        ValueError, match="4 of 4 examples of split 'test' have labels outside 0..1 .*are withheld"
    ):
        plan_tfds("visual_domain_decathlon/daimlerpedcls", data_dir / "withheld")


def test_any_prepared_data_set_is_a_task(prepared):
    data_dir, _ = prepared
    plan = plan_tfds("dtd:3.0.1", data_dir, name="textures")
    assert plan.name == "textures"
    assert [len(part.labels) for part in plan.splits.values()] == [188] * 3
    plan = plan_tfds("eurosat/rgb", data_dir)
    assert [len(part.labels) for part in plan.splits.values()] == [18, 10, 12]
    assert plan.split_sha256 == plan_tfds("eurosat", data_dir).split_sha256


@pytest.mark.full
def test_numbers_name_no_images_and_other_splits_are_named(tmp_path):
    from prepared import prepare_small, tfds

    labels = {"train": np.arange(40) % 10, "extra": np.arange(10)}
    prepare_small(tmp_path, "mnist:3.0.1", labels, more={"id": tfds.features.Scalar(np.int64)})
    plan = plan_tfds("mnist", tmp_path)
    assert plan.num_images == 40
    assert plan.ignored == ("tfds:mnist/3.0.1: splits ignored: extra",)


def test_a_data_set_that_is_not_prepared_is_named(prepared, tmp_path):
    data_dir, _ = prepared
    with pytest.raises(FileNotFoundError, match="'mnist:9.9.9' is not prepared in"):
        find_prepared("mnist:9.9.9", data_dir)
    with pytest.raises(ValueError, match="several configs .*'daimlerpedcls', 'imagenet12'"):
        find_prepared("visual_domain_decathlon", data_dir)
    with pytest.raises(ValueError, match="'a b' is not the name of a TFDS data set"):
        find_prepared("a b", data_dir)
    with pytest.raises(FileNotFoundError, match="is not prepared"):
        plan_of(BY_NAME["food101"], tmp_path)


def test_a_corrupted_data_set_is_named(prepared, tmp_path):
    data_dir, tasks = prepared
    shutil.copytree(data_dir / "dtd", tmp_path / "dtd")
    directory = tmp_path / "dtd" / "3.0.1"
    shutil.rmtree(directory / ".cheem_jax", ignore_errors=True)
    (shard,) = directory.glob("*test*")
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"dtd.*3\.0\.1"):
        plan_of(tasks["dtd"], tmp_path)
    (directory / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match="not a data set of labelled images that TFDS can open"):
        open_prepared("dtd", tmp_path)


def test_a_data_set_in_tfrecord_format_is_refused_with_the_way_out(prepared, tmp_path):
    data_dir, _ = prepared
    shutil.copytree(data_dir / "dtd", tmp_path / "dtd")
    info = tmp_path / "dtd" / "3.0.1" / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(
        ValueError, match="format 'tfrecord', which needs TensorFlow .* prepare it again"
    ):
        open_prepared("dtd", tmp_path)


def test_the_table_of_the_docs_lists_the_benchmarks_tasks():
    lines = (Path(__file__).parent.parent / "docs" / "data.md").read_text().splitlines()
    rows = {
        cells[1].strip("` "): cells
        for line in lines
        if len(cells := line.split("|")) == 10 and "`" in cells[1]
    }
    assert set(rows) == set(BY_NAME)
    for name, cells in rows.items():
        task = BY_NAME[name]
        values = [cell.strip(" `") for cell in cells[2:]]
        benchmarks = [group for group in ("mtil", "vdd", "cil") if name in task_names(group)]
        assert values[0].split() == benchmarks and values[1] == f"{task.num_classes:,}"
        assert values[2] == (" / ".join(f"{num:,}" for num in task.counts or ()) or "–")
        assert (values[3], values[4], values[6]) == (task.rule, task.spec, task.licence)


def test_a_stream_file_accepts_prepared_data_sets_and_tasks_of_the_benchmarks(
    prepared, tmp_path, monkeypatch
):
    data_dir, tasks = prepared
    monkeypatch.setitem(BY_NAME, "dtd", tasks["dtd"])
    file = tmp_path / "mixed.toml"
    file.write_text(
        '[[task]]\ntfds = "eurosat/rgb:2.0.0"\n[[task]]\nbenchmark = "dtd"\n[[task]]\ntfds ='
        ' "mnist"\nname = "digits"\n'
    )
    name, plans = plan_source(str(file), data_dir=data_dir)
    assert (name, [plan.name for plan in plans]) == ("mixed", ["eurosat", "dtd", "digits"])
    assert plans[1].split_sha256 == plan_of(tasks["dtd"], data_dir).split_sha256
    name, (digits,) = plan_source("tfds:mnist:3.0.1", data_dir=data_dir)
    assert digits.num_images == plans[2].num_images == 80
    (task,) = load_tasks([plans[2]], 8)
    assert len(np.unique(task.train.labels)) == 10


def test_a_benchmark_is_planned_in_the_order_asked_for(prepared, monkeypatch):
    data_dir, tasks = prepared
    for name, task in tasks.items():
        monkeypatch.setitem(BY_NAME, name, task)
    for order in ("default", "paper_b"):
        name, plans = plan_source("mtil", data_dir=data_dir, order=order)
        assert name == "mtil" and tuple(plan.name for plan in plans) == task_order("mtil", order)
    _, plans = plan_source("vdd", ["svhn", "dped"], data_dir=data_dir)
    assert [plan.name for plan in plans] == ["svhn", "dped"]
    with pytest.raises(ValueError, match="benchmark 'vdd' has no task 'mnist'"):
        plan_source("vdd", ["mnist"], data_dir=data_dir)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off"])
def test_a_corrupted_index_is_made_again(prepared, content):
    data_dir, tasks = prepared
    plan = plan_of(tasks["flowers"], data_dir)
    files = list((data_dir / "oxford_flowers102" / "2.1.1" / ".cheem_jax").glob("*.npz"))
    assert len(files) == 3
    for file in files:
        file.write_bytes(content)
    assert plan_of(tasks["flowers"], data_dir).split_sha256 == plan.split_sha256
    assert all(len(file.read_bytes()) > 100 for file in files)


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(prepared, tmp_path):
    data_dir, tasks = prepared
    shutil.copytree(data_dir / "dtd", tmp_path / "dtd")
    index = tmp_path / "dtd" / "3.0.1" / ".cheem_jax"
    shutil.rmtree(index, ignore_errors=True)
    index.write_text("a file in the place of the folder")
    assert plan_tfds("dtd", tmp_path).num_images == 3 * 188


def opened(prepared, tmp_path, change):
    """Open a changed copy of a prepared data set."""
    data_dir, _ = prepared
    place = find_prepared("mnist", data_dir)
    copy = tmp_path / place.relative_to(data_dir)
    shutil.copytree(place, copy)
    change(copy)
    return plan_tfds("mnist", tmp_path)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_data_set_cannot_have_modules_imported(prepared, tmp_path, monkeypatch, legacy):
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    def change(place):
        file = place / "features.json"
        text = file.read_text()
        if legacy:
            inner = json.dumps({"image": {"type": "hostile_module.Feature", "content": {}}})
            record = {
                "type": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
                "content": inner,
            }
            file.write_text(json.dumps(record))
        else:
            file.write_text(
                text.replace(
                    "tensorflow_datasets.core.features.image_feature.Image", "hostile_module.Image"
                )
            )
        assert file.read_text() != text

    with pytest.raises(
        ValueError,
        match=r"features\.json names the classes \['hostile_module\.\w+'\]; only features of TFDS",
    ):
        opened(prepared, tmp_path, change)


def test_metadata_that_promises_more_than_the_files_hold_is_refused(prepared, tmp_path):
    def examples(place):
        file = place / "dataset_info.json"
        info = json.loads(file.read_text())
        info["splits"][0]["shardLengths"] = [str(10**12)]
        file.write_text(json.dumps(info))

    def classes(place):
        file = place / "features.json"
        file.write_text(
            re.sub(r'"numClasses": "\d+"', f'"numClasses": "{10**12}"', file.read_text())
        )
        for names in place.glob("*.labels.txt"):
            names.unlink()

    with pytest.raises(ValueError, match=r"its metadata says 1\d{12} examples in \d+ bytes"):
        opened(prepared, tmp_path / "a", examples)
    with pytest.raises(ValueError, match="1000000000000 classes, expected at most 1000000"):
        opened(prepared, tmp_path / "b", classes)


@pytest.mark.parametrize(
    "arrays",
    [
        {"keys": np.array([b"x"]), "labels": np.zeros(2, np.int32)},
        {"keys": np.array(["x"]), "labels": np.zeros(1, np.int32)},
        {"keys": np.array(b"x"), "labels": np.array(0, np.int32)},
        {"keys": np.array([b"x"]), "labels": np.array([99], np.int32)},
        {"keys": np.array([b"\xff"]), "labels": np.zeros(1, np.int32)},
        {"other": np.zeros(1)},
    ],
)
def test_an_index_next_to_a_data_set_that_makes_no_sense_is_made_again(prepared, tmp_path, arrays):
    data_dir, _ = prepared
    want = plan_tfds("mnist", data_dir)

    def change(place):
        for index in place.glob(".cheem_jax/train-*.npz"):  # of one key or another
            np.savez(index, allow_pickle=False, **arrays)

    result = opened(prepared, tmp_path, change)
    assert result.split_sha256 == want.split_sha256


@pytest.mark.parametrize("text", ["[" * 100_000, "3", '{"sha256": 7}'])
def test_a_record_of_splits_that_makes_no_sense_is_reported(prepared, tmp_path, text):
    data_dir, tasks = prepared
    plan_of(tasks["mnist"], data_dir, seed=77)
    file = splits_file(data_dir, "mnist", 77)
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"{file.name}"):
        plan_of(tasks["mnist"], data_dir, seed=77)
    file.unlink()


def test_every_file_that_a_stock_builder_fetches_has_a_registered_hash():
    """Some of their addresses are not encrypted, so that only the hash reveals a changed file."""
    pytest.importorskip("tensorflow_datasets", reason="the extra `datasets` is not installed")
    archives = [
        a for task in TASKS if not task.archives for a in registered(task, Path("/nonexistent"))
    ]
    assert sum(archive.url.startswith("http://") for archive in archives) > 5
    assert all(
        re.fullmatch("[0-9a-f]{64}", archive.hash or "") and archive.num_bytes
        for archive in archives
    )
