"""The file next to a profile that keeps finished points, so that an interrupted profile can be resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.profiler.measure.interleave import measured
from cadenza.profiler.measure.point import Point, Rule

SCHEMA = "cadenza.profile-state/1"


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The points of one command measured so far."""

    command: list[str]
    host: str
    points: list[Point] = []
    """In the order in which they were measured, a row for each visit."""
    within: float = Rule().within
    """As in the rule of the last run: visits together are settled when their interval is as narrow."""
    memory: dict[str, float] = {}
    """Seconds a step by GB of cache, where that was measured."""
    bandwidth: dict[str, float] = {}
    """``storage_mb_s`` and ``memory_mb_s``, once measured."""
    launches: int = 0
    spent_s: float = 0.0
    schema: Literal["cadenza.profile-state/1"] = "cadenza.profile-state/1"

    def measured(self) -> list[Point]:
        """Return the measurements of each point."""
        return measured(self.points, self.within)

    def times(self) -> dict[float, float]:
        """Return seconds a step by CPUs of the job."""
        return {point.cpus: point.iteration_s for point in self.measured()}


def path_of(out: Path) -> Path:
    """Return where the state of a profile is kept.

    >>> path_of(Path("a/profile.json")).name
    'profile.state.json'
    """
    return out.with_suffix(".state.json")


def load(path: Path, command: list[str], host: str) -> State:
    """Return the state of an interrupted profile, or a fresh one if there is none.

    Raise InputError, naming file and key, when the file is not one, or is of another command or host.
    """
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return State(command, host)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise InputError(f"{path}: not what an interrupted profile leaves: {error}") from None
    for key, found, ours in (("command", state.command, command), ("host", state.host, host)):
        if found != ours:
            raise InputError(f"{path}: {key}: is of {found!r}, and this is {ours!r}: leave --resume out to begin anew")
    return state


def write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all; raise InputError when it cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def save(path: Path, state: State) -> None:
    """Keep the state."""
    write(path, msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
