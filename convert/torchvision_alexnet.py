"""Convert torchvision's AlexNet, an optional router backbone, to a safetensors file with
torchvision's names.

    python convert/torchvision_alexnet.py --output alexnet.safetensors
    python convert/torchvision_alexnet.py --checkpoint alexnet.pth --output alexnet.safetensors
"""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cheem_jax.backbone.alexnet import FORMAT, AlexNetConfig, from_torchvision
from cheem_jax.backbone.weights import hash_file
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core.atomic import write_atomically


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert torchvision's AlexNet. The conversion needs torch; loading the output does not."""

    output: Path
    """The .safetensors file to write."""
    checkpoint: Path | None = None
    """Local .pth file with torchvision's state dict; by default, torchvision downloads its ImageNet
    weights."""
    overwrite: bool = False
    """Replace an output that exists."""


def convert(options: Convert) -> dict[str, np.ndarray]:
    """Convert the weights and write the output. Raises ValueError, OSError or ImportError with one
    clear message."""
    from safetensors.numpy import save

    if options.output.suffix != ".safetensors":
        raise ValueError(f"--output must end in .safetensors, got {str(options.output)!r}")
    if options.output.exists() and not options.overwrite:
        raise ValueError(f"{options.output} exists; choose another --output or add --overwrite")
    if options.checkpoint is not None and not options.checkpoint.is_file():
        raise FileNotFoundError(
            f"no checkpoint {str(options.checkpoint)!r}; expected torchvision's .pth file"
        )
    if any(find_spec(package) is None for package in ("torch", "torchvision")):
        raise ImportError(
            "this conversion needs torch and torchvision: `pip install cheem_jax[convert]`"
        )
    checkpoint = options.checkpoint or download()
    tensors = read_checkpoint(checkpoint)
    metadata = {"format": FORMAT, "source": checkpoint.name, "sha256": hash_file(checkpoint)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, save(tensors, metadata))
    return tensors


def download() -> Path:
    """Return the path of torchvision's ImageNet weights; torchvision downloads and verifies them
    unless they are cached."""
    import torch
    from torchvision.models import AlexNet_Weights

    weights = AlexNet_Weights.IMAGENET1K_V1
    try:
        weights.get_state_dict(progress=True, check_hash=True)
    except Exception as error:  # urllib's, ssl's and torch's errors have no common class
        raise ValueError(
            f"torchvision cannot load {weights.url} ({_reason(error)}); fetch it elsewhere and pass"
            " --checkpoint FILE"
        ) from error
    return Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)


def read_checkpoint(checkpoint: Path) -> dict[str, np.ndarray]:
    """Read a state dict's tensors as float32. Raises ValueError unless they are torchvision's
    AlexNet, with or without its classifier."""
    import torch

    try:
        state: Any = torch.load(checkpoint, map_location="cpu", weights_only=True)
        tensors = {
            name: np.ascontiguousarray(value.detach().float().numpy())
            for name, value in state.items()
        }
    except Exception as error:  # unpickling raises almost anything on a broken file
        raise ValueError(
            f"{checkpoint} is not a readable state dict ({_reason(error)}); is it complete?"
        ) from error
    try:
        from_torchvision(tensors, AlexNetConfig())
    except ValueError as error:
        raise ValueError(f"{checkpoint.name}: {error}") from error
    return tensors


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main(options: Convert) -> None:
    """Convert the weights and print a summary of the output."""
    tensors = convert(options)
    print(f"{options.output}: alexnet, {sum(value.size for value in tensors.values()):,} numbers")


if __name__ == "__main__":
    run_command(main, parse(Convert, description=__doc__), computes=False)
