"""The ``cadenza`` key of a job's comment with the user's options; the rest of the comment belongs to others."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from cadenza.policies.core.model import Options

KEY = "cadenza"
VERSION = 1


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
    if not isinstance(value, dict):
        raise BadOptions(f'the comment\'s "{KEY}" must be an object such as {{"share": true}}, not {value!r}')
    if value.get("v", VERSION) != VERSION:
        raise BadOptions(f'the comment\'s "{KEY}" has version {value["v"]!r}; this Cadenza knows {VERSION}')
    fields = {name: _checked(name, field) for name, field in value.items() if name != "v"}
    reason = fields.pop("why", "")
    options = Options(**fields)
    if options.min_gpus is not None and options.max_gpus is not None and options.min_gpus > options.max_gpus:
        raise BadOptions(f"min_gpus={options.min_gpus} is more than max_gpus={options.max_gpus}")
    return OptIn(options, reason)


def _our_value(comment: str | None) -> Any:
    """Return the value of our key; plain text, other JSON and foreign keys belong to others."""
    if not comment or KEY not in comment:
        return None
    try:
        whole = json.loads(comment)
    except (ValueError, RecursionError):
        return None
    return whole.get(KEY) if isinstance(whole, dict) else None


def _checked(name: str, value: Any) -> Any:
    if name not in _CHECKS:
        near = difflib.get_close_matches(name, _CHECKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadOptions(f'unknown "{name}" in the comment\'s "{KEY}"{hint}')
    fits, expected = _CHECKS[name]
    if not fits(value):
        raise BadOptions(f'"{name}" in the comment\'s "{KEY}" must be {expected}, not {value!r}')
    return value


_Check: TypeAlias = tuple[Callable[[Any], bool], str]
_FLAG: _Check = (lambda value: isinstance(value, bool), "true or false")
_COUNT: _Check = (lambda value: type(value) is int and value >= 1, "a whole number from 1")
_CHECKS: Mapping[str, _Check] = {
    "share": _FLAG,
    "min_gpus": _COUNT,
    "max_gpus": _COUNT,
    "batch": (lambda value: value in ("global", "per-gpu"), "global or per-gpu"),
    "model": (lambda value: isinstance(value, str) and bool(value), "a name"),
    "priority": (lambda value: type(value) is int, "a whole number"),
    "iterations": _COUNT,
    "duration_s": (_COUNT[0], "a whole number of seconds from 1"),
    "held": _FLAG,
    "why": (lambda value: isinstance(value, str) and bool(value), "a text"),
}
