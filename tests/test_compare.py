"""The first difference of two runs, and its description."""

import copy
import json
import shutil

import pytest

from cheem_jax.report.compare import CIRCUMSTANCES, difference_of_records, differences, timeless
from cheem_jax.run import record
from cheem_jax.run.differences import find_differences, summary

TASKS = ("colours", "textures")


def learned(index):
    report = {
        "index": index,
        "name": TASKS[index],
        "flops": 300,
        "params_added": 7,
        "similarity": [[0.5, -0.5], [0.25, None]][: index + 1],
        "supernet_losses": [1.5, 0.5312100052833557, 0.25],
        "finetune_losses": [0.75, 0.125],
        "searched": 12,
        "validation_accuracy": 0.9,
        "best_validation_accuracy": 0.95,
        "architecture": ["reuse:0", "skip"],
        "engine": {"executor": "whole", "hits": 3, "compile_seconds": 0.5},
        "seconds": {"search": 1.0},
    }
    return {
        "event": "learned",
        "time": "t",
        "method": "cheem",
        "report": report,
        "seconds": 2.0,
        "compile": {},
    }


def linear(index):
    report = {"index": index, "name": TASKS[index], "penalty": 10.0, "seconds": {"head": 1.0}}
    return {
        "event": "learned",
        "time": "t",
        "method": "frozen_linear",
        "report": report,
        "seconds": 2.0,
    }


def evaluated(index):
    methods = {
        name: {"accuracy": [0.5, 0.75][: index + 1], "local_accuracy": [0.75, 0.75][: index + 1],
               "routing": [[1.0, 0.0], [0.25, 0.75]]}
        for name in ("cheem", "frozen_linear")
    }  # fmt: skip
    hashes = {name: ["0a" * 32, "1b" * 32][: index + 1] for name in methods}
    return {
        "event": "evaluated",
        "time": "t",
        "index": index,
        "methods": methods,
        "checkpoints": hashes,
        "peak_memory_bytes": 5,
        "seconds": 1.0,
    }


def story():
    """Return the record of a run of two tasks with an upper bound for the first."""
    run = {
        "event": "run",
        "time": "t",
        "method": "cheem",
        "executor": "whole",
        "device": "cpu",
        "command": ["a"],
    }
    tasks = [entry for i in range(2) for entry in (learned(i), linear(i), evaluated(i))]
    bound = {
        "event": "upper_bound",
        "time": "t",
        "index": 0,
        "name": "colours",
        "test_accuracy": 0.9,
        "seconds": 1.0,
    }
    return [run, *tasks, bound]


def changed(*places_and_values):
    """Return the record with replaced values at places such as (4, "report", "penalty")."""
    entries = story()
    for place, value in places_and_values:
        at = entries
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = value
    return entries


@pytest.mark.parametrize(
    "place, value, said",
    [
        ((0, "executor"), "scan", 'the run\'s setting: executor is "whole" there and "scan" here'),
        (
            (4, "report", "similarity", 0, 1),
            -0.25,
            "task 2 'textures', cheem: similarity[0][1] is -0.5 there and -0.25 here",
        ),
        (
            (4, "report", "similarity", 1, 1),
            0.5,
            "task 2 'textures', cheem: similarity[1][1] is null there and 0.5 here",
        ),
        (
            (4, "report", "supernet_losses", 1),
            0.5311900079250336,
            "task 2 'textures', cheem: supernet_losses[1] is 0.53121 there and 0.53119 here",
        ),
        (
            (4, "report", "searched"),
            11,
            "task 2 'textures', cheem: searched is 12 there and 11 here",
        ),
        (
            (1, "report", "validation_accuracy"),
            0.9000000000000001,
            "task 1 'colours', cheem: validation_accuracy is 0.9 there and 0.9000000000000001 here",
        ),
        (
            (1, "report", "architecture", 1),
            "adapt:0",
            'task 1 \'colours\', cheem: architecture[1] is "skip" there and "adapt:0" here',
        ),
        (
            (1, "report", "finetune_losses"),
            [0.75],
            "task 1 'colours', cheem: finetune_losses[1] is 0.125 there and missing here",
        ),
        ((1, "report", "flops"), 301, "task 1 'colours', cheem: flops is 300 there and 301 here"),
        (
            (2, "report", "penalty"),
            1.0,
            "task 1 'colours', frozen_linear: penalty is 10 there and 1 here",
        ),
        (
            (6, "methods", "cheem", "accuracy", 0),
            0.625,
            (
                "the evaluation after task 2 'textures': methods.cheem.accuracy[0] is 0.5 there and"
                " 0.625 here"
            ),
        ),
        (
            (6, "methods", "cheem", "routing", 1, 0),
            0.5,
            (
                "the evaluation after task 2 'textures': methods.cheem.routing[1][0] is 0.25 there"
                " and 0.5 here"
            ),
        ),
        (
            (6, "checkpoints", "cheem", 1),
            "2c" * 32,
            (
                "the evaluation after task 2 'textures': checkpoints.cheem[1] is "
                '"1b1b1b1b1b1b1b1b1b1b1b1b… there and "2c2c2c2c2c2c2c2c2c2c2c2c… here'
            ),
        ),
        (
            (7, "test_accuracy"),
            0.8,
            "the upper bound of task 1 'colours': test_accuracy is 0.9 there and 0.8 here",
        ),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_changed_value_is_named_where_it_came_about(place, value, said):
    result = difference_of_records(story(), changed((place, value)), TASKS)
    assert str(result) == said and result is not None and result.stopped is None


def test_the_first_of_several_differences_is_the_earliest():
    backwards = [
        ((6, "methods", "cheem", "accuracy", 0), "accuracy[0]"),
        ((4, "report", "flops"), "flops"),
        ((4, "report", "finetune_losses", 0), "finetune_losses[0]"),
        ((4, "report", "architecture", 0), "architecture[0]"),
        ((4, "report", "searched"), "searched"),
        ((4, "report", "supernet_losses", 2), "supernet_losses[2]"),
        ((4, "report", "similarity", 0, 0), "similarity"),
        ((2, "report", "penalty"), "penalty"),
        ((1, "report", "finetune_losses", 1), "finetune_losses[1]"),
        ((1, "report", "name"), "name"),
        ((0, "executor"), "executor"),
    ]
    changes = []
    for place, words in backwards:
        changes.append((place, "other"))
        result = difference_of_records(story(), changed(*changes), TASKS)
        assert result is not None and words in result.place


def test_clocks_memory_and_the_history_of_a_process_make_no_difference():
    report = {"executor": "whole", "flops": {"paper": 3}, "tasks": [{"searched": 12}]}
    names = (
        "time",
        "seconds",
        "seconds_total",
        "checkpoint_seconds",
        "compile_seconds",
        "peak_memory_bytes",
        "compile",
    )
    names += (
        "hits",
        "misses",
        "evictions",
        "fingerprint",
        "conditions",
        "command",
        "data",
        "versions",
        "upper_bound",
        "device",
    )
    one = {
        **report,
        **dict.fromkeys(names, 1),
        "tasks": [{"searched": 12, "seconds": {"search": 1.0}}],
    }
    assert timeless(one) == report and set(names) == CIRCUMSTANCES
    entries = changed(
        *(((i, "time"), "later") for i in range(8)),
        ((1, "report", "seconds", "search"), 9.0),
        ((4, "report", "engine", "hits"), 9),
        ((0, "command"), ["b"]),
        ((3, "peak_memory_bytes"), 9),
    )
    entries.insert(5, {"event": "continued", "time": "t", "conditions": {"code": "c"}})
    assert entries != story() and difference_of_records(story(), entries, TASKS) is None


def test_a_run_that_stopped_is_equal_up_to_its_last_entry():
    result = difference_of_records(story(), story()[:4], TASKS)
    assert (
        str(result) == "equal up to where the second run stopped, before task 2 'textures', cheem"
    )
    assert result is not None and result.stopped == "second"
    result = difference_of_records(story()[:7], story(), TASKS)
    assert (
        str(result) == "equal up to where the first run stopped, before the upper bound of task 1"
        " 'colours'"
    )
    assert difference_of_records([], [], TASKS) is None


def test_a_difference_before_the_stop_counts_more_than_the_stop():
    result = difference_of_records(changed(((1, "report", "flops"), 1)), story()[:4], TASKS)
    assert str(result) == "task 1 'colours', cheem: flops is 1 there and 300 here"


def test_an_entry_that_only_one_run_has_is_reported():
    without = [entry for entry in story() if entry.get("method") != "frozen_linear"]
    assert (
        str(difference_of_records(story(), without, TASKS))
        == "task 1 'colours', frozen_linear: only in the record of the first run"
    )
    assert (
        str(difference_of_records(without, story(), TASKS))
        == "task 1 'colours', frozen_linear: only in the record of the second run"
    )


def test_events_of_unknown_kinds_are_compared_too():
    new = {"event": "pruned", "index": 1, "share": {"kept": [0.5, 0.25]}}
    other = copy.deepcopy(new)
    other["share"]["kept"][1] = 0.125
    assert (
        str(difference_of_records([*story(), new], [*story(), other], TASKS))
        == "event 'pruned', task 2 'textures': share.kept[1] is 0.25 there and 0.125 here"
    )
    assert str(
        difference_of_records([*story(), new, new], [*story(), new, other], TASKS)
    ).startswith("event 'pruned', task 2 'textures' (2)")
    result = difference_of_records(story(), changed(((1, "report", "warmth"), 3)), TASKS)
    assert str(result) == "task 1 'colours', cheem: warmth is missing there and 3 here"


def test_settings_of_another_method_are_reported_without_their_values():
    here = {"seed": 0, "cheem": {"rank": 4, "search": {"cost": "network"}}}
    result = find_differences({"seed": 1, "l2p": {"rank": 4}}, here)
    assert summary(result, "settings") == "seed is 1 there and 0 here (2 more settings differ)"
    assert list(map(str, result[1:])) == [
        "l2p is given there and missing here",
        "cheem is missing there and given here",
    ]


def write(directory, entries):
    (directory / record.NAME).unlink(missing_ok=True)
    written = record.Record(directory)
    for entry in entries:
        written.write(**{key: value for key, value in entry.items() if key != "time"})


@pytest.fixture
def runs(tmp_path):
    """Two directories with equal contents."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "config.json").write_text(json.dumps({"seed": 0, "tasks": TASKS}))
    write(first, story())
    shutil.copytree(first, second)
    return first, second


def test_directories_are_compared_config_first_and_then_the_record(runs):
    first, second = runs
    assert next(differences(first, second), None) is None
    write(second, changed(((1, "report", "searched"), 3)))
    (second / "config.json").write_text(json.dumps({"seed": 1, "tasks": TASKS}))
    places = [result.place for result in differences(first, second)]
    assert places == ["config.json: seed", "task 1 'colours', cheem: searched"]


def test_an_invalid_or_corrupted_run_directory_is_named(runs, tmp_path):
    first, second = runs
    with pytest.raises(ValueError, match="gone' is not a run directory"):
        next(differences(first, tmp_path / "gone"), None)
    (second / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"second/config.json is not JSON"):
        next(differences(first, second), None)
