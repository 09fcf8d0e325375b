"""Moves at random boundaries change no bit of a training that has all that moves used to lose."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_moves

MOVES = 50


@pytest.mark.slow
def test_fifty_moves_at_random_boundaries_leave_a_training_bit_identical(tmp_path: Path) -> None:
    played = random_moves.play(tmp_path, MOVES, seed=1)
    assert played.moves == MOVES
    assert played.digest == played.alone


@pytest.mark.parametrize("lost", ["scheduler", "own"])
def test_the_comparison_sees_what_a_move_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    whole = random_moves.client.checkpoint
    monkeypatch.setattr(
        random_moves.client, "checkpoint", lambda folder, **things: whole(folder, **{**things, lost: None})
    )
    played = random_moves.play(tmp_path, 4, seed=3)
    assert played.moves == 4
    assert played.digest != played.alone
