"""Files that are either as they were or wholly new."""

import os
from pathlib import Path


def write_atomically(file: Path, content: str | bytes) -> None:
    """The whole content or, after a crash, what was there before."""
    sibling = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        sibling.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(sibling, file)
    finally:
        sibling.unlink(missing_ok=True)
