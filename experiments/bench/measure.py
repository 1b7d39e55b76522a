"""How benchmarks measure and count: sides in turns, medians, FLOPs that must be run, and the file they end in."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from cheem_jax.architecture import Architecture
from cheem_jax.atomic import write_atomically
from cheem_jax.backbone.config import CONFIGS, ViTConfig, at_image_size
from cheem_jax.backbone.params import init_params
from cheem_jax.backbone.weights import Pretrained, load_pretrained
from cheem_jax.cli import run_command
from cheem_jax.execution.executor import Network
from cheem_jax.flops import pair_flops
from cheem_jax.report.record import to_json

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "torch", "timm", "pillow", "grain")


@dataclasses.dataclass(frozen=True)
class Bench:
    """What every part is told."""

    out: Path = ROOT / "docs" / "benchmarks"
    """Folder of the JSON files; figures and tables are written beside it."""
    quick: bool = False
    """Settings so small that the numbers mean nothing: to see whether everything runs."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: what was timed, and what was wanted of it."""

    what: str
    seconds: dict[str, float]
    """Median seconds per side."""
    reached: float | None = None
    """The figure that the goal is about; None where one of its sides could not be measured."""
    goal: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    unit: str = "x"
    ceiling: float | None = None
    """What counting FLOPs alone would allow."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None without goal or measurement."""
        if self.reached is None or self.goal is None:
            return None
        return self.reached >= self.goal if self.sense == "at least" else self.reached <= self.goal


def alternate(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call: each side once to warm up, then one after the other in every repeat.

    Whatever else slows the machine down for a while so meets all sides alike.
    """
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of every side."""
    return {name: statistics.median(found) for name, found in times.items()}


def ratio(seconds: Mapping[str, float], slow: str, fast: str) -> float | None:
    """How many times as long `slow` takes; None where a side is missing."""
    return seconds[slow] / seconds[fast] if slow in seconds and fast in seconds else None


def machine() -> dict[str, Any]:
    """Where and with what was measured."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "platform": device.platform,
        "device": device.device_kind,
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name)) is not None},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def save(out: Path, part: str, rows: Sequence[Row], *, quick: bool = False, **more: Any) -> Path:
    """Write what a part found as one file, whole or not at all; those of an accelerator end in `-gpu`."""
    name = part if jax.default_backend() == "cpu" or part.startswith("gpu-") else f"{part}-gpu"
    out.mkdir(parents=True, exist_ok=True)
    lines = [{**dataclasses.asdict(row), "met": row.met} for row in rows]
    found = {"part": part, "quick": quick, "machine": machine(), "rows": lines, **more}
    write_atomically(out / f"{name}.json", json.dumps(to_json(found), indent=1) + "\n")
    for row in rows:
        print(f"{row.what}: {describe(row)}", flush=True)
    return out / f"{name}.json"


def describe(row: Row) -> str:
    """One line for the terminal."""
    sides = ", ".join(f"{name} {value:.4g} s" for name, value in row.seconds.items())
    if row.reached is None:
        return sides or "not measured"
    goal = "" if row.goal is None else f" (goal: {row.sense} {row.goal:.3g}: {'yes' if row.met else 'no'})"
    return f"{sides}{'; ' if sides else ''}{row.reached:.3g} {row.unit}{goal}"


def command(main: Callable[[Any], None], settings: Any) -> None:
    """Run a part; without the persistent cache, so that compiling is counted as what it costs."""
    jax.config.update("jax_enable_compilation_cache", False)
    run_command(main, settings)


def say(message: str) -> None:
    """A line on the terminal, at once."""
    print(message, file=sys.stderr, flush=True)


def backbone(name: str, image_size: int | None = None) -> Pretrained:
    """A backbone's weights: bundled ones, DeiT-Tiny's in the folder CHEEM_SHARED, else random: speed is the same."""
    if name in ("vit_micro", "vit_nano"):
        return load_pretrained(name, image_size=image_size)
    file = Path(os.environ.get("CHEEM_SHARED", ROOT.parent / "shared")) / "weights" / f"{name}_patch16_224.fp16"
    file = file.with_name(f"{file.name}.safetensors")
    if file.is_file():
        return load_pretrained(name, weights=file, image_size=image_size)
    config = CONFIGS[name] if image_size is None else at_image_size(CONFIGS[name], image_size)
    return Pretrained(config, init_params(config, jax.random.key(0)), "random", "")


def random_images(num: int, config: ViTConfig, seed: int = 0) -> np.ndarray:
    """uint8 `[num, S, S, 3]`."""
    size = config.image_size
    return np.random.default_rng(seed).integers(0, 256, (num, size, size, 3), np.uint8)


def ignore_advance(num_images: int, note: str = "", /) -> None:
    """For work whose progress nobody watches."""


# ---- FLOPs per image as the executors run them: attention products counted, the last block for the class token alone


class BlockFlops(NamedTuple):
    """One block forward: what its choices share, what all but Skip share, and the plastic layer (`mlp_down`)."""

    enter: int
    widen: int
    leave: int
    attention: int
    """The part of `enter` that is products of activations: their gradient costs twice as much as they do."""


def block_flops(config: ViTConfig, block: int) -> BlockFlops:
    """Counted from shapes, two per multiply-add."""
    tokens, width, wide = config.num_tokens, config.width, config.mlp_width
    outputs = 1 if block == config.depth - 1 else tokens
    attention = 2 * 2 * outputs * tokens * width
    linear = 2 * (2 * tokens + 2 * outputs) * width * width
    return BlockFlops(linear + attention, 2 * outputs * width * wide, 2 * outputs * wide * width, attention)


def embed_flops(config: ViTConfig) -> int:
    """Patch embedding."""
    return 2 * config.num_patches * 3 * config.patch_size**2 * config.width


def tree_flops(config: ViTConfig, networks: Sequence[Network], *, from_images: bool = False) -> int:
    """Networks as one prefix tree, from the tokens of block 0 or from images.

    Attention once per distinct parent, up-projection once per parent with a child that is not Skip, down-projection
    once per distinct child.
    """
    total = embed_flops(config) + block_flops(config, 0).enter if from_images else 0
    codes = [tuple(-1 if step.expert is None else step.code for step in network) for network in networks]
    for block in range(config.depth):
        cost = block_flops(config, block)
        children = {prefix[: block + 1] for prefix in codes}
        parents = {child[:block] for child in children}
        wide = {child[:block] for child in children if child[block] != -1}
        total += cost.enter * len(parents) if block else 0
        total += cost.widen * len(wide) + cost.leave * sum(child[block] != -1 for child in children)
    return total


def separate_flops(config: ViTConfig, networks: Sequence[Network], *, from_images: bool = False) -> int:
    """The same networks one by one."""
    return sum(tree_flops(config, [network], from_images=from_images) for network in networks)


def step_flops(config: ViTConfig, architecture: Architecture, rank: int, begin: int | None = None) -> int:
    """Forward and backward of one image, from the tokens of block `begin` or from the image (None).

    Before the first op that learns nothing runs backward; that op's own input needs no gradient.
    """
    costs = [block_flops(config, block) for block in range(config.depth)]
    kinds = [choice.kind for choice in architecture]
    first = next((block for block, kind in enumerate(kinds) if kind in ("adapt", "new")), config.depth)
    start = 0 if begin is None else begin
    total = embed_flops(config) if begin is None else 0
    for block, (cost, kind) in enumerate(zip(costs, kinds, strict=True)):
        if block < start:
            continue
        branch = 0 if kind == "skip" else cost.widen + cost.leave
        entered = 0 if block == begin else cost.enter
        outputs = 1 if block == config.depth - 1 else config.num_tokens
        pair = pair_flops(config, "mlp_down", rank) * outputs // config.num_tokens if kind == "adapt" else 0
        total += entered + branch + pair
        if block > first:
            total += cost.enter + cost.attention + branch + pair
        if block >= first:
            total += {"new": cost.leave, "adapt": pair}.get(kind, 0)
    return total


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
