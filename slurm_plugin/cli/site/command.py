"""``cadenza doctor``, ``keygen`` and ``record``: check a site, create its keys, record its Slurm."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import config_option, emit, json_option

COLORS = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
KEY_NAMES = ("service", "agent")


@click.command("doctor")
@json_option
@config_option
def doctor(*, as_json: bool, config: Path | None) -> None:
    """Check this site: versions, lanes, partitions, keys, agents.

    Run it on the machine of cadenzad. It changes nothing. The exit code is 1 if a problem keeps Cadenza from working.
    """
    from cadenza.slurm_plugin.cli.site.checks import examine, failed  # noqa: PLC0415
    from cadenza.slurm_plugin.cli.site.facts import gather  # noqa: PLC0415

    findings = examine(gather(config))
    if as_json:
        emit(findings)
    else:
        for finding in findings:
            level = click.style(f"{finding.level:4}", COLORS[finding.level])
            click.echo(f"{level} {finding.about}: {finding.observation}")
            if finding.advice:
                click.echo(f"       -> {finding.advice}")
    if failed(findings):
        raise SystemExit(1)


@click.command("keygen")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Directory to write to.")
@click.option("--force", is_flag=True, help="Replace existing keys.")
def keygen(*, out: Path, force: bool) -> None:
    """Create the keys of the connection between service and agents.

    The service needs service.key_secret and agent.key; the agents need agent.key_secret and service.key.
    Only the owner can read the files whose names end in _secret.
    """
    files = [out / f"{name}.{kind}" for name in KEY_NAMES for kind in ("key", "key_secret")]
    existing = [path for path in files if path.exists()]
    if existing and not force:
        raise click.ClickException(f"{existing[0]} exists; --force replaces it, and then every host needs the new keys")
    make_keys(out)
    for path in files:
        click.echo(path)


def make_keys(folder: Path) -> None:
    """Write both key pairs; no other user can read the secret halves at any time. Raise OSError."""
    import zmq.auth  # noqa: PLC0415 (slow)

    folder.mkdir(parents=True, exist_ok=True)
    for name in KEY_NAMES:
        for kind, mode in (("key", 0o644), ("key_secret", 0o600)):
            # zmq writes into existing files, so their mode applies from the first byte on.
            path = folder / f"{name}.{kind}"
            path.touch()
            path.chmod(mode)
        zmq.auth.create_certificates(folder, name)
        (folder / f"{name}.key_secret").chmod(0o600)


@click.command("record")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to append to.")
@click.option("--count", default=1, show_default=True, type=click.IntRange(min=1), help="Number of reads.")
@click.option("--interval", default=15.0, show_default=True, type=click.FloatRange(0), help="Seconds between reads.")
def record(*, out: Path, count: int, interval: float) -> None:
    """Record this cluster's jobs and nodes for tests and bug reports.

    The file contains names of users and jobs, and comments: review it before you share it.
    """
    from cadenza.slurm_plugin.gateway import recording  # noqa: PLC0415
    from cadenza.slurm_plugin.gateway.pyslurm_gateway import SlurmGateway  # noqa: PLC0415

    with SlurmGateway() as gateway:
        size = recording.record(out, count, interval, gateway)
    click.echo(f"{out}: {count} answers, {size} bytes")
