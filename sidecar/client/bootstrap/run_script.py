"""``cadenza run -- python train.py …``: every Python of the command attaches by itself at its first step."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from cadenza.sidecar.client.bootstrap import rehearsal, script_saves_options
from cadenza.sidecar.client.bootstrap.rehearsal import REHEARSE, STEPS
from cadenza.sidecar.client.bootstrap.script_saves_options import RESUME_ARG, SAVE_SIGNAL, SAVES
from cadenza.sidecar.client.offload.addresses import preloaded

AUTOSTART = Path(__file__).resolve().parents[1] / "autostart"
USAGE = """\
usage: cadenza run [--graphs] [--] COMMAND [ARGUMENT…]
       cadenza run --saves PATTERN [--resume-arg ARGUMENT] [--save-signal NAME] [--] COMMAND [ARGUMENT…]
       cadenza run --rehearse-move [--steps N] -- COMMAND [ARGUMENT…]
"""
GRAPHS = "--graphs"
"""Device addresses stay at a yield."""
OPTIONS = {GRAPHS: 0, REHEARSE: 0, STEPS: 1, SAVES: 1, RESUME_ARG: 1, SAVE_SIGNAL: 1}
"""Number of values of each option."""
BAD_INPUT = 2


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the command's environment: this process's, with the autostart directory first in PYTHONPATH."""
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry != str(AUTOSTART)]
    path = os.pathsep.join([str(AUTOSTART), *filter(None, others)])
    return with_addresses({**environ, "PYTHONPATH": path})


def with_addresses(environ: dict[str, str]) -> dict[str, str]:
    """Return an environment that preloads the library of addresses that stay, if it asks for them."""
    if environ.get(preloaded.ADDRESSES_ENV) != preloaded.STAY:
        return environ
    place = preloaded.path()
    if place is None:
        sys.stderr.write(f"cadenza run: no agent here has {preloaded.NAME}: device addresses change at a yield\n")
        return environ
    return preloaded.environment(environ, place)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options at the beginning of a command line, with their values, and the command.

    >>> split(["--steps", "20", "--", "python", "train.py", "--graphs"])
    (['--steps', '20'], ['python', 'train.py', '--graphs'])
    """
    place = 0
    while place < len(argv) and (name := argv[place].partition("=")[0]) in OPTIONS:
        place += 1 + (OPTIONS[name] if name == argv[place] else 0)
    return list(argv[:place]), list(argv[place + (argv[place : place + 1] == ["--"]) :])


def _values(options: Sequence[str]) -> dict[str, str]:
    """Return the values of the options about the script's own checkpoints, by name."""
    found = {}
    for place, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name in (SAVES, RESUME_ARG, SAVE_SIGNAL):
            found[name] = value if equals else "".join(options[place + 1 : place + 2])
    return found


def main(argv: Sequence[str]) -> int:
    """Replace this process by the command; return 2 when there is none or it cannot be executed.

    Python's own flags -I, -E and -S switch this off for the Python process that gets them.
    """
    options, command = split(argv)
    if command and command[0].startswith("-") and command[0] not in {"-h", "--help"}:
        name = command[0].partition("=")[0]
        near = get_close_matches(name, OPTIONS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see `cadenza run --help`"
        sys.stderr.write(f"cadenza run: no option {name}; {hint}\n")
        return BAD_INPUT
    if REHEARSE in options:
        return rehearsal.main(options, command)
    saves = _values(options)
    if reason := script_saves_options.refusal(saves, command, os.environ):
        sys.stderr.write(f"cadenza run: {reason}\n")
        return BAD_INPUT
    environ = dict(os.environ)
    if saves and command:
        command = script_saves_options.prepare(saves, command, environ)
    if GRAPHS in options:
        environ[preloaded.ADDRESSES_ENV] = preloaded.STAY
    if not command or command[0] in {"-h", "--help"}:
        sys.stderr.write(USAGE)
        return 0 if command else BAD_INPUT
    try:
        # The command takes the place of this process, so that Slurm's signals reach it, and Slurm its exit status.
        os.execvpe(command[0], command, environment(environ))  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cadenza run: {command[0]}: {error.strerror or error}\n")
        return BAD_INPUT


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
