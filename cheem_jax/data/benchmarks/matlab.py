"""Cells, structs, text and numbers of MATLAB's files (version 5), read in Python.

SciPy's reader is compiled and ends the process on some damaged files; the lists of Stanford Cars are small.
The format is that of MathWorks' "MAT-File Format", chapter 1.
"""

import struct
import zlib
from typing import Any

import numpy as np

MAX_BYTES = 64 * 2**20
"""Of a variable, unpacked; the real lists have less than 2 MB."""
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_MATRIX, _COMPRESSED = 14, 15
_CELL, _STRUCT, _CHAR, _NUMBERS = 1, 2, 4, range(6, 16)


def read_variable(data: bytes, name: str) -> list[Any]:
    """A variable's elements in MATLAB's order: of a cell anything, of a struct array a dict each, text as one element.

    Raises ValueError for what is damaged, huge or of another kind.
    """
    if len(data) < 128 or data[124:128] not in (b"\0\1IM", b"\1\0MI"):
        raise ValueError("no MATLAB file of version 5")
    order = "<" if data[126:128] == b"IM" else ">"
    known, place = [], 128
    while place < len(data):
        kind, body, place = _element(data, place, order)
        if kind == _COMPRESSED:
            unpacker = zlib.decompressobj()
            try:
                body = unpacker.decompress(body, MAX_BYTES)
            except zlib.error as error:
                raise ValueError(f"damaged: {error}") from error
            if unpacker.unconsumed_tail or not unpacker.eof:
                raise ValueError(f"a variable is cut off or unpacks to more than {MAX_BYTES} bytes")
            kind, body, _ = _element(body, 0, order)
        found, value = _matrix(kind, body, order, depth=0)
        if found == name:
            return value
        known.append(found)
    raise ValueError(f"no variable {name!r}, only {known[:5]}")


def _element(data: bytes, place: int, order: str) -> tuple[int, bytes, int]:
    """Type and bytes of the data element at `place`, and where the next one begins."""
    if place + 8 > len(data):
        raise ValueError("cut off")
    kind, size = struct.unpack_from(f"{order}II", data, place)
    start, end = place + 8, place + 8 + size
    if kind >> 16:  # small: type, size and up to four bytes in eight
        kind, size, start = kind & 0xFFFF, kind >> 16, place + 4
        end = start + size
        if size > 4:
            raise ValueError("damaged")
        following = place + 8
    else:
        following = end if kind == _COMPRESSED else end + -size % 8
    if end > len(data):
        raise ValueError("cut off")
    return kind, data[start:end], following


def _matrix(kind: int, data: bytes, order: str, *, depth: int) -> tuple[str, list[Any]]:
    """Name and elements of an array."""
    if kind != _MATRIX or depth > 8:
        raise ValueError(f"expected an array, found an element of type {kind} at depth {depth}")
    if not data:
        return "", []
    place, parts = 0, []
    for _ in range(3):  # flags, dimensions, name
        part_kind, part, place = _element(data, place, order)
        parts.append(_numbers(part_kind, part, order))
    if not len(parts[0]) or len(parts[1]) < 2 or min(parts[1]) < 0:
        raise ValueError("damaged")
    array_class, name = parts[0][0] & 0xFF, bytes(int(byte) & 0xFF for byte in parts[2]).decode("latin-1")
    num = int(np.prod([int(size) for size in parts[1]], dtype=object))
    if num > len(data):  # every element takes a byte or more
        raise ValueError(f"{num} elements in {len(data)} bytes")

    def nested() -> Any:
        nonlocal place
        inner, body, place = _element(data, place, order)
        value = _matrix(inner, body, order, depth=depth + 1)[1]
        return value[0] if len(value) == 1 else value

    if array_class == _CELL:
        return name, [nested() for _ in range(num)]
    if array_class == _STRUCT:
        length_kind, length, place = _element(data, place, order)
        [width] = _numbers(length_kind, length, order)[:1] or [0]
        _, texts, place = _element(data, place, order)
        if width < 1 or num * (len(texts) // width) > len(data):
            raise ValueError("damaged")
        fields = [texts[at : at + width].split(b"\0")[0].decode("latin-1") for at in range(0, len(texts), width)]
        return name, [{field: nested() for field in fields} for _ in range(num)]
    part_kind, part, place = _element(data, place, order)
    if array_class == _CHAR:
        encoding = _TEXTS.get(part_kind, "")
        if not encoding:
            raise ValueError(f"text of type {part_kind}")
        if not encoding.endswith("8") and encoding != "latin-1":
            encoding += "-le" if order == "<" else "-be"
        return name, [part.decode(encoding).rstrip()]
    if array_class not in _NUMBERS:
        raise ValueError(f"an array of class {array_class}; expected cells, structs, text or numbers")
    return name, _numbers(part_kind, part, order)[:num]


def _numbers(kind: int, data: bytes, order: str) -> list[Any]:
    if kind not in _TYPES:
        raise ValueError(f"numbers of type {kind}")
    dtype = np.dtype(f"{order}{_TYPES[kind]}")
    return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype).tolist()
