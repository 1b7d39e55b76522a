"""The network of one task as a state dict that timm loads; dense experts replace the plastic
layers.

    described = json.loads(safetensors.safe_open(file, "pt").metadata()["cheem_jax"])["timm"]
    model = timm.create_model(described["architecture"], **described["arguments"])
    model.load_state_dict(safetensors.torch.load_file(file))

timm always runs every residual branch. If the task skips a branch, all weights of the last layer of
this branch are therefore zero.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.params import build, get_params
from cheem_jax.backbone.timm_names import from_timm, to_timm_name
from cheem_jax.core.ops import Reuse
from cheem_jax.export.programs import Artefact, Subject, dense_ops


def make(subject: Subject, index: int, description: dict[str, Any]) -> Artefact:
    """Make the state dict of one task's network. Raises ValueError if timm cannot build the
    backbone."""
    from safetensors.numpy import load, save

    task = subject.tasks[index]
    config = dataclasses.replace(subject.vit.config, num_classes=len(task.classes))
    layer = {"mlp_down": "down", "attn_proj": "proj"}[subject.placement]
    theirs = {"mlp_down": "mlp.fc2", "attn_proj": "attn.proj"}[subject.placement]
    skipped = [block for block, expert in enumerate(task.experts) if expert is None]
    replaced = [block for block, expert in enumerate(task.experts) if expert]
    described = {
        "architecture": _architecture(config),
        "arguments": _arguments(config),
        "zeroed": [f"blocks.{block}.{theirs}" for block in skipped],
        "merged": [f"blocks.{block}.{theirs}" for block in replaced],
    }
    inputs = {
        "images": "float32 [batch, 3, image_size, image_size]; RGB in 0..1, (images - mean) / std"
    }
    text = json.dumps({**description, "inputs": inputs, "timm": described})
    params = {
        name: value
        for name, value in get_params(subject.vit).items()
        if not name.startswith("head.")
    }
    for block, op in enumerate(dense_ops(subject, index)):
        names = [f"blocks.{block}.{layer}.{leaf}" for leaf in ("kernel", "bias")]
        values = (
            op.expert if isinstance(op, Reuse) else [np.zeros_like(params[name]) for name in names]
        )
        params.update(zip(names, map(np.asarray, values), strict=True))
    params["head.kernel"], params["head.bias"] = (
        np.asarray(task.head.weight),
        np.asarray(task.head.bias),
    )
    content = save(to_timm(params, config), {"format": "pt", "cheem_jax": text})

    vit = build(config, from_timm(load(content), config))
    logits = jax.jit(lambda images: vit.logits(vit(images)))
    notes = [f"{name} is zero: the task skips this branch" for name in described["zeroed"]]
    return Artefact(content, lambda images: {"logits": np.asarray(logits(images))}, tuple(notes))


def to_timm(params: Mapping[str, np.ndarray], config: ViTConfig) -> dict[str, np.ndarray]:
    """Convert parameters to timm's names and PyTorch's layout in float32. This is the inverse of
    `from_timm`."""
    return {
        to_timm_name(name): np.ascontiguousarray(
            _their_layout(name, value, config.patch_size), np.float32
        )
        for name, value in params.items()
    }


def _their_layout(name: str, value: np.ndarray, patch_size: int) -> np.ndarray:
    if name == "patch.kernel":
        return value.reshape(patch_size, patch_size, 3, -1).transpose(3, 2, 0, 1)
    if name in ("class_token", "registers", "position"):
        return value.reshape(1, -1, value.shape[-1])
    return value.T if name.endswith(".kernel") else value


def _architecture(config: ViTConfig) -> str:
    # Without `_distilled`, the name selects timm's plain ViT, which treats a distillation token as
    # a register and has only one head.
    return (
        config.timm_name.split(".")[0].replace("_distilled", "")
        if config.timm_name
        else "vit_tiny_patch16_224"
    )


def _arguments(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of `timm.create_model`. A backbone without a timm name becomes timm's
    tiny ViT with other sizes.

    Raises ValueError if timm's ViT does not support a setting of the backbone.
    """
    if config.rotary is not None or config.gated or config.pool != "class":
        raise ValueError(
            f"backbone {config.name!r} has rotary positions, a gated MLP or no class token, which"
            " the export to timm does not support; export it as stablehlo or onnx"
        )
    arguments = {"num_classes": config.num_classes, "img_size": config.image_size}
    if config.timm_name:
        if not config.num_registers and not re.search("deit3_|dinov2", config.timm_name):
            return arguments
        # LayerScale is merged into the weights, and every token has a position embedding
        return arguments | {
            "reg_tokens": config.num_registers,
            "no_embed_class": False,
            "init_values": 0,
        }
    plain = ViTConfig(config.name, config.width, config.depth, config.num_heads)
    odd = [
        f"{name}={getattr(config, name)!r}"
        for name in (
            "layer_norm_eps",
            "activation",
            "norm_before_blocks",
            "patch_bias",
            "num_registers",
        )
        if getattr(config, name) != getattr(plain, name)
    ]
    if odd:
        raise ValueError(
            f"timm's plain ViT does not support {', '.join(odd)} of backbone {config.name!r};"
            " export it as stablehlo or onnx"
        )
    sizes = {"patch_size": config.patch_size, "embed_dim": config.width, "depth": config.depth}
    return arguments | sizes | {"num_heads": config.num_heads, "mlp_ratio": config.mlp_ratio}
