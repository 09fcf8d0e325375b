"""Slurm's own commands, with their refusals as errors."""

from __future__ import annotations

import os
import subprocess

from cadenza.slurm_plugin.gateway.errors import EnvironmentLacks, errno_of

FORMAT = "v0.0.42"
"""The version of Slurm's data parser that the releases from 24.11 to 26.05 have in common."""
JSON = f"--json={FORMAT}"
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
    selecting = ("SQUEUE_", "SCONTROL_", "SLURM_CLUSTERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(selecting)}
    environment |= {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    try:
        done = subprocess.run(
            words, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"{' '.join(words)}: no answer within {timeout_s:g} s", TIMED_OUT) from None
    except FileNotFoundError:
        raise EnvironmentLacks(f"{words[0]} is not installed here; run this on the controller") from None
    except OSError as error:
        raise EnvironmentLacks(f"{words[0]}: {error.strerror}; run this on the controller") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise Refusal(f"{' '.join(words)}: {said}")
    return done.stdout


def command(*words: str) -> str:
    """Return the output of a command as text, bytes that are not UTF-8 as surrogates; raise Refusal when it fails."""
    return answer(*words).decode("utf-8", "surrogateescape")
