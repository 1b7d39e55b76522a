"""The tasks of MTIL and VDD (paper, supplement 'Details of the MTIL benchmark' and 'Details of the VDD benchmark').

Each is a prepared TFDS data set, a rule that cuts what it lacks, and the counts that must result. The rules are those
that reproduce the paper's tables; its table prints SUN397's 19,850 as the test size of CIFAR-100, which has 10,000 test
images. Below the tasks: the archives that their data sets are made from.
"""

import dataclasses
from typing import Literal, NamedTuple

from cheem_jax.data.records import BY_BYTES, BY_PIXELS


class Counts(NamedTuple):
    """Images in each split."""

    train: int
    val: int
    test: int


Rule = Literal["official", "val", "test and val", "decathlon"]
"""What is cut from train: nothing, ceil(0.1 n) for validation, ceil(0.3 n) for test before that, or floor(0.1 n)."""


@dataclasses.dataclass(frozen=True)
class BenchmarkTask:
    """One task of a benchmark, and where it comes from."""

    name: str
    title: str
    builder: str
    """TFDS name, with its config."""
    version: str
    num_classes: int
    rule: Rule
    counts: Counts
    key: str
    """What tells images apart on every machine (`Prepared.index`)."""
    licence: str
    train: tuple[str, ...] = ("train",)
    """TFDS splits that are joined for training, as far as they exist."""
    val: str | None = None
    test: str | None = "test"
    dropped: tuple[str, ...] = ()
    """Class names that the builder has and the benchmark does not."""

    @property
    def spec(self) -> str:
        """The data set's name for TFDS."""
        return f"{self.builder}:{self.version}"


class Archive(NamedTuple):
    """A file that a data set is made from; without a `url` the user has to bring it."""

    file: str
    num_bytes: int | None
    hash: str | None
    """The published SHA-256, or `md5:` and the MD5."""
    url: str | None = None


NON_COMMERCIAL = "non-commercial research"
NOT_STATED = "none stated; research use"

TASKS: tuple[BenchmarkTask, ...] = (
    BenchmarkTask(
        "aircraft", "FGVC Aircraft", "fgvc_aircraft/default", "1.0.0", 100, "official", Counts(3334, 3333, 3333),
        "file_name", NON_COMMERCIAL, val="validation",
    ),
    BenchmarkTask(
        "caltech101", "Caltech101", "caltech101", "3.0.2", 101, "test and val", Counts(5465, 608, 2604),
        "class/image/file_name", "CC BY 4.0", train=("train", "test"), test=None, dropped=("background_google",),
    ),
    BenchmarkTask(
        "cifar100", "CIFAR100", "cifar100", "3.0.2", 100, "val", Counts(45000, 5000, 10000), "id", NOT_STATED
    ),
    BenchmarkTask(
        "dtd", "Describable Textures", "dtd", "3.0.1", 47, "official", Counts(1880, 1880, 1880),
        "file_name", "research only", val="validation",
    ),
    BenchmarkTask(
        "eurosat", "EuroSAT", "eurosat/rgb", "2.0.0", 10, "test and val", Counts(17010, 1890, 8100),
        "filename", "MIT", test=None,
    ),
    BenchmarkTask(
        "flowers", "VGG-Flowers", "oxford_flowers102", "2.1.1", 102, "official", Counts(1020, 1020, 6149),
        "file_name", NOT_STATED, val="validation",
    ),
    BenchmarkTask(
        "food101", "Food-101", "food101", "2.0.0", 101, "val", Counts(68175, 7575, 25250),
        BY_BYTES, "scientific fair use", test="validation",
    ),
    BenchmarkTask(
        "mnist", "MNIST", "mnist", "3.0.1", 10, "val", Counts(54000, 6000, 10000), BY_PIXELS, "CC BY-SA 3.0",
    ),
    BenchmarkTask(
        "pets", "Oxford Pets", "oxford_iiit_pet", "4.0.0", 37, "val", Counts(3312, 368, 3669),
        "file_name", "CC BY-SA 4.0",
    ),
    BenchmarkTask(
        "cars", "Stanford Cars", "cars196", "2.1.0", 196, "val", Counts(7329, 815, 8041), BY_BYTES, NON_COMMERCIAL
    ),
    BenchmarkTask(
        "sun397", "SUN397", "sun397/standard-part1-120k", "4.0.0", 397, "val", Counts(17865, 1985, 19850),
        "file_name", "research only",
    ),
    BenchmarkTask(
        "imagenet12", "ImageNet12", "visual_domain_decathlon/imagenet12", "1.2.0", 1000, "decathlon",
        Counts(1108951, 123216, 49000), "name", NON_COMMERCIAL, test="validation",
    ),
    BenchmarkTask(
        "svhn", "SVHN", "svhn_cropped", "3.1.0", 10, "val", Counts(65931, 7326, 26032), BY_PIXELS, NON_COMMERCIAL
    ),
    BenchmarkTask(
        "ucf101", "UCF", "visual_domain_decathlon/ucf101", "1.2.0", 101, "decathlon", Counts(6827, 758, 1952),
        "name", NOT_STATED, test="validation",
    ),
    BenchmarkTask(
        "omniglot", "Omniglot", "visual_domain_decathlon/omniglot", "1.2.0", 1623, "decathlon",
        Counts(16068, 1785, 6492), "name", "MIT", test="validation",
    ),
    BenchmarkTask(
        "gtsrb", "GTSR", "gtsrb", "1.0.0", 43, "val", Counts(23976, 2664, 12630), "file_name", "free for research"
    ),
    BenchmarkTask(
        "dped", "DPed", "visual_domain_decathlon/daimlerpedcls", "1.2.0", 2, "decathlon", Counts(21168, 2352, 5880),
        "name", NON_COMMERCIAL, test="validation",
    ),
)  # fmt: skip
BY_NAME = {task.name: task for task in TASKS}

Benchmark = Literal["mtil", "vdd"]
Order = Literal["default", "paper_a", "paper_b", "paper_c", "zscl_ii"]

MTIL: dict[Order, str] = {
    "default": "aircraft caltech101 cifar100 dtd eurosat flowers food101 mnist pets cars sun397",
    "paper_a": "sun397 aircraft dtd food101 cars caltech101 cifar100 eurosat flowers mnist pets",
    "paper_b": "caltech101 cifar100 eurosat flowers mnist pets dtd cars food101 aircraft sun397",
    "paper_c": "mnist sun397 flowers dtd caltech101 cars pets food101 cifar100 aircraft eurosat",
    "zscl_ii": "cars food101 mnist pets flowers sun397 aircraft caltech101 dtd eurosat cifar100",
}
"""Orders of MTIL: of the paper's tables, of its table on task orders, and the second order of ZSCL."""
VDD = "cifar100 dped omniglot svhn ucf101 gtsrb flowers aircraft dtd"
"""VDD in the order of the paper's tables, which leave out ImageNet: the backbone was pretrained on it."""


def order_of(benchmark: Benchmark, order: Order = "default") -> tuple[str, ...]:
    """Names of a stream's tasks in learning order; raises ValueError for an order that VDD does not have."""
    if benchmark == "mtil":
        return tuple(MTIL[order].split())
    if order != "default":
        raise ValueError(f"order {order!r} belongs to mtil; vdd has only 'default'")
    return tuple(VDD.split())


def members_of(benchmark: Benchmark) -> tuple[str, ...]:
    """Names of all tasks of a benchmark: VDD's ten include the backbone's own, ImageNet."""
    return order_of(benchmark) if benchmark == "mtil" else ("imagenet12", *order_of(benchmark))


_GTSRB = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370"
OWN: dict[str, tuple[Archive, ...]] = {
    "fgvc_aircraft/default": (
        Archive(
            "fgvc-aircraft-2013b.tar.gz", None, None,
            "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
        ),
    ),
    "gtsrb": (
        Archive(
            "GTSRB-Training_fixed.zip", None, "md5:513f3c79a4c5141765e10e952eaa2478",
            f"{_GTSRB}/GTSRB-Training_fixed.zip",
        ),
        Archive(
            "GTSRB_Final_Test_Images.zip", None, "md5:c7e4e6327067d32654124b0fe9e82185",
            f"{_GTSRB}/GTSRB_Final_Test_Images.zip",
        ),
        Archive(
            "GTSRB_Final_Test_GT.zip", None, "md5:fe31e9c9270bbcd7b84b7f21a9d9d9e5",
            f"{_GTSRB}/GTSRB_Final_Test_GT.zip",
        ),
    ),
    "caltech101": (
        Archive(
            "caltech-101.zip", 137_414_764, "331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91",
            "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip?download=1",
        ),
    ),
    "eurosat/rgb": (
        Archive(
            "EuroSAT.zip", 94_280_567, "8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd",
            "https://huggingface.co/datasets/torchgeo/eurosat/resolve/main/EuroSAT.zip",
        ),
    ),
    "cars196": (
        Archive("cars_train.tgz", 979_269_282, "512b227b30e2f0a8aab9e09485786ab4479582073a144998da74d64b801fd288"),
        Archive("cars_test.tgz", 977_350_468, "bffea656d6f425cba3c91c6d83336e4c5f86c6cffd8975b0f375d3a10da8e243"),
        Archive("car_devkit.tgz", 330_960, "b97deb463af7d58b6bfaa18b2a4de9829f0f79e8ce663dfa9261bf7810e9accd"),
        Archive(
            "cars_test_annos_withlabels.mat", 185_758,
            "790f75be8ea34eeded134cc559332baf23e30e91367e9ddca97d26ed9b895f05",
        ),
    ),
    "sun397/standard-part1-120k": (
        Archive("SUN397.tar.gz", 39_077_296_924, "f404130965a7ad77bed5ececc71e720ab50f3cc1e1bb257257610d38f3b928ec"),
        Archive("Partitions.zip", 18_293_705, "e3311ea5f812d4cc6faef194688343d1111f6cd6f70f2c62f393c2b8d6ba1ec9"),
    ),
}  # fmt: skip
"""Data sets that builders of this library prepare, without TensorFlow, and their archives."""

BY_HAND = {
    "cars196": "the original host has been unreachable since 2023; Kaggle and web archives have copies of the archives",
    "sun397/standard-part1-120k": "the original host answers 404; the authors' page is "
    "vision.princeton.edu/projects/2010/SUN",
    "visual_domain_decathlon/imagenet12": "ImageNet asks for an account: "
    "decathlon-1.0-data-imagenet.tar, 6.5 GB, comes from image-net.org",
}
"""Why some archives have to be brought by the user."""
WITHOUT_TENSORFLOW = frozenset({"food101"})
"""Stock builders that prepare without TensorFlow."""
