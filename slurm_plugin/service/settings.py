"""The settings table of the service: every key of cadenza.toml with its type, default, range and meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cadenza.policies.allocation.problem import Costs
from cadenza.policies.composition import PolicySettings
from cadenza.policies.core.errors import InputError
from cadenza.policies.guard import GuardSettings
from cadenza.policies.registry import Kind, entry
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings, Turns
from cadenza.sidecar.agent_settings import AgentSettings
from cadenza.sidecar.config import DEFAULT_PATH, ConfigError, load, where
from cadenza.slurm_plugin.service.agents.hub import HubSettings

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Names: TypeAlias = frozenset[Text]

MISSED_ROUNDS = 4
LEAST_TRUST_S = 10.0
ALIVE_HEARTBEATS = 3
LEAST_ALIVE_S = 5.0
"""However short the heartbeat, a busy host may stay silent this long before its lanes are drained."""
SPANK_WAIT_S = 30.0
"""Default ``wait=`` of the SPANK plugin: after this time a job that did not opt in starts without a lease. The managed
job in its way must be gone before."""


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
    report_days: Annotated[
        float, Meta(description="How long the sums for cadenza report --since are kept, at least retention_days", gt=0)
    ] = 90.0
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

    slice_s: Annotated[float, Meta(description="One turn of a job with weight 1", gt=0)] = 60.0
    turns: Annotated[
        Turns,
        Meta(
            description="fair: jobs that share GPUs have equal parts of them; order: after its first turn a job waits "
            "for those that [policy] order puts before it, and has a turn now and then"
        ),
    ] = "fair"
    share_between_users: Annotated[bool, Meta(description="Whether jobs of different users may share a GPU")] = False
    suspend: Annotated[
        bool, Meta(description="Suspend jobs in Slurm while they wait for their turn: their time limit stops")
    ] = True
    max_priority: Annotated[
        int, Meta(description="Highest priority that a user's own options may ask for; more counts as this")
    ] = 0
    yield_timeout_s: Annotated[
        float,
        Meta(description="Longest wait for a job to reach its boundary before the order is withdrawn", gt=0),
    ] = 60.0


class PolicyTable(msgspec.Struct, frozen=True):
    """``[policy]``: who goes first, who gets what, and how jobs share; ``cadenza policies`` lists the names."""

    order: Annotated[Text, Meta(description="Who goes first: fifo, srtf, las, ftf, tiresias, gavel, fairshare …")] = (
        "fifo"
    )
    allocate: Annotated[
        Text,
        Meta(
            description="How CPUs and memory are given out: cadenza, proportional, tune, opt …; none: jobs keep what "
            "they asked for"
        ),
    ] = "none"
    share: Annotated[
        Text,
        Meta(
            description="none: a GPU has one job; timeslice: jobs take turns; gandiva: they are also packed, moved "
            "and resized, see [gandiva]"
        ),
    ] = "timeslice"
    size_pending: Annotated[
        bool,
        Meta(description="Whether pending jobs with a profile ask for the CPUs and memory that it says they can use"),
    ] = True
    usage_half_life_s: Annotated[
        float, Meta(description="In this time past usage counts half (fairshare)", gt=0)
    ] = 7 * 86400.0
    move_s: Annotated[
        float, Meta(description="What moving a job to other nodes is thought to cost it, without progress", ge=0)
    ] = 30.0
    horizon_s: Annotated[float, Meta(description="A move must gain more than it costs within this time", gt=0)] = 3600.0
    warm: Annotated[
        bool,
        Meta(description="Whether a host that a job moves to reads the job's files before the job stops"),
    ] = True
    gpu_memory_gb: Annotated[
        frozenset[Annotated[str, Meta(pattern=r"^[\w.-]*=\d+(\.\d+)?$")]],
        Meta(description='Memory of each GPU by its type in Slurm, such as "a100=80"; "=80": of all others (packing)'),
    ] = frozenset()


class GandivaTable(msgspec.Struct, frozen=True):
    """``[gandiva]``: the parts of ``share = "gandiva"``, each of which can be left out."""

    pack: Annotated[bool, Meta(description="Run two jobs on the same GPUs at once, as long as that pays")] = True
    pack_margin: Annotated[
        float, Meta(description="Packed jobs stay together when they do this much more than in turns, as a part", ge=0)
    ] = 0.05
    measure_s: Annotated[
        float,
        Meta(description="A measuring window: a pack that does not pay is undone within three of them", gt=0),
    ] = 20.0
    migrate: Annotated[bool, Meta(description="Move jobs to idle GPUs and away from crowded ones")] = True
    defrag: Annotated[bool, Meta(description="Move jobs together so that hosts become free for large ones")] = True
    elastic: Annotated[bool, Meta(description="Grow and shrink jobs that set min_gpus or max_gpus")] = True
    relieve: Annotated[
        bool,
        Meta(
            description="With an allocation: move jobs that their host's CPUs or memory hold back to a host where "
            "they are faster; also with share = none in native admission"
        ),
    ] = True
    idle_s: Annotated[float, Meta(description="GPUs must be idle this long before a job grows", ge=0)] = 60.0
    move_every_s: Annotated[float, Meta(description="Least time between two moves or resizes of a job", ge=0)] = 600.0
    moves_per_round: Annotated[int, Meta(description="Most moves and resizes in one round", ge=0)] = 8


class ProfilesTable(msgspec.Struct, frozen=True):
    """``[profiles]``: what is known of the jobs' speed by CPUs and memory."""

    directory: Annotated[
        str, Meta(description="Profiles (*.json, cadenza.profile/1), read again when they change; empty: none")
    ] = "/etc/cadenza/profiles"
    refine: Annotated[
        bool,
        Meta(
            description="Correct profiles by what running jobs show at the CPUs that they get, and learn those of jobs "
            "that have none"
        ),
    ] = True


class Settings(msgspec.Struct, frozen=True):
    """The whole file. The defaults observe only and manage no partition."""

    service: ServiceTable = ServiceTable()
    guard: GuardTable = GuardTable()
    sharing: SharingTable = SharingTable()
    policy: PolicyTable = PolicyTable()
    gandiva: GandivaTable = GandivaTable()
    profiles: ProfilesTable = ProfilesTable()
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

    Raise ``cadenza.sidecar.config.ConfigError`` naming the file with its line and the key.
    """
    if path is None and not DEFAULT_PATH.exists():
        return Settings()
    file = path or DEFAULT_PATH
    settings = load(file, Settings)
    _check_policy(settings.policy, file)
    return settings


def _check_policy(table: PolicyTable, file: Path) -> None:
    """Raise ConfigError for a name that no policy has."""
    kinds: tuple[tuple[Kind, str, str], ...] = (
        ("ordering", "order", table.order),
        ("allocation", "allocate", table.allocate),
        ("sharing", "share", table.share),
    )
    for kind, key, name in kinds:
        try:
            entry(kind, name)
        except InputError as error:
            raise ConfigError(f"{where(file, ('policy', key))}: policy.{key}: {error}") from None


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
        turns=table.turns,
        share_between_users=table.share_between_users,
        suspend=table.suspend,
        lease_wait_s=settings.agent.lease_wait_s,
        unmanaged_wait_s=SPANK_WAIT_S / 3,
        max_priority=table.max_priority,
        admission=settings.service.admission,
        partitions=settings.guard.partitions,
        floor=True,
    )


def policy_settings(settings: Settings) -> PolicySettings:
    """Return what the policies of ``[policy]`` take."""
    table, functions = settings.policy, settings.gandiva
    return PolicySettings(
        partitions=settings.guard.partitions,
        costs=Costs(move_s=table.move_s, horizon_s=table.horizon_s, round_s=settings.service.poll_s),
        usage_half_life_s=table.usage_half_life_s,
        sharing=sharing_settings(settings),
        gandiva=GandivaSettings(
            pack=functions.pack,
            pack_margin=functions.pack_margin,
            measure_s=functions.measure_s,
            migrate=functions.migrate,
            defrag=functions.defrag,
            elastic=functions.elastic,
            relieve=functions.relieve,
            idle_s=functions.idle_s,
            move_every_s=functions.move_every_s,
            moves_per_round=functions.moves_per_round,
            move_s=table.move_s,
            horizon_s=table.horizon_s,
        ),
        size_pending=table.size_pending,
        phased_moves=True,
        prefetch=table.warm,
    )


def gpu_memory(settings: Settings) -> dict[str, float]:
    """Return the memory of a GPU by type, GB; under "" that of types that are not named."""
    pairs = (text.partition("=") for text in settings.policy.gpu_memory_gb)
    return {kind: float(size) for kind, _, size in pairs}


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
    """Return the settings of :func:`to_record`."""
    return msgspec.json.decode(text, type=Settings)
