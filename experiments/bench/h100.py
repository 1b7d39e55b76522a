"""Kernels and bytes of a supernet step on an H100, counted in functions that are compiled and not
run.

    python -m experiments.bench.h100

It needs JAX with its CUDA plugin, but no GPU. The calls of a step are traced with shapes only. The
HLO of each function contains its kernels and the bytes that they read and write. The exit status is
1 if a goal is missed.
"""

import collections
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from cheem_jax.backbone.config import find_config
from cheem_jax.backbone.params import build, init_params
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.hee import sample, uniform_table
from cheem_jax.cheem.supernet import Supernet
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.running import run_command
from cheem_jax.core import device as devices
from cheem_jax.core.architecture import decode
from cheem_jax.core.pool import base_pool, dense_experts
from cheem_jax.core.settings import Precision
from cheem_jax.engine import executor as shared
from cheem_jax.engine import stages as composed
from cheem_jax.engine.choice import EngineConfig, Name, make_executor
from cheem_jax.engine.executor import Batch, Gather
from cheem_jax.engine.layout import Layout
from experiments.bench.measure import Bench, Row, Training, in_child, save, say

TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: 52428800 device_memory_size: 84942979072 memory_bandwidth: 3352320000000 clock_rate_ghz: 1.98
  device_address_bits: 64 device_vendor: "NVIDIA Corporation" name: "NVIDIA H100 80GB HBM3"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""  # noqa: E501
"""The limits of the hardware according to NVIDIA's data sheet."""
NUM_STEPS = 24
BATCH = 32
NUM_CLASSES = 20
NUM_IMAGES = 1024
SLICES = ("dynamic-slice", "gather", "slice")
NO_KERNEL = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "copy-done",
    "async-done",
    "fusion-done",
}
"""Opcodes that start no kernel."""


class Goal(NamedTuple):
    """Upper limits of one training step."""

    executor: Name
    precision: Precision
    dispatches: float
    kernels: float
    gigabytes: float
    copies: float


GOALS = (
    Goal("stages", "float32", 30, 500, 7.0, 2),
    Goal("scan", "float32", 0.25, 550, 7.8, 0.25),
    Goal("stages", "bfloat16", 30, 500, 3.2, 2),
    Goal("scan", "bfloat16", 0.25, 500, 3.9, 0.25),
)
"""Limits for DeiT-Tiny, uniform samples of a first task and 32 images. They are slightly above the
counted numbers, to detect growth."""


# ---- kernels of a compiled function


class Kernels(NamedTuple):
    """Number of kernels and their bytes in one call of a function, with its conditionals and
    loops."""

    num: float
    bytes: float
    conditionals: float
    loops: float


class Line(NamedTuple):
    """One instruction of a computation: its opcode, the bytes of its result, its operands, and the
    rest of its line."""

    opcode: str
    bytes: int
    operands: list[str]
    rest: str


BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+)"
    r" (?P<opcode>[a-z][a-z0-9\-]*)\("
)


def _named(attribute: str, rest: str) -> list[str]:
    """Return the names of the computations in one attribute of an instruction."""
    numbers = re.findall(rf"\b(?:{attribute})=(\{{[^}}]*\}}|%?[\w.\-]+)", rest)
    return [name.strip(" %") for names in numbers for name in names.strip("{}").split(",")]


def kernels(text: str) -> Kernels:
    """Count the kernels of an optimised HLO module, with all iterations of loops and the largest
    branch of each conditional.

    The bytes of a kernel are those of its operands and results. If an operand is sliced or
    gathered, only the slice counts; if it is updated in place, only the update counts.
    """
    computations: dict[str, dict[str, Line]] = {}
    entry = None
    lines = {}
    for text_line in text.splitlines():
        if head := _HEAD.match(text_line):
            lines = computations[head["name"]] = {}
            entry = head["name"] if head["entry"] else entry
        elif match := _LINE.match(text_line):
            arguments, rest = _closed(text_line[match.end() :])
            operands = re.findall(r"%([\w.\-]+)", arguments)
            # an int8 result of a matrix product is its scratch memory
            shape = (
                re.sub(r"s8\[[\d,]*\]", "", match["shape"])
                if match["opcode"] == "custom-call"
                else match["shape"]
            )
            lines[match["name"]] = Line(match["opcode"], _size(shape), operands, rest)
    if entry is None:
        raise ValueError("the text has no ENTRY computation; expected an optimised HLO module")
    return _launched(entry, computations)


def _closed(text: str) -> tuple[str, str]:
    """Split a text at its first unmatched closing parenthesis."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return text[:place], text[place + 1 :]
    return text, ""


def _size(shape: str) -> int:
    """Return the bytes of an array or a tuple of arrays with this HLO shape."""
    numbers = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(
        BYTES[kind] * int(np.prod([int(n) for n in sizes.split(",") if n]))
        for kind, sizes in numbers
    )


def _launched(name: str, computations: Mapping[str, Mapping[str, Line]]) -> Kernels:
    total = Kernels(0, 0, 0, 0)
    for line in computations[name].values():
        count = Kernels(0, 0, 0, 0)
        if line.opcode == "while":
            trips = re.search(r"known_trip_count[^\d]*(\d+)", line.rest)
            if trips is None:
                raise ValueError(f"a loop of {name} has no known trip count")
            (body,) = _named("body", line.rest)
            num, size, conditionals, loops = _launched(body, computations)
            count = Kernels(int(trips[1]) * num, int(trips[1]) * size, conditionals, loops + 1)
        elif line.opcode == "conditional":
            branches = _named("branch_computations|true_computation|false_computation", line.rest)
            largest = max(
                (_launched(branch, computations) for branch in branches),
                key=lambda kernels: kernels.num,
            )
            count = largest._replace(conditionals=largest.conditionals + 1)
        elif line.opcode == "call":
            (called,) = _named("to_apply", line.rest)
            count = _launched(called, computations)
        elif line.opcode not in NO_KERNEL:
            count = Kernels(1, _moved(line, computations[name], computations), 0, 0)
        total = Kernels(*(a + b for a, b in zip(total, count, strict=True)))
    return total


def _moved(
    line: Line, around: Mapping[str, Line], computations: Mapping[str, Mapping[str, Line]]
) -> int:
    """Return the bytes that one kernel reads and writes."""
    sizes = [around[operand].bytes for operand in line.operands if operand in around]
    called = _named("calls", line.rest) if line.opcode == "fusion" else []
    if not called:
        if line.opcode == "dynamic-update-slice":
            return 2 * sizes[1]
        return line.bytes + (line.bytes if line.opcode in SLICES else sum(sizes))
    inner = computations[called[0]]
    # a bitcast moves nothing, so its users are those of its operand
    origins = dict[str, str]()
    users: dict[str, list[Line]] = collections.defaultdict(list)
    for name, instruction in inner.items():
        operands = [origins.get(operand, operand) for operand in instruction.operands]
        if instruction.opcode == "bitcast":
            origins[name] = operands[0]
            continue
        for operand in set(operands):
            users[operand].append(instruction._replace(operands=operands))
    read = 0
    written = line.bytes
    for name, instruction in inner.items():
        if instruction.opcode != "parameter":
            continue
        # indices and updates are other operands of the user
        sliced = [
            user.bytes for user in users[name] if user.operands[0] == name and user.opcode in SLICES
        ]
        updated = [
            user
            for user in users[name]
            if user.operands[0] == name and user.opcode == "dynamic-update-slice"
        ]
        is_partial = len(sliced) + len(updated) == len(users[name])
        read += min(sum(sliced), instruction.bytes) if is_partial else instruction.bytes
    for instruction in inner.values():
        if instruction.opcode == "dynamic-update-slice":
            written -= instruction.bytes - inner[instruction.operands[1]].bytes
    return read + max(written, 0)


# ---- functions that are compiled and not run


class Counted(NamedTuple):
    """One call of a function: its name, its kernels, and the number of arrays copied from the
    host."""

    name: str
    kernels: Kernels
    copies: int


class OnPaper(Layout):
    """The layout of an absent device: its functions map shapes to shapes, and `calls` records each
    call."""

    def __init__(self, device: Any):
        super().__init__()
        self.where = SingleDeviceSharding(device)
        self.calls = list[Counted]()

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """See `Layout.jit`."""
        return Compiled(super().jit(function, **options), self)

    def placed(self, leaf: Any) -> Any:
        """Return the shape of an array on the device."""
        return (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.where)
            if hasattr(leaf, "dtype")
            else leaf
        )


class Compiled:
    """A jitted function that compiles for the shapes of its arguments, records the call and returns
    shapes."""

    def __init__(self, program: Any, layout: OnPaper):
        self.program = program
        self.layout = layout
        self._compiled = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        leaves, tree = jax.tree.flatten((arguments, named))
        copies = sum(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
        leaves = [self.layout.placed(leaf) for leaf in leaves]
        key = (str(tree), *leaves)
        if key not in self._compiled:
            placed, how = jax.tree.unflatten(tree, leaves)
            text = self.program.lower(*placed, **how).compile().as_text()
            shapes = jax.tree.map(self.layout.placed, self.program.eval_shape(*placed, **how))
            self._compiled[key] = shapes, kernels(text)
        shapes, numbers = self._compiled[key]
        self.layout.calls.append(
            Counted(getattr(self.program, "__name__", "?").strip("_"), numbers, copies)
        )
        return shapes

    def lower(self, *arguments: Any, **named: Any) -> "Compiled":
        """Return the function itself, because some functions are lowered and compiled before the
        call."""
        return self

    compile = lower


def count(
    name: Name,
    precision: Precision,
    device: Any = None,
    backbone: str = "deit_tiny",
    batch: int = BATCH,
    num: int = NUM_STEPS,
) -> dict[str, Any]:
    """Count kernels and bytes of a supernet step, as the mean over `num` steps, with tokens on the
    device. The default device is this process's first device."""
    device = device or jax.devices()[0]
    layout = OnPaper(device)
    config = dataclasses.replace(find_config(backbone), precision=precision)
    programs = [(shared, "_take"), (shared, "add"), (composed, "add")]
    patches: list[Any] = [
        mock.patch.object(owner, what, Compiled(getattr(owner, what), layout))
        for owner, what in programs
    ]
    # the traced code depends on the platform, and an H100 compiles cuDNN's attention
    patches.append(mock.patch.object(jax, "default_backend", lambda: device.platform))
    patches.append(mock.patch.object(devices, "flash_problem", lambda: None))
    vit = build(config, init_params(config, jax.random.key(0)))
    experts = dense_experts(base_pool(vit.experts("mlp_down")))
    supernet = Supernet(jax.random.key(1), experts, NUM_CLASSES, OpSettings())
    state = supernet.init()
    if name == "stages" and device.platform == "cpu":  # accelerators update learners together
        setup = supernet.setup
        object.__setattr__(supernet, "setup", setup._replace(update=Compiled(setup.update, layout)))
    codes = np.asarray(
        sample(jax.random.key(0), uniform_table([1] * config.depth).astype(np.float32), num=num)
    )
    architectures = [decode(row, supernet.sizes) for row in codes]
    state = supernet.with_learners(state, architectures)
    tokens = layout.placed(
        jax.ShapeDtypeStruct((NUM_IMAGES, config.num_tokens, config.width), np.float32)
    )
    rows = np.arange(batch, dtype=np.int32)
    weights = np.full(batch, 1 / batch, np.float32)
    step = [Batch(Gather(0, tokens, rows), np.zeros(batch, np.int32), weights)]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        executor = make_executor(
            vit, "mlp_down", EngineConfig(name), batch_size=batch, layout=layout
        )
        training = Training(executor, supernet, state)
        list(training.train(architectures, itertools.repeat(step)))
    return per_step(layout.calls, num)


def count_all(quick: bool) -> list[dict[str, Any]]:
    """Count kernels and bytes for the executor and precision of every goal."""
    target = topologies.get_topology_desc(
        "1x1x1", platform="cuda", target_config=TARGET, topology="1x1x1"
    )
    numbers = []
    for goal in GOALS[: 1 if quick else None]:
        backbone, num = ("vit_nano", 8) if quick else ("deit_tiny", NUM_STEPS)
        counts = count(goal.executor, goal.precision, target.devices[0], backbone, num=num)
        numbers.append({"executor": goal.executor, "precision": goal.precision, **counts})
        say(f"h100: {numbers[-1]}")
    return numbers


def per_step(calls: Sequence[Counted], num: int) -> dict[str, Any]:
    """Return the mean counts per step, and the calls per step of each function."""
    called = collections.Counter(call.name for call in calls)
    return {
        "dispatches": len(calls) / num,
        "kernels": sum(call.kernels.num for call in calls) / num,
        "gigabytes": sum(call.kernels.bytes for call in calls) / num / 1e9,
        "copies": sum(call.copies for call in calls) / num,
        "conditionals": sum(call.kernels.conditionals for call in calls) / num,
        "loops": sum(call.kernels.loops for call in calls) / num,
        "programs": {name: count / num for name, count in sorted(called.items())},
    }


def rows_of(numbers: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Make one row per count with its limit."""
    rows = []
    for entry, goal in zip(numbers, GOALS, strict=False):
        for what, unit in (
            ("dispatches", ""),
            ("kernels", ""),
            ("gigabytes", "GB"),
            ("copies", ""),
            ("conditionals", ""),
        ):
            most = getattr(goal, what, 0.0)
            about = f"{goal.executor}, {goal.precision}: {what} a step"
            rows.append(Row(about, {}, float(entry[what]), float(most), "at most", unit))
    return rows


def main(settings: Bench) -> None:
    """Count in a separate process; write `h100.json`."""
    numbers = in_child(count_all, settings.quick, environment={"JAX_PLATFORMS": "cpu"})
    rows = rows_of(numbers)
    save(settings.out, "h100", rows, quick=settings.quick, counted=numbers)
    if not settings.quick and (missed := [row.what for row in rows if not row.met]):
        raise SystemExit(f"error: more than its goal: {'; '.join(missed)}")


if __name__ == "__main__":
    run_command(main, parse(Bench, description=__doc__))
