"""Downloads from a loopback server, which misbehaves as ordered."""

import hashlib
import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import urllib3

from cheem_jax.data.benchmarks import download as module
from cheem_jax.data.benchmarks.download import download
from cheem_jax.data.benchmarks.table import TASKS

BODY = bytes(range(256)) * 4096 * 3  # 3 MiB
CUT = 15 * 2**16
"""Positions at which connections break: after whole chunks, since the rest of one is lost."""
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `data`; each of `faults` answers one request instead, in order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = BODY
        self.etag = '"one"'
        self.content_type = "application/zip"
        self.ranges = True
        self.sized = True
        self.faults: list[Callable[[Handler], None]] = []
        self.requested: list[str | None] = []  # the Range of each request
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/images.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requested.append(self.headers["Range"])
        if self.server.faults:
            self.server.faults.pop(0)(self)
        else:
            self.send()

    def send(self, until: int | None = None) -> None:
        server = self.server
        start = 0
        wanted = self.headers["Range"]
        if wanted and server.ranges and self.headers["If-Range"] in (None, server.etag):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(server.body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.body)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header(
                "Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}"
            )
        if server.sized:
            self.send_header("Content-Length", str(len(server.body) - start))
        self.send_header("Content-Type", server.content_type)
        if server.etag:
            self.send_header("ETag", server.etag)
        self.end_headers()
        self.wfile.write(server.body[start:until])

    def log_message(self, format: str, *args) -> None:
        pass


def cut_after(num_bytes: int) -> Callable[[Handler], None]:
    return lambda handler: handler.send(until=num_bytes)


def status(code: int, **headers: str) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    return answer


def hang(handler: Handler) -> None:
    handler.server.released.wait(20)


def hang_after(num_bytes: int) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        handler.send(until=num_bytes)
        handler.wfile.flush()
        hang(handler)

    return answer


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Wait only if a test is about waiting."""
    monkeypatch.setattr(module, "BACKOFF", 0)


def interrupted(server: Server, file: Path) -> None:
    """Start a download whose connection breaks for good after `CUT` bytes."""
    server.faults = [cut_after(CUT)] + [cut_after(0)] * 9
    with pytest.raises(
        OSError,
        match=rf"images.zip cannot be downloaded: .*to resume at byte {CUT}.*download the file",
    ):
        download(server.url, file, SHA256)
    server.faults.clear()
    server.requested.clear()


def test_a_plain_download_leaves_the_file_alone_and_reports_its_bytes(server, tmp_path):
    file = tmp_path / "sub" / "images.zip"
    progress = []
    download(server.url, file, SHA256.upper(), on_progress=progress.append)
    assert file.read_bytes() == BODY
    assert names(file.parent) == ["images.zip"]
    assert sum(progress) == len(BODY)
    download(server.url, tmp_path / "b.zip", f"md5:{MD5}")
    assert server.requested == [None, None]


def test_a_body_without_a_length_ends_with_the_connection(server, tmp_path):
    server.sized = False
    progress = []
    download(server.url, tmp_path / "a.zip", SHA256, on_progress=progress.append)
    assert (tmp_path / "a.zip").read_bytes() == BODY and sum(progress) == len(BODY)


def test_a_cut_connection_is_resumed_where_it_broke(server, tmp_path):
    server.faults, progress = [cut_after(CUT), cut_after(2 * CUT)], []
    download(server.url, tmp_path / "a.zip", SHA256, on_progress=progress.append)
    assert server.requested == [None, f"bytes={CUT}-", f"bytes={2 * CUT}-"]
    assert sum(progress) == len(BODY)


def test_a_later_call_resumes_an_interrupted_download(server, tmp_path):
    file = tmp_path / "a.zip"
    progress = []
    interrupted(server, file)
    assert names(tmp_path) == ["a.zip.part"]
    download(server.url, file, SHA256, on_progress=progress.append)
    assert server.requested == [f"bytes={CUT}-"]
    assert file.read_bytes() == BODY
    assert sum(progress) == len(BODY)
    assert names(tmp_path) == ["a.zip"]


def test_an_interrupted_download_leaves_no_file_and_is_resumed(server, tmp_path):
    def ctrl_c(num: int) -> None:
        if (tmp_path / "a.zip.part").stat().st_size > 2**20:
            raise KeyboardInterrupt

    server.faults = [cut_after(2**20 + 2**19)]
    with pytest.raises(KeyboardInterrupt):
        download(
            server.url, tmp_path / "a.zip", SHA256, on_progress=lambda num: num and ctrl_c(num)
        )
    assert names(tmp_path) == ["a.zip.part"]
    download(server.url, tmp_path / "a.zip", SHA256)
    assert server.requested[-1] is not None and (tmp_path / "a.zip").read_bytes() == BODY


def test_retries_count_failures_without_headway(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RETRIES", 1)
    server.body = BODY * 3
    server.faults = [cut_after(end * 2**20 + 2**16) for end in range(1, 9)]
    download(server.url, tmp_path / "a.zip", hashlib.sha256(BODY * 3).hexdigest())
    assert len(server.requested) == 9 and (tmp_path / "a.zip").read_bytes() == BODY * 3


def test_a_server_that_ignores_ranges_sends_all_again(server, tmp_path):
    server.ranges = False
    server.faults = [cut_after(CUT)]
    progress = []
    download(server.url, tmp_path / "a.zip", SHA256, on_progress=progress.append)
    assert server.requested == [None, f"bytes={CUT}-"] and sum(progress) == len(BODY)


def test_a_mixture_of_two_versions_is_reported_and_the_next_call_starts_again(server, tmp_path):
    file = tmp_path / "a.zip"
    interrupted(server, file)
    server.body = BODY[::-1]
    with pytest.raises(ValueError, match="does not match the known hash"):
        download(server.url, file, hashlib.sha256(server.body).hexdigest())
    assert names(tmp_path) == []
    download(server.url, file, hashlib.sha256(server.body).hexdigest())
    assert server.requested == [f"bytes={CUT}-", None] and file.read_bytes() == BODY[::-1]


def test_a_wrong_content_range_starts_again(server, tmp_path):
    wrong = status(206, Content_Range=f"bytes 5-{len(BODY) - 1}/{len(BODY)}")
    server.faults = [cut_after(CUT), wrong]
    download(server.url, tmp_path / "a.zip", SHA256)
    assert server.requested == [None, f"bytes={CUT}-", None]


def test_a_part_that_is_complete_already_only_gets_its_name(server, tmp_path):
    file = tmp_path / "a.zip"
    interrupted(server, file)
    (tmp_path / "a.zip.part").write_bytes(BODY)
    download(server.url, file, SHA256)
    assert file.read_bytes() == BODY and server.requested == [f"bytes={len(BODY)}-"]


def test_a_part_that_is_too_long_is_downloaded_again(server, tmp_path):
    (tmp_path / "a.zip.part").write_bytes(BODY + b"x")
    download(server.url, tmp_path / "a.zip", SHA256)
    assert server.requested == [f"bytes={len(BODY) + 1}-", None]
    assert (tmp_path / "a.zip").read_bytes() == BODY


def test_a_corrupted_part_is_reported_and_the_next_call_starts_again(server, tmp_path):
    (tmp_path / "a.zip.part").write_bytes(bytes(CUT))
    with pytest.raises(ValueError, match="does not match the known hash"):
        download(server.url, tmp_path / "a.zip", SHA256)
    assert names(tmp_path) == []
    download(server.url, tmp_path / "a.zip", SHA256)
    assert server.requested == [f"bytes={CUT}-", None]


def test_a_wrong_hash_names_both_and_keeps_nothing(server, tmp_path):
    with pytest.raises(
        ValueError, match=f"images.zip: MD5 hash .*expected md5:1{{32}} but got {MD5}"
    ):
        download(server.url, tmp_path / "a.zip", f"md5:{'1' * 32}")
    assert names(tmp_path) == [] and len(server.requested) == 1


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_a_refused_file_is_not_asked_for_again(server, tmp_path, code):
    server.faults = [status(code)]
    with pytest.raises(
        OSError,
        match=rf"images.zip cannot be downloaded: HTTP status {code} .*yourself to .*a.zip",
    ):
        download(server.url, tmp_path / "a.zip", SHA256)
    assert len(server.requested) == 1 and names(tmp_path) == []


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server_is_asked_again(server, tmp_path, code):
    server.faults = [status(code)] * module.RETRIES
    download(server.url, tmp_path / "a.zip", SHA256)
    server.faults = [status(code)] * 9
    with pytest.raises(OSError, match=f"images.zip cannot be downloaded: HTTP status {code}"):
        download(server.url, tmp_path / "b.zip", SHA256)


def test_a_download_waits_as_long_as_the_server_asks_up_to_a_limit(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PAUSE", 5)
    pauses = []
    clock = SimpleNamespace(sleep=pauses.append, time=time.time)
    monkeypatch.setattr("urllib3.util.retry.time", clock)  # the clock of this module alone
    date = formatdate(0, usegmt=True)  # in the past
    server.faults = [
        status(503, Retry_After="1"),
        status(429, Retry_After="99999"),
        status(500, Retry_After=date),
    ]
    download(server.url, tmp_path / "a.zip", SHA256)
    assert pauses == [1, 5] and len(server.requested) == 4


def test_a_hanging_server_ends_in_an_error(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.1)
    monkeypatch.setattr(module, "RETRIES", 2)
    server.faults = [hang] * 9
    with pytest.raises(OSError, match="cannot be downloaded: .*timed out"):
        download(server.url, tmp_path / "a.zip", SHA256)
    server.faults = [hang_after(200_000)] * 9
    with pytest.raises(OSError, match="cannot be downloaded: .*timed out"):
        download(server.url, tmp_path / "a.zip", SHA256)
    assert not (tmp_path / "a.zip").exists()


def test_a_port_without_a_server_is_a_clear_error(tmp_path):
    with Server() as gone:
        url = gone.url
    with pytest.raises(OSError, match="cannot be downloaded: .*Connection refused"):
        download(url, tmp_path / "a.zip", SHA256)


def test_a_web_page_is_no_archive(server, tmp_path):
    server.content_type = "text/html; charset=utf-8"
    with pytest.raises(
        ValueError, match=r"the server sent a web page instead of an archive.*a\.tar\.gz"
    ):
        download(server.url, tmp_path / "a.tar.gz", SHA256)
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_is_a_clear_error(server, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OSError, match="cannot write .*taken/a.zip.*choose a writable folder"):
        download(server.url, tmp_path / "taken" / "a.zip", SHA256)
    assert server.requested == []


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="the device that is always full is Linux's"
)
def test_a_full_disk_is_a_clear_error(server, tmp_path):
    (tmp_path / "a.zip.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device; free disk space"):
        download(server.url, tmp_path / "a.zip", SHA256)


@pytest.mark.parametrize(
    "url", ["file:///etc/hostname", "ftp://host/a.zip", "images.zip", "http:///a.zip"]
)
def test_only_web_addresses_are_downloaded(tmp_path, url):
    with pytest.raises(
        (ValueError, OSError), match="cannot be downloaded: (No connection adapters|Invalid URL)"
    ):
        download(url, tmp_path / "a.zip", SHA256)


def test_a_redirect_is_followed_but_not_to_a_local_file(server, tmp_path):
    server.faults = [status(302, Location=server.url + "/moved here")]
    download(server.url, tmp_path / "a.zip", SHA256)
    server.faults = [status(302, Location="file:///etc/hostname")]
    with pytest.raises(OSError, match="file:///etc/hostname"):
        download(server.url, tmp_path / "b.zip", SHA256)


def test_every_registered_address_is_encrypted_and_every_file_from_there_has_a_hash():
    archives = [archive for task in TASKS for archive in task.archives]
    assert all(archive.url is None or archive.url.startswith("https://") for archive in archives)
    hashes = [archive.hash for archive in archives if archive.hash or archive.url]
    assert all(re.fullmatch("[0-9a-f]{64}|md5:[0-9a-f]{32}", value) for value in hashes)


@pytest.mark.parametrize(
    "target", ["http://example.org/b.zip", "file:///etc/hostname", "//example.org/b.zip"]
)
def test_an_encrypted_address_does_not_lead_to_one_that_is_not(tmp_path, monkeypatch, target):
    asked = []

    def send(adapter, request, **options):
        asked.append(request.url)
        status, headers = (302, {"Location": target}) if len(asked) == 1 else (200, {})
        raw = urllib3.HTTPResponse(io.BytesIO(BODY), headers, status, preload_content=False)
        return adapter.build_response(request, raw)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    if target.startswith("//"):  # the same scheme
        return download("https://example.org/a.zip", tmp_path / "a.zip", SHA256)
    with pytest.raises(
        ValueError, match=f"a.zip: it redirects to {target}, which is not encrypted"
    ):
        download("https://example.org/a.zip", tmp_path / "a.zip", SHA256)
    assert asked == ["https://example.org/a.zip"] and names(tmp_path) == []


@pytest.mark.parametrize(
    "value", ["²", "9" * 5000, "Mon, 01 Jan 0001 00:00:00", "Fri, 31 Dec 9999 23:59:59 -9999"]
)
def test_a_wait_that_makes_no_sense_is_a_clear_error_or_none(server, tmp_path, monkeypatch, value):
    monkeypatch.setattr(module, "MAX_PAUSE", 0)
    server.faults = [
        lambda handler: handler.wfile.write(
            f"HTTP/1.1 503 Busy\r\nRetry-After: {value}\r\nContent-Length: 0\r\n\r\n".encode()
        )
    ]
    try:
        download(server.url, tmp_path / "a.zip", SHA256)
    except (ValueError, OSError) as error:
        assert str(error).startswith(server.url)
