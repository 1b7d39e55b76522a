"""Which executor runs a network: the user's choice, or the fastest one measured on such a
device."""

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
from cheem_jax.engine.feed import kept_bytes, memory_budget
from cheem_jax.engine.layout import ONE, Layout
from cheem_jax.engine.scan import Scan
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole

Name = Literal["stages", "whole", "scan"]
DISPATCH_BOUND = 1.5e11
"""FLOPs of a batch's forward pass below which an accelerator is taken to wait for the host's
dispatches, where nothing was measured: an estimate for an H100, from counted kernels and bytes."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How networks are run: nothing here changes what is computed, beyond rounding."""

    executor: Literal["auto", "stages", "whole", "scan"] = "auto"
    """stages: one compiled function per op kind; whole: one per architecture; scan: one for all;
    auto: as measured."""
    precision: Precision = "float32"
    """Operands of matrix products; parameters, sums and the loss are float32 in both."""
    memory_gb: float | None = None
    """Memory for images and activations kept on the device per task, and as much again for merged
    experts; default: a quarter of it; 0: nothing is kept."""
    deterministic: bool = False
    """On an accelerator: networks compiled for the same bits in every run, slower; a CPU computes
    so anyway."""
    programs: int = 64
    """Compiled functions that the executor `whole` keeps at most."""
    steps_per_call: int = 8
    """Training steps in one dispatch of the executor `scan`."""

    def __post_init__(self) -> None:
        if self.memory_gb is not None and self.memory_gb < 0:
            raise ValueError(f"memory_gb is {self.memory_gb}; expected 0 (keep nothing) or more")
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
    """The executor of the settings, and why it was taken, in words for the log.

    `auto` takes the fastest in the measurement of this precision that is nearest in FLOPs per
    device. Where there is none, an accelerator runs small backbones by `scan`; all else runs by
    `stages`.
    """
    if config.executor != "auto":
        return config.executor, "as set"
    platform = platform or jax.default_backend()
    here = {"platform": platform, "precision": vit.precision}
    known = [entry for entry in measurements() if here.items() <= entry.items()]
    flops = backbone_flops(vit) * max(batch_size // layout.num, 1)
    if not known:
        is_small = platform != "cpu" and flops < DISPATCH_BOUND
        reason = (
            f"nothing was measured on {platform} in {vit.precision}; experiments/jit_profile.py"
            " measures it"
        )
        return "scan" if is_small else "stages", reason
    work = math.log(flops)
    nearest = min(known, key=lambda entry: abs(math.log(entry["flops"]) - work))
    fastest = min(nearest["seconds"], key=nearest["seconds"].get)
    times = math.exp(work - math.log(nearest["flops"]))
    this = "" if 0.99 < times < 1.01 else f"; a batch here has {times:.2g} times its FLOPs"
    return fastest, f"the fastest when measured with {nearest['name']} on {nearest['device']}{this}"


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

    Raises ValueError where the memory for kept activations would not hold one batch.
    """
    shared: dict[str, Any] = {
        "token": token,
        "deterministic": config.deterministic,
        "layout": layout,
    }
    name, reason = choose(config, vit.config, batch_size, layout=layout)
    match name:
        case "stages":
            executor = Stages(vit, placement, **shared)
        case "whole":
            executor = Whole(vit, placement, **shared, programs=config.programs)
        case "scan":
            executor = Scan(vit, placement, **shared, steps_per_call=config.steps_per_call)
    head = vit.config.width // vit.config.num_heads
    if remark := executor.device.remark or (
        "" if has_flash_head(head) else f"cuDNN has no attention of width {head}"
    ):
        is_told = vit.config.precision == "bfloat16" and not executor.device.is_host
        reason += f"; {remark}" if is_told else ""
    executor.reason = reason
    executor.budget = memory_budget(config.memory_gb)
    executor.working = memory_budget(None)
    needed = kept_bytes(executor, batch_size, 0)
    if config.memory_gb and executor.budget < needed:
        raise ValueError(
            f"memory_gb is {config.memory_gb}, but the activations of one batch of {batch_size}"
            f" images take {needed / 2**30:.3g} GB; give more, a smaller batch_size, or 0 to keep"
            " nothing"
        )
    return executor


@cache
def measurements() -> list[dict[str, Any]]:
    """Seconds per supernet step of each executor, by platform, backbone and batch; written by the
    profiling study."""
    text = files("cheem_jax.engine").joinpath("measured.json").read_text()
    return json.loads(text)["measurements"]
