"""What the compiler does: options, the persistent cache, and a count of every program, the tiny
ones too."""

import contextlib
import errno
import functools
import hashlib
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import jax

from cheem_jax.core.paths import absolute, user_cache
from cheem_jax.core.settings import Precision

_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_CACHE_BYTES = 2 * 2**30


class Compilations(NamedTuple):
    """Programs compiled, programs read from the persistent cache instead, and the seconds of
    both."""

    programs: int
    cached: int
    seconds: float

    def since(self, earlier: "Compilations") -> "Compilations":
        """What came after an earlier count."""
        return Compilations(
            self.programs - earlier.programs,
            self.cached - earlier.cached,
            self.seconds - earlier.seconds,
        )


_total = Compilations(0, 0, 0.0)


def compilations() -> Compilations:
    """The count since this module was imported."""
    return _total


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    global _total
    if event == _COMPILE:
        _total = _total._replace(
            programs=_total.programs + 1, seconds=_total.seconds + duration_secs
        )


def _on_event(event: str, **_: object) -> None:
    global _total
    if event == _HIT:  # JAX reports the time of reading a program as if it had been compiled
        _total = _total._replace(programs=_total.programs - 1, cached=_total.cached + 1)


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)


class Mark(NamedTuple):
    """A moment, to count seconds and compilations from."""

    seconds: float
    compiled: Compilations

    @classmethod
    def now(cls) -> "Mark":
        return cls(time.perf_counter(), compilations())

    def since(self) -> dict[str, Any]:
        """The seconds and compilations since then, for the record."""
        compiled = compilations().since(self.compiled)
        return {"seconds": time.perf_counter() - self.seconds, "compile": compiled._asdict()}


_STRICT = {
    "jax_numpy_rank_promotion": (("raise",), "allow"),
    "jax_numpy_dtype_promotion": (("strict",), "standard"),
    "jax_transfer_guard": (("disallow", "disallow_explicit"), "allow"),
}
"""Values of JAX's options that forbid what correct programs of this library do, and what each is
set to instead."""


def allow_ordinary_programs() -> list[str]:
    """Undo options that forbid broadcasting, mixed types or transfers, for this process; a line for
    each of them."""
    notes = []
    for name, (refused, instead) in _STRICT.items():
        if (given := getattr(jax.config, name)) in refused:
            jax.config.update(name, instead)
            notes.append(
                f"{name.upper()}={given} checks programs that are written for it; this one runs"
                f" with {instead}"
            )
    return notes


class NotKept(ValueError):
    """Compiled programs cannot be kept on disk."""


def keep_programs() -> Path | None:
    """Switch on JAX's persistent compilation cache; returns its directory, or None where the user
    switched it off.

    `JAX_COMPILATION_CACHE_DIR` names another directory and `JAX_ENABLE_COMPILATION_CACHE=false`
    does without. Raises ValueError where the user's directory cannot be written, and its subclass
    NotKept where the default one cannot.
    """
    if not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    without = "go without by JAX_ENABLE_COMPILATION_CACHE=false"
    try:
        directory = absolute(chosen) if chosen else user_cache() / "programs" / _machine()
    except ValueError as error:
        kind = ValueError if chosen else NotKept
        reason = str(error).partition("; ")[0]
        raise kind(
            f"cannot keep compiled functions: {reason}; name a folder with"
            f" JAX_COMPILATION_CACHE_DIR, or {without}"
        ) from None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # what lies there is run
        status = directory.stat()
        if not chosen and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise OSError(errno.EPERM, "others can write there")
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        try:
            probe.owner(), probe.group()
        finally:
            probe.unlink()
    except KeyError as error:  # JAX asks for these names each time that it keeps a function
        jax.config.update("jax_enable_compilation_cache", False)
        raise NotKept(
            "cannot keep compiled functions: JAX needs the names of this user and group"
            f" ({error.args[0]}); add them to the system's lists (/etc/passwd, /etc/group), or"
            f" {without}"
        ) from None
    except OSError as error:
        kind = ValueError if chosen else NotKept
        raise kind(
            f"cannot keep compiled functions in {directory} ({error.strerror}); name another folder"
            f" with JAX_COMPILATION_CACHE_DIR, or {without}"
        ) from None
    _remove_torn(directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


def _remove_torn(directory: Path) -> None:
    """A process killed while it kept a program leaves one without its time of use, after which JAX
    keeps no other."""
    with (
        contextlib.suppress(OSError, filelock.Timeout),
        filelock.FileLock(directory / ".lockfile", timeout=10),
    ):
        for program in directory.glob("*-cache"):
            if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                program.unlink()


def _machine() -> str:
    # programs for one processor may not run on another, and home directories travel between
    # machines
    features = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    digest = hashlib.sha256(features.encode()).hexdigest()[:8]
    return f"jaxlib-{version('jaxlib')}-{platform.machine()}-{digest}"


DETERMINISTIC: dict[str, Any] = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
"""No sums in the order in which threads finish, and no kernels chosen by a stopwatch."""


@functools.cache
def jit_options(precision: Precision, deterministic: bool = False) -> dict[str, Any] | None:
    """Compiler options of the blocks' programs.

    `deterministic` makes an accelerator give equal bits for equal work, as a CPU does anyway. On a
    CPU float32 products go to Eigen instead of YNNPACK, whose batched ones (attention) leave one of
    two cores idle. Sums and maxima stay with YNNPACK, since XLA's own take one number at a time; so
    do bfloat16 products, because only YNNPACK uses the processor's bfloat16 instructions.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    if jax.default_backend() != "cpu":
        return DETERMINISTIC if deterministic else None
    if precision != "float32":
        return None
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return None  # another jaxlib, other options
    return options
