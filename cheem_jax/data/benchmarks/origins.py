"""Where the benchmarks' data sets come from, and which of them this library prepares by itself."""

from typing import NamedTuple


class Archive(NamedTuple):
    """A file that a data set is made from; without an address it must be brought by hand."""

    file: str
    num_bytes: int | None
    url: str | None = None
    hash: str | None = None
    """The published SHA-256, or `md5:` and the MD5."""


_EUROSAT = "https://huggingface.co/datasets/torchgeo/eurosat/resolve/main/EuroSAT.zip"
_GTSRB = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370"
OWN: dict[str, tuple[Archive, ...]] = {
    "fgvc_aircraft/default": (
        Archive(
            "fgvc-aircraft-2013b.tar.gz",
            None,
            "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
        ),
    ),
    "gtsrb": (
        Archive(
            "GTSRB-Training_fixed.zip",
            None,
            f"{_GTSRB}/GTSRB-Training_fixed.zip",
            "md5:513f3c79a4c5141765e10e952eaa2478",
        ),
        Archive(
            "GTSRB_Final_Test_Images.zip",
            None,
            f"{_GTSRB}/GTSRB_Final_Test_Images.zip",
            "md5:c7e4e6327067d32654124b0fe9e82185",
        ),
        Archive(
            "GTSRB_Final_Test_GT.zip", None, f"{_GTSRB}/GTSRB_Final_Test_GT.zip", "md5:fe31e9c9270bbcd7b84b7f21a9d9d9e5"
        ),
    ),
    "caltech101": (
        Archive(
            "caltech-101.zip",
            137_414_764,
            "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip?download=1",
            "331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91",
        ),
    ),
    "eurosat/rgb": (
        Archive(
            "EuroSAT.zip",
            94_280_567,
            _EUROSAT,
            "8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd",
        ),
    ),
    "cars196": (
        Archive(
            "cars_train.tgz",
            979_269_282,
            None,
            "512b227b30e2f0a8aab9e09485786ab4479582073a144998da74d64b801fd288",
        ),
        Archive(
            "cars_test.tgz",
            977_350_468,
            None,
            "bffea656d6f425cba3c91c6d83336e4c5f86c6cffd8975b0f375d3a10da8e243",
        ),
        Archive("car_devkit.tgz", 330_960, None, "b97deb463af7d58b6bfaa18b2a4de9829f0f79e8ce663dfa9261bf7810e9accd"),
        Archive(
            "cars_test_annos_withlabels.mat",
            185_758,
            None,
            "790f75be8ea34eeded134cc559332baf23e30e91367e9ddca97d26ed9b895f05",
        ),
    ),
    "sun397/standard-part1-120k": (
        Archive(
            "SUN397.tar.gz",
            39_077_296_924,
            None,
            "f404130965a7ad77bed5ececc71e720ab50f3cc1e1bb257257610d38f3b928ec",
        ),
        Archive(
            "Partitions.zip",
            18_293_705,
            None,
            "e3311ea5f812d4cc6faef194688343d1111f6cd6f70f2c62f393c2b8d6ba1ec9",
        ),
    ),
}
"""Data sets that builders of this library prepare, without TensorFlow, and their archives."""

BY_HAND = {
    "cars196": "the original host has been dead since 2023; copies of the archives go round (Kaggle, web archives)",
    "sun397/standard-part1-120k": "the original host answers 404; the authors' page is "
    "vision.princeton.edu/projects/2010/SUN",
    "visual_domain_decathlon/imagenet12": "ImageNet asks for an account: "
    "decathlon-1.0-data-imagenet.tar, 6.5 GB, comes from image-net.org",
}
WITHOUT_TENSORFLOW = frozenset({"food101"})
"""Stock builders that prepare without TensorFlow."""
