"""Data sets of the hub: read from a folder that `save_to_disk` wrote, as the hub's are from its
cache."""

import json
import logging

import numpy as np
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from PIL import Image
from pixels import encode, stored

from cheem_jax.data import ImagesConfig, load_tasks
from cheem_jax.data.records import plan_hub
from cheem_jax.data.sources import cache_dir_of, plan_source

datasets = pytest.importorskip("datasets")
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), np.uint8)


def table(rows, labels=None, *, image="image", label="label", more=(), broken=()):
    """Rows of a data set: columns of images and one of labels, so called; the images of some rows
    are `broken`."""
    images = [
        {
            "bytes": b"no image" if row in broken else encode(Image.fromarray(PIXELS[row])),
            "path": None,
        }
        for row in rows
    ]
    features = dict.fromkeys((image, *more), datasets.Image())
    features |= {label: datasets.ClassLabel(names=["cat", "dog"]), "id": datasets.Value("int64")}
    result = dict.fromkeys((image, *more), images) | {"id": list(rows)}
    result[label] = [row % 2 for row in rows] if labels is None else labels
    return datasets.Dataset.from_dict(result, features=datasets.Features(features))


@pytest.fixture
def saved(tmp_path):
    """A folder with the splits of these rows."""

    def save(**splits):
        folder = tmp_path / "pets"
        datasets.DatasetDict(splits).save_to_disk(str(folder))
        return folder

    return save


def test_a_saved_data_set_is_a_task_with_its_splits_classes_and_pixels(saved):
    folder = saved(
        train=table(range(20), image="photo", label="kind"),
        validation=table(range(20, 30), image="photo", label="kind"),
        test=table(range(30, 40), image="photo", label="kind"),
    )
    name, (plan,) = plan_source(str(folder))
    assert (name, plan.name, plan.classes, plan.source) == (
        "pets",
        "pets",
        ("cat", "dog"),
        str(folder),
    )
    assert plan.counts == {"train": 20, "val": 10, "test": 10}
    (task,) = load_tasks([plan], 6, ImagesConfig("memory"))
    np.testing.assert_array_equal(task.train.images, PIXELS[:20])
    np.testing.assert_array_equal(task.test.labels, np.arange(30, 40) % 2)


def test_splits_of_a_saved_data_set_have_usual_names_too(saved):
    plan = plan_hub(
        saved(Training=table(range(20)), dev=table(range(20, 30)), test_set=table(range(30, 40)))
    )
    assert plan.counts == {"train": 20, "val": 10, "test": 10} and plan.cut == ()
    plan = plan_hub(saved(train=table(range(20)), extra=table(range(20, 30))))
    assert plan.cut == ("val", "test") and plan.ignored[0].endswith("pets: splits ignored: extra")
    with pytest.raises(
        ValueError, match=r"more than one name for the split val: \['val', 'validation'\]; merge"
    ):
        plan_hub(saved(train=table(range(8)), val=table(range(8)), validation=table(range(8))))


def test_empty_splits_and_rows_without_an_image_are_named(saved, tmp_path):
    rows = table(range(40))
    empty = saved(train=rows, test=rows.select([]))
    with pytest.raises(ValueError, match=r"pets cannot be read: .*without empty splits$"):
        plan_hub(empty)
    images = [None, *rows["image"][1:]]
    lacking = datasets.Dataset.from_dict(
        {"image": images, "label": rows["label"][:]},
        features=rows.select_columns(["image", "label"]).features,
    )
    lacking.save_to_disk(str(tmp_path / "lacking"))
    with pytest.raises(ValueError, match=r"'train' #0 cannot be read: the row has no image"):
        load_tasks([plan_hub(tmp_path / "lacking")], 6, ImagesConfig("memory"))


def test_photos_of_a_saved_data_set_are_turned(saved):
    rows = [stored(Image.fromarray(PIXELS[row]), 1 + row % 8) for row in range(40)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    result = {
        "image": [{"bytes": data, "path": None} for data in rows],
        "label": [row % 2 for row in range(40)],
    }
    (plan,) = plan_source(str(saved(train=datasets.Dataset.from_dict(result, features=features))))[
        1
    ]
    task, plain = load_tasks([plan.turned(True), plan], 6, ImagesConfig("memory"))
    for name, split in task.splits.items():
        want = PIXELS[[int(key.partition("/")[2]) for key in plan.splits[name].files.keys]]
        np.testing.assert_array_equal(split.images, want)
    assert (plain.train.images != task.train.images).any()


def test_one_split_is_cut_by_the_seed_as_a_folder_is_and_a_task_of_a_stream(tmp_path):
    for name in ("birds", "pets"):
        table(range(40)).save_to_disk(str(tmp_path / "stream" / name))
    name, plans = plan_source(str(tmp_path / "stream"))
    assert (name, [plan.name for plan in plans]) == ("stream", ["birds", "pets"])
    assert plans[0].counts == {"train": 25, "val": 3, "test": 12}
    again, other = (
        plan_source(str(tmp_path / "stream" / "pets"), seed=seed)[1][0] for seed in (0, 1)
    )
    assert again.split_sha256 == plans[1].split_sha256 != other.split_sha256
    file = tmp_path / "own.toml"
    file.write_text('[[task]]\npath = "stream/pets"\nname = "mine"')
    assert plan_source(str(file))[1][0].name == "mine"


def test_a_name_on_the_hub_is_read_through_the_library(monkeypatch, tmp_path, caplog):
    asked = []

    def load(*words):
        asked.append(words)
        return datasets.DatasetDict(train=table(range(40)))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(HfApi, "dataset_info", lambda self, name, timeout: None)
    file = tmp_path / "own.toml"
    file.write_text('[[task]]\nhub = "hf:someone/pets:small"')  # the prefix is superfluous
    (one,), (two,) = plan_source("hf:someone/pets")[1], plan_source(str(file))[1]
    assert (
        cache_dir_of("hf:someone/pets", None)
        == cache_dir_of("photos", None)
        != cache_dir_of("mnist", None)
    )
    assert asked == [("someone/pets", None), ("someone/pets", "small")]
    assert (
        one.name,
        two.name,
    ) == ("pets", "pets")

    def fail(*words):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        return 1 / 0

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        ValueError, match="^hf:someone/pets cannot be read: division by zero; check the name"
    ) as caught:
        plan_source("hf:someone/pets")
    assert "\n" not in str(caught.value) and not caplog.records


def test_a_hub_that_does_not_answer_is_asked_once_and_not_at_all_offline(monkeypatch):
    def fails(error):
        def dataset_info(self, name, timeout):
            assert timeout <= 10
            raise error

        return dataset_info

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *words: datasets.DatasetDict(train=table(range(40)))
    )
    monkeypatch.setattr(HfApi, "dataset_info", fails(ConnectionError("timed out")))
    with pytest.raises(
        OSError,
        match=r"cannot read 'hf:a/pets': the hub does not answer \(timed out\); .*HF_HUB_OFF",
    ):
        plan_source("hf:a/pets")
    monkeypatch.setattr(HfApi, "dataset_info", fails(OfflineModeIsEnabled("offline")))
    assert plan_source("hf:a/pets")[1][0].name == "pets"


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        ({"test": table(range(8))}, r"has no train split, only \['test'\]"),
        (
            {"train": table(range(8)).remove_columns("label")},
            "expected one column of ClassLabel, found none among",
        ),
        (
            {"train": table(range(8), image="a", more=["c"])},
            r"expected one column of Image, found \['a', 'c'\]",
        ),
        (
            {"train": table(range(8)), "test": table(range(4), [-1] * 4)},
            "4 of 4 images of test have no label; save",
        ),
        (
            {"train": table(range(8)), "test": table(range(4)).remove_columns("image")},
            "columns of test are not those",
        ),
        (
            {"train": table(range(3))},
            "to cut test and val from train every class needs 3 images or more",
        ),
    ],
)
def test_unsuitable_data_sets_are_refused_in_one_line(saved, splits, said):
    with pytest.raises(ValueError, match=said) as caught:
        plan_hub(saved(**splits))
    assert "\n" not in str(caught.value)


def test_a_broken_image_or_folder_is_named(saved):
    folder = saved(
        train=table(range(20), broken=[3]), test=table(range(20, 40)), val=table(range(20, 40))
    )
    with pytest.raises(ValueError, match=r"split 'train' #3: not an image file"):
        load_tasks([plan_hub(folder)], 6, ImagesConfig("memory"))
    (folder / "train" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="pets cannot be read"):
        plan_hub(folder)


def naming(files):
    """Rows without bytes, which name files instead."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = [{"bytes": None, "path": str(file)} for file in files]
    labels = [at % 2 for at in range(len(rows))]
    return datasets.Dataset.from_dict({"image": rows, "label": labels}, features=features)


@pytest.fixture
def outside(tmp_path):
    """Images of the user, next to the data set."""
    files = [tmp_path / "private" / f"{at:02}.png" for at in range(20)]
    files[0].parent.mkdir()
    for at, file in enumerate(files):
        file.write_bytes(encode(Image.fromarray(PIXELS[at])))
    return files


def test_rows_of_a_hub_data_set_read_its_cached_files_and_no_other_file(
    monkeypatch, tmp_path, outside
):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(HfApi, "dataset_info", lambda self, name, timeout: None)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    cached = []
    for folder in ("cache/datasets--a--pets/snapshots/1", "downloads/extracted/1"):
        (tmp_path / folder).mkdir(parents=True)
        cached += [tmp_path / folder / file.name for file in outside]
    for file, source in zip(cached, outside * 2, strict=True):
        file.write_bytes(source.read_bytes())
    link = tmp_path / "cache/datasets--a--pets/snapshots/1/link.png"
    link.symlink_to(outside[0])
    relative = tmp_path / "cache" / "datasets--a--pets" / ".." / ".." / "private" / "00.png"
    other = tmp_path / "cache/datasets--b--pets/snapshots/1/00.png"
    other.parent.mkdir(parents=True)
    other.write_bytes(outside[0].read_bytes())

    def read(files):
        rows = naming(files)
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *words: datasets.DatasetDict(train=rows)
        )
        plan = plan_hub("a/pets")
        return [plan.train.files.read(row) for row in range(len(plan.train.files.keys))]

    images = {file.read_bytes() for file in outside}
    assert set(read(cached)) <= images
    for file in (outside[0], link, relative, other):
        with pytest.raises(ValueError, match="which is outside of the data set; save"):
            read([file] * 20)


def test_a_saved_data_set_reads_no_file_outside_of_its_folder(tmp_path, saved, outside):
    folder = saved(train=table(range(20)).remove_columns("id"))
    (arrow,) = (folder / "train").glob("*.arrow")
    with datasets.arrow_writer.ArrowWriter(path=str(arrow)) as writer:
        writer.write_table(naming(outside).data.table)
    with pytest.raises(ValueError, match=r"#\d+ cannot be read: it names the file .*private"):
        load_tasks([plan_hub(folder)], 6, ImagesConfig("memory"))
    other = tmp_path / "other.arrow"
    arrow.rename(other)
    state = json.loads((folder / "train" / "state.json").read_text())
    for name in (str(other), "../../other.arrow"):
        state["_data_files"] = [{"filename": name}]
        (folder / "train" / "state.json").write_text(json.dumps(state))
        with pytest.raises(ValueError, match="outside of this folder; save the data set again"):
            plan_hub(folder)
