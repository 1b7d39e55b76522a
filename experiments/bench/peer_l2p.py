"""L2P in plain PyTorch with timm, to measure ours against.

Written as one would without this library: timm's blocks as they are, keys and values of the chosen prompts in front of
the first block's own, autograd and one Adam. The query is computed in every step, as the public codes do, or handed in
by whoever caches it.
"""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cheem_jax.baselines.l2p import L2pConfig
from experiments.bench.peer import LEARNING_RATE, Block, config_of_timm, load_backbone, normalised


class L2pPeer:
    """A frozen timm ViT with a pool of prompts at its first block, and one linear head."""

    def __init__(
        self,
        state_dict: Mapping[str, np.ndarray],
        model_name: str,
        image_size: int,
        config: L2pConfig,
        num_classes: int,
        device: str = "cpu",
    ):
        self.config, self.device = config, torch.device(device)
        self.model = load_backbone(state_dict, model_name, image_size).to(self.device)
        self.vit, width = config_of_timm(model_name), self.model.num_features
        self.pool = nn.Parameter(torch.rand(config.pool, config.length, width, device=self.device))
        self.keys = nn.Parameter(torch.rand(config.pool, width, device=self.device))
        self.weight = nn.Parameter(0.02 * torch.randn(num_classes, width, device=self.device))
        self.bias = nn.Parameter(torch.zeros(num_classes, device=self.device))
        self.optimizer = torch.optim.Adam([self.pool, self.keys, self.weight, self.bias], lr=LEARNING_RATE)

    @torch.no_grad()
    def put(self, pool: np.ndarray, keys: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> None:
        """Copy pool [M, P, D], keys [M, D] and head (weight [D, C], bias [C])."""
        given = (pool, keys, weight.T, bias)
        for parameter, array in zip((self.pool, self.keys, self.weight, self.bias), given, strict=True):
            parameter.copy_(torch.tensor(array))

    @torch.no_grad()
    def query(self, images: np.ndarray) -> Tensor:
        """Class tokens [B, D] of a pass without prompts."""
        return self.model.forward_features(self._pixels(images))[:, 0]

    def step(self, images: np.ndarray, labels: np.ndarray, query: Tensor | None = None) -> float:
        """One step of Adam on images [B, H, W, 3] uint8 with labels [B]; the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(images, labels, self.query(images) if query is None else query)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def gradients(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """Loss, and its gradients for pool, keys, weight [D, C] and bias."""
        loss = self.loss(images, labels, self.query(images))
        found = torch.autograd.grad(loss, [self.pool, self.keys, self.weight, self.bias])
        arrays = [grad.cpu().numpy() for grad in found]
        return loss.item(), [arrays[0], arrays[1], arrays[2].T, arrays[3]]

    def loss(self, images: np.ndarray, labels: np.ndarray, query: Tensor) -> Tensor:
        """Mean cross-entropy and the pull of the chosen keys."""
        near = F.normalize(query, dim=-1) @ F.normalize(self.keys, dim=-1).T
        best, chosen = near.topk(self.config.top_k, dim=-1)
        prompts, half = self.pool[chosen], self.config.length // 2
        keys, values = prompts[:, :, :half].flatten(1, 2), prompts[:, :, half:].flatten(1, 2)
        x = self.model.norm_pre(self.model._pos_embed(self.model.patch_embed(self._pixels(images))))
        first, *others = self.model.blocks
        x = run_prefixed(first, x, keys, values)
        for block in others:
            x = block(x)
        logits = F.linear(self.model.norm(x)[:, 0], self.weight, self.bias)
        wanted = torch.from_numpy(labels).to(self.device, torch.int64)
        return F.cross_entropy(logits, wanted) + self.config.key_weight * (1 - best).sum(dim=1).mean()

    def _pixels(self, images: np.ndarray) -> Tensor:
        return normalised(images, self.vit, self.device)


def run_prefixed(block: Block, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """A block on x [B, N, D] whose queries also attend to keys and values [B, P, D]."""
    attention = block.attn
    num, tokens, width = x.shape

    def heads(t: Tensor) -> Tensor:
        return t.reshape(num, -1, attention.num_heads, width // attention.num_heads).transpose(1, 2)

    query, key, value = attention.qkv(block.norm1(x)).chunk(3, dim=-1)
    key, value = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
    mixed = F.scaled_dot_product_attention(heads(query), heads(key), heads(value))
    x = x + attention.proj(mixed.transpose(1, 2).reshape(num, tokens, width))
    return x + block.mlp(block.norm2(x))
