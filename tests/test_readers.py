import functools
import io
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import official
import pytest
from PIL import Image

from cheem_jax.data.benchmarks.archives import LabelledImage, Reading
from cheem_jax.data.benchmarks.builders import (
    read_aircraft,
    read_caltech101,
    read_cars,
    read_cub200,
    read_eurosat,
    read_gtsrb,
    read_imagenet_variant,
    read_pilot,
    read_sun397,
)
from cheem_jax.data.benchmarks.table import BY_NAME

READERS = {
    "aircraft": (read_aircraft, official.aircraft),
    "gtsrb": (read_gtsrb, official.gtsrb),
    "cars": (read_cars, official.cars),
    "sun397": (read_sun397, official.sun397),
    "eurosat": (read_eurosat, official.eurosat),
    "caltech101": (read_caltech101, official.caltech101),
    "cub200": (read_cub200, official.cub200),
    "imagenet_r": (
        functools.partial(read_imagenet_variant, name="imagenet-r"),
        functools.partial(official.imagenet_variant, "imagenet-r"),
    ),
    "vtab50": (
        functools.partial(read_pilot, name="vtab"),
        functools.partial(official.pilot, "vtab"),
    ),
}


@pytest.fixture(params=[False, True], ids=["archives", "folders"])
def unpacked(request) -> bool:
    return request.param


def examples(reading: Reading) -> dict[str, dict[str, LabelledImage]]:
    """Return the images by split and key."""
    result = {split: list(source.read()) for split, source in reading.sources.items()}
    assert all(len({example.key for example in split}) == len(split) for split in result.values())
    return {split: {example.key: example for example in sorted(result[split])} for split in result}


def labels(reading: Reading) -> dict[str, dict[str, int]]:
    return {
        split: {key: e.label for key, e in result.items()}
        for split, result in examples(reading).items()
    }


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_aircraft_variants_can_hold_spaces_and_slashes(tmp_path, unpacked):
    contents = official.aircraft()
    reading = read_aircraft(official.put(tmp_path, contents, unpacked=unpacked))
    assert reading.classes == ("707-320", "Boeing 737-700", "F/A-18")
    assert labels(reading) == {
        "train": {"0000000.jpg": 0, "0000001.jpg": 1, "0000002.jpg": 2},
        "validation": {"0000100.jpg": 0, "0000101.jpg": 1, "0000102.jpg": 2},
        "test": {"0000200.jpg": 0, "0000201.jpg": 1, "0000202.jpg": 2},
    }
    files = contents["fgvc-aircraft-2013b.tar.gz"]
    image = examples(reading)["test"]["0000201.jpg"].image
    assert image == files["fgvc-aircraft-2013b/data/images/0000201.jpg"]


def test_the_copyright_strip_of_aircraft_is_cut_only_on_demand(tmp_path):
    place = official.put(tmp_path, official.aircraft())
    for cut_strip, height in [(False, 30), (True, 10)]:
        for split in examples(read_aircraft(place, cut_strip=cut_strip)).values():
            for example in split.values():
                with Image.open(io.BytesIO(example.image)) as image:
                    assert (image.format, image.size) == ("JPEG", (8, height))


def test_an_aircraft_no_taller_than_the_strip_is_named(tmp_path):
    contents = official.aircraft()
    name = "fgvc-aircraft-2013b/data/images/0000001.jpg"
    contents["fgvc-aircraft-2013b.tar.gz"][name] = official.picture(1, size=(8, 20))
    with pytest.raises(ValueError, match=rf"{name}: .*20 rows, expected more than 20"):
        examples(read_aircraft(official.put(tmp_path, contents), cut_strip=True))


def test_traffic_signs_become_png_of_the_same_pixels(tmp_path, unpacked):
    contents = official.gtsrb()
    reading = read_gtsrb(official.put(tmp_path, contents, unpacked=unpacked))
    assert len(reading.classes) == len(set(reading.classes)) == 43
    assert [reading.classes[i] for i in (0, 14, 42)] == [
        "Speed limit (20km/h)",
        "Stop",
        "End of no passing by vehicles over 3.5 metric tons",
    ]
    result = examples(reading)
    assert {split: len(members) for split, members in result.items()} == {"train": 86, "test": 43}
    assert result["train"]["00014/00000_00001.ppm"].label == 14
    assert result["test"]["00002.ppm"].label == 40  # from the list between semicolons
    for split, key, name in [
        ("train", "00014/00000_00001.ppm", "GTSRB/Training/00014/00000_00001.ppm"),
        ("test", "00002.ppm", "GTSRB/Final_Test/Images/00002.ppm"),
    ]:
        image = result[split][key].image
        assert image.startswith(b"\x89PNG")
        original = next(files[name] for files in contents.values() if name in files)
        np.testing.assert_array_equal(pixels(image), pixels(original))


def test_car_labels_count_from_one_in_the_files_and_from_zero_here(tmp_path, unpacked):
    contents = official.cars()
    reading = read_cars(official.put(tmp_path, contents, unpacked=unpacked))
    assert reading.classes == official.CARS
    assert labels(reading) == {
        "train": {"00001.jpg": 1, "00002.jpg": 0, "00003.jpg": 1},
        "test": {"00001.jpg": 0, "00002.jpg": 1, "00003.jpg": 0},
    }
    for split, result in examples(reading).items():
        for key, example in result.items():
            assert example.image == contents[f"cars_{split}.tgz"][f"cars_{split}/{key}"]


def test_sun397_keys_are_the_lines_of_the_first_partition(tmp_path, unpacked):
    contents = official.sun397()
    reading = read_sun397(official.put(tmp_path, contents, unpacked=unpacked))
    assert reading.classes == ("/a/abbey", "/c/church/outdoor")
    assert labels(reading) == {
        "train": {
            "/a/abbey/sun_a.jpg": 0,
            "/a/abbey/sun_b.jpg": 0,
            "/c/church/outdoor/sun_a.jpg": 1,
            "/c/church/outdoor/sun_b.jpg": 1,
        },
        "test": {"/a/abbey/sun_c.jpg": 0, "/c/church/outdoor/sun_c.jpg": 1},
    }
    for result in examples(reading).values():
        for key, example in result.items():
            assert example.image == contents["SUN397.tar.gz"][f"SUN397{key}"]


def test_eurosat_has_one_split(tmp_path, unpacked):
    contents = official.eurosat()
    reading = read_eurosat(official.put(tmp_path, contents, unpacked=unpacked))
    assert list(reading.sources) == ["train"]
    result = examples(reading)["train"]
    assert {key: e.label for key, e in result.items()} == {
        f"{name}/{name}_{i}.jpg": label
        for label, name in enumerate(BY_NAME["eurosat"].class_names)
        for i in (1, 2)
    }
    assert result["River/River_2.jpg"].image == contents["EuroSAT.zip"]["2750/River/River_2.jpg"]


def test_caltech101_is_one_split_with_its_background_class(tmp_path, unpacked):
    reading = read_caltech101(official.put(tmp_path, official.caltech101(), unpacked=unpacked))
    assert len(reading.classes) == 102 and reading.classes[4] == "background_google"
    result = examples(reading)["train"]
    assert len(result) == 102
    assert result["BACKGROUND_Google/image_0001.jpg"].label == 4
    assert result["Faces/image_0001.jpg"].label == reading.classes.index("faces")
    assert pixels(result["accordion/image_0001.jpg"].image).ndim == 2  # grey stays grey


def test_the_inner_archive_of_caltech101_will_do(tmp_path):
    inner = official.caltech101()["caltech-101.zip"]["caltech-101/101_ObjectCategories.tar.gz"]
    for place in (tmp_path / "a", tmp_path / "b" / "caltech-101"):
        place.mkdir(parents=True)
        (place / "101_ObjectCategories.tar.gz").write_bytes(inner)
    assert examples(read_caltech101(tmp_path / "a")) == examples(read_caltech101(tmp_path / "b"))


def test_birds_have_the_official_splits(tmp_path, unpacked):
    contents = official.cub200()
    reading = read_cub200(official.put(tmp_path, contents, unpacked=unpacked))
    assert reading.classes == ("001.Bird_0", "002.Bird_1")
    assert labels(reading) == {
        "train": {
            f"00{label + 1}.Bird_{label}/00{label + 1}.Bird_{label}_000{i}.jpg": label
            for label in (0, 1)
            for i in (0, 1)
        },
        "test": {
            f"00{label + 1}.Bird_{label}/00{label + 1}.Bird_{label}_0002.jpg": label
            for label in (0, 1)
        },
    }


def test_a_fifth_of_the_images_without_splits_is_the_test_split(tmp_path, unpacked):
    read, contents = READERS["imagenet_r"]
    reading = read(official.put(tmp_path, contents(num=10), unpacked=unpacked))
    assert reading.classes == ("n00000000", "n00000001")
    result = labels(reading)
    for split, num in (("train", 8), ("test", 2)):
        assert sorted(result[split].values()) == [0] * num + [1] * num
    assert len(result["train"].keys() | result["test"].keys()) == 20


@pytest.mark.parametrize("archive", ["cub", "imagenet-r", "imagenet-a", "vtab", "omnibenchmark"])
def test_a_copy_by_pilot_keeps_its_splits(tmp_path, unpacked, archive):
    place = official.put(tmp_path, official.pilot(archive), unpacked=unpacked)
    if archive == "cub":
        reading = read_cub200(place)
    elif archive.startswith("imagenet"):
        reading = read_imagenet_variant(place, name=archive)
    else:
        reading = read_pilot(place, name=archive)
    assert reading.classes == ("10", "11", "12")
    expected = {
        "train": ["0.jpg", "1.png", "2.jpg", "3.png"],
        "test": ["4.jpg", "5.png"],
    }
    assert labels(reading) == {
        split: {f"{name}/{file}": label for label, name in enumerate(reading.classes) for file in f}
        for split, f in expected.items()
    }


def test_a_copy_by_pilot_without_test_images_is_refused(tmp_path):
    place = official.put(tmp_path, official.pilot("vtab"), unpacked=True)
    shutil.rmtree(place / "vtab" / "test" / "11")
    with pytest.raises(ValueError, match="vtab: test: no image of 1 of 3 classes: '11'"):
        read_pilot(place, name="vtab")
    shutil.rmtree(place / "vtab" / "test")
    with pytest.raises(FileNotFoundError, match="vtab: no image is at test/<class>/<image>"):
        read_pilot(place, name="vtab")


@pytest.mark.parametrize("name", READERS)
def test_everything_missing_is_listed_at_once(tmp_path, name):
    read, contents = READERS[name]
    needed = list(contents())
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError) as caught:
            read(place)
        assert str(caught.value).startswith(f"{place}: missing")
        assert [archive for archive in needed if archive not in str(caught.value)] == []
    if len(needed) > 1:
        official.put(tmp_path, {needed[0]: contents()[needed[0]]})
        with pytest.raises(FileNotFoundError, match=re.escape(needed[-1])) as caught:
            read(tmp_path)
        assert needed[0] not in str(caught.value)


@pytest.mark.parametrize(
    "name", [pytest.param("cars", marks=pytest.mark.full), *sorted(set(READERS) - {"cars"})]
)
@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) * 2 // 3], lambda data: b"<!DOCTYPE html>404"]
)
def test_corrupted_archives_are_named_and_leave_no_data_set(tmp_path, name, damage):
    read, contents = READERS[name]
    for archive in contents():
        place = official.put(tmp_path / archive, contents())
        (place / archive).write_bytes(damage((place / archive).read_bytes()))
        with pytest.raises(ValueError, match=re.escape(archive)):
            examples(read(place))


@pytest.mark.parametrize(
    "name, image, first",
    [
        ("aircraft", "fgvc-aircraft-2013b/data/images/0000101.jpg", "0000101.jpg"),
        ("gtsrb", "GTSRB/Training/00005/00000_00001.ppm", "00005/00000_00001.ppm"),
        ("gtsrb", "GTSRB/Final_Test/Images/00007.ppm", "00007.ppm"),
        ("cars", "cars_test/00002.jpg", "00002.jpg"),
        ("sun397", "SUN397/c/church/outdoor/sun_a.jpg", "/c/church/outdoor/sun_a.jpg"),
        (
            "cub200",
            "CUB_200_2011/images/001.Bird_0/001.Bird_0_0001.jpg",
            "001.Bird_0/001.Bird_0_0001.jpg",
        ),
    ],
)
def test_listed_images_that_are_absent_are_counted_and_named(tmp_path, name, image, first):
    read, contents = READERS[name]
    place = official.put(tmp_path / "folders", contents(), unpacked=True)
    (place / image).unlink()
    message = rf"1 of \d+ listed images are absent, the first are \['{first}'\]"
    with pytest.raises(ValueError, match=message):
        examples(read(place))
    shorter = {
        archive: {key: data for key, data in files.items() if key != image}
        for archive, files in contents().items()
    }
    with pytest.raises(ValueError, match=message):
        examples(read(official.put(tmp_path / "archives", shorter)))


def test_a_class_without_images_is_named(tmp_path):
    place = official.put(tmp_path, official.eurosat(), unpacked=True)
    shutil.rmtree(place / "2750" / "River")
    with pytest.raises(ValueError, match="2750: no image of 1 of 10 classes: 'river'"):
        read_eurosat(place)
    official.write(place, {"2750/Moon/Moon_1.jpg": official.picture(1)})
    with pytest.raises(
        ValueError, match=r"2750: 1 images .* to no class of this data set; .*'moon'"
    ):
        read_eurosat(place)


def test_car_labels_that_count_from_zero_are_refused(tmp_path):
    contents = official.cars()
    zero_based = official.car_annotations([("00001.jpg", 0), ("00002.jpg", 1)])
    contents[official.CAR_TEST_LIST][official.CAR_TEST_LIST] = zero_based
    with pytest.raises(
        ValueError, match=r"withlabels\.mat: 1 images .* to no class .*'00001.jpg' of class 0"
    ):
        read_cars(official.put(tmp_path, contents))


@pytest.mark.full
def test_car_lists_of_another_shape_are_refused(tmp_path):
    place = official.put(tmp_path, official.cars())
    file = place / official.CAR_TEST_LIST
    for data, message in [
        (official.mat(other=np.zeros(2)), "variable 'annotations' cannot be read"),
        (official.mat(annotations=np.zeros(2)), "need the fields fname and class"),
        (b"<html>sign in</html>", "variable 'annotations' cannot be read"),
        (
            official.car_annotations([("00001.jpg", 1), ("00001.jpg", 2)]),
            "1 images occur twice .*'00001.jpg'",
        ),
    ]:
        file.write_bytes(data)
        with pytest.raises(ValueError, match=rf"withlabels\.mat: .*{message}"):
            read_cars(place)


def test_lists_that_do_not_fit_are_refused(tmp_path):
    def read_with(name: str, reader: str, archive: str, data: bytes) -> None:
        read, contents = READERS[reader]
        changed = contents()
        changed[archive][name] = data
        place = tmp_path / reader
        shutil.rmtree(place, ignore_errors=True)
        read(official.put(place, changed))

    train = "fgvc-aircraft-2013b/data/images_variant_train.txt"
    for line, message in [
        (
            "0000000 Concorde",
            "train.txt: 1 images .* to no class .*'0000000.jpg' of class 'Concorde'",
        ),
        ("0000000", "train.txt: 1 images .* to no class .*'0000000.jpg' of class ''"),
        ("0000000 F/A-18\n0000000 F/A-18", "1 images occur twice .*'0000000.jpg'"),
        ("0000000 F/A-18", "no image of 2 of 3 classes: '707-320', 'Boeing 737-700'"),
        ("\udcff", "not a text file in UTF-8"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_with(
                train,
                "aircraft",
                "fgvc-aircraft-2013b.tar.gz",
                line.encode(errors="surrogateescape"),
            )
    with pytest.raises(
        ValueError, match="Training_01.txt: 1 images .* to no class .*'/z/x.jpg' of class '/z'"
    ):
        read_with("Training_01.txt", "sun397", "Partitions.zip", b"/z/x.jpg")
    unlabelled = official.text("Filename;Width;Height", "00000.ppm;8;8")
    for data, message in [
        (unlabelled, "line 2: expected columns Filename and ClassId"),
        (b"", "no image of 43"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_with("GT-final_test.csv", "gtsrb", "GTSRB_Final_Test_GT.zip", data)
    outside = official.text(official.TRUTH_HEADER, "00000.ppm;8;8;1;1;7;7;43")
    with pytest.raises(ValueError, match="1 images .* to no class .*'00000.ppm' of class 43"):
        read_with("GT-final_test.csv", "gtsrb", "GTSRB_Final_Test_GT.zip", outside)


def test_an_archive_without_its_lists_is_another_version(tmp_path):
    contents = official.aircraft()
    del contents["fgvc-aircraft-2013b.tar.gz"]["fgvc-aircraft-2013b/data/variants.txt"]
    with pytest.raises(
        FileNotFoundError, match=r"2013b\.tar\.gz: missing variants\.txt; check the version"
    ):
        read_aircraft(official.put(tmp_path, contents))


def test_an_image_that_is_there_twice_is_refused(tmp_path):
    place = official.put(tmp_path, official.cars(), unpacked=True)
    shutil.copytree(place / "cars_train", place / "cars_train" / "cars_train")
    with pytest.raises(ValueError, match="cars_train: image '00001.jpg' occurs twice"):
        examples(read_cars(place))


def test_a_broken_traffic_sign_is_named(tmp_path):
    contents = official.gtsrb()
    contents["GTSRB-Training_fixed.zip"]["GTSRB/Training/00003/00000_00000.ppm"] = (
        b"P6 8 8 255\n short"
    )
    reading = read_gtsrb(official.put(tmp_path, contents))
    with pytest.raises(ValueError, match=r"00003/00000_00000\.ppm: the image cannot be decoded"):
        examples(reading)


def test_readers_import_no_tensorflow():
    code = "import sys, cheem_jax.data.benchmarks.builders; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert not {"tensorflow", "tensorflow_datasets"} & set(done.stdout.split())
