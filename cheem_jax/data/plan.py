"""What a task will hold, known and checked before a single image is decoded."""

import dataclasses
import functools
import hashlib
import json

import numpy as np

from cheem_jax.data.files import Encoded
from cheem_jax.data.task import check_class_names, check_labels


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One split: files and their labels int32 `[N]`."""

    files: Encoded
    labels: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A task before decoding. Raises ValueError unless every split holds every class and no file lies in two."""

    name: str
    classes: tuple[str, ...]
    train: Part
    val: Part
    test: Part
    source: str
    """Where the files are, for messages."""
    stamp: str
    """Changes when the files do (by size and time, or by version), so that no decoded copy outlives what it shows."""

    def __post_init__(self):
        check_class_names(self.name, self.classes)
        split_of: dict[str, str] = {}
        for split, part in self.splits.items():
            check_labels(self.name, split, self.classes, part.labels)
            for row in range(len(part.files)):
                key = part.files.key(row)
                if key in split_of:
                    raise ValueError(
                        f"task {self.name!r}: {key!r} of {self.source} is listed in {split_of[key]!r} and again in "
                        f"{split!r}; an image may be in one split, once"
                    )
                split_of[key] = split

    @property
    def splits(self) -> dict[str, Part]:
        return {"train": self.train, "val": self.val, "test": self.test}

    @property
    def num_images(self) -> int:
        return sum(len(part.labels) for part in self.splits.values())

    @functools.cached_property
    def split_sha256(self) -> str:
        """SHA-256 over keys and labels of every split: equal where two people compare the same thing."""
        digest = hashlib.sha256(json.dumps([self.name, self.classes]).encode())
        for split, part in self.splits.items():
            lines = sorted(f"{part.files.key(row)}\t{label}" for row, label in enumerate(part.labels.tolist()))
            digest.update("\n".join([f"{split} {len(lines)}", *lines, ""]).encode())
        return digest.hexdigest()
