"""The link to the policy service: a ZeroMQ DEALER with CURVE, reports up, orders down."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import zmq
import zmq.auth

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.core.text import printable
from cadenza.sidecar import orders
from cadenza.sidecar.config import ConfigError
from cadenza.sidecar.frames import ERRORS, TO_AGENT, OtherVersionError

log = logging.getLogger(__name__)

SERVICE_KEY = "service.key"
AGENT_KEY = "agents/{host}.key_secret"
MAX_QUEUED = 10_000
"""Messages kept while the service is away; newer ones are dropped (telemetry may lose data)."""


def read_keys(directory: Path, host: str) -> tuple[bytes, bytes, bytes] | None:
    """Return the public and secret key of a host's agent and the service's public key, or None if one is missing.

    Raise ConfigError for a file that exists and is no key (:func:`zmq.auth.create_certificates` writes them).
    """
    ours, theirs = directory / AGENT_KEY.format(host=host), directory / SERVICE_KEY
    missing = [str(path) for path in (ours, theirs) if not path.exists()]
    if missing:
        log.error("no link to the service, turns are local: %s missing (cadenza keygen)", ", ".join(missing))
        return None
    public, secret = _certificate(ours)
    server, _ = _certificate(theirs)
    if secret is None:
        raise ConfigError(f"{ours}: holds no secret key; make keys with `cadenza keygen`")
    return public, secret, server


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    """Return a certificate file's keys; raise ConfigError naming the file."""
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a CURVE certificate: {error}") from None
    for key in (public, secret):
        if key is not None and len(key) != 40:  # noqa: PLR2004 - Z85 of 32 bytes
            raise ConfigError(f"{path}: not a CURVE certificate: a key has {len(key)} characters, not 40")
    return public, secret


class Link:
    """One DEALER; neither sending nor receiving waits."""

    def __init__(self, address: str, keys: tuple[bytes, bytes, bytes]) -> None:
        self._encoder = msgspec.json.Encoder()
        self.refused = 0
        """Frames, and rows of facts, that this version could not read."""
        self.dropped = 0
        """Messages that found the queue full."""
        self._spoken = orders.VERSION
        """Version of the service's last frame."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        try:
            self._connect(address, keys)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ConfigError(f"agent.service = {address!r}: {error}") from None

    def _connect(self, address: str, keys: tuple[bytes, bytes, bytes]) -> None:
        """Set up the socket; the connection itself comes and goes in the background."""
        if not zmq.has("curve"):
            raise EnvironmentLacks("this libzmq has no CURVE; install one built with libsodium")
        options: dict[int, int | bytes] = {
            # Without it the end of the agent would wait for a service that is away.
            zmq.LINGER: 0,
            zmq.SNDHWM: MAX_QUEUED,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2000,
            # A host that loses its power closes no connection: without heartbeats the link would look alive.
            zmq.HEARTBEAT_IVL: 5000,
            zmq.HEARTBEAT_TIMEOUT: 15000,
            # The service knows each host by its own key: a message cannot claim another host's name.
            zmq.CURVE_PUBLICKEY: keys[0],
            zmq.CURVE_SECRETKEY: keys[1],
            zmq.CURVE_SERVERKEY: keys[2],
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)
        self.socket.connect(address)

    def send(self, messages: Iterable[orders.FromAgent]) -> None:
        """Queue messages for the service; those that do not fit are dropped and counted."""
        for message in messages:
            try:
                self.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self.dropped += 1
            except (msgspec.MsgspecError, ValueError) as error:
                self.dropped += 1
                log.error("not sent: %s: %s", type(message).__name__, printable(str(error)))  # noqa: TRY400

    def receive(self) -> Iterator[orders.ToAgent]:
        """Yield the orders that have come in; refused frames are counted and logged, another version once."""
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            order = self._decode(frame)
            if order is not None:
                yield order

    def _decode(self, frame: bytes) -> orders.ToAgent | None:
        """Return an order, or None for a frame that holds none."""
        before, self._spoken = self._spoken, orders.VERSION
        try:
            order, errors = TO_AGENT.decode(frame)
        except OtherVersionError as error:
            self._spoken = error.theirs
            self.refused += 1
            if before != self._spoken:
                text = "an order was refused: %s, this agent speaks %d; turns are local until both are of one build"
                log.error(text, error, orders.VERSION)  # noqa: TRY400
            return None
        except ERRORS as error:
            self.refused += 1
            log.warning("an order was refused: %s", printable(str(error)))
            return None
        for row_error in errors:
            self.refused += 1
            log.warning("facts on a job were refused: %s", printable(row_error))
        return order

    def close(self) -> None:
        """Disconnect; unsent messages are lost."""
        self.socket.close()
        self._context.term()
