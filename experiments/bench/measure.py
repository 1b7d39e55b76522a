"""Timing, counting of FLOPs and output files of the benchmarks.

`alternate` times several sides in turns, `in_child` calls a function in a new process, `save`
writes the rows.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from cheem_jax.backbone.config import ViTConfig, at_image_size, config_of
from cheem_jax.backbone.flops import embed_flops, executed_halves, pair_flops
from cheem_jax.backbone.params import build, init_params
from cheem_jax.backbone.weights import Pretrained, load_pretrained
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.supernet import Supernet, SupernetState
from cheem_jax.cheem.training import train_step
from cheem_jax.cli.running import run_command
from cheem_jax.continual import peak_memory_bytes
from cheem_jax.core.architecture import Architecture
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.images import Images
from cheem_jax.core.pool import Pool, dense_experts
from cheem_jax.core.settings import Precision
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.executor import Executor, Network, Step
from cheem_jax.engine.feed import Budget, Feed, HostImages, keep_tokens
from cheem_jax.engine.stages import Stages
from cheem_jax.run import fingerprint
from cheem_jax.run.record import to_json

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "torch", "timm", "pillow", "grain")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Settings of every part."""

    out: Path = ROOT / "docs" / "benchmarks"
    """Folder of the JSON files; figures are written next to it."""
    quick: bool = False
    """Tiny sizes, to test that everything runs; the numbers mean nothing."""
    loaded: bool = False
    """Measure although other programs use the processors, which distorts even ratios."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: a measurement and its goal."""

    what: str
    seconds: dict[str, float]
    """Median seconds per side."""
    reached: float | None = None
    """The number that is compared with the goal; None if a side could not be measured."""
    goal: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    unit: str = "x"
    ceiling: float | None = None
    """The ratio that the FLOPs alone would allow."""
    share: float | None = None
    """FLOPs per second of our side, relative to the machine's fastest large matrix product."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None without goal or measurement."""
        if self.reached is None or self.goal is None:
            return None
        return self.reached >= self.goal if self.sense == "at least" else self.reached <= self.goal


Times = Mapping[str, Sequence[float]]
"""Seconds of every call by side."""
Sides = Mapping[str, Callable[[], object]]
"""Work that is timed in turns, by name."""


def alternate(sides: Sides, repeats: int) -> dict[str, list[float]]:
    """Seconds of every call: each side once to warm up, then all sides in turns in every repeat.

    Turns spread other load on the machine over all sides.
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


def medians(times: Times) -> dict[str, float]:
    """The median of every side."""
    return {name: statistics.median(calls) for name, calls in times.items()}


def ratio(seconds: Mapping[str, float], slow: str, fast: str) -> float | None:
    """Speed of `fast` relative to `slow`; None without one of them."""
    return seconds[slow] / seconds[fast] if slow in seconds and fast in seconds else None


def compare(
    what: str,
    times: Times,
    slow: str,
    fast: str,
    goal: float | None = None,
    *,
    flops: float | None = None,
    precision: Precision = "float32",
    **more: Any,
) -> Row:
    """The row of one side against another; `flops` are those of a call of `fast`."""
    seconds = medians(times)
    share = None if flops is None else flops / seconds[fast] / matrix_peak(precision)
    return Row(what, seconds, ratio(seconds, slow, fast), goal, share=share, **more)


def in_child(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Call a function in a new process, with `environment` added; return JSON values.

    The process has compiled nothing, and its resident memory is that of the function. Raises
    ValueError if it dies.
    """
    before = dict(os.environ)
    spawn = multiprocessing.get_context("spawn")
    os.environ.update(environment or {})
    try:
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=compile_everything) as pool:
            return to_json(pool.submit(function, *arguments).result())
    except BrokenProcessPool:
        raise ValueError(
            f"{function.__name__}{arguments} died; is there too little memory?"
        ) from None
    finally:
        os.environ.clear()
        os.environ.update(before)


def keep_compiled(folder: Path) -> None:
    """Keep compiled functions in a folder; must be called before the first compilation."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compile_everything() -> None:
    """Disable the persistent compilation cache, so that compilation is measured at its full
    cost."""
    jax.config.update("jax_enable_compilation_cache", False)


def difference(actual: Any, wanted: np.ndarray) -> float:
    """Largest difference of two arrays, relative to the largest entry of `wanted`."""
    return float(
        np.abs(np.asarray(actual) - wanted).max() / max(float(np.abs(wanted).max()), 1e-12)
    )


def process_memory(field: Literal["VmRSS", "VmHWM", "RssAnon"]) -> int:
    """Memory of this process in bytes on Linux: resident, peak, or resident without mapped files.

    On other systems it is the peak by `ru_maxrss`, which includes the parent's memory at the start.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak_memory_bytes()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


def other_work(seconds: float = 2.0) -> float | None:
    """Share of the processors' time that other programs use; None if the system does not
    report it."""

    def times() -> tuple[int, int]:
        fields = [
            int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        ]
        return sum(fields), fields[3] + fields[4]  # idle, and waiting for a disk

    try:
        (total, idle), _ = times(), time.sleep(seconds)
        later, later_idle = times()
    except OSError:
        return None
    return 1 - (later_idle - idle) / max(later - total, 1)


MOST_OTHER_WORK = 0.1
_load: dict[str, float] = {}
"""The share of other work, for the record."""


@functools.cache
def matrix_peak(precision: Precision) -> float:
    """FLOPs per second of the fastest large matrix product, by JAX or, if installed, by PyTorch."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    best = math.inf
    values = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    sides: list[Callable[[], object]] = []
    for options in {id(o): o for o in (jit_options("float32"), jit_options("bfloat16"))}.values():
        ours = jax.jit(
            lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32), compiler_options=options
        )
        sides.append(
            functools.partial(
                lambda f, x: f(x).block_until_ready(), ours, jnp.asarray(values, precision)
            )
        )
    if importlib.util.find_spec("torch") is not None and jax.default_backend() == "cpu":
        import torch

        theirs = torch.from_numpy(values).to(getattr(torch, precision))
        sides.append(lambda: theirs @ theirs)
    for side in sides:
        best = min([best, *alternate({"": side}, 5)[""]])
    return 2 * size**3 / best


def machine() -> dict[str, Any]:
    """Machine, versions and date."""
    conditions = fingerprint.take({"data_sha256": {}, "weights_sha256": ""})
    device = conditions["device"]
    installed = {one.name: one.version for one in importlib.metadata.distributions()}
    return {
        **_load,
        "cpu": device["processor"],
        "cores": device["threads"],
        "platform": device["platform"],
        "device": device["kind"],
        "python": conditions["versions"]["python"],
        **{name: installed[name] for name in PACKAGES if name in installed},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def save(
    out: Path | None, part: str, rows: Sequence[Row], *, quick: bool = False, **more: Any
) -> None:
    """Print a line per row and write a part's file; the name ends in `-gpu` on an accelerator."""
    for row in rows:
        texts = [f"{name} {value:.4g} s" for name, value in row.seconds.items()]
        if row.reached is not None:
            texts.append(f"{row.reached:.3g} {row.unit}")
        if row.share is not None:
            texts.append(f"{100 * row.share:.0f} % of the matrix peak")
        if row.met is not None:
            texts.append(f"goal: {row.sense} {row.goal:.3g}: {'yes' if row.met else 'no'}")
        print(f"{row.what}: {', '.join(texts) or 'not measured'}", flush=True)
    if out is None:
        return
    name = part if jax.default_backend() == "cpu" else f"{part}-gpu"
    out.mkdir(parents=True, exist_ok=True)
    lines = [{**dataclasses.asdict(row), "met": row.met} for row in rows]
    numbers = {"part": part, "quick": quick, "machine": machine(), "rows": lines, **more}
    write_atomically(out / f"{name}.json", json.dumps(to_json(numbers), indent=1) + "\n")


def command(main: Callable[[Bench], None], settings: Bench) -> None:
    """Run a part with compilation at its full cost; refuse if other programs use the processors."""
    compile_everything()
    run_command(lambda settings: main(alone(settings)), settings)


def alone(settings: Bench) -> Bench:
    """The same settings; ValueError if other work would distort the measurement."""
    share = None if settings.quick else other_work()
    if share is not None:
        _load["other_work"] = round(share, 3)
        if share > MOST_OTHER_WORK and not settings.loaded:
            raise ValueError(
                f"other programs use {100 * share:.0f} % of the processors, which distorts even"
                f" ratios; expected at most {100 * MOST_OTHER_WORK:.0f} %: wait for them, or"
                " measure all the same with --loaded"
            )
    return settings


def say(message: str) -> None:
    """Print a line to the terminal without buffering."""
    print(message, file=sys.stderr, flush=True)


def backbone(name: str, image_size: int | None = None) -> Pretrained:
    """A backbone's weights: bundled, from the folder CHEEM_SHARED, or random, which are as fast."""
    if name in ("vit_micro", "vit_nano"):
        return load_pretrained(name, image_size=image_size)
    file = (
        Path(os.environ.get("CHEEM_SHARED", ROOT.parent / "shared"))
        / "weights"
        / f"{name}_patch16_224.fp16"
    )
    file = file.with_name(f"{file.name}.safetensors")
    if file.is_file():
        return load_pretrained(name, weights=file, image_size=image_size)
    config = config_of(name) if image_size is None else at_image_size(config_of(name), image_size)
    return Pretrained(config, init_params(config, jax.random.key(0)), "random", "")


def stages(vit: Pretrained) -> Stages:
    """The library's executor for training on a CPU, memory at MLP-down."""
    return Stages(build(vit.config, vit.params), "mlp_down")


def kept(executor: Executor, images: Images, prefix: Network = (), *, batch_size: int) -> Feed:
    """Tokens after frozen blocks, cached as in training, without a limit on memory."""
    feed = HostImages(executor, images)
    budget = Budget(2**34)
    return keep_tokens(
        "", executor, feed, len(images), prefix, batch_size=batch_size, budget=budget
    )


@dataclasses.dataclass
class Training:
    """A supernet and its current state, which `step` replaces."""

    supernet: Supernet
    state: SupernetState


def step(executor: Executor, fitting: Training, architecture: Architecture, data: Step) -> float:
    """Run one training step to its end; replace the state of `fitting` and return the loss."""
    fitting.state, loss = train_step(
        executor, fitting.supernet, fitting.state, architecture, data, rate=1e-3
    )
    jax.block_until_ready((loss, fitting.state))
    return float(loss)


def new_task(pool: Pool, num_classes: int, rank: int) -> Training:
    """A fresh supernet over the experts of a pool."""
    supernet = Supernet(jax.random.key(1), dense_experts(pool), num_classes, OpSettings(rank=rank))
    return Training(supernet, supernet.init())


def random_images(num: int, config: ViTConfig, seed: int = 0) -> np.ndarray:
    """uint8 `[num, S, S, 3]`."""
    size = config.image_size
    return np.random.default_rng(seed).integers(0, 256, (num, size, size, 3), np.uint8)


def draw_over_tasks(
    entries: Sequence[Mapping[str, Any]], panels: Mapping[str, Mapping[str, str]], file: Path
) -> None:
    """Draw a panel per title over the number of learned tasks, with a line per label and key."""
    num_rows = -(-len(panels) // 3)
    figure = Figure(figsize=(12, 3 * num_rows), dpi=120, layout="constrained")
    tasks = [entry["tasks"] for entry in entries]
    for place, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(num_rows, 3, place)
        for label, key in lines.items():
            axes.plot(
                tasks, [entry[key] for entry in entries], marker="o", markersize=4, label=label
            )
        axes.set(xlabel="tasks learned", xticks=tasks[-3:], ylim=(0, None))
        axes.set_title(title, fontsize=10)
        if len(lines) > 1:
            axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


# ---- FLOPs per image as executed: with attention products, the last block for the CLS token alone


class BlockFlops(NamedTuple):
    """FLOPs of one block's forward pass: the part of all ops, that of all ops except Skip, and the
    plastic layer (`mlp_down`)."""

    enter: int
    widen: int
    leave: int
    attention: int
    """Products of activations in `enter`, whose gradient costs twice as much."""


def block_flops(config: ViTConfig, block: int) -> BlockFlops:
    """Count FLOPs from shapes, two per multiply-add."""
    last = block == config.depth - 1
    enter, branch = executed_halves(config, last=last)
    outputs = 1 if last else config.num_tokens
    return BlockFlops(
        enter, branch // 2, branch // 2, 2 * 2 * outputs * config.num_tokens * config.width
    )


def tree_flops(config: ViTConfig, networks: Sequence[Network], *, from_images: bool = False) -> int:
    """FLOPs of networks as one prefix tree, from the tokens of block 0 or from images.

    Attention runs once per distinct parent, the up-projection once per parent with a child that is
    not Skip, the down-projection once per distinct child.
    """
    total = embed_flops(config) + block_flops(config, 0).enter if from_images else 0
    codes = [
        tuple(-1 if step.expert is None else step.code for step in network) for network in networks
    ]
    for block in range(config.depth):
        cost = block_flops(config, block)
        children = {prefix[: block + 1] for prefix in codes}
        parents = {child[:block] for child in children}
        wide = {child[:block] for child in children if child[block] != -1}
        total += cost.enter * len(parents) if block else 0
        total += cost.widen * len(wide) + cost.leave * sum(child[block] != -1 for child in children)
    return total


def separate_flops(
    config: ViTConfig, networks: Sequence[Network], *, from_images: bool = False
) -> int:
    """FLOPs of the same networks one by one."""
    return sum(tree_flops(config, [network], from_images=from_images) for network in networks)


def step_flops(
    config: ViTConfig, architecture: Architecture, rank: int, begin: int | None = None
) -> int:
    """FLOPs of a training step on one image, from the tokens of block `begin` or from the image
    (None).

    Blocks before the first op that learns have no backward pass, and that op's input no gradient.
    """
    costs = [block_flops(config, block) for block in range(config.depth)]
    kinds = [choice.kind for choice in architecture]
    first = next(
        (block for block, kind in enumerate(kinds) if kind in ("adapt", "new")), config.depth
    )
    start = 0 if begin is None else begin
    total = embed_flops(config) if begin is None else 0
    for block, (cost, kind) in enumerate(zip(costs, kinds, strict=True)):
        if block < start:
            continue
        branch = 0 if kind == "skip" else cost.widen + cost.leave
        entered = 0 if block == begin else cost.enter
        outputs = 1 if block == config.depth - 1 else config.num_tokens
        pair = (
            pair_flops(config, "mlp_down", rank) * outputs // config.num_tokens
            if kind == "adapt"
            else 0
        )
        total += entered + branch + pair
        if block > first:
            total += cost.enter + cost.attention + branch + pair
        if block >= first:
            total += {"new": cost.leave, "adapt": pair}.get(kind, 0)
    return total
