"""Batches over several devices: eight virtual ones of a CPU compute the same as one."""

import itertools
import json

import jax
import numpy as np
import pytest
import small
import spmd

from cheem_jax.engine import hosts
from cheem_jax.engine.executor import Dense
from cheem_jax.engine.layout import ONE, Layout, MeshConfig, make_layout
from cheem_jax.engine.spread import added_flops, divided
from cheem_jax.engine.stages import Stages

STAGES = Stages(small.backbone(), "mlp_down")


def found_by(executors: list[str], layouts: list[str], folder) -> dict:
    out = folder / "found.json"
    ((status, said),) = spmd.finish(
        [spmd.start("devices", out, devices=8, executors=executors, layouts=layouts)], 1200
    )
    assert status == 0, said
    return json.loads(out.read_text())


def compare(one: dict, many: dict) -> None:
    assert len(one["losses"]) == spmd.STEPS
    assert many["drawn"] == one["drawn"]
    assert many["score"] == one["score"]
    assert many["answers"] == one["answers"]
    for name in ("losses", "losses_of_candidates"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4)
    for name in ("means", "features"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_eight_devices_draw_learn_score_and_answer_as_one(tmp_path):
    result = found_by(["stages"], ["one", "all"], tmp_path)["stages"]
    compare(result["one"], result["all"])
    assert result["all"]["weight_bytes"] == result["one"]["weight_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["stages", "whole", "scan"])
def test_every_executor_computes_the_same_on_eight_devices(executor, tmp_path):
    result = found_by([executor], ["one", "all"], tmp_path)[executor]
    compare(result["one"], result["all"])


def fake(num: int, devices: range) -> Layout:
    """A layout of several devices with some of them in this process; only rows are counted."""
    layout = Layout([jax.devices()[0]])
    layout.num = num
    layout.local = list(devices)
    return layout


def test_each_process_reads_its_part_of_a_batch_which_is_padded_with_the_first_row():
    rows = np.arange(10, 17)
    first, second = fake(4, range(0, 2)), fake(4, range(2, 4))
    assert first.local_rows(rows).tolist() == [10, 11, 12, 13]
    assert second.local_rows(rows).tolist() == [
        14,
        15,
        16,
        10,
    ]
    assert second.local_rows(np.ones(7), 0).tolist() == [1, 1, 1, 0]
    assert ONE.local_rows(rows) is rows


def test_a_mesh_of_one_device_contains_whole_arrays():
    layout = Layout([jax.devices()[0]])
    values = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(hosts.fetch(layout.rows(values)), values)
    np.testing.assert_array_equal(hosts.fetch(layout.replicate({"a": values}))["a"], values)
    again = layout.replicate(layout.replicate(values))
    np.testing.assert_array_equal(layout.copy(again, 0), values)


class Noted:
    """Images that note which rows were asked for."""

    def __init__(self):
        self.images = np.zeros((20, 8, 8, 3), np.uint8)
        self.asked = []
        self.shape, self.dtype = self.images.shape, self.images.dtype

    def __len__(self):
        return len(self.images)

    def __getitem__(self, rows):
        self.asked.append(np.asarray(rows).tolist())
        return self.images[rows]


def test_a_process_reads_only_the_images_of_its_devices(monkeypatch):
    images = Noted()
    second = fake(4, range(2, 4))
    monkeypatch.setattr(second, "join", lambda part: part)
    assert [len(part) for part in second.read(images, [np.arange(8), np.arange(8, 13)])] == [4, 4]
    assert images.asked == [[4, 5, 6, 7], [12, 8, 8, 8]]


def test_candidates_are_divided_so_that_no_device_has_much_more_to_do():
    rng = np.random.default_rng(0)
    depth = STAGES.num_blocks
    expert = STAGES.base_pool[0][0].params
    networks = [
        [Dense(int(code), None if code == 3 else expert) for code in rng.integers(0, 4, depth)]
        for _ in range(40)
    ]
    groups = divided(STAGES, networks, 4)
    assert sorted(index for group in groups for index in group) == list(range(40))

    def work(order: list[int]) -> float:
        visited = [(), *(networks[i] for i in order)]
        return sum(added_flops(STAGES, *pair) for pair in itertools.pairwise(visited))

    assert max(map(work, groups)) < 1.35 * work(sum(groups, [])) / 4  # prefixes at a cut run twice
    assert divided(STAGES, networks[:2], 4)[2:] == [[], []]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 0}, "devices is 0; expected a number of at least 1, or all"),
        ({"devices": 99}, "devices is 99, but JAX has 1 .*JAX_NUM_CPU_DEVICES"),
    ],
)
def test_devices_that_are_not_there_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_layout(MeshConfig(**settings))
