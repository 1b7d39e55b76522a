"""Bottleneck adapters parallel to every FFN, and cosine heads on the adapted features: what TUNA and MoAL share.

An adapter reads the tokens after a block's attention half, before LayerNorm, and adds to the FFN's output. Its up half
starts at 0, so a network with new adapters is the plain backbone. (AdaptFormer: Chen et al., NeurIPS 2022.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import adapter_flops
from cheem_jax.backbone.vit import Adapter, ViT
from cheem_jax.baselines.fitting import Inputs, over_batches
from cheem_jax.cheem.heads import grow_head
from cheem_jax.cheem.training import FitConfig, check_batch_size
from cheem_jax.core.images import Images
from cheem_jax.core.kernels import Precision, product
from cheem_jax.core.pool import Head
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.passes import Advance

Optimizer = Literal["adam", "sgd"]


class Adapters(NamedTuple):
    """The adapters of all L blocks, D -> r -> D."""

    down: Float[Array, "L D r"]
    down_bias: Float[Array, "L r"]
    up: Float[Array, "L r D"]
    up_bias: Float[Array, "L D"]


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Settings of adapters and their training, with the optimizer of the paper's comparison."""

    bottleneck: int = 64
    """Rank of an adapter."""
    scale: float = 0.1
    """Factor of the adapters' output."""
    dropout: float = 0.1
    """Share of an adapter's hidden values that a training step leaves out."""
    optimizer: Optimizer = "adam"
    """Adam, or the official codes' SGD with momentum 0.9 and weight decay 5e-4 (at a rate of 0.01 to 0.05)."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        if self.bottleneck < 1:
            raise ValueError(f"bottleneck is {self.bottleneck}; an adapter needs a rank of at least 1")
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; expected a positive number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; expected a share in [0, 1)")


def init_adapters(key: jax.Array, config: ViTConfig, bottleneck: int) -> Adapters:
    """The down half uniform in +-1/sqrt(D), all else 0."""
    depth, width = config.depth, config.width
    bound = width**-0.5
    return Adapters(
        jax.random.uniform(key, (depth, width, bottleneck), minval=-bound, maxval=bound),
        jnp.zeros((depth, bottleneck)),
        jnp.zeros((depth, bottleneck, width)),
        jnp.zeros((depth, width)),
    )


def adapter_params(config: ViTConfig, bottleneck: int) -> int:
    """Parameters of the adapters of all blocks."""
    return config.depth * (2 * config.width * bottleneck + bottleneck + config.width)


def executed_adapter_flops(config: ViTConfig, bottleneck: int) -> int:
    """FLOPs per image of all adapters as executed: the last block computes the CLS token alone."""
    tokens = config.depth * config.num_tokens
    return adapter_flops(config, bottleneck) * (tokens - config.num_tokens + 1) // tokens


def adapted_features(
    vit: ViT, adapters: Adapters, images: Array, config: AdapterConfig, key: jax.Array | None = None
) -> Float[Array, "B D"]:
    """Features of the network with these adapters; with a `key`, a training step's dropout of hidden values."""
    depth = vit.config.depth
    keys = [None] * depth if key is None else list(jax.random.split(key, depth))
    found = {block: _beside(adapters, block, config, vit.config.precision, keys[block]) for block in range(depth)}
    return vit.features(vit.run_blocks(vit.embed(images), adapters=found))


def compiled_features(executor: Executor, config: AdapterConfig) -> Callable[..., Float[np.ndarray, "N D"]]:
    """A function of adapters, any number of images and (optional) an `Advance`: features of the adapted network."""

    @executor.jit
    def of_batch(adapters, leaves, images):
        return adapted_features(executor.vit_of(leaves), adapters, images, config)

    def features(adapters: Adapters, images: Images, advance: Advance | None = None) -> Float[np.ndarray, "N D"]:
        def of_rows(read: dict[str, Any]) -> jax.Array:
            return of_batch(adapters, executor.leaves, read["images"])

        return over_batches(
            of_rows, Inputs(images), batch_size=config.batch_size, advance=advance, layout=executor.layout
        )

    return features


def _beside(
    adapters: Adapters, block: int, config: AdapterConfig, precision: Precision, key: jax.Array | None
) -> Adapter:
    def adapter(z: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        hidden = jax.nn.relu(product(z, adapters.down[block], precision) + adapters.down_bias[block])
        if key is not None and config.dropout:
            kept = jax.random.bernoulli(key, 1 - config.dropout, hidden.shape)
            hidden = jnp.where(kept, hidden / (1 - config.dropout), 0.0)
        return config.scale * (product(hidden, adapters.up[block], precision) + adapters.up_bias[block])

    return adapter


def unit(x: Array, axis: int = -1) -> Array:
    """Scaled to unit length; a zero vector stays zero, with a finite gradient."""
    return x * jax.lax.rsqrt((x * x).sum(axis, keepdims=True) + 1e-24)


def cosines(features: Float[Array, "B D"], weight: Float[Array, "D P"]) -> Float[Array, "B P"]:
    """Cosine of every feature with every class's weight."""
    return unit(features) @ unit(weight, axis=0)


def grow_weight(key: jax.Array, weight: np.ndarray | jax.Array | None, width: int, num_seen: int, num_new: int) -> Head:
    """A cosine head (its bias is 0 and unused) with `num_new` more columns; the first `num_seen` stay as they are."""
    head = None if weight is None else cosine_head(weight)
    return grow_head(key, head, width, num_seen, num_new)


def cosine_head(weight: np.ndarray | jax.Array) -> Head:
    """A weight as a head; on the host, because on the device every number of classes would be compiled."""
    return Head(np.asarray(weight), np.zeros(weight.shape[1], np.float32))  # pyright: ignore[reportArgumentType]


def directions(optimizer: Optimizer, decay: float = 5e-4) -> optax.GradientTransformation:
    """Adam without weight decay, as in the paper's comparison, or the official codes' SGD with momentum 0.9."""
    if optimizer == "adam":
        return optax.scale_by_adam()
    return optax.chain(optax.add_decayed_weights(decay), optax.trace(decay=0.9))
