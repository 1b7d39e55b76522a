"""Cutting the splits a data set lacks, by the counts that the paper's tables follow.

validation = ceil(0.1 n) of what is left for training; where there is no test part either, test = ceil(0.3 n)
comes first (n is the size of the part that is divided).
"""

from collections.abc import Sequence

import numpy as np

VAL_TENTHS = 1
TEST_TENTHS = 3


def tenths(num: int, count: int) -> int:
    """ceil(num count / 10) in integers: 0.3 * 10 in floating point would round up to 4."""
    return -(-num * count // 10)


def cut(labels: np.ndarray, num: int, *, keep: int, rng: np.random.Generator) -> np.ndarray:
    """A mask `[N]` with `num` examples cut out, spread over the classes in proportion to their size.

    Every class gives at least one and keeps at least `keep`; `num` gives way where that needs more or
    leaves less. Which ones: a permutation of each class, so sort the examples by name first.
    """
    sizes = np.bincount(labels)
    if sizes.min() <= keep:
        raise ValueError(f"classes of {sizes.min()} example(s) cannot give one and keep {keep}")
    counts = _allot(sizes, num, sizes - keep)
    mask = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        members = np.flatnonzero(labels == label)
        mask[rng.permutation(members)[:count]] = True
    return mask


def _allot(sizes: np.ndarray, num: int, most: np.ndarray) -> Sequence[int]:
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
