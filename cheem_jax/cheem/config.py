"""Settings of CHEEM: what the paper says, what we decided where it is silent, and smaller ones for
a CPU."""

import dataclasses
from typing import ClassVar, Literal

from cheem_jax.core.routing import RouterConfig
from cheem_jax.core.settings import KINDS, FitConfig, Kind, Placement, Token


@dataclasses.dataclass(frozen=True)
class OpSettings:
    """How the learnable ops of a block begin."""

    rank: int = 16
    """Rank of Adapt's low-rank pair; the paper states none, and 40 gives 68.1 GFLOPs for ViT-B
    where it prints 68.2."""
    new_init: Literal["random", "copy"] = "random"
    """Initial New: truncated normal of deviation 0.02, or a copy of the base expert."""
    new_rate: float = 1.0
    """Adam's rate of New as a multiple of that of Adapt and head: a full matrix wants smaller steps
    than they do."""

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
    """Best architectures of everything scored so far that have children (the paper's k)."""
    mutation_rate: float = 0.1
    """Probability that a mutation redraws a gene (paper: 'e.g., 0.1')."""
    epsilon: float = 0.5
    """eps2: probability that an individual, or a redrawn gene, is uniform instead of HEE (paper:
    0.5)."""
    tolerance: float = 0.02
    """tau: accuracy that may be given up for fewer FLOPs (paper: 2 %, absolute)."""

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
    """Everything that decides what CHEEM learns."""

    name: ClassVar[str] = "cheem"
    placement: Placement = "mlp_down"
    """Component that holds the experts."""
    token: Token = "component"
    """Where mean class tokens are read: the component's output before the residual sum, or the
    block's output."""
    ops: OpSettings = OpSettings()
    remove: tuple[Kind, ...] = ()
    """Ops that no task may choose, such as skip; the paper has all four."""
    base_means: Literal["known", "neutral"] = "known"
    """`neutral` takes the similarity to the backbone's own task as 0 even where its mean class
    tokens are known."""
    supernet: FitConfig = FitConfig(epochs=50)
    sampling: Literal["hee", "uniform"] = "hee"
    """`uniform` is the paper's pure exploration: eps1 = eps2 = 1, mutation included."""
    exploration: ExplorationConfig = ExplorationConfig()
    search: SearchConfig = SearchConfig()
    score: Literal["shared_head", "closed_form"] = "shared_head"
    """What ranks candidates: the supernet's head on validation images, as in the paper, or a ridge
    head per candidate, leave-one-out on training images and with validation images added."""
    score_images: int = 0
    """Training images that the score `closed_form` looks at, a seeded subsample; 0: all."""
    finetune: FitConfig = FitConfig(epochs=20)
    weights: Literal["initial", "inherited"] = "initial"
    """Where fine-tuning begins: all anew, as in the paper, or with what the supernet has
    learned."""
    router: RouterConfig = RouterConfig()
    augment: bool = False
    """Crop, flip and change training images at random, new in every epoch; the paper does not.
    Frozen blocks are then computed again in every step."""
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
    """CHEEM whose tasks are named by a lighter network than the one that answers; the run has to
    name it as its router.

    The paper routes with DeiT-Tiny or AlexNet in front of ViT-B, which nearly halves its FLOPs
    (table on CHEEM-lite). All that is learned is CHEEM's; the centroids are those of the lighter
    network's features.
    """

    name: ClassVar[str] = "cheem_lite"


PAPER = CheemConfig(ops=OpSettings(rank=40))
"""The paper's settings, and ours where it is silent."""

QUICK = CheemConfig(
    supernet=FitConfig(epochs=8),
    search=SearchConfig(population=20, generations=8, num_parents=5),
    finetune=FitConfig(epochs=8),
    batch_size=32,
)
"""Every part switched on, sized for a CPU: 160 architectures scored per task."""

DEMO = dataclasses.replace(
    QUICK,
    supernet=FitConfig(epochs=12, learning_rate=2e-3),
    finetune=FitConfig(epochs=24, learning_rate=2e-3),
)
"""`quick` with more and larger steps, for tasks of a few hundred small images."""

PLUS = {"router": RouterConfig("lda", "early")}
"""The router that paid on small real sets (docs/results_96.md), as a change of any settings."""

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
"""That router, and a search that did better where tasks are far from the pretraining data
(docs/search.md): fewer epochs for the supernet and more for the target network, fewer candidates,
ranked by heads in closed form; New begins as a copy and takes smaller steps. Measured at this
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
    """Settings with the epochs that the preset `auto` chooses for a task of so many training
    images.

    Supernet training and fine-tuning take as many epochs as 256 steps need (what `quick` takes for
    1,000 images), at least `quick`'s 8 and at most 64; with more than 8, the learning rate is
    `demo`'s. The rest does not depend on the task.
    """
    steps = -(-num_images // config.batch_size)
    epochs = min(max(-(-AUTO_STEPS // steps), QUICK.finetune.epochs), MOST_AUTO_EPOCHS)
    fit = dataclasses.replace(
        (DEMO if epochs > QUICK.finetune.epochs else QUICK).finetune, epochs=epochs
    )
    return dataclasses.replace(config, supernet=fit, finetune=fit)
