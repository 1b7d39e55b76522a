"""Parameters as a flat dict of names, and networks built from one.

Names are the attributes of the module, joined by dots: `patch.kernel`, `class_token`,
`blocks.3.qkv.bias`, `norm.scale`. Kernels are `[in, out]`; the patch kernel is `[patch * patch * 3,
D]` in height, width, channel order.
"""

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.vit import ViT

Params = Mapping[str, np.ndarray]
Module = TypeVar("Module", bound=nnx.Module)
_BLOCK = re.compile(r"blocks\.\d+\.")
_SHOWN = 4
"""At most so many tensors of each kind in an error; files of another architecture have hundreds."""
_ALIGNMENT = 64
"""Bytes; on a CPU, JAX shares the memory of an array that begins at a multiple of it."""


@functools.cache
def shapes_of(config: ViTConfig) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every parameter; cached, because tracing a large network costs a second."""
    return shapes(lambda: ViT(config, nnx.Rngs(0)))


def shapes(make: Callable[[], nnx.Module]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a network, without computing any."""
    _, state = nnx.split(nnx.eval_shape(make))
    return {_dotted(name): tuple(leaf.shape) for name, leaf in nnx.to_flat_state(state)}


def check_params(config: ViTConfig, params: Params) -> None:
    """Raise one ValueError that lists every missing, unexpected and misshapen tensor."""
    complaint = mismatches(shapes_of(config), params)
    if complaint:
        raise ValueError(
            f"weights do not fit backbone {config.name!r}: {complaint}; were they made for another"
            " architecture?"
        )


def mismatches(wanted: Mapping[str, tuple[int, ...]], tensors: Params) -> str:
    """Missing, unexpected and misshapen tensors in one line, a few of each and the number of
    others.

    Empty if all tensors fit. Tensors of several blocks are one entry, such as `blocks.*.up.kernel
    (of 12 blocks)`.
    """
    kinds = {
        "missing": list(wanted.keys() - tensors.keys()),
        "unexpected": list(tensors.keys() - wanted.keys()),
        "misshapen": [
            f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
            for name, shape in wanted.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    }
    complaints = []
    for kind, lines in kinds.items():
        alike: dict[str, list[str]] = {}
        for line in lines:
            alike.setdefault(_BLOCK.sub("blocks.*.", line), []).append(line)
        shown = [
            same[0] if len(same) == 1 else f"{line} (of {len(same)} blocks)"
            for line, same in alike.items()
        ]
        if shown:
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            shown.sort(
                key=lambda line: (line.startswith("blocks."), line)
            )  # tensors outside of the blocks say more
            complaints.append(f"{kind}: {', '.join(shown[:_SHOWN])}{more}")
    return "; ".join(complaints)


def build(config: ViTConfig, params: Params) -> ViT:
    """The module with these weights in float32. Raises as `check_params`."""
    check_params(config, params)
    return filled(lambda: ViT(config, nnx.Rngs(0)), params)


def float32(values: np.ndarray) -> np.ndarray:
    """A read-only copy in float32, whose memory a network on a CPU shares."""
    room = np.empty(4 * values.size + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    copied = room[begin : begin + 4 * values.size].view(np.float32).reshape(values.shape)
    copied[...] = values
    copied.flags.writeable = False
    return copied


def filled(make: Callable[[], Module], params: Params) -> Module:
    """The network of `make` with these weights in float32, which must fit."""

    def placed(values: np.ndarray) -> jax.Array:
        values = np.asarray(values, np.float32)
        # only read-only arrays can be shared
        return jnp.asarray(values) if values.flags.writeable else jax.device_put(values)

    graphdef, state = nnx.split(nnx.eval_shape(make))
    flat = {
        name: leaf.replace(placed(params[_dotted(name)])) for name, leaf in nnx.to_flat_state(state)
    }
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def from_torch(
    tensors: Params,
    shapes: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    unused: Collection[str],
    what: str,
) -> dict[str, np.ndarray]:
    """Our parameters in float32 from PyTorch's layout, `[out, in]` or `[out, in, height, width]`.

    `theirs` has the PyTorch name and shape of each of our parameters. One ValueError, which begins
    with `what`, lists every missing, unexpected and misshapen tensor; tensors in `unused` are
    ignored.
    """
    used = {name: value for name, value in tensors.items() if name not in unused}
    if complaint := mismatches(dict(theirs.values()), used):
        raise ValueError(f"{what}: {complaint}")
    axes = {2: (1, 0), 4: (2, 3, 1, 0)}  # of linear layers and convolutions
    params = {}
    for name, shape in shapes.items():
        tensor = tensors[theirs[name][0]]
        params[name] = float32(
            tensor.transpose(axes.get(tensor.ndim, range(tensor.ndim))).reshape(shape)
        )
    return params


def init_params(config: ViTConfig, key: jax.Array) -> dict[str, np.ndarray]:
    """timm's random initialisation of a ViT: truncated normal of deviation 0.02, zero biases, unit
    LayerNorm scales."""
    params = {}
    for index, (name, shape) in enumerate(sorted(shapes_of(config).items())):
        if name.endswith("scale"):
            params[name] = np.ones(shape, np.float32)
        elif name.endswith("bias"):
            params[name] = np.zeros(shape, np.float32)
        else:
            leaf_key = jax.random.fold_in(key, index)
            params[name] = np.asarray(
                0.02 * jax.random.truncated_normal(leaf_key, -2.0, 2.0, shape)
            )
    return params


def params_of(vit: ViT) -> dict[str, np.ndarray]:
    """Inverse of `build`."""
    _, state = nnx.split(vit)
    return {_dotted(name): np.asarray(leaf[...]) for name, leaf in nnx.to_flat_state(state)}


def _dotted(name: tuple) -> str:
    return ".".join(str(part) for part in name)
