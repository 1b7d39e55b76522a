"""Files that are either as they were or wholly new, whatever kills the process or the machine."""

import os
from pathlib import Path


def write_atomically(file: Path, content: str | bytes) -> None:
    """The whole content or, after a crash, what was there before."""
    sibling = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with sibling.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(sibling, file)
        to_disk(file.parent)
    finally:
        sibling.unlink(missing_ok=True)


def to_disk(file: Path) -> None:
    """Wait until a file or folder is on the disk: a rename may outlive a power loss that what it names did not."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
