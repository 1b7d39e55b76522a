"""Paths as people type them: every command and public function resolves each spelling to the same
place."""

import dataclasses
import os
import shutil
import sys
import typing
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))  # as where it is run

import ablations
import collect
import compare
import component_study
import head_analysis
import planted
import reproduce
import router_study
import search_study
import small
import tables
from test_commands_memory import FIRST, TASKS, cheem, write_task

import cheem_jax
from cheem_jax.backbone.alexnet import load_alexnet
from cheem_jax.backbone.weights import BUNDLED, load_pretrained
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.commands import COMMANDS
from cheem_jax.cli.main import main
from cheem_jax.core.hub import hub_errors
from cheem_jax.core.paths import absolute, shown, with_absolute_paths
from cheem_jax.data.load import ImagesConfig, default_directory, load_stream, load_task, load_tasks
from cheem_jax.data.records import default_data_dir
from cheem_jax.data.sources import cache_dir_of, plan_source, plan_stream_file
from cheem_jax.engine.compilation import NotCached, enable_cache

ELSEWHERE = "ein Ordner ü"
SPELLINGS = {
    "through the parent": "../{}",
    "with dots": "./.././{}",
    "from home": "~/{}",
    "with a slash at the end": "../{}/",
    "through a link": "link/{}",
    "through a link and back": "link/sub/../{}",
    "twice through the parent": "../here/../{}",
}


@pytest.fixture(scope="module", autouse=True)
def one_executor():
    with small.shared_executors():
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Commands run in the folder `here`; next to it are images, in folders with blanks and
    umlauts."""
    root = tmp_path_factory.mktemp("root")
    (root / "here").mkdir()
    (root / ELSEWHERE / "sub").mkdir(parents=True)
    (root / "here" / "link").symlink_to(root, target_is_directory=True)
    (root / "sub").mkdir()
    for name, task in TASKS.items():
        write_task(root / ELSEWHERE / "photos" / name, task)
    return root


@pytest.fixture(scope="module")
def mine(root):
    """A memory next to the images."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root / "here")
        words = ["--backbone", "vit_micro", "--preset", "demo"]
        patched.setattr(
            sys,
            "argv",
            ["cheem", "learn", f"../{ELSEWHERE}/mine", f"../{ELSEWHERE}/photos/{FIRST}", *words],
        )
        main()
    return root / ELSEWHERE / "mine"


@pytest.fixture
def here(root, monkeypatch):
    monkeypatch.chdir(root / "here")
    monkeypatch.setenv("HOME", str(root))
    return root / "here"


@pytest.fixture(params=SPELLINGS.values(), ids=SPELLINGS)
def spelled(request, here):
    """The spellings of a path below the root."""
    return lambda path: request.param.format(path)


def test_the_spellings_mean_one_place(root, spelled):
    place = absolute(spelled(f"{ELSEWHERE}/photos"))
    assert place.is_absolute()
    assert ".." not in place.parts
    assert os.path.samefile(place, root / ELSEWHERE / "photos")


@given(
    st.lists(st.sampled_from(["a", "..", ".", "", "b c", "ü"]), min_size=1, max_size=6).map(
        "/".join
    )
)
def test_a_path_is_absolute_and_normal_and_stays_so(text):
    result = absolute(f"./{text}")
    assert result.is_absolute() and not {".", ".."} & set(result.parts)
    assert absolute(result) == result == absolute(os.path.join(result, "."))


@pytest.mark.parametrize(
    "url", ["gs://b/x", "s3:/b/x", "HDFS://b/x", "https://a.org/x.png", "abfs://c@a.b/x"]
)
def test_a_url_is_refused_with_the_way_out(here, url):
    for one in (url, Path(url)):
        with pytest.raises(
            ValueError,
            match=r"is a URL; expected a file or folder of this machine: download it, or mount",
        ):
            absolute(one)
    with pytest.raises(ValueError, match="is a URL"):
        with_absolute_paths(ImagesConfig(cache_dir=Path(url)))
    (here / "stream.toml").write_text(f'[[task]]\npath = "{url}"\nname = "x"\n')
    with pytest.raises(ValueError, match="is a URL"):
        plan_source("stream.toml")
    assert absolute(f"./{url}").is_relative_to(here)  # a folder can be called so


def test_urls_of_files_and_of_the_hub_are_answered_with_the_right_spelling(here):
    with pytest.raises(ValueError, match=r"expected a path; give '/data/pets'"):
        absolute("file:///data/pets")
    with pytest.raises(ValueError, match="written hf:OWNER/NAME"):
        absolute("hf://datasets/a/b")
    assert absolute("c:/x") == here / "c:/x" and absolute("hf:a/b") == here / "hf:a/b"


@pytest.mark.parametrize(
    "words",
    [
        ["learn", "gs://b/mem", "photos"],
        ["learn", "mem", "s3://b/photos"],
        ["predict", "gs://b/mem", "x.png"],
        ["learn", "mem", "photos", "--images.cache-dir", "gs://b/c"],
        ["pull", "a/b", "gs://b/mem"],
        ["convert", "--backbone", "vit_micro", "--output", "gs://b/w.safetensors"],
        ["demo", "--run-dir", "gs://b/r"],
    ],
    ids=" ".join,
)
def test_commands_refuse_urls_before_anything_is_made(capsys, here, words):
    before = sorted(here.rglob("*"))
    status, out, err = cheem(capsys, *words)
    assert (status, out) == (2, "") and err.count("\n") == 1 and "is a URL" in err
    assert sorted(here.rglob("*")) == before


def test_without_a_home_folder_nothing_is_called_tilde(here, monkeypatch):
    # as Python answers where it finds no home
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for one in ("~", "~/x", Path("~/x")):
        with pytest.raises(
            ValueError, match="the home folder is unknown.*; set HOME, or give the full path"
        ):
            absolute(one)
    assert absolute("~$draft.png") == here / "~$draft.png"
    with pytest.raises(ValueError, match="home folder is unknown"):
        default_directory()
    # so that small images, which are never cached, are read all the same
    assert cache_dir_of("photos", None) is None
    import jax

    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        with pytest.raises(
            NotCached, match="home folder is unknown.*JAX_ENABLE_COMPILATION_CACHE=false"
        ):
            enable_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    with pytest.raises(ValueError, match="set HF_HOME"), hub_errors("a/b", "pull"):
        raise AssertionError("the hub was asked")


def test_a_path_is_shown_as_it_can_be_typed_here(here):
    assert shown(here / "runs" / "x") == "runs/x"
    assert shown(here) == str(here) and shown(here.parent / "y") == str(here.parent / "y")


def test_paths_in_settings_become_absolute_and_nothing_else_changes(here):
    @dataclasses.dataclass(frozen=True)
    class Inner:
        file: Path = Path("../x")
        name: str = "../y"

    @dataclasses.dataclass(frozen=True)
    class Outer:
        inner: Inner = Inner()
        runs: tuple[Path, ...] = (Path("a"), Path("~/b"))
        size: int = 3
        none: Path | None = None

    result = with_absolute_paths(Outer())
    assert result == Outer(Inner(here.parent / "x"), (here / "a", here.parent / "b"))
    assert with_absolute_paths(result) is result


# fmt: skip
MAINS = (
    ablations.Ablations,
    collect.Collect,
    compare.Compare,
    component_study.ComponentStudy,
    head_analysis.HeadAnalysis,
    planted.Planted,
    reproduce.Reproduce,
    router_study.RouterStudy,
    search_study.SearchStudy,
    tables.Tables,
)


@pytest.mark.parametrize(
    "settings",
    [*[kind for kind, _ in (command.load() for command in COMMANDS.values())], *MAINS],
    ids=lambda kind: kind.__name__,
)
def test_every_path_on_a_command_line_becomes_absolute(here, settings):
    hints = typing.get_type_hints(settings, include_extras=True)
    words = []
    wanted = {}
    for field in dataclasses.fields(settings):
        text = str(hints[field.name])
        if "Path" in text:
            is_positional = "Positional" in text
            words += (
                ["../a b/"] if is_positional else [f"--{field.name.replace('_', '-')}", "../a b/"]
            )
            wanted[field.name] = here.parent / "a b"
        elif (
            field.default is field.default_factory is dataclasses.MISSING
            and not dataclasses.is_dataclass(hints[field.name])
        ):
            words += (
                ["bash" if field.name == "shell" else "x"]
                if "Positional" in text
                else [f"--{field.name.replace('_', '-')}", "x"]
            )
    result = parse(settings, words)
    for name, place in wanted.items():
        assert getattr(result, name) in (place, (place,))


def test_nested_paths_of_a_command_line_become_absolute(here):
    result = cheem_run.read_arguments(
        ["--run-dir", "../r 1", "--weights", "~/w", "--images.cache-dir", "./c"]
    )
    assert (result.run_dir, result.weights, result.images.cache_dir) == (
        here.parent / "r 1",
        here.parent / "w",
        here / "c",
    )


@pytest.mark.full
def test_public_functions(root, mine, spelled):
    photos = spelled(f"{ELSEWHERE}/photos")
    memory = cheem_jax.open(spelled(f"{ELSEWHERE}/mine"))
    assert memory.directory.is_absolute() and [task.name for task in memory.tasks] == [FIRST]
    image = next((root / ELSEWHERE / "photos" / FIRST / "test").rglob("*.png"))
    one = spelled(image.relative_to(root)).rstrip("/")
    assert memory.predict(one)[0] == memory.predict(image)[0] == memory.predict([Path(one)])[0]
    assert memory.evaluate(f"{photos.rstrip('/')}/{FIRST}")[0].task == FIRST
    empty = spelled("empty memory")
    created = cheem_jax.create(empty, backbone="vit_micro", preset="demo")
    assert os.path.samefile(created.directory, root / "empty memory")
    shutil.rmtree(root / "empty memory")
    (task,) = load_tasks(
        plan_source(f"{photos.rstrip('/')}/{FIRST}")[1], 32, ImagesConfig("memory")
    )
    assert load_task(f"{photos.rstrip('/')}/{FIRST}", image_size=32).classes == task.classes
    assert [one.name for one in load_stream(photos, image_size=32).tasks] == sorted(TASKS)
    (root / ELSEWHERE / "stream.toml").write_text(
        f'[[task]]\npath = "../{ELSEWHERE}/photos/{FIRST}/"\n'
    )
    name, (plan,) = plan_stream_file(Path(spelled(f"{ELSEWHERE}/stream.toml").rstrip("/")))
    assert (name, plan.name) == ("stream", FIRST) and plan.classes == task.classes
    bundled = (
        Path(cheem_jax.__file__).parent
        / "backbone"
        / "bundled"
        / f"{sorted(BUNDLED)[0]}.safetensors"
    )
    shutil.copy(bundled, root / "weights.safetensors")
    weights = spelled("weights.safetensors").rstrip("/")
    assert load_pretrained(sorted(BUNDLED)[0], weights=weights).config.name == sorted(BUNDLED)[0]
    with pytest.raises(
        FileNotFoundError, match=f"weights file '{absolute(spelled('nothing'))}' does not exist"
    ):
        load_alexnet(spelled("nothing"))


def test_folders_that_the_environment_names(here, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "../data sets/")
    assert default_data_dir() == here.parent / "data sets"
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert default_data_dir() == here.parent / "tensorflow_datasets"
    import jax

    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", "../compiled functions/")
        assert enable_cache() == here.parent / "compiled functions"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_an_empty_path_is_not_the_working_directory(capsys, tmp_path):
    with pytest.raises(ValueError, match="'' is an empty path; give a file or folder, or . for"):
        absolute("")
    for words in (("predict", tmp_path / "pets", "a.png", ""), ("learn", tmp_path / "pets", "")):
        status, _, err = cheem(capsys, *words)
        assert status == 2 and "'' is an empty path" in " ".join(err.split())
    assert not (tmp_path / "pets").exists()
