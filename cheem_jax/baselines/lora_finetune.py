"""LoRA fine-tuning, an upper bound: LoRA-CL with the true task given, so that no router stands between.

The paper's table of upper bounds lists it beside full fine-tuning. Its networks are those of `lora_cl` with the same
seed, bit for bit; adapters are merged into the backbone, so an image costs one plain pass.
"""

import dataclasses
from typing import Any, ClassVar

from cheem_jax.backbone.flops import backbone_flops
from cheem_jax.baselines.lora_cl import LoraCl, LoraClConfig


@dataclasses.dataclass(frozen=True)
class LoraFinetuneConfig(LoraClConfig):
    """The settings of LoRA-CL; those of the router are not looked at."""

    name: ClassVar[str] = "lora_finetune"


class LoraFinetune(LoraCl):
    """See the module."""

    name = "lora_finetune"
    told = True

    def costs(self, index: int) -> dict[str, Any]:
        """As LoRA-CL's with merged adapters, as the paper counts its upper bounds, and no router."""
        plain = [backbone_flops(self.executor.config, count_attention=count) for count in (False, True)]
        return {**super().costs(index), "flops": plain[0], "flops_method": plain[0], "flops_explicit": plain[1]}
