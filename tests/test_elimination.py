"""Backward elimination on toy landscapes, in which each change adds a known loss."""

import numpy as np
import pytest

from cheem_jax.cheem.elimination import Losses, eliminate, is_accepted

# one expert per block: Reuse is 0, Adapt 1, New 2, Skip 3
ADAPT, REUSE, SKIP = 1, 0, 3
CHANGES = [[REUSE, SKIP]] * 4
NUM = 50


class Landscape:
    """Losses that are a sum over blocks, with the same noise of each image in every network.

    `added[block]` are the mean losses that Reuse and Skip add in that block.
    """

    def __init__(self, added, spread=0.0):
        rng = np.random.default_rng(0)
        self.added = added
        self.noise = rng.normal(size=NUM)
        self.spread = spread * rng.permutation(np.linspace(-1, 1, NUM))
        self.scored = []

    def __call__(self, genomes):
        self.scored += [tuple(genome) for genome in genomes.tolist()]
        totals = [
            sum({ADAPT: 0.0, REUSE: reuse, SKIP: skip}[code] for code, (reuse, skip) in pairs)
            for pairs in (list(zip(genome, self.added, strict=True)) for genome in genomes.tolist())
        ]
        changed = (genomes != ADAPT).sum(axis=1)
        values = self.noise + np.array(totals)[:, None] + np.outer(changed, self.spread)
        return Losses(values, values < 0)


def run(landscape, standard_errors=0.0, **more):
    anchor = np.full(len(landscape.added), ADAPT, np.int32)
    changes = CHANGES[: len(landscape.added)]
    return eliminate(landscape, anchor, changes, standard_errors=standard_errors, **more)


def test_changes_that_cost_nothing_are_made_and_others_are_not():
    landscape = Landscape([(0.0, 0.3), (0.2, 0.4), (-0.1, -0.2), (0.0, 0.0)])
    genome, networks = run(landscape)
    # the gain of block 2 pays for a Reuse in block 1, but not for a Skip
    assert genome.tolist() == [REUSE, REUSE, SKIP, SKIP]
    assert networks.genomes.tolist() == [list(codes) for codes in landscape.scored]
    assert len(set(landscape.scored)) == len(landscape.scored)
    assert networks.genomes[0].tolist() == [ADAPT] * 4


def test_the_change_with_the_lowest_loss_alone_is_tried_first():
    # each Skip alone is free after the gain of block 0, but not both
    landscape = Landscape([(-0.1, -0.35), (9.0, 0.2), (9.0, 0.1)])
    genome, _ = run(landscape)
    assert genome.tolist() == [SKIP, SKIP, SKIP]
    landscape = Landscape([(-0.1, -0.25), (9.0, 0.2), (9.0, 0.1)])
    genome, _ = run(landscape)
    assert genome.tolist() == [SKIP, ADAPT, SKIP]


def test_a_larger_tolerance_leaves_fewer_blocks_with_adapt():
    added = [(0.01, 0.02), (0.02, 0.05), (0.04, 0.1), (0.2, 0.4)]
    adapted = []
    for standard_errors in (0.0, 1.0, 2.0, 4.0):
        landscape = Landscape(added, spread=0.1)
        genome, networks = run(landscape, standard_errors)
        base = networks.losses[0]
        losses = dict(zip(map(tuple, networks.genomes.tolist()), networks.losses, strict=True))
        differences = losses[tuple(genome.tolist())] - base
        error = differences.std(ddof=1) / np.sqrt(NUM)
        assert differences.mean() <= standard_errors * error + 1e-12
        adapted.append(int((genome == ADAPT).sum()))
    assert adapted == sorted(adapted, reverse=True) and adapted[0] == 4 > adapted[-1]


def test_the_noise_of_images_cancels_in_pairs():
    # the losses themselves vary by 1, their differences by 0.01
    differences = 0.001 + 0.01 * np.linspace(-1, 1, NUM)
    error = 0.01 * np.linspace(-1, 1, NUM).std(ddof=1) / np.sqrt(NUM)
    assert is_accepted(differences, 0.0011 / error)
    assert not is_accepted(differences, 0.0009 / error)


def test_an_elimination_resumes_from_every_call_of_the_score():
    added = [(0.0, 0.1), (-0.1, -0.2), (0.05, 0.0), (0.3, 0.1)]
    steps = []
    whole = run(Landscape(added), 1.0, on_scored=steps.append)
    assert len(steps) > 3
    for earlier in steps:
        landscape = Landscape(added)
        genome, networks = run(landscape, 1.0, earlier=earlier)
        assert genome.tolist() == whole[0].tolist()
        for resumed, expected in zip(networks, whole[1], strict=True):
            np.testing.assert_array_equal(resumed, expected)
        assert len(landscape.scored) == len(networks.genomes) - len(earlier.genomes)


def test_a_network_without_a_finite_loss_is_not_accepted():
    landscape = Landscape([(0.0, np.nan), (np.inf, 0.0), (0.0, 0.0)])
    genome, _ = run(landscape)
    assert genome.tolist() == [REUSE, SKIP, SKIP]


def test_an_anchor_without_a_finite_loss_is_an_error():
    landscape = Landscape([(0.0, 0.0)])
    landscape.noise[3] = np.nan
    with pytest.raises(ValueError, match="lower learning rates"):
        run(landscape)


def test_a_single_image_has_no_standard_error():
    assert is_accepted(np.array([0.0]), 1.0)
    assert not is_accepted(np.array([1e-3]), 5.0)
