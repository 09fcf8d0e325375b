"""What the commands have in common: their options, the settings and the store they name, and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cadenza.sidecar.config import DEFAULT_PATH

if TYPE_CHECKING:
    from rich.console import Console

    from cadenza.slurm_plugin.service.store.reader import StoreReader

config_option = click.option(
    "--config", type=click.Path(path_type=Path), help=f"Configuration file (default: {DEFAULT_PATH})."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
store_option = click.option(
    "--store", type=click.Path(path_type=Path), help="Store to read (default: the one in the configuration)."
)


def emit(value: Any) -> None:
    """Print one value as one line of JSON."""
    click.echo(msgspec.json.encode(value).decode())


PIPE_WIDTH = 180
"""Columns where there is no terminal: lines may be long, and nothing should be cut."""


def console() -> Console:
    """Return a console on standard output; it has no colour where that is not a terminal."""
    from rich.console import Console  # noqa: PLC0415 (slow, and not needed for JSON)

    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def open_store(store: Path | None, config: Path | None) -> StoreReader:
    """Open the named store, else the configured one; raise StoreError or ConfigError."""
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415
    from cadenza.slurm_plugin.service.store.reader import StoreReader  # noqa: PLC0415

    return StoreReader(store or Path(load_settings(config).service.store))
