"""``cadenza profile validate``: whether profiles can be used, with file and key where one cannot."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import emit, json_option
from cadenza.slurm_plugin.cli.profile.profile_show import FILES, loaded


@click.command("validate")
@FILES
@click.option("--gpu", default="", metavar="TYPE", help="The profiles must be good for this GPU type.")
@json_option
def command(*, files: tuple[Path, ...], gpu: str, as_json: bool) -> None:
    """Check profiles: schema, values, that more never makes a job slower, and the GPU type.

    Exit code 2 names the file and the key of the first that cannot be used; with --json all are listed.
    """
    verdicts = {str(path): _why_not(path, gpu) for path in files}
    bad = [why for why in verdicts.values() if why]
    if as_json:
        emit([{"file": file, "valid": not why, "error": why} for file, why in verdicts.items()])
    else:
        for file, why in verdicts.items():
            click.echo(f"cadenza: {why}" if why else f"{file}: good", err=bool(why))
    if bad:
        raise click.exceptions.Exit(2)


def _why_not(path: Path, gpu: str) -> str:
    """Return what is wrong with a file, or ""."""
    from cadenza.policies.core.errors import InputError  # noqa: PLC0415
    from cadenza.profiler.validation import require_usable  # noqa: PLC0415

    try:
        for profile in loaded(path).values():
            require_usable(profile, str(path), gpu)
            for sibling in profile.siblings.values():
                require_usable(sibling, str(path))
    except InputError as error:
        return str(error)
    return ""
