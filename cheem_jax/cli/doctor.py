"""`cheem doctor`: versions, devices, memory, caches and a small network, and how to get what is
missing.

This process imports only the standard library: what may be broken, crash or hang runs in another
one (`probe`).
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax import __version__

STEPS = {
    "caches": "pip install --force-reinstall cheem_jax",
    "devices": (
        "pip install --force-reinstall jax jaxlib, or if a GPU is the reason do without it:"
        " JAX_PLATFORMS=cpu"
    ),
    "programs": "name another folder with JAX_COMPILATION_CACHE_DIR",
    "vit_micro": "pip install --force-reinstall cheem_jax jax jaxlib",
    "hub": (
        "pip install --force-reinstall huggingface_hub, or give weights as files (--weights FILE)"
    ),
}
"""What `probe` tries, in its order, and the way out where it fails."""
ALWAYS = ("python", "cheem_jax", "jax", "jaxlib")
"""Versions that are shown even where nothing is wrong with them."""
FOR_DEVELOPERS = ("all", "browser", "dev", "docs", "notebook", "test")
"""Extras that only --json lists."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Where Linux tells who gets huge pages: everybody, who asks, or nobody."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Look at versions, devices, memory and caches, try a small network, and say how to get what is
    missing."""

    json: bool = False
    """Print one JSON object instead of a table: also the versions of all packages."""
    network: bool = False
    """Also try whether weights can be downloaded; without this nothing uses the network."""
    timeout: float = 120.0
    """Give up after this many seconds."""


class Problem(NamedTuple):
    """What is wrong and the way out; what is not `needed` leaves the rest working."""

    what: str
    way_out: str
    needed: bool = True


def examine(settings: Doctor) -> int:
    """Print what was found, problems last; 1 if something that is needed is broken."""
    found, problems = look(settings)
    works = not any(problem.needed for problem in problems)
    if settings.json:
        print(
            json.dumps(
                {"works": works, **found, "problems": [p._asdict() for p in problems]}, indent=1
            )
        )
        return 0 if works else 1
    wrong = " ".join(problem.what for problem in problems)
    left_out = {name for name in found["versions"] if name not in ALWAYS and name not in wrong} | {
        *FOR_DEVELOPERS
    }
    for section, entries in found.items():
        shown = {name: value for name, value in entries.items() if name not in left_out}
        for row, (name, value) in enumerate(shown.items()):
            print(
                f"{'' if row else section:<10} {name:<20} {'missing' if value is None else value}"
            )
    for problem in problems:
        print(
            f"{'PROBLEM' if problem.needed else 'note'}: {problem.what}; way out: {problem.way_out}"
        )
    print("cheem can work here" if works else "cheem cannot work here")
    return 0 if works else 1


def look(settings: Doctor) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """What can be found out, by section and name as JSON values, and what is wrong with it."""
    problems: list[Problem] = []
    told, end = _probe(settings)
    if end is not None:
        problems.append(end)
    versions = _versions(problems)
    extras = _extras()
    gpus = _nvidia_gpus()
    devices, programs, hub = (told.get(step, {}) for step in ("devices", "programs", "hub"))
    if gpus and devices.get("platform") == "cpu":
        way_out = extras.get("cuda12", "").partition("; ")[2]  # empty where it is installed
        if "JAX_PLATFORMS" in os.environ:
            way_out = "unset JAX_PLATFORMS"
        way_out = way_out or "read what `python -c 'import jax; jax.devices()'` prints"
        problems.append(Problem(f"JAX does not use {gpus[0]}", way_out, needed=False))
    if devices.get("platform") == "cpu" and _asks_for_small_pages():
        what = "memory comes in small pages, and training may take up to 1.4 times as long"
        problems.append(
            Problem(
                what, "set GLIBC_TUNABLES=glibc.malloc.hugetlb=1 before it starts", needed=False
            )
        )
    caches = dict(told.get("caches", {}))
    for step, found in (("caches", caches), ("programs", programs), ("hub", hub)):
        if "reason" in found:
            problems.append(
                Problem(found.pop("reason"), found.pop("way_out", STEPS[step]), needed=False)
            )
    places = {"compiled functions": programs.get("place"), **caches, "hub": hub.get("cache")}
    found = {
        "versions": versions,
        "extras": extras,
        "machine": _machine(),
        "devices": devices | {f"nvidia-smi {index}": gpu for index, gpu in enumerate(gpus)},
        "caches": {name: place for name, place in places.items() if place},
        "self_test": told.get("vit_micro", {}),
    }
    return found, problems


def _probe(settings: Doctor) -> tuple[dict[str, dict[str, Any]], Problem | None]:
    """What the other process found, by step, and what ended it."""
    context = multiprocessing.get_context("spawn")
    told = dict[str, dict[str, Any]]()
    reason = None
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=probe, args=(sender, settings.network), daemon=True)
    process.start()
    sender.close()  # so that the end of the process ends the pipe
    until = time.monotonic() + settings.timeout
    try:
        while receiver.poll(max(until - time.monotonic(), 0)):
            step, found = receiver.recv()
            told[step] = found
        reason = f"no answer within {settings.timeout:g} seconds (--timeout)"
        process.kill()
    except EOFError:
        process.join()
        if process.exitcode:
            reason = f"ended with status {process.exitcode}"
    reason = told.pop("failed", {}).get("reason", reason)
    if reason is None:
        return told, None
    step = next((step for step in STEPS if step not in told), "hub")
    # weights may also come from files, so the hub is not needed
    return told, Problem(f"{step}: {reason}", STEPS[step], needed=step != "hub")


def probe(sender: Any, asks_the_hub: bool) -> None:
    """Send what each of `STEPS` finds, and at last what the first one that does not work raises."""
    try:
        for step, found in _tried(asks_the_hub):
            sender.send((step, found))
    except Exception as error:  # a broken installation raises anything
        sender.send(("failed", {"reason": _line(error)}))


def _tried(asks_the_hub: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    # all imports stand where they are tried
    from cheem_jax.data.load import default_directory
    from cheem_jax.data.sources import images_dir

    found = dict[str, Any]()
    for name, place in (
        ("decoded images", default_directory),
        ("decoded benchmarks", lambda: images_dir(None)),
    ):
        try:
            found[name] = str(place())
        except ValueError as error:
            found |= _reason(error)
    yield "caches", found

    start = time.perf_counter()
    import jax

    devices = jax.devices()
    found = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    yield "devices", {**found, "seconds": round(time.perf_counter() - start, 1)}

    from cheem_jax.engine.compilation import keep_programs

    try:
        found = {"place": str(keep_programs() or "")}
    except ValueError as error:
        found = _reason(error)
    yield "programs", found

    import numpy as np

    from cheem_jax.backbone.config import CONFIGS
    from cheem_jax.backbone.params import build
    from cheem_jax.backbone.weights import load_pretrained
    from cheem_jax.engine.compilation import allow_ordinary_programs

    allow_ordinary_programs()

    start = time.perf_counter()
    pretrained = load_pretrained("vit_micro")
    vit = build(pretrained.config, pretrained.params)
    size = pretrained.config.image_size
    features = jax.jit(lambda images: vit(images))(np.zeros((1, size, size, 3), np.uint8))
    if not np.isfinite(features).all():
        raise ArithmeticError("vit_micro computes non-finite features of a blank image")
    yield "vit_micro", {"vit_micro_seconds": round(time.perf_counter() - start, 1)}

    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    from cheem_jax.backbone.weights import repository_of
    from cheem_jax.core.hub import check_cache

    try:
        check_cache()
        found = {"cache": constants.HF_HUB_CACHE}
    except ValueError as error:
        found = _reason(error)
    if asks_the_hub:
        try:
            name = CONFIGS["deit_tiny"].timm_name or ""
            get_hf_file_metadata(hf_hub_url(repository_of(name), "model.safetensors"), timeout=10)
        except Exception as error:  # the client's error classes differ between its releases
            found["reason"] = f"the hub does not answer ({_line(error)})"
    yield "hub", found


def _reason(error: ValueError) -> dict[str, str]:
    """Split an error message at its first semicolon: the problem, and the way out."""
    what, _, way_out = str(error).partition("; ")
    return {"reason": what, "way_out": way_out}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def _versions(problems: list[Problem]) -> dict[str, str | None]:
    """Versions of the packages that are always needed; None: missing."""
    versions = {
        "python": platform.python_version(),
        "cheem_jax": __version__,
        "jaxlib": _version("jaxlib"),
    }
    try:
        for requirement in _requirements("cheem_jax"):
            version = versions[requirement.name] = _version(requirement.name)
            if version is None:
                problems.append(
                    Problem(f"{requirement.name} is missing", f"pip install '{requirement}'")
                )
            elif not requirement.specifier.contains(version, prereleases=True):
                what = f"{requirement.name} is {version}, and {requirement.specifier} is wanted"
                problems.append(Problem(what, f"pip install '{requirement}'", needed=False))
    except ImportError as error:  # the package's metadata, or what reads them
        way_out = "pip install cheem_jax, or pip install -e . in a checkout"
        problems.append(Problem(f"required packages are unknown ({error})", way_out, needed=False))
    return versions


def _extras() -> dict[str, str]:
    """For every extra whether it is installed, or what is missing and how to get it."""
    found = {}
    with contextlib.suppress(ImportError):  # reported with the versions
        for extra in importlib.metadata.metadata("cheem_jax").get_all("Provides-Extra") or []:
            missing = ", ".join(sorted(set(_missing("cheem_jax", extra))))
            found[extra] = (
                f"missing: {missing}; pip install 'cheem_jax[{extra}]'" if missing else "installed"
            )
    return found


def _missing(package: str, extra: str) -> Iterator[str]:
    for requirement in _requirements(package, extra):
        if _version(requirement.name) is None:
            yield requirement.name
        else:
            for inner in requirement.extras:
                yield from _missing(requirement.name, inner)


def _requirements(package: str, extra: str = "") -> Iterator[Any]:
    """What a package's metadata say that it, or one of its extras, needs on this machine."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        marker = requirement.marker
        with_it, without = (
            marker is None or marker.evaluate({"extra": name}) for name in (extra, "")
        )
        if with_it and (not extra or not without):
            yield requirement


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def _nvidia_gpus() -> list[str]:
    """Name, memory and driver of every GPU that NVIDIA's own tool sees."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _asks_for_small_pages() -> bool:
    """Whether Linux gives huge pages to who asks for them, and the C library could ask but is not
    told to."""
    try:
        given = HUGE_PAGES.read_text()
    except OSError:
        return False
    name, version = platform.libc_ver()
    asks = "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "")
    return (
        "[madvise]" in given
        and name == "glibc"
        and tuple(map(int, version.split("."))) >= (2, 35)
        and not asks
    )


def _machine() -> dict[str, Any]:
    """System, cores, gigabytes of memory and of free disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory, disk = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        shutil.disk_usage(".").free / 1e9,
    )
    return {
        "system": platform.platform(),
        "cores": cores,
        "memory_gb": round(memory, 1),
        "disk_free_gb": round(disk, 1),
    }
