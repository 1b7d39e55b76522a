"""The library of shim.c: built into a folder, and from inside a process that has it preloaded, its
switches."""

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
    """What happens at the n-th file operation below a directory; 0: operations are only counted."""

    at: int = 0
    error: str = "EIO"
    persistent: bool = False
    """All that follow fail as well, as on a full disk or in a folder that has become read-only."""
    short: bool = False
    """A write first writes half of its bytes."""
    kill: Literal["", "before", "after", "within"] = ""
    """SIGKILL instead of an error; `within` a write, or before where the operation is none."""
    reads: bool = False
    """Counts reads and not changes."""
    name: str = ""
    """Only calls of this name are counted; all where it is empty."""
    part: str = ""
    """Only files whose path holds this are counted."""

    def flags(self) -> int:
        """The same as bits."""
        chosen = _PERSISTENT * self.persistent | _SHORT * self.short | _READS * self.reads
        return chosen | (_KILLS[self.kill] if self.kill else 0)


class Struck:
    """Operations counted so far, and whether the fault has been reached; final once the block is
    left."""

    def __init__(self) -> None:
        self.count, self.reached = 0, False


@contextlib.contextmanager
def armed(directory: Path, fault: Fault, log: Path | None = None) -> Iterator[Struck]:
    """Within the block the fault strikes below `directory`; `log` receives a line per operation."""
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
    """Within the block the clock on the wall shows another time."""
    ctypes.CDLL(None).fault_shift_clock(ctypes.c_long(seconds))
    try:
        yield
    finally:
        ctypes.CDLL(None).fault_shift_clock(ctypes.c_long(0))


def build(folder: Path) -> Path | str:
    """The built library, or the reason why there is none on this machine."""
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
