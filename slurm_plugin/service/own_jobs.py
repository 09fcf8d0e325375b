"""The part of the last round that is about the jobs of one user, for ``top`` (pure)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.idle_gpus import HostGpus, free_gpus, held_gpus
from cadenza.policies.core.model import Gpu, JobKey
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.store import record_codec
from cadenza.slurm_plugin.service.store.reader import ActionRow, Round, SwitchRow


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
    others: tuple[Gpu, ...] = ()
    """GPUs that jobs of other users hold; whose they are stays untold."""

    def round(self) -> Round | None:
        """Return the round without what only the service needs; None when none is on record."""
        if not self.number:
            return None
        snapshot = record_codec.decode_snapshot(self.snapshot.encode())
        decision = Decision((), Memory(), dict(self.reasons))
        return Round(self.number, self.at_s, snapshot, Memory(), decision, Memory(), None, self.settings)


def own_part(
    last: Round | None,
    user: str,
    actions: Collection[ActionRow],
    switches: Collection[SwitchRow],
    effects: Collection[Effect],
) -> Latest:
    """Return a user's part of a round and of these rows; of other jobs only the GPUs that they hold."""
    if last is None:
        return Latest()
    jobs = tuple(job for job in last.snapshot.jobs if job.user == user)
    keys, ids = {job.key for job in jobs}, {job.key.id for job in jobs}
    return Latest(
        last.number,
        last.at_s,
        record_codec.encode_snapshot(replace(last.snapshot, jobs=jobs)).decode(),
        tuple(sorted((key, text) for key, text in last.decision.reasons.items() if key in keys)),
        last.settings,
        tuple(row for row in actions if row.job in ids),
        tuple(row for row in switches if row.job in ids),
        tuple(row for row in effects if row.user == user),
        tuple(free_gpus(last.snapshot)),
        tuple(sorted(held_gpus(job for job in last.snapshot.jobs if job.user != user))),
    )
