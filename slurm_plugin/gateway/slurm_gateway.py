"""The protocol of the Slurm half of the cluster, and the opening of the configured implementation."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Mapping
from typing import Protocol, cast

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.model import ClusterSnapshot, JobKey, SlurmState
from cadenza.sidecar.config import ConfigError


class SlurmGateway(Protocol):
    """Slurm as the service uses it; ``pyslurm_gateway`` implements it over pyslurm."""

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
    """Call the ``module:callable`` of ``[service] gateway``; raise ConfigError if it is none."""
    try:
        connect = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"[service] gateway = {name!r}: {error}") from None
    if not callable(connect):
        raise ConfigError(f"[service] gateway = {name!r} is not callable")
    return cast("SlurmGateway", connect())
