"""Settings, networks and methods of a run, and their description in `config.json` and the record.

Networks are compiled once for all runs of a process.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from cheem_jax.backbone.alexnet import PretrainedAlexNet, build_alexnet
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.alexnet_encoder import AlexNetEncoder
from cheem_jax.baselines.catalogue import MethodConfig, make, make_preset
from cheem_jax.baselines.frozen_linear import FrozenLinear, FrozenLinearConfig
from cheem_jax.baselines.full_finetune import FullFinetune, FullFinetuneConfig
from cheem_jax.cheem.config import CheemConfig, Preset, computes_similarity
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys
from cheem_jax.core.routing import PAPER
from cheem_jax.core.settings import (
    Placement,
    Precision,
    SeedsConfig,
    Token,
    check_seed,
    check_types,
)
from cheem_jax.data.task import Stream, hash_images
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine import hosts
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.layout import MeshConfig, make_layout
from cheem_jax.run import fingerprint
from cheem_jax.run.method import Backbone, FrozenFeatures, FrozenNetworks, Method
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import to_json

RouterWeights = Pretrained | PretrainedAlexNet
"""Weights of a smaller network that infers the task ID instead of the backbone (CHEEM-lite)."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings of a run. Together with the data and the weights, they determine all results."""

    method: MethodConfig
    preset: Preset
    seed: int = 0
    upper_bound: FullFinetuneConfig | None = None
    """Settings of the upper bound, which fine-tunes the whole backbone per task, with the task ID
    given; None disables the upper bound."""
    engine: EngineConfig = EngineConfig()
    seeds: SeedsConfig = SeedsConfig()
    mesh: MeshConfig = MeshConfig()
    """Devices of the run; a run can resume on other devices."""
    measured_on: Literal["test", "validation"] = "test"
    """Split on which accuracies are measured; `validation` is for choosing settings without the
    test images."""

    def __post_init__(self) -> None:
        check_types(self)
        check_seed(self.seed)

    def bound_settings(self) -> dict[str, Any] | None:
        """Return the settings of the upper bound, if any, as in the record."""
        return None if self.upper_bound is None else to_json(dataclasses.asdict(self.upper_bound))


class BaseMeans(NamedTuple):
    """Mean CLS tokens of the pretraining data, and the hash that identifies them in
    `config.json`."""

    values: np.ndarray | None = None
    """mu of the base task `[L, D]`; see section 'Task similarity' of the CHEEM paper. None if
    unknown; the similarity to the base task is then neutral (0)."""
    means_sha256: str | None = None
    """Hash of the means if they are part of the weights."""
    data_sha256: str | None = None
    """Hash of the images if the means were measured on them. The means themselves are not hashed,
    because their last bits differ between machines."""


class RunInputs(NamedTuple):
    """Data, weights and settings of a run."""

    stream: Stream
    pretrained: Pretrained
    router: RouterWeights | None
    config: RunConfig
    base: BaseMeans = BaseMeans()

    def check(self) -> None:
        """Raise ValueError if the images of the stream do not have the size that a network expects,
        or if an upper bound is requested although the method is itself the upper bound."""
        shape = self.stream.tasks[0].train.images.shape[1:]
        for network in filter(None, (self.pretrained, self.router)):
            size = network.config.image_size
            if shape != (size, size, 3):
                raise ValueError(
                    f"stream {self.stream.name!r} contains images of shape {shape}, but"
                    f" {network.config.name} expects {(size, size, 3)}; load both with the same"
                    " image size"
                )
        if self.config.upper_bound is not None and self.config.method.name == "full_finetune":
            raise ValueError("full_finetune is itself the upper bound; omit --upper-bound")

    def identity(self) -> dict[str, Any]:
        """Return the content of `config.json`: all values that determine the results.

        The upper bound is not included, so that it can be added to a finished run.
        """
        stream, pretrained, router, config, base = self
        return {
            "format": "cheem_jax-run/1",
            "stream": stream.name,
            "tasks": [task.name for task in stream.tasks],
            "backbone": pretrained.config.name,
            "image_size": pretrained.config.image_size,
            "pixels": (pretrained.config.mean, pretrained.config.std),
            "seed": config.seed,
            "seeds": dataclasses.asdict(config.seeds),
            config.method.name: dataclasses.asdict(config.method),
            "engine": dataclasses.asdict(config.engine),
            "weights_sha256": pretrained.sha256,
            "router_weights_sha256": None if router is None else router.sha256,
            **({} if router is None else {"router": dataclasses.asdict(router.config)}),
            "base_means_sha256": base.means_sha256,
            "base_data_sha256": base.data_sha256,
            "data_sha256": {task.name: data_hash(task) for task in stream.tasks},
            "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
            **({} if config.measured_on == "test" else {"measured_on": config.measured_on}),
        }

    def settings(self) -> dict[str, Any]:
        """Return the first entry of the record: the settings that tables and reports display."""
        stream, pretrained, router, config, base = self
        method = config.method
        is_preset = make_preset(method.name, config.preset) == method
        base_means = "neutral" if base.values is None else "known"
        return {
            "method": method.name,
            "backbone": pretrained.config.name,
            "source": pretrained.source,
            "stream": stream.name,
            "seed": config.seed,
            "placement": getattr(method, "placement", None),
            "preset": config.preset if is_preset else f"{config.preset}, changed",
            "image_size": pretrained.config.image_size,
            # `cheem run` rotates no image, as the paper's loaders
            "upright": any(task.upright for task in stream.tasks),
            "base_means": base_means if computes_similarity(method) else None,
            "precision": config.engine.precision,
            "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
            "router": (router or pretrained).config.name,
            "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        }

    def remarks(self, executor: Executor) -> list[str]:
        """Return sentences about the settings, which are printed when the run begins."""
        engine, method = self.config.engine, self.config.method
        sentences = [
            f"networks run in {engine.precision} by the executor {executor.name!r}:"
            f" {executor.reason}"
        ]
        if executor.layout.is_many:
            over = f" in {hosts.count()} processes" if hosts.count() > 1 else ""
            sentences.append(f"each batch is split over {executor.layout.num} devices{over}")
        if self.base.values is None and computes_similarity(method):
            reason = (
                "not used, as configured"
                if method.base_means == "neutral"
                else "unknown at this image size (`cheem convert --base-data` measures them)"
            )
            sentences.append(
                f"mean CLS tokens of the pretraining data are {reason}; the similarity of each task"
                " to the pretraining data is set to 0"
            )
        return sentences


def make_networks(
    pretrained: Pretrained,
    router: RouterWeights | None,
    config: MethodConfig,
    engine: EngineConfig,
    *,
    workshop: dict[Any, FrozenNetworks] | None = None,
    mesh: MeshConfig | None = None,
) -> FrozenNetworks:
    """Build the networks of a run, or reuse networks in `workshop` and their compiled
    functions."""
    layout = make_layout(mesh or MeshConfig())
    placement: Placement = getattr(config, "placement", "mlp_down")
    token: Token = getattr(config, "token", "component")
    reads = getattr(config, "router", PAPER)
    size = config.batch_size
    workshop = {} if workshop is None else workshop
    weights = (pretrained.sha256, pretrained.config, router and (router.sha256, router.config))
    key = (weights, placement, token, size, engine, layout.place, reads.features)
    if key in workshop:
        return workshop[key]

    def build_executor(weights: Pretrained, **settings: Any) -> Executor:
        vit = build(dataclasses.replace(weights.config, precision=engine.precision), weights.params)
        return make_executor(vit, placement, engine, batch_size=size, layout=layout, **settings)

    executor = build_executor(pretrained, token=token)
    features = FrozenFeatures(executor, size)
    if isinstance(router, PretrainedAlexNet):
        if reads.features != "last":
            raise ValueError(
                f"router features {reads.features!r} require the blocks of a ViT; with alexnet, use"
                " `last`"
            )
        jit = functools.partial(
            jax.jit, compiler_options=jit_options(engine.precision, engine.deterministic)
        )
        alexnet = build_alexnet(router.config, router.params)
        router_features = FrozenFeatures(AlexNetEncoder(alexnet, jit=jit), size)
    elif router is not None or reads.features != "last":
        other = executor if router is None else build_executor(router)
        router_features = FrozenFeatures(Backbone(other, reads), size)
    else:
        router_features = features
    workshop[key] = FrozenNetworks(executor, features, router_features)
    return workshop[key]


def find_base_means(
    pretrained: Pretrained,
    config: MethodConfig,
    precision: Precision,
    *,
    images: Images | None,
    progress: Progress,
) -> BaseMeans:
    """Return the mean CLS tokens of the pretraining data for the image size of `pretrained`, and
    for the settings `placement` and `token` of `config`.

    If the weights do not contain the means, they are measured on `images`. Without `images`, the
    means are unknown.
    """
    if not computes_similarity(config) or config.base_means == "neutral":
        return BaseMeans()
    setting = f"{pretrained.config.image_size}/{config.placement}/{config.token}"
    if (means := pretrained.base_means.get(setting)) is not None:
        if images is not None:
            progress.say(
                f"the weights contain base means for {setting}; the base data are not needed"
            )
        return BaseMeans(means, means_sha256=hashlib.sha256(means.tobytes()).hexdigest())
    if images is None:
        return BaseMeans()
    progress.say(f"measuring mean CLS tokens of the pretraining data on {len(images):,} images")
    vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
    measured = base_means(vit, images, batch_size=config.batch_size)[setting]
    return BaseMeans(measured, data_sha256=hash_images(images))


def make_methods(
    config: RunConfig, networks: FrozenNetworks, num_tasks: int, base: BaseMeans
) -> tuple[Sequence[Method], FullFinetune | None]:
    """Make the methods of the run, and the upper bound if the settings contain one. CHEEM is
    followed by its reference, linear heads on the frozen backbone.

    Raises ValueError if settings contradict each other.
    """
    keys = Keys(config.seed, config.seeds)
    methods = [make(config.method, networks, keys, num_tasks, base.values)]
    if isinstance(config.method, CheemConfig):
        reference = FrozenLinearConfig(config.method.router)
        methods.append(FrozenLinear(networks, reference, keys, num_tasks))
    if config.upper_bound is None:
        return methods, None
    return methods, FullFinetune(networks, config.upper_bound, keys, num_tasks)


class PreparedRun(NamedTuple):
    """A run that is ready to start."""

    inputs: RunInputs
    networks: FrozenNetworks
    methods: Sequence[Method]
    bound: FullFinetune | None
    identity: dict[str, Any]
    """The content of `config.json`."""
    conditions: dict[str, Any]
    """Fingerprint of the run: code, package versions, device and more; see `fingerprint.take`."""
    remarks: list[str]
    """Sentences about the settings, which are printed when the run begins."""


def prepare_run(
    inputs: RunInputs,
    progress: Progress,
    *,
    base_images: Images | None = None,
    workshop: dict[Any, FrozenNetworks] | None = None,
) -> PreparedRun:
    """Check the settings, and build the networks and methods of a run.

    Raises ValueError if the settings contradict each other, the stream or the weights, or if they
    differ between the processes of a job.
    """
    inputs.check()
    stream, pretrained, router, config, _ = inputs
    engine = config.engine
    networks = make_networks(
        pretrained, router, config.method, engine, workshop=workshop, mesh=config.mesh
    )
    base = find_base_means(
        pretrained, config.method, engine.precision, images=base_images, progress=progress
    )
    inputs = inputs._replace(base=base)
    identity = inputs.identity()
    conditions = fingerprint.take(identity, networks.executor.layout.num)
    for what, value, way_out in (
        (
            "code and package versions",
            {name: conditions[name] for name in ("code", "versions")},
            "install the same on every machine",
        ),
        ("weights", identity["weights_sha256"], "give every process the same file"),
        ("data fingerprints", identity["data_sha256"], "give every process the same images"),
        (
            "settings",
            {**identity, "mesh": vars(config.mesh), "upper_bound": config.bound_settings()},
            "start every process with the same command",
        ),
    ):
        hosts.check_equal(what, value, way_out)
    methods, bound = make_methods(config, networks, len(stream.tasks), base)
    notes = [f"{config.method.name}: {note}" for note in methods[0].check(stream.tasks)]
    remarks = [*inputs.remarks(networks.executor), *notes]
    return PreparedRun(inputs, networks, methods, bound, identity, conditions, remarks)
