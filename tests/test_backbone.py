import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cheem_jax.backbone.config import CONFIGS, at_image_size, find_config
from cheem_jax.backbone.params import build, check_params, get_params, init_params, shapes_of
from cheem_jax.backbone.vit import rotate, rotations
from cheem_jax.backbone.weights import Pretrained, load_pretrained, resize
from cheem_jax.core.ops import Reuse

NANO = CONFIGS["vit_nano"]


@pytest.fixture(scope="module")
def nano():
    """A nano backbone with random biases and scales, so that a forgotten one is noticed."""
    rng = np.random.default_rng(0)
    return build(NANO, {name: _random(rng, name, shape) for name, shape in shapes_of(NANO).items()})


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return (name.endswith("scale") + 0.1 * rng.standard_normal(shape)).astype(np.float32)


def _images(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)


def test_deit_tiny_agrees_with_the_float64_reference_in_every_block_and_in_the_logits(shared):
    pretrained = load_pretrained(
        "deit_tiny", weights=shared / "weights" / "deit_tiny_patch16_224.fp16.safetensors"
    )
    graphdef, state = nnx.split(build(pretrained.config, pretrained.params))

    @jax.jit
    def outputs(state, images):
        vit = nnx.merge(graphdef, state)
        x = vit.embed(images)
        result = {"embed_first5": x[:, :5]}
        class_tokens = []
        for block in vit.blocks:
            x, _ = block.run(Reuse(block.expert("mlp_down")), x, placement="mlp_down")
            class_tokens.append(x[:, 0])
        features = vit.features(x)
        return result | {
            "cls_after_block": jnp.stack(class_tokens, axis=1),
            "tokens_normed_first5": vit.norm(x)[:, :5],
            "features": features,
            "logits": vit.logits(features),
        }

    images = np.random.default_rng(0).standard_normal((2, 224, 224, 3)).astype(np.float32)
    result = outputs(state, images)
    with np.load(shared / "weights" / "deit_tiny_reference.npz", allow_pickle=False) as reference:
        assert set(result) <= set(reference)
        for name, value in result.items():
            np.testing.assert_allclose(value, reference[name], rtol=0, atol=1e-4, err_msg=name)


def test_uint8_images_are_normalised_by_the_mean_and_std_of_the_weights(nano):
    config = dataclasses.replace(NANO, mean=(0.1, 0.4, 0.6), std=(0.2, 0.3, 0.5))
    vit = build(config, get_params(nano))
    images = _images(2, 32, 32)
    floats = ((images / 255.0 - np.array(config.mean)) / np.array(config.std)).astype(np.float32)
    embed = nnx.jit(lambda vit, images: vit.embed(images))
    np.testing.assert_allclose(embed(vit, images), embed(vit, floats), rtol=0, atol=1e-5)


def test_patches_are_read_row_by_row_and_each_in_height_width_channel_order(nano):
    images = np.random.default_rng(2).standard_normal((1, 32, 32, 3)).astype(np.float32)
    params = get_params(nano)
    patch = images[0, 8:16, 16:24].reshape(
        -1
    )  # row 1 and column 2 of a 4 x 4 grid: patch 6, token 7
    expected = patch @ params["patch.kernel"] + params["patch.bias"] + params["position"][7]
    tokens = nnx.jit(lambda vit, images: vit.embed(images))(nano, images)
    np.testing.assert_allclose(tokens[0, 7], expected, rtol=0, atol=1e-5)


def test_rotated_products_depend_on_offsets_and_class_token_and_registers_do_not_turn():
    cos, sin = rotations(100.0, 5, 3 + 25, 16)
    tokens = np.random.default_rng(4).standard_normal((2, 1, 1, 1, 16)).astype(np.float32)
    query, key = (
        np.asarray(rotate(jnp.broadcast_to(t, (1, 1, 28, 16)), cos, sin))[0, 0] for t in tokens
    )
    np.testing.assert_array_equal(query[:3], np.broadcast_to(tokens[0, 0, 0], (3, 16)))
    products = (query[3:] @ key[3:].T).reshape(
        5, 5, 5, 5
    )  # row and column of the query, then of the key
    np.testing.assert_allclose(products[:-1, :-1, :-1, :-1], products[1:, 1:, 1:, 1:], atol=1e-4)
    one = products[2, 2, 2, 2]
    right = products[2, 2, 2, 3]
    below = products[2, 2, 3, 2]
    rest = products[2, 2, 2, 1]
    assert min(abs(np.diff(sorted([one, right, below, rest])))) > 1e-2


@pytest.mark.full
def test_a_rotary_backbone_has_no_position_embedding_and_keeps_its_weights_at_another_image_size():
    config = dataclasses.replace(NANO, rotary=100.0, num_registers=4)
    params = init_params(config, jax.random.key(0))
    sized = resize(Pretrained(config, params, "", ""), 64)
    assert "position" not in params and sized.params is params
    images, moved = _images(1, 64, 64), _images(1, 64, 64)
    moved[:, :8], moved[:, 8:] = images[:, -8:], images[:, :-8]  # the same patches in another order
    forward = nnx.jit(lambda vit, images: vit(images))
    vit = build(sized.config, sized.params)
    assert np.abs(forward(vit, images) - forward(vit, moved)).max() > 1e-3


def test_params_survive_the_way_through_a_module(nano):
    params = get_params(nano)
    again = get_params(build(NANO, params))
    assert params.keys() == again.keys() == shapes_of(NANO).keys()
    for name, value in params.items():
        np.testing.assert_array_equal(value, again[name])


def test_one_message_lists_every_missing_unexpected_and_misshapen_parameter(nano):
    params = get_params(nano)
    for index in (0, 1, 2, 4):
        del params[f"blocks.{index}.up.bias"]
    params["extra"] = np.zeros(3, np.float32)
    params["norm.scale"] = np.zeros(7, np.float32)
    with pytest.raises(ValueError) as error:
        check_params(NANO, params)
    message = str(error.value)
    assert "missing: blocks.*.up.bias (of 4 blocks);" in message
    assert "unexpected: extra;" in message
    assert "misshapen: norm.scale is (7,), expected (48,)" in message


@pytest.mark.full
def test_random_weights_start_as_timm_starts_a_vit():
    params = init_params(NANO, jax.random.key(0))
    check_params(NANO, params)
    assert np.all(params["blocks.0.norm1.scale"] == 1) and np.all(params["norm.bias"] == 0)
    kernel = params["blocks.0.up.kernel"]
    assert np.abs(kernel).max() <= 0.04
    np.testing.assert_allclose(
        kernel.std(), 0.02 * 0.8796, rtol=0.05
    )  # standard deviation of N(0, 1) cut at 2
    assert not np.array_equal(kernel, params["blocks.1.up.kernel"])


def test_an_unknown_backbone_is_answered_with_the_nearest_names():
    with pytest.raises(ValueError, match="unknown backbone 'deit_tinny'; most similar: deit_tiny"):
        find_config("deit_tinny")


def test_an_image_size_off_the_patch_grid_is_answered_with_its_neighbours():
    with pytest.raises(
        ValueError, match="100 is not a multiple of deit_tiny's patch size 16; try 96 or 112"
    ):
        at_image_size(CONFIGS["deit_tiny"], 100)
    with pytest.raises(ValueError, match="4112 is too large; expected at most 4096 pixels"):
        at_image_size(CONFIGS["deit_tiny"], 4112)


def test_a_backbone_without_a_head_says_so(nano):
    with pytest.raises(ValueError, match="vit_nano has no pretrained head"):
        nano.logits(jnp.zeros((1, 48)))
