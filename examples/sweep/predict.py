"""The search of ``search.py`` with perfect GPUs: turns cost nothing, starts take no time, results are seen at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from train import EVERY, STEPS, training

from cadenza.policies.sweep.learning_curve import Trial, judge, put_behind
from cadenza.policies.sweep.stopping_rules import asha_rule

GPUS = 8
TURN_S = 1.0
"""As search.toml has it."""


@cache
def curve(lr: float, decay: float) -> tuple[tuple[int, float], ...]:
    """Return a configuration's reports, (step, accuracy), by training it."""
    return tuple((step, value) for step, value in enumerate(training(lr, decay), 1) if step % EVERY == 0)


def reached(config: Mapping[str, float], target: float) -> int:
    """Return the step at which a configuration reports the target; beyond its end when it never does."""
    return next((step for step, value in curve(**config) if value >= target), 10**9)


def in_order(configs: Sequence[Mapping[str, float]], target: float, step_s: float) -> float:
    """Return the seconds to the target when eight run at a time, each to its end."""
    return min((place // GPUS) * STEPS + reached(config, target) for place, config in enumerate(configs)) * step_s


def in_turns(
    configs: Sequence[Mapping[str, float]], target: float, step_s: float, rule: Mapping[str, Any], top: int
) -> float:
    """Return the seconds to the target if all take turns, ``rule`` (asha's) stops losers and ``top`` are preferred."""
    stop = asha_rule(rule["first"], rule["reduction"], rule["least"])
    turn = round(TURN_S / step_s)
    done = [0] * len(configs)
    lost: set[int] = set()
    clock = 0
    while True:
        trials = [
            Trial(n, tuple(p for p in curve(**c) if p[0] <= done[n]), n not in lost) for n, c in enumerate(configs)
        ]
        lost |= judge(trials, stop, rule["first"]).keys()
        behind = put_behind([t for t in trials if t.number not in lost], top, rule["first"])
        turns = _turns(set(range(len(configs))) - lost, behind, done)
        hits = [reached(configs[n], target) - done[n] for n in turns if reached(configs[n], target) - done[n] <= turn]
        if hits:
            return (clock + min(hits)) * step_s
        for number in turns:
            done[number] += turn
        clock += turn


def _turns(live: set[int], behind: frozenset[int], done: Sequence[int]) -> list[int]:
    """Return whose turn it is on each GPU; configuration n is on GPU n modulo 8 and stays there."""
    found = []
    for gpu in range(GPUS):
        there = [n for n in live if n % GPUS == gpu and done[n] < STEPS]
        if there:
            found.append(min(there, key=lambda n: (n in behind, done[n], n)))
    return found
