"""The part of the configuration file that the agent reads: ``[agent]`` and ``[expert]``."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cadenza.sidecar.config import SECTIONS, load
from cadenza.sidecar.metrics_server import ADDRESS
from cadenza.sidecar.wire import DEFAULT_SOCKET

Text: TypeAlias = Annotated[str, Meta(min_length=1)]


class AgentTable(msgspec.Struct, frozen=True):
    """``[agent]``: the daemon on each host. Times in seconds."""

    service: Annotated[
        str,
        Meta(
            description="Address of the policy service, such as tcp://ctl:6850, or of that of each controller, with "
            "commas; empty: none, jobs take turns locally",
            pattern=r"^((tcp|ipc)://[^,]+(,(tcp|ipc)://[^,]+)*)?$",
        ),
    ] = ""
    metrics: Annotated[
        str,
        Meta(
            description="Address at which Prometheus reads /metrics and others /healthz, such as 127.0.0.1:9853; "
            "empty: none",
            pattern=ADDRESS,
        ),
    ] = ""
    keys: Annotated[
        str, Meta(description="Directory with agents/HOST.key_secret and service.key (made by cadenza keygen)")
    ] = "/etc/cadenza/keys"
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
    records: Annotated[
        Literal["off", "request", "jsonl"],
        Meta(description="Jobs whose samples are kept: none, those that set CADENZA_RECORDS, or all"),
    ] = "request"
    tuning: Annotated[
        Literal["off", "affinity", "cgroups"],
        Meta(description="Means to change a running job's CPUs and memory; cgroups falls back to affinity"),
    ] = "cgroups"


class ExpertTable(msgspec.Struct, frozen=True):
    """``[expert]``, of both daemons: keys for unusual sites and for tests. Times in seconds."""

    host: Annotated[str, Meta(description="Name of this host; empty: its short host name")] = ""
    socket: Annotated[
        Text, Meta(description="Unix socket of the agent, as socket= of the SPANK plugin's line in plugstack.conf")
    ] = DEFAULT_SOCKET
    state_dir: Annotated[Text, Meta(description="Directory of the agent's leases.json and records/")] = (
        "/var/lib/cadenza"
    )
    slurm_cpus: Annotated[
        int,
        Meta(
            description="CPUs that Slurm counts on this host, if not those of the machine (config_overrides); 0: those",
            ge=0,
        ),
    ] = 0
    heartbeat_s: Annotated[float, Meta(description="Longest time between two reports of an agent", gt=0)] = 2.0
    service_timeout_s: Annotated[
        float, Meta(description="Silence of the service after which jobs take turns locally", gt=0)
    ] = 30.0
    telemetry_s: Annotated[float, Meta(description="Time between two samples of each job's use of the host", gt=0)] = (
        5.0
    )
    lease_wait_s: Annotated[
        float,
        Meta(description="Longest wait of a starting job for its first lease, once the host has memory for it", ge=0),
    ] = 600.0
    jobs_socket: Annotated[Text, Meta(description="Socket at which users read the service's record of their jobs")] = (
        "/run/cadenzad/jobs.sock"
    )
    question_port: Annotated[
        int,
        Meta(
            description="Port of the service at which users of hosts without an agent or relay ask, with munge or a "
            "token of Slurm, such as 6852; 0: none",
            ge=0,
            le=65535,
        ),
    ] = 0
    kill_switch: Annotated[
        Text, Meta(description="While this file exists no action leaves; read before each round")
    ] = "/etc/cadenza/STOP"
    watchdog_grace_s: Annotated[
        float, Meta(description="Time for a killed service to come back before its jobs are released", ge=0)
    ] = 20.0
    min_run_s: Annotated[float, Meta(description="A job that got its GPUs keeps them at least this long", ge=0)] = 5.0
    level_points: Annotated[
        float,
        Meta(
            description="Priority that the last level of attained GPU time costs a job that made way, as a part of the "
            "sum of the site's PriorityWeights; the first level costs nothing (preemption)",
            ge=0,
            le=100,
        ),
    ] = 0.44
    size_pending: Annotated[
        bool,
        Meta(description="Let pending jobs with a profile ask for the CPUs and memory that it says they can use"),
    ] = True
    move_s: Annotated[
        float, Meta(description="Assumed cost of moving a job to other nodes, as time without progress", ge=0)
    ] = 30.0
    move_every_s: Annotated[
        float, Meta(description="Least time between two moves or resizes of a job (gandiva)", ge=0)
    ] = 600.0
    idle_s: Annotated[float, Meta(description="GPUs must be idle this long before a job grows (gandiva)", ge=0)] = 60.0
    measure_s: Annotated[
        float,
        Meta(description="A measuring window: a pack that does not pay is undone within three (gandiva)", gt=0),
    ] = 20.0


class AgentSettings(msgspec.Struct, frozen=True):
    """The tables that the agent reads."""

    agent: AgentTable = AgentTable()
    expert: ExpertTable = ExpertTable()

    @property
    def host_name(self) -> str:
        """The configured host name, or this machine's short one."""
        return self.expert.host or socket.gethostname().split(".")[0]

    @property
    def runtime(self) -> Path:
        """The directory of what lasts until the next boot."""
        return Path(self.expert.socket).parent

    @property
    def questions(self) -> Path:
        """The socket at which the agent passes users' questions on to the service."""
        return self.runtime / "jobs.sock"


def load_settings(path: Path) -> AgentSettings:
    """Return the settings in ``path``; raise ConfigError as :func:`cadenza.sidecar.config.load` does."""
    return load(path, AgentSettings, ignore=tuple(set(SECTIONS) - {"agent", "expert"}))
