"""Store parameters in a flat dict keyed by name, and build networks from it.

A name is the path of attributes in the module, joined by dots, such as `patch.kernel`,
`class_token`, `blocks.3.qkv.bias` or `norm.scale`. Kernels are `[in, out]`. The patch kernel is
`[patch * patch * 3, D]`, flattened in the order height, width, channel.
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
"""Maximum number of missing tensors, of unexpected tensors and of wrong shapes in an error message;
weights of another architecture can have hundreds of mismatches."""
_ALIGNMENT = 64
"""Alignment of parameters in bytes. On a CPU, JAX uses the memory of a NumPy array that has this
alignment, instead of copying the array."""


@functools.cache
def shapes_of(config: ViTConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every parameter, keyed by name. The result is cached because tracing a
    large network takes a second."""
    return shapes(lambda: ViT(config, nnx.Rngs(0)))


def shapes(make: Callable[[], nnx.Module]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a network, keyed by name, without computing the
    parameters."""
    _, state = nnx.split(nnx.eval_shape(make))
    return {_dotted(name): tuple(leaf.shape) for name, leaf in nnx.to_flat_state(state)}


def check_params(config: ViTConfig, params: Params) -> None:
    """Raise a single ValueError that lists all missing and unexpected tensors and wrong shapes."""
    complaint = mismatches(shapes_of(config), params)
    if complaint:
        raise ValueError(
            f"weights do not fit backbone {config.name!r}: {complaint}; give weights of this"
            " architecture"
        )


def mismatches(expected: Mapping[str, tuple[int, ...]], tensors: Params) -> str:
    """Describe missing tensors, unexpected tensors and wrong shapes in one line: a few of each
    kind, and the number of others.

    The result is empty if all tensors fit. A mismatch in more than one block is one entry, such as
    `blocks.*.up.kernel (of 12 blocks)`.
    """
    kinds = {
        "missing": list(expected.keys() - tensors.keys()),
        "unexpected": list(tensors.keys() - expected.keys()),
        "misshapen": [
            f"{name} is {tuple(tensors[name].shape)}, expected {shape}"
            for name, shape in expected.items()
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
            )  # tensors outside of the blocks are first, because they are more informative
            complaints.append(f"{kind}: {', '.join(shown[:_SHOWN])}{more}")
    return "; ".join(complaints)


def build(config: ViTConfig, params: Params) -> ViT:
    """Build a ViT with `params` in float32. Raises the errors of `check_params`."""
    check_params(config, params)
    return filled(lambda: ViT(config, nnx.Rngs(0)), params)


def float32(values: np.ndarray) -> np.ndarray:
    """Make a read-only copy in float32. Its alignment allows JAX on a CPU to use the memory of the
    copy without copying again."""
    room = np.empty(4 * values.size + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    copied = room[begin : begin + 4 * values.size].view(np.float32).reshape(values.shape)
    copied[...] = values
    copied.flags.writeable = False
    return copied


def filled(make: Callable[[], Module], params: Params) -> Module:
    """Build the network that `make` returns, with `params` in float32. The names and shapes in
    `params` must be those of the network's parameters."""

    def placed(values: np.ndarray) -> jax.Array:
        values = np.asarray(values, np.float32)
        # JAX can share the memory of an array only if the array is read-only
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
    """Convert tensors in PyTorch's layout, `[out, in]` or `[out, in, height, width]`, to our
    parameters in float32.

    `theirs` contains the PyTorch name and shape of each of our parameters. Tensors in `unused` are
    ignored. Raises a single ValueError that starts with `what` and lists all missing and unexpected
    tensors and wrong shapes.
    """
    used = {name: value for name, value in tensors.items() if name not in unused}
    if complaint := mismatches(dict(theirs.values()), used):
        raise ValueError(f"{what}: {complaint}")
    # permutations of the axes of linear layers and convolutions, keyed by number of axes
    axes = {2: (1, 0), 4: (2, 3, 1, 0)}
    params = {}
    for name, shape in shapes.items():
        tensor = tensors[theirs[name][0]]
        params[name] = float32(
            tensor.transpose(axes.get(tensor.ndim, range(tensor.ndim))).reshape(shape)
        )
    return params


def init_params(config: ViTConfig, key: jax.Array) -> dict[str, np.ndarray]:
    """Initialise a ViT randomly: weights from 0.02 times a standard normal distribution truncated
    at ±2, zero biases, and LayerNorm scales of one."""
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


def get_params(vit: ViT) -> dict[str, np.ndarray]:
    """Return the parameters of a network, keyed by name."""
    _, state = nnx.split(vit)
    return {_dotted(name): np.asarray(leaf[...]) for name, leaf in nnx.to_flat_state(state)}


def _dotted(name: tuple) -> str:
    return ".".join(str(part) for part in name)
