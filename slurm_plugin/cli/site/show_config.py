"""``cadenza show-config``: every setting in force, what it means, and the file that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click
import msgspec

from cadenza.sidecar.config import DEFAULT_PATH
from cadenza.slurm_plugin.cli.common import config_option, emit, json_option

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Row(msgspec.Struct, frozen=True):
    """One setting; ``origin`` is a file or ``default``."""

    section: str
    key: str
    value: Any
    origin: str
    meaning: str


@click.command("show-config")
@json_option
@config_option
def command(*, as_json: bool, config: Path | None) -> None:
    """Print every setting with its value, its meaning and the file it comes from.

    The output is a valid configuration file.
    """
    found = list(rows(config))
    if as_json:
        emit(found)
    else:
        click.echo("\n".join(lines(found)))


def rows(config: Path | None) -> Iterator[Row]:
    """Yield all settings in the order of their tables; raise ConfigError when a file is wrong."""
    from cadenza.sidecar.config import read  # noqa: PLC0415
    from cadenza.slurm_plugin.service.settings import Settings, load_settings  # noqa: PLC0415

    settings = load_settings(config)
    path = config or DEFAULT_PATH
    origin = read(path)[1] if path.exists() else {}
    for section in msgspec.structs.fields(Settings):
        table = getattr(settings, section.name)
        meanings = _meanings(type(table))
        for field in msgspec.structs.fields(table):
            value = msgspec.to_builtins(getattr(table, field.name), order="deterministic")
            source = origin.get((section.name, field.name))
            yield Row(section.name, field.name, value, str(source or "default"), meanings.get(field.name, ""))


def lines(found: list[Row]) -> Iterator[str]:
    """Yield the settings as TOML, each under a comment."""
    section = ""
    for row in found:
        if row.section != section:
            section = row.section
            yield f"\n[{section}]" if row is not found[0] else f"[{section}]"
        yield f"# {row.meaning} ({row.origin})"
        yield f"{row.key} = {toml(row.value)}"


def toml(value: object) -> str:
    """Return a value as TOML; JSON's text is TOML's for strings, numbers, booleans and lists of them.

    >>> toml(["a"]), toml(True), toml(2.0)
    ('["a"]', 'true', '2.0')
    """
    return msgspec.json.encode(value).decode()


def _meanings(table: type) -> dict[str, str]:
    """Return the description of each field, from the metadata of its annotation."""
    hints = get_type_hints(table, include_extras=True)
    return {name: next(filter(None, map(_description, get_args(hint))), "") for name, hint in hints.items()}


def _description(part: object) -> str:
    return (part.description or "") if isinstance(part, msgspec.Meta) else ""
