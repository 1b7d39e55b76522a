"""Download archives over HTTP. The library `requests` transfers the bytes and retries; `pooch`
verifies the hash and renames the file.

`pooch` alone would restart after a broken connection. This module resumes instead, because archives
can have several GB. The known hash detects a file whose parts are from different versions.
"""

import functools
import os
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pooch
import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from cheem_jax.data.decode import OnProgress

TIMEOUT = 30.0
"""Seconds without data after which an attempt fails."""
RETRIES = 4
"""Number of consecutive failed attempts that are retried; one more failure ends the download."""
BACKOFF = 1.0
"""Factor of the pauses between attempts. urllib3 does not pause before the first retry; before the
n-th retry (n > 1), it pauses for BACKOFF * 2^(n - 1) seconds."""
MAX_PAUSE = 120
"""Maximum pause in seconds that a server can request (Retry-After)."""
CHUNK_BYTES = 2**16
GROWTH_BYTES = 2**20  # an attempt that received this many bytes resets the count of failures
PASSING_STATUS = (408, 425, 429, *range(500, 600))


def download(
    url: str, file: Path, known_hash: str, *, on_progress: OnProgress = lambda num: None
) -> None:
    """Download `url` to `file`, which must not exist; `known_hash` is a SHA-256, or `md5:` followed
    by an MD5.

    Received bytes stay in `<file>.part`, and a later call resumes after these bytes. Only one
    process at a time is allowed to download a file. `on_progress` is called with the number of
    bytes received, and with a negative number if bytes have to be downloaded again. Raises
    ValueError if the hash differs, and OSError if the file cannot be downloaded or written. After
    an error, `file` does not exist.
    """
    part = file.with_name(f"{file.name}.part")
    transfer: Any = functools.partial(_transfer, part, on_progress)
    # otherwise, pooch would print addresses and hashes between the progress lines
    pooch.get_logger().setLevel("WARNING")
    try:
        pooch.retrieve(url, known_hash, file.name, file.parent, downloader=transfer)
    except (requests.RequestException, HTTPError) as error:
        raise OSError(
            f"{url} cannot be downloaded: {error}. Try again later to resume at byte"
            f" {_num_bytes(part)}, or download the file yourself to {file}"
        ) from error
    except OSError as error:
        raise OSError(
            f"cannot write {file}: {error.strerror or error}; free disk space, or choose a writable"
            " folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error


def _transfer(part: Path, on_progress: OnProgress, url: str, output_file: str, _: object) -> None:
    """Complete `part`, resuming after broken connections, and rename it to pooch's temporary
    file."""
    on_progress(_num_bytes(part))
    failures = 0
    with _session() as session:
        while True:
            before = _num_bytes(part)
            headers = {"Accept-Encoding": "identity"} | (
                {"Range": f"bytes={before}-"} if before else {}
            )
            # a failed request is final, because urllib3 has already retried it
            with session.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
                if response.status_code not in (200, 206, 416):
                    raise requests.HTTPError(
                        f"HTTP status {response.status_code} {response.reason}".rstrip()
                    )
                try:
                    _receive(response, part, on_progress)
                    return os.replace(part, output_file)
                except requests.RequestException:
                    failures = 0 if _num_bytes(part) >= before + GROWTH_BYTES else failures + 1
                    if failures > RETRIES:
                        raise


def _receive(response: requests.Response, part: Path, on_progress: OnProgress) -> None:
    """Write received bytes to `part`. Raises the errors of `requests` if the connection breaks."""
    offset = _num_bytes(part)
    content_range = response.headers.get("Content-Range", "")
    if response.status_code == 416 and content_range == f"bytes */{offset}":
        return  # the file is complete
    resumes = response.status_code == 206 and content_range.startswith(f"bytes {offset}-")
    if not resumes:
        on_progress(-offset)
    if response.status_code != 200 and not resumes:
        part.unlink(missing_ok=True)
        raise requests.RequestException(f"the server did not send the bytes starting at {offset}")
    if response.headers.get("Content-Type", "").startswith("text/html"):
        raise ValueError(
            "the server sent a web page instead of an archive, probably a login or error page;"
            f" open the address in a browser and save the file as {part.with_suffix('')}"
        )
    with part.open("ab" if resumes else "wb") as output:
        for chunk in response.iter_content(CHUNK_BYTES):
            output.write(chunk)
            on_progress(len(chunk))


def _session() -> requests.Session:
    """Create a session that retries after refused connections and temporary errors, and refuses
    redirects to unencrypted addresses."""
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
    """Refuse a redirect from https to http, which would allow anybody on the network to change the
    file."""
    target = urljoin(response.url, response.headers.get("Location", ""))
    if (
        response.is_redirect
        and response.url.startswith("https:")
        and not target.startswith("https:")
    ):
        raise ValueError(
            f"it redirects to {target}, which is not encrypted; download the file yourself"
        )


def _num_bytes(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0
