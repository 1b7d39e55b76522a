"""Parameters as a flat dict of names, and how a `ViT` is built from one.

Names follow the module's attributes, joined by dots: `patch.kernel`, `class_token`, `blocks.3.qkv.bias`,
`norm.scale`. Kernels are `[in, out]`; the patch kernel is `[patch * patch * 3, D]` in height, width, channel
order.
"""

import functools
import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.vit import ViT

Params = Mapping[str, np.ndarray]
_BLOCK = re.compile(r"blocks\.(\d+)\.")


@functools.cache
def shapes_of(config: ViTConfig) -> Mapping[str, tuple[int, ...]]:
    """Every parameter's name and shape; looked up once, since tracing a large network takes a second."""
    _, state = nnx.split(nnx.eval_shape(lambda: ViT(config, nnx.Rngs(0))))
    return {_dotted(name): tuple(leaf.shape) for name, leaf in nnx.to_flat_state(state)}


def check_params(config: ViTConfig, params: Params) -> None:
    """Raise one ValueError that lists every missing, unexpected and misshapen tensor."""
    complaint = mismatches(shapes_of(config), params)
    if complaint:
        raise ValueError(
            f"weights do not fit backbone {config.name!r}: {complaint}; were they made for another architecture?"
        )


def mismatches(wanted: Mapping[str, tuple[int, ...]], tensors: Params) -> str:
    """Every missing, unexpected and misshapen tensor in one line; empty where all fit."""
    misshapen = [
        (name, f" is {tuple(tensors[name].shape)}, expected {shape}")
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    kinds = {
        "missing": _by_block((name, "") for name in wanted.keys() - tensors.keys()),
        "unexpected": _by_block((name, "") for name in tensors.keys() - wanted.keys()),
        "misshapen": _by_block(misshapen),
    }
    return "; ".join(f"{kind}: {', '.join(lines)}" for kind, lines in kinds.items() if lines)


def _by_block(complaints: Iterable[tuple[str, str]]) -> list[str]:
    """Sorted lines; what several blocks have in common is one line, such as `blocks.[0-3,5].up.kernel`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name, remark in complaints:
        block = _BLOCK.match(name)
        groups.setdefault((_BLOCK.sub("blocks.*.", name), remark), []).append(int(block[1]) if block else 0)
    return sorted(name.replace("*", _ranges(blocks)) + remark for (name, remark), blocks in groups.items())


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"[{','.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}]"


def build(config: ViTConfig, params: Params) -> ViT:
    """The module with these weights in float32; raises as `check_params` does."""
    check_params(config, params)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: ViT(config, nnx.Rngs(0))))
    flat = {name: leaf.replace(jnp.asarray(np.asarray(params[_dotted(name)], np.float32)))
            for name, leaf in nnx.to_flat_state(state)}  # fmt: skip
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def init_params(config: ViTConfig, key: jax.Array) -> dict[str, np.ndarray]:
    """Random weights as timm starts a ViT: truncated normal 0.02, zero biases, unit LayerNorm scales."""
    params = {}
    for index, (name, shape) in enumerate(sorted(shapes_of(config).items())):
        if name.endswith("scale"):
            params[name] = np.ones(shape, np.float32)
        elif name.endswith("bias"):
            params[name] = np.zeros(shape, np.float32)
        else:
            leaf_key = jax.random.fold_in(key, index)
            params[name] = np.asarray(0.02 * jax.random.truncated_normal(leaf_key, -2.0, 2.0, shape))
    return params


def params_of(vit: ViT) -> dict[str, np.ndarray]:
    """Inverse of `build`."""
    _, state = nnx.split(vit)
    return {_dotted(name): np.asarray(leaf[...]) for name, leaf in nnx.to_flat_state(state)}


def _dotted(name: tuple) -> str:
    return ".".join(str(part) for part in name)
