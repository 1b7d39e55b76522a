"""The library of shim.c: how to build it, and its switches in a process that has it preloaded."""

import contextlib
import ctypes
import errno
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

SOURCE = Path(__file__).with_name("shim.c")
_PERSISTENT = 1
_SHORT = 2
_READS = 16
_KILLS = {"before": 4, "after": 8, "within": 4 | 2}


class Fault(NamedTuple):
    """A fault at the n-th file operation below a directory."""

    at: int = 0
    """Number of the operation, from 1; for 0, operations are only counted."""
    error: str = "EIO"
    persistent: bool = False
    """Whether later operations fail, too, as on a full disk or in a read-only folder."""
    short: bool = False
    """A write first writes half of its bytes."""
    kill: Literal["", "before", "after", "within"] = ""
    """SIGKILL instead of an error: before the operation, after it, or `within` a write (before
    other operations)."""
    reads: bool = False
    """Whether reads are counted instead of changes."""
    name: str = ""
    """Name of the counted calls; empty for all calls."""
    part: str = ""
    """Part of the paths of the counted files."""

    def flags(self) -> int:
        """Return the flags as the library expects them."""
        chosen = _PERSISTENT * self.persistent | _SHORT * self.short | _READS * self.reads
        return chosen | (_KILLS[self.kill] if self.kill else 0)


class Struck:
    """Number of operations, and whether the fault was reached; both are set when the block ends."""

    def __init__(self) -> None:
        self.count, self.reached = 0, False


@contextlib.contextmanager
def armed(directory: Path, fault: Fault, log: Path | None = None) -> Iterator[Struck]:
    """Within the block, the fault strikes below `directory`; `log` gets one line per operation."""
    library = ctypes.CDLL(None)
    struck = Struck()
    library.fault_log(str(log).encode() if log else None)
    library.fault_only(fault.name.encode(), fault.part.encode())
    place = str(directory.absolute()).encode()
    library.fault_arm(place, ctypes.c_long(fault.at), getattr(errno, fault.error), fault.flags())
    try:
        yield struck
    finally:
        library.fault_disarm()
        struck.count = int(library.fault_count())
        struck.reached = bool(library.fault_reached())
        library.fault_log(None)


@contextlib.contextmanager
def clock_shifted(seconds: int) -> Iterator[None]:
    """Within the block, the system clock is shifted by this number of seconds."""
    ctypes.CDLL(None).fault_shift_clock(ctypes.c_long(seconds))
    try:
        yield
    finally:
        ctypes.CDLL(None).fault_shift_clock(ctypes.c_long(0))


def build(folder: Path) -> Path | str:
    """Build the library and return its file, or return the reason why it cannot be built."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    library = folder / "shim.so"
    if not sys.platform.startswith("linux"):
        return "libraries are preloaded on Linux alone"
    if compiler is None:
        return "there is no C compiler"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        return f"{compiler} does not build shim.c: {built.stderr.strip()[:300]}"
    probe = [sys.executable, "-c", "import ctypes; print(ctypes.CDLL(None).fault_count())"]
    tried = subprocess.run(probe, capture_output=True, text=True, env={"LD_PRELOAD": str(library)})
    return (
        library
        if tried.stdout.strip() == "0"
        else f"LD_PRELOAD has no effect: {tried.stderr.strip()[-300:]}"
    )
