"""A stream with a known structure, the experts that a run's networks use, and the same counts for
random networks.

The roles of the tasks are `origin` (shapes), `kin` (shapes in other colours), `twin` (shapes
again), `easy`, `alien` and `unrelated`.

Experts are pool indices; 0 is the backbone's expert. The family is the tasks of shapes. Its experts
are the experts that an earlier task of the family uses, added by that task or shared, except those
of the backbone. They are counted for every task, so that `kin` and `twin` can be compared with
unrelated tasks.
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
"""Function of a generator, labels [N] and the image size; returns uint8 images [N, S, S, 3]."""

IMAGE_SIZE = 32
LAGS = {
    "right": (0, 1), "down": (1, 0), "down_right": (1, 1), "down_left": (1, -1),
    "right_2": (0, 2), "down_2": (2, 0), "down_2_right": (2, 1), "down_right_2": (1, 2),
}  # fmt: skip
"""Distance in rows and columns between two identical pixels of the noise, keyed by class."""
FLIPS = 0.1
"""Share of pixels that differ from the pixel at that distance."""


def draw_noise(rng: np.random.Generator, labels: np.ndarray, image_size: int) -> np.ndarray:
    """Draw noise in two colours in which most pixels repeat the pixel at the lag of their class.

    An individual pixel has either colour with equal probability in all classes. Returns uint8 `[N,
    S, S, 3]`.
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
    """One task of the stream."""

    name: str
    role: str
    classes: tuple[str, ...]
    draw: Draw


PLAN = (
    Planted("shapes", "origin", demo.SHAPES, demo.draw_shapes),
    Planted("letters", "unrelated", demo.LETTERS, demo.draw_letters),
    Planted("colours", "easy", demo.COLOURS, demo.draw_colours),
    Planted("shapes_recoloured", "kin", demo.SHAPES, demo.draw_recoloured_shapes),
    Planted("noise", "alien", tuple(LAGS), draw_noise),
    Planted("shapes_again", "twin", demo.SHAPES, demo.draw_shapes),
)
"""`alien` is between `kin` and `twin`, so that its position is their mean position. The position
matters because later tasks have larger pools."""

NAMES = tuple(task.name for task in PLAN)


def index_of(role: str) -> int:
    """Return the index of the task with this role."""
    return [task.role for task in PLAN].index(role)


RELATED = tuple(map(index_of, ("origin", "kin", "twin")))
"""Indices of the family of shapes in the stream."""


def planted_stream(*, seed: int, num_train: int, num_val: int, num_test: int) -> Stream:
    """Generate the planned tasks with balanced classes; the images depend only on the arguments.

    Raises ValueError if a split has fewer images than classes.
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


Preference = Callable[[np.ndarray, int, Sequence[int]], tuple[float, float]]
"""Function of a similarity [E, L], a network and other networks; returns a measure of preference
and its value without preference."""
FAMILY, STRANGER, BASE, NEW, SKIP = range(5)
"""Sources of a block's expert: the family, another task, the backbone, a new expert, or none."""


class Costs(NamedTuple):
    """FLOPs per image by the paper's convention, and parameters in % of the backbone's
    parameters."""

    plain: int
    skip: int
    adapt: int
    params_adapt: float
    params_new: float


def costs_of(config: ViTConfig, cheem: CheemConfig) -> Costs:
    """Return the savings and costs of the ops on this backbone."""
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
    """N structures of T tasks over one history of the pool: the structure of a run, or random
    structures."""

    sizes: Int[np.ndarray, "T L"]
    """Number of experts in the pool before each task."""
    codes: Int[np.ndarray, "N T L"]
    """Candidate of every block, encoded by `architecture.encode`."""
    family: Bool[np.ndarray, "T L E"]
    """Whether an expert is one of the family's before each task."""
    costs: Costs


def structure_of(results: Mapping[str, Any], costs: Costs) -> Structure:
    """Return the structure of a run on the planted stream, with N = 1."""
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
            if expert:  # an expert other than the backbone's
                family[member + 1 :, block, expert] = True
    return Structure(sizes, np.array(codes)[None], family, costs)


def random_networks(structure: Structure, rng: np.random.Generator, num: int) -> Structure:
    """Sample every block of every task uniformly from its 2n + 2 candidates."""
    n = structure.sizes
    return structure._replace(codes=rng.integers(0, 2 * n + 2, (num, *n.shape)))


def sources(structure: Structure) -> Int[np.ndarray, "N T L"]:
    """Return FAMILY, STRANGER, BASE, NEW or SKIP for every block."""
    n, codes = structure.sizes, structure.codes
    task, block = np.indices(n.shape)
    expert = codes % n  # undefined for New and Skip
    earlier = np.where(
        expert == 0, BASE, np.where(structure.family[task, block, expert], FAMILY, STRANGER)
    )
    return np.where(codes < 2 * n, earlier, np.where(codes == 2 * n, NEW, SKIP))


class Counts(NamedTuple):
    """Numbers of blocks of every task's network by source and op, and its costs."""

    source: Int[np.ndarray, "N T 5"]
    adapts: Int[np.ndarray, "N T"]
    flops: Int[np.ndarray, "N T"]
    added: Float[np.ndarray, "N T"]
    """Parameters in % of the backbone's parameters."""
    planted: Int[np.ndarray, "T"]
    """Number of blocks at which the family has experts."""


def count(structure: Structure) -> Counts:
    """Count blocks and costs."""
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
    """Return the expected number of blocks of each source if all candidates are equally
    probable."""
    n = structure.sizes
    family = structure.family.sum(-1)
    per_block = np.stack(
        [2 * family, 2 * (n - 1 - family), 2 + 0 * n, 1 + 0 * n, 1 + 0 * n], axis=-1
    )
    return (per_block / (2 * n + 2)[..., None]).sum(axis=1)


def first_share(
    similarity: Float[np.ndarray, "E L"], network: int, others: Sequence[int]
) -> tuple[float, float]:
    """Return the share of blocks at which network `network` is more similar than all others, and
    its expectation for a random order.

    Only blocks with `network` and another network count; the result is NaN without such a block.
    """
    present = ~np.isnan(similarity)
    counted = present[network] & present[list(others)].any(axis=0)
    if not counted.any():
        return np.nan, np.nan
    best = np.nanmax(similarity[list(others)][:, counted], axis=0)
    level = 1 / (1 + present[list(others)][:, counted].sum(axis=0))
    return float((similarity[network, counted] > best).mean()), float(level.mean())


def first_level_lead(
    similarity: Float[np.ndarray, "E L"], network: int, others: Sequence[int]
) -> tuple[float, float]:
    """Return psi of network `network` divided by the mean psi of the others, as a mean over the
    blocks with both, and its expectation, 1.

    Unlike psi divided by 1 / n, the result does not depend on the number of networks. It is NaN
    without such a block.
    """
    psi = np.stack([first_level(column)[0] for column in similarity.T], axis=-1)
    present = ~np.isnan(similarity)
    counted = present[network] & present[list(others)].any(axis=0)
    mean = psi[list(others)].sum(axis=0)[counted] / present[list(others)].sum(axis=0)[counted]
    return float((psi[network, counted] / mean).mean()) if counted.any() else np.nan, 1.0
