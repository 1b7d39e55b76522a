"""Tasks from a table that names the files: CSV or Parquet with `path`, `label` and perhaps `split`."""

import contextlib
import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from cheem_jax.data.files import FolderFiles, stamp_of
from cheem_jax.data.splits import SPLITS, cut_missing
from cheem_jax.data.task import Part, Plan, check_class_names

NEEDED, OPTIONAL = ("path", "label"), ("split", "class_name")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_FRACTION = re.compile(r"-?[0-9]*\.[0-9]*")


class Table(NamedTuple):
    """The columns that count, as text without surrounding blanks."""

    columns: dict[str, list[str]]
    places: Sequence[str]
    """Where each row stands, as in "line 7"."""


def plan_manifest(file: Path, *, name: str | None = None, root: Path | None = None, seed: int = 0) -> Plan:
    """What a CSV (comma, semicolon or tab) or Parquet file lists: one image a row, other columns are left out.

    `path` is relative to `root`, by default the folder of the manifest. `label` is a class name, or a number
    0..n-1 with the names in `class_name` if there is such a column; names are sorted. Splits that `split` (train,
    val or test) does not tell are cut from train by `seed` as for folders. Raises FileNotFoundError, or ValueError
    naming file and lines.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected a CSV or Parquet manifest")
    root = file.resolve().parent if root is None else root
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder; the paths in {file} are relative to it")
    table = (_read_parquet if file.suffix.lower() in (".parquet", ".pq") else _read_csv)(file)
    if not table.places:
        raise ValueError(f"{file}: no rows; expected one image a row below the names of the columns")
    paths, splits = _check_rows(file, table)
    _check_files(file, root, paths, table.places)
    classes, rows_labels = _label_rows(file, table)
    order = sorted(range(len(paths)), key=paths.__getitem__)  # the order of the rows must not change a run
    keys: dict[str, list[str]] = {}
    found: dict[str, list[int]] = {}
    for row in order:
        keys.setdefault(splits[row], []).append(paths[row])
        found.setdefault(splits[row], []).append(rows_labels[row])
    task = name or file.resolve().stem
    check_class_names(task, classes, str(file))
    _check_splits(file, classes, splits, rows_labels, table.places)
    labels = {split: np.array(members, np.int32) for split, members in found.items()}
    cut_missing(task, str(file), classes, keys, labels, seed)
    parts = {split: Part(FolderFiles(root, keys[split]), labels[split]) for split in keys}
    stamp = stamp_of([file, *(root / paths[row] for row in order)])
    return Plan(task, classes, **parts, source=f"{file.resolve()}, files in {root.resolve()}", stamp=stamp)


def _read_csv(file: Path) -> Table:
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
    rows: list[list[str]] = []
    places: list[str] = []
    ragged: list[str] = []
    header: list[str] = []
    try:
        header = [column.strip().lower() for column in next(reader, [])]
        wanted = {column: header.index(column) for column in _columns(file, header)}
        for fields in reader:
            if not fields:
                continue  # an empty line
            if len(fields) != len(header):
                ragged.append(f"line {reader.line_num}: {len(fields)}")
                continue
            rows.append(fields)
            places.append(f"line {reader.line_num}")
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: no readable CSV: {error}") from error
    if ragged:
        raise ValueError(
            f"{file}: {len(header)} fields were expected in every row, separated by {delimiter!r} as in the first "
            f'line; other numbers in {_first(ragged)}; put "..." around a field that holds {delimiter!r}'
        )
    return Table({column: [fields[at].strip() for fields in rows] for column, at in wanted.items()}, places)


def _delimiter(header: str) -> str:
    """The one that makes the most known columns of the first line."""

    def known(delimiter: str) -> int:
        fields: list[str] = []
        with contextlib.suppress(csv.Error):  # told when the table is read
            fields = next(csv.reader([header], delimiter=delimiter), [])
        return len({field.strip().lower() for field in fields}.intersection(NEEDED + OPTIONAL))

    return max(",;\t", key=known)


def _read_parquet(file: Path) -> Table:
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
        raise ValueError(f"{file}: no readable Parquet file: {error}") from error
    places = [f"row {row}" for row in range(1, table.num_rows + 1)]
    columns: dict[str, list[str]] = {}
    for column in table.column_names:
        values: list[Any] = table[column].to_pylist()
        # the exact type: True would pass for a whole number
        if wrong := next((value for value in values if type(value) not in (str, int, type(None))), None):
            raise ValueError(
                f"{file}: column {column!r} holds {type(wrong).__name__} ({wrong!r:.40}); "
                "expected text or whole numbers"
            )
        columns[names[column]] = ["" if value is None else str(value).strip() for value in values]
    return Table(columns, places)


def _columns(file: Path, found: list[str]) -> list[str]:
    """The columns to read."""
    if missing := [column for column in NEEDED if column not in found]:
        raise ValueError(
            f"{file}: no column {' and '.join(map(repr, missing))} among {found[:12]}; the first line must name the "
            "columns: path, label, and optionally split and class_name"
        )
    columns = [column for column in NEEDED + OPTIONAL if column in found]
    if doubled := [column for column in columns if found.count(column) > 1]:
        raise ValueError(f"{file}: several columns are called {doubled}; keep one of each")
    return columns


def _check_rows(file: Path, table: Table) -> tuple[list[str], list[str]]:
    """Paths in POSIX form and splits, or one ValueError for all rows that are wrong."""
    named = table.columns.get("split", ["train"] * len(table.places))
    splits = [SPLITS.get(split.lower(), "") for split in named]
    paths = [PurePosixPath(path.replace("\\", "/")).as_posix() for path in table.columns["path"]]
    first: dict[str, str] = {}
    wrong: list[str] = []
    for row, place in enumerate(table.places):
        path = paths[row]
        if not table.columns["path"][row]:
            wrong.append(f"{place}: empty path")
        elif path.startswith("/") or path[1:2] == ":" or ".." in path.split("/") or "\0" in path:
            wrong.append(f"{place}: path {path!r} is not one below the root; write it relative and without '..'")
        elif path in first:
            wrong.append(f"{place}: path {path!r} stands in {first[path]} already")
        if not table.columns["label"][row]:
            wrong.append(f"{place}: empty label")
        if not splits[row]:
            wrong.append(f"{place}: unknown split {named[row]!r}, expected {', '.join(SPLITS)}")
        first.setdefault(path, place)
    if wrong:
        raise ValueError(f"{file}: {len(wrong)} fault(s): {_first(wrong)}")
    return paths, splits


def _check_files(file: Path, root: Path, paths: Iterable[str], places: Iterable[str]) -> None:
    # os.path and no pathlib: there may be a million of them
    absent = [
        f"{place}: {path!r}"
        for path, place in zip(paths, places, strict=True)
        if not os.path.isfile(os.path.join(root, path))
    ]
    if absent:
        raise FileNotFoundError(
            f"{file}: {len(absent)} of the files are not there: {_first(absent)}; paths are relative to {root} "
            "unless another root is given"
        )


def _label_rows(file: Path, table: Table) -> tuple[tuple[str, ...], list[int]]:
    """Class names and every row's label."""
    texts = table.columns["label"]
    distinct = set(texts)
    if all(map(_WHOLE.fullmatch, distinct)):
        numbers = [int(text) for text in texts]
        _check_numbers(file, numbers, table.places)
        return _number_names(file, numbers, table), numbers
    if all(_WHOLE.fullmatch(text) or _FRACTION.fullmatch(text) for text in distinct):
        row = next(row for row, text in enumerate(texts) if not _WHOLE.fullmatch(text))
        raise ValueError(
            f"{file}, {table.places[row]}: label {texts[row]!r} is no whole number; write 0..n-1 or class names"
        )
    classes = tuple(sorted(distinct))
    label_of = {name: label for label, name in enumerate(classes)}
    return classes, [label_of[text] for text in texts]


def _check_numbers(file: Path, numbers: list[int], places: Sequence[str]) -> None:
    known = set(numbers)
    lowest, highest = min(known), max(known)
    place = places[numbers.index(lowest)]
    if lowest < 0:
        raise ValueError(
            f"{file}, {place}: label {lowest} is negative ({sum(number < 0 for number in numbers)} such row(s)); "
            "leave out rows without a label"
        )
    if lowest == 1:
        raise ValueError(
            f"{file}: the first label is 1 ({place}), expected 0; subtract one from every label, or write class names"
        )
    if len(known) != highest + 1:
        gaps = (str(label) for label in range(highest) if label not in known)
        raise ValueError(
            f"{file}: labels go up to {highest}, and {highest + 1 - len(known)} below it do not occur: "
            f"{_some(gaps, 8)}; number the classes 0..n-1 without gaps, or write class names"
        )


def _number_names(file: Path, numbers: list[int], table: Table) -> tuple[str, ...]:
    """Names of label numbers: `class_name`, or else the numbers as text."""
    if "class_name" not in table.columns:
        return tuple(map(str, range(max(numbers) + 1)))
    names: dict[int, str] = {}
    wrong = []
    for label, name, place in zip(numbers, table.columns["class_name"], table.places, strict=True):
        if not name:
            wrong.append(f"{place}: empty class_name")
        elif names.setdefault(label, name) != name:
            wrong.append(f"{place}: label {label} is called {name!r}, and {names[label]!r} before")
    if wrong:
        raise ValueError(f"{file}: {len(wrong)} fault(s): {_first(wrong)}")
    return tuple(names[label] for label in range(len(names)))


def _check_splits(
    file: Path, classes: Sequence[str], splits: Sequence[str], labels: Sequence[int], places: Sequence[str]
) -> None:
    """ValueError unless there are splits to work with and train has every class."""
    present = set(splits)
    if "train" not in present:
        raise ValueError(f"{file}: no row of split 'train', only {sorted(present)}")
    if present == {"train", "val"}:
        raise ValueError(f"{file}: train and val but no test rows; add some, or leave train alone to be cut")
    first: dict[int, str] = {}
    for label, split, place in zip(labels, splits, places, strict=True):
        first.setdefault(label, f"{classes[label]!r} ({place}, {split})")
    trained = {label for label, split in zip(labels, splits, strict=True) if split == "train"}
    if unknown := [first[label] for label in sorted(first.keys() - trained)]:
        raise ValueError(f"{file}: {len(unknown)} class(es) that train does not have: {_first(unknown)}")


def _first(faults: Sequence[str], num: int = 5) -> str:
    """The first of them, and how many more there are."""
    more = f"; and {len(faults) - num} more" if len(faults) > num else ""
    return "; ".join(faults[:num]) + more


def _some(names: Iterator[str], num: int) -> str:
    """The first of possibly very many names."""
    found = [name for _, name in zip(range(num + 1), names, strict=False)]
    return ", ".join(found[:num]) + (", ..." if len(found) > num else "")
