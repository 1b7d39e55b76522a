"""The rolling checkpoint: when it is written, what it survives, and that going on from it changes nothing."""

import contextlib
import shutil

import numpy as np
import pytest

from cheem_jax.checkpoint import saved_tasks
from cheem_jax.interruption import Stop, Stopped
from cheem_jax.rolling import Rolling, Running, Saved

SAVED = Saved({"x": np.arange(4.0)}, {"step": 3})


class Clock:
    """A clock that the test turns; `step` seconds pass whenever it is looked at."""

    now, step = 0.0, 0.0

    def __call__(self):
        self.now += self.step
        return self.now


def quiet(phase, total):
    return contextlib.nullcontext(lambda num, note="", /: None)


def test_it_is_due_after_thirty_seconds_and_later_where_saving_is_slow(tmp_path):
    clock = Clock()
    rolling = Rolling(tmp_path, Stop(), clock=clock)
    assert not rolling.due()
    clock.now = 30.0
    assert rolling.due()
    clock.step = 2.0
    rolling.save(0, SAVED)
    saved_at, clock.step = clock.now, 0.0
    assert rolling.seconds == 2.0
    clock.now = saved_at + 97.9
    assert not rolling.due()  # 2 % of the time at most
    clock.now = saved_at + 98.1
    assert rolling.due()
    rolling.clear()
    assert not rolling.due()


def test_seconds_between_two_can_be_told(tmp_path):
    clock = Clock()
    rolling = Rolling(tmp_path, Stop(), every=5, clock=clock)
    clock.now = 5.0
    assert rolling.due()


def test_the_newest_one_of_the_task_comes_back_and_only_it_is_kept(tmp_path):
    rolling = Rolling(tmp_path, Stop())
    for step in range(3):
        rolling.save(2, Saved({"x": np.full(2, step)}, {"step": step}))
    assert [d.name for d in tmp_path.iterdir()] == ["running-000003"]
    found = Rolling(tmp_path, Stop()).open(2, print)
    assert found is not None and found.meta["step"] == 2 and found.arrays["x"].tolist() == [2, 2]
    assert saved_tasks(tmp_path) == []


def test_what_is_left_over_from_another_task_is_removed(tmp_path):
    Rolling(tmp_path, Stop()).save(1, SAVED)
    assert Rolling(tmp_path, Stop()).open(2, print) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_one_is_told_and_the_one_before_counts(tmp_path):
    rolling, said = Rolling(tmp_path, Stop()), []
    rolling.save(0, SAVED)
    shutil.copytree(tmp_path / "running-000001", tmp_path / "running-000002")
    (tmp_path / "running-000002" / "task.json").write_text("{")
    found = Rolling(tmp_path, Stop()).open(0, said.append)
    assert found is not None and found.meta["step"] == 3
    assert len(said) == 1 and "running-000002 cannot be read" in said[0]


def test_a_request_to_stop_saves_after_the_step_and_ends_the_phase(tmp_path):
    stop = Stop()
    running = Running(0, Rolling(tmp_path, stop), quiet, print)
    steps = []
    with pytest.raises(Stopped, match="everything up to this step of the supernet phase is kept") as stopped:
        with running.phase("supernet", 10, lambda: Saved({"x": np.array(steps)}, {})) as advance:
            for step in range(10):
                steps.append(step)
                if step == 4:
                    stop.signal_number = 15
                advance(1)
    assert stopped.value.signal_number == 15
    found = Rolling(tmp_path, stop).open(0, print)
    assert found is not None and found.arrays["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_phase_with_nothing_to_keep_stops_without_saving(tmp_path):
    stop = Stop()
    running = Running(0, Rolling(tmp_path, stop), quiet, print)
    stop.signal_number = 2
    with pytest.raises(Stopped, match="everything before the similarity phase is kept"):
        with running.phase("similarity", 10) as advance:
            advance(1)
    assert list(tmp_path.iterdir()) == []
