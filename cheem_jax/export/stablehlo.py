"""StableHLO through `jax.export`: a program with its weights that any later JAX runs on CPU, CUDA and TPU.

outputs = jax.export.deserialize(bytearray(Path("memory.stablehlo").read_bytes())).call(images)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from cheem_jax.export.programs import Program
from cheem_jax.export.subject import Artefact

PLATFORMS = ("cpu", "cuda", "tpu")


def make(program: Program, image_size: int) -> Artefact:
    """The program for any number of images."""
    from jax import export  # needs flatbuffers as soon as it writes

    (batch,) = export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.uint8)
    # products in full float32: accelerators would round operands, and answer otherwise than a CPU
    with without_locations(), jax.default_matmul_precision("highest"):
        # a function of its own: what was traced before may hold another precision
        exported = export.export(jax.jit(lambda images: program(images)), platforms=PLATFORMS)(images)
    content = bytes(exported.serialize())
    call = jax.jit(export.deserialize(bytearray(content)).call)

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(value) for name, value in call(images).items()}

    return Artefact(content, run, notes=(f"runs on {', '.join(PLATFORMS)}",))


@contextmanager
def without_locations() -> Iterator[None]:
    """Programs lowered within name no source files: paths of this machine are nobody's business elsewhere."""
    # JAX makes its settings' attributes at run time, where a type checker sees none
    before = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)
