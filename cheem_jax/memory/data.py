"""What a person gives: tasks to learn from, pictures to answer."""

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
Picture = str | Path | bytes | np.ndarray | Image.Image


def tasks_of(
    data: Data,
    image_size: int,
    progress: Progress | None = None,
    *,
    upright: bool,
    purpose: Purpose = "learn",
    only: str | None = None,
) -> tuple[Task, ...]:
    """Tasks as they are, or read from what `cheem learn` takes: a folder, a zip, a TOML file, a
    benchmark's name.

    Raises ValueError for tasks that do not do for the purpose. `only` as for `load_tasks`.
    """
    match data:
        case Task():
            tasks = (data,)
        case Stream():
            tasks = data.tasks
        case str() | Path():
            is_there = (
                isinstance(data, Path) and absolute(data).exists()
            )  # so that it is no benchmark's name
            source = str(absolute(data) if is_there else data)
            plans = plan_source(source, purpose=purpose)[1]
            return decoded(plans, image_size, ImagesConfig(), progress, upright=upright, only=only)
        case _:
            tasks = tuple(data)
    if repeated := repeats(task.name for task in tasks):
        raise ValueError(f"task names must be unique, repeated: {repeated}")
    return tuple(
        one if one.purpose == purpose else dataclasses.replace(one, purpose=purpose)
        for one in tasks
    )


def decoded(
    plans: Sequence[Plan],
    image_size: int,
    config: ImagesConfig,
    progress: Progress | None,
    *,
    upright: bool,
    only: str | None = None,
) -> tuple[Task, ...]:
    """Tasks with their images; `progress` also says what is left out or looks wrong. See
    `Plan.turned`.

    `only` as for `load_tasks`.
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


def files_in(place: Path) -> tuple[list[str], list[str]]:
    """A file itself, or the images below a folder, and lines about what else is there; ValueError
    where none is."""
    folder = absolute(place)
    if not folder.is_dir():
        return [str(place)], []
    found = look_through(folder)
    if not found.images:
        raise ValueError(
            f"{str(place)!r} contains no image; expected an image file, or a folder of"
            f" some{found.told()}"
        )
    return [str(place / name) for name in found.images], found.notes()


class NamedFiles(FolderFiles):
    """Files by any path, and pictures without one; errors and answers name each file as it was
    given, others `-`.

    Raises ValueError for what is not an image, and for arrays other than uint8 `[H, W, 3]`.
    """

    def __init__(self, given: Sequence[Picture], *, upright: bool):
        super().__init__(
            Path(), [str(one) if isinstance(one, str | Path) else "-" for one in given]
        )
        self.given = given
        self.upright = upright
        self._loading = threading.Lock()
        for row, one in enumerate(given):
            if isinstance(one, np.ndarray):
                fits = one.dtype == np.uint8 and one.shape[2:] == (3,)
                kind = f"{one.dtype} {list(one.shape)}"
            else:
                fits = isinstance(one, str | Path | bytes | Image.Image)
                kind = f"a {type(one).__name__}"
            if not fits:
                raise ValueError(
                    f"image {row} is {kind}, expected a file, bytes, a PIL image or uint8 [H, W, 3]"
                )

    def where(self, row: int) -> str:
        """See `FolderFiles.where`."""
        return self.keys[row]

    def picture(self, row: int) -> bytes | Image.Image:
        """See `Encoded.picture`."""
        one = self.given[row]
        if isinstance(one, Image.Image):
            with (
                self._loading
            ):  # the same one may be given twice, and its file is read from one place
                one.load()
            return one
        if isinstance(one, bytes):
            return one
        return super().picture(row) if isinstance(one, str | Path) else Image.fromarray(one)

    def file(self, row: int) -> Path:
        """See `FolderFiles.file`."""
        return absolute(self.keys[row])
