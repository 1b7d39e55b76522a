"""The server over real connections: every client its own answer, and every bad request a
sentence."""

import contextlib
import io
import json
import logging
import os
import re
import signal
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import small
from PIL import Image
from pixels import large_png, png_chunk
from serving import (
    COLOURS,
    Colours,
    Served,
    ask,
    behind_a_proxy,
    name_of,
    picture,
    serving,
    wait_until,
)

from cheem_jax.cheem.expert_memory import TaskNetworks
from cheem_jax.cli.arguments import parse
from cheem_jax.cli.ask import Serve, serve_memory
from cheem_jax.cli.running import run_command
from cheem_jax.core.architecture import Choice
from cheem_jax.core.pool import DenseExperts, Head, TaskMemory, base_pool
from cheem_jax.core.routing import RouterConfig
from cheem_jax.data.decode import decode_image
from cheem_jax.engine.choice import EngineConfig, make_executor
from cheem_jax.memory.predictor import Predictor
from cheem_jax.run import progress
from cheem_jax.serve import Limits, service
from cheem_jax.serve.app import host_names, listen, page
from cheem_jax.serve.service import Refused, decode
from experiments.bench import serving as serving_bench

RED, BLUE = (224, 32, 32), (32, 32, 224)


@pytest.fixture(scope="module")
def served():
    with serving(
        Colours(), Limits(max_body_mb=200_000 / 2**20, max_pixels=1_000_000, max_batch=8)
    ) as server:
        yield server


@pytest.fixture
def gated():
    """A predictor that answers once its gate is open, at the latest when the test ends."""
    predictor = Colours()
    predictor.gate.clear()
    yield predictor
    predictor.gate.set()


def form(
    *files: bytes, boundary: str = "cut", name: str = 'name="picture"; filename="a.png"'
) -> bytes:
    parts = [
        f"--{boundary}\r\nContent-Disposition: form-data; {name}\r\n\r\n".encode() + file
        for file in files
    ]
    return b"\r\n".join([*parts, f"--{boundary}--\r\n".encode()])


FORM = "multipart/form-data; boundary=cut"


def send(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(data)
    return connection


def received(connection: socket.socket) -> tuple[int, str]:
    """Return the status and everything else until the server closed the connection."""
    with contextlib.closing(connection):
        parts = []
        while part := connection.recv(2**16):
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def head(length: int) -> bytes:
    lines = (
        "POST /predict HTTP/1.1",
        "Host: localhost",
        "Content-Type: image/png",
        f"Content-Length: {length}",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def text_bomb() -> bytes:
    """Return an image of one pixel with a compressed note of 100 MB."""
    plain = picture(RED, (1, 1))
    note = png_chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(100_000_000), 9))
    return plain[:33] + note + plain[33:]  # behind the header


# ---- answers


def test_an_image_gets_its_task_its_class_and_the_blocks_that_ran(served: Served):
    answer = served.predict(picture(RED)).json
    assert answer["task"] == "bright red"
    assert answer["class"] == "224-32-32"
    assert answer["probability"] == 0.6
    assert [guess["probability"] for guess in answer["runners_up"]] == [0.3, 0.15, 0.075, 0.0375]
    assert answer["near"] == [
        {"task": "bright red", "distance": 32},
        {"task": "dark <b>red</b>", "distance": 160},
    ]
    assert answer["blocks"] == ["reuse:0", "reuse:0", "reuse:0", "adapt:0", "skip"]
    assert 0 < answer["seconds"] < 20


def test_an_image_of_no_task_says_so(served: Served):
    answer = served.predict(picture((0, 0, 0)), "application/octet-stream").json
    assert answer["task"] is None and answer["class"] is None and answer["blocks"] == []
    assert len(answer["near"]) == 2


def test_a_form_with_one_file_is_one_answer_and_with_several_a_list_in_their_order(served: Served):
    assert served.predict(form(picture(BLUE)), FORM).json["class"] == "32-32-224"
    colours = [RED, BLUE, (96, 160, 32)]
    result = served.predict(form(*map(picture, colours)), FORM).json
    assert [one["class"] for one in result["predictions"]] == [
        name_of(colour) for colour in colours
    ]
    assert [one["file"] for one in result["predictions"]] == ["a.png"] * 3
    assert result["seconds"] > 0


def test_a_form_in_an_unknown_charset_is_400(served: Served):
    answer = served.predict(form(picture(BLUE)), f"{FORM}; charset=undefined")
    assert answer.status == 400 and "the form cannot be read" in answer.json["error"]


@pytest.mark.parametrize("charset", ["unicode_escape", "utf-7"])
def test_a_name_that_a_charset_makes_a_surrogate_is_answered_with_a_question_mark(
    charset: str, served: Served
):
    name = "\\ud800.png" if charset == "unicode_escape" else "+2AA-.png"
    body = form(PNG, PNG, name=f'name="picture"; filename="{name}"')
    answer = served.predict(body, f"{FORM}; charset={charset}")
    assert [one["file"] for one in answer.json["predictions"]] == ["?.png"] * 2
    body = form(b"text", name=f'name="picture"; filename="{name}"')
    answer = served.predict(body, f"{FORM}; charset={charset}")
    assert answer.status == 400 and answer.json["error"].startswith("?.png: not an image file")


def test_of_several_files_a_bad_one_fails_alone(served: Served):
    files = (picture(RED), b"text", b"", large_png(2_000, 2_000), picture(BLUE))
    answer = served.predict(form(*files), FORM)
    result = answer.json["predictions"]
    assert answer.status == 200
    assert [one.get("class") for one in result] == [
        "224-32-32",
        None,
        None,
        None,
        "32-32-224",
    ]
    for one, said in zip(
        result[1:4], ("not an image file", "an empty file", "2000 x 2000 pixels"), strict=True
    ):
        assert one["file"] == "a.png" and one["error"].startswith(said)


def test_an_image_is_taken_as_curl_sends_it_without_a_content_type(served: Served):
    form_type = "application/x-www-form-urlencoded"
    assert served.predict(picture(RED), form_type).json["class"] == "224-32-32"
    refused = served.predict(b"a=1&b=2", form_type)
    assert refused.status == 400 and "not an image file" in refused.json["error"]


def test_concurrent_clients_each_get_the_answer_to_their_own_image(gated: Colours):
    with serving(gated, Limits(max_batch=8)) as served, ThreadPoolExecutor(32) as clients:
        colours = COLOURS[::2]
        answers = [clients.submit(served.predict, picture(colour)) for colour in colours]
        wait_until(lambda: served.service.num_images == 32)
        gated.gate.set()
        assert [answer.result().json["class"] for answer in answers] == [
            name_of(colour) for colour in colours
        ]
        assert sum(gated.sizes) == 32 and max(gated.sizes) <= 8
        wait_until(lambda: served.service.num_images == 0)
        for colour in COLOURS * 2:  # and one after the other
            assert served.predict(picture(colour)).json["class"] == name_of(colour)
        assert gated.sizes[-128:] == [1] * 128


def test_requests_that_waited_while_the_predictor_worked_are_answered_together(gated: Colours):
    with serving(gated, Limits(max_batch=8)) as served, ThreadPoolExecutor(12) as clients:
        first = clients.submit(served.predict, picture(RED))
        assert gated.entered.wait(20)
        others = [clients.submit(served.predict, picture(BLUE)) for _ in range(11)]
        wait_until(lambda: served.service._waiting.qsize() == 11)
        gated.gate.set()
        assert {answer.result().json["class"] for answer in others} == {"32-32-224"}
        assert first.result().json["class"] == "224-32-32"
        assert gated.sizes == [1, 8, 3]
        assert served.metric('cheem_batch_images_bucket{le="4.0"}') == 2


def test_a_real_predictor_answers_as_alone_and_compiles_nothing_after_warming_up():
    vit = small.backbone()
    rng = np.random.default_rng(0)
    executor = make_executor(vit, "mlp_down", EngineConfig(), batch_size=4)
    depth, width = small.CONFIG.depth, small.CONFIG.width
    targets = []
    for number, kinds in enumerate(("RRRR", "RSRR")):
        choices = tuple(
            Choice("reuse", 0) if kind == "R" else Choice("skip", None) for kind in kinds
        )
        head = Head(
            jnp.asarray(rng.normal(size=(width, 3)), jnp.float32),
            jnp.asarray(np.zeros(3, np.float32)),
        )
        experts = tuple(0 if kind == "R" else None for kind in kinds)
        centroids = rng.normal(size=(2, width))
        means = np.zeros((depth, width))
        targets.append(
            TaskMemory(f"t{number}", ("a", "b", "c"), choices, experts, head, means, centroids)
        )
    networks = TaskNetworks(DenseExperts(base_pool(vit.experts("mlp_down")), 0), targets)
    predictor = Predictor(executor, targets, networks, RouterConfig(), batch_sizes=(4,), top=2)
    files = [picture(colour) for colour in COLOURS[::5]]
    with serving(predictor, Limits(max_batch=4)) as served, ThreadPoolExecutor(13) as clients:
        answers = [answer.json for answer in clients.map(served.predict, files)]
        together = served.predict(form(*files[:3]), FORM).json["predictions"]
        assert served.metric("cheem_programs_since_warm_up") == 0
    alone = [predictor(decode_image(file, 8)[None])[0] for file in files]
    assert len({one.task for one in alone}) > 1
    for answer, one in zip([*answers, *together], [*alone, *alone[:3]], strict=True):
        assert (answer["task"], answer["class"], tuple(answer["blocks"])) == (
            one.task,
            one.label,
            one.blocks,
        )
        assert answer["probability"] == pytest.approx(one.probability, abs=1e-5)
        assert len(answer["runners_up"]) == 1 and len(answer["near"]) == 2


# ---- bad input

PNG = picture(RED)
HOSTILE = {
    "zero bytes": (b"", "image/png", 400, "an empty file is not an image"),
    "text": (b"once upon a time", "image/png", 400, "not an image file of a known format"),
    "half a JPEG": (picture(RED, (64, 64), "JPEG")[:400], "image/jpeg", 400, "cannot be decoded"),
    "100 megapixels": (
        large_png(10_000, 10_000),
        "image/png",
        413,
        "so many pixels are too many; send at most 1 mega",
    ),
    "4 megapixels": (large_png(2_000, 2_000), "image/png", 413, "2000 x 2000 pixels are too many"),
    "a text bomb": (text_bomb(), "image/png", 400, "cannot be decoded"),
    "a script": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "image/x-eps", 400, "not an image file"),
    "another type": (PNG, "text/plain", 415, "a body of type text/plain is not accepted"),
    "too large": (bytes(200_001), "image/png", 413, "the body is too large; send at most 0.19"),
    "a form without a boundary": (form(PNG), "multipart/form-data", 400, "the form cannot be read"),
    "a form of another boundary": (
        form(PNG),
        "multipart/form-data; boundary=other",
        400,
        "the form cannot be read",
    ),
    "an empty form": (b"--cut--\r\n", FORM, 400, "the form has no file"),
    "a form with text only": (
        form(b"cat", name='name="picture"'),
        FORM,
        400,
        "the form has no file",
    ),
    "a form with too many files": (form(*[PNG] * 9), FORM, 400, "Too many files"),
    "a form with an empty file": (form(b""), FORM, 400, "an empty file is not an image"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_invalid_image_is_answered_with_one_sentence_that_says_why(what: str, served: Served):
    body, kind, status, sentence = HOSTILE[what]
    answer = served.predict(body, kind)
    assert answer.status == status
    assert sentence in answer.json["error"]
    assert "\n" not in answer.json["error"]
    assert served.predict(PNG).json["class"] == "224-32-32"


def test_pixels_of_heic_are_counted_too():
    pillow_heif = pytest.importorskip("pillow_heif", reason="needs the extra `heic`")
    image = Image.fromarray(np.zeros((30, 40, 3), np.uint8))
    pillow_heif.from_pillow(image).save(file := io.BytesIO())
    with pytest.raises(Refused, match="40 x 30 pixels are too many") as refused:
        decode(file.getvalue(), 8, 1000, "the image", True)
    assert refused.value.status_code == 413
    assert decode(file.getvalue(), 8, 1200, "the image", True).shape == (8, 8, 3)


def test_pixels_of_an_image_that_is_too_large_are_never_made(monkeypatch):
    monkeypatch.setattr(service, "decode_image", None)  # a caller gets a TypeError
    for side in (1001, 10_000, 14_000):
        with pytest.raises(Refused, match="too many") as refused:
            decode(large_png(side, side), 8, 1_000_000, "the image", True)
        assert refused.value.status_code == 413
    with pytest.raises(TypeError):
        decode(large_png(1000, 1000), 8, 1_000_000, "the image", True)


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(served: Served):
    for length in (200_001, 10**15):
        connection = send(served.port, head(length))
        assert connection.recv(12) == b"HTTP/1.1 413"
        connection.close()


def test_a_body_in_chunks_is_cut_at_the_limit(served: Served):
    chunked = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"8000\r\n" + bytes(0x8000) + b"\r\n"
    connection = send(served.port, chunked + 7 * chunk)  # and no end
    assert connection.recv(12) == b"HTTP/1.1 413"
    connection.close()
    pieces = [PNG[:20], PNG[20:]]
    body = (
        b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
        + b"0\r\n\r\n"
    )
    connection = send(served.port, chunked.replace(b"Host", b"Connection: close\r\nHost") + body)
    assert json.loads(received(connection)[1])["class"] == "224-32-32"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100_000,
        head(5).replace(b"Length: 5", b"Length: five"),
        head(5).replace(b"Length: 5", b"Length: -5"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
    ids=["a huge header", "a length in words", "a negative length", "TLS"],
)
def test_invalid_http_ends_in_400(data: bytes, served: Served):
    assert received(send(served.port, data))[0] == 400
    assert served.predict(PNG).status == 200


@pytest.mark.parametrize(
    "path", ["/nope", "/predict/", "/../../etc/passwd", "/%2e%2e/etc/passwd", "/static/page.html"]
)
def test_unknown_paths_are_404_and_counted_as_one(path: str, served: Served):
    before = served.metric('cheem_requests_total{path="other",status="404"}')
    answer = served.ask("GET", path)
    assert answer.status == 404
    assert answer.json["error"].startswith("unknown path; expected one of /, /predict")
    assert served.metric('cheem_requests_total{path="other",status="404"}') == before + 1
    assert path not in served.ask("GET", "/metrics").body.decode()


def test_a_wrong_method_is_405_and_names_the_right_one(served: Served):
    answer = served.ask("GET", "/predict")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert "POST" in answer.json["error"]
    assert served.ask("POST", "/health", b"").status == 405
    assert "POST to /predict" in served.ask("POST", "/", b"").json["error"]


def test_another_host_name_is_refused_where_only_this_machine_can_ask(served: Served):
    assert served.ask("GET", "/health", Host="evil.example").status == 400
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000"):
        assert served.ask("GET", "/health", Host=host).status == 200
    with listen("0.0.0.0", 0) as listening:
        assert host_names(listening, "0.0.0.0") == ("*",)
        assert "pets.example.org" in host_names(listening, "0.0.0.0", ("Pets.example.org",))
        assert "*" not in host_names(listening, "0.0.0.0", ("pets.example.org",))


def test_a_refused_host_is_answered_with_the_setting_that_allows_it_and_is_counted(served: Served):
    counted = 'cheem_refused_total{reason="unknown_host"}'
    before = served.metric(counted)
    answer = served.ask("GET", "/health", Host="pets.example.org:8443")
    assert answer.status == 400
    assert answer.json["error"].startswith("'pets.example.org' is not a host name of this server")
    assert "--public-host" in answer.json["error"] and "`Host: localhost`" in answer.json["error"]
    assert served.metric(counted) == before + 1
    assert served.ask("GET", "/health", Host="evil.example/localhost").status == 400


def test_behind_a_proxy_the_public_names_are_answered_below_a_separate_path():
    with serving(Colours(), public=("pets.example.org", "[2001:db8::1]")) as served:
        with behind_a_proxy(served.port, "/pets") as port:
            for host in (
                "pets.example.org",
                "PETS.example.org.:8443",
                "[2001:db8::1]:8443",
                "localhost",
            ):
                assert ask(port, "GET", "/pets/health", Host=host).json["status"] == "ok"
            body = picture(RED)
            answer = ask(
                port,
                "POST",
                "/pets/predict",
                body,
                Host="pets.example.org",
                Content_Type="image/png",
            )
            assert answer.json["class"] == name_of(RED)
            assert ask(port, "GET", "/pets/health", Host="example.org").status == 400
            html = ask(port, "GET", "/pets/", Host="pets.example.org").body.decode()
    assert not re.findall(r"""(?:fetch\(|(?:src|href|action)=)["'`]/""", html)


@pytest.mark.parametrize(
    "wrong",
    ["https://pets.example.org", "pets.example.org:80", "pets.example.org/pets", "*", "a b"],
)
def test_a_public_name_that_no_browser_sends_is_refused(wrong: str):
    with listen("127.0.0.1", 0) as listening:
        with pytest.raises(
            ValueError, match=re.escape(f"--public-host is {wrong!r}; expected a host name without")
        ):
            host_names(listening, "127.0.0.1", ("fine.example", wrong))


# ---- too much, too slow, disconnected


def test_beyond_the_queue_a_client_is_refused_before_it_sends_its_image(gated: Colours):
    with serving(gated, Limits(max_queue=2)) as served, ThreadPoolExecutor(2) as clients:
        waiting = [clients.submit(served.predict, PNG) for _ in range(2)]
        wait_until(lambda: served.service.num_images == 2)
        assert served.metric("cheem_queue_images") == 2
        connection = send(served.port, head(len(PNG)))  # the body is never sent
        refused = connection.recv(2**16)
        assert refused.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in refused
        connection.close()
        assert served.metric('cheem_refused_total{reason="queue_full"}') == 1
        gated.gate.set()
        assert [answer.result().status for answer in waiting] == [200, 200]
        wait_until(lambda: served.service.num_images == 0)
        refused = served.predict(form(PNG, PNG, PNG), FORM)  # which would never fit
        assert refused.status == 400 and "Maximum number of files is 2" in refused.json["error"]
        assert served.predict(PNG).status == 200


def test_an_answer_that_needs_too_long_is_503_and_later_ones_are_not(gated: Colours):
    with serving(gated, Limits(timeout_s=0.15)) as served:
        answer = served.predict(PNG)
        assert answer.status == 503 and "no prediction within 0.15 s" in answer.json["error"]
        gated.gate.set()
        wait_until(lambda: served.predict(PNG).status == 200)


def test_a_body_that_drips_is_408(caplog):
    with serving(Colours(), Limits(timeout_s=0.15)) as served:
        late = send(served.port, head(len(PNG)) + PNG[:10])
        assert late.recv(12) == b"HTTP/1.1 408"
        late.close()
        wait_until(lambda: served.service.num_images == 0)
        # on a busy machine a sound request, too, can take longer than the limit
        wait_until(lambda: served.predict(PNG).status == 200)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_client_that_hangs_up_in_the_middle_of_its_body_is_counted_and_nobody_is_warned(caplog):
    with serving(Colours()) as served:
        send(served.port, head(len(PNG)) + PNG[:10]).close()
        wait_until(lambda: served.metric('cheem_refused_total{reason="hung_up"}') == 1)
        assert served.service.num_images == 0
        assert served.predict(PNG).status == 200 and served.service.predictor.sizes == [1]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_failing_predictor_is_500_and_the_server_lives_on(caplog):
    predictor = Colours()
    with serving(predictor) as served:
        predictor.error = RuntimeError("secret")
        answer = served.predict(PNG)
        assert answer.status == 500 and "secret" not in answer.json["error"]
        assert "secret" in caplog.text
        predictor.error = None
        assert served.predict(PNG).json["class"] == "224-32-32"


# ---- beginning and end


def test_before_it_is_warm_the_server_says_so_and_afterwards_it_lists_its_tasks():
    predictor = Colours()
    predictor.prepared.clear()
    with serving(predictor, is_warm=False) as served:
        try:
            assert (served.ask("GET", "/health").status, served.predict(PNG).status) == (503, 503)
        finally:
            predictor.prepared.set()
        wait_until(lambda: served.ask("GET", "/health").status == 200)
        health = served.ask("GET", "/health").json
        assert (health["status"], health["num_classes"], health["image_size"]) == ("ok", 64, 8)
        answer = served.ask("GET", "/memory").json
        assert answer["architectures"]["bright red"][3] == "adapt:0"
        assert answer["networks"] == predictor.counters()


def test_running_requests_are_answered_before_the_server_ends(gated: Colours):
    with ThreadPoolExecutor(1) as clients:
        with serving(gated) as served:
            answer = clients.submit(served.predict, PNG)
            assert gated.entered.wait(20)
            served.server.should_exit = True
            threading.Timer(0.3, gated.gate.set).start()
        assert answer.result().json["class"] == "224-32-32"


@pytest.fixture
def command(monkeypatch):
    """`cheem serve` with a finished predictor, and its port."""
    predictor = Colours()
    monkeypatch.setattr(Serve, "predictor", lambda *_, **__: predictor)
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
    return predictor, Serve(memory=Path("pets"), port=port)


def stop_once_it_answers(port: int, number: int) -> None:
    def answers() -> bool:
        with contextlib.suppress(OSError):
            return ask(port, "GET", "/health").status == 200
        return False

    wait_until(answers)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_in_a_line_after_it_has_printed_its_address(
    number, status, command, capsys
):
    _, settings = command
    handler = signal.getsignal(signal.SIGTERM)

    threading.Thread(target=stop_once_it_answers, args=(settings.port, number)).start()
    with pytest.raises(SystemExit) as ended:
        run_command(serve_memory, settings)
    said = capsys.readouterr()
    assert ended.value.code == status and said.err == "\nstopped.\n"
    assert f"ready on http://127.0.0.1:{settings.port} for" in said.out
    assert "pets: 2 tasks" in said.out
    assert "about 5 % of a task's images; with --open-set off" in said.out
    assert signal.getsignal(signal.SIGTERM) is handler


class Unread(io.StringIO):
    """Output whose reader leaves before the server is ready."""

    def write(self, text: str) -> int:
        if text.startswith("ready"):
            raise BrokenPipeError
        return super().write(text)


def test_a_server_whose_reader_leaves_before_it_is_ready_answers(command, monkeypatch):
    _, settings = command
    monkeypatch.setattr(progress, "_console", lambda: progress.Terminal(file=Unread()))
    threading.Thread(target=stop_once_it_answers, args=(settings.port, signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as ended:
        run_command(serve_memory, settings)
    assert ended.value.code == 143


def test_a_memory_that_cannot_be_prepared_ends_the_command(command, capsys):
    predictor, settings = command
    predictor.error = ValueError("the weights are damaged")
    with pytest.raises(SystemExit) as ended:
        run_command(serve_memory, settings)
    assert ended.value.code == 2 and capsys.readouterr().err == "error: the weights are damaged\n"


class Opened(NamedTuple):
    """The part of a memory that prediction uses."""

    targets: tuple[SimpleNamespace, ...]

    def predictor(self, *, open_set: float | None, **_: Any) -> Colours:
        predictor = Colours()
        predictor.open_set = open_set
        return predictor


@pytest.mark.parametrize(
    ("given", "distances", "expected"),
    [
        ("auto", (1, 1), 0.05),
        ("auto", (1, None), None),
        ("off", (1, 1), None),
        (0.2, (1, None), 0.2),
    ],
)
def test_the_open_set_is_on_where_every_task_is_calibrated(monkeypatch, given, distances, expected):
    opened = Opened(tuple(SimpleNamespace(distances=one) for one in distances))
    monkeypatch.setattr(Serve, "open", lambda _: opened)
    words = [] if given == "auto" else ["--open-set", str(given)]
    assert parse(Serve, ["pets", *words]).predictor().open_set == expected


def test_the_counters_have_few_labels(served: Served):
    before = served.metric('cheem_images_total{task="bright red"}')
    served.predict(form(PNG, PNG), FORM)
    assert served.metric('cheem_images_total{task="bright red"}') == before + 2
    assert served.metric('cheem_images_total{task="(none)"}') >= 0
    text = served.ask("GET", "/metrics").body.decode()
    assert "process_resident_memory_bytes" in text and "\ncheem_programs_since_warm_up " in text
    assert 'cheem_request_seconds_count{path="/predict"}' in text


def test_a_taken_port_and_wrong_settings_are_reported_in_a_sentence():
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use\)"
        ):
            listen("127.0.0.1", port)
    with pytest.raises(ValueError, match="cannot listen on no.such.host.invalid:0"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ValueError, match="port is 70000, expected 0 to 65535"):
        serve_memory(Serve(memory=Path("memory"), port=70_000))
    with pytest.raises(
        ValueError, match="timeout_s is -1; max_batch is 0; expected finite numbers above 0"
    ):
        serve_memory(Serve(memory=Path("memory"), max_batch=0, timeout_s=-1))


def test_the_load_script_counts_answers_and_sees_wrong_ones(served: Served):
    files = serving_bench.make_images(8, 16)
    alone = [serving_bench.ask(served.port, file)[1] for file in files]
    settings = serving_bench.Serving(Path("pets"), requests=64, clients=4, every=32)
    result = serving_bench.under_load(served.port, files, alone, settings)
    assert (result["statuses"], result["lost"], result["other_answers"]) == ({"200": 64}, 0, 0)
    assert sorted(result["resident_bytes"]) == ["0", "32", "64"]
    assert 0 < result["latency"]["p50"] <= result["latency"]["p99"] <= result["latency"]["max"]
    alone[3] = {**alone[3], "class": "another"}
    assert serving_bench.under_load(served.port, files, alone, settings)["other_answers"] == 8
    assert serving_bench.quantiles([0.001, 0.002, 0.003]) == pytest.approx(
        {"p50": 2, "p90": 2.8, "p99": 2.98, "max": 3}
    )


def test_the_page_is_the_same_in_every_locale(monkeypatch):
    expected = page()
    small.assume_ascii(monkeypatch)
    assert page() == expected


def test_the_page_can_load_nothing_from_anywhere_else(served: Served):
    answer = served.ask("GET", "/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    html = answer.body.decode()
    assert html == page()[0] and "//" not in html.replace("// ", "") and "innerHTML" not in html
    assert "--adapt: #FEB24C;" in html
