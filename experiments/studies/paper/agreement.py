"""The differences that the paper prints, next to those of collected runs."""

from collections.abc import Mapping
from typing import NamedTuple

from cheem_jax.report.table import METHODS, NONE, Grid
from studies.paper.claims import (
    CHEEM,
    NOT_RUN,
    Verdict,
    Verdicts,
    compare,
    number_cells,
    rival,
    searches,
)
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
        f"CHEEM − {METHODS[method]}": Pair("cheem", method)
        for method in ("tuna", "moal", "diki", "ewc")
    },
    **{
        f"S-Prompts − {METHODS[method]}": Pair("s_prompts", method)
        for method in ("l2p", "dualprompt", "coda_prompt")
    },
}
"""Printed differences, keyed by the comparison in the table of claims."""


def agreement_grid(streams: Mapping[str, tuple[Cells, Verdicts]]) -> Grid:
    """Make a row for each difference that the paper prints, with a column for each of its streams
    and backbones and for each search in `streams`: runs and the verdicts on them, keyed by a title
    such as the image size.

    Our cells have the difference, its 95 % interval, and the verdict if it is one of the claims.
    """
    columns = {"compared": list(PAIRS)}
    for title, (stream, backbone) in STREAMS.items():
        columns[title] = [_printed(pair, stream, backbone) for pair in PAIRS.values()]
    for place, (cells, checked) in streams.items():
        verdicts: dict[str, Verdict] = {}
        for rows in checked.values():
            for one in rows:
                # the paper's claim precedes the same comparison with a margin
                verdicts.setdefault(one.compared, one)
        for search in searches(cells):
            columns[f"{search.title}, {place}"] = [
                _measured(compared, pair, search, cells, verdicts)
                for compared, pair in PAIRS.items()
            ]
    return Grid("", tuple(columns), tuple(zip(*columns.values(), strict=True)), 1)


def _measured(
    compared: str, pair: Pair, search: Runs, cells: Cells, verdicts: Mapping[str, Verdict]
) -> str:
    title = compared
    theirs = rival(search, pair.theirs)
    if search != CHEEM:  # the table of claims has comparisons without CHEEM only once
        title = compared.replace(CHEEM.title, search.title)
        title = title.replace(Runs(pair.theirs).title, theirs.title)
        title = title if title != compared else f"{search.title}: {compared}"
    one = verdicts.get(title)
    if one is None and pair.ours == CHEEM.method and not any(pair.variants):
        one = compare(title, cells, search, theirs)
        one = one._replace(word=one.word if one.word == NOT_RUN else "")
    if one is None or one.word == NOT_RUN:
        return NONE
    value, interval, *_ = number_cells(one)
    return f"{value.split()[0]} ({interval})" + (one.word and f", {one.word}")


def _printed(pair: Pair, stream: str, backbone: str) -> str:
    tables = ("sampling",) if any(pair.variants) else ("full", "clip", "breakdown")
    sides = [
        Cell(stream, backbone, method, pair.measure, variant)
        for method, variant in zip(pair[:2], pair.variants, strict=True)
    ]
    for table in (printed()[name] for name in tables):
        if all(side in table for side in sides):
            text = f"{table[sides[0]].value - table[sides[1]].value:+.1f}"
            return "0.0" if text == "-0.0" else text.replace("-", "−")
    return NONE
