"""``cadenza keygen``: the CURVE keys with which the service and the agents know each other."""

from __future__ import annotations

from pathlib import Path

import click

NAMES = ("service", "agent")


@click.command("keygen")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Directory to write to.")
@click.option("--force", is_flag=True, help="Replace keys that are there.")
def command(*, out: Path, force: bool) -> None:
    """Make the keys of the link between service and agents.

    The service needs service.key_secret and agent.key, the agents need agent.key_secret and service.key;
    the files ending in _secret are for their owner alone.
    """
    there = [path for path in key_files(out) if path.exists()]
    if there and not force:
        raise click.ClickException(f"{there[0]} exists; --force replaces it, and then every host needs the new keys")
    make_keys(out)
    for path in key_files(out):
        click.echo(path)


def key_files(folder: Path) -> list[Path]:
    """Return the paths of the four files."""
    return [folder / f"{name}.{kind}" for name in NAMES for kind in ("key", "key_secret")]


def make_keys(folder: Path) -> None:
    """Write both pairs; ``OSError`` passes through. The secret halves are never readable by others."""
    import zmq.auth  # noqa: PLC0415 (slow)

    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        for kind, mode in (("key", 0o644), ("key_secret", 0o600)):
            # zmq writes into files that are there, so their mode holds from the first byte on.
            path = folder / f"{name}.{kind}"
            path.touch()
            path.chmod(mode)
        zmq.auth.create_certificates(folder, name)
        (folder / f"{name}.key_secret").chmod(0o600)
