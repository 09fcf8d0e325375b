"""The parts of the store that are about the jobs that a user may see, for ``top`` and ``report``."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from math import ceil, floor
from typing import NamedTuple, TypeVar

import msgspec

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.idle_gpus import HostGpus, free_gpus, held_gpus
from cadenza.policies.core.model import ClusterSnapshot, Gpu, JobKey
from cadenza.sidecar.clock import local
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.accounting.sharing_report import Record, SharingReport, sharing_report
from cadenza.slurm_plugin.service.accounting.usage import HOUR_S
from cadenza.slurm_plugin.service.job_access import Viewer
from cadenza.slurm_plugin.service.store import record_codec
from cadenza.slurm_plugin.service.store.reader import ActionRow, JobRecord, Round, StoreReader, SwitchRow

Row = TypeVar("Row", bound=msgspec.Struct)
TEXTS = frozenset({"reason", "rule", "error", "detail", "was", "now"})
"""Fields of the store's rows in which sentences stand."""
ANOTHER_HOST = "another host"
_NAME = re.compile(r"\w(?:[\w.-]*\w)?")


class Latest(msgspec.Struct, frozen=True):
    """The last round and recent rows, newest first; ``snapshot`` is as ``record_codec`` writes it."""

    number: int = 0
    at_s: float = 0.0
    snapshot: str = ""
    reasons: tuple[tuple[JobKey, str], ...] = ()
    settings: str = ""
    actions: tuple[ActionRow, ...] = ()
    switches: tuple[SwitchRow, ...] = ()
    effects: tuple[Effect, ...] = ()
    hosts: tuple[HostGpus, ...] = ()
    """All hosts, with the GPUs that no job holds."""
    others: tuple[tuple[Gpu, int], ...] = ()
    """GPUs that jobs of other users hold, and which job, or 0 where Slurm does not show it either; never whose."""

    def round(self) -> Round | None:
        """Return the round without what only the service needs; None when none is on record."""
        if not self.number:
            return None
        snapshot = record_codec.decode_snapshot(self.snapshot.encode())
        decision = Decision((), Memory(), dict(self.reasons))
        return Round(self.number, self.at_s, snapshot, Memory(), decision, Memory(), None, self.settings)


def own_part(
    last: Round | None,
    viewer: Viewer,
    actions: Collection[ActionRow],
    switches: Collection[SwitchRow],
    effects: Collection[Effect],
) -> Latest:
    """Return a user's part of a round and of these rows; of other jobs only the GPUs that they hold."""
    if last is None:
        return Latest()
    own = own_snapshot(last.snapshot, viewer)
    keys, ids = {job.key for job in own.jobs}, {job.key.id for job in own.jobs}
    others = [job for job in last.snapshot.jobs if job.key not in keys]
    hosts, nodes, veil = {node.host for node in own.nodes}, own.host_of, Veil.over(last.snapshot, own)
    holders = {gpu: job.key.id if viewer.ids else 0 for job in others for gpu in held_gpus([job])}
    return Latest(
        last.number,
        last.at_s,
        record_codec.encode_snapshot(own).decode(),
        tuple(sorted((key, veil.text(text)) for key, text in last.decision.reasons.items() if key in keys)),
        last.settings,
        tuple(veil.row(row) for row in actions if row.job in ids),
        tuple(row for row in switches if row.job in ids),
        tuple(veil.row(row) for row in effects if viewer.may_read(row.user) or row.job in ids),
        tuple(host for host in free_gpus(last.snapshot) if host.name in nodes),
        tuple(sorted((gpu, job) for gpu, job in holders.items() if gpu.host in hosts)),
    )


def own_snapshot(snapshot: ClusterSnapshot, viewer: Viewer) -> ClusterSnapshot:
    """Return a user's part: their jobs, and the hosts of these where Slurm shows users no others."""
    jobs = tuple(job for job in snapshot.jobs if viewer.may_read(job.user, job.account))
    if viewer.hosts or viewer.everything:
        return replace(snapshot, jobs=jobs)
    names = {snapshot.host_of.get(name, name) for job in jobs for name in job.nodes}
    names |= {gpu.host for job in jobs for gpu in job.leased_gpus}
    nodes = tuple(node for node in snapshot.nodes if node.host in names)
    shown = {node.name for node in nodes}
    jobs = tuple(replace(job, barred=job.barred & shown) for job in jobs)
    return replace(snapshot, jobs=jobs, nodes=nodes, hosts=tuple(host for host in snapshot.hosts if host.name in names))


class Veil(NamedTuple):
    """The names that a user may not read in the texts about their jobs: those of the hosts that Slurm hides."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def over(cls, everything: ClusterSnapshot, own: ClusterSnapshot) -> Veil:
        """Return the veil over the nodes of which the user has no part."""
        if len(own.nodes) == len(everything.nodes):
            return cls()
        seen = {name for node in own.nodes for name in (node.name, node.host)}
        return cls(frozenset(name for node in everything.nodes for name in (node.name, node.host)) - seen)

    def text(self, text: str) -> str:
        """Return a text without those names."""
        return _NAME.sub(lambda found: ANOTHER_HOST if found[0] in self.hidden else found[0], text)

    def row(self, row: Row) -> Row:
        """Return a row of the store without those names."""
        names = TEXTS & {*row.__struct_fields__} if self.hidden else ()
        return msgspec.structs.replace(row, **{name: self.text(getattr(row, name)) for name in names})

    def record(self, record: JobRecord) -> JobRecord:
        """Return a job's record without those names."""
        parts = (record.actions, record.events, record.effects)
        actions, events, effects = (tuple(self.row(one) for one in part) for part in parts)
        job = record.job and replace(record.job, barred=record.job.barred - self.hidden)
        return msgspec.structs.replace(self.row(record), job=job, actions=actions, events=events, effects=effects)


def recorded_report(reader: StoreReader, since_s: float, until_s: float, user: str | None) -> SharingReport:
    """Return the effect of sharing in the recorded whole hours between two moments, without a replayed Slurm.

    Raise InputError if nothing, or nothing of the user, is on record there.
    """
    watched = reader.watched()
    from_s, to_s = floor(since_s / HOUR_S) * HOUR_S, min(ceil(until_s / HOUR_S) * HOUR_S, reader.last_round_s())
    within = {hour: seconds for hour, seconds in watched.items() if from_s <= hour * HOUR_S < to_s}
    if not within:
        hint = "is cadenzad running?"
        if watched:
            hint = f"on record: {local(min(watched) * HOUR_S)} to {local((max(watched) + 1) * HOUR_S)}"
        raise InputError(f"{reader.path}: nothing on record from {local(since_s)} to {local(until_s)}; {hint}")
    hours = reader.hours(from_s, to_s)
    users = sorted({row.user for row in hours})
    if user is not None and user not in users:
        raise InputError(
            f"--user {user}: no job of this user from {local(from_s)} to {local(to_s)}; on record: {', '.join(users)}"
        )
    starts, effects = reader.starts(from_s, to_s), reader.effects(from_s, to_s)
    first_starts, idle_gpu_s = reader.first_starts(from_s, to_s), reader.idle_gpu_s(from_s, to_s)
    return sharing_report(Record(from_s, to_s, within, hours, starts, effects, first_starts, idle_gpu_s), user)
