"""Real handwritten digits: the 1797 pictures of 8x8 pixels that scikit-learn carries."""

import numpy as np
from PIL import Image

from cheem_jax.data.splits import cut
from cheem_jax.data.task import Split, Task


def task(sizes: dict[str, int], image_size: int, rng: np.random.Generator) -> Task:
    """Disjoint train, val and test splits of the given sizes, white on black as the pictures are.

    The test split is drawn first and from all pictures, so that it does not depend on the other sizes.
    """
    from sklearn.datasets import load_digits  # here, because importing it takes a second

    pictures, labels = load_digits(return_X_y=True)
    if sum(sizes.values()) > len(labels):
        raise ValueError(f"there are {len(labels)} digits in all, the splits ask for {sizes}")
    left, splits = np.arange(len(labels)), {}
    for split in ("test", "val", "train"):
        order = np.concatenate([rng.permutation(np.flatnonzero(labels[left] == digit)) for digit in range(10)])
        taken = cut(labels[left], sizes[split], keep=0, order=order)
        chosen = left[taken]
        splits[split] = Split(_enlarge(pictures[chosen], image_size), labels[chosen].astype(np.int32))
        left = left[~taken]
    return Task("digits", tuple("0123456789"), **splits)


def _enlarge(pictures: np.ndarray, image_size: int) -> np.ndarray:
    """Rows of 64 grey values in 0..16 to uint8 `[N, S, S, 3]`, bicubic."""
    small = np.round(pictures.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    size = (image_size, image_size)
    grey = [np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BICUBIC)) for p in small]
    return np.repeat(np.stack(grey)[..., None], 3, axis=-1)
