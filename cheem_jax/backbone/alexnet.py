"""AlexNet in torchvision's layout, frozen: a light network whose features choose the task.

Its weights are read under torchvision's names and in PyTorch's layout, `[out, in, height, width]` and `[out, in]`; ours
are `conv1.kernel` `[height, width, in, out]`, `fc6.kernel` `[in, out]` and so on.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from cheem_jax.backbone.params import Params, mismatches
from cheem_jax.backbone.weights import read_tensors, sha256_of
from cheem_jax.core.paths import absolute

Feature = Literal["pooled_conv", "fc7", "conv5"]
FORMAT = "cheem_jax.alexnet.1"
"""In the header of a converted file, beside the source of the numbers and its hash."""
SMALLEST_IMAGE = 63
"""Below it the last pooling has nothing to pool."""
GRID = 6
"""Side of the pooled map that the fully connected layers read, whatever the image size."""
HIDDEN = 4096
HOW_TO_GET = "make it with `python convert/torchvision_alexnet.py --output alexnet.safetensors`"


class Convolution(NamedTuple):
    """Sizes of one convolution over square maps."""

    num_inputs: int
    num_outputs: int
    kernel: int
    stride: int
    padding: int


CONVOLUTIONS = (
    Convolution(3, 64, 11, 4, 2),
    Convolution(64, 192, 5, 1, 2),
    Convolution(192, 384, 3, 1, 1),
    Convolution(384, 256, 3, 1, 1),
    Convolution(256, 256, 3, 1, 1),
)
CHANNELS = CONVOLUTIONS[-1].num_outputs
_TORCHVISION = {
    "conv1": "features.0",
    "conv2": "features.3",
    "conv3": "features.6",
    "conv4": "features.8",
    "conv5": "features.10",
    "fc6": "classifier.1",
    "fc7": "classifier.4",
    "fc8": "classifier.6",
}


@dataclasses.dataclass(frozen=True)
class AlexNetConfig:
    """What is taken of AlexNet, at which image size."""

    image_size: int = 224
    """Side in pixels, at least 63."""
    feature: Feature = "pooled_conv"
    """6 x 6 averages of the last maps; `fc7` after its ReLU; `conv5` before its ReLU and pooling."""
    num_classes: int = 0
    """Width of the pretrained head `fc8`, which only a network with feature `fc7` has; 0 leaves it out."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    name: str = "alexnet"

    def __post_init__(self):
        if self.image_size < SMALLEST_IMAGE:
            raise ValueError(f"AlexNet takes images of {SMALLEST_IMAGE} pixels or more, got {self.image_size}")
        if self.num_classes and self.feature != "fc7":
            raise ValueError(f"a head of {self.num_classes} classes reads 'fc7', not {self.feature!r}")

    @property
    def width(self) -> int:
        """Size of the feature vector."""
        match self.feature:
            case "pooled_conv":
                return CHANNELS * GRID**2
            case "fc7":
                return HIDDEN
            case "conv5":
                return CHANNELS * map_sides(self)[-1] ** 2


class AlexNet(nnx.Module):
    """Images to the chosen feature; layers that it does not need are left out."""

    def __init__(self, config: AlexNetConfig, rngs: nnx.Rngs):
        self.config = config
        self.conv1, self.conv2, self.conv3, self.conv4, self.conv5 = (_conv(sizes, rngs) for sizes in CONVOLUTIONS)
        connected = config.feature == "fc7"
        self.fc6 = _linear(CHANNELS * GRID**2, HIDDEN, rngs) if connected else None
        self.fc7 = _linear(HIDDEN, HIDDEN, rngs) if connected else None
        self.fc8 = _linear(HIDDEN, config.num_classes, rngs) if config.num_classes else None

    def __call__(self, images: UInt8[Array, "B S S 3"] | Float[Array, "B S S 3"]) -> Float[Array, "B D"]:
        """The feature vector, channels first as in torchvision; floats are taken as normalised."""
        size = self.config.image_size
        if images.shape[1:3] != (size, size):
            raise ValueError(f"images of {images.shape[1]} x {images.shape[2]} pixels, expected {size} x {size}")
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
        x = _flatten(adaptive_average_pool(_max_pool(nnx.relu(x)), GRID))
        if self.fc6 is None or self.fc7 is None:
            return x
        return nnx.relu(self.fc7(nnx.relu(self.fc6(x))))

    def logits(self, features: Float[Array, "B D"]) -> Float[Array, "B classes"]:
        """The pretrained head on `fc7`, where the network was built with one."""
        if self.fc8 is None:
            raise ValueError("this AlexNet carries no head; build it with feature='fc7' and num_classes")
        return self.fc8(features)


def _conv(sizes: Convolution, rngs: nnx.Rngs) -> nnx.Conv:
    # float32 products on every device: a GPU's shorter ones would move the distances that choose the task
    return nnx.Conv(
        sizes.num_inputs,
        sizes.num_outputs,
        kernel_size=(sizes.kernel, sizes.kernel),
        strides=sizes.stride,
        padding=sizes.padding,
        precision="highest",
        rngs=rngs,
    )


def _linear(num_inputs: int, num_outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(num_inputs, num_outputs, precision="highest", rngs=rngs)


def _max_pool(x: Float[Array, "B H H C"]) -> Float[Array, "B h h C"]:
    return nnx.max_pool(x, (3, 3), strides=(2, 2))


def _flatten(x: Float[Array, "B H H C"]) -> Float[Array, "B D"]:
    return x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)


def adaptive_average_pool(x: Float[Array, "B H W C"], side: int) -> Float[Array, "B side side C"]:
    """Means over side x side bins; bin i of an axis of n covers floor(i n / side) to ceil((i + 1) n / side)."""
    rows, columns = _bins(x.shape[1], side), _bins(x.shape[2], side)
    return jnp.einsum("ih,bhwc,jw->bijc", rows, x, columns, precision="highest")


def _bins(length: int, side: int) -> np.ndarray:
    weights = np.zeros((side, length), np.float32)
    for i in range(side):
        # bins overlap where `side` does not divide the length, and repeat where it is the larger one
        begin, end = i * length // side, -(-(i + 1) * length // side)
        weights[i, begin:end] = 1 / (end - begin)
    return weights


def map_sides(config: AlexNetConfig) -> tuple[int, ...]:
    """Side of the map that each of the five convolutions gives."""
    side, sides = config.image_size, []
    for index, sizes in enumerate(CONVOLUTIONS):
        side = (side + 2 * sizes.padding - sizes.kernel) // sizes.stride + 1
        sides.append(side)
        if index < 2:
            side = (side - 3) // 2 + 1  # the pooling after conv1 and conv2
    return tuple(sides)


def convolution_flops(config: AlexNetConfig) -> int:
    """The five convolutions for one image (2 x multiply-adds)."""
    layers = zip(CONVOLUTIONS, map_sides(config), strict=True)
    return 2 * sum(side**2 * sizes.kernel**2 * sizes.num_inputs * sizes.num_outputs for sizes, side in layers)


def whole_flops(config: AlexNetConfig, *, num_classes: int = 1000) -> int:
    """All of AlexNet with a head of so many classes, whatever the feature."""
    return convolution_flops(config) + 2 * HIDDEN * (CHANNELS * GRID**2 + HIDDEN + num_classes)


def flops(config: AlexNetConfig) -> int:
    """What one image costs up to the chosen feature."""
    return whole_flops(config, num_classes=0) if config.feature == "fc7" else convolution_flops(config)


@dataclasses.dataclass(frozen=True)
class PretrainedAlexNet:
    """AlexNet's weights, and what is known of their origin."""

    config: AlexNetConfig
    params: dict[str, np.ndarray]
    """Names and shapes of `shapes_of`, float32."""
    source: str
    """The file the numbers were read from; a converted file passes on its own source."""
    sha256: str
    """Of the source file; a converted file passes on the hash of the file it was made from."""


def load_alexnet(
    weights: str | Path | None, *, image_size: int = 224, feature: Feature = "pooled_conv"
) -> PretrainedAlexNet:
    """Weights from a safetensors or npz file under torchvision's names; only `fc7` needs the classifier in it.

    Raises ValueError for settings, a file or weights that do not fit, FileNotFoundError where there is no such file.
    """
    config = AlexNetConfig(image_size, feature)
    if weights is None:
        raise ValueError(f"AlexNet's weights do not ship with the package; {HOW_TO_GET}")
    file = absolute(weights)
    if not file.is_file():
        raise FileNotFoundError(f"no weights file {str(file)!r}; {HOW_TO_GET}")
    if file.suffix not in (".safetensors", ".npz"):
        raise ValueError(f"{file}: expected a .safetensors or .npz file; {HOW_TO_GET}, from a .pth with --checkpoint")
    tensors, metadata = read_tensors(file)
    try:
        params = from_torchvision(tensors, config)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}; {HOW_TO_GET}") from error
    if metadata.get("format") == FORMAT and {"source", "sha256"} <= metadata.keys():
        return PretrainedAlexNet(config, params, metadata["source"], metadata["sha256"])
    return PretrainedAlexNet(config, params, file.name, sha256_of(file))


def torchvision_name_of(name: str) -> str:
    """torchvision's name of one of our parameters: `conv2.kernel` is `features.3.weight`."""
    layer, leaf = name.split(".")
    return f"{_TORCHVISION[layer]}.{'weight' if leaf == 'kernel' else leaf}"


def from_torchvision(tensors: Mapping[str, np.ndarray], config: AlexNetConfig) -> dict[str, np.ndarray]:
    """Our parameters in float32; one ValueError lists every missing, unexpected and misshapen tensor.

    Layers that the config does not need are left out, whether the tensors have them or not.
    """
    shapes = shapes_of(config)
    wanted = {torchvision_name_of(name): _torch_shape(shape) for name, shape in shapes.items()}
    known = {f"{layer}.{leaf}" for layer in _TORCHVISION.values() for leaf in ("weight", "bias")}
    unused = known - wanted.keys()
    complaint = mismatches(wanted, {name: value for name, value in tensors.items() if name not in unused})
    if complaint:
        raise ValueError(f"weights do not fit torchvision's AlexNet ({config.feature}): {complaint}")
    return {name: _our_layout(tensors[torchvision_name_of(name)]).astype(np.float32) for name in shapes}


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[3], shape[2], *shape[:2]) if len(shape) == 4 else shape[::-1]


def _our_layout(tensor: np.ndarray) -> np.ndarray:
    return tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T


def shapes_of(config: AlexNetConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape."""
    _, state = nnx.split(_without_numbers(config))
    return {_dotted(name): tuple(leaf.shape) for name, leaf in nnx.to_flat_state(state)}


def build_alexnet(config: AlexNetConfig, params: Params) -> AlexNet:
    """The module with these weights in float32; raises one ValueError that lists what does not fit."""
    complaint = mismatches(shapes_of(config), params)
    if complaint:
        raise ValueError(f"weights do not fit AlexNet ({config.feature}): {complaint}")
    graphdef, state = nnx.split(_without_numbers(config))
    flat = {name: leaf.replace(jnp.asarray(np.asarray(params[_dotted(name)], np.float32)))
            for name, leaf in nnx.to_flat_state(state)}  # fmt: skip
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _without_numbers(config: AlexNetConfig) -> AlexNet:
    return nnx.eval_shape(lambda: AlexNet(config, nnx.Rngs(0)))


def _dotted(name: tuple) -> str:
    return ".".join(map(str, name))
