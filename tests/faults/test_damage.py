"""Corrupted, lost and swapped files are refused before anything is read; foreign ones change
nothing."""

import random
import shutil
from pathlib import Path

import pytest
from scenarios import memory

from cheem_jax.cheem.saved_memory import save_memory_task
from cheem_jax.run.checkpoint import load_task

FLIPS_PER_FILE = 24


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two tasks of one memory, and the same two of another run."""
    root = tmp_path_factory.mktemp("saved")
    for run in ("one", "two"):
        for index in range(2):
            save_memory_task(root / run, memory(), index, rank=2 if run == "one" else 3)
    return root


def files_of(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.rglob("*")) if file.is_file()]


def refused(directory: Path) -> bool:
    """Whether loading raises a ValueError that names the directory; other errors are raised."""
    try:
        load_task(directory)
    except ValueError as error:
        return str(directory) in str(error)
    return False


class Corruption:
    """Replaces files of a checkpoint, one at a time, and lists the replacements that load."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.tried = 0
        self.accepted = []

    def put(self, file: Path, content: bytes | None, change: str) -> None:
        """Load with this content of a file, or without the file for `None`, and restore it."""
        before = file.read_bytes() if file.exists() else None
        if content == before:
            return
        file.unlink() if content is None else file.write_bytes(content)
        self.check(f"{file.name} {change}")
        file.unlink(missing_ok=True) if before is None else file.write_bytes(before)

    def check(self, change: str) -> None:
        """Count the present change, and whether it is refused."""
        self.tried += 1
        if not refused(self.directory):
            self.accepted.append(change)

    def count(self, tally) -> None:
        """Check that no change was accepted and that the restored checkpoint loads."""
        tally.add("corrupted files", tried=self.tried, bad=len(self.accepted))
        load_task(self.directory)
        assert not self.accepted, (
            f"{len(self.accepted)} of {self.tried} accepted: {self.accepted[:20]}"
        )


def test_flipped_bits_are_found_at_every_place(saved, tally):
    rng = random.Random(0)
    corruption = Corruption(saved / "one" / "000-task-0")
    for file in files_of(corruption.directory):
        content = file.read_bytes()
        for place in {
            0,
            len(content) - 1,
            *(rng.randrange(len(content)) for _ in range(FLIPS_PER_FILE)),
        }:
            bit = rng.randrange(8)
            flipped = content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
            corruption.put(file, flipped, f"bit {bit} of byte {place}")
    assert corruption.tried > 250
    corruption.count(tally)


def test_files_cut_emptied_lengthened_or_missing_are_found(saved, tally):
    corruption = Corruption(saved / "one" / "001-task-1")
    for file in files_of(corruption.directory):
        content = file.read_bytes()
        for length in sorted(
            {0, 1, len(content) // 4, len(content) // 2, len(content) - 2, len(content) - 1}
        ):
            corruption.put(file, content[:length], f"cut to {length}")
        corruption.put(file, content + b"\0", "one byte longer")
        corruption.put(file, content * 2, "twice")
        corruption.put(file, bytes(len(content)), "zeros")
        corruption.put(file, None, "missing")
    assert corruption.tried > 100
    corruption.count(tally)


@pytest.mark.parametrize("other", ["one/001-task-1", "two/000-task-0"], ids=["task", "run"])
def test_files_of_another_task_or_run_are_found(saved, tally, other):
    corruption = Corruption(saved / "one" / "000-task-0")
    source = saved / other
    for file in files_of(corruption.directory):
        same_name = source / file.relative_to(corruption.directory)
        if same_name.exists():
            corruption.put(file, same_name.read_bytes(), f"of {other}")
    assert corruption.tried > 5
    corruption.count(tally)


def test_a_manifest_of_another_task_does_not_vouch_for_this_one(saved, tally, tmp_path):
    for part in ("arrays", "task.json", "manifest.json"):
        copy = tmp_path / part / "000-task-0"
        shutil.copytree(saved / "one" / "000-task-0", copy)
        for other in ("one/001-task-1", "two/000-task-0"):
            source = saved / other / part
            if source.is_dir():
                shutil.rmtree(copy / part)
                shutil.copytree(source, copy / part)
            else:
                shutil.copy(source, copy / part)
            same = part == "arrays" and other.startswith("two")  # equal arrays under other names
            wrong = not refused(copy)
            tally.add("corrupted files", tried=1, bad=int(wrong and not same))
            assert same or not wrong, f"{part} of {other} accepted"


@pytest.mark.parametrize(
    "num", [pytest.param(16, marks=pytest.mark.full), pytest.param(120, marks=pytest.mark.slow)]
)
def test_corrupted_records_are_refused_by_name(nursery, tally, undisturbed, tmp_path, num):
    child = nursery.start(
        "corrupted_records",
        source=str(undisturbed.directory),
        folder=str(tmp_path),
        weights=undisturbed.weights,
        num=num,
    )
    result = child.result(1800)
    tally.add("corrupted files", tried=result["tried"], bad=len(result["bad"]))
    assert not result["bad"], "\n".join(result["bad"])
