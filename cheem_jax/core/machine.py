"""The memory of this machine, without JAX, so that `cheem doctor` can read it where JAX fails."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Mount point of the control groups, which limit the memory of containers and jobs."""
MEMBERSHIP = Path("/proc/self/cgroup")
"""File with the control groups of this process."""


def host_memory() -> int:
    """Return the bytes of memory of this machine, or of its container or job if that allows
    fewer."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limits():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            sizes.append(int(file.read_text(encoding="utf-8")))
    return min(sizes)


def _limits() -> Iterator[Path]:
    """Yield the files that can contain a limit: those of the control group of this process and of
    every group above it. A container sees its own group at the mount point."""
    lines = ["0::/", "1:memory:/"]
    with contextlib.suppress(OSError, ValueError):
        lines += MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    for line in lines:
        # hierarchy:controllers:path; cgroups 2 have one hierarchy without controllers
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            root, name = CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        yield from (
            folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)
        )
