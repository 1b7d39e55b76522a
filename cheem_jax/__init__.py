"""Continual learning with Vision Transformers that never forget and store no old images.

`create`, `open` and `begin_with` give an `OpenMemory`: see `cheem_jax.memory`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cheem_jax.memory import OpenMemory as OpenMemory
    from cheem_jax.memory import begin_with as begin_with
    from cheem_jax.memory import create as create
    from cheem_jax.memory import open_memory as open
    from cheem_jax.prediction import Prediction as Prediction

__version__ = "0.1.0"
__all__ = ["OpenMemory", "Prediction", "begin_with", "create", "open"]

_PLACES = {
    "OpenMemory": "memory.OpenMemory",
    "Prediction": "prediction.Prediction",
    "begin_with": "memory.begin_with",
    "create": "memory.create",
    "open": "memory.open_memory",
}


def __getattr__(name: str) -> Any:
    # late, because processes that only decode pictures import this package and need no JAX
    if name not in _PLACES:
        raise AttributeError(f"module 'cheem_jax' has no attribute {name!r}")
    module, attribute = _PLACES[name].split(".")
    return getattr(importlib.import_module(f"cheem_jax.{module}"), attribute)
