"""The loop over a stream: learn a task, save it, measure every task so far from what was saved."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cheem_jax import fingerprint, hosts
from cheem_jax.atomic import write_atomically
from cheem_jax.backbone.alexnet import PretrainedAlexNet, build_alexnet
from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.data.task import Stream, hash_of_images
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.execution.choice import EngineConfig, choose, make_executor
from cheem_jax.execution.compilation import jit_options
from cheem_jax.execution.executor import Token
from cheem_jax.execution.layout import ONE, Layout, MeshConfig, make_layout
from cheem_jax.flops import backbone_flops, executed_backbone_flops
from cheem_jax.images import Images
from cheem_jax.interruption import stop_requests
from cheem_jax.kernels import Precision
from cheem_jax.keys import Keys, SeedsConfig
from cheem_jax.methods.alexnet_encoder import AlexNetEncoder
from cheem_jax.methods.catalogue import MethodConfig, Networks, make, preset_of
from cheem_jax.methods.cheem_config import CheemConfig, Preset
from cheem_jax.methods.frozen_linear import FrozenLinear
from cheem_jax.methods.full_finetune import FullFinetune, FullFinetuneConfig
from cheem_jax.methods.lora_cl import LoraClConfig
from cheem_jax.methods.method import Backbone, FrozenFeatures, Method
from cheem_jax.ops import Placement
from cheem_jax.report.markdown import write_report
from cheem_jax.report.progress import Progress
from cheem_jax.report.record import Record, read
from cheem_jax.report.status import Status
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.restoring import restore
from cheem_jax.results import results_of
from cheem_jax.rolling import Rolling
from cheem_jax.routing.config import PAPER
from cheem_jax.run_directory import check_space, claim, hold
from cheem_jax.steps import SPARE_BYTES, Mark, Run, evaluate, learn_task


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run learns and how; together with the data and the weights it decides every result."""

    method: MethodConfig
    preset: Preset
    seed: int = 0
    upper_bound: FullFinetuneConfig | None = None
    """Also fine-tune the whole backbone per task, the true task given."""
    engine: EngineConfig = EngineConfig()
    seeds: SeedsConfig = SeedsConfig()
    mesh: MeshConfig = MeshConfig()
    """Not part of what decides results: a run may go on with other devices."""


Router = Pretrained | PretrainedAlexNet


def run_stream(
    stream: Stream,
    pretrained: Pretrained,
    config: RunConfig,
    directory: Path,
    progress: Progress,
    *,
    base_images: Images | None = None,
    router: Router | None = None,
    save_every: float | None = None,
    command: Sequence[str] | None = None,
    workshop: dict[Any, Networks] | None = None,
    data: Mapping[str, Any] | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Learn the stream in `directory`, or go on where it stopped; returns what `results.json` holds.

    `base_images` are pictures of the backbone's own task: uint8 `[N, S, S, 3]`. `router` is a lighter network that
    names the task instead of the backbone (CHEEM-lite). `save_every` are the seconds between rolling checkpoints;
    default: 30, more where they would take over 2 % of the time. Killed at any moment and called again, a run ends as
    one that was not; Ctrl-C and SIGTERM raise Stopped after the running step. `command` is the command line that makes
    this run again, for the record, and `data` tells where its pictures come from, so that a report can show some.
    `workshop` keeps compiled networks for other runs of this process; `tensorboard` writes event files after each task.
    """
    _check_sizes(stream, pretrained, router)
    if config.upper_bound is not None and config.method.name == "full_finetune":
        raise ValueError("full_finetune is the upper bound itself: leave out --upper-bound")
    start = Mark.now()
    layout = make_layout(config.mesh)
    engine, batch_size = config.engine, config.method.batch_size
    means, base = None, _told_base()
    if isinstance(config.method, CheemConfig):
        means, base = _base_means(pretrained, config.method, engine.precision, base_images, progress)
    identity = _identity(stream, pretrained, config, base, router)
    conditions = fingerprint.take(identity)
    _check_hosts(config, identity, conditions)
    networks = networks_of(pretrained, router, config.method, engine, workshop, layout)
    features, router_features = networks.features, networks.router_features
    keys = Keys(config.seed, config.seeds)
    learner = make(config.method, networks, keys, len(stream.tasks), means)
    notes = learner.check(stream.tasks)
    if tensorboard:
        check_installed()
    writes = hosts.is_first()
    with contextlib.ExitStack() as held, stop_requests() as stop:
        claimed = []
        hosts.first_does(lambda: claimed.append(_claim(directory, identity, defaults_of(config.method), held)))
        status = held.enter_context(Status(directory, writes=writes))
        resumed = bool(hosts.largest(int(any(claimed))))
        methods: tuple[Method, ...] = (learner,)
        if isinstance(config.method, CheemConfig):  # what CHEEM learns has to beat this, so it is always beside it
            methods = (learner, FrozenLinear(keys, features, router_features, config.method.router))

        record = Record.open(directory, fingerprint.digest(conditions), writes=writes)
        run = Run(directory, record, progress, stop, save_every, status)
        finished = hosts.in_order(lambda: restore(directory, stream, methods, record)) if resumed else 0
        begun = next((entry for entry in read(directory) if entry["event"] == "run"), None)
        bound = {"upper_bound": config.upper_bound is not None, "devices": layout.num, "processes": hosts.count()}
        if begun is None:
            setting = _setting(stream, pretrained, config, means, router, networks.executor.name)
            record.write("run", **setting, command=command, data=data, conditions=conditions, **bound, **start.since())
        elif finished < len(stream.tasks) or (config.upper_bound is not None and missing_bounds(directory, stream)):
            record.write("continued", command=command, conditions=conditions, **bound, **start.since())
            if changed := fingerprint.differences(begun["conditions"], conditions):
                progress.say(f"begun under other conditions, so numbers may differ: {'; '.join(changed)}")
        chosen = choose(engine, pretrained.config, batch_size, layout=layout)
        progress.say(f"executor {chosen.name}, {engine.precision} ({chosen.reason})")
        if layout.is_many:
            over = f" in {hosts.count()} processes" if hosts.count() > 1 else ""
            progress.say(f"each batch is divided over {layout.num} devices{over}")
        for note in notes:
            progress.say(f"{learner.name}: {note}")
        if means is None and isinstance(config.method, CheemConfig):
            why = "left out" if config.method.base_means == "neutral" else "unknown for this setting"
            progress.say(f"base means {why}: similarity to the backbone's own task is neutral (0)")
        if finished == len(stream.tasks):
            progress.say(f"{directory} holds all {finished} tasks already; nothing to learn")
        elif resumed:
            progress.say(f"going on in {directory} with task {finished + 1} of {len(stream.tasks)}")
        for index in range(finished, len(stream.tasks)):
            task = stream.tasks[index]
            saving = sum(learn_task(task, index, method, run) for method in methods)
            evaluate(stream.tasks[: index + 1], methods, run, saving)
            features.forget(stream.tasks[index])
            router_features.forget(stream.tasks[index])
            _write_results(directory, tensorboard)
        if config.upper_bound is not None:
            _write_report(directory, _write_results(directory, tensorboard))
            upper = FullFinetune(networks.executor, features, config.upper_bound, keys, len(stream.tasks))
            _upper_bound(stream, upper, run)
            Rolling(run.root(upper.name), stop).clear()
        results = _write_results(directory, tensorboard)
        _write_report(directory, results)
        return results


def _check_hosts(config: RunConfig, identity: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
    """Raises ValueError where the processes of a job would not do the same."""
    settings = {**identity, "mesh": vars(config.mesh), "upper_bound": config.upper_bound is not None}
    code = {name: conditions[name] for name in ("code", "versions")}
    hosts.check_equal("code and package versions", code, "install the same on every machine")
    hosts.check_equal("weights", identity["weights_sha256"], "give every process the same file")
    hosts.check_equal("data fingerprints", identity["data_sha256"], "give every process the same pictures")
    hosts.check_equal("settings", settings, "start every process with the same command")


def _claim(
    directory: Path, identity: Mapping[str, Any], defaults: Mapping[str, Any], held: contextlib.ExitStack
) -> bool:
    held.enter_context(hold(directory))
    return claim(directory, identity, defaults)


def missing_bounds(directory: Path, stream: Stream) -> list[int]:
    """Tasks whose upper bound is not known yet."""
    done = {entry["index"] for entry in read(directory) if entry["event"] == "upper_bound"}
    return [index for index in range(len(stream.tasks)) if index not in done]


def _upper_bound(stream: Stream, bound: FullFinetune, run: Run) -> None:
    config = bound.vit_config
    for index in missing_bounds(run.directory, stream):
        start, task = Mark.now(), stream.tasks[index]
        needed, what = bound.bytes_needed(task) + SPARE_BYTES, f"the upper bound of task {task.name!r}"
        hosts.first_does(lambda needed=needed, what=what: check_space(run.directory, needed, what))
        running = run.learning(bound.name, task, index)
        found = bound.bound(index, task, running)
        run.record.write(
            "upper_bound",
            index=index,
            name=task.name,
            **found._asdict(),
            flops_paper=backbone_flops(config),
            flops_executed=executed_backbone_flops(config),
            **start.since(),
        )
        running.rolling.clear()
        run.progress.say(f"{task.name}: full fine-tuning {100 * found.test_accuracy:.1f} % (true task given)")


def _write_results(directory: Path, tensorboard: bool) -> dict[str, Any]:
    def write() -> None:
        if tensorboard:
            write_events(directory)
        write_atomically(directory / "results.json", json.dumps(results_of(read(directory)), indent=1) + "\n")

    hosts.first_does(write)
    return results_of(read(directory))


def _write_report(directory: Path, results: dict[str, Any]) -> None:
    hosts.first_does(functools.partial(write_report, directory, results))


def networks_of(
    pretrained: Pretrained,
    router: Router | None,
    config: MethodConfig,
    engine: EngineConfig,
    workshop: dict[Any, Networks] | None = None,
    layout: Layout = ONE,
) -> Networks:
    """The networks of a run; those in `workshop` are taken from there, with all that they have compiled."""
    placement: Placement = "mlp_down"
    token: Token = "component"
    if isinstance(config, CheemConfig):
        placement, token = config.placement, config.token
    elif isinstance(config, LoraClConfig):
        placement = config.placement
    size = config.batch_size
    workshop = {} if workshop is None else workshop
    weights = (pretrained.sha256, pretrained.config, router and (router.sha256, router.config))
    reads = getattr(config, "router", PAPER)
    place = (weights, placement, token, size, engine, layout.place, layout.fsdp, reads.features)
    if place not in workshop:
        vit = build(dataclasses.replace(pretrained.config, precision=engine.precision), pretrained.params)
        executor = make_executor(vit, placement, engine, token=token, batch_size=size, layout=layout)
        features = FrozenFeatures(executor, size)
        router_features = features if reads.features == "last" else FrozenFeatures(Backbone(executor, reads), size)
        if isinstance(router, PretrainedAlexNet):
            if reads.features != "last":
                raise ValueError(f"router features {reads.features!r} are of a ViT's blocks; alexnet has only `last`")
            options = jit_options(engine.precision, engine.deterministic)
            encoder = AlexNetEncoder(
                build_alexnet(router.config, router.params), jit=functools.partial(jax.jit, compiler_options=options)
            )
            router_features = FrozenFeatures(encoder, size)
        elif router is not None:
            router_vit = build(dataclasses.replace(router.config, precision=engine.precision), router.params)
            router_executor = make_executor(router_vit, placement, engine, batch_size=size, layout=layout)
            router_features = FrozenFeatures(Backbone(router_executor, reads), size)
        workshop[place] = Networks(executor, features, router_features)
    return workshop[place]


def _base_means(
    pretrained: Pretrained, config: CheemConfig, precision: Precision, base_images: Images | None, progress: Progress
) -> tuple[np.ndarray | None, dict[str, str | None]]:
    """mu of the backbone's own task, and what `config.json` knows it by: only an exact match of size, placement and
    token counts, else it is measured."""
    if config.base_means == "neutral":
        return None, _told_base()
    place = f"{pretrained.config.image_size}/{config.placement}/{config.token}"
    if (found := pretrained.base_means.get(place)) is not None:
        if base_images is not None:
            progress.say(f"the weights carry base means for {place}: the base data is not needed")
        return found, _told_base(means=hashlib.sha256(found.tobytes()).hexdigest())
    if base_images is None:
        return None, _told_base()
    progress.say(f"measuring mean class tokens of the backbone's own task on {len(base_images):,} images")
    vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
    found = base_means(vit, base_images, batch_size=config.batch_size)[place]
    # known by the pictures: the last bits of what is measured differ from machine to machine
    return found, _told_base(data=hash_of_images(base_images))


def _told_base(means: str | None = None, data: str | None = None) -> dict[str, str | None]:
    return {"base_means_sha256": means, "base_data_sha256": data}


def _identity(
    stream: Stream, pretrained: Pretrained, config: RunConfig, base: Mapping[str, str | None], router
) -> dict[str, Any]:
    """All that decides what is learned, as `config.json` holds it; an upper bound can be added to a finished run."""
    return {
        "format": "cheem_jax-run/1",
        "stream": stream.name,
        "tasks": [task.name for task in stream.tasks],
        "backbone": pretrained.config.name,
        "image_size": pretrained.config.image_size,
        "seed": config.seed,
        "seeds": dataclasses.asdict(config.seeds),
        config.method.name: dataclasses.asdict(config.method),
        "engine": dataclasses.asdict(config.engine),
        "weights_sha256": pretrained.sha256,
        "router_weights_sha256": None if router is None else router.sha256,
        **base,
        "data_sha256": {task.name: data_hash(task) for task in stream.tasks},
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
        **_pixels(pretrained),
    }


def defaults_of(method: MethodConfig) -> dict[str, Any]:
    """Settings with their defaults: what a run did that was begun before a setting existed."""
    settings = {method.name: type(method)(), "seeds": SeedsConfig(), "engine": EngineConfig()}
    return {name: dataclasses.asdict(own) for name, own in settings.items()} | {"base_data_sha256": None}


def _pixels(pretrained: Pretrained) -> dict[str, Any]:
    """Where pixels are not scaled as the named backbone's are."""
    config, known = pretrained.config, CONFIGS.get(pretrained.config.name)
    scaling = (config.mean, config.std)
    unit = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    usual = scaling != unit if known is None else scaling == (known.mean, known.std)
    return {} if usual else {"pixels": scaling}


def _setting(stream: Stream, pretrained: Pretrained, config: RunConfig, means, router, executor: str) -> dict[str, Any]:
    base_means_word = "neutral" if means is None else "known"
    return {
        "method": config.method.name,
        "backbone": pretrained.config.name,
        "source": pretrained.source,
        "stream": stream.name,
        "seed": config.seed,
        "placement": getattr(config.method, "placement", None),
        "preset": config.preset
        if preset_of(config.method.name, config.preset) == config.method
        else f"{config.preset}, changed",
        "image_size": pretrained.config.image_size,
        "base_means": base_means_word if isinstance(config.method, CheemConfig) else None,
        "executor": executor,
        "precision": config.engine.precision,
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
        "router": pretrained.config.name if router is None else router.config.name,
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
    }


def _check_sizes(stream: Stream, pretrained: Pretrained, router: Router | None) -> None:
    shape = stream.tasks[0].train.images.shape[1:]
    for network in filter(None, (pretrained, router)):
        size = network.config.image_size
        if shape != (size, size, 3):
            raise ValueError(
                f"stream {stream.name!r} holds images of shape {shape}, but {network.config.name} takes "
                f"{(size, size, 3)}; load both with the same image size"
            )
