"""Decode image files to pixels. All sources use this decoder, so the pixels do not depend on the
source."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features
from PIL import TiffImagePlugin as TIFF

from cheem_jax.data.files import GET_HEIF, HEIF_MAGIC, READS_HEIF, Encoded, join_first

# The list is explicit, because Pillow would run other executables for some formats (Ghostscript for
# EPS).
FORMATS = (
    "JPEG",
    "PNG",
    "BMP",
    "GIF",
    "PPM",
    "WEBP",
    "TIFF",
    *(["AVIF"] if features.check("avif") else []),
)
MAX_PIXELS = 89_478_485  # above this number, Pillow warns of a decompression bomb
MAX_SCANS = 100  # progressive JPEGs have about ten scans; each scan is a pass over the whole image

DECODER_VERSION = 2
"""Version of the decoder. It must be increased if a change affects pixels; older decoded copies are
then ignored."""
PIECE = 256
"""Number of images that are decoded between two progress reports (38 MB of pixels at 224 x 224)."""

OnProgress = Callable[[int], object]
"""Function that is called with the number of images (or bytes) finished since the last call."""
Result = TypeVar("Result")


def decode_image(
    data: bytes | Image.Image, image_size: int, *, name: str = "image", upright: bool = True
) -> UInt8[np.ndarray, "S S 3"]:
    """Decode a file's bytes or an open image to RGB, and resize it to a square with Pillow's
    bicubic filter, without keeping the aspect ratio.

    Palette indices become colours, grey is copied to all three channels, 16-bit grey is scaled by
    255/65535, alpha is dropped (no background is assumed), and only the first frame of an animation
    is used. With `upright`, the image is rotated by its EXIF orientation; the CHEEM paper's loaders
    do not rotate. (Pillow always rotates TIFF and HEIC.) Raises ValueError with `name` if the
    file is broken, truncated, huge or not an image.
    """
    if image_size < 1:
        raise ValueError(f"image_size must be at least 1, got {image_size}")
    with opened(data, name) as image:
        rgb = to_rgb(image, upright=upright)
        return np.asarray(rgb.resize((image_size, image_size), Image.Resampling.BICUBIC))


@contextlib.contextmanager
def opened(data: bytes | Image.Image, name: str) -> Iterator[Image.Image]:
    """Open an image file for a `with` block. An error inside the block or a decompression bomb
    becomes a ValueError with `name` in the message."""
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(data, Image.Image):
                image = data  # closed by the caller
            else:
                image = stack.enter_context(Image.open(io.BytesIO(data), formats=formats_of(data)))
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(
                    f"{image.width} x {image.height} pixels, at most {MAX_PIXELS} are accepted"
                )
            if isinstance(data, bytes):
                _refuse_bombs(image, data)
            yield image
    except UnidentifiedImageError:
        if isinstance(data, bytes) and data.startswith(b"version https://git-lfs"):
            raise ValueError(
                f"{name}: a pointer of Git LFS instead of the image; `git lfs pull` downloads it"
            ) from None
        raise ValueError(
            f"{name}: not an image file of a known format ({', '.join(FORMATS)})"
        ) from None
    except Exception as error:  # Pillow's parsers can raise almost any exception on a broken file
        raise ValueError(f"{name}: the image cannot be decoded: {error}") from error


def formats_of(data: bytes) -> tuple[str, ...]:
    """Return Pillow's names of the formats that the file can have. Pillow's HEIC decoder is
    registered for a HEIC file; without it, this raises ValueError."""
    if not HEIF_MAGIC.match(data):
        return FORMATS
    if not READS_HEIF:
        raise ValueError(f"HEIC images need pillow-heif: {GET_HEIF}")
    import pillow_heif

    pillow_heif.register_heif_opener()
    return ("HEIF",)


def _refuse_bombs(image: Image.Image, data: bytes) -> None:
    """Raise ValueError for files that need much more work or memory than the size of the image
    suggests."""
    tags = getattr(image, "tag_v2", {})
    # in files without JPEG data, the bytes of a scan's marker can be pixels
    has_scans = data.startswith(b"\xff\xd8") or tags.get(TIFF.COMPRESSION) in (6, 7)
    if has_scans and (scans := data.count(b"\xff\xda\0")) > MAX_SCANS:
        raise ValueError(f"{scans} scans, at most {MAX_SCANS} are accepted")
    tile = [tags.get(tag, 0) for tag in (TIFF.TILEWIDTH, TIFF.TILELENGTH)]
    if tile[0] * tile[1] > MAX_PIXELS:
        raise ValueError(
            f"tiles of {tile[0]} x {tile[1]} pixels, at most {MAX_PIXELS} are accepted"
        )


def to_rgb(image: Image.Image, *, upright: bool = False) -> Image.Image:
    """Load all pixels and convert them to RGB. With `upright`, rotate them by the EXIF orientation.

    `image` itself is not modified, and the result stays valid after the file is closed.
    """
    image.load()
    is_inverted = _is_inverted(image)  # read first, because a rotated copy has no tags
    if upright:
        image = _turned(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; store 8 or 16 bits")
    if _has_16_bits(image):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"grey values {values.min()}..{values.max()} outside the 16-bit range")
        grey = values.astype(np.int32)
        if is_inverted:
            grey = 65535 - grey
        # Pillow's conversion clips at 255 instead of scaling. Adding 128 rounds to the nearest
        # integer; there are no ties, because 257 is odd.
        image = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
    elif "transparency" in image.info:
        # Converting a palette with transparency directly to RGB prints a warning.
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")  # `convert` would copy


def largest_value(image: Image.Image) -> int | None:
    """Return the brightest value of a loaded 16-bit image; None for other images."""
    if not _has_16_bits(image):
        return None
    values = np.asarray(image)
    return 65535 - int(values.min()) if _is_inverted(image) else int(values.max())


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode == "I" or image.mode.startswith("I;16")


def _is_inverted(image: Image.Image) -> bool:
    """Return whether 0 is white in a TIFF file of 16-bit grey. Pillow inverts such files of 8 bits
    only."""
    tags = getattr(image, "tag_v2", {})
    return image.mode.startswith("I;16") and tags.get(TIFF.PHOTOMETRIC_INTERPRETATION) == 0


def _turned(image: Image.Image) -> Image.Image:
    """Rotate an image by its EXIF orientation. If the orientation is 1, absent or unreadable,
    return the image itself."""
    turned = image
    # Pillow can raise almost any exception on corrupted metadata
    with contextlib.suppress(Exception):
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            turned = image.copy()
            # rotate in place, so that pixels are rotated even if the metadata cannot be written
            ImageOps.exif_transpose(turned, in_place=True)
    return turned


class Decoded(NamedTuple):
    """The result of decoding consecutive files: the locations of the files for messages, the intact
    images, and the errors."""

    files: list[str]
    images: UInt8[np.ndarray, "n S S 3"]
    errors: list[str]
    """One message per file, which is empty for an intact file."""


class BrokenImages(ValueError):
    """Images cannot be decoded. `broken` contains one message per image."""

    def __init__(self, broken: Sequence[str]):
        self.broken = tuple(broken)
        super().__init__(
            f"{len(broken)} image file(s) cannot be used: {join_first(broken)}; replace or remove"
            " them (`cheem learn` and `cheem evaluate` exclude them with --skip-broken)"
        )


def decode_row(files: Encoded, row: int, image_size: int) -> UInt8[np.ndarray, "S S 3"]:
    """Decode one file. Raises the errors of `decode_image` and of reading the file."""
    return decode_image(
        files.picture(row), image_size, name=files.where(row), upright=files.upright
    )


def decode_pieces(
    files: Encoded, image_size: int, size: int, rows: Sequence[int] | np.ndarray | None = None
) -> Iterator[Decoded]:
    """Decode the files at `rows` (by default all files), and yield the results in pieces of at most
    `size` files. Broken files are skipped and reported in `Decoded.errors`."""
    rows = range(len(files)) if rows is None else [int(row) for row in rows]

    def decode(row: int) -> tuple[str, np.ndarray | None, str]:
        try:
            return files.where(row), decode_row(files, row, image_size), ""
        except (ValueError, OSError) as error:
            return files.where(row), None, str(error)

    none = np.zeros((0, image_size, image_size, 3), np.uint8)
    for results in in_threads(decode, rows, size):
        names, images, errors = zip(*results, strict=True)
        yield Decoded(
            list(names),
            np.concatenate([none, *(image[None] for image in images if image is not None)]),
            list(errors),
        )


def in_threads(
    work: Callable[[int], Result], rows: Sequence[int], size: int
) -> Iterator[list[Result]]:
    """Apply `work` to rows in a few threads, and yield the results in order, in lists of at most
    `size` results.

    Threads help because Pillow releases the interpreter's lock. At most two lists are in memory at
    the same time.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "cheem-decode") as pool:
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        coming = [pool.map(work, piece) for piece in pieces[:1]]
        try:
            for number in range(1, len(pieces) + 1):
                # the next piece starts before the current one ends, so that no thread is idle
                coming += [pool.map(work, following) for following in pieces[number : number + 1]]
                yield list(coming.pop(0))
        finally:
            # cancel the remaining work if the caller stops early
            pool.shutdown(cancel_futures=True)


def decode_in_order(
    files: Encoded, image_size: int, rows: Sequence[int] | np.ndarray
) -> Iterator[UInt8[np.ndarray, "n S S 3"]]:
    """Decode the files at `rows`, and yield their images in pieces, without broken images.

    After the last piece, a single BrokenImages exception reports all broken files.
    """
    broken: list[str] = []
    for piece in decode_pieces(files, image_size, PIECE, rows):
        broken += filter(None, piece.errors)
        yield piece.images
    if broken:
        raise BrokenImages(broken)


def decode_many(
    files: Encoded, image_size: int, *, on_progress: OnProgress = lambda num: None
) -> UInt8[np.ndarray, "N S S 3"]:
    """Decode all images into one array. Raises the errors of `decode_in_order`."""
    images = np.empty((len(files), image_size, image_size, 3), np.uint8)
    done = 0
    for piece in decode_in_order(files, image_size, range(len(files))):
        images[done : done + len(piece)] = piece
        done += len(piece)
        on_progress(len(piece))
    return images
