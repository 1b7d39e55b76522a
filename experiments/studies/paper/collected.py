"""The publishable part of finished runs: its format and its reader.

The folder of a run contains `results.json` and `config.json` as the run wrote them, `record.json`
(command, data and conditions, without paths of this machine), and `right.npz` with one bit per test
image, which tells whether the prediction is correct. It contains no image and no label.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from cheem_jax.report.finished import (
    LeftOut,
    RunRecord,
    check_comparable,
    describe_variant,
    order_names,
    read,
)
from cheem_jax.report.table import METHODS

Correct = tuple[Bool[np.ndarray, "_"], ...]
"""For each task, whether the prediction of each test image is correct."""


class Collected(NamedTuple):
    """A collected run with its correct predictions, task-agnostic and with the task ID given."""

    run: RunRecord
    record: Mapping[str, Any]
    correct: Correct
    correct_given: Correct

    def correct_by_task(self, order: Sequence[str], *, with_task_id: bool) -> Correct:
        """Return the correct predictions with the tasks in this order."""
        correct = self.correct_given if with_task_id else self.correct
        by_name = dict(zip(self.run.order, correct, strict=True))
        return tuple(by_name[name] for name in order)


class Cell(NamedTuple):
    """The identity of runs that differ only in their seeds."""

    method: str
    variant: str = ""
    order: str = "default"

    @property
    def title(self) -> str:
        """Title of the row in a table."""
        parts = (METHODS[self.method], self.variant, self.order)
        return ", ".join(part for part in parts if part not in ("", "default"))


Cells = Mapping[Cell, Mapping[int, Collected]]
"""Runs, keyed by cell and seed, in the order of the table of methods."""


def is_usual(cells: Cells, cell: Cell) -> bool:
    """Return whether the runs of a cell have the usual settings of their method. A lighter router
    is usual, an ablation is not."""
    run = next(iter(cells[cell].values())).run.results
    return cell.order == "default" and cell.variant in ("", run["router"])


COMPARED = (
    "elimination",
    "rising rate",
    "closed-form score",
    "uniform, closed-form score",
    "from the nearest task",
)
"""Variants that are compared as if they were methods."""


def is_compared(cells: Cells, cell: Cell) -> bool:
    """Return whether the runs of a cell are compared with other methods; an ablation is not."""
    return is_usual(cells, cell) or (cell.order == "default" and cell.variant in COMPARED)


def usual_cell(cells: Cells, method: str) -> Cell | None:
    """Return the cell of a method with its usual settings; None if it was not run."""
    return next((cell for cell in cells if cell.method == method and is_usual(cells, cell)), None)


def read_tested(folders: Sequence[Path]) -> tuple[list[RunRecord], LeftOut]:
    """Read the finished runs that were measured on test images. Also return the excluded folders
    with the reasons."""
    runs, left_out = read(folders)
    trials = [run.directory for run in runs if run.measured_on != "test"]
    left_out += [(directory, "measured on validation images") for directory in trials]
    return [run for run in runs if run.directory not in trials], left_out


def load(folder: Path) -> Cells:
    """Load all collected runs. Raises ValueError for a corrupted run and for runs that cannot be
    compared."""
    if not folder.is_dir():
        raise ValueError(
            f"--results names {folder}, which is not a folder; expected one that collect.py wrote"
        )
    runs, left_out = read_tested([folder])
    if left_out:
        reasons = "; ".join(f"{directory}: {why}" for directory, why in left_out)
        raise ValueError(
            f"some collected runs cannot be used: {reasons}; remove them or collect them again"
        )
    if not runs:
        raise ValueError(
            f"{folder} contains no collected run; run `python experiments/collect.py --to {folder}`"
        )
    if len(places := sorted({run.place for run in runs})) > 1:
        names = " and ".join(f"{stream} on {backbone}" for stream, backbone in places)
        raise ValueError(f"{folder} contains runs of {names}; expected one stream and one backbone")
    check_comparable(runs)
    orders = order_names(runs)
    cells: dict[Cell, dict[int, Collected]] = {}
    for run in runs:
        cell = Cell(run.results["method"], describe_variant(run), orders[run.place[0], run.order])
        seeds = cells.setdefault(cell, {})
        seed = run.results["seed"]
        if seed in seeds:
            raise ValueError(
                f"{run.directory} and {seeds[seed].run.directory} are both {cell.title} with seed"
                f" {seed}; remove one"
            )
        seeds[seed] = _load(run)
    methods = list(METHODS)
    return {
        cell: dict(sorted(cells[cell].items()))
        for cell in sorted(cells, key=lambda cell: (methods.index(cell.method), cell[1:]))
    }


def _load(run: RunRecord) -> Collected:
    file = run.directory / "record.json"
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); collect the run again") from error
    correct, correct_given = unpack(run.directory / "right.npz")
    check_correct(run, correct, correct_given)
    return Collected(run, record, correct, correct_given)


def check_correct(run: RunRecord, correct: Correct, correct_given: Correct) -> None:
    """Raise ValueError unless the accuracies in the results follow from the correct predictions."""
    for name, by_task in (("accuracy", correct), ("local_accuracy", correct_given)):
        recorded = run.results[name][-1]
        shares = [float(task.mean()) for task in by_task]
        if len(shares) != len(recorded) or not np.allclose(shares, recorded, rtol=0, atol=1e-9):
            raise ValueError(
                f"the predictions of {run.directory} do not give the {name} of its results:"
                f" {np.round(shares, 4).tolist()} and {np.round(recorded, 4).tolist()}; collect the"
                " run again when it is finished"
            )


def pack(correct: Correct, correct_given: Correct) -> bytes:
    """Return an uncompressed npz file with one bit per image; its bytes depend only on the
    predictions."""
    stream = io.BytesIO()
    arrays = {
        "num_images": np.array([len(task) for task in correct], np.int32),
        "right": np.packbits(np.concatenate(correct)),
        "right_given": np.packbits(np.concatenate(correct_given)),
    }
    np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]
    return stream.getvalue()


def unpack(file: Path) -> tuple[Correct, Correct]:
    """Read a file that `pack` made."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            sizes = arrays["num_images"]
            bits = [
                np.unpackbits(arrays[name], count=int(sizes.sum())).astype(bool)
                for name in ("right", "right_given")
            ]
            if any(len(one) != sizes.sum() for one in bits):
                raise ValueError("it contains fewer bits than images")
    except (ValueError, OSError, EOFError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} cannot be read ({error}); collect the run again") from error
    correct, correct_given = (tuple(np.split(one, np.cumsum(sizes)[:-1])) for one in bits)
    return correct, correct_given
