"""Memories in directories: learn tasks at any time, predict, evaluate, forget, export.

memory = cheem_jax.create("pets", backbone="deit_tiny", image_size=96)
memory.learn("photos/dogs")
memory = cheem_jax.open("pets")          # another day, another process
memory.learn("photos/cats")              # the images of dogs are not needed
memory.predict(["new.jpg"])[0].label
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cheem_jax.memory.making import begin_with, create, open_memory
    from cheem_jax.memory.opened import OpenMemory, TaskInfo, TaskScore

__all__ = ["OpenMemory", "TaskScore", "TaskInfo", "begin_with", "create", "open_memory"]


def __getattr__(name: str) -> Any:
    # The names are imported on first use, because importing the submodule `contents` must not
    # import JAX.
    if name not in __all__:
        raise AttributeError(f"module 'cheem_jax.memory' has no attribute {name!r}")
    module = "opened" if name in ("OpenMemory", "TaskScore", "TaskInfo") else "making"
    return getattr(importlib.import_module(f"cheem_jax.memory.{module}"), name)
