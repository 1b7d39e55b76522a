"""What devices say to each other in a step, read from the compiled programs.

    python -m experiments.bench.collectives

Nothing runs here: a process with eight devices of a CPU compiles the programs that a step, an
evaluation and a search call, at the shapes of ViT-B/16 with 224 pixels, and their text tells each
collective and its bytes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from cheem_jax.backbone.config import CONFIGS, ViTConfig
from cheem_jax.backbone.params import build, init_params
from cheem_jax.cheem.config import OpSettings
from cheem_jax.cheem.supernet import Supernet, adam_update
from cheem_jax.cli.main import parse
from cheem_jax.core.architecture import Architecture, Choice
from cheem_jax.core.pool import dense_expert, dense_experts
from cheem_jax.engine import executor as shared
from cheem_jax.engine.choice import EngineConfig, Name, make_executor
from cheem_jax.engine.executor import Batch, Dense, Executor, Gather
from cheem_jax.engine.layout import SMALL, Layout
from experiments.bench.measure import Bench, Row, command, in_child, save, say

DEVICES = 8
BATCH = 64
SCAN_STEPS = 2
NUM_CLASSES, RANK = 100, 40
ADAPT = Choice("adapt", 0)
NEW = Choice("new")
REUSE = Choice("reuse", 0)
SKIP = Choice("skip")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
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
}
BYTES |= {"s64": 8, "u64": 8, "f64": 8}


# ---- collectives of a compiled program


class Collective(NamedTuple):
    """One kind of exchange: bytes of the whole array, as one device hands it over or has it in the
    end."""

    kind: str
    bytes: int


_LINE = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>.+?) (?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")


def collectives(text: str) -> list[Collective]:
    """Every exchange of one call, from the text of an optimised HLO module.

    What a loop repeats counts as often; of a conditional's branches the one with the most bytes
    counts.
    """
    computations: dict[str, list[re.Match[str]]] = {}
    entry = None
    lines = []
    for line in text.splitlines():
        if head := HEAD.match(line):
            lines = computations[head["name"]] = []
            entry = head["name"] if head["entry"] else entry
        elif found := _LINE.match(line):
            lines.append(found)
    if entry is None:
        raise ValueError("the text has no ENTRY computation; expected an optimised HLO module")
    return list(_of(entry, computations))


def _of(name: str, computations: Mapping[str, Sequence[re.Match[str]]]) -> Iterator[Collective]:
    for line in computations[name]:
        opcode, rest = line["opcode"], line["rest"]
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            yield Collective(kind, _bytes(kind, opcode != kind, line["shape"], rest))
        elif opcode == "while":
            (body,), trips = named("body", rest), re.search(r"known_trip_count[^\d]*(\d+)", rest)
            once = list(_of(body, computations))
            if once and trips is None:
                raise ValueError(
                    f"how often the loop {body} runs is not known, and it contains {len(once)}"
                    " collectives"
                )
            yield from once * (int(trips[1]) if trips else 0)
        elif opcode == "conditional":
            branches = named("branch_computations|true_computation|false_computation", rest)
            found = [list(_of(branch, computations)) for branch in branches]
            yield from max(found, key=lambda own: sum(each.bytes for each in own))
        elif opcode in ("call", "fusion", "async-start"):
            for called in named("to_apply|calls", rest):
                yield from _of(called, computations)


def named(attribute: str, rest: str) -> list[str]:
    """The computations that an instruction names in one of its attributes."""
    found = re.findall(rf"\b(?:{attribute})=(\{{[^}}]*\}}|%?[\w.\-]+)", rest)
    return [name.strip(" %") for names in found for name in names.strip("{}").split(",")]


def _bytes(kind: str, starts: bool, shape: str, rest: str) -> int:
    parts = [
        BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape.replace("u32[]", ""))
    ]
    if starts and kind != "all-reduce":  # operands come first, results after them
        parts = parts[len(parts) // 2 :]
    return sum(parts) * (group_size(rest) if kind == "reduce-scatter" else 1)


def group_size(attributes: str) -> int:
    """Devices that take part in one exchange, from the attributes of its instruction."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*\))? \{([^}]*)\}", attributes
    ):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    raise ValueError(f"unknown groups of devices in {attributes[:200]!r}")


# ---- programs compiled, and not run


class Compiled:
    """A program that compiles for its arguments' shapes, gives shapes back, and notes the call."""

    def __init__(self, program: Any, calls: list[list[Collective]]):
        self.program = program
        self._calls = calls
        self._made = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        leaves, tree = jax.tree.flatten((arguments, named))
        key = (str(tree), *map(_described, leaves))
        if key not in self._made:
            lowered = self.program.lower(*arguments, **named)
            compiled = lowered.compile()
            shapes = jax.tree.map(_placed, lowered.out_info, compiled.output_shardings)
            self._made[key] = shapes, collectives(compiled.as_text())
        shapes, found = self._made[key]
        self._calls.append(found)
        return shapes

    def lower(self, *arguments: Any, **named: Any) -> "Compiled":
        """For `whole`, which lowers and compiles before it calls."""
        return self

    compile = lower


def _described(leaf: Any) -> Any:
    return (
        (leaf.shape, str(leaf.dtype), str(getattr(leaf, "sharding", "")))
        if hasattr(leaf, "shape")
        else leaf
    )


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class OnPaper(Layout):
    """Devices that hold shapes instead of arrays; `calls` has the collectives of each program
    called."""

    def __init__(self, fsdp: int):
        super().__init__(jax.devices(), fsdp)
        self.calls: list[list[Collective]] = []

    def everywhere(self, tree: Any) -> Any:
        """See `Layout.everywhere`."""
        return jax.tree.map(lambda leaf: _placed(leaf, self.sharding()), tree)

    def frozen(self, leaf: jax.Array) -> Any:
        """See `Layout.frozen`."""
        found = super().frozen(leaf)
        return _placed(found, found.sharding)

    def copy(self, tree: Any, place: int) -> Any:
        """See `Layout.copy`."""
        return jax.tree.map(
            lambda leaf: _placed(leaf, SingleDeviceSharding(self.devices[place])), tree
        )

    def jit(self, function: Any, **options: Any) -> Any:
        """See `Layout.jit`."""
        program = super().jit(function, **options)
        return Compiled(
            getattr(program, "_program", program), self.calls
        )  # calls wait for results; there are none

    def noted(self) -> dict[str, Any]:
        """Calls since the last look, and their collectives by kind."""
        found = [each for call in self.calls for each in call]
        dispatches = len(self.calls)
        self.calls.clear()
        kinds = {
            kind: {"count": len(own), "bytes": sum(own)}
            for kind in KINDS
            if (own := [each.bytes for each in found if each.kind == kind])
        }
        return {"dispatches": dispatches, "kinds": kinds}


def architectures(depth: int) -> dict[str, Architecture]:
    """Each op kind at a quarter of the blocks, the first one learning; and an expert of its own for
    every block."""
    return {"typical": ((ADAPT, NEW, REUSE, SKIP) * depth)[:depth], "worst": (NEW,) * depth}


def compile_all(quick: bool) -> list[dict[str, Any]]:
    """Every case, in a process with eight devices."""
    large, small = CONFIGS["vit_micro" if quick else "vit_base"], CONFIGS["vit_nano"]
    cases: list[tuple[ViTConfig, int, Name, int]] = [
        (large, large.depth, "stages", 1),
        (large, large.depth, "stages", DEVICES),
        (large, 4, "whole", 1),
        (large, 6, "whole", 1),
        (large, 4, "whole", DEVICES),
        (small, 4, "scan", 1),
    ]
    found = []
    for config, depth, name, fsdp in cases:
        config = dataclasses.replace(config, depth=depth, num_classes=0)
        found += [
            {"executor": name, "fsdp": fsdp, **entry} for entry in compile_case(config, name, fsdp)
        ]
        say(f"collectives: {name}, {config.name} with {depth} blocks, fsdp {fsdp}")
    return found


def compile_case(config: ViTConfig, name: Name, fsdp: int) -> Iterator[dict[str, Any]]:
    """Steps, an evaluated batch of one network, and a candidate's batch on a device of its own."""
    layout = OnPaper(fsdp)
    depth = config.depth
    for function in ("add", "_take"):  # programs of one module for all layouts
        program = getattr(shared, function)
        setattr(shared, function, Compiled(getattr(program, "program", program), layout.calls))
    vit = build(config, init_params(config, jax.random.key(0)))
    executor = make_executor(
        vit, "mlp_down", EngineConfig(name, steps_per_call=SCAN_STEPS), layout=layout
    )
    supernet = Supernet(
        jax.random.key(1), dense_experts(executor.base_pool), NUM_CLASSES, OpSettings(rank=RANK)
    )
    setup = supernet.setup
    head = layout.everywhere(supernet.init().head)
    if name == "stages":  # the others have the update inside of their step
        setup = setup._replace(update=Compiled(adam_update(), layout.calls))
    pair, full = layout.everywhere(setup.blank)
    learners = {
        (block, choice): own
        for block in range(depth)
        for choice, own in ((ADAPT, pair), (NEW, full))
    }
    rows = np.zeros(BATCH, np.int32)
    ones = np.ones(BATCH, np.float32)
    shape = jax.ShapeDtypeStruct((BATCH, config.num_tokens, config.width), np.float32)
    kept = layout.everywhere(shape)
    batch = Batch(Gather(0, kept, rows), layout.rows(rows), layout.weights(ones))
    steps = executor.steps_per_call
    about = {"backbone": config.name, "depth": depth}
    kinds = architectures(depth)
    must = {which: reduced_bytes(config, architecture) for which, architecture in kinds.items()}
    if (
        name == "scan"
    ):  # one program, which sends the gradient of a dense expert per block, whatever is learned
        del kinds["typical"]
    for which, architecture in kinds.items():
        for _ in range(2):  # what the first leaves is what all later ones begin with
            layout.noted()
            learners, head, _ = executor.train(
                learners,
                head,
                [architecture] * steps,
                [[batch]] * steps,
                rates=[1e-3] * steps,
                setup=setup,
            )
        yield {
            "what": f"step, {which}",
            **about,
            "steps": steps,
            **layout.noted(),
            "expected_reduced": steps * must[which],
            "expected_gathered": 0 if fsdp == 1 else steps * gathered_bytes(config, architecture),
        }

    def evaluate(own: Executor, network: list[Dense], source: Gather, head) -> None:
        place = own.layout
        mask = place.weights(ones)
        labels = place.rows(rows)
        for walked in own.walk([network], source, mask):
            own.classify(head, walked.tokens, labels, mask, NUM_CLASSES)

    network = [Dense(0, dense_expert(block, 0)) for block in executor.base_pool]
    evaluate(executor, network, Gather(0, kept, rows), head.params)
    yield {
        "what": "a batch of one network",
        **about,
        "steps": 1,
        **layout.noted(),
        "expected_reduced": 4 * depth * config.width + 4,
        "expected_gathered": 0 if fsdp == 1 else gathered_bytes(config, (REUSE,) * depth),
    }
    if fsdp == 1:
        alone = [Dense(step.code, layout.copy(step.expert, 0)) for step in network]
        evaluate(
            executor.on(0),
            alone,
            Gather(0, layout.copy(kept, 0), rows),
            layout.copy(head.params, 0),
        )
        yield {
            "what": "a batch of one candidate, on its device",
            **about,
            "steps": 1,
            **layout.noted(),
            "expected_reduced": 0,
            "expected_gathered": 0,
        }


# ---- what is expected of them


def reduced_bytes(
    config: ViTConfig, architecture: Architecture, num_classes: int = NUM_CLASSES
) -> int:
    """Float32 bytes that a step must sum over the devices: gradients of what it learns, of the
    head, and the loss."""
    sizes = {
        "adapt": RANK * (config.mlp_width + config.width),
        "new": (config.mlp_width + 1) * config.width,
    }
    head = (config.width + 1) * 2 ** math.ceil(math.log2(num_classes))
    return 4 * (sum(sizes.get(choice.kind, 0) for choice in architecture) + head + 1)


def gathered_bytes(config: ViTConfig, architecture: Architecture) -> int:
    """Bytes of frozen weights that a pass from the first block's kept tokens must bring together,
    and its gradient.

    The gradient gathers again what the pass did not keep; before the first op that learns it needs
    nothing.
    """
    first = next(
        (i for i, choice in enumerate(architecture) if choice.kind in ("adapt", "new")), None
    )
    total = 0
    width = config.width
    for block, choice in enumerate(architecture):
        weights = [width * 3 * width, width * width] if block else []
        weights += [] if choice.kind == "skip" else [width * config.mlp_width]
        passes = 1 if first is None or block <= first else 2
        total += passes * sum(size for size in weights if size >= SMALL)
    return 4 * total


# ---- what is written


def main(settings: Bench) -> None:
    """Compile in a process with eight devices; write `collectives.json`."""
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    found = in_child(compile_all, settings.quick, environment=environment)
    save(settings.out, "collectives", rows_of(found), quick=settings.quick, programs=found)


def rows_of(found: Sequence[dict[str, Any]]) -> list[Row]:
    """Bytes beside what must be sent, case by case."""
    rows = []
    for entry in found:
        sent = sum(own["bytes"] for own in entry["kinds"].values())
        split = f", fsdp {entry['fsdp']}" if entry["fsdp"] > 1 else ""
        what = (
            f"{entry['executor']}{split}, {entry['backbone']} with {entry['depth']} blocks,"
            f" {entry['what']}"
        )
        if must := entry["expected_reduced"] + entry["expected_gathered"]:
            rows.append(
                Row(f"{what}: bytes per byte that must be sent", {}, sent / must, 1.0, "at most")
            )
        else:
            rows.append(Row(f"{what}: bytes sent", {}, float(sent), 0.0, "at most", "bytes"))
    return rows


if __name__ == "__main__":
    command(main, parse(Bench, description=__doc__))
