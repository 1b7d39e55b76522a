"""What a router adds to the executed FLOPs of a run, counted from the architectures in its results."""

from collections.abc import Mapping
from typing import Any

from cheem_jax.backbone.config import CONFIGS, ViTConfig, at_image_size
from cheem_jax.backbone.flops import executed_flops, executed_pass_flops, pass_flops
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Placement
from cheem_jax.core.routing.config import RouterConfig

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
