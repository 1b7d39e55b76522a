"""Cutting the splits a data set lacks, by the counts that the paper's tables follow.

validation = ceil(0.1 n) of what is left for training; where there is no test part either, test = ceil(0.3 n)
comes first (n is the size of the part that is divided).
"""

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Bool, Int

Members = dict[str, dict[str, int]]
"""The label of every image by its key, for each split."""

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


def check_splits(where: str, splits: Collection[str]) -> None:
    """ValueError for splits that people give and that nothing can be cut from; `where` names their folder or file."""
    if "train" not in splits:
        raise ValueError(f"{where}: no split 'train', only {sorted(splits)}")
    if "val" in splits and "test" not in splits:
        raise ValueError(f"{where}: train and val but no test split; add one, or leave train alone to be cut")


def cut_missing(where: str, classes: Sequence[str], members: Members, seed: int) -> None:
    """Adds the splits that `members` lacks, in place, taking their images from train.

    Raises ValueError for classes that have too few images.
    """
    missing = [split for split in ("test", "val") if split not in members]
    if not missing:
        return
    sizes = np.bincount(list(members["train"].values()), minlength=len(classes))
    if scarce := [name for name, size in zip(classes, sizes, strict=True) if size <= len(missing)]:
        raise ValueError(
            f"{where}: to cut {' and '.join(missing)} from train every class needs {len(missing) + 1} "
            f"images or more; too few in {', '.join(map(repr, scarce[:8]))}"
        )
    for i, split in enumerate(missing, start=1):
        num = tenths(len(members["train"]), TEST_TENTHS if split == "test" else VAL_TENTHS)
        move(members, split, num, keep=len(missing) - i + 1, seed=seed)


def move(members: Members, split: str, num: int, *, keep: int, seed: int) -> None:
    """Cuts `num` images of train, in place, and calls them `split`."""
    keys = list(members["train"])
    labels = np.array(list(members["train"].values()))
    chosen = cut(labels, num, keep=keep, order=seeded_order(keys, seed))
    for name, mask in ((split, chosen), ("train", ~chosen)):
        members[name] = {keys[row]: int(labels[row]) for row in np.flatnonzero(mask)}


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
