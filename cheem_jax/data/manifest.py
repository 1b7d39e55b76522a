"""Tasks from a table that names the files: CSV or Parquet with `path`, `label` and perhaps `split`."""

import csv
import importlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from cheem_jax.data.files import FolderFiles, import_extra, stamp_of
from cheem_jax.data.task import SPLITS, Members, Plan, check_splits, cut_missing

NEEDED, OPTIONAL = ("path", "label"), ("split",)
_WHOLE = re.compile(r"-?[0-9]{1,18}")


class Row(NamedTuple):
    """One image as the table lists it, text without surrounding blanks."""

    where: str
    """As in "line 7"."""
    path: str
    label: str
    split: str = "train"


def plan_manifest(file: Path, *, name: str | None = None, root: Path | None = None, seed: int = 0) -> Plan:
    """The task that a CSV (comma, semicolon or tab) or Parquet file lists: one image a row, other columns are ignored.

    `path` is relative to `root`, by default the folder of the manifest. `label` is a class name, or a number
    0..n-1; names are sorted. Splits (train, val or test) that the column `split` does not have are cut from train by
    `seed` as for folders. Raises FileNotFoundError, or ValueError naming file and lines.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected a CSV or Parquet manifest")
    root = file.resolve().parent if root is None else root
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder; the paths in {file} are relative to it")
    rows = _read_rows(file)
    _check_files(file, root, rows)
    classes, label_of = _classes(file, rows)
    check_splits(str(file), {row.split for row in rows})
    rows.sort(key=lambda row: row.path)  # the order of the rows must not change a run
    members: Members = {}
    for row in rows:
        members.setdefault(row.split, {})[row.path] = label_of[row.label]
    cut_missing(str(file), classes, members, seed)
    return Plan.of(
        name or file.resolve().stem,
        classes,
        members,
        lambda keys: FolderFiles(root, keys),
        source=f"{file.resolve()}, files in {root.resolve()}",
        stamp=stamp_of([file, *(root / row.path for row in rows)]),
        seed=seed,
    )


def _read_rows(file: Path) -> list[Row]:
    """The rows with paths in POSIX form and our names of splits, or one ValueError for all that is wrong."""
    read = _read_parquet if file.suffix.lower() in (".parquet", ".pq") else _read_csv
    first: dict[str, str] = {}
    rows: list[Row] = []
    wrong: list[str] = []
    for where, values in read(file):
        row = Row(where, **values)
        path = PurePosixPath(row.path.replace("\\", "/")).as_posix()
        split = SPLITS.get(row.split.lower(), "")
        if not row.path:
            wrong.append(f"{where}: empty path")
        elif path.startswith("/") or path[1:2] == ":" or ".." in path.split("/") or "\0" in path:
            wrong.append(f"{where}: path {path!r} is not one below the root; write it relative and without '..'")
        elif path in first:
            wrong.append(f"{where}: path {path!r} is in {first[path]} already")
        if not row.label:
            wrong.append(f"{where}: empty label")
        if not split:
            wrong.append(f"{where}: unknown split {row.split!r}, expected {', '.join(SPLITS)}")
        first.setdefault(path, where)
        rows.append(row._replace(path=path, split=split))
    if wrong:
        raise ValueError(f"{file}: {len(wrong)} fault(s): {_first(wrong)}")
    if not rows:
        raise ValueError(f"{file}: no rows; expected one image a row below the names of the columns")
    return rows


def _read_csv(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each row is, and its text in the columns that count."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: not UTF-8 ({error.reason}); save the table as UTF-8") from error
    header = io.StringIO(text, newline="").readline()
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    ragged: list[str] = []
    try:
        columns = [column.strip().lower() for column in next(reader, [])]
        wanted = _wanted(file, columns)
        for fields in filter(None, reader):  # no empty lines
            if len(fields) != len(columns):
                ragged.append(f"line {reader.line_num}: {len(fields)}")
            else:
                yield f"line {reader.line_num}", {column: fields[at].strip() for column, at in wanted.items()}
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: not readable as CSV: {error}") from error
    if ragged:
        raise ValueError(
            f"{file}: expected {len(columns)} fields in every row, separated by {delimiter!r} as in the first "
            f'line; other numbers in {_first(ragged)}; put "..." around a field that contains {delimiter!r}'
        )


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    pyarrow = import_extra("pyarrow", "datasets", f"{file}: Parquet", ", or save the table as CSV")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            wanted = _wanted(file, [name.strip().lower() for name in names])
            table = opened.read([names[at] for at in wanted.values()])
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not readable as Parquet: {error}") from error
    for number, values in enumerate(table.rename_columns([*wanted]).to_pylist(), start=1):
        # the exact type: True would pass for a whole number
        if wrong := [column for column, value in values.items() if type(value) not in (str, int, type(None))]:
            value: Any = values[wrong[0]]
            raise ValueError(
                f"{file}, row {number}: column {wrong[0]!r} contains {type(value).__name__} ({value!r:.40}); expected "
                "text or whole numbers"
            )
        yield f"row {number}", {c: "" if value is None else str(value).strip() for c, value in values.items()}


def _wanted(file: Path, found: Sequence[str]) -> dict[str, int]:
    """The columns to read and where they are."""
    if missing := [column for column in NEEDED if column not in found]:
        raise ValueError(
            f"{file}: no column {' and '.join(map(repr, missing))} among {found[:12]}; the first line must name the "
            "columns: path, label, and optionally split"
        )
    wanted = [column for column in NEEDED + OPTIONAL if column in found]
    if repeated := [column for column in wanted if found.count(column) > 1]:
        raise ValueError(f"{file}: several columns are called {repeated}; keep one of each")
    return {column: found.index(column) for column in wanted}


def _check_files(file: Path, root: Path, rows: Sequence[Row]) -> None:
    # os.path and no pathlib: there may be a million of them
    absent = [f"{row.where}: {row.path!r}" for row in rows if not os.path.isfile(os.path.join(root, row.path))]
    if absent:
        raise FileNotFoundError(
            f"{file}: {len(absent)} of the files do not exist: {_first(absent)}; paths are relative to {root} "
            "unless another root is given"
        )


def _classes(file: Path, rows: Sequence[Row]) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Class names, and the label of each row's text: the numbers 0..n-1 or names."""
    first = {row.label: row for row in reversed(rows)}
    if not all(map(_WHOLE.fullmatch, first)):
        classes = tuple(sorted(first))
        return classes, {name: label for label, name in enumerate(classes)}
    numbers = {int(text): row for text, row in first.items()}
    if strange := sorted(number for number in numbers if not 0 <= number < len(numbers)):
        raise ValueError(
            f"{file}, {numbers[strange[0]].where}: label {strange[0]} among {len(numbers)} different ones, expected "
            f"numbers 0..{len(numbers) - 1}; number the classes from 0 without gaps, or write class names"
        )
    return tuple(map(str, range(len(numbers)))), {text: int(text) for text in first}


def _first(faults: Sequence[str], num: int = 5) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(faults) - num} more" if len(faults) > num else ""
    return "; ".join(faults[:num]) + more
