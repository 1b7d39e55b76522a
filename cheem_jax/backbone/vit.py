"""The frozen backbone: a Flax NNX Vision Transformer equal to timm's, whose blocks take an op as an argument.

A block (paper, appendix 'Identifying the Task-Synergy Internal Memory') is
`z = x + Proj(MHSA(LN1 x))`, `y = z + Down(GELU(Up(LN2 z)))`; the plastic layer is `Down` or `Proj`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.ops import Expert, Op, Placement, Reuse, Skip, apply_op


class Block(nnx.Module):
    """One transformer block; its own `proj` and `down` are expert 0 of the two possible memories."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        width = config.width
        self.num_heads = config.num_heads
        self.activation = config.activation
        self.norm1 = layer_norm(config, rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.proj = nnx.Linear(width, width, rngs=rngs)
        self.norm2 = layer_norm(config, rngs)
        self.up = nnx.Linear(width, config.mlp_width, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, width, rngs=rngs)

    def expert(self, placement: Placement) -> Expert:
        """Expert 0: the pretrained plastic layer."""
        layer = self.down if placement == "mlp_down" else self.proj
        assert layer.bias is not None  # every Linear here is built with a bias
        return Expert(layer.kernel[...], layer.bias[...])

    def mix_tokens(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """The attention branch up to its projection: the input of `proj`."""
        b, n, d = x.shape
        heads = self.num_heads
        qkv = self.qkv(self.norm1(x)).reshape(b, n, 3, heads, d // heads)
        query, key, value = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        scores = (query * (d // heads) ** -0.5) @ key.transpose(0, 1, 3, 2)
        mixed = jax.nn.softmax(scores, axis=-1) @ value
        return mixed.transpose(0, 2, 1, 3).reshape(b, n, d)

    def mix_channels(self, z: Float[Array, "B N D"]) -> Float[Array, "B N F"]:
        """The FFN branch up to its down-projection: the input of `down`."""
        u = self.up(self.norm2(z))
        if self.activation == "quick_gelu":
            return u * jax.nn.sigmoid(1.702 * u)
        return jax.nn.gelu(u, approximate=False)

    def enter(self, x: Float[Array, "B N D"], *, placement: Placement) -> Float[Array, "B N D"]:
        """The tokens that every choice at this block begins with: after the attention half for `mlp_down`."""
        return x + self.proj(self.mix_tokens(x)) if placement == "mlp_down" else x

    def widen(self, z: Float[Array, "B N D"], *, placement: Placement) -> Float[Array, "B N F"]:
        """The input of the plastic layer, the same for every choice but Skip."""
        return self.mix_channels(z) if placement == "mlp_down" else self.mix_tokens(z)

    def leave(
        self, op: Op, z: Float[Array, "B N D"], u: Float[Array, "B N F"] | None, *, placement: Placement
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N D"] | None]:
        """The block's output, and the plastic layer's before the residual sum (None where it is skipped)."""
        component = None
        if not isinstance(op, Skip):
            assert u is not None, "only Skip does without the plastic layer's input"
            component = apply_op(op, u)
            z = z + component
        return (z if placement == "mlp_down" else z + self.down(self.mix_channels(z))), component

    def run(
        self, op: Op, x: Float[Array, "B N D"], *, placement: Placement
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B N D"] | None]:
        """The whole block: `enter`, `widen` unless skipped, `leave`."""
        z = self.enter(x, placement=placement)
        u = None if isinstance(op, Skip) else self.widen(z, placement=placement)
        return self.leave(op, z, u, placement=placement)


class ViT(nnx.Module):
    """Images to features: the class token after the final LayerNorm."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.config = config
        num_inputs = 3 * config.patch_size**2
        self.patch = nnx.Linear(num_inputs, config.width, use_bias=config.patch_bias, rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((config.width,)))
        self.position = nnx.Param(jnp.zeros((config.num_tokens, config.width)))
        self.norm_before = layer_norm(config, rngs) if config.norm_before_blocks else None
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.depth)])
        self.norm = layer_norm(config, rngs)
        self.head = nnx.Linear(config.width, config.num_classes, rngs=rngs) if config.num_classes else None

    def embed(self, images: UInt8[Array, "B H W 3"] | Float[Array, "B H W 3"]) -> Float[Array, "B N D"]:
        """Tokens of the first block; uint8 images are normalised here, floats are taken as normalised."""
        if images.dtype == jnp.uint8:
            mean, std = jnp.asarray(self.config.mean), jnp.asarray(self.config.std)
            images = (images.astype(jnp.float32) / 255.0 - mean) / std
        b, height, width, _ = images.shape
        p = self.config.patch_size
        patches = images.reshape(b, height // p, p, width // p, p, 3).transpose(0, 1, 3, 2, 4, 5)
        tokens = self.patch(patches.reshape(b, -1, p * p * 3))
        class_token = jnp.broadcast_to(self.class_token[...], (b, 1, tokens.shape[-1]))
        tokens = jnp.concatenate([class_token, tokens], axis=1) + self.position[...]
        return tokens if self.norm_before is None else self.norm_before(tokens)

    def features(self, x: Float[Array, "B N D"]) -> Float[Array, "B D"]:
        """The class token of the last block's output, normalised."""
        return self.norm(x[:, 0])

    def __call__(
        self,
        images: UInt8[Array, "B H W 3"] | Float[Array, "B H W 3"],
        ops: Sequence[Op] | None = None,
        *,
        placement: Placement = "mlp_down",
    ) -> Float[Array, "B D"]:
        """Features of the network that runs `ops`, one per block; without them the plain backbone's."""
        if ops is None:
            ops = [Reuse(block.expert(placement)) for block in self.blocks]
        x = self.embed(images)
        for block, op in zip(self.blocks, ops, strict=True):
            x, _ = block.run(op, x, placement=placement)
        return self.features(x)

    def logits(self, features: Float[Array, "B D"]) -> Float[Array, "B classes"]:
        """The pretrained head, where the weights carry one."""
        if self.head is None:
            raise ValueError(f"{self.config.name} carries no pretrained head")
        return self.head(features)


def layer_norm(config: ViTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """timm's LayerNorm; the two-pass variance keeps float32 parity at 1e-4."""
    return nnx.LayerNorm(config.width, epsilon=config.layer_norm_eps, use_fast_variance=False, rngs=rngs)
