"""Load pretrained weights from the package, a file or the hub, resize them to another image size,
and define the format of converted files.

A converted file is a safetensors file that `save_converted` writes. It contains the parameters with
our names, the mean CLS tokens of the pretraining data as
`base_means/<image size>/<placement>/<token>`, and a header with the format, the config, the source
of the weights and the hash of the source.
"""

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from cheem_jax.backbone.config import (
    BUNDLED,
    CONFIGS,
    ViTConfig,
    at_image_size,
    check_fields,
    closest,
)
from cheem_jax.backbone.params import check_params, float32
from cheem_jax.backbone.timm_names import (
    SUPPORTED,
    from_timm,
    infer_config,
    other_pool,
    set_num_classes,
    without_wrapper,
)
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.hub import check_cache
from cheem_jax.core.npz import read_tensors
from cheem_jax.core.paths import absolute

FORMAT = "cheem_jax.vit.1"
_MEANS = "base_means/"
_TIMM_NAME = re.compile(r"(vit|deit3?)(_[a-z0-9]+)*_patch\d+(_[a-z0-9]+)*(\.[a-z0-9_]+)?")
_OTHERS = re.compile("relpos|rope|(?<!_siglip)_gap_|vit_7b_")
"""Parts of timm names that identify ViTs with unsupported tokens, positions or heads."""


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Weights of a backbone at one image size, and their origin."""

    config: ViTConfig
    params: dict[str, np.ndarray]
    """Parameters with the names and shapes of `params.py`. `load_pretrained` returns float32
    arrays; `save_converted` writes each array in its dtype."""
    source: str
    """Origin of the weights: the name of the file that was read, `hub:timm/<name>` or `bundled`.
    For a converted file, the origin is read from the header of the file."""
    sha256: str
    """SHA-256 of the source file."""
    base_means: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Mean CLS tokens of the pretraining data, float32 `[L, D]`, keyed by
    `{image_size}/{placement}/{token}`. The dict contains only the image sizes at which the means
    were computed, and can be empty."""


def load_pretrained(
    backbone: str, *, weights: str | Path | None = None, image_size: int | None = None
) -> Pretrained:
    """Load the weights of a backbone in `CONFIGS` or of another plain timm ViT.

    Args:
        backbone: a name in `CONFIGS`, or a timm name.
        weights: a safetensors or npz file with timm's names, or a converted file. By default,
            bundled backbones are read from the package, and others from the hub.
        image_size: image size in pixels; by default, the image size of the weights.

    Raises ValueError for an unknown name, an unreadable file or weights of another architecture.
    Raises FileNotFoundError for a missing file, or if a download fails.
    """
    backbone = backbone.removeprefix("timm/")  # names on the hub have this prefix
    named = named_config(backbone)
    hub_config = None
    if weights is not None:
        file = absolute(weights)
        source = file.name
        if not file.is_file():
            raise FileNotFoundError(
                f"weights file {str(file)!r} does not exist; give a .safetensors or .npz file"
            )
        hub_config = None if named else _read_sibling_config(file)
    elif named is not None and named.name in BUNDLED:
        file = Path(__file__).parent / "bundled" / f"{named.name}.safetensors"
        source = "bundled"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing; create it with `python experiments/pretrain_micro.py`"
            )
    else:
        file, hub_config, source = _download((named and named.timm_name) or backbone)

    tensors, metadata = read_tensors(file)
    try:
        if "format" in metadata and metadata["format"].startswith("cheem_jax"):
            pretrained = _from_converted(named, backbone, tensors, metadata)
            if source == "bundled":
                pretrained = dataclasses.replace(pretrained, source=source, sha256=hash_file(file))
        else:
            tensors = without_wrapper(tensors)
            config = set_num_classes(named or infer_config(backbone, tensors, hub_config), tensors)
            pretrained = Pretrained(config, from_timm(tensors, config), source, hash_file(file))
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error
    return pretrained if image_size is None else resize(pretrained, image_size)


def named_config(backbone: str) -> ViTConfig | None:
    """Return the config in `CONFIGS` whose `name` or `timm_name` is `backbone`. Return None if
    `backbone` is another supported timm name.

    Raises ValueError for all other names. If the name is unknown, the message lists the most
    similar names.
    """
    for config in CONFIGS.values():
        if backbone in (config.name, config.timm_name):
            return config
    if _TIMM_NAME.fullmatch(backbone):
        if _OTHERS.search(backbone):
            raise ValueError(f"{backbone!r} is not a plain ViT; supported: {SUPPORTED}")
        return None
    raise ValueError(
        f"unknown backbone {backbone!r}; {closest(backbone, CONFIGS)}; "
        f"or a timm name such as 'vit_small_patch16_224.dino'; supported: {SUPPORTED}"
    )


def resize(pretrained: Pretrained, image_size: int) -> Pretrained:
    """Convert weights to another square image size. Only a learned position embedding changes."""
    config = at_image_size(pretrained.config, image_size)
    if config.rotary is not None:
        return dataclasses.replace(pretrained, config=config)
    position = resample_position(
        pretrained.params["position"], config.num_patches, config.num_prefix
    )
    return dataclasses.replace(
        pretrained, config=config, params={**pretrained.params, "position": position}
    )


def save_converted(file: str | Path, pretrained: Pretrained) -> None:
    """Write `pretrained` atomically to a safetensors file with our names (a converted file)."""
    from safetensors.numpy import save

    file = absolute(file)
    check_params(pretrained.config, pretrained.params)
    means = {_MEANS + key: value for key, value in pretrained.base_means.items()}
    tensors = {
        name: np.ascontiguousarray(value) for name, value in {**pretrained.params, **means}.items()
    }
    metadata = {
        "format": FORMAT,
        "config": json.dumps(dataclasses.asdict(pretrained.config)),
        "source": pretrained.source,
        "sha256": pretrained.sha256,
    }
    write_atomically(
        file, save(tensors, metadata)
    )  # unlike `save_file`, this respects the user's umask


def hash_file(file: Path) -> str:
    """Compute the SHA-256 of a file as hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _from_converted(
    named: ViTConfig | None, backbone: str, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> Pretrained:
    lacking = sorted({"config", "source", "sha256"} - metadata.keys())
    if metadata["format"] != FORMAT or lacking:
        raise ValueError(
            f"the converted file has the format {metadata['format']!r} and lacks {lacking},"
            f" expected {FORMAT!r}; convert the weights again with `cheem convert`"
        )
    try:
        fields: dict[str, Any] = json.loads(metadata["config"])
        check_fields(fields)
        stored = ViTConfig(**{**fields, "mean": tuple(fields["mean"]), "std": tuple(fields["std"])})
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(
            f"the config of the converted file is invalid ({error}); convert the weights again"
        ) from error
    # Tensors are removed one by one, so that memory never contains all weights twice.
    params = {
        name: float32(tensors.pop(name)) for name in sorted(tensors) if not name.startswith(_MEANS)
    }
    expected = stored
    if named is not None:
        # The file's head can have any number of classes, unless the backbone has no head. The
        # memory of a run with another pixel scale stores the weights with this scale.
        classes = stored.num_classes if named.num_classes else 0
        expected = dataclasses.replace(
            named,
            image_size=stored.image_size,
            num_classes=classes,
            mean=stored.mean,
            std=stored.std,
        )
    check_params(expected, params)
    if expected != stored or (named is None and stored.name != backbone):
        raise ValueError(
            f"the file was converted for backbone {stored.name!r} ({stored}), not for {backbone!r}"
        )
    means = {
        name.removeprefix(_MEANS): value
        for name, value in tensors.items()
        if name.startswith(_MEANS)
    }
    shape = (stored.depth, stored.width)
    if wrong := sorted(
        name for name, m in means.items() if (m.shape, m.dtype) != (shape, np.float32)
    ):
        raise ValueError(
            f"base means {wrong[:4]} are not float32 {shape}; convert the weights again"
        )
    return Pretrained(stored, params, metadata["source"], metadata["sha256"], means)


def _read_sibling_config(file: Path) -> dict | None:
    config = file.with_name("config.json")
    if not config.is_file():
        return None
    try:
        loaded = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} is not readable JSON ({error})") from error
    return loaded if isinstance(loaded, dict) else None


def _download(timm_name: str) -> tuple[Path, dict, str]:
    """Download a model. Return its safetensors file in the local cache, its `config.json`, and the
    name of the source.

    Cached files are used without network access. Raises FileNotFoundError if the hub cannot be
    reached or does not have the model, and ValueError if the pooling of the model is not supported.
    """
    repository = hub_repository(timm_name)
    way_out = (
        "give a local file with --weights FILE, such as model.safetensors from"
        f" https://huggingface.co/{repository}"
    )
    from huggingface_hub.errors import (
        RepositoryNotFoundError,
    )  # slow to import, and rarely needed

    check_cache()
    try:
        config = json.loads(_fetch(repository, "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("its config.json is not a JSON object")
        refusal = other_pool(timm_name, config)
        weights = None if refusal else _fetch(repository, "model.safetensors")
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"the hub does not have the model {repository!r}; check the name, or {way_out}"
        ) from error
    except Exception as error:  # error classes differ between releases of the client
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(f"cannot download {repository!r} ({reason}); {way_out}") from error
    if weights is None:
        raise ValueError(
            f"{timm_name!r} is not a plain timm ViT: {refusal[0]}; supported: {SUPPORTED}"
        )
    return weights, config, f"hub:{repository}"


def hub_repository(timm_name: str) -> str:
    """Return the name of a model's repository on the hub. QuickGELU variants share the repository
    of the model without QuickGELU."""
    return f"timm/{timm_name.replace('_clip_quickgelu_', '_clip_')}"


def _fetch(repository: str, filename: str) -> Path:
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    cached = try_to_load_from_cache(repository, filename)
    if isinstance(cached, str):
        return Path(cached)
    # This is a single request without retries; without a network, the download itself would retry
    # for half a minute.
    get_hf_file_metadata(hf_hub_url(repository, filename))
    return Path(hf_hub_download(repository, filename))


def resample_position(
    position: Float[np.ndarray, "N D"], num_patches: int, num_prefix: int = 1
) -> Float[np.ndarray, "M D"]:
    """Resample a position embedding to a square grid with `num_patches` positions, as timm does.
    The first `num_prefix` rows do not change."""
    prefix, grid = position[:num_prefix], position[num_prefix:]
    before, after = math.isqrt(len(grid)), math.isqrt(num_patches)
    if before**2 != len(grid) or after**2 != num_patches:
        raise ValueError(
            f"position embeddings are resampled between square grids, not {len(grid)} ->"
            f" {num_patches}"
        )
    if before == after:
        return position
    matrix = bicubic_matrix(before, after)
    square = grid.astype(np.float64).reshape(before, before, -1)
    resampled = np.einsum("ih,jw,hwd->ijd", matrix, matrix, square, optimize=True)
    return np.concatenate([prefix, resampled.reshape(num_patches, -1)]).astype(np.float32)


def bicubic_matrix(before: int, after: int) -> Float[np.ndarray, "after before"]:
    """Compute the matrix for antialiased bicubic resampling along one axis. The kernel is the cubic
    kernel of Keys (1981) with a = -1/2. If `before` > `after`, the kernel is widened by the factor
    before / after.

    Pixel centres are at half-integers. Samples outside of the axis are omitted, and each row is
    rescaled to sum to 1, as in torch's `interpolate(mode="bicubic", antialias=True)`. This torch
    function uses a = -1/2 both for `before` > `after` and for `before` < `after`.
    """
    scale = before / after
    centre = scale * (np.arange(after) + 0.5)
    distance = np.abs(np.arange(before)[None, :] + 0.5 - centre[:, None]) / max(scale, 1.0)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)
