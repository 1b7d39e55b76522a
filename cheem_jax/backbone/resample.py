"""Position embeddings for other image sizes, as timm resamples them (its `resample_abs_pos_embed`)."""

import math

import numpy as np
from jaxtyping import Float


def resample_position(position: Float[np.ndarray, "N D"], num_patches: int) -> Float[np.ndarray, "M D"]:
    """The embedding for a square grid of `num_patches`; the class token's row stays as it is."""
    class_token, grid = position[:1], position[1:]
    before, after = math.isqrt(len(grid)), math.isqrt(num_patches)
    if before**2 != len(grid) or after**2 != num_patches:
        raise ValueError(f"position embeddings are resampled between square grids, not {len(grid)} -> {num_patches}")
    if before == after:
        return position
    matrix = bicubic_matrix(before, after)
    square = grid.astype(np.float64).reshape(before, before, -1)
    resampled = np.einsum("ih,jw,hwd->ijd", matrix, matrix, square, optimize=True)
    return np.concatenate([class_token, resampled.reshape(num_patches, -1)]).astype(np.float32)


def bicubic_matrix(before: int, after: int) -> Float[np.ndarray, "after before"]:
    """Antialiased bicubic resampling along one axis: Keys' kernel with a = -1/2, widened when it shrinks.

    Pixel centres lie at halves. Samples beyond the edge are left out and the rows rescaled to sum to 1, as in
    torch's `interpolate(mode="bicubic", antialias=True)`, which uses this kernel for enlarging too.
    """
    scale = before / after
    centre = scale * (np.arange(after) + 0.5)
    distance = np.abs(np.arange(before)[None, :] + 0.5 - centre[:, None]) / max(scale, 1.0)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)
