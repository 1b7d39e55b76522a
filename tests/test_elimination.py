"""Backward elimination on toy landscapes, in which each Skip adds a known loss."""

import numpy as np
import pytest

from cheem_jax.cheem.elimination import Losses, count_scored, eliminate

# one expert per block: Adapt is 1, Skip 3
ADAPT, SKIP = 1, 3
NUM = 50


class Landscape:
    """Losses that are a sum over blocks, with the same noise of each image in every network.

    `added[block]` is the mean loss that Skip adds in that block.
    """

    def __init__(self, added):
        self.added = np.array(added)
        self.noise = np.random.default_rng(0).normal(size=NUM)
        self.scored = []

    def __call__(self, genomes):
        self.scored += [tuple(genome) for genome in genomes.tolist()]
        totals = np.where(genomes == SKIP, self.added, 0.0).sum(axis=1)
        values = self.noise + totals[:, None]
        return Losses(values, values < 0)


def run(landscape, num_skipped=2, **more):
    anchor = np.full(len(landscape.added), ADAPT, np.int32)
    skips = np.full(len(landscape.added), SKIP, np.int32)
    return eliminate(landscape, anchor, skips, num_skipped, **more)


def test_the_blocks_that_add_the_least_loss_are_skipped():
    landscape = Landscape([0.3, 0.1, 0.4, 0.2])
    genome, networks = run(landscape)
    assert genome.tolist() == [ADAPT, SKIP, ADAPT, SKIP]
    # the anchor, four networks that skip one block, three that skip two
    assert networks.genomes.tolist() == [list(codes) for codes in landscape.scored]
    assert len(landscape.scored) == 8 and networks.genomes[0].tolist() == [ADAPT] * 4
    np.testing.assert_allclose(
        networks.losses.mean(axis=1)[5:] - networks.losses[0].mean(), [0.4, 0.5, 0.3]
    )


def test_a_second_skip_is_judged_after_the_first():
    class Interacting(Landscape):
        def __call__(self, genomes):
            values, _ = super().__call__(genomes)
            both = (genomes[:, 0] == SKIP) & (genomes[:, 1] == SKIP)
            values = values + np.where(both, 5.0, 0.0)[:, None]
            return Losses(values, values < 0)

    genome, _ = run(Interacting([0.1, 0.2, 0.4]))
    assert genome.tolist() == [SKIP, ADAPT, SKIP]


@pytest.mark.parametrize("num_skipped", range(5))
def test_the_given_number_of_blocks_is_skipped(num_skipped):
    landscape = Landscape([-0.3, 0.1, -0.4, 0.2])
    genome, _ = run(landscape, num_skipped)
    assert np.flatnonzero(genome == SKIP).tolist() == sorted([2, 0, 1, 3][:num_skipped])
    assert count_scored(4, num_skipped) == len(landscape.scored)


def test_blocks_before_the_first_one_are_never_skipped():
    landscape = Landscape([-0.3, 0.1, 0.4, 0.2])
    genome, _ = run(landscape, first=1)
    assert genome.tolist() == [ADAPT, SKIP, ADAPT, SKIP]
    assert count_scored(3, 2) == len(landscape.scored)


def test_an_elimination_resumes_from_every_call_of_the_score():
    added = [0.1, -0.2, 0.05, 0.3]
    steps = []
    whole = run(Landscape(added), on_scored=steps.append)
    assert len(steps) == 3
    for earlier in steps:
        landscape = Landscape(added)
        genome, networks = run(landscape, earlier=earlier)
        assert genome.tolist() == whole[0].tolist()
        for resumed, expected in zip(networks, whole[1], strict=True):
            np.testing.assert_array_equal(resumed, expected)
        assert len(landscape.scored) == len(networks.genomes) - len(earlier.genomes)


def test_a_network_without_a_finite_loss_is_not_kept():
    genome, _ = run(Landscape([np.nan, 0.1, np.inf]), 3)
    assert genome.tolist() == [ADAPT, SKIP, ADAPT]


def test_an_anchor_without_a_finite_loss_is_an_error():
    landscape = Landscape([0.0, 0.0])
    landscape.noise[3] = np.nan
    with pytest.raises(ValueError, match="before training; check the weights"):
        run(landscape)
