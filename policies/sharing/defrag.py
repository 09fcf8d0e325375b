"""Defragmentation (Gandiva, OSDI'18, §4.2): empty the host in use that has the most free GPUs.

Its jobs go to hosts that have no more free GPUs, where that costs next to nothing, until every host in use has
less than 3 of 4 of its GPUs free, or no job can go.
"""

from __future__ import annotations

from cadenza.policies.sharing.hosts import HostBook, Seat, Tenant
from cadenza.policies.sharing.moves import Moves


def defragment(moves: Moves) -> None:
    """Plan this round's moves; each makes a fuller host fuller, so they end."""
    if not (moves.gandiva.introspective and moves.gandiva.defrag):
        return
    for source in sorted(moves.hosts.values(), key=lambda host: (-_free(host), host.name)):
        if source.sizes and _free(source) >= moves.gandiva.free_share * source.gpus:
            _empty(moves, source)


def _free(host: HostBook) -> int:
    return host.gpus - host.given


def _empty(moves: Moves, source: HostBook) -> None:
    """Move what can go from a host."""
    for tenant in list(moves.tenants(source)):
        found = _fuller(moves, source, tenant) if _negligible(moves, tenant) else None
        if found is not None:
            target, seat = found
            why = f"moves from {tenant.lane} to {seat.node.name}, so that {source.name} is free for larger jobs"
            moves.migrate(tenant.job, target, seat, tenant.ask, why)


def _negligible(moves: Moves, tenant: Tenant) -> bool:
    return moves.gandiva.move_s <= moves.gandiva.loss * moves.left_s(tenant.job)


def _fuller(moves: Moves, source: HostBook, tenant: Tenant) -> tuple[HostBook, Seat] | None:
    """Return idle GPUs on the host with the fewest free ones, hosts of the job's class first."""
    found = [
        ((host.affinity != tenant.ask.gpus, _free(host), host.name), host, seat)
        for host in moves.hosts.values()
        if host.sizes and host is not source and tenant.ask.gpus <= _free(host) <= _free(source)
        for seat in [moves.seat(host, tenant.ask)]
        if seat is not None and seat.crowd == 0
    ]
    return min(found, key=lambda row: row[0])[1:] if found else None
