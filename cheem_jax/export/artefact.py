"""What each format makes, before it is checked and written; and the description that goes with it."""

import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from cheem_jax import __version__
from cheem_jax.core.architecture import to_strings
from cheem_jax.export.subject import Subject

Format = Literal["stablehlo", "onnx", "timm"]
Run = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Uint8 images `[B, S, S, 3]` to the outputs by name, through what is in the file."""


class Artefact(NamedTuple):
    """The bytes of a file, and a function that runs them."""

    content: bytes
    run: Run
    is_program: bool
    """Whether the file itself computes, so that its time is worth measuring."""
    notes: tuple[str, ...] = ()


def describe(subject: Subject, index: int | None, kind: Format) -> dict[str, Any]:
    """What a reader of the file has to know, as JSON values: one task's network, or the memory (None)."""
    config = subject.vit.config
    tasks = subject.tasks if index is None else (subject.tasks[index],)
    images = f"uint8 [batch, {config.image_size}, {config.image_size}, 3], RGB, resized to a square (bicubic)"
    logits = {"logits": f"float32 [batch, {max(len(task.classes) for task in tasks)}]"}
    packages = {"stablehlo": ("jax",), "onnx": ("jax", "jax2onnx", "onnx"), "timm": ("safetensors",)}[kind]
    description: dict[str, Any] = {
        "format": "cheem_jax.export.1",
        "kind": kind,
        "contains": "memory" if index is None else "task",
        "backbone": config.name,
        "placement": subject.placement,
        "image_size": config.image_size,
        "mean": list(config.mean),
        "std": list(config.std),
        "inputs": {"images": f"{images}; (images / 255 - mean) / std is part of the program"},
        "outputs": logits,
        "tasks": [
            {
                "name": task.name,
                "classes": list(task.classes),
                "architecture": to_strings(task.architecture),
                "experts": list(task.experts),
            }
            for task in tasks
        ],
        "versions": {"cheem_jax": __version__, **{name: importlib.metadata.version(name) for name in packages}},
    }
    if index is None:
        nowhere = (
            ""
            if subject.thresholds is None
            else (
                "; -1 where the distance to the nearest centroid or class mean of that task, in the router's metric, "
                "exceeds its threshold"
            )
        )
        description["outputs"] = {
            "task": f"int32 [batch], position in `tasks`{nowhere}",
            "logits": f"{logits['logits']} of that task; -1e30 in columns behind its last class",
            "distance": f"float32 [batch, {len(tasks)}] to each task, as the router compares them",
        }
        description["router"] = {
            **dataclasses.asdict(subject.router),
            "thresholds": None if subject.thresholds is None else list(subject.thresholds),
        }
    return description
