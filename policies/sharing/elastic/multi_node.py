"""Grow and shrink by whole hosts: a job of several hosts keeps its GPUs on each, gives hosts back and gets others.

It is one that asked for several nodes; for a while it may run on one. Between its limits any number of hosts will do,
for its ranks meet anew at each start. All its hosts are in one lane, for two lanes of a host are the same GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from cadenza.policies.core.model import Job, Placement
from cadenza.policies.sharing.board.host import HostState, Seat
from cadenza.policies.sharing.board.resource_request import ResourceRequest
from cadenza.policies.sharing.state.round_state import RoundState, share_of


class MultiNodeJob(NamedTuple):
    """A job of several hosts, and on how many it can run."""

    job: Job
    request: ResourceRequest
    """Resources that it has on each of them."""
    hosts: tuple[HostState, ...]
    least: int
    most: int

    @property
    def spare(self) -> int:
        """Return how many hosts it can give back."""
        return len(self.hosts) - self.least


def multi_node_job(state: RoundState, job: Job) -> MultiNodeJob | None:
    """Return a job's hosts; None for a job of one host, and for one that has not the same on each."""
    if state.asked_nodes(job) < 2:  # noqa: PLR2004 - one host is
        return None
    hosts = tuple(state.where.by_node[name] for name in job.nodes if name in state.where.by_node)
    residents = [host.residents[job.key] for host in hosts if job.key in host.residents]
    requests, lanes = (
        {resident.request for resident in residents},
        {state.where.lane_of(resident.lane) for resident in residents},
    )
    if len(residents) != len(job.nodes) or len(requests) != 1 or len(lanes) != 1:
        return None
    (request,), sizes = requests, state.sizes(job)
    return MultiNodeJob(job, request, hosts, max(-(-sizes[0] // request.gpus), 1), sizes[-1] // request.gpus)


def give_back(state: RoundState, wide: MultiNodeJob, hosts: Collection[HostState], reason: str) -> None:
    """Continue a job without some of its hosts."""
    leaving = {host.name for host in hosts}
    state.resize_nodes(wide.job, _shares(wide, [host for host in wide.hosts if host.name not in leaving]), reason)
    for host in hosts:
        host.leave(host.residents[wide.job.key])


def grow_by_hosts(state: RoundState, wide: MultiNodeJob, idle: Iterable[HostState], most: int) -> None:
    """Continue a job on more hosts, of those whose GPUs are free, on ``most`` in all."""
    seats = [(host, seat) for host in idle if (seat := _seat(state, wide, host)) is not None]
    more = seats[: max(min(most, wide.most) - len(wide.hosts), 0)]
    if not more:
        return
    shares = (*_shares(wide, wide.hosts), *(share_of(seat.node.name, wide.request) for _, seat in more))
    names = ", ".join(host.name for host, _ in more)
    state.resize_nodes(
        wide.job, tuple(sorted(shares)), f"grows to {len(shares)} hosts: the GPUs of {names} have been idle"
    )
    for host, seat in more:
        host.enter(wide.job, wide.request, seat)


def _seat(state: RoundState, wide: MultiNodeJob, host: HostState) -> Seat | None:
    """Return the GPUs that a job would have on one more host, in its lane and to itself."""
    first, key = wide.hosts[0], wide.job.key
    if (
        key in host.residents
        or first.lanes[0].gpu_type != host.lanes[0].gpu_type
        or not state.admits(host, wide.request)
    ):
        return None
    lane, gpus_known = (
        state.where.lane_of(first.residents[key].lane),
        all(resident.gpus for resident in host.residents.values()),
    )
    seats = (seat for seat in host.seats(wide.request) if gpus_known and seat.lane == lane and seat.sharers == 0)
    return next(seats, None)


def _shares(wide: MultiNodeJob, hosts: Iterable[HostState]) -> Placement:
    return tuple(sorted(share_of(host.residents[wide.job.key].lane, wide.request) for host in hosts))
