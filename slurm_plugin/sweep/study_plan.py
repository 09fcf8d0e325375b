"""Settings of a sweep: its goal, its rule and the number of preferred configurations."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, to_builtins

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.strict_mapping import convert
from cadenza.policies.sweep.learning_curve import Goal, Rule, Trial
from cadenza.policies.sweep.stopping_rules import asha_rule, curve_rule, median_rule

RULES = ("none", "median", "asha", "curve")


Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]


class Stop(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of early stopping; steps are those of ``client.report``."""

    rule: str = "asha"
    """One of RULES, or ``module:function`` (see ``Plan.build``)."""
    first: Annotated[int, Meta(ge=1)] = 1
    """First step at which a configuration may be stopped; asha's first rung."""
    least: Annotated[int, Meta(ge=2)] = 4
    """Least number of configurations to compare one with; median and asha."""
    reduction: Annotated[float, Meta(gt=1)] = 3.0
    """The best 1/reduction of each rung's configurations continue; asha."""
    steps: Annotated[int, Meta(ge=1)] | None = None
    """Last step of a full run; required by curve."""


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """A sweep's settings, fixed for its lifetime."""

    name: Name
    goal: Goal = "max"
    target: float | None = None
    """Value at which all other configurations are stopped."""
    finish: bool = True
    """Let the configuration that reached the target run to its end."""
    at_once: Annotated[int, Meta(ge=0)] = 0
    """Jobs in Slurm at a time; 0: all."""
    top: Annotated[int, Meta(ge=0)] = 0
    """Number of best configurations to prefer; 0: none."""
    share: bool = True
    """Let the jobs share GPUs."""
    poll_s: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds between reads of the results."""
    slurm_s: Annotated[float, Meta(gt=0)] = 10.0
    """Seconds between reads of Slurm's queue."""
    stop: Stop = Stop()

    def build(self) -> Rule:
        """Return the rule as a function of trials in which more is better; raise InputError for an unknown rule.

        A user's ``module:function`` takes the trials as reported and the goal, and returns the numbers to stop, or a
        mapping of numbers to reasons.
        """
        stop = self.stop
        if stop.rule == "none":
            return lambda _: {}
        if stop.rule == "median":
            return median_rule(stop.least)
        if stop.rule == "asha":
            return asha_rule(stop.first, stop.reduction, stop.least)
        if stop.rule == "curve":
            if stop.steps is None:
                raise InputError("rule curve: [stop] steps is missing: the last step of a full run (--steps)")
            sign = 1 if self.goal == "max" else -1
            return curve_rule(stop.steps, None if self.target is None else sign * self.target)
        return self._callback()

    def better(self, value: float, other: float) -> bool:
        """Return True if a value is at least as good as another."""
        return value >= other if self.goal == "max" else value <= other

    def _callback(self) -> Rule:
        """Return the user's function as a rule; it receives values as reported."""
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

        def as_reported(trial: Trial) -> Trial:
            sign = 1 if goal == "max" else -1
            return replace(trial, points=tuple((step, sign * value) for step, value in trial.points))

        def rule(trials: Sequence[Trial]) -> Mapping[int, str]:
            try:
                return _reasons(function([as_reported(trial) for trial in trials], goal), name)
            except Exception as error:  # any error of the user's function
                raise InputError(f"rule {name!r}: {type(error).__name__}: {error}") from error

        return rule


def _reasons(answer: Any, name: str) -> Mapping[int, str]:
    """Return the answer of the user's function as a mapping of numbers to reasons."""
    if isinstance(answer, Mapping):
        return {int(number): str(reason) for number, reason in answer.items()}
    if isinstance(answer, Iterable):
        return dict.fromkeys((int(number) for number in answer), f"{name} says so")
    raise TypeError(f"it returned {type(answer).__name__}; wanted are numbers or a mapping of numbers to reasons")


def plan_of(values: Mapping[str, Any], stop: Mapping[str, Any], source: str) -> Plan:
    """Return the plan of these keys, with ``stop`` laid over its table [stop]; raise InputError with the key."""
    plain = to_builtins(dict(values))
    plain["stop"] = {**plain.get("stop", {}), **stop}
    return convert(plain, Plan, source)
