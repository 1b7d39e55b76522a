"""Compute mean CLS tokens of the pretraining data: mu of the base task, which is used for task
similarity."""

import functools
from collections.abc import Iterable

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PyTree, UInt8

from cheem_jax.backbone.vit import ViT, summary
from cheem_jax.core.device import deterministic_jit
from cheem_jax.core.images import Images, in_turn
from cheem_jax.core.ops import Reuse

KEYS = ("mlp_down/component", "attn_proj/component", "mlp_down/block", "attn_proj/block")


def base_means(
    vit: ViT, images: Images, *, batch_size: int = 64
) -> dict[str, Float[np.ndarray, "L D"]]:
    """Compute the mean CLS tokens of `images` in the plain backbone, keyed by
    `{image_size}/{placement}/{token}`.

    `component` is the output of the plastic layer before the residual sum, and `block` is the
    output of the block. `block` is identical for both placements, because all ops of the plain
    backbone are Reuse. Sums are computed in float64, and all batches share a compiled function.
    Raises ValueError if there are no images, or if their size differs from the image size of the
    backbone.
    """
    size = vit.config.image_size
    if len(images) == 0 or images.shape[1:3] != (size, size):
        raise ValueError(
            f"base means of {vit.config.name!r} need images of {size}x{size} pixels, got"
            f" {images.shape}"
        )
    graphdef, state = nnx.split(vit)
    totals = np.zeros((3, vit.config.depth, vit.config.width))
    rows = np.arange(len(images))
    for batch in in_turn(
        images, [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    ):
        padded = np.zeros((batch_size, size, size, 3), np.uint8)
        padded[: len(batch)] = batch
        totals += np.asarray(_class_tokens(graphdef, state, padded), np.float64)[: len(batch)].sum(
            axis=0
        )
    down, proj, block = (totals / len(images)).astype(np.float32)
    return {
        f"{size}/{key}": mean for key, mean in zip(KEYS, (down, proj, block, block), strict=True)
    }


def pooled_means(vit: ViT, chunks: Iterable[Images]) -> dict[str, Float[np.ndarray, "L D"]]:
    """Average the `base_means` of all chunks, weighted by the number of images in each chunk."""
    totals: dict[str, np.ndarray] = {}
    count = 0
    for images in chunks:
        count += len(images)
        for key, mean in base_means(vit, images).items():
            totals[key] = totals.get(key, 0.0) + mean.astype(np.float64) * len(images)
    return {key: (total / count).astype(np.float32) for key, total in totals.items()}


@functools.partial(deterministic_jit, static_argnums=0)
def _class_tokens(
    graphdef: nnx.GraphDef, state: PyTree, images: UInt8[Array, "B H W 3"]
) -> Float[Array, "B 3 L D"]:
    """Compute three CLS tokens for each image and block: the outputs of the down-projection, of the
    attention projection and of the block."""
    vit = nnx.merge(graphdef, state)
    x = vit.embed(images)
    tokens = []
    for block in vit.blocks:
        # XLA merges the operations that both runs share, and removes the unused second half of the
        # first run.
        _, proj = block.run(Reuse(block.expert("attn_proj")), x, placement="attn_proj")
        x, down = block.run(Reuse(block.expert("mlp_down")), x, placement="mlp_down")
        tokens.append([summary(kind, vit.config) for kind in (down, proj, x)])
    return jax.numpy.stack([jax.numpy.stack(kinds, axis=1) for kinds in tokens], axis=2)
