"""Event files for TensorBoard, read back as TFRecords of Event messages."""

import datetime
import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from cheem_jax.cli.report import Tensorboard, write_tensorboard
from cheem_jax.core.settings import COLOURS
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
    """Return steps and single-precision numbers, keyed by tag."""
    result: dict[str, list[tuple[int, Any]]] = {}
    for event in events_in(file):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                result.setdefault(value.tag, []).append(
                    (event.step, pytest.approx(value.simple_value))
                )
    return result


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
        "num_test": [10, 30][index],
        "architecture": ["reuse:0", "new"],
        "supernet_losses": [2.0, None, 1.0],
        "finetune_losses": [0.5],
        "flops_method": 58_000_000,
        "params_added_percent": 2.5,
        "seconds": {"supernet": 4.0, "finetune": 2.0},
    }
    record.write("learned", method="cheem", report=report, seconds=6.5)
    reference = {**report, "losses": [0.25], "architecture": None}
    record.write("learned", method="frozen_linear", report=reference, seconds=0.5)
    methods = {
        "cheem": {"accuracy": accuracy, "local_accuracy": given},
        "frozen_linear": {"accuracy": [0.5] * len(given), "local_accuracy": given},
    }
    record.write("evaluated", index=index, methods=methods, seconds=1.5)


def test_each_number_of_the_record_is_a_point_at_its_task_or_epoch(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9], [0.95])
    learn(record, 1, [0.8, 0.6], [0.95, 0.7])
    record.write("upper_bound", index=0, name="digits", test_accuracy=0.97, seconds=3.0)
    assert write_events(tmp_path) == tmp_path / "tensorboard"
    numbers = {
        method: numbers_in(tmp_path / "tensorboard" / method / NAME)
        for method in ("cheem", "frozen_linear", "full_finetune")
    }
    expected = {
        "average_accuracy": [(1, 0.9), (2, 0.7)],
        "local_average_accuracy": [(1, 0.95), (2, 0.825)],
        # 10 and 30 test images: (0.8 * 10 + 0.6 * 30) / 40
        "last_accuracy": [(1, 0.9), (2, 0.65)],
        "incremental_accuracy": [(1, 0.9), (2, 0.775)],
        "average_forgetting": [(2, 0.1)],
        "accuracy/T1": [(1, 0.9), (2, 0.8)],
        "accuracy/T2": [(2, 0.6)],
        "local_accuracy/T2": [(2, 0.7)],
        "supernet_losses/T1": [(1, 2.0), (3, 1.0)],  # that of epoch 2 was not finite
        "finetune_losses/T2": [(1, 0.5)],
        "flops_method": [(1, 58e6), (2, 58e6)],
        "seconds/supernet": [(1, 4.0), (2, 4.0)],
    }
    assert {tag: numbers["cheem"][tag] for tag in expected} == expected
    assert numbers["frozen_linear"]["average_accuracy"] == [(1, 0.5), (2, 0.5)]
    assert numbers["frozen_linear"]["losses/T1"] == [(1, 0.25)]
    assert numbers["full_finetune"] == {"local_accuracy": [(1, 0.97)]}


def test_an_upper_bound_has_no_points_of_an_accuracy_with_the_task_id_inferred(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9], [0.9])
    text = json.dumps(records.read(tmp_path))
    record.replace(json.loads(text.replace("cheem", "lora_finetune")))
    tags = numbers_in(write_events(tmp_path) / "lora_finetune" / NAME).keys()
    assert {tag for tag in tags if "accuracy" in tag} == {
        "local_accuracy/T1",
        "local_average_accuracy",
        "local_last_accuracy",
        "local_incremental_accuracy",
    }


def test_points_have_the_times_of_the_record_and_architectures_are_images(tmp_path):
    learn(begin(tmp_path), 0, [0.9], [0.9])
    times = [
        datetime.datetime.fromisoformat(entry["time"]).timestamp()
        for entry in records.read(tmp_path)
    ]
    events = events_in(write_events(tmp_path) / "cheem" / NAME)
    assert events[0].file_version == "brain.Event:2"
    points = {
        value.tag: (event.wall_time, value) for event in events for value in event.summary.value
    }
    assert points["finetune_losses/T1"][0] == times[1] and points["accuracy/T1"][0] == times[3]
    image = Image.open(io.BytesIO(points["architecture"][1].image.encoded_image_string))
    pixels = np.asarray(image)[16, 16::32]
    assert [f"#{red:02X}{green:02X}{blue:02X}" for red, green, blue in pixels] == [
        COLOURS["reuse"],
        COLOURS["new"],
    ]


def test_a_longer_record_appends_and_a_shorter_one_replaces(tmp_path):
    record = begin(tmp_path)
    learn(record, 0, [0.9], [0.9])
    file = write_events(tmp_path) / "cheem" / NAME
    first = file.read_bytes()
    inode = file.stat().st_ino
    write_events(tmp_path)
    assert file.read_bytes() == first
    learn(record, 1, [0.8, 0.6], [0.9, 0.7])
    write_events(tmp_path)
    longer = file.read_bytes()
    assert longer.startswith(first) and len(longer) > len(first)
    assert file.stat().st_ino == inode  # an open TensorBoard continues to read it
    file.write_bytes(longer[:-7])  # an interrupted write
    write_events(tmp_path)
    assert file.read_bytes() == longer
    record.keep(lambda entry: entry["event"] == "run")  # as after an interruption
    learn(record, 0, [0.7], [0.9])
    write_events(tmp_path)
    assert numbers_in(file)["average_accuracy"] == [(1, 0.7)]
    assert [entry.name for entry in file.parent.iterdir()] == [NAME]


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    for call in (
        check_installed,
        lambda: write_events(tmp_path),
        lambda: write_tensorboard(Tensorboard(())),
    ):
        with pytest.raises(ValueError, match=r"pip install 'cheem_jax\[tensorboard\]'"):
            call()


def test_the_command_writes_every_run_and_refuses_other_folders(tmp_path, capsys):
    runs = (tmp_path / "a", tmp_path / "b")
    for run in runs:
        learn(begin(run), 0, [0.9], [0.9])
    with pytest.raises(ValueError, match="gone' is not a run directory"):
        write_tensorboard(Tensorboard((*runs, tmp_path / "gone")))
    assert not (runs[0] / "tensorboard").exists()  # nothing was written before the check
    write_tensorboard(Tensorboard(runs))
    assert all((run / "tensorboard" / "cheem" / NAME).is_file() for run in runs)
    assert capsys.readouterr().out.endswith(f"tensorboard --logdir {tmp_path}\n")
    with pytest.raises(ValueError, match="no run given"):
        write_tensorboard(Tensorboard(()))
    begin(tmp_path / "empty")
    write_tensorboard(Tensorboard((tmp_path / "empty",)))
    assert "no task is learned yet" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["../../escaped", "/tmp/escaped", "..", "", ["cheem"]])
def test_a_method_that_would_be_a_path_is_refused_and_nothing_is_written(method, tmp_path):
    record = begin(tmp_path / "run")
    learn(record, 0, [0.9], [0.9])
    entries = records.read(tmp_path / "run")
    entries[1]["method"] = method
    record.replace(entries)
    with pytest.raises(ValueError, match=r"metrics\.jsonl contains the method .*expected one of"):
        write_events(tmp_path / "run")
    names = sorted(file.name for file in tmp_path.rglob("*"))
    assert names == ["config.json", "metrics.jsonl", "run"]
