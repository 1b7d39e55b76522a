"""Weights of plain ViTs as timm stores them."""

import numpy as np

TINY = "vit_tiny_patch4_12.dino"
"""A plausible name of timm; its mean and std follow from the tag."""


def timm_tensors(
    *, width=64, depth=2, patch=4, grid=3, classes=0, ratio=3, clip=False
) -> dict[str, np.ndarray]:
    """Return random weights of a plain ViT, under timm's names and in PyTorch's layout."""
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, grid**2 + 1, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    if clip:
        shapes |= {"norm_pre.weight": (width,), "norm_pre.bias": (width,)}
    else:
        shapes["patch_embed.proj.bias"] = (width,)
    if classes:
        shapes |= {"head.weight": (classes, width), "head.bias": (classes,)}
    for index in range(depth):
        layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        layers |= {"mlp.fc1": (ratio * width, width), "mlp.fc2": (width, ratio * width)}
        for layer, shape in layers.items():
            shapes |= {
                f"blocks.{index}.{layer}.weight": shape,
                f"blocks.{index}.{layer}.bias": shape[:1],
            }
        for layer in ("norm1", "norm2"):
            shapes |= {f"blocks.{index}.{layer}.{leaf}": (width,) for leaf in ("weight", "bias")}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
