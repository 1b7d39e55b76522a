"""Read arrays from untrusted npz and safetensors files. Headers are checked against the data before
arrays are allocated."""

import math
import zipfile
from pathlib import Path

import numpy as np

SMALL_BYTES = 2**30
MAX_RATIO = 100
"""An archive is rejected if its unpacked size exceeds both SMALL_BYTES and MAX_RATIO times its
packed size. Numeric arrays hardly compress, so such an archive is probably a zip bomb."""


def read_npz(file: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an npz file without unpickling.

    Raises ValueError if the file is corrupted or its unpacked size is too large.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size = file.stat().st_size
            total = sum(member.file_size for member in members)
            if total > max(SMALL_BYTES, MAX_RATIO * size):
                raise ValueError(f"{size} bytes unpack to {total}, over {MAX_RATIO} times as many")
            if len({member.filename for member in members}) < len(members):
                raise ValueError("member names are repeated")
            return {
                member.filename.removesuffix(".npy"): _read(archive, member) for member in members
            }
    # for a corrupted file, zipfile, zlib and the NumPy header parser can raise almost any error
    # type
    except Exception as error:
        reason = f"{error or type(error).__name__}"[:200]
        raise ValueError(
            f"{file} is not a readable npz file ({reason}); download it again"
        ) from error


def read_tensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read all tensors of a safetensors or npz file, and the metadata of its header (empty for
    npz).

    Raises ValueError if the file is unreadable, or contains unsupported types or non-finite values.
    """
    metadata: dict[str, str] = {}
    if file.suffix == ".npz":
        tensors = read_npz(file)
    elif file.suffix == ".safetensors":
        tensors, metadata = _read_safetensors(file)
    else:
        raise ValueError(
            f"{file}: expected a .safetensors or .npz file (pickled .bin and .pth files are not"
            " read)"
        )
    for name, value in tensors.items():
        if value.dtype.name == "bfloat16":
            # this conversion is exact; NumPy does not compute in bfloat16
            tensors[name] = value.astype(np.float32)
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
            f"{file}: {wrong[:5]} contain values that are non-finite in float32; download it again"
        )
    return tensors, metadata


def _read_safetensors(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    tensors = {}
    try:
        with safe_open(file, framework="numpy") as header:
            names = header.keys()
            metadata = dict(header.metadata() or {})
        # The file is opened again for each tensor, because pages of a mapped file stay in memory
        # until the file is closed.
        for name in names:
            with safe_open(file, framework="numpy") as data:
                tensors[name] = data.get_tensor(name)
    # TypeError, AttributeError and KeyError are raised for types that NumPy does not have
    except (SafetensorError, TypeError, AttributeError, KeyError, OSError) as error:
        raise ValueError(
            f"{file} is not a readable safetensors file ({error}); download it again"
        ) from error
    return tensors, metadata


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    name = f"{member.filename:.80}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # for other compression methods, zipfile does not limit the unpacked size to the size in the
        # archive's index
        raise ValueError(
            f"{name} is compressed with method {member.compress_type}, which NumPy does not use"
        )
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"{name} has the format version {version}, expected 1.0 or 2.0")
        num_bytes = member.file_size - stream.tell()
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{name} must contain plain numbers or text, but is {dtype} {shape}")
    if math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"{name} is {dtype} {shape} by its header, but has {num_bytes} bytes")
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)
