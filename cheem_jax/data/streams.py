"""Load streams by name for the `cheem` commands.

`find_stream` checks quickly that all tasks are available. It returns a function that decodes the
images of these tasks at the image size of the backbone.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from cheem_jax.core.images import Images
from cheem_jax.data.benchmarks.table import Order
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.load import ImagesConfig, OpenPhase, load_tasks, load_train
from cheem_jax.data.sources import MissingTasks, cache_dir_of, plan_source
from cheem_jax.data.task import ClassSplit, Stream, select

DEMO = "demo"
MAX_SEED_DIGITS = 10
"""Number of decimal digits of the largest seed of a class order, 2^32 - 1."""


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """Tasks and their images."""

    stream: str = "mtil"
    """mtil or vdd (see `cheem data list`), a protocol of class-incremental learning such as
    cub200_b0_inc20 (see docs/data.md), a stream file (TOML), a folder with one folder or zip
    per task, or demo: the bundled stream of small tasks."""
    data_dir: Path | None = None
    """Folder of the prepared data sets; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    tasks: str | None = None
    """Tasks in learning order, separated by commas; default: all, in the stream's order."""
    classes_per_task: int | None = None
    """Divide the classes of one data set into tasks with this many classes each (at least 2); the
    last task has the remaining classes."""
    first_task: int | None = None
    """Number of classes in the first task; default: the same number as in the other tasks."""
    class_order: str | None = None
    """Order in which the classes are divided into tasks: a seed (1993 is the seed of the library
    PILOT), or all class names, separated by commas (a name that contains a comma needs a stream
    file); default: the data set's order."""
    order: Order = "default"
    """Order of MTIL's tasks. `default` is the order of the paper's tables, `paper_a` to `paper_c`
    are the orders of the paper's table on task orders, and `zscl_ii` is the second order of
    the paper that introduced MTIL."""
    split_seed: int = 0
    """Seed that determines how missing splits are cut from the training images. It is independent
    of `--seed`, so that runs with different seeds share their splits."""
    images: ImagesConfig = ImagesConfig()
    """Storage of decoded images."""

    @property
    def task_names(self) -> list[str] | None:
        """The selected tasks; None selects all tasks."""
        return None if self.tasks is None else [name.strip() for name in self.tasks.split(",")]

    @property
    def class_split(self) -> ClassSplit | None:
        """The division of classes that the options describe; None if none of these options is
        set."""
        order = self.class_order
        if self.classes_per_task is None and self.first_task is None and order is None:
            return None
        if order is not None:
            names = tuple(name.strip() for name in order.split(","))
            if not all(names) or (
                order.strip().isdecimal() and len(order.strip()) > MAX_SEED_DIGITS
            ):
                raise ValueError(
                    f"--class-order is {order[:40]!r}; expected a seed of at most"
                    f" {MAX_SEED_DIGITS} digits, or all class names, separated by commas"
                )
            order = int(names[0]) if len(names) == 1 and names[0].isdecimal() else names
        return ClassSplit(self.classes_per_task, self.first_task, order)

    @property
    def cached_images(self) -> ImagesConfig:
        """The settings `images`, in which a `cache_dir` of None is replaced by the result of
        `cache_dir_of`."""
        cache_dir = self.images.cache_dir or cache_dir_of(self.stream, self.data_dir)
        return dataclasses.replace(self.images, cache_dir=cache_dir)


def find_stream(config: StreamConfig) -> Callable[[int, OpenPhase], Stream]:
    """Check that a stream is available. Return the function that loads it at an image size.

    Raises MissingTasks if tasks are not prepared, FileNotFoundError if files are missing, and
    ValueError if options or files are invalid.
    """
    names = config.task_names
    class_split = config.class_split
    if config.stream == DEMO:
        if class_split is not None:
            raise ValueError(
                "--classes-per-task divides one data set, and the demo stream has several tasks"
            )
        if config.order != "default":
            raise ValueError(
                f"--order {config.order} is an order of mtil; for the demo stream, give the order"
                " with --tasks"
            )
        if config.split_seed or config.images.keep in ("cache", "stream"):
            raise ValueError(
                "--split-seed and --images.keep are for data on the disk, and the demo stream is"
                " made in memory; leave them out"
            )

        def load_demo(image_size: int, phase: OpenPhase) -> Stream:
            stream = demo_stream(image_size=image_size)
            return stream if names is None else select(stream, names)

        return load_demo
    try:
        name, plans = plan_source(
            config.stream,
            names,
            data_dir=config.data_dir,
            order=config.order,
            seed=config.split_seed,
            class_split=class_split,
        )
    except MissingTasks as error:
        raise MissingTasks(
            f"{error}; or use your own images with --stream FOLDER (a folder or zip per task), or"
            " --stream demo",
            error.advice,
        ) from error

    def load(image_size: int, phase: OpenPhase) -> Stream:
        return Stream(name, load_tasks(plans, image_size, config.cached_images, phase))

    return load


def load_base_images(
    source: str, config: StreamConfig, *, image_size: int, phase: OpenPhase
) -> Images:
    """Load the training images of the pretraining data, uint8 `[N, S, S, 3]`. Other splits are not
    read.

    Raises ValueError if the source has more than one task.
    """
    _, plans = plan_source(source, data_dir=config.data_dir, seed=config.split_seed)
    if len(plans) != 1:
        raise ValueError(
            f"--base-data {source!r} contains {len(plans)} tasks, expected one:"
            f" {[plan.name for plan in plans]}"
        )
    return load_train(plans[0], image_size, config.cached_images, phase).images
