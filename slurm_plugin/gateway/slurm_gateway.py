"""The protocol of the Slurm half of the cluster, the configured implementation, and Slurm's own configuration."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, cast

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.model import ClusterSnapshot, JobKey, SlurmState
from cadenza.sidecar.config import ConfigError
from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.gateway.commands import Refusal, answer, json_answer

TIMEOUT_S = 30.0
_MODULE = "cadenza.slurm_plugin.gateway.source_gateway"
SOURCES = {"auto": f"{_MODULE}:served", "pyslurm": f"{_MODULE}:over_pyslurm", "json": f"{_MODULE}:served_json"}
"""The gateways with a short name."""


class SlurmGateway(Protocol):
    """Slurm as the service uses it; ``source_gateway`` implements it."""

    def read(self) -> ClusterSnapshot:
        """Return jobs and nodes as Slurm has them; raise an error of the gateway's package when it does not answer."""
        ...

    def look(self, jobs: Collection[int]) -> Mapping[JobKey, SlurmState]:
        """Return the present state of the jobs with these ids; cheap for Slurm."""
        ...

    def apply(self, action: Action) -> Outcome:
        """Carry out one action in Slurm; a failure is an Outcome, not an exception."""
        ...

    def close(self) -> None:
        """End its worker."""
        ...


def open_gateway(name: str) -> SlurmGateway:
    """Return the gateway that ``[service] gateway`` names: one of SOURCES, or what its ``module:callable`` returns.

    Raise ConfigError if it is none.
    """
    try:
        connect = pkgutil.resolve_name(SOURCES.get(name, name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"[service] gateway = {name!r}: {error}") from None
    if not callable(connect):
        raise ConfigError(f"[service] gateway = {name!r} is not callable")
    return cast("SlurmGateway", connect())


def slurm_config() -> dict[str, str]:
    """Return ``scontrol show config`` by key, as the controller has it in force; raise as ``answer_of`` does."""
    return parse(answer_of(("scontrol", "show", "config"), TIMEOUT_S))


def answer_of(words: Sequence[str], timeout_s: float) -> str:
    """Return the output of one of Slurm's commands that only read.

    Raise EnvironmentLacks without the command on this machine, SlurmUnavailable without an answer.
    """
    try:
        return answer(*words, timeout_s=timeout_s).decode(errors="replace")
    except Refusal as error:
        raise SlurmUnavailable(str(error)) from None


def json_of(words: Sequence[str], timeout_s: float) -> str:
    """Return the output of one of them in JSON, in a version that is read; raise as ``answer_of`` does.

    Raise EnvironmentLacks also where Slurm has no such version.
    """
    try:
        return json_answer(*words, timeout_s=timeout_s).decode(errors="replace")
    except Refusal as error:
        raise SlurmUnavailable(str(error)) from None


def parse(text: str) -> dict[str, str]:
    r"""Return the ``Key = value`` lines; headings and sections without a value are left out.

    >>> parse("Configuration data as of now\nSelectType              = select/cons_tres\n")
    {'SelectType': 'select/cons_tres'}
    """
    pairs = (line.partition(" = ") for line in text.splitlines())
    return {key.strip(): value.strip() for key, mark, value in pairs if mark}
