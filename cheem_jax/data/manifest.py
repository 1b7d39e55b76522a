"""Tasks from a table that names the files: CSV or Parquet with `path`, `label` and perhaps `split`."""

import contextlib
import csv
import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from cheem_jax.data.files import FolderFiles, stamp_of
from cheem_jax.data.splits import SPLITS, cut_missing
from cheem_jax.data.task import Part, Plan, check_class_names

NEEDED, OPTIONAL = ("path", "label"), ("split", "class_name")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_FRACTION = re.compile(r"-?[0-9]*\.[0-9]*")


class Row(NamedTuple):
    """One image as the table lists it, text without surrounding blanks."""

    where: str
    """As in "line 7"."""
    path: str
    label: str
    split: str = "train"
    class_name: str | None = None
    """None where the table has no such column."""


def plan_manifest(file: Path, *, name: str | None = None, root: Path | None = None, seed: int = 0) -> Plan:
    """The task that a CSV (comma, semicolon or tab) or Parquet file lists: one image a row, other columns are ignored.

    `path` is relative to `root`, by default the folder of the manifest. `label` is a class name, or a number
    0..n-1 with the names in `class_name` if there is such a column; names are sorted. Splits (train, val or test) that
    the column `split` does not have are cut from train by `seed` as for folders. Raises FileNotFoundError, or
    ValueError naming file and lines.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected a CSV or Parquet manifest")
    root = file.resolve().parent if root is None else root
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder; the paths in {file} are relative to it")
    rows = (_read_parquet if file.suffix.lower() in (".parquet", ".pq") else _read_csv)(file)
    if not rows:
        raise ValueError(f"{file}: no rows; expected one image a row below the names of the columns")
    rows = _check_rows(file, rows)
    _check_files(file, root, rows)
    classes, label_of = _classes(file, rows)
    task = name or file.resolve().stem
    check_class_names(task, classes, str(file))
    _check_splits(file, rows, classes, label_of)
    rows.sort(key=lambda row: row.path)  # the order of the rows must not change a run
    keys: dict[str, list[str]] = {}
    found: dict[str, list[int]] = {}
    for row in rows:
        keys.setdefault(row.split, []).append(row.path)
        found.setdefault(row.split, []).append(label_of(row.label))
    labels = {split: np.array(members, np.int32) for split, members in found.items()}
    cut_missing(task, str(file), classes, keys, labels, seed)
    parts = {split: Part(FolderFiles(root, keys[split]), labels[split]) for split in keys}
    stamp = stamp_of([file, *(root / row.path for row in rows)])
    return Plan(task, classes, **parts, source=f"{file.resolve()}, files in {root.resolve()}", stamp=stamp)


def _read_csv(file: Path) -> list[Row]:
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: not UTF-8 ({error.reason}); save the table as UTF-8") from error
    if (nul := text.find("\0")) >= 0:
        line = text.count("\n", 0, nul) + 1
        raise ValueError(f"{file}, line {line}: a NUL byte; expected a CSV file in UTF-8 (or the suffix .parquet)")
    delimiter = _delimiter(io.StringIO(text, newline="").readline())
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    ragged: list[str] = []
    header: list[str] = []
    try:
        header = [column.strip().lower() for column in next(reader, [])]
        wanted = {column: header.index(column) for column in _columns(file, header)}
        for fields in reader:
            if fields and len(fields) != len(header):
                ragged.append(f"line {reader.line_num}: {len(fields)}")
            elif fields:  # the line is not empty
                values = {column: fields[at].strip() for column, at in wanted.items()}
                rows.append(Row(f"line {reader.line_num}", **values))
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: not readable as CSV: {error}") from error
    if ragged:
        raise ValueError(
            f"{file}: expected {len(header)} fields in every row, separated by {delimiter!r} as in the first "
            f'line; other numbers in {_first(ragged)}; put "..." around a field that contains {delimiter!r}'
        )
    return rows


def _delimiter(header: str) -> str:
    """The one that makes the most known columns of the first line."""

    def known(delimiter: str) -> int:
        fields: list[str] = []
        with contextlib.suppress(csv.Error):  # reported when the table is read
            fields = next(csv.reader([header], delimiter=delimiter), [])
        return len({field.strip().lower() for field in fields}.intersection(NEEDED + OPTIONAL))

    return max(",;\t", key=known)


def _read_parquet(file: Path) -> list[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{file}: Parquet is read with pyarrow: `pip install 'cheem_jax[datasets]'`, or save the table as CSV"
        ) from error
    try:
        with parquet.ParquetFile(file) as opened:
            names = {column: column.strip().lower() for column in opened.schema_arrow.names}
            wanted = _columns(file, list(names.values()))
            table = opened.read([column for column, known in names.items() if known in wanted])
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not readable as Parquet: {error}") from error
    columns: dict[str, list[str]] = {}
    for column in table.column_names:
        values = table[column].to_pylist()
        # the exact type: True would pass for a whole number
        if wrong := next((value for value in values if type(value) not in (str, int, type(None))), None):
            raise ValueError(
                f"{file}: column {column!r} contains {type(wrong).__name__} ({wrong!r:.40}); "
                "expected text or whole numbers"
            )
        columns[names[column]] = ["" if value is None else str(value).strip() for value in values]
    lines = zip(*columns.values(), strict=True)
    return [Row(f"row {number}", **dict(zip(columns, line, strict=True))) for number, line in enumerate(lines, start=1)]


def _columns(file: Path, found: list[str]) -> list[str]:
    """The columns to read."""
    if missing := [column for column in NEEDED if column not in found]:
        raise ValueError(
            f"{file}: no column {' and '.join(map(repr, missing))} among {found[:12]}; the first line must name the "
            "columns: path, label, and optionally split and class_name"
        )
    columns = [column for column in NEEDED + OPTIONAL if column in found]
    if repeated := [column for column in columns if found.count(column) > 1]:
        raise ValueError(f"{file}: several columns are called {repeated}; keep one of each")
    return columns


def _check_rows(file: Path, rows: Sequence[Row]) -> list[Row]:
    """The rows with paths in POSIX form and our names of splits, or one ValueError for all that is wrong."""
    first: dict[str, str] = {}
    checked: list[Row] = []
    wrong: list[str] = []
    for row in rows:
        path = PurePosixPath(row.path.replace("\\", "/")).as_posix()
        split = SPLITS.get(row.split.lower(), "")
        if not row.path:
            wrong.append(f"{row.where}: empty path")
        elif path.startswith("/") or path[1:2] == ":" or ".." in path.split("/") or "\0" in path:
            wrong.append(f"{row.where}: path {path!r} is not one below the root; write it relative and without '..'")
        elif path in first:
            wrong.append(f"{row.where}: path {path!r} is in {first[path]} already")
        if not row.label:
            wrong.append(f"{row.where}: empty label")
        if not split:
            wrong.append(f"{row.where}: unknown split {row.split!r}, expected {', '.join(SPLITS)}")
        first.setdefault(path, row.where)
        checked.append(row._replace(path=path, split=split))
    _refuse(file, wrong)
    return checked


def _check_files(file: Path, root: Path, rows: Sequence[Row]) -> None:
    # os.path and no pathlib: there may be a million of them
    absent = [f"{row.where}: {row.path!r}" for row in rows if not os.path.isfile(os.path.join(root, row.path))]
    if absent:
        raise FileNotFoundError(
            f"{file}: {len(absent)} of the files do not exist: {_first(absent)}; paths are relative to {root} "
            "unless another root is given"
        )


def _classes(file: Path, rows: Sequence[Row]) -> tuple[tuple[str, ...], Callable[[str], int]]:
    """Class names, and the label of a row's text."""
    first = {row.label: row for row in reversed(rows)}
    if all(map(_WHOLE.fullmatch, first)):
        return _number_names(file, rows), int
    if all(_WHOLE.fullmatch(text) or _FRACTION.fullmatch(text) for text in first):
        where, text = next((row.where, row.label) for row in rows if not _WHOLE.fullmatch(row.label))
        raise ValueError(f"{file}, {where}: label {text!r} is not a whole number; write 0..n-1 or class names")
    classes = tuple(sorted(first))
    return classes, {name: label for label, name in enumerate(classes)}.__getitem__


def _number_names(file: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    """Names of label numbers, which must be 0..n-1: `class_name`, or else the numbers as text."""
    first = {int(row.label): row for row in reversed(rows)}
    lowest, highest = min(first), max(first)
    if lowest < 0:
        raise ValueError(f"{file}, {first[lowest].where}: label {lowest} is negative; leave out rows without a label")
    if lowest == 1:
        raise ValueError(
            f"{file}: the first label is 1 ({first[1].where}), expected 0; subtract one from every label, or write "
            "class names"
        )
    if len(first) != highest + 1:
        # the first gap comes soon, however large a label is
        gap = next(label for label in range(highest) if label not in first)
        raise ValueError(
            f"{file}: labels go up to {highest}, and {highest + 1 - len(first)} below it do not occur, first {gap}; "
            "number the classes 0..n-1 without gaps, or write class names"
        )
    if rows[0].class_name is None:
        return tuple(map(str, range(highest + 1)))
    names = [first[label].class_name or "" for label in range(highest + 1)]
    wrong = []
    for row in rows:
        if not row.class_name:
            wrong.append(f"{row.where}: empty class_name")
        elif row.class_name != (known := names[int(row.label)]):
            wrong.append(f"{row.where}: label {row.label} is called {row.class_name!r}, and {known!r} before")
    _refuse(file, wrong)
    return tuple(names)


def _check_splits(file: Path, rows: Sequence[Row], classes: Sequence[str], label_of: Callable[[str], int]) -> None:
    """ValueError unless there are splits to work with and train has every class."""
    present = {row.split for row in rows}
    if "train" not in present:
        raise ValueError(f"{file}: no row of split 'train', only {sorted(present)}")
    if present == {"train", "val"}:
        raise ValueError(f"{file}: train and val but no test rows; add some, or leave train alone to be cut")
    first = {label_of(row.label): row for row in reversed(rows)}
    for row in rows:
        if row.split == "train":
            first.pop(label_of(row.label), None)
    if first:
        unknown = [f"{classes[label]!r} ({row.where}, {row.split})" for label, row in sorted(first.items())]
        raise ValueError(f"{file}: {len(unknown)} class(es) that train does not have: {_first(unknown)}")


def _refuse(file: Path, faults: Sequence[str]) -> None:
    if faults:
        raise ValueError(f"{file}: {len(faults)} fault(s): {_first(faults)}")


def _first(faults: Sequence[str], num: int = 5) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(faults) - num} more" if len(faults) > num else ""
    return "; ".join(faults[:num]) + more
