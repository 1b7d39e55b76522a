"""The loop over a stream: learn a task, save it, measure every task so far from what was saved."""

import dataclasses
import functools
import hashlib
import io
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cheem_jax import fingerprint, metrics
from cheem_jax.atomic import write_atomically
from cheem_jax.backbone.alexnet import PretrainedAlexNet, build_alexnet
from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.checkpoint import load_manifest, saved_tasks
from cheem_jax.data.task import Stream, Task
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.execution.choice import EngineConfig, choose, make_executor
from cheem_jax.execution.compilation import Compilations, compilations
from cheem_jax.execution.executor import Token
from cheem_jax.flops import backbone_flops, executed_backbone_flops
from cheem_jax.images import Images
from cheem_jax.interruption import Stop, stop_requests
from cheem_jax.kernels import Precision
from cheem_jax.keys import Keys, SeedsConfig
from cheem_jax.methods.alexnet_encoder import AlexNetEncoder
from cheem_jax.methods.catalogue import TOLD, MethodConfig, Networks, make, preset_of
from cheem_jax.methods.cheem import CheemConfig, Preset
from cheem_jax.methods.frozen_linear import FrozenLinear
from cheem_jax.methods.full_finetune import FullFinetune, FullFinetuneConfig
from cheem_jax.methods.lora_cl import LoraClConfig
from cheem_jax.methods.method import Answers, FrozenFeatures, Method
from cheem_jax.ops import Placement
from cheem_jax.report.markdown import write_report
from cheem_jax.report.progress import Progress
from cheem_jax.report.record import Record, read
from cheem_jax.report.status import Status
from cheem_jax.report.tensorboard import check_installed, write_events
from cheem_jax.restoring import restore
from cheem_jax.results import results_of
from cheem_jax.rolling import Rolling, RunningTask
from cheem_jax.run_directory import check_space, claim, hold


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
    engine, batch_size = config.engine, config.method.batch_size
    means = None
    if isinstance(config.method, CheemConfig):
        means = _base_means(pretrained, config.method, engine.precision, base_images, progress)
    networks = networks_of(pretrained, router, config.method, engine, workshop)
    features, router_features = networks.features, networks.router_features
    keys = Keys(config.seed, config.seeds)
    learner = make(config.method, networks, keys, len(stream.tasks), means)
    notes = learner.check(stream.tasks)
    identity = _identity(stream, pretrained, config, means, router)
    if tensorboard:
        check_installed()
    with hold(directory), stop_requests() as stop, Status(directory) as status:
        resumed = claim(directory, identity)
        methods: tuple[Method, ...] = (learner,)
        if isinstance(config.method, CheemConfig):  # what CHEEM learns has to beat this, so it is always beside it
            methods = (learner, FrozenLinear(keys, features, router_features, config.method.router))

        conditions = fingerprint.take(identity)
        record = Record.open(directory, fingerprint.digest(conditions))
        run = Run(directory, record, progress, stop, save_every, status)
        finished = restore(directory, stream, methods, record) if resumed else 0
        begun = next((entry for entry in read(directory) if entry["event"] == "run"), None)
        bound = {"upper_bound": config.upper_bound is not None}
        if begun is None:
            setting = _setting(stream, pretrained, config, means, router)
            record.write("run", **setting, command=command, data=data, conditions=conditions, **bound, **start.since())
        elif finished < len(stream.tasks) or (config.upper_bound is not None and missing_bounds(directory, stream)):
            record.write("continued", command=command, conditions=conditions, **bound, **start.since())
            if changed := fingerprint.differences(begun["conditions"], conditions):
                progress.say(f"begun under other conditions, so numbers may differ: {'; '.join(changed)}")
        chosen = choose(engine, pretrained.config, batch_size)
        progress.say(f"executor {chosen.name}, {engine.precision} ({chosen.reason})")
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
            saving = sum(_learn(task, index, method, run) for method in methods)
            _evaluate(stream.tasks[: index + 1], methods, run, saving)
            features.forget(stream.tasks[index])
            router_features.forget(stream.tasks[index])
            _write_results(directory, tensorboard)
        if config.upper_bound is not None:
            write_report(directory, _write_results(directory, tensorboard))
            upper = FullFinetune(networks.executor, features, config.upper_bound, keys, len(stream.tasks))
            _upper_bound(stream, upper, run)
            Rolling(run.root(upper.name), stop).clear()
        results = _write_results(directory, tensorboard)
        write_report(directory, results)
        return results


class Mark(NamedTuple):
    """A moment, to count seconds and compilations from."""

    seconds: float
    compiled: Compilations

    @classmethod
    def now(cls) -> "Mark":
        return cls(time.perf_counter(), compilations())

    def since(self) -> dict[str, Any]:
        """What the record keeps of the time since then."""
        compiled = compilations().since(self.compiled)
        return {"seconds": time.perf_counter() - self.seconds, "compile": compiled._asdict()}


class Run(NamedTuple):
    """What the steps of one run share."""

    directory: Path
    record: Record
    progress: Progress
    stop: Stop
    save_every: float | None
    status: Status

    def root(self, method: str) -> Path:
        """Where a method's checkpoints lie."""
        return self.directory / "checkpoints" / method

    def learning(self, method: str, task: Task, index: int) -> RunningTask:
        """One task while a method learns it."""
        rolling = Rolling(self.root(method), self.stop, every=self.save_every)
        phase = functools.partial(_phase, self.progress, self.status, task.name)
        running = RunningTask(index, rolling, phase, self.progress.say)
        if running.saved is not None:
            self.progress.say(f"{task.name}: going on in the middle")
        return running


def _phase(progress: Progress, status: Status, task: str, phase: str, total: int):
    return status.phase(phase, task, total, progress.phase(phase, task=task, total=total))


def _learn(task: Task, index: int, method: Method, run: Run) -> float:
    """Learn and save one task; from then on everything comes from disk, as after a restart.

    Returns the seconds that checkpoints took.
    """
    root, start = run.root(method.name), Mark.now()
    if run.stop:
        raise run.stop.stopped("everything learned is kept")
    if len(saved_tasks(root)) > index:
        Rolling(root, run.stop).clear()
        return 0.0  # learned and saved before the run stopped
    check_space(run.directory, method.bytes_needed(task) + SPARE_BYTES, f"task {task.name!r}")
    running = run.learning(method.name, task, index)
    report = method.learn(task, running)
    known = {"index": index, "name": task.name, "classes": list(task.classes)}
    known |= {f"num_{name}": len(split.labels) for name, split in task.splits.items()}
    run.record.write("learned", method=method.name, report={**known, **report}, **start.since())
    saving = time.perf_counter()
    method.save(root)
    running.rolling.clear()
    for name in report.get("not_kept", ()):
        run.progress.say(f"{name}: no room for keeping them (--engine.memory-gb), so they are computed in every epoch")
    if num_skipped := report.get("skipped_steps"):
        run.progress.say(f"{task.name}: {num_skipped} steps left out, whose loss or gradient was not finite")
    if "architecture" in report:
        run.progress.architecture(task.name, report["architecture"])
    return running.rolling.seconds + time.perf_counter() - saving


SPARE_BYTES = 16 * 2**20
"""Room for what a task leaves beside its arrays: record, results, figures."""


def _evaluate(learned: Sequence[Task], methods: tuple[Method, ...], run: Run, saving: float) -> None:
    """Measure every task so far with every method; `saving` are the seconds that the last one's checkpoints took."""
    measured, answered, start, num = {}, {}, Mark.now(), len(learned)
    for method in methods:
        rows = []
        total = sum(len(task.test.labels) for task in learned)
        with _phase(run.progress, run.status, f"{num} tasks, {method.name}", "evaluate", total) as advance:
            for index, task in enumerate(learned):
                answers = method.answers(index, task)
                rows.append(_measure(answers, index, task))
                if method is methods[0]:
                    answered |= {f"{name}_{index}": found for name, found in answers._asdict().items()}
                advance(len(task.test.labels), "")
                if run.stop:
                    raise run.stop.stopped("everything learned is kept, and measured again")
        measured[method.name] = {
            "accuracy": [row["accuracy"] for row in rows],
            "local_accuracy": [row["local_accuracy"] for row in rows],
            "routing": metrics.routing_confusion(
                np.repeat(np.arange(num), [len(task.test.labels) for task in learned]),
                np.concatenate([row["chosen"] for row in rows]),
                num,
            ),
        }
    _write_answers(run.directory, answered)
    saved = {method.name: saved_tasks(run.root(method.name)) for method in methods}
    contents = {name: [load_manifest(place)["content_sha256"] for place in places] for name, places in saved.items()}
    run.record.write(
        "evaluated", index=num - 1, methods=measured, checkpoints=contents, checkpoint_seconds=saving,
        peak_memory_bytes=peak_memory_bytes(), **start.since(),
    )  # fmt: skip
    last = measured[methods[0].name]
    given = "true task given"
    if methods[0].name not in TOLD:
        given = f"{100 * last['local_accuracy'][-1]:.1f} % with the task given"
    run.progress.say(
        f"{learned[-1].name}: {100 * last['accuracy'][-1]:.1f} % ({given}); "
        f"average over {num} tasks {100 * float(np.mean(last['accuracy'])):.1f} %"
    )


def _measure(answers: Answers, index: int, task: Task) -> dict[str, Any]:
    labels = task.test.labels
    right = (answers.chosen_task == index) & (answers.chosen_class == labels)
    return {
        "accuracy": float(right.mean()),
        "local_accuracy": float((answers.given_task == labels).mean()),
        "chosen": answers.chosen_task,
    }


def _write_answers(directory: Path, answered: Mapping[str, np.ndarray]) -> None:
    """`answers.npz`: what the run's own method answers to every test image of every task so far, by task index."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: found.astype(np.int32) for name, found in answered.items()})  # pyright: ignore[reportArgumentType]
    write_atomically(directory / "answers.npz", buffer.getvalue())


def missing_bounds(directory: Path, stream: Stream) -> list[int]:
    """Tasks whose upper bound is not known yet."""
    done = {entry["index"] for entry in read(directory) if entry["event"] == "upper_bound"}
    return [index for index in range(len(stream.tasks)) if index not in done]


def _upper_bound(stream: Stream, bound: FullFinetune, run: Run) -> None:
    config = bound.vit_config
    for index in missing_bounds(run.directory, stream):
        start, task = Mark.now(), stream.tasks[index]
        check_space(run.directory, bound.bytes_needed(task) + SPARE_BYTES, f"the upper bound of task {task.name!r}")
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
    if tensorboard:
        write_events(directory)
    results = results_of(read(directory))
    write_atomically(directory / "results.json", json.dumps(results, indent=1) + "\n")
    return results


def networks_of(
    pretrained: Pretrained,
    router: Router | None,
    config: MethodConfig,
    engine: EngineConfig,
    workshop: dict[Any, Networks] | None = None,
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
    place = (weights, placement, token, size, engine)
    if place not in workshop:
        vit = build(dataclasses.replace(pretrained.config, precision=engine.precision), pretrained.params)
        executor = make_executor(vit, placement, engine, token=token, batch_size=size)
        features = router_features = FrozenFeatures(executor, size)
        if isinstance(router, PretrainedAlexNet):
            encoder = AlexNetEncoder(build_alexnet(router.config, router.params), jit=executor.jit)
            router_features = FrozenFeatures(encoder, size)
        elif router is not None:
            router_vit = build(dataclasses.replace(router.config, precision=engine.precision), router.params)
            router_features = FrozenFeatures(make_executor(router_vit, placement, engine, batch_size=size), size)
        workshop[place] = Networks(executor, features, router_features)
    return workshop[place]


def _base_means(
    pretrained: Pretrained, config: CheemConfig, precision: Precision, base_images: Images | None, progress: Progress
) -> np.ndarray | None:
    """mu of the backbone's own task: only an exact match of size, placement and token counts, else it is measured."""
    if config.base_means == "neutral":
        return None
    place = f"{pretrained.config.image_size}/{config.placement}/{config.token}"
    found = pretrained.base_means.get(place)
    if found is None and base_images is not None:
        progress.say(f"measuring mean class tokens of the backbone's own task on {len(base_images):,} images")
        vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
        found = base_means(vit, base_images, batch_size=config.batch_size)[place]
    elif base_images is not None:
        progress.say(f"the weights carry base means for {place}: the base data is not needed")
    return found


def _identity(stream: Stream, pretrained: Pretrained, config: RunConfig, means, router) -> dict[str, Any]:
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
        "base_means_sha256": None if means is None else hashlib.sha256(means.tobytes()).hexdigest(),
        "data_sha256": {task.name: data_hash(task) for task in stream.tasks},
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
        **_pixels(pretrained),
    }


def _pixels(pretrained: Pretrained) -> dict[str, Any]:
    """Where pixels are not scaled as the named backbone's are."""
    config, known = pretrained.config, CONFIGS.get(pretrained.config.name)
    scaling = (config.mean, config.std)
    unit = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    usual = scaling != unit if known is None else scaling == (known.mean, known.std)
    return {} if usual else {"pixels": scaling}


def _setting(stream: Stream, pretrained: Pretrained, config: RunConfig, means, router) -> dict[str, Any]:
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
        "executor": choose(config.engine, pretrained.config, config.method.batch_size).name,
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


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
