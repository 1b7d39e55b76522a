import json

import jax.numpy as jnp
import numpy as np
import pytest

from cheem_jax.run import record


def test_lines_hold_event_time_and_plain_values(tmp_path):
    written = record.Record(tmp_path / "run")
    written.write(
        "epoch",
        loss=np.float32(0.5),
        table=np.array([[1.0, np.nan]]),
        steps=jnp.int32(3),
        top=float("inf"),
    )
    (entry,) = record.read(tmp_path / "run")
    assert entry.pop("time").endswith("+00:00")
    assert entry == {"event": "epoch", "loss": 0.5, "table": [[1.0, None]], "steps": 3, "top": None}


def test_a_torn_last_line_is_ignored_and_does_not_spoil_the_next(tmp_path):
    record.Record(tmp_path).write("first")
    file = tmp_path / record.NAME
    with file.open("ab") as stream:
        stream.write(b'{"event": "torn", "note": "caf\xc3')  # cut inside a character
    assert [entry["event"] for entry in record.read(tmp_path)] == ["first"]
    record.Record(tmp_path).write("second")
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == [
        "first",
        "second",
    ]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_line_that_changed_is_an_error_with_its_number(tmp_path, number):
    written = record.Record(tmp_path)
    for accuracy in (0.25, 0.5, 0.75):
        written.write("evaluated", accuracy=accuracy)
    lines = (tmp_path / record.NAME).read_text().splitlines(keepends=True)
    for changed in (
        lines[number - 1].replace("evaluated", "evaluatee"),
        "nonsense\n",
        "\n",
        "7\n",
        "[]\n",
    ):
        (tmp_path / record.NAME).write_text(
            "".join([*lines[: number - 1], changed, *lines[number:]])
        )
        with pytest.raises(ValueError, match=f"line {number} was changed"):
            record.read(tmp_path)
    one_digit = lines[number - 1].replace("5, ", "6, ")
    assert one_digit != lines[number - 1]
    (tmp_path / record.NAME).write_text("".join([*lines[: number - 1], one_digit, *lines[number:]]))
    with pytest.raises(ValueError, match=f"line {number} was changed"):
        record.read(tmp_path)


def test_every_line_carries_the_fingerprint(tmp_path):
    record.Record(tmp_path, "abc").write("a")
    record.Record(tmp_path, "def").write("b")
    assert [entry["fingerprint"] for entry in record.read(tmp_path)] == ["abc", "def"]


def test_lines_of_an_unfinished_task_can_be_dropped(tmp_path):
    written = record.Record(tmp_path)
    for task in (0, 0, 1):
        written.write("epoch", task=task)
    written.keep(lambda entry: entry["task"] < 1)
    written.write("epoch", task=2)
    assert [entry["task"] for entry in record.read(tmp_path)] == [0, 0, 2]
    assert [file.name for file in tmp_path.iterdir()] == [record.NAME]


def test_a_value_without_a_json_form_is_refused_and_nothing_is_written(tmp_path):
    written = record.Record(tmp_path)
    with pytest.raises(TypeError, match="object"):
        written.write("epoch", value=object())
    with pytest.raises(ValueError, match="time"):
        written.write("epoch", time=3.0)
    assert record.read(tmp_path) == []


def test_no_record_reads_as_empty(tmp_path):
    assert record.read(tmp_path) == []
