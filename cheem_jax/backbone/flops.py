"""Floating-point operations per image, counted from shapes (2 x multiply-adds).

The paper counts the patch embedding and the linear layers of the backbone, without attention
products and head (33.695 G for ViT-B/16 and 2.149 G for DeiT-Tiny at 224 pixels). Functions named
`executed` count every matrix product that runs.
"""

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.core.architecture import Architecture
from cheem_jax.core.settings import Placement


def backbone_flops(config: ViTConfig, *, count_attention: bool = False) -> int:
    """The plain backbone without head."""
    return pass_flops(config, "mlp_down", config.depth, count_attention=count_attention)


def pass_flops(
    config: ViTConfig, placement: Placement, until: int, *, count_attention: bool = False
) -> int:
    """The plain backbone up to the tokens shared by every choice at block `until`; L: the whole
    backbone."""
    attention = branch_flops(config, "attn_proj", count_attention=count_attention)
    block = attention + branch_flops(config, "mlp_down")
    shared = attention if placement == "mlp_down" and until < config.depth else 0
    pooled = pool_flops(config, count_attention=count_attention) if until == config.depth else 0
    return embed_flops(config) + until * block + shared + pooled


def embed_flops(config: ViTConfig) -> int:
    """Patches to tokens."""
    return 2 * config.num_patches * 3 * config.patch_size**2 * config.width


def branch_flops(config: ViTConfig, placement: Placement, *, count_attention: bool = False) -> int:
    """One branch, which Skip saves: an FFN (`mlp_down`) or an attention branch (`attn_proj`)."""
    tokens, width = config.num_tokens, config.width
    if placement == "mlp_down":
        return 2 * tokens * config.mlp_weights
    return 2 * (
        tokens * 4 * width * width + (2 * tokens * tokens * width if count_attention else 0)
    )


def pair_flops(config: ViTConfig, placement: Placement, rank: int) -> int:
    """One un-merged low-rank pair: 2 N r (in + out)."""
    num_inputs = config.mlp_width if placement == "mlp_down" else config.width
    return 2 * config.num_tokens * rank * (num_inputs + config.width)


def token_flops(config: ViTConfig, num_tokens: int) -> int:
    """Extra tokens through all linear layers (S-Prompts)."""
    return 2 * num_tokens * config.depth * (4 * config.width**2 + config.mlp_weights)


def prefix_flops(config: ViTConfig, num_pairs: int, num_layers: int) -> int:
    """Prefix keys and values in so many layers, to which all tokens attend.

    These are attention products, which the paper counts only in methods that compute attention
    explicitly.
    """
    return 4 * config.num_tokens * num_pairs * config.width * num_layers


def adapter_flops(config: ViTConfig, bottleneck: int) -> int:
    """Bottleneck adapters parallel to every FFN (TUNA, MoAL, MoE-Adapters)."""
    return 2 * config.num_tokens * config.depth * 2 * config.width * bottleneck


def network_flops(
    config: ViTConfig, placement: Placement, architecture: Architecture, rank: int
) -> int:
    """A task network by the paper's convention: minus skipped branches, plus the Adapt pairs of
    this task."""
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
    """Operations of a task network at inference: pairs merged, attention products and head counted.

    The last block computes only the CLS token, if there is one. A network resumed at block `begin`
    reuses the tokens of the base network that the block's choices share; `begin` = L leaves only
    the head, None begins with the image.
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
    """Operations that `pass_flops` executes."""
    if until == config.depth:
        return executed_backbone_flops(config)
    *before, (attention, _) = (
        executed_halves(config, last=i == config.depth - 1) for i in range(until + 1)
    )
    return (
        embed_flops(config) + sum(map(sum, before)) + (attention if placement == "mlp_down" else 0)
    )


def executed_backbone_flops(config: ViTConfig, num_extra: int = 0) -> int:
    """Operations that the plain backbone executes, without head, with so many extra tokens per
    block."""
    blocks = range(config.depth)
    halves = (
        executed_halves(config, last=block == config.depth - 1, num_extra=num_extra)
        for block in blocks
    )
    return embed_flops(config) + sum(map(sum, halves)) + pool_flops(config)


def pool_flops(config: ViTConfig, *, count_attention: bool = True) -> int:
    """Attention pooling: keys and values of all tokens, one query, two projections and the MLP."""
    if config.pool != "attention":
        return 0
    tokens, width = config.num_tokens, config.width
    attended = 2 * tokens * width if count_attention else 0
    return 2 * ((2 * tokens + 2) * width * width + attended + 2 * width * config.mlp_width)


def executed_halves(config: ViTConfig, *, last: bool, num_extra: int = 0) -> tuple[int, int]:
    """Executed operations of a block's attention half and FFN half; the last block computes only
    the tokens that the features need."""
    tokens = config.num_tokens + num_extra
    width = config.width
    outputs = 1 if last and config.pool == "class" else tokens
    attention = 2 * (outputs + tokens) * width * width + 2 * outputs * tokens * width
    return 2 * attention, 2 * outputs * config.mlp_weights


def backbone_params(config: ViTConfig) -> int:
    """Parameters of the backbone without head: the base of the paper's %Param."""
    width = config.width
    mlp = config.mlp_weights + config.mlp_width * (2 if config.gated else 1) + width
    per_block = 4 * width * width + 4 * width + mlp + 4 * width
    embed = 3 * config.patch_size**2 * width + (width if config.patch_bias else 0)
    norms = (2 if config.norm_before_blocks else 1) * 2 * width
    positions = config.num_tokens if config.rotary is None else 0
    pool = (
        per_block - width if config.pool == "attention" else 0
    )  # like a block, with a query and one LayerNorm less
    return embed + (config.num_prefix + positions) * width + config.depth * per_block + norms + pool
