"""Atomic writes: after a crash a file has its old content or all of the new."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

REFUSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a full or read-only disk."""


@contextlib.contextmanager
def room_for(file: Path, num_bytes: int) -> Iterator[None]:
    """Errors of a full or read-only disk name the file and the room that it needs."""
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
    """Write the whole content, or leave the file unchanged."""
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
        # The folder is not writable, or the file is a mount point: name the file, not the sibling.
        raise OSError(
            error.errno, f"{error.strerror}: choose a file in another folder", str(file)
        ) from error
    finally:
        # a read-only disk refuses this too; the first error says more
        with contextlib.suppress(OSError):
            sibling.unlink()


def to_disk(file: Path) -> None:
    """Wait until a file or folder is on the disk.

    Without this, a rename can survive a power loss although the file's data does not.
    """
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
