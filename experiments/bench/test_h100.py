"""Kernels and bytes are counted in HLO text, and steps are traced on shapes only."""

import pytest

from experiments.bench import h100
from experiments.bench.h100 import Counted, Kernels
from experiments.bench.measure import in_child

TEXT = """HloModule jit_step, is_scheduled=true

%taken (table: f32[8,100], slot: s32[]) -> f32[1,100] {
  %table = f32[8,100]{1,0} parameter(0)
  %slot = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,100]{1,0} dynamic-slice(%table, %slot, %zero), dynamic_slice_sizes={1,100}
}

%written (table.1: f32[8,100], row.1: f32[1,100], slot.1: s32[]) -> f32[8,100] {
  %table.1 = f32[8,100]{1,0} parameter(0)
  %row.1 = f32[1,100]{1,0} parameter(1)
  %slot.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %new = f32[8,100]{1,0} dynamic-update-slice(%table.1, %row.1, %slot.1, %zero.1)
}

%body (state: (s32[], f32[8,100])) -> (s32[], f32[8,100]) {
  %state = (s32[], f32[8,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %held = f32[8,100]{1,0} get-tuple-element(%state), index=1
  %one = f32[1,100]{1,0} fusion(%held, %i), kind=kLoop, calls=%taken
  %all = f32[8,100]{1,0} fusion(%held, %one, %i), kind=kLoop, calls=%written
  ROOT %next = (s32[], f32[8,100]{1,0}) tuple(%i, %all)
}

%until (state.1: (s32[], f32[8,100])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: bf16[100,8], b: f32[8,100], p: pred[]) -> (s32[], f32[8,100]) {
  %a = bf16[100,8]{1,0} parameter(0)
  %b = f32[8,100]{1,0} parameter(1)
  %dot = (f32[100,100]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="product"
  %start = (s32[], f32[8,100]{1,0}) tuple(%zero.2, %b)
  ROOT %while = (s32[], f32[8,100]) while(%start), condition=%until, body=%body, known_trip_count={"n":"5"}
}
"""  # noqa: E501


def test_every_iteration_of_a_loop_counts_and_a_slice_counts_as_the_slice():
    product = 2 * 800 + 4 * 800 + 4 * 100 * 100  # the scratch memory does not count
    turn = (2 * 400 + 4) + (2 * 400 + 4)
    assert h100.kernels(TEXT) == Kernels(1 + 5 * 2, product + 5 * turn, conditionals=0, loops=1)


def test_a_slice_of_a_bitcast_counts_as_the_slice():
    text = """
%third (x: f32[40,30]) -> f32[4,10,10] {
  %x = f32[40,30]{1,0} parameter(0)
  %cast = f32[4,10,30]{2,1,0} bitcast(%x)
  ROOT %part = f32[4,10,10]{2,1,0} slice(%cast), slice={[0:4], [0:10], [20:30]}
}

ENTRY %main (a: f32[40,30]) -> f32[4,10,10] {
  %a = f32[40,30]{1,0} parameter(0)
  ROOT %q = f32[4,10,10]{2,1,0} fusion(%a), kind=kLoop, calls=%third
}
"""
    assert h100.kernels(text) == Kernels(1, 2 * 4 * 400, conditionals=0, loops=0)


def test_a_conditional_counts_with_its_largest_branch():
    text = """
%none (x: f32[4]) -> f32[4] {
  ROOT %x = f32[4]{0} parameter(0)
}
%some (y: f32[4]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  ROOT %z = f32[4]{0} add(%y, %y)
}
ENTRY %main (p: pred[], x.1: f32[4]) -> f32[4] {
  %p = pred[] parameter(0)
  %x.1 = f32[4]{0} parameter(1)
  ROOT %c = f32[4]{0} conditional(%p, %x.1, %x.1), branch_computations={%none, %some}
}
"""
    assert h100.kernels(text) == Kernels(1, 48, conditionals=1, loops=0)
    with pytest.raises(ValueError, match="no ENTRY computation"):
        h100.kernels("HloModule jit_step")


@pytest.mark.full
@pytest.mark.parametrize("executor", ["stages", "scan"])
def test_steps_are_traced_on_shapes(executor):
    # in a separate process, because functions are checked here to receive arrays, not shapes
    counts = in_child(
        h100.count,
        executor,
        "float32",
        None,
        "vit_nano",
        4,
        8,
        environment={"JAX_PLATFORMS": "cpu"},
    )
    assert counts["kernels"] > 100 and 0 < counts["gigabytes"] < 1 and counts["conditionals"] == 0
    if executor == "scan":
        assert (
            counts["programs"] == {"take": 1 / 8, "trace_training": 1 / 8}
            and counts["loops"] == 1 / 8
        )
        assert counts["dispatches"] == counts["copies"] == 2 / 8
    else:
        assert {"take", "loss_and_gradients", "linearise", "update"} <= counts["programs"].keys()
        assert counts["programs"]["take"] == 1 and counts["dispatches"] > 10


def test_counts_of_a_step_are_compared_with_their_limits():
    kernels = Kernels(300, 4e9, 1, 0)
    counts = h100.per_step(
        [Counted("take", Kernels(1, 1e9, 0, 0), 1), Counted("step", kernels, 3)], 2
    )
    assert counts["programs"] == {"step": 0.5, "take": 0.5}
    rows = {row.what: row for row in h100.rows_of([counts])}
    assert rows["stages, float32: kernels a step"].reached == 150.5
    assert (
        rows["stages, float32: gigabytes a step"].reached == 2.5
        and rows["stages, float32: gigabytes a step"].met
    )
    assert not rows["stages, float32: conditionals a step"].met
