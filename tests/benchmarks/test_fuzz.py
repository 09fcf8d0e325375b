"""The short run of the fuzzing command: no decoder raises anything but its own error, and bad files end with 2."""

from __future__ import annotations

import fuzz
import pytest


@pytest.mark.parametrize("seed", [1, 2])
def test_only_the_decoders_own_errors_come_of_hostile_inputs(seed: int) -> None:
    boundaries = fuzz.run(3200, seed)
    assert len(boundaries) > 10
    assert [fault for one in boundaries for fault in one.faults] == []
    assert all(0 < one.inputs > one.refused for one in boundaries)
    assert {one.name for one in boundaries if one.command and not one.commands} == set()


def test_an_input_follows_from_seed_and_number_alone() -> None:
    seen: dict[int, list[bytes]] = {0: [], 2: []}
    for first, inputs in seen.items():
        boundary = fuzz.Boundary("any", inputs.append, (), (b'{"a":[1,2]}', b"a,b\n1,2\n"))
        for number in range(first, first + 6):
            fuzz.attempt(boundary, 7, number, fuzz.Path())
    assert seen[0][2:] == seen[2][:4]
    assert len(set(seen[0])) > 4


def test_a_fault_is_found_and_named() -> None:
    def decode(data: bytes) -> object:
        return data.decode("utf-8")

    boundary = fuzz.Boundary("text", decode, (), (b"a",), make=lambda chance, good: good + chance.randbytes(9))
    for number in range(50):
        fuzz.attempt(boundary, 1, number, fuzz.Path())
    assert "UnicodeDecodeError" in boundary.faults[0]
    assert boundary.faults[0].startswith("text 0: b'a")
