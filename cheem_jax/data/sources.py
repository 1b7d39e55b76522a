"""Plan the tasks of a source: a benchmark, one of its tasks, a stream file, a manifest, a folder,
or a data set of TFDS or the Hugging Face hub."""

import dataclasses
import difflib
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from cheem_jax.core.paths import absolute
from cheem_jax.data.benchmarks.prepare import plan_of, status_of
from cheem_jax.data.benchmarks.table import BY_NAME, PROTOCOLS, Benchmark, Order, task_order
from cheem_jax.data.class_split import name_split, split_by_class
from cheem_jax.data.folder import holds_images, name_of, plan_manifest, plan_stream, plan_task
from cheem_jax.data.records import HUB, default_data_dir, name_in, plan_hub, plan_tfds
from cheem_jax.data.task import ClassSplit, Plan, Purpose, check_names, repeats

BENCHMARKS: tuple[Benchmark, ...] = get_args(Benchmark)
KINDS = ("path", "manifest", "tfds", "hub", "benchmark")
"""Keys that locate the images of a `[[task]]` in a stream file."""
CLASS_SPLIT = tuple(field.name for field in dataclasses.fields(ClassSplit))
"""Keys of a stream file that divide the classes of the file's only task."""
MAX_STREAM_FILE_BYTES = 2**20


class MissingTasks(ValueError):
    """Some tasks are not prepared. `advice` contains one line per such task, which says how to
    prepare it."""

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
    purpose: Purpose = "learn",
    class_split: ClassSplit | None = None,
) -> tuple[str, list[Plan]]:
    """Return the name of a stream, and the plans of its tasks in learning order.

    `source` is one of: `mtil` or `vdd`; a task of these benchmarks; a protocol (`PROTOCOLS`); a
    data set of a protocol; `tfds:NAME[/CONFIG][:VERSION]`; `hf:NAME[:CONFIG]` (on the Hugging Face
    hub); a TOML file; a manifest (CSV or Parquet); a folder; a zip. A name is refused as ambiguous
    if the working directory contains a zip, a saved data set or a folder of images with this name.
    `tasks` selects and orders the tasks. `order` is one of MTIL's orders. `seed` determines how
    missing splits are cut. `purpose` determines the requirements for each task. `class_split`
    divides the classes of the source into tasks. In this case, the source must be a single data
    set, and `tasks` selects among the resulting tasks. Fields of `class_split` that are not None
    override the division in a protocol or stream file. Raises MissingTasks if tasks are not
    prepared, FileNotFoundError if files are missing, OSError if the hub does not answer, and
    ValueError if the source or an option is invalid.
    """
    data_dir = None if data_dir is None else absolute(data_dir)
    path = absolute(source)
    if is_name(source) and holds_images(path):
        data_set = BY_NAME[source].builder if source in BY_NAME else source
        raise ValueError(
            f"{source!r} is ambiguous: it means the"
            f" {'benchmark' if source in BENCHMARKS else 'data set'} {data_set}, and"
            f" {path} contains images; write ./{source} to use the images, or rename them to use"
            " the data set"
        )
    if source in PROTOCOLS:
        source, protocol_split = PROTOCOLS[source]
        class_split = _override(protocol_split, class_split)
    is_stream_file = path.suffix.lower() == ".toml"
    if class_split is not None and not is_stream_file:
        _check_division(source, class_split)
        if source in BENCHMARKS:
            _check_single(source, task_order(source))
        name, plans = plan_source(
            source, data_dir=data_dir, order=order, seed=seed, purpose=purpose
        )
        return name_split(name, class_split), _split_only(source, plans, class_split, tasks)
    if source in BENCHMARKS:
        names = task_order(source, order)
        if tasks is not None:
            tasks = check_names(tasks, names, f"benchmark {source!r}")
        return source, _plan_benchmark(source, tasks or names, data_dir or default_data_dir(), seed)
    if order != "default":
        raise ValueError(
            f"order {order!r} is an order of mtil, not of {source!r}; give the order with --tasks"
        )
    if source in BY_NAME:
        name = source
        plans = _plan_benchmark(source, [source], data_dir or default_data_dir(), seed)
    elif source.startswith("tfds:"):
        name = source
        plans = [plan_tfds(source.removeprefix("tfds:"), data_dir, seed=seed, purpose=purpose)]
    elif source.startswith(HUB):
        name = source
        plans = [plan_hub(source.removeprefix(HUB), seed=seed, purpose=purpose)]
    elif is_stream_file:
        return plan_stream_file(
            path, tasks, data_dir=data_dir, seed=seed, purpose=purpose, class_split=class_split
        )
    elif path.suffix.lower() in (".csv", ".tsv", ".parquet", ".pq"):
        name = path.stem
        plans = [plan_manifest(path, seed=seed, purpose=purpose)]
    else:
        if not path.exists():
            raise FileNotFoundError(
                f"{source}: no such folder, zip, stream file or benchmark{_nearest(source, path)}"
            )
        return name_of(path), plan_stream(path, tasks, seed=seed, purpose=purpose)
    if tasks is not None:
        check_names(tasks, [plan.name for plan in plans], source)
    return name, plans


def _override(default: ClassSplit, given: ClassSplit | None) -> ClassSplit:
    """Replace the fields of `default` by the fields of `given` that are not None."""
    changes = {} if given is None else vars(given)
    return dataclasses.replace(default, **{k: v for k, v in changes.items() if v is not None})


def _check_division(source: object, split: ClassSplit) -> None:
    if split.classes_per_task is None:
        raise ValueError(
            f"{source}: first_task and class_order need classes_per_task; give"
            " --classes-per-task, or write it into the stream file"
        )


def _check_single(source: object, names: Sequence[str]) -> None:
    if len(names) != 1:
        raise ValueError(
            f"classes_per_task divides one data set, but {source} has {len(names)}:"
            f" {', '.join(names)}; give one of them"
        )


def _split_only(
    source: object, plans: Sequence[Plan], split: ClassSplit, tasks: Sequence[str] | None
) -> list[Plan]:
    """Divide the classes of the only data set of a source. `tasks` selects and orders the resulting
    tasks."""
    _check_single(source, [plan.name for plan in plans])
    parts = split_by_class(plans[0], split)
    if tasks is None:
        return parts
    by_name = {part.name: part for part in parts}
    return [by_name[name] for name in check_names(tasks, list(by_name), str(source))]


def images_dir(data_dir: Path | None) -> Path:
    """Return the cache folder for decoded images, which is inside the data folder `data_dir` or, if
    `data_dir` is None, inside TFDS's default data folder."""
    return absolute(data_dir or default_data_dir()) / "cheem_jax" / "images"


def is_name(source: str) -> bool:
    """Return whether a source is the name of a benchmark, of one of its tasks, of a protocol, or of
    a data set of TFDS or the hub, rather than a file."""
    return source in (*BENCHMARKS, *BY_NAME, *PROTOCOLS) or source.startswith(("tfds:", HUB))


def cache_dir_of(source: str, data_dir: Path | None) -> Path | None:
    """Return the cache folder for the decoded images of a source: `images_dir(data_dir)`. If
    `data_dir` is None and the source is not in the data folder, return None, which stands for the
    user's cache folder."""
    is_in_data_dir = is_name(source) and not source.startswith(HUB)
    return images_dir(data_dir) if data_dir is not None or is_in_data_dir else None


def _plan_benchmark(source: str, names: Sequence[str], data_dir: Path, seed: int) -> list[Plan]:
    missing = {
        name: status
        for name in names
        if (status := status_of(BY_NAME[name], data_dir)).state != "ready"
    }
    if missing:
        raise MissingTasks(
            f"{len(missing)} of {len(names)} tasks of {source!r} are not prepared in {data_dir}:"
            f" {', '.join(missing)}; `cheem data prepare {source} --data-dir"
            f" {shlex.quote(str(data_dir))}` prepares all that can be downloaded",
            [f"{name}: {status.advice}" for name, status in missing.items()],
        )
    return [plan_of(BY_NAME[name], data_dir, seed=seed) for name in names]


def _nearest(source: str, path: Path) -> str:
    """Suggest similar names: benchmarks, their tasks, protocols, and files next to the path."""
    siblings = []
    if path.parent.is_dir():
        siblings = [str(Path(source).parent / entry.name) for entry in path.parent.iterdir()]
    names = dict.fromkeys((*BENCHMARKS, *BY_NAME, *PROTOCOLS, *siblings))
    near = difflib.get_close_matches(source, names, n=3, cutoff=0.6)
    return (
        f"; did you mean {' or '.join(near)}?"
        if near
        else f"; benchmarks are {', '.join(BENCHMARKS)}, and `cheem data list` names their tasks"
    )


def plan_stream_file(
    file: str | Path,
    tasks: Sequence[str] | None = None,
    *,
    data_dir: Path | None = None,
    seed: int = 0,
    purpose: Purpose = "learn",
    class_split: ClassSplit | None = None,
) -> tuple[str, list[Plan]]:
    """Return the name and the plans of a stream in a TOML file. Each `[[task]]` has one of these
    keys:

        path = "birds"             a folder or zip with <split>/<class>/<image>
        manifest = "cars.csv"      a table of files, with `root` if they are in another folder
        tfds = "mnist:3.0.1"       a data set that TFDS has prepared below `data_dir`
        hub = "OWNER/NAME:CONFIG"  a data set of the Hugging Face hub, with or without a config
        benchmark = "food101"      a data set of MTIL, VDD or a protocol, below `data_dir`

    The file and each `[[task]]` can also have a `name`. Paths are relative to the file's folder. A
    `seed` in the file replaces the default of the argument `seed`. `tasks` selects and orders the
    tasks; other tasks are not read.

    With `classes_per_task` in the file, the classes of its only `[[task]]` are divided into tasks
    (`ClassSplit`), and `tasks` selects among the resulting tasks. Fields of `class_split` that are
    not None override the file. Raises FileNotFoundError if the file or the data of a task are
    missing, and ValueError with all errors in the file.
    """
    file = absolute(file)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected a stream in TOML")
    if file.stat().st_size > MAX_STREAM_FILE_BYTES:
        raise ValueError(
            f"{file} has {file.stat().st_size} bytes; expected a stream file of at most"
            f" {MAX_STREAM_FILE_BYTES}"
        )
    try:
        content = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested too deeply
        raise ValueError(f"{file}: not readable as TOML: {error}") from error
    tables = _named_tables(file, content)
    stream_name = content.get("name", file.stem)
    if not content.keys().isdisjoint(CLASS_SPLIT):
        try:
            class_split = _override(ClassSplit.of(content), class_split)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    if class_split is not None:
        _check_division(file, class_split)
        _check_single(file, list(tables))
    selected = list(tables)
    if tasks is not None and class_split is None:
        selected = check_names(tasks, selected, f"stream {file}")
    given = content.get("seed", seed)
    if seed not in (0, given):
        raise ValueError(
            f"{file} sets seed to {given}, and --split-seed is {seed}; leave out one of them"
        )
    plans = [
        _plan_table(name, tables[name], file.parent, data_dir, given, purpose) for name in selected
    ]
    if class_split is None:
        return stream_name, plans
    return name_split(stream_name, class_split), _split_only(file, plans, class_split, tasks)


def _named_tables(file: Path, content: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the `[[task]]` tables, keyed by task name. A single ValueError lists all errors."""
    errors = _wrong_keys(content, ("name",), ("seed", "task", *CLASS_SPLIT))
    seed = content.get("seed", 0)
    # compare the exact type, because `true` is an int
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        errors.append("seed must be an integer of at most 64 bits")
    for key in CLASS_SPLIT:
        value = content.get(key, 0)
        is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
        if type(value) is not int and not (key == "class_order" and is_names):
            expected = "a seed or a list of class names" if key == "class_order" else "a number"
            errors.append(f"{key} must be {expected}, got {type(value).__name__}")
    tables = content.get("task", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        errors, tables = [*errors, "`task` must be a list of tables; write [[task]]"], []
    elif not tables:
        errors.append("no [[task]]; write one or more, each followed by one of " + ", ".join(KINDS))
    names = []
    for number, table in enumerate(tables, start=1):
        wrong = _wrong_keys(table, ("name", "root", *KINDS))
        kinds = [kind for kind in KINDS if kind in table]
        if len(kinds) != 1:
            wrong.append(
                f"expected exactly one of {', '.join(KINDS)}, got {' and '.join(kinds) or 'none'}"
            )
        elif "root" in table and kinds != ["manifest"]:
            wrong.append(f"`root` can only be used with `manifest`, not with `{kinds[0]}`")
        errors += [f"task {number}: {error}" for error in wrong]
        if not wrong:
            value = table[kinds[0]]
            is_file = kinds[0] in ("path", "manifest")
            other = name_in(value) if kinds == ["hub"] else re.split("[/:]", value)[0]
            default = name_of(_place(file.parent, value)) if is_file else other
            names.append(table.get("name", default))
    if repeated := repeats(names):
        errors.append(f"task names are repeated: {repeated}; give each task a different `name`")
    if errors:
        raise ValueError(f"{file}: {'; '.join(errors)}")
    return dict(zip(names, tables, strict=True))


def _wrong_keys(
    table: dict[str, Any], texts: Sequence[str], others: Sequence[str] = ()
) -> list[str]:
    """List the errors of a table: unknown keys, and values of the keys `texts` that are not
    text."""
    errors = []
    keys = sorted((*texts, *others))
    for key, value in table.items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            errors.append(
                f"unknown key {key!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(keys)}")
            )
        elif key in texts and (not isinstance(value, str) or not value.strip() or "\0" in value):
            got = f"{value!r:.40}" if isinstance(value, str) else type(value).__name__
            errors.append(f"{key} must be a text that is not empty, without NUL, got {got}")
    return errors


def _place(folder: Path, text: str) -> Path:
    """Resolve a path in a stream file. Backslashes become slashes, unless a file with backslashes
    in its name exists."""
    place = absolute(text, folder)
    return place if place.exists() else absolute(text.replace("\\", "/"), folder)


def _plan_table(
    name: str,
    table: dict[str, str],
    folder: Path,
    data_dir: Path | None,
    seed: int,
    purpose: Purpose,
) -> Plan:
    match table:
        case {"path": path}:
            return plan_task(_place(folder, path), name=name, seed=seed, purpose=purpose)
        case {"manifest": manifest}:
            root = _place(folder, table["root"]) if "root" in table else None
            return plan_manifest(
                _place(folder, manifest), name=name, root=root, seed=seed, purpose=purpose
            )
        case {"tfds": spec}:
            return plan_tfds(spec, data_dir, name=name, seed=seed, purpose=purpose)
        case {"hub": spec}:
            return plan_hub(spec, name=name, seed=seed, purpose=purpose)
        case _:
            task = table["benchmark"]
            check_names([task], sorted(BY_NAME), "the benchmarks' table")
            return dataclasses.replace(
                plan_of(BY_NAME[task], data_dir or default_data_dir(), seed=seed), name=name
            )
