"""The benchmarks time their sides in turns, count FLOPs as the library does, and report missed
goals."""

import json
import time

import numpy as np
import pytest

from cheem_jax.backbone.config import CONFIGS
from cheem_jax.backbone.flops import embed_flops, executed_backbone_flops, pair_flops
from cheem_jax.core.architecture import Choice
from cheem_jax.core.ops import Expert
from cheem_jax.engine.executor import Dense
from experiments.bench import accelerator, data, measure, run

CONFIG = CONFIGS["vit_micro"]
EXPERT = Expert(np.zeros((384, 96), np.float32), np.zeros(96, np.float32))


def network(*codes: int) -> list[Dense]:
    """Make a network from the expert's code of each block, with -1 for Skip; missing codes are
    0."""
    padded = [*codes, *[0] * (CONFIG.depth - len(codes))]
    return [Dense(code, None if code == -1 else EXPERT) for code in padded]


def test_every_side_warms_up_once_and_then_the_sides_take_turns(monkeypatch):
    calls: list[str] = []
    now = 0.0
    took = {"a": iter([9, 1, 5, 2]), "b": iter([9, 3, 3, 4])}

    def side(name: str):
        def work() -> None:
            nonlocal now
            calls.append(name)
            now += next(took[name])

        return work

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    times = measure.alternate({"a": side("a"), "b": side("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert times == {"a": [1, 5, 2], "b": [3, 3, 4]}  # the warm-up is not timed
    seconds = measure.medians(times)
    assert seconds == {"a": 2, "b": 3}
    assert measure.ratio(seconds, "b", "a") == 1.5
    assert measure.ratio(seconds, "c", "a") is None


def test_a_goal_is_an_upper_or_a_lower_limit():
    assert measure.Row("", {}, 2.0, 2.0).met is True
    assert measure.Row("", {}, 1.9, 2.0).met is False
    assert measure.Row("", {}, 1.9, 2.0, "at most").met is True
    assert measure.Row("", {}, None, 2.0).met is None


def test_the_flops_of_one_network_are_those_that_the_library_counts():
    assert measure.separate_flops(CONFIG, [network()], from_images=True) == executed_backbone_flops(
        CONFIG
    )


def test_a_tree_counts_shared_work_once():
    first = measure.block_flops(CONFIG, 0)
    alone = measure.tree_flops(CONFIG, [network()])
    assert measure.tree_flops(CONFIG, [network(), network()]) == alone
    assert measure.separate_flops(CONFIG, [network(), network()]) == 2 * alone
    # siblings at block 0 share only its up-projection
    assert measure.tree_flops(CONFIG, [network(), network(1)]) == 2 * alone - first.widen
    # Skip does not use it
    assert (
        measure.tree_flops(CONFIG, [network(), network(-1)])
        == 2 * alone - first.widen - first.leave
    )
    # siblings at the last block share everything except the down-projection of the CLS token
    last = measure.block_flops(CONFIG, CONFIG.depth - 1)
    siblings = [network(), network(*[0] * (CONFIG.depth - 1), 1)]
    assert measure.tree_flops(CONFIG, siblings) == alone + last.leave


def test_a_step_has_no_backward_pass_before_the_first_op_that_learns():
    reuse, adapt = Choice("reuse", 0), Choice("adapt", 0)
    depth = CONFIG.depth
    rank = 4
    forward = measure.separate_flops(CONFIG, [network()], from_images=True)
    assert measure.step_flops(CONFIG, (reuse,) * depth, rank) == forward
    costs = [measure.block_flops(CONFIG, block) for block in range(depth)]
    late = (*[reuse] * (depth - 2), adapt, reuse)
    pair = pair_flops(CONFIG, "mlp_down", rank)
    last = costs[-1]
    backward = last.enter + last.attention + last.widen + last.leave
    # the pair has a forward pass and gradients; only the last block passes a gradient back
    assert measure.step_flops(CONFIG, late, rank) == forward + 2 * pair + backward
    saved = (
        embed_flops(CONFIG) + sum(c.enter + c.widen + c.leave for c in costs[:-2]) + costs[-2].enter
    )
    assert (
        measure.step_flops(CONFIG, late, rank, begin=depth - 2)
        == forward + 2 * pair + backward - saved
    )


def test_a_record_lists_missed_goals_and_missing_measurements(tmp_path, capsys):
    rows = [
        measure.Row("a step", {"ours": 0.2, "PyTorch": 0.3}, 1.5, 2.0, share=0.41),
        measure.Row("programs", {}, 4.0, 5.0, "at most", "programs"),
        measure.Row("without torch", {}, None, 2.0),
    ]
    measure.save(tmp_path / "benchmarks", "steps", rows)
    step, programs, without = capsys.readouterr().out.splitlines()
    assert step.endswith("1.5 x, 41 % of the matrix peak, goal: at least 2: no")
    assert (
        programs == "programs: 4 programs, goal: at most 5: yes"
        and without == "without torch: not measured"
    )
    record = json.loads((tmp_path / "benchmarks/steps.json").read_text())
    assert [row["met"] for row in record["rows"]] == [False, True, None]
    assert record["machine"]["cpu"] and record["machine"]["jax"]


def test_generated_photographs_differ_and_have_the_size_of_real_files():
    files = list(data.photographs(8))
    assert len(set(files)) == 8
    assert all(50_000 < len(file) < 100_000 for file in files)
    assert list(data.photographs(2)) == files[:2]


def test_other_load_is_refused_unless_it_is_allowed(monkeypatch):
    monkeypatch.setattr(measure, "other_work", lambda: 0.35)
    monkeypatch.setattr(measure, "_load", {})
    with pytest.raises(ValueError, match="other processes use 35 % of the processors.*--loaded"):
        measure.check_load(measure.Bench())
    measure.check_load(measure.Bench(loaded=True))
    assert measure.machine()["other_work"] == 0.35
    monkeypatch.setattr(measure, "other_work", lambda: 0.02)
    measure.check_load(measure.Bench())


def test_the_share_of_other_load_is_between_0_and_1():
    share = measure.other_work(0.05)
    assert share is None or 0 <= share <= 1


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="unknown parts \\['step'\\]; expected some of: steps"):
        run.main(run.All(only="step"))


def test_overlapping_kernels_count_once():
    assert accelerator.covered([(0, 10), (5, 12), (20, 25), (21, 22)]) == 17
    assert accelerator.covered([]) == 0


def test_failed_and_omitted_cells_are_recorded_and_measured_cells_are_not_repeated(
    tmp_path, monkeypatch
):
    calls = []

    def cell(name: str, seconds: float, work) -> accelerator.Cell:
        return accelerator.Cell(name, seconds, lambda: calls.append(name) or work())

    cells = [
        cell("works", 1, lambda: {"a": 1}),
        cell("fails", 1, lambda: 1 // 0),
        cell("long", 1e6, dict),
    ]
    monkeypatch.setattr(accelerator, "groups", lambda sizes: {"group": cells})
    monkeypatch.setattr(accelerator, "enable_cache", lambda: None)
    for _ in range(2):
        accelerator.run_cells("group", accelerator.MINIATURE, tmp_path, 100)
    record = json.loads((tmp_path / "speed.json").read_text())
    assert record["machine"]["jax"] and record["cells"]["works"]["a"] == 1
    assert (
        record["cells"]["fails"]["error"].startswith("ZeroDivisionError")
        and "left_out" in record["cells"]["long"]
    )
    assert calls == ["works", "fails", "fails"]


def test_compiling_runs_every_cell_briefly_and_passes_over_failures(tmp_path, monkeypatch):
    calls = []

    def groups(sizes: accelerator.Sizes) -> dict[str, list[accelerator.Cell]]:
        cells = {"fails": lambda: 1 // 0, "works": lambda: calls.append(sizes.num_steps)}
        return {"group": [accelerator.Cell(name, 1, work) for name, work in cells.items()]}

    monkeypatch.setattr(accelerator, "groups", groups)
    monkeypatch.setattr(accelerator, "enable_cache", lambda: None)
    monkeypatch.setattr(accelerator, "share_memory", lambda: None)
    accelerator.compile_cells("group", accelerator.Sizes(), tmp_path)
    assert calls == [accelerator.brief(accelerator.Sizes()).num_steps] and calls[0] < 200


@pytest.mark.full
def test_the_miniature_of_an_accelerator_measures_every_cell(tmp_path, monkeypatch):
    # its processes mostly compile, and how fast their code is does not matter
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    accelerator.main(
        accelerator.Speed(
            tmp_path, seconds=1500, compiling=0, only="tiny,task_tiny", miniature=True
        )
    )
    cells = json.loads((tmp_path / "speed.json").read_text())["cells"]
    assert not any("error" in cell or "left_out" in cell for cell in cells.values()), cells
    steps = [name for name in cells if "images" in name]
    assert len(steps) == 5 and all(np.isfinite(cells[name]["first_losses"]).all() for name in steps)
    assert cells["vit_nano, whole task, bfloat16"]["searched"] == 8
