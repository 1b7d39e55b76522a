"""Downloads from a real server on loopback, which misbehaves as told."""

import hashlib
import threading
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cheem_jax.data.benchmarks import download as module
from cheem_jax.data.benchmarks.download import download
from cheem_jax.data.benchmarks.origins import OWN

BODY = bytes(range(256)) * 4096 * 3  # 3 MiB
SHA256, MD5 = hashlib.sha256(BODY).hexdigest(), hashlib.md5(BODY).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `body`; each of `faults` answers one request in its place, first come first served."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.etag = BODY, '"one"'
        self.content_type, self.ranges, self.sized = "application/zip", True, True
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
        start, wanted = 0, self.headers["Range"]
        if wanted and server.ranges and self.headers["If-Range"] in (None, server.etag):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(server.body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.body)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
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


class Pauses(list):
    """A sleep that does not, and remembers."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_a_plain_download_leaves_the_file_alone_and_is_not_repeated(server, tmp_path):
    file, seen = tmp_path / "sub" / "images.zip", []
    result = download(
        server.url, file, sha256=SHA256.upper(), md5=MD5, size=len(BODY), on_progress=lambda *x: seen.append(x)
    )
    assert result == SHA256 and file.read_bytes() == BODY and names(file.parent) == ["images.zip"]
    assert seen[-1] == (len(BODY), len(BODY)) and seen == sorted(seen)
    assert download(server.url, file, sha256=SHA256) == SHA256
    assert download(server.url, file, md5=MD5) == SHA256
    assert server.requested == [None]


def test_a_body_without_a_length_ends_with_the_connection(server, tmp_path):
    server.sized, seen = False, []
    assert download(server.url, tmp_path / "a.zip", on_progress=lambda *x: seen.append(x)) == SHA256
    assert seen[-1] == (len(BODY), 0)


def test_a_cut_connection_is_resumed_where_it_broke(server, tmp_path):
    server.faults, pauses = [cut_after(1_000_000), cut_after(1_500_000)], Pauses()
    assert download(server.url, tmp_path / "a.zip", sleep=pauses) == SHA256
    assert server.requested == [None, "bytes=1000000-", "bytes=1500000-"]
    assert pauses == [1, 2]


def test_a_later_call_goes_on_from_the_part_of_an_earlier_one(server, tmp_path):
    file, server.faults = tmp_path / "a.zip", [cut_after(1_000_000)]
    with pytest.raises(OSError, match=r"after 1000000 of 3145728 bytes, 1 times.*from byte 1000000.*by hand"):
        download(server.url, file, retries=0)
    assert names(tmp_path) == ["a.zip.part", "a.zip.part.json"]
    assert download(server.url, file) == SHA256 and server.requested[-1] == "bytes=1000000-"
    assert names(tmp_path) == ["a.zip", "a.zip.sha256"]


def test_retries_count_failures_without_headway(server, tmp_path):
    server.body = BODY * 3
    server.faults = [cut_after(end * 2**20) for end in range(1, 9)]
    download(server.url, tmp_path / "a.zip", retries=1, sleep=Pauses())
    assert len(server.requested) == 9 and (tmp_path / "a.zip").read_bytes() == BODY * 3


def test_a_server_that_ignores_ranges_sends_all_again(server, tmp_path):
    server.ranges, server.faults = False, [cut_after(1_000_000)]
    assert download(server.url, tmp_path / "a.zip", sleep=Pauses()) == SHA256
    assert server.requested == [None, "bytes=1000000-"]


@pytest.mark.parametrize(("known", "second"), [(None, None), (SHA256, "bytes=1000000-")])
def test_without_a_validator_only_a_known_hash_allows_going_on(server, tmp_path, known, second):
    server.etag, server.faults = None, [cut_after(1_000_000)]
    assert download(server.url, tmp_path / "a.zip", sha256=known, sleep=Pauses()) == SHA256
    assert server.requested == [None, second]


def test_a_file_that_changed_meanwhile_starts_anew(server, tmp_path):
    file, server.faults = tmp_path / "a.zip", [cut_after(1_000_000)]
    with pytest.raises(OSError):
        download(server.url, file, retries=0)
    server.body, server.etag = BODY[::-1], '"two"'
    download(server.url, file)
    assert file.read_bytes() == BODY[::-1] and server.requested[-1] == "bytes=1000000-"


def test_the_part_of_another_address_is_not_continued(server, tmp_path):
    file, server.faults = tmp_path / "a.zip", [cut_after(1_000_000)]
    with pytest.raises(OSError):
        download(server.url, file, retries=0)
    assert download(server.url + "?version=2", file) == SHA256 and server.requested[-1] is None


def test_a_wrong_content_range_starts_anew(server, tmp_path):
    wrong = status(206, Content_Range=f"bytes 5-{len(BODY) - 1}/{len(BODY)}")
    server.faults = [cut_after(1_000_000), wrong]
    assert download(server.url, tmp_path / "a.zip", sleep=Pauses()) == SHA256
    assert server.requested == [None, "bytes=1000000-", None]


def test_a_part_that_is_complete_already_only_gets_its_name(server, tmp_path):
    file, server.faults = tmp_path / "a.zip", [cut_after(1_000_000)]
    with pytest.raises(OSError):
        download(server.url, file, retries=0)
    (tmp_path / "a.zip.part").write_bytes(BODY)
    assert download(server.url, file) == SHA256 and server.requested[-1] == f"bytes={len(BODY)}-"


def test_a_part_that_is_too_long_or_damaged_is_fetched_once_more(server, tmp_path):
    for damaged in (BODY + b"x", bytes(1_000_000)):
        file, server.faults = tmp_path / "a.zip", [cut_after(1_000_000)]
        with pytest.raises(OSError):
            download(server.url, file, retries=0)
        (tmp_path / "a.zip.part").write_bytes(damaged)
        assert download(server.url, file, sha256=SHA256, sleep=Pauses()) == SHA256 and server.requested[-1] is None
        file.unlink()


def test_an_unreadable_memory_of_the_part_starts_anew(server, tmp_path):
    (tmp_path / "a.zip.part").write_bytes(b"old")
    (tmp_path / "a.zip.part.json").write_text('{"url": ')
    assert download(server.url, tmp_path / "a.zip") == SHA256


def test_a_wrong_hash_names_both_and_keeps_nothing(server, tmp_path):
    with pytest.raises(ValueError, match=f"SHA-256 is {SHA256}, expected 0{{64}}.*MD5 is {MD5}.*call again"):
        download(server.url, tmp_path / "a.zip", sha256="0" * 64, md5="1" * 32)
    assert names(tmp_path) == [] and len(server.requested) == 1


def test_a_wrong_size_is_known_before_the_body(server, tmp_path):
    with pytest.raises(ValueError, match="has 3145728 bytes on the server, expected 7"):
        download(server.url, tmp_path / "a.zip", size=7)
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [403, 404, 410])
def test_a_missing_file_is_not_asked_for_again(server, tmp_path, code):
    server.faults = [status(code)]
    with pytest.raises(OSError, match=rf"images.zip cannot be downloaded: HTTP status {code} .*put it at .*a.zip"):
        download(server.url, tmp_path / "a.zip", sleep=Pauses())
    assert len(server.requested) == 1


def test_a_busy_server_is_asked_again_when_it_says(server, tmp_path):
    date = formatdate(0, usegmt=True)  # gone by
    server.faults = [
        status(503), status(503, Retry_After="7"), status(429, Retry_After="99999"), status(500, Retry_After=date),
    ]  # fmt: skip
    pauses = Pauses()
    assert download(server.url, tmp_path / "a.zip", sleep=pauses) == SHA256
    assert pauses == [1, 7, 120, 0]


def test_a_hanging_server_ends_in_a_timeout(server, tmp_path):
    server.faults, pauses = [hang, hang_after(1000), hang], Pauses()
    with pytest.raises(TimeoutError, match="no answer within the timeout, 3 times in a row.*from byte 1000"):
        download(server.url, tmp_path / "a.zip", timeout=0.1, retries=2, sleep=pauses)
    assert pauses == [1, 2]


def test_a_port_where_nothing_listens_is_a_clear_error(tmp_path):
    with Server() as gone:
        url = gone.url
    with pytest.raises(OSError, match="ConnectionRefusedError.*2 times in a row"):
        download(url, tmp_path / "a.zip", retries=1, sleep=Pauses())


def test_a_web_page_is_no_archive(server, tmp_path):
    server.content_type = "text/html; charset=utf-8"
    with pytest.raises(ValueError, match="web page where a.tar.gz was expected, probably a login"):
        download(server.url, tmp_path / "a.tar.gz")
    assert names(tmp_path) == []
    assert download(server.url, tmp_path / "page.html") == SHA256


def test_a_file_without_a_known_hash_is_held_to_its_first_one(server, tmp_path):
    file = tmp_path / "a.zip"
    download(server.url, file)
    assert (tmp_path / "a.zip.sha256").read_text() == f"{SHA256}  a.zip\n"
    assert download(server.url, file) == SHA256 and len(server.requested) == 1
    file.write_bytes(b"other")
    with pytest.raises(ValueError, match="left as it is; move it away.*delete .*a.zip.sha256"):
        download(server.url, file)
    file.unlink()
    server.body = BODY[::-1]
    with pytest.raises(ValueError, match=f"expected {SHA256} .*a.zip.sha256"):
        download(server.url, file)
    assert names(tmp_path) == ["a.zip.sha256"]
    (tmp_path / "a.zip.sha256").write_text("?")
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        download(server.url, file)


def test_a_file_put_there_by_hand_is_accepted_and_remembered(server, tmp_path):
    (tmp_path / "a.zip").write_bytes(b"by hand")
    digest = download(server.url, tmp_path / "a.zip")
    assert digest == hashlib.sha256(b"by hand").hexdigest() and server.requested == []
    assert (tmp_path / "a.zip.sha256").read_text().startswith(digest)


def test_a_wrong_file_that_exists_is_named_and_kept(server, tmp_path):
    file = tmp_path / "a.zip"
    file.write_bytes(b"mine")
    with pytest.raises(ValueError, match=rf"a.zip is not the wanted file: it has 4 bytes.*expected {SHA256}"):
        download(server.url, file, sha256=SHA256, size=len(BODY))
    assert file.read_bytes() == b"mine" and server.requested == []


def test_a_place_that_cannot_be_written_is_a_clear_error(server, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OSError, match="cannot write .*taken/a.zip.part.*choose a folder"):
        download(server.url, tmp_path / "taken" / "a.zip")
    with pytest.raises(ValueError, match="is no file"):
        download(server.url, tmp_path)
    assert server.requested == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_full_disk_is_a_clear_error(server, tmp_path):
    (tmp_path / "a.zip.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device; make room"):
        download(server.url, tmp_path / "a.zip")


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://host/a.zip", "images.zip", "http:///a.zip"])
def test_only_web_addresses_are_fetched(tmp_path, url):
    with pytest.raises(ValueError, match="begins with http:// or https://"):
        download(url, tmp_path / "a.zip")


def test_a_redirect_is_followed_but_not_to_a_local_file(server, tmp_path):
    server.faults = [status(302, Location=server.url + "/moved here")]
    assert download(server.url, tmp_path / "a.zip") == SHA256
    server.faults = [status(302, Location="file:///etc/hostname")]
    with pytest.raises(OSError, match="302"):
        download(server.url, tmp_path / "b.zip", retries=0)


def test_every_registered_address_is_encrypted_and_all_but_one_file_have_a_hash():
    archives = [archive for known in OWN.values() for archive in known]
    assert all(archive.url is None or archive.url.startswith("https://") for archive in archives)
    # its publisher tells no hash; the first download's is kept beside it
    assert [a.file for a in archives if a.sha256 is None and a.md5 is None] == ["fgvc-aircraft-2013b.tar.gz"]


def test_an_encrypted_address_does_not_lead_to_one_that_is_not():
    redirects = module._Redirects()
    request = urllib.request.Request("https://example.org/a.zip")
    with pytest.raises(ValueError, match="leads to http://example.org/b.zip, which is not encrypted"):
        redirects.redirect_request(request, None, 302, "Found", Message(), "http://example.org/b.zip")
    assert redirects.redirect_request(request, None, 302, "Found", Message(), "https://example.org/b.zip")


@pytest.mark.parametrize("memo", ["[" * 100_000, '{"url": 1, "validator": {}, "total": []}', "[1, 2, 3]", "\xff"])
def test_a_note_beside_a_partial_file_that_makes_no_sense_is_left_out(tmp_path, memo):
    part = tmp_path / "a.zip.part"
    part.with_name("a.zip.part.json").write_bytes(memo.encode("latin-1"))
    assert module._recall(part) is None


def test_a_hash_file_that_is_no_text_is_told(tmp_path):
    (tmp_path / "a.zip.sha256").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"a\.zip\.sha256 holds no SHA-256"):
        download("https://example.org/a.zip", tmp_path / "a.zip")


@pytest.mark.parametrize("value", ["²", "9" * 5000, "Mon, 01 Jan 0001 00:00:00", "Fri, 31 Dec 9999 23:59:59 -9999"])
def test_a_wait_that_makes_no_sense_raises_nothing(value):
    pause = module._retry_after(value)
    assert pause is None or pause >= 0
