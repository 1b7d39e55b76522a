"""From what a user writes to plans: a benchmark, one of its tasks, a TOML file, a manifest, a TFDS name, a folder."""

import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from cheem_jax.data.benchmarks.prepare import status_of
from cheem_jax.data.benchmarks.table import BY_NAME, Benchmark, Order, order_of
from cheem_jax.data.benchmarks.tasks import plan_benchmark
from cheem_jax.data.cache import default_directory
from cheem_jax.data.folder import plan_stream
from cheem_jax.data.manifest import plan_manifest
from cheem_jax.data.plan import Plan
from cheem_jax.data.records import default_data_dir, plan_tfds
from cheem_jax.data.stream_file import plan_stream_file
from cheem_jax.data.task import check_names
from cheem_jax.paths import absolute

BENCHMARKS: tuple[Benchmark, ...] = get_args(Benchmark)


class MissingTasks(ValueError):
    """Tasks that are not prepared; `advice` tells line by line how to get each."""

    def __init__(self, message: str, advice: Sequence[str]):
        super().__init__(message)
        self.advice = tuple(advice)


def plan_source(
    source: str,
    tasks: Sequence[str] | None = None,
    *,
    data_dir: Path | None = None,
    order: Order = "default",
    seed: int = 0,
) -> tuple[str, list[Plan]]:
    """The name of a stream and its tasks, in learning order.

    `source` is `mtil` or `vdd`, the name of one of their tasks, `tfds:NAME[/CONFIG][:VERSION]`, a TOML file, a manifest
    (CSV or Parquet), or a folder or zip; a name before a file of that name. `tasks` selects and orders, `order` is one
    of MTIL's, `seed` draws splits that are missing. Raises MissingTasks, FileNotFoundError or ValueError.
    """
    data_dir = None if data_dir is None else absolute(data_dir)
    if source in BENCHMARKS:
        known = order_of(source, order)
        if tasks is not None:
            check_names(tasks, known, f"benchmark {source!r}")
        return source, _plan_benchmark(source, tasks or known, data_dir or default_data_dir(), seed)
    if order != "default":
        raise ValueError(f"order {order!r} belongs to mtil, not to {source!r}; name tasks in the order you want")
    path = absolute(source)
    if source in BY_NAME:
        name, plans = source, _plan_benchmark(source, [source], data_dir or default_data_dir(), seed)
    elif source.startswith("tfds:"):
        name, plans = source, [plan_tfds(source.removeprefix("tfds:"), data_dir, seed=seed)]
    elif path.suffix.lower() == ".toml":
        return plan_stream_file(path, tasks, data_dir=data_dir, seed=seed)
    elif path.suffix.lower() in (".csv", ".tsv", ".parquet"):
        name, plans = path.stem, [plan_manifest(path, seed=seed)]
    else:
        if not path.exists():
            raise FileNotFoundError(f"{source}: no such folder, zip, stream file or benchmark{_nearest(source, path)}")
        return path.resolve().stem if path.is_file() else path.resolve().name, plan_stream(path, tasks, seed=seed)
    if tasks is not None:
        check_names(tasks, [plan.name for plan in plans], source)
    return name, plans


def images_dir(data_dir: Path | None) -> Path:
    """Where decoded pictures of what lies in a data folder are kept."""
    return absolute(data_dir or default_data_dir()) / "cheem_jax" / "images"


def cache_dir_of(source: str, data_dir: Path | None) -> Path:
    """Where decoded pictures of a source are kept: in the data folder, if it takes part, else in the user's cache."""
    from_data_dir = data_dir is not None or source in (*BENCHMARKS, *BY_NAME) or source.startswith("tfds:")
    return images_dir(data_dir) if from_data_dir else default_directory()


def _plan_benchmark(source: str, names: Sequence[str], data_dir: Path, seed: int) -> list[Plan]:
    missing = {name: status for name in names if (status := status_of(BY_NAME[name], data_dir)).state != "ready"}
    if missing:
        raise MissingTasks(
            f"{len(missing)} of {len(names)} tasks of {source!r} are not prepared in {data_dir}: {', '.join(missing)}; "
            f""
            f"`cheem data prepare {source} --data-dir {shlex.quote(str(data_dir))}` gets what can be got",
            [f"{name}: {status.advice}" for name, status in missing.items()],
        )
    return [plan_benchmark(name, data_dir, seed=seed) for name in names]


def _nearest(source: str, path: Path) -> str:
    """What was probably meant: a benchmark, one of their tasks, or something that lies beside."""
    beside = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(source, [*BENCHMARKS, *BY_NAME, *beside], n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else f"; benchmarks are {', '.join(BENCHMARKS)}"
