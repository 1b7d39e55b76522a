"""The paper's printed numbers, read from `numbers.csv`, and what they say when put together
again."""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cheem_jax.core import metrics

TOLD_METHOD = "full_finetune"


class Cell(NamedTuple):
    """What a number is of. `variant` sets apart what has one method: a placement, a sampling, a
    router, an order."""

    stream: str
    backbone: str
    method: str
    measure: str
    variant: str = ""
    task: str = ""


class Printed(NamedTuple):
    """A number as printed: accuracies and forgetting in %, FLOPs in G, added parameters in %, hours
    per task."""

    value: float
    text: str
    """With its spread, where it has one."""


NOTES = {
    "fom": (
        "Recomputed from the printed accuracies and FLOPs, 33 of the paper's 36 values come out"
        " within 3 %. TUNA on VDD with ViT-Base needs the 405 GFLOPs of MTIL; CODA-Prompt and"
        " DualPrompt on MTIL with DeiT-Tiny do not follow from what is printed. On VDD with"
        " DeiT-Tiny the divisor is a gap of 0.03 points: the values mean nothing."
    ),
    "upper_bounds": (
        "LoRA fine-tuning of DeiT-Tiny on VDD is 76.30 in the summary and 76.25 in the full table."
    ),
    "placement": (
        "The paper's share of added parameters for ViT-Base is 0.40 here and 0.25 in the table of"
        " samplings, where 0.25 is the value of the other placement."
    ),
    "sampling": "See the note on added parameters at the table of placements.",
    "taskwise_flops": (
        "The paper's figures show more skipped blocks than these FLOPs allow: they draw one seed,"
        " the table averages three."
    ),
}
"""What does not add up inside the paper, by table."""


@functools.cache
def printed() -> Mapping[str, Mapping[Cell, Printed]]:
    """Every printed number by table and cell."""
    found: dict[str, dict[Cell, Printed]] = {}
    with (Path(__file__).parent / "numbers.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            cell = Cell(*(row[name] for name in Cell._fields))
            text = row["value"] + (f" ± {row['std']}" if row["std"] else "")
            number = Printed(float(row["value"]), text)
            if cell in found.setdefault(row["table"], {}):
                raise ValueError(f"numbers.csv contains {cell} of the table {row['table']!r} twice")
            found[row["table"]][cell] = number
    return found


def most_precise(cell: Cell) -> float | None:
    """A number from the table that prints the most digits of it."""
    tables = printed()
    variants = {
        "full": "",
        "placement": "mlp_down",
        "breakdown": "",
        "upper_bounds": "",
        "clip": "",
    }
    numbers = (
        tables[table].get(cell._replace(variant=variant)) for table, variant in variants.items()
    )
    return next((number.value for number in numbers if number is not None), None)


def recomputed_fom(stream: str, backbone: str, method: str) -> float | None:
    """CHEEM's figure of merit against a method, from the printed accuracies and FLOPs."""

    def of(name: str, measure: str) -> float | None:
        return most_precise(Cell(stream, backbone, name, measure))

    given = (
        of(TOLD_METHOD, "average_accuracy"),
        of("cheem", "average_accuracy"),
        of("cheem", "flops"),
        of(method, "average_accuracy"),
        of(method, "flops"),
    )
    return None if None in given else metrics.figure_of_merit(*given)  # pyright: ignore[reportArgumentType]
