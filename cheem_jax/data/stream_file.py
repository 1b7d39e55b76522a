"""Streams that are written down: a TOML file that lists tasks of any kind in their order."""

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cheem_jax.data.folder import plan_task
from cheem_jax.data.manifest import plan_manifest
from cheem_jax.data.plan import Plan
from cheem_jax.data.task import check_names, repeats
from cheem_jax.paths import absolute

KINDS = ("path", "manifest", "tfds", "benchmark")
MAX_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Entry:
    """One `[[task]]`, checked as far as the file alone allows."""

    kind: str
    """Of `KINDS`."""
    value: str
    name: str
    root: str | None


def plan_stream_file(
    file: Path, tasks: Sequence[str] | None = None, *, data_dir: Path | None = None, seed: int = 0
) -> tuple[str, list[Plan]]:
    """The stream's name and its tasks, each `[[task]]` one of

        path = "birds"             a folder or zip with <split>/<class>/<image>
        manifest = "cars.csv"      a table of files, with `root` where they lie elsewhere
        tfds = "mnist:3.0.1"       a data set that TFDS has prepared below `data_dir`
        benchmark = "food101"      a task of MTIL or VDD, from the data set below `data_dir`

    and with a `name` where another is wanted. Relative paths start at the file's folder. A `seed` in the file comes
    before the argument. `tasks` selects and orders; only those are looked at. Raises FileNotFoundError, or ValueError
    naming every fault.
    """
    file = absolute(file)
    told = _read(file)
    entries = _entries(file, told)
    if tasks is not None:
        check_names(tasks, [entry.name for entry in entries], f"stream {file}")
        by_name = {entry.name: entry for entry in entries}
        entries = [by_name[name] for name in tasks]
    plans = [_plan(entry, file.parent, data_dir, told.get("seed", seed)) for entry in entries]
    return told.get("name", file.resolve().stem), plans


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected a stream in TOML")
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{file}: {file.stat().st_size} bytes, at most {MAX_BYTES} are accepted in a stream")
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or brackets without end
        raise ValueError(f"{file}: not readable as TOML: {error}") from error


def _entries(file: Path, told: dict[str, Any]) -> list[Entry]:
    """Every task of the file, or one ValueError for all that is wrong."""
    faults = [*_unknown(told, ("name", "seed", "task")), *_not_text(told, ("name",))]
    seed = told.get("seed", 0)
    if type(seed) is not int or not -(2**63) <= seed < 2**63:  # true would pass for one
        faults.append(f"seed must be a whole number, got {_shown(seed)}; 64 bits are the most")
    tables = told.get("task", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        faults, tables = [*faults, "`task` must be a list of tables; write [[task]]"], []
    elif not tables:
        faults.append("no task in it; write [[task]] and below it one of " + ", ".join(KINDS))
    entries = []
    for number, table in enumerate(tables, start=1):
        wrong = [*_unknown(table, ("name", "root", *KINDS)), *_not_text(table, ("name", "root", *KINDS))]
        kinds = [kind for kind in KINDS if kind in table]
        if len(kinds) != 1:
            wrong.append(f"expected exactly one of {', '.join(KINDS)}, got {' and '.join(kinds) or 'none'}")
        elif "root" in table and kinds != ["manifest"]:
            wrong.append(f"`root` goes with `manifest`, not with `{kinds[0]}`")
        faults += [f"task {number}: {fault}" for fault in wrong]
        if not wrong:
            value = table[kinds[0]]
            name = table.get("name") or _default_name(kinds[0], value, file.parent)
            entries.append(Entry(kinds[0], value, name, table.get("root")))
    if repeated := repeats(entry.name for entry in entries):
        faults.append(f"several tasks are called {repeated}; give each a `name` of its own")
    if faults:
        raise ValueError(f"{file}: {'; '.join(faults)}")
    return entries


def _unknown(table: dict[str, Any], known: Sequence[str]) -> Iterable[str]:
    for key in sorted(set(table) - set(known)):
        near = difflib.get_close_matches(key, known, n=1)
        yield f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}")


def _not_text(table: dict[str, Any], keys: Iterable[str]) -> Iterable[str]:
    for key in keys:
        if key in table and not (isinstance(table[key], str) and table[key].strip() and "\0" not in table[key]):
            yield f"{key} must be text, got {_shown(table[key])}"


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.40}"
    except ValueError:  # whole numbers of thousands of digits
        return "a number without end"


def _default_name(kind: str, value: str, folder: Path) -> str:
    if kind == "benchmark":
        return value
    if kind == "tfds":
        return re.split("[/:]", value)[0]
    place = Path(os.path.realpath(_place(folder, value)))  # `resolve` fails on a link to itself
    return place.name if place.is_dir() else place.stem


def _place(folder: Path, text: str) -> Path:
    return absolute(folder / os.path.expanduser(text))


def _plan(entry: Entry, folder: Path, data_dir: Path | None, seed: int) -> Plan:
    match entry.kind:
        case "path":
            return plan_task(_place(folder, entry.value), name=entry.name, seed=seed)
        case "manifest":
            root = None if entry.root is None else _place(folder, entry.root)
            return plan_manifest(_place(folder, entry.value), name=entry.name, root=root, seed=seed)
        case "tfds":
            # TFDS is an extra: a stream of folders must not need it
            from cheem_jax.data.records import plan_tfds

            return plan_tfds(entry.value, data_dir, name=entry.name, seed=seed)
        case _:
            from cheem_jax.data.benchmarks.table import BY_NAME
            from cheem_jax.data.benchmarks.tasks import plan_benchmark

            check_names([entry.value], sorted(BY_NAME), "the benchmarks' table")
            plan = plan_benchmark(entry.value, data_dir, seed=seed)
            return plan if plan.name == entry.name else dataclasses.replace(plan, name=entry.name)
