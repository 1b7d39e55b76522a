"""A file over HTTP: resumed where the connection broke, and checked before it gets its name."""

import contextlib
import email.utils
import functools
import hashlib
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

CHUNK_BYTES = 2**20
GROWTH_BYTES = 2**20  # an attempt that got this much farther starts the count of failures anew
MAX_PAUSE = 120.0  # seconds, whatever a server's Retry-After says
ARCHIVE_SUFFIXES = (".zip", ".tgz", ".gz", ".tar", ".mat", ".xz", ".bz2", ".7z")
PASSING_STATUS = frozenset({408, 425, 429})  # and all from 500 on

OnProgress = Callable[[int, int], None]


def download(
    url: str,
    file: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    size: int | None = None,
    timeout: float = 30,
    retries: int = 4,
    on_progress: OnProgress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Fetch `url` to `file` unless it is there, and return its SHA-256.

    What has arrived waits in `<file>.part`, so a later call goes on from there; one process at a time. Where the
    caller knows no hash, the SHA-256 of the first download is kept in `<file>.sha256` and checked from then on.
    `timeout` is the seconds of silence before an attempt is given up; `retries` counts failed attempts in a row.
    `on_progress` gets the bytes so far and in all, 0 where the server does not say. Raises ValueError for a file
    that is not the wanted one, and OSError (TimeoutError for a silent server) where it cannot be had or written.
    """
    url = _checked_url(url)
    wanted = _wanted(file, sha256, md5, size)
    if file.exists():
        return _accept_existing(file, wanted)
    part = _beside(file, ".part")
    with _writing(part):
        file.parent.mkdir(parents=True, exist_ok=True)
        may_be_stale = part.exists()
    while True:
        _fetch_with_retries(url, file, wanted, timeout, retries, on_progress, sleep)
        with _writing(part):
            digest, fault = _compare(part, wanted)
            if not fault:
                _finish(part, file, digest, wanted)
                return digest
            _discard(part)
        if not may_be_stale:
            raise ValueError(
                f"{url}: the file that arrived is not the wanted one: {fault}. It was removed; call again in case it "
                f"was damaged on the way. If the publisher replaced the file, {_new_version(file, wanted)}"
            )
        may_be_stale = False  # bytes of an earlier call may be the damaged ones: once more from the beginning


class _Wanted(NamedTuple):
    sha256: str | None
    md5: str | None
    size: int | None
    source: str  # who says so

    @property
    def has_hash(self) -> bool:
        return self.sha256 is not None or self.md5 is not None


class _Memo(NamedTuple):
    """What the server said about the file that a `.part` is the beginning of."""

    url: str
    validator: str | None
    total: int | None


class _Interrupted(Exception):
    """A fault that may pass; `pause` is the wait in seconds that the server asked for."""

    def __init__(self, reason: str, pause: float | None = None, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.pause, self.timed_out = pause, timed_out


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} cannot be downloaded; expected an address that begins with http:// or https://")
    return quote(url, safe="%/:=&?~#+!$,;'@()*[]")


def _wanted(file: Path, sha256: str | None, md5: str | None, size: int | None) -> _Wanted:
    record = _beside(file, ".sha256")
    if sha256 is None and md5 is None and record.exists():
        words = record.read_text(errors="replace").split()
        if not words or not re.fullmatch(r"[0-9a-fA-F]{64}", words[0]):
            raise ValueError(f"{record} holds no SHA-256; expected 64 hexadecimal digits. Delete it to record anew")
        return _Wanted(words[0].lower(), None, size, str(record))
    return _Wanted(sha256 and sha256.lower(), md5 and md5.lower(), size, "the list of known files")


def _accept_existing(file: Path, wanted: _Wanted) -> str:
    if not file.is_file():
        raise ValueError(f"{file} is no file, so nothing can be downloaded there; choose another name")
    digest, fault = _compare(file, wanted)
    if fault:
        raise ValueError(
            f"{file} is not the wanted file: {fault}. It was left as it is; move it away to download it again, "
            f"or, if it is the right one, {_new_version(file, wanted)}"
        )
    if not wanted.has_hash:
        with contextlib.suppress(OSError):  # a shared folder that is read-only still serves
            _record(file, digest)
    return digest


def _new_version(file: Path, wanted: _Wanted) -> str:
    if wanted.source == str(_beside(file, ".sha256")):
        return f"delete {wanted.source}, which holds the hash of the first download"
    return "the hash that is known for it has to be changed with it"


def _compare(file: Path, wanted: _Wanted) -> tuple[str, str]:
    """The file's SHA-256, and how it differs from what was wanted: empty if it does not."""
    faults = []
    if wanted.size is not None and (size := file.stat().st_size) != wanted.size:
        faults.append(f"it has {size} bytes, expected {wanted.size}")
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if wanted.sha256 is not None and sha256 != wanted.sha256:
        faults.append(f"its SHA-256 is {sha256}, expected {wanted.sha256} ({wanted.source})")
    if wanted.md5 is not None:
        with file.open("rb") as stream:
            md5 = hashlib.file_digest(stream, functools.partial(hashlib.md5, usedforsecurity=False)).hexdigest()
        if md5 != wanted.md5:
            faults.append(f"its MD5 is {md5}, expected {wanted.md5} ({wanted.source})")
    return sha256, "; ".join(faults)


def _fetch_with_retries(
    url: str,
    file: Path,
    wanted: _Wanted,
    timeout: float,
    retries: int,
    on_progress: OnProgress | None,
    sleep: Callable[[float], None],
) -> None:
    part = _beside(file, ".part")
    failures, farthest = 0, 0
    while True:
        try:
            return _fetch(url, file, wanted, timeout, on_progress)
        except _Interrupted as fault:
            reached = part.stat().st_size if part.exists() else 0
            failures = 1 if reached >= farthest + GROWTH_BYTES else failures + 1
            farthest = max(farthest, reached)
            if failures > retries:
                kind = TimeoutError if fault.timed_out else OSError
                raise kind(
                    f"{url} cannot be downloaded: {fault}, {failures} times in a row. Try again later, "
                    f"it goes on from byte {reached}; or put the file at {file} by hand"
                ) from fault
            pause = 2.0 ** (failures - 1) if fault.pause is None else fault.pause
            sleep(min(pause, MAX_PAUSE))


def _fetch(url: str, file: Path, wanted: _Wanted, timeout: float, on_progress: OnProgress | None) -> None:
    """One attempt: `.part` is complete as far as the server says, or the attempt raises."""
    part = _beside(file, ".part")
    memo = _recall(part)
    # without a validator only a hash can tell a mixture of two versions from the file
    resumable = memo is not None and memo.url == url and (memo.validator or wanted.has_hash)
    offset = part.stat().st_size if resumable and part.exists() else 0
    with _open(url, offset, memo.validator if memo else None, timeout) as response:
        headers = response.headers
        content_range = re.fullmatch(
            r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/([0-9]{1,18})", headers.get("Content-Range", "")
        )
        match response.code:
            case 200:
                length = headers.get("Content-Length", "")
                offset, total = 0, int(length) if re.fullmatch("[0-9]{1,18}", length) else wanted.size
            case 206:
                if not (content_range and content_range[1] and int(content_range[1]) == offset):
                    _discard(part)
                    raise _Interrupted(f"another part was sent than the one from byte {offset}")
                total = int(content_range[2])
            case 416 if offset:
                if offset == (int(content_range[2]) if content_range else memo and memo.total):
                    return
                _discard(part)
                raise _Interrupted(f"the server has no byte {offset} to go on from")
            case status:
                reason = f"HTTP status {status} {response.reason}".rstrip()
                if status in PASSING_STATUS or status >= 500:
                    raise _Interrupted(reason, pause=_retry_after(headers.get("Retry-After")))
                raise OSError(f"{url} cannot be downloaded: {reason}. Find the file elsewhere and put it at {file}")
        if headers.get_content_type() == "text/html" and file.name.lower().endswith(ARCHIVE_SUFFIXES):
            raise ValueError(
                f"{url} gave a web page where {file.name} was expected, probably a login or error page; open the "
                f"address in a browser and put the file at {file}"
            )
        if wanted.size is not None and total != wanted.size:
            raise ValueError(f"{url} has {total} bytes on the server, expected {wanted.size}: it is another file")
        with _writing(part):
            with part.open("ab" if offset else "wb") as output:
                # after the old bytes are gone: they must not be taken for the beginning of the new file
                _remember(part, _Memo(url, _validator(headers), total))
                done = offset
                for chunk in _chunks(response):
                    output.write(chunk)
                    done += len(chunk)
                    if on_progress is not None:
                        on_progress(done, total or 0)
                    if total is not None and done > total:
                        break
        if total is not None and done != total:
            if done > total:
                _discard(part)
            raise _Interrupted(f"the connection ended after {done} of {total} bytes")


def _open(url: str, offset: int, validator: str | None, timeout: float):
    """The response to a GET of the bytes from `offset` on, error pages included."""
    headers = {"User-Agent": "cheem_jax", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if validator:
            headers["If-Range"] = validator
    with _network():
        try:
            return _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout)
        except urllib.error.HTTPError as response:
            return response
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                text = f"{url}: the server's certificate is not trusted ({error.reason.verify_message})"
                raise ValueError(f"{text}; check the address and this machine's certificates and clock") from error
            raise error.reason if isinstance(error.reason, Exception) else error from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Not from https to http: on the way from there anybody could change the file."""
        if req.type == "https" and urlsplit(newurl).scheme.lower() != "https":
            raise ValueError(f"{req.full_url} leads to {newurl}, which is not encrypted; fetch the file by hand")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Without the handlers of file:// and ftp://, which a redirect could otherwise reach."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler,
        _Redirects, urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor, urllib.request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener


def _chunks(response) -> Iterator[bytes]:
    """As they come (`read1`), so that little is lost when the connection breaks."""
    while True:
        with _network():
            chunk = response.read1(CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


@contextlib.contextmanager
def _network() -> Iterator[None]:
    """Turns the many errors of a connection into one, apart from those of the disk."""
    try:
        yield
    except http.client.InvalidURL as error:
        raise ValueError(f"the address is not valid: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        timed_out = isinstance(error, TimeoutError)
        reason = "no answer within the timeout" if timed_out else f"{type(error).__name__}: {error}"
        raise _Interrupted(reason, timed_out=timed_out) from error


@contextlib.contextmanager
def _writing(part: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write {part}: {error.strerror or error}; make room or choose a folder that can be written"
        ) from error


def _retry_after(value: str | None) -> float | None:
    """Seconds from a number or a date; None where the server asks for no particular wait."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.isdecimal() else _timestamp(value) - time.time()
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0)


def _timestamp(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp()


def _validator(headers) -> str | None:
    """For If-Range, which takes no weak ETag."""
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(file.name + suffix)


def _recall(part: Path) -> _Memo | None:
    try:
        memo = _Memo(**json.loads(_beside(part, ".json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError):  # absent, cut off, or of another shape: begin anew
        return None
    return memo if isinstance(memo.validator, str | None) else None


def _remember(part: Path, memo: _Memo) -> None:
    _beside(part, ".json").write_text(json.dumps(memo._asdict()))


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _beside(part, ".json").unlink(missing_ok=True)


def _record(file: Path, digest: str) -> None:
    _beside(file, ".sha256").write_text(f"{digest}  {file.name}\n")  # as sha256sum writes it


def _finish(part: Path, file: Path, digest: str, wanted: _Wanted) -> None:
    with part.open("rb+") as stream:
        os.fsync(stream.fileno())
    if not wanted.has_hash:
        _record(file, digest)
    os.replace(part, file)
    _beside(part, ".json").unlink(missing_ok=True)
