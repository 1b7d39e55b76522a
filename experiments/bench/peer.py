"""CHEEM's steps and scoring, and L2P's steps, in plain PyTorch with timm, as references for speed.

The code is that of a user without this library: timm's blocks with an op instead of `mlp.fc2`, or
with prompts before the keys and values of the first block, autograd, and one Adam for all
parameters. Arguments and results are NumPy arrays in this library's layout (`[in, out]`); PyTorch's
layout is `[out, in]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cheem_jax.backbone.timm_names import to_timm_name
from cheem_jax.backbone.weights import Pretrained
from cheem_jax.baselines.l2p import L2pConfig
from cheem_jax.core.architecture import Architecture, Choice

Arrays = tuple[np.ndarray, np.ndarray]
"""Two arrays in this library's layout: an `Expert` or a `Head` (weight, bias), or a `LowRank`
(down, up)."""
Pair = tuple[nn.Parameter, nn.Parameter]
"""Two parameters in PyTorch's layout."""
Block = Any
"""timm's `Block`; its layers have no declared types."""

LEARNING_RATE = 1e-3
RECOMPILE_LIMIT = 64
"""Limit of the variants of one compiled function; variants differ in gradients, training, batch
size and precision."""


class Peer:
    """timm's frozen model in float32 with our weights, on the kind of device that JAX uses.

    Images are uint8 [B, H, W, 3], labels [B]. Subclasses set `optimizer`.
    """

    optimizer: torch.optim.Adam

    def __init__(self, pretrained: Pretrained):
        config = pretrained.config
        assert config.timm_name is not None
        self.device = torch.device("cpu" if jax.default_backend() == "cpu" else "cuda")
        name = config.timm_name.split(".")[0]
        model: Any = timm.create_model(
            name, pretrained=False, num_classes=0, img_size=config.image_size
        )
        model.load_state_dict(to_timm(pretrained), strict=True)
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.mean, self.std = (
            torch.tensor(values, device=self.device).view(1, 3, 1, 1)
            for values in (config.mean, config.std)
        )

    def pixels(self, images: np.ndarray | Tensor) -> Tensor:
        """Normalise images to float32 [B, 3, H, W]; the argument can be on the device."""
        scaled = torch.as_tensor(images).to(self.device).permute(0, 3, 1, 2).float() / 255.0
        return (scaled - self.mean) / self.std

    def tokens(self, pixels: Tensor) -> Tensor:
        """Compute the input of the first block: [B, N, D]."""
        return self.model.norm_pre(self.model._pos_embed(self.model.patch_embed(pixels)))

    def labels(self, labels: np.ndarray | Tensor) -> Tensor:
        """Copy labels to the device."""
        return torch.as_tensor(labels).to(self.device, torch.int64)

    def descend(self, loss: Tensor) -> Tensor:
        """Take one step of Adam; return the loss before the step without waiting for the device."""
        # with None, parameters that are not sampled keep their moments and step count
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class CheemPeer(Peer):
    """Blocks with Reuse, Adapt, New or Skip at `mlp.fc2`, and the learned parameters of a task.

    `experts[block]` are the backbone's and frozen; `pairs[block]`, `new[block]` and `head` are
    learned. Every block computes all tokens, as in timm. `precision` is autocast's type in the
    forward pass.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        rank: int,
        num_outputs: int,
        compiled: bool = False,
        precision: Literal["float32", "bfloat16"] = "float32",
    ):
        super().__init__(pretrained)
        self.precision = precision
        self.blocks: list[Block] = list(self.model.blocks)
        shapes = [block.mlp.fc2.weight.shape for block in self.blocks]
        self.experts: list[Pair] = [
            (block.mlp.fc2.weight, block.mlp.fc2.bias) for block in self.blocks
        ]
        self.pairs = [self._new_pair(width, num_inputs, rank) for width, num_inputs in shapes]
        self.new = [self._linear(*shape) for shape in shapes]
        self.head = self._linear(num_outputs, self.model.num_features)
        self.classes = torch.arange(num_outputs, device=self.device)
        learned = [parameter for pair in (*self.pairs, *self.new, self.head) for parameter in pair]
        self.optimizer = torch.optim.Adam(learned, lr=LEARNING_RATE)
        self._dense, self._adapted, self._skipped = run_dense, run_adapted, run_skipped
        if compiled:
            # above the limit a function would run eagerly, and PyTorch would only warn
            torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            self._dense, self._adapted, self._skipped = (
                torch.compile(run, dynamic=False) for run in (run_dense, run_adapted, run_skipped)
            )

    @torch.no_grad()
    def set_learned(
        self, learned: Mapping[tuple[int, str], Sequence[Any]], head: Sequence[Any]
    ) -> None:
        """Copy learned parameters in this library's layout, and reset the state of Adam.

        `learned` maps a block and "adapt" to (down [F, r], up [r, D]), and a block and "new" to
        (weight [F, D], bias [D]); `head` is (weight [D, C], bias [C]) with C = `num_outputs`.
        """
        parameters = {"adapt": self.pairs, "new": self.new}
        pairs = [(parameters[kind][block], arrays) for (block, kind), arrays in learned.items()]
        for pair, arrays in (*pairs, (self.head, head)):
            for parameter, array in zip(pair, arrays, strict=True):
                parameter.copy_(torch.tensor(np.asarray(array, np.float32).T))
                self.optimizer.state.pop(parameter, None)

    def gradients(
        self, architecture: Architecture, images: np.ndarray, labels: np.ndarray, num_classes: int
    ) -> tuple[float, dict[int, Arrays], Arrays]:
        """Compute the mean loss, and its gradients for each block and for the head in this
        library's layout, without an update."""
        learned = {"adapt": self.pairs, "new": self.new}
        sampled = {
            i: learned[choice.kind][i]
            for i, choice in enumerate(architecture)
            if choice.kind in learned
        }
        loss = self._loss(architecture, images, labels, num_classes)
        parameters = [tensor for pair in (*sampled.values(), self.head) for tensor in pair]
        flat = iter([_to_ours(grad) for grad in torch.autograd.grad(loss, parameters)])
        grads = {block: (next(flat), next(flat)) for block in sampled}
        return loss.item(), grads, (next(flat), next(flat))

    def step(
        self,
        architecture: Architecture,
        images: np.ndarray | Tensor,
        labels: np.ndarray | Tensor,
        num_classes: int,
    ) -> Tensor:
        """Take one step of Adam on the architecture's parameters and the head; return the loss
        before the step."""
        return self.descend(self._loss(architecture, images, labels, num_classes))

    @torch.inference_mode()
    def count_correct(
        self,
        architectures: Sequence[Architecture],
        images: np.ndarray | Tensor,
        labels: np.ndarray,
        num_classes: int,
    ) -> np.ndarray:
        """Count the correct predictions of each architecture: int64 [C]."""
        pixels = self.pixels(images)
        device_labels = self.labels(labels)
        counts = [
            (self._logits(a, pixels, num_classes).argmax(dim=-1) == device_labels).sum()
            for a in architectures
        ]
        return torch.stack(counts).cpu().numpy()

    @torch.inference_mode()
    def forward(self, architecture: Architecture, images: np.ndarray, batch_size: int) -> None:
        """Run a forward pass over a data set."""
        for start in range(0, len(images), batch_size):
            self._logits(
                architecture, self.pixels(images[start : start + batch_size]), len(self.classes)
            )

    def _loss(
        self,
        architecture: Architecture,
        images: np.ndarray | Tensor,
        labels: np.ndarray | Tensor,
        num_classes: int,
    ) -> Tensor:
        logits = self._logits(architecture, self.pixels(images), num_classes)
        return F.cross_entropy(logits.float(), self.labels(labels))

    def _logits(self, architecture: Architecture, pixels: Tensor, num_classes: int) -> Tensor:
        """Compute the logits [B, C] of normalised pixels [B, 3, H, W]; columns after `num_classes`
        are -1e30."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            x = self.tokens(pixels)
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

    def _new_pair(self, width: int, num_inputs: int, rank: int) -> Pair:
        """Initialise a pair as LoRA does: down [r, F] is Kaiming-uniform with a = sqrt(5), up [D,
        r] is zero."""
        down = torch.empty(rank, num_inputs).uniform_(-(num_inputs**-0.5), num_inputs**-0.5)
        return nn.Parameter(down.to(self.device)), nn.Parameter(
            torch.zeros(width, rank, device=self.device)
        )

    def _linear(self, num_outputs: int, num_inputs: int) -> Pair:
        """Initialise a layer: a truncated normal weight [out, in] with standard deviation 0.02 and
        a zero bias [out]."""
        weight = nn.init.trunc_normal_(
            torch.empty(num_outputs, num_inputs), std=0.02, a=-0.04, b=0.04
        )
        return nn.Parameter(weight.to(self.device)), nn.Parameter(
            torch.zeros(num_outputs, device=self.device)
        )


class Walked(NamedTuple):
    """Outputs of one network for a data set: features [N, D], mean CLS tokens [L, D], and the mean
    patch tokens of some blocks."""

    features: np.ndarray
    means: np.ndarray
    patch_tokens: list[np.ndarray]


class TaskPeer(CheemPeer):
    """All phases of learning a first task, with images in batches of `batch_size`."""

    def __init__(self, pretrained: Pretrained, *, batch_size: int, **options: Any):
        super().__init__(pretrained, **options)
        self.batch_size = batch_size
        self.base: Architecture = (Choice("reuse", 0),) * len(self.blocks)

    @torch.inference_mode()
    def walk(
        self, architecture: Architecture, images: np.ndarray, blocks: Sequence[int] = ()
    ) -> Walked:
        """Run a forward pass over images [N, H, W, 3]; the mean tokens are those of the plastic
        layers' outputs."""
        features = []
        read = list[list[Tensor]]([] for _ in blocks)
        sums = torch.zeros(len(self.blocks), self.model.num_features)
        for start in range(0, len(images), self.batch_size):
            x = self.tokens(self.pixels(images[start : start + self.batch_size]))
            for index, (block, choice) in enumerate(zip(self.blocks, architecture, strict=True)):
                z = x + block.attn(block.norm1(x))
                if index in blocks:
                    read[blocks.index(index)].append(z[:, 1:].mean(dim=1))
                component = (
                    None if choice.kind == "skip" else self._component(block, z, index, choice)
                )
                x = z if component is None else z + component
                sums[index] += 0 if component is None else component[:, 0].sum(dim=0)
            features.append(self.model.norm(x[:, 0]))
        return Walked(
            torch.cat(features).numpy(),
            (sums / len(images)).numpy(),
            [torch.cat(parts).numpy() for parts in read],
        )

    def count_in_batches(
        self,
        architectures: Sequence[Architecture],
        images: np.ndarray,
        labels: np.ndarray,
        num_classes: int,
    ) -> np.ndarray:
        """Count the correct predictions of each architecture over a data set, in batches."""
        cuts = [
            slice(start, start + self.batch_size)
            for start in range(0, len(images), self.batch_size)
        ]
        counts = [
            self.count_correct(architectures, images[cut], labels[cut], num_classes) for cut in cuts
        ]
        return np.sum(counts, axis=0)

    def _component(self, block: Block, z: Tensor, index: int, choice: Choice) -> Tensor:
        u = block.mlp.act(block.mlp.fc1(block.norm2(z)))
        weight, bias = self.new[index] if choice.kind == "new" else self.experts[index]
        component = F.linear(u, weight, bias)
        if choice.kind == "adapt":
            down, up = self.pairs[index]
            component = component + F.linear(F.linear(u, down), up)
        return component


def run_dense(block: Block, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run a block on x [B, N, D] with a reused or new expert: weight [D, F], bias [D]."""
    x = x + block.attn(block.norm1(x))
    u = block.mlp.act(block.mlp.fc1(block.norm2(x)))
    return x + F.linear(u, weight, bias)


def run_adapted(
    block: Block, x: Tensor, weight: Tensor, bias: Tensor, down: Tensor, up: Tensor
) -> Tensor:
    """Run a block on x [B, N, D] with an expert that is adapted by down [r, F] and up [D, r]."""
    x = x + block.attn(block.norm1(x))
    u = block.mlp.act(block.mlp.fc1(block.norm2(x)))
    return x + F.linear(u, weight, bias) + F.linear(F.linear(u, down), up)


def run_skipped(block: Block, x: Tensor) -> Tensor:
    """Run a block on x [B, N, D] without its FFN branch."""
    return x + block.attn(block.norm1(x))


class L2pPeer(Peer):
    """A pool of prompts at the first block, and one linear head.

    A step computes the queries, as public implementations do, or has cached queries as an argument.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        config: L2pConfig,
        pool: np.ndarray,
        keys: np.ndarray,
        weight: np.ndarray,
    ):
        """Initialise the pool [M, P, D], keys [M, D] and head weight [D, C]; the head's bias is
        zero."""
        super().__init__(pretrained)
        self.config = config
        arrays = (pool, keys, weight.T, np.zeros(weight.shape[1], np.float32))
        self.learned = [nn.Parameter(torch.tensor(array, device=self.device)) for array in arrays]
        self.pool, self.keys, self.weight, self.bias = self.learned
        self.optimizer = torch.optim.Adam(self.learned, lr=LEARNING_RATE)

    @torch.no_grad()
    def query(self, images: np.ndarray) -> Tensor:
        """Compute the CLS tokens [B, D] of a pass without prompts."""
        return self.model.forward_features(self.pixels(images))[:, 0]

    def step(self, images: np.ndarray, labels: np.ndarray, query: Tensor | None = None) -> Tensor:
        """Take one step of Adam; return the loss before the step."""
        return self.descend(
            self.loss(images, labels, self.query(images) if query is None else query)
        )

    def gradients(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """Compute the loss, and its gradients for pool, keys, weight [D, C] and bias."""
        loss = self.loss(images, labels, self.query(images))
        pool, keys, weight, bias = (
            grad.cpu().numpy() for grad in torch.autograd.grad(loss, self.learned)
        )
        return loss.item(), [pool, keys, weight.T, bias]

    def loss(self, images: np.ndarray, labels: np.ndarray, query: Tensor) -> Tensor:
        """Compute the mean cross-entropy plus the distance of the queries from the selected
        keys."""
        similarity = F.normalize(query, dim=-1) @ F.normalize(self.keys, dim=-1).T
        best, selected = similarity.topk(self.config.top_k, dim=-1)
        prompts = self.pool[selected]
        half = self.config.length // 2
        keys = prompts[:, :, :half].flatten(1, 2)
        values = prompts[:, :, half:].flatten(1, 2)
        first, *others = self.model.blocks
        x = run_prefixed(first, self.tokens(self.pixels(images)), keys, values)
        for block in others:
            x = block(x)
        logits = F.linear(self.model.norm(x)[:, 0], self.weight, self.bias)
        pull = (1 - best).sum(dim=1).mean()
        return F.cross_entropy(logits, self.labels(labels)) + pull


def run_prefixed(block: Block, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Run a block on x [B, N, D] whose queries also attend to `keys` and `values` [B, P, D]."""
    attention = block.attn
    num, tokens, width = x.shape

    def heads(t: Tensor) -> Tensor:
        return t.reshape(num, -1, attention.num_heads, width // attention.num_heads).transpose(1, 2)

    query, key, value = attention.qkv(block.norm1(x)).chunk(3, dim=-1)
    key, value = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
    mixed = F.scaled_dot_product_attention(heads(query), heads(key), heads(value))
    x = x + attention.proj(mixed.transpose(1, 2).reshape(num, tokens, width))
    return x + block.mlp(block.norm2(x))


def to_timm(pretrained: Pretrained) -> dict[str, Tensor]:
    """Return the parameters under timm's names and in PyTorch's layout, without the head."""
    tensors = {}
    patch = pretrained.config.patch_size
    for name, value in pretrained.params.items():
        if name == "patch.kernel":
            value = value.reshape(patch, patch, 3, -1).transpose(3, 2, 0, 1)
        elif name.endswith(".kernel"):
            value = value.T
        elif name in ("class_token", "position"):
            value = value.reshape(1, -1, value.shape[-1])
        tensors[to_timm_name(name)] = torch.tensor(np.asarray(value, np.float32))
    return {name: value for name, value in tensors.items() if not name.startswith("head.")}


def _to_ours(grad: Tensor) -> np.ndarray:
    return np.ascontiguousarray(grad.cpu().numpy().T)
