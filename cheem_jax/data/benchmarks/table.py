"""The tasks of the benchmarks MTIL and VDD (paper, supplement 'Details of the MTIL benchmark' and
'Details of the VDD benchmark'), and the data sets and protocols of class-incremental learning.

A task consists of a prepared TFDS data set, a rule that cuts missing splits from train, and the
expected number of images in each split. The rules reproduce the numbers in the paper's tables with
one exception: for CIFAR-100, the paper prints the test size of SUN397 (19,850) instead of 10,000.
The tasks and protocols are listed in `benchmarks.toml`.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cheem_jax.data.task import ClassSplit


class Counts(NamedTuple):
    """Number of images in each split."""

    train: int
    val: int
    test: int


class Archive(NamedTuple):
    """An archive of a data set. If `url` is None, the user has to provide the archive."""

    file: str
    hash: str = ""
    """The published SHA-256, or `md5:` followed by the MD5. Empty if no hash is published."""
    num_bytes: int = 0
    """Size in bytes; 0 if it is not published."""
    url: str | None = None
    others: tuple[str, ...] = ()
    """Names of folders and copies that are read in place of the archive."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which the archive is accepted."""
        return (self.file, *self.others)


Rule = Literal["official", "val", "test and val", "decathlon"]
"""Rule for cutting missing splits from the n training images. `official` cuts nothing, `val` cuts
ceil(0.1 n) images for validation, and `decathlon` cuts floor(0.1 n) images for validation.
`test and val` first cuts ceil(0.3 n) images for test, and then applies `val` to the remaining
images."""


@dataclasses.dataclass(frozen=True)
class BenchmarkTask:
    """A task of a benchmark, and the source of its images."""

    name: str
    builder: str
    """Name of the data set in TFDS, with its config."""
    version: str
    num_classes: int
    rule: Rule
    counts: Counts | None
    """Expected number of images in each split. If None, the numbers are not checked, for example
    because the data set exists with different splits."""
    key: str
    """The argument `key` of `Prepared.index`. It selects an identifier of images that is the same
    on every machine."""
    licence: str
    train: tuple[str, ...] = ("train",)
    """TFDS splits that are joined for training; missing splits are skipped."""
    val: tuple[str, ...] = ()
    """TFDS splits for validation. If empty, the validation images are cut from train."""
    test: tuple[str, ...] = ("test",)
    """TFDS splits for test. If empty, the test images are cut from train."""
    dropped: tuple[str, ...] = ()
    """Classes of the TFDS data set that are not in the benchmark."""
    class_names: tuple[str, ...] = ()
    """Class names in label order, if the archives do not contain them."""
    needs_tensorflow: bool = True
    """Whether TFDS's builder needs TensorFlow. Ignored if this library has a builder for the data
    set."""
    by_hand: str = ""
    """Reason why the user has to provide some archives."""
    description: str = ""
    """Description of the data set for TFDS, used by this library's builder."""
    archives: tuple[Archive, ...] = ()
    """Archives that this library's builder reads without TensorFlow. If empty, TFDS's builder is
    used."""

    @property
    def spec(self) -> str:
        """Name of the data set for TFDS."""
        return f"{self.builder}:{self.version}"


def _task(table: dict[str, Any]) -> BenchmarkTask:
    fields: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in table.items()
    }
    archives = tuple(
        Archive(**archive | {"others": tuple(archive.get("others", ()))})
        for archive in table.get("archives", ())
    )
    counts = Counts(*table["counts"]) if "counts" in table else None
    return BenchmarkTask(**fields | {"counts": counts, "archives": archives})


_FACTS = tomllib.loads((Path(__file__).parent / "benchmarks.toml").read_text(encoding="utf-8"))
TASKS = tuple(map(_task, _FACTS["task"]))
BY_NAME = {task.name: task for task in TASKS}

Benchmark = Literal["mtil", "vdd"]
Order = Literal["default", "paper_a", "paper_b", "paper_c", "zscl_ii"]
MTIL: dict[Order, str] = _FACTS["mtil"]
VDD: str = _FACTS["vdd"]["default"]


class Protocol(NamedTuple):
    """A data set and the division of its classes into tasks."""

    data_set: str
    class_split: ClassSplit


PROTOCOLS = {
    name: Protocol(table["data_set"], ClassSplit.of(table))
    for name, table in _FACTS["protocols"].items()
}
"""Protocols of class-incremental learning, keyed by name. Their settings are those of the
library PILOT."""


def task_order(benchmark: Benchmark, order: Order = "default") -> tuple[str, ...]:
    """Return the names of a benchmark's tasks in learning order. Raises ValueError if `benchmark`
    is `vdd` and `order` is not `default`."""
    if benchmark == "mtil":
        return tuple(MTIL[order].split())
    if order != "default":
        raise ValueError(f"order {order!r} belongs to mtil; vdd has only 'default'")
    return tuple(VDD.split())


def task_names(benchmark: Benchmark | Literal["cil"]) -> tuple[str, ...]:
    """Return the names of all tasks of a benchmark. For `cil` (class-incremental learning), return
    the names of the data sets of all protocols. The ten tasks of VDD include ImageNet, the
    pretraining data."""
    if benchmark == "cil":
        return tuple(dict.fromkeys(protocol.data_set for protocol in PROTOCOLS.values()))
    return task_order(benchmark) if benchmark == "mtil" else ("imagenet12", *task_order(benchmark))
