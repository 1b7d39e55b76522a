"""What jax2onnx leaves to be desired in programs with branches and loops: weights once, and outside.

A graph inside another one, a branch or a loop's body, may read whatever the graph around it holds.
"""

from collections.abc import Iterator
from typing import Any


def share_weights(graph: Any) -> None:
    """Each distinct constant of a graph and of all inside it once, in the outermost graph.

    As converted, every branch has constants of its own.
    """
    names, kept = dict[bytes, str](), []
    for inner in list(_graphs(graph)):
        renamed = {}
        for constant in inner.initializer:
            own, constant.name = constant.name, ""
            content = constant.SerializeToString(deterministic=True)
            if content not in names:
                names[content] = constant.name = f"weight_{len(names)}"
                kept.append(type(constant).FromString(constant.SerializeToString()))
            renamed[own] = names[content]
        del inner.initializer[:]
        _rename(inner, renamed)
    used = _read(graph)
    graph.initializer.extend(constant for constant in kept if constant.name in used)


def keep_outside(graph: Any) -> None:
    """Loops read what no turn changes from the graph around them.

    As converted, all of it is handed from turn to turn, and a runtime copies all weights for each image.
    """
    for node in graph.node:
        if node.op_type == "Loop":
            [body] = [attribute.g for attribute in node.attribute if attribute.name == "body"]
            _keep_outside(graph, node, body)


def _keep_outside(graph: Any, loop: Any, body: Any) -> None:
    copied = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Identity"}
    inside = {name for inner in _graphs(body) for node in inner.node for name in node.output}
    renamed, after = {}, {}
    # a body takes the turn's number and a condition before what is carried, and gives a condition before it
    for carried in reversed(range(len(loop.input) - 2)):
        outer, given, left = loop.input[carried + 2], body.input[carried + 2].name, body.output[carried + 1].name
        if copied.get(left) == given and outer not in inside:
            renamed[given], after[loop.output[carried]] = outer, outer
            del loop.input[carried + 2], loop.output[carried], body.input[carried + 2], body.output[carried + 1]
    _rename(body, renamed)
    _rename(graph, after)
    used = _read(body)
    dead = [node for node in body.node if node.op_type == "Identity" and node.output[0] not in used]
    for node in dead:
        body.node.remove(node)


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and all inside it, each before those that it holds."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _read(graph: Any) -> set[str]:
    """All names that are read in a graph or inside it, or come out."""
    read = {name for inner in _graphs(graph) for node in inner.node for name in node.input}
    return read | {output.name for inner in _graphs(graph) for output in inner.output}


def _rename(graph: Any, renamed: dict[str, str]) -> None:
    """Reads by new names, also in the graphs inside."""
    for inner in _graphs(graph):
        for node in inner.node:
            for position, name in enumerate(node.input):
                node.input[position] = renamed.get(name, name)
        for output in inner.output:
            output.name = renamed.get(output.name, output.name)
