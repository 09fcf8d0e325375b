"""``cadenza keygen``: the CURVE keys of the service and of each host, and their rotation."""

from __future__ import annotations

import re
from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import say
from cadenza.slurm_plugin.service.agents.curve_keys import make_keys
from cadenza.slurm_plugin.service.settings import load_settings

SERVICE_KEY = "service.key"
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@click.command("keygen")
@click.argument("hosts", nargs=-1, metavar="[HOST]...")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Directory to write to (default: [service] keys).")  # fmt: skip
@click.option("--rotate", is_flag=True,
              help="Replace the hosts' keys, or all; an old key works until its agent has the new.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the hosts' keys at once; without HOST, the service's key.")
def keygen(*, hosts: tuple[str, ...], out: Path | None, rotate: bool, force: bool) -> None:
    """Create a key for the service, if it has none, and one for the agent of each HOST.

    The service reads service.key_secret and agents/HOST.key. Each host needs its own agents/HOST.key_secret and
    service.key, at the same places; delete its secret key here once it is copied. Then reload cadenzad.
    Only the owner can read the files whose names end in _secret.
    """
    out = out or Path(load_settings(None).service.keys)
    for host in hosts:
        if HOST_NAME.fullmatch(host) is None:
            raise click.BadParameter(f"{host!r} is not a host name", param_hint="HOST")
    if rotate and not hosts:
        hosts = tuple(sorted(path.stem for path in (out / "agents").glob("*.key")))
    existing = [path for host in hosts if (path := out / "agents" / f"{host}.key").exists()]
    if existing and not (rotate or force):
        raise click.ClickException(f"{existing[0]} exists; --rotate replaces it, and --force does so at once")
    if not hosts and not force and (out / SERVICE_KEY).exists():
        message = "exists; --force replaces it, and then every host needs the new service.key"
        raise click.ClickException(f"{out / SERVICE_KEY} {message}")
    for path in make_keys(out, hosts, rotate=rotate, force=force):
        say(str(path))
