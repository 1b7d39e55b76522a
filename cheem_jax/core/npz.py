"""Arrays from npz and safetensors files that anybody may have written: headers are held against
what is there."""

import math
import zipfile
from pathlib import Path

import numpy as np

SMALL_BYTES = 2**30
MAX_RATIO = 100
"""What unpacks to more than both is a bomb: numbers hardly pack."""


def read_npz(file: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file, nothing unpickled; ValueError names a file that is damaged or
    promises too much."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = file.stat().st_size
            total = sum(member.file_size for member in members)
            if total > max(SMALL_BYTES, MAX_RATIO * size):
                raise ValueError(f"{size} bytes unpack to {total}, over {MAX_RATIO} times as many")
            if len({member.filename for member in members}) < len(members):
                raise ValueError("several members have one name")
            return {
                member.filename.removesuffix(".npy"): _read(archive, member) for member in members
            }
    # zipfile, zlib and NumPy's parser of headers raise almost anything on a broken file
    except Exception as error:
        reason = f"{error or type(error).__name__}"[:200]
        raise ValueError(
            f"{file} is not a readable npz file ({reason}); is it complete?"
        ) from error


def read_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """All tensors and the header's metadata (empty for npz); ValueError names a file that cannot be
    read."""
    from safetensors import SafetensorError, safe_open

    metadata: dict[str, str] = {}
    if file.suffix == ".npz":
        tensors = read_npz(file)
    elif file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="numpy") as opened:
                names = opened.keys()
                metadata = dict(opened.metadata() or {})
                tensors = {}
            for name in (
                names
            ):  # opened anew: what was read of a mapped file stays in memory until it is closed
                with safe_open(file, framework="numpy") as opened:
                    tensors[name] = opened.get_tensor(name)
        except (
            SafetensorError,
            TypeError,
            AttributeError,
            KeyError,
            OSError,
        ) as error:  # types NumPy does not have
            raise ValueError(
                f"{file} is not a readable safetensors file ({error}); is it complete?"
            ) from error
    else:
        raise ValueError(
            f"{file}: expected a .safetensors or .npz file (pickled .bin and .pth files are not"
            " read)"
        )
    for name, value in tensors.items():
        if value.dtype.name == "bfloat16":
            tensors[name] = value.astype(np.float32)  # exact, and NumPy computes with it
    if wrong := sorted(name for name, value in tensors.items() if value.dtype.kind not in "fiub"):
        raise ValueError(
            f"{file}: {wrong[:5]} are {tensors[wrong[0]].dtype}, expected float32, float16,"
            " bfloat16 or float64"
        )
    largest = np.finfo(np.float32).max
    if wrong := sorted(
        name for name, value in tensors.items() if not (np.abs(value) <= largest).all()
    ):
        raise ValueError(
            f"{file}: {wrong[:5]} contain values that are not finite in float32; is it corrupted?"
        )
    return tensors, metadata


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    name = f"{member.filename:.80}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # zipfile unpacks the others to any size in one go, whatever the directory tells
        raise ValueError(
            f"{name} is packed by method {member.compress_type}, which NumPy does not write"
        )
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} has the format version {version}, expected 1.0 or 2.0")
        read_header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(stream)
        there = member.file_size - stream.tell()
        if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{name} must contain plain numbers or text, but is {dtype} {shape}")
        if math.prod(shape) * dtype.itemsize != there:
            raise ValueError(f"{name} is {dtype} {shape} by its header, but has {there} bytes")
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)
