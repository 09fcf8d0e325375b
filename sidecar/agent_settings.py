"""The agent's settings: section ``[agent]`` of the configuration file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cadenza.sidecar.config import SECTIONS, load
from cadenza.sidecar.metrics_server import ADDRESS
from cadenza.sidecar.wire import DEFAULT_SOCKET


class AgentSettings(msgspec.Struct, frozen=True):
    """One field for each key of ``[agent]``; times in seconds."""

    service: Annotated[
        str,
        Meta(
            description="Address of the policy service, such as tcp://ctl:6850, or of that of each controller, with "
            "commas; empty: none, jobs take turns locally",
            pattern=r"^((tcp|ipc)://[^,]+(,(tcp|ipc)://[^,]+)*)?$",
        ),
    ] = ""
    socket: Annotated[str, Meta(description="Unix socket that jobs and the SPANK plugin connect to", min_length=1)] = (
        DEFAULT_SOCKET
    )
    metrics: Annotated[
        str,
        Meta(
            description="Address at which Prometheus reads /metrics and others /healthz, such as 127.0.0.1:9853; "
            "empty: none",
            pattern=ADDRESS,
        ),
    ] = ""
    state_dir: Annotated[str, Meta(description="Directory of leases.json", min_length=1)] = "/var/lib/cadenza"
    keys: Annotated[
        str, Meta(description="Directory with agents/HOST.key_secret and service.key (made by cadenza keygen)")
    ] = "/etc/cadenza/keys"
    service_timeout_s: Annotated[
        float, Meta(description="Silence of the service after which jobs take turns locally", gt=0)
    ] = 30.0
    heartbeat_s: Annotated[float, Meta(description="Longest time between two reports to the service", gt=0)] = 2.0
    lease_wait_s: Annotated[
        float,
        Meta(description="Longest wait of a starting job for its first lease, once the host has memory for it", ge=0),
    ] = 600.0
    host: Annotated[str, Meta(description="Name of this host; empty: its short host name")] = ""
    memory_margin: Annotated[
        float,
        Meta(description="Free host memory that a yield needs, as a multiple of the state it moves there", ge=1),
    ] = 1.25
    save_before_suspend_s: Annotated[
        float,
        Meta(
            description="A job of one host that yields saves a checkpoint from host memory before Slurm suspends it, "
            "if its last one is older than this: Slurm's preemption kills a suspended job without a signal. 0: never",
            ge=0,
        ),
    ] = 0.0
    driver_checkpoint: Annotated[
        Literal["off", "unattached", "always"],
        Meta(
            description="Jobs stopped by CUDA's process checkpoints: none, those whose ranks cannot stop themselves, "
            "or all, for the CUDA contexts that stay on the GPU after ranks moved their state"
        ),
    ] = "off"
    telemetry_s: Annotated[float, Meta(description="Time between two samples of each job's use of the host", gt=0)] = (
        5.0
    )
    records: Annotated[
        Literal["off", "request", "jsonl"],
        Meta(description="Jobs whose samples are kept: none, those that set CADENZA_RECORDS, or all"),
    ] = "request"
    records_dir: Annotated[
        str, Meta(description="Directory of records for jobs that set no CADENZA_RECORDS, by uid", min_length=1)
    ] = "/var/lib/cadenza/records"
    tuning: Annotated[
        Literal["off", "affinity", "cgroups"],
        Meta(description="Means to change a running job's CPUs and memory; cgroups falls back to affinity"),
    ] = "cgroups"
    slurm_cpus: Annotated[
        int, Meta(description="CPUs that Slurm counts on this host; 0: those of the machine", ge=0)
    ] = 0

    @property
    def host_name(self) -> str:
        """The configured host name, or this machine's short one."""
        return self.host or socket.gethostname().split(".")[0]

    @property
    def questions(self) -> Path:
        """The socket at which the agent passes users' questions on to the service."""
        return Path(self.socket).parent / "jobs.sock"


class AgentFile(msgspec.Struct, frozen=True):
    """The part of the configuration file that the agent reads."""

    agent: AgentSettings = AgentSettings()


def load_settings(path: Path) -> AgentSettings:
    """Return the settings in ``path``; raise ConfigError as :func:`cadenza.sidecar.config.load` does."""
    others = tuple(section for section in SECTIONS if section != "agent")
    return load(path, AgentFile, ignore=others).agent
