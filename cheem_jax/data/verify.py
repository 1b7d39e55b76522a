"""Every picture of a plan read and decoded once, and what was found; decoded copies held against their hashes."""

import collections
import dataclasses
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cheem_jax.data.cache import open_cache
from cheem_jax.data.decode import FORMATS, PIECE, Progress, decode_image
from cheem_jax.data.files import Encoded
from cheem_jax.data.task import Plan, hash_of

SMALL = 32
"""Every pixel is decoded; what is kept of it for a moment has this size."""
EXAMPLES = 5


class Listed(NamedTuple):
    """One image as the plan lists it."""

    split: str
    label: str
    """Its class name."""
    key: str


class Size(NamedTuple):
    """Of an image, in pixels."""

    width: int
    height: int


class Look(NamedTuple):
    """What one readable image shows."""

    digest: bytes
    num_bytes: int
    size: Size
    mode: str


@dataclasses.dataclass(frozen=True)
class Findings:
    """What `verify` found in a task. Copies are files with the same bytes."""

    task: str
    num: dict[str, int]
    """Images in each split."""
    num_classes: int
    smallest_class: tuple[str, int]
    """Name and number of training images; the first one where several are as small."""
    largest_class: tuple[str, int]
    num_bytes: int
    """Of all readable files together."""
    smallest_image: Size | None
    """By area; None where no image is readable."""
    largest_image: Size | None
    modes: dict[str, int]
    """Images by Pillow's mode: RGB, L (grey), P (palette), ..."""
    broken: list[str]
    """A line naming file and reason for every image that cannot be used."""
    across: list[tuple[Listed, Listed]]
    """Copies in two splits, each beside the first of its kind."""
    contradictory: list[tuple[Listed, Listed]]
    """Copies under two labels."""
    num_within: int
    """Images that are copies of another one in their split."""
    within: list[tuple[Listed, Listed]]
    """The first few of those."""

    @property
    def sound(self) -> bool:
        """Every picture can be read. Copies do not count, not even under two labels: public sets have some of them."""
        return not self.broken

    def to_json(self) -> dict[str, Any]:
        """All of it, in what JSON knows."""
        return {"sound": self.sound, **dataclasses.asdict(self)}


def verify(plan: Plan, *, on_progress: Progress | None = None, workers: int | None = None) -> Findings:
    """Reads and decodes every image with a few threads, and goes on where one is broken."""
    broken: list[str] = []
    listed: list[tuple[str, int, int]] = []  # split, label and row of every readable image
    digests: list[bytes] = []
    modes: collections.Counter[str] = collections.Counter()
    sizes: set[Size] = set()
    num_bytes = 0
    with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1), "cheem-verify") as pool:
        for split, part in plan.splits.items():
            for row, seen in enumerate(_looks(part.files, pool, on_progress)):
                if isinstance(seen, str):
                    broken.append(seen)
                    continue
                listed.append((split, int(part.labels[row]), row))
                digests.append(seen.digest)
                modes[seen.mode] += 1
                sizes.add(seen.size)
                num_bytes += seen.num_bytes

    def name(index: int) -> Listed:
        split, label, row = listed[index]
        return Listed(split, plan.classes[label], plan.splits[split].files.key(row))

    across, contradictory, within, num_within = [], [], [], 0
    for members in _same(digests):
        first = members[0]
        of_split: dict[str, int] = {}
        for member in members:
            split, label, _ = listed[member]
            if (earlier := of_split.setdefault(split, member)) != member:
                num_within += 1
                if len(within) < EXAMPLES:
                    within.append((name(earlier), name(member)))
            if split != listed[first][0]:
                across.append((name(first), name(member)))
            if label != listed[first][1]:
                contradictory.append((name(first), name(member)))
    counts = np.bincount(plan.train.labels, minlength=len(plan.classes)).tolist()
    by_area = sorted(sizes, key=lambda size: (size.width * size.height, size))
    return Findings(
        task=plan.name,
        num={split: len(part.labels) for split, part in plan.splits.items()},
        num_classes=len(plan.classes),
        smallest_class=min(zip(plan.classes, counts, strict=True), key=lambda pair: pair[1]),
        largest_class=max(zip(plan.classes, counts, strict=True), key=lambda pair: pair[1]),
        num_bytes=num_bytes,
        smallest_image=by_area[0] if by_area else None,
        largest_image=by_area[-1] if by_area else None,
        modes=dict(sorted(modes.items())),
        broken=broken,
        across=across,
        contradictory=contradictory,
        num_within=num_within,
        within=within,
    )


def verify_cache(place: Path) -> None:
    """Reads decoded copies to the end; raises ValueError naming the splits that are not what was written."""
    if not place.is_dir():
        raise FileNotFoundError(f"{place}: no such folder; expected one with decoded pictures and cache.json")
    damaged = []
    for name, split in open_cache(place).items():
        pieces = (split.images[start : start + PIECE] for start in range(0, len(split.images), PIECE))
        if (found := hash_of(pieces, split.labels)) != split.sha256:
            damaged.append(f"{name}.npy with {name}.labels.npy (SHA-256 {found[:12]}..., told {split.sha256!s:.12}...)")
    if damaged:
        raise ValueError(
            f"the cache {place} is damaged: {'; '.join(damaged)} do not have the hash that cache.json tells; remove "
            "this folder and it is made again"
        )


def _looks(files: Encoded, pool: ThreadPoolExecutor, on_progress: Progress | None) -> Iterator[Look | str]:
    """A look at each image in turn, or why there is none; of the images themselves only one a thread is held."""

    def look(row: int) -> Look | str:
        try:
            data = files.read(row)
            decode_image(data, SMALL, name=files.where(row))
        except (ValueError, OSError) as error:
            return str(error)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:  # the header again
            return Look(hashlib.sha256(data).digest(), len(data), Size(*image.size), image.mode)

    for start in range(0, len(files), PIECE):
        rows = range(start, min(start + PIECE, len(files)))
        yield from pool.map(look, rows)
        if on_progress is not None:
            on_progress(len(rows))


def _same(digests: Sequence[bytes]) -> Iterable[list[int]]:
    """Positions of equal digests, for all that occur more than once, in the order of the first."""
    repeated = {digest for digest, num in collections.Counter(digests).items() if num > 1}
    groups: dict[bytes, list[int]] = {}
    for index, digest in enumerate(digests):
        if digest in repeated:
            groups.setdefault(digest, []).append(index)
    return groups.values()
