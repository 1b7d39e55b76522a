"""The guide for researchers: its code runs from top to bottom and does what the text says."""

import re
from pathlib import Path

import numpy as np
import pytest

from cheem_jax.cheem.hee import sample
from cheem_jax.core.architecture import decode

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "research.md"


@pytest.mark.full
def test_the_code_of_the_page_runs_and_does_the_things_it_says():
    found = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(
            compile(code, str(PAGE), "exec"), found
        )  # the page's own code, as a reader would paste it
    supernet, state, pool = found["supernet"], found["state"], found["pool"]

    assert (
        np.isfinite(found["loss"]) and int(state.head.adam.count) == 5
    )  # three sampled by HEE, two of its own
    sampled = {(block, choice) for a in found["architectures"] for block, choice in enumerate(a)}
    assert {
        place for place in sampled if place[1].kind in ("adapt", "new")
    } <= state.learners.keys()

    drawn = np.asarray(sample(found["jax"].random.key(7), found["without_skip"], num=50))
    assert not any(
        choice.kind == "skip" for codes in drawn for choice in decode(codes, supernet.sizes)
    )
    assert not any(choice.kind == "skip" for choice in found["chosen"])
    np.testing.assert_allclose(found["prefers_reuse"].sum(axis=1), 1)
    assert (found["prefers_reuse"][:, 0] > found["hee"][:, 0]).all()

    assert found["right"].shape == (3,) and (found["right"] > 0).all()
    learning = [
        block for block, choice in enumerate(found["chosen"]) if choice.kind in ("adapt", "new")
    ]
    assert {block for block, expert in enumerate(found["experts"]) if expert == 1} == set(learning)
    assert found["following"].sizes == tuple(
        2 if block in learning else 1 for block in range(len(pool))
    )
    assert found["gradients"].keys() == {
        block
        for block, choice in enumerate(found["architecture"])
        if choice.kind in ("adapt", "new")
    }
