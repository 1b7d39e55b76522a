"""Cheap child processes: one process imports everything once, and forks a child for each call.

JAX's backend is started after the fork, because threads do not survive a fork.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Child:
    """One call of a function in a forked process."""

    def __init__(self, nursery: "Nursery", pid: int, output: Path, answer: Path):
        self.nursery = nursery
        self.pid = pid
        self.output = output
        self.answer = answer
        self.status: int | None = None

    def poll(self) -> int | None:
        """The exit status, -N after signal N, or None while it runs."""
        if self.status is None:
            self.status = self.nursery.ask({"poll": self.pid})["status"]
        return self.status

    def wait(self, seconds: float = 300) -> int:
        """The exit status; a child that outlives `seconds` is killed and reported."""
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"no end within {seconds} s; its output ends: {self.tail()}")
            time.sleep(0.01)
        return status

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def result(self, seconds: float = 300) -> Any:
        """Return the result of the function."""
        status = self.wait(seconds)
        if status != 0:
            raise RuntimeError(f"the child ended with {status}; its output ends: {self.tail()}")
        return json.loads(self.answer.read_text())

    def tail(self) -> str:
        """Return the end of its output."""
        return self.output.read_text(errors="replace")[-3000:] if self.output.exists() else ""


class Nursery:
    """The process that forks children; a context manager."""

    def __init__(self, folder: Path, library: Path | None):
        self.folder = folder
        self.num = 0
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_MAX_SIZE")
        }
        environment |= {
            "JAX_PLATFORMS": "cpu",
            # apart from the tests' own, because a killed child can leave half of a file in it
            "JAX_COMPILATION_CACHE_DIR": f"{os.environ['JAX_COMPILATION_CACHE_DIR']}/children",
            "MPLBACKEND": "agg",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", HERE))),
        }
        if library is not None:
            environment["LD_PRELOAD"] = str(library)
        self.errors = (folder / "nursery.txt").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C ends the tests, and they end this process
        )

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(
                f"no children can be had: {(self.folder / 'nursery.txt').read_text()[-3000:]}"
            )
        return json.loads(answer)

    def start(self, function: str, **arguments: Any) -> Child:
        """Begin `function` of jobs.py, with arguments that are plain JSON, in a child."""
        self.num += 1
        output, answer = self.folder / f"{self.num:04d}.txt", self.folder / f"{self.num:04d}.json"
        request = {
            "function": function,
            "arguments": arguments,
            "output": str(output),
            "answer": str(answer),
        }
        return Child(self, self.ask(request)["pid"], output, answer)

    def call(self, function: str, **arguments: Any) -> Any:
        """The function's result, after the child has ended."""
        return self.start(function, **arguments).result()


def _serve() -> None:
    jobs = importlib.import_module("jobs")
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            running.discard(pid)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                _live(jobs, request)
            running.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _live(jobs: Any, request: dict[str, Any]) -> None:
    """Never returns."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for old, new in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(old, new)
        result = getattr(jobs, request["function"])(**request["arguments"])
        Path(request["answer"]).write_text(json.dumps(result))
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
