"""Choice of the executor: the user's setting, or the fastest executor measured on a similar
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
from cheem_jax.engine.feed import cached_bytes, memory_budget
from cheem_jax.engine.layout import ONE, Layout
from cheem_jax.engine.scan import Scan
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole

Name = Literal["stages", "whole", "scan"]
DISPATCH_BOUND = 1.5e11
"""FLOPs of a batch's forward pass below which an unmeasured accelerator is assumed to wait for the
host's dispatches; estimated for an H100 from the number of its kernels and the bytes that they
read."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings for running networks; they change results by rounding only."""

    executor: Literal["auto", "stages", "whole", "scan"] = "auto"
    """stages: one compiled function per op kind; whole: one per architecture; scan: one for all;
    auto: as measured."""
    precision: Precision = "float32"
    """Type of the operands of matrix products; parameters, sums and the loss are float32 with both
    settings."""
    memory_gb: float | None = None
    """Device memory in GB for cached images and activations per task; the same amount is available
    for merged experts. Default: a quarter of the device's memory; 0 caches nothing."""
    deterministic: bool = False
    """On an accelerator, compile functions that compute identical bits in every run, which is
    slower; a CPU always computes identical bits."""
    programs: int = 64
    """Largest number of compiled functions that the executor `whole` caches."""
    steps_per_call: int = 8
    """Number of training steps in one dispatch of the executor `scan`."""

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
    """Return the name of the executor, and the reason for it as a text for the log.

    With `auto`, it is the fastest executor of the measurement on the same platform and in the same
    precision whose FLOPs per device are nearest. Without such a measurement, accelerators use
    `scan` for small backbones, and all other cases use `stages`.
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
    """Make the chosen executor for one backbone.

    Raises ValueError if the memory for cached activations is smaller than the activations of one
    batch.
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
    """Read the seconds per supernet step of each executor, by platform, backbone and batch size.

    `experiments/jit_profile.py` measures them and writes the file.
    """
    text = files("cheem_jax.engine").joinpath("measured.json").read_text()
    return json.loads(text)["measurements"]
