"""`cheem doctor` on sound and on broken installations: problems are reported and never crash it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cheem_jax.cli import doctor
from cheem_jax.run.fingerprint import PACKAGES

ROOT = Path(__file__).parent.parent


def run(*arguments, before="", **environment):
    """Run the command in a separate process, with `first` first on the path."""
    return subprocess.run(
        [sys.executable, "-m", "cheem_jax", "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(before), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Write metadata of packages that shadow the installed ones."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, *lines):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0", *lines])
        )

    return write


@pytest.fixture
def sound(monkeypatch):
    """The results of a process whose steps succeed."""
    results = {"devices": {"platform": "cpu", "kind": "cpu", "count": 1}}
    monkeypatch.setattr(doctor, "run_probe", lambda settings: (dict(results), []))
    monkeypatch.setattr(doctor, "HUGE_PAGES", Path("no/such/file"))


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine where NVIDIA's tool sees a GPU."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")


def test_a_sound_installation_computes_and_names_its_caches(tmp_path):
    done = run(
        "--json",
        HOME=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "c"),
        JAX_COMPILATION_CACHE_DIR="",
    )
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["works"] is True, done.stdout + done.stderr
    assert {"python", "cheem_jax", *PACKAGES} <= {name.lower() for name in result["versions"]}
    assert result["devices"]["platform"] == "cpu" and result["devices"]["count"] >= 1
    assert result["vit_micro"]["seconds"] > 0
    assert result["compiled functions"]["folder"].startswith(str(tmp_path / "c"))
    assert result["caches"]["decoded images"] == str(tmp_path / "c" / "cheem_jax" / "images")
    assert result["extras"]["tensorboard"] == "installed"


def test_without_a_home_folder_a_note_says_so(monkeypatch, sound, capsys):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Python's answer without a home
    for name in ("XDG_CACHE_HOME", "TFDS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "CHECKS", {"caches": doctor.CHECKS["caches"]})
    doctor.probe(network=False)
    name, _, problem = json.loads(capsys.readouterr().out.removeprefix(doctor.MARK))
    monkeypatch.setattr(doctor, "run_probe", lambda _: ({name: {}}, [doctor.Problem(*problem)]))
    assert doctor.examine(doctor.Doctor()) == 0
    note, verdict = capsys.readouterr().out.splitlines()[-2:]
    assert note.startswith("note: ") and "the home folder is unknown" in note
    assert note.endswith("solution: set HOME, or give the full path")
    assert verdict == "cheem works on this machine"


def test_a_broken_jax_is_reported_last_with_the_way_out(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        "print('loading')\nraise RuntimeError('jaxlib is too old\\nfor this jax')"
    )
    done = run(before=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    *table, problem, verdict = done.stdout.splitlines()
    assert problem.startswith(
        "PROBLEM: devices: RuntimeError: jaxlib is too old for this jax; solution: pip install"
    )
    assert verdict == "cheem does not work on this machine"
    assert any("cheem_jax" in line for line in table)


def test_devices_without_an_answer_are_given_up_after_the_timeout(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import time; time.sleep(60)")
    done = run("--json", "--timeout", "1.5", before=tmp_path)
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.returncode == 1 and "no answer within 1.5 seconds" in problem["what"]


def test_a_crashed_process_is_reported_with_its_status(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import os; os.abort()")
    (problem,) = json.loads(run("--json", before=tmp_path).stdout)["problems"]
    assert problem["what"].startswith("devices: ended with status -6")


def test_a_gpu_that_jax_does_not_use_is_reported_with_the_extra(installed, sound, gpu, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    installed(
        "cheem_jax", "Provides-Extra: cuda12", "Requires-Dist: jax[cuda12] ; extra == 'cuda12'"
    )
    installed("jax", "Provides-Extra: cuda12", "Requires-Dist: a-plugin ; extra == 'cuda12'")
    result, (note,) = doctor.collect(doctor.Doctor())
    assert result["gpus"]["nvidia-smi 0"] == "NVIDIA H200, 143771 MiB, 570.1"
    assert result["extras"]["cuda12"] == "missing: a-plugin; pip install 'cheem_jax[cuda12]'"
    assert note == (
        "JAX does not use NVIDIA H200, 143771 MiB, 570.1",
        "pip install 'cheem_jax[cuda12]'",
        False,
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    _, (note,) = doctor.collect(doctor.Doctor())
    assert note.way_out == "unset JAX_PLATFORMS"


@pytest.mark.parametrize(
    ("enabled", "libc", "tunables", "is_reported"),
    [
        ("always [madvise] never", ("glibc", "2.36"), "", True),
        ("[always] madvise never", ("glibc", "2.36"), "", False),
        ("always [madvise] never", ("glibc", "2.31"), "", False),
        ("always [madvise] never", ("", ""), "", False),
        ("always [madvise] never", ("glibc", "2.36"), "glibc.malloc.hugetlb=1", False),
    ],
)
def test_huge_pages_that_are_not_requested_are_a_note(
    enabled, libc, tunables, is_reported, sound, monkeypatch, tmp_path
):
    (tmp_path / "enabled").write_text(enabled)
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: libc)
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    _, problems = doctor.collect(doctor.Doctor())
    notes = [problem for problem in problems if "glibc.malloc.hugetlb=1" in problem.way_out]
    assert bool(notes) == is_reported and not any(note.needed for note in notes)


def test_a_missing_package_is_a_problem_and_an_old_one_a_note(installed, sound, capsys):
    installed(
        "cheem_jax",
        "Provides-Extra: more",
        "Requires-Dist: no-such-package>=2",
        "Requires-Dist: numpy>=999",
        "Requires-Dist: only-elsewhere; sys_platform == 'nowhere'",
        "Requires-Dist: no-such-extra; extra == 'more'",
    )
    assert doctor.examine(doctor.Doctor(json=True)) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["versions"]["no-such-package"] is None
    assert "only-elsewhere" not in result["versions"]
    assert result["extras"] == {"more": "missing: no-such-extra; pip install 'cheem_jax[more]'"}
    missing, old = result["problems"][:2]
    assert missing == {
        "what": "no-such-package is missing",
        "way_out": "pip install 'no-such-package>=2'",
        "needed": True,
    }
    assert ">=999 is required" in old["what"] and not old["needed"]
