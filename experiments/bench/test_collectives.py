"""Collectives are read from programs' text as often as they run."""

import dataclasses

import pytest

from cheem_jax.backbone.config import CONFIGS
from experiments.bench import collectives
from experiments.bench.collectives import Collective

REDUCER = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def found_in(*lines: str, before: str = "") -> list[Collective]:
    body = "\n".join(f"  {line}" for line in lines)
    return collectives.collectives(
        f"HloModule jit_step, is_scheduled=true\n{REDUCER}{before}\n"
        f"ENTRY %main.1_spmd (p: f32[4,8], q: (f32[], s32[2])) -> f32[4,8] {{\n{body}\n}}\n"
    )


def test_an_all_reduce_of_several_arrays_is_one_exchange_of_all_their_bytes():
    line = (
        "%all-reduce.3 = (f32[], f32[128]{0}, f32[128,96]{1,0},"
        " /*index=3*/bf16[40,96]{1,0:T(8,128)}) all-reduce(%a, %b, %c, %d), channel_id=3,"
        " replica_groups=mesh['axis_0'=8] {'axis_0'}, to_apply=%add"
    )
    assert found_in(line) == [Collective("all-reduce", 4 * (1 + 128 + 128 * 96) + 2 * 40 * 96)]


def test_each_kind_counts_the_whole_array():
    assert found_in(
        "%g = f32[96,384]{0,1} all-gather(%p), channel_id=1, replica_groups=[4,2]<=[8],"
        " dimensions={1}",
        "%s = f32[12,96]{1,0} reduce-scatter(%g), replica_groups={{0,1,2,3},{4,5,6,7}},"
        " dimensions={0}, to_apply=%add",
        "%c = s32[96,48]{0,1} collective-permute(%s), source_target_pairs={{1,0},{3,2}}",
        "ROOT %t = pred[2,4]{1,0} all-to-all(%c), replica_groups={{0,1}},"
        ' metadata={op_name="all-reduce(x)"}',
    ) == [
        Collective("all-gather", 4 * 96 * 384),
        Collective("reduce-scatter", 4 * 4 * 12 * 96),
        Collective("collective-permute", 4 * 96 * 48),
        Collective("all-to-all", 8),
    ]


def test_what_starts_and_is_done_later_counts_once_and_without_its_operand():
    wrapped = """
%wrapped (p: f32[16]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  ROOT %s = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""
    assert found_in(
        "%a = f32[10]{0} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add",
        "%b = f32[10]{0} all-reduce-done(%a)",
        "%c = ((f32[2]{0}, f32[3]{0}), (f32[8]{0}, f32[12]{0})) all-gather-start(%p, %q),"
        " replica_groups=[2,4]<=[8]",
        "%d = (f32[8]{0}, f32[12]{0}) all-gather-done(%c)",
        "%e = (f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%p),"
        " source_target_pairs={{0,1}}",
        "%f = f32[5]{0} collective-permute-done(%e)",
        "%g = ((f32[16]{0}), f32[4]{0}) async-start(%p), calls=%wrapped",
        "%h = f32[4]{0} async-done(%g)",
        before=wrapped,
    ) == [
        Collective("all-reduce", 40),
        Collective("all-gather", 80),
        Collective("collective-permute", 20),
        Collective("reduce-scatter", 64),
    ]


BRANCHES = """
%small (p: f32[2]) -> f32[2] {
  ROOT %r = f32[2]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%large (p: f32[2]) -> f32[2] {
  %r = f32[6]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

%body (p: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = f32[2]{0} conditional(%i, %p, %p), branch_computations={%small, %large}
}

%until (p: (s32[], f32[2])) -> pred[] {
  ROOT %lt = pred[] compare(%p, %q), direction=LT
}
"""


def test_a_loop_repeats_and_the_largest_branch_counts():
    loop = "%w = (s32[], f32[2]{0}) while(%p), condition=%until, body=%body"
    known = (
        loop
        + ', backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}'  # noqa: E501
    )
    assert found_in(known, before=BRANCHES) == 3 * [Collective("all-reduce", 24)]
    with pytest.raises(
        ValueError, match="how often the loop body runs is not known, and it contains 1 collectives"
    ):
        found_in(loop, before=BRANCHES)


def test_groups_are_those_of_the_named_axes():
    mesh = "replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) "
    assert collectives.group_size(mesh + "{'axis_1'}, dimensions={1}") == 2
    assert collectives.group_size(mesh + "{'axis_1','axis_2'}, dimensions={1}") == 8
    with pytest.raises(ValueError, match="unknown groups of devices"):
        collectives.group_size("dimensions={1}")


def test_only_gradients_the_head_and_the_loss_must_be_summed():
    config = dataclasses.replace(CONFIGS["vit_base"], depth=4)
    head, pair, full = 769 * 128, 40 * (3072 + 768), 3073 * 768
    assert collectives.reduced_bytes(config, collectives.architectures(4)["typical"], 100) == 4 * (
        pair + full + head + 1
    )
    assert collectives.reduced_bytes(config, collectives.architectures(4)["worst"], 100) == 4 * (
        4 * full + head + 1
    )


def test_frozen_weights_are_gathered_once_for_a_pass_and_once_for_its_gradient():
    config = dataclasses.replace(CONFIGS["vit_base"], depth=4)
    attention, up = 4 * 768 * 768, 768 * 3072
    # Adapt begins from kept tokens and hands no gradient back; Skip has no use for `up`
    assert collectives.gathered_bytes(config, collectives.architectures(4)["typical"]) == 4 * (
        up + 2 * (3 * attention + 2 * up)
    )
    assert collectives.gathered_bytes(config, (collectives.REUSE,) * 4) == 4 * (
        3 * attention + 4 * up
    )


def test_bytes_beyond_what_must_be_sent_miss_the_goal():
    entry = {
        "executor": "stages",
        "fsdp": 1,
        "backbone": "vit_base",
        "depth": 12,
        "what": "step, typical",
        "kinds": {"all-reduce": {"count": 7, "bytes": 100}},
        "expected_reduced": 100,
        "expected_gathered": 0,
    }
    more = {**entry, "kinds": {**entry["kinds"], "all-gather": {"count": 1, "bytes": 20}}}
    none = {**entry, "kinds": {}, "expected_reduced": 0}
    rows = collectives.rows_of([entry, more, none])
    assert [(row.reached, row.met) for row in rows] == [(1.0, True), (1.2, False), (0.0, True)]
