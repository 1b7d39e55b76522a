"""Converts a plain timm ViT, DeiT or DINO to this library's checkpoint, with the means of its own task.

    python convert/timm_vit.py --backbone deit_tiny --output deit_tiny.safetensors
    python convert/timm_vit.py --backbone deit_tiny --weights FILE --output deit_tiny.safetensors \
        --base-data DIR_OR_ZIP --image-size 96
"""

import dataclasses
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.timm_names import from_timm, infer_config
from cheem_jax.backbone.vit import ViT
from cheem_jax.backbone.weights import Pretrained, load_pretrained, named_config, resize, save_converted
from cheem_jax.cli import parse
from cheem_jax.data.decode import decode_in_order
from cheem_jax.data.folder import plan_task
from cheem_jax.data.load import ImagesConfig, load_train
from cheem_jax.data.records import all_pictures
from cheem_jax.images import Images

_TFDS = re.compile(r"tfds:([^:\[]+(?::\d+\.\d+\.\d+)?):(.+)")


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert timm weights; they keep their own image size, and resize when they are loaded."""

    output: Path
    """The .safetensors file to write."""
    backbone: str = "deit_tiny"
    """One of this library's backbones, or any other plain timm name such as vit_small_patch16_224.dino."""
    weights: Path | None = None
    """Local .safetensors or .npz under timm's names, or a converted file; else the hub's timm/ repository."""
    from_timm: bool = False
    """Let the installed timm load (and download) the weights instead."""
    base_data: str | None = None
    """Training images of the backbone's own task: a folder, a zip, or tfds:NAME:SPLIT."""
    image_size: int | None = None
    """Side in pixels at which the means of --base-data are measured; default: the weights' own."""
    overwrite: bool = False
    """Replace an output that exists."""


def convert(options: Convert) -> Pretrained:
    """Everything the command line does; raises ValueError, OSError or ImportError with one clear message."""
    if options.output.suffix != ".safetensors":
        raise ValueError(f"--output must end in .safetensors, got {str(options.output)!r}")
    if options.output.exists() and not options.overwrite:
        raise ValueError(f"{options.output} exists; choose another --output or add --overwrite")
    if options.from_timm and options.weights is not None:
        raise ValueError("--weights and --from-timm name two sources; give one")
    if options.image_size is not None and options.base_data is None:
        raise ValueError("--image-size is the size at which --base-data is measured; give both or neither")
    if options.from_timm:
        pretrained = read_timm(options.backbone)
    else:
        pretrained = load_pretrained(options.backbone, weights=options.weights)
    if options.base_data is not None:
        sized = resize(pretrained, options.image_size or pretrained.config.image_size)
        vit = build(sized.config, sized.params)
        means = pooled_means(vit, base_images(options.base_data, sized.config.image_size))
        pretrained = dataclasses.replace(pretrained, base_means={**pretrained.base_means, **means})
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save_converted(options.output, pretrained)
    return pretrained


def read_timm(backbone: str, *, pretrained: bool = True) -> Pretrained:
    """The weights as the installed timm loads them; `pretrained=False` takes timm's random ones."""
    known = named_config(backbone)
    if known is not None and known.timm_name is None:
        raise ValueError(f"{backbone!r} is not timm's; leave out --from-timm")
    try:
        import timm
    except ImportError as error:
        raise ImportError("--from-timm needs timm: `pip install cheem_jax[convert]`") from error
    name = (known and known.timm_name) or backbone
    try:
        model: Any = timm.create_model(name, pretrained=pretrained)
    except Exception as error:  # timm raises what its downloads raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"timm cannot make {name!r}: {reason}; pass a local file with --weights FILE") from error
    tensors = {key: value.detach().cpu().numpy() for key, value in model.state_dict().items()}
    config = known or infer_config(
        backbone, tensors, {"pretrained_cfg": model.pretrained_cfg, "global_pool": model.global_pool}
    )
    return Pretrained(config, from_timm(tensors, config), f"timm:{timm.__version__}:{name}", hash_of(tensors))


def hash_of(tensors: dict[str, np.ndarray]) -> str:
    """SHA-256 over sorted names, dtypes, shapes and bytes, for weights that come from no single file."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def base_images(base_data: str, image_size: int) -> Iterator[Images]:
    """The training images in chunks, uint8 [N, S, S, 3]."""
    if not base_data.startswith("tfds:"):
        yield load_train(plan_task(Path(base_data)), image_size, ImagesConfig("memory")).images
        return
    spelled = _TFDS.fullmatch(base_data)
    if not spelled:
        raise ValueError(f"--base-data {base_data!r}: expected tfds:NAME:SPLIT, e.g. tfds:imagenet_v2:test")
    name, split = spelled.groups()
    files = all_pictures(name, split, None)
    yield from decode_in_order(files, image_size, range(len(files)))


def pooled_means(vit: ViT, chunks: Iterable[Images]) -> dict[str, np.ndarray]:
    """`base_means` over all chunks, each weighted by its number of images."""
    totals: dict[str, np.ndarray] = {}
    count = 0
    for images in chunks:
        count += len(images)
        for key, mean in base_means(vit, images).items():
            totals[key] = totals.get(key, 0.0) + mean.astype(np.float64) * len(images)
    return {key: (total / count).astype(np.float32) for key, total in totals.items()}


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 after one line `error: ...`."""
    try:
        options = parse(Convert, arguments, description=__doc__)
    except SystemExit as stop:
        return 2 if stop.code else 0
    try:
        pretrained = convert(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; {options.output} was not written", file=sys.stderr)
        return 130
    numbers = sum(value.size for value in pretrained.params.values())
    print(f"{options.output}: {pretrained.config.name}, {numbers:,} numbers from {pretrained.source}")
    print(f"sha256 of the source: {pretrained.sha256}")
    print(f"base means: {', '.join(pretrained.base_means) or 'none (give --base-data)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
