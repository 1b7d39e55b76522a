"""PRNG keys by position."""

import jax
import numpy as np
import pytest

from cheem_jax.cheem.evolution import KeyPurpose
from cheem_jax.core.keys import Keys, Phase, key_at, next_power_of_two, order_at


def test_a_key_depends_on_every_part_of_its_position():
    root = jax.random.key(0)
    positions = [(0,), (1,), (0, 0), (0, 1), (1, 0), (2, Phase.SEARCH, 3), (2, Phase.SEARCH, 4)]
    bits = [tuple(jax.random.key_data(key_at(root, *p)).tolist()) for p in positions]
    assert len(set(bits)) == len(positions)
    again = key_at(jax.random.key(0), 2, Phase.SEARCH, 3)
    assert tuple(jax.random.key_data(again).tolist()) == bits[5]


def test_an_order_is_a_permutation_and_few_compiled_functions_serve_all_lengths(compilations):
    order_at(jax.random.key(0), 100)
    with compilations() as programs:
        orders = [order_at(jax.random.key(i), num) for i, num in enumerate(range(65, 129))]
    assert programs.count == 0
    for num, order in zip(range(65, 129), orders, strict=True):
        assert sorted(order) == list(range(num))
    assert not np.array_equal(orders[0], np.arange(65))


def test_seeds_differ_by_position():
    assert Keys(0).seed_at(1, Phase.SEARCH) != Keys(0).seed_at(2, Phase.SEARCH)
    assert Keys(0).seed_at(1, Phase.SEARCH) == Keys(0).seed_at(1, Phase.SEARCH)
    assert Keys(0).seed_at(1, Phase.SEARCH) != Keys(0).seed_at(1, Phase.SCORE)
    assert Keys(0).seed_at(1, Phase.SEARCH) != Keys(1).seed_at(1, Phase.SEARCH)
    positions = [(), (0,), (1,), (1, 0), (1, 1)]
    keys = [Keys(0).at(1, Phase.SEARCH, *position) for position in positions]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(positions)


def test_the_number_of_a_phase_never_changes():
    """It is part of the keys, so a run of an earlier version resumes with the same samples."""
    names = (
        "SUPERNET_INIT SUPERNET_ORDER SUPERNET_MODE SUPERNET_DRAW SEARCH FINETUNE_INIT"
        " FINETUNE_ORDER CENTROIDS UPPER_BOUND_INIT UPPER_BOUND_ORDER SIMILARITY METHOD_INIT"
        " METHOD_ORDER METHOD_NOISE METHOD_TUNING ALIGNMENT ALIGNMENT_ORDER SCORE"
        " SUPERNET_AUGMENTATION FINETUNE_AUGMENTATION"
    ).split()
    assert {phase.name: int(phase) for phase in Phase} == {name: i for i, name in enumerate(names)}
    purposes = [(purpose.name, int(purpose)) for purpose in KeyPurpose]
    assert purposes == [("FIRST", 0), ("CROSSOVER", 1), ("MUTATION", 2), ("FILL", 3)]


@pytest.mark.parametrize("num, power", [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_padding_buckets_are_powers_of_two(num, power):
    assert next_power_of_two(num) == power
