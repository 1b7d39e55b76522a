"""The memory of this machine, without JAX, so that `cheem doctor` can read it where JAX fails."""

import contextlib
import os
from pathlib import Path

CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with the memory limit of a container, of cgroups 2 and 1."""


def host_memory() -> int:
    """Return the bytes of memory of this machine, or of its container if that allows fewer."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            sizes.append(int(file.read_text()))
    return min(sizes)
