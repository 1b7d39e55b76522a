import json

import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.report import record


def test_lines_hold_event_time_and_plain_values(tmp_path):
    written = record.Record.open(tmp_path / "run")
    written.write("epoch", loss=np.float32(0.5), table=np.array([[1.0, np.nan]]), steps=jnp.int32(3), top=float("inf"))
    (entry,) = record.read(tmp_path / "run")
    assert entry.pop("time").endswith("+00:00")
    assert entry == {"event": "epoch", "loss": 0.5, "table": [[1.0, None]], "steps": 3, "top": None}


def test_a_torn_last_line_is_ignored_and_does_not_spoil_the_next(tmp_path):
    record.Record.open(tmp_path).write("first")
    file = tmp_path / record.NAME
    with file.open("ab") as stream:
        stream.write(b'{"event": "torn", "note": "caf\xc3')  # cut inside a character
    assert [entry["event"] for entry in record.read(tmp_path)] == ["first"]
    record.Record.open(tmp_path).write("second")
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["first", "second"]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    (tmp_path / record.NAME).write_text('{"event": "a"}\nnonsense\n{"event": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        record.read(tmp_path)


def test_lines_of_an_unfinished_task_can_be_dropped(tmp_path):
    written = record.Record.open(tmp_path)
    for task in (0, 0, 1):
        written.write("epoch", task=task)
    written.keep(lambda entry: entry["task"] < 1)
    written.write("epoch", task=2)
    assert [entry["task"] for entry in record.read(tmp_path)] == [0, 0, 2]
    assert [file.name for file in tmp_path.iterdir()] == [record.NAME]


def test_what_has_no_json_form_is_refused_and_nothing_is_written(tmp_path):
    written = record.Record.open(tmp_path)
    with pytest.raises(TypeError, match="object"):
        written.write("epoch", value=object())
    with pytest.raises(ValueError, match="time"):
        written.write("epoch", time=3.0)
    assert record.read(tmp_path) == []


def test_no_record_reads_as_empty(tmp_path):
    assert record.read(tmp_path) == []
