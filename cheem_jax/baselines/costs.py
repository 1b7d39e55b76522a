"""Costs in a task's report: numbers of parameters, and FLOPs per image (2 x multiply-adds) by three counts."""

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import backbone_flops, backbone_params, executed_backbone_flops


def params_report(config: ViTConfig, *, added: int, learned: int, stored: int) -> dict[str, float]:
    """A task's numbers of parameters: those it trains, those it stores, and the added ones in percent of the backbone.

    The paper's %Param counts what a task adds to the backbone; heads and router are not among it.
    """
    return {
        "params_added_percent": 100 * added / backbone_params(config),
        "params_learned": learned,
        "params_stored": stored,
    }


def plain_flops(config: ViTConfig, num_classes: int) -> dict[str, int]:
    """FLOPs per image of one plain pass: by the paper's counter, with attention products, and as executed with a head.

    The paper's counter does not see fused attention: ViT-B costs 33.7 GFLOPs by it, 35.1 with attention products.
    """
    return {
        "flops_method": backbone_flops(config),
        "flops_explicit": backbone_flops(config, count_attention=True),
        "flops_executed": executed_backbone_flops(config) + 2 * config.width * num_classes,
    }
