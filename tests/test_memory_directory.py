"""A memory's folder appears whole or not at all, wherever it is; foreign files next to it are left
alone."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cheem_jax.core.atomic import room_for, write_atomically
from cheem_jax.memory.directory import (
    NAME,
    check_free,
    new_directory,
    remove_memory,
    remove_old_generations,
)

FOREIGN = (
    ".DS_Store",
    "._x",
    "Thumbs.db",
    "desktop.ini",
    ".nfs000a",
    ".directory",
    "x.txt~",
    "lost+found",
    ".stfolder",
)


FILL = """
import sys
from pathlib import Path
from cheem_jax.memory.directory import new_directory
try:
    with new_directory(Path(sys.argv[1])):
        pass
except ValueError as error:
    print(error)
"""


def fill(folder):
    (folder / NAME).write_text("{}")
    (folder / "generation-0001" / "cheem").mkdir(parents=True)
    (folder / "weights").write_text("w")


def names(folder):
    return {file.name for file in folder.iterdir()}


OURS = {NAME, "generation-0001", "weights"}


@pytest.fixture
def volume(tmp_path):
    """A folder that exists already, as a mounted volume does, with the files that systems put into
    one."""
    folder = tmp_path / "volume"
    folder.mkdir()
    for name in FOREIGN:
        (folder / name).write_bytes(b"x")
    (folder / ".volume.999.partial").mkdir()  # of a process that was killed
    return folder


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    with new_directory(tmp_path / "a" / "mem") as partial:
        fill(partial)
        assert not (tmp_path / "a" / "mem").exists()
    assert names(tmp_path / "a") == {"mem"} and names(tmp_path / "a" / "mem") == OURS
    for folder in (tmp_path / "b", tmp_path / "c" / "d" / "mem", tmp_path / "a" / "e" / "mem"):
        with pytest.raises(ZeroDivisionError), new_directory(folder) as partial:
            fill(partial)
            raise ZeroDivisionError
    assert names(tmp_path) == {"a"} and names(tmp_path / "a") == {"mem"}


def test_hidden_folders_of_killed_processes_are_removed_and_those_of_others_stay(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    host = socket.gethostname()
    dead = f".mem.{host}.{process.pid}.partial"
    others = {
        f".mem.{host}.{os.getppid()}.partial",
        f".mem.other-machine.{process.pid}.partial",
        f".mem.x.{host}.{process.pid}.partial",
        ".mem.partial",
    }
    for name in (dead, *others):
        fill_below = tmp_path / name / "generation-0001"
        fill_below.mkdir(parents=True)
    with new_directory(tmp_path / "mem") as partial:
        fill(partial)
    assert names(tmp_path) == {"mem", *others}


def test_a_folder_that_is_there_is_filled_and_never_replaced(volume, monkeypatch):
    before = volume.stat().st_ino
    order = []
    rename = os.rename

    def note(source, target):
        order.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "rename", note)
    with new_directory(volume) as partial:
        fill(partial)
        assert not OURS & names(volume)
    assert volume.stat().st_ino == before and names(volume) == {*OURS, *FOREIGN, ".lock"}
    assert order[-1] == NAME  # without which nothing opens, should the machine stop here
    with pytest.raises(ValueError, match="exists and is not empty"):
        check_free(volume)


def test_a_folder_that_cannot_be_filled_stays_as_it_was(volume, monkeypatch):
    rename = os.rename

    def fails(source, target):
        if Path(target).name == NAME:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output"), new_directory(volume) as partial:
        fill(partial)
    assert names(volume) == set(FOREIGN)


def test_a_folder_that_cannot_be_made_is_named_in_one_line(tmp_path, monkeypatch):
    def mkdir(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with (
        pytest.raises(
            ValueError,
            match=r"mem' cannot be created \(Permission denied\); choose another folder$",
        ),
        new_directory(tmp_path / "mem"),
    ):
        raise AssertionError


def test_of_two_processes_that_fill_one_folder_the_second_one_is_refused(tmp_path):
    folder = tmp_path / "mem"
    folder.mkdir()
    command = [sys.executable, "-c", FILL, str(folder)]
    with new_directory(folder) as partial:
        fill(partial)
        done = subprocess.run(command, capture_output=True, text=True)
        assert f"is in use by process {os.getpid()}" in done.stdout, done.stderr
    assert {name for name in names(folder) if name[0] != "."} == OURS
    done = subprocess.run(command, capture_output=True, text=True)
    assert "exists and is not empty" in done.stdout, done.stderr


def test_removing_a_memory_leaves_foreign_files(volume, tmp_path):
    for folder, remaining in ((volume, set(FOREIGN)), (tmp_path / "mem", None)):
        with new_directory(folder) as partial:
            fill(partial)
        (folder / ".lock").touch()
        remove_memory(folder)
        assert not folder.exists() if remaining is None else names(folder) == remaining


def test_only_generations_of_the_memory_are_removed(tmp_path):
    for name in (
        "generation-0001",
        "generation-0002",
        "generation-0001 (copy)",
        ".generation-0003.12.partial",
        ".generation-0003.a.machine.12.partial",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "generation-0001.zip").write_bytes(b"x")
    remove_old_generations(tmp_path, 2)
    assert names(tmp_path) == {"generation-0002", "generation-0001 (copy)", "generation-0001.zip"}


def test_a_file_that_cannot_be_replaced_is_named_and_not_its_sibling(tmp_path, monkeypatch):
    def busy(source, target):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source), None, str(target))

    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(OSError, match=rf"choose a file in another folder: '{tmp_path}/x.onnx'$"):
        write_atomically(tmp_path / "x.onnx", b"x")
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("num_bytes", "size"), [(1024, "1.0 kB"), (2**20 - 512, "1023.5 kB"), (2**20, "1.0 MB")]
)
def test_a_full_disk_is_reported_with_the_size_of_the_file(num_bytes, size):
    with pytest.raises(OSError, match=rf"No space left on device, but {size} must be written"):
        with room_for(Path("x"), num_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_on_the_disk_before_it_has_its_name_and_no_handle_stays_open(
    tmp_path, monkeypatch
):
    events = []
    fsync, replace = os.fsync, os.replace

    def noted(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append((path.is_dir(), path.stat().st_size if path.is_file() else 0))
        fsync(handle)

    def renamed(source, target):
        events.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", renamed)
    handles = os.listdir("/proc/self/fd")
    write_atomically(tmp_path / "x.onnx", b"abc")
    # all three bytes, then the name, then the folder that has the name
    assert events == [(False, 3), "renamed", (True, 0)]
    assert len(os.listdir("/proc/self/fd")) == len(handles)


def test_a_read_only_disk_is_reported_with_the_name_of_the_file(tmp_path, monkeypatch):
    def refuses(self, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    for name in ("open", "unlink"):  # Linux refuses even to remove a missing file
        monkeypatch.setattr(Path, name, refuses)
    with pytest.raises(
        OSError, match=rf"Read-only file system, but .* must be written: '{tmp_path}/x.onnx'$"
    ):
        write_atomically(tmp_path / "x.onnx", b"x")
