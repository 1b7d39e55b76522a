"""The rolling checkpoint: when it is written, which errors it survives, and that resuming changes
nothing."""

import contextlib
import io
import shutil

import numpy as np
import pytest
from rich.console import Console

from cheem_jax.core.interruption import Stop, Stopped
from cheem_jax.engine.compilation import Mark
from cheem_jax.run import rolling
from cheem_jax.run.checkpoint import saved_tasks
from cheem_jax.run.progress import Progress
from cheem_jax.run.record import Record
from cheem_jax.run.rolling import Rolling, Saved
from cheem_jax.run.session import Session

SAVED = Saved({"x": np.arange(4.0)}, {"step": 3})


class Clock:
    """A clock that the test sets; each reading advances it by `step` seconds."""

    now, step = 0.0, 0.0

    def __call__(self):
        self.now += self.step
        return self.now


def test_it_is_due_after_thirty_seconds_and_later_where_saving_is_slow(tmp_path):
    clock = Clock()
    rolling = Rolling(tmp_path, clock=clock)
    assert not rolling.due()
    clock.now = 30.0
    assert rolling.due()
    clock.step = 2.0
    assert rolling.save(0, lambda: SAVED) == 2.0
    saved_at = clock.now
    clock.step = 0.0
    clock.now = saved_at + 97.9
    assert not rolling.due()  # 2 % of the time at most
    clock.now = saved_at + 98.1
    assert rolling.due()
    rolling.clear()
    assert not rolling.due()


def test_the_seconds_between_two_checkpoints_can_be_set(tmp_path):
    clock = Clock()
    rolling = Rolling(tmp_path, every=5, clock=clock)
    clock.now = 5.0
    assert rolling.due()


def test_the_newest_one_of_the_task_is_restored_and_only_it_is_kept(tmp_path):
    rolling = Rolling(tmp_path)
    for step in range(3):
        saved = Saved({"x": np.full(2, step)}, {"step": step})
        rolling.save(2, lambda saved=saved: saved)
    assert [d.name for d in tmp_path.iterdir()] == ["running-000003"]
    result = Rolling(tmp_path).open(2, print)
    assert result is not None and result.meta["step"] == 2 and result.arrays["x"].tolist() == [2, 2]
    assert saved_tasks(tmp_path) == []


def test_checkpoints_of_another_task_are_removed(tmp_path):
    Rolling(tmp_path).save(1, lambda: SAVED)
    assert Rolling(tmp_path).open(2, print) is None
    assert list(tmp_path.iterdir()) == []


def test_a_corrupted_one_is_reported_and_the_one_before_counts(tmp_path):
    rolling = Rolling(tmp_path)
    said = []
    rolling.save(0, lambda: SAVED)
    shutil.copytree(tmp_path / "running-000001", tmp_path / "running-000002")
    (tmp_path / "running-000002" / "task.json").write_text("{")
    result = Rolling(tmp_path).open(0, said.append)
    assert result is not None and result.meta["step"] == 3
    assert len(said) == 1 and "running-000002 is corrupted" in said[0]


def test_the_seconds_of_a_task_include_those_of_all_earlier_processes_until_they_saved(tmp_path):
    def seconds(session):
        return session.since(Mark.now())["seconds"]

    def opened(number=0):
        session = Session(Record(tmp_path))
        session.begin("cheem", "digits", number)
        return session

    rolling = Rolling(tmp_path / "checkpoints" / "cheem")
    earlier = SAVED.meta | {"seconds": {}}
    rolling.save(0, lambda: Saved(SAVED.arrays, earlier))  # of an earlier version
    assert seconds(opened()) < 1e5
    rolling.save(0, lambda: Saved(SAVED.arrays, earlier | {"spent": 1e6}))
    second = opened()
    assert seconds(second) >= 1e6
    second.save(lambda: SAVED)
    third = opened()
    assert seconds(third) >= 1e6
    assert third.saved is not None and not {"spent", "seconds"} & third.saved.meta.keys()
    third.begin("cheem", "letters", 1)
    assert seconds(third) < 1e5


def test_one_that_another_version_wrote_is_left_and_the_task_begins_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rolling, "ROLLING_FORMAT", "cheem_jax-running/0")
        Rolling(tmp_path).save(0, lambda: SAVED)
    assert Rolling(tmp_path).open(0, print) is None


def test_one_that_cannot_be_read_now_is_not_removed(tmp_path, monkeypatch):
    def no_memory(directory):
        raise MemoryError("full")

    Rolling(tmp_path).save(0, lambda: SAVED)
    monkeypatch.setattr(rolling, "load_task", no_memory)
    with pytest.raises(MemoryError, match="full"):
        Rolling(tmp_path).open(0, print)
    monkeypatch.undo()
    assert Rolling(tmp_path).open(0, print) is not None


def test_a_half_written_checkpoint_of_a_killed_process_is_removed_with_the_rest(tmp_path):
    for name in (".running-000004.partial", ".running-000003.old", "000-kept"):
        (tmp_path / name).mkdir()
    Rolling(tmp_path).clear()
    assert [d.name for d in tmp_path.iterdir()] == ["000-kept"]


def task_session(folder, stop, phase=None):
    """A session in a task of the method `m`, whose screen fails with every report if it is to."""
    progress = Progress(Console(file=io.StringIO()))
    if phase is not None:
        progress.phase = phase
    session = Session(Record(folder), progress, stop=stop)
    session.begin("m", "digits", 0)
    return session


def test_a_report_is_saved_before_it_is_displayed(tmp_path):
    @contextlib.contextmanager
    def broken_pipe(*args, **kwargs):
        def advance(num_images, note="", /):
            raise BrokenPipeError("nobody reads")

        yield advance

    stop = Stop()
    session = task_session(tmp_path, stop, broken_pipe)
    stop.signal_number = 2
    with pytest.raises(Stopped):
        with session.phase("supernet", 10, lambda: SAVED) as advance:
            advance(1)
    assert Rolling(session.root("m")).open(0, print) is not None


def test_a_request_to_stop_saves_after_the_step_and_ends_the_phase(tmp_path):
    stop = Stop()
    session = task_session(tmp_path, stop)
    steps = []
    with pytest.raises(
        Stopped, match="all work up to this step of the supernet phase is saved"
    ) as stopped:
        with session.phase("supernet", 10, lambda: Saved({"x": np.array(steps)}, {})) as advance:
            for step in range(10):
                steps.append(step)
                if step == 4:
                    stop.signal_number = 15
                advance(1)
    assert stopped.value.signal_number == 15
    resumed = task_session(tmp_path, Stop())
    assert resumed.saved is not None and resumed.saved.arrays["x"].tolist() == [0, 1, 2, 3, 4]
    assert resumed.seconds.keys() == {"supernet"} and resumed.seconds["supernet"] > 0
    resumed.finish()
    assert list(session.root("m").iterdir()) == []


def test_a_phase_with_nothing_to_keep_stops_without_saving(tmp_path):
    stop = Stop()
    session = task_session(tmp_path, stop)
    stop.signal_number = 2
    with pytest.raises(Stopped, match="all work up to the last rolling checkpoint is saved"):
        with session.phase("similarity", 10) as advance:
            advance(1)
    assert not session.root("m").exists()


def test_a_phase_whose_state_has_no_arrays_yet_stops_without_saving(tmp_path):
    stop = Stop()
    session = task_session(tmp_path, stop)
    stop.signal_number = 2
    with pytest.raises(Stopped):
        with session.phase("search", 10, lambda: Saved({}, {"generations": 0})) as advance:
            advance(1)
    assert not session.root("m").exists()
    assert task_session(tmp_path, Stop()).saved is None


def test_inner_phases_count_as_part_of_the_outermost():
    session = Session()
    with session.phase("finetune"), session.phase("means", 10) as advance:
        advance(10)
        assert session.seconds.keys() == {"finetune"}
    with session.phase("router"):
        pass
    assert session.seconds.keys() == {"finetune", "router"}
