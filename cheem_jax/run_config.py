"""What a run learns and how: its settings, its identity in `config.json`, and what its record says at the beginning."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.catalogue import MethodConfig, preset_of
from cheem_jax.baselines.full_finetune import FullFinetuneConfig
from cheem_jax.cheem.config import CheemConfig, Preset
from cheem_jax.core.keys import SeedsConfig
from cheem_jax.data.task import Stream
from cheem_jax.data.task import fingerprint as data_hash
from cheem_jax.engine import hosts
from cheem_jax.engine.choice import EngineConfig
from cheem_jax.engine.layout import MeshConfig
from cheem_jax.networks import BaseMeans, RouterWeights


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


def check_fits(stream: Stream, pretrained: Pretrained, router: RouterWeights | None, config: RunConfig) -> None:
    """Raises ValueError where the networks take images of another size, or the upper bound is the method itself."""
    shape = stream.tasks[0].train.images.shape[1:]
    for network in filter(None, (pretrained, router)):
        size = network.config.image_size
        if shape != (size, size, 3):
            raise ValueError(
                f"stream {stream.name!r} contains images of shape {shape}, but {network.config.name} takes "
                f"{(size, size, 3)}; load both with the same image size"
            )
    if config.upper_bound is not None and config.method.name == "full_finetune":
        raise ValueError("full_finetune is the upper bound itself: leave out --upper-bound")


def identity_of(
    stream: Stream, pretrained: Pretrained, config: RunConfig, *, base: BaseMeans, router: RouterWeights | None
) -> dict[str, Any]:
    """All that decides what is learned, as in `config.json`; an upper bound can be added to a finished run."""
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
        "base_means_sha256": base.means_sha256,
        "base_data_sha256": base.data_sha256,
        "data_sha256": {task.name: data_hash(task) for task in stream.tasks},
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
        **_pixels(pretrained),
    }


def defaults_of(method: MethodConfig) -> dict[str, Any]:
    """Parts of an identity with their defaults: what a run did that was begun before a setting existed."""
    settings = {method.name: type(method)(), "seeds": SeedsConfig(), "engine": EngineConfig()}
    return {name: dataclasses.asdict(own) for name, own in settings.items()} | {"base_data_sha256": None}


def _pixels(pretrained: Pretrained) -> dict[str, Any]:
    """Where pixels are not scaled as the named backbone's are."""
    config, known = pretrained.config, CONFIGS.get(pretrained.config.name)
    scaling = (config.mean, config.std)
    unit = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    usual = scaling != unit if known is None else scaling == (known.mean, known.std)
    return {} if usual else {"pixels": scaling}


def setting_of(
    stream: Stream, pretrained: Pretrained, config: RunConfig, *, base: BaseMeans, router: RouterWeights | None
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
        "base_means": ("neutral" if base.values is None else "known") if isinstance(method, CheemConfig) else None,
        "precision": config.engine.precision,
        "split_sha256": {task.name: task.split_sha256 for task in stream.tasks},
        "router": pretrained.config.name if router is None else router.config.name,
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
    }


def check_hosts(config: RunConfig, identity: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
    """Raises ValueError where the processes of a job would not do the same."""
    settings = {**identity, "mesh": vars(config.mesh), "upper_bound": config.upper_bound is not None}
    code = {name: conditions[name] for name in ("code", "versions")}
    hosts.check_equal("code and package versions", code, "install the same on every machine")
    hosts.check_equal("weights", identity["weights_sha256"], "give every process the same file")
    hosts.check_equal("data fingerprints", identity["data_sha256"], "give every process the same images")
    hosts.check_equal("settings", settings, "start every process with the same command")
