"""Executed FLOPs counted again from the networks that a record tells, so that runs of all versions compare.

Until the count let a task's network share the first block's attention with the router's pass, a run's own figure was up
to 4 % higher.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cheem_jax.architecture import from_strings
from cheem_jax.backbone.config import CONFIGS, ViTConfig, at_image_size
from cheem_jax.flops import executed_flops, executed_pass_flops, pass_flops
from cheem_jax.ops import Placement
from cheem_jax.report.table import TOLD
from cheem_jax.routing.config import RouterConfig

Results = Mapping[str, Any]


def recounted(results: Results, config: Mapping[str, Any]) -> Results:
    """Results of a run with these settings; as they are where networks are unknown or share nothing with the router."""
    vit, method = CONFIGS.get(results["backbone"]), results["method"]
    if vit is None or method in TOLD or results["router"] != results["backbone"]:
        return results
    if any(len(task.get("experts") or ()) != vit.depth for task in results["tasks"]):
        return results
    vit = at_image_size(vit, results["image_size"])
    until = RouterConfig(**config.get(method, {}).get("router", {})).until(vit.depth)
    own = [behind_pass(vit, results["placement"], task, until) for task in results["tasks"]]
    tasks = [{**task, "flops_executed": count} for task, count in zip(results["tasks"], own, strict=True)]
    return {**results, "tasks": tasks, "flops": {**results["flops"], "executed": float(np.mean(own))}}


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
