"""The fingerprint of a run: hashes and names of all conditions that determine its results, such as
settings, data, weights, code, package versions and device. Runs with identical fingerprints have
identical results."""

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from cheem_jax import __version__
from cheem_jax.run.differences import find_differences
from cheem_jax.run.record import to_json

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "scipy",
    "scikit-learn",
    "pillow",
)
PACKAGE = Path(__file__).parents[1]
VARIABLES = re.compile(r"XLA_FLAGS|JAX_\w+|(OMP|OPENBLAS|MKL)_NUM_THREADS")
"""Environment variables that can change results, except those in `HARMLESS`."""
OPTIONS = (
    "default_matmul_precision",
    "default_prng_impl",
    "enable_x64",
    "threefry_partitionable",
)
"""Options of JAX that can change results and that Python code can set without a variable."""
HARMLESS = re.compile(r"CACHE|DUMP|PROFIL|TRACEBACK|JAX_LOG|JAX_PLATFORMS")
"""Matches of `VARIABLES` that only affect files and output, or select the device, which is recorded
separately."""


def take(identity: Mapping[str, Any], num_devices: int = 1) -> dict[str, Any]:
    """Compute the fingerprint of a run in this process on `num_devices` devices; `identity` is the
    content of `config.json`."""
    return {
        "config_sha256": _hash(identity),
        "data_sha256": _hash(identity["data_sha256"]),
        "weights_sha256": identity["weights_sha256"],
        "code": {
            "version": __version__,
            "sha256": code_hash(PACKAGE),
            "commit": commit_of(PACKAGE),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "device": {**_device(), "used": num_devices},
    }


def digest(fingerprint: Mapping[str, Any]) -> str:
    """Compute a hash of a fingerprint, as 16 hexadecimal digits."""
    return _hash(fingerprint)[:16]


def apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Describe the differences between two fingerprints. Return an empty text if the fingerprints
    are identical."""
    return "; ".join(map(str, find_differences(first, second)))


@functools.cache
def code_hash(package: Path) -> str:
    """Compute the SHA-256 of the names and contents of a package's Python and JSON files. Weights
    are not included."""
    files = {
        file.relative_to(package).as_posix(): file
        for file in package.rglob("*")
        if file.suffix in (".py", ".json") and file.is_file()
    }
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = file.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def commit_of(package: Path) -> str | None:
    """Return the commit of the git checkout that contains a package, followed by + if tracked files
    have changed. Returns None if the package is not tracked by git.

    A package that is installed in a folder of a checkout, without being tracked, does not belong to
    the checkout.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")


def _git(folder: Path, *arguments: str) -> str | None:
    # In a git hook, GIT_DIR can refer to another checkout, so GIT_* variables are removed.
    # `GIT_OPTIONAL_LOCKS=0` prevents git from locking the checkout, because reading needs no lock.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def _device() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "runtime": devices[0].client.platform_version,
        "count": len(devices),
        "processor": _processor(),
        "threads": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if VARIABLES.fullmatch(name) and not HARMLESS.search(name)
        },
        "options": {name: str(getattr(jax.config, f"jax_{name}")) for name in OPTIONS},
    }


@functools.cache
def _processor() -> str:
    try:
        if match := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _hash(value: Any) -> str:
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
