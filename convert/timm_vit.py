"""`cheem convert` with one more source of weights: --from-timm lets an installed timm load them.

    python convert/timm_vit.py --backbone deit_tiny --output deit_tiny.safetensors --from-timm
    python convert/timm_vit.py --backbone deit_tiny --weights FILE --output deit_tiny.safetensors \
        --base-data DIR_OR_ZIP --image-size 96
"""

import dataclasses
import hashlib
from typing import Any

import numpy as np

from cheem_jax.backbone.timm_names import from_timm, infer_config
from cheem_jax.backbone.weights import Pretrained, load_pretrained, named_config
from cheem_jax.cli import convert as command
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command


@dataclasses.dataclass(frozen=True)
class Convert(command.Convert):
    """Convert timm weights. The output keeps the image size of the weights; loading resizes
    them."""

    from_timm: bool = False
    """Let the installed timm load (and download) the weights instead."""


def convert(options: Convert) -> Pretrained:
    """Convert the weights and write the output. Raises ValueError, OSError or ImportError with one
    clear message."""
    command.check(options)
    if options.from_timm and options.weights is not None:
        raise ValueError("--weights and --from-timm name two sources; give one")
    if options.from_timm:
        pretrained = read_timm(options.backbone)
    else:
        pretrained = load_pretrained(options.backbone, weights=options.weights)
    return command.write(options, pretrained)


def read_timm(backbone: str, *, pretrained: bool = True) -> Pretrained:
    """Load weights with the installed timm; `pretrained=False` loads timm's random initial
    weights."""
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
    except Exception as error:  # timm passes on any error of its download libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"timm cannot make {name!r}: {reason}; pass a local file with --weights FILE"
        ) from error
    tensors = {key: value.detach().cpu().numpy() for key, value in model.state_dict().items()}
    config = known or infer_config(
        backbone,
        tensors,
        {"pretrained_cfg": model.pretrained_cfg, "global_pool": model.global_pool},
    )
    return Pretrained(
        config, from_timm(tensors, config), f"timm:{timm.__version__}:{name}", hash_tensors(tensors)
    )


def hash_tensors(tensors: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 hash over sorted names, dtypes, shapes and bytes; it identifies weights
    that have no file."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def main(options: Convert) -> None:
    """Convert the weights and print a summary."""
    command.print_summary(options, convert(options))


if __name__ == "__main__":
    run_command(main, parse(Convert, description=__doc__))
