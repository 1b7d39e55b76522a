"""Pretrained weights: where they come from (package, file, hub), and the converted file format.

A converted file is one safetensors file: parameters under our names, mean class tokens of the backbone's own
task under `base_means/<image size>/<placement>/<token>`, and in its header the format, config, source and
hash of that source.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.config import BUNDLED, CONFIGS, ViTConfig, at_image_size, check_fields
from cheem_jax.backbone.hub import download
from cheem_jax.backbone.params import check_params
from cheem_jax.backbone.resample import resample_position
from cheem_jax.backbone.timm_names import from_timm, infer_config
from cheem_jax.core.npz import read_npz
from cheem_jax.core.paths import absolute

FORMAT = "cheem_jax.vit.1"
_MEANS = "base_means/"
_TIMM_NAME = re.compile(r"(vit|deit3?)(_[a-z0-9]+)*_patch\d+(_[a-z0-9]+)*(\.[a-z0-9_]+)?")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A backbone's weights at one image size, and what is known of their origin."""

    config: ViTConfig
    params: dict[str, np.ndarray]
    """Names and shapes of `params.py`; float32 once loaded (`save_converted` keeps the dtype it is given)."""
    source: str
    """The file the numbers were read from, `hub:timm/<name>`, or `bundled`."""
    sha256: str
    """Of the source file; a converted file passes on the hash of the file it was made from."""
    base_means: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """`{image_size}/{placement}/{token}` -> float32 [L, D], for the sizes measured; may be empty."""


def load_pretrained(backbone: str, *, weights: str | Path | None = None, image_size: int | None = None) -> Pretrained:
    """Weights of a named backbone or of another plain timm ViT, at `image_size` pixels.

    `image_size` is the weights' own by default. `weights` is a safetensors or npz file under timm's names, or
    a converted file. Without it, bundled backbones come from the package and others from the hub's `timm/`
    repositories. Raises ValueError for an unknown name, an unreadable file or weights of another
    architecture, FileNotFoundError where there is no such file or no network.
    """
    known = named_config(backbone)
    hub_config = None
    if weights is not None:
        file = absolute(weights)
        source = file.name
        if not file.is_file():
            raise FileNotFoundError(f"no weights file {str(file)!r}; expected a .safetensors or .npz file")
        hub_config = None if known else _config_beside(file)
    elif known is not None and known.name in BUNDLED:
        file, source = Path(__file__).parent / "bundled" / f"{known.name}.safetensors", "bundled"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; make it with `python experiments/pretrain_micro.py`")
    else:
        file, hub_config, source = download((known and known.timm_name) or backbone)

    tensors, metadata = read_tensors(file)
    try:
        if "format" in metadata and metadata["format"].startswith("cheem_jax"):
            pretrained = _from_converted(known, backbone, tensors, metadata)
            if source == "bundled":
                pretrained = dataclasses.replace(pretrained, source=source, sha256=sha256_of(file))
        else:
            config = known or infer_config(backbone, tensors, hub_config)
            pretrained = Pretrained(config, from_timm(tensors, config), source, sha256_of(file))
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error
    return pretrained if image_size is None else resize(pretrained, image_size)


def named_config(backbone: str) -> ViTConfig | None:
    """The config of a backbone known by our name or timm's; None for another timm name; else ValueError."""
    for config in CONFIGS.values():
        if backbone in (config.name, config.timm_name):
            return config
    if _TIMM_NAME.fullmatch(backbone):
        return None
    near = difflib.get_close_matches(backbone, CONFIGS, n=3, cutoff=0.5) or sorted(CONFIGS)
    raise ValueError(
        f"unknown backbone {backbone!r}; nearest: {', '.join(near)}; "
        "or a timm name such as 'vit_small_patch16_224.dino'"
    )


def resize(pretrained: Pretrained, image_size: int) -> Pretrained:
    """The same weights for square images of another size: only the position embedding changes."""
    config = at_image_size(pretrained.config, image_size)
    position = resample_position(pretrained.params["position"], config.num_patches)
    return dataclasses.replace(pretrained, config=config, params={**pretrained.params, "position": position})


def save_converted(file: str | Path, pretrained: Pretrained) -> None:
    """Write one converted file; an existing one is replaced only when the new one is complete."""
    from safetensors.numpy import save

    file = absolute(file)
    check_params(pretrained.config, pretrained.params)
    means = {_MEANS + key: value for key, value in pretrained.base_means.items()}
    tensors = {name: np.ascontiguousarray(value) for name, value in {**pretrained.params, **means}.items()}
    metadata = {
        "format": FORMAT,
        "config": json.dumps(dataclasses.asdict(pretrained.config)),
        "source": pretrained.source,
        "sha256": pretrained.sha256,
    }
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(save(tensors, metadata))  # unlike `save_file` with the user's own file mode
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors and the header's metadata (empty for npz); ValueError names a file that cannot be read."""
    from safetensors import SafetensorError, safe_open

    if file.suffix == ".npz":
        return _numbers(file, read_npz(file)), {}
    if file.suffix != ".safetensors":
        raise ValueError(f"{file}: expected a .safetensors or .npz file (pickled .bin and .pth files are not read)")
    try:
        with safe_open(file, framework="numpy") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            return _numbers(file, tensors), dict(opened.metadata() or {})
    except (SafetensorError, TypeError, AttributeError, KeyError, OSError) as error:  # types that NumPy does not have
        raise ValueError(f"{file} is not a readable safetensors file ({error}); is it complete?") from error


def _numbers(file: Path, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same; ValueError for what is no number."""
    if wrong := sorted(name for name, value in tensors.items() if value.dtype.kind not in "fiub"):
        raise ValueError(f"{file}: {wrong[:5]} hold no real numbers, expected weights")
    return tensors


def sha256_of(file: Path) -> str:
    """Hex digest of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _from_converted(
    known: ViTConfig | None, backbone: str, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> Pretrained:
    lacking = sorted({"config", "source", "sha256"} - metadata.keys())
    if metadata["format"] != FORMAT or lacking:
        raise ValueError(
            f"converted file of format {metadata['format']!r} without {lacking}, expected {FORMAT!r}; "
            "convert the weights again with `cheem convert`"
        )
    try:
        fields: dict[str, Any] = json.loads(metadata["config"])
        check_fields(fields)
        stored = ViTConfig(**{**fields, "mean": tuple(fields["mean"]), "std": tuple(fields["std"])})
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"the converted file's config is broken ({error}); convert the weights again") from error
    params = {name: value.astype(np.float32) for name, value in tensors.items() if not name.startswith(_MEANS)}
    wanted = stored if known is None else dataclasses.replace(known, image_size=stored.image_size)
    check_params(wanted, params)
    if wanted != stored or (known is None and stored.name != backbone):
        raise ValueError(f"converted for backbone {stored.name!r} (as {stored}), not for {backbone!r}")
    means = {name.removeprefix(_MEANS): value for name, value in tensors.items() if name.startswith(_MEANS)}
    shape = (stored.depth, stored.width)
    if wrong := sorted(name for name, mean in means.items() if mean.shape != shape or mean.dtype != np.float32):
        raise ValueError(f"base means {wrong[:4]} are not float32 {shape}; convert the weights again")
    if wrong := sorted(name for name, mean in means.items() if not np.isfinite(mean).all()):
        raise ValueError(f"base means {wrong[:4]} are not finite; convert the weights again")
    return Pretrained(stored, params, metadata["source"], metadata["sha256"], means)


def _config_beside(file: Path) -> dict | None:
    config = file.with_name("config.json")
    if not config.is_file():
        return None
    try:
        loaded = json.loads(config.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} is not readable JSON ({error})") from error
    return loaded if isinstance(loaded, dict) else None
