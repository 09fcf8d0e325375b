"""The settings table of the service: every key of cadenza.toml with its type, default, range and meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cadenza.policies.guard import GuardSettings
from cadenza.policies.sharing.settings import SharingSettings
from cadenza.sidecar.agent.settings import AgentSettings
from cadenza.sidecar.config import DEFAULT_PATH, load
from cadenza.slurm_plugin.service.hub import HubSettings

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Names: TypeAlias = frozenset[Text]

MISSED_ROUNDS = 4
LEAST_TRUST_S = 10.0
ALIVE_HEARTBEATS = 3
LEAST_ALIVE_S = 5.0
"""However short the heartbeat, a busy host may stay silent this long before its lanes are drained."""


class ServiceTable(msgspec.Struct, frozen=True):
    """``[service]``: the daemon itself."""

    mode: Annotated[
        Literal["observe", "apply"],
        Meta(description="observe: decide and record, change nothing; apply: act. Shipped: observe"),
    ] = "observe"
    admission: Annotated[
        Literal["native", "held"],
        Meta(description="Who starts managed jobs: Slurm itself, or the service (job_submit.lua holds them)"),
    ] = "native"
    poll_s: Annotated[float, Meta(description="Time between rounds; longer when Slurm answers slowly", ge=0.1)] = 15.0
    min_round_spacing_s: Annotated[
        float, Meta(description="Least time between rounds that an agent's news starts early", ge=0)
    ] = 2.0
    bind: Annotated[str, Meta(description="Where the agents connect", pattern=r"^(tcp://.+:(\d+|\*)|ipc://.+)$")] = (
        "tcp://*:6820"
    )
    store: Annotated[Text, Meta(description="The record of rounds, actions and switches (sqlite)")] = (
        "/var/lib/cadenza/cadenza.db"
    )
    retention_days: Annotated[float, Meta(description="How long the record is kept", gt=0)] = 14.0
    keys: Annotated[
        Text, Meta(description="Directory of service.key_secret and agent.key (made by cadenza keygen)")
    ] = "/etc/cadenza/keys"
    heartbeat: Annotated[Text, Meta(description="File that tells job_submit.lua whether to hold managed jobs")] = (
        "/run/cadenza/admission"
    )
    watchdog_grace_s: Annotated[
        float,
        Meta(description="How long a killed service may take to come back before its jobs are released", ge=0),
    ] = 20.0
    gateway: Annotated[
        str,
        Meta(
            description="What talks to Slurm: module:callable, called without arguments",
            pattern=r"^[\w.]+:[\w.]+$",
        ),
    ] = "cadenza.slurm_plugin.gateway.pyslurm_gateway:SlurmGateway"


class GuardTable(msgspec.Struct, frozen=True):
    """``[guard]``: what may be acted upon, and how fast."""

    partitions: Annotated[Names, Meta(description="Managed partitions; nothing is ever done outside them")] = (
        frozenset()
    )
    accounts: Annotated[Names, Meta(description="Only jobs of these accounts; empty: all")] = frozenset()
    qos: Annotated[Names, Meta(description="Only jobs of these QOS; empty: all")] = frozenset()
    users: Annotated[Names, Meta(description="Only jobs of these users; empty: all")] = frozenset()
    max_actions_per_round: Annotated[int, Meta(description="Most actions in one round", ge=0)] = 200
    min_run_s: Annotated[float, Meta(description="A job that got its GPUs keeps them at least this long", ge=0)] = 5.0
    cool_down_s: Annotated[float, Meta(description="Least time between two yields of one job", ge=0)] = 0.0
    kill_switch: Annotated[
        Text, Meta(description="While this file exists no action leaves; read before each round")
    ] = "/etc/cadenza/STOP"


class SharingTable(msgspec.Struct, frozen=True):
    """``[sharing]``: how jobs take turns."""

    policy: Annotated[
        Literal["timeslice", "none"],
        Meta(description="timeslice: jobs take turns on a GPU; none: they never do"),
    ] = "timeslice"
    slice_s: Annotated[float, Meta(description="One turn of a job with weight 1", gt=0)] = 60.0
    share_between_users: Annotated[bool, Meta(description="Whether jobs of different users may share a GPU")] = False
    suspend: Annotated[
        bool, Meta(description="Suspend jobs in Slurm while they wait for their turn: their time limit stops")
    ] = True
    max_priority: Annotated[
        int, Meta(description="Highest priority that a user's own options may ask for; more counts as this")
    ] = 0
    unmanaged_wait_s: Annotated[
        float,
        Meta(
            description="A managed job on a further lane that cannot be stopped is requeued when a job that did "
            "not opt in has waited this long for its GPUs; keep it below the SPANK plugin's wait=",
            ge=0,
        ),
    ] = 10.0
    yield_timeout_s: Annotated[
        float,
        Meta(description="Longest wait for a job to reach its boundary before the order is withdrawn", gt=0),
    ] = 60.0


class Settings(msgspec.Struct, frozen=True):
    """The whole file. The defaults observe only and manage no partition."""

    service: ServiceTable = ServiceTable()
    guard: GuardTable = GuardTable()
    sharing: SharingTable = SharingTable()
    agent: AgentSettings = AgentSettings()

    @property
    def applies(self) -> bool:
        """Whether actions may leave at all."""
        return self.service.mode == "apply"

    @property
    def held_admission(self) -> bool:
        """Whether job_submit.lua may hold managed jobs for us: only while we also act."""
        return self.applies and self.service.admission == "held"

    @property
    def trust_s(self) -> float:
        """How long after a good round the agents and job_submit.lua still hear from the service, seconds."""
        return max(MISSED_ROUNDS * self.service.poll_s, LEAST_TRUST_S)


def load_settings(path: Path | None) -> Settings:
    """Return the settings in ``path``; without one, in the default file, or the defaults when there is none.

    Raise ``cadenza.sidecar.config.ConfigError`` naming the file and the key.
    """
    if path is None and not DEFAULT_PATH.exists():
        return Settings()
    return load(path or DEFAULT_PATH, Settings)


def guard_settings(settings: Settings) -> GuardSettings:
    """Return the guard's settings; the kill switch is looked up now, so call it before each round."""
    table = settings.guard
    return GuardSettings(
        enforce=settings.applies,
        killed=Path(table.kill_switch).exists(),
        partitions=table.partitions,
        accounts=table.accounts,
        qos=table.qos,
        users=table.users,
        max_actions_per_round=table.max_actions_per_round,
        min_run_s=table.min_run_s,
        cool_down_s=table.cool_down_s,
    )


def sharing_settings(settings: Settings) -> SharingSettings:
    """Return what the sharing policy takes."""
    table = settings.sharing
    return SharingSettings(
        enforce=settings.applies,
        slice_s=table.slice_s,
        min_run_s=settings.guard.min_run_s,
        share_between_users=table.share_between_users,
        suspend=table.suspend,
        lease_wait_s=settings.agent.lease_wait_s,
        unmanaged_wait_s=table.unmanaged_wait_s,
        max_priority=table.max_priority,
        admission=settings.service.admission,
        partitions=settings.guard.partitions,
    )


def hub_settings(settings: Settings) -> HubSettings:
    """Return what the agents' link needs."""
    return HubSettings(
        settings.service.bind,
        Path(settings.service.keys),
        settings.agent.heartbeat_s,
        max(ALIVE_HEARTBEATS * settings.agent.heartbeat_s, LEAST_ALIVE_S),
        settings.sharing.yield_timeout_s,
    )


def to_record(settings: Settings) -> str:
    """Return the settings as the store keeps them, beside the rounds that they decided."""
    return msgspec.json.encode(settings, order="deterministic").decode()


def from_record(text: str) -> Settings:
    """Return the settings of :func:`to_record`; keys that later versions added have their defaults."""
    return msgspec.json.decode(text, type=Settings)
