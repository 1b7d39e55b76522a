"""Hostile files for every loader: valid files of each kind, corrupted as by a bad disk or an
attacker.

    python tests/faults/hostile.py LOADER NUM [SEED]     without the type checks of the tests

Input number i of a loader and a seed is always the same, so every error can be reproduced.
"""

import argparse
import contextlib
import copy
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # run as a script in a separate process
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
import official  # noqa: E402
from page_runs import entries  # noqa: E402
from PIL import Image  # noqa: E402
from pixels import encode, png, png_chunk  # noqa: E402
from scenarios import memory  # noqa: E402
from timm_files import TINY, timm_tensors  # noqa: E402

SECONDS = 20.0
"""Seconds after which an input counts as hanging; on an idle core the slowest needs about a
second."""
Attempt = tuple[str, Callable[[], object]]
"""Text that an error has to contain, and the call."""
Attempts = Callable[[random.Random], Attempt]


class Tried(NamedTuple):
    """Results of some inputs."""

    num: int
    accepted: int
    refused: int
    seconds: float
    megabytes: int
    """Largest growth of the resident size."""
    bad: list[str]


class Hang(BaseException):
    """Not an Exception, so that no loader catches it."""


def fuzz(name: str, numbers: Sequence[int], folder: Path, seed: int = 0) -> Tried:
    """Check that every call returns, or raises a ValueError or OSError that names its file, in time
    and with little memory."""
    make, most = LOADERS[name]
    attempts = make(folder)
    bad: list[str] = []
    accepted = 0
    start = time.perf_counter()
    before = _reset_peak()
    for number in numbers:
        named, call = attempts(random.Random(f"{name} {seed} {number}"))
        began = time.perf_counter()
        try:
            with _time_limit():
                call()
            accepted += 1
        except (ValueError, OSError) as error:
            text = str(error)
            if named not in text:
                bad.append(
                    f"{name} {number}: {named!r} is not named by {type(error).__name__}:"
                    f" {text[:200]!r}"
                )
        except Hang:
            bad.append(f"{name} {number}: no answer within {SECONDS} seconds")
        except Exception as error:
            bad.append(
                f"{name} {number}: {type(error).__module__}.{type(error).__name__}:"
                f" {str(error)[:300]!r}"
            )
        if (seconds := time.perf_counter() - began) > SECONDS:
            bad.append(f"{name} {number}: {seconds:.1f} seconds")
    megabytes = (_peak() - before) // 2**20
    if megabytes > most:
        bad.append(f"{name}: {megabytes} MB more than before, expected at most {most}")
    num = len(numbers)
    return Tried(
        num, accepted, num - accepted, round(time.perf_counter() - start, 1), megabytes, bad
    )


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _reset_peak() -> int:
    """Reset the peak that Linux reports, and return the present resident size."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    with contextlib.suppress(OSError):
        if result := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return 1024 * int(result[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# Corruption

NUMBERS = [
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
]


def damaged(data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """Flip, remove, repeat, cut off or splice bytes, or replace them by extreme numbers."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(result) + 1)
        if rng.random() < 0.4:
            at = min(at, rng.randrange(256))  # where headers are
        end = min(len(result), at + rng.choice((1, 2, 4, 8, 30, 300)))
        match rng.randrange(9):
            case 0 if result:
                result[min(at, len(result) - 1)] ^= 1 << rng.randrange(8)
            case 1 if result:
                result[min(at, len(result) - 1)] = rng.randrange(256)
            case 2:
                result[at:at] = rng.randbytes(rng.choice((1, 2, 4, 100)))
            case 3:
                del result[at:end]
            case 4:
                result[at:at] = result[at:end] * rng.choice((1, 2, 50))
            case 5:
                del result[at:]
            case 6 if other:
                result[at:] = other[rng.randrange(len(other)) :]
            case 7:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) % 2 ** (8 * size)
                result[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 8:
                digits = [match.span() for match in re.finditer(rb"\d+", bytes(result[:5000]))]
                if digits:
                    first, last = rng.choice(digits)
                    result[first:last] = rng.choice(
                        (b"-1", b"0", b"1e9", b"99999999999", b"9" * 40, b"9" * 5000)
                    )
    return bytes(result)


DEEP = 10_000
RAW = [
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "2",
    "1.5",
    "-0.0",
    "1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "1" + "0" * 100,
    "9" * 4000,
    "9" * 5000,
    '""',
    '"x"',
    '"1"',
    '"\\u0000"',
    '"\\ud800"',
    '"../../x"',
    '"/etc/passwd"',
    f'"{"y" * 70_000}"',
    '"\u202e"',
    "[]",
    "{}",
    "[null]",
    "[[]]",
    '[""]',
    '["x", "x"]',
    "[1, 2, 3]",
    "[0, 0, 0]",
    '{"x": 1}',
    "[" * DEEP + "]" * DEEP,
    '{"x":' * DEEP + "1" + "}" * DEEP,
    "[" * 900 + "]" * 900,
    "[" * DEEP,
    "[" + "0," * 20_000 + "0]",
]
"""JSON values of every type and extreme; the position of a value matters more than the value."""


def damaged_json(value: Any, rng: random.Random) -> bytes:
    """Return a JSON text with removed, renamed or doubled keys, values of other types, or an
    unusual encoding."""
    value = copy.deepcopy(value)
    raw: list[str] = []

    def something() -> str:
        raw.append(rng.choice(RAW))
        return f"@raw{len(raw) - 1}@"

    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places or rng.random() < 0.03:
            value = something()
            continue
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice((f"{key}x", "", "x", "\ud800", "__class__", "0"))] = holder.pop(
                    key
                )
            case 2 if isinstance(holder, dict):
                holder[f"@twin@{key}"] = something()  # the same key again
            case 3 if isinstance(holder, list):
                holder.insert(0, holder[key])
            case _:
                holder[key] = something()
    text = json.dumps(value).replace("@twin@", "")
    for number, one in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', one)
    return encoded(text, rng)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from _places(value[key])


def encoded(text: str, rng: random.Random) -> bytes:
    """Encode a text, mostly in UTF-8."""
    kind = rng.choice(("utf-8",) * 12 + ("utf-8-sig", "utf-16", "utf-32", "latin-1"))
    data = text.encode(kind, "surrogatepass" if kind.startswith("utf") else "replace")
    return damaged(data, rng) if rng.random() < 0.15 else data


TOML_RAW = [
    "true",
    "0",
    "-1",
    "1.5",
    "inf",
    "nan",
    "9" * 4000,
    "9" * 5000,
    "0x" + "f" * 6000,
    "1979-05-27",
    "07:32:00",
    '""',
    '"x"',
    '" "',
    '"\\u0000"',
    '"a\\u0000b"',
    '"~nobody-at-all/x"',
    '"~"',
    '"/"',
    '"."',
    '".."',
    '"loop.zip"',
    '"loop"',
    '"../../../../etc/passwd"',
    f'"{"y" * 70_000}"',
    "[]",
    "{}",
    "[[]]",
    "{x = 1}",
    "[0xff, 2]",
    "[" * DEEP + "]" * DEEP,
    "[" * 300 + "]" * 300,
    "{x=" * 300 + "1" + "}" * 300,
    '"""',
    "'''",
    '"mnist"',
    '"mnist:3.0.1"',
    '"food101"',
    '"nosuch"',
    '"fifo"',
    '"birds.zip"',
    '"birds"',
    '"cars.csv"',
    '"cars.parquet"',
    "[" + "0x" + "f" * 6000 + "]",
]


def damaged_lines(
    text: str, values: Sequence[str], rng: random.Random, separator: str = "="
) -> bytes:
    """Remove, double or swap lines, or replace keys or values."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines)) if lines else 0
        key, sign, value = lines[at].partition(separator) if lines else ("", "", "")
        match rng.randrange(7):
            case 0 if lines:
                del lines[at]
            case 1 if lines:
                lines.insert(rng.randrange(len(lines)), lines[at])
            case 2 if sign:
                lines[at] = (
                    f"{rng.choice(('name', 'seed', 'task', 'root', 'path', 'tfds', 'x', '.'))}{sign}{value}"  # noqa: E501
                )
            case 3:
                lines.insert(
                    at,
                    rng.choice(
                        ("[task]", "[[task]]", "[[task.x]]", "x" + ".x" * 2000 + " = 1", "\0", "[")
                    ),
                )
            case _ if sign:
                lines[at] = f"{key}{sign}{rng.choice(values)}"
    return encoded("\n".join(lines) + "\n", rng)


# Valid files


def picture(rng: random.Random, mode: str = "RGB", size: tuple[int, int] = (16, 12)) -> Image.Image:
    """Return an image of noise."""
    depth = {"RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2, "I;16": 2}.get(mode, 1)
    if mode == "1":
        return picture(rng, "L", size).convert("1")
    image = Image.frombytes(mode, size, rng.randbytes(size[0] * size[1] * depth))
    if mode == "P":
        image.putpalette(rng.randbytes(768))
    return image


def pictures() -> dict[str, bytes]:
    """Return a file of every accepted format in its usual variants."""
    rng = random.Random(0)
    new = functools.partial(picture, rng)
    frames = [new("P"), new("P")]
    files = {
        "base.jpg": encode(new(), "JPEG"),
        "progressive.jpg": encode(new(), "JPEG", progressive=True),
        "grey.jpg": encode(new("L"), "JPEG"),
        "cmyk.jpg": encode(new("CMYK"), "JPEG"),
        "exif.jpg": encode(
            new(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
        ),
        "rgb.png": encode(new(), "PNG", icc_profile=rng.randbytes(300)),
        "rgba.png": encode(new("RGBA"), "PNG"),
        "palette.png": encode(new("P"), "PNG", transparency=b"\0\x80"),
        "grey16.png": encode(new("I;16"), "PNG"),
        "la.png": encode(new("LA"), "PNG"),
        "bit.png": encode(new("1"), "PNG"),
        "rgb.bmp": encode(new(), "BMP"),
        "palette.bmp": encode(new("P"), "BMP"),
        "frames.gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "one.gif": encode(new("P"), "GIF", transparency=3),
        "rgb.ppm": encode(new(), "PPM"),
        "grey16.pgm": encode(new("I;16"), "PPM"),
        "plain.ppm": b"P3\n2 2\n255\n1 2 3 4 5 6 7 8 9 10 11 12\n",
        "lossy.webp": encode(new(), "WEBP"),
        "lossless.webp": encode(new("RGBA"), "WEBP", lossless=True),
        "frames.webp": encode(new(), "WEBP", save_all=True, append_images=[new()]),
        "raw.tiff": encode(new(), "TIFF"),
        "lzw.tiff": encode(new(), "TIFF", compression="tiff_lzw"),
        "deflate.tiff": encode(new("L"), "TIFF", compression="tiff_adobe_deflate"),
        "jpeg.tiff": encode(new(), "TIFF", compression="jpeg"),
        "grey16.tiff": encode(new("I;16"), "TIFF"),
        "fax.tiff": encode(new("1"), "TIFF", compression="group4"),
    }
    return files


def task_files(num: int = 3) -> dict[str, bytes]:
    """Return the files of a task of two classes, as in a folder or zip."""
    places = itertools.product(("train", "val", "test"), ("cat", "dog"), range(num))
    files = {f"{s}/{c}/{i}.png": png(n % 256) for n, (s, c, i) in enumerate(places)}
    return {"meta.json": json.dumps({"classes": ["cat", "dog"]}).encode(), **files}


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def read_all(plan: Any) -> None:
    """Decode every image of a plan."""
    from cheem_jax.data.decode import decode_image

    for part in plan.splits.values():
        for row in range(len(part.files)):
            check_pixels(decode_image(part.files.read(row), 8, name=part.files.where(row)))


# Loaders


def images(folder: Path) -> Attempts:
    from cheem_jax.data.decode import decode_image

    files = pictures()

    def attempt(rng: random.Random) -> Attempt:
        name = rng.choice(sorted(files))
        data, other = files[name], files[rng.choice(sorted(files))]
        # checksums would keep most corruption from the decoder behind them
        data = (
            damaged_png(data, rng)
            if name.endswith("png") and rng.random() < 0.6
            else damaged(data, rng, other)
        )
        return name, lambda: check_pixels(decode_image(data, 8, name=name))

    return attempt


def check_pixels(pixels: np.ndarray) -> None:
    assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8


def damaged_png(data: bytes, rng: random.Random) -> bytes:
    """Corrupt chunks, and correct their checksums."""
    chunks = []
    at = 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        chunks.append([data[at + 4 : at + 8], data[at + 8 : at + 8 + length]])
        at += 12 + length
    for _ in range(rng.choice((1, 1, 2))):
        chosen = rng.randrange(len(chunks))
        match rng.randrange(6):
            case 0:
                del chunks[chosen]
            case 1:
                chunks.insert(rng.randrange(len(chunks)), list(chunks[chosen]))
            case 2:
                bomb = zlib.compress(bytes(2**20 * rng.choice((1, 30))))
                kind = rng.choice(
                    (
                        b"zTXt",
                        b"iTXt",
                        b"iCCP",
                        b"IDAT",
                        b"fdAT",
                        b"acTL",
                        b"eXIf",
                        b"tRNS",
                        b"PLTE",
                    )
                )
                head = (
                    b"x\0\1\0\0\0"
                    if kind == b"iTXt"
                    else b"x\0\0"
                    if kind in (b"zTXt", b"iCCP")
                    else b""
                )
                chunks.insert(rng.randrange(len(chunks)), [kind, head + bomb])
            case _:
                chunks[chosen][1] = damaged(chunks[chosen][1], rng)
        if not chunks:
            break
    return data[:8] + b"".join(png_chunk(*chunk) for chunk in chunks)


def zips(folder: Path) -> Attempts:
    """Read a task in a zip to the end, and its meta.json."""
    from cheem_jax.data.folder import plan_stream, plan_task

    files = task_files()
    file = folder / "pets.zip"
    whole = [zipped(files), zipped(files, zipfile.ZIP_STORED), zipped(files, zipfile.ZIP_LZMA)]
    place = official.write(folder / "plain", files)

    def read(path: Path, plan: Callable[[Path], Any]) -> None:
        plans = plan(path)
        read_all(plans[0] if isinstance(plans, list) else plans)

    def attempt(rng: random.Random) -> Attempt:
        plan = rng.choice((plan_task, plan_stream))
        if rng.random() < 0.3:
            (place / "meta.json").write_bytes(damaged_json({"classes": ["cat", "dog"]}, rng))
            return "plain", lambda: read(place, plan)
        if rng.random() < 0.3:
            renamed = {damaged_name(name, rng): data for name, data in files.items()}
            with warnings.catch_warnings(action="ignore"):
                data = zipped(renamed)
        else:
            data = damaged_zip(rng.choice(whole), rng)
        file.write_bytes(data)
        return "pets.zip", lambda: read(file, plan)

    return attempt


def damaged_name(name: str, rng: random.Random) -> str:
    if rng.random() < 0.9:
        return name
    parts = name.split("/")
    new = (
        "..",
        ".",
        "",
        "CON",
        "a\\b",
        "C:",
        "x" * 60_000,
        "\u202e",
        "a\0b",
        "train",
        "9" * 5000,
        "²",
        "__MACOSX",
    )
    parts[rng.randrange(len(parts))] = rng.choice(new)
    return "/".join(parts) or "x"


def damaged_zip(data: bytes, rng: random.Random) -> bytes:
    """Corrupt headers as often as other bytes."""
    if rng.random() < 0.5:
        return damaged(data, rng)
    result = bytearray(data)
    for _ in range(rng.choice((1, 2, 3))):
        sign, fields = rng.choice(((b"PK\1\2", 46), (b"PK\3\4", 30), (b"PK\5\6", 22)))
        starts = [match.start() for match in re.finditer(re.escape(sign), data)]
        at = rng.choice(starts) + rng.randrange(4, fields)
        size = rng.choice((1, 2, 4))
        result[at : at + size] = (rng.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(result)


def archives(folder: Path) -> Attempts:
    """Read zips and tar.gz files to the end."""
    from cheem_jax.data.benchmarks.archives import members

    files = {f"top/{name}": data for name, data in task_files(1).items()}
    plain = tar_of(files)
    places = {name: folder / name for name in ("a.zip", "a.tar.gz", "b.tar.gz")}

    def attempt(rng: random.Random) -> Attempt:
        name = rng.choice(sorted(places))
        match name:
            case "a.zip":
                data = damaged_zip(zipped(files), rng)
            case "a.tar.gz":
                data = damaged(gzip.compress(plain, 1), rng)
            case _:
                data = gzip.compress(
                    damaged_tar(plain, rng) if rng.random() < 0.7 else damaged(plain, rng), 1
                )
        places[name].write_bytes(data)
        return name, lambda: [read() for _, read in members(places[name])]

    return attempt


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number, (name, data) in enumerate(files.items()):
            header = tarfile.TarInfo(name if number % 3 else f"{name[:-4]}{'n' * 150}{name[-4:]}")
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return buffer.getvalue()


def damaged_tar(data: bytes, rng: random.Random) -> bytes:
    """Corrupt headers, and correct their checksums."""
    result = bytearray(data)
    starts = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    for at in rng.sample(starts, min(len(starts), rng.choice((1, 2)))):
        match rng.randrange(4):
            case 0:
                result[at + 156] = rng.choice(b"0123456789xgLKSVDNM\0\xff")
            case 1:
                size = rng.choice(
                    (
                        b"77777777777\0",
                        b"\x80" + b"\0" * 3 + b"\xff" * 8,
                        b"\xff" * 12,
                        b"-1\0",
                        b"x",
                        b"0",
                    )
                )
                result[at + 124 : at + 124 + len(size)] = size
            case 2:
                name = rng.choice(
                    (b"../x\0", b"/x\0", b"C:x\0", b"a\\b\0", b"\xff\xfe\0", b"\0", b"./././x\0")
                )
                result[at : at + len(name)] = name
            case _:
                field = at + rng.randrange(500)
                result[field] = rng.randrange(256)
        result[at + 148 : at + 156] = b" " * 8
        result[at + 148 : at + 156] = b"%06o\0 " % sum(result[at : at + 512])
    if rng.random() < 0.3:  # in the texts of extended headers too
        result = bytearray(
            bytes(result).replace(
                b" path=", rng.choice((b" size=", b" GNU.sparse.map=", b" hdrcharset="))
            )
        )
    return bytes(result)


STREAM = """name = "odd"
seed = 3

[[task]]
path = "birds"

[[task]]
path = "birds.zip"
name = "zipped"

[[task]]
manifest = "cars.csv"
root = "birds"
"""
CARS = ["path,label,split"] + [
    f"{split}/{name}/{i}.png,{label},{split}"
    for split in ("train", "val", "test")
    for label, name in enumerate(("cat", "dog"))
    for i in range(3)
]


def stream_files(folder: Path) -> Attempts:
    from cheem_jax.data.sources import plan_source

    official.write(folder / "birds", task_files())
    (folder / "birds.zip").write_bytes(zipped(task_files()))
    (folder / "cars.csv").write_text("\n".join(CARS))
    (folder / "loop.zip").symlink_to("loop.zip")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    file = folder / "stream.toml"

    def attempt(rng: random.Random) -> Attempt:
        whole = rng.random() < 0.7
        data = damaged_lines(STREAM, TOML_RAW, rng) if whole else damaged(STREAM.encode(), rng)
        file.write_bytes(data)
        # an error in a task names the file or data set of this task
        return "", lambda: plan_source(str(file), data_dir=folder / "data")

    return attempt


CELLS = [
    "",
    "-1",
    "0",
    "7",
    "99",
    "999999999999999999",
    "9" * 200_000,
    "1.5",
    "nan",
    "../x.png",
    "/etc/passwd",
    "x\0",
    "train/cat/0.png",
    '"',
    '"a"b',
    "\u202e",
    "'",
    "²",
    "=1+1",
    "valid",
    "tset",
    "a;b",
    "C:x.png",
    "a\\..\\b",
]


def manifests(folder: Path) -> Attempts:
    import pyarrow
    from pyarrow import parquet

    from cheem_jax.data.folder import plan_manifest

    official.write(folder, task_files())
    header, *rows = (line.split(",") for line in CARS)
    table = {name: [row[at] for row in rows] for at, name in enumerate(header)}
    table["label"] = [int(label) for label in table["label"]]  # type: ignore[assignment]
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(table), buffer)
    files = {suffix: folder / f"cars{suffix}" for suffix in (".csv", ".parquet")}

    def attempt(rng: random.Random) -> Attempt:
        suffix = rng.choice((".csv", ".csv", ".parquet"))
        if suffix == ".parquet":
            data = damaged(buffer.getvalue(), rng)
            if rng.random() < 0.4:  # the metadata at the end is parsed
                whole = buffer.getvalue()
                size = struct.unpack("<I", whole[-8:-4])[0]
                footer = damaged(whole[-8 - size : -8], rng)
                data = whole[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1"
        elif rng.random() < 0.3:
            data = damaged("\n".join(CARS).encode(), rng)
        else:
            cells = [line.split(",") for line in CARS]
            for _ in range(rng.choice((1, 1, 2))):
                row = rng.choice(cells)
                row[rng.randrange(len(row))] = rng.choice(CELLS)
            data = encoded(
                rng.choice("\n\r").join(rng.choice(",,,;\t").join(row) for row in cells), rng
            )
        files[suffix].write_bytes(data)
        return f"cars{suffix}", lambda: plan_manifest(files[suffix])

    return attempt


def caches(folder: Path) -> Attempts:
    from cheem_jax.data.folder import plan_task
    from cheem_jax.data.load import cached
    from cheem_jax.data.task import Task
    from cheem_jax.data.verify import verify_caches

    @contextlib.contextmanager
    def phase(name: str, num: int) -> Iterator[Callable[[int], None]]:
        yield lambda num: None

    official.write(folder / "pets", task_files())
    plan = plan_task(folder / "pets")
    cached(plan, 8, folder / "kept", phase)
    place = next(file for file in (folder / "kept").iterdir() if file.is_dir())
    files = {file.name: file.read_bytes() for file in place.iterdir()}

    def read() -> None:
        for fault in verify_caches(plan, [folder / "kept"])[1]:
            raise ValueError(fault)
        splits = cached(plan, 8, folder / "kept", phase)
        Task("pets", ("cat", "dog"), splits["train"], splits["val"], splits["test"])

    def attempt(rng: random.Random) -> Attempt:
        official.write(place, files)
        name = rng.choice(sorted(files))
        if name == "cache.json":
            data = damaged_json(json.loads(files[name]), rng)
        else:
            data = (
                damaged_npy(files[name], rng) if rng.random() < 0.7 else damaged(files[name], rng)
            )
        if (
            rng.random() < 0.9
        ):  # else whole: nearly all of a cache counts, so that hardly any corruption is accepted
            (place / name).write_bytes(data)
        return place.name, read

    return attempt


HEADERS = [
    "{'descr': '|O', 'fortran_order': False, 'shape': (18,), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (99999999999999999999,), }",
    "{'descr': '<f8', 'fortran_order': True, 'shape': (6,), }",
    "{'descr': '<i8', 'fortran_order': False, 'shape': (), }",
    "{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '|S1', 'fortran_order': False, 'shape': (6,), }",
    "{'descr': '<U2', 'fortran_order': False, 'shape': (6,), }",
    "{'descr': [('a', '<i4'), ('b', '|O')], 'fortran_order': False, 'shape': (6,), }",
    "{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (6,), }",
    "{'descr': 'nonsense', 'fortran_order': False, 'shape': (6,), }",
    "{'descr': '<i4', 'shape': (6,), }",
    "[" * 3000,
    "__import__('os').abort()",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (6,), 'x': " + "(" * 3000 + ")" * 3000 + "}",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (9e9,), }",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (True, 6), }",
    "\0",
]


def damaged_npy(data: bytes, rng: random.Random) -> bytes:
    """Replace the header in front of the same numbers."""
    body = data[10 + struct.unpack_from("<H", data, 8)[0] :]
    if rng.random() < 0.4:
        old = data[10 : len(data) - len(body)].decode("latin-1")
        header = re.sub(
            r"\d+", lambda m: rng.choice((m[0], m[0], "0", "-1", "7", str(10**13))), old
        ).rstrip()
    else:
        header = rng.choice(HEADERS)
    packed = header.encode("latin-1") + b"\n"
    return data[:8] + struct.pack("<H", len(packed)) + packed + body


ODD_TENSORS: dict[str, list[tuple[int, ...]]] = {
    "cls_token": [(), (0,), (1, 1, 0)],
    "pos_embed": [(), (1, 0, 64), (1, 2, 64), (1, 10), (0, 10, 64), (1, 10, 0)],
    "patch_embed.proj.weight": [(), (0, 3, 4, 4), (64, 3, 0, 0), (64, 0, 4, 4), (16, 3, 1, 1)],
    "blocks.0.mlp.fc1.weight": [(), (0,), (0, 64), (64, 0), (64,)],
    "blocks.0.mlp.fc2.weight": [(), (0,), (64, 0), (0, 64)],
    "head.weight": [(), (0,), (0, 64), (5,)],
    "blocks.99999999999.norm1.weight": [(64,)],
    "blocks.7.norm1.weight": [(64,)],
    "blocks.٣.norm1.weight": [(64,)],
    "blocks." + "9" * 5000 + ".norm1.weight": [(64,)],
    "x" * 60_000: [(1,)],
}


def odd_tensors(rng: random.Random) -> dict[str, np.ndarray]:
    """Remove tensors, change their shapes, ranks and types, and add tensors that no network has."""
    tensors = timm_tensors(depth=1, classes=5, ratio=1)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(ODD_TENSORS))
        match rng.randrange(4):
            case 0:
                tensors.pop(name, None)
            case 1:
                one = rng.choice(sorted(tensors))
                kinds = (np.int8, np.bool_, np.float16, np.float64, np.uint64)
                tensors[one] = tensors[one].astype(rng.choice(kinds))
            case _:
                tensors[name] = np.zeros(rng.choice(ODD_TENSORS[name]), np.float32)
    return tensors


def weights(folder: Path) -> Attempts:
    """Files of tensors under timm's names, in both formats."""
    import safetensors.numpy

    from cheem_jax.backbone.weights import load_pretrained

    tensors = timm_tensors(depth=1, classes=5, ratio=1)
    valid = safetensors.numpy.save(tensors)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **tensors)  # type: ignore[arg-type]

    def attempt(rng: random.Random) -> Attempt:
        name = TINY
        file = folder / rng.choice(("w.safetensors", "w.npz"))
        if rng.random() < 0.3:
            odd = odd_tensors(rng)
            name = rng.choice((TINY, "vit_huge_patch4_12.dino"))
            out = io.BytesIO()
            np.savez(out, allow_pickle=False, **odd)  # type: ignore[arg-type]
            data = out.getvalue() if file.suffix == ".npz" else safetensors.numpy.save(odd)
        elif file.suffix == ".npz":
            data = (
                damaged_npz(buffer.getvalue(), rng)
                if rng.random() < 0.6
                else damaged_zip(buffer.getvalue(), rng)
            )
        else:
            data = damaged_safetensors(valid, rng) if rng.random() < 0.7 else damaged(valid, rng)
        file.write_bytes(data)
        return file.name, lambda: check_weights(load_pretrained(name, weights=file))

    return attempt


def check_weights(pretrained: Any) -> None:
    from cheem_jax.backbone.params import check_params

    check_params(pretrained.config, pretrained.params)
    assert all(value.dtype == np.float32 for value in pretrained.params.values())
    for mean in pretrained.base_means.values():
        assert mean.shape == (pretrained.config.depth, pretrained.config.width)
        assert mean.dtype == np.float32
    rgb = [*pretrained.config.mean, *pretrained.config.std]
    assert np.isfinite(rgb).all() and min(pretrained.config.std) > 0


def damaged_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Replace the header in front of the same numbers."""
    (size,) = struct.unpack_from("<Q", data)
    header = damaged_json(json.loads(data[8 : 8 + size]), rng)
    if rng.random() < 0.1:
        return struct.pack("<Q", rng.choice((0, 2**63, 2**64 - 1, len(data)))) + data[8:]
    if rng.random() < 0.3:
        other = rng.choice(
            (b"BF16", b"F8_E4M3", b"I64", b"BOOL", b"F4", b"U8", b"C64", b"nonsense")
        )
        header = data[8 : 8 + size].replace(b"F32", other, rng.choice((1, -1)))
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def damaged_npz(data: bytes, rng: random.Random) -> bytes:
    """Replace headers or members, or compress members to almost nothing."""
    members = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            members[name] = archive.read(name)
    name = rng.choice(sorted(members))
    match rng.randrange(4):
        case 0:
            members[name] = rng.choice(
                (b"", b"\x93NUMPY", b"\x93NUMPY\7\0", b"hello", rng.randbytes(50))
            )
        case 1:
            members[name[:-4]] = members.pop(name)
        case _:
            members[name] = damaged_npy(members[name], rng)
    return zipped(
        members,
        rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
    )


def converted(folder: Path) -> Attempts:
    """Weight files of this library: their config, and the means of the pretraining data."""
    import dataclasses

    import safetensors.numpy

    from cheem_jax.backbone.config import ViTConfig
    from cheem_jax.backbone.params import shapes_of
    from cheem_jax.backbone.weights import FORMAT, load_pretrained

    config = ViTConfig(TINY, 16, 1, 2, image_size=8, patch_size=4, num_classes=0)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes_of(config).items()}
    nano = (
        Path(sys.modules["cheem_jax.backbone.weights"].__file__ or "").parent
        / "bundled"
        / "vit_nano.safetensors"
    )
    with nano.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        fields = json.loads(stream.read(size))["__metadata__"]
    nano_tensors = safetensors.numpy.load(nano.read_bytes())
    file = folder / "own.safetensors"

    def attempt(rng: random.Random) -> Attempt:
        name = rng.choice((TINY, TINY, "vit_nano"))
        metadata = (
            dict(fields)
            if name == "vit_nano"
            else {
                "format": FORMAT,
                "config": json.dumps(dataclasses.asdict(config)),
                "source": "x",
                "sha256": "0" * 64,
            }
        )
        result: dict[str, Any] = dict(nano_tensors if name == "vit_nano" else tensors)
        place = f"base_means/8/mlp_down/{rng.choice(('component', 'block', 'x', '../x'))}"
        match rng.randrange(6):
            case 0:
                shape = rng.choice(((1, 16), (), (0,), (16,), (1, 16, 1)))
                result[place] = np.full(
                    shape, rng.choice((0, np.nan)), rng.choice((np.float32, np.int8, np.float64))
                )
            case 1:
                key = rng.choice(sorted(metadata))
                metadata[key] = rng.choice(
                    ("", "x", "null", "\0", "cheem_jax", "cheem_jax.vit.2", "y" * 70_000)
                )
            case _:
                text = damaged_json(json.loads(metadata["config"]), rng)
                metadata["config"] = text.decode("utf-8", "replace")
        file.write_bytes(safetensors.numpy.save(result, metadata))
        return "own.safetensors", lambda: check_weights(load_pretrained(name, weights=file))

    return attempt


def hub_configs(folder: Path) -> Attempts:
    """The hub's config.json next to good weights."""
    import safetensors.numpy

    from cheem_jax.backbone import weights
    from cheem_jax.backbone.weights import load_pretrained

    config = {
        "architecture": "vit",
        "global_pool": "token",
        "num_features": 64,
        "pretrained_cfg": {
            "tag": "x",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.2, 0.2, 0.2],
            "input_size": [3, 12, 12],
        },
    }
    (folder / "model.safetensors").write_bytes(
        safetensors.numpy.save(timm_tensors(depth=1, classes=5, ratio=1))
    )

    def attempt(rng: random.Random) -> Attempt:
        (folder / "config.json").write_bytes(damaged_json(config, rng))

        def load() -> None:
            with mock.patch.object(weights, "_fetch", lambda repository, name: folder / name):
                check_weights(load_pretrained("vit_tiny_patch4_12.mystery"))

        return "vit_tiny_patch4_12.mystery", load

    return attempt


def records(folder: Path) -> Attempts:
    """A data set that TFDS has prepared: its metadata, its shards, and the index that is kept
    next to them."""
    from prepared import prepare_small

    from cheem_jax.data.records import plan_tfds

    spec = "visual_domain_decathlon/daimlerpedcls"
    labels = {split: np.repeat([0, 1], 3) for split in ("train", "validation")}
    place = prepare_small(folder, f"{spec}:1.2.0", labels, key="name")

    def read() -> None:
        read_all(plan_tfds(spec, folder))

    read()
    files = files_below(place)
    times = {name: (place / name).stat() for name in files}
    jsons = [name for name in files if name.endswith(".json")]
    indices = [name for name in files if name.endswith(".npz")]

    def attempt(rng: random.Random) -> Attempt:
        official.write(place, files)
        name = rng.choice([*jsons, *jsons, *indices, *indices, *sorted(files)])
        if name in jsons and rng.random() < 0.8:
            data = damaged_json(json.loads(files[name]), rng)
            if rng.random() < 0.5 and b"pythonClassName" in files[name]:
                foreign = rng.choice(
                    ("os.path", "this.x", "antigravity.fly", "x", "cheem_jax.cli.main", ".", "a..b")
                )
                data = re.sub(
                    rb'tensorflow_datasets[^"]*',
                    foreign.encode(),
                    files[name],
                    count=rng.choice((0, 1)),
                )
            if rng.random() < 0.2:
                data = re.sub(
                    rb'"(\d+)"', lambda m: b'"%d"' % rng.choice((0, 10**12, int(m[1]))), files[name]
                )
        elif name in indices and rng.random() < 0.8:
            data = damaged_npz(files[name], rng)
        else:
            data = damaged(files[name], rng)
        (place / name).write_bytes(data)
        for file_name in files:  # an index counts as long as times do not change
            if len(data) == len(files[name]) or file_name != name or name in indices:
                os.utime(
                    place / file_name,
                    ns=(times[file_name].st_atime_ns, times[file_name].st_mtime_ns),
                )
        return "daimlerpedcls", read

    return attempt


def checkpoints(folder: Path) -> Attempts:
    """Saved tasks; the attacker's manifest fits the files, so that hashes do not help."""
    from cheem_jax.cheem.expert_memory import task_network
    from cheem_jax.cheem.saved_memory import open_memory, save_memory_task
    from cheem_jax.core.pool import DenseExperts
    from cheem_jax.run.checkpoint import (
        MANIFEST,
        content_hash,
        load_manifest,
        load_meta,
        load_task,
        saved_tasks,
    )

    root = folder / "checkpoints"
    pool = tuple(block[:1] for block in memory().pool)
    place = save_memory_task(root, memory(), 0, 2)
    files = files_below(place)
    arrays, meta = load_task(place)

    def use() -> None:
        opened = open_memory(root, pool)
        experts = DenseExperts(opened.pool, 0)
        for task in opened.tasks:
            task_network(experts, task.experts)

    def attempt(rng: random.Random) -> Attempt:
        shutil.rmtree(place)
        official.write(place, files)
        name = rng.choice(["task.json", "task.json", MANIFEST, *sorted(files)])
        manifest = json.loads(files[MANIFEST])
        if name == "task.json" and rng.random() < 0.3:  # choices that the pool does not have
            other = json.loads(files[name])
            at = rng.randrange(len(other["architecture"]))
            other["architecture"][at] = rng.choice(("adapt:1", "reuse:7", "adapt:0", "new", "skip"))
            other["experts"][at] = rng.choice((0, 1, 7, None))
            data = (json.dumps(other, indent=1) + "\n").encode()
        elif name in ("task.json", MANIFEST):
            data = damaged_json(json.loads(files[name]), rng)
        elif rng.random() < 0.6 and files[name].startswith(b"{"):
            data = damaged_json(json.loads(files[name]), rng)
        else:
            data = damaged(files[name], rng)
        (place / name).write_bytes(data)
        if name != MANIFEST and rng.random() < 0.8:
            from cheem_jax.run.checkpoint import _hash_files  # as an attacker does, too

            manifest["files"] = _hash_files(place)
            with contextlib.suppress(ValueError, RecursionError, TypeError):
                fields = json.loads(data) if name == "task.json" else meta
                manifest["content_sha256"] = content_hash(arrays, fields)
            (place / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        match rng.randrange(4):
            case 0:
                return place.name, lambda: load_meta(place)
            case 1:
                return place.name, lambda: load_manifest(place)
            case _:
                return place.name, lambda: use() if saved_tasks(root) else None

    return attempt


RUN = {
    "format": "cheem_jax-run/1",
    "stream": "demo",
    "tasks": ["a", "b"],
    "seed": 0,
    "cheem": {"ops": {"rank": 2}},
    "data_sha256": {"a": "0", "b": "1"},
}


def run_configs(folder: Path) -> Attempts:
    from cheem_jax.run.directory import claim

    def attempt(rng: random.Random) -> Attempt:
        whole = rng.random() < 0.05
        (folder / "config.json").write_bytes(
            json.dumps(RUN).encode() if whole else damaged_json(RUN, rng)
        )
        return folder.name, lambda: claim(folder, RUN)

    return attempt


RECORD = list(entries(names=("one", "two"), classes=("cat", "dog")))


def run_records(folder: Path) -> Attempts:
    """`metrics.jsonl`, read and continued."""
    from cheem_jax.run.record import NAME, Record, read

    for entry in RECORD:
        Record(folder).write(**entry)
    valid = (folder / NAME).read_bytes()

    def use() -> None:
        result = read(folder)
        assert all(
            isinstance(entry, dict) and isinstance(entry.get("event"), str) for entry in result
        )
        Record(folder).write("next")
        assert len(read(folder)) == len(result) + 1

    def attempt(rng: random.Random) -> Attempt:
        lines = valid.splitlines(keepends=True)
        at = rng.randrange(len(lines))
        if rng.random() < 0.5:
            lines[at] = damaged(lines[at], rng)
        else:
            lines[at] = damaged_json(json.loads(lines[at]), rng) + rng.choice((b"\n", b""))
        (folder / NAME).write_bytes(b"".join(lines))
        return NAME, use

    return attempt


def results(folder: Path) -> Attempts:
    """Entries of a record with right hashes, from which `results.json` is made."""
    from cheem_jax.run.results import results_of

    valid = RECORD
    results_of(valid)

    def attempt(rng: random.Random) -> Attempt:
        result: Any = valid
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads(damaged_json(valid, rng))
        if not isinstance(result, list) or not all(isinstance(entry, dict) for entry in result):
            result = valid[:-1]  # which `read` lets nobody see
        return "", lambda: results_of(result)

    return attempt


def architectures(folder: Path) -> Attempts:
    from cheem_jax.core.architecture import encode, from_strings, to_strings

    texts = ["reuse:0", "adapt:1", "new", "skip"]

    def attempt(rng: random.Random) -> Attempt:
        value: Any = list(texts)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(damaged_json(texts, rng))
        if rng.random() < 0.3:
            value = list(texts)
            value[rng.randrange(4)] = rng.choice(
                (
                    "reuse:",
                    "reuse:-1",
                    "reuse:²",
                    "adapt:٣",
                    "reuse:" + "9" * 5000,
                    "new:0",
                    "REUSE:0",
                    ":",
                    "reuse:0:1",
                    "",
                )
            )

        def use() -> None:
            result = from_strings(value)
            assert from_strings(to_strings(result)) == result
            encode(result[:4], [2] * len(result[:4]))

        return "", use

    return attempt


def readers(folder: Path) -> Attempts:
    """The official archives of six data sets: their bytes, the lists in them, and the images."""

    from cheem_jax.data.benchmarks import builders as module

    kinds = {
        "aircraft": module.read_aircraft,
        "gtsrb": module.read_gtsrb,
        "cars": module.read_cars,
        "sun397": module.read_sun397,
        "eurosat": module.read_eurosat,
        "caltech101": module.read_caltech101,
    }
    contents = {name: getattr(official, name)() for name in kinds}
    for name, content in contents.items():
        official.put(folder / name, content)
    archives = {
        name: {file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in kinds
    }

    def attempt(rng: random.Random) -> Attempt:
        kind = rng.choice(("aircraft", "cars", "sun397", "eurosat", "gtsrb", "caltech101"))
        place = folder / kind
        content = contents[kind]
        official.write(place, archives[kind])
        name = rng.choice(sorted(content))
        files = dict(content[name])
        if rng.random() < 0.25 or name in files:
            data = damaged(archives[kind][name], rng)
        else:
            lists = [key for key in files if not key.endswith((".jpg", ".ppm"))]
            key = rng.choice(lists if lists and rng.random() < 0.8 else sorted(files))
            text = key.endswith((".txt", ".csv")) and rng.random() < 0.7
            if text:
                cells = [
                    "",
                    "x",
                    "0",
                    "-1",
                    "43",
                    "9" * 5000,
                    "9" * 200_000,
                    "\u202e",
                    "²",
                    "../x.ppm;8;8;1;1;7;7;0",
                    "\0",
                ]
                separator = ";" if key.endswith("csv") else " "
                files[key] = damaged_lines(files[key].decode(), cells, rng, separator)
            else:
                files[key] = damaged(files[key], rng)
            if rng.random() < 0.1:
                files[damaged_name(key, rng)] = files.pop(key)
            with warnings.catch_warnings(action="ignore"):
                data = official.zipped(files) if name.endswith(".zip") else official.tar(files)
        (place / name).write_bytes(data)

        def read() -> None:
            reading = kinds[kind](place)
            for source in reading.sources.values():
                for example in source.read():
                    assert isinstance(example.image, bytes)
                    assert 0 <= example.label < len(reading.classes)

        return kind, read

    return attempt


def downloads(folder: Path) -> Attempts:
    """Answers of a server, and the files next to a partial download."""
    import requests
    import urllib3

    from cheem_jax.data.benchmarks import download as module

    body = b"0123456789" * 30
    file = folder / "set.zip"

    def attempt(rng: random.Random) -> Attempt:
        for old in folder.iterdir():
            old.unlink()
        if rng.random() < 0.6:
            (folder / "set.zip.part").write_bytes(body[:100])
        answers = []
        for _ in range(4):
            values = (
                "300",
                "100",
                "-1",
                "",
                "9" * 5000,
                "²",
                "٣",
                "bytes 100-299/300",
                "bytes */300",
                "bytes 1-0/x",
                "bytes 100-299/" + "9" * 5000,
                "text/html",
                "W/x",
                "Mon, 01 Jan 0001 00:00:00 GMT",
                "1e9",
                "nan",
                "Fri, 31 Dec 9999 23:59:59 -9999",
                "\u202e",
                "x" * 70_000,
            )
            names = (
                "Content-Length",
                "Content-Range",
                "Location",
                "ETag",
                "Last-Modified",
                "Content-Type",
                "Content-Encoding",
                "Transfer-Encoding",
                "Set-Cookie",
            )
            headers = {name: rng.choice(values) for name in names if rng.random() < 0.4}
            data = damaged(body, rng) if rng.random() < 0.3 else body
            answers.append(
                (
                    rng.choice((200, 200, 206, 206, 416, 404, 500, 429, 301, 204, 0, -1)),
                    headers,
                    data,
                )
            )
        coming = iter(answers)

        def send(adapter: Any, request: Any, **options: Any) -> Any:
            for value in request.headers.values():  # as http.client does it
                assert isinstance(value, str)
            if (answer := next(coming, None)) is None:
                raise requests.ConnectionError("no more answers")
            status, headers, data = answer
            raw = urllib3.HTTPResponse(io.BytesIO(data), headers, status, preload_content=False)
            return adapter.build_response(request, raw)

        def fetch() -> None:
            with mock.patch.object(requests.adapters.HTTPAdapter, "send", send):
                module.download(
                    "https://example.org/set.zip", file, hashlib.sha256(body).hexdigest()
                )

        return "set.zip", fetch

    return attempt


LOADERS: dict[str, tuple[Callable[[Path], Attempts], int]] = {
    "images": (images, 1500),
    "zips": (zips, 300),
    "archives": (archives, 300),
    "stream_files": (stream_files, 300),
    "manifests": (manifests, 300),
    "caches": (caches, 200),
    "records": (records, 500),
    "weights": (weights, 500),
    "converted": (converted, 500),
    "hub_configs": (hub_configs, 500),
    "checkpoints": (checkpoints, 600),
    "run_configs": (run_configs, 200),
    "run_records": (run_records, 200),
    "results": (results, 200),
    "architectures": (architectures, 200),
    "readers": (readers, 600),
    "downloads": (downloads, 200),
}
"""Function that makes the inputs of each loader, and the largest growth of the process in MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loader", choices=[*LOADERS])
    parser.add_argument("num", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--only", type=int, help="this input alone, with its traceback")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        if options.only is not None:
            attempts = LOADERS[options.loader][0](Path(folder))
            _, call = attempts(random.Random(f"{options.loader} {options.seed} {options.only}"))
            call()
            return
        tried = fuzz(options.loader, range(options.num), Path(folder), options.seed)
    print(json.dumps(tried._asdict()))


if __name__ == "__main__":
    main()
