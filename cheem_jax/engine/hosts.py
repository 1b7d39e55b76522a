"""Several processes as one job: how they find each other, agree, and end together.

Every process runs the same program on its own devices (JAX's multi-controller SPMD) and holds the
same state; the first one alone writes, prints and logs. What may differ between them (clocks,
signals, the disk) is decided by all together, in the main thread and in the same order everywhere.
With one process everything here does nothing.
"""

import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cheem_jax.core.interruption import Stop

PORT = 8476
"""Of the coordinator where none is named."""
CONNECT_SECONDS = 120
SHUTDOWN_SECONDS = 15
"""How long a process that ends waits for the others: those may hang in a sum that it has left."""


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """The processes of one job: one per machine, with all of its devices, or one per device."""

    coordinator: str | None = None
    """`HOST:PORT` of the first process, or `auto`: as SLURM, Open MPI, Kubernetes or Cloud TPU tell
    it; default: one process alone."""
    num_processes: int | None = None
    """Processes in the job; told by the environment with `auto`."""
    process_id: int | None = None
    """This one's number, 0 for the first, which prints and writes; told by the environment with
    `auto`."""
    timeout: int = 30
    """Seconds without a sign of life after which a process counts as dead and the job ends."""
    patience: int = CONNECT_SECONDS
    """Seconds that the processes wait for each other at the start."""

    def __post_init__(self) -> None:
        given = (self.num_processes, self.process_id)
        if self.coordinator is None and given != (None, None):
            raise ValueError(
                "hosts num_processes or process_id is given without hosts coordinator; give"
                " HOST:PORT"
            )
        if self.coordinator not in (None, "auto"):
            if None in given:
                raise ValueError(
                    f"hosts coordinator is {self.coordinator!r}; expected num_processes and"
                    " process_id with it, or auto"
                )
            _address(self.coordinator)
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"hosts num_processes is {self.num_processes}; expected at least 1")
        if self.process_id is not None and not 0 <= self.process_id < (self.num_processes or 2**31):
            raise ValueError(
                f"hosts process_id is {self.process_id}; expected 0 to"
                f" {(self.num_processes or 1) - 1}"
            )
        if min(self.timeout, self.patience) < 5:
            raise ValueError(
                f"hosts timeout is {self.timeout} and patience {self.patience}; expected 5 s or"
                " more"
            )


def connect(config: HostsConfig) -> None:
    """Join the job; nothing to do for one process alone. Must come before anything is computed.

    Raises ValueError where the coordinator or, for `auto`, the job cannot be found. A process that
    later hears nothing of the others for `timeout` seconds ends with status 1 and a line that says
    so, whatever it is waiting for.
    """
    if config.coordinator is None:
        return
    _when_aborted(
        f"error: not all processes of the job were there within {config.patience} s, or one could"
        " not be reached; look at their logs, and check hosts coordinator, num_processes and"
        " process_id"
    )
    if config.coordinator != "auto" and config.process_id:
        _reach(*_address(config.coordinator), config.patience)
    address = (
        None if config.coordinator == "auto" else ":".join(map(str, _address(config.coordinator)))
    )
    try:
        jax.distributed.initialize(
            address,
            config.num_processes,
            config.process_id,
            initialization_timeout=config.patience,
            heartbeat_timeout_seconds=config.timeout,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            local_device_ids=_local_devices(config, os.environ),
        )
    except (ValueError, RuntimeError) as error:
        if config.coordinator != "auto":
            raise ValueError(
                f"the job's processes do not find each other ({_one_line(error)})"
            ) from error
        raise ValueError(
            "hosts coordinator is auto, but the environment tells of no job of SLURM, Open MPI,"
            f" Kubernetes or Cloud TPU ({_one_line(error)}); give HOST:PORT, num_processes and"
            " process_id"
        ) from error
    _ENDED.append(
        f"error: process {index()} of {count()} stops, because another one of the job has ended or"
        f" cannot be reached (no sign of life for {config.timeout} s, unless it said so itself; its"
        " own log says why), or because this one broke down (see above). What was saved is whole:"
        " start the job again, with as many processes as you like, and it goes on from there"
    )
    _when_aborted(_ENDED[-1])


def leave(error: BaseException) -> None:
    """End a process of a job now, if it failed; the others then end as if it had died.

    An orderly end would wait for others, which wait for what this one will never send. A request to
    stop is no failure: all follow it together.
    """
    status = error.code if isinstance(error, SystemExit) else 1
    if not _ENDED or not isinstance(status, int) or not 0 < status < 128:
        return
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)  # of the runtime, as where a sum does not reach the others
        print(f"\n{_ENDED[-1]}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        time.sleep(
            SECONDS_TO_LEAVE
        )  # the others need it to leave in order, if they failed for the same reason
    os._exit(status)


_ENDED: list[str] = []
"""What to say where the job breaks, once this process belongs to one."""
SECONDS_TO_LEAVE = 2


def _local_devices(config: HostsConfig, environment: Mapping[str, str]) -> list[int] | None:
    """What JAX is told about this process's devices: [] is all that it sees, None leaves it to JAX.

    Where SLURM or Open MPI has started the process, JAX takes one device per process; right where
    each device of a machine has a process of its own, but one process alone on its machine would
    leave all other devices idle.
    """
    if config.coordinator != "auto":
        return []
    nodes = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES"))
    alone = nodes is not None and nodes == environment.get("SLURM_NTASKS")
    return [] if alone or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1" else None


def count() -> int:
    """Processes in the job."""
    return jax.process_count()


def index() -> int:
    """This one's number."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process is the one that writes, prints and logs."""
    return index() == 0


def largest(value: int) -> int:
    """The largest of the processes' values, in all of them."""
    if count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def smallest(value: int) -> int:
    """The smallest of the processes' values below 2^62, in all of them."""
    if count() == 1:
        return value
    halves = np.array([value >> 31, value & (2**31 - 1)], np.int32)  # JAX has 32 bits, unless told
    high_and_low = np.asarray(multihost_utils.process_allgather(halves)).reshape(-1, 2)
    return min((int(high) << 31) + int(low) for high, low in high_and_low)


def total(values: np.ndarray) -> np.ndarray:
    """The sum of the processes' arrays, in all of them; exact for integers, and where all but one
    hold zeros."""
    if count() == 1:
        return values
    return np.asarray(multihost_utils.process_allgather(values)).sum(axis=0)


def fetch(tree: Any) -> Any:
    """Arrays as NumPy in every process, the parts that others hold brought together."""

    def whole(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(whole, tree)


def together(work: Callable[[], Any]) -> Any:
    """What each process does by itself, finished when all have; an error of one ends all of them.

    For work that may fail in one process alone, such as reading a file: the others would wait for
    it for ever.
    """
    if count() == 1:
        return work()
    try:
        found = work()
    except Exception:
        largest(index() + 1)
        raise
    if (failed := largest(0) - 1) >= 0:
        raise ValueError(f"process {failed} of {count()} has failed; its own log says why")
    return found


def first_does(work: Callable[[], Any]) -> None:
    """Work of the first process, after which all go on; an error of it ends all of them.

    What is written so can be read by everyone afterwards.
    """
    together(lambda: work() if is_first() else None)


def in_order(work: Callable[[], Any]) -> Any:
    """What the first process does before all others do the same, so that these find what it has
    written."""
    if count() == 1:
        return work()
    found = []
    first_does(lambda: found.append(work()))
    return together(lambda: found[0] if found else work())


def agree_to_stop(stop: Stop) -> bool:
    """Whether any process has been asked to stop, which then counts for all."""
    if number := largest(stop.signal_number or 0):
        stop.signal_number = number  # never back to None: a signal may have come meanwhile
    return bool(number)


def check_equal(what: str, value: Any, way_out: str) -> None:
    """ValueError in all processes, naming those that differ from the first, unless all hold the
    same JSON value."""
    if count() == 1:
        return
    own = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()
    found = np.asarray(multihost_utils.process_allgather(np.frombuffer(own, np.uint8)))
    others = [process for process, digest in enumerate(found) if (digest != found[0]).any()]
    if others:
        told = json.dumps(value, default=str)
        here = f"; here: {told}" if index() in (0, *others) and len(told) < 300 else ""
        raise ValueError(
            f"the {what} of process{'es' if len(others) > 1 else ''} {', '.join(map(str, others))}"
            f" of {count()} differ from those of process 0{here}; {way_out}"
        )


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host = text
        port = str(PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"hosts coordinator is {text!r}; expected HOST:PORT such as node01:{PORT}, or auto"
        )
    return host, int(port)


def _reach(host: str, port: int, seconds: float) -> None:
    """Wait until the coordinator listens; JAX's own wait ends with the process."""
    until = time.monotonic() + seconds
    reason = "no answer"
    while time.monotonic() < until:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.5)
    raise ValueError(
        f"the coordinator {host}:{port} could not be reached in {seconds:.0f} s ({reason}); is"
        " process 0 running, and does the network let this port through?"
    )


_HANDLERS: list[Any] = []
"""What C code still points to."""


def _when_aborted(message: str) -> None:
    """Say this, and end with status 1, where the runtime ends the process.

    JAX's runtime aborts a process whose job is broken, from a thread of its own and in the middle
    of anything, so no exception and no Python signal handler ever sees it.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(number: int) -> None:
        os.write(2, f"\n{message}\n".encode())
        os._exit(1)

    _HANDLERS.append(handler)
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype = ctypes.c_void_p
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300]
