"""One reader for each data set, from its official archives or the folders they unpack to; no TensorFlow.

`place` is the folder that a user fills. All raise FileNotFoundError that lists what is missing there, or
ValueError for corrupted archives, lists that do not fit and images that are absent.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from cheem_jax.data.benchmarks.archives import Reader, members, tar_members
from cheem_jax.data.benchmarks.matlab import read_variable
from cheem_jax.data.benchmarks.reading import Reading, Source, below, lines_of, locate, make_reading, read_files, unique
from cheem_jax.data.decode import FORMATS, MAX_PIXELS, refuse_bombs

STRIP_PIXELS = 20  # the copyright notice below each aircraft


def read_aircraft(place: Path, *, cut_strip: bool = False) -> Reading:
    """FGVC-Aircraft by variant: train, validation, test; keys are the seven digits.

    `cut_strip` cuts the lowest 20 pixels off and codes the rest as JPEG of quality 95; else the bytes stay.
    """
    stem = "fgvc-aircraft-2013b"
    [path] = locate(place, (f"{stem}.tar.gz", f"{stem}.tgz", f"{stem}.tar", stem))
    lists = {"train": "train", "validation": "val", "test": "test"}
    names = ["data/variants.txt", *(f"data/images_variant_{part}.txt" for part in lists.values())]
    texts = [lines_of(data, f"{path}/{name}") for name, data in zip(names, read_files(path, *names), strict=True)]
    label_of = {variant: label for label, variant in enumerate(texts[0])}
    in_images = below("images", 1, ".jpg")

    def key_of(name: str) -> str | None:
        file = in_images(name)
        return None if file is None else file.rpartition(".")[0]

    sources = {}
    for split, name, lines in zip(lists, names[1:], texts[1:], strict=True):
        pairs = []
        for line in lines:
            key, _, variant = line.partition(" ")  # variants hold spaces themselves
            if variant not in label_of:
                raise ValueError(f"{path}/{name}: line {line!r} names no variant of data/variants.txt")
            pairs.append((key, label_of[variant]))
        labels = unique(pairs, f"{path}/{name}")
        sources[split] = Source(path, key_of, labels, _without_strip if cut_strip else None)
    return make_reading(f"aircraft in {place}", tuple(texts[0]), sources)


def read_gtsrb(place: Path) -> Reading:
    """German traffic signs: train, test; keys `<class>/<track>_<frame>.ppm` and `<number>.ppm`; coded as PNG.

    Train is the archive of 26,640 images (`GTSRB-Training_fixed.zip`).
    """
    train, test, truth = locate(
        place,
        ("GTSRB-Training_fixed.zip", "GTSRB-Training_fixed", "GTSRB/Training"),
        ("GTSRB_Final_Test_Images.zip", "GTSRB_Final_Test_Images", "GTSRB/Final_Test"),
        ("GTSRB_Final_Test_GT.zip", "GTSRB_Final_Test_GT", "GT-final_test.csv", "GTSRB/GT-final_test.csv"),
    )
    in_train = below("Training", 2, ".ppm")
    in_lists = below("Training", 2, ".csv")
    keys = []
    for name, read in members(train):
        if key := in_train(name):
            keys.append(key)
        elif list_key := in_lists(name):
            rows = _annotations(read(), f"{train}: {name}")
            keys.extend(f"{list_key.partition('/')[0]}/{file}" for file, _ in rows)
    if wrong := sorted({key for key in keys if not key.partition("/")[0].isdecimal()}):
        raise ValueError(f"{train}: class folders are numbers of five digits, got {wrong[:3]}")
    train_labels = {key: int(key.partition("/")[0]) for key in sorted(keys)}
    [data] = read_files(truth, "GT-final_test.csv")
    test_labels = unique(_annotations(data, f"{truth}: GT-final_test.csv"), str(truth))
    sources = {
        "train": Source(train, in_train, train_labels, _as_png),
        "test": Source(test, below("Images", 1, ".ppm"), test_labels, _as_png),
    }
    return make_reading(f"gtsrb in {place}", GTSRB_CLASSES, sources)


def read_cars(place: Path) -> Reading:
    """Stanford Cars: train, test; keys are file names, which both splits use."""
    test_list = "cars_test_annos_withlabels.mat"
    train, test, devkit, annotations = locate(
        place,
        ("cars_train.tgz", "cars_train"),
        ("cars_test.tgz", "cars_test"),
        ("car_devkit.tgz", "car_devkit", "devkit"),
        (test_list, f"devkit/{test_list}"),
    )
    meta, train_list = read_files(devkit, "cars_meta.mat", "cars_train_annos.mat")
    names = _load_mat(meta, "class_names", f"{devkit}: cars_meta.mat")
    classes = tuple(str(name) for name in names)
    [data] = read_files(annotations, test_list)
    train_labels = _car_labels(train_list, f"{devkit}: cars_train_annos.mat", len(classes))
    sources = {
        "train": Source(train, below("cars_train", 1, ".jpg"), train_labels),
        "test": Source(test, below("cars_test", 1, ".jpg"), _car_labels(data, str(annotations), len(classes))),
    }
    return make_reading(f"cars in {place}", classes, sources)


def read_sun397(place: Path) -> Reading:
    """SUN397, the first official partition: train, test; keys and classes as listed, `/a/abbey/sun_x.jpg`.

    Some of the files named .jpg are PNG, BMP or GIF; their bytes stay as they are.
    """
    images, partitions = locate(
        place, ("SUN397.tar.gz", "SUN397.tgz", "SUN397.tar", "SUN397"), ("Partitions.zip", "Partitions")
    )
    names = ("ClassName.txt", "Training_01.txt", "Testing_01.txt")
    files = zip(names, read_files(partitions, *names), strict=True)
    classes, *lists = [lines_of(data, f"{partitions}: {name}") for name, data in files]
    label_of = {name: label for label, name in enumerate(classes)}
    sources = {}
    for split, name, lines in zip(("train", "test"), names[1:], lists, strict=True):
        where = f"{partitions}: {name}"
        if wrong := [line for line in lines if line.rpartition("/")[0] not in label_of]:
            raise ValueError(f"{where}: {len(wrong)} lines of no class in ClassName.txt, first {wrong[:3]}")
        labels = unique([(line, label_of[line.rpartition("/")[0]]) for line in lines], where)
        sources[split] = Source(images, _sun397_key, labels)
    return make_reading(f"sun397 in {place}", tuple(classes), sources)


def read_eurosat(place: Path) -> Reading:
    """EuroSAT in red, green and blue: train only; keys are file names."""
    [path] = locate(place, ("EuroSAT.zip", "2750", "EuroSAT"))
    with_class = below("2750", 2, ".jpg")

    def key_of(name: str) -> str | None:
        key = with_class(name)
        return None if key is None else key.rpartition("/")[2]

    keys = [key for name, _ in members(path) if (key := with_class(name))]
    labels = _folder_labels(keys, EUROSAT_CLASSES, f"{path}, below 2750")
    named = unique([(key.rpartition("/")[2], label) for key, label in labels.items()], str(path))
    return make_reading(f"eurosat in {place}", EUROSAT_CLASSES, {"train": Source(path, key_of, named)})


def read_caltech101(place: Path) -> Reading:
    """Caltech-101 with its background class: everything as train; keys `<class folder>/<file>`."""
    folder = "101_ObjectCategories"
    archives = (f"{folder}.tar.gz", f"caltech-101/{folder}.tar.gz", f"{folder}.tar")
    [path] = locate(place, ("caltech-101.zip", folder, f"caltech-101/{folder}", *archives))
    key_of = below(folder, 2, ".jpg")
    keys = [key for name, _ in _caltech101_members(path) if (key := key_of(name))]
    labels = _folder_labels(keys, CALTECH101_CLASSES, f"{path}, below {folder}")
    source = Source(path, key_of, labels, walk=_caltech101_members)
    return make_reading(f"caltech101 in {place}", CALTECH101_CLASSES, {"train": source})


def _caltech101_members(path: Path) -> Iterator[tuple[str, Reader]]:
    """Looks into the tar that the official zip holds."""
    for name, read in members(path):
        if name.endswith("/101_ObjectCategories.tar.gz"):
            yield from tar_members(io.BytesIO(read()), f"{path}: {name}")
        else:
            yield name, read


def _sun397_key(name: str) -> str | None:
    _, top, rest = f"/{name}".partition("/SUN397/")
    return f"/{rest}" if top else None


def _folder_labels(keys: list[str], classes: tuple[str, ...], where: str) -> dict[str, int]:
    """Labels of keys `<class folder>/<file>`; case does not count."""
    label_of = {name.lower(): label for label, name in enumerate(classes)}
    folders = {key.partition("/")[0] for key in keys}
    if unknown := sorted(folder for folder in folders if folder.lower() not in label_of):
        raise ValueError(f"{where}: folders {unknown[:5]} are no classes of this data set")
    return {key: label_of[key.partition("/")[0].lower()] for key in sorted(keys)}


def _annotations(data: bytes, where: str) -> list[tuple[str, int]]:
    """File name and class of each row of a GTSRB list."""
    rows = csv.DictReader(lines_of(data, where), delimiter=";")
    try:
        return [(row["Filename"], int(row["ClassId"])) for row in rows]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{where}, line {rows.line_num}: expected columns Filename and ClassId (a number) between ';' ({error!r}); "
            "the list without classes will not do"
        ) from error


def _car_labels(data: bytes, where: str, num_classes: int) -> dict[str, int]:
    annotations = _load_mat(data, "annotations", where)
    try:
        pairs = [(str(row["fname"]), int(row["class"])) for row in annotations]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{where}: annotations need the fields fname and class, a name and a number ({error!r})"
        ) from error
    if wrong := sorted({number for _, number in pairs if not 1 <= number <= num_classes}):
        raise ValueError(f"{where}: class numbers {wrong[:5]}; they count from 1 to {num_classes}")
    return unique([(name, number - 1) for name, number in pairs], where)


def _load_mat(data: bytes, variable: str, where: str) -> list[Any]:
    try:
        return read_variable(data, variable)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; download it again") from error


def _as_png(data: bytes, name: str) -> bytes:
    return _recode(data, name, cut=0, format="PNG")


def _without_strip(data: bytes, name: str) -> bytes:
    return _recode(data, name, cut=STRIP_PIXELS, format="JPEG", quality=95)


def _recode(data: bytes, name: str, *, cut: int, format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS or height <= cut:
                raise ValueError(f"{width} x {height} pixels; up to {MAX_PIXELS} and more than {cut} rows are accepted")
            refuse_bombs(image, data)
            image.crop((0, 0, width, height - cut)).save(buffer, format, **options)
    except Exception as error:  # Pillow's parsers raise almost anything on a broken file
        raise ValueError(f"{name}: the image cannot be decoded: {error}") from error
    return buffer.getvalue()


# Class names in label order of the data sets whose archives contain no list of them

EUROSAT_CLASSES = tuple(
    """
    AnnualCrop Forest HerbaceousVegetation Highway Industrial Pasture PermanentCrop Residential River SeaLake
    """.split()
)

GTSRB_CLASSES = (
    "Speed limit (20km/h)",
    "Speed limit (30km/h)",
    "Speed limit (50km/h)",
    "Speed limit (60km/h)",
    "Speed limit (70km/h)",
    "Speed limit (80km/h)",
    "End of speed limit (80km/h)",
    "Speed limit (100km/h)",
    "Speed limit (120km/h)",
    "No passing",
    "No passing for vehicles over 3.5 metric tons",
    "Right-of-way at the next intersection",
    "Priority road",
    "Yield",
    "Stop",
    "No vehicles",
    "Vehicles over 3.5 metric tons prohibited",
    "No entry",
    "General caution",
    "Dangerous curve to the left",
    "Dangerous curve to the right",
    "Double curve",
    "Bumpy road",
    "Slippery road",
    "Road narrows on the right",
    "Road work",
    "Traffic signals",
    "Pedestrians",
    "Children crossing",
    "Bicycles crossing",
    "Beware of ice/snow",
    "Wild animals crossing",
    "End of all speed and passing limits",
    "Turn right ahead",
    "Turn left ahead",
    "Ahead only",
    "Go straight or right",
    "Go straight or left",
    "Keep right",
    "Keep left",
    "Roundabout mandatory",
    "End of no passing",
    "End of no passing by vehicles over 3.5 metric tons",
)

# The folder names in lower case, sorted.
CALTECH101_CLASSES = tuple(
    """
    accordion airplanes anchor ant background_google barrel bass beaver binocular bonsai brain brontosaurus
    buddha butterfly camera cannon car_side ceiling_fan cellphone chair chandelier cougar_body cougar_face crab
    crayfish crocodile crocodile_head cup dalmatian dollar_bill dolphin dragonfly electric_guitar elephant emu
    euphonium ewer faces faces_easy ferry flamingo flamingo_head garfield gerenuk gramophone grand_piano
    hawksbill headphone hedgehog helicopter ibis inline_skate joshua_tree kangaroo ketch lamp laptop leopards
    llama lobster lotus mandolin mayfly menorah metronome minaret motorbikes nautilus octopus okapi pagoda panda
    pigeon pizza platypus pyramid revolver rhino rooster saxophone schooner scissors scorpion sea_horse snoopy
    soccer_ball stapler starfish stegosaurus stop_sign strawberry sunflower tick trilobite umbrella watch
    water_lilly wheelchair wild_cat windsor_chair wrench yin_yang
    """.split()
)
