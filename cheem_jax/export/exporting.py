"""Export a memory or the network of one task to a file for other software. The file is checked
before it is written."""

import dataclasses
import importlib
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
    FileFunction,
    ImageFunction,
    Subject,
    dense_ops,
    distances_of,
    memory_function,
    num_bytes,
    router_pass,
    stablehlo,
    stored_ops,
    task_function,
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
"""Maximum size of the weights in bytes; flatbuffers and protobuf cannot write 2 GiB."""
TOLERANCE = 1e-4
"""Maximum difference between the results of the file and those of the network. If the largest
absolute logit exceeds 1, the difference is relative to that logit."""
NUM_IMAGES = 6
"""Number of images in each batch of the check; it is fixed, so that few functions are compiled."""
NUM_CANDIDATES = 4 * NUM_IMAGES
NUM_STEPS = 100
"""Maximum number of steps that change an image until the router infers the intended task."""
LARGEST_STEP = 8
"""Change of each pixel value in the first step, in units of 1/255. The change decreases to 1 in the
last step."""
NUM_TIMED = 5


class Exported(NamedTuple):
    """The written file and the result of its check."""

    file: Path
    num_bytes: int
    largest_difference: float
    """Largest difference between the results of the file (logits and distances) and those of the
    network, over all images of the check."""
    seconds_per_image: float | None
    """Seconds that the file needs for one image on this machine; None if the file contains only
    weights."""
    notes: tuple[str, ...]


def kind_of(file: Path) -> Format:
    """Return the format that belongs to the suffix of a file. Raises ValueError for an unknown
    suffix."""
    for kind, suffix in SUFFIXES.items():
        if suffix == file.suffix.lower():
            return kind
    suffixes = ", ".join(f"{suffix} ({kind})" for kind, suffix in SUFFIXES.items())
    raise ValueError(
        f"{str(file)!r} has an unknown suffix; use one of {suffixes}, or set the format"
    )


def export(
    subject: Subject, file: Path, kind: Format, *, task: str | None = None, overwrite: bool = False
) -> Exported:
    """Write the network of one task to `file`; if `task` is None, write the memory with its router.

    A task's network maps `images` to `logits`. A memory maps `images` to `task`, `logits` and
    `distance`. The router runs once. The network of the inferred task then continues the router's
    pass at the first block that differs from the backbone; no other task network runs. The file
    contains a description (classes, architectures, inputs and outputs). For StableHLO, the
    description is instead in a second file, `<file>.json`. A timm file contains one task, so `task`
    is required if the memory has more than one task.

    Raises ValueError if `subject` cannot be exported or `file` is invalid, and, without writing a
    file, if the results of the file differ from those of the network by more than 1e-4; if the
    largest absolute logit exceeds 1, the difference is relative to that logit.
    """
    if kind not in SUFFIXES:
        raise ValueError(f"unknown kind {kind!r}; expected one of {', '.join(SUFFIXES)}")
    description_file = file.with_name(f"{file.name}.json") if kind == "stablehlo" else None
    if file.suffix.lower() != SUFFIXES[kind]:
        raise ValueError(
            f"{file}: a file of kind {kind!r} ends with {SUFFIXES[kind]!r}, not {file.suffix!r}"
        )
    for place in filter(None, (file, description_file)):
        if place.is_dir():
            raise ValueError(f"{place} is a folder; expected a file")
        if place.exists() and not overwrite:
            raise ValueError(
                f"{place} exists; choose another file, or add --overwrite (overwrite=True)"
            )
    names = [task.name for task in subject.tasks]
    if task is None and kind == "timm":
        if len(names) > 1:
            raise ValueError(
                f"timm weights contain one task; choose one of {', '.join(names)} with --task"
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
    if kind != "timm" and (required := num_bytes(subject, index)) > LIMIT:
        raise ValueError(
            f"the weights have {required} bytes, but a {kind} file can contain less than 2 GiB;"
            " export each task separately"
        )
    size = subject.vit.config.image_size
    match kind:
        case "timm":
            assert index is not None
            artefact = timm_weights.make(subject, index, description)
        case "onnx":
            artefact = onnx_model.make(
                _program(subject, index), size, list(description["outputs"]), description
            )
        case "stablehlo":
            artefact = stablehlo(_program(subject, index), size)
    difference, compared = check(subject, index, artefact.run)
    # a timm file contains only weights, so there is no function to time
    seconds = None if kind == "timm" else seconds_per_image(artefact.run, size)
    notes = list(artefact.notes)
    if index is None:
        notes.append(
            "each image runs through the backbone once, and through its task's network from the"
            " first different block"
        )
        if unseen := [name for i, name in enumerate(names) if i not in compared]:
            notes.append(
                "not compared, because the router inferred them for no generated image:"
                f" {', '.join(unseen)}"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    if description_file is None:
        write_atomically(file, artefact.content)
        return Exported(file, len(artefact.content), difference, seconds, tuple(notes))
    # the smaller file first, because a failure of the other one can restore it
    earlier = description_file.read_bytes() if description_file.exists() else None
    write_atomically(description_file, json.dumps(description, indent=1))
    try:
        write_atomically(file, artefact.content)
    except BaseException:
        if earlier is None:
            description_file.unlink()
        else:
            write_atomically(description_file, earlier)
        raise
    return Exported(file, len(artefact.content), difference, seconds, tuple(notes))


def _program(subject: Subject, index: int | None) -> ImageFunction:
    return memory_function(subject) if index is None else task_function(subject, index)


def _description(subject: Subject, index: int | None, kind: Format) -> dict[str, Any]:
    """Describe the network of one task, or the memory if `index` is None, as JSON values."""
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
            **{name: _version(name) for name in PACKAGES[kind]},
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


def _version(module: str) -> str:
    """Return the version of a package; one of another name, such as onnxruntime-gpu, can contain
    the module."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return importlib.import_module(module).__version__


def check(subject: Subject, index: int | None, run: FileFunction) -> tuple[float, set[int]]:
    """Compare the results of a file with those of the network. Return the largest difference and
    the indices of the compared tasks.

    The images are generated. For a memory's file, the router infers each task for at least one
    image, if possible. The file is run on batches of these images, and on a single image. The
    reference results are computed by the unexported network and by the router in NumPy, which are
    independent of the function in the file. For a task's file, which contains merged experts, the
    reference network uses low-rank pairs. For a memory's file, which contains low-rank pairs, the
    reference network uses merged experts. Raises ValueError if the difference is too large.
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
                    # The batch is always full, so that few functions are compiled.
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
        raise ValueError(
            f"the exported file differs from the network by {largest:.3g} (logits up to"
            f" {scale:.3g}), expected at most {TOLERANCE * max(1.0, scale):.3g}; nothing was"
            " written: repeat the command with JAX_PLATFORMS=cpu, or choose another format"
        )
    return largest, compared


def seconds_per_image(run: FileFunction, image_size: int) -> float:
    """Measure the median number of seconds per image; the first call, which compiles, is
    excluded."""
    image = random_images(image_size, 1)
    run(image)
    return statistics.median(timeit.repeat(lambda: run(image), number=1, repeat=NUM_TIMED))


def random_images(image_size: int, num: int) -> UInt8[np.ndarray, "N S S 3"]:
    """Generate images of coloured squares of random sizes. The features of such images vary more
    than the features of noise."""
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
    """Change each image, in at most NUM_STEPS steps, until the router infers its intended task. The
    intended tasks of the images are in `tasks`.

    Each step reduces one value: it changes the pixels against the sign of the value's gradient.
    While a task other than the intended task is nearer, the value is the distance to the intended
    task minus the distance to the nearest other task. Afterwards, the value is the amount by which
    the distance to the intended task's nearest centroid exceeds the task's threshold.
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
        # The conditions include a margin, so that rounding does not change the inferred task.
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
    """Images for which the router infers different tasks (every task, if possible), and the
    router's distances for these images."""

    def __init__(self, subject: Subject):
        candidates = random_images(subject.vit.config.image_size, NUM_CANDIDATES)
        distance, nearest, beyond = self._routed(subject, candidates)
        if unseen := sorted(set(range(len(subject.tasks))) - set(nearest[beyond <= 0].tolist())):
            # For each unseen task, start with the random image whose distance to this task exceeds
            # its distance to the nearest task by the smallest amount.
            begin = (distance - distance.min(axis=1, keepdims=True)).argmin(axis=0)
            led = leading(subject, candidates[begin[unseen]], np.asarray(unseen, np.int32))
            candidates = np.concatenate([candidates, led])
            distance, nearest, beyond = self._routed(subject, candidates)
        # Select one image per inferred task, and then other images until the last batch is full.
        _, first = np.unique(np.where(beyond <= 0, nearest, -1), return_index=True)
        others = [row for row in range(len(candidates)) if row not in first]
        rows = [*first, *others[: -len(first) % NUM_IMAGES]]
        self.images = candidates[rows]
        self.distance = distance[rows]
        self.nearest = nearest[rows]
        self.beyond = beyond[rows]
        """L1 distance to the nearest task minus that task's threshold."""
        # Mahalanobis distances can be in the thousands, so the error of a distance is relative to
        # the largest distance to the same task.
        self.far = np.maximum(np.abs(distance).max(axis=0), 1)

    def _routed(
        self, subject: Subject, images: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the distances to all tasks, the nearest task, and the nearest task's L1 distance
        minus its threshold."""
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
        """Return the largest relative error of the file's distances and of its inferred tasks.

        The error of an inferred task is small if the task differs from the router's task only
        because of rounding at a tie or a threshold.
        """
        distance = self.distance[images]
        nearest = self.nearest[images]
        beyond = self.beyond[images]
        rows = np.arange(len(images))
        farther = (distance[rows, tasks] - distance[rows, nearest]) / self.far[tasks]
        regret = np.where(tasks < 0, np.maximum(-beyond, 0), farther + np.maximum(beyond, 0))
        return max(_largest((distances - distance) / self.far), _largest(regret))


def _largest(values: np.ndarray) -> float:
    """Return the largest absolute value, or inf if a value is non-finite."""
    return float(np.abs(values).max(initial=0)) if np.isfinite(values).all() else float("inf")
