"""`cheem doctor`: check packages, devices, caches and a small network, and say how to repair them.

This process imports only the standard library. Code that can be broken, crash or hang runs in
another process (`probe`).
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax import __version__
from cheem_jax.core.machine import host_memory

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""File with Linux's setting for huge pages: always, on request (madvise), or never."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Options of `cheem doctor`."""

    json: bool = False
    """Print one JSON object, with the versions of all packages, instead of text."""
    network: bool = False
    """Also check that weights can be downloaded; the other checks do not use the internet."""
    timeout: float = 120.0
    """Seconds after which the checks are stopped."""


class Problem(NamedTuple):
    """A problem and its solution. If `needed` is False, the problem affects only one feature."""

    what: str
    way_out: str
    needed: bool = True


def examine(settings: Doctor) -> int:
    """Print the findings and then the problems. Return 1 if a required part is broken."""
    findings, problems = collect(settings)
    works = not any(problem.needed for problem in problems)
    if settings.json:
        listed = [problem._asdict() for problem in problems]
        print(json.dumps({"works": works, **findings, "problems": listed}, indent=1))
        return int(not works)
    for section, entries in findings.items():
        if entries:
            print(f"{section}:")
        for name, value in entries.items():
            print(f"  {name:<20} {'missing' if value is None else value}")
    for problem in problems:
        kind = "PROBLEM" if problem.needed else "note"
        print(f"{kind}: {problem.what}; solution: {problem.way_out}")
    print("cheem works on this machine" if works else "cheem does not work on this machine")
    return int(not works)


def collect(settings: Doctor) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Collect the findings as JSON values, keyed by section and name, and the problems."""
    results, problems = run_probe(settings)
    versions = _versions(problems)
    extras = _extras()
    gpus = _nvidia_gpus()
    devices = results.get("devices", {})
    if devices.get("platform") == "cpu":
        if gpus:
            # the command that installs the extra; empty if the extra is already installed
            way_out = extras.get("cuda12", "").partition("; ")[2]
            if "JAX_PLATFORMS" in os.environ:
                way_out = "unset JAX_PLATFORMS"
            way_out = way_out or "read the output of `python -c 'import jax; jax.devices()'`"
            problems.append(Problem(f"JAX does not use {gpus[0]}", way_out, needed=False))
        if _has_small_pages():
            what = "memory has small pages, with which training can take 1.4 times as long"
            way_out = "set GLIBC_TUNABLES=glibc.malloc.hugetlb=1 before the start"
            problems.append(Problem(what, way_out, needed=False))
    findings = {
        "versions": versions,
        "extras": extras,
        "machine": _machine(),
        "gpus": {f"nvidia-smi {index}": gpu for index, gpu in enumerate(gpus)},
        **results,
    }
    return findings, problems


MARK = "cheem doctor: "
"""Prefix of each line that `probe` prints. Other lines in the output are ignored."""


class Check(NamedTuple):
    """A check, which runs in a separate process and imports the modules to be checked."""

    run: Callable[[bool], dict[str, Any]]
    """Function that accepts the option `network`. It returns findings keyed by name, or raises an
    error that describes a problem."""
    way_out: str
    tolerates: type[Exception] | tuple[()] = ()
    """Types of errors that affect only the checked feature."""


def run_probe(settings: Doctor) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Run all checks in another process. Return findings, keyed by check, and problems."""
    if not 0 < settings.timeout < math.inf:
        raise ValueError(f"timeout is {settings.timeout:g}; expected seconds, above 0 and finite")
    program = f"from cheem_jax.cli import doctor; doctor.probe({settings.network})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(timeout=settings.timeout)
        end = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = f"no answer within {settings.timeout:g} seconds (--timeout)"
    results = dict[str, dict[str, Any]]()
    problems = []
    for line in output.splitlines():
        # libraries can also print to standard output
        if not line.startswith(MARK):
            continue
        name, results[name], problem = json.loads(line.removeprefix(MARK))
        problems += [] if problem is None else [Problem(*problem)]
    if process.returncode:
        # a process can also fail when it ends, after all checks
        running = [item for item in CHECKS.items() if item[0] not in results]
        name, check = running[0] if running else list(CHECKS.items())[-1]
        problems.append(Problem(f"{name}: {end}", check.way_out, check.tolerates is not Exception))
    return results, problems


def probe(network: bool) -> None:
    """Print the name, findings and problem of each check as JSON. Stop after the first error that
    its check does not tolerate."""
    for name, check in CHECKS.items():
        result, problem = {}, None
        try:
            result = check.run(network)
        except Exception as error:  # a broken installation can raise any error
            text = " ".join(str(error).split())[:300]
            what, way_out = f"{name}: {type(error).__name__}: {text}", check.way_out
            if check.tolerates is ValueError and isinstance(error, ValueError):
                what, _, way_out = text.partition("; ")  # the format of this library's messages
            problem = Problem(what, way_out, not isinstance(error, check.tolerates))
        print(f"{MARK}{json.dumps((name, result, problem))}", flush=True)
        if problem is not None and problem.needed:
            return


def _caches(network: bool) -> dict[str, Any]:
    from cheem_jax.data.load import default_directory
    from cheem_jax.data.sources import images_dir

    return {
        "decoded images": str(default_directory()),
        "decoded benchmarks": str(images_dir(None)),
    }


def _devices(network: bool) -> dict[str, Any]:
    import jax

    first, *_ = devices = jax.devices()
    return {"platform": first.platform, "kind": first.device_kind, "count": len(devices)}


def _compiled_functions(network: bool) -> dict[str, Any]:
    from cheem_jax.engine.compilation import enable_cache

    return {"folder": str(enable_cache() or "none")}


def _small_network(network: bool) -> dict[str, Any]:
    import jax
    import numpy as np

    from cheem_jax.backbone.params import build
    from cheem_jax.backbone.weights import load_pretrained
    from cheem_jax.engine.compilation import reset_strict_options

    reset_strict_options()
    start = time.perf_counter()
    pretrained = load_pretrained("vit_micro")
    vit = build(pretrained.config, pretrained.params)
    size = pretrained.config.image_size
    features = jax.jit(lambda images: vit(images))(np.zeros((1, size, size, 3), np.uint8))
    if not np.isfinite(features).all():
        raise ArithmeticError("vit_micro computes non-finite features of a blank image")
    return {"seconds": round(time.perf_counter() - start, 1)}


def _hub(network: bool) -> dict[str, Any]:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    from cheem_jax.backbone.config import CONFIGS
    from cheem_jax.backbone.weights import hub_repository
    from cheem_jax.core.hub import check_cache

    check_cache()
    if network:
        repository = hub_repository(CONFIGS["deit_tiny"].timm_name or "")
        get_hf_file_metadata(hf_hub_url(repository, "model.safetensors"), timeout=10)
    return {"folder": constants.HF_HUB_CACHE}


REINSTALL = "pip install --force-reinstall cheem_jax jax jaxlib"
CHECKS = {
    "caches": Check(_caches, REINSTALL, ValueError),
    "devices": Check(_devices, f"{REINSTALL}, or without a GPU: JAX_PLATFORMS=cpu"),
    "compiled functions": Check(
        _compiled_functions, "set another folder with JAX_COMPILATION_CACHE_DIR", ValueError
    ),
    "vit_micro": Check(_small_network, REINSTALL),
    "hub": Check(
        _hub, "check the network and huggingface_hub, or give files (--weights)", Exception
    ),
}


def _versions(problems: list[Problem]) -> dict[str, str | None]:
    """Return the versions of required packages (None if a package is missing), and append problems
    with these versions to `problems`."""
    versions = {
        "python": platform.python_version(),
        "cheem_jax": __version__,
        "jaxlib": _version("jaxlib"),
    }
    try:
        for requirement in _requirements("cheem_jax"):
            name = requirement.name
            way_out = f"pip install '{requirement}'"
            version = versions[name] = _version(name)
            if version is None:
                problems.append(Problem(f"{name} is missing", way_out))
            elif not requirement.specifier.contains(version, prereleases=True):
                what = f"{name} is {version}, and {requirement.specifier} is required"
                problems.append(Problem(what, way_out, needed=False))
    except ImportError as error:  # the package's metadata or `packaging` is not installed
        way_out = "pip install cheem_jax, or pip install -e . in a checkout"
        problems.append(Problem(f"required packages are unknown ({error})", way_out, needed=False))
    return versions


def _extras() -> dict[str, str]:
    """Return the state of each extra: installed, or its missing packages and the command that
    installs them."""
    extras = {}
    with contextlib.suppress(ImportError):  # `_versions` reports this problem
        for extra in importlib.metadata.metadata("cheem_jax").get_all("Provides-Extra") or []:
            missing = ", ".join(sorted(set(_missing("cheem_jax", extra))))
            install = f"missing: {missing}; pip install 'cheem_jax[{extra}]'"
            extras[extra] = install if missing else "installed"
    return extras


def _missing(package: str, extra: str) -> Iterator[str]:
    for requirement in _requirements(package, extra):
        if _version(requirement.name) is None:
            yield requirement.name
        else:
            for inner in requirement.extras:
                yield from _missing(requirement.name, inner)


def _requirements(package: str, extra: str = "") -> Iterator[Any]:
    """Yield the requirements of a package on this machine; with `extra`, only those of the
    extra."""
    from packaging.requirements import Requirement

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        if applies(requirement, extra) and not (extra and applies(requirement, "")):
            yield requirement


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def _nvidia_gpus() -> list[str]:
    """Return the name, memory and driver of each GPU that nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _has_small_pages() -> bool:
    """Return whether Linux provides huge pages on request, and the C library supports but does not
    use them."""
    name, version = platform.libc_ver()
    return (
        HUGE_PAGES.exists()
        and "[madvise]" in HUGE_PAGES.read_text()
        and name == "glibc"
        and tuple(map(int, version.split("."))) >= (2, 35)
        and "glibc.malloc.hugetlb" not in os.environ.get("GLIBC_TUNABLES", "")
    )


def _machine() -> dict[str, Any]:
    """Return the operating system, the number of cores, and gigabytes of memory and free disk."""
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gb": round(host_memory() / 1e9, 1),
        "disk_free_gb": round(shutil.disk_usage(".").free / 1e9, 1),
    }
