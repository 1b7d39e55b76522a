"""AlexNet as the encoder of a router."""

import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.backbone.alexnet import AlexNet, AlexNetConfig, build_alexnet, shapes_of
from cheem_jax.baselines.alexnet_encoder import AlexNetEncoder
from cheem_jax.run.method import Encoder, FrozenFeatures

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 63, 63, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def network() -> AlexNet:
    config = AlexNetConfig(63, "conv5")
    rng = np.random.default_rng(1)
    return build_alexnet(
        config,
        {
            name: rng.standard_normal(shape, np.float32) * (2 / max(np.prod(shape[:-1]), 2)) ** 0.5
            for name, shape in shapes_of(config).items()
        },
    )


def test_the_encoder_returns_the_networks_features_and_its_cost(network):
    encoder = AlexNetEncoder(network)
    assert isinstance(encoder, Encoder) and (encoder.name, encoder.width) == ("alexnet", 2304)
    sizes = []
    result = FrozenFeatures(encoder, 4)(IMAGES, lambda num, note="", /: sizes.append(num))
    assert sizes == [4, 3]  # a stop is possible after each batch
    assert result.shape == (7, 2304) and result.dtype == np.float32
    wanted = np.asarray(network(jnp.asarray(IMAGES)))
    np.testing.assert_allclose(
        result, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max()
    )  # which is above 10
    assert np.abs(result[0] - result[1]).max() > 1e-3
    # 15, 7, 3, 3 and 3 pixels a side
    products = 15**2 * 23_232 + 7**2 * 307_200 + 9 * (663_552 + 884_736 + 589_824)
    assert (
        encoder.flops()
        == encoder.flops(count_attention=True)
        == encoder.executed_flops()
        == 2 * products
    )


def test_every_batch_size_shares_one_compiled_function_and_features_do_not_depend_on_the_batch(
    network, compilations
):
    features = FrozenFeatures(AlexNetEncoder(network), 4)
    together = features(IMAGES)
    with compilations() as programs:
        np.testing.assert_array_equal(features(IMAGES[2:]), together[2:])
        np.testing.assert_array_equal(features(IMAGES[::-1])[::-1], together)
    assert programs.count == 0
