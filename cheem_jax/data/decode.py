"""Image files to pixels: one decoder for every source, so that all of them give the same image."""

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

from cheem_jax.data.files import GET_HEIF, HEIF_MAGIC, READS_HEIF, Encoded, first_of

# Named, because Pillow would otherwise also start other programs (Ghostscript for EPS).
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
MAX_PIXELS = 89_478_485  # where Pillow begins to warn of a decompression bomb
MAX_SCANS = 100  # of a progressive JPEG, which has about ten; each passes over the whole image

DECODER_VERSION = 1
"""Raised whenever the same file gives other pixels: decoded copies of an older version are then not
used."""
PIECE = 256
"""Images decoded between two reports of progress (38 MB at 224 pixels)."""

Progress = Callable[[int], object]
"""Called with the number of images (or bytes) that are done in addition."""
Found = TypeVar("Found")


def decode_image(
    data: bytes | Image.Image, image_size: int, *, name: str = "image", upright: bool = True
) -> UInt8[np.ndarray, "S S 3"]:
    """Decodes a file's bytes, or an image that is open, to RGB and resizes to a square with
    Pillow's bicubic filter; the aspect ratio is not kept.

    Palettes are looked up, grey is repeated, 16-bit grey is scaled by 255/65535, alpha is dropped
    (no background is assumed), and the first frame of an animation counts. With `upright` the image
    is turned as its EXIF orientation says; without, as in the paper's loaders, it is not. (Pillow
    turns TIFF, HEIC and AVIF by itself.) Raises ValueError naming the file if it is broken,
    truncated, huge or not an image.
    """
    if image_size < 1:
        raise ValueError(f"image_size must be at least 1, got {image_size}")
    with opened(data, name) as image:
        rgb = to_rgb(image, upright=upright)
        return np.asarray(rgb.resize((image_size, image_size), Image.Resampling.BICUBIC))


@contextlib.contextmanager
def opened(data: bytes | Image.Image, name: str) -> Iterator[Image.Image]:
    """An open image file; a decompression bomb, or an error while it is in use, becomes a
    ValueError that names it."""
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(data, Image.Image):
                image = data  # whose owner closes it
            else:
                formats = _heif() if HEIF_MAGIC.match(data) else FORMATS
                image = stack.enter_context(Image.open(io.BytesIO(data), formats=formats))
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
                f"{name}: a pointer of Git LFS instead of the image; `git lfs pull` gets it"
            ) from None
        raise ValueError(
            f"{name}: not an image file of a known format ({', '.join(FORMATS)})"
        ) from None
    except Exception as error:  # Pillow's parsers raise almost anything on a broken file
        raise ValueError(f"{name}: the image cannot be decoded: {error}") from error


def _heif() -> tuple[str, ...]:
    """The name of HEIC's format, once Pillow can read it."""
    if not READS_HEIF:
        raise ValueError(f"HEIC images need pillow-heif: {GET_HEIF}")
    import pillow_heif

    pillow_heif.register_heif_opener()
    return ("HEIF",)


def _refuse_bombs(image: Image.Image, data: bytes) -> None:
    """ValueError for what takes much more work or memory than the image's size suggests."""
    if (scans := data.count(b"\xff\xda\0")) > MAX_SCANS:
        raise ValueError(f"{scans} scans, at most {MAX_SCANS} are accepted")
    tags = getattr(image, "tag_v2", {})
    tile = [tags.get(tag, 0) for tag in (TIFF.TILEWIDTH, TIFF.TILELENGTH)]
    if tile[0] * tile[1] > MAX_PIXELS:
        raise ValueError(
            f"tiles of {tile[0]} x {tile[1]} pixels, at most {MAX_PIXELS} are accepted"
        )


def to_rgb(image: Image.Image, *, upright: bool = False) -> Image.Image:
    """All pixels, decoded to RGB, and turned as the EXIF orientation says with `upright`; the
    result outlives the file.

    The given image does not change.
    """
    image.load()
    if upright:
        image = _turned(image)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; store 8 or 16 bits")
    if _has_16_bits(image):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"grey values {values.min()}..{values.max()} outside the 16-bit range")
        # Pillow's own conversion clips at 255 instead of scaling; 257 is odd, so no half is to be
        # rounded.
        image = Image.fromarray(((values.astype(np.int32) + 128) // 257).astype(np.uint8))
    elif "transparency" in image.info:
        image = image.convert("RGBA")  # a palette with transparency goes to RGB only with a warning
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy


def brightest_of(image: Image.Image) -> int | None:
    """The largest value of a 16-bit image that is loaded; None for an image of another kind."""
    return int(np.asarray(image).max()) if _has_16_bits(image) else None


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode == "I" or image.mode.startswith("I;16")


def _turned(image: Image.Image) -> Image.Image:
    """The image as its EXIF orientation says, itself if that is 1, absent or unreadable."""
    turned = image
    with contextlib.suppress(
        Exception
    ):  # corrupted metadata, on which Pillow raises almost anything
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            turned = image.copy()
            # in place, so that the pixels are turned even if the metadata cannot be written again
            ImageOps.exif_transpose(turned, in_place=True)
    return turned


class Piece(NamedTuple):
    """Some files in order: their places for people, the images of those that are intact, and why
    others are not."""

    files: list[str]
    images: UInt8[np.ndarray, "n S S 3"]
    errors: list[str]
    """One for each file, empty for an intact one."""


class BrokenImages(ValueError):
    """Images that cannot be used; `broken` has a line for each."""

    def __init__(self, broken: Sequence[str]):
        self.broken = tuple(broken)
        super().__init__(
            f"{len(broken)} image file(s) cannot be used: {first_of(broken)}; replace or remove"
            " them (`cheem learn` and `cheem evaluate` leave them out with --skip-broken)"
        )


def decode_row(files: Encoded, row: int, image_size: int) -> UInt8[np.ndarray, "S S 3"]:
    """One file's image; raises as `decode_image`, and as reading the file."""
    return decode_image(
        files.picture(row), image_size, name=files.where(row), upright=files.upright
    )


def decode_pieces(
    files: Encoded, image_size: int, size: int, rows: Sequence[int] | np.ndarray | None = None
) -> Iterator[Piece]:
    """These rows, or all files, in pieces of at most `size`; a broken one is reported and stops
    nothing."""
    rows = range(len(files)) if rows is None else [int(row) for row in rows]

    def decode(row: int) -> tuple[str, np.ndarray | None, str]:
        try:
            return files.where(row), decode_row(files, row, image_size), ""
        except (ValueError, OSError) as error:
            return files.where(row), None, str(error)

    none = np.zeros((0, image_size, image_size, 3), np.uint8)
    for found in in_threads(decode, rows, size):
        names, images, errors = zip(*found, strict=True)
        yield Piece(
            list(names),
            np.concatenate([none, *(image[None] for image in images if image is not None)]),
            list(errors),
        )


def in_threads(
    work: Callable[[int], Found], rows: Sequence[int], size: int
) -> Iterator[list[Found]]:
    """What `work` finds in these rows, in order, in lists of at most `size`.

    A few threads work (Pillow releases the interpreter's lock), and two lists are in memory at a
    time.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "cheem-decode") as pool:
        pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        coming = [pool.map(work, piece) for piece in pieces[:1]]
        try:
            for number in range(1, len(pieces) + 1):
                # the next piece starts before this one is complete, so that no thread idles
                coming += [pool.map(work, following) for following in pieces[number : number + 1]]
                yield list(coming.pop(0))
        finally:
            pool.shutdown(cancel_futures=True)  # of a caller that stopped early


def decode_in_order(
    files: Encoded, image_size: int, rows: Sequence[int] | np.ndarray
) -> Iterator[UInt8[np.ndarray, "n S S 3"]]:
    """The images of these rows in pieces, without those that are broken.

    All broken files are reported in one BrokenImages, once everything has been decoded.
    """
    broken: list[str] = []
    for piece in decode_pieces(files, image_size, PIECE, rows):
        broken += filter(None, piece.errors)
        yield piece.images
    if broken:
        raise BrokenImages(broken)


def decode_many(
    files: Encoded, image_size: int, *, on_progress: Progress = lambda num: None
) -> UInt8[np.ndarray, "N S S 3"]:
    """All images in one array; raises as `decode_in_order`."""
    images = np.empty((len(files), image_size, image_size, 3), np.uint8)
    done = 0
    for piece in decode_in_order(files, image_size, range(len(files))):
        images[done : done + len(piece)] = piece
        done += len(piece)
        on_progress(len(piece))
    return images
