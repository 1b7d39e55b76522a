"""The guide for researchers: its code runs from top to bottom and does the things that the text
says."""

import re
from pathlib import Path

import numpy as np
import pytest

from cheem_jax.cheem.hee import sample
from cheem_jax.core.architecture import decode

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "research.md"


@pytest.mark.full
def test_the_code_of_the_page_runs_and_does_the_things_it_says():
    result = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(
            compile(code, str(PAGE), "exec"), result
        )  # the page's own code, as a reader would paste it
    supernet, state, pool = result["supernet"], result["state"], result["pool"]

    assert (
        np.isfinite(result["loss"]) and int(state.head.adam.count) == 5
    )  # three sampled by HEE, two separate ones
    sampled = {(block, choice) for a in result["architectures"] for block, choice in enumerate(a)}
    assert {
        place for place in sampled if place[1].kind in ("adapt", "new")
    } <= state.learners.keys()

    samples = np.asarray(sample(result["jax"].random.key(7), result["without_skip"], num=50))
    assert not any(
        choice.kind == "skip" for codes in samples for choice in decode(codes, supernet.sizes)
    )
    assert not any(choice.kind == "skip" for choice in result["chosen"])
    np.testing.assert_allclose(result["prefers_reuse"].sum(axis=1), 1)
    assert (result["prefers_reuse"][:, 0] > result["hee"][:, 0]).all()

    learning = [
        block for block, choice in enumerate(result["chosen"]) if choice.kind in ("adapt", "new")
    ]
    assert {block for block, expert in enumerate(result["experts"]) if expert == 1} == set(learning)
    assert result["following"].sizes == tuple(
        2 if block in learning else 1 for block in range(len(pool))
    )
    assert result["gradients"].keys() == {
        block
        for block, choice in enumerate(result["architecture"])
        if choice.kind in ("adapt", "new")
    }
