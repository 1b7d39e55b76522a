"""Settings and the command line that rebuilds them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cheem_jax.baselines import catalogue
from cheem_jax.cheem.config import PRESETS, CheemConfig, ExplorationConfig, OpSettings, SearchConfig
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import arguments_of, located, parse
from cheem_jax.cli.demo import Demo
from cheem_jax.core.routing import RouterConfig
from cheem_jax.core.settings import FitConfig, SeedsConfig
from cheem_jax.data.load import ImagesConfig
from cheem_jax.engine.choice import EngineConfig

# "None" is the missing value on a command line; an argument contains no NUL
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0")).filter(
    lambda text: text != "None"
)
TEXTS = TEXT | st.sampled_from(
    ["", "-x", "--seed", "--preset=demo", "a b", "=", "'\"", "@file", "-1"]
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/~"), min_size=1, max_size=9)
PATHS = st.lists(NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map(
    lambda names: Path.cwd().joinpath(*names)
)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
SHARES = st.floats(0, 1)
COUNTS = st.integers(1, 10**9)
ENGINES = st.builds(
    EngineConfig,
    executor=st.sampled_from(["auto", "stages", "whole", "scan"]),
    precision=st.sampled_from(["float32", "bfloat16"]),
    memory_gb=st.none() | st.floats(0, 1e9),
    deterministic=st.booleans(),
    programs=COUNTS,
    steps_per_call=COUNTS,
)
FITS = st.builds(
    FitConfig,
    COUNTS,
    POSITIVE,
    st.sampled_from(["cosine", "constant"]),
    st.sampled_from(["stop", "skip"]),
)
SEED = st.integers(0, 2**32 - 1)
SEEDS = st.builds(SeedsConfig, initialisation=st.none() | SEED, search=st.none() | SEED)
DEMOS = st.builds(
    Demo,
    run_dir=PATHS,
    seed=st.integers(),
    seeds=SEEDS,
    upper_bound=st.booleans(),
    engine=ENGINES,
    save_every=st.none() | POSITIVE,
)
METHODS = st.builds(
    CheemConfig,
    placement=st.sampled_from(["mlp_down", "attn_proj"]),
    ops=st.builds(OpSettings, rank=st.integers(1, 64)),
    supernet=FITS,
    sampling=st.sampled_from(["hee", "uniform"]),
    exploration=st.builds(ExplorationConfig, epsilon=SHARES),
    search=st.builds(SearchConfig, population=COUNTS, epsilon=SHARES, tolerance=SHARES),
    finetune=FITS,
    router=st.builds(RouterConfig, num_centroids=COUNTS),
    batch_size=COUNTS,
    remove=st.sampled_from([(), ("skip",), ("new", "reuse")]),
    weights=st.sampled_from(["initial", "inherited"]),
)
MTILS = st.builds(
    cheem_run.RunSettings,
    cheem=METHODS | st.sampled_from(list(PRESETS.values())),
    preset=st.sampled_from(list(PRESETS)),
    backbone=TEXTS,
    weights=st.none() | PATHS,
    stream=TEXTS,
    data_dir=st.none() | PATHS,
    tasks=st.none() | TEXTS,
    classes_per_task=st.none() | COUNTS,
    first_task=st.none() | COUNTS,
    class_order=st.none() | TEXTS,
    split_seed=st.integers(),
    images=st.builds(
        ImagesConfig, keep=st.sampled_from(["auto", "cache"]), cache_dir=st.none() | PATHS
    ),
    image_size=st.none() | st.integers(),
    engine=ENGINES,
    seed=st.integers(),
    seeds=SEEDS,
    num_seeds=st.none() | COUNTS,
    save_every=st.none() | POSITIVE,
    upper_bound=st.booleans(),
    run_dir=PATHS,
)


@given(DEMOS, st.booleans())
@settings(max_examples=10)
def test_the_arguments_of_a_demo_rebuild_its_settings_from_any_defaults(demo, bound):
    assert parse(Demo, arguments_of(demo)) == demo
    assert parse(Demo(upper_bound=bound, seed=7), arguments_of(demo)) == demo


# beartype looks at a random item of `remove`, a tuple of any length
@pytest.mark.filterwarnings(
    "ignore:Do not use the .random. module:hypothesis.errors.HypothesisDeprecationWarning"
)
@given(MTILS)
@settings(max_examples=12)
def test_the_arguments_of_mtil_rebuild_its_settings_from_any_preset(given_settings):
    assert cheem_run.read_arguments(arguments_of(given_settings)) == given_settings


@pytest.mark.parametrize("method", catalogue.NAMES)
@pytest.mark.parametrize("preset", ["paper", "demo"])
def test_the_arguments_of_every_method_rebuild_its_settings(method, preset):
    options = None if method in ("cheem", "cheem_lite") else catalogue.make_preset(method, preset)
    if hasattr(options, "fit"):
        options = dataclasses.replace(
            options, fit=dataclasses.replace(options.fit, epochs=3), batch_size=7
        )
    asked = cheem_run.RunSettings(
        cheem=PRESETS["quick"],
        preset="quick",
        method=method,
        options=options,
        run_dir=Path("/runs"),
    )
    assert cheem_run.read_arguments(arguments_of(asked)) == asked
    assert cheem_run.make_method_config(asked).name == method


def test_of_options_given_twice_the_last_one_counts_everywhere():
    twice = cheem_run.read_arguments(
        ["--method", "ewc", "--method=l2p", "--preset", "quick", "--preset", "demo"]
    )
    assert cheem_run.make_method_config(twice) == catalogue.make_preset("l2p", "demo")


def test_settings_of_another_method_are_refused():
    asked = cheem_run.read_arguments(["--method", "l2p", "--cheem.ops.rank", "3"])
    with pytest.raises(ValueError, match="the settings of l2p are --options"):
        cheem_run.make_method_config(asked)
    for words, name in (
        (["--method", "l2p"], "l2p"),
        (["--preset", "quick_plus"], "backward elimination"),
    ):
        with pytest.raises(ValueError, match=f"similarity of CHEEM, which {name} does not use"):
            cheem_run.make_run_config(cheem_run.read_arguments([*words, "--base-data", "pictures"]))


def test_paths_become_absolute_and_a_home_folder_is_looked_up():
    arguments = arguments_of(Demo(run_dir=Path("runs/here")))
    assert arguments[:2] == ["--run-dir", os.path.join(os.getcwd(), "runs/here")]
    assert arguments_of(Demo(run_dir=Path("~/runs")))[1] == str(Path.home() / "runs")


WRONG = {
    "FitConfig(1, schedule='cosin')": "schedule is 'cosin'; expected one of cosine, warm_cosine, ",
    "FitConfig(1.5)": "epochs is 1.5; expected an integer",
    "FitConfig(1, float('inf'))": "learning_rate is inf; expected a positive, finite number",
    "OpSettings(new_rate=float('inf'))": "new_rate is inf; expected a positive, finite multiple",
    "OpSettings(truncated_rank='all')": "truncated_rank is 'all'; expected an integer or None",
    "RouterConfig(kind='kmean')": "kind is 'kmean'; expected one of kmeans, lda",
    "CheemConfig(sampling='anchor')": "sampling is 'anchor'; expected one of hee, uniform, anch",
    "CheemConfig(remove=('Skip',))": "remove is ('Skip',); expected a tuple, each one of reuse, ",
    "CheemConfig(remove=KINDS)": "each once, and not all of them",
    "CheemConfig(finetune=20)": "finetune is 20; expected FitConfig",
    "LoraClConfig(op='adpt')": "op is 'adpt'; expected one of adapt, new",
    "EngineConfig('wole')": "executor is 'wole'; expected one of auto, stages, whole, scan",
    "MeshConfig('al')": "devices is 'al'; expected all or an integer",
    "ImagesConfig('disk')": "keep is 'disk'; expected one of auto, memory, cache, stream",
}
"""Settings, and a part of the error; the tests' own type checks would raise another error."""
TRY = """
import json, sys
from cheem_jax.baselines.lora_cl import LoraClConfig
from cheem_jax.cheem.config import *
from cheem_jax.core.settings import *
from cheem_jax.data.load import ImagesConfig
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.layout import MeshConfig
for settings in json.loads(sys.argv[1]):
    try:
        print("accepted", eval(settings))
    except ValueError as error:
        print(error)
"""


def test_a_setting_of_another_type_is_refused_and_selects_nothing_else():
    command = [sys.executable, "-c", TRY, json.dumps(list(WRONG))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for said, (wrong, expected) in zip(done.stdout.splitlines(), WRONG.items(), strict=True):
        assert expected in said, wrong


@dataclasses.dataclass(frozen=True)
class Part:
    is_on: bool = True
    maybe: bool | None = None
    rates: tuple[float, ...] = (0.5,)
    pair: tuple[int, int] | None = (1, 2)


@dataclasses.dataclass(frozen=True)
class Whole:
    part: Part
    names: tuple[str, ...] = ("a",)
    title: str | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Odd:
    table: dict[str, int]


@pytest.mark.parametrize(
    "part",
    [
        Part(False, False, (), (-1, 2)),
        Part(True, True, (-1e-300, float("inf")), None),
        Part(True, None, (0.1 + 0.2,), (0, 0)),
    ],
)
def test_nested_flags_and_tuples_are_written_as_they_are_read(part):
    whole = Whole(part, (), None, "None")
    assert parse(Whole(Part()), arguments_of(whole)) == whole
    assert ("--part.is-on" if part.is_on else "--part.no-is-on") in arguments_of(whole)


@pytest.mark.parametrize(
    "whole, said",
    [
        (Whole(Part(), title="None"), "--title is the text 'None'"),
        (Whole(Part(), names=("a", "-b")), "--names contains '-b'"),
    ],
)
def test_text_that_a_command_line_would_misread_is_refused(whole, said):
    with pytest.raises(ValueError, match=said):
        arguments_of(whole)


def test_a_value_without_a_written_form_is_refused_with_its_type():
    with pytest.raises(TypeError, match="dict {} cannot be written on a command line"):
        arguments_of(Odd({}))


def test_a_source_of_data_is_found_again_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "mtil").mkdir()
    monkeypatch.chdir(tmp_path)
    assert located("birds/stream.toml") == str(tmp_path / "birds" / "stream.toml")
    assert [located(name) for name in ("mtil", "dtd", "tfds:mnist")] == [
        "mtil",
        "dtd",
        "tfds:mnist",
    ]
