"""The parts of the store that are about the jobs that a user may see, for ``top`` and ``report``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import ceil, floor

import msgspec

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.idle_gpus import HostGpus, free_gpus, held_gpus
from cadenza.policies.core.model import Gpu, JobKey
from cadenza.sidecar.clock import local
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.accounting.sharing_report import Record, SharingReport, sharing_report
from cadenza.slurm_plugin.service.accounting.usage import HOUR_S
from cadenza.slurm_plugin.service.job_access import Viewer
from cadenza.slurm_plugin.service.store import record_codec
from cadenza.slurm_plugin.service.store.reader import ActionRow, Round, StoreReader, SwitchRow


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
    jobs = tuple(job for job in last.snapshot.jobs if viewer.may_read(job.user, job.account))
    keys, ids = {job.key for job in jobs}, {job.key.id for job in jobs}
    others = [job for job in last.snapshot.jobs if job.key not in keys]
    return Latest(
        last.number,
        last.at_s,
        record_codec.encode_snapshot(replace(last.snapshot, jobs=jobs)).decode(),
        tuple(sorted((key, text) for key, text in last.decision.reasons.items() if key in keys)),
        last.settings,
        tuple(row for row in actions if row.job in ids),
        tuple(row for row in switches if row.job in ids),
        tuple(row for row in effects if viewer.may_read(row.user) or row.job in ids),
        tuple(free_gpus(last.snapshot)),
        tuple(sorted((gpu, job.key.id if viewer.ids else 0) for job in others for gpu in held_gpus([job]))),
    )


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
