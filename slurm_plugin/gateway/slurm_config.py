"""Slurm's own configuration as its controller has it in force, for ``cadenza doctor``."""

from __future__ import annotations

import subprocess

from cadenza.slurm_plugin.gateway.errors import EnvironmentLacks, SlurmUnavailable

TIMEOUT_S = 30.0


def slurm_config() -> dict[str, str]:
    """Return ``scontrol show config`` by key.

    Raise EnvironmentLacks without Slurm's commands on this machine, SlurmUnavailable without an answer.
    """
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise EnvironmentLacks("scontrol is not installed here; run this on the controller") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"scontrol show config: no answer within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise SlurmUnavailable(f"scontrol show config: {done.stderr.strip() or 'failed'}")
    return parse(done.stdout)


def parse(text: str) -> dict[str, str]:
    r"""Return the ``Key = value`` lines; headings and sections without a value are left out.

    >>> parse("Configuration data as of now\nSelectType              = select/cons_tres\n")
    {'SelectType': 'select/cons_tres'}
    """
    pairs = (line.partition(" = ") for line in text.splitlines())
    return {key.strip(): value.strip() for key, mark, value in pairs if mark}
