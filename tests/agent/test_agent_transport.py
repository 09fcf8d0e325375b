"""The last packets of a peer that went are read, even if packets to it were under way."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from cadenza.sidecar import wire
from cadenza.sidecar.agent.ipc.processes import peer_of
from cadenza.sidecar.agent.ipc.transport import Outbox, Session

Pair = tuple[Session, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The agent's end of a connection, and the peer's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield Session(ours, peer_of(ours)), theirs


def flush(session: Session) -> list[Session]:
    outbox = Outbox()
    outbox.post(session, "stop", order=1, step=2)
    return outbox.flush()


def said(session: Session) -> list[str]:
    """Return the types of all that is still to be read, up to the end."""
    return [wire.decode(packet)["type"] for packet in iter(session.receive, b"") if packet is not None]


def test_last_words_are_read_after_a_message_could_not_be_sent(pair: Pair) -> None:
    session, peer = pair
    peer.send(wire.encode("detach"))
    peer.close()
    assert not flush(session), "not lost before it was heard"
    assert said(session) == ["detach"]


def test_last_words_are_read_after_the_peer_left_a_message_unread(pair: Pair) -> None:
    session, peer = pair
    assert not flush(session)
    peer.send(wire.encode("detach"))
    peer.close()
    assert said(session) == ["detach"]


def test_one_that_has_stopped_reading_is_given_up(pair: Pair) -> None:
    session, _ = pair
    outbox = Outbox()
    for step in range(10_000):
        outbox.post(session, "stop", order=1, step=step)
    assert outbox.flush() == [session]
