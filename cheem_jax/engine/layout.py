"""Place arrays on one device, or on a mesh of devices of one or more machines (JAX's SPMD).

The rows of a batch are split over the devices. Learned parameters and the frozen backbone are
replicated. The same functions run on one device and on a mesh: XLA divides the work according to
the sharding of the arguments, and inserts the sums over devices for gradients and counts.
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
from cheem_jax.core.settings import check_types

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices of a run. They affect results only by rounding."""

    devices: Literal["all"] | int = 1
    """Number of devices that share each batch; `all` uses all visible devices of all processes."""

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.devices, int) and self.devices < 1:
            raise ValueError(f"devices is {self.devices}; expected a number of at least 1, or all")


class Layout:
    """One device, or a mesh of devices. All processes of a job construct identical layouts.

    Each device gets the same number of rows of a batch. The batch is padded with its first row;
    padding has weight 0 if rows are weighted. Predictions and sums of the other rows therefore do
    not change.
    """

    def __init__(self, devices: Sequence[Any] = ()):
        self.devices = sorted(devices, key=lambda device: (device.process_index, device.id))
        self.num = max(len(self.devices), 1)
        self.local = [
            place
            for place, device in enumerate(self.devices)
            if device.process_index == jax.process_index()
        ]
        self.mesh = Mesh(np.array(self.devices), ("data",)) if self.devices else None

    @property
    def is_many(self) -> bool:
        """Whether arrays have to be distributed over a mesh."""
        return self.mesh is not None

    @property
    def place(self) -> tuple[int, ...]:
        """IDs of the devices, used in the keys of compiled functions."""
        return tuple(device.id for device in self.devices)

    def _sharding(self, *axes: str | None) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def local_rows(self, rows: np.ndarray, filler: Any = None) -> np.ndarray:
        """Return the rows of a batch that belong to this process. The batch is padded with its
        first row or with `filler`."""
        if not self.is_many:
            return rows
        share = -(-len(rows) // self.num)
        fill = rows[:1] if filler is None else np.full_like(rows[:1], filler)
        padded = np.concatenate([rows, fill.repeat(share * self.num - len(rows), axis=0)])
        return padded[self.local[0] * share : (self.local[-1] + 1) * share]

    def join(self, part: Any, axis: int = 0) -> Any:
        """Join the parts of all processes into one array, which is split over all devices along
        `axis`."""
        if not self.is_many:
            return part
        pieces = [
            jax.device_put(piece, self.devices[place])
            for place, piece in zip(self.local, np.split(part, len(self.local), axis), strict=True)
        ]
        shape = list(part.shape)
        shape[axis] = shape[axis] // len(self.local) * self.num
        split = self._sharding(*[None] * axis, "data")
        return jax.make_array_from_single_device_arrays(tuple(shape), split, pieces)

    def rows(self, values: np.ndarray) -> Any:
        """Split rows `[B, ...]` over the devices; every process passes all rows."""
        return self.join(self.local_rows(values))

    def weights(self, values: np.ndarray) -> Any:
        """Split the weights or the mask `[B]` of rows over the devices; padding has weight 0."""
        return self.join(self.local_rows(values, 0))

    def read(self, images: Images, order: Sequence[np.ndarray]) -> Iterator[Any]:
        """Yield the images for each array of row numbers in `order`. Each process reads only the
        images of its devices."""
        return map(self.join, in_turn(images, [self.local_rows(rows) for rows in order]))

    def replicate(self, tree: Tree) -> Tree:
        """Replicate arrays on all devices; every process passes the same arrays."""
        if not self.is_many:
            return tree
        whole = self._sharding()

        def put(leaf):
            if getattr(leaf, "sharding", None) == whole:
                return leaf
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return self.jit(lambda parts: parts, out_shardings=whole)(leaf)
            copies = [jax.device_put(leaf, self.devices[place]) for place in self.local]
            return jax.make_array_from_single_device_arrays(np.shape(leaf), whole, copies)

        return jax.tree.map(put, tree)

    def copy(self, tree: Tree, place: int) -> Tree:
        """Return the copy of replicated arrays on one of this process's devices."""

        def local(leaf):
            if not isinstance(leaf, jax.Array) or len(leaf.devices()) == 1:
                return leaf
            assert leaf.is_fully_replicated
            device = self.devices[place]
            return next(part.data for part in leaf.addressable_shards if part.device == device)

        return jax.tree.map(local, tree)

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Compile a function with `jax.jit`. On a CPU with more than one virtual device, each call
        waits for its result.

        Virtual devices share a thread pool with one thread per device. If two functions with sums
        over devices ran at the same time, all threads could wait for a device that has no thread,
        which would be a deadlock.
        """
        if not self.is_many:
            return jax.jit(function, **options)

        @functools.wraps(function)
        def divided(*arguments, **named):
            token = IS_DIVIDED.set(True)
            try:
                return function(*arguments, **named)
            finally:
                IS_DIVIDED.reset(token)

        compiled = jax.jit(divided, **options)
        return _Waiting(compiled) if self.devices[0].platform == "cpu" else compiled


class _Waiting:
    """A function made by `Layout.jit` that waits for its result. It can be called directly, or
    after being lowered and compiled."""

    def __init__(self, function: Any):
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return jax.block_until_ready(self._function(*arguments, **named))

    def lower(self, *arguments: Any, **named: Any) -> "_Waiting":
        """Lower the function for the shapes and types of these arguments."""
        return _Waiting(self._function.lower(*arguments, **named))

    def compile(self) -> "_Waiting":
        """Compile the lowered function."""
        return _Waiting(self._function.compile())


ONE = Layout()
"""Layout that consists of the default device."""


def make_layout(config: MeshConfig) -> Layout:
    """Make a layout from settings. Raises ValueError if there are not enough devices, or if the
    processes have different numbers of devices."""
    devices = jax.devices()
    shares = collections.Counter(device.process_index for device in devices)
    if len(set(shares.values())) > 1:
        listed = ", ".join(f"{num} in process {process}" for process, num in sorted(shares.items()))
        raise ValueError(
            f"the job's processes have different numbers of devices: {listed}; start each process"
            " with the same number"
        )
    wanted = len(devices) if config.devices == "all" else config.devices
    if wanted > len(devices):
        platform = devices[0].platform
        hint = (
            "; for a trial, JAX_NUM_CPU_DEVICES=N splits a CPU into N" if platform == "cpu" else ""
        )
        raise ValueError(
            f"devices is {wanted}, but JAX has {len(devices)} ({platform}); choose at most"
            f" {len(devices)}, or all{hint}"
        )
    if len(shares) > 1 and wanted != len(devices):
        raise ValueError(
            f"devices is {wanted}, but the {len(shares)} processes have {len(devices)} devices; use"
            " --devices all, so that each process takes part"
        )
    return ONE if wanted == 1 and len(shares) == 1 else Layout(devices[:wanted])
