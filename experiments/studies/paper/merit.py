"""CHEEM's figure of merit over other methods, with the FLOPs of the paper's convention and with those that run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cheem_jax.backbone.config import CONFIGS, ViTConfig, at_image_size
from cheem_jax.backbone.flops import executed_flops, executed_pass_flops, pass_flops
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.metrics import figure_of_merit
from cheem_jax.core.ops import Placement
from cheem_jax.core.routing import RouterConfig
from cheem_jax.report.table import NONE, UPPER_BOUNDS, Grid, number

FLOPS = {"paper": "paper's FLOPs", "executed": "executed"}


class Side(NamedTuple):
    """Average accuracy, and FLOPs per image by both counts."""

    accuracy: float
    flops: Mapping[str, float]
    is_one_seed: bool = False


class Sides(NamedTuple):
    """Full fine-tuning's accuracy, CHEEM's ways, and other methods as they are and with the chosen router, by title."""

    upper: float
    cheem: dict[str, Side]
    others: dict[str, Side]
    rerouted: dict[str, Side]


def merit_section(sides: Sides | None, searched: Mapping[str, Mapping[str, Any]]) -> str:
    """As Markdown, a row per method; `searched` are rows of CHEEM with other searches by their titles."""
    if sides is None:
        return "It needs runs of CHEEM and of full fine-tuning, the reference."
    first, *more = sides.cheem.items()
    own = dict([first, *((title, side_of(row)) for title, row in searched.items()), *more])
    rows = []
    for title, other in {**own, **sides.others, **sides.rerouted}.items():
        cells = [title, f"{100 * (sides.upper - other.accuracy):.1f}"]
        for side in own.values():
            found = [merit(sides.upper, side, other, count) for count in FLOPS]
            cells += [NONE if value is None or side == other else number(value, 2) for value in found]
        rows.append(tuple(cells))
    columns = ("over", "its gap, points", *(f"{title}, {count}" for title in own for count in FLOPS.values()))
    return f"""The paper's figure of merit: the row's gap to full fine-tuning (task ID given: {100 * sides.upper:.1f} %)
over that of the column's CHEEM, times the ratio of their FLOPs. Above 1 the column is better, below 1 the row;
undefined where a gap is not above 0. Columns of the chosen router compare fairly with its rows and with methods that
have no router.

{Grid("", columns, tuple(rows), 1).to_markdown()}"""


def ahead_line(sides: Sides | None) -> str:
    """Whom the figure of merit has ahead of CHEEM, as one more line."""
    if sides is None:
        return ""
    told = []
    for title, side in sides.cheem.items():
        better = []
        # the paper's router is compared with methods as they are
        for name, other in (sides.others | (sides.rerouted if told else {})).items():
            value, seed = merit(sides.upper, side, other, "paper"), ", one seed" if other.is_one_seed else ""
            if value is not None and value < 1:
                better.append(f"{name} ({value:.2f}{seed})")
            elif value is None and other.accuracy >= sides.upper > side.accuracy:
                better.append(f"{name} (not below the reference{seed})")
        named = title if told else f"{title} with the paper's router"
        told.append(f"{named}: {', '.join(better) or 'none'}")
    return f"\n- Better by the paper's figure of merit (below 1) than {'; than '.join(told)}."


def sides_of(
    titles: Mapping[str, str],
    measured: Mapping[str, Mapping[str, Any]],
    routers: Mapping[str, Any] | None,
    added: Mapping[str, float],
) -> Sides | None:
    """All that are compared, from `titles` and rows of `comparison` by method; None without CHEEM or the bound.

    `routers` is the study of routers where it was made; its choice adds `added` to the FLOPs of other methods.
    """
    if "full_finetune" not in measured or "cheem" not in measured:
        return None
    upper = measured["full_finetune"]["local_average_accuracy"]["mean"]
    sides = {name: side_of(row) for name, row in measured.items() if name not in UPPER_BOUNDS}
    cheem, rerouted = {"CHEEM": sides.pop("cheem")}, {}
    if routers is not None:
        chosen = routers["chosen"]
        name = f"{chosen['features']} {chosen['title']}"
        cheem[f"CHEEM, {name}"] = Side(chosen["cheem"]["accuracy"], {count: chosen["flops"][count] for count in FLOPS})
        for method in (method for method in sides if added and method in chosen):
            flops = {count: value + added[count] for count, value in sides[method].flops.items()}
            rerouted[f"{titles[method]}, {name}"] = Side(chosen[method]["accuracy"], flops)
    return Sides(upper, cheem, {titles[name]: side for name, side in sides.items()}, rerouted)


def side_of(row: Mapping[str, Any]) -> Side:
    """Means over a method's runs."""
    flops = {count: row[f"flops_{count}"]["mean"] for count in FLOPS}
    return Side(row["average_accuracy"]["mean"], flops, is_one_seed=len(row.get("seeds", ())) == 1)


def merit(upper: float, own: Side, other: Side, count: str) -> float | None:
    """See `figure_of_merit`."""
    return figure_of_merit(upper, own.accuracy, own.flops[count], other.accuracy, other.flops[count])


Results = Mapping[str, Any]


def cost_of_router(results: Results, router: RouterConfig) -> dict[str, float]:
    """What naming tasks so adds to the FLOPs per image of a run with the paper's router, by both counts.

    For networks that leave the backbone before the pass of this router ends, or share nothing with it.
    """
    vit = at_image_size(CONFIGS[results["backbone"]], results["image_size"])
    until, placement = router.until(vit.depth), results["placement"] or "mlp_down"
    counts = {"paper": pass_flops, "executed": executed_pass_flops}
    return {name: count(vit, placement, until) - count(vit, placement, vit.depth) for name, count in counts.items()}


def behind_pass(vit: ViTConfig, placement: Placement, task: Mapping[str, Any], until: int) -> int:
    """The router's pass up to a block, and a task's network from where it leaves what that pass has computed."""
    begin = next((index for index, expert in enumerate(task["experts"][:until]) if expert != 0), until)
    own = executed_flops(vit, placement, from_strings(task["architecture"]), len(task["classes"]), begin=begin)
    return executed_pass_flops(vit, placement, until) + own
