"""Floating-point operations per image, counted from shapes (2 x multiply-adds).

The paper's convention counts patch embedding and linear layers of the backbone, not the attention products and no head
(33.695 G for ViT-B/16 and 2.149 G for DeiT-Tiny at 224). `executed` counts every matrix product that ran.
"""

from cheem_jax.architecture import Architecture
from cheem_jax.backbone.config import ViTConfig
from cheem_jax.ops import Placement


def backbone_flops(config: ViTConfig, *, count_attention: bool = False) -> int:
    """The plain backbone without head."""
    tokens, width = config.num_tokens, config.width
    embed = config.num_patches * 3 * config.patch_size**2 * width
    linear = tokens * (4 * width * width + 2 * width * config.mlp_width)
    attention = 2 * tokens * tokens * width if count_attention else 0
    return 2 * (embed + config.depth * (linear + attention))


def branch_flops(config: ViTConfig, placement: Placement, *, count_attention: bool = False) -> int:
    """What one Skip saves: an FFN (`mlp_down`) or an attention branch (`attn_proj`)."""
    tokens, width = config.num_tokens, config.width
    if placement == "mlp_down":
        return 2 * tokens * 2 * width * config.mlp_width
    return 2 * (tokens * 4 * width * width + (2 * tokens * tokens * width if count_attention else 0))


def pair_flops(config: ViTConfig, placement: Placement, rank: int) -> int:
    """One un-merged low-rank pair: 2 N r (in + out)."""
    num_inputs = config.mlp_width if placement == "mlp_down" else config.width
    return 2 * config.num_tokens * rank * (num_inputs + config.width)


def network_flops(config: ViTConfig, placement: Placement, architecture: Architecture, rank: int) -> int:
    """A task network by the paper's convention: skipped branches saved, this task's own Adapt pairs added."""
    kinds = [choice.kind for choice in architecture]
    saved = kinds.count("skip") * branch_flops(config, placement)
    return backbone_flops(config) - saved + kinds.count("adapt") * pair_flops(config, placement, rank)


def executed_flops(config: ViTConfig, placement: Placement, architecture: Architecture, num_classes: int) -> int:
    """A task network as it runs at inference: pairs merged, attention products and head counted."""
    skips = sum(choice.kind == "skip" for choice in architecture)
    saved = skips * branch_flops(config, placement, count_attention=True)
    return backbone_flops(config, count_attention=True) - saved + 2 * config.width * num_classes


def backbone_params(config: ViTConfig) -> int:
    """Parameters of the backbone without head, the base of the paper's %Param."""
    width = config.width
    per_block = 4 * width * width + 4 * width + 2 * width * config.mlp_width + config.mlp_width + width + 4 * width
    embed = 3 * config.patch_size**2 * width + (width if config.patch_bias else 0)
    norms = (2 if config.norm_before_blocks else 1) * 2 * width
    return embed + width + config.num_tokens * width + config.depth * per_block + norms
