"""What happens on the agents' side between two rounds: it starts one early and goes on record."""

from __future__ import annotations

import msgspec

from cadenza.sidecar.orders import LeaseReport, Prefetched, Report


class Event(msgspec.Struct, frozen=True):
    """One change on a host.

    ``kind`` is registered, finished, state, ready, saved, lost, note, prefetched, or agent-up and -down.
    """

    at_s: float
    kind: str
    host: str
    job: int | None = None
    restart: int | None = None
    detail: str = ""


def changes(before: Report | None, after: Report, at_s: float) -> tuple[Event, ...]:
    """Return what differs between two reports of one host; counters and times alone are no event."""
    old = {(lease.job, lease.restart): lease for lease in before.leases} if before else {}
    new = {(lease.job, lease.restart): lease for lease in after.leases}
    gone = tuple(
        Event(at_s, "finished", after.host, *key, f"was {lease.state}") for key, lease in old.items() if key not in new
    )
    return (
        *gone,
        *(event for key, lease in new.items() for event in _lease_changes(after.host, old.get(key), lease, at_s)),
        *(
            _prefetched(after.host, one, at_s)
            for one in after.prefetched
            if before is None or one not in before.prefetched
        ),
    )


def _prefetched(host: str, prefetched: Prefetched, at_s: float) -> Event:
    read = f"{prefetched.files} files, {prefetched.bytes >> 20} MB in {prefetched.seconds:.1f} s"
    return Event(at_s, "prefetched", host, prefetched.job, prefetched.restart, prefetched.note or read)


def _lease_changes(host: str, old: LeaseReport | None, new: LeaseReport, at_s: float) -> tuple[Event, ...]:
    if old is None:
        return (Event(at_s, "registered", host, new.job, new.restart, new.state),)
    found = []
    if old.state != new.state:
        found.append(Event(at_s, "state", host, new.job, new.restart, f"{old.state} -> {new.state}"))
    if old.ready != new.ready:
        found.append(Event(at_s, "ready", host, new.job, new.restart, new.why_not_ready))
    if new.saved and not old.saved:
        found.append(Event(at_s, "saved", host, new.job, new.restart, new.note))
    if new.lost and not old.lost:
        found.append(Event(at_s, "lost", host, new.job, new.restart, new.lost))
    if new.note and old.note != new.note:
        found.append(Event(at_s, "note", host, new.job, new.restart, new.note))
    return tuple(found)
