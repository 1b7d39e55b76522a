"""Shapes and constants of Vision Transformers."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from cheem_jax.core.settings import Activation, Precision

Pooling = Literal["class", "attention", "mean"]
"""Pooling of the features: `class` is the CLS token; `attention` is a learned query that attends to
all patches; `mean` is the average of all patches."""


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Config of a plain pre-norm ViT. The tokens are an optional CLS token, registers, and patches;
    positions are learned or rotary."""

    name: str
    width: int
    depth: int
    num_heads: int
    image_size: int = 224
    patch_size: int = 16
    mlp_ratio: float = 4.0
    layer_norm_eps: float = 1e-6
    activation: Activation = "gelu"
    norm_before_blocks: bool = False
    """Whether a LayerNorm precedes the first block, as in CLIP."""
    patch_bias: bool = True
    num_classes: int = 1000
    """Number of classes of the pretrained head; 0 if the head is missing or not used."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    precision: Precision = "float32"
    """Operand type of matrix products; parameters are always float32."""
    timm_name: str | None = None
    """Name of the model in timm and in the hub's `timm/` repositories."""
    num_registers: int = 0
    """Number of learned tokens after the CLS token, such as DINOv2's registers or DeiT's
    distillation token."""
    rotary: float | None = None
    """Base period of rotary positions, as in DINOv3. If None, the position embedding is learned."""
    gated: bool = False
    """Whether the MLP is gated, as in SwiGLU: its hidden layer is multiplied by the activation of a
    second linear layer, `gate`."""
    pool: Pooling = "class"
    """Pooling of the features. SigLIP models use `attention` or `mean`, and have no CLS token."""

    @property
    def mlp_width(self) -> int:
        return round(self.width * self.mlp_ratio)

    @property
    def mlp_weights(self) -> int:
        """Number of weights in one MLP."""
        return (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_prefix(self) -> int:
        """Number of tokens before the patches: the CLS token, if there is one, and the
        registers."""
        return (self.pool == "class") + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Number of tokens per image."""
        return self.num_prefix + self.num_patches

    @property
    def num_outputs(self) -> int:
        """Number of tokens of the last block that are used to compute the features."""
        return 1 if self.pool == "class" else self.num_tokens


_HALF = (0.5, 0.5, 0.5)

CONFIGS: dict[str, ViTConfig] = {
    config.name: config
    for config in (
        ViTConfig("deit_tiny", 192, 12, 3, timm_name="deit_tiny_patch16_224.fb_in1k"),
        ViTConfig(
            "vit_base",
            768,
            12,
            12,
            mean=_HALF,
            std=_HALF,
            timm_name="vit_base_patch16_224.augreg2_in21k_ft_in1k",
        ),
        ViTConfig(
            "vit_base_augreg",
            768,
            12,
            12,
            mean=_HALF,
            std=_HALF,
            timm_name="vit_base_patch16_224.augreg_in21k_ft_in1k",
        ),
        ViTConfig(
            "clip_vit_base",
            768,
            12,
            12,
            layer_norm_eps=1e-5,
            activation="quick_gelu",
            norm_before_blocks=True,
            patch_bias=False,
            num_classes=0,  # CLIP's head is a 768 -> 512 projection, not a classifier
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
            timm_name="vit_base_patch16_clip_quickgelu_224.openai",
        ),
        ViTConfig("deit_small", 384, 12, 6, timm_name="deit_small_patch16_224.fb_in1k"),
        ViTConfig("deit3_small", 384, 12, 6, timm_name="deit3_small_patch16_224.fb_in1k"),
        ViTConfig(
            "dinov2_small",
            384,
            12,
            6,
            image_size=518,
            patch_size=14,
            num_classes=0,
            timm_name="vit_small_patch14_dinov2.lvd142m",
        ),
        ViTConfig(
            "dinov2_base",
            768,
            12,
            12,
            image_size=518,
            patch_size=14,
            num_classes=0,
            timm_name="vit_base_patch14_dinov2.lvd142m",
        ),
        *(
            ViTConfig(
                f"dinov3_{size}",
                width,
                12,
                width // 64,
                image_size=256,
                layer_norm_eps=1e-5,
                num_classes=0,
                timm_name=f"vit_{size}_patch16_dinov3.lvd1689m",
                num_registers=4,
                rotary=100.0,
            )
            for size, width in (("small", 384), ("base", 768))
        ),
        *(
            ViTConfig(
                name,
                768,
                12,
                12,
                num_classes=0,
                mean=_HALF,
                std=_HALF,
                pool="attention",
                timm_name=f"vit_base_patch16_siglip_224.{version}",
            )
            for name, version in (("siglip_base", "webli"), ("siglip2_base", "v2_webli"))
        ),
        ViTConfig(
            "vit_micro", 96, 8, 3, image_size=32, patch_size=8, num_classes=0, mean=_HALF, std=_HALF
        ),
        ViTConfig(
            "vit_nano", 48, 6, 3, image_size=32, patch_size=8, num_classes=0, mean=_HALF, std=_HALF
        ),
    )
}

BUNDLED = ("vit_micro", "vit_nano")
"""Backbones whose weights are part of the package."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check the fields of a config that was read from a file; missing fields have their defaults.

    Raises a single ValueError that lists all invalid values.
    """
    defaults: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(ViTConfig)
    }
    values = defaults | dict(fields)
    bounds = dict.fromkeys(("width", "depth", "num_heads", "image_size", "patch_size"), (1, 2**16))
    bounds |= {"depth": (1, 1000), "num_classes": (0, 2**24), "num_registers": (0, 1000)}
    errors = [
        f"{name} is {values[name]!r:.40}, expected an integer in {least}..{most}"
        for name, (least, most) in bounds.items()
        if type(values[name]) is not int or not least <= values[name] <= most
    ]
    for name in ("mean", "std"):
        rgb = values[name]
        finite = isinstance(rgb, list | tuple) and len(rgb) == 3 and all(map(_is_finite, rgb))
        if not finite or (name == "std" and min(rgb) <= 0):
            errors.append(
                f"{name} is {rgb!r:.80}, expected three finite"
                f" numbers{', all positive' * (name == 'std')}"
            )
    positive = {"mlp_ratio": 100, "layer_norm_eps": 1} | (
        {} if values["rotary"] is None else {"rotary": 1e9}
    )
    for name, most in positive.items():
        if not _is_finite(values[name]) or not 0 < values[name] <= most:
            errors.append(f"{name} is {values[name]!r:.40}, expected a number in 0..{most}")
    for name, kind in {"activation": Activation, "precision": Precision, "pool": Pooling}.items():
        if values[name] not in get_args(kind):
            errors.append(
                f"{name} is {values[name]!r:.40}, expected one of {', '.join(get_args(kind))}"
            )
    if not isinstance(values["name"], str) or not isinstance(values["timm_name"], str | None):
        errors.append("name and timm_name must be text")
    switches = ("norm_before_blocks", "patch_bias", "gated")
    if not all(isinstance(values[name], bool) for name in switches):
        errors.append("norm_before_blocks, patch_bias and gated must be true or false")
    if not errors and (
        values["width"] % values["num_heads"] or values["image_size"] % values["patch_size"]
    ):
        errors.append(
            "num_heads does not divide the width, or patch_size does not divide the image size"
        )
    if (
        not errors
        and values["rotary"] is not None
        and (width := values["width"] // values["num_heads"]) % 4
    ):
        errors.append(f"rotary positions need a head width that is a multiple of 4, got {width}")
    if errors:
        raise ValueError("; ".join(errors))


def _is_finite(value: object) -> bool:
    # `math.isfinite` raises an error for integers that are too large for a float
    return type(value) in (int, float) and -1e30 < value < 1e30  # type: ignore[operator]


def find_config(name: str) -> ViTConfig:
    """Return the config in `CONFIGS` with this name. If the name is unknown, raise ValueError with
    a message that lists the most similar names."""
    if name not in CONFIGS:
        raise ValueError(f"unknown backbone {name!r}; {closest(name, CONFIGS)}")
    return CONFIGS[name]


def closest(name: str, names: Iterable[str]) -> str:
    """Return the part of an error message that lists up to three of `names` that are similar to the
    unknown `name`, or all `names` if none is similar."""
    names = list(names)
    if near := difflib.get_close_matches(name, names, n=3):
        return f"most similar: {', '.join(near)}"
    return f"expected one of {', '.join(sorted(names))}"


LARGEST_IMAGE = 4096
"""Maximum height and width in pixels to which position embeddings are resampled. Attention over
more patches does not fit into the memory of today's devices."""


def at_image_size(config: ViTConfig, image_size: int) -> ViTConfig:
    """Return a copy of the config with `image_size` in pixels. Raises ValueError if `image_size` is
    not a multiple of the patch size, or larger than `LARGEST_IMAGE`."""
    if image_size > LARGEST_IMAGE:
        raise ValueError(
            f"image size {image_size} is too large; expected at most {LARGEST_IMAGE} pixels"
        )
    if image_size < config.patch_size or image_size % config.patch_size:
        lower = max(image_size // config.patch_size, 1) * config.patch_size
        raise ValueError(
            f"image size {image_size} is not a multiple of {config.name}'s patch size"
            f" {config.patch_size}; try {lower} or {lower + config.patch_size}"
        )
    return dataclasses.replace(config, image_size=image_size)
