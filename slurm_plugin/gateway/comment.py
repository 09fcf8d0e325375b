"""The ``cadenza`` key of a job's comment with the user's options; the rest of the comment belongs to others.

This is the one decoder of the comment: what it returns is within the bounds of the types, and whatever the comment is,
BadOptions is its only error.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw

from cadenza.policies.core.model import GpuCount, Iterations, ModelName, Options, Priority
from cadenza.policies.core.text import printable

KEY = "cadenza"
VERSION = 1
MAX_SHOWN = 60
"""Characters of a wrong value that its error repeats."""


class BadOptions(ValueError):  # noqa: N818
    """The key is there and cannot be understood; the job's owner corrects it."""


class OptIn(NamedTuple):
    """A job's options; ``reason`` is job_submit.lua's reason for not sharing the job, "" if it can be shared."""

    options: Options
    reason: str


def opt_in_of(comment: str | None) -> OptIn | None:
    """Return the job's options in the comment, or None when the comment has no ``cadenza`` key.

    Raises BadOptions when the key is there and wrong: options that are only partly understood are not carried out.
    """
    value = _our_value(comment)
    if value is None:
        return None
    # 1. An object of our version with known keys.
    members = _members(value)
    if members is None:
        raise BadOptions(f'the comment\'s "{KEY}" must be an object such as {{"share": true}}, not {_shown(value)}')
    version = members.pop("v", None)
    if version is not None and bytes(version) != b"%d" % VERSION:
        raise BadOptions(f'the comment\'s "{KEY}" has version {_shown(version)}; this Cadenza knows {VERSION}')
    # 2. Each value by its type.
    fields = {name: _decoded(name, member) for name, member in members.items()}
    reason = printable(fields.pop("why", ""))
    for name in ("graphs", "summary"):  # the plugin's alone
        fields.pop(name, None)
    options = Options(**fields)
    if options.min_gpus is not None and options.max_gpus is not None and options.min_gpus > options.max_gpus:
        raise BadOptions(f"min_gpus={options.min_gpus} is more than max_gpus={options.max_gpus}")
    return OptIn(options, reason)


def _our_value(comment: str | None) -> Raw | None:
    """Return the value of our key; plain text, other JSON and foreign keys belong to others."""
    if not comment or KEY not in comment:
        return None
    members = _members(comment)
    if members is None and comment.lstrip().startswith("{") and f'"{KEY}"' in comment:
        raise BadOptions(f'the comment names "{KEY}" but is not JSON')
    return members.get(KEY) if members is not None else None


def _members(text: str | Raw) -> dict[str, Raw] | None:
    """Return the members of a JSON object, each still encoded; None if it is something else."""
    try:
        return msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def _decoded(name: str, value: Raw) -> Any:
    if name not in _TYPES:
        near = difflib.get_close_matches(name[:MAX_SHOWN], _TYPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadOptions(f'unknown "{printable(name, MAX_SHOWN)}" in the comment\'s "{KEY}"{hint}')
    kind, expected = _TYPES[name]
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise BadOptions(f'"{name}" in the comment\'s "{KEY}" must be {expected}, not {_shown(value)}') from None


def _shown(value: Raw) -> str:
    return printable(bytes(value).decode(errors="replace"), MAX_SHOWN)


_TYPES: Mapping[str, tuple[Any, str]] = {
    "share": (bool, "true or false"),
    "late": (bool, "true or false"),
    "graphs": (bool, "true or false"),
    "summary": (bool, "true or false"),
    "checkpoints": (bool, "true or false"),
    "min_gpus": (GpuCount, "a whole number from 1 to 65535"),
    "max_gpus": (GpuCount, "a whole number from 1 to 65535"),
    "batch": (Literal["global", "per-gpu"], "global or per-gpu"),
    "model": (ModelName, "a name of at most 64 of the characters A-Z a-z 0-9 . _ -"),
    "priority": (Priority, "a whole number from -1000000 to 1000000"),
    "iterations": (Iterations, "a whole number from 1 to 2000000000"),
    "duration_s": (Iterations, "a whole number of seconds from 1 to 2000000000"),
    "why": (Annotated[str, Meta(min_length=1, max_length=1024)], "a text"),
}
