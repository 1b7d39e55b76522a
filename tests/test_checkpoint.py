"""Checkpoints: a memory is restored from one small directory per task, and none is overwritten."""

import importlib
import shutil
import sys
from operator import attrgetter
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small
from small import grown

from cheem_jax.cheem.saved_memory import (
    open_memory,
    open_usable,
    save_forgotten,
    save_memory_task,
)
from cheem_jax.core.pool import InternalMemory, base_pool, dense_expert
from cheem_jax.memory.forgetting import forget
from cheem_jax.run import checkpoint
from cheem_jax.run.checkpoint import (
    FORMAT,
    content_hash,
    copy_task,
    files_of,
    load_manifest,
    load_task,
    save_task,
    saved_tasks,
    task_directory,
)

FIXTURES = Path(__file__).parent / "fixtures"
POOL = base_pool(small.backbone().experts("mlp_down"))


def two_tasks():
    memory = grown(InternalMemory(POOL), "Textures, two", ["adapt:0", "new", "reuse:0", "skip"], 0)
    return grown(memory, "shapes", ["adapt:1", "reuse:1", "skip", "new"], 1)


def save_all(root, memory):
    """Save every task, and return the directories."""
    return [save_memory_task(root, memory, index, rank=2) for index in range(len(memory.tasks))]


def check_same(opened, memory):
    """Check that two memories have the same experts and tasks."""
    chex.assert_trees_all_equal(opened.pool, memory.pool)
    fields = attrgetter("name", "classes", "architecture", "experts")
    arrays = attrgetter("head", "means", "centroids")
    assert list(map(fields, opened.tasks)) == list(map(fields, memory.tasks))
    chex.assert_trees_all_equal(list(map(arrays, opened.tasks)), list(map(arrays, memory.tasks)))


def test_a_memory_is_restored_from_its_directories(tmp_path):
    root, memory = tmp_path / "a b%20#?", two_tasks()
    save_all(root, memory)
    assert [d.name for d in saved_tasks(root)] == ["000-textures-two", "001-shapes"]
    opened = open_memory(root, POOL)
    check_same(opened, memory)
    chex.assert_trees_all_equal(dense_expert(opened.pool[0], 2), dense_expert(memory.pool[0], 2))


def test_a_task_with_a_long_name_has_a_directory_with_a_short_one(tmp_path):
    names = [f"{'a' * 300}{end}" for end in "xy"]
    for index, name in enumerate(names):
        save_task(task_directory(tmp_path, index, name), {"x": np.ones(2)}, {"name": name})
    assert [load_task(directory)[1]["name"] for directory in saved_tasks(tmp_path)] == names
    assert task_directory(tmp_path, 0, "-" * 300).name == "000-task"


def test_a_directory_contains_only_the_additions_of_its_task(tmp_path):
    _, second = save_all(tmp_path, two_tasks())
    arrays, meta = load_task(second)
    # its Adapt and New; the reused experts are the first task's
    assert sorted(arrays["experts"]) == ["0", "3"]
    assert meta["architecture"] == ["adapt:1", "reuse:1", "skip", "new"]


def test_a_learned_task_is_never_overwritten(tmp_path):
    save_task(tmp_path / "000-a", {"x": np.ones(2)}, {"name": "a"})
    with pytest.raises(FileExistsError, match="never overwritten"):
        save_task(tmp_path / "000-a", {"x": np.zeros(2)}, {"name": "a"})
    arrays, _ = load_task(tmp_path / "000-a")
    np.testing.assert_array_equal(arrays["x"], np.ones(2))


def test_an_unfinished_write_is_not_a_task(tmp_path):
    save_task(tmp_path / "000-a", {"x": np.ones(2)}, {"name": "a"})
    (tmp_path / ".001-b.partial").mkdir()
    assert [d.name for d in saved_tasks(tmp_path)] == ["000-a"]
    save_task(tmp_path / "001-b", {"x": np.ones(1)}, {"name": "b"})
    assert len(saved_tasks(tmp_path)) == 2 and not (tmp_path / ".001-b.partial").exists()


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_corrupted_task_is_named_with_the_way_out(tmp_path, is_folder):
    save_task(tmp_path / "000-a", {"x": np.ones(2)}, {"name": "a"})
    file = tmp_path / "000-a" / "task.json"
    file.unlink()
    file.mkdir() if is_folder else file.write_text("{")
    with pytest.raises(ValueError, match="000-a is corrupted .*restore it from a copy"):
        load_task(tmp_path / "000-a")


def test_a_memory_whose_earlier_task_is_from_another_run_is_refused(tmp_path):
    memory = two_tasks()
    save_memory_task(tmp_path, memory, 1, rank=2)
    save_memory_task(tmp_path, grown(InternalMemory(POOL), "other", ["skip"] * 4, 3), 0, rank=2)
    with pytest.raises(ValueError, match="001-shapes is invalid .it uses experts"):
        open_memory(tmp_path, POOL)


def with_meta(root, memory, change):
    """Save a memory whose first task has other metadata, under hashes that fit it."""
    arrays, meta = load_task(save_memory_task(root / "whole", memory, 0, rank=2))
    change(meta)
    meta.pop("format")
    save_task(root / "changed" / "000-a", arrays, meta)
    return root / "changed"


@pytest.mark.parametrize(
    ("choices", "changed", "reason"),
    [
        ("adapt:0 skip skip skip", "adapt:1 skip skip skip", "adapt:1 is not possible in a pool"),
        (
            "reuse:0 new skip skip",
            "reuse:7 new skip skip",
            "reuse:7 is not possible in a pool of 1",
        ),
        ("reuse:0 new skip skip", "new new skip skip", "experts for blocks .1., but"),
        (
            "adapt:0 skip skip skip",
            "new skip skip skip",
            "expert 1 of block 0 cannot adapt expert N",
        ),
    ],
)
def test_a_task_whose_experts_do_not_exist_is_refused(tmp_path, choices, changed, reason):
    memory = grown(InternalMemory(POOL), "a", choices.split())

    def change(meta):
        meta["architecture"] = changed.split()
        if changed.startswith("reuse:7"):
            meta["experts"][0] = 7

    root = with_meta(tmp_path, memory, change)
    with pytest.raises(ValueError, match=f"000-a is invalid .*{reason}"):
        open_memory(root, POOL)
    usable, lost = open_usable(root, POOL)
    assert usable.tasks == () and "000-a is invalid" in lost["000-a"]


def test_a_task_whose_arrays_have_other_shapes_is_refused(tmp_path):
    memory = grown(InternalMemory(POOL), "a", ["adapt:0", "new", "skip", "skip"])
    arrays, meta = load_task(save_memory_task(tmp_path / "whole", memory, 0, rank=2))
    meta.pop("format")
    for number, (part, leaf, reason) in enumerate(
        (
            (arrays["experts"]["0"], "up", "block 0 has shapes"),
            (arrays["experts"]["1"], "weight", "block 1 has shapes"),
            (arrays["head"], "weight", "its head has shape"),
        )
    ):
        whole = part[leaf]
        part[leaf] = whole[:, :-1]
        save_task(tmp_path / f"{number}" / "000-a", arrays, meta)
        part[leaf] = whole
        with pytest.raises(ValueError, match=f"000-a is invalid .*{reason}"):
            open_memory(tmp_path / f"{number}", POOL)
        _, lost = open_usable(tmp_path / f"{number}", POOL)
        assert reason in lost["000-a"]


@pytest.mark.parametrize("parent", [-1, 1, 9, None])
def test_an_expert_of_a_forgotten_task_with_an_impossible_parent_is_refused(tmp_path, parent):
    memory = grown(InternalMemory(POOL), "first", ["adapt:0"] * 4, 0)
    memory = forget(grown(memory, "second", ["adapt:1"] * 4, 1), "first").memory
    arrays, meta = load_task(save_forgotten(tmp_path / "whole", memory, 0))
    meta.pop("format")
    meta["parents"]["2"] = parent
    save_task(tmp_path / "changed" / "000.forgotten", arrays, meta)
    save_memory_task(tmp_path / "changed", memory, 0, rank=2)
    with pytest.raises(ValueError, match="000.forgotten is invalid .expert 1 of block 2 cannot"):
        open_memory(tmp_path / "changed", POOL)
    usable, lost = open_usable(tmp_path / "changed", POOL)
    assert usable.tasks == () and set(lost) == {"000.forgotten", "001-second"}


def test_a_task_that_added_no_expert_is_restored(tmp_path):
    memory = grown(InternalMemory(POOL), "easy", ["reuse:0", "skip", "skip", "reuse:0"], 0)
    save_memory_task(tmp_path, memory, 0, rank=2)
    opened = open_memory(tmp_path, POOL)
    assert opened.tasks[0].experts == (0, None, None, 0)
    check_same(opened, memory)


def test_the_content_hash_depends_on_content_alone(tmp_path):
    arrays, meta = (
        {"x": np.arange(3.0), "y": {"z": np.ones((2, 2), np.float32)}},
        {"name": "a", "classes": ["b"]},
    )
    for root in ("one", "two"):
        save_task(tmp_path / root / "000-a", arrays, meta)
    first, second = (load_manifest(tmp_path / root / "000-a") for root in ("one", "two"))
    assert (
        first["content_sha256"]
        == second["content_sha256"]
        == content_hash(arrays, {"format": FORMAT, **meta})
    )
    others = [
        ({**arrays, "x": np.arange(3)}, meta),
        ({**arrays, "x": np.arange(3.0)[:, None]}, meta),
        ({"w": arrays["x"], "y": arrays["y"]}, meta),
        (arrays, {**meta, "name": "c"}),
    ]
    hashes = {content_hash(changed, {"format": FORMAT, **fields}) for changed, fields in others}
    assert len(hashes) == 4 and first["content_sha256"] not in hashes


def test_foreign_files_in_a_checkpoint_change_nothing(tmp_path):
    memory = two_tasks()
    first, second = saved = save_all(tmp_path, memory)
    files = {place: sorted(files_of(place)) for place in saved}
    assert all(
        names == sorted(f.relative_to(p).as_posix() for f in p.rglob("*") if f.is_file())
        for p, names in files.items()
    )
    for folder in [tmp_path, *(place for place in tmp_path.rglob("*") if place.is_dir())]:
        for name in (
            ".DS_Store",
            "._task.json",
            "Thumbs.db",
            ".nfs00a1",
            "task.json.swp",
            "a.sync-conflict-1.json",
        ):
            (folder / name).write_bytes(b"x")
    shutil.copytree(second, tmp_path / f"{first.name} (copy)")
    (tmp_path / "002-pets.zip").write_bytes(b"x")
    assert saved_tasks(tmp_path) == saved
    check_same(open_memory(tmp_path, POOL), memory)
    copy_task(first, tmp_path / "copied" / first.name)
    assert (
        sorted(
            f.relative_to(tmp_path / "copied" / first.name).as_posix()
            for f in (tmp_path / "copied").rglob("*")
            if f.is_file()
        )
        == files[first]
    )
    load_task(tmp_path / "copied" / first.name)


def test_a_checkpoint_of_the_first_public_format_still_opens():
    sys.path.insert(0, str(FIXTURES))
    try:
        made = importlib.import_module("make_checkpoint")
    finally:
        sys.path.remove(str(FIXTURES))
    root = FIXTURES / "checkpoint-task-2"
    opened = open_memory(root, made.base_pool())
    check_same(opened, made.memory())
    assert [[stored[1:] for stored in block] for block in opened.pool] == [
        [(None, None), (None, 0), (1, 1)],
        [(None, None), (0, 0)],
        [(None, None)],
    ]
    contents = [load_manifest(directory)["content_sha256"][:16] for directory in saved_tasks(root)]
    assert contents == ["be885c35f983466d", "1dd8e6155c5bc93a"]


def three_tasks():
    """Return a memory whose third task builds on the second alone."""
    return grown(two_tasks(), "letters", ["reuse:0", "adapt:1", "skip", "reuse:1"], 2)


def test_all_corrupted_tasks_are_named_at_once(tmp_path):
    directories = save_all(tmp_path, three_tasks())
    for directory in directories[1:]:
        (directory / "task.json").unlink()
    with pytest.raises(
        ValueError,
        match="001-shapes is corrupted.*002-letters is corrupted.*the other tasks are intact",
    ):
        open_memory(tmp_path, POOL)


def test_tasks_that_do_not_build_on_a_corrupted_task_stay_usable(tmp_path):
    memory = three_tasks()
    directories = save_all(tmp_path, memory)
    (directories[0] / "manifest.json").unlink()
    usable, lost = open_usable(tmp_path, POOL)
    # shapes and letters build on the first task's experts
    assert usable.tasks == () and set(lost) == {d.name for d in directories}
    assert "builds on experts of a lost task in blocks [0, 1]" in lost["001-shapes"]

    shutil.rmtree(tmp_path)
    directories = save_all(tmp_path, memory)
    (directories[1] / "task.json").write_text("{")
    usable, lost = open_usable(tmp_path, POOL)
    assert [task.name for task in usable.tasks] == ["Textures, two"]
    assert "is corrupted" in lost["001-shapes"]
    assert "builds on experts" in lost["002-letters"]

    shutil.rmtree(tmp_path)
    independent = grown(two_tasks(), "alone", ["reuse:0", "adapt:1", "skip", "new"], 2)
    directories = save_all(tmp_path, independent)
    shutil.rmtree(directories[1] / "arrays")
    usable, lost = open_usable(tmp_path, POOL)
    assert [task.name for task in usable.tasks] == ["Textures, two", "alone"]
    assert set(lost) == {"001-shapes"}
    for usable_task, whole in zip(
        usable.tasks, (independent.tasks[0], independent.tasks[2]), strict=True
    ):
        assert usable_task.experts == whole.experts
        chex.assert_trees_all_equal(usable_task.head, whole.head)
        for block, expert in enumerate(usable_task.experts):
            if expert is not None:
                pools = usable.pool[block], independent.pool[block]
                chex.assert_trees_all_equal(*(dense_expert(pool, expert) for pool in pools))
    with pytest.raises(TypeError):  # a lost expert computes nothing
        jnp.zeros((1, 64)) @ dense_expert(usable.pool[3], 1).weight


def test_a_write_that_fails_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "to_disk", full)
    with pytest.raises(OSError, match="000-a of .* MB could not be written .*No space left"):
        save_task(tmp_path / "000-a", {"x": np.ones(2)}, {"name": "a"})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_task(tmp_path / "000-a", {"x": np.ones(2)}, {"name": "a"})
    assert load_task(tmp_path / "000-a")[0]["x"].tolist() == [1, 1]


def test_only_corrupted_tasks_are_reported_as_corrupted(tmp_path, monkeypatch):
    whole = save_memory_task(tmp_path, two_tasks(), 0, rank=2)

    def fails(error):
        def read(*_):
            raise error

        return read

    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint, "_hash_file", fails(PermissionError(13, "Permission denied", "arrays/d/0"))
        )
        with pytest.raises(
            OSError, match=r"000-textures-two cannot be read .*Permission denied"
        ) as result:
            load_task(whole)
        assert "from a copy" not in str(result.value)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_hash_file", fails(MemoryError("full")))
        with pytest.raises(MemoryError, match="full"):
            load_task(whole)
    with (
        monkeypatch.context() as patch
    ):  # as a library refuses a call for reasons other than the bytes
        patch.setattr(
            ocp.Checkpointer, "restore", fails(ValueError("INVALID_ARGUMENT: Invalid file path"))
        )
        with pytest.raises(
            OSError, match="have the hashes of its manifest, but .*Invalid file path"
        ) as result:
            load_task(whole)
        assert "from a copy" not in str(result.value)
    (whole / "task.json").write_text(
        (whole / "task.json").read_text().replace(FORMAT, "cheem_jax-task/99")
    )
    with pytest.raises(
        ValueError, match="is invalid .the format in its task.json is 'cheem_jax-task/99'"
    ):
        load_task(whole)


def test_a_task_is_lost_with_the_task_that_a_forgotten_one_built_on(tmp_path):
    memory = grown(InternalMemory(POOL), "first", ["adapt:0"] * 4, 0)
    memory = grown(memory, "second", ["adapt:1"] * 4, 1)
    memory = grown(memory, "third", ["reuse:2"] * 4, 2)
    memory = forget(grown(memory, "alone", ["new"] * 4, 3), "second").memory
    first = save_memory_task(tmp_path, memory, 0, rank=2)
    save_forgotten(tmp_path, memory, 1)
    for index in (1, 2):
        save_memory_task(tmp_path, memory, index, rank=2)
    assert len(open_memory(tmp_path, POOL).tasks) == 3
    (first / "manifest.json").unlink()
    usable, lost = open_usable(tmp_path, POOL)
    assert [task.name for task in usable.tasks] == ["alone"]
    assert set(lost) == {"000-first", "002-third"}
    assert "builds on experts of a lost task in blocks [0, 1, 2, 3]" in lost["002-third"]
    dense_expert(usable.pool[0], usable.tasks[0].experts[0])


def test_a_corrupted_task_among_unreadable_ones_is_lost_and_the_others_answer(
    tmp_path, monkeypatch
):
    directories = save_all(tmp_path, two_tasks())
    whole = checkpoint.load_task

    def load(directory):
        if directory == directories[1]:
            raise PermissionError(13, "Permission denied")
        return whole(directory)

    monkeypatch.setattr("cheem_jax.cheem.saved_memory.load_task", load)
    usable, lost = open_usable(tmp_path, POOL)
    assert [task.name for task in usable.tasks] == ["Textures, two"]
    assert "Permission denied" in lost["001-shapes"]
