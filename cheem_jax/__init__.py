"""Continual learning with Vision Transformers: earlier tasks keep their parameters, and their
images are not stored.

`create`, `open` and `begin_with` return an `OpenMemory`, whose method `predict` returns objects of
type `Prediction`; see `cheem_jax.memory`. All other names are parts of CHEEM for research; see
docs/guides/research.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cheem_jax.cheem.evolution import search as search
    from cheem_jax.cheem.hee import sample as sample
    from cheem_jax.cheem.supernet import Supernet as Supernet
    from cheem_jax.cheem.supernet import SupernetState as SupernetState
    from cheem_jax.cheem.training import make_step as make_step
    from cheem_jax.cheem.training import supernet_score as supernet_score
    from cheem_jax.cheem.training import train_step as train_step
    from cheem_jax.core.pool import grow as grow
    from cheem_jax.memory import OpenMemory as OpenMemory
    from cheem_jax.memory import begin_with as begin_with
    from cheem_jax.memory import create as create
    from cheem_jax.memory import open_memory as open
    from cheem_jax.memory.predictor import Prediction as Prediction

__version__ = "0.1.0"
__all__ = [
    "OpenMemory",
    "Prediction",
    "Supernet",
    "SupernetState",
    "begin_with",
    "create",
    "grow",
    "make_step",
    "open",
    "sample",
    "search",
    "supernet_score",
    "train_step",
]

_PLACES = {
    "OpenMemory": "memory.OpenMemory",
    "Prediction": "memory.predictor.Prediction",
    "Supernet": "cheem.supernet.Supernet",
    "SupernetState": "cheem.supernet.SupernetState",
    "begin_with": "memory.begin_with",
    "create": "memory.create",
    "grow": "core.pool.grow",
    "make_step": "cheem.training.make_step",
    "open": "memory.open_memory",
    "sample": "cheem.hee.sample",
    "search": "cheem.evolution.search",
    "supernet_score": "cheem.training.supernet_score",
    "train_step": "cheem.training.train_step",
}


def __getattr__(name: str) -> Any:
    # imported on access, because processes that decode images import this package and need no JAX
    if name not in _PLACES:
        raise AttributeError(f"module 'cheem_jax' has no attribute {name!r}")
    module, _, attribute = _PLACES[name].rpartition(".")
    return getattr(importlib.import_module(f"cheem_jax.{module}"), attribute)
