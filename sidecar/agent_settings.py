"""The agent's settings: section ``[agent]`` of the configuration file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cadenza.sidecar.config import DEFAULT_PATH, SECTIONS, load
from cadenza.sidecar.wire import DEFAULT_SOCKET


class AgentSettings(msgspec.Struct, frozen=True):
    """One field for each key of ``[agent]``; times in seconds."""

    service: Annotated[
        str,
        Meta(
            description="Address of the policy service, such as tcp://ctl:6820; empty: none, take turns locally",
            pattern=r"^((tcp|ipc)://.+)?$",
        ),
    ] = ""
    socket: Annotated[str, Meta(description="Unix socket that jobs and the SPANK plugin connect to", min_length=1)] = (
        DEFAULT_SOCKET
    )
    state_dir: Annotated[str, Meta(description="Directory of leases.json", min_length=1)] = "/var/lib/cadenza"
    keys: Annotated[
        str, Meta(description="Directory with agent.key_secret and service.key (made by cadenza keygen)")
    ] = "/etc/cadenza/keys"
    service_timeout_s: Annotated[
        float, Meta(description="Silence of the service after which jobs take turns locally", gt=0)
    ] = 30.0
    heartbeat_s: Annotated[float, Meta(description="Longest time between two reports to the service", gt=0)] = 2.0
    lease_wait_s: Annotated[float, Meta(description="Longest wait of a starting job for its first lease", ge=0)] = 600.0
    host: Annotated[str, Meta(description="Name of this host; empty: its short host name")] = ""
    yield_timeout_s: Annotated[
        float,
        Meta(description="Longest wait for the boundary when the agent itself asks a job to yield", gt=0),
    ] = 60.0
    memory_margin: Annotated[
        float,
        Meta(description="Free host memory that a yield needs, as a multiple of the state it moves there", ge=1),
    ] = 1.25
    driver_checkpoint: Annotated[
        Literal["off", "unattached", "always"],
        Meta(
            description="Whom CUDA's process checkpoints stop: nobody, jobs whose ranks cannot stop by themselves, "
            "or those and, after they moved their state, what all others still have on the GPU"
        ),
    ] = "off"
    telemetry_s: Annotated[float, Meta(description="Time between two samples of each job's use of the host", gt=0)] = (
        5.0
    )
    records: Annotated[
        Literal["off", "request", "jsonl"],
        Meta(description="Whose samples are kept: nobody's, those of jobs that set CADENZA_RECORDS, or every job's"),
    ] = "request"
    records_dir: Annotated[
        str, Meta(description="Where jobs that set no CADENZA_RECORDS get theirs, in a directory by uid", min_length=1)
    ] = "/var/lib/cadenza/records"
    records_mb: Annotated[
        int, Meta(description="Size of a job's record file at which it is rotated; one older file is kept", ge=1)
    ] = 64

    prefetch_mb: Annotated[
        int,
        Meta(description="Most that is read into memory for a job that will move here, MB; 0: nothing", ge=0),
    ] = 8192
    tuning: Annotated[
        Literal["off", "affinity", "cgroups"],
        Meta(description="How a running job's CPUs and memory may be changed; cgroups falls back to affinity"),
    ] = "cgroups"
    slurm_cpus: Annotated[
        int, Meta(description="CPUs that Slurm counts on this host if not those it has; 0: the same", ge=0)
    ] = 0

    @property
    def host_name(self) -> str:
        """The configured host name, or this machine's short one."""
        return self.host or socket.gethostname().split(".")[0]


class AgentFile(msgspec.Struct, frozen=True):
    """The part of the configuration file that the agent reads."""

    agent: AgentSettings = AgentSettings()


def load_settings(path: Path | None) -> AgentSettings:
    """Return the settings in ``path``; without one, in the default file, or the defaults when there is none.

    Raise ConfigError as :func:`cadenza.sidecar.config.load` does.
    """
    if path is None and not DEFAULT_PATH.exists():
        return AgentSettings()
    others = tuple(section for section in SECTIONS if section != "agent")
    return load(path or DEFAULT_PATH, AgentFile, ignore=others).agent
