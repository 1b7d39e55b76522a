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
from cheem_jax.core.settings import Placement, Precision, Token, check_types
from cheem_jax.engine.executor import Executor
from cheem_jax.engine.feed import cached_bytes, memory_budget
from cheem_jax.engine.layout import ONE, Layout
from cheem_jax.engine.scan import Scan
from cheem_jax.engine.stages import Stages
from cheem_jax.engine.whole import Whole

Name = Literal["stages", "whole", "scan"]
DISPATCH_BOUND = 1.5e11
"""FLOPs limit for an accelerator without measurements. If the forward pass of a batch has fewer
FLOPs, the host's dispatches are assumed to limit the speed of the pass, and `scan` is chosen. The
limit is estimated for an H100 from the number of kernels in a pass and the bytes that the kernels
read."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings for running networks. They affect results only by rounding."""

    executor: Literal["auto", "stages", "whole", "scan"] = "auto"
    """`stages` compiles one function per op kind, `whole` one per sequence of op kinds, and `scan`
    one for all architectures. `auto` selects the executor that was measured to be the fastest."""
    precision: Precision = "float32"
    """Type of the operands of matrix products. Parameters, sums and the loss are always float32."""
    memory_gb: float | None = None
    """Device memory in GB for the cached images and activations of a task; merged experts of
    learned tasks can use the same amount in addition. Not included are the parameters that are
    trained, and the merged candidates of one generation of the search. The default is a quarter of
    the device's memory; 0 caches nothing."""
    deterministic: bool = False
    """Compile functions that compute identical bits in every run on an accelerator. Such functions
    are slower. A CPU always computes identical bits."""
    programs: int = 64
    """Maximum number of compiled functions in the cache of the executor `whole`."""
    steps_per_call: int = 8
    """Number of training steps per dispatch of the executor `scan`."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.memory_gb is not None:
            memory_budget(self.memory_gb)  # raises ValueError if the setting is out of range
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
    """Return the name of the executor, and the reason for the choice as text for the log.

    With `auto`, consider only measurements on the same platform and in the same precision. Select
    the measurement whose number of FLOPs is most similar to the batch's FLOPs per device, and
    return its fastest executor. If there is no such measurement, return `scan` for small backbones
    on accelerators, and `stages` otherwise.
    """
    if config.executor != "auto":
        return config.executor, "as configured"
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
            f"there is no measurement on {platform} in {vit.precision}; experiments/jit_profile.py"
            " adds one"
        )
    nearest = min(similar, key=lambda entry: abs(math.log(entry["flops"] / flops)))
    fastest = min(nearest["seconds"], key=nearest["seconds"].get)
    reason = f"the fastest executor in a measurement of {nearest['name']} on {nearest['device']}"
    times = flops / nearest["flops"]
    if not 0.99 < times < 1.01:
        reason += f"; a batch has {times:.2g} times the FLOPs of that measurement"
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
    """Choose the executor for a backbone, and make it.

    Raises ValueError if `config.memory_gb` is set and not 0, but is too small for the activations
    of one batch.
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
        remark = f"cuDNN does not support attention heads of width {width}"
    if remark and vit.config.precision == "bfloat16" and not device.is_host:
        reason += f"; {remark}"
    executor.reason = reason
    executor.budget = memory_budget(config.memory_gb)
    executor.working = memory_budget(None)
    needed = cached_bytes(executor, batch_size, 0)
    if config.memory_gb and executor.budget < needed:
        raise ValueError(
            f"memory_gb is {config.memory_gb}, but the activations of one batch of {batch_size}"
            f" images need {needed / 2**30:.3g} GB; increase memory_gb, reduce batch_size, or set"
            " memory_gb to 0 to cache nothing"
        )
    return executor


@cache
def measurements() -> list[dict[str, Any]]:
    """Read the measured seconds per supernet step of each executor, for each platform, backbone and
    batch size.

    `experiments/jit_profile.py` writes the measurements to `measured.json`.
    """
    text = files("cheem_jax.engine").joinpath("measured.json").read_text("utf-8")
    return json.loads(text)["measurements"]
