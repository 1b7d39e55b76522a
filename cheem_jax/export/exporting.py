"""A memory, or one task's network, written as a file that other programs run; checked before it is written."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax.core.atomic import write_atomically
from cheem_jax.export import onnx_model, stablehlo, timm_weights
from cheem_jax.export.artefact import Artefact, Format, describe
from cheem_jax.export.checking import check, seconds_per_image
from cheem_jax.export.programs import Program, dense_ops, memory_program, num_bytes, outputs_of, task_program
from cheem_jax.export.subject import Subject

SUFFIXES: dict[Format, str] = {"stablehlo": ".stablehlo", "onnx": ".onnx", "timm": ".safetensors"}
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


def export(subject: Subject, file: Path, kind: Format, *, task: str | None = None, overwrite: bool = False) -> Exported:
    """Write the network of the named task, or without a name the whole routed memory.

    A task's network: `images` to `logits`. The memory: `images` to `task`, `logits` and `distance`; the pass that
    names the task is shared with the task's network as far as they are equal, and only the named network runs. A
    description (classes, architectures, inputs and outputs) goes into the file, or lies beside a StableHLO one as
    `<file>.json`. timm's weights are those of one task, whose name is needed where there are several.

    Raises ValueError for what cannot be exported or written so, and RuntimeError where the file's answers differ from
    the network's by more than 1e-4; then nothing is written.
    """
    file = Path(file)
    beside = file.with_name(f"{file.name}.json") if kind == "stablehlo" else None
    _check_place(file, beside, kind, overwrite)
    index = _index(subject, kind, task)
    if kind == "stablehlo":
        stablehlo.check_installed()
    if kind == "onnx":
        onnx_model.check_installed()
    if kind != "timm" and (wanted := num_bytes(subject, index)) > LIMIT:
        raise ValueError(f"weights of {wanted} bytes; a {kind} file contains less than 2 GiB, so export task by task")
    description = describe(subject, index, kind)
    made = _make(subject, index, kind, description)
    checked = check(subject, index, made.run)
    seconds = seconds_per_image(made.run, subject.vit.config.image_size) if made.is_program else None
    notes = list(made.notes)
    if index is None:
        unseen = [task.name for i, task in enumerate(subject.tasks) if i not in checked.tasks]
        notes.append("each image runs the backbone once and its own task's network from the first difference on")
        if unseen:
            notes.append(f"not compared, as no random image led to them: {', '.join(unseen)}")
    _write(file, made.content, beside, description)
    return Exported(file, len(made.content), checked.largest_difference, seconds, tuple(notes))


def _check_place(file: Path, beside: Path | None, kind: Format, overwrite: bool) -> None:
    if file.suffix != SUFFIXES[kind]:
        raise ValueError(f"{file}: a file of kind {kind!r} ends with {SUFFIXES[kind]!r}, not {file.suffix!r}")
    for place in filter(None, (file, beside)):
        if place.is_dir():
            raise ValueError(f"{place} is a folder; expected a file")
        if place.exists() and not overwrite:
            raise ValueError(f"{place} exists already; choose another file, or add --overwrite (overwrite=True)")


def _index(subject: Subject, kind: Format, task: str | None) -> int | None:
    if task is not None:
        return subject.index(task)
    if kind != "timm":
        return None
    if len(subject.tasks) > 1:
        names = ", ".join(known.name for known in subject.tasks)
        raise ValueError(f"timm's weights are those of one task and the memory contains several: name one of {names}")
    return 0


def _make(subject: Subject, index: int | None, kind: Format, description: dict[str, Any]) -> Artefact:
    if kind == "timm":
        assert index is not None
        return timm_weights.make(subject, index, description)
    program, size = _program(subject, index), subject.vit.config.image_size
    if kind == "onnx":
        return onnx_model.make(program, size, outputs_of(index), description)
    return stablehlo.make(program, size)


def _program(subject: Subject, index: int | None) -> Program:
    if index is None:
        return memory_program(subject)
    return task_program(subject.vit, subject.placement, dense_ops(subject, index), subject.tasks[index].head)


def _write(file: Path, content: bytes, beside: Path | None, description: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
    if beside is not None:
        try:
            write_atomically(beside, json.dumps(description, indent=1))
        except BaseException:
            file.unlink()  # nobody could tell its classes
            raise
