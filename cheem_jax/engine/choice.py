"""The executor of a network: the user's choice, or the fastest one measured on a similar device."""

import dataclasses
import json
import math
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import jax

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.backbone.vit import ViT
from cheem_jax.core.kernels import has_flash_head
from cheem_jax.core.settings import Placement, Precision, Token
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import cached_bytes, memory_budget
from cheem_jax.engine.layout import ONE, Layout
from cheem_jax.engine.scan import Scan
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole

Name = Literal["stages", "whole", "scan"]
DISPATCH_BOUND = 1.5e11
"""FLOPs of a batch's forward pass below which an unmeasured accelerator is assumed to wait for the
host's dispatches; estimated for an H100 from its kernels and bytes."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How networks are run; these settings change results by rounding only."""

    executor: Literal["auto", "stages", "whole", "scan"] = "auto"
    """stages: one compiled function per op kind; whole: one per architecture; scan: one for all;
    auto: as measured."""
    precision: Precision = "float32"
    """Operands of matrix products; parameters, sums and the loss are float32 in both."""
    memory_gb: float | None = None
    """Memory for images and activations cached on the device per task, and as much again for merged
    experts; default: a quarter of it; 0: nothing is cached."""
    deterministic: bool = False
    """On an accelerator: compile networks for the same bits in every run, which is slower; a CPU
    always computes so."""
    programs: int = 64
    """Compiled functions that the executor `whole` caches at most."""
    steps_per_call: int = 8
    """Training steps in one dispatch of the executor `scan`."""

    def __post_init__(self) -> None:
        if self.memory_gb is not None and self.memory_gb < 0:
            raise ValueError(f"memory_gb is {self.memory_gb}; expected 0 (cache nothing) or more")
        for name in ("programs", "steps_per_call"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine {name} is {getattr(self, name)}; expected at least 1")


def choose(
    config: EngineConfig,
    vit: ViTConfig,
    batch_size: int,
    platform: str | None = None,
    layout: Layout = ONE,
) -> tuple[Name, str]:
    """The executor of the settings, and the reason in words for the log.

    `auto` is the fastest executor of the measurement in this precision whose FLOPs per device are
    nearest. Without a measurement, accelerators run small backbones by `scan`, and all others run
    by `stages`.
    """
    if config.executor != "auto":
        return config.executor, "as set"
    platform = platform or jax.default_backend()
    flops = backbone_flops(vit) * max(batch_size // layout.num, 1)
    similar = [
        entry
        for entry in measurements()
        if (entry["platform"], entry["precision"]) == (platform, vit.precision)
    ]
    if not similar:
        is_small = platform != "cpu" and flops < DISPATCH_BOUND
        return "scan" if is_small else "stages", (
            f"nothing was measured on {platform} in {vit.precision}; experiments/jit_profile.py"
            " measures it"
        )
    nearest = min(similar, key=lambda entry: abs(math.log(entry["flops"] / flops)))
    fastest = min(nearest["seconds"], key=nearest["seconds"].get)
    reason = f"the fastest when measured with {nearest['name']} on {nearest['device']}"
    times = flops / nearest["flops"]
    if not 0.99 < times < 1.01:
        reason += f"; a batch here has {times:.2g} times its FLOPs"
    return fastest, reason


def make_executor(
    vit: ViT,
    placement: Placement,
    config: EngineConfig,
    *,
    token: Token = "component",
    batch_size: int = 64,
    layout: Layout = ONE,
) -> Executor:
    """The chosen executor over one backbone.

    Raises ValueError if the memory for cached activations is smaller than one batch needs.
    """
    settings: dict[str, Any] = {
        "token": token,
        "deterministic": config.deterministic,
        "layout": layout,
    }
    name, reason = choose(config, vit.config, batch_size, layout=layout)
    match name:
        case "stages":
            executor = Stages(vit, placement, **settings)
        case "whole":
            executor = Whole(vit, placement, **settings, programs=config.programs)
        case "scan":
            executor = Scan(vit, placement, **settings, steps_per_call=config.steps_per_call)
    device = executor.device
    width = vit.config.width // vit.config.num_heads
    remark = device.remark
    if not remark and not has_flash_head(width):
        remark = f"cuDNN has no attention of width {width}"
    if remark and vit.config.precision == "bfloat16" and not device.is_host:
        reason += f"; {remark}"
    executor.reason = reason
    executor.budget = memory_budget(config.memory_gb)
    executor.working = memory_budget(None)
    needed = cached_bytes(executor, batch_size, 0)
    if config.memory_gb and executor.budget < needed:
        raise ValueError(
            f"memory_gb is {config.memory_gb}, but the activations of one batch of {batch_size}"
            f" images take {needed / 2**30:.3g} GB; give more, a smaller batch_size, or 0 to cache"
            " nothing"
        )
    return executor


@cache
def measurements() -> list[dict[str, Any]]:
    """Seconds per supernet step of each executor, by platform, backbone and batch size.

    `experiments/jit_profile.py` writes them.
    """
    text = files("cheem_jax.engine").joinpath("measured.json").read_text()
    return json.loads(text)["measurements"]
