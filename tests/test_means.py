import numpy as np
import pytest
from flax import nnx

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build, shapes_of
from cheem_jax.core.ops import Reuse

NANO = CONFIGS["vit_nano"]
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def nano():
    rng = np.random.default_rng(1)
    return build(
        NANO,
        {
            name: (name.endswith("scale") + 0.1 * rng.standard_normal(shape)).astype(np.float32)
            for name, shape in shapes_of(NANO).items()
        },
    )


@pytest.mark.full
def test_base_means_are_the_mean_cls_tokens_of_component_and_block(nano):
    @nnx.jit(static_argnames="placement")
    def class_tokens(vit, images, placement):
        x = vit.embed(images)
        result = []
        for block in vit.blocks:
            x, component = block.run(Reuse(block.expert(placement)), x, placement=placement)
            result.append((component[:, 0], x[:, 0]))
        return result

    means = base_means(nano, IMAGES, batch_size=3)
    assert len(means) == 4
    for placement in ("mlp_down", "attn_proj"):
        result = class_tokens(nano, IMAGES, placement)
        for position, token in enumerate(("component", "block")):
            expected = np.stack([np.mean(tokens[position], axis=0) for tokens in result])
            measured = means[f"32/{placement}/{token}"]
            assert measured.dtype == np.float32
            np.testing.assert_allclose(measured, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_base_means_do_not_depend_on_how_the_images_fall_into_batches(nano):
    whole = base_means(nano, IMAGES, batch_size=7)
    for key, mean in base_means(nano, IMAGES, batch_size=4).items():
        np.testing.assert_allclose(mean, whole[key], rtol=1e-5, atol=1e-5)


def test_base_means_compile_one_function_for_full_and_partial_batches(nano, compilations):
    with compilations() as programs:
        base_means(nano, IMAGES, batch_size=5)
    assert programs.count == 1
    with compilations() as programs:
        base_means(nano, IMAGES[:2], batch_size=5)
    assert programs.count == 0


@pytest.mark.parametrize("shape", [(0, 32, 32, 3), (2, 40, 40, 3)])
def test_base_means_refuse_images_of_another_size_or_none(nano, shape):
    with pytest.raises(ValueError, match="need images of 32x32 pixels"):
        base_means(nano, np.zeros(shape, np.uint8))
