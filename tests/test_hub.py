"""A memory on a hub that runs on this machine: pushed files, pulled files, and a failing hub."""

import base64
import dataclasses
import functools
import hashlib
import http.server
import json
import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
from commands import cheem
from test_memory import STREAM, begin, dying

import cheem_jax
from cheem_jax.core.hub import hub_errors
from cheem_jax.memory.state import MemoryState

REPO = "someone/pets"


@dataclasses.dataclass
class State:
    """Repositories by name, and how the hub fails."""

    repositories: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    private: list[bool] = dataclasses.field(default_factory=list)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of files, where they are not those of their contents."""
    fetched: list[str] = dataclasses.field(default_factory=list)
    status: int = 200
    delay: float = 0


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub that a push and a pull use."""

    def __init__(self, state: State, *args):
        self.state = state
        super().__init__(*args)

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.state.delay)
        if self.state.status != 200:
            return self.reply(b"{}", self.state.status)
        repositories = self.state.repositories
        place = self.path.partition("?")[0].strip("/").split("/")
        match place:
            case ["api", "repos", "create"]:
                given = json.loads(body)
                repositories[f"{given['organization']}/{given['name']}"] = {}
                self.state.private.append(
                    given.get("visibility") == "private" or given.get("private") is True
                )
                return self.reply({"url": f"http://{self.headers['Host']}/{REPO}"})
            case ["api", "validate-yaml"]:
                return self.reply({"errors": [], "warnings": []})
            case ["api", "models", owner, name, *rest] if (
                files := repositories.get(f"{owner}/{name}")
            ) is not None:
                if rest[:1] == ["preupload"]:
                    answer = {"uploadMode": "regular", "shouldIgnore": False}
                    return self.reply(
                        {
                            "files": [
                                {"path": f["path"], **answer} for f in json.loads(body)["files"]
                            ]
                        }
                    )
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif line["key"] == "deletedFile":
                        del files[value["path"]]
                commit = {
                    "commitUrl": f"http://{self.headers['Host']}/{REPO}/commit/1",
                    "commitOid": "1" * 40,
                }
                hashes = {
                    "id": REPO,
                    "sha": "1" * 40,
                    "siblings": [
                        {"rfilename": name, "size": self.state.sizes.get(name, len(content))}
                        for name, content in files.items()
                    ],
                }
                return self.reply(commit if rest else hashes)
            case [owner, name, "resolve", _, *path] if "/".join(path) in repositories.get(
                f"{owner}/{name}", {}
            ):
                self.state.fetched.append("/".join(path))
                return self.reply(repositories[f"{owner}/{name}"]["/".join(path)])
        self.reply(b"{}", 404, "RepoNotFound")

    do_POST = do_HEAD = do_GET

    def reply(self, content, status=200, code=""):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        pass  # a client that no longer waits has closed its end


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub, by which the library asks."""
    import huggingface_hub.constants as constants

    state = State()
    with Server(("127.0.0.1", 0), functools.partial(Hub, state)) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "a-token")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield state
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("memory") / "pets"
    with small.shared_executors():
        begin(directory).learn(STREAM.tasks[:2])
    return directory


@pytest.fixture
def memory(learned, tmp_path) -> Path:
    """A memory with reports, which show images, and other files next to it."""
    directory = Path(shutil.copytree(learned, tmp_path / "pets"))
    for name in (
        "report.html",
        "figures/a.png",
        "generation-0001/cheem/stray.png",
        "base.png",
        "notes.txt",
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"an image")
    return directory


def test_a_pushed_memory_contains_no_image_and_answers_the_same_once_pulled(
    capsys, hub, memory, tmp_path
):
    status, out, _ = cheem(capsys, "push", memory, REPO, "--license", "apache-2.0")
    assert status == 0 and "files, no images" in out and hub.private == [True]
    sent = hub.repositories[REPO]
    card = sent["README.md"].decode()
    assert card.startswith("---\n")
    assert 'license: "apache-2.0"' in card
    assert "| task1 | 4: c0, c1, c2, c3 |" in card
    tasks = [f"generation-0001/cheem/00{i}-task{i}" for i in range(2)]
    expected = {"README.md", "config.json", "backbone.safetensors", "metrics.jsonl"}
    expected |= {
        file.relative_to(memory).as_posix()
        for t in tasks
        for file in (memory / t).rglob("*")
        if file.is_file()
    }
    assert sent.keys() == expected and not any(b"an image" in content for content in sent.values())

    sent["../outside.txt"] = sent["base/../../outside.txt"] = b"elsewhere"
    status, out, _ = cheem(capsys, "pull", REPO, tmp_path / "new")
    assert status == 0 and "contains task0, task1; predict with `cheem predict" in out
    assert not list(tmp_path.rglob("outside.txt")) and not (tmp_path / "new" / ".cache").exists()
    images = STREAM.tasks[1].test.images
    assert cheem_jax.open(tmp_path / "new").predict(images) == cheem_jax.open(memory).predict(
        images
    )
    status, _, err = cheem(capsys, "pull", REPO, tmp_path / "new")
    assert status == 2 and "exists and is not empty" in err


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_forgotten_task_is_removed_by_the_next_push(monkeypatch, hub, memory, is_killed):
    from cheem_jax.memory.hub import push

    push(memory, REPO)
    hub.repositories[REPO]["own.md"] = b"kept"
    with (
        monkeypatch.context() as patched,
        pytest.raises(KeyboardInterrupt) if is_killed else nullcontext(),
    ):
        if is_killed:
            patched.setattr(MemoryState, "write", dying(MemoryState.write, "forgetting"))
        cheem_jax.open(memory).forget("task1")
    names = push(memory, REPO, public=True)
    assert hub.repositories[REPO].keys() == {*names, "own.md"} and hub.private == [True]
    assert all("task1" not in name for name in names)
    assert any("generation-0002" in name for name in names)
    assert not [name for name, content in hub.repositories[REPO].items() if b"task1" in content]


@pytest.mark.parametrize("command", ["push", "pull"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"status": 401},
            "the hub refuses access (401); check the name OWNER/NAME; `hf auth login` logs in",
        ),
        (
            {"status": 429},
            "the hub accepts no more requests at present (429); repeat the command in some",
        ),
        ({"status": 503}, "the hub reports an internal error (503); repeat the command later"),
        ({"delay": 1.5}, "the hub does not answer ("),
    ],
    ids=str,
)
def test_a_hub_that_fails_is_reported_in_one_line(
    capsys, monkeypatch, hub, memory, tmp_path, command, fault, said
):
    hub.repositories[REPO] = {}
    for name, value in fault.items():
        setattr(hub, name, value)
    monkeypatch.setattr("cheem_jax.memory.hub.TIMEOUT", 0.3)
    words = (memory, REPO) if command == "push" else (REPO, tmp_path / "new")
    status, _, err = cheem(capsys, command, *words)
    assert status == 2 and err.count("\n") == 1 and said in err and repr(REPO) in err
    assert not hub.repositories[REPO] and [file.name for file in tmp_path.iterdir()] == ["pets"]


class OfTheClient(ValueError):
    """Stands for the client's errors for invalid names."""


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("set HF_HOME")], ids=repr
)
def test_errors_of_the_disk_and_of_the_settings_pass_the_hub_unchanged(error):
    with pytest.raises(type(error)) as caught, hub_errors(REPO, "pull"):
        raise error
    assert caught.value is error


def test_other_errors_become_one_line_of_at_most_300_characters_of_the_error():
    for error, said in (
        (OfTheClient("bad\n name"), "bad name; expected OWNER/NAME"),
        (RuntimeError("x" * 999), f"the hub does not answer ({'x' * 300});"),
        (RuntimeError(), "the hub does not answer (RuntimeError);"),
    ):
        with pytest.raises(OSError, match=f"^cannot pull '{REPO}': ") as caught:
            with hub_errors(REPO, "pull"):
                raise error
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_repository_that_is_missing_corrupted_or_another_model_leaves_nothing(
    capsys, hub, memory, tmp_path
):
    from cheem_jax.memory.hub import push

    def refused(name=REPO):
        status, _, err = cheem(capsys, "pull", name, tmp_path / "new")
        assert status == 2 and err.count("\n") == 1 and not (tmp_path / "new").exists()
        return err

    assert "the repository does not exist or is private (404)" in refused()
    assert "expected OWNER/NAME" in refused("a/b/c")
    push(memory, REPO)
    files = hub.repositories[REPO]
    weights = files.pop("backbone.safetensors")
    assert "is not a memory: it lacks backbone.safetensors" in refused()
    files["backbone.safetensors"] = weights
    place = next(name for name in files if name.startswith("generation") and "/d/" in name)
    files[place] = files[place][:-1] + bytes([files[place][-1] ^ 1])
    assert "is not a complete memory" in refused()
    config = json.loads((memory / "config.json").read_text())
    config["learning"] = {"name": "cats", "number": 2, "data_sha256": "0"}
    (memory / "config.json").write_text(json.dumps(config))
    status, _, err = cheem(capsys, "push", memory, REPO)
    assert status == 2 and "task 'cats' is interrupted; finish or forget it before" in err


def test_too_many_or_too_large_files_are_refused_before_one_is_fetched(
    capsys, monkeypatch, hub, memory, tmp_path
):
    from cheem_jax.memory.hub import push

    push(memory, REPO)
    files = hub.repositories[REPO]
    num = len(files) - 1  # without the card

    def refused():
        status, _, err = cheem(capsys, "pull", REPO, tmp_path / "new")
        assert status == 2 and err.count("\n") == 1 and not hub.fetched
        assert [file.name for file in tmp_path.iterdir()] == ["pets"]
        return err

    hub.sizes["backbone.safetensors"] = 101 * 2**30
    assert f"has {num} files of 101.0 GB, expected at most" in refused()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3 * 2**30))
    hub.sizes["backbone.safetensors"] = 4 * 2**30
    assert "has 4.0 GB, and 3.0 GB are free; choose a folder on another disk" in refused()
    hub.sizes.clear()
    monkeypatch.setattr("cheem_jax.memory.hub.MAX_FILES", num - 1)
    assert f"has {num} files of 0.0 GB, expected at most {num - 1} files" in refused()
    monkeypatch.undo()


def test_names_and_links_of_a_hostile_repository_reach_nothing_outside(
    capsys, hub, memory, tmp_path
):
    from cheem_jax.memory.hub import push

    push(memory, REPO)
    files = hub.repositories[REPO]
    task = "generation-0001/cheem/000-task0"
    outside = (
        "../a.txt",
        "/a.txt",
        "base/../../a.txt",
        f"{task}/../../../../a.txt",
        f"{task}/.hidden/a.txt",
        "generation-0001/cheem/../../../a.txt",
        "other/a.txt",
    )
    files |= dict.fromkeys(outside, b"elsewhere")
    status, _, _ = cheem(capsys, "pull", REPO, tmp_path / "new")
    assert status == 0 and not list(tmp_path.rglob("a.txt"))
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    sha = hashlib.sha256(secret.read_bytes()).hexdigest()
    text = files[f"{task}/manifest.json"].decode()
    for name in ("../../../../secret.txt", str(secret)):
        manifest = json.loads(text)
        manifest["files"][name] = sha  # a push would send it, and a copy would write it
        files[f"{task}/manifest.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
        status, _, err = cheem(capsys, "pull", REPO, tmp_path / "other")
        assert status == 2 and "missing or changed files" in err
        assert not (tmp_path / "other").exists()
