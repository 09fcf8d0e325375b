"""TOML settings for the daemons: a main file and its conf.d, merged in name order and checked key by key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.strict_mapping import read_toml

DEFAULT_PATH = Path("/etc/cadenza/cadenza.toml")
SECTIONS = ("service", "guard", "sharing", "policy", "gandiva", "profiles", "agent")
"""All sections of a file; each daemon reads its own and ignores the others."""

T = TypeVar("T")
Key: TypeAlias = tuple[str, ...]
"""Names from the top level down."""


class ConfigError(Exception):
    """A settings or key file is wrong; the admin must correct the named file (exit code 2)."""


def load(path: Path, kind: type[T], *, ignore: Iterable[str] = ()) -> T:
    """Return the settings in ``path`` and its sibling ``conf.d/*.toml`` as the msgspec struct ``kind``.

    Later files win key by key. ``ignore`` names top-level sections that belong to other programs. Raise ConfigError,
    naming the file with its line and the key, for a file that cannot be read, an unknown key or a wrong value.
    """
    values, origin = read(path)
    for section in ignore:
        values.pop(section, None)
    _check_keys(values, kind, origin, (), extra=tuple(ignore))
    return _convert(values, kind, origin, path)


def load_file(path: Path, kind: type[T]) -> T:
    """Return one file as the struct ``kind``, without its conf.d; raise ConfigError as ``load`` does."""
    values: dict[str, Any] = {}
    origin: dict[Key, Path] = {}
    _merge(values, _parse(path), origin, path, ())
    _check_keys(values, kind, origin, ())
    return _convert(values, kind, origin, path)


def _convert(values: dict[str, Any], kind: type[T], origin: Mapping[Key, Path], path: Path) -> T:
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), origin, path)) from None


def where(path: Path, key: Key) -> str:
    """Return the file, and the line if it can be found, that sets a key: ``/etc/cadenza/cadenza.toml:12``."""
    file = read(path)[1].get(key, path)
    return f"{file}{_line(file, key)}"


def read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], Path]]:
    """Return the merged values, and for each key (as a path of names) the file that it comes from."""
    values: dict[str, Any] = {}
    origin: dict[tuple[str, ...], Path] = {}
    for file in (path, *sorted((path.parent / "conf.d").glob("*.toml"))):
        _merge(values, _parse(file), origin, file, ())
    return values, origin


def _parse(file: Path) -> dict[str, Any]:
    """Return one file's tables; raise ConfigError if it is missing, unreadable or not TOML."""
    try:
        return read_toml(file.read_text(encoding="utf-8-sig"), str(file))  # editors of Windows begin with a mark
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); create it or name another") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from None
    except InputError as error:
        raise ConfigError(str(error)) from None


def _merge(
    into: dict[str, Any],
    new: Mapping[str, Any],
    origin: dict[tuple[str, ...], Path],
    file: Path,
    above: tuple[str, ...],
) -> None:
    """Lay ``new`` over ``into``; tables merge, everything else is replaced."""
    for key, value in new.items():
        origin[(*above, key)] = file
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, origin, file, (*above, key))
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value, origin, file, (*above, key))
        else:
            _check_texts(value, file, (*above, key))
            into[key] = value


def _check_texts(value: object, file: Path, key: Key) -> None:
    """Raise ConfigError for a text with a control character: no name, path or address has one."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and not item.isprintable():
            name = ".".join(key)
            raise ConfigError(f"{file}{_line(file, key)}: {name}: {printable(item)!r} is not one printable line")


def _check_keys(
    values: Mapping[str, Any],
    kind: type,
    origin: Mapping[tuple[str, ...], Path],
    above: tuple[str, ...],
    *,
    extra: tuple[str, ...] = (),
) -> None:
    """Raise ConfigError for the first key that the struct does not have, with its nearest one."""
    fields = get_type_hints(kind, include_extras=True)
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(_unknown(origin[(*above, key)], (*above, key), value, (*fields, *extra)))
        inner = _struct_in(fields[key])
        if inner is not None and isinstance(value, dict):
            _check_keys(value, inner, origin, (*above, key))


def _struct_in(kind: Any) -> type | None:
    """Return the struct or dataclass that a field's type is or wraps (Annotated, Optional), else None."""
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind)):
        return kind
    return next((struct for part in get_args(kind) if (struct := _struct_in(part)) is not None), None)


def _unknown(file: Path, key: tuple[str, ...], value: object, valid: Iterable[str]) -> str:
    """Return a message that names the unknown key, its file, and the nearest valid key."""
    names = sorted(valid)
    near = difflib.get_close_matches(key[-1], names, n=1)
    subject = f"section [{'.'.join(key)}]" if isinstance(value, dict) else f"key {'.'.join(key)}"
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(names)}"
    return f"{file}{_line(file, key)}: unknown {subject}; {hint}"


def _explain(error: str, origin: Mapping[tuple[str, ...], Path], path: Path) -> str:
    """Turn msgspec's ``Expected … - at `$.a.b``` into the file, the key and what was expected."""
    problem, _, place = error.partition(" - at `")
    names = tuple(part.split("[")[0] for part in place.rstrip("`").split(".")[1:])
    key = next((names[:n] for n in range(len(names), 0, -1) if names[:n] in origin), ())
    file = origin.get(key, path)
    return f"{file}{_line(file, key)}: {'.'.join(names) or 'top level'}: {problem[:1].lower()}{problem[1:]}"


_SECTION = re.compile(r"\s*\[([^\[\]]+)\]")
_ASSIGNMENT = re.compile(r"\s*([\w.\"' -]+?)\s*=")


def _line(file: Path, key: Key) -> str:
    """Return ``:LINE`` of a key or section in a TOML file, "" if it cannot be found."""
    section: Key = ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    for number, line in enumerate(lines, 1):
        if match := _SECTION.match(line):
            section = _names(match[1])
            if section == key:
                return f":{number}"
        elif (match := _ASSIGNMENT.match(line)) and key and (*section, *_names(match[1]))[: len(key)] == key:
            return f":{number}"
    return ""


def _names(text: str) -> Key:
    return tuple(part.strip(" \"'") for part in text.split("."))
