"""AlexNet as the frozen encoder of a router: CHEEM-lite's centroids and MoE-Adapters' auto-encoders read its features.

Its images have the size that the network was built for; features come in float32, one program per batch size.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from cheem_jax.backbone import alexnet
from cheem_jax.images import Images
from cheem_jax.methods.fitting import Inputs, over_batches


class AlexNetEncoder:
    """A built AlexNet as an `Encoder`; which feature it gives stands in its config."""

    def __init__(self, network: alexnet.AlexNet, *, jit: Callable[..., Any] = jax.jit):
        self.config = network.config
        self.name, self.width = self.config.name, self.config.width
        graphdef, self._state = nnx.split(network)
        self._features = jit(lambda state, images: nnx.merge(graphdef, state)(images))

    def flops(self, *, count_attention: bool = False) -> int:
        """See `Encoder.flops`; there is no attention to count."""
        return alexnet.flops(self.config)

    def executed_flops(self) -> int:
        """The same: every product that is counted runs, and no other."""
        return alexnet.flops(self.config)

    def features(self, images: Images, *, batch_size: int) -> Float[np.ndarray, "N D"]:
        """Features of images uint8 `[N, S, S, 3]`."""
        return over_batches(
            lambda read: self._features(self._state, read["images"]), Inputs(images), len(images), batch_size=batch_size
        )
