"""Collected runs: what of a finished run may be published, how it is stored, and how it is read
again.

A folder per run holds `results.json` and `config.json` as the run wrote them, `record.json`
(command, data and conditions, without the places of one machine) and `right.npz`: which test images
were answered rightly. No image and no label.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from cheem_jax.report.finished import RunRecord, check_comparable, order_names, read, variant_of
from cheem_jax.report.table import METHODS

ByTask = tuple[Bool[np.ndarray, "_"], ...]


class Collected(NamedTuple):
    """A collected run: `right` where the task and the class were found, `right_given` with the task
    ID given."""

    run: RunRecord
    place: str
    """Its folder inside that of all runs, with slashes."""
    record: Mapping[str, Any]
    right: ByTask
    right_given: ByTask

    def answers(self, order: Sequence[str], *, given: bool) -> ByTask:
        """What was right by task, in this order of the tasks."""
        by_name = dict(zip(self.run.order, self.right_given if given else self.right, strict=True))
        return tuple(by_name[name] for name in order)


class Cell(NamedTuple):
    """What runs of different seeds have in common."""

    method: str
    variant: str = ""
    order: str = "default"

    @property
    def title(self) -> str:
        """As a row of a table is called."""
        told = [self.variant, "" if self.order == "default" else self.order]
        return ", ".join([METHODS.get(self.method, self.method), *filter(None, told)])


Cells = Mapping[Cell, Mapping[int, Collected]]
"""Runs by cell and seed, in the order of the methods' table."""


def is_usual(cells: Cells, cell: Cell) -> bool:
    """Whether runs are of a method as it is: a network that infers the task belongs to some, an
    ablation does not."""
    run = next(iter(cells[cell].values())).run.results
    return cell.order == "default" and cell.variant in ("", run["router"])


OF_THEIR_OWN = {
    "closed-form score": "cheem:closed_form", "uniform, closed-form score": "cheem:uniform",
    "from the nearest task": "lora_cl:nearest",
}  # fmt: skip
"""Variants that `compare.py` runs as methods, and what they are called there."""


def is_compared(cells: Cells, cell: Cell) -> bool:
    """Whether runs are of a method that is compared with others, not of an ablation."""
    return is_usual(cells, cell) or (cell.order == "default" and cell.variant in OF_THEIR_OWN)


def usual_of(cells: Cells, method: str) -> Cell | None:
    """The usual runs of a method, if there are some."""
    return next((cell for cell in cells if cell.method == method and is_usual(cells, cell)), None)


def load(folder: Path) -> Cells:
    """All collected runs; raises ValueError where one is corrupted or does not belong to the
    others."""
    if not folder.is_dir():
        raise ValueError(
            f"--results names {folder}, which is not a folder; expected one that collect.py has"
            " filled"
        )
    runs, left_out = read([folder])
    if left_out:
        told = "; ".join(f"{directory}: {why}" for directory, why in left_out)
        raise ValueError(
            f"of the collected runs some cannot be used: {told}; remove them or collect them again"
        )
    if not runs:
        raise ValueError(
            f"{folder} contains no collected run; `python experiments/collect.py --to {folder}`"
            " brings some"
        )
    if len(places := sorted({run.place for run in runs})) > 1:
        told = " and ".join(f"{stream} on {backbone}" for stream, backbone in places)
        raise ValueError(
            f"{folder} contains runs of {told}; a page is of one stream and one backbone"
        )
    check_comparable(runs)
    orders = order_names(runs)
    found: dict[Cell, dict[int, Collected]] = {}
    for run in runs:
        cell = Cell(run.results["method"], variant_of(run), orders[run.place[0], run.order])
        seed = run.results["seed"]
        if seed in found.setdefault(cell, {}):
            other = found[cell][seed].run.directory
            raise ValueError(
                f"{run.directory} and {other} are both {cell.title} with seed {seed}; remove one"
            )
        found[cell][seed] = _collected(run, folder)
    place = list(METHODS)
    return {
        cell: dict(sorted(found[cell].items()))
        for cell in sorted(found, key=lambda cell: (place.index(cell.method), cell[1:]))
    }


def _collected(run: RunRecord, folder: Path) -> Collected:
    file = run.directory / "record.json"
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); collect the run again") from error
    right, given = unpacked(run.directory / "right.npz")
    check_right(run, right, given)
    return Collected(run, run.directory.relative_to(folder).as_posix(), record, right, given)


def check_right(run: RunRecord, right: ByTask, given: ByTask) -> None:
    """ValueError unless these are the answers that the results count."""
    for name, found in (("accuracy", right), ("local_accuracy", given)):
        told = run.results[name][-1]
        shares = [float(task.mean()) for task in found]
        if len(shares) != len(told) or any(
            abs(a - b) > 1e-9 for a, b in zip(shares, told, strict=True)
        ):
            raise ValueError(
                f"the answers of {run.directory} are not those of its results: {name}"
                f" {_short(shares)} and {_short(told)}; collect the run again when it is finished"
            )


def _short(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in values) + "]"


def packed(right: ByTask, given: ByTask) -> bytes:
    """An npz, a bit per image and not compressed, so that equal answers give equal bytes
    everywhere."""
    stream = io.BytesIO()
    bits = {
        name: np.packbits(np.concatenate(found))
        for name, found in (("right", right), ("right_given", given))
    }
    np.savez(stream, num_images=np.array([len(task) for task in right], np.int32), **bits)  # pyright: ignore[reportArgumentType]
    return stream.getvalue()


def unpacked(file: Path) -> tuple[ByTask, ByTask]:
    """The inverse of `packed`."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            sizes = held["num_images"]
            found = [
                np.unpackbits(held[name], count=int(sizes.sum())).astype(bool)
                for name in ("right", "right_given")
            ]
            if any(len(bits) != sizes.sum() for bits in found):
                raise ValueError("it contains fewer bits than images")
    except (ValueError, OSError, EOFError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} cannot be read ({error}); collect the run again") from error
    right, given = (tuple(np.split(bits, np.cumsum(sizes)[:-1])) for bits in found)
    return right, given
