"""Comparison of a moved run's records with those of a run that was not moved: what differs first, by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMED = 3
"""Number of parameters or buffers that a sentence names."""


@dataclass
class Record:
    """The record of one rank's process: its steps, and each optimizer as it was before its first one."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    begins: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By the optimizer's number."""
    first: dict[str, Any] | None = None
    """The one of ``begins`` that came first."""

    def names(self, optimizer: int) -> list[str]:
        """Return the names of an optimizer's parameters."""
        begin = self.begins.get(optimizer, {})
        return [str(name) for name in begin.get("names", ())]


class Unrecordable(Exception):  # noqa: N818 - a reason, for the report
    """The records cannot be compared; the message gives the reason."""


def read(folder: Path, restart: int) -> dict[int, Record]:
    """Return the records of one start of the command, by rank; raise Unrecordable for two trainings of one rank."""
    found: dict[int, Record] = {}
    for path in sorted(folder.glob(f"{restart}.*.jsonl")):
        rank = int(path.name.split(".")[1])
        if rank in found:
            raise Unrecordable(f"two processes of rank {rank} train, and which is which cannot be told after a move")
        found[rank] = _record(path)
    return found


def _record(path: Path) -> Record:
    """Return the record in a file; a last line that its process did not finish is left out."""
    record = Record()
    for text in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if line["kind"] == "step":
                record.steps.append(line)
            else:
                record.begins[line["optimizer"]] = line
                record.first = record.first or line
    return record


def ignore_unseeded(alone: Record, again: Record) -> None:
    """Drop the generators that two runs begin differently with: they are not seeded, so losses tell if they matter."""
    if alone.steps and again.steps:
        for name in _unequal(alone.steps[0]["generators"], again.steps[0]["generators"]):
            for step in alone.steps:
                step["generators"].pop(name, None)


def first_difference(alone: Record, steps: Sequence[dict[str, Any]], start: int) -> tuple[int, list[str]] | None:
    """Return the first of ``steps`` that differs from the run alone, whose step ``start`` is the first, and how."""
    for offset, (then, now) in enumerate(zip(alone.steps[start:], steps)):
        if differences := list(_differences(then, now, alone.names(then["optimizer"]))):
            return start + offset, differences
    return None


def _differences(then: dict[str, Any], now: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the differences of a step, causes before effects."""
    if then["optimizer"] != now["optimizer"]:
        yield f"optimizer {now['optimizer'] + 1} steps in place of optimizer {then['optimizer'] + 1}"
        return
    if then["rates"] != now["rates"]:
        yield (
            f"the learning rate is {_text(now['rates'])} in place of {_text(then['rates'])}: "
            "is the scheduler saved, and has it made all its steps?"
        )
    if then["losses"] != now["losses"]:
        if len(then["losses"]) != len(now["losses"]):
            yield f"the step has {len(now['losses'])} losses in place of {len(then['losses'])}"
        else:
            was, is_now = next(pair for pair in zip(then["losses"], now["losses"]) if pair[0] != pair[1])
            yield f"the loss is {float(is_now):.6g} in place of {float(was):.6g}"
    if others := _unequal(then["generators"], now["generators"]):
        yield f"the random numbers of {', '.join(others)}"
    if others := [name for name, a, b in zip(names, then["parameters"], now["parameters"]) if a != b]:
        yield f"parameters: first in {others[0]} ({len(others)} of {len(then['parameters'])})"
    if then["state"] != now["state"]:
        yield "the optimizer's own state"
    if others := _unequal(then["buffers"], now["buffers"]):
        yield f"buffers: {_some(others)}"


def arrival(alone: Record, before: int, after: Record) -> tuple[int, list[str]]:
    """Return the step of the run alone at which a restarted one goes on, and what it has not brought back.

    ``before`` is the number of steps that had been made when the job was moved. Where the state is that of no step,
    the step at which it should have gone on is returned.
    """
    first = after.first
    if first is None:
        return before, []
    number = first["optimizer"]
    candidates = [place for place in range(before - 1, -1, -1) if alone.steps[place]["optimizer"] == number]
    for place in candidates:
        if alone.steps[place]["parameters"] == first["parameters"]:
            return before if place == candidates[0] else place + 1, _unrestored(alone, before, after, place)
    begin = alone.begins.get(number, {})
    if begin.get("parameters") == first["parameters"]:
        return 0, ["it trained from the beginning"]
    last = alone.steps[candidates[0]]["parameters"] if candidates else begin.get("parameters", [])
    pairs = zip(alone.names(number), last, first["parameters"])
    others = [name for name, then, now in pairs if then != now]
    if len(others) < len(last):
        return before, [f"parameters that are not restored: {_some(others)}"]
    return before, ["the parameters are those of no step of the run alone"]


def _unrestored(alone: Record, before: int, after: Record, place: int) -> list[str]:
    """Return the further losses of the optimizers, where the first has the parameters of step ``place``."""
    missing = []
    for number, begin in after.begins.items():
        last = max((at for at in range(before) if alone.steps[at]["optimizer"] == number), default=None)
        if number == alone.steps[place]["optimizer"]:
            last = place
        if last is None:
            continue
        then = alone.steps[last]
        if then["state"] != begin["state"]:
            missing.append(f"the state of {begin['label']} (its momentum or averages)")
        if then["parameters"] != begin["parameters"] and number != alone.steps[place]["optimizer"]:
            missing.append(f"the parameters of {begin['label']}")
    return missing


def _unequal(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in then if name in now and then[name] != now[name]]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _text(rates: Sequence[str]) -> str:
    return ", ".join(f"{float(rate):.6g}" for rate in rates[:NAMED])
