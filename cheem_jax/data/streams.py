"""Load streams by name for the commands.

`find_stream` checks that all tasks are available, which is fast. The function that it returns
decodes their images, whose size depends on the backbone.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from cheem_jax.core.images import Images
from cheem_jax.data.benchmarks.table import Order
from cheem_jax.data.demo import demo_stream
from cheem_jax.data.load import ImagesConfig, OpenPhase, load_tasks, load_train
from cheem_jax.data.sources import MissingTasks, cache_dir_of, plan_source
from cheem_jax.data.task import Stream, select

DEMO = "demo"


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """Tasks and their images."""

    stream: str = "mtil"
    """mtil or vdd (see `cheem data list`), a stream file (TOML), a folder with one folder or zip
    per task, or demo: the bundled stream of small tasks."""
    data_dir: Path | None = None
    """Folder of the prepared data sets; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    tasks: str | None = None
    """Tasks in learning order, separated by commas; default: all, in the stream's order."""
    order: Order = "default"
    """Order of MTIL's tasks. `default` is the order of the paper's tables, `paper_a` to `paper_c`
    are those of its table on task orders, and `zscl_ii` is the second order of ZSCL."""
    split_seed: int = 0
    """Seed of the splits that a data set lacks. It is independent of `--seed`, so that runs with
    several seeds share their splits."""
    images: ImagesConfig = ImagesConfig()
    """Storage of decoded images."""

    @property
    def task_names(self) -> list[str] | None:
        """The selected tasks; None: all."""
        return None if self.tasks is None else [name.strip() for name in self.tasks.split(",")]

    @property
    def cached_images(self) -> ImagesConfig:
        """A copy of `images` in which an empty `cache_dir` is replaced by the data folder's one, if
        the stream uses the data folder."""
        cache_dir = self.images.cache_dir or cache_dir_of(self.stream, self.data_dir)
        return dataclasses.replace(self.images, cache_dir=cache_dir)


def find_stream(config: StreamConfig) -> Callable[[int, OpenPhase], Stream]:
    """Check that a stream is available; return the function that loads it at an image size.

    Raises MissingTasks for tasks that are not prepared, FileNotFoundError, or ValueError.
    """
    names = config.task_names
    if config.stream == DEMO:
        if config.order != "default":
            raise ValueError(
                f"--order {config.order} belongs to mtil; name the demo stream's tasks in the order"
                " you want"
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
        )
    except MissingTasks as error:
        raise MissingTasks(
            f"{error}; or give images of your own with --stream FOLDER, one folder or zip per task"
            " in it, or --stream demo",
            error.advice,
        ) from error

    def load(image_size: int, phase: OpenPhase) -> Stream:
        return Stream(name, load_tasks(plans, image_size, config.cached_images, phase))

    return load


def load_base_images(
    source: str, config: StreamConfig, *, image_size: int, phase: OpenPhase
) -> Images:
    """Return the training images, uint8 `[N, S, S, 3]`, of the pretraining data. Other splits are
    not read.

    Raises ValueError if the source has more than one task.
    """
    _, plans = plan_source(source, data_dir=config.data_dir, seed=config.split_seed)
    if len(plans) != 1:
        raise ValueError(
            f"--base-data {source!r} contains {len(plans)} tasks, expected one:"
            f" {[plan.name for plan in plans]}"
        )
    return load_train(plans[0], image_size, config.cached_images, phase).images
