"""The differences that the paper prints, next to those of collected runs."""

from collections.abc import Mapping
from typing import NamedTuple

from cheem_jax.report.table import NONE, Grid
from studies.paper.claims import CHEEM, CLAIMS, NOT_RUN, Verdict, number_cells, searches
from studies.paper.collected import Cell as Runs
from studies.paper.collected import Cells
from studies.paper.printed import UPPER_BOUND, Cell, printed

STREAMS = {
    f"{stream.upper()}, {title}": (stream, backbone)
    for backbone, title in (
        ("deit_tiny", "DeiT-Tiny"),
        ("vit_base", "ViT-B"),
        ("clip_vit_base", "CLIP"),
    )
    for stream in ("mtil", "vdd")
}
"""Streams and backbones of the paper, keyed by column title."""


class Pair(NamedTuple):
    """Two methods, or two variants of CHEEM, and the measure in which the paper compares them."""

    ours: str
    theirs: str
    measure: str = "average_accuracy"
    variants: tuple[str, str] = ("", "")


BOTH = ("hee", "uniform")
PAIRS = {
    "CHEEM − LoRA-CL": Pair("cheem", "lora_cl"),
    "CHEEM − S-Prompts": Pair("cheem", "s_prompts"),
    "CHEEM − full fine-tuning, task ID given to the latter alone, as in the paper": Pair(
        "cheem", UPPER_BOUND
    ),
    "HEE − uniform, accuracy": Pair("cheem", "cheem", variants=BOTH),
    "HEE − uniform, parameters added per task": Pair(
        "cheem", "cheem", "params_added_percent", BOTH
    ),
    **{
        f"S-Prompts − {title}": Pair("s_prompts", method)
        for method, title in (
            ("l2p", "L2P"),
            ("dualprompt", "DualPrompt"),
            ("coda_prompt", "CODA-Prompt"),
        )
    },
}
"""Printed differences, keyed by the comparison in the table of claims."""


def agreement_grid(streams: Mapping[str, Cells]) -> Grid:
    """Make a row for each difference that the paper prints, with a column for each of its streams
    and backbones and for each search in `streams`: runs keyed by a title such as the image size.

    Our cells have the difference, its 95 % interval, and the verdict on the claim.
    """
    columns = {"compared": list(PAIRS)}
    for title, (stream, backbone) in STREAMS.items():
        columns[title] = [_printed(pair, stream, backbone) for pair in PAIRS.values()]
    for place, cells in streams.items():
        verdicts: dict[str, Verdict] = {}
        for check in CLAIMS.values():
            for one in check(cells):
                # the paper's claim precedes the same comparison with a margin
                verdicts.setdefault(one.compared, one)
        for search in searches(cells):
            columns[f"{search.title}, {place}"] = [
                _measured(verdicts.get(_with_search(compared, search))) for compared in PAIRS
            ]
    rows = tuple(zip(*columns.values(), strict=True))
    return Grid("", tuple(columns), rows, 1)


def _with_search(compared: str, search: Runs) -> str:
    """Return the title of a comparison in the table of claims, for a search."""
    if search == CHEEM:
        return compared
    if CHEEM.title in compared:
        return compared.replace(CHEEM.title, search.title)
    return f"{search.title}: {compared}"  # HEE and uniform sampling; others exist only once


def _measured(one: Verdict | None) -> str:
    if one is None or one.word == NOT_RUN:
        return NONE
    value, interval, *_ = number_cells(one)
    return f"{value.split()[0]} ({interval}), {one.word}"


def _printed(pair: Pair, stream: str, backbone: str) -> str:
    tables = ("sampling",) if any(pair.variants) else ("full", "clip")
    numbers = [
        number.value
        for method, variant in zip(pair[:2], pair.variants, strict=True)
        for name in tables
        if (number := printed()[name].get(Cell(stream, backbone, method, pair.measure, variant)))
    ]
    if len(numbers) < 2:
        return NONE
    text = f"{numbers[0] - numbers[1]:+.1f}"
    return "0.0" if text == "-0.0" else text.replace("-", "−")
