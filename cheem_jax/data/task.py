"""Tasks and streams of uint8 images with integer labels, and plans: tasks whose images are not
decoded yet. `Task`, `Stream`, `Plan` and `ClassSplit` check their arguments.

A missing split is cut from train: some training images are moved to the new split. The sizes of new
splits are as in the CHEEM paper's tables. If there is neither a test nor a validation split, three
tenths of the training images become the test split; then a tenth of the remaining training images
become the validation split. Both numbers are rounded up.
"""

import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from cheem_jax.core.images import Images
from cheem_jax.data.files import Encoded, by_name, composed

Members = dict[str, dict[str, int]]
"""Labels of images, keyed by split and by image key."""

Purpose = Literal["learn", "extend", "measure"]
"""The purpose of a task. `learn` requires at least two classes, and an image of each class in every
split. `extend` adds images to a learned task; it requires an image of each class in train and at
least one validation image. `measure` requires at least one class."""

SPLITS = ("train", "val", "test")
_SPLIT = re.compile(
    r"(?:(train(?:ing)?)|(val(?:id(?:ation)?)?|dev)|(test(?:ing)?))(?:["
    r" _-]?(?:set|data|dataset|images|split))?",
    re.IGNORECASE,
)
"""Pattern of common names of the splits, such as valid, Training and test_set."""


@dataclasses.dataclass(frozen=True)
class ClassSplit:
    """Division of one data set into tasks with disjoint classes (class-incremental learning)."""

    classes_per_task: int | None = None
    """Number of classes per task. None is valid only in a division that overrides the division of a
    protocol or a stream file."""
    first_task: int | None = None
    """Number of classes in the first task; None means `classes_per_task`."""
    class_order: int | tuple[str, ...] | None = None
    """Order of the classes: the seed of a random permutation, a tuple of all class names in
    learning order, or None for the order of the data set."""

    def __post_init__(self):
        for name in ("classes_per_task", "first_task"):
            if (num := getattr(self, name)) is not None and num < 2:
                raise ValueError(f"{name} is {num}; expected at least 2, as a task has 2 classes")
        if isinstance(self.class_order, int) and not 0 <= self.class_order < 2**32:
            raise ValueError(
                f"class_order is {self.class_order}; expected a seed from 0 to {2**32 - 1}, or the"
                " names of all classes"
            )

    @staticmethod
    def of(entries: Mapping[str, Any]) -> "ClassSplit":
        """Build a division from a JSON object or a TOML table, in which `class_order` can be a list
        instead of a tuple."""
        order = entries.get("class_order")
        return ClassSplit(
            entries.get("classes_per_task"),
            entries.get("first_task"),
            tuple(order) if isinstance(order, list) else order,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Labelled images. `Task` checks their shapes, types and labels."""

    images: Images
    """uint8 `[N, H, W, 3]`."""
    labels: np.ndarray
    """int32 `[N]`, indices into the task's `classes`."""
    sha256: str | None = None
    """SHA-256 of pixels and labels or, for streamed images, of values that determine them. None if
    it has not been computed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A classification task. Raises ValueError if it does not meet the requirements of its
    purpose."""

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    test: Split
    split_sha256: str | None = None
    """SHA-256 of the assignment of images to splits (`Plan.split_sha256`), if the images are from
    files."""
    skipped: tuple[str, ...] = ()
    """Keys of unreadable images that were excluded."""
    cut: tuple[str, ...] = ()
    """Splits that the source does not have; they were cut from train or are empty."""
    purpose: Purpose = "learn"
    class_split: ClassSplit | None = None
    """The division of classes that produced this task; None if the classes of the data set are not
    divided."""
    upright: bool = False
    """Whether the images were rotated by their EXIF orientation."""

    @property
    def splits(self) -> dict[str, Split]:
        return {"train": self.train, "val": self.val, "test": self.test}

    def __post_init__(self):
        if not self.name:
            raise ValueError("a task needs a name, got ''")
        labels_of = {name: split.labels for name, split in self.splits.items()}
        shapes = set()
        for split_name, split in self.splits.items():
            images, labels = split.images, split.labels
            where = f"task {self.name!r}, split {split_name!r}"
            if (
                images.dtype != np.uint8
                or len(images.shape) != 4
                or images.shape[-1] != 3
                or 0 in images.shape[1:3]
            ):
                raise ValueError(
                    f"{where}: images must be uint8 [N, H, W, 3], got {images.dtype}"
                    f" {list(images.shape)}"
                )
            if labels.dtype != np.int32 or labels.shape != images.shape[:1]:
                raise ValueError(
                    f"{where}: labels must be int32 [{len(images)}], got {labels.dtype}"
                    f" {list(labels.shape)}"
                )
            shapes.add(images.shape[1:])
        check_purpose(f"task {self.name!r}", self.classes, labels_of, self.purpose)
        if len(shapes) > 1:
            raise ValueError(
                f"task {self.name!r}: the splits' images differ in shape: {sorted(shapes)}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in learning order, with unique names and images of one size."""

    name: str
    tasks: tuple[Task, ...]

    def __post_init__(self):
        if not self.tasks:
            raise ValueError(f"stream {self.name!r} has no task")
        if repeated := repeats(task.name for task in self.tasks):
            raise ValueError(
                f"stream {self.name!r}: task names must be unique, repeated: {repeated}"
            )
        shapes = {task.name: task.train.images.shape[1:] for task in self.tasks}
        if len(set(shapes.values())) > 1:
            raise ValueError(
                f"stream {self.name!r}: all tasks need images of one shape, got {shapes}"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedSplit:
    """Files of one split and their labels, int32 `[N]`."""

    files: Encoded
    labels: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A task before its images are decoded. Raises ValueError if it does not meet the requirements
    of its purpose."""

    name: str
    classes: tuple[str, ...]
    train: EncodedSplit
    val: EncodedSplit
    test: EncodedSplit
    source: str
    """The location of the files, for messages."""
    stamp: str
    """Hash of the sizes and modification times of the files. It changes if the files change, so
    that outdated decoded copies are not used."""
    ignored: tuple[str, ...] = ()
    """Messages about skipped files that are not images, and about skipped hidden folders."""
    skipped: tuple[str, ...] = ()
    """Keys of unreadable images that were excluded."""
    cut: tuple[str, ...] = ()
    """Splits that the source does not have; they were cut from train or are empty."""
    is_benchmark: bool = False
    """Whether TFDS prepared the data set. Images of such a data set are decoded without EXIF
    rotation, as in the paper's loaders."""
    purpose: Purpose = "learn"
    class_split: ClassSplit | None = None
    """The division of classes that produced this task; None if the classes of the data set are not
    divided."""

    @staticmethod
    def of(
        name: str,
        classes: Sequence[str],
        members: Members,
        files: Callable[[Sequence[str]], Encoded],
        *,
        source: str,
        stamp: str,
        seed: int,
        floor: bool = False,
        ignored: Sequence[str] = (),
        is_benchmark: bool = False,
        purpose: Purpose = "learn",
    ) -> "Plan":
        """Make a plan from `members`, the labels keyed by split and image. Missing splits are cut
        from train, which changes `members` (`cut_missing`).

        `files` returns the files for a list of keys. For the purpose `extend`, a tenth of train
        becomes the missing validation split, and a missing test split becomes an empty one. For
        `measure`, a missing split that cannot be cut becomes an empty one. Raises ValueError if a
        class has too few images.
        """
        cut = tuple(split for split in SPLITS if split not in members)
        match purpose:
            case "learn":
                cut_missing(source, classes, members, seed, floor=floor)
            case "extend":
                cut_for_extension(members, seed)
            case "measure":
                with contextlib.suppress(TooFew):
                    cut_missing(source, classes, members, seed, floor=floor)
                members |= {split: {} for split in SPLITS if split not in members}
        parts = {
            split: EncodedSplit(files(list(labels)), np.array(list(labels.values()), np.int32))
            for split, labels in members.items()
        }
        train, val, test = parts["train"], parts["val"], parts["test"]
        return Plan(
            name,
            tuple(classes),
            train,
            val,
            test,
            source,
            stamp,
            tuple(ignored),
            cut=cut,
            is_benchmark=is_benchmark,
            purpose=purpose,
        )

    def turned(self, upright: bool) -> "Plan":
        """Return a plan whose images are rotated by their EXIF orientation if `upright` is set.
        Images of a benchmark are never rotated."""
        parts = {}
        for split, part in self.splits.items():
            files = copy.copy(part.files)
            files.upright = upright and not self.is_benchmark
            parts[split] = EncodedSplit(files, part.labels)
        return dataclasses.replace(self, **parts)

    def __post_init__(self):
        labels_of = {name: part.labels for name, part in self.splits.items()}
        check_purpose(f"{self.source}: task {self.name!r}", self.classes, labels_of, self.purpose)

    @property
    def splits(self) -> dict[str, EncodedSplit]:
        return {"train": self.train, "val": self.val, "test": self.test}

    @property
    def counts(self) -> dict[str, int]:
        """Number of images in each split."""
        return {split: len(part.labels) for split, part in self.splits.items()}

    @property
    def num_images(self) -> int:
        return sum(self.counts.values())

    @property
    def upright(self) -> bool:
        """Whether decoding rotates the images by their EXIF orientation."""
        return self.train.files.upright

    @functools.cached_property
    def split_sha256(self) -> str:
        """SHA-256 of the task's name and classes, and of the image keys and labels in each split,
        with all names in composed Unicode form. Results of two runs are comparable only if both
        runs have the same hash."""
        names = [composed(self.name), [*map(composed, self.classes)]]
        digest = hashlib.sha256(json.dumps(names).encode())
        for split, part in self.splits.items():
            lines = sorted(
                f"{composed(part.files.key(row))}\t{label}"
                for row, label in enumerate(part.labels.tolist())
            )
            digest.update("\n".join([f"{split} {len(lines)}", *lines, ""]).encode())
        return digest.hexdigest()


def select(stream: Stream, names: Sequence[str]) -> Stream:
    """Return a stream of the named tasks, in the order of `names`."""
    names = check_names(names, [task.name for task in stream.tasks], f"stream {stream.name!r}")
    by_name = {task.name: task for task in stream.tasks}
    return dataclasses.replace(stream, tasks=tuple(by_name[name] for name in names))


def fingerprint(task: Task) -> str:
    """Return the SHA-256 of a task's name, classes, shapes, pixels and labels."""
    return _fingerprints(task, [task.name])[task.name]


def find_copies(task: Task, fingerprints: Mapping[str, str]) -> list[str]:
    """Return the names of other tasks whose classes, images and labels are identical to those of
    `task`. `fingerprints` contains the fingerprints of the tasks to compare, keyed by task name; an
    entry with the name of `task` is ignored."""
    others = [name for name in fingerprints if name != task.name]
    return [name for name, sha in _fingerprints(task, others).items() if sha == fingerprints[name]]


def _fingerprints(task: Task, names: Sequence[str]) -> dict[str, str]:
    """Compute the fingerprint that the task would have under each of `names`. The result is keyed
    by name."""
    shapes = {name: split.images.shape for name, split in task.splits.items()}
    hashes = (
        [split.sha256 or hash_images(split.images, split.labels) for split in task.splits.values()]
        if names
        else []
    )
    classes = [*map(composed, task.classes)]
    texts = {name: json.dumps([composed(name), classes, shapes, hashes]) for name in names}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def hash_images(images: Images, labels: np.ndarray | None = None, chunk: int = 256) -> str:
    """Return the SHA-256 of labels (if given) and pixels, which are read `chunk` images at a
    time."""
    digest = hashlib.sha256(b"" if labels is None else labels.astype("<i4").tobytes())
    for start in range(0, len(images), chunk):
        digest.update(np.ascontiguousarray(images[start : start + chunk]).data)
    return digest.hexdigest()


def split_of(name: str) -> str | None:
    """Return train, val or test if `name` is a common name of this split, such as `Training` or
    `test_set`; otherwise None."""
    match = _SPLIT.fullmatch(name.strip())
    return (
        None
        if match is None
        else next(split for split, group in zip(SPLITS, match.groups(), strict=True) if group)
    )


def splits_of(where: str, names: Iterable[str]) -> dict[str, str]:
    """Map each common name of a split, such as `Training`, to train, val or test; omit all other
    names. Raises ValueError if two names mean the same split."""
    split_by_name = {name: split for name in names if (split := split_of(name)) is not None}
    if doubled := repeats(split_by_name.values()):
        several = sorted(name for name, split in split_by_name.items() if split in doubled)
        raise ValueError(
            f"{where}: more than one name for the split {' and '.join(doubled)}: {several}; merge"
            " them, or rename one"
        )
    return split_by_name


def spelled_as(names: Sequence[str], references: Sequence[str]) -> list[str]:
    """Replace each name by the name in `references` with the same composed Unicode form. Names
    without such a reference are not changed."""
    spellings = {composed(name): name for name in references} | {name: name for name in references}
    return [spellings.get(name, spellings.get(composed(name), name)) for name in names]


def class_names(where: str, names: Iterable[str], way_out: str) -> tuple[str, ...]:
    """Return the sorted unique class names. If a name occurs in two Unicode forms, the composed
    form is returned.

    Raises ValueError if names differ only in case. The message starts with `where` and ends with
    `way_out`.
    """
    spellings: dict[str, str] = {}
    for name in set(names):
        spellings[composed(name)] = composed(name) if composed(name) in spellings else name
    cases = collections.Counter(name.casefold() for name in spellings)
    if alike := sorted(name for form, name in spellings.items() if cases[form.casefold()] > 1):
        raise ValueError(
            f"{where}: classes {alike[:8]} differ only in upper and lower case; {way_out}"
        )
    return tuple(by_name(spellings.values()))


def check_names(names: Sequence[str], references: Sequence[str], where: str) -> list[str]:
    """Check task names, and return them in the spelling that `references` contains.

    Raises ValueError if `names` is empty, or if a name is repeated or unknown. For an unknown name,
    the message suggests the most similar known names.
    """
    if not names:
        raise ValueError(f"no task name given; {where} has {', '.join(references)}")
    if repeated := repeats(names):
        raise ValueError(f"task names are repeated: {repeated}; give each name once")
    if not references:
        raise ValueError(f"{where} has no task {names[0]!r}, because it has no task yet")
    for name in (names := spelled_as(names, references)):
        if name not in references:
            near = difflib.get_close_matches(name, references, n=3, cutoff=0.6)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(references)}"
            )
            raise ValueError(f"{where} has no task {name!r}; {hint}")
    return names


def check_purpose(
    where: str, classes: Sequence[str], labels: Mapping[str, np.ndarray], purpose: Purpose
) -> None:
    """Check that a task meets the requirements of its purpose; `labels` contains the labels of each
    split.

    Raises ValueError with a message that starts with `where`.
    """
    least = 2 if purpose == "learn" else 1
    if len(classes) < least:
        raise ValueError(
            f"{where} has {len(classes)} class(es) {list(classes)}; expected at least {least}"
        )
    if repeated := repeats(classes):
        raise ValueError(f"{where}: class names must be unique, repeated: {repeated}")
    for split, split_labels in labels.items():
        is_whole = purpose == "learn" or (purpose == "extend" and split == "train")
        check_labels(f"{where}, split {split!r}", classes, split_labels, all_classes=is_whole)
    if purpose == "extend" and not len(labels["val"]):
        raise ValueError(
            f"{where}: no image for validation; to extend a task, give at least 2 images of a class"
        )


def check_labels(
    where: str, classes: Sequence[object], labels: np.ndarray, *, all_classes: bool = True
) -> None:
    """Check that labels are in range and, with `all_classes`, that each class has an image.

    Raises ValueError with a message that starts with `where`.
    """
    outside = np.unique(labels[(labels < 0) | (labels >= len(classes))])
    if outside.size:
        raise ValueError(f"{where}: labels {outside[:5].tolist()} outside 0..{len(classes) - 1}")
    empty = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0)
    if all_classes and empty.size:
        names = ", ".join(repr(classes[i]) for i in empty[:8]) + (", ..." if empty.size > 8 else "")
        raise ValueError(f"{where}: no image of {empty.size} of {len(classes)} classes: {names}")


def repeats(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, in composed Unicode form and sorted."""
    return sorted(
        name for name, count in collections.Counter(map(composed, names)).items() if count > 1
    )


def tenths(num: int, count: int) -> int:
    """Return ceil(num * count / 10), computed with integers, so that rounding errors cannot affect
    the result."""
    return -(-num * count // 10)


def cut(
    labels: np.ndarray, num: int, *, keep: int, order: Int[np.ndarray, "N"]
) -> Bool[np.ndarray, "N"]:
    """Return a mask that selects `num` examples, distributed over the classes in proportion to
    their sizes.

    At least one example of each class is selected, and at least `keep` examples of each class are
    not selected; these bounds override `num`. Within a class, the first examples in `order` are
    selected.
    """
    sizes = np.bincount(labels)
    if sizes.min() <= keep:
        raise ValueError(
            f"a class has {sizes.min()} example(s), expected at least {keep + 1} to select one and"
            f" keep {keep}"
        )
    mask = np.zeros(len(labels), bool)
    counts = _allot(sizes, num, sizes - keep)
    for row, label in zip(order.tolist(), labels[order].tolist(), strict=True):
        if counts[label]:
            counts[label] -= 1
            mask[row] = True
    return mask


def check_splits(where: str, splits: Collection[str], purpose: Purpose = "learn") -> None:
    """Check that the splits of a folder or table suit the purpose.

    Raises ValueError with a message that starts with `where`.
    """
    if "train" not in splits and purpose != "measure":
        raise ValueError(f"{where}: no split 'train', only {sorted(splits)}")
    if "val" in splits and "test" not in splits and purpose == "learn":
        raise ValueError(
            f"{where}: there are train and val but no test split; add one, or remove val so that"
            " both are cut from train"
        )


class TooFew(ValueError):
    """The missing splits cannot be cut from train, because a class has too few images."""


def cut_missing(
    where: str, classes: Sequence[str], members: Members, seed: int, *, floor: bool = False
) -> None:
    """Cut the missing splits of `members` from train, in place.

    With `floor`, floor(0.1 n) of the n current training images are cut for each missing split.
    Raises TooFew if a class has too few images.
    """
    missing = [split for split in ("test", "val") if split not in members]
    if not missing:
        return
    sizes = np.bincount(np.array([*members.get("train", {}).values()], int), minlength=len(classes))
    if scarce := [name for name, size in zip(classes, sizes, strict=True) if size <= len(missing)]:
        raise TooFew(
            f"{where}: to cut {' and '.join(missing)} from train every class needs"
            f" {len(missing) + 1} images or more; too few in {', '.join(map(repr, scarce[:8]))}"
        )
    for i, split in enumerate(missing):
        keys = list(members["train"])
        labels = np.array(list(members["train"].values()))
        num = len(keys) // 10 if floor else tenths(len(keys), 3 if split == "test" else 1)
        _move(
            members, split, cut(labels, num, keep=len(missing) - i, order=hashed_order(keys, seed))
        )


def cut_for_extension(members: Members, seed: int) -> None:
    """Cut a missing validation split from train, in place. The new split has a tenth of the images,
    and at least one image of each class that has more than one image.

    A missing test split becomes an empty one.
    """
    members.setdefault("test", {})
    if "val" in members:
        return
    keys = list(members["train"])
    labels = np.array(list(members["train"].values()))
    several = np.flatnonzero(np.bincount(labels)[labels] > 1)
    mask, (_, positions) = (
        np.zeros(len(keys), bool),
        np.unique(labels[several], return_inverse=True),
    )
    if len(several):
        order = hashed_order([keys[row] for row in several], seed)
        mask[several] = cut(positions, tenths(len(keys), 1), keep=1, order=order)
    _move(members, "val", mask)


def hashed_order(keys: Sequence[str], seed: int) -> Int[np.ndarray, "N"]:
    """Sort the indices of keys by SHA-256("seed/key"), so that the permutation does not depend on a
    library's random number generator. Keys are hashed in composed Unicode form."""
    ranks = [hashlib.sha256(f"{seed}/{composed(key)}".encode()).digest() for key in keys]
    return np.array(sorted(range(len(keys)), key=ranks.__getitem__), int)


def _move(members: Members, split: str, chosen: Bool[np.ndarray, "N"]) -> None:
    """Move training images to the split `split`, in place. The mask `chosen` selects the images."""
    given = members["train"].items()
    for name, wanted in ((split, True), ("train", False)):
        members[name] = {
            key: label
            for (key, label), is_chosen in zip(given, chosen, strict=True)
            if is_chosen == wanted
        }


def _allot(sizes: np.ndarray, num: int, most: np.ndarray) -> list[int]:
    """Divide `num` in proportion to `sizes` by the largest-remainder method. Each share is at least
    1 and at most the corresponding entry of `most`."""
    num = int(np.clip(num, len(sizes), most.sum()))
    exact = num * sizes / sizes.sum()
    counts = np.clip(exact.astype(int), 1, most)
    step = np.sign(num - counts.sum())
    while counts.sum() != num:
        free = counts < most if step > 0 else counts > 1
        counts[np.where(free, step * (exact - counts), -np.inf).argmax()] += step
    return counts.tolist()
