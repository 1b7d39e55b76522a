"""Arrays from npz files that anybody may have written: what a header promises is held against what is there."""

import math
import zipfile
from pathlib import Path

import numpy as np

SMALL_BYTES, MAX_RATIO = 2**30, 100
"""What unpacks to more than both is a bomb: numbers hardly pack."""


def read_npz(file: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file, nothing unpickled; ValueError names a file that is damaged or promises too much."""
    try:
        with zipfile.ZipFile(file) as archive:
            members, size = archive.infolist(), file.stat().st_size
            total = sum(member.file_size for member in members)
            if total > max(SMALL_BYTES, MAX_RATIO * size):
                raise ValueError(f"{size} bytes unpack to {total}, over {MAX_RATIO} times as many")
            if len({member.filename for member in members}) < len(members):
                raise ValueError("several members have one name")
            return {member.filename.removesuffix(".npy"): _read(archive, member) for member in members}
    except Exception as error:  # zipfile, zlib and NumPy's parser of headers raise almost anything on a broken file
        reason = f"{error or type(error).__name__}"[:200]
        raise ValueError(f"{file} is not a readable npz file ({reason}); is it complete?") from error


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    name = f"{member.filename:.80}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # zipfile unpacks the others to any size in one go, whatever the directory tells
        raise ValueError(f"{name} is packed by method {member.compress_type}, which NumPy does not write")
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} has the format version {version}, expected 1.0 or 2.0")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        there = member.file_size - stream.tell()
        if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{name} must contain plain numbers or text, but is {dtype} {shape}")
        if math.prod(shape) * dtype.itemsize != there:
            raise ValueError(f"{name} is {dtype} {shape} by its header, but has {there} bytes")
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)
