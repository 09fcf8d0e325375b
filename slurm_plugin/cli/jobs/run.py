"""``cadenza run``: a training script as it is, able to share its GPU."""

from __future__ import annotations

import sys

import click

from cadenza.sidecar.client.bootstrap.run_script import main


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", metavar="-- COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
def command(*, words: tuple[str, ...]) -> None:
    """Run a training script unchanged, able to share its GPU: `cadenza run -- python train.py`.

    The exit code is the script's own. Options come before the command: --rehearse-move [--steps N] moves it on this
    machine, and compares each step with a run that was not moved; --saves PATTERN lets a script make way that saves and
    resumes by itself, with --resume-arg ARGUMENT ({path}: the newest checkpoint) and --save-signal NAME; --graphs keeps
    device addresses over a yield.
    """
    sys.exit(main(list(words)))
