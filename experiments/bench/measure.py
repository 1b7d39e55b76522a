"""Timing, counting of FLOPs and output files of the benchmarks.

`alternate` times several sides in turns, `in_child` calls a function in a new process, and `save`
writes the rows.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from cheem_jax.backbone.config import ViTConfig, at_image_size, find_config
from cheem_jax.backbone.flops import embed_flops, executed_halves, pair_flops
from cheem_jax.backbone.params import build, init_params
from cheem_jax.backbone.weights import Pretrained, load_pretrained
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.supernet import Supernet, SupernetState
from cheem_jax.cheem.training import train_steps
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import Architecture
from cheem_jax.core.atomic import write_atomically
from cheem_jax.core.images import Images
from cheem_jax.core.pool import Pool, dense_experts
from cheem_jax.core.settings import Precision
from cheem_jax.engine.compilation import jit_options
from cheem_jax.engine.executor import Executor, Network, Step
from cheem_jax.engine.feed import Budget, Feed, HostImages, cache_tokens
from cheem_jax.engine.stages import Stages
from cheem_jax.run import fingerprint
from cheem_jax.run.peak import peak_memory_bytes
from cheem_jax.run.record import to_json

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax", "jaxlib", "flax", "torch", "timm", "pillow", "grain")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Settings of every benchmark."""

    out: Path = ROOT / "docs" / "benchmarks"
    """Folder of the JSON files; figures are written next to it."""
    quick: bool = False
    """Use tiny sizes to test that everything runs; the numbers are meaningless."""
    loaded: bool = False
    """Measure even if other processes use the processors, which distorts even ratios."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table: a measurement and its goal."""

    what: str
    seconds: dict[str, float]
    """Median seconds of each side."""
    reached: float | None = None
    """Value that is compared with the goal; None if a side could not be measured."""
    goal: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    unit: str = "x"
    ceiling: float | None = None
    """Ratio of the sides' FLOPs."""
    share: float | None = None
    """FLOPs per second of our side, divided by those of the machine's fastest large matrix
    product."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None if there is no goal or no measurement."""
        if self.reached is None or self.goal is None:
            return None
        return self.reached >= self.goal if self.sense == "at least" else self.reached <= self.goal


Times = Mapping[str, Sequence[float]]
"""Seconds of every call, keyed by side."""
Sides = Mapping[str, Callable[[], object]]
"""Functions that are timed in turns, keyed by the name of the side."""


def alternate(sides: Sides, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every call. Every side runs once to warm up, then all sides run in
    turns `repeats` times.

    Taking turns spreads other load on the machine over all sides.
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
    """Return the median seconds of every side."""
    return {name: statistics.median(calls) for name, calls in times.items()}


def ratio(seconds: Mapping[str, float], slow: str, fast: str) -> float | None:
    """Return how many times as fast as `slow` the side `fast` is; None if one of them is
    missing."""
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
    """Make the row that compares one side with another; `flops` is the number of FLOPs of one call
    of `fast`."""
    seconds = medians(times)
    share = None if flops is None else flops / seconds[fast] / matrix_peak(precision)
    return Row(what, seconds, ratio(seconds, slow, fast), goal, share=share, **more)


def in_child(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Call a function in a new process with the additional variables `environment`; return its
    result as JSON values.

    The process has compiled nothing, and its resident memory is that of the function. Raises
    ValueError if the process dies.
    """
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with fresh_process() as pool:
            return to_json(pool.submit(function, *arguments).result())
    except BrokenProcessPool:
        raise ValueError(
            f"{function.__name__}{arguments} died; is there too little memory?"
        ) from None
    finally:
        os.environ.clear()
        os.environ.update(before)


def fresh_process() -> ProcessPoolExecutor:
    """Return a pool of one new process, which has compiled nothing and reads no compiled functions
    from disk."""
    # a fork would inherit compiled functions
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=compile_everything)


def keep_compiled(folder: Path) -> None:
    """Cache compiled functions in a folder; must be called before the first compilation."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compile_everything() -> None:
    """Disable the persistent compilation cache, so that measurements include the full cost of
    compilation."""
    jax.config.update("jax_enable_compilation_cache", False)


def difference(actual: Any, expected: np.ndarray) -> float:
    """Return the largest difference of two arrays, divided by the largest entry of `expected`."""
    return float(
        np.abs(np.asarray(actual) - expected).max() / max(float(np.abs(expected).max()), 1e-12)
    )


def device_memory() -> dict[str, int]:
    """Return the bytes in use on the device and their peak; empty on a CPU, which counts none."""
    numbers = jax.local_devices()[0].memory_stats() or {}
    names = ("bytes_in_use", "peak_bytes_in_use")
    return {name: numbers[name] for name in names if name in numbers}


def process_memory(field: Literal["VmRSS", "VmHWM", "RssAnon"]) -> int:
    """Return this process's memory in bytes: resident (`VmRSS`), its peak (`VmHWM`), or resident
    without mapped files (`RssAnon`).

    Only Linux reports these values. Other systems report the peak by `ru_maxrss`, which includes
    the parent's memory at the start.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak_memory_bytes()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


def other_work(seconds: float = 2.0) -> float | None:
    """Return the share of the processors' time that other processes use; None if the system does
    not report it."""

    def times() -> tuple[int, int]:
        fields = [
            int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        ]
        return sum(fields), fields[3] + fields[4]  # idle time and time spent waiting for a disk

    try:
        (total, idle), _ = times(), time.sleep(seconds)
        later, later_idle = times()
    except OSError:
        return None
    return 1 - (later_idle - idle) / max(later - total, 1)


MOST_OTHER_WORK = 0.1
_load: dict[str, float] = {}
"""Share of other work, for the record."""


@functools.cache
def matrix_peak(precision: Precision) -> float:
    """FLOPs per second of the fastest large matrix product with float32 sums, computed by JAX or,
    if it is installed, by PyTorch."""
    on_cpu = jax.default_backend() == "cpu"
    size = 2048 if on_cpu else 8192
    values = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    operand = jnp.asarray(values, precision)
    sides: dict[str, Callable[[], object]] = {}
    for options in (jit_options("float32"), jit_options("bfloat16")):
        product = jax.jit(
            lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32), compiler_options=options
        )
        sides[str(options)] = lambda product=product: product(operand).block_until_ready()
    if on_cpu and importlib.util.find_spec("torch") is not None:
        import torch

        theirs = torch.from_numpy(values).to(getattr(torch, precision))
        sides["PyTorch"] = lambda: theirs @ theirs
    return 2 * size**3 / min(itertools.chain(*alternate(sides, 5).values()))


def machine() -> dict[str, Any]:
    """Return the machine, the versions of the packages and the date."""
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
    """Print a line per row and write the file of a benchmark; its name ends in `-gpu` on an
    accelerator."""
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
    """Run a benchmark with the full cost of compilation; raise ValueError if other processes use
    the processors."""
    compile_everything()
    run_command(lambda settings: main(check_load(settings)), settings)


def check_load(settings: Bench) -> Bench:
    """Return the settings unchanged; raise ValueError if other work would distort the
    measurement."""
    share = None if settings.quick else other_work()
    if share is not None:
        _load["other_work"] = round(share, 3)
        if share > MOST_OTHER_WORK and not settings.loaded:
            raise ValueError(
                f"other processes use {100 * share:.0f} % of the processors, which distorts even"
                f" ratios; expected at most {100 * MOST_OTHER_WORK:.0f} %: wait for them, or"
                " measure all the same with --loaded"
            )
    return settings


def say(message: str) -> None:
    """Print a line to standard error without buffering."""
    print(message, file=sys.stderr, flush=True)


def backbone(name: str, image_size: int | None = None) -> Pretrained:
    """Load a backbone's weights: bundled, from the folder CHEEM_SHARED, or else random weights,
    which are as fast."""
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
    config = (
        find_config(name) if image_size is None else at_image_size(find_config(name), image_size)
    )
    return Pretrained(config, init_params(config, jax.random.key(0)), "random", "")


def stages(vit: Pretrained) -> Stages:
    """Make the library's executor for training on a CPU, with the memory at MLP-down."""
    return Stages(build(vit.config, vit.params), "mlp_down")


def cached_tokens(
    executor: Executor, images: Images, prefix: Network = (), *, batch_size: int
) -> Feed:
    """Return the tokens behind the frozen blocks `prefix`, cached as in training, without a limit
    on memory."""
    feed = HostImages(executor, images)
    budget = Budget(2**34)
    return cache_tokens(
        "", executor, feed, len(images), prefix, batch_size=batch_size, budget=budget
    )


@dataclasses.dataclass
class Training:
    """The training of a supernet; every step replaces `state`."""

    executor: Executor
    supernet: Supernet
    state: SupernetState

    def train(
        self, architectures: Sequence[Architecture], steps: Iterable[Step]
    ) -> Iterator[list[jax.Array]]:
        """Take one step per architecture without waiting for the device; yield the losses of each
        call of the device."""
        remaining = iter(steps)
        size = self.executor.steps_per_call
        for first in range(0, len(architectures), size):
            part = architectures[first : first + size]
            data = list(itertools.islice(remaining, len(part)))
            rates = [1e-3] * len(part)
            self.state, losses = train_steps(
                self.executor, self.supernet, self.state, part, data, rates=rates
            )
            yield losses

    def step(self, architecture: Architecture, data: Step) -> float:
        """Take one step, wait until it is finished, and return the loss."""
        ((loss,),) = self.train([architecture], [data])
        jax.block_until_ready((loss, self.state))
        return float(loss)


def new_task(executor: Executor, num_classes: int, rank: int, pool: Pool | None = None) -> Training:
    """Return the training of a new supernet over a pool's experts; default: the backbone's."""
    experts = dense_experts(executor.base_pool if pool is None else pool)
    supernet = Supernet(jax.random.key(1), experts, num_classes, OpSettings(rank=rank))
    return Training(executor, supernet, supernet.init())


def random_images(num: int, config: ViTConfig, seed: int = 0) -> np.ndarray:
    """Make `num` random images: uint8 `[num, S, S, 3]`."""
    size = config.image_size
    return np.random.default_rng(seed).integers(0, 256, (num, size, size, 3), np.uint8)


def draw_over_tasks(
    entries: Sequence[Mapping[str, Any]], panels: Mapping[str, Mapping[str, str]], file: Path
) -> None:
    """Draw one panel per title over the number of learned tasks, with one line per label and
    key."""
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


# ---- FLOPs per image as executed: with attention products, and with only the CLS token in the last
# block


class BlockFlops(NamedTuple):
    """FLOPs of one block's forward pass: the part that all ops share, the part that all ops except
    Skip share, and the plastic layer (`mlp_down`)."""

    enter: int
    widen: int
    leave: int
    attention: int
    """Products of activations in `enter`, whose gradients cost twice as much."""


def block_flops(config: ViTConfig, block: int) -> BlockFlops:
    """Count the FLOPs of a block from its shapes, two per multiply-add."""
    last = block == config.depth - 1
    enter, branch = executed_halves(config, last=last)
    outputs = 1 if last else config.num_tokens
    return BlockFlops(
        enter, branch // 2, branch // 2, 2 * 2 * outputs * config.num_tokens * config.width
    )


def tree_flops(config: ViTConfig, networks: Sequence[Network], *, from_images: bool = False) -> int:
    """Count the FLOPs of networks that run as one prefix tree, starting from the tokens of block 0
    or from images.

    Attention runs once per distinct parent. The up-projection runs once per parent with a child
    other than Skip, the down-projection once per distinct child.
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
    """Count the FLOPs of the same networks if they run one by one."""
    return sum(tree_flops(config, [network], from_images=from_images) for network in networks)


def step_flops(
    config: ViTConfig, architecture: Architecture, rank: int, begin: int | None = None
) -> int:
    """Count the FLOPs of a training step on one image, starting from the tokens of block `begin`
    or, if it is None, from the image.

    Blocks before the first op that learns have no backward pass, and the input of that op has no
    gradient.
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
