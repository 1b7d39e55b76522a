"""The study of routers as Markdown."""

from collections.abc import Mapping
from typing import Any

from cheem_jax.report.table import NONE, Grid

READS = {
    "last": "last class token",
    "early": "mean patch tokens at a quarter and at half of the depth",
    "levels": "mean patch tokens at each quarter, last class token",
}


def page_of(found: Mapping[str, Any]) -> str:
    """A page of its own, with all routers."""
    title = (
        f"# Routers: {len(found['tasks'])} tasks, {found['backbone']}, {found['image_size']} pixels"
    )
    runs = ", ".join(f"{title} {len(seeds)}" for title, seeds in found["runs"].items())
    everything = grid_of(found, found["rows"]).to_markdown()
    return (
        f"{title}\n\nRuns: {runs}.\n\n{compared_grid(found)}\n\nAll routers that were"
        f" tried:\n\n{everything}\n"
    )


def compared_grid(found: Mapping[str, Any]) -> str:
    """The routers worth knowing, with what the columns mean."""
    reads = "; ".join(f"*{name}*: {told}" for name, told in READS.items())
    near = 100 * found["near_best"]
    same = 100 * found["same_answers"]
    num = len(found["rows"])
    return f"""The same checkpoints, evaluated again with different routers. A router reads what the pass over the
frozen backbone computes anyway: {reads}; with *early* the pass ends at half of the depth. *Task ID right*: share of
images whose task is inferred rightly. Of the routers within {near:g} point of the best on validation images, the one
in bold keeps the fewest bytes and was chosen. Accuracy is that on test images, with the gain over the paper's router
(first row) and its 95 % interval as above. FLOPs are those of {next(iter(found["runs"]))} with the router's pass. The
paper's router, computed again, gives at least {same:.2f} % of a run's answers; rounding and seeds of k-means explain
the rest. Times are of one process. Shown of {num}: the paper's router, the chosen one, the best of each kind on
validation images.

{grid_of(found, shown_rows(found)).to_markdown()}"""  # noqa: E501


def grid_of(found: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> Grid:
    """A row per router."""
    head = (
        "reads",
        "router",
        "task ID right, validation %",
        "test %",
        *(f"{title} %" for title in found["runs"]),
    )
    head += ("MFLOPs, paper", "MFLOPs, executed", "kB a task", "µs an image")
    return Grid("", head, tuple(_row(row, found) for row in rows), 2)


def _row(row: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    is_chosen, is_first = (
        row["config"] == other["config"] for other in (found["chosen"], found["rows"][0])
    )
    cells = [row["features"], f"**{row['title']}**" if is_chosen else row["title"]]
    cells += [f"{100 * row['found'][split]:.1f}" for split in ("val", "test")]
    for own in row["methods"].values():
        cells.append(
            f"{100 * own['accuracy']:.1f}" + ("" if is_first else f", {told_gain(own['gain'])}")
        )
    flops = row["flops"]
    cells += [
        NONE if flops is None else f"{flops[name] / 1e6:.0f}" for name in ("paper", "executed")
    ]
    size = row["bytes_per_task"] / 1e3
    return (
        *cells,
        f"{size:,.0f}" if size >= 10 else f"{size:.1f}",
        f"{row['microseconds_per_image']:.0f}",
    )


def told_gain(gain: Mapping[str, Any]) -> str:
    """Points with their interval; zero has no sign."""
    numbers = [f"{100 * gain[name]:+.1f}" for name in ("value", "low", "high")]
    numbers = [number if number.strip("+-0.") else "0.0" for number in numbers]
    return "{} ({} to {})".format(*(number.replace("-", "−") for number in numbers))


def shown_rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The paper's router, the chosen one, and of every kind the one that is best on validation
    images."""
    best: dict[str, Mapping[str, Any]] = {}
    for row in found["rows"]:
        kind = row["config"]["kind"]
        best[kind] = max(best.get(kind, row), row, key=lambda one: one["found"]["val"])
    wanted = [
        found["rows"][0]["config"],
        found["chosen"]["config"],
        *(row["config"] for row in best.values()),
    ]
    return [row for row in found["rows"] if row["config"] in wanted]
