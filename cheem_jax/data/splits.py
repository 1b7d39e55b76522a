"""Cutting the splits a data set lacks, by the counts that the paper's tables follow.

validation = ceil(0.1 n) of what is left for training; where there is no test part either, test = ceil(0.3 n)
comes first (n is the size of the part that is divided).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from cheem_jax.data.task import check_class_names, check_labels

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Usual names of splits, in lower case, and ours."""

VAL_TENTHS = 1
TEST_TENTHS = 3


def tenths(num: int, count: int) -> int:
    """ceil(num count / 10) in integers: 0.3 * 10 in floating point would round up to 4."""
    return -(-num * count // 10)


def seeded_order(keys: Sequence[str], seed: int) -> Int[np.ndarray, "N"]:
    """The rows sorted by SHA-256("seed/key"): a permutation that depends on no library's random numbers."""
    ranks = [hashlib.sha256(f"{seed}/{key}".encode()).digest() for key in keys]
    return np.array(sorted(range(len(keys)), key=ranks.__getitem__), int)


def cut(labels: np.ndarray, num: int, *, keep: int, order: Int[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
    """A mask with `num` examples cut out, spread over the classes in proportion to their size.

    Every class gives at least one and keeps at least `keep`; `num` gives way where that needs more or leaves less.
    Each gives those that come first in `order`.
    """
    sizes = np.bincount(labels)
    if sizes.min() <= keep:
        raise ValueError(f"classes of {sizes.min()} example(s) cannot give one and keep {keep}")
    mask, left = np.zeros(len(labels), bool), _allot(sizes, num, sizes - keep)
    for row, label in zip(order.tolist(), labels[order].tolist(), strict=True):
        if left[label]:
            left[label] -= 1
            mask[row] = True
    return mask


def cut_missing(
    task: str, where: str, classes: Sequence[str], keys: dict[str, list[str]], labels: dict[str, np.ndarray], seed: int
) -> None:
    """Adds the splits that `keys` and `labels` lack, in place, taking their examples from train.

    Raises ValueError for wrong classes or labels in the splits that exist, and for classes that have too few examples.
    """
    check_class_names(task, classes, where)
    for split, members in labels.items():
        check_labels(task, split, classes, members, where)
    missing = [split for split in ("test", "val") if split not in keys]
    sizes = np.bincount(labels["train"], minlength=len(classes))
    if scarce := [name for name, size in zip(classes, sizes, strict=True) if size <= len(missing)]:
        raise ValueError(
            f"{where}: to cut {' and '.join(missing)} from train every class needs {len(missing) + 1} "
            f"images or more; too few in {', '.join(map(repr, scarce[:8]))}"
        )
    for i, split in enumerate(missing, start=1):
        num = tenths(len(keys["train"]), TEST_TENTHS if split == "test" else VAL_TENTHS)
        move(keys, labels, split, num, keep=len(missing) - i + 1, seed=seed)


def move(
    keys: dict[str, list[str]], labels: dict[str, np.ndarray], split: str, num: int, *, keep: int, seed: int
) -> None:
    """Cuts `num` examples of train, in place, and calls them `split`."""
    train, members = labels["train"], keys["train"]
    mask = cut(train, num, keep=keep, order=seeded_order(members, seed))
    for name, chosen in ((split, mask), ("train", ~mask)):
        keys[name], labels[name] = [members[row] for row in np.flatnonzero(chosen)], train[chosen]


def _allot(sizes: np.ndarray, num: int, most: np.ndarray) -> list[int]:
    """Shares of `num` in proportion to `sizes`, each within 1..most, by largest remainder."""
    num = int(np.clip(num, len(sizes), most.sum()))
    exact = num * sizes / sizes.sum()
    counts = np.clip(exact.astype(int), 1, most)
    while counts.sum() != num:
        short = counts.sum() < num
        lack = (
            np.where(counts < most, exact - counts, -np.inf) if short else np.where(counts > 1, counts - exact, -np.inf)
        )
        counts[lack.argmax()] += 1 if short else -1
    return counts.tolist()
