"""The exhaustive search that the defragmentation benchmark compares with."""

from __future__ import annotations

from itertools import islice

import pytest
from defragmentation import NODES, SIZE, fewest, states


@pytest.mark.parametrize(
    ("state", "moves"),
    [
        (((1,), (1, 2), (3,), ()), 0),
        (((1,), (3,), (3,), (3,)), 1),
        (((1, 1), (2, 1), (2, 1), (4,)), 2),
        (((2,), (2, 1), (2, 1), (4,)), 2),  # a job of one GPU makes way for the one of two
        (((2, 1), (2, 1), (2, 1), (4,)), None),
        (((3,), (3,), (3,), (3,)), None),
    ],
)
def test_the_fewest_moves_by_trying_everything(state, moves):
    assert fewest(state) == moves


def test_states_are_the_same_for_a_seed_and_need_moves():
    found = list(islice(states(2), 20))
    assert found == list(islice(states(2), 20))
    assert all(len(state) == len(NODES) and all(sum(sizes) <= SIZE.gpus for sizes in state) for state in found)
    assert {fewest(state) for state in found} == {1, 2, 3}
