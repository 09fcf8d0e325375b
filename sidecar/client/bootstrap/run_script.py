"""``cadenza run -- python train.py …``: every Python of the command attaches by itself at its first step."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

AUTOSTART = Path(__file__).resolve().parents[1] / "autostart"
USAGE = "usage: cadenza run [--] COMMAND [ARGUMENT…]\n"
BAD_INPUT = 2


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the command's environment: this process's, with the autostart directory first in PYTHONPATH."""
    others = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry != str(AUTOSTART)]
    path = os.pathsep.join([str(AUTOSTART), *filter(None, others)])
    return {**environ, "PYTHONPATH": path}


def main(argv: Sequence[str]) -> int:
    """Replace this process by the command; return 2 when there is none or it cannot be executed.

    Python's own flags -I, -E and -S switch this off for the Python process that gets them.
    """
    command = list(argv[1:] if argv[:1] == ["--"] else argv)
    if not command or command[0] in {"-h", "--help"}:
        sys.stderr.write(USAGE)
        return 0 if command else BAD_INPUT
    try:
        os.execvpe(command[0], command, environment(os.environ))  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cadenza run: {command[0]}: {error.strerror or error}\n")
        return BAD_INPUT


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
