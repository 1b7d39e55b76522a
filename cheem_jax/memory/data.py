"""User input: tasks to learn or evaluate, and images to predict."""

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from cheem_jax.core.paths import absolute
from cheem_jax.data.files import FolderFiles, look_through
from cheem_jax.data.load import ImagesConfig, load_tasks
from cheem_jax.data.sources import plan_source
from cheem_jax.data.task import Plan, Purpose, Stream, Task, repeats
from cheem_jax.data.verify import notes_on
from cheem_jax.run.progress import Progress

Data = str | Path | Task | Stream | Sequence[Task]
ImageInput = str | Path | bytes | np.ndarray | Image.Image


def read_tasks(
    data: Data,
    image_size: int,
    progress: Progress | None = None,
    *,
    upright: bool,
    purpose: Purpose = "learn",
    only: str | None = None,
) -> tuple[Task, ...]:
    """Return the tasks in `data`, or read tasks from a data source that `cheem learn` accepts.

    A data source is a folder, a zip file, a TOML file or the name of a benchmark. Raises ValueError
    for tasks that do not fit `purpose`. `only` restricts reading to one split, as in `load_tasks`.
    """
    match data:
        case Task():
            tasks = (data,)
        case Stream():
            tasks = data.tasks
        case str() | Path():
            # An absolute path cannot be confused with the name of a benchmark.
            is_path = isinstance(data, Path) and absolute(data).exists()
            source = str(absolute(data) if is_path else data)
            plans = plan_source(source, purpose=purpose)[1]
            return decode(plans, image_size, ImagesConfig(), progress, upright=upright, only=only)
        case _:
            tasks = tuple(data)
    if repeated := repeats(task.name for task in tasks):
        raise ValueError(f"task names must be unique, repeated: {repeated}")
    return tuple(
        task if task.purpose == purpose else dataclasses.replace(task, purpose=purpose)
        for task in tasks
    )


def decode(
    plans: Sequence[Plan],
    image_size: int,
    config: ImagesConfig,
    progress: Progress | None,
    *,
    upright: bool,
    only: str | None = None,
) -> tuple[Task, ...]:
    """Decode the images of planned tasks, and report ignored files and suspicious images.

    `upright`: whether images are rotated according to their EXIF orientation. `only` restricts
    decoding to one split, as in `load_tasks`.
    """
    plans = [plan.turned(upright) for plan in plans]
    if progress is None:
        return load_tasks(plans, image_size, config, only=only)
    for note in (note for plan in plans for note in plan.ignored):
        progress.say(note)
    tasks = load_tasks(
        plans,
        image_size,
        config,
        lambda task, num_images: progress.phase("decode", task=task, total=num_images),
        only=only,
    )
    for plan, task in zip(plans, tasks, strict=True):
        for note in notes_on(plan, task):
            progress.say(note)
    return tasks


def list_images(path: str | Path) -> tuple[list[str], list[str]]:
    """Return the paths of all images in a folder and its subfolders, and notes on other files. If
    `path` is a file, return only this path, without notes.

    Raises ValueError if the folder contains no images.
    """
    folder = absolute(path)
    if not folder.is_dir():
        return [str(path)], []
    listing = look_through(folder)
    if not listing.images:
        raise ValueError(
            f"{str(path)!r} contains no images; give an image file or a folder of images"
            f"{listing.message()}"
        )
    return [str(Path(path) / name) for name in listing.images], listing.notes()


class NamedFiles(FolderFiles):
    """Image files at arbitrary paths, and images that are bytes, arrays or PIL images.

    Errors and predictions refer to a file by the path that the user gave, and to any other image as
    `-`. Raises ValueError for other types, and for arrays other than uint8 `[H, W, 3]`.
    """

    def __init__(self, images: Sequence[ImageInput], *, upright: bool):
        super().__init__(
            Path(), [str(one) if isinstance(one, str | Path) else "-" for one in images]
        )
        self.images = images
        self.upright = upright
        self._loading = threading.Lock()
        for row, image in enumerate(images):
            if isinstance(image, np.ndarray):
                fits = image.dtype == np.uint8 and image.shape[2:] == (3,) and image.size > 0
                kind = f"{image.dtype} {list(image.shape)}"
            else:
                fits = isinstance(image, str | Path | bytes | Image.Image)
                kind = f"a {type(image).__name__}"
            if not fits:
                raise ValueError(
                    f"image {row} is {kind}, expected a file, bytes, a PIL image or uint8 [H, W, 3]"
                )

    def where(self, row: int) -> str:
        """Return the path of the file at `row`, or `-` for an image that is not a file."""
        return self.keys[row]

    def picture(self, row: int) -> bytes | Image.Image:
        """Return the image at `row` for decoding, as bytes or as a PIL image."""
        match image := self.images[row]:
            case Image.Image():
                try:
                    with self._loading:  # else, two threads could load the same file at once
                        image.load()
                except Exception as error:  # Pillow raises errors of almost any type
                    where = self.where(row)
                    raise ValueError(f"{where}: the image cannot be decoded: {error}") from error
                return image
            case bytes():
                return image
            case np.ndarray():
                return Image.fromarray(image)
        return super().picture(row)

    def file(self, row: int) -> Path:
        """Return the absolute path of the file at `row`."""
        return absolute(self.keys[row])
