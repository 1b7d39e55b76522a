"""A memory, or one task's network, written as a file that other programs run; checked before it is written."""

import dataclasses
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cheem_jax import __version__
from cheem_jax.core.architecture import to_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.data.task import check_names
from cheem_jax.export import onnx_model, stablehlo, timm_weights
from cheem_jax.export.checking import check, seconds_per_image
from cheem_jax.export.programs import Program, Subject, memory_program, num_bytes, task_program

Format = Literal["stablehlo", "onnx", "timm"]
SUFFIXES: dict[Format, str] = {"stablehlo": ".stablehlo", "onnx": ".onnx", "timm": ".safetensors"}
PACKAGES: dict[Format, tuple[str, ...]] = {
    "stablehlo": ("jax", "flatbuffers"), "onnx": ("jax", "jax2onnx", "onnx", "onnxruntime"), "timm": ("safetensors",),
}  # fmt: skip
LIMIT = 2**31 - 2**20
"""Bytes that a file of weights may hold: neither flatbuffers nor protobuf can write two gigabytes."""


class Exported(NamedTuple):
    """What was written, and how it was checked."""

    file: Path
    num_bytes: int
    largest_difference: float
    """Over logits and distances of random images, against the plain network."""
    seconds_per_image: float | None
    """Of the file itself with one image on this machine; None where the file does not compute by itself."""
    notes: tuple[str, ...]


def kind_of(file: Path) -> Format:
    """The format that the file's ending names. Raises ValueError for another ending."""
    for kind, suffix in SUFFIXES.items():
        if suffix == file.suffix.lower():
            return kind
    known = ", ".join(f"{suffix} ({kind})" for kind, suffix in SUFFIXES.items())
    raise ValueError(f"{str(file)!r} has an unknown ending; expected one of {known}, or name the format")


def export(subject: Subject, file: Path, kind: Format, *, task: str | None = None, overwrite: bool = False) -> Exported:
    """Write the network of the named task, or without a name the whole routed memory.

    A task's network: `images` to `logits`. The memory: `images` to `task`, `logits` and `distance`; the pass that
    infers the task is shared with the task's network as far as they are equal, and only that task's network runs. A
    description (classes, architectures, inputs and outputs) goes into the file, or lies next to a StableHLO one as
    `<file>.json`. timm's weights are those of one task, whose name is needed where there are several.

    Raises ValueError for what cannot be exported or written so, and RuntimeError where the file's answers differ from
    the network's by more than 1e-4; then nothing is written.
    """
    description_file = file.with_name(f"{file.name}.json") if kind == "stablehlo" else None
    _check_place(file, description_file, kind, overwrite)
    names = [known.name for known in subject.tasks]
    if task is None and kind == "timm":
        if len(names) > 1:
            raise ValueError(f"timm's weights are those of one task: name one of {', '.join(names)}")
        task = names[0]
    if task is not None:
        check_names([task], names, "the memory")
    index = None if task is None else names.index(task)
    if missing := [package for package in PACKAGES[kind] if importlib.util.find_spec(package) is None]:
        raise ValueError(f"{kind} needs {', '.join(missing)}; pip install 'cheem_jax[export]'")
    description = _description(subject, index, kind)
    if kind != "timm" and (wanted := num_bytes(subject, index)) > LIMIT:
        raise ValueError(f"weights of {wanted} bytes; a {kind} file contains less than 2 GiB, so export task by task")
    size = subject.vit.config.image_size
    match kind:
        case "timm":
            assert index is not None
            made = timm_weights.make(subject, index, description)
        case "onnx":
            made = onnx_model.make(_program(subject, index), size, list(description["outputs"]), description)
        case "stablehlo":
            made = stablehlo.make(_program(subject, index), size)
    difference, compared = check(subject, index, made.run)
    # timm's weights do not compute by themselves
    seconds = None if kind == "timm" else seconds_per_image(made.run, size)
    notes = list(made.notes)
    if index is None:
        notes.append("each image runs the backbone once and its own task's network from the first difference on")
        if unseen := [name for i, name in enumerate(names) if i not in compared]:
            notes.append(f"not compared, as no random image led to them: {', '.join(unseen)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, made.content)
    if description_file is not None:
        try:
            write_atomically(description_file, json.dumps(description, indent=1))
        except BaseException:
            file.unlink()  # nobody could tell its classes
            raise
    return Exported(file, len(made.content), difference, seconds, tuple(notes))


def _check_place(file: Path, description_file: Path | None, kind: Format, overwrite: bool) -> None:
    if file.suffix != SUFFIXES[kind]:
        raise ValueError(f"{file}: a file of kind {kind!r} ends with {SUFFIXES[kind]!r}, not {file.suffix!r}")
    for place in filter(None, (file, description_file)):
        if place.is_dir():
            raise ValueError(f"{place} is a folder; expected a file")
        if place.exists() and not overwrite:
            raise ValueError(f"{place} exists already; choose another file, or add --overwrite (overwrite=True)")


def _program(subject: Subject, index: int | None) -> Program:
    return memory_program(subject) if index is None else task_program(subject, index)


def _description(subject: Subject, index: int | None, kind: Format) -> dict[str, Any]:
    """What a reader of the file has to know, as JSON values: one task's network, or the memory (None)."""
    config = subject.vit.config
    tasks = subject.tasks if index is None else (subject.tasks[index],)
    images = f"uint8 [batch, {config.image_size}, {config.image_size}, 3], RGB, resized to a square (bicubic)"
    logits = f"float32 [batch, {max(len(task.classes) for task in tasks)}]"
    calibrated = "; probabilities are softmax(logits / the task's temperature)"
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
        "outputs": {"logits": f"{logits}{calibrated}"},
        "tasks": [
            {
                "name": task.name,
                "classes": list(task.classes),
                "architecture": to_strings(task.architecture),
                "experts": list(task.experts),
                "temperature": task.temperature,
            }
            for task in tasks
        ],
        "versions": {"cheem_jax": __version__, **{name: importlib.metadata.version(name) for name in PACKAGES[kind]}},
    }
    if index is None:
        rejection = (
            "; -1 where the distance to the nearest centroid or class mean of that task, in the router's metric, "
            "exceeds its threshold"
        )
        description["outputs"] = {
            "task": f"int32 [batch], position in `tasks`{'' if subject.thresholds is None else rejection}",
            "logits": f"{logits} of that task; -1e30 in columns behind its last class{calibrated}",
            "distance": f"float32 [batch, {len(tasks)}] to each task, as the router compares them",
        }
        description["router"] = {
            **dataclasses.asdict(subject.router),
            "thresholds": None if subject.thresholds is None else list(subject.thresholds),
        }
    return description
