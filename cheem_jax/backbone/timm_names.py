"""Convert tensors with timm's names and PyTorch's layout to our names and layout, and infer configs
from timm's tensors.

timm stores linear weights as `[out, in]` and the patch kernel as `[D, 3, height, width]`. Our
layout is described in `params.py`.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping

import numpy as np

from cheem_jax.backbone.config import CONFIGS, Pooling, ViTConfig, check_fields
from cheem_jax.backbone.params import from_torch, mismatches, shapes_of
from cheem_jax.core.settings import Activation

Rgb = tuple[float, float, float]
_MODULES = {
    "patch": "patch_embed.proj",
    "norm_before": "norm_pre",
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "gate": "mlp.fc1_g",
    "pool": "attn_pool",
    "query": "q",
    "key_value": "kv",
    "out": "proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
_TOKENS = {
    "class_token": "cls_token",
    "registers": "reg_token",
    "position": "pos_embed",
    "pool.latent": "attn_pool.latent",
}
_PLAIN = re.compile(
    r"cls_token|reg_token|dist_token|pos_embed|attn_pool\.latent|blocks\.\d+\.ls[12]\.gamma|(patch_embed\.proj|norm_pre|norm"
    r"|head|head_dist|blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)"
    r"|attn_pool\.(q|kv|proj|norm|mlp\.fc1|mlp\.fc2))\.(weight|bias)"
)
_ROTARY = re.compile(r"blocks\.\d+\.(gamma_[12]|attn\.[qv]_bias|mlp\.fc1_[gx]\.(weight|bias))")
"""Pattern of the names of tensors that a DINOv3 file contains in addition to the tensors of timm's
plain ViT. Rotary positions are computed, so they are not in the file."""
SUPPORTED = "plain ViTs: ViT, DeiT, DeiT-III, CLIP, DINO, DINOv2, DINOv3 up to H+, SigLIP, SigLIP 2"
_HEADS = dict.fromkeys(
    ("vit_huge_", "deit3_huge_", "vit_giant_", "vit_gigantic_", "vit_so400m_", "vit_giantopt_"), 16
)
"""Number of heads of the model families whose head width is not 64, keyed by the prefix of their
timm names."""
_GELU_TANH = re.compile(
    r"patch32_siglip|large_patch16_siglip_(gap_)?512|so400m_patch16_siglip|giantopt_patch16_siglip"
)
"""SigLIP 2 models that use the tanh approximation of GELU in timm; all other SigLIP 2 models use
exact GELU."""


def to_timm_name(name: str) -> str:
    """Return timm's name for one of our parameters, such as `blocks.3.mlp.fc1.weight` for
    `blocks.3.up.kernel`."""
    if name in _TOKENS:
        return _TOKENS[name]
    *modules, leaf = name.split(".")
    leaf = {"kernel": "weight", "scale": "weight"}.get(leaf, leaf)
    return ".".join([_MODULES.get(module, module) for module in modules] + [leaf])


def without_wrapper(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove a prefix that all names share, such as `module.` or `backbone.`, from the names of the
    tensors.

    The mask token, which is used only in pretraining, is omitted.
    """
    result = dict(tensors)
    patch = "patch_embed.proj.weight"
    prefix = os.path.commonprefix(list(result)).rpartition(".")[0] + "."
    if patch not in result and prefix + patch in result:
        result = {name.removeprefix(prefix): value for name, value in result.items()}
    result.pop("mask_token", None)
    return result


def set_num_classes(config: ViTConfig, tensors: Mapping[str, np.ndarray]) -> ViTConfig:
    """Set the number of classes of a config to the number of classes of the head in `tensors`, or
    to 0 if the head is missing or does not have the width of the config. If the config has no
    classes, return it unchanged.

    Each task has a separate head, so weights that were fine-tuned for another number of classes can
    be used as a backbone.
    """
    weight, bias = (tensors.get(f"head.{leaf}") for leaf in ("weight", "bias"))
    fits = weight is not None and bias is not None and weight.shape == (*bias.shape, config.width)
    classes = len(weight) if fits and weight is not None else 0
    return dataclasses.replace(config, num_classes=classes) if config.num_classes else config


def from_timm(tensors: Mapping[str, np.ndarray], config: ViTConfig) -> dict[str, np.ndarray]:
    """Convert timm's tensors to our parameters in float32.

    `head.*` is ignored if the config has no classes (CLIP's head is a 768 -> 512 projection).
    LayerScale, a factor per output of a residual branch, is merged into the last layer of the
    branch. Raises a single ValueError that lists all missing and unexpected tensors and wrong
    shapes.
    """
    shapes = shapes_of(config)
    theirs = {
        name: (to_timm_name(name), _timm_shape(name, shape, config))
        for name, shape in shapes.items()
    }
    heads = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
    unused = heads if config.num_classes == 0 else ()
    what = f"timm weights do not fit backbone {config.name!r} (supported: {SUPPORTED})"
    return from_torch(
        _without_scales(tensors, config, what), shapes, theirs, unused=unused, what=what
    )


def _without_scales(
    tensors: Mapping[str, np.ndarray], config: ViTConfig, what: str
) -> dict[str, np.ndarray]:
    """Return timm's tensors after three changes: LayerScale is merged, `pos_embed` has one position
    per token, and the distillation token is renamed to a register."""
    renamed = {"dist_token": "reg_token"} if config.num_registers else {}
    if config.rotary is not None or config.gated:
        tensors = _as_plain_vits(tensors, config)
    result = {renamed.get(name, name): value for name, value in tensors.items()}
    scales = {name: result.pop(name) for name in tensors if name.endswith(".gamma")}
    layers = {"ls1.gamma": "attn.proj", "ls2.gamma": "mlp.fc2"}
    expected = {
        f"blocks.{block}.{scale}": (config.width,)
        for block in range(config.depth)
        for scale in layers
    }
    if scales and (complaint := mismatches(expected, scales)):
        raise ValueError(f"{what}: {complaint}")
    for name, scale in scales.items():
        _, block, scaled = name.split(".", 2)
        for leaf in ("weight", "bias"):
            layer = f"blocks.{block}.{layers[scaled]}.{leaf}"
            if (
                layer in result and result[layer].shape[:1] == scale.shape
            ):  # `from_torch` reports wrong shapes
                result[layer] = (result[layer].T.astype(np.float32) * scale.astype(np.float32)).T
    position = result.get("pos_embed")
    if position is not None and position.shape == (
        1,
        config.num_patches,
        config.width,
    ):  # the file contains positions only for patches
        result["pos_embed"] = np.pad(position, ((0, 0), (config.num_prefix, 0), (0, 0)))
    return result


def _as_plain_vits(tensors: Mapping[str, np.ndarray], config: ViTConfig) -> dict[str, np.ndarray]:
    """Rename DINOv3's tensors to the names of timm's plain ViT. Missing biases of the attention
    become zeros. If `fc1` contains the gate of the MLP, the gate is split from `fc1`."""
    result = {
        re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name).replace(".fc1_x.", ".fc1."): value
        for name, value in tensors.items()
    }
    for block in (f"blocks.{index}" for index in range(config.depth)):
        if config.rotary is not None and f"{block}.attn.qkv.bias" not in result:
            zeros = np.zeros(config.width, np.float32)
            query, value = (result.pop(f"{block}.attn.{name}_bias", zeros) for name in "qv")
            result[f"{block}.attn.qkv.bias"] = np.concatenate([query, zeros, value])
        for name in (f"{block}.mlp.fc1.weight", f"{block}.mlp.fc1.bias"):
            if (
                config.gated
                and name in result
                and result[name].shape[:1] == (2 * config.mlp_width,)
            ):  # DINOv2 giant stores the gate and `fc1` in one tensor
                result[name.replace("fc1", "fc1_g")], result[name] = np.split(result[name], 2)
    return result


def _timm_shape(name: str, shape: tuple[int, ...], config: ViTConfig) -> tuple[int, ...]:
    if name == "patch.kernel":
        return (config.width, 3, config.patch_size, config.patch_size)
    if name.endswith(".kernel"):
        return shape[::-1]
    if name in ("class_token", "pool.latent"):
        return (1, 1, *shape)
    return (1, *shape) if name in ("registers", "position") else shape


def infer_config(
    name: str, tensors: Mapping[str, np.ndarray], hub_config: dict | None
) -> ViTConfig:
    """Infer the config of a supported timm ViT from its name, its tensors and the hub's
    `config.json`.

    Sizes are read from the shapes. The head width is 64, except in the families listed in `_HEADS`.
    Mean and standard deviation of the images are read from `pretrained_cfg`; if it is missing, the
    values of the model's family are used. Raises ValueError for other architectures; the message
    lists the reasons.
    """
    hub_config = hub_config or {}
    pool = find_pooling(name)
    gated = _is_gated(name, tensors)
    rotary = "_dinov3" in name and "pos_embed" not in tensors
    extra = [tensors[token].shape for token in ("reg_token", "dist_token") if token in tensors]
    num_registers = sum(shape[1] for shape in extra if len(shape) == 3)
    prefix = num_registers + (pool == "class")
    _refuse_unless_plain(name, tensors, hub_config, rotary=rotary, gated=gated, prefix=prefix)
    width, channels, patch_size, _ = tensors["patch_embed.proj.weight"].shape
    image_size = 256 if rotary else patch_size * _grid(tensors["pos_embed"].shape[1], prefix)
    depth = len(
        {key.split(".")[1] for key in tensors if key.startswith("blocks.")}
    )  # `from_timm` reports missing blocks
    families = () if "_dinov" in name else _HEADS.items()
    num_heads = next((heads for family, heads in families if name.startswith(family)), width // 64)
    if channels != 3 or width == 0 or num_heads == 0 or width % num_heads:
        raise ValueError(
            f"{name!r} has {channels} channels and the width {width}, unlike any plain ViT"
        )
    clip = "norm_pre.weight" in tensors
    # CLIP's image-text projection is not a classifier
    projection = clip and "_ft_" not in name
    # models with a distillation token average two heads, which is not supported
    projection = projection or "dist_token" in tensors
    classes = 0 if projection or "head.weight" not in tensors else tensors["head.weight"].shape[0]
    mean, std = _preprocessing(name, hub_config)
    config = ViTConfig(
        name=name,
        width=width,
        depth=depth,
        num_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
        mlp_ratio=tensors["blocks.0.mlp.fc2.weight"].shape[1] / width,
        layer_norm_eps=1e-5 if clip or rotary else 1e-6,
        activation=_activation(name, gated),
        norm_before_blocks=clip,
        patch_bias="patch_embed.proj.bias" in tensors,
        num_classes=classes,
        mean=mean,
        std=std,
        timm_name=name,
        num_registers=num_registers,
        rotary=100.0 if rotary else None,
        gated=gated,
        pool=pool,
    )
    try:
        check_fields(dataclasses.asdict(config))
    except ValueError as error:
        raise ValueError(f"{name!r} is not a plain timm ViT: {error}") from error
    return config


def _refuse_unless_plain(
    name: str,
    tensors: Mapping[str, np.ndarray],
    hub_config: dict,
    *,
    rotary: bool,
    gated: bool,
    prefix: int,
) -> None:
    reasons = []
    plain = {key for key in tensors if _PLAIN.fullmatch(key) or (rotary and _ROTARY.fullmatch(key))}
    foreign = sorted({re.sub(r"\.\d+\.", ".*.", key) for key in tensors if key not in plain})
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        reasons.append(f"unknown tensors {foreign[:5]}{more}")
    widened = "blocks.0.mlp.fc1_x.weight" if rotary and gated else "blocks.0.mlp.fc1.weight"
    token = {"class": ["cls_token"], "attention": ["attn_pool.latent"], "mean": []}[
        find_pooling(name)
    ]
    reasons += [
        f"has {other}"
        for other in sorted({"cls_token", "attn_pool.latent"}.difference(token) & tensors.keys())
    ]
    needed = [*token, "patch_embed.proj.weight", widened, "blocks.0.mlp.fc2.weight"]
    needed += [] if rotary else ["pos_embed"]
    lacking = [key for key in needed if key not in tensors]
    if lacking:
        reasons.append(f"lacks {lacking}")
    else:
        patch = tensors["patch_embed.proj.weight"].shape
        position = () if rotary else tensors["pos_embed"].shape
        up = tensors[widened].shape
        down = tensors["blocks.0.mlp.fc2.weight"].shape
        if not rotary and (len(position) != 3 or not _grid(position[1], prefix)):
            reasons.append(f"pos_embed {position} is not a square grid after the prefix tokens")
        if len(patch) != 4 or patch[2] != patch[3]:
            reasons.append(f"patch_embed.proj.weight {patch} does not have square patches")
        if len(up) != 2 or len(down) != 2 or (up != down[::-1] and not gated):
            reasons.append(
                f"blocks.0.mlp.fc1.weight {up} and fc2.weight {down} have the shapes of a gated MLP"
            )
    if "head.weight" in tensors and len(tensors["head.weight"].shape) != 2:
        reasons.append(f"head.weight {tensors['head.weight'].shape} is not a matrix")
    reasons += other_pool(name, hub_config)
    if reasons:
        raise ValueError(
            f"{name!r} is not a plain timm ViT: {'; '.join(reasons)}; supported: {SUPPORTED}"
        )


def find_pooling(name: str) -> Pooling:
    """Return the pooling of a timm model, according to its name."""
    return "class" if "_siglip_" not in name else "mean" if "_gap_" in name else "attention"


def other_pool(name: str, hub_config: Mapping) -> list[str]:
    """Describe how the pooling in the hub's `config.json` differs from the supported pooling. The
    list is empty if it does not differ."""
    # timm averages the patches of DINOv3, but the authors of DINOv3 use the CLS token
    if "_dinov3" in name:
        return []
    expected = {"class": "token", "attention": "map", "mean": "avg"}[find_pooling(name)]
    pool = hub_config.get("global_pool", expected)
    return (
        [] if pool == expected else [f"config.json pools with {pool!r:.40}, expected {expected!r}"]
    )


def _activation(name: str, gated: bool) -> Activation:
    if gated:
        return "silu"
    return (
        "quick_gelu" if "quickgelu" in name else "gelu_tanh" if _GELU_TANH.search(name) else "gelu"
    )


def _is_gated(name: str, tensors: Mapping[str, np.ndarray]) -> bool:
    """Return whether the MLP is gated. A gated DINOv3 model has two separate layers before `fc2`;
    DINOv2 giant has a single layer that contains both."""
    up, down = (tensors.get(f"blocks.0.mlp.{layer}.weight") for layer in ("fc1", "fc2"))
    if up is None or down is None or up.ndim != 2 or down.ndim != 2:
        return "blocks.0.mlp.fc1_g.weight" in tensors
    return "_dinov2" in name and up.shape == (2 * down.shape[1], down.shape[0])


def _grid(num_positions: int, num_prefix: int) -> int:
    """Return the number of patches along one side of the grid; 0 if the grid is not square."""
    for num_patches in (num_positions, num_positions - num_prefix):
        if num_patches > 0 and math.isqrt(num_patches) ** 2 == num_patches:
            return math.isqrt(num_patches)
    return 0


def _preprocessing(name: str, hub_config: dict) -> tuple[Rgb, Rgb]:
    pretrained = hub_config.get("pretrained_cfg", hub_config)
    if not isinstance(pretrained, dict):
        raise ValueError(
            f"pretrained_cfg in the config.json of {name!r} is {pretrained!r:.40}, expected an"
            " object"
        )
    if "mean" in pretrained and "std" in pretrained:
        try:
            mean, std = (
                (float(r), float(g), float(b))
                for r, g, b in (pretrained["mean"], pretrained["std"])
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"mean and std in the config.json of {name!r} are not three numbers each"
            ) from error
        return mean, std
    families = {
        "clip_vit_base": (".openai",),
        "vit_base": (".augreg", "_siglip_"),
        "deit_tiny": (".dino", "_dinov2", ".lvd1689m", "deit3_", "deit_"),
    }
    for like, parts in families.items():
        if any(part in name for part in parts):
            return CONFIGS[like].mean, CONFIGS[like].std
    raise ValueError(
        f"the pixel mean and std of {name!r} are unknown; put the model's config.json (from"
        f" timm/{name} on the hub) next to the weights"
    )
