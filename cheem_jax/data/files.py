"""List the files of a folder or zip as sorted relative names, and read the images among them."""

import abc
import collections
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import itertools
import os
import re
import stat
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from PIL import Image

from cheem_jax.core.paths import SYSTEM_FOLDERS

IMAGE_SUFFIXES = frozenset(".jpg .jpeg .png .bmp .gif .webp .tif .tiff .ppm .pgm .avif".split())
HEIF_SUFFIXES = frozenset((".heic", ".heif"))
COMPANIONS = frozenset(
    ".txt .json .csv .tsv .xml .md .html .pdf .db .ini .yaml .yml .toml .bak .tmp".split()
)
"""Suffixes of common files that are not images. The content of such files is not inspected."""
MAGIC = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|BM.{4}\0{4}|RIFF.{4}WEBP|II\*\0|MM\0\*|.{4}ftypavi[fs]|P[1-6]\s+[#\d]",
    re.DOTALL,
)
"""Pattern of the first bytes of image files. It recognises images among files with an unknown
suffix."""
HEIF_MAGIC = re.compile(rb".{4}ftyp(?:hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
READS_HEIF = importlib.util.find_spec("pillow_heif") is not None
GET_HEIF = "pip install 'cheem_jax[heic]'"
ARCHIVES = frozenset(".tar .gz .tgz .bz2 .xz .zst .7z .rar".split())
MAX_NOTES = 10
HEAD_BYTES = 16
MAX_DEPTH = 64  # maximum depth of folders
MAX_FILE_BYTES = 256 * 2**20
MAX_FILES = 5_000_000  # limit per folder or archive; ImageNet has 1.4 million files
# A zip that unpacks to more than SMALL_BYTES and to more than MAX_RATIO times its size is refused.
# Zips of images stay below the ratio, because images are already compressed.
SMALL_BYTES = 2**30
MAX_RATIO = 100
CHANGED = "the zip has changed since its names were read"


class Encoded(abc.ABC):
    """Image files in a fixed order. Instances can be pickled, so that worker processes can read
    files."""

    keys: Sequence[str]
    upright = False
    """Whether decoding rotates the images by their EXIF orientation."""

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int) -> str:
        """Return the key of a file: a name that is unique in its task and identical on every
        machine."""
        return self.keys[row]

    @abc.abstractmethod
    def where(self, row: int) -> str:
        """Return the location of the file on this machine, for messages."""

    @abc.abstractmethod
    def read(self, row: int) -> bytes:
        """Read the bytes of a file. Raises ValueError or OSError with the file's location."""

    def picture(self, row: int) -> bytes | Image.Image:
        """Return the bytes of a file, or an open image, for decoding. Raises the errors of
        `read`."""
        return self.read(row)


@dataclasses.dataclass(eq=False)
class FolderFiles(Encoded):
    """Files in a folder. The keys are names relative to the folder."""

    root: Path
    keys: Sequence[str]

    def where(self, row: int) -> str:
        return str(self.file(row))

    def file(self, row: int) -> Path:
        """Return the file's path."""
        return self.root / self.keys[row]

    def open(self, row: int) -> Any:
        """Open a file for reading."""
        try:
            mode = self.file(row).stat().st_mode
        except FileNotFoundError:
            link = (
                f" (a link to {os.readlink(self.file(row))})" if self.file(row).is_symlink() else ""
            )
            raise FileNotFoundError(
                f"{self.where(row)}: no such file{link or _other_form(self.file(row))}"
            ) from None
        if not stat.S_ISREG(mode):
            raise ValueError(f"{self.where(row)}: not a regular file")  # reading a pipe would block
        return self.file(row).open("rb")

    def read(self, row: int) -> bytes:
        with self.open(row) as stream:
            if (size := os.fstat(stream.fileno()).st_size) > MAX_FILE_BYTES:
                raise ValueError(
                    f"{self.where(row)}: {size} bytes, expected at most {MAX_FILE_BYTES}"
                )
            return stream.read()


def _other_form(file: Path) -> str:
    """Describe a file whose name differs only in its Unicode form, which looks the same."""
    for form in ("NFC", "NFD"):
        if (other := Path(unicodedata.normalize(form, str(file)))).exists():
            return f", but {ascii(str(other))}, whose accents are composed otherwise; rename one"
    return ""


class ZipFiles(Encoded):
    """Members of a zip file below the folder `root` ("" or "folder/")."""

    def __init__(self, path: Path, keys: Sequence[str], root: str):
        self.path = path
        self.keys = keys
        self.root = root
        self.stamp = stamp_of([path])

    def where(self, row: int) -> str:
        return f"{self.path}/{self.root}{self.keys[row]}"

    def open(self, row: int) -> Any:
        """Open a member for reading."""
        return _opened(self.path, self.stamp).open(self.root + self.keys[row])

    def read(self, row: int) -> bytes:
        try:
            size = _opened(self.path, self.stamp).getinfo(self.root + self.keys[row]).file_size
            with self.open(row) as stream:
                # Read at most one byte more than the size in the zip's directory, because the
                # packed bytes could unpack to much more.
                return stream.read(size + 1)
        except Exception as error:  # zipfile and zlib raise exceptions of many types
            reason = CHANGED if stamp_of([self.path]) != self.stamp else error
            raise ValueError(f"{self.where(row)} cannot be read: {reason}") from error


class Chosen(Encoded):
    """The subset of `files` at the rows `rows`."""

    def __init__(self, files: Encoded, rows: Sequence[int]):
        self.files = files
        self.rows = rows
        self.keys = [files.key(row) for row in rows]
        self.upright = files.upright

    def where(self, row: int) -> str:
        return self.files.where(self.rows[row])

    def read(self, row: int) -> bytes:
        return self.files.read(self.rows[row])


@functools.lru_cache(maxsize=32)
def _opened(path: Path, stamp: str) -> zipfile.ZipFile:
    """Open a zip once per process and share it between threads, because the list of its members can
    be large."""
    if stamp_of([path]) != stamp:
        raise ValueError(CHANGED)
    return zipfile.ZipFile(path)


def join_first(errors: Sequence[str], num: int = 5) -> str:
    """Join the first `num` messages, and append the number of the remaining ones."""
    more = f"; and {len(errors) - num} more" if len(errors) > num else ""
    return "; ".join(errors[:num]) + more


def import_extra(module: str, extra: str, what: str, instead: str = "") -> Any:
    """Import a module of an optional extra.

    If the module is missing, raise ValueError with the feature that needs the module (`what`), the
    `pip` command, and an alternative (`instead`).
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{what} needs {module} ({error}): `pip install 'cheem_jax[{extra}]'`{instead}"
        ) from error


def files_of(path: Path, names: Sequence[str], root: str = "") -> FolderFiles | ZipFiles:
    """Return the files `names` below the folder `root` ("" or "folder/") in `path`, a folder or zip
    that `list_files` has checked."""
    return FolderFiles(path / root, names) if path.is_dir() else ZipFiles(path, names, root)


def stamp_of(files: Iterable[Path]) -> str:
    """Hash the sizes and modification times of files. A missing file is also included in the hash,
    so the hash changes when the file appears."""
    digest = hashlib.sha256()
    for file in files:
        try:
            status = os.stat(file)
            digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:  # an unreadable file is reported later, when images are read
            digest.update(b"absent\n")
    return digest.hexdigest()


def list_files(path: Path) -> list[str]:
    """List the names of all visible files relative to `path`, sorted.

    Hidden and system files and folders are skipped. Raises FileNotFoundError if `path` does not
    exist, and ValueError for a zip that is unreadable or contains unsafe members.
    """
    return _list(path)[0]


def _list(path: Path) -> tuple[list[str], collections.Counter[str]]:
    """List the names of all visible files relative to `path`, sorted by their composed Unicode
    form, and count the skipped folders, keyed by name."""
    skipped = collections.Counter[str]()
    if path.is_dir():
        files = [
            f"{folder}{name}"
            for folder, _, names in walk(path, skipped)
            for name in names
            if not is_hidden(name)
        ]
        return by_name(files), skipped
    if path.is_file():
        return by_name(_list_zip(path, skipped)), skipped
    raise FileNotFoundError(f"{path}: no such folder or zip file")


class Listing(NamedTuple):
    """Files of a folder or zip, and the images among them."""

    path: Path
    names: list[str]
    """Names of all visible files, sorted."""
    images: list[str]
    ignored: collections.Counter[tuple[str, str]]
    """Numbers of files that are not images, keyed by folder and kind of file (see `kind_of`). The
    folder is "" for files with a suffix in `COMPANIONS` and for files without a folder."""
    skipped: collections.Counter[str]
    """Numbers of skipped folders, keyed by name: hidden ones, those of the system, and links to a
    folder above."""

    def notes(self) -> list[str]:
        """Describe the skipped files and folders: one line per folder and kind of file, and one
        line for folders."""
        lines = [
            f"{'/'.join(filter(None, (self.path.name, folder)))}: {num:,} file{'s'[: num > 1]}"
            f" ignored ({kind})"
            for (folder, kind), num in sorted(self.ignored.items())
        ]
        if (more := len(lines) - MAX_NOTES) > 0:
            lines[MAX_NOTES:] = [f"{self.path.name}: {more:,} more folders with ignored files"]
        if self.skipped:
            names = [
                f"{name} ({num:,})" if num > 1 else name
                for name, num in sorted(self.skipped.items())
            ]
            lines.append(
                f"{self.path.name}: folders ignored (hidden, of the system, or links to a folder"
                f" above): {join_first(names)}"
            )
        return lines

    def message(self) -> str:
        """Format the notes for the end of an error message."""
        return "".join(f"; {note}" for note in self.notes())


def look_through(path: Path) -> Listing:
    """List the files of a folder or zip, and determine which of them are images.

    The content of a file is read only if the file's suffix is unknown.
    """
    return classify(path, *_list(path))


def classify(path: Path, names: list[str], skipped: collections.Counter[str]) -> Listing:
    """Determine which of the files `names` in a folder or zip are images."""
    listing = Listing(path, names, [], collections.Counter(), skipped)
    files = files_of(path, listing.names)
    for row, name in enumerate(listing.names):
        folder, _, file = name.rpartition("/")
        if (kind := kind_of(files, row)) is None:
            listing.images.append(name)
        elif file != "meta.json":  # meta.json is not ignored: it contains class names
            listing.ignored["" if kind.lower() in COMPANIONS else folder, kind] += 1
    return listing


def kind_of(files: FolderFiles | ZipFiles, row: int) -> str | None:
    """Return None for an image; for another file, describe its kind for messages."""
    suffix = PurePosixPath(files.key(row)).suffix
    if (lower := suffix.lower()) in IMAGE_SUFFIXES or (READS_HEIF and lower in HEIF_SUFFIXES):
        return None
    if lower in COMPANIONS:
        return suffix
    head = first_bytes(files, row)
    is_heif = HEIF_MAGIC.match(head) is not None
    if MAGIC.match(head) or (READS_HEIF and is_heif):
        return None
    return f"{suffix or 'no suffix'}{f'; {GET_HEIF}' if is_heif or lower in HEIF_SUFFIXES else ''}"


def may_be_image(file: Path) -> bool:
    """Return whether a file is an image, including formats that are read only with an optional
    package."""
    kind = kind_of(FolderFiles(file.parent, [file.name]), 0)
    return kind is None or kind.endswith(GET_HEIF)


def first_bytes(files: FolderFiles | ZipFiles, row: int) -> bytes:
    """Return the first bytes of a file, or an empty value if the file cannot be read."""
    try:
        with files.open(row) as stream:
            return stream.read(HEAD_BYTES)
    except Exception:  # zipfile and zlib raise exceptions of many types
        return b""


def is_dead_link(file: Path) -> bool:
    """Return whether `file` is a link whose target does not exist, for example on a disk that is
    not mounted."""
    return file.is_symlink() and not file.exists()


def is_hidden(part: str) -> bool:
    """Return whether a file or folder is hidden, of the system, or an editor's copy."""
    return part.startswith(".") or part.endswith("~") or part.casefold() in SYSTEM_FOLDERS


def composed(name: str) -> str:
    """Normalise a name to composed Unicode for comparisons; macOS stores accents as separate
    characters."""
    return unicodedata.normalize("NFC", name)


def by_name(names: Iterable[str]) -> list[str]:
    """Sort names by their composed Unicode form, so that a copy of a folder has the same order."""
    return sorted(names, key=lambda name: (composed(name), name))


def walk(
    path: Path, skipped: collections.Counter[str] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield folders with their subfolders and file names, like `os.walk`. Folders are relative to
    `path` ("" or "folder/"). Hidden folders and links to a folder above are skipped, and counted in
    `skipped`. Raises ValueError if folders are nested too deeply."""

    def fail(error: OSError) -> NoReturn:
        raise error  # do not treat an unreadable folder as empty

    num = 0
    for folder, subfolders, names in os.walk(path, followlinks=True, onerror=fail):
        num += len(subfolders) + len(names)
        if num > MAX_FILES:
            raise ValueError(
                f"{path}: more than {MAX_FILES} files and folders; give a folder of fewer files"
            )
        parts = Path(folder).relative_to(path).parts
        if len(parts) > MAX_DEPTH:
            raise ValueError(
                f"{folder}: folders are nested more than {MAX_DEPTH} deep; move the images up"
            )
        unwanted = {
            name for name in subfolders if is_hidden(name) or _leads_back(Path(folder, name))
        }
        if skipped is not None:
            skipped.update(unwanted)
        subfolders[:] = [name for name in subfolders if name not in unwanted]
        yield "".join(f"{part}/" for part in parts), subfolders, names


def empty_folders(path: Path) -> set[str]:
    """Return the folders of a folder or zip that contain neither a visible file nor a visible
    folder."""
    if path.is_dir():
        return {
            at[:-1]
            for at, subfolders, names in walk(path)
            if at and not subfolders and all(map(is_hidden, names))
        }
    deepest = set[tuple[str, ...]]()
    used = set[tuple[str, ...]]([()])
    for member in _opened(path, stamp_of([path])).namelist():
        *folders, name = member.split("/")
        shown = tuple(itertools.takewhile(lambda folder: not is_hidden(folder), folders))
        deepest.add(shown)
        if len(shown) == len(folders) and name and not is_hidden(name):
            used.add(shown)
    used |= {folders[:depth] for folders in deepest for depth in range(len(folders))}
    return {"/".join(folders) for folders in deepest - used}


def _leads_back(folder: Path) -> bool:
    """Return whether a folder is a link to a folder above, in which every file would occur again
    and again."""
    if not folder.is_symlink():
        return False
    target = folder.stat()
    return any(os.path.samestat(target, above.stat()) for above in folder.absolute().parents)


def _list_zip(path: Path, skipped: collections.Counter[str]) -> set[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # zipfile also raises OSError, struct.error and NotImplementedError
        way_out = (
            "unpack it first, and give the folder"
            if path.suffix.lower() in ARCHIVES
            else "expected a zip, a folder, or a table (.csv, .tsv, .parquet)"
        )
        raise ValueError(f"{path} is not a readable zip file ({error}); {way_out}") from error
    size = path.stat().st_size
    if len(members) > MAX_FILES:
        raise ValueError(
            f"{path}: {len(members)} members, expected at most {MAX_FILES}; use more than one zip"
        )
    if sum(member.compress_size for member in members) > size:
        raise ValueError(
            f"{path}: its members need more bytes than the file has, so they overlap or are"
            " truncated; zip the images again"
        )
    total = sum(member.file_size for member in members)
    if total > max(SMALL_BYTES, MAX_RATIO * size):
        raise ValueError(
            f"{path}: refused as a zip bomb: {size} bytes unpack to {total}, more than {MAX_RATIO}"
            " times as many"
        )
    files = set[str]()
    left_out = set[tuple[str, ...]]()
    for member in members:
        if reason := _refusal(member):
            raise ValueError(f"{path}: refused because of member {member.filename!r}: {reason}")
        *folders, name = member.filename.split("/")
        if at := next(
            (at for at, folder in enumerate(folders, start=1) if is_hidden(folder)), None
        ):
            left_out.add(tuple(folders[:at]))
        if at or member.is_dir() or is_hidden(name):
            continue
        if member.filename in files:
            raise ValueError(f"{path}: member {member.filename!r} occurs twice")
        files.add(member.filename)
    skipped.update(folders[-1] for folders in left_out)
    return files


def _refusal(member: zipfile.ZipInfo) -> str | None:
    """Return the reason why a zip member is unsafe or invalid, or None."""
    name = member.filename
    if "\\" in name:
        return (
            "its name contains a backslash, so it is not a plain relative name; unpack the zip, and"
            " zip it again"
        )
    # Without the flag for UTF-8, zipfile decodes a name as MS-DOS text. Symbols in the result show
    # that the name has another encoding.
    if not member.flag_bits & 0x800 and any(
        unicodedata.category(sign).startswith("S") for sign in name if sign > "~"
    ):
        return (
            "its name is encoded neither as UTF-8 nor as MS-DOS; unpack the zip with the right"
            " encoding, and give the folder"
        )
    # a member must not be unpacked to a place outside of the target folder
    if name[1:2] == ":" or not {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/")):
        return "its name is not a plain relative name"
    if member.flag_bits & 1:
        return "it is encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # with other compression methods, zipfile does not stop at the unpacked size that the zip's
        # directory states
        return (
            f"it is compressed with method {member.compress_type}; zip it again, stored or deflated"
        )
    return too_large(member.file_size)


def too_large(num_bytes: int) -> str | None:
    """Return an error message if a member of this size is too large, otherwise None."""
    return (
        f"it unpacks to {num_bytes} bytes, expected at most {MAX_FILE_BYTES}"
        if num_bytes > MAX_FILE_BYTES
        else None
    )
