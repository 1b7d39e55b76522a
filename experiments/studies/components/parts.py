"""The eleven components of a ViT block that the paper fine-tunes (appendix, table 'acc_vs_forgetting').

A component is taken out of all blocks as a tuple of arrays, learned apart from the backbone and put back: what does not
belong to it never meets a gradient.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cheem_jax.engine.executor import Executor


class Component(NamedTuple):
    """Layers of a block; of the fused `qkv` only the `thirds` from the first to before the second."""

    index: int
    """As in the paper's table."""
    name: str
    title: str
    layers: tuple[str, ...]
    thirds: tuple[int, int] = (0, 3)


COMPONENTS = (
    Component(1, "ln1_ln2", "LN1 + LN2", ("norm1", "norm2")),
    Component(2, "ffn", "FFN", ("up", "down")),
    Component(3, "mlp_down", "MLP-down", ("down",)),
    Component(4, "ln2", "LN2", ("norm2",)),
    Component(5, "mhsa_ln1", "MHSA + LN1", ("qkv", "proj", "norm1")),
    Component(6, "ln1", "LN1", ("norm1",)),
    Component(7, "query", "Query", ("qkv",), (0, 1)),
    Component(8, "key", "Key", ("qkv",), (1, 2)),
    Component(9, "query_key", "Query + Key", ("qkv",), (0, 2)),
    Component(10, "value", "Value", ("qkv",), (2, 3)),
    Component(11, "projection", "Projection", ("proj",)),
)


class Piece(NamedTuple):
    """Columns `begin` to `end` of the last axis of one of the backbone's leaves."""

    leaf: int
    begin: int
    end: int


def components_of(text: str) -> list[Component]:
    """The components that are asked for by name or index, in the paper's order."""
    if text == "all":
        return list(COMPONENTS)
    known = {word: component for component in COMPONENTS for word in (component.name, str(component.index))}
    asked = [word.strip() for word in text.split(",")]
    if unknown := [word for word in asked if word not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        listed = ", ".join(f"{component.index} {component.name}" for component in COMPONENTS)
        raise ValueError(f"--components names {', '.join(map(repr, unknown))}; {hint}the components are {listed}")
    return [component for component in COMPONENTS if component in [known[word] for word in asked]]


def pieces_of(executor: Executor, component: Component) -> tuple[Piece, ...]:
    """Where a component lies among the executor's leaves."""
    _, state = nnx.split(executor.vit_of(executor.leaves))
    pieces = []
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(state)):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        layer = names[2] if names[0] == "blocks" else None
        if layer in component.layers:
            size = leaf.shape[-1]
            first, last = component.thirds if layer == "qkv" else (0, 3)
            pieces.append(Piece(number, first * size // 3, last * size // 3))
    return tuple(pieces)


def num_params(executor: Executor) -> dict[str, int]:
    """Parameters of every component in all blocks, by name."""
    return {
        component.name: sum(part.size for part in taken(executor.leaves, pieces_of(executor, component)))
        for component in COMPONENTS
    }


def taken(leaves: Sequence[Any], pieces: Sequence[Piece]) -> tuple[np.ndarray, ...]:
    """The component's own arrays, on the host."""
    return tuple(np.asarray(leaves[piece.leaf])[..., piece.begin : piece.end] for piece in pieces)


def put_back(
    leaves: Sequence[Any], pieces: Sequence[Piece], parts: Sequence[Any], join: Callable[..., Any] = jnp.concatenate
) -> list[Any]:
    """The leaves with the component's arrays in their places; `join` is np.concatenate on the host."""
    found = list(leaves)
    for piece, part in zip(pieces, parts, strict=True):
        leaf = leaves[piece.leaf]
        if part.shape != leaf.shape:
            part = join([leaf[..., : piece.begin], part, leaf[..., piece.end :]], axis=-1)
        found[piece.leaf] = part
    return found
