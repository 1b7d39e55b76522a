"""The tasks of MTIL and VDD (paper, supplement 'Details of the MTIL benchmark' and 'Details of the VDD benchmark').

Each is a prepared TFDS data set, a rule that cuts what it lacks, and the counts that must result. The rules are those
that reproduce the paper's tables; its table prints SUN397's 19,850 as the test size of CIFAR-100, which has 10,000 test
images. The facts are in `benchmarks.toml`.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple


class Counts(NamedTuple):
    """Images in each split."""

    train: int
    val: int
    test: int


class Archive(NamedTuple):
    """A file that a data set is made from; without a `url` the user has to bring it."""

    file: str
    hash: str
    """The published SHA-256, or `md5:` and the MD5."""
    num_bytes: int = 0
    """0 if not published."""
    url: str | None = None


Rule = Literal["official", "val", "test and val", "decathlon"]
"""What is cut from train: nothing, ceil(0.1 n) for validation, ceil(0.3 n) for test before that, or floor(0.1 n)."""


@dataclasses.dataclass(frozen=True)
class BenchmarkTask:
    """One task of a benchmark, and where it comes from."""

    name: str
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
    val: tuple[str, ...] = ()
    """Where there is none it is cut from train; `test` likewise."""
    test: tuple[str, ...] = ("test",)
    dropped: tuple[str, ...] = ()
    """Class names that the builder has and the benchmark does not."""
    class_names: tuple[str, ...] = ()
    """In label order, if the archives contain no list of them."""
    needs_tensorflow: bool = True
    """Whether the stock builder does; without one of this library's own."""
    by_hand: str = ""
    """Why the user has to bring some archives."""
    description: str = ""
    """For TFDS, where a builder of this library's own makes the data set."""
    archives: tuple[Archive, ...] = ()
    """What that builder makes it from, without TensorFlow; none: TFDS's builder does."""

    @property
    def spec(self) -> str:
        """The data set's name for TFDS."""
        return f"{self.builder}:{self.version}"


def _read_tasks() -> tuple[BenchmarkTask, ...]:
    tables = tomllib.loads((Path(__file__).parent / "benchmarks.toml").read_text(encoding="utf-8"))["task"]
    tasks = []
    for table in tables:
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
        fields["counts"] = Counts(*table["counts"])
        fields["archives"] = tuple(Archive(**archive) for archive in table.get("archives", ()))
        tasks.append(BenchmarkTask(**fields))
    return tuple(tasks)


TASKS = _read_tasks()
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
