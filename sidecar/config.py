"""TOML settings for the daemons: a main file and its conf.d, merged in name order and checked key by key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.strict_mapping import read_toml

DEFAULT_PATH = Path("/etc/cadenza/cadenza.toml")
SECTIONS = ("service", "guard", "sharing", "policy", "gandiva", "profiles", "agent", "expert")
"""All sections of a file; each daemon reads its own and ``expert``, and ignores the others."""

T = TypeVar("T")
Key: TypeAlias = tuple[str, ...]
"""Names from the top level down."""


class ConfigError(InputError):
    """A settings or key file is wrong; the admin must correct the named file."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def load(
    path: Path,
    kind: type[T],
    *,
    ignore: Iterable[str] = (),
    also: Callable[[T], Iterable[tuple[Key, str]]] | None = None,
) -> T:
    """Return the settings in ``path`` and its sibling ``conf.d/*.toml`` as the msgspec struct ``kind``.

    Later files win key by key. ``ignore`` names top-level sections that belong to other programs. ``also`` yields the
    keys whose values are wrong by other rules, and why. Raise ConfigError for a file that cannot be read, or with a
    line for each unknown key and each wrong value, which names the file with its line and the key.
    """
    values, origin = read(path)
    for section in ignore:
        values.pop(section, None)
    return _checked(values, kind, origin, path, tuple(ignore), also)


def load_file(path: Path, kind: type[T]) -> T:
    """Return one file as the struct ``kind``, without its conf.d; raise ConfigError as ``load`` does."""
    values: dict[str, Any] = {}
    origin: dict[Key, Path] = {}
    _merge(values, _parse(path), origin, path, ())
    return _checked(values, kind, origin, path)


def _checked(
    values: dict[str, Any],
    kind: type[T],
    origin: Mapping[Key, Path],
    path: Path,
    extra: tuple[str, ...] = (),
    also: Callable[[T], Iterable[tuple[Key, str]]] | None = None,
) -> T:
    """Return the values as a struct; each key that is wrong is taken out and named, so that the next one is found."""
    faults = [*_unprintable(values, origin, ()), *_unknown_keys(values, kind, origin, (), extra)]
    while True:
        try:
            settings = msgspec.convert(values, kind, strict=True)
            break
        except msgspec.ValidationError as error:
            key, text = _explain(str(error), kind, origin, path)
            faults.append(text)
            if not key:  # something is missing
                raise ConfigError(*faults) from None
            _drop(values, key)
    if also is not None:
        faults += [f"{(file := origin.get(key, path))}{_line(file, key)}: {'.'.join(key)}: {text}"
                   for key, text in also(settings)]  # fmt: skip
    if faults:
        raise ConfigError(*faults)
    return settings


def _drop(values: dict[str, Any], key: Key) -> None:
    for name in key[:-1]:
        values = values[name]
    del values[key[-1]]


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
        if isinstance(error, FileNotFoundError) and file == DEFAULT_PATH:
            text = f"{file} is missing: Cadenza is not set up here; run this where it is, or name a file by --config"
            raise ConfigError(text) from None
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); create it or name another") from None
    except UnicodeDecodeError as error:
        text = f"not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})"
        raise ConfigError(f"{file}: {text}") from None
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
            into[key] = value


def _unprintable(values: dict[str, Any], origin: Mapping[Key, Path], above: Key) -> Iterator[str]:
    """Yield a message for each text with a control character, and take it out: no name, path or address has one."""
    for name, value in list(values.items()):
        key = (*above, name)
        if isinstance(value, dict):
            yield from _unprintable(value, origin, key)
        bad = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
        if bad := [item for item in bad if not item.isprintable()]:
            del values[name]
            place = f"{origin[key]}{_line(origin[key], key)}"
            yield f"{place}: {'.'.join(key)}: {printable(bad[0])!r} is not one printable line"


def _unknown_keys(
    values: dict[str, Any], kind: type, origin: Mapping[Key, Path], above: Key, extra: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield a message for each key that the struct does not have, with its nearest one, and take it out."""
    fields = get_type_hints(kind, include_extras=True)
    for name, value in list(values.items()):
        key = (*above, name)
        if name not in fields:
            file = origin[key]
            names = sorted((*fields, *extra))
            near = difflib.get_close_matches(key[-1], names, n=1)
            subject = f"section [{'.'.join(key)}]" if isinstance(value, dict) else f"key {'.'.join(key)}"
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(names)}"
            yield f"{file}{_line(file, key)}: unknown {subject}; {hint}"
            del values[name]
            continue
        inner = _struct_in(fields[name])
        if inner is not None and isinstance(value, dict):
            yield from _unknown_keys(value, inner, origin, key)


def _struct_in(kind: Any) -> type | None:
    """Return the struct or dataclass that a field's type is or wraps (Annotated, Optional), else None."""
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind)):
        return kind
    return next((struct for part in get_args(kind) if (struct := _struct_in(part)) is not None), None)


def _explain(error: str, kind: type, origin: Mapping[Key, Path], path: Path) -> tuple[Key, str]:
    """Turn msgspec's ``Expected … - at `$.a.b``` into the key and a message with the file and what was expected."""
    problem, _, place = error.partition(" - at `")
    names = tuple(part.split("[")[0] for part in place.rstrip("`").split(".")[1:])
    key = next((names[:n] for n in range(len(names), 0, -1) if names[:n] in origin), ())
    file = origin.get(key, path)
    if allowed := _allowed(kind, names):
        value, choices = problem.removeprefix("Invalid enum value "), ", ".join(allowed)
        problem = f"expected one of {choices}" if value == problem else f"{value} is none of {choices}"
    return key, f"{file}{_line(file, key)}: {'.'.join(names) or 'top level'}: {problem[:1].lower()}{problem[1:]}"


def _allowed(kind: Any, names: Key) -> tuple[str, ...]:
    """Return the values that a key with a choice of them may have."""
    if names:
        inner = _struct_in(kind)
        fields = get_type_hints(inner, include_extras=True) if inner is not None else {}
        return _allowed(fields[names[0]], names[1:]) if names[0] in fields else ()
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return next((found for part in get_args(kind) if (found := _allowed(part, ()))), ())


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
