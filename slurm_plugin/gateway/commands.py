"""Slurm's own commands, with their refusals as errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.slurm_plugin.gateway.slurm_errno import errno_of

FORMATS = ("v0.0.46", "v0.0.45", "v0.0.44", "v0.0.43", "v0.0.42")
"""Versions of Slurm's data parser that are read, the newest first: 24.11 has up to 42, 26.11 from 43 on."""
OWN_FORMAT = "its own"
"""Stands for the newest version of the commands themselves, where they print no list of versions."""
TIMEOUT_S = 25.0
"""Slurm's commands try for 10 s and longer before they say that slurmctld does not answer."""
TIMED_OUT = 5004
"""Slurm's number for the same."""


class Refusal(Exception):  # noqa: N818
    """Slurm's answer to a command that failed; ``errno`` is Slurm's number if the text is one of Slurm's."""

    def __init__(self, msg: str, errno: int | None = None) -> None:
        super().__init__(msg)
        self.msg = msg
        self.errno = errno if errno is not None else errno_of(msg)


def answer(*words: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the output of a command of Slurm; raise Refusal when it fails, EnvironmentLacks where there is none.

    Times come as seconds of the epoch and lists of tasks in full; no setting of our environment selects jobs.
    """
    # squeue takes its filters from the environment as well: with SQUEUE_USERS set, the jobs of all other users would be
    # missing.
    selecting = ("SQUEUE_", "SCONTROL_", "SLURM_CLUSTERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(selecting)}
    # squeue cuts the list of an array's tasks after 64 characters by default (squeue(1), SLURM_BITSTR_LEN).
    environment |= {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    try:
        done = subprocess.run(
            words, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"{' '.join(words)}: no answer within {timeout_s:g} s", TIMED_OUT) from None
    except FileNotFoundError:
        raise EnvironmentLacks(f"{words[0]} is not installed here; run this where Slurm's commands are") from None
    except OSError as error:
        raise EnvironmentLacks(f"{words[0]}: {error.strerror}; run this where Slurm's commands are") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise Refusal(f"{' '.join(words)}: {said}")
    return done.stdout


_agreed: dict[tuple[str, int], str] = {}
"""The version that both sides know, by the file of the command and its time: an upgrade of Slurm is another file."""


def json_format() -> str:
    """Return the newest version of Slurm's JSON that both sides know; raise EnvironmentLacks where there is none.

    Raise Refusal where Slurm's commands do not answer.
    """
    path = shutil.which("scontrol") or ""
    file = path, Path(path).stat().st_mtime_ns if path else 0
    if file not in _agreed:
        # Of all commands this one asks slurmctld for the least; ``squeue --json=list`` would read all jobs first.
        printed = answer("scontrol", "ping", "--json=list").decode(errors="replace")
        offered = re.findall(r"^\s*data_parser/(v[\d.]+)\s*$", printed, re.MULTILINE | re.ASCII)
        found = next((one for one in FORMATS if one in offered), None if offered else OWN_FORMAT)
        if found is None:
            raise EnvironmentLacks(
                f"Slurm's commands offer their JSON as {', '.join(sorted(offered))}, and Cadenza reads "
                f"{', '.join(reversed(FORMATS))}: this release of Slurm needs another Cadenza"
            )
        _agreed[file] = found
    return _agreed[file]


def json_answer(*words: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the output of a command of Slurm in JSON; raise as ``answer`` and ``json_format`` do."""
    version = json_format()
    option = "--json" if version == OWN_FORMAT else f"--json={version}"
    try:
        return answer(*words, option, timeout_s=timeout_s)
    except Refusal as error:
        if "data_parser" in error.msg:  # an upgrade that the file of scontrol did not show: the next call asks anew
            _agreed.clear()
        raise


def command(*words: str) -> str:
    """Return the output of a command as text, bytes that are not UTF-8 as surrogates; raise Refusal when it fails."""
    return answer(*words).decode("utf-8", "surrogateescape")
