import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import official
import pytest

from cheem_jax.data.benchmarks.archives import Reading
from cheem_jax.data.benchmarks.builders import (
    read_aircraft,
    read_caltech101,
    read_cars,
    read_eurosat,
    read_gtsrb,
    read_sun397,
)
from cheem_jax.data.benchmarks.table import BY_NAME

# by builder: its folder, its reader, the feature with the key, and the key made of a source's key
BUILDERS: dict[
    str, tuple[str, Callable[[Path], Reading], Callable[[], official.Contents], str, Callable]
] = {
    "fgvc_aircraft/default": (
        "fgvc_aircraft/default/1.0.0",
        read_aircraft,
        official.aircraft,
        "file_name",
        lambda key: key.removesuffix(".jpg"),
    ),
    "fgvc_aircraft/without_strip": (
        "fgvc_aircraft/without_strip/1.0.0",
        lambda place: read_aircraft(place, cut_strip=True),
        official.aircraft,
        "file_name",
        lambda key: key.removesuffix(".jpg"),
    ),
    "gtsrb": ("gtsrb/1.0.0", read_gtsrb, official.gtsrb, "file_name", str),
    "cars196": (
        "cars196/2.1.0",
        read_cars,
        official.cars,
        "id",
        lambda key: key.removesuffix(".jpg"),
    ),
    "sun397/standard-part1-120k": (
        "sun397/standard-part1-120k/4.0.0",
        read_sun397,
        official.sun397,
        "file_name",
        str,
    ),
    "eurosat/rgb": (
        "eurosat/rgb/2.0.0",
        read_eurosat,
        official.eurosat,
        "filename",
        os.path.basename,
    ),
    "caltech101": (
        "caltech101/3.0.2",
        read_caltech101,
        official.caltech101,
        "image/file_name",
        os.path.basename,
    ),
}


SUN397 = "sun397/standard-part1-120k"


@pytest.fixture
def tfds(tmp_path, monkeypatch) -> Any:
    # its own builders leave a temporary folder behind for each that is made
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return pytest.importorskip("tensorflow_datasets", reason="needs the extra `datasets`")


@pytest.fixture
def prepare(tfds) -> Callable[[str, Path, Path], Path]:
    from cheem_jax.data.benchmarks.builders import prepare_from_folder

    return prepare_from_folder


def files_below(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


@pytest.mark.full
@pytest.mark.parametrize("name", BUILDERS)
def test_a_reader_reads_every_record_that_its_builder_stores(tfds, prepare, tmp_path, capfd, name):
    stored, read, contents, key_feature, text = BUILDERS[name]
    place = official.put(tmp_path / "place", contents())
    directory = prepare(name, tmp_path / "data", place)
    assert directory == tmp_path / "data" / stored
    assert "".join(capfd.readouterr()) == ""
    reading = read(place)
    builder = tfds.builder_from_directory(directory)
    assert set(builder.info.splits) == set(reading.sources)
    assert tuple(builder.info.features["label"].names) == reading.classes
    for split, images in reading.sources.items():
        source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        result = [(e[key_feature].decode(), e["image"], int(e["label"])) for e in source]
        assert sorted(result) == sorted(
            (text(key), image, label) for key, image, label in images.read()
        )


@pytest.mark.parametrize(
    "name", ["cars196", "sun397/standard-part1-120k", "eurosat/rgb", "caltech101"]
)
def test_names_versions_and_features_are_those_of_the_stock_builder(tfds, prepare, tmp_path, name):
    contents = BUILDERS[name][2]
    directory = prepare(name, tmp_path / "data", official.put(tmp_path / "place", contents()))
    stock = tfds.builder(name, data_dir=tmp_path / "stock")
    assert directory.relative_to(tmp_path / "data") == Path(stock.data_dir).relative_to(
        tmp_path / "stock"
    )
    ours = tfds.builder_from_directory(directory).info.features
    shared = {
        feature for feature in stock.info.features if feature != "bbox"
    }  # left out on purpose
    assert set(ours) == shared
    for feature in shared - {"label"}:
        theirs = stock.info.features[feature]
        assert (ours[feature].shape, ours[feature].np_dtype) == (theirs.shape, theirs.np_dtype)


def test_class_names_are_in_the_order_of_the_stock_builders(tfds, tmp_path):
    for name in ("caltech101", "eurosat"):
        builder = tfds.builder(BY_NAME[name].builder, data_dir=tmp_path)
        assert tuple(builder.info.features["label"].names) == BY_NAME[name].class_names


def test_the_description_of_a_data_set_names_its_source(tfds, prepare, tmp_path):
    directory = prepare(
        SUN397, tmp_path / "data", official.put(tmp_path / "place", official.sun397())
    )
    info = tfds.builder_from_directory(directory).info
    assert "folder that the user filled" in info.description and "original" in info.description


def test_a_prepared_data_set_stays_and_the_folder_can_go(prepare, tmp_path):
    place = official.put(tmp_path / "place", official.sun397())
    directory = prepare(SUN397, tmp_path / "data", place)
    before = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
    assert prepare(SUN397, tmp_path / "data", tmp_path / "gone") == directory
    assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == before


@pytest.mark.full
def test_an_error_midway_leaves_nothing_and_the_next_attempt_succeeds(prepare, tmp_path):
    contents = official.cars()
    last = contents["cars_test.tgz"].popitem()
    place = official.put(tmp_path / "place", contents)
    # train is written by then: the absence shows at the end of the second archive
    with pytest.raises(ValueError, match=r"cars_test\.tgz: 1 of 3 listed images are absent"):
        prepare("cars196", tmp_path / "data", place)
    assert files_below(tmp_path / "data") == []
    assert not any((tmp_path / "data" / "cars196").glob("*"))
    contents["cars_test.tgz"] |= dict([last])
    directory = prepare("cars196", tmp_path / "data", official.put(place, contents))
    assert [file for file in files_below(tmp_path / "data") if "cars196/2.1.0" not in file] == []
    assert (directory / "dataset_info.json").is_file()


def test_missing_files_and_unknown_names_leave_nothing_behind(prepare, tmp_path):
    (tmp_path / "place").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"place: missing SUN397\.tar\.gz .*Partitions\.zip"
    ):
        prepare(SUN397, tmp_path / "data", tmp_path / "place")
    with pytest.raises(
        ValueError,
        match=r"unknown builder 'sun'; expected one of fgvc_aircraft/default, .*caltech101",
    ):
        prepare("sun", tmp_path / "data", tmp_path / "place")
    assert not (tmp_path / "data").exists()


def test_the_stock_builders_stay_registered(tfds, prepare):
    for name in ("cars196", "sun397", "eurosat", "caltech101"):
        assert tfds.builder_cls(name).__module__.startswith("tensorflow_datasets.")


def test_progress_bars_of_tfds_are_shown_again_afterwards(tfds, prepare, tmp_path, capfd):
    from tensorflow_datasets.core.utils import tqdm_utils

    prepare(SUN397, tmp_path / "data", official.put(tmp_path / "place", official.sun397()))
    assert list(tqdm_utils.tqdm(range(2), desc="again")) == [0, 1]
    assert "again" in capfd.readouterr().err
