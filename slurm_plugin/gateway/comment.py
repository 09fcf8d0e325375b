"""The ``cadenza`` key of a job's comment: what a user asks for; the rest of the comment is not ours."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cadenza.policies.core.model import Options

KEY = "cadenza"
VERSION = 1


class BadOptions(ValueError):  # noqa: N818
    """The key is there and cannot be understood; the job's owner corrects it."""


class Wish(NamedTuple):
    """A job's opt-in; ``why`` is what job_submit.lua wrote when it found that the job cannot be shared."""

    options: Options
    why: str


def wish_of(comment: str | None) -> Wish | None:
    """Return what the comment asks for, or None when it does not speak of us.

    Raises BadOptions when the ``cadenza`` key is there and wrong: half-understood wishes are not carried out.
    """
    value = _ours(comment)
    return None if value is None else _parse(value)


def _ours(comment: str | None) -> Any:
    """Return the value of our key; plain text, other JSON and foreign keys are other people's business."""
    if not comment or KEY not in comment:
        return None
    try:
        whole = json.loads(comment)
    except (ValueError, RecursionError):
        return None
    return whole.get(KEY) if isinstance(whole, dict) else None


def _parse(value: Any) -> Wish:
    if not isinstance(value, dict):
        raise BadOptions(f'the comment\'s "{KEY}" must be an object such as {{"share": true}}, not {value!r}')
    if value.get("v", VERSION) != VERSION:
        raise BadOptions(f'the comment\'s "{KEY}" has version {value["v"]!r}; this Cadenza knows {VERSION}')
    wishes = {name: _checked(name, wish) for name, wish in value.items() if name != "v"}
    why = wishes.pop("why", "")
    found = Options(**wishes)
    if found.min_gpus is not None and found.max_gpus is not None and found.min_gpus > found.max_gpus:
        raise BadOptions(f"min_gpus={found.min_gpus} is more than max_gpus={found.max_gpus}")
    return Wish(found, why)


def _checked(name: str, wish: Any) -> Any:
    if name not in _CHECKS:
        near = difflib.get_close_matches(name, _CHECKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadOptions(f'unknown "{name}" in the comment\'s "{KEY}"{hint}')
    fits, wanted = _CHECKS[name]
    if not fits(wish):
        raise BadOptions(f'"{name}" in the comment\'s "{KEY}" must be {wanted}, not {wish!r}')
    return wish


def _is_count(wish: Any) -> bool:
    return _is_number(wish) and bool(wish >= 1)


def _is_number(wish: Any) -> bool:
    return isinstance(wish, int) and not isinstance(wish, bool)


def _is_flag(wish: Any) -> bool:
    return isinstance(wish, bool)


def _is_batch(wish: Any) -> bool:
    return wish in ("global", "per-gpu")


def _is_text(wish: Any) -> bool:
    return isinstance(wish, str) and bool(wish)


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "share": (_is_flag, "true or false"),
    "min_gpus": (_is_count, "a whole number from 1"),
    "max_gpus": (_is_count, "a whole number from 1"),
    "batch": (_is_batch, "global or per-gpu"),
    "model": (_is_text, "a name"),
    "priority": (_is_number, "a whole number"),
    "iterations": (_is_count, "a whole number from 1"),
    "duration_s": (_is_count, "a whole number of seconds from 1"),
    "held": (_is_flag, "true or false"),
    "why": (_is_text, "a text"),
}
