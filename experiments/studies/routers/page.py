"""The study of routers as Markdown."""

from collections.abc import Mapping
from typing import Any

from cheem_jax.report.table import METHODS, NONE, Grid

NAMES = ("cheem", "lora_cl", "s_prompts")
"""Methods with a network per task behind a router."""
READS = {
    "last": "last class token",
    "early": "mean patch tokens at a quarter and at half of the depth",
    "levels": "mean patch tokens at each quarter, last class token",
}


def page_of(found: Mapping[str, Any]) -> str:
    """A page of its own."""
    title = f"# Routers: {len(found['tasks'])} tasks, {found['backbone']}, {found['image_size']} pixels"
    return f"{title}\n\n{sections_of(found)}\n"


def sections_of(found: Mapping[str, Any]) -> str:
    """All tables, without a heading of the first level."""
    return "\n\n".join([compared_grid(found), _by_task(found), _all(found)])


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def told_gain(gain: Mapping[str, Any]) -> str:
    """Points with their interval; zero has no sign."""
    numbers = [f"{100 * gain[name]:+.1f}" for name in ("value", "low", "high")]
    numbers = [number if number.strip("+-0.") else "0.0" for number in numbers]
    return "{} ({} to {})".format(*(number.replace("-", "−") for number in numbers))


def _bytes(value: float) -> str:
    return f"{value / 1e3:,.0f}" if value >= 1e4 else f"{value / 1e3:.1f}"


def shown_rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The paper's router, the chosen one, and of every kind the one that is best on validation images."""
    best: dict[str, Mapping[str, Any]] = {}
    for row in found["rows"]:
        kind = row["config"]["kind"]
        best[kind] = max(best.get(kind, row), row, key=lambda one: one["validation"])
    wanted = [found["rows"][0]["config"], found["chosen"]["config"], *(row["config"] for row in best.values())]
    return [row for row in found["rows"] if row["config"] in wanted]


def compared_grid(found: Mapping[str, Any]) -> str:
    """The routers worth knowing, with what the columns mean."""
    methods = [method for method in NAMES if any(method in row for row in found["rows"])]
    head = ["reads", "router", "validation %", "task ID right %"]
    for method in methods:
        head += [f"{METHODS[method]} %", f"{METHODS[method]}, gain"]
    head += ["MFLOPs, paper", "MFLOPs, executed", "kB a task", "µs an image"]
    rows, first = [], found["rows"][0]
    for row in shown_rows(found):
        cells = [row["features"], _title(row, found), _percent(row["validation"]), _percent(row["found"]["test"])]
        for method in methods:
            gain = NONE if row is first else told_gain(row[method]["gain"])
            cells += [_percent(row[method]["accuracy"]), gain]
        flops = [f"{row['flops'][name] / 1e6:.0f}" for name in ("paper", "executed")]
        rows.append((*cells, *flops, _bytes(row["bytes_per_task"]), f"{row['microseconds_per_image']:.0f}"))
    counts = ", ".join(
        f"{METHODS[method]} {sum(run['method'] == method for run in found['runs'])}" for method in methods
    )
    reads = "; ".join(f"*{name}*: {told}" for name, told in READS.items())
    same, others, seeds = found["same_as_run"], found.get("same_answers", []), found["validated"]
    validated = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))
    again = f"infers the run's own task for {100 * min(same):.2f} % of the images ({len(same)} with networks at hand)"
    if others:
        again += f" and gives at least {100 * min(others):.2f} % of the answers ({len(others)} collected)"
    return f"""The same checkpoints, evaluated again with different routers: {counts} runs. A router reads what the pass
over the frozen backbone computes anyway: {reads}; with *early* the pass ends at half of the depth. *Validation*:
CHEEM's accuracy on validation images with {validated}. Of the routers within {100 * found["near_best"]:g} points of the
best there, the one in bold keeps the fewest bytes and was chosen. CHEEM's architectures were chosen on these images
too, so other columns, on test images, are lower. *Gain*: over the paper's router (first row), 95 % interval as above.
*Task ID right*: share of images whose task is inferred rightly. FLOPs include the router's pass. The paper's router,
computed again, {again}; last bits and seeds of k-means explain the rest. Times are of one process on a shared machine.
Shown of {len(found["rows"])}: the paper's router, the chosen one, the best of each kind on validation images.

{Grid("", tuple(head), tuple(rows), 2).to_markdown()}"""


def _title(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"**{row['title']}**" if row["config"] == found["chosen"]["config"] else row["title"]


def _all(found: Mapping[str, Any]) -> str:
    head = ("reads", "router", "validation %", "task ID right %", "CHEEM %", "over the paper's", "kB a task")
    rows = tuple(
        (
            row["features"], _title(row, found), _percent(row["validation"]), _percent(row["found"]["test"]),
            _percent(row["cheem"]["accuracy"]),
            NONE if row is found["rows"][0] else f"{100 * row['cheem']['gain']['value']:+.1f}".replace("-", "−"),
            _bytes(row["bytes_per_task"]),
        )
        for row in found["rows"]
    )  # fmt: skip
    return f"All routers that were tried:\n\n{Grid('', head, rows, 2).to_markdown()}"


def _by_task(found: Mapping[str, Any]) -> str:
    columns = {
        "paper_found": "task ID right, paper's router %", "chosen_found": "task ID right, chosen %",
        "paper": "accuracy, paper's router %", "chosen": "accuracy, chosen %", "given": "task ID given %",
    }  # fmt: skip
    means = {key: sum(row[key] for row in found["by_task"]) / len(found["by_task"]) for key in columns}
    tasks = (*found["by_task"], {"task": "mean", **means})
    rows = tuple((row["task"], *(_percent(row[key]) for key in columns)) for row in tasks)
    gap = means["given"] - means["paper"]
    share = (means["chosen"] - means["paper"]) / gap if gap > 0 else float("nan")
    chosen = found["chosen"]
    return f"""CHEEM by task. Of the {100 * gap:.1f} points that the paper's router loses, the chosen one
({chosen["features"]}, {chosen["title"]}) recovers {100 * share:.0f} %.

{Grid("", ("task", *columns.values()), rows, 1).to_markdown()}"""
