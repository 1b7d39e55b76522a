"""Convert functions to ONNX files with jax2onnx, and run the files with onnxruntime. A file
contains each weight once.

Two passes over the converted graph remove copies of weights from branches and loops. An inner graph
(a branch or the body of a loop) can read values of the outer graph, so it needs no copies.
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

from cheem_jax.export.programs import Artefact, ImageFunction

OPSET = 18
"""ONNX operator set: the oldest version with all required operators, so that older runtimes can run
the file."""


def make(
    program: ImageFunction, image_size: int, outputs: Sequence[str], description: dict[str, Any]
) -> Artefact:
    """Make an ONNX file that accepts any batch size; `description` becomes its metadata entry
    `cheem_jax`.

    Raises ValueError if jax2onnx cannot convert the function.
    """
    with _quiet():
        import jax2onnx  # pyright: ignore[reportMissingImports]
        import onnxruntime  # pyright: ignore[reportMissingImports]

    def in_order(images):
        outputs_by_name = program(images)
        return tuple(outputs_by_name[name] for name in outputs)

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
        for output in model.graph.output:  # jax2onnx names the batch axis differently in outputs
            output.type.tensor_type.shape.dim[0].dim_param = "batch"
        entry = model.metadata_props.add()
        entry.key = "cheem_jax"
        entry.value = json.dumps(description)
        content = model.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # jax2onnx lags behind JAX and can raise any error
        raise ValueError(
            f"jax2onnx {importlib.metadata.version('jax2onnx')} cannot convert this network with"
            f" JAX {jax.__version__} ({type(error).__name__}: {str(error):.200}); export each task"
            " separately, or export as stablehlo"
        ) from error

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        outputs_by_name = session.run(list(outputs), {"images": images})
        return {
            name: np.asarray(value) for name, value in zip(outputs, outputs_by_name, strict=True)
        }

    return Artefact(content, run, notes=(f"opset {OPSET}",))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence jax2onnx, which otherwise lists every optional library that is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _share_weights(graph: Any) -> None:
    """Store each distinct constant once, in the outermost graph; jax2onnx repeats constants in each
    branch."""
    names = dict[bytes, str]()
    constants = []
    for inner in list(_graphs(graph)):
        renamed = {}
        for constant in inner.initializer:
            name = constant.name
            constant.name = ""
            content = constant.SerializeToString(deterministic=True)
            if content not in names:
                names[content] = constant.name = f"weight_{len(names)}"
                constants.append(type(constant).FromString(constant.SerializeToString()))
            renamed[name] = names[content]
        del inner.initializer[:]
        _rename(inner, renamed)
    used = _read(graph)
    graph.initializer.extend(constant for constant in constants if constant.name in used)


def _keep_outside_loops(graph: Any) -> None:
    """Let loops read constants from the outer graph.

    Otherwise, the runtime would copy all weights for each image, because jax2onnx passes constants
    from iteration to iteration.
    """
    for loop in [node for node in graph.node if node.op_type == "Loop"]:
        [body] = [attribute.g for attribute in loop.attribute if attribute.name == "body"]
        copied = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Identity"}
        inside = {name for inner in _graphs(body) for node in inner.node for name in node.output}
        renamed, after = {}, {}
        # The first two inputs of the body are the iteration number and a condition. The first
        # output of the body is also a condition.
        for carried in reversed(range(len(loop.input) - 2)):
            outer = loop.input[carried + 2]
            given = body.input[carried + 2].name
            returned = body.output[carried + 1].name
            if copied.get(returned) == given and outer not in inside:
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
    """Yield a graph and then its inner graphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _read(graph: Any) -> set[str]:
    """Return the names of the values that a graph and its inner graphs read or return."""
    read = {name for inner in _graphs(graph) for node in inner.node for name in node.input}
    return read | {output.name for inner in _graphs(graph) for output in inner.output}


def _rename(graph: Any, renamed: dict[str, str]) -> None:
    """Rename the inputs of nodes and the outputs of graphs, including inner graphs."""
    for inner in _graphs(graph):
        for node in inner.node:
            for position, name in enumerate(node.input):
                node.input[position] = renamed.get(name, name)
        for output in inner.output:
            output.name = renamed.get(output.name, output.name)
