"""Files that are either as they were or wholly new, whatever kills the process or the machine."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

REFUSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that is full or read-only."""


@contextlib.contextmanager
def room_for(file: Path, num_bytes: int) -> Iterator[None]:
    """While a file is written: the error of a disk that takes nothing names the file and the room
    that it needs."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSING:
            raise
        size = (
            f"{num_bytes / 2**20:,.1f} MB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} kB"
        )
        raise OSError(
            error.errno, f"{os.strerror(error.errno)}, and {size} are to be written", str(file)
        ) from error


def write_atomically(file: Path, content: str | bytes) -> None:
    """The whole content or, after a crash, what was there before."""
    sibling = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with room_for(file, len(data)), sibling.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(sibling, file)
        to_disk(file.parent)
    except OSError as error:
        if str(error.filename) != str(sibling):
            raise
        # a folder that nobody may write to, or a file that is a mount point; nobody knows the
        # sibling's name
        raise OSError(
            error.errno, f"{error.strerror}: choose a file in another folder", str(file)
        ) from error
    finally:
        with contextlib.suppress(
            OSError
        ):  # a read-only disk refuses this too, and the first error says more
            sibling.unlink()


def to_disk(file: Path) -> None:
    """Wait until a file or folder is on the disk: a rename may outlive a power loss that what it
    names did not."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
