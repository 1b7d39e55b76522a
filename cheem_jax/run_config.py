"""What a run is made of: its settings, its networks, and its identity in `config.json` and in the
record.

Networks are compiled once for all runs of a process.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cheem_jax.backbone.alexnet import PretrainedAlexNet, build_alexnet
from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.alexnet_encoder import AlexNetEncoder
from cheem_jax.baselines.catalogue import MethodConfig, Networks, make, preset_of
from cheem_jax.baselines.frozen_linear import FrozenLinear, FrozenLinearConfig
from cheem_jax.baselines.full_finetune import FullFinetune, FullFinetuneConfig
from cheem_jax.cheem.config import CheemConfig, Preset
from cheem_jax.core.images import Images
from cheem_jax.core.keys import Keys
from cheem_jax.core.routing import PAPER
from cheem_jax.core.settings import Placement, Precision, SeedsConfig, Token
from cheem_jax.data.task import Stream, hash_of
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine import hosts
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.layout import MeshConfig, make_layout
from cheem_jax.run.method import Backbone, FrozenFeatures, Method
from cheem_jax.run.progress import Progress

ONE_DEVICE = MeshConfig()
RouterWeights = Pretrained | PretrainedAlexNet
"""Weights of a lighter network that infers the task ID instead of the backbone (CHEEM-lite)."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run learns and how; together with the data and the weights it decides every result."""

    method: MethodConfig
    preset: Preset
    seed: int = 0
    upper_bound: FullFinetuneConfig | None = None
    """Also fine-tune the whole backbone per task, with the task ID given."""
    engine: EngineConfig = EngineConfig()
    seeds: SeedsConfig = SeedsConfig()
    mesh: MeshConfig = MeshConfig()
    """Not part of what decides results: a run may be resumed on other devices."""


def check_fits(
    stream: Stream, pretrained: Pretrained, router: RouterWeights | None, config: RunConfig
) -> None:
    """Raises ValueError where the networks take images of another size, or the upper bound is the
    method itself."""
    shape = stream.tasks[0].train.images.shape[1:]
    for network in filter(None, (pretrained, router)):
        size = network.config.image_size
        if shape != (size, size, 3):
            raise ValueError(
                f"stream {stream.name!r} contains images of shape {shape}, but"
                f" {network.config.name} takes {(size, size, 3)}; load both with the same image"
                " size"
            )
    if config.upper_bound is not None and config.method.name == "full_finetune":
        raise ValueError("full_finetune is the upper bound itself: leave out --upper-bound")


def networks_of(
    pretrained: Pretrained,
    router: RouterWeights | None,
    config: MethodConfig,
    engine: EngineConfig,
    *,
    workshop: dict[Any, Networks] | None = None,
    mesh: MeshConfig = ONE_DEVICE,
) -> Networks:
    """The networks of a run; those in `workshop` are taken from there, with all that they have
    compiled."""
    layout = make_layout(mesh)
    placement: Placement = getattr(config, "placement", "mlp_down")
    token: Token = getattr(config, "token", "component")
    reads = getattr(config, "router", PAPER)
    size = config.batch_size
    workshop = {} if workshop is None else workshop
    weights = (pretrained.sha256, pretrained.config, router and (router.sha256, router.config))
    key = (weights, placement, token, size, engine, layout.place, reads.features)
    if key not in workshop:
        vit = build(
            dataclasses.replace(pretrained.config, precision=engine.precision), pretrained.params
        )
        executor = make_executor(
            vit, placement, engine, token=token, batch_size=size, layout=layout
        )
        features = FrozenFeatures(executor, size)
        router_features = (
            features
            if reads.features == "last"
            else FrozenFeatures(Backbone(executor, reads), size)
        )
        if isinstance(router, PretrainedAlexNet):
            if reads.features != "last":
                raise ValueError(
                    f"router features {reads.features!r} are of a ViT's blocks; alexnet has only"
                    " `last`"
                )
            jit = functools.partial(
                jax.jit, compiler_options=jit_options(engine.precision, engine.deterministic)
            )
            router_features = FrozenFeatures(
                AlexNetEncoder(build_alexnet(router.config, router.params), jit=jit), size
            )
        elif router is not None:
            router_vit = build(
                dataclasses.replace(router.config, precision=engine.precision), router.params
            )
            router_executor = make_executor(
                router_vit, placement, engine, batch_size=size, layout=layout
            )
            router_features = FrozenFeatures(Backbone(router_executor, reads), size)
        workshop[key] = Networks(executor, features, router_features)
    return workshop[key]


class BaseMeans(NamedTuple):
    """Mean CLS tokens of the pretraining data, and the hash by which `config.json` knows them."""

    values: np.ndarray | None = None
    """mu of the base task, section 'Task similarity'; None: unknown, so its similarity is neutral
    (0)."""
    means_sha256: str | None = None
    """Of means that come with the weights."""
    data_sha256: str | None = None
    """Of the images on which they were measured: the last bits of a measured mean differ from
    machine to machine."""


def base_means_of(
    pretrained: Pretrained,
    config: MethodConfig,
    precision: Precision,
    *,
    images: Images | None,
    progress: Progress,
) -> BaseMeans:
    """Those in the weights for exactly this image size, placement and token, else measured on the
    images, if any."""
    if not isinstance(config, CheemConfig) or config.base_means == "neutral":
        return BaseMeans()
    setting = f"{pretrained.config.image_size}/{config.placement}/{config.token}"
    if (known := pretrained.base_means.get(setting)) is not None:
        if images is not None:
            progress.say(
                f"the weights contain base means for {setting}: the base data is not needed"
            )
        return BaseMeans(known, means_sha256=hashlib.sha256(known.tobytes()).hexdigest())
    if images is None:
        return BaseMeans()
    progress.say(f"measuring mean CLS tokens of the pretraining data on {len(images):,} images")
    vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
    measured = base_means(vit, images, batch_size=config.batch_size)[setting]
    return BaseMeans(measured, data_sha256=hash_of(images))


def learners_of(
    config: RunConfig, networks: Networks, num_tasks: int, base: BaseMeans
) -> tuple[tuple[Method, ...], FullFinetune | None]:
    """What learns in a run of so many tasks. Raises ValueError where the settings do not fit each
    other.

    Returns the run's own method, with a baseline that CHEEM has to beat, and the upper bound where
    it was asked for.
    """
    keys = Keys(config.seed, config.seeds)
    bound = None
    methods = [make(config.method, networks, keys, num_tasks, base.values)]
    if isinstance(config.method, CheemConfig):
        methods.append(
            FrozenLinear(networks, FrozenLinearConfig(config.method.router), keys, num_tasks)
        )
    if config.upper_bound is not None:
        bound = FullFinetune(networks, config.upper_bound, keys, num_tasks)
    return tuple(methods), bound


def remarks(
    config: RunConfig, executor: Executor, notes: Sequence[str], base: BaseMeans
) -> list[str]:
    """What a run says of its settings when it begins; `notes` are the method's own."""
    found = [
        f"networks run in {config.engine.precision} by the executor {executor.name!r}:"
        f" {executor.reason}"
    ]
    if executor.layout.is_many:
        over = f" in {hosts.count()} processes" if hosts.count() > 1 else ""
        found.append(f"each batch is divided over {executor.layout.num} devices{over}")
    found += [f"{config.method.name}: {note}" for note in notes]
    if base.values is None and isinstance(config.method, CheemConfig):
        why = (
            "left out, as set"
            if config.method.base_means == "neutral"
            else "unknown at this image size (`cheem convert --base-data` measures them)"
        )
        found.append(
            f"mean CLS tokens of the pretraining data are {why}: its similarity to each task counts"
            " as 0"
        )
    return found


def identity_of(
    stream: Stream,
    pretrained: Pretrained,
    config: RunConfig,
    *,
    base: BaseMeans,
    router: RouterWeights | None,
) -> dict[str, Any]:
    """All that decides what is learned, as in `config.json`; an upper bound can be added to a
    finished run."""
    known = CONFIGS.get(pretrained.config.name)
    scaling = (pretrained.config.mean, pretrained.config.std)
    unit = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    # a setting that runs did not always have is left out at its default, so that their hashes stay
    method = {
        k: value
        for k, value in dataclasses.asdict(config.method).items()
        if (k, value) != ("augment", False)
    }
    is_usual = scaling != unit if known is None else scaling == (known.mean, known.std)
    return {
        "format": "cheem_jax-run/1",
        "stream": stream.name,
        "tasks": [task.name for task in stream.tasks],
        "backbone": pretrained.config.name,
        "image_size": pretrained.config.image_size,
        "seed": config.seed,
        "seeds": dataclasses.asdict(config.seeds),
        config.method.name: method,
        "engine": dataclasses.asdict(config.engine),
        "weights_sha256": pretrained.sha256,
        "router_weights_sha256": None if router is None else router.sha256,
        "base_means_sha256": base.means_sha256,
        "base_data_sha256": base.data_sha256,
        "data_sha256": {task.name: data_hash(task) for task in stream.tasks},
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
        # where pixels are not scaled as the named backbone's are
        **({} if is_usual else {"pixels": scaling}),
    }


def defaults_of(method: MethodConfig) -> dict[str, Any]:
    """Parts of an identity with their defaults: what a run did that was begun before a setting
    existed."""
    settings = {method.name: type(method)(), "seeds": SeedsConfig(), "engine": EngineConfig()}
    return {name: dataclasses.asdict(own) for name, own in settings.items()} | {
        "base_data_sha256": None
    }


def setting_of(
    stream: Stream,
    pretrained: Pretrained,
    config: RunConfig,
    *,
    base: BaseMeans,
    router: RouterWeights | None,
) -> dict[str, Any]:
    """The first entry of the record: the settings that tables and reports name."""
    method = config.method
    is_preset = preset_of(method.name, config.preset) == method
    return {
        "method": method.name,
        "backbone": pretrained.config.name,
        "source": pretrained.source,
        "stream": stream.name,
        "seed": config.seed,
        "placement": getattr(method, "placement", None),
        "preset": config.preset if is_preset else f"{config.preset}, changed",
        "image_size": pretrained.config.image_size,
        "upright": False,  # images are decoded as stored, as in the paper's loaders
        "base_means": (
            ("neutral" if base.values is None else "known")
            if isinstance(method, CheemConfig)
            else None
        ),
        "precision": config.engine.precision,
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
        "router": pretrained.config.name if router is None else router.config.name,
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
    }


def check_hosts(
    config: RunConfig, identity: Mapping[str, Any], conditions: Mapping[str, Any]
) -> None:
    """Raises ValueError where the processes of a job would not do the same."""
    settings = {
        **identity,
        "mesh": vars(config.mesh),
        "upper_bound": config.upper_bound is not None,
    }
    code = {name: conditions[name] for name in ("code", "versions")}
    hosts.check_equal("code and package versions", code, "install the same on every machine")
    hosts.check_equal("weights", identity["weights_sha256"], "give every process the same file")
    hosts.check_equal(
        "data fingerprints", identity["data_sha256"], "give every process the same images"
    )
    hosts.check_equal("settings", settings, "start every process with the same command")
