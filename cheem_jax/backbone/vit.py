"""The frozen backbone: a Flax NNX Vision Transformer that computes the same function as timm's ViT.
Each block accepts an op as an argument.

A block (paper, appendix 'Identifying the Task-Synergy Internal Memory') computes `z = x +
Proj(MHSA(LN1 x))` and `y = z + Down(GELU(Up(LN2 z)))`. The plastic layer is `Down` for the
placement `mlp_down`, and `Proj` for `attn_proj`. A gated MLP computes `SiLU(Gate(LN2 z)) * Up(LN2
z)` before `Down`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.core.kernels import activate, attend, layer_norm, product
from cheem_jax.core.ops import Expert, Op, Reuse, Skip, apply_op
from cheem_jax.core.settings import Activation, Placement, Precision


class Prefix(NamedTuple):
    """Learned keys and values that are prepended to the keys and values of a block's attention. The
    `qkv` layer does not project them, and they add no output tokens."""

    keys: Float[Array, "B P D"]
    values: Float[Array, "B P D"]


class SidePrefix(NamedTuple):
    """Learned keys and values to which a block's queries attend with a separate softmax. The result
    is added to the output of the block's attention."""

    keys: Float[Array, "B P D"]
    values: Float[Array, "B P D"]


Adapter = Callable[[Float[Array, "B N D"]], Float[Array, "B N D"]]
"""Function whose argument is the tokens of a block between the attention half and `norm2`. Its
result is added to the output of the FFN."""


@functools.cache
def rotations(
    base: float, grid: int, num_tokens: int, head_width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the cosine and sine of the rotary angle of each token and each channel of a head.

    The last `grid`^2 tokens are patches; all other tokens have angle 0. Patch centres (y, x) are in
    -1..1 for every image size. The first quarter of the channels rotates by 2 pi y / period and the
    second quarter by 2 pi x / period, with periods that increase from 1 to less than `base`. The
    second half of the channels repeats the angles, because channel i is paired with channel i +
    `head_width` / 2.
    """
    centres = (2.0 * np.arange(grid) + 1.0) / grid - 1.0
    periods = base ** (4.0 * np.arange(head_width // 4) / head_width)
    points = np.stack(np.meshgrid(centres, centres, indexing="ij"), axis=-1).reshape(-1, 2)
    angles = np.zeros((num_tokens, head_width // 2))
    angles[num_tokens - grid**2 :] = (2 * np.pi * points[:, :, None] / periods).reshape(grid**2, -1)
    angles = np.concatenate([angles, angles], axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(
    x: Float[Array, "B H N d"], cos: Float[np.ndarray, "N d"], sin: Float[np.ndarray, "N d"]
) -> Float[Array, "B H N d"]:
    """Rotate queries or keys by their rotary angles (Su et al., "RoFormer", 2021). Channel i of a
    head is paired with channel i + d / 2."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def linear(
    layer: nnx.Linear, x: Float[Array, "*B I"], precision: Precision
) -> Float[Array, "*B O"]:
    """Apply a linear layer with bias."""
    assert layer.bias is not None
    return product(x, layer.kernel[...], precision) + layer.bias[...]


def summary(tokens: Float[Array, "B N D"], config: ViTConfig) -> Float[Array, "B D"]:
    """Return one token that represents each image: the CLS token, or the mean of all tokens if
    there is no CLS token."""
    return tokens[:, 0] if config.pool == "class" else mean_patch(tokens, config)


def mean_patch(tokens: Float[Array, "B N D"], config: ViTConfig) -> Float[Array, "B D"]:
    """Compute the mean of all tokens except the CLS token. The mean includes registers."""
    return tokens[:, int(config.pool == "class") :].mean(axis=1)


class Block(nnx.Module):
    """One transformer block. The base expert (expert 0) is the layer `down` for the placement
    `mlp_down`, and the layer `proj` for `attn_proj`."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        width = config.width
        self.num_heads = config.num_heads
        self.activation: Activation = config.activation
        self.precision: Precision = config.precision
        self.rotary = config.rotary
        self.grid = config.image_size // config.patch_size
        self.norm1 = LayerNorm(config, rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.proj = nnx.Linear(width, width, rngs=rngs)
        self.norm2 = LayerNorm(config, rngs)
        self.gate = nnx.Linear(width, config.mlp_width, rngs=rngs) if config.gated else None
        self.up = nnx.Linear(width, config.mlp_width, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, width, rngs=rngs)

    def expert(self, placement: Placement) -> Expert:
        """Return expert 0: the pretrained plastic layer."""
        layer = self.down if placement == "mlp_down" else self.proj
        assert layer.bias is not None  # every Linear of a block has a bias
        return Expert(layer.kernel[...], layer.bias[...])

    def mix_tokens(
        self,
        x: Float[Array, "B N D"],
        *,
        outputs: int | None = None,
        prefix: Prefix | SidePrefix | None = None,
    ) -> Float[Array, "B M D"]:
        """Compute the attention branch up to the input of `proj`, for the first `outputs` tokens
        (default: all)."""
        b, n, d = x.shape
        h = self.norm1(x)
        if outputs is None:
            mixed = linear(self.qkv, h, self.precision)
            query, key, value = mixed[..., :d], mixed[..., d : 2 * d], mixed[..., 2 * d :]
        else:
            assert self.qkv.bias is not None
            weight = self.qkv.kernel[...]
            bias = self.qkv.bias[...]
            query = product(h[:, :outputs], weight[:, :d], self.precision) + bias[:d]
            mixed = product(h, weight[:, d:], self.precision) + bias[d:]
            key, value = mixed[..., :d], mixed[..., d:]

        def heads(t: Float[Array, "B N D"]) -> Float[Array, "B H N d"]:
            return t.reshape(b, -1, self.num_heads, d // self.num_heads).transpose(0, 2, 1, 3)

        query, key, value = heads(query), heads(key), heads(value)
        if self.rotary is not None:
            cos, sin = rotations(self.rotary, self.grid, n, d // self.num_heads)
            query, key = rotate(query, cos[:outputs], sin[:outputs]), rotate(key, cos, sin)
        if isinstance(prefix, Prefix):
            key = jnp.concatenate([heads(prefix.keys), key], axis=2)
            value = jnp.concatenate([heads(prefix.values), value], axis=2)
        # The products in `attend` would cast their operands to `precision` anyway. This earlier
        # cast halves the size of the transposed heads if `precision` is bfloat16.
        query, key, value = (part.astype(self.precision) for part in (query, key, value))
        mixed = attend(query, key, value, self.precision)
        if isinstance(prefix, SidePrefix):
            side = attend(query, heads(prefix.keys), heads(prefix.values), self.precision)
            mixed = mixed + side
        return mixed.transpose(0, 2, 1, 3).reshape(b, -1, d)

    def mix_channels(self, z: Float[Array, "B N D"]) -> Float[Array, "B N F"]:
        """Compute the FFN branch up to the input of `down`."""
        assert self.up.bias is not None
        h = self.norm2(z)
        if self.gate is not None:
            assert self.gate.bias is not None
            gate = product(h, self.gate.kernel[...], self.precision)
            return activate(gate, self.gate.bias[...], self.activation) * linear(
                self.up, h, self.precision
            )
        widened = product(h, self.up.kernel[...], self.precision)
        return activate(widened, self.up.bias[...], self.activation)

    def enter(
        self, x: Float[Array, "B N D"], *, placement: Placement, outputs: int | None = None
    ) -> Float[Array, "B M D"]:
        """Compute the tokens that all candidate ops of this block share. For `mlp_down`, these are
        the tokens after the attention half; for `attn_proj`, they are the input `x`."""
        if placement == "attn_proj":
            return x
        return x[:, :outputs] + linear(
            self.proj, self.mix_tokens(x, outputs=outputs), self.precision
        )

    def widen(
        self, z: Float[Array, "B N D"], *, placement: Placement, outputs: int | None = None
    ) -> Float[Array, "B M F"]:
        """Compute the input of the plastic layer. All candidate ops except Skip share the input."""
        return (
            self.mix_channels(z) if placement == "mlp_down" else self.mix_tokens(z, outputs=outputs)
        )

    def leave(
        self,
        op: Op,
        z: Float[Array, "B N D"],
        u: Float[Array, "B M F"] | None,
        *,
        placement: Placement,
        outputs: int | None = None,
    ) -> tuple[Float[Array, "B M D"], Float[Array, "B M D"] | None]:
        """Return the output of the block, and the output of the plastic layer before the residual
        sum (None for Skip)."""
        component = None
        z = z[:, :outputs]
        if not isinstance(op, Skip):
            assert u is not None, "every op except Skip needs the input of the plastic layer"
            component = apply_op(op, u, self.precision)
            z = z + component
        if placement == "mlp_down":
            return z, component
        return z + linear(self.down, self.mix_channels(z), self.precision), component

    def run(
        self, op: Op, x: Float[Array, "B N D"], *, placement: Placement, outputs: int | None = None
    ) -> tuple[Float[Array, "B M D"], Float[Array, "B M D"] | None]:
        """Run the whole block: `enter`, then `widen` except for Skip, then `leave`.

        Only the first `outputs` tokens are computed (default: all). If the backbone has a CLS
        token, the features use only this token of the last block, so `outputs=1` saves most of the
        work of the last block.
        """
        z = self.enter(x, placement=placement, outputs=outputs)
        u = None if isinstance(op, Skip) else self.widen(z, placement=placement, outputs=outputs)
        return self.leave(op, z, u, placement=placement, outputs=outputs)

    def run_adapted(
        self,
        x: Float[Array, "B N D"],
        *,
        prefix: Prefix | SidePrefix | None = None,
        adapter: Adapter | None = None,
        outputs: int | None = None,
    ) -> Float[Array, "B M D"]:
        """Run the pretrained block with learned keys and values in its attention, and an adapter
        parallel to its FFN."""
        mixed = self.mix_tokens(x, outputs=outputs, prefix=prefix)
        z = x[:, :outputs] + linear(self.proj, mixed, self.precision)
        y = z + linear(self.down, self.mix_channels(z), self.precision)
        return y if adapter is None else y + adapter(z)


class AttentionPool(nnx.Module):
    """Attention pooling of SigLIP: a learned query attends to all normalised tokens, and a residual
    MLP follows.

    Zhai et al., "Scaling Vision Transformers", 2022, call it multihead attention pooling.
    """

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        width = config.width
        self.num_heads = config.num_heads
        self.activation: Activation = config.activation
        self.precision: Precision = config.precision
        self.latent = nnx.Param(jnp.zeros((width,)))
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.key_value = nnx.Linear(width, 2 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.norm = LayerNorm(config, rngs)
        self.up = nnx.Linear(width, config.mlp_width, rngs=rngs)
        self.down = nnx.Linear(config.mlp_width, width, rngs=rngs)

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B D"]:
        """Compute the pooled token of each image."""
        assert self.up.bias is not None

        def heads(t: Float[Array, "B N D"]) -> Float[Array, "B H N d"]:
            return t.reshape(*t.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)

        query = jnp.broadcast_to(
            linear(self.query, self.latent[...], self.precision), (x.shape[0], 1, x.shape[2])
        )
        key, value = jnp.split(linear(self.key_value, x, self.precision), 2, axis=-1)
        mixed = attend(heads(query), heads(key), heads(value), self.precision)
        z = linear(
            self.out, mixed.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2]), self.precision
        )
        widened = activate(
            product(self.norm(z), self.up.kernel[...], self.precision),
            self.up.bias[...],
            self.activation,
        )
        return z + linear(self.down, widened, self.precision)


class ViT(nnx.Module):
    """A Vision Transformer that computes the features of images: the CLS token after the final
    LayerNorm, or the pooled tokens."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        self.config = config
        num_inputs = 3 * config.patch_size**2
        self.patch = nnx.Linear(num_inputs, config.width, use_bias=config.patch_bias, rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros((config.width,))) if config.pool == "class" else None
        self.registers = (
            nnx.Param(jnp.zeros((config.num_registers, config.width)))
            if config.num_registers
            else None
        )
        self.position = (
            nnx.Param(jnp.zeros((config.num_tokens, config.width)))
            if config.rotary is None
            else None
        )
        self.norm_before = LayerNorm(config, rngs) if config.norm_before_blocks else None
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.depth)])
        self.norm = LayerNorm(config, rngs)
        self.pool = AttentionPool(config, rngs) if config.pool == "attention" else None
        self.head = (
            nnx.Linear(config.width, config.num_classes, rngs=rngs) if config.num_classes else None
        )

    def experts(self, placement: Placement) -> list[Expert]:
        """Return expert 0 of each block: the pretrained layer at `placement`."""
        return [block.expert(placement) for block in self.blocks]

    def embed(
        self, images: UInt8[Array, "B H W 3"] | Float[Array, "B H W 3"]
    ) -> Float[Array, "B N D"]:
        """Compute the input tokens of the first block. uint8 images are normalised; float images
        must already be normalised."""
        if images.dtype == jnp.uint8:
            mean, std = jnp.asarray(self.config.mean), jnp.asarray(self.config.std)
            images = (images.astype(jnp.float32) / 255.0 - mean) / std
        b, height, width, _ = images.shape
        p = self.config.patch_size
        patches = images.reshape(b, height // p, p, width // p, p, 3).transpose(0, 1, 3, 2, 4, 5)
        tokens = product(
            patches.reshape(b, -1, p * p * 3), self.patch.kernel[...], self.config.precision
        )
        if self.patch.bias is not None:
            tokens = tokens + self.patch.bias[...]
        learned = [] if self.class_token is None else [self.class_token[...]]
        learned += [] if self.registers is None else [*self.registers[...]]
        prefix = [jnp.broadcast_to(token, (b, 1, tokens.shape[-1])) for token in learned]
        tokens = jnp.concatenate([*prefix, tokens], axis=1)
        tokens = tokens if self.position is None else tokens + self.position[...]
        return tokens if self.norm_before is None else self.norm_before(tokens)

    def outputs(self, block: int) -> int | None:
        """Return the number of tokens that a block has to compute: 1 for the last block if there is
        a CLS token, else None (all tokens)."""
        return 1 if block == self.config.depth - 1 and self.config.pool == "class" else None

    def features(self, x: Float[Array, "B N D"]) -> Float[Array, "B D"]:
        """Compute the features from the tokens of the last block: the normalised CLS token, or the
        pooled normalised tokens."""
        if self.config.pool == "class":
            return self.norm(x[:, 0])
        return self.norm(x).mean(axis=1) if self.pool is None else self.pool(self.norm(x))

    def __call__(
        self,
        images: UInt8[Array, "B H W 3"] | Float[Array, "B H W 3"],
        ops: Sequence[Op] | None = None,
        *,
        placement: Placement = "mlp_down",
    ) -> Float[Array, "B D"]:
        """Compute the features of the network that has the op `ops[i]` in block i. If `ops` is
        None, compute the features of the plain backbone."""
        if ops is None:
            ops = [Reuse(block.expert(placement)) for block in self.blocks]
        x = self.embed(images)
        for index, (block, op) in enumerate(zip(self.blocks, ops, strict=True)):
            x, _ = block.run(op, x, placement=placement, outputs=self.outputs(index))
        return self.features(x)

    def run_blocks(
        self,
        x: Float[Array, "B N D"],
        begin: int = 0,
        until: int | None = None,
        *,
        prefixes: Mapping[int, Prefix | SidePrefix] = {},
        adapters: Mapping[int, Adapter] = {},
        all_tokens: bool = False,
    ) -> Float[Array, "B M D"]:
        """Run the blocks from `begin` up to, but not including, `until` (default: all blocks), and
        return the tokens. `prefixes` and `adapters` are keyed by block.

        The last block computes only the tokens that are used for the features, unless `all_tokens`
        is true.
        """
        for index in range(begin, self.config.depth if until is None else until):
            x = self.blocks[index].run_adapted(
                x,
                prefix=prefixes.get(index),
                adapter=adapters.get(index),
                outputs=None if all_tokens else self.outputs(index),
            )
        return x

    def logits(self, features: Float[Array, "B D"]) -> Float[Array, "B classes"]:
        """Compute the logits of the pretrained head. Raises ValueError if the weights have no
        head."""
        if self.head is None:
            raise ValueError(f"{self.config.name} has no pretrained head")
        return self.head(features)


class LayerNorm(nnx.LayerNorm):
    """LayerNorm with the config's `layer_norm_eps`, computed by `kernels.layer_norm`."""

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs):
        super().__init__(config.width, epsilon=config.layer_norm_eps, rngs=rngs)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        assert self.scale is not None and self.bias is not None
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)
