"""Backward elimination on toy landscapes, in which each change adds a known loss."""

import numpy as np
import pytest

from cheem_jax.cheem.elimination import Losses, eliminate

# one expert per block: Reuse is 0, Adapt 1, New 2, Skip 3
ADAPT, REUSE, SKIP = 1, 0, 3
CHANGES = [[REUSE, SKIP]] * 4
NUM = 50


class Landscape:
    """Losses that are a sum over blocks, with the same noise of each image in every network.

    `added[block]` are the mean losses that Reuse and Skip add in that block.
    """

    def __init__(self, added):
        self.added = added
        self.noise = np.random.default_rng(0).normal(size=NUM)
        self.scored = []

    def __call__(self, genomes):
        self.scored += [tuple(genome) for genome in genomes.tolist()]
        totals = [
            sum({ADAPT: 0.0, REUSE: reuse, SKIP: skip}[code] for code, (reuse, skip) in pairs)
            for pairs in (list(zip(genome, self.added, strict=True)) for genome in genomes.tolist())
        ]
        values = self.noise + np.array(totals)[:, None]
        return Losses(values, values < 0)


def costs(genomes):
    """The share of blocks with Adapt, and FLOPs: Reuse saves 0.02 of them, and Skip 0.1."""
    adapted, reused, skipped = ((genomes == code).mean(axis=1) for code in (ADAPT, REUSE, SKIP))
    return np.stack([adapted, adapted + 0.98 * reused + 0.9 * skipped], axis=1)


def run(landscape, limits=(0.5, 1.0), **more):
    anchor = np.full(len(landscape.added), ADAPT, np.int32)
    changes = CHANGES[: len(landscape.added)]
    return eliminate(landscape, anchor, changes, costs, np.array(limits), **more)


def test_the_cheapest_changes_are_made_until_the_limit_is_met():
    landscape = Landscape([(0.1, 0.3), (0.2, 0.4), (0.05, 0.2), (0.3, 0.35)])
    genome, networks = run(landscape)
    assert genome.tolist() == [REUSE, ADAPT, REUSE, ADAPT]
    assert networks.genomes.tolist() == [list(codes) for codes in landscape.scored]
    assert len(set(landscape.scored)) == len(landscape.scored)
    assert networks.genomes[0].tolist() == [ADAPT] * 4


def test_changes_that_add_no_loss_are_made_within_the_limits_too():
    landscape = Landscape([(0.0, 0.3), (0.2, 0.4), (-0.1, -0.2), (0.0, 0.0)])
    genome, _ = run(landscape, (1.0, 1.0))
    assert genome.tolist() == [REUSE, ADAPT, SKIP, SKIP]


def test_each_limit_is_met():
    added = [(0.1, 0.3), (0.2, 0.5), (0.05, 0.2), (0.3, 0.35)]
    for limits in ((1.0, 0.95), (0.75, 0.9), (0.25, 0.93), (0.0, 1.0), (1.0, 1.0)):
        genome, _ = run(Landscape(added), limits)
        assert (costs(genome[None])[0] <= np.array(limits) + 1e-12).all()


FIXED = (9.0, 9.0)
"""A block that has to stay."""


def test_the_best_change_adds_the_least_loss_per_cost_saved():
    # a Skip costs 0.2 for 0.025 of the FLOPs, a Reuse at least 0.05 for 0.005
    genome, _ = run(Landscape([(0.1, 0.3), (0.2, 0.5), (0.05, 0.2), (0.3, 0.35)]), (1.0, 0.975))
    assert genome.tolist() == [ADAPT, ADAPT, SKIP, ADAPT]
    # a Reuse saves enough, so it does not matter that a Skip saves more
    genome, _ = run(Landscape([(0.1, 0.2), FIXED, FIXED, FIXED]), (1.0, 0.996))
    assert genome.tolist() == [REUSE, ADAPT, ADAPT, ADAPT]
    # both costs count as shares of the anchor's excess: half of 0.5 and all of 0.01
    _, networks = run(Landscape([(0.1, 0.13), FIXED, FIXED, FIXED]), (0.5, 0.99))
    assert (networks.genomes[9:, 0] == SKIP).all()


def test_of_changes_that_lower_the_loss_the_one_with_the_lowest_is_made():
    _, networks = run(Landscape([(-0.2, 9.0), (9.0, -0.25), FIXED, FIXED]), (0.5, 0.9))
    assert (networks.genomes[9:, 1] == SKIP).all()


def test_only_changes_that_lower_an_exceeded_cost_are_scored():
    # a Skip of the reused block 2 would save no parameters
    _, networks = run(Landscape([(0.1, 0.3), (0.2, 0.4), (0.05, 0.2), (0.3, 0.35)]))
    second_round = networks.genomes[9:15]
    assert second_round.shape == (6, 4) and (second_round[:, 2] == REUSE).all()
    # after two Reuse the parameters are within their limit; a Skip of a reused block saves FLOPs
    genome, _ = run(Landscape([(0.01, 0.2), (0.02, 0.3), FIXED, FIXED]), (0.5, 0.97))
    assert genome.tolist() == [SKIP, REUSE, ADAPT, ADAPT]


def test_a_limit_that_no_change_meets_ends_with_the_cheapest_network():
    genome, _ = run(Landscape([(0.1, 0.3)] * 3), (0.0, 0.5))
    assert genome.tolist() == [SKIP] * 3


def test_an_elimination_resumes_from_every_call_of_the_score():
    added = [(0.0, 0.1), (-0.1, -0.2), (0.05, 0.0), (0.3, 0.1)]
    steps = []
    whole = run(Landscape(added), (0.25, 0.95), on_scored=steps.append)
    assert len(steps) > 3
    for earlier in steps:
        landscape = Landscape(added)
        genome, networks = run(landscape, (0.25, 0.95), earlier=earlier)
        assert genome.tolist() == whole[0].tolist()
        for resumed, expected in zip(networks, whole[1], strict=True):
            np.testing.assert_array_equal(resumed, expected)
        assert len(landscape.scored) == len(networks.genomes) - len(earlier.genomes)


def test_a_network_without_a_finite_loss_is_not_kept():
    genome, _ = run(Landscape([(0.0, np.nan), (np.inf, 0.1), (0.2, 0.2)]), (0.0, 1.0))
    assert genome.tolist() == [REUSE, SKIP, SKIP]
    genome, _ = run(Landscape([(np.nan, np.inf)] * 2), (0.0, 1.0))
    assert genome.tolist() == [ADAPT, ADAPT]


def test_an_anchor_without_a_finite_loss_is_an_error():
    landscape = Landscape([(0.0, 0.0)])
    landscape.noise[3] = np.nan
    with pytest.raises(ValueError, match="lower learning rates"):
        run(landscape)
