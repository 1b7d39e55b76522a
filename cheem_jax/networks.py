"""The networks of a run, compiled once for all runs of a process, and the mean CLS tokens of the pretraining data."""

import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np

from cheem_jax.backbone.alexnet import PretrainedAlexNet, build_alexnet
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.alexnet_encoder import AlexNetEncoder
from cheem_jax.baselines.catalogue import MethodConfig, Networks
from cheem_jax.baselines.lora_cl import LoraClConfig
from cheem_jax.cheem.config import CheemConfig
from cheem_jax.core.images import Images
from cheem_jax.core.kernels import Precision
from cheem_jax.core.ops import Placement
from cheem_jax.core.routing.config import PAPER
from cheem_jax.data.task import hash_of_images
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.executor import Token
from cheem_jax.engine.layout import ONE, Layout
from cheem_jax.run.method import Backbone, FrozenFeatures
from cheem_jax.run.progress import Progress

RouterWeights = Pretrained | PretrainedAlexNet
"""Weights of a lighter network that infers the task ID instead of the backbone (CHEEM-lite)."""


def networks_of(
    pretrained: Pretrained,
    router: RouterWeights | None,
    config: MethodConfig,
    engine: EngineConfig,
    *,
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
    key = (weights, placement, token, size, engine, layout.place, layout.fsdp, reads.features)
    if key not in workshop:
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
        workshop[key] = Networks(executor, features, router_features)
    return workshop[key]


class BaseMeans(NamedTuple):
    """Mean CLS tokens of the pretraining data, and the hash by which `config.json` knows them."""

    values: np.ndarray | None = None
    """mu of the base task, section 'Task similarity'; None: unknown, so its similarity is neutral (0)."""
    means_sha256: str | None = None
    """Of means that come with the weights."""
    data_sha256: str | None = None
    """Of the images on which they were measured: the last bits of a measured mean differ from machine to machine."""


def base_means_of(
    pretrained: Pretrained,
    config: MethodConfig,
    precision: Precision,
    *,
    images: Images | None,
    progress: Progress,
) -> BaseMeans:
    """Those in the weights for exactly this image size, placement and token, else measured on the images, if any."""
    if not isinstance(config, CheemConfig) or config.base_means == "neutral":
        return BaseMeans()
    setting = f"{pretrained.config.image_size}/{config.placement}/{config.token}"
    if (known := pretrained.base_means.get(setting)) is not None:
        if images is not None:
            progress.say(f"the weights contain base means for {setting}: the base data is not needed")
        return BaseMeans(known, means_sha256=hashlib.sha256(known.tobytes()).hexdigest())
    if images is None:
        return BaseMeans()
    progress.say(f"measuring mean CLS tokens of the pretraining data on {len(images):,} images")
    vit = build(dataclasses.replace(pretrained.config, precision=precision), pretrained.params)
    measured = base_means(vit, images, batch_size=config.batch_size)[setting]
    return BaseMeans(measured, data_sha256=hash_of_images(images))
