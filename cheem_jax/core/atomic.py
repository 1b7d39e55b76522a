"""Write files atomically: after a crash, a file has either its complete old content or its complete
new content."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

REFUSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error codes of a full or read-only disk."""


@contextlib.contextmanager
def room_for(file: Path, num_bytes: int) -> Iterator[None]:
    """If an OSError in this context reports a full or read-only disk, add the file and the number
    of bytes to write (`num_bytes`) to the message of the error."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSING:
            raise
        size = (
            f"{num_bytes / 2**20:,.1f} MB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} kB"
        )
        raise OSError(
            error.errno, f"{os.strerror(error.errno)}, but {size} must be written", str(file)
        ) from error


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write `content` completely, or raise OSError and leave the file unchanged."""
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
        # The folder is not writable, or the file is a mount point. The message reports the file
        # instead of the temporary sibling.
        raise OSError(
            error.errno, f"{error.strerror}: choose a file in another folder", str(file)
        ) from error
    finally:
        # on a read-only disk, unlinking fails as well; only the first error is reported
        with contextlib.suppress(OSError):
            sibling.unlink()


def to_disk(file: Path) -> None:
    """Wait until a file or folder is written to disk.

    Without this call, a rename can survive a power loss although the data of the renamed file do
    not.
    """
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
