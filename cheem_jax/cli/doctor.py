"""`cheem doctor`: versions, devices, memory, caches and a small network, and for what is missing how to get it.

Nothing but the standard library is imported before it is looked at: what may be broken runs in a process of its own.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cheem_jax import __version__

SETTINGS = (
    "TFDS_DATA_DIR", "CHEEM_SHARED", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS",
    "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE",
)  # fmt: skip
"""Environment variables that decide where things are and what they run on."""
FOLDERS = ("TFDS_DATA_DIR", "CHEEM_SHARED")
SCARCE = 2**30
"""Bytes of memory or disk below which a run will hardly go through."""
REINSTALL = "pip install --force-reinstall cheem_jax"
STEPS = {
    "caches": REINSTALL,
    "devices": "pip install --force-reinstall jax jaxlib, or if a GPU is the matter go without it by JAX_PLATFORMS=cpu",
    "programs": "name another folder with JAX_COMPILATION_CACHE_DIR",
    "jit": "pip install --force-reinstall jax jaxlib",
    "vit_micro": REINSTALL,
    "backbones": "pip install --force-reinstall huggingface_hub",
}
"""What the probe tells, in its order, and the way out where it does not come so far."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Look at versions, devices, memory and caches, try a small network, and say how to get what is missing."""

    json: bool = False
    """Print one JSON object instead of a table."""
    network: bool = False
    """Also ask the hub for a backbone; otherwise the network is left alone."""
    timeout: float = 120.0
    """Seconds that JAX, its devices and the small network may take."""


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
        print(json.dumps({"works": works, **found, "problems": [p._asdict() for p in problems]}, indent=1))
    else:
        _show(found, problems)
    return 0 if works else 1


def look(settings: Doctor) -> tuple[dict[str, Any], list[Problem]]:
    """Everything that can be found out, as plain JSON values, and what is wrong with it."""
    problems: list[Problem] = []
    told, end = _probe(settings)
    if end is not None:
        problems.append(end)
    versions, extras = _versions(problems), _extras()
    gpus, machine = _nvidia_gpus(), _machine(problems)
    devices, programs, hub = told.get("devices", {}), told.get("programs", {}), told.get("hub")
    if gpus and devices.get("platform") == "cpu":
        way_out = "read what `python -c 'import jax; jax.devices()'` says"
        if "JAX_PLATFORMS" in os.environ:
            way_out = "unset JAX_PLATFORMS"
        elif extras.get("cuda12", {}).get("missing"):
            way_out = extras["cuda12"]["get"]
        problems.append(Problem(f"JAX does not use {gpus[0]}", way_out, needed=False))
    if "reason" in programs:
        problems.append(Problem(programs["reason"], STEPS["programs"], needed=False))
    if hub and not hub["answers"]:
        what = f"the hub does not answer ({hub['reason']})"
        problems.append(Problem(what, "give weights as files (--weights FILE)", needed=False))
    for name in FOLDERS:
        if (folder := os.environ.get(name)) and not Path(folder).expanduser().is_dir():
            what = f"{name} is {folder!r}, which is no folder"
            problems.append(Problem(what, f"correct or unset {name}", needed=False))
    places = {
        "compiled programs": programs.get("place"),
        **told.get("caches", {}),
        "hub": told.get("backbones", {}).pop("place", None),
    }
    found = {
        "versions": versions,
        "extras": extras,
        "machine": machine,
        "gpus": gpus,
        "devices": devices,
        "caches": {name: _place(Path(place)) for name, place in places.items() if place},
        "backbones": told.get("backbones", {}),
        "hub": hub,
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "self_test": {step: told[step] for step in ("jit", "vit_micro") if step in told},
    }
    return found, problems


def _probe(settings: Doctor) -> tuple[dict[str, dict[str, Any]], Problem | None]:
    """What the other process told, by step, and what ended it."""
    program = f"from cheem_jax.cli.probe import probe; probe({settings.network})"
    # -P and the path of this process: it finds the packages that this one finds, and no others
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    output, reason = b"", None
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], env=environment, capture_output=True, timeout=settings.timeout
        )
        output = done.stdout
        if done.returncode:
            complaint = done.stderr.decode(errors="replace").strip().splitlines()
            reason = " ".join([f"ended with status {done.returncode}", *complaint[-1:]])
    except subprocess.TimeoutExpired as late:
        output, reason = late.stdout or b"", f"no answer within {settings.timeout:g} seconds (--timeout)"
    told: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        with contextlib.suppress(
            ValueError, LookupError, TypeError, AttributeError
        ):  # a line cut off by the end, or somebody else's
            entry = json.loads(line)
            told[entry.pop("step")] = entry
    reason = told.pop("failed", {}).get("reason", reason)
    if reason is None:
        return told, None
    step = next((step for step in STEPS if step not in told), "backbones")
    # the hub is only one of the places that weights come from
    return told, Problem(f"{step}: {reason}", STEPS[step], needed=step != "backbones")


def _requirements(package: str, extra: str) -> Iterator[Any]:
    """What a package's metadata say that it, or one of its extras, needs on this machine."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        marker = requirement.marker
        with_it, without = (marker is None or marker.evaluate({"extra": name}) for name in (extra, ""))
        if with_it and (not extra or not without):
            yield requirement


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions(problems: list[Problem]) -> dict[str, str | None]:
    """Versions of the packages that are always needed; None: missing."""
    versions = {"python": platform.python_version(), "cheem_jax": __version__, "jaxlib": _version("jaxlib")}
    try:
        requirements = list(_requirements("cheem_jax", ""))
    except ImportError as error:  # the package's metadata, or what reads them
        what = "cheem_jax is not installed, so nothing says which packages it needs"
        if error.name == "packaging":
            what = "the package `packaging` cannot be imported"
        problems.append(Problem(what, "pip install cheem_jax, or pip install -e . in a checkout", needed=False))
        return versions
    for requirement in requirements:
        version = versions[requirement.name] = _version(requirement.name)
        if version is None:
            problems.append(Problem(f"{requirement.name} is missing", f"pip install '{requirement}'"))
        elif not requirement.specifier.contains(version, prereleases=True):
            what = f"{requirement.name} is {version}, and {requirement.specifier} is wanted"
            problems.append(Problem(what, f"pip install '{requirement}'", needed=False))
    return versions


def _extras() -> dict[str, dict[str, Any]]:
    """For every extra the packages that are missing, and how to get them."""
    try:
        extras = importlib.metadata.metadata("cheem_jax").get_all("Provides-Extra") or []
        return {
            extra: {"missing": missing, "get": f"pip install 'cheem_jax[{extra}]'"}
            for extra in extras
            for missing in [sorted(set(_missing("cheem_jax", extra)))]
        }
    except ImportError:  # told with the versions
        return {}


def _missing(package: str, extra: str) -> Iterator[str]:
    for requirement in _requirements(package, extra):
        if _version(requirement.name) is None:
            yield requirement.name
        else:
            for inner in requirement.extras:
                yield from _missing(requirement.name, inner)


def _nvidia_gpus() -> list[str]:
    """Name, memory and driver of every GPU that NVIDIA's own tool sees."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _machine(problems: list[Problem]) -> dict[str, Any]:
    """Cores, bytes of memory and of disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    page = os.sysconf("SC_PAGE_SIZE")
    machine = {
        "system": platform.platform(),
        "cores": cores,
        "memory": page * os.sysconf("SC_PHYS_PAGES"),
        "memory_free": None,
        "disk_free": shutil.disk_usage(".").free,
    }
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable"))
        machine["memory_free"] = int(free.split()[1]) * 1024
    for what, where in (("memory", "memory_free"), ("disk", "disk_free")):
        if machine[where] is not None and machine[where] < SCARCE:
            way_out = "end other programs" if what == "memory" else "make room, or keep runs elsewhere with --run-dir"
            problems.append(Problem(f"{machine[where] / 1e9:.1f} GB of {what} free", way_out, needed=False))
    return machine


def _place(folder: Path) -> dict[str, Any]:
    """Bytes in a folder, and bytes free where it is or will be."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return {"place": str(folder), "bytes": total, "disk_free": shutil.disk_usage(there).free}


def _show(found: dict[str, Any], problems: list[Problem]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(show_header=False, box=None)
    for heading, name, value in _rows(found):
        table.add_row(Text(heading, "bold"), Text(name), Text(value))
    console.print(table)
    for problem in problems:
        kind = "PROBLEM" if problem.needed else "note"
        console.print(Text(f"{kind}: {problem.what}; way out: {problem.way_out}"), soft_wrap=True)
    works = not any(problem.needed for problem in problems)
    console.print(Text("cheem can work here" if works else "cheem cannot work here"))


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Heading, name and value of every line; a heading stands only in its first line."""
    machine, devices = found["machine"], found["devices"]
    free = "" if machine["memory_free"] is None else f", {machine['memory_free'] / 1e9:.1f} GB free"
    sections: dict[str, dict[str, str]] = {
        "versions": {name: version or "missing" for name, version in found["versions"].items()},
        "extras": {
            name: f"missing: {', '.join(extra['missing'])}; {extra['get']}" if extra["missing"] else "installed"
            for name, extra in found["extras"].items()
        },
        "machine": {
            "system": machine["system"],
            "cores": str(machine["cores"]),
            "memory": f"{machine['memory'] / 1e9:.1f} GB{free}",
            "disk": f"{machine['disk_free'] / 1e9:.1f} GB free here",
        },
        "devices": {
            **{f"nvidia-smi {index}": gpu for index, gpu in enumerate(found["gpus"])},
            "jax": "{count} x {platform} ({kind}), found in {seconds:.1f} s".format(**devices) if devices else "none",
        },
        "caches": {
            name: f"{cache['place']}: {cache['bytes'] / 1e6:,.1f} MB, {cache['disk_free'] / 1e9:.1f} GB free"
            for name, cache in found["caches"].items()
        },
        "backbones": found["backbones"] | ({"hub": "answers"} if (found["hub"] or {}).get("answers") else {}),
        "settings": found["settings"],
        "self-test": {
            step: f"{told['seconds']:.2f} s"
            + (f", {told['compiled']} compiled, {told['read_from_cache']} from the cache" if "compiled" in told else "")
            for step, told in found["self_test"].items()
        },
    }
    for heading, entries in sections.items():
        for index, (name, value) in enumerate(entries.items()):
            yield heading if index == 0 else "", name, value
