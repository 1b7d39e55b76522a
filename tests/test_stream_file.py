from pathlib import Path

import pytest
from PIL import Image

from cheem_jax.data import ImagesConfig, load_tasks
from cheem_jax.data.sources import MissingTasks, plan_source, plan_stream_file
from cheem_jax.memory.data import read_tasks


def photos(root: Path, num: int = 4) -> Path:
    """Write `num` images per class: a/0.png and so on, and b/0.png and so on."""
    for grey, name in enumerate("ab"):
        (root / name).mkdir(parents=True)
        for i in range(num):
            Image.new("L", (4, 4), 10 * grey + i).save(root / name / f"{i}.png")
    return root


def manifest(file: Path, num: int = 4) -> Path:
    file.write_text(
        "path,label\n" + "".join(f"{name}/{i}.png,{name}\n" for name in "ab" for i in range(num))
    )
    return file


def write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


TWO = """
name = "my_stream"
[[task]]
name = "birds"
path = "photos/birds"
[[task]]
manifest = "cars.csv"
root = "images"
"""


@pytest.fixture
def two(tmp_path) -> Path:
    photos(tmp_path / "photos" / "birds")
    photos(tmp_path / "images")
    manifest(tmp_path / "cars.csv")
    return write(tmp_path / "stream.toml", TWO)


def test_a_stream_lists_folders_and_manifests_in_its_own_order(two):
    name, plans = plan_stream_file(two)
    assert (name, [plan.name for plan in plans]) == ("my_stream", ["birds", "cars"])
    tasks = load_tasks(plans, 4, ImagesConfig("memory"))
    assert [task.classes for task in tasks] == [("a", "b"), ("a", "b")]


def test_names_default_to_the_file_and_to_the_paths_of_the_tasks(two):
    write(two, '[[task]]\npath = "photos/birds"\n[[task]]\nmanifest = "cars.csv"\nroot = "images"')
    name, plans = plan_stream_file(two)
    assert (name, [plan.name for plan in plans]) == ("stream", ["birds", "cars"])


def test_paths_start_at_the_file_and_a_tilde_is_the_home(two, monkeypatch):
    monkeypatch.setenv("HOME", str(two.parent / "photos"))
    monkeypatch.chdir("/")
    sub = two.parent / "sub"
    sub.mkdir()
    text = (
        '[[task]]\npath = "~/birds"\n[[task]]\nmanifest = "../cars.csv"\nroot ='
        f' "{two.parent}/images"'
    )
    assert [plan.name for plan in plan_stream_file(write(sub / "s.toml", text))[1]] == [
        "birds",
        "cars",
    ]


def test_backslashes_separate_folders_unless_something_here_is_called_so(two):
    text = (
        "[[task]]\npath = 'photos\\birds'\n[[task]]\nmanifest = '.\\cars.csv'\nroot = '.\\images'\n"
    )
    _, plans = plan_stream_file(write(two, text))
    assert [(plan.name, plan.num_images) for plan in plans] == [("birds", 8), ("cars", 8)]
    photos(two.parent / "photos\\birds", num=5)
    _, plans = plan_stream_file(two)
    assert [(plan.name, plan.num_images) for plan in plans] == [("photos\\birds", 10), ("cars", 8)]
    with pytest.raises(FileNotFoundError, match="photos/fish: no such folder or zip"):
        plan_stream_file(write(two, "[[task]]\npath = 'photos\\fish'\n"))


def test_only_the_named_tasks_are_looked_at_and_in_their_order(two):
    write(two, TWO + '[[task]]\npath = "nowhere"')
    assert [plan.name for plan in plan_stream_file(two, ["cars", "birds"])[1]] == ["cars", "birds"]
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder or zip"):
        plan_stream_file(two)
    with pytest.raises(ValueError, match="stream.toml has no task 'car'; did you mean cars?"):
        plan_stream_file(two, ["car"])


def test_the_seed_of_the_file_is_used_and_another_one_refused(two):
    def hashes(text: str, seed: int) -> list[str]:
        return [plan.split_sha256 for plan in plan_stream_file(write(two, text), seed=seed)[1]]

    seeds = [hashes(TWO, seed) for seed in range(3)]
    assert len({tuple(result) for result in seeds}) > 1
    assert all(hashes(f"seed = {seed}\n{TWO}", 0) == seeds[seed] for seed in range(3))
    with pytest.raises(ValueError, match="sets seed to 2, and --split-seed is 9; leave out one"):
        hashes(f"seed = 2\n{TWO}", 9)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "",
            "no ..task..; write one or more, each followed by one of path, manifest, tfds, hub",
        ),
        ("[[task]\n", r"not readable as TOML: .*line 1"),
        ('name = "x"\n[[task]]\npath = "a"\npath = "b"\n', "not readable as TOML: .*line 4"),
        ("x = " + "[" * 5000, "not readable as TOML"),
        ('[task]\npath = "a"', r"`task` must be a list of tables; write \[\[task\]\]"),
        ("task = [1]", "`task` must be a list of tables"),
        ('[[tasks]]\npath = "a"', "unknown key 'tasks'; did you mean 'task'"),
        (
            "colour = 1\n" + TWO,
            "unknown key 'colour'; expected one of class_order, .*, name, seed, task",
        ),
        ("seed = true\n" + TWO, "seed must be an integer of at most 64 bits"),
        (
            'name = ""\n[[task]]\npath = "a"',
            "name must be a text that is not empty, without NUL, got ''",
        ),
        (
            "[[task]]\npath = 3",
            "task 1: path must be a text that is not empty, without NUL, got int",
        ),
        (
            '[[task]]\nname = "a"',
            "task 1: expected exactly one of path, manifest, tfds, hub, benchmark, got none",
        ),
        (
            '[[task]]\npath = "a"\ntfds = "b"',
            "task 1: expected exactly one of .* got path and tfds",
        ),
        (
            '[[task]]\npath = "a"\nroot = "b"',
            "task 1: `root` can only be used with `manifest`, not with `path`",
        ),
        (
            TWO + '[[task]]\nmanifets = "a"',
            "task 3: unknown key 'manifets'; did you mean 'manifest'.*task 3: expected",
        ),
        (
            TWO + '[[task]]\ntfds = "cars:1.0.0"',
            r"task names are repeated: \['cars'\]; give each task a different `name`",
        ),
        ('[[task]]\nbenchmark = "fod101"', "has no task 'fod101'; did you mean food101"),
    ],
)
def test_unusable_files_are_refused_with_all_their_faults(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=f"(stream.toml: .*|the benchmarks' table ){complaint}"):
        plan_stream_file(write(tmp_path / "stream.toml", text))


def test_a_file_that_is_missing_or_in_another_encoding_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="stream.toml: no such file; expected a stream in TOML"
    ):
        plan_stream_file(tmp_path / "stream.toml")
    (tmp_path / "stream.toml").write_bytes('name = "é"'.encode("latin-1"))
    with pytest.raises(ValueError, match="stream.toml: not readable as TOML"):
        plan_stream_file(tmp_path / "stream.toml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('path = "a\\u0000b"', "path must be a text that is not empty"),
        ("seed = 0x" + "f" * 6000, "seed must be an integer of at most 64 bits"),
        ("name = [0x" + "f" * 6000 + "]", "name must be a text that is not empty"),
        ("x = " + "[" * 100_000, "not readable as TOML"),
        ("# " + "x" * 2**20, "expected a stream file of at most 1048576"),
    ],
)
def test_hostile_values_are_reported_with_the_file(tmp_path, line, message):
    file = tmp_path / "stream.toml"
    file.write_text(
        f"[[task]]\n{line}\n" if line.startswith("path") else f'{line}\n[[task]]\npath = "x"\n'
    )
    with pytest.raises(ValueError, match=rf"stream\.toml.*{message}"):
        plan_stream_file(file)


def test_a_path_that_links_to_itself_is_reported(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "stream.toml").write_text('[[task]]\npath = "loop"\n')
    with pytest.raises(OSError, match="loop"):
        plan_stream_file(tmp_path / "stream.toml")


def test_the_home_of_nobody_is_only_a_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="~nobody-at-all/x: no such folder"):
        plan_source("~nobody-at-all/x", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["pets", "mtil", "tfds:pets", "hf:pets"])
def test_a_name_that_is_also_a_folder_of_images_is_refused_with_both_meanings(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / name)
    with pytest.raises(
        ValueError,
        match=(
            rf"'{name}' is ambiguous: it means .*, and .*/{name} contains images; write"
            rf" \./{name} to use"
        ),
    ):
        plan_source(name, data_dir=tmp_path / "nothing")
    assert [plan.name for plan in plan_source(f"./{name}")[1]] == [name]
    tasks = read_tasks(Path(f"./{name}"), 4, upright=True)  # which pathlib treats as Path(name)
    assert [task.name for task in tasks] == [name]


def test_a_directory_with_some_figures_does_not_hide_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pets", "a text")
    (tmp_path / "mtil" / "figures").mkdir(parents=True)
    (tmp_path / "mtil" / "figures" / "1.png").write_bytes(b"x")
    for name in ("pets", "mtil"):
        with pytest.raises(MissingTasks, match="not prepared"):
            plan_source(name, data_dir=tmp_path)
