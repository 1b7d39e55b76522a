"""Functions with which the processes of one job connect, make common decisions, and end together.

Every process runs the same code on its own devices (JAX's multi-controller SPMD) and has the same
state. Only the first process writes, prints and logs. Clocks, signals and disks differ between
processes. If a decision depends on a clock, a signal or a disk, all processes therefore make this
decision together, in the main thread and in the same order. With one process, these functions do
not communicate.
"""

import dataclasses
import hashlib
import json
import os
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
from cheem_jax.core.settings import check_types

PORT = 8476
"""Default port of the coordinator."""
CONNECT_SECONDS = 120
SHUTDOWN_SECONDS = 15
"""Maximum number of seconds that an ending process waits for the others. The wait is limited,
because the others can hang in a sum that includes the ending process."""
SECONDS_TO_LEAVE = 2
"""Seconds that the first process waits after a failure, so that other processes with the same
failure can report it before JAX ends them."""


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """Processes of a job: either one process per machine with all of its devices, or one process
    per device."""

    coordinator: str | None = None
    """`HOST:PORT` of the first process, or `auto` to read it from SLURM, Open MPI, Kubernetes or
    Cloud TPU. By default, there is only one process."""
    num_processes: int | None = None
    """Number of processes in the job; not needed with `auto`."""
    process_id: int | None = None
    """Number of this process; process 0 prints and writes. Not needed with `auto`."""
    timeout: int = 30
    """Seconds without a heartbeat after which a process is considered dead and the job ends."""
    patience: int = CONNECT_SECONDS
    """Seconds that processes wait for each other at the start."""

    def __post_init__(self) -> None:
        check_types(self)
        numbers = (self.num_processes, self.process_id)
        if self.coordinator is None and numbers != (None, None):
            raise ValueError(
                "hosts num_processes or process_id is set without hosts coordinator; set it to"
                " HOST:PORT"
            )
        if self.coordinator not in (None, "auto"):
            if None in numbers:
                raise ValueError(
                    f"hosts coordinator is {self.coordinator!r} without num_processes or"
                    " process_id; set both, or set coordinator to auto"
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
                f"hosts timeout is {self.timeout} and patience {self.patience}; expected at least"
                " 5 s"
            )


def connect(config: HostsConfig) -> None:
    """Join the job; without a coordinator, do nothing. Call this function before the first
    computation.

    If another process dies later, JAX ends this process after about `timeout` seconds. Raises
    ValueError if the coordinator cannot be reached, or if `auto` finds no job.
    """
    if config.coordinator is None:
        return
    address = None
    if config.coordinator != "auto":
        host, port = _address(config.coordinator)
        address = f"{host}:{port}"
        if config.process_id:
            _wait_for_coordinator(host, port, config.patience)
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
        reason = " ".join((str(error) or type(error).__name__).split())[:300]
        if address:
            raise ValueError(f"the job's processes cannot connect ({reason})") from error
        raise ValueError(
            "hosts coordinator is auto, but there is no job of SLURM, Open MPI, Kubernetes or Cloud"
            f" TPU in the environment ({reason}); set coordinator to HOST:PORT, num_processes and"
            " process_id"
        ) from error


def leave(error: BaseException) -> None:
    """End this process immediately if it belongs to a job and `error` is a failure. JAX then ends
    the other processes as well.

    Python's normal exit would wait for the other processes, which wait for results of this process.
    A request to stop is not a failure, because all processes stop together.
    """
    status = error.code if isinstance(error, SystemExit) else 1
    is_job = jax.distributed.is_initialized()
    if not is_job or not isinstance(status, int) or not 0 < status < 128:
        return
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        print(
            f"\nerror: process {index()} of {count()} failed; checkpoints are complete: start the"
            " job again, with any number of processes, to resume",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        time.sleep(SECONDS_TO_LEAVE)
    os._exit(status)


def _local_devices(config: HostsConfig, environment: Mapping[str, str]) -> list[int] | None:
    """Return the devices of the process as an argument for JAX: [] for all visible devices, None
    for JAX's choice.

    Under SLURM and Open MPI, JAX chooses one device per process. A process that is alone on its
    machine would then not use the other devices.
    """
    if config.coordinator != "auto":
        return []
    nodes = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES"))
    alone = nodes is not None and nodes == environment.get("SLURM_NTASKS")
    return [] if alone or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1" else None


def count() -> int:
    """Return the number of processes in the job."""
    return jax.process_count()


def index() -> int:
    """Return this process's number."""
    return jax.process_index()


def is_first() -> bool:
    """Return whether this is the first process, which alone writes, prints and logs."""
    return index() == 0


def _gather(values: np.ndarray) -> np.ndarray:
    """Gather and stack the arrays of all processes."""
    return np.asarray(multihost_utils.process_allgather(values)).reshape(count(), *values.shape)


def largest(value: int) -> int:
    """Return the largest of the processes' values to every process; values must be below 2^31."""
    return value if count() == 1 else int(_gather(np.array(value, np.int32)).max())


def smallest(value: int) -> int:
    """Return the smallest of the processes' values to every process; values must be below 2^31."""
    return -largest(-value)


def total(values: np.ndarray) -> np.ndarray:
    """Sum the arrays of all processes; every process gets the sum.

    The sum is exact for integers. It is also exact for floats if, at each position, only one
    process has a nonzero value.
    """
    return values if count() == 1 else _gather(values).sum(axis=0)


def fetch(tree: Any) -> Any:
    """Convert arrays to NumPy in every process; parts on devices of other processes are
    gathered."""

    def whole(leaf):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(whole, tree)


def together(work: Callable[[], Any]) -> Any:
    """Call `work` in each process, and wait until all processes have finished it. If `work` fails
    in one process, all processes raise an error.

    Use this function for work that can fail in a single process, such as reading a file. Without
    it, the other processes would wait forever for the failed process.
    """
    if count() == 1:
        return work()
    try:
        result = work()
    except Exception:
        largest(index() + 1)
        raise
    if (failed := largest(0) - 1) >= 0:
        raise ValueError(
            f"process {failed} of {count()} has failed; see the error in the log of that process"
        )
    return result


def run_on_first(work: Callable[[], Any]) -> None:
    """Call `work` in the first process while the others wait; afterwards, the others can read the
    files that `work` wrote.

    If `work` fails, all processes raise an error.
    """
    together(lambda: work() if is_first() else None)


def in_order(work: Callable[[], Any]) -> Any:
    """Call `work` in the first process, then in all others, which can read the files of the first
    process. Return this process's result."""
    results = []
    run_on_first(lambda: results.append(work()))
    return together(lambda: results[0] if results else work())


def agree_to_stop(stop: Stop) -> bool:
    """Return whether any process was asked to stop. If so, all processes stop."""
    if number := largest(stop.signal_number or 0):
        # there is no `else`, because resetting the number could delete a signal that has just
        # arrived
        stop.signal_number = number
    return bool(number)


def check_equal(what: str, value: Any, way_out: str) -> None:
    """Check that a JSON value is identical in all processes; `what` is a plural noun for the value,
    and `way_out` is a hint for the user.

    Raises ValueError in all processes, with the numbers of the processes whose values differ from
    the value of the first process.
    """
    if count() == 1:
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()
    digests = _gather(np.frombuffer(digest, np.uint8))
    others = np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()
    if others:
        text = json.dumps(value, default=str)
        here = f"; here: {text}" if index() in (0, *others) and len(text) < 300 else ""
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


def _wait_for_coordinator(host: str, port: int, seconds: float) -> None:
    """Wait until the coordinator listens. If JAX waited instead, it would abort the process after
    the timeout."""
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.5)
    raise ValueError(
        f"the coordinator {host}:{port} could not be reached within {seconds:.0f} s ({reason});"
        " check that process 0 is running and that no firewall blocks the port"
    )
