"""ONNX through jax2onnx, checked in onnxruntime. A file contains each weight once, whichever tasks
use it.

Two passes over the graph do what jax2onnx leaves to be desired in programs with branches and loops:
a graph inside another one, a branch or a loop's body, may read whatever the graph around it
contains.
"""

import importlib.metadata
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.export.programs import Artefact, Program

OPSET = 18
"""The oldest one that has all operators, so that older runtimes read the file as well."""


def make(
    program: Program, image_size: int, outputs: Sequence[str], description: dict[str, Any]
) -> Artefact:
    """The program for any number of images, its description as the metadata `cheem_jax`."""
    with _quiet():
        import jax2onnx  # pyright: ignore[reportMissingImports]
        import onnxruntime  # pyright: ignore[reportMissingImports]

    def in_order(images):
        found = program(images)
        return tuple(found[name] for name in outputs)

    try:
        with _quiet():
            model = jax2onnx.to_onnx(
                in_order,
                inputs=[jax.ShapeDtypeStruct(("batch", image_size, image_size, 3), jnp.uint8)],
                input_names=["images"],
                output_names=list(outputs),
                opset=OPSET,
                model_name="cheem_jax",
                return_mode="proto",
            )
        _share_weights(model.graph)
        _keep_outside_loops(model.graph)
        for output in model.graph.output:  # named by the converter after a sentinel of its own
            output.type.tensor_type.shape.dim[0].dim_param = "batch"
        entry = model.metadata_props.add()
        entry.key = "cheem_jax"
        entry.value = json.dumps(description)
        content = model.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # the converter follows JAX at a distance, and fails in any way
        raise ValueError(
            f"jax2onnx {importlib.metadata.version('jax2onnx')} makes no ONNX of this with JAX"
            f" {jax.__version__} ({type(error).__name__}: {str(error):.200}); export task by task,"
            " or as stablehlo"
        ) from error

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        found = session.run(list(outputs), {"images": images})
        return {name: np.asarray(value) for name, value in zip(outputs, found, strict=True)}

    return Artefact(content, run, notes=(f"opset {OPSET}",))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without remarks that users can do nothing about: jax2onnx lists every library it knows and
    does not find."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _share_weights(graph: Any) -> None:
    """Each distinct constant of a graph and of all inside it once, in the outermost graph.

    As converted, every branch has constants of its own.
    """
    names = dict[bytes, str]()
    kept = []
    for inner in list(_graphs(graph)):
        renamed = {}
        for constant in inner.initializer:
            own = constant.name
            constant.name = ""
            content = constant.SerializeToString(deterministic=True)
            if content not in names:
                names[content] = constant.name = f"weight_{len(names)}"
                kept.append(type(constant).FromString(constant.SerializeToString()))
            renamed[own] = names[content]
        del inner.initializer[:]
        _rename(inner, renamed)
    used = _read(graph)
    graph.initializer.extend(constant for constant in kept if constant.name in used)


def _keep_outside_loops(graph: Any) -> None:
    """Loops read what no turn changes from the graph around them.

    As converted, all of it is handed from turn to turn, and a runtime copies all weights for each
    image.
    """
    for loop in [node for node in graph.node if node.op_type == "Loop"]:
        [body] = [attribute.g for attribute in loop.attribute if attribute.name == "body"]
        copied = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Identity"}
        inside = {name for inner in _graphs(body) for node in inner.node for name in node.output}
        renamed, after = {}, {}
        # a body takes the turn's number and a condition before what is carried, and gives a
        # condition before it
        for carried in reversed(range(len(loop.input) - 2)):
            outer = loop.input[carried + 2]
            given = body.input[carried + 2].name
            left = body.output[carried + 1].name
            if copied.get(left) == given and outer not in inside:
                renamed[given], after[loop.output[carried]] = outer, outer
                del (
                    loop.input[carried + 2],
                    loop.output[carried],
                    body.input[carried + 2],
                    body.output[carried + 1],
                )
        _rename(body, renamed)
        _rename(graph, after)
        used = _read(body)
        for node in [
            node for node in body.node if node.op_type == "Identity" and node.output[0] not in used
        ]:
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
