import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from numpy.lib.stride_tricks import sliding_window_view

from cheem_jax.backbone import alexnet
from cheem_jax.backbone.alexnet import (
    FORMAT,
    AlexNetConfig,
    adaptive_average_pool,
    build_alexnet,
    from_torchvision,
    load_alexnet,
    shapes_of,
    to_torchvision_name,
)

SMALL = AlexNetConfig(63)
CONV5 = AlexNetConfig(63, "conv5")
IMAGES = np.random.default_rng(1).integers(0, 256, (3, 63, 63, 3), dtype=np.uint8)
LAYERS = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """Random convolutions under torchvision's names, scaled so that activations keep their size."""
    rng = np.random.default_rng(0)
    result = {}
    for index, (outputs, inputs, kernel) in LAYERS.items():
        weight = rng.standard_normal((outputs, inputs, kernel, kernel), np.float32)
        result[f"features.{index}.weight"] = weight * (2 / (inputs * kernel**2)) ** 0.5
        result[f"features.{index}.bias"] = rng.standard_normal(outputs, np.float32)
    return result


def run(config: AlexNetConfig, params, images) -> np.ndarray:
    graphdef, state = nnx.split(build_alexnet(config, params))
    return np.asarray(
        jax.jit(lambda state, images: nnx.merge(graphdef, state)(images))(state, images)
    )


def plain_conv(x, weight, bias, stride, padding):
    """Convolve `[B, C, H, W]` window by window."""
    side = weight.shape[2]
    x = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    windows = sliding_window_view(x, (side, side), axis=(2, 3))[:, :, ::stride, ::stride]
    return (
        np.tensordot(windows, weight, ([1, 4, 5], [1, 2, 3])).transpose(0, 3, 1, 2)
        + bias[:, None, None]
    )


def plain_pool(x):
    return sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2].max(axis=(4, 5))


def plain_adaptive(x, side):
    """Average bins over the last two axes."""
    height, width = x.shape[-2:]
    out = np.zeros((*x.shape[:-2], side, side), x.dtype)
    for i in range(side):
        for j in range(side):
            rows = slice(int(np.floor(i * height / side)), int(np.ceil((i + 1) * height / side)))
            columns = slice(int(np.floor(j * width / side)), int(np.ceil((j + 1) * width / side)))
            out[..., i, j] = x[..., rows, columns].mean(axis=(-2, -1))
    return out


def plain_alexnet(tensors, images):
    """Return conv5 and pooled_conv in float64."""
    layers = {k: (tensors[f"features.{k}.weight"], tensors[f"features.{k}.bias"]) for k in LAYERS}
    x = (images / 255.0 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    x = x.transpose(0, 3, 1, 2)
    x = plain_pool(np.maximum(plain_conv(x, *layers[0], 4, 2), 0))
    x = plain_pool(np.maximum(plain_conv(x, *layers[3], 1, 2), 0))
    x = np.maximum(plain_conv(x, *layers[6], 1, 1), 0)
    x = np.maximum(plain_conv(x, *layers[8], 1, 1), 0)
    conv5 = plain_conv(x, *layers[10], 1, 1)
    pooled = plain_adaptive(plain_pool(np.maximum(conv5, 0)), 6)
    return conv5.reshape(len(images), -1), pooled.reshape(len(images), -1)


def test_both_convolutional_features_equal_numpys(tensors):
    conv5, pooled = plain_alexnet(tensors, IMAGES)
    params = from_torchvision(tensors, SMALL)
    np.testing.assert_allclose(
        run(SMALL, params, IMAGES), pooled, rtol=0, atol=1e-5 * np.abs(pooled).max()
    )
    np.testing.assert_allclose(
        run(CONV5, params, IMAGES), conv5, rtol=0, atol=1e-5 * np.abs(conv5).max()
    )
    assert (conv5 < 0).any() and (pooled >= 0).all()


def test_an_answer_does_not_depend_on_its_company(tensors):
    params = from_torchvision(tensors, SMALL)
    together = run(SMALL, params, IMAGES)
    other = run(SMALL, params, np.stack([IMAGES[0], 255 - IMAGES[1], IMAGES[0]]))
    np.testing.assert_array_equal(other[0], together[0])
    np.testing.assert_allclose(run(SMALL, params, IMAGES[:1])[0], together[0], rtol=0, atol=1e-5)


def test_normalised_floats_are_taken_as_they_are(tensors):
    params = from_torchvision(tensors, SMALL)
    normalised = ((IMAGES / 255.0 - SMALL.mean) / SMALL.std).astype(np.float32)
    np.testing.assert_allclose(
        run(SMALL, params, normalised), run(SMALL, params, IMAGES), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 4), (6, 6), (7, 13), (12, 6)])
def test_adaptive_pooling_averages_torchs_bins(shape):
    x = np.random.default_rng(0).standard_normal((2, 3, *shape)).astype(np.float32)
    result = adaptive_average_pool(jnp.asarray(x.transpose(0, 2, 3, 1)), 6)
    np.testing.assert_allclose(
        result, plain_adaptive(x, 6).transpose(0, 2, 3, 1), rtol=0, atol=1e-6
    )


def test_bins_of_seven_rows_in_three_overlap():
    # rows 0-2, 2-4 and 4-6 of 7: floor(7 i / 3) to ceil(7 (i + 1) / 3)
    rows = jnp.arange(7.0)[None, :, None, None] * jnp.ones((1, 7, 7, 1))
    np.testing.assert_allclose(adaptive_average_pool(rows, 3)[0, :, 0, 0], [1, 3, 5], rtol=1e-6)


@pytest.mark.parametrize(
    ("size", "sides", "widths"),
    [
        (224, (55, 27, 13, 13, 13), (9216, 43_264)),
        (96, (23, 11, 5, 5, 5), (9216, 6400)),
        (63, (15, 7, 3, 3, 3), (9216, 2304)),
    ],
)
def test_maps_and_features_have_torchvisions_sizes(size, sides, widths):
    configs = [AlexNetConfig(size), AlexNetConfig(size, "conv5")]
    assert alexnet.map_sides(configs[0]) == sides
    assert tuple(config.width for config in configs) == widths
    for config in configs:
        outputs = nnx.eval_shape(
            lambda images, config=config: alexnet.AlexNet(config, nnx.Rngs(0))(images),
            jax.ShapeDtypeStruct((2, size, size, 3), np.uint8),
        )
        assert outputs.shape == (2, config.width) and outputs.dtype == np.float32


@pytest.mark.parametrize("feature", ["pooled_conv", "conv5"])
def test_flops_at_224_are_655_million_multiply_adds_of_convolutions(feature):
    # 70.3 + 224.0 + 112.1 + 149.5 + 99.7 M
    assert alexnet.flops(AlexNetConfig(feature=feature)) == 2 * 655_566_528


def test_parameters_are_torchvisions():
    assert sum(int(np.prod(shape)) for shape in shapes_of(SMALL).values()) == 2_469_696
    assert {to_torchvision_name(name) for name in shapes_of(SMALL)} == {
        f"features.{index}.{leaf}" for index in LAYERS for leaf in ("weight", "bias")
    }


@pytest.mark.parametrize("make", [AlexNetConfig, lambda size: load_alexnet(None, image_size=size)])
def test_the_smallest_image_has_63_pixels(make):
    with pytest.raises(ValueError, match="AlexNet needs images of at least 63 pixels, got 62"):
        make(62)


def test_images_of_another_size_are_refused(tensors):
    built = build_alexnet(SMALL, from_torchvision(tensors, SMALL))
    with pytest.raises(ValueError, match="images of 64 x 64 pixels, expected 63 x 63"):
        built(jnp.zeros((1, 64, 64, 3), np.uint8))


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_file_under_torchvisions_names_is_read_in_float32_with_its_hash(
    tmp_path, tensors, suffix
):
    file = tmp_path / f"alexnet.{suffix}"
    halves = {name: value.astype(np.float16) for name, value in tensors.items()}
    if suffix == "npz":
        np.savez(file, allow_pickle=False, **halves)
    else:
        safetensors.numpy.save_file(halves, file)
    loaded = load_alexnet(file, image_size=63, feature="conv5")
    assert (loaded.config, loaded.source) == (CONV5, file.name)
    assert loaded.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert {value.dtype for value in loaded.params.values()} == {np.dtype(np.float32)}
    kernel = halves["features.3.weight"].astype(np.float32)
    np.testing.assert_array_equal(loaded.params["conv2.kernel"], kernel.transpose(2, 3, 1, 0))
    np.testing.assert_array_equal(
        loaded.params["conv5.bias"], halves["features.10.bias"].astype(np.float32)
    )


def test_a_converted_file_passes_on_its_origin_and_leaves_an_unused_classifier_alone(
    tmp_path, tensors
):
    file = tmp_path / "alexnet.safetensors"
    metadata = {"format": FORMAT, "source": "alexnet.pth", "sha256": "ab" * 32}
    safetensors.numpy.save_file(
        tensors | {"classifier.6.bias": np.zeros(7, np.float32)}, file, metadata
    )
    loaded = load_alexnet(file)
    assert (loaded.source, loaded.sha256) == ("alexnet.pth", "ab" * 32)
    assert loaded.params.keys() == shapes_of(AlexNetConfig()).keys()


def test_weights_of_another_network_are_refused_in_one_message(tmp_path, tensors):
    wrong = {name: value for name, value in tensors.items() if name != "features.0.bias"}
    wrong |= {
        "layer1.weight": np.zeros(3, np.float32),
        "features.3.weight": np.zeros((5, 4, 3, 2), np.float32),
    }
    safetensors.numpy.save_file(wrong, tmp_path / "other.safetensors")
    with pytest.raises(ValueError) as error:
        load_alexnet(tmp_path / "other.safetensors")
    message = str(error.value)
    assert message.startswith("other.safetensors: ")
    assert "python convert/torchvision_alexnet.py" in message
    assert (
        "missing: features.0.bias; unexpected: layer1.weight; misshapen: features.3.weight is"
        in message
    )
    assert "(5, 4, 3, 2), expected (192, 64, 5, 5)" in message


def test_building_from_parameters_that_do_not_fit_names_them(tensors):
    params = from_torchvision(tensors, SMALL)
    with pytest.raises(
        ValueError, match=r"missing: conv1.bias; misshapen: conv2.bias is \(1,\), expected \(192,\)"
    ):
        build_alexnet(
            SMALL,
            {k: v for k, v in params.items() if k != "conv1.bias"} | {"conv2.bias": np.zeros(1)},
        )


@pytest.mark.parametrize(
    ("name", "kind", "shown"),
    [
        (None, ValueError, "are not part of the package"),
        ("none.safetensors", FileNotFoundError, "none.safetensors. does not exist"),
        ("alexnet.pth", ValueError, "expected a .safetensors or .npz file.*--checkpoint"),
        ("broken.safetensors", ValueError, "broken.safetensors is not a readable safetensors file"),
    ],
)
def test_an_unreadable_checkpoint_is_named_with_the_command_that_gets_it(
    tmp_path, name, kind, shown
):
    for existing in ("alexnet.pth", "broken.safetensors"):
        (tmp_path / existing).write_bytes(b"\x01garbage" * 9)
    with pytest.raises(kind, match=shown) as error:
        load_alexnet(None if name is None else tmp_path / name)
    assert (
        name == "broken.safetensors"
        or "convert/torchvision_alexnet.py --output alexnet.safetensors" in str(error.value)
    )
