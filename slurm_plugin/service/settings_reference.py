"""The settings table as text: the rows of the reference, made from the structs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from cadenza.slurm_plugin.service.settings import Settings

UNITS = {"_s": "seconds", "_days": "days", "_mb": "MB"}


class Row(msgspec.Struct, frozen=True):
    """One key of the configuration file."""

    section: str
    key: str
    type: str
    default: Any
    unit: str
    doc: str


def rows() -> Iterator[Row]:
    """Return every key, in the order of the file."""
    for section in msgspec.structs.fields(Settings):
        hints = get_type_hints(section.type, include_extras=True)
        for name, hint in hints.items():
            unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
            notes = (note for note in getattr(hint, "__metadata__", ()) if isinstance(note, msgspec.Meta))
            doc = next((note.description for note in notes if note.description), "")
            default = msgspec.to_builtins(getattr(section.default, name))
            yield Row(section.name, name, _type(hint), default, unit, doc)


def toml_value(value: Any) -> str:
    """Return a string, number, boolean or list as TOML, which for these is JSON."""
    return json.dumps(sorted(value) if isinstance(value, list) else value)


def _type(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return " | ".join(map(json.dumps, get_args(hint)))
    if get_origin(hint) in (frozenset, tuple):
        return "list of strings"
    return {str: "string", float: "number", int: "integer", bool: "true | false"}.get(hint, str(hint))
