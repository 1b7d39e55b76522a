"""A frozen AlexNet with torchvision's architecture. Its features are used to infer the task ID.

Weight files have torchvision's names. Their kernels have PyTorch's layout, `[out, in, height,
width]`. Our names are `conv1.kernel`, `conv1.bias`, and so on. Our kernels are `[height, width, in,
out]`. The classifier is not used.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from cheem_jax.backbone import params
from cheem_jax.backbone.params import Params, from_torch, mismatches
from cheem_jax.backbone.weights import hash_file, read_tensors
from cheem_jax.core.paths import absolute

Feature = Literal["pooled_conv", "conv5"]
FORMAT = "cheem_jax.alexnet.1"
"""Name of the format in the header of a converted file. The header also contains the name and the
hash of the source file."""
SMALLEST_IMAGE = 63
"""Minimum image size in pixels. With a smaller image, the last feature map would be smaller than
the pooling window."""
GRID = 6
"""Height and width of the pooled feature map for every image size."""
HOW_TO_GET = (
    "create it with `python convert/torchvision_alexnet.py --output alexnet.safetensors`"
    " (--checkpoint a .pth)"
)


CONVOLUTIONS = (
    (3, 64, 11, 4, 2),
    (64, 192, 5, 1, 2),
    (192, 384, 3, 1, 1),
    (384, 256, 3, 1, 1),
    (256, 256, 3, 1, 1),
)
"""Input channels, output channels, kernel size, stride and padding of each convolution."""
CHANNELS = 256
_TORCHVISION = {"conv1": 0, "conv2": 3, "conv3": 6, "conv4": 8, "conv5": 10}
"""Index of each convolution in `features`, the sequence of layers of torchvision's AlexNet."""


@dataclasses.dataclass(frozen=True)
class AlexNetConfig:
    """Config of AlexNet: the image size, the computed feature, and the mean and standard deviation
    that normalise images."""

    image_size: int = 224
    """Image size in pixels, at least 63."""
    feature: Feature = "pooled_conv"
    """Feature to compute: `pooled_conv` is the output of the last convolution after ReLU, max
    pooling and average pooling to 6 x 6; `conv5` is the output of the last convolution before ReLU
    and pooling."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    name: str = "alexnet"

    def __post_init__(self):
        if self.image_size < SMALLEST_IMAGE:
            raise ValueError(
                f"AlexNet needs images of at least {SMALLEST_IMAGE} pixels, got {self.image_size}"
            )

    @property
    def width(self) -> int:
        """Size of the feature vector."""
        side = map_sides(self)[-1] if self.feature == "conv5" else GRID
        return CHANNELS * side**2


class AlexNet(nnx.Module):
    """The layers of AlexNet up to the configured feature."""

    def __init__(self, config: AlexNetConfig, rngs: nnx.Rngs):
        self.config = config
        self.conv1, self.conv2, self.conv3, self.conv4, self.conv5 = (
            _conv(*sizes, rngs) for sizes in CONVOLUTIONS
        )

    def __call__(
        self, images: UInt8[Array, "B S S 3"] | Float[Array, "B S S 3"]
    ) -> Float[Array, "B D"]:
        """Compute the feature vectors, flattened with channels first as in torchvision. uint8
        images are normalised; float images must already be normalised."""
        size = self.config.image_size
        if images.shape[1:3] != (size, size):
            raise ValueError(
                f"images of {images.shape[1]} x {images.shape[2]} pixels, expected {size} x {size}"
            )
        if images.dtype == jnp.uint8:
            mean, std = jnp.asarray(self.config.mean), jnp.asarray(self.config.std)
            images = (images.astype(jnp.float32) / 255.0 - mean) / std
        x = _max_pool(nnx.relu(self.conv1(images)))
        x = _max_pool(nnx.relu(self.conv2(x)))
        x = nnx.relu(self.conv3(x))
        x = nnx.relu(self.conv4(x))
        x = self.conv5(x)
        if self.config.feature == "conv5":
            return _flatten(x)
        return _flatten(adaptive_average_pool(_max_pool(nnx.relu(x)), GRID))


def _conv(
    num_inputs: int, num_outputs: int, kernel: int, stride: int, padding: int, rngs: nnx.Rngs
) -> nnx.Conv:
    # Products are float32 on every device, because a GPU's lower default precision would change the
    # router's distances.
    return nnx.Conv(
        num_inputs,
        num_outputs,
        (kernel, kernel),
        stride,
        padding=padding,
        precision="highest",
        rngs=rngs,
    )


def _max_pool(x: Float[Array, "B H H C"]) -> Float[Array, "B h h C"]:
    return nnx.max_pool(x, (3, 3), strides=(2, 2))


def _flatten(x: Float[Array, "B H H C"]) -> Float[Array, "B D"]:
    return x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)


def adaptive_average_pool(x: Float[Array, "B H W C"], side: int) -> Float[Array, "B side side C"]:
    """Average the input over side x side bins. Bin i of an axis of length n ranges from floor(i n /
    side) to ceil((i + 1) n / side)."""
    rows, columns = _bins(x.shape[1], side), _bins(x.shape[2], side)
    return jnp.einsum("ih,bhwc,jw->bijc", rows, x, columns, precision="highest")


def _bins(length: int, side: int) -> np.ndarray:
    weights = np.zeros((side, length), np.float32)
    for i in range(side):
        # bins overlap if `side` does not divide the length, and repeat if `side` is larger than the
        # length
        begin = i * length // side
        end = -(-(i + 1) * length // side)
        weights[i, begin:end] = 1 / (end - begin)
    return weights


def map_sides(config: AlexNetConfig) -> tuple[int, ...]:
    """Compute the height (and width) of the feature map of each of the five convolutions."""
    side = config.image_size
    sides = []
    for index, (_, _, kernel, stride, padding) in enumerate(CONVOLUTIONS):
        side = (side + 2 * padding - kernel) // stride + 1
        sides.append(side)
        if index < 2:
            side = (side - 3) // 2 + 1  # the pooling after conv1 and conv2
    return tuple(sides)


def flops(config: AlexNetConfig) -> int:
    """Compute the FLOPs per image of all five convolutions (2 x multiply-adds)."""
    layers = zip(CONVOLUTIONS, map_sides(config), strict=True)
    return 2 * sum(
        side**2 * kernel**2 * inputs * outputs for (inputs, outputs, kernel, *_), side in layers
    )


@dataclasses.dataclass(frozen=True)
class PretrainedAlexNet:
    """Weights of AlexNet and their origin."""

    config: AlexNetConfig
    params: dict[str, np.ndarray]
    """Parameters in float32, with the names and shapes of `shapes_of`."""
    source: str
    """Name of the file that was read; for a converted file, the name of the source file, which the
    header of the converted file contains."""
    sha256: str
    """SHA-256 of the source file."""


def load_alexnet(
    weights: str | Path | None, *, image_size: int = 224, feature: Feature = "pooled_conv"
) -> PretrainedAlexNet:
    """Read weights with torchvision's names from a safetensors or npz file; a classifier is
    ignored.

    Raises ValueError for invalid settings or weights, and FileNotFoundError for a missing file.
    """
    config = AlexNetConfig(image_size, feature)
    if weights is None:
        raise ValueError(f"weights of AlexNet are not part of the package; {HOW_TO_GET}")
    file = absolute(weights)
    if not file.is_file():
        raise FileNotFoundError(f"weights file {str(file)!r} does not exist; {HOW_TO_GET}")
    try:
        tensors, metadata = read_tensors(file)
        params = from_torchvision(tensors, config)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}; {HOW_TO_GET}") from error
    if metadata.get("format") == FORMAT and {"source", "sha256"} <= metadata.keys():
        return PretrainedAlexNet(config, params, metadata["source"], metadata["sha256"])
    return PretrainedAlexNet(config, params, file.name, hash_file(file))


def to_torchvision_name(name: str) -> str:
    """Return torchvision's name for one of our parameters, such as `features.3.weight` for
    `conv2.kernel`."""
    layer, leaf = name.split(".")
    return f"features.{_TORCHVISION[layer]}.{'weight' if leaf == 'kernel' else leaf}"


def from_torchvision(
    tensors: Mapping[str, np.ndarray], config: AlexNetConfig
) -> dict[str, np.ndarray]:
    """Convert torchvision's tensors to our parameters in float32.

    Raises a single ValueError that lists all missing and unexpected tensors and wrong shapes.
    """
    shapes = shapes_of(config)
    theirs = {
        name: (
            to_torchvision_name(name),
            (shape[3], shape[2], *shape[:2]) if len(shape) == 4 else shape,
        )
        for name, shape in shapes.items()
    }
    unused = [f"classifier.{layer}.{leaf}" for layer in (1, 4, 6) for leaf in ("weight", "bias")]
    return from_torch(
        tensors, shapes, theirs, unused=unused, what="weights do not fit torchvision's AlexNet"
    )


def shapes_of(config: AlexNetConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, keyed by name."""
    return params.shapes(lambda: AlexNet(config, nnx.Rngs(0)))


def build_alexnet(config: AlexNetConfig, weights: Params) -> AlexNet:
    """Build the network with `weights` in float32. Raises a single ValueError that lists all
    mismatches."""
    if complaint := mismatches(shapes_of(config), weights):
        raise ValueError(f"weights do not fit AlexNet: {complaint}")
    return params.filled(lambda: AlexNet(config, nnx.Rngs(0)), weights)
