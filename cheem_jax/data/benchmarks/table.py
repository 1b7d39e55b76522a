"""The tasks of MTIL and VDD (paper, supplement 'Details of the MTIL benchmark' and 'Details of the
VDD benchmark').

Each is a prepared TFDS data set, a rule that cuts what it lacks, and the counts that must result.
The rules are those that reproduce the paper's tables; its table prints SUN397's 19,850 as the test
size of CIFAR-100, which has 10,000 test images. The facts are in `benchmarks.toml`.
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
"""What is cut from train: nothing, ceil(0.1 n) for validation, ceil(0.3 n) for test before that, or
floor(0.1 n)."""


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


def _task(table: dict[str, Any]) -> BenchmarkTask:
    fields: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in table.items()
    }
    archives = tuple(Archive(**archive) for archive in table.get("archives", ()))
    return BenchmarkTask(**fields | {"counts": Counts(*table["counts"]), "archives": archives})


_FACTS = tomllib.loads((Path(__file__).parent / "benchmarks.toml").read_text(encoding="utf-8"))
TASKS = tuple(map(_task, _FACTS["task"]))
BY_NAME = {task.name: task for task in TASKS}

Benchmark = Literal["mtil", "vdd"]
Order = Literal["default", "paper_a", "paper_b", "paper_c", "zscl_ii"]
MTIL: dict[Order, str] = _FACTS["mtil"]
VDD: str = _FACTS["vdd"]["default"]


def order_of(benchmark: Benchmark, order: Order = "default") -> tuple[str, ...]:
    """Names of a stream's tasks in learning order; raises ValueError for an order that VDD does not
    have."""
    if benchmark == "mtil":
        return tuple(MTIL[order].split())
    if order != "default":
        raise ValueError(f"order {order!r} belongs to mtil; vdd has only 'default'")
    return tuple(VDD.split())


def members_of(benchmark: Benchmark) -> tuple[str, ...]:
    """Names of all tasks of a benchmark: VDD's ten include the backbone's own, ImageNet."""
    return order_of(benchmark) if benchmark == "mtil" else ("imagenet12", *order_of(benchmark))
