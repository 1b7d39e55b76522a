"""Bottleneck adapters parallel to every FFN, and cosine heads on the adapted features, for TUNA,
MoAL, RanPAC and EASE.

The input of an adapter is the tokens after a block's attention half, before LayerNorm. Its output
is added to the output of the FFN. The up half of an adapter is initialised with 0, so a network
with new adapters is identical to the plain backbone. The adapters follow AdaptFormer (Chen et al.,
NeurIPS 2022).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import adapter_flops
from cheem_jax.backbone.vit import ViT
from cheem_jax.baselines.baseline import OneHead, TrainedBaseline, at_least_one, pass_costs
from cheem_jax.baselines.fitting import FitBatch, Fitter, Init, Inputs
from cheem_jax.baselines.heads import grow_head, local_cross_entropy
from cheem_jax.core.images import Images
from cheem_jax.core.kernels import product
from cheem_jax.core.keys import Phase, next_power_of_two
from cheem_jax.core.settings import Advance, FitConfig, check_types, no_progress
from cheem_jax.data.task import Task

SCALE = 0.1
"""Factor by which the output of adapters is multiplied."""
DROPOUT = 0.1
"""Fraction of an adapter's hidden values that dropout sets to 0 in a training step."""
SGD = optax.chain(optax.add_decayed_weights(5e-4), optax.trace(decay=0.9))
"""SGD of the official code of EASE, RanPAC and TUNA. Its updates are for the learning rate 1;
`Fitter` multiplies them by the learning rate."""


class Bottleneck(NamedTuple):
    """Weights and biases of two layers: `down` has D inputs and r outputs, and `up` the reverse.

    The arrays are stacked over leading axes such as the L blocks. The experts of MoE-Adapters swap
    the last two axes of `down`: its shape is `[*L, r, D]`.
    """

    down: Float[Array, "*L D r"]
    down_bias: Float[Array, "*L r"]
    up: Float[Array, "*L r D"]
    up_bias: Float[Array, "*L D"]


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Settings of adapters and their training."""

    bottleneck: int = 64
    """Rank of an adapter."""
    fit: FitConfig = FitConfig(epochs=20)
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one(self, "batch_size", "bottleneck")


class AdapterBaseline(OneHead, TrainedBaseline):
    """A frozen backbone with trained adapters, and one cosine head on its features."""

    def build(self) -> None:
        executor = self.executor

        @executor.jit
        def features(adapters, leaves, inputs):
            return adapted_features(executor.merge_vit(leaves), adapters, inputs["images"])

        self._features = features

    def cosine_fitter(self, optimizer: optax.GradientTransformation | None = None) -> Fitter:
        """Make the training step of adapters, a cosine head, and the scale of the head. The loss is
        the cross-entropy over all classes of the head.

        The fixed arrays of the loss are the backbone, the number of the head's classes before the
        current task, and the number of the head's classes including the current task.
        """
        executor = self.executor

        def loss(learned, fixed, batch: FitBatch):
            (adapters, weight, sigma), (leaves, num_old, num) = learned, fixed
            vit = executor.merge_vit(leaves)
            features = adapted_features(vit, adapters, batch.inputs["images"], batch.key)
            # sigma is a learned scale, because cosines alone are too small for a softmax
            logits = sigma * cosines(features, weight)
            return local_cross_entropy(logits, batch.labels + num_old, batch.weights, 0, num)

        return Fitter(loss, optimizer, jit=executor.jit, layout=executor.layout)

    def new_classifier(self, task: Task) -> tuple[Bottleneck, jax.Array, jax.Array]:
        """Initialise adapters, the columns of a cosine head for the classes of a task, and the
        scale of the head."""
        return self.new_adapters(task), padded_columns(self.new_columns(task)), jnp.ones(())

    def features_with(
        self, adapters: Bottleneck, images: Images, advance: Advance = no_progress
    ) -> Float[np.ndarray, "N D"]:
        """Compute the features of images with `adapters`."""
        return self.over(
            self._features, Inputs(images), adapters, self.executor.leaves, advance=advance
        )

    def new_adapters(self, task: Task) -> Bottleneck:
        """Initialise adapters: the down half is uniform in +-1/sqrt(D), all other arrays are 0."""
        depth = self.vit.depth
        width = self.vit.width
        rank = self.config.bottleneck
        key = self.key(task, Phase.METHOD_INIT, Init.LEARNED)
        bound = width**-0.5
        return Bottleneck(
            jax.random.uniform(key, (depth, width, rank), minval=-bound, maxval=bound),
            jnp.zeros((depth, rank)),
            jnp.zeros((depth, rank, width)),
            jnp.zeros((depth, width)),
        )

    def new_columns(self, task: Task) -> Float[np.ndarray, "D C"]:
        """Initialise the columns of a cosine head for the classes of a task."""
        key = self.key(task, Phase.METHOD_INIT, Init.HEAD)
        num = len(task.classes)
        return np.asarray(grow_head(key, None, self.vit.width, 0, num).weight)[:, :num]

    def adapted_costs(self, num_classes: int, head: int = 0) -> dict[str, int]:
        """Report the FLOPs per image of a pass with adapters and a head. The CHEEM paper counts
        neither adapters nor heads.

        For a linear head, pass the number of its classes as `num_classes`. For any other head, pass
        `num_classes` 0, and the FLOPs of the head as `head`.
        """
        vit = self.vit
        rank = self.config.bottleneck
        executed = executed_adapter_flops(vit, rank) + head
        return pass_costs(
            vit, num_classes, attention=adapter_flops(vit, rank) + head, executed=executed
        )


def adapter_params(config: ViTConfig, bottleneck: int) -> int:
    """Return the number of parameters of the adapters of all blocks."""
    return config.depth * (2 * config.width * bottleneck + bottleneck + config.width)


def executed_adapter_flops(config: ViTConfig, bottleneck: int) -> int:
    """Return the executed FLOPs per image of all adapters; the adapter of the last block
    processes only `ViTConfig.num_outputs` tokens."""
    tokens = config.depth * config.num_tokens
    executed = tokens - config.num_tokens + config.num_outputs
    return adapter_flops(config, bottleneck) * executed // tokens


def adapted_features(
    vit: ViT, adapters: Bottleneck, images: Array, key: jax.Array | None = None
) -> Float[Array, "B D"]:
    """Compute the features of images with `adapters`; a `key` enables the dropout of training."""
    depth, precision = vit.config.depth, vit.config.precision
    keys = None if key is None else jax.random.split(key, depth)

    def adapter(block: int, z: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        hidden = jax.nn.relu(
            product(z, adapters.down[block], precision) + adapters.down_bias[block]
        )
        if keys is not None:
            is_kept = jax.random.bernoulli(keys[block], 1 - DROPOUT, hidden.shape)
            hidden = jnp.where(is_kept, hidden / (1 - DROPOUT), 0.0)
        return SCALE * (product(hidden, adapters.up[block], precision) + adapters.up_bias[block])

    parallel = {block: functools.partial(adapter, block) for block in range(depth)}
    return vit.features(vit.run_blocks(vit.embed(images), adapters=parallel))


def unit(x: Array, axis: int = -1) -> Array:
    """Scale `x` to unit length along `axis`; a zero vector stays zero and has a finite gradient."""
    return x * jax.lax.rsqrt((x * x).sum(axis, keepdims=True) + 1e-24)


def cosines(features: Float[Array, "B D"], weight: Float[Array, "D P"]) -> Float[Array, "B P"]:
    """Compute the cosine between each feature and the weight of each class."""
    return unit(features) @ unit(weight, axis=0)


def padded_columns(weight: Float[np.ndarray, "D C"]) -> Float[jax.Array, "D P"]:
    """Pad the columns of a cosine head to a power of two. Tasks then share compiled functions."""
    num = weight.shape[1]
    return jnp.asarray(np.pad(weight, ((0, 0), (0, next_power_of_two(num) - num))))
