"""What a sweep is to do: its goal, its rule and what it favours, as ``sweep.toml`` and the sweep's directory say it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any

from msgspec import Meta, Struct

from cadenza.policies.sweep.asha import asha_rule
from cadenza.policies.sweep.curve import curve_rule
from cadenza.policies.sweep.learning_curve import Goal, Rule, Trial
from cadenza.policies.sweep.median import median_rule
from cadenza.slurm_plugin.sweep.errors import InputError

RULES = ("none", "median", "asha", "curve")


class Stop(Struct, frozen=True, forbid_unknown_fields=True):
    """When configurations are stopped; steps are those of ``client.report``."""

    rule: str = "asha"
    """One of RULES, or ``module:function`` (see ``Plan.build``)."""
    first: Annotated[int, Meta(ge=1)] = 1
    """Nobody is stopped before this step; asha's first rung."""
    least: Annotated[int, Meta(ge=2)] = 4
    """With how many configurations one is compared at least; median and asha."""
    reduction: Annotated[float, Meta(gt=1)] = 3.0
    """Of each rung's configurations the best part 1/reduction goes on; asha."""
    steps: Annotated[int, Meta(ge=1)] | None = None
    """The last step of a whole run; curve needs it."""


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """A sweep's settings; they do not change while it lives."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]
    goal: Goal = "max"
    target: float | None = None
    """Once a value is as good, all others are stopped."""
    finish: bool = True
    """Whether the one that reached the target runs to its end."""
    at_once: Annotated[int, Meta(ge=0)] = 0
    """How many of its jobs Slurm has at a time; 0: all."""
    top: Annotated[int, Meta(ge=0)] = 0
    """How many of the best are favoured; 0: none."""
    share: bool = True
    """Whether the jobs opt in to sharing GPUs."""
    poll_s: Annotated[float, Meta(gt=0)] = 1.0
    """How often results are read."""
    slurm_s: Annotated[float, Meta(gt=0)] = 10.0
    """How often Slurm is asked which jobs have ended."""
    stop: Stop = Stop()

    def build(self) -> Rule:
        """Return the rule as a function of trials in which more is better; raise InputError when there is none.

        ``module:function`` is called with the trials as reported and the goal, and returns the numbers to stop, or a
        mapping from these to reasons.
        """
        stop = self.stop
        if stop.rule == "none":
            return lambda _: {}
        if stop.rule == "median":
            return median_rule(stop.least)
        if stop.rule == "asha":
            return asha_rule(stop.first, stop.reduction, stop.least)
        if stop.rule == "curve":
            return curve_rule(self._steps(), self._bar())
        return self._callback()

    def better(self, value: float, other: float) -> bool:
        """Whether a value is at least as good as another."""
        return value >= other if self.goal == "max" else value <= other

    def _steps(self) -> int:
        if self.stop.steps is None:
            raise InputError("rule curve: [stop] steps is missing: the last step of a whole run (--steps)")
        return self.stop.steps

    def _bar(self) -> float | None:
        return self.target if self.target is None or self.goal == "max" else -self.target

    def _callback(self) -> Rule:
        """Return the user's function as a rule; it gets values as they were reported."""
        name, goal = self.stop.rule, self.goal
        if ":" not in name:
            near = get_close_matches(name, RULES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(RULES)}, or module:function"
            raise InputError(f"rule {name!r}: {hint}")
        try:
            function = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"rule {name!r}: {error}") from None
        if not callable(function):
            raise InputError(f"rule {name!r} is not callable")

        def rule(trials: Sequence[Trial]) -> Mapping[int, str]:
            try:
                return _reasons(function(_as_reported(trials, goal), goal), name)
            except Exception as error:  # the user's own, whatever it is
                raise InputError(f"rule {name!r}: {type(error).__name__}: {error}") from error

        return rule


def _as_reported(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    sign = 1 if goal == "max" else -1
    return [Trial(t.number, tuple((step, sign * value) for step, value in t.points), t.live, t.config) for t in trials]


def _reasons(answer: Any, name: str) -> Mapping[int, str]:
    """Return the answer of the user's function as a rule's."""
    if isinstance(answer, Mapping):
        return {int(number): str(reason) for number, reason in answer.items()}
    if isinstance(answer, Iterable):
        return dict.fromkeys((int(number) for number in answer), f"{name} says so")
    raise TypeError(f"it returned {type(answer).__name__}; wanted are numbers, or numbers with reasons")
