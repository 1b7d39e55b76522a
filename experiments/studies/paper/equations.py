"""Worked examples of the paper's equations and algorithms.

Each example returns the library's numbers, those of a few independent lines of NumPy, and the
largest accepted difference.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf, ndtr, softmax

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.flops import network_flops
from cheem_jax.backbone.means import base_means
from cheem_jax.backbone.params import build
from cheem_jax.backbone.vit import Block, ViT
from cheem_jax.backbone.weights import load_pretrained
from cheem_jax.baselines.heads import Classes
from cheem_jax.cheem import hee
from cheem_jax.cheem.config import PAPER
from cheem_jax.cheem.evolution import Scored, crossover, mutate, rank
from cheem_jax.cheem.training import supernet_draws
from cheem_jax.core import metrics
from cheem_jax.core.architecture import candidates, from_strings
from cheem_jax.core.ops import Adapt, Expert, LowRank, Reuse, apply_op, merge
from cheem_jax.core.pool import base_pool, dense_expert, grow
from cheem_jax.core.routing import centroid_distances, fit_centroids
from studies.heads.theory import match_probability
from studies.paper.printed import Cell, printed

Example = Callable[[], "Worked"]


class Worked(NamedTuple):
    """Result of an example."""

    ours: ArrayLike | None
    formula: ArrayLike
    tolerance: float = 1e-4


SIMILARITY = np.array([0.6, -0.2, np.nan])
"""S of three earlier tasks in one block; the last task skips the block."""


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def random_expert(num_inputs: int = 6, width: int = 4) -> Expert:
    return Expert(random(num_inputs, width), random(width))


def pair() -> LowRank:
    return LowRank(random(6, 2), random(2, 4))


def vit() -> ViT:
    pretrained = load_pretrained("vit_nano")
    return build(pretrained.config, pretrained.params)


def norm(layer, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer.epsilon)
    return x * np.asarray(layer.scale[...]) + np.asarray(layer.bias[...])


def linear(layer, x):
    return x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...])


def mhsa(block: Block, x):
    query, key, value = (
        np.stack(np.split(part, block.num_heads, axis=-1))
        for part in np.split(linear(block.qkv, norm(block.norm1, x)), 3, axis=-1)
    )
    share = softmax(query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1]), axis=-1)
    return np.concatenate([*(share @ value)], axis=-1)


def ffn(block: Block, z):
    hidden = linear(block.up, norm(block.norm2, z))
    return linear(block.down, hidden * ndtr(hidden))


def attention_half() -> Worked:
    """z = x + Proj(MHSA(LN1 x)), for the CLS token of the first block."""
    model = vit()
    x = random(1, 5, model.config.width)
    block = model.blocks[0]
    z = x[0] + linear(block.proj, mhsa(block, np.asarray(x[0])))
    return Worked(block.enter(x, placement="mlp_down")[0, 0, :3], z[0, :3])


def ffn_half() -> Worked:
    """y = z + FFN(LN2 z), for the CLS token of the first block."""
    model = vit()
    x = random(1, 5, model.config.width)
    block = model.blocks[0]
    y, _ = block.run(Reuse(block.expert("mlp_down")), x, placement="mlp_down")
    z = x[0] + linear(block.proj, mhsa(block, np.asarray(x[0])))
    return Worked(y[0, 0, :3], (z + ffn(block, z))[0, :3])


def mean_token() -> Worked:
    """mu of the first block: the mean over three images of the CLS token after MLP-Down."""
    model = vit()
    images = rng().integers(0, 256, (3, 32, 32, 3), np.uint8)
    x = np.asarray(model.embed(jax.numpy.asarray(images)))
    block = model.blocks[0]
    tokens = [ffn(block, one + linear(block.proj, mhsa(block, one)))[0] for one in x]
    return Worked(
        base_means(model, images)["32/mlp_down/component"][0, :3], np.mean(tokens, axis=0)[:3]
    )


def adapted_expert() -> Worked:
    """Two weights of theta + B A, by `merge` and in the pool of a task that adapts."""
    expert = random_expert()
    pool, _ = grow(base_pool([expert]), from_strings(["adapt:0"]), {0: pair()}, 0)
    theta = (expert.weight + pair().down @ pair().up)[0, :2]
    ours = [merge(expert, pair()).weight[0, :2], dense_expert(pool[0], 1).weight[0, :2]]
    return Worked(np.ravel(ours), np.ravel([theta, theta]))


def adapted_output() -> Worked:
    """Output of Adapt for one token, without merging."""
    expert = random_expert()
    u = random(1, 2, 6)
    y = u[0, 0] @ (expert.weight + pair().down @ pair().up) + expert.bias
    return Worked(apply_op(Adapt(expert, pair()), u)[0, 0], y)


def num_candidates() -> Worked:
    """2n + 2 candidates of a block with n = 1, 2, 3 experts."""
    return Worked([len(candidates(n)) for n in (1, 2, 3)], [2 * n + 2 for n in (1, 2, 3)])


def similarity() -> Worked:
    """S of two earlier tasks in two blocks."""
    earlier, new = rng().normal(size=(2, 2, 2, 8))
    cosine = [
        [a @ b / math.sqrt(a @ a * (b @ b)) for a, b in zip(*pair, strict=True)]
        for pair in zip(earlier, new, strict=True)
    ]
    low, high = np.min(cosine), np.max(cosine)
    ours = hee.norm_cosine(hee.cosines(earlier, new, np.ones((2, 2), bool)))
    return Worked(ours.ravel(), np.ravel(2 * (np.array(cosine) - low) / (high - low) - 1))


def first_level() -> Worked:
    """psi of two tasks and Aux, with S_aux = -max S; a third task skips the block."""
    psi, aux = hee.first_level(SIMILARITY)
    return Worked([*psi[:2], aux], softmax([0.6, -0.2, -0.6]))


def second_level() -> Worked:
    """Probabilities of Reuse 0, Reuse 1, Adapt 0, Adapt 1, New and Skip."""
    *psi, aux = softmax([0.6, -0.2, -0.6])
    rho = [1 / (1 + math.exp(-s)) for s in (0.6, -0.2)]
    reuse = [p * r for p, r in zip(psi, rho, strict=True)]
    adapt = [p * (1 - r) for p, r in zip(psi, rho, strict=True)]
    [table] = hee.exploit_table(SIMILARITY[:, None], [[0], [1], [None]], [2])
    return Worked(table[:6], [*reuse, *adapt, aux / 2, aux / 2])


def epochs_of_exploration() -> Worked:
    """Share of 1,000 epochs that sample uniformly at eps1 = 0.3."""
    exploit, uniform = (np.array([[p, 1 - p]]) for p in (0.0, 1.0))
    keys = jax.random.split(jax.random.key(0))
    draws = supernet_draws(*keys, exploit=exploit, uniform=uniform, epsilon=0.3)
    share = np.mean([draws(epoch, 1)[0, 0] == 0 for epoch in range(1000)])
    return Worked(share, 0.3, 0.05)


def initial_population() -> Worked:
    """Share of 4,000 architectures from the uniform table at eps2 = 0.5."""
    exploit, uniform = (np.array([[p, 1 - p]]) for p in (0.0, 1.0))
    codes = hee.sample_mixed(jax.random.key(0), exploit, uniform, 0.5, num=4000)
    share = float(np.mean(np.asarray(codes) == 0))
    return Worked(share, 0.5, 0.03)


def ranking() -> Worked:
    """Order of four architectures at tau = 2 %: groups of accuracy, then FLOPs."""
    correct, flops = np.array([90.0, 89.0, 88.0, 70.0]), np.array([5.0, 3.0, 1.0, 0.0])
    groups = np.floor((90 - correct) / (0.02 * 100))
    scored = Scored(np.arange(4, dtype=np.int32)[:, None], correct, flops)
    return Worked(rank(scored, 100, 0.02), np.lexsort((flops, groups)))


def variation() -> Worked:
    """Share of genes from the first of two parents, and of mutated genes at rate 0.1."""
    parents = np.stack([np.zeros(50, np.int32), np.ones(50, np.int32)])
    crossed = crossover(jax.random.key(0), parents, num=400)
    table = np.eye(4)[[3] * 50]
    mutated = mutate(
        jax.random.key(0), parents, exploit=table, uniform=table, epsilon=0.5, rate=0.1, num=400
    )
    shares = np.array([np.mean(np.asarray(crossed) == 0), np.mean(np.asarray(mutated) == 3)])
    return Worked(shares, [0.5, 0.1], 0.03)


def nearest_centroid() -> Worked:
    """L1 distances of two images to the nearest of three centroids of two tasks each."""
    features = rng().normal(size=(2, 20, 8)).astype(np.float32)
    centroids = [fit_centroids(one, 3, seed=0) for one in features]
    images = rng().normal(size=(2, 8)).astype(np.float32)
    unit = images / np.sqrt((images**2).sum(axis=1, keepdims=True))
    nearest = [[abs(x - c).sum(axis=1).min() for c in centroids] for x in unit]
    return Worked(centroid_distances(images, centroids).ravel(), np.ravel(nearest))


def paper_accuracies() -> dict[str, float]:
    """The paper's accuracies of CHEEM on MTIL with ViT-Base, by task."""
    return {
        cell.task: number.value
        for cell, number in printed()["full"].items()
        if cell[:3] == ("mtil", "vit_base", "cheem") and not cell.variant and cell.task
    }


def average_accuracy() -> Worked:
    """From the paper's row of CHEEM on MTIL with ViT-Base; it prints 85.88."""
    row = [*paper_accuracies().values()]
    accuracy = np.full((len(row), len(row)), np.nan)
    accuracy[-1] = row
    return Worked(metrics.average_accuracy(accuracy), sum(row) / len(row))


def average_forgetting() -> Worked:
    """Three tasks whose best accuracies drop by 5 and 10 points."""
    nan = np.nan
    accuracy = np.array([[90, nan, nan], [80, 70, nan], [85, 60, 50.0]])
    return Worked(metrics.average_forgetting(accuracy), ((90 - 85) + (70 - 60)) / 2)


def figure_of_merit() -> Worked:
    """CHEEM against S-Prompts from the paper's numbers on MTIL with ViT-Base; it prints 3.2."""
    upper, ours, theirs = (
        printed()["full"][Cell("mtil", "vit_base", method, "average_accuracy")].value
        for method in ("full_finetune", "cheem", "s_prompts")
    )
    value = (upper - theirs) / (upper - ours) * 67.6 / 62.3
    return Worked(metrics.figure_of_merit(upper, ours, 62.3, theirs, 67.6), value)


def argmax() -> Worked:
    """Class by the local argmax, then task and class by the global argmax."""
    logits = np.array([[0.1, 0.9, 0.4, 1.7]])
    classes = Classes(["a", "b"], [("x", "y"), ("v", "w")])
    local = classes.inferred(logits, np.array([0]))
    best = classes.inferred(logits)
    ours = [local.classes[0], best.tasks[0], best.classes[0]]
    return Worked(ours, [logits[0, :2].argmax(), *divmod(logits[0].argmax(), 2)])


def two_classes() -> Worked:
    """P(z* >= z') for a gap of 1.5 deviations."""
    return Worked(
        match_probability(1.5, 1.0, 1.0, 1), 0.5 * (1 + erf(1.5 / np.sqrt(2) / np.sqrt(2)))
    )


def many_classes() -> Worked:
    """P(Z* >= all of M = 100 logits) for a gap of 2 deviations."""
    z = np.linspace(-9, 9, 20001)
    density = np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
    integral = (ndtr(z + 2) ** 100 * density).sum() * (z[1] - z[0])
    return Worked(match_probability(2.0, 1.0, 1.0, 100), integral)


def flops() -> Worked:
    """GFLOPs of plain ViT-Base and DeiT-Tiny, and of ViT-Base with Adapt of rank 40 in each block
    (the paper prints 33.7, 2.2 and, with the router's pass, 68.2)."""
    ours = [
        network_flops(CONFIGS[name], "mlp_down", from_strings([op] * 12), PAPER.ops.rank) / 1e9
        for name, op in (("vit_base", "reuse:0"), ("deit_tiny", "reuse:0"), ("vit_base", "adapt:0"))
    ]
    plain = [2 * (196 * 768 * d + 197 * 12 * 12 * d * d) / 1e9 for d in (768, 192)]
    return Worked(ours, [*plain, plain[0] + 2 * 12 * 197 * PAPER.ops.rank * 5 * 768 / 1e9])
