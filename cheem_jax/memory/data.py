"""What a person gives: tasks to learn from, pictures to answer."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from cheem_jax.core.paths import absolute
from cheem_jax.data.decode import decode_image
from cheem_jax.data.load import ImagesConfig, load_tasks
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import Plan, Stream, Task, repeats
from cheem_jax.run.progress import Progress

Data = str | Path | Task | Stream | Sequence[Task]
Picture = str | Path | bytes | np.ndarray | Image.Image


def tasks_of(data: Data, image_size: int, progress: Progress | None = None) -> tuple[Task, ...]:
    """Tasks as they are, or read from what `cheem learn` takes: a folder, a zip, a TOML file, a benchmark's name."""
    match data:
        case Task():
            return (data,)
        case Stream():
            tasks = data.tasks
        case str() | Path():
            return decoded(plan_source(str(data))[1], image_size, ImagesConfig(), progress)
        case _:
            tasks = tuple(data)
    if repeated := repeats(task.name for task in tasks):
        raise ValueError(f"task names must be unique, repeated: {repeated}")
    return tasks


def decoded(
    plans: Sequence[Plan], image_size: int, config: ImagesConfig, progress: Progress | None
) -> tuple[Task, ...]:
    """Tasks with their images; `progress` also says which files beside them are left out."""
    if progress is None:
        return load_tasks(plans, image_size, config)
    for note in (note for plan in plans for note in plan.ignored):
        progress.say(note)
    return load_tasks(
        plans, image_size, config, lambda task, num_images: progress.phase("decode", task=task, total=num_images)
    )


def pixels_of(image: Picture, size: int, name: str) -> np.ndarray:
    """Any picture as uint8 `[S, S, 3]`; ValueError or OSError naming what is none."""
    match image:
        case str() | Path():
            try:
                data = absolute(image).read_bytes()
            except FileNotFoundError:
                raise FileNotFoundError(f"{image}: no such file") from None
            return decode_image(data, size, name=str(image))
        case bytes():
            return decode_image(image, size, name=name)
        case Image.Image():
            packed = io.BytesIO()
            modes = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
            (image if image.mode in modes else image.convert("RGB")).save(packed, "PNG")
            return decode_image(packed.getvalue(), size, name=name)
    if not isinstance(image, np.ndarray):
        raise ValueError(f"{name} is a {type(image).__name__}, expected a file, bytes, a PIL image or uint8 [H, W, 3]")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        raise ValueError(f"{name} is {image.dtype} {list(image.shape)}, expected uint8 [H, W, 3] or an image file")
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
