"""Event files for TensorBoard, read back as TensorBoard reads them: TFRecords of Event messages."""

import datetime
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from cheem_jax.cli.report import Tensorboard, write_tensorboard
from cheem_jax.report.tensorboard import NAME, check_installed, write_events
from cheem_jax.run import record as records
from cheem_jax.run.record import Record


def events_in(file: Path) -> list[Event]:
    data = file.read_bytes()
    events = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        header = data[:8]
        body = data[12 : 12 + size]
        checks = data[8:12] + data[12 + size : 16 + size]
        assert struct.unpack("<II", checks) == (masked_crc32c(header), masked_crc32c(body))
        events.append(Event.FromString(body))
        data = data[16 + size :]
    return events


def numbers_in(file: Path) -> dict[str, list[tuple[int, Any]]]:
    """Steps and numbers, which events hold in single precision, by tag."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for event in events_in(file):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                found.setdefault(value.tag, []).append(
                    (event.step, pytest.approx(value.simple_value))
                )
    return found


def texts_in(file: Path) -> dict[tuple[str, int], str]:
    return {
        (value.tag, event.step): value.tensor.string_val[0].decode()
        for event in events_in(file)
        for value in event.summary.value
        if value.WhichOneof("value") == "tensor"
    }


def begin(directory: Path) -> Record:
    directory.mkdir(exist_ok=True)
    config = {
        "stream": "made-up",
        "tasks": ["digits", "letters (b)"],
        "seed": 7,
        "data_sha256": {"digits": "ab"},
        "cheem": {"ops": {"rank": 16}, "sampling": "hee"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    record = Record(directory)
    record.write(
        "run",
        method="cheem",
        preset="demo",
        executor="stages",
        precision="float32",
        device="cpu: cpu",
    )
    return record


def learn(record: Record, index: int, accuracy: list[float], given: list[float]) -> None:
    report = {
        "index": index,
        "name": ["digits", "letters (b)"][index],
        "architecture": ["reuse:0", "new"],
        "supernet_losses": [2.0, None, 1.0],
        "finetune_losses": [0.5],
        "flops_method": 58_000_000,
        "params_added_percent": 2.5,
        "seconds": {"supernet": 4.0, "finetune": 2.0},
    }
    record.write("learned", method="cheem", report=report, seconds=6.5)
    yardstick = {**report, "losses": [0.25], "architecture": None}
    record.write("learned", method="frozen_linear", report=yardstick, seconds=0.5)
    methods = {
        "cheem": {"accuracy": accuracy, "local_accuracy": given},
        "frozen_linear": {"accuracy": [0.5] * len(given), "local_accuracy": given},
    }
    record.write("evaluated", index=index, methods=methods, seconds=1.5)


def test_every_number_of_the_record_is_there_once_at_its_task_or_epoch(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9], [0.95])
    learn(record, 1, [0.8, 0.6], [0.95, 0.7])
    assert write_events(tmp_path) == tmp_path / "tensorboard"
    found = numbers_in(tmp_path / "tensorboard" / "cheem" / NAME)
    assert found["average/accuracy"] == [(1, 0.9), (2, 0.7)]
    assert found["average/given_accuracy"] == [(1, 0.95), (2, 0.825)]
    assert found["average/forgetting"] == [(2, 0.1)]
    assert found["accuracy/T1_digits"] == [(1, 0.9), (2, 0.8)]
    assert found["accuracy/T2_letters__b_"] == [(2, 0.6)]
    assert found["given_accuracy/T2_letters__b_"] == [(2, 0.7)]
    assert found["loss_supernet/T1_digits"] == [
        (1, 2.0),
        (3, 1.0),
    ]  # that of epoch 2 was not finite
    assert found["loss_finetune/T2_letters__b_"] == [(1, 0.5)]
    assert found["cost/flops_method"] == [(1, 58e6), (2, 58e6)]
    assert found["cost/params_added_percent"] == [(1, 2.5), (2, 2.5)]
    assert found["seconds/supernet"] == [(1, 4.0), (2, 4.0)] and found["seconds/evaluate"] == [
        (1, 1.5),
        (2, 1.5),
    ]
    beside = numbers_in(tmp_path / "tensorboard" / "frozen_linear" / NAME)
    assert beside["average/accuracy"] == [(1, 0.5), (2, 0.5)] and beside[
        "loss_train/T1_digits"
    ] == [(1, 0.25)]


def test_events_carry_the_times_of_the_record(tmp_path):
    learn(begin(tmp_path), 0, [0.9], [0.9])
    times = [
        datetime.datetime.fromisoformat(entry["time"]).timestamp()
        for entry in records.read(tmp_path)
    ]
    events = events_in(write_events(tmp_path) / "cheem" / NAME)
    assert (events[0].file_version, events[0].wall_time) == ("brain.Event:2", times[0])
    by_tag = {value.tag: event.wall_time for event in events for value in event.summary.value}
    assert by_tag["loss_finetune/T1_digits"] == times[1] and by_tag["average/accuracy"] == times[3]


def test_architectures_and_settings_are_texts(tmp_path):
    learn(begin(tmp_path), 0, [0.9], [0.9])
    file = write_events(tmp_path) / "cheem" / NAME
    texts = texts_in(file)
    assert texts["architecture/text_summary", 1] == "T1_digits: reuse:0, new"
    config = json.loads(texts["config/text_summary", 0].strip("`json\n"))
    assert (
        config["cheem"]["ops"]["rank"] == 16
        and config["method"] == "cheem"
        and "data_sha256" not in config
    )


def test_an_upper_bound_lies_beside_the_methods(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9], [0.9])
    record.write("upper_bound", index=0, name="digits", test_accuracy=0.97, seconds=3.0)
    write_events(tmp_path)
    found = numbers_in(tmp_path / "tensorboard" / "full_finetune" / NAME)
    assert found == {"given_accuracy/T1_digits": [(1, 0.97)], "seconds/bound": [(1, 3.0)]}


def test_a_record_that_grew_is_appended_without_a_point_twice(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9], [0.9])
    file = write_events(tmp_path) / "cheem" / NAME
    first = file.read_bytes()
    inode = file.stat().st_ino
    write_events(tmp_path)
    assert file.read_bytes() == first
    learn(record, 1, [0.8, 0.6], [0.9, 0.7])
    write_events(tmp_path)
    whole = file.read_bytes()
    assert whole.startswith(first) and len(whole) > len(first)
    assert file.stat().st_ino == inode  # whoever has it open reads on
    assert numbers_in(file)["average/accuracy"] == [(1, 0.9), (2, 0.7)]
    file.write_bytes(whole[:-7])  # a write that was cut off
    write_events(tmp_path)
    assert file.read_bytes() == whole


def test_a_record_that_lost_lines_replaces_what_was_written(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9], [0.9])
    file = write_events(tmp_path) / "cheem" / NAME
    record.keep(lambda entry: entry["event"] == "run")  # as going on after a stop does
    learn(record, 0, [0.7], [0.9])
    write_events(tmp_path)
    assert numbers_in(file)["average/accuracy"] == [(1, 0.7)]
    assert [entry.name for entry in file.parent.iterdir()] == [NAME]


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    for call in (
        check_installed,
        lambda: write_events(tmp_path),
        lambda: write_tensorboard(Tensorboard(())),
    ):
        with pytest.raises(ValueError, match=r"pip install 'cheem_jax\[tensorboard\]'"):
            call()


def test_the_command_writes_every_run_and_names_what_is_none(tmp_path, capsys):
    runs = (tmp_path / "a", tmp_path / "b")
    for run in runs:
        learn(begin(run), 0, [0.9], [0.9])
    with pytest.raises(ValueError, match="gone' is not a run directory"):
        write_tensorboard(Tensorboard((*runs, tmp_path / "gone")))
    assert not (runs[0] / "tensorboard").exists()  # nothing is begun
    write_tensorboard(Tensorboard(runs))
    assert all((run / "tensorboard" / "cheem" / NAME).is_file() for run in runs)
    assert capsys.readouterr().out.endswith(f"tensorboard --logdir {tmp_path}\n")
    with pytest.raises(ValueError, match="no run is named"):
        write_tensorboard(Tensorboard(()))


def test_a_run_without_a_record_or_with_a_damaged_one_is_told(tmp_path):
    record = begin(tmp_path)
    record.keep(lambda entry: False)
    with pytest.raises(ValueError, match="has no record of a run yet"):
        write_events(tmp_path)
    begin(tmp_path).write("learned", method="cheem", report={})
    with pytest.raises(ValueError, match="lacks what event files need"):
        write_events(tmp_path)
