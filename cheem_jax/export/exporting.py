"""Export a memory, or one task's network, to a file for other software; checked before it is
written."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import statistics
import timeit
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int, UInt8

from cheem_jax import __version__
from cheem_jax.core.architecture import to_strings
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.pool import FAR
from cheem_jax.core.routing import Router, centroid_distances
from cheem_jax.data.task import check_names
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.export import onnx_model, timm_weights
from cheem_jax.export.programs import (
    Program,
    Run,
    Subject,
    dense_ops,
    distances_of,
    memory_program,
    num_bytes,
    router_pass,
    stablehlo,
    stored_ops,
    task_program,
    to_centroids,
)
from cheem_jax.run.method import Backbone

Format = Literal["stablehlo", "onnx", "timm"]
SUFFIXES: dict[Format, str] = {"stablehlo": ".stablehlo", "onnx": ".onnx", "timm": ".safetensors"}
PACKAGES: dict[Format, tuple[str, ...]] = {
    "stablehlo": ("jax", "flatbuffers"),
    "onnx": ("jax", "jax2onnx", "onnx", "onnxruntime"),
    "timm": ("safetensors",),
}
LIMIT = 2**31 - 2**20
"""Largest weights in bytes: flatbuffers and protobuf cannot write 2 GiB."""
TOLERANCE = 1e-4
"""Largest accepted difference; relative to the largest logit if that exceeds 1."""
NUM_IMAGES = 6
"""Images per call of the check, so that few functions are compiled."""
NUM_CANDIDATES = 4 * NUM_IMAGES
NUM_STEPS = 100
"""Steps that change an image until the router infers its task, at most."""
LARGEST_STEP = 8
"""Change of a pixel in the first step; it falls to 1 in the last."""
NUM_TIMED = 5


class Exported(NamedTuple):
    """The file that was written, and the result of its check."""

    file: Path
    num_bytes: int
    largest_difference: float
    """Largest difference of logits and distances from the plain network, over images of every
    task."""
    seconds_per_image: float | None
    """Time of the file with one image on this machine; None if the file contains weights only."""
    notes: tuple[str, ...]


def kind_of(file: Path) -> Format:
    """The format of a file's suffix; ValueError for others."""
    for kind, suffix in SUFFIXES.items():
        if suffix == file.suffix.lower():
            return kind
    suffixes = ", ".join(f"{suffix} ({kind})" for kind, suffix in SUFFIXES.items())
    raise ValueError(
        f"{str(file)!r} has an unknown ending; expected one of {suffixes}, or name the format"
    )


def export(
    subject: Subject, file: Path, kind: Format, *, task: str | None = None, overwrite: bool = False
) -> Exported:
    """Write the network of one task, or without `task` the whole memory with its router.

    A task's network: `images` to `logits`. A memory: `images` to `task`, `logits` and `distance`;
    the router's pass is shared with the equal first blocks of each task network, and only the
    inferred task's network runs. The file contains a description (classes, architectures, inputs
    and outputs); for StableHLO it is `<file>.json`. timm weights contain one task, which `task`
    selects unless it is the only one.

    Raises ValueError for a subject or file that cannot be exported, and RuntimeError if the file's
    results differ from the network's by more than 1e-4; then no file is written.
    """
    description_file = file.with_name(f"{file.name}.json") if kind == "stablehlo" else None
    if file.suffix != SUFFIXES[kind]:
        raise ValueError(
            f"{file}: a file of kind {kind!r} ends with {SUFFIXES[kind]!r}, not {file.suffix!r}"
        )
    for place in filter(None, (file, description_file)):
        if place.is_dir():
            raise ValueError(f"{place} is a folder; expected a file")
        if place.exists() and not overwrite:
            raise ValueError(
                f"{place} exists already; choose another file, or add --overwrite (overwrite=True)"
            )
    names = [task.name for task in subject.tasks]
    if task is None and kind == "timm":
        if len(names) > 1:
            raise ValueError(
                f"timm's weights are those of one task: name one of {', '.join(names)}"
            )
        task = names[0]
    if task is not None:
        (task,) = check_names([task], names, "the memory")
    index = None if task is None else names.index(task)
    if missing := [
        package for package in PACKAGES[kind] if importlib.util.find_spec(package) is None
    ]:
        raise ValueError(f"{kind} needs {', '.join(missing)}; pip install 'cheem_jax[export]'")
    description = _description(subject, index, kind)
    if kind != "timm" and (wanted := num_bytes(subject, index)) > LIMIT:
        raise ValueError(
            f"weights of {wanted} bytes; a {kind} file contains less than 2 GiB, so export task by"
            " task"
        )
    size = subject.vit.config.image_size
    match kind:
        case "timm":
            assert index is not None
            made = timm_weights.make(subject, index, description)
        case "onnx":
            made = onnx_model.make(
                _program(subject, index), size, list(description["outputs"]), description
            )
        case "stablehlo":
            made = stablehlo(_program(subject, index), size)
    difference, compared = check(subject, index, made.run)
    # timm weights cannot be run
    seconds = None if kind == "timm" else seconds_per_image(made.run, size)
    notes = list(made.notes)
    if index is None:
        notes.append(
            "each image runs the backbone once and its own task's network from the first"
            " difference on"
        )
        if unseen := [name for i, name in enumerate(names) if i not in compared]:
            notes.append(
                f"not compared, as no image was found that leads to them: {', '.join(unseen)}"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, made.content)
    if description_file is not None:
        try:
            write_atomically(description_file, json.dumps(description, indent=1))
        except BaseException:
            file.unlink()  # without its description the file has no class names
            raise
    return Exported(file, len(made.content), difference, seconds, tuple(notes))


def _program(subject: Subject, index: int | None) -> Program:
    return memory_program(subject) if index is None else task_program(subject, index)


def _description(subject: Subject, index: int | None, kind: Format) -> dict[str, Any]:
    """The description of one task's network, or of the memory (None), as JSON values."""
    config = subject.vit.config
    tasks = subject.tasks if index is None else (subject.tasks[index],)
    images = (
        f"uint8 [batch, {config.image_size}, {config.image_size}, 3], RGB, resized to a square"
        " (bicubic)"
    )
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
        "versions": {
            "cheem_jax": __version__,
            **{name: importlib.metadata.version(name) for name in PACKAGES[kind]},
        },
    }
    if index is None:
        rejection = (
            "; -1 where the distance to the nearest centroid or class mean of that task, in L1,"
            " exceeds its threshold"
        )
        description["outputs"] = {
            "task": (
                "int32 [batch], position in"
                f" `tasks`{'' if subject.thresholds is None else rejection}"
            ),
            "logits": f"{logits} of that task; -1e30 in columns behind its last class{calibrated}",
            "distance": f"float32 [batch, {len(tasks)}] to each task, as the router compares them",
        }
        description["router"] = {
            **dataclasses.asdict(subject.router),
            "thresholds": None if subject.thresholds is None else list(subject.thresholds),
        }
    return description


def check(subject: Subject, index: int | None, run: Run) -> tuple[float, set[int]]:
    """The largest difference of a file's results from ours, and the tasks that were compared.

    A memory's file is checked with images of each of its tasks, in batches and one alone. Our
    results are those of the plain network and of the router in NumPy, from which no file is made. A
    task's file has merged experts, so they are compared with low-rank pairs, and vice versa for a
    memory. Raises RuntimeError if the difference is too large.
    """
    graphdef, state = nnx.split(subject.vit)
    features = jax.jit(
        lambda state, ops, images: nnx.merge(graphdef, state)(
            images, ops, placement=subject.placement
        )
    )
    routing = None if index is not None else _Routing(subject)
    images = (
        random_images(subject.vit.config.image_size, NUM_IMAGES)
        if routing is None
        else routing.images
    )
    compared = set[int]()
    scale = 0.0
    differences = list[float]()
    for rows in [
        np.arange(len(images))[begin : begin + NUM_IMAGES]
        for begin in range(0, len(images), NUM_IMAGES)
    ] + [np.arange(1)]:
        results = run(images[rows])
        tasks = np.full(len(rows), index) if routing is None else results["task"]
        differences += (
            [] if routing is None else [routing.difference(rows, tasks, results["distance"])]
        )
        logits = {-1: np.zeros((len(rows), 0))}
        for row, task in enumerate(tasks.tolist()):
            if task not in logits:
                head = subject.tasks[task].head
                ops = stored_ops(subject)[task] if routing is None else dense_ops(subject, task)
                with jax.default_matmul_precision("highest"):
                    # of whole batches, so that few functions are compiled
                    features_of_images = np.asarray(
                        features(
                            state, ops, images[:NUM_IMAGES] if len(rows) == 1 else images[rows]
                        )
                    )
                logits[task] = features_of_images @ np.asarray(head.weight) + np.asarray(head.bias)
                compared.add(task)
                scale = max(scale, _largest(logits[task]))
            wanted = logits[task][row]
            row_logits = results["logits"][row]
            differences += [
                _largest(row_logits[: len(wanted)] - wanted),
                _largest(row_logits[len(wanted) :] / FAR - 1),
            ]
    largest = max(differences)
    if not largest <= TOLERANCE * max(1.0, scale):
        raise RuntimeError(
            f"the exported file differs from the network by {largest:.3g} (logits up to"
            f" {scale:.3g}); nothing was written"
        )
    return largest, compared


def seconds_per_image(run: Run, image_size: int) -> float:
    """Median time of one image in seconds; the first call is not counted."""
    image = random_images(image_size, 1)
    run(image)
    return statistics.median(timeit.repeat(lambda: run(image), number=1, repeat=NUM_TIMED))


def random_images(image_size: int, num: int) -> UInt8[np.ndarray, "N S S 3"]:
    """Images of coloured squares of any size; their features differ more than those of noise."""
    rng = np.random.default_rng(0)
    images = []
    for _ in range(num):
        squares = 2 ** rng.integers(0, image_size.bit_length())
        place = np.arange(image_size) * squares // image_size
        images.append(rng.integers(0, 256, (squares, squares, 3), dtype=np.uint8)[place][:, place])
    return np.stack(images)


def leading(
    subject: Subject, images: UInt8[np.ndarray, "N S S 3"], tasks: Int[np.ndarray, "N"]
) -> UInt8[np.ndarray, "N S S 3"]:
    """Change each image step by step until the router infers its task.

    Each step follows the sign of the gradient: of the lead of other tasks, then of the distance
    beyond the task's threshold.
    """
    distances = distances_of(subject)
    to_own = to_centroids(subject)
    mean, std = jnp.asarray(subject.vit.config.mean), jnp.asarray(subject.vit.config.std)
    thresholds = jnp.asarray(subject.thresholds or [jnp.inf] * len(subject.tasks))

    def behind(pixels, tasks):
        features, _ = router_pass(subject, (pixels / 255 - mean) / std)
        distance = distances(features)
        rows = jnp.arange(len(tasks))
        others = jnp.where(jnp.arange(len(subject.tasks)) == tasks[:, None], jnp.inf, distance).min(
            axis=1
        )
        lag = distance[rows, tasks] - others
        beyond = to_own(features)[rows, tasks] - thresholds[tasks]
        # a margin against rounding
        lags, is_beyond = lag > -1e-4 * jnp.abs(others), beyond > -1e-4 * thresholds[tasks]
        remaining = jnp.where(lags, lag, jnp.where(is_beyond, beyond, 0.0))
        return remaining.sum(), lags | is_beyond

    slopes = jax.jit(jax.grad(behind, has_aux=True))
    changed = []
    for begin in range(0, len(tasks), NUM_IMAGES):
        wanted = np.resize(tasks[begin : begin + NUM_IMAGES], NUM_IMAGES)
        pixels = np.resize(
            images[begin : begin + NUM_IMAGES], (NUM_IMAGES, *images.shape[1:])
        ).astype(np.float32)
        for step in range(NUM_STEPS):
            with jax.default_matmul_precision("highest"):
                slope, is_remaining = map(np.asarray, slopes(pixels, wanted))
            if not is_remaining.any():
                break
            size = max(1, round(LARGEST_STEP * (1 - step / NUM_STEPS)))
            pixels = np.clip(
                pixels - size * np.sign(slope) * is_remaining[:, None, None, None], 0, 255
            )
        changed.append(pixels.astype(np.uint8)[: len(tasks[begin : begin + NUM_IMAGES])])
    return np.concatenate(changed)


class _Routing:
    """Images of each task, and the router's distances for them."""

    def __init__(self, subject: Subject):
        candidates = random_images(subject.vit.config.image_size, NUM_CANDIDATES)
        distance, nearest, beyond = self._routed(subject, candidates)
        if unseen := sorted(set(range(len(subject.tasks))) - set(nearest[beyond <= 0].tolist())):
            # the random image with the smallest lead of other tasks
            begin = (distance - distance.min(axis=1, keepdims=True)).argmin(axis=0)
            led = leading(subject, candidates[begin[unseen]], np.asarray(unseen, np.int32))
            candidates = np.concatenate([candidates, led])
            distance, nearest, beyond = self._routed(subject, candidates)
        # one image per inferred task first, then others
        _, first = np.unique(np.where(beyond <= 0, nearest, -1), return_index=True)
        others = [row for row in range(len(candidates)) if row not in first]
        rows = [*first, *others[: -len(first) % NUM_IMAGES]]
        self.images = candidates[rows]
        self.distance = distance[rows]
        self.nearest = nearest[rows]
        self.beyond = beyond[rows]
        """Distance of the nearest task minus its threshold."""
        # Mahalanobis distances can be thousands: errors are relative to a task's largest distance
        self.far = np.maximum(np.abs(distance).max(axis=0), 1)

    def _routed(
        self, subject: Subject, images: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distances to all tasks, the nearest task, and its distance minus its threshold."""
        engine = EngineConfig(executor="stages")
        executor = make_executor(subject.vit, subject.placement, engine, batch_size=NUM_IMAGES)
        with jax.default_matmul_precision("highest"):
            read = Backbone(executor, subject.router).features(images, batch_size=NUM_IMAGES)
        tasks = subject.tasks
        router = Router(subject.router, tuple(task.router_statistics for task in tasks))
        distance = router.distances(read)
        nearest = distance.argmin(axis=1)
        to_centroids = centroid_distances(read, [task.centroids for task in tasks])
        thresholds = np.asarray(subject.thresholds or [np.inf] * len(tasks))
        return distance, nearest, to_centroids[np.arange(len(read)), nearest] - thresholds[nearest]

    def difference(self, images: np.ndarray, tasks: np.ndarray, distances: np.ndarray) -> float:
        """The largest error of the file's distances, and of the distances of its tasks.

        A tie or threshold that rounding decides is a small error.
        """
        distance = self.distance[images]
        nearest = self.nearest[images]
        beyond = self.beyond[images]
        rows = np.arange(len(images))
        farther = (distance[rows, tasks] - distance[rows, nearest]) / self.far[tasks]
        regret = np.where(tasks < 0, np.maximum(-beyond, 0), farther + np.maximum(beyond, 0))
        return max(_largest((distances - distance) / self.far), _largest(regret))


def _largest(values: np.ndarray) -> float:
    """The largest absolute value; inf if a value is non-finite."""
    return float(np.abs(values).max(initial=0)) if np.isfinite(values).all() else float("inf")
