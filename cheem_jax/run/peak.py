"""The peak memory of a run. Its process can have made other runs before."""

import re
import resource
import sys
from pathlib import Path
from typing import NamedTuple


class Peak(NamedTuple):
    """The peak resident memory of this process since a point in time."""

    before: int = 0
    """Peak in bytes before that point, if the system did not reset it, otherwise 0."""

    @classmethod
    def begin(cls) -> "Peak":
        """Begin now. Linux resets the peak of the process to its present memory."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return cls(peak_memory_bytes())
        return cls()

    def measure(self) -> int | None:
        """Return the peak in bytes; None if it is unknown, because it is not above the peak
        before."""
        peak = peak_memory_bytes()
        return peak if peak > self.before else None


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    try:  # unlike `ru_maxrss`, without the memory of the process that started this one
        if line := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return 1024 * int(line[1])
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
