"""Encoded images for tests."""

import io
import struct
import zlib

from PIL import Image

STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""The camera's transposition of an upright image for each EXIF orientation."""


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(value: int = 0, size: tuple[int, int] = (4, 4), mode: str = "RGB") -> bytes:
    """Return a PNG of one grey."""
    return encode(Image.new("L", size, value).convert(mode))


def halves(mode: str, left_colour, right, size=(8, 8)) -> Image.Image:
    """Return an image whose halves have two values."""
    image = Image.new(mode, size, left_colour)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def four_colours(width: int = 24, height: int = 16) -> Image.Image:
    """Return an image with a different colour in every corner, so that no turn or mirror image is
    equal."""
    image = halves("RGB", (200, 0, 0), (0, 200, 0), (width, height))
    image.paste(halves("RGB", (0, 0, 200), (250, 250, 250), (width, height // 2)), (0, height // 2))
    return image


def stored(upright: Image.Image, orientation: int, kind: str = "PNG", **options) -> bytes:
    """Return a file of the upright image as a camera stores it in this orientation."""
    exif = Image.Exif()
    turn = STORED[orientation]
    exif[0x0112] = orientation
    image = upright if turn is None else upright.transpose(turn)
    return encode(image, kind, exif=exif if kind == "TIFF" else exif.tobytes(), **options)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def large_png(width: int, height: int) -> bytes:
    """Return an image of zeros in one bit per pixel: a hundred megapixels in 12 kB."""
    packer = zlib.compressobj(9)
    rows = [packer.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)]
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0),
        b"IDAT": b"".join([*rows, packer.flush()]),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(png_chunk, chunks, chunks.values()))
