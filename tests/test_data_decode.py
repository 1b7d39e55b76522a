import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, features
from PIL import TiffImagePlugin as TIFF
from pixels import STORED, encode, four_colours, halves, png_chunk, stored

from cheem_jax.data import decode, decode_image, decode_many
from cheem_jax.data.files import FolderFiles


def corners(data: bytes) -> tuple[list[int], list[int]]:
    """Return the outer left and right pixels of the decoded 8x8 image, which resizing does not
    mix."""
    pixels = decode_image(data, 8)
    assert pixels.dtype == np.uint8 and pixels.shape == (8, 8, 3)
    return pixels[0, 0].tolist(), pixels[-1, -1].tolist()


def test_rgb_pixels_are_restored_unchanged_at_their_own_size():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    np.testing.assert_array_equal(decode_image(encode(Image.fromarray(pixels)), 8), pixels)


def test_grey_is_repeated_to_three_channels():
    assert corners(encode(halves("L", 10, 200))) == ([10, 10, 10], [200, 200, 200])


def test_palette_colours_are_looked_up():
    image = halves("P", 0, 1)
    image.putpalette([255, 128, 0, 1, 2, 250])
    assert corners(encode(image)) == ([255, 128, 0], [1, 2, 250])


@pytest.mark.parametrize("transparency", [0, b"\x00\x80"])
def test_a_transparent_palette_keeps_its_colours_without_warning(transparency):
    image = halves("P", 0, 1)
    image.putpalette([255, 128, 0, 1, 2, 250])
    assert corners(encode(image, transparency=transparency)) == ([255, 128, 0], [1, 2, 250])


def test_avif_is_read():
    if not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    at_left, right = corners(encode(halves("RGB", "white", "black"), "AVIF", quality=100))
    assert min(at_left) > 240 and max(right) < 15


def test_heic_is_read_with_its_extra_and_reported_without(monkeypatch):
    monkeypatch.setattr(decode, "READS_HEIF", False)
    with pytest.raises(
        ValueError, match=r"phone: .*HEIC images need pillow-heif: pip install 'cheem_jax\[heic\]'"
    ):
        decode_image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", 8, name="phone")
    pillow_heif = pytest.importorskip("pillow_heif", reason="needs the extra `heic`")
    monkeypatch.setattr(decode, "READS_HEIF", True)
    packed = io.BytesIO()
    pillow_heif.from_pillow(halves("RGB", "white", "black", (64, 64))).save(packed, quality=100)
    at_left, right = corners(packed.getvalue())
    assert min(at_left) > 240 and max(right) < 15


def test_one_bit_pixels_become_0_and_255():
    assert corners(encode(halves("1", 0, 1))) == ([0, 0, 0], [255, 255, 255])


def test_a_pointer_of_git_lfs_says_so():
    with pytest.raises(ValueError, match=r"cat\.jpg: a pointer of Git LFS .*`git lfs pull`"):
        decode_image(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", 8, name="cat.jpg"
        )


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(kind):
    values = np.repeat(np.array([[0, 257, 32896, 65535]], np.uint16), 4, axis=0)
    grey = decode_image(encode(Image.fromarray(values), kind), 4)[0, :, 0]
    assert grey.tolist() == [0, 1, 128, 255]  # v / 257


def test_big_endian_sixteen_bit_tiff_reads_the_same():
    values = np.full((4, 4), 32896, ">u2")
    image = Image.frombytes("I;16B", (4, 4), values.tobytes())
    assert (decode_image(encode(image, "TIFF"), 4) == 128).all()


def test_alpha_is_dropped_and_no_background_assumed():
    assert corners(encode(halves("RGBA", (200, 100, 50, 0), (1, 2, 3, 128)))) == (
        [200, 100, 50],
        [1, 2, 3],
    )
    assert corners(encode(halves("LA", (90, 0), (7, 255)))) == ([90, 90, 90], [7, 7, 7])


def test_cmyk_jpeg_has_the_right_colours():
    at_left, right = corners(
        encode(halves("CMYK", (0, 255, 255, 0), (0, 0, 0, 255), (16, 16)), "JPEG", quality=100)
    )
    np.testing.assert_allclose(at_left, (255, 0, 0), atol=3)
    np.testing.assert_allclose(right, (0, 0, 0), atol=3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "MPO", "WEBP", "TIFF", "AVIF", "HEIF"])
def test_eight_orientations_decode_to_the_upright_image_in_every_format(kind):
    if kind == "HEIF":
        pytest.importorskip("pillow_heif", reason="needs the extra `heic`").register_heif_opener()
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    options = (
        {"lossless": True}
        if kind == "WEBP"
        else {}
        if kind in ("PNG", "TIFF")
        else {"quality": 100}
    )
    image = four_colours(96, 64)
    want = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC)).astype(int)
    for orientation in STORED:
        result = decode_image(stored(image, orientation, kind, **options), 16)
        assert abs(result - want).max() < 12 * bool(options) + 1, orientation


def test_sixteen_bit_grey_is_turned_too():
    grey = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    want = decode_image(encode(grey), 8)
    for orientation in STORED:
        np.testing.assert_array_equal(decode_image(stored(grey, orientation), 8), want)


def test_images_can_be_decoded_as_stored():
    turned = four_colours(16, 16).transpose(Image.Transpose.ROTATE_90)
    result = decode_image(stored(four_colours(16, 16), 6), 16, upright=False)
    np.testing.assert_array_equal(result, np.asarray(turned))


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0",
        b"Exif\0\0MM",
        b"Exif\0\0II*\0\xff\xff\xff\x7f",
        b"Exif\0\0MM\0*\0\0\0\x08\0\xff\x01\x12",
        b"\xff" * 40,
        b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\x09\0\0\0\0\0\0",
    ],
    ids=["empty", "cut", "far away", "half an entry", "noise", "orientation 9"],
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.filterwarnings("ignore:.*EXIF:UserWarning")  # Pillow's, about exactly this
def test_an_image_with_corrupted_exif_is_decoded_as_stored(kind, exif):
    options = {"PNG": {}, "JPEG": {"quality": 100}, "WEBP": {"lossless": True}}[kind]
    image = four_colours(16, 16)
    want = decode_image(encode(image, kind, **options), 16)
    np.testing.assert_array_equal(decode_image(encode(image, kind, exif=exif, **options), 16), want)


def test_the_size_is_square_bicubic_and_does_not_keep_the_aspect():
    wide = Image.fromarray(np.random.default_rng(1).integers(0, 256, (5, 17, 3), np.uint8))
    want = np.asarray(wide.resize((12, 12), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(decode_image(encode(wide), 12), want)


def test_a_palette_is_looked_up_before_resizing():
    image = halves("P", 0, 2, (4, 4))
    image.putpalette([0, 0, 0, 255, 0, 0, 255, 255, 255])
    pixels = decode_image(encode(image), 8)
    # mixed greys at the edge, unlike nearest-neighbour indices
    assert len(np.unique(pixels)) > 2
    assert (
        pixels[..., 0] == pixels[..., 1]
    ).all()  # entry 1 is between the indices but not a mixture


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "PPM", "WEBP", "TIFF", "GIF"])
def test_a_file_cut_off_anywhere_is_refused_or_still_whole(kind):
    pixels = np.random.default_rng(2).integers(0, 256, (16, 16, 3), np.uint8)
    data = encode(Image.fromarray(pixels), kind)
    whole = decode_image(data, 16)
    refused = 0
    for length in range(0, len(data), 3):
        try:
            # A few formats end in checksums and markers that no pixel needs.
            np.testing.assert_array_equal(decode_image(data[:length], 16, name="cats/7.img"), whole)
        except ValueError as error:
            assert str(error).startswith("cats/7.img: ")
            refused += 1
    assert refused > 0.9 * len(range(0, len(data), 3))


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0junk", b"%!PS-Adobe-3.0 EPSF-3.0\n"],
)
def test_files_that_do_not_contain_an_image_are_refused_by_name(data):
    with pytest.raises(ValueError, match=r"notes\.png: "):
        decode_image(data, 8, name="notes.png")


def test_corrupted_chunks_of_a_png_are_noticed():
    data = bytearray(encode(Image.fromarray(np.zeros((32, 32, 3), np.uint8))))
    data[data.index(b"IDAT") + 6] ^= 0xFF
    with pytest.raises(ValueError, match="x.png: the image cannot be decoded"):
        decode_image(bytes(data), 8, name="x.png")


def test_a_decompression_bomb_is_refused_before_its_pixels_are_read():
    bomb = encode(Image.new("1", (10_000, 9_000)), "PNG")  # few bytes, 90 million pixels
    assert len(bomb) < 50_000
    with pytest.raises(ValueError, match="bomb.png: the image cannot be decoded"):
        decode_image(bomb, 8, name="bomb.png")


def test_pixels_beyond_the_limit_are_refused_by_number(monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 63)
    with pytest.raises(ValueError, match="8 x 8 pixels, at most 63"):
        decode_image(encode(Image.new("L", (8, 8))), 8)


def test_16_bit_grey_is_not_inverted_where_0_is_white():
    values = np.array([[0, 257 * 40], [257 * 200, 65535]], np.uint16)
    white = Image.fromarray(65535 - values)
    data = encode(white, "TIFF", tiffinfo={TIFF.PHOTOMETRIC_INTERPRETATION: 0})
    with decode.opened(data, "scan.tif") as image:
        assert image.mode == "I;16"
        np.testing.assert_array_equal(decode.to_rgb(image), decode.to_rgb(Image.fromarray(values)))
        assert decode.largest_value(image) == 65535
    almost_black = encode(
        Image.fromarray(np.full((2, 2), 65500, np.uint16)),
        "TIFF",
        tiffinfo={TIFF.PHOTOMETRIC_INTERPRETATION: 0},
    )
    with decode.opened(almost_black, "scan.tif") as image:
        decode.to_rgb(image)
        assert decode.largest_value(image) == 35


def test_ranges_that_are_unknown_are_refused():
    floats = Image.fromarray(np.full((4, 4), 0.5, np.float32))
    with pytest.raises(ValueError, match="floating-point"):
        decode_image(encode(floats, "TIFF"), 4)
    wide = Image.fromarray(np.full((4, 4), 70_000, np.int32))
    with pytest.raises(ValueError, match="outside the 16-bit range"):
        decode_image(encode(wide, "TIFF"), 4)
    with pytest.raises(ValueError, match="image_size must be at least 1"):
        decode_image(encode(Image.new("L", (4, 4))), 0)


def test_decode_many_keeps_the_order_and_reads_each_file_once(tmp_path, monkeypatch):
    names = [f"{value:03d}.png" for value in range(2 * decode.PIECE // 8)]
    monkeypatch.setattr(decode, "PIECE", 24)  # several pieces, the last one not full
    for value, name in enumerate(names):
        (tmp_path / name).write_bytes(encode(Image.new("L", (4, 4), value)))
    reads, progress = [], []

    class Counted(FolderFiles):
        def read(self, row):
            reads.append(row)
            return super().read(row)

    images = decode_many(Counted(tmp_path, names), 4, on_progress=progress.append)
    assert images[:, 0, 0, 0].tolist() == list(range(64)) and sorted(reads) == list(range(64))
    assert progress == [24, 24, 16]


def test_decode_many_reports_all_broken_files_at_once(tmp_path):
    good = encode(Image.new("L", (4, 4)))
    for name, data in {"a.png": good, "b.png": good[:40], "d.png": b""}.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(
        ValueError, match=r"3 image file.*b\.png: .*c\.png: no such file.*d\.png: "
    ) as caught:
        decode_many(FolderFiles(tmp_path, ["a.png", "b.png", "c.png", "d.png"]), 4)
    assert str(tmp_path / "b.png") in str(caught.value)
    with pytest.raises(ValueError, match="9 image file.*and 4 more"):
        decode_many(FolderFiles(tmp_path, ["d.png"] * 9), 4)


def test_a_jpeg_of_very_many_scans_is_refused_since_each_passes_over_the_whole_image():
    data = encode(Image.new("RGB", (16, 16), (9, 99, 199)), "JPEG", progressive=True)
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    assert decode_image(data[:end] + 50 * data[start:end] + data[end:], 8).shape == (8, 8, 3)
    with pytest.raises(ValueError, match=r"slow\.jpg: .* scans, at most 100 are accepted"):
        decode_image(data[:end] + 200 * data[start:end] + data[end:], 8, name="slow.jpg")


@pytest.mark.parametrize("colour", [(255, 218, 0), (0, 218, 255)])
@pytest.mark.parametrize("kind", ["PNG", "PPM", "BMP", "TIFF"])
def test_pixels_that_look_like_scans_are_pixels(kind, colour):
    Image.new("RGB", (64, 64), colour).save(file := io.BytesIO(), kind)
    pixels = decode_image(file.getvalue(), 8)
    np.testing.assert_array_equal(pixels, np.broadcast_to(np.uint8(colour), (8, 8, 3)))


def test_a_tiff_with_enormous_tiles_is_refused_before_one_is_made():
    tags = [
        (256, 100),
        (257, 100),
        (258, 8),
        (259, 5),
        (262, 1),
        (277, 1),
        (322, 30_000),
        (323, 30_000),
        (324, 8),
        (325, 9),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    data = (
        b"II*\0"
        + struct.pack("<I", 24)
        + bytes(16)
        + struct.pack("<H", len(tags))
        + entries
        + bytes(4)
    )
    with pytest.raises(ValueError, match=r"x\.tif: .*tiles of 30000 x 30000 pixels, at most"):
        decode_image(data, 8, name="x.tif")


def test_texts_and_profiles_that_unpack_to_much_more_are_refused():
    data = encode(Image.new("L", (4, 4)))
    for kind in (b"zTXt", b"iCCP"):
        chunk = png_chunk(kind, b"x\0\0" + zlib.compress(bytes(2**27)))
        with pytest.raises(ValueError, match=r"x\.png: the image cannot be decoded"):
            decode_image(data[:33] + chunk + data[33:], 8, name="x.png")


def test_every_sixteen_bit_grey_is_rounded_to_the_nearest():
    values = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    want = np.round(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(decode_image(encode(Image.fromarray(values)), 256)[..., 0], want)
