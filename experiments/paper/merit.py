"""CHEEM's figure of merit over other methods, with the FLOPs of the paper's convention and with those that run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cheem_jax.metrics import figure_of_merit
from cheem_jax.report.table import NONE, TOLD, Grid, number

FLOPS = {"paper": "paper's FLOPs", "executed": "executed"}


class Side(NamedTuple):
    """Average accuracy, and FLOPs per image by both counts."""

    accuracy: float
    flops: Mapping[str, float]


def merit_section(
    titles: Mapping[str, str], measured: Mapping[str, Mapping[str, Any]], routers: Any | None,
    searched: Mapping[str, Mapping[str, Any]], added: Mapping[str, float],
) -> str:  # fmt: skip
    """As Markdown: a row per method, by names with their `titles` and rows of `comparison`; `routers` is the study of
    routers where it was made, `searched` rows of CHEEM with other searches by their titles. What the chosen router adds
    to the FLOPs of methods with a network per task is `added`."""
    if not has_merit(measured):
        return "It needs runs of CHEEM and of full fine-tuning, the bound."
    upper = measured["full_finetune"]["local_average_accuracy"]["mean"]
    sides = {name: side_of(row) for name, row in measured.items() if name not in TOLD}
    own = {"CHEEM": sides["cheem"], **{title: side_of(row) for title, row in searched.items()}}
    others = {titles[name]: side for name, side in sides.items() if name != "cheem"}
    if routers is not None:
        chosen = routers["chosen"]
        name, flops = f"{chosen['features']} {chosen['title']}", {name: chosen["flops"][name] for name in FLOPS}
        own[f"CHEEM, {name}"] = Side(chosen["cheem"]["accuracy"], flops)
        for method in (method for method in sides if added and method != "cheem" and method in chosen):
            flops = {count: value + added[count] for count, value in sides[method].flops.items()}
            others[f"{titles[method]}, {name}"] = Side(chosen[method]["accuracy"], flops)
    rows = []
    for title, other in {**own, **others}.items():
        cells = [title, f"{100 * (upper - other.accuracy):.1f}"]
        for side in own.values():
            found = [merit(upper, side, other, count) for count in FLOPS]
            cells += [NONE if value is None or side == other else number(value, 2) for value in found]
        rows.append(tuple(cells))
    columns = ("over", "its gap, points", *(f"{title}, {count}" for title in own for count in FLOPS.values()))
    return f"""How many times better CHEEM is, by the paper's figure of merit: the other's gap to full fine-tuning over
CHEEM's, times its FLOPs over CHEEM's. Above 1 CHEEM, as its column has it, is the better one, below 1 the row is. Full
fine-tuning, told the task, reaches {100 * upper:.1f} %. Where a gap is not above 0 there is no such figure. Columns of
the chosen router are fair against rows with that router alone: the other rows keep the paper's, or name no task.

{Grid("", columns, tuple(rows), 1).to_markdown()}"""


def ahead_line(titles: Mapping[str, str], measured: Mapping[str, Mapping[str, Any]], routers: Any | None) -> str:
    """Methods as they are that the figure of merit has ahead of CHEEM, as one more line."""
    if not has_merit(measured):
        return ""
    upper = measured["full_finetune"]["local_average_accuracy"]["mean"]
    sides = {name: side_of(row) for name, row in measured.items() if name not in TOLD}
    own = {"CHEEM with the paper's router": sides.pop("cheem")}
    if routers is not None:
        chosen = routers["chosen"]
        own["CHEEM with the chosen router"] = Side(chosen["cheem"]["accuracy"], chosen["flops"])
    told = []
    for title, side in own.items():
        found = {titles[name]: merit(upper, side, other, "paper") for name, other in sides.items()}
        better = [f"{name} ({value:.2f})" for name, value in found.items() if value is not None and value < 1]
        told.append(f"{title}: {', '.join(better) or 'none'}")
    return f"\n- Ahead by the paper's figure of merit (below 1: the other is better) of {'; of '.join(told)}."


def has_merit(measured: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether both sides were run."""
    return "full_finetune" in measured and "cheem" in measured


def side_of(row: Mapping[str, Any]) -> Side:
    """Means over a method's runs."""
    return Side(row["average_accuracy"]["mean"], {count: row[f"flops_{count}"]["mean"] for count in FLOPS})


def merit(upper: float, own: Side, other: Side, count: str) -> float | None:
    """See `figure_of_merit`."""
    return figure_of_merit(upper, own.accuracy, own.flops[count], other.accuracy, other.flops[count])
