"""Plan tasks from image folders and zips (`<split>/<class>/<image>`), from folders with more than
one task, and from manifests.

A manifest is a CSV or Parquet table of files, with the columns `path`, `label` and optionally
`split`.
"""

import collections
import csv
import dataclasses
import importlib
import io
import itertools
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from cheem_jax.core.paths import absolute
from cheem_jax.data.files import (
    GET_HEIF,
    FolderFiles,
    Listing,
    by_name,
    classify,
    composed,
    empty_folders,
    files_of,
    import_extra,
    is_dead_link,
    is_hidden,
    join_first,
    kind_of,
    look_through,
    may_be_image,
    stamp_of,
    walk,
)
from cheem_jax.data.records import is_saved, plan_hub
from cheem_jax.data.task import (
    SPLITS,
    Members,
    Plan,
    Purpose,
    check_names,
    check_splits,
    class_names,
    repeats,
    split_of,
    splits_of,
)

LAYOUT = "<train|val|test>/<class>/<image>, or <class>/<image> without splits"
NEEDED, OPTIONAL = ("path", "label"), ("split",)  # columns of a manifest
_WHOLE = re.compile(r"-?[0-9]{1,18}")


def plan_task(
    path: Path, *, name: str | None = None, seed: int = 0, purpose: Purpose = "learn"
) -> Plan:
    """Plan the task in a folder or zip with files `<split>/<class>/<image>`. One more folder can
    enclose all these files.

    The classes are the sorted folders of train, or `classes` in a `meta.json` next to the splits.
    With such a `meta.json`, the name of a class folder is a class name or a label number. A missing
    validation split is cut from train: ceil(0.1 n) of the n training images, and at least one image
    of each class. If there is only train, or the files are `<class>/<image>`, a test split of
    ceil(0.3 n) images is cut first. `seed` determines which images are cut. For purposes other than
    learning, see `Plan.of`. A folder that `save_to_disk` of the library `datasets` wrote is passed
    to `plan_hub`. Raises FileNotFoundError if `path` does not exist, and ValueError with the name
    of an invalid file or folder.
    """
    if is_saved(path):
        return plan_hub(path, name=name, seed=seed, purpose=purpose)
    return _plan(look_through(path), name or name_of(path), seed, purpose)


def plan_stream(
    path: Path, tasks: Sequence[str] | None = None, *, seed: int = 0, purpose: Purpose = "learn"
) -> list[Plan]:
    """Plan the tasks of a folder: each of its zips and folders is a task. If `path` is itself a
    task, it is the only task of the stream.

    `tasks` selects and orders the tasks. By default, all tasks are used in sorted order. Folders
    without images and other files are skipped, and named in `ignored` of the first plan. Raises the
    errors of `plan_task`, and, unless `tasks` is set, ValueError for folders that look like parts
    of one task.
    """
    places = _find_tasks(path, purpose)
    notes = list[str]()
    if tasks is not None:
        tasks = check_names(tasks, sorted(places), f"stream {path}")
        places = {name: places[name] for name in tasks}
    listings = {name: look_through(place) for name, place in places.items() if not is_saved(place)}
    if tasks is None:
        lacks_heif = {
            name
            for name, one in listings.items()
            if any(kind.endswith(GET_HEIF) for _, kind in one.ignored)
        }
        empty = {
            name
            for name, one in listings.items()
            if not (one.images or name in lacks_heif or one.path.is_file())
        }
        tasks = by_name(places.keys() - empty)
        if places != {name_of(path): path}:
            _refuse_parts(path, tasks, listings, purpose)
            notes += _notes_next_to_tasks(path, places)
        notes += (
            note
            for name in by_name(empty)
            for note in (f"{name}: no images, so it is skipped", *listings[name].notes())
        )
    plans = [
        (
            _plan(listings[name], name, seed, purpose)
            if name in listings
            else plan_hub(places[name], name=name, seed=seed, purpose=purpose)
        )
        for name in tasks
    ]
    if not plans:
        more = "".join(f"; {note}" for note in notes)
        raise ValueError(f"{path} contains no task; expected zips or folders with {LAYOUT}{more}")
    ignored = (*notes, *plans[0].ignored)
    return [dataclasses.replace(plans[0], ignored=ignored), *plans[1:]]


def _notes_next_to_tasks(path: Path, places: Mapping[str, Path]) -> list[str]:
    """Describe the files and folders of a stream that belong to none of its tasks."""
    used = {place.name for place in places.values()}
    others = [entry for entry in path.iterdir() if entry.name not in used]
    folders = collections.Counter(entry.name for entry in others if entry.is_dir())
    files = by_name(entry.name for entry in others if not (entry.is_dir() or is_hidden(entry.name)))
    listing = classify(path, files, folders)
    notes = listing.notes()
    if num := len(listing.images):
        notes.insert(0, f"{path.name}: {num:,} image{'s'[: num > 1]} outside of the tasks ignored")
    return notes


def _find_tasks(path: Path, purpose: Purpose) -> dict[str, Path]:
    if path.is_file() or is_saved(path):
        return {name_of(path): path}
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder or zip file")
    entries = [entry for entry in path.iterdir() if not is_hidden(entry.name)]
    folders = [entry for entry in entries if entry.is_dir()]
    splits = [split_of(entry.name) for entry in folders]
    is_test_alone = purpose == "measure" and splits and all(splits)
    if "train" in splits or is_test_alone or any(map(_has_images, folders)):
        # The folder is a single task; its subfolders are splits or classes.
        return {name_of(path): path}
    # links to missing folders are included, so that they are reported as missing
    places = [
        entry
        for entry in entries
        if entry.is_dir() or entry.suffix.lower() == ".zip" or _may_be_dead_folder(entry)
    ]
    if repeated := repeats(map(name_of, places)):
        raise ValueError(
            f"{path} contains folders or zips with the same name: {repeated}; keep one of each"
        )
    if not places and (num := sum(map(may_be_image, entries))):
        raise ValueError(
            f"{path} contains {num} images and no folder; put the images of each class into a"
            f" separate folder, such as {path.name}/cat and {path.name}/dog"
        )
    return {name_of(place): place for place in places}


def _refuse_parts(
    path: Path, tasks: Sequence[str], listings: Mapping[str, Listing], purpose: Purpose
) -> None:
    """Raise ValueError for folders or zips that are probably parts of one task: their names are
    names of splits, or they have the same classes and no splits."""
    alike: dict[frozenset[str], list[str]] = {}
    for name in tasks:
        if name in listings and (classes := _bare_classes(listings[name])):
            alike.setdefault(classes, []).append(name)
    bare = [name for names in alike.values() for name in names]
    if tasks and sorted(bare) == tasks and len(_split_folders(tasks)) == len(tasks):
        check_splits(str(path), splits_of(str(path), tasks).values(), purpose)
        raise ValueError(
            f"{path}: zips named {sorted(tasks)} are splits of one task; unpack them into one"
            " folder"
        )
    for classes, names in alike.items():
        if len(names) > 1:
            raise ValueError(
                f"{path}: {', '.join(names[:8])} have the same classes"
                f" ({join_first(sorted(classes))}), so they may be parts of one task. If they are,"
                " rename them to train and test, or put the images of each class into one folder."
                " If each is a task, list them in a TOML file, give each folder separately, or"
                " select them (`cheem learn` and `cheem evaluate`: --tasks"
                f" {','.join(names[:8])})"
            )


def _bare_classes(listing: Listing) -> frozenset[str]:
    """Return the class folders of a task without splits. For a task with splits or a meta.json,
    return an empty set."""
    folders = {tuple(name.split("/")[:-1]) for name in listing.images}
    # the folder `train` in train.zip does not count as a split
    has_splits = {split_of(parts[-2]) for parts in folders if len(parts) > 1} - {
        None,
        split_of(name_of(listing.path)),
    }
    names = {composed(parts[-1]).casefold() for parts in folders if parts}
    if (
        has_splits
        or len(_split_folders(names)) == len(names)
        or any(at.endswith("meta.json") for at in listing.names)
    ):
        return frozenset()
    return frozenset(names)


def holds_images(path: Path) -> bool:
    """Return whether `path` is a zip, a saved data set, or a folder with images in at least two
    subfolders."""
    if not path.is_dir() or is_saved(path):
        return zipfile.is_zipfile(path) or is_saved(path)
    folders = (Path(path, at) for at, _, _ in walk(path) if at)
    return len(list(itertools.islice(filter(_has_images, folders), 2))) == 2


def _may_be_dead_folder(place: Path) -> bool:
    return (
        is_dead_link(place) and kind_of(FolderFiles(place.parent, [place.name]), 0) == "no suffix"
    )


def _has_images(folder: Path) -> bool:
    """Return whether the folder contains images that are not in a subfolder."""
    with os.scandir(folder) as entries:
        return any(
            not is_hidden(entry.name) and may_be_image(Path(entry.path)) for entry in entries
        )


def name_of(path: Path) -> str:
    """Derive the name of a task or stream from its folder or file; a link has its own name."""
    path = absolute(path)
    return path.name if path.is_dir() else path.stem


def _plan(listing: Listing, task: str, seed: int, purpose: Purpose) -> Plan:
    path, names, images = listing.path, listing.names, listing.images
    if not images:
        raise ValueError(f"{path}: no images in it; expected {LAYOUT}{listing.message()}")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{path}: the name {ascii(name)} is not valid Unicode; rename the file"
            ) from None
    root, grouped = _group(path, images)
    check_splits(str(path), grouped.keys(), purpose)
    _refuse_folders_without_image(
        listing, root, (root + next(iter(next(iter(grouped.values()))))).count("/")
    )
    metas = [name for name in (f"{root}meta.json", "meta.json") if name in names]
    listed = _class_names(path, metas[0]) if metas else None
    naming = grouped if purpose == "measure" else {"train": grouped["train"]}
    folders = [folder for folder_of in naming.values() for folder in folder_of.values()]
    classes, label_of = _label_folders(path, folders, listed)
    if listed is None and len(_split_folders(classes)) == len(classes):
        raise ValueError(
            f"{path}: {', '.join(classes)} are splits, but their images are not in class folders;"
            f" expected {LAYOUT}, or a table (CSV) with the columns path, label and split"
        )
    members: Members = {}
    for split, folder_of in grouped.items():
        if unknown := sorted(set(map(composed, folder_of.values())) - set(label_of)):
            # ascii shows the difference between letters that look alike
            raise ValueError(
                f"{path}: classes in {split} that train does not have: {ascii(unknown[:8])}"
            )
        members[split] = {file: label_of[composed(folder)] for file, folder in folder_of.items()}
    files = (
        [path / root / file for labels in members.values() for file in labels]
        if path.is_dir()
        else [path]
    )
    return Plan.of(
        task,
        classes,
        members,
        lambda keys: files_of(path, keys, root),
        source=str(path.resolve()),
        stamp=stamp_of(files),
        seed=seed,
        ignored=listing.notes(),
        purpose=purpose,
    )


def _group(path: Path, images: list[str]) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the folder that encloses all images ("" or "name/"), and the class folder of each
    image, keyed by split and by the image's name relative to the enclosing folder."""
    # Use the most common depth, so that a single stray file or deeper folder does not affect the
    # other images.
    depth = _usual(images)
    tops = {file.split("/")[0] for file in images}
    root = ""
    if depth > 1 and len(tops) == 1 and (depth > 2 or tops.isdisjoint(_split_folders(tops))):
        root = f"{tops.pop()}/"
    by_top: dict[str, list[str]] = {}
    for file in images:
        name = file.removeprefix(root)
        by_top.setdefault(name.split("/")[0], []).append(name)
    has_splits = any(_usual(by_top[top]) > 1 for top in _split_folders(by_top))
    depth = (
        2
        if has_splits or min(file.count("/") for files in by_top.values() for file in files) > 1
        else 1
    )
    if wrong := [file for file in images if file.removeprefix(root).count("/") != depth]:
        at = max(wrong, key=lambda file: file.count("/"))
        raise ValueError(
            f"{path}: {len(wrong):,} of {len(images):,} images are at an unexpected place, such as"
            f" {at!r}; expected {LAYOUT}; move or remove them"
        )
    groups: dict[str, dict[str, str]] = {}
    for top, files in by_top.items():
        groups.setdefault(top if depth == 2 else "train", {}).update(
            (file, file.split("/")[-2]) for file in files
        )
    if unknown := sorted(groups.keys() - _split_folders(groups)):
        raise ValueError(
            f"{path}: {unknown[:8]} are not splits; expected {', '.join(SPLITS)} ({LAYOUT}); if"
            " they are tasks, give the folder that contains them, or make each of them a zip or a"
            " [[task]] of a stream file"
        )
    split_names = splits_of(str(path), groups)
    return root, {split_names[folder]: folder_of for folder, folder_of in groups.items()}


def _usual(files: Sequence[str]) -> int:
    """Return the most common number of folders in the file names."""
    return collections.Counter(file.count("/") for file in files).most_common(1)[0][0]


def _refuse_folders_without_image(listing: Listing, root: str, depth: int) -> None:
    """Raise ValueError if a folder is empty, or contains only hidden files or files that are not
    images. The folder might be a class, which would be missing without notice."""
    folders = {
        name.rpartition("/")[0]
        for name in listing.names
        if name.startswith(root) and name.count("/") == depth
    }
    folders -= {name.rpartition("/")[0] for name in listing.images}
    if listing.path.is_dir():
        above = (name for name in listing.names if name.count("/") < depth)
        folders |= {name for name in above if _may_be_dead_folder(listing.path / name)}
    folders |= empty_folders(listing.path)
    if folders:
        raise ValueError(
            f"{listing.path}: folders without images: {sorted(folders)[:8]}; add images, or remove"
            f" the folders if they are not classes{listing.message()}"
        )


def _split_folders(folders: Iterable[str]) -> set[str]:
    return {folder for folder in folders if split_of(folder)}


def _class_names(path: Path, name: str) -> list[str] | None:
    """Return the entry `classes` of the JSON file `name`, or None if the entry does not exist."""
    try:
        meta = json.loads(files_of(path, [name]).read(0))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}/{name}: not readable as JSON: {error}") from error
    names = meta.get("classes") if isinstance(meta, dict) else None
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"{path}/{name}: `classes` must be a list of names in label order, got {names!r:.80}"
        )
    if repeated := repeats(map(composed, names or ())):
        raise ValueError(f"{path}/{name}: `classes` repeats {', '.join(repeated[:5])}")
    return names


def _label_folders(
    path: Path, folders: Iterable[str], names: list[str] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names in label order, and the label of each class folder, keyed by the
    folder's name in composed Unicode form."""
    if names is None:
        way_out = (
            "put each class into one folder; if the classes are different, list them as `classes`"
            " in a meta.json next to the splits"
        )
        names = list(class_names(str(path), folders, way_out))
    folders = sorted(set(map(composed, folders)))
    label_of = {composed(name): i for i, name in enumerate(names)}
    if set(folders) <= set(label_of):
        return tuple(names), label_of
    numbers = {folder: int(folder) for folder in folders if folder.isdecimal() and len(folder) < 20}
    wrong = [folder for folder in folders if numbers.get(folder, len(names)) >= len(names)]
    if wrong or len(set(numbers.values())) != len(folders):
        raise ValueError(
            f"{path}: class folders {(wrong or folders)[:8]} are neither names nor label numbers "
            f"of the {len(names)} classes in its meta.json"
        )
    return tuple(names), numbers


class ManifestRow(NamedTuple):
    """A row of a manifest. Its texts have no leading or trailing blanks."""

    where: str
    """Position of the row for messages, such as "line 7"."""
    path: str
    label: str
    split: str = "train"


def plan_manifest(
    file: Path,
    *,
    name: str | None = None,
    root: Path | None = None,
    seed: int = 0,
    purpose: Purpose = "learn",
) -> Plan:
    """Plan the task in a CSV file (with commas, semicolons or tabs) or a Parquet file, with one
    image per row. Additional columns are ignored.

    Values of `path` are relative to `root`, by default the manifest's folder. A `label` is a class
    name or a number (0, 1, ...); for the purpose `learn`, the numbers must have no gaps. Class
    names are sorted. Splits that do not occur in the column `split` are cut from train with `seed`,
    as in `plan_task`. Raises FileNotFoundError if the manifest, `root` or all images are missing,
    and ValueError with the file and its invalid rows.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; expected a CSV or Parquet manifest")
    file = absolute(file)
    root = file.parent if root is None else root
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder; the paths in {file} are relative to it")
    rows = _read_rows(file)
    # Raise only if all files are missing; individual missing files are reported as broken images.
    # os.path is faster than pathlib for a million files.
    if not any(os.path.isfile(os.path.join(root, row.path)) for row in rows):
        absent = join_first([f"{row.where}: {row.path!r}" for row in rows])
        raise FileNotFoundError(
            f"{file}: none of its {len(rows)} files exists: {absent}; "
            f"paths are relative to {root} unless another root is given"
        )
    classes, label_of = _classes(file, rows, purpose)
    check_splits(str(file), {row.split for row in rows}, purpose)
    # the order of the rows must not affect the run
    rows.sort(key=lambda row: (composed(row.path), row.path))
    members: Members = {}
    for row in rows:
        members.setdefault(row.split, {})[row.path] = label_of[row.label]
    return Plan.of(
        name or file.stem,
        classes,
        members,
        lambda keys: FolderFiles(root, keys),
        source=f"{file.resolve()}, files in {root.resolve()}",
        stamp=stamp_of([file, *(root / row.path for row in rows)]),
        seed=seed,
        purpose=purpose,
    )


def _read_rows(file: Path) -> list[ManifestRow]:
    """Read all rows. Paths are converted to POSIX form, and split names to train, val or test. A
    single ValueError lists all errors."""
    read = _read_parquet if file.suffix.lower() in (".parquet", ".pq") else _read_csv
    first: dict[str, str] = {}
    rows: list[ManifestRow] = []
    wrong: list[str] = []
    for where, values in read(file):
        row = ManifestRow(where, **values)
        path = PurePosixPath(row.path.replace("\\", "/")).as_posix()
        split = split_of(row.split) or ""
        if not row.path:
            wrong.append(f"{where}: empty path")
        elif path.startswith("/") or path[1:2] == ":" or ".." in path.split("/") or "\0" in path:
            wrong.append(
                f"{where}: path {path!r} is outside of the root; write a relative path without '..'"
            )
        elif path in first:
            wrong.append(f"{where}: path {path!r} is also in {first[path]}")
        if not row.label:
            wrong.append(f"{where}: empty label")
        if not split:
            wrong.append(f"{where}: unknown split {row.split!r}, expected {', '.join(SPLITS)}")
        first.setdefault(path, where)
        rows.append(row._replace(path=path, split=split))
    if wrong:
        raise ValueError(f"{file}: {len(wrong)} error(s): {join_first(wrong)}")
    if not rows:
        raise ValueError(
            f"{file}: no rows; expected one image per row after the line with the column names"
        )
    return rows


def _read_csv(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """For each row, yield its position for messages, and its texts in the required and optional
    columns, keyed by column."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}, line {line}: not UTF-8 ({error.reason}); save the table as UTF-8"
        ) from error
    header = io.StringIO(text, newline="").readline()
    skipped = 0
    # Excel writes a first line such as `sep=;`
    if separator := re.fullmatch("sep=([,;\t])", header.strip("\r\n"), re.IGNORECASE):
        text = text[len(header) :]
        skipped = 1
        delimiter = separator[1]
    else:
        delimiter = max(",;\t", key=header.count)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True
    )
    ragged: list[str] = []
    try:
        columns = [column.strip().lower() for column in next(reader, [])]
        positions = _find_columns(file, columns)
        for fields in filter(None, reader):  # skips empty lines
            if len(fields) != len(columns):
                ragged.append(f"line {skipped + reader.line_num}: {len(fields)}")
            else:
                yield (
                    f"line {skipped + reader.line_num}",
                    {column: fields[at].strip() for column, at in positions.items()},
                )
    except csv.Error as error:
        raise ValueError(
            f"{file}, line {skipped + reader.line_num}: not readable as CSV: {error}"
        ) from error
    if ragged:
        raise ValueError(
            f"{file}: expected {len(columns)} fields in every row, separated by {delimiter!r} as in"
            f' the first line; different numbers of fields: {join_first(ragged)}; put "..." around'
            f" a field that contains {delimiter!r}"
        )


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    pyarrow = import_extra("pyarrow", "datasets", f"{file}: Parquet", ", or save the table as CSV")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            positions = _find_columns(file, [name.strip().lower() for name in names])
            table = opened.read([names[at] for at in positions.values()])
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not readable as Parquet: {error}") from error
    for number, values in enumerate(table.rename_columns([*positions]).to_pylist(), start=1):
        # compare exact types, because True is an int
        if wrong := [
            column for column, value in values.items() if type(value) not in (str, int, type(None))
        ]:
            value: Any = values[wrong[0]]
            raise ValueError(
                f"{file}, row {number}: column {wrong[0]!r} contains {type(value).__name__}"
                f" ({value!r:.40}); expected text or integers"
            )
        yield (
            f"row {number}",
            {c: "" if value is None else str(value).strip() for c, value in values.items()},
        )


def _find_columns(file: Path, columns: Sequence[str]) -> dict[str, int]:
    """Map the names of the required and optional columns to their positions."""
    if missing := [column for column in NEEDED if column not in columns]:
        raise ValueError(
            f"{file}: no column {' and '.join(map(repr, missing))} among {columns[:12]}; the first"
            " line must name the columns: path, label, and optionally split"
        )
    used = [column for column in NEEDED + OPTIONAL if column in columns]
    if repeated := [column for column in used if columns.count(column) > 1]:
        raise ValueError(f"{file}: column names are repeated: {repeated}; keep one of each")
    return {column: columns.index(column) for column in used}


def _classes(
    file: Path, rows: Sequence[ManifestRow], purpose: Purpose
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """Return the class names, and the labels, keyed by the texts in the column `label`. These texts
    are class names or numbers 0, 1, ... (without gaps for the purpose `learn`)."""
    first = {row.label: row for row in reversed(rows)}
    if not all(map(_WHOLE.fullmatch, first)):
        way_out = "spell each class in one way, and give different classes more different names"
        classes = class_names(str(file), first, way_out)
        label_of = {composed(name): label for label, name in enumerate(classes)}
        return classes, {text: label_of[composed(text)] for text in first}
    numbers = {int(text): row for text, row in first.items()}
    most = len(numbers) - 1 if purpose == "learn" else max(numbers)
    if strange := sorted(number for number in numbers if not 0 <= number <= most):
        raise ValueError(
            f"{file}, {numbers[strange[0]].where}: label {strange[0]} among {len(numbers)}"
            f" different labels, expected numbers 0..{len(numbers) - 1}; number the classes from 0"
            " without gaps, or write class names"
        )
    places = {number: place for place, number in enumerate(sorted(numbers))}
    return tuple(map(str, places)), {text: places[int(text)] for text in first}
