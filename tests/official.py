"""Small copies of the data sets' official archives: the real layout and quirks, a few images of
eight pixels."""

import dataclasses
import hashlib
import io
import itertools
import tarfile
import zipfile
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import scipy.io
from PIL import Image
from pixels import encode

from cheem_jax.data.benchmarks.table import BY_NAME, Archive, Counts

Files = dict[str, bytes]
Contents = dict[str, Files]
"""Members of each archive, keyed by the archive's name; a loose file is its only member."""

VARIANTS = ("707-320", "Boeing 737-700", "F/A-18")
CARS = ("AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012")
CAR_TEST_LIST = "cars_test_annos_withlabels.mat"
SCENES = ("/a/abbey", "/c/church/outdoor")
TRUTH_HEADER = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"


def picture(
    value: int, format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (8, 8)
) -> bytes:
    """Return different bytes for different values."""
    color = value % 256 if mode == "L" else (value % 256, value // 256, 7)
    options = {"comment": str(value).encode()} if format == "JPEG" else {}
    return encode(Image.new(mode, size, color), format, **options)


def text(*lines: str, end: str = "\n") -> bytes:
    return "".join(line + end for line in lines).encode()


def mat(**variables: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    scipy.io.savemat(buffer, variables)
    return buffer.getvalue()


def car_annotations(rows: list[tuple[str, int]]) -> bytes:
    fields = [(f"bbox_{corner}", object) for corner in ("x1", "y1", "x2", "y2")]
    records = np.zeros((1, len(rows)), [*fields, ("class", object), ("fname", object)])
    for i, (name, number) in enumerate(rows):
        records[0, i] = (np.uint8(1), np.uint8(1), np.uint8(7), np.uint8(7), np.uint8(number), name)
    return mat(annotations=records)


def aircraft() -> Contents:
    top = "fgvc-aircraft-2013b/data"
    files = {f"{top}/variants.txt": text(*VARIANTS)}
    for i, part in enumerate(("train", "val", "test")):
        keys = [f"{100 * i + j:07d}" for j in range(len(VARIANTS))]
        lines = [f"{key} {variant}" for key, variant in zip(keys, VARIANTS, strict=True)]
        files[f"{top}/images_variant_{part}.txt"] = text(*lines)
        files |= {f"{top}/images/{key}.jpg": picture(int(key), size=(8, 30)) for key in keys}
    files[f"{top}/images/9999999.jpg"] = b"in no list"
    return {"fgvc-aircraft-2013b.tar.gz": files}


def gtsrb() -> Contents:
    train: Files = {}
    for label in range(43):
        rows = []
        for frame in range(2):
            name = f"00000_{frame:05d}.ppm"
            rows.append(f"{name};8;8;1;1;7;7;{label}")
            train[f"GTSRB/Training/{label:05d}/{name}"] = picture(10 * label + frame, "PPM")
        train[f"GTSRB/Training/{label:05d}/GT-{label:05d}.csv"] = text(
            TRUTH_HEADER, *rows, end="\r\n"
        )
    test = {f"GTSRB/Final_Test/Images/{i:05d}.ppm": picture(500 + i, "PPM") for i in range(43)}
    test["GTSRB/Final_Test/Images/GT-final_test.test.csv"] = text("Filename;Width;Height")
    truth = text(
        TRUTH_HEADER, *(f"{i:05d}.ppm;8;8;1;1;7;7;{42 - i}" for i in range(43)), end="\r\n"
    )
    return {
        "GTSRB-Training_fixed.zip": train,
        "GTSRB_Final_Test_Images.zip": test,
        "GTSRB_Final_Test_GT.zip": {"GT-final_test.csv": truth},
    }


def cars() -> Contents:
    rows = [("00001.jpg", 2), ("00002.jpg", 1), ("00003.jpg", 2)]
    names = np.array([list(CARS)], object)
    return {
        "cars_train.tgz": {f"cars_train/{name}": picture(i) for i, (name, _) in enumerate(rows)},
        "cars_test.tgz": {
            f"cars_test/{name}": picture(9 + i, mode="L") for i, (name, _) in enumerate(rows)
        },
        "car_devkit.tgz": {
            "devkit/cars_meta.mat": mat(class_names=names),
            "devkit/cars_train_annos.mat": car_annotations(rows),
            "devkit/README.txt": b"",
        },
        CAR_TEST_LIST: {
            CAR_TEST_LIST: car_annotations([(name, 3 - number) for name, number in rows])
        },
    }


def sun397() -> Contents:
    train = [f"{scene}/sun_{letter}.jpg" for scene in SCENES for letter in "ab"]
    test = [f"{scene}/sun_c.jpg" for scene in SCENES]
    images = {f"SUN397{line}": picture(i) for i, line in enumerate(train)}
    # TFDS decodes and encodes these again; here the bytes stay, regardless of the suffix
    images |= {f"SUN397{test[0]}": picture(9, "PNG"), f"SUN397{test[1]}": picture(9, "BMP")}
    images["SUN397/README.txt"] = images["SUN397/a/abbey/sun_unlisted.jpg"] = b"in no list"
    partitions = {
        "ClassName.txt": text(*SCENES),
        "Training_01.txt": text(*train),
        "Testing_01.txt": text(*test),
        "Training_02.txt": text(*test),
    }
    return {"SUN397.tar.gz": images, "Partitions.zip": partitions}


def eurosat(num: int = 2) -> Contents:
    numbers = itertools.count()
    return {
        "EuroSAT.zip": {
            f"2750/{name}/{name}_{i}.jpg": picture(next(numbers), size=(64, 64))
            for name in BY_NAME["eurosat"].class_names
            for i in range(1, num + 1)
        }
    }


def caltech101() -> Contents:
    folders = {name: name for name in BY_NAME["caltech101"].class_names}
    folders |= {
        "background_google": "BACKGROUND_Google",
        "faces": "Faces",
        "motorbikes": "Motorbikes",
    }
    files = {f"101_ObjectCategories/{folders[name]}/tmp": b"" for name in ("background_google",)}
    for label, folder in enumerate(folders.values()):
        mode = "L" if label % 3 == 0 else "RGB"
        files[f"101_ObjectCategories/{folder}/image_0001.jpg"] = picture(label, mode=mode)
    inner = {
        "caltech-101/101_ObjectCategories.tar.gz": tar(files),
        "caltech-101/Annotations.tar": b"not read",
    }
    return {
        "caltech-101.zip": {**inner, "__MACOSX/caltech-101/._101_ObjectCategories.tar.gz": b"x"}
    }


def cub200(num_classes: int = 2) -> Contents:
    names = [f"{label + 1:03d}.Bird_{label}" for label in range(num_classes)]
    keys = [f"{name}/{name}_{i:04d}.jpg" for name in names for i in range(3)]
    top = "CUB_200_2011"
    files = {f"{top}/images/{key}": picture(i) for i, key in enumerate(keys)}
    files |= {
        "attributes.txt": text("1 has_bill_shape::dagger"),
        f"{top}/README": b"",
        f"{top}/classes.txt": text(*(f"{i} {name}" for i, name in enumerate(names, 1))),
        f"{top}/images.txt": text(*(f"{i} {key}" for i, key in enumerate(keys, 1))),
        f"{top}/train_test_split.txt": text(
            *(f"{i} {int(i % 3 > 0)}" for i in range(1, len(keys) + 1))
        ),
    }
    return {"CUB_200_2011.tgz": files}


def imagenet_variant(name: str, num_classes: int = 2, num: int = 5) -> Contents:
    """`num` images of each class, as in the archives of ImageNet-R and ImageNet-A."""
    files = {f"{name}/README.txt": text("n00000000 tench")}
    for label in range(num_classes):
        for i in range(num):
            files[f"{name}/n{label:08d}/art_{i}.jpg"] = picture(num * label + i)
    return {f"{name}.tar": files}


def pilot(name: str, num_classes: int = 3, first: int = 10) -> Contents:
    """Four images of each class for train and two for test, as PILOT divides its data sets."""
    files = {}
    for label in range(num_classes):
        for i in range(6):
            split = "train" if i < 4 else "test"
            suffix, format = (".png", "PNG") if i % 2 else (".jpg", "JPEG")
            image = picture(6 * label + i, format)
            files[f"{name}/{split}/{first + label}/{i}{suffix}"] = image
    return {f"{name}.zip": files}


def tar(files: Files, mode: Literal["w", "w:gz"] = "w:gz") -> bytes:
    """Folders are separate members, as `tar` writes them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for folder in sorted(
            {str(parent) for name in files for parent in Path(name).parents} - {"."}
        ):
            header = tarfile.TarInfo(folder)
            header.type = tarfile.DIRTYPE
            archive.addfile(header)
        for name, data in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


def zipped(files: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def write(root: Path, files: Files) -> Path:
    for name, data in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return root


def put(place: Path, contents: Contents, *, unpacked: bool = False) -> Path:
    """Fill a user's folder with the archives, or with their contents."""
    place.mkdir(parents=True, exist_ok=True)
    for name, files in contents.items():
        if name in files:
            write(place, files)
        elif not unpacked:
            mode = "w" if name.endswith(".tar") else "w:gz"
            (place / name).write_bytes(zipped(files) if name.endswith(".zip") else tar(files, mode))
        elif name == "caltech-101.zip":
            with tarfile.open(
                fileobj=io.BytesIO(files["caltech-101/101_ObjectCategories.tar.gz"])
            ) as archive:
                archive.extractall(place / "caltech-101", filter="data")
        else:
            write(place / "Partitions" if name == "Partitions.zip" else place, files)
    return place


def expect(
    patch: pytest.MonkeyPatch,
    name: str,
    place: Path,
    counts: Counts | None = None,
    url: str | None = None,
) -> tuple[Archive, ...]:
    """Make the table expect the archives of a data set in a folder, to download from `url`."""
    archives = tuple(
        archive._replace(
            hash=hashlib.sha256((place / archive.file).read_bytes()).hexdigest(),
            num_bytes=(place / archive.file).stat().st_size,
            url=url and f"{url}/{archive.file}",
        )
        if (place / archive.file).exists()
        else archive._replace(url=None)
        for archive in BY_NAME[name].archives
    )
    task = dataclasses.replace(BY_NAME[name], counts=counts, archives=archives)
    patch.setitem(BY_NAME, name, task)
    return archives
