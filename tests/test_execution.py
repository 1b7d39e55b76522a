"""Composed stages equal the whole network, compile nothing new for a new architecture, and share
prefixes exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cheem.training import ADAPT, dense_network, prepare, train_step
from cheem_jax.core.architecture import decode, from_strings
from cheem_jax.core.device import CPU, Device
from cheem_jax.core.ops import Reuse
from cheem_jax.core.pool import dense_experts, grow
from cheem_jax.engine.batches import batches
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.executor import Batch, Dense, masked_logits
from cheem_jax.engine.feed import HostImages
from cheem_jax.engine.passes import classes_and_features, count_correct, token_means
from cheem_jax.engine.stages import Stages

VIT = small.backbone()
STAGES = {placement: Stages(VIT, placement) for placement in ("mlp_down", "attn_proj")}
IMAGES = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)
LABELS = (np.arange(16) % 3).astype(np.int32)
MASK = np.ones(16, np.float32)


def supernet_of(stages, num_classes=3, grown=True):
    """Return a supernet over the base pool, with one added expert per block if `grown`."""
    pool = stages.base_pool
    if grown:
        first = Supernet(jax.random.key(9), dense_experts(pool), 3, OpSettings(rank=2))
        adapted = from_strings(["adapt:0"] * 4)
        pool, _ = grow(pool, adapted, first.learned(first.init(), adapted), 0)
    return Supernet(jax.random.key(1), dense_experts(pool), num_classes, OpSettings(rank=2))


@pytest.mark.parametrize("placement", ["mlp_down", "attn_proj"])
def test_a_network_of_only_reuse_is_the_plain_backbone_bit_for_bit(placement):
    stages = STAGES[placement]
    network = [Dense(0, block[0].params) for block in stages.base_pool]
    (walked,) = stages.walk([network], stages.begin(IMAGES), MASK)
    plain = jax.jit(lambda images: VIT(images), compiler_options=jit_options("float32"))(IMAGES)
    np.testing.assert_array_equal(stages.features(walked.tokens), plain)


def test_skip_everywhere_leaves_the_attention_only_or_the_ffn_only_network():
    @jax.jit
    def attention_only(images):
        x = VIT.embed(images)
        for block in VIT.blocks:
            x = x + block.proj(block.mix_tokens(x))
        return VIT.features(x)

    @jax.jit
    def ffn_only(images):
        x = VIT.embed(images)
        for block in VIT.blocks:
            x = x + block.down(block.mix_channels(x))
        return VIT.features(x)

    for placement, expected in (("mlp_down", attention_only), ("attn_proj", ffn_only)):
        stages = STAGES[placement]
        (walked,) = stages.walk([[Dense(-1, None)] * 4], stages.begin(IMAGES), MASK)
        assert list(walked.sums) == [None] * 4
        np.testing.assert_allclose(stages.features(walked.tokens), expected(IMAGES), atol=1e-5)


# an accelerator scores 40 images in two calls of 24
@pytest.mark.parametrize("device", [CPU, Device(is_host=False, forward_sizes=(24,))])
@pytest.mark.parametrize("placement", ["mlp_down", "attn_proj"])
def test_a_new_architecture_and_a_new_task_of_the_same_bucket_compile_nothing(
    compilations, device, placement
):
    stages = Stages(VIT, placement, device=device)
    images = np.resize(IMAGES, (40, *IMAGES.shape[1:]))
    prepare(stages, supernet_of(stages), 16, len(images))
    rng = np.random.default_rng(0)
    other = supernet_of(stages, num_classes=4)
    prepare(stages, other, 16, len(images))
    with compilations() as programs:
        for supernet in (supernet_of(stages, grown=False), other):
            state = supernet.init()
            reused = [0] * len(supernet.sizes)
            without = [reused, [*reused[:-1], 2 * supernet.sizes[-1] + 1]]  # nothing learns
            for num in range(12):
                codes = [int(rng.integers(0, 2 * n + 2)) for n in supernet.sizes]
                codes = without[num] if num < 2 else codes
                step = [Batch(stages.begin(IMAGES), LABELS, MASK / 16)]
                state, _ = train_step(
                    stages, supernet, state, decode(codes, supernet.sizes), step, rate=1e-3
                )
                network = dense_network(supernet, state, np.array(codes), {})
                count_correct(
                    stages,
                    [network],
                    state.head.params,
                    HostImages(stages, images),
                    np.resize(LABELS, len(images)),
                    num_classes=3,
                    batch_size=16,
                    advance=lambda num, note="": None,
                )
    assert programs.count == 0


@pytest.mark.parametrize("device", [CPU, Device(is_host=False, forward_sizes=(24,))])
def test_without_new_only_adapt_is_compiled_for_training(compilations, device):
    with compilations() as programs:
        everything = Stages(VIT, "mlp_down", device=device)
        prepare(everything, supernet_of(everything), 16)
    stages = Stages(VIT, "mlp_down", device=device)
    supernet = supernet_of(stages)
    with compilations() as fewer:
        prepare(stages, supernet, 16, learnable=(ADAPT,))
    assert 0 < fewer.count < programs.count
    state = supernet.init()
    with compilations() as none:
        for text in (
            "adapt:1 skip adapt:0 skip",
            "skip skip adapt:1 adapt:0",
            "skip skip skip skip",
        ):
            step = [Batch(stages.begin(IMAGES), LABELS, MASK / 16)]
            architecture = from_strings(text.split())
            state, _ = train_step(stages, supernet, state, architecture, step, rate=1e-3)
    assert none.count == 0


def test_a_call_has_the_largest_divisor_of_the_batch_that_fits_the_working_set():
    stages = STAGES["mlp_down"]
    image = 4 * VIT.config.num_tokens * VIT.config.mlp_width
    rows = [stages.rows(12, num * image) for num in (0, 1, 2, 4, 5, 6, 11, 12)]
    assert rows == [1, 1, 2, 4, 4, 6, 6, 12]


def test_networks_that_share_prefixes_compute_exactly_the_same_as_alone():
    stages = STAGES["mlp_down"]
    supernet = supernet_of(stages)
    rng = np.random.default_rng(1)
    genomes = np.array([[rng.integers(0, 6) for _ in range(4)] for _ in range(10)])
    genomes[5:8, :3] = genomes[5, :3]
    networks = [dense_network(supernet, supernet.init(), codes, {}) for codes in genomes]
    together = {w.index: w for w in stages.walk(networks, stages.begin(IMAGES), MASK)}
    assert sorted(together) == list(range(10))
    for index, network in enumerate(networks):
        (alone,) = stages.walk([network], stages.begin(IMAGES), MASK)
        np.testing.assert_array_equal(together[index].tokens, alone.tokens)
        for a, b in zip(together[index].sums, alone.sums, strict=True):
            assert (a is None and b is None) or np.array_equal(a, b)


def test_mean_tokens_of_the_base_equal_a_plain_average():
    stages = STAGES["mlp_down"]
    network = [Dense(0, block[0].params) for block in stages.base_pool]
    images = np.concatenate([IMAGES, IMAGES[:5]])  # the last batch is padded
    networks = [network, [*network[:2], Dense(-1, None), network[3]]]
    feed = HostImages(stages, images)
    passed = []
    result = token_means(
        stages,
        networks,
        feed,
        len(images),
        batch_size=16,
        advance=lambda num, note="": passed.append(num),
    )
    assert sum(passed) == 2 * 21

    @jax.jit
    def components(images):
        x = VIT.embed(images)
        tokens = []
        for block in VIT.blocks:
            x, component = block.run(Reuse(block.expert("mlp_down")), x, placement="mlp_down")
            tokens.append(component[:, 0])
        return tokens, VIT.features(x)

    tokens, features = components(images)
    np.testing.assert_allclose(result.means[0], [t.mean(axis=0) for t in tokens], atol=1e-5)
    np.testing.assert_allclose(result.features, features, atol=1e-5)
    assert not result.means[1, 2].any() and result.means[1, 3].any()


def test_the_block_output_can_be_the_token():
    stages = Stages(VIT, "mlp_down", token="block")
    (walked,) = stages.walk(
        [[Dense(0, b[0].params) for b in stages.base_pool]], stages.begin(IMAGES), MASK
    )
    np.testing.assert_allclose(
        walked.sums[-1], np.asarray(walked.tokens)[:, 0].sum(axis=0), rtol=1e-4, atol=1e-4
    )


def test_an_image_gets_the_same_answer_in_different_company():
    stages = STAGES["mlp_down"]
    supernet = supernet_of(stages)
    state = supernet.init()
    network = dense_network(supernet, state, np.array([0, 1, 3, 0]), {})
    head = state.head.params
    sizes = {"num_classes": 3, "batch_size": 16}

    def classes(images):
        feed = HostImages(stages, images)
        [answers] = classes_and_features(stages, [network], head, feed, num=len(images), **sizes)
        return answers

    together = classes(IMAGES)
    alone = [classes(IMAGES[i : i + 1])[0] for i in range(16)]
    np.testing.assert_array_equal(together, alone)


def test_padding_of_the_head_never_wins():
    head = supernet_of(STAGES["mlp_down"]).init().head.params
    logits = masked_logits(head._replace(bias=head.bias.at[3].set(1e6)), jnp.ones((2, 16)), 3)
    assert (logits.argmax(axis=-1) < 3).all()


def test_batches_cover_every_row_once_and_mask_the_padding():
    order = np.arange(10)[::-1]
    result = list(batches(order, 4))
    assert [b.size for b in result] == [4, 4, 2]
    assert [int(b.mask.sum()) for b in result] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([b.rows[: b.size] for b in result]), order)
