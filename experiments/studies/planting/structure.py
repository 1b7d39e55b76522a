"""A stream whose right structure is known, what a run's networks draw on, and the same counts of
networks by chance.

The tasks: one, its kin and its twin, an easy one, an alien one, and one unrelated. Their answers
stand here, written down before anything is measured; `claims.py` turns them into yes or no.

Experts are pool indices, 0 the backbone's own. The family are the tasks of shapes; its experts are
those that an earlier one of them uses, added by itself or shared, and that are not the backbone's.
They are told apart for every task, so that what kin and twin draw on can be held against what
unrelated tasks draw on.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from cheem_jax.backbone.config import ViTConfig
from cheem_jax.backbone.flops import backbone_flops, backbone_params, branch_flops, pair_flops
from cheem_jax.cheem.config import CheemConfig
from cheem_jax.cheem.hee import first_level
from cheem_jax.core.architecture import encode, from_strings
from cheem_jax.data import demo
from cheem_jax.data.task import Split, Stream, Task

Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]
"""(generator, labels [N], image size) to uint8 images [N, S, S, 3]."""

IMAGE_SIZE = 32
LAGS = {
    "right": (0, 1), "down": (1, 0), "down_right": (1, 1), "down_left": (1, -1),
    "right_2": (0, 2), "down_2": (2, 0), "down_2_right": (2, 1), "down_right_2": (1, 2),
}  # fmt: skip
"""Rows and columns between the two pixels of the noise that agree."""
FLIPS = 0.1
"""Share of pixels that break the rule."""


def draw_noise(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 `[N, S, S, 3]`: two-coloured noise in which a pixel mostly repeats the one a class's
    lag away.

    Every pixel for itself is a coin toss in all classes, and nothing is larger than a few pixels.
    """
    pattern = np.empty((len(labels), image_size, image_size))
    for label, lag in enumerate(LAGS.values()):
        members = np.flatnonzero(labels == label)
        pattern[members] = _lagged(rng, lag, len(members), image_size)
    front, back = rng.random((2, len(labels), 1, 1, 3))
    return demo.finish(rng, demo.blend(pattern, front, back), grain=0.03)


def _lagged(
    rng: np.random.Generator, lag: tuple[int, int], num: int, size: int
) -> Float[np.ndarray, "num S S"]:
    rows, columns = lag
    field = rng.integers(0, 2, (size, size, num))
    flips = rng.random((size, size, num)) < FLIPS
    for y in range(rows, size):  # in the order in which pixels depend on each other
        for x in range(max(columns, 0), size + min(columns, 0)):
            field[y, x] = field[y - rows, x - columns] ^ flips[y, x]
    return np.moveaxis(field, -1, 0).astype(float)


class Planted(NamedTuple):
    """One task of the stream and its right answer."""

    name: str
    role: str
    classes: tuple[str, ...]
    draw: Draw
    answer: str
    relative: str | None = None
    """The earlier task that it is made from."""


PLAN = (
    Planted(
        "shapes",
        "origin",
        demo.SHAPES,
        demo.draw_shapes,
        "only the base to draw on; what it adds is what its kin and its twin can find",
    ),
    Planted(
        "letters",
        "unrelated",
        demo.LETTERS,
        demo.draw_letters,
        "as hard as shapes and of no use to its kin: its experts are there to be left alone",
    ),
    Planted(
        "colours",
        "easy",
        demo.COLOURS,
        demo.draw_colours,
        "the first layers tell the classes apart: skips blocks, the cheapest network of all",
    ),
    Planted(
        "shapes_recoloured",
        "kin",
        demo.SHAPES,
        demo.draw_recoloured_shapes,
        "the classes of shapes in other colours: draws on the experts of shapes, adds little",
        "shapes",
    ),
    Planted(
        "noise",
        "alien",
        tuple(LAGS),
        draw_noise,
        "nothing larger than a few pixels, neither shapes nor strokes: draws less on others' experts, adds more",  # noqa: E501
    ),
    Planted(
        "shapes_again",
        "twin",
        demo.SHAPES,
        demo.draw_shapes,
        "the distribution of shapes, new draws: draws on the experts of shapes, adds least",
        "shapes",
    ),
)
"""The alien stands between kin and twin, so that their mean place is its own: later tasks find
fuller pools."""

NAMES = tuple(task.name for task in PLAN)


def place_of(role: str) -> int:
    """Index in the stream of the one task of this role."""
    return [task.role for task in PLAN].index(role)


RELATED = tuple(map(place_of, ("origin", "kin", "twin")))
"""The family of shapes, as indices in the stream."""


def planted_stream(*, seed: int, num_train: int, num_val: int, num_test: int) -> Stream:
    """The planned tasks with so many images each, classes balanced; the same for the same
    arguments.

    Raises ValueError for fewer images than classes.
    """
    sizes = {"train": num_train, "val": num_val, "test": num_test}
    most = max(len(task.classes) for task in PLAN)
    if min(sizes.values()) < most:
        raise ValueError(
            f"every split needs at least {most} images, one of each letter; got {sizes}"
        )
    tasks = []
    for planted in PLAN:
        splits = {}
        for split, num in sizes.items():
            rng = np.random.default_rng(
                [seed, zlib.crc32(f"planted/{planted.name}/{split}".encode())]
            )
            labels = rng.permutation(np.arange(num, dtype=np.int32) % len(planted.classes))
            splits[split] = Split(planted.draw(rng, labels, IMAGE_SIZE), labels)
        tasks.append(Task(planted.name, planted.classes, **splits))
    return Stream("planted", tuple(tasks))


FAMILY, STRANGER, BASE, NEW, SKIP = range(5)
"""Where a block's expert comes from: the family, another task, the backbone, nowhere yet; or there
is none."""


class Costs(NamedTuple):
    """FLOPs per image by the paper's convention, and parameters in percent of the backbone's."""

    plain: int
    skip: int
    adapt: int
    params_adapt: float
    params_new: float


def costs_of(config: ViTConfig, cheem: CheemConfig) -> Costs:
    """What every op saves or costs on this backbone."""
    rank = cheem.ops.rank
    total = backbone_params(config)
    inputs = config.mlp_width if cheem.placement == "mlp_down" else config.width
    return Costs(
        backbone_flops(config),
        branch_flops(config, cheem.placement),
        pair_flops(config, cheem.placement, rank),
        100 * rank * (inputs + config.width) / total,
        100 * (inputs + 1) * config.width / total,
    )


class Structure(NamedTuple):
    """N structures of T tasks over one history of the pool: the one that was measured, or many
    redrawn ones."""

    sizes: Int[np.ndarray, "T L"]
    """Experts in the pool before each task."""
    codes: Int[np.ndarray, "N T L"]
    """Candidate of every block, as `architecture.encode` has it."""
    family: Bool[np.ndarray, "T L E"]
    """Experts of the family that are there before each task."""
    costs: Costs


def structure_of(results: Mapping[str, Any], costs: Costs) -> Structure:
    """The structure that a run of the planted stream found, N = 1."""
    tasks, pool = results["tasks"], results["pool"]
    origins = [[-1 if e["origin"] == "base" else e["origin"] for e in block] for block in pool]
    sizes = np.array(
        [[sum(o < index for o in block) for block in origins] for index in range(len(tasks))]
    )
    codes = [
        encode(from_strings(task["architecture"]), n)
        for task, n in zip(tasks, sizes.tolist(), strict=True)
    ]
    family = np.zeros((len(tasks), len(pool), max(map(len, pool))), bool)
    for member in RELATED:
        for block, expert in enumerate(tasks[member]["experts"]):
            if expert:  # neither the backbone's nor skipped
                family[member + 1 :, block, expert] = True
    return Structure(sizes, np.array(codes)[None], family, costs)


def random_networks(structure: Structure, rng: np.random.Generator, num: int) -> Structure:
    """Every block of every task redrawn from its 2n + 2 candidates, all equally probable."""
    n = structure.sizes
    return structure._replace(codes=rng.integers(0, 2 * n + 2, (num, *n.shape)))


def random_experts(structure: Structure, rng: np.random.Generator, num: int) -> Structure:
    """The ops as they are found, but Reuse and Adapt with any of the n experts of the block."""
    n, codes = structure.sizes, structure.codes
    expert = rng.integers(0, n, (num, *n.shape))
    return structure._replace(
        codes=np.where(codes < n, expert, np.where(codes < 2 * n, n + expert, codes))
    )


def sources(structure: Structure) -> Int[np.ndarray, "N T L"]:
    """FAMILY, STRANGER, BASE, NEW or SKIP per block."""
    n, codes = structure.sizes, structure.codes
    task, block = np.indices(n.shape)
    expert = codes % n  # means nothing for New and Skip
    known = np.where(
        expert == 0, BASE, np.where(structure.family[task, block, expert], FAMILY, STRANGER)
    )
    return np.where(codes < 2 * n, known, np.where(codes == 2 * n, NEW, SKIP))


class Counts(NamedTuple):
    """Of every task's network: blocks by source and op, and what they cost."""

    source: Int[np.ndarray, "N T 5"]
    adapts: Int[np.ndarray, "N T"]
    flops: Int[np.ndarray, "N T"]
    added: Float[np.ndarray, "N T"]
    """Parameters in percent of the backbone."""
    planted: Int[np.ndarray, "T"]
    """Blocks at which the family has experts."""


def counts_of(structure: Structure) -> Counts:
    """Counted."""
    n = structure.sizes
    codes = structure.codes
    costs = structure.costs
    source = sources(structure)
    by_source = np.stack([(source == kind).sum(-1) for kind in range(5)], axis=-1)
    adapts = ((codes >= n) & (codes < 2 * n)).sum(-1)
    return Counts(
        by_source,
        adapts,
        costs.plain - costs.skip * by_source[..., SKIP] + costs.adapt * adapts,
        costs.params_adapt * adapts + costs.params_new * by_source[..., NEW],
        structure.family.any(-1).sum(-1),
    )


def expected(structure: Structure) -> Float[np.ndarray, "T 5"]:
    """Mean number of blocks by source where all candidates are equally probable, in closed form."""
    n = structure.sizes
    family = structure.family.sum(-1)
    per_block = np.stack(
        [2 * family, 2 * (n - 1 - family), 2 + 0 * n, 1 + 0 * n, 1 + 0 * n], axis=-1
    )
    return (per_block / (2 * n + 2)[..., None]).sum(axis=1)


def first_share(
    similarity: Float[np.ndarray, "E L"], own: int, rivals: Sequence[int]
) -> tuple[float, float]:
    """Share of blocks at which network `own` is more similar than every rival, and that of a random
    order.

    Blocks count where `own` and a rival are present; NaN where there is none.
    """
    present = ~np.isnan(similarity)
    counted = present[own] & present[list(rivals)].any(axis=0)
    if not counted.any():
        return np.nan, np.nan
    best = np.nanmax(similarity[list(rivals)][:, counted], axis=0)
    level = 1 / (1 + present[list(rivals)][:, counted].sum(axis=0))
    return float((similarity[own, counted] > best).mean()), float(level.mean())


def first_level_lead(
    similarity: Float[np.ndarray, "E L"], own: int, rivals: Sequence[int]
) -> float:
    """psi of network `own` over the mean psi of the rivals, mean over the blocks where it and a
    rival are present.

    It does not change with the number of networks, as psi over 1 / n does; NaN where there is no
    such block.
    """
    psi = np.stack([first_level(column)[0] for column in similarity.T], axis=-1)
    present = ~np.isnan(similarity)
    counted = present[own] & present[list(rivals)].any(axis=0)
    others = psi[list(rivals)].sum(axis=0)[counted] / present[list(rivals)].sum(axis=0)[counted]
    return float((psi[own, counted] / others).mean()) if counted.any() else np.nan
