"""CHEEM's supernet step, fine-tuning step and candidate evaluation in plain PyTorch, to measure ours against.

Written as one would without this library: timm's blocks as they are, the plastic layer (`mlp.fc2`) replaced by an op,
autograd to decide what a backward pass needs, one Adam for everything that can be drawn. Weights cross its border as
NumPy arrays in our row-vector layout (`[in, out]`); inside they are PyTorch's `[out, in]`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from cheem_jax.backbone.config import CONFIGS, ViTConfig
from cheem_jax.core.architecture import Architecture

Arrays = tuple[np.ndarray, np.ndarray]
"""Two arrays in our layout: an `Expert` or a `Head` (weight, bias), or a `LowRank` (down, up)."""
Pair = tuple[nn.Parameter, nn.Parameter]
"""The same two in PyTorch's layout."""
Block = Any
"""timm's own `Block`, which declares no types for its layers."""

LEARNING_RATE = 1e-3
RECOMPILE_LIMIT = 64
"""Variants of one compiled function: gradients wanted or not, training or evaluation, batch sizes, precisions."""


class TorchPeer:
    """A frozen timm ViT whose blocks run reuse, adapt, new or skip at `mlp.fc2`, with all that a task learns.

    `experts[block]` are frozen, `pairs[block]` and `new[block]` are learned, as is `head`. Every block computes all its
    tokens, the last one too, as timm does.
    """

    def __init__(
        self,
        state_dict: Mapping[str, np.ndarray],
        model_name: str,
        image_size: int,
        *,
        rank: int = 16,
        num_outputs: int = 64,
        compiled: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
        device: str = "cpu",
    ):
        """Build from weights under timm's names; the head has `num_outputs` columns.

        Every block has one frozen expert, the backbone's. `precision` is autocast's type in the forward pass.
        """
        self.device, self.precision = torch.device(device), precision
        self.model = load_backbone(state_dict, model_name, image_size).to(self.device)
        self.blocks: list[Block] = list(self.model.blocks)
        self.config = config_of_timm(model_name)
        self.experts: list[Pair] = [(block.mlp.fc2.weight, block.mlp.fc2.bias) for block in self.blocks]
        self.pairs = [self._new_pair(block, rank) for block in self.blocks]
        self.new = [self._new_expert(block) for block in self.blocks]
        self.head = self._linear(num_outputs, self.model.num_features)
        self.classes = torch.arange(num_outputs, device=self.device)
        self.optimizer = torch.optim.Adam(self._learned(), lr=LEARNING_RATE)

        self._dense, self._adapted, self._skipped = run_dense, run_adapted, run_skipped
        if compiled:
            # beyond its limit a function would run eagerly and say so only in a warning
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            self._dense = torch.compile(run_dense, dynamic=False)
            self._adapted = torch.compile(run_adapted, dynamic=False)
            self._skipped = torch.compile(run_skipped, dynamic=False)

    def set_learned(
        self,
        *,
        pairs: Mapping[int, Arrays],
        new: Mapping[int, Arrays],
        head: Arrays,
    ) -> None:
        """Copy learned parameters in our layout, each with Adam as before its first step; what is not named stays.

        `pairs` maps a block to (down [F, r], up [r, D]), `new` a block to (weight [F, D], bias [D]); `head` is
        (weight [D, C], bias [C]) with C = `num_outputs`.
        """
        for block, arrays in pairs.items():
            self._put(self.pairs[block], arrays)
        for block, arrays in new.items():
            self._put(self.new[block], arrays)
        self._put(self.head, head)

    def gradients(
        self, architecture: Architecture, images: np.ndarray, labels: np.ndarray, num_classes: int
    ) -> tuple[float, dict[int, Arrays], Arrays]:
        """Mean loss over images [B, H, W, 3] uint8 and labels [B], and its gradients; nothing is updated.

        Gradients have our layout: per block that adapts (down [F, r], up [r, D]) or is new (weight [F, D], bias [D]),
        and the head's (weight [D, C], bias [C]).
        """
        drawn: dict[int, Pair] = {}
        for block, choice in enumerate(architecture):
            if choice.kind == "adapt":
                drawn[block] = self.pairs[block]
            elif choice.kind == "new":
                drawn[block] = self.new[block]
        loss = self._loss(architecture, images, labels, num_classes)
        wanted = [tensor for pair in (*drawn.values(), self.head) for tensor in pair]
        flat = iter([_to_ours(grad) for grad in torch.autograd.grad(loss, wanted)])
        grads = {block: (next(flat), next(flat)) for block in drawn}
        return loss.item(), grads, (next(flat), next(flat))

    def step(self, architecture: Architecture, images: np.ndarray, labels: np.ndarray, num_classes: int) -> float:
        """One step of Adam on what the architecture learns and on the head; the loss before it.

        Images are [B, H, W, 3] uint8, labels [B]. With one architecture throughout this is fine-tuning.
        """
        # None and not zero: what is not drawn keeps parameters, moments and step count
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(architecture, images, labels, num_classes)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.inference_mode()
    def count_right(
        self, architectures: Sequence[Architecture], images: np.ndarray, labels: np.ndarray, num_classes: int
    ) -> np.ndarray:
        """Per architecture the number of images [B, H, W, 3] uint8 whose class is the label [B]: int64 [C]."""
        pixels, wanted = self._pixels(images), self._labels(labels)
        counts = [(self._logits(a, pixels, num_classes).argmax(dim=-1) == wanted).sum() for a in architectures]
        return torch.stack(counts).cpu().numpy() if counts else np.zeros(0, np.int64)

    def _loss(self, architecture: Architecture, images: np.ndarray, labels: np.ndarray, num_classes: int) -> Tensor:
        logits = self._logits(architecture, self._pixels(images), num_classes)
        return F.cross_entropy(logits.float(), self._labels(labels))

    def _logits(self, architecture: Architecture, pixels: Tensor, num_classes: int) -> Tensor:
        """Logits [B, C] of normalised pixels [B, 3, H, W]; columns from `num_classes` on are -1e30."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            x = self.model.norm_pre(self.model._pos_embed(self.model.patch_embed(pixels)))
            for index, (block, choice) in enumerate(zip(self.blocks, architecture, strict=True)):
                match choice.kind:
                    case "reuse":
                        x = self._dense(block, x, *self.experts[index])
                    case "adapt":
                        x = self._adapted(block, x, *self.experts[index], *self.pairs[index])
                    case "new":
                        x = self._dense(block, x, *self.new[index])
                    case "skip":
                        x = self._skipped(block, x)
            logits = F.linear(self.model.norm(x[:, 0]), *self.head)
        return torch.where(self.classes < num_classes, logits, -1e30)

    def _pixels(self, images: np.ndarray) -> Tensor:
        return normalised(images, self.config, self.device)

    def _labels(self, labels: np.ndarray) -> Tensor:
        return torch.from_numpy(labels).to(self.device, torch.int64)

    def _learned(self) -> Iterator[nn.Parameter]:
        for pair in (*self.pairs, *self.new, self.head):
            yield from pair

    def _new_pair(self, block: Block, rank: int) -> Pair:
        """LoRA's start: down [r, F] Kaiming-uniform with a = sqrt(5), up [D, r] zero."""
        width, num_inputs = block.mlp.fc2.weight.shape
        down = torch.empty(rank, num_inputs).uniform_(-(num_inputs**-0.5), num_inputs**-0.5)
        return nn.Parameter(down.to(self.device)), nn.Parameter(torch.zeros(width, rank, device=self.device))

    def _new_expert(self, block: Block) -> Pair:
        return self._linear(*block.mlp.fc2.weight.shape)

    def _linear(self, num_outputs: int, num_inputs: int) -> Pair:
        """Truncated normal 0.02 [out, in] and zero bias [out]."""
        weight = nn.init.trunc_normal_(torch.empty(num_outputs, num_inputs), std=0.02, a=-0.04, b=0.04)
        return nn.Parameter(weight.to(self.device)), nn.Parameter(torch.zeros(num_outputs, device=self.device))

    @torch.no_grad()
    def _put(self, pair: Pair, arrays: Arrays) -> None:
        for parameter, array in zip(pair, arrays, strict=True):
            value = torch.tensor(np.asarray(array, np.float32).T)
            if value.shape != parameter.shape:
                wanted = tuple(parameter.shape)[::-1]
                raise ValueError(f"array is {np.shape(array)}, expected {wanted} as rank, width and head were set")
            parameter.copy_(value)
            self.optimizer.state.pop(parameter, None)


def run_dense(block: Block, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A block on x [B, N, D] that reuses an expert, or has a new one: weight [D, F], bias [D]."""
    x = x + block.attn(block.norm1(x))
    u = block.mlp.act(block.mlp.fc1(block.norm2(x)))
    return x + F.linear(u, weight, bias)


def run_adapted(block: Block, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """A block on x [B, N, D] that adapts an expert by down [r, F] and up [D, r]."""
    x = x + block.attn(block.norm1(x))
    u = block.mlp.act(block.mlp.fc1(block.norm2(x)))
    return x + F.linear(u, weight, bias) + F.linear(F.linear(u, down), up)


def run_skipped(block: Block, x: Tensor) -> Tensor:
    """A block on x [B, N, D] without its FFN branch."""
    return x + block.attn(block.norm1(x))


def normalised(images: np.ndarray, config: ViTConfig, device: torch.device) -> Tensor:
    """Images [B, H, W, 3] uint8 as the backbone was trained to see them: float32 [B, 3, H, W]."""
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (config.mean, config.std))
    return (torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float() / 255.0 - mean) / std


def load_backbone(state_dict: Mapping[str, np.ndarray], model_name: str, image_size: int) -> VisionTransformer:
    """timm's frozen model without its head, in float32; the position embedding is resampled where it has to be."""
    model = timm.create_model(model_name, pretrained=False, num_classes=0, img_size=image_size)
    assert isinstance(model, VisionTransformer)
    tensors = {
        name: torch.tensor(np.asarray(value, np.float32))
        for name, value in state_dict.items()
        if name not in ("head.weight", "head.bias")
    }
    assert model.pos_embed is not None
    if tensors["pos_embed"].shape != model.pos_embed.shape:
        tensors["pos_embed"] = resample_abs_pos_embed(tensors["pos_embed"], list(model.patch_embed.grid_size))
    model.load_state_dict(tensors, strict=True)
    return model.eval().requires_grad_(False)


def config_of_timm(model_name: str) -> ViTConfig:
    """The first of our configs that bears this timm name; a name without its tag (`.fb_in1k`) is enough."""
    for config in CONFIGS.values():
        if config.timm_name is not None and model_name in (config.timm_name, config.timm_name.split(".")[0]):
            return config
    known = sorted(config.timm_name for config in CONFIGS.values() if config.timm_name is not None)
    raise ValueError(f"no config bears timm's name {model_name!r}; known: {', '.join(known)}")


def _to_ours(grad: Tensor) -> np.ndarray:
    return np.ascontiguousarray(grad.cpu().numpy().T)
