"""Count FLOPs per image from shapes (2 x multiply-adds).

By the paper's convention, FLOPs include the patch embedding and the linear layers of the backbone,
but neither attention products nor the head: 33.695 G for ViT-B/16 and 2.149 G for DeiT-Tiny at 224
pixels. Functions with `executed` in their names count all matrix products that are executed.
"""

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.core.architecture import Architecture
from cheem_jax.core.settings import Placement


def backbone_flops(config: ViTConfig, *, count_attention: bool = False) -> int:
    """Count the FLOPs of the plain backbone without its head."""
    return pass_flops(config, "mlp_down", config.depth, count_attention=count_attention)


def pass_flops(
    config: ViTConfig, placement: Placement, until: int, *, count_attention: bool = False
) -> int:
    """Count the FLOPs of the plain backbone up to the tokens that all candidate ops of block
    `until` share (the result of `Block.enter`). If `until` is the depth, count the whole
    backbone."""
    attention = branch_flops(config, "attn_proj", count_attention=count_attention)
    block = attention + branch_flops(config, "mlp_down")
    shared = attention if placement == "mlp_down" and until < config.depth else 0
    pooled = pool_flops(config, count_attention=count_attention) if until == config.depth else 0
    return embed_flops(config) + until * block + shared + pooled


def embed_flops(config: ViTConfig) -> int:
    """Count the FLOPs of the patch embedding."""
    return 2 * config.num_patches * 3 * config.patch_size**2 * config.width


def branch_flops(config: ViTConfig, placement: Placement, *, count_attention: bool = False) -> int:
    """Count the FLOPs of one residual branch, which Skip omits: the FFN for `mlp_down`, the
    attention branch for `attn_proj`."""
    tokens, width = config.num_tokens, config.width
    if placement == "mlp_down":
        return 2 * tokens * config.mlp_weights
    return 2 * (
        tokens * 4 * width * width + (2 * tokens * tokens * width if count_attention else 0)
    )


def pair_flops(config: ViTConfig, placement: Placement, rank: int) -> int:
    """Count the FLOPs of one low-rank pair that is not merged: 2 N r (inputs + outputs) for N
    tokens and rank r."""
    num_inputs = config.mlp_width if placement == "mlp_down" else config.width
    return 2 * config.num_tokens * rank * (num_inputs + config.width)


def token_flops(config: ViTConfig, num_tokens: int) -> int:
    """Count the FLOPs that `num_tokens` additional tokens, such as the prompts of S-Prompts, add to
    the linear layers of all blocks."""
    return 2 * num_tokens * config.depth * (4 * config.width**2 + config.mlp_weights)


def prefix_flops(config: ViTConfig, num_pairs: int, num_layers: int) -> int:
    """Count the FLOPs of attention from all tokens to `num_pairs` prefix keys and values in
    `num_layers` layers.

    The paper's counter omits these products if a method computes attention with a fused kernel, and
    counts them if a method computes attention explicitly.
    """
    return 4 * config.num_tokens * num_pairs * config.width * num_layers


def adapter_flops(config: ViTConfig, bottleneck: int) -> int:
    """Count the FLOPs of bottleneck adapters parallel to every FFN (TUNA, MoAL, RanPAC, EASE,
    MoE-Adapters)."""
    return 2 * config.num_tokens * config.depth * 2 * config.width * bottleneck


def network_flops(
    config: ViTConfig, placement: Placement, architecture: Architecture, rank: int
) -> int:
    """Count the FLOPs of a task's network by the paper's convention: the backbone, without skipped
    branches, plus the task's Adapt pairs."""
    kinds = [choice.kind for choice in architecture]
    saved = kinds.count("skip") * branch_flops(config, placement)
    return (
        backbone_flops(config) - saved + kinds.count("adapt") * pair_flops(config, placement, rank)
    )


def executed_flops(
    config: ViTConfig,
    placement: Placement,
    architecture: Architecture,
    num_classes: int = 0,
    *,
    begin: int | None = None,
) -> int:
    """Count the executed FLOPs of a task's network at inference. Low-rank pairs are merged;
    attention products and the head are included.

    If there is a CLS token, the last block computes only this token. If `begin` is a block, the
    network resumes from the tokens of the base network that all candidate ops of block `begin`
    share; if `begin` is the depth, only the head is executed. If `begin` is None, the network
    starts from the image.
    """
    head = 2 * config.width * num_classes
    if begin == config.depth:
        return head
    blocks = range(begin or 0, config.depth)
    halves = {block: executed_halves(config, last=block == config.depth - 1) for block in blocks}
    if begin is None:
        total = embed_flops(config)
    else:
        total = -halves[begin][0] if placement == "mlp_down" else 0
    for block in blocks:
        attention, mlp = halves[block]
        skipped = architecture[block].kind == "skip"
        total += 0 if skipped and placement == "attn_proj" else attention
        total += 0 if skipped and placement == "mlp_down" else mlp
    return total + pool_flops(config) + head


def executed_pass_flops(config: ViTConfig, placement: Placement, until: int) -> int:
    """Count the executed FLOPs of the plain backbone up to the tokens that all candidate ops of
    block `until` share (the result of `Block.enter`). If `until` is the depth, count the whole
    backbone."""
    if until == config.depth:
        return executed_backbone_flops(config)
    *before, (attention, _) = (
        executed_halves(config, last=i == config.depth - 1) for i in range(until + 1)
    )
    return (
        embed_flops(config) + sum(map(sum, before)) + (attention if placement == "mlp_down" else 0)
    )


def executed_backbone_flops(config: ViTConfig, num_extra: int = 0) -> int:
    """Count the executed FLOPs of the plain backbone without its head, with `num_extra` additional
    tokens in each block."""
    blocks = range(config.depth)
    halves = (
        executed_halves(config, last=block == config.depth - 1, num_extra=num_extra)
        for block in blocks
    )
    return embed_flops(config) + sum(map(sum, halves)) + pool_flops(config)


def pool_flops(config: ViTConfig, *, count_attention: bool = True) -> int:
    """Count the FLOPs of attention pooling: the key and value projections of all tokens, the
    attention of one query, the query and output projections, and the MLP. Without attention
    pooling, the result is 0."""
    if config.pool != "attention":
        return 0
    tokens, width = config.num_tokens, config.width
    attended = 2 * tokens * width if count_attention else 0
    return 2 * ((2 * tokens + 2) * width * width + attended + 2 * width * config.mlp_width)


def executed_halves(config: ViTConfig, *, last: bool, num_extra: int = 0) -> tuple[int, int]:
    """Count the executed FLOPs of the attention half and of the FFN half of a block. If `last`, the
    block computes only the tokens that are used for the features."""
    tokens = config.num_tokens + num_extra
    width = config.width
    outputs = 1 if last and config.pool == "class" else tokens
    attention = 2 * (outputs + tokens) * width * width + 2 * outputs * tokens * width
    return 2 * attention, 2 * outputs * config.mlp_weights


def backbone_params(config: ViTConfig) -> int:
    """Count the parameters of the backbone without its head; the paper's %Param is relative to this
    number."""
    width = config.width
    mlp = config.mlp_weights + config.mlp_width * (2 if config.gated else 1) + width
    per_block = 4 * width * width + 4 * width + mlp + 4 * width
    embed = 3 * config.patch_size**2 * width + (width if config.patch_bias else 0)
    norms = (2 if config.norm_before_blocks else 1) * 2 * width
    positions = config.num_tokens if config.rotary is None else 0
    pool = (
        per_block - width if config.pool == "attention" else 0
    )  # the parameters of a block, plus a learned query (width), minus a LayerNorm (2 * width)
    return embed + (config.num_prefix + positions) * width + config.depth * per_block + norms + pool
