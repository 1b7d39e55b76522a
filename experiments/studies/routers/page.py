"""Tables of the study of routers."""

from collections.abc import Mapping, Sequence
from typing import Any

from cheem_jax.report.table import NONE, Grid

Numbers = Mapping[str, Any]


def shown_grid(study: Numbers) -> Grid:
    """Make the table of the paper's router, the chosen router, and the best router of each kind on
    validation images."""
    best: dict[str, Numbers] = {}
    for row in study["rows"]:
        kind = row["config"]["kind"]
        best[kind] = max(best.get(kind, row), row, key=lambda one: one["found"]["val"])
    configs = [row["config"] for row in (study["rows"][0], study["chosen"], *best.values())]
    return grid_of(study, [row for row in study["rows"] if row["config"] in configs])


def grid_of(study: Numbers, rows: Sequence[Numbers]) -> Grid:
    """Make a row per router; the first row is the paper's router, and the chosen router is bold."""
    columns = (
        "reads",
        "router",
        "task ID right, validation %",
        "test %",
        *(f"{title} %" for title in study["runs"]),
        "MFLOPs, paper",
        "MFLOPs, executed",
        "kB a task",
        "µs an image",
    )
    return Grid("", columns, tuple(_cells(row, study) for row in rows), 2)


def compare_streams(studies: Sequence[Numbers]) -> Grid:
    """Make a row per router, with the accuracy of task-ID inference on the test images of each
    study; LDA has its default shrinkage."""
    rows = [study["rows"] for study in studies]
    names = [
        f"{study['backbone']}, {study['image_size']} pixels, {what}"
        for study in studies
        for what in ("%", "kB per task")
    ]
    cells = tuple(
        (
            each[0]["features"],
            each[0]["title"],
            *(
                cell
                for row in each
                for cell in (
                    f"{100 * row['found']['test']:.1f}",
                    f"{row['bytes_per_task'] / 1e3:,.0f}",
                )
            ),
        )
        for each in zip(*rows, strict=True)
        if each[0]["config"]["kind"] == "kmeans" or each[0]["config"]["shrinkage"] == 0.01
    )
    return Grid("", ("reads", "router", *names), cells, 2)


def _cells(row: Numbers, study: Numbers) -> tuple[str, ...]:
    is_chosen = row["config"] == study["chosen"]["config"]
    is_paper = row["config"] == study["rows"][0]["config"]
    size = row["bytes_per_task"] / 1e3
    flops = row["flops"] or {}
    return (
        row["features"],
        f"**{row['title']}**" if is_chosen else row["title"],
        *(f"{100 * row['found'][split]:.1f}" for split in ("val", "test")),
        *(
            f"{100 * one['accuracy']:.1f}" + ("" if is_paper else f", {gain_text(one['gain'])}")
            for one in row["methods"].values()
        ),
        *(f"{flops[name] / 1e6:.0f}" if flops else NONE for name in ("paper", "executed")),
        f"{size:,.0f}" if size >= 10 else f"{size:.1f}",
        f"{row['microseconds_per_image']:.0f}",
    )


def gain_text(gain: Numbers) -> str:
    """Format a difference in points and its interval; zero has no sign."""
    numbers = [f"{100 * gain[name]:+.1f}" for name in ("value", "low", "high")]
    numbers = [number if number.strip("+-0.") else "0.0" for number in numbers]
    return "{} ({} to {})".format(*(number.replace("-", "−") for number in numbers))
