"""The paper's printed numbers, read from `numbers.csv`, and figures of merit that follow from
them."""

import csv
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cheem_jax.core import metrics

UPPER_BOUND = "full_finetune"
"""Upper bound in the figure of merit; it is given the task ID."""


class Cell(NamedTuple):
    """The identity of a number; `variant` is a placement, a sampling, a router or an order of
    tasks."""

    stream: str
    backbone: str
    method: str
    measure: str
    variant: str = ""
    task: str = ""


class Printed(NamedTuple):
    """A printed number: accuracy and forgetting in %, GFLOPs, added parameters in %, or hours per
    task."""

    value: float
    text: str
    """The number, with its standard deviation if the paper prints one."""


NOTES = {
    "fom": (
        "Recomputed from the printed accuracies and FLOPs, 33 of the paper's 36 values agree within"
        " 3 %. TUNA on VDD with ViT-Base needs the 405 GFLOPs of MTIL; CODA-Prompt and DualPrompt"
        " on MTIL with DeiT-Tiny do not follow from the printed numbers. On VDD with DeiT-Tiny the"
        " divisor is a gap of 0.03 points, so the values mean nothing."
    ),
    "upper_bounds": (
        "LoRA fine-tuning of DeiT-Tiny on VDD is 76.30 in the summary and 76.25 in the full table."
    ),
    "placement": (
        "The paper's share of added parameters for ViT-Base is 0.40 here and 0.25 in the table of"
        " samplings, where 0.25 is the value of the other placement."
    ),
    "sampling": "See the note on added parameters below the table of placements.",
    "taskwise_flops": (
        "The paper's figures show more skipped blocks than these FLOPs allow: the figures show one"
        " seed, and the table is a mean over three."
    ),
}
"""Inconsistencies in the paper, keyed by table."""


@functools.cache
def printed() -> Mapping[str, Mapping[Cell, Printed]]:
    """Read every printed number, keyed by table and cell."""
    tables: dict[str, dict[Cell, Printed]] = {}
    with (Path(__file__).parent / "numbers.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            cell = Cell(*(row[name] for name in Cell._fields))
            text = row["value"] + (f" ± {row['std']}" if row["std"] else "")
            table = tables.setdefault(row["table"], {})
            if cell in table:
                raise ValueError(f"numbers.csv contains {cell} of the table {row['table']!r} twice")
            table[cell] = Printed(float(row["value"]), text)
    return tables


VARIANTS = {"full": "", "placement": "mlp_down", "breakdown": "", "upper_bounds": "", "clip": ""}
"""Tables, those with the most digits first, with the variant of the usual CHEEM."""


def recomputed_fom(stream: str, backbone: str, method: str) -> float | None:
    """Compute CHEEM's figure of merit against a method from the printed accuracies and FLOPs."""

    def number(name: str, measure: str) -> float | None:
        cell = Cell(stream, backbone, name, measure)
        cells = (
            printed()[table].get(cell._replace(variant=variant))
            for table, variant in VARIANTS.items()
        )
        return next((one.value for one in cells if one is not None), None)

    return figure_of_merit(number, method)


def figure_of_merit(number: Callable[[str, str], float | None], method: str) -> float | None:
    """Compute CHEEM's figure of merit against a method; None if a number is missing. `number`
    returns a measure of a method."""
    values = (
        number(UPPER_BOUND, "average_accuracy"),
        *(number(name, key) for name in ("cheem", method) for key in ("average_accuracy", "flops")),
    )
    return None if None in values else metrics.figure_of_merit(*values)  # pyright: ignore[reportArgumentType]
