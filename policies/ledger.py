"""What to remember of the actions that really left: the policy's memory, kept true to the snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from cadenza.policies.model import (
    Action,
    ClusterSnapshot,
    DrainNode,
    Memory,
    OpenNode,
    Place,
    Release,
    Suspend,
    Yield,
)


def remember(memory: Memory, actions: Iterable[Action], snapshot: ClusterSnapshot) -> Memory:
    """Return ``memory`` with this round's allowed actions added and everything that is over dropped.

    A suspend that never took effect, or that somebody undid, is forgotten at the next round because the
    snapshot does not show it; so no action needs to be undone here when it fails.
    """
    acted = tuple(actions)
    alive = {job.key for job in snapshot.jobs}
    suspended = {job.key for job in snapshot.jobs if job.state == "SUSPENDED"} & memory.suspended
    drained = {node.name for node in snapshot.nodes if node.drained} & memory.drained
    opened = {action.node for action in acted if isinstance(action, OpenNode)}
    yields = {action.job: snapshot.time_s for action in acted if isinstance(action, Yield)}
    return Memory(
        suspended=frozenset(suspended | {action.job for action in acted if isinstance(action, Suspend)}),
        placed=frozenset(
            (memory.placed & alive) | {action.job for action in acted if isinstance(action, Place | Release)}
        ),
        drained=frozenset((drained | {action.node for action in acted if isinstance(action, DrainNode)}) - opened),
        last_yield_s={key: at for key, at in (*memory.last_yield_s.items(), *yields.items()) if key in alive},
    )
