"""Settings of CHEEM: the paper's values, our values for settings that the paper does not state, and
smaller values for a CPU."""

import dataclasses
import math
from typing import ClassVar, Literal, TypeGuard

from cheem_jax.core.routing import Reads, RouterConfig, num_stored
from cheem_jax.core.settings import KINDS, FitConfig, Kind, Placement, Token, check_types


@dataclasses.dataclass(frozen=True)
class OpSettings:
    """Settings of the learnable ops."""

    rank: int = 16
    """Rank of Adapt's low-rank pair. The paper does not state a rank, but its FLOPs suggest about
    40: LoRA-CL of rank 40 on ViT-B has 68.1 GFLOPs per image, and the paper reports 68.2."""
    truncated_rank: int | None = None
    """Rank to which a trained pair is truncated by singular value decomposition before it is
    stored; None, or a rank that is not below `rank`, stores it as trained (docs/search.md)."""
    new_init: Literal["random", "copy"] = "random"
    """Initialisation of New: `random` samples 0.02 times a standard normal truncated at ±2;
    `copy` copies the base expert."""
    new_rate: float = 1.0
    """Learning rate of New, relative to the learning rate of Adapt and the head. The full matrix of
    New needs smaller steps than a low-rank pair."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; a low-rank pair needs at least rank 1")
        if self.stored_rank < 1:
            raise ValueError(f"truncated_rank is {self.truncated_rank}; expected at least 1")
        if not 0 < self.new_rate < math.inf:
            raise ValueError(
                f"new_rate is {self.new_rate}; expected a positive, finite multiple of the learning"
                " rate"
            )

    @property
    def stored_rank(self) -> int:
        """Rank of stored pairs."""
        return self.rank if self.truncated_rank is None else min(self.rank, self.truncated_rank)


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Settings of the search. `max_flops` is for backward elimination, the other settings for the
    evolutionary search."""

    population: int = 50
    """Number of architectures scored per generation."""
    generations: int = 20
    """Number of generations, including the initial population."""
    num_parents: int = 10
    """Number of parents per generation: the best architectures so far (the paper's k)."""
    mutation_rate: float = 0.1
    """Probability that mutation resamples a gene (paper: 'e.g., 0.1')."""
    epsilon: float = 0.5
    """eps2: probability that an initial architecture or a resampled gene is sampled uniformly and
    not by HEE (paper: 0.5)."""
    tolerance: float = 0.02
    """tau: accuracy loss accepted in return for fewer FLOPs, in absolute accuracy (paper: 2 %)."""
    max_flops: float = 0.9
    """FLOPs of a task's network after backward elimination, as a share of those of the network that
    adapts every block. Only blocks of the second half are skipped, so a low limit is not
    reached."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("population", "generations", "num_parents"):
            if getattr(self, name) < 1:
                raise ValueError(f"search {name} is {getattr(self, name)}; expected at least 1")
        for name in ("mutation_rate", "epsilon", "tolerance", "max_flops"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"search {name} is {getattr(self, name)}; expected a number in [0, 1]"
                )


@dataclasses.dataclass(frozen=True)
class ExplorationConfig:
    """Settings of exploration in supernet training."""

    epsilon: float = 0.3
    """eps1: probability that all architectures of an epoch are sampled uniformly (paper: 0.3)."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}; expected a probability in [0, 1]")


@dataclasses.dataclass(frozen=True)
class CheemConfig:
    """All settings of CHEEM."""

    name: ClassVar[str] = "cheem"
    placement: Placement = "mlp_down"
    """Component of each block that the experts replace."""
    token: Token = "component"
    """Position at which mean CLS tokens are measured: `component` is the component's output before
    the residual sum; `block` is the block's output."""
    ops: OpSettings = OpSettings()
    remove: tuple[Kind, ...] = ()
    """Ops that are removed from the candidates, such as skip; the paper uses all four ops."""
    base_means: Literal["known", "neutral"] = "known"
    """`known` computes the similarity to the base task if its mean CLS tokens are known; `neutral`
    always sets this similarity to 0."""
    supernet: FitConfig = FitConfig(epochs=50)
    sampling: Literal["hee", "uniform", "anchored"] = "hee"
    """`hee` samples as in the paper. `uniform` is the paper's pure exploration: eps1 = eps2 = 1,
    also in mutation. `anchored` trains no supernet: it adapts the base expert in each block, and
    skips the least useful blocks of the second half before training (docs/search.md). Of the
    supernet, the exploration, the search and `weights`, only `max_flops` then has an effect, and
    no similarity is computed."""
    exploration: ExplorationConfig = ExplorationConfig()
    search: SearchConfig = SearchConfig()
    finetune: FitConfig = FitConfig(epochs=20)
    weights: Literal["initial", "inherited"] = "initial"
    """Initial weights of fine-tuning: `initial` initialises new weights, as in the paper;
    `inherited` copies the supernet's weights."""
    router: RouterConfig = RouterConfig()
    augment: bool = False
    """Randomly crop and modify training images in every epoch. The paper does not augment.
    With augmentation, the outputs of the frozen blocks cannot be cached, so every step computes
    these blocks."""
    fallback: bool = False
    """Use the frozen backbone with a ridge head for a task if, on the validation images, this
    backbone is more accurate than the learned network by more than one standard error. The paper
    has no fallback."""
    batch_size: int = 64
    """Number of images per step; the last, partial batch is padded and masked."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; expected at least 1")
        if not len(set(self.remove)) == len(self.remove) < len(KINDS):
            raise ValueError(
                f"remove names {', '.join(self.remove)}; expected some of {', '.join(KINDS)}, each"
                " once, and not all of them"
            )
        if self.sampling == "anchored" and self.remove:
            raise ValueError(
                "sampling anchored uses Adapt and Skip, without a supernet; leave out remove, or"
                " take sampling hee"
            )


def computes_similarity(config: object) -> TypeGuard[CheemConfig]:
    """Return whether a method with the settings `config` computes the similarity of each task to
    the pretraining data and to the earlier tasks (section 'Task similarity')."""
    return isinstance(config, CheemConfig) and config.sampling != "anchored"


@dataclasses.dataclass(frozen=True)
class CheemLiteConfig(CheemConfig):
    """CHEEM whose router is a network that is lighter than the backbone.

    The paper routes with DeiT-Tiny or AlexNet in front of ViT-B, which nearly halves the FLOPs (the
    paper's table on CHEEM-lite). Apart from the router's features and centroids, CHEEM-lite is
    identical to CHEEM.
    """

    name: ClassVar[str] = "cheem_lite"


PAPER = CheemConfig(ops=OpSettings(rank=40))
"""The paper's settings, and our values for settings that the paper does not state."""

QUICK = CheemConfig(
    supernet=FitConfig(epochs=8),
    search=SearchConfig(population=20, generations=8, num_parents=5),
    finetune=FitConfig(epochs=8),
    batch_size=32,
)
"""Settings with shorter phases, for a CPU. The search scores 160 architectures per task."""

DEMO = dataclasses.replace(
    QUICK,
    supernet=FitConfig(epochs=12, learning_rate=2e-3),
    finetune=FitConfig(epochs=24, learning_rate=2e-3),
)
"""`quick` with more epochs and a higher learning rate, for tasks of a few hundred small images."""


def _plus(config: CheemConfig) -> CheemConfig:
    """Return the settings with the search and the router of the `plus` presets."""
    epochs = config.supernet.epochs + config.finetune.epochs
    return dataclasses.replace(
        config,
        ops=OpSettings(rank=64, truncated_rank=32),
        sampling="anchored",
        finetune=FitConfig(epochs, learning_rate=3e-3, schedule="warm_cosine"),
        fallback=True,
        router=RouterConfig("lda", "early"),
    )


QUICK_PLUS = _plus(QUICK)
"""`quick` with backward elimination instead of a supernet, and another router.

All epochs train the target network, at a rank that is truncated afterwards. It is about as accurate
as LoRA-CL, with fewer parameters and FLOPs (docs/search.md). The router is more accurate than the
paper's router on small real data sets (docs/results.md). These settings were measured with the
epochs of `quick`; `cheem_plus` has those of `paper`.
"""

Preset = Literal["paper", "quick", "demo", "cheem_plus", "quick_plus"]
PRESETS: dict[Preset, CheemConfig] = {
    "paper": PAPER,
    "quick": QUICK,
    "demo": DEMO,
    "cheem_plus": _plus(PAPER),
    "quick_plus": QUICK_PLUS,
}

LearnPreset = Literal["auto", Preset]
AUTO_STEPS, FEWEST_AUTO_EPOCHS, MOST_AUTO_EPOCHS = 512, 16, 128


def auto(config: CheemConfig, num_images: int) -> CheemConfig:
    """Return the settings with which preset `auto` learns a task of `num_images` training images.

    They are those of `quick_plus` with augmented images and another number of epochs: the smallest
    number with at least 512 steps, but at least 16 and at most 128 (1,000 images have 512 steps in
    16 epochs). Settings that the learned tasks of a memory share stay those of `config`: the
    placement of the experts, the stored rank, the router and the batch size. So does the limit of
    FLOPs, which a user chooses.
    """
    steps = -(-num_images // config.batch_size)
    epochs = min(max(-(-AUTO_STEPS // steps), FEWEST_AUTO_EPOCHS), MOST_AUTO_EPOCHS)
    rank = config.ops.stored_rank
    return dataclasses.replace(
        config,
        ops=dataclasses.replace(
            QUICK_PLUS.ops, rank=max(QUICK_PLUS.ops.rank, rank), truncated_rank=rank
        ),
        remove=(),
        sampling=QUICK_PLUS.sampling,
        finetune=dataclasses.replace(QUICK_PLUS.finetune, epochs=epochs),
        weights=QUICK_PLUS.weights,
        fallback=True,
        augment=True,
    )


MOST_ROUTER_BYTES = 1_500_000
"""Maximum size of a task's router statistics without class means, with the preset `auto`."""


def auto_router(width: int, depth: int) -> RouterConfig:
    """Return the router of preset `auto` for a backbone of `width` features and `depth` blocks.

    It is the first of LDA on `levels`, on `early` and on `last` whose statistics are small enough;
    this is also the order of their accuracy (docs/concepts/routing.md). The covariance of LDA grows
    with the square of the width, so the widest backbones have k-means on `levels`.
    """
    if depth < 3:
        return PAPER.router
    reads: tuple[Reads, ...] = ("levels", "early", "last")
    for features in reads:
        router = RouterConfig("lda", features)
        if 4 * num_stored(router, router.num_parts(depth) * width, 0) <= MOST_ROUTER_BYTES:
            return router
    return RouterConfig(features="levels", num_centroids=20)
