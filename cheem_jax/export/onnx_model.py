"""ONNX through jax2onnx, checked in onnxruntime. A file holds each weight once, whichever tasks use it."""

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

from cheem_jax.export.artefact import Artefact
from cheem_jax.export.onnx_graph import keep_outside, share_weights
from cheem_jax.export.programs import Program

OPSET = 18
"""The oldest one that has all operators, so that older runtimes read the file as well."""


def check_installed() -> None:
    """Raises ValueError where a package of the extra `export` is missing."""
    try:
        with _quiet():
            import jax2onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
            import onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
            import onnxruntime  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"ONNX needs jax2onnx, onnx and onnxruntime ({error}); pip install 'cheem_jax[export]'"
        ) from error


def make(program: Program, image_size: int, outputs: Sequence[str], description: dict[str, Any]) -> Artefact:
    """The program for any number of images, its description as the metadata `cheem_jax`."""
    import jax2onnx  # pyright: ignore[reportMissingImports]
    import onnxruntime  # pyright: ignore[reportMissingImports]

    def in_order(images):
        found = program(images)
        return tuple(found[name] for name in outputs)

    try:
        with _quiet():
            model = jax2onnx.to_onnx(
                in_order,
                inputs=[jax.ShapeDtypeStruct(("batch", image_size, image_size, 3), jnp.uint8)], input_names=["images"],
                output_names=list(outputs), opset=OPSET, model_name="cheem_jax", return_mode="proto",
            )  # fmt: skip
        share_weights(model.graph)
        keep_outside(model.graph)
        for output in model.graph.output:  # named by the converter after a sentinel of its own
            output.type.tensor_type.shape.dim[0].dim_param = "batch"
        entry = model.metadata_props.add()
        entry.key, entry.value = "cheem_jax", json.dumps(description)
        content = model.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # the converter follows JAX at a distance, and fails in any way
        raise ValueError(
            f"jax2onnx {importlib.metadata.version('jax2onnx')} makes no ONNX of this with JAX {jax.__version__} "
            f"({type(error).__name__}: {str(error):.200}); export task by task, or as stablehlo"
        ) from error

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        found = session.run(list(outputs), {"images": images})
        return {name: np.asarray(value) for name, value in zip(outputs, found, strict=True)}

    return Artefact(content, run, is_program=True, notes=(f"opset {OPSET}",))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without remarks that users can do nothing about: jax2onnx tells of every library it knows and does not find."""
    loggers = [logging.getLogger(name) for name in ("jax2onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
