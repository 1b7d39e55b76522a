"""Architectures and their integer encoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheem_jax.core.architecture import (
    Choice,
    decode,
    encode,
    from_strings,
    num_candidates,
    to_strings,
)

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(SIZES, st.data())
def test_every_candidate_decodes_to_a_choice_and_back(sizes, data):
    codes = [data.draw(st.integers(0, num_candidates(n) - 1)) for n in sizes]
    architecture = decode(codes, sizes)
    assert encode(architecture, sizes).tolist() == codes
    assert from_strings(to_strings(architecture)) == architecture


def test_candidates_are_reuse_then_adapt_then_new_and_skip():
    assert decode([0, 1, 2, 3, 4, 5], [2] * 6) == (
        Choice("reuse", 0),
        Choice("reuse", 1),
        Choice("adapt", 0),
        Choice("adapt", 1),
        Choice("new"),
        Choice("skip"),
    )


@pytest.mark.parametrize("text", ["reuse", "adapt:x", "new:1", "skp", ""])
def test_a_text_that_is_no_choice_is_refused_by_name(text):
    with pytest.raises(ValueError, match="expected 'reuse:N'"):
        from_strings([text])


def test_experts_outside_the_pool_are_refused():
    with pytest.raises(ValueError, match="reuse:1 is not possible in a pool of 1 expert"):
        encode((Choice("reuse", 1),), [1])
