"""Backward elimination on toy landscapes, in which each Skip adds a known loss."""

import numpy as np
import pytest

from cheem_jax.cheem.elimination import Losses, eliminate

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


def flops_of(genomes):
    """A Skip saves 10 of 100 FLOPs."""
    return 100.0 - 10 * (genomes == SKIP).sum(axis=1)


def run(landscape, max_flops=80.0, **more):
    anchor = np.full(len(landscape.added), ADAPT, np.int32)
    skips = np.full(len(landscape.added), SKIP, np.int32)
    return eliminate(landscape, anchor, skips, flops_of, max_flops, **more)


def test_the_blocks_that_add_the_least_loss_are_skipped_until_the_limit_is_met():
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


@pytest.mark.parametrize(("max_flops", "num_skipped"), [(100, 0), (99, 1), (90, 1), (75, 3)])
def test_no_more_blocks_are_skipped_than_the_limit_asks_for(max_flops, num_skipped):
    genome, _ = run(Landscape([-0.3, 0.1, -0.4, 0.2]), max_flops)
    assert (genome == SKIP).sum() == num_skipped


def test_a_limit_that_cannot_be_met_ends_with_all_blocks_skipped():
    genome, _ = run(Landscape([0.1, 0.3]), 0.0)
    assert genome.tolist() == [SKIP] * 2


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
    genome, _ = run(Landscape([np.nan, 0.1, np.inf]), 0.0)
    assert genome.tolist() == [ADAPT, SKIP, ADAPT]


def test_an_anchor_without_a_finite_loss_is_an_error():
    landscape = Landscape([0.0])
    landscape.noise[3] = np.nan
    with pytest.raises(ValueError, match="lower learning rates"):
        run(landscape)
