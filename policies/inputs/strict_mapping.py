"""JSON and TOML by key: a repeated or unknown key is an error, and every message names file and key."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import quoted, suggest

T = TypeVar("T")
SHOWN_BITS = 10_000
"""Numbers with more are not written out: Python refuses to, from some 14,000 bits on."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""JSON's escape of half of a character; two of them make a whole one."""


def read_json(text: str, source: str) -> Any:
    """Return the value of a JSON text; raise InputError with file and line, also for a key that is there twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise InputError(f"{source}: key {quoted(key)} is there twice in one object")
            found[key] = value
        return found

    def refuse(name: str) -> NoReturn:
        raise InputError(f"{source}: {name} is not a number that JSON has")

    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=unique, parse_constant=refuse)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value  # noqa: TRY300 - the line before is part of the reading
    except UnicodeEncodeError as error:
        raise InputError(f"{source}: holds {error.object[error.start]!a}, half of a character") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{source}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise InputError(f"{source}: not JSON of ours: nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{source}: not JSON: {error}") from None


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raise InputError for another text, and naming the key for an integer beyond 64 bits, which TOML does not have.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or a number of thousands of digits
        raise InputError(f"{source}: not TOML: {error}") from None
    values: list[tuple[str, Any]] = [("", tables)]
    while values:
        key, value = values.pop()
        if isinstance(value, dict):
            values += [(f"{key}.{name}" if key else name, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            values += [(key, inner) for inner in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            shown = quoted(value) if value.bit_length() < SHOWN_BITS else f"a number of {value.bit_length()} bits"
            raise InputError(f"{source}: {key}: {shown} does not fit into 64 bits")
    return tables


def convert(value: Any, kind: type[T], source: str, path: str = "") -> T:
    """Return ``value`` as the msgspec struct ``kind``; raise InputError with file and key for what does not fit."""
    check_keys(value, kind, source, path)
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise input_error(error, source, path) from None
    except OverflowError:
        raise InputError(f"{source}: {path or 'top level'}: holds a number that is too large") from None


def input_error(error: msgspec.ValidationError, source: str, path: str = "") -> InputError:
    """Return a failed conversion as an error that names file and key."""
    problem, _, where = str(error).partition(" - at `")
    key = path + where.rstrip("`").removeprefix("$" if path else "$.")
    return InputError(f"{source}: {key or 'top level'}: {problem[:1].lower()}{problem[1:]}")


def check_keys(value: Any, kind: Any, source: str, path: str) -> None:
    """Raise InputError for the first key, at any depth, that the struct does not have."""
    parts = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        for key, inner in value.items():
            if key not in fields:
                unknown_key(str(key), fields, source, path)
            check_keys(inner, fields[key], source, f"{path}.{key}" if path else str(key))
    elif isinstance(value, dict) and get_origin(kind) is dict:
        for key, inner in value.items():
            check_keys(inner, parts[1], source, f"{path}.{key}")
    elif isinstance(value, list) and get_origin(kind) is list:
        for index, inner in enumerate(value):
            check_keys(inner, parts[0], source, f"{path}[{index}]")
    elif get_origin(kind) is UnionType:
        for part in parts:
            check_keys(value, part, source, path)


def unknown_key(key: str, known: Iterable[str], source: str, path: str = "") -> NoReturn:
    """Raise InputError for a key that is not known here, with the nearest one that is."""
    where = f" in {path}" if path else ""
    raise InputError(f"{source}: unknown key {quoted(key)}{where}; {suggest(key, known)}")
