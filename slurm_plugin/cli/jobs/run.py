"""``cadenza run -- CMD…``: runs a training script unchanged, with the hook that lets it share its GPU."""

from __future__ import annotations

import sys

import click


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", metavar="-- COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
def command(*, words: tuple[str, ...]) -> None:
    """Run a training script unchanged, able to share its GPU: `cadenza run -- python train.py`.

    The script's own exit code is returned.
    """
    from cadenza.sidecar.client.bootstrap.run_script import main  # noqa: PLC0415

    sys.exit(main(list(words)))
