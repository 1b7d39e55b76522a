"""Members of folders, zips and tars, read in place: nothing is ever unpacked to disk."""

import contextlib
import functools
import gzip
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from cheem_jax.data.files import MAX_FILES, MAX_RATIO, SMALL_BYTES, files_of, is_hidden, is_plain, list_files, too_large

Reader = Callable[[], bytes]


def members(path: Path) -> Iterator[tuple[str, Reader]]:
    """Every visible file with a function that reads it, which is valid until the next file is asked for.

    Names of a folder begin with the folder's own name, as in an archive made of it. Raises FileNotFoundError,
    or ValueError naming archive and member for what is corrupted, truncated, huge or no plain file.
    """
    kind = _kind(path)
    if kind == "tar":
        with path.open("rb") as file:
            yield from tar_members(file, str(path))
        return
    names = list_files(path)
    files = files_of(path, names)
    top = f"{path.absolute().name}/" if kind == "folder" else ""
    for row, name in enumerate(names):
        yield top + name, functools.partial(files.read, row)


def is_listed(path: Path) -> bool:
    """Whether the names in `path` can be listed without reading the files."""
    return _kind(path) != "tar"


def tar_members(file: io.BufferedIOBase, where: str) -> Iterator[tuple[str, Reader]]:
    """`members` of an open tar or tar.gz; `where` names it in errors."""
    seen: set[str] = set()
    num, most = 0, max(SMALL_BYTES, MAX_RATIO * file.seek(0, io.SEEK_END))
    file.seek(0)
    with contextlib.ExitStack() as stack:
        with _named(where):
            plain = stack.enter_context(_decompressed(file))
            archive = stack.enter_context(tarfile.open(fileobj=plain, mode="r|", tarinfo=_Header))
        while True:
            with _named(where):
                member = archive.next()
            if member is None:
                break
            name, num = member.name.removeprefix("./"), num + 1
            if num > MAX_FILES or archive.offset > most:
                raise ValueError(f"{where}: refused as a bomb: more than {MAX_FILES} members, or {most} bytes unpacked")
            if fault := _fault(name, member):
                raise ValueError(f"{where}: refused because of member {member.name!r}: {fault}")
            if member.isdir() or any(is_hidden(part) for part in name.split("/")):
                continue
            if name in seen:
                raise ValueError(f"{where}: member {name!r} occurs twice")
            seen.add(name)
            yield name, functools.partial(_read_member, archive, member, where)
        with _named(where):
            for _ in range(most // 2**20 + 1):
                if not plain.read(2**20):  # gzip compares its checksum when it has come to the end
                    return
            raise ValueError(f"more than {most} bytes follow the last member")


class _Header(tarfile.TarInfo):
    """tarfile takes a corrupted or missing header for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile):
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # the mark at the end; the type stubs leave its class out
                raise
            raise ValueError(f"corrupted or missing header: {error}") from error

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str):
        header = super().frombuf(buf, encoding, errors)
        # also of long-name headers, which tarfile reads into memory without asking
        if fault := too_large(header.size):
            raise ValueError(f"member {header.name!r}: {fault}")
        return header


def _kind(path: Path) -> Literal["folder", "zip", "tar"]:
    """What `path` is by its first bytes, since browsers and mirrors change suffixes."""
    if path.is_dir():
        return "folder"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such folder or archive")
    with path.open("rb") as file:
        head = file.read(512)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:14].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ValueError(f"{path} is a web page, not an archive; the download went wrong, download it again")
    if not head:
        raise ValueError(f"{path} is empty; expected a zip, tar or tar.gz")
    return "zip" if head.startswith(b"PK") else "tar"


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Whatever tarfile, gzip and zlib raise becomes a ValueError that names the archive."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{where}: corrupted, truncated or not a tar archive ({error or type(error).__name__}); download it again"
        ) from error


def _decompressed(file: io.BufferedIOBase) -> contextlib.AbstractContextManager[Any]:
    # not left to tarfile: it takes the end of a truncated gzip file for the end of the archive
    magic = file.read(2)
    file.seek(0)
    return gzip.open(file, "rb") if magic == b"\x1f\x8b" else contextlib.nullcontext(file)


def _fault(name: str, member: tarfile.TarInfo) -> str | None:
    """What makes a tar member unsafe or absurd, if anything."""
    if name != "." and not is_plain(name):
        return "its name is not a plain relative one"
    if member.issym() or member.islnk():
        return f"it is a link to {member.linkname!r}"
    if not (member.isfile() or member.isdir()):
        return "it is neither a file nor a folder"
    return too_large(member.size)


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> bytes:
    with _named(f"{where}: member {member.name!r}"):
        file = archive.extractfile(member)
        assert file is not None  # only folders and devices have none
        return file.read()
