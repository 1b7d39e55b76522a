"""Full, failing and read-only disks: a fault is reported, and the file is unchanged or complete."""

import random
import time

import pytest
from jobs import outcome

SHORT = {"short": True}
LASTING = {"persistent": True}
VARIANTS = [
    {"error": "ENOSPC", **LASTING, **SHORT},
    {"error": "EIO"},
    {"error": "EROFS", **LASTING},
    {"error": "EDQUOT", **SHORT},
    {"error": "ENOSPC"},
    {"error": "EIO", **LASTING},
    {"error": "EIO", **SHORT},
]


def _count(tally, result):
    tally.add("storage faults", tried=result["tried"], bad=len(result["bad"]))
    assert not result["bad"], (
        f"{len(result['bad'])} of {result['tried']}, kinds {result['kinds']}:\n"
        + "\n".join(result["bad"][:20])
    )


@pytest.mark.full
def test_a_checkpoint_is_there_whole_or_not_at_all(faulty, tally, tmp_path):
    result = faulty.call(
        "storage_faults", scenario="save_memory_task", folder=str(tmp_path), variants=VARIANTS
    )
    assert result["tried"] >= 20
    _count(tally, result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values()))
)
@pytest.mark.parametrize("scenario", ["save_memory_task", "save_task"])
def test_every_fault_at_every_write_leaves_a_checkpoint_whole_or_not_at_all(
    faulty, tally, tmp_path, scenario, variant
):
    child = faulty.start(
        "storage_faults", scenario=scenario, folder=str(tmp_path), variants=[variant]
    )
    _count(tally, child.result(1800))


@pytest.mark.parametrize(
    "scenario", ["write_atomically", "Record.write", "Record.keep", "claim", "hold"]
)
def test_small_files_are_as_before_or_wholly_new(faulty, tally, tmp_path, scenario):
    for number, variant in enumerate(VARIANTS):
        folder = tmp_path / str(number)
        result = faulty.call(
            "storage_faults", scenario=scenario, folder=str(folder), variants=[variant]
        )
        assert result["tried"]
        _count(tally, result)


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_read_is_named(faulty, tally, undisturbed):
    directory = undisturbed.directory / "checkpoints" / "cheem" / "000-task0"
    result = faulty.call("unreadable", directory=str(directory))
    assert result["tried"] >= 10
    _count(tally, result)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_run_on_a_failing_disk_says_so_and_resumes_exactly(
    faulty, tally, undisturbed, tmp_path, seed
):
    child = faulty.start(
        "stream_faults",
        folder=str(tmp_path),
        weights=undisturbed.weights,
        expected=undisturbed.outcome,
        operations=undisturbed.operations,
        seed=seed,
        num=28,
    )
    result = child.result(3600)
    assert result["tried"] >= 25
    _count(tally, result)


@pytest.mark.slow
def test_a_read_only_folder_is_refused_in_one_line(faulty, tally, undisturbed, tmp_path):
    result = faulty.call("read_only", directory=str(tmp_path / "run"), weights=undisturbed.weights)
    lines = [line for line in result["said"].splitlines() if not line.startswith("note:")]
    good = (
        result["status"] == 2
        and len(lines) == 1
        and lines[0].startswith("error: ")
        and not result["exists"]
    )
    tally.add("storage faults", tried=1, ok=int(good))
    assert good, result


@pytest.mark.slow
def test_a_clock_set_back_by_a_year_changes_nothing(faulty, undisturbed, tmp_path):
    year = 365 * 24 * 3600
    faulty.call(
        "small_run",
        directory=str(tmp_path / "run"),
        weights=undisturbed.weights,
        clock_back=year,
        save_every=0.0,
    )
    assert outcome(tmp_path / "run") == undisturbed.outcome
    times = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert str(time.gmtime().tm_year) in times
    assert str(time.gmtime(time.time() - year).tm_year) in times


@pytest.mark.slow
@pytest.mark.parametrize("phase", range(1, 9))
def test_a_run_that_ran_out_of_memory_resumes_exactly(nursery, tally, undisturbed, tmp_path, phase):
    more = random.Random(phase).randrange(64) << 20
    run = {"directory": str(tmp_path / "run"), "weights": undisturbed.weights}
    child = nursery.start("small_run", **run, memory=(phase, more), save_every=0.0)
    try:
        child.wait(120)
    except TimeoutError:  # it waits for a thread that could not start; wait() has killed the child
        child.wait()
    nursery.call("small_run", **run)
    good = outcome(tmp_path / "run") == undisturbed.outcome
    tally.add("kills", tried=1, ok=int(good), phase="out of memory")
    assert good
