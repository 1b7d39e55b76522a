"""All methods by name: their settings, presets and learners."""

import dataclasses
from typing import Any, Literal, cast, get_args

import numpy as np

from cheem_jax.backbone.config import closest
from cheem_jax.baselines.coda_prompt import CodaPrompt, CodaPromptConfig
from cheem_jax.baselines.diki import Diki, DikiConfig
from cheem_jax.baselines.dualprompt import DualPrompt, DualPromptConfig
from cheem_jax.baselines.ease import Ease, EaseConfig
from cheem_jax.baselines.ewc import Ewc, EwcConfig
from cheem_jax.baselines.frozen_linear import FrozenLinear, FrozenLinearConfig
from cheem_jax.baselines.full_finetune import FullFinetune, FullFinetuneConfig
from cheem_jax.baselines.l2p import L2p, L2pConfig
from cheem_jax.baselines.lora_cl import LoraCl, LoraClConfig, LoraFinetune, LoraFinetuneConfig
from cheem_jax.baselines.moal import Moal, MoalConfig
from cheem_jax.baselines.moe_adapters import MoeAdapters, MoeAdaptersConfig
from cheem_jax.baselines.ranpac import RanPac, RanPacConfig
from cheem_jax.baselines.s_prompts import SPrompts, SPromptsConfig
from cheem_jax.baselines.tuna import Tuna, TunaConfig
from cheem_jax.cheem.config import PRESETS, CheemConfig, CheemLiteConfig, Preset
from cheem_jax.cheem.learner import Cheem
from cheem_jax.core.keys import Keys
from cheem_jax.run.method import FrozenNetworks, Method

MethodName = Literal[
    "cheem",
    "cheem_lite",
    "lora_cl",
    "s_prompts",
    "l2p",
    "dualprompt",
    "coda_prompt",
    "diki",
    "ewc",
    "tuna",
    "moal",
    "ranpac",
    "ease",
    "moe_adapters",
    "full_finetune",
    "lora_finetune",
    "frozen_linear",
]
NAMES: tuple[MethodName, ...] = get_args(MethodName)

BaselineConfig = (
    LoraClConfig
    | LoraFinetuneConfig
    | SPromptsConfig
    | L2pConfig
    | DualPromptConfig
    | CodaPromptConfig
    | DikiConfig
    | EwcConfig
    | TunaConfig
    | MoalConfig
    | RanPacConfig
    | EaseConfig
    | MoeAdaptersConfig
    | FullFinetuneConfig
    | FrozenLinearConfig
)
MethodConfig = CheemConfig | BaselineConfig

NEED_A_ROUTER = ("cheem_lite", "moe_adapters")
"""Methods that require a separate network for task-ID inference."""
DEMO_BOUND: dict[str, Any] = {"epochs": 24, "learning_rates": (1e-3,)}
"""Settings of the upper bound on the demo stream; CHEEM's fine-tuning has the same number of
epochs."""
QUICK_BOUND: dict[str, Any] = {"epochs": 8, "learning_rates": (3e-5, 1e-4)}

LEARNERS: dict[type, Any] = dict(
    zip(
        get_args(BaselineConfig),
        (
            LoraCl,
            LoraFinetune,
            SPrompts,
            L2p,
            DualPrompt,
            CodaPrompt,
            Diki,
            Ewc,
            Tuna,
            Moal,
            RanPac,
            Ease,
            MoeAdapters,
            FullFinetune,
            FrozenLinear,
        ),
        strict=True,
    )
)
"""Learner classes, keyed by the type of their settings."""
TAKE_A_ROUTER = ("lora_cl", "s_prompts", "moe_adapters", "frozen_linear")
"""Baselines that accept a separate network for the features of the router."""


def check_name(method: str) -> MethodName:
    """Return `method` if it is the name of a method.

    Raises ValueError with the most similar names for an unknown method.
    """
    if method not in NAMES:
        raise ValueError(f"unknown method {method!r}; {closest(method, NAMES)}")
    return cast(MethodName, method)


def make_preset(method: str, preset: str) -> MethodConfig:
    """Return the settings of a method for a preset. `paper` has the values of the paper's
    comparison, `quick` is sized for a CPU, and `demo` is for a few hundred small images per task.
    For baselines, `cheem_plus` and `quick_plus` differ from `paper` and `quick` only in the router
    of LoRA-CL and of frozen heads, which is CHEEM's.

    Raises ValueError for an unknown method or preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; {closest(preset, PRESETS)}")
    cheem = PRESETS[cast(Preset, preset)]
    match check_name(method):
        case "cheem":
            return cheem
        case "cheem_lite":
            return CheemLiteConfig(**vars(cheem))
    config = next(kind for kind in LEARNERS if kind.name == method)()
    if isinstance(config, LoraClConfig | FrozenLinearConfig):
        config = dataclasses.replace(config, router=cheem.router)
    # Baselines have the paper's settings by default.
    if preset in ("paper", "cheem_plus") or isinstance(config, FrozenLinearConfig):
        return config
    # Epochs, learning rate and batch size are similar to those of CHEEM's preset.
    epochs, rate, changes = (16, 2e-3, DEMO_BOUND) if preset == "demo" else (8, 1e-3, QUICK_BOUND)
    if isinstance(config, RanPacConfig | EaseConfig):
        rate = config.fit.learning_rate  # unchanged, because these methods use SGD, not Adam
    if not isinstance(config, FullFinetuneConfig):
        changes = {"fit": dataclasses.replace(config.fit, epochs=epochs, learning_rate=rate)}
    match config:
        case LoraClConfig():
            changes["rank"] = 16
        case EwcConfig():
            # half the epochs of other methods, because selecting a penalty repeats the training
            changes["fit"] = dataclasses.replace(
                config.fit, epochs=epochs // 2, learning_rate=rate / 20
            )
            changes["penalties"] = (10.0, 1e3, 1e5)
        case MoalConfig():
            changes["hidden"] = 1000
        case RanPacConfig():
            changes["hidden"] = 2000
    return dataclasses.replace(config, batch_size=32, **changes)


def make(
    config: MethodConfig,
    networks: FrozenNetworks,
    keys: Keys,
    num_tasks: int,
    base_means: np.ndarray | None = None,
) -> Method:
    """Make the learner of a method.

    `num_tasks` is the number of tasks of the stream; some methods divide their prompts among the
    tasks before the first task. `base_means` are the mean CLS tokens of the pretraining data; only
    CHEEM uses them. Raises ValueError if the settings do not fit the backbone, or if the router
    network does not fit the method.
    """
    executor, features, router_features = networks
    # Intermediate features of the same backbone do not count as features of a separate network.
    shared = router_features is features or (
        router_features.of(executor) and not router_features.ends(executor)
    )
    if config.name in NEED_A_ROUTER and shared:
        raise ValueError(
            f"{config.name} needs a separate network for task-ID inference; give one: --router"
            " deit_tiny, --router alexnet --router-weights FILE, or --router vit_nano"
        )
    if isinstance(config, CheemConfig):
        return Cheem(executor, config, keys, base_means, router_features)
    if config.name not in TAKE_A_ROUTER and not shared:
        raise ValueError(f"{config.name} does not infer the task ID with a router; omit --router")
    return LEARNERS[type(config)](networks, config, keys, num_tasks)
