"""Compiler options, JAX's persistent compilation cache, and counts and durations of
compilations."""

import contextlib
import errno
import functools
import hashlib
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import jax

from cheem_jax.core.device import DETERMINISTIC
from cheem_jax.core.paths import absolute, user_cache
from cheem_jax.core.settings import Precision

_COMPILE = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_CACHE_BYTES = 2 * 2**30
_CACHED_PROGRAMS = 1000
"""Number of cached functions that a new process keeps. With a limit on bytes, JAX reads the times
of use of all cached functions whenever it writes one."""


class Compilations(NamedTuple):
    """Number of compiled functions, number of functions read from the persistent cache, and total
    seconds of compiling and reading."""

    programs: int
    cached: int
    seconds: float

    def since(self, earlier: "Compilations") -> "Compilations":
        """Return the compilations since an earlier count."""
        return Compilations(
            self.programs - earlier.programs,
            self.cached - earlier.cached,
            self.seconds - earlier.seconds,
        )


_total = Compilations(0, 0, 0.0)


def compilations() -> Compilations:
    """Return the compilations since this module was imported, including those of JAX's own
    functions."""
    return _total


def _on_duration(event: str, duration_secs: float, **_: object) -> None:
    global _total
    if event == _COMPILE:
        _total = Compilations(_total.programs + 1, _total.cached, _total.seconds + duration_secs)


def _on_event(event: str, **_: object) -> None:
    global _total
    if event == _HIT:  # JAX also reports a read from the cache as a compilation
        _total = _total._replace(programs=_total.programs - 1, cached=_total.cached + 1)


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)


class Mark(NamedTuple):
    """A point in time from which seconds and compilations are counted."""

    seconds: float
    compiled: Compilations

    @classmethod
    def now(cls) -> "Mark":
        return cls(time.perf_counter(), compilations())

    def since(self) -> dict[str, Any]:
        """Return the seconds and compilations since this point, for the record."""
        compiled = compilations().since(self.compiled)
        return {"seconds": time.perf_counter() - self.seconds, "compile": compiled._asdict()}


def add_costs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of the seconds and compilations of two entries of the record; an entry of an
    earlier version can lack them."""
    before = first.get("compile", {})
    compiled = {key: before.get(key, 0) + value for key, value in second["compile"].items()}
    return {"seconds": first.get("seconds", 0) + second["seconds"], "compile": compiled}


_STRICT = {
    "jax_numpy_rank_promotion": (("raise",), "allow"),
    "jax_numpy_dtype_promotion": (("strict",), "standard"),
    "jax_transfer_guard": (("disallow", "disallow_explicit"), "allow"),
}
"""For each JAX option, the values under which correct functions of this library raise errors, and
the value that replaces them."""


def reset_strict_options() -> list[str]:
    """Reset JAX options of this process that forbid broadcasting, mixed types or transfers.

    Returns one line of text per reset option.
    """
    notes = []
    for name, (strict, instead) in _STRICT.items():
        if (value := getattr(jax.config, name)) in strict:
            jax.config.update(name, instead)
            notes.append(
                f"{name.upper()}={value} would reject functions of this library; this process uses"
                f" {instead}"
            )
    return notes


class NotCached(ValueError):
    """Compiled functions cannot be cached on disk."""


def enable_cache() -> Path | None:
    """Enable JAX's persistent compilation cache. Return its directory, or None if the user disabled
    it.

    `JAX_COMPILATION_CACHE_DIR` sets another directory, `JAX_COMPILATION_CACHE_MAX_SIZE` another
    limit in bytes, and `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache. Raises ValueError
    if a directory set by the user is not writable, and NotCached, a subclass of ValueError, if the
    default directory is not writable or JAX cannot use the cache.
    """
    if not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    kind = ValueError if chosen else NotCached
    without = "disable the cache with JAX_ENABLE_COMPILATION_CACHE=false"
    way_out = f"set another folder with JAX_COMPILATION_CACHE_DIR, or {without}"
    try:
        directory = absolute(chosen) if chosen else user_cache() / "programs" / _machine()
    except ValueError as error:
        reason = str(error).partition("; ")[0]
        raise kind(f"cannot cache compiled functions: {reason}; {way_out}") from None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        # Compiled functions are executed, so only this user is allowed to write them.
        if not chosen and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise OSError(errno.EPERM, "other users can write there")
        probe = directory / f".writable-{os.getpid()}"
        probe.touch()
        try:
            # JAX looks up the names of the owner and the group whenever it writes a function. Look
            # them up here first: a missing name raises KeyError.
            probe.owner()
            probe.group()
        finally:
            probe.unlink()
    except KeyError as error:
        jax.config.update("jax_enable_compilation_cache", False)
        raise NotCached(
            "cannot cache compiled functions: JAX needs the names of this user and group"
            f" ({error.args[0]}); add them to /etc/passwd and /etc/group, or {without}"
        ) from None
    except OSError as error:
        raise kind(
            f"cannot cache compiled functions in {directory} ({error.strerror}); {way_out}"
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        jax.config.update("jax_compilation_cache_max_size", _CACHE_BYTES)
    if getattr(jax.config, "jax_compilation_cache_max_size", -1) != -1:
        _tidy(directory)  # without a limit, JAX writes no times of use
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


def _tidy(directory: Path) -> None:
    """Remove cached functions that have no access-time file, and all but the latest used ones.

    A killed process can leave functions without this file, and they would prevent JAX from writing
    further functions.
    """
    with (
        contextlib.suppress(OSError, filelock.Timeout),
        filelock.FileLock(directory / ".lockfile", timeout=10),
    ):
        used = dict[Path, float]()
        for file in directory.glob("*-cache"):
            time_of_use = file.with_name(f"{file.name.removesuffix('-cache')}-atime")
            if time_of_use.exists():
                used[file] = time_of_use.stat().st_mtime
            else:
                file.unlink()
        for file in sorted(used, key=used.__getitem__, reverse=True)[_CACHED_PROGRAMS:]:
            file.unlink()
            file.with_name(f"{file.name.removesuffix('-cache')}-atime").unlink()


def _machine() -> str:
    """Return a name for the processor type. Each type has a separate cache, because different
    machines can share a home directory."""
    features = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    digest = hashlib.sha256(features.encode()).hexdigest()[:8]
    return f"jaxlib-{version('jaxlib')}-{platform.machine()}-{digest}"


@functools.cache
def jit_options(precision: Precision, deterministic: bool = False) -> dict[str, Any] | None:
    """Return the compiler options for an executor's functions; None for XLA's defaults.

    With `deterministic`, an accelerator computes identical bits in every run; a CPU always does. On
    a CPU, float32 products are computed by Eigen and not by YNNPACK, because YNNPACK's batched
    products (attention) use only one of two cores. YNNPACK still computes sums and maxima, because
    XLA's own sums and maxima process one number at a time. YNNPACK also computes bfloat16 products,
    because Eigen does not use the processor's bfloat16 instructions.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    if jax.default_backend() != "cpu":
        return DETERMINISTIC if deterministic else None
    if precision != "float32":
        return None
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return None  # some versions of jaxlib lack this option
    return options
