"""Settings of CHEEM: those of the paper, our choices if the paper states none, and smaller ones for
a CPU."""

import dataclasses
from typing import ClassVar, Literal

from cheem_jax.core.routing import RouterConfig
from cheem_jax.core.settings import KINDS, FitConfig, Kind, Placement, Token


@dataclasses.dataclass(frozen=True)
class OpSettings:
    """Initialisation of the learnable ops of a block."""

    rank: int = 16
    """Rank of Adapt's low-rank pair. The paper states none; with 40, ViT-B has 68.1 GFLOPs, where
    the paper prints 68.2."""
    new_init: Literal["random", "copy"] = "random"
    """Initial New: truncated normal of deviation 0.02, or a copy of the base expert."""
    new_rate: float = 1.0
    """Learning rate of New as a multiple of the rate of Adapt and head: a full matrix needs smaller
    steps."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; a low-rank pair needs at least rank 1")
        if not self.new_rate > 0:
            raise ValueError(
                f"new_rate is {self.new_rate}; expected a positive multiple of the learning rate"
            )


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """Settings of the evolutionary search."""

    population: int = 50
    """Architectures scored per generation."""
    generations: int = 20
    """Generations, the first included."""
    num_parents: int = 10
    """Best architectures so far that have children (the paper's k)."""
    mutation_rate: float = 0.1
    """Probability that a mutation resamples a gene (paper: 'e.g., 0.1')."""
    epsilon: float = 0.5
    """eps2: probability that an individual, or a resampled gene, is uniform instead of HEE (paper:
    0.5)."""
    tolerance: float = 0.02
    """tau: accuracy that can be exchanged for fewer FLOPs (paper: 2 %, absolute)."""

    def __post_init__(self) -> None:
        for name in ("population", "generations", "num_parents"):
            if getattr(self, name) < 1:
                raise ValueError(f"search {name} is {getattr(self, name)}; expected at least 1")
        for name in ("mutation_rate", "epsilon", "tolerance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"search {name} is {getattr(self, name)}; expected a number in [0, 1]"
                )


@dataclasses.dataclass(frozen=True)
class ExplorationConfig:
    """Exploration of supernet training."""

    epsilon: float = 0.3
    """eps1: probability that a whole epoch samples uniformly (paper: 0.3)."""

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon is {self.epsilon}; expected a probability in [0, 1]")


@dataclasses.dataclass(frozen=True)
class CheemConfig:
    """All settings of CHEEM's learning."""

    name: ClassVar[str] = "cheem"
    placement: Placement = "mlp_down"
    """Component with the experts."""
    token: Token = "component"
    """Position of the mean CLS tokens: the component's output before the residual sum, or the
    block's output."""
    ops: OpSettings = OpSettings()
    remove: tuple[Kind, ...] = ()
    """Ops that no task can choose, such as skip; the paper has all four."""
    base_means: Literal["known", "neutral"] = "known"
    """`neutral` sets the similarity to the base task to 0, even if its mean CLS tokens are
    known."""
    supernet: FitConfig = FitConfig(epochs=50)
    sampling: Literal["hee", "uniform"] = "hee"
    """`uniform` is the paper's pure exploration: eps1 = eps2 = 1, mutation included."""
    exploration: ExplorationConfig = ExplorationConfig()
    search: SearchConfig = SearchConfig()
    score: Literal["shared_head", "closed_form"] = "shared_head"
    """Score of candidates: the supernet's head on validation images, as in the paper, or a ridge
    head per candidate, leave-one-out on training images plus validation images."""
    score_images: int = 0
    """Training images of the score `closed_form`, a seeded subsample; 0: all."""
    finetune: FitConfig = FitConfig(epochs=20)
    weights: Literal["initial", "inherited"] = "initial"
    """Initial weights of fine-tuning: new ones, as in the paper, or those of the supernet."""
    router: RouterConfig = RouterConfig()
    augment: bool = False
    """Crop, flip and change training images at random in every epoch; the paper does not. Frozen
    blocks are then computed in every step."""
    fallback: bool = False
    """Use the frozen backbone with a ridge head for a task whose learned network is less accurate
    than that on the validation images; the paper does not."""
    batch_size: int = 64
    """Images per step; the last, partial batch is padded and masked."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; expected at least 1")
        if not len(set(self.remove)) == len(self.remove) < len(KINDS):
            raise ValueError(
                f"remove names {', '.join(self.remove)}; expected some of {', '.join(KINDS)}, each"
                " once"
            )


@dataclasses.dataclass(frozen=True)
class CheemLiteConfig(CheemConfig):
    """CHEEM whose task IDs are inferred by a lighter network, the run's router.

    The paper routes with DeiT-Tiny or AlexNet in front of ViT-B, which nearly halves the FLOPs
    (table on CHEEM-lite). Only the router's features and centroids differ from CHEEM.
    """

    name: ClassVar[str] = "cheem_lite"


PAPER = CheemConfig(ops=OpSettings(rank=40))
"""The paper's settings, and our choices if it states none."""

QUICK = CheemConfig(
    supernet=FitConfig(epochs=8),
    search=SearchConfig(population=20, generations=8, num_parents=5),
    finetune=FitConfig(epochs=8),
    batch_size=32,
)
"""All parts, in a size for a CPU: 160 architectures scored per task."""

DEMO = dataclasses.replace(
    QUICK,
    supernet=FitConfig(epochs=12, learning_rate=2e-3),
    finetune=FitConfig(epochs=24, learning_rate=2e-3),
)
"""`quick` with more and larger steps, for tasks of a few hundred small images."""

PLUS = {"router": RouterConfig("lda", "early")}
"""The router that is more accurate on small real data sets (docs/results_96.md), as a change of any
settings."""

QUICK_PLUS = dataclasses.replace(
    QUICK,
    ops=OpSettings(new_init="copy", new_rate=0.3),
    supernet=FitConfig(epochs=4, learning_rate=3e-3),
    search=SearchConfig(population=15, generations=2, num_parents=5, tolerance=0.0),
    score="closed_form",
    score_images=384,
    finetune=FitConfig(epochs=12, learning_rate=3e-3),
    **PLUS,
)
"""That router, and a search that is better for tasks far from the pretraining data
(docs/search.md): fewer epochs for the supernet and more for the target network, fewer candidates,
ranked by closed-form heads; New is initialised as a copy and has a lower rate. Measured with this
budget only, so `cheem_plus` has the router alone."""

Preset = Literal["paper", "quick", "demo", "cheem_plus", "quick_plus"]
PRESETS: dict[Preset, CheemConfig] = {
    "paper": PAPER,
    "quick": QUICK,
    "demo": DEMO,
    "cheem_plus": dataclasses.replace(PAPER, **PLUS),
    "quick_plus": QUICK_PLUS,
}

LearnPreset = Literal["auto", Preset]
AUTO_STEPS, MOST_AUTO_EPOCHS = 256, 64


def auto(config: CheemConfig, num_images: int) -> CheemConfig:
    """Return the settings with the epochs of the preset `auto` for a task with `num_images`
    training images.

    Supernet training and fine-tuning have the epochs of 256 steps (as `quick` for 1,000 images), at
    least 8 and at most 64; with more than 8, the learning rate is `demo`'s. Other settings do not
    depend on the task.
    """
    steps = -(-num_images // config.batch_size)
    epochs = min(max(-(-AUTO_STEPS // steps), QUICK.finetune.epochs), MOST_AUTO_EPOCHS)
    fit = dataclasses.replace(
        (DEMO if epochs > QUICK.finetune.epochs else QUICK).finetune, epochs=epochs
    )
    return dataclasses.replace(config, supernet=fit, finetune=fit)
