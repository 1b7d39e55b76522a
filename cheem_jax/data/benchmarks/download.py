"""Archives over HTTP: requests transfers and retries them, pooch checks their hash and gives them their name.

pooch alone starts again from the beginning after a broken connection; archives of several GB are resumed here.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import pooch
import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from cheem_jax.data.decode import Progress

TIMEOUT = 30.0
"""Seconds of silence before an attempt is given up."""
RETRIES = 4
"""Failed attempts in a row before the download is given up."""
BACKOFF = 1.0
"""Seconds of the first pause between attempts; each further one is twice as long."""
MAX_PAUSE = 120
"""Seconds that a server may ask to wait (Retry-After)."""
CHUNK_BYTES = 2**16
GROWTH_BYTES = 2**20  # an attempt that got this much further starts the count of failures again
PASSING_STATUS = (408, 425, 429, *range(500, 600))
ARCHIVE_SUFFIXES = (".zip", ".tgz", ".gz", ".tar", ".mat", ".xz", ".bz2", ".7z")


def download(
    url: str,
    file: Path,
    *,
    known_hash: str | None = None,
    size: int | None = None,
    on_progress: Progress = lambda num: None,
) -> None:
    """Downloads `url` to `file`, which must not exist.

    `known_hash` is a SHA-256, or `md5:` and an MD5. Without one, the SHA-256 of the first download is kept in
    `<file>.sha256` and checked from then on. `size` is the expected number of bytes. What has arrived stays in
    `<file>.part`, where a later call resumes; only one process may download a file at a time. `on_progress` counts
    bytes, negative ones where some have to be downloaded again. Raises ValueError for a file that is not the wanted
    one, and OSError where it cannot be downloaded or written; then `file` does not exist.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"{url!r} cannot be downloaded; expected an address that begins with http:// or https://")
    record = file.with_name(f"{file.name}.sha256")
    wanted = known_hash or _recorded_hash(record)
    part = file.with_name(f"{file.name}.part")

    def transfer(url: str, output_file: str, _: object) -> None:
        """What pooch calls to fill a temporary file."""
        _transfer(url, part, wanted, size, on_progress)
        os.replace(part, output_file)
        _note(part).unlink(missing_ok=True)

    pooch.get_logger().setLevel("WARNING")  # it would print addresses and hashes between the lines of progress
    try:
        pooch.retrieve(url, wanted, file.name, file.parent, downloader=cast(Any, transfer))
        if wanted is None:
            record.write_text(f"{pooch.file_hash(str(file))}  {file.name}\n")  # as sha256sum writes it
    except (requests.RequestException, HTTPError) as error:
        raise OSError(
            f"{url} cannot be downloaded: {error}. Try again later, which resumes from byte {_num_bytes(part)}, or put "
            f"the file at {file} by hand"
        ) from error
    except OSError as error:
        raise OSError(
            f"cannot write {file}: {error.strerror or error}; make room or choose a folder that can be written"
        ) from error
    except ValueError as error:
        replaced = f" If the publisher has replaced the file, delete {record}." if wanted and not known_hash else ""
        raise ValueError(f"{url}: {error}{replaced}") from error


def _recorded_hash(record: Path) -> str | None:
    """The hash of the first download, if there was one."""
    if not record.exists():
        return None
    found = re.match(r"[0-9a-fA-F]{64}\b", record.read_text(errors="replace"))
    if found is None:
        raise ValueError(f"{record} does not contain a SHA-256 (64 hexadecimal digits); delete it to record a new one")
    return found[0]


def _transfer(url: str, part: Path, wanted: str | None, size: int | None, on_progress: Progress) -> None:
    """Completes `part`, resuming where the connection broke."""
    on_progress(_num_bytes(part))
    failures = 0
    with _session() as session:
        while True:
            before = _num_bytes(part)
            with _request(session, url, part, wanted) as response:  # whose errors are final: urllib3 tries again
                try:
                    return _receive(response, part, size, on_progress)
                except requests.RequestException:
                    failures = 0 if _num_bytes(part) >= before + GROWTH_BYTES else failures + 1
                    if failures > RETRIES:
                        raise


def _request(session: requests.Session, url: str, part: Path, wanted: str | None) -> requests.Response:
    """The response to a request for what `part` lacks."""
    headers = {"Accept-Encoding": "identity"}
    validator = _note(part).read_text(errors="replace") if _note(part).exists() else ""
    # without hash and validator nothing could tell a mixture of two versions from the file
    if _num_bytes(part) and (wanted or validator):
        headers["Range"] = f"bytes={_num_bytes(part)}-"
        if validator:
            headers["If-Range"] = validator
    response = session.get(url, headers=headers, stream=True, timeout=TIMEOUT)
    if response.status_code not in (200, 206, 416):
        raise requests.HTTPError(f"HTTP status {response.status_code} {response.reason}".rstrip())
    return response


def _receive(response: requests.Response, part: Path, size: int | None, on_progress: Progress) -> None:
    """Writes what arrives to `part`; raises requests' errors where the connection breaks."""
    headers, offset = response.headers, _num_bytes(part)
    content_range = headers.get("Content-Range", "")
    if response.status_code == 416 and content_range == f"bytes */{offset}":
        return  # everything had arrived already
    if response.status_code != 200 and not (
        response.status_code == 206 and content_range.startswith(f"bytes {offset}-")
    ):
        part.unlink(missing_ok=True)
        on_progress(-offset)
        raise requests.RequestException(f"the server sent something else than the bytes from {offset} on")
    name = part.name.removesuffix(".part")
    if headers.get("Content-Type", "").startswith("text/html") and name.lower().endswith(ARCHIVE_SUFFIXES):
        raise ValueError(
            f"a web page arrived where {name} was expected, probably a login or error page; open the address in a "
            f"browser and put the file at {part.with_name(name)}"
        )
    if response.status_code == 200:
        on_progress(-offset)
        offset = 0
    length = headers.get("Content-Length", "")
    if size is not None and length.isdecimal() and offset + int(length) != size:
        raise ValueError(f"the server has {offset + int(length)} bytes, expected {size}: it is another file")
    with part.open("ab" if offset else "wb") as output:
        # after the old bytes are gone: they must not be taken for the beginning of the new file
        _note(part).write_text(_validator(headers))
        for chunk in response.iter_content(CHUNK_BYTES):
            output.write(chunk)
            on_progress(len(chunk))


def _session() -> requests.Session:
    """Tries again after refused connections and passing errors; follows redirects, but not to what is unencrypted."""
    retry = Retry(
        RETRIES,
        status_forcelist=PASSING_STATUS,
        raise_on_status=False,
        backoff_factor=BACKOFF,
        backoff_max=MAX_PAUSE,
        retry_after_max=MAX_PAUSE,
    )
    session = requests.Session()
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    session.hooks["response"].append(_refuse_downgrade)
    session.headers["User-Agent"] = "cheem_jax"
    return session


def _refuse_downgrade(response: requests.Response, **options: object) -> None:
    """Not from https to http: on the way from there anybody could change the file."""
    target = urljoin(response.url, response.headers.get("Location", ""))
    if response.is_redirect and response.url.startswith("https:") and not target.startswith("https:"):
        raise ValueError(f"it leads to {target}, which is not encrypted; download the file by hand")


def _validator(headers: Mapping[str, str]) -> str:
    """What the server says about the version of the file; If-Range takes no weak ETag."""
    etag = headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")


def _note(part: Path) -> Path:
    """Contains the validator of the file that `part` is the beginning of."""
    return part.with_name(f"{part.name}.version")


def _num_bytes(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0
