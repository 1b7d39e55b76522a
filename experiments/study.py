"""Shared code of the studies: more than one run of `mtil.py` on the same data, and a record that
resumes.

Every run has a separate directory, `RUN_DIR/<variant>/seed-<seed>`, and is a run that `mtil.py`
could have made. Finished runs are not repeated, and interrupted runs resume.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from charts import check_folder
from launching import LauncherConfig, Run, Sweep, check, finish, host_arguments, results_of

from cheem_jax.baselines.catalogue import FrozenNetworks, MethodName, make_preset
from cheem_jax.cheem.config import PRESETS, CheemConfig, Preset, computes_similarity
from cheem_jax.cli import run as cheem_run
from cheem_jax.cli.arguments import arguments_of
from cheem_jax.core.settings import SeedsConfig
from cheem_jax.data.demo import TASKS
from cheem_jax.data.sources import plan_source
from cheem_jax.data.streams import find_stream
from cheem_jax.data.task import ClassSplit
from cheem_jax.report.finished import check_inputs, read
from cheem_jax.run import fingerprint
from cheem_jax.run.directory import check_settings
from cheem_jax.run.progress import Progress
from cheem_jax.run.session import Session, open_session

Config = TypeVar("Config")
Results = dict[str, list[dict[str, Any]]]
"""Results of each variant, one per seed."""


@dataclasses.dataclass(frozen=True)
class Study(cheem_run.Common):
    """Settings of every study that consists of runs."""

    stream: str = cheem_run.DEMO
    """demo, or any other value of `experiments/mtil.py --stream`."""
    preset: Preset | None = None
    """Preset of the settings of every method; default: demo for the demo stream, quick for any
    other stream."""
    seeds: str | None = None
    """Seeds, separated by commas; default: 0,1,2 for the preset `paper`, or else 0."""
    launcher: LauncherConfig = LauncherConfig()
    """Execution of the runs."""
    run_dir: Path = Path("runs/study")
    """Folder of runs and tables; unfinished runs in it resume."""

    @property
    def chosen_preset(self) -> Preset:
        return self.preset or ("demo" if self.stream == cheem_run.DEMO else "quick")

    @property
    def chosen_seeds(self) -> list[int]:
        usual = "0,1,2" if self.chosen_preset in cheem_run.FULL else "0"
        return seeds_of(usual if self.seeds is None else self.seeds)


@contextlib.contextmanager
def recorded(
    directory: Path,
    identity: Mapping[str, Any],
    command: Sequence[str] | None,
    progress: Progress,
    save_every: float | None = None,
) -> Iterator[Session]:
    """Open the session of a study that does not consist of runs, and record its command.

    Raises ValueError if the study resumes with a different `identity`.
    """
    conditions = fingerprint.take(identity)
    with open_session(directory, identity, conditions, progress, save_every) as session:
        event = "continued" if session.is_resumed else "run"
        session.record.write(event, command=command, conditions=conditions)
        yield session


def load_stream(
    settings: cheem_run.StreamInputs, progress: Progress, **more: Any
) -> cheem_run.Loaded:
    """Load the weights and images of a study that does not consist of runs. `more` are further
    settings of a run, or replace those of the study."""
    fields = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(cheem_run.StreamInputs)
    }
    values = {"cheem": PRESETS["quick"], **fields, **more}
    return cheem_run.load(cheem_run.RunSettings(**values), progress)


class Variant(NamedTuple):
    """One row of a study: a method with changes to its settings (by dotted name) and to those of
    the run."""

    name: str
    title: str
    method: MethodName = "cheem"
    config: Mapping[str, Any] = {}
    run: Mapping[str, Any] = {}
    settings_of: str = ""
    """Variant whose chosen settings an ablation shares, so that both differ in one setting."""


def seeds_of(text: str) -> list[int]:
    """Return the seeds in a text: different whole numbers of at least 0."""
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"--seeds is {text!r}; expected different whole numbers separated by commas, such as"
            " 0,1,2"
        )
    return seeds


def run_all(
    study: Study,
    variants: Sequence[Variant],
    progress: Progress,
    after_each: Callable[[Results], object] = lambda _: None,
) -> Results:
    """Run the missing runs and return all results. `after_each` is called with the available
    results after each run, so that an interrupted study has tables.

    With a launcher, the process ends here by SystemExit until all runs are finished.
    """
    check(study.launcher)
    settings = [
        (variant, run_settings(study, variant, seed))
        for variant in variants
        for seed in study.chosen_seeds
    ]
    check_folder("--run-dir", study.run_dir)
    for _, one in settings:  # check before other runs take hours
        check_settings(one.run_dir, expected_config(one))
    check_finished([one.run_dir for _, one in settings])
    if study.launcher.kind != "none":
        return run_as_jobs(study, settings, progress, after_each)
    finished = {one.run_dir: results_of(one.run_dir) for _, one in settings}
    workshop = dict[Any, FrozenNetworks]()
    load = loader(study, progress)
    for _, one in settings:
        if one.router is not None:
            load(one)
    for number, (variant, one) in enumerate(settings, 1):
        progress.say(f"{variant.title}, seed {one.seed}: run {number} of {len(settings)}")
        config = cheem_run.make_run_config(one)
        finished[one.run_dir] = cheem_run.run_seed(one, config, load(one), progress, workshop)
        after_each(by_variant(settings, finished))
    return by_variant(settings, finished)


def by_variant(
    settings: Sequence[tuple[Variant, cheem_run.RunSettings]],
    finished: Mapping[Path, dict[str, Any] | None],
) -> Results:
    """Return the results of the finished runs, in the order of `settings`. `finished` contains the
    results keyed by run directory."""
    results = Results()
    for variant, one in settings:
        if (result := finished[one.run_dir]) is not None:
            results.setdefault(variant.name, []).append(result)
    return results


def check_finished(directories: Sequence[Path]) -> None:
    """Raise ValueError if finished runs of a study differ in data, weights or preset."""
    runs, _ = read([directory for directory in directories if directory.is_dir()], below=False)
    check_inputs(runs)


def run_as_jobs(
    study: Study,
    settings: Sequence[tuple[Variant, cheem_run.RunSettings]],
    progress: Progress,
    after_each: Callable[[Results], object],
) -> Results:
    """Run every run as a separate job with the arguments of `mtil.py`."""
    for one in {_source(one): one for _, one in settings}.values():
        find_stream(one)
    # a job compares its folder with its data; of a finished run, no job compares anything
    names = task_names(study.stream, study.tasks, study.data_dir, study.class_split)
    for _, one in settings:
        tasks = one.task_names or (names if one.order == "default" else None)
        check_settings(one.run_dir, {} if tasks is None else {"tasks": tasks})

    def report() -> Results:
        check_finished([one.run_dir for _, one in settings])
        results = by_variant(
            settings, {one.run_dir: results_of(one.run_dir) for _, one in settings}
        )
        after_each(results)
        return results

    runs = [
        Run(
            f"{variant.name}/seed-{one.seed}",
            one.run_dir,
            [*arguments_of(cheem_run.make_portable(one)), *host_arguments(study.launcher)],
        )
        for variant, one in settings
    ]
    finish(Sweep(study.launcher, study.run_dir / "jobs", runs, progress, report))
    return report()


def expected_config(settings: cheem_run.RunSettings) -> dict[str, Any]:
    """Return the part of a run's configuration that does not depend on weights and images."""
    config = cheem_run.make_run_config(settings)
    expected = {
        config.method.name: dataclasses.asdict(config.method),
        "seed": config.seed,
        "seeds": dataclasses.asdict(config.seeds),
        "engine": dataclasses.asdict(config.engine),
        "backbone": cheem_run.backbone_of(settings),
    }
    if settings.image_size is not None:
        expected["image_size"] = settings.image_size
    return expected | ({} if settings.tasks is None else {"tasks": settings.task_names})


def task_names(
    stream: str,
    tasks: str | None = None,
    data_dir: Path | None = None,
    class_split: ClassSplit | None = None,
) -> list[str]:
    """Return the names of the stream's tasks in learning order, or those in `tasks`; no image is
    read."""
    if tasks is not None:
        return [name.strip() for name in tasks.split(",")]
    return (
        list(TASKS)
        if stream == cheem_run.DEMO
        else [
            plan.name for plan in plan_source(stream, data_dir=data_dir, class_split=class_split)[1]
        ]
    )


def run_settings(study: Study, variant: Variant, seed: int) -> cheem_run.RunSettings:
    """Return the settings of `mtil.py` for one run of a study."""
    preset = study.chosen_preset
    config = changed(make_preset(variant.method, preset), variant.config)
    is_cheem = isinstance(config, CheemConfig)
    names = [field.name for field in dataclasses.fields(cheem_run.Common)]
    return cheem_run.RunSettings(
        **{
            **{name: getattr(study, name) for name in names},
            "preset": preset,
            "seeds": SeedsConfig(),
            "run_dir": study.run_dir / variant.name / f"seed-{seed}",
            "method": variant.method,
            "cheem": CheemConfig(**vars(config)) if is_cheem else PRESETS[preset],
            "options": None if is_cheem else config,
            "base_data": study.base_data if computes_similarity(config) else None,
            "seed": seed,
            "num_seeds": 1,
            **variant.run,
        }
    )


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a settings dataclass with changed values, keyed by dotted name: `search.epsilon` is
    the field `epsilon` of the field `search`."""
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        value = changed(getattr(config, outer), {inner: value}) if inner else value
        config = dataclasses.replace(config, **{outer: value})  # pyright: ignore[reportArgumentType]
    return config


def _source(settings: cheem_run.RunSettings) -> tuple[Any, ...]:
    """Return the settings that determine the weights and images of a run."""
    return tuple(
        getattr(settings, field.name) for field in dataclasses.fields(cheem_run.StreamInputs)
    )


def loader(study: Study, progress: Progress) -> Callable[[cheem_run.RunSettings], cheem_run.Loaded]:
    """Return a function that loads the weights and images of a run, and reuses those of the last
    run if they are the same."""
    cached: dict[tuple[Any, ...], cheem_run.Loaded] = {}

    def load(settings: cheem_run.RunSettings) -> cheem_run.Loaded:
        source = _source(settings)
        if source not in cached:
            cached.clear()
            shared = dataclasses.replace(
                settings, router=None, router_weights=None, base_data=study.base_data
            )
            cached[source] = cheem_run.load(shared, progress)
        loaded = cached[source]
        if settings.base_data is None:
            loaded = loaded._replace(base_images=None)
        return loaded._replace(router=cheem_run.load_router(settings, loaded.size))

    return load
