"""FLOPs by the paper's convention: worked numbers of its tables."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from cheem_jax.backbone import flops
from cheem_jax.backbone.config import at_image_size, find_config
from cheem_jax.backbone.params import build, shapes_of
from cheem_jax.core.architecture import from_strings
from cheem_jax.core.ops import Reuse


@pytest.mark.parametrize(
    "backbone, plain, with_attention, ffn, attention",
    [
        ("vit_base", 33.695465472, 35.126120448, 1.8591, 0.9296),
        ("deit_tiny", 2.149318656, 2.5069824, 0.11620, 0.05810),
    ],
)
def test_the_papers_flops_are_reproduced(backbone, plain, with_attention, ffn, attention):
    config = find_config(backbone)
    assert flops.backbone_flops(config) / 1e9 == pytest.approx(plain, abs=1e-12)
    assert flops.backbone_flops(config, count_attention=True) / 1e9 == pytest.approx(
        with_attention, abs=1e-12
    )
    assert flops.branch_flops(config, "mlp_down") / 1e9 == pytest.approx(ffn, rel=1e-4)
    assert flops.branch_flops(config, "attn_proj") / 1e9 == pytest.approx(attention, rel=1e-4)


def test_the_flops_of_deit_tiny_are_those_of_the_products_of_its_forward_pass():
    """Counts the multiply-adds of every matrix product and convolution that JAX traces."""
    config = find_config("deit_tiny")
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes_of(config).items()}
    graphdef, state = nnx.split(build(config, params))

    def features(state, images):
        vit = nnx.merge(graphdef, state)
        x = vit.embed(images)
        for block in vit.blocks:
            x, _ = block.run(Reuse(block.expert("mlp_down")), x, placement="mlp_down")
        return vit.features(x)

    def count(jaxpr) -> int:
        total = 0
        for equation in jaxpr.eqns:
            result = equation.outvars[0].aval.shape
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                shapes = [operand.aval.shape for operand in equation.invars]
                length = math.prod(shapes[0][axis] for axis in contracted)
                # the means of a LayerNorm are products with a vector
                if length not in map(math.prod, shapes):
                    total += 2 * math.prod(result) * length
            elif equation.primitive.name == "conv_general_dilated":
                weights = equation.invars[1].aval.shape
                outputs = equation.params["dimension_numbers"].rhs_spec[0]
                total += 2 * math.prod(result) * math.prod(weights) // weights[outputs]
            for value in equation.params.values():
                total += count(value.jaxpr) if hasattr(value, "jaxpr") else 0
        return total

    images = np.zeros((1, 224, 224, 3), np.float32)
    traced = count(jax.make_jaxpr(features)(state, images).jaxpr)
    assert traced == flops.backbone_flops(config, count_attention=True)
    # by hand: 196 patches of 16 x 16 x 3 values, and 197 tokens of width 192 in 12 blocks
    projections = 2 * 197 * 4 * 192 * 192
    products = 2 * 2 * 197 * 197 * 192
    ffn = 2 * 197 * 2 * 192 * 768
    assert traced == 2 * 196 * 768 * 192 + 12 * (projections + products + ffn) == 2_506_982_400


def test_a_task_network_pays_for_its_own_adapt_only():
    config = find_config("deit_tiny")
    mixed = from_strings(["reuse:3", "adapt:1", "new", "skip"] + ["reuse:0"] * 8)
    expected = 2149318656 - 2 * 197 * 8 * 192**2 + 2 * 197 * 40 * 5 * 192
    assert flops.network_flops(config, "mlp_down", mixed, 40) == expected


def test_flops_are_counted_block_by_block():
    config = find_config("deit_tiny")
    tokens = 197
    width = 192
    embed = 2 * 196 * 768 * 192
    attention = 2 * (4 * tokens * width**2 + 2 * tokens**2 * width)
    ffn = 2 * tokens * 8 * width**2
    # the last block: keys and values of all tokens, everything else of the class token
    last = 2 * (2 * tokens * width**2 + 2 * width**2 + 2 * tokens * width) + 2 * 8 * width**2
    assert flops.executed_backbone_flops(config) == embed + 11 * (attention + ffn) + last
    mixed = from_strings(["reuse:3", "adapt:1", "new", "skip"] + ["reuse:0"] * 8)
    # pairs merged, the skipped FFN saved, a head of 10
    executed = embed + 11 * attention + 10 * ffn + last + 2 * width * 10
    assert flops.executed_flops(config, "mlp_down", mixed, 10) == executed
    # resumed at block 2, its attention half and all earlier layers are the base network's
    resumed = 8 * attention + 8 * ffn + last + 2 * width * 10
    assert flops.executed_flops(config, "mlp_down", mixed, 10, begin=2) == resumed
    assert flops.executed_flops(config, "mlp_down", mixed, 10, begin=12) == 2 * width * 10
    # the first block's attention half is the base network's too
    assert (
        flops.executed_flops(config, "mlp_down", mixed, 10, begin=0) == executed - embed - attention
    )


def test_skipping_every_attention_branch_leaves_no_attention_product():
    config = find_config("deit_tiny")
    skipped = flops.executed_flops(config, "attn_proj", from_strings(["skip"] * 12), 0)
    embed, ffn = 2 * 196 * 768 * 192, 2 * 197 * 8 * 192**2
    assert skipped == embed + 11 * ffn + ffn // 197


@pytest.mark.parametrize(
    "backbone", ["deit_tiny", "clip_vit_base", "dinov3_small", "siglip_base", "vit_nano"]
)
@pytest.mark.parametrize("scale", [1, 2])
def test_the_parameter_count_is_that_of_the_module(backbone, scale):
    config = find_config(backbone)
    config = at_image_size(config, scale * config.image_size)
    counted = 0
    for name, shape in shapes_of(config).items():
        size = 1
        for length in shape:
            size *= length
        counted += 0 if name.startswith("head") else size
    assert flops.backbone_params(config) == counted
