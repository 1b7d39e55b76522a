import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from cheem_jax.data import ImagesConfig, fingerprint, load_tasks, plan_task
from cheem_jax.data.folder import plan_manifest
from cheem_jax.data.sources import plan_source
from cheem_jax.data.verify import verify, without_broken

NAMES = {"cat": 10, "dog": 20}  # each with its grey


def photos(root: Path, num: int = 4) -> Path:
    """Write `num` images per class: cat/0.png and so on, and dog/0.png and so on."""
    for name, grey in NAMES.items():
        (root / name).mkdir(parents=True)
        for i in range(num):
            Image.new("L", (4, 4), grey + i).save(root / name / f"{i}.png")
    return root


def table(file: Path, *lines: str, newline: str = "\n", encoding: str = "utf-8") -> Path:
    file.write_bytes("".join(line + newline for line in lines).encode(encoding))
    return file


def rows(num: int = 4, end: str = "{name}") -> list[str]:
    return [f"{name}/{i}.png," + end.format(name=name, i=i) for name in NAMES for i in range(num)]


SPLIT = ["train", "train", "val", "test"]
WITH_SPLITS = [f"{name}/{i}.png,{name},{SPLIT[i]}" for name in NAMES for i in range(4)]


def members(plan) -> dict[str, list[tuple[str, str]]]:
    """Return (key, class name) of every image, by split."""
    return {
        split: [(part.files.key(row), plan.classes[label]) for row, label in enumerate(part.labels)]
        for split, part in plan.splits.items()
    }


def test_a_manifest_tells_files_labels_and_splits(tmp_path):
    file = table(photos(tmp_path) / "pets.csv", "path,label,split", *WITH_SPLITS)
    plan = plan_manifest(file)
    assert (plan.name, plan.classes) == ("pets", ("cat", "dog"))
    assert plan.source == f"{file.resolve()}, files in {tmp_path.resolve()}"
    assert members(plan) == {
        "train": [
            ("cat/0.png", "cat"),
            ("cat/1.png", "cat"),
            ("dog/0.png", "dog"),
            ("dog/1.png", "dog"),
        ],
        "val": [("cat/2.png", "cat"), ("dog/2.png", "dog")],
        "test": [("cat/3.png", "cat"), ("dog/3.png", "dog")],
    }
    (task,) = load_tasks([plan], 4, ImagesConfig("memory"))
    assert task.test.images[:][:, 0, 0, 0].tolist() == [13, 23]


def test_the_order_of_the_rows_changes_nothing(tmp_path):
    photos(tmp_path)
    plans = [
        plan_manifest(table(tmp_path / f"{i}.csv", "path,label", *lines), name="pets", seed=3)
        for i, lines in enumerate((rows(), rows()[::-1]))
    ]
    assert members(plans[0]) == members(plans[1]) and plans[0].split_sha256 == plans[1].split_sha256


def test_a_manifest_of_a_folder_loads_the_same_task_as_the_folder(tmp_path):
    photos(tmp_path / "pets", num=9)
    file = table(tmp_path / "list.csv", "path,label", *rows(9))
    folder = plan_task(tmp_path / "pets", seed=5)
    listed = plan_manifest(file, name="pets", root=tmp_path / "pets", seed=5)
    assert listed.split_sha256 == folder.split_sha256
    tasks = load_tasks([folder, listed], 4, ImagesConfig("memory"))
    assert fingerprint(tasks[0]) == fingerprint(tasks[1])


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize(
    ("newline", "encoding"), [("\n", "utf-8"), ("\r\n", "utf-8-sig"), ("\r", "utf-8")]
)
def test_tables_are_read_in_the_usual_dialects(tmp_path, delimiter, newline, encoding):
    lines = [
        'Note, Label ,SPLIT,"path"',
        *(f"é,{label},{s},{p}" for p, label, s in map(_fields, WITH_SPLITS)),
        "",
    ]
    lines = [line.replace(",", delimiter) for line in lines]
    file = table(photos(tmp_path) / "pets.csv", *lines, newline=newline, encoding=encoding)
    assert [len(part.labels) for part in plan_manifest(file).splits.values()] == [4, 2, 2]


def _fields(line: str) -> list[str]:
    return line.split(",")


def test_quoted_fields_hold_delimiters_and_names_any_letters(tmp_path):
    photos(tmp_path)
    lines = [
        f'"{name}/{i}.png","{label}"'
        for name, label in (("cat", "猫, grau"), ("dog", "chien"))
        for i in range(4)
    ]
    assert plan_manifest(table(tmp_path / "pets.csv", "path,label", *lines)).classes == (
        "chien",
        "猫, grau",
    )
    spaced = [line.replace('","', '", "') for line in lines]
    assert plan_manifest(table(tmp_path / "spaced.csv", "path, label", *spaced)).classes == (
        "chien",
        "猫, grau",
    )


def test_splits_bear_the_usual_names_in_either_case(tmp_path):
    lines = [line.replace("train", "Train").replace("val", "VALIDATION") for line in WITH_SPLITS]
    plan = plan_manifest(table(photos(tmp_path) / "pets.csv", "path,label,split", *lines))
    assert [len(part.labels) for part in plan.splits.values()] == [4, 2, 2]


def test_missing_splits_are_cut_from_train(tmp_path):
    photos(tmp_path, num=10)
    plan = plan_manifest(table(tmp_path / "all.csv", "path,label", *rows(10)))
    # ceil(6.0), then ceil(1.4)
    assert [len(part.labels) for part in plan.splits.values()] == [12, 2, 6]
    lines = [f"{line},{'test' if '/9' in line else 'train'}" for line in rows(10)]
    plan = plan_manifest(table(tmp_path / "two.csv", "path,label,split", *lines))
    assert [len(part.labels) for part in plan.splits.values()] == [16, 2, 2]
    assert [key for key, _ in members(plan)["test"]] == ["cat/9.png", "dog/9.png"]


def test_paths_are_posix_ones_below_the_root(tmp_path):
    photos(tmp_path / "images")
    lines = [line.replace("cat/", ".\\cat\\").replace("dog/", "./dog//") for line in rows()]
    plan = plan_manifest(
        table(tmp_path / "pets.csv", "path,label", *lines), root=tmp_path / "images"
    )
    keys = sorted(key for part in members(plan).values() for key, _ in part)
    assert keys == [f"{name}/{i}.png" for name in NAMES for i in range(4)]


def test_label_numbers_are_their_own_names(tmp_path):
    photos(tmp_path)
    number = {"cat": 1, "dog": 0}
    lines = [f"{name}/{i}.png,{number[name]},{name}" for name in NAMES for i in range(4)]
    plan = plan_manifest(table(tmp_path / "b.csv", "path,label,note", *lines))
    assert plan.classes == ("0", "1")
    assert {(key[:3], name) for part in members(plan).values() for key, name in part} == {
        ("cat", "1"),
        ("dog", "0"),
    }


def test_eleven_label_numbers_keep_their_order(tmp_path):
    lines = []
    for label in range(11):
        for i in range(3):
            Image.new("L", (2, 2), label).save(tmp_path / f"{label}-{i}.png")
            lines.append(f"{label}-{i}.png,{label}")
    plan = plan_manifest(table(tmp_path / "many.csv", "path,label", *lines))
    assert plan.classes == tuple(map(str, range(11)))  # sorted as text, 10 would be before 2


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], r"no column 'path' and 'label' among \[\]"),
        (["file,label", *rows()], r"no column 'path' among \['file', 'label'\]"),
        (["path,label,label", *rows(end="a,b")], r"column names are repeated: \['label'\]"),
        (["path,label"], "no rows"),
        (["path,label", *rows(), ",cat"], "1 error.*line 10: empty path"),
        (
            ["path,label", *rows(), "cat/0.png, "],
            "line 10: path 'cat/0.png' is also in line 2; line 10: empty",
        ),
        (
            ["path,label", *rows(), "./cat//0.png,cat"],
            "path 'cat/0.png' is also in line 2",
        ),
        (["path,label", "../a.png,cat"], "line 2: path '../a.png' is outside of the root"),
        (
            ["path,label", "cat/../../a.png,cat"],
            "line 2: path 'cat/../../a.png' is outside of the root",
        ),
        (
            ["path,label", "/a.png,cat", "C:\\a.png,cat"],
            "2 error.*'/a.png' is outside of.*line 3: path 'C:/a.png' is outside of",
        ),
        (
            ["path,label,split", *rows(end="a,tset")],
            "8 error.*line 2: unknown split 'tset', expected train.* 3 more",
        ),
        (["path,label", *rows(), "cat/0.png"], "expected 2 fields in every row.*line 10: 1;.*put"),
        (["path,label", *rows(), "a,b.png,cat"], "line 10: 3"),
        (["path,label", *rows(), '"cat/0.png,cat'], "line 10: not readable as CSV"),
        (["path,label", *rows(), "cat/0\0.png,cat"], "line 10: path .* is outside of the root"),
        (["path,label,split", *rows(end="{name},test")], r"no split 'train', only \['test'\]"),
        (["path,label,split", *WITH_SPLITS[:4]], "has 1 class"),
        (
            ["path,label,split", *[line for line in WITH_SPLITS if "test" not in line]],
            "train and val but no test",
        ),
        (
            ["path,label,split", *[line.replace("dog,train", "dog,val") for line in WITH_SPLITS]],
            "split 'train': no image of 1 of 2 classes: 'dog'",
        ),
        (
            ["path,label,split", *WITH_SPLITS[:-1]],
            "split 'test': no image of 1 of 2 classes: 'dog'",
        ),
        (["path,label", *rows()[:6]], "needs 3 images or more; too few in 'dog'"),
    ],
)
def test_unusable_tables_are_refused_by_line(tmp_path, lines, complaint):
    file = table(photos(tmp_path) / "pets.csv", *lines)
    with pytest.raises(ValueError, match=rf"(?s)(pets\.csv|'pets').*{complaint}"):
        plan_manifest(file)


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        (
            ("1", "2"),
            (
                r"line 6: label 2 among 2 different labels, expected numbers 0..1; number the"
                r" classes from 0"
            ),
        ),
        (("0", "3"), "line 6: label 3 among 2 different labels, expected numbers 0..1; number"),
        (("0", "9" * 18), "line 6: label 9{18} among 2 different labels"),
        (("0", "-1"), "line 6: label -1 among 2 different labels"),
    ],
)
def test_label_numbers_that_do_not_count_from_zero_are_refused(tmp_path, labels, complaint):
    photos(tmp_path)
    lines = [
        f"{name}/{i}.png,{label}"
        for name, label in zip(NAMES, labels, strict=True)
        for i in range(4)
    ]
    with pytest.raises(ValueError, match=complaint):
        plan_manifest(table(tmp_path / "pets.csv", "path,label", *lines))


def test_some_of_the_numbers_do_for_more_images_and_to_measure(tmp_path):
    photos(tmp_path)
    lines = [
        f"{name}/{i}.png,{label}"
        for name, label in zip(NAMES, ("2", "10"), strict=True)
        for i in range(4)
    ]
    for purpose in ("extend", "measure"):
        plan = plan_manifest(table(tmp_path / "pets.csv", "path,label", *lines), purpose=purpose)
        assert plan.classes == ("2", "10") and plan.num_images == 8
        assert {(key[:3], name) for groups in members(plan).values() for key, name in groups} == {
            ("cat", "2"),
            ("dog", "10"),
        }
    test_alone = [f"cat/{i}.png,2,test" for i in range(4)]
    plan = plan_manifest(
        table(tmp_path / "pets.csv", "path,label,split", *test_alone), purpose="measure"
    )
    assert plan.counts == {"train": 0, "val": 0, "test": 4}


def test_other_encodings_are_refused_with_their_line(tmp_path):
    file = table(tmp_path / "pets.csv", "path,label", "a.png,cat", "b.png,café", encoding="latin-1")
    with pytest.raises(ValueError, match="pets.csv, line 3: not UTF-8"):
        plan_manifest(file)
    file = table(tmp_path / "pets.csv", "path,label", "a.png,cat", encoding="utf-16")
    with pytest.raises(ValueError, match="pets.csv, line 1: not UTF-8"):
        plan_manifest(file)


def test_a_file_whose_name_has_another_unicode_form_is_named(tmp_path):
    photos(tmp_path)
    (tmp_path / "cat" / "0.png").rename(tmp_path / "cat" / "e\u0301.png")
    file = table(tmp_path / "pets.csv", "path,label", "cat/\u00e9.png,cat", *rows()[1:])
    (broken,) = verify(plan_manifest(file)).broken
    assert "no such file, but '" in broken
    assert broken.endswith(r"cat/e\u0301.png', whose accents are composed otherwise; rename one")


@pytest.mark.parametrize("keep", ["memory", "cache"])
def test_files_that_are_not_there_are_broken_images_unless_all_are(tmp_path, keep):
    photos(tmp_path, num=19)
    file = table(tmp_path / "pets.csv", "path,label", *rows(20))
    plan = plan_manifest(file)
    assert [line.split(tmp_path.name)[1] for line in sorted(verify(plan).broken)] == [
        "/cat/19.png: no such file",
        "/dog/19.png: no such file",
    ]
    with pytest.raises(
        ValueError,
        match="2 image file.*/(cat|dog)/19.png: no such file; .*/19.png: no such file; rep",
    ):
        load_tasks([plan], 4, ImagesConfig(keep, tmp_path / "cache"))
    rest, reasons = without_broken(plan)
    assert len(reasons) == 2 and rest.num_images == 38
    Image.new("L", (4, 4)).save(tmp_path / "cat" / "19.png")
    assert plan_manifest(file).stamp != plan.stamp
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(
        FileNotFoundError, match="none of its 40 files exists: line 2: 'cat/0.png'; .*; and 35 more"
    ):
        plan_manifest(file, root=tmp_path / "elsewhere")
    file = table(tmp_path / "folder.csv", "path,label", *rows(), "cat,cat")
    assert [line.split(tmp_path.name)[1] for line in verify(plan_manifest(file)).broken] == [
        "/cat: not a regular file"
    ]
    with pytest.raises(FileNotFoundError, match="nowhere.csv: no such file"):
        plan_manifest(tmp_path / "nowhere.csv")
    with pytest.raises(FileNotFoundError, match="away: no such folder; the paths in .*folder.csv"):
        plan_manifest(file, root=tmp_path / "away")


def test_the_stamp_follows_the_files_and_the_table(tmp_path):
    file = table(photos(tmp_path) / "pets.csv", "path,label", *rows())
    before = plan_manifest(file).stamp
    assert plan_manifest(file).stamp == before
    Image.new("L", (9, 9)).save(tmp_path / "cat" / "0.png")
    after = plan_manifest(file).stamp
    table(file, "path,label", *rows(), "")
    assert len({before, after, plan_manifest(file).stamp}) == 3


def test_parquet_says_the_same_as_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    photos(tmp_path)
    want = plan_manifest(table(tmp_path / "pets.csv", "path,label,split", *WITH_SPLITS))
    paths, names, splits = zip(*map(_fields, WITH_SPLITS), strict=True)
    columns = {
        "path": paths,
        "Label": pyarrow.array(names).dictionary_encode(),
        "split": splits,
        "x": [1.5] * 8,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    plan = plan_manifest(tmp_path / "a.parquet", name="pets")
    assert plan.split_sha256 == want.split_sha256
    numbers = pyarrow.array([int(name == "dog") for name in names], "int8")
    parquet.write_table(pyarrow.table({"path": paths, "label": numbers}), tmp_path / "b.parquet")
    assert plan_manifest(tmp_path / "b.parquet").classes == ("0", "1")
    (tmp_path / "b.parquet").rename(tmp_path / "b.pq")
    assert plan_source(str(tmp_path / "b.pq"))[1][0].classes == ("0", "1")


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"file": ["a"], "label": [0]}, r"no column 'path' among \['file', 'label'\]"),
        (
            {"path": ["a", None], "label": [0, None]},
            "2 error.*row 2: empty path; row 2: empty label",
        ),
        (
            {"path": ["a"], "label": [0.5]},
            r"column 'label' contains float \(0.5\); expected text or integers",
        ),
        ({"path": ["a"], "label": [True]}, "row 1: column 'label' contains bool"),
        ({"path": [b"a"], "label": [1]}, "column 'path' contains bytes"),
        ({"path": ["a\0b"], "label": [1]}, "row 1: path .* is outside of the root"),
        ({"path": [], "label": []}, "no rows"),
    ],
)
def test_unusable_parquet_is_refused_by_row(tmp_path, columns, complaint):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"a\.parquet.*{complaint}"):
        plan_manifest(tmp_path / "a.parquet")


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="a.parquet: not readable as Parquet"):
        plan_manifest(table(tmp_path / "a.parquet", "path,label"))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match=r"a.parquet: .*pip install 'cheem_jax\[datasets\]'.*as CSV"
    ):
        plan_manifest(table(tmp_path / "a.parquet", "path,label"))


def test_the_time_grows_with_the_rows_and_not_with_their_square(tmp_path):
    def seconds(num: int) -> float:
        folder = tmp_path / str(num)
        folder.mkdir()
        for i in range(num):
            (folder / f"{i}.png").touch()
        file = table(folder / "many.csv", "path,label", *(f"{i}.png,{i % 100}" for i in range(num)))
        start = time.process_time()
        assert plan_manifest(file).num_images == num
        return time.process_time() - start

    seconds(300)  # imports
    assert seconds(8000) < 100 * seconds(500)  # by the square it would be 256 times


def test_a_first_line_too_long_for_a_field_is_reported(tmp_path):
    file = tmp_path / "cars.csv"
    file.write_text("path,label," + "x" * 200_000 + "\n")
    with pytest.raises(
        ValueError, match=r"cars\.csv, line \d: not readable as CSV: field larger than field limit"
    ):
        plan_manifest(file)


def test_one_class_alone_is_reported_with_the_file(tmp_path):
    (tmp_path / "1.png").write_bytes(b"x")
    (tmp_path / "cars.csv").write_text("path,label\n1.png,car\n")
    with pytest.raises(ValueError, match="cars.csv, .* too few in 'car'"):
        plan_manifest(tmp_path / "cars.csv")


def test_a_label_in_two_compositions_is_one_class_and_one_in_two_cases_is_refused(tmp_path):
    photos(tmp_path)
    names = ["mus\u00e9e", "muse\u0301e", "mus\u00e9e", "muse\u0301e"]
    lines = [
        f"{name}/{i}.png,{names[i] if name == 'cat' else name}" for name in NAMES for i in range(4)
    ]
    assert plan_manifest(table(tmp_path / "pets.csv", "path,label", *lines)).classes == (
        "dog",
        "mus\u00e9e",
    )
    lines[0] = "cat/0.png,MUS\u00c9E"
    with pytest.raises(
        ValueError,
        match=r"pets\.csv: classes \['MUS.*', 'mus.*'\] differ only in upper and lower case; spell",
    ):
        plan_manifest(table(tmp_path / "pets.csv", "path,label", *lines))


def test_the_first_line_of_excel_names_the_separator(tmp_path):
    lines = ["path;label", *(line.replace(",", ";") for line in rows(10))]
    assert plan_manifest(table(photos(tmp_path) / "pets.csv", "sep=;", *lines)).num_images == 20
    with pytest.raises(ValueError, match="line 23: 1"):
        plan_manifest(table(tmp_path / "bad.csv", "sep=;", *lines, "alone"))
