"""Where arrays lie: on one device, or over a mesh of them, on one machine or many (JAX's SPMD).

A batch's rows are split over all devices, what is learned is held by each, and the frozen backbone
is held by each or, where it does not fit, split as well and gathered block by block. The programs
stay the same: XLA reads from their arguments how to divide the work, and adds the sums that
gradients and counts then need.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cheem_jax.core.images import Images, in_turn
from cheem_jax.core.kernels import IS_DIVIDED

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices of a run; nothing here changes what is computed, beyond rounding."""

    devices: Literal["all"] | int = 1
    """Devices that share the work of a batch: a number, or all that JAX sees, those of all
    processes together."""

    def __post_init__(self) -> None:
        if isinstance(self.devices, int) and self.devices < 1:
            raise ValueError(f"devices is {self.devices}; expected a number from 1 on, or all")


class Layout:
    """One device, or a mesh of several; every process of a job holds an equal one.

    Whatever number of rows a batch has, each device gets as many: the batch is filled up by
    repeating its first row, with weight 0 where rows are weighted, so answers and sums of the real
    rows stay as they are.
    """

    def __init__(self, devices: Sequence[Any] | None = None):
        self.devices = (
            []
            if devices is None
            else sorted(devices, key=lambda device: (device.process_index, device.id))
        )
        self.num = max(len(self.devices), 1)
        self.local = [
            i
            for i, device in enumerate(self.devices)
            if device.process_index == jax.process_index()
        ]
        self.mesh = Mesh(np.array(self.devices), ("data",)) if self.devices else None

    @property
    def is_many(self) -> bool:
        """Whether there is anything to divide."""
        return self.mesh is not None

    @property
    def place(self) -> tuple[int, ...]:
        """What tells programs for these devices from programs for others."""
        return tuple(device.id for device in self.devices)

    def sharding(self, *axes: Any) -> NamedSharding:
        """How an array lies that is split along these axes of the mesh."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def padded(self, size: int) -> int:
        """Rows of a batch of `size` with its padding."""
        return -(-size // self.num) * self.num

    def mine(self, rows: np.ndarray, filler: Any = None) -> np.ndarray:
        """The part of a batch that this process's devices work on, filled up by its first row or by
        `filler`."""
        if not self.is_many:
            return rows
        missing = self.padded(len(rows)) - len(rows)
        fill = (
            np.repeat(rows[:1], missing, axis=0)
            if filler is None
            else np.full_like(rows[:1], filler).repeat(missing, 0)
        )
        share = self.padded(len(rows)) // self.num
        return np.concatenate([rows, fill])[self.local[0] * share : (self.local[-1] + 1) * share]

    def joined(self, part: Any, axis: int = 0) -> Any:
        """The batch of which each process has its part, as one array split over all devices along
        `axis`."""
        if not self.is_many:
            return part
        share = part.shape[axis] // len(self.local)
        whole = list(part.shape)
        whole[axis] = share * self.num
        pieces = [
            jax.device_put(
                part[(slice(None),) * axis + (slice(i * share, (i + 1) * share),)],
                self.devices[place],
            )
            for i, place in enumerate(self.local)
        ]
        split = self.sharding(*[None] * axis, "data")
        return jax.make_array_from_single_device_arrays(tuple(whole), split, pieces)

    def rows(self, values: np.ndarray) -> Any:
        """Rows `[B, ...]` that every process holds, split over the devices."""
        return self.joined(self.mine(values))

    def weights(self, values: np.ndarray) -> Any:
        """The weights or mask `[B]` of rows; what fills the batch up has weight 0."""
        return self.joined(self.mine(values, 0))

    def read(self, images: Images, order: Sequence[np.ndarray]) -> Iterator[Any]:
        """The pictures of each of these rows in turn; each process reads those of its own devices
        only."""
        return map(self.joined, in_turn(images, [self.mine(rows) for rows in order]))

    def everywhere(self, tree: Tree) -> Tree:
        """Arrays that every process holds, on each device."""
        if not self.is_many:
            return tree
        whole = self.sharding()

        def put(leaf):
            if getattr(leaf, "sharding", None) == whole:
                return leaf
            if (
                isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            ):  # split over processes
                return self.jit(lambda parts: parts, out_shardings=whole)(leaf)
            copies = [jax.device_put(leaf, self.devices[place]) for place in self.local]
            return jax.make_array_from_single_device_arrays(np.shape(leaf), whole, copies)

        return jax.tree.map(put, tree)

    def copy(self, tree: Tree, place: int) -> Tree:
        """What lies everywhere, on one of this process's devices alone; nothing is moved."""

        def own(leaf):
            if not isinstance(leaf, jax.Array) or len(leaf.devices()) == 1:
                return leaf
            assert leaf.is_fully_replicated, "a part would pass for the whole"
            return next(
                part.data for part in leaf.addressable_shards if part.device == self.devices[place]
            )

        return jax.tree.map(own, tree)

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit`; each call waits for its result where devices are threads of one processor.

        A CPU's devices share a pool of as many threads: in two programs at a time, each with sums
        over the devices, all threads may wait for a device that gets none.
        """

        @functools.wraps(function)
        def divided(*arguments, **named):
            token = IS_DIVIDED.set(True)
            try:
                return function(*arguments, **named)
            finally:
                IS_DIVIDED.reset(token)

        program = jax.jit(divided if self.is_many else function, **options)
        return _Waiting(program) if self.is_many and self.devices[0].platform == "cpu" else program


class _Waiting:
    """A program of `Layout.jit`: to be called, or lowered, compiled and called."""

    def __init__(self, program: Any):
        self._program = program

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return jax.block_until_ready(self._program(*arguments, **named))

    def lower(self, *arguments: Any, **named: Any) -> "_Waiting":
        """For arguments of these shapes."""
        return _Waiting(self._program.lower(*arguments, **named))

    def compile(self) -> "_Waiting":
        """What was lowered, ready to run."""
        return _Waiting(self._program.compile())


ONE = Layout()
"""The default device alone."""


def make_layout(config: MeshConfig) -> Layout:
    """The devices that were asked for. Raises ValueError where there are not as many."""
    found = jax.devices()
    shares = collections.Counter(device.process_index for device in found)
    if len(set(shares.values())) > 1:
        told = ", ".join(f"{num} in process {process}" for process, num in sorted(shares.items()))
        raise ValueError(
            f"the job's processes have different numbers of devices: {told}; give each as many"
        )
    wanted = len(found) if config.devices == "all" else config.devices
    if wanted > len(found):
        more = (
            "; JAX_NUM_CPU_DEVICES=N makes N of a CPU, for trying"
            if found[0].platform == "cpu"
            else ""
        )
        raise ValueError(
            f"devices is {wanted}, but JAX sees {len(found)} ({found[0].platform}); ask for at most"
            f" that, or all{more}"
        )
    if jax.process_count() > 1 and wanted != len(found):
        raise ValueError(
            f"devices is {wanted} of the {len(found)} of {jax.process_count()} processes; give"
            " --devices all, so that each of them takes part"
        )
    if wanted == 1 and jax.process_count() == 1:
        return ONE
    return Layout(found[:wanted])
