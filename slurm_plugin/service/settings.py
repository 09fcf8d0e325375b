"""The settings of the service: every key of cadenza.toml with its type, default, range and meaning.

The tables of guard and sharing are options of the policies, which define them once; ``[expert]`` is the agent's, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cadenza.policies.allocation.problem import Costs
from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.errors import InputError
from cadenza.policies.guard import GuardOptions, GuardSettings
from cadenza.policies.registry import KEEP_REQUESTS, Kind, entry
from cadenza.policies.round import Decide
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingOptions, SharingSettings
from cadenza.sidecar.agent_settings import AgentTable, ExpertTable, Text
from cadenza.sidecar.config import DEFAULT_PATH, load
from cadenza.sidecar.metrics_server import ADDRESS
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.service.agents.hub import HubSettings

MISSED_ROUNDS = 4
MIN_TRUST_S = 10.0
ALIVE_HEARTBEATS = 3
MIN_ALIVE_S = 5.0
"""A busy host may stay silent this long before its lanes are drained, even with a short heartbeat."""
SPANK_WAIT_S = 30.0
"""Default ``wait=`` of the SPANK plugin: after this time a job that did not opt in starts without a lease."""


class ServiceTable(msgspec.Struct, frozen=True):
    """``[service]``: the daemon itself."""

    mode: Annotated[
        Literal["observe", "apply"],
        Meta(description="observe: decide and record, change nothing; apply: act. Shipped: observe"),
    ] = "observe"
    poll_s: Annotated[float, Meta(description="Time between rounds; longer when Slurm answers slowly", ge=0.1)] = 15.0
    bind: Annotated[str, Meta(description="Where the agents connect", pattern=r"^(tcp://.+:(\d+|\*)|ipc://.+)$")] = (
        "tcp://*:6850"
    )
    store: Annotated[Text, Meta(description="The record of rounds, actions and switches (sqlite)")] = (
        "/var/lib/cadenzad/cadenza.db"
    )
    retention_days: Annotated[float, Meta(description="Time for which the record is kept", gt=0)] = 14.0
    retention_gb: Annotated[
        float, Meta(description="Size of the record from which its oldest rounds are deleted before their time", gt=0)
    ] = 10.0
    keys: Annotated[
        Text,
        Meta(
            description="Directory of service.key_secret and the agents/HOST.key of all hosts (made by cadenza keygen)"
        ),
    ] = "/etc/cadenza/keys"
    relays: Annotated[
        tuple[Text, ...],
        Meta(
            description="Hosts whose `cadenza-agent --relay` may ask for any user, such as login nodes; the agent of "
            "another host may ask for users with a job there"
        ),
    ] = ()
    metrics: Annotated[
        str,
        Meta(
            description="Address at which Prometheus reads /metrics and others /healthz, such as 127.0.0.1:9852; "
            "empty: none",
            pattern=ADDRESS,
        ),
    ] = ""
    lanes_memory: Annotated[
        Literal["split", "full"],
        Meta(
            description="Memory of each lane: split: a part of the host's; full: all of it, guarded by the host's agent"
        ),
    ] = "split"
    gateway: Annotated[
        str,
        Meta(
            description="Gateway to Slurm: auto: over pyslurm where it is built for this Slurm, else over the JSON of "
            "Slurm's commands; pyslurm; json; or module:callable, called without arguments",
            pattern=r"^(auto|pyslurm|json|[\w.]+:[\w.]+)$",
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class SharingTable(SharingOptions):
    """``[sharing]``: turns on shared GPUs."""

    yield_timeout_s: Annotated[
        float,
        Meta(description="Longest wait for a job to reach its boundary before the order is withdrawn", gt=0),
    ] = 60.0


class PolicyTable(msgspec.Struct, frozen=True):
    """``[policy]``: ordering, allocation and sharing; ``cadenza simulate --help`` lists the names."""

    order: Annotated[Text, Meta(description="Who goes first: levels, fifo, srtf, las, ftf, fairshare …")] = "levels"
    allocate: Annotated[
        Text,
        Meta(
            description="Allocation of CPUs and memory: cadenza, proportional, tune, opt …; none: jobs keep what they "
            "asked for"
        ),
    ] = "none"
    share: Annotated[
        Text,
        Meta(
            description="preemption: running jobs make way for the first of Slurm's queue, by turns and moves; "
            "timeslice: jobs take turns; gandiva: they are also packed, moved and resized, see [gandiva]; none: a GPU "
            "has one job"
        ),
    ] = "preemption"
    place: Annotated[
        bool,
        Meta(
            description="Let gandiva's placement and Synergy's rounds choose the nodes of waiting jobs, by a pin; "
            "false: Slurm chooses"
        ),
    ] = False
    prefetch: Annotated[
        bool,
        Meta(description="Let a host that a job moves to read the job's files before the job stops"),
    ] = True
    gpu_memory_gb: Annotated[
        frozenset[Annotated[str, Meta(pattern=r"^[\w.-]*=\d+(\.\d+)?$")]],
        Meta(description='Memory of each GPU by its type in Slurm, such as "a100=80"; "=80": of all others (packing)'),
    ] = frozenset()


class GandivaTable(msgspec.Struct, frozen=True):
    """``[gandiva]``: the parts of Gandiva that are on."""

    pack: Annotated[bool, Meta(description="Run two jobs on the same GPUs at once, as long as that pays")] = True
    moves: Annotated[
        bool,
        Meta(
            description="Move jobs to idle GPUs, away from crowded hosts, and together so that hosts become free for "
            "large ones; with an allocation also to a host where CPUs or memory hold them back less (that also with "
            "share = none, unless place)"
        ),
    ] = True
    elastic: Annotated[bool, Meta(description="Grow and shrink jobs that set min_gpus or max_gpus")] = True


class ProfilesTable(msgspec.Struct, frozen=True):
    """``[profiles]``: the jobs' speed by CPUs and memory."""

    directory: Annotated[
        str, Meta(description="Profiles (*.json, cadenza.profile/1), read again when they change; empty: none")
    ] = "/etc/cadenza/profiles"
    refine: Annotated[
        bool,
        Meta(description="Correct profiles by the speed of running jobs at their CPUs, and learn missing ones"),
    ] = True


class Settings(msgspec.Struct, frozen=True):
    """The whole file. The defaults observe only and manage no partition."""

    service: ServiceTable = ServiceTable()
    guard: GuardOptions = GuardOptions()
    sharing: SharingTable = SharingTable()
    policy: PolicyTable = PolicyTable()
    gandiva: GandivaTable = GandivaTable()
    profiles: ProfilesTable = ProfilesTable()
    agent: AgentTable = AgentTable()
    expert: ExpertTable = ExpertTable()

    @property
    def applies(self) -> bool:
        """True if actions may leave at all."""
        return self.service.mode == "apply"

    @property
    def trust_s(self) -> float:
        """Time after a good round for which the agents rely on the service, and what it suspended stays so, seconds."""
        return max(MISSED_ROUNDS * self.service.poll_s, MIN_TRUST_S)

    @property
    def allocates(self) -> bool:
        """True if an allocation gives out CPUs and memory."""
        return self.policy.allocate != KEEP_REQUESTS

    @property
    def profiled(self) -> bool:
        """True if profiles decide how CPUs and memory are given out."""
        return entry("allocation", self.policy.allocate).profiled


def load_settings(path: Path | None) -> Settings:
    """Return the settings in ``path``; without one, in the default file, or the defaults when there is none.

    Raise ``cadenza.sidecar.config.ConfigError`` naming each wrong key with its file and line.
    """
    if path is None and not DEFAULT_PATH.exists():
        return Settings()
    return load(path or DEFAULT_PATH, Settings, also=_wrong_names)


def _wrong_names(settings: Settings) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the keys that name no policy, and why."""
    kinds: tuple[tuple[Kind, str], ...] = (("ordering", "order"), ("allocation", "allocate"), ("sharing", "share"))
    for kind, key in kinds:
        try:
            entry(kind, getattr(settings.policy, key))
        except InputError as error:
            yield ("policy", key), str(error)


def guard_settings(settings: Settings) -> GuardSettings:
    """Return the guard's settings; the kill switch is looked up now, so call it before each action."""
    killed = _is_set(Path(settings.expert.kill_switch))
    return GuardSettings(
        **_values(GuardOptions, settings.guard),
        min_run_s=settings.expert.min_run_s,
        enforce=settings.applies,
        killed=killed,
    )


def _is_set(switch: Path) -> bool:
    """Return True unless the kill switch is known to be absent: nothing is done when it cannot be looked up."""
    try:
        switch.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def sharing_settings(settings: Settings) -> SharingSettings:
    """Return the settings of the sharing policies."""
    return SharingSettings(
        **_values(SharingOptions, settings.sharing),
        enforce=settings.applies,
        min_run_s=settings.expert.min_run_s,
        lease_wait_s=settings.expert.lease_wait_s,
        # The managed job in its way must be gone before the SPANK plugin lets a job start without a lease.
        unmanaged_wait_s=SPANK_WAIT_S / 3,
        place=settings.policy.place,
        level_points=settings.expert.level_points,
        partitions=settings.guard.partitions,
        floor=True,
    )


def policy_settings(settings: Settings) -> PolicySettings:
    """Return the settings of the policies that ``[policy]`` names."""
    gandiva, expert = settings.gandiva, settings.expert
    return PolicySettings(
        partitions=settings.guard.partitions,
        costs=Costs(move_s=expert.move_s, round_s=settings.service.poll_s),
        sharing=sharing_settings(settings),
        gandiva=GandivaSettings(
            pack=gandiva.pack,
            elastic=gandiva.elastic,
            migrate=gandiva.moves,
            defrag=gandiva.moves,
            relieve=gandiva.moves,
            move_s=expert.move_s,
            move_every_s=expert.move_every_s,
            idle_s=expert.idle_s,
            measure_s=expert.measure_s,
        ),
        size_pending=expert.size_pending,
        phased_moves=True,
        prefetch=settings.policy.prefetch,
    )


def policy(settings: Settings) -> Decide:
    """Return ``decide(snapshot, memory)`` under these settings, as a round calls it; pure, so a replay calls it too."""
    table = settings.policy
    return build(table.order, table.allocate, table.share, policy_settings(settings)).decide


def _values(options: type, table: object) -> dict[str, Any]:
    """Return a table's values of the fields that the policies' options have."""
    return {field.name: getattr(table, field.name) for field in fields(options)}


def gpu_memory(settings: Settings) -> dict[str, float]:
    """Return the memory of a GPU by type, GB; under "" that of types that are not named."""
    pairs = (text.partition("=") for text in settings.policy.gpu_memory_gb)
    return {kind: float(size) for kind, _, size in pairs}


def hub_settings(settings: Settings) -> HubSettings:
    """Return the settings of the agents' link."""
    return HubSettings(
        settings.service.bind,
        Path(settings.service.keys),
        settings.expert.heartbeat_s,
        max(ALIVE_HEARTBEATS * settings.expert.heartbeat_s, MIN_ALIVE_S),
        settings.sharing.yield_timeout_s,
        frozenset(settings.service.relays),
    )


def to_record(settings: Settings) -> str:
    """Return the settings as the store keeps them with the rounds that they decided."""
    return msgspec.json.encode(settings, order="deterministic").decode()


def from_record(text: str) -> Settings:
    """Return the settings of :func:`to_record`; raise StoreError for others."""
    try:
        return msgspec.json.decode(text, type=Settings)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the settings of a round on record cannot be read: {error}") from None
