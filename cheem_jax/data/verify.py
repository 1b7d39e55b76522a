"""Read and decode every image of a plan, report problems, and check the hashes of cached decoded
images."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.data.decode import PIECE, OnProgress, in_threads, largest_value, opened, to_rgb
from cheem_jax.data.files import Chosen, Encoded, join_first
from cheem_jax.data.load import SPLIT_NAMES, cache_place, open_cache
from cheem_jax.data.task import EncodedSplit, Plan, Task, hash_images

Size = tuple[int, int]
"""Width and height in pixels."""
DIM = 2**14
"""Brightness threshold of 16-bit images. If no pixel reaches this value (a quarter of the range),
the images probably contain data of fewer bits, such as 12."""
LOOKED_AT = 16
"""Number of images per task that are checked for brightness before learning."""


class Look(NamedTuple):
    """Properties of one readable image."""

    sha256: bytes
    size: Size
    mode: str
    """Pillow image mode."""
    num_bytes: int
    brightest: int | None
    """Largest value of a 16-bit image; None for other images."""


class Listed(NamedTuple):
    """An image as listed in a plan."""

    split: str
    label: str
    """Class name."""
    key: str


Pairs = list[tuple[Listed, Listed]]


@dataclasses.dataclass(frozen=True)
class Findings:
    """Result of `verify` for one task. Copies are files with identical bytes."""

    task: str
    num: dict[str, int]
    """Number of images in each split."""
    num_classes: int
    smallest_class: tuple[str, int]
    """Name of the smallest class and its number of training images; the first such class if more
    than one class has this size."""
    largest_class: tuple[str, int]
    num_bytes: int
    """Total size of the readable files."""
    smallest_image: Size | None
    """Size with the smallest area; None if no image is readable."""
    largest_image: Size | None
    modes: dict[str, int]
    """Number of images per Pillow mode: RGB, L (grey), P (palette), ..."""
    brightest: int | None
    """Largest pixel value (at most 65535) of all 16-bit images; None if there are no 16-bit
    images."""
    broken: list[str]
    """File and reason for each unusable image."""
    across: Pairs
    """Copies in different splits. Each pair contains the first occurrence and a later one."""
    contradictory: Pairs
    """Copies with different labels. Each pair contains the first occurrence and a later one."""

    @property
    def sound(self) -> bool:
        """Whether every image can be read. Copies are not errors, even with different labels,
        because some public data sets contain them."""
        return not self.broken

    def to_json(self) -> dict[str, Any]:
        """Convert the findings to JSON values."""
        return {"sound": self.sound, **dataclasses.asdict(self)}


def verify(plan: Plan, *, on_progress: OnProgress = lambda num: None) -> Findings:
    """Read and decode every image in threads; broken images do not stop the check."""
    broken: list[str] = []
    copies: dict[bytes, list[Listed]] = {}  # readable images, keyed by their hash
    modes: collections.Counter[str] = collections.Counter()
    sizes: set[Size] = set()
    num_bytes = 0
    brightest = list[int | None]()
    for listed, _, look in _looks(plan, on_progress):
        if isinstance(look, str):
            broken.append(look)
            continue
        copies.setdefault(look.sha256, []).append(listed)
        modes[look.mode] += 1
        sizes.add(look.size)
        num_bytes += look.num_bytes
        brightest.append(look.brightest)

    pairs = [(first, other) for first, *others in copies.values() for other in others]
    counts = collections.Counter(
        plan.classes[label] for label in sorted(plan.train.labels.tolist())
    )
    by_area = sorted(sizes, key=lambda size: (math.prod(size), size))
    return Findings(
        task=plan.name,
        num=plan.counts,
        num_classes=len(plan.classes),
        smallest_class=min(counts.items(), key=lambda pair: pair[1]),
        largest_class=max(counts.items(), key=lambda pair: pair[1]),
        num_bytes=num_bytes,
        smallest_image=by_area[0] if by_area else None,
        largest_image=by_area[-1] if by_area else None,
        modes=dict(sorted(modes.items())),
        brightest=_largest(brightest),
        broken=broken,
        across=[(first, other) for first, other in pairs if first.split != other.split],
        contradictory=[(first, other) for first, other in pairs if first.label != other.label],
    )


def _looks(plan: Plan, on_progress: OnProgress) -> Iterator[tuple[Listed, int, Look | str]]:
    """Yield each image, its row, and its properties or the reason why it cannot be used."""
    for split, part in plan.splits.items():
        looks = in_threads(functools.partial(_look, part.files), range(len(part.files)), PIECE)
        for row, look in enumerate(itertools.chain.from_iterable(looks)):
            on_progress(1)
            yield Listed(split, plan.classes[part.labels[row]], part.files.key(row)), row, look


def _look(files: Encoded, row: int) -> Look | str:
    try:
        data = files.read(row)
        with opened(data, files.where(row)) as image:
            mode = image.mode
            rgb = to_rgb(image, upright=files.upright)
            brightest = largest_value(image)
        return Look(hashlib.sha256(data).digest(), rgb.size, mode, len(data), brightest)
    except (ValueError, OSError) as error:
        return str(error)


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def dim_note(brightest: int | None, images: str = "the 16-bit images") -> str | None:
    """Return a note if 16-bit images are nearly black, else None; `brightest` is their largest
    pixel value."""
    if brightest is None or brightest >= DIM:
        return None
    bits = max(1, brightest.bit_length())
    return (
        f"the brightest pixel of {images} is {brightest} of 65535, so they are nearly black; if"
        f" they contain {bits}-bit data, multiply the values by {2 ** (16 - bits)} and store them"
        " again"
    )


def notes_on(plan: Plan, task: Task) -> list[str]:
    """Return notes about problems of a decoded task: nearly black images, and identical images with
    different labels.

    Streamed images are not compared.
    """
    decoded = [name for name, split in task.splits.items() if len(split.labels)]
    notes = list[str]()
    if not decoded:
        return notes
    files = plan.splits[decoded[0]].files
    rows = np.unique(np.linspace(0, len(files) - 1, LOOKED_AT).astype(int)).tolist()
    looks = [_look(files, row) for row in rows]
    brightest = _largest(look.brightest for look in looks if isinstance(look, Look))
    notes += filter(
        None, [dim_note(brightest, f"the 16-bit images among {len(rows)} checked images")]
    )
    alike: dict[bytes, list[Listed]] = {}
    for name, split in task.splits.items():
        if isinstance(split.images, np.ndarray):
            for row, image in enumerate(split.images):
                listed = Listed(
                    name, task.classes[split.labels[row]], plan.splits[name].files.key(row)
                )
                alike.setdefault(
                    hashlib.sha256(np.ascontiguousarray(image).data).digest(), []
                ).append(listed)
    if several := [group for group in alike.values() if len({image.label for image in group}) > 1]:
        firsts = [
            (group[0], next(image for image in group if image.label != group[0].label))
            for group in several
        ]
        lines = [" and ".join(f"{image.key} ({image.label})" for image in pair) for pair in firsts]
        num = sum(map(len, several))
        notes.append(
            f"{num:,} images are identical to an image with another label: {join_first(lines, 3)}"
        )
    return [f"note: {plan.name}: {note}" for note in notes]


def without_broken(
    plan: Plan, *, on_progress: OnProgress = lambda num: None
) -> tuple[Plan, list[str]]:
    """Remove unreadable images from a plan. Return the new plan, whose `skipped` contains the keys
    of the removed images, and an error message for each removed image.

    Raises ValueError if more than 5 % of the images of a split, or of a class in all splits
    together, are unreadable, or if a split has no other image of a class. The limit is rounded up
    to a whole number of images.
    """
    rows: dict[str, list[int]] = {split: [] for split in plan.splits}
    reasons, skipped = list[str](), list[str]()
    num, lost = (collections.Counter[str]() for _ in range(2))
    for listed, row, look in _looks(plan, on_progress):
        groups = (f"split {listed.split!r}", f"class {listed.label!r}")
        num.update(groups)
        if isinstance(look, str):
            lost.update(groups)
            reasons.append(look)
            skipped.append(listed.key)
        else:
            rows[listed.split].append(row)
    if many := [
        f"{lost[group]} of {num[group]} in {group}"
        for group in lost
        if lost[group] > -(-num[group] // 20)
    ]:
        raise ValueError(
            f"{plan.name}: {len(reasons)} images cannot be read, more than 5 % of a class or split"
            f" ({'; '.join(many[:5])}); replace or remove these files; the first one is"
            f" {reasons[0]}"
        )
    if not skipped:
        return plan, []
    parts = {
        split: EncodedSplit(Chosen(part.files, rows[split]), part.labels[rows[split]])
        for split, part in plan.splits.items()
    }
    try:
        return dataclasses.replace(plan, **parts, skipped=tuple(skipped)), reasons
    except ValueError as error:  # a split lost the last image of a class
        raise ValueError(
            f"{error}, without the unreadable images; remove these files, or add images of the"
            f" class; the first one is {reasons[0]}"
        ) from error


def verify_caches(plan: Plan, roots: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Check the hashes of a plan's cached images in `roots`. This includes caches of every image
    size, with and without EXIF rotation, and caches that contain only some of the splits.

    Returns the folders of intact caches, and a message about each corrupted cache.
    """
    intact, corrupted = [], []
    plans = [plan, plan.turned(not plan.upright)]
    subsets = [
        names
        for length in range(1, len(SPLIT_NAMES) + 1)
        for names in itertools.combinations(SPLIT_NAMES, length)
    ]
    for root in roots:
        # hashing the file lists is slow, so the folders of each image size are computed once
        places = dict[int, dict[Path, tuple[str, ...]]]()
        for place in root.glob(f"{cache_place(plan, 0, root).name.split('-0-')[0]}-*"):
            digits = place.name.rsplit("-", 2)[1]
            if not (place.is_dir() and digits.isdecimal()):
                continue
            size = int(digits)
            if size not in places:
                places[size] = {
                    cache_place(one, size, root, names): names for one in plans for names in subsets
                }
            names = places[size].get(place)
            if names is None:
                continue
            try:
                for name, split in open_cache(place, plan, names).items():
                    if hash_images(split.images, split.labels) != split.sha256:
                        raise ValueError(
                            f"the cache {place} is corrupted: {name}.npy does not have the SHA-256"
                            " in cache.json; remove this folder, and it will be created again"
                        )
                intact.append(str(place))
            except ValueError as error:
                corrupted.append(str(error))
    return intact, corrupted
